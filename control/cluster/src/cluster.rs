//! The state machine as a whole: its state, time, and publishing.
//!
//! Each call first lets time pass, then applies its input, then publishes: however many members a call loses or
//! gains, it makes at most one epoch. Starting from what is durable is in `start.rs`, what inputs do to members in
//! `membership.rs`.
//!
//! **A late call is nobody's silence.** If the driver comes later than [`Cluster::poll_timeout`] asked by more than a
//! heartbeat interval (the process was stopped, the machine slept), heartbeats may be waiting unread; everyone gets the
//! missed time back before deadlines are looked at. So a driver that skips ticks delays deaths but causes none.
//!
//! Timers are one number, `due_ns`: no later than the first deadline. Heartbeats only push deadlines back and leave
//! it alone; when it passes, one scan finds what is due and the next number.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{Claim, ClusterMap, Former, Member, Restarts};
use kvplane_proto::states::Step;

use crate::adoption::Adoption;
use crate::catalog::{Catalog, Segment, SegmentOwner};
use crate::config::ClusterConfig;
use crate::devices::Devices;
use crate::message::{Change, Counters, Input, Load, MemberView, Output, Reply};
use crate::record::{Header, Layout, MemberRecord, Record, RecordKey};
use crate::rejection::Rejection;
use crate::settle::LivenessProbe;
use crate::state::{MemberEvent, MemberState};
use crate::tenants::Tenants;

/// What is known of a node.
pub(crate) struct Row {
    pub(crate) member: Member,
    pub(crate) state: MemberState,
    pub(crate) capacity_bytes: u64,
    pub(crate) version: String,
    pub(crate) load: Option<Load>,
    /// From when silence counts: the last sign of life, or later if grace was given.
    pub(crate) heard_ns: u64,
    /// Whether there was a sign of life since this control plane started.
    pub(crate) heard: bool,
    /// When this incarnation joined, or the control plane started.
    pub(crate) joined_ns: u64,
    /// The newest epoch when this incarnation ended; orders the ended incarnations.
    pub(crate) ended: Epoch,
    /// Whether the map gives it a share of the slots.
    pub(crate) shared: bool,
    /// The map as of which it has all that moved to it; nothing from an incarnation that does not say so.
    pub(crate) settled: Option<Epoch>,
    /// A newcomer: its devices have nothing of the slots that it is to get, and its share waits for absent nodes.
    pub(crate) newcomer: bool,
    /// Evidence about it that others than itself gave.
    pub(crate) seen: Evidence,
}

/// Evidence about a member beside its own heartbeats.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evidence {
    /// Its ports have answered this control plane.
    pub(crate) answered: bool,
    /// When it was last reported to be silent.
    pub(crate) reported_ns: Option<u64>,
    /// Its ports, or reports, have told while it was silent that it is dead.
    pub(crate) dead: bool,
    /// Its incarnation has ended, and it has said that another will begin.
    pub(crate) restarts: bool,
    /// When it last said that it is about to end.
    pub(crate) ends_ns: Option<u64>,
}

impl Row {
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

    /// When silence changes where this member stands, seen from `now_ns`.
    fn due_ns(&self, config: &ClusterConfig, now_ns: u64) -> Option<u64> {
        let patience_ns = match self.state {
            MemberState::Active => config.suspect_after_ns,
            MemberState::Joining | MemberState::Suspect | MemberState::Draining => config.heartbeat_deadline_ns,
            MemberState::Dead | MemberState::Left => return None,
        };
        // Beyond the end of the clock is never.
        let due_ns = self.heard_ns.checked_add(patience_ns)?;
        let due_ns = if self.seen.dead || due_ns <= now_ns { self.waits_until_ns(config) } else { due_ns };
        // A dead member that waits for longer does so for another, whose deadline is the next.
        Some(due_ns).filter(|at_ns| *at_ns > now_ns)
    }
}

