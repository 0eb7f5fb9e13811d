//! One TCP connection's buffers and what is in flight on them.

use std::collections::VecDeque;
use std::net::TcpStream;

use kvplane_proto::Limits;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_sys::{HugePages, IoBuf, Region, RegionOptions};

use crate::types::{Gone, Outgoing};

/// Staging for arriving headers and bodies: the largest frame without payload, and room for small payloads.
pub(super) const RECEIVE_STAGING_BYTES: usize = 256 * 1024;
/// Staging for leaving headers and bodies.
pub(super) const SEND_STAGING_BYTES: usize = 256 * 1024;

const _: () = assert!(RECEIVE_STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);
const _: () = assert!(SEND_STAGING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Connecting,
    Open,
    Closing,
}

/// What the bytes that arrive next are.
#[allow(
    clippy::large_enum_variant,
    reason = "one for each connection, changed with every payload: a box would cost more"
)]
pub(super) enum Expect {
    /// Headers and bodies, into the staging.
    Frame,
    /// The host has a frame and will say where its payload goes.
    Decision { payload_bytes: u64 },
    /// A payload on its way.
    Payload(Payload),
}

pub(super) struct Payload {
    /// What is left of the memory; `None` when the bytes are thrown away.
    pub(super) buffers: Option<VecDeque<IoBuf>>,
    pub(super) left_bytes: u64,
    pub(super) checksum: Option<PayloadChecksum>,
}

/// A frame that waits to be sent.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Option<Outgoing>,
}

/// A piece of the send in flight.
pub(super) struct Piece {
    pub(super) buffer: IoBuf,
    pub(super) hold: Option<u64>,
}

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) state: State,
    pub(super) gone: Option<Gone>,
    pub(super) closing_after_send: Option<Gone>,
    pub(super) connect_in_flight: bool,
    pub(super) receive_in_flight: bool,
    pub(super) send_in_flight: bool,
    pub(super) ready: bool,
    pub(super) dirty: bool,
    /// Input is not taken because too many answers wait to be sent.
    pub(super) paused: bool,
    // Receiving: bytes start..end of the staging are unread.
    pub(super) staging: IoBuf,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) expect: Expect,
    /// Whether the last receive of frames filled all that was asked for, so that more is likely to be there.
    pub(super) last_receive_full: bool,
    /// How much to ask for at once while frames are expected.
    pub(super) ask_bytes: usize,
    // Sending.
    pub(super) send_staging: IoBuf,
    pub(super) frames: VecDeque<Frame>,
    pub(super) pieces: VecDeque<Piece>,
    pub(super) spare_bodies: Vec<Vec<u8>>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, state: State) -> std::io::Result<Self> {
        // Not prefaulted: an idle connection costs a few pages.
        let options = RegionOptions {
            huge: HugePages::Never,
            prefault: false,
            ..RegionOptions::new("kvplane-tcp", RECEIVE_STAGING_BYTES + SEND_STAGING_BYTES)
        };
        let staging = IoBuf::whole(Region::allocate(&options).map_err(std::io::Error::other)?);
        Ok(Self {
            stream,
            state,
            gone: None,
            closing_after_send: None,
            connect_in_flight: false,
            receive_in_flight: false,
            send_in_flight: false,
            ready: false,
            dirty: false,
            paused: false,
            send_staging: staging.slice(RECEIVE_STAGING_BYTES, SEND_STAGING_BYTES),
            staging: staging.slice(0, RECEIVE_STAGING_BYTES),
            start: 0,
            end: 0,
            expect: Expect::Frame,
            last_receive_full: false,
            ask_bytes: super::receive::ASK_LEAST_BYTES,
            frames: VecDeque::new(),
            pieces: VecDeque::new(),
            spare_bodies: Vec::new(),
        })
    }

    pub(super) const fn is_busy(&self) -> bool {
        self.connect_in_flight || self.receive_in_flight || self.send_in_flight
    }

    pub(super) fn queue_frame(&mut self, header: &Header, body: &[u8], payload: Option<Outgoing>) {
        let mut kept = self.spare_bodies.pop().unwrap_or_default();
        kept.extend_from_slice(body);
        self.frames.push_back(Frame { header: *header, body: kept, payload });
    }

    /// Everything that a dying connection still holds.
    pub(super) fn holds(&self) -> impl Iterator<Item = u64> {
        let queued = self.frames.iter().filter_map(|frame| frame.payload.as_ref()?.hold);
        self.pieces.iter().filter_map(|piece| piece.hold).chain(queued)
    }
}
