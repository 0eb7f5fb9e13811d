//! Memory of a shard: which block of the pool belongs to which object, and where the tails of objects are.
//!
//! A tail is behind its object's bytes if it fits into their last unit, or else in a page of tails if there is a class
//! of pages for it. The pool decides nothing about eviction: it names the blocks and pages whose objects have to go.
//!
//! A shard may have a *device pool* beside its pool in host memory. Its blocks hold the bytes of objects only; the tail
//! of such an object has a block of the pool in host memory, which the note on the object's block names.
//!
//! The pool may have a part in far memory, the *far pool*, behind its near part: offsets go on there. An object of the
//! far pool has its tail behind its bytes; the note on its block is the length of the room for it.

use crate::allocator::{Allocator, Block, GRANULE_BYTES, MemoryKind, granules_of};
use crate::config::StoreConfig;
use crate::entry::{Entries, Entry, EntryId, NONE, Reserve};
use crate::store::Extent;
use crate::tail_pages::{PageId, TailPages, TailSlot};

/// Smallest owner word of a block that is a page of tails.
const PAGE: u32 = 1 << 31;

/// Owner of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    /// None yet: the block was just allocated.
    Nobody,
    Entry(EntryId),
    Page(PageId),
}

const fn owner_of(word: u32) -> Owner {
    match word {
        NONE => Owner::Nobody,
        page if page & PAGE != 0 => Owner::Page(PageId(page & !PAGE)),
        entry => Owner::Entry(EntryId(entry)),
    }
}

/// Allocator of the pool, and the pages of tails in it.
#[derive(Debug)]
pub struct Pool {
    allocator: Allocator,
    /// Tails that are not stored behind their objects.
    tails: TailPages,
    unit_bytes: u64,
    /// Allocator of the far pool, if there is one.
    far: Option<Allocator>,
    /// Offset at which the far pool begins.
    far_at: u64,
    /// Allocator of the device pool, if there is one.
    device: Option<Allocator>,
    /// True once the device is lost.
    device_is_lost: bool,
}

impl Pool {
    /// Creates an empty pool.
    pub(super) fn new(config: &StoreConfig) -> Self {
        let tails = TailPages::new(config.unit_bytes, GRANULE_BYTES, config.max_objects);
        let allocator = Allocator::new(config.pool_bytes, config.max_objects + tails.max_pages());
        let device =
            (config.device_pool_bytes > 0).then(|| Allocator::new(config.device_pool_bytes, config.max_objects));
        let far = (config.far_pool_bytes > 0).then(|| Allocator::new(config.far_pool_bytes, config.max_objects));
        let (unit_bytes, far_at) = (config.unit_bytes, config.pool_bytes);
        Self { allocator, tails, unit_bytes, far, far_at, device, device_is_lost: false }
    }

    /// Returns the granules that `bytes` take, in whole units.
    #[must_use]
    pub const fn granules_of(&self, bytes: u64) -> u64 {
        granules_of(bytes.next_multiple_of(self.unit_bytes))
    }

    /// Returns the extent of an object, in its pool.
    #[must_use]
    #[inline]
    pub fn extent(&self, entry: &Entry) -> Extent {
        let block = entry.block();
        let base = if matches!(block.kind(), MemoryKind::Far) { self.far_at } else { 0 };
        let offset = base + self.allocator_of(block).offset_bytes(block.in_its_pool());
        Extent { offset, bytes: entry.bytes() }
    }

    /// Returns the allocator of the memory that a block is of.
    fn allocator_of(&self, block: Block) -> &Allocator {
        match block.kind() {
            MemoryKind::Near => &self.allocator,
            MemoryKind::Far => self.far.as_ref().expect("a block of a far pool"),
            MemoryKind::Device => self.device.as_ref().expect("a block of a device pool"),
        }
    }

