//! Newest cluster map and the history of its owners: the epoch since which they own their slots, the owners before, and
//! the owners that continue in another incarnation.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{Claim, ClusterMap, Former, MapError, Member, Restarts};

use crate::config::ClusterConfig;
use crate::record::{Header, Layout, Record};

/// Increment of the epoch at an adoption: more maps than can have been published without reaching any member.
pub(crate) const EPOCH_GAP: u64 = 1000;

/// The newest map and the history of its owners.
pub(crate) struct MapHistory {
    /// Newest map; changes of members enter it at the end of the call in progress.
    map: ClusterMap,
    /// Owners by the last map that had any: while there are none, the slots are still theirs.
    last_owners: Vec<Member>,
    layout: Layout,
}

impl MapHistory {
    /// Creates the history of a cluster without a map.
    pub(super) fn new(replicas: u8) -> Self {
        let map = ClusterMap { epoch: Epoch(0), replicas, members: Vec::new(), former: None };
        Self { map, last_owners: Vec::new(), layout: Layout::default() }
    }

    pub(crate) const fn map(&self) -> &ClusterMap {
        &self.map
    }

    pub(crate) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the record of the newest epoch.
    pub(crate) fn header(&self, config: &ClusterConfig) -> Record {
        let (epoch, replicas) = (self.map.epoch, config.replicas);
        Record::Header(Header { cluster: config.cluster.clone(), epoch, replicas })
    }

    /// Restores the layout from its record.
    pub(crate) fn restore_layout(&mut self, layout: Layout) {
        self.layout = layout;
    }

    /// Restores the newest map without its members. Returns true if its replica count differs from the configured one.
    pub(crate) fn restore_header(&mut self, header: &Header, replicas: u8) -> bool {
        (self.map.epoch, self.map.replicas) = (header.epoch, header.replicas);
        header.replicas != replicas
    }

    /// Restores the members of the stored or adopted map.
    pub(super) fn restore_members(&mut self, members: Vec<Member>) {
        self.map.members = members;
    }

    /// Checks that the map is valid.
    pub(crate) fn validate(&self) -> Result<(), MapError> {
        self.map.validate()
    }

    /// Adopts a map that members follow, with its owners and layout, under a later epoch.
    pub(super) fn adopt(&mut self, map: &ClusterMap) {
        let since = map.former.as_ref().map_or(map.epoch, |former| former.since);
        // Of a map that lacks the previous layout, only the beginning of its layout is known.
        let former = map.former.clone().filter(|former| !former.began.is_empty());
        self.layout = Layout { since, claims: claims(map).unwrap_or(0), former };
        self.map.epoch = Epoch(map.epoch.0 + EPOCH_GAP);
        self.map.replicas = map.replicas;
    }

    /// Returns the epoch of the last map that moved slots.
    pub(crate) fn moved_at(&self) -> Epoch {
        let restarts = self.layout.former.as_ref().and_then(|former| former.restarts.as_ref());
        restarts.map_or(Epoch(0), |restarts| restarts.at).max(self.layout.since)
    }

    /// Returns true if the owners at the beginning of the layout are known.
    pub(super) fn knows_owners(&self) -> bool {
        self.layout.former.as_ref().is_some_and(|former| !former.began.is_empty())
    }

    /// Returns true if a node owned slots at the beginning of the layout.
    pub(super) fn owned(&self, node: NodeId) -> bool {
        let began = self.layout.former.as_ref().map_or(&[][..], |former| &former.began);
        began.binary_search_by_key(&node, |(node, _)| *node).is_ok()
    }

    /// Returns the epoch since which no slot will have changed hands if the next map has these members.
    pub(super) fn since_with(&self, members: Vec<Member>, replicas: u8) -> Epoch {
        let map = ClusterMap { epoch: Epoch(self.map.epoch.0 + 1), replicas, members, former: None };
        let moved = claims(&map).is_some_and(|claims| claims != self.layout.claims);
        if moved { map.epoch } else { self.layout.since }
    }

