//! Far memory of pools: its size, the copies that move objects between it and DRAM, and scenarios.
//!
//! The copies are made at once, within the call of the store that needs the room, as in a real host.

use std::sync::{Arc, Mutex, PoisonError};

use kvplane_proto::rng::Rng;
use kvplane_store::{PoolCopies, Store, StoreConfig, open_far_pool};

use crate::world::cluster::memory::UNIT_BYTES;
use crate::world::pool::PoolMemory;
use crate::world::scenario::{Mischief, Scenario};

/// Most bytes of a tail, in whole units: the name of a key is short.
const TAIL_BYTES: u64 = UNIT_BYTES;

/// Parameters of far pools, drawn from a seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FarScenario {
    pub(crate) pool_bytes: u64,
    /// All objects fit, so none is ever evicted.
    pub(crate) holds_all: bool,
}

/// Copy inside a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolCopy {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
}

/// Memory of a pool with a far part, and the copies inside it since they were last checked, in their order.
#[derive(Clone, Debug)]
pub(crate) struct FarMemory {
    memory: PoolMemory,
    made: Arc<Mutex<Vec<PoolCopy>>>,
    /// [`Mischief::ShortCopies`].
    is_short: bool,
}

impl FarMemory {
    /// Gives the store of a shard the far pool of the scenario, if it has one: the end of this memory.
    pub(crate) fn open(scenario: &Scenario, memory: &PoolMemory, store: &mut Store) -> Option<Self> {
        scenario.far?;
        let is_short = scenario.has(Mischief::ShortCopies);
        let far = Self { memory: memory.clone(), made: Arc::default(), is_short };
        open_far_pool(store, Arc::new(far.clone()));
        Some(far)
    }

    /// Returns the copies since the last call, in their order.
    pub(crate) fn take_copies(&self) -> Vec<PoolCopy> {
        std::mem::take(&mut self.made.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl PoolCopies for FarMemory {
    fn copy(&self, from: u64, to: u64, bytes: u64) {
        let copied = if self.is_short { bytes - bytes.min(1) } else { bytes };
        self.memory.write().copy_within(from as usize..(from + copied) as usize, to as usize);
        self.made.lock().unwrap_or_else(PoisonError::into_inner).push(PoolCopy { from, to, bytes });
    }
}

impl FarScenario {
    /// Gives the configuration of a store a far pool.
    pub(crate) const fn configure(self, config: &mut StoreConfig) {
        config.far_pool_bytes = self.pool_bytes;
    }
}

impl Scenario {
    /// The scenario of a seed in which every shard has far memory behind little DRAM: like [`Self::of_seed`], with
    /// disks, with losses, or with bits that flip. In the last two, far memory has room for all objects.
    #[must_use]
    pub fn of_far_memory(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "far memory");
        let mut scenario = match seed % 4 {
            0 => Self::of_seed(seed),
            1 => Self::of_tiers(seed),
            2 => Self::of_losses(seed),
            _ => Self::of_flipped_bits(seed),
        };
        let units = |bytes: u64| bytes.next_multiple_of(UNIT_BYTES);
        let object_bytes = units(scenario.object_bytes) + TAIL_BYTES;
        let holds_all = scenario.keeps;
        scenario.keys = [8, 24, 40][rng.below(3) as usize];
        scenario.batches *= 3;
        scenario.pool_bytes = (object_bytes * [4, 6, 12][rng.below(3) as usize]).max(4 << 10);
        let objects = if holds_all { 4 * scenario.keys as u64 } else { [1, 3, 8, 20][rng.below(4) as usize] };
        scenario.far = Some(FarScenario { pool_bytes: object_bytes * objects, holds_all });
        scenario
    }

    /// Like [`Self::of_far_memory`], with a host's bug.
    #[must_use]
    pub fn of_far_memory_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_far_memory(seed) }
    }

    /// Returns the bytes of a shard's memory, near and far.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.pool_bytes + self.far.map_or(0, |far| far.pool_bytes)
    }
}
