//! Objects over shared memory: the peer maps the pool and copies by itself; we say where, and hold it there meanwhile.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::{CommitItem, CommitReply, DigestItem, IdItem, LookupReply, Operation, ReserveReply};

use kvplane_proto::{Digest, FrameFlags, ItemFlags, Status};

use super::Service;
use super::answers::items_of;
use super::context::RequestContext;
use super::deferred::{Replies, no_lookup};
use super::objects::{CommittedObject, get_status};
use super::put_sessions::TicketId;
use super::tiered::Waiter;
use super::types::{CloseReason, PayloadTo, PeerKey};

impl Service {
    pub(super) fn lookup(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        self.warm(items.clone().map(|item| item.digest));
        let (mut replies, mut elsewhere) = (Vec::with_capacity(items.len()), Vec::new());
        let all = header.flags.has(FrameFlags::HEADS);
        for item in items {
            let reply = self.lookup_one(context, item.digest, all).unwrap_or_else(no_lookup);
            if reply.status == Status::NotFound
                && self.may_read_copy(context, item.digest).is_none()
                && !self.is_hidden(context, item.digest)
                && (self.on_ssd(item.digest).is_some() || self.may_be_elsewhere(context, item.digest))
            {
                elsewhere.push((replies.len(), item.digest));
            }
            replies.push(reply);
        }
        if elsewhere.is_empty() {
            self.answers.records(context.peer, Operation::Lookup, header.request, &replies);
            return Ok(PayloadTo::Discard);
        }
        // All that the SSD or a former owner has is read at the same time; the answer waits for the last.
        let slot_of = self.defer(context.peer, header.request, Replies::Lookups(replies), elsewhere.len());
        for (item, digest) in elsewhere {
            let slot = slot_of(item);
            let waiter = Waiter::Shared { slot, all };
            let begun = match self.on_ssd(digest) {
                Some(view) if view.names_parts && !all => Err(Status::Striped),
                Some(view) => self.read_from_ssd(&view, waiter),
                None => self.fetch_for(digest, waiter),
            };
            if let Err(status) = begun {
                self.settle_lookup(slot, no_lookup(status));
            }
        }
        Ok(PayloadTo::Discard)
    }

    pub(super) fn lookup_one(
        &mut self,
        context: &RequestContext,
        digest: Digest,
        all: bool,
    ) -> Result<LookupReply, Status> {
        self.may_ask(context, digest)?;
        if let Some(here) = self.may_read_copy(context, digest) {
            if !here {
                return Err(Status::NotFound);
            }
            self.count_copy_served();
        }
        let Some(store) = &mut self.store else { return Err(Status::NotFound) };
        let (pin, object) = store.get(digest).map_err(get_status)?;
        if object.is_head && !all {
            store.unpin(pin).expect("a pin that was just given");
            return Err(Status::Striped);
        }
        self.asked_for(digest);
        self.counters.get_bytes += object.extent.bytes;
        self.note_get(digest, object.extent.bytes);
        self.sessions.lend_pin(context.peer, pin);
        self.about(&object);
        let is_replicated = self.grant_replica_lease(context, digest, &object);
        Ok(LookupReply {
            status: Status::Ok,
            pin,
            offset: object.extent.offset,
            bytes: object.extent.bytes,
            version: object.version,
            checksum: object.checksum,
            flags: ItemFlags::replicated(is_replicated),
        })
    }

    pub(super) fn release(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        for item in items_of::<IdItem>(header, body)? {
            let pin = PinId::from_bits(item.id);
            if let Some(ticket) = TicketId::of(pin.index, pin.generation) {
                if !self.sessions.take_ticket(peer, ticket) {
                    return Err(CloseReason::Malformed("a release of a range that it does not hold"));
                }
                self.end_ticket(ticket, None);
                continue;
            }
            if !self.sessions.take_pin(peer, pin) {
                return Err(CloseReason::Malformed("a release of a pin that it does not hold"));
            }
            if let Some(store) = &mut self.store {
                store.unpin(pin).expect("a session's pin is held");
            }
        }
        Ok(PayloadTo::Discard)
    }

    pub(super) fn reserve(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let puts = Self::puts(header, body)?;
        self.warm(puts.clone().map(|(item, _)| item.digest));
        let mut replies = Vec::with_capacity(puts.len());
        for (item, name) in puts {
            replies.push(match self.reserve_one(context, &item, &name) {
                Ok((reservation, place)) => ReserveReply { status: Status::Ok, reservation, offset: place.offset },
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        self.answers.records(context.peer, Operation::Reserve, header.request, &replies);
        Ok(PayloadTo::Discard)
    }

    pub(super) fn commit(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<CommitItem>(header, body)?;
        let mut outcomes = Vec::with_capacity(items.len());
        for CommitItem { reservation, checksum } in items {
            let refused = |status| CommitReply { status, version: Version(0), flags: ItemFlags::NONE };
            outcomes.push(match TicketId::of(reservation.index, reservation.generation) {
                Some(ticket) if self.sessions.take_ticket(peer, ticket) => {
                    Err(refused(self.end_ticket(ticket, Some(checksum))))
                }
                None if self.sessions.take_reservation(peer, reservation) => {
                    self.commit_one(reservation, checksum).map_err(refused)
                }
                _ => {
                    for made in outcomes.into_iter().flatten() {
                        let waits = self.waits_of(&made);
                        self.make_last(&made, waits, None);
                    }
                    return Err(CloseReason::Malformed("a commit of a reservation that it does not hold"));
                }
            });
        }
        self.answer_commits(peer, Operation::Commit, header, outcomes);
        Ok(PayloadTo::Discard)
    }

    /// Answers what became of reservations, at once or when the SSD has what it must have.
    pub(super) fn answer_commits(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        header: &Header,
        outcomes: Vec<Result<CommittedObject, CommitReply>>,
    ) {
        let (mut replies, mut all, mut left) = (Vec::with_capacity(outcomes.len()), Vec::new(), 0);
        for outcome in outcomes {
            replies.push(match outcome {
                Ok(made) => {
                    let waits = self.waits_of(&made);
                    left += waits.count();
                    all.push((made, waits, replies.len()));
                    CommitReply { status: Status::Ok, version: made.version, flags: ItemFlags::NONE }
                }
                Err(reply) => reply,
            });
        }
        if left == 0 {
            self.answers.records(peer, operation, header.request, &replies);
            all.into_iter().for_each(|(made, waits, _)| self.make_last(&made, waits, None));
        } else {
            let slot_of = self.defer(peer, header.request, Replies::Commits(operation, replies), left);
            for (made, waits, item) in all {
                self.make_last(&made, waits, (waits.count() > 0).then(|| slot_of(item)));
            }
        }
    }

    pub(super) fn abort(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        for item in items_of::<IdItem>(header, body)? {
            let reservation = ReservationId::from_bits(item.id);
            if let Some(ticket) = TicketId::of(reservation.index, reservation.generation) {
                if !self.sessions.take_ticket(peer, ticket) {
                    return Err(CloseReason::Malformed("an abort of a range that it does not hold"));
                }
                self.end_ticket(ticket, None);
                continue;
            }
            if !self.sessions.take_reservation(peer, reservation) {
                return Err(CloseReason::Malformed("an abort of a reservation that it does not hold"));
            }
            self.abort_one(reservation);
        }
        Ok(PayloadTo::Discard)
    }
}
