//! Owners of slots by one cluster map: the present ones, and those of the former layout that objects are imported from.

use std::net::SocketAddr;

use super::cluster_map::{ClusterMap, Member, ShardAddress};
use super::former::{Claim, Former, Restarts};
use super::rendezvous::OwnerTable;
use crate::ids::{Epoch, Incarnation, NodeId, SLOTS, ShardId, Slot};
use crate::narrowing::length_u16;

/// A shard of one incarnation of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ShardKey {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub shard: ShardId,
}

impl ShardKey {
    /// Returns true if this shard is `earlier`, or has its memory by handovers of its node.
    #[must_use]
    pub fn continues(self, earlier: Self) -> bool {
        let is_shard = (self.node, self.shard) == (earlier.node, earlier.shard);
        is_shard && self.incarnation.continues(earlier.incarnation)
    }
}

/// Present owners and former owner of each slot. Computed once for each map and shared by all readers.
#[derive(Clone, Debug)]
pub struct SlotOwners {
    /// Epoch of the map.
    pub epoch: Epoch,
    /// Epoch in which the present layout began.
    pub since: Epoch,
    /// Epoch in which the former layout began.
    pub from: Epoch,
    /// Least epoch that this node's SSDs must have recorded for their contents to be valid: before it, another
    /// incarnation of the node may have run without them. Not part of the map; the control plane sends it to each node.
    /// 0 if there is no such epoch.
    pub kept: Epoch,
    now: Vec<Option<ShardKey>>,
    /// Replica owners, grouped by slot in the order of the map; empty if slots have none.
    next: Vec<ShardKey>,
    /// Number of replica owners of each slot.
    next_per_slot: usize,
    before: Vec<Option<ShardKey>>,
    /// Owners of the former layout, wherever they are now; for an owner that has restarted, its own former incarnation.
    past: Vec<Option<ShardKey>>,
    /// Copy of `past` without the exception for restarted owners. Empty if it is equal to `past`.
    laid: Vec<Option<ShardKey>>,
    /// Owners that kept their slots across a restart.
    restarts: Option<Restarts>,
    /// Owners of slots when the present layout began.
    began: Vec<(NodeId, Incarnation)>,
    addresses: Vec<(ShardKey, String, ShardAddress)>,
}

impl SlotOwners {
    /// Computes the owners by a map. A map that does not say when its layout began is taken to have begun one.
    #[must_use]
    pub fn of(map: &ClusterMap) -> Self {
        let table = OwnerTable::compute(map);
        let key = |member: u16, shard| {
            let Member { node, incarnation, .. } = map.members[usize::from(member)];
            ShardKey { node, incarnation, shard }
        };
        let owner_of = |slot| table.owners(Slot(slot)).first().map(|owner| key(owner.member, owner.shard));
        let now: Vec<Option<ShardKey>> = (0..length_u16(SLOTS)).map(owner_of).collect();
        let several = map.replicas > 1;
        let next_per_slot = table.per_slot().saturating_sub(1);
        let mut next = Vec::with_capacity(SLOTS * next_per_slot);
        for slot in (0..length_u16(SLOTS)).map(Slot) {
            next.extend(table.owners(slot).iter().skip(1).map(|owner| key(owner.member, owner.shard)));
        }
        let (since, from) = map.former.as_ref().map_or((map.epoch, map.epoch), |former| (former.since, former.from));
        let mut past = map.former.as_ref().map_or_else(Vec::new, owners_of_layout);
        let mut before = map.former.as_ref().map_or_else(Vec::new, |former| before(map, former, &past, &table));
        let restarts = map.former.as_ref().and_then(|former| former.restarts.clone()).filter(|_| several);
        let mut laid = Vec::new();
        if let Some(restarts) = &restarts {
            past.resize(SLOTS, None);
            laid.clone_from(&past);
            before.resize(SLOTS, None);
            for (slot, now) in now.iter().enumerate() {
                let Some((now, former)) = now.and_then(|now| Some((now, restarts.before(now.node)?))) else { continue };
                past[slot] = Some(ShardKey { incarnation: former, ..now });
                let replica_owners = &next[slot * next_per_slot..(slot + 1) * next_per_slot];
                let lasting = replica_owners.iter().find(|other| restarts.before(other.node).is_none());
                before[slot] = lasting.copied();
            }
        }
        let mut addresses = Vec::new();
        for Member { node, incarnation, host, shards, .. } in &map.members {
            for (shard, address) in shards.iter().enumerate() {
                let key = ShardKey { node: *node, incarnation: *incarnation, shard: ShardId(length_u16(shard)) };
                addresses.push((key, host.clone(), address.clone()));
            }
        }
        let began = map.former.as_ref().map_or_else(Vec::new, |former| former.began.clone());
        Self {
            epoch: map.epoch,
            since,
            from,
            kept: Epoch(0),
            now,
            next,
            next_per_slot,
            before,
            past,
            laid,
            restarts,
            began,
            addresses,
        }
    }

    /// Returns the owner of a slot.
    #[must_use]
    pub fn owner(&self, slot: Slot) -> Option<ShardKey> {
        *self.now.get(usize::from(slot.0))?
    }

    /// Returns the replica owners of a slot, which may hold replicas of the owner's objects, in the order of the map.
    #[must_use]
    pub fn replica_owners(&self, slot: Slot) -> &[ShardKey] {
        let at = usize::from(slot.0) * self.next_per_slot;
        self.next.get(at..at + self.next_per_slot).unwrap_or(&[])
    }

