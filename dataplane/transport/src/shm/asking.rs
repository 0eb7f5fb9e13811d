//! Client requests to a shard: for a connection, and for the memory of segments. No call blocks: a reply is handled
//! when the poller reports it, and a timeout when the host calls [`Shm::expire`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use kvplane_proto::SegmentId;
use kvplane_sys::{Interest, Poller};

use super::answer::{MemoryRequest, SegmentMemory};
use super::channel::Channel;
use super::{SETUP_DEADLINE, ShareError, Shm, setup};
use crate::token::{Source, Token};
use crate::types::{CloseCause, ConnectionId, Event};

const SETUP_NS: u64 = SETUP_DEADLINE.as_nanos() as u64;

/// A connection attempt without an offer so far.
struct CallInFlight {
    id: ConnectionId,
    socket: UnixStream,
    path: String,
    until_ns: u64,
}

/// A request for a segment's memory without a reply so far.
struct SegmentRequest {
    id: ConnectionId,
    segment: SegmentId,
    wanted: MemoryRequest,
    until_ns: u64,
}

/// Outcome of a request for a segment.
#[derive(Debug)]
pub struct SegmentOutcome {
    /// Connection.
    pub id: ConnectionId,
    /// Segment.
    pub segment: SegmentId,
    /// Kind of memory that was requested.
    pub wanted: MemoryRequest,
    /// Memory, or why there is none.
    pub memory: Result<SegmentMemory, ShareError>,
}

/// A client's outstanding requests, and replies that were not taken yet.
pub(super) struct Questions {
    /// Connection attempts at shards that have offered nothing yet.
    calls: Vec<CallInFlight>,
    segments: Vec<SegmentRequest>,
    answers: VecDeque<SegmentOutcome>,
}

impl Questions {
    pub(super) const fn new() -> Self {
        Self { calls: Vec::new(), segments: Vec::new(), answers: VecDeque::new() }
    }

    /// Takes the offer of a shard, or its rejection; `None` if neither has arrived yet.
    fn take_offer(&mut self, id: ConnectionId) -> Option<Result<Channel, CloseCause>> {
        let position = self.calls.iter().position(|call| call.id == id)?;
        let CallInFlight { socket, path, .. } = &self.calls[position];
        let offer = match setup::take_offer(socket) {
            Ok(offer) => offer?,
            Err(error) => {
                let text = match error.kind() {
                    io::ErrorKind::UnexpectedEof => "the shard refused, or has ended".to_owned(),
                    _ => error.to_string(),
                };
                return Some(Err(CloseCause::Setup(format!("shared memory at {path}: {text}"))));
            }
        };
        Some(Ok(offer.accept(self.calls.swap_remove(position).socket)))
    }

    /// Abandons an unanswered connection attempt and returns its socket.
    pub(super) fn hang_up(&mut self, id: ConnectionId) -> Option<UnixStream> {
        let position = self.calls.iter().position(|call| call.id == id)?;
        Some(self.calls.swap_remove(position).socket)
    }

    /// Takes a shard's reply about a segment.
    pub(super) fn take_answer(&mut self, id: ConnectionId, socket: &UnixStream) -> io::Result<()> {
        let Some((segment, shared)) = setup::take_answer(socket)? else { return Ok(()) };
        // A late reply is dropped: the client has used another path.
        if let Some(at) = self.segments.iter().position(|asked| (asked.id, asked.segment) == (id, segment)) {
            let wanted = self.segments.swap_remove(at).wanted;
            self.answers.push_back(SegmentOutcome { id, segment, wanted, memory: shared.memory() });
        }
        Ok(())
    }

