//! One-sided copies between our memory and peers' segments.
//!
//! A link asks for the key of a segment once, by a message, and kept by the segment's id with its
//! generation. Copies of a connection start in order; a copy is over when the device says so, or holds nothing of it
//! any more. The owner of a segment ends access by deregistering it: the device refuses what comes later.

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
    /// The caller's name for it, below 2^60.
    pub token: u64,
    /// The segment, and where in it.
    pub segment: SegmentId,
    /// Where in it.
    pub offset: u64,
    /// Our memory.
    pub region: &'a Arc<Region>,
    /// Where in it.
    pub at: usize,
    /// How much.
    pub bytes: usize,
    /// To the segment, or from it.
    pub write: bool,
}

/// A copy that waits for its key, for room in the queue, or for those before it.
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

/// What became of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// It is posted, or over.
    Taken,
    /// It must wait.
    Waits,
    /// The same, until the peer has said what reaches its segment: it is to be asked.
    AsksKey,
}

/// The one-sided copies of a link.
pub(in crate::rdma) struct Copies {
    pub(in crate::rdma) keys: SegmentKeys,
    waiting: VecDeque<WaitingCopy>,
    /// How an earlier part of the copy failed whose last part has not ended yet.
    part_failed: Option<Outcome>,
}

impl Copies {
    pub(super) fn new() -> Self {
        Self { keys: SegmentKeys::new(), waiting: VecDeque::new(), part_failed: None }
    }

    /// Whether none waits.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Posts a copy and those behind it that are of the same memory at both ends, as long as there is room. Returns
    /// how many, and the first that was not posted.
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
        // What it needs by value: it is done for each copy.
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
            // A queue pair that takes nothing says why when the first is posted alone.
            Ok(0) | Err(_) => (0, Some(first)),
        }
    }

    /// Posts a copy, or keeps it until it can be. The segment whose key is missing, if it is.
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

    /// A copy waits for its key, for room in the queue, or for those that wait.
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

    /// Posts copies that wait, as far as the queue and known keys allow. The segment whose key the peer is to be asked
    /// for, if it is.
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

    /// Posts a copy, or says why it cannot be.
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
            // The caller reports its end, and once.
            Err(refusal) => Err(CloseCause::Rdma(format!("a request was refused: {refusal}"))),
        }
    }

    /// A part of a copy is over that was not all that was left of it, or did not succeed: which copy, if it was the
    /// last.
    pub(in crate::rdma) fn part_over(
        &mut self,
        id: ConnectionId,
        token: Option<u64>,
        status: Status,
        copied: &mut CopyCompletions,
    ) {
        let failed = match status {
            Status::Success => None,
            // The key is of no use any more. A request that the other device calls invalid says nothing of the key:
            // soft-RoCE answers so where packets were lost, and another connection may do.
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

    /// The device holds nothing of the link any more: those that wait are over too.
    pub(super) fn end(self, id: ConnectionId, copied: &mut CopyCompletions) {
        self.waiting.iter().for_each(|copy| copied.push(id, copy.token, Err(Outcome::Unreachable)));
    }
}

/// Posts a copy that takes several requests. There is room for them.
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

/// The registration of a copy's memory and the piece that it starts with, if the copy can be done.
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
