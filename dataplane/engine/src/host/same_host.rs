//! Segments of peers on this host, and of this process: copied here, without the peer's help, behind its fence.
//!
//! A copy names its segment, looks whether that is still alive, moves the bytes, and lets go. What is long is moved in
//! chunks with a look between them, so that an owner waits for one chunk at most. Copies by the kernel (cma) that
//! follow one another are gathered, and go as one call.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_client::{LaneEvent, LaneId, Local, SliceId, Via};
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{CrossError, CrossProcessRange, IoBuf, Region, process_memory};
use kvplane_transport::shm::{CHUNK_BYTES, Extent, SLOTS};
use kvplane_transport::{CloseCause, ConnectionId};

use super::Host;
use super::copies::{copy, range};
use super::roles::Link;
use super::rounds::BYTES_PER_CLOCK;

/// Copies of one call to the kernel.
const GATHERED: usize = 512;
/// How often mappings of segments that are gone are looked for.
const SWEEP_NS: u64 = 1_000_000_000;
/// How long peers that are in the middle of a copy are waited for closely.
const CLOSE_NS: u64 = 2_000_000_000;

/// A copy between the caller's memory and a segment.
#[derive(Clone, Copy)]
pub(super) struct SegmentCopy {
    pub(super) slice: SliceId,
    pub(super) via: Via,
    pub(super) segment: SegmentId,
    pub(super) offset: u64,
    pub(super) local: Local,
    pub(super) write: bool,
}

impl SegmentCopy {
    /// Whether the segment's owner allows it.
    fn check(&self, extent: &Extent) -> Result<(), Status> {
        if self.write && !extent.writable {
            return Err(Status::Unauthorized);
        }
        let end = self.offset.checked_add(self.local.bytes);
        if end.is_some_and(|end| end <= extent.bytes) { Ok(()) } else { Err(Status::OutOfRange) }
    }
}

/// What a host keeps for such copies.
#[derive(Default)]
pub(super) struct SameHost {
    /// Copies by the kernel that wait to go together: all of one lane, all in one direction.
    gathered: Vec<SegmentCopy>,
    lane: Option<LaneId>,
    gathered_bytes: u64,
    crossings: Vec<CrossProcessRange>,
    /// Segments that they name, one slot each.
    claimed: Vec<(SegmentId, Option<Extent>)>,
    outcomes: Vec<Result<u64, Status>>,
    /// Copies that wait for their segment to be mapped.
    waiting: BTreeMap<(ConnectionId, SegmentId), Vec<(LaneId, SegmentCopy)>>,
    /// Our own segments that were unregistered, and that peers were using then.
    leaving: Vec<(SegmentId, Option<Arc<Region>>)>,
    /// Until when those are waited for closely.
    closely_until_ns: u64,
    sweep_at_ns: u64,
}

impl SameHost {
    /// Whether peers are waited for, who ring no bell when they are done.
    pub(super) const fn is_waiting(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Whether that is worth looking for many times a second: who was stopped in the middle of a copy may stay so for
    /// days.
    pub(super) const fn is_close(&self, now_ns: u64) -> bool {
        now_ns < self.closely_until_ns
    }

    /// A connection is gone, and whoever waited for its copies knows it.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        self.waiting.retain(|&(of, _), _| of != id);
    }

    fn takes(&self, lane: LaneId, copy: &SegmentCopy) -> bool {
        self.gathered.last().is_none_or(|last| last.write == copy.write && self.lane == Some(lane))
            && self.gathered.len() < GATHERED
            && (self.gathered.is_empty() || self.gathered_bytes + copy.local.bytes <= CHUNK_BYTES as u64)
            && (self.claimed.len() < SLOTS || self.claimed.iter().any(|(segment, _)| *segment == copy.segment))
    }
}

