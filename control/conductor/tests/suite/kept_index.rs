//! Restart of a Conductor with a snapshot of its index: blocks are answered once their publisher has confirmed them,
//! and an answer that is not degraded is what the publisher holds.

use crate::support;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_conductor::conductor::{
    BlockChange, CacheBatch, CacheReport, CacheTaken, CacheWanted, Conductor, Durable, DurableInstance, EventSource,
    FollowedFeed, InstancePart, PoolSnapshot, QueryPrompt, RegisterInstance, StoredTokens,
};
use kvplane_conductor::engine::tokens::{ROOT, token_hash};
use kvplane_conductor::index::{BlockTier, IndexConfig, SnapshotError, Tiers};
use proptest::prelude::*;
use support::{SECOND, asked, batch, config, context, prompt, spec, stored};

/// A Conductor with its durable records and the last snapshots of its pools.
struct Desk {
    conductor: Conductor,
    records: BTreeMap<String, DurableInstance>,
    snapshots: Vec<Vec<u8>>,
}

impl Desk {
    fn new() -> Self {
        Self { conductor: Conductor::new(config(), 0), records: BTreeMap::new(), snapshots: Vec::new() }
    }

    fn register(&mut self, spec: RegisterInstance) {
        self.conductor.register(spec, 0).expect("room");
        self.keep();
    }

    fn cache(&mut self, name: &str, incarnation: u64, batch: CacheBatch) -> CacheTaken {
        let taken = self.conductor.cache(name, incarnation, batch, 0).expect("known");
        self.keep();
        taken
    }

    /// Stores the durable changes, as a host does before it answers.
    fn keep(&mut self) {
        for change in self.conductor.take_durable() {
            match change {
                Durable::Instance(instance) => drop(self.records.insert(instance.spec.instance.clone(), *instance)),
                Durable::Gone(name) => drop(self.records.remove(&*name)),
                Durable::Placement(..) | Durable::Class(..) | Durable::Weight { .. } => {}
            }
        }
    }

    fn take_snapshots(&mut self) {
        let pools = PoolSnapshot::changes(&self.conductor);
        let taken = pools.iter().filter_map(|(pool, _)| PoolSnapshot::take(&mut self.conductor, pool));
        self.snapshots = taken.map(|snapshot| snapshot.encode()).collect();
    }

    /// Kills the process, and starts another one from the records and the snapshots.
    fn restart(&mut self) {
        let mut config = config();
        // Every process draws its own seed.
        config.scheduler.index.seed = 99;
        self.conductor = Conductor::new(config, 1 << 40);
        for record in self.records.values() {
            self.conductor.restore(record.clone(), 0).expect("it was there before");
        }
        for bytes in &self.snapshots {
            let snapshot = PoolSnapshot::decode(bytes).expect("whole");
            snapshot.adopt(&mut self.conductor).expect("within the limits");
        }
    }

    /// Returns the number of blocks of a prompt that an instance is known to hold, and true if it is degraded.
    fn held(&mut self, name: &str, prompt: &[u64]) -> (u32, bool) {
        let found = self.conductor.query(&context(), QueryPrompt::Hashes(prompt), 8, Tiers::SAID).expect("served");
        match found.holders.iter().find(|holding| &*holding.instance == name) {
            Some(holding) => (holding.dram_tokens / support::BLOCK, holding.degraded),
            None => (0, false),
        }
    }
}

fn followed(name: &str) -> RegisterInstance {
    let (publisher, replay, topic) = ("tcp://h:1".to_owned(), "tcp://h:2".to_owned(), String::new());
    RegisterInstance { events: Some(EventSource { publisher, replay, topic }), ..spec(name, InstancePart::Mixed) }
}

