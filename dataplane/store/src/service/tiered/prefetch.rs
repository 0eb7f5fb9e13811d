//! Reading ahead: who asks whether objects are there often wants them next.
//!
//! What was read ahead and not asked for yet stays within a part of the pool; after a while it goes again. A get that
//! comes before the read is over joins it.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_tier::{Priority, RecordView};

use super::Service;

/// How long what was read ahead stays without being asked for.
const UNUSED_NS: u64 = 10_000_000_000;
/// The most objects that were read ahead lately.
const ORDER_MOST: usize = 65_536;

/// What was read ahead.
#[derive(Debug)]
pub(super) struct Prefetched {
    most_bytes: u64,
    bytes: u64,
    /// Not asked for yet: bytes, and since when.
    objects: BTreeMap<Digest, (u64, u64)>,
    order: VecDeque<(u64, Digest)>,
}

impl Prefetched {
    pub(super) fn new(most_bytes: u64) -> Self {
        Self { most_bytes, bytes: 0, objects: BTreeMap::new(), order: VecDeque::new() }
    }

    /// Takes an object off the account; false when it is not on it.
    pub(super) fn take(&mut self, digest: Digest) -> bool {
        let Some((bytes, _)) = self.objects.remove(&digest) else { return false };
        self.bytes -= bytes;
        while self.order.front().is_some_and(|(_, digest)| !self.objects.contains_key(digest)) {
            self.order.pop_front();
        }
        true
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.bytes.saturating_add(bytes) <= self.most_bytes && self.order.len() < ORDER_MOST
    }

    fn add(&mut self, digest: Digest, bytes: u64, now_ns: u64) {
        self.bytes += bytes;
        self.objects.insert(digest, (bytes, now_ns));
        self.order.push_back((now_ns, digest));
    }

    pub(super) fn has(&self, digest: Digest) -> bool {
        self.objects.contains_key(&digest)
    }

    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.order.front().map(|(since_ns, _)| since_ns.saturating_add(UNUSED_NS))
    }
}

impl Service {
    /// Begins to read an object ahead, if that is wanted and there is room.
    pub(in crate::service) fn prefetch(&mut self, view: &RecordView) {
        let now_ns = self.now_ns;
        let Some(tiered) = &mut self.tiered else { return };
        let (digest, bytes) = (view.digest, u64::from(view.payload_bytes));
        if tiered.prefetched.most_bytes == 0 || tiered.prefetched.has(digest) || tiered.reading.contains_key(&digest) {
            return;
        }
        let room = tiered.prefetched.has_room(bytes);
        if !room || self.begin_read(view, Priority::Prefetch, None).is_err() {
            self.tiered.iter_mut().for_each(|tiered| tiered.counters.prefetch_refusals += 1);
            return;
        }
        let Some(tiered) = &mut self.tiered else { return };
        tiered.counters.prefetches += 1;
        tiered.prefetched.add(digest, bytes, now_ns);
    }

    /// An object is asked for, read ahead or not.
    pub(super) fn use_prefetched(&mut self, digest: Digest) {
        if let Some(tiered) = &mut self.tiered
            && tiered.prefetched.take(digest)
        {
            tiered.counters.prefetches_used += 1;
        }
    }

    /// Lets go of what nobody asked for.
    pub(super) fn expire_prefetched(&mut self) {
        let now_ns = self.now_ns;
        while let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store)
            && tiered.prefetched.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns)
            && let Some((since_ns, digest)) = tiered.prefetched.order.pop_front()
        {
            let unused = tiered.prefetched.objects.get(&digest).is_some_and(|(_, since)| *since == since_ns);
            if unused && tiered.prefetched.take(digest) && tiered.locate(digest).is_some() {
                store.drop_copy(digest);
            }
        }
    }
}
