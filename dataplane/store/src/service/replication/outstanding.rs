//! Outstanding removals of replicas: no request for their objects is acknowledged before they are carried out.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Slot, Version};
use kvplane_proto::map::ShardKey;

use crate::service::shard::deferrals::DeferredItem;

/// Most replicas of one removal request.
const DROPS: usize = 1024;
/// Number of outstanding removals from which whole slots are outstanding instead.
const OUTSTANDING_MOST: usize = 1 << 14;
/// Most replies that wait for one removal.
const WAITERS_MOST: usize = 1024;

/// Replicas of an object that have to be removed.
#[derive(Debug, Default)]
struct OutstandingRemoval {
    /// Replica owners that have to acknowledge the removal.
    drops: Vec<ReplicaDrop>,
    /// Time until which clients may read a replica at a former replica owner; 0 for none.
    lapses_ns: u64,
    waiters: Vec<(DeferredItem, u64)>,
}

/// Removal of a replica at one replica owner.
#[derive(Clone, Copy, Debug)]
struct ReplicaDrop {
    owner: ShardKey,
    /// Version that the replica is of, if it can be of no other one.
    version: Option<Version>,
    /// Token of the request in flight about it; 0 for none.
    asked: u64,
}

impl OutstandingRemoval {
    fn is_at(&self, owner: ShardKey) -> bool {
        self.drops.iter().any(|drop| drop.owner == owner)
    }

    fn add(&mut self, owner: ShardKey, version: Option<Version>) {
        match self.drops.iter_mut().find(|drop| drop.owner == owner) {
            Some(drop) => drop.version = drop.version.filter(|known| version == Some(*known)),
            None => self.drops.push(ReplicaDrop { owner, version, asked: 0 }),
        }
    }

    /// Returns true if a replica that has to be removed may be of another version.
    fn has_other(&self, version: Version) -> bool {
        self.drops.iter().any(|drop| drop.version != Some(version))
    }
}

/// Outstanding removals. A digest whose bits below the slot are zero means the whole slot.
#[derive(Debug, Default)]
pub(super) struct OutstandingRemovals {
    removals: BTreeMap<Digest, OutstandingRemoval>,
    /// Time before which no removal can be requested from any replica owner, unless something changes.
    idle_ns: u64,
}

/// Waits that have ended.
#[derive(Debug, Default)]
pub(super) struct EndedWaits {
    /// Replies that timed out before every replica owner acknowledged.
    pub(super) refused: Vec<DeferredItem>,
    /// Replies that waited only until all leases had expired.
    pub(super) lapsed: Vec<DeferredItem>,
}

/// Returns the digest that means all of a slot.
pub(super) const fn all_of(slot: Slot) -> Digest {
    slot.first_digest()
}

impl OutstandingRemovals {
    pub(super) fn len(&self) -> usize {
        self.removals.len()
    }

    /// Records that a replica owner may have a replica of the object that has to be removed: of this version, or of any
    /// one.
    pub(super) fn add(&mut self, digest: Digest, owner: ShardKey, version: Option<Version>) {
        let of_slot = self.removals.get(&all_of(digest.slot()));
        if !of_slot.is_some_and(|removal| removal.is_at(owner)) {
            self.removals.entry(digest).or_default().add(owner, version);
            self.idle_ns = 0;
        }
    }

