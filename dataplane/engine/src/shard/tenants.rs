//! Tenants of a shard: their use of memory and SSD, and their leases of both.

use kvplane_proto::tenants::{TenantLease, TenantSsdLease};
use kvplane_store::TenantUse;
use kvplane_store::service::SsdUsage;

use super::command::Command;
use super::error::ShardError;
use super::handle::ShardHandle;

/// The tenants of a running shard.
#[derive(Clone, Copy)]
pub struct ShardTenants<'a>(&'a ShardHandle);

impl<'a> ShardTenants<'a> {
    pub(super) const fn of(shard: &'a ShardHandle) -> Self {
        Self(shard)
    }

    /// Sets the leases of memory: see [`kvplane_store::service::Control::set_tenants`].
    ///
    /// # Errors
    /// If the shard's mailbox is full.
    pub fn lease_memory(self, leases: Vec<TenantLease>, strict: bool) -> Result<(), ShardError> {
        self.0.send(Command::Ask(Box::new(move |host| {
            host.service().control().set_tenants(&leases, strict);
        })))
    }

    /// Returns the bytes of the shard's pool, and the use of each tenant.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn in_memory(self) -> Result<(u64, Vec<TenantUse>), ShardError> {
        self.0.ask_service(|service| {
            let pool_bytes = service.store().config().host_bytes();
            (pool_bytes, service.inspect().tenants())
        })
    }

    /// Sets the leases of the SSD: see [`kvplane_store::service::Control::set_ssd_tenants`].
    ///
    /// # Errors
    /// If the shard's mailbox is full.
    pub fn lease_ssd(self, leases: Vec<TenantSsdLease>) -> Result<(), ShardError> {
        self.0.send(Command::Ask(Box::new(move |host| host.service().control().set_ssd_tenants(&leases))))
    }

    /// Returns the use of the SSD by tenants; `None` while recovery has not found all of it.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn on_ssd(self) -> Result<Option<SsdUsage>, ShardError> {
        self.0.ask_service(|service| service.control().ssd_usage())
    }
}

impl std::fmt::Debug for ShardTenants<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ShardTenants")
    }
}
