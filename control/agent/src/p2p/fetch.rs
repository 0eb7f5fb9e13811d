//! Execution of fetch orders: a shard is read from the peer that the order names, verified, and the outcome reported.
//!
//! A shard is read in pieces, and each piece is hashed once it and all pieces before it have arrived: while it is in
//! the cache, and while later pieces are in flight.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_cluster::p2p::ShardPlace;
use kvplane_proto::digest::ContentHash;
use kvplane_rpc::p2p::{FetchFailure, FetchOrder};
use kvplane_transfer::{Batch, Opcode, SegmentHandle, SubmitOptions, TaskState, TransferRequest};

use super::StoreState;
use super::replica::{Active, Replica, hash_range};
use crate::error::Error;

/// Bytes of a piece: small enough to be in the cache when it is hashed.
const PIECE_BYTES: u64 = 1 << 20;
/// Pieces of a shard that are in flight at a time, where they do not complete at once.
const PIECES: usize = 4;

/// Segments of peers, opened once for all shards of a get.
#[derive(Default)]
pub(super) struct Sources {
    open: Mutex<BTreeMap<String, SegmentHandle>>,
}

impl Sources {
    pub(super) fn handle(&self, shared: &StoreState, segment: &str) -> Result<SegmentHandle, Error> {
        let known = self.open.lock().unwrap_or_else(PoisonError::into_inner).get(segment).copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        // Not under the lock: a peer that does not answer delays no other.
        let handle = shared.engine.open_segment(segment)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&other) = open.get(segment) {
            // Another thread was faster; its handle is used.
            let _ = shared.engine.close_segment(handle);
            return Ok(other);
        }
        open.insert(segment.to_owned(), handle);
        Ok(handle)
    }

    /// Closes a peer's segment, so that it is opened again at the next use.
    pub(super) fn doubt(&self, shared: &StoreState, segment: &str) {
        if let Some(handle) = self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(segment) {
            // The last user drops it.
            let _ = shared.engine.close_segment(handle);
        }
    }

    pub(super) fn close(self, shared: &StoreState) {
        let open = self.open.into_inner().unwrap_or_else(PoisonError::into_inner);
        for handle in open.into_values() {
            let _ = shared.engine.close_segment(handle);
        }
    }
}

/// Reason why a fetch failed.
enum Trouble {
    /// The bytes do not match the hash.
    Corrupt,
    /// The peer did not serve the shard.
    Source(String),
}

/// Carries out orders until the fetch is stopped.
pub(super) fn work(shared: &StoreState, replica: &Replica, sources: &Sources, each: &(dyn Fn(u32) + Sync)) {
    loop {
        let mut fetch = replica.fetch();
        let order = loop {
            if fetch.stop {
                return;
            }
            match fetch.orders.pop_front() {
                // The shard is present already: its report was lost.
                Some(order) if fetch.have.contains(order.shard) => {
                    fetch.got.push(order.shard);
                    replica.news.notify_all();
                }
                Some(order) if fetch.active.contains_key(&order.shard) => {
                    drop(fetch);
                    replica.order(order);
                    fetch = replica.fetch();
                }
                Some(order) => break order,
                None => fetch = replica.ordered.wait(fetch).unwrap_or_else(PoisonError::into_inner),
            }
        };
        fetch.active.insert(order.shard, Active::default());
        drop(fetch);
        carry_out(shared, replica, sources, order, each);
    }
}

fn carry_out(
    shared: &StoreState,
    replica: &Replica,
    sources: &Sources,
    mut order: FetchOrder,
    each: &(dyn Fn(u32) + Sync),
) {
    let shard = order.shard;
    loop {
        let result = bring(shared, replica, sources, &order);
        if result.is_ok() {
            each(shard);
        }
        let mut fetch = replica.fetch();
        let next = fetch.active.get_mut(&shard).and_then(|active| active.next.take());
        match (result, next) {
            (Ok(bytes), _) => {
                fetch.have.insert(shard);
                fetch.want.remove(shard);
                fetch.got.push(shard);
                fetch.fetched_bytes += bytes;
                replica.seated(&mut fetch, shard);
            }
            // The order was replaced by one for another peer. The failure of the former order says nothing about its
            // peer.
            (Err(Trouble::Source(_)), Some(next)) if !fetch.stop => {
                order = next;
                continue;
            }
            (Err(trouble), next) => {
                let failure =
                    FetchFailure { shard, source: order.source, corrupt: matches!(trouble, Trouble::Corrupt) };
                // A failure within a schedule is reported by the thread that follows the parent.
                if fetch.follow.as_mut().is_some_and(|follow| follow.failed(shard)) {
                    fetch.unfollowed.push(failure);
                    replica.followed.notify_all();
                } else {
                    fetch.failed.push(failure);
                }
                fetch.trouble = Some(match trouble {
                    Trouble::Corrupt => format!("shard {shard} from {} does not match its hash", order.segment),
                    Trouble::Source(why) => format!("shard {shard} from {}: {why}", order.segment),
                });
                // Processed by this thread in its next round.
                fetch.orders.extend(next);
            }
        }
        fetch.active.remove(&shard);
        drop(fetch);
        replica.news.notify_all();
        return;
    }
}

