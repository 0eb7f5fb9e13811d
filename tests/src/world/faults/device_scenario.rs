//! Scenarios with device pools: their sizes, the times of their copies, and the faults of their devices.

use kvplane_proto::rng::Rng;
use kvplane_store::StoreConfig;
use kvplane_store::eviction::Eviction;

use crate::world::faults::Fault;
use crate::world::scenario::{MS, Mischief, Scenario, US};

/// Parameters of device pools, drawn from a seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceScenario {
    pub(super) pool_bytes: u64,
    eviction: Eviction,
    protected_percent: u8,
    /// Longest time between two pieces of a copy.
    pub(super) piece_ns: u64,
}

impl DeviceScenario {
    fn draw(rng: &mut Rng, object_bytes: u64) -> Self {
        Self {
            pool_bytes: object_bytes * [1, 2, 4][rng.below(3) as usize],
            // LRU ranks no object as hot.
            eviction: [Eviction::SegmentedLru, Eviction::S3Fifo][rng.below(2) as usize],
            protected_percent: [20, 50, 90][rng.below(3) as usize],
            piece_ns: [20 * US, 2 * MS, 20 * MS][rng.below(3) as usize],
        }
    }

    /// Gives the configuration of a store a device pool.
    pub(crate) const fn configure(self, config: &mut StoreConfig) {
        config.device_pool_bytes = self.pool_bytes;
        config.eviction = self.eviction;
        config.protected_percent = self.protected_percent;
    }
}

impl Scenario {
    /// The scenario of a seed in which every shard has a device pool beside a small pool. In half of the seeds slots
    /// have two owners.
    #[must_use]
    pub fn of_devices(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "device pools");
        let mut scenario = if rng.chance(0.5) { Self::of_replicas(seed) } else { Self::of_seed(seed) };
        let object_bytes = [8 << 10, 8 << 10, 16 << 10, 40 << 10][rng.below(4) as usize];
        scenario.object_bytes = object_bytes;
        scenario.pool_bytes = object_bytes * [6, 10, 24][rng.below(3) as usize];
        scenario.chunk_bytes = object_bytes / [1, 2, 8][rng.below(3) as usize];
        scenario.keys = [3, 8, 20][rng.below(3) as usize];
        scenario.nodes = scenario.nodes.min(3);
        scenario.clients = 2 + rng.below(3) as usize;
        scenario.batches = 100 + rng.below(200);
        scenario.batch_requests = [4, 8, 12][rng.below(3) as usize];
        scenario.think_ns = MS;
        scenario.latency_ns = [10 * US, 200 * US][rng.below(2) as usize];
        scenario.remove_weight = [0, 5, 20][rng.below(3) as usize];
        scenario.chances.fault_interval_ns = (15 + rng.below(100)) * MS;
        let weights = &mut scenario.chances.weights;
        // Nodes that are away have no device pool.
        weights.iter_mut().for_each(|weight| *weight = (*weight).min(1));
        weights[Fault::DamageDevice as usize] = [0, 3, 10][rng.below(3) as usize];
        if rng.chance(0.5) {
            // What a lost device may still write to is not used again, nor are its handles: there must be others.
            weights[Fault::LoseDevice as usize] = 2;
            weights[Fault::CrashNode as usize] = 2;
            scenario.pool_bytes = object_bytes * 24;
            scenario.max_reservations = scenario.max_reservations.max(16);
        }
        scenario.device = Some(DeviceScenario::draw(rng, object_bytes));
        scenario
    }

    /// The scenario of losses in which every shard has a device pool, and devices are lost too: an object that was
    /// acknowledged with two replicas is missing only if a device had one of them.
    #[must_use]
    pub fn of_device_losses(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "device losses");
        let mut scenario = Self::of_losses(seed);
        let object_bytes = 8 << 10;
        scenario.object_bytes = object_bytes;
        scenario.chunk_bytes = object_bytes / 2;
        scenario.pool_bytes = object_bytes * 200;
        scenario.keys = [8, 24][rng.below(2) as usize];
        scenario.clients = 2 + rng.below(3) as usize;
        scenario.batches = 100 + rng.below(80);
        let weights = &mut scenario.chances.weights;
        weights[Fault::LoseDevice as usize] = rng.below(2);
        weights[Fault::DamageDevice as usize] = rng.below(2);
        scenario.chances.faults_most = Some(1 + rng.below(4));
        scenario.chances.node_faults_most = Some(1);
        // Objects that are read again by far the most of the time are hot whatever the policy keeps for others.
        scenario.device = Some(DeviceScenario { protected_percent: 90, ..DeviceScenario::draw(rng, object_bytes) });
        scenario
    }

    /// A scenario of device pools with a host's bug.
    #[must_use]
    pub fn of_devices_with(seed: u64, mischief: Mischief) -> Self {
        let mut scenario = Self { mischief: Some(mischief), ..Self::of_devices(seed) };
        if mischief == Mischief::TrustDevice {
            scenario.chances.weights[Fault::DamageDevice as usize] = 8;
        }
        scenario
    }
}
