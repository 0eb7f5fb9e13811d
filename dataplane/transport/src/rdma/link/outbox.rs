//! Send path of a link: short frames in one message, long ones in several; payloads by RDMA write, or for the peer to
//! read.
//!
//! Frames without a credit, a slot or room in the send queue stay queued in order.

use std::collections::VecDeque;

use kvplane_proto::frame::Header;
use kvplane_proto::message::Kind;
use kvplane_proto::{FrameFlags, RequestId, SegmentId, Status};
use kvplane_sys::IoBuf;
use kvplane_sys::verbs::{Operation, Remote};

use super::answer_places::AnswerPlaces;
use super::flushes;
use super::send_queue::{REQUEST_BYTES, SendQueue};
use crate::rdma::books::Books;
use crate::rdma::nic::{BOUNCE_BYTES, Nic, PIECES};
use crate::rdma::pieces::{self, Cutter};
use crate::rdma::wire::{
    EAGER_BYTES, ENVELOPE_BYTES, Envelope, MessageKind, PayloadKind, RemoteRange, SOURCES, SegmentKey,
};
use crate::rdma::work::Work;
use crate::types::checksum_of_pieces;
use crate::types::{CloseCause, Event, OutgoingPayload, Pieces};

/// Limit of RDMA writes for one pushed payload; a payload in more pieces is read by the peer.
const PUSH_WRITES: usize = 32;

/// Control message.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) enum Control {
    /// A payload, or its current part, was fetched.
    Pulled(u64),
    /// Announces where the next part of a payload is.
    Part {
        token: u64,
        place: RemoteRange,
        more: bool,
    },
    /// Requests the key for this offset of a segment.
    AskKey(SegmentId, u64),
    Key(SegmentId, SegmentKey),
    SegmentGone(SegmentId),
    Flush(SegmentId),
    Flushed(SegmentId, Status),
}

/// A queued frame.
pub(in crate::rdma) struct Frame {
    pub(in crate::rdma) header: Header,
    pub(in crate::rdma) body: Vec<u8>,
    pub(in crate::rdma) payload: Option<OutgoingPayload>,
    /// Memory offered for its answers.
    pub(in crate::rdma) offers: Vec<RemoteRange>,
}

/// A record in transmission; `at` is the next byte.
struct OutgoingRecord {
    envelope: Envelope,
    record: Vec<u8>,
    at: usize,
}

/// A payload that is lent until it was written to the peer or fetched by the peer.
struct LentPayload {
    hold: Option<u64>,
    /// Keeps the memory alive.
    pieces: Pieces,
    /// Bounce buffer, and the bytes that passed through it so far.
    bounced: Option<(u32, usize)>,
}

impl Frame {
    fn extra_pieces(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.buffers.as_slice().len().saturating_sub(1))
    }
}

/// Result of an attempt to send the first queued frame.
enum Step {
    /// Its record is in transmission.
    Ready,
    /// No room in the send queue: completions will free it.
    Full,
    /// No free bounce buffer.
    Starved,
}

/// Transfer method of a payload.
enum PayloadMethod {
    None,
    Eager(OutgoingPayload),
    Push(OutgoingPayload, Vec<RemoteRange>),
    Pull(OutgoingPayload, Vec<RemoteRange>),
    Bounce(OutgoingPayload, u32),
}

impl PayloadMethod {
    const fn payload(&self) -> Option<&OutgoingPayload> {
        match self {
            Self::None => None,
            Self::Eager(payload) | Self::Push(payload, _) | Self::Pull(payload, _) | Self::Bounce(payload, _) => {
                Some(payload)
            }
        }
    }
}

/// Queued frames and control messages of a link, and lent payloads.
#[derive(Default)]
pub(in crate::rdma) struct Outbox {
    control: VecDeque<Control>,
    frames: VecDeque<Frame>,
    /// Pieces of memory of the queued frames beyond the first of each.
    extra_pieces: usize,
    sending: Option<OutgoingRecord>,
    lent: slab::Slab<LentPayload>,
}

impl Outbox {
    /// Queues a frame.
    #[inline]
    pub(super) fn push(&mut self, frame: Frame) {
        self.extra_pieces += frame.extra_pieces();
        self.frames.push_back(frame);
    }

    /// Queues a control message.
    pub(in crate::rdma) fn push_control(&mut self, control: Control) {
        self.control.push_back(control);
    }

    /// Returns the number of queued control messages.
    pub(super) fn controls(&self) -> usize {
        self.control.len()
    }

    /// Returns the number of queued frames.
    pub(super) fn frames(&self) -> usize {
        self.frames.len()
    }