impl Host {
    /// Copies a range of a segment, now or with others of its kind; then the client is told.
    pub(super) fn copy_segment(&mut self, lane: LaneId, copy: &SegmentCopy, now_ns: u64) {
        let result = match (copy.via, self.link_of(lane)) {
            (Via::Own, _) => self.copy_own(copy),
            // It ended in this round, which the client is told in the next: then it takes another way.
            (_, Some(Link::Shm(id))) if !self.shm.is_up(id) => return,
            (Via::Map, Some(Link::Shm(id))) => {
                if !self.regions.mapped.contains_key(&(id, copy.segment)) {
                    self.map(id, lane, copy, now_ns);
                    return;
                }
                self.copy_mapped(id, copy)
            }
            (Via::Cma, Some(Link::Shm(_))) => {
                self.gather(lane, copy, now_ns);
                return;
            }
            // The lane is gone, and whoever waited for the copy knows it.
            _ => return,
        };
        self.segment_copied(lane, copy, result, now_ns);
    }

    fn segment_copied(&mut self, lane: LaneId, copy: &SegmentCopy, result: Result<u64, Status>, now_ns: u64) {
        if result.is_ok() {
            let counters = &mut self.counters;
            let count = if copy.via == Via::Map { &mut counters.map_bytes } else { &mut counters.local_bytes };
            *count += copy.local.bytes;
        }
        let now_ns = self.copied_at(copy.local.bytes, now_ns);
        self.copied(lane, copy.slice, result, now_ns);
    }

    fn copy_own(&self, copied: &SegmentCopy) -> Result<u64, Status> {
        let region = self.segment(copied.segment).ok_or(Status::Stale)?;
        if copied.write && !region.writable() {
            return Err(Status::Unauthorized);
        }
        let theirs = range(region, copied.offset, copied.local.bytes).ok_or(Status::OutOfRange)?;
        move_bytes(&theirs, &self.local(copied.local), copied.write);
        Ok(0)
    }

    fn copy_mapped(&mut self, id: ConnectionId, copied: &SegmentCopy) -> Result<u64, Status> {
        let segment = copied.segment;
        let Some(extent) = self.shm.claim(id, 0, segment) else {
            self.regions.mapped.remove(&(id, segment));
            return Err(Status::Stale);
        };
        let result = self.copy_claimed(id, copied, &extent);
        self.shm.clear(id, 1);
        result
    }

    fn copy_claimed(&self, id: ConnectionId, copied: &SegmentCopy, extent: &Extent) -> Result<u64, Status> {
        copied.check(extent)?;
        let region = self.regions.mapped.get(&(id, copied.segment)).ok_or(Status::Stale)?;
        if copied.write && !region.writable() {
            return Err(Status::Unauthorized);
        }
        let theirs = range(region, copied.offset, copied.local.bytes).ok_or(Status::OutOfRange)?;
        let ours = self.local(copied.local);
        if ours.bytes() <= CHUNK_BYTES {
            move_bytes(&theirs, &ours, copied.write);
            return Ok(0);
        }
        for (at, bytes) in chunks(ours.bytes()) {
            if at > 0 && !self.shm.is_live(id, copied.segment) {
                return Err(Status::Stale);
            }
            move_bytes(&theirs.slice(at, bytes), &ours.slice(at, bytes), copied.write);
        }
        Ok(0)
    }

    /// Has a segment mapped for a copy, which waits for that.
    fn map(&mut self, id: ConnectionId, lane: LaneId, copy: &SegmentCopy, now_ns: u64) {
        let (segment, key) = (copy.segment, (id, copy.segment));
        if !self.shm.is_live(id, segment) {
            self.copied(lane, copy.slice, Err(Status::Stale), now_ns);
            return;
        }
        if !self.same_host.waiting.contains_key(&key)
            && let Err(error) = self.shm.ask_segment(id, segment, now_ns)
        {
            self.notices.problem(error.to_string());
            self.copied(lane, copy.slice, Err(Status::Unsupported), now_ns);
            return;
        }
        self.same_host.waiting.entry(key).or_default().push((lane, *copy));
    }

