//! Cluster membership: the members with their incarnations and states, and the map that follows from them.
//!
//! Each part keeps its own state; the membership combines them:
//!
//! * `members`: the table of nodes;
//! * `devices`: the devices that nodes reported;
//! * `failures`: failure detection;
//! * `shares`: pending changes of owners, and the conditions that they wait for;
//! * `maps`: the newest map and the history of its owners;
//! * `effects`: effects of the call in progress.
//!
//! **Two incarnations of one id.** A greater incarnation is a restart, unless the former incarnation still sends
//! heartbeats from another place: then two nodes were given one id, and the newcomer is rejected while the other one
//! sends heartbeats. A restart from another place (a new port, a reboot) is therefore rejected for at most
//! `suspect_after_ns` and retries. A restart from the same host and ports is accepted at once: the former incarnation
//! cannot hold them any more. So is one after a restart of the control plane, which has not heard from the former
//! incarnation yet; if that incarnation is alive after all, its next message is rejected as stale.

mod devices;
mod effects;
mod failures;
mod maps;
mod members;
mod shares;
mod takeover;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::Member;
use kvplane_proto::states::Step;

use crate::config::ClusterConfig;
use crate::message::{Counters, Load, Reply};
use crate::record::Record;
use crate::rejection::Rejection;
use crate::state::{MemberEvent, MemberState};

use devices::DeviceTable;
use effects::Effects;
use failures::FailureDetector;
pub(crate) use maps::EPOCH_GAP;
use maps::MapHistory;
pub use members::ENDS_INTERVALS;
pub(crate) use members::Row;
use members::{Members, UnansweredProbes};
use shares::{ShareFacts, Shares};

/// Evidence about a member's ports, from port probes and from reports of its peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortEvidence {
    /// All ports refuse connections.
    Refused,
    /// No port answers.
    Unanswered,
    /// The ports have answered this control plane.
    Answered,
    /// A peer reports that the member does not answer.
    Reported,
}

/// Description of a member that joins.
pub(crate) struct Joiner {
    pub(crate) member: Member,
    /// Bytes it contributes.
    pub(crate) capacity_bytes: u64,
    pub(crate) version: String,
}

/// The members of a cluster and its map.
pub(crate) struct Membership {
    config: ClusterConfig,
    members: Members,
    devices: DeviceTable,
    shares: Shares,
    maps: MapHistory,
    effects: Effects,
    counters: Counters,
    now_ns: u64,
    /// Lower bound of the first deadline. Heartbeats only push deadlines back and leave it unchanged; when it passes,
    /// one scan finds the expired deadlines and computes it again.
    due_ns: Option<u64>,
}

impl Membership {
    /// Creates an empty membership.
    pub(crate) fn new(config: ClusterConfig, now_ns: u64) -> Self {
        Self {
            members: Members::default(),
            devices: DeviceTable::default(),
            shares: Shares::new(now_ns),
            maps: MapHistory::new(config.replicas),
            effects: Effects::default(),
            counters: Counters::default(),
            now_ns,
            due_ns: None,
            config,
        }
    }

    pub(crate) const fn config(&self) -> &ClusterConfig {
        &self.config
    }

    pub(crate) const fn members(&self) -> &Members {
        &self.members
    }

    pub(crate) const fn devices(&self) -> &DeviceTable {
        &self.devices
    }

    pub(crate) const fn maps(&self) -> &MapHistory {
        &self.maps
    }

    /// Returns the effects of the call in progress.
    pub(crate) const fn effects(&mut self) -> &mut Effects {
        &mut self.effects
    }

    pub(crate) const fn counters(&self) -> Counters {
        self.counters
    }

