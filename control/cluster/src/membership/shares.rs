//! Rebalancing: a change of owners that can wait begins once the migrations of the previous one are complete.
//!
//! A shard that gets a slot fetches its objects from the former owner. If the slot moved on to a third owner meanwhile,
//! objects not yet fetched would be lost, because no owner would request them; and a shard that misses one of two
//! successive maps has to drop its objects. So a change of owners that can wait is deferred: a member that joins, or is
//! to be drained, gets or loses its share once all owners have reported ([`Input::Settled`]) that they follow the
//! previous change and that its migrations are complete. One change serves all waiting members. Until then they are in
//! the map with the share that they had.
//!
//! A change also waits until every node that is to own slots has proven that it lives: slots that are given to a node
//! that is dead, or restarts, are lost with it, because the exports of their former owner end with that incarnation. A
//! heartbeat is no proof: it may have been queued since before the death. So the control plane begins a liveness probe:
//! it publishes a map with the same members, and each taker must report that it follows that map or a later one. A node
//! that is silent instead is expelled at its deadline, and no longer waited for. An incarnation that never reports
//! ([`Input::Settled`]), or that still has migrations to finish after the longest wait for them, proves that it lives
//! by a heartbeat; so does every taker once answers to the probe have been missing for the longest wait.
//!
//! A change also waits while one of the takers is about to end, as a node does that stops ([`Input::PrepareLeave`]): an
//! owner that ends in order comes back, but objects that migrate to it or from it at that time are lost.
//!
//! **A newcomer waits for absent nodes, too.** Objects on the devices of a dead node count again as far as they were
//! not changed meanwhile: when the node returns, they are reconciled with the present owners of its slots. Only the
//! slots that the node gets back are reconciled: its objects in other slots are lost, even if unchanged. So while a
//! node with devices is dead, and was heard from less than `settle_most_ns` ago, no node gets a share that had none
//! when it died. Nodes that return with devices of their own do not wait, and no node waits while none owns slots.
//!
//! Deaths, departures and restarts do not wait. No change waits for a migration longer than `settle_most_ns`, or for
//! the migrations of a node that does not report: an incarnation that never did is of an earlier version.
//!
//! [`Input::Settled`]: crate::message::Input::Settled
//! [`Input::PrepareLeave`]: crate::message::Input::PrepareLeave

use kvplane_proto::ids::{Epoch, NodeId};

use super::devices::DeviceTable;
use super::maps::MapHistory;
use super::members::{Members, Row};
use crate::config::ClusterConfig;
use crate::state::MemberState;

/// Divisor of the heartbeat interval: a heartbeat that arrived at most that part of an interval before a probe began is
/// proof enough of a member that does not report.
const HEARD_SLACK: u64 = 4;

/// Validity of the answers to a probe, in heartbeat intervals: the first member to answer may have died before the last
/// one did. If the last answer comes later, another probe begins, whose validity is twice the time that this one took.
const FRESH_INTERVALS: u64 = 2;

/// Request to all nodes that are to own slots to prove that they live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LivenessProbe {
    /// Epoch of the map that the takers must follow.
    epoch: Epoch,
    /// Time of its publication.
    since_ns: u64,
    /// Time after publication within which the last answer must arrive.
    fresh_ns: u64,
    /// Time from which a heartbeat is proof enough, because maps do not reach the takers although their heartbeats
    /// arrive.
    until_ns: u64,
}

/// Inputs of a decision about shares, apart from the members.
#[derive(Clone, Copy)]
pub(super) struct ShareFacts<'a> {
    pub(super) config: &'a ClusterConfig,
    pub(super) devices: &'a DeviceTable,
    pub(super) maps: &'a MapHistory,
    pub(super) now_ns: u64,
}

/// Result of a decision about shares.
#[derive(Default)]
pub(super) struct ShareChange {
    /// True if a new map is to be published: shares changed, or a probe began.
    pub(super) map_changed: bool,
    /// Latest time of the next decision.
    pub(super) at_ns: Option<u64>,
}

impl ShareChange {
    fn look_at(&mut self, at_ns: Option<u64>) {
        self.at_ns = [self.at_ns, at_ns].into_iter().flatten().min();
    }
}

/// Pending change of shares, and the conditions that it waits for.
pub(crate) struct Shares {
    /// True while a member waits for its share, or for losing it.
    waits: bool,
    /// The probe whose answers the change of shares waits for.
    probe: Option<LivenessProbe>,
    /// Time until which the change waits for owners that have not settled.
    settle_until_ns: u64,
}

