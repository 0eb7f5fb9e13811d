//! Zero-copy sends: payloads are lent to the kernel, sent from where they are, and returned with the kernel's
//! notification.
//!
//! A payload's hold is reported as sent when the notification of its last call arrives, so whatever waits for the hold
//! (a pin, a segment that is being unregistered, an upload) waits for the kernel. A reply that arrives before the
//! notification of its request's payload is deferred until then; other replies overtake it. The reply arrives with the
//! acknowledgement that makes the kernel release the memory, so a deferral is rare and short. If a device driver is
//! slow, or the kernel has combined the notifications of this payload and later ones and the network is slow, the
//! kernel's count of acknowledged bytes is sufficient proof after a timeout: acknowledged bytes are never
//! retransmitted, and the reply proves that the peer's program has read them.
//!
//! A connection that is closed while payloads are lent is reset first, by [`net::abort`]: the kernel then discards what
//! it has not passed to the device, so that no byte is sent from memory that may be reused. The connection is reported
//! as gone when the last notification has arrived, including the device's.

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

/// A payload that the kernel has accepted completely; its last byte with `last_call`.
pub(super) struct LentPayload {
    pub(super) last_call: u32,
    /// Bytes sent on the connection up to the end of the payload.
    pub(super) end_bytes: u64,
    pub(super) hold: u64,
    pub(super) request: RequestId,
}

/// Zero-copy state of a connection, with its lent payloads.
#[derive(Default)]
pub(super) enum Lending {
    /// No payload so far was long enough.
    #[default]
    Undecided,
    No,
    Yes(Box<LentPayloads>),
}

/// Payloads that one connection has lent.
#[derive(Default)]
pub(super) struct LentPayloads {
    outstanding: Outstanding,
    worth: Worth,
    /// Completely sent payloads whose notification is outstanding, in order. Each has an outstanding call of its own,
    /// or an earlier call is outstanding: so they are at most [`outstanding::CALLS`].
    waiting: VecDeque<PendingNotice>,
    /// Deferred replies that may be delivered now. At most as many as payloads were waiting.
    answers: VecDeque<(Header, Vec<u8>)>,
    /// Time of the next check without a notification; while set, the connection is in the driver's list.
    pub(super) until_ns: Option<u64>,
}

struct PendingNotice {
    payload: LentPayload,
    /// Its deferred reply.
    answer: Option<(Header, Vec<u8>)>,
    /// Keeps the memory mapped until the kernel releases it.
    _pieces: Pieces,
}

impl LentPayloads {
    /// Takes the kernel's notifications and returns the payloads that it has released; their holds go to `events`.
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

    /// Returns the first waiting payload.
    fn release(&mut self, events: &mut VecDeque<Event>) {
        if let Some(waiting) = self.waiting.pop_front() {
            events.push_back(Event::Sent(waiting.payload.hold));
            self.answers.extend(waiting.answer);
        }
    }

    /// Returns all payloads without a notification; returns their number.
    pub(super) fn abandon(&mut self, events: &mut VecDeque<Event>) -> u64 {
        let count = self.waiting.len();
        (0..count).for_each(|_| self.release(events));
        count as u64
    }

    /// Returns the payloads that are acknowledged (up to `acknowledged_bytes` of the sent bytes) and answered. Returns
    /// their number.
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

    /// Returns true if a reply is deferred.
    pub(super) fn keeps_back(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.answer.is_some())
    }

    /// Returns true if a deferred reply may be delivered now.
    pub(super) fn has_answer(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Simulates a call that the kernel has accepted.
    #[cfg(test)]
    pub(super) fn invent_call(&mut self) {
        self.outstanding.issue();
    }
}

impl Lending {
    /// Returns the lent payloads, if this connection uses zero-copy sends.
    pub(super) fn lent(&mut self) -> Option<&mut LentPayloads> {
        match self {
            Self::Yes(lent) => Some(lent),
            Self::Undecided | Self::No => None,
        }
    }

