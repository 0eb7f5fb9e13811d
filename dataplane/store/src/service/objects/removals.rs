//! Removals of objects and of replicas, by owners and by replica owners.

use std::collections::BTreeSet;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Slot, Version};
use kvplane_proto::message::{Bitmap, DigestItem, Operation, VersionItem};
use kvplane_proto::{Digest, FrameFlags, Status};

use super::Objects;
use crate::service::local::LocalStore;
use crate::service::shard::answers::items_of;
use crate::service::shard::context::RequestContext;
use crate::service::shard::deferrals::Replies;
use crate::service::shared_objects::is_below;
use crate::service::sharing::SharedRemoval;
use crate::service::tiering::RemovalCause;
use crate::service::types::CloseReason;
use crate::store::{OwnershipChange, ReplicaRole};

/// Bits of a removal's objects: those that existed, and those that are kept because they are stripe heads.
type RemovalBits = (Vec<bool>, Vec<bool>);

/// Returns true if the records of an object's slot are those of replicas, and nothing of the slot is exported any more.
fn has_replica_records(local: &LocalStore, digest: Digest) -> bool {
    local.ssd().is_some_and(|ssd| ssd.replicas.is_open(digest.slot()))
}

/// Decodes the objects of a removal, and their versions if only these are to be removed.
fn removals(header: &Header, body: &[u8]) -> Result<(Vec<Digest>, Vec<Version>), CloseReason> {
    if header.flags.has(FrameFlags::OF_VERSION) {
        return Ok(items_of::<VersionItem>(header, body)?.map(|item| (item.digest, item.version)).unzip());
    }
    Ok((items_of::<DigestItem>(header, body)?.map(|item| item.digest).collect(), Vec::new()))
}

impl Objects {
    /// Returns the status with which a removal is refused as a whole: a new owner uses too old a map, or the tenant of
    /// one of the objects is not known yet, so that the object can neither be removed nor reported as missing.
    fn refuses_removal(&self, context: &RequestContext, digests: &[Digest]) -> Option<Status> {
        let shard = &self.local.shard;
        let exports = &shard.exports;
        let is_late = |digest: &Digest| exports.has(*digest) && !exports.may_remove(*digest, context.epoch);
        if context.fetches && digests.iter().any(is_late) {
            return Some(Status::WrongOwner);
        }
        let unknown = |digest: &Digest| {
            let there = shard.store.exists(*digest);
            let may_be = there || is_below(&self.local, *digest) || self.migration.is_coming(*digest);
            shard.is_for_peer(context, *digest) && self.local.is_hidden(context, *digest) && may_be
        };
        digests.iter().any(unknown).then_some(Status::Busy)
    }

