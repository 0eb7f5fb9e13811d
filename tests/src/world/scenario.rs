//! Scenario of a seed, drawn before the first event: the size of the World, its faults and their frequency.
//!
//! Each seed switches a random part of the faults off (swarm testing): a run in which everything fails all the time
//! explores less than many runs in which a few things fail often.

use kvplane_proto::rng::Rng;
use kvplane_store::service::PutAck;

use crate::world::cluster::memory::KeptScenario;
use crate::world::far::FarScenario;
use crate::world::faults::Fault;
use crate::world::faults::device_scenario::DeviceScenario;
use crate::world::faults::tier::TierScenario;

/// A millisecond of virtual time.
pub(crate) const MS: u64 = 1_000_000;
/// A microsecond of virtual time.
pub(crate) const US: u64 = 1_000;

/// Bug of a host, injected on purpose to see if a checker finds it. The pure code stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mischief {
    /// The shard's host reports that a payload has left when it was only queued.
    ReleasePinEarly,
    /// The shard's host never reports that a payload has left.
    KeepPins,
    /// The shard's host reports the announced checksum instead of that of the bytes.
    TrustPutChecksum,
    /// The client's host reports the announced checksum instead of that of the bytes.
    TrustGetChecksum,
    /// The shard's host submits each put twice.
    DuplicatePut,
    /// The client's host writes payload bytes that arrive after it reported the end of the lane.
    KeepLateBytes,
    /// A copy into shared memory continues after the death of the client's process.
    LateWriter,
    /// The shard's host writes the tails of objects after the payloads that came with their puts.
    LateTails,
    /// A remove is answered but not done.
    SwallowRemove,
    /// A reply to a get carries another version.
    WrongVersion,
    /// The control plane publishes a map before it is durable.
    PublishBeforePersist,
    /// A shard that missed maps keeps its objects as if it had seen them all.
    SkipEpochs,
    /// The client's host never calls the client's timer.
    ForgetTimer,
    /// A fence is answered but the shard does not receive it.
    SwallowFence,
    /// The shard's host continues to receive on a connection that a fence closed.
    GoOnAfterFence,
    /// The client's host reports the completion of a batch twice.
    DoneTwice,
    /// The shard's host reports a flush of its disk that it did not request.
    SkipFlush,
    /// The shard's host trusts its disk: checksums are computed from the bytes that should have come.
    TrustDisk,
    /// The agent reports that no slot ever changed owners, whatever the control plane reports.
    BelieveDisks,
    /// The shard's host does not write tombstones.
    DropTombstones,
    /// The agent does not report its node's disks.
    HideDisks,
    /// A replica owner's host reports that replicas are dropped, but the shard does not receive the request.
    KeepCopies,
    /// An owner's host pushes other bytes than the object's.
    SpoilCopies,
    /// Nodes report that all slots are imported as soon as they receive a map.
    SettleEarly,
    /// The reply to a request for changes during an absence lists none.
    HideChanges,
    /// The shard's host makes every put replace existing objects.
    ReplaceAlways,
    /// The shard's host records a map by which slots leave, but does not pass it to the shard.
    KeepSlots,
    /// Nodes end without an announcement, and without waiting for migrations.
    LeaveAtOnce,
    /// The shard's host reports a move to or from the device pool as copied when its copy begins.
    EarlyMoves,
    /// The shard's host reports a move before its last piece, which is then copied from memory that was released.
    LateMoves,
    /// The shard's host does not compare the checksum of bytes that come back from the device pool.
    TrustDevice,
    /// The shard's host does not copy the tails of objects that move.
    LoseTails,
    /// The shard's host releases an object in the device pool before its bytes are staged.
    ReleaseStagedEarly,
    /// The shard's host never reports some moves.
    ForgetMoves,
    /// The shard's host copies all but the last byte of what moves between DRAM and far memory.
    ShortCopies,
    /// The client's host sets no hedging delay.
    NeverHedge,
    /// The host of a shard with a damaged record answers for other owners of the slot that they do not have the object.
    ForgetRepairs,
    /// The shard's host does not record that memory is in use.
    KeepImages,
    /// A successor's host serves when it has the claim, and does not wait for the last word.
    ServeEarly,
    /// The control plane's host passes no leases of tenants that were removed.
    ForgetRemovals,
}

