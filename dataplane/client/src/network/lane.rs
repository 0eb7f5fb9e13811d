//! A lane: one connection to a shard, its handshake and what waits on it.

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
/// Waits double up to this, or up to a part of the outage, whichever is longer.
const BACKOFF_LONG_NS: u64 = 32_000_000;
const OUTAGE_PARTS: u64 = 16;
const BACKOFF_LAST_NS: u64 = 1_000_000_000;
/// How often the time for a greeting doubles. Together with the last wait it has to stay well under the 5 s after which
/// a rail that is back is to be used.
const HELLO_DOUBLINGS: u32 = 2;

/// Why we end a connection ourselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// The peer broke the protocol, refused us, or did not answer a greeting: the connection and its slices are
    /// charged.
    Peer,
    /// A deadline passed: the connection may be at fault, the other slices on it are not.
    Deadline,
    /// The caller withdrew a batch or the map dropped the peer: nobody is at fault.
    Withdrawn,
}

/// A place for a connection to a shard: the slices that go over it, and the connection that it has now, if any.
pub(crate) struct Lane {
    pub(crate) peer: PeerId,
    /// Its rail, in the client's table.
    pub(crate) rail: u32,
    pub(crate) path: Path,
    pub(crate) number: u16,
    pub(crate) generation: u32,
    pub(crate) state: Endpoint,
    pub(crate) list: LaneList,
    pub(crate) load: LaneLoad,
    pub(crate) connection: Connection,
    pub(crate) dirty: bool,
    /// Its entry among the client's alarms.
    pub(crate) alarm_ns: Option<u64>,
    /// When it was last seen to move something.
    pub(crate) progress_ns: u64,
    backoff: Backoff,
}

/// The list of a lane's slices, oldest first: what was sent stands before what was not, as both go in order.
pub(crate) struct LaneList {
    /// Its ends.
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// The first slice that the next flush sends, and how many there are from it on.
    pub(crate) next: u32,
    pub(crate) queued: u32,
}

/// How much a lane has to do.
#[derive(Default)]
pub(crate) struct LaneLoad {
    /// Requests without an answer.
    pub(crate) outstanding: u32,
    /// Slices with a payload that left the queue and are not done.
    pub(crate) flying: u32,
    /// Payload bytes bound and outstanding.
    pub(crate) bound_bytes: u64,
    /// Payload bytes outstanding: what the window limits.
    pub(crate) sent_bytes: u64,
}

/// What is true of one connection of a lane, and is forgotten when it ends.
#[derive(Default)]
pub(crate) struct Connection {
    /// Whether it was welcomed.
    pub(crate) greeted: bool,
    /// The host says that the kernel copies between us and this peer.
    pub(crate) cma: bool,
    /// Up to which of the peer's fences it was told, by their count.
    pub(crate) fenced: u64,
    /// What the shard challenged it with, if it wants tickets.
    pub(crate) challenged: Option<Box<LaneChallenge>>,
    /// Why the peer refused us: its slices fail with this instead of being retried.
    pub(crate) refusal: Option<Status>,
    /// Why it is being reset, if it is.
    pub(crate) cause: Option<Cause>,
    pub(crate) owed: Owed,
    /// Requests that gets have left: see [`crate::replicas`].
    pub(crate) detached: Vec<RequestId>,
    /// Segments that cannot be moved in this way, as found out on it.
    closed: BTreeSet<(SegmentId, Via)>,
}

/// What the peer is to be told of what we hold in its memory.
#[derive(Default)]
pub(crate) struct Owed {
    pub(crate) releases: Vec<PinId>,
    pub(crate) aborts: Vec<ReservationId>,
    pub(crate) commits: Vec<(u32, CommitItem)>,
}

impl Connection {
    /// A request is answered, or never will be: nobody looks for gets that have left it any more.
    pub(crate) fn forget_detached(&mut self, wire: RequestId) {
        self.detached.retain(|left| *left != wire);
    }

    /// Forgets all of it; what is kept is the memory of its lists.
    fn end(&mut self) {
        self.owed.clear();
        self.detached.clear();
        self.closed.clear();
        let (owed, detached) = (core::mem::take(&mut self.owed), core::mem::take(&mut self.detached));
        let closed = core::mem::take(&mut self.closed);
        *self = Self { owed, detached, closed, ..Self::default() };
    }
}

impl Owed {
    fn clear(&mut self) {
        self.releases.clear();
        self.aborts.clear();
        self.commits.clear();
    }
}

/// How long a lane waits before it is connected again.
#[derive(Default)]
struct Backoff {
    failures: u32,
    /// When the first of the failures since the last welcome was.
    failing_since_ns: u64,
    not_before_ns: u64,
}

impl Backoff {
    /// When the next connection may be tried, if that is later than `now_ns`.
    const fn waits_until(&self, now_ns: u64) -> Option<u64> {
        if now_ns < self.not_before_ns { Some(self.not_before_ns) } else { None }
    }

    /// How long the next connection may take until it is welcomed, where other rails work meanwhile. One that was too
    /// slow is given more time: a machine that is busy may need it.
    const fn rail_hello_ns(&self) -> u64 {
        let doublings = if self.failures < HELLO_DOUBLINGS { self.failures } else { HELLO_DOUBLINGS };
        Limits::RAIL_HELLO_NS << doublings
    }

