//! Tenants of a tier: their limits, and their use of the device.

use crate::log::Log;
use crate::types::{TenantLimit, TierUse};

/// View of a tier's tenants.
#[derive(Debug)]
pub struct TierTenants<'a> {
    log: &'a mut Log,
}

impl<'a> TierTenants<'a> {
    pub(super) const fn new(log: &'a mut Log) -> Self {
        Self { log }
    }

    /// Sets the limits of tenants; those that are not listed have none. A tenant above its limit loses its oldest
    /// records that are not pinned, and reclaim keeps those of tenants within their limits as long as all limits
    /// together leave it room. A limit holds from the end of recovery on.
    pub fn set_limits(self, limits: &[TenantLimit]) {
        self.log.set_limits(limits);
    }

    /// Returns the use of each tenant that has records or a limit. Records whose tenant is not known yet count for
    /// none.
    #[must_use]
    pub fn uses(self) -> Vec<TierUse> {
        self.log.contents.accounts.uses()
    }

    /// Returns the bytes of the device that records can take.
    #[must_use]
    pub const fn capacity_bytes(self) -> u64 {
        self.log.capacity_bytes()
    }
}