#[test]
fn restored_blocks_are_hidden_from_every_answer_until_they_are_confirmed() {
    let mut desk = Desk::new();
    desk.register(spec("p0", InstancePart::Prefill));
    desk.register(spec("p1", InstancePart::Prefill));
    desk.register(spec("d0", InstancePart::Decode));
    desk.cache("p0", 1, batch(0, vec![stored(prompt(1, 10))]));
    desk.cache("p1", 1, batch(0, vec![stored(prompt(1, 4))]));
    desk.take_snapshots();
    desk.restart();
    assert_eq!((desk.held("p0", &prompt(1, 20)), desk.held("p1", &prompt(1, 20))), ((0, true), (0, true)));
    let found = desk.conductor.query(&context(), QueryPrompt::Hashes(&prompt(1, 20)), 8, Tiers::SAID).expect("served");
    assert_eq!(found.pooled_tokens, 0);
    // A request is placed as if nothing was cached, and its promised blocks are not lost by the confirmation.
    let asked = asked("a", prompt(1, 10));
    let reply = desk.conductor.schedule(&asked, 0).expect("good");
    let place = support::assigned(&reply);
    assert_eq!(place.reuse_tokens, 0);
    let shown = |desk: &mut Desk| {
        let rows = desk.conductor.table(0).instances;
        rows.iter().filter_map(|row| row.progress.map(|of| of.unconfirmed)).collect::<Vec<_>>()
    };
    assert_eq!(shown(&mut desk), [true, true]);
    assert_eq!(desk.cache("p0", 1, batch(1, Vec::new())).wanted, CacheWanted::Nothing);
    assert_eq!((desk.held("p0", &prompt(1, 20)), desk.held("p1", &prompt(1, 20))), ((10, false), (0, true)));
    assert_eq!(shown(&mut desk), [false, true]);
    // What p1 published after the snapshot is requested, and its restored blocks stay hidden until all is there.
    let gap = desk.cache("p1", 1, batch(3, vec![stored(prompt(1, 6))]));
    assert_eq!(gap, CacheTaken { next: 1, wanted: CacheWanted::Replay });
    let (lora, salt) = (String::new(), String::new());
    let removed = BlockChange::Removed { lora, salt, tier: None, hashes: prompt(1, 4)[3..].to_vec() };
    desk.cache("p1", 1, batch(1, vec![removed]));
    assert_eq!(desk.held("p1", &prompt(1, 20)), (0, true));
    desk.cache("p1", 1, batch(2, vec![stored(prompt(2, 1))]));
    desk.cache("p1", 1, batch(3, vec![stored(prompt(1, 6)[4..].to_vec())]));
    assert_eq!((desk.held("p1", &prompt(1, 20)), desk.held("p1", &prompt(2, 1))), ((3, false), (1, false)));
    assert_eq!((desk.conductor.counts().confirmed, desk.conductor.counts().dropped), (2, 0));
    // A second restart from a snapshot of the second process.
    desk.take_snapshots();
    desk.restart();
    assert_eq!(desk.cache("p1", 1, batch(4, Vec::new())).wanted, CacheWanted::Nothing);
    assert_eq!(desk.held("p1", &prompt(1, 20)), (3, false));
}

/// Blocks with their contents, by engine hash.
fn with_tokens(hashes: &[u64], contents: &[u64]) -> BlockChange {
    let (hashes, contents) = (hashes.to_vec(), contents.to_vec());
    BlockChange::StoredTokens(StoredTokens { tier: BlockTier::Dram, parent: None, hashes, contents, part_tokens: 0 })
}

fn removed(hashes: &[u64]) -> BlockChange {
    let (lora, salt) = (String::new(), String::new());
    BlockChange::Removed { lora, salt, tier: None, hashes: hashes.to_vec() }
}

#[test]
fn engine_hashes_of_restored_blocks_still_name_them() {
    let mut desk = Desk::new();
    for name in ["p0", "p1"] {
        desk.register(spec(name, InstancePart::Prefill));
    }
    desk.cache("p0", 1, batch(0, vec![with_tokens(&[11, 12, 13], &[1, 2, 3])]));
    // Another engine gives the same blocks other hashes.
    desk.cache("p1", 1, batch(0, vec![with_tokens(&[21, 22], &[1, 2])]));
    desk.take_snapshots();
    desk.restart();
    // Many new blocks of p1 make the aliases of all others be examined while the blocks of p0 are hidden.
    desk.cache("p1", 1, batch(1, Vec::new()));
    for seq in 0..20 {
        let hashes: Vec<u64> = (0..50).map(|at| 1_000 + seq * 50 + at).collect();
        desk.cache("p1", 1, batch(2 + seq, vec![with_tokens(&hashes, &hashes)]));
    }
    assert_eq!(desk.held("p1", &[11, 12, 13]), (2, false), "by the hashes of the other engine");
    assert_eq!(desk.held("p0", &[21, 22]), (0, true));
    desk.cache("p0", 1, batch(1, vec![removed(&[13])]));
    let third = [1, 2, 3].into_iter().fold(ROOT, token_hash);
    assert_eq!((desk.held("p0", &[21, 22]), desk.held("p0", &[11, 12, third])), ((2, false), (2, false)));
    desk.cache("p0", 1, batch(2, vec![removed(&[11, 12])]));
    assert_eq!((desk.held("p0", &[11]), desk.held("p1", &[11])), ((0, false), (1, false)));
}

