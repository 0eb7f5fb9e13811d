//! What a node tells the control plane after each heartbeat, and what it gets back: of its shards, of their tenants, and
//! of their SSD tiers.

pub(super) mod shard;
pub(super) mod tenant;
pub(super) mod tier;
