//! Tests of the queue's order, and of the bound on every wait.

use std::cell::RefCell;
use std::sync::OnceLock;

use proptest::prelude::*;

use super::admission::RETRY_STEP_NS;
use super::*;
use crate::index::{ContextId, IndexConfig, PrefixIndex, PromptContext};
use crate::scheduler::{ExcludedInstances, ServiceTerms};

const SECOND: u64 = 1_000_000_000;
const NO_OBJECTIVE: Slo = Slo::NONE;

fn request(id: u64, arrival_s: u64) -> Request {
    static CONTEXT: OnceLock<ContextId> = OnceLock::new();
    let context = *CONTEXT.get_or_init(|| {
        let mut index = PrefixIndex::new(IndexConfig::default()).unwrap();
        index.context(&PromptContext::default()).unwrap()
    });
    let barred = ExcludedInstances::default();
    Request {
        id,
        arrival_ns: arrival_s * SECOND,
        tokens: 100,
        context,
        hashes: [].into(),
        barred,
        terms: ServiceTerms::default(),
        admitted: false,
    }
}

fn order(now_s: u64) -> QueueOrder<'static> {
    let rules = QueueRules { deferred: 0.0, oldest_share: 0.0, ..QueueRules::default() };
    QueueOrder { rules, slo: NO_OBJECTIVE, now_ns: now_s * SECOND, servers: 1, instances: &[] }
}

/// Instances that are free at once.
const FREE: [PlannedInstance; 3] = {
    let free = PlannedInstance { number: 0, free_ns: 0, factor: 1.0 };
    [free, PlannedInstance { number: 1, ..free }, PlannedInstance { number: 2, ..free }]
};

/// Pushes requests that all arrive at second 0, with prefills of so many seconds, numbered from 0.
fn queue(seconds: &[u64], order: &QueueOrder<'_>) -> CentralQueue {
    let mut queue = CentralQueue::new(100, 8);
    for (id, seconds) in seconds.iter().enumerate() {
        queue.push(request(id as u64, 0), seconds * SECOND, order);
    }
    queue
}

fn first(queue: &CentralQueue, order: &QueueOrder<'_>) -> Option<u64> {
    queue.first(order, None).map(|at| queue.at(at).id)
}

#[test]
fn the_shortest_goes_first_while_others_can_wait() {
    let mut queue = queue(&[8, 3, 5], &order(0));
    for expected in [1, 2, 0] {
        assert_eq!(first(&queue, &order(0)), Some(expected));
        queue.remove(expected);
    }
    assert_eq!(first(&queue, &order(0)), None);
}

#[test]
fn the_earliest_deadline_goes_first_when_it_would_be_missed() {
    // Deadlines: 16 s; 19 s, behind the work of the first.
    let queue = queue(&[8, 3], &order(0));
    assert_eq!(first(&queue, &order(5)), Some(1), "the first can be done at 16 s");
    assert_eq!(first(&queue, &order(6)), Some(0), "it would be done at 17 s");
    let two = QueueOrder { servers: 3, ..order(6) };
    assert_eq!(first(&queue, &two), Some(1), "other instances are free sooner");
}

#[test]
fn a_deadline_is_later_behind_a_backlog() {
    let mut queue = queue(&[100], &order(0));
    queue.push(request(1, 0), 20 * SECOND, &order(0));
    queue.push(request(2, 0), SECOND, &order(0));
    // The longest prefill takes 100 s. 20 + 100 + 100 s, and 1 + 100 + 120 s.
    let deadlines: Vec<u64> = queue.waiting.iter().map(|one| one.rank.deadline_ns / SECOND).collect();
    assert_eq!(deadlines, [200, 220, 221]);
}

#[test]
fn the_longest_prefills_make_no_deadlines_later_but_their_own() {
    let rules = QueueRules { deferred: 0.5, ..order(0).rules };
    let queue = queue(&[2, 100, 1], &QueueOrder { rules, ..order(0) });
    // 2 + 2 s, 1 + 2 + 102 s, and 100 + 100 + 2 s.
    let deadlines: Vec<u64> = queue.waiting.iter().map(|one| one.rank.deadline_ns / SECOND).collect();
    assert_eq!(deadlines, [4, 105, 202]);
}

