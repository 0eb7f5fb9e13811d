//! One-sided copies between our memory and peers' segments.
//!
//! A link requests the key of a segment once, by a message, and caches it under the segment's id with its generation.
//! Copies of a connection start in order; a copy completes when the device reports its completion, or no longer holds
//! any of its requests. The owner of a segment revokes access by deregistering it: the device rejects later requests.

use core::ptr;
use std::collections::VecDeque;
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId, Status as Outcome};
use kvplane_sys::verbs::{MemoryRegion, OneSidedRun, Piece, QueuePair, Refusal, Remote, Status};
use kvplane_sys::{IoBuf, Region};

use super::keys::{KeyLookup, SegmentKeys};
use super::send_queue::{REQUEST_BYTES, ROOM_FOR_MESSAGES, SendQueue};
use crate::rdma::ended::CopyCompletions;
use crate::rdma::nic::Nic;
use crate::rdma::wire::SegmentKey;
use crate::rdma::work::Work;
use crate::types::{CloseCause, ConnectionId};

/// A copy between our memory and a range of a peer's segment.
#[derive(Clone, Copy, Debug)]
pub struct RdmaCopy<'a> {
    /// Token of the caller, below 2^60.
    pub token: u64,
    /// Segment of the peer.
    pub segment: SegmentId,
    /// Offset in the segment, in bytes.
    pub offset: u64,
    /// Our memory.
    pub region: &'a Arc<Region>,
    /// Offset in our memory, in bytes.
    pub at: usize,
    /// Length in bytes.
    pub bytes: usize,
    /// True: write to the segment. False: read from it.
    pub write: bool,
}

/// A copy that waits for its key, for room in the send queue, or for earlier copies.
struct WaitingCopy {
    token: u64,
    segment: SegmentId,
    offset: u64,
    local: IoBuf,
    write: bool,
}

impl WaitingCopy {
    fn view(&self) -> RdmaCopy<'_> {
        let Self { token, segment, offset, ref local, write } = *self;
        RdmaCopy { token, segment, offset, region: local.region(), at: local.offset(), bytes: local.bytes(), write }
    }
}

/// Result of an attempt to post a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Posted, or completed with an error.
    Taken,
    /// Has to wait.
    Waits,
    /// Has to wait for the segment's key, which the caller has to request from the peer.
    AsksKey,
}

/// The one-sided copies of a link.
pub(in crate::rdma) struct Copies {
    pub(in crate::rdma) keys: SegmentKeys,
    waiting: VecDeque<WaitingCopy>,
    /// First failure among the parts of a copy whose last part has not completed yet.
    part_failed: Option<Outcome>,
}

impl Copies {
    pub(super) fn new() -> Self {
        Self { keys: SegmentKeys::new(), waiting: VecDeque::new(), part_failed: None }
    }

