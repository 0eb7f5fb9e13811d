//! Resharding against a byte-wise reference model: random tensors, cut into random boxes that random ranks have, read
//! as other random boxes. Malformed input is rejected with an error that names the cause.

use kvplane_cluster::reshard::{Copy, Dtype, Fragment, Part, Placement, Plan, ReshardError, Tensor, TensorBox};
use proptest::prelude::*;

const DTYPES: [&str; 4] = ["U8", "torch.bfloat16", "float32", "F64"];

fn area(offset: &[u64], shape: &[u64]) -> TensorBox {
    TensorBox::new(offset.to_vec(), shape.to_vec()).expect("a box")
}

fn tensor(name: &str, shape: &[u64], dtype: &str) -> Tensor {
    let dtype = Dtype::parse(dtype).expect("known");
    Tensor { name: name.to_owned(), shape: shape.to_vec(), dtype, layout: String::new() }
}

fn part(participant: &str, fragments: &[(usize, TensorBox)]) -> Part {
    let fragment = |(tensor, area): &(usize, TensorBox)| Fragment { tensor: *tensor, area: area.clone() };
    Part { participant: participant.to_owned(), fragments: fragments.iter().map(fragment).collect() }
}

fn placement(tensors: Vec<Tensor>, parts: Vec<Part>) -> Result<Placement, ReshardError> {
    Placement::new("m".to_owned(), tensors, parts)
}

/// Returns the coordinates of every element of a box, in row-major order.
fn coordinates(area: &TensorBox) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    for (&first, &length) in area.offset().iter().zip(area.shape()) {
        let extended = all.iter().flat_map(|before| {
            (first..first + length).map(move |at| before.iter().copied().chain([at]).collect::<Vec<u64>>())
        });
        all = extended.collect();
    }
    all
}

/// Returns a number that identifies a byte of an element: tensor, coordinates and byte.
fn content(tensor: usize, at: &[u64], byte: u64) -> u64 {
    at.iter().fold((tensor as u64 + 1) << 4 | byte, |word, &at| word * 31 + at + 1)
}

/// Returns the memory of a part, one number for each byte.
fn memory(placement: &Placement, part: &Part) -> Vec<u64> {
    let mut memory = Vec::new();
    for fragment in &part.fragments {
        for at in coordinates(&fragment.area) {
            let bytes = placement.tensors()[fragment.tensor].dtype.bytes();
            memory.extend((0..bytes).map(|byte| content(fragment.tensor, &at, byte)));
        }
    }
    memory
}

/// A tensor, its cuts in each dimension, the ranks that have each piece, and the requested boxes.
#[derive(Clone, Debug)]
struct Case {
    shape: Vec<u64>,
    dtype: &'static str,
    cuts: Vec<Vec<u64>>,
    owners: Vec<Vec<usize>>,
    wanted: Vec<TensorBox>,
}

const RANKS: usize = 5;

fn cases() -> impl Strategy<Value = Case> {
    let shapes = prop::collection::vec(1u64..=6, 1..=4);
    let parts = shapes.prop_flat_map(|shape| {
        let cuts: Vec<_> = shape.iter().map(|&length| prop::collection::vec(0..length, 0..3)).collect();
        let owners = prop::collection::vec(prop::collection::vec(0..RANKS, 1..4), 81);
        let wanted: Vec<_> =
            shape.iter().map(|&length| (0..length).prop_flat_map(move |at| (Just(at), 1..=length - at))).collect();
        let wanted = prop::collection::vec(wanted, 1..6);
        (Just(shape), prop::sample::select(&DTYPES[..]), cuts, owners, wanted)
    });
    parts.prop_map(|(shape, dtype, mut cuts, owners, wanted)| {
        for (cuts, &length) in cuts.iter_mut().zip(&shape) {
            cuts.extend([0, length]);
            cuts.sort_unstable();
            cuts.dedup();
        }
        let boxed = |dimensions: Vec<(u64, u64)>| {
            let (offset, shape): (Vec<u64>, Vec<u64>) = dimensions.into_iter().unzip();
            area(&offset, &shape)
        };
        Case { shape, dtype, cuts, owners, wanted: wanted.into_iter().map(boxed).collect() }
    })
}