#[test]
fn an_objective_is_the_deadline_and_late_requests_go_last() {
    let slo = Slo { ttft_ns: 30 * SECOND, ..NO_OBJECTIVE };
    let at = |now_s| QueueOrder { slo, instances: &FREE[..1], ..order(now_s) };
    let mut queue = queue(&[20, 4], &at(0));
    // The targets are at 26.25 s: an eighth of the objective is left while nothing is known of delays.
    assert_eq!(first(&queue, &at(2)), Some(1));
    assert_eq!(first(&queue, &at(3)), Some(0), "it would be done at 27 s");
    assert_eq!(first(&queue, &at(11)), Some(1), "the long one is late, and would make the other one late");
    queue.remove(1);
    assert_eq!(first(&queue, &at(11)), Some(0), "late requests are served, too");
    assert_eq!(queue.before(&request(9, 11), SECOND, &at(11)), (1, 20 * SECOND), "and before new ones");
    queue.push(request(2, 11), 9 * SECOND, &at(11));
    assert_eq!(first(&queue, &at(11)), Some(0), "the other one is done at 40 s, its deadline is at 41 s");
    assert_eq!(first(&queue, &at(13)), Some(2), "it would be done at 42 s");
    assert_eq!(queue.before(&request(9, 12), 5 * SECOND, &at(12)), (2, 29 * SECOND), "its deadline is earlier");
    let two = QueueOrder { instances: &FREE[..2], ..at(13) };
    assert_eq!(first(&queue, &two), Some(0), "another instance serves the other one");
}

#[test]
fn the_longest_of_many_are_deferred() {
    let rules = QueueRules { deferred: 0.01, ..order(0).rules };
    let order = QueueOrder { rules, ..order(0) };
    let mut queue = CentralQueue::new(1000, 8);
    for id in 0..200 {
        queue.push(request(id, 0), (1 + id % 10) * SECOND, &order);
        queue.remove(id);
    }
    queue.push(request(200, 0), 11 * SECOND, &order);
    // Were the longest one not deferred, its deadline would be earlier: 21 s instead of 25 s.
    queue.push(request(201, 5), 10 * SECOND, &order);
    let late = QueueOrder { now_ns: 1_000 * SECOND, ..order };
    assert_eq!(first(&queue, &late), Some(201), "the longest one has no deadline to be met");
    assert_eq!(queue.before(&request(202, 0), 12 * SECOND, &order), (2, 21 * SECOND));
    assert_eq!(queue.before(&request(202, 0), 10 * SECOND, &order), (1, 10 * SECOND), "deferred ones are behind");
    assert_eq!(queue.flows.timely_before_ns(&ServiceTerms::default()), 10 * SECOND);
    queue.remove(201);
    assert_eq!((first(&queue, &late), queue.flows.timely_before_ns(&ServiceTerms::default())), (Some(200), 0));
}

#[test]
fn instances_that_requests_exclude_do_not_serve_them() {
    let order = order(0);
    let mut queue = CentralQueue::new(10, 8);
    let barred = ExcludedInstances { prefill: [0].into(), ..ExcludedInstances::default() };
    queue.push(Request { barred, ..request(1, 0) }, SECOND, &order);
    queue.push(request(2, 0), 5 * SECOND, &order);
    let first = |takers: &[u32]| queue.first(&order, Some(takers)).map(|at| queue.at(at).id);
    assert_eq!((first(&[0]), first(&[1]), first(&[])), (Some(2), Some(1), None));
}

/// Returns a request of a flow, with a priority.
fn of_flow(id: u64, flow: &str, priority: i8) -> Request {
    Request { terms: ServiceTerms { flow: flow.into(), priority, ..ServiceTerms::default() }, ..request(id, 0) }
}

#[test]
fn higher_priorities_of_a_flow_go_first() {
    let mut queue = queue(&[1], &order(0));
    queue.push(of_flow(1, "", 1), 5 * SECOND, &order(0));
    queue.push(of_flow(2, "", -1), SECOND, &order(0));
    queue.push(of_flow(3, "", 1), 4 * SECOND, &order(0));
    assert_eq!(queue.before(&of_flow(9, "", 1), SECOND, &order(0)), (0, 0));
    assert_eq!(queue.before(&of_flow(9, "", 0), SECOND, &order(0)), (3, 10 * SECOND));
    assert_eq!(queue.before(&of_flow(9, "", -1), 2 * SECOND, &order(0)), (4, 11 * SECOND));
    for expected in [3, 1, 0, 2] {
        assert_eq!(first(&queue, &order(0)), Some(expected));
        queue.remove(expected);
    }
}

#[test]
fn priorities_of_one_flow_do_not_take_the_share_of_another() {
    let rules = order(0).rules;
    let mut queue = CentralQueue::new(100, 8);
    for id in 0..4 {
        queue.push(of_flow(id, "urgent", 4), SECOND, &order(0));
        queue.push(of_flow(10 + id, "plain", -4), SECOND, &order(0));
    }
    let mut served = Vec::new();
    while let Some(at) = queue.first(&order(0), None) {
        served.push(queue.serve_at(at, None, SECOND, &rules, 0).id / 10);
    }
    assert_eq!(served, [0, 1, 0, 1, 0, 1, 0, 1]);
}

