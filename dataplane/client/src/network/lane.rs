//! Lane: one connection to a shard, its handshake, and the slices bound to it.

use std::collections::BTreeSet;

use kvplane_proto::ids::{PinId, RequestId, ReservationId, SegmentId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::CommitItem;
use kvplane_proto::states::Step;
use kvplane_proto::status::Status;

use super::handshake::LaneChallenge;
use crate::tables::{NOWHERE, Slice};
use crate::types::{Config, LaneId, Path, PeerId, Via};

kvplane_proto::state_machine! {
    /// State of a connection.
    states Endpoint {
        /// Not connected; connected on demand.
        Idle,
        /// The host is connecting it.
        Connecting,
        /// The hello was sent.
        Greeting,
        /// In use.
        Ready,
        /// The host is ending its I/O.
        Resetting,
    }

    /// Event of a connection.
    events EndpointEvent {
        /// A slice is to be sent.
        Connect,
        /// The host has connected it.
        Connected,
        /// The peer has sent its welcome.
        Welcome,
        /// A deadline passed, or the peer violated the protocol.
        Reset,
        /// The connection is gone, and no I/O of it is left.
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
/// Backoff doubles up to this, or up to a part of the outage, whichever is longer.
const BACKOFF_LONG_NS: u64 = 32_000_000;
const OUTAGE_PARTS: u64 = 16;
const BACKOFF_LAST_NS: u64 = 1_000_000_000;
/// Doublings of the handshake timeout. Together with the last backoff it has to stay well below the 5 s within which a
/// recovered rail is used again.
const HELLO_DOUBLINGS: u32 = 2;

/// Cause of a reset by this client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// The peer violated the protocol, refused the connection, or did not complete the handshake: the connection and
    /// its slices are charged.
    Peer,
    /// A deadline passed: the connection may be at fault, the other slices on it are not.
    Deadline,
    /// The caller cancelled a batch or the map dropped the peer: neither side is at fault.
    Withdrawn,
}

/// A lane to a shard: the slices bound to it, and its present connection, if any.
pub(crate) struct Lane {
    pub(crate) peer: PeerId,
    /// Position of its rail in the client's table.
    pub(crate) rail: u32,
    pub(crate) path: Path,
    pub(crate) number: u16,
    pub(crate) generation: u32,
    pub(crate) state: Endpoint,
    pub(crate) list: LaneList,
    pub(crate) load: LaneLoad,
    pub(crate) connection: Connection,
    pub(crate) dirty: bool,
    /// Time of its entry among the client's alarms.
    pub(crate) alarm_ns: Option<u64>,
    /// Time of the last progress on it.
    pub(crate) progress_ns: u64,
    backoff: Backoff,
}

/// List of a lane's slices, oldest first. Sent slices precede queued ones, as the lane sends in order.
pub(crate) struct LaneList {
    /// First and last slice.
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// First queued slice, which the next flush sends, and the number of queued slices.
    pub(crate) next: u32,
    pub(crate) queued: u32,
}

/// Load of a lane.
#[derive(Default)]
pub(crate) struct LaneLoad {
    /// Requests without a reply.
    pub(crate) outstanding: u32,
    /// Slices with a payload that were sent and are not completed.
    pub(crate) flying: u32,
    /// Payload bytes bound and not completed.
    pub(crate) bound_bytes: u64,
    /// Payload bytes sent and not completed, which the window limits.
    pub(crate) sent_bytes: u64,
}

/// State of one connection of a lane, reset when it ends.
#[derive(Default)]
pub(crate) struct Connection {
    /// True after the welcome.
    pub(crate) greeted: bool,
    /// True if the host has reported that the kernel copies between this process and the peer.
    pub(crate) cma: bool,
    /// Number of the peer's fences that were sent on it.
    pub(crate) fenced: u64,
    /// Challenge of the shard, if it requires tickets.
    pub(crate) challenged: Option<Box<LaneChallenge>>,
    /// Status with which the peer refused the connection: its slices fail with this instead of being retried.
    pub(crate) refusal: Option<Status>,
    /// Cause of its reset, if it is being reset.
    pub(crate) cause: Option<Cause>,
    pub(crate) settlements: Settlements,
    /// Requests that hedged gets have abandoned: see [`crate::replicas`].
    pub(crate) detached: Vec<RequestId>,
    /// Segments and ways found to be closed on this connection.
    closed: BTreeSet<(SegmentId, Via)>,
}

/// Releases, aborts and commits of pins and reservations that are to be sent to the peer.
#[derive(Default)]
pub(crate) struct Settlements {
    pub(crate) releases: Vec<PinId>,
    pub(crate) aborts: Vec<ReservationId>,
    pub(crate) commits: Vec<(u32, CommitItem)>,
}

impl Connection {
    /// Forgets an abandoned request that is answered, or never will be.
    pub(crate) fn forget_detached(&mut self, wire: RequestId) {
        self.detached.retain(|left| *left != wire);
    }

    /// Resets the state; the memory of its lists is kept.
    fn end(&mut self) {
        self.settlements.clear();
        self.detached.clear();
        self.closed.clear();
        let (settlements, detached) = (core::mem::take(&mut self.settlements), core::mem::take(&mut self.detached));
        let closed = core::mem::take(&mut self.closed);
        *self = Self { settlements, detached, closed, ..Self::default() };
    }
}

impl Settlements {
    fn clear(&mut self) {
        self.releases.clear();
        self.aborts.clear();
        self.commits.clear();
    }
}

/// Backoff before a lane reconnects.
#[derive(Default)]
struct Backoff {
    failures: u32,
    /// Time of the first failure since the last welcome.
    failing_since_ns: u64,
    not_before_ns: u64,
}

impl Backoff {
    /// Returns the time at which the next attempt may begin, if that is later than `now_ns`.
    const fn waits_until(&self, now_ns: u64) -> Option<u64> {
        if now_ns < self.not_before_ns { Some(self.not_before_ns) } else { None }
    }

    /// Returns the handshake timeout of the next attempt while other rails work. It is longer after a timeout, as a
    /// busy machine may need the time.
    const fn rail_hello_ns(&self) -> u64 {
        let doublings = if self.failures < HELLO_DOUBLINGS { self.failures } else { HELLO_DOUBLINGS };
        Limits::RAIL_HELLO_NS << doublings
    }

    /// Handles a failed connection. The backoff doubles up to a small part of the outage: after an outage of a second
    /// the reconnect is a few hundredths of a second late, and a peer that is gone for long is not retried all the
    /// time.
    fn failed(&mut self, now_ns: u64) {
        if self.failures == 0 {
            self.failing_since_ns = now_ns;
        }
        let outage_ns = now_ns.saturating_sub(self.failing_since_ns);
        let most_ns = (outage_ns / OUTAGE_PARTS).clamp(BACKOFF_LONG_NS, BACKOFF_LAST_NS);
        let wait_ns = (BACKOFF_FIRST_NS << self.failures.min(16)).min(most_ns);
        self.failures = self.failures.saturating_add(1);
        self.not_before_ns = now_ns.saturating_add(wait_ns);
    }
}

impl Lane {
    pub(crate) fn new(peer: PeerId, rail: u32, path: Path, number: u16) -> Self {
        Self {
            peer,
            rail,
            path,
            number,
            generation: 1,
            state: Endpoint::Idle,
            list: LaneList { first: NOWHERE, last: NOWHERE, next: NOWHERE, queued: 0 },
            load: LaneLoad::default(),
            connection: Connection::default(),
            dirty: false,
            alarm_ns: None,
            progress_ns: 0,
            backoff: Backoff::default(),
        }
    }

    /// Returns the limit of in-flight requests.
    #[inline]
    pub(crate) fn depth(&self, config: &Config) -> usize {
        match self.path {
            Path::Mooncake => config.foreign_depth.max(1) as usize,
            Path::Stream | Path::Rdma | Path::Shared | Path::Local | Path::MooncakeRdma | Path::File => {
                Limits::REQUESTS_PER_CONNECTION
            }
        }
    }

    /// Returns true if another request may be in flight.
    #[inline]
    pub(crate) fn has_room(&self, config: &Config) -> bool {
        let open = match self.path {
            // Some of its slices are requests, others are copies by the device alone.
            Path::Rdma => self.load.outstanding.max(self.load.flying),
            path if path.is_greeted() => self.load.outstanding,
            _ => self.load.flying,
        };
        (open as usize) < self.depth(config)
            && (self.load.sent_bytes == 0 || self.load.sent_bytes < config.lane_window_bytes)
    }

    /// Returns the number of further device copies that may be in flight.
    pub(crate) fn may_fly(&self, config: &Config) -> u32 {
        let depth = self.depth(config) as u32;
        if self.load.outstanding < depth { depth.saturating_sub(self.load.flying) } else { 0 }
    }

    /// Returns true if replies or completions are outstanding on it.
    pub(crate) fn is_awaited(&self) -> bool {
        self.list.first != NOWHERE || !self.connection.detached.is_empty()
    }

    /// Returns true if the peer owes a reply on it, also to a request that was abandoned.
    pub(crate) fn owes_replies(&self) -> bool {
        self.load.outstanding > 0 || !self.connection.detached.is_empty()
    }

    /// Returns true if payloads of segments carry a checksum on it.
    pub(crate) fn sums_segments(&self, config: &Config) -> bool {
        config.checksum_segments && self.path != Path::Mooncake
    }

    /// Returns true if some segment is known to be closed for some way.
    pub(crate) fn closes_ways(&self) -> bool {
        !self.connection.closed.is_empty()
    }

    /// Marks the next slice of its list as sent, and charges it to the window.
    #[inline]
    pub(crate) fn sends(&mut self, slice: &Slice) {
        self.list.next = slice.link.after;
        self.list.queued -= 1;
        self.load.sent_bytes += slice.link.sent_bytes;
        self.load.flying += u32::from(slice.link.sent_bytes > 0);
    }

    /// Returns true if another slice may be bound to it. If its depth is small, further slices stay queued in the group
    /// instead.
    pub(crate) fn may_take_more(&self, config: &Config) -> bool {
        let open = if self.path.is_greeted() { self.load.outstanding } else { self.load.flying + self.list.queued };
        (open as usize) < self.depth(config)
    }

    /// Returns the way in which this lane copies a segment. Before the lane is ready, CMA is assumed to work.
    pub(crate) fn way(&self, config: &Config, segment: SegmentId, mappable: bool) -> Option<Via> {
        let open = |via| !self.is_closed(segment, via);
        if self.path == Path::Rdma {
            return open(Via::Rdma).then_some(Via::Rdma);
        }
        if config.shared && mappable && open(Via::Map) {
            return Some(Via::Map);
        }
        let cma = self.connection.cma || self.state != Endpoint::Ready;
        (config.cma && cma && open(Via::Cma)).then_some(Via::Cma)
    }

    /// Returns true if a segment is known to be closed for this way.
    #[inline]
    pub(crate) fn is_closed(&self, segment: SegmentId, via: Via) -> bool {
        !self.connection.closed.is_empty() && self.connection.closed.contains(&(segment, via))
    }

    /// Records that a segment is closed for this way.
    pub(crate) fn close_way(&mut self, segment: SegmentId, via: Via) {
        if self.connection.closed.len() >= Limits::SEGMENTS {
            // Ids of segments that no longer exist accumulate: entries that are still valid will be detected again.
            self.connection.closed.clear();
        }
        self.connection.closed.insert((segment, via));
    }

    pub(crate) const fn id(&self, index: u32) -> LaneId {
        LaneId { index, generation: self.generation }
    }

    /// Applies an event; returns false if it was stale.
    pub(crate) fn step(&mut self, event: EndpointEvent) -> bool {
        match self.state.on(event) {
            Step::Moved(to) => {
                self.state = to;
                true
            }
            Step::Stale => false,
            Step::Illegal => panic!("lane in {:?} got {event:?}", self.state),
        }
    }

    /// Returns the time at which the next attempt may begin, if that is later than `now_ns`.
    pub(crate) const fn waits_until(&self, now_ns: u64) -> Option<u64> {
        self.backoff.waits_until(now_ns)
    }

    pub(crate) const fn welcomed(&mut self) {
        self.connection.greeted = true;
        self.backoff.failures = 0;
    }

    /// Returns true if it is being connected.
    pub(crate) const fn is_coming(&self) -> bool {
        matches!(self.state, Endpoint::Connecting | Endpoint::Greeting)
    }

    /// Returns the handshake timeout of the next attempt while other rails work.
    pub(crate) const fn rail_hello_ns(&self) -> u64 {
        self.backoff.rail_hello_ns()
    }

    /// Returns the earliest time of the next attempt.
    pub(crate) const fn not_before_ns(&self) -> u64 {
        self.backoff.not_before_ns
    }

    /// Handles the end of the connection: resets its state, except for the slices, and backs off unless neither side is
    /// at fault.
    pub(crate) fn lost(&mut self, now_ns: u64) {
        if self.connection.cause.take() != Some(Cause::Withdrawn) {
            self.backoff.failed(now_ns);
        }
        self.generation = self.generation.wrapping_add(1);
        self.load.outstanding = 0;
        self.connection.end();
    }

    /// Reassigns the lane to another peer. Only for a lane that is idle and empty.
    pub(crate) fn renew(&mut self, peer: PeerId, rail: u32, path: Path, number: u16) {
        assert!(self.state == Endpoint::Idle && self.list.first == NOWHERE, "a lane in use was given to another peer");
        let generation = self.generation.wrapping_add(1);
        let dirty = self.dirty;
        *self = Self::new(peer, rail, path, number);
        // The client's list of dirty lanes refers to this position, so the flag has to stay.
        (self.generation, self.dirty) = (generation, dirty);
    }
}
