//! Messages about tenants: what operators set, what shards have and may have.
//!
//! A node tells of each of its shards after a heartbeat, one a call; the answer is the shard's leases from then on. An
//! answer that is not taken in time is not taken at all, so what a shard says next is what it has.

use bincode::{Decode, Encode};

/// A tenant as an operator wants it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SetTenant {
    /// Its name; empty for the default tenant.
    pub name: String,
    /// Bytes of all nodes' memory that its objects may take; without, whatever they get.
    pub dram_bytes: Option<u64>,
    /// Its weight, in memory, among tenants without a quota: 1 to 1000.
    pub weight: u32,
}

/// Takes a tenant away. Its objects stay until they are removed or evicted.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RemoveTenant {
    /// Its name.
    pub name: String,
    /// Only if it has nothing any more.
    pub only_empty: bool,
}

/// Asks for all tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListTenants;

/// All tenants.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantList {
    /// Whether only tenants that were set may put.
    pub strict: bool,
    /// Bytes of all pools.
    pub pool_bytes: u64,
    /// Those that were set, and the default one; by name.
    pub tenants: Vec<TenantStatus>,
}

/// One tenant. Fields are append-only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct TenantStatus {
    /// Its name; empty for the default tenant.
    pub name: String,
    /// Whether it was set.
    pub is_set: bool,
    /// Its quota.
    pub dram_bytes: Option<u64>,
    /// Its weight.
    pub weight: u32,
    /// Bytes that its objects take, in whole granules.
    pub used_bytes: u64,
    /// What its shards may have, as they said last.
    pub leased_bytes: Option<u64>,
    /// Bytes of its objects that were evicted.
    pub evicted_bytes: u64,
    /// Puts of its that were refused for want of quota.
    pub refused: u64,
}

/// Says what tenants have of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SyncTenants {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// Which shard.
    pub shard: u16,
    /// Bytes of its pool.
    pub pool_bytes: u64,
    /// What tenants have there.
    pub uses: Vec<TenantFigures>,
}

/// What a tenant has of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct TenantFigures {
    /// The tenant's number.
    pub number: u32,
    /// Bytes that its objects take.
    pub used_bytes: u64,
    /// Bytes that they may take, if that is limited.
    pub lease_bytes: Option<u64>,
    /// Bytes of its objects that were evicted.
    pub evicted_bytes: u64,
    /// Puts of its that were refused.
    pub refused: u64,
}

/// What tenants may have of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantLeases {
    /// Whether only these, and the default one, may put.
    pub strict: bool,
    /// The tenants.
    pub tenants: Vec<LeaseOfTenant>,
}

/// What a tenant may have of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LeaseOfTenant {
    /// The tenant's number.
    pub number: u32,
    /// Bytes that it may have; without, whatever it gets.
    pub dram_bytes: Option<u64>,
    /// Its weight.
    pub weight: u32,
}
