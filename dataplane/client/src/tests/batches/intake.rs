//! Stretches of requests compared with the plain rule: adjacent requests are cut together, all others one by one.

use core::ops::Range;

use proptest::prelude::*;

use kvplane_proto::ids::SegmentId;

use crate::intake::Intake;
use crate::tests::rig::{local, stream_config};
use crate::{Client, Config, PeerAddress, Place, Request, SegmentTarget, SubmitError};

const SLICE_BYTES: u64 = 128 << 10;

/// A request: true if it continues the previous one, its bytes, true for a read, and true if it is for the second peer.
type Ask = (bool, u64, bool, bool);

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let bytes = prop_oneof![Just(64 << 10), 1..SLICE_BYTES, Just(SLICE_BYTES), SLICE_BYTES..4 * SLICE_BYTES];
    let often = || proptest::bool::weighted(0.7);
    proptest::collection::vec((any::<bool>(), bytes, often(), often()), 1..20)
}

/// Returns true if the second request continues the first.
fn touch(one: &Request, other: &Request) -> bool {
    match (one, other) {
        (Request::Read(target, local), Request::Read(next, to))
        | (Request::Write(target, local), Request::Write(next, to)) => {
            let follows = SegmentTarget { offset: target.offset + local.bytes, ..*target };
            follows == *next && local.buffer == to.buffer && local.offset + local.bytes == to.offset
        }
        _ => false,
    }
}

proptest! {
    #[test]
    fn requests_are_grouped_as_they_touch(
        asks in asks(),
        merge: bool,
        align in prop_oneof![Just(4096u64), Just(48 << 10), Just(100 << 10)],
    ) {
        let config = Config { slice_bytes: SLICE_BYTES, align_bytes: align, merge, ..stream_config() };
        let mut client = Client::new(config);
        let peers = [50, 51].map(|port| client.open_peer(PeerAddress::native(([127, 0, 0, 1], port).into(), None)));
        let mut at = 0;
        let requests: Vec<Request> = asks.iter().map(|&(on, bytes, read, second)| {
            at += if on { 0 } else { 1 };
            let segment = SegmentId { index: 1, generation: 1 };
            let peer = peers[usize::from(second)];
            let target = SegmentTarget { peer, segment, offset: 7 + at, shareable: false, place: Place::UNKNOWN };
            let local = local(0, at, bytes);
            at += bytes;
            if read { Request::Read(target, local) } else { Request::Write(target, local) }
        }).collect();
        let mut expected: Vec<(Range<usize>, bool)> = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            match expected.last_mut() {
                Some((run, _)) if merge && touch(&requests[index - 1], request) => run.end = index + 1,
                _ => expected.push((index..index + 1, false)),
            }
        }
        for (run, whole) in &mut expected {
            let (Request::Read(target, local) | Request::Write(target, local)) = requests[run.start] else { continue };
            *whole = run.len() == 1 && client.network().cuts(target.offset, local.bytes, target.peer).count() == 1;
        }
        let mut intake = Intake::new();
        intake.take_in(&requests, 0, 0, client.network()).unwrap();
        let found: Vec<(Range<usize>, bool)> = intake.stretches().iter().flat_map(|stretch| {
            let (tasks, whole) = (stretch.tasks(), stretch.whole);
            let each = tasks.clone().map(move |task| (task..task + 1, true));
            if whole { each.collect() } else { vec![(tasks, false)] }
        }).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn requests_that_write_the_same_memory_are_found(ranges in proptest::collection::vec((0u64..40, 1u64..4), 1..12)) {
        let mut client = Client::new(stream_config());
        let peer = client.open_peer(PeerAddress::native(([127, 0, 0, 1], 50).into(), None));
        let read = |&(offset, bytes): &(u64, u64)| {
            let segment = SegmentId { index: 1, generation: 1 };
            let target = SegmentTarget { peer, segment, offset: 0, shareable: false, place: Place::UNKNOWN };
            Request::Read(target, local(0, offset, bytes))
        };
        for order in [ranges.clone(), { let mut up = ranges.clone(); up.sort_unstable(); up }] {
            let requests: Vec<Request> = order.iter().map(read).collect();
            let overlap = |(at, one): (usize, &(u64, u64))| {
                order[at + 1..].iter().any(|other| one.0 < other.0 + other.1 && other.0 < one.0 + one.1)
            };
            let overlaps = order.iter().enumerate().any(overlap);
            for requests in [requests.clone(), requests.into_iter().rev().collect()] {
                let taken = Intake::new().take_in(&requests, 0, 0, client.network());
                prop_assert_eq!(matches!(taken, Err(SubmitError::Overlap { .. })), overlaps, "{:?}", taken);
            }
        }
    }
}
