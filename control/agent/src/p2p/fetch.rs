//! Carries out orders: reads a shard from its source, checks it, and says what came of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_rpc::p2p::{FetchFailure, FetchOrder};

use super::Shared;
use super::replica::{Active, Replica};
use crate::error::Error;
use crate::transfer::{Opcode, SegmentHandle, SubmitOptions, TaskState, TransferRequest};

/// Segments of sources, opened once for all shards of a get.
#[derive(Default)]
pub(super) struct Sources {
    open: Mutex<BTreeMap<String, SegmentHandle>>,
}

impl Sources {
    pub(super) fn handle(&self, shared: &Shared, segment: &str) -> Result<SegmentHandle, Error> {
        let known = self.open.lock().unwrap_or_else(PoisonError::into_inner).get(segment).copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        // Not under the lock: a source that does not answer holds up nobody else.
        let handle = shared.engine.open_segment(segment)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&other) = open.get(segment) {
            // Somebody else was faster; one opening is enough.
            let _ = shared.engine.close_segment(handle);
            return Ok(other);
        }
        open.insert(segment.to_owned(), handle);
        Ok(handle)
    }

    /// Asks a source anew the next time.
    pub(super) fn doubt(&self, shared: &Shared, segment: &str) {
        if let Some(handle) = self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(segment) {
            // It is forgotten by its last user.
            let _ = shared.engine.close_segment(handle);
        }
    }

    pub(super) fn close(self, shared: &Shared) {
        let open = self.open.into_inner().unwrap_or_else(PoisonError::into_inner);
        for handle in open.into_values() {
            let _ = shared.engine.close_segment(handle);
        }
    }
}

/// Why a shard did not come.
enum Trouble {
    /// Its bytes are not those of the hash.
    Corrupt,
    /// The source did not serve it.
    Source(String),
}

/// Carries out orders until it is told to stop.
pub(super) fn work(shared: &Shared, replica: &Replica, sources: &Sources, each: &(dyn Fn(u32) + Sync)) {
    loop {
        let mut fetch = replica.fetch();
        let order = loop {
            if fetch.stop {
                return;
            }
            match fetch.orders.pop_front() {
                // It is there already: the report was lost.
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
    shared: &Shared,
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
            }
            // It was given up for another source. What this one did says nothing.
            (Err(Trouble::Source(_)), Some(next)) if !fetch.stop => {
                order = next;
                continue;
            }
            (Err(trouble), next) => {
                let corrupt = matches!(trouble, Trouble::Corrupt);
                fetch.failed.push(FetchFailure { shard, source: order.source, corrupt });
                fetch.trouble = Some(match trouble {
                    Trouble::Corrupt => format!("shard {shard} from {} does not match its hash", order.segment),
                    Trouble::Source(why) => format!("shard {shard} from {}: {why}", order.segment),
                });
                // Taken up by this thread, which is about to look.
                fetch.orders.extend(next);
            }
        }
        fetch.active.remove(&shard);
        drop(fetch);
        replica.news.notify_all();
        return;
    }
}

/// Reads one shard into its place and checks it: its length.
fn bring(shared: &Shared, replica: &Replica, sources: &Sources, order: &FetchOrder) -> Result<u64, Trouble> {
    let source = |error: Error| Trouble::Source(error.to_string());
    let Some(place) = replica.spec.layout.place(order.shard) else {
        return Err(Trouble::Source("the object has no such shard".to_owned()));
    };
    let target = sources.handle(shared, &order.segment).map_err(source)?;
    let request = TransferRequest {
        opcode: Opcode::Read,
        source: replica.regions[place.buffer].address() + place.offset,
        target,
        target_offset: order.address,
        length: place.bytes,
    };
    let batch = shared.engine.submit(&[request], &SubmitOptions::default());
    let batch = batch.inspect_err(|_| sources.doubt(shared, &order.segment)).map_err(source)?;
    let batch = Arc::new(batch);
    if let Some(active) = replica.fetch().active.get_mut(&order.shard) {
        if active.next.is_some() {
            batch.cancel();
        }
        active.batch = Some(Arc::clone(&batch));
    }
    let status = batch.wait();
    if let Some(active) = replica.fetch().active.get_mut(&order.shard) {
        active.batch = None;
    }
    if status.state != TaskState::Completed {
        if status.state != TaskState::Canceled {
            sources.doubt(shared, &order.segment);
        }
        let why = batch.problem().map_or_else(|| format!("{:?}", status.state), str::to_owned);
        return Err(Trouble::Source(why));
    }
    if replica.is_good(order.shard) { Ok(place.bytes) } else { Err(Trouble::Corrupt) }
}
