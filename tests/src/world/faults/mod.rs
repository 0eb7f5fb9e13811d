//! Faults: their kinds, their times, and their end.

pub(crate) mod device;
pub(crate) mod device_pool;
pub(crate) mod device_scenario;
pub(crate) mod disk;
pub(crate) mod disturbances;
pub(crate) mod memory;
pub(crate) mod records;
pub(crate) mod tier;

use crate::world::World;
use crate::world::cluster::fetch::Fetcher;
use crate::world::cluster::node::{Node, ShardIncarnation};
use crate::world::network::pipe::Piece;
use crate::world::network::{Connection, End, Way};
use crate::world::queue::Event;
use crate::world::scenario::{Chances, MS};
use kvplane_client::Path;
use kvplane_proto::map::Member;

/// Party on the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Party {
    Control,
    Node(usize),
    Client(usize),
}

impl Party {
    pub(crate) const fn word(self) -> u64 {
        match self {
            Self::Control => 0,
            Self::Node(node) => 1 + 2 * node as u64,
            Self::Client(client) => 2 + 2 * client as u64,
        }
    }
}

/// Kind of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    ResetConnection,
    CrashNode,
    LeaveNode,
    CrashClient,
    CrashControl,
    PartitionData,
    PartitionControl,
    SlowNode,
    /// The control plane is killed, and its disk is lost.
    LoseControl,
    /// The clock of a host that the control plane may run on is set to another time.
    SetClock,
    /// A node's processes are halted, as by SIGSTOP: they do nothing, no peer sees an end, and they continue later.
    HaltNode,
    /// Messages to and from a node are lost, except over shared memory.
    SilenceNode,
    /// All nodes and the control plane are killed at once, and each restarts by itself.
    CrashAll,
    /// The control plane receives evidence about a node: that its ports refuse while it is dead, that they do not
    /// answer while it is halted or disconnected, and, rightly or wrongly, that it is silent.
    Evidence,
    /// All nodes leave in order within moments, drained or not, and come back.
    LeaveAll,
    /// The device of a shard's device pool is lost.
    LoseDevice,
    /// A byte of an object in a device pool is damaged.
    DamageDevice,
    /// Messages from a node, or those to it, are lost, except over shared memory.
    LoseOneWay,
    /// A stream becomes half-open: what is sent on it is lost in both directions, until its hosts give it up.
    HalfOpen,
    /// A bit of an object in memory flips, of which another node has good bytes.
    FlipBit,
    /// A byte of a record on a disk is damaged, of which another node has a good one.
    DamageRecord,
    /// A node that keeps its memory restarts in order.
    RestartNode,
    /// A running node hands over to a successor.
    UpgradeNode,
    /// An operator sets, changes or removes a tenant.
    SetQuota,
}

/// Number of kinds.
pub(crate) const FAULTS: usize = 24;
/// Number of kinds that are drawn for every seed; the others belong to some seeds only.
pub(crate) const COMMON: usize = 8;

const ALL: [Fault; FAULTS] = [
    Fault::ResetConnection,
    Fault::CrashNode,
    Fault::LeaveNode,
    Fault::CrashClient,
    Fault::CrashControl,
    Fault::PartitionData,
    Fault::PartitionControl,
    Fault::SlowNode,
    Fault::LoseControl,
    Fault::SetClock,
    Fault::HaltNode,
    Fault::SilenceNode,
    Fault::CrashAll,
    Fault::Evidence,
    Fault::LeaveAll,
    Fault::LoseDevice,
    Fault::DamageDevice,
    Fault::LoseOneWay,
    Fault::HalfOpen,
    Fault::FlipBit,
    Fault::DamageRecord,
    Fault::RestartNode,
    Fault::UpgradeNode,
    Fault::SetQuota,
];

/// Interval at which a fault that waits for slots at rest checks again.
const REST_NS: u64 = 10 * MS;

/// Two parties of which one, or each, cannot reach the other.
#[derive(Clone, Copy, Debug)]
struct Partition {
    one: Party,
    other: Party,
    /// Messages from the second to the first are lost, too.
    both: bool,
    heals_ns: u64,
}

