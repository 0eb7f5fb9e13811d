//! Channel over a connection of the transfer engine's drivers: TCP or RDMA.
//!
//! A frame is sent as one payload, head first, from a ring of memory of our own, which bounds what is in flight; the
//! driver reports when a payload was sent, and its room is free again. The receiving side has memory for one frame: it
//! reads the next one when that is released, and until then the connection holds the peer back. Frames are numbered, so
//! that a gap ends the channel and is not delivered.

use std::collections::VecDeque;
use std::sync::Arc;

use kvplane_proto::RequestId;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_sys::{HugePages, IoBuf, Region, RegionOptions};
use kvplane_transport::{ConnectionId, Input, OutgoingPayload, Target};

use crate::network::{Network, Wire};
use crate::ring::{LINE_BYTES, Room};
use crate::shared::Taken;
use crate::{HEAD_BYTES, MeshError, PayloadPart};

/// A channel over a connection.
pub(crate) struct StreamedChannel {
    /// TCP connection that the channel lives with.
    pub(crate) control: ConnectionId,
    /// Connection of the frames.
    pub(crate) wire: Wire,
    connects: bool,
    checksum: bool,
    payload_limit: usize,
    outbox: Arc<Region>,
    room: Room,
    /// Payloads that the driver has, oldest first.
    sending: VecDeque<Sending>,
    /// Hold of the oldest of them.
    first_hold: u64,
    next_hold: u64,
    sent: u32,
    /// True since a send found no room; true if some was freed since then.
    wants_room: bool,
    has_more_room: bool,
    inbox: Arc<Region>,
    arrival: Arrival,
    received: u32,
    /// True if the connection may have input.
    input: bool,
}

/// A payload that the driver has.
#[derive(Clone, Copy)]
struct Sending {
    /// Position behind it.
    end: u64,
    /// True if the driver has reported it, but not one before it.
    sent: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// No frame.
    None,
    /// A frame of this many bytes is arriving, with this checksum.
    Partial { bytes: usize, checksum: Option<u64> },
    /// A frame of this many bytes is there.
    Complete { bytes: usize },
    /// The frame was taken and not released yet.
    Taken,
}

/// Settings of a channel over a connection.
pub(crate) struct StreamOptions {
    /// True if this process has connected.
    pub(crate) connects: bool,
    /// Send checksums with frames.
    pub(crate) checksum: bool,
    /// Longest payload.
    pub(crate) payload_limit: usize,
    /// Memory for frames that are being sent.
    pub(crate) capacity: usize,
    /// First number of the payloads' holds: none of another channel is in this process's use.
    pub(crate) first_hold: u64,
}

impl StreamedChannel {
    /// Creates a channel.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new(control: ConnectionId, wire: Wire, options: &StreamOptions) -> Result<Self, MeshError> {
        let memory = |bytes| {
            Region::allocate(&RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-mesh", bytes) })
        };
        Ok(Self {
            control,
            wire,
            connects: options.connects,
            checksum: options.checksum,
            payload_limit: options.payload_limit,
            outbox: memory(options.capacity)?,
            room: Room::new(options.capacity),
            sending: VecDeque::new(),
            first_hold: options.first_hold,
            next_hold: options.first_hold,
            sent: 0,
            wants_room: false,
            has_more_room: false,
            inbox: memory(HEAD_BYTES + options.payload_limit)?,
            arrival: Arrival::None,
            received: 0,
            input: true,
        })
    }

    /// Returns the memory that devices access.
    pub(crate) const fn memory(&self) -> [&Arc<Region>; 2] {
        [&self.outbox, &self.inbox]
    }

    /// Returns the number of the next hold.
    pub(crate) const fn next_hold(&self) -> u64 {
        self.next_hold
    }

