//! S3-FIFO by bytes: three queues that are never reordered, and two bits of frequency for each object.
//!
//! After Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023). New objects
//! enter the *small* queue, a tenth of what the policy holds. At its old end, objects that were accessed more than once
//! move to the *main* queue, the others are evicted and remembered as *ghosts*: an object that comes back soon enough
//! enters the main queue at once. At the old end of the main queue, objects that were accessed since go round again,
//! with their frequency reduced by one. Victims are taken from the small queue while that fills its share, else from
//! the main queue. The share is not a tenth of the pool, which could be all that a tenant with a small quota has: no
//! object would ever leave its main queue.
//!
//! Each turn of the main queue is paid for by an access, and each object leaves the small queue once. Pinned objects
//! are skipped as in `segment`. The entry's stamp holds the order above two bits of frequency.

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::mix64;

use super::EvictionPolicy;
use super::segment::Segment;
use crate::entry::{Entries, Entry, EntryId, EvictionList};

/// Share of the small queue in what the policy holds, as a divisor.
const SMALL_DIVISOR: u64 = 10;
/// Bits of the stamp that count accesses.
const FREQUENCY_BITS: u32 = 2;
const FREQUENCY_MOST: u64 = (1 << FREQUENCY_BITS) - 1;
/// Accesses that move an object from the small queue to the main one.
const FREQUENCY_TO_MAIN: u64 = 2;

/// State of the policy.
#[derive(Debug)]
pub struct S3Fifo {
    small: Segment,
    main: Segment,
    ghosts: Ghosts,
    clock: u64,
}

/// Result of a step at the end of a queue.
enum Step {
    /// An object moved to another position.
    Moved,
    /// This object is to be evicted.
    Victim(EntryId),
    /// No object is unpinned.
    Nobody,
}

impl S3Fifo {
    /// Creates a policy for up to `max_objects`. Takes 8 bytes of memory for each of those, for the ghosts.
    #[must_use]
    pub fn new(max_objects: u32) -> Self {
        Self {
            small: Segment::new(EvictionList::Probation, EvictionList::ProbationParked),
            main: Segment::new(EvictionList::Protected, EvictionList::ProtectedParked),
            ghosts: Ghosts::new(max_objects),
            clock: 0,
        }
    }

    fn segment(&mut self, entries: &Entries, id: EntryId) -> &mut Segment {
        match entries[id].place() {
            EvictionList::Probation | EvictionList::ProbationParked => &mut self.small,
            EvictionList::Protected | EvictionList::ProtectedParked => &mut self.main,
            _ => panic!("{id:?} is not in this eviction order"),
        }
    }

    /// Appends an unlinked entry at the recent end of the main queue.
    fn push_main(&mut self, entries: &mut Entries, id: EntryId, frequency: u64) {
        self.clock += 1;
        entries[id].stamp = self.clock << FREQUENCY_BITS | frequency;
        self.main.push(entries, id);
    }

    fn step_small(&mut self, entries: &mut Entries) -> Step {
        let Some(id) = self.small.oldest_unpinned(entries) else { return Step::Nobody };
        if entries[id].stamp & FREQUENCY_MOST < FREQUENCY_TO_MAIN {
            return Step::Victim(id);
        }
        self.small.unlink(entries, id);
        self.push_main(entries, id, 0);
        Step::Moved
    }

    fn step_main(&mut self, entries: &mut Entries) -> Step {
        let Some(id) = self.main.oldest_unpinned(entries) else { return Step::Nobody };
        let frequency = entries[id].stamp & FREQUENCY_MOST;
        if frequency == 0 {
            return Step::Victim(id);
        }
        self.main.unlink(entries, id);
        self.push_main(entries, id, frequency - 1);
        Step::Moved
    }
}

