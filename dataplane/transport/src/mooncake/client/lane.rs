//! One connection to a stock engine: its requests in order, what of them was sent, and what arrives next.

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

/// Requests sent ahead of the answers, where the peer answers each with a status.
const AHEAD: usize = 16;
/// Heads of requests gathered into one send.
const HEADS_BYTES: usize = 64 * REQUEST_BYTES;
/// Bytes read before the first write over a connection, to see that it speaks version 2.
pub(super) const PROBE_BYTES: u64 = STATUS_BYTES as u64;

/// What a request is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    Write,
    /// Reads what the next request writes to, only to see how the peer answers.
    Probe,
}

/// A request that is not answered yet.
pub(super) struct Entry {
    pub(super) kind: Kind,
    pub(super) request: RequestId,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// What a write sends. Kept until the answer, in case the request must be sent again.
    pub(super) payload: Option<IoBuf>,
    /// What to say when the payload is not used any more.
    pub(super) hold: Option<u64>,
    /// How often the peer closed the connection over it without a word.
    pub(super) closed: u8,
}

impl Entry {
    /// The client's operation that it belongs to.
    pub(super) const fn operation(&self) -> Operation {
        if matches!(self.kind, Kind::Write) { Operation::Write } else { Operation::Read }
    }

    const fn head(&self, dialect: Dialect) -> Request {
        let write = matches!(self.kind, Kind::Write);
        Request { address: self.address, bytes: self.bytes, write, dialect }
    }

    /// The request that follows a write of version 1, whose server says nothing: the server takes requests in order,
    /// so the byte it sends back says that the write is in place.
    const fn echo(&self) -> Request {
        Request { address: self.address, bytes: 1, write: false, dialect: Dialect::V1 }
    }

    /// Bytes that it sends.
    fn sent_bytes(&self, dialect: Dialect) -> u64 {
        let head = REQUEST_BYTES as u64;
        match (self.kind, dialect) {
            (Kind::Read | Kind::Probe, _) => head,
            (Kind::Write, Dialect::V1) => head + self.bytes + head,
            (Kind::Write, Dialect::V2) => head + self.bytes,
        }
    }
}

/// What arrives next.
pub(super) enum Expect {
    /// The first bytes of an answer.
    Answer,
    /// A status, `have` bytes of which are here, the last since `since_ns`.
    Status { bytes: [u8; STATUS_BYTES], have: usize, since_ns: u64 },
    /// The host has a frame and will say where its payload goes.
    Decision { bytes: u64 },
    /// A payload on its way to its place, or nowhere.
    Payload { buffer: Option<IoBuf>, left_bytes: u64 },
    /// A payload that is no answer to the client: of a probe or an echo.
    Skip { left_bytes: u64 },
}

/// Where the connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// It is being connected; gives up at `until_ns`. `again`: the host knows it as connected already.
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
    /// Whether the peer has shown over this connection that it speaks version 2. Over the next it may be another.
    pub(super) verified: bool,
    /// Unanswered requests, oldest first.
    pub(super) queue: VecDeque<Entry>,
    /// How many of them have been sent, and how many bytes of the next.
    pub(super) sent: usize,
    sent_bytes: u64,
    /// Nothing can be sent any more; what arrives says why.
    pub(super) send_broken: bool,
    pub(super) expect: Expect,
    /// Answers that came without the peer.
    pub(super) replies: VecDeque<Header>,
}

/// How sending went.
pub(super) enum SendOutcome {
    /// The socket takes no more, or there is nothing to send.
    Wait,
    /// The share is used up.
    Again,
}

/// How receiving went.
pub(super) enum ReceiveOutcome {
    Bytes(usize),
    Later,
    /// The peer closed, or reset, the connection: the errno, or 0.
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

    /// Takes a new socket for the requests that are left: all of them are sent again.
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

    /// Whether something of the oldest request has been sent.
    pub(super) fn has_asked(&self) -> bool {
        self.sent > 0 || self.sent_bytes > 0
    }

    /// Whether all of the oldest request has been sent.
    pub(super) const fn has_asked_all(&self) -> bool {
        self.sent > 0
    }

    /// The oldest request is answered.
    pub(super) fn pop(&mut self) -> Option<Entry> {
        match self.sent {
            0 => self.sent_bytes = 0,
            _ => self.sent -= 1,
        }
        self.queue.pop_front()
    }

    /// How many requests may be under way.
    fn ahead(&self) -> usize {
        if self.dialect == Dialect::V2 && self.verified { AHEAD } else { 1 }
    }

    /// Sends what may be sent, up to a share.
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
                // What the peer said before it closed is still to be read.
                Err(_) => self.send_broken = true,
            }
        }
        SendOutcome::Wait
    }

    /// What leaves next: heads of requests, then at most one payload.
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
    /// Answers a request of the client's without the peer.
    pub(super) fn answer(&mut self, operation: Operation, header: &Header, status: Status) {
        self.replies.push_back(Header::reply(FrameKind::Reply(operation), header.request, status));
    }

    /// A connection takes as many requests as the client may have open on one.
    fn is_full(&self) -> bool {
        self.queue.len() > Limits::REQUESTS_PER_CONNECTION
    }

    /// Takes the client's frame with reads.
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

    /// Takes the client's frame with a write. A payload that is not used comes back.
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

/// A socket that is being connected and watched.
pub(super) fn open(poller: &Poller, address: SocketAddr, token: Token) -> std::io::Result<TcpStream> {
    let socket = net::tcp_socket(address)?;
    stream::start_connect(socket.as_fd(), address)?;
    poller.add(socket.as_fd(), token.to_bits(), Interest::BothEdges)?;
    Ok(TcpStream::from(socket))
}
