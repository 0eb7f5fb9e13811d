//! Copies over shared memory, done by this thread: between the caller's memory and a peer's pool.
//!
//! A copy is summed up piece by piece while its source is in the cache. The pieces are long enough to be copied past
//! the cache.

use std::sync::Arc;

use kvplane_client::{LaneId, Local, SliceId};
use kvplane_proto::Status;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_sys::{IoBuf, Region, STREAMING_BYTES, cpu};

use super::Host;
use super::roles::Link;

impl Host {
    /// The caller's memory behind the name of a region.
    ///
    /// # Panics
    /// When the buffer was removed while a batch used it, or the range is not inside.
    pub(super) fn local(&self, local: Local) -> IoBuf {
        self.regions.buffers.one(local)
    }

    pub(super) fn copy_out(
        &mut self,
        lane: LaneId,
        slice: SliceId,
        offset: u64,
        local: Local,
        checksum: Option<u64>,
        now_ns: u64,
    ) {
        let Some(pool) = self.pool_of(lane) else {
            self.copied(lane, slice, Err(Status::Unsupported), now_ns);
            return;
        };
        let (to, verify) = (self.regions.buffers.pieces(local), self.verify_shared);
        let result = match range(&pool, offset, local.bytes) {
            // The peer named bytes outside its own pool.
            None => Err(Status::OutOfRange),
            Some(from) => match checksum.filter(|_| verify) {
                Some(checksum) => {
                    let found = copy_summed(to.as_slice(), &[from]);
                    if found == checksum { Ok(found) } else { Err(Status::Corrupt) }
                }
                None => {
                    pairs(to.as_slice(), &[from], copy);
                    Ok(0)
                }
            },
        };
        let now_ns = self.copied_at(local.bytes, now_ns);
        self.copied(lane, slice, result, now_ns);
    }

    pub(super) fn copy_in(&mut self, lane: LaneId, slice: SliceId, offset: u64, local: Local, now_ns: u64) {
        let Some(pool) = self.pool_of(lane) else {
            self.copied(lane, slice, Err(Status::Unsupported), now_ns);
            return;
        };
        let from = self.regions.buffers.pieces(local);
        let result = range(&pool, offset, local.bytes);
        let result = result.map(|to| copy_summed(&[to], from.as_slice())).ok_or(Status::OutOfRange);
        let now_ns = self.copied_at(local.bytes, now_ns);
        self.copied(lane, slice, result, now_ns);
    }

    /// When a copy of so many bytes, done just now, ended.
    pub(super) fn copied_at(&mut self, bytes: u64, now_ns: u64) -> u64 {
        let more = self.client.as_ref().is_some_and(|client| !client.outbox().is_empty());
        self.rounds.copied_ns(bytes, more, cpu::monotonic_ns).max(now_ns)
    }

    /// A copy is done, or why it could not be. Where the connection has ended meanwhile, that is why; the client hears
    /// of that end next, and tries again what waited for the copy.
    pub(super) fn copied(&mut self, lane: LaneId, slice: SliceId, result: Result<u64, Status>, now_ns: u64) {
        if result.is_err() && self.has_ended(lane) {
            return;
        }
        if let Some(client) = &mut self.client {
            client.copied(lane, slice, result, now_ns);
        }
    }

    /// True where the connection of a lane over shared memory has ended, and the client has not heard that yet.
    fn has_ended(&self, lane: LaneId) -> bool {
        matches!(self.link_of(lane), Some(Link::Shm(id)) if !self.shm.is_open(id))
    }

    /// The mapped pool of a lane's shard; `None` when the shard has shared none, or the lane has ended.
    fn pool_of(&self, lane: LaneId) -> Option<Arc<Region>> {
        let Some(Link::Shm(id)) = self.link_of(lane) else { return None };
        self.shm.pool(id).cloned()
    }
}

/// A range that a peer named, if it is inside.
pub(super) fn range(region: &Arc<Region>, offset: u64, bytes: u64) -> Option<IoBuf> {
    let end = offset.checked_add(bytes)?;
    (end <= region.bytes() as u64).then(|| IoBuf::new(Arc::clone(region), offset as usize, bytes as usize))
}

pub(super) fn copy(to: &IoBuf, from: &IoBuf) {
    Region::copy_between(to.region(), to.offset(), from.region(), from.offset(), from.bytes());
}

/// Walks pieces on both sides, which have the same bytes in all, and gives each stretch that lies in one of either.
fn pairs(to: &[IoBuf], from: &[IoBuf], mut each: impl FnMut(&IoBuf, &IoBuf)) {
    let (mut to, mut from) = (to.iter().cloned(), from.iter().cloned());
    let (mut target, mut source) = (to.next(), from.next());
    while let (Some(one), Some(other)) = (&mut target, &mut source) {
        let bytes = one.bytes().min(other.bytes());
        if bytes > 0 {
            each(&one.slice(0, bytes), &other.slice(0, bytes));
            one.advance(bytes);
            other.advance(bytes);
        }
        if one.is_empty() {
            target = to.next();
        }
        if other.is_empty() {
            source = from.next();
        }
    }
}

/// Copies and returns the checksum of what was read. The sum is made from the destination, so that it covers the
/// bytes that arrived, where the piece went through the cache; else from the source, which is in the cache.
fn copy_summed(to: &[IoBuf], from: &[IoBuf]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    pairs(to, from, |to, from| {
        let mut at = 0;
        while at < from.bytes() {
            let bytes = STREAMING_BYTES.min(from.bytes() - at);
            Region::copy_between(to.region(), to.offset() + at, from.region(), from.offset() + at, bytes);
            let source = if bytes < STREAMING_BYTES { to } else { from };
            source.region().read_with(source.offset() + at, bytes, &mut |_, part| checksum.update(part));
            at += bytes;
        }
    });
    checksum.finish()
}
