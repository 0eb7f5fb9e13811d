//! Generational tables, and what the client keeps in them.

use kvplane_proto::ids::{BatchId, Epoch, PinId, RequestId, ReservationId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::Operation;
use kvplane_proto::status::Status;

use crate::asks::ExistenceBatch;
use crate::path::Via;
use crate::puts::PutBook;
use crate::sched::{Priority, Ticket};
use crate::second::ReplicaUse;
use crate::types::{LaneId, Local, Request, SliceId, TaskResult};

/// A table of reused positions with a generation each. Grows to the largest number ever open; never shrinks.
pub(super) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    recycled: Vec<T>,
    live: usize,
}

/// A position: which of its holders it has or had last, whether it still has it, and what that is.
struct Entry<T> {
    generation: u32,
    live: bool,
    value: T,
}

impl<T> Table<T> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), recycled: Vec::new(), live: 0 }
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, value: T) -> (u32, u32) {
        self.live += 1;
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            (entry.live, entry.value) = (true, value);
            return (index, entry.generation);
        }
        let index = u32::try_from(self.entries.len()).expect("a table of 2^32 entries");
        self.entries.push(Entry { generation: 1, live: true, value });
        (index, 1)
    }

    /// Free positions, at least so many of them, for copies of `like`. Those that are used are then [`Self::filled`].
    #[inline]
    pub(super) fn vacant(&mut self, like: &T, count: usize) -> Vacant<'_, T>
    where
        T: Copy,
    {
        self.prepare(like, count);
        let Self { entries, free, .. } = self;
        Vacant { entries, free: free.iter().rev() }
    }

    /// So many of the vacant positions are in use now.
    #[inline]
    pub(super) fn filled(&mut self, count: usize) {
        self.free.truncate(self.free.len() - count);
        self.live += count;
    }

    /// Makes so many free positions, filled with copies of anything.
    fn prepare(&mut self, any: &T, count: usize)
    where
        T: Copy,
    {
        let first = self.entries.len();
        let until = first + count.saturating_sub(self.free.len());
        if first == until {
            return;
        }
        let end = u32::try_from(until).expect("a table of 2^32 entries");
        self.entries.resize_with(until, || Entry { generation: 1, live: false, value: *any });
        // Used after those that are free, in order: as if they were inserted one by one.
        self.free.splice(..0, (first as u32..end).rev());
    }

    #[inline]
    pub(super) fn get(&self, index: u32, generation: u32) -> Option<&T> {
        let entry = self.entries.get(index as usize)?;
        (entry.generation == generation && entry.live).then_some(&entry.value)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        let entry = self.entries.get_mut(index as usize)?;
        (entry.generation == generation && entry.live).then_some(&mut entry.value)
    }

    /// The entry at a position that our own tables say is live.
    #[inline]
    pub(super) fn at(&mut self, index: u32) -> &mut T {
        let entry = &mut self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        &mut entry.value
    }

    /// The same, with the generation that its position has now.
    #[inline]
    pub(super) fn named(&mut self, index: u32) -> (u32, &mut T) {
        let entry = &mut self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        (entry.generation, &mut entry.value)
    }

    /// The same, to look at only.
    #[inline]
    pub(super) fn peek(&self, index: u32) -> &T {
        let entry = &self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        &entry.value
    }

    #[inline]
    pub(super) fn generation(&self, index: u32) -> u32 {
        self.entries[index as usize].generation
    }

    /// Ends an entry; its value stays where it is until the position is used again.
    #[inline]
    pub(super) fn end(&mut self, index: u32) -> &mut T {
        let entry = &mut self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        entry.live = false;
        // Never 0, so that the default id is nobody's.
        entry.generation = entry.generation.wrapping_add(1).max(1);
        self.free.push(index);
        self.live -= 1;
        &mut entry.value
    }

    /// Takes an entry out that owns something.
    pub(super) fn remove(&mut self, index: u32, vacant: T) -> T {
        core::mem::replace(self.end(index), vacant)
    }

    /// Keeps a removed value so that its allocations can be used again.
    pub(super) fn recycle(&mut self, value: T) {
        if self.recycled.len() < 64 {
            self.recycled.push(value);
        }
    }

    pub(super) fn recycled(&mut self) -> Option<T> {
        self.recycled.pop()
    }

    pub(super) const fn len(&self) -> usize {
        self.live
    }
}

