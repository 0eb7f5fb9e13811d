//! Nodes and the incarnations of their shards: start and end.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, SegmentId, ShardId, Version};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress};
use kvplane_proto::rng::Rng;
use kvplane_store::eviction::Eviction;
use kvplane_store::service::{Identity, MemoryImage, PeerKey, ScrubPace, Service};
use kvplane_store::{Store, StoreConfig};

use crate::world::World;
use crate::world::check::handles::Handles;
use crate::world::check::ledger::Ledger;
use crate::world::check::{CheckResult, Rule, broken};
use crate::world::cluster::departures::Departure;
use crate::world::cluster::handover::Handover;
use crate::world::cluster::memory::UNIT_BYTES;
use crate::world::far::FarMemory;
use crate::world::faults::device_pool::IncarnationDevice;
use crate::world::faults::memory::FlippedBit;
use crate::world::faults::tier::IncarnationTier;
use crate::world::network::{End, Way};
use crate::world::pool::PoolMemory;
use crate::world::queue::Event;
use crate::world::scenario::{MS, Scenario};
use crate::world::segments::{register, segment_bytes};

/// Simulated node.
pub(crate) struct Node {
    pub(crate) up: bool,
    pub(crate) incarnation: u64,
    /// Shards of this incarnation.
    pub(crate) shards: Vec<usize>,
    pub(crate) slowness: u64,
    /// Time until which the node is halted.
    pub(crate) halted_ns: u64,
    /// Progress of its departure, if the node leaves.
    pub(crate) departure: Option<Departure>,
    /// Its upgrade, while there is one.
    pub(crate) handover: Option<Handover>,
    pub(crate) joined: bool,
    pub(crate) epoch: Epoch,
    /// Map of that epoch.
    pub(crate) map: Option<Rc<ClusterMap>>,
    /// Latest report of the control plane: its newest epoch, and the epoch since which no slot has changed owners.
    pub(crate) heard: (Epoch, Epoch),
    /// The node was started without its disks.
    pub(crate) without: bool,
    /// Epoch, as given by the control plane, from which on a map known to the disks validates their objects.
    pub(crate) kept_since: Option<Epoch>,
    /// Remaining disk operations before the node dies.
    pub(crate) ops_left: Option<u32>,
    /// The next crash is a power failure.
    pub(crate) power_fails: bool,
    weight: u32,
    pub(crate) host: String,
    pub(crate) failure_domain: String,
    shared_memory: bool,
    /// Counter that changes the ports when the node comes back.
    ports: u16,
}

/// Incarnation of a shard.
pub(crate) struct ShardIncarnation {
    pub(crate) node: usize,
    pub(crate) shard: u16,
    pub(crate) alive: bool,
    pub(crate) address: SocketAddr,
    pub(crate) service: Service,
    pub(crate) pool: PoolMemory,
    /// Image of its memory, where that is kept.
    pub(crate) image: Option<MemoryImage>,
    /// Bits of its objects that have flipped.
    pub(crate) flips: Vec<FlippedBit>,
    pub(crate) segment: Vec<u8>,
    pub(crate) segment_id: SegmentId,
    /// Index of the client that fetches for the shard.
    pub(crate) fetcher: usize,
    /// Keys that were put or removed here since their slots came.
    pub(crate) changed: BTreeSet<usize>,
    pub(crate) ledger: Ledger,
    pub(crate) handles: Handles,
    pub(crate) tier: Option<IncarnationTier>,
    pub(crate) device: Option<IncarnationDevice>,
    pub(crate) far: Option<FarMemory>,
    /// Its disk could not be opened, and its node is about to end.
    pub(crate) refused: bool,
    pub(crate) ending: bool,
    pub(crate) epoch: u64,
    pub(crate) armed_ns: u64,
    newest_version: Version,
    peers: Vec<(u32, Option<u32>)>,
}

impl ShardIncarnation {
    pub(crate) fn bytes(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.pool.bytes(offset, bytes)
    }

    pub(crate) fn add_peer(&mut self, connection: u32) -> PeerKey {
        let free = self.peers.iter().position(|(_, connection)| connection.is_none());
        let position = free.unwrap_or(self.peers.len());
        if position == self.peers.len() {
            self.peers.push((0, None));
        }
        let entry = &mut self.peers[position];
        *entry = (entry.0 + 1, Some(connection));
        PeerKey { index: position as u32, generation: entry.0 }
    }

    pub(crate) fn drop_peer(&mut self, peer: PeerKey) {
        if let Some(entry) = self.peers.get_mut(peer.index as usize).filter(|entry| entry.0 == peer.generation) {
            entry.1 = None;
        }
    }

