//! Tests of other conductors' paths: routers' queries in JSON, and invalid bodies.

use crate::support;

use std::net::SocketAddr;

use kvplane_rpc::conductor::*;
use kvplane_rpc::{LocalCluster, Role};
use support::{client, get, raw_http, run, start};

/// Posts a body; returns status line and body of the answer.
fn post(http: SocketAddr, path: &str, body: &str) -> (String, String) {
    let request = format!("POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let answer = raw_http(http, request.as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").expect("a whole answer");
    (head.lines().next().unwrap_or_default()["HTTP/1.1 ".len()..].to_owned(), body.to_owned())
}

fn register(http: SocketAddr, instance: &str) -> (String, String) {
    let body = format!(
        r#"{{"endpoint":"tcp://127.0.0.1:9","type":"vLLM","modelname":"m","instance_id":"{instance}","block_size":4,
            "dp_rank":1,"hash_profile":{{"algorithm":"sha256_cbor","python_hash_seed":"0"}}}}"#
    );
    post(http, "/register", &body)
}

/// Reports the blocks of the tokens 1 to 8, as vLLM hashes them.
async fn hold(local: &LocalCluster, instance: &str, tier: BlockTier, blocks: usize) {
    let hashes = [2_164_874_634_404_590_027, 17_270_480_062_156_288_726][..blocks].to_vec();
    let (lora, salt) = (String::new(), String::new());
    let changes = vec![BlockChange::Stored { lora, salt, tier, parent: None, hashes }];
    let (tenant, instance) = (String::new(), instance.to_owned());
    let report = ReportCache {
        tenant,
        instance,
        incarnation: 0,
        batch: CacheBatch { seq: 0, kind: CacheReport::Goes, changes },
    };
    client(local, Role::Client).await.call(&report).await.expect("taken");
}

