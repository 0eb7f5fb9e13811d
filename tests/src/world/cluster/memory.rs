//! Kept memory of nodes: the pool and the image of each shard outlive processes. A process is killed between any two
//! writes of an image, or in the middle of one; images are damaged, or of another node, while no process has them.
//!
//! The checkers compare an image with the history of the World, not with the file: the objects that were there when a
//! process ended in order, whether all of the image was written, and whether anything was served since.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_client::Path;
use kvplane_proto::ids::{Epoch, NodeId, ShardId};
use kvplane_proto::map::ClusterMap;
use kvplane_proto::rng::Rng;
use kvplane_store::Replica;
use kvplane_store::image::{HEADER_BYTES, ImagePhase, MemoryIdentity, OBJECT_BYTES, PHASE_AT};
use kvplane_store::service::{ImageFile, MemoryImage, OpenImageError, PeerKey, Service};

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::cluster::node::ShardIncarnation;
use crate::world::faults::{FAULTS, Fault};
use crate::world::network::copy::Copy;
use crate::world::network::pipe::{OutgoingFrame, Source};
use crate::world::network::{End, Way};
use crate::world::pool::PoolMemory;
use crate::world::queue::Event;
use crate::world::scenario::{Chances, MS, Mischief, Scenario, US};

/// Unit of space of pools.
pub(crate) const UNIT_BYTES: u64 = 256;

/// Parameters of kept memory, drawn from a seed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeptScenario {
    /// Chance that a process is killed while it writes to an image.
    pub(crate) image_kill: f64,
    /// Chance that the image of a node that is away is damaged, or is another one.
    pub(crate) spoil: f64,
    /// Chance that a process is killed in a handover.
    pub(crate) handover_kill: f64,
    /// Memory ends with the last process that has it, and the control plane does not know it as a device.
    pub(crate) of_processes: bool,
}

/// A process was killed in the middle of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KilledProcess;

/// File of an image.
#[derive(Debug, Default)]
pub(crate) struct ImageBytes {
    bytes: Vec<u8>,
    /// Writes until the process is killed in the middle of one.
    writes_left: Option<u64>,
}

impl ImageFile for ImageBytes {
    type Error = KilledProcess;

    fn bytes(&self) -> Result<u64, KilledProcess> {
        Ok(self.bytes.len() as u64)
    }