/// The control plane's state machine. See [`Output`] for what its driver owes it.
pub struct Cluster {
    pub(crate) config: ClusterConfig,
    pub(crate) rows: BTreeMap<NodeId, Row>,
    pub(crate) catalog: Catalog,
    pub(crate) tenants: Tenants,
    pub(crate) devices: BTreeMap<NodeId, Devices>,
    /// There is no map yet, and members may know one of a state that was lost.
    pub(crate) adoption: Option<Adoption>,
    pub(crate) counters: Counters,
    pub(crate) now_ns: u64,
    /// The newest map; what members say now is in it after `publish`.
    pub(crate) map: ClusterMap,
    /// The owners by the last map that had any: while there are none, slots are still theirs.
    pub(crate) last_owners: Vec<Member>,
    pub(crate) layout: Layout,
    pub(crate) due_ns: Option<u64>,
    /// Somebody waits for its share, or to lose it; until when owners that have not settled count.
    pub(crate) share_waits: bool,
    /// The probe whose answers the change of shares waits for.
    pub(crate) probe: Option<LivenessProbe>,
    pub(crate) settle_until_ns: u64,
    /// Durable changes of the call in progress.
    pub(crate) changes: Vec<Change>,
    pub(crate) lost: Vec<(NodeId, Incarnation)>,
    pub(crate) map_changed: bool,
    pub(crate) outputs: VecDeque<Output>,
}

impl Cluster {
    /// Applies what happened at `now_ns`. A clock that goes back is taken to stand still.
    ///
    /// # Errors
    /// When the input is refused; nothing but the passing of time has had an effect then.
    ///
    /// # Panics
    /// When the outputs of the call before were not taken: the driver broke the order of persisting and publishing.
    pub fn handle(&mut self, input: Input, now_ns: u64) -> Result<Reply, Rejection> {
        assert!(self.outputs.is_empty(), "{} outputs were not taken before the next input", self.outputs.len());
        self.advance(now_ns);
        let reply = match input {
            Input::Offer { offer } => self.offer(*offer),
            Input::Join { member, capacity_bytes, version } => self.join(member, capacity_bytes, version),
            Input::AttachDevices { node, incarnation, devices } => self.attach(node, incarnation, devices),
            Input::Heartbeat { node, incarnation, load } => self.heartbeat(node, incarnation, load),
            Input::Settled { node, incarnation, epoch } => self.settled(node, incarnation, epoch),
            Input::PrepareLeave { node, incarnation } => self.prepare_leave(node, incarnation),
            Input::Refused { node, incarnation } => self.refused(node, incarnation),
            Input::Unanswered { node, incarnation } => self.unanswered(node, incarnation),
            Input::Answered { node, incarnation } => self.answered(node, incarnation),
            Input::Reported { node, incarnation } => self.reported(node, incarnation),
            Input::Leave { node, incarnation } => self.leave(node, incarnation),
            Input::Restart { node, incarnation } => self.restart(node, incarnation),
            Input::Drain { node, incarnation } => self.drain(node, incarnation),
            Input::Undrain { node, incarnation } => self.undrain(node, incarnation),
            Input::ClientHeartbeat { client } => self.client_heartbeat(client),
            Input::RegisterSegment { segment } => self.register_segment(segment),
            Input::UnregisterSegment { owner, name } => self.unregister_segment(owner, name),
            Input::SetTenant { tenant } => self.set_tenant(tenant),
            Input::RemoveTenant { name } => self.remove_tenant(name),
            Input::ListSegments { after, limit } => {
                let (segments, more) = self.catalog.page(after.as_deref(), limit);
                Ok(Reply::Segments { segments, more })
            }
            Input::Tick => Ok(Reply::Ticked),
        };
        self.counters.rejections += u64::from(reply.is_err());
        self.publish();
        reply
    }

