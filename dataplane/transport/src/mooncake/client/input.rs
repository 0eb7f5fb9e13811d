//! Receive path of the Mooncake client: decodes statuses, receives payloads and classifies connection failures.

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind as FrameKind, Operation};
use kvplane_sys::{Poller, Scatter};

use super::lane::{Entry, Expect, Kind, Lane, ReceiveOutcome, State, receive};
use super::{CONNECT_NS, Lanes, token};
use crate::mooncake::TURN_BYTES;
use crate::mooncake::wire::{Dialect, STATUS_BYTES, Verdict, decode_status};
use crate::types::{CloseCause, ConnectionId, Event, Input};

/// Timeout for the rest of a status, in nanoseconds. After it, the peer is considered to speak version 1 and to have
/// sent the few requested payload bytes instead.
const STATUS_NS: u64 = 2_000_000_000;
/// Read size for payload bytes that are discarded.
const SKIP_BYTES: usize = 16 << 10;

/// Result of one attempt to read the socket.
enum Step {
    /// Try again.
    On,
    /// No more input for now.
    Wait,
    /// Input for the client.
    Give(Input),
    /// The answer to the oldest request is complete.
    Done,
    /// The oldest request was rejected with this status.
    Refused(Status),
    /// The peer speaks version 1.
    Older,
    /// The peer closed the connection: the errno, or 0 for an orderly close.
    Ended(i32),
    /// Protocol violation: the peer sent bytes that answer no request.
    Broken(&'static str),
}

impl Lanes {
    /// Returns the next input of a connection. The body of a frame replaces `scratch`. After a frame with a payload,
    /// the host calls [`Self::receive_payload`] before it calls this again.
    pub fn input(&mut self, poller: &Poller, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let mut share = TURN_BYTES;
        loop {
            let now_ns = self.now_ns;
            let Some(connection) = self.connections.get_mut(id) else { return Input::Wait };
            scratch.clear();
            if let Some(header) = connection.replies.pop_front() {
                return Input::Frame(header);
            }
            if connection.state != State::Open {
                return Input::Wait;
            }
            if share == 0 {
                self.ready_again(id);
                return Input::Wait;
            }
            match connection.step(&mut share, now_ns) {
                Step::On => {}
                Step::Wait => {
                    if let Some(at_ns) = connection.deadline_ns() {
                        self.alarm(at_ns);
                    }
                    return Input::Wait;
                }
                Step::Give(input) => {
                    if matches!(input, Input::Payload(_)) {
                        // The answer was delivered with the preceding frame.
                        let _ = self.done(id);
                    } else {
                        self.verified(id);
                    }
                    return input;
                }
                Step::Done => {
                    if let Some(header) = self.done(id) {
                        return Input::Frame(header);
                    }
                }
                Step::Refused(status) => {
                    if let Some(header) = self.refused(poller, id, status) {
                        return Input::Frame(header);
                    }
                }
                Step::Older => {
                    let address = connection.address;
                    self.downgrade(poller, id, address);
                }
                Step::Ended(errno) => {
                    if let Some(header) = self.ended(poller, id, errno) {
                        return Input::Frame(header);
                    }
                }
                Step::Broken(what) => {
                    let text = format!("{}: {what}", connection.address);
                    self.close(poller, id, CloseCause::Setup(text));
                }
            }
        }
    }

    /// Records that the peer has sent a status: it speaks version 2.
    fn verified(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        if connection.dialect == Dialect::V2 && !connection.verified {
            connection.verified = true;
            // More requests may be pipelined now.
            self.mark_due(id);
        }
    }

    /// Completes the oldest request. Returns the reply frame, if one is due.
    fn done(&mut self, id: ConnectionId) -> Option<Header> {
        self.verified(id);
        let connection = self.connections.get_mut(id)?;
        connection.expect = Expect::Answer;
        let entry = connection.pop()?;
        // The requests behind it may be sent.
        self.mark_due(id);
        let header = (entry.kind == Kind::Write).then(|| reply(&entry, Status::Ok));
        self.give_back(&entry);
        header
    }

    /// Handles the rejection of the oldest request, after which its connection ends: the other requests are sent again
    /// over a new connection.
    fn refused(&mut self, poller: &Poller, id: ConnectionId, status: Status) -> Option<Header> {
        self.verified(id);
        self.counters.rejected += 1;
        let connection = self.connections.get_mut(id)?;
        let mut entry = connection.pop()?;
        if entry.kind == Kind::Probe {
            // The probe read the start of the range that the next request writes to.
            entry = connection.pop()?;
        }
        let header = reply(&entry, status);
        self.give_back(&entry);
        self.reconnect(poller, id);
        Some(header)
    }