    fn set_bytes(&mut self, bytes: u64) -> Result<(), KilledProcess> {
        if self.writes_left != Some(0) {
            self.bytes.resize(bytes.next_multiple_of(HEADER_BYTES as u64) as usize, 0);
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), KilledProcess> {
        into.copy_from_slice(&self.bytes[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), KilledProcess> {
        let done = match &mut self.writes_left {
            Some(0) => return Err(KilledProcess),
            Some(left) => {
                *left -= 1;
                match (*left, bytes.len()) {
                    // A word is written as a whole.
                    (0, ..=8) => 0,
                    (0, length) => length / 2,
                    (_, length) => length,
                }
            }
            None => bytes.len(),
        };
        self.bytes[offset as usize..][..done].copy_from_slice(&bytes[..done]);
        if self.writes_left == Some(0) { Err(KilledProcess) } else { Ok(()) }
    }
}

/// Objects of a process that has ended in order.
#[derive(Debug)]
struct LeftObjects {
    /// Keys and versions.
    objects: Vec<(usize, u64)>,
    /// Epoch of the map by which they were served.
    epoch: Epoch,
}

/// Memory of a shard, which outlives its processes.
#[derive(Debug)]
pub(crate) struct ShardMemory {
    pool: PoolMemory,
    image: ImageBytes,
    /// Incarnation that uses it.
    user: Option<usize>,
    /// True if the image counts, false if it does not; `None` if a process was killed while it marked the memory as in
    /// use, so that both may be.
    counts: Option<bool>,
    left: Option<LeftObjects>,
    /// The image is that of another node.
    is_foreign: bool,
}

impl ShardMemory {
    fn new(pool_bytes: u64) -> Self {
        let (pool, image) = (PoolMemory::new(pool_bytes), ImageBytes::default());
        Self { pool, image, user: None, counts: Some(false), left: None, is_foreign: false }
    }
}

/// Memory of all shards of all nodes, by lineage.
pub(crate) type Memories = BTreeMap<usize, ShardMemory>;

impl Scenario {
    /// The scenario of a seed in which nodes keep their memory, and restart in order or are killed; in the middle of an
    /// image too. In half of the seeds nobody is killed and objects stay: all that was acknowledged is found.
    #[must_use]
    pub fn of_kept_memory(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "kept memory");
        let mut scenario = Self::of_seed(seed);
        (scenario.nodes, scenario.clients) = (1 + rng.below(3) as usize, 2 + rng.below(3) as usize);
        (scenario.keys, scenario.batches) = ([4, 16, 48][rng.below(3) as usize], 200);
        scenario.remove_weight = [5, 20, 40][rng.below(3) as usize];
        scenario.replace_chance = [0.0, 0.2, 0.5][rng.below(3) as usize];
        scenario.think_ns = [MS, 5 * MS][rng.below(2) as usize];
        scenario.object_bytes = scenario.object_bytes.min(8 << 10);
        scenario.chunk_bytes = scenario.chunk_bytes.min(scenario.object_bytes);
        scenario.latency_ns = [10 * US, 200 * US][rng.below(2) as usize];
        (scenario.pool_bytes, scenario.announces) = ((scenario.object_bytes * 40).max(16 << 10), true);
        let mut kept = KeptScenario {
            image_kill: [0.0, 0.2, 0.5][rng.below(3) as usize],
            spoil: [0.0, 0.3][rng.below(2) as usize],
            handover_kill: [0.0, 0.4, 0.8][rng.below(3) as usize],
            of_processes: false,
        };
        let mut weights = [0; FAULTS];
        weights[Fault::RestartNode as usize] = 4;
        weights[Fault::UpgradeNode as usize] = rng.below(3);
        weights[Fault::CrashNode as usize] = rng.below(3);
        weights[Fault::CrashClient as usize] = rng.below(2);
        weights[Fault::ResetConnection as usize] = rng.below(2);
        weights[Fault::PartitionControl as usize] = rng.below(2);
        weights[Fault::CrashControl as usize] = rng.below(2);
        weights[Fault::LeaveNode as usize] = rng.below(2);
        let control_loss = [0.0, 0.1][rng.below(2) as usize];
        let fault_interval_ns = (40 + rng.below(200)) * MS;
        scenario.chances = Chances { control_loss, fault_interval_ns, weights, ..Chances::default() };
        if rng.chance(0.5) {
            scenario.stays();
            kept = KeptScenario { handover_kill: kept.handover_kill, ..KeptScenario::default() };
        }
        scenario.kept = Some(kept);
        scenario
    }

    /// Like [`Self::of_kept_memory`], with upgrades of running nodes, whose processes are killed, or refuse, at any
    /// step. In a third of the seeds, memory ends with the last process that has it.
    #[must_use]
    pub fn of_upgrades(seed: u64) -> Self {
        let mut scenario = Self::of_upgrades_of_kept_memory(seed);
        if let Some(kept) = &mut scenario.kept
            && Rng::new(seed, "memory of processes").chance(0.3)
        {
            kept.of_processes = true;
            if scenario.keeps {
                // Only successors have what was there before.
                (kept.handover_kill, scenario.chances.weights[Fault::RestartNode as usize]) = (0.0, 0);
            }
        }
        scenario
    }

    fn of_upgrades_of_kept_memory(seed: u64) -> Self {
        let mut scenario = Self::of_kept_memory(seed);
        let rng = &mut Rng::new(seed, "upgrades");
        let weights = &mut scenario.chances.weights;
        (weights[Fault::UpgradeNode as usize], weights[Fault::RestartNode as usize]) = (6, rng.below(2));
        weights[Fault::HaltNode as usize] = rng.below(2) * u64::from(!scenario.keeps);
        scenario.chances.fault_interval_ns = (40 + rng.below(150)) * MS;
        scenario.undisturbed()
    }

    /// Running nodes hand their memory over one after another, and one dies right after that: objects acknowledged with
    /// two replicas exist all the time.
    #[must_use]
    pub fn of_upgrades_and_losses(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "upgrades and losses");
        let mut scenario = Self::of_losses(seed);
        (scenario.announces, scenario.kept) = (true, Some(KeptScenario { of_processes: true, ..Default::default() }));
        let Chances { weights, faults_most, fault_interval_ns, .. } = &mut scenario.chances;
        (weights[Fault::UpgradeNode as usize], weights[Fault::LeaveNode as usize]) = (3, 0);
        (*faults_most, *fault_interval_ns) = (Some(2 + rng.below(5)), (10 + rng.below(60)) * MS);
        scenario.undisturbed()
    }

    /// Running nodes hand their memory over while objects with replicas are replaced and removed, and nodes die: no
    /// replica is older than what was acknowledged.
    #[must_use]
    pub fn of_upgrades_of_replicas(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "upgrades of replicas");
        let mut scenario = Self::of_replicas(seed);
        let of_processes = rng.chance(0.5);
        let handover_kill = [0.0, 0.2][rng.below(2) as usize];
        (scenario.announces, scenario.batches) = (true, 200);
        scenario.kept = Some(KeptScenario { of_processes, handover_kill, ..Default::default() });
        let Chances { weights, fault_interval_ns, .. } = &mut scenario.chances;
        weights[Fault::UpgradeNode as usize] = 6;
        weights[Fault::RestartNode as usize] = rng.below(2);
        *fault_interval_ns = (20 + rng.below(150)) * MS;
        scenario.undisturbed()
    }

