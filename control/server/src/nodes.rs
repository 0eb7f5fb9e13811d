//! State of nodes beside their membership: reports, orders and their answers, port probes, quota leases of tenants.

pub(crate) mod follow;
pub(crate) mod port_probe;
pub(crate) mod reports;
pub(crate) mod shards;
pub(crate) mod tasks;
pub(crate) mod tenants;
pub(crate) mod tiers;