impl Shares {
    /// Creates the state without a pending change.
    pub(super) const fn new(now_ns: u64) -> Self {
        Self { waits: false, probe: None, settle_until_ns: now_ns }
    }

    /// Requests a change of shares as soon as its conditions hold.
    pub(super) const fn want(&mut self) {
        self.waits = true;
    }

    /// Returns true while a change of shares is pending.
    pub(super) const fn waits(&self) -> bool {
        self.waits
    }

    /// Forgets the probe: answers to it were not received, and those before are stale.
    pub(super) const fn forget_probe(&mut self) {
        self.probe = None;
    }

    /// Restores the shares of the former owners if no node would own slots, as a restart of the control plane would:
    /// they keep the slots until there is another owner. Either the taker died before a map gave it the slots, or the
    /// last owner returned to be drained.
    pub(super) fn keep_owners(&mut self, members: &mut Members, maps: &MapHistory) {
        if members.iter().any(|row| row.shared) {
            return;
        }
        for row in members.iter_mut() {
            if row.state.in_map() && maps.owned(row.member.node) {
                row.shared = true;
                self.waits = true;
            }
        }
    }

    /// Gives each member its due share, if a change is pending and its conditions hold.
    pub(super) fn share_out(&mut self, members: &mut Members, facts: ShareFacts<'_>) -> ShareChange {
        let mut change = ShareChange::default();
        // The last owner keeps its slots until there is another.
        if !self.waits || !members.iter().any(Row::wants_share) {
            self.probe = None;
            return change;
        }
        let absent_until_ns = absent_until_ns(members, facts);
        let is_held = |row: &Row| absent_until_ns.is_some() && row.newcomer && !row.shared;
        if !members.iter().any(|row| row.shared != row.wants_share() && !is_held(row)) {
            // Newcomers that wait for absent nodes are the only ones to change.
            self.probe = None;
            change.look_at(absent_until_ns);
            return change;
        }
        if self.unsettled(members, facts.maps, facts.now_ns).next().is_some() {
            self.probe = None;
            change.look_at(Some(self.settle_until_ns));
            return change;
        }
        if !self.takers_live(members, facts, &mut change) {
            return change;
        }
        self.probe = None;
        self.waits = false;
        for row in members.iter_mut() {
            if is_held(row) {
                self.waits |= row.wants_share();
                continue;
            }
            change.map_changed |= row.shared != row.wants_share() && row.member.weight > 0;
            row.shared = row.wants_share();
            row.newcomer &= !row.shared;
        }
        change.look_at(absent_until_ns.filter(|_| self.waits));
        change
    }

    /// Returns true if each node that is to own slots has answered the probe; begins one if there is none. While no
    /// node owns slots, none can be lost, and no node needs to answer.
    fn takers_live(&mut self, members: &Members, facts: ShareFacts<'_>, change: &mut ShareChange) -> bool {
        if !members.iter().any(|row| row.shared) {
            return true;
        }
        let ShareFacts { config, maps, now_ns, .. } = facts;
        let next = Epoch(maps.map().epoch.0 + 1);
        let takers = || members.iter().filter(|row| row.wants_share());
        if let Some(until_ns) = ends_until_ns(members, facts) {
            // Answers of the node that ends precede its end.
            self.probe = None;
            change.look_at(Some(until_ns));
            return false;
        }
        let least_ns = config.heartbeat_interval_ns.saturating_mul(FRESH_INTERVALS);
        let until_ns = now_ns.saturating_add(config.settle_most_ns);
        let known = self.probe;
        let mut begin = |fresh_ns: u64, until_ns: u64| {
            // Map that this call of the core publishes, which is new even if no member changes.
            change.map_changed = true;
            change.look_at(Some(until_ns));
            LivenessProbe { epoch: next, since_ns: now_ns, fresh_ns, until_ns }
        };
        let probe = known.unwrap_or_else(|| begin(least_ns, until_ns));
        self.probe = Some(probe);
        let passed_ns = now_ns.saturating_sub(probe.since_ns);
        let heard_for = |row: &Row, ns: u64| row.heard_ns.saturating_add(ns);
        if now_ns >= probe.until_ns {
            let is_alive = |row: &Row| heard_for(row, least_ns) >= now_ns;
            return takers().all(|row| row.heard && !row.seen.dead && is_alive(row));
        }
        let slack_ns = config.heartbeat_interval_ns / HEARD_SLACK;
        let (moved, moved_until_ns) = (maps.moved_at(), self.settle_until_ns);
        let is_alive = |row: &Row| {
            // The member does not report before its migrations are complete, which are no longer waited for.
            let moves = row.shared && row.settled < Some(moved) && row.joined_ns < moved_until_ns;
            let reports = row.settled.is_some() && !moves;
            row.settled >= Some(probe.epoch) || !reports && heard_for(row, slack_ns) >= probe.since_ns
        };
        if !takers().all(|row| row.heard && !row.seen.dead && is_alive(row)) {
            return false;
        }
        let is_fresh = passed_ns <= probe.fresh_ns;
        if !is_fresh {
            self.probe = Some(begin(passed_ns.saturating_mul(2), probe.until_ns));
        }
        is_fresh
    }