#[test]
fn of_other_flows_only_their_share_is_before_a_request() {
    let mut queue = CentralQueue::new(100, 8);
    (0..10).for_each(|id| queue.push(of_flow(id, "flood", 4), 2 * SECOND, &order(0)));
    queue.push(of_flow(20, "own", 0), 3 * SECOND, &order(0));
    // Its own flow's 3 s, and as much of the flood's.
    let last = of_flow(21, "own", 0);
    assert_eq!(queue.before(&last, 4 * SECOND, &order(0)), (2, 6 * SECOND));
    assert_eq!(queue.before(&last, SECOND, &order(0)), (0, 0), "it is the shortest of its flow");
    assert_eq!(queue.before(&of_flow(22, "new", 0), SECOND, &order(0)), (0, 0));
    assert_eq!(queue.before(&of_flow(23, "flood", 4), 3 * SECOND, &order(0)), (11, 23 * SECOND), "all of it");
}

#[test]
fn a_request_has_an_objective_of_its_own() {
    let mut queue = queue(&[3], &order(0));
    let terms = ServiceTerms { ttft_ns: Some(8 * SECOND), ..ServiceTerms::default() };
    queue.push(Request { terms, ..request(1, 0) }, 6 * SECOND, &order(0));
    let at = |now_s| QueueOrder { instances: &FREE[..1], ..order(now_s) };
    assert_eq!(first(&queue, &at(0)), Some(1), "it would be done at 9 s");
    queue.push(request(2, 0), SECOND, &at(0));
    assert_eq!(first(&queue, &at(0)), Some(2), "it is done at 7 s");
    queue.remove(2);
    // Shorter than that of all requests, or longer.
    let slo = Slo { ttft_ns: 5 * SECOND, ..NO_OBJECTIVE };
    let both = QueueOrder { slo, ..order(0) };
    let terms = ServiceTerms { ttft_ns: Some(20 * SECOND), ..ServiceTerms::default() };
    let rank = queue.rank(&Request { terms, ..request(2, 0) }, SECOND, &both);
    assert_eq!((rank.deadline_ns, rank.promise.is_some()), (20 * SECOND, true));
    assert_eq!(queue.rank(&request(2, 0), SECOND, &both).deadline_ns, 5 * SECOND);
}

/// Returns a request of a flow, with an objective of so many seconds if it is not 0.
fn promised(id: u64, arrival_ns: u64, flow: &str, priority: i8, objective_s: u64) -> Request {
    let ttft_ns = (objective_s > 0).then_some(objective_s * SECOND);
    let terms = ServiceTerms { flow: flow.into(), priority, ttft_ns, ..ServiceTerms::default() };
    Request { arrival_ns, terms, ..request(id, 0) }
}

#[test]
fn an_admitted_request_is_in_time_beside_a_flood_of_a_higher_priority() {
    // The flows are saturated, so they share their turn.
    let rules = QueueRules { saturated_ns: 0, ..order(0).rules };
    let at = |now_s| QueueOrder { rules, instances: &FREE[..1], ..order(now_s) };
    let mut queue = CentralQueue::new(1000, 8);
    (0..100).for_each(|id| queue.push(promised(id, 0, "flood", 4, 0), SECOND, &at(0)));
    let own = promised(200, 0, "own", 0, 16);
    assert_eq!(queue.admission(&own, 2 * SECOND, false, &at(0)), Admission { margin_ns: 2 * SECOND, after_ns: 0 });
    queue.push(own, 2 * SECOND, &at(0));
    for now_s in 0..12 {
        let next = queue.first(&at(now_s), None).expect("some wait");
        assert!(queue.serve_at(next, None, SECOND, &rules, 0).id < 100, "the flood is served while there is time");
    }
    assert_eq!(first(&queue, &at(12)), Some(200), "it is done at 14 s");
}

#[test]
fn a_request_is_admitted_if_all_targets_are_met_with_it() {
    let mut queue = CentralQueue::new(100, 8);
    let at = |now_s| QueueOrder { instances: &FREE[..2], ..order(now_s) };
    let after_s = |queue: &CentralQueue, request: &Request, work_s: u64, at_once| {
        (queue.admission(request, work_s * SECOND, at_once, &at(0)).after_ns + SECOND / 2) / SECOND
    };
    // Targets of 14 s.
    for id in 0..4 {
        let request = promised(id, 0, "", 0, 16);
        assert_eq!(after_s(&queue, &request, 6, false), 0);
        queue.push(request, 6 * SECOND, &at(0));
    }
    let next = promised(9, 0, "", 0, 16);
    assert_eq!(after_s(&queue, &next, 2, false), 0, "it is done at 14 s");
    assert_eq!(after_s(&queue, &next, 6, false), 4, "18 s, and its target is 14 s after its arrival");
    assert_eq!(after_s(&queue, &promised(9, 0, "", 4, 8), 3, false), 8, "before the others, which would be late");
    assert_eq!(after_s(&queue, &promised(9, 0, "other", 0, 32), 6, false), 0, "its target is at 28 s");
    assert_eq!(after_s(&queue, &promised(9, 0, "", 0, 16), 15, false), 3600, "it alone takes too long");
    assert_eq!(after_s(&queue, &promised(9, 0, "", 0, 0), 3, false), 0, "it has no target, and waits");
    assert_eq!(after_s(&queue, &promised(9, 0, "", 0, 0), 3, true), 6, "at once it would delay the last ones");
    assert_eq!(after_s(&queue, &promised(9, 0, "", 0, 0), 2, true), 0);
    // Late ones count before it.
    let later = QueueOrder { now_ns: 40 * SECOND, ..at(0) };
    let next = promised(9, 40 * SECOND, "", 0, 16);
    let after_ns = queue.admission(&next, 6 * SECOND, false, &later).after_ns;
    assert_eq!((after_ns + SECOND / 2) / SECOND, 4);
}

