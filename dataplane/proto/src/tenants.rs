//! Tenants, as the control plane and the shards share them.

/// Lease of a tenant on a shard: its part of the shard's pool, and its weight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
pub struct TenantLease {
    /// Number of the tenant: see [`tenant_number`](crate::digest::tenant_number). 0 is the default tenant, which always
    /// exists.
    pub number: u32,
    /// Bytes of the shard's pool that its objects may fill; `None` for no limit.
    pub dram_bytes: Option<u64>,
    /// Weight among tenants without a limit. 0 counts as 1.
    pub weight: u32,
}

/// Lease of a tenant on a shard's part of an SSD, and the weight of its requests there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
pub struct TenantSsdLease {
    /// Number of the tenant: see [`tenant_number`](crate::digest::tenant_number).
    pub number: u32,
    /// Bytes that its records may take; `None` for no limit.
    pub ssd_bytes: Option<u64>,
    /// Weight of its writes and reads while the SSD cannot keep up with all tenants. 0 counts as 1.
    pub weight: u32,
}
