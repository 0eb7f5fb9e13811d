//! Who owned the slots before the last change of owners: with it, everybody sees from one map which slots have moved,
//! and from whom to whom.
//!
//! A change of owners makes a new *layout*. A map carries, beside its members, the claims from which the owners of the
//! layout before follow, and who was there when the present one began. So an owner that got a slot knows whom to ask
//! for what was in it; and it knows whether that is still true: only whoever has been there, in one incarnation, since
//! the layout began may ask, and only a former owner that is still in the same incarnation has anything to tell.

use super::codec::{DecodeError, Reader};
use super::{ClusterMap, MAX_MEMBER_SHARDS, MAX_MEMBERS, Member, OwnerTable, ShardAddress};
use crate::ids::{Epoch, Incarnation, NodeId, SLOTS, ShardId, Slot};

/// Bytes of a claim on the wire, and of an incarnation.
const CLAIM_BYTES: usize = 8 + 8 + 4 + 2;
const INCARNATION_BYTES: usize = 8 + 8;
/// Most bytes of it in a map.
pub(super) const MAX_FORMER_BYTES: usize =
    8 + 8 + 2 + 2 + MAX_MEMBERS * (CLAIM_BYTES + INCARNATION_BYTES) + 8 + 8 + 2 + MAX_MEMBERS * INCARNATION_BYTES;

/// What a member brought to the draw of owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Who.
    pub node: NodeId,
    /// Which incarnation, when the layout ended.
    pub incarnation: Incarnation,
    /// Its share.
    pub weight: u32,
    /// Its shards.
    pub shards: u16,
}

/// The layout before the present one, and the beginning of the present one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Former {
    /// The epoch in which the present layout began.
    pub since: Epoch,
    /// The epoch in which the former one began.
    pub from: Epoch,
    /// What the owners of the former one follow from, ordered by node.
    pub claims: Vec<Claim>,
    /// Who owned slots when the present one began, ordered by node.
    pub began: Vec<(NodeId, Incarnation)>,
    /// Owners that went on with their slots in another incarnation, where slots have two owners.
    pub restarts: Option<Restarts>,
}

/// Members whose incarnations changed from one map to the next, while the layout stayed.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Restarts {
    /// The epoch in which they were seen in their present incarnations first.
    pub at: Epoch,
    /// The epoch of the change before that, of incarnations or of the layout.
    pub from: Epoch,
    /// Who, and in which lives they were before, ordered by node.
    pub incarnations: Vec<(NodeId, Incarnation)>,
}

impl Former {
    /// Appends its encoding.
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.since.0.to_le_bytes());
        out.extend_from_slice(&self.from.0.to_le_bytes());
        out.extend_from_slice(&(self.claims.len() as u16).to_le_bytes());
        out.extend_from_slice(&(self.began.len() as u16).to_le_bytes());
        for claim in &self.claims {
            out.extend_from_slice(&claim.node.0.to_le_bytes());
            out.extend_from_slice(&claim.incarnation.0.to_le_bytes());
            out.extend_from_slice(&claim.weight.to_le_bytes());
            out.extend_from_slice(&claim.shards.to_le_bytes());
        }
        for (node, incarnation) in &self.began {
            out.extend_from_slice(&node.0.to_le_bytes());
            out.extend_from_slice(&incarnation.0.to_le_bytes());
        }
        // A node that does not know it takes none of this: slots that have two owners need nodes of this version.
        if let Some(Restarts { at, from, incarnations }) = &self.restarts {
            out.extend_from_slice(&at.0.to_le_bytes());
            out.extend_from_slice(&from.0.to_le_bytes());
            out.extend_from_slice(&(incarnations.len() as u16).to_le_bytes());
            for (node, incarnation) in incarnations {
                out.extend_from_slice(&node.0.to_le_bytes());
                out.extend_from_slice(&incarnation.0.to_le_bytes());
            }
        }
    }

    /// Whether it is one that can be encoded and drawn from.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.claims.len() <= MAX_MEMBERS
            && self.began.len() <= MAX_MEMBERS
            && self.restarts.as_ref().is_none_or(|restarts| {
                restarts.incarnations.len() <= MAX_MEMBERS
                    && restarts.incarnations.is_sorted_by(|one, next| one.0 < next.0)
            })
            && self.claims.is_sorted_by(|one, next| one.node < next.node)
            && self.began.is_sorted_by(|one, next| one.0 < next.0)
            && self.claims.iter().all(|claim| usize::from(claim.shards) <= MAX_MEMBER_SHARDS)
    }

    /// The first owners of the former layout, by slot: the position of the claim and the shard.
    fn owners(&self) -> Vec<Option<(u16, ShardId)>> {
        let address = ShardAddress { tcp: std::net::SocketAddr::from(([0, 0, 0, 0], 0)), shm: None };
        let member = |claim: &Claim| Member {
            node: claim.node,
            incarnation: claim.incarnation,
            weight: claim.weight,
            failure_domain: String::new(),
            host: String::new(),
            shards: vec![address.clone(); claim.shards.into()],
        };
        let members = self.claims.iter().map(member).collect();
        let map = ClusterMap { epoch: self.from, replicas: 1, members, former: None };
        let table = OwnerTable::compute(&map);
        let first = |slot| table.owners(Slot(slot)).first().map(|owner| (owner.member, owner.shard));
        (0..SLOTS as u16).map(first).collect()
    }

    /// The same, as who they were when the layout ended.
    fn keys(&self) -> Vec<Option<ShardKey>> {
        let key = |owner: Option<(u16, ShardId)>| {
            let (claim, shard) = owner?;
            let Claim { node, incarnation, .. } = self.claims[usize::from(claim)];
            Some(ShardKey { node, incarnation, shard })
        };
        self.owners().into_iter().map(key).collect()
    }
}

