//! One-sided copies: any range, in both directions, within the owner's rights, and without its help.

use kvplane_proto::message::Operation;
use kvplane_proto::rng::Rng;
use kvplane_proto::{SegmentId, Status};
use kvplane_transport::RdmaOptions;

use super::bed::{Bed, answers, check, fill, on_devices, part};

const BYTES: usize = 20 << 20;
const SEGMENT: SegmentId = SegmentId { index: 3, generation: 9 };

fn copy(bed: &mut Bed, token: u64, offset: usize, (at, bytes): (usize, usize), write: bool) {
    let local = part(&bed.asking.region, at, bytes);
    bed.asking.copy(bed.ask, token, (SEGMENT, offset as u64), &local, write);
}

fn outcome(bed: &mut Bed, token: u64) -> Result<(), Status> {
    bed.until("the copy is over", |bed| bed.asking.copied.iter().any(|copied| copied.0 == token));
    let found: Vec<_> = bed.asking.copied.iter().filter(|copied| copied.0 == token).collect();
    assert_eq!(found.len(), 1, "each copy completes once");
    found[0].1
}

#[test]
fn random_ranges_are_read_and_written() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, BYTES, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), BYTES as u64, true);
        fill(&part(&theirs, 0, BYTES), 1);
        let mut rng = Rng::new(5, "copies");
        // Many at once, each into memory of its own.
        let count = 400;
        let mut ranges = Vec::new();
        for token in 0..count {
            let (at, bytes) = (token * 4096, 1 + rng.next_u64() as usize % 4096);
            let offset = rng.next_u64() as usize % (BYTES - bytes);
            copy(&mut bed, token as u64, offset, (at, bytes), false);
            ranges.push((offset, at, bytes));
        }
        bed.until("all are over", |bed| bed.asking.copied.len() == count);
        assert!(bed.asking.copied.iter().all(|copied| copied.1 == Ok(())), "{:?}", bed.asking.copied);
        for (offset, at, bytes) in ranges {
            check(&part(&bed.asking.region, at, bytes), 1, offset as u64);
        }
        // A copy that needs several requests, and back again.
        fill(&part(&bed.asking.region, 0, BYTES), 2);
        copy(&mut bed, 1000, 0, (0, BYTES), true);
        assert_eq!(outcome(&mut bed, 1000), Ok(()));
        check(&part(&theirs, 0, BYTES), 2, 0);
        copy(&mut bed, 1001, 13, (7, BYTES - 13), false);
        assert_eq!(outcome(&mut bed, 1001), Ok(()));
        check(&part(&bed.asking.region, 7, BYTES - 13), 2, 13);
    });
}

#[test]
fn many_copies_need_few_doorbells() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, BYTES, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), BYTES as u64, true);
        copy(&mut bed, 0, 0, (0, 64), false);
        assert_eq!(outcome(&mut bed, 0), Ok(()));
        let before = *bed.asking.rdma.counters();
        for token in 1..=200 {
            copy(&mut bed, token, token as usize * 65_536, (token as usize * 65_536, 65_536), token % 2 == 0);
        }
        bed.until("all are over", |bed| bed.asking.copied.len() == 201);
        let after = *bed.asking.rdma.counters();
        assert!(after.requests - before.requests >= 200);
        assert_eq!(after.messages, before.messages, "no further request to the owner");
        assert!((after.doorbells - before.doorbells) * 8 <= 200, "{before:?} {after:?}");
    });
}

#[test]
fn rights_and_bounds_are_kept() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 1 << 20, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        // A segment is stale before it is published, and its id stays so: ids are not reused.
        copy(&mut bed, 0, 0, (0, 64), false);
        assert_eq!(outcome(&mut bed, 0), Err(Status::Stale));
        let (short, read_only) = (SegmentId { index: 4, generation: 1 }, SegmentId { index: 5, generation: 1 });
        bed.asked.rdma.publish(short, &theirs.clone().into(), 1000, true);
        bed.asked.rdma.publish(read_only, &theirs.clone().into(), 1 << 20, false);
        let local = part(&bed.asking.region, 0, 600);
        let cases = [
            (1, short, 400, true, Ok(())),
            (2, short, 401, true, Err(Status::OutOfRange)),
            (3, short, u64::MAX, false, Err(Status::OutOfRange)),
            (4, read_only, 0, true, Err(Status::Unauthorized)),
            (5, read_only, 0, false, Ok(())),
        ];
        for (token, segment, offset, write, expected) in cases {
            bed.asking.copy(bed.ask, token, (segment, offset), &local, write);
            assert_eq!(outcome(&mut bed, token), expected, "case {token}");
        }
        assert!(bed.asking.gone.is_empty() && bed.asked.gone.is_empty(), "nothing of this breaks a connection");
    });
}

#[test]
fn a_retracted_segment_is_not_accessible() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 1 << 20, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), 1 << 20, true);
        copy(&mut bed, 0, 0, (0, 64), true);
        assert_eq!(outcome(&mut bed, 0), Ok(()));
        bed.asked.rdma.retract(SEGMENT);
        fill(&part(&theirs, 0, 1 << 20), 3);
        // A frame that is sent after the notification arrives after it.
        assert!(bed.asked.rdma.send(bed.serve, &answers(Operation::Exists, 1), &[], None));
        bed.until("the news are there", |bed| bed.asking.frames.len() == 1);
        copy(&mut bed, 1, 0, (0, 64), true);
        assert_eq!(outcome(&mut bed, 1), Err(Status::Stale));
        assert!(bed.asking.gone.is_empty(), "a notified peer does not try");
        check(&part(&theirs, 0, 1 << 20), 3, 0);
    });
}

#[test]
fn unregistrable_memory_is_reported() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 1 << 20, RdmaOptions { regions: 0, ..RdmaOptions::default() });
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), 1 << 20, true);
        copy(&mut bed, 0, 0, (0, 64), false);
        assert_eq!(outcome(&mut bed, 0), Err(Status::Unsupported));
    });
}
