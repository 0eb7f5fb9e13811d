//! Tests of Mooncake masters as a source of blocks, over real sockets.

use crate::support;
use crate::zeromq;

use std::net::SocketAddr;
use std::time::Duration;

use kvplane_conductor::engine::msgpack::Value as Packed;
use kvplane_rpc::conductor::*;
use kvplane_rpc::{Client, Role};
use serde_json::{Value, json};
use support::{client, get, pack, post_as, post_json, run, start};
use tokio::net::{TcpListener, TcpStream};
use zeromq::{accept, read_frame, send};

/// Returns the master's row among the services.
async fn master(http: SocketAddr) -> Value {
    let body = tokio::task::spawn_blocking(move || get(http, "/services").1).await.expect("asked");
    let all: Value = serde_json::from_str(&body).expect("JSON");
    let rows = all["services"].as_array().expect("a list");
    rows.iter().find(|row| row["type"] == json!("Mooncake")).cloned().unwrap_or_default()
}

fn instance(name: &str, model: &str) -> RegisterInstance {
    RegisterInstance { capacity_tokens: 1_000_000, ..RegisterInstance::new(name, model, 16, InstancePart::Mixed) }
}

/// Encodes a block's event as Mooncake's master publishes it.
fn event(kind: &str, medium: &str, hash: u64) -> Value {
    let key = format!("m@tp_rank:0@pp_rank:0@{hash:032x}");
    json!({
        "event_id": 1, "timestamp": 2, "event_type": kind, "model_name": null, "tenant_id": "default",
        "backend_id": "master-1", "medium": medium, "seq_hashes": [], "object_key": key, "group_id": null,
    })
}

async fn publish(stream: &mut TcpStream, seq: u64, events: Vec<Value>) {
    let payload = pack(&json!([1.5, events, 0]));
    send(stream, &[b"", &seq.to_be_bytes(), &payload]).await;
}

/// Polls until this many of the blocks from 1 on are in the store.
async fn until(router: &Client, model: &str, blocks: u32) {
    let context = PromptContext { model: model.to_owned(), block_tokens: 16, ..PromptContext::default() };
    let query = QueryPrefix { context, hashes: (1..100).collect(), most: 4, tier: BlockTier::Ssd };
    while router.call(&query).await.expect("served").pooled_tokens != blocks * 16 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Polls until the master counts as degraded, or does not any more.
async fn until_degraded(http: SocketAddr, is: bool) {
    while master(http).await["degraded"] != json!(is) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn blocks_of_a_masters_store_count_until_something_of_it_is_missing() {
    let (control, http) = start("test", |_| {});
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"));
        let spec = json!({ "type": "Mooncake", "instance_id": "store", "endpoint": endpoint, "modelname": "m" });
        assert_eq!(post_json(http, "/register", spec.clone()).await.0, "200 OK");
        assert_eq!(post_json(http, "/register", spec.clone()).await.1["fresh"], json!(false), "the same again");
        let other = json!({ "type": "Mooncake", "instance_id": "store", "endpoint": "tcp://127.0.0.1:9" });
        assert_eq!(post_json(http, "/register", other).await.0, "400 Bad Request");
        let mut live = accept(&listener, "PUB").await;
        read_frame(&mut live).await;
        // Before an instance serves the model, and on two media.
        let first = vec![event("stored", "cpu", 1), event("stored", "disk", 1), event("stored", "cpu", 2)];
        publish(&mut live, 1, first).await;
        publish(&mut live, 2, vec![event("stored", "cpu", 3), json!({ "event_type": "?" })]).await;
        router.call(&instance("e0", "org/m")).await.expect("room");
        until(&router, "org/m", 3).await;
        publish(&mut live, 3, vec![event("removed", "cpu", 1), event("removed", "cpu", 3)]).await;
        until(&router, "org/m", 2).await;
        // Another model with the same blocks gets them when it is registered.
        router.call(&instance("e1", "m")).await.expect("room");
        until(&router, "m", 2).await;
        // Routers that query over HTTP see the store too, as memory of every instance of the model.
        let asked = json!({ "model": "m", "block_size": 16, "seq_hashes": [1, 2, 3] });
        let found = post_json(http, "/query_by_hash", asked).await.1;
        let e1 = &found["instances"]["e1"];
        assert_eq!((&e1["gpu"], &e1["cpu"], &e1["longest_matched"]), (&json!(0), &json!(32), &json!(32)), "{found}");
        assert_eq!((&found["default"]["e1"]["CPU"], &found["instances"]["e0"]), (&json!(32), &Value::Null), "{found}");
        until_degraded(http, false).await;
        // A gap: removals in it are unknown.
        publish(&mut live, 5, vec![event("stored", "cpu", 1)]).await;
        until(&router, "m", 1).await;
        until_degraded(http, true).await;
        // A snapshot, as kvplane's own publisher makes it.
        let mut cleared = event("cleared", "cpu", 0);
        cleared["object_key"] = Value::Null;
        publish(&mut live, 6, vec![cleared, event("stored", "cpu", 1), event("stored", "cpu", 2)]).await;
        until(&router, "m", 2).await;
        until_degraded(http, false).await;
        // The master restarts: its store is empty.
        drop(live);
        let mut live = accept(&listener, "PUB").await;
        read_frame(&mut live).await;
        publish(&mut live, 1, vec![event("stored", "cpu", 1)]).await;
        until(&router, "m", 1).await;
        until_degraded(http, false).await;
        let row = master(http).await;
        assert_eq!((&row["instance_id"], &row["endpoint"]), (&json!("store"), &json!(endpoint)));
        let foreign = json!({ "instance_id": "store", "tenant_id": "x" });
        assert_eq!(post_json(http, "/unregister", foreign).await.0, "404 Not Found");
        assert_eq!(post_json(http, "/unregister", json!({ "instance_id": "store" })).await.0, "200 OK");
        until(&router, "m", 0).await;
    });
}

