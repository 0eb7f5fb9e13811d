//! One-sided copies between our memory and peers' segments, and the keys that they need.
//!
//! The key of a segment is asked for once for each connection, by a message, and kept by the segment's id with its
//! generation. Copies of a connection start in order; a copy is over when the device says so, or holds nothing of it
//! any more. The owner of a segment ends access by deregistering it: the device refuses what comes later.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId, Status as Outcome};
use kvplane_sys::verbs::{MemoryRegion, Operation, Payload, Refusal, Remote, Request, Status};
use kvplane_sys::{IoBuf, Region};

use super::link::{Control, Copy, KeyState, Link, Posted, State, Work};
use super::memory::access;
use super::nic::Nic;
use super::send::{REQUEST_BYTES, ROOM_FOR_MESSAGES};
use super::wire::SegmentKey;
use super::{Books, Rdma};
use crate::types::{ConnectionId, Gone};

/// A segment that peers may reach.
pub(super) struct Segment {
    region: Arc<Region>,
    bytes: u64,
    writable: bool,
    /// One registration for each device that was asked for it; none where it was refused.
    keys: HashMap<usize, Option<MemoryRegion>>,
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

    /// Copies between our memory and a range of a peer's segment: from it, or to it when `write`. The outcome comes by
    /// [`Self::poll_copied`] under `token`. `Unsupported` says that the peer or our device cannot reach the memory in
    /// this way; `Unreachable`, that the connection ended first, so whether it was done is not known.
    pub fn copy(
        &mut self,
        id: ConnectionId,
        token: u64,
        (segment, offset): (SegmentId, u64),
        local: IoBuf,
        write: bool,
    ) {
        let Some((link, nic, books)) = self.parts(id).filter(|(link, _, _)| link.state == State::Open) else {
            self.books.copied.push_back((id, token, Err(Outcome::Unreachable)));
            return;
        };
        if link.waiting.len() >= Limits::REQUESTS_PER_CONNECTION {
            books.copied.push_back((id, token, Err(Outcome::Busy)));
            return;
        }
        let copy = Copy { token, segment, offset, local, write };
        let posted = if link.waiting.is_empty() { link.post_copy(id, &copy, nic, books) } else { Ok(false) };
        match posted {
            Ok(true) => {}
            Ok(false) => link.waiting.push_back(copy),
            Err(why) => {
                books.copied.push_back((id, token, Err(Outcome::Unreachable)));
                return self.close(id, why);
            }
        }
        if !core::mem::replace(&mut link.dirty, true) {
            self.dirty.push_back(id.index);
        }
    }

    /// A copy that is over: its connection, its token, and how it went. Its memory is touched by nobody any more.
    pub fn poll_copied(&mut self) -> Option<(ConnectionId, u64, Result<(), Outcome>)> {
        self.books.copied.pop_front()
    }
}

impl Link {
    /// Posts copies that wait, as far as the queue and known keys allow.
    pub(super) fn post_copies(&mut self, id: ConnectionId, nic: &mut Nic, books: &mut Books) -> Result<(), Gone> {
        while let Some(copy) = self.waiting.pop_front() {
            match self.post_copy(id, &copy, nic, books) {
                Ok(true) => {}
                Ok(false) => {
                    self.waiting.push_front(copy);
                    break;
                }
                Err(why) => {
                    books.copied.push_back((id, copy.token, Err(Outcome::Unreachable)));
                    return Err(why);
                }
            }
        }
        Ok(())
    }