    /// Returns the removals, each with a replica owner that has to acknowledge it.
    pub(super) fn all(&self) -> impl Iterator<Item = (Digest, ShardKey)> + '_ {
        let of = |(digest, removal): (&Digest, &OutstandingRemoval)| -> Vec<_> {
            removal.drops.iter().map(|drop| (*digest, drop.owner)).collect()
        };
        self.removals.iter().flat_map(of)
    }

    /// Replaces replica owners by their successors, which have what they had.
    pub(super) fn succeed(&mut self, successors: &BTreeMap<ShardKey, ShardKey>) {
        for drop in self.removals.values_mut().flat_map(|removal| &mut removal.drops) {
            drop.owner = successors.get(&drop.owner).copied().unwrap_or(drop.owner);
        }
        self.idle_ns = 0;
    }

    /// Allows requests to replica owners at once, after a change.
    pub(super) const fn wake(&mut self) {
        self.idle_ns = 0;
    }

    /// Merges removals into removals of whole slots if there are too many, which takes less memory.
    pub(super) fn bound(&mut self) {
        if self.removals.len() <= OUTSTANDING_MOST {
            return;
        }
        let (mut slots, mut asked): (BTreeMap<Digest, OutstandingRemoval>, BTreeMap<Digest, OutstandingRemoval>) =
            Default::default();
        for (digest, removal) in core::mem::take(&mut self.removals) {
            if removal.drops.iter().any(|drop| drop.asked != 0) {
                asked.insert(digest, removal);
            } else {
                let slot = slots.entry(all_of(digest.slot())).or_default();
                removal.drops.iter().for_each(|drop| slot.add(drop.owner, None));
                slot.lapses_ns = slot.lapses_ns.max(removal.lapses_ns);
                slot.waiters.extend(removal.waiters);
            }
        }
        slots.extend(asked);
        (self.removals, self.idle_ns) = (slots, 0);
    }

    /// Returns true if a replica of an object has to be removed.
    pub(super) fn has(&self, digest: Digest) -> bool {
        let removals = &self.removals;
        removals.contains_key(&digest) || removals.contains_key(&all_of(digest.slot()))
    }

    /// Returns true if a replica of an object has to be removed at this replica owner, or may be read at a former one.
    pub(super) fn has_at(&self, digest: Digest, owner: ShardKey) -> bool {
        let of = |digest: Digest| self.removals.get(&digest);
        let is_at = |removal: &OutstandingRemoval| removal.is_at(owner) || removal.lapses_ns > 0;
        of(digest).is_some_and(is_at) || of(all_of(digest.slot())).is_some_and(is_at)
    }

    /// Returns true if a replica of an object has to be removed at any replica owner that may be of another version
    /// than this one.
    pub(super) fn has_other(&self, digest: Digest, version: Version) -> bool {
        let of = |digest: Digest| self.removals.get(&digest).is_some_and(|removal| removal.has_other(version));
        of(digest) || of(all_of(digest.slot()))
    }

    /// Forgets the removals of an object at replica owners for which `is_owner` returns false. Returns true if there
    /// were any; and whether any are left.
    pub(super) fn forget_former(&mut self, digest: Digest, is_owner: impl Fn(ShardKey) -> bool) -> (bool, bool) {
        let Some(removal) = self.removals.get_mut(&digest) else { return (false, false) };
        let before = removal.drops.len();
        removal.drops.retain(|drop| is_owner(drop.owner));
        (removal.drops.len() < before, !removal.drops.is_empty())
    }

    /// Returns the outstanding removals in the slots for which `pick` returns true.
    pub(super) fn of_slots(&self, pick: impl Fn(Slot) -> bool) -> Vec<Digest> {
        self.removals.keys().copied().filter(|digest| pick(digest.slot())).collect()
    }

    /// Ends an outstanding removal; returns the replies that waited for it.
    pub(super) fn end(&mut self, digest: Digest) -> Vec<(DeferredItem, u64)> {
        self.removals.remove(&digest).map_or_else(Vec::new, |removal| removal.waiters)
    }

    /// Takes all waiting replies.
    pub(super) fn take_waiters(&mut self) -> Vec<DeferredItem> {
        self.removals.values_mut().flat_map(|removal| removal.waiters.drain(..)).map(|(item, _)| item).collect()
    }

    /// Makes these replies wait until the clients' leases on a replica have expired.
    pub(super) fn lapse(&mut self, digest: Digest, until_ns: u64, waiters: Vec<(DeferredItem, u64)>) {
        let removal = self.removals.entry(digest).or_default();
        removal.lapses_ns = removal.lapses_ns.max(until_ns);
        removal.waiters.extend(waiters);
    }

    /// Makes a reply wait until the replicas are removed, until `until_ns` at most; false if too many wait.
    pub(super) fn wait(&mut self, digest: Digest, item: DeferredItem, until_ns: u64) -> bool {
        let removal = if self.removals.contains_key(&digest) { digest } else { all_of(digest.slot()) };
        match self.removals.get_mut(&removal).filter(|removal| removal.waiters.len() < WAITERS_MOST) {
            Some(removal) => {
                removal.waiters.push((item, until_ns));
                true
            }
            None => false,
        }
    }

    /// Returns true if a replica owner may be asked now.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        !self.removals.is_empty() && self.idle_ns <= now_ns
    }

    /// Sets the time before which no replica owner can be asked.
    pub(super) const fn rest(&mut self, until_ns: u64) {
        self.idle_ns = until_ns;
    }

    /// Returns the next removals to request under this token from one replica owner; `may_ask` returns true for those
    /// that can be requested.
    pub(super) fn next(
        &mut self,
        token: u64,
        may_ask: impl Fn(Digest, ShardKey) -> bool,
    ) -> Option<(ShardKey, Vec<Digest>)> {
        let mut chosen: Option<ShardKey> = None;
        let mut digests = Vec::new();
        for (digest, removal) in &mut self.removals {
            let is_next = |drop: &&mut ReplicaDrop| {
                let other = chosen.is_some_and(|chosen| chosen != drop.owner);
                drop.asked == 0 && !other && may_ask(*digest, drop.owner)
            };
            let Some(drop) = removal.drops.iter_mut().find(is_next) else { continue };
            chosen = Some(drop.owner);
            drop.asked = token;
            digests.push(*digest);
            if digests.len() == DROPS {
                break;
            }
        }
        chosen.map(|chosen| (chosen, digests))
    }

    /// Handles the answer for a replica to the request of this token: it is `gone`, or not. Returns the replies that
    /// waited for the object if nothing is outstanding any more, none otherwise; `None` if the replica is not gone, or
    /// the answer belongs to another request.
    pub(super) fn answered(
        &mut self,
        digest: Digest,
        token: u64,
        gone: bool,
        now_ns: u64,
    ) -> Option<Vec<(DeferredItem, u64)>> {
        let removal = self.removals.get_mut(&digest)?;
        let at = removal.drops.iter().position(|drop| drop.asked == token)?;
        removal.drops[at].asked = 0;
        if !gone {
            return None;
        }
        removal.drops.remove(at);
        let ends = removal.drops.is_empty() && removal.lapses_ns <= now_ns;
        Some(if ends { self.end(digest) } else { Vec::new() })
    }

    /// Ends the waits that have timed out.
    pub(super) fn expire(&mut self, now_ns: u64) -> EndedWaits {
        let mut ended = EndedWaits::default();
        self.removals.retain(|_, removal| {
            if removal.lapses_ns > 0 && removal.lapses_ns <= now_ns {
                removal.lapses_ns = 0;
                if removal.drops.is_empty() {
                    ended.lapsed.extend(removal.waiters.drain(..).map(|(item, _)| item));
                }
            }
            !removal.drops.is_empty() || removal.lapses_ns > 0
        });
        for removal in self.removals.values_mut() {
            let over = removal.waiters.extract_if(.., |(_, until_ns)| *until_ns <= now_ns);
            ended.refused.extend(over.map(|(item, _)| item));
        }
        ended
    }

    /// Returns the time at which the next wait times out.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let waits = self.removals.values().flat_map(|removal| &removal.waiters).map(|(_, until_ns)| *until_ns);
        waits.chain(self.removals.values().map(|removal| removal.lapses_ns).filter(|until_ns| *until_ns > 0)).min()
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    const OWNER: ShardKey = ShardKey { node: NodeId(1), incarnation: Incarnation(1), shard: ShardId(0) };
    const OTHER: ShardKey = ShardKey { node: NodeId(2), ..OWNER };

    fn digest(slot: u16, number: u64) -> Digest {
        Digest(u128::from(slot) << 114 | u128::from(number))
    }

    #[test]
    fn a_removal_is_outstanding_until_the_replica_owner_acknowledges_it() {
        let mut outstanding = OutstandingRemovals::default();
        outstanding.add(digest(1, 5), OWNER, None);
        assert!(outstanding.has(digest(1, 5)) && !outstanding.has(digest(1, 6)) && outstanding.is_due(0));
        let next = outstanding.next(7, |_, _| true);
        assert_eq!(next, Some((OWNER, vec![digest(1, 5)])));
        assert_eq!(outstanding.next(8, |_, _| true), None, "its request is in flight");
        assert_eq!(outstanding.answered(digest(1, 5), 8, true, 0), None, "that was another question");
        assert_eq!(outstanding.answered(digest(1, 5), 7, false, 0), None);
        assert!(outstanding.has(digest(1, 5)));
        assert!(outstanding.next(9, |_, _| true).is_some());
        assert_eq!(outstanding.answered(digest(1, 5), 9, true, 0), Some(Vec::new()));
        assert_eq!((outstanding.has(digest(1, 5)), outstanding.len()), (false, 0));
    }

    #[test]
    fn a_removal_is_outstanding_until_every_replica_owner_acknowledges_it() {
        let mut outstanding = OutstandingRemovals::default();
        for (number, owner) in [(5, OWNER), (5, OTHER), (6, OTHER)] {
            outstanding.add(digest(1, number), owner, None);
        }
        assert_eq!(outstanding.next(7, |_, _| true), Some((OWNER, vec![digest(1, 5)])));
        assert_eq!(outstanding.next(8, |_, _| true), Some((OTHER, vec![digest(1, 5), digest(1, 6)])));
        assert_eq!(outstanding.answered(digest(1, 5), 8, true, 0), Some(Vec::new()));
        let at = [OWNER, OTHER].map(|owner| outstanding.has_at(digest(1, 5), owner));
        assert_eq!((at, outstanding.len()), ([true, false], 2));
        assert_eq!(outstanding.forget_former(digest(1, 6), |owner| owner == OWNER), (true, false));
        assert_eq!(outstanding.forget_former(digest(1, 5), |owner| owner == OWNER), (false, true));
        assert_eq!(outstanding.answered(digest(1, 6), 8, true, 0), None, "its replica owner is another one now");
        assert_eq!(outstanding.answered(digest(1, 5), 7, true, 0), Some(Vec::new()));
        assert!(!outstanding.has(digest(1, 5)));
    }

    #[test]
    fn too_many_removals_are_merged_into_slots() {
        let mut outstanding = OutstandingRemovals::default();
        (1..=OUTSTANDING_MOST as u64 + 1)
            .for_each(|number| outstanding.add(digest((number % 3) as u16, number), OWNER, Some(Version(1))));
        assert!(!outstanding.has_other(digest(2, 12344), Version(1)));
        outstanding.bound();
        assert_eq!(outstanding.len(), 3);
        assert!(outstanding.has_other(digest(2, 12344), Version(1)), "versions of a slot are not known");
        assert!(outstanding.has(digest(2, 12345)));
        outstanding.add(digest(2, 1), OWNER, None);
        assert_eq!(outstanding.len(), 3, "all of the slot is outstanding already");
        outstanding.add(digest(2, 1), OTHER, None);
        assert_eq!(outstanding.len(), 4, "but not at another replica owner");
    }

    #[test]
    fn a_removal_names_the_version_if_it_can_be_of_no_other() {
        let (mut outstanding, object) = (OutstandingRemovals::default(), digest(1, 5));
        let has = |outstanding: &OutstandingRemovals| [1, 2].map(|of| outstanding.has_other(object, Version(of)));
        assert_eq!(has(&outstanding), [false, false]);
        outstanding.add(object, OWNER, Some(Version(2)));
        assert_eq!(has(&outstanding), [true, false]);
        outstanding.add(object, OTHER, Some(Version(2)));
        outstanding.add(object, OWNER, Some(Version(1)));
        assert_eq!(has(&outstanding), [true, true], "one replica owner may have either");
        assert!(outstanding.next(7, |_, owner| owner == OWNER).is_some());
        outstanding.answered(object, 7, true, 0);
        assert_eq!(has(&outstanding), [true, false]);
        outstanding.add(object, OTHER, None);
        assert_eq!(has(&outstanding), [true, true]);
    }

    #[test]
    fn a_leased_replica_is_waited_for() {
        let mut outstanding = OutstandingRemovals::default();
        outstanding.lapse(digest(1, 1), 100, Vec::new());
        assert_eq!(outstanding.poll_timeout(), Some(100));
        assert_eq!(outstanding.next(1, |_, _| true), None, "no request is sent for it");
        outstanding.expire(99);
        assert!(outstanding.has(digest(1, 1)));
        outstanding.expire(100);
        assert!(!outstanding.has(digest(1, 1)));
    }
}
