//! Frames leave: short ones whole, long ones in several messages, payloads by a write or for the peer to fetch.
//!
//! A connection's requests of one flush go to the device with one doorbell. What finds no credit, no slot or no room in
//! the queue stays where it is, in order.

use kvplane_proto::message::Kind;
use kvplane_proto::{FrameFlags, RequestId};
use kvplane_sys::IoBuf;
use kvplane_sys::verbs::{Operation, Payload, Piece, Remote, Request};

use super::Books;
use super::link::{Control, Frame, LentPayload, Link, OutgoingRecord, State, Work};
use super::nic::{BOUNCE_BYTES, Nic};
use super::pieces::{self, Cutter};
use super::wire::{EAGER_BYTES, ENVELOPE_BYTES, Envelope, MessageKind, PayloadKind, Place, SOURCES};
use crate::types::{CloseCause, ConnectionId, Event, OutgoingPayload};

/// Pieces of memory of one request.
pub(super) const PIECES: usize = 8;
/// The longest request: longer ones are cut. All devices take as much.
pub(super) const REQUEST_BYTES: u64 = 8 << 20;
/// Requests that copies and fetches leave free for messages.
pub(super) const ROOM_FOR_MESSAGES: usize = 8;
/// Writes of one pushed payload, at most; what is in more pieces is fetched.
const PUSH_WRITES: usize = 32;

/// What became of the frame at the head of the queue.
enum Step {
    /// Its record is being sent.
    Ready,
    /// It waits for room in the queue: completions come.
    Full,
    /// It waits for a bounce buffer.
    Starved,
}

/// How a payload will go.
enum Way {
    None,
    Eager(OutgoingPayload),
    Push(OutgoingPayload, Vec<Place>),
    Pull(OutgoingPayload, Vec<Place>),
    Bounce(OutgoingPayload, u32),
}

impl Link {
    /// Sends what is queued, as far as credits, slots and the queue allow. Whether it waits for what other connections
    /// of the device have.
    pub(super) fn transmit(&mut self, id: ConnectionId, nic: &mut Nic, books: &mut Books) -> Result<bool, CloseCause> {
        if self.state != State::Open {
            return Ok(false);
        }
        let mut starved = self.fetch(nic)?;
        // Before the messages: they carry the questions for keys.
        self.post_copies(id, nic, books)?;
        while self.credits.may_send() && self.queue_pair.room() > 0 {
            if !nic.has_slot() {
                starved |= !self.is_sent();
                break;
            }
            if let Some(control) = self.control.pop_front() {
                self.send_control(control, nic, books)?;
            } else if self.sending.is_some() {
                self.send_record(nic, books)?;
            } else if self.frames.is_empty() {
                break;
            } else {
                match self.prepare(nic, books)? {
                    Step::Ready => {}
                    Step::Full => break,
                    Step::Starved => {
                        starved = true;
                        break;
                    }
                }
            }
        }
        if self.credits.must_return() && self.queue_pair.room() > 0 {
            self.send_message(Envelope::new(MessageKind::Credit, 0), &[], nic, books)?;
        }
        if self.queue_pair.unsent() > 0 {
            nic.endpoints.touch(self.endpoint);
            let posted = self.queue_pair.flush(true).map_err(|error| nic.gone(&error))?;
            books.counters.requests += posted as u64;
            books.counters.doorbells += 1;
        }
        Ok(starved)
    }

    fn send_control(&mut self, control: Control, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        let mut content = Vec::new();
        let envelope = match control {
            Control::Pulled(token) => Envelope::new(MessageKind::Pulled, token),
            Control::Part { token, place, more } => {
                place.encode(&mut content);
                Envelope { parts: more, sources: 1, ..Envelope::new(MessageKind::Part, token) }
            }
            Control::AskKey(segment) => Envelope::new(MessageKind::AskKey, segment.to_bits()),
            Control::Key(segment, key) => {
                content.extend_from_slice(&key.encode());
                Envelope::new(MessageKind::Key, segment.to_bits())
            }
            Control::SegmentGone(segment) => Envelope::new(MessageKind::SegmentGone, segment.to_bits()),
        };
        self.send_message(envelope, &content, nic, books)
    }

