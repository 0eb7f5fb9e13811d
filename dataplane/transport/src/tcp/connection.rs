//! One TCP connection: its socket, reader, writer, and shutdown.

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
    /// The connection was reset and waits for memory that it has lent. To the host it is gone.
    Ending,
}

/// A TCP connection.
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) state: State,
    /// True if we initiated the connection: only replies arrive then.
    pub(super) asks: bool,
    /// Number of outstanding replies.
    pub(super) awaited: u64,
    pub(super) wire: Wire,
    /// True if the peer did not begin with TLS although the settings require it.
    pub(super) must_be_refused: bool,
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// Reason with which the connection is closed once everything is sent.
    pub(super) closing_after_send: Option<CloseCause>,
    /// Reason of the shutdown.
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

    /// Returns true if bytes may arrive at any moment.
    pub(super) const fn expects(&self) -> bool {
        matches!(self.state, State::Open) && !self.reader.paused && (!self.asks || self.awaited > 0)
    }

    /// Returns the replies that wait to be sent: the number of frames, and on the accepting side their additional
    /// pieces of memory, because a few bytes of a peer can request thousands of pieces. On the initiating side outgoing
    /// frames do not stop reading, or two sides could deadlock.
    pub(super) fn backlog(&self) -> usize {
        self.writer.frames() + if self.asks { 0 } else { self.writer.extra_pieces() }
    }

    /// Returns true if nothing waits to be sent.
    pub(super) fn is_sent(&self) -> bool {
        let has_left = match &self.wire {
            Wire::Plain | Wire::Unknown => true,
            Wire::Tls(sealed) => sealed.has_left(),
        };
        self.writer.is_empty() && has_left
    }

    /// Returns true if nothing waits to be sent and no memory is lent.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_sent() && !self.writer.lending.has_lent()
    }

    /// Returns true if the encoding on the wire is negotiated: plain, or TLS with keys.
    pub(super) const fn is_agreed(&self) -> bool {
        match &self.wire {
            Wire::Plain => true,
            Wire::Unknown => false,
            Wire::Tls(sealed) => sealed.is_agreed(),
        }
    }

    /// Returns the header to send; a plaintext greeting additionally offers TLS if the settings say so.
    pub(super) fn greeting(&self, header: &Header, mode: DataTls) -> Header {
        let greets = matches!(header.kind, Kind::Request(Operation::Hello));
        let offers = greets && mode == DataTls::Offer && matches!(self.wire, Wire::Plain);
        Header { flags: header.flags.with(FrameFlags::OFFERS_TLS, offers), ..*header }
    }

    /// Returns the memory that the connection owns, in bytes.
    #[cfg(test)]
    pub(super) fn owned_bytes(&self) -> usize {
        size_of::<Self>() + self.writer.owned_bytes() + self.reader.owned_bytes()
    }
}