#[test]
fn a_target_that_an_earned_request_may_delay_is_not_delayed_by_new_ones() {
    let rules = QueueRules { oldest_share: 1.0, ..order(0).rules };
    let at = QueueOrder { rules, instances: &FREE[..1], ..order(0) };
    let mut queue = queue(&[1], &at);
    queue.flows.serve(0, SECOND, false, &rules);
    // The oldest one has earned its work: planned first, it lets the other one be done at 15 s instead of 14 s.
    queue.push(promised(1, 0, "", 0, 16), 14 * SECOND, &at);
    let after_ns = |request, work_s| queue.admission(&request, work_s * SECOND, false, &at).after_ns;
    assert!(after_ns(promised(2, 0, "", 0, 8), 1) > 0, "the other one would be done at 16 s");
    assert_eq!(after_ns(promised(3, 0, "", 0, 32), 6), 0, "it goes behind the other one");
}

#[test]
fn a_target_that_is_missed_already_rejects_no_request_that_does_not_delay_it() {
    let rules = QueueRules { oldest_share: 1.0, ..order(0).rules };
    let at = QueueOrder { rules, instances: &FREE[..2], ..order(0) };
    let mut queue = queue(&[1], &at);
    queue.flows.serve(0, SECOND, false, &rules);
    let barring = |barred: u32, request: Request| Request {
        barred: ExcludedInstances { prefill: [barred].into(), ..request.barred },
        ..request
    };
    // Behind the oldest one, which has earned its work, it is done at 15 s instead of 14 s.
    queue.push(barring(1, promised(1, 0, "", 0, 16)), 14 * SECOND, &at);
    let after_ns = |request: Request| queue.admission(&request, SECOND, false, &at).after_ns;
    assert_eq!(after_ns(barring(0, promised(2, 0, "", 0, 8))), 0, "it goes to the other instance");
    assert!(after_ns(barring(1, promised(3, 0, "", 0, 8))) > 0, "the other one would be done at 16 s");
}

/// Instances that serve a queue for as long as predicted.
struct Servers {
    queue: CentralQueue,
    rules: QueueRules,
    /// Times at which the instances are free.
    free_ns: Vec<u64>,
    now_ns: u64,
    /// Requests that are done: number, time.
    done: Vec<(u64, u64)>,
}

impl Servers {
    fn new(count: usize, rules: QueueRules) -> Self {
        let queue = CentralQueue::new(usize::MAX, 8);
        Self { queue, rules, free_ns: vec![0; count], now_ns: 0, done: Vec::new() }
    }

    fn instances(&self) -> Vec<PlannedInstance> {
        let free = self.free_ns.iter().enumerate();
        free.map(|(at, free_ns)| PlannedInstance { number: at as u32, free_ns: *free_ns, factor: 1.0 }).collect()
    }

    fn order<'a>(&self, instances: &'a [PlannedInstance]) -> QueueOrder<'a> {
        let servers = self.free_ns.len() as u64;
        QueueOrder { rules: self.rules, slo: NO_OBJECTIVE, now_ns: self.now_ns, servers, instances }
    }

    /// Serves up to a time.
    fn run_until(&mut self, until_ns: u64) {
        loop {
            let (at, free_ns) = self.free_ns.iter().copied().enumerate().min_by_key(|(_, ns)| *ns).expect("instances");
            self.now_ns = self.now_ns.max(free_ns);
            if self.now_ns > until_ns {
                break;
            }
            let instances = self.instances();
            let Some(next) = self.queue.first(&self.order(&instances), None) else { break };
            let best_ns = self.queue.waiting[next].best_ns;
            let id = self.queue.serve_at(next, None, best_ns, &self.rules, 0).id;
            self.free_ns[at] = self.now_ns + best_ns;
            self.done.push((id, self.free_ns[at]));
        }
        self.now_ns = until_ns;
    }

    /// Returns the time after which a request would be admitted; queues it if that is 0.
    fn offer(&mut self, request: Request, best_ns: u64) -> u64 {
        let instances = self.instances();
        let order = self.order(&instances);
        let after_ns = self.queue.admission(&request, best_ns, false, &order).after_ns;
        if after_ns == 0 {
            self.queue.push(request, best_ns, &order);
        }
        after_ns
    }
}

