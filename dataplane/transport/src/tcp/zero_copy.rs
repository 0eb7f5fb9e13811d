//! Payloads lent to the kernel: sent from where they are, without a copy, and given back when the kernel gives notice.
//!
//! A payload's hold is reported as sent with the notice of its last call, so whoever waits for the hold waits for the
//! kernel: a pin, a segment that is being unregistered, an upload. An answer that comes sooner than the notice of its
//! request's payload is kept back until then, others pass it. The answer comes with the acknowledgement that makes the
//! kernel let go, so that is rare and short. Where a device's driver takes long, or the kernel has put this payload and
//! later ones under one notice and the network is slow, the kernel's count of acknowledged bytes is proof enough after
//! a while: what is acknowledged is never sent again, and the answer says that the peer's program has read it.
//!
//! A connection that ends while payloads are lent is reset first, by [`net::abort`]: the kernel then throws away
//! what it has not given to the device, so that no byte is sent from memory that is not ours to show any more. It is
//! reported as gone when the last notice has come, the device's included.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kvplane_proto::RequestId;
use kvplane_proto::frame::Header;
use kvplane_sys::{cpu, net, zero_copy};

use super::Tcp;
use super::connection::{Connection, Piece, State};
use super::outstanding::{Outstanding, Worth};
use crate::types::{CloseCause, ConnectionId, Event, Pieces};

/// How long an answer waits for a notice before the kernel's count of acknowledged bytes is asked instead. Much longer
/// than any device takes that works.
const ANSWER_PATIENCE_NS: u64 = 50_000_000;
/// How long the end of a connection waits for notices. Longer than the kernel's watchdog lets a device hang (5 s).
const END_PATIENCE_NS: u64 = 10_000_000_000;
/// The same for all connections of a driver that is dropped.
const DROP_PATIENCE_NS: u64 = 1_000_000_000;
const DROP_LOOK: Duration = Duration::from_micros(200);

/// When payloads are sent without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ZeroCopy {
    /// Never.
    Never,
    /// To other hosts, as long as the kernel does not say that it copies after all.
    #[default]
    Auto,
    /// Always, also where the kernel copies: for tests.
    Always,
}

/// Settings of sends without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroCopyOptions {
    /// When to do it.
    pub when: ZeroCopy,
    /// Pieces of payloads from this length on are sent so.
    pub least_bytes: usize,
}

impl ZeroCopyOptions {
    /// Below it, the call for the header, the pinning and the notice cost what the copy would: measured in
    /// docs/performance.md.
    pub const LEAST_BYTES: usize = 128 << 10;
}

impl Default for ZeroCopyOptions {
    fn default() -> Self {
        Self { when: ZeroCopy::default(), least_bytes: Self::LEAST_BYTES }
    }
}

/// What was counted of sends without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ZeroCopyCounters {
    /// Bytes that the kernel took that way.
    pub bytes: u64,
    /// Calls.
    pub calls: u64,
    /// Calls of which notice was given.
    pub noticed: u64,
    /// Those of them where the kernel had copied after all.
    pub copied: u64,
    /// Calls that the kernel refused, and that were made again with a copy.
    pub fallbacks: u64,
    /// Payloads that were given back for the peer's acknowledgement and answer, the notice being late.
    pub late: u64,
    /// Payloads that were given back without any notice, some seconds after a reset.
    pub abandoned: u64,
}

impl ZeroCopyCounters {
    /// Adds what another driver counted.
    pub const fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.calls += other.calls;
        self.noticed += other.noticed;
        self.copied += other.copied;
        self.fallbacks += other.fallbacks;
        self.late += other.late;
        self.abandoned += other.abandoned;
    }
}

/// Whether a connection lends payloads.
#[derive(Default)]
pub(super) enum LendingState {
    /// It had none that was long enough.
    #[default]
    Undecided,
    No,
    Yes(Box<LentPayloads>),
}

/// What one connection has lent.
#[derive(Default)]
pub(super) struct LentPayloads {
    pub(super) outstanding: Outstanding,
    pub(super) worth: Worth,
    /// Payloads that were given to the kernel as a whole, in order. Each has a call of its own that is outstanding, or
    /// one before it that is: so they are no more than [`super::outstanding::CALLS`].
    waiting: VecDeque<PendingNotice>,
    /// Answers that were kept back and may pass now. As many as were waiting.
    answers: VecDeque<(Header, Vec<u8>)>,
    /// When to look again without a notice; then the connection is in the driver's list.
    pub(super) until_ns: Option<u64>,
}

