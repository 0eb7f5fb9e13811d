//! Tests of the shares of flows.

use super::*;

const SECOND: u64 = 1_000_000_000;
const RULES: QueueRules =
    QueueRules { deferred: 0.0, oldest_share: 0.0, saturated_ns: 30 * SECOND, lead_ns: 10 * SECOND };

fn name(flow: &str) -> ServiceTerms {
    ServiceTerms { flow: flow.into(), ..ServiceTerms::default() }
}

fn weighted(flow: &str, weight: u32) -> ServiceTerms {
    ServiceTerms { weight, ..name(flow) }
}

fn virtual_ns(flows: &Flows, flow: FlowNumber) -> u64 {
    flows.flows[flow].virtual_ns
}

#[test]
fn saturated_flows_have_their_turn_together_and_behind_the_others() {
    let mut flows = Flows::new(8);
    let [a, b] = ["a", "b"].map(|flow| flows.enter(&name(flow), SECOND, false, 0));
    flows.serve(a, 8 * SECOND, false, &RULES);
    // All but the default flow have queued requests.
    let with = |flows: &Flows, now_s: u64| {
        let candidates: Vec<bool> = (0..flows.count()).map(|flow| flow > 0).collect();
        flows.turns(&candidates, &RULES, now_s * SECOND)[1..].to_vec()
    };
    assert_eq!(with(&flows, 29), [false, true], "the one that is behind");
    assert_eq!(with(&flows, 30), [true, true]);
    flows.serve(a, 3 * SECOND, false, &RULES);
    assert_eq!(with(&flows, 30), [false, true], "it is too far ahead");
    // A flow that begins to wait starts where both would be with equal shares.
    let late = flows.enter(&name("late"), SECOND, false, 40 * SECOND);
    assert_eq!(virtual_ns(&flows, late), 11 * SECOND / 2);
    assert_eq!(with(&flows, 41), [false, true, true]);
    flows.serve(b, 7 * SECOND, false, &RULES);
    assert_eq!(with(&flows, 41), [false, false, true], "it is behind the saturated ones");
    flows.serve(late, 2 * SECOND, false, &RULES);
    assert_eq!(with(&flows, 41), [true, true, true]);
    assert_eq!(with(&flows, 70), [true, true, true], "all are saturated");
    // Flows that no free instance serves count for nothing.
    assert_eq!(flows.turns(&[false, true, false, false], &RULES, 0), [false, true, false, false]);
}

#[test]
fn work_counts_by_weight() {
    let mut flows = Flows::new(8);
    let (heavy, light) =
        (flows.enter(&weighted("heavy", 400), SECOND, false, 0), flows.enter(&name("light"), SECOND, false, 0));
    flows.serve(heavy, 8 * SECOND, false, &RULES);
    flows.serve(light, 2 * SECOND, false, &RULES);
    assert_eq!((virtual_ns(&flows, heavy), virtual_ns(&flows, light)), (2 * SECOND, 2 * SECOND));
    flows.enter(&weighted("heavy", 100), SECOND, false, 0);
    flows.serve(heavy, SECOND, true, &RULES);
    assert_eq!(virtual_ns(&flows, heavy), 3 * SECOND, "its latest weight");
}

#[test]
fn a_flow_saves_up_no_turns_and_loses_none() {
    let mut flows = Flows::new(8);
    let flood = flows.enter(&name("flood"), SECOND, false, 0);
    flows.serve(flood, 100 * SECOND, false, &RULES);
    let late = flows.enter(&name("late"), SECOND, false, 0);
    assert_eq!(virtual_ns(&flows, late), 100 * SECOND, "it begins where the other is");
    flows.serve(late, 5 * SECOND, false, &RULES);
    flows.leave(late, SECOND, false);
    flows.serve(flood, SECOND, false, &RULES);
    let again = flows.enter(&name("late"), SECOND, false, 0);
    assert_eq!(virtual_ns(&flows, again), 105 * SECOND, "it was ahead, and it still is");
    flows.serve(flood, 50 * SECOND, false, &RULES);
    flows.leave(again, SECOND, false);
    assert_eq!(flows.enter(&name("late"), SECOND, false, 0), again);
    assert_eq!(virtual_ns(&flows, again), 151 * SECOND);
    // Without queued requests nobody is ahead of anybody.
    flows.leave(again, SECOND, false);
    flows.leave(flood, SECOND, false);
    assert_eq!(flows.count(), 0);
    let fresh = flows.enter(&name("flood"), SECOND, false, 0);
    assert_eq!(virtual_ns(&flows, fresh), 0);
}

#[test]
fn work_placed_without_waiting_is_charged() {
    let mut flows = Flows::new(8);
    flows.charge(&name("now"), SECOND);
    assert_eq!(flows.count(), 0, "nobody waits");
    let waiting = flows.enter(&name("queued"), SECOND, false, 0);
    flows.serve(waiting, 10 * SECOND, false, &RULES);
    flows.charge(&name("now"), SECOND);
    let now = flows.enter(&name("now"), SECOND, false, 0);
    assert_eq!(virtual_ns(&flows, now), 11 * SECOND);
}

#[test]
fn flows_beyond_the_limit_share_the_default_flow() {
    let mut flows = Flows::new(3);
    assert_eq!(flows.enter(&name("a"), SECOND, false, 0), 1);
    assert_eq!(flows.enter(&name("b"), SECOND, false, 0), 2);
    assert_eq!(flows.enter(&name("c"), SECOND, false, 0), 0);
    assert_eq!(flows.enter(&name(""), SECOND, false, 0), 0);
    flows.leave(1, SECOND, false);
    assert_eq!(flows.enter(&name("d"), SECOND, false, 0), 1, "the number of a flow without requests");
    assert_eq!(flows.enter(&name("a"), SECOND, false, 0), 0);
    assert_eq!(flows.count(), 3);
}

#[test]
fn work_ahead_is_what_others_are_given_meanwhile() {
    let mut flows = Flows::new(8);
    flows.enter(&name("a"), 10 * SECOND, false, 0);
    (0..10).for_each(|_| {
        flows.enter(&weighted("b", 200), 10 * SECOND, false, 0);
    });
    // While a new flow is given 4 s, the first is given as much, and the one of twice the weight 8 s.
    assert_eq!(flows.others_before(&name("c"), 4 * SECOND), (0, 12 * SECOND));
    assert_eq!(flows.others_before(&name("c"), 24 * SECOND), (5, 58 * SECOND));
    assert_eq!(flows.others_before(&name("c"), 1000 * SECOND), (11, 110 * SECOND));
    assert_eq!(flows.timely_before_ns(&name("c")), 0, "it has no requests before the new one");
    assert_eq!(flows.timely_before_ns(&name("a")), 30 * SECOND);
    assert_eq!(flows.timely_before_ns(&weighted("b", 200)), 110 * SECOND);
    flows.enter(&name("a"), 5 * SECOND, true, 0);
    assert_eq!(flows.timely_before_ns(&name("a")), 30 * SECOND, "deferred work is not before others");
}
