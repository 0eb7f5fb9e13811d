//! Objects over shared memory: the peer maps the pool and copies by itself; we say where, and hold it there meanwhile.

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::{CommitItem, CommitReply, DigestItem, IdItem, Item, LookupReply, Operation, ReserveReply};

use super::Service;
use super::objects::get_status;
use super::tiered::{Replies, Waiter, no_lookup};
use super::types::{CloseReason, PayloadTo, PeerKey};

impl Service {
    pub(super) fn lookup(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let items = Self::items::<DigestItem>(header, body)?;
        self.warm(items.clone().map(|item| item.digest));
        let (mut replies, mut elsewhere) = (Vec::with_capacity(items.len()), Vec::new());
        for item in items {
            let reply = self.lookup_one(peer, &item).unwrap_or_else(no_lookup);
            if reply.status == Status::NotFound
                && let Some(view) = self.on_ssd(item.digest)
            {
                elsewhere.push((replies.len(), view));
            }
            replies.push(reply);
        }
        if elsewhere.is_empty() {
            let (start, count) = (self.bytes.len(), replies.len());
            replies.iter().for_each(|reply| reply.encode(&mut self.bytes));
            self.answer_items(peer, Operation::Lookup, header, start, count);
            return Ok(PayloadTo::Discard);
        }
        // All that the SSD has is read at the same time; the answer waits for the last.
        let slot_of = self.defer(peer, header.request, Replies::Lookups(replies), elsewhere.len());
        for (item, view) in elsewhere {
            let slot = slot_of(item);
            if let Err(status) = self.read_from_ssd(&view, Waiter::Shared(slot)) {
                self.settle_lookup(slot, no_lookup(status));
            }
        }
        Ok(PayloadTo::Discard)
    }

    fn lookup_one(&mut self, peer: PeerKey, item: &DigestItem) -> Result<LookupReply, Status> {
        if !self.owns(item.digest) {
            self.counters.wrong_owner += 1;
            return Err(Status::WrongOwner);
        }
        let Some(store) = &mut self.store else { return Err(Status::NotFound) };
        let (pin, object) = store.get(item.digest).map_err(get_status)?;
        self.asked_for(item.digest);
        self.counters.get_bytes += object.extent.bytes;
        self.lend_pin(peer, pin);
        Ok(LookupReply {
            status: Status::Ok,
            pin,
            offset: object.extent.offset,
            bytes: object.extent.bytes,
            version: object.version,
            checksum: object.checksum,
        })
    }

    pub(super) fn release(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        for item in Self::items::<IdItem>(header, body)? {
            let pin = PinId::from_bits(item.id);
            if !self.take_pin(peer, pin) {
                return Err(CloseReason::Malformed("a release of a pin that it does not hold"));
            }
            if let Some(store) = &mut self.store {
                store.unpin(pin).expect("a session's pin is held");
            }
        }
        Ok(PayloadTo::Discard)
    }

    pub(super) fn reserve(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let puts = Self::puts(header, body)?;
        self.warm(puts.clone().map(|(item, _)| item.digest));
        let mut replies = Vec::with_capacity(puts.len());
        for (item, name) in puts {
            replies.push(match self.reserve_one(peer, &item, &name) {
                Ok((reservation, place)) => ReserveReply { status: Status::Ok, reservation, offset: place.offset },
                Err(status) => ReserveReply { status, reservation: ReservationId::default(), offset: 0 },
            });
        }
        let (start, count) = (self.bytes.len(), replies.len());
        replies.iter().for_each(|reply| reply.encode(&mut self.bytes));
        self.answer_items(peer, Operation::Reserve, header, start, count);
        Ok(PayloadTo::Discard)
    }

    pub(super) fn commit(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let items = Self::items::<CommitItem>(header, body)?;
        let (mut replies, mut all, mut left) = (Vec::with_capacity(items.len()), Vec::new(), 0);
        for item in items {
            if !self.take_reservation(peer, item.reservation) {
                all.into_iter().for_each(|(made, waits, _)| self.make_last(&made, waits, None));
                return Err(CloseReason::Malformed("a commit of a reservation that it does not hold"));
            }
            let (status, version) = match self.commit_one(item.reservation, item.checksum) {
                Ok(made) => {
                    let waits = self.waits_of(&made);
                    left += waits.count();
                    all.push((made, waits, replies.len()));
                    (Status::Ok, made.version)
                }
                Err(status) => (status, Version(0)),
            };
            replies.push(CommitReply { status, version });
        }
        if left == 0 {
            let (start, count) = (self.bytes.len(), replies.len());
            replies.iter().for_each(|reply| reply.encode(&mut self.bytes));
            self.answer_items(peer, Operation::Commit, header, start, count);
            all.into_iter().for_each(|(made, waits, _)| self.make_last(&made, waits, None));
        } else {
            let slot_of = self.defer(peer, header.request, Replies::Commits(replies), left);
            for (made, waits, item) in all {
                self.make_last(&made, waits, (waits.count() > 0).then(|| slot_of(item)));
            }
        }
        Ok(PayloadTo::Discard)
    }

    pub(super) fn abort(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        for item in Self::items::<IdItem>(header, body)? {
            let reservation = ReservationId::from_bits(item.id);
            if !self.take_reservation(peer, reservation) {
                return Err(CloseReason::Malformed("an abort of a reservation that it does not hold"));
            }
            self.abort_one(reservation);
        }
        Ok(PayloadTo::Discard)
    }
}
