//! Cluster state machine: applies inputs, advances time and publishes maps.
//!
//! Each call first advances time, then applies its input, then publishes: however many members a call loses or gains,
//! it publishes at most one epoch. The cluster combines its parts: the membership with its map, the catalog of
//! segments, the tenants and, while there is no map, the offers of members whose maps may be adopted. Starting from
//! durable records is in `start.rs`.
//!
//! **A late call is not evidence of silence.** If the driver calls later than [`Cluster::poll_timeout`] by more than a
//! heartbeat interval (the process was stopped, the machine slept), heartbeats may be waiting unread; the missed time
//! is added to every member's deadlines before they are checked. A driver that skips ticks therefore delays the
//! detection of deaths but causes none.
//!
//! All timers share one number, `due_ns`, which is no later than the first deadline. Heartbeats only push deadlines
//! back and leave it unchanged; when it passes, one scan finds the expired deadlines and computes it again.

mod start;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member};

use crate::adoption::{Adoption, Offer};
use crate::catalog::{Catalog, ClientId, Segment, SegmentOwner};
use crate::config::ClusterConfig;
use crate::departure::Moves;
use crate::membership::{EPOCH_GAP, Joiner, Membership, PortEvidence, Row};
use crate::message::{Counters, Input, LastIncarnations, Load, MAX_VERSION_BYTES, MemberView, Output, Reply};
use crate::record::{Layout, Record, RecordKey};
use crate::rejection::Rejection;
use crate::state::MemberState;
use crate::tenants::{Tenant, TenantChange, TenantSsd, Tenants};

use start::LAST_EPOCH;
pub use start::StartError;

/// State machine of the control plane. [`Output`] describes the obligations of its driver.
pub struct Cluster {
    membership: Membership,
    catalog: Catalog,
    tenants: Tenants,
    /// Offers of members, while there is no map and the state may have been lost.
    adoption: Option<Adoption>,
    /// Counters of this type; the membership keeps the others.
    counters: Counters,
    now_ns: u64,
}

impl Cluster {
    /// Applies an input that occurred at `now_ns`. If the clock goes back, time stands still.
    ///
    /// # Errors
    /// When the input is rejected; only time has advanced then.
    ///
    /// # Panics
    /// When the outputs of the previous call were not taken: the driver broke the order of persisting and publishing.
    pub fn handle(&mut self, input: Input, now_ns: u64) -> Result<Reply, Rejection> {
        let outputs = self.membership.effects().outputs().len();
        assert!(outputs == 0, "{outputs} outputs were not taken before the next input");
        self.advance(now_ns);
        let reply = self.apply(input);
        self.drop_segments_of_ended();
        let is_stale = matches!(reply, Err(Rejection::StaleIncarnation { .. } | Rejection::Ended { .. }));
        self.counters.stale += u64::from(is_stale);
        self.counters.rejections += u64::from(reply.is_err());
        self.membership.publish();
        reply
    }

    fn apply(&mut self, input: Input) -> Result<Reply, Rejection> {
        let members = &mut self.membership;
        match input {
            Input::Offer { offer } => self.offer(*offer),
            Input::Join { member, capacity_bytes, version } => self.join(Joiner { member, capacity_bytes, version }),
            Input::AttachDevices { node, incarnation, devices } => self.attach(node, incarnation, devices),
            Input::Heartbeat { node, incarnation, load } => self.heartbeat(node, incarnation, load),
            Input::Settled { node, incarnation, epoch } => members.settled(node, incarnation, epoch),
            Input::PrepareLeave { node, incarnation } => {
                members.prepare_leave(node, incarnation)?;
                Ok(Reply::Moves(self.moves_of(node)))
            }
            Input::Refused { node, incarnation } => members.note_ports(node, incarnation, PortEvidence::Refused),
            Input::Unanswered { node, incarnation } => members.note_ports(node, incarnation, PortEvidence::Unanswered),
            Input::Answered { node, incarnation } => members.note_ports(node, incarnation, PortEvidence::Answered),
            Input::Reported { node, incarnation } => members.note_ports(node, incarnation, PortEvidence::Reported),
            Input::Leave { node, incarnation } => members.leave(node, incarnation),
            Input::Restart { node, incarnation } => members.restart(node, incarnation),
            Input::Drain { node, incarnation } => members.drain(node, incarnation),
            Input::Undrain { node, incarnation } => members.undrain(node, incarnation),
            Input::ClientHeartbeat { client } => self.client_heartbeat(client),
            Input::RegisterSegment { segment } => self.register_segment(segment),
            Input::UnregisterSegment { owner, name } => self.unregister_segment(owner, name),
            Input::SetTenant { change } => self.set_tenant(change),
            Input::RemoveTenant { name } => remove_tenant(&mut self.tenants, &mut self.membership, name),
            Input::TenantFreed { name } => Ok(forget_removed(&mut self.tenants, &mut self.membership, name)),
            Input::ListSegments { after, limit } => {
                let (segments, more) = self.catalog.page(after.as_deref(), limit);
                Ok(Reply::Segments { segments, more })
            }
            Input::Tick => Ok(Reply::Ticked),
        }
    }

