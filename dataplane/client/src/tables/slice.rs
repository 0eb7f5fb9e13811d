//! Slices: what one lane moves of a task, and everything that happened to it.

use kvplane_proto::digest::Digest;
use kvplane_proto::flags::FrameFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, PinId, RequestId, ReservationId};
use kvplane_proto::status::Status;

use crate::types::{Local, Request, SliceId, Via};

kvplane_proto::state_machine! {
    /// Where a slice is on its way.
    states SliceState {
        /// Waits to be sent.
        Queued,
        /// Asked for; the answer is awaited.
        Asked,
        /// Its payload is arriving in the caller's memory.
        Receiving,
        /// The host copies between the caller's memory and shared memory.
        Copying,
        /// Its copy into the pool is done; the commit waits to be sent or answered.
        Committing,
        /// Complete.
        Done,
    }

    /// What can happen to a slice.
    events SliceEvent {
        /// Its frame was handed to the host.
        Send,
        /// Its answer said where the bytes are, or that they follow.
        Payload,
        /// Its answer said where to copy.
        Place,
        /// The host finished its copy.
        Copied,
        /// It has its outcome.
        Finish,
        /// Its lane was lost: it goes back to a queue.
        Requeue,
    }
    transitions {
        Queued, Send => Asked;
        Asked, Payload => Receiving;
        Queued | Asked, Place => Copying;
        Copying, Copied => Committing;
        Queued | Asked | Receiving | Copying | Committing, Finish => Done;
        Queued | Asked | Receiving | Copying | Committing, Requeue => Queued;
    }
}

/// A piece of a task that one lane moves.
#[derive(Clone, Copy)]
pub(crate) struct Slice {
    pub(crate) batch: BatchId,
    /// The first of the tasks that it serves, and how many they are: contiguous ones share slices.
    pub(crate) task: u32,
    pub(crate) tasks: u32,
    pub(crate) request: Request,
    pub(crate) state: SliceState,
    pub(crate) way: Way,
    pub(crate) times: Times,
    /// When it left its lane's queue; of an earlier attempt if it is before it was bound.
    pub(crate) sent_ns: u64,
    /// Its place on a lane.
    pub(crate) link: LaneLink,
    /// The request that its answer is awaited for; stale when there is none.
    pub(crate) wire: RequestId,
    /// When its owner has been silent for too long, if nothing is heard of it; 0 if nobody looks then.
    pub(crate) hedge_ns: u64,
    pub(crate) tries: Tries,
    pub(crate) answer: Answer,
}

/// The way that a slice takes, or took last: to whom, and how.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    /// The peer and the group of its rails that it waits for or is in flight to.
    pub(crate) peer: u32,
    pub(crate) group: u8,
    /// Which of the group's queues it waits in.
    pub(crate) queue: u8,
    /// Its place in that group's queue; `NOWHERE` while it is not in it.
    pub(crate) place: u32,
    /// How the host copies it.
    pub(crate) via: Via,
    /// It was refused together with others: from now on it is sent by itself.
    pub(crate) alone: bool,
}

// They are copied as they are made, many at a time.
const _: () = assert!(size_of::<Slice>() <= 224);

/// The place of a slice on a lane.
#[derive(Clone, Copy)]
pub(crate) struct LaneLink {
    /// Lane that it is bound to or in flight on; `NOWHERE` while it waits.
    pub(crate) lane: u32,
    /// The rail that carries it, or carried it last.
    pub(crate) rail: u32,
    /// Its neighbours among the slices of that lane.
    pub(crate) before: u32,
    pub(crate) after: u32,
    /// Those with which it was bound to its lane: they are alike in all that is booked at their end. 0 for none.
    pub(crate) run: u64,
    /// Payload bytes that it holds of its lane's window.
    pub(crate) sent_bytes: u64,
}

/// What was tried with a slice so far.
#[derive(Clone, Copy)]
pub(crate) struct Tries {
    /// Sendings that count against the budget and failed.
    pub(crate) attempts: u8,
    /// Times that it was parked.
    pub(crate) parkings: u8,
    /// Whether the replica owner is asked.
    pub(crate) replica: ReplicaUse,
}

