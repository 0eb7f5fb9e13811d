//! Frames arrive: records are put together, checked, and given to the host with their payloads.

use std::collections::VecDeque;

use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_proto::message::Kind;
use kvplane_sys::IoBuf;

use super::answer_places::AnswerPlaces;
use super::credits::Credits;
use super::outbox::{Control, Outbox};
use super::pull::{Pull, PullSource};
use super::send_queue::SendQueue;
use crate::rdma::books::Books;
use crate::rdma::nic::Nic;
use crate::rdma::pieces;
use crate::rdma::wire::{
    EAGER_BYTES, ENVELOPE_BYTES, Envelope, MessageKind, PLACE_BYTES, PayloadKind, Place, RECORD_BYTES,
};
use crate::types::checksum_of_pieces;
use crate::types::{CloseCause, Pieces, Target};

/// The payload of a frame that the host has seen.
enum ArrivedPayload {
    /// It came along.
    Eager(Vec<u8>),
    /// It was written here.
    Pushed(Pieces),
    /// It waits there.
    Pull(PullSource),
}

/// What arrives next.
enum Expect {
    /// A frame.
    Frame,
    /// The host has a frame and will say where its payload goes.
    Decision { arrived: ArrivedPayload, bytes: u64 },
    /// A payload is being fetched.
    Pull(Pull),
    /// A payload is in place.
    Done(Option<u64>),
}

/// What the host can have next.
pub(in crate::rdma) enum Next {
    /// A frame, if one is there as a whole.
    Frame,
    /// The payload of the last frame: it is in place, and sums to this.
    Payload(Option<u64>),
    /// Nothing before something else happens.
    Wait,
}

/// What arrives on a link.
pub(in crate::rdma) struct Intake {
    /// Messages that were not taken, and the receives that they are in.
    messages: VecDeque<(Envelope, u32)>,
    /// A record that is not complete, and how it began.
    assembly: Vec<u8>,
    began: Option<Envelope>,
    expect: Expect,
    /// Answers that are outstanding.
    awaited: u64,
    /// Input is not taken because too many answers wait to be sent.
    paused: bool,
}

impl Intake {
    pub(super) const fn new() -> Self {
        Self {
            messages: VecDeque::new(),
            assembly: Vec::new(),
            began: None,
            expect: Expect::Frame,
            awaited: 0,
            paused: false,
        }
    }

    /// A message with a record, or a part of one, has come into this receive.
    pub(in crate::rdma) fn push(&mut self, envelope: Envelope, receive: u32) {
        self.messages.push_back((envelope, receive));
    }

    /// So many more answers will come.
    pub(super) const fn awaits(&mut self, answers: u64) {
        self.awaited += answers;
    }

    /// Whether nothing is under way on it.
    pub(super) fn is_idle(&self) -> bool {
        self.awaited == 0 && self.messages.is_empty() && self.began.is_none() && matches!(self.expect, Expect::Frame)
    }

    /// Whether a payload is in place that was not given to the host.
    pub(super) const fn has_payload(&self) -> bool {
        matches!(self.expect, Expect::Done(_))
    }

    /// What the host can have next; `full` says that too many answers wait to be sent.
    pub(super) fn next(&mut self, full: bool) -> Next {
        match &self.expect {
            Expect::Decision { .. } | Expect::Pull(_) => Next::Wait,
            Expect::Done(checksum) => {
                let checksum = *checksum;
                self.expect = Expect::Frame;
                Next::Payload(checksum)
            }
            Expect::Frame if full => {
                self.paused = true;
                Next::Wait
            }
            Expect::Frame => Next::Frame,
        }
    }

    /// Takes input again that was not taken, if so few answers wait now. Whether it does.
    pub(super) const fn resume(&mut self, few: bool) -> bool {
        let resumes = self.paused && few;
        self.paused &= !resumes;
        resumes
    }

    /// Says where the payload of the last frame goes. Whether it must be fetched first.
    ///
    /// # Panics
    /// When no payload is awaited or the memory is not of its length.
    pub(in crate::rdma) fn place_payload(&mut self, target: Target) -> bool {
        let Expect::Decision { arrived, bytes } = core::mem::replace(&mut self.expect, Expect::Frame) else {
            panic!("a payload's place was given where none is awaited");
        };
        let (places, checksum) = match target {
            Target::Discard => (None, false),
            Target::Memory { buffer, checksum } => (Some(vec![buffer]), checksum),
            Target::Scatter { buffers, checksum } => (Some(buffers), checksum),
        };
        if let Some(places) = &places {
            let room: u64 = places.iter().map(|place| place.bytes() as u64).sum();
            assert_eq!(room, bytes, "memory of another length than the payload's");
        }
        self.expect = match arrived {
            ArrivedPayload::Eager(payload) => {
                if let Some(places) = &places {
                    pieces::put(&payload, places);
                }
                Expect::Done(summed(checksum, places.as_deref()))
            }
            ArrivedPayload::Pushed(offered) => {
                if let Some(places) = &places
                    && let Some(written) = pieces::front(offered.as_slice(), bytes)
                    && !pieces::same(&written, places)
                {
                    pieces::copy(&written, 0, places);
                }
                Expect::Done(summed(checksum, places.as_deref()))
            }
            ArrivedPayload::Pull(source) => Expect::Pull(Pull::new(source, bytes, places, checksum)),
        };
        matches!(self.expect, Expect::Pull(_))
    }

