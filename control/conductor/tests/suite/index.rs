//! Prefix index against a naive reference model: a map from every block to its holders.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_conductor::index::{
    ContextId, HolderId, IndexConfig, IndexError, PrefixIndex, PrefixMatches, PromptContext, SnapshotError, Tier, Tiers,
};
use kvplane_proto::rng::{Rng, mix64};
use proptest::prelude::*;

const TIERS: [Tier; 4] = [Tier::Gpu, Tier::Dram, Tier::Ssd, Tier::Pool];

/// Reference model.
#[derive(Default)]
struct Naive {
    blocks: BTreeMap<(ContextId, u64), BTreeSet<(HolderId, Tier)>>,
}

impl Naive {
    fn stored(&mut self, context: ContextId, holder: HolderId, tier: Tier, hashes: &[u64]) {
        for hash in hashes {
            self.blocks.entry((context, *hash)).or_default().insert((holder, tier));
        }
    }

    fn removed(&mut self, context: ContextId, holder: HolderId, tier: Tier, hashes: &[u64]) -> usize {
        let mut gone = 0;
        for hash in hashes {
            if let Some(holders) = self.blocks.get_mut(&(context, *hash)) {
                gone += usize::from(holders.remove(&(holder, tier)));
            }
        }
        gone
    }

    fn retire(&mut self, holder: HolderId) {
        self.blocks.values_mut().for_each(|holders| holders.retain(|(other, _)| *other != holder));
    }

    fn has(&self, context: ContextId, hash: u64, holder: Option<HolderId>, tiers: &[Tier]) -> bool {
        self.blocks.get(&(context, hash)).is_some_and(|holders| {
            holders.iter().any(|(other, tier)| tiers.contains(tier) && holder.is_none_or(|holder| holder == *other))
        })
    }

    fn depth(&self, context: ContextId, hashes: &[u64], holder: Option<HolderId>, tiers: &[Tier]) -> u32 {
        hashes.iter().take_while(|hash| self.has(context, **hash, holder, tiers)).count() as u32
    }
}

struct World {
    index: PrefixIndex,
    naive: Naive,
    rng: Rng,
    contexts: Vec<ContextId>,
    holders: Vec<HolderId>,
    found: PrefixMatches,
    /// True if an index that this one was restored from had evicted blocks.
    has_forgotten: bool,
}

fn key(tenant: usize) -> PromptContext {
    PromptContext { tenant: format!("t{tenant}"), model: "m".into(), block_tokens: 16, ..PromptContext::default() }
}

impl World {
    fn new(seed: u64, holders: usize, config: IndexConfig) -> Self {
        let mut index = PrefixIndex::new(config).unwrap();
        let contexts = (0..2).map(|tenant| index.context(&key(tenant)).unwrap()).collect();
        let holders = (0..holders).map(|_| index.register().unwrap()).collect();
        let rng = Rng::new(seed, "index");
        let (naive, found) = (Naive::default(), PrefixMatches::default());
        Self { index, naive, rng, contexts, holders, found, has_forgotten: false }
    }

    /// Returns a prompt: one of few first blocks, then stretches that sometimes diverge.
    fn prompt(&mut self) -> Vec<u64> {
        let blocks = 1 + self.rng.below(60);
        let mut path = self.rng.below(2);
        let mut hashes = Vec::new();
        for at in 0..blocks {
            if at % 7 == 3 && self.rng.chance(0.3) {
                path = path * 3 + self.rng.below(3);
            }
            let before = hashes.last().copied().unwrap_or(0);
            hashes.push(mix64(before ^ mix64(path << 32 | at)));
        }
        hashes
    }

    fn holder(&mut self) -> HolderId {
        self.holders[self.rng.below(self.holders.len() as u64) as usize]
    }

