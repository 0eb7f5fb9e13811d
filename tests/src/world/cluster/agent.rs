//! Agent of a node: represents the node at the control plane, and passes received maps to the node's shards.

use std::collections::BTreeSet;
use std::rc::Rc;

use kvplane_cluster::{Input, Load, Offer, Rejection, Reply};
use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Slot};
use kvplane_proto::map::{ClusterMap, ShardKey, SlotOwners};

use kvplane_store::service::MapStanding;
use kvplane_store::service::Tiering;

use crate::world::World;
use crate::world::check::epochs::Epochs;
use crate::world::check::{Rule, broken};
use crate::world::cluster::departures::Departure;
use crate::world::faults::Party;
use crate::world::queue::{Event, Message};
use crate::world::scenario::{MS, Mischief};

/// Interval at which a node sends heartbeats, or requests to join.
const AGENT_NS: u64 = 100 * MS;
/// Identity of the cluster state, which outlives the control plane's processes here.
const STATE: u64 = 1;

/// Maps whose owners are kept, beside those that shards follow.
const OWNERS_MOST: usize = 8;

impl World {
    /// Runs the agent's periodic turn: joins, or sends a heartbeat.
    pub(crate) fn agent(&mut self, index: usize, incarnation: u64) {
        if !self.is_node(index, incarnation) || self.is_silent(index) {
            return;
        }
        // Like a real node: it opens its disks before it joins the cluster.
        if !self.tiers_opened(index) {
            self.after(MS, Event::Agent(index, incarnation));
            return;
        }
        self.note_moves(index);
        self.speak(index);
        self.report_ssds(index);
        let jitter_ns = self.streams.schedule.below(10 * MS);
        self.after(AGENT_NS + jitter_ns, Event::Agent(index, incarnation));
    }

    /// Returns true for a node that leaves and no longer sends heartbeats.
    fn is_silent(&self, index: usize) -> bool {
        match self.nodes[index].departure {
            None | Some(Departure::Drains) => false,
            Some(Departure::Waits { .. }) => !self.scenario.announces,
            Some(Departure::Ended) => true,
        }
    }

    fn note_moves(&mut self, index: usize) {
        if self.nodes[index].shards.iter().any(|incarnation| self.incarnations[*incarnation].imports()) {
            self.moved_ns = self.now_ns;
        }
    }

    fn speak(&mut self, index: usize) {
        // A real node does so beside its heartbeats.
        self.report_settled(index);
        let node = &self.nodes[index];
        let (id, incarnation) = (NodeId(index as u64 + 1), Incarnation(node.incarnation));
        let input = if node.joined {
            Input::Heartbeat { node: id, incarnation, load: Load::default() }
        } else if let Some(devices) = self.disks_of(index).filter(|_| node.kept_since.is_none()) {
            Input::AttachDevices { node: id, incarnation, devices }
        } else {
            let member = node.member(index, self.scenario.shards);
            Input::Join { member, capacity_bytes: self.scenario.host_bytes(), version: "world".to_owned() }
        };
        self.tell_control(Party::Node(index), Message::Node(index, incarnation.0, input));
    }

    /// Reports that a member has imported all slots that it gained by its shards' map, once that is true.
    fn report_settled(&mut self, index: usize) {
        let node = &self.nodes[index];
        let settled = |incarnation: &usize| self.incarnations[*incarnation].service.inspect().move_counters().settled;
        let is_settled = self.scenario.has(Mischief::SettleEarly) || node.shards.iter().all(settled);
        if !(node.joined && is_settled) {
            return;
        }
        let (id, incarnation) = (NodeId(index as u64 + 1), Incarnation(node.incarnation));
        let input = Input::Settled { node: id, incarnation, epoch: node.epoch };
        self.tell_control(Party::Node(index), Message::Node(index, incarnation.0, input));
    }

