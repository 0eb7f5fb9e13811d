//! State behind a driver's lock: the initiator, and the batches in flight by their ids.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvplane_client::{ClientMetrics, PeerId, Request};
use kvplane_engine::{
    DeviceRegistration, DirectFile, Initiator, PeerMemoryCounters, Region, StagingCounters, ZeroCopyCounters,
    device_memory,
};
use kvplane_proto::{BatchId, SegmentId, Status};
use kvplane_sys::device::{DeviceError, DeviceId, DeviceMemory};
use kvplane_ticket::Credential;

use super::{Command, Driver, Work};
use crate::batch::State;
use crate::segment::peers::{Departures, Peer};

/// Rounds after the close of a peer: its connections are reset in one round, and mostly gone in the next. No thread may
/// drive after that.
const LEAVING_ROUNDS: u32 = 2;

/// Longest wait for the kernel in one round: threads that want the lock wait for it, too.
const BURY_LONGEST: Duration = Duration::from_millis(5);

/// Peer with its id in the initiator.
struct KnownPeer {
    peer: Weak<Peer>,
    id: PeerId,
    /// Segment id of the file, if the peer represents one.
    file: Option<SegmentId>,
}

impl KnownPeer {
    fn open(initiator: &mut Initiator, peer: &Arc<Peer>) -> Self {
        Self { peer: Arc::downgrade(peer), id: initiator.open_peer_near(peer.address.clone(), peer.near()), file: None }
    }
}

/// Batches in flight by their ids.
#[derive(Default)]
struct InFlight {
    /// By the index of their ids, which are dense.
    by_index: Vec<Option<Arc<State>>>,
    /// Those of device memory, whose ids are apart from the others'.
    staged: HashMap<BatchId, Arc<State>>,
}

impl InFlight {
    fn insert(&mut self, batch: BatchId, state: Arc<State>) {
        if Initiator::is_staged(batch) {
            self.staged.insert(batch, state);
            return;
        }
        let index = batch.index as usize;
        if self.by_index.len() <= index {
            self.by_index.resize(index + 1, None);
        }
        self.by_index[index] = Some(state);
    }

    fn get(&self, batch: BatchId) -> Option<&Arc<State>> {
        if Initiator::is_staged(batch) {
            return self.staged.get(&batch);
        }
        self.by_index.get(batch.index as usize)?.as_ref()
    }

    fn take(&mut self, batch: BatchId) -> Option<Arc<State>> {
        if Initiator::is_staged(batch) {
            return self.staged.remove(&batch);
        }
        self.by_index.get_mut(batch.index as usize)?.take()
    }

    fn all(&self) -> Vec<Arc<State>> {
        self.by_index.iter().flatten().chain(self.staged.values()).cloned().collect()
    }
}

/// Initiator and its batches; the thread that holds the lock drives it.
pub(crate) struct Core {
    /// `None` after a kernel failure: then no batch can be submitted any more.
    initiator: Option<Initiator>,
    /// Failed initiator, kept until the kernel has released the memory of its batches.
    ending: Option<Initiator>,
    batches: InFlight,
    /// Commands taken from the inbox and not carried out yet.
    pub(super) todo: VecDeque<Command>,
    /// Batch that begins or completes at present, so that it is not lost in a panic.
    in_hand: Option<Arc<State>>,
    /// Peers used so far, by their numbers.
    peers: HashMap<u64, KnownPeer>,
    /// Scratch list of the peers of the batch that begins, by position.
    asked: Vec<(PeerId, Option<SegmentId>)>,
    departures: Departures,
    /// Departure count at the last check.
    departed: u64,
    failure: String,
}

impl Core {
    pub(super) fn new(initiator: Initiator, departures: Departures) -> Self {
        Self {
            initiator: Some(initiator),
            ending: None,
            batches: InFlight::default(),
            todo: VecDeque::new(),
            in_hand: None,
            peers: HashMap::new(),
            asked: Vec::new(),
            departures,
            departed: 0,
            failure: String::new(),
        }
    }

