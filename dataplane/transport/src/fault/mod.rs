//! TCP driver with fault injection: refuses and cuts connections, delays frames and corrupts payloads by a seeded plan.
//!
//! Used for fault drills on a live node as well as for tests: the host's reaction to a bad network can be observed
//! without one. Without a plan each call is forwarded to [`Tcp`] after one branch.
//!
//! * A refused connection ends with [`Event::Gone`], as after a refusal by the kernel.
//! * A cut connection ends as after a reset: when a frame arrives, before a queued frame is sent, or after it is sent.
//! * A delayed frame delays all later frames of its connection; at most one frame is out of the kernel. Time is an
//!   argument: the host calls [`Fault::next_ready`] again at [`Fault::poll_timeout`].
//! * A corrupted payload has one bit flipped in its final memory before it is delivered to the host. The reported
//!   checksum is that of the corrupted bytes.
//!
//! Invariant: to the host an injected fault looks like one that the network, the peer or the memory could have caused;
//! in particular a connection is reported as gone only when none of its I/O is in flight. Thread affinity: none; one
//! thread at a time.

mod plan;

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::Header;
use kvplane_sys::{Poller, Readiness};
use kvplane_tls::Keychain;
pub use plan::FaultPlan;
use plan::{Arrival, Departure, Injector};

use crate::tcp::{Tcp, UnauthenticatedLimits, ZeroCopyCounters, ZeroCopyOptions, limit_unacknowledged};
use crate::token::Token;
use crate::types::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Pieces, Target};

/// Errnos of the injected errors.
const CONNECTION_RESET: i32 = 104;
const CONNECTION_REFUSED: i32 = 111;

/// Counts of injected faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultCounters {
    /// Outgoing connections that were refused.
    pub refused: u64,
    /// Connections cut when a frame arrived.
    pub cut_arriving: u64,
    /// Connections cut when a frame was queued.
    pub cut_leaving: u64,
    /// Frames delayed.
    pub delayed: u64,
    /// Payloads corrupted.
    pub corrupted: u64,
}

/// [`Tcp`] driver that injects the faults of an optional plan.
pub struct Fault {
    tcp: Tcp,
    faults: Option<Box<Faults>>,
}

struct Faults {
    injector: Injector,
    counters: FaultCounters,
    /// State of each connection, by its index.
    slots: Vec<Slot>,
    /// Release times of delayed frames, one entry for each frame.
    due: BTreeSet<(u64, ConnectionId)>,
    /// Connections to cut at the next flush.
    cuts: Vec<(ConnectionId, Departure)>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    held: Option<HeldFrame>,
    /// Destination of the payload that is being received.
    target: Option<Pieces>,
}

struct HeldFrame {
    until_ns: u64,
    header: Header,
    body: Vec<u8>,
}

impl Fault {
    /// Creates a driver without connections. Injects the faults of `plan`, or none; sends with these zero-copy options.
    #[must_use]
    pub fn new(plan: Option<&FaultPlan>, zero_copy: ZeroCopyOptions) -> Self {
        Self { tcp: Tcp::new(zero_copy), faults: plan.map(|plan| Box::new(Faults::new(plan))) }
    }