    /// Like [`Self::allocator_of`], to be changed.
    fn allocator_of_mut(&mut self, block: Block) -> &mut Allocator {
        match block.kind() {
            MemoryKind::Near => &mut self.allocator,
            MemoryKind::Far => self.far.as_mut().expect("a block of a far pool"),
            MemoryKind::Device => self.device.as_mut().expect("a block of a device pool"),
        }
    }

    /// Returns the block with the tail of an object in the device pool.
    fn device_tail(&self, block: Block) -> Option<Block> {
        if !matches!(block.kind(), MemoryKind::Device) {
            return None;
        }
        self.allocator_of(block).note(block.in_its_pool()).map(Block::of_note)
    }

    /// Returns the offset of an object's tail, present or not.
    #[must_use]
    pub fn tail_at(&self, entry: &Entry) -> u64 {
        if entry.is_on_device() {
            return self.device_tail(entry.block()).map_or(0, |tail| self.allocator.offset_bytes(tail));
        }
        match self.slot(entry) {
            Some(slot) => {
                let (block, at) = self.tails.place(slot);
                self.allocator.offset_bytes(block) + at
            }
            None => self.extent(entry).offset + entry.bytes(),
        }
    }

    /// Returns the length that the tail of an object may have.
    #[must_use]
    pub fn tail_room(&self, entry: &Entry) -> u64 {
        if entry.is_on_device() {
            let tail = self.device_tail(entry.block());
            return tail.and_then(|tail| self.allocator.note(tail)).unwrap_or(0).into();
        }
        if entry.memory() == MemoryKind::Far {
            return self.allocator_of(entry.block()).note(entry.block().in_its_pool()).unwrap_or(0).into();
        }
        self.slot(entry).map_or(entry.granules() * GRANULE_BYTES - entry.bytes(), TailPages::room_bytes)
    }

    /// Returns the size in granules.
    pub(super) const fn granules(&self) -> u64 {
        self.allocator.pool_granules()
    }

    /// Returns the number of free granules, fragmented or not.
    pub(super) const fn free_granules(&self) -> u64 {
        self.allocator.free_granules()
    }

    /// Returns the length of the largest free block. Walks one bin of the allocator.
    pub(super) fn largest_free_bytes(&self) -> u64 {
        self.allocator.largest_free_bytes()
    }

    /// Gives the device pool up: nothing is allocated in it any more.
    pub(super) const fn close_device(&mut self) {
        self.device_is_lost = true;
    }

    /// Returns the granules of a pool beside the near one, and how many of them are free, fragmented or not: none
    /// without such a pool, or once its device is lost.
    pub(super) fn granules_beside(&self, kind: MemoryKind) -> (u64, u64) {
        let pool = match kind {
            MemoryKind::Near => None,
            MemoryKind::Far => self.far.as_ref(),
            MemoryKind::Device => self.device.as_ref().filter(|_| !self.device_is_lost),
        };
        pool.map_or((0, 0), |pool| (pool.pool_granules(), pool.free_granules()))
    }

    /// Allocates a block of a pool beside the near one for `bytes`; in the far pool, room for a tail of this length is
    /// behind them, in whole units. `None` if no free block was found that is large enough.
    pub(super) fn allocate_beside(&mut self, kind: MemoryKind, bytes: u64, tail_bytes: u32) -> Option<Block> {
        let block = match kind {
            MemoryKind::Near => None,
            MemoryKind::Far => {
                let far = self.far.as_mut()?;
                let block = far.allocate((bytes + u64::from(tail_bytes)).next_multiple_of(self.unit_bytes))?;
                far.set_note(block, tail_bytes);
                Some(block)
            }
            MemoryKind::Device => self.device.as_mut().filter(|_| !self.device_is_lost)?.allocate(bytes),
        };
        block.map(|block| block.of(kind))
    }

    /// Gives a block of the pool to the tail of an object in the device pool; the block is freed with the object's.
    pub(super) fn give_tail(&mut self, block: Block, tail: Block, tail_bytes: u64, id: EntryId) {
        self.allocator.set_owner(tail, id.0);
        // The exact length, which a block of whole granules would round up.
        self.allocator.set_note(tail, tail_bytes as u32);
        let device = self.device.as_mut().expect("a block of a device pool");
        device.set_note(block.in_its_pool(), tail.as_note());
    }

