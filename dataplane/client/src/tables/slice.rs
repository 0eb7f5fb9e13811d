//! Slices: the parts of tasks that lanes carry, with their state.

use kvplane_proto::digest::Digest;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, PinId, RequestId, ReservationId};
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::status::Status;

use crate::types::{Local, Request, SliceId, Via};

kvplane_proto::state_machine! {
    /// State of a slice.
    states SliceState {
        /// Queued, to be sent.
        Queued,
        /// Sent; waits for the reply.
        Requested,
        /// Its payload is being received into the caller's memory.
        Receiving,
        /// The host copies between the caller's memory and shared memory or a segment.
        Copying,
        /// Its copy into the pool is complete; the commit is to be sent or answered.
        Committing,
        /// Complete.
        Done,
    }

    /// Event of a slice.
    events SliceEvent {
        /// Its frame was passed to the host.
        Send,
        /// Its reply announced that the payload follows.
        Payload,
        /// Its reply gave the location to copy from or to.
        Place,
        /// The host completed its copy.
        Copied,
        /// It has its outcome.
        Finish,
        /// It goes back to a queue, because its lane was lost or it is retried.
        Requeue,
    }
    transitions {
        Queued, Send => Requested;
        Requested, Payload => Receiving;
        Queued | Requested, Place => Copying;
        Copying, Copied => Committing;
        Queued | Requested | Receiving | Copying | Committing, Finish => Done;
        Queued | Requested | Receiving | Copying | Committing, Requeue => Queued;
    }
}

/// Part of a task that one lane carries.
#[derive(Clone, Copy)]
pub(crate) struct Slice {
    pub(crate) batch: BatchId,
    /// First of the tasks that it serves, and their number: adjacent tasks share slices.
    pub(crate) task: u32,
    pub(crate) tasks: u32,
    pub(crate) request: Request,
    pub(crate) state: SliceState,
    pub(crate) way: Route,
    pub(crate) times: Times,
    /// Time at which it left its lane's queue; that of an earlier attempt if it is before the slice was bound.
    pub(crate) sent_ns: u64,
    /// Position on a lane.
    pub(crate) link: LaneLink,
    /// Request in flight whose reply it waits for; stale if there is none.
    pub(crate) wire: RequestId,
    /// Time at which the request is hedged if its owner stays silent; 0 if no timer is set.
    pub(crate) hedge_ns: u64,
    pub(crate) tries: Tries,
    pub(crate) answer: Answer,
}

/// Present or last way of a slice: its peer, and how it is sent.
#[derive(Clone, Copy)]
pub(crate) struct Route {
    /// Peer, and group of the peer's rails, that it is queued for or in flight to.
    pub(crate) peer: u32,
    pub(crate) group: u8,
    /// Queue of the group.
    pub(crate) queue: u8,
    /// Position in that queue; `NOWHERE` while it is not queued.
    pub(crate) place: u32,
    /// Way in which the host copies it.
    pub(crate) via: Via,
    /// Difference between its next frame and the first one.
    pub(crate) resend: Resend,
}

// Slices are copied as they are made, many at a time.
const _: () = assert!(size_of::<Slice>() <= 224);

/// Position of a slice on a lane.
#[derive(Clone, Copy)]
pub(crate) struct LaneLink {
    /// Lane that it is bound to or in flight on; `NOWHERE` while it is queued.
    pub(crate) lane: u32,
    /// Rail that carries it, or carried it last.
    pub(crate) rail: u32,
    /// Neighbours in the list of that lane.
    pub(crate) before: u32,
    pub(crate) after: u32,
    /// Number of the run in which it was bound to its lane: slices of a run are equal in everything that is booked when
    /// they end. 0 for none.
    pub(crate) run: u64,
    /// Payload bytes charged to its lane's window.
    pub(crate) sent_bytes: u64,
}

/// Attempts for a slice so far.
#[derive(Clone, Copy)]
pub(crate) struct Tries {
    /// Failed attempts that count against the budget.
    pub(crate) attempts: u8,
    /// Number of times that it was parked.
    pub(crate) parkings: u8,
    /// Use of a replica owner.
    pub(crate) replica: ReplicaUse,
}

/// Contents of the reply to a slice, and who gives it.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    /// Number, in the order of the map, of the replica owner that is asked, where one is.
    pub(crate) replica_number: u8,
    /// Length of the object.
    pub(crate) bytes: u64,
    pub(crate) version: u64,
    /// Replica owners that have the object too, as the owner's reply reported.
    pub(crate) replicas: ReplicaSet,
    pub(crate) expected_checksum: Option<u64>,
    /// Pin or reservation held on the peer while the host copies over the shared path.
    pub(crate) held: HeldHandle,
}

