//! Tests of invalid command lines and files: each gets a sentence that names the number or the file, and a status other
//! than 0; 2 if the command line itself is wrong.

use crate::support::{Workplace, finish, text};

const LINE: &str = "{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 10, \"hash_ids\": [1, 2]}\n";

#[test]
fn wrong_command_lines_are_usage_errors() {
    let place = Workplace::new("usage");
    let cases: &[(&[&str], &[&str])] = &[
        (&["dev", "--frobnicate"], &["--frobnicate"]),
        (&["teleport"], &["teleport"]),
        (&["ctl", "get"], &["<KEY>"]),
        (&["dev", "--pool", "10X"], &["--pool", "10X"]),
        (&["dev", "--pool", "-1"], &["-1"]),
        (&["dev", "--pool", "99999999999T"], &["99999999999T", "exceeds 2^64 bytes"]),
        (&["dev", "--shards", "0"], &["--shards", "0", "1..=256"]),
        (&["dev", "--port", "70000"], &["70000"]),
        (&["dev", "--http", "localhost"], &["localhost"]),
        (&["dev", "--ssd-ack", "durable"], &["--ssd"]),
        (&["control", "--state", "s", "--replicas", "9"], &["9", "1..=8"]),
        (&["control", "--state", "s", "--replicas", "0"], &["0", "1..=8"]),
        (&["replay", "--generate", "conversation", "--block-bytes", "0"], &["--block-bytes", "0"]),
        (&["replay", "--generate", "conversation", "--speed", "-3"], &["-3"]),
        (&["replay", "--generate", "conversation", "--speed", "0"], &["0", "not a speed"]),
        (&["replay", "--generate", "chess"], &["chess"]),
        (&["replay", "--generate", "conversation", "--requests", "0"], &["--requests", "0"]),
        (&["replay"], &["--trace"]),
        (&["tebench", "--op_type", "erase"], &["erase"]),
        (&["tebench", "--lanes", "0"], &["--lanes", "0"]),
        (&["tebench", "--duration", "0"], &["--duration", "0"]),
        (&["tebench", "--total_buffer_size", "0"], &["--total_buffer_size", "0"]),
        (&["tebench", "--duration=-1"], &["--duration", "-1"]),
        (&["tebench", "--xport_type", "efa"], &["--xport_type", "efa is not available", "network cards"]),
        (&["tebench", "--tent_transport_hint", "nvlink"], &["nvlink is not available", "GPU memory"]),
        (&["tebench", "--seg_type", "NVRAM"], &["NVRAM", "use DRAM or VRAM"]),
        (&["tebench", "--seg_type_mix", "dram,disk"], &["disk", "use DRAM or VRAM"]),
        (&["tebench", "--local_gpu_id", "first"], &["\"first\" is not the number of a GPU"]),
        (&["tebench", "--backend", "ucx"], &["ucx", "mooncake"]),
        (&["tebench", "--metadata_type", "zookeeper"], &["zookeeper", "etcd"]),
        (&["tebench", "--tent_intent_type", "fun"], &["\"fun\" is not one of unspec"]),
        (&["tebench", "--qos_link_capacity_gbps=-1"], &["-1", "capacity"]),
        (&["tebench", "--initiators", "0"], &["--initiators", "1..=64"]),
    ];
    for (arguments, words) in cases {
        finish(place.bare(arguments), &[]).failed(2, words);
    }
}

#[test]
fn invalid_settings_are_named() {
    let place = Workplace::new("settings");
    let cases: &[(&[&str], &[&str])] = &[
        (&["dev", "--pool", "0"], &["0 bytes"]),
        (&["dev", "--pool", "100K"], &["102400 bytes", "1048576"]),
        (&["dev", "--pool", "3M", "--shards", "4"], &["3145728 bytes", "4 shards"]),
        (&["dev", "--pool", "8M", "--shards", "4", "--port", "65534"], &["65534", "4 shards"]),
        (&["dev", "--pool", "8M", "--listen", "0.0.0.0"], &["0.0.0.0", "loopback"]),
        (&["dev", "--pool", "8M", "--http", "0.0.0.0:0"], &["0.0.0.0:0", "loopback"]),
        (&["dev", "--pool", "900T"], &["bytes of memory that are available"]),
        (&["control", "--state", "/proc/nowhere/state"], &["/proc/nowhere/state"]),
        (&["node"], &["no control plane of cluster settings", "settings.local"]),
        (&["replay", "--generate", "conversation"], &["no control plane of cluster settings"]),
    ];
    for (arguments, words) in cases {
        place.run(arguments).failed(1, words);
    }
    let long = "x".repeat(300);
    finish(place.bare(&["dev", "--pool", "8M", "--cluster", &long]), &[])
        .failed(1, &["cannot name a cluster", "1 to 40"]);
    let sweep = ["tebench", "--target_seg_name=127.0.0.1:1", "--total_buffer_size=1M", "--start_block_size=0"];
    finish(place.bare(&sweep), &[]).failed(1, &["block", "0"]);
    let nobody = ["tebench", "--target_seg_name=127.0.0.1:1", "--total_buffer_size=1M", "--max_block_size=4K"];
    finish(place.bare(&nobody), &[]).failed(1, &["127.0.0.1:1"]);
    let name = ["tebench", "--target_seg_name=nowhere", "--total_buffer_size=1M", "--max_block_size=4K"];
    finish(place.bare(&name), &[]).failed(1, &["nowhere", "resolving its name"]);
    finish(place.bare(&["tebench", "--target_seg_name=,"]), &[]).failed(1, &["\",\"", "names no target"]);
}

