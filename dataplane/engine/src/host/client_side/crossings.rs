//! Copies by the kernel (CMA) between the caller's memory and segments of other processes. Consecutive copies are
//! batched into one system call.

use kvplane_client::LaneId;
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{CrossError, CrossProcessRange, process_memory};
use kvplane_transport::shm::{CHUNK_BYTES, Extent, SLOTS};
use kvplane_transport::{ConnectionId, Shm};

use super::buffers::Buffers;
use super::segment_copies::{SegmentCopy, chunks};

/// Most copies of one system call.
const GATHERED: usize = 512;

/// System call that reads or writes another process's memory.
type Call = fn(i32, &[CrossProcessRange]) -> Result<(), CrossError>;

/// Batch of copies for one system call: all of one lane, all in one direction.
#[derive(Default)]
pub(crate) struct Crossings {
    gathered: Vec<SegmentCopy>,
    lane: Option<LaneId>,
    gathered_bytes: u64,
    /// Ranges for the system call, of the copies that passed the checks.
    ranges: Vec<CrossProcessRange>,
    /// Segments of the copies, one slot each.
    claimed: Vec<(SegmentId, Option<Extent>)>,
    outcomes: Vec<Result<u64, Status>>,
}

impl Crossings {
    pub(crate) const fn is_empty(&self) -> bool {
        self.gathered.is_empty()
    }

    /// Returns the lane of the copies.
    pub(crate) const fn lane(&self) -> Option<LaneId> {
        self.lane
    }

    /// Returns the copies.
    pub(crate) fn copies(&self) -> &[SegmentCopy] {
        &self.gathered
    }

