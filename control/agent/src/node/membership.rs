//! Membership of a node: joining, heartbeats, and assignment of the slots of each new map to its shards.
//!
//! A control plane that lost its state knows no members. A node that is unknown to it offers the map that it follows,
//! and keeps following it: the control plane adopts that map, unless it has assigned slots to others by then. In that
//! case it is unknown who owned the node's slots meanwhile: the node begins a new incarnation, whether it learns that
//! from the refused offer or from the new map.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvplane_engine::ShardHandle;
use kvplane_proto::ids::{Epoch, Incarnation};
use kvplane_proto::map::{ClusterMap, Member, SlotOwners};
use kvplane_rpc::RefusalCode;
use kvplane_rpc::message::{
    AttachDevices, Heartbeat, Join, Leave, Load, OfferMap, RegisterSegment, Request, Segment, SegmentKind,
    SegmentOwner, SettleReport,
};

use super::followed_map::FollowedMap;
use super::incarnation;
use super::reports::shard::ShardReports;
use super::reports::tier::TierReports;
use crate::error::Error;
use crate::link::{ControlLink, StateMap, software};
use crate::tickets::NodeTickets;

/// Longest wait of a start for the node's slots while other migrations are in flight: less than two heartbeats.
const SHARE_PATIENCE: Duration = Duration::from_millis(1500);
/// Longest wait of a successor for its map before its first heartbeat.
const OWN_MAP: Duration = Duration::from_millis(200);
/// Longest wait of a node that leaves for the control plane's acknowledgement.
const GOODBYE: Duration = Duration::from_secs(1);
/// Longest wait for a control plane that waits for members of a lost state before it admits others: its heartbeat
/// deadline, with a margin.
const READY: Duration = Duration::from_secs(30);
/// Consecutive offers without a reply after which they stop: a control plane of an earlier version closes the
/// connection instead.
const OFFERS: u32 = 3;
/// Interval at which the membership thread checks for a new map between heartbeats.
const LOOK: Duration = Duration::from_millis(20);

pub(super) struct Membership {
    pub(super) link: ControlLink,
    pub(super) member: Member,
    pub(super) shards: Arc<Vec<ShardHandle>>,
    pub(super) stop: Arc<AtomicBool>,
    /// True if this incarnation takes over from a running one.
    pub(super) succeeds: bool,
    /// True if the next incarnation joins at once, in place of this one.
    pub(super) is_succeeded: Arc<AtomicBool>,
    pub(super) trouble: Arc<Mutex<Option<String>>>,
    pub(super) followed: FollowedMap,
    pub(super) capacity_bytes: u64,
    pub(super) tiers: TierReports,
    pub(super) figures: ShardReports,
    /// Records on the devices are valid if they knew a map of this epoch or of a later one.
    pub(super) kept_since: Epoch,
    /// Consecutive offers of the map without a reply.
    pub(super) unanswered: u32,
    /// Present incarnation, shared with the threads that report.
    pub(super) incarnation: Arc<Mutex<u64>>,
    /// Ticket keys, by which the shards authenticate their peers.
    pub(super) tickets: NodeTickets,
}

impl Membership {
    pub(super) fn join(&mut self) -> Result<(), Error> {
        self.attach_devices()?;
        self.call_when_ready(&self.said())?;
        tracing::info!(node = self.member.node.0, incarnation = self.member.incarnation.0, "joined");
        self.followed.set_settled(None);
        self.tell_settled(Epoch(0))?;
        if self.succeeds {
            self.follow_own_map();
        }
        self.heartbeat()
    }

