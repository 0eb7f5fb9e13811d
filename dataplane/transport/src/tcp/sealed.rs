//! Connections whose bytes are sealed: the handshake and then the session of one, and its records on their way out.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use kvplane_sys::Gather;
use kvplane_tls::{Handshake, OpenedRecord, Session, Step};

use super::staging::Staging;
use crate::types::CloseCause;

/// How bytes are on the wire.
pub(super) enum Wire {
    /// As they are.
    Plain,
    /// The peer has connected and its first byte says.
    Unknown,
    /// In records.
    Tls(Box<SealedStream>),
}

/// A connection in records.
pub(super) struct SealedStream {
    stage: Stage,
    /// What came and was not used, while another connection has the shared place.
    arrived: Vec<u8>,
    /// Records that the kernel has not taken, the first of them in part.
    leaving: VecDeque<Vec<u8>>,
    leaving_at: usize,
    /// How many bytes had come and were not used when the handshake was last gone on with.
    stepped_at: Option<usize>,
}

enum Stage {
    Handshake(Box<Handshake>),
    Session(Box<Session>),
    /// It has failed, and the connection is about to be closed.
    Failed,
}

impl SealedStream {
    /// A stream on which this handshake begins.
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

    /// Whether the handshake is done, and so keys are there.
    pub(super) const fn is_agreed(&self) -> bool {
        matches!(self.stage, Stage::Session(_))
    }

    /// Whether unread bytes are here and not in the shared place.
    pub(super) fn has_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Moves unread bytes out of the shared place.
    pub(super) fn keep(&mut self, unread: &[u8]) {
        self.arrived = unread.to_vec();
    }

    /// Moves unread bytes into the shared place, which is now that of the connection at `index`.
    pub(super) fn enter(&mut self, index: u32, arrived: &mut Staging) {
        arrived.give_to(index, &core::mem::take(&mut self.arrived));
    }

    /// Whether there is something new for the handshake in what arrived.
    pub(super) fn can_step(&self, arrived: &Staging) -> bool {
        matches!(self.stage, Stage::Handshake(_)) && self.stepped_at != Some(arrived.unread().len())
    }

    /// Does a step of the handshake with what arrived. Whether it is done.
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
                // This says why to the peer, if there is room.
                let _ = self.send(socket);
                Err(CloseCause::Tls(error.to_string()))
            }
        }
    }

    /// Opens the next record where it lies. False when it is not there as a whole; its bytes go to `take`.
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

    /// Whether the kernel has taken everything.
    pub(super) fn has_left(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Seals these bytes, at most a record's. How many bytes that is on the wire.
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

    /// One call. How many bytes left, and whether that was all it was given.
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

    /// Tells the peer that no more comes, as far as it goes: frames say their lengths, so nothing depends on it.
    pub(super) fn say_goodbye(&mut self, socket: &impl AsFd) {
        if self.has_left()
            && let Some(Ok(record)) = self.session().map(Session::close)
        {
            self.leaving.push_back(record);
            let _ = self.send(socket);
        }
    }
}