    pub(crate) fn connection_of(&self, peer: PeerKey) -> Option<u32> {
        self.peers.get(peer.index as usize).filter(|entry| entry.0 == peer.generation)?.1
    }

    /// Checks that versions of an incarnation grow.
    pub(crate) fn see_version(&mut self, version: Version) -> CheckResult {
        if version <= self.newest_version {
            let what = format!("version {version} came after {}", self.newest_version);
            return Err(broken(Rule::Version, what));
        }
        self.newest_version = version;
        Ok(())
    }

    pub(crate) fn is_new(&self, version: Version) -> bool {
        version > self.newest_version
    }

    pub(crate) fn imports(&self) -> bool {
        self.service.inspect().move_counters().importing_slots > 0
    }

    /// Returns the objects that lack replicas at owners of their slot.
    pub(crate) fn lacking(&self) -> Vec<Digest> {
        let lacks = |digest, _| self.service.inspect().lacks_replicas(digest);
        self.service.store().objects().lacking(0, u32::MAX, lacks).0
    }

    pub(crate) fn check_store(&self) {
        if self.alive {
            self.service.store().check();
        }
    }
}

impl Node {
    pub(crate) fn new(index: usize, scenario: &Scenario, rng: &mut Rng) -> Self {
        Self {
            up: false,
            incarnation: 0,
            shards: Vec::new(),
            slowness: 1,
            halted_ns: 0,
            departure: None,
            handover: None,
            joined: false,
            epoch: Epoch(0),
            map: None,
            heard: (Epoch(0), Epoch(0)),
            without: false,
            kept_since: None,
            ops_left: None,
            power_fails: false,
            weight: 1 + rng.below(4) as u32,
            host: format!("host-{}", index % scenario.hosts),
            failure_domain: format!("rack-{}", index % scenario.failure_domains()),
            shared_memory: scenario.shared_memory,
            ports: 0,
        }
    }

    /// Returns true if the followed map contains the node in its present incarnation.
    pub(crate) fn is_member(&self, node: usize) -> bool {
        let member = self.map.as_ref().and_then(|map| map.member(NodeId(node as u64 + 1)));
        member.is_some_and(|member| member.incarnation == Incarnation(self.incarnation))
    }

    pub(crate) fn member(&self, node: usize, shards: u16) -> Member {
        let address = |shard: u16| ShardAddress {
            tcp: self.address(node, shard),
            shm: self.shared_memory.then(|| format!("/run/node-{node}-{}-{shard}", self.ports)),
        };
        Member {
            node: NodeId(node as u64 + 1),
            incarnation: Incarnation(self.incarnation),
            weight: self.weight,
            failure_domain: self.failure_domain.clone(),
            host: self.host.clone(),
            shards: (0..shards).map(address).collect(),
        }
    }

    fn address(&self, node: usize, shard: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, node as u8 + 1], 7000 + shard + 16 * self.ports))
    }
}

impl World {
    /// Starts a node: a new incarnation, empty.
    pub(crate) fn start_node(&mut self, index: usize) {
        if self.nodes[index].up {
            return;
        }
        if self.nodes[index].handover.as_ref().is_some_and(Handover::is_claimed) {
            // Another process has the memory: the supervisor starts the unit again and again.
            return self.after(10 * MS, Event::StartNode(index));
        }
        let moved = self.scenario.kept.is_none() && self.streams.faults.chance(0.3);
        self.end_memory_of_processes(index);
        self.begin_node(index, moved, false);
    }

    /// Begins a node's next incarnation, at other ports if it has moved. It `continues` the former one if it has its
    /// memory by a handover.
    pub(crate) fn begin_node(&mut self, index: usize, moved: bool, continues: bool) {
        let (without, has_disks) = (self.leaves_disks(index), self.scenario.tier.is_some());
        let node = &mut self.nodes[index];
        (node.without, node.kept_since) = (without, None);
        node.up = true;
        // As the agent does, nodes with SSDs begin a new line in any case.
        let successor = Incarnation(node.incarnation).successor().filter(|_| continues && !has_disks);
        node.incarnation = successor.unwrap_or(Incarnation::line_from(node.incarnation + 1)).0;
        node.joined = false;
        node.departure = None;
        (node.epoch, node.map, node.heard) = (Epoch(0), None, (Epoch(0), Epoch(0)));
        node.slowness = 1;
        node.ports += u16::from(moved);
        node.shards.clear();
        for shard in 0..self.scenario.shards {
            self.begin_incarnation(index, shard);
        }
        let incarnation = self.nodes[index].incarnation;
        self.after(MS, Event::Agent(index, incarnation));
    }