    /// Drops the requests of a connection that has ended.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        self.segments.retain(|asked| asked.id != id);
    }

    /// Returns a connection attempt that has timed out, if any, with the close cause.
    fn late_call(&self, now_ns: u64) -> Option<(ConnectionId, CloseCause)> {
        let call = self.calls.iter().find(|call| call.until_ns <= now_ns)?;
        Some((call.id, CloseCause::Setup(format!("shared memory at {}: {}", call.path, ShareError::Late))))
    }

    /// Answers the segment requests that have timed out.
    fn expire_segments(&mut self, now_ns: u64) {
        while let Some(at) = self.segments.iter().position(|asked| asked.until_ns <= now_ns) {
            let SegmentRequest { id, segment, wanted, .. } = self.segments.swap_remove(at);
            self.answers.push_back(SegmentOutcome { id, segment, wanted, memory: Err(ShareError::Late) });
        }
    }

    /// Returns the earliest deadline of all requests.
    fn deadline_ns(&self) -> Option<u64> {
        let calls = self.calls.iter().map(|call| call.until_ns);
        calls.chain(self.segments.iter().map(|asked| asked.until_ns)).min()
    }
}

impl Shm {
    /// Connects to a shard's Unix socket; [`Event::Connected`] or [`Event::Gone`] follows.
    ///
    /// # Errors
    /// [`CloseCause::Unavailable`] when no process of an accepted user listens there, [`CloseCause::Setup`] when the
    /// connection fails temporarily.
    pub fn connect(&mut self, poller: &Poller, path: &str, now_ns: u64) -> Result<ConnectionId, CloseCause> {
        let socket = setup::call(path)?;
        let refused = |error: io::Error| CloseCause::Setup(format!("shared memory at {path}: {error}"));
        let id = self.reserve().map_err(refused)?;
        let token = Token { source: Source::ShmSocket, index: id.index, generation: id.generation };
        if let Err(error) = poller.add(socket.as_fd(), token.to_bits(), Interest::Readable) {
            self.channels.free(id);
            return Err(refused(error));
        }
        let until_ns = now_ns.saturating_add(SETUP_NS);
        self.questions.calls.push(CallInFlight { id, socket, path: path.to_owned(), until_ns });
        Ok(id)
    }

    /// Handles the offer or the rejection of a shard.
    pub(super) fn offered(&mut self, poller: &Poller, id: ConnectionId) {
        let channel = match self.questions.take_offer(id) {
            Some(Ok(channel)) => channel,
            Some(Err(why)) => return self.close(poller, id, why),
            None => return,
        };
        let token = Token { source: Source::ShmDoorbell, index: id.index, generation: id.generation };
        let watched = poller.add(channel.own_bell.fd(), token.to_bits(), Interest::ReadableEdge);
        self.channels.put(id, channel);
        match watched {
            Ok(()) => self.events.push_back(Event::Connected(id)),
            Err(error) => self.close(poller, id, CloseCause::Setup(error.to_string())),
        }
    }

    /// Requests the memory of a segment of the peer; [`Self::poll_mapped`] returns the outcome.
    ///
    /// # Errors
    /// When the peer has not read earlier requests, or is gone.
    pub fn ask_segment(
        &mut self,
        id: ConnectionId,
        segment: SegmentId,
        wanted: MemoryRequest,
        now_ns: u64,
    ) -> io::Result<()> {
        let Some(channel) = self.channels.get(id) else { return Err(io::ErrorKind::NotConnected.into()) };
        setup::ask_segment(&channel.socket, segment, wanted)?;
        let until_ns = now_ns.saturating_add(SETUP_NS);
        self.questions.segments.push(SegmentRequest { id, segment, wanted, until_ns });
        Ok(())
    }

    /// Returns the next outcome of a segment request.
    pub fn poll_mapped(&mut self) -> Option<SegmentOutcome> {
        self.questions.answers.pop_front()
    }

    /// Returns the next time at which [`Self::expire`] has work.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.questions.deadline_ns()
    }

    /// Times out unanswered requests.
    pub fn expire(&mut self, poller: &Poller, now_ns: u64) {
        while let Some((id, why)) = self.questions.late_call(now_ns) {
            self.close(poller, id, why);
        }
        self.questions.expire_segments(now_ns);
    }
}