    /// Returns true if the kernel refers to memory whose hold is not reported yet.
    pub(super) fn has_lent(&self) -> bool {
        matches!(self, Self::Yes(lent) if !lent.waiting.is_empty())
    }

    /// Returns the time of the next check without a notification.
    pub(super) fn until_ns(&self) -> Option<u64> {
        match self {
            Self::Yes(lent) => lent.until_ns,
            Self::Undecided | Self::No => None,
        }
    }

    /// Returns the least length of pieces that are lent now; `usize::MAX` if none are.
    pub(super) fn lends_from(&self, options: &ZeroCopyOptions) -> usize {
        match self {
            Self::Undecided if options.when != ZeroCopy::Never => options.least_bytes.max(1),
            Self::Yes(lent) if !lent.outstanding.is_full() && lent.worth.pays(options.when) => {
                options.least_bytes.max(1)
            }
            _ => usize::MAX,
        }
    }

    /// Decides whether the connection uses zero-copy sends; called with the first piece that is long enough.
    pub(super) fn decide(&mut self, fd: BorrowedFd<'_>, options: &ZeroCopyOptions) {
        if matches!(self, Self::Undecided) {
            // The kernel always copies packets that stay on this machine.
            let may = options.when == ZeroCopy::Always || !is_on_this_host(fd).unwrap_or(true);
            let can = may && zero_copy::enable(fd).is_ok();
            *self = if can { Self::Yes(Box::default()) } else { Self::No };
        }
    }

    /// Records a zero-copy call that took this many bytes; returns its number.
    pub(super) fn lent_bytes(&mut self, bytes: usize, counters: &mut ZeroCopyCounters) -> Option<u32> {
        counters.bytes += bytes as u64;
        counters.calls += 1;
        self.lent().map(|lent| lent.outstanding.issue())
    }

    /// Records bytes sent with a copy.
    pub(super) fn copied_bytes(&mut self, bytes: usize) {
        if let Some(lent) = self.lent() {
            lent.worth.copied(bytes as u64);
        }
    }

    /// Handles a call that the kernel refused, perhaps for lack of room for notifications that were not taken yet.
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

    /// Handles a payload that the kernel has accepted completely: its hold is reported after the notification.
    pub(super) fn payload_left(&mut self, payload: LentPayload, pieces: Pieces, events: &mut VecDeque<Event>) {
        match self {
            Self::Yes(lent) if !lent.waiting.is_empty() || !lent.outstanding.is_done(payload.last_call) => {
                lent.waiting.push_back(PendingNotice { payload, answer: None, _pieces: pieces });
            }
            _ => events.push_back(Event::Sent(payload.hold)),
        }
    }

    /// Returns true if a deferred reply may be delivered now.
    pub(super) fn has_answer(&self) -> bool {
        matches!(self, Self::Yes(lent) if lent.has_answer())
    }

    /// Takes a deferred reply that may be delivered now.
    pub(super) fn take_answer(&mut self) -> Option<(Header, Vec<u8>)> {
        self.lent()?.answers.pop_front()
    }

    /// Defers a reply while the kernel refers to its request's payload. Returns true if it was deferred.
    pub(super) fn keep_back(&mut self, header: &Header, body: &[u8]) -> bool {
        let Some(lent) = self.lent() else { return false };
        let of = |waiting: &&mut PendingNotice| waiting.payload.request == header.request && waiting.answer.is_none();
        let Some(waiting) = lent.waiting.iter_mut().find(of) else { return false };
        waiting.answer = Some((*header, body.to_vec()));
        true
    }
}

/// Returns true if both ends of a connection have the same address, or the peer's is a loopback address.
fn is_on_this_host(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let (ours, theirs) = (net::local_address(fd)?.ip().to_canonical(), net::peer_address(fd)?.ip().to_canonical());
    Ok(ours == theirs || theirs.is_loopback())
}
