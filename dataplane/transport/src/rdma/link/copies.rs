//! One-sided copies between our memory and peers' segments.
//!
//! A link requests the key of a segment once, by a message, and caches it under the segment's id with its generation.
//! Copies of a connection start in order; a copy completes when the device reports its completion, or no longer holds
//! any of its requests. The owner of a segment revokes access by deregistering it: the device rejects later requests.

use core::ptr;
use std::collections::VecDeque;

use kvplane_proto::{Limits, SegmentId, Status as Outcome};
use kvplane_sys::device::Backing;
use kvplane_sys::verbs::{OneSidedRun, Refusal, Remote, Status};

use super::flushes::Flushes;
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
    /// Our memory. That of a device is registered ([`register`](crate::rdma::device_memory::register)).
    pub memory: &'a Backing,
    /// Offset in our memory, in bytes.
    pub at: usize,
    /// Length in bytes, at least 1.
    pub bytes: usize,
    /// True: write to the segment. False: read from it.
    pub write: bool,
}

/// A copy that waits for its key, for room in the send queue, or for earlier copies.
struct WaitingCopy {
    token: u64,
    segment: SegmentId,
    offset: u64,
    memory: Backing,
    at: usize,
    bytes: usize,
    write: bool,
}

impl WaitingCopy {
    fn view(&self) -> RdmaCopy<'_> {
        let Self { token, segment, offset, ref memory, at, bytes, write } = *self;
        RdmaCopy { token, segment, offset, memory, at, bytes, write }
    }
}

/// Request of a copy: a range of it, with the remote key of its part of the segment.
#[derive(Clone, Copy)]
struct CopyRequest {
    /// Offset in the copy.
    from: usize,
    bytes: usize,
    key: u32,
}

/// Result of an attempt to post a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Posted, or completed with an error.
    Taken,
    /// Has to wait.
    Waits,
    /// Has to wait for the key for this offset of the segment, which the caller has to request from the peer.
    AsksKey(u64),
}

/// Reason why a copy was not cut into requests.
enum NoRequests {
    /// It has to wait.
    Waits(Step),
    /// It ends with this status.
    Failed(Outcome),
}

/// The one-sided copies of a link.
pub(in crate::rdma) struct Copies {
    pub(in crate::rdma) keys: SegmentKeys,
    /// Writes that are complete only when the peer has flushed its device.
    pub(in crate::rdma) flushes: Flushes,
    waiting: VecDeque<WaitingCopy>,
    /// First failure among the parts of a copy whose last part has not completed yet.
    part_failed: Option<Outcome>,
}

impl Copies {
    pub(super) fn new() -> Self {
        Self { keys: SegmentKeys::new(), flushes: Flushes::default(), waiting: VecDeque::new(), part_failed: None }
    }