    pub(crate) const fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Returns the failure detector, as of `now_ns`.
    pub(crate) const fn detector(&self, now_ns: u64) -> FailureDetector<'_> {
        let (config, members, devices) = (&self.config, &self.members, &self.devices);
        FailureDetector { config, members, devices, replicas: self.maps.map().replicas, now_ns }
    }

    /// Returns the owners that may not have fetched everything that migrated to them.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = NodeId> {
        self.shares.unsettled(&self.members, &self.maps, self.now_ns)
    }

    /// Returns the epoch that will be newest at the end of the call in progress.
    pub(crate) fn newest_epoch(&self) -> Epoch {
        Epoch(self.maps.map().epoch.0 + u64::from(self.effects.map_changed()))
    }

    /// Advances time: members become suspect or dead. Returns `None` if no deadline has passed, else the time by which
    /// deadlines were postponed because the call came too late to count silence; mostly 0.
    pub(crate) fn pass_time(&mut self, now_ns: u64) -> Option<u64> {
        self.now_ns = self.now_ns.max(now_ns);
        let due_ns = self.due_ns.filter(|&due_ns| due_ns <= self.now_ns)?;
        let (late_ns, interval_ns) = (self.now_ns - due_ns, self.config.heartbeat_interval_ns);
        let by_ns = if late_ns > interval_ns { late_ns.saturating_add(interval_ns) } else { 0 };
        if by_ns > 0 {
            self.counters.late_calls += 1;
            self.members.forgive(by_ns);
            // Answers to the probe were not received meanwhile, and those before are stale.
            self.shares.forget_probe();
        }
        // Members that were silent for too long become suspect, and dead ones are expelled.
        for node in self.detector(self.now_ns).suspects() {
            self.step(node, MemberEvent::Silence);
            self.counters.suspicions += 1;
        }
        self.expel_dead();
        Some(by_ns)
    }

    /// Brings the timer forward to `at_ns` if that is earlier; `u64::MAX` is never.
    pub(crate) fn arm(&mut self, at_ns: Option<u64>) {
        let at_ns = at_ns.filter(|&at_ns| at_ns != u64::MAX);
        self.due_ns = [self.due_ns, at_ns].into_iter().flatten().min();
    }

    /// Brings the timer forward for a member that sent a message or changed its state.
    fn arm_member(&mut self, node: NodeId) {
        let at_ns = self.members.get(node).and_then(|row| row.due_ns(&self.config, self.now_ns));
        self.arm(at_ns);
    }

    /// Computes the first deadline of members and shares again.
    pub(crate) fn rearm(&mut self) {
        self.due_ns = None;
        self.arm(self.members.first_due_ns(&self.config, self.now_ns));
        let facts = ShareFacts { config: &self.config, devices: &self.devices, maps: &self.maps, now_ns: self.now_ns };
        self.arm(self.shares.due_ns(&self.members, facts));
    }

    /// Applies an event to a member by the table; returns false if the event came too late to matter.
    fn step(&mut self, node: NodeId, event: MemberEvent) -> bool {
        let row = self.members.row_mut(node);
        match row.state.on(event) {
            Step::Moved(to) => {
                let moved = row.state != to;
                self.effects.change_map(row.state.in_map() != to.in_map());
                row.state = to;
                if moved {
                    self.share_follows(node);
                }
                true
            }
            Step::Stale => false,
            Step::Illegal => panic!("node {node}: {event:?} in state {:?}", row.state),
        }
    }

    /// Requests a change of shares if a member's new state requires one.
    fn share_follows(&mut self, node: NodeId) {
        let row = self.members.row_mut(node);
        // A node that is not in the map has no share, even while a change of shares is pending.
        row.shared &= row.state.in_map();
        if row.shared != row.wants_share() {
            self.shares.want();
        }
        self.share_out();
    }

    /// Gives each member its due share, if a change of shares is pending and its conditions hold.
    pub(crate) fn share_out(&mut self) {
        let facts = ShareFacts { config: &self.config, devices: &self.devices, maps: &self.maps, now_ns: self.now_ns };
        let change = self.shares.share_out(&mut self.members, facts);
        self.effects.change_map(change.map_changed);
        self.arm(change.at_ns);
    }

    /// Accepts a node as a member, at first or after a restart.
    pub(crate) fn join(&mut self, joiner: Joiner) -> Result<Reply, Rejection> {
        let (node, given) = (joiner.member.node, joiner.member.incarnation);
        match self.members.get_mut(node) {
            Some(row) if given <= row.member.incarnation => {
                if row.capacity_bytes == 0 && row.version.is_empty() && row.member == joiner.member {
                    // The node is known from an adopted map, which lacks both, and has not received the reply to its
                    // join.
                    (row.capacity_bytes, row.version) = (joiner.capacity_bytes, joiner.version.clone());
                    self.effects.put(row.record());
                }
                let row = self.members.expect_live(node, given)?;
                let described = (&row.member, row.capacity_bytes, &row.version);
                if described != (&joiner.member, joiner.capacity_bytes, &joiner.version) {
                    return Err(Rejection::IncarnationReused { node, incarnation: given });
                }
                self.hear(node);
            }
            known => {
                if known.is_some() {
                    self.members.refuse_second_live(&joiner.member, &self.config, self.now_ns)?;
                }
                self.members.refuse_over_limit(&joiner.member, self.config.limits.members)?;
                self.accept(joiner);
            }
        }
        Ok(Reply::Joined {
            epoch: self.newest_epoch(),
            heartbeat_interval_ns: self.config.heartbeat_interval_ns,
            heartbeat_deadline_ns: self.config.heartbeat_deadline_ns,
        })
    }

    /// Begins a new incarnation. The state of the former one ends with it, except that a drain goes on if the new one
    /// continues it.
    fn accept(&mut self, joiner: Joiner) {
        let Joiner { member, capacity_bytes, version } = joiner;
        let (node, incarnation) = (member.node, member.incarnation);
        let mut row = Row { capacity_bytes, version, ..Row::new(member, MemberState::Joining, self.now_ns) };
        let before = self.members.get(node).map(|former| {
            (row.state, row.shared) = (former.state, former.shared);
            // An incarnation that replaces one in the map may not have sent its first report yet.
            row.settled = former.settled.filter(|_| former.state.in_map()).map(|_| Epoch(0));
            former.member.incarnation
        });
        // An incarnation that ended in order has given its slots away. One that died has their objects on its devices.
        row.newcomer = self.members.get(node).is_none_or(|former| match former.state {
            MemberState::Joining => former.newcomer,
            MemberState::Left => true,
            MemberState::Dead => !self.devices.has(node),
            MemberState::Active | MemberState::Suspect | MemberState::Draining => false,
        });
        // The incarnation has no devices, unless it has reported some.
        self.devices.begin(node, incarnation, &mut self.effects);
        self.members.insert(row);
        if let Some(incarnation) = before {
            self.effects.end((node, incarnation));
        }
        let continues = before.is_some_and(|former| incarnation.continues(former));
        self.step(node, if continues { MemberEvent::Succeed } else { MemberEvent::Join });
        self.share_follows(node);
        // An incarnation that replaces one in the map has new addresses, even if its slots are unchanged.
        self.effects.change_map(self.members.row(node).state.in_map());
        self.counters.joins += 1;
        self.effects.put(self.members.row(node).record());
        self.arm_member(node);
        self.expel_dead();
    }

    /// Notes the devices of an incarnation that is about to join.
    pub(crate) fn attach(&mut self, node: NodeId, incarnation: Incarnation, devices: u128) -> Result<Reply, Rejection> {
        let limit = self.config.limits.members + self.config.limits.ended_incarnations;
        let newest = self.newest_epoch();
        let since = self.devices.attach(node, incarnation, devices, newest, limit, &mut self.effects)?;
        Ok(Reply::DevicesKept { since })
    }

    /// Notes a heartbeat of a member.
    pub(crate) fn heartbeat(&mut self, node: NodeId, incarnation: Incarnation, load: Load) -> Result<Reply, Rejection> {
        let joining = self.members.expect_incarnation(node, incarnation)?.state == MemberState::Joining;
        if !self.step(node, MemberEvent::Heartbeat) {
            return Err(Rejection::Ended { node, incarnation, state: self.members.row(node).state });
        }
        self.counters.heartbeats += 1;
        self.members.row_mut(node).load = Some(load);
        self.hear(node);
        if joining {
            self.effects.put(self.members.row(node).record());
        }
        self.believe_reports();
        let since = match self.effects.map_changed() {
            true => self.maps.since_with(self.members.of_map(), self.config.replicas),
            false => self.maps.layout().since,
        };
        Ok(Reply::Alive { epoch: self.newest_epoch(), since })
    }

    /// Notes that a member has fetched everything that migrated to it by this map or earlier ones.
    pub(crate) fn settled(&mut self, node: NodeId, incarnation: Incarnation, epoch: Epoch) -> Result<Reply, Rejection> {
        let row = self.members.expect_live(node, incarnation)?;
        row.settled = row.settled.max(Some(epoch));
        self.share_out();
        Ok(Reply::Settled)
    }

    /// Notes that a member is about to end: until then it neither gets nor loses slots.
    pub(crate) fn prepare_leave(&mut self, node: NodeId, incarnation: Incarnation) -> Result<(), Rejection> {
        let now_ns = self.now_ns;
        self.members.expect_live(node, incarnation)?.seen.ends_ns = Some(now_ns);
        Ok(())
    }

    /// Ends a member that leaves in order.
    pub(crate) fn leave(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.members.expect_incarnation(node, incarnation)?;
        if self.end(node, MemberEvent::Leave) {
            self.counters.leaves += 1;
        }
        Ok(Reply::Left { epoch: self.newest_epoch() })
    }

    /// Ends an incarnation whose devices are to serve the next one. The node keeps the slots that it was to give away
    /// and has not: a drain ends with the incarnation.
    pub(crate) fn restart(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        let row = self.members.expect_incarnation(node, incarnation)?;
        // The next incarnation may have attached them before this message arrived.
        let has_devices = self.devices.get(node).is_some_and(|devices| devices.incarnation >= incarnation);
        let owns = row.shared && row.state.in_map();
        if !(has_devices && owns) {
            return self.leave(node, incarnation);
        }
        // Silence counts from now, and refused connections are no evidence of death. The next incarnation is accepted
        // at once.
        (row.heard, row.heard_ns, row.seen.restarts) = (false, self.now_ns, true);
        if self.step(node, MemberEvent::Undrain) {
            self.effects.put(self.members.row(node).record());
        }
        self.counters.restarts += 1;
        self.arm_member(node);
        Ok(Reply::Left { epoch: self.newest_epoch() })
    }

    /// Drains a member: it is to give its slots away.
    pub(crate) fn drain(&mut self, node: NodeId, given: Option<Incarnation>) -> Result<Reply, Rejection> {
        let incarnation = self.members.given_or_present(node, given);
        self.members.expect_incarnation(node, incarnation)?;
        self.members.refuse_last_owner(node, &self.config, self.now_ns)?;
        if self.step(node, MemberEvent::Drain) {
            self.counters.drains += 1;
            self.effects.put(self.members.row(node).record());
            self.arm_member(node);
        }
        self.members.expect_live(node, incarnation)?;
        Ok(Reply::Draining { epoch: self.newest_epoch() })
    }

    /// Ends a drain: the member is to have its share again.
    pub(crate) fn undrain(&mut self, node: NodeId, given: Option<Incarnation>) -> Result<Reply, Rejection> {
        let incarnation = self.members.given_or_present(node, given);
        self.members.expect_live(node, incarnation)?;
        if self.step(node, MemberEvent::Undrain) {
            self.effects.put(self.members.row(node).record());
            self.arm_member(node);
        }
        Ok(Reply::Undrained { epoch: self.newest_epoch() })
    }

    /// Notes evidence about a member's ports.
    pub(crate) fn note_ports(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        evidence: PortEvidence,
    ) -> Result<Reply, Rejection> {
        let (now_ns, interval_ns) = (self.now_ns, self.config.heartbeat_interval_ns);
        let row = self.members.expect_live(node, incarnation)?;
        match evidence {
            PortEvidence::Answered => (row.seen.answered, row.seen.unanswered) = (true, None),
            PortEvidence::Reported => {
                row.seen.reported_ns = Some(now_ns);
                self.believe_reports();
            }
            PortEvidence::Unanswered => {
                let probes = UnansweredProbes::with(row.seen.unanswered, now_ns, interval_ns);
                row.seen.unanswered = Some(probes);
                if self.detector(now_ns).is_dead_if_unanswered(node, now_ns.saturating_sub(probes.first_ns)) {
                    self.find_dead(node);
                }
            }
            PortEvidence::Refused if self.detector(now_ns).is_dead_if_refused(node) => self.find_dead(node),
            PortEvidence::Refused => {}
        }
        Ok(Reply::Ticked)
    }

    /// Expels members that are silent and were recently reported to be, unless their ports have answered. Heartbeats of
    /// other members trigger this check: a report may arrive before the second heartbeat is missed.
    fn believe_reports(&mut self) {
        for node in self.detector(self.now_ns).reported() {
            // Other members may be expelled together with one of them.
            if self.detector(self.now_ns).is_dead_if_unanswered(node, 0) {
                self.find_dead(node);
            }
        }
    }

    fn find_dead(&mut self, node: NodeId) {
        self.members.row_mut(node).seen.dead = true;
        self.expel_dead();
        self.arm_member(node);
    }

    /// Notes a sign of life of a member.
    fn hear(&mut self, node: NodeId) {
        let now_ns = self.now_ns;
        let row = self.members.row_mut(node);
        (row.heard_ns, row.heard) = (now_ns, true);
        (row.seen.dead, row.seen.restarts) = (false, false);
        self.arm_member(node);
        // Dead members, and changes of shares, may have waited for this one.
        self.expel_dead();
        if self.shares.waits() {
            self.share_out();
        }
    }

    /// Expels the dead members, except those that wait for other members.
    fn expel_dead(&mut self) {
        for node in self.detector(self.now_ns).expellable() {
            let row = self.members.row(node);
            let (incarnation, was_active) = (row.member.incarnation, row.state == MemberState::Active);
            if was_active {
                self.step(node, MemberEvent::Silence);
                self.counters.suspicions += 1;
            }
            self.effects.lose((node, incarnation));
            self.counters.losses += 1;
            self.end(node, MemberEvent::Deadline);
        }
    }

    /// Ends an incarnation; returns false if it had ended before.
    fn end(&mut self, node: NodeId, event: MemberEvent) -> bool {
        if !self.step(node, event) {
            return false;
        }
        let ended = self.newest_epoch();
        let row = self.members.row_mut(node);
        // Its load ends with it.
        (row.ended, row.load) = (ended, None);
        let incarnation = row.member.incarnation;
        self.effects.put(self.members.row(node).record());
        self.effects.end((node, incarnation));
        self.members.forget_longest_ended(self.config.limits.ended_incarnations, &mut self.devices, &mut self.effects);
        true
    }

    /// Ends a call: publishes the next epoch if the map changed, and queues the outputs, records first.
    pub(crate) fn publish(&mut self) {
        let mut map_changed = self.effects.take_map_changed();
        if map_changed {
            self.shares.keep_owners(&mut self.members, &self.maps);
        }
        let members = if map_changed { self.members.of_map() } else { Vec::new() };
        let (map, replicas) = (self.maps.map(), self.config.replicas);
        // A change may have been reverted.
        map_changed &= self.shares.begins_probe(map.epoch) || members != map.members || map.replicas != replicas;
        if map_changed {
            let before = self.maps.advance(members, replicas);
            self.effects.put(self.maps.header(&self.config));
            let layout = self.maps.layout().clone();
            if self.maps.note_layout(&before) {
                self.shares.moves_began(self.now_ns, &self.config);
            }
            // A handover changes what it says of restarts, and no slot moves.
            if *self.maps.layout() != layout {
                self.effects.put(Record::Layout(self.maps.layout().clone()));
            }
            self.counters.epochs += 1;
        }
        self.effects.flush(map_changed.then(|| self.maps.map().clone()));
    }
}
