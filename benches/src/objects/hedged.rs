//! Costs of hedging in normal operation: gets by clients that hedge and by clients that do not, in turns, from three
//! nodes with two owners of each slot; their latencies, and the number of hedged requests.

use std::time::{Duration, Instant};

use kvplane::{Client, ClientConfig, Node, PutOptions, Region, RegionOptions};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};

use crate::Failure;
use crate::bed::{CLUSTER, Directory, another_node, client_config};
use crate::rounds::{Series, median};

const NODES: usize = 3;
const POOL_BYTES: u64 = 192 << 20;
const KEYS: usize = 64;
/// Number of gets of one client before the other has its turn.
const TURN: usize = 20;
const SIDES: [&str; 2] = ["hedged", "not hedged"];
/// Time limit for the replicas to exist.
const PATIENCE: Duration = Duration::from_secs(20);
/// Name, size of an object, number of concurrent clients, and gets of each.
const SHAPES: [(&str, usize, usize, usize); 3] = [
    ("4 KiB, one client", 4 << 10, 1, 10_000),
    ("4 KiB, 16 clients", 4 << 10, 16, 1_000),
    ("1 MiB, 4 clients", 1 << 20, 4, 250),
];

/// Three nodes, which stop before their control plane.
struct Three {
    nodes: Vec<Node>,
    _control: ControlHandle,
    directory: Directory,
}

impl Three {
    fn start() -> Result<Self, Failure> {
        let directory = Directory::new()?;
        let mut config = ControlConfig::new(CLUSTER);
        config.publish = Some(kvplane::rpc::RuntimeDirectory::at(&directory.0));
        config.cluster.replicas = 2;
        let control = ControlServer::start(config)?;
        let nodes = (0..NODES).map(|_| another_node(&directory.0, POOL_BYTES)).collect::<Result<_, _>>()?;
        Ok(Self { nodes, _control: control, directory })
    }

    /// Returns the number of requests that all shards have received.
    fn requests(&self) -> Result<u64, Failure> {
        let mut requests = 0;
        for node in &self.nodes {
            requests += node.snapshots()?.iter().map(|shard| shard.service.requests).sum::<u64>();
        }
        Ok(requests)
    }
}

fn client(directory: &Directory, hedge: Duration) -> Result<Client, Failure> {
    let config = client_config("tcp", "adaptive", directory.text())?;
    Ok(Client::connect(&ClientConfig { hedge, ..config })?)
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    let on = ClientConfig::HEDGE;
    println!(
        "hedged-gets: gets from {NODES} nodes, two owners of each slot, over TCP, with a hedge of {} ms and without",
        on.as_millis()
    );
    let three = Three::start()?;
    for (name, bytes, clients, gets) in SHAPES {
        let keys: Vec<String> = (0..KEYS).map(|key| format!("hedged-{bytes}-{clients}-{key}")).collect();
        fill(&three.directory, &keys, bytes)?;
        let series = |what: &str| SIDES.map(|side| Series::new(format!("{name}: {what}, {side}"), "us"));
        let (mut p50s, mut p99s) = (series("p50"), series("p99"));
        let (mut asked, before, mut gotten) = (0, three.requests()?, 0);
        for _ in 0..rounds {
            let (both, hedged) = gets_of(&three.directory, &keys, bytes, clients, gets)?;
            asked += hedged;
            for (at, mut took_us) in both.into_iter().enumerate() {
                gotten += took_us.len() as u64;
                p50s[at].push(median(&mut took_us));
                p99s[at].push(took_us[took_us.len() * 99 / 100]);
            }
        }
        for (series, wanted) in [(p50s, "1.00"), (p99s, "no target")] {
            series.iter().for_each(Series::show);
            series[0].show_ratio(&series[1], wanted);
        }
        let requests = three.requests()? - before;
        println!(
            "  {name}: {gotten} gets, half of them hedged, of which {asked} asked a second owner ({:.2} %; wanted: at \
             most 2 %); nodes took {requests} requests",
            200.0 * asked as f64 / gotten as f64
        );
    }
    Ok(())
}

/// Puts each object to two nodes.
fn fill(directory: &Directory, keys: &[String], bytes: usize) -> Result<(), Failure> {
    let (mut client, value) = (client(directory, Duration::ZERO)?, vec![0x5a; bytes]);
    let twice = PutOptions { replicas: 2, replace: true, ..PutOptions::default() };
    let begun = Instant::now();
    for key in keys {
        // The first puts may come before the nodes know each other.
        while client.replicas().put(key.as_bytes(), &value, &twice)?.1 < 2 {
            if begun.elapsed() > PATIENCE {
                return Err(format!("{key} has no second copy after {} s", PATIENCE.as_secs()).into());
            }
        }
    }
    Ok(())
}

/// Returns the time of each get in microseconds, of hedging clients and of others, and the number of requests that the
/// former sent to a replica owner. Threads with a client of each kind use both in turn, a few gets each, so that both
/// meet the same background load.
fn gets_of(
    directory: &Directory,
    keys: &[String],
    bytes: usize,
    threads: usize,
    gets: usize,
) -> Result<([Vec<f64>; 2], u64), Failure> {
    let each = &|number: usize| -> Result<([Vec<f64>; 2], u64), Failure> {
        let mut clients = Vec::new();
        for hedge in [ClientConfig::HEDGE, Duration::ZERO] {
            let mut client = client(directory, hedge)?;
            let memory = client.register(Region::allocate(&RegionOptions::new("hedged", bytes))?);
            clients.push((client, memory.slice(0, bytes)));
        }
        let mut took_us = [Vec::with_capacity(gets), Vec::with_capacity(gets)];
        for turn in 0..gets / TURN {
            for at in [turn % 2, 1 - turn % 2] {
                let (client, slice) = &mut clients[at];
                for get in 0..TURN {
                    let key = &keys[(turn * TURN + get + number * 7) % keys.len()];
                    let begun = Instant::now();
                    client.get_into(key.as_bytes(), *slice)?.ok_or("an object is missing")?;
                    took_us[at].push(begun.elapsed().as_nanos() as f64 / 1e3);
                }
            }
        }
        Ok((took_us, clients[0].0.hedged_gets()))
    };
    std::thread::scope(|scope| {
        let ask = |number| scope.spawn(move || each(number).map_err(|error| error.to_string()));
        let asking: Vec<_> = (0..threads).map(ask).collect();
        let (mut both, mut asked) = ([Vec::new(), Vec::new()], 0);
        for one in asking {
            let (took_us, hedged) = one.join().unwrap_or_else(|_| Err("a client panicked".to_owned()))?;
            both.iter_mut().zip(took_us).for_each(|(all, some)| all.extend(some));
            asked += hedged;
        }
        Ok((both, asked))
    })
}