    /// Returns true if no copy waits.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.flushes.is_idle()
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
        let open = if first.write { key.writable && !key.flush } else { first.memory.writable() };
        if *segment != first.segment || key.status != Outcome::Ok || !open || !self.waiting.is_empty() {
            return (0, Some(first));
        }
        let Some(registered) = nic.memory.find_whole(first.memory) else { return (0, Some(first)) };
        let most = sends.queue_pair.room().saturating_sub(ROOM_FOR_MESSAGES);
        let (segment, address, key_start, key_end) = (*segment, key.address, key.start, key.end);
        let RdmaCopy { write, memory, .. } = first;
        let run = OneSidedRun::new(registered, key.key, write, most);
        // Captures its values, not references: it runs for each copy.
        let one = move |copy: &RdmaCopy<'_>| {
            let (bytes, end) = (copy.bytes as u64, copy.offset.checked_add(copy.bytes as u64)?);
            let alike = copy.segment == segment && copy.write == write && ptr::eq(copy.memory, memory);
            if !alike || bytes > REQUEST_BYTES || copy.offset < key_start || end > key_end {
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

    /// Posts a copy, or queues it until it can be posted. Returns the segment and the offset whose key has to be
    /// requested, if any.
    #[inline]
    pub(super) fn take(
        &mut self,
        id: ConnectionId,
        copy: &RdmaCopy<'_>,
        sends: &mut SendQueue,
        nic: &mut Nic,
        copied: &mut CopyCompletions,
    ) -> Result<Option<(SegmentId, u64)>, CloseCause> {
        let step = if self.waiting.is_empty() { self.post(id, copy, sends, nic, copied)? } else { Step::Waits };
        if step != Step::Taken {
            self.keep(id, copy, copied);
        }
        Ok(if let Step::AsksKey(offset) = step { Some((copy.segment, offset)) } else { None })
    }

    /// Queues a copy that waits for its key, for room in the send queue, or for earlier copies.
    #[cold]
    fn keep(&mut self, id: ConnectionId, copy: &RdmaCopy<'_>, copied: &mut CopyCompletions) {
        let end = copy.at.checked_add(copy.bytes);
        if end.is_none_or(|end| end as u64 > copy.memory.bytes()) {
            copied.push(id, copy.token, Err(Outcome::OutOfRange));
        } else if self.waiting.len() >= Limits::REQUESTS_PER_CONNECTION {
            copied.push(id, copy.token, Err(Outcome::Busy));
        } else {
            let RdmaCopy { token, segment, offset, memory, at, bytes, write } = *copy;
            self.waiting.push_back(WaitingCopy { token, segment, offset, memory: memory.clone(), at, bytes, write });
        }
    }

    /// Posts waiting copies as far as the send queue and known keys allow. Returns the segment and the offset whose key
    /// has to be requested, if any.
    #[inline]
    pub(super) fn post_waiting(
        &mut self,
        id: ConnectionId,
        sends: &mut SendQueue,
        nic: &mut Nic,
        copied: &mut CopyCompletions,
    ) -> Result<Option<(SegmentId, u64)>, CloseCause> {
        while let Some(copy) = self.waiting.pop_front() {
            match self.post(id, &copy.view(), sends, nic, copied) {
                Ok(Step::Taken) => {}
                Ok(step) => {
                    let segment = copy.segment;
                    self.waiting.push_front(copy);
                    return Ok(if let Step::AsksKey(offset) = step { Some((segment, offset)) } else { None });
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
        match self.keys.look_up(copy.segment, copy.offset) {
            KeyLookup::Known => {}
            KeyLookup::Awaited => return Ok(Step::Waits),
            KeyLookup::Missing => return Ok(Step::AsksKey(copy.offset)),
        }
        let Some((_, key)) = self.keys.last() else { return Ok(Step::Waits) };
        let bytes = copy.bytes as u64;
        if let Err(status) = check(copy, key) {
            copied.push(id, copy.token, Err(status));
            return Ok(Step::Taken);
        }
        let (address, flush) = (key.address, copy.write && key.flush);
        let is_whole = bytes <= REQUEST_BYTES && copy.offset + bytes <= key.end;
        if let (true, Some(memory)) = (is_whole, nic.memory.find_whole(copy.memory)) {
            if sends.queue_pair.room() <= ROOM_FOR_MESSAGES {
                return Ok(Step::Waits);
            }
            let Some(whole) = memory.piece(copy.at, bytes as u32) else {
                copied.push(id, copy.token, Err(Outcome::OutOfRange));
                return Ok(Step::Taken);
            };
            let remote = Remote { address: address + copy.offset, key: key.key };
            let work = self.last_work(copy, flush);
            let pushed = sends.queue_pair.push_one_sided(work.to_bits(), copy.write, remote, &whole);
            return pushed.map(|()| Step::Taken).map_err(|refusal| refused(&refusal));
        }
        let requests = match self.requests_of(copy, nic, sends.most_of_copy()) {
            Ok(requests) => requests,
            Err(NoRequests::Waits(step)) => return Ok(step),
            Err(NoRequests::Failed(status)) => {
                copied.push(id, copy.token, Err(status));
                return Ok(Step::Taken);
            }
        };
        if sends.queue_pair.room() < ROOM_FOR_MESSAGES + requests.len() {
            return Ok(Step::Waits);
        }
        for (number, request) in requests.iter().enumerate() {
            let is_last = number + 1 == requests.len();
            let work = if is_last { self.last_work(copy, flush) } else { Work::CopyPart };
            let at = copy.at + request.from;
            let memory = nic.memory.find_at(copy.memory, at as u64).ok_or(Refusal::NotWritable);
            let memory = memory.map_err(|refusal| refused(&refusal))?;
            let piece = memory.piece_at(copy.memory.address() + at as u64, request.bytes as u32);
            let piece = piece.ok_or_else(|| refused(&Refusal::NotWritable))?;
            let remote = Remote { address: address + copy.offset + request.from as u64, key: request.key };
            let pushed = sends.queue_pair.push_one_sided(work.to_bits(), copy.write, remote, &piece);
            pushed.map_err(|refusal| refused(&refusal))?;
        }
        Ok(Step::Taken)
    }

    /// Returns the purpose of the last request of a copy, which is about to be posted.
    fn last_work(&mut self, copy: &RdmaCopy<'_>, flush: bool) -> Work {
        if flush {
            self.flushes.posted(copy.token, copy.segment);
            return Work::FlushedCopy(copy.token);
        }
        Work::Copy(copy.token)
    }

    /// Cuts a copy into requests: each is short enough, and inside one piece of our memory and one part of the segment.
    ///
    /// # Errors
    /// If the key of a part is missing or refused; `Unsupported` if our memory is not registered, or more than `most`
    /// requests are needed; `OutOfRange` if the copy is not inside our memory.
    #[cold]
    fn requests_of(&mut self, copy: &RdmaCopy<'_>, nic: &mut Nic, most: usize) -> Result<Vec<CopyRequest>, NoRequests> {
        let failed = NoRequests::Failed;
        let end = copy.at.checked_add(copy.bytes);
        if end.is_none_or(|end| end as u64 > copy.memory.bytes()) {
            return Err(failed(Outcome::OutOfRange));
        }
        let (mut requests, mut from) = (Vec::new(), 0);
        while from < copy.bytes {
            let offset = copy.offset + from as u64;
            match self.keys.look_up(copy.segment, offset) {
                KeyLookup::Known => {}
                KeyLookup::Awaited => return Err(NoRequests::Waits(Step::Waits)),
                KeyLookup::Missing => return Err(NoRequests::Waits(Step::AsksKey(offset))),
            }
            let Some((_, key)) = self.keys.last() else { return Err(NoRequests::Waits(Step::Waits)) };
            if key.status != Outcome::Ok {
                return Err(failed(key.status));
            }
            let theirs = key.end.checked_sub(offset).filter(|bytes| *bytes > 0).ok_or(failed(Outcome::OutOfRange))?;
            let at = (copy.at + from) as u64;
            let memory = nic.memory.find_at(copy.memory, at).ok_or(failed(Outcome::Unsupported))?;
            let ours = memory.address() + memory.bytes() as u64 - (copy.memory.address() + at);
            let bytes = REQUEST_BYTES.min((copy.bytes - from) as u64).min(theirs).min(ours) as usize;
            requests.push(CopyRequest { from, bytes, key: key.key });
            if requests.len() > most {
                return Err(failed(Outcome::Unsupported));
            }
            from += bytes;
        }
        Ok(requests)
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

    /// Handles the end of the last part of a copy that needs a flush of the peer's device. Returns the segment whose
    /// flush has to be requested, if any.
    pub(super) fn flushed_copy_over(
        &mut self,
        id: ConnectionId,
        token: u64,
        status: Status,
        copied: &mut CopyCompletions,
    ) -> Option<SegmentId> {
        let good = status == Status::Success && self.part_failed.is_none();
        self.flushes.written(good);
        if !good {
            self.part_over(id, Some(token), status, copied);
        }
        self.flushes.next()
    }

    /// Takes the peer's reply to a flush. Returns the segment of the next flush to request, if any.
    pub(super) fn take_flushed(
        &mut self,
        id: ConnectionId,
        segment: SegmentId,
        outcome: Outcome,
        copied: &mut CopyCompletions,
    ) -> Option<SegmentId> {
        let result = if outcome == Outcome::Ok { Ok(()) } else { Err(outcome) };
        self.flushes.take_flushed(segment).into_iter().for_each(|token| copied.push(id, token, result));
        self.flushes.next()
    }

    /// Completes the waiting copies as unreachable; the device holds none of the link's requests any more.
    pub(super) fn end(self, id: ConnectionId, copied: &mut CopyCompletions) {
        let waiting = self.waiting.iter().map(|copy| copy.token);
        let all = waiting.chain(self.flushes.into_unflushed());
        all.for_each(|token| copied.push(id, token, Err(Outcome::Unreachable)));
    }
}

/// Returns the cause for which a link is closed whose queue pair refuses a request. The caller reports the completion
/// of the copy, exactly once.
fn refused(refusal: &Refusal) -> CloseCause {
    CloseCause::Rdma(format!("a request was refused: {refusal}"))
}

/// Checks a copy against a key of its segment.
#[inline]
fn check(copy: &RdmaCopy<'_>, key: &SegmentKey) -> Result<(), Outcome> {
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
    if !copy.write && !copy.memory.writable() {
        return Err(Outcome::Unsupported);
    }
    Ok(())
}
