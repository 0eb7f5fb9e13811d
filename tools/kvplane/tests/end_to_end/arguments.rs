//! Command lines and files that make no sense: each gets a sentence that names the number or the file, and a status
//! other than 0; 2 where the command line itself is wrong.

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
        (&["dev", "--pool", "99999999999T"], &["99999999999T", "more bytes than there are"]),
        (&["dev", "--shards", "0"], &["--shards", "0", "1..=256"]),
        (&["dev", "--port", "70000"], &["70000"]),
        (&["dev", "--http", "localhost"], &["localhost"]),
        (&["control", "--state", "s", "--replicas", "9"], &["9", "1..=8"]),
        (&["replay", "--generate", "conversation", "--block-bytes", "0"], &["--block-bytes", "0"]),
        (&["replay", "--generate", "conversation", "--speed", "-3"], &["-3"]),
        (&["replay", "--generate", "conversation", "--speed", "0"], &["0", "no speed"]),
        (&["replay", "--generate", "chess"], &["chess"]),
        (&["replay", "--generate", "conversation", "--requests", "0"], &["--requests", "0"]),
        (&["replay"], &["--trace"]),
        (&["tebench", "--op_type", "erase"], &["erase"]),
        (&["tebench", "--lanes", "0"], &["--lanes", "0"]),
        (&["tebench", "--duration", "0"], &["--duration", "0"]),
        (&["tebench", "--total_buffer_size", "0"], &["--total_buffer_size", "0"]),
    ];
    for (arguments, words) in cases {
        finish(place.bare(arguments), &[]).failed(2, words);
    }
}

#[test]
fn settings_that_cannot_be_are_named() {
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
