//! Membership: who is a member, in which incarnation, where each stands, and which map follows from that.
//!
//! Each part has its state for itself; the membership joins them:
//!
//! * `members`: the table of nodes;
//! * `devices`: what nodes said of theirs;
//! * `failures`: which members are silent, and which are dead;
//! * `shares`: which change of owners waits, and for what;
//! * `maps`: the newest map, and how its owners came to be;
//! * `effects`: what follows from the call in progress.
//!
//! **Two incarnations of one id.** A greater incarnation is a restart, unless the former incarnation is still heard of
//! from another place: then two nodes were given one id, and the newcomer is refused for as long as the other one sends
//! heartbeats. A restart that comes from another place (a new port, a reboot) is therefore refused at most
//! `suspect_after_ns` and tries again. From the same host and ports it is taken at once: the former incarnation cannot
//! hold them any more. So it is after a restart of the control plane, which has not heard of the former incarnation
//! yet; should that one still speak, it is told that it is stale.

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
use members::Members;
pub(crate) use members::Row;
use shares::{ShareFacts, Shares};

/// Evidence about a member's ports, from port probes and from reports of its peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortEvidence {
    /// All of them refuse connections.
    Refused,
    /// None of them answers.
    Unanswered,
    /// They have answered this control plane.
    Answered,
    /// A peer has heard nothing of the member.
    Reported,
}

/// A member as it joins.
pub(crate) struct Joiner {
    pub(crate) member: Member,
    /// Bytes it contributes.
    pub(crate) capacity_bytes: u64,
    /// Version of its program.
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
    /// No later than the first deadline. Heartbeats only push deadlines back and leave it alone; when it passes, one
    /// scan finds what is due and the next number.
    due_ns: Option<u64>,
}

impl Membership {
    /// Nobody yet.
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

    /// Effects of the call in progress.
    pub(crate) const fn effects(&mut self) -> &mut Effects {
        &mut self.effects
    }

    pub(crate) const fn counters(&self) -> Counters {
        self.counters
    }

