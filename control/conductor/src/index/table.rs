//! Hash table from a block's key to its place: 5 bytes per entry, in buckets of one cache line.
//!
//! A bucket has twelve entries: a byte of the key (tag) and a 32-bit place for each, and the number of entries that
//! overflowed to a later bucket. A search continues past a bucket only if that number is not zero, so an absent key
//! costs one cache line and a removal leaves no tombstone. The key itself is not stored; the caller verifies the place.
//!
//! All memory is reserved at the start, so there is never a pause for a rehash; pages that were never touched cost
//! nothing.

/// Words of a bucket: tags of 8 entries; tags of 4 and the overflow count; 12 places in 6 words.
const WORDS: usize = 8;
/// Entries of a bucket.
const ENTRIES: usize = 12;
const LOW_BITS: u64 = 0x0101_0101_0101_0101;
const HIGH_BITS: u64 = 0x8080_8080_8080_8080;
const LOW_HALF: u64 = 0xffff_ffff;

/// Hash table. Places are arbitrary 32-bit numbers.
pub(super) struct Table {
    words: Vec<u64>,
    /// Number of words before the first bucket, for alignment to cache lines.
    skip: usize,
    buckets: usize,
}

/// Bucket and index of an entry.
type Spot = (usize, usize);

impl Table {
    /// Creates a table for `most` entries, which fill at most 90 % of it.
    pub(super) fn new(most: usize) -> Self {
        let buckets = (most * 100 / 90).div_ceil(ENTRIES) + 2;
        let words = vec![0; (buckets + 1) * WORDS];
        let skip = words.as_ptr().align_offset(64).min(WORDS);
        Self { words, skip, buckets }
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }

    fn home(&self, key: u64) -> usize {
        ((u128::from(key) * self.buckets as u128) >> 64) as usize
    }

    fn bucket(&self, at: usize) -> &[u64; WORDS] {
        let from = self.skip + at * WORDS;
        self.words[from..from + WORDS].try_into().expect("the slice has the length of a bucket")
    }

    fn bucket_mut(&mut self, at: usize) -> &mut [u64; WORDS] {
        let from = self.skip + at * WORDS;
        (&mut self.words[from..from + WORDS]).try_into().expect("the slice has the length of a bucket")
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.buckets { 0 } else { at + 1 }
    }

    /// Prefetches the entries of these keys into the cache. Dependent loads would be waited for one after the other;
    /// independent loads are in flight together.
    pub(super) fn look_ahead(&self, keys: &[u64]) {
        let word = |key: &u64| self.words[self.skip + self.home(*key) * WORDS];
        std::hint::black_box(keys.iter().map(word).fold(0, |all, word| all ^ word));
    }

    /// Returns the place of `key` that `verify` confirms.
    pub(super) fn find(&self, key: u64, verify: impl FnMut(u32) -> bool) -> Option<u32> {
        self.spot(key, verify).map(|(bucket, entry)| place(self.bucket(bucket), entry))
    }

