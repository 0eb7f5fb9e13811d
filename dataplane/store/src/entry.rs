//! Metadata of each object: one cache line per entry, in an arena ([`Entries`]) reserved at start.
//!
//! An entry lives from reservation to the release of its last byte ([`LIFECYCLE`]):
//!
//! * `Reserved`: a writer fills its bytes; it is invisible.
//! * `Quarantined`: the put failed, but its writer may still be writing: the bytes are not reused.
//! * `Live`: in the index and in the eviction order; the bytes never change again.
//! * `Doomed`: removed while pinned; invisible; its bytes stay until the last pin is released.
//!
//! The index from digests to entries is [`crate::index`]; the eviction order is [`crate::eviction`], whose links are
//! kept in the entries.

mod arena;
mod marks;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::message::ObjectPriority;

use crate::allocator::{Block, GRANULE_BYTES, MemoryKind, granules_of};
pub use arena::{Entries, LiveUse};
pub use marks::{Copies, Mark, Replica};

/// Link to no entry.
pub(crate) const NONE: u32 = u32::MAX;

/// Index in the arena. Never leaves the store: handles given out carry a generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct EntryId(pub u32);

/// State of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Unused.
    Vacant,
    /// Being written.
    Reserved,
    /// Aborted, but perhaps still being written.
    Quarantined,
    /// Visible.
    Live,
    /// Removed, but still being read.
    Doomed,
}

/// Number of states.
pub const STATES: usize = 5;

/// Transition of an entry.
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
    /// The bytes are freed.
    Release,
}

/// Every permitted transition; any other is a bug.
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

/// List of the eviction policy that an entry is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EvictionList {
    Nowhere,
    Probation,
    ProbationParked,
    Protected,
    ProtectedParked,
    SoftPinned,
    SoftPinnedParked,
}

impl EvictionList {
    /// Every list, in the order of their numbers.
    const ALL: [Self; 7] = [
        Self::Nowhere,
        Self::Probation,
        Self::ProbationParked,
        Self::Protected,
        Self::ProtectedParked,
        Self::SoftPinned,
        Self::SoftPinnedParked,
    ];
}

/// Entry of one object. The size is kept in 35 bits (pools end at 1 TiB, objects long before), so that the entry fills
/// one cache line.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct Entry {
    digest: [u64; 2],
    version: u64,
    checksum: u64,
    /// Clock of the policy when the entry was put at a segment's recent end.
    pub(crate) stamp: u64,
    bytes_low: u32,
    block: Block,
    pub(crate) before: u32,
    pub(crate) after: u32,
    /// Number of pins, below [`ACCOUNT_AT`], and the account of the object from there on.
    pins: u32,
    /// Size above its lower 32 bits, and marks in the highest five bits.
    bytes_high: u8,
    /// State, below [`MARKS_AT`], and marks from there on.
    incarnation: u8,
    /// List that it is in: three bits. Above them, four bits of its priority, and [`UNCHECKED`].
    place: u8,
    /// Unit in which space is taken, as a power of two of granules: three bits. Above them, the granules that the tail
    /// takes beyond those of the bytes.
    space: u8,
}

/// Bit of `pins` where the account begins.
const ACCOUNT_AT: u32 = 20;
/// Most pins that an entry counts.
pub(crate) const PINS_MOST: u32 = (1 << ACCOUNT_AT) - 1;
/// Number of accounts that entries can distinguish.
pub const ACCOUNTS: usize = 1 << (u32::BITS - ACCOUNT_AT);
/// Largest size of an object.
pub(crate) const BYTES_MOST: u64 = (1 << 35) - 1;
/// Bits of `bytes_high` that are marks.
const HIGH_MARKS: u8 = 0xf8;
/// Bit of `incarnation` where marks begin.
const MARKS_AT: u32 = 3;
/// Bits of `place` that hold the list.
const LIST_BITS: u32 = 3;
/// Bits of `place` that hold the priority.
const PRIORITY_BITS: u8 = 0xf << LIST_BITS;
/// Bit of `place`: the bytes are of a former process, and were not compared with the checksum yet.
const UNCHECKED: u8 = 1 << 7;
const _: () = assert!(UNCHECKED & (PRIORITY_BITS | ((1 << LIST_BITS) - 1)) == 0);
/// Bits of `space` that hold the unit.
const UNIT_BITS: u32 = 3;

