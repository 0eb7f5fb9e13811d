//! Removals from the SSD: of what is removed, of what a put replaces, known or not, and of what is void.
//!
//! A removal is answered when the tier has written that it happened. Until it is written it hides the object.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};
use kvplane_tier::{Ack, Memory, Removal, RemoveError, Tier, Token};

use super::Ssd;
use crate::service::shard::Shard;
use crate::service::shard::deferrals::{DeferredItem, Replies};

/// The most removals that wait to be written.
const REMOVALS_MOST: usize = 65_536;

/// The reason for which the SSD is to remove an object, and the answer that waits for it.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum Strike {
    /// A peer removes it.
    Asked(DeferredItem),
    /// Its slot went to another owner, or others changed it there.
    Swept,
    /// It was replaced by this version.
    Replaced { digest: Digest, version: Version, told: Option<DeferredItem> },
}

/// Removals that wait to be given to the tier, and those that it has.
#[derive(Debug, Default)]
pub(in crate::service) struct Removals {
    queue: VecDeque<(Digest, Strike)>,
    /// Objects whose removal waits to be given to the tier.
    waiting: BTreeSet<Digest>,
    calls: BTreeMap<u64, Strike>,
}

impl Removals {
    /// True while the removal of an object waits to be given to the tier.
    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        self.waiting.contains(&digest)
    }

    /// Removals that wait.
    pub(in crate::service::tiering) fn len(&self) -> usize {
        self.queue.len()
    }

    /// True where none waits and none is in flight.
    pub(in crate::service::tiering) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.calls.is_empty()
    }

    pub(in crate::service::tiering) fn add(&mut self, digest: Digest, strike: Strike) {
        self.queue.push_back((digest, strike));
        self.waiting.insert(digest);
    }
}

impl Ssd {
    /// A check that the SSD can strike out what a put, `replacing` or not, may have to have struck out.
    pub(in crate::service) fn may_strike(&self, digest: Digest, replacing: bool) -> Result<(), Status> {
        let strikes = replacing || may_stand(&self.tier, digest);
        let is_full = strikes && self.removals.len() >= REMOVALS_MOST;
        let takes_none = self.is_degraded();
        // What it takes no tombstone for has to be known first.
        let is_late = !replacing && takes_none && self.tier.is_recovering();
        if is_full || is_late {
            return Err(Status::Busy);
        }
        // What is there can be neither struck out nor replaced: the put is refused before memory gives up what it has.
        if replacing && takes_none && self.tier.may_have(digest) { Err(Status::NoSpace) } else { Ok(()) }
    }

    /// True where the SSD may have, or bring back later, what an object that was put, `replacing` or not, takes the
    /// place of: perhaps without that anybody knew, as while it recovers.
    pub(in crate::service) fn must_strike(&self, digest: Digest, replacing: bool) -> bool {
        match self.tier.degraded() {
            // What is hidden, and what came to light while the put was in flight, is struck out too.
            None => replacing || may_stand(&self.tier, digest),
            // One that takes no writes strikes nothing out: what it has, or may have, stands in the way.
            Some(_) => replacing && self.tier.may_have(digest),
        }
    }

    /// Has an object removed, and hides it until then.
    pub(in crate::service) fn queue_removal(&mut self, digest: Digest, strike: Strike) {
        self.removals.add(digest, strike);
    }

    /// A check that so many removals more may wait.
    pub(in crate::service) fn may_remove(&self, removals: usize) -> Result<(), Status> {
        if self.removals.len() + removals > REMOVALS_MOST { Err(Status::Busy) } else { Ok(()) }
    }

    /// Removes objects; an item of an answer is settled with each that is gone for good.
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

    /// Gives the tier the removals that wait, as far as it takes them. True where there was anything to do.
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

    /// The tier has written a removal, or cannot.
    pub(in crate::service::tiering) fn removed(&mut self, shard: &mut Shard, token: Token, is_written: bool) {
        self.counters.removals_unwritten += u64::from(!is_written);
        if let Some(strike) = self.removals.calls.remove(&token.0) {
            self.end_removal(shard, strike, is_written);
        }
    }

    /// A removal that is not on the SSD may be undone by a restart: the answer that waits for it says so.
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
                    // The former version is on the SSD still, so this one does not take its place.
                    shard.drop_version(digest, version);
                    self.tell_of(shard, digest);
                }
                told.into_iter().for_each(|item| shard.refuse_put(item, Status::NoSpace));
            }
        }
    }
}

/// True where the SSD has a record of this digest, shown or hidden, or may bring one to light.
fn may_stand(tier: &Tier, digest: Digest) -> bool {
    tier.may_find(digest) || tier.locate(digest).is_some()
}
