//! Hot prefixes: recently reused ones, in a table of fixed size.

use kvplane_conductor::conductor::{
    BlockChange, CacheBatch, CacheReport, Conductor, ConductorConfig, InstancePart, RegisterInstance, RequestStep,
    Schedule, ScheduleMode, ScheduleReply, StoredTokens,
};
use kvplane_conductor::index::{BlockTier, IndexConfig, PromptContext};
use kvplane_conductor::scheduler::SchedulerConfig;
use kvplane_proto::rng::mix64;
use proptest::prelude::*;

use crate::support::{BLOCK, SECOND, config, spec};

/// Tokens of a block that is fetched rather than computed.
const LONG: u32 = 1 << 16;

fn conductor() -> Conductor {
    let scheduler = config().scheduler;
    let mut conductor = Conductor::new(ConductorConfig { scheduler, ..ConductorConfig::default() }, 0);
    for name in ["p0", "p1"] {
        let spec = RegisterInstance {
            capacity_tokens: 1 << 40,
            report_ns: 0,
            address: String::new(),
            ..spec(name, InstancePart::Mixed)
        };
        conductor.register(spec, 0).expect("room");
    }
    conductor
}

/// Returns a prompt's rolling hashes.
fn prompt(seed: u64, blocks: u64) -> Vec<u64> {
    (0..blocks).map(|at| mix64(seed << 20 | at)).collect()
}

fn hold(conductor: &mut Conductor, instance: &str, seq: u64, hashes: Vec<u64>) {
    let (lora, salt) = (String::new(), String::new());
    let events = vec![BlockChange::Stored { lora, salt, tier: BlockTier::Dram, parent: None, hashes }];
    conductor.cache(instance, 1, CacheBatch { seq, kind: CacheReport::Goes, changes: events }, 0).expect("taken");
}

/// Places and releases a request with these blocks.
fn ask(conductor: &mut Conductor, number: u64, hashes: Vec<u64>, now_ns: u64) {
    let context = PromptContext { model: "m".to_owned(), block_tokens: BLOCK, ..PromptContext::default() };
    let tokens = hashes.len() as u32 * BLOCK;
    let (request, barred) = (format!("r{number}"), Vec::new());
    let asked = Schedule { client: 1, request, context, tokens, hashes, wait_ns: 0, mode: ScheduleMode::Now, barred };
    match conductor.schedule(&asked, now_ns).expect("served") {
        ScheduleReply::Assigned(assigned) => {
            conductor.update(assigned.reservation, RequestStep::Ended, now_ns).expect("booked");
        }
        other => panic!("assigned, not {other:?}"),
    }
}

#[test]
fn hottest_prefix_comes_first_and_decays() {
    let mut conductor = conductor();
    let (head, other) = (prompt(1, 4), prompt(2, 2));
    hold(&mut conductor, "p0", 0, head.clone());
    hold(&mut conductor, "p1", 0, head.clone());
    hold(&mut conductor, "p1", 1, other.clone());
    assert_eq!(conductor.hot(8, 0), vec![], "there were no requests");
    for at in 0..60 {
        // Each prompt has a tail of its own, which no instance holds.
        ask(&mut conductor, at, [head.clone(), prompt(100 + at, 3)].concat(), at * SECOND);
        if at % 4 == 0 {
            ask(&mut conductor, 1_000 + at, other.clone(), at * SECOND);
        }
    }
    let hot = conductor.hot(8, 60 * SECOND);
    let (first, second) = (&hot[0], &hot[1]);
    assert_eq!((hot.len(), first.hash, first.tokens), (2, head[3], 4 * u64::from(BLOCK)));
    assert_eq!((first.holders, first.stored, first.pool.model.as_str()), (2, false, "m"));
    assert_eq!((second.hash, second.holders), (other[1], 1));
    // Sixty requests came in one half-life.
    assert!((25.0..45.0).contains(&first.per_minute), "{}", first.per_minute);
    assert!((3.5..4.5).contains(&(first.per_minute / second.per_minute)));
    assert_eq!(conductor.hot(1, 60 * SECOND).len(), 1);
    let later = conductor.hot(8, 120 * SECOND);
    assert!((later[0].per_minute * 2.0 - first.per_minute).abs() < 1e-6);
    assert_eq!(conductor.hot(8, 3_600 * SECOND), vec![], "requests have ceased");
    // Much later, counts are rescaled.
    ask(&mut conductor, 5_000, other.clone(), 40_000 * SECOND);
    ask(&mut conductor, 5_001, other.clone(), 40_000 * SECOND);
    assert_eq!(conductor.hot(8, 40_000 * SECOND)[0].hash, other[1]);
}

#[test]
fn hot_prefixes_report_the_store() {
    let mut conductor = conductor();
    let head = prompt(3, 2);
    hold(&mut conductor, "p0", 0, head.clone());
    for hash in &head {
        assert!(conductor.pools().store_has(9, "", "m", *hash, true).expect("room"));
    }
    (0..4).for_each(|at| ask(&mut conductor, at, head.clone(), 0));
    let hot = conductor.hot(8, 0);
    assert_eq!((hot.len(), hot[0].holders, hot[0].stored), (1, 1, true));
}

