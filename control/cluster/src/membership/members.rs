//! Table of nodes: the state of each node's latest incarnation.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{MAX_MAP_SHARDS, Member};

use super::devices::DeviceTable;
use super::effects::Effects;
use crate::config::ClusterConfig;
use crate::message::Load;
use crate::record::{MemberRecord, Record, RecordKey};
use crate::rejection::Rejection;
use crate::state::MemberState;

/// Validity of a member's announcement that it is about to end, in heartbeat intervals. A member that does not repeat
/// it within that time stays.
pub const ENDS_INTERVALS: u64 = 2;

/// State of a node.
pub(crate) struct Row {
    pub(crate) member: Member,
    pub(crate) state: MemberState,
    pub(crate) capacity_bytes: u64,
    pub(crate) version: String,
    pub(crate) load: Option<Load>,
    /// Time from which silence counts: of the last sign of life, or later if a grace was given.
    pub(crate) heard_ns: u64,
    /// True once the node has sent a message since this control plane started.
    pub(crate) heard: bool,
    /// Time at which this incarnation joined, or the control plane started.
    pub(crate) joined_ns: u64,
    /// Newest epoch when this incarnation ended; orders the ended incarnations.
    pub(crate) ended: Epoch,
    /// True if the map gives the node a share of the slots.
    pub(crate) shared: bool,
    /// Map as of which the node has fetched everything that migrated to it; `None` for an incarnation that does not
    /// report it.
    pub(crate) settled: Option<Epoch>,
    /// True for a newcomer: its devices have no objects of the slots that it is to get, and its share waits for absent
    /// nodes.
    pub(crate) newcomer: bool,
    /// Evidence about the node from other sources than its own heartbeats.
    pub(crate) seen: Evidence,
}

/// Evidence about a member from other sources than its own heartbeats.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evidence {
    /// True once its ports have answered this control plane.
    pub(crate) answered: bool,
    /// Time at which it was last reported to be silent.
    pub(crate) reported_ns: Option<u64>,
    /// Port probes without an answer since its ports answered last.
    pub(crate) unanswered: Option<UnansweredProbes>,
    /// True if its ports, or reports, proved while it was silent that it is dead.
    pub(crate) dead: bool,
    /// True if its incarnation has ended and announced that another will begin.
    pub(crate) restarts: bool,
    /// Time at which it last announced that it is about to end.
    pub(crate) ends_ns: Option<u64>,
}

/// Port probes of a member without an answer, none of them answered in between.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnansweredProbes {
    /// Time at which the first one had found no answer.
    pub(crate) first_ns: u64,
    /// Time at which the last one had found no answer.
    pub(crate) last_ns: u64,
}

impl UnansweredProbes {
    /// Returns the probes with another one that has found no answer. Probes before a gap of more than `gap_ns` do not
    /// count: the ports may have answered in it.
    pub(crate) fn with(before: Option<Self>, now_ns: u64, gap_ns: u64) -> Self {
        match before.filter(|before| now_ns.saturating_sub(before.last_ns) <= gap_ns) {
            Some(before) => Self { last_ns: now_ns, ..before },
            None => Self { first_ns: now_ns, last_ns: now_ns },
        }
    }
}

impl Row {
    /// Creates the row of a node that was heard from at `now_ns`, without capacity and version.
    pub(super) fn new(member: Member, state: MemberState, now_ns: u64) -> Self {
        Self {
            member,
            state,
            capacity_bytes: 0,
            version: String::new(),
            load: None,
            heard_ns: now_ns,
            heard: true,
            joined_ns: now_ns,
            ended: Epoch(0),
            shared: false,
            settled: None,
            newcomer: false,
            seen: Evidence::default(),
        }
    }

    pub(crate) fn record(&self) -> Record {
        let state = if self.state == MemberState::Suspect { MemberState::Active } else { self.state };
        Record::Member(MemberRecord {
            member: self.member.clone(),
            state,
            ended: self.ended,
            capacity_bytes: self.capacity_bytes,
            version: self.version.clone(),
        })
    }

    /// Returns the time at which silence next changes the state of this member, after `now_ns`.
    pub(super) fn due_ns(&self, config: &ClusterConfig, now_ns: u64) -> Option<u64> {
        let patience_ns = match self.state {
            MemberState::Active => config.suspect_after_ns,
            MemberState::Joining | MemberState::Suspect | MemberState::Draining => config.heartbeat_deadline_ns,
            MemberState::Dead | MemberState::Left => return None,
        };
        // A time beyond the end of the clock is never.
        let due_ns = self.heard_ns.checked_add(patience_ns)?;
        if !self.seen.dead && due_ns > now_ns {
            return Some(due_ns);
        }
        // A dead member that waits longer waits for another one, whose deadline is the next.
        let ends = [self.waits_for_late_until_ns(config), self.waits_until_ns(config)];
        ends.into_iter().filter(|at_ns| *at_ns > now_ns).min()
    }

