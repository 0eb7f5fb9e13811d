//! Objects of a former process: which a space keeps for the next one, and how it takes them back.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;

use super::Space;
use crate::allocator::{Block, GRANULE_BYTES, granules_of};
use crate::entry::{Copies, EntryId, Keep, Mark, Replica, Reserve, State};
use crate::eviction::EvictionPolicy;
use crate::image::{ImageContents, KeptObject, TailPlace};
use crate::order::keep_of;
use crate::store::Extent;
use crate::tail_pages::PageId;

/// Owner of a place of the pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tenure {
    /// Object, by its index.
    Object(u32),
    /// Page of tails of a class.
    Page(u8),
    /// Extent that is not used.
    Withheld,
}

/// Entries that were created for a former process's objects and withheld extents.
#[derive(Debug, Default)]
pub(in crate::store) struct TakenBack {
    /// Objects, and those of them whose extents are not reused.
    pub(in crate::store) objects: u64,
    pub(in crate::store) bytes: u64,
    pub(in crate::store) lent: Vec<EntryId>,
    pub(in crate::store) withheld: u32,
}

/// Objects of a space that outlive its process.
pub(in crate::store) struct KeptSpace<'a, P> {
    pub(in crate::store) space: &'a mut Space<P>,
}

impl<P: EvictionPolicy> KeptSpace<'_, P> {
    /// Returns the objects that `is_kept` keeps, for the next process, in the order of their last accesses. With
    /// `lends`, processes may still access what is pinned or reserved: those extents are withheld.
    pub(in crate::store) fn collect(&self, is_kept: impl Fn(Digest, Replica) -> bool, lends: bool) -> ImageContents {
        let entries = self.space.objects.entries();
        let (mut objects, mut withheld) = (Vec::new(), Vec::new());
        for (id, entry) in entries.iter().filter(|(_, entry)| !entry.is_on_device()) {
            let extent = self.space.pool.extent(entry);
            if entry.state() == State::Live && is_kept(entry.digest(), entry.replica()) {
                objects.push((entry.stamp, self.kept(id, lends && entry.pins() > 0)));
            } else if lends && (entry.pins() > 0 || entry.state() != State::Live) {
                withheld.push(Extent { offset: extent.offset, bytes: entry.granules() * GRANULE_BYTES });
            }
        }
        objects.sort_unstable_by_key(|(stamp, object)| (*stamp, object.digest));
        let objects = objects.into_iter().map(|(_, object)| object).collect();
        ImageContents { objects, withheld, ..ImageContents::default() }
    }

    fn kept(&self, id: EntryId, lent: bool) -> KeptObject {
        let entries = self.space.objects.entries();
        let entry = &entries[id];
        let Keep { group, soft_pin_ns, hard_pin, priority, .. } = keep_of(&self.space.order, entries, id);
        let page_class = self.space.pool.page_class_of(entry).map(|class| class as u8);
        // The service knows the length of tails.
        let offset = self.space.pool.tail_at(entry);
        let bytes = if entry.is(Mark::Tail) { self.space.pool.tail_room(entry) as u32 } else { 0 };
        KeptObject {
            digest: entry.digest(),
            version: entry.version(),
            checksum: entry.checksum(),
            extent: self.space.pool.extent(entry),
            extra_granules: entry.extra_granules(),
            tail: TailPlace { page_class, offset, bytes, checksum: 0 },
            tenant: self.space.order.tenant_of(entries, id),
            group,
            soft_pin_ns,
            priority,
            hard_pin,
            head: entry.is(Mark::Head),
            wanted: entry.is(Mark::Wanted),
            protected: entry.is_protected(),
            lent,
            replica: entry.is(Mark::Copy),
            copies: entries.copies(id).wanted,
            at: entries.copies(id).at,
        }
    }

    /// Takes the objects of a former process back, at their places. Those that are due for eviction first are left out
    /// if there are more than entries. `None`, and nothing changes, if the space is not empty, places contradict each
    /// other or the pool, or there are more withheld extents than entries.
    pub(in crate::store) fn take_back(&mut self, contents: &ImageContents) -> Option<TakenBack> {
        let limit = (self.space.objects.entries().limit() as usize).checked_sub(contents.withheld.len())?;
        let first = contents.objects.len().saturating_sub(limit);
        let objects = &contents.objects[first..];
        if objects.iter().any(|object| !self.is_possible(object)) {
            return None;
        }
        let places = self.places_of(objects, &contents.withheld)?;
        let held: Vec<(u32, u32)> = places.iter().map(|(start, granules, _)| (*start, *granules)).collect();
        let blocks = self.space.pool.hold_at(&held)?;
        let (mut of_objects, mut pages, mut taken) = (vec![None; objects.len()], BTreeMap::new(), TakenBack::default());
        for ((start, granules, tenure), block) in places.into_iter().zip(blocks) {
            match tenure {
                Tenure::Object(at) => of_objects[at as usize] = Some(block),
                Tenure::Page(class) => {
                    let page = self.space.pool.add_page(usize::from(class), block);
                    pages.insert(u64::from(start) * GRANULE_BYTES, (page, 0u32));
                }
                Tenure::Withheld => {
                    self.withhold(block, u64::from(granules) * GRANULE_BYTES);
                    taken.withheld += 1;
                }
            }
        }
        for (object, block) in objects.iter().zip(of_objects) {
            let block = block.expect("each object has a place");
            if let Some(id) = self.take_one_back(object, block, &mut pages) {
                taken.objects += 1;
                taken.bytes += object.extent.bytes;
                taken.lent.extend(object.lent.then_some(id));
            }
        }
        // A page whose objects were all left out.
        for (page, _) in pages.into_values().filter(|(_, owners)| *owners == 0) {
            self.space.pool.close_page(page);
            self.space.pool.end_page(page);
        }
        Some(taken)
    }

    /// Returns true if an object can be in the pool, as far as it shows by itself.
    fn is_possible(&self, object: &KeptObject) -> bool {
        let Extent { offset, bytes } = object.extent;
        let unit = self.space.pool.unit_bytes();
        let is_long =
            bytes == 0 || bytes > crate::entry::BYTES_MOST || bytes > self.space.pool.granules() * GRANULE_BYTES;
        let is_paged = object.tail.page_class.is_some();
        let has_class = object.tail.page_class.is_none_or(|class| self.space.pool.has_page_class(class.into()));
        let extra_fits = object.extra_granules < 32 && !(is_paged && object.extra_granules > 0);
        !is_long && offset.is_multiple_of(unit) && has_class && extra_fits
    }

    /// Returns all places, in ascending order; `None` if one is beyond the pool, or pages contradict each other.
    fn places_of(&self, objects: &[KeptObject], withheld: &[Extent]) -> Option<Vec<(u32, u32, Tenure)>> {
        let start = |offset: u64| u32::try_from(offset / GRANULE_BYTES).ok();
        let mut places = Vec::with_capacity(objects.len() + withheld.len());
        let unit = u32::try_from(self.space.pool.unit_bytes() / GRANULE_BYTES).ok()?;
        for (at, object) in (0..).zip(objects) {
            let granules = u32::try_from(object.granules(self.space.pool.unit_bytes())).ok()?;
            places.push((start(object.extent.offset)?, granules, Tenure::Object(at)));
            if let Some(class) = object.tail.page_class {
                places.push((start(self.space.pool.page_at(object.tail.offset))?, unit, Tenure::Page(class)));
            }
        }
        for extent in withheld {
            let granules = u32::try_from(granules_of(extent.bytes)).ok()?;
            places.push((start(extent.offset)?, granules, Tenure::Withheld));
        }
        places.sort_unstable();
        // Objects share pages; an overlap of anything else is found when the places are held.
        places.dedup();
        Some(places)
    }

    /// Takes an object back whose place is held already; `None` if another one has its digest, or its tail has no
    /// place.
    fn take_one_back(
        &mut self,
        object: &KeptObject,
        block: Block,
        pages: &mut BTreeMap<u64, (PageId, u32)>,
    ) -> Option<EntryId> {
        let KeptObject { digest, extent, tail, .. } = *object;
        if self.space.objects.find(digest).is_some() {
            self.space.pool.free(block);
            return None;
        }
        let granules = object.granules(self.space.pool.unit_bytes());
        let account = self.space.order.tenants_mut().account_of_unconfigured(object.tenant);
        let hard_pin = object.hard_pin && self.space.order.tenants().pin_limit(granules, account).is_none();
        let KeptObject { group, soft_pin_ns, priority, .. } = *object;
        let keep = Keep { account, group, soft_pin_ns, hard_pin, priority };
        // The shortest tail that takes as many granules.
        let slack = granules_of(extent.bytes) * GRANULE_BYTES - extent.bytes;
        let extra = u64::from(object.extra_granules);
        let tail_bytes = if extra > 0 { (slack + (extra - 1) * GRANULE_BYTES + 1) as u32 } else { 0 };
        let wanted = Reserve {
            tail_bytes,
            has_tail: tail.bytes > 0,
            keep,
            head: object.head,
            replica: match (object.replica, object.wanted) {
                (true, _) => Replica::Second,
                (false, true) => Replica::First,
                (false, false) => Replica::None,
            },
            copies: Copies::of_put(object.copies.saturating_add(1), 0),
            moves: true,
            ..Reserve::plain(digest, extent.bytes)
        };
        let id = self.space.take(&wanted, block);
        if tail.page_class.is_some() {
            let at = self.space.pool.page_at(tail.offset);
            let (page, owners) = pages.get_mut(&at).expect("each page has a place");
            if !self.space.pool.give_slot_at(*page, tail.offset - at, &self.space.objects.entries()[id], id) {
                self.space.release(id);
                return None;
            }
            *owners += 1;
        }
        self.space.objects.entries_mut().set_unchecked(id, true);
        self.space.commit(id, object.version, object.checksum);
        if object.protected {
            self.space.order.access(self.space.objects.entries_mut(), id);
        }
        Some(id)
    }

    /// Keeps a block from being used, in quarantine.
    fn withhold(&mut self, block: Block, bytes: u64) {
        let id = self.space.take(&Reserve { moves: true, ..Reserve::plain(Digest(0), bytes) }, block);
        self.space.quarantine(id);
    }
}
