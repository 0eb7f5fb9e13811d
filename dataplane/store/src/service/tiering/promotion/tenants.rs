//! Tenants of objects that are not in memory: the SSD's index has digests, not names, so that the tenant of such an
//! object is only in its tail. Tenants that were read are remembered for a while.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::{GetError, Priority, Token};

use crate::service::shard::Shard;
use crate::service::shard::effects::Effect;
use crate::service::shard::tail::tenant_of;
use crate::service::shard::tail::{TailHead, is_of};
use crate::service::tiering::ssd::Ssd;

/// Most objects whose tenants are remembered: more than can be waited for.
pub(in crate::service) const KNOWN_MOST: usize = 1 << 16;

/// Tenant of an object, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum ObjectTenant {
    /// The tenant, or `None` if it cannot be determined.
    Known(Option<u32>),
    /// The tail, which names the tenant, is on the SSD.
    Unread,
    /// There is no such object here.
    NotHere,
}

impl ObjectTenant {
    /// Returns the tenant, if it is known.
    pub(in crate::service) const fn known(self) -> Option<u32> {
        match self {
            Self::Known(tenant) => tenant,
            Self::Unread | Self::NotHere => None,
        }
    }
}

/// Tenants read from tails on the SSD.
#[derive(Debug, Default)]
pub(super) struct RecordTenants {
    /// Objects whose tails are to be read, and those being read.
    wanted: VecDeque<Digest>,
    calls: BTreeMap<u64, Digest>,
    /// Version that was read, and its tenant if its tail names one.
    known: BTreeMap<Digest, (Version, Option<u32>)>,
    by_age: VecDeque<Digest>,
}

impl RecordTenants {
    /// Returns the tenant of an object, as far as it is known.
    pub(super) fn tenant_of(&self, ssd: &Ssd, shard: &Shard, digest: Digest) -> ObjectTenant {
        let object = shard.peek(digest);
        if let Some(object) = object.filter(|object| object.has_tail) {
            return ObjectTenant::Known(Some(object.tenant));
        }
        let Some(record) = ssd.locate(digest) else {
            return if object.is_some() { ObjectTenant::Known(None) } else { ObjectTenant::NotHere };
        };
        if object.is_some_and(|object| object.version != record.version) {
            return ObjectTenant::Known(None);
        }
        match self.known.get(&digest) {
            // Only objects that the default tenant puts without a name have no tail.
            _ if record.key_bytes == 0 => ObjectTenant::Known(Some(0)),
            Some((version, tenant)) if *version == record.version => ObjectTenant::Known(*tenant),
            _ => ObjectTenant::Unread,
        }
    }

    pub(super) fn want(&mut self, digest: Digest) {
        self.wanted.push_back(digest);
    }

    /// Begins to read tails of objects whose tenants requests wait for, as far as the tier accepts reads.
    pub(super) fn read(&mut self, ssd: &mut Ssd, shard: &mut Shard) -> bool {
        let mut progress = false;
        while let Some(&digest) = self.wanted.front() {
            let token = ssd.new_token();
            match ssd.tier.get_key(digest, Priority::Get, token) {
                Ok(()) => drop(self.calls.insert(token.0, digest)),
                Err(GetError::Busy) => return progress,
                Err(_) => shard.effects.note(Effect::TenantSettled(digest)),
            }
            self.wanted.pop_front();
            progress = true;
        }
        progress
    }

    /// Handles the end of the read of a tail for its tenant. False if the token belongs to another read.
    pub(super) fn done(&mut self, ssd: &mut Ssd, shard: &mut Shard, token: Token, read: Option<Version>) -> bool {
        let Some(digest) = self.calls.remove(&token.0) else { return false };
        let tail = ssd.tier.take_key(token);
        let located = ssd.locate(digest).map(|view| view.version);
        let tail = tail.filter(|tail| read.is_some() && is_of(tail, digest));
        let tenant = tail.and_then(|tail| TailHead::split(&tail).map(|(head, name)| tenant_of(&head, &name)));
        if let Some(version) = read.or(located) {
            self.note(digest, version, tenant);
        }
        shard.effects.note(Effect::TenantSettled(digest));
        true
    }

    fn note(&mut self, digest: Digest, version: Version, tenant: Option<u32>) {
        if self.known.insert(digest, (version, tenant)).is_none() {
            self.by_age.push_back(digest);
        }
        if self.by_age.len() > KNOWN_MOST
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_tenants_are_forgotten() {
        let mut tenants = RecordTenants::default();
        (0..=KNOWN_MOST as u64).for_each(|at| tenants.note(Digest(at.into()), Version(1), Some(7)));
        tenants.note(Digest(1), Version(2), None);
        assert_eq!(tenants.known.len(), KNOWN_MOST);
        assert_eq!((tenants.known.get(&Digest(0)), tenants.known.get(&Digest(1))), (None, Some(&(Version(2), None))));
    }
}