    /// Returns true if no copy waits.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Posts a copy and its successors with the same memory at both ends, while the queue has room. Returns the number
    /// posted and the first copy that was taken from the iterator, or given, but not posted.
    #[inline]
    pub(in crate::rdma) fn post_run<'a>(
        &mut self,
        first: RdmaCopy<'a>,
        copies: &mut impl Iterator<Item = RdmaCopy<'a>>,
        sends: &mut SendQueue,
        nic: &mut Nic,
    ) -> (usize, Option<RdmaCopy<'a>>) {
        let Some((segment, key)) = self.keys.last() else { return (0, Some(first)) };
        let open = if first.write { key.writable } else { first.region.writable() };
        if *segment != first.segment || key.status != Outcome::Ok || !open || !self.waiting.is_empty() {
            return (0, Some(first));
        }
        let Some(memory) = nic.memory.find(first.region) else { return (0, Some(first)) };
        let most = sends.queue_pair.room().saturating_sub(ROOM_FOR_MESSAGES);
        let (segment, address, key_bytes) = (*segment, key.address, key.bytes);
        let RdmaCopy { write, region, .. } = first;
        let run = OneSidedRun::new(memory, key.key, write, most);
        // Captures its values, not references: it runs for each copy.
        let one = move |copy: &RdmaCopy<'_>| {
            let (bytes, end) = (copy.bytes as u64, copy.offset.checked_add(copy.bytes as u64)?);
            let alike = copy.segment == segment && copy.write == write && ptr::eq(copy.region, region);
            if !alike || bytes > REQUEST_BYTES || end > key_bytes {
                return None;
            }
            run.one(Work::Copy(copy.token).to_bits(), address + copy.offset, copy.at, bytes as u32)
        };
        let Some(begin) = one(&first) else { return (0, Some(first)) };
        let mut left = None;
        let pushed = sends.queue_pair.push_run(&run, begin, || {
            let copy = copies.next()?;
            let next = one(&copy);
            if next.is_none() {
                left = Some(copy);
            }
            next
        });
        match pushed {
            Ok(posted @ 1..) => (posted, left),
            // If the queue pair accepts none, posting the first copy alone reports the reason.
            Ok(0) | Err(_) => (0, Some(first)),
        }
    }

    /// Posts a copy, or queues it until it can be posted. Returns the segment whose key has to be requested, if any.
    #[inline]
    pub(super) fn take(
        &mut self,
        id: ConnectionId,
        copy: &RdmaCopy<'_>,
        sends: &mut SendQueue,
        nic: &mut Nic,
        copied: &mut CopyCompletions,
    ) -> Result<Option<SegmentId>, CloseCause> {
        let step = if self.waiting.is_empty() { self.post(id, copy, sends, nic, copied)? } else { Step::Waits };
        if step != Step::Taken {
            self.keep(id, copy, copied);
        }
        Ok((step == Step::AsksKey).then_some(copy.segment))
    }

    /// Queues a copy that waits for its key, for room in the send queue, or for earlier copies.
    #[cold]
    fn keep(&mut self, id: ConnectionId, copy: &RdmaCopy<'_>, copied: &mut CopyCompletions) {
        let end = copy.at.checked_add(copy.bytes);
        if end.is_none_or(|end| end > copy.region.bytes()) {
            copied.push(id, copy.token, Err(Outcome::OutOfRange));
        } else if self.waiting.len() >= Limits::REQUESTS_PER_CONNECTION {
            copied.push(id, copy.token, Err(Outcome::Busy));
        } else {
            let local = IoBuf::new(Arc::clone(copy.region), copy.at, copy.bytes);
            let RdmaCopy { token, segment, offset, write, .. } = *copy;
            self.waiting.push_back(WaitingCopy { token, segment, offset, local, write });
        }
    }

    /// Posts waiting copies as far as the send queue and known keys allow. Returns the segment whose key has to be
    /// requested, if any.
    pub(super) fn post_waiting(
        &mut self,
        id: ConnectionId,
        sends: &mut SendQueue,
        nic: &mut Nic,
        copied: &mut CopyCompletions,
    ) -> Result<Option<SegmentId>, CloseCause> {
        while let Some(copy) = self.waiting.pop_front() {
            match self.post(id, &copy.view(), sends, nic, copied) {
                Ok(Step::Taken) => {}
                Ok(step) => {
                    let segment = copy.segment;
                    self.waiting.push_front(copy);
                    return Ok((step == Step::AsksKey).then_some(segment));
                }
                Err(why) => {
                    copied.push(id, copy.token, Err(Outcome::Unreachable));
                    return Err(why);
                }
            }
        }
        Ok(None)
    }

    /// Posts a copy, or returns why it has to wait.
    #[inline]
    fn post(
        &mut self,
        id: ConnectionId,
        copy: &RdmaCopy<'_>,
        sends: &mut SendQueue,
        nic: &mut Nic,
        copied: &mut CopyCompletions,
    ) -> Result<Step, CloseCause> {
        match self.keys.look_up(copy.segment) {
            KeyLookup::Known => {}
            KeyLookup::Awaited => return Ok(Step::Waits),
            KeyLookup::Missing => return Ok(Step::AsksKey),
        }
        let Some((_, key)) = self.keys.last() else { return Ok(Step::Waits) };
        let bytes = copy.bytes as u64;
        let requests = if bytes <= REQUEST_BYTES { 1 } else { bytes.div_ceil(REQUEST_BYTES) };
        let most = sends.most_of_copy() as u64;
        if sends.queue_pair.room() < ROOM_FOR_MESSAGES + requests.min(most) as usize {
            return Ok(Step::Waits);
        }
        let (memory, whole) = match check(copy, key, nic, requests <= most) {
            Ok(checked) => checked,
            Err(status) => {
                copied.push(id, copy.token, Err(status));
                return Ok(Step::Taken);
            }
        };
        let remote = Remote { address: key.address + copy.offset, key: key.key };
        let pushed = if requests == 1 {
            sends.queue_pair.push_one_sided(Work::Copy(copy.token).to_bits(), copy.write, remote, &whole)
        } else {
            push_parts(&mut sends.queue_pair, copy, remote, memory)
        };
        match pushed {
            Ok(()) => Ok(Step::Taken),
            // The caller reports the completion of the copy, exactly once.
            Err(refusal) => Err(CloseCause::Rdma(format!("a request was refused: {refusal}"))),
        }
    }

    /// Handles the completion of a part of a copy that is not the last, or of a last part that failed or followed
    /// others. `token` names the copy if the part is its last.
    pub(in crate::rdma) fn part_over(
        &mut self,
        id: ConnectionId,
        token: Option<u64>,
        status: Status,
        copied: &mut CopyCompletions,
    ) {
        let failed = match status {
            Status::Success => None,
            // A key that was denied is stale. An invalid-request error of the remote device does not discredit the key:
            // soft-RoCE reports it after packet loss, and another connection may succeed.
            Status::RemoteAccess => Some(Outcome::Stale),
            _ => Some(Outcome::Unreachable),
        };
        let failed = self.part_failed.or(failed);
        self.part_failed = failed;
        if let Some(token) = token {
            self.part_failed = None;
            copied.push(id, token, failed.map_or(Ok(()), Err));
        }
    }

    /// Completes the waiting copies as unreachable; the device holds none of the link's requests any more.
    pub(super) fn end(self, id: ConnectionId, copied: &mut CopyCompletions) {
        self.waiting.iter().for_each(|copy| copied.push(id, copy.token, Err(Outcome::Unreachable)));
    }
}

