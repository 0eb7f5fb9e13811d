//! Blocks that are found by tokens: engines of any hash scheme and seed, as their events tell tokens.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_conductor::conductor::{
    BlockChange, CacheBatch, CacheReport, Conductor, ConductorError, EventSource, InstancePart, InstanceSpec,
    QueryPrompt, RegisterInstance, RequestStep, ScheduleMode, ScheduleReply, StoredTokens,
};
use kvplane_conductor::engine::hashes::vllm;
use kvplane_conductor::engine::tokens::{BlockInputs, TokenPrompt};
use kvplane_conductor::index::{BlockTier, PromptContext, Tiers};
use kvplane_proto::rng::mix64;
use proptest::prelude::*;

use crate::support::{asked, assigned, batch, config, context, spec, stored};

/// Tokens per block in these tests.
const SIZE: u32 = 4;

/// Hash scheme of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scheme {
    /// `sha256_cbor` of vLLM with a seed.
    Vllm(&'static str),
    /// A rolling hash with a seed, which nobody else can compute.
    Opaque(u64),
    /// The tokens of each page alone, as SGLang before rolling hashes.
    Pages,
}

impl Scheme {
    /// Returns the hashes of a prompt's blocks, the last of which may be partial.
    fn hashes(self, tokens: &[u32]) -> Vec<u64> {
        match self {
            Self::Vllm(seed) => {
                let mut hashes = vllm(tokens, SIZE as usize, seed, "", "");
                if !tokens.len().is_multiple_of(SIZE as usize) {
                    hashes.push(vllm(tokens, tokens.len(), seed, "", "")[0]);
                }
                hashes
            }
            Self::Opaque(seed) => {
                let mut hash = mix64(seed << 32);
                let roll = |block: &[u32]| {
                    block.iter().for_each(|token| hash = mix64(hash ^ u64::from(*token)));
                    hash = mix64(hash ^ block.len() as u64);
                    hash
                };
                tokens.chunks(SIZE as usize).map(roll).collect()
            }
            Self::Pages => {
                let page = |block: &[u32]| block.iter().fold(7, |hash, token| mix64(hash ^ u64::from(*token)));
                tokens.chunks(SIZE as usize).map(page).collect()
            }
        }
    }
}

/// Returns the event of the blocks of a prompt from `from` on.
fn told(scheme: Scheme, tokens: &[u32], from: usize, tier: BlockTier) -> BlockChange {
    let hashes = scheme.hashes(tokens);
    let contents = tokens.chunks(SIZE as usize).map(|block| BlockInputs::default().content(block)).collect::<Vec<_>>();
    let parent = from.checked_sub(1).map(|before| hashes[before]);
    let part_tokens = tokens.len() as u32 % SIZE;
    let (hashes, contents) = (hashes[from..].to_vec(), contents[from..].to_vec());
    BlockChange::StoredTokens(StoredTokens { tier, parent, hashes, contents, part_tokens })
}

fn gone(hashes: &[u64]) -> BlockChange {
    BlockChange::Removed { lora: String::new(), salt: String::new(), tier: None, hashes: hashes.to_vec() }
}

/// Engines of one model.
struct Engines {
    conductor: Conductor,
    /// Number of the next batch, by engine.
    seqs: BTreeMap<String, u64>,
}

impl Engines {
    fn new(names: &[&str], blocks: usize) -> Self {
        let mut config = config();
        config.scheduler.index.max_blocks = blocks;
        let mut conductor = Conductor::new(config, 0);
        for name in names {
            let (publisher, replay, topic) = ("tcp://h:1".to_owned(), String::new(), String::new());
            let events = Some(EventSource { publisher, replay, topic });
            let call = RegisterInstance { block_tokens: SIZE, report_ns: 0, events, ..spec(name, InstancePart::Mixed) };
            conductor.register(InstanceSpec { has_vllm_hashes: *name == "vllm", ..call.into() }, 0).expect("room");
            conductor.reached(name, 1, 0).expect("registered");
        }
        Self { conductor, seqs: BTreeMap::new() }
    }

    fn tell(&mut self, name: &str, changes: Vec<BlockChange>) {
        let seq = self.seqs.entry(name.to_owned()).or_default();
        self.conductor.cache(name, 1, batch(*seq, changes), 0).expect("taken");
        *seq += 1;
    }

    fn context() -> PromptContext {
        PromptContext { block_tokens: SIZE, ..context() }
    }

    /// Returns the tokens that each engine holds of a prompt, in its memory or nearer.
    fn ask(&mut self, prompt: QueryPrompt<'_>) -> BTreeMap<String, u32> {
        let found = self.conductor.query(&Self::context(), prompt, 64, Tiers::SAID).expect("served");
        found.holders.iter().map(|held| (held.instance.to_string(), held.dram_tokens)).collect()
    }