/// Arrivals of the tests below: seconds since the one before, seconds of prefill, objective, priority, flow.
fn arrivals() -> impl Strategy<Value = Vec<(u64, u64, u64, i8, usize)>> {
    let objective = prop::sample::select(vec![0, 0, 10, 20, 60]);
    prop::collection::vec((0..6_u64, 1..9_u64, objective, -4..5_i8, 0..3_usize), 1..80)
}

#[test]
fn a_late_request_goes_before_those_that_are_admitted_later() {
    let mut servers = Servers::new(1, QueueRules::default());
    assert_eq!(servers.offer(promised(0, 0, "", 0, 20), 15 * SECOND), 0);
    // An instance was lost, so it is late; and others are admitted for as long as it waits.
    servers.free_ns[0] = 12 * SECOND;
    servers.now_ns = SECOND;
    assert!(servers.offer(promised(1, SECOND, "", 0, 30), 2 * SECOND) > 0, "behind the late one it is late");
    assert_eq!(servers.offer(promised(2, SECOND, "", 0, 60), 2 * SECOND), 0);
    servers.run_until(12 * SECOND);
    assert_eq!(servers.done, [(0, 27 * SECOND)]);
}

#[test]
fn targets_of_a_flood_do_not_starve_a_flow_without_objectives() {
    let rules = QueueRules::default();
    let mut servers = Servers::new(1, rules);
    let mut now_ns = 0;
    for id in 0..2_000u64 {
        now_ns += SECOND / 2;
        servers.run_until(now_ns);
        servers.offer(promised(id, now_ns, "flood", 0, 16), SECOND);
        if id % 200 == 100 {
            assert_eq!(servers.offer(promised(10_000 + id, now_ns, "own", 0, 0), SECOND), 0);
        }
    }
    let own: Vec<(u64, u64)> = servers.done.iter().filter(|(id, _)| *id >= 10_000).copied().collect();
    let waits: Vec<u64> = own.iter().map(|(id, done_ns)| done_ns / SECOND - (id - 10_000).div_ceil(2)).collect();
    assert!(waits.len() >= 9 && waits.iter().all(|wait| *wait < 60), "{waits:?} of 10");
    assert!(
        servers
            .done
            .iter()
            .filter(|(id, _)| *id < 2_000)
            .all(|(id, done)| *done <= (id + 1) * SECOND / 2 + 16 * SECOND)
    );
}

#[test]
fn a_flow_whose_requests_no_free_instance_serves_holds_up_no_other() {
    let mut queue = CentralQueue::new(10, 8);
    let barred = ExcludedInstances { prefill: [0].into(), ..ExcludedInstances::default() };
    queue.push(Request { barred, ..of_flow(1, "barred", 0) }, SECOND, &order(0));
    queue.push(of_flow(2, "other", 0), SECOND, &order(0));
    let other = queue.flows.enter(&of_flow(2, "other", 0).terms, SECOND, false, 0);
    queue.flows.serve(other, 100 * SECOND, true, &order(0).rules);
    assert_eq!(queue.first(&order(0), Some(&[0])).map(|at| queue.at(at).id), Some(2));
    assert_eq!(queue.first(&order(0), Some(&[0, 1])).map(|at| queue.at(at).id), Some(1));
}

#[test]
fn a_flow_that_no_free_instance_serves_moves_no_start() {
    let rules = QueueRules { lead_ns: 10 * SECOND, ..QueueRules::default() };
    let order = |now_s| QueueOrder { rules, ..order(now_s) };
    let takers: Option<&[u32]> = Some(&[0]);
    let mut queue = CentralQueue::new(10_000, 8);
    let barred = ExcludedInstances { prefill: [0].into(), ..ExcludedInstances::default() };
    queue.push(Request { barred, ..of_flow(0, "stuck", 0) }, SECOND, &order(0));
    for id in 1..300 {
        queue.push(of_flow(id, "steady", 0), SECOND, &order(id));
        let at = queue.first(&order(id), takers).expect("it is taken");
        assert_eq!(queue.serve_at(at, takers, SECOND, &rules, 0).id, id);
    }
    // A flow that begins now has saved up nothing, nor has the one that was not served.
    (1_000..1_400).for_each(|id| queue.push(of_flow(id, "flood", 4), SECOND, &order(300)));
    queue.push(of_flow(400, "steady", -4), SECOND, &order(300));
    (2_000..2_400).for_each(|id| queue.push(of_flow(id, "stuck", 4), SECOND, &order(300)));
    let mut served = (0..6).map(|_| {
        let at = queue.first(&order(301), takers).expect("it is taken");
        queue.serve_at(at, takers, SECOND, &rules, 0).id
    });
    assert!(served.any(|id| id == 400), "within two turns of each");
}