impl EvictionPolicy for S3Fifo {
    /// Uses a sixteenth of the ghosts: there may be many tenants.
    fn anew(&self) -> Self {
        Self {
            small: Segment::new(EvictionList::Probation, EvictionList::ProbationParked),
            main: Segment::new(EvictionList::Protected, EvictionList::ProtectedParked),
            ghosts: Ghosts::of((self.ghosts.buckets.len() / 16).max(LEAST_BUCKETS)),
            clock: 0,
        }
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        if self.ghosts.take(entries[id].digest(), self.main.members()) {
            self.push_main(entries, id, 0);
            return;
        }
        self.clock += 1;
        entries[id].stamp = self.clock << FREQUENCY_BITS;
        self.small.push(entries, id);
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        if entries[id].stamp & FREQUENCY_MOST < FREQUENCY_MOST {
            entries[id].stamp += 1;
        }
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        self.segment(entries, id).unlink(entries, id);
    }

    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        if matches!(entries[id].place(), EvictionList::Probation | EvictionList::ProbationParked) {
            self.ghosts.remember(entries[id].digest());
        }
        self.remove(entries, id);
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        self.segment(entries, id).unpark(entries, id);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let small_share = (self.small.granules() + self.main.granules()) / SMALL_DIVISOR;
        loop {
            let small_first = self.small.granules() >= small_share;
            let first = if small_first { self.step_small(entries) } else { self.step_main(entries) };
            let step = match first {
                Step::Nobody if small_first => self.step_main(entries),
                Step::Nobody => self.step_small(entries),
                step => step,
            };
            match step {
                Step::Moved => {}
                Step::Victim(id) => return Some(id),
                Step::Nobody => return None,
            }
        }
    }

    fn was_accessed(&self, entry: &Entry) -> bool {
        entry.is_protected() || entry.stamp & FREQUENCY_MOST > 0
    }

    fn check(&self, entries: &Entries) -> usize {
        self.small.check(entries, false) + self.main.check(entries, false)
    }
}

/// Ghosts in one bucket of the table.
const WAYS: usize = 4;

/// Fewest buckets of the table.
const LEAST_BUCKETS: usize = 256;

#[derive(Clone, Copy, Debug, Default)]
struct Ghost {
    fingerprint: u32,
    /// Clock when it was remembered, from 1; 0 for an empty place.
    born: u32,
}

/// Objects that were evicted from the small queue lately: fingerprints in buckets, in which the oldest is overwritten.
/// A ghost expires once as many have been remembered since as the main queue has members.
#[derive(Debug)]
struct Ghosts {
    buckets: Vec<[Ghost; WAYS]>,
    clock: u32,
}

impl Ghosts {
    fn new(max_objects: u32) -> Self {
        Self::of((max_objects as usize / WAYS).max(LEAST_BUCKETS))
    }

    fn of(buckets: usize) -> Self {
        Self { buckets: vec![[Ghost::default(); WAYS]; buckets], clock: 0 }
    }

    fn bucket(&mut self, digest: Digest) -> (&mut [Ghost; WAYS], u32) {
        let mixed = mix64(digest.low() ^ mix64((digest.0 >> 64) as u64));
        let at = ((mixed >> 32) * self.buckets.len() as u64) >> 32;
        (&mut self.buckets[at as usize], mixed as u32)
    }

    fn remember(&mut self, digest: Digest) {
        // After 2^32 evictions an expired ghost may seem young once: only a wrong guess.
        self.clock = self.clock.checked_add(1).unwrap_or(1);
        let clock = self.clock;
        let (bucket, fingerprint) = self.bucket(digest);
        let same = bucket.iter().position(|ghost| ghost.born != 0 && ghost.fingerprint == fingerprint);
        let oldest = || {
            (0..WAYS)
                .max_by_key(|way| if bucket[*way].born == 0 { u32::MAX } else { clock.wrapping_sub(bucket[*way].born) })
        };
        let way = same.or_else(oldest).unwrap_or(0);
        bucket[way] = Ghost { fingerprint, born: clock };
    }

    /// Removes a ghost; returns true if it existed and has not expired.
    fn take(&mut self, digest: Digest, lasts: u32) -> bool {
        let clock = self.clock;
        let (bucket, fingerprint) = self.bucket(digest);
        let found = bucket.iter_mut().find(|ghost| ghost.born != 0 && ghost.fingerprint == fingerprint);
        let Some(ghost) = found else { return false };
        let young = clock.wrapping_sub(ghost.born) < lasts;
        *ghost = Ghost::default();
        young
    }
}