    /// The next thing the driver must do; `None` when the call before is done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call with [`Input::Tick`] at the latest; `None` while nothing can run out.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<u64> {
        self.due_ns
    }

    /// The newest map. Published only when its [`Output::MapChanged`] was carried out.
    #[must_use]
    pub const fn map(&self) -> &ClusterMap {
        &self.map
    }

    /// All nodes known, ended incarnations included, by id.
    pub fn members(&self) -> impl Iterator<Item = MemberView<'_>> {
        self.rows.values().map(|row| MemberView {
            member: &row.member,
            state: row.state,
            shared: row.shared,
            capacity_bytes: row.capacity_bytes,
            version: &row.version,
            load: row.load,
            heard_ns: row.heard.then_some(row.heard_ns),
        })
    }

    /// The segment of this name.
    #[must_use]
    pub fn segment(&self, name: &str) -> Option<&Segment> {
        self.catalog.get(name)
    }

    /// All segments, by name.
    pub fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.catalog.iter()
    }

    /// Counts since the start.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// The settings.
    #[must_use]
    pub const fn config(&self) -> &ClusterConfig {
        &self.config
    }

    /// The whole durable state: what a store holds that carried out every [`Output::Persist`].
    #[must_use]
    pub fn snapshot(&self) -> Vec<Record> {
        let members = self.rows.values().map(Row::record);
        let segments = self.catalog.iter().cloned().map(Record::Segment);
        // It is written when a member first gets slots.
        let layout = (self.layout != Layout::default()).then(|| Record::Layout(self.layout.clone()));
        let devices = self.devices.values().copied().map(Record::Devices);
        core::iter::once(self.header()).chain(members).chain(segments).chain(layout).chain(devices).collect()
    }

    /// Lets time pass: silence, deadlines, expiries.
    fn advance(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let Some(due_ns) = self.due_ns.filter(|&due_ns| due_ns <= self.now_ns) else {
            return;
        };
        let late_ns = self.now_ns - due_ns;
        if late_ns > self.config.heartbeat_interval_ns {
            self.forgive(late_ns.saturating_add(self.config.heartbeat_interval_ns));
        }
        self.suspect_silent();
        self.expel_dead();
        self.adopt_due();
        self.share_out();
        for name in self.catalog.expire(self.now_ns) {
            self.counters.expired_segments += 1;
            self.changes.push(Change::Remove(RecordKey::Segment(name)));
        }
        self.rearm();
    }

    /// Gives everyone this much time back: the driver was away, so nobody's silence was heard.
    fn forgive(&mut self, by_ns: u64) {
        self.counters.late_calls += 1;
        for row in self.rows.values_mut() {
            row.heard_ns = row.heard_ns.saturating_add(by_ns);
        }
        self.catalog.postpone(by_ns);
        // Nor were answers heard, and those before it are old.
        self.probe = None;
    }

    /// Moves a member by the table; `false` if the event came too late to matter.
    pub(crate) fn step(&mut self, node: NodeId, event: MemberEvent) -> bool {
        let row = self.rows.get_mut(&node).expect("a node that is stepped is known");
        match row.state.on(event) {
            Step::Moved(to) => {
                let moved = row.state != to;
                self.map_changed |= row.state.in_map() != to.in_map();
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

    /// Brings the timer forward to `at_ns`, if that is sooner; the end of the clock never comes.
    pub(crate) fn arm(&mut self, at_ns: Option<u64>) {
        let at_ns = at_ns.filter(|&at_ns| at_ns != u64::MAX);
        self.due_ns = [self.due_ns, at_ns].into_iter().flatten().min();
    }

    /// Brings the timer forward for a member that was heard or moved.
    pub(crate) fn arm_member(&mut self, node: NodeId) {
        let at_ns = self.rows.get(&node).and_then(|row| row.due_ns(&self.config, self.now_ns));
        self.arm(at_ns);
    }

    /// Finds the first deadline anew.
    pub(crate) fn rearm(&mut self) {
        let members = self.rows.values().filter_map(|row| row.due_ns(&self.config, self.now_ns)).min();
        let segments = self.catalog.first_expiry_ns();
        self.due_ns = None;
        self.arm(members);
        self.arm(segments);
        self.arm(self.adoption.as_ref().and_then(Adoption::due_ns));
        if self.share_waits {
            self.arm(Some(self.settle_until_ns).filter(|&at_ns| at_ns > self.now_ns));
            self.arm(self.absent_until_ns());
            self.arm(self.probe_until_ns().filter(|&at_ns| at_ns > self.now_ns));
        }
    }

    /// The epoch that will be newest when the call in progress is done.
    pub(crate) fn newest_epoch(&self) -> Epoch {
        Epoch(self.map.epoch.0 + u64::from(self.map_changed))
    }

    /// What [`Self::layout_since`] will be then.
    pub(crate) fn newest_since(&self) -> Epoch {
        if !self.map_changed {
            return self.layout.since;
        }
        let members = self.map_members();
        let map = ClusterMap { epoch: self.newest_epoch(), replicas: self.config.replicas, members, former: None };
        let moved = claims(&map).is_some_and(|claims| claims != self.layout.claims);
        if moved { map.epoch } else { self.layout.since }
    }

    pub(crate) fn live_members(&self) -> usize {
        self.rows.values().filter(|row| row.state.is_live()).count()
    }

    pub(crate) fn owner_is_live(&self, owner: SegmentOwner) -> bool {
        match owner {
            SegmentOwner::Client { .. } => true,
            SegmentOwner::Node { node, incarnation } => {
                self.rows.get(&node).is_some_and(|row| row.state.is_live() && row.member.incarnation == incarnation)
            }
        }
    }

    pub(crate) fn map_members(&self) -> Vec<Member> {
        let share = |row: &Row| if row.shared { row.member.weight } else { 0 };
        let members = self.rows.values().filter(|row| row.state.in_map());
        members.map(|row| Member { weight: share(row), ..row.member.clone() }).collect()
    }

    pub(crate) fn header(&self) -> Record {
        let (epoch, replicas) = (self.map.epoch, self.config.replicas);
        Record::Header(Header { cluster: self.config.cluster.clone(), epoch, replicas })
    }

    /// Since which epoch no slot has changed hands, seen from the newest map.
    #[must_use]
    pub const fn layout_since(&self) -> Epoch {
        self.layout.since
    }

    /// Takes note when owners are others than before. Without anybody to own them, slots have not changed hands.
    /// `before` are the members of the map before this one.
    pub(crate) fn note_layout(&mut self, before: &[Member]) {
        if let Some(claims) = claims(&self.map).filter(|claims| *claims != self.layout.claims) {
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
            self.moves_began();
            self.changes.push(Change::Put(Record::Layout(self.layout.clone())));
        } else if self.map.replicas > 1 {
            self.note_restarts(before);
        }
        // Of one that an earlier version remembered, only its beginning is known.
        let since = self.layout.since;
        let begun = (since != Epoch(0)).then(|| Former { since, from: since, ..Former::default() });
        self.map.former = self.layout.former.clone().or(begun);
    }

    /// Takes note of owners that go on with their slots in another incarnation: second owners have copies for them.
    fn note_restarts(&mut self, before: &[Member]) {
        let former_incarnation = |member: &Member| {
            let former = before.iter().find(|former| former.node == member.node && former.weight > 0)?;
            (former.incarnation != member.incarnation).then_some((member.node, former.incarnation))
        };
        let owners = self.map.members.iter().filter(|member| member.weight > 0);
        let incarnations: Vec<(NodeId, Incarnation)> = owners.filter_map(former_incarnation).collect();
        if incarnations.is_empty() {
            return;
        }
        let (at, since) = (self.map.epoch, self.layout.since);
        let former = self.layout.former.get_or_insert_with(|| Former { since, from: since, ..Former::default() });
        let from = former.restarts.as_ref().map_or(since, |restarts| restarts.at);
        former.restarts = Some(Restarts { at, from, incarnations });
        self.moves_began();
        self.changes.push(Change::Put(Record::Layout(self.layout.clone())));
    }

    /// Ends a call: makes the next epoch if the map changed, and queues what the driver must do, records first.
    pub(crate) fn publish(&mut self) {
        let mut map_changed = core::mem::take(&mut self.map_changed);
        if map_changed {
            self.keep_owners();
        }
        let members = if map_changed { self.map_members() } else { Vec::new() };
        // What was changed may have been changed back.
        map_changed &= self.begins_probe() || members != self.map.members || self.map.replicas != self.config.replicas;
        if map_changed {
            self.map.epoch.0 += 1;
            self.map.replicas = self.config.replicas;
            let before = core::mem::replace(&mut self.map.members, members);
            if before.iter().any(|member| member.weight > 0) {
                self.last_owners.clone_from(&before);
            }
            self.changes.push(Change::Put(self.header()));
            self.note_layout(&before);
            self.counters.epochs += 1;
        }
        if !self.changes.is_empty() {
            self.outputs.push_back(Output::Persist(core::mem::take(&mut self.changes)));
        }
        for (node, incarnation) in self.lost.drain(..) {
            self.outputs.push_back(Output::MemberLost { node, incarnation });
        }
        if map_changed {
            self.outputs.push_back(Output::MapChanged(self.map.clone()));
        }
    }
}

/// A digest of what the owners of a map follow from; nothing where there are no owners. One copy of each slot goes by
/// numbers, shares and shards alone; of failure domains it matters only who shares one, not what it is called.
pub(crate) fn claims(map: &ClusterMap) -> Option<u128> {
    let owners: Vec<&Member> = map.members.iter().filter(|member| member.weight > 0).collect();
    let mut bytes = vec![map.replicas];
    for member in &owners {
        bytes.extend_from_slice(&member.node.0.to_le_bytes());
        bytes.extend_from_slice(&(member.shards.len() as u64).to_le_bytes());
        // Whoever is alone owns everything, whatever the share.
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
