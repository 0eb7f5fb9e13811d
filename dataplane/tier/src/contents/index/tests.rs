//! Tests of the index against a map, and of walks through it.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn the_table_is_a_map(
        limit in 1..40u32,
        seed in any::<u64>(),
        cut in 0..1u64 << 32,
        ops in prop::collection::vec((0..4u8, 0..60u64), 0..300),
    ) {
        let mut index = Index::new(limit, seed);
        let mut twin = BTreeMap::new();
        for (n, (op, key)) in ops.into_iter().enumerate() {
            let digest = Digest(u128::from(key) << 64 | u128::from(key % 3));
            match op {
                0 | 1 => {
                    let fits = twin.len() < limit as usize || twin.contains_key(&digest);
                    let entry = Entry::new(Kind::Object, digest, Version(1), n as u64);
                    prop_assert_eq!(index.set(entry), fits);
                    if fits {
                        twin.insert(digest, n as u64);
                    }
                }
                2 => {
                    let removed = index.remove(digest).map(|entry| entry.sequence());
                    prop_assert_eq!(removed, twin.remove(&digest));
                }
                _ => {
                    let before = twin.len();
                    twin.retain(|_, sequence| *sequence % 5 != key % 5);
                    let removed = index.retain(|entry| entry.sequence() % 5 != key % 5);
                    prop_assert_eq!(removed as usize, before - twin.len());
                }
            }
            index.check();
            prop_assert_eq!(index.len() as usize, twin.len());
            for (digest, sequence) in &twin {
                prop_assert_eq!(index.find(*digest).map(Entry::sequence), Some(*sequence));
            }
            // In pieces, each is found once.
            let cuts = [0, cut, (cut * 3).min(1 << 32), 1 << 32];
            let mut found: Vec<u64> = Vec::new();
            for (from, to) in cuts.iter().zip(&cuts[1..]) {
                found.extend(index.between(*from, *to).map(Entry::sequence));
            }
            found.sort_unstable();
            let mut all: Vec<u64> = twin.values().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(found, all);
        }
    }
}

proptest! {
    #[test]
    fn a_long_walk_sees_every_entry_that_stays_in_the_index(
        seed in any::<u64>(),
        stays in 1..40u64,
        ops in prop::collection::vec((0..3u8, 0..40u64), 0..300),
    ) {
        let mut index = Index::new(80, seed);
        let put = |index: &mut Index, key: u64| {
            let digest = Digest(u128::from(key) << 64 | u128::from(key % 3));
            index.set(Entry::new(Kind::Object, digest, Version(1), key));
        };
        (0..stays).for_each(|key| put(&mut index, key));
        (100..140).step_by(2).for_each(|key| put(&mut index, key));
        let mut seen = std::collections::BTreeSet::new();
        let (mut at, mut ops) = (0, ops.into_iter());
        index.watch(0);
        while at < index.places() {
            match ops.next() {
                Some((0, key)) => put(&mut index, 100 + key),
                Some((1, key)) => {
                    let key = 100 + key;
                    index.remove(Digest(u128::from(key) << 64 | u128::from(key % 3)));
                }
                _ => {
                    seen.extend(index.at(at).map(Entry::sequence));
                    at += 1;
                    index.watch(at);
                }
            }
        }
        while let Some(digest) = index.carried_over() {
            seen.extend(index.find(digest).map(Entry::sequence));
        }
        prop_assert_eq!(index.unwatch(), 0);
        prop_assert!((0..stays).all(|key| seen.contains(&key)), "of {} only {:?}", stays, seen);
    }

    #[test]
    fn an_entry_keeps_its_values(
        words in any::<(u128, u64, u64, u64)>(), unit in any::<u32>(), segment in 0..1u64 << 33,
        payload_bytes in 0..=PAYLOAD_BYTES_MOST, key_bytes in 0..=KEY_BYTES_MOST, away in 0..=AWAY_MOST,
        extent in any::<bool>(), pinned in any::<bool>(), names_parts in any::<bool>(),
        copied in any::<bool>(),
    ) {
        let (digest, version, sequence, payload_checksum) = words;
        let shape = Shape { payload_bytes, key_bytes, extent, names_parts, copied };
        let (digest, version, kind) = (Digest(digest), Version(version), Kind::Object);
        let tenant = None;
        let listed =
            FooterEntry { kind, shape, pinned, digest, version, sequence, unit, away, payload_checksum, tenant };
        let at = segment * 4096;
        let mut entry = Entry::listed(&listed, at);
        entry.set_account(unit as u16);
        prop_assert_eq!(entry.account(), unit as u16);
        for hits in [1, 2, 3, 3] {
            entry.hit();
            prop_assert_eq!(entry.hits(), hits);
        }
        prop_assert_eq!((entry.digest(), entry.version(), entry.sequence()), (digest, version, sequence));
        prop_assert_eq!((entry.checksum(), entry.shape(), entry.away()), (payload_checksum, shape, away));
        prop_assert_eq!(entry.offset(), at + u64::from(unit) * UNIT_BYTES);
        prop_assert_eq!((entry.is_pinned(), entry.is_removed(), entry.is_used()), (pinned, false, true));
        entry.set_pinned(!pinned);
        prop_assert_eq!((entry.is_pinned(), entry.hits(), entry.shape()), (!pinned, 3, shape));
    }
}

#[test]
fn a_removal_is_no_object() {
    let entry = Entry::new(Kind::Tombstone, Digest(1), Version(2), 3);
    assert!(entry.is_removed() && entry.is_used() && !entry.is_pinned() && entry.hits() == 0);
}
