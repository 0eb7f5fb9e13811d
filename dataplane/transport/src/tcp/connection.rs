//! One TCP connection: its socket, its two halves, and how it ends.

use std::os::fd::OwnedFd;

use kvplane_proto::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_tls::DataTls;

use super::reader::Reader;
use super::sealed::Wire;
use super::writer::Writer;
use crate::types::CloseCause;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Connecting,
    Open,
    /// It was reset, and waits for memory that it has lent. To all others it is gone.
    Ending,
}

/// One connection.
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) state: State,
    /// Whether we began it: then nothing comes but answers.
    pub(super) asks: bool,
    /// Answers that are outstanding.
    pub(super) awaited: u64,
    pub(super) wire: Wire,
    /// The peer did not begin with TLS, as it should have.
    pub(super) must_be_refused: bool,
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// Why it is closed once everything was sent.
    pub(super) closing_after_send: Option<CloseCause>,
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
            wire,
            must_be_refused: false,
            reader: Reader::new(),
            writer: Writer::new(),
            closing_after_send: None,
            why: None,
        }
    }

    /// Whether bytes may come at any moment.
    pub(super) const fn expects(&self) -> bool {
        matches!(self.state, State::Open) && !self.reader.paused && (!self.asks || self.awaited > 0)
    }

    /// What waits to be sent, where it is an answer: so many frames, or pieces of memory. A few bytes of a peer can ask
    /// for thousands of pieces. The asking side reads on whatever it wants to send, or two could wait for each other.
    pub(super) fn backlog(&self) -> usize {
        self.writer.frames() + if self.asks { 0 } else { self.writer.extra_pieces() }
    }

    /// Whether nothing waits to be sent.
    pub(super) fn is_sent(&self) -> bool {
        let has_left = match &self.wire {
            Wire::Plain | Wire::Unknown => true,
            Wire::Tls(sealed) => sealed.has_left(),
        };
        self.writer.is_empty() && has_left
    }

    /// Whether nothing waits to be sent and no memory is lent.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_sent() && !self.writer.lending.has_lent()
    }

    /// Whether it is known how bytes are on the wire, and keys are there where they are sealed.
    pub(super) const fn is_agreed(&self) -> bool {
        match &self.wire {
            Wire::Plain => true,
            Wire::Unknown => false,
            Wire::Tls(sealed) => sealed.is_agreed(),
        }
    }

    /// A header of ours; a plain greeting says besides that we would begin with TLS where the settings say so.
    pub(super) fn greeting(&self, header: &Header, mode: DataTls) -> Header {
        let greets = matches!(header.kind, Kind::Request(Operation::Hello));
        let offers = greets && mode == DataTls::Offer && matches!(self.wire, Wire::Plain);
        Header { flags: header.flags.with(FrameFlags::OFFERS_TLS, offers), ..*header }
    }

    /// Memory that it owns.
    #[cfg(test)]
    pub(super) fn owned_bytes(&self) -> usize {
        size_of::<Self>() + self.writer.owned_bytes() + self.reader.owned_bytes()
    }
}