    /// Returns the pieces of memory of the queued frames beyond the first of each.
    pub(super) const fn extra_pieces(&self) -> usize {
        self.extra_pieces
    }

    /// Returns true if nothing waits to be sent or fetched.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.sending.is_none() && self.control.is_empty() && self.lent.is_empty()
    }

    /// Sends queued messages as far as credits, slots and the send queue allow. Returns true if it waits for resources
    /// that other connections of the device hold.
    pub(super) fn transmit(
        &mut self,
        sends: &mut SendQueue,
        places: &mut AnswerPlaces,
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<bool, CloseCause> {
        while sends.may_send() {
            if !nic.arena.has_slot() {
                return Ok(!self.is_empty());
            }
            if let Some(control) = self.control.pop_front() {
                send_control(control, sends, nic, books)?;
            } else if self.sending.is_some() {
                self.send_record(sends, nic, books)?;
            } else if self.frames.is_empty() {
                break;
            } else {
                match self.prepare(sends, places, nic, books)? {
                    Step::Ready => {}
                    Step::Full => break,
                    Step::Starved => return Ok(true),
                }
            }
        }
        Ok(false)
    }

    /// Sends the next message of the record in transmission.
    fn send_record(&mut self, sends: &mut SendQueue, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        let Some(OutgoingRecord { mut envelope, record, at }) = self.sending.take() else { return Ok(()) };
        let end = record.len().min(at + sends.message_bytes() - ENVELOPE_BYTES);
        if at > 0 {
            envelope = Envelope::new(MessageKind::More, 0);
        }
        let last = end == record.len();
        sends.send_message(Envelope { more: !last, ..envelope }, &record[at..end], nic, books)?;
        if last {
            books.spare(record);
        } else {
            self.sending = Some(OutgoingRecord { envelope, record, at: end });
        }
        Ok(())
    }

    /// Makes a record of the first queued frame; its payload is written, or lent to be fetched.
    fn prepare(
        &mut self,
        sends: &mut SendQueue,
        places: &mut AnswerPlaces,
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<Step, CloseCause> {
        let Some(mut frame) = self.frames.pop_front() else { return Ok(Step::Full) };
        self.extra_pieces -= frame.extra_pieces();
        let is_reply = matches!(frame.header.kind, Kind::Reply(_));
        let wanted_at = if is_reply { places.wanted(frame.header.request) } else { None };
        let way = match frame.payload.take().map(|payload| choose(payload, wanted_at, nic)) {
            None => PayloadMethod::None,
            // Waits for room for the largest number of writes, so that the frame waits at most once.
            Some(Ok(PayloadMethod::Push(payload, _))) if sends.queue_pair.room() <= PUSH_WRITES => {
                self.put_back(frame, payload);
                return Ok(Step::Full);
            }
            Some(Ok(way)) => way,
            Some(Err(payload)) => {
                self.put_back(frame, payload);
                return Ok(Step::Starved);
            }
        };
        if is_reply {
            places.forget_wanted(frame.header.request);
        }
        self.carry(frame, way, sends, nic, books)?;
        Ok(Step::Ready)
    }

    /// Makes a record of a frame whose payload is transferred by this method.
    fn carry(
        &mut self,
        mut frame: Frame,
        way: PayloadMethod,
        sends: &mut SendQueue,
        nic: &Nic,
        books: &mut Books,
    ) -> Result<(), CloseCause> {
        if let Some(payload) = way.payload() {
            state_checksum(&mut frame, payload.buffers.as_slice());
        }
        match way {
            PayloadMethod::None => self.start_record(&frame, Source::nothing(), books),
            PayloadMethod::Push(payload, places) => {
                self.push_payload(&payload, &places, sends, nic)?;
                books.counters.pushed_bytes += payload.buffers.bytes() as u64;
                self.start_record(&frame, Source { kind: PayloadKind::Pushed, ..Source::nothing() }, books);
            }
            PayloadMethod::Eager(payload) => {
                self.start_record(&frame, Source { kind: PayloadKind::Eager, ..Source::nothing() }, books);
                if let Some(sending) = &mut self.sending {
                    for buffer in payload.buffers.as_slice() {
                        let at = sending.record.len();
                        sending.record.resize(at + buffer.bytes(), 0);
                        buffer.copy_out(&mut sending.record[at..]);
                    }
                }
                books.events.extend(payload.hold.map(Event::Sent));
            }
            PayloadMethod::Pull(payload, places) => {
                let token =
                    self.lent.insert(LentPayload { hold: payload.hold, pieces: payload.buffers, bounced: None });
                let source = Source { kind: PayloadKind::Pull, places: &places, token: token as u64, more: false };
                self.start_record(&frame, source, books);
            }
            PayloadMethod::Bounce(payload, bounce) => {
                let pieces = payload.buffers;
                let token = self.lent.insert(LentPayload { hold: payload.hold, pieces, bounced: Some((bounce, 0)) });
                let (place, more) = self.bounce_part(token, nic, books);
                let source = Source { kind: PayloadKind::Pull, places: &[place], token: token as u64, more };
                self.start_record(&frame, source, books);
            }
        }
        Ok(())
    }

    /// Puts a frame with its payload back at the head of the queue.
    fn put_back(&mut self, mut frame: Frame, payload: OutgoingPayload) {
        frame.payload = Some(payload);
        self.extra_pieces += frame.extra_pieces();
        self.frames.push_front(frame);
    }

    fn start_record(&mut self, frame: &Frame, source: Source<'_>, books: &mut Books) {
        let mut record = books.take_spare();
        for place in frame.offers.iter().chain(source.places) {
            place.encode(&mut record);
        }
        record.extend_from_slice(&frame.header.encode());
        record.extend_from_slice(&frame.body);
        let envelope = Envelope {
            payload: source.kind,
            parts: source.more,
            sources: source.places.len() as u16,
            offers: frame.offers.len() as u16,
            ..Envelope::new(MessageKind::Frame, source.token)
        };
        self.sending = Some(OutgoingRecord { envelope, record, at: 0 });
    }

    /// Writes a payload into the memory that the peer offered. The memory is registered and the send queue has room.
    fn push_payload(
        &mut self,
        payload: &OutgoingPayload,
        places: &[RemoteRange],
        sends: &mut SendQueue,
        nic: &Nic,
    ) -> Result<(), CloseCause> {
        let lent = LentPayload { hold: payload.hold, pieces: payload.buffers.clone(), bounced: None };
        let index = self.lent.insert(lent) as u32;
        let mut left = payload.buffers.bytes() as u64;
        let mut cutter = Cutter::new(payload.buffers.as_slice(), 0);
        for place in places {
            let mut done = 0;
            while done < place.bytes && left > 0 {
                let parts = cutter.cut(PIECES, (place.bytes - done).min(REQUEST_BYTES));
                let bytes: u64 = parts.iter().map(|part| part.bytes() as u64).sum();
                left -= bytes;
                let to = Remote { address: place.address + done, key: place.key };
                let work = if left == 0 { Work::Push(index) } else { Work::Nothing };
                sends.post(work, Operation::Write { to }, &parts, nic)?;
                done += bytes;
            }
        }
        Ok(())
    }

    /// Copies the next part of a lent payload into its bounce buffer. Returns its place, and true if more parts follow.
    fn bounce_part(&mut self, token: usize, nic: &Nic, books: &mut Books) -> (RemoteRange, bool) {
        let lent = &mut self.lent[token];
        let total = lent.pieces.bytes();
        let (bounce, done) = lent.bounced.unwrap_or_default();
        let copied = pieces::copy(lent.pieces.as_slice(), done, &[nic.arena.bounce(bounce)]);
        lent.bounced = Some((bounce, done + copied));
        books.counters.bounced_bytes += copied as u64;
        let (address, key) = nic.arena.bounce_address(bounce);
        let place = RemoteRange { request: RequestId::default(), address, bytes: copied as u64, key };
        (place, done + copied < total)
    }

    /// Handles the peer's report that it has fetched a payload, or a part of it.
    pub(in crate::rdma) fn pulled(&mut self, token: u64, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        let index = token as usize;
        let Some(lent) = self.lent.get(index) else {
            return Err(CloseCause::Rdma(format!("the peer fetched payload {token}, which is not lent")));
        };
        match lent.bounced {
            Some((_, done)) if done < lent.pieces.bytes() => {
                let (place, more) = self.bounce_part(index, nic, books);
                self.control.push_back(Control::Part { token, place, more });
            }
            bounced => {
                if let Some((bounce, _)) = bounced {
                    nic.arena.free_bounce(bounce);
                }
                books.events.extend(self.lent.remove(index).hold.map(Event::Sent));
            }
        }
        Ok(())
    }

    /// Handles the completion of a payload's last write.
    pub(super) fn pushed(&mut self, index: u32, books: &mut Books) {
        if let Some(lent) = self.lent.try_remove(index as usize) {
            books.events.extend(lent.hold.map(Event::Sent));
        }
    }

    /// Ends the send path when the device holds none of the link's requests any more: releases the memory of lent
    /// payloads and queued frames.
    pub(super) fn end(self, nic: &mut Nic, books: &mut Books) {
        for (_, lent) in self.lent {
            if let Some((bounce, _)) = lent.bounced {
                nic.arena.free_bounce(bounce);
            }
            books.events.extend(lent.hold.map(Event::Sent));
        }
        books.events.extend(self.frames.iter().filter_map(|frame| frame.payload.as_ref()?.hold).map(Event::Sent));
    }
}

/// Source from which the peer gets the payload of a record.
#[derive(Clone, Copy)]
struct Source<'a> {
    kind: PayloadKind,
    places: &'a [RemoteRange],
    /// Token of the lent payload.
    token: u64,
    /// True if these places are only a part of the payload.
    more: bool,
}