/// Positions of a table that are being filled, in the order in which single ones would be used.
pub(super) struct Vacant<'a, T> {
    entries: &'a mut [Entry<T>],
    free: core::iter::Rev<core::slice::Iter<'a, u32>>,
}

impl<T: Copy> Vacant<'_, T> {
    /// The next position, with a copy of `like`: index, generation, and what is there.
    #[inline(always)]
    pub(super) fn fill(&mut self, like: &T) -> Option<(u32, u32, &mut T)> {
        let &index = self.free.next()?;
        let entry = self.entries.get_mut(index as usize)?;
        (entry.live, entry.value) = (true, *like);
        Some((index, entry.generation, &mut entry.value))
    }

    /// What is at a position, live or not.
    #[inline(always)]
    pub(super) fn at(&mut self, index: u32) -> &mut T {
        &mut self.entries[index as usize].value
    }

    /// The position that was filled last stays free.
    #[inline]
    pub(super) fn leave(&mut self, index: u32) {
        self.entries[index as usize].live = false;
    }
}

/// A group of tasks that complete together.
pub(super) struct Batch {
    pub(super) results: Vec<TaskResult>,
    /// Slices that each task still waits for.
    pub(super) open_slices: Vec<u32>,
    /// Its slices, some of them complete.
    pub(super) slices: Vec<SliceId>,
    /// Tasks that are not complete.
    pub(super) remaining: u32,
    pub(super) deadline_ns: u64,
    /// The map that was known when it came in.
    pub(super) epoch: Epoch,
    /// Set when the deadline passed or the caller cancelled: no slice is sent or retried any more.
    pub(super) ended: Option<Status>,
    /// The memory of each task, where slices serve several tasks: `(offset, bytes)`.
    pub(super) ranges: Vec<(u64, u64)>,
    /// What its puts say.
    pub(super) puts: PutBook,
    /// What its requests for many objects at once are about.
    pub(super) existence: ExistenceBatch,
    /// Its place in the order of things; bytes and size are each slice's own.
    pub(super) ticket: Ticket,
}

impl Batch {
    /// One without tasks.
    pub(super) const fn new() -> Self {
        Self {
            results: Vec::new(),
            open_slices: Vec::new(),
            slices: Vec::new(),
            remaining: 0,
            deadline_ns: 0,
            epoch: Epoch(0),
            ended: None,
            ranges: Vec::new(),
            puts: PutBook::new(),
            existence: ExistenceBatch::new(),
            ticket: Ticket {
                priority: Priority::Medium,
                tenant: 0,
                weight: 1,
                due_ns: u64::MAX,
                bytes: 0,
                small: true,
            },
        }
    }

    /// Whether its allocations are small enough to be kept for the next batch.
    pub(super) const fn is_worth_keeping(&self) -> bool {
        self.results.capacity() <= Limits::ITEMS_PER_FRAME
            && self.slices.capacity() <= Limits::ITEMS_PER_FRAME
            && self.puts.is_worth_keeping()
            && self.existence.is_worth_keeping()
    }
}

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
pub(super) struct Slice {
    pub(super) batch: BatchId,
    /// The first of the tasks that it serves, and how many they are: contiguous ones share slices.
    pub(super) task: u32,
    pub(super) tasks: u32,
    pub(super) request: Request,
    pub(super) state: SliceState,
    /// Where it waits for its turn.
    pub(super) way: Way,
    /// The rail that carries it, or carried it last.
    pub(super) rail: u32,
    pub(super) times: Times,
    /// When it left its lane's queue; of an earlier attempt if it is before it was bound.
    pub(super) sent_ns: u64,
    /// Its place on a lane.
    pub(super) link: LaneLink,
    /// The request that its answer is awaited for; stale when there is none.
    pub(super) wire: RequestId,
    /// How the host copies it, or copied it last.
    pub(super) via: Via,
    pub(super) tries: Tries,
    pub(super) answer: Answer,
}

/// The queue that a slice waits in, or waited in last.
#[derive(Clone, Copy)]
pub(super) struct Way {
    /// The peer and the group of its rails that it waits for or is in flight to.
    pub(super) peer: u32,
    pub(super) group: u8,
    /// Which of the group's queues it waits in.
    pub(super) queue: u8,
    /// Its place in that group's queue; `NOWHERE` while it is not in it.
    pub(super) place: u32,
}