    /// Returns the number of injected faults; all zero without a plan.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.faults.as_ref().map_or_else(FaultCounters::default, |faults| faults.counters)
    }

    /// See [`Tcp::listen`].
    ///
    /// # Errors
    /// When the listener cannot be registered with the poller.
    pub fn listen(&mut self, poller: &Poller, listener: TcpListener) -> std::io::Result<()> {
        self.tcp.listen(poller, listener)
    }

    /// See [`Tcp::set_tls`].
    pub fn set_tls(&mut self, keychain: Arc<Keychain>) {
        self.tcp.set_tls(keychain);
    }

    /// See [`limit_unacknowledged`].
    pub fn limit_unacknowledged(&mut self, within: Duration) {
        limit_unacknowledged(&mut self.tcp, within);
    }

    /// See [`Tcp::limit_unauthenticated`].
    pub fn limit_unauthenticated(&mut self, limits: UnauthenticatedLimits) {
        self.tcp.limit_unauthenticated(limits);
    }

    /// See [`Tcp::trust`].
    pub fn trust(&mut self, id: ConnectionId) {
        self.tcp.trust(id);
    }

    /// See [`Tcp::unauthenticated`].
    #[must_use]
    pub fn unauthenticated(&self) -> (usize, u64) {
        self.tcp.unauthenticated()
    }

    /// See [`Tcp::connect`].
    ///
    /// # Errors
    /// When no socket is available, the connection table is full, or the kernel rejects the connection at once.
    pub fn connect(&mut self, poller: &Poller, address: SocketAddr) -> std::io::Result<ConnectionId> {
        let id = self.tcp.connect(poller, address)?;
        if let Some(faults) = &mut self.faults
            && faults.injector.refuses()
        {
            faults.counters.refused += 1;
            self.tcp.close(id, CloseCause::Kernel(CONNECTION_REFUSED));
        }
        Ok(id)
    }

    /// See [`Tcp::ready`].
    pub fn ready(&mut self, poller: &Poller, token: Token, readiness: &Readiness) {
        self.tcp.ready(poller, token, readiness);
    }

    /// See [`Tcp::try_active`].
    pub fn try_active(&mut self) -> bool {
        self.tcp.try_active()
    }

    /// See [`Tcp::moved_bytes`].
    #[must_use]
    pub const fn moved_bytes(&self) -> usize {
        self.tcp.moved_bytes()
    }

    /// See [`Tcp::take_moved_bytes`].
    pub const fn take_moved_bytes(&mut self) -> usize {
        self.tcp.take_moved_bytes()
    }

    /// See [`Tcp::poll_event`].
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.tcp.poll_event();
        if let (Some(faults), Some(Event::Gone(id, _))) = (&mut self.faults, &event) {
            faults.forget(*id);
        }
        event
    }

    /// Returns a connection that may have input, see [`Tcp::next_ready`], or one whose delayed frame is due.
    pub fn next_ready(&mut self, now_ns: u64) -> Option<ConnectionId> {
        match self.faults.as_mut().and_then(|faults| faults.next_due(now_ns)) {
            Some(id) => Some(id),
            None => self.tcp.next_ready(),
        }
    }

    /// See [`Tcp::ready_again`].
    pub fn ready_again(&mut self, id: ConnectionId) {
        self.tcp.ready_again(id);
    }

    /// Returns the time in nanoseconds at which the host has to poll again even if no socket becomes ready.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        // Left over from the last round: no readiness event will announce it.
        if self.tcp.has_work() {
            return Some(0);
        }
        let held = self.faults.as_ref().and_then(|faults| faults.due.first()).map(|entry| entry.0);
        held.into_iter().chain(self.tcp.poll_timeout()).min()
    }

    /// See [`Tcp::zero_copy`].
    #[must_use]
    pub const fn zero_copy(&self) -> &ZeroCopyCounters {
        self.tcp.zero_copy()
    }

    /// Returns the next input of a connection, see [`Tcp::input`].
    pub fn input(&mut self, id: ConnectionId, scratch: &mut Vec<u8>, now_ns: u64) -> Input {
        let Some(faults) = &mut self.faults else { return self.tcp.input(id, scratch) };
        if let Some(held) = &faults.slot(id).held {
            return if held.until_ns <= now_ns { faults.release(id, scratch) } else { Input::Wait };
        }
        match self.tcp.input(id, scratch) {
            Input::Frame(header) => match faults.injector.arrival() {
                Arrival::Pass => Input::Frame(header),
                Arrival::Cut => {
                    faults.counters.cut_arriving += 1;
                    self.tcp.close(id, CloseCause::Kernel(CONNECTION_RESET));
                    Input::Wait
                }
                Arrival::Hold { delay_ns } => {
                    faults.hold(id, now_ns.saturating_add(delay_ns), header, scratch);
                    Input::Wait
                }
            },
            Input::Payload(checksum) => Input::Payload(faults.payload(id, checksum)),
            Input::Wait => Input::Wait,
        }
    }

    /// See [`Tcp::receive_payload`].
    ///
    /// # Panics
    /// When no payload is expected or the memory does not have its length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: Target) {
        if let Some(faults) = &mut self.faults {
            faults.slot(id).target = match &target {
                Target::Memory { buffer, checksum: true } => Some(buffer.clone().into()),
                Target::Scatter { buffers, checksum: true } => Some(buffers.clone().into()),
                Target::Discard | Target::Memory { .. } | Target::Scatter { .. } => None,
            };
        }
        self.tcp.receive_payload(id, target);
    }

    /// See [`Tcp::send`].
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) -> bool {
        let queued = self.tcp.send(id, header, body, payload);
        if let (Some(faults), true) = (&mut self.faults, queued) {
            let departure = faults.injector.departure();
            if departure != Departure::Pass && faults.cuts.iter().all(|&(other, _)| other != id) {
                faults.cuts.push((id, departure));
            }
        }
        queued
    }

    /// See [`Tcp::flush`].
    pub fn flush(&mut self, poller: &Poller) {
        self.cut(Departure::CutBefore);
        self.tcp.flush(poller);
        self.cut(Departure::CutAfter);
    }

    fn cut(&mut self, which: Departure) {
        let Some(faults) = self.faults.as_deref_mut() else { return };
        faults.cuts.retain(|&(id, departure)| {
            if departure == which {
                faults.counters.cut_leaving += 1;
                self.tcp.close(id, CloseCause::Kernel(CONNECTION_RESET));
            }
            departure != which
        });
    }

    /// See [`Tcp::close`].
    pub fn close(&mut self, id: ConnectionId, why: CloseCause) {
        if let Some(faults) = &mut self.faults {
            faults.forget(id);
        }
        self.tcp.close(id, why);
    }

    /// See [`Tcp::close_after_sending`].
    pub fn close_after_sending(&mut self, id: ConnectionId, why: CloseCause) {
        if let Some(faults) = &mut self.faults {
            faults.forget(id);
        }
        self.tcp.close_after_sending(id, why);
    }

    /// See [`Tcp::open`].
    #[must_use]
    pub const fn open(&self) -> usize {
        self.tcp.open()
    }
}

