//! Shadow of a store: its expected contents, by value, checked after every operation.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, ReservationId, Version};
use kvplane_proto::message::ObjectPriority;
use kvplane_store::allocator::granules_of;
use kvplane_store::entry::Entry;
use kvplane_store::eviction::EvictionPolicy;
use kvplane_store::{
    CommitError, Copies, Extent, GetError, ObjectView, Replica, Reserve, ReserveError, Store, StoreStats,
};

use crate::support::objects::digest;

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Get {
        key: u8,
    },
    Unpin(usize),
    Reserve {
        key: u8,
        bytes: u64,
        tail_bytes: u32,
        replace: bool,
    },
    Commit(usize),
    Expire(usize),
    Abort(usize),
    Remove {
        key: u8,
    },
    RemoveAll,
    /// Repeats the last release of a pin and of a reservation.
    Stale,
}

/// A committed object, visible or removed.
#[derive(Clone, Debug)]
struct Object {
    view: ObjectView,
    tail_bytes: u32,
    pins: u32,
}

struct Put {
    id: ReservationId,
    digest: Digest,
    extent: Extent,
    tail_bytes: u32,
    replace: bool,
    expired: bool,
}

pub(crate) struct Shadow<P> {
    store: Store<P>,
    live: BTreeMap<Digest, Object>,
    doomed: BTreeMap<Version, Object>,
    pins: Vec<(PinId, Digest, Version)>,
    puts: Vec<Put>,
    last_version: Version,
    stale_pin: Option<PinId>,
    stale_put: Option<ReservationId>,
}

impl<P: EvictionPolicy> Shadow<P> {
    pub(crate) fn new(store: Store<P>) -> Self {
        Self {
            store,
            live: BTreeMap::new(),
            doomed: BTreeMap::new(),
            pins: Vec::new(),
            puts: Vec::new(),
            last_version: Version(99),
            stale_pin: None,
            stale_put: None,
        }
    }

    /// Applies `op` to the store and the shadow, and returns the result as text.
    pub(crate) fn apply(&mut self, op: &Op) -> String {
        let answer = match *op {
            Op::Get { key } => self.get(digest(key)),
            Op::Unpin(pick) => self.unpin(pick),
            Op::Reserve { key, bytes, tail_bytes, replace } => {
                let wanted =
                    Reserve { tail_bytes, replace, has_tail: tail_bytes > 0, ..Reserve::plain(digest(key), bytes) };
                self.reserve(&wanted)
            }
            Op::Commit(pick) => self.commit(pick),
            Op::Expire(pick) => self.expire(pick),
            Op::Abort(pick) => self.abort(pick),
            Op::Remove { key } => self.remove(digest(key)),
            Op::RemoveAll => {
                let all: Vec<_> = self.live.keys().copied().collect();
                assert_eq!(self.store.remove_all(), all.len() as u64);
                all.into_iter().for_each(|digest| self.forget(digest));
                String::new()
            }
            Op::Stale => self.stale(),
        };
        self.compare();
        format!("{op:?}: {answer}, {:?}", self.store.stats())
    }

    fn get(&mut self, digest: Digest) -> String {
        let limit = self.store.config().max_pins;
        let full = self.pins.len() == limit as usize;
        let got = self.store.get(digest);
        match (&got, self.live.get_mut(&digest)) {
            (Err(GetError::NotFound), None) => {}
            (Err(GetError::TooManyPins { limit: said }), Some(_)) => assert!(full && *said == limit),
            (Ok((pin, view)), Some(object)) => {
                assert_eq!(*view, object.view, "a get returns the last committed object");
                object.pins += 1;
                self.pins.push((*pin, digest, view.version));
            }
            (got, object) => panic!("{got:?} for {object:?}"),
        }
        format!("{got:?}")
    }

    fn unpin(&mut self, pick: usize) -> String {
        if self.pins.is_empty() {
            return String::new();
        }
        let (pin, digest, version) = self.pins.remove(pick % self.pins.len());
        self.store.unpin(pin).expect("the pin is held");
        self.stale_pin = Some(pin);
        if let Some(object) = self.doomed.get_mut(&version) {
            object.pins -= 1;
            if object.pins == 0 {
                self.doomed.remove(&version);
            }
        } else {
            let object = self.live.get_mut(&digest).expect("a pinned object is live or doomed");
            assert_eq!(object.view.version, version);
            object.pins -= 1;
        }
        format!("{pin:?}")
    }