    pub(in crate::service) fn remove(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        if context.flags.has(FrameFlags::REPLICATE) {
            return self.drop_replicas(context, header, body);
        }
        if context.fetches && context.flags.has(FrameFlags::OF_VERSION) {
            return self.end_exports(context, header, body);
        }
        let (digests, versions) = removals(header, body)?;
        if !self.answers_for_all(context, Operation::Remove, header, digests.iter().copied()) {
            return Ok(());
        }
        if let Some(status) = self.refuses_removal(context, &digests) {
            self.local.shard.refuse(context.peer, Operation::Remove, header.request, status);
            return Ok(());
        }
        // Objects of other tenants, and other versions than the one named, are kept and reported as missing. Stripe
        // heads are kept too, and reported as such.
        let local = &mut self.local;
        let foreign = |(at, digest): (usize, &Digest)| {
            local.is_foreign(context, *digest)
                || !local.shard.is_for_peer(context, *digest)
                || context.fetches && has_replica_records(local, *digest)
                || !local.shard.has_version(*digest, versions.get(at).copied())
        };
        let foreign: Vec<bool> = digests.iter().enumerate().map(foreign).collect();
        let is_head = |(digest, foreign): (&Digest, &bool)| {
            !header.flags.has(FrameFlags::HEADS)
                && !foreign
                && self.local.size_of(*digest).is_some_and(|(_, is_head)| is_head)
        };
        let heads: Vec<bool> = digests.iter().zip(&foreign).map(is_head).collect();
        let stays: Vec<bool> = heads.iter().zip(foreign).map(|(head, foreign)| *head || foreign).collect();
        let mut bits = Vec::with_capacity(digests.len());
        let mut rest = Vec::with_capacity(digests.len());
        for (digest, stays) in digests.iter().zip(&stays) {
            if *stays {
                bits.push(false);
                continue;
            }
            rest.push(*digest);
            let is_below = is_below(&self.local, *digest);
            let store = &mut self.local.shard.store;
            // The new owner has the object already, and may have written its replica to this shard.
            let copy = context.fetches && store.objects().is_copy(*digest);
            bits.push(!copy && store.remove(*digest) || is_below);
        }
        if !context.fetches {
            // A former owner's object is void as well, whether or not it exists there.
            for ((bit, digest), _) in bits.iter_mut().zip(&digests).zip(stays).filter(|(_, stays)| !stays) {
                *bit |= self.migration.note_change(&self.local.shard, *digest);
            }
        }
        let heads = if heads.contains(&true) { heads } else { Vec::new() };
        self.finish_removal(context, header, &rest, (bits, heads));
        Ok(())
    }

    /// Removes objects, which are gone from memory, from the SSD, the shared tier and the replica owner, and then
    /// answers.
    fn finish_removal(&mut self, context: &RequestContext, header: &Header, digests: &[Digest], bits: RemovalBits) {
        let (peer, request) = (context.peer, header.request);
        let Self { local, replication, .. } = self;
        // The removal is not complete before the replicas are gone.
        let outstanding = replication.removals.outstanding_among(&mut local.shard, digests);
        let mut tiering = local.tiering.as_mut().filter(|_| !digests.is_empty());
        if let Some(status) = tiering.as_ref().and_then(|tiering| tiering.ssd.may_remove(digests.len()).err()) {
            local.shard.answers.answer(peer, Operation::Remove, header, status);
            return;
        }
        let mut sharing = local.sharing.as_mut();
        let mut shared = Vec::new();
        if let Some(sharing) = &mut sharing {
            digests.iter().for_each(|digest| sharing.note_change(*digest));
            shared.extend((0..digests.len()).filter(|at| sharing.must_remove(digests[*at])));
            if let Err(status) = sharing.may_remove(shared.len()) {
                local.shard.answers.answer(peer, Operation::Remove, header, status);
                return;
            }
        }
        let left = outstanding.len() + shared.len() + tiering.as_ref().map_or(0, |_| digests.len());
        if left == 0 {
            let (bits, heads) = bits;
            local.shard.answers.items(peer, Operation::Remove, request, bits.len(), |body| {
                Bitmap::encode(bits, body);
                Bitmap::encode(heads, body);
            });
            return;
        }
        let item_at = local.shard.defer(peer, request, Replies::Bits(bits, Status::Ok), left);
        if let Some(tiering) = &mut tiering {
            tiering.ssd.remove(&mut local.shard, digests, &item_at);
        }
        if let Some(sharing) = sharing {
            for at in shared {
                sharing.remove(digests[at], SharedRemoval::Requested(item_at(at)));
            }
        }
        for at in outstanding {
            replication.removals.wait(&mut local.shard, digests[at], item_at(at));
        }
    }

