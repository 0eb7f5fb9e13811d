//! Views of operators and other programs on a running cluster: shards, segments, Mooncake's HTTP paths, events.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

use serde_json::Value;

use crate::support::{PATIENCE, Process, Way, Workplace, http_get, text, wait_until};

const VALUE_BYTES: usize = 5000;

fn value(key: usize) -> Vec<u8> {
    (0..VALUE_BYTES).map(|at| (at * 7 + key * 31) as u8).collect()
}

fn fill(place: &Workplace, way: Way, keys: std::ops::Range<usize>) {
    let mut client = place.client(way);
    for key in keys {
        client.put(format!("key-{key}").as_bytes(), &value(key)).unwrap();
        assert_eq!(client.get(format!("key-{key}").as_bytes()).unwrap(), Some(value(key)));
    }
}

fn json(place: &Workplace, arguments: &[&str]) -> Value {
    let text = place.run(&[&["ctl"], arguments].concat()).text();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Returns the sum of a number over all shards.
fn sum(shards: &Value, path: &str) -> u64 {
    let nodes = shards["nodes"].as_array().unwrap();
    let all = nodes.iter().flat_map(|node| node["shards"].as_array().unwrap());
    all.map(|shard| shard.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}: {shard}"))).sum()
}

/// Returns the number of requests of a kind that all shards answered.
fn count(shards: &Value, operation: &str) -> u64 {
    let nodes = shards["nodes"].as_array().unwrap();
    let all = nodes.iter().flat_map(|node| node["shards"].as_array().unwrap());
    let of = all.flat_map(|shard| shard["operations"].as_array().unwrap());
    of.filter(|one| one["operation"] == operation).map(|one| one["count"].as_u64().unwrap()).sum()
}

#[test]
fn shards_and_the_times_of_their_requests_are_shown() {
    let place = Workplace::new("shards");
    let dev = place.dev("32M", &["--shards", "2", "--metrics-port", "0"]);
    fill(&place, Way::Tcp, 0..40);
    fill(&place, Way::Shm, 40..60);
    let shown = wait_until(|| {
        let shown = json(&place, &["shards", "--json"]);
        let told = !shown["nodes"].as_array().unwrap().is_empty() && sum(&shown, "/puts/objects") == 60;
        (told && sum(&shown, "/gets/hits") == 60).then_some(shown)
    });
    let shown = shown.expect("the node reports");
    assert_eq!(sum(&shown, "/objects"), 60);
    assert_eq!((count(&shown, "get") + count(&shown, "lookup"), count(&shown, "put")), (60, 60), "{shown}");
    let text = place.run(&["ctl", "shards", "--slow"]).text();
    assert!(text.contains("p99.9") && text.contains("get "), "{text}");
    let top = json(&place, &["top", "--once", "--json", "--interval", "1"]);
    assert_eq!(top["shards"].as_array().unwrap().len(), 2, "{top}");
    let table = place.run(&["ctl", "top", "--once", "--interval", "1"]).text();
    assert!(table.contains("gets/s") && table.lines().count() == 3 && !table.contains('\x1b'), "{table}");
    place.run(&["ctl", "shards", "--node", "77"]).failed(1, &["node 77", "ctl status"]);
    let segments = json(&place, &["segments", "--json"]);
    assert_eq!(segments["segments"][0]["bytes"], 32 << 20, "{segments}");
    let status = json(&place, &["status", "--json"]);
    assert_eq!(status["members"][0]["state"], "active", "{status}");
    // The node itself exports its times as histograms.
    let (_, scraped) = http_get(dev.address("counters of the shards on http://"), "/metrics");
    let puts: f64 = scraped
        .lines()
        .filter(|line| line.starts_with("kvplane_shard_operation_seconds_count{") && line.contains("\"put\""))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
        .sum();
    assert_eq!(puts as u64, 60, "{scraped}");
}

#[test]
fn hot_objects_are_listed_with_their_names() {
    let place = Workplace::new("hot");
    let _dev = place.dev("32M", &["--shards", "2"]);
    fill(&place, Way::Tcp, 0..20);
    for way in Way::BOTH {
        let mut client = place.client(way);
        for _ in 0..2_000 {
            assert!(client.get(b"key-7").unwrap().is_some());
        }
    }
    let hot = wait_until(|| {
        let shown = json(&place, &["hot", "--json", "--limit", "3"]);
        let first = shown["objects"][0].clone();
        (first["key"] == "key-7").then_some(first)
    });
    let hot = hot.expect("the node reports");
    assert_eq!((&hot["tenant"], &hot["node"]), (&"default".into(), &1.into()), "{hot}");
    assert!(hot["gets_per_s"].as_f64() > Some(0.0) && hot["bytes_per_s"].as_f64() > Some(0.0), "{hot}");
    let text = place.run(&["ctl", "hot"]).text();
    assert!(text.contains("gets/s") && text.contains("key-7 of tenant default"), "{text}");
    place.run(&["ctl", "hot", "--node", "1", "--limit", "0"]).failed(2, &["--limit"]);
}

fn ask(address: SocketAddr, path: &str) -> (u16, Value) {
    let (status, body) = http_get(address, path);
    (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}")))
}

#[test]
fn mooncakes_tools_find_their_paths_and_metrics() {
    let place = Workplace::new("paths");
    let dev = place.dev("32M", &["--shards", "2"]);
    fill(&place, Way::Tcp, 0..10);
    let http = dev.http();
    let (status, found) = ask(http, "/query_key?key=key-3");
    assert_eq!((status, &found["success"], &found["data"][0]["size_"]), (200, &true.into(), &VALUE_BYTES.into()));
    let (status, missing) = ask(http, "/query_key?key=nothing");
    assert_eq!((status, &missing["error_code"]), (404, &Value::from(-704)));
    let (_, batch) = ask(http, "/batch_query_keys?keys=key-1,nothing,key-2");
    assert_eq!(batch["data"]["key-2"]["values"][0]["size_"], VALUE_BYTES, "{batch}");
    assert_eq!(batch["data"]["nothing"]["ok"], false, "{batch}");
    assert_eq!(ask(http, "/query_key").0, 400);
    let segment = http_get(http, "/get_all_segments").1.trim().to_owned();
    assert_eq!(ask(http, &format!("/api/v1/segments/status?segment={segment}")).1["status_name"], "OK");
    assert_eq!(ask(http, "/api/v1/segments/status?segment=none").0, 404);
    let used = wait_until(|| {
        let (_, shown) = http_get(http, &format!("/query_segment?segment={segment}"));
        (!shown.contains("Used(bytes): 0\n")).then_some(shown)
    });
    assert!(used.expect("the node reports").contains("Capacity(bytes) : 33554432"));
    let (_, detail) = ask(http, "/get_segments_detail");
    assert_eq!((&detail["total_segments"], &detail["segments"][0]["segment_name"]), (&1.into(), &segment.into()));
    assert_eq!(ask(http, "/leader").1["present"], true);
    assert_eq!(http_get(http, "/role").1, "leader");
    assert!(http_get(http, "/metrics/summary").1.contains("members=1"));
    assert_eq!(ask(http, "/debug/shards").1["nodes"][0]["shards"].as_array().unwrap().len(), 2);
    // Each shard reports by itself, and the sums are complete when both have.
    let lines = ["master_key_count 10", "master_put_start_requests_total 10", "master_soft_pin_key_count 0"];
    for line in lines.into_iter().chain(["master_value_size_bytes_bucket{le=\"8192\"} 10"]) {
        let there = wait_until(|| http_get(http, "/metrics").1.lines().any(|found| found == line).then_some(()));
        assert!(there.is_some(), "{line} in {}", http_get(http, "/metrics").1);
    }
}

#[test]
fn http_beyond_this_machine_needs_a_token_and_with_one_everybody_does() {
    let place = Workplace::new("token");
    let refused = place.run(&["dev", "--pool", "4M", "--http", "0.0.0.0:0"]);
    refused.failed(1, &["--http-token-file"]);
    let open = place.file_of_mode("open", b"0123456789abcdef\n", 0o644);
    place.run(&["dev", "--pool", "4M", "--http-token-file", text(&open)]).failed(1, &["open", "chmod 600"]);
    let short = place.file_of_mode("short", b"abc\n", 0o600);
    place.run(&["dev", "--pool", "4M", "--http-token-file", text(&short)]).failed(1, &["short", "3 bytes"]);
    let file = place.file_of_mode("token", b"0123456789abcdef\n", 0o600);
    let dev = place.dev("4M", &["--http", "0.0.0.0:0", "--http-token-file", text(&file)]);
    let http = SocketAddr::from(([127, 0, 0, 1], dev.http().port()));
    assert_eq!(http_get(http, "/health").0, 200);
    assert_eq!(ask(http, "/metrics").0, 401);
    let mut stream = TcpStream::connect(http).unwrap();
    write!(stream, "GET /role HTTP/1.1\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("leader"), "{answer}");
}

/// Returns the lines of `kvplane ctl events --json` so far.
fn events(process: &Process) -> Vec<Value> {
    process.said().iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn events_begin_with_what_there_is_and_go_on_in_order() {
    let place = Workplace::new("events");
    let _dev = place.dev("32M", &["--shards", "2"]);
    fill(&place, Way::Tcp, 0..10);
    let watcher = Process::start(place.command(&["ctl", "events", "--json"]));
    let there = wait_until(|| (events(&watcher).len() == 10).then_some(()));
    assert!(there.is_some(), "{:?}", watcher.said());
    assert!(events(&watcher).iter().all(|event| event["snapshot"] == true && event["change"] == "stored"));
    fill(&place, Way::Shm, 10..15);
    assert!(place.client(Way::Tcp).remove(b"key-3").unwrap());
    let more = wait_until(|| (events(&watcher).len() >= 16).then(|| events(&watcher)));
    let more = more.unwrap_or_else(|| panic!("{:?}", watcher.said()));
    let live: Vec<&Value> = more.iter().filter(|event| event["snapshot"] == false).collect();
    assert_eq!(live.iter().filter(|event| event["change"] == "stored").count(), 5, "{more:?}");
    let removed: Vec<&&Value> = live.iter().filter(|event| event["change"] == "removed").collect();
    assert!(removed.len() == 1 && more[..10].iter().any(|event| event["digest"] == removed[0]["digest"]), "{more:?}");
    for shard in 0..2 {
        let numbers: Vec<u64> = live
            .iter()
            .filter(|event| event["shard"] == shard)
            .map(|event| event["number"].as_u64().unwrap())
            .collect();
        assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    }
    // With --count the command ends after this number of events.
    let counted = place.run(&["ctl", "events", "--json", "--count", "14"]).text();
    assert_eq!(counted.lines().count(), 14, "{counted}");
}

/// Reads a frame of ZMTP: flags and body.
fn frame(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    let mut head = [0; 2];
    stream.read_exact(&mut head).unwrap();
    let mut length = u64::from(head[1]);
    if head[0] & 2 != 0 {
        let mut rest = [0; 7];
        stream.read_exact(&mut rest).unwrap();
        length = rest.iter().fold(length, |length, byte| length << 8 | u64::from(*byte));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).unwrap();
    (head[0], body)
}

#[test]
fn zeromq_subscribers_get_numbered_batches() {
    let place = Workplace::new("zeromq");
    let dev = place.dev("32M", &["--kv-events", "127.0.0.1:0"]);
    fill(&place, Way::Tcp, 0..5);
    let address = dev.address("events of objects on tcp://");
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = vec![0u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
    greeting.extend_from_slice(b"\0\x01\x01");
    stream.write_all(&greeting).unwrap();
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).unwrap();
    assert_eq!((theirs[0], theirs[9], theirs[10], &theirs[12..16]), (0xff, 0x7f, 3, b"NULL".as_slice()));
    let (flags, ready) = frame(&mut stream);
    assert!(flags == 4 && ready.starts_with(b"\x05READY"), "{flags} {ready:?}");
    let (mut stored, mut sequences, mut told) = (0, Vec::new(), String::new());
    while stored < 5 {
        let [(more, topic), (more_too, sequence), (last, payload)] = std::array::from_fn(|_| frame(&mut stream));
        assert_eq!((more & 1, more_too & 1, last & 1, topic.len()), (1, 1, 0, 0));
        sequences.push(u64::from_be_bytes(sequence.try_into().unwrap()));
        stored += payload.windows(11).filter(|part| part == b"BlockStored").count();
        told.push_str(&String::from_utf8_lossy(&payload));
    }
    assert!((0..5).all(|at| told.contains(&format!("key-{at}"))) && told.contains("object_key"), "{told}");
    assert!(sequences.windows(2).all(|pair| pair[1] == pair[0] + 1), "{sequences:?}");
    with_pyzmq(&place, address);
    place.run(&["dev", "--pool", "4M", "--kv-events", "0.0.0.0:0"]).failed(1, &["0.0.0.0:0", "loopback"]);
}

/// Reads the events with the pyzmq library too.
fn with_pyzmq(place: &Workplace, address: SocketAddr) {
    let present = Command::new("python3").args(["-c", "import zmq, msgpack"]).output();
    if !present.is_ok_and(|output| output.status.success()) {
        println!("skipped: events over pyzmq: Python has no zmq and msgpack");
        return;
    }
    let script = format!(
        "import zmq, msgpack\n\
         s = zmq.Context().socket(zmq.SUB)\n\
         s.setsockopt(zmq.SUBSCRIBE, b'')\n\
         s.setsockopt(zmq.RCVTIMEO, 60000)\n\
         s.connect('tcp://{address}')\n\
         stored = set()\n\
         while len(stored) < 5:\n\
         \x20   topic, seq, payload = s.recv_multipart()\n\
         \x20   ts, events, rank = msgpack.unpackb(payload)\n\
         \x20   assert len(seq) == 8 and rank == 0\n\
         \x20   stored |= {{e['object_digest'] for e in events if e['event_type'] == 'stored'}}\n"
    );
    let file = place.file("subscriber.py", script.as_bytes());
    let output = Command::new("python3").arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
