//! One object in this process's memory, wholly or in part.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvplane_cluster::p2p::{Follow, HALVES, Interval, ObjectSpec, ShardPlace, ShardSet};
use kvplane_engine::Region;
use kvplane_proto::digest::ContentHash;
use kvplane_rpc::p2p::{FetchFailure, FetchOrder, RankParent};
use kvplane_transfer::Batch;

use super::ranks::Seat;

/// Threads that hash what is registered, at most.
const HASHERS: usize = 8;

/// A shard that is being fetched.
#[derive(Default)]
pub(super) struct Active {
    /// Pieces that are on their way, in the order in which they were asked for.
    pub(super) batches: VecDeque<Arc<Batch>>,
    /// From where it is to be fetched instead.
    pub(super) next: Option<FetchOrder>,
}

/// What is there, and what is on its way.
pub(super) struct Fetch {
    pub(super) have: ShardSet,
    pub(super) want: ShardSet,
    pub(super) orders: VecDeque<FetchOrder>,
    pub(super) active: BTreeMap<u32, Active>,
    /// What is not reported yet.
    pub(super) got: Vec<u32>,
    pub(super) failed: Vec<FetchFailure>,
    /// Bytes that were fetched.
    pub(super) fetched_bytes: u64,
    /// What a rank does, and whom it fetches from, where they are known.
    pub(super) follow: Option<Follow>,
    pub(super) parents: [Option<RankParent>; HALVES],
    /// What was not to be had from those, and is not told yet.
    pub(super) unfollowed: Vec<FetchFailure>,
    /// The last trouble, for people.
    pub(super) trouble: Option<String>,
    pub(super) stop: bool,
}

/// A replica.
pub(super) struct Replica {
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) spec: Arc<ObjectSpec>,
    pub(super) digest: u128,
    pub(super) regions: Vec<Arc<Region>>,
    pub(super) origin: bool,
    pub(super) fetch: Mutex<Fetch>,
    /// There is something to fetch, or nothing any more.
    pub(super) ordered: Condvar,
    /// There is something to report.
    pub(super) news: Condvar,
    /// Something happened that those wait for who follow parents.
    pub(super) followed: Condvar,
    /// Which rank this is, if it is fetched by a schedule.
    pub(super) seat: Option<Seat>,
    /// Its number in the catalog; another one each time it is announced.
    member: AtomicU64,
    /// One thread at a time announces it again.
    pub(super) again: Mutex<()>,
    /// Somebody waits for it to be fetched, or gives it up.
    pub(super) fetched: AtomicBool,
    /// It is announced no more.
    pub(super) leaving: AtomicBool,
}

impl Replica {
    /// An object that was brought here.
    pub(super) fn whole(name: &str, version: u64, spec: Arc<ObjectSpec>, regions: &[Arc<Region>]) -> Self {
        let shards = spec.layout.shards();
        Self::new(name, version, spec, regions, ShardSet::full(shards), ShardSet::empty(shards), true)
    }

    /// One that is to be fetched.
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
        // Each change is whole.
        self.fetch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All memory that peers read.
    pub(super) fn memory(&self) -> Vec<Arc<Region>> {
        self.regions.iter().chain(self.seat.as_ref().map(|seat| &seat.region)).cloned().collect()
    }

    /// What is there, and what is to be ordered: of a rank, what it does not get by its schedule.
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

    /// Takes an order. One for what is being fetched ends that, and follows.
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
    // Within a region, whose size is a usize.
    regions[buffer].read_with(first as usize, bytes as usize, &mut |_, part| hash.update(part));
}

fn hash(regions: &[Arc<Region>], place: ShardPlace) -> u128 {
    let mut hash = ContentHash::default();
    hash_range(regions, place.buffer, place.offset, place.bytes, &mut hash);
    hash.finish()
}

/// The hashes of all shards, by several threads.
pub(super) fn hashes(layout: &kvplane_cluster::p2p::Layout, regions: &[Arc<Region>]) -> Vec<u128> {
    const CHUNK: usize = 16;
    let mut hashes = vec![0; layout.shards() as usize];
    let next = AtomicUsize::new(0);
    let chunks: Vec<Mutex<&mut [u128]>> = hashes.chunks_mut(CHUNK).map(Mutex::new).collect();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(at) else { return };
            // Nobody else has it.
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
            // Without a thread for it, fewer hash at a time.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    drop(chunks);
    hashes
}

/// An object as it travels.
pub(super) fn told(spec: &ObjectSpec) -> kvplane_rpc::p2p::ObjectSpec {
    kvplane_rpc::p2p::ObjectSpec {
        sizes: spec.layout.sizes().to_vec(),
        shard_bytes: spec.layout.shard_bytes(),
        hashes: spec.hashes.clone(),
        about: spec.about.clone(),
    }
}