    /// A connection failed. The wait doubles up to a small part of the outage: what was gone for a second is missed for
    /// a few hundredths more, and what was gone for long is not asked all the time.
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

    /// Requests that may be under way at once.
    #[inline]
    pub(crate) fn depth(&self, config: &Config) -> usize {
        match self.path {
            Path::Mooncake => config.foreign_depth.max(1) as usize,
            Path::Stream | Path::Rdma | Path::Shared | Path::Local | Path::MooncakeRdma | Path::File => {
                Limits::REQUESTS_PER_CONNECTION
            }
        }
    }

    /// Whether another request may be under way.
    #[inline]
    pub(crate) fn has_room(&self, config: &Config) -> bool {
        let open = match self.path {
            // Some of its slices have a request, some are the device's alone.
            Path::Rdma => self.load.outstanding.max(self.load.flying),
            path if path.is_greeted() => self.load.outstanding,
            _ => self.load.flying,
        };
        (open as usize) < self.depth(config)
            && (self.load.sent_bytes == 0 || self.load.sent_bytes < config.lane_window_bytes)
    }

    /// How many more copies that the device makes by itself may be under way, by their number.
    pub(crate) fn may_fly(&self, config: &Config) -> u32 {
        let depth = self.depth(config) as u32;
        if self.load.outstanding < depth { depth.saturating_sub(self.load.flying) } else { 0 }
    }

    /// Whether something is awaited on it.
    pub(crate) fn is_awaited(&self) -> bool {
        self.list.first != NOWHERE || !self.connection.detached.is_empty()
    }

    /// Whether payloads of segments carry a checksum on it.
    pub(crate) fn sums_segments(&self, config: &Config) -> bool {
        config.checksum_segments && self.path != Path::Mooncake
    }

    /// Whether some segment is known not to be moved in some way.
    pub(crate) fn closes_ways(&self) -> bool {
        !self.connection.closed.is_empty()
    }

    /// The next slice of its list is sent: it takes its part of the window, which it says.
    #[inline]
    pub(crate) fn sends(&mut self, slice: &Slice) {
        self.list.next = slice.link.after;
        self.list.queued -= 1;
        self.load.sent_bytes += slice.link.sent_bytes;
        self.load.flying += u32::from(slice.link.sent_bytes > 0);
    }

    /// Whether another slice may be bound to it. Where few requests may be under way, the rest waits for its turn with
    /// its group instead.
    pub(crate) fn may_take_more(&self, config: &Config) -> bool {
        let open = if self.path.is_greeted() { self.load.outstanding } else { self.load.flying + self.list.queued };
        (open as usize) < self.depth(config)
    }

    /// The way in which this lane moves a segment. Before the host knows about cma, it is taken to work.
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

    /// Whether a segment is known not to be moved in this way.
    #[inline]
    pub(crate) fn is_closed(&self, segment: SegmentId, via: Via) -> bool {
        !self.connection.closed.is_empty() && self.connection.closed.contains(&(segment, via))
    }

    /// Remembers that a segment cannot be moved in this way.
    pub(crate) fn close_way(&mut self, segment: SegmentId, via: Via) {
        if self.connection.closed.len() >= Limits::SEGMENTS {
            // Ids of segments that are long gone: what is still true is found out again.
            self.connection.closed.clear();
        }
        self.connection.closed.insert((segment, via));
    }

    pub(crate) const fn id(&self, index: u32) -> LaneId {
        LaneId { index, generation: self.generation }
    }

    /// Applies an event; false when it was stale.
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

    /// When the next connection may be tried, if that is later than `now_ns`.
    pub(crate) const fn waits_until(&self, now_ns: u64) -> Option<u64> {
        self.backoff.waits_until(now_ns)
    }

    pub(crate) const fn welcomed(&mut self) {
        self.connection.greeted = true;
        self.backoff.failures = 0;
    }

    /// Whether it is on its way to be used.
    pub(crate) const fn is_coming(&self) -> bool {
        matches!(self.state, Endpoint::Connecting | Endpoint::Greeting)
    }

    /// How long the next connection may take until it is welcomed, where other rails work meanwhile.
    pub(crate) const fn rail_hello_ns(&self) -> u64 {
        self.backoff.rail_hello_ns()
    }

    /// When the next connection may be tried.
    pub(crate) const fn not_before_ns(&self) -> u64 {
        self.backoff.not_before_ns
    }

    /// The connection ended: forget what was on it, except its slices, and wait before the next. No wait where nobody
    /// is at fault.
    pub(crate) fn lost(&mut self, now_ns: u64) {
        if self.connection.cause.take() != Some(Cause::Withdrawn) {
            self.backoff.failed(now_ns);
        }
        self.generation = self.generation.wrapping_add(1);
        self.load.outstanding = 0;
        self.connection.end();
    }

    /// Serves another peer from now on. Only for a lane that is idle and empty.
    pub(crate) fn renew(&mut self, peer: PeerId, rail: u32, path: Path, number: u16) {
        assert!(self.state == Endpoint::Idle && self.list.first == NOWHERE, "a lane in use was given to another peer");
        let generation = self.generation.wrapping_add(1);
        let dirty = self.dirty;
        *self = Self::new(peer, rail, path, number);
        // What the lists of the client say about this position stays true.
        (self.generation, self.dirty) = (generation, dirty);
    }
}
