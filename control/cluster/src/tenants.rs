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

impl TenantSsd {
    /// Checks settings of which a change gives this weight.
    fn check(self, given: Option<u32>) -> Result<(), Rejection> {
        match given {
            Some(weight) if weight == 0 || weight > MAX_TENANT_WEIGHT => Err(Rejection::TenantWeight { weight }),
            Some(weight) if self.ssd_bytes == Some(0) => Err(Rejection::SsdWeight { weight }),
            _ => Ok(()),
        }
    }
}

/// Change of a tenant: settings that are not given stay as they are, or as a new tenant has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct TenantChange {
    /// Name in UTF-8; empty for the default tenant.
    pub name: String,
    /// Quota of memory in bytes; `Some(None)` removes it.
    pub dram_bytes: Option<Option<u64>>,
    /// Weight among tenants without a quota of memory.
    pub weight: Option<u32>,
    /// Quota of SSD bytes; `Some(None)` removes it. A tenant that is kept off the SSDs, by 0, keeps its weight for the
    /// time after that, but is given none.
    pub ssd_bytes: Option<Option<u64>>,
    /// Weight on SSDs.
    pub ssd_weight: Option<u32>,
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

    /// Creates or changes a tenant: all of the change, or nothing if any of it is rejected. Returns what it changed:
    /// the tenant, and its settings on SSDs.
    pub(crate) fn change(&mut self, change: TenantChange) -> Result<(Option<&Tenant>, Option<TenantSsd>), Rejection> {
        let TenantChange { name, dram_bytes, weight, ssd_bytes, ssd_weight } = change;
        let former = self.by_name.get(&name);
        // A tenant that was removed leaves no settings to the next one of its name.
        let former_ssd = former.map_or_else(TenantSsd::default, |tenant| self.ssd_of(&tenant.name));
        let tenant = Tenant {
            dram_bytes: dram_bytes.unwrap_or_else(|| former.and_then(|tenant| tenant.dram_bytes)),
            weight: weight.unwrap_or_else(|| former.map_or(1, |tenant| tenant.weight)),
            name,
        };
        let ssd = TenantSsd {
            ssd_bytes: ssd_bytes.unwrap_or(former_ssd.ssd_bytes),
            weight: ssd_weight.or(former_ssd.weight),
        };
        self.check(&tenant)?;
        ssd.check(ssd_weight)?;
        let is_news = former != Some(&tenant);
        let ssd_is_news = self.ssd_of(&tenant.name) != ssd;
        if ssd == TenantSsd::default() {
            self.ssd.remove(&tenant.name);
        } else {
            self.insert_ssd(tenant.name.clone(), ssd);
        }
        let name = tenant.name.clone();
        self.insert(tenant);
        Ok((self.get(&name).filter(|_| is_news), ssd_is_news.then_some(ssd)))
    }

    /// Checks that a tenant may be set.
    fn check(&self, tenant: &Tenant) -> Result<(), Rejection> {
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
        Ok(())
    }

    /// Returns the settings of a tenant on SSDs.
    pub(crate) fn ssd_of(&self, name: &str) -> TenantSsd {
        self.ssd.get(name).copied().unwrap_or_default()
    }

    /// Inserts the settings of a tenant on SSDs from their record.
    pub(crate) fn insert_ssd(&mut self, name: String, ssd: TenantSsd) {
        self.ssd.insert(name, ssd);
    }

    /// Removes a tenant, with its settings on SSDs. Returns the settings by which its records are evicted; none if too
    /// many removed tenants have records: those of this one stay until they are the oldest.
    pub(crate) fn remove(&mut self, name: &str) -> Result<Option<TenantSsd>, Rejection> {
        if name.is_empty() {
            return Err(Rejection::DefaultTenant);
        }
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
        !self.by_name.contains_key(name) && self.ssd.remove(name).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(ssd_bytes: Option<Option<u64>>, ssd_weight: Option<u32>) -> TenantChange {
        TenantChange { name: "t".to_owned(), ssd_bytes, ssd_weight, ..TenantChange::default() }
    }

    #[test]
    fn settings_on_ssds_belong_to_a_tenant_and_do_not_contradict_each_other() {
        let mut tenants = Tenants::default();
        let ssd = |ssd_bytes, weight| TenantSsd { ssd_bytes, weight };
        assert!(tenants.change(change(Some(Some(5)), Some(3))).is_ok());
        assert_eq!(tenants.ssd_of("t"), ssd(Some(5), Some(3)));
        assert_eq!(tenants.change(change(Some(Some(5)), Some(3))), Ok((None, None)), "nothing new");
        assert_eq!(tenants.change(change(None, Some(4))), Ok((None, Some(ssd(Some(5), Some(4))))));
        assert_eq!(tenants.change(change(Some(Some(0)), None)), Ok((None, Some(ssd(Some(0), Some(4))))), "it stays");
        let refused = Err(Rejection::SsdWeight { weight: 5 });
        assert_eq!(tenants.change(change(None, Some(5))), refused, "none is given to a tenant that is kept off");
        assert_eq!(tenants.change(change(Some(None), None)), Ok((None, Some(ssd(None, Some(4))))));
        assert_eq!(tenants.change(change(None, Some(1))), Ok((None, Some(ssd(None, Some(1))))));
        assert_eq!((tenants.remove("t"), tenants.removed().collect::<Vec<_>>()), (Ok(Some(REMOVED)), vec!["t"]));
        assert!(tenants.forget_removed("t") && !tenants.forget_removed("t"));
        assert_eq!((tenants.removed().count(), tenants.ssd_of("t")), (0, TenantSsd::default()));
        // A tenant that is set again has nothing of the removed one.
        assert!(tenants.change(change(Some(Some(5)), None)).is_ok() && tenants.remove("t").is_ok());
        let (tenant, changed) = tenants.change(change(None, None)).expect("a good name");
        assert_eq!((tenant.map(|tenant| tenant.weight), changed), (Some(1), Some(TenantSsd::default())));
    }

    #[test]
    fn the_default_tenant_is_never_removed() {
        let mut tenants = Tenants::default();
        assert_eq!(tenants.remove(""), Err(Rejection::DefaultTenant), "before it is set");
        let change = TenantChange { dram_bytes: Some(Some(9)), ..TenantChange::default() };
        assert!(tenants.change(change).is_ok());
        assert_eq!(tenants.remove(""), Err(Rejection::DefaultTenant));
        assert_eq!((tenants.get("").and_then(|tenant| tenant.dram_bytes), tenants.removed().count()), (Some(9), 0));
        let said = Rejection::DefaultTenant.to_string();
        assert!(said.starts_with("the tenant \"default\" cannot be removed"), "{said}");
        assert_eq!(tenants.remove("t"), Err(Rejection::UnknownTenant { name: "t".to_owned() }));
    }

    #[test]
    fn a_change_of_which_any_part_is_rejected_changes_nothing() {
        let (low, high) = (0, MAX_TENANT_WEIGHT + 1);
        let weight = |weight| Rejection::TenantWeight { weight };
        let of_memory = |weight| TenantChange { weight: Some(weight), ..change(Some(Some(0)), None) };
        let bad = || {
            [
                (of_memory(low), weight(low)),
                (of_memory(high), weight(high)),
                (TenantChange { dram_bytes: Some(Some(9)), ..change(Some(Some(7)), Some(low)) }, weight(low)),
                (TenantChange { weight: Some(7), ..change(None, Some(high)) }, weight(high)),
                (change(Some(Some(0)), Some(3)), Rejection::SsdWeight { weight: 3 }),
            ]
        };
        // Of a tenant that was never set, and of one that was.
        let mut tenants = Tenants::default();
        for (change, why) in bad() {
            assert_eq!(tenants.change(change), Err(why));
            assert_eq!((tenants.len(), tenants.removed().count(), tenants.get("t")), (0, 0, None));
        }
        let good = TenantChange { dram_bytes: Some(Some(8)), ..change(Some(Some(5)), Some(2)) };
        assert!(tenants.change(good).is_ok());
        for (change, why) in bad() {
            assert_eq!(tenants.change(change), Err(why));
            let tenant = Tenant { name: "t".to_owned(), dram_bytes: Some(8), weight: 1 };
            assert_eq!(tenants.get("t"), Some(&tenant));
            assert_eq!(tenants.ssd_of("t"), TenantSsd { ssd_bytes: Some(5), weight: Some(2) });
        }
    }
}
