//! Nodes that join a cluster with objects, shortly after each other.

use kvplane_proto::rng::Rng;

use crate::world::faults::{FAULTS, Fault};
use crate::world::scenario::{Chances, MS, Mischief, Scenario};

impl Scenario {
    /// The scenario of a seed in which nodes with disks join while there are objects, shortly after each other, and
    /// cannot reach each other for a while. No node dies, and all promised objects exist at the end.
    #[must_use]
    pub fn of_joins(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "joins");
        let mut scenario = Self::of_returns(seed).undisturbed();
        (scenario.nodes, scenario.keys) = (4, 60);
        // One node has space for all objects.
        scenario.tier.iter_mut().for_each(|tier| (tier.config.max_records, tier.config.segments) = (256, 64));
        scenario.joins_from_ns = (400 + rng.below(400)) * MS;
        // The limit is longer than the partitions between nodes.
        scenario.settle_most_ns = 5000 * MS;
        let mut weights = [0; FAULTS];
        weights[Fault::PartitionData as usize] = 1;
        let fault_interval_ns = (20 + rng.below(40)) * MS;
        scenario.chances = Chances { weights, fault_interval_ns, ..Chances::default() };
        scenario
    }

    /// A scenario of late joins with a host's bug.
    #[must_use]
    pub fn of_joins_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_joins(seed) }
    }

    /// Returns the time when a node starts for the first time.
    pub(crate) const fn joins_ns(&self, node: usize) -> u64 {
        if self.joins_from_ns == 0 || node < 2 { 0 } else { self.joins_from_ns + node as u64 * 20 * MS }
    }
}
