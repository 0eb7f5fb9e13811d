//! One connection from a stock engine: one request at a time, its bytes moved in place.

use std::net::TcpStream;
use std::os::fd::AsFd;

use kvplane_sys::{Gather, IoBuf, Scatter};

use super::options::{Ranges, ServerOptions};
use crate::mooncake::wire::{self, Dialect, REQUEST_BYTES, Request, STATUS_BYTES};
use crate::mooncake::{TURN_BYTES, is_later};

/// Read size for the payload of a rejected request, which is discarded.
pub(super) const DRAIN_BYTES: usize = 64 << 10;
/// Request budget of one connection's turn.
const TURN_REQUESTS: u32 = 64;

/// Phase of the connection.
pub(super) enum Phase {
    /// Receiving a request, `have` bytes of which have arrived.
    Request { bytes: [u8; REQUEST_BYTES], have: usize },
    /// Receiving a payload into its destination.
    Receiving { buffer: IoBuf, hold: u64, status: bool },
    /// Sending a status, then perhaps a payload from its source.
    Sending { status: [u8; STATUS_BYTES], status_sent: usize, payload: Option<IoBuf>, hold: Option<u64> },
    /// Sending the last status: a rejection.
    Rejecting { status_sent: usize },
    /// Discarding what the peer still sends, until it has read the status and closes: closing at once would make the
    /// kernel reset the connection, which may destroy the status in flight.
    Draining { left_bytes: u64 },
}

/// Reason why a turn ended.
pub(super) enum Turn {
    /// The socket is drained or full.
    Wait,
    /// The budget of the turn is used up.
    Again,
    /// The connection has ended.
    Over(Over),
}

/// End of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Over {
    /// Between two requests, or after a rejection: an orderly close.
    Clean,
    /// Within a request or its payload, or by a socket error.
    Torn,
    /// The received bytes are not a request.
    Garbage,
    /// A bad address, in the protocol version that can reject only by closing.
    Rejected,
}

/// A connection of a stock engine.
pub(super) struct ServedConnection {
    pub(super) stream: TcpStream,
    pub(super) phase: Phase,
    /// Time at which the phase's first byte was moved; between requests, time at which the last one ended.
    since_ns: u64,
    /// Time at which bytes were last moved.
    moved_ns: u64,
    /// Length of the message in flight, in bytes.
    message_bytes: u64,
}

/// Counters of one turn.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) reads: u64,
    pub(super) writes: u64,
    pub(super) rejected: u64,
    pub(super) moved_bytes: usize,
}

const FRESH: Phase = Phase::Request { bytes: [0; REQUEST_BYTES], have: 0 };

impl ServedConnection {
    pub(super) const fn new(stream: TcpStream, now_ns: u64) -> Self {
        Self { stream, phase: FRESH, since_ns: now_ns, moved_ns: now_ns, message_bytes: 0 }
    }

    /// Returns the range in use.
    pub(super) const fn hold(&self) -> Option<u64> {
        match self.phase {
            Phase::Receiving { hold, .. } => Some(hold),
            Phase::Sending { hold, .. } => hold,
            _ => None,
        }
    }

    /// Returns the time since which the connection has had no request.
    pub(super) const fn idle_since_ns(&self) -> Option<u64> {
        if matches!(self.phase, Phase::Request { have: 0, .. }) { Some(self.since_ns) } else { None }
    }

    /// Returns the time at which the connection is closed if no byte is moved until then.
    pub(super) fn deadline_ns(&self, options: &ServerOptions) -> u64 {
        match self.phase {
            Phase::Request { have: 0, .. } => self.since_ns.saturating_add(options.idle_ns),
            Phase::Request { .. } => self.since_ns.saturating_add(options.stall_ns),
            Phase::Rejecting { .. } | Phase::Draining { .. } => self.since_ns.saturating_add(options.drain_ns),
            Phase::Receiving { .. } | Phase::Sending { .. } => {
                let stalled = self.moved_ns.saturating_add(options.stall_ns);
                let slow_ns = self.message_bytes.saturating_mul(options.slowest_ns_per_byte);
                stalled.min(self.since_ns.saturating_add(options.stall_ns).saturating_add(slow_ns))
            }
        }
    }

    /// Runs one turn: moves bytes up to the turn's budget. Reads or writes until the socket would block, because the
    /// poller is edge-triggered.
    pub(super) fn turn(
        &mut self,
        ranges: &mut impl Ranges,
        options: &ServerOptions,
        tally: &mut Tally,
        scratch: &mut [u8],
        now_ns: u64,
    ) -> Turn {
        let mut requests = 0;
        while tally.moved_bytes < TURN_BYTES && requests < TURN_REQUESTS {
            let step = match &mut self.phase {
                Phase::Request { .. } => self.take_request(ranges, options, tally, now_ns),
                Phase::Receiving { .. } => self.receive(ranges, now_ns),
                Phase::Sending { .. } => self.send(ranges, now_ns),
                Phase::Rejecting { .. } => self.send_rejection(options, now_ns),
                Phase::Draining { .. } => self.drain(scratch),
            };
            match step {
                Ok(moved) => tally.moved_bytes += moved,
                Err(Turn::Wait) => return Turn::Wait,
                Err(turn) => return turn,
            }
            requests += u32::from(matches!(self.phase, Phase::Request { have: 0, .. }));
        }
        Turn::Again
    }