/// Reads one shard to its position and verifies it. Returns its length.
fn bring(shared: &StoreState, replica: &Replica, sources: &Sources, order: &FetchOrder) -> Result<u64, Trouble> {
    let Some(place) = replica.spec.layout.place(order.shard) else {
        return Err(Trouble::Source("the object has no such shard".to_owned()));
    };
    let target = sources.handle(shared, &order.segment).map_err(|error| Trouble::Source(error.to_string()))?;
    let reading = ShardRead { shared, replica, sources, order, place, target };
    let hash = reading.read();
    // Pieces still in flight after a failure end before their memory is used again: when the last reference is dropped,
    // which happens outside the lock.
    let known = replica.fetch().active.get_mut(&order.shard).map(|active| std::mem::take(&mut active.batches));
    drop(known);
    if hash? == replica.spec.hashes[order.shard as usize] { Ok(place.bytes) } else { Err(Trouble::Corrupt) }
}

/// Read of one shard.
struct ShardRead<'a> {
    shared: &'a StoreState,
    replica: &'a Replica,
    sources: &'a Sources,
    order: &'a FetchOrder,
    place: ShardPlace,
    target: SegmentHandle,
}

impl ShardRead<'_> {
    /// Reads all pieces; returns the hash of the shard.
    fn read(&self) -> Result<u128, Trouble> {
        let (mut hash, mut asked, mut hashed) = (ContentHash::default(), 0, 0);
        let mut pieces: VecDeque<Arc<Batch>> = VecDeque::new();
        while hashed < self.place.bytes {
            // Where reads complete within `submit`, each piece is hashed before the next one is requested.
            let here = |pieces: &VecDeque<Arc<Batch>>| pieces.front().is_some_and(|first| first.is_done());
            while asked < self.place.bytes && pieces.len() < PIECES && !here(&pieces) {
                let bytes = PIECE_BYTES.min(self.place.bytes - asked);
                pieces.push_back(self.ask(asked, bytes)?);
                asked += bytes;
            }
            if let Some(first) = pieces.pop_front() {
                self.take(&first)?;
                let bytes = PIECE_BYTES.min(self.place.bytes - hashed);
                hash_range(&self.replica.regions, self.place.buffer, self.place.offset + hashed, bytes, &mut hash);
                hashed += bytes;
            }
        }
        Ok(hash.finish())
    }

    /// Submits the read of a piece.
    fn ask(&self, first: u64, bytes: u64) -> Result<Arc<Batch>, Trouble> {
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: self.replica.regions[self.place.buffer].address() + self.place.offset + first,
            target: self.target,
            target_offset: self.order.address + first,
            length: bytes,
        };
        let batch = self.shared.engine.submit(&[request], &SubmitOptions::default());
        let batch = batch.inspect_err(|_| self.sources.doubt(self.shared, &self.order.segment));
        let batch = Arc::new(batch.map_err(|error| Trouble::Source(error.to_string()))?);
        let mut fetch = self.replica.fetch();
        let stop = fetch.stop;
        if let Some(active) = fetch.active.get_mut(&self.order.shard) {
            if stop || active.next.is_some() {
                batch.cancel();
            }
            active.batches.push_back(Arc::clone(&batch));
        }
        Ok(batch)
    }

    /// Waits for the first piece in flight.
    fn take(&self, piece: &Arc<Batch>) -> Result<(), Trouble> {
        let status = piece.wait();
        // Pieces are waited for in order.
        let known = self.replica.fetch().active.get_mut(&self.order.shard).map(|active| active.batches.pop_front());
        drop(known);
        if status.state == TaskState::Completed {
            return Ok(());
        }
        if status.state != TaskState::Canceled {
            self.sources.doubt(self.shared, &self.order.segment);
        }
        let why = piece.problem().map_or_else(|| format!("{:?}", status.state), str::to_owned);
        Err(Trouble::Source(why))
    }
}
