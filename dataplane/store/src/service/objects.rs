//! Objects over streams: Exists, Size, Remove, Get, Put.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, ReservationId, Version};
use kvplane_proto::message::{
    Bitmap, DigestItem, GetItem, Operation, PutAck, Puts, RangeItem, SizeReply, VersionItem, decode_puts,
};
use kvplane_proto::{Digest, FrameFlags, Status};

use super::Service;
use super::answers::items_of;
use super::context::RequestContext;
use super::deferred::Replies;
use super::sessions::PendingPayload;
use super::stream_read::{ReadSpan, StreamRead};
use super::tiered::Waiter;
use super::types::{CloseReason, Hold, PayloadTo, PeerKey};
use crate::{CommitError, GetError, ReserveError};

/// An object that was just made visible.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommittedObject {
    pub(super) version: Version,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
    /// Whether it takes the place of others.
    pub(super) replaces: bool,
    /// Whether it is a copy of what another owner has.
    pub(super) is_copy: bool,
    /// What its put's answer is to wait for, where that is not left to the policy.
    pub(super) ack: Option<PutAck>,
}

/// Fewer look-ups than this are as soon done one by one.
const WARMED: usize = 4;

impl Service {
    /// The digests of a request, if every one is ours; else the request is answered with `WrongOwner`.
    pub(super) fn owned_digests<'a>(
        &mut self,
        context: &RequestContext,
        operation: Operation,
        header: &Header,
        body: &'a [u8],
    ) -> Result<Option<kvplane_proto::message::Items<'a, DigestItem>>, CloseReason> {
        let items = items_of::<DigestItem>(header, body)?;
        let answers = self.answers_for_all(context, operation, header, items.clone().map(|item| item.digest));
        Ok(answers.then_some(items))
    }

    /// The objects of a removal, and their versions where only those are to be removed.
    fn removals(header: &Header, body: &[u8]) -> Result<(Vec<Digest>, Vec<Version>), CloseReason> {
        if header.flags.has(FrameFlags::OF_VERSION) {
            return Ok(items_of::<VersionItem>(header, body)?.map(|item| (item.digest, item.version)).unzip());
        }
        Ok((items_of::<DigestItem>(header, body)?.map(|item| item.digest).collect(), Vec::new()))
    }

    /// True where this shard answers for all objects of a request; else the request has its answer.
    fn answers_for_all(
        &mut self,
        context: &RequestContext,
        operation: Operation,
        header: &Header,
        mut digests: impl Iterator<Item = Digest>,
    ) -> bool {
        // Some of what a new owner drops, or asks the lengths of, may not be kept for it any more: the rest counts.
        let alone = matches!(operation, Operation::Remove | Operation::Size);
        let counts = |status: &Status| !alone || *status != Status::Stale;
        let refused = digests.find_map(|digest| self.answers_for(context, digest).err().filter(counts));
        if let Some(status) = refused {
            self.refuse(context.peer, operation, header.request, status);
        }
        refused.is_none()
    }

    pub(super) fn exists(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let Some(items) = self.owned_digests(context, Operation::Exists, header, body)? else {
            return Ok(PayloadTo::Discard);
        };
        let until_ns = self.wants_ahead(header);
        let count = items.len();
        let (mut bits, mut heads) = (Vec::with_capacity(count), Vec::new());
        match &self.store {
            Some(store) => store.exist_as_heads(items.clone().map(|item| item.digest), |here, is_head| {
                if is_head {
                    heads.resize(count, false);
                    heads[bits.len()] = true;
                }
                bits.push(here);
            }),
            None => bits.resize(count, false),
        }
        if context.tenant.is_some() {
            for (bit, item) in bits.iter_mut().zip(items.clone()) {
                *bit &= !self.is_anothers(context, item.digest);
            }
            heads.iter_mut().zip(&bits).for_each(|(head, bit)| *head &= *bit);
        }
        if self.tiered.is_some() {
            for (at, (bit, item)) in bits.iter_mut().zip(items.clone()).enumerate().filter(|(_, (bit, _))| !**bit) {
                if let Some(view) = self.on_ssd(item.digest).filter(|_| !self.is_anothers(context, item.digest)) {
                    if let Some(until_ns) = until_ns {
                        self.prefetch(&view, until_ns, false);
                    }
                    *bit = true;
                    if view.names_parts {
                        heads.resize(count, false);
                        heads[at] = true;
                    }
                }
            }
        }
        let missing = bits.iter().zip(items).enumerate().filter(|(_, (bit, _))| !**bit);
        let elsewhere = self.elsewhere(context, missing.map(|(at, (_, item))| (at, item.digest)));
        if !elsewhere.is_empty() {
            self.ask_former(context.peer, header.request, Replies::Found(bits, heads), elsewhere);
            return Ok(PayloadTo::Discard);
        }
        self.answers.items(context.peer, Operation::Exists, header.request, count, |body| {
            Bitmap::encode(bits, body);
            Bitmap::encode(heads, body);
        });
        Ok(PayloadTo::Discard)
    }

    pub(super) fn remove(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let (digests, versions) = Self::removals(header, body)?;
        if !self.answers_for_all(context, Operation::Remove, header, digests.iter().copied()) {
            return Ok(PayloadTo::Discard);
        }
        if let Some(status) = self.refuses_removal(context, &digests) {
            self.refuse(context.peer, Operation::Remove, header.request, status);
            return Ok(PayloadTo::Discard);
        }
        // What is another's stays, and is said not to be there, and so does another version than the one that is meant;
        // what names stripes stays too, and that is said.
        let foreign = |(at, digest): (usize, &Digest)| {
            self.is_foreign(context, *digest)
                || !self.is_for_peer(context, *digest)
                || !self.has_version(*digest, versions.get(at).copied())
        };
        let foreign: Vec<bool> = digests.iter().enumerate().map(foreign).collect();
        let is_head = |(digest, foreign): (&Digest, &bool)| {
            !header.flags.has(FrameFlags::HEADS)
                && !foreign
                && self.in_memory_or_on_ssd(*digest).is_some_and(|(_, is_head)| is_head)
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
            let on_ssd = self.on_ssd(*digest).is_some();
            // The new owner has what we had, and may have brought us a copy of that already.
            let copy = context.fetches && self.store.as_ref().is_some_and(|store| store.is_copy(*digest));
            bits.push(!copy && self.store.as_mut().is_some_and(|store| store.remove(*digest)) || on_ssd);
        }
        if !context.fetches {
            // What a former owner has of them does not count any more either, whether or not it was there.
            for ((bit, digest), _) in bits.iter_mut().zip(&digests).zip(stays).filter(|(_, stays)| !stays) {
                *bit |= self.touched(*digest);
            }
        }
        let heads = if heads.contains(&true) { heads } else { Vec::new() };
        // It is not done before copies are gone too.
        let owed = self.owed_among(&rest);
        if self.tiered.is_some() && !rest.is_empty() {
            if let Err(status) = self.remove_from_ssd(context.peer, header.request, &rest, (bits, heads), &owed) {
                self.answers.answer(context.peer, Operation::Remove, header, status);
            }
            return Ok(PayloadTo::Discard);
        }
        if !owed.is_empty() {
            let replies = Replies::Bits((bits, heads), Status::Ok);
            let slot_of = self.defer(context.peer, header.request, replies, owed.len());
            owed.into_iter().for_each(|at| self.wait_for_drop(rest[at], slot_of(at)));
            return Ok(PayloadTo::Discard);
        }
        self.answers.items(context.peer, Operation::Remove, header.request, digests.len(), |body| {
            Bitmap::encode(bits, body);
            Bitmap::encode(heads, body);
        });
        Ok(PayloadTo::Discard)
    }

    pub(super) fn size(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let Some(items) = self.owned_digests(context, Operation::Size, header, body)? else {
            return Ok(PayloadTo::Discard);
        };
        let size = |item: DigestItem| {
            let (status, bytes) = match self.in_memory_or_on_ssd(item.digest) {
                Some((bytes, true)) => (Status::Striped, bytes),
                Some((bytes, false)) => (Status::Ok, bytes),
                None => (Status::NotFound, 0),
            };
            SizeReply { status, bytes }
        };
        let mut replies: Vec<SizeReply> = items.clone().map(size).collect();
        for (reply, item) in replies.iter_mut().zip(items.clone()) {
            if self.is_anothers(context, item.digest) || !self.is_for_peer(context, item.digest) {
                *reply = SizeReply { status: Status::NotFound, bytes: 0 };
            }
        }
        let missing = replies.iter().zip(items).enumerate().filter(|(_, (reply, _))| reply.status == Status::NotFound);
        let elsewhere = self.elsewhere(context, missing.map(|(at, (_, item))| (at, item.digest)));
        if !elsewhere.is_empty() {
            self.ask_former(context.peer, header.request, Replies::Sizes(replies), elsewhere);
            return Ok(PayloadTo::Discard);
        }
        self.answers.records(context.peer, Operation::Size, header.request, &replies);
        Ok(PayloadTo::Discard)
    }

    /// Bytes of an object in memory, and whether it names the stripes of a larger one.
    fn in_memory(&self, digest: Digest) -> Option<(u64, bool)> {
        self.store.as_ref()?.peek(digest).map(|object| (object.extent.bytes, object.is_head))
    }

    /// As [`Self::in_memory`], or of an object on the SSD, whose tenant is not known.
    pub(super) fn in_memory_or_on_ssd(&self, digest: Digest) -> Option<(u64, bool)> {
        let on_ssd = || self.on_ssd(digest).map(|record| (record.payload_bytes.into(), record.names_parts));
        self.in_memory(digest).or_else(on_ssd)
    }

    pub(super) fn get(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let items = items_of::<GetItem>(header, body)?;
        self.warm(items.clone().map(|item| item.digest));
        let all = header.flags.has(FrameFlags::HEADS);
        for item in items {
            let wanted = ReadSpan::Whole { capacity_bytes: item.capacity_bytes };
            let read = StreamRead { peer: context.peer, request: item.request, wanted, all };
            if let Err((status, argument)) = self.get_one(context, item.digest, read) {
                self.answers.status(context.peer, Operation::Get, item.request, status, argument);
            }
        }
        Ok(PayloadTo::Discard)
    }

    /// Has the memory that looking up many objects waits for come together, as each look-up by itself waits twice.
    pub(super) fn warm(&self, digests: impl ExactSizeIterator<Item = Digest>) {
        if digests.len() >= WARMED
            && let Some(store) = &self.store
        {
            let mut there = 0u32;
            store.exist(digests, |_, here| there += u32::from(here));
            // Or nobody would need to have looked.
            core::hint::black_box(there);
        }
    }

    pub(super) fn get_ranges(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let uncommitted = header.flags.has(FrameFlags::UNCOMMITTED);
        for item in items_of::<RangeItem>(header, body)? {
            let RangeItem { digest, request, offset, bytes } = item;
            let read =
                StreamRead { peer: context.peer, request, wanted: ReadSpan::Range { offset, bytes }, all: false };
            let got = match self.get_one(context, digest, read) {
                Err((Status::NotFound, _)) if uncommitted && context.tenant.is_none() => {
                    self.get_of_draft(context.peer, &item)
                }
                got => got,
            };
            if let Err((status, argument)) = got {
                self.answers.status(context.peer, Operation::GetRange, request, status, argument);
            }
        }
        Ok(PayloadTo::Discard)
    }

    fn get_one(&mut self, context: &RequestContext, digest: Digest, read: StreamRead) -> Result<(), (Status, u64)> {
        self.answers_for(context, digest).map_err(|status| (status, self.ownership.epoch().0))?;
        if self.is_anothers(context, digest) {
            return Err((Status::NotFound, 0));
        }
        if let Some(here) = self.may_read_copy(context, digest) {
            if !here {
                return Err((Status::NotFound, 0));
            }
            self.count_copy_served();
        }
        let Some(store) = &mut self.store else { return Err((Status::NotFound, 0)) };
        let (pin, object) = match store.get(digest) {
            Ok(found) => found,
            Err(error) => return self.get_elsewhere(context, digest, read, error),
        };
        if let Err(status) = read.check(object.extent.bytes, object.is_head) {
            store.unpin(pin).expect("a pin that was just given");
            return Err((status, object.extent.bytes));
        }
        self.asked_for(digest);
        let bytes = read.wanted.bytes_of(object.extent.bytes);
        self.counters.get_bytes += bytes;
        self.note_given(context, digest, bytes);
        let is_replicated = self.grant_replica_lease(context, digest, &object);
        self.answer_get(&read, Hold::Pin(pin), &object, is_replicated);
        Ok(())
    }

    /// What memory has not may be on the SSD.
    fn get_elsewhere(
        &mut self,
        context: &RequestContext,
        digest: Digest,
        read: StreamRead,
        error: GetError,
    ) -> Result<(), (Status, u64)> {
        let view = self.on_ssd(digest).filter(|_| error == GetError::NotFound);
        let Some(view) = view else {
            if error == GetError::NotFound && self.may_be_elsewhere(context, digest) {
                return self.fetch_for(digest, Waiter::Stream(read)).map_err(|status| (status, 0));
            }
            return Err((get_status(error), 0));
        };
        let bytes = view.payload_bytes.into();
        read.check(bytes, view.names_parts).map_err(|status| (status, bytes))?;
        self.read_from_ssd(&view, Waiter::Stream(read)).map_err(|status| (status, 0))
    }

    pub(super) fn put(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let mut puts = Self::puts(header, body)?;
        let (Some((item, name)), None) = (puts.next(), puts.next()) else {
            return Err(CloseReason::Malformed("a put of not one object"));
        };
        if item.bytes != header.payload_bytes {
            return Err(CloseReason::Malformed("a put of another length than its payload's"));
        }
        let Some(expected) = header.checksum() else {
            return Err(CloseReason::Malformed("a put without checksum"));
        };
        let request = header.request;
        match self.reserve_one(context, &item, &name) {
            Ok((reservation, place)) => {
                let pending = PendingPayload::Put { request, reservation, expected };
                self.sessions.get_mut(context.peer).expect("a session that was just looked up").pending = Some(pending);
                Ok(PayloadTo::Place(place))
            }
            Err(status) => {
                let pending = PendingPayload::Refused { request, operation: Operation::Put, status, argument: 0 };
                self.sessions.get_mut(context.peer).expect("a session that was just looked up").pending = Some(pending);
                Ok(PayloadTo::Discard)
            }
        }
    }

    /// The puts of a body with their names, or the end of the connection.
    pub(super) fn puts<'a>(header: &Header, body: &'a [u8]) -> Result<Puts<'a>, CloseReason> {
        decode_puts(body, header.items).ok_or(CloseReason::Malformed("a torn body of puts"))
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
        let held = self.sessions.take_reservation(peer, reservation);
        assert!(held, "the reservation of a payload under way was lost");
        let outcome = if computed == Some(expected) {
            self.commit_one(reservation, expected)
        } else {
            self.counters.corrupt += 1;
            self.abort_one(reservation);
            Err(Status::Corrupt)
        };
        match outcome {
            Ok(made) => {
                let waits = self.waits_of(&made);
                if waits.count() > 0 {
                    let slot_of =
                        self.defer(peer, request, Replies::Put(Status::Ok, made.version, false), waits.count());
                    self.make_last(&made, waits, Some(slot_of(0)));
                } else {
                    self.answers.status(peer, Operation::Put, request, Status::Ok, made.version.0);
                    self.make_last(&made, waits, None);
                }
            }
            Err(status) => self.refuse(peer, Operation::Put, request, status),
        }
    }

    /// Makes an object visible whose bytes are in place. Takes the reservation, whatever comes of it: its writer has
    /// finished.
    pub(super) fn commit_one(&mut self, reservation: ReservationId, checksum: u64) -> Result<CommittedObject, Status> {
        let store = self.store.as_mut().expect("a reservation is of a store");
        let (digest, bytes) = store.reserved_for(reservation).expect("a session's reservation is held");
        self.answers.outputs.concerns(digest, bytes);
        if store.reserves_copy(reservation) {
            return self.commit_copy(reservation, (digest, bytes), checksum);
        }
        if !self.ownership.owns(digest) {
            // The slot left while the bytes came. An object made now would be found, and be old, once the slot is back.
            self.counters.wrong_owner += 1;
            self.abort_one(reservation);
            return Err(Status::WrongOwner);
        }
        let replaces = store.replaces(reservation);
        let ack = self.acks.take(reservation);
        // The store itself refuses where there is one in memory.
        if !store.exists(digest) && self.has_rival(reservation, digest) {
            self.abort_one(reservation);
            return Err(self.exists_already(digest, ack));
        }
        let store = self.store.as_mut().expect("a reservation is of a store");
        match store.commit(reservation, checksum) {
            Ok(version) => {
                self.counters.put_bytes += bytes;
                self.touched(digest);
                self.about_made(digest);
                Ok(CommittedObject { version, digest, bytes, replaces, is_copy: false, ack })
            }
            Err(CommitError::Exists) => Err(self.exists_already(digest, ack)),
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

pub(super) const fn reserve_status(error: ReserveError) -> Status {
    match error {
        ReserveError::Empty => Status::Empty,
        ReserveError::TooLarge { .. } => Status::TooLarge,
        ReserveError::Exists => Status::Exists,
        ReserveError::NoSpace { .. } | ReserveError::TooManyObjects { .. } => Status::NoSpace,
        ReserveError::Quota { .. } => Status::QuotaExceeded,
        ReserveError::PinLimit { .. } => Status::PinLimit,
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
