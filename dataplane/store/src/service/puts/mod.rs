//! Puts: reservations for objects, their bytes, and their commits.
//!
//! An object put at once and one put in ranges (a put session) are made in the same way: a reservation of memory for
//! the bytes and the tail, and a commit when all of it was received.

mod acks;
mod sessions;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, RequestId, ReservationId, Version};
use kvplane_proto::message::{
    CommitItem, CommitReply, IdItem, ObjectName, Operation, Part, PutItem, PutOptions, Puts as PutItems, ReserveReply,
    decode_puts,
};
use kvplane_proto::{FrameFlags, ItemFlags, Limits, Status};

use self::acks::Acks;
use super::objects::Objects;
use super::put_sessions::PutSessions;
use super::replication::records::may_keep_replica;
use super::shard::answers::items_of;
use super::shard::context::RequestContext;
use super::shard::deferrals::{PutReply, Replies};
use super::shard::sessions::PendingPayload;
use super::shared_objects::{is_below, note_change};
use super::types::{CloseReason, CommittedObject, MemoryExtent, Path, PayloadTo, PeerKey, TicketId, commit_status};
use crate::{CommitError, Copies, Replica, Reserve};

/// Puts in flight.
#[derive(Debug, Default)]
pub(super) struct Puts {
    acks: Acks,
    /// Put sessions, and the users of their ranges.
    sessions: PutSessions,
}

/// Put that needs a reservation.
#[derive(Clone, Copy)]
struct PutRequest<'a> {
    item: &'a PutItem,
    name: &'a ObjectName<'a>,
    /// True if it is a put session.
    is_session: bool,
}

/// Put over a stream whose payload was received.
pub(super) struct ReceivedPut {
    pub(super) request: RequestId,
    pub(super) reservation: ReservationId,
    /// Checksum that the client stated.
    pub(super) expected: u64,
    /// True if the reply may name replica owners beyond the first.
    pub(super) names_owners: bool,
}

/// Decodes the puts of a body with their names; a malformed one closes the connection.
fn puts_of<'a>(header: &Header, body: &'a [u8]) -> Result<PutItems<'a>, CloseReason> {
    decode_puts(body, header.items).ok_or(CloseReason::Malformed("a malformed body of puts"))
}

/// Checks that a name belongs to the digest: under a wrong name, an object would be listed, and removed, as another.
fn named_right(item: &PutItem, name: &ObjectName<'_>) -> Result<(), Status> {
    if item.key_bytes > 0 && name.digest() != item.digest { Err(Status::BadRequest) } else { Ok(()) }
}

impl Puts {
    /// Reserves memory for an object, held by the peer, and enqueues its tail to be written.
    fn reserve_one(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        put: PutRequest<'_>,
    ) -> Result<(ReservationId, MemoryExtent), Status> {
        let (reservation, extent) = if context.flags.has(FrameFlags::REPLICATE) {
            named_right(put.item, put.name)?;
            let wanted = objects.local.shard.replica_reserve(context, put.item, put.name)?;
            may_keep_replica(&mut objects.local, put.item.bytes, wanted.keep.account)?;
            objects.reserve(put.item, put.name, None, wanted)?
        } else {
            self.reserve_own(objects, context, put)?
        };
        let shard = &mut objects.local.shard;
        let until_ns = shard.now_ns.saturating_add(Limits::RESERVATION_NS);
        shard.sessions.lend_reservation(context.peer, reservation, until_ns);
        Ok((reservation, extent))
    }

    /// Reserves memory for an object of this shard, or for a put session, and enqueues its tail to be written.
    fn reserve_own(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        put: PutRequest<'_>,
    ) -> Result<(ReservationId, MemoryExtent), Status> {
        let PutItem { digest, bytes, .. } = *put.item;
        if context.fetches {
            return Err(Status::Unauthorized);
        }
        objects.local.shard.answers_for(context, digest)?;
        // Independent of the pool's size: no peer could get a larger object over a stream.
        if bytes > Limits::PAYLOAD_BYTES {
            return Err(Status::TooLarge);
        }
        named_right(put.item, put.name)?;
        let replace = objects.local.may_replace(context, put.item, put.name)?;
        let PutOptions { ack: asked, part, replicas, wait_replicas, .. } = put.item.options();
        let copies = Copies::of_put(replicas, wait_replicas);
        let asked = if part == Part::None { asked } else { asked.or_else(|| objects.local.ack_of_parts()) };
        if !replace && is_below(&objects.local, digest) {
            return Err(objects.exists_already(digest, asked));
        }
        let keep = objects.local.shard.keep_of(context, put.item, put.name)?;
        objects.local.may_put(digest, bytes, asked, replace, put.is_session, keep.account)?;
        let replica = match (replicas > 1, wait_replicas > 1) {
            (false, _) => Replica::None,
            (true, false) => Replica::First,
            (true, true) => Replica::Awaited,
        };
        let wanted = Reserve { replace, keep, replica, copies, ..Reserve::plain(digest, bytes) };
        let reserved = objects.reserve(put.item, put.name, asked, wanted)?;
        self.acks.note(reserved.0, asked);
        Ok(reserved)
    }