/// All parameters of a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Seed of all random streams.
    pub seed: u64,
    /// Bug of a host, for the tests of the checkers.
    pub mischief: Option<Mischief>,
    pub(crate) nodes: usize,
    pub(crate) shards: u16,
    pub(crate) clients: usize,
    pub(crate) hosts: usize,
    pub(crate) keys: usize,
    pub(crate) pool_bytes: u64,
    pub(crate) max_pins: u32,
    pub(crate) max_reservations: u32,
    pub(crate) object_bytes: u64,
    pub(crate) lanes: u16,
    pub(crate) lane_window_bytes: u64,
    pub(crate) shared_memory: bool,
    pub(crate) batches: u64,
    pub(crate) batch_requests: u64,
    pub(crate) think_ns: u64,
    pub(crate) remove_weight: u64,
    /// Part of the puts that replace existing objects.
    pub(crate) replace_chance: f64,
    pub(crate) chunk_bytes: u64,
    pub(crate) latency_ns: u64,
    pub(crate) faults_until_ns: u64,
    pub(crate) chances: Chances,
    /// Disks of the shards.
    pub(crate) tier: Option<TierScenario>,
    /// Device pools of the shards.
    pub(crate) device: Option<DeviceScenario>,
    /// Far memory of the shards.
    pub(crate) far: Option<FarScenario>,
    /// Memory that outlives processes.
    pub(crate) kept: Option<KeptScenario>,
    /// Owners of each slot.
    pub(crate) replicas: u8,
    /// Delay before gets are hedged to replica owners.
    pub(crate) hedge_ns: u64,
    /// Only faults take objects away.
    pub(crate) keeps: bool,
    /// Objects that two nodes have are found soon, whichever one of them falls silent.
    pub(crate) answers: bool,
    /// Every promised object still exists, also after its node was away and others had its slots.
    pub(crate) returns: bool,
    /// Replication is requested for existing objects, not by their puts.
    pub(crate) wishes: bool,
    /// Shards require tickets.
    pub(crate) tickets: bool,
    /// Tenant of all objects; empty for the default tenant.
    pub(crate) tenant: &'static [u8],
    /// Tenants have quotas of SSD bytes.
    pub(crate) quotas: bool,
    /// Time when nodes beyond the first two join, one soon after the other; 0 is at once.
    pub(crate) joins_from_ns: u64,
    /// Longest time that a change of owners waits for the one before.
    pub(crate) settle_most_ns: u64,
    /// Nodes that leave announce it, and wait for migrations.
    pub(crate) announces: bool,
    /// No node is ever halted or silent, and never do all restart at once: as when its seed failed once.
    pub(crate) undisturbed: bool,
    /// Rate at which shards compare their objects with the checksums, in bytes a second.
    pub(crate) scrub_bytes_per_s: u64,
    /// Only memory is damaged, of which another node has good bytes: no get ends because of that.
    pub(crate) heals: bool,
    /// Records on disks are damaged, of which another node has good ones.
    pub(crate) damages_records: bool,
    /// Disks are scrubbed once the faults have stopped.
    pub(crate) scrubs_disks: bool,
}

/// Chances of faults.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chances {
    pub(crate) corrupt_chunk: f64,
    pub(crate) corrupt_head: f64,
    pub(crate) duplicate_reply: f64,
    /// Frames over shared memory that release a handle twice.
    pub(crate) repeat_frame: f64,
    pub(crate) spike: f64,
    pub(crate) control_loss: f64,
    pub(crate) control_duplicate: f64,
    pub(crate) control_crash_in_publish: f64,
    pub(crate) cancel: f64,
    /// Mean time between faults of the list below.
    pub(crate) fault_interval_ns: u64,
    /// Weights, in the order of [`crate::world::faults::Fault`].
    pub(crate) weights: [u64; crate::world::faults::FAULTS],
    /// Most faults of the list, if limited.
    pub(crate) faults_most: Option<u64>,
    /// Time before which no fault occurs.
    pub(crate) faults_from_ns: u64,
    /// No fault occurs while slots migrate, or while objects lack promised replicas.
    pub(crate) at_rest: bool,
    /// Most faults that hit nodes, if limited.
    pub(crate) node_faults_most: Option<u64>,
}