    fn step(&mut self) {
        let context = self.contexts[self.rng.below(2) as usize];
        let prompt = self.prompt();
        let holder = self.holder();
        let tier = TIERS[(self.rng.below(8) as usize).min(3) / 2 * 2 + self.rng.below(2) as usize];
        match self.rng.below(20) {
            0..=11 => {
                // Sometimes only a part, or with a gap.
                let from = if self.rng.chance(0.2) { self.rng.below(prompt.len() as u64) as usize } else { 0 };
                let parent = (from > 0 && self.rng.chance(0.8)).then(|| prompt[from - 1]);
                self.index.stored(context, holder, tier, parent, &prompt[from..]).unwrap();
                self.naive.stored(context, holder, tier, &prompt[from..]);
            }
            12..=18 => {
                let from = self.rng.below(prompt.len() as u64) as usize;
                let limit = if self.rng.chance(0.5) { 3 } else { 60 };
                let most = self.rng.below(limit) as usize;
                let mut gone: Vec<u64> = prompt[from..].iter().take(most).copied().collect();
                if self.rng.chance(0.5) {
                    gone.reverse();
                }
                let outcome = self.index.removed(context, holder, tier, &gone).unwrap();
                let held = self.naive.removed(context, holder, tier, &gone);
                let forgetful = self.index.stats().forgotten_blocks > 0 || self.has_forgotten;
                assert!(outcome.removed_blocks == held || forgetful && outcome.removed_blocks < held);
            }
            _ if self.rng.chance(0.1) => {
                self.index.retire(holder).unwrap();
                self.naive.retire(holder);
                assert_eq!(self.index.retire(holder), Err(IndexError::UnknownHolder));
                let at = self.holders.iter().position(|other| *other == holder).unwrap();
                self.holders[at] = self.index.register().unwrap();
            }
            _ => {}
        }
    }

    /// Looks up a prompt in both, and compares the results.
    fn ask(&mut self) {
        let context = self.contexts[self.rng.below(2) as usize];
        let prompt = self.prompt();
        let most = [1, 3, 8, 1000][self.rng.below(4) as usize];
        let (tiers, set) = match self.rng.below(3) {
            0 => (Tiers::OWN, &TIERS[..3]),
            1 => (Tiers::ALL, &TIERS[..]),
            _ => (Tiers::only(Tier::Gpu), &TIERS[..1]),
        };
        self.index.find(context, &prompt, most, tiers, &mut self.found).unwrap();
        let mut expected: Vec<u32> =
            self.holders.iter().map(|holder| self.naive.depth(context, &prompt, Some(*holder), set)).collect();
        expected.sort_unstable_by(|a, b| b.cmp(a));
        expected.retain(|depth| *depth > 0);
        expected.truncate(most);
        let matches = self.found.matches();
        assert_eq!(matches.iter().map(|found| found.blocks).collect::<Vec<_>>(), expected, "of {most}");
        let different: BTreeSet<HolderId> = matches.iter().map(|found| found.holder).collect();
        assert_eq!(different.len(), matches.len());
        for found in matches {
            assert_eq!(self.naive.depth(context, &prompt, Some(found.holder), set), found.blocks);
            let near = self.index.blocks_within(&self.found, found.holder, Tiers::only(Tier::Gpu));
            assert_eq!(self.naive.depth(context, &prompt, Some(found.holder), &TIERS[..1]), near);
        }
        let anybody = self.index.held_by_anybody(context, &prompt, tiers).unwrap();
        assert_eq!(anybody, self.naive.depth(context, &prompt, None, set));
    }
}

