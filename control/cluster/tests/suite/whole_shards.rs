//! Detection of completely copied shards, against a byte-wise reference model.

use std::cell::Cell;

use kvplane_cluster::p2p::Layout;
use kvplane_cluster::reshard::{Copy, Piece, whole_shards};
use proptest::prelude::*;

/// Returns each reported shard with its pieces, and the number of passes over the copies.
fn told(layout: &Layout, buffer: usize, copies: &[Copy], most: usize) -> (Vec<(u32, Vec<Piece>)>, usize) {
    let (mut told, asked) = (Vec::new(), Cell::new(0));
    let all = || {
        asked.set(asked.get() + 1);
        copies.iter().enumerate().map(|(at, &copy)| (at as u32, copy))
    };
    whole_shards(layout, buffer, all, most, |shard, pieces| told.push((shard, pieces.to_vec())));
    (told, asked.get())
}

fn copies(size: u64) -> impl Strategy<Value = Vec<Copy>> {
    let copy = (0..size, 1..=size).prop_map(move |(source_offset, bytes)| Copy {
        source_offset,
        target_offset: source_offset * 3 % 97,
        bytes: bytes.min(size - source_offset),
    });
    let short = prop::collection::vec(copy, 0..24);
    // Cut from one copy of the whole buffer and shuffled: every shard is complete.
    let cuts = prop::collection::vec(1..size.max(2), 0..12).prop_map(move |mut cuts| {
        cuts.extend([0, size]);
        cuts.sort_unstable();
        cuts.dedup();
        let of = |pair: &[u64]| Copy { source_offset: pair[0], target_offset: pair[0] + 7, bytes: pair[1] - pair[0] };
        cuts.windows(2).map(of).filter(|copy| copy.source_offset + copy.bytes <= size).collect::<Vec<Copy>>()
    });
    prop_oneof![short, cuts.prop_shuffle()]
}

proptest! {
    #[test]
    fn only_completely_copied_shards_are_reported(
        (copies, size) in (1u64..90).prop_flat_map(|size| (copies(size), Just(size))),
        shard_bytes in 1u64..20,
        most in 1usize..12,
    ) {
        let layout = Layout::new(vec![5, size, 3], shard_bytes).expect("a layout");
        let first = 5u64.div_ceil(shard_bytes) as u32;
        let has = |copy: &Copy, at: u64| (copy.source_offset..copy.source_offset + copy.bytes).contains(&at);
        let is_read = |at: u64| copies.iter().any(|copy| has(copy, at));
        let shards = size.div_ceil(shard_bytes);
        let bounds = |shard: u64| (shard * shard_bytes, size.min((shard + 1) * shard_bytes));
        let expected: Vec<u64> =
            (0..shards).filter(|&shard| { let (start, end) = bounds(shard); (start..end).all(is_read) }).collect();
        let (told, asked) = told(&layout, 1, &copies, most);
        let found: Vec<u64> = told.iter().map(|(shard, _)| u64::from(shard - first)).collect();
        prop_assert_eq!(&found, &expected);
        for (shard, pieces) in told {
            let (mut at, end) = bounds(u64::from(shard - first));
            for piece in &pieces {
                let copy = copies[piece.tag as usize];
                prop_assert_eq!(piece.source_offset, at);
                prop_assert_eq!(piece.target_offset - copy.target_offset, at - copy.source_offset);
                prop_assert!(piece.bytes > 0 && at + piece.bytes <= copy.source_offset + copy.bytes);
                at += piece.bytes;
            }
            prop_assert_eq!(at, end);
        }
        prop_assert!(asked <= 1 + shards as usize);
    }
}

#[test]
fn copies_beyond_the_buffer_are_ignored() {
    let layout = Layout::new(vec![10], 4).expect("a layout");
    let beyond = [Copy { source_offset: 4, target_offset: 0, bytes: u64::MAX }];
    let (found, asked) = told(&layout, 0, &beyond, 1000);
    assert_eq!(found.iter().map(|(shard, pieces)| (*shard, pieces.len())).collect::<Vec<_>>(), [(1, 1), (2, 1)]);
    assert_eq!(asked, 2);
    assert!(told(&layout, 1, &beyond, 1000).0.is_empty(), "there is no such buffer");
    assert!(told(&layout, 0, &[], 1000).0.is_empty());
}