#[test]
fn flags_of_tebench_that_contradict_each_other_are_named() {
    let place = Workplace::new("contradictions");
    let two = ["--start_num_threads=2", "--max_num_threads=2"];
    let classes = "--qos_classes=a:1:0:1";
    let workload = "--workload_classes_json=[{\"name\":\"a\",\"threads\":1,\"block_size\":4096,\"batch_size\":1,\
        \"intent_type\":\"unspec\",\"slo_us\":0,\"weight\":1}]";
    let cases: &[(&[&str], &[&str])] = &[
        (&["--check_consistency", "--op_type=write_seed"], &["--check_consistency", "--op_type"]),
        (&[classes, "--qos_classes_json=[]"], &["--qos_classes and --qos_classes_json"]),
        (&[classes, workload], &["--qos_classes and --workload_classes_json"]),
        (&[classes, two[0], two[1]], &["--qos_classes", "1 threads", "has 2"]),
        (&[classes, two[1]], &["--qos_classes", "start_num_threads is 1, max 2"]),
        (&["--qos_classes=a:1:0:-1"], &["--qos_classes", "\"a\"", "weight is -1"]),
        (&["--qos_output_jsonl=x"], &["--qos_output_jsonl", "without classes"]),
        (&[workload, "--deadline_us=5"], &["--deadline_us", "--workload_classes_json"]),
        (&[workload, "--tent_intent_type=migration"], &["--tent_intent_type", "--workload_classes_json"]),
        (&["--deadline_tight_threads=2"], &["--deadline_tight_threads is 2", "1"]),
        (&["--xport_type=shm", "--tent_transport_hint=tcp"], &["shm", "tcp", "contradict"]),
        (&["--backend=mooncake", "--xport_type=shm"], &["--backend mooncake", "shm"]),
        (&["--backend=mooncake", "--api=session"], &["--api session"]),
        (&["--xport_type=iouring"], &["--xport_type iouring", "file:///path"]),
        (&["--xport_type=local"], &["--xport_type local", "--target_seg_name local"]),
        (&["--metadata_type=etcd"], &["--metadata_type etcd", "--metadata_url_list"]),
        (&["--metadata_url_list=x"], &["--metadata_url_list \"x\""]),
        (&["--seg_name=here"], &["--seg_name \"here\"", "IP:PORT"]),
        (&["--seg_name=0.0.0.0:0"], &["0.0.0.0:0", "without authentication"]),
    ];
    for (flags, words) in cases {
        let start = ["tebench", "--target_seg_name=127.0.0.1:1", "--total_buffer_size=1M"];
        finish(place.bare(&[&start[..], flags].concat()), &[]).failed(1, words);
    }
}

#[test]
fn a_bad_trace_is_named_with_its_line() {
    let place = Workplace::new("traces");
    let missing = place.path("missing.jsonl");
    let replay = |path: &str| place.run(&["replay", "--trace", path]);
    replay(text(&missing)).failed(1, &["missing.jsonl", "No such file"]);
    replay(text(&place.directory)).failed(1, &[text(&place.directory)]);
    let cases: [(&str, String, &[&str]); 6] = [
        ("torn", format!("{LINE}{LINE}{}", &LINE[..40]), &["torn.jsonl", "line 3", "torn"]),
        ("blank", format!("{LINE}\n{LINE}"), &["blank.jsonl", "line 2", "empty"]),
        ("noise", format!("{LINE}\u{0}\u{1}\n"), &["noise.jsonl", "line 2"]),
        ("blocks", LINE.replace("[1, 2]", "[1]"), &["blocks.jsonl", "line 1", "1 hash_ids", "1024"]),
        ("nothing", String::new(), &["nothing.jsonl"]),
        ("negative", LINE.replace("1024", "-7"), &["negative.jsonl", "line 1", "-7"]),
    ];
    for (name, content, words) in cases {
        let path = place.file(&format!("{name}.jsonl"), content.as_bytes());
        replay(text(&path)).failed(1, words);
    }
}

#[test]
fn values_that_cannot_be_stored_are_refused_with_their_size() {
    let place = Workplace::new("values");
    let mut dev = place.dev("8M", &["--shards", "1"]);
    finish(place.command(&["ctl", "put", "empty", "-"]), b"").failed(1, &["0 bytes"]);
    let large = place.file("large", &vec![7; 9 << 20]);
    place.run(&["ctl", "put", "large", text(&large)]).failed(1, &["9437184 bytes", "larger than"]);
    place.run(&["ctl", "put", "gone", text(&place.path("gone"))]).failed(1, &["gone", "No such file"]);
    finish(place.command(&["ctl", "put", "", "-"]), b"value").failed(1, &["1 to 4096 bytes", "0"]);
    let blocks = ["replay", "--generate", "conversation", "--requests", "2", "--block-bytes", "9M"];
    place.run(&blocks).failed(1, &["9437184 bytes", "8388608"]);
    finish(place.command(&["ctl", "put", "good", "-"]), b"value").well();
    assert_eq!(place.run(&["ctl", "get", "good"]).well(), b"value");
    dev.assert_alive();
}