struct PendingNotice {
    last_call: u32,
    /// How much had been sent on the connection when the payload had.
    end_bytes: u64,
    hold: u64,
    request: RequestId,
    /// Its answer, kept back.
    answer: Option<(Header, Vec<u8>)>,
    /// Stays mapped until then.
    _pieces: Pieces,
}

impl LentPayloads {
    /// Takes what the kernel no longer refers to; the holds go to `events`.
    fn settle(&mut self, fd: BorrowedFd<'_>, counters: &mut ZeroCopyCounters, events: &mut VecDeque<Event>) {
        while let Ok(Some(notice)) = zero_copy::take_notice(fd) {
            let calls = u64::from(notice.last.wrapping_sub(notice.first)) + 1;
            counters.noticed += calls;
            if notice.copied {
                counters.copied += calls;
                self.worth.unpaid();
            } else {
                self.worth.paid();
            }
            self.outstanding.notice(notice.first, notice.last);
        }
        while self.waiting.front().is_some_and(|first| self.outstanding.is_done(first.last_call)) {
            self.release(events);
        }
    }

    /// Gives the first waiting payload back.
    fn release(&mut self, events: &mut VecDeque<Event>) {
        if let Some(waiting) = self.waiting.pop_front() {
            events.push_back(Event::Sent(waiting.hold));
            self.answers.extend(waiting.answer);
        }
    }

    /// Whether an answer is kept back.
    fn keeps_back(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.answer.is_some())
    }
}

impl Connection {
    /// The lender, if this connection has one.
    pub(super) fn lent(&mut self) -> Option<&mut LentPayloads> {
        match &mut self.lending {
            LendingState::Yes(lent) => Some(lent),
            LendingState::Undecided | LendingState::No => None,
        }
    }

    /// Whether the kernel refers to memory that somebody waits for.
    pub(super) fn has_lent(&self) -> bool {
        matches!(&self.lending, LendingState::Yes(lent) if !lent.waiting.is_empty())
    }

    /// From which length on pieces are lent now; nothing is that long when none are.
    pub(super) fn lends_from(&self, options: &ZeroCopyOptions) -> usize {
        match &self.lending {
            LendingState::Undecided if options.when != ZeroCopy::Never => options.least_bytes.max(1),
            LendingState::Yes(lent) if !lent.outstanding.is_full() && lent.worth.pays(options.when) => {
                options.least_bytes.max(1)
            }
            _ => usize::MAX,
        }
    }

    /// Decides whether this connection lends, with the first piece that is long enough.
    pub(super) fn decide(&mut self, options: &ZeroCopyOptions) {
        if matches!(self.lending, LendingState::Undecided) {
            let fd = self.socket.as_fd();
            // What stays on this host is always copied.
            let may = options.when == ZeroCopy::Always || !is_on_this_host(fd).unwrap_or(true);
            let can = may && zero_copy::enable(fd).is_ok();
            self.lending = if can { LendingState::Yes(Box::default()) } else { LendingState::No };
        }
    }

    /// So many bytes of the first piece were lent by the last call.
    pub(super) fn lent_bytes(&mut self, bytes: usize, counters: &mut ZeroCopyCounters) {
        let call = self.lent().map(|lent| lent.outstanding.issue());
        if let Some(Piece::Memory { last_call, .. }) = self.pieces.front_mut() {
            *last_call = call;
        }
        self.sent_bytes += bytes as u64;
        counters.bytes += bytes as u64;
        counters.calls += 1;
    }

    /// So many bytes were sent with a copy.
    pub(super) fn copied_bytes(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
        if let Some(lent) = self.lent() {
            lent.worth.copied(bytes as u64);
        }
    }

    /// The kernel has refused a call. The room for notices that were not taken yet may have been what it lacked.
    pub(super) fn refused(&mut self, counters: &mut ZeroCopyCounters, events: &mut VecDeque<Event>) {
        counters.fallbacks += 1;
        if let LendingState::Yes(lent) = &mut self.lending {
            lent.worth.unpaid();
            lent.settle(self.socket.as_fd(), counters, events);
        }
    }