    /// Carries out the commands taken from the inbox.
    pub(super) fn obey(&mut self, driver: &Driver) {
        while let Some(command) = self.todo.pop_front() {
            match command {
                Command::Submit(state, work) => self.begin(driver, &state, work),
                Command::Cancel(state) => self.cancel(&state),
            }
        }
    }

    pub(super) fn begin(&mut self, driver: &Driver, state: &Arc<State>, mut work: Work) {
        self.in_hand = Some(Arc::clone(state));
        let Some(initiator) = &mut self.initiator else {
            self.in_hand = None;
            state.fail(Status::Unreachable);
            driver.done(state, Some(&self.failure));
            return;
        };
        self.asked.clear();
        for remote in &*state.remotes() {
            let known =
                self.peers.entry(remote.peer.number).or_insert_with(|| KnownPeer::open(initiator, &remote.peer));
            self.asked.push((known.id, known.file));
        }
        for request in &mut work.requests {
            match request {
                Request::Read(target, _) | Request::Write(target, _) => {
                    let (peer, file) = self.asked[target.peer.0 as usize];
                    (target.peer, target.segment) = (peer, file.unwrap_or(target.segment));
                }
                Request::OpenSegment(peer) => *peer = self.asked[peer.0 as usize].0,
                _ => {}
            }
        }
        state.start();
        match initiator.submit_after(&work.requests, &work.options, work.stream) {
            Ok(batch) => {
                let _ = state.place.set(batch);
                self.in_hand = None;
                self.batches.insert(batch, Arc::clone(state));
            }
            Err(error) => {
                self.in_hand = None;
                state.fail(Status::BadRequest);
                driver.done(state, Some(&error.to_string()));
            }
        }
    }

    pub(super) fn cancel(&mut self, state: &State) {
        if let (Some(&batch), Some(initiator)) = (state.place.get(), &mut self.initiator)
            && !state.is_done()
        {
            initiator.cancel(batch);
        }
    }

    pub(super) fn cancel_all(&mut self) {
        for state in self.batches.all() {
            self.cancel(&state);
        }
    }

    /// Runs one round without waiting.
    pub(super) fn post(&mut self, driver: &Driver) {
        self.bury(driver, Duration::ZERO);
        let result = self.initiator.as_mut().map_or(Ok(()), |initiator| initiator.poll().map(|_| ()));
        self.after(driver, result);
    }

    /// Runs one round that waits, by the engine's pacing, when there is nothing to do.
    pub(super) fn round(&mut self, driver: &Driver, longest: Duration, pending: impl FnOnce() -> bool) {
        self.bury(driver, longest);
        let result = self.initiator.as_mut().map_or(Ok(()), |initiator| initiator.round(longest, pending));
        self.after(driver, result);
    }

    fn after(&mut self, driver: &Driver, mut result: std::io::Result<()>) {
        let mut rounds = 0;
        while result.is_ok() {
            self.reap(driver);
            let connecting = self.initiator.as_mut().is_some_and(|initiator| initiator.books().is_connecting());
            if connecting != driver.connecting.load(Ordering::Relaxed) {
                driver.connecting.store(connecting, Ordering::Relaxed);
            }
            let mapping = self.initiator.as_ref().is_some_and(|one| one.host_counters().peer_memory.mappings > 0);
            if mapping != driver.mapping.load(Ordering::Relaxed) {
                driver.mapping.store(mapping, Ordering::Relaxed);
            }
            // The completed batches may have held the last reference to a peer.
            if self.leave_departed() {
                rounds = LEAVING_ROUNDS;
            }
            if rounds == 0 {
                return;
            }
            rounds -= 1;
            result = self.initiator.as_mut().map_or(Ok(()), |initiator| initiator.poll().map(|_| ()));
        }
        if let Err(error) = result {
            self.fail(driver, &error.to_string());
        }
    }

    /// Closes unreferenced peers. Returns true if there were departures since the last check.
    fn leave_departed(&mut self) -> bool {
        let (departed, Some(initiator)) = (self.departures.count(), &mut self.initiator) else { return false };
        if departed == self.departed {
            return false;
        }
        self.departed = departed;
        self.peers.retain(|_, known| {
            let held = known.peer.strong_count() > 0;
            if !held {
                initiator.close_peer(known.id);
                if let Some(file) = known.file {
                    initiator.host().files().close(file);
                }
            }
            held
        });
        true
    }