/// Returns a Conductor in which sixteen instances have the head of all prompts, and only the store has the blocks after
/// it.
fn conductor_with_a_store() -> (Conductor, Vec<u64>) {
    let index = IndexConfig { max_blocks: 1 << 10, max_records: 1 << 10, max_holders: 64, max_contexts: 4, seed: 7 };
    // The transfer of a block of 1 MiB takes a sixth of a second.
    let scheduler =
        SchedulerConfig { index, lease_ns: u64::MAX, nic_bytes_s: 6 << 20, ..ConductorConfig::default().scheduler };
    let (mut conductor, prompt) =
        (Conductor::new(ConductorConfig { scheduler, ..ConductorConfig::default() }, 0), prompt(5, 2));
    for at in 0..16 {
        let spec = RegisterInstance {
            token_bytes: 16,
            ..RegisterInstance::new(format!("i{at}"), "m", LONG, InstancePart::Prefill)
        };
        conductor.register(spec, 0).expect("room");
        hold(&mut conductor, &format!("i{at}"), 0, prompt[..1].to_vec());
    }
    for (part, hash) in prompt.iter().enumerate() {
        assert!(conductor.pools().store_has(part as u64, "", "m", *hash, true).expect("room"));
    }
    (conductor, prompt)
}

fn fetch(conductor: &mut Conductor, hashes: &[u64], count: u64) {
    let context = PromptContext { model: "m".to_owned(), block_tokens: LONG, ..PromptContext::default() };
    for number in 0..count {
        let (request, barred, tokens) = (format!("r{number}"), Vec::new(), hashes.len() as u32 * LONG);
        let (context, hashes) = (context.clone(), hashes.to_vec());
        let asked =
            Schedule { client: 1, request, context, tokens, hashes, wait_ns: 0, mode: ScheduleMode::Now, barred };
        let ScheduleReply::Assigned(assigned) = conductor.schedule(&asked, 0).expect("served") else {
            panic!("bound at once")
        };
        assert_eq!(assigned.reuse_tokens, tokens);
        conductor.update(assigned.reservation, RequestStep::Ended, 0).expect("booked");
    }
}

#[test]
fn hot_fetched_prefix_is_replicated_without_the_common_head() {
    let (mut conductor, prompt) = conductor_with_a_store();
    fetch(&mut conductor, &prompt[..1], 200);
    assert_eq!(conductor.copies_wanted(8, 0), vec![], "all instances have it");
    fetch(&mut conductor, &prompt, 100);
    assert_eq!(conductor.copies_wanted(1, 0), vec![], "there is no second node");
    let wanted = conductor.copies_wanted(8, 0);
    assert_eq!(wanted.iter().map(|one| &one.hashes[..]).collect::<Vec<_>>(), [&prompt[1..]]);
    assert_eq!((conductor.copies().coming, conductor.copies().bytes), (1, 1 << 20));
    assert_eq!(conductor.copies_wanted(8, 0), vec![], "a replication is in progress");
    conductor.copy_ended(wanted[0].key, true, 0);
    assert_eq!((conductor.copies().prefixes, conductor.copies().counts.made), (1, 1));
    assert!(conductor.hot(8, 0).iter().all(|row| row.copied == (row.hash == prompt[1])));
    // The prefix has not been fetched for hours.
    assert_eq!(conductor.copies_wanted(8, 3_600 * SECOND), vec![]);
    assert_eq!((conductor.copies().bytes, conductor.copies().counts.forgotten), (0, 1));
}

proptest! {
    /// However many other prefixes there are, a frequent one is found, and never overestimated.
    #[test]
    fn frequent_prefix_survives_a_flood(seed: u64, others in 100u64..400) {
        let mut conductor = conductor();
        let head = prompt(1, 2);
        hold(&mut conductor, "p0", 0, head.clone());
        (0..others).for_each(|at| hold(&mut conductor, "p0", at + 1, prompt(seed % 1_000 + 2 + at, 1)));
        let mut asked = 0;
        for at in 0..others {
            ask(&mut conductor, 2 * at, prompt(seed % 1_000 + 2 + at, 1), at);
            if mix64(seed ^ at).is_multiple_of(2) {
                ask(&mut conductor, 2 * at + 1, head.clone(), at);
                asked += 1;
            }
        }
        let hot = conductor.hot(64, others);
        prop_assert!(hot.len() <= 64);
        let found = hot.iter().find(|row| row.hash == head[1]);
        prop_assert!(found.is_some());
        let most = f64::from(asked) * std::f64::consts::LN_2;
        prop_assert!(found.is_some_and(|row| row.per_minute <= most + 1e-6 && row.per_minute > 0.5));
    }
}

/// The store knows its objects by engine hashes.
#[test]
fn wanted_replicas_have_the_hashes_of_the_store() {
    let (mut conductor, prompt) = conductor_with_a_store();
    let (tier, parent, contents, part_tokens) = (BlockTier::Gpu, None, vec![1, 2], 0);
    let (lora, salt, hashes) = (String::new(), String::new(), prompt.clone());
    let changes = vec![
        BlockChange::StoredTokens(StoredTokens { tier, parent, hashes, contents, part_tokens }),
        BlockChange::Removed { lora, salt, tier: None, hashes: prompt[1..].to_vec() },
    ];
    conductor.cache("i0", 1, CacheBatch { seq: 1, kind: CacheReport::Goes, changes }, 0).expect("taken");
    fetch(&mut conductor, &prompt, 100);
    let wanted = conductor.copies_wanted(8, 0);
    assert_eq!(wanted.iter().map(|one| &one.hashes[..]).collect::<Vec<_>>(), [&prompt[1..]]);
}
