//! Buffers: the caller's memory by index. A buffer is a whole region, or a list of pieces under one index, as if they
//! were contiguous.
//!
//! Requests name a range of such a list like any other. The drivers get the pieces: TCP sends and receives them in
//! order, RDMA devices are given each, and copies go piece by piece. So one object is put from, or read into, any
//! number of pieces, under one checksum.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_client::Local;
use kvplane_sys::device::{Backing, DeviceMemory};
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::Pieces;
use slab::Slab;

use crate::buffers::FIRST_BUFFER;
use crate::piece_list::PieceList;

/// First index of buffers of pieces; lower ones are whole regions.
const PARTS_AT: u32 = 1 << 31;

/// Table of the caller's buffers.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Regions, and memory of devices, which only RDMA devices access.
    memory: Vec<Option<Backing>>,
    parts: Slab<PieceList<IoBuf>>,
    /// Buffers of pieces whose gets copy engines may carry out, with the part of a batch that each belongs to.
    offered: HashMap<u32, PartPlace>,
}

/// Part of a piece of an initiator's batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartPlace {
    /// Piece.
    pub(crate) piece: usize,
    /// Position in the piece.
    pub(crate) part: usize,
}

impl Buffers {
    /// Returns the registered regions.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.memory.iter().flatten().filter_map(Backing::region)
    }

    /// Returns the registered memory of devices.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &Arc<DeviceMemory>> {
        self.memory.iter().flatten().filter_map(Backing::device)
    }

    /// Returns the first free index of the caller's that is not `taken` otherwise.
    pub(crate) fn vacant(&self, taken: impl Fn(u32) -> bool) -> u32 {
        let is_free = |index: &u32| self.memory(*index).is_none() && !taken(*index);
        (FIRST_BUFFER..).find(is_free).unwrap_or(FIRST_BUFFER)
    }

    /// Registers memory under an index; returns the memory that had it before.
    pub(crate) fn set(&mut self, buffer: u32, memory: Backing) -> Option<Backing> {
        let index = buffer as usize;
        if self.memory.len() <= index {
            self.memory.resize(index + 1, None);
        }
        self.memory[index].replace(memory)
    }

    /// Unregisters memory.
    pub(crate) fn remove(&mut self, buffer: u32) -> Option<Backing> {
        self.memory.get_mut(buffer as usize).and_then(Option::take)
    }

    /// Returns the memory of an index.
    #[inline]
    pub(crate) fn memory(&self, buffer: u32) -> Option<&Backing> {
        self.memory.get(buffer as usize).and_then(Option::as_ref)
    }

    /// Returns the region of an index.
    pub(crate) fn region(&self, buffer: u32) -> Option<&Arc<Region>> {
        self.memory(buffer)?.region()
    }

    /// Registers pieces as one contiguous buffer, and returns its index.
    pub(crate) fn add_parts(&mut self, pieces: Vec<IoBuf>) -> u32 {
        let parts = PieceList::new(pieces, |piece| piece.bytes() as u64);
        PARTS_AT + self.parts.insert(parts) as u32
    }

    /// Unregisters a buffer of pieces.
    pub(crate) fn remove_parts(&mut self, buffer: u32) {
        if let Some(index) = buffer.checked_sub(PARTS_AT) {
            self.parts.try_remove(index as usize);
            self.offered.remove(&buffer);
        }
    }

    /// Offers a buffer of pieces to copy engines.
    pub(crate) fn offer(&mut self, buffer: u32, place: PartPlace) {
        self.offered.insert(buffer, place);
    }

    /// Returns the part that an offered buffer belongs to; `None` for other buffers.
    #[inline]
    pub(crate) fn offered(&self, buffer: u32) -> Option<PartPlace> {
        if buffer < PARTS_AT { None } else { self.offered.get(&buffer).copied() }
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
        let parts = self.parts.get((local.buffer - PARTS_AT) as usize);
        let parts = parts.expect("memory stays registered while a batch uses it");
        let range = parts.range(local.offset, local.bytes);
        let mut pieces: Vec<IoBuf> =
            range.map(|(piece, from, bytes)| piece.slice(from as usize, bytes as usize)).collect();
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

    #[test]
    fn indices_of_unregistered_parts_are_used_again() {
        let region = Region::allocate(&RegionOptions::new("parts", 4096)).expect("memory");
        let mut buffers = Buffers::default();
        let add = |buffers: &mut Buffers| buffers.add_parts(vec![IoBuf::new(Arc::clone(&region), 0, 10)]);
        let [first, second] = [add(&mut buffers), add(&mut buffers)];
        assert!(first != second);
        let place = PartPlace { piece: 1, part: 2 };
        buffers.offer(first, place);
        assert_eq!((buffers.offered(first), buffers.offered(second), buffers.offered(7)), (Some(place), None, None));
        buffers.remove_parts(first);
        buffers.remove_parts(first);
        assert_eq!(buffers.offered(first), None);
        assert_eq!(add(&mut buffers), first);
        assert_eq!(buffers.pieces(Local { buffer: second, offset: 0, bytes: 10 }).as_slice().len(), 1);
    }
}