    fn by_tokens(&mut self, tokens: &[u32]) -> BTreeMap<String, u32> {
        self.ask(QueryPrompt::Tokens(&TokenPrompt::new(tokens, SIZE as usize, "", ""), &[]))
    }

    fn by_hashes(&mut self, hashes: &[u64]) -> BTreeMap<String, u32> {
        self.ask(QueryPrompt::Hashes(hashes))
    }

    fn mismatched(&self) -> bool {
        let key = RegisterInstance { block_tokens: SIZE, ..spec("", InstancePart::Mixed) }.pool();
        self.conductor.has_unfindable_blocks(&key)
    }
}

fn held(held: &[(&str, u32)]) -> BTreeMap<String, u32> {
    held.iter().map(|(name, tokens)| ((*name).to_owned(), *tokens)).collect()
}

const A: Scheme = Scheme::Opaque(1);
const B: Scheme = Scheme::Opaque(2);

#[test]
fn engines_with_different_seeds_share_one_index() {
    let mut engines = Engines::new(&["a", "b", "vllm"], 1 << 10);
    let tokens: Vec<u32> = (0..14).collect();
    engines.tell("a", vec![told(A, &tokens[..12], 0, BlockTier::Gpu)]);
    engines.tell("b", vec![told(B, &tokens[..8], 0, BlockTier::Dram)]);
    engines.tell("vllm", vec![told(Scheme::Vllm("0"), &tokens[..4], 0, BlockTier::Gpu)]);
    let all = held(&[("a", 12), ("b", 8), ("vllm", 4)]);
    assert_eq!(engines.by_tokens(&tokens), all);
    // The hashes of any engine find the blocks of all, as far as that engine told them.
    assert_eq!(engines.by_hashes(&A.hashes(&tokens)[..3]), all);
    let hashes = TokenPrompt::new(&tokens, SIZE as usize, "", "").hashes().to_vec();
    assert_eq!(engines.by_hashes(&hashes), all, "token hashes are hashes as well");
    assert_eq!(engines.by_hashes(&B.hashes(&tokens)), held(&[("a", 8), ("b", 8), ("vllm", 4)]));
    assert_eq!(engines.by_tokens(&tokens[..7]), held(&[("a", 4), ("b", 4), ("vllm", 4)]));
    assert_eq!(engines.by_tokens(&tokens[..3]), held(&[]), "shorter than a block");
    assert_eq!(engines.by_tokens(&tokens[1..]), held(&[]));
    let other = TokenPrompt::new(&tokens, SIZE as usize, "adapter", "");
    assert_eq!(engines.ask(QueryPrompt::Tokens(&other, &[])), held(&[]));
    // A request with the hashes of one engine is placed by the blocks of all.
    let call = asked("r", B.hashes(&tokens[..8]));
    let call = kvplane_conductor::conductor::Schedule { context: Engines::context(), tokens: 8, ..call };
    let answer = engines.conductor.schedule(&call, 0).expect("good");
    assert_eq!((assigned(&answer).reuse_tokens, &*assigned(&answer).prefill), (8, "a"));
    // Engine "a" drops the second block by its own hash.
    engines.tell("a", vec![gone(&A.hashes(&tokens[..8])[1..])]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 4), ("b", 8), ("vllm", 4)]));
    assert!(!engines.mismatched() && engines.conductor.counts().by_hash_only == 0);
}

#[test]
fn an_engine_may_change_its_hash_scheme() {
    let mut engines = Engines::new(&["a"], 1 << 10);
    let tokens: Vec<u32> = (0..12).collect();
    engines.tell("a", vec![told(A, &tokens[..8], 0, BlockTier::Gpu)]);
    // In the midst of a prompt, then from its beginning.
    engines.tell("a", vec![told(B, &tokens, 2, BlockTier::Gpu)]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 8)]), "the parent's new hash is not known");
    assert_eq!(engines.conductor.counts().by_hash_only, 1);
    assert!(engines.mismatched());
    engines.tell("a", vec![told(B, &tokens, 0, BlockTier::Gpu)]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 12)]));
    // Either hash removes a block.
    engines.tell("a", vec![gone(&A.hashes(&tokens[..8])[1..])]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 4)]));
    engines.tell("a", vec![gone(&B.hashes(&tokens)[..1])]);
    assert_eq!(engines.by_tokens(&tokens), held(&[]));
    engines.tell("a", vec![BlockChange::Cleared, told(B, &tokens[..4], 0, BlockTier::Gpu)]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 4)]));
    assert!(!engines.mismatched());
}

