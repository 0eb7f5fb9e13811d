//! Whose a put is, and how it is to be kept.
//!
//! A put that tells its name is charged to the tenant in the name: the digest is made of it, so nobody can put into one
//! tenant's keys on another's account. One that tells no name is charged to the account that it says. A peer
//! whose ticket is for one tenant puts for that one only, and uses only what is that one's.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::message::{ObjectName, PutItem, PutOptions};
use kvplane_proto::{Digest, Status};

use super::claims::Claims;
use super::context::RequestContext;
use super::tail::TailHead;
use super::{Service, Whose};
use crate::{Keep, ObjectView, Store, TenantLease, TenantUse};

const NS_PER_MS: u64 = 1_000_000;

/// Tenants of a shard: whether unknown ones may put, and requests that wait for their tenants to be known. The store
/// counts what each has.
#[derive(Debug, Default)]
pub(super) struct Tenancy {
    /// Tenants that were never set may not put.
    is_strict: bool,
    /// Requests that wait until the tenants of their objects are known.
    pub(super) claims: Claims,
}

/// The number of the tenant that an object with this tail is charged to.
pub(super) fn tenant_of(head: &TailHead, name: &ObjectName<'_>) -> u32 {
    if head.key_bytes > 0 { tenant_number(name.tenant) } else { head.options.tenant }
}

impl Service {
    /// These tenants there are from now on, beside the default one. `strict`: nobody else may put; else others have no
    /// quota.
    pub fn set_tenants(&mut self, leases: &[TenantLease], strict: bool) {
        self.tenancy.is_strict = strict;
        if let Some(store) = &mut self.store {
            store.set_tenants(leases);
        }
    }

    /// What each tenant has here.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantUse> {
        self.store.as_ref().map_or_else(Vec::new, super::super::Store::tenants)
    }

    /// True for an object of another tenant than the peer's, whose ticket is for one only. It is none for the peer,
    /// who learns nothing of it; and what others have put under a digest stands in nobody's way.
    pub(super) fn is_foreign(&mut self, context: &RequestContext, digest: Digest) -> bool {
        let Some(own) = context.tenant else { return false };
        let foreign = self.whose(digest).is_some_and(|tenant| tenant != own);
        self.counters.unauthorized += u64::from(foreign);
        foreign
    }

    /// True for an object that is hidden from the peer: its ticket is for one tenant, and the object's is not known
    /// here.
    pub(super) fn is_hidden(&self, context: &RequestContext, digest: Digest) -> bool {
        context.tenant.is_some() && self.whose(digest).is_none()
    }

    /// True for an object that is hidden from the peer, or another tenant's.
    pub(super) fn is_anothers(&mut self, context: &RequestContext, digest: Digest) -> bool {
        self.is_hidden(context, digest) || self.is_foreign(context, digest)
    }

    /// The next answer is about this object.
    pub(super) fn about(&mut self, object: &ObjectView) {
        if !self.store.as_ref().is_some_and(Store::has_tenants) {
            return;
        }
        // Until its tail was read, what came from an SSD is charged to the default tenant.
        let unknown = object.tenant == 0 && !object.has_tail && self.tiered.is_some();
        self.answers.outputs.whose = Some(if unknown { Whose::Unknown } else { Whose::Tenant(object.tenant) });
    }

    /// The next answer is about an object that was just made.
    pub(super) fn about_made(&mut self, digest: Digest) {
        let made = self.store.as_ref().filter(|store| store.has_tenants()).and_then(|store| store.peek(digest));
        if let Some(made) = made {
            self.answers.outputs.whose = Some(Whose::Tenant(made.tenant));
        }
    }

    /// It is this late.
    pub(super) fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        if let Some(store) = &mut self.store {
            store.tick(now_ns);
        }
    }

    /// How an object that is put is to be kept.
    pub(super) fn keep_of(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
    ) -> Result<Keep, Status> {
        let Some(store) = &mut self.store else { return Err(Status::WrongOwner) };
        let options = item.options();
        let tenant = if item.key_bytes > 0 { tenant_number(name.tenant) } else { options.tenant };
        if tenant != 0 && item.key_bytes > 0 {
            self.answers.timed.tenants.named(tenant, name.tenant);
        }
        if context.tenant.is_some_and(|own| own != tenant) {
            self.counters.unauthorized += 1;
            return Err(Status::Unauthorized);
        }
        let account = match store.account_of(tenant) {
            Some(account) => account,
            None if self.tenancy.is_strict => return Err(Status::NoTenant),
            None => store.account_of_stranger(tenant),
        };
        let soft_pin_ms = options.soft_pin_ms.min(store.config().soft_pin_most_ms);
        let soft_pin_ns = u64::from(soft_pin_ms) * NS_PER_MS;
        Ok(Keep { account, group: options.group, soft_pin_ns, hard_pin: options.hard_pin })
    }

    /// As [`Self::keep_of`], of an object that came back from the SSD.
    pub(super) fn keep_again(&mut self, options: &PutOptions, tenant: u32) -> Keep {
        let account = self.store.as_mut().map_or(0, |store| store.account_of_stranger(tenant));
        Keep { account, group: options.group, soft_pin_ns: 0, hard_pin: options.hard_pin }
    }
}