    fn take_request(
        &mut self,
        ranges: &mut impl Ranges,
        options: &ServerOptions,
        tally: &mut Tally,
        now_ns: u64,
    ) -> Result<usize, Turn> {
        let Phase::Request { bytes, have } = &mut self.phase else { return Ok(0) };
        let mut scatter = Scatter::new();
        scatter.push_bytes(&mut bytes[*have..]);
        let received = match scatter.receive(self.stream.as_fd()) {
            Ok(0) if *have == 0 => return Err(Turn::Over(Over::Clean)),
            Ok(0) => return Err(Turn::Over(Over::Torn)),
            other => step(other)?,
        };
        if *have == 0 {
            self.since_ns = now_ns;
        }
        *have += received;
        if *have < REQUEST_BYTES {
            return Ok(received);
        }
        let request = Request::decode(bytes).map_err(|_| Turn::Over(Over::Garbage))?;
        self.begin(&request, ranges, options, tally, now_ns)?;
        Ok(received)
    }

    fn begin(
        &mut self,
        request: &Request,
        ranges: &mut impl Ranges,
        options: &ServerOptions,
        tally: &mut Tally,
        now_ns: u64,
    ) -> Result<(), Turn> {
        (self.since_ns, self.moved_ns, self.message_bytes) = (now_ns, now_ns, request.bytes);
        let status = request.dialect == Dialect::V2;
        let Some((buffer, hold)) = ranges.acquire(request) else {
            tally.rejected += 1;
            if !status {
                return Err(Turn::Over(Over::Rejected));
            }
            self.phase = Phase::Rejecting { status_sent: 0 };
            // Tries to send the rejection at once, which succeeds unless the peer does not read its answers.
            return self.send_rejection(options, now_ns).map(|_| ());
        };
        assert_eq!(buffer.bytes() as u64, request.bytes, "the acquired range has another length than the request");
        self.phase = if request.write {
            tally.writes += 1;
            Phase::Receiving { buffer, hold, status }
        } else {
            tally.reads += 1;
            sending(status, Some(buffer), Some(hold))
        };
        Ok(())
    }

    fn receive(&mut self, ranges: &mut impl Ranges, now_ns: u64) -> Result<usize, Turn> {
        let Phase::Receiving { buffer, hold, status } = &mut self.phase else { return Ok(0) };
        let wanted = buffer.bytes().min(TURN_BYTES);
        let mut scatter = Scatter::new();
        scatter.push(buffer, wanted);
        let received = match scatter.receive(self.stream.as_fd()) {
            Ok(0) => return Err(Turn::Over(Over::Torn)),
            other => step(other)?,
        };
        self.moved_ns = now_ns;
        buffer.advance(received);
        if buffer.is_empty() {
            ranges.release(*hold);
            if *status {
                self.phase = sending(true, None, None);
            } else {
                self.next(now_ns);
            }
        }
        Ok(received)
    }

    fn send(&mut self, ranges: &mut impl Ranges, now_ns: u64) -> Result<usize, Turn> {
        let Phase::Sending { status, status_sent, payload, hold } = &mut self.phase else { return Ok(0) };
        let mut gather = Gather::new();
        gather.push_bytes(&status[*status_sent..]);
        if let Some(payload) = payload.as_ref() {
            gather.push(payload, payload.bytes().min(TURN_BYTES));
        }
        let sent = step(gather.send(self.stream.as_fd()))?;
        self.moved_ns = now_ns;
        let of_status = sent.min(STATUS_BYTES - *status_sent);
        *status_sent += of_status;
        if let Some(payload) = payload {
            payload.advance(sent - of_status);
        }
        if *status_sent == STATUS_BYTES && payload.as_ref().is_none_or(IoBuf::is_empty) {
            if let Some(hold) = hold.take() {
                ranges.release(hold);
            }
            self.next(now_ns);
        }
        Ok(sent)
    }

    fn send_rejection(&mut self, options: &ServerOptions, now_ns: u64) -> Result<usize, Turn> {
        let Phase::Rejecting { status_sent } = &mut self.phase else { return Ok(0) };
        let status = wire::encode_status(false);
        let mut gather = Gather::new();
        gather.push_bytes(&status[*status_sent..]);
        let sent = step(gather.send(self.stream.as_fd()))?;
        *status_sent += sent;
        if *status_sent == STATUS_BYTES {
            // The peer reads end of file after the status, and closes.
            let _ = self.stream.shutdown(std::net::Shutdown::Write);
            self.since_ns = now_ns;
            self.phase = Phase::Draining { left_bytes: options.drain_bytes };
        }
        Ok(sent)
    }

    fn drain(&mut self, scratch: &mut [u8]) -> Result<usize, Turn> {
        let Phase::Draining { left_bytes } = &mut self.phase else { return Ok(0) };
        let mut scatter = Scatter::new();
        scatter.push_bytes(scratch);
        let received = match scatter.receive(self.stream.as_fd()) {
            Ok(0) => return Err(Turn::Over(Over::Clean)),
            other => step(other)?,
        };
        *left_bytes = left_bytes.saturating_sub(received as u64);
        if *left_bytes == 0 {
            return Err(Turn::Over(Over::Torn));
        }
        Ok(received)
    }

    /// Waits for the next request.
    fn next(&mut self, now_ns: u64) {
        (self.phase, self.since_ns) = (FRESH, now_ns);
    }
}

fn sending(status: bool, payload: Option<IoBuf>, hold: Option<u64>) -> Phase {
    let status_sent = if status { 0 } else { STATUS_BYTES };
    Phase::Sending { status: wire::encode_status(true), status_sent, payload, hold }
}

/// Returns the moved bytes, or the reason why the turn ends.
fn step(result: std::io::Result<usize>) -> Result<usize, Turn> {
    result.map_err(|error| if is_later(&error) { Turn::Wait } else { Turn::Over(Over::Torn) })
}
