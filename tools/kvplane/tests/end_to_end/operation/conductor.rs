//! Tests of operators' commands for the Conductor.

use kvplane::rpc::Role;
use kvplane::rpc::conductor::{InstancePart, RegisterInstance};
use kvplane::{Control, ControlLink};

use crate::support::{Workplace, finish, text};

#[test]
fn operators_see_instances_take_them_out_and_choose_the_policy() {
    let place = Workplace::new("conductor");
    let _dev = place.dev(
        "16M",
        &[
            &["--shards", "1", "--conductor", "--conductor-policy", "load-balance", "--conductor-replicas", "1M"][..],
            &["--conductor-instances", "2", "--conductor-queued", "5", "--conductor-wait", "30"],
        ]
        .concat(),
    );
    let control = Control::Local { cluster: place.cluster.clone(), runtime_directory: Some(place.runtime()) };
    let link = ControlLink::to(&control, Role::Client).unwrap();
    let register = |instance: &str| {
        let register = RegisterInstance {
            capacity_tokens: 1_000_000,
            ..RegisterInstance::new(instance, "m", 16, InstancePart::Mixed)
        };
        link.call(register)
    };
    register("first").unwrap();
    register("second").unwrap();
    let refused = register("third").expect_err("a third instance").to_string();
    assert!(refused.contains("2 instances") && refused.contains("--conductor-instances"), "{refused}");
    let ctl = |words: &[&str]| place.run(&[&["ctl", "conductor"], words].concat());
    let said = ctl(&["show"]).text();
    assert!(said.starts_with("requests are placed by load-balance\n"), "{said}");
    assert!(said.lines().any(|line| line.starts_with("first ") && line.contains(" takes ")), "{said}");
    assert!(said.contains("hot prefixes are not replicated: slots have one owner"), "{said}");
    assert!(
        said.contains("limits: models 1 of 16, instances 2 of 2, requests 0 of 65536, of a model queued 0 of 5"),
        "{said}"
    );
    assert!(said.contains("waits 30 s"), "{said}");
    let said = ctl(&["hold", "first"]).text();
    assert!(said.contains("instance first gets no new requests; 0 are booked there"), "{said}");
    let said = ctl(&["policy", "kvplane", "--promise-ttft-ms", "1500"]).text();
    assert!(said.contains("requests are placed by kvplane"), "{said}");
    let shown: serde_json::Value = serde_json::from_str(&ctl(&["show", "--json"]).text()).unwrap();
    assert_eq!((&shown["policy"], &shown["promise_ttft_ms"]), (&"kvplane".into(), &1500.into()), "{shown}");
    assert_eq!(shown["limits"]["queued"]["most"], 5, "{shown}");
    let states: Vec<&str> =
        shown["instances"].as_array().unwrap().iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["held", "takes"]);
    assert_eq!((&shown["copies"]["most_bytes"], &shown["copies"]["made"]), (&(1 << 20).into(), &0.into()), "{shown}");
    ctl(&["release", "first"]).well();
    assert!(!ctl(&["show"]).text().contains(" held "));
    ctl(&["hold", "third"]).failed(1, &["third"]);
    ctl(&["policy", "best"]).failed(2, &["round-robin", "kvplane"]);
    ctl(&["policy", "kvplane", "--promise-ttft-ms", "0"]).failed(2, &["promise-ttft-ms"]);
    ctl(&["policy", "random", "--promise-ttft-ms", "1"]).failed(1, &["only kvplane"]);
    for (flag, value) in [
        ("--conductor-blocks", "0"),
        ("--conductor-blocks", "99999999999"),
        ("--conductor-nic", "0"),
        ("--conductor-models", "0"),
        ("--conductor-instances", "8001"),
        ("--conductor-queued", "0"),
        ("--conductor-requests", "0"),
        ("--conductor-prompt-blocks", "1"),
        ("--conductor-wait", "0"),
        ("--conductor-wait", "86401"),
        ("--promise-ttft-ms", "0"),
        ("--promise-tbt-ms", "0"),
        ("--promise-percent", "100"),
        ("--promise-percent", "49.9"),
    ] {
        place.run(&["dev", "--conductor", flag, value]).failed(2, &[flag]);
    }

    let none = Workplace::new("no-conductor");
    let _dev = none.dev("16M", &["--shards", "1"]);
    none.run(&["ctl", "conductor", "show"]).failed(1, &["--conductor"]);
}