#[test]
fn blocks_without_tokens_are_found_by_their_hashes() {
    let mut engines = Engines::new(&["a", "b", "vllm"], 1 << 10);
    let tokens: Vec<u32> = (0..12).collect();
    let plain = |scheme: Scheme, tokens: &[u32]| stored(scheme.hashes(tokens));
    engines.tell("vllm", vec![plain(Scheme::Vllm("0"), &tokens)]);
    assert!(!engines.mismatched(), "these hashes can be computed");
    engines.tell("a", vec![plain(A, &tokens[..8])]);
    assert!(engines.mismatched());
    assert_eq!(engines.by_tokens(&tokens), held(&[]));
    assert_eq!(engines.by_hashes(&A.hashes(&tokens)), held(&[("a", 8)]));
    let (prompt, hashes) = (TokenPrompt::new(&tokens, SIZE as usize, "", ""), Scheme::Vllm("0").hashes(&tokens));
    assert_eq!(engines.ask(QueryPrompt::Tokens(&prompt, &hashes)), held(&[("vllm", 12)]));
    assert_eq!(engines.conductor.counts().by_hash_only, 5);
    // An engine with the same hashes tells the tokens: all blocks with these hashes are found from then on.
    engines.tell("b", vec![told(A, &tokens, 0, BlockTier::Gpu)]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 8), ("b", 12)]));
    assert_eq!(engines.by_hashes(&A.hashes(&tokens)), held(&[("a", 8), ("b", 12)]));
    engines.tell("a", vec![gone(&A.hashes(&tokens[..8])[1..])]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 4), ("b", 12)]));
    // What follows without tokens is found by hash, behind the blocks that are found by tokens.
    let longer: Vec<u32> = (0..16).collect();
    let hashes = A.hashes(&longer);
    let after = BlockChange::Stored {
        lora: String::new(),
        salt: String::new(),
        tier: BlockTier::Gpu,
        parent: Some(hashes[2]),
        hashes: hashes[3..].to_vec(),
    };
    engines.tell("b", vec![after]);
    assert_eq!(engines.by_hashes(&hashes), held(&[("a", 4), ("b", 16)]));
    assert_eq!(engines.by_tokens(&longer), held(&[("a", 4), ("b", 12)]));
}

#[test]
fn partial_blocks_count_the_tokens_that_they_hold() {
    let mut engines = Engines::new(&["a", "b"], 1 << 10);
    let tokens: Vec<u32> = (0..12).collect();
    engines.tell("a", vec![told(A, &tokens[..10], 0, BlockTier::Gpu)]);
    engines.tell("b", vec![told(B, &tokens[..3], 0, BlockTier::Dram)]);
    for (asked, a, b) in [(12, 10, 3), (10, 10, 3), (9, 8, 3), (8, 8, 3), (3, 0, 3)] {
        let found = engines.by_tokens(&tokens[..asked]);
        let tokens = |name: &str| found.get(name).copied().unwrap_or(0);
        assert_eq!((tokens("a"), tokens("b")), (a, b), "of {asked} tokens");
    }
    assert_eq!(engines.by_tokens(&tokens[..2]), held(&[]));
    let hashes = A.hashes(&tokens[..10]);
    assert_eq!(engines.by_hashes(&hashes), held(&[("a", 10)]));
    assert_eq!(engines.by_hashes(&hashes[..2]), held(&[("a", 8)]));
    assert_eq!(engines.by_hashes(&B.hashes(&tokens[..3])), held(&[("b", 3)]));
    // Tiers are told apart.
    let found = TokenPrompt::new(&tokens, SIZE as usize, "", "");
    let found = engines.conductor.query(&Engines::context(), QueryPrompt::Tokens(&found, &[]), 4, Tiers::SAID);
    let found = found.expect("served").holders;
    let rows: Vec<_> = found.iter().map(|held| (held.gpu_tokens, held.dram_tokens, held.ssd_tokens)).collect();
    assert_eq!(rows, [(10, 10, 10), (0, 3, 3)]);
    // Only removals of the partial block itself remove it.
    engines.tell("a", vec![gone(&hashes[2..])]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 8), ("b", 3)]));
    engines.tell("b", vec![gone(&B.hashes(&tokens[..3]))]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 8)]));
    // Behind an unknown parent a partial block is not known at all, as it would count as a full one.
    engines.tell("b", vec![told(Scheme::Opaque(9), &tokens[..10], 1, BlockTier::Gpu)]);
    let hashes = Scheme::Opaque(9).hashes(&tokens[..10]);
    assert_eq!((engines.by_hashes(&hashes[1..2]), engines.by_hashes(&hashes[2..])), (held(&[("b", 4)]), held(&[])));
    // A request reuses full blocks only.
    engines.tell("b", vec![told(A, &tokens[..10], 0, BlockTier::Gpu)]);
    let call = asked("r", A.hashes(&tokens[..10]));
    let call = kvplane_conductor::conductor::Schedule { context: Engines::context(), tokens: 10, ..call };
    assert_eq!(assigned(&engines.conductor.schedule(&call, 0).expect("good")).reuse_tokens, 8);
}

