//! One-sided copies between our memory and peers' segments, and the keys that they need.
//!
//! The key of a segment is asked for once for each connection, by a message, and kept by the segment's id with its
//! generation. Copies of a connection start in order; a copy is over when the device says so, or holds nothing of it
//! any more. The owner of a segment ends access by deregistering it: the device refuses what comes later.

use core::ptr;
use std::collections::HashMap;
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId, Status as Outcome};
use kvplane_sys::verbs::{MemoryRegion, OneSidedRun, Piece, QueuePair, Refusal, Remote, Status};
use kvplane_sys::{IoBuf, Region};

use super::ended::CopyCompletions;
use super::link::{Control, Copy, KeyState, Link, State, Work};
use super::memory::access;
use super::nic::Nic;
use super::send::{REQUEST_BYTES, ROOM_FOR_MESSAGES};
use super::wire::SegmentKey;
use super::{Books, Rdma};
use crate::types::{CloseCause, ConnectionId};

/// A segment that peers may reach.
pub(super) struct Segment {
    region: Arc<Region>,
    bytes: u64,
    writable: bool,
    /// One registration for each device that was asked for it; none where it was refused.
    keys: HashMap<usize, Option<MemoryRegion>>,
}

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

impl Copy {
    fn view(&self) -> RdmaCopy<'_> {
        let Self { token, segment, offset, ref local, write } = *self;
        RdmaCopy { token, segment, offset, region: local.region(), at: local.offset(), bytes: local.bytes(), write }
    }
}

impl Rdma {
    /// Lets peers reach this memory by their own requests. Registered with each device now, which takes as long as
    /// pinning it does; where a device refuses, peers use frames.
    pub fn publish(&mut self, segment: SegmentId, region: &Arc<Region>, bytes: u64, writable: bool) {
        let bytes = bytes.min(region.bytes() as u64);
        let mut entry = Segment { region: Arc::clone(region), bytes, writable, keys: HashMap::new() };
        for nic in 0..self.nics.len() {
            self.register_segment(nic, &mut entry);
        }
        self.segments.insert(segment, entry);
    }

    fn register_segment(&mut self, nic: usize, segment: &mut Segment) {
        let memory = IoBuf::new(Arc::clone(&segment.region), 0, segment.bytes as usize);
        let registered = self.nics[nic].domain.register(&memory, access(&segment.region, segment.writable));
        let key = registered.map_err(|error| self.books.problem = Some(error.to_string())).ok();
        segment.keys.insert(nic, key);
    }

    /// Ends peers' access to a segment: when this returns, no device lets anybody in any more. Those that know its key
    /// are told, so that they need not find out.
    pub fn retract(&mut self, segment: SegmentId) {
        if self.segments.remove(&segment).is_none() {
            return;
        }
        let mut told = Vec::new();
        for (index, link) in self.links.iter_mut().enumerate() {
            if let Some(link) = link.as_deref_mut()
                && link.told.remove(&segment)
                && link.state == State::Open
            {
                link.control.push_back(Control::SegmentGone(segment));
                told.push(index as u32);
            }
        }
        for index in told {
            self.mark_dirty(index);
        }
    }

    /// What a peer is told about a segment.
    pub(super) fn key_of(&mut self, id: ConnectionId, segment: SegmentId) -> SegmentKey {
        let Some(nic) = self.parts(id).map(|(link, _, _)| link.nic as usize) else {
            return SegmentKey::refused(Outcome::Stale);
        };
        let Some(mut entry) = self.segments.remove(&segment) else { return SegmentKey::refused(Outcome::Stale) };
        if !entry.keys.contains_key(&nic) {
            self.register_segment(nic, &mut entry);
        }
        let key = match entry.keys.get(&nic) {
            Some(Some(memory)) => SegmentKey {
                status: Outcome::Ok,
                writable: entry.writable,
                key: memory.remote_key(),
                address: memory.address(),
                bytes: entry.bytes,
            },
            _ => SegmentKey::refused(Outcome::Unsupported),
        };
        self.segments.insert(segment, entry);
        key
    }