#[test]
fn messagepack_is_answered_with_messagepack() {
    let (control, http) = start("test", |_| {});
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        router.call(&RegisterInstance { block_tokens: 4, ..instance("e0@0", "m") }).await.expect("room");
        let (lora, salt, hashes) = (String::new(), String::new(), vec![2_164_874_634_404_590_027]);
        let stored = BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes };
        let (tenant, instance, kind) = (String::new(), "e0@0".to_owned(), CacheReport::Goes);
        let report =
            ReportCache { tenant, instance, incarnation: 1, batch: CacheBatch { seq: 0, kind, changes: vec![stored] } };
        router.call(&report).await.expect("taken");
    });
    let body = json!({ "model": "m", "block_size": 4, "token_ids": [1, 2, 3, 4, 5] });
    let mut bytes = pack(&json!({ "model": "m", "block_size": 4, "token_ids": 0 }));
    // The number, in the last nine bytes, becomes five numbers of 32 bits as bytes.
    bytes.truncate(bytes.len() - 9);
    bytes.extend([0xc4, 20]);
    (1u32..=5).for_each(|token| bytes.extend(token.to_le_bytes()));
    for body in [pack(&body), bytes] {
        let (status, answer) = post_as(http, "/query", "application/msgpack", &body);
        assert_eq!(status, "HTTP/1.1 200 OK");
        let answer = Packed::read(&answer).expect("MessagePack");
        let found = answer.get("instances").and_then(|all| all.get("e0")).expect("it holds a block");
        assert_eq!((found.get("gpu"), found.get("longest_matched")), (Some(&Packed::Int(4)), Some(&Packed::Int(4))));
    }
    for (body, what) in [(&b"\xc1"[..], "not Mess"), (b"\x90", "an object"), (b"\x81\xa1a\xc4\x01x", "not Mess")] {
        let (status, answer) = post_as(http, "/query", "application/x-msgpack; charset=x", body);
        assert_eq!(status, "HTTP/1.1 400 Bad Request");
        let error = Packed::read(&answer).and_then(|answer| Some(answer.get("error")?.text()?.to_owned()));
        assert!(error.as_ref().is_some_and(|error| error.contains(what)), "{error:?}");
    }
    let long = vec![0; (9 << 20) + 1];
    assert!(post_as(http, "/query", "application/msgpack", &long).0.contains(" 413 "));
    let request = b"GET /global_view HTTP/1.1\r\nHost: t\r\nAccept: application/msgpack\r\n\r\n";
    assert!(support::raw_http(http, request).contains("content-type: application/msgpack"));
}
