//! The SSD of a shard: which of its records may be given, and what all that use it share.

mod doubts;
mod removals;
mod sweep;

use kvplane_proto::Digest;
use kvplane_proto::ids::Slot;
use kvplane_proto::message::PutAck;
use kvplane_tier::{RecordView, Tier, Token};

use self::doubts::Doubts;
use self::removals::Removals;
pub(in crate::service) use self::removals::Strike;
use self::sweep::Sweep;
use super::counters::TierCounters;
use super::policy::{Frequency, TierPolicy};
use crate::events::{Change, Medium};
use crate::service::shard::Shard;

/// The tier of a shard, what of it may be given, and what is removed from it.
#[derive(Debug)]
pub(in crate::service) struct Ssd {
    pub(super) tier: Tier,
    pub(super) policy: TierPolicy,
    /// How often each object was put or asked for lately.
    pub(super) frequency: Frequency,
    pub(super) removals: Removals,
    /// Slots that went to other owners.
    pub(super) sweep: Sweep,
    /// Slots that may have been others' in between.
    pub(super) doubts: Doubts,
    pub(super) counters: TierCounters,
    tokens: u64,
}

impl Ssd {
    pub(super) fn new(tier: Tier, policy: TierPolicy) -> Self {
        Self {
            tier,
            policy,
            frequency: Frequency::new(),
            removals: Removals::default(),
            sweep: Sweep::new(),
            doubts: Doubts::new(),
            counters: TierCounters::default(),
            tokens: 0,
        }
    }

    /// A token that no call of the tier had so far.
    pub(super) const fn new_token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    /// What the SSD has of an object that may be given.
    pub(in crate::service) fn locate(&self, digest: Digest) -> Option<RecordView> {
        let view = self.tier.locate(digest)?;
        (!self.is_hidden(&view)).then_some(view)
    }

    /// True for an object on the SSD that may not be given: it is on its way out, or its slot is or was another's.
    fn is_hidden(&self, view: &RecordView) -> bool {
        self.removals.has(view.digest) || self.sweep.hides(view) || self.doubts.hides(view)
    }

    /// Some of what the SSD has and may be given: looks at so many places of the index. Then where to go on.
    pub(in crate::service) fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let (views, next) = self.tier.walk(from, most);
        (views.into_iter().filter(|view| !self.is_hidden(view)).collect(), next)
    }

    /// What the SSD has of a piece of the order of lists and may give.
    pub(in crate::service) fn between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        // As `locate` does, of what is looked at anyway.
        self.tier.between(from, to).filter(|view| !self.is_hidden(view))
    }

    /// How many places the index has.
    pub(in crate::service) fn places(&self) -> usize {
        self.tier.places()
    }

    /// Where in the order of lists an object is.
    pub(in crate::service) fn point_of(&self, digest: Digest) -> u32 {
        self.tier.point_of(digest)
    }

    /// True once every record has been looked at.
    pub(in crate::service) fn is_recovered(&self) -> bool {
        self.tier.is_recovered()
    }

    /// True while the SSD still finds what it has, as after a start.
    pub(in crate::service) fn is_recovering(&self) -> bool {
        self.tier.is_recovering()
    }

    /// True for a slot that is in doubt, or was until a map gave it to this shard.
    pub(in crate::service) fn is_doubted(&self, slot: Slot) -> bool {
        self.doubts.has(slot)
    }

    /// True where anything of slots that are served is hidden that may yet be shown.
    pub(in crate::service) fn is_comparing(&self) -> bool {
        self.doubts.are_compared()
    }

    /// True where the SSD takes no writes any more.
    pub(in crate::service) fn is_degraded(&self) -> bool {
        self.tier.degraded().is_some()
    }

    /// True where an object of so many bytes fits a record.
    pub(super) fn takes(&self, bytes: u64) -> bool {
        bytes <= u64::from(self.tier.config().max_object_bytes)
    }

    /// True where the SSD takes an object of so many bytes.
    pub(in crate::service) fn fits(&self, bytes: u64) -> bool {
        self.takes(bytes) && !self.is_degraded()
    }

    /// True where the answer of a put waits for the SSD.
    pub(super) fn is_awaited(&self, asked: Option<PutAck>) -> bool {
        self.policy.ack_of(asked) != PutAck::Memory
    }

    /// Something happened to what the SSD has of an object: tells subscribers what there is now, whatever it was.
    pub(super) fn tell_of(&self, shard: &mut Shard, digest: Digest) {
        let Some(store) = shard.store.as_mut().filter(|store| store.events.is_kept()) else { return };
        match self.locate(digest) {
            Some(view) => store.events.push(Change::Stored, Medium::Ssd, digest, view.payload_bytes.into()),
            None => store.events.push(Change::Removed, Medium::Ssd, digest, 0),
        }
    }
}

/// What the SSD has is known anew: what subscribers know of it does not hold any more.
pub(super) fn break_off_events(shard: &mut Shard) {
    if let Some(store) = &mut shard.store
        && store.events.is_kept()
    {
        store.events.break_off();
    }
}