    pub(crate) const fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Seen from now: which members are silent, and which are dead.
    pub(crate) const fn detector(&self, now_ns: u64) -> FailureDetector<'_> {
        let (config, members, devices) = (&self.config, &self.members, &self.devices);
        FailureDetector { config, members, devices, replicas: self.maps.map().replicas, now_ns }
    }

    /// Owners that may not have all yet that moved to them.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = NodeId> {
        self.shares.unsettled(&self.members, &self.maps, self.now_ns)
    }

    /// The epoch that will be newest when the call in progress is done.
    pub(crate) fn newest_epoch(&self) -> Epoch {
        Epoch(self.maps.map().epoch.0 + u64::from(self.effects.map_changed()))
    }

    /// Lets time pass: silence, and deaths. Where a deadline has passed: how much time members have back, as the call
    /// came too late to hold silence against anybody; mostly 0.
    pub(crate) fn pass_time(&mut self, now_ns: u64) -> Option<u64> {
        self.now_ns = self.now_ns.max(now_ns);
        let due_ns = self.due_ns.filter(|&due_ns| due_ns <= self.now_ns)?;
        let (late_ns, interval_ns) = (self.now_ns - due_ns, self.config.heartbeat_interval_ns);
        let by_ns = if late_ns > interval_ns { late_ns.saturating_add(interval_ns) } else { 0 };
        if by_ns > 0 {
            self.counters.late_calls += 1;
            self.members.forgive(by_ns);
            // Nor were answers heard, and those before it are old.
            self.shares.forget_probe();
        }
        // Members that have been silent for long become suspect, and those that are dead are expelled.
        for node in self.detector(self.now_ns).suspects() {
            self.step(node, MemberEvent::Silence);
            self.counters.suspicions += 1;
        }
        self.expel_dead();
        Some(by_ns)
    }

    /// Brings the timer forward to `at_ns`, if that is sooner; the end of the clock never comes.
    pub(crate) fn arm(&mut self, at_ns: Option<u64>) {
        let at_ns = at_ns.filter(|&at_ns| at_ns != u64::MAX);
        self.due_ns = [self.due_ns, at_ns].into_iter().flatten().min();
    }

    /// Brings the timer forward for a member that was heard or moved.
    fn arm_member(&mut self, node: NodeId) {
        let at_ns = self.members.get(node).and_then(|row| row.due_ns(&self.config, self.now_ns));
        self.arm(at_ns);
    }

    /// Finds the first deadline of members and shares anew.
    pub(crate) fn rearm(&mut self) {
        self.due_ns = None;
        self.arm(self.members.first_due_ns(&self.config, self.now_ns));
        let facts = ShareFacts { config: &self.config, devices: &self.devices, maps: &self.maps, now_ns: self.now_ns };
        self.arm(self.shares.due_ns(&self.members, facts));
    }

    /// Moves a member by the table; `false` if the event came too late to matter.
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

    /// A member moved to another state: its share may have to follow.
    fn share_follows(&mut self, node: NodeId) {
        let row = self.members.row_mut(node);
        // What is not in the map has no share, whoever waits for what.
        row.shared &= row.state.in_map();
        if row.shared != row.wants_share() {
            self.shares.want();
        }
        self.share_out();
    }

    /// Gives everybody the share that is due, if anybody waits for that and it may be.
    pub(crate) fn share_out(&mut self) {
        let facts = ShareFacts { config: &self.config, devices: &self.devices, maps: &self.maps, now_ns: self.now_ns };
        let change = self.shares.share_out(&mut self.members, facts);
        self.effects.change_map(change.map_changed);
        self.arm(change.at_ns);
    }

    /// A node asks to be a member, or to go on after a restart.
    pub(crate) fn join(&mut self, joiner: Joiner) -> Result<Reply, Rejection> {
        let (node, given) = (joiner.member.node, joiner.member.incarnation);
        match self.members.get_mut(node) {
            Some(row) if given <= row.member.incarnation => {
                if row.capacity_bytes == 0 && row.version.is_empty() && row.member == joiner.member {
                    // It is known from an adopted map, which says neither, and has not heard yet that it has joined.
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

    /// Begins a new incarnation. What the former one served is gone with it.
    fn accept(&mut self, joiner: Joiner) {
        let Joiner { member, capacity_bytes, version } = joiner;
        let (node, incarnation) = (member.node, member.incarnation);
        let mut row = Row { capacity_bytes, version, ..Row::new(member, MemberState::Joining, self.now_ns) };
        let before = self.members.get(node).map(|former| {
            (row.state, row.shared) = (former.state, former.shared);
            // An incarnation in place of another in the map may not have reported yet that it reports.
            row.settled = former.settled.filter(|_| former.state.in_map()).map(|_| Epoch(0));
            former.member.incarnation
        });
        // An incarnation that ended in order has given its slots away. One that died has them on its devices.
        row.newcomer = self.members.get(node).is_none_or(|former| match former.state {
            MemberState::Joining => former.newcomer,
            MemberState::Left => true,
            MemberState::Dead => !self.devices.has(node),
            MemberState::Active | MemberState::Suspect | MemberState::Draining => false,
        });
        // Without devices, unless it has said which.
        self.devices.begin(node, incarnation, &mut self.effects);
        self.members.insert(row);
        if let Some(incarnation) = before {
            self.effects.end((node, incarnation));
        }
        self.step(node, MemberEvent::Join);
        self.share_follows(node);
        // In place of a former incarnation in the map: its addresses are new even if its slots are not.
        self.effects.change_map(self.members.row(node).state.in_map());
        self.counters.joins += 1;
        self.effects.put(self.members.row(node).record());
        self.arm_member(node);
        self.expel_dead();
    }

    /// An incarnation that is about to join says which devices it has.
    pub(crate) fn attach(&mut self, node: NodeId, incarnation: Incarnation, devices: u128) -> Result<Reply, Rejection> {
        let limit = self.config.limits.members + self.config.limits.ended_incarnations;
        let newest = self.newest_epoch();
        let since = self.devices.attach(node, incarnation, devices, newest, limit, &mut self.effects)?;
        Ok(Reply::DevicesKept { since })
    }

    /// A member is alive.
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

    /// A member has all that moved to it by this map or earlier ones.
    pub(crate) fn settled(&mut self, node: NodeId, incarnation: Incarnation, epoch: Epoch) -> Result<Reply, Rejection> {
        let row = self.members.expect_live(node, incarnation)?;
        row.settled = row.settled.max(Some(epoch));
        self.share_out();
        Ok(Reply::Settled)
    }

    /// A member is about to end: until then it gets no slots, and loses none.
    pub(crate) fn prepare_leave(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        let now_ns = self.now_ns;
        self.members.expect_live(node, incarnation)?.seen.ends_ns = Some(now_ns);
        let unsettled = self.unsettled().filter(|other| *other != node).count();
        Ok(Reply::Moves { unsettled, behind: self.members.is_behind(node, self.maps.moved_at()) })
    }

    /// A member goes in order.
    pub(crate) fn leave(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.members.expect_incarnation(node, incarnation)?;
        if self.end(node, MemberEvent::Leave) {
            self.counters.leaves += 1;
        }
        Ok(Reply::Left { epoch: self.newest_epoch() })
    }

    /// An incarnation ends whose devices are to serve the next one. It keeps the slots that it was to give away and has
    /// not: a drain ends with the incarnation.
    pub(crate) fn restart(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        let row = self.members.expect_incarnation(node, incarnation)?;
        let has_devices = self.devices.get(node).is_some_and(|devices| devices.incarnation == incarnation);
        let owns = row.shared && row.state.in_map();
        if !(has_devices && owns) {
            return self.leave(node, incarnation);
        }
        // Silence counts anew, and that its ports refuse connections means nothing. Whoever comes next is taken at
        // once.
        (row.heard, row.heard_ns, row.seen.restarts) = (false, self.now_ns, true);
        if self.step(node, MemberEvent::Undrain) {
            self.effects.put(self.members.row(node).record());
        }
        self.counters.restarts += 1;
        self.arm_member(node);
        Ok(Reply::Left { epoch: self.newest_epoch() })
    }

    /// A member is to give its slots away.
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

    /// A member that is drained is to have its share again.
    pub(crate) fn undrain(&mut self, node: NodeId, given: Option<Incarnation>) -> Result<Reply, Rejection> {
        let incarnation = self.members.given_or_present(node, given);
        self.members.expect_live(node, incarnation)?;
        if self.step(node, MemberEvent::Undrain) {
            self.effects.put(self.members.row(node).record());
            self.arm_member(node);
        }
        Ok(Reply::Undrained { epoch: self.newest_epoch() })
    }

    /// Others say something of a member's ports.
    pub(crate) fn note_ports(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        evidence: PortEvidence,
    ) -> Result<Reply, Rejection> {
        let now_ns = self.now_ns;
        let row = self.members.expect_live(node, incarnation)?;
        match evidence {
            PortEvidence::Answered => row.seen.answered = true,
            PortEvidence::Reported => {
                row.seen.reported_ns = Some(now_ns);
                self.believe_reports();
            }
            PortEvidence::Refused if self.detector(now_ns).is_dead_if_refused(node) => self.find_dead(node),
            PortEvidence::Unanswered if self.detector(now_ns).is_dead_if_unanswered(node) => self.find_dead(node),
            PortEvidence::Refused | PortEvidence::Unanswered => {}
        }
        Ok(Reply::Ticked)
    }

    /// Takes members for dead that are silent and were reported to be so lately, if nobody knows better. Heartbeats of
    /// others say when: a report may come before the second one is missed.
    fn believe_reports(&mut self) {
        for node in self.detector(self.now_ns).reported() {
            // Others may be expelled with one of them.
            if self.detector(self.now_ns).is_dead_if_unanswered(node) {
                self.find_dead(node);
            }
        }
    }

    fn find_dead(&mut self, node: NodeId) {
        self.members.row_mut(node).seen.dead = true;
        self.expel_dead();
        self.arm_member(node);
    }

    /// Takes a sign of life.
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

    /// Expels the members that are dead, as far as none of them waits for others.
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

    /// Ends an incarnation; `false` if it was over already.
    fn end(&mut self, node: NodeId, event: MemberEvent) -> bool {
        if !self.step(node, event) {
            return false;
        }
        let ended = self.newest_epoch();
        let row = self.members.row_mut(node);
        // What it had is gone with it.
        (row.ended, row.load) = (ended, None);
        let incarnation = row.member.incarnation;
        self.effects.put(self.members.row(node).record());
        self.effects.end((node, incarnation));
        self.members.forget_longest_ended(self.config.limits.ended_incarnations, &mut self.devices, &mut self.effects);
        true
    }

    /// Ends a call: makes the next epoch if the map changed, and queues what the driver must do, records first.
    pub(crate) fn publish(&mut self) {
        let mut map_changed = self.effects.take_map_changed();
        if map_changed {
            self.shares.keep_owners(&mut self.members, &self.maps);
        }
        let members = if map_changed { self.members.of_map() } else { Vec::new() };
        let (map, replicas) = (self.maps.map(), self.config.replicas);
        // What was changed may have been changed back.
        map_changed &= self.shares.begins_probe(map.epoch) || members != map.members || map.replicas != replicas;
        if map_changed {
            let before = self.maps.advance(members, replicas);
            self.effects.put(self.maps.header(&self.config));
            if self.maps.note_layout(&before) {
                self.shares.moves_began(self.now_ns, &self.config);
                self.effects.put(Record::Layout(self.maps.layout().clone()));
            }
            self.counters.epochs += 1;
        }
        self.effects.flush(map_changed.then(|| self.maps.map().clone()));
    }
}
