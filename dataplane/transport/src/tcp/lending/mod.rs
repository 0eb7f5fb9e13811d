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

mod options;
mod outstanding;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use kvplane_proto::RequestId;
use kvplane_proto::frame::Header;
use kvplane_sys::{net, zero_copy};
pub use options::{ZeroCopy, ZeroCopyCounters, ZeroCopyOptions};
use outstanding::{Outstanding, Worth};

use crate::types::{Event, Pieces};

/// A payload that the kernel has taken as a whole, the last of it by this call.
pub(super) struct LentPayload {
    pub(super) last_call: u32,
    /// How much had been sent on the connection when the payload had.
    pub(super) end_bytes: u64,
    pub(super) hold: u64,
    pub(super) request: RequestId,
}

/// Whether a connection lends payloads to the kernel, and which it has lent.
#[derive(Default)]
pub(super) enum Lending {
    /// It had none that was long enough.
    #[default]
    Undecided,
    No,
    Yes(Box<LentPayloads>),
}

/// What one connection has lent.
#[derive(Default)]
pub(super) struct LentPayloads {
    outstanding: Outstanding,
    worth: Worth,
    /// Payloads that were given to the kernel as a whole, in order. Each has a call of its own that is outstanding, or
    /// one before it that is: so they are no more than [`outstanding::CALLS`].
    waiting: VecDeque<PendingNotice>,
    /// Answers that were kept back and may pass now. As many as were waiting.
    answers: VecDeque<(Header, Vec<u8>)>,
    /// When to look again without a notice; then the connection is in the driver's list.
    pub(super) until_ns: Option<u64>,
}

struct PendingNotice {
    payload: LentPayload,
    /// Its answer, kept back.
    answer: Option<(Header, Vec<u8>)>,
    /// Stays mapped until the kernel lets go.
    _pieces: Pieces,
}

impl LentPayloads {
    /// Takes what the kernel no longer refers to; the holds go to `events`.
    pub(super) fn settle(&mut self, fd: BorrowedFd<'_>, counters: &mut ZeroCopyCounters, events: &mut VecDeque<Event>) {
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
        while self.waiting.front().is_some_and(|first| self.outstanding.is_done(first.payload.last_call)) {
            self.release(events);
        }
    }

    /// Gives the first waiting payload back.
    fn release(&mut self, events: &mut VecDeque<Event>) {
        if let Some(waiting) = self.waiting.pop_front() {
            events.push_back(Event::Sent(waiting.payload.hold));
            self.answers.extend(waiting.answer);
        }
    }

    /// Gives all payloads back although no notice came; how many there were.
    pub(super) fn abandon(&mut self, events: &mut VecDeque<Event>) -> u64 {
        let count = self.waiting.len();
        (0..count).for_each(|_| self.release(events));
        count as u64
    }

    /// Gives the payloads back that the peer has acknowledged and answered: so much of what was sent is acknowledged.
    /// How many they were.
    pub(super) fn release_answered(&mut self, acknowledged_bytes: u64, events: &mut VecDeque<Event>) -> u64 {
        let mut count = 0;
        let answered = |one: &PendingNotice| one.answer.is_some() && one.payload.end_bytes <= acknowledged_bytes;
        while self.waiting.front().is_some_and(answered) {
            self.release(events);
            self.worth.pause();
            count += 1;
        }
        count
    }

    /// Whether an answer is kept back.
    pub(super) fn keeps_back(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.answer.is_some())
    }

    /// Whether an answer that was kept back may pass now.
    pub(super) fn has_answer(&self) -> bool {
        !self.answers.is_empty()
    }

    /// A call that the kernel is believed to have taken.
    #[cfg(test)]
    pub(super) fn invent_call(&mut self) {
        self.outstanding.issue();
    }
}

impl Lending {
    /// The lender, if this connection has one.
    pub(super) fn lent(&mut self) -> Option<&mut LentPayloads> {
        match self {
            Self::Yes(lent) => Some(lent),
            Self::Undecided | Self::No => None,
        }
    }

