//! Rights of peers: for which objects this shard answers them, and how objects that they put are kept.
//!
//! Owners answer for their slots, and for lost slots to the new owners. A put with a name is charged to the tenant in
//! the name: the digest is computed from it, so that no client can put into one tenant's keys at the cost of another. A
//! put without a name is charged to the tenant that its options state. A peer whose ticket is for one tenant can put
//! for, and use objects of, this tenant only.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::Version;
use kvplane_proto::message::{ObjectName, PutItem, PutOptions};
use kvplane_proto::{Digest, FrameFlags, Limits, Status};

use super::Shard;
use super::context::RequestContext;
use crate::{Copies, Keep, Replica, Reserve};

const NS_PER_MS: u64 = 1_000_000;

impl Shard {
    /// Checks that this shard answers for an object. Fails if the peer has a newer map than this shard. A peer that
    /// fetches (the new owner of lost slots) gets objects of exported slots only.
    pub(in crate::service) fn answers_for(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        let knows = self.store.config().has_pool() && context.epoch <= self.ownership.epoch();
        let owns = self.ownership.owns(digest);
        let status = match context.fetches {
            _ if !knows => Status::WrongOwner,
            false if owns || self.reads_replica(context, digest) => return Ok(()),
            false => Status::WrongOwner,
            true if self.exports.has(digest) => return Ok(()),
            // The owner and the replica owners of a slot repair from each other.
            true if context.repairs() && (owns || self.replicas.relation(digest.slot()).is_some()) => return Ok(()),
            true => Status::Stale,
        };
        self.counters.wrong_owner += u64::from(status == Status::WrongOwner);
        Err(status)
    }

    /// Returns true if the peer may learn of an object and remove it. A new owner may do so only for what is exported;
    /// the slot may have come back to this shard meanwhile.
    pub(in crate::service) fn is_for_peer(&self, context: &RequestContext, digest: Digest) -> bool {
        !context.fetches || self.exports.has(digest)
    }

    /// Returns true if an object in memory is the replica that the peer has written as the owner of its slot, of which
    /// this shard is a former owner too: that is no object for the peer to import.
    pub(in crate::service) fn is_peers_replica(&self, context: &RequestContext, digest: Digest) -> bool {
        context.fetches && !context.repairs() && self.store.objects().is_copy(digest)
    }

    /// Returns true if a removal names no version, or the version of the object in memory.
    pub(in crate::service) fn has_version(&self, digest: Digest, version: Option<Version>) -> bool {
        let here = || Some(self.peek(digest)?.version);
        version.is_none() || here() == version
    }

    /// Returns true if an object is to be kept: as the owner of its slot, or for the next owner.
    pub(in crate::service) fn keeps(&self, digest: Digest) -> bool {
        self.ownership.owns(digest) || self.exports.has(digest)
    }

    /// Returns true if the reader accepts replicas, and the object belongs to a slot of which this shard is only the
    /// replica owner.
    pub(in crate::service) fn reads_replica(&self, context: &RequestContext, digest: Digest) -> bool {
        let reads = context.flags.has(FrameFlags::READ_REPLICA) && !context.fetches;
        reads && self.replicas.relation(digest.slot()).is_some() && !self.ownership.owns(digest)
    }

    /// Returns `None` if [`Self::reads_replica`] is false, else whether there is a replica.
    pub(in crate::service) fn may_read_replica(&self, context: &RequestContext, digest: Digest) -> Option<bool> {
        let here = || self.store.objects().is_copy(digest);
        self.reads_replica(context, digest).then(here)
    }

    /// Returns true if the peer, as the owner of an object's slot, may write a replica of it or have it dropped: this
    /// shard is the replica owner, and was already by the peer's map.
    pub(in crate::service) fn takes_replica(&self, context: &RequestContext, digest: Digest) -> bool {
        let relation = self.replicas.relation(digest.slot());
        relation.is_some_and(|relation| relation.since <= context.epoch)
    }

    /// Returns the account, group and pins under which an object that is put is kept.
    pub(in crate::service) fn keep_of(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
    ) -> Result<Keep, Status> {
        let store = &mut self.store;
        let options = item.options();
        let tenant = if item.key_bytes > 0 { tenant_number(name.tenant) } else { options.tenant };
        if tenant != 0 && item.key_bytes > 0 {
            self.answers.timed.tenants.named(tenant, name.tenant);
        }
        if context.tenant.is_some_and(|own| own != tenant) {
            self.counters.unauthorized += 1;
            return Err(Status::Unauthorized);
        }
        let account = match store.tenants().account_of(tenant) {
            Some(account) => account,
            None if self.tenants.is_strict => return Err(Status::NoTenant),
            None => store.tenants_mut().account_of_unconfigured(tenant),
        };
        let soft_pin_ms = options.soft_pin_ms.min(store.config().soft_pin_max_ms);
        let soft_pin_ns = u64::from(soft_pin_ms) * NS_PER_MS;
        Ok(Keep { account, group: options.group, soft_pin_ns, hard_pin: options.hard_pin, priority: options.priority })
    }

    /// Like [`Self::keep_of`], for an object that is read from the SSD, or fetched from a former owner.
    pub(in crate::service) fn keep_again(&mut self, options: &PutOptions, tenant: u32) -> Keep {
        let account = self.store.tenants_mut().account_of_unconfigured(tenant);
        Keep { account, group: options.group, soft_pin_ns: 0, hard_pin: options.hard_pin, priority: options.priority }
    }

    /// Returns the reservation for a replica that an owner writes.
    pub(in crate::service) fn replica_reserve(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
    ) -> Result<Reserve, Status> {
        if !context.fetches {
            return Err(Status::Unauthorized);
        }
        if context.epoch > self.ownership.epoch() || !self.takes_replica(context, item.digest) {
            return Err(Status::WrongOwner);
        }
        if item.bytes > Limits::PAYLOAD_BYTES {
            return Err(Status::TooLarge);
        }
        if let Some(session) = self.sessions.get_mut(context.peer) {
            session.copies = true;
        }
        let mut keep = self.keep_of(context, item, name)?;
        // The owner keeps the object; a replica is evicted when room is needed, unless a hard pin lets it outlast the
        // owner.
        keep.soft_pin_ns = 0;
        let mut wanted = Reserve::plain(item.digest, item.bytes);
        (wanted.keep, wanted.replace, wanted.replica) = (keep, true, Replica::Second);
        // For when this shard owns the object. An owner of an earlier version does not say the number, which is two.
        wanted.copies = Copies::of_put(item.replicas, 0);
        Ok(wanted)
    }
}

/// Returns true if an object is to be kept: as the owner of its slot, for the next owner, or as a replica.
pub(in crate::service) fn keeps_any(shard: &Shard, digest: Digest) -> bool {
    shard.keeps(digest) || shard.replicas.relation(digest.slot()).is_some()
}
