//! Pages of tails: where objects take whole blocks of an SSD, the tails of those that fill theirs lie together.
//!
//! A page is one unit of the pool and holds tails of one length class, each in a slot. So an object of 4 KiB takes
//! 4 KiB and its part of a page, not a second unit. A tail of which the object's last unit has room stays there, and
//! one that is longer than all classes too.
//!
//! A page can go as objects can: when room is needed and neighbours have to give way, its objects are evicted
//! together (each slot knows its entry). So pages do not cut the pool into pieces for good. A freed slot is the next
//! one taken of its class, so that pages that are in use stay full.
//!
//! Per object this costs 4 bytes in the slot's owner and its share of a page's record: of a page of 32 slots, 2 bytes.
//! Not here: the pool's room for pages and what the bytes say, which are the store's and the service's.

use crate::allocator::Block;
use crate::entry::{EntryId, NONE};

/// Bytes of the slots of each class. The first takes keys of 40 bytes (tails begin with 24), the last of 488.
const CLASSES: [u32; 7] = [64, 96, 128, 192, 256, 384, 512];
/// Bits of a slot's number that say which of its class it is.
const NUMBER_BITS: u32 = 27;

const _: () = assert!(CLASSES.len() < 1 << (30 - NUMBER_BITS));

/// One slot of one page, in 30 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TailSlot(pub(crate) u32);

impl TailSlot {
    const fn class(self) -> usize {
        (self.0 >> NUMBER_BITS) as usize
    }

    const fn number(self) -> u32 {
        self.0 & ((1 << NUMBER_BITS) - 1)
    }
}

/// A page, by its class and its place there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageId(pub(crate) u32);

impl PageId {
    const fn of(class: usize, page: u32) -> Self {
        Self((class as u32) << NUMBER_BITS | page)
    }

    const fn class(self) -> usize {
        (self.0 >> NUMBER_BITS) as usize
    }

    const fn page(self) -> u32 {
        self.0 & ((1 << NUMBER_BITS) - 1)
    }
}

/// A page's record. Vacant ones are linked by `after`, those with free slots by both.
#[derive(Clone, Copy, Debug)]
struct Page {
    block: Block,
    used: u64,
    before: u32,
    after: u32,
    /// Being emptied: it takes no tails and is not given back when the last one goes.
    closing: bool,
}

#[derive(Debug)]
struct Class {
    slots: u32,
    pages: Vec<Page>,
    /// The entry of each slot.
    owners: Vec<u32>,
    partial: u32,
    vacant: u32,
}

/// All pages of a store.
#[derive(Debug)]
pub(crate) struct TailPages {
    unit_bytes: u32,
    classes: [Class; CLASSES.len()],
    pages: u32,
    max_pages: u32,
}

impl TailPages {
    /// Pages of one unit each, for so many objects. Without units that are larger than what tails take anyway, there
    /// are none. The tables are reserved now and touched as they fill.
    pub(crate) fn new(unit_bytes: u64, granule_bytes: u64, max_objects: u32) -> Self {
        let unit_bytes = unit_bytes as u32;
        let max_pages = if u64::from(unit_bytes) > granule_bytes { Self::most(unit_bytes, max_objects) } else { 0 };
        let classes = CLASSES.map(|bytes| {
            let slots = (unit_bytes / bytes).min(64);
            let owners = if max_pages > 0 { max_objects.next_multiple_of(slots.max(1)) } else { 0 };
            let pages = owners.checked_div(slots).unwrap_or(0);
            Class {
                slots,
                pages: Vec::with_capacity(pages as usize),
                owners: Vec::with_capacity(owners as usize),
                partial: NONE,
                vacant: NONE,
            }
        });
        Self { unit_bytes, classes, pages: 0, max_pages }
    }

    /// How many pages so many objects need at most: every one with the longest tail, and a page begun for each class.
    const fn most(unit_bytes: u32, max_objects: u32) -> u32 {
        let slots = unit_bytes / CLASSES[CLASSES.len() - 1];
        max_objects / (if slots > 2 { slots } else { 2 }) + CLASSES.len() as u32
    }

    /// How many blocks of the pool pages may take at most.
    pub(crate) const fn max_pages(&self) -> u32 {
        self.max_pages
    }

    /// How many there are.
    pub(crate) const fn pages(&self) -> u32 {
        self.pages
    }

    /// The class for a tail of so many bytes; none where it has to lie behind its object.
    pub(crate) fn class_of(&self, tail_bytes: u32) -> Option<usize> {
        let class = CLASSES.iter().position(|bytes| *bytes >= tail_bytes)?;
        (self.max_pages > 0 && self.classes[class].slots > 1).then_some(class)
    }

    /// Takes a slot of a page that is there.
    pub(crate) fn take(&mut self, class: usize, owner: EntryId) -> Option<TailSlot> {
        let at = self.classes[class].partial;
        if at == NONE {
            return None;
        }
        let slots = self.classes[class].slots;
        let page = &mut self.classes[class].pages[at as usize];
        let slot = (!page.used).trailing_zeros();
        page.used |= 1 << slot;
        if page.used.count_ones() == slots {
            self.unlink(class, at);
        }
        let number = at * slots + slot;
        self.classes[class].owners[number as usize] = owner.0;
        Some(TailSlot((class as u32) << NUMBER_BITS | number))
    }

