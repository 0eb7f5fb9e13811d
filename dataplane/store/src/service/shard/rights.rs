//! The rights of peers: for which objects this shard answers them, and how what they put is kept.
//!
//! Owners answer for their slots, and for what left to those who have it now. A put that tells its name is charged to
//! the tenant in the name: the digest is made of it, so nobody can put into one tenant's keys on another's account. One
//! that tells no name is charged to the account that it says. A peer whose ticket is for one tenant puts for that one
//! only, and uses only what is that one's.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::Version;
use kvplane_proto::message::{ObjectName, PutItem, PutOptions};
use kvplane_proto::{Digest, FrameFlags, Limits, Status};

use super::Shard;
use super::context::RequestContext;
use super::tail::TailHead;
use crate::{Keep, Replica, Reserve};

const NS_PER_MS: u64 = 1_000_000;

/// The number of the tenant that an object with this tail is charged to.
pub(in crate::service) fn tenant_of(head: &TailHead, name: &ObjectName<'_>) -> u32 {
    if head.key_bytes > 0 { tenant_number(name.tenant) } else { head.options.tenant }
}

impl Shard {
    /// A check that this shard answers for an object. A peer with a newer map knows more than we do. The new owner of
    /// what we had may ask for that, and nobody else any more.
    pub(in crate::service) fn answers_for(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        let knows = self.store.is_some() && context.epoch <= self.ownership.epoch();
        let status = match context.fetches {
            _ if !knows => Status::WrongOwner,
            false if self.ownership.owns(digest) || self.reads_replica(context, digest) => return Ok(()),
            false => Status::WrongOwner,
            true if self.exports.has(digest) => return Ok(()),
            true => Status::Stale,
        };
        self.counters.wrong_owner += u64::from(status == Status::WrongOwner);
        Err(status)
    }

    /// True where the peer may learn of an object and remove it: of a new owner, only what is kept for it. The slot may
    /// be ours again.
    pub(in crate::service) fn is_for_peer(&self, context: &RequestContext, digest: Digest) -> bool {
        !context.fetches || self.exports.has(digest)
    }

    /// True where a removal names no version, or the version of the object in memory.
    pub(in crate::service) fn has_version(&self, digest: Digest, version: Option<Version>) -> bool {
        let here = || Some(self.store.as_ref()?.peek(digest)?.version);
        version.is_none() || here() == version
    }

    /// True for an object that is still to be kept: as the owner of its slot, or for the next owner.
    pub(in crate::service) fn keeps(&self, digest: Digest) -> bool {
        self.ownership.owns(digest) || self.exports.has(digest)
    }

    /// True for a reader that takes replicas, of an object that is not ours and of which this shard may have one.
    pub(in crate::service) fn reads_replica(&self, context: &RequestContext, digest: Digest) -> bool {
        let reads = context.flags.has(FrameFlags::READ_REPLICA) && !context.fetches;
        reads && self.replicas.relation(digest.slot()).is_some() && !self.ownership.owns(digest)
    }

    /// As [`Self::reads_replica`]: nothing where it is not so, and else whether there is a replica.
    pub(in crate::service) fn may_read_replica(&self, context: &RequestContext, digest: Digest) -> Option<bool> {
        let here = || self.store.as_ref().is_some_and(|store| store.is_copy(digest));
        self.reads_replica(context, digest).then(here)
    }

    /// True where the peer, who owns the slot of an object, may bring a replica of it or have it dropped: this shard is
    /// the replica owner for it, and was when the peer's map was made.
    pub(in crate::service) fn takes_replica(&self, context: &RequestContext, digest: Digest) -> bool {
        let relation = self.replicas.relation(digest.slot());
        relation.is_some_and(|relation| relation.since <= context.epoch)
    }

    /// How an object that is put is to be kept.
    pub(in crate::service) fn keep_of(
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
            None if self.tenants.is_strict => return Err(Status::NoTenant),
            None => store.account_of_stranger(tenant),
        };
        let soft_pin_ms = options.soft_pin_ms.min(store.config().soft_pin_most_ms);
        let soft_pin_ns = u64::from(soft_pin_ms) * NS_PER_MS;
        Ok(Keep { account, group: options.group, soft_pin_ns, hard_pin: options.hard_pin })
    }

    /// As [`Self::keep_of`], of an object that came back from the SSD, or from a former owner.
    pub(in crate::service) fn keep_again(&mut self, options: &PutOptions, tenant: u32) -> Keep {
        let account = self.store.as_mut().map_or(0, |store| store.account_of_stranger(tenant));
        Keep { account, group: options.group, soft_pin_ns: 0, hard_pin: options.hard_pin }
    }

    /// The reservation that a replica needs which an owner brings.
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
        // The owner answers for it; here it goes when room is needed, unless it is to outlast that owner.
        keep.soft_pin_ns = 0;
        let mut wanted = Reserve::plain(item.digest, item.bytes);
        (wanted.keep, wanted.replace, wanted.replica) = (keep, true, Replica::Second);
        Ok(wanted)
    }
}
