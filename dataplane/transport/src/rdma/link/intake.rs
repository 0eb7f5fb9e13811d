//! Receive path of a link: reassembles and checks records, and delivers frames with their payloads to the host.

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
    EAGER_BYTES, ENVELOPE_BYTES, Envelope, MessageKind, PLACE_BYTES, PayloadKind, RECORD_BYTES, RemoteRange,
};
use crate::types::checksum_of_pieces;
use crate::types::{CloseCause, Pieces, Target};

/// Payload of a frame that was delivered to the host.
enum ArrivedPayload {
    /// Arrived within the record.
    Eager(Vec<u8>),
    /// Written by the peer into memory that we offered.
    Pushed(Pieces),
    /// To be read from the peer's memory.
    Pull(PullSource),
}

/// Expected input.
enum Expect {
    /// A frame.
    Frame,
    /// A frame was delivered to the host, which has to name the destination of its payload.
    Decision { arrived: ArrivedPayload, bytes: u64 },
    /// A payload is being read from the peer.
    Pull(Pull),
    /// A payload is at its destination, with this checksum.
    Done(Option<u64>),
}

/// Next input for the host.
pub(in crate::rdma) enum Next {
    /// A frame, if one has arrived completely.
    Frame,
    /// The payload of the last frame is at its destination; its checksum, if requested.
    Payload(Option<u64>),
    /// None until something else happens.
    Wait,
}

/// Receive state of a link.
pub(in crate::rdma) struct Intake {
    /// Received messages that were not handled yet, with the receives that hold them.
    messages: VecDeque<(Envelope, u32)>,
    /// An incomplete record, and the envelope of its first message.
    assembly: Vec<u8>,
    began: Option<Envelope>,
    expect: Expect,
    /// Number of outstanding answers.
    awaited: u64,
    /// True while input is not taken because too many answers wait to be sent (backpressure).
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

    /// Queues a received message with a record or a part of one.
    pub(in crate::rdma) fn push(&mut self, envelope: Envelope, receive: u32) {
        self.messages.push_back((envelope, receive));
    }

    /// Adds expected answers.
    pub(super) const fn awaits(&mut self, answers: u64) {
        self.awaited += answers;
    }

    /// Returns true if no input is expected, queued or incomplete.
    pub(super) fn is_idle(&self) -> bool {
        self.awaited == 0 && self.messages.is_empty() && self.began.is_none() && matches!(self.expect, Expect::Frame)
    }

    /// Returns true if a payload has arrived that was not delivered to the host.
    pub(super) const fn has_payload(&self) -> bool {
        matches!(self.expect, Expect::Done(_))
    }

    /// Returns the next input for the host; `full` means that too many answers wait to be sent.
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

    /// Resumes paused input if `few` answers wait now. Returns true if it resumed.
    #[inline]
    pub(super) const fn resume(&mut self, few: bool) -> bool {
        let resumes = self.paused && few;
        self.paused &= !resumes;
        resumes
    }

