//! Pipeline groups and layer-wise overlap in small simulated clusters.

use std::sync::Arc;

use kvplane_conductor::policy::LateBinding;
use kvplane_conductor::scheduler::ServiceTerms;
use kvplane_proto::rng::Rng;
use kvplane_sim::{Faults, Outcome, RequestStatus, SimConfig, SimGroups, Work, run};

fn work(arrival_ms: u64, blocks: std::ops::Range<u64>) -> Work {
    Work {
        arrival_ns: arrival_ms * 1_000_000,
        input_tokens: (blocks.end - blocks.start) as u32 * 512,
        output_tokens: 10,
        blocks: Arc::from(blocks.collect::<Vec<u64>>()),
        terms: ServiceTerms::default(),
    }
}

fn config(stages: usize) -> SimConfig {
    let groups = (stages > 1).then_some(SimGroups { stages, chunk_tokens: 4_096 });
    SimConfig { prefill: 8, groups, ..SimConfig::default() }
}

fn served(trace: &[Work], config: &SimConfig) -> Outcome {
    let outcome = run(trace, config, Box::new(LateBinding::default()));
    assert!(outcome.requests.iter().all(|request| request.status == RequestStatus::Served));
    assert_eq!(outcome.left_booked_ns, 0);
    outcome
}

/// Returns a mix of short prompts and of some with up to 128k tokens, which share prefixes.
fn mix(count: u64, seed: u64) -> Vec<Work> {
    let mut rng = Rng::new(seed, "mix");
    let mut from = 0;
    let one = |at: u64| {
        let blocks = if rng.chance(0.1) { 100 + rng.below(156) } else { 1 + rng.below(40) };
        from = if rng.chance(0.3) { from } else { at * 1_000 };
        work(at * (200 + rng.below(400)), from..from + blocks)
    };
    let mut trace: Vec<Work> = (0..count).map(one).collect();
    trace.sort_by_key(|work| work.arrival_ns);
    trace
}

#[test]
fn bookings_are_what_was_served() {
    let trace = [work(0, 0..128), work(20_000, 0..256), work(60_000, 0..256)];
    for layer_wise in [false, true] {
        for stages in [1, 2, 4, 8] {
            let outcome = served(&trace, &SimConfig { layer_wise, ..config(stages) });
            for request in &outcome.requests {
                let (predicted_ns, ttft_ns) = (request.predicted_ns, request.ttft_ns);
                // Chunks and parts of transfers are rounded to nanoseconds.
                assert!(ttft_ns.abs_diff(predicted_ns) < 10_000, "{stages} stages: {ttft_ns}, not {predicted_ns}");
            }
            let used: Vec<u32> = outcome.requests.iter().map(|request| request.stages).collect();
            // Nothing is left to compute of the third prompt.
            assert_eq!(used, [stages as u32, stages as u32, 1]);
        }
    }
}

#[test]
fn more_stages_are_faster_for_a_long_prompt() {
    let ttft = |stages| served(&[work(0, 0..256)], &config(stages)).requests[0].ttft_ns as f64;
    let ratios = [2, 4, 8].map(|stages| ttft(1) / ttft(stages));
    assert!(ratios.is_sorted() && ratios[0] > 1.8 && ratios[2] > 5.5 && ratios[2] < 8.0, "{ratios:?}");
}

#[test]
fn fetches_are_hidden_behind_the_prefill() {
    // One instance has the prefix, and is busy with another prompt; NICs are slow.
    let trace = [work(0, 0..64), work(8_000, 1_000..1_128), work(8_100, 0..128)];
    let ttft = |layer_wise| {
        let config = SimConfig { prefill: 2, nic_bytes_s: 10_000_000_000, layer_wise, ..SimConfig::default() };
        served(&trace, &config).requests[2].ttft_ns
    };
    assert!(ttft(true) < ttft(false));
}

#[test]
fn groups_survive_load_wrong_predictions_and_the_death_of_a_member() {
    let trace = mix(300, 5);
    for (stages, faults) in [
        (4, Faults::default()),
        (8, Faults { prefill_error: 0.5, stale_ns: 100_000_000, ..Faults::default() }),
        (4, Faults { death_ns: Some(10_000_000_000), prefill_error: 0.2, ..Faults::default() }),
    ] {
        let outcome = served(&trace, &SimConfig { faults, layer_wise: true, ..config(stages) });
        assert!(outcome.requests.iter().any(|request| request.stages > 1), "{stages} stages, {faults:?}");
    }
}
