//! Helpers of the Conductor's tests.

#![allow(dead_code, unreachable_pub)] // Not every test file uses everything.

use kvplane_conductor::conductor::{
    Assignment, BlockChange, CacheBatch, CacheReport, Conductor, ConductorConfig, InstancePart, RegisterInstance,
    Schedule, ScheduleMode, ScheduleReply,
};
use kvplane_conductor::index::{BlockTier, IndexConfig, PromptContext};
use kvplane_conductor::scheduler::SchedulerConfig;
use kvplane_proto::rng::mix64;

pub const SECOND: u64 = 1_000_000_000;
pub const BLOCK: u32 = 16;

pub fn config() -> ConductorConfig {
    let index = IndexConfig { max_blocks: 1 << 16, max_records: 1 << 16, max_holders: 64, max_contexts: 4, seed: 7 };
    let scheduler = SchedulerConfig { index, lease_ns: u64::MAX, ..ConductorConfig::default().scheduler };
    ConductorConfig { max_instances: 16, max_requests: 64, scheduler, ..ConductorConfig::default() }
}

pub fn spec(name: &str, part: InstancePart) -> RegisterInstance {
    RegisterInstance {
        capacity_tokens: 1_000_000,
        report_ns: SECOND,
        address: format!("{name}.example:80"),
        ..RegisterInstance::new(name, "m", BLOCK, part)
    }
}

pub fn context() -> PromptContext {
    PromptContext { model: "m".to_owned(), block_tokens: BLOCK, ..PromptContext::default() }
}

/// Returns a prompt's rolling hashes.
pub fn prompt(seed: u64, blocks: usize) -> Vec<u64> {
    (0..blocks as u64).map(|at| mix64(seed << 20 | at)).collect()
}

pub fn asked(request: &str, hashes: Vec<u64>) -> Schedule {
    Schedule {
        client: 1,
        request: request.to_owned(),
        context: context(),
        tokens: hashes.len().max(1) as u32 * BLOCK,
        hashes,
        wait_ns: 0,
        mode: ScheduleMode::Reserve,
        barred: Vec::new(),
    }
}

pub fn stored(hashes: Vec<u64>) -> BlockChange {
    BlockChange::Stored { lora: String::new(), salt: String::new(), tier: BlockTier::Dram, parent: None, hashes }
}

pub fn batch(seq: u64, events: Vec<BlockChange>) -> CacheBatch {
    CacheBatch { seq, kind: CacheReport::Goes, changes: events }
}

pub fn assigned(answer: &ScheduleReply) -> &Assignment {
    match answer {
        ScheduleReply::Assigned(assigned) => assigned,
        other => panic!("assigned, not {other:?}"),
    }
}

pub fn conductor(prefill: usize) -> Conductor {
    let mut conductor = Conductor::new(config(), 0);
    for at in 0..prefill {
        conductor.register(spec(&format!("p{at}"), InstancePart::Prefill), 0).expect("room");
    }
    conductor.register(spec("d0", InstancePart::Decode), 0).expect("room");
    conductor
}
