//! When slots may change hands again: after what the last change moved has come.
//!
//! A shard that gets a slot fetches what was in it from the owner before. If the slot goes on to a third owner
//! meanwhile, what had not come yet is asked for of nobody; and a shard that misses one of two maps in between has to
//! drop what it has. So a change of owners that can wait does: a member that joins, or that is to be drained, gets or
//! loses its share when all owners have said ([`Input::Settled`]) that they have heard of the change before and that
//! its moves are done. All who wait are served by one change. Until then they are in the map with the share that they
//! had.
//!
//! It also waits until every node that is to own slots was heard after the change was due: slots that are given to a
//! node that is dead, or restarts, are lost with it, as their former owner drops what it fetched from nobody. One
//! heartbeat tells; a node that is silent instead is expelled at its deadline, and is not waited for any more.
//!
//! **A newcomer waits for absent nodes, too.** What a dead node has on its devices counts again as far as nobody
//! changed it, and when it is back it is compared with those who have its slots then. Only the slots that it gets back
//! are compared: what it has of the others is lost, though nobody changed it. So while a node with devices is dead,
//! and was heard less than `settle_most_ns` ago, no node gets a share that had none when it died. Nodes that come back
//! with devices of their own do not wait, nor does anybody where no node owns slots.
//!
//! Deaths, farewells and restarts do not wait. Nor is a move waited for beyond `settle_most_ns`, or one
//! of a node that does not report: a life that never did is of an earlier version.
//!
//! [`Input::Settled`]: crate::message::Input::Settled

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};

use crate::cluster::{Cluster, Row};
use crate::message::Reply;
use crate::record::Layout;
use crate::rejection::Rejection;
use crate::state::MemberState;

/// A member that was heard this part of a heartbeat interval before a change was due need not be heard again.
const HEARD_SLACK: u64 = 4;

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
    pub(crate) fn settled(&mut self, node: NodeId, life: Incarnation, epoch: Epoch) -> Result<Reply, Rejection> {
        self.expect_live(node, life)?;
        let row = self.rows.get_mut(&node).expect("a node whose life was found is known");
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
    fn want_shares(&mut self) {
        if !self.share_waits {
            (self.share_waits, self.share_since_ns) = (true, self.now_ns);
        }
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
            return;
        }
        let absent_until_ns = self.absent_until_ns();
        let is_held = |row: &Row| absent_until_ns.is_some() && row.newcomer && !row.shared;
        if !self.rows.values().any(|row| row.shared != row.wants_share() && !is_held(row)) {
            // Nothing is due before they may get their shares.
            self.share_since_ns = self.now_ns;
            self.arm(absent_until_ns);
            return;
        }
        if self.is_moving() {
            self.arm(Some(self.settle_until_ns));
            return;
        }
        if !self.takers_live() {
            return;
        }
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

    /// True when each node that is to own slots was heard when the change was due, or since. While no node owns slots,
    /// none can be lost, and no heartbeat is awaited.
    fn takers_live(&self) -> bool {
        if !self.rows.values().any(|row| row.shared) {
            return true;
        }
        let slack_ns = self.config.heartbeat_interval_ns / HEARD_SLACK;
        let lives = |row: &Row| row.heard && row.heard_ns.saturating_add(slack_ns) >= self.share_since_ns;
        self.rows.values().filter(|row| row.wants_share()).all(lives)
    }

    /// Whether an owner may not have all yet that moved to it.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.unsettled().next().is_some()
    }

    /// Owners that may not have all yet that moved to them.
    pub fn unsettled(&self) -> impl Iterator<Item = NodeId> {
        let restarts = self.layout.former.as_ref().and_then(|former| former.restarts.as_ref());
        let moved = restarts.map_or(Epoch(0), |restarts| restarts.at).max(self.layout.since);
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