    /// Carries out the copies whose segments have been mapped; those whose segment cannot be, or not in time, are
    /// `Unsupported` in this way. Whether there were any.
    pub(super) fn take_mapped(&mut self, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some((id, segment, answer)) = self.shm.poll_mapped() {
            progress = true;
            let waiting = self.same_host.waiting.remove(&(id, segment)).unwrap_or_default();
            let mapped = answer.map(|region| self.regions.mapped.insert((id, segment), region));
            for (lane, copy) in waiting {
                // Of another incarnation of the lane, whoever waited for it knows that it has ended.
                if self.link_of(lane) != Some(Link::Shm(id)) {
                    continue;
                }
                let result = match &mapped {
                    Ok(_) => self.copy_mapped(id, &copy),
                    Err(_) => Err(Status::Unsupported),
                };
                self.segment_copied(lane, &copy, result, now_ns);
            }
            if let Err(why) = mapped {
                self.notices.problem(why);
            }
        }
        progress
    }

    /// Puts a copy with those before it; those go first where it does not fit.
    fn gather(&mut self, lane: LaneId, copy: &SegmentCopy, now_ns: u64) {
        if !self.same_host.takes(lane, copy) {
            self.cross(now_ns);
        }
        let state = &mut self.same_host;
        state.lane = Some(lane);
        state.gathered.push(*copy);
        state.gathered_bytes += copy.local.bytes;
        if !state.claimed.iter().any(|(segment, _)| *segment == copy.segment) {
            state.claimed.push((copy.segment, None));
        }
    }

    /// Carries out the copies that were gathered; whether there were any.
    pub(super) fn cross(&mut self, now_ns: u64) -> bool {
        if self.same_host.gathered.is_empty() {
            return false;
        }
        let mut state = core::mem::take(&mut self.same_host);
        if let Some((lane, Link::Shm(id))) = state.lane.take().and_then(|lane| Some((lane, self.link_of(lane)?))) {
            let crossed = self.cross_to(id, &mut state, now_ns);
            let now_ns = self.copied_at(BYTES_PER_CLOCK, now_ns);
            match crossed {
                Ok(()) => {
                    for (copy, outcome) in state.gathered.iter().zip(&state.outcomes) {
                        self.counters.cma_bytes += if outcome.is_ok() { copy.local.bytes } else { 0 };
                        self.copied(lane, copy.slice, *outcome, now_ns);
                    }
                }
                Err(CrossError::Gone) => self.close(Link::Shm(id), CloseCause::Peer),
                Err(error) => {
                    self.notices.problem(error.to_string());
                    if let Some(client) = &mut self.client {
                        client.lane_event(lane, LaneEvent::CmaAllowed(false), now_ns);
                    }
                    for copy in &state.gathered {
                        self.copied(lane, copy.slice, Err(Status::Unsupported), now_ns);
                    }
                }
            }
        }
        state.gathered.clear();
        state.claimed.clear();
        state.outcomes.clear();
        state.gathered_bytes = 0;
        self.same_host = state;
        true
    }

    /// One outcome for each copy, or why there is none for any.
    fn cross_to(&self, id: ConnectionId, state: &mut SameHost, now_ns: u64) -> Result<(), CrossError> {
        let Some(pid) = self.shm.process(id) else { return Err(CrossError::Denied) };
        if !self.shm.is_same_process(id, now_ns) {
            return Err(CrossError::Gone);
        }
        for (slot, (segment, extent)) in state.claimed.iter_mut().enumerate() {
            *extent = self.shm.claim(id, slot, *segment);
        }
        state.crossings.clear();
        for copied in &state.gathered {
            let extent = state.claimed.iter().find(|(segment, _)| *segment == copied.segment).and_then(|found| found.1);
            let checked = extent.ok_or(Status::Stale).and_then(|extent| copied.check(&extent).map(|()| extent));
            state.outcomes.push(checked.map(|extent| {
                let address = extent.address.wrapping_add(copied.offset);
                state.crossings.push(CrossProcessRange { local: self.local(copied.local), address });
                0
            }));
        }
        let moved = self.move_claimed(id, pid, state);
        self.shm.clear(id, state.claimed.len());
        state.crossings.clear();
        moved
    }

