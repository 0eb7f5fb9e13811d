//! A node's membership: joining, heartbeats, and the slots that each new map gives its shards.
//!
//! A control plane that lost its state knows no members. Whoever is not known offers the map that it follows, and goes
//! on by it: the control plane adopts that, unless it has given slots to others by then. In that case nobody can say
//! who had our slots meanwhile: whoever finds that out first, the offer or the map, begins a new incarnation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvplane_engine::ShardHandle;
use kvplane_proto::ids::{Epoch, Incarnation};
use kvplane_proto::map::{Member, SlotOwners};
use kvplane_rpc::RefusalCode;
use kvplane_rpc::message::{
    AttachDevices, Heartbeat, Join, Kind, Leave, Load, OfferMap, Owner, RegisterSegment, Request, Segment, SettleReport,
};

use super::incarnation;
use super::shard_report::ShardReports;
use super::tier_report::TierReports;
use crate::error::Error;
use crate::link::{ControlLink, StateMap, software};
use crate::tickets::NodeTickets;

/// How long a start waits for slots, when others' are still moving: less than two heartbeats.
const SHARE_PATIENCE: Duration = Duration::from_millis(1500);
/// How long a node that ends waits until the control plane has taken note of it.
const GOODBYE: Duration = Duration::from_secs(1);
/// How long a control plane that waits for members of a lost state may take until it is ready for others: its deadline
/// for heartbeats, with room.
const READY: Duration = Duration::from_secs(30);
/// Offers in a row that end without an answer: a control plane of an earlier version, which ends the connection.
const OFFERS: u32 = 3;
/// How often the membership thread looks around between heartbeats.
const LOOK: Duration = Duration::from_millis(20);

pub(super) struct Membership {
    pub(super) link: ControlLink,
    pub(super) member: Member,
    pub(super) shards: Arc<Vec<ShardHandle>>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) trouble: Arc<Mutex<Option<String>>>,
    pub(super) seen_map: u64,
    /// The map that the shards were told last in this incarnation.
    pub(super) applied: Epoch,
    /// The map as of which the control plane was told that all has come.
    pub(super) settled: Option<Epoch>,
    /// Which state of the control plane that map was of.
    pub(super) state: u64,
    pub(super) capacity_bytes: u64,
    pub(super) tiers: TierReports,
    pub(super) figures: ShardReports,
    /// What is on its devices counts if they knew a map of this epoch or of a later one.
    pub(super) kept_since: Epoch,
    /// Offers of the map that were not answered, in a row.
    pub(super) unanswered: u32,
    /// The present incarnation, for who reports beside.
    pub(super) incarnation: Arc<Mutex<u64>>,
    /// What peers of the shards prove, if they do.
    pub(super) tickets: NodeTickets,
}

impl Membership {
    pub(super) fn join(&mut self) -> Result<(), Error> {
        self.attach_devices()?;
        self.call_when_ready(&self.said())?;
        tracing::info!(node = self.member.node.0, incarnation = self.member.incarnation.0, "joined");
        self.settled = None;
        self.tell_settled(Epoch(0))?;
        self.heartbeat()
    }

    /// The request with which this node joins.
    fn said(&self) -> Join {
        let (member, version) = (self.member.clone(), software().to_owned());
        Join { member, capacity_bytes: self.capacity_bytes, version }
    }