/// What the answer to a slice has said.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    /// Length of the object.
    pub(crate) bytes: u64,
    pub(crate) version: u64,
    /// True where the owner's answer said that the replica owner has the object too.
    pub(crate) is_replicated: bool,
    pub(crate) expected_checksum: Option<u64>,
    /// Held on the peer while we copy over the shared path.
    pub(crate) held: HeldHandle,
}

impl Slice {
    /// A slice of one task that nothing has happened to yet.
    pub(crate) const fn new(batch: BatchId, task: u32, request: Request, via: Via, now_ns: u64) -> Self {
        Self {
            batch,
            task,
            tasks: 1,
            request,
            state: SliceState::Queued,
            way: Way { peer: 0, group: 0, queue: 0, place: NOWHERE, via, alone: false },
            times: Times { begun_ns: now_ns, queued_ns: now_ns, posted_ns: now_ns },
            sent_ns: 0,
            link: LaneLink { lane: NOWHERE, rail: NOWHERE, before: NOWHERE, after: NOWHERE, run: 0, sent_bytes: 0 },
            wire: RequestId { index: 0, generation: 0 },
            hedge_ns: 0,
            tries: Tries { attempts: 0, parkings: 0, replica: ReplicaUse::No },
            answer: Answer {
                bytes: 0,
                version: 0,
                is_replicated: false,
                expected_checksum: None,
                held: HeldHandle::Nothing,
            },
        }
    }
}

/// When things happened to a slice.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Times {
    /// It was made.
    pub(crate) begun_ns: u64,
    /// It began to wait.
    pub(crate) queued_ns: u64,
    /// It was bound to a lane.
    pub(crate) posted_ns: u64,
}

/// Load of a slice without payload.
pub(crate) const LEAST_LOAD_BYTES: u64 = 32;

/// No position in a table.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// What a slice holds on a shard whose memory it copies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeldHandle {
    Nothing,
    Pin(PinId),
    Reservation(ReservationId),
}

/// Out of line, so that steps that are fine cost little.
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

    /// Payload bytes that this slice moves at most.
    #[inline]
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.request.local().map_or(0, |local: Local| local.bytes)
    }
}

impl Slice {
    /// What it counts for where loads are compared: something, even without a payload.
    #[inline]
    pub(crate) fn load_bytes(&self) -> u64 {
        self.weight_bytes().max(LEAST_LOAD_BYTES)
    }
}

pub(crate) const fn slice_id(index: u32, generation: u32) -> SliceId {
    SliceId { index, generation }
}

/// What a slice has had of the replica owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplicaUse {
    /// It was not asked.
    No,
    /// It is, though the first could be: it has the object too.
    Chosen,
    /// It is, as the first could not be reached.
    Asked,
    /// It was, in vain.
    Missed,
}

/// The object that a request reads, if a copy of it would do.
pub(crate) const fn readable(request: &Request) -> Option<Digest> {
    match request {
        Request::Get(digest, _) | Request::GetRange(digest, ..) | Request::GetHead(digest, _) => Some(*digest),
        _ => None,
    }
}

impl Slice {
    /// True where the replica owner is asked, or has answered.
    pub(crate) const fn is_of_replica(&self) -> bool {
        matches!(self.tries.replica, ReplicaUse::Chosen | ReplicaUse::Asked)
    }

    /// True for a get that went to the owner alone.
    pub(crate) const fn is_get_of_owner(&self) -> bool {
        matches!(self.tries.replica, ReplicaUse::No) && readable(&self.request).is_some()
    }

    /// An attempt was in vain: whether the next is with the replica owner.
    pub(crate) fn turn_to_replica(&mut self, status: Status) {
        if status != Status::Unreachable || readable(&self.request).is_none() {
            return;
        }
        self.tries.replica = match self.tries.replica {
            ReplicaUse::No => ReplicaUse::Asked,
            ReplicaUse::Chosen | ReplicaUse::Asked | ReplicaUse::Missed => ReplicaUse::Missed,
        };
    }

    /// Takes in the answer to a request of its own that brings no bytes.
    pub(crate) fn take_answer(&mut self, header: &Header) {
        if header.status == Status::Ok {
            self.answer.bytes = self.weight_bytes();
            self.answer.version = header.argument;
            self.answer.is_replicated = header.flags.has(FrameFlags::REPLICATED);
        }
    }
}