    /// Waits for the map in which this incarnation has replaced the former one, and follows it: its clients wait, and
    /// the reports to the control plane can.
    fn follow_own_map(&mut self) {
        let begun = std::time::Instant::now();
        while begun.elapsed() < OWN_MAP {
            let member = self.link.map().and_then(|map| map.member(self.member.node).map(|member| member.incarnation));
            if member == Some(self.member.incarnation) {
                return self.follow_map();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the request with which this node joins.
    fn said(&self) -> Join {
        let (member, version) = (self.member.clone(), software().to_owned());
        Join { member, capacity_bytes: self.capacity_bytes, version }
    }

    /// Makes a call, and retries it while the control plane is not ready.
    fn call_when_ready<R>(&self, call: &R) -> Result<R::Reply, Error>
    where
        R: Request + Clone + Send + 'static,
        R::Reply: Send + 'static,
    {
        let begun = std::time::Instant::now();
        loop {
            match self.link.call_unless(&self.stop, call.clone()) {
                Err(Error::Call(error))
                    if error.refusal() == Some(RefusalCode::NotReady)
                        && begun.elapsed() < READY
                        && !self.stop.load(Ordering::Relaxed) =>
                {
                    // Each attempt waited for the deadline of a call, so the log is not flooded.
                    tracing::info!(node = self.member.node.0, "waiting for the control plane to become ready: {error}");
                }
                outcome => return outcome,
            }
        }
    }

    /// Returns a digest of the identities of the node's devices; 0 without any.
    fn devices(&self) -> u128 {
        let fold = |devices: u128, shard: &ShardHandle| devices.rotate_left(7) ^ shard.device().unwrap_or(0);
        self.shards.iter().fold(0, fold)
    }

    /// Registers the devices of this incarnation, and receives the epoch of the map that they must have known for their
    /// records to be valid.
    fn attach_devices(&mut self) -> Result<(), Error> {
        let devices = self.devices();
        if devices == 0 {
            return Ok(());
        }
        let (node, incarnation) = (self.member.node.0, self.member.incarnation.0);
        self.kept_since = Epoch(self.call_when_ready(&AttachDevices { node, incarnation, devices })?.since);
        Ok(())
    }

    fn heartbeat(&mut self) -> Result<(), Error> {
        let mut load = Load { objects: 0, used_bytes: 0, capacity_bytes: self.capacity_bytes };
        let mut snapshots = Vec::with_capacity(self.shards.len());
        for shard in self.shards.iter() {
            let snapshot = shard.snapshot()?;
            if let Some(store) = &snapshot.store {
                load.objects += store.objects;
                load.used_bytes += store.used_bytes + snapshot.far.used_bytes;
            }
            snapshots.push(snapshot);
        }
        let (node, incarnation) = (self.member.node.0, self.member.incarnation.0);
        self.link.call_unless(&self.stop, Heartbeat { node, incarnation, load })?;
        // Repeated at every heartbeat: a control plane that was restarted has not seen it.
        self.followed.settled().map_or(Ok(()), |epoch| self.tell_settled(epoch))?;
        self.tickets.refresh(&self.link, incarnation, &self.shards)?;
        self.figures.report(&self.link, node, incarnation, &self.shards, &snapshots);
        super::reports::tenant::exchange(&self.link, node, incarnation, &self.shards);
        self.tiers.exchange(&self.link, node, incarnation, &self.shards);
        Ok(())
    }

    fn tell_settled(&mut self, epoch: Epoch) -> Result<(), Error> {
        let (node, incarnation) = (self.member.node.0, self.member.incarnation.0);
        self.link.call_unless(&self.stop, SettleReport { node, incarnation, epoch: epoch.0 })?;
        self.followed.set_settled(Some(epoch));
        Ok(())
    }

    /// Reports that all migrations by the followed map are complete, as soon as they are: joins of other nodes may
    /// wait for that.
    fn settle(&mut self) -> Result<(), Error> {
        let Some(epoch) = self.followed.unsettled() else { return Ok(()) };
        for shard in self.shards.iter() {
            if !shard.snapshot()?.moves.settled {
                return Ok(());
            }
        }
        self.tell_settled(epoch)
    }

    /// Waits until the node is in the map, and, for a while, until it has its share of the slots: it gets that when the
    /// migrations before it have completed.
    pub(super) fn wait_until_mapped(&mut self) -> Result<(), Error> {
        let patience = Duration::from_secs(10);
        // It has the share of the incarnation that it continues: none, if that was drained.
        let has_share = self.succeeds && self.member.incarnation.is_successor();
        let start = std::time::Instant::now();
        loop {
            self.follow_map();
            // Slots are assigned after the reports of all future owners, including this node. A failure is retried.
            let _ = self.settle();
            let weight = self.link.map().and_then(|map| {
                let member = map.member(self.member.node)?;
                (member.incarnation == self.member.incarnation).then_some(member.weight)
            });
            match weight {
                Some(weight) if weight == self.member.weight || has_share => return Ok(()),
                Some(_) if start.elapsed() > SHARE_PATIENCE => {
                    tracing::info!(node = self.member.node.0, "slots follow when migrations in flight end");
                    return Ok(());
                }
                _ => {}
            }
            if start.elapsed() > patience {
                return Err(Error::NotInMap { after: patience });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Registers the pool as a segment in the catalog, where tools look for storage.
    pub(super) fn list_pool(&self) -> Result<(), Error> {
        let Some(address) = self.shards.first().map(ShardHandle::address) else { return Ok(()) };
        let owner = SegmentOwner::Node { node: self.member.node, incarnation: self.member.incarnation };
        self.link.call_unless(
            &self.stop,
            RegisterSegment {
                segment: Segment {
                    name: address.to_string(),
                    owner,
                    kind: SegmentKind::Dram,
                    bytes: self.capacity_bytes,
                    address,
                    ttl_ns: 0,
                },
            },
        )?;
        Ok(())
    }

    /// Assigns the slots of the newest map to the shards, after those of each map since the last one: a shard that
    /// misses a change of owners drops its memory.
    fn follow_map(&mut self) {
        let generation = self.link.map_generation();
        if self.followed.is_current(generation) {
            return;
        }
        let Some(StateMap { state, map, recent }) = self.link.state_map() else { return };
        if self.followed.is_of_another(state) {
            // Epochs of two states cannot be compared, and either state may have assigned the node's slots to others.
            tracing::warn!(node = self.member.node.0, "another cluster state: beginning a new incarnation");
            if let Err(error) = self.begin_incarnation() {
                *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            }
            return;
        }
        // An incarnation begins with the newest map.
        let known = self.followed.epoch();
        let is_between = |passed: &Epoch| known != Epoch(0) && known < *passed && *passed < map.epoch;
        for passed in recent.iter().filter(|passed| is_between(&passed.epoch)) {
            if !self.assign(state, passed) {
                return;
            }
            self.followed.pass(state, passed.epoch);
        }
        if self.assign(state, &map) {
            self.followed.follow(generation, state, map.epoch);
        }
    }

    /// Assigns the slots of a map to the shards. Returns false if a mailbox is full: the next round tries again.
    fn assign(&self, state: u64, map: &ClusterMap) -> bool {
        let mut owners = SlotOwners::of(map);
        owners.kept = self.kept_since;
        let owners = Arc::new(owners);
        let told = self.shards.iter().all(|shard| shard.follow_owners(state, Arc::clone(&owners)).is_ok());
        if told {
            tracing::info!(epoch = map.epoch.0, members = map.members.len(), "following a new map");
        }
        told
    }

    pub(super) fn live(mut self) {
        let interval = Duration::from_nanos(self.link.welcome().heartbeat_interval_ns).max(LOOK);
        let mut last = std::time::Instant::now();
        let mut settled = Ok(());
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
            self.follow_map();
            // A failure is retried with the next heartbeat.
            if settled.is_ok() {
                settled = self.settle();
            }
            if last.elapsed() < interval {
                continue;
            }
            last = std::time::Instant::now();
            let outcome = std::mem::replace(&mut settled, Ok(()))
                .and_then(|()| self.heartbeat())
                .or_else(|error| self.recover(error));
            let trouble = outcome.err().map(|error| error.to_string());
            let before =
                std::mem::replace(&mut *self.trouble.lock().unwrap_or_else(PoisonError::into_inner), trouble.clone());
            match trouble {
                Some(trouble) if before.as_ref() != Some(&trouble) => {
                    tracing::warn!(node = self.member.node.0, "serving by the last map: {trouble}");
                }
                None if before.is_some() => tracing::info!(node = self.member.node.0, "the control plane answers"),
                _ => {}
            }
        }
        if self.is_succeeded.load(Ordering::Relaxed) {
            return;
        }
        let (node, incarnation) = (self.member.node.0, Some(self.member.incarnation.0));
        // Without an acknowledgement, other nodes rely on failure detection.
        let _ = self.link.call_within(Leave { node, incarnation }, GOODBYE);
    }

    /// Handles a failed or refused heartbeat.
    fn recover(&mut self, error: Error) -> Result<(), Error> {
        let Error::Call(call) = &error else { return Err(error) };
        match call.refusal() {
            Some(RefusalCode::UnknownMember) if self.offer_map()? => Err(Error::MapOffered),
            // The node's slots have other owners by now, or may have. Its objects may be older than theirs.
            Some(RefusalCode::UnknownMember | RefusalCode::IncarnationEnded) => {
                tracing::warn!(node = self.member.node.0, "the incarnation has ended: beginning a new one ({error})");
                self.begin_incarnation()
            }
            _ => Err(error),
        }
    }

    /// Offers the map that this node follows to a control plane that does not know the node. Returns false when the
    /// control plane refuses it, because it has assigned slots to others.
    fn offer_map(&mut self) -> Result<bool, Error> {
        let followed = self.link.state_map().filter(|known| self.followed.is_of(known.state));
        let Some(StateMap { state, map, .. }) = followed else { return Ok(false) };
        let (join, devices) = (self.said(), self.devices());
        let offer = OfferMap { join, state, map: (*map).clone(), devices, since: self.kept_since.0 };
        match self.link.call_unless(&self.stop, offer) {
            Ok(_) => {
                self.unanswered = 0;
                Ok(true)
            }
            Err(Error::Call(error)) if error.refusal().is_some() => Ok(false),
            Err(error) => {
                self.unanswered += 1;
                if self.unanswered < OFFERS { Err(error) } else { Ok(false) }
            }
        }
    }

    /// Drops the shards' objects, and joins as a new incarnation of this node. The shards switch first: a member never
    /// has objects of the time before it joined.
    fn begin_incarnation(&mut self) -> Result<(), Error> {
        let incarnation = Incarnation(incarnation::next(self.member.incarnation.0));
        for shard in self.shards.iter() {
            shard.begin_incarnation(incarnation)?;
        }
        self.member.incarnation = incarnation;
        *self.incarnation.lock().unwrap_or_else(PoisonError::into_inner) = incarnation.0;
        self.followed.end();
        self.unanswered = 0;
        self.join()?;
        self.list_pool()
    }
}