    /// Queues a frame; returns false while there is no room for it.
    pub(crate) fn send(
        &mut self,
        network: &mut Network,
        head: &[u8; HEAD_BYTES],
        parts: &[PayloadPart<'_>],
        payload_bytes: usize,
    ) -> bool {
        let bytes = HEAD_BYTES + payload_bytes;
        let Some(place) = self.room.place(bytes.next_multiple_of(LINE_BYTES)) else {
            (self.wants_room, self.has_more_room) = (true, false);
            return false;
        };
        self.wants_room = false;
        self.outbox.copy_in(place.at, head);
        let mut to = place.at + HEAD_BYTES;
        for part in parts {
            Region::copy_between(&self.outbox, to, part.region, part.offset, part.bytes);
            to += part.bytes;
        }
        self.room.fill(&place);
        self.sending.push_back(Sending { end: place.end, sent: false });
        let kind = match self.connects {
            true => Kind::Request(Operation::MeshFrame),
            false => Kind::Reply(Operation::MeshFrame),
        };
        let header = Header::request(kind, RequestId { index: self.sent, generation: 0 });
        // Announced with value 0: the driver computes it.
        let header = header.with_payload(bytes as u64, self.checksum.then_some(0));
        self.sent = self.sent.wrapping_add(1);
        let buffers = IoBuf::new(Arc::clone(&self.outbox), place.at, bytes).into();
        // If the connection is gone, its end was reported or will be.
        network.send(self.wire, &header, OutgoingPayload { buffers, hold: Some(self.next_hold) });
        self.next_hold += 1;
        true
    }

    /// Notes that the payload with this hold was sent. One of a former channel of the peer has no effect.
    pub(crate) fn take_sent(&mut self, hold: u64) {
        let index = hold.checked_sub(self.first_hold).map_or(usize::MAX, |index| index as usize);
        if let Some(sending) = self.sending.get_mut(index) {
            sending.sent = true;
        }
        // Reads of an RDMA peer may end in another order.
        while let Some(Sending { end, sent: true }) = self.sending.front().copied() {
            self.sending.pop_front();
            self.first_hold += 1;
            self.room.free_to(end);
            self.has_more_room = true;
        }
    }

    /// Notes that the connection may have input.
    pub(crate) const fn note_input(&mut self) {
        self.input = true;
    }

    /// Returns true if [`Self::take`] may find a frame, or a send that found no room may find some.
    pub(crate) const fn is_ready(&self) -> bool {
        if self.wants_room && self.has_more_room {
            return true;
        }
        match self.arrival {
            Arrival::Complete { .. } => true,
            Arrival::None | Arrival::Partial { .. } => self.input,
            Arrival::Taken => false,
        }
    }

    /// Takes the next frame, which lies in memory of this channel until it is released.
    ///
    /// # Errors
    /// When the peer has sent what is no next frame; the text says what.
    pub(crate) fn take(&mut self, network: &mut Network) -> Result<Option<Taken>, String> {
        while self.input && matches!(self.arrival, Arrival::None | Arrival::Partial { .. }) {
            self.arrive(network)?;
        }
        let Arrival::Complete { bytes } = self.arrival else { return Ok(None) };
        self.arrival = Arrival::Taken;
        let mut head = [0; HEAD_BYTES];
        self.inbox.copy_out(0, &mut head);
        let payload = IoBuf::new(Arc::clone(&self.inbox), HEAD_BYTES, bytes - HEAD_BYTES);
        Ok(Some(Taken { head, payload, end: 0 }))
    }

    fn arrive(&mut self, network: &mut Network) -> Result<(), String> {
        match (network.input(self.wire), self.arrival) {
            (Input::Wait, _) => self.input = false,
            (Input::Frame(header), Arrival::None) => {
                let bytes = self.check(&header)?;
                self.received = self.received.wrapping_add(1);
                self.arrival = Arrival::Partial { bytes, checksum: header.checksum() };
                let buffer = IoBuf::new(Arc::clone(&self.inbox), 0, bytes);
                let target = Target::Memory { buffer, checksum: header.checksum().is_some() };
                network.receive_payload(self.wire, target);
            }
            (Input::Payload(computed), Arrival::Partial { bytes, checksum }) => {
                if checksum.is_some() && computed != checksum {
                    return Err("the bytes of a frame do not match their checksum".to_owned());
                }
                self.arrival = Arrival::Complete { bytes };
            }
            (Input::Frame(_) | Input::Payload(_), _) => {
                return Err("a frame arrived within another one".to_owned());
            }
        }
        Ok(())
    }

    /// Returns the bytes of the next frame.
    fn check(&self, header: &Header) -> Result<usize, String> {
        let kind = match self.connects {
            true => Kind::Reply(Operation::MeshFrame),
            false => Kind::Request(Operation::MeshFrame),
        };
        if header.kind != kind || header.request.index != self.received {
            let (found, number, expected) = (header.kind, header.request.index, self.received);
            return Err(format!("{found:?} {number} arrived where frame {expected} is next"));
        }
        let fits = |bytes: &usize| (HEAD_BYTES..=HEAD_BYTES + self.payload_limit).contains(bytes);
        let bytes = usize::try_from(header.payload_bytes).ok().filter(fits);
        bytes.ok_or_else(|| format!("a frame of {} bytes arrived", header.payload_bytes))
    }

    /// Releases the frame that was taken: its memory is used for the next one.
    pub(crate) fn release(&mut self) {
        self.arrival = Arrival::None;
        self.input = true;
    }
}