    /// Like [`Self::of_kept_memory`], with a host's bug.
    #[must_use]
    pub fn of_kept_memory_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_kept_memory(seed) }
    }

    /// Like [`Self::of_upgrades`], with a host's bug.
    #[must_use]
    pub fn of_upgrades_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_upgrades_of_kept_memory(seed) }
    }

    /// Objects stay where they are, and only processes end, each after the one before has served again.
    fn stays(&mut self) {
        (self.keeps, self.remove_weight, self.replace_chance) = (true, 0, 0.0);
        self.pool_bytes = self.object_bytes * 400;
        (self.max_pins, self.max_reservations) = (4096, 4096);
        let Chances { weights, fault_interval_ns, .. } = &self.chances;
        let kept = [Fault::RestartNode, Fault::UpgradeNode].map(|fault| weights[fault as usize]);
        let mut weights = [0; FAULTS];
        (weights[Fault::RestartNode as usize], weights[Fault::UpgradeNode as usize]) = (kept[0], kept[1]);
        self.chances = Chances {
            weights,
            fault_interval_ns: *fault_interval_ns,
            faults_from_ns: 1000 * MS,
            at_rest: true,
            ..Chances::default()
        };
        self.undisturbed = true;
    }
}

impl World {
    /// Opens the memory of a shard's new incarnation; returns its pool, and its image.
    pub(crate) fn open_memory(&mut self, node: usize, shard: u16, service: &mut Service) -> (PoolMemory, MemoryImage) {
        let (lineage, pool_bytes) = (node * 256 + usize::from(shard), self.scenario.pool_bytes);
        let user = self.incarnations.len();
        let memory = self.memories.entry(lineage).or_insert_with(|| ShardMemory::new(pool_bytes));
        let former = memory.user.replace(user);
        let identity = MemoryIdentity {
            uuid: u128::from(self.streams.schedule.next_u64()),
            cluster: "world".to_owned(),
            node: NodeId(node as u64 + 1),
            shard: ShardId(shard),
            shards: self.scenario.shards,
            pool_bytes,
            unit_bytes: UNIT_BYTES,
        };
        memory.image.writes_left = None;
        let mut opened = MemoryImage::open(&mut memory.image, identity.clone(), false);
        let was_foreign = std::mem::take(&mut memory.is_foreign);
        let refused = matches!(opened, Err(OpenImageError::Foreign(_)));
        if refused {
            // Like a real process, this one ends; its operator removes the files.
            *memory = ShardMemory { user: Some(user), ..ShardMemory::new(pool_bytes) };
            opened = MemoryImage::open(&mut memory.image, identity, false);
        }
        let Ok((image, found)) = opened else { unreachable!("new memory is nobody's, and no process is killed here") };
        let (is_wrong, has_image) = (was_foreign != refused, matches!(found, Ok(Some(_))));
        let counts = memory.counts.replace(has_image).filter(|_| !refused);
        let is_lost = !has_image && memory.left.take().is_some();
        let pool = memory.pool.clone();
        if is_lost {
            self.memory_is_lost(lineage);
        }
        if former.is_some_and(|former| self.incarnations[former].alive) {
            let what = format!("incarnations {former:?} and {user} use the memory of shard {shard} of node {node}");
            self.violate(broken(Rule::Kept, what));
        }
        if is_wrong || counts.is_some_and(|counts| counts != has_image) {
            let what = format!(
                "the image of shard {shard} of node {node} counts: {counts:?}, foreign: {was_foreign}; the process \
                 found {found:?}"
            );
            self.violate(broken(Rule::Kept, what));
        }
        self.statistics.memory.discarded += u64::from(refused || found.is_err());
        self.detail(u64::from(has_image), || format!("incarnation {user} finds an image: {has_image}"));
        service.control().keep_memory(found, Arc::new(pool.clone()));
        (pool, image)
    }

