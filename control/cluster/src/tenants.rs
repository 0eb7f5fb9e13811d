//! Tenants: who may put, how much memory theirs may take, and how much weight they have.
//!
//! The default tenant has no name and is always there; it may have a quota like others. Nodes know tenants by 32 bits
//! of a hash of the name ([`tenant_number`]), so a second tenant with the same number is refused.

use std::collections::BTreeMap;

use kvplane_proto::digest::tenant_number;

use crate::cluster::Cluster;
use crate::message::{Change, Reply};
use crate::record::{Record, RecordKey};
use crate::rejection::Rejection;

/// Longest name of a tenant.
pub const MAX_TENANT_NAME_BYTES: usize = 255;
/// The most tenants: every shard looks through those that use anything when room is needed.
pub const MAX_TENANTS: usize = 1023;
/// The greatest weight.
pub const MAX_TENANT_WEIGHT: u32 = 1000;

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its name, UTF-8; empty for the default tenant.
    pub name: String,
    /// Bytes of all nodes' memory that its objects may take; without, whatever they get.
    pub dram_bytes: Option<u64>,
    /// Its weight among tenants without a quota: how they divide the memory that the others leave.
    pub weight: u32,
}

/// All tenants that were set.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    pub(crate) by_name: BTreeMap<String, Tenant>,
}

impl Cluster {
    /// The tenants that were set, by name.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.by_name.values()
    }

    /// A tenant that was set.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.tenants.by_name.get(name)
    }

    pub(crate) fn set_tenant(&mut self, tenant: Tenant) -> Result<Reply, Rejection> {
        let bytes = tenant.name.len();
        if bytes > MAX_TENANT_NAME_BYTES || tenant.name.chars().any(char::is_control) {
            return Err(Rejection::TenantName { bytes });
        }
        if tenant.weight == 0 || tenant.weight > MAX_TENANT_WEIGHT {
            return Err(Rejection::TenantWeight { weight: tenant.weight });
        }
        let all = &self.tenants.by_name;
        if !all.contains_key(&tenant.name) && all.len() >= MAX_TENANTS {
            return Err(Rejection::TooManyTenants { limit: MAX_TENANTS });
        }
        let number = tenant_number(tenant.name.as_bytes());
        let same = all.keys().find(|other| **other != tenant.name && tenant_number(other.as_bytes()) == number);
        if let Some(other) = same {
            return Err(Rejection::TenantNumber { name: tenant.name, other: other.clone() });
        }
        if all.get(&tenant.name) != Some(&tenant) {
            self.changes.push(Change::Put(Record::Tenant(tenant.clone())));
            self.tenants.by_name.insert(tenant.name.clone(), tenant);
        }
        Ok(Reply::TenantSet)
    }

    pub(crate) fn remove_tenant(&mut self, name: String) -> Result<Reply, Rejection> {
        if self.tenants.by_name.remove(&name).is_none() {
            return Err(Rejection::UnknownTenant { name });
        }
        self.changes.push(Change::Remove(RecordKey::Tenant(name)));
        Ok(Reply::TenantRemoved)
    }
}
