//! Tests of tenants through real processes: quotas that hold without a round trip to the control plane in a put, and
//! their administration.

use std::net::SocketAddr;

use kvplane::{Client, ClientConfig, PutAck, PutOptions, Status};
use serde_json::Value;

use crate::ssd::objects::{Bed, counted};
use crate::support::{Way, Workplace, http_ask, http_get, text, wait_until};

const BYTES: usize = 64 << 10;
const MIB: u64 = 1 << 20;

fn value(at: usize) -> Vec<u8> {
    (0..BYTES).map(|byte| (byte / 5 + at * 13) as u8).collect()
}

fn client_of(place: &Workplace, tenant: &str, keep_keys: bool) -> Client {
    let config = ClientConfig { tenant: tenant.to_owned(), keep_keys, ..place.client_config(Way::Tcp) };
    Client::connect(&config).unwrap()
}

fn put(client: &mut Client, key: &str, at: usize) -> Result<(), Status> {
    client.put(key.as_bytes(), &value(at)).map(|_| ()).map_err(|error| error.status().expect("a status"))
}

fn ask(http: SocketAddr, method: &str, path: &str, body: &str) -> (u16, Value) {
    let (status, body) = http_ask(http, method, path, body);
    let value = serde_json::from_str(&body);
    (status, value.unwrap_or_else(|_| Value::from(body)))
}

fn tenant(place: &Workplace, name: &str) -> Value {
    let list: Value = serde_json::from_str(&place.run(&["ctl", "tenants", "list", "--json"]).text()).unwrap();
    let found = list["tenants"].as_array().unwrap().iter().find(|tenant| tenant["name"] == name);
    found.cloned().unwrap_or(Value::Null)
}

/// Stripes have no keys, but are charged to their tenant all the same.
#[test]
fn long_objects_are_charged_to_their_tenant() {
    let place = Workplace::new("long-quota");
    let _dev = place.dev("64M", &["--shards", "1"]);
    place.run(&["ctl", "tenants", "set", "acme", "--memory", "4M"]).well();
    let config = ClientConfig { tenant: "acme".to_owned(), stripe_bytes: 1 << 20, ..place.client_config(Way::Tcp) };
    let mut client = Client::connect(&config).unwrap();
    let mut tries = 0;
    let known = wait_until(|| {
        // Nodes learn of a tenant within a heartbeat.
        tries += 1;
        client.put(format!("long-{tries}").as_bytes(), &vec![7; 16 << 20]).is_err().then_some(())
    });
    assert!(known.is_some(), "16 MiB are more than 4");
    assert!(client.get(format!("long-{tries}").as_bytes()).unwrap().is_none());
    client.put(b"fits", &vec![7; 2 << 20]).unwrap();
    let used = wait_until(|| tenant(&place, "acme")["used_bytes"].as_u64().filter(|used| *used >= 2 << 20));
    assert!(used.is_some(), "{}", tenant(&place, "acme"));
}