impl Scenario {
    /// The scenario of a seed.
    #[must_use]
    pub fn of_seed(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "scenario");
        let pick = |rng: &mut Rng, from: &[u64]| from[rng.below(from.len() as u64) as usize];
        let object_bytes = pick(rng, &[64, 1 << 10, 8 << 10, 64 << 10]);
        let handles = pick(rng, &[4, 64, 4096]) as u32;
        Self {
            seed,
            mischief: None,
            nodes: 1 + rng.below(4) as usize,
            shards: 1 + rng.below(2) as u16,
            clients: 1 + rng.below(4) as usize,
            hosts: 1 + rng.below(2) as usize,
            keys: pick(rng, &[1, 4, 16, 64]) as usize,
            pool_bytes: (object_bytes * pick(rng, &[4, 6, 16, 40])).max(4 << 10),
            max_pins: handles.max(8),
            max_reservations: handles,
            object_bytes,
            lanes: 1 + rng.below(3) as u16,
            lane_window_bytes: pick(rng, &[1, 16 << 10, 64 << 20]),
            shared_memory: rng.chance(0.6),
            batches: 40 + rng.below(60),
            batch_requests: pick(rng, &[1, 4, 12]),
            think_ns: pick(rng, &[10 * US, MS, 5 * MS]),
            remove_weight: pick(rng, &[0, 5, 20]),
            replace_chance: pick(&mut Rng::new(seed, "replace"), &[0, 10, 50]) as f64 / 100.0,
            chunk_bytes: pick(rng, &[256, 4 << 10, 64 << 10]).min(object_bytes),
            latency_ns: pick(rng, &[10 * US, 200 * US, 2 * MS]),
            faults_until_ns: 2500 * MS,
            chances: Chances::draw(rng),
            tier: None,
            device: None,
            far: None,
            kept: None,
            replicas: 1,
            hedge_ns: 0,
            keeps: false,
            answers: false,
            returns: false,
            wishes: false,
            tickets: false,
            tenant: b"",
            quotas: false,
            joins_from_ns: 0,
            settle_most_ns: 1000 * MS,
            announces: false,
            undisturbed: false,
            scrub_bytes_per_s: 0,
            heals: false,
            damages_records: false,
            scrubs_disks: false,
        }
    }

    /// The scenario of a seed in which slots have two owners, and most objects two replicas. Nodes die and leave often.
    #[must_use]
    pub fn of_replicas(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "replicas");
        let mut scenario = Self::of_seed(seed);
        scenario.replicas = 2;
        scenario.nodes = 2 + rng.below(3) as usize;
        scenario.hedge_ns = [0, 0, 5 * MS, 60 * MS][rng.below(4) as usize];
        scenario.remove_weight = [5, 20, 40][rng.below(3) as usize];
        scenario.pool_bytes = (scenario.object_bytes * [6, 16, 40][rng.below(3) as usize]).max(4 << 10);
        scenario.keys = [2, 8, 24][rng.below(3) as usize];
        scenario.chances.weights[Fault::CrashNode as usize] = rng.below(4);
        scenario.chances.weights[Fault::LeaveNode as usize] = rng.below(3);
        scenario
    }

    /// The scenario of a seed in which slots have three to five owners, as far as there are failure domains, and
    /// objects two replicas up to more than there are owners.
    #[must_use]
    pub fn of_many_replicas(seed: u64) -> Self {
        Self::of_replicas(seed).with_many_owners()
    }

    /// Like [`Self::of_many_replicas`], with a host's bug.
    #[must_use]
    pub fn of_many_replicas_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_many_replicas(seed) }
    }

    /// Like [`Self::of_losses`], with three to five owners of a slot; one node dies, or one after another.
    #[must_use]
    pub fn of_losses_of_many(seed: u64) -> Self {
        let mut scenario = Self::of_losses(seed).with_many_owners();
        scenario.chances.faults_most = Some(1 + seed % 3);
        scenario
    }

    /// Like [`Self::of_hot`], with three to five owners of a slot.
    #[must_use]
    pub fn of_hot_with_many(seed: u64) -> Self {
        Self::of_hot(seed).with_many_owners()
    }

    fn with_many_owners(mut self) -> Self {
        let rng = &mut Rng::new(self.seed, "many replicas");
        self.replicas = 3 + rng.below(3) as u8;
        self.nodes = 3 + rng.below(4) as usize;
        self
    }

    /// Returns the number of failure domains that the nodes are in. What is promised to outlive a node that shares its
    /// domain is less where there are more than two owners (docs/adr/0020-replicas.md).
    pub(crate) fn failure_domains(&self) -> usize {
        match (self.replicas, self.keeps) {
            (..=2, _) => 2,
            (_, true) => self.nodes,
            (replicas, false) => usize::from(replicas) + self.seed as usize % 3 - 1,
        }
    }

    /// One node dies, and comes back soon or late, while objects are put that stay where they are: objects acknowledged
    /// with two replicas exist all the time.
    #[must_use]
    pub fn of_losses(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "losses");
        let mut scenario = Self::of_replicas(seed);
        (scenario.keeps, scenario.remove_weight, scenario.replace_chance) = (true, 0, 0.0);
        scenario.keys = [8, 24, 60][rng.below(3) as usize];
        scenario.pool_bytes = scenario.object_bytes * 400;
        (scenario.max_pins, scenario.max_reservations) = (4096, 4096);
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::CrashNode as usize] = 1;
        weights[Fault::LeaveNode as usize] = rng.below(2);
        let fault_interval_ns = (20 + rng.below(200)) * MS;
        let spike = scenario.chances.spike;
        // Faults begin after the nodes have joined and slots have migrated to them: migrating objects are at one node
        // for a while.
        let (faults_from_ns, at_rest, faults_most) = (1500 * MS, true, Some(1));
        scenario.chances =
            Chances { spike, fault_interval_ns, weights, faults_most, faults_from_ns, at_rest, ..Chances::default() };
        scenario
    }

    /// Bits of objects flip in memory, while objects are put that stay where they are, and of each of which another
    /// node has good bytes. Half of the seeds scrub memory; in the others, readers find the damage.
    #[must_use]
    pub fn of_flipped_bits(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "flipped bits");
        let mut scenario = Self::of_losses(seed);
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::FlipBit as usize] = 8;
        weights[Fault::ResetConnection as usize] = rng.below(2);
        weights[Fault::PartitionData as usize] = rng.below(2);
        weights[Fault::SlowNode as usize] = rng.below(2);
        let fault_interval_ns = (3 + rng.below(30)) * MS;
        let corrupt_chunk = [0.0, 0.01][rng.below(2) as usize];
        let (faults_from_ns, at_rest) = (600 * MS, true);
        scenario.chances =
            Chances { corrupt_chunk, fault_interval_ns, weights, faults_from_ns, at_rest, ..Chances::default() };
        scenario.scrub_bytes_per_s = [0, scenario.object_bytes * 200][rng.below(2) as usize];
        scenario.heals = corrupt_chunk == 0.0;
        scenario.undisturbed()
    }

    /// As [`Self::of_replicas`], with a disk under each shard, on which replica owners record their replicas, and
    /// memory for a part of the objects.
    #[must_use]
    pub fn of_recorded_replicas(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "recorded replicas");
        let mut scenario = Self::of_replicas(seed);
        scenario.object_bytes = [512, 2 << 10, 8 << 10][rng.below(3) as usize];
        scenario.chunk_bytes = scenario.chunk_bytes.min(scenario.object_bytes);
        scenario.pool_bytes = (scenario.object_bytes * [6, 12, 40][rng.below(3) as usize]).max(32 << 10);
        let tier = TierScenario::draw(rng, scenario.object_bytes, scenario.keys).honest(rng);
        scenario.tier = Some(tier);
        scenario
    }

    /// Bytes of records on disks are damaged, while objects are put that stay where they are and of which memory holds
    /// a part only, and of each of which another node has a good record. In half of the seeds disks are scrubbed; in
    /// the others, readers find the damage.
    #[must_use]
    pub fn of_damaged_records(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "damaged records");
        let mut scenario = Self::of_losses(seed);
        scenario.object_bytes = [512, 3 << 10, 8 << 10, 30 << 10][rng.below(4) as usize];
        scenario.chunk_bytes = scenario.chunk_bytes.min(scenario.object_bytes);
        scenario.keys = [8, 24, 40][rng.below(3) as usize];
        scenario.pool_bytes = (scenario.object_bytes * [6, 10, 60][rng.below(3) as usize]).max(64 << 10);
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::DamageRecord as usize] = 8;
        weights[Fault::ResetConnection as usize] = rng.below(2);
        weights[Fault::PartitionData as usize] = rng.below(2);
        weights[Fault::SlowNode as usize] = rng.below(2);
        let fault_interval_ns = (10 + rng.below(40)) * MS;
        let (faults_from_ns, at_rest, faults_most) = (600 * MS, true, Some(60));
        scenario.chances =
            Chances { fault_interval_ns, weights, faults_most, faults_from_ns, at_rest, ..Chances::default() };
        scenario.tier = Some(TierScenario::draw(rng, scenario.object_bytes, scenario.keys).honest(rng));
        (scenario.damages_records, scenario.scrubs_disks) = (true, rng.chance(0.5));
        scenario.undisturbed()
    }

    /// Like [`Self::of_damaged_records`], with a host's bug.
    #[must_use]
    pub fn of_damaged_records_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_damaged_records(seed) }
    }

    /// The control plane loses its state, once or several times, while objects are put that stay where they are.
    /// Members stay alive, and so do their objects.
    #[must_use]
    pub fn of_lost_state(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "lost state");
        let mut scenario = Self::of_losses(seed);
        scenario.tickets = rng.chance(0.5);
        // Members stay alive, so that no object in migration is lost.
        scenario.chances.at_rest = false;
        scenario.chances.weights = [0; crate::world::faults::FAULTS];
        scenario.chances.weights[Fault::SetClock as usize] = rng.below(2);
        scenario.chances.weights[Fault::LoseControl as usize] = 2;
        scenario.chances.weights[Fault::CrashControl as usize] = rng.below(2);
        scenario.chances.control_loss = [0.0, 0.3][rng.below(2) as usize];
        scenario.chances.control_duplicate = [0.0, 0.2][rng.below(2) as usize];
        scenario.chances.control_crash_in_publish = [0.0, 0.2][rng.below(2) as usize];
        scenario.chances.faults_most = Some(1 + rng.below(4));
        scenario
    }

    /// The scenario of a seed in which shards require tickets, and the control plane moves between hosts whose clocks
    /// differ and jump.
    #[must_use]
    pub fn of_clocks(seed: u64) -> Self {
        let mut scenario = Self { tickets: true, ..Self::of_seed(seed) };
        scenario.chances.weights[Fault::SetClock as usize] = 4;
        scenario.chances.weights[Fault::CrashControl as usize] = 3;
        scenario
    }

    /// The scenario of a seed in which few objects are read by all and replaced often, with at least three nodes, so
    /// that replica owners change while the owners stay; and maps arrive late.
    #[must_use]
    pub fn of_hot(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "hot");
        let mut scenario = Self::of_replicas(seed);
        (scenario.nodes, scenario.clients) = (3 + rng.below(2) as usize, 4);
        (scenario.keys, scenario.batch_requests, scenario.batches) = ([1, 2, 4][rng.below(3) as usize], 4, 1000);
        (scenario.remove_weight, scenario.replace_chance) = (2, 0.2);
        scenario.think_ns = [MS, 5 * MS][rng.below(2) as usize];
        scenario.latency_ns = [10 * US, 200 * US][rng.below(2) as usize];
        (scenario.object_bytes, scenario.chunk_bytes, scenario.pool_bytes) = (1 << 10, 1 << 10, 40 << 10);
        (scenario.lane_window_bytes, scenario.max_pins, scenario.max_reservations) = (64 << 20, 4096, 4096);
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::LeaveNode as usize] = 3;
        weights[Fault::CrashNode as usize] = rng.below(2);
        weights[Fault::PartitionControl as usize] = 1 + rng.below(3);
        weights[Fault::PartitionData as usize] = rng.below(2);
        let control_loss = [0.0, 0.3][rng.below(2) as usize];
        let fault_interval_ns = (100 + rng.below(200)) * MS;
        scenario.chances = Chances { control_loss, fault_interval_ns, weights, ..Chances::default() };
        scenario
    }

    /// The scenario of a seed in which objects are put without a second replica, and some are replicated on request
    /// later.
    #[must_use]
    pub fn of_wishes(seed: u64) -> Self {
        Self { wishes: true, ..Self::of_replicas(seed) }
    }

    /// Like [`Self::of_wishes`], with a host's bug.
    #[must_use]
    pub fn of_wishes_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_wishes(seed) }
    }

    /// Like [`Self::of_replicas`], with a host's bug.
    #[must_use]
    pub fn of_replicas_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_replicas(seed) }
    }

    /// A scenario of losses with a host's bug.
    #[must_use]
    pub fn of_losses_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_losses(seed) }
    }

    /// Returns true if replies may come long after their requests took effect.
    pub(crate) const fn answers_late(&self) -> bool {
        self.tier.is_some() || self.replicas > 1
    }

    /// The scenario of a seed in which every shard has a disk. Disks outlive their processes, so the versions on them
    /// are read again after crashes, which are frequent here.
    #[must_use]
    pub fn of_tiers(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "tiers");
        let mut scenario = Self::of_seed(seed);
        let object_bytes = [2 << 10, 8 << 10, 8 << 10, 100 << 10][rng.below(4) as usize];
        scenario.object_bytes = object_bytes;
        scenario.pool_bytes = object_bytes * [4, 6, 16][rng.below(3) as usize];
        scenario.chunk_bytes = scenario.chunk_bytes.min(object_bytes);
        scenario.keys = [4, 16, 32][rng.below(3) as usize];
        scenario.remove_weight = [5, 20, 40][rng.below(3) as usize];
        scenario.nodes = 1 + rng.below(3) as usize;
        scenario.chances.weights[Fault::CrashNode as usize] = 2 + rng.below(6);
        scenario.tier = Some(TierScenario::draw(rng, object_bytes, scenario.keys));
        scenario
    }

    /// The scenario of a seed in which nodes are away with their disks for longer than others wait for them, one after
    /// the other and together, and users remove and replace a lot meanwhile.
    #[must_use]
    pub fn of_absences(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "absences");
        let mut scenario = Self::of_tiers(seed).with_slots_that_move();
        if let Some(tier) = &mut scenario.tier {
            tier.suit(Mischief::BelieveDisks);
            tier.config.segments = 64;
            tier.policy.ack = [PutAck::Durable, PutAck::Buffered][rng.below(2) as usize];
            tier.power = tier.policy.ack == PutAck::Durable && rng.chance(0.5);
        }
        scenario.replace_chance = 0.3;
        scenario.shards = 1 + rng.below(2) as u16;
        scenario.batches = 200;
        scenario.chances.fault_interval_ns = (60 + rng.below(300)) * MS;
        scenario.chances.weights[Fault::CrashNode as usize] = rng.below(3);
        scenario.chances.weights[Fault::PartitionControl as usize] = rng.below(3);
        scenario
    }

    /// Like [`Self::of_absences`], with a host's bug.
    #[must_use]
    pub fn of_absences_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_absences(seed) }
    }

    /// One node is away with its disk for longer than others wait for it, and comes back, while objects are put that
    /// stay: all promised objects exist at the end.
    #[must_use]
    pub fn of_returns(seed: u64) -> Self {
        let mut scenario = Self::of_absences(seed);
        (scenario.keeps, scenario.returns) = (true, true);
        (scenario.remove_weight, scenario.replace_chance) = (0, 0.0);
        scenario.tier.iter_mut().for_each(|tier| tier.without = 0.0);
        scenario.keys = 24;
        scenario.pool_bytes = scenario.object_bytes * 400;
        (scenario.max_pins, scenario.max_reservations) = (4096, 4096);
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::LeaveNode as usize] = 1;
        weights[Fault::CrashNode as usize] = 1;
        let fault_interval_ns = scenario.chances.fault_interval_ns;
        let (faults_from_ns, at_rest, faults_most) = (1500 * MS, true, Some(1));
        scenario.chances =
            Chances { fault_interval_ns, weights, faults_most, faults_from_ns, at_rest, ..Chances::default() };
        scenario
    }

    /// A scenario of tiers with a host's bug, on disks that make it matter.
    #[must_use]
    pub fn of_tiers_with(seed: u64, mischief: Mischief) -> Self {
        let mut scenario = Self { mischief: Some(mischief), ..Self::of_tiers(seed) };
        if let Some(tier) = &mut scenario.tier {
            tier.suit(mischief);
        }
        match mischief {
            // Without removals, missing objects are found by the audit.
            Mischief::SkipFlush => scenario.remove_weight = 0,
            Mischief::BelieveDisks => scenario = scenario.with_slots_that_move(),
            Mischief::HideDisks => scenario.remove_weight = 40,
            _ => {}
        }
        scenario
    }

    /// The scenario of a seed with a host's bug.
    #[must_use]
    pub fn with_mischief(seed: u64, mischief: Mischief) -> Self {
        let scenario =
            if mischief == Mischief::SkipEpochs { Self::with_missed_epochs(seed, true) } else { Self::of_seed(seed) };
        Self { mischief: Some(mischief), ..scenario }
    }

    /// A scenario in which shards miss maps. Few seeds have the conditions in which a missed epoch does harm: a slot
    /// that goes away and comes back while its former owner receives no maps, and a remove in between. So here nodes
    /// come and go fast, messages of the control plane are often lost, and users remove a lot. In every second seed
    /// they arrive more often, as a joining node waits for silent ones, and few objects are removed: users read objects
    /// that a shard should have dropped.
    #[must_use]
    pub fn of_missed_epochs(seed: u64) -> Self {
        Self::with_missed_epochs(seed, seed.is_multiple_of(2))
    }

    fn with_missed_epochs(seed: u64, often: bool) -> Self {
        let (control_loss, remove_weight) = if often { (0.3, 40) } else { (0.15, 5) };
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::LeaveNode as usize] = 1;
        weights[Fault::PartitionControl as usize] = 2;
        Self {
            nodes: 4,
            clients: 4,
            keys: 32,
            batches: 800,
            batch_requests: 4,
            remove_weight,
            think_ns: MS,
            latency_ns: 10 * US,
            object_bytes: 1 << 10,
            pool_bytes: 64 << 10,
            chunk_bytes: 1 << 10,
            chances: Chances { control_loss, fault_interval_ns: 40 * MS, weights, ..Chances::default() },
            ..Self::of_seed(seed)
        }
    }

    /// Slots migrate away and back while their former owner is down, and users remove a lot meanwhile.
    fn with_slots_that_move(mut self) -> Self {
        self.nodes = 3;
        self.clients = 4;
        (self.keys, self.batches, self.batch_requests, self.remove_weight) = (16, 600, 4, 40);
        (self.think_ns, self.latency_ns, self.object_bytes) = (MS, 10 * US, 2 << 10);
        (self.pool_bytes, self.chunk_bytes) = (32 << 10, 2 << 10);
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::LeaveNode as usize] = 2;
        weights[Fault::CrashNode as usize] = 1;
        self.chances = Chances { fault_interval_ns: 60 * MS, weights, ..Chances::default() };
        self
    }

    pub(crate) fn has(&self, mischief: Mischief) -> bool {
        self.mischief == Some(mischief)
    }
}

impl Chances {
    fn draw(rng: &mut Rng) -> Self {
        let quiet = rng.chance(0.1);
        let mut maybe = |chance: f64| {
            let drawn = chance * rng.unit();
            if quiet || rng.chance(0.5) { 0.0 } else { drawn }
        };
        let mut chances = Self {
            corrupt_chunk: maybe(0.03),
            corrupt_head: maybe(0.002),
            duplicate_reply: maybe(0.03),
            spike: maybe(0.02),
            control_loss: maybe(0.4),
            control_duplicate: maybe(0.2),
            control_crash_in_publish: maybe(0.2),
            cancel: maybe(0.2),
            repeat_frame: maybe(0.02),
            ..Self::default()
        };
        chances.fault_interval_ns = (20 + rng.below(200)) * MS;
        for weight in &mut chances.weights[..crate::world::faults::COMMON] {
            *weight = if quiet || rng.chance(0.4) { 0 } else { 1 + rng.below(4) };
        }
        chances
    }
}