#[test]
fn an_engine_hash_that_becomes_ambiguous_takes_hidden_blocks_with_it() {
    let mut desk = Desk::new();
    for name in ["p0", "p1"] {
        desk.register(spec(name, InstancePart::Prefill));
    }
    desk.cache("p0", 1, batch(0, vec![with_tokens(&[11, 12], &[1, 2])]));
    desk.cache("p1", 1, batch(0, vec![with_tokens(&[21], &[1])]));
    desk.take_snapshots();
    desk.restart();
    desk.cache("p1", 1, batch(1, vec![with_tokens(&[12], &[7])]));
    // Nothing tells any more which block of p0 this means.
    desk.cache("p0", 1, batch(1, vec![removed(&[12])]));
    let found = desk.conductor.query(&context(), QueryPrompt::Hashes(&[21, 12]), 8, Tiers::SAID).expect("served");
    let held = found.holders.iter().find(|holding| &*holding.instance == "p0").expect("it has the first block");
    assert_eq!(held.dram_tokens, support::BLOCK);
    let second = [1, 2].into_iter().fold(ROOT, token_hash);
    assert_eq!(desk.held("p0", &[11, second]), (1, false), "the removed block is not answered");
}

#[test]
fn a_snapshot_taken_before_the_confirmation_still_has_the_blocks() {
    let mut desk = Desk::new();
    desk.register(spec("p0", InstancePart::Prefill));
    desk.cache("p0", 1, batch(0, vec![stored(prompt(1, 10))]));
    desk.take_snapshots();
    desk.restart();
    desk.take_snapshots();
    desk.restart();
    desk.cache("p0", 1, batch(1, Vec::new()));
    assert_eq!(desk.held("p0", &prompt(1, 20)), (10, false));
}

#[test]
fn followed_instance_is_confirmed_or_dropped_by_the_host() {
    for confirmed in [true, false] {
        let mut desk = Desk::new();
        desk.register(followed("e0"));
        desk.register(RegisterInstance {
            events: Some(EventSource { replay: String::new(), ..followed("e1").events.expect("it has") }),
            ..spec("e1", InstancePart::Mixed)
        });
        for name in ["e0", "e1"] {
            desk.cache(name, 1, batch(0, vec![stored(prompt(1, 10))]));
            FollowedFeed::of(name, 1).set_mark(&mut desk.conductor, 1 << 100 | 5).expect("known");
        }
        desk.take_snapshots();
        desk.restart();
        assert_eq!(FollowedFeed::of("e1", 1).unconfirmed(&mut desk.conductor), None, "no replay could confirm it");
        let position = FollowedFeed::of("e0", 1).unconfirmed(&mut desk.conductor).expect("it waits");
        assert_eq!((position.next, position.mark, position.degraded), (1, Some(1 << 100 | 5), false));
        assert_eq!(FollowedFeed::of("e0", 2).unconfirmed(&mut desk.conductor), None, "another incarnation");
        desk.cache("e0", 1, batch(1, vec![stored(prompt(2, 1))]));
        assert_eq!(desk.held("e0", &prompt(1, 20)), (0, true), "only the host confirms it");
        if confirmed {
            FollowedFeed::of("e0", 1).confirm(&mut desk.conductor).expect("known");
            desk.conductor.reached("e0", 1, 0).expect("known");
            assert_eq!((desk.held("e0", &prompt(1, 20)), desk.held("e0", &prompt(2, 1))), ((10, false), (1, false)));
        } else {
            FollowedFeed::of("e0", 1).drop_unconfirmed(&mut desk.conductor).expect("known");
            assert_eq!((desk.held("e0", &prompt(1, 20)), desk.held("e0", &prompt(2, 1))), ((0, true), (0, true)));
        }
        assert_eq!(FollowedFeed::of("e0", 1).unconfirmed(&mut desk.conductor), None);
    }
}