    /// A payload has been given to the kernel as a whole: who waits for it waits for notice too, if it was lent.
    pub(super) fn payload_left(&mut self, piece: Piece, events: &mut VecDeque<Event>) {
        let Piece::Memory { pieces, hold, request, last_call, .. } = piece else { return };
        let Some(hold) = hold else { return };
        match (last_call, &mut self.lending) {
            (Some(last_call), LendingState::Yes(lent))
                if !lent.waiting.is_empty() || !lent.outstanding.is_done(last_call) =>
            {
                let end_bytes = self.sent_bytes;
                lent.waiting.push_back(PendingNotice {
                    last_call,
                    end_bytes,
                    hold,
                    request,
                    answer: None,
                    _pieces: pieces,
                });
            }
            _ => events.push_back(Event::Sent(hold)),
        }
    }

    /// Whether an answer that was kept back may pass now.
    pub(super) fn has_answer(&self) -> bool {
        matches!(&self.lending, LendingState::Yes(lent) if !lent.answers.is_empty())
    }

    /// An answer that was kept back and may pass now.
    pub(super) fn take_answer(&mut self) -> Option<(Header, Vec<u8>)> {
        self.lent()?.answers.pop_front()
    }

    /// Keeps an answer back while the kernel refers to its request's payload. Whether it did.
    fn keep_back(&mut self, header: &Header, body: &[u8]) -> bool {
        if !self.asks || header.payload_bytes > 0 {
            return false;
        }
        let Some(lent) = self.lent() else { return false };
        let of = |waiting: &&mut PendingNotice| waiting.request == header.request && waiting.answer.is_none();
        let Some(waiting) = lent.waiting.iter_mut().find(of) else { return false };
        waiting.answer = Some((*header, body.to_vec()));
        true
    }
}

impl Tcp {
    /// Takes the notices that have come for a connection.
    pub(super) fn settle(&mut self, index: u32) {
        let Some(connection) = self.connections[index as usize].as_mut() else { return };
        let LendingState::Yes(lent) = &mut connection.lending else { return };
        lent.settle(connection.socket.as_fd(), &mut self.zero_copy_counters, &mut self.events);
        self.settled(index);
    }

    /// Payloads may have been given back: goes on with what waited for that.
    fn settled(&mut self, index: u32) {
        let id = ConnectionId { index, generation: self.generations[index as usize] };
        let Some(connection) = self.connections[index as usize].as_mut() else { return };
        if connection.state == State::Ending {
            self.end(id);
            return;
        }
        // It stays said that all was sent: such a connection is not aborted.
        if connection.is_quiet()
            && let Some(why) = connection.closing_after_send.clone()
        {
            self.close(id, why);
        } else if connection.lent().is_some_and(|lent| !lent.answers.is_empty()) {
            // Not in this round: the host first takes the events that came before.
            self.again.push(index);
        }
    }

    /// Keeps an answer back if the payload of its request is lent; see the module. Whether it did.
    pub(super) fn keep_back(&mut self, id: ConnectionId, header: &Header, body: &[u8]) -> bool {
        let kept = self.get(id).is_some_and(|connection| connection.keep_back(header, body));
        if kept {
            // Mostly it is there already and was not looked at.
            self.settle(id.index);
            if self.get(id).and_then(|connection| connection.lent()).is_some_and(|lent| lent.keeps_back()) {
                self.look_later(id.index, ANSWER_PATIENCE_NS);
            }
        }
        kept
    }

    /// Looks at a connection after so long, unless that is planned already.
    fn look_later(&mut self, index: u32, patience_ns: u64) {
        let Some(lent) = self.connections[index as usize].as_mut().and_then(Connection::lent) else { return };
        if lent.until_ns.is_none() {
            lent.until_ns = Some(cpu::monotonic_ns().saturating_add(patience_ns));
            self.waiting.push(index);
        }
    }

    /// Closes a connection that has sent everything when its notices have come, or do not.
    pub(super) fn end_later(&mut self, index: u32) {
        self.look_later(index, END_PATIENCE_NS);
    }

    /// Looks at connections that waited for notices long enough.
    pub(super) fn lose_patience(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let now_ns = cpu::monotonic_ns();
        for index in core::mem::take(&mut self.waiting) {
            let Some(connection) = self.connections[index as usize].as_mut() else { continue };
            let Some(lent) = connection.lent() else { continue };
            match lent.until_ns {
                Some(until_ns) if until_ns > now_ns => self.waiting.push(index),
                Some(_) => {
                    lent.until_ns = None;
                    self.settle(index);
                    self.overdue(index);
                }
                None => {}
            }
        }
    }

