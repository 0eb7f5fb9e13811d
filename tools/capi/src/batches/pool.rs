//! Pool of the batches of one engine: each has capacity for a number of transfers, submitted in one or several calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use kvplane::{Batch, SubmitOptions, TaskState, TaskStatus, TransferEngine, TransferError, TransferRequest};

/// Maximum number of allocated batches.
const BATCHES: usize = 1 << 20;
/// Maximum number of transfers of one batch.
const BATCH_ROOM: usize = 1 << 20;

/// Error of a call on a batch.
#[derive(Debug)]
pub(crate) enum BatchError {
    /// No batch has this id, or it was freed.
    Unknown { batch: u64 },
    /// The batch was freed while its transfers are in flight, and takes no more of them.
    Leaving,
    /// The batch has no such task.
    NoTask { task: usize, tasks: usize },
    /// The batch has no capacity for so many transfers.
    Full { room: usize, used: usize, more: usize },
    /// No batch of this capacity can be allocated.
    Capacity { room: usize, batches: usize },
    /// Transfers of the batch are in flight.
    Busy,
    /// The task is in flight together with others of its submission, which can be cancelled as a whole only.
    Shared { task: usize },
    /// The engine refused the transfers.
    Engine(TransferError),
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { batch } => write!(f, "{batch} is no batch, or was freed"),
            Self::Leaving => f.write_str("the batch was freed"),
            Self::NoTask { task, tasks } => write!(f, "the batch has no task {task}, but {tasks} of them"),
            Self::Full { room, used, more } => {
                write!(f, "{more} more transfers exceed the batch, which holds {used} of {room}")
            }
            Self::Capacity { room, batches } => {
                write!(
                    f,
                    "no batch for {room} transfers beside {batches} others: the limits are {BATCH_ROOM}, {BATCHES}"
                )
            }
            Self::Busy => f.write_str("transfers of the batch are in flight"),
            Self::Shared { task } => write!(
                f,
                "task {task} is in flight together with others of its submission, which are cancelled together only: \
                 submit it alone"
            ),
            Self::Engine(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for BatchError {}

impl From<TransferError> for BatchError {
    fn from(error: TransferError) -> Self {
        Self::Engine(error)
    }
}

/// Batch of the C interface: the submitted batches, each with the number of its first task.
pub(crate) struct Room {
    room: usize,
    /// Held while transfers are added, which may block on peers.
    filling: Mutex<()>,
    /// Locked to read, and to add a submitted batch; never during a wait, except for the completion of a batch whose
    /// tasks have all ended.
    parts: RwLock<Vec<(usize, Batch)>>,
    /// Set when it is freed once its transfers have ended.
    leaving: AtomicBool,
}

/// Batches of an engine by id.
#[derive(Default)]
pub(crate) struct Batches {
    entries: RwLock<Entries>,
}

#[derive(Default)]
struct Entries {
    last: u64,
    rooms: HashMap<u64, Arc<Room>>,
    /// Ids of the batches to be freed once their transfers have ended.
    leaving: Vec<u64>,
}

impl Batches {
    /// Allocates a batch with capacity for `room` transfers. Returns its id, which is never 0 and never used again.
    ///
    /// # Errors
    /// When a limit is reached.
    pub(crate) fn add(&self, room: usize) -> Result<u64, BatchError> {
        self.reap();
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if room > BATCH_ROOM || entries.rooms.len() >= BATCHES {
            return Err(BatchError::Capacity { room, batches: entries.rooms.len() });
        }
        entries.last += 1;
        let id = entries.last;
        let (filling, parts, leaving) = Default::default();
        entries.rooms.insert(id, Arc::new(Room { room, filling, parts, leaving }));
        Ok(id)
    }

    /// Returns the batch with this id.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<Room>, BatchError> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.rooms.get(&id).cloned().ok_or(BatchError::Unknown { batch: id })
    }

    /// Frees a batch, unless one of its transfers is in flight.
    ///
    /// # Errors
    /// When one is, or there is no such batch.
    pub(crate) fn remove(&self, id: u64) -> Result<(), BatchError> {
        if !self.get(id)?.has_ended() {
            return Err(BatchError::Busy);
        }
        self.entries.write().unwrap_or_else(PoisonError::into_inner).rooms.remove(&id);
        Ok(())
    }

    /// Frees a batch as soon as its transfers have ended; its status can be queried until then. Freeing it again has no
    /// effect.
    ///
    /// # Errors
    /// When there is no such batch.
    pub(crate) fn release(&self, id: u64) -> Result<(), BatchError> {
        let room = self.get(id)?;
        if !room.leaving.swap(true, Ordering::SeqCst) {
            self.entries.write().unwrap_or_else(PoisonError::into_inner).leaving.push(id);
        }
        self.reap();
        Ok(())
    }

    /// Removes the released batches whose transfers have ended.
    fn reap(&self) {
        let mut leaving: Vec<(u64, Arc<Room>)> = {
            let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
            entries.leaving.iter().filter_map(|id| Some((*id, Arc::clone(entries.rooms.get(id)?)))).collect()
        };
        leaving.retain(|(_, room)| room.has_ended());
        if leaving.is_empty() {
            return;
        }
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        for (id, _) in &leaving {
            entries.rooms.remove(id);
        }
        let Entries { rooms, leaving, .. } = &mut *entries;
        leaving.retain(|id| rooms.contains_key(id));
    }

    /// Removes all batches; those in flight are cancelled and waited for.
    pub(crate) fn clear(&self) {
        let entries = core::mem::take(&mut self.entries.write().unwrap_or_else(PoisonError::into_inner).rooms);
        drop(entries);
    }
}

impl Room {
    /// Adds transfers to the batch and starts them, all or none.
    ///
    /// # Errors
    /// When they exceed the batch's capacity, the batch was freed, or the engine refuses them.
    pub(crate) fn submit(
        &self,
        engine: &TransferEngine,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<(), BatchError> {
        // Status queries of earlier transfers do not wait for the peer of this one.
        let _one = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.leaving.load(Ordering::SeqCst) {
            return Err(BatchError::Leaving);
        }
        self.check_capacity(requests.len())?;
        if requests.is_empty() {
            return Ok(());
        }
        let used = tasks(&self.parts());
        let batch = engine.submit(requests, options)?;
        self.parts.write().unwrap_or_else(PoisonError::into_inner).push((used, batch));
        Ok(())
    }

    /// Checks that the batch has capacity for further transfers.
    ///
    /// # Errors
    /// When it has not.
    pub(crate) fn check_capacity(&self, more: usize) -> Result<(), BatchError> {
        let (room, used) = (self.room, tasks(&self.parts()));
        if more > room - used { Err(BatchError::Full { room, used, more }) } else { Ok(()) }
    }

    /// Returns the status of one task, and drives the I/O of its transfers.
    ///
    /// # Errors
    /// When there is no such task.
    pub(crate) fn status(&self, task: usize) -> Result<TaskStatus, BatchError> {
        let parts = self.parts();
        let (first, batch) = part_of(&parts, task)?;
        Ok(driven(batch, task - first))
    }

    /// Returns the statuses of the first `limit` tasks, and the number of all of them.
    pub(crate) fn statuses(&self, limit: usize) -> (Vec<TaskStatus>, usize) {
        let parts = self.parts();
        let statuses = parts.iter().flat_map(|(_, batch)| (0..batch.tasks()).map(|task| driven(batch, task)));
        (statuses.take(limit).collect(), tasks(&parts))
    }

    /// Returns the state of the batch and the bytes that were moved: in flight while a task is, else the most serious
    /// outcome; complete without tasks.
    pub(crate) fn overall(&self) -> (TaskState, u64) {
        let (mut state, mut moved) = (TaskState::Completed, 0);
        for (_, batch) in self.parts().iter() {
            let part = batch.poll();
            moved += part.transferred_bytes;
            state = more_serious(state, part.state);
        }
        (state, moved)
    }

    /// Cancels a task that is the only one of its submission in flight. No effect on one that has ended.
    ///
    /// # Errors
    /// When there is no such task, or others of its submission are in flight.
    pub(crate) fn cancel(&self, task: usize) -> Result<(), BatchError> {
        let parts = self.parts();
        let (first, batch) = part_of(&parts, task)?;
        let in_flight = |task: usize| !batch.task_status(task).state.is_final();
        if !in_flight(task - first) {
            return Ok(());
        }
        if (0..batch.tasks()).any(|other| other != task - first && in_flight(other)) {
            return Err(BatchError::Shared { task });
        }
        batch.cancel();
        Ok(())
    }

    fn parts(&self) -> RwLockReadGuard<'_, Vec<(usize, Batch)>> {
        self.parts.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if no transfer is in flight or being submitted.
    fn has_ended(&self) -> bool {
        if matches!(self.filling.try_lock(), Err(TryLockError::WouldBlock)) {
            return false;
        }
        self.parts().iter().all(|(_, batch)| {
            let ended = all_ended(batch);
            if ended {
                // All its tasks have ended: the thread that drives the batch is about to complete it.
                batch.wait();
            }
            ended
        })
    }
}

/// Returns the number of tasks.
fn tasks(parts: &[(usize, Batch)]) -> usize {
    parts.last().map_or(0, |(first, batch)| first + batch.tasks())
}

/// Returns the submitted batch that has this task, and the number of its first one.
fn part_of(parts: &[(usize, Batch)], task: usize) -> Result<(usize, &Batch), BatchError> {
    let part = parts.partition_point(|(first, _)| *first <= task).checked_sub(1);
    let found = part.map(|part| (parts[part].0, &parts[part].1));
    found.filter(|(first, batch)| task - first < batch.tasks()).ok_or(BatchError::NoTask { task, tasks: tasks(parts) })
}

/// Returns the status of a task after driving its I/O, if it is in flight.
fn driven(batch: &Batch, task: usize) -> TaskStatus {
    let status = batch.task_status(task);
    if status.state.is_final() {
        return status;
    }
    batch.poll();
    batch.task_status(task)
}

/// Returns true if every task has ended, by the same view as [`Room::status`]: the count of the whole batch may lag
/// behind the last task, and a caller that saw all tasks end may free the batch.
fn all_ended(batch: &Batch) -> bool {
    let status = batch.poll();
    status.ended == status.tasks || (0..status.tasks).all(|task| batch.task_status(task).state.is_final())
}

/// Returns the state that decides about two parts of a batch: one in flight, else the more serious outcome.
fn more_serious(one: TaskState, other: TaskState) -> TaskState {
    let rank = |state: TaskState| match state {
        TaskState::Completed => 0,
        TaskState::Invalid => 1,
        TaskState::Canceled => 2,
        TaskState::Timeout => 3,
        TaskState::Failed => 4,
        TaskState::Waiting | TaskState::Pending => 5,
    };
    if rank(other) > rank(one) { other } else { one }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::TcpListener;

    use kvplane::{Opcode, Region, RegionOptions, RegisterOptions, SegmentHandle, TransferEngineConfig};

    use super::*;

    struct Side {
        batches: Batches,
        engine: TransferEngine,
        memory: Arc<Region>,
    }

    impl Side {
        fn new() -> Self {
            let config = TransferEngineConfig { shared_memory: false, ..TransferEngineConfig::default() };
            let engine = TransferEngine::start(config).expect("an engine on loopback");
            let memory = Region::allocate(&RegionOptions::new("batches", 8192)).expect("memory");
            engine.register(Arc::clone(&memory), &RegisterOptions::default()).expect("free memory");
            Self { batches: Batches::default(), engine, memory }
        }

        fn write(&self, target: SegmentHandle, target_offset: u64) -> TransferRequest {
            TransferRequest { opcode: Opcode::Write, source: self.memory.address(), target, target_offset, length: 8 }
        }

        fn room(&self, room: usize) -> (u64, Arc<Room>) {
            let id = self.batches.add(room).expect("within the limits");
            (id, self.batches.get(id).expect("a batch"))
        }
    }

    /// Peer whose port is open, and which answers nothing.
    fn silent_peer(ours: &Side) -> (TcpListener, SegmentHandle) {
        let theirs = Side::new();
        let peer = ours.engine.open_segment(theirs.engine.name()).expect("it lives");
        let address = theirs.engine.directory().address();
        drop(theirs);
        (TcpListener::bind(address).expect("its port"), peer)
    }

    #[test]
    fn an_unresponsive_peer_delays_no_status() {
        let ours = Side::new();
        let (silent, peer) = silent_peer(&ours);
        let (_, room) = ours.room(10);
        let local = ours.write(SegmentHandle::LOCAL, ours.memory.address() + 4096);
        room.submit(&ours.engine, &[local], &SubmitOptions::default()).expect("a copy");
        std::thread::scope(|scope| {
            let (room, ours) = (&room, &ours);
            // The peer never described an address like this, so its description is requested again.
            let slow =
                scope.spawn(move || room.submit(&ours.engine, &[ours.write(peer, 1)], &SubmitOptions::default()));
            let (mut call, _) = silent.accept().expect("it is asked");
            assert_eq!(room.status(0).expect("a task").state, TaskState::Completed);
            call.set_nonblocking(true).expect("a socket");
            let end = loop {
                match call.read(&mut [0; 4096]) {
                    Ok(1..) => {}
                    other => break other.map_err(|error| error.kind()),
                }
            };
            assert_eq!(end, Err(ErrorKind::WouldBlock), "the status waited until the peer was given up");
            drop((call, silent));
            assert!(slow.join().expect("no panic").is_err());
        });
    }

    #[test]
    fn a_released_batch_stays_until_its_transfers_have_ended() {
        let ours = Side::new();
        let theirs = Side::new();
        let peer = ours.engine.open_segment(theirs.engine.name()).expect("it lives");
        let (id, room) = ours.room(2);
        room.submit(&ours.engine, &[ours.write(peer, theirs.memory.address())], &SubmitOptions::default())
            .expect("a write");
        // As while another thread submits.
        let filling = room.filling.lock().expect("free");
        assert!(matches!(ours.batches.remove(id), Err(BatchError::Busy)));
        ours.batches.release(id).expect("a batch");
        ours.batches.release(id).expect("without effect");
        assert!(ours.batches.get(id).is_ok(), "in flight");
        drop(filling);
        let more = room.submit(&ours.engine, &[ours.write(peer, theirs.memory.address())], &SubmitOptions::default());
        assert!(matches!(more, Err(BatchError::Leaving)));
        while !room.overall().0.is_final() {}
        assert_eq!(room.overall(), (TaskState::Completed, 8));
        ours.room(1);
        assert!(matches!(ours.batches.get(id), Err(BatchError::Unknown { .. })), "freed by the next allocation");
        assert!(matches!(ours.batches.release(id), Err(BatchError::Unknown { .. })));
    }

    #[test]
    fn the_most_serious_part_decides() {
        use TaskState::{Canceled, Completed, Failed, Pending, Timeout};
        for (states, found) in [
            (&[][..], Completed),
            (&[Completed, Canceled, Completed], Canceled),
            (&[Timeout, Canceled], Timeout),
            (&[Failed, Timeout], Failed),
            (&[Failed, Pending, Completed], Pending),
        ] {
            assert_eq!(states.iter().copied().fold(Completed, more_serious), found, "{states:?}");
        }
    }
}
