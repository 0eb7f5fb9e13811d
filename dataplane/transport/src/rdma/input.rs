//! Frames arrive: records are put together, checked, and given to the host with their payloads.

use kvplane_proto::Limits;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_proto::message::Kind;
use kvplane_sys::IoBuf;

use super::link::{ArrivedPayload, Expect, Link, Pull, State};
use super::nic::Nic;
use super::pieces;
use super::wire::{EAGER_BYTES, ENVELOPE_BYTES, Envelope, MessageKind, PLACE_BYTES, PayloadKind, Place, RECORD_BYTES};
use super::{Books, Rdma};
use crate::types::{CloseCause, ConnectionId, Input, Target};

impl Rdma {
    /// The next input of a connection. A frame's body replaces `scratch`. After a frame with a payload, the host calls
    /// [`Self::receive_payload`] before it asks again.
    pub fn input(&mut self, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let Some((link, nic, books)) = self.parts(id) else { return Input::Wait };
        if link.state != State::Open || link.closing_after_send.is_some() {
            return Input::Wait;
        }
        match &link.expect {
            Expect::Decision { .. } | Expect::Pull(_) => return Input::Wait,
            Expect::Done(checksum) => {
                let checksum = *checksum;
                link.expect = Expect::Frame;
                return Input::Payload(checksum);
            }
            Expect::Frame if link.backlog() >= Limits::REPLIES_QUEUED => {
                link.paused = true;
                return Input::Wait;
            }
            Expect::Frame => {}
        }
        let taken = link.take_frame(nic, books, scratch);
        // Receives were given back.
        self.mark_dirty(id.index);
        match taken {
            Ok(Some(header)) => Input::Frame(header),
            Ok(None) => Input::Wait,
            Err(why) => {
                self.close(id, why);
                Input::Wait
            }
        }
    }

    /// Says where the payload of the last frame goes. Then [`Self::input`] brings it.
    ///
    /// # Panics
    /// When no payload is awaited or the memory is not of its length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: Target) {
        let Some((link, _, _)) = self.parts(id) else { return };
        let Expect::Decision { arrived, bytes } = core::mem::replace(&mut link.expect, Expect::Frame) else {
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
        link.expect = match arrived {
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
            ArrivedPayload::Pull { token, sources, parts } => {
                Expect::Pull(Pull::new((token, sources, parts), bytes, places, checksum))
            }
        };
        let fetches = matches!(link.expect, Expect::Pull(_));
        if fetches {
            self.mark_dirty(id.index);
        }
        self.mark_ready(id.index);
    }
}

fn summed(checksum: bool, places: Option<&[IoBuf]>) -> Option<u64> {
    places.filter(|_| checksum).map(pieces::sum)
}

impl Link {
    /// The next frame, if it is there as a whole.
    fn take_frame(
        &mut self,
        nic: &mut Nic,
        books: &mut Books,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<Header>, CloseCause> {
        while let Some((envelope, receive)) = self.inbox.pop_front() {
            let bytes = ENVELOPE_BYTES + envelope.content_bytes as usize;
            nic.read_receive(receive, bytes, &mut books.message);
            nic.repost(receive);
            self.credits.reposted();
            let content = &books.message[ENVELOPE_BYTES..];
            let began = match (self.began.take(), envelope.kind) {
                (None, MessageKind::Frame) => envelope,
                (Some(began), MessageKind::More) => began,
                _ => return Err(broken("a record that goes on came without its beginning")),
            };
            if self.assembly.is_empty() && !envelope.more {
                let content = core::mem::take(&mut books.message);
                let header = self.take_record(&began, &content[ENVELOPE_BYTES..], scratch);
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
            return self.take_record(&began, &record, scratch).map(Some);
        }
        Ok(None)
    }

    fn take_record(&mut self, envelope: &Envelope, record: &[u8], scratch: &mut Vec<u8>) -> Result<Header, CloseCause> {
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
        for place in Place::decode_all(offers).map_err(|error| broken(&error.to_string()))? {
            self.wanted_at.entry(place.request).or_default().push(place);
        }
        if self.wanted_at.len() > Limits::REQUESTS_PER_CONNECTION {
            return Err(broken("the peer offers memory for more answers than it may ask for"));
        }
        let offered = match header.kind {
            Kind::Reply(_) => self.offered.remove(&header.request),
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
                ArrivedPayload::Pull { token: envelope.token, sources: sources.into(), parts: envelope.parts }
            }
            _ => return Err(broken("a payload does not come as its frame says")),
        };
        self.expect = Expect::Decision { arrived, bytes };
        Ok(header)
    }
}

fn broken(why: &str) -> CloseCause {
    CloseCause::Rdma(format!("the peer broke the protocol: {why}"))
}