    /// The local and the remote key of a segment on a device, registered now if it was not; none where it is refused.
    pub(super) fn registration_of(&mut self, nic: usize, segment: SegmentId) -> Option<(u32, u32)> {
        let mut entry = self.segments.remove(&segment)?;
        if !entry.keys.contains_key(&nic) {
            self.register_segment(nic, &mut entry);
        }
        let memory = entry.keys.get(&nic).and_then(Option::as_ref);
        let keys = memory.map(|memory| (memory.local_key(), memory.remote_key()));
        self.segments.insert(segment, entry);
        keys
    }

    /// Copies between our memory and ranges of a peer's segments. The outcomes come by [`Self::take_copied`]:
    /// `Unsupported` says that the peer or our device cannot reach the memory in this way; `Unreachable`, that the
    /// connection ended first, so whether it was done is not known. Several in a row cost much less than each alone.
    pub fn copy_many<'a>(&mut self, id: ConnectionId, copies: impl IntoIterator<Item = RdmaCopy<'a>>) {
        let mut copies = copies.into_iter();
        if let Some(first) = copies.next() {
            self.copy_all(id, first, copies);
        }
    }

    /// The same for one that is known and those behind it.
    #[inline]
    pub fn copy_all<'a>(
        &mut self,
        id: ConnectionId,
        first: RdmaCopy<'a>,
        mut copies: impl Iterator<Item = RdmaCopy<'a>>,
    ) {
        let Some((link, nic, books)) = self.parts(id).filter(|(link, _, _)| link.state == State::Open) else {
            let all = core::iter::once(first).chain(copies);
            all.for_each(|copy| self.books.copied.push(id, copy.token, Err(Outcome::Unreachable)));
            return;
        };
        let mut failed = None;
        let mut next = Some(first);
        while let Some(copy) = next {
            let (posted, left) = link.post_run(copy, &mut copies, nic);
            if posted > 0 {
                // Where the queue is full, the next is kept until it is not.
                next = left.or_else(|| copies.next());
                continue;
            }
            next = copies.next();
            if let Err(why) = link.take_copy(id, &copy, nic, books) {
                books.copied.push(id, copy.token, Err(Outcome::Unreachable));
                failed = Some(why);
                break;
            }
        }
        let rest = next.into_iter().chain(copies);
        if !core::mem::replace(&mut link.dirty, true) {
            self.dirty.push_back(id.index);
        }
        if let Some(why) = failed {
            rest.for_each(|copy| self.books.copied.push(id, copy.token, Err(Outcome::Unreachable)));
            self.close(id, why);
        }
    }

    /// Puts the copies that are over behind those in `into`. Their memory is touched by nobody any more.
    pub fn take_copied(&mut self, into: &mut CopyCompletions) {
        into.append(&mut self.books.copied);
    }
}

