//! Objects over streams: Exists, Size, Remove, Get, Put.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, ReservationId, Version};
use kvplane_proto::message::{Bitmap, DigestItem, GetItem, Item, Kind, Operation, SizeReply};
use kvplane_proto::{Digest, Limits, Status};

use super::session::Pending;
use super::types::{CloseReason, Hold, Memory, Output, PayloadTo, PeerKey, Place, Places};
use super::{Service, owns};
use crate::{CommitError, GetError, ReserveError};

impl Service {
    /// The digests of a request, if every one is ours; else the request is answered with `WrongOwner`.
    fn owned_digests<'a>(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        header: &Header,
        body: &'a [u8],
    ) -> Result<Option<kvplane_proto::message::Items<'a, DigestItem>>, CloseReason> {
        let items = Self::items::<DigestItem>(header, body)?;
        if items.clone().all(|item| self.owns(item.digest)) {
            return Ok(Some(items));
        }
        self.counters.wrong_owner += 1;
        self.answer_id(peer, operation, header.request, Status::WrongOwner, self.epoch.0);
        Ok(None)
    }

    pub(super) fn exists(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Some(items) = self.owned_digests(peer, Operation::Exists, header, body)? else {
            return Ok(PayloadTo::Discard);
        };
        let start = self.bytes.len();
        let count = items.len();
        if let Some(store) = &self.store {
            Bitmap::encode(items.map(|item| store.exists(item.digest)), &mut self.bytes);
        }
        self.answer_items(peer, Operation::Exists, header, start, count);
        Ok(PayloadTo::Discard)
    }

    pub(super) fn remove(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Some(items) = self.owned_digests(peer, Operation::Remove, header, body)? else {
            return Ok(PayloadTo::Discard);
        };
        let start = self.bytes.len();
        let count = items.len();
        if let Some(store) = &mut self.store {
            Bitmap::encode(items.map(|item| store.remove(item.digest)), &mut self.bytes);
        }
        self.answer_items(peer, Operation::Remove, header, start, count);
        Ok(PayloadTo::Discard)
    }

    pub(super) fn size(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let Some(items) = self.owned_digests(peer, Operation::Size, header, body)? else {
            return Ok(PayloadTo::Discard);
        };
        let start = self.bytes.len();
        let count = items.len();
        for item in items {
            let bytes = self.store.as_ref().and_then(|store| store.size(item.digest));
            let status = if bytes.is_some() { Status::Ok } else { Status::NotFound };
            SizeReply { status, bytes: bytes.unwrap_or(0) }.encode(&mut self.bytes);
        }
        self.answer_items(peer, Operation::Size, header, start, count);
        Ok(PayloadTo::Discard)
    }

    pub(super) fn get(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        for item in Self::items::<GetItem>(header, body)? {
            if let Err((status, argument)) = self.get_one(peer, &item) {
                self.answer_id(peer, Operation::Get, item.request, status, argument);
            }
        }
        Ok(PayloadTo::Discard)
    }

    fn get_one(&mut self, peer: PeerKey, item: &GetItem) -> Result<(), (Status, u64)> {
        if !self.owns(item.digest) {
            self.counters.wrong_owner += 1;
            return Err((Status::WrongOwner, self.epoch.0));
        }
        let Some(store) = &mut self.store else { return Err((Status::NotFound, 0)) };
        let (pin, object) = store.get(item.digest).map_err(|error| (get_status(error), 0))?;
        if object.extent.bytes > item.capacity_bytes {
            store.unpin(pin).expect("a pin that was just given");
            return Err((Status::BufferTooSmall, object.extent.bytes));
        }
        let place = Place { memory: Memory::Pool, offset: object.extent.offset, bytes: object.extent.bytes };
        self.counters.get_bytes += place.bytes;
        let header = Header::reply(Kind::Reply(Operation::Get), item.request, Status::Ok)
            .with_payload(place.bytes, Some(object.checksum))
            .with_argument(object.version.0);
        let payload = Some((Places::One(place), Hold::Pin(pin)));
        self.outputs.push_back(Output::Frame { peer, header, body: 0..0, payload });
        Ok(())
    }

    pub(super) fn put(&mut self, peer: PeerKey, header: &Header, body: &[u8]) -> Result<PayloadTo, CloseReason> {
        let mut items = Self::items::<DigestItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a put of not one object"));
        };
        let Some(expected) = header.checksum() else {
            return Err(CloseReason::Malformed("a put without checksum"));
        };
        let request = header.request;
        match self.reserve_one(peer, item.digest, header.payload_bytes) {
            Ok((reservation, place)) => {
                let pending = Pending::Put { request, reservation, expected };
                self.session(peer).expect("a session that was just looked up").pending = Some(pending);
                Ok(PayloadTo::Place(place))
            }
            Err(status) => {
                let pending = Pending::Refused { request, operation: Operation::Put, status, argument: 0 };
                self.session(peer).expect("a session that was just looked up").pending = Some(pending);
                Ok(PayloadTo::Discard)
            }
        }
    }

    /// Room for an object, held by the peer.
    pub(super) fn reserve_one(
        &mut self,
        peer: PeerKey,
        digest: Digest,
        bytes: u64,
    ) -> Result<(ReservationId, Place), Status> {
        if !self.owns(digest) {
            self.counters.wrong_owner += 1;
            return Err(Status::WrongOwner);
        }
        // However large the pool is: no peer could get it over a stream.
        if bytes > Limits::PAYLOAD_BYTES {
            return Err(Status::TooLarge);
        }
        let Some(store) = &mut self.store else { return Err(Status::WrongOwner) };
        let (reservation, extent) = store.reserve(digest, bytes).map_err(reserve_status)?;
        self.lend_reservation(peer, reservation);
        Ok((reservation, Place { memory: Memory::Pool, offset: extent.offset, bytes: extent.bytes }))
    }

    /// The payload of a put is in place.
    pub(super) fn finish_put(
        &mut self,
        peer: PeerKey,
        request: RequestId,
        reservation: ReservationId,
        expected: u64,
        computed: Option<u64>,
    ) {
        let held = self.take_reservation(peer, reservation);
        assert!(held, "the reservation of a payload under way was lost");
        let outcome = if computed == Some(expected) {
            self.commit_one(reservation, expected)
        } else {
            self.counters.corrupt += 1;
            self.abort_one(reservation);
            Err(Status::Corrupt)
        };
        match outcome {
            Ok(version) => self.answer_id(peer, Operation::Put, request, Status::Ok, version.0),
            Err(status) => self.refuse(peer, Operation::Put, request, status),
        }
    }

    /// Makes an object visible whose bytes are in place. Takes the reservation, whatever comes of it: its writer has
    /// finished.
    pub(super) fn commit_one(&mut self, reservation: ReservationId, checksum: u64) -> Result<Version, Status> {
        let store = self.store.as_mut().expect("a reservation is of a store");
        let (digest, bytes) = store.reserved_for(reservation).expect("a session's reservation is held");
        if !owns(&self.owned, digest) {
            // The slot left while the bytes came. An object made now would be found, and be old, once the slot is back.
            self.counters.wrong_owner += 1;
            self.abort_one(reservation);
            return Err(Status::WrongOwner);
        }
        match store.commit(reservation, checksum) {
            Ok(version) => {
                self.counters.put_bytes += bytes;
                Ok(version)
            }
            Err(error) => {
                if error == CommitError::Expired {
                    self.abort_one(reservation);
                }
                Err(commit_status(error))
            }
        }
    }

    /// Frees a reservation that was taken back from its peer and that nobody writes any more.
    pub(super) fn abort_one(&mut self, reservation: ReservationId) {
        let store = self.store.as_mut().expect("a reservation is of a store");
        store.abort(reservation).expect("a session's reservation is held");
    }
}

pub(super) const fn get_status(error: GetError) -> Status {
    match error {
        GetError::NotFound => Status::NotFound,
        GetError::TooManyPins { .. } => Status::Busy,
    }
}

const fn reserve_status(error: ReserveError) -> Status {
    match error {
        ReserveError::Empty => Status::Empty,
        ReserveError::TooLarge { .. } => Status::TooLarge,
        ReserveError::Exists => Status::Exists,
        ReserveError::NoSpace { .. } | ReserveError::TooManyObjects { .. } => Status::NoSpace,
        ReserveError::TooManyReservations { .. } => Status::Busy,
    }
}

const fn commit_status(error: CommitError) -> Status {
    match error {
        CommitError::Stale => Status::Stale,
        CommitError::Exists => Status::Exists,
        CommitError::Expired => Status::DeadlineExceeded,
    }
}