    /// Records that a shard follows a map, before it serves: memory is in use once a map has decided about the former
    /// process's objects. Returns false if the process was killed meanwhile.
    pub(crate) fn memory_follows(&mut self, incarnation: usize, map: &ClusterMap) -> bool {
        let lineage = self.lineage(incarnation);
        let at = &mut self.incarnations[incarnation];
        let (Some(image), Some(memory)) = (&mut at.image, self.memories.get_mut(&lineage)) else { return true };
        if at.service.inspect().awaits_map() || at.service.inspect().served_epoch() == Epoch(0) {
            return true;
        }
        let kills = memory.left.is_some()
            && !self.trouble.calm
            && self.scenario.kept.is_some_and(|kept| self.streams.faults.chance(kept.image_kill / 4.0));
        memory.image.writes_left = kills.then(|| 1 + self.streams.faults.below(3));
        let observed = match self.scenario.has(Mischief::KeepImages) {
            true => Ok(()),
            false => image.observe(&mut memory.image, &at.service),
        };
        memory.image.writes_left = None;
        if observed.is_err() {
            memory.counts = None;
            return false;
        }
        memory.counts = Some(false);
        if let Some(left) = memory.left.take() {
            self.check_taken_back(incarnation, &left, map);
        }
        true
    }

    /// Checks that all objects of a process that has ended in order are served again, if no slot has had another owner
    /// since.
    fn check_taken_back(&mut self, incarnation: usize, left: &LeftObjects, map: &ClusterMap) {
        let since = map.former.as_ref().map_or(map.epoch, |former| former.since);
        let at = &self.incarnations[incarnation];
        let report = at.service.inspect().kept();
        if since > left.epoch || left.epoch > map.epoch || left.epoch == Epoch(0) {
            return;
        }
        let version_of = |key: usize| at.service.store().peek(self.shadow.digest(key)).map(|view| view.version.0);
        let lost = left.objects.iter().find(|(key, version)| version_of(*key) != Some(*version)).copied();
        self.statistics.memory.taken_back += left.objects.len() as u64;
        if let Some((key, version)) = lost {
            let what = format!(
                "version {version} of key {key} was there when the former process ended, in {left:?}; incarnation \
                 {incarnation} does not have it: {report:?}"
            );
            self.violate(broken(Rule::Lost, what));
        }
    }

    /// Ends all shards of a node in order, each with an image of its memory. Returns false if the process was killed
    /// meanwhile.
    pub(crate) fn end_shards(&mut self, index: usize) -> bool {
        let node = &mut self.nodes[index];
        node.up = false;
        let shards = std::mem::take(&mut node.shards);
        self.forget_moving(&shards);
        let mut is_alive = true;
        for incarnation in shards {
            if is_alive {
                is_alive = self.end_shard(incarnation);
            } else {
                self.incarnations[incarnation].alive = false;
                self.forsake_memory(incarnation);
                let fetcher = self.incarnations[incarnation].fetcher;
                self.crash_client(fetcher);
                self.hang_up(incarnation);
            }
        }
        is_alive
    }

    fn end_shard(&mut self, incarnation: usize) -> bool {
        let left = self.objects_left(incarnation);
        let fetcher = self.incarnations[incarnation].fetcher;
        self.incarnations[incarnation].alive = false;
        self.crash_client(fetcher);
        let holders = self.hang_up(incarnation);
        let kept = self.scenario.kept.unwrap_or_default();
        let kills = !self.trouble.calm && self.streams.faults.chance(kept.image_kill);
        let writes_left = kills.then(|| 1 + self.streams.faults.below(7));
        let lineage = self.lineage(incarnation);
        let at = &mut self.incarnations[incarnation];
        self.statistics.evictions += at.service.store().stats().evictions;
        let (Some(image), Some(memory)) = (&at.image, self.memories.get_mut(&lineage)) else { return true };
        let is_pending = at.service.inspect().awaits_map();
        let lends = !holders.is_empty();
        memory.image.writes_left = writes_left;
        let closed = image.close(&mut memory.image, &mut at.service, &memory.pool, lends);
        memory.image.writes_left = None;
        memory.user = None;
        self.statistics.memory.images += u64::from(closed.is_ok());
        self.statistics.memory.cut_off += u64::from(closed.is_err());
        if !is_pending {
            memory.counts = Some(matches!(closed, Ok(Some(_))));
            memory.left = left.filter(|_| closed.is_ok());
            if closed.is_err() {
                // The process was killed: see `forsake_memory`.
                memory.pool = PoolMemory::new(self.scenario.pool_bytes);
                self.memory_is_lost(lineage);
            }
        } else if closed.is_err() {
            // The process was killed while it named its incarnation in the image of the former one.
            memory.counts = None;
        }
        self.detail(lineage as u64, || format!("incarnation {incarnation} has left an image: {closed:?}"));
        closed.is_ok()
    }

