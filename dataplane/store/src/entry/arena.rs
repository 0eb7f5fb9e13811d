//! Arena of entries, and the gauges that follow from them: granules by state, and bytes and replicas among the live.

use kvplane_proto::ids::Version;
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::message::ObjectPriority;

use super::marks::{Copies, Mark, Replica};
use super::{
    ACCOUNT_AT, ACCOUNTS, BYTES_MOST, Entry, EntryId, Event, EvictionList, NONE, PINS_MOST, Reserve, STATES, State,
    TAIL_BYTES_MOST, UNCHECKED, UNIT_BITS, step,
};
use crate::allocator::{Block, MEMORY_KINDS, MemoryKind, granules_of};

/// Gauges of the live entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveUse {
    /// Exact sizes, summed.
    pub payload_bytes: u64,
    /// Entries that are replicas of another owner's objects.
    pub replicas: u64,
    /// Replicas of the entries that replica owners may have.
    pub copied: u64,
    /// Entries in the device pool.
    pub on_device: u64,
    /// Entries in the far pool.
    pub far: u64,
}

impl LiveUse {
    const fn add(&mut self, entry: &Entry, at: ReplicaSet) {
        self.payload_bytes += entry.bytes();
        self.replicas += entry.is(Mark::Copy) as u64;
        self.copied += at.count() as u64;
        self.on_device += entry.is_on_device() as u64;
        self.far += matches!(entry.memory(), MemoryKind::Far) as u64;
    }

    const fn subtract(&mut self, entry: &Entry, at: ReplicaSet) {
        self.payload_bytes -= entry.bytes();
        self.replicas -= entry.is(Mark::Copy) as u64;
        self.copied -= at.count() as u64;
        self.on_device -= entry.is_on_device() as u64;
        self.far -= matches!(entry.memory(), MemoryKind::Far) as u64;
    }
}

/// Arena of a store's entries, and the gauges of them.
#[derive(Debug)]
pub struct Entries {
    slots: Vec<Entry>,
    /// Replicas by entry. The mark `Copied` is set where `at` is not empty.
    copies: Vec<Copies>,
    /// First vacant entry; they are linked by `after`.
    vacant: u32,
    limit: u32,
    used: u32,
    unit_log2: u8,
    /// Granules of the entries in each state, by kind of memory.
    granules: [[u64; STATES]; MEMORY_KINDS],
    live: LiveUse,
}

