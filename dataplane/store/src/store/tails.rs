//! Placement of tails: behind their objects, or in pages of tails.

use kvplane_proto::ids::{PinId, ReservationId};

use super::Store;
use crate::allocator::{Block, GRANULE_BYTES};
use crate::entry::{EntryId, NONE, Reserve};
use crate::errors::ReserveError;
use crate::eviction::EvictionPolicy;
use crate::order::Reach;
use crate::tail_pages::{PageId, TailPages, TailSlot};

/// Smallest owner word of a block that is a page of tails.
const PAGE: u32 = 1 << 31;

/// Memory for an object and its tail.
pub(super) struct Room {
    pub(super) block: Block,
    /// Bytes of the tail that are in the block.
    pub(super) tail_bytes: u32,
    /// Otherwise, the class of pages that has a slot for it.
    pub(super) class: Option<usize>,
}

/// Owner of a block.
pub(super) enum Owner {
    /// None yet: the block was just allocated.
    Nobody,
    Entry(EntryId),
    Page(PageId),
}

pub(super) const fn owner_of(word: u32) -> Owner {
    match word {
        NONE => Owner::Nobody,
        page if page & PAGE != 0 => Owner::Page(PageId(page & !PAGE)),
        entry => Owner::Entry(EntryId(entry)),
    }
}

impl<P: EvictionPolicy> Store<P> {
    /// Allocates memory for an object and its tail; if the tail takes a slot, one is free afterwards.
    pub(super) fn room_with_tail(&mut self, wanted: &Reserve) -> Result<Room, ReserveError> {
        let Reserve { bytes, tail_bytes, .. } = *wanted;
        let unit = self.config.unit_bytes;
        let together = bytes + u64::from(tail_bytes);
        let fits = together.next_multiple_of(unit) == bytes.next_multiple_of(unit);
        if let (false, Some(class)) = (fits, self.tails.class_of(tail_bytes)) {
            let block = self.room(bytes)?;
            if self.slot_ready(class) {
                return Ok(Room { block, tail_bytes: 0, class: Some(class) });
            }
            self.allocator.free(block);
        }
        Ok(Room { block: self.room(together)?, tail_bytes, class: None })
    }

    /// Makes sure that a slot of a class is free; false if there is no memory for another page.
    fn slot_ready(&mut self, class: usize) -> bool {
        if self.tails.has_free(class) {
            return true;
        }
        if !self.tails.may_grow(class) {
            return false;
        }
        let Ok(block) = self.room(self.config.unit_bytes) else { return false };
        let page = self.tails.add(class, block);
        self.allocator.set_owner(block, PAGE | page.0);
        true
    }

    /// Gives an entry a slot that [`Self::room_with_tail`] has made sure of.
    pub(super) fn give_slot(&mut self, class: usize, id: EntryId) {
        let slot = self.tails.take(class, id).expect("a slot is free");
        self.allocator.set_note(self.entries[id].block(), slot.0);
    }

    /// Frees the slot of the owner of this block, if it has one.
    pub(super) fn free_tail(&mut self, block: Block) {
        if let Some(slot) = self.allocator.note(block)
            && let Some(page) = self.tails.free(TailSlot(slot))
        {
            self.allocator.free(page);
        }
    }

    fn slot(&self, id: EntryId) -> Option<TailSlot> {
        self.allocator.note(self.entries[id].block()).map(TailSlot)
    }

    /// Returns the offset of an entry's tail, present or not.
    pub(super) fn tail_place(&self, id: EntryId) -> u64 {
        match self.slot(id) {
            Some(slot) => {
                let (block, at) = self.tails.place(slot);
                self.allocator.offset_bytes(block) + at
            }
            None => self.allocator.offset_bytes(self.entries[id].block()) + self.entries[id].bytes(),
        }
    }

    /// Returns the offset of a reserved object's tail; `None` if the reservation is stale.
    #[must_use]
    pub fn reserved_tail(&self, reservation: ReservationId) -> Option<u64> {
        let entry = self.reservations.get(reservation.index, reservation.generation)?;
        Some(self.tail_place(EntryId(entry)))
    }

    /// Returns the length that the tail of a pinned object may have.
    #[must_use]
    pub fn tail_room(&self, pin: PinId) -> u64 {
        let Some(id) = self.pins.get(pin.index, pin.generation).map(EntryId) else { return 0 };
        let entry = &self.entries[id];
        self.slot(id).map_or(entry.granules() * GRANULE_BYTES - entry.bytes(), TailPages::room_bytes)
    }

    /// Returns true if the owner of a block may be evicted.
    pub(super) fn may_go(&self, owner: u32, reach: Reach) -> bool {
        let goes = |id| self.order.may_go(&self.entries, id, reach);
        match owner_of(owner) {
            Owner::Nobody => false,
            Owner::Entry(id) => goes(id),
            Owner::Page(page) => self.tails.owners(page).all(goes),
        }
    }

    /// Evicts all objects with tails in a page; returns the free block that the page is now part of.
    pub(super) fn clear_page(&mut self, page: PageId) -> Block {
        self.tails.close(page);
        while let Some(id) = self.tails.any_owner(page) {
            self.evict_one(id);
        }
        let block = self.tails.end(page);
        self.allocator.free(block)
    }

    /// Asserts that every page has its own block, and that each of its slots has an entry that knows it. Returns their
    /// number.
    pub(super) fn check_pages(&self) -> u32 {
        let mut pages = 0;
        for (page, block) in self.tails.iter() {
            assert_eq!(self.allocator.owner(block), Some(PAGE | page.0), "the block of {page:?} belongs to it");
            for id in self.tails.owners(page) {
                let slot = self.slot(id).expect("an owner of a slot knows it");
                assert_eq!(self.tails.place(slot).0, block, "{slot:?} is in its page");
            }
            pages += 1;
        }
        assert_eq!(pages, self.tails.pages(), "pages are counted");
        pages
    }
}
