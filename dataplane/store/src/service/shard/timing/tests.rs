//! Tests of the latency statistics.

use kvplane_proto::RequestId;

use super::*;

fn reply(operation: Operation) -> Header {
    Header::reply(Kind::Reply(operation), RequestId::default(), Status::Ok)
}

fn at(arrived_ns: u64) -> Timing {
    Timing { arrived_ns, ..Timing::default() }
}

#[test]
fn immediate_replies_share_a_reading_and_none_is_lost() {
    let mut timed = ServiceTimer::new();
    let mut readings = 0;
    for round in 0..1000u64 {
        let now_ns = 1000 * round;
        timed.answered_at_once(&reply(Operation::Get), None, now_ns);
        timed.round_over(|| {
            readings += 1;
            now_ns + 700
        });
    }
    assert!((60..80).contains(&readings), "{readings} readings for 1000 requests");
    let times = timed.snapshot(0);
    let [gets] = &times.operations[..] else { panic!("{times:?}") };
    assert_eq!((gets.operation, gets.ssd, gets.times.count()), (Operation::Get, false, 1000));
    assert_eq!(gets.times.sum_ns(), 700_000);
}

#[test]
fn only_operations_answered_in_a_round_get_its_time() {
    let mut timed = ServiceTimer::new();
    timed.answered_at_once(&reply(Operation::Get), None, 10);
    timed.round_over(|| 110);
    // The next two gets share a reading, which comes in another round than the put's.
    timed.answered_at_once(&reply(Operation::Get), None, 200);
    timed.round_over(|| panic!("not due"));
    timed.answered_at_once(&reply(Operation::Put), None, 1000);
    timed.round_over(|| 6000);
    timed.answered_at_once(&reply(Operation::Get), None, 7000);
    timed.round_over(|| 7100);
    let times = timed.snapshot(0);
    let sums: Vec<(Operation, u64, u64)> =
        times.operations.iter().map(|one| (one.operation, one.times.count(), one.times.sum_ns())).collect();
    assert_eq!(sums, [(Operation::Get, 3, 300), (Operation::Put, 1, 5000)]);
}

#[test]
fn slow_requests_are_remembered_with_their_stages_and_only_the_latest() {
    let mut timed = ServiceTimer::new();
    timed.slow_after_ns = 1000;
    let waited = Timing { arrived_ns: 5, receive_ns: 0, ssd_ns: 2000, ssd: true };
    timed.answered(&reply(Operation::Get), &(0, waited, About { digest: Some(Digest(9)), bytes: 0 }), None, 2005);
    let slow = timed.snapshot(0).slow;
    assert_eq!((slow.len(), slow[0].ssd_ns, slow[0].total_ns, slow[0].digest), (1, 2000, 2000, Some(Digest(9))));
    // The reply of the same request is then slow to send.
    let left = SlowOperation { total_ns: 9000, send_ns: 7000, ..slow[0] };
    timed.remember(left);
    assert_eq!((timed.slow_count, timed.slow.len(), timed.slow[0].send_ns), (1, 1, 7000));
    timed.answered(&reply(Operation::Put), &(0, at(10), About::default()), None, 900);
    assert_eq!(timed.slow_count, 1, "that one was not slow");
    for request in 0..200 {
        timed.answered(&reply(Operation::Put), &(0, at(request), About::default()), None, 5000);
    }
    let times = timed.snapshot(0);
    assert_eq!((times.slow_count, times.slow.len()), (201, SLOW_KEPT));
    assert_eq!((times.slow[0].arrived_ns, times.slow[SLOW_KEPT - 1].arrived_ns), (136, 199));
}

#[test]
fn failures_and_items_are_counted_by_kind() {
    let mut timed = ServiceTimer::new();
    timed.asked(Operation::Exists, 1024);
    timed.asked(Operation::Exists, 1);
    let refused = Header::reply(Kind::Reply(Operation::Exists), RequestId::default(), Status::WrongOwner);
    timed.answered_at_once(&refused, None, 1);
    timed.answered_at_once(&reply(Operation::Exists), None, 1);
    timed.round_over(|| 2);
    let times = timed.snapshot(0);
    assert_eq!(times.items, [(Operation::Exists, 1025)]);
    assert_eq!((times.operations[0].failed, times.operations[0].times.count()), (1, 2));
}
