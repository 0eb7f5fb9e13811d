//! The caller's memory by name: whole regions, and memory in parts, which is many pieces under one name, as if they lay
//! in a row.
//!
//! A request names a range of memory in parts like any other. Whoever moves the bytes gets the pieces: TCP sends and
//! receives them in order, RDMA devices are given each, and copies go piece by piece. So one object is put from, or
//! read into, as many pieces as there are, under one checksum.

use std::sync::Arc;

use kvplane_client::Local;
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::Pieces;

/// Names of memory in parts are from here on; those below are of whole regions.
const PARTS_AT: u32 = 1 << 31;

/// Pieces in a row, and where each ends.
pub(crate) struct Parts {
    pieces: Vec<IoBuf>,
    ends: Vec<u64>,
}

impl Parts {
    fn new(pieces: Vec<IoBuf>) -> Self {
        let mut end = 0;
        let ends = pieces.iter().map(|piece| {
            end += piece.bytes() as u64;
            end
        });
        let ends = ends.collect();
        Self { pieces, ends }
    }

    /// The pieces of a range.
    fn range(&self, offset: u64, bytes: u64) -> Vec<IoBuf> {
        let until = offset + bytes;
        assert!(self.ends.last().is_some_and(|end| until <= *end), "memory stays registered while a batch uses it");
        let mut at = self.ends.partition_point(|end| *end <= offset);
        let (mut from, mut found) = (offset, Vec::new());
        while from < until {
            let end = self.ends[at];
            let piece = &self.pieces[at];
            let skip = piece.bytes() as u64 - (end - from);
            let take = until.min(end) - from;
            found.push(piece.slice(skip as usize, take as usize));
            from += take;
            at += 1;
        }
        found
    }
}

/// What names of caller's memory stand for.
#[derive(Default)]
pub(crate) struct Buffers {
    regions: Vec<Option<Arc<Region>>>,
    parts: Vec<Option<Parts>>,
}

impl Buffers {
    /// The regions that have names.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.regions.iter().flatten()
    }

    /// The first name that nobody has.
    pub(crate) fn vacant(&self) -> u32 {
        self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len()) as u32
    }

    /// Gives a region a name; what had it before.
    pub(crate) fn set(&mut self, buffer: u32, region: Arc<Region>) -> Option<Arc<Region>> {
        let index = buffer as usize;
        if self.regions.len() <= index {
            self.regions.resize(index + 1, None);
        }
        self.regions[index].replace(region)
    }

    /// Takes a region's name away.
    pub(crate) fn remove(&mut self, buffer: u32) -> Option<Arc<Region>> {
        self.regions.get_mut(buffer as usize).and_then(Option::take)
    }

    /// The region of a name.
    pub(crate) fn region(&self, buffer: u32) -> Option<&Arc<Region>> {
        self.regions.get(buffer as usize).and_then(Option::as_ref)
    }

    /// Gives pieces one name, under which they lie in a row.
    pub(crate) fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        let parts = Parts::new(pieces);
        let index = self.parts.iter().position(Option::is_none).unwrap_or(self.parts.len());
        if index == self.parts.len() {
            self.parts.push(None);
        }
        self.parts[index] = Some(parts);
        PARTS_AT + index as u32
    }

    /// Takes the name of pieces away.
    pub(crate) fn remove_parts(&mut self, buffer: u32) {
        if let Some(entry) = buffer.checked_sub(PARTS_AT).and_then(|index| self.parts.get_mut(index as usize)) {
            *entry = None;
        }
    }

    /// The memory of a range of a region; `None` when its name is nobody's, or it is not inside.
    pub(crate) fn inside(&self, local: Local) -> Option<IoBuf> {
        let region = self.region(local.buffer)?;
        let inside = local.offset.checked_add(local.bytes).is_some_and(|end| end <= region.bytes() as u64);
        inside.then(|| self.one(local))
    }

    /// The memory behind a name.
    ///
    /// # Panics
    /// When the memory was forgotten while a batch used it, or the range is not inside.
    pub(crate) fn pieces(&self, local: Local) -> Pieces {
        if local.buffer < PARTS_AT {
            return self.one(local).into();
        }
        let parts = self.parts.get((local.buffer - PARTS_AT) as usize).and_then(Option::as_ref);
        let parts = parts.expect("memory stays registered while a batch uses it");
        let mut pieces = parts.range(local.offset, local.bytes);
        if pieces.len() == 1 { pieces.remove(0).into() } else { pieces.into() }
    }

    /// The same of a range that lies in one region, as all of segments do.
    ///
    /// # Panics
    /// As [`Self::pieces`].
    pub(crate) fn one(&self, local: Local) -> IoBuf {
        let region = self.region(local.buffer).expect("memory stays registered while a batch uses it");
        IoBuf::new(Arc::clone(region), local.offset as usize, local.bytes as usize)
    }

    /// The pieces of several ranges, in a row.
    ///
    /// # Panics
    /// As [`Self::pieces`].
    pub(crate) fn all(&self, locals: &[Local]) -> Vec<IoBuf> {
        let mut found = Vec::with_capacity(locals.len());
        for &local in locals {
            found.extend_from_slice(self.pieces(local).as_slice());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn ranges_of_memory_in_parts_are_the_pieces_in_between() {
        let region = Region::allocate(&RegionOptions::new("parts", 4096)).expect("memory");
        let piece = |offset, bytes| IoBuf::new(Arc::clone(&region), offset, bytes);
        let mut buffers = Buffers::default();
        let name = buffers.add_parts(vec![piece(100, 10), piece(0, 1), piece(2000, 500)]);
        let found = |offset, bytes| {
            let pieces = buffers.pieces(Local { buffer: name, offset, bytes });
            pieces.as_slice().iter().map(|piece| (piece.offset(), piece.bytes())).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 511), [(100, 10), (0, 1), (2000, 500)]);
        assert_eq!(found(9, 2), [(109, 1), (0, 1)]);
        assert_eq!(found(10, 1), [(0, 1)]);
        assert_eq!(found(11, 500), [(2000, 500)]);
        assert_eq!(found(300, 100), [(2289, 100)]);
    }
}
