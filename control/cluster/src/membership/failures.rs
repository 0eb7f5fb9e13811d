//! When a silent member is expelled: by itself, or together with others that are silent.
//!
//! A member is dead when its silence lasts up to the deadline. Where slots have two owners it is dead earlier, if its
//! ports refuse connections, or do not answer while others are heard.
//!
//! **Members that die together are expelled by one map.** The slots of a dead member pass to heirs, and what it has on
//! its devices counts again only if each heir can tell what was changed meanwhile. An heir that is dead too tells
//! nothing: slots that passed to it for the moment between two maps would be void, although nobody served them. So a
//! dead member with devices stays in the map while another owner has not been heard since, and it is not known yet
//! whether that one is dead. Then one map expels all that are, and each slot passes to an owner that lives, or to none.
//!
//! It waits for no longer than twice the time after which it was dead: two more heartbeats where its ports told, the
//! deadline once more where silence did. Only a control plane that restarted among the deaths waits for longer: an
//! owner that it never heard may be dead until it is heard, or until its grace ends.

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::Member;

use crate::cluster::{Cluster, Row};
use crate::config::ClusterConfig;
use crate::message::Reply;
use crate::rejection::Rejection;
use crate::state::{MemberEvent, MemberState};

impl Row {
    /// Until when it is in the map at most, once it is dead.
    pub(crate) const fn waits_until_ns(&self, config: &ClusterConfig) -> u64 {
        let patience_ns = match self.seen.dead {
            true => config.heartbeat_interval_ns.saturating_mul(4),
            false => config.heartbeat_deadline_ns.saturating_mul(2),
        };
        self.heard_ns.saturating_add(patience_ns)
    }

    /// True for a member of the map whose ports or silence say that it is dead.
    fn is_dead(&self, config: &ClusterConfig, now_ns: u64) -> bool {
        let silent_ns = now_ns.saturating_sub(self.heard_ns);
        let is_silent = self.state != MemberState::Active && silent_ns >= config.heartbeat_deadline_ns;
        self.state.is_live() && (self.seen.dead || is_silent)
    }
}

impl Cluster {
    /// Members of the map that have missed a heartbeat: they are taken for dead if their ports refuse connections, or
    /// do not answer while others are heard.
    pub fn silent(&self, now_ns: u64) -> impl Iterator<Item = &Member> {
        self.silent_for(self.late_ns(), now_ns)
    }

    /// Members of the map of which nothing was heard since the control plane started, more than two heartbeat intervals
    /// ago: those whose ports refuse connections died meanwhile, however many owners slots have. Members with devices
    /// are not among them, as what is on these is worth the grace.
    pub fn unheard(&self, now_ns: u64) -> impl Iterator<Item = &Member> {
        let (grace_ns, late_ns) = (self.config.restart_grace_ns, self.config.heartbeat_interval_ns.saturating_mul(2));
        let late = move |row: &&Row| now_ns > row.heard_ns.saturating_sub(grace_ns).saturating_add(late_ns);
        let rows = self.rows.values().filter(|row| !row.heard && row.state.in_map()).filter(late);
        rows.map(|row| &row.member).filter(|member| !self.devices.contains_key(&member.node))
    }

    /// The silence of a member that has missed a heartbeat.
    const fn late_ns(&self) -> u64 {
        self.config.heartbeat_interval_ns + self.config.heartbeat_interval_ns / 10
    }

    /// Members of the map, of slots with two owners, that have not been heard of for longer than this.
    fn silent_for(&self, late_ns: u64, now_ns: u64) -> impl Iterator<Item = &Member> {
        let several = self.map.replicas > 1;
        let rows = self.rows.values().filter(move |row| several && row.heard && row.state.in_map());
        rows.filter(move |row| now_ns.saturating_sub(row.heard_ns) > late_ns).map(|row| &row.member)
    }

    pub(crate) fn refused(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.expect_live(node, incarnation)?;
        // What is on devices need not be compared with what others did meanwhile if the node comes back before others
        // get its slots: it has a little longer.
        let late_ns = self.config.heartbeat_interval_ns + self.config.heartbeat_interval_ns / 2;
        let restarts = self.devices.contains_key(&node) && !self.is_silent_for(late_ns, node);
        let silent = !restarts && self.silent(self.now_ns).any(|member| member.node == node);
        if silent || self.unheard(self.now_ns).any(|member| member.node == node) {
            self.find_dead(node);
        }
        Ok(Reply::Ticked)
    }

    pub(crate) fn unanswered(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.expect_live(node, incarnation)?;
        if self.silent_for_two(node) && !self.is_cut_off(node) {
            self.find_dead(node);
        }
        Ok(Reply::Ticked)
    }

    pub(crate) fn answered(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.expect_live(node, incarnation)?;
        self.rows.get_mut(&node).expect("a node whose incarnation was found is known").seen.answered = true;
        Ok(Reply::Ticked)
    }

