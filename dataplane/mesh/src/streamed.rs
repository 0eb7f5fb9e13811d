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

use crate::error::ChannelError;
use crate::network::{Network, Wire};
use crate::ring::{LINE_BYTES, Room};
use crate::shared::TakenFrame;
use crate::{HEAD_BYTES, MeshError, PayloadPart};

/// A channel over a connection.
pub(crate) struct StreamedChannel {
    /// TCP connection that the channel lives with.
    pub(crate) control: ConnectionId,
    /// Connection of the frames.
    pub(crate) wire: Wire,
    connects: bool,
    checksum: bool,
    outbox: Outbox,
    inbox: Inbox,
}

/// Frames that are being sent.
struct Outbox {
    region: Arc<Region>,
    room: Room,
    /// Payloads that the driver has, oldest first.
    sending: VecDeque<Sending>,
    /// Hold of the oldest of them.
    first_hold: u64,
    next_hold: u64,
    /// Number of the next frame.
    next: u32,
    /// True since a send found no room; true if some was freed since then.
    wants_room: bool,
    has_more_room: bool,
}

/// The frame that is being received.
struct Inbox {
    region: Arc<Region>,
    payload_limit: usize,
    arrival: Arrival,
    /// Number of the next frame.
    next: u32,
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
            outbox: Outbox {
                region: memory(options.capacity)?,
                room: Room::new(options.capacity),
                sending: VecDeque::new(),
                first_hold: options.first_hold,
                next_hold: options.first_hold,
                next: 0,
                wants_room: false,
                has_more_room: false,
            },
            inbox: Inbox {
                region: memory(HEAD_BYTES + options.payload_limit)?,
                payload_limit: options.payload_limit,
                arrival: Arrival::None,
                next: 0,
                input: true,
            },
        })
    }

    /// Returns the memory that devices access.
    pub(crate) const fn memory(&self) -> [&Arc<Region>; 2] {
        [&self.outbox.region, &self.inbox.region]
    }

    /// Returns the number of the next hold.
    pub(crate) const fn next_hold(&self) -> u64 {
        self.outbox.next_hold
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
        let outbox = &mut self.outbox;
        let Some(place) = outbox.room.place(bytes.next_multiple_of(LINE_BYTES)) else {
            (outbox.wants_room, outbox.has_more_room) = (true, false);
            return false;
        };
        outbox.wants_room = false;
        outbox.region.copy_in(place.at, head);
        let mut to = place.at + HEAD_BYTES;
        for part in parts {
            Region::copy_between(&outbox.region, to, part.region, part.offset, part.bytes);
            to += part.bytes;
        }
        outbox.room.fill(&place);
        outbox.sending.push_back(Sending { end: place.end, sent: false });
        let kind = match self.connects {
            true => Kind::Request(Operation::MeshFrame),
            false => Kind::Reply(Operation::MeshFrame),
        };
        let header = Header::request(kind, RequestId { index: outbox.next, generation: 0 });
        // Announced with value 0: the driver computes it.
        let header = header.with_payload(bytes as u64, self.checksum.then_some(0));
        outbox.next = outbox.next.wrapping_add(1);
        let buffers = IoBuf::new(Arc::clone(&outbox.region), place.at, bytes).into();
        // If the connection is gone, its end was reported or will be.
        network.send(self.wire, &header, OutgoingPayload { buffers, hold: Some(outbox.next_hold) });
        outbox.next_hold += 1;
        true
    }

    /// Notes that the payload with this hold was sent. One of a former channel of the peer has no effect.
    pub(crate) fn take_sent(&mut self, hold: u64) {
        let outbox = &mut self.outbox;
        let index = hold.checked_sub(outbox.first_hold).map_or(usize::MAX, |index| index as usize);
        if let Some(sending) = outbox.sending.get_mut(index) {
            sending.sent = true;
        }
        // Reads of an RDMA peer may end in another order.
        while let Some(Sending { end, sent: true }) = outbox.sending.front().copied() {
            outbox.sending.pop_front();
            outbox.first_hold += 1;
            outbox.room.free_to(end);
            outbox.has_more_room = true;
        }
    }

    /// Notes that the connection may have input.
    pub(crate) const fn note_input(&mut self) {
        self.inbox.input = true;
    }

    /// Returns true if [`Self::take`] may find a frame, or a send that found no room may find some.
    pub(crate) const fn is_ready(&self) -> bool {
        if self.outbox.wants_room && self.outbox.has_more_room {
            return true;
        }
        match self.inbox.arrival {
            Arrival::Complete { .. } => true,
            Arrival::None | Arrival::Partial { .. } => self.inbox.input,
            Arrival::Taken => false,
        }
    }

    /// Takes the next frame, which lies in memory of this channel until it is released.
    ///
    /// # Errors
    /// When the peer has sent what is no next frame.
    pub(crate) fn take(&mut self, network: &mut Network) -> Result<Option<TakenFrame>, ChannelError> {
        while self.inbox.input && matches!(self.inbox.arrival, Arrival::None | Arrival::Partial { .. }) {
            self.arrive(network)?;
        }
        let Arrival::Complete { bytes } = self.inbox.arrival else { return Ok(None) };
        self.inbox.arrival = Arrival::Taken;
        let mut head = [0; HEAD_BYTES];
        self.inbox.region.copy_out(0, &mut head);
        let payload = IoBuf::new(Arc::clone(&self.inbox.region), HEAD_BYTES, bytes - HEAD_BYTES);
        Ok(Some(TakenFrame { head, payload, end: 0 }))
    }

    fn arrive(&mut self, network: &mut Network) -> Result<(), ChannelError> {
        match (network.input(self.wire), self.inbox.arrival) {
            (Input::Wait, _) => self.inbox.input = false,
            (Input::Frame(header), Arrival::None) => {
                let bytes = self.check(&header)?;
                self.inbox.next = self.inbox.next.wrapping_add(1);
                self.inbox.arrival = Arrival::Partial { bytes, checksum: header.checksum() };
                let buffer = IoBuf::new(Arc::clone(&self.inbox.region), 0, bytes);
                let target = Target::Memory { buffer, checksum: header.checksum().is_some() };
                network.receive_payload(self.wire, target);
            }
            (Input::Payload(computed), Arrival::Partial { bytes, checksum }) => {
                if checksum.is_some() && computed != checksum {
                    return Err(ChannelError::Checksum { number: self.inbox.next.wrapping_sub(1) });
                }
                self.inbox.arrival = Arrival::Complete { bytes };
            }
            (Input::Frame(_) | Input::Payload(_), _) => {
                return Err(ChannelError::Nested { number: self.inbox.next.wrapping_sub(1) });
            }
        }
        Ok(())
    }

    /// Returns the bytes of the next frame.
    fn check(&self, header: &Header) -> Result<usize, ChannelError> {
        let kind = match self.connects {
            true => Kind::Reply(Operation::MeshFrame),
            false => Kind::Request(Operation::MeshFrame),
        };
        if header.kind != kind || header.request.index != self.inbox.next {
            let (number, expected) = (header.request.index, self.inbox.next);
            return Err(ChannelError::Order { kind: header.kind, number, expected });
        }
        let fits = |bytes: &usize| (HEAD_BYTES..=HEAD_BYTES + self.inbox.payload_limit).contains(bytes);
        let bytes = usize::try_from(header.payload_bytes).ok().filter(fits);
        bytes.ok_or(ChannelError::Length { bytes: header.payload_bytes })
    }

    /// Releases the frame that was taken: its memory is used for the next one.
    pub(crate) fn release(&mut self) {
        self.inbox.arrival = Arrival::None;
        self.inbox.input = true;
    }
}
