//! Buffers: the caller's memory by index. A buffer is a whole region, or a list of pieces under one index, as if they
//! were contiguous.
//!
//! Requests name a range of such a list like any other. The drivers get the pieces: TCP sends and receives them in
//! order, RDMA devices are given each, and copies go piece by piece. So one object is put from, or read into, any
//! number of pieces, under one checksum.

use std::sync::Arc;

use kvplane_client::Local;
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::Pieces;

/// First index of buffers of pieces; lower ones are whole regions.
const PARTS_AT: u32 = 1 << 31;

/// Contiguous pieces, and the end of each.
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

    /// Returns the pieces of a range.
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

/// Table of the caller's buffers.
#[derive(Default)]
pub(crate) struct Buffers {
    regions: Vec<Option<Arc<Region>>>,
    parts: Vec<Option<Parts>>,
}

impl Buffers {
    /// Returns the registered regions.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.regions.iter().flatten()
    }

    /// Returns the first free index.
    pub(crate) fn vacant(&self) -> u32 {
        self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len()) as u32
    }

    /// Registers a region under an index; returns the region that had it before.
    pub(crate) fn set(&mut self, buffer: u32, region: Arc<Region>) -> Option<Arc<Region>> {
        let index = buffer as usize;
        if self.regions.len() <= index {
            self.regions.resize(index + 1, None);
        }
        self.regions[index].replace(region)
    }

    /// Unregisters a region.
    pub(crate) fn remove(&mut self, buffer: u32) -> Option<Arc<Region>> {
        self.regions.get_mut(buffer as usize).and_then(Option::take)
    }

    /// Returns the region of an index.
    pub(crate) fn region(&self, buffer: u32) -> Option<&Arc<Region>> {
        self.regions.get(buffer as usize).and_then(Option::as_ref)
    }

    /// Registers pieces as one contiguous buffer, and returns its index.
    pub(crate) fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        let parts = Parts::new(pieces);
        let index = self.parts.iter().position(Option::is_none).unwrap_or(self.parts.len());
        if index == self.parts.len() {
            self.parts.push(None);
        }
        self.parts[index] = Some(parts);
        PARTS_AT + index as u32
    }

    /// Unregisters a buffer of pieces.
    pub(crate) fn remove_parts(&mut self, buffer: u32) {
        if let Some(entry) = buffer.checked_sub(PARTS_AT).and_then(|index| self.parts.get_mut(index as usize)) {
            *entry = None;
        }
    }

    /// Returns the memory of a range of a region; `None` if the buffer is not registered, or the range is not inside.
    pub(crate) fn inside(&self, local: Local) -> Option<IoBuf> {
        let region = self.region(local.buffer)?;
        let inside = local.offset.checked_add(local.bytes).is_some_and(|end| end <= region.bytes() as u64);
        inside.then(|| self.one(local))
    }

    /// Returns the memory of a range.
    ///
    /// # Panics
    /// If the buffer was unregistered while a batch used it, or the range is not inside.
    pub(crate) fn pieces(&self, local: Local) -> Pieces {
        if local.buffer < PARTS_AT {
            return self.one(local).into();
        }
        let parts = self.parts.get((local.buffer - PARTS_AT) as usize).and_then(Option::as_ref);
        let parts = parts.expect("memory stays registered while a batch uses it");
        let mut pieces = parts.range(local.offset, local.bytes);
        if pieces.len() == 1 { pieces.remove(0).into() } else { pieces.into() }
    }

    /// Returns the memory of a range of a single region, which ranges for segments always are.
    ///
    /// # Panics
    /// See [`Self::pieces`].
    pub(crate) fn one(&self, local: Local) -> IoBuf {
        let region = self.region(local.buffer).expect("memory stays registered while a batch uses it");
        IoBuf::new(Arc::clone(region), local.offset as usize, local.bytes as usize)
    }

    /// Returns the pieces of several ranges, in order.
    ///
    /// # Panics
    /// See [`Self::pieces`].
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