    /// Sets the destination of the payload of the last frame. Returns true if the payload has to be read from the peer
    /// first.
    ///
    /// # Panics
    /// When no payload is expected or the memory does not have its length.
    pub(in crate::rdma) fn place_payload(&mut self, target: Target) -> bool {
        let Expect::Decision { arrived, bytes } = core::mem::replace(&mut self.expect, Expect::Frame) else {
            panic!("a payload destination was set although no payload is expected");
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

    /// Continues to read the current payload. Returns true if it waits for a bounce buffer.
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

    /// Handles the completion of a read of the payload.
    pub(in crate::rdma) fn fetched(&mut self, success: bool, nic: &mut Nic) {
        if let Expect::Pull(pull) = &mut self.expect {
            pull.fetched(success, nic);
        }
    }

    /// Handles the announcement of a payload's next part.
    pub(in crate::rdma) fn next_part(
        &mut self,
        token: u64,
        places: Vec<RemoteRange>,
        more: bool,
    ) -> Result<(), CloseCause> {
        match &mut self.expect {
            Expect::Pull(pull) if pull.awaits_part(token) => pull.next_part(places, more),
            _ => Err(CloseCause::Rdma(format!("a part of payload {token} arrived that was not requested"))),
        }
    }

    /// Ends the receive path when the device holds none of the link's requests any more: releases its receives.
    pub(super) fn end(self, nic: &mut Nic) {
        for (_, receive) in self.messages {
            nic.receives.repost(receive);
        }
        if let Expect::Pull(pull) = self.expect {
            pull.end(nic);
        }
    }

    /// Returns the next frame, if it has arrived completely.
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
                _ => return Err(broken("a record was continued before it was started")),
            };
            if self.assembly.is_empty() && !envelope.more {
                let content = core::mem::take(&mut books.message);
                let header = self.take_record(&began, &content[ENVELOPE_BYTES..], places, scratch);
                books.message = content;
                return header.map(Some);
            }
            if self.assembly.len() + content.len() > RECORD_BYTES {
                return Err(broken("a record exceeds the size limit"));
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
        let short = || broken("a record is shorter than its header states");
        let (places, rest) = record.split_at_checked(envelope.places_bytes()).ok_or_else(short)?;
        let (offers, sources) = places.split_at(usize::from(envelope.offers) * PLACE_BYTES);
        let (header, rest) = rest.split_first_chunk::<HEADER_BYTES>().ok_or_else(short)?;
        let header = Header::decode(header).map_err(CloseCause::Frame)?;
        let (body, payload) = rest.split_at_checked(header.body_bytes as usize).ok_or_else(short)?;
        header.check_body(body).map_err(CloseCause::Frame)?;
        scratch.clear();
        scratch.extend_from_slice(body);
        self.awaited = self.awaited.saturating_sub(1);
        let offers = RemoteRange::decode_all(offers).map_err(|error| broken(&error.to_string()))?;
        if !answers.learn(offers) {
            return Err(broken("the peer offers memory for more answers than it may request"));
        }
        let offered = match header.kind {
            Kind::Reply(_) => answers.take_offered(header.request),
            Kind::Request(_) => None,
        };
        let eager = if envelope.payload == PayloadKind::Eager { header.payload_bytes } else { 0 };
        if eager != payload.len() as u64 || eager > EAGER_BYTES as u64 {
            return Err(broken("a payload does not have the length that its frame states"));
        }
        let sources = RemoteRange::decode_all(sources).map_err(|error| broken(&error.to_string()))?;
        let stated: u64 = sources.iter().map(|place| place.bytes).fold(0, u64::saturating_add);
        let bytes = header.payload_bytes;
        let arrived = match envelope.payload {
            PayloadKind::None if bytes == 0 => return Ok(header),
            PayloadKind::Eager if bytes > 0 => ArrivedPayload::Eager(payload.to_vec()),
            PayloadKind::Pushed => match offered.filter(|offered| bytes > 0 && offered.bytes() as u64 >= bytes) {
                Some(offered) => ArrivedPayload::Pushed(offered),
                None => return Err(broken("a payload was written although no memory was offered")),
            },
            PayloadKind::Pull if stated == bytes && !envelope.parts || stated < bytes && envelope.parts => {
                let (token, parts) = (envelope.token, envelope.parts);
                ArrivedPayload::Pull(PullSource { token, places: sources.into(), parts })
            }
            _ => return Err(broken("a payload does not arrive in the way that its frame states")),
        };
        self.expect = Expect::Decision { arrived, bytes };
        Ok(header)
    }
}

fn summed(checksum: bool, places: Option<&[IoBuf]>) -> Option<u64> {
    places.filter(|_| checksum).map(checksum_of_pieces)
}

fn broken(why: &str) -> CloseCause {
    CloseCause::Rdma(format!("the peer violated the protocol: {why}"))
}