#[test]
fn unreachable_publisher_and_other_incarnation_lose_their_restored_blocks() {
    let mut desk = Desk::new();
    desk.register(followed("e0"));
    desk.register(spec("p0", InstancePart::Prefill));
    for name in ["e0", "p0"] {
        desk.cache(name, 1, batch(0, vec![stored(prompt(1, 10))]));
        FollowedFeed::of(name, 1).set_mark(&mut desk.conductor, 5).expect("known");
    }
    desk.take_snapshots();
    // An instance restarted before the control plane did: the record is of its later incarnation.
    desk.register(RegisterInstance { incarnation: 2, ..spec("p0", InstancePart::Prefill) });
    desk.restart();
    desk.cache("p0", 2, batch(1, Vec::new()));
    assert_eq!(desk.held("p0", &prompt(1, 20)).0, 0);
    let long_ns = kvplane_conductor::conductor::AWAY_FORGOTTEN_NS;
    assert!(desk.conductor.away("e0", 1, long_ns, long_ns).expect("known"));
    assert_eq!(FollowedFeed::of("e0", 1).unconfirmed(&mut desk.conductor), None);
    FollowedFeed::of("e0", 1).confirm(&mut desk.conductor).expect("known");
    assert_eq!(desk.held("e0", &prompt(1, 20)), (0, true));
    // A clock that went back gives a restarted instance a lower incarnation, which is refused with the known one.
    let back = desk.conductor.register(spec("p0", InstancePart::Prefill), SECOND);
    assert!(back.is_err_and(|error| error.to_string().contains('2')));
}

#[test]
fn damaged_foreign_and_oversized_snapshots_are_refused() {
    let mut desk = Desk::new();
    desk.register(spec("p0", InstancePart::Prefill));
    desk.cache("p0", 1, batch(0, vec![stored(prompt(1, 10))]));
    desk.take_snapshots();
    let whole = desk.snapshots[0].clone();
    assert_eq!(PoolSnapshot::decode(&whole).expect("whole").encode(), whole);
    for end in 0..whole.len() {
        let short = PoolSnapshot::decode(&whole[..end]);
        assert!(short.and_then(|snapshot| snapshot.adopt(&mut fresh(&desk, 64))).is_err(), "cut to {end} bytes");
    }
    let mut later = whole.clone();
    later[4] += 1;
    assert!(matches!(PoolSnapshot::decode(&later), Err(SnapshotError::Format { .. })));
    let small = PoolSnapshot::decode(&whole).expect("whole").adopt(&mut fresh(&desk, 4));
    assert!(matches!(small, Err(SnapshotError::TooLarge { what: "blocks", .. })), "{small:?}");
    // Nobody serves that model any more.
    let nobody = PoolSnapshot::decode(&whole).expect("whole").adopt(&mut Conductor::new(config(), 0));
    assert_eq!(nobody, Ok(0));
}

/// Returns a restarted Conductor whose indexes have room for this many blocks.
fn fresh(desk: &Desk, max_blocks: usize) -> Conductor {
    let mut config = config();
    config.scheduler.index = IndexConfig { max_blocks, ..config.scheduler.index };
    let mut conductor = Conductor::new(config, 0);
    desk.records.values().for_each(|record| conductor.restore(record.clone(), 0).expect("room"));
    conductor
}

/// An engine that reports by calls, and retains some of its batches.
struct Reporter {
    incarnation: u64,
    batches: Vec<Vec<BlockChange>>,
    /// First batch that it can replay.
    retained_from: usize,
    held: BTreeSet<u64>,
}

impl Reporter {
    fn new(incarnation: u64) -> Self {
        Self { incarnation, batches: Vec::new(), retained_from: 0, held: BTreeSet::new() }
    }