/// Object for which an entry is reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserve {
    /// Digest of the object.
    pub digest: Digest,
    /// Size of the object.
    pub bytes: u64,
    /// Length of its tail: at most [`TAIL_BYTES_MOST`].
    pub tail_bytes: u32,
    /// True if its tail is present when it is committed.
    pub has_tail: bool,
    /// True if it replaces an existing object of the digest.
    pub replace: bool,
    /// Account, group and pins.
    pub keep: Keep,
    /// True if it is a stripe head.
    pub head: bool,
    /// Replication of the object.
    pub replica: Replica,
    /// Its replicas, if it is replicated.
    pub copies: Copies,
    /// True for an import from another owner: the object is stored already, so that neither the lease of its tenant nor
    /// a limit of pins refuses it.
    pub moves: bool,
}

/// Account of an object, and how it is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Keep {
    /// Account that it is charged to, by its index in the store's table.
    pub account: u16,
    /// Group that it belongs to; 0 for none.
    pub group: u64,
    /// Duration of its soft pin, from the commit; 0 for none.
    pub soft_pin_ns: u64,
    /// True if it is never evicted.
    pub hard_pin: bool,
    /// Rank among the objects of its account.
    pub priority: ObjectPriority,
}

impl Reserve {
    /// Returns a reservation of this many bytes with default options.
    #[must_use]
    pub const fn plain(digest: Digest, bytes: u64) -> Self {
        Self {
            digest,
            bytes,
            tail_bytes: 0,
            has_tail: false,
            replace: false,
            keep: Keep { account: 0, group: 0, soft_pin_ns: 0, hard_pin: false, priority: ObjectPriority::NORMAL },
            head: false,
            replica: Replica::None,
            copies: Copies::ONE,
            moves: false,
        }
    }

    /// Returns the granules that its tail takes beyond those of its bytes.
    const fn extra_granules(&self) -> u64 {
        granules_of(self.bytes + self.tail_bytes as u64) - granules_of(self.bytes)
    }
}