    /// Begins the next map; returns the members of the previous one.
    pub(super) fn advance(&mut self, members: Vec<Member>, replicas: u8) -> Vec<Member> {
        self.map.epoch.0 += 1;
        self.map.replicas = replicas;
        let before = std::mem::replace(&mut self.map.members, members);
        if before.iter().any(|member| member.weight > 0) {
            self.last_owners.clone_from(&before);
        }
        before
    }

    /// Records a change of owners. While a map has no owners, slots have not changed hands. `before` are the members of
    /// the previous map. Returns true if the layout changed, so that migrations begin.
    pub(super) fn note_layout(&mut self, before: &[Member]) -> bool {
        let moved = if let Some(claims) = claims(&self.map).filter(|claims| *claims != self.layout.claims) {
            let (since, from) = (self.map.epoch, self.layout.since);
            let owners = |members: &'_ [Member]| -> Vec<Member> {
                members.iter().filter(|member| member.weight > 0).cloned().collect()
            };
            let claim = |member: Member| Claim {
                node: member.node,
                incarnation: member.incarnation,
                weight: member.weight,
                shards: member.shards.len() as u16,
            };
            let began = owners(&self.map.members).into_iter().map(|member| (member.node, member.incarnation)).collect();
            let before = owners(if before.iter().any(|member| member.weight > 0) { before } else { &self.last_owners });
            let claims_before = before.into_iter().map(claim).collect();
            let former = Former { since, from, claims: claims_before, began, restarts: None };
            self.layout = Layout { since, claims, former: Some(former) };
            true
        } else {
            self.map.replicas > 1 && self.note_restarts(before)
        };
        // Of a layout that an earlier version stored, only the beginning is known.
        let since = self.layout.since;
        let begun = (since != Epoch(0)).then(|| Former { since, from: since, ..Former::default() });
        self.map.former = self.layout.former.clone().or(begun);
        moved
    }

    /// Forgets the restarts of owners that have handed their memory over since: the successor has everything that the
    /// incarnation before it imported.
    fn forget_succeeded(&mut self, before: &[Member]) {
        let Some(restarts) = self.layout.former.as_mut().and_then(|former| former.restarts.as_mut()) else { return };
        let members = &self.map.members;
        restarts.incarnations.retain(|(node, _)| {
            let of = |members: &[Member]| Some(members.iter().find(|member| member.node == *node)?.incarnation);
            of(before).zip(of(members)).is_none_or(|(before, now)| before == now || !now.continues(before))
        });
    }

    /// Records the owners that keep their slots in another incarnation: replica owners have their objects. One that
    /// continues the former incarnation has them itself. Returns true if there are any.
    fn note_restarts(&mut self, before: &[Member]) -> bool {
        self.forget_succeeded(before);
        let former_incarnation = |member: &Member| {
            let former = before.iter().find(|former| former.node == member.node && former.weight > 0)?;
            let restarts = !member.incarnation.continues(former.incarnation);
            restarts.then_some((member.node, former.incarnation))
        };
        let owners = self.map.members.iter().filter(|member| member.weight > 0);
        let incarnations: Vec<(NodeId, Incarnation)> = owners.filter_map(former_incarnation).collect();
        if incarnations.is_empty() {
            return false;
        }
        let (at, since) = (self.map.epoch, self.layout.since);
        let former = self.layout.former.get_or_insert_with(|| Former { since, from: since, ..Former::default() });
        let from = former.restarts.as_ref().map_or(since, |restarts| restarts.at);
        former.restarts = Some(Restarts { at, from, incarnations });
        true
    }
}