fn small(max_blocks: usize) -> IndexConfig {
    IndexConfig { max_blocks, max_records: 1 << 20, max_holders: 160, max_contexts: 4, seed: 5 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn index_matches_the_reference_model(seed: u64, holders in 1_usize..140) {
        let mut world = World::new(seed, holders, small(1 << 16));
        for _ in 0..400 {
            (0..6).for_each(|_| world.step());
            world.ask();
        }
        prop_assert_eq!(world.index.stats().forgotten_blocks, 0);
        // An index restored from a snapshot is equal, and continues to work.
        let snapshot = world.index.snapshot();
        world.index = PrefixIndex::restore(small(1 << 16), &snapshot).unwrap();
        for _ in 0..60 {
            world.ask();
            world.step();
        }
    }

    /// However full: a reported holder has the block, and everything can be removed again.
    #[test]
    fn full_index_evicts_and_never_invents_holders(seed: u64) {
        let mut world = World::new(seed, 100, IndexConfig { max_records: 300, ..small(200) });
        for _ in 0..1500 {
            world.step();
            let prompt = world.prompt();
            let context = world.contexts[0];
            world.index.find(context, &prompt, 8, Tiers::OWN, &mut world.found).unwrap();
            for found in world.found.matches() {
                prop_assert!(found.blocks <= world.naive.depth(context, &prompt, Some(found.holder), &TIERS[..3]));
            }
        }
        let stats = world.index.stats();
        prop_assert!(stats.forgotten_blocks > 0 && stats.blocks <= 200, "{stats:?}");
        for holder in std::mem::take(&mut world.holders) {
            world.index.retire(holder).unwrap();
        }
        for _ in 0..160 {
            world.index.register().unwrap();
        }
        prop_assert_eq!((world.index.stats().blocks, world.index.stats().records), (0, 0));
    }

    #[test]
    fn restore_never_panics(mut bytes: Vec<u8>, at: u64, flip: u8) {
        prop_assert!(PrefixIndex::restore(small(64), &bytes).is_err());
        let mut world = World::new(at, 20, small(4096));
        (0..60).for_each(|_| world.step());
        bytes = world.index.snapshot();
        let at = (at % bytes.len() as u64) as usize;
        bytes[at] ^= flip;
        prop_assert_eq!(PrefixIndex::restore(small(4096), &bytes).is_err(), flip != 0);
    }
}

#[test]
fn exceeded_limits_are_errors_with_numbers() {
    let refused = PrefixIndex::new(IndexConfig { max_holders: 0, ..IndexConfig::default() });
    assert!(refused.is_err_and(|error| error.to_string().contains("max_holders is 0; it must be 1 to 8192")));
    let mut index = PrefixIndex::new(IndexConfig { max_contexts: 1, max_holders: 1, ..small(64) }).unwrap();
    let context = index.context(&key(0)).unwrap();
    assert_eq!(index.context(&key(0)), Ok(context));
    assert_eq!(index.context(&key(1)), Err(IndexError::TooManyContexts { most: 1 }));
    let holder = index.register().unwrap();
    assert_eq!(index.register(), Err(IndexError::TooManyHolders { most: 1 }));
    index.stored(context, holder, Tier::Gpu, None, &[1, 2, 3, 4, 5]).unwrap();
    assert!(matches!(PrefixIndex::restore(small(4), &index.snapshot()), Err(SnapshotError::TooLarge { .. })));
    let mut later = index.snapshot();
    later[4] += 1;
    assert!(matches!(PrefixIndex::restore(small(64), &later), Err(SnapshotError::Format { .. })), "another version");
    index.retire(holder).unwrap();
    let again = index.register().unwrap();
    assert_ne!(again, holder);
    assert_eq!(index.stored(context, holder, Tier::Gpu, None, &[1]), Err(IndexError::UnknownHolder));
    assert_eq!(index.stats().blocks, 0, "its slot was freed by a sweep");
}

/// A run in the place of another, whose first block happens to be in the prompt where the other one began.
#[test]
fn run_that_replaced_another_is_no_continuation_of_a_prompt() {
    let mut index = PrefixIndex::new(small(64)).unwrap();
    let context = index.context(&key(0)).unwrap();
    let [one, other] = [(); 2].map(|()| index.register().unwrap());
    index.stored(context, one, Tier::Gpu, None, &[1, 2, 3, 4, 5, 6]).unwrap();
    index.stored(context, other, Tier::Gpu, None, &[1, 2, 3, 4, 17, 18]).unwrap();
    index.removed(context, other, Tier::Gpu, &[17, 18]).unwrap();
    index.stored(context, one, Tier::Gpu, None, &[38, 39]).unwrap();
    let mut found = PrefixMatches::default();
    index.find(context, &[1, 2, 27, 28, 38, 39], 1, Tiers::OWN, &mut found).unwrap();
    assert_eq!(found.best_blocks(), 2);
    index.find(context, &[1, 2, 3, 4, 17, 18], 2, Tiers::OWN, &mut found).unwrap();
    assert_eq!(found.matches().iter().map(|found| found.blocks).collect::<Vec<_>>(), [4, 4]);
}

#[test]
fn snapshot_of_an_earlier_version_is_refused() {
    let mut snapshot = PrefixIndex::new(small(64)).unwrap().snapshot();
    assert_eq!(snapshot[..8], *b"KVPX\x02\0\0\0");
    snapshot[4] = 1;
    assert!(matches!(PrefixIndex::restore(small(64), &snapshot), Err(SnapshotError::Format { .. })));
}

/// A million tokens in blocks of sixteen, and a head that every instance has.
#[test]
fn long_prompts_and_universal_heads() {
    let config = IndexConfig { max_blocks: 1 << 18, max_holders: 1000, ..IndexConfig::default() };
    let mut index = PrefixIndex::new(config).unwrap();
    let context = index.context(&key(0)).unwrap();
    let long: Vec<u64> = (0..62_500).map(|at| mix64(at + 7)).collect();
    let holders: Vec<HolderId> = (0..1000).map(|_| index.register().unwrap()).collect();
    for (at, holder) in holders.iter().enumerate() {
        index.stored(context, *holder, Tier::Gpu, None, &long[..100 + at % 3]).unwrap();
    }
    index.stored(context, holders[500], Tier::Gpu, Some(long[101]), &long[102..]).unwrap();
    let mut found = PrefixMatches::default();
    index.find(context, &long, 4, Tiers::OWN, &mut found).unwrap();
    let depths: Vec<u32> = found.matches().iter().map(|found| found.blocks).collect();
    assert_eq!(depths, [62_500, 102, 102, 102]);
    assert_eq!(found.matches()[0].holder, holders[500]);
    assert!(index.stats().records < 200, "a set, not a list: {:?}", index.stats());
}

/// Guesses of runs that were evicted, cut and replaced, with wrong parents, and with snapshots in between.
#[test]
fn full_index_that_is_restored_again_and_again_never_invents_holders() {
    for seed in 0..12_u64 {
        let (blocks, records) = ([40, 200, 700, 3000][seed as usize % 4], [30, 300, 5000][seed as usize % 3]);
        let config = IndexConfig { max_records: records, ..small(blocks) };
        let mut world = World::new(seed, [3, 20, 100][(seed / 4) as usize % 3], config);
        for round in 0..600 {
            (0..=round % 5).for_each(|_| world.step());
            if world.rng.chance(0.2) {
                let context = world.contexts[world.rng.below(2) as usize];
                let (one, other, holder) = (world.prompt(), world.prompt(), world.holder());
                let from = world.rng.below(other.len() as u64) as usize;
                let parent = one[world.rng.below(one.len() as u64) as usize];
                world.index.stored(context, holder, Tier::Gpu, Some(parent), &other[from..]).unwrap();
                world.naive.stored(context, holder, Tier::Gpu, &other[from..]);
            }
            for context in world.contexts.clone() {
                let prompt = world.prompt();
                let most = [1, 3, 8, 1000][world.rng.below(4) as usize];
                world.index.find(context, &prompt, most, Tiers::ALL, &mut world.found).unwrap();
                for found in world.found.matches() {
                    assert!(found.blocks <= world.naive.depth(context, &prompt, Some(found.holder), &TIERS), "{seed}");
                    for tier in TIERS {
                        let within = world.index.blocks_within(&world.found, found.holder, Tiers::only(tier));
                        assert!(within <= world.naive.depth(context, &prompt, Some(found.holder), &[tier]), "{seed}");
                    }
                }
                let anybody = world.index.held_by_anybody(context, &prompt, Tiers::ALL).unwrap();
                assert!(anybody <= world.naive.depth(context, &prompt, None, &TIERS), "{seed}");
            }
            if round % 97 == 5 {
                world.has_forgotten |= world.index.stats().forgotten_blocks > 0;
                world.index = PrefixIndex::restore(config, &world.index.snapshot()).unwrap();
            }
        }
        let stats = world.index.stats();
        assert!(stats.blocks <= blocks && stats.records <= records + 64, "{seed}: {stats:?}");
        for holder in std::mem::take(&mut world.holders) {
            world.index.retire(holder).unwrap();
        }
        for _ in 0..160 {
            world.index.register().unwrap();
        }
        assert_eq!((world.index.stats().blocks, world.index.stats().records), (0, 0), "{seed}");
    }
}

/// As after a restart without a snapshot: the lists of all runs grow together, and leave their former places behind.
#[test]
fn holders_that_report_one_after_the_other_take_little_more_memory() {
    const PROMPTS: u64 = 20_000;
    let config = IndexConfig { max_blocks: 1 << 20, ..IndexConfig::default() };
    let mut index = PrefixIndex::new(config).unwrap();
    let context = index.context(&key(0)).unwrap();
    let mut used = Vec::new();
    for _ in 0..6 {
        let holder = index.register().unwrap();
        for prompt in 0..PROMPTS {
            let hashes: Vec<u64> = (0..24).map(|at| mix64(prompt << 8 | at)).collect();
            index.stored(context, holder, Tier::Gpu, None, &hashes).unwrap();
        }
        used.push(index.stats().used_bytes);
    }
    let records = 6 * PROMPTS as usize;
    assert_eq!(index.stats().records, records);
    assert!(used[5] - used[0] <= 20 * records, "{used:?}");
}
