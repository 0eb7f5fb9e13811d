//! What the store knows about each object: one cache line per entry, in an arena reserved at start.
//!
//! An entry lives from reservation to the last byte's release ([`LIFECYCLE`]):
//!
//! * `Reserved`: a writer fills its bytes; nobody sees it.
//! * `Quarantined`: the put failed, but its writer may still be writing: the bytes are lent to nobody else.
//! * `Live`: in the index and in the eviction order; the bytes never change again.
//! * `Doomed`: removed while pinned; invisible; its bytes stay until the last pin goes.
//!
//! Not here: the way from a digest to an entry ([`crate::index`]) and the order of eviction ([`crate::eviction`]),
//! whose links are kept in the entries.

mod marks;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;

use crate::allocator::{Block, GRANULE_BYTES, granules_of};
pub use marks::{Mark, Replica};

/// No entry, in links.
pub(crate) const NONE: u32 = u32::MAX;

/// A position in the arena. Never leaves the store: what leaves carries a generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct EntryId(pub u32);

/// Where an entry is in its incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Unused.
    Vacant,
    /// Being written.
    Reserved,
    /// Given up, but perhaps still being written.
    Quarantined,
    /// Visible.
    Live,
    /// Removed, but still being read.
    Doomed,
}

/// How many states there are.
pub const STATES: usize = 5;

/// What happens to an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A put begins.
    Reserve,
    /// A put completes.
    Commit,
    /// A put's deadline passes.
    Expire,
    /// The object is removed while pinned.
    Doom,
    /// The bytes are nobody's any more.
    Release,
}

/// Every step that an entry may take; any other is a bug of ours.
pub const LIFECYCLE: [(State, Event, State); 8] = [
    (State::Vacant, Event::Reserve, State::Reserved),
    (State::Reserved, Event::Commit, State::Live),
    (State::Reserved, Event::Expire, State::Quarantined),
    (State::Reserved, Event::Release, State::Vacant),
    (State::Quarantined, Event::Release, State::Vacant),
    (State::Live, Event::Doom, State::Doomed),
    (State::Live, Event::Release, State::Vacant),
    (State::Doomed, Event::Release, State::Vacant),
];

/// Where the eviction policy has put an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Nowhere,
    Probation,
    ProbationParked,
    Protected,
    ProtectedParked,
    Kept,
    KeptParked,
}

/// One object. The size is kept in 35 bits (pools end at 1 TiB, objects long before), so that the entry fills one cache
/// line.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct Entry {
    digest: [u64; 2],
    version: u64,
    checksum: u64,
    /// The policy's clock when the entry was put at a segment's recent end.
    pub(crate) stamp: u64,
    bytes_low: u32,
    block: Block,
    pub(crate) before: u32,
    pub(crate) after: u32,
    /// How many pins there are, below [`ACCOUNT_AT`], and whose the object is from there on.
    pins: u32,
    /// Above the length's lower 32 bits, and marks in the highest five.
    bytes_high: u8,
    /// The state, below [`MARKS_AT`], and marks from there on.
    incarnation: u8,
    pub(crate) place: Place,
    /// Space is taken in units of so many granules, as a power of two: three bits. Above them, how many granules more
    /// than its bytes alone it takes for its tail.
    space: u8,
}

/// Where in `pins` the account begins.
const ACCOUNT_AT: u32 = 20;
/// The most pins that an entry counts.
pub(crate) const PINS_MOST: u32 = (1 << ACCOUNT_AT) - 1;
/// How many accounts entries can tell apart.
pub const ACCOUNTS: usize = 1 << (u32::BITS - ACCOUNT_AT);
/// The longest object that an entry can be of.
pub(crate) const BYTES_MOST: u64 = (1 << 35) - 1;
/// Bits of `bytes_high` that are marks.
const HIGH_MARKS: u8 = 0xf8;
/// Where in `incarnation` marks begin.
const MARKS_AT: u32 = 3;
/// Bits of `space` that say the unit.
const UNIT_BITS: u32 = 3;

/// What an entry is reserved for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve {
    /// The object's name.
    pub digest: Digest,
    /// Its size.
    pub bytes: u64,
    /// Bytes behind it that belong to it: at most [`TAIL_BYTES_MOST`].
    pub tail_bytes: u32,
    /// Whether its tail is there when it is committed.
    pub has_tail: bool,
    /// Whether an object of the digest is replaced by it.
    pub replace: bool,
    /// How it is to be kept.
    pub keep: Keep,
    /// Whether it names the stripes of a larger object.
    pub head: bool,
    /// Whether another owner is to have it too.
    pub replica: Replica,
    /// Migration from another owner: the object is stored already, so neither the lease of its tenant nor a limit
    /// of pins refuses it.
    pub moves: bool,
}

