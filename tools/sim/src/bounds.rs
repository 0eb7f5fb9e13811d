//! Bound of all schedulers that only choose placements: one queue, one unlimited shared cache, free transfers.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use crate::config::{SimConfig, Work};
use crate::outcome::{Outcome, RequestOutcome, RequestStatus};

/// Order in which the queue is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// First come, first served.
    Fcfs,
    /// Shortest of the waiting requests first.
    Shortest,
}

/// Serves `trace` in this order.
#[must_use]
pub fn bound(trace: &[Work], config: &SimConfig, order: Order) -> Outcome {
    let mut known = BTreeSet::new();
    let mut jobs: Vec<(u64, u64, u32)> = Vec::with_capacity(trace.len());
    for work in trace {
        let found = work.blocks.iter().take_while(|block| known.contains(*block)).count() as u32;
        known.extend(work.blocks.iter().copied());
        let cached = (found * config.block_tokens).min(work.input_tokens);
        let arrival_ns = (work.arrival_ns as f64 / config.load) as u64;
        jobs.push((arrival_ns, config.truth.predict_ns(work.input_tokens, cached), cached));
    }
    let mut free: BinaryHeap<Reverse<u64>> = (0..config.prefill).map(|_| Reverse(0)).collect();
    let mut queue: BTreeSet<(u64, usize)> = BTreeSet::new();
    let mut served = vec![None; jobs.len()];
    let (mut next, mut clock) = (0, 0);
    while next < jobs.len() || !queue.is_empty() {
        let Reverse(free_ns) = free.pop().expect("one entry per instance");
        // An instance that was free before the last start was idle for lack of work.
        let mut now = free_ns.max(clock);
        if queue.is_empty() {
            now = now.max(jobs[next].0);
        }
        clock = now;
        while next < jobs.len() && jobs[next].0 <= now {
            let key = if order == Order::Fcfs { next as u64 } else { jobs[next].1 };
            queue.insert((key, next));
            next += 1;
        }
        let (_, at) = queue.pop_first().expect("a request is queued");
        let (arrival_ns, took_ns, cached) = jobs[at];
        free.push(Reverse(now + took_ns));
        served[at] = Some(RequestOutcome {
            status: RequestStatus::Served,
            ttft_ns: now + took_ns - arrival_ns,
            tbt_ns: 0,
            reused_tokens: cached,
            tokens: trace[at].input_tokens,
            prefill_ns: took_ns,
            transfer_ns: 0,
            predicted_ns: now + took_ns - arrival_ns,
            stages: 1,
        });
    }
    let requests = served.into_iter().map(|served| served.expect("all are served")).collect();
    Outcome { requests, ..Outcome::default() }
}
