//! Removals: of objects, and of replicas, by their owners and by replica owners.

use std::collections::BTreeSet;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Slot, Version};
use kvplane_proto::message::{Bitmap, DigestItem, Operation, VersionItem};
use kvplane_proto::{Digest, FrameFlags, Status};

use super::Objects;
use crate::service::shard::answers::items_of;
use crate::service::shard::context::RequestContext;
use crate::service::shard::deferrals::Replies;
use crate::service::types::CloseReason;
use crate::store::{Fate, Side};

/// What a removal says of its objects: those that were there, and those that stay as they name stripes.
type RemovalBits = (Vec<bool>, Vec<bool>);

/// The objects of a removal, and their versions where only those are to be removed.
fn removals(header: &Header, body: &[u8]) -> Result<(Vec<Digest>, Vec<Version>), CloseReason> {
    if header.flags.has(FrameFlags::OF_VERSION) {
        return Ok(items_of::<VersionItem>(header, body)?.map(|item| (item.digest, item.version)).unzip());
    }
    Ok((items_of::<DigestItem>(header, body)?.map(|item| item.digest).collect(), Vec::new()))
}

impl Objects {
    /// Why none of these may be removed now, if so: a new owner asks by too old a map, or there may be another's object
    /// among them that is not known yet; that is neither removed nor said to be.
    fn refuses_removal(&self, context: &RequestContext, digests: &[Digest]) -> Option<Status> {
        let shard = &self.local.shard;
        let exports = &shard.exports;
        let is_late = |digest: &Digest| exports.has(*digest) && !exports.may_remove(*digest, context.epoch);
        if context.fetches && digests.iter().any(is_late) {
            return Some(Status::WrongOwner);
        }
        let unknown = |digest: &Digest| {
            let there = shard.has(*digest);
            let may_be = there || self.local.on_ssd(*digest).is_some() || self.migration.is_coming(*digest);
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
        let (digests, versions) = removals(header, body)?;
        if !self.answers_for_all(context, Operation::Remove, header, digests.iter().copied()) {
            return Ok(());
        }
        if let Some(status) = self.refuses_removal(context, &digests) {
            self.local.shard.refuse(context.peer, Operation::Remove, header.request, status);
            return Ok(());
        }
        // What is another's stays, and is said not to be there, and so does another version than the one that is meant;
        // what names stripes stays too, and that is said.
        let local = &mut self.local;
        let foreign = |(at, digest): (usize, &Digest)| {
            local.is_foreign(context, *digest)
                || !local.shard.is_for_peer(context, *digest)
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
            let on_ssd = self.local.on_ssd(*digest).is_some();
            let store = &mut self.local.shard.store;
            // The new owner has what we had, and may have brought us a replica of that already.
            let copy = context.fetches && store.as_ref().is_some_and(|store| store.is_copy(*digest));
            bits.push(!copy && store.as_mut().is_some_and(|store| store.remove(*digest)) || on_ssd);
        }
        if !context.fetches {
            // What a former owner has of them does not count any more either, whether or not it was there.
            for ((bit, digest), _) in bits.iter_mut().zip(&digests).zip(stays).filter(|(_, stays)| !stays) {
                *bit |= self.migration.note_change(&self.local.shard, *digest);
            }
        }
        let heads = if heads.contains(&true) { heads } else { Vec::new() };
        self.finish_removal(context, header, &rest, (bits, heads));
        Ok(())
    }

    /// Objects are gone from memory: they go from the SSD too, and their replicas, and then the answer leaves.
    fn finish_removal(&mut self, context: &RequestContext, header: &Header, digests: &[Digest], bits: RemovalBits) {
        let (peer, request) = (context.peer, header.request);
        let Self { local, replication, .. } = self;
        // It is not done before replicas are gone too.
        let owed = replication.owed_among(&mut local.shard, digests);
        let mut tiering = local.tiering.as_mut().filter(|_| !digests.is_empty());
        if let Some(status) = tiering.as_ref().and_then(|tiering| tiering.ssd.may_remove(digests.len()).err()) {
            local.shard.answers.answer(peer, Operation::Remove, header, status);
            return;
        }
        let left = owed.len() + tiering.as_ref().map_or(0, |_| digests.len());
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
        for at in owed {
            replication.wait_for_drop(&mut local.shard, digests[at], item_at(at));
        }
    }

    /// An owner has replicas dropped: they are answered for when none of them is left.
    fn drop_replicas(&mut self, context: &RequestContext, header: &Header, body: &[u8]) -> Result<(), CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        let shard = &mut self.local.shard;
        let refused = if context.fetches { Status::WrongOwner } else { Status::Unauthorized };
        if !context.fetches || items.clone().any(|item| !shard.takes_replica(context, item.digest)) {
            shard.refuse(context.peer, Operation::Remove, header.request, refused);
            return Ok(());
        }
        let Some(store) = &mut shard.store else { return Ok(()) };
        let count = items.len();
        let mut bits = Vec::with_capacity(count);
        let is_slot = |digest: Digest| digest.0 << 14 == 0;
        let slots: BTreeSet<Slot> =
            items.clone().filter(|item| is_slot(item.digest)).map(|item| item.digest.slot()).collect();
        if !slots.is_empty() {
            store.reassign(|digest, side| match side == Side::Copy && slots.contains(&digest.slot()) {
                true => Fate::Goes,
                false => Fate::Stays,
            });
        }
        for DigestItem { digest } in items {
            let all = is_slot(digest);
            bits.push(all || store.is_copy(digest));
            if store.is_copy(digest) {
                store.drop_copy(digest);
            }
        }
        shard.answers.items(context.peer, Operation::Remove, header.request, count, |body| Bitmap::encode(bits, body));
        Ok(())
    }

    /// Replicas of objects of ours are given up, and not made again: until such an object is put or wished for anew, is
    /// read very much, or has another owner. The answer is that they are gone.
    pub(in crate::service) fn remove_replicas(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let operation = Operation::RemoveCopy;
        let Some(items) = self.owned_digests(context, operation, header, body)? else { return Ok(()) };
        let digests: Vec<Digest> = items.map(|item| item.digest).collect();
        self.replication.note_orphans(&mut self.local.shard);
        let (mut bits, mut waits) = (Vec::with_capacity(digests.len()), Vec::new());
        for (at, digest) in digests.iter().enumerate() {
            let there = !self.local.is_anothers(context, *digest) && self.local.shard.has(*digest);
            if there {
                self.replication.give_up(&mut self.local.shard, *digest);
                self.local.write_promise(*digest);
            }
            // A client that asks again, as the replica owner had not answered, has the same answer.
            let owed = there && self.replication.owes(*digest);
            bits.push(owed);
            if owed {
                waits.push(at);
            }
        }
        let shard = &mut self.local.shard;
        if waits.is_empty() {
            shard.answers.items(context.peer, operation, header.request, bits.len(), |body| Bitmap::encode(bits, body));
            return Ok(());
        }
        let item_at = shard.defer(context.peer, header.request, Replies::Copies(bits, Status::Ok), waits.len());
        waits.into_iter().for_each(|at| self.replication.wait_for_drop(shard, digests[at], item_at(at)));
        Ok(())
    }
}