#[test]
fn a_stream_of_new_flows_does_not_starve_one_that_waits() {
    // A lower priority, and a longer prefill, in a flow that is saturated and in one that is not.
    for saturated_ns in [2 * SECOND, 1_000_000 * SECOND] {
        let rules = QueueRules { saturated_ns, lead_ns: 10 * SECOND, deferred: 0.0, ..QueueRules::default() };
        let order = |now_s| QueueOrder { rules, ..order(now_s) };
        let mut queue = CentralQueue::new(10_000, 64);
        (0..3).for_each(|id| queue.push(of_flow(id, "waits", -4), 2 * SECOND, &order(0)));
        let mut last = 0;
        for step in 1..400 {
            // As many arrive as are served; a few are there before.
            for id in if step == 1 { 4..10 } else { 9 + step..10 + step } {
                queue.push(of_flow(id, &format!("new{id}"), 4), SECOND, &order(step));
            }
            let at = queue.first(&order(step), None).expect("some wait");
            let work_ns = queue.waiting[at].best_ns;
            if queue.serve_at(at, None, work_ns, &rules, 0).id < 3 {
                last = step;
            }
        }
        assert!(queue.get(0).is_none() && queue.get(1).is_none() && queue.get(2).is_none(), "not all were served");
        assert!(last < 150, "the last one at {last}");
    }
}

#[test]
fn the_oldest_is_the_oldest_that_a_free_instance_serves() {
    let rules = QueueRules { oldest_share: 0.1, ..order(0).rules };
    let order = QueueOrder { rules, ..order(0) };
    let takers: Option<&[u32]> = Some(&[0]);
    let mut queue = CentralQueue::new(1_000, 8);
    let barred = ExcludedInstances { prefill: [0].into(), ..ExcludedInstances::default() };
    queue.push(Request { barred, ..of_flow(0, "", 0) }, SECOND, &order);
    (1..101).for_each(|id| queue.push(of_flow(id, "", if id <= 50 { -4 } else { 4 }), SECOND, &order));
    let mut low = 0;
    for _ in 0..40 {
        let at = queue.first(&order, takers).expect("it is taken");
        low += u32::from(queue.serve_at(at, takers, SECOND, &rules, 0).id <= 50);
    }
    assert_eq!(low, 3, "one in eleven is the oldest, whatever its priority");
}

#[test]
fn flows_beyond_the_limit_are_ahead_of_each_other() {
    let mut queue = CentralQueue::new(100, 2);
    queue.push(of_flow(0, "a", 0), SECOND, &order(0));
    queue.push(of_flow(1, "b", 0), 5 * SECOND, &order(0));
    assert_eq!(queue.before(&of_flow(2, "c", 0), 9 * SECOND, &order(0)), (2, 6 * SECOND));
}

/// A full queue of two thousand promised requests on 32 instances is planned once for all calls that find it unchanged;
/// a call plans what is behind its request's place.
#[test]
fn admission_plans_an_unchanged_queue_once() {
    let mut servers = Servers::new(32, QueueRules::default());
    let planned = |servers: &Servers| servers.queue.plan.borrow().planned();
    let mut queued = 0;
    while servers.offer(promised(queued, 0, "", 0, 600), 8 * SECOND) == 0 {
        queued += 1;
    }
    assert!(queued > 2_000, "{queued}");
    let before = planned(&servers);
    assert!(before < queued + 20 * 64, "each is added to the plan of those before: {before} for {queued}");
    // Rejected, with the search for the time to retry after: less than 64 prefills for each time that is tried.
    (0..100).for_each(|id| assert!(servers.offer(promised(9_000 + id, 0, "", 0, 600), 8 * SECOND) > 0));
    let rejected = planned(&servers) - before;
    assert!(rejected < 100 * 20 * 64, "{rejected}");
    // The queue has changed, and half of it is behind this one's place.
    servers.run_until(60 * SECOND);
    let before = planned(&servers);
    assert_eq!(servers.offer(promised(9_999, 60 * SECOND, "", 0, 300), SECOND), 0);
    assert!(planned(&servers) - before < 2 * queued, "{}", planned(&servers) - before);
}

