//! Tests of `kvplane tebench` with classes of service, deadlines and notices: its output, records, and notices at the
//! target.

use serde_json::Value;

use crate::support::{Workplace, text};
use crate::transfers::measurements::{measured, target, tebench};

const TWO_THREADS: [&str; 2] = ["--start_num_threads=2", "--max_num_threads=2"];

fn records(path: &std::path::Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn two_classes_leave_a_record_of_each_case() {
    let place = Workplace::new("classes");
    let (_target, address) = target(&place);
    let path = place.path("qos.jsonl");
    let classes = [
        "--qos_classes=gold:1:1000000:3,bulk:1:0:1:1000",
        "--max_block_size=8K",
        "--qos_link_capacity_gbps=50",
        "--xport_type=tcp",
        "--qos_output_jsonl",
        text(&path),
    ];
    let said = tebench(&place, &address, &[&TWO_THREADS[..], &classes].concat()).text();
    assert_eq!(said.matches("  [qos-summary] throughput=").count(), 2, "{said}");
    assert_eq!(said.matches("  [qos-class] name=gold threads=1 operations=").count(), 2, "{said}");
    let records = records(&path);
    let sizes: Vec<_> = records.iter().map(|record| record["block_size"].as_u64()).collect();
    assert_eq!(sizes, [Some(4096), Some(8192)]);
    for record in &records {
        assert_eq!((&record["schema_version"], &record["num_threads"]), (&1.into(), &2.into()), "{record}");
        let (gold, bulk) = (&record["classes"][0], &record["classes"][1]);
        assert_eq!(
            (&gold["name"], &gold["slo_us"], &gold["isolation_leakage"]),
            (&"gold".into(), &1_000_000.into(), &Value::Null)
        );
        assert!(gold["slo_attainment"].as_f64() > Some(0.0) && bulk["slo_attainment"].is_null(), "{record}");
        // No engine moves 1000 GB/s here, so the leakage is above 0.
        let leakage = bulk["isolation_leakage"].as_f64().unwrap();
        assert!(leakage > 0.5 && leakage <= 1.0 && record["max_isolation_leakage"] == bulk["isolation_leakage"]);
        for class in [gold, bulk] {
            let (operations, bytes) = (class["operations"].as_u64().unwrap(), &class["transferred_bytes"]);
            assert!(operations > 0 && bytes.as_u64() == Some(operations * record["block_size"].as_u64().unwrap()));
        }
        let fairness = record["jain_fairness"].as_f64().unwrap();
        assert!((0.5..=1.0).contains(&fairness) && record["total_utilization"].as_f64() > Some(0.0), "{record}");
    }
}

#[test]
fn classes_that_move_different_things_run_side_by_side() {
    let place = Workplace::new("mixed");
    let (_target, address) = target(&place);
    let classes = r#"[{"name":"decode","threads":1,"block_size":4096,"batch_size":2,"intent_type":"foreground_get",
        "slo_us":0,"weight":2,"deadline_us":500},
        {"name":"load","threads":1,"block_size":262144,"batch_size":4,"intent_type":"weight_loading","slo_us":0,
        "weight":1,"isolated_gbps":null}]"#;
    let path = place.path("qos.jsonl");
    let flags = ["--workload_classes_json", classes, "--qos_output_jsonl", text(&path), "--check_consistency"];
    let json = measured(&place, &address, &[&TWO_THREADS[..], &flags].concat());
    assert_eq!((json["cases"].as_array().map(Vec::len), json["qos"].as_array().map(Vec::len)), (Some(0), Some(1)));
    let records = records(&path);
    assert_eq!((records.len(), &records[0]), (1, &json["qos"][0]));
    assert_eq!((&records[0]["block_size"], &records[0]["batch_size"]), (&0.into(), &0.into()));
    for (class, bytes) in [(&records[0]["classes"][0], 8192), (&records[0]["classes"][1], 1 << 20)] {
        let operations = class["operations"].as_u64().unwrap();
        assert!(operations > 0 && class["transferred_bytes"].as_u64() == Some(operations * bytes), "{class}");
    }
}

#[test]
fn threads_are_reported_by_deadline() {
    let place = Workplace::new("deadlines");
    let (_target, address) = target(&place);
    let flags = ["--deadline_us=100000", "--deadline_tight_threads=1", "--deadline_bw_arbitration"];
    let flags = [&TWO_THREADS[..], &flags].concat();
    let said = tebench(&place, &address, &flags).text();
    assert!(said.contains("  [deadline-tight] threads=1 deadline_us=100000 operations="), "{said}");
    assert!(said.contains("  [deadline-loose] threads=1 operations="), "{said}");
    let json = measured(&place, &address, &[&flags[..], &["--max_num_threads=1", "--start_num_threads=1"]].concat());
    assert_eq!(
        (json["deadlines"].as_array().map(Vec::len), &json["deadlines"][0]["group"]),
        (Some(1), &"tight".into())
    );
}

#[test]
fn each_batch_leaves_a_notice() {
    let place = Workplace::new("notices");
    let (mut target, address) = target(&place);
    let json = measured(&place, &address, &["--notifi", "--xport_type=tcp", "--check_consistency"]);
    let batches = json["cases"][0]["batches"].as_u64().unwrap();
    assert!(target.stop().success());
    let line = target.wait_for(" notices");
    let notices: u64 = line.split(' ').next().unwrap().parse().unwrap();
    // The warm-up sends notices too.
    assert!(batches > 0 && notices >= batches, "{notices} notices of {batches} batches");
}