    /// Drops replicas at the request of the owner; answered when none of them is left.
    fn drop_replicas(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        let shard = &mut self.local.shard;
        let refused = if context.fetches { Status::WrongOwner } else { Status::Unauthorized };
        if !context.fetches || items.clone().any(|item| !shard.takes_replica(context, item.digest)) {
            shard.refuse(context.peer, Operation::Remove, header.request, refused);
            return Ok(());
        }
        let store = &mut shard.store;
        let count = items.len();
        let (mut bits, mut recorded) = (Vec::with_capacity(count), Vec::new());
        let is_slot = |digest: Digest| digest.0 << 14 == 0;
        let slots: BTreeSet<Slot> =
            items.clone().filter(|item| is_slot(item.digest)).map(|item| item.digest.slot()).collect();
        if !slots.is_empty() {
            store.reassign(|digest, role| match role == ReplicaRole::Replica && slots.contains(&digest.slot()) {
                true => OwnershipChange::Dropped,
                false => OwnershipChange::Unchanged,
            });
        }
        let ssd = self.local.tiering.as_mut().map(|tiering| &mut tiering.ssd);
        for (at, DigestItem { digest }) in items.enumerate() {
            let all = is_slot(digest);
            let is_recorded = !all && ssd.as_ref().is_some_and(|ssd| ssd.may_have_replica(digest));
            bits.push(all || is_recorded || store.objects().is_copy(digest));
            if store.objects().is_copy(digest) {
                store.drop_copy(digest);
            }
            if is_recorded {
                recorded.push((at, digest));
            }
        }
        let Some(ssd) = ssd.filter(|_| !recorded.is_empty() || !slots.is_empty()) else {
            shard.answers.items(context.peer, Operation::Remove, header.request, count, |body| {
                Bitmap::encode(bits, body);
            });
            return Ok(());
        };
        if let Err(status) = ssd.may_remove(recorded.len()) {
            shard.answers.answer(context.peer, Operation::Remove, header, status);
            return Ok(());
        }
        slots.into_iter().for_each(|slot| ssd.drop_replicas_in(slot));
        if recorded.is_empty() {
            shard.answers.items(context.peer, Operation::Remove, header.request, count, |body| {
                Bitmap::encode(bits, body);
            });
            return Ok(());
        }
        // Once this shard inherits the slot, its records count: none may be left of what the owner has removed.
        let replies = Replies::Bits((bits, Vec::new()), Status::Ok);
        let item_at = shard.defer(context.peer, header.request, replies, recorded.len());
        for (at, digest) in recorded {
            ssd.queue_removal(digest, RemovalCause::Replica(item_at(at)));
        }
        Ok(())
    }

    /// Gives up the replicas of this shard's objects. They are not made again until the object is put again or its
    /// replication is requested, it becomes hot, or it gets another owner. Answered when they are gone.
    pub(in crate::service) fn remove_replicas(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let operation = Operation::RemoveCopy;
        let Some(items) = self.owned_digests(context, operation, header, body)? else { return Ok(()) };
        let digests: Vec<Digest> = items.map(|item| item.digest).collect();
        self.replication.removals.note_orphans(&mut self.local.shard);
        let (mut bits, mut waits) = (Vec::with_capacity(digests.len()), Vec::new());
        for (at, digest) in digests.iter().enumerate() {
            let objects = self.local.shard.store.objects();
            let is_known = objects.get(*digest).is_some() || objects.detached().copies(*digest).is_some();
            let there = is_known && !self.local.is_anothers(context, *digest);
            if there {
                self.replication.removals.give_up(&mut self.local.shard, *digest);
                self.local.write_promise(*digest);
            }
            // A client that retries because the replica owner had not answered gets the same answer.
            let outstanding = there && self.replication.removals.is_outstanding(*digest);
            bits.push(outstanding);
            if outstanding {
                waits.push(at);
            }
        }
        let shard = &mut self.local.shard;
        if waits.is_empty() {
            shard.answers.items(context.peer, operation, header.request, bits.len(), |body| Bitmap::encode(bits, body));
            return Ok(());
        }
        let item_at = shard.defer(context.peer, header.request, Replies::Copies(bits, Status::Ok), waits.len());
        waits.into_iter().for_each(|at| self.replication.removals.wait(shard, digests[at], item_at(at)));
        Ok(())
    }
}
