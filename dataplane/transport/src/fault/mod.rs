//! TCP that fails on purpose: refuses, cuts, holds back and corrupts by a seeded plan.
//!
//! For drills on a live node as well as for tests: what a host makes of a bad network can be seen without one.
//! Without a plan each call is passed on to [`Tcp`] after one branch.
//!
//! * A refused connection ends as the kernel's refusals do, by [`Event::Gone`].
//! * A cut connection ends as by a reset, when a frame arrives, before a queued frame leaves, or after.
//! * A frame that is held back holds back everything behind it on its connection, at most one frame being out of the
//!   kernel. Time is an argument: the host calls [`Fault::next_ready`] again at [`Fault::poll_timeout`].
//! * A corrupted payload has one bit changed in its final memory before the host learns of it, and the checksum
//!   reported is that of what lies there then.
//!
//! Invariant: to the host a fault looks like one that the network, the peer or the memory could have made; in
//! particular a connection is still reported as gone only when none of its I/O is left. Thread affinity: none; one
//! thread at a time.

mod plan;

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::Header;
use kvplane_sys::{Poller, Readiness};
use kvplane_tls::Keychain;
pub use plan::FaultPlan;
use plan::{Arrival, Departure, Injector};

use crate::tcp::{StrangerLimits, Tcp, ZeroCopyCounters, ZeroCopyOptions};
use crate::token::Token;
use crate::types::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Pieces, Target};

/// The errnos of what is imitated.
const CONNECTION_RESET: i32 = 104;
const CONNECTION_REFUSED: i32 = 111;

/// Faults made so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultCounters {
    /// Connections that we began and that were refused.
    pub refused: u64,
    /// Connections cut when a frame arrived.
    pub cut_arriving: u64,
    /// Connections cut when a frame was queued.
    pub cut_leaving: u64,
    /// Frames held back.
    pub delayed: u64,
    /// Payloads corrupted.
    pub corrupted: u64,
}

/// [`Tcp`], with faults where a plan asks for them.
pub struct Fault {
    tcp: Tcp,
    faults: Option<Box<Faults>>,
}

struct Faults {
    injector: Injector,
    counters: FaultCounters,
    /// What is kept of each connection, by its index.
    slots: Vec<Slot>,
    /// When held frames are to be given out: one entry for each.
    due: BTreeSet<(u64, ConnectionId)>,
    /// Connections to cut at the next flush.
    cuts: Vec<(ConnectionId, Departure)>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    held: Option<HeldFrame>,
    /// Where the payload that is arriving goes.
    target: Option<Pieces>,
}

struct HeldFrame {
    until_ns: u64,
    header: Header,
    body: Vec<u8>,
}

impl Fault {
    /// A driver without connections that fails by this plan, or not at all, and sends as these options say.
    #[must_use]
    pub fn new(plan: Option<&FaultPlan>, zero_copy: ZeroCopyOptions) -> Self {
        Self { tcp: Tcp::new(zero_copy), faults: plan.map(|plan| Box::new(Faults::new(plan))) }
    }

    /// Faults made so far; none without a plan.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.faults.as_ref().map_or_else(FaultCounters::default, |faults| faults.counters)
    }

    /// See [`Tcp::listen`].
    ///
    /// # Errors
    /// When the poller does not take it.
    pub fn listen(&mut self, poller: &Poller, listener: TcpListener) -> std::io::Result<()> {
        self.tcp.listen(poller, listener)
    }

    /// See [`Tcp::set_tls`].
    pub fn set_tls(&mut self, keychain: Arc<Keychain>) {
        self.tcp.set_tls(keychain);
    }

    /// As [`Tcp::limit_strangers`].
    pub fn limit_strangers(&mut self, limits: StrangerLimits) {
        self.tcp.limit_strangers(limits);
    }

    /// As [`Tcp::trust`].
    pub fn trust(&mut self, id: ConnectionId) {
        self.tcp.trust(id);
    }

    /// As [`Tcp::strangers`].
    #[must_use]
    pub fn strangers(&self) -> (usize, u64) {
        self.tcp.strangers()
    }

    /// See [`Tcp::connect`].
    ///
    /// # Errors
    /// When no socket can be had, the table is full, or the kernel knows at once that it cannot work.
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

    /// A connection that may have input, see [`Tcp::next_ready`]; also one whose held frame is due.
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

    /// When the host should come by again though nothing may arrive until then, in its nanoseconds.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        // Left over from the last round: nothing will announce it.
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

    /// The next input of a connection, see [`Tcp::input`].
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
    /// When no payload is awaited or the memory is not of its length.
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

    /// A connection has ended or is about to: nothing more of it is given out.
    fn forget(&mut self, id: ConnectionId) {
        // Its position may be another connection's by now.
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

    /// Gives out the held frame of a connection.
    fn release(&mut self, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let Some(held) = self.slot(id).held.take() else { return Input::Wait };
        self.due.remove(&(held.until_ns, id));
        *scratch = held.body;
        Input::Frame(held.header)
    }

    /// A connection whose held frame is due. Named once: the frame stays until the host takes it.
    fn next_due(&mut self, now_ns: u64) -> Option<ConnectionId> {
        let &(until_ns, id) = self.due.first()?;
        if until_ns > now_ns {
            return None;
        }
        self.due.pop_first();
        Some(id)
    }

    /// The payload of a connection has arrived: its checksum, after what the plan has done to it.
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
