//! Tests of `kvplane replay` with a real node: every byte is verified, and the hit rate is the model's.

use serde_json::Value;

use crate::support::{Way, Workplace};

fn replay(place: &Workplace, way: Way, clients: &str, shape: &str) -> Value {
    let arguments = [
        "replay",
        "--generate",
        shape,
        "--requests",
        "300",
        "--block-bytes",
        "4K",
        "--clients",
        clients,
        "--transport",
        way.carrier(),
        "--json",
        "-",
    ];
    let report: Value = serde_json::from_str(&place.run(&arguments).text()).unwrap();
    assert_eq!(report["runs"].as_array().unwrap().len(), 1);
    report["runs"][0].clone()
}

fn check(run: &Value, way: Way) {
    assert_eq!(
        (&run["bytes_wrong"], &run["requests"], &run["transport"]),
        (&0.into(), &300.into(), &way.carrier().into())
    );
    let got = run["operations"].as_array().unwrap().iter().find(|operation| operation["operation"] == "get").unwrap();
    assert!(got["bytes"].as_u64().unwrap() > 0, "nothing was read, so nothing was checked: {run}");
    let carried = run["carried"].as_object().unwrap();
    let least = run["operations"].as_array().unwrap().iter().filter_map(|operation| operation["bytes"].as_u64()).sum();
    for (transport, bytes) in carried {
        // Bytes that a full pool refused were moved all the same.
        let right = if transport == way.carrier() { bytes.as_u64() >= Some(least) } else { bytes == &Value::from(0) };
        assert!(right, "{} was to carry {least} bytes: {carried:?}", way.carrier());
    }
    println!("{}: {carried:?}", way.carrier());
}

fn gap(run: &Value) -> f64 {
    let rate = |name: &str| run["derived"][name].as_f64().unwrap();
    (rate("hit_rate_blocks") - rate("model_segmented_lru_hit_rate_blocks")).abs()
}

#[test]
fn one_client_has_the_hit_rate_of_the_model() {
    for way in Way::BOTH {
        let place = Workplace::new("replay");
        // The pool is smaller than the blocks of the trace, so that there are evictions.
        let _dev = place.dev("8M", &["--shards", "1"]);
        let run = replay(&place, way, "1", "conversation");
        check(&run, way);
        assert!(run["evictions"].as_u64().unwrap() > 0, "{run}");
        assert!(gap(&run) <= 0.01, "{} from the model: {}", gap(&run), run["derived"]);
    }
}

#[test]
fn several_clients_at_once_read_no_wrong_byte() {
    for way in Way::BOTH {
        let place = Workplace::new("replays");
        let _dev = place.dev("8M", &[]);
        check(&replay(&place, way, "3", "toolagent"), way);
    }
}

#[test]
fn files_of_a_replay_are_written() {
    let place = Workplace::new("files");
    let _dev = place.dev("32M", &[]);
    let trace = "{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 10, \"hash_ids\": [1, 2]}\n".repeat(3);
    let trace = place.file("trace.jsonl", trace.as_bytes());
    let (json, html) = (place.path("report.json"), place.path("report.html"));
    let mut command = place.command(&["replay"]);
    command.arg("--trace").arg(&trace).arg("--json").arg(&json).arg("--html").arg(&html);
    let table = crate::support::finish(command, &[]).text();
    assert!(table.contains("bytes wrong") && table.contains("trace.jsonl"), "{table}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let hits = &report["runs"][0]["hits"];
    assert_eq!((&hits["blocks"], &hits["hit_blocks"]), (&6.into(), &4.into()));
    assert!(std::fs::read_to_string(&html).unwrap().contains("<svg"));
    // The error for a file that cannot be written names it.
    let mut command = place.command(&["replay", "--json", "/nowhere/report.json"]);
    command.arg("--trace").arg(&trace);
    crate::support::finish(command, &[]).failed(1, &["/nowhere/report.json"]);
}

#[test]
fn with_an_ssd_the_hit_rate_is_that_of_a_cache_without_limits_over_a_kill_too() {
    let place = Workplace::new("replay-ssd");
    let ssd = place.path("ssd");
    let nowhere = place.bare(&["replay", "--generate", "conversation", "--tier", crate::support::text(&ssd)]);
    crate::support::finish(nowhere, &[]).failed(1, &["--tier", "No such file"]);
    std::fs::create_dir(&ssd).unwrap();
    for more in [&["--ahead", "1"][..], &["--restart"]] {
        let mut arguments = vec!["replay", "--generate", "conversation", "--requests", "300", "--block-bytes", "4K"];
        arguments.extend(["--tier", crate::support::text(&ssd)]);
        arguments.extend(more);
        let outcome = crate::support::finish(place.bare(&arguments), &[]);
        let said = String::from_utf8(outcome.well()).unwrap();
        let line = said.lines().find(|line| line.starts_with("blocks hit")).unwrap_or_else(|| panic!("{said}"));
        assert!(line.contains(" 0.0000 less"), "{line}");
    }
}