impl Case {
    fn pieces(&self) -> Vec<TensorBox> {
        let grid: Vec<u64> = self.cuts.iter().map(|cuts| cuts.len() as u64 - 1).collect();
        let piece = |at: Vec<u64>| {
            let begin: Vec<u64> = at.iter().zip(&self.cuts).map(|(&at, cuts)| cuts[at as usize]).collect();
            let shape: Vec<u64> =
                at.iter().zip(&self.cuts).map(|(&at, cuts)| cuts[at as usize + 1] - cuts[at as usize]).collect();
            area(&begin, &shape)
        };
        coordinates(&area(&vec![0; grid.len()], &grid)).into_iter().map(piece).collect()
    }
}

/// Returns two tensors of the same kind; the second is cut as the first, in another order.
fn sides(case: &Case) -> (Placement, Placement) {
    let tensors = vec![tensor("a", &case.shape, case.dtype), tensor("b", &case.shape, case.dtype)];
    let mut held: Vec<Vec<(usize, TensorBox)>> = vec![Vec::new(); RANKS];
    for (at, piece) in case.pieces().into_iter().enumerate() {
        for one in 0..2 {
            let mut owners = case.owners[(at + one * 7) % case.owners.len()].clone();
            owners.sort_unstable();
            owners.dedup();
            owners.into_iter().for_each(|owner| held[owner].push((one, piece.clone())));
        }
    }
    let parts = held.iter().enumerate().map(|(rank, held)| part(&format!("s{rank}"), held)).collect();
    let source = placement(tensors.clone(), parts).expect("boxes are equal or disjoint");
    let wanted = |one: usize| case.wanted.iter().map(move |area| (1 - one, area.clone()));
    // The target lists the tensors in reverse order.
    let parts =
        vec![part("t0", &wanted(0).collect::<Vec<_>>()), part("t1", &wanted(1).chain(wanted(0)).collect::<Vec<_>>())];
    (source, placement(vec![tensors[1].clone(), tensors[0].clone()], parts).expect("one box"))
}

