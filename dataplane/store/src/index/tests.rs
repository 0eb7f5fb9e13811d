//! Tests of the index against a map, with adversarial digests.

use std::collections::BTreeMap;

use kvplane_proto::rng::Rng;
use proptest::prelude::*;

use super::*;
use crate::entry::Reserve;

/// Inserts or removes each digest in turn and compares with a map after each step.
fn agree(limit: u32, digests: &[Digest]) {
    let block = Allocator::new(256, 1).allocate(1).unwrap();
    let mut entries = Entries::new(limit);
    let mut index = Index::new(limit, 5);
    let mut model = BTreeMap::new();
    for &digest in digests {
        if let Some(id) = model.remove(&digest) {
            assert!(index.remove(digest, id));
            assert!(!index.remove(digest, id), "it is gone");
            entries.release(id);
        } else if model.len() < limit as usize {
            let id = entries.reserve(&Reserve::plain(digest, 1), block);
            index.insert(digest, id);
            model.insert(digest, id);
        }
        for digest in digests {
            assert_eq!(index.find(&entries, *digest), model.get(digest).copied());
        }
        for digests in digests.chunks(TOGETHER) {
            let mut found = vec![Some(EntryId(99)); digests.len()];
            index.find_together(&entries, digests, &mut found);
            let expected: Vec<_> = digests.iter().map(|digest| model.get(digest).copied()).collect();
            assert_eq!(found, expected);
        }
        assert_eq!(index.len() as usize, model.len());
        index.check(&entries);
    }
}

proptest! {
    #[test]
    fn agrees_with_a_map(limit in 1..24u32, picks in prop::collection::vec((0..3u8, 0..24u128), 1..150)) {
        let digests: Vec<_> = picks
            .iter()
            .map(|&(shape, n)| match shape {
                0 => Digest(n << 64 | 7), // equal low words
                1 => Digest(7 << 64 | n), // equal high words
                _ => Digest(n << 114 | n), // one per slot of the key space
            })
            .collect();
        agree(limit, &digests);
    }
}

#[test]
fn digests_with_equal_fingerprints_are_distinguished() {
    let index = Index::new(64, 5);
    let mut rng = Rng::new(1, "digests");
    let mut by_fingerprint = BTreeMap::new();
    let mut twins = Vec::new();
    // About ten pairs among 300,000 numbers of 32 bits.
    for _ in 0..300_000 {
        let digest = Digest(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64()));
        if let Some(other) = by_fingerprint.insert(index.fingerprint(digest), digest) {
            twins.extend([digest, other]);
        }
    }
    assert!(twins.len() >= 4, "{} twins", twins.len());
    let again: Vec<_> = twins.iter().chain(&twins).chain(twins.iter().rev()).copied().collect();
    agree(64, &again);
}

#[test]
fn a_full_table_of_digests_with_equal_words_keeps_its_probes_short() {
    for shape in [|n: u128| n << 64, |n: u128| n, |n: u128| n << 100 | n] {
        let block = Allocator::new(256, 1).allocate(1).unwrap();
        let mut entries = Entries::new(10_000);
        let mut index = Index::new(10_000, 5);
        for n in 0..10_000 {
            let id = entries.reserve(&Reserve::plain(Digest(shape(n)), 1), block);
            index.insert(Digest(shape(n)), id);
        }
        let used = index.slots.iter().enumerate().filter(|(_, slot)| slot.entry != NONE);
        let longest = used.map(|(at, slot)| index.distance(slot.fingerprint, at)).max();
        assert!(longest < Some(40), "longest probe {longest:?}");
        index.check(&entries);
    }
}
