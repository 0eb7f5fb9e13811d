//! Memory and SSD together: what is put is written to the shard's [`Tier`], what memory has not is read from it.
//!
//! * A get of an object on the SSD is the same call: room is made in the pool, the object read into it and checked, and
//!   the answer sent from there. Several gets of one object share one read. Whether it then stays in memory is the
//!   policy's decision.
//! * An object that is to be written is pinned until it is, so eviction never drops what should have been written. What
//!   waits is bounded by a part of the pool.
//! * A removal is answered when the tier has written that it happened. Until it is written it hides the object.
//! * Slots that went to another owner take their objects along: what the SSD has of them is hidden at once and removed
//!   bit by bit.
//!
//! The host gives memory and time with [`Service::drive_tier`] and carries out the block operations. Not here: what
//! stands on the device, which is the tier's.

mod admit;
mod again;
mod budget;
mod doubt;
mod moved;
mod names;
mod orders;
mod ownership;
mod policy;
mod prefetch;
mod reads;
mod stats;
mod strikes;
mod sweep;
mod tails;
mod writes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::PutAck;
use kvplane_tier::{BlockOp, Event, Fault, Memory, OpId, Output, RecordView, RecoveryReport, Tier, Token};

use super::deferred::Slot;
use super::{Service, Timing};
pub use budget::Admission;
pub use orders::TierOrder;
pub use ownership::VoidCause;
pub use policy::{TierPolicy, WritePolicy};
pub use stats::{TierCounters, TierSnapshot};

pub(super) use moved::MoveProgress;
pub(super) use reads::{NotBegun, Waiter};

use again::Retries;
use budget::Budget;
use doubt::Doubts;
use ownership::OwnershipNotes;
use policy::Frequency;
use prefetch::PrefetchAccount;
use sweep::Sweep;

/// The most removals that wait to be written.
const REMOVALS_MOST: usize = 65_536;
/// Bytes that are given to the tier in one round: their checksums take time, in which nobody else is served and the
/// device does not know of them.
const ROUND_BYTES: u64 = 1 << 20;

/// An object that is pinned until it is written.
#[derive(Clone, Copy, Debug)]
struct DirtyObject {
    pin: PinId,
    digest: Digest,
    version: Version,
    bytes: u64,
    /// The account that it is charged to.
    account: u16,
    since_ns: u64,
    /// Who waits for it.
    told: Option<Slot>,
    /// What its put asked for.
    ack: Option<PutAck>,
    /// The promise of a second copy in its record, once that was given to the tier.
    copied: bool,
    /// How often its write was tried again.
    tries: u8,
}

/// What the tier was asked for.
#[derive(Debug)]
enum Call {
    /// `lent` and `unwritten` say what is still to be told.
    Write {
        held: DirtyObject,
        lent: bool,
        unwritten: bool,
        failed: bool,
    },
    Read {
        digest: Digest,
        version: Version,
        reservation: ReservationId,
        waiters: Vec<(Waiter, Timing)>,
    },
    Remove {
        strike: Strike,
    },
    Name {
        list: u64,
        at: usize,
        version: Version,
    },
    Tail {
        digest: Digest,
        version: Version,
        pin: PinId,
    },
    Claim {
        digest: Digest,
    },
}

/// Why the SSD is to remove an object, and who waits for it.
#[derive(Clone, Copy, Debug)]
enum Strike {
    /// Somebody asked for it.
    Asked(Slot),
    /// Its slot went to another owner.
    Swept,
    /// It was replaced by this version.
    Replaced { digest: Digest, version: Version, told: Option<Slot> },
}

