//! Tenants: name, memory quota and weight of each.
//!
//! The default tenant has no name and always exists; it may have a quota like others. Nodes identify tenants by 32 bits
//! of a hash of the name ([`tenant_number`]), so a second tenant with the same number is rejected.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use kvplane_proto::digest::tenant_number;

use crate::rejection::Rejection;

/// Maximum length of a tenant's name.
pub const MAX_TENANT_NAME_BYTES: usize = 255;
/// Maximum number of tenants: to evict, a shard scans those that use memory.
pub const MAX_TENANTS: usize = 1023;
/// Maximum weight of a tenant.
pub const MAX_TENANT_WEIGHT: u32 = 1000;

/// Name, memory quota and weight of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Tenant {
    /// Name in UTF-8; empty for the default tenant.
    pub name: String,
    /// Quota of its objects in the memory of all nodes, in bytes; none for a part by weight of the rest.
    pub dram_bytes: Option<u64>,
    /// Weight among tenants without a quota: they divide the memory that the others leave in proportion to it.
    pub weight: u32,
}

/// Tenants that were set, by name.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_name: BTreeMap<String, Tenant>,
}

impl Tenants {
    /// Returns the tenants, by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Tenant> {
        self.by_name.values()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Tenant> {
        self.by_name.get(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Inserts a tenant from its record.
    pub(crate) fn insert(&mut self, tenant: Tenant) {
        self.by_name.insert(tenant.name.clone(), tenant);
    }

    /// Creates or changes a tenant; returns true if anything changed.
    pub(crate) fn set(&mut self, tenant: &Tenant) -> Result<bool, Rejection> {
        let bytes = tenant.name.len();
        if bytes > MAX_TENANT_NAME_BYTES || tenant.name.chars().any(char::is_control) {
            return Err(Rejection::TenantName { bytes });
        }
        if tenant.weight == 0 || tenant.weight > MAX_TENANT_WEIGHT {
            return Err(Rejection::TenantWeight { weight: tenant.weight });
        }
        let all = &self.by_name;
        if !all.contains_key(&tenant.name) && all.len() >= MAX_TENANTS {
            return Err(Rejection::TooManyTenants { limit: MAX_TENANTS });
        }
        let number = tenant_number(tenant.name.as_bytes());
        let same = all.keys().find(|other| **other != tenant.name && tenant_number(other.as_bytes()) == number);
        if let Some(other) = same {
            return Err(Rejection::TenantNumber { name: tenant.name.clone(), other: other.clone() });
        }
        let is_news = all.get(&tenant.name) != Some(tenant);
        if is_news {
            self.insert(tenant.clone());
        }
        Ok(is_news)
    }

    /// Removes a tenant.
    pub(crate) fn remove(&mut self, name: &str) -> Result<(), Rejection> {
        match self.by_name.remove(name) {
            Some(_) => Ok(()),
            None => Err(Rejection::UnknownTenant { name: name.to_owned() }),
        }
    }
}