    /// Returns the bytes that pages of tails take.
    pub(super) const fn page_bytes(&self) -> u64 {
        self.tails.bytes()
    }

    /// Allocates a block for `bytes`, in whole units, so that every block begins at a multiple of the unit; `None` if
    /// no free block was found that is large enough.
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<Block> {
        self.allocator.allocate(bytes.next_multiple_of(self.unit_bytes))
    }

    /// Takes `bytes`, in whole units, from a free block.
    pub(super) fn carve(&mut self, block: Block, bytes: u64) -> Block {
        self.allocator.carve(block, bytes.next_multiple_of(self.unit_bytes))
    }

    /// Gives a block to an entry.
    pub(super) fn set_owner(&mut self, block: Block, id: EntryId) {
        self.allocator_of_mut(block).set_owner(block.in_its_pool(), id.0);
    }

    /// Frees a block, and the place of its owner's tail if it has one elsewhere. Returns the free block of the near
    /// pool that was freed with it, or that it is now part of; `None` if none of that pool was.
    pub(super) fn free(&mut self, block: Block) -> Option<Block> {
        if !matches!(block.kind(), MemoryKind::Near) {
            let tail = self.device_tail(block);
            self.allocator_of_mut(block).free(block.in_its_pool());
            return tail.map(|tail| self.allocator.free(tail));
        }
        // The slot first, so that the block that is returned is the one that all of it is part of.
        if let Some(slot) = self.allocator.note(block)
            && let Some(page) = self.tails.free(TailSlot(slot))
        {
            self.allocator.free(page);
        }
        Some(self.allocator.free(block))
    }

    /// Returns the length of a block in granules.
    pub(super) fn granules_in(&self, block: Block) -> u64 {
        self.allocator.granules(block)
    }

    /// Returns the owner of a block; `None` if it is free.
    pub(super) fn owner(&self, block: Block) -> Option<Owner> {
        self.allocator.owner(block).map(owner_of)
    }

    /// Returns the next block in the pool.
    pub(super) fn after(&self, block: Block) -> Option<Block> {
        self.allocator.after(block)
    }

    /// Returns the first block of a run of at least `granules` that evicting objects that `may_go` would free: around a
    /// block if there is one, else anywhere. Walks the pool's blocks if there is none around it.
    pub(super) fn run(&self, near: Option<Block>, granules: u64, may_go: impl Fn(EntryId) -> bool) -> Option<Block> {
        let may_go = |owner| match owner_of(owner) {
            Owner::Nobody => false,
            Owner::Entry(id) => may_go(id),
            Owner::Page(page) => self.tails.owners(page).all(&may_go),
        };
        let around = near.and_then(|block| self.allocator.run_around(block, granules, may_go));
        around.or_else(|| self.allocator.run_anywhere(granules, may_go))
    }

    /// Returns the class of pages for the tail of an object; `None` if the tail goes behind its bytes.
    pub(super) fn class_of_tail(&self, wanted: &Reserve) -> Option<usize> {
        let Reserve { bytes, tail_bytes, .. } = *wanted;
        let together = bytes + u64::from(tail_bytes);
        let fits = together.next_multiple_of(self.unit_bytes) == bytes.next_multiple_of(self.unit_bytes);
        if fits { None } else { self.tails.class_of(tail_bytes) }
    }

    /// Returns true if a page of the class has a free slot.
    pub(super) const fn has_slot(&self, class: usize) -> bool {
        self.tails.has_free(class)
    }

    /// Returns the bytes of a new page, if the class may have another one.
    pub(super) fn new_page_bytes(&self, class: usize) -> Option<u64> {
        self.tails.may_grow(class).then_some(self.unit_bytes)
    }

    /// Makes a page of a block.
    pub(super) fn add_page(&mut self, class: usize, block: Block) -> PageId {
        let page = self.tails.add(class, block);
        self.allocator.set_owner(block, PAGE | page.0);
        page
    }