/// The tier of a shard and what is under way between it and memory.
#[derive(Debug)]
pub(super) struct Tiering {
    tier: Tier,
    policy: TierPolicy,
    backlog_most_bytes: u64,
    backlog_most: usize,
    frequency: Frequency,
    next_call: u64,
    calls: BTreeMap<u64, Call>,
    /// The read under way of each object.
    reading: BTreeMap<Digest, u64>,
    /// Who waits for a read to be begun: the tier has as many as it takes.
    queued: VecDeque<(Digest, Waiter, Timing)>,
    /// Objects in memory whose tails are to be read.
    tails: VecDeque<(Digest, Version)>,
    removals: VecDeque<(Digest, Strike)>,
    /// Objects whose removal waits to be given to the tier.
    removing: BTreeSet<Digest>,
    /// Objects that may wait for a while.
    dirty: VecDeque<DirtyObject>,
    writes: VecDeque<DirtyObject>,
    /// Objects whose write failed.
    retries: Retries,
    /// Objects that are dirty, waiting, being written or to be written again.
    writing: BTreeSet<(Digest, Version)>,
    /// A put found no room: what may wait for a while does not.
    pressed: bool,
    /// Pins held for writes, and their bytes.
    held: usize,
    held_bytes: u64,
    /// Copies in memory that are objects of our own now, and that nobody has written here.
    inherited: VecDeque<Digest>,
    /// How many of them are of each account.
    held_of: BTreeMap<u16, u32>,
    sweep: Sweep,
    doubts: Doubts,
    noted: OwnershipNotes,
    prefetched: PrefetchAccount,
    /// Objects that are read to be copied to their second owners.
    copied_next: BTreeSet<Digest>,
    budget: Budget,
    /// What of the tier's writes was charged.
    charged_bytes: u64,
    told_admission: Admission,
    /// With so many records that are not whole, the operator is told.
    harm_to_tell: u64,
    recovered: Option<RecoveryReport>,
    /// Nothing waits any longer than it must.
    closing: bool,
    notices: VecDeque<Event>,
    counters: TierCounters,
}

impl Tiering {
    fn new(tier: Tier, policy: TierPolicy, pool_bytes: u64, max_pins: u32) -> Self {
        Self {
            tier,
            backlog_most_bytes: pool_bytes / 100 * u64::from(policy.backlog_percent),
            // The other half is for readers.
            backlog_most: max_pins as usize / 2,
            policy,
            frequency: Frequency::new(),
            next_call: 0,
            calls: BTreeMap::new(),
            reading: BTreeMap::new(),
            queued: VecDeque::new(),
            tails: VecDeque::new(),
            removals: VecDeque::new(),
            removing: BTreeSet::new(),
            dirty: VecDeque::new(),
            writes: VecDeque::new(),
            retries: Retries::default(),
            writing: BTreeSet::new(),
            pressed: false,
            held: 0,
            held_bytes: 0,
            inherited: VecDeque::new(),
            held_of: BTreeMap::new(),
            sweep: Sweep::new(),
            doubts: Doubts::new(),
            noted: OwnershipNotes::new(),
            prefetched: PrefetchAccount::new(pool_bytes / 100 * u64::from(policy.prefetch_percent)),
            copied_next: BTreeSet::new(),
            budget: Budget::new(policy.bytes_per_day),
            charged_bytes: 0,
            told_admission: Admission::Full,
            harm_to_tell: 1,
            recovered: None,
            closing: false,
            notices: VecDeque::new(),
            counters: TierCounters::default(),
        }
    }

    /// What the SSD has of an object that may be given.
    pub(super) fn locate(&self, digest: Digest) -> Option<RecordView> {
        let view = self.tier.locate(digest)?;
        (!self.is_hidden(&view)).then_some(view)
    }

    /// Whether an object on the SSD may not be given: it is on its way out, or its slot is or was another's.
    fn is_hidden(&self, view: &RecordView) -> bool {
        self.removing.contains(&view.digest) || self.sweep.hides(view) || self.doubts.hides(view)
    }

    /// Some of what the SSD has and may be given: looks at so many places of the index. Then where to go on.
    pub(super) fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let (views, next) = self.tier.walk(from, most);
        (views.into_iter().filter(|view| !self.is_hidden(view)).collect(), next)
    }

    /// Whether every record on the SSD has been looked at.
    pub(super) fn is_recovered(&self) -> bool {
        self.tier.is_recovered()
    }

    /// Objects that are being read to be copied.
    pub(super) fn copies_read(&self) -> usize {
        self.copied_next.len()
    }

    fn call(&mut self, call: Call) -> Token {
        self.next_call += 1;
        self.calls.insert(self.next_call, call);
        Token(self.next_call)
    }

    /// When the next thing is to happen by itself.
    fn poll_timeout(&self) -> Option<u64> {
        let dirty = match self.policy.write {
            WritePolicy::Back { within_ns } => self.dirty.front().map(|held| held.since_ns.saturating_add(within_ns)),
            _ => None,
        };
        let retries = self.retries.poll_timeout();
        [self.tier.poll_timeout(), dirty, retries, self.prefetched.poll_timeout()].into_iter().flatten().min()
    }
}