    /// Returns the objects that a shard has, of the slots that it serves.
    fn objects_left(&self, incarnation: usize) -> Option<LeftObjects> {
        let service = &self.incarnations[incarnation].service;
        let there = |key: usize| {
            let digest = self.shadow.digest(key);
            let view = service.store().peek(digest).filter(|view| view.replica != Replica::Second)?;
            service.inspect().serves(digest.slot()).then_some((key, view.version.0))
        };
        let epoch = service.inspect().served_epoch();
        Some(LeftObjects { objects: (0..self.scenario.keys).filter_map(there).collect(), epoch })
    }

    /// Closes all connections of a shard that ends. Returns the peers on its host that are in the middle of an access
    /// to its pool.
    fn hang_up(&mut self, incarnation: usize) -> Vec<PeerKey> {
        let of = |connection: &crate::world::Connection| {
            connection.incarnation == incarnation && !matches!(connection.server_end, End::Gone | End::Opening)
        };
        let hit: Vec<u32> =
            self.connections.iter().filter(|(_, connection)| of(connection)).map(|(&index, _)| index).collect();
        let mut holders = Vec::new();
        for index in hit {
            self.removals_cut_off(index);
            let is_copied = self.is_copied(|copy| copy.uses(index));
            // A client that has not read its channel to the end has not hung up, and may find the permission to write
            // there. The shard waits for it for a while, so in part of the cases it has hung up by then.
            let is_late = self.streams.network.chance(0.05);
            let Some(connection) = self.connections.get_mut(&index) else { continue };
            let is_shared = connection.path != Path::Stream;
            let is_held = is_copied || is_shared && is_late && !connection.to_client.flight.is_empty();
            if is_shared && !is_held {
                connection.to_client.drop_flight();
            }
            let peer = connection.peer;
            connection.server_end = End::Gone;
            connection.to_server.drop_flight();
            let unsent: Vec<OutgoingFrame> = connection.to_client.queue.drain(..).collect();
            let ShardIncarnation { service, .. } = &mut self.incarnations[incarnation];
            for frame in unsent {
                if let Some(Source::Pool { hold: Some(hold), .. }) = frame.payload {
                    service.sent(hold);
                }
            }
            if is_held {
                holders.push(peer);
                self.halt_copies(index);
            } else {
                service.peer_gone(peer, self.now_ns);
            }
            self.end_flight(index, Way::ToClient);
            self.forget_if_gone(index);
        }
        holders
    }

    fn is_copied(&self, which: impl Fn(&Copy) -> bool) -> bool {
        self.clients.iter().any(|client| client.alive && client.copying.as_ref().is_some_and(&which))
    }

    /// Halts, by chance, the client that copies over a connection: it goes on when the next process serves.
    fn halt_copies(&mut self, connection: u32) {
        let for_ns = self.streams.faults.below(2) * (1 + self.streams.faults.below(300 * MS));
        if for_ns == 0 || self.trouble.calm || self.scenario.keeps {
            return;
        }
        for client in self.clients.iter_mut().filter(|client| client.alive) {
            if let Some(copy) = client.copying.as_mut().filter(|copy| copy.uses(connection)) {
                client.halted_ns = copy.halt(for_ns);
            }
        }
    }

    /// Returns true if a node that is to end does so a moment later: in the middle of a peer's copy.
    pub(crate) fn awaits_copy(&mut self, node: usize) -> bool {
        let shards = &self.nodes[node].shards;
        let waits = self.scenario.shared_memory && !self.is_copied(|copy| copy.is_of(shards));
        waits && self.streams.faults.chance(0.97)
    }