impl Source<'_> {
    /// Returns the source of a record without a payload to fetch.
    const fn nothing() -> Self {
        Self { kind: PayloadKind::None, places: &[], token: 0, more: false }
    }
}

fn send_control(control: Control, sends: &mut SendQueue, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
    let mut content = Vec::new();
    let envelope = match control {
        Control::Pulled(token) => Envelope::new(MessageKind::Pulled, token),
        Control::Part { token, place, more } => {
            place.encode(&mut content);
            Envelope { parts: more, sources: 1, ..Envelope::new(MessageKind::Part, token) }
        }
        Control::AskKey(segment, offset) => {
            content.extend_from_slice(&offset.to_le_bytes());
            Envelope::new(MessageKind::AskKey, segment.to_bits())
        }
        Control::Key(segment, key) => {
            content.extend_from_slice(&key.encode());
            Envelope::new(MessageKind::Key, segment.to_bits())
        }
        Control::SegmentGone(segment) => Envelope::new(MessageKind::SegmentGone, segment.to_bits()),
        Control::Flush(segment) => Envelope::new(MessageKind::Flush, segment.to_bits()),
        Control::Flushed(segment, outcome) => {
            content.extend_from_slice(&flushes::encode(outcome));
            Envelope::new(MessageKind::Flushed, segment.to_bits())
        }
    };
    sends.send_message(envelope, &content, nic, books)
}

