//! Decoding of engines' events: every known format, golden bytes, and invalid bytes.

use kvplane_conductor::conductor::{BlockChange, StoredTokens};
use kvplane_conductor::engine::hashes::vllm;
use kvplane_conductor::engine::keys::{BlockKey, read_key};
use kvplane_conductor::engine::msgpack::Value;
use kvplane_conductor::engine::store::{ObjectName, StoreEvent, StoreMedium, read_store_batch};
use kvplane_conductor::engine::tokens::{BlockInputs, ROOT, TokenPrompt, token_hash};
use kvplane_conductor::engine::{EngineBatch, read_batch};
use kvplane_conductor::index::BlockTier;
use kvplane_proto::events::ObjectChange;
use proptest::prelude::*;

/// Subset of MessagePack for the tests.
#[derive(Clone, Debug)]
enum Pack {
    Nil,
    Int(i64),
    Big(u64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Self>),
    Map(Vec<(&'static str, Self)>),
}

impl Pack {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Nil => out.push(0xc0),
            Self::Int(number @ 0..=127) => out.push(*number as u8),
            Self::Int(number) => {
                out.push(0xd3);
                out.extend_from_slice(&number.to_be_bytes());
            }
            Self::Big(number) => {
                out.push(0xcf);
                out.extend_from_slice(&number.to_be_bytes());
            }
            Self::Float(number) => {
                out.push(0xcb);
                out.extend_from_slice(&number.to_be_bytes());
            }
            Self::Text(text) => {
                out.extend([0xd9, text.len() as u8]);
                out.extend_from_slice(text.as_bytes());
            }
            Self::Bytes(bytes) => {
                out.extend([0xc4, bytes.len() as u8]);
                out.extend_from_slice(bytes);
            }
            Self::List(values) => {
                out.push(0xdc);
                out.extend_from_slice(&(values.len() as u16).to_be_bytes());
                values.iter().for_each(|value| value.write(out));
            }
            Self::Map(entries) => {
                out.push(0x80 | entries.len() as u8);
                for (name, value) in entries {
                    out.push(0xa0 | name.len() as u8);
                    out.extend_from_slice(name.as_bytes());
                    value.write(out);
                }
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }
}

fn text(text: &str) -> Pack {
    Pack::Text(text.to_owned())
}

fn stored(tier: BlockTier, parent: Option<u64>, hashes: &[u64]) -> BlockChange {
    BlockChange::Stored { lora: String::new(), salt: String::new(), tier, parent, hashes: hashes.to_vec() }
}

fn content(tokens: std::ops::Range<u32>) -> u64 {
    BlockInputs::default().content(&tokens.collect::<Vec<_>>())
}

fn removed(tier: Option<BlockTier>, hashes: &[u64]) -> BlockChange {
    BlockChange::Removed { lora: String::new(), salt: String::new(), tier, hashes: hashes.to_vec() }
}

#[test]
fn vllm_maps_are_decoded() {
    let digest = |last: u8| Pack::Bytes([vec![9; 31], vec![last]].concat());
    let number = |last: u64| 0x0909_0909_0909_0900 | last;
    let store = Pack::Map(vec![
        ("type", text("BlockStored")),
        ("block_hashes", Pack::List(vec![digest(1), digest(2)])),
        ("parent_block_hash", digest(0)),
        ("token_ids", Pack::List((0..32).map(Pack::Int).collect())),
        ("block_size", Pack::Int(16)),
        ("lora_id", Pack::Nil),
        ("medium", text("CPU")),
    ]);
    let gone = Pack::Map(vec![
        ("type", text("BlockRemoved")),
        ("block_hashes", Pack::List(vec![Pack::Big(u64::MAX)])),
        ("medium", text("GPU")),
    ]);
    let cleared = Pack::Map(vec![("type", text("AllBlocksCleared"))]);
    let expected = EngineBatch {
        events: vec![
            BlockChange::StoredTokens(StoredTokens {
                tier: BlockTier::Dram,
                parent: Some(number(0)),
                hashes: vec![number(1), number(2)],
                contents: vec![content(0..16), content(16..32)],
                part_tokens: 0,
            }),
            removed(Some(BlockTier::Gpu), &[u64::MAX]),
            BlockChange::Cleared,
        ],
        unread: 0,
        foreign: 0,
    };
    let events = Pack::List(vec![store, gone, cleared]);
    let map = Pack::Map(vec![("ts", Pack::Float(1.5)), ("events", events.clone()), ("data_parallel_rank", Pack::Nil)]);
    assert_eq!(read_batch(&map.bytes(), 16), Some(expected.clone()));
    let list = Pack::List(vec![Pack::Float(1.5), events, Pack::Int(0)]);
    assert_eq!(read_batch(&list.bytes(), 16), Some(expected));
}

/// Number of blocks that are known by their tokens, of all blocks, and of tokens in the partial last one.
#[test]
fn blocks_count_by_the_tokens_in_their_event() {
    let event = |tokens: i64, blocks: i64, size: i64| {
        Pack::List(vec![
            text("BlockStored"),
            Pack::List((1..=blocks).map(Pack::Int).collect()),
            Pack::Nil,
            Pack::List((0..tokens).map(Pack::Int).collect()),
            Pack::Int(size),
        ])
    };
    let read = |tokens, blocks, size| {
        let batch = Pack::List(vec![Pack::Float(0.0), Pack::List(vec![event(tokens, blocks, size)])]);
        let read = read_batch(&batch.bytes(), 16).expect("a batch");
        match &read.events[..] {
            [] => (0, 0, read.foreign as u32),
            [BlockChange::Stored { hashes, .. }] => (0, hashes.len(), 0),
            [BlockChange::StoredTokens(stored)] => (stored.contents.len(), stored.hashes.len(), stored.part_tokens),
            others => panic!("{others:?}"),
        }
    };
    for (tokens, blocks, size, known) in [
        (48, 3, 16, (3, 3, 0)),
        (16, 1, 16, (1, 1, 0)),
        // A partial last block: one event of several blocks, or a page with a size of its own.
        (40, 3, 16, (3, 3, 8)),
        (33, 3, 16, (3, 3, 1)),
        (15, 1, 16, (1, 1, 15)),
        (5, 1, 5, (1, 1, 5)),
        // No tokens, too few, too many.
        (0, 3, 16, (0, 3, 0)),
        (32, 3, 16, (0, 3, 0)),
        (49, 3, 16, (0, 3, 0)),
        // Another size than registered.
        (8, 2, 4, (0, 0, 1)),
        (4, 1, 5, (0, 0, 1)),
        (32, 1, 32, (0, 0, 1)),
    ] {
        assert_eq!(read(tokens, blocks, size), known, "{tokens} tokens in {blocks} blocks of {size}");
    }
}

/// Decodes an event of one block of 4 tokens; returns the contents.
fn contents(fields: Vec<(&'static str, Pack)>) -> Option<Vec<u64>> {
    let head = vec![("type", text("BlockStored")), ("token_ids", Pack::List((1..=4).map(Pack::Int).collect()))];
    let event = Pack::Map(head.into_iter().chain(fields).collect());
    let batch = Pack::Map(vec![("events", Pack::List(vec![event]))]);
    match read_batch(&batch.bytes(), 4).expect("a batch").events.pop().expect("decoded") {
        BlockChange::StoredTokens(stored) => Some(stored.contents),
        _ => None,
    }
}

#[test]
fn adapters_and_salts_are_inputs_of_contents() {
    let one = || ("block_hashes", Pack::List(vec![Pack::Int(1)]));
    let keys = |keys: Vec<Pack>| ("extra_keys", Pack::List(vec![Pack::List(keys)]));
    let first = |lora: &str, salt: &str| TokenPrompt::new(&[1, 2, 3, 4], 4, lora, salt).hashes()[0];
    let named = |fields: Vec<_>| contents([vec![one()], fields].concat()).map(|of| token_hash(ROOT, of[0]));
    let lora = || ("lora_name", text("l"));
    assert_eq!(named(vec![]), Some(first("", "")));
    assert_eq!(named(vec![("extra_keys", Pack::List(vec![Pack::Nil]))]), Some(first("", "")));
    assert_eq!(named(vec![lora()]), Some(first("l", "")));
    assert_eq!(named(vec![lora(), ("lora_id", Pack::Int(3)), keys(vec![text("l")])]), Some(first("l", "")));
    assert_eq!(named(vec![keys(vec![text("l"), text("s")])]), Some(first("l", "s")));
    assert_eq!(named(vec![keys(vec![text("s")])]), Some(first("", "s")));
    let others = [vec![("lora_id", Pack::Int(3))], vec![keys(vec![Pack::List(vec![text("picture"), Pack::Int(1)])])]];
    for other in others {
        assert!(named(other.clone()).is_some_and(|hash| hash != first("", "")), "{other:?}");
    }
    // Inputs of another number of blocks, and pairs of tokens, as with speculative decoding.
    assert_eq!(named(vec![("extra_keys", Pack::List(vec![Pack::Nil, Pack::Nil]))]), None);
    assert_eq!(named(vec![("token_ids", Pack::List(vec![]))]), Some(first("", "")), "the first of two fields counts");
    let pairs = Pack::List(vec![Pack::List(vec![Pack::Int(1), Pack::Int(2)]); 16]);
    let event = Pack::List(vec![text("BlockStored"), Pack::List(vec![Pack::Int(1)]), Pack::Nil, pairs, Pack::Int(16)]);
    let batch = Pack::List(vec![Pack::Float(0.0), Pack::List(vec![event])]);
    assert_eq!(read_batch(&batch.bytes(), 16).expect("a batch").events, vec![stored(BlockTier::Gpu, None, &[1])]);
}

#[test]
fn tensorrt_llm_events_are_decoded() {
    let token =
        |id: i64, extra: i64| Pack::Map(vec![("token_id", Pack::Int(id)), ("token_extra_id", Pack::Int(extra))]);
    let block = |hash: u64, level: i64, tokens: std::ops::Range<i64>| {
        Pack::Map(vec![
            ("type", text("stored_block")),
            ("block_hash", Pack::Big(hash)),
            ("tokens", Pack::List(tokens.map(|id| token(id, 0)).collect())),
            ("cache_level", Pack::Int(level)),
        ])
    };
    let event = |data: Vec<(&'static str, Pack)>| {
        Pack::Map(vec![("event_id", Pack::Int(1)), ("data", Pack::Map(data)), ("window_size", Pack::Int(64))])
    };
    let store = |parent: Pack, blocks: Vec<Pack>| {
        event(vec![("type", text("stored")), ("parent_hash", parent), ("blocks", Pack::List(blocks))])
    };
    let level = Pack::Map(vec![("old_value", Pack::Int(0)), ("new_value", Pack::Int(1))]);
    let events = vec![
        event(vec![("type", text("created")), ("num_blocks_per_cache_level", Pack::List(vec![Pack::Int(9)]))]),
        store(Pack::Nil, vec![block(7, 0, 0..4), block(8, 1, 4..8), block(9, 1, 8..10)]),
        event(vec![("type", text("updated")), ("block_hash", Pack::Big(7)), ("cache_level", level)]),
        event(vec![("type", text("updated")), ("block_hash", Pack::Big(7)), ("priority", Pack::Int(1))]),
        event(vec![("type", text("removed")), ("block_hashes", Pack::List(vec![Pack::Big(8)]))]),
        // Too many tokens for a block; a block without tokens; an unknown type.
        store(Pack::Nil, vec![block(7, 0, 0..5)]),
        store(Pack::Nil, vec![block(7, 0, 0..0)]),
        event(vec![("type", text("painted"))]),
    ];
    let batch = read_batch(&Pack::Map(vec![("events", Pack::List(events))]).bytes(), 4).expect("a batch");
    let known = |tier, parent, hashes: &[u64], contents: &[u64], part_tokens| {
        let (hashes, contents) = (hashes.to_vec(), contents.to_vec());
        BlockChange::StoredTokens(StoredTokens { tier, parent, hashes, contents, part_tokens })
    };
    let expected = vec![
        known(BlockTier::Gpu, None, &[7], &[content(0..4)], 0),
        known(BlockTier::Dram, Some(7), &[8, 9], &[content(4..8), content(8..10)], 2),
        BlockChange::Moved { from: BlockTier::Gpu, to: BlockTier::Dram, hashes: vec![7] },
        removed(None, &[8]),
    ];
    assert_eq!((batch.events, batch.foreign, batch.unread), (expected, 2, 1));
}

/// Older engines, and SGLang with its signed numbers: tuples that are truncated.
#[test]
fn truncated_tuples_are_decoded() {
    let long = Pack::List(vec![
        text("BlockStored"),
        Pack::List(vec![Pack::Int(-2), Pack::Int(3)]),
        Pack::Nil,
        Pack::List(vec![]),
        Pack::Int(16),
        Pack::Nil,
    ]);
    let short = Pack::List(vec![text("BlockStored"), Pack::List(vec![Pack::Int(5)])]);
    let disk = Pack::List(vec![text("BlockRemoved"), Pack::List(vec![Pack::Int(5)]), text("DISK")]);
    let anywhere = Pack::List(vec![text("BlockRemoved"), Pack::List(vec![Pack::Int(5)])]);
    let cleared = Pack::List(vec![text("AllBlocksCleared")]);
    let batch = Pack::List(vec![Pack::Float(0.0), Pack::List(vec![long, short, disk, anywhere, cleared])]);
    let events = vec![
        stored(BlockTier::Gpu, None, &[u64::MAX - 1, 3]),
        stored(BlockTier::Gpu, None, &[5]),
        removed(Some(BlockTier::Ssd), &[5]),
        removed(None, &[5]),
        BlockChange::Cleared,
    ];
    assert_eq!(read_batch(&batch.bytes(), 16), Some(EngineBatch { events, ..EngineBatch::default() }));
}

#[test]
fn undecodable_events_are_skipped() {
    let event = |hashes: Pack, size: i64, medium: Pack| {
        Pack::List(vec![text("BlockStored"), hashes, Pack::Nil, Pack::List(vec![]), Pack::Int(size), Pack::Nil, medium])
    };
    let one = || Pack::List(vec![Pack::Int(1)]);
    let events = vec![
        event(Pack::Nil, 16, Pack::Nil),
        event(Pack::List(vec![text("no hash")]), 16, Pack::Nil),
        event(one(), 16, text("tape")),
        Pack::Int(4),
        Pack::List(vec![]),
        Pack::List(vec![text("BlockPainted")]),
        event(one(), 32, Pack::Nil),
        event(one(), 16, text("EXTERNAL")),
        Pack::Map(vec![("type", text("BlockRemoved")), ("block_hashes", one()), ("group_idx", Pack::Int(1))]),
        event(one(), 16, Pack::Nil),
    ];
    let batch = Pack::List(vec![Pack::Float(0.0), Pack::List(events)]);
    let expected = EngineBatch { events: vec![stored(BlockTier::Gpu, None, &[1])], unread: 6, foreign: 3 };
    assert_eq!(read_batch(&batch.bytes(), 16), Some(expected));
    assert_eq!(read_batch(&Pack::Int(5).bytes(), 16), None);
    assert_eq!(read_batch(&Pack::List(vec![Pack::Int(5)]).bytes(), 16), None);
}

/// Bytes of a released engine: `[1.0, [["BlockRemoved", [7, 2**63]]]]`.
#[test]
fn golden_bytes_are_decoded() {
    let bytes = b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\x91\x92\xacBlockRemoved\x92\x07\xcf\x80\0\0\0\0\0\0\0";
    let batch = read_batch(bytes, 16).expect("a batch");
    assert_eq!(batch.events, vec![removed(None, &[7, 1 << 63])]);
    // Nested too deeply, and a length beyond the end.
    assert_eq!(Value::read(&[0x91; 64]), None);
    assert_eq!(Value::read(b"\xdd\xff\xff\xff\xff\x01"), None);
    assert_eq!(Value::read(b"\x01\x01"), None);
}

/// Encodes `[0, events, 0]`.
fn store_batch(events: Vec<Pack>) -> Vec<u8> {
    Pack::List(vec![Pack::Float(0.0), Pack::List(events), Pack::Int(0)]).bytes()
}

#[test]
fn mooncake_master_events_are_decoded() {
    let key = "m@tp_rank:0@00000000000000000000000000000005";
    let event = |kind: &str, more: Vec<(&'static str, Pack)>| {
        let head = vec![("event_type", text(kind)), ("tenant_id", text("default")), ("backend_id", text("b"))];
        Pack::Map(head.into_iter().chain(more).collect())
    };
    let events = vec![
        event("stored", vec![("medium", text("cpu")), ("object_key", text(key)), ("seq_hashes", Pack::List(vec![]))]),
        event(
            "stored",
            vec![
                ("medium", text("disk")),
                ("model_name", text("n")),
                ("tp_rank", Pack::Int(0)),
                ("seq_hashes", Pack::List(vec![Pack::Big(1 << 63)])),
            ],
        ),
        event("removed", vec![("medium", Pack::Nil), ("object_key", Pack::Nil), ("object_digest", text("0a"))]),
        event("cleared", vec![("medium", text("cpu"))]),
        // The key is not a block's; another rank; on a GPU.
        event("stored", vec![("object_key", text("photo"))]),
        event("stored", vec![("object_key", text(key)), ("tp_rank", Pack::Int(1))]),
        event("stored", vec![("object_key", text(key)), ("medium", text("GPU"))]),
        // Events that cannot be decoded.
        event("moved", vec![]),
        event("removed", vec![("object_digest", text("x"))]),
        event("stored", vec![("object_key", text(key)), ("medium", text("tape"))]),
        Pack::Int(1),
    ];
    let bytes = store_batch(events);
    let value = Value::read(&bytes).expect("MessagePack");
    let batch = read_store_batch(&value).expect("a batch");
    let block = |model: &str, hash| BlockKey { model: model.to_owned(), hash };
    let event = |change, medium, object, block| StoreEvent { change, tenant: "", backend: "b", medium, object, block };
    let (five, high) = (block("m", 5), block("n", 1 << 63));
    assert_eq!(
        batch.events,
        vec![
            event(ObjectChange::Stored, StoreMedium::Memory, ObjectName::Key(key), Some(five)),
            event(ObjectChange::Stored, StoreMedium::Ssd, ObjectName::Block(high.clone()), Some(high)),
            event(ObjectChange::Removed, StoreMedium::All, ObjectName::Digest(10), None),
            event(ObjectChange::Cleared, StoreMedium::Memory, ObjectName::All, None),
        ]
    );
    assert_eq!((batch.foreign, batch.unread), (3, 4));
    assert_eq!(read_store_batch(&Value::Int(1)), None);
}

#[test]
fn keys_decode_to_models_and_hashes() {
    let hash = "00112233445566778899aabbccddeeff";
    let known = |model: &str| Some(BlockKey { model: model.to_owned(), hash: 0x8899_aabb_ccdd_eeff });
    for (key, expected) in [
        (format!("llama@tp_rank:0@{hash}"), known("llama")),
        (format!("pre@meta/llama@tp_rank:0@pcp0@dcp0@pp_rank:0@{hash}"), known("meta/llama")),
        (format!("llama@pcp1@dcp0@head_or_tp_rank:0@pp_rank:0@{hash}@0"), known("llama")),
        (format!("llama@tp_rank:0@pp_rank:0@group:0@{hash}"), known("llama")),
        (format!("llama@tp_rank:1@{hash}"), None),
        (format!("llama@tp_rank:0@group:2@{hash}"), None),
        (format!("llama@head_or_tp_rank:0@{hash}@7"), None),
        (format!("llama@{hash}"), None),
        ("llama@tp_rank:0@beef".to_owned(), None),
        (format!("@tp_rank:0@{hash}"), None),
        (String::new(), None),
    ] {
        assert_eq!(read_key(&key), expected, "{key}");
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = read_batch(&bytes, 16);
        let _ = Value::read(&bytes).as_ref().map(read_store_batch);
        let _ = read_key(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn truncated_batch_is_rejected(cut in 1usize..60, hashes in prop::collection::vec(any::<u64>(), 1..9)) {
        let hashes = Pack::List(hashes.into_iter().map(Pack::Big).collect());
        let event = Pack::List(vec![text("BlockRemoved"), hashes]);
        let bytes = Pack::List(vec![Pack::Float(0.0), Pack::List(vec![event])]).bytes();
        prop_assert!(read_batch(&bytes, 16).is_some());
        prop_assert_eq!(read_batch(&bytes[..bytes.len() - cut.min(bytes.len())], 16), None);
    }
}

/// Checks hashes that vLLM computes for these tokens.
#[test]
fn blocks_have_the_hashes_of_vllm() {
    let tokens: Vec<u32> = (1..=9).collect();
    let expected = vec![2_164_874_634_404_590_027, 17_270_480_062_156_288_726];
    assert_eq!(vllm(&tokens, 4, "0", "", ""), expected);
    assert_eq!(vllm(&tokens[..7], 4, "0", "", ""), expected[..1]);
    for other in [vllm(&tokens, 4, "1", "", ""), vllm(&tokens, 4, "0", "l", ""), vllm(&tokens, 4, "0", "", "s")] {
        assert!(other[0] != expected[0] && other[1] != expected[1]);
    }
    assert_eq!(vllm(&tokens, 0, "0", "", "").len(), 9);
}
