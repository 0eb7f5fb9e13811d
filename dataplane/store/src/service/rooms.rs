//! Room for objects that are to be put: who may put what, and what is told where there is no room.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::ReservationId;
use kvplane_proto::message::{ObjectName, Part, PutAck, PutItem, PutOptions};
use kvplane_proto::{Digest, FrameFlags, Limits, Status};

use super::Service;
use super::context::RequestContext;
use super::tail::TailHead;
use super::types::{Memory, Place};
use crate::{Replica, Reserve, ReserveError};

impl Service {
    /// Room for an object, held by the peer; its tail is on its way there.
    pub(super) fn reserve_one(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
    ) -> Result<(ReservationId, Place), Status> {
        let (reservation, place) = if context.flags.has(FrameFlags::REPLICATE) {
            named_right(item, name)?;
            let wanted = self.reserve_copy(context, item, name)?;
            self.take_room(item, (name, None), wanted)?
        } else {
            self.room_for(context, item, name, false)?
        };
        let until_ns = self.now_ns.saturating_add(Limits::RESERVATION_NS);
        self.sessions.lend_reservation(context.peer, reservation, until_ns);
        Ok((reservation, place))
    }

    /// Room for an object, or for what becomes one bit by bit; its tail is on its way there.
    pub(super) fn room_for(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
        is_draft: bool,
    ) -> Result<(ReservationId, Place), Status> {
        let PutItem { digest, bytes, .. } = *item;
        if context.fetches {
            return Err(Status::Unauthorized);
        }
        self.answers_for(context, digest)?;
        // However large the pool is: no peer could get it over a stream.
        if bytes > Limits::PAYLOAD_BYTES {
            return Err(Status::TooLarge);
        }
        named_right(item, name)?;
        let replace = self.may_replace(context, item, name)?;
        let PutOptions { ack: asked, part, .. } = item.options();
        let asked = if part == Part::None { asked } else { asked.or_else(|| self.ack_of_parts()) };
        if !replace && self.on_ssd(digest).is_some() {
            return Err(self.exists_already(digest, asked));
        }
        self.may_strike(digest, replace)?;
        self.may_be_so_long(bytes, asked, is_draft)?;
        self.may_put(bytes, asked)?;
        let keep = self.keep_of(context, item, name)?;
        let PutOptions { replicas, wait_replicas, .. } = item.options();
        let replica = match (replicas > 1, wait_replicas) {
            (false, _) => Replica::None,
            (true, false) => Replica::First,
            (true, true) => Replica::Awaited,
        };
        let room =
            self.take_room(item, (name, asked), Reserve { replace, keep, replica, ..Reserve::plain(digest, bytes) })?;
        self.acks.note(room.0, asked);
        Ok(room)
    }

    /// True where a put replaces the object that is there. A peer whose ticket is for one tenant owns the digests that
    /// names of its tenant have: what another one has put there gives way. Under other digests it puts what is new
    /// only, as whose the object there is may not be known, or not yet.
    fn may_replace(&mut self, context: &RequestContext, item: &PutItem, name: &ObjectName<'_>) -> Result<bool, Status> {
        let replace = item.options().replace;
        let Some(own) = context.tenant else { return Ok(replace) };
        let foreign = self.is_foreign(context, item.digest);
        if item.key_bytes > 0 && tenant_number(name.tenant) == own {
            return Ok(replace || foreign);
        }
        self.counters.unauthorized += u64::from(replace);
        if replace || foreign { Err(Status::Unauthorized) } else { Ok(false) }
    }

    /// True when an object exists that this put may not replace: it came after room was taken, and may have been
    /// evicted to the SSD since.
    pub(super) fn has_rival(&self, reservation: ReservationId, digest: Digest) -> bool {
        let Some(store) = &self.store else { return false };
        !store.replaces(reservation) && (store.exists(digest) || self.on_ssd(digest).is_some())
    }

    /// What a put that `asked` for this is told where there is an object already: that, to come again, or that the SSD
    /// did not take it. A copy of what was there before may have to go first; and what is there may be of this very
    /// put, whose answer was lost, and still be on its way to the SSD for which it was to wait.
    pub(super) fn exists_already(&mut self, digest: Digest, asked: Option<PutAck>) -> Status {
        self.note_orphans();
        let awaited = self.awaits_ssd(digest, asked);
        if self.owes(digest) { Status::Busy } else { awaited.unwrap_or(Status::Exists) }
    }

    /// Room for an object and its tail, which is on its way there.
    fn take_room(
        &mut self,
        item: &PutItem,
        (name, asked): (&ObjectName<'_>, Option<PutAck>),
        wanted: Reserve,
    ) -> Result<(ReservationId, Place), Status> {
        let Some(store) = &mut self.store else { return Err(Status::WrongOwner) };
        let tail = TailHead::of(item);
        let tail_bytes = tail.map_or(0, |tail| tail.tail_bytes() as u32);
        let head = item.options().part == Part::Head;
        let wanted = Reserve { tail_bytes, has_tail: tail.is_some(), head, ..wanted };
        let reserved = store.reserve_for(&wanted);
        let (reservation, extent) = reserved.map_err(|error| match error {
            ReserveError::Exists => self.exists_already(item.digest, asked),
            error => self.no_room(error, wanted.keep.account),
        })?;
        if let Some(tail) = tail {
            self.write_tail(reservation, &tail, name);
        }
        Ok((reservation, Place { memory: Memory::Pool, offset: extent.offset, bytes: extent.bytes }))
    }
}

/// Under a name that is not its own, an object would be listed, and removed, as another.
fn named_right(item: &PutItem, name: &ObjectName<'_>) -> Result<(), Status> {
    if item.key_bytes > 0 && name.digest() != item.digest { Err(Status::BadRequest) } else { Ok(()) }
}