/// Whose an object is and how it is to be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Keep {
    /// The account that it is charged to, by its place in the store's table.
    pub account: u16,
    /// The group that it belongs to; 0 for none.
    pub group: u64,
    /// For how long from its commit it is kept before others; 0 for not at all.
    pub soft_pin_ns: u64,
    /// Whether it is never evicted.
    pub hard_pin: bool,
}

impl Reserve {
    /// Of so many bytes and nothing else.
    #[must_use]
    pub const fn plain(digest: Digest, bytes: u64) -> Self {
        Self {
            digest,
            bytes,
            tail_bytes: 0,
            has_tail: false,
            replace: false,
            keep: Keep { account: 0, group: 0, soft_pin_ns: 0, hard_pin: false },
            head: false,
            replica: Replica::None,
            moves: false,
        }
    }

    /// Granules that its tail takes beside those of its bytes.
    const fn extra_granules(&self) -> u64 {
        granules_of(self.bytes + self.tail_bytes as u64) - granules_of(self.bytes)
    }
}

/// The longest tail.
pub const TAIL_BYTES_MOST: u32 = 31 * GRANULE_BYTES as u32;

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// The object's name.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        Digest((self.digest[1] as u128) << 64 | self.digest[0] as u128)
    }

    /// The version that its commit gave it.
    #[must_use]
    pub const fn version(&self) -> Version {
        Version(self.version)
    }

    /// The checksum that its writer gave.
    #[must_use]
    pub const fn checksum(&self) -> u64 {
        self.checksum
    }

    /// The object's exact size.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        ((self.bytes_high & !HIGH_MARKS) as u64) << 32 | self.bytes_low as u64
    }

    /// The space that it takes in the pool.
    #[must_use]
    pub const fn granules(&self) -> u64 {
        let granules = granules_of(self.bytes()) + (self.space >> UNIT_BITS) as u64;
        granules.next_multiple_of(1 << (self.space & ((1 << UNIT_BITS) - 1)))
    }

    /// How many readers hold it.
    #[must_use]
    pub const fn pins(&self) -> u32 {
        self.pins & PINS_MOST
    }

    /// Whether this is so of it.
    #[must_use]
    pub const fn is(&self, mark: Mark) -> bool {
        match mark.high() {
            Some(bit) => self.bytes_high & bit != 0,
            None => self.incarnation & (mark as u8) << MARKS_AT != 0,
        }
    }

    /// What it is of those that two owners have.
    #[must_use]
    pub const fn replica(&self) -> Replica {
        match (self.is(Mark::Copy), self.is(Mark::Wanted), self.is(Mark::Awaited)) {
            (true, ..) => Replica::Second,
            (false, true, true) => Replica::Awaited,
            (false, true, false) => Replica::First,
            (false, false, _) => Replica::None,
        }
    }

    const fn mark(&mut self, mark: Mark, set: bool) {
        let (word, bit) = match mark.high() {
            Some(bit) => (&mut self.bytes_high, bit),
            None => (&mut self.incarnation, (mark as u8) << MARKS_AT),
        };
        *word = if set { *word | bit } else { *word & !bit };
    }

    /// The account that it is charged to.
    #[must_use]
    pub const fn account(&self) -> usize {
        (self.pins >> ACCOUNT_AT) as usize
    }

    fn take_step(&mut self, event: Event) {
        let marks = self.incarnation >> MARKS_AT << MARKS_AT;
        self.incarnation = marks | step(self.state(), event) as u8;
    }

    /// Where it is in its incarnation.
    #[must_use]
    pub const fn state(&self) -> State {
        const STATE: [State; 8] = [
            State::Vacant,
            State::Reserved,
            State::Quarantined,
            State::Live,
            State::Doomed,
            State::Vacant,
            State::Vacant,
            State::Vacant,
        ];
        STATE[(self.incarnation & ((1 << MARKS_AT) - 1)) as usize]
    }

    /// Where its bytes are.
    #[must_use]
    pub const fn block(&self) -> Block {
        self.block
    }

    /// Whether its bytes stay whatever room is needed: somebody reads or writes them, or they are pinned.
    #[must_use]
    pub const fn is_stuck(&self) -> bool {
        match self.state() {
            State::Vacant => false,
            State::Reserved | State::Quarantined | State::Doomed => true,
            State::Live => self.pins() > 0 || self.is(Mark::Hard),
        }
    }

    /// Whether eviction may take it.
    #[must_use]
    pub fn is_evictable(&self) -> bool {
        self.state() == State::Live && self.pins() == 0 && !self.is(Mark::Hard)
    }
}

/// The arena of a store's entries.
#[derive(Debug)]
pub struct Entries {
    slots: Vec<Entry>,
    /// First vacant entry; they are linked by `after`.
    vacant: u32,
    limit: u32,
    used: u32,
    unit_log2: u8,
}

