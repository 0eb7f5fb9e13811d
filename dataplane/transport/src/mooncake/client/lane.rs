//! One connection to a stock engine: its queue of requests, send progress, and the expected input.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{Kind as FrameKind, Operation, ReadItem, WriteItem, decode_items};
use kvplane_proto::{Limits, Status};
use kvplane_sys::{Gather, Interest, IoBuf, Poller, Scatter, net, stream};

use crate::mooncake::wire::{Dialect, REQUEST_BYTES, Request, STATUS_BYTES};
use crate::mooncake::{TURN_BYTES, is_later};
use crate::token::Token;
use crate::types::{OutgoingPayload, Pieces};

/// Limit of pipelined requests, where the peer answers each with a status.
const AHEAD: usize = 16;
/// Limit of request headers gathered into one send, in bytes.
const HEADS_BYTES: usize = 64 * REQUEST_BYTES;
/// Bytes read by the probe before the first write over a connection, to verify that the peer speaks version 2.
pub(super) const PROBE_BYTES: u64 = STATUS_BYTES as u64;

/// Kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    Write,
    /// Reads from the range that the next request writes to, only to see how the peer answers.
    Probe,
}

/// A request that is not answered yet.
pub(super) struct Entry {
    pub(super) kind: Kind,
    pub(super) request: RequestId,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Payload of a write. Kept until the answer, in case the request has to be sent again.
    pub(super) payload: Option<IoBuf>,
    /// Token for [`Event::Sent`](crate::types::Event::Sent), reported when the payload is no longer used.
    pub(super) hold: Option<u64>,
    /// Number of times that the peer closed the connection at this request without a status.
    pub(super) closed: u8,
}

impl Entry {
    /// Returns the client's operation that the request belongs to.
    pub(super) const fn operation(&self) -> Operation {
        if matches!(self.kind, Kind::Write) { Operation::Write } else { Operation::Read }
    }

    const fn head(&self, dialect: Dialect) -> Request {
        let write = matches!(self.kind, Kind::Write);
        Request { address: self.address, bytes: self.bytes, write, dialect }
    }

    /// Returns the read that follows a write of version 1, which has no answer of its own: the server handles requests
    /// in order, so the byte that it returns proves that the write is in place.
    const fn echo(&self) -> Request {
        Request { address: self.address, bytes: 1, write: false, dialect: Dialect::V1 }
    }

    /// Returns the number of bytes that the request sends.
    fn sent_bytes(&self, dialect: Dialect) -> u64 {
        let head = REQUEST_BYTES as u64;
        match (self.kind, dialect) {
            (Kind::Read | Kind::Probe, _) => head,
            (Kind::Write, Dialect::V1) => head + self.bytes + head,
            (Kind::Write, Dialect::V2) => head + self.bytes,
        }
    }
}

/// Input that is expected next.
pub(super) enum Expect {
    /// First bytes of an answer.
    Answer,
    /// A status: `have` bytes of it have arrived, the last at `since_ns`.
    Status { bytes: [u8; STATUS_BYTES], have: usize, since_ns: u64 },
    /// A frame was delivered to the host, which has to name the destination of its payload.
    Decision { bytes: u64 },
    /// A payload that is being received into `buffer`, or discarded.
    Payload { buffer: Option<IoBuf>, left_bytes: u64 },
    /// A payload that is not delivered to the client: of a probe or an echo.
    Skip { left_bytes: u64 },
}

/// State of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Connecting; times out at `until_ns`. `again`: the host considers it connected already.
    Connecting {
        until_ns: u64,
        again: bool,
    },
    Open,
}

/// A connection to a stock engine.
pub(super) struct Lane {
    pub(super) address: SocketAddr,
    pub(super) stream: TcpStream,
    pub(super) state: State,
    pub(super) dialect: Dialect,
    /// True if the peer has shown over this connection that it speaks version 2. Another process may answer the next
    /// one.
    pub(super) verified: bool,
    /// Unanswered requests, oldest first.
    pub(super) queue: VecDeque<Entry>,
    /// Number of queued requests that have been sent, and the bytes sent of the next one.
    pub(super) sent: usize,
    sent_bytes: u64,
    /// Sending has failed; the reason follows from what is still received.
    pub(super) send_broken: bool,
    pub(super) expect: Expect,
    /// Replies that the driver produced without the peer.
    pub(super) replies: VecDeque<Header>,
}