    /// Goes on with the payload that is being fetched. Whether it waits for a bounce buffer.
    pub(super) fn fetch(
        &mut self,
        sends: &mut SendQueue,
        outbox: &mut Outbox,
        nic: &mut Nic,
    ) -> Result<bool, CloseCause> {
        let Expect::Pull(pull) = &mut self.expect else { return Ok(false) };
        let result = pull.fetch(sends, outbox, nic);
        if pull.is_done() {
            outbox.push_control(Control::Pulled(pull.token()));
            self.expect = Expect::Done(pull.checksum());
        }
        result
    }

    /// A read of the payload is over.
    pub(in crate::rdma) fn fetched(&mut self, success: bool, nic: &mut Nic) {
        if let Expect::Pull(pull) = &mut self.expect {
            pull.fetched(success, nic);
        }
    }

    /// The next part of a payload is there to be fetched.
    pub(in crate::rdma) fn next_part(&mut self, token: u64, places: Vec<Place>, more: bool) -> Result<(), CloseCause> {
        match &mut self.expect {
            Expect::Pull(pull) if pull.awaits_part(token) => pull.next_part(places, more),
            _ => Err(CloseCause::Rdma(format!("a part of payload {token} came that was not asked for"))),
        }
    }

    /// The device holds nothing of it any more: gives its receives back.
    pub(super) fn end(self, nic: &mut Nic) {
        for (_, receive) in self.messages {
            nic.receives.repost(receive);
        }
        if let Expect::Pull(pull) = self.expect {
            pull.end(nic);
        }
    }

    /// The next frame, if it is there as a whole.
    pub(super) fn take_frame(
        &mut self,
        credits: &mut Credits,
        places: &mut AnswerPlaces,
        nic: &mut Nic,
        books: &mut Books,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<Header>, CloseCause> {
        while let Some((envelope, receive)) = self.messages.pop_front() {
            let bytes = ENVELOPE_BYTES + envelope.content_bytes as usize;
            nic.arena.read_receive(receive, bytes, &mut books.message);
            nic.receives.repost(receive);
            credits.reposted();
            let content = &books.message[ENVELOPE_BYTES..];
            let began = match (self.began.take(), envelope.kind) {
                (None, MessageKind::Frame) => envelope,
                (Some(began), MessageKind::More) => began,
                _ => return Err(broken("a record that goes on came without its beginning")),
            };
            if self.assembly.is_empty() && !envelope.more {
                let content = core::mem::take(&mut books.message);
                let header = self.take_record(&began, &content[ENVELOPE_BYTES..], places, scratch);
                books.message = content;
                return header.map(Some);
            }
            if self.assembly.len() + content.len() > RECORD_BYTES {
                return Err(broken("a record is longer than any may be"));
            }
            self.assembly.extend_from_slice(content);
            if envelope.more {
                self.began = Some(began);
                continue;
            }
            let record = core::mem::take(&mut self.assembly);
            return self.take_record(&began, &record, places, scratch).map(Some);
        }
        Ok(None)
    }

    fn take_record(
        &mut self,
        envelope: &Envelope,
        record: &[u8],
        answers: &mut AnswerPlaces,
        scratch: &mut Vec<u8>,
    ) -> Result<Header, CloseCause> {
        let short = || broken("a record is shorter than it says");
        let (places, rest) = record.split_at_checked(envelope.places_bytes()).ok_or_else(short)?;
        let (offers, sources) = places.split_at(usize::from(envelope.offers) * PLACE_BYTES);
        let (header, rest) = rest.split_first_chunk::<HEADER_BYTES>().ok_or_else(short)?;
        let header = Header::decode(header).map_err(CloseCause::Frame)?;
        let (body, payload) = rest.split_at_checked(header.body_bytes as usize).ok_or_else(short)?;
        header.check_body(body).map_err(CloseCause::Frame)?;
        scratch.clear();
        scratch.extend_from_slice(body);
        self.awaited = self.awaited.saturating_sub(1);
        let offers = Place::decode_all(offers).map_err(|error| broken(&error.to_string()))?;
        if !answers.learn(offers) {
            return Err(broken("the peer offers memory for more answers than it may ask for"));
        }
        let offered = match header.kind {
            Kind::Reply(_) => answers.take_offered(header.request),
            Kind::Request(_) => None,
        };
        let eager = if envelope.payload == PayloadKind::Eager { header.payload_bytes } else { 0 };
        if eager != payload.len() as u64 || eager > EAGER_BYTES as u64 {
            return Err(broken("a payload is not as long as its frame says"));
        }
        let sources = Place::decode_all(sources).map_err(|error| broken(&error.to_string()))?;
        let stated: u64 = sources.iter().map(|place| place.bytes).fold(0, u64::saturating_add);
        let bytes = header.payload_bytes;
        let arrived = match envelope.payload {
            PayloadKind::None if bytes == 0 => return Ok(header),
            PayloadKind::Eager if bytes > 0 => ArrivedPayload::Eager(payload.to_vec()),
            PayloadKind::Pushed => match offered.filter(|offered| bytes > 0 && offered.bytes() as u64 >= bytes) {
                Some(offered) => ArrivedPayload::Pushed(offered),
                None => return Err(broken("a payload was written where nothing was offered")),
            },
            PayloadKind::Pull if stated == bytes && !envelope.parts || stated < bytes && envelope.parts => {
                let (token, parts) = (envelope.token, envelope.parts);
                ArrivedPayload::Pull(PullSource { token, places: sources.into(), parts })
            }
            _ => return Err(broken("a payload does not come as its frame says")),
        };
        self.expect = Expect::Decision { arrived, bytes };
        Ok(header)
    }
}

fn summed(checksum: bool, places: Option<&[IoBuf]>) -> Option<u64> {
    places.filter(|_| checksum).map(checksum_of_pieces)
}

fn broken(why: &str) -> CloseCause {
    CloseCause::Rdma(format!("the peer broke the protocol: {why}"))
}
