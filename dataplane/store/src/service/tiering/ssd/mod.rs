//! SSD of a shard: the visibility of its records, and the state that its users share.

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

/// Tier of a shard, the visibility of its records, and removals from it.
#[derive(Debug)]
pub(in crate::service) struct Ssd {
    pub(super) tier: Tier,
    pub(super) policy: TierPolicy,
    /// Estimate of how often each object was put or read lately.
    pub(super) frequency: Frequency,
    pub(super) removals: Removals,
    /// Slots that went to other owners.
    pub(super) sweep: Sweep,
    /// Slots that may have had interim owners.
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

    /// Returns a token that no request to the tier has had so far.
    pub(super) const fn new_token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    /// Returns the record of an object, if it is visible.
    pub(in crate::service) fn locate(&self, digest: Digest) -> Option<RecordView> {
        let view = self.tier.locate(digest)?;
        (!self.is_hidden(&view)).then_some(view)
    }

    /// Returns true if a record is hidden: the object is being removed, or its slot belongs, or has belonged, to
    /// another owner.
    fn is_hidden(&self, view: &RecordView) -> bool {
        self.removals.has(view.digest) || self.sweep.hides(view) || self.doubts.hides(view)
    }

    /// Returns the visible records among `most` entries of the index from a position on, and the next position.
    pub(in crate::service) fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let (views, next) = self.tier.walk(from, most);
        (views.into_iter().filter(|view| !self.is_hidden(view)).collect(), next)
    }

    /// Returns the visible records of a range of the order of lists.
    pub(in crate::service) fn between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        // Same filter as `locate`, applied to entries already read.
        self.tier.between(from, to).filter(|view| !self.is_hidden(view))
    }

    /// Returns the number of entries of the index.
    pub(in crate::service) fn places(&self) -> usize {
        self.tier.places()
    }

    /// Returns the position of an object in the order of lists.
    pub(in crate::service) fn point_of(&self, digest: Digest) -> u32 {
        self.tier.point_of(digest)
    }

    /// Returns true once recovery has read every record.
    pub(in crate::service) fn is_recovered(&self) -> bool {
        self.tier.is_recovered()
    }

    /// Returns true while the SSD is in recovery after a start.
    pub(in crate::service) fn is_recovering(&self) -> bool {
        self.tier.is_recovering()
    }

    /// Returns true if a slot is in doubt, or was until a map assigned it to this shard.
    pub(in crate::service) fn is_doubted(&self, slot: Slot) -> bool {
        self.doubts.has(slot)
    }

    /// Returns true if records of served slots are hidden that reconciliation may yet make visible.
    pub(in crate::service) fn is_comparing(&self) -> bool {
        self.doubts.are_compared()
    }

    /// Returns true if the SSD is degraded: it takes no writes any more.
    pub(in crate::service) fn is_degraded(&self) -> bool {
        self.tier.degraded().is_some()
    }

    /// Returns true if an object of this length fits a record.
    pub(super) fn takes(&self, bytes: u64) -> bool {
        bytes <= u64::from(self.tier.config().max_object_bytes)
    }

    /// Returns true if the SSD accepts an object of this length now.
    pub(in crate::service) fn fits(&self, bytes: u64) -> bool {
        self.takes(bytes) && !self.is_degraded()
    }

    /// Returns true if the reply of a put waits for the SSD.
    pub(super) fn is_awaited(&self, asked: Option<PutAck>) -> bool {
        self.policy.ack_of(asked) != PutAck::Memory
    }

    /// Notifies subscribers of the present state of an object on the SSD.
    pub(super) fn tell_of(&self, shard: &mut Shard, digest: Digest) {
        let Some(store) = shard.store.as_mut().filter(|store| store.events().is_kept()) else { return };
        match self.locate(digest) {
            Some(view) => store.events_mut().push(Change::Stored, Medium::Ssd, digest, view.payload_bytes.into()),
            None => store.events_mut().push(Change::Removed, Medium::Ssd, digest, 0),
        }
    }
}

/// Notifies subscribers that the SSD's contents have changed as a whole, so that they start over.
pub(super) fn break_off_events(shard: &mut Shard) {
    if let Some(store) = &mut shard.store
        && store.events().is_kept()
    {
        store.events_mut().break_off();
    }
}
