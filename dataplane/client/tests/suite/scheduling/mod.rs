//! The client's scheduling against a network in virtual time: the figures for rails in docs/performance.md.
//!
//! `cargo test -p kvplane-client --test suite -- scheduling --nocapture` prints them. They do not depend on the machine
//! that runs the test, so they are asserted too.

mod network;

use kvplane_client::{Intent, SubmitOptions};
use kvplane_proto::rng::Rng;
use network::{Network, Port, SECOND_NS};

/// Bytes per second of a 10 Gb/s port.
const PORT: u64 = 1_250_000_000;
const BULK_BYTES: u64 = 64 << 20;
const SMALL_BYTES: u64 = 4 << 10;

/// Six healthy ports, one at an eighth of its stated speed, and one that is down for 40 of every 150 ms.
fn eight_rails() -> Vec<Port> {
    let mut ports = vec![Port::sound(PORT); 8];
    ports[5] = Port { bytes_per_second: PORT / 8, ..ports[5] };
    ports[6] = Port { up_ns: 110_000_000, down_ns: 40_000_000, ..ports[6] };
    ports
}

/// Keeps this many bulk reads in flight until `until_ns`.
fn keep_bulk(network: &mut Network, open: usize) {
    while network.open_bulk() < open {
        let options = SubmitOptions { intent: Intent::Checkpoint, ..SubmitOptions::until(u64::MAX / 2) };
        network.submit(BULK_BYTES, &options);
    }
}

#[test]
fn eight_rails_with_a_slow_and_a_flapping_one_are_used_to_the_full() {
    let span_ns = 1_500_000_000;
    let mut network = Network::new(eight_rails(), 20_000);
    while network.now_ns < span_ns {
        keep_bulk(&mut network, 3);
        network.step();
    }
    let moved: u64 = network.delivered_bytes();
    let ideal = network.ideal_bytes(span_ns);
    let share = moved as f64 / ideal;
    println!(
        "8 rails, one slow, one flapping: {:.3} GB/s of {:.3} possible, {:.1} %",
        moved as f64 / span_ns as f64,
        ideal / span_ns as f64,
        share * 100.0
    );
    for rail in network.client.metrics().rail_metrics() {
        println!(
            "  rail {}: {:.3} GB/s measured, {:.1} MB, {} retries, {} pauses, service p50 {} us",
            rail.number,
            rail.bytes_per_second as f64 / 1e9,
            rail.counts.bytes as f64 / 1e6,
            rail.counts.retries,
            rail.counts.pauses,
            rail.counts.service.quantile_ns(0.5) / 1000
        );
    }
    assert!(share >= 0.95, "{share}");
    assert_eq!(network.failed, 0, "no request fails for it");
}

/// Latencies of small reads of this intent, one about every 100 us, sorted.
fn small_latencies(ports: Vec<Port>, intent: Intent, bulk: usize) -> Vec<u64> {
    let mut network = Network::new(ports, 20_000);
    let mut rng = Rng::new(7, "arrivals");
    let span_ns = SECOND_NS;
    let mut next_ns = 50_000_000;
    let small = SubmitOptions { intent, ..SubmitOptions::until(u64::MAX / 2) };
    while network.now_ns < span_ns {
        keep_bulk(&mut network, bulk);
        if network.now_ns >= next_ns {
            network.submit(SMALL_BYTES, &small);
            next_ns += 50_000 + rng.below(100_000);
        }
        network.step_until(next_ns);
    }
    let mut latencies = core::mem::take(&mut network.small_latencies_ns);
    latencies.sort_unstable();
    latencies
}

fn p99(sorted: &[u64]) -> u64 {
    sorted[sorted.len() * 99 / 100]
}

