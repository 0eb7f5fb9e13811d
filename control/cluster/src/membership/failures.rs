//! Failure detection: silent members, dead members, and the time at which dead ones are expelled.
//!
//! A member is dead when its silence reaches the deadline. Where slots have two owners it is dead earlier, if its ports
//! refuse connections, or do not answer while other members are heard from.
//!
//! **Members that die together are expelled by one map.** The slots of a dead member pass to heirs, and the objects on
//! its devices count again only if each heir can report the changes made meanwhile. An heir that is dead too reports
//! nothing: slots that passed to it for the moment between two maps would be void, although no request was served from
//! them. So a dead member with devices stays in the map while another owner has not been heard from since the death,
//! and it is not known yet whether that owner is dead. Then one map expels all dead members, and each slot passes to an
//! owner that lives, or to none.
//!
//! Where slots have several owners, members without devices wait in the same way, but only for owners that have missed
//! a heartbeat, and a heartbeat interval at most: objects in memory whose owner and first replica owner die together
//! stay with the next replica owner, if no map names a dead owner in between.
//!
//! The wait for devices is at most twice the time after which the member was dead: two more heartbeat intervals if
//! its ports were the evidence, the deadline once more if silence was. Only a control plane that restarted among the
//! deaths waits longer: an owner that has not sent anything since the restart may be dead until its first heartbeat
//! arrives, or until its grace ends.

use kvplane_proto::ids::NodeId;
use kvplane_proto::map::Member;

use super::devices::DeviceTable;
use super::members::{Members, Row};
use crate::config::ClusterConfig;
use crate::state::MemberState;

/// Snapshot of the members at one moment. The detector decides; the membership acts.
#[derive(Clone, Copy)]
pub(crate) struct FailureDetector<'a> {
    pub(super) config: &'a ClusterConfig,
    pub(super) members: &'a Members,
    pub(super) devices: &'a DeviceTable,
    /// Owners of each slot.
    pub(super) replicas: u8,
    pub(super) now_ns: u64,
}