    /// Whether the kernel refers to memory that somebody waits for.
    pub(super) fn has_lent(&self) -> bool {
        matches!(self, Self::Yes(lent) if !lent.waiting.is_empty())
    }

    /// When to look again without a notice.
    pub(super) fn until_ns(&self) -> Option<u64> {
        match self {
            Self::Yes(lent) => lent.until_ns,
            Self::Undecided | Self::No => None,
        }
    }

    /// From which length on pieces are lent now; nothing is that long when none are.
    pub(super) fn lends_from(&self, options: &ZeroCopyOptions) -> usize {
        match self {
            Self::Undecided if options.when != ZeroCopy::Never => options.least_bytes.max(1),
            Self::Yes(lent) if !lent.outstanding.is_full() && lent.worth.pays(options.when) => {
                options.least_bytes.max(1)
            }
            _ => usize::MAX,
        }
    }

    /// Decides whether the connection of this socket lends, with the first piece that is long enough.
    pub(super) fn decide(&mut self, fd: BorrowedFd<'_>, options: &ZeroCopyOptions) {
        if matches!(self, Self::Undecided) {
            // What stays on this host is always copied.
            let may = options.when == ZeroCopy::Always || !is_on_this_host(fd).unwrap_or(true);
            let can = may && zero_copy::enable(fd).is_ok();
            *self = if can { Self::Yes(Box::default()) } else { Self::No };
        }
    }

    /// So many bytes were lent by a call; its number.
    pub(super) fn lent_bytes(&mut self, bytes: usize, counters: &mut ZeroCopyCounters) -> Option<u32> {
        counters.bytes += bytes as u64;
        counters.calls += 1;
        self.lent().map(|lent| lent.outstanding.issue())
    }

    /// So many bytes were sent with a copy.
    pub(super) fn copied_bytes(&mut self, bytes: usize) {
        if let Some(lent) = self.lent() {
            lent.worth.copied(bytes as u64);
        }
    }

    /// The kernel has refused a call. The room for notices that were not taken yet may have been what it lacked.
    pub(super) fn refused(
        &mut self,
        fd: BorrowedFd<'_>,
        counters: &mut ZeroCopyCounters,
        events: &mut VecDeque<Event>,
    ) {
        counters.fallbacks += 1;
        if let Some(lent) = self.lent() {
            lent.worth.unpaid();
            lent.settle(fd, counters, events);
        }
    }

    /// A payload has been given to the kernel as a whole: who waits for it waits for notice too.
    pub(super) fn payload_left(&mut self, payload: LentPayload, pieces: Pieces, events: &mut VecDeque<Event>) {
        match self {
            Self::Yes(lent) if !lent.waiting.is_empty() || !lent.outstanding.is_done(payload.last_call) => {
                lent.waiting.push_back(PendingNotice { payload, answer: None, _pieces: pieces });
            }
            _ => events.push_back(Event::Sent(payload.hold)),
        }
    }

    /// Whether an answer that was kept back may pass now.
    pub(super) fn has_answer(&self) -> bool {
        matches!(self, Self::Yes(lent) if lent.has_answer())
    }

    /// An answer that was kept back and may pass now.
    pub(super) fn take_answer(&mut self) -> Option<(Header, Vec<u8>)> {
        self.lent()?.answers.pop_front()
    }

    /// Keeps an answer back while the kernel refers to its request's payload. Whether it did.
    pub(super) fn keep_back(&mut self, header: &Header, body: &[u8]) -> bool {
        let Some(lent) = self.lent() else { return false };
        let of = |waiting: &&mut PendingNotice| waiting.payload.request == header.request && waiting.answer.is_none();
        let Some(waiting) = lent.waiting.iter_mut().find(of) else { return false };
        waiting.answer = Some((*header, body.to_vec()));
        true
    }
}

/// Whether both ends of a connection have the same address, or one that is of this host only.
fn is_on_this_host(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let (ours, theirs) = (net::local_address(fd)?.ip().to_canonical(), net::peer_address(fd)?.ip().to_canonical());
    Ok(ours == theirs || theirs.is_loopback())
}
