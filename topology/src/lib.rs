//! What the machine is and who sits where: NUMA nodes, cores, NICs, NVMe; shard plan.
