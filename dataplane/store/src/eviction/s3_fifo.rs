//! S3-FIFO by bytes: three queues that nobody reorders, and two bits of frequency for each object.
//!
//! After Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023). New objects
//! enter the *small* queue, a tenth of the pool. At its old end those that were asked for more than once go to the
//! *main* queue, the others are evicted and remembered as *ghosts*: who comes back soon enough enters the main queue at
//! once. At the old end of the main queue those that were asked for since go round again, with one less to their
//! credit. Victims are taken from the small queue while that fills its share, else from the main queue. A tenth of the
//! pool would be all that a tenant with a small quota has: nothing would ever leave its main queue.
//!
//! Each turn of the main queue is paid for by an access, and each object leaves the small queue once. Pinned objects
//! are passed over as `segment` says. The entry's stamp has the order above two bits of frequency.

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::mix64;

use super::EvictionPolicy;
use super::segment::Segment;
use crate::entry::{Entries, EntryId, Place};

/// The small queue's share of what the policy holds, as a divisor.
const SMALL_DIVISOR: u64 = 10;
/// Bits of the stamp that count accesses.
const FREQUENCY_BITS: u32 = 2;
const FREQUENCY_MOST: u64 = (1 << FREQUENCY_BITS) - 1;
/// Accesses that take an object from the small queue to the main one.
const FREQUENCY_TO_MAIN: u64 = 2;

/// The policy.
#[derive(Debug)]
pub struct S3Fifo {
    small: Segment,
    main: Segment,
    ghosts: Ghosts,
    clock: u64,
}

/// What an end of a queue gave.
enum Step {
    /// An object moved on.
    Moved,
    /// This one should go.
    Victim(EntryId),
    /// Nobody is there without pins.
    Nobody,
}

impl S3Fifo {
    /// A policy for up to `max_objects`. Takes 8 bytes of memory for each of those, for the ghosts.
    #[must_use]
    pub fn new(max_objects: u32) -> Self {
        Self {
            small: Segment::new(Place::Probation, Place::ProbationParked),
            main: Segment::new(Place::Protected, Place::ProtectedParked),
            ghosts: Ghosts::new(max_objects),
            clock: 0,
        }
    }

    fn segment(&mut self, entries: &Entries, id: EntryId) -> &mut Segment {
        match entries[id].place {
            Place::Probation | Place::ProbationParked => &mut self.small,
            Place::Protected | Place::ProtectedParked => &mut self.main,
            _ => panic!("{id:?} is not in this eviction order"),
        }
    }

    /// To the recent end of the main queue, from nowhere.
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
    /// With a sixteenth of the ghosts: there may be many tenants.
    fn anew(&self) -> Self {
        Self {
            small: Segment::new(Place::Probation, Place::ProbationParked),
            main: Segment::new(Place::Protected, Place::ProtectedParked),
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
        if matches!(entries[id].place, Place::Probation | Place::ProbationParked) {
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

    fn check(&self, entries: &Entries) -> usize {
        self.small.check(entries, false) + self.main.check(entries, false)
    }
}

/// Ghosts with the same place in the table.
const WAYS: usize = 4;

/// The fewest places of the table.
const LEAST_BUCKETS: usize = 256;

#[derive(Clone, Copy, Debug, Default)]
struct Ghost {
    fingerprint: u32,
    /// The count of remembered ones when it was, from 1; 0: nobody.
    born: u32,
}

/// Who was evicted from the small queue lately: fingerprints in buckets, the oldest of a bucket makes room. A ghost
/// fades when as many have been remembered since as the main queue has members.
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
        // After 2^32 evictions a long gone ghost may seem young once: a wrong guess, nothing worse.
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

    /// Whether the ghost was there and has not faded; it is forgotten then.
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