    fn reserve(&mut self, wanted: &Reserve) -> String {
        let Reserve { digest, bytes, tail_bytes, replace, .. } = *wanted;
        let before = self.store.stats();
        let gap_before = self.longest_gap(|_| true);
        let gap_without_unused = self.longest_gap(|object| object.pins > 0);
        let answer = self.store.reserve_for(wanted);
        self.drop_evicted(before);
        let config = self.store.config().clone();
        let needed = granules_of(bytes + u64::from(tail_bytes));
        let in_use = self.in_use();
        let evicted = self.store.stats().evictions - before.evictions;
        match answer {
            Ok((id, extent)) => {
                assert_eq!(extent.bytes, bytes);
                assert!(replace || !self.live.contains_key(&digest));
                let room = before.objects as usize + self.doomed.len() + self.puts.len();
                if gap_before >= needed && room < config.max_objects as usize {
                    assert_eq!(evicted, 0, "evicted although {gap_before} granules were free");
                }
                self.puts.push(Put { id, digest, extent, tail_bytes, replace, expired: false });
            }
            Err(ReserveError::Exists) => assert!(!replace && self.live.contains_key(&digest)),
            Err(ReserveError::TooLarge { limit_bytes, .. }) => assert!(bytes > limit_bytes),
            Err(ReserveError::TooManyReservations { limit }) => {
                assert_eq!(self.puts.len(), limit as usize);
            }
            Err(ReserveError::TooManyObjects { limit }) => assert_eq!(in_use, limit as usize),
            Err(ReserveError::NoSpace { free_bytes, pinned_bytes, reserved_bytes, .. }) => {
                assert!(gap_without_unused < needed, "{gap_without_unused} granules could be had");
                if before.pool_bytes - pinned_bytes - reserved_bytes < needed * 256 {
                    assert_eq!(evicted, 0, "evicted in vain");
                }
                assert!(free_bytes + pinned_bytes + reserved_bytes <= before.pool_bytes);
            }
            Err(ReserveError::Empty | ReserveError::Quota { .. } | ReserveError::PinLimit { .. }) => {
                panic!("an object of {bytes} bytes without pin or lease: {answer:?}")
            }
        }
        format!("{answer:?}, evicted {evicted}")
    }

    fn commit(&mut self, pick: usize) -> String {
        if self.puts.is_empty() {
            return String::new();
        }
        let pick = pick % self.puts.len();
        let Put { id, digest, extent, tail_bytes, replace, expired } = self.puts[pick];
        assert_eq!(self.store.reserved(id).is_some_and(Entry::replaces), replace);
        let checksum = u64::from(id.generation) << 40 | extent.offset;
        let answer = self.store.commit(id, checksum);
        match answer {
            Err(CommitError::Expired) => assert!(expired),
            Err(CommitError::Exists) => assert!(!expired && !replace && self.live.contains_key(&digest)),
            Err(CommitError::Stale) => panic!("{id:?} is held"),
            Ok(version) => {
                assert!(!expired && version > self.last_version, "versions grow");
                self.last_version = version;
                let tail_at = extent.offset + extent.bytes;
                let view = ObjectView {
                    extent,
                    version,
                    checksum,
                    tenant: 0,
                    has_tail: tail_bytes > 0,
                    tail_at,
                    is_on_device: false,
                    is_far: false,
                    is_head: false,
                    replica: Replica::None,
                    copies: Copies::ONE,
                    is_retained: false,
                    priority: ObjectPriority::NORMAL,
                };
                assert!(replace || !self.live.contains_key(&digest), "the first commit wins");
                self.forget(digest);
                self.live.insert(digest, Object { view, tail_bytes, pins: 0 });
            }
        }
        if !expired {
            self.puts.remove(pick);
            self.stale_put = Some(id);
        }
        format!("{answer:?}")
    }

    fn expire(&mut self, pick: usize) -> String {
        if self.puts.is_empty() {
            return String::new();
        }
        let pick = pick % self.puts.len();
        self.puts[pick].expired = true;
        self.store.expire(self.puts[pick].id);
        String::new()
    }

    fn abort(&mut self, pick: usize) -> String {
        if self.puts.is_empty() {
            return String::new();
        }
        let put = self.puts.remove(pick % self.puts.len());
        self.store.abort(put.id).expect("the reservation is held");
        self.stale_put = Some(put.id);
        String::new()
    }

