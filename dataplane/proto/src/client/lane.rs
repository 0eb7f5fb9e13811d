//! A lane: one connection to a shard, its handshake and what waits on it.

use std::collections::VecDeque;

use crate::client::types::{LaneId, Path, PeerId, SliceId};
use crate::ids::{PinId, ReservationId};
use crate::message::CommitItem;
use crate::states::Step;
use crate::status::Status;

crate::state_machine! {
    /// The life of a connection.
    states Endpoint {
        /// Not connected; connected on demand.
        Idle,
        /// The host is connecting it.
        Connecting,
        /// Hello was sent.
        Greeting,
        /// In use.
        Ready,
        /// The host is ending its I/O.
        Resetting,
    }
    /// What can happen to a connection.
    events EndpointEvent {
        /// There is something to send.
        Connect,
        /// The host has connected it.
        Connected,
        /// The peer welcomed us.
        Welcome,
        /// A deadline passed, or the peer broke the protocol.
        Reset,
        /// It is gone, and no I/O of it is left.
        Gone,
    }
    transitions {
        Idle, Connect => Connecting;
        Connecting, Connected => Greeting;
        Greeting, Welcome => Ready;
        Connecting | Greeting | Ready, Reset => Resetting;
        Resetting, Reset => ignored;
        Resetting, Connected => ignored;
        Resetting, Welcome => ignored;
        Connecting | Greeting | Ready | Resetting, Gone => Idle;
        Idle, Gone => ignored;
    }
}

const BACKOFF_FIRST_NS: u64 = 5_000_000;
const BACKOFF_LAST_NS: u64 = 1_000_000_000;

pub(super) struct Lane {
    pub(super) peer: PeerId,
    pub(super) path: Path,
    pub(super) generation: u32,
    pub(super) number: u16,
    pub(super) state: Endpoint,
    /// Slices to send, oldest first.
    pub(super) queue: VecDeque<SliceId>,
    /// Requests without an answer.
    pub(super) outstanding: u32,
    /// Payload bytes queued and outstanding.
    pub(super) load_bytes: u64,
    /// Payload bytes outstanding.
    pub(super) sent_bytes: u64,
    pub(super) releases: Vec<PinId>,
    pub(super) aborts: Vec<ReservationId>,
    pub(super) commits: Vec<(u32, CommitItem)>,
    /// Why the peer refused us: its slices fail with this instead of being retried.
    pub(super) refusal: Option<Status>,
    pub(super) dirty: bool,
    failures: u32,
    not_before_ns: u64,
    waits_for_reconnect: bool,
}

impl Lane {
    pub(super) const fn new(peer: PeerId, path: Path, number: u16) -> Self {
        Self {
            peer,
            path,
            generation: 1,
            number,
            state: Endpoint::Idle,
            queue: VecDeque::new(),
            outstanding: 0,
            load_bytes: 0,
            sent_bytes: 0,
            releases: Vec::new(),
            aborts: Vec::new(),
            commits: Vec::new(),
            refusal: None,
            dirty: false,
            failures: 0,
            not_before_ns: 0,
            waits_for_reconnect: false,
        }
    }

    pub(super) const fn id(&self, index: u32) -> LaneId {
        LaneId { index, generation: self.generation }
    }

    /// Applies an event; false when it was stale.
    pub(super) fn step(&mut self, event: EndpointEvent) -> bool {
        match self.state.on(event) {
            Step::Moved(to) => {
                self.state = to;
                true
            }
            Step::Stale => false,
            Step::Illegal => panic!("lane in {:?} got {event:?}", self.state),
        }
    }

    /// Whether a connection may be tried at `now_ns`; if not, it is remembered for the timer.
    pub(super) fn may_connect(&mut self, now_ns: u64) -> bool {
        self.waits_for_reconnect = now_ns < self.not_before_ns;
        !self.waits_for_reconnect
    }

    pub(super) const fn reconnect_at(&self) -> Option<u64> {
        if self.waits_for_reconnect { Some(self.not_before_ns) } else { None }
    }

    /// Whether its last connection failed so recently that another way is better.
    pub(super) const fn is_suspect(&self, now_ns: u64) -> bool {
        self.failures > 0 && now_ns < self.not_before_ns
    }

    pub(super) const fn welcomed(&mut self) {
        self.failures = 0;
    }

    /// The connection ended: forget what was on it and wait before the next. Doubles up to a second.
    pub(super) fn lost(&mut self, now_ns: u64) {
        let wait_ns = (BACKOFF_FIRST_NS << self.failures.min(16)).min(BACKOFF_LAST_NS);
        self.failures = self.failures.saturating_add(1);
        self.not_before_ns = now_ns + wait_ns;
        self.generation = self.generation.wrapping_add(1);
        self.outstanding = 0;
        self.sent_bytes = 0;
        self.load_bytes = 0;
        self.releases.clear();
        self.aborts.clear();
        self.commits.clear();
    }
}
