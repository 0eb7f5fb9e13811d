//! A thousand peers of one node: the cost of each at rest, on both sides, and the effect on the cost of a slice.
//!
//! The other process is one shard that listens on every loopback address; each address is a peer of its own to the
//! initiator, with connections of its own. So the peers are real connections, and only their engines are shared.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, PeerAddress, PeerId, Request, SegmentTarget};
use kvplane_engine::{HostConfig, HugePages, Initiator, Listen, Pacing, Region, RegionOptions, ShardHandle};
use kvplane_proto::Status;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::SegmentDescriptor;
use kvplane_store::service::SegmentInfo;

use crate::Failure;
use crate::bed;
use crate::peer::Peer;
use crate::rounds::{Series, median};

const PEERS: usize = 1_000;
const BYTES: usize = 1 << 20;
const SMALL_BYTES: u64 = 4096;
const SMALL_TIMES: usize = 5_000;
const DEADLINE: Duration = Duration::from_secs(30);

/// Starts the other process: one region.
pub(crate) fn owner() -> Result<ShardHandle, Failure> {
    let shard = bed::shard(
        Pacing::Spin,
        Listen { tcp: (Ipv4Addr::UNSPECIFIED, 0).into(), shm: None, mooncake: None, handed: None },
    )?;
    let region = memory()?;
    let bytes = BYTES as u64;
    let address = region.address();
    let info = SegmentInfo { address, bytes, writable: true, shareable: false, remote_accessible: true };
    shard.register(info, region)?;
    Ok(shard)
}

fn memory() -> Result<std::sync::Arc<Region>, Failure> {
    let options = RegionOptions { huge: HugePages::Never, prefault: true, ..RegionOptions::new("many-peers", BYTES) };
    Ok(Region::allocate(&options)?)
}

struct Asker {
    initiator: Initiator,
    buffer: u32,
    segment: SegmentId,
    port: u16,
}

impl Asker {
    fn new(said: &str) -> Result<Self, Failure> {
        let port = said.parse::<SocketAddr>()?.port();
        let config = Config { cluster: "bench".to_owned(), shared: false, cma: false, ..Config::default() };
        let mut initiator = Initiator::new(config, &HostConfig::default(), Pacing::Spin)?;
        let buffer = initiator.add_buffer(memory()?);
        let mut asker = Self { initiator, buffer, segment: SegmentId::default(), port };
        let peer = asker.peer(0);
        let batch = asker.initiator.submit(&[Request::OpenSegment(peer)], DEADLINE)?;
        asker.initiator.wait(batch)?;
        let description = asker.initiator.take_description(batch).ok_or("the owner did not describe its memory")?;
        asker.initiator.release(batch);
        asker.segment = SegmentDescriptor::decode(&description)?.regions.first().ok_or("no region")?.segment;
        Ok(asker)
    }

    /// Returns the n-th peer: another loopback address of the same shard.
    fn peer(&mut self, number: usize) -> PeerId {
        let ip = Ipv4Addr::new(127, 1, (number / 250) as u8, (number % 250 + 1) as u8);
        self.initiator.open_peer(PeerAddress::native(SocketAddr::new(IpAddr::V4(ip), self.port), None))
    }

    fn read(&mut self, peer: PeerId) -> Result<(), Failure> {
        let target = SegmentTarget {
            peer,
            segment: self.segment,
            offset: 0,
            shareable: false,
            place: kvplane_client::Place::UNKNOWN,
        };
        let request = Request::Read(target, Local { buffer: self.buffer, offset: 0, bytes: SMALL_BYTES });
        let batch = self.initiator.submit(&[request], DEADLINE)?;
        self.initiator.wait(batch)?;
        let status = self.initiator.results(batch)[0].status;
        self.initiator.release(batch);
        if status == Status::Ok { Ok(()) } else { Err(status.into()) }
    }

    /// Returns the median time of a read from one peer, in microseconds.
    fn p50_us(&mut self, peer: PeerId) -> Result<f64, Failure> {
        let mut times = Vec::with_capacity(SMALL_TIMES);
        for _ in 0..SMALL_TIMES {
            let start = Instant::now();
            self.read(peer)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(&mut times))
    }
}

/// Returns the private memory of a process in bytes, without shared libraries.
fn private_bytes(process: &str) -> Result<u64, Failure> {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    let kib = |line: &str| line.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    Ok(text.lines().filter(|line| line.starts_with("Private_")).map(kib).sum::<u64>() * 1024)
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("many-peers: {PEERS} peers, each read from once and then at rest, over TCP");
    let peer = Peer::start(&["many-peers"])?;
    let served = peer.pid().to_string();
    let mut few = Series::new("read of 4 KiB, p50, 1 peer", "us");
    let mut many = Series::new(format!("read of 4 KiB, p50, {PEERS} peers"), "us");
    let (mut asking, mut answering) =
        (Series::new("asking, per peer", "KiB"), Series::new("answering, per peer", "KiB"));
    for _ in 0..rounds {
        let mut asker = Asker::new(&peer.said)?;
        let first = asker.peer(0);
        asker.p50_us(first)?;
        few.push(asker.p50_us(first)?);
        let before = (private_bytes("self")?, private_bytes(&served)?);
        for number in 1..PEERS {
            let peer = asker.peer(number);
            asker.read(peer)?;
        }
        let after = (private_bytes("self")?, private_bytes(&served)?);
        let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / 1024.0 / (PEERS - 1) as f64;
        asking.push(each(before.0, after.0));
        answering.push(each(before.1, after.1));
        asker.p50_us(first)?;
        many.push(asker.p50_us(first)?);
    }
    asking.show();
    answering.show();
    println!("  {:44} wanted: under 32 KiB", "");
    few.show();
    many.show();
    many.show_ratio(&few, "about 1");
    Ok(())
}