/// The place of a slice on a lane.
#[derive(Clone, Copy)]
pub(super) struct LaneLink {
    /// Lane that it is bound to or in flight on; `NOWHERE` while it waits.
    pub(super) lane: u32,
    /// Its neighbours among the slices of that lane.
    pub(super) before: u32,
    pub(super) after: u32,
    /// Those with which it was bound to its lane: they are alike in all that is booked at their end. 0 for none.
    pub(super) run: u64,
    /// Payload bytes that it holds of its lane's window.
    pub(super) sent_bytes: u64,
}

/// What was tried with a slice so far.
#[derive(Clone, Copy)]
pub(super) struct Tries {
    /// Sendings that count against the budget and failed.
    pub(super) attempts: u8,
    /// Times that it was parked.
    pub(super) parkings: u8,
    /// It was refused together with others: from now on it is sent by itself.
    pub(super) alone: bool,
    /// Whether the replica owner is asked.
    pub(super) replica: ReplicaUse,
    /// When its owner has been silent for too long, if nothing is heard of it; 0 if nobody looks then.
    pub(super) hedge_ns: u64,
}

/// What the answer to a slice has said.
#[derive(Clone, Copy)]
pub(super) struct Answer {
    /// Length of the object.
    pub(super) bytes: u64,
    pub(super) version: u64,
    /// True where the owner's answer said that the replica owner has the object too.
    pub(super) is_replicated: bool,
    pub(super) expected_checksum: Option<u64>,
    /// Held on the peer while we copy over the shared path.
    pub(super) held: HeldHandle,
}

impl Slice {
    /// A slice of one task that nothing has happened to yet.
    pub(super) const fn new(batch: BatchId, task: u32, request: Request, via: Via, now_ns: u64) -> Self {
        Self {
            batch,
            task,
            tasks: 1,
            request,
            state: SliceState::Queued,
            way: Way { peer: 0, group: 0, queue: 0, place: NOWHERE },
            rail: NOWHERE,
            times: Times { begun_ns: now_ns, queued_ns: now_ns, posted_ns: now_ns },
            sent_ns: 0,
            link: LaneLink { lane: NOWHERE, before: NOWHERE, after: NOWHERE, run: 0, sent_bytes: 0 },
            wire: RequestId { index: 0, generation: 0 },
            via,
            tries: Tries { attempts: 0, parkings: 0, alone: false, replica: ReplicaUse::No, hedge_ns: 0 },
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
pub(super) struct Times {
    /// It was made.
    pub(super) begun_ns: u64,
    /// It began to wait.
    pub(super) queued_ns: u64,
    /// It was bound to a lane.
    pub(super) posted_ns: u64,
}

/// Load of a slice without payload.
pub(super) const LEAST_LOAD_BYTES: u64 = 32;

/// No position in a table.
pub(super) const NOWHERE: u32 = u32::MAX;

/// What a slice holds on a shard whose memory it copies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldHandle {
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
    pub(super) fn step(&mut self, event: SliceEvent) {
        match self.state.on(event) {
            kvplane_proto::states::Step::Moved(to) => self.state = to,
            _ => illegal(self.state, event),
        }
    }

    /// Payload bytes that this slice moves at most.
    #[inline]
    pub(super) fn weight_bytes(&self) -> u64 {
        self.request.local().map_or(0, |local: Local| local.bytes)
    }
}

impl Slice {
    /// What it counts for where loads are compared: something, even without a payload.
    #[inline]
    pub(super) fn load_bytes(&self) -> u64 {
        self.weight_bytes().max(LEAST_LOAD_BYTES)
    }
}

/// A request on the wire and the slices that wait for its answer.
pub(super) struct Wire {
    pub(super) lane: LaneId,
    pub(super) operation: Operation,
    pub(super) slices: Vec<u32>,
}

impl Wire {
    /// Nobody's.
    pub(super) const VACANT: Self = Self::new(LaneId { index: 0, generation: 0 }, Operation::Hello);

    pub(super) const fn new(lane: LaneId, operation: Operation) -> Self {
        Self { lane, operation, slices: Vec::new() }
    }
}

pub(super) const fn slice_id(index: u32, generation: u32) -> SliceId {
    SliceId { index, generation }
}

pub(super) const fn request_id(entry: (u32, u32)) -> RequestId {
    RequestId { index: entry.0, generation: entry.1 }
}