    /// Gives a free slot of a class to an entry.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn give_slot(&mut self, class: usize, entry: &Entry, id: EntryId) {
        let slot = self.tails.take(class, id).expect("a slot is free");
        self.allocator.set_note(entry.block(), slot.0);
    }

    /// Closes a page for new tails: its objects are about to be evicted.
    pub(super) fn close_page(&mut self, page: PageId) {
        self.tails.close(page);
    }

    /// Returns any entry with a tail in a page.
    pub(super) fn owner_in(&self, page: PageId) -> Option<EntryId> {
        self.tails.any_owner(page)
    }

    /// Frees a page that was closed and is empty; returns the free block that it is now part of.
    pub(super) fn end_page(&mut self, page: PageId) -> Block {
        let block = self.tails.end(page);
        self.allocator.free(block)
    }

    /// Returns the class of pages that the tail of an object is in; `None` if it is behind its bytes.
    pub(super) fn page_class_of(&self, entry: &Entry) -> Option<usize> {
        self.slot(entry).map(TailSlot::class)
    }

    /// Returns true if there are pages of tails of a class.
    pub(super) fn has_page_class(&self, class: usize) -> bool {
        self.tails.has_class(class)
    }

    /// Returns the offset of the page that has the tail at an offset.
    pub(super) const fn page_at(&self, tail_at: u64) -> u64 {
        tail_at / self.unit_bytes * self.unit_bytes
    }

    /// Returns the unit of space, in bytes.
    pub(super) const fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Holds blocks at these places of an empty pool: see [`Allocator::hold_at`].
    pub(super) fn hold_at(&mut self, places: &[(u32, u32)]) -> Option<Vec<Block>> {
        self.allocator.hold_at(places)
    }

    /// Gives the slot at an offset of a page to an entry; false if it is taken, or there is none.
    pub(super) fn give_slot_at(&mut self, page: PageId, offset: u64, entry: &Entry, id: EntryId) -> bool {
        let slot = self.tails.take_at(page, offset, id);
        slot.into_iter().for_each(|slot| self.allocator.set_note(entry.block(), slot.0));
        slot.is_some()
    }

    fn slot(&self, entry: &Entry) -> Option<TailSlot> {
        if entry.memory() != MemoryKind::Near {
            return None;
        }
        self.allocator.note(entry.block()).map(TailSlot)
    }

    /// Asserts that every held block has one owner and every owner its own block: no block is both free and in use, or
    /// used twice. Walks all entries, pages and blocks.
    ///
    /// # Panics
    /// If an assertion fails.
    pub(super) fn check(&self, entries: &Entries) {
        self.allocator.check();
        let (mut owned, mut on_device, mut far) = (0, 0, 0);
        for (id, entry) in entries.iter() {
            let (allocator, block) = (self.allocator_of(entry.block()), entry.block().in_its_pool());
            assert_eq!(allocator.owner(block), Some(id.0), "the block of {entry:?} belongs to it");
            assert_eq!(allocator.granules(block), entry.granules(), "{entry:?}");
            let tail = self.device_tail(entry.block());
            if let Some(tail) = tail {
                assert_eq!(self.allocator.owner(tail), Some(id.0), "the tail of {entry:?} belongs to it");
            }
            on_device += u32::from(entry.is_on_device());
            far += u32::from(entry.memory() == MemoryKind::Far);
            owned += u32::from(entry.memory() == MemoryKind::Near) + u32::from(tail.is_some());
        }
        if let Some(pool) = &self.far {
            pool.check();
            assert_eq!(far, pool.held_blocks(), "each held block of the far pool belongs to an entry");
        }
        if let Some(device) = &self.device {
            device.check();
            assert_eq!(on_device, device.held_blocks(), "each held block of the device pool belongs to an entry");
        }
        let mut pages = 0;
        for (page, block) in self.tails.iter() {
            assert_eq!(self.allocator.owner(block), Some(PAGE | page.0), "the block of {page:?} belongs to it");
            for id in self.tails.owners(page) {
                let slot = self.slot(&entries[id]).expect("an owner of a slot knows it");
                assert_eq!(self.tails.place(slot).0, block, "{slot:?} is in its page");
            }
            pages += 1;
        }
        assert_eq!(pages, self.tails.pages(), "pages are counted");
        assert_eq!(owned + pages, self.allocator.held_blocks(), "each held block belongs to an entry or is a page");
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::digest::Digest;

    use super::*;

    /// Returns a pool of this many units of 4 KiB, and no entries.
    fn pool(units: u64) -> (Pool, Entries) {
        let config = StoreConfig { unit_bytes: 4096, max_objects: 8, ..StoreConfig::for_pool(units * 4096) };
        (Pool::new(&config), Entries::new(8).in_units(4096))
    }

    /// Adds an object with a tail of 60 B, which goes to a page if it does not fit behind the object.
    fn add(pool: &mut Pool, entries: &mut Entries, bytes: u64) -> EntryId {
        let wanted = Reserve { tail_bytes: 60, ..Reserve::plain(Digest(1), bytes) };
        let class = pool.class_of_tail(&wanted);
        let block = pool.allocate(bytes).expect("there is room");
        if let Some(class) = class.filter(|class| !pool.has_slot(*class)) {
            let page_bytes = pool.new_page_bytes(class).expect("the class may grow");
            let page = pool.allocate(page_bytes).expect("there is room");
            pool.add_page(class, page);
        }
        let tail_bytes = if class.is_some() { 0 } else { 60 };
        let id = entries.reserve(&Reserve { tail_bytes, ..wanted }, block);
        pool.set_owner(block, id);
        if let Some(class) = class {
            pool.give_slot(class, &entries[id], id);
        }
        id
    }

    #[test]
    fn a_tail_is_behind_its_object_or_in_a_page() {
        let (mut pool, mut entries) = pool(8);
        let [behind, paged, other] = [4000, 4096, 8192].map(|bytes| add(&mut pool, &mut entries, bytes));
        let extent = pool.extent(&entries[behind]);
        assert_eq!((extent.bytes, pool.tail_at(&entries[behind])), (4000, extent.offset + 4000));
        assert_eq!(pool.tail_room(&entries[behind]), 96);
        let at = [paged, other].map(|id| pool.tail_at(&entries[id]));
        assert_eq!((at[1] - at[0], pool.page_bytes()), (64, 4096), "they share a page");
        assert_eq!(pool.tail_room(&entries[paged]), 64);
        pool.check(&entries);
    }

    #[test]
    fn the_last_slot_of_a_page_frees_it() {
        let (mut pool, mut entries) = pool(8);
        let ids = [4096, 8192].map(|bytes| add(&mut pool, &mut entries, bytes));
        assert_eq!(pool.free_granules(), 4 * 16);
        for (id, free) in ids.into_iter().zip([5, 8]) {
            let block = entries[id].block();
            entries.release(id);
            pool.free(block);
            assert_eq!(pool.free_granules(), free * 16);
            pool.check(&entries);
        }
        assert_eq!(pool.largest_free_bytes(), 8 * 4096);
    }

    #[test]
    fn a_run_includes_a_page_only_if_all_its_objects_may_go() {
        let (mut pool, mut entries) = pool(4);
        let ids = [4096, 4096].map(|bytes| add(&mut pool, &mut entries, bytes));
        assert_eq!(pool.run(None, 64, |_| true).map(|block| pool.owner(block)), Some(Some(Owner::Entry(ids[0]))));
        assert!(pool.run(None, 64, |id| id == ids[0]).is_none());
        let near = Some(entries[ids[0]].block());
        assert_eq!(pool.run(near, 16, |id| id == ids[0]), near);
        assert!(pool.run(None, 32, |id| id == ids[0]).is_none(), "the page has a tail of the other");
    }
}
