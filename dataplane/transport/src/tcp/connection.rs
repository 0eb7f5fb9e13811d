//! One TCP connection: what is queued on it, what arrives on it, and what its socket is ready for.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;

use kvplane_proto::RequestId;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::Header;
use kvplane_sys::{IoBuf, MAX_PIECES};

use super::sealed::Wire;
use super::zero_copy::LendingState;
use crate::types::{CloseCause, OutgoingPayload, Pieces};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Connecting,
    Open,
    /// It was reset, and waits for memory that it has lent. To all others it is gone.
    Ending,
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
    pub(super) payload: Option<OutgoingPayload>,
}

impl Frame {
    pub(super) fn extra_pieces(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.buffers.as_slice().len().saturating_sub(1))
    }
}

/// A part of what is being sent.
pub(super) enum Piece {
    /// Headers, bodies and small payloads: a range of the staging they are in.
    Staged(Range<usize>),
    /// A payload where it is: from its piece `next` on.
    Memory {
        pieces: Pieces,
        next: usize,
        hold: Option<u64>,
        request: RequestId,
        /// The last call that lent some of it to the kernel.
        last_call: Option<u32>,
    },
}

impl Piece {
    /// How many pieces of memory may be lent to the kernel now, each of at least so many bytes. None where nobody waits
    /// for them to have left.
    pub(super) fn lendable(&self, least_bytes: usize) -> usize {
        let Self::Memory { pieces, next, hold: Some(_), .. } = self else { return 0 };
        let rest = pieces.as_slice()[*next..].iter().take(MAX_PIECES);
        rest.take_while(|buffer| buffer.bytes() >= least_bytes).count()
    }
}

pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) state: State,
    /// Whether we asked for it: then nothing comes but answers.
    pub(super) asks: bool,
    /// Answers that are outstanding.
    pub(super) awaited: u64,
    pub(super) closing_after_send: Option<CloseCause>,
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
    /// Pieces of memory of the queued frames beyond the first of each.
    pub(super) extra_pieces: usize,
    pub(super) pieces: VecDeque<Piece>,
    /// What the pieces in staging refer to once a send was cut short.
    pub(super) left: Vec<u8>,
    /// Bytes that the kernel has taken.
    pub(super) sent_bytes: u64,
    pub(super) lending: LendingState,
    pub(super) wire: Wire,
    /// The peer did not begin with TLS, as it should have.
    pub(super) must_be_refused: bool,
    /// Why it is ending.
    pub(super) why: Option<CloseCause>,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, state: State, wire: Wire) -> Self {
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
            extra_pieces: 0,
            pieces: VecDeque::new(),
            left: Vec::new(),
            sent_bytes: 0,
            lending: LendingState::Undecided,
            wire,
            must_be_refused: false,
            why: None,
        }
    }

    /// Whether bytes may come at any moment.
    pub(super) const fn expects(&self) -> bool {
        matches!(self.state, State::Open) && !self.paused && (!self.asks || self.awaited > 0)
    }

    /// What waits to be sent, where it is an answer: so many frames, or pieces of memory. A few bytes of a peer can ask
    /// for thousands of pieces. Who asks goes on reading whatever it wants to send, or two could wait for each other.
    pub(super) fn backlog(&self) -> usize {
        self.frames.len() + if self.asks { 0 } else { self.extra_pieces }
    }

    /// Whether nothing waits to be sent.
    pub(super) fn is_sent(&self) -> bool {
        let has_left = match &self.wire {
            Wire::Plain | Wire::Unknown => true,
            Wire::Tls(sealed) => sealed.has_left(),
        };
        self.frames.is_empty() && self.pieces.is_empty() && has_left
    }

    /// Whether nothing waits to be sent and no memory is lent.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_sent() && !self.has_lent()
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
