//! Messages about tenants: operators' settings, usage that shards report, and quota leases of shards.
//!
//! A node reports each of its shards after a heartbeat, one per call; the reply holds the shard's leases from then on.
//! A reply that arrives too late is dropped, so the shard's next report holds the leases that it really has.

use bincode::{Decode, Encode};
pub use kvplane_cluster::{TenantChange, TenantFigures, TenantSsd};
pub use kvplane_proto::tenants::{TenantLease, TenantSsdLease};

/// Creates a tenant, or changes it: all of the change, or nothing if it is refused.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SetTenant {
    pub change: TenantChange,
}

/// Removes a tenant. Its objects stay until they are removed or evicted.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RemoveTenant {
    pub name: String,
    /// Refuse if the tenant still has objects, or if a node that may have some has not reported.
    pub only_empty: bool,
}

/// Requests all tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListTenants;

/// The reply to [`ListTenants`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantList {
    /// True if only configured tenants may put.
    pub strict: bool,
    /// Bytes of all pools.
    pub pool_bytes: u64,
    /// Configured tenants and the default tenant, by name.
    pub tenants: Vec<TenantStatus>,
}

/// State of one tenant. Fields are append-only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TenantStatus {
    /// Name of the tenant; empty for the default tenant.
    pub name: String,
    /// True if an operator configured the tenant.
    pub is_set: bool,
    /// Quota in bytes; none for no quota.
    pub dram_bytes: Option<u64>,
    pub weight: u32,
    /// Bytes that its objects take, in whole granules.
    pub used_bytes: u64,
    /// Bytes leased to its shards, by their last reports; none for no limit.
    pub leased_bytes: Option<u64>,
    /// Bytes of its objects that were evicted.
    pub evicted_bytes: u64,
    /// Puts that were refused because the quota was used up.
    pub refused: u64,
}

/// Reports the tenants' usage of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SyncTenants {
    pub node: u64,
    pub incarnation: u64,
    pub shard: u16,
    /// Bytes of the shard's pool.
    pub pool_bytes: u64,
    /// Usage, by tenant.
    pub uses: Vec<TenantFigures>,
}

/// The reply to [`SyncTenants`]: quota leases of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantLeases {
    /// True if only these tenants and the default tenant may put.
    pub strict: bool,
    /// Leases, by tenant.
    pub tenants: Vec<TenantLease>,
}

/// Requests the use of SSDs by all tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListTenantSsds;

/// The reply to [`ListTenantSsds`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantSsdList {
    /// Bytes of all SSDs that records can take.
    pub ssd_bytes: u64,
    /// Configured tenants and the default tenant, by name.
    pub tenants: Vec<TenantSsdStatus>,
}

/// Use of SSDs by one tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TenantSsdStatus {
    /// Name of the tenant; empty for the default tenant.
    pub name: String,
    pub ssd: TenantSsd,
    /// Bytes that its live records take.
    pub used_bytes: u64,
    /// Bytes leased to its shards, by their last reports; none for no limit.
    pub leased_bytes: Option<u64>,
    /// Bytes of its records that were evicted because of the quota.
    pub evicted_bytes: u64,
    /// Writes that were refused because the quota had no room.
    pub refused: u64,
}

/// Reports the use of a shard's SSD by tenants.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SyncTenantSsds {
    pub node: u64,
    pub incarnation: u64,
    pub shard: u16,
    /// Bytes of the shard's SSD that records can take; 0 without one.
    pub ssd_bytes: u64,
    /// Use, by tenant.
    pub uses: Vec<TenantFigures>,
}

/// The reply to [`SyncTenantSsds`]: leases of a shard's SSD.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantSsdLeases {
    /// Leases, by tenant; tenants that are not listed have no limit and weight 1.
    pub tenants: Vec<TenantSsdLease>,
}