    /// Returns true if, by this map, the slot's owner or its incarnation has changed exactly once since epoch `heard`:
    /// then [`Self::past`] is the owner at `heard`.
    #[must_use]
    pub fn changed_once(&self, slot: Slot, heard: Epoch) -> bool {
        let (at, from) = self.change_of(slot);
        at > heard && (from <= heard || self.epoch.0 == heard.0 + 1)
    }

    /// Returns true if the result of [`Self::former`] may differ, for any slot, from that by the map of epoch `heard`.
    #[must_use]
    pub fn has_changed(&self, heard: Epoch) -> bool {
        self.since > heard || self.restarts.as_ref().is_some_and(|restarts| restarts.at > heard)
    }

    /// Returns true if the owner of this slot, or its incarnation, has changed since epoch `heard`.
    #[must_use]
    pub fn slot_has_changed(&self, slot: Slot, heard: Epoch) -> bool {
        self.change_of(slot).0 > heard
    }

    /// Returns the epoch in which a slot's owner, or its incarnation, changed last, and the epoch of the change before
    /// it, of any slot.
    fn change_of(&self, slot: Slot) -> (Epoch, Epoch) {
        let owner = self.owner(slot);
        let incarnation = |restarts: &&Restarts| owner.is_some_and(|owner| restarts.before(owner.node).is_some());
        let restarts = self.restarts.as_ref().filter(incarnation);
        restarts.map_or((self.since, self.from), |restarts| (restarts.at, restarts.from))
    }

    /// Returns the owner of a slot when the former layout ended, in its incarnation at that time; the shard may be
    /// gone. For an owner that kept its slots across a restart, returns its former incarnation.
    #[must_use]
    pub fn past(&self, slot: Slot) -> Option<ShardKey> {
        *self.past.get(usize::from(slot.0))?
    }

    /// Returns true if an owner has owned slots, in its present incarnation, since the layout began.
    #[must_use]
    pub fn has_lasted(&self, owner: ShardKey) -> bool {
        self.began.binary_search(&(owner.node, owner.incarnation)).is_ok()
    }

    /// Returns the owner of a slot when the former layout ended, in its incarnation at that time, regardless of
    /// restarts since.
    #[must_use]
    pub fn owner_before(&self, slot: Slot) -> Option<ShardKey> {
        let laid = if self.laid.is_empty() { &self.past } else { &self.laid };
        *laid.get(usize::from(slot.0))?
    }

    /// Returns the shard from which the present owner of a slot may import the slot's objects: its owner in the former
    /// layout, if both have run in one incarnation since. An owner that keeps its slot is its own former owner. If the
    /// former owner is gone, this is the first replica owner that has lasted, which may hold replicas: it was a replica
    /// owner before too, unless a replica owner has become the owner.
    #[must_use]
    pub fn former(&self, slot: Slot) -> Option<ShardKey> {
        *self.before.get(usize::from(slot.0))?
    }

    /// Returns the incarnations of the map's members that have shards, ordered by node; some more than once.
    pub fn incarnations(&self) -> impl Iterator<Item = (NodeId, Incarnation)> {
        self.addresses.iter().map(|(key, ..)| (key.node, key.incarnation))
    }

    /// Returns the host and the address of a shard of the map.
    #[must_use]
    pub fn address(&self, key: ShardKey) -> Option<(&str, &ShardAddress)> {
        let at = self.addresses.binary_search_by_key(&key, |(key, ..)| *key).ok()?;
        let (_, host, address) = &self.addresses[at];
        Some((host, address))
    }
}

/// Returns the owners of a former layout by slot, in their incarnations when the layout ended.
fn owners_of_layout(former: &Former) -> Vec<Option<ShardKey>> {
    let address = ShardAddress { tcp: SocketAddr::from(([0, 0, 0, 0], 0)), shm: None };
    let member = |claim: &Claim| Member {
        node: claim.node,
        incarnation: claim.incarnation,
        weight: claim.weight,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![address.clone(); claim.shards.into()],
    };
    let members = former.claims.iter().map(member).collect();
    let map = ClusterMap { epoch: former.from, replicas: 1, members, former: None };
    let table = OwnerTable::compute(&map);
    let first = |slot| {
        let owner = table.owners(Slot(slot)).first()?;
        let Claim { node, incarnation, .. } = former.claims[usize::from(owner.member)];
        Some(ShardKey { node, incarnation, shard: owner.shard })
    };
    (0..length_u16(SLOTS)).map(first).collect()
}

/// Returns, for each slot, the former owner that its present owner may import from.
fn before(map: &ClusterMap, former: &Former, past: &[Option<ShardKey>], table: &OwnerTable) -> Vec<Option<ShardKey>> {
    let was_there = |member: &Member| former.began.binary_search(&(member.node, member.incarnation)).is_ok();
    let lasting: Vec<bool> = map.members.iter().map(was_there).collect();
    let before = past.iter().enumerate().map(|(slot, past)| {
        let owners = table.owners(Slot(length_u16(slot)));
        let now = owners.first()?;
        let past = past.filter(|_| lasting[usize::from(now.member)])?;
        let member = map.member(past.node).filter(|member| member.incarnation == past.incarnation);
        if let Some(member) = member {
            return (usize::from(past.shard.0) < member.shards.len()).then_some(past);
        }
        let keeper = owners.iter().skip(1).find(|keeper| lasting[usize::from(keeper.member)])?;
        let Member { node, incarnation, .. } = map.members[usize::from(keeper.member)];
        Some(ShardKey { node, incarnation, shard: keeper.shard })
    });
    before.collect()
}