    /// Returns the copies with their outcomes, after [`Self::make`] has succeeded.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = (&SegmentCopy, Result<u64, Status>)> {
        self.gathered.iter().zip(self.outcomes.iter().copied())
    }

    /// Returns true if a copy fits in the batch.
    pub(crate) fn has_room_for(&self, lane: LaneId, copy: &SegmentCopy) -> bool {
        self.gathered.last().is_none_or(|last| last.write == copy.write && self.lane == Some(lane))
            && self.gathered.len() < GATHERED
            && (self.gathered.is_empty() || self.gathered_bytes + copy.local.bytes <= CHUNK_BYTES as u64)
            && (self.claimed.len() < SLOTS || self.claimed.iter().any(|(segment, _)| *segment == copy.segment))
    }

    /// Adds a copy to the batch.
    pub(crate) fn push(&mut self, lane: LaneId, copy: &SegmentCopy) {
        self.lane = Some(lane);
        self.gathered.push(*copy);
        self.gathered_bytes += copy.local.bytes;
        if !self.claimed.iter().any(|(segment, _)| *segment == copy.segment) {
            self.claimed.push((copy.segment, None));
        }
    }

    /// Empties the batch.
    pub(crate) fn clear(&mut self) {
        self.gathered.clear();
        self.claimed.clear();
        self.outcomes.clear();
        (self.gathered_bytes, self.lane) = (0, None);
    }

    /// Makes the copies with the peer of this connection: sets one outcome for each, or returns the error that failed
    /// all of them.
    pub(crate) fn make(
        &mut self,
        shm: &Shm,
        id: ConnectionId,
        buffers: &Buffers,
        now_ns: u64,
    ) -> Result<(), CrossError> {
        let Some(pid) = shm.process(id) else { return Err(CrossError::Denied) };
        if !shm.is_same_process(id, now_ns) {
            return Err(CrossError::Gone);
        }
        for (slot, (segment, extent)) in self.claimed.iter_mut().enumerate() {
            *extent = shm.claim(id, slot, *segment);
        }
        self.ranges.clear();
        for copied in &self.gathered {
            let extent = self.claimed.iter().find(|(segment, _)| *segment == copied.segment).and_then(|found| found.1);
            let checked = extent.ok_or(Status::Stale).and_then(|extent| copied.check(&extent).map(|()| extent));
            self.outcomes.push(checked.map(|extent| {
                let address = extent.address.wrapping_add(copied.offset);
                self.ranges.push(CrossProcessRange { local: buffers.one(copied.local), address });
                0
            }));
        }
        let moved = self.move_claimed(shm, id, pid);
        shm.clear(id, self.claimed.len());
        self.ranges.clear();
        moved
    }

    /// Moves the ranges in one call; if one is invalid, moves each by itself, to find out which.
    fn move_claimed(&mut self, shm: &Shm, id: ConnectionId, pid: i32) -> Result<(), CrossError> {
        let write = self.gathered.first().is_some_and(|copied| copied.write);
        let call: Call = if write { process_memory::write } else { process_memory::read };
        if let [range] = &self.ranges[..]
            && range.local.bytes() > CHUNK_BYTES
        {
            let position = self.outcomes.iter().position(Result::is_ok).unwrap_or_default();
            let is_live = || shm.extent(id, self.gathered[position].segment).is_some();
            self.outcomes[position] = move_long(pid, range, call, is_live)?;
            return Ok(());
        }
        match call(pid, &self.ranges) {
            Err(CrossError::Fault) => {}
            result => return result,
        }
        let mut ranges = self.ranges.iter();
        for outcome in self.outcomes.iter_mut().filter(|outcome| outcome.is_ok()) {
            let Some(range) = ranges.next() else { break };
            match call(pid, core::slice::from_ref(range)) {
                Ok(()) => {}
                Err(CrossError::Fault) => *outcome = Err(Status::Unsupported),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Makes one copy that is longer than a chunk.
fn move_long(
    pid: i32,
    range: &CrossProcessRange,
    call: Call,
    is_live: impl Fn() -> bool,
) -> Result<Result<u64, Status>, CrossError> {
    for (at, bytes) in chunks(range.local.bytes()) {
        if at > 0 && !is_live() {
            return Ok(Err(Status::Stale));
        }
        let part =
            CrossProcessRange { local: range.local.slice(at, bytes), address: range.address.wrapping_add(at as u64) };
        match call(pid, &[part]) {
            Ok(()) => {}
            Err(CrossError::Fault) => return Ok(Err(Status::Unsupported)),
            Err(error) => return Err(error),
        }
    }
    Ok(Ok(0))
}

#[cfg(test)]
mod tests {
    use kvplane_client::{Local, SliceId, Via};

    use super::*;

    fn copy(segment: u32, bytes: u64, write: bool) -> SegmentCopy {
        SegmentCopy {
            slice: SliceId { index: 0, generation: 0 },
            via: Via::Cma,
            segment: SegmentId { index: segment, generation: 1 },
            offset: 0,
            local: Local { buffer: 0, offset: 0, bytes },
            write,
        }
    }

    #[test]
    fn copies_of_one_lane_and_direction_go_together_up_to_a_chunk() {
        let [lane, other] = [1, 2].map(|index| LaneId { index, generation: 1 });
        let mut crossings = Crossings::default();
        let long = copy(0, 2 * CHUNK_BYTES as u64, false);
        assert!(crossings.has_room_for(lane, &long), "alone, a copy may be of any length");
        crossings.push(lane, &copy(0, 100, false));
        assert!(crossings.has_room_for(lane, &copy(0, CHUNK_BYTES as u64 - 100, false)));
        assert!(!crossings.has_room_for(lane, &copy(0, CHUNK_BYTES as u64 - 99, false)));
        assert!(!crossings.has_room_for(lane, &copy(0, 1, true)) && !crossings.has_room_for(other, &copy(0, 1, false)));
        crossings.clear();
        assert!(crossings.is_empty() && crossings.has_room_for(other, &copy(0, 1, true)));
    }

    #[test]
    fn copies_of_one_call_name_as_many_segments_as_there_are_slots() {
        let lane = LaneId { index: 1, generation: 1 };
        let mut crossings = Crossings::default();
        for segment in 0..SLOTS as u32 {
            crossings.push(lane, &copy(segment, 1, false));
        }
        assert!(crossings.has_room_for(lane, &copy(0, 1, false)));
        assert!(!crossings.has_room_for(lane, &copy(SLOTS as u32, 1, false)));
    }
}