    /// Handles a put over a stream and returns the destination of its payload.
    pub(super) fn put(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let mut puts = puts_of(header, body)?;
        let (Some((item, name)), None) = (puts.next(), puts.next()) else {
            return Err(CloseReason::Malformed("a put that is not of exactly one object"));
        };
        if item.bytes != header.payload_bytes {
            return Err(CloseReason::Malformed("a put whose length differs from its payload's"));
        }
        let Some(expected) = header.checksum() else {
            return Err(CloseReason::Malformed("a put without a checksum"));
        };
        let request = header.request;
        let put = PutRequest { item: &item, name: &name, is_session: false };
        let (pending, to) = match self.reserve_one(objects, context, put) {
            Ok((reservation, extent)) => {
                let names_owners = header.flags.has(FrameFlags::REPLICA_OWNERS);
                let pending = PendingPayload::Put { request, reservation, expected, names_owners };
                (pending, PayloadTo::Extent(extent))
            }
            Err(status) => {
                let operation = Operation::Put;
                (PendingPayload::Refused { request, operation, status, argument: 0 }, PayloadTo::Discard)
            }
        };
        objects.local.shard.expect_payload(context.peer, pending);
        Ok(to)
    }

    /// Completes a put whose payload was received.
    pub(super) fn finish_put(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        put: &ReceivedPut,
        computed: Option<u64>,
    ) {
        let ReceivedPut { request, reservation, expected, names_owners } = *put;
        let shard = &mut objects.local.shard;
        let held = shard.sessions.take_reservation(peer, reservation);
        assert!(held, "the reservation of a payload in flight was lost");
        let outcome = if computed == Some(expected) {
            self.commit_one(objects, reservation, expected)
        } else {
            shard.counters.corrupt += 1;
            shard.abort(reservation);
            Err(Status::Corrupt)
        };
        match outcome {
            Ok(made) => {
                let waits = objects.waits_of(&made);
                let shard = &mut objects.local.shard;
                if waits.count() > 0 {
                    let replies = Replies::Put(PutReply::of(made.version, names_owners));
                    let item_at = shard.defer(peer, request, replies, waits.count());
                    objects.follow_put(&made, waits, Some(item_at(0)));
                } else {
                    shard.answers.status(peer, Operation::Put, request, Status::Ok, made.version.0);
                    objects.follow_put(&made, waits, None);
                }
            }
            Err(status) => objects.local.shard.refuse(peer, Operation::Put, request, status),
        }
    }