    /// Returns the end of the time for which the member counts as about to end; `None` if that is not after `now_ns`.
    pub(super) fn ends_until_ns(&self, config: &ClusterConfig, now_ns: u64) -> Option<u64> {
        let for_ns = config.heartbeat_interval_ns.saturating_mul(ENDS_INTERVALS);
        let until_ns = self.seen.ends_ns?.saturating_add(for_ns);
        (until_ns > now_ns).then_some(until_ns)
    }

    /// Returns true if the member is to own slots.
    pub(super) fn wants_share(&self) -> bool {
        self.state.in_map() && self.state != MemberState::Draining && self.member.weight > 0
    }

    /// Returns the time until which a dead member waits for owners that have missed a heartbeat, too: a heartbeat
    /// interval after its ports' silence was long enough.
    pub(super) const fn waits_for_late_until_ns(&self, config: &ClusterConfig) -> u64 {
        self.heard_ns.saturating_add(config.unanswered_after_ns.saturating_add(config.heartbeat_interval_ns))
    }

    /// Returns the time at which the member leaves the map at the latest, once it is dead.
    pub(crate) const fn waits_until_ns(&self, config: &ClusterConfig) -> u64 {
        let patience_ns = match self.seen.dead {
            true => config.unanswered_after_ns.saturating_mul(2),
            false => config.heartbeat_deadline_ns.saturating_mul(2),
        };
        self.heard_ns.saturating_add(patience_ns)
    }

    /// Returns true for a live member whose ports or silence prove that it is dead.
    pub(super) fn is_dead(&self, config: &ClusterConfig, now_ns: u64) -> bool {
        let silent_ns = now_ns.saturating_sub(self.heard_ns);
        let is_silent = self.state != MemberState::Active && silent_ns >= config.heartbeat_deadline_ns;
        self.state.is_live() && (self.seen.dead || is_silent)
    }
}

/// All known nodes, ended incarnations included.
#[derive(Default)]
pub(crate) struct Members {
    rows: BTreeMap<NodeId, Row>,
}

impl Members {
    pub(crate) fn get(&self, node: NodeId) -> Option<&Row> {
        self.rows.get(&node)
    }

    pub(super) fn get_mut(&mut self, node: NodeId) -> Option<&mut Row> {
        self.rows.get_mut(&node)
    }

    /// Returns true if this is the present incarnation of a node, and it has sent nothing since it joined.
    pub(crate) fn is_joining(&self, node: NodeId, incarnation: Incarnation) -> bool {
        let row = self.rows.get(&node).filter(|row| row.member.incarnation == incarnation);
        row.is_some_and(|row| row.state == MemberState::Joining)
    }

    /// Returns the row of a known node.
    ///
    /// # Panics
    /// When the node is not known.
    pub(super) fn row(&self, node: NodeId) -> &Row {
        &self.rows[&node]
    }

    /// Returns the row of a known node, to be changed.
    ///
    /// # Panics
    /// When the node is not known.
    pub(super) fn row_mut(&mut self, node: NodeId) -> &mut Row {
        self.rows.get_mut(&node).expect("a node whose row is changed is known")
    }

    pub(super) fn insert(&mut self, row: Row) {
        self.rows.insert(row.member.node, row);
    }

    /// Returns the rows, by node.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Row> {
        self.rows.values()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Row> {
        self.rows.values_mut()
    }

    /// Returns the number of live members.
    pub(crate) fn live_count(&self) -> usize {
        self.rows.values().filter(|row| row.state.is_live()).count()
    }

    /// Returns true if this is the present incarnation of a node, and it is live.
    pub(crate) fn is_live(&self, node: NodeId, incarnation: Incarnation) -> bool {
        self.rows.get(&node).is_some_and(|row| row.state.is_live() && row.member.incarnation == incarnation)
    }

    /// Returns the members of the map, each with its share as weight.
    pub(super) fn of_map(&self) -> Vec<Member> {
        let share = |row: &Row| if row.shared { row.member.weight } else { 0 };
        let members = self.rows.values().filter(|row| row.state.in_map());
        members.map(|row| Member { weight: share(row), ..row.member.clone() }).collect()
    }

    /// Returns the given incarnation, or the present one if none is given.
    pub(super) fn given_or_present(&self, node: NodeId, given: Option<Incarnation>) -> Incarnation {
        let known = self.rows.get(&node).map(|row| row.member.incarnation);
        given.or(known).unwrap_or(Incarnation(0))
    }

    /// Returns the row of a node whose latest known incarnation this is; rejects other incarnations.
    pub(super) fn expect_incarnation(&mut self, node: NodeId, given: Incarnation) -> Result<&mut Row, Rejection> {
        self.check_incarnation(node, given)?;
        Ok(self.row_mut(node))
    }

    /// Returns the row of a node whose latest known incarnation this is; rejects other incarnations and an ended one.
    pub(super) fn expect_live(&mut self, node: NodeId, incarnation: Incarnation) -> Result<&mut Row, Rejection> {
        self.check_live(node, incarnation)?;
        Ok(self.row_mut(node))
    }