/// Length of the longest tail.
pub const TAIL_BYTES_MOST: u32 = 31 * GRANULE_BYTES as u32;

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// Returns the object's digest.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        Digest((self.digest[1] as u128) << 64 | self.digest[0] as u128)
    }

    /// Returns the version that its commit assigned.
    #[must_use]
    pub const fn version(&self) -> Version {
        Version(self.version)
    }

    /// Returns the checksum that its writer stated.
    #[must_use]
    pub const fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Returns the object's exact size.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        ((self.bytes_high & !HIGH_MARKS) as u64) << 32 | self.bytes_low as u64
    }

    /// Returns the space that it takes in the pool.
    #[must_use]
    pub const fn granules(&self) -> u64 {
        let granules = granules_of(self.bytes()) + (self.space >> UNIT_BITS) as u64;
        granules.next_multiple_of(1 << (self.space & ((1 << UNIT_BITS) - 1)))
    }

    /// Returns the number of its pins.
    #[must_use]
    pub const fn pins(&self) -> u32 {
        self.pins & PINS_MOST
    }

    /// Returns true if a mark is set.
    #[must_use]
    pub const fn is(&self, mark: Mark) -> bool {
        match mark.high() {
            Some(bit) => self.bytes_high & bit != 0,
            None => self.incarnation & (mark as u8) << MARKS_AT != 0,
        }
    }

    /// Returns true if its commit replaces an object of the digest.
    #[must_use]
    pub const fn replaces(&self) -> bool {
        self.is(Mark::Replace)
    }

    /// Returns its role in replication.
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

    /// Returns the account that it is charged to.
    #[must_use]
    pub const fn account(&self) -> usize {
        (self.pins >> ACCOUNT_AT) as usize
    }

    /// Returns the list of the eviction order that it is in.
    pub(crate) const fn place(&self) -> EvictionList {
        EvictionList::ALL[(self.place & ((1 << LIST_BITS) - 1)) as usize]
    }

    pub(crate) const fn set_place(&mut self, list: EvictionList) {
        self.place = self.place >> LIST_BITS << LIST_BITS | list as u8;
    }

    /// Returns its priority.
    #[must_use]
    pub const fn priority(&self) -> ObjectPriority {
        ObjectPriority::from_nibble((self.place & PRIORITY_BITS) >> LIST_BITS)
    }

    const fn set_priority(&mut self, priority: ObjectPriority) {
        self.place = priority.nibble() << LIST_BITS | self.place & !PRIORITY_BITS;
    }

    /// Returns true if its bytes are of a former process, and were not compared with its checksum yet.
    #[must_use]
    pub const fn is_unchecked(&self) -> bool {
        self.place & UNCHECKED != 0
    }

    /// Returns the granules that its tail takes beyond those of its bytes.
    pub(crate) const fn extra_granules(&self) -> u8 {
        self.space >> UNIT_BITS
    }

    fn take_step(&mut self, event: Event) {
        let marks = self.incarnation >> MARKS_AT << MARKS_AT;
        self.incarnation = marks | step(self.state(), event) as u8;
    }

    /// Returns its state.
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

    /// Returns true if it is visible.
    #[must_use]
    pub const fn is_live(&self) -> bool {
        matches!(self.state(), State::Live)
    }

    /// Returns its block.
    #[must_use]
    pub const fn block(&self) -> Block {
        self.block
    }

    /// Returns true if its bytes are in the device pool.
    #[must_use]
    pub const fn is_on_device(&self) -> bool {
        matches!(self.memory(), MemoryKind::Device)
    }

    /// Returns the kind of memory that its bytes are in.
    #[must_use]
    #[inline]
    pub const fn memory(&self) -> MemoryKind {
        self.block.kind()
    }

    /// Returns true if it may move to the device pool: nothing but the eviction policy keeps it in memory, and it does
    /// not lack its first replica, which is sent from there. For further ones it is recalled.
    pub(crate) fn may_be_promoted(&self) -> bool {
        let is_kept = [Mark::Soft, Mark::Hard, Mark::Grouped].into_iter().any(|mark| self.is(mark));
        let lacks_replica = self.replica().is_owed_a_copy() && !self.is(Mark::Copied);
        !is_kept && !lacks_replica && !self.is_on_device()
    }

    /// Returns true if the eviction policy ranks it among those that were accessed again.
    pub(crate) const fn is_protected(&self) -> bool {
        matches!(self.place(), EvictionList::Protected | EvictionList::ProtectedParked)
    }

    /// Returns true if its bytes cannot be evicted: they are being read or written, or pinned.
    #[must_use]
    pub const fn is_stuck(&self) -> bool {
        match self.state() {
            State::Vacant => false,
            State::Reserved | State::Quarantined | State::Doomed => true,
            State::Live => self.pins() > 0 || self.is(Mark::Hard),
        }
    }

    /// Returns true if it may be evicted.
    #[must_use]
    pub fn is_evictable(&self) -> bool {
        self.is_live() && self.pins() == 0 && !self.is(Mark::Hard)
    }
}

/// Returns the state after `event`.
fn step(from: State, event: Event) -> State {
    let found = LIFECYCLE.iter().find(|(state, on, _)| (*state, *on) == (from, event));
    let Some((_, _, to)) = found else { panic!("an entry that is {from:?} met {event:?}") };
    *to
}

#[cfg(test)]
mod tests;
