//! Tests of engines with different hash schemes, asked by tokens over HTTP, with publishers on real connections.

use crate::support;
use crate::zeromq;

use std::net::SocketAddr;
use std::time::Duration;

use kvplane_conductor::engine::hashes::vllm;
use serde_json::{Value, json};
use support::{get, pack, post_json, run, start};
use tokio::net::{TcpListener, TcpStream};
use zeromq::{accept, read_frame, send};

/// Posts JSON that is accepted; returns the answer.
async fn post(http: SocketAddr, path: &'static str, body: Value) -> Value {
    let (status, answer) = post_json(http, path, body).await;
    assert_eq!(status, "200 OK", "{answer}");
    answer
}

/// Publisher of an engine.
struct Engine {
    name: &'static str,
    live: TcpStream,
    seq: u64,
}

impl Engine {
    async fn new(http: SocketAddr, name: &'static str, kind: &str, profile: Value) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"));
        let registration = json!({
            "type": kind, "instance_id": name, "endpoint": endpoint, "modelname": "m", "block_size": 4,
            "hash_profile": profile,
        });
        let answer = post(http, "/register", registration).await;
        assert_eq!(answer["query"], Value::Null, "it is not known yet how it is asked");
        let mut live = accept(&listener, "PUB").await;
        read_frame(&mut live).await;
        Self { name, live, seq: 0 }
    }

    async fn publish(&mut self, events: Vec<Value>) {
        let payload = pack(&json!([0.5, events]));
        send(&mut self.live, &[b"", &self.seq.to_be_bytes(), &payload]).await;
        self.seq += 1;
    }