/// Fills in the checksum if it is announced but not computed yet.
fn state_checksum(frame: &mut Frame, pieces: &[IoBuf]) {
    if frame.header.flags.has(FrameFlags::CHECKSUM) && frame.header.payload_checksum == 0 {
        frame.header.payload_checksum = checksum_of_pieces(pieces);
    }
}

/// Chooses the transfer method of a payload; returns the payload if no bounce buffer is free for it now.
fn choose(
    payload: OutgoingPayload,
    wanted_at: Option<&[RemoteRange]>,
    nic: &mut Nic,
) -> Result<PayloadMethod, OutgoingPayload> {
    let buffers = payload.buffers.as_slice();
    let bytes = payload.buffers.bytes();
    if bytes <= EAGER_BYTES {
        return Ok(PayloadMethod::Eager(payload));
    }
    let registered = buffers.iter().all(|buffer| nic.memory.ensure(buffer.region()));
    if registered {
        let places = wanted_at.unwrap_or_default();
        let room: u64 = places.iter().map(|place| place.bytes).sum();
        let writes = places.len() + buffers.len().div_ceil(PIECES) + bytes.div_ceil(REQUEST_BYTES as usize);
        if room >= bytes as u64 && writes <= PUSH_WRITES {
            let places = places.to_vec();
            return Ok(PayloadMethod::Push(payload, places));
        }
        if let Some(places) = sources(buffers, nic) {
            return Ok(PayloadMethod::Pull(payload, places));
        }
    }
    match nic.arena.take_bounce() {
        Some(bounce) => Ok(PayloadMethod::Bounce(payload, bounce)),
        None => Err(payload),
    }
}

/// Returns the remote places of registered memory; `None` if there are too many.
fn sources(buffers: &[IoBuf], nic: &Nic) -> Option<Vec<RemoteRange>> {
    let mut places: Vec<RemoteRange> = Vec::new();
    for buffer in buffers.iter().filter(|buffer| !buffer.is_empty()) {
        let memory = nic.memory.get(buffer.region())?;
        let (address, key) = (buffer.region().address() + buffer.offset() as u64, memory.remote_key());
        let bytes = buffer.bytes() as u64;
        if let Some(last) = places.last_mut()
            && last.key == key
            && last.address + last.bytes == address
        {
            last.bytes += bytes;
        } else if places.len() == SOURCES {
            return None;
        } else {
            places.push(RemoteRange { request: RequestId::default(), address, bytes, key });
        }
    }
    Some(places)
}

const _: () = assert!(BOUNCE_BYTES > EAGER_BYTES);