    pub(crate) fn is_node(&self, index: usize, incarnation: u64) -> bool {
        self.nodes[index].up && self.nodes[index].incarnation == incarnation
    }

    /// Delivers the control plane's reply to the agent.
    pub(crate) fn agent_hears(&mut self, index: usize, incarnation: u64, answer: &Result<Reply, Rejection>) {
        if !self.is_node(index, incarnation) {
            return;
        }
        if self.nodes[index].departure.is_some() {
            if self.scenario.announces {
                self.departing_hears(index, answer);
            }
            return;
        }
        match answer {
            // The node first announces that it reports migrations, and then that it is ready.
            Ok(Reply::Joined { .. }) if !self.nodes[index].joined => {
                let node = NodeId(index as u64 + 1);
                let input = Input::Settled { node, incarnation: Incarnation(incarnation), epoch: Epoch(0) };
                self.tell_control(Party::Node(index), Message::Node(index, incarnation, input));
            }
            Ok(Reply::Settled) if !self.nodes[index].joined => {
                self.nodes[index].joined = true;
                self.speak(index);
            }
            Ok(Reply::DevicesKept { since }) if !self.nodes[index].joined => {
                self.nodes[index].kept_since = Some(*since);
                self.speak(index);
            }
            Ok(Reply::Alive { epoch, since }) => {
                // Replies arrive in any order.
                if *epoch >= self.nodes[index].heard.0 {
                    self.nodes[index].heard = (*epoch, *since);
                }
                if *epoch <= self.nodes[index].epoch {
                    return;
                }
                self.tell_control(Party::Node(index), Message::Fetch(Party::Node(index)));
            }
            Ok(_) | Err(Rejection::NodeIdInUse { .. } | Rejection::LastOwner { .. } | Rejection::Adopting { .. }) => {}
            Err(Rejection::Unknown { .. }) => self.offer_map(index),
            // No member knows who owned the node's slots meanwhile.
            Err(Rejection::OfferRefused { .. }) => self.begin_again(index),
            // The node's slots have other owners: it drops its objects and comes back as a new incarnation. A late
            // reply to a message from before a rejoin does not get here: it carries the former incarnation.
            Err(Rejection::Ended { .. } | Rejection::StaleIncarnation { .. }) => {
                if self.streams.faults.chance(0.5) {
                    self.crash_node(index);
                    self.start_node(index);
                } else {
                    self.begin_again(index);
                }
            }
            Err(rejection) => {
                self.violate(broken(Rule::Protocol, format!("node {index} was refused: {rejection}")));
            }
        }
    }

    /// Handles a control plane that does not know the node, and may have lost its state. Without a map, the node has
    /// nothing to offer.
    fn offer_map(&mut self, index: usize) {
        let node = &self.nodes[index];
        let Some(map) = &node.map else { return self.begin_again(index) };
        let member = node.member(index, self.scenario.shards);
        if map.member(member.node).is_none_or(|mapped| mapped.incarnation != member.incarnation) {
            return self.begin_again(index);
        }
        let devices = self.disks_of(index).map(|devices| (devices, node.kept_since.unwrap_or(Epoch(0))));
        let (capacity_bytes, version) = (self.scenario.host_bytes(), "world".to_owned());
        let offer = Offer { state: STATE, map: (**map).clone(), member, capacity_bytes, version, devices };
        let input = Input::Offer { offer: Box::new(offer) };
        let incarnation = node.incarnation;
        self.tell_control(Party::Node(index), Message::Node(index, incarnation, input));
    }

    /// Continues the process under a new incarnation: its shards drop their objects and close their connections.
    fn begin_again(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        node.incarnation = Incarnation::line_from(node.incarnation + 1).0;
        node.joined = false;
        node.kept_since = None;
        (node.epoch, node.map, node.heard) = (Epoch(0), None, (Epoch(0), Epoch(0)));
        let incarnation = node.incarnation;
        for shard in node.shards.clone() {
            self.incarnations[shard].epoch = 0;
            self.incarnations[shard].service.begin_incarnation(Incarnation(incarnation));
            self.incarnations[shard].changed.clear();
            self.note_moved_records(shard, |_| true);
            let lineage = self.lineage(shard);
            self.dropped(lineage, |_| true);
            self.drain_service(shard, None);
        }
        self.after(MS, Event::Agent(index, incarnation));
    }

