//! Pages of tails: if objects take whole blocks of an SSD, the tails of those that fill theirs are stored together.
//!
//! A page is one unit of the pool and holds tails of one length class, each in a slot. So an object of 4 KiB takes 4
//! KiB and its part of a page, not a second unit. A tail that fits into the object's last unit stays there, and so does
//! one that is longer than all classes.
//!
//! A page can be evicted like objects: when room is needed and adjacent blocks have to be cleared, its objects are
//! evicted together (each slot knows its entry). So pages do not fragment the pool for good. A freed slot is the next
//! one taken of its class, so that pages in use stay full.
//!
//! Per object this costs 4 bytes in the slot's owner and its share of a page's record: of a page of 32 slots, 2 bytes.
//! The pool's memory for pages belongs to the store, and the bytes of tails to the service.

use crate::allocator::Block;
use crate::entry::{EntryId, NONE};

/// Length of the slots of each class. The first takes keys of 40 bytes (tails begin with 24), the last of 488.
const CLASSES: [u32; 7] = [64, 96, 128, 192, 256, 384, 512];
/// Bits of a slot's number within its class.
const NUMBER_BITS: u32 = 27;

const _: () = assert!(CLASSES.len() < 1 << (30 - NUMBER_BITS));

/// Slot of a page, in 30 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TailSlot(pub(crate) u32);

impl TailSlot {
    pub(crate) const fn class(self) -> usize {
        (self.0 >> NUMBER_BITS) as usize
    }

    const fn number(self) -> u32 {
        self.0 & ((1 << NUMBER_BITS) - 1)
    }
}

/// Page, by its class and its index there.
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

/// Record of a page. Vacant ones are linked by `after`, those with free slots by both.
#[derive(Clone, Copy, Debug)]
struct Page {
    block: Block,
    used: u64,
    before: u32,
    after: u32,
    /// True while it is being emptied: it takes no tails and is not freed with the last one.
    closing: bool,
}

#[derive(Debug)]
struct Class {
    slots: u32,
    pages: Vec<Page>,
    /// Entry of each slot.
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
    /// Creates a table for pages of one unit each, for this many objects. There are no pages unless units are larger
    /// than granules. The tables are reserved now and touched as they fill.
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

    /// Returns the most pages that this many objects need: every one with the longest tail, and a partial page for each
    /// class.
    const fn most(unit_bytes: u32, max_objects: u32) -> u32 {
        let slots = unit_bytes / CLASSES[CLASSES.len() - 1];
        max_objects / (if slots > 2 { slots } else { 2 }) + CLASSES.len() as u32
    }

    /// Returns the most blocks of the pool that pages may take.
    pub(crate) const fn max_pages(&self) -> u32 {
        self.max_pages
    }

    /// Returns the number of pages.
    pub(crate) const fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the class for a tail of this length; `None` if it has to be stored behind its object.
    pub(crate) fn class_of(&self, tail_bytes: u32) -> Option<usize> {
        let class = CLASSES.iter().position(|bytes| *bytes >= tail_bytes)?;
        (self.max_pages > 0 && self.classes[class].slots > 1).then_some(class)
    }

    /// Takes a slot of an existing page.
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

    /// Takes the slot at an offset of a page; `None` if there is none, or it is taken.
    pub(crate) fn take_at(&mut self, page: PageId, offset: u64, owner: EntryId) -> Option<TailSlot> {
        let (class, at) = (page.class(), page.page());
        let (slots, bytes) = (self.classes[class].slots, u64::from(CLASSES[class]));
        let slot = u32::try_from(offset / bytes).ok().filter(|slot| *slot < slots && offset.is_multiple_of(bytes))?;
        let entry = self.classes[class].pages.get_mut(at as usize)?;
        if entry.used >> slot & 1 == 1 {
            return None;
        }
        entry.used |= 1 << slot;
        if entry.used.count_ones() == slots {
            self.unlink(class, at);
        }
        let number = at * slots + slot;
        self.classes[class].owners[number as usize] = owner.0;
        Some(TailSlot((class as u32) << NUMBER_BITS | number))
    }

    /// Returns true if there are pages of a class.
    pub(crate) fn has_class(&self, class: usize) -> bool {
        self.max_pages > 0 && self.classes.get(class).is_some_and(|class| class.slots > 1)
    }

    /// Returns true if an existing page has a free slot.
    pub(crate) const fn has_free(&self, class: usize) -> bool {
        self.classes[class].partial != NONE
    }

    /// Returns true if another page may be added.
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

    /// Frees a slot. Returns the block of its page, if it was the last.
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

    /// Closes a page for new tails, as it is to be emptied.
    pub(crate) fn close(&mut self, page: PageId) {
        let (class, at) = (page.class(), page.page());
        let slots = self.classes[class].slots;
        if self.classes[class].pages[at as usize].used.count_ones() < slots {
            self.unlink(class, at);
        }
        self.classes[class].pages[at as usize].closing = true;
    }

    /// Returns any entry with a tail in a page.
    pub(crate) fn any_owner(&self, page: PageId) -> Option<EntryId> {
        self.owners(page).next()
    }

    /// Ends a page that was closed and is empty; returns its block.
    pub(crate) fn end(&mut self, page: PageId) -> Block {
        let (class, at) = (page.class(), page.page());
        let entry = &self.classes[class].pages[at as usize];
        assert!(entry.closing && entry.used == 0, "{entry:?} is ended");
        self.vacate(class, at)
    }

    /// Returns the entries with tails in a page.
    pub(crate) fn owners(&self, page: PageId) -> impl Iterator<Item = EntryId> {
        let (class, at) = (&self.classes[page.class()], page.page());
        let used = class.pages[at as usize].used;
        let slots = (0..class.slots).filter(move |slot| used >> slot & 1 == 1);
        slots.map(move |slot| EntryId(class.owners[(at * class.slots + slot) as usize]))
    }

    /// Returns the place of a slot: its page's block, and the offset in it.
    pub(crate) fn place(&self, slot: TailSlot) -> (Block, u64) {
        let class = &self.classes[slot.class()];
        let (at, number) = (slot.number() / class.slots, slot.number() % class.slots);
        (class.pages[at as usize].block, u64::from(number * CLASSES[slot.class()]))
    }

    /// Returns the length of a slot.
    pub(crate) const fn room_bytes(slot: TailSlot) -> u64 {
        CLASSES[slot.class()] as u64
    }

    /// Returns the bytes of the pool that all pages take.
    pub(crate) const fn bytes(&self) -> u64 {
        self.pages as u64 * self.unit_bytes as u64
    }

    /// Returns the pages, and their blocks.
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