    /// Adds a file that batches can then read and write.
    ///
    /// # Errors
    /// When the limit of files is reached, or the initiator has failed.
    pub(crate) fn add_file(&mut self, peer: &Arc<Peer>, file: Arc<DirectFile>) -> std::io::Result<()> {
        let initiator = self.initiator.as_mut().ok_or_else(|| std::io::Error::other(self.failure.clone()))?;
        let file = initiator.host().add_file(file)?;
        let known = KnownPeer { file: Some(file), ..KnownPeer::open(initiator, peer) };
        self.peers.insert(peer.number, known);
        Ok(())
    }

    fn reap(&mut self, driver: &Driver) {
        let Some(initiator) = &mut self.initiator else { return };
        while let Some((batch, task, result)) = initiator.poll_finished() {
            if let Some(state) = self.batches.get(batch) {
                state.part_ended(task, result.status, result.bytes);
            }
        }
        while let Some(batch) = initiator.poll_done() {
            let Some(state) = self.batches.take(batch) else { continue };
            self.in_hand = Some(Arc::clone(&state));
            if state.wants_description
                && let Some(description) = initiator.take_description(batch)
            {
                let _ = state.description.set(description);
            }
            initiator.release(batch);
            self.in_hand = None;
            driver.done(&state, initiator.last_problem());
        }
    }

    /// Handles a failure of the kernel or a panic: no batch can be submitted any more, and those in flight fail as soon
    /// as their memory is released.
    pub(super) fn fail(&mut self, driver: &Driver, why: &str) {
        self.failure = driver.broken.get_or_init(|| format!("the engine has failed: {why}")).clone();
        if let Some(failed) = self.initiator.take() {
            self.ending = Some(failed);
        }
        driver.connecting.store(false, Ordering::Relaxed);
        driver.mapping.store(false, Ordering::Relaxed);
        self.bury(driver, Duration::ZERO);
    }

    /// Fails the batches of a failed initiator once the kernel has released their memory; waits for that up to
    /// `longest`. The kernel may access files long after the last system call.
    fn bury(&mut self, driver: &Driver, longest: Duration) {
        if self.failure.is_empty() {
            return;
        }
        // Taken out first: if this panics too, it is gone at the next attempt. Its drop waits as well.
        if let Some(mut ending) = self.ending.take()
            && !ending.host().files().end(longest.min(BURY_LONGEST))
        {
            self.ending = Some(ending);
            return;
        }
        let todo = self.todo.drain(..).filter_map(|command| match command {
            Command::Submit(state, _) => Some(state),
            Command::Cancel(_) => None,
        });
        for state in std::mem::take(&mut self.batches).all().into_iter().chain(self.in_hand.take()).chain(todo) {
            state.fail(Status::Unreachable);
            driver.done(&state, Some(&self.failure));
        }
    }

    /// Returns the initiator's counters and the names of its peers; `None` after a failure.
    pub(crate) fn books(&mut self) -> Option<(ClientMetrics<'_>, HashMap<PeerId, String>)> {
        let name = |known: &KnownPeer| Some((known.id, known.peer.upgrade()?.name()));
        Some((self.initiator.as_mut()?.books(), self.peers.values().filter_map(name).collect()))
    }

    /// Returns the names of its RDMA devices, by their indices.
    pub(crate) fn devices(&self) -> Vec<String> {
        self.initiator.as_ref().map_or_else(Vec::new, Initiator::device_names)
    }

    /// Returns the counters of copies from and to device memory of peers.
    pub(crate) fn peer_memory(&self) -> PeerMemoryCounters {
        self.initiator.as_ref().map_or_else(Default::default, |initiator| initiator.host_counters().peer_memory)
    }

    /// Returns the counters of zero-copy sends.
    pub(crate) fn zero_copy(&self) -> ZeroCopyCounters {
        self.initiator.as_ref().map_or_else(Default::default, |initiator| initiator.host_counters().zero_copy)
    }