/// Older versions of SGLang hash the tokens of a page alone: one hash, several blocks.
#[test]
fn a_hash_that_names_several_blocks_counts_for_none() {
    let mut engines = Engines::new(&["a", "b"], 1 << 10);
    let page = |parent: Option<u64>, hash: u64, token: u32| {
        let contents = vec![BlockInputs::default().content(&[token; SIZE as usize])];
        let (tier, hashes, part_tokens) = (BlockTier::Gpu, vec![hash], 0);
        BlockChange::StoredTokens(StoredTokens { tier, parent, hashes, contents, part_tokens })
    };
    let prompt = |pages: &[u32]| pages.iter().flat_map(|token| [*token; SIZE as usize]).collect::<Vec<_>>();
    engines.tell("a", vec![page(None, 1, 1), page(Some(1), 2, 2)]);
    assert_eq!(engines.by_tokens(&prompt(&[1, 2])), held(&[("a", 8)]));
    // The page 2 again, at the beginning of another prompt.
    engines.tell("a", vec![page(None, 2, 2), page(Some(2), 3, 3)]);
    assert_eq!(engines.by_tokens(&prompt(&[1, 2])), held(&[("a", 4)]));
    assert_eq!(engines.by_tokens(&prompt(&[2, 3])), held(&[]));
    engines.tell("a", vec![gone(&[2])]);
    assert_eq!(engines.by_tokens(&prompt(&[1, 2])), held(&[("a", 4)]));
    engines.tell("b", vec![page(None, 2, 2)]);
    assert_eq!(engines.by_tokens(&prompt(&[2])), held(&[]));
    assert_eq!(engines.by_hashes(&[2]), held(&[]), "nothing tells which of its blocks is meant");
}

/// Page of one token, with a hash that covers nothing before it.
fn page(parent: Option<u64>, pages: &[(u64, u32)]) -> BlockChange {
    let contents = pages.iter().map(|(_, token)| BlockInputs::default().content(&[*token; SIZE as usize])).collect();
    let hashes = pages.iter().map(|(hash, _)| *hash).collect();
    BlockChange::StoredTokens(StoredTokens { tier: BlockTier::Gpu, parent, hashes, contents, part_tokens: 0 })
}

fn pages(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().flat_map(|token| [*token; SIZE as usize]).collect()
}

#[test]
fn an_ambiguous_hash_ends_what_is_answered_by_hashes() {
    let mut engines = Engines::new(&["a", "b"], 1 << 10);
    engines.tell("b", vec![page(None, &[(9, 9)]), page(Some(9), &[(2, 2)])]);
    engines.tell("a", vec![page(None, &[(9, 9)]), page(None, &[(1, 1)]), page(Some(1), &[(2, 2)])]);
    // It has the block 2 behind 1, and not behind 9.
    assert_eq!(engines.by_hashes(&[9, 2]).get("a"), Some(&4));
}

#[test]
fn a_page_that_is_repeated_within_an_event_can_be_removed() {
    let mut engines = Engines::new(&["a"], 1 << 10);
    engines.tell("a", vec![page(None, &[(2, 2), (1, 1), (2, 2)])]);
    engines.tell("a", vec![gone(&[1]), gone(&[2]), gone(&[2])]);
    assert_eq!(engines.by_tokens(&pages(&[2])), held(&[]));
    assert_eq!(engines.by_tokens(&pages(&[2, 1])), held(&[]));
}

#[test]
fn blocks_behind_an_ambiguous_page_are_not_taken_for_others() {
    let mut engines = Engines::new(&["a", "b"], 1 << 10);
    engines.tell("a", vec![page(None, &[(1, 1)]), page(Some(1), &[(2, 2)]), page(Some(2), &[(3, 3)])]);
    engines.tell("b", vec![page(None, &[(9, 9)]), page(Some(9), &[(2, 2)]), page(Some(2), &[(3, 3)])]);
    engines.tell("b", vec![page(None, &[(101, 1), (102, 2)])]);
    assert_eq!(engines.by_tokens(&pages(&[1, 2, 3])).get("b"), Some(&8), "it has 3 behind 9 and 2 only");
    let mut engines = Engines::new(&["a"], 1 << 10);
    engines.tell("a", vec![page(None, &[(5, 5)])]);
    for (parent, hash) in [(None, 2), (Some(2), 5), (Some(5), 2), (Some(2), 7)] {
        engines.tell("a", vec![page(parent, &[(hash, hash as u32)])]);
    }
    assert!(engines.by_tokens(&pages(&[2, 7])).get("a").is_none_or(|tokens| *tokens <= 4));
}