    /// Returns the next output that the driver must carry out; `None` once the previous call is complete.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.membership.effects().take_output()
    }

    /// Returns the latest time of the next call with [`Input::Tick`]; `None` while no deadline is set.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<u64> {
        self.membership.due_ns()
    }

    /// Returns the newest map. It is published only once its [`Output::MapChanged`] was carried out.
    #[must_use]
    pub const fn map(&self) -> &ClusterMap {
        self.membership.maps().map()
    }

    /// Returns the epoch since which no slot has changed hands, as of the newest map.
    #[must_use]
    pub const fn layout_since(&self) -> Epoch {
        self.membership.maps().layout().since
    }

    /// Returns all known nodes, ended incarnations included, by id.
    pub fn members(&self) -> impl Iterator<Item = MemberView<'_>> {
        self.membership.members().iter().map(|row| MemberView {
            member: &row.member,
            state: row.state,
            shared: row.shared,
            capacity_bytes: row.capacity_bytes,
            version: &row.version,
            load: row.load,
            heard_ns: row.heard.then_some(row.heard_ns),
        })
    }

    /// Returns the segment of this name.
    #[must_use]
    pub fn segment(&self, name: &str) -> Option<&Segment> {
        self.catalog.get(name)
    }

    /// Returns all segments, by name.
    pub fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.catalog.iter()
    }

    /// Returns the tenants that were set, by name, each with its settings on SSDs.
    pub fn tenants(&self) -> impl Iterator<Item = (&Tenant, TenantSsd)> {
        self.tenants.iter().map(|tenant| (tenant, self.tenants.ssd_of(&tenant.name)))
    }

    /// Returns the tenants that were removed, and may still have records on SSDs, by name.
    pub fn removed_tenants(&self) -> impl Iterator<Item = &str> {
        self.tenants.removed()
    }

    /// Returns a tenant that was set.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.tenants.get(name)
    }

    /// Returns the last known incarnations of a node.
    #[must_use]
    pub fn last_incarnations(&self, node: NodeId) -> LastIncarnations {
        let none = Incarnation(0);
        let member = self.membership.members().get(node).map_or(none, |row| row.member.incarnation);
        let attached = self.membership.devices().get(node).map_or(none, |said| said.incarnation);
        LastIncarnations { any: member.max(attached), member }
    }

    /// Returns the members of the map that have missed a heartbeat: they are considered dead if their ports refuse
    /// connections, or do not answer while other members are heard from.
    pub fn silent(&self, now_ns: u64) -> impl Iterator<Item = &Member> {
        self.membership.detector(now_ns).silent()
    }

    /// Returns the members of the map that clients have recently reported to be silent, and whose ports have answered
    /// this control plane before.
    pub fn reported_silent(&self, now_ns: u64) -> impl Iterator<Item = &Member> {
        self.membership.detector(now_ns).reported_silent()
    }

    /// Returns the members of the map that have sent nothing since the control plane started, more than two heartbeat
    /// intervals ago: those whose ports refuse connections died meanwhile, regardless of the replica count. Members
    /// with devices are excluded, because the objects on their devices are worth the restart grace.
    pub fn unheard(&self, now_ns: u64) -> impl Iterator<Item = &Member> {
        self.membership.detector(now_ns).unheard()
    }

    /// Returns true while an owner may not have fetched everything that migrated to it.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.membership.unsettled().next().is_some()
    }

    /// Returns the migrations that are not finished, from the perspective of a node.
    #[must_use]
    pub fn moves_of(&self, node: NodeId) -> Moves {
        let others = self.membership.unsettled().filter(|other| *other != node).count();
        let unsettled = u32::try_from(others).unwrap_or(u32::MAX);
        let members = self.membership.members();
        let draining = members.get(node).is_some_and(|row| row.state == MemberState::Draining);
        Moves { unsettled, behind: members.is_behind(node, self.membership.maps().moved_at()), draining }
    }

    /// Returns true while members of a lost state may still offer their maps: clients wait for the adopted map, or for
    /// [`Output::BeganEmpty`].
    #[must_use]
    pub fn awaits_offers(&self) -> bool {
        self.adoption.as_ref().is_some_and(Adoption::is_awaited)
    }

    /// Returns the counters since the start.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        let Counters { stale, rejections, expired_segments, .. } = self.counters;
        Counters { stale, rejections, expired_segments, ..self.membership.counters() }
    }

    /// Returns the settings.
    #[must_use]
    pub const fn config(&self) -> &ClusterConfig {
        self.membership.config()
    }

    /// Returns the whole durable state: the contents of a store that carried out every [`Output::Persist`].
    #[must_use]
    pub fn snapshot(&self) -> Vec<Record> {
        let membership = &self.membership;
        let header = membership.maps().header(membership.config());
        let members = membership.members().iter().map(Row::record);
        let segments = self.catalog.iter().cloned().map(Record::Segment);
        // The layout is written when a member first gets slots.
        let layout = membership.maps().layout();
        let layout = (*layout != Layout::default()).then(|| Record::Layout(layout.clone()));
        let devices = membership.devices().iter().copied().map(Record::Devices);
        core::iter::once(header).chain(members).chain(segments).chain(layout).chain(devices).collect()
    }

    /// Advances time: silence, deadlines, expiries.
    fn advance(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let Some(forgiven_ns) = self.membership.pass_time(now_ns) else { return };
        self.catalog.postpone(forgiven_ns);
        self.adopt_due();
        self.membership.share_out();
        self.drop_segments_of_ended();
        for name in self.catalog.expire(self.now_ns) {
            self.counters.expired_segments += 1;
            self.membership.effects().remove(RecordKey::Segment(name));
        }
        self.rearm();
    }

    /// Computes the first deadline again.
    fn rearm(&mut self) {
        self.membership.rearm();
        self.membership.arm(self.catalog.first_expiry_ns());
        self.membership.arm(self.adoption.as_ref().and_then(Adoption::due_ns));
    }

    /// Removes the segments of incarnations that have ended.
    fn drop_segments_of_ended(&mut self) {
        for (node, incarnation) in self.membership.effects().take_ended() {
            for name in self.catalog.remove_owner(SegmentOwner::Node { node, incarnation }) {
                self.membership.effects().remove(RecordKey::Segment(name));
            }
        }
    }

    fn join(&mut self, joiner: Joiner) -> Result<Reply, Rejection> {
        joiner.member.validate().map_err(Rejection::Member)?;
        if joiner.version.len() > MAX_VERSION_BYTES {
            return Err(Rejection::Version { bytes: joiner.version.len() });
        }
        self.refuse_while_adopting(joiner.member.node)?;
        self.membership.join(joiner)
    }

    fn attach(&mut self, node: NodeId, incarnation: Incarnation, devices: u128) -> Result<Reply, Rejection> {
        self.refuse_while_adopting(node)?;
        self.membership.attach(node, incarnation, devices)
    }

    fn heartbeat(&mut self, node: NodeId, incarnation: Incarnation, load: Load) -> Result<Reply, Rejection> {
        if self.membership.members().is_joining(node, incarnation) {
            self.refuse_while_adopting(node)?;
        }
        self.membership.heartbeat(node, incarnation, load)
    }

    /// Rejects a node that would become a member while members of a lost state may still offer their maps. Without
    /// offers, the wait times out: this is a new cluster.
    fn refuse_while_adopting(&mut self, node: NodeId) -> Result<(), Rejection> {
        let Some(adoption) = &mut self.adoption else { return Ok(()) };
        if adoption.is_over(self.now_ns) {
            self.adoption = None;
            return Ok(());
        }
        let at_ns = adoption.note_join(node);
        let is_complete = adoption.is_complete();
        let retry_after_ns = at_ns.saturating_sub(self.now_ns).clamp(1, self.config().heartbeat_interval_ns);
        if is_complete {
            self.adopt();
        }
        Err(Rejection::Adopting { retry_after_ns })
    }

    /// Accepts the map that a member unknown to this control plane follows.
    fn offer(&mut self, offer: Offer) -> Result<Reply, Rejection> {
        let (node, incarnation) = (offer.member.node, offer.member.incarnation);
        let config = self.membership.config();
        let latest_ns = self.now_ns.saturating_add(config.heartbeat_deadline_ns);
        let last_epoch = Epoch(LAST_EPOCH.0 - EPOCH_GAP);
        let Some(adoption) = &mut self.adoption else {
            // The member's map may have been adopted meanwhile; then the member continues.
            return match self.membership.members().check_live(node, incarnation) {
                Ok(()) => Ok(Reply::Offered),
                Err(Rejection::Unknown { .. }) => Err(Rejection::OfferRefused { node }),
                Err(rejection) => Err(rejection),
            };
        };
        let at_ns = adoption.offer(offer, latest_ns, last_epoch, config.limits.members)?;
        if adoption.is_complete() {
            self.adopt();
        } else {
            self.membership.arm(Some(at_ns));
        }
        Ok(Reply::Offered)
    }

    /// Adopts the offered map when the time has come. Without an offer, clients stop waiting; members may still offer.
    fn adopt_due(&mut self) {
        let now_ns = self.now_ns;
        let Some(adoption) = self.adoption.as_mut().filter(|adoption| adoption.due_ns().is_some_and(|at| at <= now_ns))
        else {
            return;
        };
        if adoption.has_offers() {
            self.adopt();
        } else {
            adoption.await_no_longer();
            self.membership.effects().emit(Output::BeganEmpty);
        }
    }

    /// Adopts the newest offered map and continues from it, as after a restart.
    fn adopt(&mut self) {
        let Some(adoption) = self.adoption.take() else { return };
        let Some(newest) = adoption.newest() else { return };
        let (state, map) = (newest.state, &newest.map);
        for member in &map.members {
            match adoption.offer_of(state, member) {
                Some(Offer { member, capacity_bytes, version, devices, .. }) => {
                    let (member, version) = (member.clone(), version.clone());
                    let joiner = Joiner { member, capacity_bytes: *capacity_bytes, version };
                    self.membership.adopt_member(joiner, true, *devices);
                }
                None if member.weight == 0 => {}
                None => {
                    let joiner = Joiner { member: member.clone(), capacity_bytes: 0, version: String::new() };
                    self.membership.adopt_member(joiner, false, None);
                }
            }
        }
        self.membership.adopt_map(state, map);
        self.rearm();
    }

    fn client_heartbeat(&mut self, client: ClientId) -> Result<Reply, Rejection> {
        let segments = self.catalog.renew(client, self.now_ns).ok_or(Rejection::UnknownClient { client })?;
        Ok(Reply::Renewed { segments })
    }

    fn register_segment(&mut self, segment: Segment) -> Result<Reply, Rejection> {
        let timed = match segment.owner {
            SegmentOwner::Node { node, incarnation } => {
                self.membership.members().check_live(node, incarnation)?;
                false
            }
            SegmentOwner::Client { .. } => true,
        };
        let expires_ns = self.now_ns.checked_add(segment.ttl_ns).filter(|_| timed);
        let record = segment.clone();
        if self.catalog.register(segment, self.now_ns, &self.membership.config().limits)? {
            self.membership.effects().put(Record::Segment(record));
        }
        self.membership.arm(expires_ns);
        Ok(Reply::Registered)
    }

    fn unregister_segment(&mut self, owner: SegmentOwner, name: String) -> Result<Reply, Rejection> {
        if self.catalog.unregister(owner, &name)? {
            self.membership.effects().remove(RecordKey::Segment(name));
        }
        Ok(Reply::Unregistered)
    }

    fn set_tenant(&mut self, change: TenantChange) -> Result<Reply, Rejection> {
        let name = change.name.clone();
        let (tenant, ssd) = self.tenants.change(change)?;
        let effects = self.membership.effects();
        if let Some(tenant) = tenant {
            effects.put(Record::Tenant(tenant.clone()));
        }
        match ssd {
            Some(ssd) if ssd == TenantSsd::default() => effects.remove(RecordKey::TenantSsd(name)),
            Some(ssd) => effects.put(Record::TenantSsd(name, ssd)),
            None => {}
        }
        Ok(Reply::TenantSet)
    }
}

/// Removes a tenant; its records on SSDs are evicted.
fn remove_tenant(tenants: &mut Tenants, membership: &mut Membership, name: String) -> Result<Reply, Rejection> {
    let ssd = tenants.remove(&name)?;
    let effects = membership.effects();
    effects.remove(RecordKey::Tenant(name.clone()));
    match ssd {
        Some(ssd) => effects.put(Record::TenantSsd(name, ssd)),
        None => effects.remove(RecordKey::TenantSsd(name)),
    }
    Ok(Reply::TenantRemoved)
}

/// Forgets a tenant that was removed, as it has no records any more.
fn forget_removed(tenants: &mut Tenants, membership: &mut Membership, name: String) -> Reply {
    if tenants.forget_removed(&name) {
        membership.effects().remove(RecordKey::TenantSsd(name));
    }
    Reply::TenantRemoved
}