    /// Applies the death of a process to the memory of one of its shards: unless the former process's image still
    /// counts, all objects are lost. The next process has fresh memory here; see `docs/testing.md`.
    pub(crate) fn forsake_memory(&mut self, incarnation: usize) {
        let lineage = self.lineage(incarnation);
        let is_pending = self.incarnations[incarnation].service.inspect().awaits_map();
        let pool_bytes = self.scenario.pool_bytes;
        let Some(memory) = self.memories.get_mut(&lineage).filter(|memory| memory.user == Some(incarnation)) else {
            return;
        };
        memory.user = None;
        if is_pending || memory.counts.is_none() {
            return;
        }
        memory.pool = PoolMemory::new(pool_bytes);
        (memory.counts, memory.left) = (Some(false), None);
        self.memory_is_lost(lineage);
    }

    /// Ends the memory of a node of which no process is left, unless it outlives them.
    pub(crate) fn end_memory_of_processes(&mut self, node: usize) {
        if !self.scenario.kept.is_some_and(|kept| kept.of_processes) {
            return;
        }
        for lineage in (0..usize::from(self.scenario.shards)).map(|shard| node * 256 + shard) {
            if self.memories.remove(&lineage).is_some() {
                self.memory_is_lost(lineage);
            }
        }
    }

    /// Records that no object of a shard's memory exists any more: none may be read again.
    fn memory_is_lost(&mut self, lineage: usize) {
        self.shadow.dropped(lineage, self.trace.events, |_| true);
        if self.scenario.replicas < 2 {
            self.doubled.clear();
        }
    }

    /// Damages the image of a node that is away, or replaces it by another one, by chance.
    pub(crate) fn spoil_memory(&mut self, node: usize) {
        let Some(kept) = self.scenario.kept.filter(|kept| kept.spoil > 0.0 && !self.trouble.calm) else { return };
        for shard in 0..usize::from(self.scenario.shards) {
            let rng = &mut self.streams.faults;
            let Some(memory) = self.memories.get_mut(&(node * 256 + shard)) else { continue };
            let is_free = memory.user.is_none() && memory.counts == Some(true);
            if !is_free || !rng.chance(kept.spoil) {
                continue;
            }
            let has_objects = memory.left.as_ref().is_some_and(|left| !left.objects.is_empty());
            let bytes = &mut memory.image.bytes;
            match rng.below(6) {
                // A format that this program does not know.
                0 => bytes[8] = bytes[8].wrapping_add(1),
                // The identity, which the checksum of the header covers.
                1 => bytes[16 + rng.below(32) as usize] ^= 1 << rng.below(8),
                // A file that was begun.
                2 => bytes.truncate(rng.below(HEADER_BYTES as u64) as usize),
                // An image that was begun.
                3 => bytes[PHASE_AT] = ImagePhase::Writing as u8,
                4 if has_objects => bytes[HEADER_BYTES + rng.below(OBJECT_BYTES as u64) as usize] ^= 1 << rng.below(8),
                _ => {
                    // The file of another node of the cluster, which is whole.
                    let mut other = ImageBytes::default();
                    let identity = MemoryIdentity {
                        uuid: 1,
                        cluster: "world".to_owned(),
                        node: NodeId(99),
                        shard: ShardId(shard as u16),
                        shards: self.scenario.shards,
                        pool_bytes: self.scenario.pool_bytes,
                        unit_bytes: UNIT_BYTES,
                    };
                    let _ = MemoryImage::open(&mut other, identity, false);
                    (memory.image, memory.is_foreign) = (other, true);
                }
            }
            (memory.counts, memory.left) = (Some(false), None);
            self.statistics.memory.spoilt += 1;
            self.memory_is_lost(node * 256 + shard);
            self.detail(shard as u64, || format!("the image of shard {shard} of node {node} is damaged"));
        }
    }

    /// Restarts a node in order, with its memory: it announces its end, and waits for migrations.
    pub(crate) fn restart_node(&mut self, node: usize) {
        if self.nodes[node].joined && self.nodes[node].handover.is_none() {
            self.begin_departure(node, 0);
        }
    }

    /// Ends a node that has left in order, and starts it again soon.
    pub(crate) fn depart_with_memory(&mut self, index: usize) {
        if self.awaits_copy(index) {
            let incarnation = self.nodes[index].incarnation;
            return self.after(100 * US, Event::Depart(index, incarnation));
        }
        let _ = self.end_shards(index);
        self.spoil_memory(index);
        let down_ns = 1 + self.streams.faults.below(if self.scenario.keeps { 200 * MS } else { 400 * MS });
        self.after(down_ns, Event::StartNode(index));
    }
}
