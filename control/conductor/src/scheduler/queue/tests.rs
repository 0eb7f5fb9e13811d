//! Tests of the queue's order, and of the bound on every wait.

use proptest::prelude::*;

use super::*;
use crate::index::{IndexConfig, PrefixIndex, PromptContext};
use crate::scheduler::ExcludedInstances;

const SECOND: u64 = 1_000_000_000;
const NO_OBJECTIVE: Slo = Slo { ttft_ns: u64::MAX, tbt_ns: u64::MAX };

fn request(id: u64, arrival_s: u64) -> Request {
    let mut index = PrefixIndex::new(IndexConfig::default()).unwrap();
    let context = index.context(&PromptContext::default()).unwrap();
    let barred = ExcludedInstances::default();
    Request { id, arrival_ns: arrival_s * SECOND, tokens: 100, context, hashes: [].into(), barred }
}

fn order(now_s: u64) -> QueueOrder {
    let rules = QueueRules { grace_ns: 10 * SECOND, stretch: 1.0, deferred: 0.0, oldest_share: 0.0 };
    QueueOrder { rules, slo: NO_OBJECTIVE, now_ns: now_s * SECOND, servers: 1 }
}

/// Pushes requests that all arrive at second 0, with prefills of so many seconds, numbered from 0.
fn queue(seconds: &[u64], order: &QueueOrder) -> CentralQueue {
    let mut queue = CentralQueue::new(100);
    for (id, seconds) in seconds.iter().enumerate() {
        queue.push(request(id as u64, 0), seconds * SECOND, order);
    }
    queue
}

fn first(queue: &CentralQueue, order: &QueueOrder) -> Option<u64> {
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
    // Deadlines: 18 s; 21 s, behind the work of the first.
    let queue = queue(&[8, 3], &order(0));
    assert_eq!(first(&queue, &order(7)), Some(1), "the first can be done at 18 s");
    assert_eq!(first(&queue, &order(8)), Some(0), "it would be done at 19 s");
    let two = QueueOrder { servers: 3, ..order(8) };
    assert_eq!(first(&queue, &two), Some(1), "other instances are free sooner");
}

#[test]
fn a_deadline_is_later_behind_a_backlog() {
    let mut queue = queue(&[100], &order(0));
    queue.push(request(1, 0), 20 * SECOND, &order(0));
    queue.push(request(2, 0), SECOND, &order(0));
    // 20 + 10 + 100 s, and 1 + 10 + 120 s.
    let deadlines: Vec<u64> = queue.waiting.iter().map(|one| one.deadline_ns / SECOND).collect();
    assert_eq!(deadlines, [110, 130, 131]);
}

#[test]
fn an_objective_is_the_deadline_and_late_requests_go_last() {
    let slo = Slo { ttft_ns: 30 * SECOND, ..NO_OBJECTIVE };
    let at = |now_s| QueueOrder { slo, ..order(now_s) };
    let mut queue = queue(&[20, 4], &at(0));
    assert_eq!(first(&queue, &at(6)), Some(1));
    assert_eq!(first(&queue, &at(7)), Some(0), "it would be done at 31 s");
    assert_eq!(first(&queue, &at(11)), Some(1), "the long one is late");
    queue.remove(1);
    assert_eq!(first(&queue, &at(11)), Some(0), "late requests are served, too");
    assert_eq!(queue.before(&request(9, 11), SECOND, &at(11)), (0, 0));
    queue.push(request(2, 11), 9 * SECOND, &at(11));
    assert_eq!(queue.before(&request(9, 12), 5 * SECOND, &at(12)), (1, 9 * SECOND), "its deadline is earlier");
}

#[test]
fn the_longest_of_many_are_deferred() {
    let rules = QueueRules { deferred: 0.01, ..order(0).rules };
    let order = QueueOrder { rules, ..order(0) };
    let mut queue = CentralQueue::new(1000);
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
    assert_eq!(queue.timely_ns, 10 * SECOND);
    queue.remove(201);
    assert_eq!((first(&queue, &late), queue.timely_ns), (Some(200), 0));
}

#[test]
fn instances_that_requests_exclude_do_not_serve_them() {
    let order = order(0);
    let mut queue = CentralQueue::new(10);
    let barred = ExcludedInstances { prefill: [0].into(), ..ExcludedInstances::default() };
    queue.push(Request { barred, ..request(1, 0) }, SECOND, &order);
    queue.push(request(2, 0), 5 * SECOND, &order);
    let first = |takers: &[u32]| queue.first(&order, Some(takers)).map(|at| queue.at(at).id);
    assert_eq!((first(&[0]), first(&[1]), first(&[])), (Some(2), Some(1), None));
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
        let order = |now_ns| QueueOrder { rules, slo: NO_OBJECTIVE, now_ns, servers: 4 };
        let mut queue = CentralQueue::new(usize::MAX);
        let longest_ns = 60 * SECOND;
        let (mut served_ns, mut now_ns) = (0_u64, 0_u64);
        let mut limits: Vec<(u64, u64)> = Vec::new();
        let mut serve = |queue: &mut CentralQueue, now_ns: &mut u64, limits: &[(u64, u64)]| {
            let Some(at) = queue.first(&order(*now_ns), None) else { return Ok(()) };
            let best_ns = queue.waiting[at].best_ns;
            let id = queue.serve_at(at, &rules).id;
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
}