    /// Posts a copy, or says why it cannot be. False when it must wait for its key or for room in the queue.
    #[inline]
    fn post_copy(&mut self, id: ConnectionId, copy: &Copy, nic: &mut Nic, books: &mut Books) -> Result<bool, Gone> {
        let key = match &self.last_key {
            Some((segment, key)) if *segment == copy.segment => *key,
            _ => match self.find_key(copy.segment) {
                Some(key) => key,
                None => return Ok(false),
            },
        };
        let bytes = copy.local.bytes() as u64;
        let requests = if bytes <= REQUEST_BYTES { 1 } else { bytes.div_ceil(REQUEST_BYTES) };
        let most = (self.send_depth - ROOM_FOR_MESSAGES) as u64;
        if self.queue_pair.room() < ROOM_FOR_MESSAGES + requests.min(most) as usize {
            return Ok(false);
        }
        let memory = match check(copy, &key, nic, requests <= most) {
            Ok(memory) => memory,
            Err(status) => {
                books.copied.push_back((id, copy.token, Err(status)));
                return Ok(true);
            }
        };
        let posted = Posted { token: copy.token, segment: copy.segment, left: requests as u32, failed: None };
        self.posted.push_back(posted);
        let work = Work::Copy.to_bits();
        let address = key.address + copy.offset;
        let mut at = 0;
        for _ in 0..requests {
            let part = (bytes - at).min(REQUEST_BYTES) as u32;
            let remote = Remote { address: address + at, key: key.key };
            let operation = if copy.write { Operation::Write { to: remote } } else { Operation::Read { from: remote } };
            let Some(piece) = memory.piece(copy.local.offset() + at as usize, part) else {
                return Err(self.refused(None));
            };
            let pieces = [piece];
            if let Err(refusal) = self.queue_pair.push(&Request::new(work, operation, Payload::Pieces(&pieces))) {
                return Err(self.refused(Some(refusal)));
            }
            at += u64::from(part);
        }
        Ok(true)
    }

    /// The copy that was to be posted was refused; whoever asked is told by the caller, and once.
    #[cold]
    fn refused(&mut self, refusal: Option<Refusal>) -> Gone {
        self.posted.pop_back();
        Gone::Rdma(match refusal {
            Some(refusal) => format!("a request was refused: {refusal}"),
            None => "memory is not registered".to_owned(),
        })
    }

    /// The key of a segment; it is asked for when it is not known.
    fn find_key(&mut self, segment: SegmentId) -> Option<SegmentKey> {
        match self.keys.get(&segment) {
            Some(KeyState::Known(key)) => {
                self.last_key = Some((segment, *key));
                return Some(*key);
            }
            Some(KeyState::Asked) => return None,
            None => {}
        }
        if self.keys.len() >= Limits::SEGMENTS {
            // Ids of segments that are long gone: what is still true is found out again.
            self.keys.clear();
        }
        self.keys.insert(segment, KeyState::Asked);
        self.control.push_back(Control::AskKey(segment));
        None
    }

    /// The token of a copy whose only request left has succeeded: it is over. None when there is more to it.
    #[inline]
    pub(super) fn copy_succeeded(posted: &mut VecDeque<Posted>) -> Option<u64> {
        let entry = posted.front()?;
        if entry.left != 1 || entry.failed.is_some() {
            return None;
        }
        posted.pop_front().map(|over| over.token)
    }

    /// A request of the oldest copy is over.
    pub(super) fn copy_over(&mut self, id: ConnectionId, status: Status, books: &mut Books) {
        let Some(posted) = self.posted.front_mut() else { return };
        posted.left = posted.left.saturating_sub(1);
        let failed = match status {
            Status::Success => None,
            // The key is of no use any more. A request that the other device calls invalid says nothing of the key:
            // soft-RoCE answers so where packets were lost, and another connection may do.
            Status::RemoteAccess => Some(Outcome::Stale),
            _ => Some(Outcome::Unreachable),
        };
        posted.failed = posted.failed.or(failed);
        if posted.left > 0 {
            return;
        }
        let Some(posted) = self.posted.pop_front() else { return };
        if posted.failed == Some(Outcome::Stale) {
            self.last_key = None;
            self.keys.remove(&posted.segment);
        }
        books.copied.push_back((id, posted.token, posted.failed.map_or(Ok(()), Err)));
    }
}

/// The registration of a copy's memory, if the copy can be done.
#[inline]
fn check<'a>(copy: &Copy, key: &SegmentKey, nic: &'a mut Nic, fits: bool) -> Result<&'a MemoryRegion, Outcome> {
    if key.status != Outcome::Ok {
        return Err(key.status);
    }
    if copy.write && !key.writable {
        return Err(Outcome::Unauthorized);
    }
    let end = copy.offset.checked_add(copy.local.bytes() as u64);
    if end.is_none_or(|end| end > key.bytes) {
        return Err(Outcome::OutOfRange);
    }
    if !fits || !copy.write && !copy.local.region().writable() {
        return Err(Outcome::Unsupported);
    }
    nic.memory.find(copy.local.region()).ok_or(Outcome::Unsupported)
}
