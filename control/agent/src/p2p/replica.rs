//! Replica: one object in this process's memory, complete or partial.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvplane_cluster::p2p::{Follow, HALVES, Interval, ObjectSpec, ShardPlace, ShardSet};
use kvplane_engine::Region;
use kvplane_proto::digest::ContentHash;
use kvplane_rpc::p2p::{FetchFailure, FetchOrder, RankParent};
use kvplane_transfer::Batch;

use super::ranks::Seat;

/// Limit of threads that hash registered memory.
const HASHERS: usize = 8;

/// Shard that is being fetched.
#[derive(Default)]
pub(super) struct Active {
    /// Pieces in flight, in the order in which they were submitted.
    pub(super) batches: VecDeque<Arc<Batch>>,
    /// Order for another peer, which replaces the present one.
    pub(super) next: Option<FetchOrder>,
}

/// Fetch state: shards that are present, missing and in flight.
pub(super) struct Fetch {
    pub(super) have: ShardSet,
    pub(super) want: ShardSet,
    pub(super) orders: VecDeque<FetchOrder>,
    pub(super) active: BTreeMap<u32, Active>,
    /// Arrived shards that are not reported yet.
    pub(super) got: Vec<u32>,
    pub(super) failed: Vec<FetchFailure>,
    /// Number of bytes that were fetched.
    pub(super) fetched_bytes: u64,
    /// Schedule of a rank, and its parents where they are known.
    pub(super) follow: Option<Follow>,
    pub(super) parents: [Option<RankParent>; HALVES],
    /// Failures of fetches from parents that are not reported yet.
    pub(super) unfollowed: Vec<FetchFailure>,
    /// Last error, for error messages.
    pub(super) trouble: Option<String>,
    pub(super) stop: bool,
}

/// Replica of an object.
pub(super) struct Replica {
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) spec: Arc<ObjectSpec>,
    pub(super) digest: u128,
    pub(super) regions: Vec<Arc<Region>>,
    pub(super) origin: bool,
    pub(super) fetch: Mutex<Fetch>,
    /// Signaled when there are orders, or the fetch stops.
    pub(super) ordered: Condvar,
    /// Signaled when there are outcomes to report.
    pub(super) news: Condvar,
    /// Signaled on events that the threads wait for which follow parents.
    pub(super) followed: Condvar,
    /// Board of this rank, if the replica is fetched by a schedule.
    pub(super) seat: Option<Seat>,
    /// Member number in the catalog; a new one after each announcement.
    member: AtomicU64,
    /// Serializes announcements.
    pub(super) again: Mutex<()>,
    /// Set while a call fetches or retires the replica.
    pub(super) fetched: AtomicBool,
    /// Set when the replica is not announced any more.
    pub(super) leaving: AtomicBool,
}

impl Replica {
    /// Creates the replica of an object that originates here.
    pub(super) fn whole(name: &str, version: u64, spec: Arc<ObjectSpec>, regions: &[Arc<Region>]) -> Self {
        let shards = spec.layout.shards();
        Self::new(name, version, spec, regions, ShardSet::full(shards), ShardSet::empty(shards), true)
    }

    /// Creates a replica that is to be fetched.
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
        let fetch = Fetch {
            have,
            want,
            orders: VecDeque::new(),
            active: BTreeMap::new(),
            got: Vec::new(),
            failed: Vec::new(),
            fetched_bytes: 0,
            follow: None,
            parents: [None, None],
            unfollowed: Vec::new(),
            trouble: None,
            stop: false,
        };
        Self {
            name: name.to_owned(),
            version,
            digest: spec.digest(),
            spec,
            regions: regions.to_vec(),
            origin,
            fetch: Mutex::new(fetch),
            ordered: Condvar::new(),
            news: Condvar::new(),
            followed: Condvar::new(),
            seat: None,
            member: AtomicU64::new(0),
            again: Mutex::new(()),
            fetched: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
        }
    }

    pub(super) fn member(&self) -> u64 {
        self.member.load(Ordering::Acquire)
    }

    pub(super) fn set_member(&self, member: u64) {
        self.member.store(member, Ordering::Release);
    }

    pub(super) fn fetch(&self) -> MutexGuard<'_, Fetch> {
        // Every change under the lock is complete.
        self.fetch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all memory that peers read.
    pub(super) fn memory(&self) -> Vec<Arc<Region>> {
        self.regions.iter().chain(self.seat.as_ref().map(|seat| &seat.region)).cloned().collect()
    }

    /// Returns the shards that are present, and those that the control plane is to order: for a rank, those that its
    /// schedule does not deliver.
    pub(super) fn announced(&self) -> (Vec<Interval>, Vec<Interval>) {
        let fetch = self.fetch();
        let want = match &fetch.follow {
            Some(follow) => {
                let mut want = ShardSet::empty(self.spec.layout.shards());
                for shard in follow.elsewhere().filter(|&shard| fetch.want.contains(shard)) {
                    want.insert(shard);
                }
                want.intervals()
            }
            None => fetch.want.intervals(),
        };
        (fetch.have.intervals(), want)
    }

    /// Accepts an order. An order for a shard in flight cancels the fetch and is carried out next.
    pub(super) fn order(&self, order: FetchOrder) {
        let mut fetch = self.fetch();
        match fetch.active.get_mut(&order.shard) {
            Some(active) => {
                active.batches.iter().for_each(|batch| batch.cancel());
                active.next = Some(order);
            }
            None => {
                fetch.orders.push_back(order);
                self.ordered.notify_one();
            }
        }
    }
}

/// Adds bytes of a buffer to a hash.
pub(super) fn hash_range(regions: &[Arc<Region>], buffer: usize, first: u64, bytes: u64, hash: &mut ContentHash) {
    // The range is within a region, whose size is a usize.
    regions[buffer].read_with(first as usize, bytes as usize, &mut |_, part| hash.update(part));
}

fn hash(regions: &[Arc<Region>], place: ShardPlace) -> u128 {
    let mut hash = ContentHash::default();
    hash_range(regions, place.buffer, place.offset, place.bytes, &mut hash);
    hash.finish()
}

/// Returns the hashes of all shards, computed by several threads.
pub(super) fn hashes(layout: &kvplane_cluster::p2p::Layout, regions: &[Arc<Region>]) -> Vec<u128> {
    const CHUNK: usize = 16;
    let mut hashes = vec![0; layout.shards() as usize];
    let next = AtomicUsize::new(0);
    let chunks: Vec<Mutex<&mut [u128]>> = hashes.chunks_mut(CHUNK).map(Mutex::new).collect();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(at) else { return };
            // The counter gives each chunk to one thread.
            let mut chunk = chunk.lock().unwrap_or_else(PoisonError::into_inner);
            for (shard, found) in (at * CHUNK..).zip(chunk.iter_mut()) {
                if let Some(place) = layout.place(shard as u32) {
                    *found = hash(regions, place);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(HASHERS).min(chunks.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without the thread, fewer threads hash.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    drop(chunks);
    hashes
}

/// Converts an object's description to its wire form.
pub(super) fn told(spec: &ObjectSpec) -> kvplane_rpc::p2p::ObjectSpec {
    kvplane_rpc::p2p::ObjectSpec {
        sizes: spec.layout.sizes().to_vec(),
        shard_bytes: spec.layout.shard_bytes(),
        hashes: spec.hashes.clone(),
        about: spec.about.clone(),
    }
}
