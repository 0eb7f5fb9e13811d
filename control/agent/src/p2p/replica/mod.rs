//! Replica: one object in this process's memory, complete or partial.

mod fetch;
mod hashes;
mod order;
mod rank_progress;
mod ranks;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvplane_cluster::p2p::{Follow, ObjectSpec, ShardSet};
use kvplane_engine::Region;

pub(super) use fetch::{Fetch, FetchRoom, News, ParentState, Trouble};
pub(super) use hashes::{hash_range, hashes};
pub(super) use order::ShardOrder;
pub use ranks::Ranks;
pub(super) use ranks::Seat;

/// Replica of an object.
pub(super) struct Replica {
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) spec: Arc<ObjectSpec>,
    pub(super) digest: u128,
    pub(super) regions: Vec<Arc<Region>>,
    pub(super) origin: bool,
    /// Shards that are present, and the fetch of the others.
    pub(super) fetch: Fetch,
    /// Member number in the catalog; a new one after each announcement.
    member: AtomicU64,
    announcing: Mutex<()>,
    /// Set while a call fetches or retires the replica.
    busy: AtomicBool,
    /// Set when the replica is not announced any more.
    leaving: AtomicBool,
}

/// Mark of a replica that a call fetches or retires, while this lives.
pub(super) struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Replica {
    /// Creates the replica of an object that originates here.
    pub(super) fn whole(name: &str, version: u64, spec: Arc<ObjectSpec>, regions: &[Arc<Region>]) -> Self {
        let shards = spec.layout.shards();
        Self::new(name, version, spec, regions, ShardSet::full(shards), ShardSet::empty(shards), true)
    }

    /// Creates a replica that is to be fetched. It is busy until the mark of [`Self::mark_busy`] is dropped.
    pub(super) fn partial(
        name: &str,
        version: u64,
        spec: Arc<ObjectSpec>,
        regions: &[Arc<Region>],
        have: ShardSet,
        want: ShardSet,
    ) -> Self {
        Self::new(name, version, spec, regions, have, want, false)
    }

    fn new(
        name: &str,
        version: u64,
        spec: Arc<ObjectSpec>,
        regions: &[Arc<Region>],
        have: ShardSet,
        want: ShardSet,
        origin: bool,
    ) -> Self {
        Self {
            name: name.to_owned(),
            version,
            digest: spec.digest(),
            fetch: Fetch::new(Arc::clone(&spec), have, want),
            spec,
            regions: regions.to_vec(),
            origin,
            member: AtomicU64::new(0),
            announcing: Mutex::new(()),
            // Set before other threads see the replica.
            busy: AtomicBool::new(!origin),
            leaving: AtomicBool::new(false),
        }
    }

    /// Lets the replica be fetched by a schedule, as the rank with this board.
    pub(super) fn follow_schedule(&mut self, follow: Follow, seat: Seat) {
        self.fetch.follow_schedule(follow, seat);
    }

    /// Returns the name and the version of the object.
    pub(super) fn key(&self) -> (String, u64) {
        (self.name.clone(), self.version)
    }

    /// Returns the member number in the catalog.
    pub(super) fn member(&self) -> u64 {
        self.member.load(Ordering::Acquire)
    }

    /// Notes the member number of a new announcement.
    pub(super) fn set_member(&self, member: u64) {
        self.member.store(member, Ordering::Release);
    }

    /// Returns all memory that peers read.
    pub(super) fn memory(&self) -> Vec<Arc<Region>> {
        self.regions.iter().chain(self.fetch.seat().map(Seat::region)).cloned().collect()
    }

    /// Marks the replica as fetched by the caller, who created it.
    pub(super) fn mark_busy(&self) -> Busy<'_> {
        self.busy.store(true, Ordering::Release);
        Busy(&self.busy)
    }

    /// Marks the replica as fetched or retired by the caller; `None` if another call does so.
    pub(super) fn try_busy(&self) -> Option<Busy<'_>> {
        (!self.busy.swap(true, Ordering::AcqRel)).then(|| Busy(&self.busy))
    }

    /// Serializes announcements.
    pub(super) fn announcing(&self) -> MutexGuard<'_, ()> {
        self.announcing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends announcements; waits for one in progress.
    pub(super) fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        drop(self.announcing());
    }

    /// Returns true if the replica is not announced any more.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }
}
