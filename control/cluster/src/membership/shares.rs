//! When slots may change hands again: after what the last change moved has come.
//!
//! A shard that gets a slot fetches what was in it from the owner before. If the slot goes on to a third owner
//! meanwhile, what had not come yet is asked for of nobody; and a shard that misses one of two maps in between has to
//! drop what it has. So a change of owners that can wait does: a member that joins, or that is to be drained, gets or
//! loses its share when all owners have said ([`Input::Settled`]) that they have heard of the change before and that
//! its moves are done. All who wait are served by one change. Until then they are in the map with the share that they
//! had.
//!
//! It also waits until every node that is to own slots has proven that it lives: slots that are given to a node that is
//! dead, or restarts, are lost with it, as the exports of their former owner end with that incarnation. A heartbeat
//! proves nothing: it may have waited in a queue since before the death. So the control plane begins a liveness probe:
//! it publishes a map with the same members, and each taker must say that it follows that map or a later one. A node
//! that is silent instead is expelled at its deadline, and is not waited for any more. An incarnation that never
//! reports ([`Input::Settled`]), or that still has moves to finish after the longest wait for them, proves it by a
//! heartbeat; so does everybody where answers have not come for as long as that.
//!
//! **A newcomer waits for absent nodes, too.** What a dead node has on its devices counts again as far as nobody
//! changed it, and when it is back it is compared with those who have its slots then. Only the slots that it gets back
//! are compared: what it has of the others is lost, though nobody changed it. So while a node with devices is dead,
//! and was heard less than `settle_most_ns` ago, no node gets a share that had none when it died. Nodes that come back
//! with devices of their own do not wait, nor does anybody where no node owns slots.
//!
//! Deaths, farewells and restarts do not wait. Nor is a move waited for beyond `settle_most_ns`, or one
//! of a node that does not report: an incarnation that never did is of an earlier version.
//!
//! [`Input::Settled`]: crate::message::Input::Settled

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};

use crate::cluster::{Cluster, Row};
use crate::message::Reply;
use crate::record::Layout;
use crate::rejection::Rejection;
use crate::state::MemberState;

/// A member that does not report, and was heard this part of a heartbeat interval before the probe, need not be
/// heard again.
const HEARD_SLACK: u64 = 4;

/// Answers to a probe are proof for this many heartbeat intervals: who was the first to answer may have died before
/// the last one did. Where the last answer comes later, another probe begins, which waits for twice as long as that.
const FRESH_INTERVALS: u64 = 2;

/// A request to all nodes that are to own slots to prove that they live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LivenessProbe {
    /// The map that they have to follow.
    epoch: Epoch,
    /// Time at which it was published.
    since_ns: u64,
    /// How long after that the last answer may come.
    fresh_ns: u64,
    /// When a heartbeat is proof enough, as maps do not come through where heartbeats do.
    until_ns: u64,
}

impl Row {
    /// Whether it is to own slots.
    fn wants_share(&self) -> bool {
        self.state.in_map() && self.state != MemberState::Draining && self.member.weight > 0
    }
}

/// Whether a node owned slots when this layout began.
fn owned(layout: &Layout, node: NodeId) -> bool {
    let began = layout.former.as_ref().map_or(&[][..], |former| &former.began);
    began.binary_search_by_key(&node, |(node, _)| *node).is_ok()
}

impl Cluster {
    pub(crate) fn settled(&mut self, node: NodeId, incarnation: Incarnation, epoch: Epoch) -> Result<Reply, Rejection> {
        self.expect_live(node, incarnation)?;
        let row = self.rows.get_mut(&node).expect("a node whose incarnation was found is known");
        row.settled = row.settled.max(Some(epoch));
        self.share_out();
        Ok(Reply::Settled)
    }

    /// A member moved to another state: its share may have to follow.
    pub(crate) fn share_follows(&mut self, node: NodeId) {
        let row = self.rows.get_mut(&node).expect("a node that was stepped is known");
        // What is not in the map has no share, whoever waits for what.
        row.shared &= row.state.in_map();
        if row.shared != row.wants_share() {
            self.want_shares();
        }
        self.share_out();
    }

    /// Shares are to change, as soon as they may.
    const fn want_shares(&mut self) {
        self.share_waits = true;
    }

    /// A member was heard: shares may have waited for that.
    pub(crate) fn share_heard(&mut self) {
        if self.share_waits {
            self.share_out();
        }
    }

    /// Where nobody would own slots, those who have them in the map that all know keep them until there is another, as
    /// they would by a restart of the control plane: whoever was to take them died before any map said so, or one comes
    /// back to be drained and was the last.
    pub(crate) fn keep_owners(&mut self) {
        if self.rows.values().any(|row| row.shared) {
            return;
        }
        let mut kept = false;
        for (node, row) in &mut self.rows {
            if row.state.in_map() && owned(&self.layout, *node) {
                (row.shared, kept) = (true, true);
            }
        }
        if kept {
            self.want_shares();
        }
    }

    /// Gives everybody the share that is due, if anybody waits for that and it may be.
    pub(crate) fn share_out(&mut self) {
        // The last owner keeps its slots until there is another.
        if !self.share_waits || !self.rows.values().any(Row::wants_share) {
            self.probe = None;
            return;
        }
        let absent_until_ns = self.absent_until_ns();
        let is_held = |row: &Row| absent_until_ns.is_some() && row.newcomer && !row.shared;
        if !self.rows.values().any(|row| row.shared != row.wants_share() && !is_held(row)) {
            // Nothing is due before they may get their shares.
            self.probe = None;
            self.arm(absent_until_ns);
            return;
        }
        if self.is_moving() {
            self.probe = None;
            self.arm(Some(self.settle_until_ns));
            return;
        }
        if !self.takers_live() {
            return;
        }
        self.probe = None;
        self.share_waits = false;
        for row in self.rows.values_mut() {
            if is_held(row) {
                self.share_waits |= row.wants_share();
                continue;
            }
            self.map_changed |= row.shared != row.wants_share() && row.member.weight > 0;
            row.shared = row.wants_share();
            row.newcomer &= !row.shared;
        }
        self.arm(absent_until_ns.filter(|_| self.share_waits));
    }

