//! Send path of connections, and the release of memory lent to the kernel.

use std::os::fd::AsFd;
use std::time::Duration;

use kvplane_proto::frame::Header;
use kvplane_sys::{cpu, net, zero_copy};

use super::Tcp;
use super::connection::{Connection, State};
use super::lending::ZeroCopyCounters;
use super::sealed::Wire;
use super::writer::ROUND_BYTES;
use crate::types::{CloseCause, ConnectionId, Event};

/// Time that a deferred reply waits for a notification before the kernel's count of acknowledged bytes is used instead.
/// Much longer than any working device takes.
const ANSWER_PATIENCE_NS: u64 = 50_000_000;
/// Time that a closing connection waits for notifications. Longer than the kernel's watchdog lets a device hang (5 s).
pub(super) const END_PATIENCE_NS: u64 = 10_000_000_000;
/// Time that a driver waits for the notifications of all connections when it is dropped.
const DROP_PATIENCE_NS: u64 = 1_000_000_000;
const DROP_LOOK: Duration = Duration::from_micros(200);

impl Tcp {
    /// Sends the queued frames of a connection, up to its budget of the round, until the socket would block.
    pub(super) fn transmit(&mut self, id: ConnectionId) {
        let mut sent = 0;
        loop {
            let Some(connection) = self.connections.at_mut(id.index) else { return };
            if connection.state != State::Open || !connection.writer.writable {
                return;
            }
            if connection.is_sent() {
                break;
            }
            if sent >= ROUND_BYTES {
                self.rounds.dirty.mark(id.index);
                return;
            }
            let Connection { socket, wire, writer, .. } = connection;
            let (output, events) = (&mut self.output, &mut self.events);
            let result = match wire {
                Wire::Tls(sealed) => writer.send_sealed(socket, sealed, output, &mut self.tls.plain, events),
                Wire::Plain | Wire::Unknown => writer
                    .send(socket, output, &mut self.zero_copy, events)
                    .map_err(|error| CloseCause::Kernel(error.raw_os_error().unwrap_or_default())),
            };
            match result {
                Ok(Some(bytes)) => {
                    self.moved_bytes += bytes;
                    sent += bytes;
                }
                Ok(None) => return,
                Err(why) => {
                    self.close(id, why);
                    return;
                }
            }
        }
        self.sent_all(id);
    }

    /// Handles the completion of all queued output.
    fn sent_all(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        connection.writer.shrink();
        let Some(why) = connection.closing_after_send.clone() else { return };
        if connection.writer.lending.has_lent() {
            // Closed when its notifications have arrived, or are overdue.
            self.look_later(id.index, END_PATIENCE_NS);
        } else {
            self.close(id, why);
        }
    }

    /// Takes the pending notifications of a connection.
    pub(super) fn settle(&mut self, index: u32) {
        let Some(connection) = self.connections.at_mut(index) else { return };
        let Some(lent) = connection.writer.lending.lent() else { return };
        lent.settle(connection.socket.as_fd(), &mut self.zero_copy.counters, &mut self.events);
        self.settled(index);
    }

    /// Continues what waited for the return of lent payloads.
    fn settled(&mut self, index: u32) {
        let id = self.connections.id_at(index);
        let Some(connection) = self.connections.at_mut(index) else { return };
        if connection.state == State::Ending {
            // The connection is gone once all payloads are returned.
            let gone = self.connections.take_if(index, |connection| !connection.writer.lending.has_lent());
            let why = gone.map(|connection| connection.why.unwrap_or(CloseCause::Closed));
            self.events.extend(why.map(|why| Event::Gone(id, why)));
            return;
        }
        // `closing_after_send` stays set: such a connection is not aborted.
        if connection.is_quiet()
            && let Some(why) = connection.closing_after_send.clone()
        {
            self.close(id, why);
        } else if connection.writer.lending.has_answer() {
            // Not in this round: the host first takes the earlier events.
            self.rounds.again.push(index);
        }
    }

