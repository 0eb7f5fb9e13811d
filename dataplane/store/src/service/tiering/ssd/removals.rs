//! Removals from the SSD: of objects that are removed, of records that a put replaces, known or not, and of void
//! records.
//!
//! A removal is answered when the tier has written it. Until then it hides the object.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};
use kvplane_tier::{Ack, Memory, Removal, RemoveError, Tier, Token};

use super::Ssd;
use crate::service::shard::Shard;
use crate::service::shard::deferrals::{DeferredItem, Replies};

/// Most removals that wait to be written.
const REMOVALS_MOST: usize = 65_536;

/// Reason for a removal, and the reply that waits for it.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum Strike {
    /// A peer removes the object.
    Asked(DeferredItem),
    /// The object's slot went to another owner, or other owners changed the object there.
    Swept,
    /// The object was replaced by this version.
    Replaced { digest: Digest, version: Version, told: Option<DeferredItem> },
}

/// Removals that wait to be passed to the tier, and those in flight there.
#[derive(Debug, Default)]
pub(in crate::service) struct Removals {
    queue: VecDeque<(Digest, Strike)>,
    /// Objects whose removals wait to be passed to the tier.
    waiting: BTreeSet<Digest>,
    calls: BTreeMap<u64, Strike>,
}

impl Removals {
    /// Returns true while the removal of an object waits to be passed to the tier.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        self.waiting.contains(&digest)
    }

    /// Returns the number of waiting removals.
    pub(in crate::service::tiering) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if no removal waits or is in flight.
    pub(in crate::service::tiering) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.calls.is_empty()
    }

    pub(in crate::service::tiering) fn add(&mut self, digest: Digest, strike: Strike) {
        self.queue.push_back((digest, strike));
        self.waiting.insert(digest);
    }
}

impl Ssd {
    /// Checks that the SSD can take the tombstones that a put, `replacing` or not, may need.
    pub(in crate::service) fn may_strike(&self, digest: Digest, replacing: bool) -> Result<(), Status> {
        let strikes = replacing || may_stand(&self.tier, digest);
        let is_full = strikes && self.removals.len() >= REMOVALS_MOST;
        let takes_none = self.is_degraded();
        // A degraded tier takes no tombstones, so that recovery has to find its records before a put can be decided.
        let is_late = !replacing && takes_none && self.tier.is_recovering();
        if is_full || is_late {
            return Err(Status::Busy);
        }
        // The record can be neither removed nor replaced: the put is refused before memory loses the object that it
        // has.
        if replacing && takes_none && self.tier.may_have(digest) { Err(Status::NoSpace) } else { Ok(()) }
    }

    /// Returns true if the SSD has, or may yet recover, a record that an object that was put, `replacing` or not, takes
    /// the place of. Such a record may be unknown, as during recovery.
    pub(in crate::service) fn must_strike(&self, digest: Digest, replacing: bool) -> bool {
        match self.tier.degraded() {
            // Also removes hidden records, and those that recovery found while the put was in flight.
            None => replacing || may_stand(&self.tier, digest),
            // A degraded tier takes no tombstones: records that it has, or may have, are in the way.
            Some(_) => replacing && self.tier.may_have(digest),
        }
    }

    /// Enqueues the removal of an object, and hides the object until it is written.
    pub(in crate::service) fn queue_removal(&mut self, digest: Digest, strike: Strike) {
        self.removals.add(digest, strike);
    }

    /// Checks that this many more removals may be enqueued.
    pub(in crate::service) fn may_remove(&self, removals: usize) -> Result<(), Status> {
        if self.removals.len() + removals > REMOVALS_MOST { Err(Status::Busy) } else { Ok(()) }
    }

    /// Removes objects; an item of a reply is settled with each removal that is written.
    pub(in crate::service) fn remove(
        &mut self,
        shard: &mut Shard,
        digests: &[Digest],
        answer: &impl Fn(usize) -> DeferredItem,
    ) {
        for (item, digest) in digests.iter().enumerate() {
            self.removals.add(*digest, Strike::Asked(answer(item)));
        }
        digests.iter().for_each(|digest| self.tell_of(shard, *digest));
    }

    /// Passes waiting removals to the tier, as far as it accepts them. Returns true if there was any progress.
    pub(in crate::service::tiering) fn give_removals(&mut self, shard: &mut Shard, memory: &mut dyn Memory) -> bool {
        let mut progress = false;
        while let Some((digest, strike)) = self.removals.queue.front().copied() {
            let ack = if self.policy.ack == PutAck::Durable { Ack::Durable } else { Ack::Buffered };
            let token = self.new_token();
            let taken = match strike {
                Strike::Replaced { .. } => self.tier.strike(shard.now_ns, digest, ack, token, memory),
                Strike::Asked(_) | Strike::Swept => self.tier.remove(shard.now_ns, digest, ack, token, memory),
            };
            if taken == Err(RemoveError::Busy) {
                break;
            }
            progress = true;
            self.removals.queue.pop_front();
            self.removals.waiting.remove(&digest);
            match taken {
                Ok(Removal::Pending) => {
                    self.counters.removals += 1;
                    self.removals.calls.insert(token.0, strike);
                }
                Ok(Removal::Absent) => self.end_removal(shard, strike, true),
                Err(_) => {
                    self.counters.removals_unwritten += 1;
                    self.end_removal(shard, strike, false);
                }
            }
        }
        progress
    }

    /// Handles the outcome of a removal in the tier.
    pub(in crate::service::tiering) fn removed(&mut self, shard: &mut Shard, token: Token, is_written: bool) {
        self.counters.removals_unwritten += u64::from(!is_written);
        if let Some(strike) = self.removals.calls.remove(&token.0) {
            self.end_removal(shard, strike, is_written);
        }
    }

    /// Ends a removal. One that is not on the SSD may be undone by a restart: the reply that waits for it fails.
    fn end_removal(&mut self, shard: &mut Shard, strike: Strike, is_written: bool) {
        match strike {
            Strike::Swept => self.sweep.waiting -= 1,
            Strike::Asked(item) => shard.settle(item, |replies, _| {
                if let (Replies::Bits(_, status), false) = (replies, is_written) {
                    *status = Status::NoSpace;
                }
            }),
            Strike::Replaced { told: Some(item), .. } if is_written => shard.settle(item, |_, _| {}),
            Strike::Replaced { digest, version, told } => {
                if !is_written {
                    // The former version is still on the SSD, so that this one cannot take its place.
                    shard.drop_version(digest, version);
                    self.tell_of(shard, digest);
                }
                told.into_iter().for_each(|item| shard.refuse_put(item, Status::NoSpace));
            }
        }
    }
}

/// Returns true if the SSD has a record of this digest, visible or hidden, or may yet recover one.
fn may_stand(tier: &Tier, digest: Digest) -> bool {
    tier.may_find(digest) || tier.locate(digest).is_some()
}
