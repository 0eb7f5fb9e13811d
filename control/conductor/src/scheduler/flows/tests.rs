//! Tests of the shares of flows.

use super::*;

const SECOND: u64 = 1_000_000_000;

fn name(flow: &str) -> ServiceTerms {
    ServiceTerms { flow: flow.into(), ..ServiceTerms::default() }
}

fn weighted(flow: &str, weight: u32) -> ServiceTerms {
    ServiceTerms { weight, ..name(flow) }
}

#[test]
fn work_counts_by_weight() {
    let mut flows = Flows::new(8);
    let (heavy, light) =
        (flows.enter(&weighted("heavy", 400), SECOND, false), flows.enter(&name("light"), SECOND, false));
    flows.serve(heavy, 8 * SECOND, Some(0.02));
    flows.serve(light, 2 * SECOND, Some(0.02));
    assert_eq!((flows.virtual_ns(heavy), flows.virtual_ns(light)), (2 * SECOND, 2 * SECOND));
    flows.enter(&weighted("heavy", 100), SECOND, false);
    flows.serve(heavy, SECOND, None);
    assert_eq!(flows.virtual_ns(heavy), 3 * SECOND, "its latest weight");
}

#[test]
fn a_flow_saves_up_no_turns_and_loses_none() {
    let mut flows = Flows::new(8);
    let flood = flows.enter(&name("flood"), SECOND, false);
    flows.serve(flood, 100 * SECOND, Some(0.0));
    let late = flows.enter(&name("late"), SECOND, false);
    assert_eq!(flows.virtual_ns(late), 100 * SECOND, "it begins where the other is");
    flows.serve(late, 5 * SECOND, Some(0.0));
    flows.leave(late, SECOND, false);
    flows.serve(flood, SECOND, Some(0.0));
    let again = flows.enter(&name("late"), SECOND, false);
    assert_eq!(flows.virtual_ns(again), 105 * SECOND, "it was ahead, and it still is");
    flows.serve(flood, 50 * SECOND, Some(0.0));
    flows.leave(again, SECOND, false);
    assert_eq!(flows.enter(&name("late"), SECOND, false), again);
    assert_eq!(flows.virtual_ns(again), 151 * SECOND);
    // Without queued requests nobody is ahead of anybody.
    flows.leave(again, SECOND, false);
    flows.leave(flood, SECOND, false);
    assert_eq!(flows.count(), 0);
    let fresh = flows.enter(&name("flood"), SECOND, false);
    assert_eq!(flows.virtual_ns(fresh), 0);
}

#[test]
fn work_placed_without_waiting_is_charged() {
    let mut flows = Flows::new(8);
    flows.charge(&name("now"), SECOND);
    assert_eq!(flows.count(), 0, "nobody waits");
    let waiting = flows.enter(&name("queued"), SECOND, false);
    flows.serve(waiting, 10 * SECOND, Some(0.0));
    flows.charge(&name("now"), SECOND);
    let now = flows.enter(&name("now"), SECOND, false);
    assert_eq!(flows.virtual_ns(now), 11 * SECOND);
}

#[test]
fn flows_beyond_the_limit_share_the_default_flow() {
    let mut flows = Flows::new(3);
    assert_eq!(flows.enter(&name("a"), SECOND, false), 1);
    assert_eq!(flows.enter(&name("b"), SECOND, false), 2);
    assert_eq!(flows.enter(&name("c"), SECOND, false), 0);
    assert_eq!(flows.enter(&name(""), SECOND, false), 0);
    flows.leave(1, SECOND, false);
    assert_eq!(flows.enter(&name("d"), SECOND, false), 1, "the number of a flow without requests");
    assert_eq!(flows.enter(&name("a"), SECOND, false), 0);
    assert_eq!(flows.count(), 3);
}

#[test]
fn work_ahead_is_what_others_are_given_meanwhile() {
    let mut flows = Flows::new(8);
    flows.enter(&name("a"), 10 * SECOND, false);
    (0..10).for_each(|_| {
        flows.enter(&weighted("b", 200), 10 * SECOND, false);
    });
    // While a new flow is given 4 s, the first is given as much, and the one of twice the weight 8 s.
    assert_eq!(flows.others_before(&name("c"), 4 * SECOND), (0, 12 * SECOND));
    assert_eq!(flows.others_before(&name("c"), 24 * SECOND), (5, 58 * SECOND));
    assert_eq!(flows.others_before(&name("c"), 1000 * SECOND), (11, 110 * SECOND));
    assert_eq!(flows.timely_before_ns(&name("c")), 0, "it has no requests before the new one");
    assert_eq!(flows.timely_before_ns(&name("a")), 30 * SECOND);
    assert_eq!(flows.timely_before_ns(&weighted("b", 200)), 110 * SECOND);
    flows.enter(&name("a"), 5 * SECOND, true);
    assert_eq!(flows.timely_before_ns(&name("a")), 30 * SECOND, "deferred work is not before others");
}