    fn spec(&self) -> RegisterInstance {
        RegisterInstance { incarnation: self.incarnation, ..spec("p0", InstancePart::Prefill) }
    }

    /// Changes its cache, and publishes the batch.
    fn publish(&mut self, change: Change) {
        let (lora, salt) = (String::new(), String::new());
        self.batches.push(match change {
            Change::Store(hash) => {
                self.held.insert(hash);
                vec![stored(vec![hash])]
            }
            Change::Remove(hash) => {
                self.held.remove(&hash);
                vec![BlockChange::Removed { lora, salt, tier: None, hashes: vec![hash] }]
            }
            Change::Clear => {
                self.held.clear();
                vec![BlockChange::Cleared]
            }
            Change::Nothing => Vec::new(),
        });
    }

    /// Sends the last batch, and what the Conductor requests then.
    fn deliver(&mut self, desk: &mut Desk) {
        let Some(last) = self.batches.len().checked_sub(1) else { return };
        let mut taken = desk.cache("p0", self.incarnation, batch(last as u64, self.batches[last].clone()));
        while taken.wanted == CacheWanted::Replay && (taken.next as usize) < self.batches.len() {
            let from = taken.next as usize;
            if from < self.retained_from {
                taken.wanted = CacheWanted::Snapshot;
                break;
            }
            taken = desk.cache("p0", self.incarnation, batch(from as u64, self.batches[from].clone()));
        }
        if taken.wanted == CacheWanted::Snapshot {
            self.batches.push(self.held.iter().map(|hash| stored(vec![*hash])).collect());
            let (seq, changes) = (self.batches.len() as u64 - 1, self.batches.last().cloned().unwrap_or_default());
            desk.cache("p0", self.incarnation, CacheBatch { seq, kind: CacheReport::Snapshot, changes });
            // A replay would begin with what this batch holds, and not know that the rest is void.
            self.retained_from = self.batches.len();
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Store(u64),
    Remove(u64),
    Clear,
    Nothing,
}

#[derive(Clone, Debug)]
enum Act {
    Publish(Change),
    /// The reporter drops the batches that it could replay.
    Forget,
    /// The reporter restarts.
    Anew,
    Snapshot,
    /// The control plane is killed; this is published before it serves again.
    Kill(Vec<Change>),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        5 => (0..6u64).prop_map(Change::Store),
        4 => (0..6u64).prop_map(Change::Remove),
        1 => Just(Change::Clear),
        1 => Just(Change::Nothing),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => change().prop_map(Act::Publish),
        1 => Just(Act::Forget),
        1 => Just(Act::Anew),
        3 => Just(Act::Snapshot),
        2 => prop::collection::vec(change(), 0..4).prop_map(Act::Kill),
    ]
}

proptest! {
    #[test]
    fn answers_that_are_not_degraded_are_what_the_instance_holds(acts in prop::collection::vec(act(), 1..60)) {
        let mut desk = Desk::new();
        // An instance that never reported anything is not degraded.
        let begin = |desk: &mut Desk, incarnation| {
            let mut reporter = Reporter::new(incarnation);
            desk.register(reporter.spec());
            reporter.publish(Change::Nothing);
            reporter.deliver(desk);
            reporter
        };
        let mut reporter = begin(&mut desk, 1);
        for act in acts {
            match act {
                Act::Publish(change) => {
                    reporter.publish(change);
                    reporter.deliver(&mut desk);
                    let known = desk.held("p0", &[u64::MAX]);
                    prop_assert!(!known.1, "all that it reported and was asked for is there");
                }
                Act::Forget => reporter.retained_from = reporter.batches.len(),
                Act::Anew => reporter = begin(&mut desk, reporter.incarnation + 1),
                Act::Snapshot => desk.take_snapshots(),
                Act::Kill(changes) => {
                    changes.into_iter().for_each(|change| reporter.publish(change));
                    desk.restart();
                }
            }
            for hash in 0..6 {
                let (blocks, degraded) = desk.held("p0", &[hash]);
                let differs = (blocks > 0) != reporter.held.contains(&hash);
                prop_assert!(!differs || degraded, "block {hash}: {blocks}");
            }
        }
    }
}
