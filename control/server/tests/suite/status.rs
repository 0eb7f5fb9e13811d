//! Tests of the status page: its data, its authentication, and that a browser shows names from outside as text.

use crate::support;

use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::conductor::*;
use kvplane_rpc::message::*;
use kvplane_rpc::{LocalCluster, Role};
use kvplane_server::HttpToken;
use serde_json::{Value, json};
use support::{client, enter, get, raw_http, run, start};

/// A name that would run if it became markup.
const EVIL: &str = "<img src=x onerror=\"document.title='taken over'\"><script>alert(1)</script>&amp;";

fn status(http: SocketAddr, query: &str) -> Value {
    let (status, body) = get(http, &format!("/status.json{query}"));
    assert_eq!(status, "HTTP/1.1 200 OK", "{body}");
    serde_json::from_str(&body).expect("JSON")
}

/// Creates a node with a shard and a segment, two instances, and requests that reuse one prefix.
async fn fill(local: &LocalCluster) {
    let node = client(local, Role::Node).await;
    enter(&node, 7, 1).await;
    let shard = ShardFigures {
        address: "127.0.0.1:7007".to_owned(),
        objects: 3,
        pool: PoolFigures { bytes: 8192, used_bytes: 4096, ..PoolFigures::default() },
        gets: GetFigures { hits: 9, misses: 1, ..GetFigures::default() },
        ..ShardFigures::default()
    };
    node.call(&ReportShard { node: 7, incarnation: 1, shard }).await.expect("taken");
    let owner = SegmentOwner::Node { node: NodeId(7), incarnation: Incarnation(1) };
    let address = SocketAddr::from(([127, 0, 0, 1], 7007));
    let segment = Segment { name: EVIL.to_owned(), owner, kind: SegmentKind::Dram, bytes: 8192, address, ttl_ns: 0 };
    node.call(&RegisterSegment { segment }).await.expect("registered");
    let router = client(local, Role::Scheduler).await;
    let hashes = vec![5, u64::MAX - 1];
    for instance in [EVIL, "p1"] {
        let register = RegisterInstance {
            capacity_tokens: 1 << 30,
            address: EVIL.to_owned(),
            ..RegisterInstance::new(instance, EVIL, 16, InstancePart::Mixed)
        };
        router.call(&register).await.expect("room");
        let (lora, salt) = (String::new(), String::new());
        let stored = BlockChange::Stored { lora, salt, tier: BlockTier::Dram, parent: None, hashes: hashes.clone() };
        let (tenant, instance, kind) = (String::new(), instance.to_owned(), CacheReport::Goes);
        let report =
            ReportCache { tenant, instance, incarnation: 1, batch: CacheBatch { seq: 0, kind, changes: vec![stored] } };
        router.call(&report).await.expect("taken");
    }
    for at in 0..4 {
        let context = PromptContext { model: EVIL.to_owned(), block_tokens: 16, ..PromptContext::default() };
        let schedule = Schedule {
            client: 1,
            request: format!("r{at}"),
            context,
            tokens: 48,
            hashes: [hashes.clone(), vec![100 + at]].concat(),
            wait_ns: 0,
            mode: ScheduleMode::Now,
            barred: Vec::new(),
        };
        assert!(matches!(router.call(&schedule).await.expect("served"), ScheduleReply::Assigned(_)));
    }
}

#[test]
fn the_json_has_instances_queues_hits_hot_prefixes_slots_and_segments() {
    let (control, http) = start("shown", |_| {});
    let empty = status(http, "");
    assert_eq!((&empty["conductor"]["models"], &empty["members"]), (&json!([]), &json!([])));
    assert_eq!(empty["slots"]["owners"], json!([]));
    run(fill(control.local()));
    let seen = status(http, "");
    let conductor = &seen["conductor"];
    let model = &conductor["models"][0];
    assert_eq!((&model["model"], &model["instances"]), (&json!(EVIL), &json!(2)));
    // Two reported blocks, and one predicted for each request.
    assert_eq!((&model["requests"], &model["waiting"], &model["blocks"]), (&json!(4), &json!(0), &json!(6)));
    assert_eq!((&model["tokens"], &model["reused_tokens"]), (&json!(192), &json!(128)));
    assert_eq!(conductor["counts"]["placed"], json!(4));
    let instances = conductor["instances"].as_array().expect("a list");
    assert_eq!((instances.len(), &instances[0]["instance"]), (2, &json!(EVIL)));
    let booked: u64 = instances.iter().filter_map(|one| one["prefills"].as_u64()).sum();
    assert_eq!(booked, 4);
    let hot = &conductor["hot"][0];
    assert_eq!((&hot["hash"], &hot["tokens"]), (&json!("fffffffffffffffe"), &json!(32)));
    assert_eq!((&hot["holders"], &hot["stored"]), (&json!(2), &json!(false)));
    let member = &seen["members"][0];
    assert_eq!((&member["node"], &member["state"]), (&json!("7"), &json!("active")));
    assert_eq!((&member["shards"][0]["hits"], &member["shards"][0]["used_bytes"]), (&json!(9), &json!(4096)));
    let segment = &seen["segments"][0];
    assert_eq!((&segment["name"], &segment["of"], &segment["used_bytes"]), (&json!(EVIL), &json!("7"), &json!(4096)));
    let slots = seen["slots"]["slots"].as_array().expect("a list");
    assert!(slots.len() == 16_384 && slots.iter().all(|slot| *slot == json!(0)));
    assert_eq!(seen["slots"]["owners"], json!([[7, 0]]));
    // The map of slots is sent once.
    assert_eq!(status(http, &format!("?map={}", seen["epoch"]))["slots"], Value::Null);
    assert!(status(http, "?map=1000000")["slots"].is_object());
}

