//! Tests of long objects among nodes of different sizes: results of each object of a batch, and effects of one that
//! never fits.

use std::time::Duration;

use kvplane::{
    AsyncClient, BatchOutcome, BeginOutcome, Buffer, Client, ClientConfig, Fill, Near, NodeId, Put, PutOptions, Region,
    RegionOptions, Slice, Status,
};
use kvplane_client::Request;
use kvplane_proto::map::OwnerTable;

use crate::support::{Process, Way, Workplace, health, http_get, text, wait_until};

/// Length above the limit of a shard of 32 MiB, and below that of one of 160 MiB.
const LONG: usize = 10 << 20;

fn value(key: &str, bytes: usize) -> Vec<u8> {
    let seed = key.bytes().fold(7, |sum: usize, byte| sum.wrapping_mul(31) ^ usize::from(byte));
    (0..bytes).map(|at| (seed.wrapping_mul(at | 1) >> 7 ^ at) as u8).collect()
}

/// Returns keys with this prefix that belong to this node.
fn keys_of(client: &Client, node: u64, begin: &str, count: usize) -> Vec<String> {
    let map = client.link().map().expect("a client has a map");
    let table = OwnerTable::compute(&map);
    let is_there = |key: &String| {
        let owner = table.owner_of(client.digest(key.as_bytes()).unwrap()).expect("an owner");
        map.members[usize::from(owner.member)].node == NodeId(node)
    };
    (0..).map(|at| format!("{begin}-{node}-{at}")).filter(is_there).take(count).collect()
}

fn cluster(place: &Workplace, pools: &[&str]) -> (Process, Vec<Process>) {
    let control = Process::start(place.command(&["control", "--state", text(&place.path("state"))]));
    control.wait_for("metrics on");
    let node =
        |(at, pool): (usize, &&str)| place.node(at as u64 + 1, &["--pool", pool, "--shards", "1", "--weight", "1"]);
    let nodes: Vec<Process> = pools.iter().enumerate().map(node).collect();
    let there = wait_until(|| (health(control.http())["members"] == pools.len()).then_some(()));
    assert_eq!(there, Some(()), "{} members", pools.len());
    (control, nodes)
}

/// Returns keys with the slices of their values.
fn items<'a>(buffer: &Buffer, keys: &'a [(String, usize)]) -> Vec<(&'a str, Slice)> {
    let mut at = 0;
    let item = |(key, bytes): &'a (String, usize)| {
        buffer.region().copy_in(at, &value(key, *bytes));
        at += bytes;
        (&key[..], buffer.slice(at - bytes, *bytes))
    };
    keys.iter().map(item).collect()
}

fn memory() -> std::sync::Arc<Region> {
    Region::allocate(&RegionOptions::new("stripes", 4 * LONG)).unwrap()
}