    /// Delivers a map to the node: each shard learns its slots.
    pub(crate) fn node_sees_map(&mut self, index: usize, map: &Rc<ClusterMap>) {
        let node = &self.nodes[index];
        let (before, epoch) = (node.epoch, map.epoch);
        // Like a real node: it opens its disks before it joins the cluster.
        if !node.up || epoch <= before || !self.tiers_opened(index) {
            return;
        }
        let Some(since) = self.standing_of(map) else { return };
        (self.nodes[index].epoch, self.nodes[index].map) = (epoch, Some(Rc::clone(map)));
        self.detail(epoch.0, || format!("node {index} goes from epoch {before} to {epoch}"));
        let mut owners = self.owners_of(map);
        let kept_since = self.nodes[index].kept_since.unwrap_or(Epoch(0));
        let since = since.max(kept_since);
        if kept_since > Epoch(0) {
            // Like a real node: the objects on its disks may be older than those of its own later incarnation without
            // the disks.
            Rc::make_mut(&mut owners).kept = kept_since;
        }
        // A slot may have had another owner in a missed epoch and have come back: objects here may be stale.
        let missed = before.0 > 0 && epoch.0 > before.0 + 1 && since > before && owners.from > before;
        self.statistics.missed += u64::from(missed);
        for incarnation in self.nodes[index].shards.clone() {
            if !self.shard_sees_owners(incarnation, &owners, since, missed, map) {
                self.detail(incarnation as u64, || format!("incarnation {incarnation} is KILLED before it serves"));
                self.crash_node(index);
                return self.after(10 * MS, Event::StartNode(index));
            }
        }
        self.note_moves(index);
        // A real node checks every few milliseconds.
        self.report_settled(index);
    }