    pub(super) fn set_buffer(&mut self, index: u32, region: &Arc<Region>, location: &str) {
        if let Some(initiator) = &mut self.initiator {
            initiator.set_buffer(index, Arc::clone(region), location);
        }
    }

    pub(super) fn set_device_buffer(&mut self, index: u32, memory: &Arc<DeviceMemory>) -> Result<(), DeviceError> {
        match &mut self.initiator {
            Some(initiator) => initiator.set_device_buffer(index, Arc::clone(memory)),
            None => Ok(()),
        }
    }

    /// Returns the counters of the copies from and to each device that was used.
    pub(crate) fn staging(&self) -> BTreeMap<DeviceId, StagingCounters> {
        self.initiator.as_ref().map_or_else(BTreeMap::new, Initiator::staging)
    }

    /// Returns the registrations of device memory with RDMA devices.
    pub(crate) fn device_registrations(&mut self) -> Vec<DeviceRegistration> {
        let host = self.initiator.as_mut().map(Initiator::host);
        host.map_or_else(Vec::new, |host| device_memory::registrations(host.rdma()))
    }

    pub(super) fn set_credential(&mut self, credential: &Arc<Credential>) {
        if let Some(initiator) = &mut self.initiator {
            initiator.set_credential(Arc::clone(credential));
        }
    }

    pub(super) fn remove_buffer(&mut self, index: u32) {
        if let Some(initiator) = &mut self.initiator {
            initiator.remove_buffer(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvplane_engine::{Region, RegionOptions};

    use crate::{
        Opcode, RegisterOptions, SubmitOptions, TaskState, TransferEngine, TransferEngineConfig, TransferRequest,
    };

    const BYTES: usize = 16 << 20;
    const PART: usize = 256 << 10;

    /// The kernel is reading a file into local memory when the initiator fails: batches complete only when the kernel
    /// has finished the reads and the memory is free again.
    #[test]
    fn batches_of_a_failed_initiator_complete_when_their_memory_is_free() {
        let path = std::env::current_exe().unwrap().with_file_name(format!("kvplane-core-{}", std::process::id()));
        std::fs::write(&path, vec![7; BYTES]).unwrap();
        for round in 0..8 {
            let engine =
                TransferEngine::start(TransferEngineConfig { initiators: 1, ..TransferEngineConfig::default() })
                    .unwrap();
            let region = Region::allocate(&RegionOptions::new("core-test", BYTES)).unwrap();
            engine.register(Arc::clone(&region), &RegisterOptions::default()).unwrap();
            let target = engine.open_segment(&format!("file://{}?readonly", path.display())).unwrap();
            let read = |number: usize| TransferRequest {
                opcode: Opcode::Read,
                source: region.address() + (number * PART) as u64,
                target,
                target_offset: (number * PART) as u64,
                length: PART as u64,
            };
            let requests: Vec<TransferRequest> = (0..BYTES / PART).map(read).collect();
            let batch = engine.submit(&requests, &SubmitOptions::default()).unwrap();
            let driver = engine.initiators().first();
            driver.with(|core| core.fail(driver, "a test's"));
            // A submission now is rejected at once, whether or not the reads have finished.
            let later = engine.submit(&requests[..1], &SubmitOptions::default()).expect_err("refused");
            assert!(later.to_string().contains("a test's"), "{later}");
            let state = batch.wait().state;
            assert!(matches!(state, TaskState::Failed | TaskState::Completed), "{state:?}");
            region.fill_with(0, BYTES, &mut |_, part| part.fill(9));
            std::thread::sleep(std::time::Duration::from_millis(5));
            let mut wrong = 0;
            region.read_with(0, BYTES, &mut |_, part| wrong += part.iter().filter(|&&byte| byte != 9).count());
            assert_eq!(wrong, 0, "bytes were written after the batch was done, round {round}");
            engine.unregister(region.address()).unwrap();
            assert_eq!(engine.metrics().in_flight, 0);
            drop(engine);
            assert_eq!(Arc::strong_count(&region), 1, "still held, round {round}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