/// Result of sending.
pub(super) enum SendOutcome {
    /// The socket takes no more, or the queue is empty.
    Wait,
    /// The send budget of this turn is used up.
    Again,
}

/// Result of receiving.
pub(super) enum ReceiveOutcome {
    Bytes(usize),
    Later,
    /// The peer closed or reset the connection: the errno, or 0 for an orderly close.
    Ended(i32),
}

impl Lane {
    pub(super) fn new(address: SocketAddr, stream: TcpStream, dialect: Dialect, until_ns: u64) -> Self {
        Self {
            address,
            stream,
            state: State::Connecting { until_ns, again: false },
            dialect,
            verified: false,
            queue: VecDeque::new(),
            sent: 0,
            sent_bytes: 0,
            send_broken: false,
            expect: Expect::Answer,
            replies: VecDeque::new(),
        }
    }

    /// Opens a new socket for the remaining requests: all of them are sent again.
    pub(super) fn restart(&mut self, poller: &Poller, token: Token, until_ns: u64) -> std::io::Result<()> {
        let _ = poller.remove(self.stream.as_fd());
        self.stream = open(poller, self.address, token)?;
        self.state = State::Connecting { until_ns, again: true };
        (self.sent, self.sent_bytes, self.send_broken, self.verified) = (0, 0, false, false);
        self.expect = Expect::Answer;
        if self.queue.front().is_some_and(|entry| entry.kind == Kind::Probe) {
            self.queue.pop_front();
        }
        Ok(())
    }

    /// Returns true if any byte of the oldest request has been sent.
    pub(super) fn has_asked(&self) -> bool {
        self.sent > 0 || self.sent_bytes > 0
    }

    /// Returns true if all bytes of the oldest request have been sent.
    pub(super) const fn has_asked_all(&self) -> bool {
        self.sent > 0
    }

    /// Removes the oldest request, which is answered.
    pub(super) fn pop(&mut self) -> Option<Entry> {
        match self.sent {
            0 => self.sent_bytes = 0,
            _ => self.sent -= 1,
        }
        self.queue.pop_front()
    }

    /// Returns the limit of requests in flight.
    fn ahead(&self) -> usize {
        if self.dialect == Dialect::V2 && self.verified { AHEAD } else { 1 }
    }

    /// Sends what may be sent, up to the budget of a turn.
    pub(super) fn send(&mut self) -> SendOutcome {
        let probes = self.dialect == Dialect::V2 && !self.verified && !self.has_asked();
        if let (true, Some(first)) = (probes, self.queue.front())
            && first.kind == Kind::Write
        {
            let (address, bytes) = (first.address, first.bytes.min(PROBE_BYTES));
            let request = RequestId::default();
            self.queue.push_front(Entry {
                kind: Kind::Probe,
                request,
                address,
                bytes,
                payload: None,
                hold: None,
                closed: 0,
            });
        }
        let mut share = TURN_BYTES as u64;
        while !self.send_broken {
            if share == 0 {
                return SendOutcome::Again;
            }
            let mut heads = Vec::new();
            let (payload, payload_bytes) = self.gather(&mut heads, share);
            let mut gather = Gather::new();
            gather.push_bytes(&heads);
            if let Some(payload) = &payload {
                gather.push(payload, payload_bytes);
            }
            if gather.bytes() == 0 {
                return SendOutcome::Wait;
            }
            match gather.send(self.stream.as_fd()) {
                Ok(bytes) => {
                    self.advance(bytes as u64);
                    share = share.saturating_sub(bytes as u64);
                }
                Err(error) if is_later(&error) => return SendOutcome::Wait,
                // A status that the peer sent before it closed is still to be read.
                Err(_) => self.send_broken = true,
            }
        }
        SendOutcome::Wait
    }

