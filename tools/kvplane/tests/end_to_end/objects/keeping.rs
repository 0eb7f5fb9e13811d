//! Tests of retention through real processes: pins, groups and types as requested by puts.

use std::time::Duration;

use kvplane::{Client, ObjectPriority, PutOptions, Status};
use serde_json::Value;

use crate::support::{Way, Workplace, http_ask};

const BYTES: usize = 64 << 10;

fn value(at: usize) -> Vec<u8> {
    (0..BYTES).map(|byte| (byte / 3 + at * 11) as u8).collect()
}

fn put(client: &mut Client, key: &str, at: usize, options: PutOptions) -> Result<(), Status> {
    client.put_with(key.as_bytes(), &value(at), &options).map(|_| ()).map_err(|error| error.status().expect("a status"))
}

/// Puts four times the memory, so that only pinned objects are left.
fn flood(client: &mut Client, name: &str) {
    for at in 0..4 * (16 << 20) / BYTES {
        put(client, &format!("{name}-{at}"), at, PutOptions::default()).expect("what is not pinned makes room");
    }
}

#[test]
fn pinned_objects_stay_for_as_long_as_their_puts_asked() {
    let place = Workplace::new("pins");
    let _dev = place.dev("16M", &["--shards", "1", "--hard-pins", "20"]);
    for (run, way) in [Way::Shm, Way::Tcp].into_iter().enumerate() {
        let client = &mut place.client(way);
        let hard = PutOptions { hard_pin: true, data_type: 3, ..PutOptions::default() };
        let most = 16 * (1 << 20) / 5 / BYTES;
        let refused = (0..2 * most).filter(|at| put(client, &format!("hard-{run}-{at}"), *at, hard).is_err());
        let stored = 2 * most - refused.count();
        assert!((most - 1..=most).contains(&stored), "{stored} of {most}");
        let status = put(client, "one-more", 0, hard).unwrap_err();
        assert_eq!(status, Status::PinLimit);
        let soft = |ms| PutOptions { soft_pin_ms: ms, ..PutOptions::default() };
        put(client, &format!("soft-{run}"), 1, soft(PutOptions::SOFT_PIN_MS)).unwrap();
        put(client, &format!("brief-{run}"), 2, soft(1)).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        flood(client, &format!("flood-{run}"));
        for at in 0..stored {
            assert!(client.get(format!("hard-{run}-{at}").as_bytes()).unwrap() == Some(value(at)), "{at}");
        }
        assert!(client.exists(format!("soft-{run}").as_bytes()).unwrap(), "its time is not over");
        assert!(!client.exists(format!("brief-{run}").as_bytes()).unwrap(), "its time is over");
        let page = client.keys().list(None).unwrap();
        let pinned = page.keys.iter().filter(|key| key.hard_pin && key.data_type == 3).count();
        assert!(pinned > 0, "listed keys have the options of their puts");
        // Hard-pinned objects are freed only by removal.
        assert_eq!(client.keys().remove_matching("^hard-").unwrap(), stored as u64);
        put(client, "one-more", 0, hard).expect("there is room for pins again");
        client.keys().remove_all(false).unwrap();
    }
    let error =
        place.client(Way::Tcp).put_with(b"k", b"v", &PutOptions { soft_pin_ms: 86_400_001, ..PutOptions::default() });
    assert!(error.unwrap_err().to_string().contains("86400000"));
}

#[test]
fn objects_of_a_group_go_together() {
    let place = Workplace::new("groups");
    let _dev = place.dev("16M", &["--shards", "1", "--eviction", "lru"]);
    let client = &mut place.client(Way::Tcp);
    let mut partly = 0;
    for group in 1..=200u64 {
        for part in 0..3 {
            let options = PutOptions { group, ..PutOptions::default() };
            put(client, &format!("{group}/{part}"), part, options).unwrap();
        }
        // Only one object of the first group is read: that counts for all three.
        assert!(client.get(b"1/1").unwrap().is_some(), "after group {group}");
    }
    let keys: Vec<String> = (1..=200).flat_map(|group| (0..3).map(move |part| format!("{group}/{part}"))).collect();
    let there = client.batch_exists(&keys).unwrap();
    for (group, parts) in there.chunks(3).enumerate() {
        let count = parts.iter().filter(|part| **part).count();
        partly += usize::from(count % 3 != 0);
        assert!(group > 0 || count == 3, "{count} parts of the group that is accessed");
    }
    assert_eq!(partly, 0, "groups that are there in part");
    assert!(there.iter().filter(|there| !**there).count() > 150, "memory holds far less");
}