/// Present faults.
#[derive(Default)]
pub(crate) struct Trouble {
    partitions: Vec<Partition>,
    /// Faults have stopped.
    pub(crate) calm: bool,
    /// Number of faults that have hit nodes.
    node_faults: u64,
    /// The control plane lost its state, and has not adopted a map since.
    pub(crate) forgot: bool,
}

impl World {
    /// Returns the time when a party can reach another one again that it cannot reach now.
    pub(crate) fn cut(&self, from: Party, to: Party) -> Option<u64> {
        let apart = |partition: &&Partition| {
            partition.heals_ns > self.now_ns
                && (partition.one == from && partition.other == to
                    || partition.both && partition.one == to && partition.other == from)
        };
        self.trouble.partitions.iter().filter(apart).map(|partition| partition.heals_ns).max()
    }

    /// Returns true if one of two parties cannot reach the other, so that neither gets an answer.
    pub(crate) fn is_apart(&self, one: Party, other: Party) -> bool {
        self.cut(one, other).or_else(|| self.cut(other, one)).is_some()
    }

    pub(crate) fn schedule_fault(&mut self) {
        let mean_ns = self.scenario.chances.fault_interval_ns;
        let wait_ns = 1 + self.streams.faults.below(2 * mean_ns);
        if self.now_ns + wait_ns < self.scenario.faults_until_ns {
            self.after(wait_ns, Event::Fault);
        }
    }

    /// Injects a fault.
    pub(crate) fn fault(&mut self) {
        let Chances { faults_from_ns, faults_most, at_rest, .. } = self.scenario.chances;
        let enough = faults_most.is_some_and(|most| self.statistics.faults >= most);
        if at_rest && self.now_ns >= faults_from_ns && !enough && !self.is_at_rest() {
            if self.now_ns + REST_NS < self.scenario.faults_until_ns {
                self.after(REST_NS, Event::Fault);
            }
            return;
        }
        self.schedule_fault();
        let weights = self.scenario.chances.weights;
        let total: u64 = weights.iter().sum();
        if self.now_ns < faults_from_ns || enough || total == 0 {
            return;
        }
        let mut drawn = self.streams.faults.below(total);
        let position = weights.iter().position(|&weight| {
            let here = drawn < weight;
            drawn = drawn.saturating_sub(weight);
            here
        });
        let fault = position.map(|position| ALL[position]);
        let Some(fault) = fault.filter(|fault| self.may_inject(*fault)) else { return };
        // Evidence is not one of the faults that a scenario counts.
        self.statistics.faults += u64::from(fault != Fault::Evidence);
        self.detail(fault as u64, || format!("FAULT {fault:?}"));
        self.inject(fault);
    }

    /// Returns true if no slot migrates and, according to their owners, all objects have the replicas that were
    /// acknowledged to puts.
    pub(crate) fn is_at_rest(&self) -> bool {
        let serves = |(at, node): (usize, &Node)| node.up && node.is_member(at) && node.handover.is_none();
        if self.scenario.kept.is_some() && !self.nodes.iter().enumerate().all(serves) {
            return false;
        }
        let lacks = |incarnation: &ShardIncarnation| {
            let mut lack = match self.scenario.replicas > 2 {
                true => incarnation.lacking(),
                false => incarnation.service.store().objects().uncopied(),
            };
            lack.extend(self.clients[incarnation.fetcher].fetcher.iter().flat_map(Fetcher::copying));
            lack.iter().filter_map(|digest| self.shadow.key(*digest)).any(|key| self.doubled.contains_key(&key))
        };
        let moves = |incarnation: &ShardIncarnation| {
            incarnation.imports() || !incarnation.service.inspect().move_counters().settled
        };
        let mut alive = self.incarnations.iter().filter(|incarnation| incarnation.alive);
        let has_heard =
            |incarnation: &ShardIncarnation| self.scenario.replicas <= 2 || self.knows_who_lives(incarnation);
        alive.all(|incarnation| !moves(incarnation) && !lacks(incarnation) && has_heard(incarnation))
    }

    /// Returns true if a shard follows the newest map, and all members of that live: what has several replicas has them
    /// at nodes that live.
    fn knows_who_lives(&self, incarnation: &ShardIncarnation) -> bool {
        let Some(map) = self.control.published.as_deref() else { return false };
        let lives = |member: &Member| {
            let at = member.node.0 as usize - 1;
            let node = &self.nodes[at];
            let hears = node.halted_ns <= self.now_ns && self.cut(Party::Control, Party::Node(at)).is_none();
            node.up && hears && node.incarnation == member.incarnation.0
        };
        incarnation.epoch == map.epoch.0 && map.members.iter().all(lives)
    }