    /// Gathers the bytes to send next: request headers, then at most one payload.
    fn gather(&self, heads: &mut Vec<u8>, share: u64) -> (Option<IoBuf>, usize) {
        let head_bytes = REQUEST_BYTES as u64;
        let mut at = self.sent_bytes;
        for entry in self.queue.iter().take(self.ahead()).skip(self.sent) {
            if at < head_bytes {
                heads.extend_from_slice(&entry.head(self.dialect).encode()[at as usize..]);
                at = head_bytes;
            }
            if let Some(payload) = &entry.payload {
                let from = at - head_bytes;
                if from < entry.bytes {
                    let rest = payload.slice(from as usize, (entry.bytes - from) as usize);
                    let bytes = rest.bytes().min(share as usize);
                    return (Some(rest), bytes);
                }
                if self.dialect == Dialect::V1 {
                    heads.extend_from_slice(&entry.echo().encode()[(from - entry.bytes) as usize..]);
                }
            }
            if heads.len() >= HEADS_BYTES {
                break;
            }
            at = 0;
        }
        (None, 0)
    }

    fn advance(&mut self, mut bytes: u64) {
        while let Some(entry) = self.queue.get(self.sent) {
            let left_bytes = entry.sent_bytes(self.dialect) - self.sent_bytes;
            if bytes < left_bytes {
                self.sent_bytes += bytes;
                return;
            }
            bytes -= left_bytes;
            self.sent += 1;
            self.sent_bytes = 0;
            if bytes == 0 {
                return;
            }
        }
    }
}

impl Lane {
    /// Replies to a request of the client without the peer.
    pub(super) fn answer(&mut self, operation: Operation, header: &Header, status: Status) {
        self.replies.push_back(Header::reply(FrameKind::Reply(operation), header.request, status));
    }

    /// Returns true if the connection holds as many requests as the client may have in flight on one.
    fn is_full(&self) -> bool {
        self.queue.len() > Limits::REQUESTS_PER_CONNECTION
    }

    /// Handles a client frame with reads.
    pub(super) fn read(&mut self, header: &Header, body: &[u8]) {
        let Some(items) = decode_items::<ReadItem>(body, header.items) else {
            return self.answer(Operation::Read, header, Status::BadRequest);
        };
        for ReadItem { request, offset: address, bytes, .. } in items {
            if self.is_full() || bytes == 0 {
                let status = if bytes == 0 { Status::BadRequest } else { Status::Busy };
                self.answer(Operation::Read, &Header { request, ..*header }, status);
                continue;
            }
            self.queue.push_back(Entry {
                kind: Kind::Read,
                request,
                address,
                bytes,
                payload: None,
                hold: None,
                closed: 0,
            });
        }
    }

    /// Handles a client frame with a write. An unused payload is returned.
    pub(super) fn write(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: Option<OutgoingPayload>,
    ) -> Option<OutgoingPayload> {
        let mut items = decode_items::<WriteItem>(body, header.items).into_iter().flatten();
        let (Some(item), None) = (items.next(), items.next()) else {
            self.answer(Operation::Write, header, Status::BadRequest);
            return payload;
        };
        let Some(payload) = payload else {
            self.answer(Operation::Write, header, Status::BadRequest);
            return None;
        };
        let Pieces::One(buffer) = payload.buffers else {
            self.answer(Operation::Write, header, Status::Unsupported);
            return Some(payload);
        };
        let (request, address, bytes) = (header.request, item.offset, buffer.bytes() as u64);
        if self.is_full() || bytes == 0 {
            self.answer(Operation::Write, header, if bytes == 0 { Status::BadRequest } else { Status::Busy });
            return Some(OutgoingPayload { buffers: Pieces::One(buffer), ..payload });
        }
        let (payload, hold) = (Some(buffer), payload.hold);
        self.queue.push_back(Entry { kind: Kind::Write, request, address, bytes, payload, hold, closed: 0 });
        None
    }
}

pub(super) fn receive(stream: &TcpStream, scatter: &mut Scatter<'_>) -> ReceiveOutcome {
    match scatter.receive(stream.as_fd()) {
        Ok(0) => ReceiveOutcome::Ended(0),
        Ok(bytes) => ReceiveOutcome::Bytes(bytes),
        Err(error) if is_later(&error) => ReceiveOutcome::Later,
        Err(error) => ReceiveOutcome::Ended(error.raw_os_error().unwrap_or(0)),
    }
}

/// Opens a nonblocking socket, starts to connect it and registers it with the poller.
pub(super) fn open(poller: &Poller, address: SocketAddr, token: Token) -> std::io::Result<TcpStream> {
    let socket = net::tcp_socket(address)?;
    stream::start_connect(socket.as_fd(), address)?;
    poller.add(socket.as_fd(), token.to_bits(), Interest::BothEdges)?;
    Ok(TcpStream::from(socket))
}