    /// Tells a shard its slots. Returns false if its process was killed before it serves them.
    fn shard_sees_owners(
        &mut self,
        index: usize,
        owners: &SlotOwners,
        since: Epoch,
        missed: bool,
        map: &ClusterMap,
    ) -> bool {
        let lineage = self.lineage(index);
        let running = &self.incarnations[index];
        let (before, epoch, node) = (running.epoch, owners.epoch, running.node);
        let (shard, incarnation) = (ShardId(running.shard), Incarnation(self.nodes[node].incarnation));
        let me = ShardKey { node: NodeId(node as u64 + 1), incarnation, shard };
        let owns = |slot: u16| owners.owner(Slot(slot)) == Some(me);
        let note = running.service.inspect().tier().and_then(Tiering::ownership);
        let believed = note.is_some_and(|note| note.epoch >= since && note.epoch <= epoch);
        let forgotten = before == 0 && !believed && self.scenario.tier.is_some();
        let keys: Vec<Digest> = (0..self.scenario.keys).map(|key| self.shadow.digest(key)).collect();
        let service = &running.service;
        let of_before: Vec<(bool, bool, Option<Epoch>)> = keys
            .iter()
            .map(|digest| digest.slot())
            .map(|slot| {
                (service.inspect().serves(slot), service.inspect().exports(slot), service.inspect().second_since(slot))
            })
            .collect();
        let running = &mut self.incarnations[index];
        // These hosts ignore the map's information about former owners.
        if self.scenario.has(Mischief::SkipEpochs) || self.scenario.has(Mischief::BelieveDisks) {
            running.service.own(epoch, MapStanding { state: STATE, since, kept: Epoch(0) }, owns);
        } else if !self.scenario.has(Mischief::KeepSlots)
            || !keys.iter().any(|digest| running.service.inspect().serves(digest.slot()) && !owns(digest.slot().0))
        {
            running.service.follow(STATE, owners);
        }
        let (mut gone, mut begins_export) = (BTreeSet::new(), false);
        let mut moved = Vec::new();
        for (digest, (served, exported, second)) in keys.iter().zip(of_before) {
            let inspected = running.service.inspect();
            begins_export |= !exported && inspected.exports(digest.slot());
            let role = (inspected.serves(digest.slot()), inspected.second_since(digest.slot()));
            moved.extend((role != (served, second)).then_some(*digest));
            let still_second =
                second.is_some() && second == running.service.inspect().second_since(digest.slot()) && !missed;
            if still_second && !exported {
                continue;
            }
            let exports = running.service.inspect().exports(digest.slot());
            if exported && !exports || missed || forgotten || !exports && !owns(digest.slot().0) {
                gone.insert(*digest);
            }
            if (!served || missed)
                && owns(digest.slot().0)
                && let Some(key) = self.shadow.key(*digest)
            {
                running.changed.remove(&key);
            }
        }
        if running.service.inspect().awaits_map() {
            // By a map without slots for this incarnation nothing is decided about kept memory.
            gone.clear();
        }
        let observed = Epochs::observe("a shard", Epoch(running.epoch), epoch);
        running.epoch = epoch.0;
        self.require(observed);
        self.note_moved_records(index, |digest| moved.contains(&digest));
        let store = (self.scenario.replicas > 1).then(|| self.incarnations[index].service.store());
        let there = keys.iter().filter_map(|digest| Some((*digest, store?.peek(*digest)?.version.0))).collect();
        if self.scenario.tier.is_some() {
            self.dropped(lineage, |digest| gone.contains(&digest));
        } else {
            self.shadow.dropped_but(lineage, self.trace.events, |digest| gone.contains(&digest), &there);
        }
        if !self.memory_follows(index, map) {
            return false;
        }
        if begins_export {
            self.repeat_reports(index);
        }
        self.set_sources(index, owners);
        self.drain_service(index, None);
        true
    }

    /// Returns the epoch since which owners have been as the map says; `None` if the control plane has to be asked
    /// first, for hosts that ignore the map's information.
    fn standing_of(&self, map: &ClusterMap) -> Option<Epoch> {
        if self.scenario.has(Mischief::BelieveDisks) {
            return Some(Epoch(0));
        }
        if self.scenario.has(Mischief::SkipEpochs) {
            return Some(map.epoch);
        }
        Some(map.former.as_ref().map_or(map.epoch, |former| former.since))
    }

    /// Notes that a shard dropped objects. A disk may bring them back if no other shard owned their slots meanwhile.
    fn dropped(&mut self, lineage: usize, dropped: impl Fn(Digest) -> bool) {
        if self.scenario.returns {
            // The disk has the objects, and the owners of the slots meanwhile report changes.
        } else if self.scenario.tier.is_some() {
            self.shadow.promises_void(lineage, dropped);
        } else {
            self.shadow.dropped(lineage, self.trace.events, dropped);
        }
    }

    /// Returns the owners by a map, which are computed once for all nodes.
    pub(crate) fn owners_of(&mut self, map: &ClusterMap) -> Rc<SlotOwners> {
        if let Some(owners) = self.owners.get(&map.epoch.0) {
            return Rc::clone(owners);
        }
        let owners = Rc::new(SlotOwners::of(map));
        self.owners.insert(map.epoch.0, Rc::clone(&owners));
        if self.owners.len() > OWNERS_MOST {
            let Self { owners, incarnations, .. } = self;
            let is_followed = |epoch| incarnations.iter().any(|shard| shard.alive && shard.epoch == epoch);
            owners.retain(|epoch, _| *epoch == map.epoch.0 || is_followed(*epoch));
        }
        owners
    }
}