/// Posts a copy that takes several requests. The send queue has room for them.
#[cold]
fn push_parts(
    queue_pair: &mut QueuePair,
    copy: &RdmaCopy<'_>,
    remote: Remote,
    memory: &MemoryRegion,
) -> Result<(), Refusal> {
    let mut at = 0;
    while at < copy.bytes {
        let bytes = (copy.bytes - at).min(REQUEST_BYTES as usize);
        let last = at + bytes == copy.bytes;
        let work = if last { Work::Copy(copy.token) } else { Work::CopyPart };
        let remote = Remote { address: remote.address + at as u64, ..remote };
        let piece = memory.piece(copy.at + at, bytes as u32).ok_or(Refusal::NotWritable)?;
        queue_pair.push_one_sided(work.to_bits(), copy.write, remote, &piece)?;
        at += bytes;
    }
    Ok(())
}

/// Returns the registration of a copy's memory and its first piece, if the copy is valid.
#[inline]
fn check<'a>(
    copy: &RdmaCopy<'_>,
    key: &SegmentKey,
    nic: &'a mut Nic,
    fits: bool,
) -> Result<(&'a MemoryRegion, Piece<'a>), Outcome> {
    if key.status != Outcome::Ok {
        return Err(key.status);
    }
    if copy.write && !key.writable {
        return Err(Outcome::Unauthorized);
    }
    let end = copy.offset.checked_add(copy.bytes as u64);
    if end.is_none_or(|end| end > key.bytes) {
        return Err(Outcome::OutOfRange);
    }
    if !fits || !copy.write && !copy.region.writable() {
        return Err(Outcome::Unsupported);
    }
    let memory = nic.memory.find(copy.region).ok_or(Outcome::Unsupported)?;
    let whole = memory.piece(copy.at, copy.bytes.min(REQUEST_BYTES as usize) as u32).ok_or(Outcome::OutOfRange)?;
    Ok((memory, whole))
}