    /// Posts one message. There is a credit, room in the queue, and a slot unless it is short.
    fn send_message(
        &mut self,
        envelope: Envelope,
        content: &[u8],
        nic: &mut Nic,
        books: &mut Books,
    ) -> Result<(), CloseCause> {
        let (credits, content_bytes) = (self.credits.send(), content.len() as u32);
        let message = &mut books.message;
        message.clear();
        message.extend_from_slice(&Envelope { credits, content_bytes, ..envelope }.encode());
        message.extend_from_slice(content);
        books.counters.messages += 1;
        let refused = |refusal| CloseCause::Rdma(format!("a message was refused: {refusal}"));
        if message.len() <= self.queue_pair.inline_bytes() as usize {
            let request = Request::new(Work::Nothing.to_bits(), Operation::Send, Payload::Inline(message));
            return self.queue_pair.push(&request).map_err(refused);
        }
        let Some(slot) = nic.take_slot() else { return Err(CloseCause::Rdma("no slot for a message".to_owned())) };
        nic.fill_slot(slot, message);
        let Some(piece) = nic.slot_piece(slot, message.len()) else {
            return Err(CloseCause::Rdma(format!("a message of {} bytes does not fit a slot", message.len())));
        };
        let pieces = [piece];
        let request = Request::new(Work::Slot(slot).to_bits(), Operation::Send, Payload::Pieces(&pieces));
        let pushed = self.queue_pair.push(&request);
        if pushed.is_err() {
            nic.free_slot(slot);
        }
        pushed.map_err(refused)
    }

    /// Sends the next message of the record that is being sent.
    fn send_record(&mut self, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
        let Some(OutgoingRecord { mut envelope, record, at }) = self.sending.take() else { return Ok(()) };
        let end = record.len().min(at + self.message_bytes - ENVELOPE_BYTES);
        if at > 0 {
            envelope = Envelope::new(MessageKind::More, 0);
        }
        let last = end == record.len();
        self.send_message(Envelope { more: !last, ..envelope }, &record[at..end], nic, books)?;
        if last {
            books.spare(record);
        } else {
            self.sending = Some(OutgoingRecord { envelope, record, at: end });
        }
        Ok(())
    }

    /// Makes a record of the frame at the head of the queue; its payload is written, or lent to be fetched.
    fn prepare(&mut self, nic: &mut Nic, books: &mut Books) -> Result<Step, CloseCause> {
        let Some(mut frame) = self.frames.pop_front() else { return Ok(Step::Full) };
        self.extra_pieces -= frame.extra_pieces();
        let is_reply = matches!(frame.header.kind, Kind::Reply(_));
        let wanted_at = if is_reply { self.wanted_at.get(&frame.header.request) } else { None };
        let way = match frame.payload.take() {
            None => Way::None,
            Some(payload) => match choose(payload, wanted_at.map(Vec::as_slice), nic) {
                Ok(way) => way,
                Err(payload) => {
                    frame.payload = Some(payload);
                    self.put_back(frame);
                    return Ok(Step::Starved);
                }
            },
        };
        if let Way::Push(payload, places) = way {
            // As many as there can be, so that it waits at most once.
            if self.queue_pair.room() <= PUSH_WRITES {
                frame.payload = Some(payload);
                self.put_back(frame);
                return Ok(Step::Full);
            }
            if is_reply {
                self.wanted_at.remove(&frame.header.request);
            }
            self.state_checksum(&mut frame, payload.buffers.as_slice());
            self.push_payload(&payload, &places, nic)?;
            books.counters.pushed_bytes += payload.buffers.bytes() as u64;
            self.start_record(&frame, PayloadKind::Pushed, &[], (0, false), books);
            return Ok(Step::Ready);
        }
        if is_reply {
            self.wanted_at.remove(&frame.header.request);
        }
        match way {
            Way::None | Way::Push(..) => self.start_record(&frame, PayloadKind::None, &[], (0, false), books),
            Way::Eager(payload) => {
                self.state_checksum(&mut frame, payload.buffers.as_slice());
                self.start_record(&frame, PayloadKind::Eager, &[], (0, false), books);
                if let Some(sending) = &mut self.sending {
                    for buffer in payload.buffers.as_slice() {
                        let at = sending.record.len();
                        sending.record.resize(at + buffer.bytes(), 0);
                        buffer.copy_out(&mut sending.record[at..]);
                    }
                }
                books.events.extend(payload.hold.map(Event::Sent));
            }
            Way::Pull(payload, places) => {
                self.state_checksum(&mut frame, payload.buffers.as_slice());
                let token =
                    self.lent.insert(LentPayload { hold: payload.hold, pieces: payload.buffers, bounced: None });
                self.start_record(&frame, PayloadKind::Pull, &places, (token as u64, false), books);
            }
            Way::Bounce(payload, bounce) => {
                self.state_checksum(&mut frame, payload.buffers.as_slice());
                let pieces = payload.buffers;
                let token = self.lent.insert(LentPayload { hold: payload.hold, pieces, bounced: Some((bounce, 0)) });
                let (place, more) = self.bounce_part(token, nic, books);
                self.start_record(&frame, PayloadKind::Pull, &[place], (token as u64, more), books);
            }
        }
        Ok(Step::Ready)
    }

    fn put_back(&mut self, frame: Frame) {
        self.extra_pieces += frame.extra_pieces();
        self.frames.push_front(frame);
    }