    /// Asks until this engine holds this many tokens on its GPU; returns the answer.
    async fn until(&self, http: SocketAddr, path: &'static str, query: Value, tokens: u32) -> Value {
        loop {
            let found = post(http, path, query.clone()).await;
            if found["instances"][self.name]["gpu"].as_u64().unwrap_or(0) == u64::from(tokens) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn by_tokens(tokens: &[u32]) -> Value {
    json!({ "model": "m", "block_size": 4, "token_ids": tokens })
}

fn by_hashes(hashes: &[u64]) -> Value {
    json!({ "model": "m", "block_size": 4, "seq_hashes": hashes })
}

/// vLLM by its default, whose seed is random; vLLM with a seed; SGLang, page by page; TensorRT-LLM.
#[test]
fn engines_of_every_scheme_are_asked_by_tokens() {
    let (_control, http) = start("test", |_| {});
    run(async {
        let tokens: Vec<u32> = (1..=11).collect();
        let mut default = Engine::new(http, "default", "vLLM", json!({ "algorithm": "sha256" })).await;
        let stored = |hashes: &[u64], parent: Option<u64>, tokens: &[u32]| {
            json!({
                "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
                "block_size": 4, "lora_id": null, "medium": "GPU", "lora_name": null,
            })
        };
        default.publish(vec![stored(&[901, 902], None, &tokens[..8])]).await;
        let found = default.until(http, "/query", by_tokens(&tokens), 8).await;
        assert_eq!(found.get("hash_mismatch"), None, "{found}");

        let seeded = json!({ "algorithm": "sha256_cbor", "python_hash_seed": 7 });
        let mut seeded = Engine::new(http, "seeded", "vLLM", seeded).await;
        let hashes = vllm(&tokens, 4, "7", "", "");
        seeded.publish(vec![stored(&hashes[..1], None, &tokens[..4])]).await;
        seeded.until(http, "/query", by_tokens(&tokens), 4).await;

        let mut sglang = Engine::new(http, "sglang", "SGLang", Value::Null).await;
        let page = |hash: i64, parent: Option<i64>, tokens: &[u32]| {
            json!(["BlockStored", [hash], parent, tokens, tokens.len(), null, "GPU"])
        };
        let pages =
            vec![page(-5, None, &tokens[..4]), page(-6, Some(-5), &tokens[4..8]), page(-7, Some(-6), &tokens[8..10])];
        sglang.publish(pages).await;
        sglang.until(http, "/query", by_tokens(&tokens), 10).await;

        let mut tensorrt = Engine::new(http, "tensorrt", "TensorRT-LLM", Value::Null).await;
        let block = |hash: u64, tokens: &[u32]| {
            let tokens: Vec<Value> = tokens.iter().map(|id| json!({ "token_id": id, "token_extra_id": 0 })).collect();
            json!({ "type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35 })
        };
        let blocks = json!([block(71, &tokens[..4]), block(72, &tokens[4..7])]);
        let data = json!({ "type": "stored", "parent_hash": null, "blocks": blocks });
        tensorrt.publish(vec![json!({ "event_id": 1, "data": data, "window_size": 64 })]).await;
        let found = tensorrt.until(http, "/query", by_tokens(&tokens), 7).await;

        let held = |found: &Value| {
            let tokens = |name: &str| found["instances"][name]["longest_matched"].as_u64().unwrap_or(0);
            [tokens("default"), tokens("seeded"), tokens("sglang"), tokens("tensorrt")]
        };
        assert_eq!(held(&found), [8, 4, 10, 7]);
        for (asked, expected) in [(10, [8, 4, 10, 7]), (9, [8, 4, 8, 7]), (6, [4, 4, 4, 4]), (3, [0, 0, 0, 0])] {
            assert_eq!(held(&post(http, "/query", by_tokens(&tokens[..asked])).await), expected, "of {asked} tokens");
        }
        // The hashes of any engine ask for all, and never for more than they cover.
        for (asked, expected) in [
            (&[901, 902][..], [8, 4, 8, 4]),
            (&[901], [4, 4, 4, 4]),
            (&[901, 902, 903], [8, 4, 8, 4]),
            (&hashes[..2], [4, 4, 4, 4]),
            (&[-5i64 as u64, -6i64 as u64, -7i64 as u64], [8, 4, 10, 4]),
            (&[71, 72], [4, 4, 4, 7]),
        ] {
            assert_eq!(held(&post(http, "/query_by_hash", by_hashes(asked)).await), expected, "{asked:?}");
        }
        let salted = json!({ "model": "m", "block_size": 4, "token_ids": tokens, "cache_salt": "s" });
        assert_eq!(held(&post(http, "/query", salted).await), [0; 4]);

        // Engines name what they evict by their own hashes.
        default.publish(vec![json!(["BlockRemoved", [902], "GPU"])]).await;
        default.until(http, "/query", by_tokens(&tokens), 4).await;
        let found = post(http, "/query", by_tokens(&tokens)).await;
        assert_eq!(held(&found), [4, 4, 10, 7]);
        let metrics = tokio::task::spawn_blocking(move || get(http, "/metrics").1).await.expect("asked");
        for line in ["kvplane_conductor_hash_aliases 8", "kvplane_conductor_hash_only_blocks_total 0"] {
            assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
        }
    });
}

/// Blocks whose events contain no tokens are found by hash; that tokens may not find them is said with tokens only.
#[test]
fn blocks_that_tokens_cannot_find_are_said() {
    let (_control, http) = start("test", |_| {});
    run(async {
        let tokens: Vec<u32> = (1..=8).collect();
        let mut seeded = Engine::new(http, "seeded", "vLLM", json!({ "python_hash_seed": "0" })).await;
        let hashes = vllm(&tokens, 4, "0", "", "");
        let untold = |hashes: &[u64]| json!(["BlockStored", hashes, null, [], 4, null, "GPU"]);
        seeded.publish(vec![untold(&hashes)]).await;
        let found = seeded.until(http, "/query", by_tokens(&tokens), 8).await;
        assert_eq!(found.get("hash_mismatch"), None, "hashes of this seed can be computed");
        let mut default = Engine::new(http, "default", "vLLM", json!({ "algorithm": "sha256" })).await;
        default.publish(vec![untold(&[901, 902])]).await;
        let found = default.until(http, "/query_by_hash", by_hashes(&[901, 902, 903]), 8).await;
        assert_eq!(found.get("hash_mismatch"), None, "a query by hash needs no seed");
        let found = post(http, "/query", by_tokens(&tokens)).await;
        assert_eq!((&found["hash_mismatch"], &found["instances"]["default"]), (&json!(true), &Value::Null));
        assert_eq!(found["instances"]["seeded"]["gpu"], 8);
        default.publish(vec![json!(["AllBlocksCleared"])]).await;
        loop {
            let found = post(http, "/query", by_tokens(&tokens)).await;
            if found.get("hash_mismatch").is_none() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let metrics = tokio::task::spawn_blocking(move || get(http, "/metrics").1).await.expect("asked");
        for line in ["kvplane_conductor_mismatched_models 0", "kvplane_conductor_hash_only_blocks_total 4"] {
            assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
        }
    });
}