impl Entries {
    /// Creates an arena for `limit` entries, reserved now and touched as it fills.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            slots: Vec::with_capacity(limit as usize),
            copies: Vec::with_capacity(limit as usize),
            vacant: NONE,
            limit,
            used: 0,
            unit_log2: 0,
            granules: [[0; STATES]; MEMORY_KINDS],
            live: LiveUse::default(),
        }
    }

    /// Makes entries take their space in units of `unit_bytes`: a power of two of granules.
    #[must_use]
    pub fn in_units(mut self, unit_bytes: u64) -> Self {
        self.unit_log2 = granules_of(unit_bytes).trailing_zeros() as u8;
        self
    }

    /// Returns the memory of the entries, including those not yet used.
    #[must_use]
    pub fn memory(&self) -> core::ops::Range<*const u8> {
        let slots = self.slots.as_ptr();
        slots.cast()..slots.wrapping_add(self.slots.capacity()).cast()
    }

    /// Returns the most entries in use at once.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns the granules of DRAM that the entries in a state take; those in far and device pools are not counted.
    #[must_use]
    pub const fn granules_in(&self, state: State) -> u64 {
        self.granules[MemoryKind::Near as usize][state as usize]
    }

    /// Returns the gauges of the live entries.
    #[must_use]
    pub const fn live(&self) -> &LiveUse {
        &self.live
    }

    /// Returns true if every entry is in use.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.used == self.limit
    }

    /// Creates an entry in state `Reserved`, whose bytes go to `block`.
    ///
    /// # Panics
    /// If the arena is full, or the size exceeds 35 bits: the caller checks both.
    pub fn reserve(&mut self, wanted: &Reserve, block: Block) -> EntryId {
        let Reserve { digest, bytes, tail_bytes, has_tail, replace, keep, head, replica, copies, moves: _ } = *wanted;
        let copies = Copies { at: ReplicaSet::NONE, ..copies };
        assert!(!self.is_full(), "all {} entries are in use", self.limit);
        assert!(bytes <= BYTES_MOST, "an object of {bytes} B");
        assert!(tail_bytes <= TAIL_BYTES_MOST, "a tail of {tail_bytes} B");
        assert!(usize::from(keep.account) < ACCOUNTS, "account {}", keep.account);
        self.used += 1;
        let entry = Entry {
            digest: [digest.0 as u64, (digest.0 >> 64) as u64],
            version: 0,
            checksum: 0,
            stamp: 0,
            bytes_low: bytes as u32,
            block,
            before: NONE,
            after: NONE,
            pins: u32::from(keep.account) << ACCOUNT_AT,
            bytes_high: (bytes >> 32) as u8,
            incarnation: step(State::Vacant, Event::Reserve) as u8,
            place: EvictionList::Nowhere as u8,
            space: self.unit_log2 | (wanted.extra_granules() as u8) << UNIT_BITS,
        };
        let mut entry = entry;
        entry.mark(Mark::Tail, has_tail);
        entry.mark(Mark::Replace, replace);
        entry.mark(Mark::Hard, keep.hard_pin);
        entry.set_priority(keep.priority);
        entry.mark(Mark::Head, head);
        entry.mark(Mark::Wanted, replica.is_owed_a_copy());
        entry.mark(Mark::Awaited, replica == Replica::Awaited);
        entry.mark(Mark::Copy, replica == Replica::Second);
        self.granules[entry.memory() as usize][State::Reserved as usize] += entry.granules();
        if self.vacant == NONE {
            self.slots.push(entry);
            self.copies.push(copies);
            return EntryId(self.slots.len() as u32 - 1);
        }
        let id = EntryId(self.vacant);
        self.vacant = self[id].after;
        self[id] = entry;
        self.copies[id.0 as usize] = copies;
        id
    }

    /// Commits a reserved entry.
    pub fn commit(&mut self, id: EntryId, version: Version, checksum: u64) {
        self.take_step(id, Event::Commit);
        let entry = &mut self[id];
        entry.version = version.0;
        entry.checksum = checksum;
    }

    /// Moves an entry from `Reserved` to `Quarantined`.
    pub fn expire(&mut self, id: EntryId) {
        self.take_step(id, Event::Expire);
    }

    /// Moves an entry from `Live` to `Doomed`.
    pub fn doom(&mut self, id: EntryId) {
        assert!(self[id].pins() > 0, "{id:?} is doomed without a pin");
        self.take_step(id, Event::Doom);
    }

    /// Frees an entry.
    ///
    /// # Panics
    /// If it is pinned or still in the eviction order.
    pub fn release(&mut self, id: EntryId) {
        let entry = &self[id];
        assert!(entry.pins() == 0 && entry.place() == EvictionList::Nowhere, "releasing {entry:?}");
        self.take_step(id, Event::Release);
        self[id].after = self.vacant;
        self.vacant = id.0;
        self.used -= 1;
    }

    /// Adds a pin; returns the number of pins.
    pub fn pin(&mut self, id: EntryId) -> u32 {
        let entry = &mut self[id];
        assert!(entry.state() == State::Live && entry.pins() < PINS_MOST, "pinning {entry:?}");
        entry.pins += 1;
        entry.pins()
    }

    /// Removes a pin; returns the number of pins left.
    pub fn unpin(&mut self, id: EntryId) -> u32 {
        let entry = &mut self[id];
        assert!(entry.pins() > 0, "a pin that is held is counted");
        entry.pins -= 1;
        entry.pins()
    }

    /// Sets or clears a mark of an entry; `Copied` is set by [`Self::set_replica_owners`].
    #[inline]
    pub fn set(&mut self, id: EntryId, mark: Mark, is_so: bool) {
        debug_assert!(mark != Mark::Copied, "set with the replica owners");
        let (entry, at) = (&mut self.slots[id.0 as usize], self.copies[id.0 as usize].at);
        let counts = entry.is_live() && mark == Mark::Copy;
        if counts {
            self.live.subtract(entry, at);
        }
        entry.mark(mark, is_so);
        if counts {
            self.live.add(entry, at);
        }
    }

    /// Returns the replicas of an entry's object.
    #[must_use]
    pub fn copies(&self, id: EntryId) -> Copies {
        self.copies[id.0 as usize]
    }

    /// Sets the number of replicas that an entry's object is to have; it counts where the object is to be replicated.
    pub fn set_wanted(&mut self, id: EntryId, wanted: u8) {
        self.copies[id.0 as usize].wanted = wanted.max(1);
    }

    /// Sets the replica owners that may have a replica.
    pub fn set_replica_owners(&mut self, id: EntryId, at: ReplicaSet) {
        let (entry, copies) = (&mut self.slots[id.0 as usize], &mut self.copies[id.0 as usize]);
        if entry.is_live() {
            self.live.subtract(entry, copies.at);
            self.live.add(entry, at);
        }
        copies.at = at;
        entry.mark(Mark::Copied, !at.is_empty());
    }

    /// Gives a live entry another block, with room for a tail of this length behind its bytes. It is in no order.
    pub fn relocate(&mut self, id: EntryId, block: Block, tail_bytes: u32) {
        assert!(tail_bytes <= TAIL_BYTES_MOST, "a tail of {tail_bytes} B");
        let (entry, at) = (&mut self.slots[id.0 as usize], self.copies[id.0 as usize].at);
        assert!(entry.is_live() && entry.place() == EvictionList::Nowhere, "relocating {entry:?}");
        self.live.subtract(entry, at);
        self.granules[entry.memory() as usize][State::Live as usize] -= entry.granules();
        entry.block = block;
        let extra = granules_of(entry.bytes() + u64::from(tail_bytes)) - granules_of(entry.bytes());
        entry.space = self.unit_log2 | (extra as u8) << UNIT_BITS;
        self.granules[entry.memory() as usize][State::Live as usize] += entry.granules();
        self.live.add(entry, at);
    }

    /// Sets whether the bytes of an entry have to be compared with its checksum before they are lent.
    pub fn set_unchecked(&mut self, id: EntryId, is_so: bool) {
        let entry = &mut self[id];
        entry.place = if is_so { entry.place | UNCHECKED } else { entry.place & !UNCHECKED };
    }

    /// Moves an entry to another state, and its space to that state's gauges.
    fn take_step(&mut self, id: EntryId, event: Event) {
        let (entry, at) = (&mut self.slots[id.0 as usize], self.copies[id.0 as usize].at);
        let granules = entry.granules();
        let by_state = &mut self.granules[entry.memory() as usize];
        by_state[entry.state() as usize] -= granules;
        if entry.is_live() {
            self.live.subtract(entry, at);
        }
        entry.take_step(event);
        if entry.is_live() {
            self.live.add(entry, at);
        }
        if entry.state() != State::Vacant {
            by_state[entry.state() as usize] += granules;
        }
    }

    /// Charges an entry to another account.
    pub fn set_account(&mut self, id: EntryId, account: u16) {
        assert!(usize::from(account) < ACCOUNTS, "account {account}");
        let entry = &mut self[id];
        entry.pins = entry.pins() | u32::from(account) << ACCOUNT_AT;
    }

    /// Sets the priority of an entry, which is not in the order of an eviction policy.
    pub fn set_priority(&mut self, id: EntryId, priority: ObjectPriority) {
        let entry = &mut self[id];
        // The order of soft pins does not depend on it.
        let is_ordered =
            !matches!(entry.place(), EvictionList::Nowhere | EvictionList::SoftPinned | EvictionList::SoftPinnedParked);
        assert!(!is_ordered, "another priority of {entry:?}, which is in its policy's order");
        entry.set_priority(priority);
    }

    /// Returns every entry in use, in the arena's order.
    pub fn iter(&self) -> impl Iterator<Item = (EntryId, &Entry)> {
        let ids = (0..).map(EntryId).zip(&self.slots);
        ids.filter(|(_, entry)| entry.state() != State::Vacant)
    }

    /// Returns the number of entries that were ever used: all ids are below it.
    #[must_use]
    pub fn touched(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Asserts that the gauges agree with the entries.
    ///
    /// # Panics
    /// If an assertion fails.
    pub fn check(&self) {
        let (mut used, mut granules, mut live) = (0, [[0; STATES]; MEMORY_KINDS], LiveUse::default());
        for (id, entry) in self.iter() {
            used += 1;
            let at = self.copies(id).at;
            assert_eq!(entry.is(Mark::Copied), !at.is_empty(), "the mark and the replica owners of {entry:?}");
            granules[entry.memory() as usize][entry.state() as usize] += entry.granules();
            if entry.is_live() {
                live.add(entry, at);
            }
        }
        assert_eq!(self.used, used, "entries in use");
        assert_eq!(self.granules, granules, "granules by kind of memory and state");
        assert_eq!(self.live, live, "bytes of live objects, replicas, and objects that have one");
    }
}

impl core::ops::Index<EntryId> for Entries {
    type Output = Entry;

    fn index(&self, id: EntryId) -> &Entry {
        &self.slots[id.0 as usize]
    }
}

impl core::ops::IndexMut<EntryId> for Entries {
    fn index_mut(&mut self, id: EntryId) -> &mut Entry {
        &mut self.slots[id.0 as usize]
    }
}
