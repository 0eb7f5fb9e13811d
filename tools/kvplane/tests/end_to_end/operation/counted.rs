//! Tests of the diagnostics of a running process: explanations of paths to a peer, and counters over HTTP.

use serde_json::Value;

use crate::support::{Outcome, Process, Way, Workplace, finish, http_get};
use crate::transfers::measurements::{target, tebench};

fn explain(place: &Workplace, target: &str, more: &[&str]) -> Outcome {
    finish(place.bare(&[&["topology", "--explain", target], more].concat()), &[])
}

/// Returns the sum of a family's samples that have this in their labels.
pub(crate) fn sum(text: &str, family: &str, label: &str) -> f64 {
    let series = text.lines().filter(|line| line.starts_with(&format!("{family}{{")) && line.contains(label));
    series.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

#[test]
fn the_way_to_another_process_is_explained_as_it_is_taken() {
    let place = Workplace::new("explain");
    let (_target, address) = target(&place);
    let found: Value = serde_json::from_str(&explain(&place, &address, &["--json"]).text()).unwrap();
    let names: Vec<_> = found["transports"].as_array().unwrap().iter().map(|one| &one["transport"]).collect();
    assert_eq!(names, ["local", "shm", "cma", "rdma", "tcp", "mooncake-rdma", "mooncake", "file"]);
    assert_eq!(found["chosen"]["mapped"], "shm", "{found}");
    // The reported permission of the kernel matches the outcome: a run over cma alone works, or it does not.
    let run = tebench(&place, &address, &["--xport_type=cma", "--op_type=read_verify", "--json=-"]);
    let cma = &found["transports"][2];
    assert_eq!(cma["usable"], run.status.success(), "{found}: {}", run.stderr);
    let pointers = if run.status.success() { "cma" } else { "tcp" };
    assert_eq!(found["chosen"]["pointers"], pointers, "{found}");
    if pointers == "tcp" {
        println!("skipped: copies by the kernel between processes: {}", cma["reason"]);
    }
    let text = explain(&place, &address, &[]).text();
    assert!(text.contains("memory that can be mapped   shm\n"), "{text}");
    assert!(text.contains(&format!("any other memory            {pointers}\n")), "{text}");
    assert!(text.contains("only memory allocated as shared can be mapped"), "{text}");
    explain(&place, "127.0.0.1:1", &[]).failed(1, &["127.0.0.1:1"]);
}

#[test]
fn metrics_are_scraped_from_both_sides_of_a_run() {
    let place = Workplace::new("scrape");
    let serve = ["tebench", "--total_buffer_size=4M", "--metrics_port=0"];
    let target = Process::start(place.bare(&serve));
    let name = target.address("--target_seg_name=").to_string();
    let theirs = target.http();
    let run = tebench(&place, &name, &["--xport_type=tcp", "--metrics_port=0"]);
    assert!(run.stderr.contains("metrics on http://127.0.0.1:"), "{}", run.stderr);
    run.text();
    let (status, text) = http_get(theirs, "/metrics");
    assert_eq!(status, 200);
    assert!(sum(&text, "kvplane_transfer_served_bytes_total", "read") >= 4096.0, "{text}");
    tebench(&place, &name, &["--api=session", "--metrics_port=0"]).failed(1, &["--metrics_port", "--api session"]);
    // A running initiator exports its counters.
    let arguments = ["tebench", "--total_buffer_size=4M", "--duration=60", "--metrics_port=0", "--xport_type=shm"];
    let mut initiator = Process::start(place.bare(&[&arguments[..], &[&format!("--target_seg_name={name}")]].concat()));
    let ours = initiator.http();
    let moved = |text: &str| sum(text, "kvplane_transfer_bytes_total", "transport=\"shm\"");
    let first = crate::support::wait_until(|| Some(moved(&http_get(ours, "/metrics").1)).filter(|sum| *sum > 0.0));
    let first = first.expect("bytes over shm");
    let later = crate::support::wait_until(|| Some(moved(&http_get(ours, "/metrics").1)).filter(|sum| *sum > first));
    assert!(later.is_some(), "nothing more than {first} bytes");
    initiator.kill();
}

#[test]
fn shards_export_metrics_on_the_metrics_port() {
    let place = Workplace::new("shards");
    let dev = place.dev("16M", &["--shards", "2", "--metrics-port", "0"]);
    let address = dev.address("counters of the shards on http://");
    for way in Way::BOTH {
        let mut client = place.client(way);
        for key in 0..20u32 {
            client.put(format!("{key} over {}", way.name()).as_bytes(), &key.to_le_bytes().repeat(25_000)).unwrap();
        }
        // A client of the store has no other path, not even an unused one.
        let rails = client.metrics().rails;
        assert!(rails.iter().all(|rail| rail.transport.name() == way.carrier()), "{rails:?}");
        assert_eq!(rails.iter().map(|rail| rail.bytes).sum::<u64>(), 20 * 100_000);
    }
    let (status, text) = http_get(address, "/metrics");
    assert_eq!(status, 200);
    assert_eq!(sum(&text, "kvplane_shard_puts_total", "shard"), 40.0, "{text}");
    assert_eq!(sum(&text, "kvplane_shard_object_bytes", "shard"), 40.0 * 100_000.0, "{text}");
    assert!(sum(&text, "kvplane_shard_pool_bytes", "shard=\"1\"") > 0.0, "{text}");
}