#[test]
fn small_reads_do_not_wait_for_bulk() {
    let one = || vec![Port::sound(PORT)];
    // The last is of the bulk's own class: a small read is not queued behind a large one there either.
    let cases = [
        ("8 rails, urgent", eight_rails(), Intent::ForegroundGet),
        ("1 rail, urgent", one(), Intent::ForegroundGet),
        ("1 rail, same class", one(), Intent::Checkpoint),
    ];
    for (name, ports, intent) in cases {
        let (idle, busy) = (small_latencies(ports.clone(), intent, 0), small_latencies(ports, intent, 3));
        println!(
            "{name}: 4 KiB reads: p50 {} us idle, {} us under bulk; p99 {} us idle, {} us under bulk",
            idle[idle.len() / 2] / 1000,
            busy[busy.len() / 2] / 1000,
            p99(&idle) / 1000,
            p99(&busy) / 1000
        );
        assert!(busy.len() > 9_000, "{} were answered", busy.len());
        assert!(p99(&busy) <= 2 * p99(&idle), "{} after {}", p99(&busy), p99(&idle));
    }
}

#[test]
fn a_recovered_port_is_in_use_within_50_ms() {
    let ports = vec![Port::sound(PORT), Port { up_ns: 300_000_000, down_ns: 700_000_000, ..Port::sound(PORT) }];
    let mut network = Network::new(ports, 20_000);
    let mut healed_ns = 0;
    let mut before = 0;
    while network.now_ns < 1_200_000_000 && healed_ns == 0 {
        keep_bulk(&mut network, 2);
        network.step();
        let bytes = network.client.metrics().rail_metrics().nth(1).map_or(0, |rail| rail.counts.bytes);
        if network.now_ns < SECOND_NS {
            before = bytes;
        } else if bytes > before + (1 << 20) {
            healed_ns = network.now_ns - SECOND_NS;
        }
    }
    println!("a rail that was down for 700 ms carries again {:.1} ms after its port is back", healed_ns as f64 / 1e6);
    assert!((1..50_000_000).contains(&healed_ns), "{healed_ns}");
}

#[test]
fn a_silent_port_is_detected_and_costs_little() {
    let span_ns = 2 * SECOND_NS;
    let mut ports = vec![Port::sound(PORT); 4];
    ports[1] = Port { up_ns: 500_000_000, down_ns: 500_000_000, silent: true, ..ports[1] };
    let mut network = Network::new(ports, 20_000);
    while network.now_ns < span_ns {
        keep_bulk(&mut network, 3);
        network.step();
    }
    let share = network.delivered_bytes() as f64 / network.ideal_bytes(span_ns);
    println!("4 rails, one silently gone half of the time: {:.1} % of what is possible", share * 100.0);
    assert_eq!(network.failed, 0, "no request fails for it");
    let stalls: Vec<u64> = network.client.metrics().rail_metrics().map(|rail| rail.counts.stalls).collect();
    assert!(matches!(stalls[..], [0, silent, 0, 0] if silent > 0), "given up as silent: {stalls:?}");
    assert!(share >= 0.9, "{share}");
}

#[test]
fn a_path_with_a_long_round_trip_is_kept_full() {
    // A round trip of 20 ms: ten times the work that is posted ahead by default.
    let mut network = Network::new(vec![Port::sound(PORT)], 10_000_000);
    let run = |network: &mut Network, until_ns| {
        while network.now_ns < until_ns {
            keep_bulk(network, 3);
            network.step();
        }
        network.delivered_bytes()
    };
    let before = run(&mut network, SECOND_NS);
    let moved = run(&mut network, 2 * SECOND_NS) - before;
    let share = moved as f64 / PORT as f64;
    println!("1 rail of 20 ms: {:.1} % of its port after a second", share * 100.0);
    assert!(share >= 0.9, "{share}");
}

#[test]
fn one_large_read_uses_every_rail_and_ends_on_all_at_once() {
    let mut network = Network::new(vec![Port::sound(PORT); 8], 20_000);
    let options = SubmitOptions::until(u64::MAX / 2);
    // Connections are established first; they are not measured.
    network.submit(BULK_BYTES, &options);
    while network.open_bulk() > 0 {
        network.step();
    }
    let start_ns = network.now_ns;
    network.submit(BULK_BYTES, &options);
    while network.open_bulk() > 0 {
        network.step();
    }
    let took_ns = (network.now_ns - start_ns) as f64;
    let ideal_ns = BULK_BYTES as f64 / (8.0 * PORT as f64 / 1e9);
    println!("64 MiB over 8 rails: {:.2} ms, {:.2} ms at least", took_ns / 1e6, ideal_ns / 1e6);
    assert!(took_ns <= ideal_ns * 1.1, "{took_ns} of {ideal_ns}");
}