    /// Until when newcomers get no share, as nodes with devices are dead that may come back, or are back and have no
    /// share yet. Nothing where there are no such nodes, and where no node owns slots.
    pub(crate) fn absent_until_ns(&self) -> Option<u64> {
        self.rows.values().find(|row| row.shared)?;
        let absent = self.rows.values().filter(|row| {
            let is_away = matches!(row.state, MemberState::Dead | MemberState::Joining);
            let returns = row.wants_share() && !row.shared;
            (is_away || returns) && !row.newcomer && row.member.weight > 0
        });
        let absent = absent.filter(|row| self.devices.contains_key(&row.member.node));
        let until_ns = absent.map(|row| row.heard_ns.saturating_add(self.config.settle_most_ns)).max()?;
        (until_ns > self.now_ns).then_some(until_ns)
    }

    /// True when each node that is to own slots has answered the probe, which begins where there is none. While no
    /// node owns slots, none can be lost, and nobody needs to answer.
    fn takers_live(&mut self) -> bool {
        if !self.rows.values().any(|row| row.shared) {
            return true;
        }
        let least_ns = self.config.heartbeat_interval_ns.saturating_mul(FRESH_INTERVALS);
        let until_ns = self.now_ns.saturating_add(self.config.settle_most_ns);
        let probe = self.probe.unwrap_or_else(|| self.begin_probe(least_ns, until_ns));
        let passed_ns = self.now_ns.saturating_sub(probe.since_ns);
        let heard_for = |row: &Row, ns: u64| row.heard_ns.saturating_add(ns);
        if self.now_ns >= probe.until_ns {
            let is_alive = |row: &Row| heard_for(row, least_ns) >= self.now_ns;
            return self.takers().all(|row| row.heard && !row.seen.dead && is_alive(row));
        }
        let slack_ns = self.config.heartbeat_interval_ns / HEARD_SLACK;
        let (moved, moved_until_ns) = (self.moved_at(), self.settle_until_ns);
        let is_alive = |row: &Row| {
            // It will not report before its moves are done, which are not waited for any more.
            let moves = row.shared && row.settled < Some(moved) && row.joined_ns < moved_until_ns;
            let reports = row.settled.is_some() && !moves;
            row.settled >= Some(probe.epoch) || !reports && heard_for(row, slack_ns) >= probe.since_ns
        };
        if !self.takers().all(|row| row.heard && !row.seen.dead && is_alive(row)) {
            return false;
        }
        let is_fresh = passed_ns <= probe.fresh_ns;
        if !is_fresh {
            self.begin_probe(passed_ns.saturating_mul(2), probe.until_ns);
        }
        is_fresh
    }

    /// Members that are to own slots.
    fn takers(&self) -> impl Iterator<Item = &Row> {
        self.rows.values().filter(|row| row.wants_share())
    }

    /// Begins a probe: the map that this call of the core publishes, which is new whatever else changes.
    fn begin_probe(&mut self, fresh_ns: u64, until_ns: u64) -> LivenessProbe {
        self.map_changed = true;
        let probe = LivenessProbe { epoch: self.newest_epoch(), since_ns: self.now_ns, fresh_ns, until_ns };
        self.probe = Some(probe);
        self.arm(Some(until_ns));
        probe
    }

    /// True for a probe of the call in progress: its map is still to be published, whatever the members.
    pub(crate) fn begins_probe(&self) -> bool {
        self.probe.is_some_and(|probe| probe.epoch > self.map.epoch)
    }

    /// When the probe needs to be looked at without any input.
    pub(crate) fn probe_until_ns(&self) -> Option<u64> {
        Some(self.probe?.until_ns)
    }

    /// The map by which slots moved last.
    fn moved_at(&self) -> Epoch {
        let restarts = self.layout.former.as_ref().and_then(|former| former.restarts.as_ref());
        restarts.map_or(Epoch(0), |restarts| restarts.at).max(self.layout.since)
    }

    /// Whether an owner may not have all yet that moved to it.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.unsettled().next().is_some()
    }

    /// Owners that may not have all yet that moved to them.
    pub fn unsettled(&self) -> impl Iterator<Item = NodeId> {
        let moved = self.moved_at();
        let lags = move |row: &Row| row.shared && row.settled.is_some_and(|epoch| epoch < moved);
        let waits = self.now_ns < self.settle_until_ns;
        self.rows.iter().filter(move |(_, row)| waits && lags(row)).map(|(node, _)| *node)
    }

    /// Slots have changed hands: the next change waits for this one, so long.
    pub(crate) fn moves_began(&mut self) {
        self.settle_until_ns = self.now_ns.saturating_add(self.config.settle_most_ns);
    }

    /// Who had a share before this start of the control plane has it again. Who has all of it is not known any more.
    pub(crate) fn restore_shares(&mut self) {
        let is_known = self.layout.former.as_ref().is_some_and(|former| !former.began.is_empty());
        for (node, row) in &mut self.rows {
            // A layout that an earlier version remembered does not say who owned what: everybody did.
            row.shared = if !is_known { row.wants_share() } else { row.state.in_map() && owned(&self.layout, *node) };
            row.settled = Some(Epoch(0));
        }
        if self.rows.values().any(|row| row.shared != row.wants_share()) {
            self.want_shares();
        }
        self.moves_began();
    }
}