/// Returns the expected memory of the target: tensors are identified by name, and contents by the source's numbers.
fn expected(source: &Placement, target: &Placement, part: &Part) -> Vec<u64> {
    let fragment = |fragment: &Fragment| {
        let name = &target.tensors()[fragment.tensor].name;
        let tensor = source.tensors().iter().position(|one| one.name == *name).expect("there");
        Fragment { tensor, area: fragment.area.clone() }
    };
    let renamed = Part { participant: String::new(), fragments: part.fragments.iter().map(fragment).collect() };
    memory(source, &renamed)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_copied_once_from_its_source(case in cases()) {
        // Requested boxes of one tensor may overlap, which those of a source must not: they are tested one by one.
        for wanted in &case.wanted {
            let case = Case { wanted: vec![wanted.clone()], ..case.clone() };
            let (source, target) = sides(&case);
            for number in 0..target.parts().len() {
                let plan = Plan::new(&source, &target, number).expect("the source has everything");
                let (to, total) = target.packed(number).expect("small");
                let mut got: Vec<Option<u64>> = vec![None; total as usize];
                for from_part in plan.sources() {
                    let (from, _) = source.packed(from_part).expect("small");
                    let theirs = memory(&source, &source.parts()[from_part]);
                    let copies: Vec<Copy> = plan.copies(from_part, &from, &to).collect();
                    for copy in &copies {
                        for at in 0..copy.bytes {
                            let place = &mut got[(copy.target_offset + at) as usize];
                            prop_assert!(place.is_none(), "byte {} twice", copy.target_offset + at);
                            *place = Some(theirs[(copy.source_offset + at) as usize]);
                        }
                    }
                    let merged = |pair: &[Copy]| pair[0].source_offset + pair[0].bytes == pair[1].source_offset
                        && pair[0].target_offset + pair[0].bytes == pair[1].target_offset;
                    prop_assert!(!copies.windows(2).any(merged), "neighbours are one copy");
                }
                let got: Option<Vec<u64>> = got.into_iter().collect();
                prop_assert_eq!(got, Some(expected(&source, &target, &target.parts()[number])));
                prop_assert_eq!(plan.bytes(), total);
            }
        }
    }

    #[test]
    fn missing_piece_is_named(case in cases(), lost in any::<prop::sample::Index>()) {
        let pieces = case.pieces();
        let lost = lost.index(pieces.len());
        let kept = pieces.iter().enumerate().filter(|(at, _)| *at != lost);
        let kept: Vec<(usize, TensorBox)> = kept.map(|(_, one)| (0, one.clone())).collect();
        let tensors = vec![tensor("a", &case.shape, case.dtype)];
        let source = placement(tensors.clone(), vec![part("s", &kept)]).expect("apart");
        for wanted in &case.wanted {
            let target = placement(tensors.clone(), vec![part("t", &[(0, wanted.clone())])]).expect("one");
            match (Plan::new(&source, &target, 0), wanted.overlap(&pieces[lost])) {
                (Ok(plan), None) => prop_assert_eq!(plan.bytes(), target.bytes(&target.parts()[0].fragments[0])),
                (Err(ReshardError::Gap { missing, .. }), Some(common)) => prop_assert_eq!(missing, common),
                (found, common) => prop_assert!(false, "{found:?} where {common:?} is missing"),
            }
        }
    }

    #[test]
    fn difference_and_overlap_make_up_a_box(
        (one, other) in (1usize..4).prop_flat_map(|dimensions| {
            let side = || prop::collection::vec((0u64..5, 1u64..5), dimensions);
            (side(), side())
        }),
    ) {
        let boxed = |side: Vec<(u64, u64)>| {
            let (offset, shape): (Vec<u64>, Vec<u64>) = side.into_iter().unzip();
            area(&offset, &shape)
        };
        let (one, other) = (boxed(one), boxed(other));
        let mut pieces = one.minus(&other);
        pieces.extend(one.overlap(&other));
        let mut found: Vec<Vec<u64>> = pieces.iter().flat_map(coordinates).collect();
        found.sort();
        prop_assert_eq!(found, coordinates(&one));
        prop_assert!(one.minus(&other).iter().all(|piece| piece.overlap(&other).is_none()));
    }
}

#[test]
fn owners_of_equal_boxes_share_the_load() {
    // Four ranks have all of 64 equal tensors.
    let tensors: Vec<Tensor> = (0..64).map(|number| tensor(&format!("{number}"), &[8], "F32")).collect();
    let all: Vec<(usize, TensorBox)> = (0..64).map(|number| (number, area(&[0], &[8]))).collect();
    let ranks = |letter: &str| (0..4).map(|rank| part(&format!("{letter}{rank}"), &all)).collect::<Vec<_>>();
    let source = placement(tensors.clone(), ranks("s")).expect("replicas");
    let target = placement(tensors.clone(), ranks("t")).expect("replicas");
    for number in 0..4 {
        let plan = Plan::new(&source, &target, number).expect("there");
        assert_eq!((0..4).map(|from| plan.from(from).len()).collect::<Vec<_>>(), [16; 4]);
    }
    // Each rank that needs one tensor only reads from another source.
    let one = |rank: usize| part(&format!("t{rank}"), &[(0, area(&[0], &[8]))]);
    let target = placement(tensors, (0..4).map(one).collect()).expect("replicas");
    let asked: Vec<Vec<usize>> = (0..4).map(|n| Plan::new(&source, &target, n).expect("there").sources()).collect();
    assert_eq!(asked, [[0], [1], [2], [3]]);
}

