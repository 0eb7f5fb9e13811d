//! Copies between the caller's memory and segments of this process, or of peers on this host that are mapped here: made
//! by this thread, without the peer's help, under its fence.
//!
//! A copy claims its segment, checks that it is still live, moves the bytes, and releases the claim. A long copy is
//! moved in chunks with a check between them, so that an owner waits for one chunk at most.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_client::{LaneId, Local, SliceId, Via};
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::shm::{CHUNK_BYTES, Extent, MemoryRequest};
use kvplane_transport::{ConnectionId, Shm};

use super::buffers::Buffers;
use super::pool_copies::{copy, range};
use crate::host::segments::SegmentRegions;

/// Period of the sweep of mappings whose segments are gone.
const SWEEP_NS: u64 = 1_000_000_000;

/// Copy between the caller's memory and a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentCopy {
    pub(crate) slice: SliceId,
    pub(crate) via: Via,
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
    pub(crate) local: Local,
    pub(crate) write: bool,
}

impl SegmentCopy {
    /// Checks the copy against the extent that the segment's owner has published.
    pub(crate) fn check(&self, extent: &Extent) -> Result<(), Status> {
        if !extent.direct {
            return Err(Status::Unsupported);
        }
        if self.write && !extent.writable {
            return Err(Status::Unauthorized);
        }
        let end = self.offset.checked_add(self.local.bytes);
        if end.is_some_and(|end| end <= extent.bytes) { Ok(()) } else { Err(Status::OutOfRange) }
    }

    /// Returns the segment's range in its memory, if it may be used in this direction.
    fn range(&self, region: &Arc<Region>) -> Result<IoBuf, Status> {
        if self.write && !region.writable() {
            return Err(Status::Unauthorized);
        }
        range(region, self.offset, self.local.bytes).ok_or(Status::OutOfRange)
    }

    /// Makes the copy, with a segment of this process.
    pub(crate) fn make_own(&self, segments: &SegmentRegions, buffers: &Buffers) -> Result<u64, Status> {
        let theirs = self.range(segments.get(self.segment).ok_or(Status::Stale)?)?;
        move_bytes(&theirs, &buffers.one(self.local), self.write);
        Ok(0)
    }
}

/// Reason why a copy cannot wait for its segment to be mapped.
#[derive(Debug)]
pub(crate) struct CannotMap {
    /// Status of the copy.
    pub(crate) status: Status,
    /// Text of the error, unless the segment is just gone.
    pub(crate) problem: Option<String>,
}

/// Segments of other processes that are mapped here, and copies that wait for a mapping.
#[derive(Default)]
pub(crate) struct MappedSegments {
    mapped: BTreeMap<(ConnectionId, SegmentId), Arc<Region>>,
    waiting: BTreeMap<(ConnectionId, SegmentId), Vec<(LaneId, SegmentCopy)>>,
    sweep_at_ns: u64,
}

impl MappedSegments {
    /// Returns true if a peer's segment is mapped.
    pub(crate) fn has(&self, id: ConnectionId, segment: SegmentId) -> bool {
        self.mapped.contains_key(&(id, segment))
    }

    /// Adds the mapping of a peer's segment.
    pub(crate) fn set(&mut self, id: ConnectionId, segment: SegmentId, region: Arc<Region>) {
        self.mapped.insert((id, segment), region);
    }

    /// Makes a copy of a mapped segment.
    pub(crate) fn make(
        &mut self,
        shm: &Shm,
        id: ConnectionId,
        copy: &SegmentCopy,
        buffers: &Buffers,
    ) -> Result<u64, Status> {
        let Some(extent) = shm.claim(id, 0, copy.segment) else {
            self.mapped.remove(&(id, copy.segment));
            return Err(Status::Stale);
        };
        let result = self.make_claimed(shm, id, copy, &extent, buffers);
        shm.clear(id, 1);
        result
    }