#[test]
fn a_full_table_of_hashes_costs_tokens_but_no_truth() {
    let mut engines = Engines::new(&["a", "b", "c"], 8);
    let tokens: Vec<u32> = (0..12).collect();
    let c = Scheme::Opaque(3);
    for (name, scheme) in [("a", A), ("b", B), ("c", c)] {
        engines.tell(name, vec![told(scheme, &tokens, 0, BlockTier::Gpu)]);
    }
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 12), ("b", 12), ("c", 8)]), "room for eight hashes");
    assert_eq!(engines.by_hashes(&c.hashes(&tokens)), held(&[("a", 8), ("b", 8), ("c", 12)]));
    assert_eq!((engines.conductor.counts().by_hash_only, engines.conductor.hash_aliases()), (1, 8));
    engines.tell("c", vec![gone(&c.hashes(&tokens))]);
    assert_eq!(engines.by_hashes(&c.hashes(&tokens)), held(&[("a", 8), ("b", 8)]));
    // Hashes of blocks that nobody holds any more make room.
    for name in ["a", "b", "c"] {
        engines.tell(name, vec![BlockChange::Cleared]);
    }
    engines.tell("c", vec![told(c, &tokens[..8], 0, BlockTier::Gpu), told(c, &tokens, 2, BlockTier::Gpu)]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("c", 12)]));
    assert_eq!(engines.conductor.counts().by_hash_only, 1);
}

#[test]
fn blocks_of_the_store_are_found_by_tokens() {
    let mut engines = Engines::new(&["a", "b"], 1 << 10);
    let tokens: Vec<u32> = (0..12).collect();
    let hashes = A.hashes(&tokens);
    let put = |engines: &mut Engines, block: usize, there| {
        assert!(engines.conductor.pools().store_has(9, "", "m", hashes[block], there).expect("room"));
    };
    let in_store = |engines: &mut Engines| {
        let prompt = TokenPrompt::new(&tokens, SIZE as usize, "", "");
        let context = Engines::context();
        let mut stored = |prompt| {
            let found = engines.conductor.query_with_store(&context, prompt, 64, Tiers::SAID).expect("served");
            assert!(found.holders.iter().all(|holder| holder.dram_tokens >= found.stored_tokens), "{found:?}");
            assert!(found.stored_tokens == 0 || found.holders.len() == 2, "both prefill: {found:?}");
            found.stored_tokens
        };
        (stored(QueryPrompt::Tokens(&prompt, &[])), stored(QueryPrompt::Hashes(&hashes)))
    };
    // Blocks that the store reports before the engine does, and after.
    put(&mut engines, 0, true);
    assert_eq!(in_store(&mut engines), (0, 4));
    engines.tell("a", vec![told(A, &tokens, 0, BlockTier::Gpu)]);
    assert_eq!(in_store(&mut engines), (4, 4));
    put(&mut engines, 1, true);
    assert_eq!(in_store(&mut engines), (8, 8));
    put(&mut engines, 0, false);
    assert_eq!(in_store(&mut engines), (0, 0));
    put(&mut engines, 0, true);
    engines.conductor.pools().store_cleared(9);
    assert_eq!(in_store(&mut engines), (0, 0));
}

#[test]
fn a_request_is_the_same_after_its_hashes_became_known() {
    let mut engines = Engines::new(&["a"], 1 << 10);
    let tokens: Vec<u32> = (0..8).collect();
    let call = kvplane_conductor::conductor::Schedule {
        context: Engines::context(),
        tokens: 8,
        mode: ScheduleMode::Now,
        ..asked("r", A.hashes(&tokens))
    };
    let first = engines.conductor.schedule(&call, 0).expect("good");
    engines.tell("a", vec![told(A, &tokens, 0, BlockTier::Gpu)]);
    let again = engines.conductor.schedule(&call, 0).expect("the same request");
    assert!(matches!(again, ScheduleReply::Assigned(_)));
    assert_eq!(assigned(&first).reservation, assigned(&again).reservation);
}

/// The queued request has the hashes of the time when it came.
#[test]
fn a_queued_request_finds_blocks_whose_tokens_became_known_meanwhile() {
    let mut engines = Engines::new(&["a"], 1 << 14);
    let tokens: Vec<u32> = (0..4_000).collect();
    let call = |name: &str, tokens: &[u32]| kvplane_conductor::conductor::Schedule {
        context: Engines::context(),
        tokens: tokens.len() as u32,
        ..asked(name, A.hashes(tokens))
    };
    let first = engines.conductor.schedule(&call("first", &tokens[..3_000]), 0).expect("good");
    let first = assigned(&first).reservation;
    let second = engines.conductor.schedule(&call("second", &tokens), 0).expect("good");
    assert!(matches!(second, ScheduleReply::Queued { .. }), "{second:?}");
    engines.tell("a", vec![told(A, &tokens[..3_000], 0, BlockTier::Gpu)]);
    engines.conductor.update(first, RequestStep::Ended, 0).expect("booked");
    let second = engines.conductor.schedule(&call("second", &tokens), 0).expect("good");
    assert_eq!(assigned(&second).reuse_tokens, 3_000);
    engines.tell("a", vec![gone(&A.hashes(&tokens[..3_000])[1..])]);
    for third in [engines.by_tokens(&tokens), engines.by_hashes(&A.hashes(&tokens))] {
        assert_eq!(third, held(&[("a", 4)]));
    }
}