    /// Reserves memory for objects that a peer writes into the pool itself.
    pub(super) fn reserve(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let puts = puts_of(header, body)?;
        objects.local.shard.warm(puts.clone().map(|(item, _)| item.digest));
        let mut replies = Vec::with_capacity(puts.len());
        for (item, name) in puts {
            let put = PutRequest { item: &item, name: &name, is_session: false };
            replies.push(match self.reserve_one(objects, context, put) {
                Ok((reservation, extent)) => ReserveReply { status: Status::Ok, reservation, offset: extent.offset },
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        objects.local.shard.answers.records(context.peer, Operation::Reserve, header.request, &replies);
        Ok(())
    }

    /// Commits objects whose bytes a peer has written into the pool, or completes ranges of put sessions.
    pub(super) fn commit(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let items = items_of::<CommitItem>(header, body)?;
        let mut outcomes = Vec::with_capacity(items.len());
        for CommitItem { reservation, checksum } in items {
            let sessions = &mut objects.local.shard.sessions;
            outcomes.push(match TicketId::of(reservation.index, reservation.generation) {
                Some(ticket) if sessions.take_ticket(peer, ticket) => {
                    Err(not_committed(self.end_ticket(objects, ticket, Some(checksum))))
                }
                None if sessions.take_reservation(peer, reservation) => {
                    self.commit_one(objects, reservation, checksum).map_err(not_committed)
                }
                _ => {
                    for made in outcomes.into_iter().flatten() {
                        let waits = objects.waits_of(&made);
                        objects.follow_put(&made, waits, None);
                    }
                    return Err(CloseReason::Malformed("a commit of a reservation that it does not hold"));
                }
            });
        }
        objects.answer_commits(peer, Operation::Commit, header, outcomes);
        Ok(())
    }

    /// Aborts a peer's reservations, or ranges of put sessions.
    pub(super) fn abort(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        for item in items_of::<IdItem>(header, body)? {
            let reservation = ReservationId::from_bits(item.id);
            let sessions = &mut objects.local.shard.sessions;
            if let Some(ticket) = TicketId::of(reservation.index, reservation.generation) {
                if !sessions.take_ticket(peer, ticket) {
                    return Err(CloseReason::Malformed("an abort of a range that it does not hold"));
                }
                self.end_ticket(objects, ticket, None);
                continue;
            }
            if !sessions.take_reservation(peer, reservation) {
                return Err(CloseReason::Malformed("an abort of a reservation that it does not hold"));
            }
            objects.local.shard.abort(reservation);
        }
        Ok(())
    }

    /// Releases a peer's pins of objects, or of ranges of put sessions.
    pub(super) fn release(
        &mut self,
        objects: &mut Objects,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        for item in items_of::<IdItem>(header, body)? {
            let pin = PinId::from_bits(item.id);
            let shard = &mut objects.local.shard;
            if let Some(ticket) = TicketId::of(pin.index, pin.generation) {
                if !shard.sessions.take_ticket(peer, ticket) {
                    return Err(CloseReason::Malformed("a release of a range that it does not hold"));
                }
                self.end_ticket(objects, ticket, None);
                continue;
            }
            if !shard.sessions.take_pin(peer, pin) {
                return Err(CloseReason::Malformed("a release of a pin that it does not hold"));
            }
            shard.unpin(pin);
        }
        Ok(())
    }

    /// Commits an object whose bytes were received. Consumes the reservation in any case, since its writer has
    /// finished.
    fn commit_one(
        &mut self,
        objects: &mut Objects,
        reservation: ReservationId,
        checksum: u64,
    ) -> Result<CommittedObject, Status> {
        let shard = &mut objects.local.shard;
        let store = &mut shard.store;
        let reserved = store.reserved(reservation).expect("a session's reservation is held");
        let (digest, bytes, replaces) = (reserved.digest(), reserved.bytes(), reserved.replaces());
        let is_copy = reserved.replica() == Replica::Second;
        shard.answers.outputs.concerns(digest, bytes);
        if is_copy {
            return objects.commit_replica(reservation, digest, bytes, checksum);
        }
        if !shard.ownership.owns(digest) {
            // The slot was lost while the bytes were received. An object committed now would be found, and be stale,
            // once the slot is back.
            shard.counters.wrong_owner += 1;
            shard.abort(reservation);
            return Err(Status::WrongOwner);
        }
        let ack = self.acks.take(reservation);
        // The store itself refuses if there is an object in memory.
        if !store.exists(digest) && objects.has_rival(reservation, digest) {
            objects.local.shard.abort(reservation);
            return Err(objects.exists_already(digest, ack));
        }
        let store = &mut objects.local.shard.store;
        match store.commit(reservation, checksum) {
            Ok(version) => {
                objects.local.shard.counters.put_bytes += bytes;
                objects.migration.note_change(&objects.local.shard, digest);
                note_change(&mut objects.local, digest);
                objects.local.shard.about_made(digest);
                Ok(CommittedObject { version, digest, bytes, replaces, is_copy: false, ack })
            }
            Err(CommitError::Exists) => Err(objects.exists_already(digest, ack)),
            Err(error) => {
                if error == CommitError::Expired {
                    objects.local.shard.abort(reservation);
                }
                Err(commit_status(error))
            }
        }
    }

    /// Returns the time at which the next put session expires.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.sessions.poll_timeout()
    }

    /// Expires a put that has not completed in time.
    pub(super) fn expire(&self, objects: &mut Objects, reservation: ReservationId, peer: PeerKey, path: Path) {
        let shard = &mut objects.local.shard;
        shard.counters.expired += 1;
        match path {
            // Only this shard's own receive writes there, so that ending the connection frees the reservation.
            Path::Stream => shard.close(peer, CloseReason::PutDeadline),
            Path::Shared => {
                let store = &mut shard.store;
                store.expire(reservation);
            }
        }
    }
}

/// Returns the reply for an object that was not committed.
const fn not_committed(status: Status) -> CommitReply {
    CommitReply { status, version: Version(0), flags: ItemFlags::NONE }
}