    fn begin_incarnation(&mut self, index: usize, shard: u16) {
        let node = &self.nodes[index];
        // Greater than any version of an earlier incarnation, and unique in the World, so that a version identifies its
        // origin.
        let first = (self.incarnations.len() as u64 + 1) << 32;
        let tiered = self.scenario.tier.is_some();
        // The seeds that reveal a host's bug were found with the default eviction policy.
        let sound = self.scenario.mischief.is_none();
        let policy = if sound { self.scenario.seed as usize % Eviction::ALL.len() } else { 0 };
        let eviction = Eviction::ALL[policy];
        let mut config = StoreConfig {
            unit_bytes: UNIT_BYTES,
            max_object_bytes: self.scenario.object_bytes,
            max_pins: self.scenario.max_pins,
            max_reservations: self.scenario.max_reservations,
            hash_seed: self.scenario.seed,
            eviction,
            ..StoreConfig::for_pool(self.scenario.pool_bytes)
        };
        self.scenario.device.into_iter().for_each(|device| device.configure(&mut config));
        self.scenario.far.into_iter().for_each(|far| far.configure(&mut config));
        let mut store = Store::new(config, Version(first)).expect("the scenario's store is valid");
        let memory = PoolMemory::new(self.scenario.host_bytes());
        let far = FarMemory::open(&self.scenario, &memory, &mut store);
        let identity = Identity {
            cluster: "world".to_owned(),
            node: NodeId(index as u64 + 1),
            incarnation: Incarnation(node.incarnation),
            shard: ShardId(shard),
            segment_name: String::new(),
        };
        let mut service = Service::new(identity, store);
        if let Some(challenges) = self.challenges() {
            service.control().want_tickets(challenges);
        }
        let segment_bytes = segment_bytes(&self.scenario);
        let segment_id = register(&mut service, segment_bytes);
        let tier = self.open_tier(index, shard, &mut service);
        let (pool, image) = match self.scenario.kept {
            Some(_) => {
                let (pool, image) = self.open_memory(index, shard, &mut service);
                (pool, Some(image))
            }
            None => (memory, None),
        };
        service.control().set_fetch_limits(Self::fetch_limits(&self.scenario));
        let pace = ScrubPace { bytes_per_s: self.scenario.scrub_bytes_per_s, pause_ns: 200 * MS };
        service.control().set_memory_scrub(pace, self.now_ns);
        let fetcher = self.add_fetcher(self.nodes[index].host.clone());
        let node = &mut self.nodes[index];
        node.shards.push(self.incarnations.len());
        self.incarnations.push(ShardIncarnation {
            node: index,
            shard,
            alive: true,
            address: node.address(index, shard),
            service,
            segment: vec![0; segment_bytes as usize],
            segment_id,
            fetcher,
            changed: BTreeSet::new(),
            pool,
            image,
            flips: Vec::new(),
            ledger: Ledger::default(),
            handles: Handles::default(),
            tier,
            device: IncarnationDevice::open(&self.scenario),
            far,
            refused: false,
            ending: false,
            epoch: 0,
            armed_ns: u64::MAX,
            newest_version: Version(0),
            peers: Vec::new(),
        });
        if tiered {
            self.drain_service(self.incarnations.len() - 1, None);
        }
    }

    /// Kills a node as `kill -9` does: its memory is gone; connections end, shared mappings live on in the processes
    /// that have them.
    pub(crate) fn crash_node(&mut self, index: usize) {
        self.end_serving_process(index);
        let power = self.power_fails(index);
        let node = &mut self.nodes[index];
        node.up = false;
        (node.ops_left, node.halted_ns) = (None, 0);
        let shards = std::mem::take(&mut node.shards);
        self.forget_moving(&shards);
        for &incarnation in &shards {
            self.cut_off_disk(incarnation, power);
            self.forsake_memory(incarnation);
            self.incarnations[incarnation].alive = false;
            let fetcher = self.incarnations[incarnation].fetcher;
            self.crash_client(fetcher);
            self.statistics.evictions += self.incarnations[incarnation].service.store().stats().evictions;
            self.count_device(incarnation);
            self.count_far(incarnation);
        }
        let hit: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, connection)| shards.contains(&connection.incarnation) && connection.server_end != End::Gone)
            .map(|(&index, _)| index)
            .collect();
        for index in hit {
            self.removals_cut_off(index);
            let Some(connection) = self.connections.get_mut(&index) else { continue };
            if connection.server_end == End::Opening {
                continue;
            }
            connection.server_end = End::Gone;
            connection.to_server.drop_flight();
            self.end_flight(index, Way::ToClient);
            self.forget_if_gone(index);
        }
    }
}