    /// Moves the crossings: in one call, or where a range is not there, each by itself, to find out which.
    fn move_claimed(&self, id: ConnectionId, pid: i32, state: &mut SameHost) -> Result<(), CrossError> {
        let write = state.gathered.first().is_some_and(|copied| copied.write);
        let call = if write { process_memory::write } else { process_memory::read };
        if let [crossing] = &state.crossings[..]
            && crossing.local.bytes() > CHUNK_BYTES
        {
            let position = state.outcomes.iter().position(Result::is_ok).unwrap_or_default();
            state.outcomes[position] = self.move_long(id, pid, state.gathered[position].segment, crossing, call)?;
            return Ok(());
        }
        match call(pid, &state.crossings) {
            Err(CrossError::Fault) => {}
            result => return result,
        }
        let mut crossings = state.crossings.iter();
        for outcome in state.outcomes.iter_mut().filter(|outcome| outcome.is_ok()) {
            let Some(crossing) = crossings.next() else { break };
            match call(pid, core::slice::from_ref(crossing)) {
                Ok(()) => {}
                Err(CrossError::Fault) => *outcome = Err(Status::Unsupported),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// One copy that is longer than a chunk.
    fn move_long(
        &self,
        id: ConnectionId,
        pid: i32,
        segment: SegmentId,
        crossing: &CrossProcessRange,
        call: fn(i32, &[CrossProcessRange]) -> Result<(), CrossError>,
    ) -> Result<Result<u64, Status>, CrossError> {
        for (at, bytes) in chunks(crossing.local.bytes()) {
            if at > 0 && !self.shm.is_live(id, segment) {
                return Ok(Err(Status::Stale));
            }
            let part = CrossProcessRange {
                local: crossing.local.slice(at, bytes),
                address: crossing.address.wrapping_add(at as u64),
            };
            match call(pid, &[part]) {
                Ok(()) => {}
                Err(CrossError::Fault) => return Ok(Err(Status::Unsupported)),
                Err(error) => return Err(error),
            }
        }
        Ok(Ok(0))
    }

    /// The service lets go of a segment: peers that copy by themselves start no more, and those that have started are
    /// waited for.
    pub(super) fn segment_left(&mut self, segment: SegmentId) {
        self.shm.retract(segment);
        // From here on the devices let nobody in.
        self.rdma_work.driver.retract(segment);
        let region = self.regions.segments.take(segment);
        if let Some(region) = &region {
            self.forget_rdma(region);
        }
        self.same_host.closely_until_ns = self.rounds.now_ns().saturating_add(CLOSE_NS);
        // Asked for again, it is waited for once.
        if !self.same_host.leaving.iter().any(|(leaving, _)| *leaving == segment) {
            self.same_host.leaving.push((segment, region));
        }
        self.see_off();
    }

    /// Takes a segment from peers. [`Host::poll_unregistered`] says when nothing uses it any more; asked for again, it
    /// says so again.
    pub fn unregister(&mut self, segment: SegmentId) {
        // At once, also where a request on a stream has to end first.
        self.shm.retract(segment);
        if let Some(service) = &mut self.service {
            service.unregister(segment);
        }
    }

    /// The processes of this host that are using a segment by themselves; 0 for one that is not visible from here.
    pub fn segment_users(&mut self, segment: SegmentId) -> Vec<i32> {
        self.shm.users(segment)
    }

    /// Reports the segments that no peer is using any more.
    pub(super) fn see_off(&mut self) {
        let mut leaving = core::mem::take(&mut self.same_host.leaving);
        leaving.retain(|&(segment, _)| {
            let used = self.shm.is_named(segment);
            if !used {
                self.notices.segment_free(segment);
            }
            used
        });
        self.same_host.leaving = leaving;
    }

    /// Lets go of mappings whose segments are gone, now and then: they hold memory that its owner has given back.
    pub(super) fn sweep_mapped(&mut self, now_ns: u64) {
        if self.regions.mapped.is_empty() || now_ns < self.same_host.sweep_at_ns {
            return;
        }
        self.same_host.sweep_at_ns = now_ns.saturating_add(SWEEP_NS);
        self.regions.mapped.retain(|&(id, segment), _| self.shm.is_live(id, segment));
    }
}

fn move_bytes(theirs: &IoBuf, ours: &IoBuf, write: bool) {
    if write {
        copy(theirs, ours);
    } else {
        copy(ours, theirs);
    }
}

/// Where chunks start, and how long they are.
fn chunks(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(CHUNK_BYTES).map(move |at| (at, CHUNK_BYTES.min(bytes - at)))
}