impl Slice {
    /// Creates a slice of one task.
    pub(crate) const fn new(batch: BatchId, task: u32, request: Request, via: Via, now_ns: u64) -> Self {
        Self {
            batch,
            task,
            tasks: 1,
            request,
            state: SliceState::Queued,
            way: Route { peer: 0, group: 0, queue: 0, place: NOWHERE, via, resend: Resend::Plain },
            times: Times { begun_ns: now_ns, queued_ns: now_ns, posted_ns: now_ns },
            sent_ns: 0,
            link: LaneLink { lane: NOWHERE, rail: NOWHERE, before: NOWHERE, after: NOWHERE, run: 0, sent_bytes: 0 },
            wire: RequestId { index: 0, generation: 0 },
            hedge_ns: 0,
            tries: Tries { attempts: 0, parkings: 0, replica: ReplicaUse::No },
            answer: Answer {
                replica_number: 0,
                bytes: 0,
                version: 0,
                replicas: ReplicaSet::NONE,
                expected_checksum: None,
                held: HeldHandle::Nothing,
            },
        }
    }
}

/// Times of a slice.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Times {
    /// Creation.
    pub(crate) begun_ns: u64,
    /// Enqueueing.
    pub(crate) queued_ns: u64,
    /// Binding to a lane.
    pub(crate) posted_ns: u64,
}

/// Load that a slice without payload counts for, in bytes.
pub(crate) const LEAST_LOAD_BYTES: u64 = 32;

/// No position in a table.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// Pin or reservation of a slice on a shard whose memory it copies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeldHandle {
    Nothing,
    Pin(PinId),
    Reservation(ReservationId),
}

/// Out of line, to keep legal steps cheap.
#[cold]
#[inline(never)]
fn illegal(state: SliceState, event: SliceEvent) -> ! {
    panic!("slice in {state:?} got {event:?}");
}

impl Slice {
    #[inline]
    pub(crate) fn step(&mut self, event: SliceEvent) {
        match self.state.on(event) {
            kvplane_proto::states::Step::Moved(to) => self.state = to,
            _ => illegal(self.state, event),
        }
    }

    /// Returns the payload bytes of this slice, at most.
    #[inline]
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.request.local().map_or(0, |local: Local| local.bytes)
    }
}

impl Slice {
    /// Returns its load where loads are compared: nonzero, even without a payload.
    #[inline]
    pub(crate) fn load_bytes(&self) -> u64 {
        self.weight_bytes().max(LEAST_LOAD_BYTES)
    }
}

pub(crate) const fn slice_id(index: u32, generation: u32) -> SliceId {
    SliceId { index, generation }
}

/// Use of a replica owner by a get or a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplicaUse {
    /// The get was not sent to a replica owner.
    No,
    /// The get was sent to a replica owner first: because several owners have the object (spread), or because the owner
    /// is suspect. Its hedge goes to the owner.
    Chosen,
    /// The get was sent to a replica owner because the owner is unreachable (failover) or did not reply (hedge).
    Requested,
    /// The replica owners were tried without success.
    Missed,
}

/// Difference between the next frame of a slice and the first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Resend {
    /// No difference.
    Plain,
    /// The range was refused together with others: from now on it is sent in a frame of its own.
    Alone,
    /// The bytes of a get were damaged: it goes to the shard that sent them, with a report.
    ToDamaged,
    /// The frame of a get reports to its shard that the bytes were damaged.
    ReportsDamage,
}

/// Returns the object that a request reads or queries, if a replica of it suffices.
pub(crate) const fn readable(request: &Request) -> Option<Digest> {
    match request {
        Request::Get(digest, _)
        | Request::GetRange(digest, ..)
        | Request::GetHead(digest, _)
        | Request::Exists(digest)
        | Request::Size(digest) => Some(*digest),
        _ => None,
    }
}

impl Slice {
    /// Returns true if a replica owner is used.
    pub(crate) const fn is_of_replica(&self) -> bool {
        matches!(self.tries.replica, ReplicaUse::Chosen | ReplicaUse::Requested)
    }

    /// Returns true for a get that was sent to the owner only.
    pub(crate) const fn is_get_of_owner(&self) -> bool {
        matches!(self.tries.replica, ReplicaUse::No) && self.request.is_get() && readable(&self.request).is_some()
    }

    /// Handles a failed attempt: a get whose owner is unreachable fails over to the replica owners, to each once.
    pub(crate) fn turn_to_replica(&mut self, status: Status) {
        if status != Status::Unreachable || readable(&self.request).is_none() {
            return;
        }
        match self.tries.replica {
            ReplicaUse::No => (self.tries.replica, self.answer.replica_number) = (ReplicaUse::Requested, 0),
            ReplicaUse::Requested => self.answer.replica_number = self.answer.replica_number.saturating_add(1),
            ReplicaUse::Chosen | ReplicaUse::Missed => self.tries.replica = ReplicaUse::Missed,
        }
    }

    /// Handles a failed attempt: the next one reports damaged bytes to the shard that sent them.
    pub(crate) fn note_damage(&mut self, status: Status) {
        if !self.request.is_get() {
            return;
        }
        self.way.resend = match (status, self.request.peer()) {
            (Status::Corrupt, None) => Resend::ToDamaged,
            // There is no other shard that it could go to.
            (Status::Corrupt, Some(_)) => Resend::ReportsDamage,
            _ => Resend::Plain,
        };
    }

    /// Takes over the contents of a reply without payload.
    pub(crate) fn take_answer(&mut self, header: &Header) {
        if header.status == Status::Ok {
            self.answer.bytes = self.weight_bytes();
            self.answer.version = header.argument;
            self.answer.replicas = header.flags.replicas();
        }
    }
}