impl Link {
    /// Posts a copy and those behind it that are of the same memory at both ends, as long as there is room. Returns
    /// how many, and the first that was not posted.
    #[inline]
    fn post_run<'a>(
        &mut self,
        first: RdmaCopy<'a>,
        copies: &mut impl Iterator<Item = RdmaCopy<'a>>,
        nic: &mut Nic,
    ) -> (usize, Option<RdmaCopy<'a>>) {
        let Some((segment, key)) = &self.last_key else { return (0, Some(first)) };
        let open = if first.write { key.writable } else { first.region.writable() };
        if *segment != first.segment || key.status != Outcome::Ok || !open || !self.waiting.is_empty() {
            return (0, Some(first));
        }
        let Some(memory) = nic.memory.find(first.region) else { return (0, Some(first)) };
        let most = self.queue_pair.room().saturating_sub(ROOM_FOR_MESSAGES);
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
        let pushed = self.queue_pair.push_run(&run, begin, || {
            let copy = copies.next()?;
            let next = one(&copy);
            if next.is_none() {
                left = Some(copy);
            }
            next
        });
        match pushed {
            Ok(posted @ 1..) => (posted, left),
            // A queue pair that takes nothing says why when it is asked for the first alone.
            Ok(0) | Err(_) => (0, Some(first)),
        }
    }

    #[inline]
    fn take_copy(
        &mut self,
        id: ConnectionId,
        copy: &RdmaCopy<'_>,
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<(), CloseCause> {
        if !self.waiting.is_empty() || !self.post_copy(id, copy, nic, books)? {
            self.keep_copy(id, copy, books);
        }
        Ok(())
    }

    /// A copy waits for its key, for room in the queue, or for those that wait.
    #[cold]
    fn keep_copy(&mut self, id: ConnectionId, copy: &RdmaCopy<'_>, books: &mut Books) {
        let end = copy.at.checked_add(copy.bytes);
        if end.is_none_or(|end| end > copy.region.bytes()) {
            books.copied.push(id, copy.token, Err(Outcome::OutOfRange));
        } else if self.waiting.len() >= Limits::REQUESTS_PER_CONNECTION {
            books.copied.push(id, copy.token, Err(Outcome::Busy));
        } else {
            let local = IoBuf::new(Arc::clone(copy.region), copy.at, copy.bytes);
            let RdmaCopy { token, segment, offset, write, .. } = *copy;
            self.waiting.push_back(Copy { token, segment, offset, local, write });
        }
    }

    /// Posts copies that wait, as far as the queue and known keys allow.
    pub(super) fn post_copies(&mut self, id: ConnectionId, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        while let Some(copy) = self.waiting.pop_front() {
            match self.post_copy(id, &copy.view(), nic, books) {
                Ok(true) => {}
                Ok(false) => {
                    self.waiting.push_front(copy);
                    break;
                }
                Err(why) => {
                    books.copied.push(id, copy.token, Err(Outcome::Unreachable));
                    return Err(why);
                }
            }
        }
        Ok(())
    }

    /// Posts a copy, or says why it cannot be. False when it must wait for its key or for room in the queue.
    #[inline]
    fn post_copy(
        &mut self,
        id: ConnectionId,
        copy: &RdmaCopy<'_>,
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<bool, CloseCause> {
        if self.last_key.as_ref().is_none_or(|(segment, _)| *segment != copy.segment) && !self.find_key(copy.segment) {
            return Ok(false);
        }
        let Some((_, key)) = &self.last_key else { return Ok(false) };
        let bytes = copy.bytes as u64;
        let requests = if bytes <= REQUEST_BYTES { 1 } else { bytes.div_ceil(REQUEST_BYTES) };
        let most = (self.send_depth - ROOM_FOR_MESSAGES) as u64;
        if self.queue_pair.room() < ROOM_FOR_MESSAGES + requests.min(most) as usize {
            return Ok(false);
        }
        let (memory, whole) = match check(copy, key, nic, requests <= most) {
            Ok(checked) => checked,
            Err(status) => {
                books.copied.push(id, copy.token, Err(status));
                return Ok(true);
            }
        };
        let remote = Remote { address: key.address + copy.offset, key: key.key };
        let pushed = if requests == 1 {
            self.queue_pair.push_one_sided(Work::Copy(copy.token).to_bits(), copy.write, remote, &whole)
        } else {
            push_parts(&mut self.queue_pair, copy, remote, memory)
        };
        match pushed {
            Ok(()) => Ok(true),
            // Whoever asked is told by the caller, and once.
            Err(refusal) => Err(CloseCause::Rdma(format!("a request was refused: {refusal}"))),
        }
    }

    /// Makes the key of a segment the last one; asks for it when it is not known.
    #[cold]
    fn find_key(&mut self, segment: SegmentId) -> bool {
        if let Some(foreign) = &self.foreign {
            self.last_key = Some((segment, foreign.key(segment)));
            return true;
        }
        match self.keys.get(&segment) {
            Some(KeyState::Known(key)) => {
                self.last_key = Some((segment, *key));
                return true;
            }
            Some(KeyState::Asked) => return false,
            None => {}
        }
        if self.keys.len() >= Limits::SEGMENTS {
            // Ids of segments that are long gone: what is still true is found out again.
            self.keys.clear();
        }
        self.keys.insert(segment, KeyState::Asked);
        self.control.push_back(Control::AskKey(segment));
        false
    }

    /// A part of a copy is over that was not all that was left of it, or did not succeed: which copy, if it was the
    /// last.
    pub(super) fn copy_over(&mut self, id: ConnectionId, token: Option<u64>, status: Status, books: &mut Books) {
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
            books.copied.push(id, token, failed.map_or(Ok(()), Err));
        }
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
