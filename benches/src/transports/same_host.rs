//! Segments of another process on this host: through a mapping and by the kernel's copies (CMA), against memcpy of a
//! cold working set by one thread; and the latency of 4 KiB alone, by one spinning thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, PeerAddress, PeerId, Request, SegmentTarget};
use kvplane_engine::{HostConfig, HugePages, Initiator, Listen, Pacing, Region, RegionOptions, ShardHandle};
use kvplane_proto::Status;
use kvplane_proto::ids::SegmentId;
use kvplane_proto::message::SegmentDescriptor;
use kvplane_store::service::SegmentInfo;

use crate::Failure;
use crate::bed::{self, Directory};
use crate::peer::Peer;
use crate::rounds::{Series, median};

/// Size of each region, in bytes: far larger than a core's caches.
const BYTES: usize = 512 << 20;
/// Lengths of one request, with the number of requests of one batch.
const BLOCKS: [(usize, usize); 3] = [(1 << 20, 8), (64 << 10, 128), (4 << 10, 128)];
const SMALL_BYTES: u64 = 4096;
const SMALL_TIMES: usize = 50_000;
const DEADLINE: Duration = Duration::from_secs(30);

fn region(shared: bool) -> Result<Arc<Region>, Failure> {
    let options =
        RegionOptions { shared, huge: HugePages::Try, prefault: true, ..RegionOptions::new("same-host", BYTES) };
    Ok(Region::allocate(&options)?)
}

/// Runs the other process: two regions, one that can be mapped and one that cannot.
pub(crate) fn owner(directory: &str) -> Result<ShardHandle, Failure> {
    let shm = std::path::Path::new(directory).join("same-host.sock");
    let listen = Listen { tcp: ([127, 0, 0, 1], 0).into(), shm: Some(shm), mooncake: None, handed: None };
    let shard = bed::shard(Pacing::Park, listen)?;
    for shared in [true, false] {
        let region = region(shared)?;
        let info = SegmentInfo {
            address: region.address(),
            bytes: BYTES as u64,
            writable: true,
            shareable: shared,
            remote_accessible: true,
        };
        shard.register(info, region)?;
    }
    Ok(shard)
}

struct Asker {
    initiator: Initiator,
    peer: PeerId,
    buffer: u32,
    /// Region that can be mapped, and one that cannot.
    segments: [SegmentId; 2],
}

impl Asker {
    fn new(tcp: &str, directory: &str) -> Result<Self, Failure> {
        let config = Config { cluster: "bench".to_owned(), stream: false, slice_bytes: 1 << 20, ..Config::default() };
        let mut initiator = Initiator::new(config, &HostConfig::default(), Pacing::Spin)?;
        let buffer = initiator.add_buffer(region(false)?);
        let peer = initiator.open_peer(PeerAddress::native(tcp.parse()?, Some(format!("{directory}/same-host.sock"))));
        let batch = initiator.submit(&[Request::OpenSegment(peer)], DEADLINE)?;
        initiator.wait(batch)?;
        let description = initiator.take_description(batch).ok_or("the owner did not describe its memory")?;
        initiator.release(batch);
        let regions = SegmentDescriptor::decode(&description)?.regions;
        let [mapped, alone] = regions[..] else { return Err("the owner has two regions".into()) };
        Ok(Self { initiator, peer, buffer, segments: [mapped.segment, alone.segment] })
    }

    fn request(&self, mapped: bool, write: bool, at: u64, bytes: u64) -> Request {
        let segment = self.segments[usize::from(!mapped)];
        let target = SegmentTarget {
            peer: self.peer,
            segment,
            offset: at,
            shareable: mapped,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = Local { buffer: self.buffer, offset: at, bytes };
        if write { Request::Write(target, local) } else { Request::Read(target, local) }
    }

    fn run(&mut self, requests: &[Request]) -> Result<(), Failure> {
        let batch = self.initiator.submit(requests, DEADLINE)?;
        self.initiator.wait(batch)?;
        let failed = self.initiator.results(batch).iter().map(|result| result.status).find(|s| *s != Status::Ok);
        self.initiator.release(batch);
        failed.map_or(Ok(()), |status| Err(status.into()))
    }

    /// Returns the GB/s of one pass over everything.
    fn pass(&mut self, mapped: bool, write: bool, block: usize, batch: usize) -> Result<f64, Failure> {
        let start = Instant::now();
        for first in (0..BYTES).step_by(block * batch) {
            let blocks = (first..first + block * batch).step_by(block);
            let requests: Vec<_> = blocks.map(|at| self.request(mapped, write, at as u64, block as u64)).collect();
            self.run(&requests)?;
        }
        Ok(BYTES as f64 / 1e9 / start.elapsed().as_secs_f64())
    }

    /// Returns the median time of one small request alone, in microseconds.
    fn small(&mut self, mapped: bool, write: bool) -> Result<f64, Failure> {
        let mut times = Vec::with_capacity(SMALL_TIMES);
        for _ in 0..SMALL_TIMES {
            let request = self.request(mapped, write, 0, SMALL_BYTES);
            let start = Instant::now();
            self.run(&[request])?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(&mut times))
    }
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("same-host: {} MiB of another process, cold, against one thread's memcpy", BYTES >> 20);
    let directory = Directory::new()?;
    std::fs::create_dir_all(&directory.0)?;
    let peer = Peer::start(&["same-host", directory.text()])?;
    let mut asker = Asker::new(&peer.said, directory.text())?;
    let (source, mut destination) = (vec![1u8; BYTES], vec![2u8; BYTES]);
    let ways: Vec<(bool, bool)> = vec![(true, false), (true, true), (false, false), (false, true)];
    let name = |(mapped, write): (bool, bool)| {
        format!("{} {}", if mapped { "map" } else { "cma" }, if write { "write" } else { "read" })
    };
    for (block, batch) in BLOCKS {
        println!(" {batch} x {} KiB at a time", block >> 10);
        let mut memcpy = Series::new("memcpy", "GB/s");
        let mut series: Vec<Series> = ways.iter().map(|&way| Series::new(name(way), "GB/s")).collect();
        // The first pass maps and touches all pages.
        for &(mapped, write) in &ways {
            asker.pass(mapped, write, block, batch)?;
        }
        for _ in 0..rounds {
            let start = Instant::now();
            for (to, from) in destination.chunks_exact_mut(block).zip(source.chunks_exact(block)) {
                std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
            }
            memcpy.push(BYTES as f64 / 1e9 / start.elapsed().as_secs_f64());
            for (series, &(mapped, write)) in series.iter_mut().zip(&ways) {
                series.push(asker.pass(mapped, write, block, batch)?);
            }
        }
        memcpy.show();
        series.iter().for_each(Series::show);
        for (ours, (mapped, _)) in series.iter().zip(&ways) {
            ours.show_ratio(&memcpy, if *mapped && block >= 1 << 20 { "at least 0.9" } else { "no goal" });
        }
    }
    println!(" one of 4 KiB at a time");
    for way in ways {
        let mut series = Series::new(name(way), "us");
        for _ in 0..rounds {
            series.push(asker.small(way.0, way.1)?);
        }
        series.show();
    }
    Ok(())
}