    fn spot(&self, key: u64, mut verify: impl FnMut(u32) -> bool) -> Option<Spot> {
        let tag = tag(key);
        let mut at = self.home(key);
        for _ in 0..self.buckets {
            let bucket = self.bucket(at);
            for (word, first, mask) in [(bucket[0], 0, u64::MAX), (bucket[1], 8, LOW_HALF)] {
                let mut candidates = same_bytes(word, tag) & mask;
                while candidates != 0 {
                    let shift = candidates.trailing_zeros() / 8 * 8;
                    let entry = first + shift as usize / 8;
                    // The place of a removed entry is still in memory, and `verify` might confirm it.
                    if (word >> shift) as u8 == tag && verify(place(bucket, entry)) {
                        return Some((at, entry));
                    }
                    candidates &= candidates - 1;
                }
            }
            if bucket[1] >> 32 == 0 {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    /// Inserts `key`, which must be absent, with the place `new`. The table must have fewer entries than its capacity.
    pub(super) fn insert(&mut self, key: u64, new: u32) {
        let mut at = self.home(key);
        for _ in 0..self.buckets {
            let bucket = self.bucket_mut(at);
            let free = same_bytes(bucket[0], 0).trailing_zeros() as usize / 8;
            let free =
                if free < 8 { free } else { 8 + (same_bytes(bucket[1], 0) & LOW_HALF).trailing_zeros() as usize / 8 };
            if free < ENTRIES {
                set_tag(bucket, free, tag(key));
                set_place(bucket, free, new);
                return;
            }
            bucket[1] += 1 << 32;
            at = self.next(at);
        }
        panic!("the index inserts no more entries than its table's capacity");
    }

    /// Removes the entry of `key` whose place is `old`.
    pub(super) fn remove(&mut self, key: u64, old: u32) {
        let (found, entry) = self.spot(key, |place| place == old).expect("every block of a run has an entry");
        set_tag(self.bucket_mut(found), entry, 0);
        let mut at = self.home(key);
        while at != found {
            self.bucket_mut(at)[1] -= 1 << 32;
            at = self.next(at);
        }
    }

    /// Changes the place of the entry of `key` from `old` to `new`.
    pub(super) fn replace(&mut self, key: u64, old: u32, new: u32) {
        let (found, entry) = self.spot(key, |place| place == old).expect("every block of a run has an entry");
        set_place(self.bucket_mut(found), entry, new);
    }
}

/// Returns the byte of a key that its entry stores; 0 marks a free entry.
fn tag(key: u64) -> u8 {
    (key as u8).max(1)
}

/// Returns the high bit of each byte of `word` that equals `byte`. A byte above a matching one may be a false positive;
/// there are no false negatives.
fn same_bytes(word: u64, byte: u8) -> u64 {
    let differing = word ^ (u64::from(byte) * LOW_BITS);
    differing.wrapping_sub(LOW_BITS) & !differing & HIGH_BITS
}

fn place(bucket: &[u64; WORDS], entry: usize) -> u32 {
    (bucket[2 + entry / 2] >> (entry % 2 * 32)) as u32
}

fn set_place(bucket: &mut [u64; WORDS], entry: usize, place: u32) {
    let shift = entry % 2 * 32;
    let word = &mut bucket[2 + entry / 2];
    *word = *word & !(LOW_HALF << shift) | u64::from(place) << shift;
}

fn set_tag(bucket: &mut [u64; WORDS], entry: usize, tag: u8) {
    let shift = entry % 8 * 8;
    let word = &mut bucket[entry / 8];
    *word = *word & !(0xff << shift) | u64::from(tag) << shift;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvplane_proto::rng::Rng;

    use super::*;

    #[test]
    fn removed_entries_are_not_found_by_their_place() {
        // An empty entry above one with the tag 1 looks as if it had that tag too.
        let mut table = Table::new(600);
        for (key, place) in [(1, 10), (0, 11), (257, 12)] {
            table.insert(key, place);
        }
        table.remove(0, 11);
        table.remove(257, 12);
        assert_eq!(table.find(0, |place| place == 11), None);
        assert_eq!(table.find(257, |place| place == 12), None);
        assert_eq!(table.find(1, |place| place == 10), Some(10));
    }

    #[test]
    fn table_matches_a_map_at_any_load() {
        let mut rng = Rng::new(7, "table");
        let mut table = Table::new(600);
        let mut map: BTreeMap<u64, u32> = BTreeMap::new();
        for step in 0..60_000_u32 {
            // Few different homes and tags, so that buckets overflow and tags collide.
            let key = rng.below(40) << 58 | rng.below(30);
            match map.get(&key).copied() {
                Some(old) if rng.chance(0.5) => {
                    table.remove(key, old);
                    map.remove(&key);
                }
                Some(old) => {
                    table.replace(key, old, step);
                    map.insert(key, step);
                }
                None if map.len() < 600 => {
                    table.insert(key, step);
                    map.insert(key, step);
                }
                None => {}
            }
            let expected = map.get(&key).copied();
            assert_eq!(table.find(key, |place| Some(place) == expected), expected);
            let absent = key ^ 1 << 20;
            assert_eq!(table.find(absent, |place| map.get(&absent) == Some(&place)), None);
        }
    }
}
