//! Tests of keys through real processes: put with names, replaced, read in ranges, listed, and removed by pattern.

use std::collections::BTreeSet;

use kvplane::{AsyncClient, Client, ClientConfig, ObjectRange, PutOptions, Region, RegionOptions, Status};

use crate::support::{Way, Workplace, http_ask, text, wait_until};

fn value_of(key: &str, version: usize) -> Vec<u8> {
    let bytes = 100 + key.len() * 1001 % 9000;
    (0..bytes).map(|at| (at * 7 + at / 256 + key.len() * 31 + version * 101) as u8).collect()
}

/// Returns all keys that lists find.
fn listed(client: &mut Client) -> BTreeSet<Vec<u8>> {
    let (mut cursor, mut found) = (None, BTreeSet::new());
    loop {
        let page = client.keys().list(cursor).unwrap();
        found.extend(page.keys.into_iter().map(|key| key.key));
        match page.next {
            Some(next) => cursor = Some(next),
            None => return found,
        }
    }
}

fn keys_of(names: impl Iterator<Item = String>) -> BTreeSet<Vec<u8>> {
    names.map(String::into_bytes).collect()
}

#[test]
fn keys_are_kept_listed_and_removed_by_pattern() {
    let place = Workplace::new("keys");
    let _dev = place.dev("64M", &["--shards", "2"]);
    for way in [Way::Shm, Way::Tcp] {
        let client = &mut place.client(way);
        let names = |from: usize| (from..400).map(|at| format!("model/{}/block-{at}", at % 4));
        for name in names(0) {
            client.put(name.as_bytes(), &value_of(&name, 0)).unwrap();
        }
        // Keys are bytes; these are not text, and one has the maximum length.
        let odd: [Vec<u8>; 2] = [vec![0xff, 0, b'k'], vec![b'l'; 4096]];
        for key in &odd {
            client.put(key, b"odd").unwrap();
        }
        let error = client.put(&[b'l'; 4097], b"too long").unwrap_err().to_string();
        assert!(error.contains("4096") && error.contains("4097"), "{error}");
        assert!(client.put(b"", b"nothing").is_err() && client.put(&vec![b'k'; 64 << 10], b"64 KiB").is_err());
        let mut expected = keys_of(names(0));
        expected.extend(odd.iter().cloned());
        assert_eq!(listed(client), expected);

        assert_eq!(client.keys().remove_matching("^model/[12]/").unwrap(), 200);
        assert_eq!(client.keys().remove_matching(r"(?-u)^\xff").unwrap(), 1);
        assert!(client.keys().remove_matching("(").is_err());
        assert!(client.keys().remove_matching("((a{99}){99}){99}").unwrap_err().to_string().contains("limit"));
        assert_eq!(listed(client).len(), 201);
        assert_eq!(client.get(b"model/1/block-1").unwrap(), None);
        assert_eq!(client.keys().remove_all(false).unwrap(), 201);
        assert_eq!(listed(client), BTreeSet::new());
    }
}

#[test]
fn removal_by_pattern_leaves_nameless_objects_and_those_of_other_tenants() {
    let place = Workplace::new("nameless");
    let dev = place.dev("64M", &["--shards", "2"]);
    for way in [Way::Shm, Way::Tcp] {
        let config = |tenant: &str, keep_keys| ClientConfig {
            tenant: tenant.to_owned(),
            keep_keys,
            stripe_bytes: 1 << 20,
            ..place.client_config(way)
        };
        let long: Vec<u8> = (0..5 << 20).map(|at: u32| (at / 9 + at % 253) as u8).collect();
        let mut others: Vec<Client> = [("big", true), ("secret", false), ("", false)]
            .map(|(tenant, keep_keys)| Client::connect(&config(tenant, keep_keys)).unwrap())
            .into();
        for other in &mut others {
            other.put(b"unseen/long", &long).unwrap();
            other.put(b"unseen/short", b"short").unwrap();
        }
        let mine = &mut Client::connect(&config("", true)).unwrap();
        let fill = |mine: &mut Client| {
            mine.put(b"long", &long).unwrap();
            mine.put(b"short", b"short").unwrap();
        };
        for pattern in [".*", "a*", "", "^$"] {
            fill(mine);
            assert_eq!(
                mine.keys().remove_matching(pattern).unwrap(),
                if pattern == "^$" { 0 } else { 2 },
                "{pattern:?}"
            );
            assert_eq!(mine.exists(b"long").unwrap(), pattern == "^$", "{pattern:?}");
        }
        assert_eq!(mine.keys().remove_all(false).unwrap(), 2);
        fill(mine);
        let future = AsyncClient::connect(&config("", true)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(future.keys().remove_matching(".*")).unwrap(), 2);
        fill(mine);
        assert_eq!(runtime.block_on(future.keys().remove_all(false)).unwrap(), 2);
        fill(mine);
        let (status, said) = http_ask(dev.http(), "POST", "/api/v1/remove_all", "");
        assert!(status == 200 && said.contains("\"removed_count\":2"), "{status} {said}");
        for other in &mut others {
            assert!(other.get(b"unseen/long").unwrap().as_deref() == Some(&long[..]));
            assert_eq!(other.get(b"unseen/short").unwrap().as_deref(), Some(&b"short"[..]));
        }
        assert_eq!(mine.keys().remove_all(true).unwrap(), 6);
    }
}