#[test]
fn each_object_of_a_batch_has_its_own_outcome() {
    let place = Workplace::new("outcomes");
    let _cluster = cluster(&place, &["32M", "160M"]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (way, futures) in [(Way::Shm, false), (Way::Tcp, false), (Way::Tcp, true)] {
        // A new client has not been refused any object yet.
        let client = &mut place.client(way);
        let begin = format!("{}-{futures}", way.name());
        let (refused, kept) = (keys_of(client, 1, &begin, 2), keys_of(client, 2, &begin, 1));
        let [first, second] = &refused[..] else { panic!("two keys") };
        let named = |name: &str| format!("{begin}-{name}");
        client.put(named("there").as_bytes(), &value(&named("there"), 4096)).unwrap();
        let keys = [
            (first.clone(), LONG),
            (kept[0].clone(), LONG),
            (named("there"), 4096),
            (second.clone(), LONG),
            (named("short"), 4096),
            (named("last"), 5000),
        ];
        let outcomes = if futures {
            let client = AsyncClient::connect(&place.client_config(way)).unwrap();
            let buffer = client.register(memory()).unwrap();
            runtime.block_on(client.batch_put_from(&items(&buffer, &keys))).unwrap()
        } else {
            let buffer = client.register(memory());
            client.batch_put_from(&items(&buffer, &keys)).unwrap()
        };
        for ((key, _), outcome) in keys.iter().zip(outcomes) {
            let put = outcome.unwrap_or_else(|error| panic!("{key}: {error}"));
            assert_eq!(put == Put::Exists, key.ends_with("there"), "{key}: {put:?}");
        }
        let reader = &mut place.client(way);
        for (key, bytes) in &keys {
            assert!(reader.get(key.as_bytes()).unwrap() == Some(value(key, *bytes)), "{key}");
        }
        assert_eq!(reader.keys().remove_all(false).unwrap(), keys.len() as u64);
    }
}

#[test]
fn batch_with_an_invalid_key_stores_no_object() {
    let place = Workplace::new("badkeys");
    let _cluster = cluster(&place, &["32M", "160M"]);
    let client = &mut place.client(Way::Tcp);
    let buffer = client.register(memory());
    let far = keys_of(client, 2, "far", 1).remove(0);
    for near in [Near::default(), Near { nodes: vec![NodeId(1)], together: false }] {
        client.placement().prefer(near);
        // Only that object is cut into stripes here; the first one would have been placed.
        let keys = [(far.clone(), 2 << 20), ("short".to_owned(), 4096), (String::new(), LONG)];
        let error = client.batch_put_from(&items(&buffer, &keys)).unwrap_err().to_string();
        assert!(error.contains("a key has 1 to 4096 bytes"), "{error}");
        assert_eq!(client.batch_exists(&[&far[..], "short"]).unwrap(), [false, false]);
        // The next batch then knows that objects of this length need stripes.
        client.put(keys_of(client, 1, "long", 1)[0].as_bytes(), &vec![7; LONG]).unwrap();
    }
}

#[test]
fn object_larger_than_the_pool_is_refused_and_evicts_no_other() {
    const OBJECTS: usize = 50;
    let place = Workplace::new("toobig");
    let dev = place.dev("64M", &["--shards", "1"]);
    // Until the node has reported its memory, clients do not know the limits.
    let told = wait_until(|| {
        let shown: serde_json::Value = serde_json::from_str(&http_get(dev.http(), "/debug/shards").1).ok()?;
        (shown["nodes"][0]["shards"][0]["pool"]["bytes"] == 64 << 20).then_some(())
    });
    assert_eq!(told, Some(()), "{}", http_get(dev.http(), "/debug/shards").1);
    let names: Vec<String> = (0..OBJECTS).map(|at| format!("there-{at}")).collect();
    let client = &mut place.client(Way::Tcp);
    for name in &names {
        client.put(name.as_bytes(), &value(name, 1 << 20)).unwrap();
    }
    for way in Way::BOTH {
        let mut putter = place.client(way);
        let error = putter.put(b"too-big", &vec![5; 70 << 20]).unwrap_err();
        assert_eq!(error.status(), Some(Status::TooLarge), "{error}");
        assert!(error.to_string().contains("73400320"), "{error}");
        assert_eq!(client.batch_exists(&names).unwrap(), vec![true; OBJECTS], "{}", way.name());
    }
    let file = place.file("big", &vec![5; 70 << 20]);
    place.run(&["ctl", "put", "too-big", text(&file)]).failed(1, &["73400320", "67108864"]);
    for name in &names {
        assert!(client.get(name.as_bytes()).unwrap() == Some(value(name, 1 << 20)), "{name}");
    }
    // A refused object has left nothing that blocks one that fits.
    client.keys().remove_all(false).unwrap();
    let fits = vec![9; 30 << 20];
    assert!(matches!(client.put(b"fits", &fits), Ok(Put::Stored(_))));
    assert!(client.get(b"fits").unwrap() == Some(fits));
}

/// Returns the results of exists, size and a list for the object under this key.
fn asked(client: &mut Client, key: &str) -> Vec<bool> {
    let (mut cursor, mut listed) = (None, false);
    loop {
        let page = client.keys().list(cursor).unwrap();
        listed |= page.keys.iter().any(|info| info.key == key.as_bytes());
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    let many = client.batch_exists(&["nobody", key]).unwrap();
    let ahead = client.batch_exists_ahead(&[key]).unwrap();
    let [alone, size] = [client.exists(key.as_bytes()).unwrap(), client.size(key.as_bytes()).unwrap().is_some()];
    vec![listed, many[1], ahead[0], alone, size]
}

/// A long object loses more and more stripes to evictions. Exists and size agree with a get; and a get that finds the
/// object broken removes the rest, so that it can be put again.
#[test]
fn a_long_object_that_lost_a_stripe_is_a_miss_for_every_operation() {
    let place = Workplace::new("broken");
    let _cluster = cluster(&place, &["64M"]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut lost = 0;
    for (round, way) in [Way::Tcp, Way::Shm].into_iter().cycle().enumerate().take(16) {
        let config = ClientConfig { stripe_bytes: 1 << 20, ..place.client_config(way) };
        let mut client = Client::connect(&config).unwrap();
        let later = AsyncClient::connect(&config).unwrap();
        let long = value("long", 16 << 20);
        client.put(b"long", &long).unwrap();
        for other in 0..20 + 4 * round {
            client.put(format!("other-{round}-{other}").as_bytes(), &vec![7; 1 << 20]).unwrap();
        }
        let mut answers = asked(&mut client, "long");
        answers.extend(runtime.block_on(later.batch_exists(&["long"])).unwrap());
        let got = client.get(b"long").unwrap();
        assert!(answers.iter().all(|there| *there == got.is_some()), "round {round}: {answers:?}, {}", got.is_some());
        assert!(got.is_none_or(|bytes| bytes == long), "round {round}");
        if !answers[0] {
            lost += 1;
            let digest = client.digest(b"long").unwrap();
            let head = client.run(&[Request::RemoveHead(digest)]).unwrap();
            assert_eq!(head[0].status, Status::NotFound, "round {round}: a get takes the head away");
            assert!(matches!(client.put(b"long", &long), Ok(Put::Stored(_))), "round {round}");
            assert!(asked(&mut client, "long").iter().all(|there| *there), "round {round}");
        }
        client.remove(b"long").unwrap();
    }
    assert!(lost > 0, "others never took a stripe");
}

/// Like above, but no get touches the broken object before another one is put under its key, in every way.
#[test]
fn a_short_object_replaces_the_remains_of_a_long_one() {
    let place = Workplace::new("remains");
    let _cluster = cluster(&place, &["64M"]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let config = ClientConfig { stripe_bytes: 1 << 20, ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    let later = AsyncClient::connect(&config).unwrap();
    let (long, short) = (value("long", 16 << 20), value("short", 1000));
    let buffer = client.register(Region::allocate(&RegionOptions::new("short", 1000)).unwrap());
    buffer.region().copy_in(0, &short);
    let theirs = later.register(Region::allocate(&RegionOptions::new("short", 1000)).unwrap()).unwrap();
    theirs.region().copy_in(0, &short);
    let mut ways = 0;
    for round in 0..100 {
        client.put(b"long", &long).unwrap();
        for other in 0..30 + 4 * (round % 16) {
            client.put(format!("other-{round}-{other}").as_bytes(), &vec![7; 1 << 20]).unwrap();
        }
        if client.exists(b"long").unwrap() {
            client.remove(b"long").unwrap();
            continue;
        }
        let put = match ways {
            0 => client.put(b"long", &short),
            1 => client.replicas().put(b"long", &short, &PutOptions::default()).map(|(put, _)| put),
            2 => runtime.block_on(later.put_from(b"long", theirs.slice(0, 1000))),
            3 => {
                let session = client.put_sessions().open(b"long", 1000, &PutOptions::default(), Duration::from_secs(5));
                let Ok(BeginOutcome::Session(session)) = session else { panic!("{session:?}") };
                let fill = Fill { session: &session, offset: 0, from: buffer.slice(0, 1000) };
                client.put_sessions().fill(&[fill]).unwrap().pop().unwrap().unwrap();
                client.put_sessions().commit(&session)
            }
            _ => {
                client.batches().start_puts(&[(b"long", buffer.slice(0, 1000))], &PutOptions::default()).unwrap();
                let finished = client.batches().next_finished().unwrap();
                let Some((_, BatchOutcome::Puts(mut puts))) = finished else { panic!("{finished:?}") };
                puts.pop().unwrap()
            }
        };
        assert!(matches!(put, Ok(Put::Stored(_))), "way {ways}: {put:?}");
        assert!(client.get(b"long").unwrap() == Some(short.clone()), "way {ways}");
        client.remove(b"long").unwrap();
        ways += 1;
        if ways == 5 {
            return;
        }
    }
    panic!("others took stripes {ways} times only");
}
