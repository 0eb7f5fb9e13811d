//! Reports of a mock engine's cache, from a thread of its own: the engine computes on while the control plane is away.
//!
//! Batches are sent in order, each until it is taken. Those that the control plane lost are sent again when it requests
//! them; if they are no longer retained, the whole contents follow. An idle engine sends an empty batch now and then,
//! by which a restarted control plane notices that its snapshot of this cache is still valid.

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane::rpc::conductor::{
    BlockChange, BlockTier, CacheBatch, CacheReport, CacheTaken, CacheWanted, DeregisterInstance, ReportCache,
};
use kvplane::{ControlLink, Error};

use crate::command::Failure;

/// Most batches that are retained for a replay.
const RETAINED: usize = 4_096;
/// Time without changes after which an empty batch is sent.
const IDLE: Duration = Duration::from_millis(200);
/// Pause before a batch is sent again that was not taken.
const AGAIN: Duration = Duration::from_millis(50);
/// Time limit of a call.
const CALL: Duration = Duration::from_secs(1);

/// Change of an engine's cache: blocks stored after `parent`, and blocks evicted before.
pub(super) struct CacheChange {
    pub(super) parent: Option<u64>,
    pub(super) stored: Vec<u64>,
    pub(super) evicted: Vec<u64>,
}

/// Reporter of a cache, which begins empty.
pub(super) struct CacheReporter {
    changes: mpsc::Sender<CacheChange>,
    thread: JoinHandle<Result<(), Error>>,
}

impl CacheReporter {
    /// Begins to report for a registered instance.
    pub(super) fn start(link: ControlLink, instance: String, incarnation: u64) -> Result<Self, Failure> {
        let (changes, changed) = mpsc::channel();
        let mut feed = ReportedFeed {
            link,
            instance,
            incarnation,
            held: BTreeSet::new(),
            batches: VecDeque::new(),
            next: 0,
            taken: 0,
        };
        feed.add(CacheReport::Snapshot, Vec::new());
        let report = move || feed.run(&changed);
        let thread = std::thread::Builder::new().name("reports".to_owned()).spawn(report)?;
        Ok(Self { changes, thread })
    }

    /// Reports a change.
    pub(super) fn tell(&self, change: CacheChange) -> Result<(), Failure> {
        self.changes.send(change).map_err(|_| "the reports of the cache have ended: see the message above".into())
    }

    /// Ends the reports and deregisters the instance.
    pub(super) fn end(self) -> Result<(), Failure> {
        drop(self.changes);
        self.thread.join().map_err(|_| "the thread of the reports panicked")??;
        Ok(())
    }
}

/// Cache feed of an engine.
struct ReportedFeed {
    link: ControlLink,
    instance: String,
    incarnation: u64,
    held: BTreeSet<u64>,
    /// Retained batches; the last one has the number before `next`.
    batches: VecDeque<(CacheReport, Vec<BlockChange>)>,
    next: u64,
    /// Number of the first batch that was not taken yet.
    taken: u64,
}

impl ReportedFeed {
    fn run(&mut self, changed: &mpsc::Receiver<CacheChange>) -> Result<(), Error> {
        loop {
            let is_sent = self.send()?;
            match changed.recv_timeout(if is_sent { IDLE } else { AGAIN }) {
                Ok(change) => self.note(change),
                Err(RecvTimeoutError::Timeout) if is_sent => self.add(CacheReport::Goes, Vec::new()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let (tenant, instance, incarnation) = (String::new(), self.instance.clone(), self.incarnation);
        self.link.call_within(DeregisterInstance { tenant, instance, incarnation }, ControlLink::RESTART)?;
        Ok(())
    }

    fn add(&mut self, kind: CacheReport, changes: Vec<BlockChange>) {
        self.batches.push_back((kind, changes));
        self.next += 1;
        if self.batches.len() > RETAINED {
            self.batches.pop_front();
        }
    }

    fn note(&mut self, change: CacheChange) {
        let CacheChange { parent, stored, evicted } = change;
        for hash in &evicted {
            self.held.remove(hash);
        }
        self.held.extend(&stored);
        let (lora, salt, mut changes) = (String::new, String::new, Vec::new());
        if !evicted.is_empty() {
            changes.push(BlockChange::Removed { lora: lora(), salt: salt(), tier: None, hashes: evicted });
        }
        if !stored.is_empty() {
            let tier = BlockTier::Gpu;
            changes.push(BlockChange::Stored { lora: lora(), salt: salt(), tier, parent, hashes: stored });
        }
        self.add(CacheReport::Goes, changes);
    }

    /// Adds the whole contents.
    fn add_contents(&mut self) {
        let (lora, salt, hashes) = (String::new(), String::new(), self.held.iter().copied().collect());
        let stored = BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes };
        self.add(CacheReport::Snapshot, vec![stored]);
        self.taken = self.next - 1;
    }

    /// Sends what was not taken; returns false if the control plane is away.
    fn send(&mut self) -> Result<bool, Error> {
        while self.taken < self.next {
            let first = self.next - self.batches.len() as u64;
            let Some((kind, changes)) = self.taken.checked_sub(first).and_then(|at| self.batches.get(at as usize))
            else {
                self.add_contents();
                continue;
            };
            let batch = CacheBatch { seq: self.taken, kind: *kind, changes: changes.clone() };
            let (tenant, instance, incarnation) = (String::new(), self.instance.clone(), self.incarnation);
            match self.link.call_within(ReportCache { tenant, instance, incarnation, batch }, CALL) {
                Ok(CacheTaken { wanted: CacheWanted::Snapshot, .. }) => self.add_contents(),
                // The number of a batch that the control plane has not: it is sent next.
                Ok(CacheTaken { next, .. }) => self.taken = next.min(self.next),
                Err(error) if error.is_unanswered() => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}
