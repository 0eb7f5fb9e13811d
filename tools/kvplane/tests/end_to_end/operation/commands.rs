//! Tests of `kvplane dev` and `kvplane ctl`: the first commands of a new user.

use std::net::TcpListener;

use crate::support::{Process, Workplace, finish, health, http_get, text, wait_until};

#[test]
fn dev_serves_ctl_and_http_and_leaves_nothing_behind() {
    let place = Workplace::new("try");
    let mut dev = place.dev("32M", &[]);
    let run = |arguments: &[&str]| place.run(arguments);

    let value: Vec<u8> = (0..3_000_000u32).map(|at| (at ^ (at >> 8)) as u8).collect();
    let file = place.file("value", &value);
    assert!(run(&["ctl", "put", "key", text(&file)]).text().starts_with("stored 3000000 bytes"));
    assert_eq!(run(&["ctl", "get", "key"]).well(), value);
    assert_eq!(run(&["ctl", "size", "key"]).text(), "3000000\n");
    // The cluster has one node: the requested second replica is missing, and the command reports that.
    let twice = finish(place.command(&["ctl", "put", "--replicas", "2", "twice", "-"]), b"value").text();
    assert!(twice.contains("1 of 2 replicas"), "{twice}");
    let again = finish(place.command(&["ctl", "put", "key", "-"]), b"other");
    assert!(again.text().contains("left as it is"));
    assert_eq!(run(&["ctl", "get", "key"]).well(), value);
    run(&["ctl", "delete", "key"]).well();
    for action in ["get", "size", "delete"] {
        run(&["ctl", action, "key"]).failed(1, &["no object under \"key\""]);
    }
    finish(place.command(&["ctl", "put", "piped", "-"]), b"from a pipe").well();
    assert_eq!(run(&["ctl", "get", "piped"]).well(), b"from a pipe");

    let status = run(&["ctl", "status"]).text();
    assert!(status.starts_with("cluster \"try\", epoch ") && status.contains("32 MiB"), "{status}");
    let data = dev.data().to_string();
    assert!(run(&["ctl", "segments"]).text().contains(&data));

    let health = health(dev.http());
    assert_eq!((&health["status"], &health["members"], &health["cluster"]), (&"ok".into(), &1.into(), &"try".into()));
    let (code, metrics) = http_get(dev.http(), "/metrics");
    assert_eq!(code, 200);
    for name in ["kvplane_cluster_epoch", "kvplane_members", "kvplane_node_capacity_bytes"] {
        assert!(metrics.lines().any(|line| line.starts_with(name)), "no {name} in {metrics}");
    }
    assert_eq!(http_get(dev.http(), "/get_all_segments"), (200, format!("{data}\n")));
    assert_eq!(http_get(dev.http(), "/nothing").0, 404);

    assert!(!place.left_over(".shm").is_empty());
    assert!(dev.stop().success());
    assert!(!place.runtime().exists(), "{:?}", place.left_over(""));
    run(&["ctl", "get", "piped"]).failed(1, &["no control plane of cluster try", "try.local"]);
}

#[test]
fn caches_are_simulated_in_three_forms() {
    let place = Workplace::new("sim");
    let (page, figures) = (place.file("page.html", b""), place.file("figures.json", b""));
    let sim = ["sim", "cache", "--generate", "conversation", "--requests", "200", "--tokens", "1M,100k"];
    let files = ["--html", text(&page), "--json", text(&figures)];
    let table = finish(place.bare(&[&sim[..], &files[..]].concat()), &[]).text();
    assert!(table.contains("slru, no tails") && table.contains("Belady's bound"), "{table}");
    let figures: serde_json::Value = serde_json::from_slice(&std::fs::read(&figures).unwrap()).unwrap();
    assert_eq!(figures["traces"][0]["sizes_tokens"], serde_json::json!([100_000, 1_000_000]));
    assert!(std::fs::read_to_string(&page).unwrap().contains("<svg"));
    let nothing = ["sim", "cache", "--generate", "conversation", "--tokens", "0"];
    finish(place.bare(&nothing), &[]).failed(2, &["not a cache size"]);
}

#[test]
fn eviction_flags_are_accepted_and_invalid_ones_refused() {
    let place = Workplace::new("evict");
    let mut dev = place.dev("32M", &["--eviction", "s3fifo", "--watermarks", "90,80", "--max-objects", "5000"]);
    let file = place.file("value", &[7; 1000]);
    place.run(&["ctl", "put", "key", text(&file)]).well();
    assert_eq!(place.run(&["ctl", "size", "key"]).text(), "1000\n");
    assert!(dev.stop().success());
    place.run(&["dev", "--eviction", "random"]).failed(2, &["no eviction policy: use slru, s3fifo or lru"]);
    place.run(&["dev", "--watermarks", "80,90"]).failed(2, &["is not two percentages"]);
}

#[test]
fn an_interrupt_ends_dev_well_too() {
    let place = Workplace::new("interrupt");
    let mut dev = place.dev("8M", &[]);
    dev.signal("INT");
    assert!(dev.ended().success());
    assert!(!place.runtime().exists(), "{:?}", place.left_over(""));
}

#[test]
fn an_interrupted_demo_leaves_no_directory() {
    let place = Workplace::new("demo");
    let out = place.path("out");
    let mut command = place.bare(&["demo", "--pool", "16M", "--requests", "3000", "--out", text(&out)]);
    // A folder without the trace does not keep the demo from starting.
    command.env("TMPDIR", &place.directory).env("KVPLANE_TRACES", &place.directory);
    let mut demo = Process::start(command);
    demo.wait_for("no trace found at $KVPLANE_TRACES");
    demo.wait_for("dev | ");
    let directories = || {
        let names = std::fs::read_dir(&place.directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("kvplane-demo")).count()
    };
    assert_eq!(directories(), 1);
    demo.signal("INT");
    assert!(!demo.ended().success());
    // The demo's node notices the end of its input.
    wait_until(|| (directories() == 0).then_some(())).expect("the node removes it");
}

#[test]
fn a_second_dev_of_the_same_name_is_refused() {
    let place = Workplace::new("twice");
    let mut dev = place.dev("8M", &[]);
    place.run(&["dev", "--pool", "8M"]).failed(1, &["cluster twice already runs", "twice.lock"]);
    finish(place.command(&["ctl", "put", "key", "-"]), b"value").well();
    assert_eq!(place.run(&["ctl", "get", "key"]).well(), b"value");
    dev.assert_alive();
}

#[test]
fn a_port_in_use_is_named() {
    let place = Workplace::new("ports");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let (tcp_port, udp_port) = (taken.local_addr().unwrap().port(), udp.local_addr().unwrap().port());
    let (tcp, quic) = (format!("127.0.0.1:{tcp_port}"), format!("127.0.0.1:{udp_port}"));
    let (tcp_port, udp_port) = (tcp_port.to_string(), udp_port.to_string());
    place.run(&["dev", "--pool", "8M", "--shards", "1", "--port", &tcp_port]).failed(1, &[&tcp_port, "in use"]);
    place.run(&["dev", "--pool", "8M", "--http", &tcp]).failed(1, &[&tcp_port, "in use"]);
    place.run(&["dev", "--pool", "8M", "--control", &quic]).failed(1, &[&udp_port, "in use"]);
    finish(place.bare(&["tebench", "--total_buffer_size=1M", "--rpc_server_port", &tcp_port]), &[])
        .failed(1, &[&tcp_port, "in use"]);
    // A failed start leaves nothing that blocks the next.
    let mut dev = place.dev("8M", &[]);
    dev.assert_alive();
}
