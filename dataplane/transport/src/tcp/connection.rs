//! One TCP connection: what is queued on it, what arrives on it, and what its socket is ready for.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::Header;
use kvplane_sys::IoBuf;

use crate::types::{Gone, Outgoing, Pieces};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Connecting,
    Open,
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

/// Where a payload goes: what is left of it.
pub(super) enum Place {
    Nowhere,
    One(IoBuf),
    Many { buffers: Vec<IoBuf>, next: usize },
}

pub(super) struct Payload {
    pub(super) place: Place,
    pub(super) left_bytes: u64,
    pub(super) checksum: Option<PayloadChecksum>,
}

impl Place {
    /// What is left, piece by piece.
    pub(super) fn rest(&self) -> &[IoBuf] {
        match self {
            Self::Nowhere => &[],
            Self::One(buffer) => core::slice::from_ref(buffer),
            Self::Many { buffers, next } => &buffers[*next..],
        }
    }

    fn first(&mut self) -> Option<&mut IoBuf> {
        match self {
            Self::Nowhere => None,
            Self::One(buffer) => Some(buffer),
            Self::Many { buffers, next } => buffers.get_mut(*next),
        }
    }

    /// Gives the next `bytes` bytes to `take`, piece by piece.
    fn advance(&mut self, mut bytes: usize, mut take: impl FnMut(&IoBuf, usize)) {
        while let Some(buffer) = self.first() {
            let part = buffer.bytes().min(bytes);
            if part > 0 {
                take(buffer, part);
                buffer.advance(part);
                bytes -= part;
            }
            match (buffer.is_empty(), &mut *self) {
                (true, Self::Many { next, .. }) => *next += 1,
                _ => return,
            }
        }
    }
}

impl Payload {
    /// The next bytes of the payload are in place.
    pub(super) fn took(&mut self, bytes: usize) {
        self.left_bytes -= bytes as u64;
        let checksum = &mut self.checksum;
        self.place.advance(bytes, |buffer, part| {
            if let Some(checksum) = checksum {
                buffer.region().read_with(buffer.offset(), part, &mut |_, bytes| checksum.update(bytes));
            }
        });
    }

    /// The next bytes of the payload, which are elsewhere: puts them in place.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.left_bytes -= bytes.len() as u64;
        // What is ours alone is summed up where it is.
        if let Some(checksum) = &mut self.checksum {
            checksum.update(bytes);
        }
        let mut at = 0;
        self.place.advance(bytes.len(), |buffer, part| {
            buffer.copy_in(&bytes[at..at + part]);
            at += part;
        });
    }
}

/// A frame that waits to be sent.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Option<Outgoing>,
}

/// A part of what is being sent.
pub(super) enum Piece {
    /// Headers, bodies and small payloads: a range of the staging they are in.
    Staged(Range<usize>),
    /// A payload where it is: from its piece `next` on.
    Memory { pieces: Pieces, next: usize, hold: Option<u64> },
}

pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) state: State,
    /// Whether we asked for it: then nothing comes but answers.
    pub(super) asks: bool,
    /// Answers that are outstanding.
    pub(super) awaited: u64,
    pub(super) closing_after_send: Option<Gone>,
    // What the socket is ready for, as far as we know.
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer sends nothing more: reads go on until they say so.
    pub(super) ended: bool,
    // In which lists of the driver it is.
    pub(super) ready: bool,
    pub(super) dirty: bool,
    /// Input is not taken because too many answers wait to be sent.
    pub(super) paused: bool,
    /// What it may still receive in this round.
    pub(super) budget_bytes: usize,
    // Receiving.
    pub(super) expect: Expect,
    /// Unread bytes, while another connection uses the staging.
    pub(super) kept: Vec<u8>,
    /// How much to ask for at once while frames are expected.
    pub(super) ask_bytes: usize,
    // Sending.
    pub(super) frames: VecDeque<Frame>,
    pub(super) pieces: VecDeque<Piece>,
    /// What the pieces in staging refer to once a send was cut short.
    pub(super) left: Vec<u8>,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, state: State) -> Self {
        Self {
            socket,
            state,
            asks: state == State::Connecting,
            awaited: 0,
            closing_after_send: None,
            readable: false,
            writable: true,
            ended: false,
            ready: false,
            dirty: false,
            paused: false,
            budget_bytes: 0,
            expect: Expect::Frame,
            kept: Vec::new(),
            ask_bytes: super::receive::ASK_LEAST_BYTES,
            frames: VecDeque::new(),
            pieces: VecDeque::new(),
            left: Vec::new(),
        }
    }

    /// Whether bytes may come at any moment.
    pub(super) const fn expects(&self) -> bool {
        matches!(self.state, State::Open) && !self.paused && (!self.asks || self.awaited > 0)
    }

    /// Whether nothing waits to be sent.
    pub(super) fn is_quiet(&self) -> bool {
        self.frames.is_empty() && self.pieces.is_empty()
    }

    /// Everything that a dying connection still holds.
    pub(super) fn holds(&self) -> impl Iterator<Item = u64> {
        let queued = self.frames.iter().filter_map(|frame| frame.payload.as_ref()?.hold);
        let leaving = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Memory { hold, .. } => *hold,
            Piece::Staged(_) => None,
        });
        leaving.chain(queued)
    }
}