/// Returns the number of requests that are timed for a tenant.
fn timed(metrics: &str, tenant: &str, operation: &str) -> u64 {
    let (tenant, operation) = (format!("tenant=\"{tenant}\""), format!("operation=\"{operation}\""));
    let line = |line: &&str| line.contains(&tenant) && line.contains(&operation);
    let counts = metrics.lines().filter(|line| line.starts_with("kvplane_shard_tenant_operation_seconds_count"));
    counts.filter(line).map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

#[test]
fn times_of_operations_are_known_by_tenant() {
    let place = Workplace::new("timed");
    let dev = place.dev("32M", &["--shards", "2", "--metrics-port", "0"]);
    let shards = dev.address("counters of the shards on http://");
    for way in Way::BOTH {
        let config = |tenant: &str| ClientConfig { tenant: tenant.to_owned(), ..place.client_config(way) };
        let mut acme = Client::connect(&config("acme")).unwrap();
        let mut other = Client::connect(&config("")).unwrap();
        for at in 0..20 {
            put(&mut acme, &format!("{way:?} {at}"), at).unwrap();
            if at < 5 {
                put(&mut other, &format!("{way:?} {at}"), at).unwrap();
            }
        }
        for _ in 0..3 {
            (0..20).for_each(|at| assert!(acme.get(format!("{way:?} {at}").as_bytes()).unwrap().is_some()));
            (0..5).for_each(|at| assert!(other.get(format!("{way:?} {at}").as_bytes()).unwrap().is_some()));
        }
        assert!(acme.get(b"nothing").unwrap().is_none());
    }
    // A shard knows a tenant from its first put for it.
    let (_, shown) = http_get(shards, "/metrics");
    let of = |tenant: &str, operation: &str| timed(&shown, tenant, operation);
    assert_eq!((of("acme", "put"), of("acme", "get")), (40, 120), "{shown}");
    assert!((1..=10).contains(&of("default", "put")) && (1..=30).contains(&of("default", "get")), "{shown}");
    assert_eq!(of("#unknown", "get"), 0);
}

/// Objects promoted from the SSD are charged too.
#[test]
fn gets_do_not_take_a_tenant_beyond_its_quota() {
    let bed = Bed::new("got-quota", &["--ssd-ack", "durable"]);
    let dev = bed.start();
    let place = &bed.place;
    place.run(&["ctl", "tenants", "set", "acme", "--memory", "4M"]).well();
    let mut client = client_of(place, "acme", true);
    let used = || tenant(place, "acme")["used_bytes"].as_u64().unwrap_or(0);
    // The node learns of the quota within a heartbeat, and enforces it from the next put on.
    let known = wait_until(|| {
        (0..160).for_each(|at| put(&mut client, &format!("key-{at}"), at).unwrap());
        client.put_with(b"key-0", &value(0), &PutOptions { replace: true, ..PutOptions::default() }).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        (1..=4 * MIB).contains(&used()).then_some(())
    });
    assert!(known.is_some(), "{} bytes", used());
    for _ in 0..4 {
        for at in 0..160 {
            assert!(client.get(format!("key-{at}").as_bytes()).unwrap().is_some_and(|got| got == value(at)), "{at}");
        }
    }
    assert!(counted(&dev, "kvplane_tier_promotions_total") > 0.0, "nothing stayed in memory");
    // Reports come at intervals: the values shown at once are those of before.
    let shown: Vec<u64> = std::iter::repeat_with(|| {
        std::thread::sleep(std::time::Duration::from_millis(250));
        used()
    })
    .take(12)
    .collect();
    assert!(shown.iter().all(|used| *used <= 4 * MIB + (64 << 10)), "{shown:?}");
}

#[test]
fn a_tenant_has_no_more_than_its_quota_and_others_keep_theirs() {
    let place = Workplace::new("quotas");
    let state = place.path("state");
    let arguments = ["--shards", "2", "--strict-tenants", "--state", text(&state)];
    let mut dev = place.dev("32M", &arguments);
    let mut big = client_of(&place, "big", true);
    // An unknown tenant may not put, and gets an error.
    assert_eq!(put(&mut big, "k", 0), Err(Status::NoTenant));
    let other = &mut place.client(Way::Tcp);
    (0..100).for_each(|at| put(other, &format!("other-{at}"), at).unwrap());
    place.run(&["ctl", "tenants", "set", "big", "--memory", "8M", "--weight", "3"]).well();
    // Each shard learns of the tenant by itself.
    let are_taken = wait_until(|| (0..16).all(|at| put(&mut big, &format!("k-{at}"), at).is_ok()).then_some(()));
    are_taken.expect("both shards know within a heartbeat");
    // The puts are four times its quota, and the whole pool: it evicts its own objects.
    for at in 0..512 {
        put(&mut big, &format!("big-{at}"), at).unwrap();
    }
    assert!((0..100).all(|at| other.get(format!("other-{at}").as_bytes()).unwrap() == Some(value(at))));
    // Its shards get more of the quota with the next heartbeats, and use it.
    let mut more = 0..;
    let shown = wait_until(|| {
        more.by_ref().take(32).for_each(|at: usize| put(&mut big, &format!("more-{at}"), at).unwrap());
        let shown = tenant(&place, "big");
        let used = shown["used_bytes"].as_u64().unwrap();
        assert!(used <= 8 * MIB, "{shown}");
        (shown["evicted_bytes"] != 0 && used > 4 * MIB).then_some(shown)
    });
    let shown = shown.expect("it uses what it may");
    assert!(shown["leased_bytes"].as_u64().unwrap() <= 8 * MIB && shown["weight"] == 3, "{shown}");
    // Objects without keys are charged all the same.
    let mut nameless = client_of(&place, "big", false);
    (0..512).for_each(|at| put(&mut nameless, &format!("nameless-{at}"), at).unwrap());
    assert!(other.exists(b"other-5").unwrap());
    // Pinned objects cannot be evicted: then its puts are refused, with the reason.
    let hard = PutOptions { hard_pin: true, ..PutOptions::default() };
    let refused = (0..200).find_map(|at| big.put_with(format!("pin-{at}").as_bytes(), &value(at), &hard).err());
    assert!(matches!(refused.unwrap().status(), Some(Status::QuotaExceeded | Status::PinLimit)));
    // The tenant survives a kill.
    dev.kill();
    let dev = place.dev("32M", &arguments);
    assert_eq!(tenant(&place, "big")["quota_bytes"], 8 * MIB);
    let mut big = client_of(&place, "big", true);
    wait_until(|| put(&mut big, "again", 0).ok()).unwrap();
    drop(dev);
}

#[test]
fn mooncakes_paths_administer_quotas_keys_and_removal() {
    let place = Workplace::new("admins");
    let dev = place.dev("32M", &["--shards", "1"]);
    let http = dev.http();
    let path = "/api/v1/tenant_quotas?tenant_id=acme";
    assert_eq!(ask(http, "GET", path, "").0, 404);
    assert_eq!(ask(http, "GET", path, "").1["error_code"], -1701);
    // Bytes that are not text name no tenant or key.
    for path in ["/api/v1/tenant_quotas?tenant_id=%ff", "/get_all_keys?tenant_id=%ff", "/query_key?key=%ff"] {
        let (status, said) = ask(http, "GET", path, "");
        assert_eq!((status, &said["error_code"]), (400, &Value::from(-600)), "{path}: {said}");
    }
    for bad in ["{", "{}", r#"{"requested_quota_bytes":0}"#, r#"{"requested_quota_bytes":1,"weight":0}"#] {
        assert_eq!(
            (ask(http, "PUT", path, bad).0, &ask(http, "PUT", path, bad).1["error_code"]),
            (400, &(-600).into())
        );
    }
    let (status, made) = ask(http, "PUT", path, r#"{"requested_quota_bytes":4194304}"#);
    assert_eq!((status, &made["data"]["requested_quota_bytes"]), (200, &Value::from(4 * MIB)), "{made}");
    assert_eq!(made["data"]["has_explicit_policy"], true);
    let mut acme = client_of(&place, "acme", true);
    (0..10).for_each(|at| put(&mut acme, &format!("a\n{at}"), at).unwrap());
    (0..10).for_each(|at| put(&mut place.client(Way::Tcp), &format!("d{at}"), at).unwrap());
    let charged = wait_until(|| {
        let shown = ask(http, "GET", path, "").1["data"]["charged_bytes"].as_u64()?;
        (shown >= 10 * BYTES as u64).then_some(())
    });
    charged.expect("the node tells what it has");
    let (status, full) = ask(http, "DELETE", path, "");
    assert_eq!((status, &full["error_code"]), (409, &Value::from(-1702)), "{full}");
    // Keys that could forge a line are escaped.
    let (_, keys) = http_get(http, "/get_all_keys?tenant_id=acme");
    assert_eq!((keys.lines().count(), keys.contains("a\\n7")), (10, true), "{keys}");
    assert_eq!(http_get(http, "/get_all_keys").1.lines().count(), 10);
    assert_eq!(ask(http, "GET", "/api/v1/remove_all", "").0, 405);
    let (_, removed) = ask(http, "POST", "/api/v1/remove_all?force=true&tenant_id=acme", "");
    assert_eq!((&removed["success"], &removed["removed_count"]), (&true.into(), &10.into()), "{removed}");
    assert!(place.client(Way::Tcp).exists(b"d3").unwrap(), "another tenant's");
    wait_until(|| (ask(http, "DELETE", path, "").0 == 200).then_some(())).expect("it has nothing any more");
    assert_eq!(ask(http, "GET", path, "").0, 404);
    let all = ask(http, "GET", "/api/v1/tenant_quotas", "").1;
    assert_eq!(all["data"][0]["tenant_id"], "default", "{all}");
    assert_eq!(ask(http, "POST", "/api/v1/remove_all", "").1["removed_count"], 10);
}

/// Returns the value of a tenant's metric of the control plane.
fn tenant_metric(http: SocketAddr, family: &str, name: &str) -> Option<f64> {
    let (_, shown) = http_get(http, "/metrics");
    let series = format!("{family}{{tenant=\"{name}\"}} ");
    shown.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
}

#[test]
fn ssd_quotas_hold_over_restarts_and_are_administered() {
    const QUOTA: u64 = 16 * MIB;
    let bed = Bed::new("ssd-quota", &[]);
    let place = &bed.place;
    let dev = bed.start();
    let durable = PutOptions { ack: Some(PutAck::Durable), ..PutOptions::default() };
    let put = |client: &mut Client, key: &str, at: usize| {
        let put = client.put_with(key.as_bytes(), &value(at), &durable);
        put.map(|_| ()).map_err(|error| error.status().expect("a status"))
    };
    let set = |words: &[&str]| place.run(&[&["ctl", "tenants", "set", "acme"], words].concat());
    set(&["--ssd", "16M", "--ssd-weight", "3"]).well();
    // What contradicts itself is refused, and changes nothing.
    set(&["--ssd", "0", "--ssd-weight", "3"]).failed(1, &["a quota of 0 bytes on SSDs", "weight of 3"]);
    set(&["--ssd-weight", "0", "--memory", "1M"]).failed(1, &["weight of 0 is not within 1 to 1000"]);
    set(&["--ssd", "1M", "--no-ssd-limit"]).failed(2, &["cannot be used with"]);
    set(&["--ssd", "0", "--weight", "5000"]).failed(1, &["weight of 5000 is not within 1 to 1000"]);
    let shown = tenant(place, "acme");
    assert_eq!((&shown["ssd"]["quota_bytes"], &shown["ssd"]["weight"]), (&QUOTA.into(), &3.into()), "{shown}");
    assert_eq!(shown["quota_bytes"], Value::Null, "a refused command changes nothing: {shown}");
    let (mut acme, mut other) = (client_of(place, "acme", true), client_of(place, "other", true));
    (0..100).for_each(|at| put(&mut other, &format!("other-{at}"), at).unwrap());
    // The node learns of the quota within a heartbeat. Then it holds, however much is put.
    let mut puts = 0..;
    let known = wait_until(|| {
        puts.by_ref().take(32).for_each(|at: usize| put(&mut acme, &format!("acme-{at}"), at).unwrap());
        let ssd = tenant(place, "acme")["ssd"].clone();
        let full = ssd["used_bytes"].as_u64()? > QUOTA * 3 / 4 && ssd["evicted_bytes"].as_u64()? > 0;
        (full && ssd["used_bytes"].as_u64()? <= QUOTA && ssd["leased_bytes"] == QUOTA).then_some(())
    });
    assert!(known.is_some(), "{}", tenant(place, "acme"));
    let newest = puts.start - 1;
    assert_eq!(tenant_metric(dev.http(), "kvplane_tenant_ssd_quota_bytes", "acme"), Some(QUOTA as f64));
    assert!(tenant_metric(dev.http(), "kvplane_tenant_ssd_used_bytes", "acme").unwrap() <= QUOTA as f64);
    // An object that is longer than the quota cannot be durable; in memory it may be.
    set(&["--ssd", "16K"]).well();
    let refused = wait_until(|| put(&mut acme, "late", 1).err());
    assert_eq!(refused, Some(Status::QuotaExceeded));
    acme.put(b"in-memory", &value(2)).unwrap();
    set(&["--ssd", "16M"]).well();
    wait_until(|| put(&mut acme, "again", 3).ok()).expect("the quota has grown");
    assert!(counted(&dev, "kvplane_tier_writes_over_quota_total") >= 1.0);
    drop((acme, other, dev));
    // A restart finds the tenants again, evicts nothing of what is within the quota, and nothing of the others.
    let dev = bed.start();
    let (mut acme, mut other) = (client_of(place, "acme", true), client_of(place, "other", true));
    let recovered = wait_until(|| (counted(&dev, "kvplane_tier_recovered") == 1.0).then_some(()));
    recovered.expect("recovery ends");
    (0..100).for_each(|at| assert_eq!(other.get(format!("other-{at}").as_bytes()).unwrap(), Some(value(at)), "{at}"));
    assert_eq!(acme.get(b"again").unwrap(), Some(value(3)));
    assert_eq!(acme.get(format!("acme-{newest}").as_bytes()).unwrap(), None, "a lower quota evicted it for good");
    let used = wait_until(|| tenant(place, "acme")["ssd"]["used_bytes"].as_u64().filter(|used| *used > 0));
    assert!(used.unwrap() <= QUOTA);
    // HTTP shows and changes the same.
    let path = "/api/v1/tenant_quotas?tenant_id=acme";
    let (status, shown) = ask(dev.http(), "PUT", path, r#"{"ssd_quota_bytes":8388608,"ssd_weight":5}"#);
    let data = &shown["data"];
    assert_eq!((status, &data["ssd_quota_bytes"], &data["ssd_weight"]), (200, &(8 * MIB).into(), &5.into()), "{shown}");
    assert_eq!(data["requested_quota_bytes"], 0, "there is none of memory: {shown}");
    for bad in [r#"{"ssd_quota_bytes":1,"weight":5000}"#, r#"{"ssd_quota_bytes":1,"ssd_weigth":3}"#, "[]"] {
        assert_eq!(ask(dev.http(), "PUT", path, bad).0, 400, "{bad}");
    }
    for bad in [r#"{"ssd_quota_bytes":-1}"#, r#"{"ssd_weight":"x"}"#, r#"{"ssd_quota_bytes":0,"ssd_weight":2}"#] {
        assert_eq!(ask(dev.http(), "PUT", path, bad).0, 400, "{bad}");
    }
    let (_, shown) = ask(dev.http(), "PUT", path, r#"{"ssd_quota_bytes":null}"#);
    assert_eq!((&shown["data"]["ssd_quota_bytes"], &shown["data"]["ssd_weight"]), (&Value::Null, &5.into()), "{shown}");
    set(&["--ssd", "0"]).well();
    let shown = tenant(place, "acme")["ssd"].clone();
    assert_eq!((&shown["quota_bytes"], &shown["weight"]), (&0.into(), &5.into()), "it keeps its weight: {shown}");
    // A tenant that has objects on SSDs is removed by force only; then it has no quota and no share any more.
    set(&["--ssd", "16K"]).well();
    place.run(&["ctl", "tenants", "remove", "acme"]).failed(1, &["remove its objects first"]);
    place.run(&["ctl", "tenants", "remove", "acme", "--force"]).well();
    assert_eq!(tenant(place, "acme"), Value::Null);
    for words in [&["default"][..], &["default", "--force"]] {
        let words = [&["ctl", "tenants", "remove"], words].concat();
        place.run(&words).failed(1, &["the tenant \"default\" cannot be removed"]);
    }
    assert_eq!(ask(dev.http(), "DELETE", "/api/v1/tenant_quotas?tenant_id=default", "").0, 400);
    wait_until(|| put(&mut acme, "free", 4).ok()).expect("it has no quota any more");
}
