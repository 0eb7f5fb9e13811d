//! Tenants: name, quotas and weights of each.
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

/// Quota and weight of a tenant on SSDs. Without either, the tenant has neither limit nor priority there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct TenantSsd {
    /// Quota of its records on the SSDs of all nodes, in bytes; none for no limit.
    pub ssd_bytes: Option<u64>,
    /// Weight of its writes and reads while an SSD cannot keep up with all tenants; none for 1.
    pub weight: Option<u32>,
}

/// Tenants that were set, by name.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_name: BTreeMap<String, Tenant>,
    /// Settings on SSDs of the tenants that have some.
    ssd: BTreeMap<String, TenantSsd>,
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

    /// Returns the settings of a tenant on SSDs.
    pub(crate) fn ssd_of(&self, name: &str) -> TenantSsd {
        self.ssd.get(name).copied().unwrap_or_default()
    }

    /// Inserts the settings of a tenant on SSDs from their record.
    pub(crate) fn insert_ssd(&mut self, name: String, ssd: TenantSsd) {
        self.ssd.insert(name, ssd);
    }

    /// Changes the settings of a tenant on SSDs; returns true if anything changed.
    pub(crate) fn set_ssd(&mut self, name: &str, ssd: TenantSsd) -> Result<bool, Rejection> {
        if !self.by_name.contains_key(name) {
            return Err(Rejection::UnknownTenant { name: name.to_owned() });
        }
        if let Some(weight) = ssd.weight {
            if weight == 0 || weight > MAX_TENANT_WEIGHT {
                return Err(Rejection::TenantWeight { weight });
            }
            if ssd.ssd_bytes == Some(0) {
                return Err(Rejection::SsdWeight { weight });
            }
        }
        let is_news = self.ssd_of(name) != ssd;
        if ssd == TenantSsd::default() {
            self.ssd.remove(name);
        } else {
            self.ssd.insert(name.to_owned(), ssd);
        }
        Ok(is_news)
    }

    /// Removes a tenant, with its settings on SSDs; returns true if it had some.
    pub(crate) fn remove(&mut self, name: &str) -> Result<bool, Rejection> {
        match self.by_name.remove(name) {
            Some(_) => Ok(self.ssd.remove(name).is_some()),
            None => Err(Rejection::UnknownTenant { name: name.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_on_ssds_belong_to_a_tenant_and_do_not_contradict_each_other() {
        let mut tenants = Tenants::default();
        let ssd = |ssd_bytes, weight| TenantSsd { ssd_bytes, weight };
        assert_eq!(tenants.set_ssd("t", ssd(Some(1), None)), Err(Rejection::UnknownTenant { name: "t".to_owned() }));
        tenants.insert(Tenant { name: "t".to_owned(), dram_bytes: None, weight: 1 });
        for (bad, why) in [
            (ssd(None, Some(0)), Rejection::TenantWeight { weight: 0 }),
            (ssd(None, Some(MAX_TENANT_WEIGHT + 1)), Rejection::TenantWeight { weight: MAX_TENANT_WEIGHT + 1 }),
            (ssd(Some(0), Some(3)), Rejection::SsdWeight { weight: 3 }),
        ] {
            assert_eq!((tenants.set_ssd("t", bad), tenants.ssd_of("t")), (Err(why), TenantSsd::default()));
        }
        assert_eq!(tenants.set_ssd("t", ssd(Some(5), Some(3))), Ok(true));
        assert_eq!(
            (tenants.set_ssd("t", ssd(Some(5), Some(3))), tenants.ssd_of("t")),
            (Ok(false), ssd(Some(5), Some(3)))
        );
        assert_eq!(tenants.set_ssd("t", TenantSsd::default()), Ok(true));
        assert_eq!(tenants.remove("t"), Ok(false), "it had none any more");
        tenants.insert(Tenant { name: "t".to_owned(), dram_bytes: None, weight: 1 });
        assert_eq!(tenants.set_ssd("t", ssd(Some(0), None)), Ok(true));
        assert_eq!((tenants.remove("t"), tenants.ssd_of("t")), (Ok(true), TenantSsd::default()));
    }
}