#[test]
fn malformed_contents_change_nothing() {
    let mut engines = Engines::new(&["a"], 1 << 10);
    let tokens: Vec<u32> = (0..8).collect();
    let BlockChange::StoredTokens(good) = told(A, &tokens, 0, BlockTier::Gpu) else { panic!("tokens") };
    let fewer = StoredTokens { contents: good.contents[..1].to_vec(), ..good.clone() };
    let long = StoredTokens { part_tokens: SIZE, ..good.clone() };
    let none = StoredTokens { part_tokens: 1, hashes: vec![], contents: vec![], ..good.clone() };
    for bad in [fewer, long, none] {
        let changes = vec![BlockChange::StoredTokens(good.clone()), BlockChange::StoredTokens(bad.clone())];
        let batch = CacheBatch { seq: 0, kind: CacheReport::Goes, changes };
        let refused = engines.conductor.cache("a", 1, batch, 0);
        assert!(matches!(refused, Err(ConductorError::Bad { .. })), "{bad:?}: {refused:?}");
        assert_eq!(engines.by_tokens(&tokens), held(&[]));
    }
    engines.tell("a", vec![BlockChange::StoredTokens(good)]);
    assert_eq!(engines.by_tokens(&tokens), held(&[("a", 8)]));
}

/// Contexts come with their first event. Those beyond the most, two here, share one, with hashes of their own.
#[test]
fn events_of_contexts_that_nobody_named_before_concern_no_other() {
    let mut engines = Engines::new(&["a"], 1 << 10);
    let change = |lora: &str, there: bool| {
        let (lora, salt, hashes) = (lora.to_owned(), String::new(), vec![1, 2]);
        match there {
            true => BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes },
            false => BlockChange::Removed { lora, salt, tier: None, hashes },
        }
    };
    let names = ["one", "two", "three", "four"];
    for name in names {
        engines.tell("a", vec![change(name, true)]);
    }
    engines.tell("a", vec![change("five", false)]);
    let held_in = |engines: &mut Engines| {
        [names[0], names[1], names[2], names[3], "five", ""].map(|name| {
            let context = PromptContext { lora: name.to_owned(), ..Engines::context() };
            let found = engines.conductor.query(&context, QueryPrompt::Hashes(&[1, 2]), 4, Tiers::SAID);
            found.expect("served").holders.iter().map(|holder| holder.gpu_tokens).sum::<u32>()
        })
    };
    assert_eq!(held_in(&mut engines), [8, 8, 8, 8, 0, 0]);
    engines.tell("a", vec![change("three", false)]);
    assert_eq!(held_in(&mut engines), [8, 8, 0, 8, 0, 0]);
    let refused = engines.conductor.cache("nobody", 1, batch(0, vec![change("one", false)]), 0);
    assert!(matches!(refused, Err(ConductorError::UnknownInstance { .. })), "{refused:?}");
    assert_eq!(held_in(&mut engines), [8, 8, 0, 8, 0, 0]);
}

/// Step of an engine.
#[derive(Clone, Debug)]
enum Step {
    /// Computes a prompt, and caches it.
    Compute(usize, Vec<u32>),
    /// Evicts one of its blocks.
    Evict(usize, prop::sample::Index),
    /// Clears its cache.
    Clear(usize),
    /// Hashes by another scheme from now on; its cache stays.
    Rehash(usize),
}

const NAMES: [&str; 4] = ["vllm", "seeded", "sglang", "tensorrt"];

/// An engine and its cache: which prefixes it holds, with their hashes.
struct Reference {
    scheme: Scheme,
    partial: bool,
    cache: BTreeMap<Vec<u32>, BTreeSet<u64>>,
}

impl Reference {
    /// Returns the tokens of a prompt's prefix that it holds.
    fn tokens(&self, prompt: &[u32]) -> u32 {
        let size = SIZE as usize;
        let whole = (1..=prompt.len() / size).take_while(|blocks| self.cache.contains_key(&prompt[..blocks * size]));
        let start = whole.count() * size;
        let rest = (start + 1..=prompt.len().min(start + size - 1)).rev();
        rest.into_iter().find(|end| self.cache.contains_key(&prompt[..*end])).unwrap_or(start) as u32
    }