impl Faults {
    fn new(plan: &FaultPlan) -> Self {
        Self {
            injector: Injector::new(plan),
            counters: FaultCounters::default(),
            slots: Vec::new(),
            due: BTreeSet::new(),
            cuts: Vec::new(),
        }
    }

    fn slot(&mut self, id: ConnectionId) -> &mut Slot {
        let index = id.index as usize;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Slot::default);
        }
        let slot = &mut self.slots[index];
        if slot.generation != id.generation {
            *slot = Slot { generation: id.generation, ..Slot::default() };
        }
        slot
    }

    /// Drops the state of a connection that has ended or is about to end: none of its frames is delivered any more.
    fn forget(&mut self, id: ConnectionId) {
        // The slot may belong to another connection by now.
        let Some(slot) = self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation) else {
            return;
        };
        slot.target = None;
        if let Some(held) = slot.held.take() {
            self.due.remove(&(held.until_ns, id));
        }
    }

    fn hold(&mut self, id: ConnectionId, until_ns: u64, header: Header, scratch: &mut Vec<u8>) {
        self.counters.delayed += 1;
        self.slot(id).held = Some(HeldFrame { until_ns, header, body: core::mem::take(scratch) });
        self.due.insert((until_ns, id));
    }

    /// Delivers the delayed frame of a connection.
    fn release(&mut self, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let Some(held) = self.slot(id).held.take() else { return Input::Wait };
        self.due.remove(&(held.until_ns, id));
        *scratch = held.body;
        Input::Frame(held.header)
    }

    /// Returns a connection whose delayed frame is due. Returned once: the frame is kept until the host takes it.
    fn next_due(&mut self, now_ns: u64) -> Option<ConnectionId> {
        let &(until_ns, id) = self.due.first()?;
        if until_ns > now_ns {
            return None;
        }
        self.due.pop_first();
        Some(id)
    }

    /// Handles a received payload: returns its checksum after the corruption that the plan makes, if any.
    fn payload(&mut self, id: ConnectionId, checksum: Option<u64>) -> Option<u64> {
        let (Some(pieces), Some(_)) = (self.slot(id).target.take(), checksum) else { return checksum };
        let Some(corruption) = self.injector.corruption(pieces.bytes()) else { return checksum };
        self.counters.corrupted += 1;
        let (mut sum, mut at) = (PayloadChecksum::new(), 0);
        for buffer in pieces.as_slice() {
            if (at..at + buffer.bytes()).contains(&corruption.offset) {
                let place = buffer.slice(corruption.offset - at, 1);
                let mut byte = [0];
                place.copy_out(&mut byte);
                place.copy_in(&[byte[0] ^ corruption.mask]);
            }
            at += buffer.bytes();
            buffer.region().read_with(buffer.offset(), buffer.bytes(), &mut |_, part| sum.update(part));
        }
        Some(sum.finish())
    }
}