    /// Returns true for a probe that began in the call in progress, in which `newest` is the epoch of the previous map:
    /// the map of the probe must be published, even with the same members.
    pub(super) fn begins_probe(&self, newest: Epoch) -> bool {
        self.probe.is_some_and(|probe| probe.epoch > newest)
    }

    /// Returns the time at which a pending change is to be decided again without any input, after the time of `facts`.
    pub(super) fn due_ns(&self, members: &Members, facts: ShareFacts<'_>) -> Option<u64> {
        if !self.waits {
            return None;
        }
        let is_later = |at_ns: &u64| *at_ns > facts.now_ns;
        let settles = Some(self.settle_until_ns).filter(is_later);
        let probe = self.probe.map(|probe| probe.until_ns).filter(is_later);
        [settles, absent_until_ns(members, facts), ends_until_ns(members, facts), probe].into_iter().flatten().min()
    }

    /// Returns the owners that may not have fetched everything that migrated to them.
    pub(super) fn unsettled(&self, members: &Members, maps: &MapHistory, now_ns: u64) -> impl Iterator<Item = NodeId> {
        let moved = maps.moved_at();
        let lags = move |row: &Row| row.shared && row.settled.is_some_and(|epoch| epoch < moved);
        let waits = now_ns < self.settle_until_ns;
        members.iter().filter(move |row| waits && lags(row)).map(|row| row.member.node)
    }

    /// Notes that slots have changed hands: the next change waits for these migrations, up to `settle_most_ns`.
    pub(super) const fn moves_began(&mut self, now_ns: u64, config: &ClusterConfig) {
        self.settle_until_ns = now_ns.saturating_add(config.settle_most_ns);
    }

    /// Restores the shares that nodes had before this start of the control plane. Their progress with migrations is
    /// unknown.
    pub(super) fn restore(&mut self, members: &mut Members, maps: &MapHistory) {
        let is_known = maps.knows_owners();
        for row in members.iter_mut() {
            // A layout that an earlier version stored lacks the owners: every node was one.
            row.shared = if is_known { row.state.in_map() && maps.owned(row.member.node) } else { row.wants_share() };
            row.settled = Some(Epoch(0));
        }
        if members.iter().any(|row| row.shared != row.wants_share()) {
            self.want();
        }
    }
}

/// Returns the time until which no node gets or loses slots, because one that has some, or is to get some, is about to
/// end.
fn ends_until_ns(members: &Members, facts: ShareFacts<'_>) -> Option<u64> {
    let owners = members.iter().filter(|row| row.shared || row.wants_share());
    owners.filter_map(|row| row.ends_until_ns(facts.config, facts.now_ns)).max()
}

/// Returns the time until which newcomers get no share, because nodes with devices are dead and may return, or have
/// returned and have no share yet. `None` if there are no such nodes, or if no node owns slots.
fn absent_until_ns(members: &Members, facts: ShareFacts<'_>) -> Option<u64> {
    members.iter().find(|row| row.shared)?;
    let absent = members.iter().filter(|row| {
        let is_away = matches!(row.state, MemberState::Dead | MemberState::Joining);
        let returns = row.wants_share() && !row.shared;
        (is_away || returns) && !row.newcomer && row.member.weight > 0
    });
    let absent = absent.filter(|row| facts.devices.has(row.member.node));
    let until_ns = absent.map(|row| row.heard_ns.saturating_add(facts.config.settle_most_ns)).max()?;
    (until_ns > facts.now_ns).then_some(until_ns)
}