    fn overdue(&mut self, index: u32) {
        let Some(connection) = self.connections[index as usize].as_mut() else { return };
        let LendingState::Yes(lent) = &mut connection.lending else { return };
        if connection.state == State::Ending {
            self.zero_copy_counters.abandoned += lent.waiting.len() as u64;
            while !lent.waiting.is_empty() {
                lent.release(&mut self.events);
            }
            self.settled(index);
        } else if let Some(why) = connection.closing_after_send.clone() {
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            self.close(id, why);
        } else if lent.keeps_back() {
            let Ok(open_bytes) = zero_copy::unacknowledged_bytes(connection.socket.as_fd()) else { return };
            let acknowledged_bytes = connection.sent_bytes.saturating_sub(open_bytes);
            while lent.waiting.front().is_some_and(|one| one.answer.is_some() && one.end_bytes <= acknowledged_bytes) {
                lent.release(&mut self.events);
                lent.worth.pause();
                self.zero_copy_counters.late += 1;
            }
            if lent.keeps_back() {
                self.look_later(index, ANSWER_PATIENCE_NS);
            }
            self.settled(index);
        }
    }

    /// Resets a connection that has lent payloads. It is gone when they are back; false when it has none out.
    pub(super) fn end_lent(&mut self, id: ConnectionId, why: &CloseCause) -> bool {
        let Some(connection) = self.get(id) else { return false };
        // What was lent in part stays in part; the rest was never the kernel's.
        let lent_in_part = matches!(connection.pieces.front(), Some(Piece::Memory { last_call: Some(_), .. }));
        if !lent_in_part && !connection.has_lent() {
            return false;
        }
        // Where that fails, closing the descriptor resets it, and no notice says when the device is done.
        let proof = net::abort(connection.socket.as_fd()).is_ok();
        connection.state = State::Ending;
        connection.why = Some(why.clone());
        let Some(connection) = self.connections[id.index as usize].as_mut() else { return false };
        let frames = connection.frames.drain(..).filter_map(|frame| frame.payload?.hold);
        self.events.extend(frames.map(Event::Sent));
        while let Some(piece) = connection.pieces.pop_front() {
            connection.payload_left(piece, &mut self.events);
        }
        connection.left = Vec::new();
        connection.kept = Vec::new();
        if let Some(lent) = connection.lent() {
            lent.until_ns = None;
            self.waiting.retain(|&index| index != id.index);
        }
        self.look_later(id.index, if proof { END_PATIENCE_NS } else { 0 });
        self.settle(id.index);
        true
    }

    /// A connection that was reset: gone, if everything is back.
    fn end(&mut self, id: ConnectionId) {
        let slot = &mut self.connections[id.index as usize];
        if let Some(connection) = slot.take_if(|connection| !connection.has_lent()) {
            self.events.push_back(Event::Gone(id, connection.why.unwrap_or(CloseCause::Closed)));
        }
    }

    /// When a connection is to be looked at without a notice.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let until = |&index: &u32| match &self.connections[index as usize].as_ref()?.lending {
            LendingState::Yes(lent) => lent.until_ns,
            LendingState::Undecided | LendingState::No => None,
        };
        self.waiting.iter().filter_map(until).min()
    }

    /// What was counted of sends without a copy.
    #[must_use]
    pub const fn zero_copy(&self) -> &ZeroCopyCounters {
        &self.zero_copy_counters
    }
}

/// The memory may go with the driver: resets what has lent some of it, and waits for the notices.
impl Drop for Tcp {
    fn drop(&mut self) {
        for index in 0..self.connections.len() as u32 {
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            self.end_lent(id, &CloseCause::Closed);
        }
        let until_ns = cpu::monotonic_ns().saturating_add(DROP_PATIENCE_NS);
        while self.connections.iter().flatten().any(Connection::has_lent) && cpu::monotonic_ns() < until_ns {
            std::thread::sleep(DROP_LOOK);
            (0..self.connections.len() as u32).for_each(|index| self.settle(index));
        }
    }
}

/// Whether both ends of a connection have the same address, or one that is of this host only.
fn is_on_this_host(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let (ours, theirs) = (net::local_address(fd)?.ip().to_canonical(), net::peer_address(fd)?.ip().to_canonical());
    Ok(ours == theirs || theirs.is_loopback())
}
