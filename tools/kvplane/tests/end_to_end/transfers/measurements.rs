//! Tests of `kvplane tebench`: a target and initiators as processes, with every byte compared.

use serde_json::Value;

use crate::support::{Outcome, Process, Way, Workplace, finish};

const HEADER: &str = "BlkSize (B)   Batch   BW (GB/s)     Avg Inst GB/s     Avg Lat (us)  Avg Tx (us)   \
                      P99 Tx (us)   P999 Tx (us)  P50 Tx (us)   CPU s/GB";

pub(crate) fn target(place: &Workplace) -> (Process, String) {
    let target = Process::start(place.bare(&["tebench", "--total_buffer_size=4M"]));
    let address = target.address("--target_seg_name=").to_string();
    (target, address)
}

fn initiate(place: &Workplace, target: &str, way: Way, more: &[&str]) -> Outcome {
    let way = format!("--xport_type={}", way.name());
    tebench(place, target, &[&[way.as_str()], more].concat())
}

/// Runs a short benchmark with blocks of 4 KiB by default; later flags override.
pub(crate) fn tebench(place: &Workplace, target: &str, more: &[&str]) -> Outcome {
    let target = format!("--target_seg_name={target}");
    let mut arguments = vec!["tebench", &target, "--total_buffer_size=4M", "--duration=0.3", "--warm_up=0.05"];
    arguments.extend(["--start_block_size=4K", "--max_block_size=4K"]);
    arguments.extend(more);
    finish(place.bare(&arguments), &[])
}

/// Returns the JSON of a run.
pub(crate) fn measured(place: &Workplace, target: &str, more: &[&str]) -> Value {
    serde_json::from_str(&tebench(place, target, &[more, &["--json=-"]].concat()).text()).unwrap()
}

#[test]
fn a_small_sweep_is_consistent_over_both_ways() {
    let place = Workplace::new("tebench");
    let (mut target, address) = target(&place);
    for way in Way::BOTH {
        let sweep = [
            "--check_consistency",
            "--start_block_size=64K",
            "--max_block_size=128K",
            "--max_batch_size=2",
            "--start_num_threads=2",
            "--max_num_threads=2",
            "--start_batch_size=2",
            "--json",
            "-",
        ];
        let rows: Value = serde_json::from_str(&initiate(&place, &address, way, &sweep).text()).unwrap();
        let cases = rows["cases"].as_array().unwrap();
        let sizes: Vec<_> = cases.iter().map(|case| (case["threads"].as_u64(), case["block_bytes"].as_u64())).collect();
        assert_eq!(sizes, [(Some(2), Some(65_536)), (Some(2), Some(131_072))]);
        for case in cases {
            assert_eq!(case["batch"], 2);
            assert!(case["batches"].as_u64() > Some(0) && case["bandwidth_gb_s"].as_f64() > Some(0.0), "{case}");
        }
        let transports = rows["transports"].as_array().unwrap();
        assert_eq!((transports.len(), &transports[0]["transport"]), (1, &Value::from(way.name())));
        assert!(transports[0]["bytes"].as_u64() > Some(65_536), "{transports:?}");
    }
    assert!(target.stop().success());
    assert!(place.left_over(".shm").is_empty());
}

#[test]
fn the_table_is_the_known_one() {
    let place = Workplace::new("table");
    let (_target, address) = target(&place);
    let one = ["--op_type=read_verify", "--max_block_size=4096"];
    let table = initiate(&place, &address, Way::Shm, &one).text();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!((lines[0], lines[1], lines.len()), (HEADER, "-".repeat(160).as_str(), 4), "{table}");
    assert!(lines[2].starts_with("4096          1       "), "{table}");
    assert_eq!(lines[2].split_whitespace().count(), 10, "{table}");
    assert!(lines[3].starts_with("  [transport] name=shm operations="), "{table}");
}

#[test]
fn an_initiator_that_dies_or_exceeds_the_segment_does_no_harm() {
    let place = Workplace::new("too-much");
    let (mut target, address) = target(&place);
    let beyond = ["--target_offset=4M", "--max_block_size=4096"];
    initiate(&place, &address, Way::Tcp, &beyond).failed(1, &["4096 bytes", "has only 0"]);
    for way in Way::BOTH {
        let arguments = [
            "tebench",
            &format!("--target_seg_name={address}"),
            &format!("--xport_type={}", way.name()),
            "--total_buffer_size=4M",
            "--start_block_size=2M",
            "--max_block_size=2M",
            "--op_type=mix",
        ];
        let mut initiator = Process::start(place.bare(&arguments));
        initiator.wait_for("BlkSize");
        std::thread::sleep(std::time::Duration::from_millis(300));
        initiator.kill();
    }
    let small = ["--check_consistency", "--max_block_size=4096"];
    initiate(&place, &address, Way::Tcp, &small).well();
    target.assert_alive();
}

/// Runs the same load on a file segment, which leaves no file behind.
#[test]
fn a_drive_is_measured_through_a_file_segment() {
    let place = Workplace::new("drive");
    let directory = format!("--tier={}", place.directory.display());
    let more = ["tebench", &directory, "--total_buffer_size=4M", "--duration=0.2", "--warm_up=0.05", "--json=-"];
    let run = |more: &[&str]| finish(place.bare(more), &[]);
    for words in [&["--check_consistency"][..], &["--op_type=write_seed"], &["--xport_type=iouring"]] {
        let blocks = ["--start_block_size=4K", "--max_block_size=8K"];
        let rows: Value = serde_json::from_str(&run(&[&more[..], &blocks, words].concat()).text()).unwrap();
        let transports = rows["transports"].as_array().unwrap();
        assert_eq!((transports.len(), &transports[0]["transport"]), (1, &Value::from("file")), "{rows}");
        assert!(transports[0]["bytes"].as_u64() > Some(4096), "{rows}");
    }
    run(&["tebench", &directory, "--target_seg_name=local"]).failed(1, &["--tier creates a target of its own"]);
    run(&["tebench", "--tier=/nowhere"]).failed(1, &["--tier /nowhere: No such file"]);
    let left = std::fs::read_dir(&place.directory).unwrap().flatten();
    assert_eq!(left.filter(|entry| entry.file_name().to_string_lossy().contains("kvplane-tebench")).count(), 0);
}