#[test]
fn routers_of_others_are_answered() {
    let (control, http) = start("test", |_| {});
    for instance in ["e0", "e1"] {
        let (status, body) = register(http, instance);
        assert_eq!(status, "200 OK", "{body}");
    }
    assert_eq!(register(http, "e0").0, "200 OK", "the same again");
    run(async {
        hold(control.local(), "e0@1", BlockTier::Gpu, 1).await;
        hold(control.local(), "e1@1", BlockTier::Dram, 2).await;
    });
    let (status, body) = post(http, "/query", r#"{"model":"m","token_ids":[1,2,3,4,5,6,7,8,9],"block_size":4}"#);
    assert_eq!(status, "200 OK", "{body}");
    let found: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let e0 = serde_json::json!({
        "longest_matched": 4, "gpu": 4, "dp": {"1": 4}, "cpu": 4, "disk": 4,
        "rank_matches": {"1": {"gpu": 4, "cpu": 4, "disk": 4}},
    });
    assert_eq!(found["instances"]["e0"], e0);
    let e1 = serde_json::json!({"longest_matched": 8, "GPU": 0, "DP": {"1": 0}, "CPU": 8, "DISK": 0});
    assert_eq!(found["default"]["e1"], e1);
    let by_hash = r#"{"model_name":"m","seq_hashes":[2164874634404590027,-1176264011553262890],"block_size":4,
        "instance_id":"e1"}"#;
    let (status, body) = post(http, "/query_by_hash", by_hash);
    assert_eq!(status, "200 OK", "{body}");
    let found: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&found["instances"]["e1"]["cpu"], found["instances"]["e0"].is_null()), (&8.into(), true));
    let view = get(http, "/global_view").1;
    assert!(view.contains(r#""prefix_count":2"#) && view.contains(r#""tenant_id":"default""#), "{view}");
    let services = get(http, "/services").1;
    assert!(services.contains(r#""instance_id":"e0""#) && services.contains("tcp://127.0.0.1:9"), "{services}");
    let metrics = get(http, "/metrics").1;
    for line in ["kvplane_conductor_instances 2", "kvplane_conductor_event_batches_total 2"] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
    let gone = r#"{"type":"vLLM","modelname":"m","instance_id":"e0","block_size":4,"dp_rank":1}"#;
    assert_eq!(post(http, "/unregister", gone).0, "200 OK");
    assert_eq!(post(http, "/unregister", gone).0, "404 Not Found");
    assert!(!get(http, "/services").1.contains("e0"));
}

#[test]
fn engines_of_any_hash_profile_register() {
    let (_control, http) = start("test", |_| {});
    let profiles = ["sha256", "xxhash", "xxhash_cbor", "builtin", "sha256_cbor"];
    let profiles = profiles.map(|algorithm| format!(r#"{{"algorithm":"{algorithm}","python_hash_seed":"0"}}"#));
    let bare = ["null", "{}", r#"{"algorithm":"sha256","python_hash_seed":null}"#, r#"{"python_hash_seed":0}"#];
    for (number, profile) in profiles.iter().map(String::as_str).chain(bare).enumerate() {
        let body = format!(
            r#"{{"endpoint":"tcp://127.0.0.1:9","type":"vLLM","modelname":"m","instance_id":"e{number}","block_size":4,
                "hash_profile":{profile}}}"#
        );
        let (status, answer) = post(http, "/register", &body);
        assert_eq!(status, "200 OK", "{profile}: {answer}");
        assert!(!answer.contains("by_hash_only"), "{profile}: {answer}");
    }
    for engine in ["SGLang", "TensorRT-LLM", "trtllm"] {
        let body = format!(
            r#"{{"endpoint":"tcp://127.0.0.1:9","type":"{engine}","modelname":"m","instance_id":"{engine}",
                "block_size":4}}"#
        );
        assert_eq!(post(http, "/register", &body).0, "200 OK", "{engine}");
    }
    let body = r#"{"endpoint":"tcp://127.0.0.1:9","type":"vLLM","modelname":"m","instance_id":"x","block_size":4,
        "hash_profile":{"algorithm":"md5"}}"#;
    let (status, answer) = post(http, "/register", body);
    assert!(status == "400 Bad Request" && answer.contains("md5") && answer.contains("sha256_cbor"), "{answer}");
}

#[test]
fn invalid_bodies_are_rejected_with_the_reason() {
    let (_control, http) = start("test", |_| {});
    assert_eq!(register(http, "e0").0, "200 OK");
    let other = r#"{"endpoint":"tcp://127.0.0.1:8","type":"vLLM","modelname":"m","instance_id":"e0","block_size":4,
        "dp_rank":1}"#;
    for (path, body, status, what) in [
        ("/register", other, "400 Bad Request", "another description"),
        ("/register", "{", "400 Bad Request", "not JSON"),
        ("/register", "[]", "400 Bad Request", "an object"),
        ("/register", r#"{"type":"vLLM"}"#, "400 Bad Request", "instance_id is missing"),
        ("/register", r#"{"type":"Other"}"#, "501 Not Implemented", "not followed"),
        ("/register", r#"{"type":"Mooncake"}"#, "400 Bad Request", "instance_id is missing"),
        ("/register", r#"{"type":"Mooncake","instance_id":"m","endpoint":"x"}"#, "400 Bad Request", "tcp://HOST:PORT"),
        ("/register", r#"{"type":"vLLM","instance_id":"a","dp_rank":-1}"#, "400 Bad Request", "dp_rank"),
        ("/query", r#"{"model":"m","block_size":4}"#, "400 Bad Request", "token_ids"),
        ("/query", r#"{"model":"m","token_ids":[1.5],"block_size":4}"#, "400 Bad Request", "token_ids"),
        ("/query", r#"{"model":"m","token_ids":[1],"block_size":0}"#, "400 Bad Request", "block_size"),
        ("/query", r#"{"model":5,"token_ids":[1],"block_size":4}"#, "400 Bad Request", "model must be"),
        ("/query_by_hash", r#"{"model":"m","seq_hashes":["x"],"block_size":4}"#, "400 Bad Request", "seq_hashes"),
        ("/unregister", r#"{"instance_id":"nobody"}"#, "404 Not Found", "nobody"),
        ("/services", "", "405 Method Not Allowed", "GET"),
    ] {
        let (found, answer) = post(http, path, body);
        assert!(found == status && answer.contains(what), "{path} {body}: {found} {answer}");
    }
    assert_eq!(get(http, "/query").0, "HTTP/1.1 405 Method Not Allowed");
    let nobody = post(http, "/query", r#"{"model":"other","token_ids":[1,2,3,4],"block_size":4}"#);
    assert_eq!((nobody.0.as_str(), nobody.1.contains(r#""instances":{}"#)), ("200 OK", true));
}