    /// Fills in the checksum where it is announced and not there.
    fn state_checksum(&self, frame: &mut Frame, pieces: &[IoBuf]) {
        if frame.header.flags.has(FrameFlags::CHECKSUM) && frame.header.payload_checksum == 0 {
            frame.header.payload_checksum = pieces::sum(pieces);
        }
    }

    fn start_record(
        &mut self,
        frame: &Frame,
        payload: PayloadKind,
        sources: &[Place],
        (token, parts): (u64, bool),
        books: &mut Books,
    ) {
        let mut record = books.take_spare();
        for place in frame.offers.iter().chain(sources) {
            place.encode(&mut record);
        }
        record.extend_from_slice(&frame.header.encode());
        record.extend_from_slice(&frame.body);
        let envelope = Envelope {
            payload,
            parts,
            sources: sources.len() as u16,
            offers: frame.offers.len() as u16,
            ..Envelope::new(MessageKind::Frame, token)
        };
        self.sending = Some(OutgoingRecord { envelope, record, at: 0 });
    }

    /// Writes a payload to where it is wanted. The memory is registered and the queue has room.
    fn push_payload(&mut self, payload: &OutgoingPayload, places: &[Place], nic: &mut Nic) -> Result<(), CloseCause> {
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
                self.post(work, Operation::Write { to }, &parts, nic)?;
                done += bytes;
            }
        }
        Ok(())
    }

    /// Posts a request on memory that is registered.
    pub(super) fn post(
        &mut self,
        work: Work,
        operation: Operation,
        parts: &[IoBuf],
        nic: &Nic,
    ) -> Result<(), CloseCause> {
        let pieces: Option<Vec<Piece<'_>>> =
            parts.iter().map(|part| nic.memory.piece(part, part.bytes() as u32)).collect();
        let Some(pieces) = pieces else { return Err(CloseCause::Rdma("memory is not registered".to_owned())) };
        let request = Request::new(work.to_bits(), operation, Payload::Pieces(&pieces));
        self.queue_pair.push(&request).map_err(|refusal| CloseCause::Rdma(format!("a request was refused: {refusal}")))
    }

    /// Puts the next part of a lent payload into its bounce buffer; where it lies, and whether there are more.
    fn bounce_part(&mut self, token: usize, nic: &Nic, books: &mut Books) -> (Place, bool) {
        let lent = &mut self.lent[token];
        let total = lent.pieces.bytes();
        let (bounce, done) = lent.bounced.unwrap_or_default();
        let copied = pieces::copy(lent.pieces.as_slice(), done, &[nic.bounce(bounce)]);
        lent.bounced = Some((bounce, done + copied));
        books.counters.bounced_bytes += copied as u64;
        let (address, key) = nic.bounce_address(bounce);
        let place = Place { request: RequestId::default(), address, bytes: copied as u64, key };
        (place, done + copied < total)
    }

    /// The peer has fetched a payload, or a part of it.
    pub(super) fn pulled(&mut self, token: u64, nic: &mut Nic, books: &mut Books) -> Result<(), CloseCause> {
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
                    nic.free_bounce(bounce);
                }
                books.events.extend(self.lent.remove(index).hold.map(Event::Sent));
            }
        }
        Ok(())
    }
}

/// How a payload goes; gives it back when there is no bounce buffer for it now.
fn choose(payload: OutgoingPayload, wanted_at: Option<&[Place]>, nic: &mut Nic) -> Result<Way, OutgoingPayload> {
    let buffers = payload.buffers.as_slice();
    let bytes = payload.buffers.bytes();
    if bytes <= EAGER_BYTES {
        return Ok(Way::Eager(payload));
    }
    let registered = buffers.iter().all(|buffer| nic.memory.ensure(buffer.region()));
    if registered {
        let places = wanted_at.unwrap_or_default();
        let room: u64 = places.iter().map(|place| place.bytes).sum();
        let writes = places.len() + buffers.len().div_ceil(PIECES) + bytes.div_ceil(REQUEST_BYTES as usize);
        if room >= bytes as u64 && writes <= PUSH_WRITES {
            let places = places.to_vec();
            return Ok(Way::Push(payload, places));
        }
        if let Some(places) = sources(buffers, nic) {
            return Ok(Way::Pull(payload, places));
        }
    }
    match nic.take_bounce() {
        Some(bounce) => Ok(Way::Bounce(payload, bounce)),
        None => Err(payload),
    }
}

/// Where registered memory lies for a peer; none when it is in too many places.
fn sources(buffers: &[IoBuf], nic: &Nic) -> Option<Vec<Place>> {
    let mut places: Vec<Place> = Vec::new();
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
            places.push(Place { request: RequestId::default(), address, bytes, key });
        }
    }
    Some(places)
}

const _: () = assert!(BOUNCE_BYTES > EAGER_BYTES);