/// Twelve prompts of two blocks, of which the first is common to all: an instance without it fetches it from the store.
#[test]
fn live_instances_are_placed_on_by_each_policy_and_move_real_bytes() {
    let place = Workplace::new("live");
    let _dev = place.dev("16M", &["--shards", "1", "--conductor"]);
    let line = |at: u64| {
        let blocks = format!("[1, {}]", at + 2);
        let at_ms = at * 20;
        format!("{{\"timestamp\": {at_ms}, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": {blocks}}}\n")
    };
    let trace = place.file("trace.jsonl", (0..12).map(line).collect::<String>().as_bytes());
    let words = ["replay", "--conductor", "--trace", text(&trace), "--block-bytes", "4K", "--json", "-"];
    let more = ["--engines", "2", "--engine-blocks", "8", "--policies", "kvplane,round-robin"];
    let shown: serde_json::Value = serde_json::from_str(&place.run(&[&words[..], &more].concat()).text()).unwrap();
    let runs = shown["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| &run["policy"]).collect::<Vec<_>>(), ["kvplane", "round-robin"]);
    for run in runs {
        let number = |name: &str| run[name].as_f64().unwrap();
        assert_eq!((number("requests"), number("refused"), number("unasked")), (12.0, 0.0, 0.0), "{run}");
        assert_eq!(number("bytes_wrong"), 0.0, "{run}");
        // Only 13 of the 24 blocks are distinct.
        assert!(number("local") + number("fetched") > 0.2, "{run}");
        assert!(number("mean_ttft_s") > 0.0 && number("p99_ttft_s") >= number("p50_ttft_s"), "{run}");
    }
    // The policy is restored, and no instance is left.
    let said = place.run(&["ctl", "conductor", "show"]).text();
    assert!(said.starts_with("requests are placed by kvplane\n") && said.lines().count() == 4, "{said}");
    place.run(&[&words[..6], &["--policies", "best"]].concat()).failed(2, &["round-robin"]);

    let none = Workplace::new("live-none");
    let _dev = none.dev("16M", &["--shards", "1"]);
    none.run(&["replay", "--conductor", "--trace", text(&trace)]).failed(1, &["--conductor"]);
}

#[test]
fn a_kill_of_the_control_plane_in_a_replay_loses_no_request() {
    let place = Workplace::new("killed");
    let line = |at: u64| {
        let (blocks, at_ms) = (format!("[1, {}]", at % 5 + 2), at * 60);
        format!("{{\"timestamp\": {at_ms}, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": {blocks}}}\n")
    };
    let trace = place.file("trace.jsonl", (0..24).map(line).collect::<String>().as_bytes());
    let within = place.path("within");
    std::fs::create_dir(&within).unwrap();
    let words = ["replay", "--conductor", "--kill-control", text(&within), "--trace", text(&trace)];
    let more = ["--block-bytes", "4K", "--engines", "2", "--engine-blocks", "8", "--json", "-"];
    let shown: serde_json::Value =
        serde_json::from_slice(&finish(place.bare(&[&words[..], &more].concat()), &[]).well()).unwrap();
    let runs = shown["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| &run["policy"]).collect::<Vec<_>>(), ["kvplane", "kvplane, killed"]);
    for run in runs {
        let numbers = ["requests", "refused", "lost", "bytes_wrong"].map(|name| run[name].as_u64().unwrap());
        assert_eq!(numbers, [24, 0, 0, 0], "{run}");
    }
    let seconds = runs[1]["recovery"]["seconds"].as_array().unwrap();
    assert!(seconds.iter().any(|row| row["second"].as_i64() >= Some(0)), "{shown}");
    assert!(runs[0].get("recovery").is_none());
    assert_eq!(std::fs::read_dir(&within).unwrap().count(), 0, "nothing is left behind");
    // A cluster that others use is not killed.
    place.run(&words).failed(2, &["--kill-control"]);
}

/// Two long prompts, the second with the first's beginning, and short ones: a group of two instances prefills the long
/// ones, and passes every byte on from stage to stage.
#[test]
fn live_pipeline_groups_pass_chunks_on_through_the_store() {
    let place = Workplace::new("live-groups");
    let _dev = place.dev("64M", &["--shards", "1", "--conductor"]);
    let line = |at_ms: u64, blocks: std::ops::Range<u64>| {
        let (tokens, blocks) = ((blocks.end - blocks.start) * 512, blocks.map(|id| id.to_string()).collect::<Vec<_>>());
        let (blocks, output) = (blocks.join(", "), "\"output_length\": 1");
        format!("{{\"timestamp\": {at_ms}, \"input_length\": {tokens}, {output}, \"hash_ids\": [{blocks}]}}\n")
    };
    let lines = [line(0, 1..17), line(10, 100..102), line(4_000, 1..33), line(4_010, 200..202)];
    let trace = place.file("trace.jsonl", lines.concat().as_bytes());
    let words = ["replay", "--conductor", "--trace", text(&trace), "--block-bytes", "4K", "--json", "-"];
    let more = ["--engines", "3", "--engine-blocks", "64", "--groups", "2", "--chunk", "2048"];
    let shown: serde_json::Value = serde_json::from_str(&place.run(&[&words[..], &more].concat()).text()).unwrap();
    let run = &shown["runs"][0];
    let numbers = ["requests", "refused", "unasked", "bytes_wrong"].map(|name| run[name].as_u64().unwrap());
    assert_eq!(numbers, [4, 0, 0, 0], "{run}");
    assert!(run["by_groups"].as_u64() >= Some(1), "{run}");
    assert!(run["local"].as_f64().unwrap() + run["fetched"].as_f64().unwrap() > 0.2, "{run}");
    // Nothing that was passed on is left in the store.
    let said = place.run(&["ctl", "conductor", "explain", "none"]);
    said.failed(1, &["none"]);
    place.run(&[&words[..], &["--groups", "2", "--chunk", "1025"]].concat()).failed(1, &["--chunk"]);
}
