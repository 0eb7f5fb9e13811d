//! Reports of a node after each heartbeat, and the answers to them: of its shards, of their tenants, and of their SSD
//! tiers.

pub(super) mod shard;
pub(super) mod tenant;
pub(super) mod tier;