proptest! {
    /// Bound of a wait, whatever arrives later: a request is served before all work served since its arrival exceeds
    /// the work that was there then, its own included, divided by the share of the oldest, and two prefills more.
    #[test]
    fn every_wait_is_bounded_by_the_work_that_was_there(
        arrivals in prop::collection::vec((1..60_u64, 0..3_u8), 1..150),
        share in 0.02..0.5_f64,
        deferred in 0.0..0.2_f64,
    ) {
        let rules = QueueRules { deferred, oldest_share: share, ..QueueRules::default() };
        let order = |now_ns| QueueOrder { rules, slo: NO_OBJECTIVE, now_ns, servers: 4, instances: &[] };
        let mut queue = CentralQueue::new(usize::MAX, 8);
        let longest_ns = 60 * SECOND;
        let (mut served_ns, mut now_ns) = (0_u64, 0_u64);
        let mut limits: Vec<(u64, u64)> = Vec::new();
        let mut serve = |queue: &mut CentralQueue, now_ns: &mut u64, limits: &[(u64, u64)]| {
            let Some(at) = queue.first(&order(*now_ns), None) else { return Ok(()) };
            let best_ns = queue.waiting[at].best_ns;
            let id = queue.serve_at(at, None, best_ns, &rules, 0).id;
            let (began_ns, limit_ns) = limits[id as usize];
            prop_assert!(served_ns - began_ns <= limit_ns, "request {id}: {} > {limit_ns}", served_ns - began_ns);
            served_ns += best_ns;
            *now_ns += best_ns / 4;
            Ok(())
        };
        let mut begun_ns = 0_u64;
        for (id, (seconds, serves)) in arrivals.into_iter().enumerate() {
            let best_ns = seconds * SECOND;
            let arrived = Request { arrival_ns: now_ns, ..request(id as u64, 0) };
            queue.push(arrived, best_ns, &order(now_ns));
            let there_ns: u64 = queue.waiting.iter().map(|one| one.best_ns).sum();
            limits.push((begun_ns, (there_ns as f64 * (1.0 + 1.0 / share)) as u64 + 2 * longest_ns));
            for _ in 0..serves {
                let before: u64 = queue.waiting.iter().map(|one| one.best_ns).sum();
                serve(&mut queue, &mut now_ns, &limits)?;
                begun_ns += before - queue.waiting.iter().map(|one| one.best_ns).sum::<u64>();
            }
        }
        while !queue.is_empty() {
            serve(&mut queue, &mut now_ns, &limits)?;
        }
    }

    /// Requests that are admitted are in time if predictions are right, whatever arrives later, of any flow and any
    /// priority, with an objective or without one.
    #[test]
    fn admitted_requests_are_in_time(arrivals in arrivals(), count in 1..4_usize, oldest in 0.0..0.3_f64) {
        let rules = QueueRules { oldest_share: oldest, saturated_ns: 20 * SECOND, ..QueueRules::default() };
        let mut servers = Servers::new(count, rules);
        let mut targets_ns = Vec::new();
        let mut now_ns = 0;
        for (id, (gap_s, work_s, objective_s, priority, flow)) in arrivals.into_iter().enumerate() {
            now_ns += gap_s * SECOND;
            servers.run_until(now_ns);
            let request = promised(id as u64, now_ns, ["", "a", "b"][flow], priority, objective_s);
            let is_admitted = servers.offer(request, work_s * SECOND) == 0;
            let until_ns = if objective_s > 0 { objective_s * SECOND } else { u64::MAX / 2 };
            targets_ns.push(is_admitted.then_some(now_ns + until_ns));
        }
        servers.run_until(u64::MAX / 4);
        prop_assert!(servers.queue.is_empty());
        prop_assert_eq!(servers.done.len(), targets_ns.iter().flatten().count());
        for (id, done_ns) in servers.done {
            prop_assert!(targets_ns[id as usize].is_some_and(|target_ns| done_ns <= target_ns), "{id} at {done_ns}");
        }
    }

    /// A plan that was kept answers as one that is made anew, to a millisecond.
    #[test]
    fn a_kept_plan_is_that_of_the_queue(arrivals in arrivals(), count in 1..4_usize, barred in 0..4_u32) {
        let rules = QueueRules { oldest_share: 0.1, saturated_ns: 20 * SECOND, ..QueueRules::default() };
        let mut servers = Servers::new(count, rules);
        let mut now_ns = 0;
        for (id, (gap_s, work_s, objective_s, priority, flow)) in arrivals.into_iter().enumerate() {
            now_ns += gap_s * SECOND;
            servers.run_until(now_ns);
            let mut request = promised(id as u64, now_ns, ["", "a", "b"][flow], priority, objective_s);
            if id % 3 == 0 && barred + 1 < count as u32 {
                request.barred.prefill = [barred].into();
            }
            let instances = servers.instances();
            let test = |queue: &CentralQueue| {
                let at_once = id % 5 == 0;
                queue.admission(&request, work_s * SECOND, at_once, &servers.order(&instances)).after_ns
            };
            let kept_ns = test(&servers.queue);
            servers.queue.plan.borrow_mut().discard();
            prop_assert!(kept_ns.abs_diff(test(&servers.queue)) <= RETRY_STEP_NS);
            servers.offer(request, work_s * SECOND);
        }
    }

    /// A rejected request is admitted after the time that it was told, if no other arrives, and not much earlier: with
    /// one instance, and requests with one objective.
    #[test]
    fn the_time_to_retry_after_is_true(arrivals in arrivals(), tenths in 1..10_u64) {
        let (mut now_ns, mut tried) = (0, 0);
        let arrivals: Vec<_> = arrivals.into_iter().enumerate().map(|(id, (gap_s, work_s, ..))| {
            now_ns += gap_s * SECOND;
            (promised(id as u64, now_ns, "", 0, 40), work_s * SECOND)
        }).collect();
        let served = |count: usize| {
            let mut servers = Servers::new(1, QueueRules::default());
            for (request, work_ns) in &arrivals[..count] {
                servers.run_until(request.arrival_ns);
                servers.offer(request.clone(), *work_ns);
            }
            servers
        };
        for (count, (request, work_ns)) in arrivals.iter().enumerate() {
            let mut servers = served(count);
            servers.run_until(request.arrival_ns);
            let after_ns = servers.offer(request.clone(), *work_ns);
            if after_ns == 0 {
                continue;
            }
            tried += 1;
            let retry = |after_ns: u64| {
                let mut servers = served(count);
                let arrival_ns = request.arrival_ns + after_ns;
                servers.run_until(arrival_ns);
                servers.offer(Request { arrival_ns, ..request.clone() }, *work_ns)
            };
            prop_assert_eq!(retry(after_ns), 0, "after {} of {}", after_ns, count);
            let early_ns = after_ns * tenths / 10;
            if after_ns - early_ns > 2 * RETRY_STEP_NS {
                prop_assert!(retry(early_ns).abs_diff(after_ns - early_ns) <= 2 * RETRY_STEP_NS, "{}", count);
            }
            if tried == 5 {
                break;
            }
        }
    }

    /// Bound of a wait that does not depend on other flows: a request of a flow with `share` of the weight of all flows
    /// is served before the prefill time since its arrival exceeds the work of its own flow at its arrival, its own
    /// included, divided by the fraction of the oldest, and by the share; and twice the lead and a longest prefill of
    /// each flow.
    #[test]
    fn the_wait_of_a_flow_has_a_bound_that_others_do_not_change(
        arrivals in prop::collection::vec((1..60_u64, 0..4_usize, -4..5_i8, 0..3_u8), 1..150),
        flood in 0..10_usize,
        weights in prop::array::uniform4(1..400_u32),
        lead_s in 0..300_u64,
        oldest in 0.02..0.5_f64,
    ) {
        const FLOWS: [&str; 4] = ["", "a", "b", "c"];
        let longest_ns = 60 * SECOND;
        let rules = QueueRules { oldest_share: oldest, lead_ns: lead_s * SECOND, ..QueueRules::default() };
        let order = |now_ns| QueueOrder { rules, slo: NO_OBJECTIVE, now_ns, servers: 4, instances: &[] };
        let mut queue = CentralQueue::new(usize::MAX, 8);
        let total = weights.iter().sum::<u32>() as f64;
        let (mut served_ns, mut now_ns) = (0_u64, 0_u64);
        let limits: RefCell<Vec<(u64, f64)>> = RefCell::default();
        let arrive = |queue: &mut CentralQueue, seconds: u64, flow: usize, priority, served_ns, now_ns| {
            let id = limits.borrow().len() as u64;
            let mut arrived = Request { arrival_ns: now_ns, ..of_flow(id, FLOWS[flow], priority) };
            arrived.terms.weight = weights[flow];
            queue.push(arrived, seconds * SECOND, &order(now_ns));
            let own = queue.waiting.iter().filter(|one| *one.request.terms.flow == *FLOWS[flow]);
            let own_ns = own.map(|one| one.best_ns).sum::<u64>() as f64;
            let weight = f64::from(weights[flow]);
            // Work of its flow until it goes; and what flows may be ahead when it arrives and when it goes.
            let needs_ns = own_ns * (1.0 + 1.0 / oldest);
            let ahead_ns = 2.0 * (lead_s * SECOND) as f64 * total / 100.0;
            let longest_of_each_ns = longest_ns as f64 * (1.0 + total / weight) * 4.0;
            limits.borrow_mut().push((served_ns, needs_ns * total / weight + ahead_ns + longest_of_each_ns));
        };
        let serve = |queue: &mut CentralQueue, served_ns: &mut u64, now_ns: &mut u64| {
            let Some(at) = queue.first(&order(*now_ns), None) else { return Ok(()) };
            let best_ns = queue.waiting[at].best_ns;
            let id = queue.serve_at(at, None, best_ns, &rules, 0).id;
            let (began_ns, limit_ns) = limits.borrow()[id as usize];
            let waited_ns = (*served_ns - began_ns) as f64;
            prop_assert!(waited_ns <= limit_ns, "request {id}: {waited_ns} > {limit_ns}");
            *served_ns += best_ns;
            *now_ns += best_ns / 4;
            Ok(())
        };
        for (seconds, flow, priority, serves) in arrivals {
            arrive(&mut queue, seconds, flow, priority, served_ns, now_ns);
            for _ in 0..serves {
                serve(&mut queue, &mut served_ns, &mut now_ns)?;
            }
            // One flow sends many short requests of the highest priority.
            for _ in 0..flood {
                arrive(&mut queue, 1, 3, 4, served_ns, now_ns);
            }
        }
        while !queue.is_empty() {
            serve(&mut queue, &mut served_ns, &mut now_ns)?;
        }
    }
}