    /// Computes a prompt; returns the event.
    fn compute(&mut self, tokens: &[u32], tier: BlockTier) -> Option<BlockChange> {
        let size = SIZE as usize;
        let end = if self.partial { tokens.len() } else { tokens.len() / size * size };
        let tokens = &tokens[..end];
        let hashes = self.scheme.hashes(tokens);
        let ends = (1..=hashes.len()).map(|blocks| (blocks * size).min(end));
        let ends: Vec<usize> = ends.collect();
        // An engine tells the blocks behind those that it found in its cache, by the hashes that it has now.
        let is_cached =
            |at: usize| self.cache.get(&tokens[..ends[at]]).is_some_and(|named| named.contains(&hashes[at]));
        let from = (0..hashes.len()).take_while(|at| is_cached(*at)).count();
        (from < hashes.len()).then(|| {
            for at in from..hashes.len() {
                self.cache.entry(tokens[..ends[at]].to_vec()).or_default().insert(hashes[at]);
            }
            told(self.scheme, tokens, from, tier)
        })
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let prompt = prop::collection::vec(0u32..2, 1..22);
    let step = prop_oneof![
        6 => (0..NAMES.len(), prompt).prop_map(|(engine, tokens)| Step::Compute(engine, tokens)),
        3 => (0..NAMES.len(), any::<prop::sample::Index>()).prop_map(|(engine, which)| Step::Evict(engine, which)),
        1 => (0..NAMES.len()).prop_map(Step::Clear),
        1 => (0..NAMES.len()).prop_map(Step::Rehash),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    /// One model with four schemes, asked by tokens, answers as a naive reference does.
    #[test]
    fn tokens_find_what_every_engine_holds(
        steps in steps(),
        prompts in prop::collection::vec(prop::collection::vec(0u32..2, 0..24), 4),
    ) {
        let mut engines = Engines::new(&NAMES, 1 << 10);
        let schemes = [Scheme::Vllm("0"), Scheme::Opaque(1), Scheme::Opaque(2), Scheme::Opaque(3)];
        let reference = |at: usize| Reference { scheme: schemes[at], partial: at >= 2, cache: BTreeMap::new() };
        let mut references = [0, 1, 2, 3].map(reference);
        let mut seed = 10;
        for step in steps {
            match step {
                Step::Compute(at, tokens) => {
                    let tier = if tokens.len() % 2 == 0 { BlockTier::Gpu } else { BlockTier::Dram };
                    if let Some(change) = references[at].compute(&tokens, tier) {
                        engines.tell(NAMES[at], vec![change]);
                    }
                }
                Step::Evict(at, which) => {
                    let cache = &mut references[at].cache;
                    if cache.is_empty() {
                        continue;
                    }
                    let prefix = cache.keys().nth(which.index(cache.len())).expect("within").clone();
                    let named = cache.remove(&prefix).expect("held");
                    engines.tell(NAMES[at], vec![gone(&named.into_iter().collect::<Vec<_>>())]);
                }
                Step::Clear(at) => {
                    references[at].cache.clear();
                    engines.tell(NAMES[at], vec![BlockChange::Cleared]);
                }
                Step::Rehash(at) => {
                    seed += 1;
                    references[at].scheme = Scheme::Opaque(seed);
                }
            }
        }
        prop_assert_eq!(engines.conductor.counts().by_hash_only, 0);
        for prompt in prompts {
            let found = engines.by_tokens(&prompt);
            for (name, reference) in NAMES.iter().zip(&references) {
                let held = found.get(*name).copied().unwrap_or(0);
                prop_assert_eq!(held, reference.tokens(&prompt), "{} {:?}", name, prompt);
            }
            for reference in &references {
                let asked = reference.scheme.hashes(&prompt);
                for (name, tokens) in engines.by_hashes(&asked) {
                    let at = NAMES.iter().position(|known| *known == name).expect("known");
                    prop_assert!(tokens <= references[at].tokens(&prompt));
                }
            }
        }
    }
}

/// Returns the event of blocks that moved to another tier.
fn moved(hashes: &[u64], from: BlockTier, to: BlockTier) -> BlockChange {
    BlockChange::Moved { from, to, hashes: hashes.to_vec() }
}

/// TensorRT-LLM tells of a block that moved only its hash: not how many tokens it covers.
#[test]
fn a_block_that_moved_counts_as_before_or_not_at_all() {
    let mut engines = Engines::new(&["a", "b"], 1 << 10);
    let tokens: Vec<u32> = (0..10).collect();
    let hashes = A.hashes(&tokens);
    engines.tell("a", vec![told(A, &tokens, 0, BlockTier::Gpu)]);
    engines.tell("a", vec![moved(&hashes, BlockTier::Gpu, BlockTier::Dram)]);
    let rows = |engines: &mut Engines| {
        let found = engines.conductor.query(&Engines::context(), QueryPrompt::Hashes(&hashes), 4, Tiers::SAID);
        let held = found.expect("served").holders;
        held.iter().map(|held| (held.gpu_tokens, held.dram_tokens)).collect::<Vec<_>>()
    };
    assert_eq!(rows(&mut engines), [(0, 10)]);
    // From a tier that it is not in, and of an engine that has not reported it.
    engines.tell("a", vec![moved(&hashes, BlockTier::Ssd, BlockTier::Gpu)]);
    engines.tell("b", vec![moved(&hashes, BlockTier::Gpu, BlockTier::Dram)]);
    assert_eq!(rows(&mut engines), [(0, 10)]);
    // Between two levels that both count as memory.
    engines.tell("a", vec![moved(&hashes, BlockTier::Dram, BlockTier::Dram)]);
    assert_eq!(rows(&mut engines), [(0, 10)]);
    engines.tell("a", vec![gone(&hashes)]);
    // Nobody has it any more, so its alias may be gone: it is no full block.
    engines.tell("a", vec![moved(&hashes[2..], BlockTier::Gpu, BlockTier::Dram)]);
    assert_eq!((engines.by_hashes(&hashes), engines.by_hashes(&hashes[2..])), (held(&[]), held(&[])));
    // The table of aliases is full: the partial block of the third engine has none.
    let mut engines = Engines::new(&["a", "b"], 6);
    engines.tell("a", vec![told(A, &tokens, 0, BlockTier::Gpu)]);
    engines.tell("b", vec![told(B, &tokens, 0, BlockTier::Gpu)]);
    let c = Scheme::Opaque(3).hashes(&tokens);
    engines.tell("b", vec![told(Scheme::Opaque(3), &tokens, 0, BlockTier::Gpu)]);
    engines.tell("b", vec![moved(&c[2..], BlockTier::Gpu, BlockTier::Dram)]);
    assert_eq!(engines.by_hashes(&c[2..]), held(&[]));
}

const PAGED: [&str; 3] = ["vllm", "old", "older"];

proptest! {
    /// Engines whose hashes cover the tokens of a page alone, beside one with rolling hashes: what is answered of them,
    /// they hold.
    #[test]
    fn hashes_of_pages_never_claim_what_an_engine_does_not_hold(
        steps in steps(),
        prompts in prop::collection::vec(prop::collection::vec(0u32..2, 0..24), 4),
        most in prop_oneof![Just(1usize << 10), 4..12usize],
    ) {
        let mut engines = Engines::new(&PAGED, most);
        let schemes = [Scheme::Vllm("0"), Scheme::Pages, Scheme::Pages];
        let mut references = schemes.map(|scheme| Reference { scheme, partial: false, cache: BTreeMap::new() });
        for step in steps {
            match step {
                Step::Compute(at, tokens) => {
                    let at = at % PAGED.len();
                    // A page of one token is as good as one of four, and repeats more often.
                    let tokens: Vec<u32> = tokens.iter().take(6).flat_map(|token| [*token; SIZE as usize]).collect();
                    if let Some(change) = references[at].compute(&tokens, BlockTier::Gpu) {
                        engines.tell(PAGED[at], vec![change]);
                    }
                }
                Step::Evict(at, which) => {
                    let (at, cache) = (at % PAGED.len(), &mut references[at % PAGED.len()].cache);
                    if cache.is_empty() {
                        continue;
                    }
                    let prefix = cache.keys().nth(which.index(cache.len())).expect("within").clone();
                    let named = cache.remove(&prefix).expect("held");
                    engines.tell(PAGED[at], vec![gone(&named.into_iter().collect::<Vec<_>>())]);
                }
                Step::Clear(at) => {
                    references[at % PAGED.len()].cache.clear();
                    engines.tell(PAGED[at % PAGED.len()], vec![BlockChange::Cleared]);
                }
                Step::Rehash(_) => {}
            }
        }
        for prompt in prompts {
            let prompt: Vec<u32> = prompt.iter().take(6).flat_map(|token| [*token; SIZE as usize]).collect();
            let by_tokens = engines.by_tokens(&prompt);
            // A prompt that is asked by hashes of pages does not tell what is before its pages.
            for found in [&by_tokens, &engines.by_hashes(&references[0].scheme.hashes(&prompt))] {
                for (name, tokens) in found {
                    let at = PAGED.iter().position(|known| known == name).expect("known");
                    let holds = references[at].tokens(&prompt);
                    prop_assert!(*tokens <= holds, "{} {} of {}: {:?}", name, tokens, holds, prompt);
                }
            }
        }
    }
}
