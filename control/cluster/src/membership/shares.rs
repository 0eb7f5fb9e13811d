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
//! Nor does it happen while one of them is about to end, as nodes are that stop ([`Input::PrepareLeave`]): an owner
//! that ends in order comes back, but what moves to it or from it then is lost.
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
//! [`Input::PrepareLeave`]: crate::message::Input::PrepareLeave

use kvplane_proto::ids::{Epoch, NodeId};

use super::devices::DeviceTable;
use super::maps::MapHistory;
use super::members::{Members, Row};
use crate::config::ClusterConfig;
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

/// What a decision about shares looks at, apart from members.
#[derive(Clone, Copy)]
pub(super) struct ShareFacts<'a> {
    pub(super) config: &'a ClusterConfig,
    pub(super) devices: &'a DeviceTable,
    pub(super) maps: &'a MapHistory,
    pub(super) now_ns: u64,
}

/// What follows from a decision about shares.
#[derive(Default)]
pub(super) struct ShareChange {
    /// The map is to be published anew: shares changed, or a probe began.
    pub(super) map_changed: bool,
    /// When it is to be decided again at the latest.
    pub(super) at_ns: Option<u64>,
}

impl ShareChange {
    fn look_at(&mut self, at_ns: Option<u64>) {
        self.at_ns = [self.at_ns, at_ns].into_iter().flatten().min();
    }
}

/// Which change of shares waits, and for what.
pub(crate) struct Shares {
    /// Somebody waits for its share, or to lose it.
    waits: bool,
    /// The probe whose answers the change of shares waits for.
    probe: Option<LivenessProbe>,
    /// Until when owners that have not settled count.
    settle_until_ns: u64,
}

impl Shares {
    /// Nothing waits.
    pub(super) const fn new(now_ns: u64) -> Self {
        Self { waits: false, probe: None, settle_until_ns: now_ns }
    }

    /// Shares are to change, as soon as they may.
    pub(super) const fn want(&mut self) {
        self.waits = true;
    }

    /// Whether somebody waits for its share, or to lose it.
    pub(super) const fn waits(&self) -> bool {
        self.waits
    }

    /// Answers to a probe were not heard, and those before it are old.
    pub(super) const fn forget_probe(&mut self) {
        self.probe = None;
    }

    /// Where nobody would own slots, those who have them in the map that all know keep them until there is another, as
    /// they would by a restart of the control plane: whoever was to take them died before any map said so, or one comes
    /// back to be drained and was the last.
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

    /// Gives everybody the share that is due, if anybody waits for that and it may be.
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
            // Nothing is due before they may get their shares.
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

    /// True when each node that is to own slots has answered the probe, which begins where there is none. While no
    /// node owns slots, none can be lost, and nobody needs to answer.
    fn takers_live(&mut self, members: &Members, facts: ShareFacts<'_>, change: &mut ShareChange) -> bool {
        if !members.iter().any(|row| row.shared) {
            return true;
        }
        let ShareFacts { config, maps, now_ns, .. } = facts;
        let next = Epoch(maps.map().epoch.0 + 1);
        let takers = || members.iter().filter(|row| row.wants_share());
        if let Some(until_ns) = ends_until_ns(members, facts) {
            // Its answers are of before the end.
            self.probe = None;
            change.look_at(Some(until_ns));
            return false;
        }
        let least_ns = config.heartbeat_interval_ns.saturating_mul(FRESH_INTERVALS);
        let until_ns = now_ns.saturating_add(config.settle_most_ns);
        let known = self.probe;
        let mut begin = |fresh_ns: u64, until_ns: u64| {
            // The map that this call of the core publishes, which is new whatever else changes.
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
            // It will not report before its moves are done, which are not waited for any more.
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

    /// True for a probe of the call in progress, in which `newest` is the epoch of the map before it: its map is still
    /// to be published, whatever the members.
    pub(super) fn begins_probe(&self, newest: Epoch) -> bool {
        self.probe.is_some_and(|probe| probe.epoch > newest)
    }

    /// When a change that waits is to be decided again without any input, seen from `facts`.
    pub(super) fn due_ns(&self, members: &Members, facts: ShareFacts<'_>) -> Option<u64> {
        if !self.waits {
            return None;
        }
        let is_later = |at_ns: &u64| *at_ns > facts.now_ns;
        let settles = Some(self.settle_until_ns).filter(is_later);
        let probe = self.probe.map(|probe| probe.until_ns).filter(is_later);
        [settles, absent_until_ns(members, facts), ends_until_ns(members, facts), probe].into_iter().flatten().min()
    }

    /// Owners that may not have all yet that moved to them.
    pub(super) fn unsettled(&self, members: &Members, maps: &MapHistory, now_ns: u64) -> impl Iterator<Item = NodeId> {
        let moved = maps.moved_at();
        let lags = move |row: &Row| row.shared && row.settled.is_some_and(|epoch| epoch < moved);
        let waits = now_ns < self.settle_until_ns;
        members.iter().filter(move |row| waits && lags(row)).map(|row| row.member.node)
    }

    /// Slots have changed hands: the next change waits for this one, so long.
    pub(super) const fn moves_began(&mut self, now_ns: u64, config: &ClusterConfig) {
        self.settle_until_ns = now_ns.saturating_add(config.settle_most_ns);
    }

    /// Who had a share before this start of the control plane has it again. Who has all of it is not known any more.
    pub(super) fn restore(&mut self, members: &mut Members, maps: &MapHistory) {
        let is_known = maps.knows_owners();
        for row in members.iter_mut() {
            // A layout that an earlier version remembered does not say who owned what: everybody did.
            row.shared = if is_known { row.state.in_map() && maps.owned(row.member.node) } else { row.wants_share() };
            row.settled = Some(Epoch(0));
        }
        if members.iter().any(|row| row.shared != row.wants_share()) {
            self.want();
        }
    }
}

/// Until when nobody gets or loses slots, as a node that has some, or is to get some, is about to end.
fn ends_until_ns(members: &Members, facts: ShareFacts<'_>) -> Option<u64> {
    let owners = members.iter().filter(|row| row.shared || row.wants_share());
    owners.filter_map(|row| row.ends_until_ns(facts.config, facts.now_ns)).max()
}

/// Until when newcomers get no share, as nodes with devices are dead that may come back, or are back and have no
/// share yet. Nothing where there are no such nodes, and where no node owns slots.
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