    /// Whether a page that is there has a free slot.
    pub(crate) const fn has_free(&self, class: usize) -> bool {
        self.classes[class].partial != NONE
    }

    /// Whether another page may be made.
    pub(crate) fn may_grow(&self, class: usize) -> bool {
        let Class { pages, slots, owners, vacant, .. } = &self.classes[class];
        let fits = *vacant != NONE || owners.len() + *slots as usize <= owners.capacity().min(1 << NUMBER_BITS);
        self.pages < self.max_pages && fits && (*vacant != NONE || pages.len() < pages.capacity())
    }

    /// Makes a page of a block; the next tail of the class goes there.
    pub(crate) fn add(&mut self, class: usize, block: Block) -> PageId {
        let page = Page { block, used: 0, before: NONE, after: NONE, closing: false };
        let entry = &mut self.classes[class];
        let at = if entry.vacant == NONE {
            entry.pages.push(page);
            entry.owners.resize(entry.owners.len() + entry.slots as usize, NONE);
            entry.pages.len() as u32 - 1
        } else {
            let at = entry.vacant;
            entry.vacant = entry.pages[at as usize].after;
            entry.pages[at as usize] = page;
            at
        };
        self.pages += 1;
        self.link(class, at);
        PageId::of(class, at)
    }

    /// Gives a slot back. The block of its page, when it was the last.
    pub(crate) fn free(&mut self, slot: TailSlot) -> Option<Block> {
        let (class, number) = (slot.class(), slot.number());
        let slots = self.classes[class].slots;
        let at = number / slots;
        self.classes[class].owners[number as usize] = NONE;
        let page = &mut self.classes[class].pages[at as usize];
        let bit = 1 << (number % slots);
        assert!(page.used & bit != 0, "{slot:?} is freed twice");
        let was_full = page.used.count_ones() == slots;
        page.used &= !bit;
        match (page.closing, page.used, was_full) {
            (true, ..) => None,
            (false, 0, _) => {
                if !was_full {
                    self.unlink(class, at);
                }
                Some(self.vacate(class, at))
            }
            (false, _, true) => {
                self.link(class, at);
                None
            }
            (false, ..) => None,
        }
    }

    /// Takes no more tails into a page, as it is to be emptied.
    pub(crate) fn close(&mut self, page: PageId) {
        let (class, at) = (page.class(), page.page());
        let slots = self.classes[class].slots;
        if self.classes[class].pages[at as usize].used.count_ones() < slots {
            self.unlink(class, at);
        }
        self.classes[class].pages[at as usize].closing = true;
    }

    /// Any entry with a tail in a page.
    pub(crate) fn any_owner(&self, page: PageId) -> Option<EntryId> {
        self.owners(page).next()
    }

    /// Ends a page that was closed and is empty; its block.
    pub(crate) fn end(&mut self, page: PageId) -> Block {
        let (class, at) = (page.class(), page.page());
        let entry = &self.classes[class].pages[at as usize];
        assert!(entry.closing && entry.used == 0, "{entry:?} is ended");
        self.vacate(class, at)
    }

    /// The entries with tails in a page.
    pub(crate) fn owners(&self, page: PageId) -> impl Iterator<Item = EntryId> {
        let (class, at) = (&self.classes[page.class()], page.page());
        let used = class.pages[at as usize].used;
        let slots = (0..class.slots).filter(move |slot| used >> slot & 1 == 1);
        slots.map(move |slot| EntryId(class.owners[(at * class.slots + slot) as usize]))
    }

    /// Where a slot is: its page's block, and bytes from there.
    pub(crate) fn place(&self, slot: TailSlot) -> (Block, u64) {
        let class = &self.classes[slot.class()];
        let (at, number) = (slot.number() / class.slots, slot.number() % class.slots);
        (class.pages[at as usize].block, u64::from(number * CLASSES[slot.class()]))
    }

    /// Bytes of a slot.
    pub(crate) const fn room_bytes(slot: TailSlot) -> u64 {
        CLASSES[slot.class()] as u64
    }

    /// Bytes of the pool that all pages take.
    pub(crate) const fn bytes(&self) -> u64 {
        self.pages as u64 * self.unit_bytes as u64
    }

    /// The pages that are there, and their blocks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PageId, Block)> {
        self.classes.iter().enumerate().flat_map(|(class, entry)| {
            let pages = (0..).zip(&entry.pages).filter(|(_, page)| page.used != 0);
            pages.map(move |(at, page)| (PageId::of(class, at), page.block))
        })
    }

    fn vacate(&mut self, class: usize, at: u32) -> Block {
        self.pages -= 1;
        let entry = &mut self.classes[class];
        let page = &mut entry.pages[at as usize];
        (page.after, page.closing) = (entry.vacant, false);
        entry.vacant = at;
        page.block
    }

    fn link(&mut self, class: usize, at: u32) {
        let entry = &mut self.classes[class];
        let first = entry.partial;
        (entry.pages[at as usize].before, entry.pages[at as usize].after) = (NONE, first);
        if first != NONE {
            entry.pages[first as usize].before = at;
        }
        entry.partial = at;
    }

    fn unlink(&mut self, class: usize, at: u32) {
        let entry = &mut self.classes[class];
        let Page { before, after, .. } = entry.pages[at as usize];
        if before == NONE {
            entry.partial = after;
        } else {
            entry.pages[before as usize].after = after;
        }
        if after != NONE {
            entry.pages[after as usize].before = before;
        }
    }
}