    /// Makes a call for which the control plane may not be ready yet.
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
                    // It was refused for as long as a call may take; what is said of that is in the log once.
                    tracing::info!(node = self.member.node.0, "waits for the control plane: {error}");
                }
                outcome => return outcome,
            }
        }
    }

    /// A digest of the identities of its devices; 0 without any.
    fn devices(&self) -> u128 {
        let fold = |devices: u128, shard: &ShardHandle| devices.rotate_left(7) ^ shard.device().unwrap_or(0);
        self.shards.iter().fold(0, fold)
    }

    /// Says which devices this incarnation has, and hears which maps they must have known for what is on them to count.
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
                load.used_bytes += store.used_bytes;
            }
            snapshots.push(snapshot);
        }
        let (node, incarnation) = (self.member.node.0, self.member.incarnation.0);
        self.link.call_unless(&self.stop, Heartbeat { node, incarnation, load })?;
        // Again and again: a control plane that was started anew does not know it.
        self.settled.map_or(Ok(()), |epoch| self.tell_settled(epoch))?;
        self.tickets.refresh(&self.link, incarnation, &self.shards)?;
        self.figures.report(&self.link, node, incarnation, &self.shards, &snapshots);
        super::tenant_report::exchange(&self.link, node, incarnation, &self.shards);
        self.tiers.exchange(&self.link, node, incarnation, &self.shards);
        Ok(())
    }

    fn tell_settled(&mut self, epoch: Epoch) -> Result<(), Error> {
        let (node, incarnation) = (self.member.node.0, self.member.incarnation.0);
        self.link.call_unless(&self.stop, SettleReport { node, incarnation, epoch: epoch.0 })?;
        self.settled = Some(epoch);
        Ok(())
    }

    /// Says that all is here that moved by the map that the shards were told last, as soon as it is: others who want to
    /// join may wait for that.
    fn settle(&mut self) -> Result<(), Error> {
        if self.settled >= Some(self.applied) {
            return Ok(());
        }
        for shard in self.shards.iter() {
            if !shard.snapshot()?.moves.settled {
                return Ok(());
            }
        }
        self.tell_settled(self.applied)
    }

    /// Waits until the node is in the map, and, for a while, until it has its share of the slots: it gets that when
    /// what moved before has come to the others.
    pub(super) fn wait_until_mapped(&mut self) -> Result<(), Error> {
        let patience = Duration::from_secs(10);
        let start = std::time::Instant::now();
        loop {
            self.follow_map();
            // Shares wait for the report of all who are to own slots, this node too. What fails is tried again.
            let _ = self.settle();
            let weight = self.link.map().and_then(|map| {
                let member = map.member(self.member.node)?;
                (member.incarnation == self.member.incarnation).then_some(member.weight)
            });
            match weight {
                Some(weight) if weight == self.member.weight => return Ok(()),
                Some(_) if start.elapsed() > SHARE_PATIENCE => {
                    tracing::info!(node = self.member.node.0, "gets its slots when what moves has come to the others");
                    return Ok(());
                }
                _ => {}
            }
            if start.elapsed() > patience {
                return Err(Error::Argument(format!("the node was not in the map after {} s", patience.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Puts the pool into the catalog, where tools that look for storage find it.
    pub(super) fn list_pool(&self) -> Result<(), Error> {
        let Some(address) = self.shards.first().map(ShardHandle::address) else { return Ok(()) };
        let owner = Owner::Node { node: self.member.node.0, incarnation: self.member.incarnation.0 };
        self.link.call_unless(
            &self.stop,
            RegisterSegment {
                segment: Segment {
                    name: address.to_string(),
                    owner,
                    kind: Kind::Dram,
                    bytes: self.capacity_bytes,
                    address,
                    ttl_ns: 0,
                },
            },
        )?;
        Ok(())
    }

    /// Tells the shards what they own by the newest map.
    fn follow_map(&mut self) {
        let generation = self.link.map_generation();
        if generation == self.seen_map {
            return;
        }
        let Some(StateMap { state, map }) = self.link.state_map() else { return };
        if self.applied != Epoch(0) && self.state != state {
            // Epochs of two states do not compare, and nobody knows who was given our slots by either.
            tracing::warn!(node = self.member.node.0, "the control plane has another state: a new incarnation begins");
            if let Err(error) = self.begin_incarnation() {
                *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            }
            return;
        }
        let mut owners = SlotOwners::of(&map);
        owners.kept = self.kept_since;
        let owners = Arc::new(owners);
        let told = self.shards.iter().all(|shard| shard.follow_owners(state, Arc::clone(&owners)).is_ok());
        // A full mailbox is tried again at the next look.
        if told {
            (self.seen_map, self.applied, self.state) = (generation, map.epoch, state);
            tracing::info!(epoch = map.epoch.0, members = map.members.len(), "follows a map");
        }
    }

    pub(super) fn live(mut self) {
        let interval = Duration::from_nanos(self.link.welcome().heartbeat_interval_ns).max(LOOK);
        let mut last = std::time::Instant::now();
        let mut settled = Ok(());
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
            self.follow_map();
            // What failed is tried again beside the next heartbeat.
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
                None if before.is_some() => tracing::info!(node = self.member.node.0, "the control plane is back"),
                _ => {}
            }
        }
        let (node, incarnation) = (self.member.node.0, Some(self.member.incarnation.0));
        // Without an answer, the others find out by the silence.
        let _ = self.link.call_within(Leave { node, incarnation }, GOODBYE);
    }

    /// A heartbeat was refused.
    fn recover(&mut self, error: Error) -> Result<(), Error> {
        let Error::Call(call) = &error else { return Err(error) };
        match call.refusal() {
            Some(RefusalCode::UnknownMember) if self.offer_map()? => Err(Error::Argument(
                "the control plane does not know this node, and may have lost its state: it was told which map the \
                 node follows"
                    .to_owned(),
            )),
            // Our slots are others' by now, or may be. What we hold may be older than what they were given.
            Some(RefusalCode::UnknownMember | RefusalCode::IncarnationEnded) => {
                tracing::warn!(
                    node = self.member.node.0,
                    "its incarnation was declared over: a new one begins ({error})"
                );
                self.begin_incarnation()
            }
            _ => Err(error),
        }
    }

    /// Tells a control plane that does not know us which map we follow; false when it does not want to hear that, as
    /// slots were given to others.
    fn offer_map(&mut self) -> Result<bool, Error> {
        let followed = self.link.state_map().filter(|known| known.state == self.state && self.applied != Epoch(0));
        let Some(StateMap { state, map }) = followed else { return Ok(false) };
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

    /// Drops what the shards have, and joins as a new incarnation of this node. The shards are first: no member ever
    /// has what it had before it was one.
    fn begin_incarnation(&mut self) -> Result<(), Error> {
        let incarnation = Incarnation(incarnation::next(self.member.incarnation.0));
        for shard in self.shards.iter() {
            shard.begin_incarnation(incarnation)?;
        }
        self.member.incarnation = incarnation;
        *self.incarnation.lock().unwrap_or_else(PoisonError::into_inner) = incarnation.0;
        (self.applied, self.unanswered) = (Epoch(0), 0);
        self.join()?;
        self.list_pool()
    }
}