    fn ended(&mut self, poller: &Poller, id: ConnectionId, errno: i32) -> Option<Header> {
        let connection = self.connections.get_mut(id)?;
        let silent = connection.dialect == Dialect::V1
            && connection.has_asked()
            && matches!(connection.expect, Expect::Answer | Expect::Skip { .. });
        let Some(entry) = connection.queue.front_mut().filter(|_| silent) else {
            let why = if errno == 0 { CloseCause::Peer } else { CloseCause::Kernel(errno) };
            self.close(poller, id, why);
            return None;
        };
        entry.closed += 1;
        if entry.closed > 1 {
            return self.refused(poller, id, Status::OutOfRange);
        }
        self.reconnect(poller, id);
        None
    }

    fn reconnect(&mut self, poller: &Poller, id: ConnectionId) {
        self.counters.reconnects += 1;
        let until_ns = self.now_ns.saturating_add(CONNECT_NS);
        self.alarm(until_ns);
        let Some(connection) = self.connections.get_mut(id) else { return };
        if let Err(error) = connection.restart(poller, token(id), until_ns) {
            self.close(poller, id, CloseCause::Setup(error.to_string()));
        }
    }

    fn give_back(&mut self, entry: &Entry) {
        self.events.extend(entry.hold.map(Event::Sent));
    }
}

fn reply(entry: &Entry, status: Status) -> Header {
    Header::reply(FrameKind::Reply(entry.operation()), entry.request, status)
}

impl Lane {
    /// Returns the deadline for the connection's next progress.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        match (self.state, &self.expect) {
            (State::Connecting { until_ns, .. }, _) => Some(until_ns),
            (State::Open, Expect::Status { since_ns, have, .. }) if self.may_be_short_answer(*have) => {
                Some(since_ns.saturating_add(STATUS_NS))
            }
            (State::Open, _) => None,
        }
    }

    /// Returns true if the received part of a status may be the complete answer of a version 1 server.
    fn may_be_short_answer(&self, have: usize) -> bool {
        !self.verified && self.queue.front().is_some_and(|entry| entry.bytes == have as u64)
    }

    /// Reads the socket once.
    fn step(&mut self, share: &mut usize, now_ns: u64) -> Step {
        match self.expect {
            Expect::Answer => self.answer_begins(now_ns),
            Expect::Status { .. } => self.take_status(now_ns),
            Expect::Decision { .. } => Step::Wait,
            Expect::Payload { left_bytes: 0, .. } => Step::Give(Input::Payload(None)),
            Expect::Skip { left_bytes: 0 } => Step::Done,
            Expect::Payload { .. } => self.take_payload(share),
            Expect::Skip { .. } => self.skip(share),
        }
    }

    /// Handles the first bytes of an answer, or the end of the connection.
    fn answer_begins(&mut self, now_ns: u64) -> Step {
        let asked = self.has_asked();
        match self.queue.front() {
            Some(entry) if asked && self.dialect == Dialect::V1 => {
                if entry.kind == Kind::Write {
                    if self.has_asked_all() {
                        self.expect = Expect::Skip { left_bytes: 1 };
                        return Step::On;
                    }
                    return self.expect_nothing();
                }
                // Announced only when the first byte has arrived: until then the peer may refuse.
                match self.peek() {
                    ReceiveOutcome::Later => Step::Wait,
                    ReceiveOutcome::Ended(errno) => Step::Ended(errno),
                    ReceiveOutcome::Bytes(_) => self.announce(),
                }
            }
            Some(_) if asked => {
                self.expect = Expect::Status { bytes: [0; STATUS_BYTES], have: 0, since_ns: now_ns };
                let step = self.take_status(now_ns);
                // No byte of the status has arrived yet.
                if let Expect::Status { have: 0, .. } = self.expect {
                    self.expect = Expect::Answer;
                }
                step
            }
            _ => self.expect_nothing(),
        }
    }

    /// Handles a state in which only the end of the connection may arrive.
    fn expect_nothing(&self) -> Step {
        match self.peek() {
            ReceiveOutcome::Later => Step::Wait,
            ReceiveOutcome::Ended(errno) => Step::Ended(errno),
            ReceiveOutcome::Bytes(_) => Step::Broken("bytes arrived that answer no request"),
        }
    }

    fn peek(&self) -> ReceiveOutcome {
        let mut byte = [0];
        match self.stream.peek(&mut byte) {
            Ok(0) => ReceiveOutcome::Ended(0),
            Ok(bytes) => ReceiveOutcome::Bytes(bytes),
            Err(error) if super::super::is_later(&error) => ReceiveOutcome::Later,
            Err(error) => ReceiveOutcome::Ended(error.raw_os_error().unwrap_or(0)),
        }
    }

    fn take_status(&mut self, now_ns: u64) -> Step {
        let Expect::Status { bytes, have, since_ns } = &mut self.expect else { return Step::On };
        let mut scatter = Scatter::new();
        scatter.push_bytes(&mut bytes[*have..]);
        match receive(&self.stream, &mut scatter) {
            ReceiveOutcome::Later => return Step::Wait,
            ReceiveOutcome::Ended(errno) => return Step::Ended(errno),
            ReceiveOutcome::Bytes(received) => *have += received,
        }
        *since_ns = now_ns;
        let (bytes, have) = (*bytes, *have);
        if have < STATUS_BYTES {
            // A short answer of version 1 is recognized at once if its first bytes cannot be those of a status.
            let alike = bytes[0] <= 1 && bytes[1..4.min(have)].iter().all(|&byte| byte == 0);
            // Read again: the poller reports only what arrives after the socket was found empty.
            return if self.may_be_short_answer(have) && !alike { Step::Older } else { Step::On };
        }
        match decode_status(bytes) {
            Verdict::Done => self.announce_done(),
            Verdict::Rejected => Step::Refused(Status::OutOfRange),
            Verdict::Failed(_) => Step::Refused(Status::Unsupported),
            Verdict::NotAStatus if self.verified => Step::Broken("neither a status nor an answer arrived"),
            Verdict::NotAStatus => Step::Older,
        }
    }

    /// Handles a status of success for the oldest request.
    fn announce_done(&mut self) -> Step {
        let all = self.has_asked_all();
        match self.queue.front() {
            Some(entry) if entry.kind == Kind::Write => {
                // Accepting this status would complete a request whose memory is still being sent.
                if all { Step::Done } else { Step::Broken("the peer answered a write before its payload was sent") }
            }
            Some(entry) if entry.kind == Kind::Probe => {
                self.expect = Expect::Skip { left_bytes: entry.bytes };
                Step::On
            }
            _ => self.announce(),
        }
    }

    /// Announces the payload of the oldest request, which follows.
    fn announce(&mut self) -> Step {
        let Some(entry) = self.queue.front() else { return Step::Wait };
        self.expect = Expect::Decision { bytes: entry.bytes };
        let header = Header::reply(FrameKind::Reply(Operation::Read), entry.request, Status::Ok);
        Step::Give(Input::Frame(header.with_payload(entry.bytes, None)))
    }

    fn take_payload(&mut self, share: &mut usize) -> Step {
        let Expect::Payload { buffer, left_bytes } = &mut self.expect else { return Step::On };
        let Some(buffer) = buffer else { return self.skip(share) };
        let mut scatter = Scatter::new();
        scatter.push(buffer, buffer.bytes().min(*share));
        match receive(&self.stream, &mut scatter) {
            ReceiveOutcome::Later => Step::Wait,
            ReceiveOutcome::Ended(errno) => Step::Ended(errno),
            ReceiveOutcome::Bytes(bytes) => {
                buffer.advance(bytes);
                *left_bytes -= bytes as u64;
                *share -= bytes;
                Step::On
            }
        }
    }

    /// Reads and discards payload bytes.
    fn skip(&mut self, share: &mut usize) -> Step {
        let (Expect::Skip { left_bytes } | Expect::Payload { left_bytes, .. }) = &mut self.expect else {
            return Step::On;
        };
        let mut bytes = [0; SKIP_BYTES];
        let wanted = SKIP_BYTES.min(*share).min(usize::try_from(*left_bytes).unwrap_or(usize::MAX));
        let mut scatter = Scatter::new();
        scatter.push_bytes(&mut bytes[..wanted]);
        match receive(&self.stream, &mut scatter) {
            ReceiveOutcome::Later => Step::Wait,
            ReceiveOutcome::Ended(errno) => Step::Ended(errno),
            ReceiveOutcome::Bytes(received) => {
                *left_bytes -= received as u64;
                *share -= received;
                Step::On
            }
        }
    }
}
