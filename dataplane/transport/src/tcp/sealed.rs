//! TLS state of one connection: its handshake, then its session, and outgoing records.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use kvplane_sys::Gather;
use kvplane_tls::{Handshake, OpenedRecord, Session, Step};

use super::staging::Staging;
use crate::types::CloseCause;

/// Encoding of a connection's bytes on the wire.
pub(super) enum Wire {
    /// Plaintext.
    Plain,
    /// Accepted connection whose first byte has not arrived yet; it decides.
    Unknown,
    /// TLS records.
    Tls(Box<SealedStream>),
}

/// TLS stream of a connection.
pub(super) struct SealedStream {
    stage: Stage,
    /// Unread bytes, while another connection owns the shared staging.
    arrived: Vec<u8>,
    /// Records that the kernel has not accepted yet; the first one possibly in part.
    leaving: VecDeque<Vec<u8>>,
    leaving_at: usize,
    /// Number of unread bytes at the last step of the handshake.
    stepped_at: Option<usize>,
}

enum Stage {
    Handshake(Box<Handshake>),
    Session(Box<Session>),
    /// Failed; the connection is about to be closed.
    Failed,
}

impl SealedStream {
    /// Creates a stream on which this handshake begins.
    pub(super) fn new(handshake: Box<Handshake>) -> Box<Self> {
        let stage = Stage::Handshake(handshake);
        Box::new(Self { stage, arrived: Vec::new(), leaving: VecDeque::new(), leaving_at: 0, stepped_at: None })
    }

    const fn session(&mut self) -> Option<&mut Session> {
        match &mut self.stage {
            Stage::Session(session) => Some(session),
            Stage::Handshake(_) | Stage::Failed => None,
        }
    }

    /// Returns true if the handshake is complete and the session has keys.
    pub(super) const fn is_agreed(&self) -> bool {
        matches!(self.stage, Stage::Session(_))
    }

    /// Returns true if there are unread bytes outside of the shared staging.
    pub(super) fn has_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Moves unread bytes out of the shared staging.
    pub(super) fn keep(&mut self, unread: &[u8]) {
        self.arrived = unread.to_vec();
    }

    /// Moves unread bytes into the shared staging, which becomes owned by the connection at `index`.
    pub(super) fn enter(&mut self, index: u32, arrived: &mut Staging) {
        arrived.give_to(index, &core::mem::take(&mut self.arrived));
    }

    /// Returns true if there are new bytes for the handshake.
    pub(super) fn can_step(&self, arrived: &Staging) -> bool {
        matches!(self.stage, Stage::Handshake(_)) && self.stepped_at != Some(arrived.unread().len())
    }

    /// Runs a step of the handshake with the received bytes. Returns true if the handshake is complete.
    pub(super) fn step(&mut self, socket: &impl AsFd, arrived: &mut Staging) -> Result<bool, CloseCause> {
        let Stage::Handshake(handshake) = core::mem::replace(&mut self.stage, Stage::Failed) else { return Ok(false) };
        let mut out = Vec::new();
        let result = handshake.advance(arrived.unread_mut(), &mut out);
        if !out.is_empty() {
            self.leaving.push_back(out);
        }
        match result {
            Ok((used, step)) => {
                arrived.consume(used);
                self.stepped_at = Some(arrived.unread().len());
                self.stage = match step {
                    Step::More(handshake) => Stage::Handshake(handshake),
                    Step::Done(session) => Stage::Session(session),
                };
                Ok(self.is_agreed())
            }
            Err(error) => {
                // Sends the alert that tells the peer the reason, if the socket has room.
                let _ = self.send(socket);
                Err(CloseCause::Tls(error.to_string()))
            }
        }
    }

    /// Decrypts the next record in place and passes its bytes to `take`. Returns false if it has not arrived
    /// completely.
    pub(super) fn open(
        &mut self,
        arrived: &mut Staging,
        take: impl FnOnce(&[u8]) -> Result<(), CloseCause>,
    ) -> Result<bool, CloseCause> {
        let Some(session) = self.session() else { return Ok(false) };
        let opened = session.open(arrived.unread_mut());
        let (taken, opened) = opened.map_err(|error| CloseCause::Tls(error.to_string()))?;
        let result = match opened {
            OpenedRecord::More => Ok(false),
            OpenedRecord::Nothing => Ok(true),
            OpenedRecord::Closed => Err(CloseCause::Peer),
            OpenedRecord::Data(plain) => take(plain).map(|()| true),
        };
        arrived.consume(taken);
        result
    }

    /// Returns true if the kernel has accepted all records.
    pub(super) fn has_left(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Encrypts at most one record's worth of bytes. Returns the number of bytes on the wire.
    pub(super) fn seal(&mut self, plain: &[u8]) -> Result<usize, CloseCause> {
        let Stage::Session(session) = &mut self.stage else { return Ok(0) };
        let (leaving, mut bytes) = (&mut self.leaving, 0);
        let sealed = session.seal(plain, |record| {
            bytes += record.len();
            leaving.push_back(record);
        });
        sealed.map_err(|error| CloseCause::Tls(error.to_string()))?;
        Ok(bytes)
    }

    /// Makes one send call. Returns the number of bytes sent, and whether that was everything offered.
    pub(super) fn send(&mut self, socket: &impl AsFd) -> io::Result<(usize, bool)> {
        if self.leaving.is_empty() {
            return Ok((0, true));
        }
        let mut gather = Gather::new();
        for (position, record) in self.leaving.iter().enumerate() {
            if gather.is_full() {
                break;
            }
            gather.push_bytes(if position == 0 { &record[self.leaving_at..] } else { record });
        }
        let bytes = gather.send(socket.as_fd())?;
        let all = bytes == gather.bytes();
        self.leaving_at += bytes;
        while let Some(record) = self.leaving.pop_front_if(|record| record.len() <= self.leaving_at) {
            self.leaving_at -= record.len();
        }
        if self.leaving.is_empty() {
            self.leaving = VecDeque::new();
        }
        Ok((bytes, all))
    }

    /// Sends close_notify, best effort: frames state their lengths, so nothing depends on it.
    pub(super) fn say_goodbye(&mut self, socket: &impl AsFd) {
        if self.has_left()
            && let Some(Ok(record)) = self.session().map(Session::close)
        {
            self.leaving.push_back(record);
            let _ = self.send(socket);
        }
    }
}