    fn make_claimed(
        &self,
        shm: &Shm,
        id: ConnectionId,
        copy: &SegmentCopy,
        extent: &Extent,
        buffers: &Buffers,
    ) -> Result<u64, Status> {
        copy.check(extent)?;
        let theirs = copy.range(self.mapped.get(&(id, copy.segment)).ok_or(Status::Stale)?)?;
        let ours = buffers.one(copy.local);
        if ours.bytes() <= CHUNK_BYTES {
            move_bytes(&theirs, &ours, copy.write);
            return Ok(0);
        }
        for (at, bytes) in chunks(ours.bytes()) {
            if at > 0 && shm.extent(id, copy.segment).is_none() {
                return Err(Status::Stale);
            }
            move_bytes(&theirs.slice(at, bytes), &ours.slice(at, bytes), copy.write);
        }
        Ok(0)
    }

    /// Requests the mapping of a segment for a copy, which waits for it.
    pub(crate) fn request(
        &mut self,
        shm: &mut Shm,
        id: ConnectionId,
        lane: LaneId,
        copy: &SegmentCopy,
        now_ns: u64,
    ) -> Result<(), CannotMap> {
        let key = (id, copy.segment);
        if shm.extent(id, copy.segment).is_none() {
            return Err(CannotMap { status: Status::Stale, problem: None });
        }
        if !self.waiting.contains_key(&key)
            && let Err(error) = shm.ask_segment(id, copy.segment, MemoryRequest::Region, now_ns)
        {
            return Err(CannotMap { status: Status::Unsupported, problem: Some(error.to_string()) });
        }
        self.waiting.entry(key).or_default().push((lane, *copy));
        Ok(())
    }

    /// Takes the copies that wait for a segment.
    pub(crate) fn take_waiting(&mut self, id: ConnectionId, segment: SegmentId) -> Vec<(LaneId, SegmentCopy)> {
        self.waiting.remove(&(id, segment)).unwrap_or_default()
    }

    /// Drops the mappings and copies of a connection that has ended; the client knows that.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        self.mapped.retain(|&(of, _), _| of != id);
        self.waiting.retain(|&(of, _), _| of != id);
    }

    /// Periodically drops mappings whose segments are gone: they hold memory that its owner has freed.
    pub(crate) fn sweep(&mut self, shm: &Shm, now_ns: u64) {
        if self.mapped.is_empty() || now_ns < self.sweep_at_ns {
            return;
        }
        self.sweep_at_ns = now_ns.saturating_add(SWEEP_NS);
        self.mapped.retain(|&(id, segment), _| shm.extent(id, segment).is_some());
    }
}

fn move_bytes(theirs: &IoBuf, ours: &IoBuf, write: bool) {
    if write {
        copy(theirs, ours);
    } else {
        copy(ours, theirs);
    }
}

/// Returns the offset and length of each chunk.
pub(crate) fn chunks(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(CHUNK_BYTES).map(move |at| (at, CHUNK_BYTES.min(bytes - at)))
}

#[cfg(test)]
mod tests {
    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn copies_of_this_process_stay_inside_and_are_of_living_segments() {
        let region = |name: &str| Region::allocate(&RegionOptions::new(name, 4096)).expect("memory");
        let (theirs, ours) = (region("segment"), region("ours"));
        theirs.copy_in(8, b"bytes");
        let segment = SegmentId { index: 0, generation: 1 };
        let (mut segments, mut buffers) = (SegmentRegions::default(), Buffers::default());
        segments.set(segment, Arc::clone(&theirs));
        buffers.set(3, Arc::clone(&ours).into());
        let copy = SegmentCopy {
            slice: SliceId { index: 0, generation: 0 },
            via: Via::Own,
            segment,
            offset: 8,
            local: Local { buffer: 3, offset: 0, bytes: 5 },
            write: false,
        };
        assert_eq!(copy.make_own(&segments, &buffers), Ok(0));
        let mut bytes = [0; 5];
        ours.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"bytes");
        let beyond = SegmentCopy { offset: theirs.bytes() as u64 - 4, ..copy };
        assert_eq!(beyond.make_own(&segments, &buffers), Err(Status::OutOfRange));
        let stale = SegmentCopy { segment: SegmentId { generation: 2, ..segment }, ..copy };
        assert_eq!(stale.make_own(&segments, &buffers), Err(Status::Stale));
    }
}