    fn remove(&mut self, digest: Digest) -> String {
        let removed = self.store.remove(digest);
        assert_eq!(removed, self.live.contains_key(&digest));
        self.forget(digest);
        format!("{removed}")
    }

    fn stale(&mut self) -> String {
        if let Some(pin) = self.stale_pin {
            assert!(self.store.unpin(pin).is_err());
        }
        if let Some(id) = self.stale_put {
            assert!(self.store.abort(id).is_err());
            assert_eq!(self.store.commit(id, 0), Err(CommitError::Stale));
            self.store.expire(id);
        }
        self.store.unpin(PinId { index: u32::MAX, generation: 0 }).unwrap_err();
        String::new()
    }

    /// Hides an object; its bytes stay in use while it is pinned.
    fn forget(&mut self, digest: Digest) {
        if let Some(object) = self.live.remove(&digest)
            && object.pins > 0
        {
            self.doomed.insert(object.view.version, object);
        }
    }

    /// Records which objects the last reserve evicted.
    fn drop_evicted(&mut self, before: StoreStats) {
        let store = &self.store;
        let gone = self.live.extract_if(.., |digest, _| !store.exists(*digest));
        let (mut count, mut bytes) = (0, 0);
        for (digest, object) in gone {
            assert_eq!(object.pins, 0, "{digest} was evicted while pinned");
            count += 1;
            bytes += object.view.extent.bytes;
        }
        let stats = self.store.stats();
        assert_eq!(stats.evictions - before.evictions, count);
        assert_eq!(stats.evicted_bytes - before.evicted_bytes, bytes);
    }

    /// Returns the number of objects that cannot be evicted.
    fn in_use(&self) -> usize {
        let pinned = self.live.values().filter(|object| object.pins > 0).count();
        pinned + self.doomed.len() + self.puts.len()
    }

    /// Returns the extents in use: puts, removed objects, and live objects for which `stays` returns true.
    fn lent(&self, stays: impl Fn(&Object) -> bool) -> Vec<(u64, u64)> {
        let of = |object: &Object| (object.view.extent, object.tail_bytes);
        let live = self.live.values().filter(|object| stays(object)).map(of);
        let doomed = self.doomed.values().map(of);
        let puts = self.puts.iter().map(|put| (put.extent, put.tail_bytes));
        let granules =
            |(extent, tail): (Extent, u32)| (extent.offset / 256, granules_of(extent.bytes + u64::from(tail)));
        let mut lent: Vec<_> = live.chain(doomed).chain(puts).map(granules).collect();
        lent.sort_unstable();
        lent
    }

    /// Returns the longest free stretch in granules, if only the extents in use were left.
    fn longest_gap(&self, stays: impl Fn(&Object) -> bool) -> u64 {
        let pool = self.store.config().pool_bytes / 256;
        let (mut at, mut longest) = (0, 0);
        for (start, granules) in self.lent(stays).into_iter().chain([(pool, 0)]) {
            assert!(start >= at, "extents overlap at granule {start}");
            longest = longest.max(start - at);
            at = start + granules;
        }
        assert!(at <= pool, "an extent ends beyond the pool");
        longest
    }

    /// Checks the store's own invariants, and compares all that can be read without changing it.
    fn compare(&self) {
        self.store.check();
        self.longest_gap(|_| true);
        for key in 0..20 {
            let object = self.live.get(&digest(key));
            assert_eq!(self.store.exists(digest(key)), object.is_some());
            assert_eq!(
                self.store.objects().get(digest(key)).map(Entry::bytes),
                object.map(|object| object.view.extent.bytes)
            );
        }
        let stats = self.store.stats();
        let used: u64 = self.lent(|_| true).iter().map(|extent| extent.1 * 256).sum();
        assert_eq!((stats.used_bytes, stats.free_bytes), (used, stats.pool_bytes - used));
        assert_eq!(stats.objects, self.live.len() as u64);
        assert_eq!(stats.pins, self.pins.len() as u64);
        assert_eq!(stats.reservations, self.puts.len() as u64);
        let quarantined = self.puts.iter().filter(|put| put.expired);
        let space = |put: &Put| granules_of(put.extent.bytes + u64::from(put.tail_bytes)) * 256;
        let quarantined: u64 = quarantined.map(space).sum();
        assert_eq!(stats.quarantined_bytes, quarantined);
    }
}
