//! Tests of operating the SSDs of a running node: status, verification of records, reclaim, prefetch.

use std::time::Duration;

use kvplane::PrefetchTo;
use serde_json::Value;

use crate::ssd::objects::{Bed, counted, flip, is_there, name, recovered, value};
use crate::support::{Outcome, Way, wait_until};

fn tier(bed: &Bed, arguments: &[&str]) -> (Outcome, Value) {
    let outcome = bed.place.run(&[&["ctl", "tier"], arguments, &["--json"]].concat());
    let shown = serde_json::from_slice(&outcome.stdout).unwrap_or(Value::Null);
    (outcome, shown)
}

fn number(shown: &Value, path: &str) -> u64 {
    let found = shown.pointer(&format!("/nodes/0/shards/0/{path}"));
    found.and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path} in {shown}"))
}

#[test]
fn records_are_checked_while_the_node_serves_and_room_is_made() {
    let bed = Bed::new("operate", &["--ssd-ack", "durable", "--ssd-scrub", "0"]);
    let _dev = bed.start();
    let mut client = bed.client(Way::Shm);
    for key in 0..64 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    let status = wait_until(|| {
        let (outcome, shown) = tier(&bed, &["status"]);
        outcome.well();
        (shown["nodes"] != Value::Array(vec![]) && number(&shown, "objects") == 64).then_some(shown)
    });
    let status = status.expect("the node reports");
    assert!(number(&status, "written_bytes") >= number(&status, "put_bytes"), "{status}");
    assert_eq!(status.pointer("/nodes/0/shards/0/state"), Some(&Value::from("serving")));
    let (outcome, shown) = tier(&bed, &["verify"]);
    outcome.well();
    assert_eq!((number(&shown, "scrub/records"), number(&shown, "scrub/bad_records")), (64, 0));
    assert!(number(&shown, "scrub/bytes") >= number(&status, "put_bytes"));
    flip(&bed.place.path("ssd"));
    let (outcome, shown) = tier(&bed, &["verify", "--rate", "64M"]);
    let bad = number(&shown, "scrub/bad_records");
    assert!(!outcome.status.success() && outcome.stderr.contains("were damaged"), "{}", outcome.stderr);
    assert!((1..64).contains(&bad), "{shown}");
    // All objects are still in memory, so all are written again.
    let healed = wait_until(|| {
        let (_, shown) = tier(&bed, &["status"]);
        (number(&shown, "errors/rewritten") == bad && number(&shown, "objects") == 64).then_some(())
    });
    assert!(healed.is_some(), "{:?}", tier(&bed, &["status"]).1);
    tier(&bed, &["verify"]).0.well();
    assert!((0..64).all(|key| is_there(&mut client, key)));
    let (outcome, shown) = tier(&bed, &["reclaim", "--free", "50"]);
    outcome.well();
    assert_eq!(number(&shown, "segments/wanted_free"), 0);
    let most = number(&shown, "segments/all").div_ceil(2);
    assert!(number(&shown, "segments/free") >= most, "{shown}");
    let text = String::from_utf8(bed.place.run(&["ctl", "tier", "status"]).well()).unwrap();
    assert!(text.contains("amplification") && text.contains("scrub: idle"), "{text}");
}

#[test]
fn prefetched_object_is_evicted_from_memory_without_an_access() {
    let bed = Bed::new("prefetch", &["--ssd-ack", "buffered", "--ssd-prefetch", "40"]);
    let mut dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    for key in 0..16 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    drop(client);
    dev.kill();
    let dev = bed.start();
    recovered(&dev);
    for way in Way::BOTH {
        let mut client = bed.client(way);
        let names: Vec<String> = (0..17).map(name).collect();
        assert!(client.batch_exists(&names[..16]).unwrap().into_iter().all(|there| there));
        assert_eq!(counted(&dev, "kvplane_shard_objects"), 0.0, "a plain question reads nothing");
        let there = client.prefetch(&names, PrefetchTo::Memory, Duration::from_secs(2)).unwrap();
        assert_eq!(there.iter().filter(|there| **there).count(), 16);
        let read = wait_until(|| (counted(&dev, "kvplane_shard_objects") == 16.0).then_some(()));
        assert!(read.is_some(), "all are in memory");
        let gone = wait_until(|| (counted(&dev, "kvplane_shard_objects") == 0.0).then_some(()));
        assert!(gone.is_some(), "nobody asked");
    }
    assert_eq!(counted(&dev, "kvplane_tier_prefetches_expired_total"), 32.0);
    let mut client = bed.client(Way::Shm);
    assert!(client.batch_exists_ahead(&[name(3)]).unwrap()[0]);
    assert!(is_there(&mut client, 3));
    assert_eq!(counted(&dev, "kvplane_tier_prefetches_used_total"), 1.0);
}

#[test]
fn beyond_the_budget_only_promised_objects_are_written() {
    let bed = Bed::new("budget", &["--ssd-budget", "8M"]);
    let dev = bed.start();
    let mut client = bed.client(Way::Shm);
    for key in 0..48 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    let counted = |family: &str| counted(&dev, family);
    let settled = wait_until(|| (counted("kvplane_tier_backlog_objects") == 0.0).then_some(()));
    assert!(settled.is_some());
    assert!(counted("kvplane_tier_writes_over_budget_total") >= 1.0, "an eighth of the day's bytes is there at once");
    assert!(counted("kvplane_tier_writes_total") < 48.0);
    assert!(dev.said().iter().any(|line| line.contains("daily write budget")), "{:?}", dev.said());
    assert!(counted("kvplane_tier_admission") >= 1.0);
}
