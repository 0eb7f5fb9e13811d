//! The client's questions to a shard: for a connection, and for the memory of segments. None is waited for here: an
//! answer is taken when the poller tells of it, and its absence when the host looks at the time.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::{Interest, Poller, Region};

use super::{SETUP_DEADLINE, Shm, setup};
use crate::token::{Source, Token};
use crate::types::{CloseCause, ConnectionId, Event};

const SETUP_NS: u64 = SETUP_DEADLINE.as_nanos() as u64;

/// A shard that was called.
pub(super) struct CallInFlight {
    id: ConnectionId,
    socket: UnixStream,
    path: String,
    until_ns: u64,
}

/// A segment whose memory was asked for.
pub(super) struct SegmentRequest {
    pub(super) id: ConnectionId,
    segment: SegmentId,
    until_ns: u64,
}

impl Shm {
    /// Connects to a shard's Unix socket; [`Event::Connected`] or [`Event::Gone`] follows.
    ///
    /// # Errors
    /// [`CloseCause::Unavailable`] when nobody listens there or somebody else does, [`CloseCause::Setup`] when it
    /// cannot be now.
    pub fn connect(&mut self, poller: &Poller, path: &str, now_ns: u64) -> Result<ConnectionId, CloseCause> {
        let socket = setup::call(path)?;
        let refused = |error: io::Error| CloseCause::Setup(format!("shared memory at {path}: {error}"));
        let id = self.reserve().map_err(refused)?;
        let token = Token { source: Source::ShmSocket, index: id.index, generation: id.generation };
        if let Err(error) = poller.add(socket.as_fd(), token.to_bits(), Interest::Readable) {
            self.give_back(id);
            return Err(refused(error));
        }
        let until_ns = now_ns.saturating_add(SETUP_NS);
        self.calling.push(CallInFlight { id, socket, path: path.to_owned(), until_ns });
        Ok(id)
    }

    /// A shard that was called offers a connection, or hangs up.
    pub(super) fn offered(&mut self, poller: &Poller, id: ConnectionId) {
        let Some(position) = self.calling.iter().position(|calling| calling.id == id) else { return };
        let offer = match setup::take_offer(&self.calling[position].socket) {
            Ok(Some(offer)) => offer,
            Ok(None) => return,
            Err(error) => {
                let path = &self.calling[position].path;
                let text = match error.kind() {
                    io::ErrorKind::UnexpectedEof => "the shard refused, or has ended".to_owned(),
                    _ => error.to_string(),
                };
                let why = CloseCause::Setup(format!("shared memory at {path}: {text}"));
                self.close(poller, id, why);
                return;
            }
        };
        let channel = offer.accept(self.calling.swap_remove(position).socket);
        let token = Token { source: Source::ShmDoorbell, index: id.index, generation: id.generation };
        let watched = poller.add(channel.own_bell.fd(), token.to_bits(), Interest::ReadableEdge);
        self.channels[id.index as usize] = Some(channel);
        match watched {
            Ok(()) => self.events.push_back(Event::Connected(id)),
            Err(error) => self.close(poller, id, CloseCause::Setup(error.to_string())),
        }
    }

    /// Ends a connection that was not offered yet.
    pub(super) fn hang_up(&mut self, poller: &Poller, id: ConnectionId, why: &CloseCause) {
        if let Some(position) = self.calling.iter().position(|calling| calling.id == id) {
            let calling = self.calling.swap_remove(position);
            let _ = poller.remove(calling.socket.as_fd());
            self.events.push_back(Event::Gone(id, why.clone()));
        }
    }

    /// Asks for a segment of the peer, to be mapped; [`Self::poll_mapped`] says what came of it.
    ///
    /// # Errors
    /// When the peer has not taken what it was asked before, or is gone.
    pub fn ask_segment(&mut self, id: ConnectionId, segment: SegmentId, now_ns: u64) -> io::Result<()> {
        let Some(channel) = self.get(id) else { return Err(io::ErrorKind::NotConnected.into()) };
        setup::ask_segment(&channel.socket, segment)?;
        self.asked.push(SegmentRequest { id, segment, until_ns: now_ns.saturating_add(SETUP_NS) });
        Ok(())
    }

    pub(super) fn take_answer(&mut self, poller: &Poller, id: ConnectionId) {
        let Some(channel) = self.get(id) else { return };
        match setup::take_answer(&channel.socket) {
            Ok(Some((segment, shared))) => {
                // Too late, it is of no use: whoever asked went another way.
                if let Some(at) = self.asked.iter().position(|asked| (asked.id, asked.segment) == (id, segment)) {
                    self.asked.swap_remove(at);
                    self.answers.push_back((id, segment, shared.map()));
                }
            }
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // Its last words may say why, and are in the ring. The end would be told of again and again.
                let _ = poller.remove(channel.socket.as_fd());
                channel.hung_up = true;
            }
            Err(error) => self.close(poller, id, CloseCause::Setup(error.to_string())),
        }
    }

    /// What came of a question for a segment: its memory, or why there is none.
    pub fn poll_mapped(&mut self) -> Option<(ConnectionId, SegmentId, Result<Arc<Region>, String>)> {
        self.answers.pop_front()
    }

    /// When [`Self::expire`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let calls = self.calling.iter().map(|calling| calling.until_ns);
        calls.chain(self.asked.iter().map(|asked| asked.until_ns)).min()
    }

    /// Gives up what was not answered in time.
    pub fn expire(&mut self, poller: &Poller, now_ns: u64) {
        let late = |seconds: u64| format!("no answer within {seconds} s: the process may be stopped, or is very busy");
        while let Some(calling) = self.calling.iter().find(|calling| calling.until_ns <= now_ns) {
            let why = format!("shared memory at {}: {}", calling.path, late(SETUP_DEADLINE.as_secs()));
            self.close(poller, calling.id, CloseCause::Setup(why));
        }
        while let Some(at) = self.asked.iter().position(|asked| asked.until_ns <= now_ns) {
            let asked = self.asked.swap_remove(at);
            self.answers.push_back((asked.id, asked.segment, Err(late(SETUP_DEADLINE.as_secs()))));
        }
    }
}
