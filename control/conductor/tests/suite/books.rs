//! Effects of a booking on caches: promised blocks, and tokens ever routed to an instance.

use std::sync::Arc;

use kvplane_conductor::index::{ContextId, PromptContext, Tier};
use kvplane_conductor::policy::{Choice, Fetch, LateBinding, Placement};
use kvplane_conductor::scheduler::{ExcludedInstances, Request, Scheduler, SchedulerConfig, ServiceTerms};

const BLOCK: u32 = 512;

/// Returns a scheduler with two instances, the first of which has the first 8 blocks of every prompt.
fn scheduler() -> (Scheduler, ContextId) {
    let config = SchedulerConfig { block_tokens: BLOCK, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(config, Box::new(LateBinding::default())).unwrap();
    let key = PromptContext { tenant: "t".into(), block_tokens: BLOCK, ..PromptContext::default() };
    let context = scheduler.context(&key).unwrap();
    scheduler.add_prefill().unwrap();
    scheduler.add_prefill().unwrap();
    scheduler.stored(0, context, Tier::Dram, None, &(0..8).collect::<Vec<u64>>()).unwrap();
    (scheduler, context)
}

/// Returns a request with a prompt of this many blocks.
fn request(id: u64, context: ContextId, blocks: u64) -> Request {
    let hashes: Arc<[u64]> = (0..blocks).collect();
    let tokens = blocks as u32 * BLOCK;
    Request {
        id,
        arrival_ns: 0,
        tokens,
        context,
        hashes,
        barred: ExcludedInstances::default(),
        terms: ServiceTerms::default(),
        admitted: false,
    }
}

fn placed(prefill: usize, reuse: u32, fetch: Fetch) -> Choice {
    Choice::Place(Placement { prefill, decode: None, reuse, fetch, wait_ns: 0, prefill_ns: 1, group: None })
}

/// Returns the promised tokens of such a prompt on the second instance, and the tokens routed there.
fn seen(scheduler: &Scheduler, context: ContextId, blocks: u64) -> (u32, u64) {
    let (prefill, ..) = scheduler.explain(&request(99, context, blocks), 0);
    (prefill[1].held / BLOCK, prefill[1].routed_size / u64::from(BLOCK))
}

#[test]
fn only_kept_blocks_are_promised() {
    let all = 12 * BLOCK;
    for (fetch, reuse, held) in [
        (Fetch::Nothing, 0, 12),
        (Fetch::Pool { keep: true }, 8 * BLOCK, 12),
        // The first eight blocks pass through: those behind them are of no use without them.
        (Fetch::Pool { keep: false }, 8 * BLOCK, 0),
        (Fetch::One(0), 8 * BLOCK, 12),
    ] {
        let (mut scheduler, context) = scheduler();
        scheduler.commit(request(1, context, 12), &placed(1, reuse, fetch), 0).unwrap();
        assert_eq!(seen(&scheduler, context, 12).0, held, "{fetch:?}, {reuse} of {all} tokens");
    }
}

#[test]
fn common_prefixes_count_once_as_routed() {
    let (mut scheduler, context) = scheduler();
    for (id, blocks, size) in [(1, 4, 4), (2, 4, 4), (3, 12, 12), (4, 6, 12)] {
        scheduler.commit(request(id, context, blocks), &placed(1, 0, Fetch::Nothing), 0).unwrap();
        assert_eq!(seen(&scheduler, context, blocks).1, size, "after prompt {id}");
    }
}