/// Returns a digest of everything that the owners of a map follow from; `None` if it has no owners. With one replica,
/// owners follow from node ids, weights and shards alone; of failure domains only the grouping matters, not their
/// names.
fn claims(map: &ClusterMap) -> Option<u128> {
    let owners: Vec<&Member> = map.members.iter().filter(|member| member.weight > 0).collect();
    let mut bytes = vec![map.replicas];
    for member in &owners {
        bytes.extend_from_slice(&member.node.0.to_le_bytes());
        bytes.extend_from_slice(&(member.shards.len() as u64).to_le_bytes());
        // A single owner owns everything, regardless of its weight.
        if owners.len() > 1 {
            bytes.extend_from_slice(&member.weight.to_le_bytes());
        }
        if map.replicas > 1 {
            let first = owners.iter().position(|other| other.failure_domain == member.failure_domain);
            bytes.extend_from_slice(&(first.unwrap_or(0) as u64).to_le_bytes());
        }
    }
    (!owners.is_empty()).then(|| Digest::of(b"owners", &bytes).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(node: u64, incarnation: u64, weight: u32) -> Member {
        let (failure_domain, host) = (format!("rack-{node}"), String::new());
        let (node, incarnation) = (NodeId(node), Incarnation(incarnation));
        Member { node, incarnation, weight, failure_domain, host, shards: Vec::new() }
    }

    /// Publishes a map with these members; returns true if the layout changed.
    fn publish(maps: &mut MapHistory, members: &[Member], replicas: u8) -> bool {
        let before = maps.advance(members.to_vec(), replicas);
        maps.note_layout(&before)
    }

    #[test]
    fn layout_changes_with_owners_only() {
        let mut maps = MapHistory::new(1);
        assert!(!publish(&mut maps, &[member(1, 1, 0)], 1), "no member owns slots");
        assert!(publish(&mut maps, &[member(1, 1, 10)], 1));
        assert_eq!(maps.layout().since, Epoch(2));
        assert!(!publish(&mut maps, &[member(1, 1, 10), member(2, 1, 0)], 1));
        assert_eq!(maps.since_with(vec![member(1, 1, 10), member(2, 1, 0)], 1), Epoch(2));
        assert_eq!(maps.since_with(vec![member(1, 1, 10), member(2, 1, 10)], 1), Epoch(4));
        assert!(publish(&mut maps, &[member(1, 1, 10), member(2, 1, 10)], 1));
        let former = maps.layout().former.as_ref().expect("a layout with a former one");
        assert_eq!((former.from, former.claims.len()), (Epoch(2), 1));
        assert!(maps.owned(NodeId(1)) && maps.owned(NodeId(2)) && !maps.owned(NodeId(3)));
    }

    #[test]
    fn slots_stay_with_the_last_owners_while_there_are_none() {
        let mut maps = MapHistory::new(1);
        publish(&mut maps, &[member(1, 1, 10)], 1);
        assert!(!publish(&mut maps, &[], 1));
        assert!(publish(&mut maps, &[member(2, 1, 10), member(3, 1, 10)], 1));
        let former = maps.layout().former.as_ref().expect("a layout with a former one");
        assert_eq!(former.claims.iter().map(|claim| claim.node).collect::<Vec<_>>(), [NodeId(1)]);
    }

    #[test]
    fn owners_that_hand_over_have_not_restarted() {
        let line = Incarnation::line_from(1 << 20);
        let successor = line.successor().expect("the line goes on");
        let of = |one: Incarnation, two| [member(1, one.0, 10), member(2, two, 10)];
        let mut maps = MapHistory::new(2);
        publish(&mut maps, &of(Incarnation(1), 1), 2);
        assert!(publish(&mut maps, &of(line, 2), 2), "both restart");
        assert!(!publish(&mut maps, &of(successor, 2), 2));
        let restarts = maps.layout().former.as_ref().and_then(|former| former.restarts.clone()).expect("restarts");
        assert_eq!((restarts.at, restarts.incarnations), (Epoch(2), vec![(NodeId(2), Incarnation(1))]));
        assert!(publish(&mut maps, &of(Incarnation::line_from(successor.0), 2), 2), "it restarts");
    }

    #[test]
    fn owner_restarts_are_recorded_with_two_replicas() {
        for (replicas, is_noted) in [(1, false), (2, true)] {
            let mut maps = MapHistory::new(replicas);
            publish(&mut maps, &[member(1, 1, 10), member(2, 1, 10)], replicas);
            assert_eq!(publish(&mut maps, &[member(1, 2, 10), member(2, 1, 10)], replicas), is_noted);
            let moved_at = if is_noted { Epoch(2) } else { Epoch(1) };
            assert_eq!((maps.layout().since, maps.moved_at()), (Epoch(1), moved_at));
        }
    }
}
