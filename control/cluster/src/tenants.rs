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

/// Settings of a tenant that was removed: none of its records stay.
const REMOVED: TenantSsd = TenantSsd { ssd_bytes: Some(0), weight: None };

/// Tenants that were set, by name.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_name: BTreeMap<String, Tenant>,
    /// Settings on SSDs of the tenants that have some; of a tenant that was removed, [`REMOVED`] until its records are
    /// gone.
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
        // Records of a removed tenant are evicted by its number.
        let same = all.keys().chain(self.ssd.keys());
        let mut same = same.filter(|other| **other != tenant.name && tenant_number(other.as_bytes()) == number);
        if let Some(other) = same.next() {
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

    /// Removes a tenant, with its settings on SSDs. Returns the settings by which its records are evicted; none if too
    /// many removed tenants have records: those of this one stay until they are the oldest.
    pub(crate) fn remove(&mut self, name: &str) -> Result<Option<TenantSsd>, Rejection> {
        if self.by_name.remove(name).is_none() {
            return Err(Rejection::UnknownTenant { name: name.to_owned() });
        }
        self.ssd.remove(name);
        let may = self.removed().count() < MAX_TENANTS;
        if may {
            self.ssd.insert(name.to_owned(), REMOVED);
        }
        Ok(may.then_some(REMOVED))
    }

    /// Returns the tenants that were removed, and may still have records on SSDs.
    pub(crate) fn removed(&self) -> impl Iterator<Item = &str> {
        self.ssd.keys().filter(|name| !self.by_name.contains_key(*name)).map(String::as_str)
    }

    /// Forgets a tenant that was removed, because its records are gone; returns true if it was known.
    pub(crate) fn forget_removed(&mut self, name: &str) -> bool {
        !self.by_name.contains_key(name) && self.forget_settings(name)
    }

    /// Forgets the settings of a tenant on SSDs: one that is set anew has none. Returns true if there were some.
    pub(crate) fn forget_settings(&mut self, name: &str) -> bool {
        self.ssd.remove(name).is_some()
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
        assert_eq!((tenants.remove("t"), tenants.removed().collect::<Vec<_>>()), (Ok(Some(REMOVED)), vec!["t"]));
        assert!(tenants.forget_removed("t") && !tenants.forget_removed("t"));
        assert_eq!((tenants.removed().count(), tenants.ssd_of("t")), (0, TenantSsd::default()));
    }
}