#[test]
fn the_page_is_static_and_the_data_are_for_who_may_ask() {
    let (_control, http) = start("shown", |_| {});
    let page = raw_http(http, b"GET /status HTTP/1.1\r\nHost: t\r\n\r\n");
    let (head, body) = page.split_once("\r\n\r\n").expect("a whole answer");
    let head = head.to_ascii_lowercase();
    for header in ["content-type: text/html; charset=utf-8", "content-security-policy: default-src 'none';"] {
        assert!(head.contains(header), "{header} in {head}");
    }
    assert!(head.contains("require-trusted-types-for 'script'") && head.contains("nosniff"), "{head}");
    // The page loads nothing from elsewhere, makes no markup of text, and has no placeholder left.
    for foreign in ["http://", "https://", "//cdn", "innerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!body.contains(foreign), "{foreign} in the page");
    }
    assert!(body.contains("status.json") && !body.contains("/*script*/") && !body.contains("/*style*/"));
    let posted = raw_http(http, b"POST /status HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n");
    assert!(posted.starts_with("HTTP/1.1 405"), "{posted}");
    let posted = raw_http(http, b"POST /status.json HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n");
    assert!(posted.starts_with("HTTP/1.1 405"), "{posted}");
    let metrics = get(http, "/metrics").1;
    assert!(metrics.contains("kvplane_http_requests_total{path=\"/status\",status=\"200\"} 1"), "{metrics}");

    let token = "0123456789abcdef";
    let (_control, http) =
        start("shown", |config| config.http_token = Some(HttpToken::new(token).expect("a good token")));
    assert_eq!(get(http, "/status").0, "HTTP/1.1 200 OK", "it has nothing in it");
    assert_eq!(get(http, "/status.json").0, "HTTP/1.1 401 Unauthorized");
    let request = format!("GET /status.json HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {token}\r\n\r\n");
    assert!(raw_http(http, request.as_bytes()).starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn without_a_conductor_there_is_the_store() {
    let (control, http) = start("shown", |config| config.conductor = None);
    run(async {
        let node = client(control.local(), Role::Node).await;
        enter(&node, 7, 1).await;
    });
    let seen = status(http, "");
    assert_eq!((&seen["conductor"], &seen["members"][0]["objects"]), (&Value::Null, &json!(3)));
}

/// Returns a headless Chromium, if there is one: named by `KVPLANE_CHROMIUM`, or on the path.
fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KVPLANE_CHROMIUM") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = ["chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome"];
    let places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    names.iter().find_map(|name| places.iter().map(|place| place.join(name)).find(|file| file.is_file()))
}

/// Returns the page as markup after a few seconds of the browser's time.
fn rendered(browser: &PathBuf, url: &str) -> String {
    let scratch = support::Scratch::new();
    let mut command = Command::new(browser);
    command.args(["--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"]);
    command.arg(format!("--user-data-dir={}", scratch.path().display()));
    command.args(["--virtual-time-budget=4000", "--dump-dom", url]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("a browser");
    let mut out = child.stdout.take().expect("piped");
    let read = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = out.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let until = Instant::now() + Duration::from_secs(60);
    while child.try_wait().expect("a child").is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the browser does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    read.join().expect("read")
}

#[test]
fn a_browser_shows_it_and_makes_no_markup_of_names() {
    let Some(browser) = browser() else {
        println!("skipped: no Chromium on this machine; apt-get install chromium-headless-shell, or KVPLANE_CHROMIUM");
        return;
    };
    let (control, http) = start("shown", |_| {});
    run(fill(control.local()));
    let page = rendered(&browser, &format!("http://{http}/status"));
    assert!(page.contains("<title>shown · kvplane</title>"), "{page}");
    let shown =
        "&lt;img src=x onerror=\"document.title='taken over'\"&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;";
    // Instance, its model twice, its address, a hot prefix, a segment.
    assert!(page.matches(&format!(">{shown}<")).count() >= 6, "{page}");
    assert!(!page.contains("<img") && page.matches("<script").count() == 1, "{page}");
    for part in ["fffffffffffffffe", "16,384, by owner in epoch", ">90.0 %<", "4.00 KiB of 8.00 KiB", ">66.7 %<"] {
        assert!(page.contains(part), "{part} in {page}");
    }
    assert!(page.contains("id=\"trouble\" class=\"trouble\" role=\"status\" hidden=\"\""), "{page}");

    let (_control, http) = start("shown", |config| {
        config.conductor = None;
        config.http_token = Some(HttpToken::new("0123456789abcdef").expect("a good token"));
    });
    let page = rendered(&browser, &format!("http://{http}/status"));
    assert!(page.contains("<form id=\"ask\" class=\"card\">"), "it asks for the token: {page}");
    assert!(page.contains("<main id=\"main\" hidden=\"\">"), "{page}");
}
