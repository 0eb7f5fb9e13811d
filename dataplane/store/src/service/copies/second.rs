//! The second owner's side: copies come, are dropped when the first owner says so, and are given to who asks for
//! copies too.

use std::collections::BTreeSet;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{ReservationId, Slot};
use kvplane_proto::message::{Bitmap, DigestItem, ObjectName, Operation, PutItem};
use kvplane_proto::{Digest, FrameFlags, Limits, Status};

use super::super::Service;
use super::super::answers::items_of;
use super::super::context::RequestContext;
use super::super::objects::CommittedObject;
use super::super::types::{CloseReason, PayloadTo};
use crate::store::{Fate, Side};
use crate::{Replica, Reserve};

impl Service {
    /// True where the peer, who owns the slot first, may bring a copy or have it dropped: this shard is the second
    /// owner for it, and was when the peer's map was made.
    fn may_copy(&self, context: &RequestContext, digest: Digest) -> bool {
        let relation = self.copies.relations.get(&digest.slot());
        relation.is_some_and(|relation| relation.since <= context.epoch)
    }

    /// Room for a copy that a first owner brings.
    pub(in crate::service) fn reserve_copy(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
    ) -> Result<Reserve, Status> {
        if !context.fetches {
            return Err(Status::Unauthorized);
        }
        if context.epoch > self.ownership.epoch() || !self.may_copy(context, item.digest) {
            return Err(Status::WrongOwner);
        }
        if item.bytes > Limits::PAYLOAD_BYTES {
            return Err(Status::TooLarge);
        }
        if let Some(session) = self.sessions.get_mut(context.peer) {
            session.copies = true;
        }
        let mut keep = self.keep_of(context, item, name)?;
        // The first owner answers for it; here it goes when room is needed, unless it is to outlast that owner.
        keep.soft_pin_ns = 0;
        let mut wanted = Reserve::plain(item.digest, item.bytes);
        (wanted.keep, wanted.replace, wanted.replica) = (keep, true, Replica::Second);
        Ok(wanted)
    }

    /// The bytes of a copy are in place.
    pub(in crate::service) fn commit_copy(
        &mut self,
        reservation: ReservationId,
        (digest, bytes): (Digest, u64),
        checksum: u64,
    ) -> Result<CommittedObject, Status> {
        if !self.copies.relations.contains_key(&digest.slot()) {
            self.abort_one(reservation);
            return Err(Status::WrongOwner);
        }
        let store = self.store.as_mut().expect("a reservation is of a store");
        match store.commit(reservation, checksum) {
            Ok(version) => {
                self.copies.counters.taken += 1;
                Ok(CommittedObject { version, digest, bytes, replaces: false, is_copy: true, ack: None })
            }
            Err(error) => {
                if error == crate::CommitError::Expired {
                    self.abort_one(reservation);
                }
                Err(Status::Stale)
            }
        }
    }

    /// A first owner has copies dropped: they are answered for when none of them is left.
    pub(in crate::service) fn drop_copies(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        let refused = if context.fetches { Status::WrongOwner } else { Status::Unauthorized };
        if !context.fetches || items.clone().any(|item| !self.may_copy(context, item.digest)) {
            self.refuse(context.peer, Operation::Remove, header.request, refused);
            return Ok(PayloadTo::Discard);
        }
        let Some(store) = &mut self.store else { return Ok(PayloadTo::Discard) };
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
        self.answers.items(context.peer, Operation::Remove, header.request, count, |body| Bitmap::encode(bits, body));
        Ok(PayloadTo::Discard)
    }

    /// A copy is given to a reader.
    pub(in crate::service) fn count_copy_served(&mut self) {
        self.copies.counters.served += 1;
    }

    /// Whether a reader who takes copies may ask for an object that is not ours; and whether there is a copy.
    pub(in crate::service) fn may_read_copy(&self, context: &RequestContext, digest: Digest) -> Option<bool> {
        let reads = context.flags.has(FrameFlags::READ_REPLICA);
        let second = reads && !context.fetches && self.copies.relations.contains_key(&digest.slot());
        let here = || self.store.as_ref().is_some_and(|store| store.is_copy(digest));
        (second && !self.ownership.owns(digest)).then(here)
    }
}