    pub(crate) fn reported(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.expect_live(node, incarnation)?;
        self.rows.get_mut(&node).expect("a node whose incarnation was found is known").seen.reported_ns =
            Some(self.now_ns);
        self.believe_reports();
        Ok(Reply::Ticked)
    }

    /// Takes members for dead that are silent and were reported to be so lately, if nobody knows better. Heartbeats of
    /// others say when: a report may come before the second one is missed.
    pub(crate) fn believe_reports(&mut self) {
        let late_ns = self.config.heartbeat_interval_ns.saturating_mul(2);
        let told = |row: &&Row| row.seen.reported_ns.is_some_and(|at_ns| self.now_ns.saturating_sub(at_ns) <= late_ns);
        let told = self.rows.values().filter(told).filter(|row| !row.seen.answered && row.state.is_live());
        for node in told.map(|row| row.member.node).collect::<Vec<_>>() {
            // Others may be expelled with one of them.
            if self.silent_for_two(node) && !self.is_cut_off(node) {
                self.find_dead(node);
            }
        }
    }

    /// True for a member that has been silent for two heartbeat intervals.
    fn silent_for_two(&self, node: NodeId) -> bool {
        self.is_silent_for(self.config.heartbeat_interval_ns.saturating_mul(2), node)
    }

    fn is_silent_for(&self, late_ns: u64, node: NodeId) -> bool {
        self.silent_for(late_ns, self.now_ns).any(|member| member.node == node)
    }

    /// True while most other members are silent too: a control plane that is cut off is then more likely than their
    /// deaths at the same time.
    fn is_cut_off(&self, node: NodeId) -> bool {
        let others = self.rows.values().filter(|row| row.state.in_map() && row.member.node != node).count();
        let silent = self.silent(self.now_ns).filter(|member| member.node != node).count();
        (others - silent) * 2 < others || others == 0
    }

    fn find_dead(&mut self, node: NodeId) {
        let row = self.rows.get_mut(&node).expect("a node whose incarnation was found is known");
        row.seen.dead = true;
        self.expel_dead();
        self.arm_member(node);
    }

    /// Members that have been silent for long become suspect.
    pub(crate) fn suspect_silent(&mut self) {
        let (now_ns, least_ns) = (self.now_ns, self.config.suspect_after_ns);
        let active = self.rows.iter().filter(|(_, row)| row.state == MemberState::Active);
        let silent = active.filter(|(_, row)| now_ns.saturating_sub(row.heard_ns) >= least_ns);
        for node in silent.map(|(&node, _)| node).collect::<Vec<_>>() {
            self.step(node, MemberEvent::Silence);
            self.counters.suspicions += 1;
        }
    }

    /// Expels the members that are dead, as far as none of them waits for others.
    pub(crate) fn expel_dead(&mut self) {
        let dead = self.rows.iter().filter(|(_, row)| row.is_dead(&self.config, self.now_ns));
        let mut dead: Vec<NodeId> = dead.map(|(&node, _)| node).collect();
        if !dead.is_empty() && self.may_die_together(&dead) {
            dead.retain(|node| !self.has_slots_on_devices(*node));
        }
        dead.into_iter().for_each(|node| self.lose(node));
    }

    /// True for a node that owns slots and has devices: their contents would be void if a dead heir got the slots.
    fn has_slots_on_devices(&self, node: NodeId) -> bool {
        self.rows[&node].shared && self.devices.contains_key(&node)
    }

    /// True while another owner may have died with one of these, and none has waited for long enough. A dead member
    /// died within a heartbeat interval of its last sign of life: an owner that was heard after that, and is not late
    /// since, lives on.
    fn may_die_together(&self, dead: &[NodeId]) -> bool {
        let waiting = || dead.iter().filter(|node| self.has_slots_on_devices(**node)).map(|node| &self.rows[node]);
        let is_over = waiting().any(|row| row.waits_until_ns(&self.config) <= self.now_ns);
        let last_ns = waiting().map(|row| row.heard_ns).max().unwrap_or(0);
        let incarnations_from_ns = last_ns.saturating_add(self.config.heartbeat_interval_ns);
        let may_be_dead = |row: &Row| {
            let owns = row.shared && row.state.in_map();
            let is_late = self.now_ns.saturating_sub(row.heard_ns) > self.late_ns();
            let was_heard_before = !is_over && (is_late || row.heard_ns <= incarnations_from_ns);
            owns && (!row.heard || was_heard_before) && !row.is_dead(&self.config, self.now_ns)
        };
        self.rows.values().any(may_be_dead)
    }

    fn lose(&mut self, node: NodeId) {
        let row = &self.rows[&node];
        let (incarnation, was_active) = (row.member.incarnation, row.state == MemberState::Active);
        if was_active {
            self.step(node, MemberEvent::Silence);
            self.counters.suspicions += 1;
        }
        self.lost.push((node, incarnation));
        self.counters.losses += 1;
        self.end(node, MemberEvent::Deadline);
    }
}