    /// Returns true if the scenario allows the fault now.
    fn may_inject(&mut self, fault: Fault) -> bool {
        match fault {
            Fault::CrashNode
            | Fault::LeaveNode
            | Fault::HaltNode
            | Fault::SilenceNode
            | Fault::LoseOneWay
            | Fault::CrashAll => {
                let most = self.scenario.chances.node_faults_most;
                let enough = most.is_some_and(|most| self.trouble.node_faults >= most);
                self.trouble.node_faults += u64::from(!enough);
                !enough
            }
            // Some member must be able to offer the lost map, and none may know a newer map than others: a member that
            // does not know the map that names it begins a new incarnation, and objects in migration to it are lost.
            Fault::LoseControl => self.has_witness(usize::MAX) && self.all_heard(),
            _ => true,
        }
    }

    /// Returns true if a member other than this node follows a map, and so can offer it.
    fn has_witness(&self, but: usize) -> bool {
        let tells = |(at, node): (usize, &Node)| {
            at != but
                && node.up
                && node.joined
                && node.departure.is_none()
                && node.ops_left.is_none()
                && node.is_member(at)
        };
        self.nodes.iter().enumerate().any(tells)
    }

    /// Returns true if all nodes follow the newest map.
    fn all_heard(&self) -> bool {
        let newest = self.control.published.as_ref().map(|map| map.epoch);
        self.nodes.iter().filter(|node| node.up && node.joined).all(|node| Some(node.epoch) == newest)
    }

    /// Returns true if a node may die and some member still knows the map that the control plane has lost.
    pub(crate) fn may_die(&self, node: usize) -> bool {
        !self.trouble.forgot || self.has_witness(node)
    }

    fn inject(&mut self, fault: Fault) {
        let rng = &mut self.streams.faults;
        let node = rng.below(self.nodes.len() as u64) as usize;
        let client = rng.below(self.scenario.clients as u64) as usize;
        let other = rng.below(self.nodes.len() as u64) as usize;
        let longest_ns = if rng.chance(0.5) { 100 * MS } else { 1500 * MS };
        let down_ns = 1 + rng.below(longest_ns);
        match fault {
            Fault::CrashNode | Fault::LeaveNode if !self.may_die(node) => {}
            Fault::ResetConnection => self.reset_connection(),
            Fault::CrashNode if self.nodes[node].up && self.scenario.tier.is_some() && !down_ns.is_multiple_of(3) => {
                // The node dies between any two operations of its disks.
                self.nodes[node].ops_left = Some(1 + (down_ns % 61) as u32);
            }
            Fault::CrashNode if self.nodes[node].up => {
                self.crash_node(node);
                self.after(down_ns, Event::StartNode(node));
            }
            Fault::LeaveNode if self.nodes[node].handover.is_some() => {}
            Fault::LeaveNode if self.nodes[node].up && self.nodes[node].departure.is_none() => {
                // Some nodes drain before they go, and some do not wait until all objects are fetched.
                self.begin_departure(node, if down_ns.is_multiple_of(3) { 0 } else { down_ns.min(800 * MS) });
            }
            Fault::LeaveAll => self.leave_all(),
            Fault::LoseDevice => self.lose_device(node, down_ns),
            Fault::DamageDevice => self.damage_device(node, down_ns),
            Fault::CrashClient if self.clients[client].alive => {
                if self.scenario.shared_memory && self.streams.faults.chance(0.7) {
                    self.clients[client].doomed = true;
                } else {
                    self.kill_client(client);
                }
            }
            Fault::CrashControl if self.control.cluster.is_some() => {
                self.crash_control();
                self.after(down_ns, Event::StartControl);
            }
            Fault::LoseControl => {
                self.trouble.forgot = true;
                self.crash_control();
                self.control.lose();
                self.after(down_ns, Event::StartControl);
            }
            Fault::SetClock => self.set_clock(),
            Fault::PartitionData if other != node && down_ns.is_multiple_of(3) => {
                self.partition(Party::Node(other), Party::Node(node), down_ns);
            }
            Fault::PartitionData => self.partition(Party::Client(client), Party::Node(node), down_ns),
            Fault::PartitionControl => {
                let party = if self.streams.faults.chance(0.7) { Party::Node(node) } else { Party::Client(client) };
                self.partition(Party::Control, party, down_ns);
            }
            Fault::HaltNode | Fault::SilenceNode | Fault::LoseOneWay | Fault::CrashAll | Fault::Evidence => {
                self.disturb(fault, node, (down_ns, longest_ns));
            }
            Fault::RestartNode if self.nodes[node].up && self.nodes[node].departure.is_none() => {
                self.restart_node(node);
            }
            Fault::UpgradeNode => self.upgrade_node(node),
            Fault::SetQuota => self.set_quota(),
            Fault::HalfOpen => self.half_open(down_ns),
            Fault::FlipBit => self.flip_bit(node, down_ns),
            Fault::DamageRecord => self.damage_record(node, down_ns),
            Fault::SlowNode => {
                self.nodes[node].slowness = 10;
                self.after(down_ns, Event::Recover(node));
            }
            _ => {}
        }
    }