    fn check_incarnation(&self, node: NodeId, given: Incarnation) -> Result<&Row, Rejection> {
        let Some(row) = self.rows.get(&node).filter(|row| given <= row.member.incarnation) else {
            return Err(Rejection::Unknown { node, incarnation: given });
        };
        let known = row.member.incarnation;
        if given < known {
            return Err(Rejection::StaleIncarnation { node, given, known });
        }
        Ok(row)
    }

    /// Rejects an incarnation that is not the latest known one of the node, or has ended.
    pub(crate) fn check_live(&self, node: NodeId, incarnation: Incarnation) -> Result<(), Rejection> {
        let state = self.check_incarnation(node, incarnation)?.state;
        if state.is_live() { Ok(()) } else { Err(Rejection::Ended { node, incarnation, state }) }
    }

    /// Rejects a second node with the id of a live one that listens at another place.
    pub(super) fn refuse_second_live(
        &self,
        newcomer: &Member,
        config: &ClusterConfig,
        now_ns: u64,
    ) -> Result<(), Rejection> {
        let row = self.row(newcomer.node);
        let silent_at_ns = row.heard_ns.saturating_add(config.suspect_after_ns);
        if !row.state.is_live() || !row.heard || now_ns >= silent_at_ns || same_place(&row.member, newcomer) {
            return Ok(());
        }
        Err(Rejection::NodeIdInUse {
            node: newcomer.node,
            host: row.member.host.clone(),
            address: row.member.shards.first().map(|shard| shard.tcp),
            retry_after_ns: silent_at_ns - now_ns,
        })
    }

    /// Rejects a newcomer if the members, or the shards of the map, would exceed their limits.
    pub(super) fn refuse_over_limit(&self, newcomer: &Member, limit: usize) -> Result<(), Rejection> {
        let others = || self.rows.values().filter(|row| row.state.is_live() && row.member.node != newcomer.node);
        if others().count() >= limit {
            return Err(Rejection::TooManyMembers { limit });
        }
        let wanted = others().map(|row| row.member.shards.len()).sum::<usize>() + newcomer.shards.len();
        if wanted > MAX_MAP_SHARDS {
            return Err(Rejection::TooManyShards { wanted });
        }
        Ok(())
    }

    /// Rejects the drain of a live member if no other member can take its slots.
    pub(super) fn refuse_last_owner(&self, node: NodeId, config: &ClusterConfig, now_ns: u64) -> Result<(), Rejection> {
        let ends = |row: &Row| row.seen.restarts || row.ends_until_ns(config, now_ns).is_some();
        let stays = |row: &Row| row.state.is_live() && row.state != MemberState::Draining && !ends(row);
        let takes = |row: &Row| stays(row) && row.member.weight > 0;
        if self.row(node).state.is_live() && !self.rows.values().any(|row| row.member.node != node && takes(row)) {
            return Err(Rejection::LastOwner { node });
        }
        Ok(())
    }

    /// Keeps the number of remembered ended incarnations within its limit: those that ended first are forgotten, with
    /// their devices.
    pub(super) fn forget_longest_ended(&mut self, limit: usize, devices: &mut DeviceTable, effects: &mut Effects) {
        let ended = self.rows.iter().filter(|(_, row)| !row.state.is_live());
        let mut ended: Vec<(Epoch, NodeId)> = ended.map(|(&node, row)| (row.ended, node)).collect();
        let excess = ended.len().saturating_sub(limit);
        if excess > 0 {
            ended.sort_unstable();
        }
        for &(_, node) in &ended[..excess] {
            self.rows.remove(&node);
            devices.forget(node, effects);
            effects.remove(RecordKey::Member(node));
        }
    }

    /// Returns true until a member has reported that it follows the last map that moved slots, of epoch `moved`, and
    /// has fetched everything that migrated to it; false for a member that never reports.
    pub(crate) fn is_behind(&self, node: NodeId, moved: Epoch) -> bool {
        self.rows.get(&node).and_then(|row| row.settled).is_some_and(|epoch| epoch < moved)
    }

    /// Postpones the deadlines of all members by `by_ns`.
    pub(super) fn forgive(&mut self, by_ns: u64) {
        for row in self.rows.values_mut() {
            row.heard_ns = row.heard_ns.saturating_add(by_ns);
        }
    }

    /// Returns the first time at which silence changes the state of a member, after `now_ns`.
    pub(super) fn first_due_ns(&self, config: &ClusterConfig, now_ns: u64) -> Option<u64> {
        self.rows.values().filter_map(|row| row.due_ns(config, now_ns)).min()
    }
}

/// Returns true if both listen on the same ports of the same host. For a member without shards, which listens nowhere,
/// this is unknown and false.
fn same_place(one: &Member, other: &Member) -> bool {
    one.host == other.host
        && !one.shards.is_empty()
        && one.shards.len() == other.shards.len()
        && one.shards.iter().zip(&other.shards).all(|(one, other)| one.tcp == other.tcp)
}