impl Restarts {
    /// In which incarnation a node was before, if it is one of them.
    fn before(&self, node: NodeId) -> Option<Incarnation> {
        let at = self.incarnations.binary_search_by_key(&node, |(node, _)| *node).ok()?;
        Some(self.incarnations[at].1)
    }
}

impl Reader<'_> {
    /// The next former layout.
    ///
    /// # Errors
    /// When it is cut off, or is none.
    pub fn former(&mut self) -> Result<Former, DecodeError> {
        let (since, from) = (Epoch(self.u64()?), Epoch(self.u64()?));
        let (claims, began) = (usize::from(self.u16()?), usize::from(self.u16()?));
        let mut former = Former { since, from, ..Former::default() };
        former.claims.reserve(self.bounded(claims, CLAIM_BYTES)?);
        for _ in 0..claims {
            former.claims.push(Claim {
                node: NodeId(self.u64()?),
                incarnation: Incarnation(self.u64()?),
                weight: self.u32()?,
                shards: self.u16()?,
            });
        }
        former.began.reserve(self.bounded(began, INCARNATION_BYTES)?);
        for _ in 0..began {
            former.began.push((NodeId(self.u64()?), Incarnation(self.u64()?)));
        }
        if self.left_bytes() > 0 {
            let (at, from) = (Epoch(self.u64()?), Epoch(self.u64()?));
            let count = usize::from(self.u16()?);
            let mut incarnations = Vec::with_capacity(self.bounded(count, INCARNATION_BYTES)?);
            for _ in 0..count {
                incarnations.push((NodeId(self.u64()?), Incarnation(self.u64()?)));
            }
            former.restarts = Some(Restarts { at, from, incarnations });
        }
        if !former.is_valid() {
            return Err(DecodeError::Field { what: "former layout", found: former.claims.len() as u64 });
        }
        Ok(former)
    }
}

/// A shard of one incarnation of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ShardKey {
    /// The node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// The shard.
    pub shard: ShardId,
}

/// Who owns each slot by a map, and who owned it before. Made once for each map, for all who want to know.
#[derive(Clone, Debug)]
pub struct SlotOwners {
    /// The map's epoch.
    pub epoch: Epoch,
    /// The epochs in which the map's layout began, and the one before it.
    pub since: Epoch,
    /// See [`Self::since`].
    pub from: Epoch,
    /// What the devices of this node hold counts only if they knew a map of this epoch or of a later one: an
    /// incarnation of the node may have gone without them before. Not in the map: the control plane tells it to each
    /// node. 0 for nothing.
    pub kept: Epoch,
    now: Vec<Option<ShardKey>>,
    /// The second owners; empty where slots have one.
    next: Vec<Option<ShardKey>>,
    before: Vec<Option<ShardKey>>,
    /// Who owned slots in the layout before, wherever it is now.
    past: Vec<Option<ShardKey>>,
    /// The same, also of owners that go on in another incarnation since. Empty where it is the same.
    laid: Vec<Option<ShardKey>>,
    /// Owners that go on in another incarnation.
    restarts: Option<Restarts>,
    /// Who owned slots when the layout began.
    began: Vec<(NodeId, Incarnation)>,
    addresses: Vec<(ShardKey, String, ShardAddress)>,
}