    /// Kills a client, and restarts it later.
    pub(crate) fn kill_client(&mut self, client: usize) {
        self.detail(client as u64, || format!("KILL client {client}"));
        self.crash_client(client);
        let down_ns = 50 * MS + self.streams.faults.below(500 * MS);
        self.after(down_ns, Event::StartClient(client));
    }

    pub(crate) fn partition(&mut self, one: Party, other: Party, for_ns: u64) {
        self.part(one, other, true, for_ns);
    }

    /// Loses for a while what one party sends to another and, if `both`, what that sends to the first.
    pub(crate) fn part(&mut self, one: Party, other: Party, both: bool, for_ns: u64) {
        let now_ns = self.now_ns;
        self.trouble.partitions.retain(|partition| partition.heals_ns > now_ns);
        let heals_ns = (now_ns + for_ns).min(self.scenario.faults_until_ns);
        self.trouble.partitions.push(Partition { one, other, both, heals_ns });
    }

    /// Loses what is in flight on a stream and what is sent on it, in both directions; each side sees the end after the
    /// time for which its host waits for acknowledgements.
    fn half_open(&mut self, down_ns: u64) {
        let lost = |connection: &Connection| connection.to_client.lost;
        let Some(index) = self.open_stream() else { return };
        if self.scenario.answers && self.connections.values().any(lost) {
            return;
        }
        self.detail(index.into(), || format!("connection {index} is half-open for {} ms", down_ns / MS));
        let until_ns = (self.now_ns + down_ns).min(self.scenario.faults_until_ns);
        for way in [Way::ToServer, Way::ToClient] {
            let Some(connection) = self.connections.get_mut(&index) else { return };
            let pipe = connection.pipe(way);
            pipe.lost = true;
            pipe.last_arrival_ns = pipe.last_arrival_ns.max(until_ns);
            self.fly(index, way, Piece::End);
        }
    }

    /// Cuts a stream: each side sees the end, after the bytes that still come through.
    fn reset_connection(&mut self) {
        let Some(index) = self.open_stream() else { return };
        for way in [Way::ToServer, Way::ToClient] {
            self.cut_flight(index, way);
        }
    }

    /// Draws a stream that is open at both ends; `None` if there is none.
    fn open_stream(&mut self) -> Option<u32> {
        let streams: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, connection)| {
                connection.path == Path::Stream
                    && connection.client_end == End::Open
                    && connection.server_end == End::Open
            })
            .map(|(&index, _)| index)
            .collect();
        if streams.is_empty() {
            return None;
        }
        Some(streams[self.streams.faults.below(streams.len() as u64) as usize])
    }

    /// Stops all faults; everything that is down restarts.
    pub(crate) fn calm(&mut self) {
        self.trouble.calm = true;
        self.trouble.partitions.clear();
        self.mend_devices();
        self.disks.values_mut().for_each(|disk| disk.faults = crate::world::faults::disk::DiskFaults::default());
        self.start_control();
        for node in 0..self.nodes.len() {
            self.nodes[node].slowness = 1;
            self.nodes[node].halted_ns = 0;
            self.start_node(node);
        }
        for client in 0..self.scenario.clients {
            self.start_client(client);
        }
    }
}
