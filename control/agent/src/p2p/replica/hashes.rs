//! Hashes of shards in memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_cluster::p2p::{Layout, ShardPlace};
use kvplane_engine::Region;
use kvplane_proto::digest::ContentHash;

/// Limit of threads that hash registered memory.
const HASHERS: usize = 8;

/// Adds bytes of a buffer to a hash.
pub(in crate::p2p) fn hash_range(
    regions: &[Arc<Region>],
    buffer: usize,
    first: u64,
    bytes: u64,
    hash: &mut ContentHash,
) {
    // The range is within a region, whose size is a usize.
    regions[buffer].read_with(first as usize, bytes as usize, &mut |_, part| hash.update(part));
}

fn hash(regions: &[Arc<Region>], place: ShardPlace) -> u128 {
    let mut hash = ContentHash::default();
    hash_range(regions, place.buffer, place.offset, place.bytes, &mut hash);
    hash.finish()
}

/// Returns the hashes of all shards, computed by several threads.
pub(in crate::p2p) fn hashes(layout: &Layout, regions: &[Arc<Region>]) -> Vec<u128> {
    const CHUNK: usize = 16;
    let mut hashes = vec![0; layout.shards() as usize];
    let next = AtomicUsize::new(0);
    let chunks: Vec<Mutex<&mut [u128]>> = hashes.chunks_mut(CHUNK).map(Mutex::new).collect();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(at) else { return };
            // The counter gives each chunk to one thread.
            let mut chunk = chunk.lock().unwrap_or_else(PoisonError::into_inner);
            for (shard, found) in (at * CHUNK..).zip(chunk.iter_mut()) {
                if let Some(place) = layout.place(shard as u32) {
                    *found = hash(regions, place);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(HASHERS).min(chunks.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without the thread, fewer threads hash.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    drop(chunks);
    hashes
}
