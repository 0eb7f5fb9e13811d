//! Tests of file segments through the whole client: split into slices, transferred by the kernel's queue, cancelled,
//! refused.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Config, Local, PeerAddress, Request, SegmentTarget};
use kvplane_engine::{FileOptions, HostConfig, Initiator, Pacing, Region, RegionOptions};
use kvplane_proto::{SegmentId, Status};

const FILE_BYTES: u64 = 6 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

struct Bed {
    initiator: Initiator,
    region: Arc<Region>,
    buffer: u32,
    file: SegmentId,
    target: SegmentTarget,
    path: PathBuf,
}

impl Bed {
    fn new(name: &str, pacing: Pacing) -> Self {
        let name = format!("kvplane-files-{name}-{}", std::process::id());
        let path = std::env::current_exe().expect("a path").with_file_name(name);
        let mut initiator = Initiator::new(Config::default(), &HostConfig::default(), pacing).expect("an initiator");
        let region = Region::allocate(&RegionOptions::new("files", FILE_BYTES as usize)).expect("memory");
        let buffer = initiator.add_buffer(Arc::clone(&region));
        let options = FileOptions { writable: true, create_bytes: Some(FILE_BYTES), direct: true };
        let file = initiator.host().open_file(&path, options).expect("a file");
        let peer = initiator.open_peer(PeerAddress::file(1));
        let target =
            SegmentTarget { peer, segment: file, offset: 0, shareable: false, place: kvplane_client::Place::UNKNOWN };
        Self { initiator, region, buffer, file, target, path }
    }

    fn request(&self, write: bool, offset: u64, at: u64, bytes: u64) -> Request {
        let local = Local { buffer: self.buffer, offset: at, bytes };
        let target = SegmentTarget { offset, ..self.target };
        if write { Request::Write(target, local) } else { Request::Read(target, local) }
    }

    fn run(&mut self, requests: &[Request]) -> Vec<Status> {
        let batch = self.initiator.submit(requests, DEADLINE).expect("a sound batch");
        self.initiator.wait(batch).expect("a host");
        let results = self.initiator.results(batch).iter().map(|result| result.status).collect();
        self.initiator.release(batch);
        results
    }

    fn fill(&self, seed: u64) {
        self.region.fill_with(0, FILE_BYTES as usize, &mut |offset, part| {
            for (index, byte) in part.iter_mut().enumerate() {
                *byte = pattern(seed, offset + index as u64);
            }
        });
    }

    fn holds(&self, seed: u64, at: u64, bytes: u64, shift: u64) -> bool {
        let mut right = true;
        self.region.read_with(at as usize, bytes as usize, &mut |offset, part| {
            let here = at + offset;
            right &= part.iter().enumerate().all(|(i, &byte)| byte == pattern(seed, here + i as u64 - at + shift));
        });
        right
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn pattern(seed: u64, at: u64) -> u8 {
    let word = (at / 8).wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (word >> (8 * (at % 8))) as u8
}

#[test]
fn whole_files_and_odd_ranges_survive() {
    for pacing in [Pacing::Park, Pacing::default()] {
        let mut bed = Bed::new("ranges", pacing);
        bed.fill(5);
        assert_eq!(bed.run(&[bed.request(true, 0, 0, FILE_BYTES)]), [Status::Ok], "{:?}", bed.initiator.last_problem());
        bed.fill(6);
        // Odd ranges of the middle, each into another part of the memory.
        let ranges =
            [(1u64, 3u64, 1u64), (4095, 70_000, 9_000), (1 << 20, 1 << 20, 1 << 20), (5_000_001, 3 << 20, 999_999)];
        let requests: Vec<Request> =
            ranges.iter().map(|&(offset, at, bytes)| bed.request(false, offset, at, bytes)).collect();
        assert_eq!(bed.run(&requests), [Status::Ok; 4], "{:?}", bed.initiator.last_problem());
        for (offset, at, bytes) in ranges {
            assert!(bed.holds(5, at, bytes, offset), "{bytes} bytes of {offset}");
        }
        assert!(bed.holds(6, 2, 1, 2), "what lies beside was left alone");
        bed.initiator.host().files().sync(bed.file).expect("synced");
    }
}

#[test]
fn many_small_writes_share_blocks_and_none_is_lost() {
    let mut bed = Bed::new("small", Pacing::Park);
    bed.fill(9);
    let requests: Vec<Request> =
        (0..FILE_BYTES / 8 / 1500).map(|index| bed.request(true, index * 1500, index * 1500, 1500)).collect();
    assert!(bed.run(&requests).iter().all(|status| *status == Status::Ok), "{:?}", bed.initiator.last_problem());
    let bytes = requests.len() as u64 * 1500;
    bed.fill(1);
    assert_eq!(bed.run(&[bed.request(false, 0, 0, bytes)]), [Status::Ok]);
    assert!(bed.holds(9, 0, bytes, 0));
}

#[test]
fn cancelled_and_refused_batches_end_and_the_next_works() {
    let mut bed = Bed::new("cancel", Pacing::Park);
    bed.fill(2);
    for _ in 0..20 {
        let whole = bed.request(true, 0, 0, FILE_BYTES);
        let batch = bed.initiator.submit(&[whole], DEADLINE).expect("a sound batch");
        bed.initiator.poll().expect("a host");
        bed.initiator.cancel(batch);
        bed.initiator.wait(batch).expect("a host");
        let status = bed.initiator.results(batch)[0].status;
        assert!(matches!(status, Status::Cancelled | Status::Ok), "{status:?}");
        bed.initiator.release(batch);
    }
    assert_eq!(bed.run(&[bed.request(false, FILE_BYTES - 10, 0, 20)]), [Status::OutOfRange]);
    assert_eq!(bed.run(&[bed.request(true, 0, 0, FILE_BYTES)]), [Status::Ok]);
    bed.fill(3);
    assert_eq!(bed.run(&[bed.request(false, 0, 0, FILE_BYTES)]), [Status::Ok]);
    assert!(bed.holds(2, 0, FILE_BYTES, 0));
    let file = bed.file;
    bed.initiator.host().files().close(file);
    assert_eq!(bed.run(&[bed.request(false, 0, 0, 4096)]), [Status::Stale]);
}