#[test]
fn objects_are_replaced_and_read_in_parts() {
    let place = Workplace::new("parts");
    let _dev = place.dev("64M", &[]);
    for way in [Way::Shm, Way::Tcp] {
        let client = &mut place.client(way);
        let key = if way == Way::Shm { "shared" } else { "streamed" };
        let first = client.upsert(key.as_bytes(), &value_of(key, 0)).unwrap();
        let mut last = first;
        for version in 1..20 {
            let value = vec![version as u8; version * 1000];
            let next = client.upsert(key.as_bytes(), &value).unwrap();
            assert!(next > last, "versions grow");
            last = next;
            assert_eq!(client.get(key.as_bytes()).unwrap(), Some(value));
        }
        let whole: Vec<u8> = (0..50_000).map(|at| (at / 3 + at % 251) as u8).collect();
        last = client.upsert(key.as_bytes(), &whole).unwrap();
        let region = Region::allocate(&RegionOptions::new("parts", 1 << 20)).unwrap();
        let buffer = client.register(region);
        let parts = [(0, 1), (49_999, 1), (100, 5000), (4096, 4096), (0, 20_000)];
        let mut at = 0;
        let mut ranges = Vec::new();
        for (offset, bytes) in parts {
            ranges.push(ObjectRange { key: key.as_bytes(), offset: offset as u64, into: buffer.slice(at, bytes) });
            at += bytes;
        }
        for outcome in client.ranges().get(&ranges).unwrap() {
            assert_eq!(outcome.unwrap(), Some(last));
        }
        let mut got = vec![0; at];
        buffer.region().copy_out(0, &mut got);
        let wanted: Vec<u8> =
            parts.iter().flat_map(|(offset, bytes)| whole[*offset..offset + bytes].iter().copied()).collect();
        assert!(got == wanted);
        let past = ObjectRange { key: key.as_bytes(), offset: 49_999, into: buffer.slice(0, 2) };
        let none = ObjectRange { key: b"nobody", offset: 0, into: buffer.slice(8, 2) };
        let outcomes = client.ranges().get(&[past, none]).unwrap();
        assert_eq!(outcomes[0].as_ref().unwrap_err().status(), Some(Status::OutOfRange));
        assert!(matches!(outcomes[1], Ok(None)));
        let overlap = [past, ObjectRange { into: buffer.slice(1, 2), ..none }];
        assert!(client.ranges().get(&overlap).unwrap_err().to_string().contains("overlapping"));

        let pieces = [buffer.slice(0, 30_000), buffer.slice(100_000, 1), buffer.slice(200_000, 19_999)];
        assert_eq!(client.scatter_gather().get_exact(key.as_bytes(), &pieces).unwrap(), Some(last));
        let mut middle = [0];
        buffer.region().copy_out(100_000, &mut middle);
        assert_eq!(middle[0], whole[30_000]);
        let small = client.scatter_gather().get_exact(key.as_bytes(), &pieces[..2]).unwrap_err();
        assert_eq!(small.status(), Some(Status::BufferTooSmall));
        client.keys().remove_all(true).unwrap();
    }
}

