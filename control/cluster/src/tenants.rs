//! Tenants: who may put, how much memory theirs may take, and how much weight they have.
//!
//! The default tenant has no name and is always there; it may have a quota like others. Nodes know tenants by 32 bits
//! of a hash of the name ([`tenant_number`]), so a second tenant with the same number is refused.

use std::collections::BTreeMap;

use kvplane_proto::digest::tenant_number;

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
    by_name: BTreeMap<String, Tenant>,
}

impl Tenants {
    /// By name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Tenant> {
        self.by_name.values()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Tenant> {
        self.by_name.get(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// A tenant as it was remembered.
    pub(crate) fn insert(&mut self, tenant: Tenant) {
        self.by_name.insert(tenant.name.clone(), tenant);
    }

    /// Makes a tenant, or changes it; whether that is news.
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

    /// Takes a tenant away.
    pub(crate) fn remove(&mut self, name: &str) -> Result<(), Rejection> {
        match self.by_name.remove(name) {
            Some(_) => Ok(()),
            None => Err(Rejection::UnknownTenant { name: name.to_owned() }),
        }
    }
}