impl Service {
    /// Gives the shard a tier. Its store's objects must begin at multiples of the tier's alignment.
    ///
    /// # Panics
    /// When it has no store, or one whose units do not suit direct I/O: a mistake of the host's.
    pub fn attach_tier(&mut self, mut tier: Tier, policy: TierPolicy) {
        let store = self.store.as_ref().expect("a tier is under a store");
        let (unit, align) = (store.config().unit_bytes, u64::from(tier.config().memory_align_bytes));
        assert!(unit.is_multiple_of(align), "objects at multiples of {unit} for a tier that wants {align}");
        let (seed, other) = (store.config().hash_seed, tier.config().hash_seed);
        assert!(seed == other, "lists walk both indexes in one order, but their seeds differ");
        tier.set_scrub(policy.scrub_bytes_per_s);
        self.tiered = Some(Box::new(Tiering::new(tier, policy, store.config().pool_bytes, store.config().max_pins)));
    }

    /// Lets the tier work: gives it what waits, and `start` what the device is to do. Whether there was anything.
    pub fn drive_tier(&mut self, now_ns: u64, memory: &mut dyn Memory, start: &mut dyn FnMut(BlockOp)) -> bool {
        if self.tiered.is_none() {
            return false;
        }
        self.now_ns = now_ns;
        self.charge_budget();
        self.expire_prefetched();
        let mut progress = self.sweep_tier();
        progress |= self.resolve_work();
        progress |= self.note_work(memory);
        progress |= self.give_removals(memory);
        progress |= self.give_writes(memory);
        progress |= self.read_claimed();
        progress |= self.read_tails();
        while let Some(tiered) = &mut self.tiered
            && let Some(output) = tiered.tier.poll_output(now_ns, memory)
        {
            progress = true;
            match output {
                Output::Block(op) => start(op),
                Output::Event(event) => self.tier_event(event, memory),
            }
        }
        progress |= self.begin_queued();
        // The tier may have made room by itself just now, without anything to be told: who waits for it has no other
        // occasion.
        progress || self.give_removals(memory) | self.give_writes(memory)
    }

    /// A block operation is over.
    pub fn tier_completed(&mut self, now_ns: u64, id: OpId, result: Result<u32, Fault>, memory: &mut dyn Memory) {
        if let Some(tiered) = &mut self.tiered {
            tiered.tier.complete(now_ns, id, result, memory);
        }
    }

    /// Something that the operator should know: the device was opened or refused, recovery is over, writes stopped.
    pub fn poll_tier_notice(&mut self) -> Option<Event> {
        self.tiered.as_mut()?.notices.pop_front()
    }

    /// Writes what may wait, as the shard is about to end. Whether all is written.
    pub fn close_tier(&mut self) -> bool {
        let Some(tiered) = &mut self.tiered else { return true };
        tiered.closing = true;
        // Reads go on being of use to nobody; recovery begins anew.
        let under_way = tiered.calls.values().any(|call| {
            !matches!(call, Call::Read { .. } | Call::Tail { .. } | Call::Name { .. } | Call::Claim { .. })
        });
        tiered.tier.degraded().is_some() || tiered.held == 0 && tiered.removals.is_empty() && !under_way
    }

    pub(super) fn tier_timeout(&self) -> Option<u64> {
        self.tiered.as_ref()?.poll_timeout()
    }

    fn tier_event(&mut self, event: Event, memory: &mut dyn Memory) {
        let Some(tiered) = &mut self.tiered else { return };
        match event {
            Event::Opened { .. } | Event::Refused(_) | Event::Degraded(_) => tiered.notices.push_back(event),
            Event::OwnershipNoted => self.noted(),
            Event::Recovered(report) => {
                tiered.recovered = Some(report);
                tiered.notices.push_back(event);
                self.ssd_known_anew();
                self.walk_ssd_again();
            }
            Event::Stored { token, .. } => self.written(token, true),
            Event::StoreFailed { token, .. } => self.written(token, false),
            Event::Released { token } => self.released(token),
            Event::Got { token, version, checksum } => self.read_done(token, Some((version, checksum))),
            Event::Key { token, version } => self.key_read(token, version, memory),
            Event::Missed { token, .. } => self.missed(token, memory),
            Event::Removed { token } => self.removal_done(token, true),
            Event::RemoveFailed { token, .. } => {
                tiered.counters.removals_unwritten += 1;
                self.removal_done(token, false);
            }
            Event::Quarantined { digest, miss } => {
                self.tell_of_ssd(digest);
                self.quarantined(digest, miss);
            }
            Event::Evicted { digest, .. } => {
                tiered.counters.reclaimed += 1;
                self.tell_of_ssd(digest);
            }
            Event::Forgotten { objects } => {
                tiered.counters.reclaimed += u64::from(objects);
                self.ssd_known_anew();
            }
        }
    }

    /// Whether the SSD has an object that may be given.
    pub(super) fn on_ssd(&self, digest: Digest) -> Option<RecordView> {
        self.tiered.as_ref()?.locate(digest)
    }
}