    /// Defers a reply if the payload of its request is lent; see [`super::lending`]. Returns true if it was deferred.
    pub(super) fn keep_back(&mut self, id: ConnectionId, header: &Header, body: &[u8]) -> bool {
        let Some(connection) = self.connections.get(id) else { return false };
        let may = connection.asks && header.payload_bytes == 0;
        let kept = may && connection.writer.lending.keep_back(header, body);
        if kept {
            // Most often the notification has arrived already.
            self.settle(id.index);
            let lent = self.connections.get(id).and_then(|connection| connection.writer.lending.lent());
            if lent.is_some_and(|lent| lent.keeps_back()) {
                self.look_later(id.index, ANSWER_PATIENCE_NS);
            }
        }
        kept
    }

    /// Schedules a check of a connection in `patience_ns`, unless one is scheduled.
    pub(super) fn look_later(&mut self, index: u32, patience_ns: u64) {
        let Some(connection) = self.connections.at_mut(index) else { return };
        let Some(lent) = connection.writer.lending.lent() else { return };
        if lent.until_ns.is_none() {
            lent.until_ns = Some(cpu::monotonic_ns().saturating_add(patience_ns));
            self.waiting.push(index);
        }
    }

    /// Checks connections whose notifications are overdue.
    pub(super) fn lose_patience(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let now_ns = cpu::monotonic_ns();
        for index in core::mem::take(&mut self.waiting) {
            let Some(connection) = self.connections.at_mut(index) else { continue };
            let Some(lent) = connection.writer.lending.lent() else { continue };
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
        let Some(connection) = self.connections.at_mut(index) else { return };
        let (ending, sent_bytes) = (connection.state == State::Ending, connection.writer.sent_bytes());
        let Some(lent) = connection.writer.lending.lent() else { return };
        if ending {
            self.zero_copy.counters.abandoned += lent.abandon(&mut self.events);
            self.settled(index);
        } else if let Some(why) = connection.closing_after_send.clone() {
            let id = self.connections.id_at(index);
            self.close(id, why);
        } else if lent.keeps_back() {
            let Ok(open_bytes) = zero_copy::unacknowledged_bytes(connection.socket.as_fd()) else { return };
            let acknowledged_bytes = sent_bytes.saturating_sub(open_bytes);
            self.zero_copy.counters.late += lent.release_answered(acknowledged_bytes, &mut self.events);
            if lent.keeps_back() {
                self.look_later(index, ANSWER_PATIENCE_NS);
            }
            self.settled(index);
        }
    }

    /// Resets a connection that has lent payloads; it is gone when they are returned. Returns false if none are lent.
    pub(super) fn end_lent(&mut self, id: ConnectionId, why: &CloseCause) -> bool {
        let Some(connection) = self.connections.get(id) else { return false };
        if !connection.writer.has_lent_in_part() && !connection.writer.lending.has_lent() {
            return false;
        }
        // If the abort fails, closing the descriptor resets the connection, and no notification tells when the device
        // is done.
        let proof = net::abort(connection.socket.as_fd()).is_ok();
        connection.state = State::Ending;
        connection.why = Some(why.clone());
        connection.writer.give_up(&mut self.events);
        connection.reader.forget_kept();
        if let Some(lent) = connection.writer.lending.lent() {
            lent.until_ns = None;
            self.waiting.retain(|&index| index != id.index);
        }
        self.look_later(id.index, if proof { END_PATIENCE_NS } else { 0 });
        self.settle(id.index);
        true
    }

    /// Returns the earliest time at which a connection has to be checked without a notification.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let until = |&index: &u32| self.connections.at(index)?.writer.lending.until_ns();
        self.waiting.iter().filter_map(until).min()
    }

    /// Returns the counters of zero-copy sends.
    #[must_use]
    pub const fn zero_copy(&self) -> &ZeroCopyCounters {
        &self.zero_copy.counters
    }
}

/// The memory may be freed with the driver: resets the connections that have lent some, and waits for the
/// notifications.
impl Drop for Tcp {
    fn drop(&mut self) {
        for index in 0..self.connections.positions() {
            self.end_lent(self.connections.id_at(index), &CloseCause::Closed);
        }
        let has_lent = |connection: &Connection| connection.writer.lending.has_lent();
        let until_ns = cpu::monotonic_ns().saturating_add(DROP_PATIENCE_NS);
        while self.connections.iter().any(has_lent) && cpu::monotonic_ns() < until_ns {
            std::thread::sleep(DROP_LOOK);
            (0..self.connections.positions()).for_each(|index| self.settle(index));
        }
    }
}