#[test]
fn priorities_of_client_command_and_http_outlast_a_flood() {
    let place = Workplace::new("priorities");
    let dev = place.dev("16M", &["--shards", "2"]);
    let client = &mut place.client(Way::Tcp);
    let rank = |number| ObjectPriority::new(number).expect("it is in range");
    let keys = |name: &str| (0..6).map(|at| format!("{name}-{at}")).collect::<Vec<String>>();
    for (name, number) in [("high", 3), ("command", 0), ("http", -1), ("client", 0), ("usual", 0), ("low", -2)] {
        for (at, key) in keys(name).iter().enumerate() {
            put(client, key, at, PutOptions { priority: rank(number), ..PutOptions::default() }).unwrap();
        }
    }
    let command: Vec<String> = keys("command");
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let ctl = |words: &[&str]| place.run(&[&["ctl", "pins", "priority"], words].concat());
    let said = ctl(&[&["4"], &words[..]].concat()).text();
    assert!(said.contains("6 objects of priority 4"), "{said}");
    let ask = |body: &Value| -> (u16, Value) {
        let (status, said) = http_ask(dev.http(), "POST", "/api/v1/priority", &body.to_string());
        (status, serde_json::from_str(&said).unwrap_or(Value::from(said)))
    };
    let (status, said) = ask(&serde_json::json!({ "keys": keys("http"), "priority": 2 }));
    assert_eq!((status, &said["objects"]), (200, &6.into()), "{said}");
    let there = client.keys().pins().set_priority(&[keys("client"), vec!["no such".to_owned()]].concat(), rank(1));
    assert_eq!(there.unwrap(), [true, true, true, true, true, true, false]);
    flood(client, "flood");
    for name in ["high", "command", "http", "client"] {
        assert!(client.batch_exists(&keys(name)).unwrap().into_iter().all(|there| there), "{name}");
    }
    // The flood has the same priority. What is lower may remain, up to its floor.
    assert!(!client.batch_exists(&keys("usual")).unwrap().contains(&true));
    let (mut listed, mut cursor) = (Vec::new(), None);
    loop {
        let page = client.keys().list(cursor).unwrap();
        listed.extend(page.keys);
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    for (name, number) in [("high-0", 3), ("command-0", 4), ("http-0", 2), ("client-0", 1)] {
        let key = listed.iter().find(|key| key.key == name.as_bytes()).expect("it is there");
        assert_eq!(key.priority, rank(number), "{name}");
    }
    ctl(&["5", "high-0"]).failed(2, &["from -4 to 4, not 5"]);
    ctl(&["1", "nothing"]).failed(1, &["not in memory"]);
    let (status, said) = ask(&serde_json::json!({ "keys": ["high-0"], "priority": -5 }));
    assert!(status == 400 && said.to_string().contains("from -4 to 4, not -5"), "{said}");
    // More keys than a body may have, and a hint.
    let many: Vec<String> = (0..70).map(|at| format!("{at}-{}", "k".repeat(1_000))).collect();
    let (status, said) = ask(&serde_json::json!({ "keys": many, "priority": 1 }));
    assert!(status == 413 && said.to_string().contains("65536 bytes: name the keys in several requests"), "{said}");
}

#[test]
fn a_session_is_retained_by_client_command_and_http_and_released_early() {
    let place = Workplace::new("retentions");
    let dev = place.dev("16M", &["--shards", "2", "--hard-pins", "50"]);
    let http = dev.http();
    let ask = |method: &str, path: &str, body: &str| -> (u16, Value) {
        let (status, body) = http_ask(http, method, path, body);
        (status, serde_json::from_str(&body).unwrap_or(Value::from(body)))
    };
    let client = &mut place.client(Way::Tcp);
    let hour = Duration::from_secs(3_600);
    let keys = |name: &str| (0..6).map(|at| format!("{name}-{at}")).collect::<Vec<String>>();
    for name in ["one", "other", "agent", "soft", "gone"] {
        for (at, key) in keys(name).iter().enumerate() {
            let group = if name == "agent" { 77 } else { 0 };
            put(client, key, at, PutOptions { group, ..PutOptions::default() }).unwrap();
        }
    }
    let retained = client.keys().pins().retain(7, &keys("one"), hour).unwrap();
    assert!(retained.into_iter().all(|one| one.unwrap()));
    let missing = client.keys().pins().retain(7, &["no such key"], hour).unwrap().pop().unwrap();
    assert!(!missing.unwrap());
    assert_eq!(client.keys().pins().retain_group(77, hour).unwrap(), 6);
    let other: Vec<String> = keys("other");
    let words: Vec<&str> = other.iter().map(String::as_str).collect();
    let ctl = |words: &[&str]| place.run(&[&["ctl", "pins"], words].concat());
    let said = ctl(&[&["retain", "--retention", "8", "--ttl-ms", "3600000"], &words[..]].concat()).text();
    assert!(said.contains("6 objects retained"), "{said}");
    let body = serde_json::json!({ "keys": keys("soft") }).to_string();
    let (status, said) = ask("POST", "/api/v1/soft_pin", &body);
    assert_eq!((status, &said["objects"]), (200, &6.into()), "{said}");
    let kept =
        |client: &mut Client, name: &str| client.batch_exists(&keys(name)).unwrap().into_iter().all(|there| there);
    flood(client, "flood");
    for name in ["one", "other", "agent", "soft"] {
        assert!(kept(client, name), "{name}");
    }
    assert!(!client.batch_exists(&keys("gone")).unwrap().contains(&true));
    let listed = client.keys().list(None).unwrap();
    assert!(listed.keys.iter().any(|key| key.retained) && !listed.keys.iter().all(|key| key.retained));
    // Each way ends what another began.
    assert_eq!(ask("POST", "/api/v1/release", r#"{"retention": 7}"#).1["objects"], 6);
    assert!(ctl(&["release", "77"]).text().contains("6 objects released"));
    assert_eq!(client.keys().pins().renew(8, hour).unwrap(), 6);
    assert_eq!(client.keys().pins().release(8).unwrap(), 6);
    let (_, said) = ask("POST", "/api/v1/soft_unpin", &body);
    assert_eq!(said["objects"], 6, "{said}");
    flood(client, "again");
    for name in ["one", "other", "agent", "soft"] {
        assert!(!kept(client, name), "{name} is evicted like others again");
    }
    // A long object is retained with all its stripes, of which both shards together may pin 8 MiB.
    let long = vec![7; 10 << 20];
    client.put(b"long", &long).unwrap();
    let (status, said) = ask("POST", "/api/v1/retain", r#"{"retention": "9", "ttl_ms": 60000, "keys": ["long"]}"#);
    assert_eq!((status, &said["success"]), (200, &false.into()), "{said}");
    assert!(said["results"][0]["error"].as_str().is_some_and(|why| why.contains("pin")), "{said}");
    let (status, said) = ask("POST", "/api/v1/retain", r#"{"retention": 9, "ttl_ms": 86400001}"#);
    assert_eq!((status, &said["error_code"]), (400, &(-600).into()), "{said}");
    assert_eq!(ask("GET", "/api/v1/retain", "").0, 405);
    ctl(&["retain", "--ttl-ms", "1", "key"]).failed(2, &["--retention"]);
    ctl(&["soft", "nothing"]).failed(1, &["not in memory"]);
}