#[test]
fn ctl_lists_replaces_and_deletes() {
    let place = Workplace::new("ctlkeys");
    let _dev = place.dev("32M", &[]);
    let run = |arguments: &[&str]| place.run(arguments);
    let file = place.file("value", b"first");
    let newer = place.file("newer", b"second");
    for key in ["a/1", "a/2", "b/1"] {
        run(&["ctl", "put", key, text(&file)]).well();
    }
    assert!(run(&["ctl", "put", "a/1", text(&newer)]).text().contains("left as it is"));
    assert!(run(&["ctl", "put", "--replace", "a/1", text(&newer)]).text().starts_with("stored 6 bytes"));
    assert_eq!(run(&["ctl", "get", "a/1"]).well(), b"second");
    let mut keys: Vec<String> = run(&["ctl", "keys"]).text().lines().map(str::to_owned).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["a/1", "a/2", "b/1"]);
    assert_eq!(run(&["ctl", "keys", "--limit", "2"]).text().lines().count(), 2);
    let json = run(&["ctl", "keys", "--json"]).text();
    let first: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((&first["in_memory"], &first["on_ssd"], &first["tenant"]), (&true.into(), &false.into(), &"".into()));
    assert_eq!(run(&["ctl", "delete-matching", "^a/"]).text(), "2 objects removed\n");
    run(&["ctl", "delete-matching", "("]).failed(1, &["the pattern cannot be used"]);
    // The missing one of several keys is named.
    run(&["ctl", "copy", "b/1", "no\"thing"]).failed(1, &[r#"under "no\"thing""#]);
    // The default tenant has a name too.
    assert_eq!(run(&["ctl", "--tenant", "default", "get", "b/1"]).well(), b"first");
    run(&["ctl", "--tenant", "acme", "get", "b/1"]).failed(1, &["no object"]);
    for name in ["", "default"] {
        assert!(run(&["ctl", "tenants", "set", name, "--weight", "2"]).text().starts_with("tenant default is set"));
    }
    run(&["ctl", "--tenant", "acme", "delete-all"]).failed(1, &["all tenants", "acme"]);
    assert_eq!(run(&["ctl", "delete-all"]).text(), "1 objects removed\n");
    assert_eq!(run(&["ctl", "keys", "--long"]).text(), "");
}

#[test]
fn keys_of_what_only_the_ssd_has_are_listed_and_replacing_it_lasts() {
    let place = Workplace::new("ssdkeys");
    let ssd = place.path("ssd");
    let arguments = ["--shards", "1", "--ssd", &format!("{}:256M", text(&ssd)), "--ssd-ack", "durable"];
    let mut dev = place.dev("16M", &arguments);
    let mut client = place.client(Way::Tcp);
    let names = || (0..60).map(|at| format!("kept-{at}"));
    // There are more objects than memory holds.
    let value = |at: usize| (0..600_000).map(|byte| (byte / 5 + at) as u8).collect::<Vec<u8>>();
    let put = |client: &mut Client, at: usize, name: &str, replace: bool| {
        let options = PutOptions { replace, group: 5, ..PutOptions::default() };
        client.put_with(name.as_bytes(), &value(at), &options).unwrap();
    };
    for (at, name) in names().enumerate() {
        put(&mut client, at, &name, false);
    }
    put(&mut client, 1000, "kept-7", true);
    assert_eq!(listed(&mut client), keys_of(names()));
    drop(client);
    dev.kill();
    let _dev = place.dev("16M", &arguments);
    let mut client = place.client(Way::Tcp);
    wait_until(|| (listed(&mut client).len() == 60).then_some(()));
    assert_eq!(listed(&mut client), keys_of(names()), "after a restart");
    assert!(client.get(b"kept-7").unwrap() == Some(value(1000)), "the former version is back");
    for (at, name) in names().enumerate().filter(|(at, _)| *at != 7) {
        assert!(client.get(name.as_bytes()).unwrap() == Some(value(at)), "{name}");
    }
    assert_eq!(listed(&mut client), keys_of(names()), "after they came back to memory");
    assert_eq!(client.keys().remove_matching("^kept-[0-4]$").unwrap(), 5);
    assert_eq!(listed(&mut client).len(), 55);
}

#[test]
fn objects_of_4_kib_take_4_kib_above_an_ssd_keys_and_all() {
    // The memory has 4,096 units: one for each object, and 93 for their keys.
    const OBJECTS: usize = 3900;
    let bed = crate::ssd::objects::Bed::new("packedkeys", &[]);
    let dev = bed.start();
    let client = &mut bed.client(Way::Shm);
    let region = Region::allocate(&RegionOptions::new("values", 4096 * 64)).unwrap();
    let buffer = client.register(region);
    let keys: Vec<String> = (0..OBJECTS).map(|at| format!("model/layer-{}/block-{at:040}", at % 80)).collect();
    for (batch, keys) in keys.chunks(64).enumerate() {
        let values: Vec<u8> = (0..keys.len() * 4096).map(|at| (at / 8 * 31 + batch * 7 + at % 251) as u8).collect();
        buffer.region().copy_in(0, &values);
        let items: Vec<_> = keys.iter().enumerate().map(|(at, key)| (key, buffer.slice(at * 4096, 4096))).collect();
        for put in client.batch_put_from(&items).unwrap() {
            put.unwrap();
        }
    }
    assert_eq!(crate::ssd::objects::counted(&dev, "kvplane_shard_evictions_total"), 0.0);
    let (mut cursor, mut found) = (None, BTreeSet::new());
    loop {
        let page = client.keys().list(cursor).unwrap();
        for key in page.keys {
            assert!(key.in_memory && key.bytes == 4096, "{key:?}");
            found.insert(key.key);
        }
        match page.next {
            Some(next) => cursor = Some(next),
            None => break,
        }
    }
    assert_eq!(found, keys_of(keys.into_iter()));
}