impl SlotOwners {
    /// The owners by a map. One that does not say when its layout began is taken to have made one.
    #[must_use]
    pub fn of(map: &ClusterMap) -> Self {
        let table = OwnerTable::compute(map);
        let key = |member: u16, shard| {
            let Member { node, incarnation, .. } = map.members[usize::from(member)];
            ShardKey { node, incarnation, shard }
        };
        let nth = |slot, nth: usize| table.owners(Slot(slot)).get(nth).map(|owner| key(owner.member, owner.shard));
        let now: Vec<Option<ShardKey>> = (0..SLOTS as u16).map(|slot| nth(slot, 0)).collect();
        let several = map.replicas > 1;
        let next = if several { (0..SLOTS as u16).map(|slot| nth(slot, 1)).collect() } else { Vec::new() };
        let (since, from) = map.former.as_ref().map_or((map.epoch, map.epoch), |former| (former.since, former.from));
        let mut past = map.former.as_ref().map_or_else(Vec::new, Former::keys);
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
                before[slot] = next[slot].filter(|second| restarts.before(second.node).is_none());
            }
        }
        let mut addresses = Vec::new();
        for Member { node, incarnation, host, shards, .. } in &map.members {
            for (shard, address) in shards.iter().enumerate() {
                let key = ShardKey { node: *node, incarnation: *incarnation, shard: ShardId(shard as u16) };
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
            before,
            past,
            laid,
            restarts,
            began,
            addresses,
        }
    }

    /// The first owner of a slot.
    #[must_use]
    pub fn owner(&self, slot: Slot) -> Option<ShardKey> {
        *self.now.get(usize::from(slot.0))?
    }

    /// The second owner of a slot: it may hold copies of what the first has.
    #[must_use]
    pub fn second(&self, slot: Slot) -> Option<ShardKey> {
        *self.next.get(usize::from(slot.0))?
    }

    /// Whether a slot changed hands, or its owner its incarnation, exactly once since this epoch, by the map: then
    /// [`Self::past`] says from whom.
    #[must_use]
    pub fn changed_once(&self, slot: Slot, heard: Epoch) -> bool {
        let (at, from) = self.change_of(slot);
        at > heard && (from <= heard || self.epoch.0 == heard.0 + 1)
    }

    /// Whether there is any slot of which [`Self::former`] says something that was not so by the map of this epoch.
    #[must_use]
    pub fn has_changed(&self, heard: Epoch) -> bool {
        self.since > heard || self.restarts.as_ref().is_some_and(|restarts| restarts.at > heard)
    }

    /// The same of one slot.
    #[must_use]
    pub fn slot_has_changed(&self, slot: Slot, heard: Epoch) -> bool {
        self.change_of(slot).0 > heard
    }

    /// When a slot changed hands, or its owner its incarnation, and the last such change anywhere before that.
    fn change_of(&self, slot: Slot) -> (Epoch, Epoch) {
        let owner = self.owner(slot);
        let incarnation = |restarts: &&Restarts| owner.is_some_and(|owner| restarts.before(owner.node).is_some());
        let restarts = self.restarts.as_ref().filter(incarnation);
        restarts.map_or((self.since, self.from), |restarts| (restarts.at, restarts.from))
    }

    /// Who owned a slot when the layout before ended, in the incarnation that it was in then. It may be gone. Of an
    /// owner that goes on with its slots in another incarnation: its incarnation before.
    #[must_use]
    pub fn past(&self, slot: Slot) -> Option<ShardKey> {
        *self.past.get(usize::from(slot.0))?
    }

    /// Whether an owner has been one, in its present incarnation, since the layout began.
    #[must_use]
    pub fn has_lasted(&self, owner: ShardKey) -> bool {
        self.began.binary_search(&(owner.node, owner.incarnation)).is_ok()
    }

    /// Who owned a slot when the layout before ended, in the incarnation that it was in then, whatever became of it
    /// since.
    #[must_use]
    pub fn owner_before(&self, slot: Slot) -> Option<ShardKey> {
        let laid = if self.laid.is_empty() { &self.past } else { &self.laid };
        *laid.get(usize::from(slot.0))?
    }

    /// Who owned a slot in the layout before, if its present owner may ask it for what was in it: both have been there
    /// since, in one incarnation. An owner that had it before is its own. Where that one is gone, it is the second
    /// owner: it was that before too, unless it has become the first, and may have copies.
    #[must_use]
    pub fn former(&self, slot: Slot) -> Option<ShardKey> {
        *self.before.get(usize::from(slot.0))?
    }

    /// The incarnations of the map's members that have shards, in the order of their numbers; some more than once.
    pub fn incarnations(&self) -> impl Iterator<Item = (NodeId, Incarnation)> {
        self.addresses.iter().map(|(key, ..)| (key.node, key.incarnation))
    }

    /// Where a shard of the map listens, and on which host.
    #[must_use]
    pub fn address(&self, key: ShardKey) -> Option<(&str, &ShardAddress)> {
        let at = self.addresses.binary_search_by_key(&key, |(key, ..)| *key).ok()?;
        let (_, host, address) = &self.addresses[at];
        Some((host, address))
    }
}

/// The former owners that may be asked.
fn before(map: &ClusterMap, former: &Former, past: &[Option<ShardKey>], table: &OwnerTable) -> Vec<Option<ShardKey>> {
    let was_there = |member: &Member| former.began.binary_search(&(member.node, member.incarnation)).is_ok();
    let lasting: Vec<bool> = map.members.iter().map(was_there).collect();
    let before = past.iter().enumerate().map(|(slot, past)| {
        let owners = table.owners(Slot(slot as u16));
        let now = owners.first()?;
        let past = past.filter(|_| lasting[usize::from(now.member)])?;
        let member = map.member(past.node).filter(|member| member.incarnation == past.incarnation);
        if let Some(member) = member {
            return (usize::from(past.shard.0) < member.shards.len()).then_some(past);
        }
        let second = owners.get(1).filter(|second| lasting[usize::from(second.member)])?;
        let Member { node, incarnation, .. } = map.members[usize::from(second.member)];
        Some(ShardKey { node, incarnation, shard: second.shard })
    });
    before.collect()
}