#[test]
fn rows_are_one_copy_and_columns_one_per_row() {
    let tensors = vec![tensor("w", &[1 << 20, 1 << 12], "BF16")];
    let source =
        placement(tensors.clone(), vec![part("s", &[(0, area(&[0, 0], &[1 << 20, 1 << 12]))])]).expect("whole");
    let rows = area(&[5, 0], &[100, 1 << 12]);
    let columns = area(&[0, 64], &[1 << 20, 32]);
    let target = placement(tensors, vec![part("rows", &[(0, rows)]), part("columns", &[(0, columns)])]);
    // The boxes of a target must not contradict each other either.
    assert!(matches!(target, Err(ReshardError::Overlap { .. })));
    for (wanted, runs, bytes) in
        [(area(&[5, 0], &[100, 1 << 12]), 1, 100 << 13), (area(&[0, 64], &[1 << 20, 32]), 1 << 20, 64)]
    {
        let target = placement(source.tensors().to_vec(), vec![part("t", &[(0, wanted)])]).expect("one");
        let plan = Plan::new(&source, &target, 0).expect("there");
        assert_eq!(
            plan.from(0).iter().map(|overlap| (overlap.runs(), overlap.run_bytes)).collect::<Vec<_>>(),
            [(runs, bytes)]
        );
    }
}

fn refused(found: Result<Placement, ReshardError>, words: &[&str]) {
    let error = found.expect_err("malformed").to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

#[test]
fn malformed_placements_are_rejected_with_their_cause() {
    let w = || tensor("w", &[4, 6], "F32");
    let one = |offset: &[u64], shape: &[u64]| part("r", &[(0, area(offset, shape))]);
    refused(placement(vec![w()], vec![one(&[0, 4], &[4, 3])]), &["\"w\"", "[0:4, 4:7]", "\"r\"", "[4, 6]"]);
    refused(placement(vec![w()], vec![one(&[0], &[4])]), &["\"w\"", "1 dimensions", "has 2"]);
    refused(placement(vec![w()], vec![part("r", &[(1, area(&[0], &[1]))])]), &["tensor 1, which does not exist"]);
    refused(placement(vec![w(), w()], vec![]), &["tensor \"w\" is there twice"]);
    refused(placement(vec![w()], vec![part("r", &[]), part("r", &[])]), &["participant \"r\" is there twice"]);
    refused(placement(vec![tensor("w", &[4, 0], "F32")], vec![]), &["\"w\"", "a length of 0 in dimension 1"]);
    refused(placement(vec![tensor("w", &[], "F32")], vec![]), &["0 dimensions"]);
    refused(placement(vec![tensor("w", &[1 << 32, 1 << 32], "U8")], vec![]), &["beyond 2^64"]);
    refused(placement(vec![tensor("w", &[1 << 31, 1 << 31], "F32")], vec![]), &["more than 2^64 bytes"]);
    let first = part("a", &[(0, area(&[0, 0], &[2, 6]))]);
    let second = part("b", &[(0, area(&[1, 0], &[2, 6]))]);
    refused(
        placement(vec![w()], vec![first.clone(), second]),
        &["[0:2, 0:6] of \"a\"", "[1:3, 0:6] of \"b\"", "overlap"],
    );
    assert!(TensorBox::new(vec![u64::MAX], vec![1]).is_err() && TensorBox::new(vec![0, 0], vec![1]).is_err());
    assert_eq!(Dtype::parse("int3"), None);
    // Differences between the two sides.
    let source = placement(vec![w()], vec![first]).expect("half of it");
    let wanted = |tensor: Tensor| placement(vec![tensor], vec![one(&[0, 0], &[1, 1])]).expect("one");
    let error = |target: &Placement| Plan::new(&source, target, 0).expect_err("not the same").to_string();
    assert!(error(&wanted(tensor("w", &[4, 7], "F32"))).contains("shape [4, 6] and [4, 7]"));
    assert!(error(&wanted(tensor("w", &[4, 6], "I32"))).contains("F32 and I32"));
    assert!(error(&wanted(tensor("v", &[4, 6], "F32"))).contains("tensor \"v\": \"r\" is to have [0:1, 0:1]"));
    let other = Placement::new("n".to_owned(), vec![w()], vec![]).expect("of another model");
    assert!(Plan::new(&other, &wanted(w()), 0).expect_err("another").to_string().contains("is of \"n\""));
    assert!(source.part("z").expect_err("unknown").to_string().contains("it has a"));
}