impl Entries {
    /// An arena for `limit` entries, reserved now and touched as it fills.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { slots: Vec::with_capacity(limit as usize), vacant: NONE, limit, used: 0, unit_log2: 0 }
    }

    /// Entries take their space in units of so many bytes: a power of two of granules.
    #[must_use]
    pub fn in_units(mut self, unit_bytes: u64) -> Self {
        self.unit_log2 = granules_of(unit_bytes).trailing_zeros() as u8;
        self
    }

    /// Where entries lie and will lie.
    #[must_use]
    pub fn memory(&self) -> core::ops::Range<*const u8> {
        let slots = self.slots.as_ptr();
        slots.cast()..slots.wrapping_add(self.slots.capacity()).cast()
    }

    /// Whether every entry is in use.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.used == self.limit
    }

    /// A new entry in state `Reserved`, whose bytes go to `block`.
    ///
    /// # Panics
    /// When the arena is full, or the size takes more than 35 bits: the caller checks both.
    pub fn reserve(&mut self, wanted: &Reserve, block: Block) -> EntryId {
        let Reserve { digest, bytes, tail_bytes, has_tail, replace, keep, head, replica, moves: _ } = *wanted;
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
            place: Place::Nowhere,
            space: self.unit_log2 | (wanted.extra_granules() as u8) << UNIT_BITS,
        };
        let mut entry = entry;
        entry.mark(Mark::Tail, has_tail);
        entry.mark(Mark::Replace, replace);
        entry.mark(Mark::Hard, keep.hard_pin);
        entry.mark(Mark::Head, head);
        entry.mark(Mark::Wanted, replica.is_owed_a_copy());
        entry.mark(Mark::Awaited, replica == Replica::Awaited);
        entry.mark(Mark::Copy, replica == Replica::Second);
        if self.vacant == NONE {
            self.slots.push(entry);
            return EntryId(self.slots.len() as u32 - 1);
        }
        let id = EntryId(self.vacant);
        self.vacant = self[id].after;
        self[id] = entry;
        id
    }

    /// Makes a reserved entry an object.
    pub fn commit(&mut self, id: EntryId, version: Version, checksum: u64) {
        let entry = &mut self[id];
        entry.take_step(Event::Commit);
        entry.version = version.0;
        entry.checksum = checksum;
    }

    /// `Reserved` to `Quarantined`.
    pub fn expire(&mut self, id: EntryId) {
        self[id].take_step(Event::Expire);
    }

    /// `Live` to `Doomed`.
    pub fn doom(&mut self, id: EntryId) {
        assert!(self[id].pins() > 0, "{id:?} is doomed, but nobody reads it");
        self[id].take_step(Event::Doom);
    }

    /// The entry falls vacant.
    ///
    /// # Panics
    /// When it is pinned or still in the eviction order.
    pub fn release(&mut self, id: EntryId) {
        let vacant = self.vacant;
        let entry = &mut self[id];
        assert!(entry.pins() == 0 && entry.place == Place::Nowhere, "releasing {entry:?}");
        entry.take_step(Event::Release);
        entry.after = vacant;
        self.vacant = id.0;
        self.used -= 1;
    }

    /// One more reader; returns how many there are.
    pub fn pin(&mut self, id: EntryId) -> u32 {
        let entry = &mut self[id];
        assert!(entry.state() == State::Live && entry.pins() < PINS_MOST, "pinning {entry:?}");
        entry.pins += 1;
        entry.pins()
    }

    /// One reader fewer; returns how many are left.
    pub fn unpin(&mut self, id: EntryId) -> u32 {
        let entry = &mut self[id];
        assert!(entry.pins() > 0, "a pin that is held is counted");
        entry.pins -= 1;
        entry.pins()
    }

    /// Notes that something is so of an entry now, or no more.
    pub fn set(&mut self, id: EntryId, mark: Mark, is_so: bool) {
        self[id].mark(mark, is_so);
    }

    /// Charges an entry to another account.
    pub fn set_account(&mut self, id: EntryId, account: u16) {
        assert!(usize::from(account) < ACCOUNTS, "account {account}");
        let entry = &mut self[id];
        entry.pins = entry.pins() | u32::from(account) << ACCOUNT_AT;
    }

    /// Every entry in use, in the arena's order.
    pub fn iter(&self) -> impl Iterator<Item = (EntryId, &Entry)> {
        let ids = (0..).map(EntryId).zip(&self.slots);
        ids.filter(|(_, entry)| entry.state() != State::Vacant)
    }

    /// Positions that were ever used: all ids are below.
    #[must_use]
    pub fn touched(&self) -> u32 {
        self.slots.len() as u32
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

/// The state after `event`.
fn step(from: State, event: Event) -> State {
    let found = LIFECYCLE.iter().find(|(state, on, _)| (*state, *on) == (from, event));
    let Some((_, _, to)) = found else { panic!("an entry that is {from:?} met {event:?}") };
    *to
}

#[cfg(test)]
mod tests;