impl<'a> FailureDetector<'a> {
    /// Returns the members of the map that have missed a heartbeat: they are considered dead if their ports refuse
    /// connections, or do not answer while other members are heard from.
    pub(crate) fn silent(self) -> impl Iterator<Item = &'a Member> {
        self.silent_for(self.late_ns())
    }

    /// Returns the members of the map that have sent nothing since the control plane started, more than two heartbeat
    /// intervals ago: those whose ports refuse connections died meanwhile, regardless of the replica count. Members
    /// with devices are excluded, because the objects on their devices are worth the restart grace.
    pub(crate) fn unheard(self) -> impl Iterator<Item = &'a Member> {
        let (grace_ns, late_ns) = (self.config.restart_grace_ns, self.config.heartbeat_interval_ns.saturating_mul(2));
        let is_late = move |row: &&Row| self.now_ns > row.heard_ns.saturating_sub(grace_ns).saturating_add(late_ns);
        let rows = self.members.iter().filter(|row| !row.heard && row.state.in_map()).filter(is_late);
        rows.map(|row| &row.member).filter(move |member| !self.devices.has(member.node))
    }

    /// Returns the silence after which a member has missed a heartbeat, in nanoseconds.
    const fn late_ns(self) -> u64 {
        self.config.heartbeat_interval_ns + self.config.heartbeat_interval_ns / 10
    }

    /// Returns the members of the map that have been silent for longer than `late_ns`; none unless slots have two
    /// owners.
    fn silent_for(self, late_ns: u64) -> impl Iterator<Item = &'a Member> {
        let several = self.replicas > 1;
        let rows = self.members.iter().filter(move |row| several && row.heard && row.state.in_map());
        rows.filter(move |row| self.now_ns.saturating_sub(row.heard_ns) > late_ns).map(|row| &row.member)
    }

    fn is_silent_for(self, late_ns: u64, node: NodeId) -> bool {
        self.silent_for(late_ns).any(|member| member.node == node)
    }

    /// Returns true if a member whose ports refuse connections is dead.
    pub(super) fn is_dead_if_refused(self, node: NodeId) -> bool {
        // If the node comes back before other owners get its slots, the records on its devices need no reconciliation:
        // it has a little more time.
        let late_ns = self.config.heartbeat_interval_ns + self.config.heartbeat_interval_ns / 2;
        let restarts = self.devices.has(node) && !self.is_silent_for(late_ns, node);
        let silent = !restarts && self.silent().any(|member| member.node == node);
        silent || self.unheard().any(|member| member.node == node)
    }

    /// Returns true if a member is dead whose ports do not answer, or that peers report to be silent: it has missed a
    /// heartbeat, its silence is long enough together with that of its ports after the first probe without an answer,
    /// and this control plane is not cut off.
    ///
    /// Both silences count, so that a member whose last heartbeat arrived after its ports had fallen silent is not dead
    /// later: where packets to it are lost, but not those from it, one more heartbeat arrives.
    pub(super) fn is_dead_if_unanswered(self, node: NodeId, ports_silent_ns: u64) -> bool {
        let least_ns = self.config.unanswered_after_ns.saturating_sub(ports_silent_ns).max(self.late_ns());
        self.is_silent_for(least_ns, node) && !self.is_cut_off(node)
    }

    /// Returns the members of the map that a peer has reported to be silent within the last two heartbeat intervals,
    /// and whose ports have answered before: a probe of these tells more than the report.
    pub(crate) fn reported_silent(self) -> impl Iterator<Item = &'a Member> {
        let several = self.replicas > 1;
        let rows = self.members.iter().filter(move |row| several && row.heard && row.state.in_map());
        rows.filter(move |row| row.seen.answered && self.was_reported(row)).map(|row| &row.member)
    }

    /// Returns true if a peer has reported a member to be silent within the last two heartbeat intervals.
    fn was_reported(self, row: &Row) -> bool {
        let recent_ns = self.config.heartbeat_interval_ns.saturating_mul(2);
        row.seen.reported_ns.is_some_and(|at_ns| self.now_ns.saturating_sub(at_ns) <= recent_ns)
    }

    /// Returns the members that were recently reported to be silent, and whose ports have not answered this control
    /// plane.
    pub(super) fn reported(self) -> Vec<NodeId> {
        let told = self.members.iter().filter(|row| self.was_reported(row));
        let told = told.filter(|row| !row.seen.answered && row.state.is_live());
        told.map(|row| row.member.node).collect()
    }

    /// Returns true while most other members are silent too: it is then more likely that this control plane is cut off
    /// than that all of them died at the same time.
    fn is_cut_off(self, node: NodeId) -> bool {
        let others = self.members.iter().filter(|row| row.state.in_map() && row.member.node != node).count();
        let silent = self.silent().filter(|member| member.node != node).count();
        (others - silent) * 2 < others || others == 0
    }

    /// Returns the active members that have been silent for long enough to be suspect.
    pub(super) fn suspects(self) -> Vec<NodeId> {
        let active = self.members.iter().filter(|row| row.state == MemberState::Active);
        let is_silent = |row: &&Row| self.now_ns.saturating_sub(row.heard_ns) >= self.config.suspect_after_ns;
        active.filter(is_silent).map(|row| row.member.node).collect()
    }

    /// Returns the dead members that wait for no other member.
    pub(super) fn expellable(self) -> Vec<NodeId> {
        let dead = self.members.iter().filter(|row| row.is_dead(self.config, self.now_ns));
        let mut dead: Vec<NodeId> = dead.map(|row| row.member.node).collect();
        if !dead.is_empty() && self.may_die_together(&dead) {
            dead.retain(|node| !self.has_slots_on_devices(*node));
        }
        if !dead.is_empty() && self.is_another_late(&dead) {
            dead.retain(|node| !self.members.row(*node).shared);
        }
        dead
    }

    /// Returns true while another owner has missed a heartbeat, so that it may be dead too, and none of `dead` has
    /// waited for long enough.
    fn is_another_late(self, dead: &[NodeId]) -> bool {
        let is_over = |node: &NodeId| self.members.row(*node).waits_for_late_until_ns(self.config) <= self.now_ns;
        let may_live = |row: &Row| row.shared && !row.is_dead(self.config, self.now_ns);
        !dead.iter().any(is_over) && self.silent().any(|member| may_live(self.members.row(member.node)))
    }

    /// Returns true for a node that owns slots and has devices: their contents would be void if a dead heir got the
    /// slots.
    fn has_slots_on_devices(self, node: NodeId) -> bool {
        self.members.row(node).shared && self.devices.has(node)
    }

    /// Returns true while another owner may have died together with one of `dead`, and none of these has waited for
    /// long enough. A dead member died within a heartbeat interval of its last sign of life: an owner that was heard
    /// from after that, and is not late since, is alive.
    fn may_die_together(self, dead: &[NodeId]) -> bool {
        let waiting =
            || dead.iter().filter(|node| self.has_slots_on_devices(**node)).map(|node| self.members.row(*node));
        let is_over = waiting().any(|row| row.waits_until_ns(self.config) <= self.now_ns);
        let last_ns = waiting().map(|row| row.heard_ns).max().unwrap_or(0);
        let lives_from_ns = last_ns.saturating_add(self.config.heartbeat_interval_ns);
        let may_be_dead = |row: &Row| {
            let owns = row.shared && row.state.in_map();
            let is_late = self.now_ns.saturating_sub(row.heard_ns) > self.late_ns();
            let was_heard_before = !is_over && (is_late || row.heard_ns <= lives_from_ns);
            owns && (!row.heard || was_heard_before) && !row.is_dead(self.config, self.now_ns)
        };
        self.members.iter().any(may_be_dead)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Epoch, Incarnation};

    use super::*;
    use crate::record::Devices;

    const SECOND: u64 = 1_000_000_000;

    /// Returns four owners of slots: the first was last heard from at 0, the others at these times.
    fn members(heard_ns: [u64; 3]) -> Members {
        let mut members = Members::default();
        for (node, heard_ns) in (1..).zip([0, heard_ns[0], heard_ns[1], heard_ns[2]]) {
            let (failure_domain, host) = (String::new(), String::new());
            let (node, incarnation) = (NodeId(node), Incarnation(1));
            let member = Member { node, incarnation, weight: 10, failure_domain, host, shards: Vec::new() };
            members.insert(Row { shared: true, ..Row::new(member, MemberState::Active, heard_ns) });
        }
        members
    }

    fn detector<'a>(config: &'a ClusterConfig, members: &'a Members, devices: &'a DeviceTable) -> FailureDetector<'a> {
        FailureDetector { config, members, devices, replicas: 2, now_ns: 2 * SECOND }
    }

    #[test]
    fn unanswered_ports_mean_death_unless_most_members_are_silent() {
        let (config, devices) = (ClusterConfig::new("test"), DeviceTable::default());
        let (heard, silent) = (members([2 * SECOND; 3]), members([2 * SECOND, 0, 0]));
        assert!(detector(&config, &heard, &devices).is_dead_if_unanswered(NodeId(1), 0));
        assert!(!detector(&config, &heard, &devices).is_dead_if_unanswered(NodeId(2), 0), "node 2 sends heartbeats");
        assert!(
            !detector(&config, &silent, &devices).is_dead_if_unanswered(NodeId(1), 0),
            "this control plane may be cut off"
        );
        assert!(detector(&config, &silent, &devices).is_dead_if_refused(NodeId(1)), "refused ports prove the death");
        let alone = FailureDetector { replicas: 1, ..detector(&config, &heard, &devices) };
        assert!(!alone.is_dead_if_refused(NodeId(1)), "its slots have one owner");
    }

    #[test]
    fn dead_member_with_devices_waits_until_other_owners_are_known_to_live() {
        let (config, mut devices) = (ClusterConfig::new("test"), DeviceTable::default());
        let (node, incarnation) = (NodeId(1), Incarnation(1));
        // The second was not heard from after the first could have died.
        let mut members = members([SECOND / 4, 2 * SECOND, 2 * SECOND]);
        members.row_mut(node).seen.dead = true;
        assert_eq!(detector(&config, &members, &devices).expellable(), [node]);
        devices.insert(Devices { node, incarnation, devices: 7, since: Epoch(1) });
        let early = FailureDetector { now_ns: 2 * SECOND - 1, ..detector(&config, &members, &devices) };
        assert_eq!(early.expellable(), []);
        assert_eq!(detector(&config, &members, &devices).expellable(), [node], "the wait is at most four intervals");
        members.row_mut(NodeId(2)).heard_ns = 2 * SECOND - 1;
        let early = FailureDetector { now_ns: 2 * SECOND - 1, ..detector(&config, &members, &devices) };
        assert_eq!(early.expellable(), [node], "the other owner lives");
    }

    #[test]
    fn dead_member_waits_a_little_for_owners_that_are_late() {
        let (config, devices) = (ClusterConfig::new("test"), DeviceTable::default());
        // The second has missed a heartbeat, and the others have not.
        let mut members = members([SECOND / 4, SECOND, SECOND]);
        for node in [1, 2] {
            members.row_mut(NodeId(node)).shared = true;
        }
        members.row_mut(NodeId(1)).seen.dead = true;
        let at = |now_ns| FailureDetector { now_ns, ..detector(&config, &members, &devices) }.expellable();
        assert_eq!(at(5 * SECOND / 4), []);
        assert_eq!(at(3 * SECOND / 2), [NodeId(1)], "the wait is over");
        let alone = FailureDetector { now_ns: 5 * SECOND / 4, replicas: 1, ..detector(&config, &members, &devices) };
        assert_eq!(alone.expellable(), [NodeId(1)], "no other node has its objects");
        members.row_mut(NodeId(2)).heard_ns = SECOND;
        let at = |now_ns| FailureDetector { now_ns, ..detector(&config, &members, &devices) }.expellable();
        assert_eq!(at(5 * SECOND / 4), [NodeId(1)], "the other owner lives");
        members.row_mut(NodeId(2)).heard_ns = SECOND / 4;
        members.row_mut(NodeId(2)).seen.dead = true;
        let at = |now_ns| FailureDetector { now_ns, ..detector(&config, &members, &devices) }.expellable();
        assert_eq!(at(5 * SECOND / 4), [NodeId(1), NodeId(2)], "both by one map");
    }
}
