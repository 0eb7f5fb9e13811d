//! Small simulated clusters with predictable outcomes.

use std::sync::Arc;

use kvplane_conductor::conductor::ConductorConfig;
use kvplane_conductor::copies::CopyConfig;
use kvplane_conductor::cost::{DecodeModel, PrefillModel};
use kvplane_conductor::policy::{LateBinding, Policy, Probability, Slo};
use kvplane_conductor::scheduler::ServiceTerms;
use kvplane_proto::rng::Rng;
use kvplane_sim::{
    Algorithm1, Faults, Order, RejectingAlgorithm1, Rejection, RequestStatus, SimConfig, Work, bound, name_sessions,
    run, side_by_side,
};

fn work(arrival_ms: u64, input_tokens: u32, blocks: &[u64]) -> Work {
    Work {
        arrival_ns: arrival_ms * 1_000_000,
        input_tokens,
        output_tokens: 10,
        blocks: Arc::from(blocks),
        terms: ServiceTerms::default(),
    }
}

/// Returns sessions with growing prompts and a shared head, which arrive a little faster than one instance could serve.
fn sessions(count: usize, seed: u64) -> Vec<Work> {
    let mut rng = Rng::new(seed, "sessions");
    let mut trace: Vec<Work> = Vec::new();
    let mut prompts: Vec<Vec<u64>> = Vec::new();
    let mut next = 1;
    for at in 0..count {
        let from = rng.below(prompts.len() as u64 + 3) as usize;
        let mut blocks = prompts.get(from).cloned().unwrap_or_else(|| vec![0]);
        for _ in 0..1 + rng.below(20) {
            blocks.push(next);
            next += 1;
        }
        trace.push(work(at as u64 * 300, blocks.len() as u32 * 512, &blocks));
        if from < prompts.len() {
            prompts[from] = blocks;
        } else {
            prompts.push(blocks);
        }
    }
    trace
}

#[test]
fn a_prefix_is_computed_once_and_reused() {
    let blocks: Vec<u64> = (0..16).collect();
    let trace = [work(0, 8192, &blocks), work(10_000, 8192, &blocks)];
    let config = SimConfig { prefill: 2, ..SimConfig::default() };
    let model = PrefillModel::default();
    for policy in [Box::new(Algorithm1::default()) as Box<dyn Policy>, Box::new(LateBinding::default())] {
        let outcome = run(&trace, &config, policy);
        assert_eq!(outcome.requests[0].ttft_ns, model.predict_ns(8192, 0));
        assert_eq!(outcome.requests[1].ttft_ns, model.predict_ns(8192, 8192));
        assert_eq!(outcome.hit(), 0.5);
    }
}

#[test]
fn blocks_are_held_when_computed_or_at_once() {
    let blocks: Vec<u64> = (0..16).collect();
    // The second prompt arrives while the first is being computed, and is placed on another instance.
    let trace = [work(0, 8192, &blocks), work(1, 8192, &blocks)];
    let model = PrefillModel::default();
    let all = SimConfig { prefill: 2, ..SimConfig::default() };
    for (at_once, hit) in [(false, 0.0), (true, 0.5)] {
        let config = SimConfig { at_once, ..all.clone() };
        let outcome = run(&trace, &config, Box::new(Algorithm1::default()));
        assert_eq!(outcome.requests[0].ttft_ns, model.predict_ns(8192, 0));
        assert_eq!(outcome.hit(), hit, "at once: {at_once}");
    }
}

#[test]
fn all_requests_are_served_and_runs_are_deterministic() {
    let trace = sessions(400, 3);
    let config = SimConfig { prefill: 4, decode: 2, cache_tokens: 200_000, ..SimConfig::default() };
    for (policy, again) in side_by_side().into_iter().zip(side_by_side()) {
        let name = policy.name();
        let (first, second) = (run(&trace, &config, policy), run(&trace, &config, again));
        assert_eq!(first.count(RequestStatus::Served), trace.len(), "{name}");
        assert!(first.requests.iter().all(|served| served.tbt_ns >= 26_000_000), "{name}");
        assert_eq!(first.mean_ttft_s().to_bits(), second.mean_ttft_s().to_bits(), "{name}");
    }
}

#[test]
fn default_policy_is_between_the_bound_and_cache_blind_policies() {
    let trace = sessions(600, 5);
    let config = SimConfig { prefill: 3, load: 2.0, ..SimConfig::default() };
    let bound = bound(&trace, &config, Order::Shortest).mean_ttft_s();
    let means: Vec<f64> = side_by_side().into_iter().map(|policy| run(&trace, &config, policy).mean_ttft_s()).collect();
    let ours = *means.last().unwrap();
    assert!(ours >= bound * 0.999, "{ours} against {bound}");
    assert!(means[..3].iter().all(|mean| ours <= *mean), "{means:?}");
}

#[test]
fn faults_lose_no_request() {
    let trace = sessions(300, 9);
    let faults = Faults { stale_ns: 1_000_000_000, lost: 0.05, prefill_error: 0.3, death_ns: Some(40_000_000_000) };
    let config = SimConfig { prefill: 3, decode: 1, cache_tokens: 100_000, faults, ..SimConfig::default() };
    for policy in side_by_side() {
        let name = policy.name();
        let outcome = run(&trace, &config, policy);
        assert_eq!(outcome.count(RequestStatus::Served), trace.len(), "{name}");
    }
}

#[test]
fn a_queued_request_ends_after_the_maximum_wait() {
    let model = PrefillModel::default();
    let prefill_ns = model.predict_ns(8192, 0);
    let blocks = |first: u64| (first..first + 16).collect::<Vec<u64>>();
    let trace = [work(0, 8192, &blocks(0)), work(1, 8192, &blocks(100))];
    let wait = |wait_ns| SimConfig { prefill: 1, wait_ns, ..SimConfig::default() };
    let outcome = run(&trace, &wait(prefill_ns), Box::new(LateBinding::default()));
    assert_eq!(outcome.count(RequestStatus::Served), 2);
    let limit_ns = prefill_ns / 2;
    let outcome = run(&trace, &wait(limit_ns), Box::new(LateBinding::default()));
    let waited = &outcome.requests[1];
    assert_eq!((waited.status, waited.ttft_ns), (RequestStatus::Waited, limit_ns));
    assert_eq!(outcome.count(RequestStatus::Served), 1);
    assert_eq!(SimConfig::default().wait_ns, ConductorConfig::default().wait_ns);
}

#[test]
fn admission_rejects_at_arrival() {
    let trace = sessions(600, 11);
    let slo = Slo { ttft_ns: 5_000_000_000, tbt_ns: 100_000_000, ..Slo::NONE };
    let config = SimConfig { prefill: 2, decode: 2, load: 4.0, slo, ..SimConfig::default() };
    for rejection in [Rejection::Baseline, Rejection::Early, Rejection::Predicted] {
        let outcome = run(&trace, &config, Box::new(RejectingAlgorithm1::new(rejection)));
        assert!(outcome.count(RequestStatus::Refused) > 50, "{rejection:?}");
    }
    let paper = run(&trace, &config, Box::new(Algorithm1 { refuses: true, ..Algorithm1::default() }));
    assert!(paper.count(RequestStatus::Refused) > 50);
    let ours = run(&trace, &config, Box::new(LateBinding { refuses: true, ..LateBinding::default() }));
    assert_eq!(ours.count(RequestStatus::RefusedLate), 0);
    let goodput = |outcome: &kvplane_sim::Outcome| outcome.goodput(slo.ttft_ns, slo.tbt_ns);
    assert!(goodput(&ours) >= goodput(&paper), "{} against {}", goodput(&ours), goodput(&paper));
}

/// Returns questions about documents, which arrive at a steady rate: their prefills take 0.1 to 1.5 s.
fn questions(count: u64, gap_ms: u64, seed: u64) -> Vec<Work> {
    let mut rng = Rng::new(seed, "questions");
    let question = |at: u64| {
        let (document, length) = (rng.below(40), 1 + rng.below(20));
        let tail = (0..length).map(|block| 1_000_000 + at * 100 + block);
        let blocks: Vec<u64> = (0..10).map(|block| 1 + document * 100 + block).chain(tail).collect();
        work(at * gap_ms, blocks.len() as u32 * 512, &blocks)
    };
    (0..count).map(question).collect()
}

#[test]
fn as_many_admitted_requests_are_in_time_as_promised() {
    let faulty = Faults { stale_ns: 1_000_000_000, lost: 0.01, prefill_error: 0.3, death_ns: None };
    // The requests of the lost instance, and those that it was to serve, are late.
    let dying = Faults { death_ns: Some(60_000_000_000), ..faulty };
    let slo = Slo { ttft_ns: 10_000_000_000, ..Slo::NONE };
    for (seed, faults, least) in [(21, Faults::default(), 0.99), (22, faulty, 0.99), (23, dying, 0.98)] {
        let trace = questions(3_000, 110, seed);
        let config = SimConfig { prefill: 4, slo, faults, ..SimConfig::default() };
        let outcome = run(&trace, &config, Box::new(LateBinding { refuses: true, ..LateBinding::default() }));
        let (kept, refused) = (outcome.kept(slo.ttft_ns), outcome.count(RequestStatus::Refused));
        assert!(kept >= least, "{faults:?}: {kept}, {refused} rejected");
        assert!(refused > 500 && refused < trace.len() / 2, "{refused} rejected");
        assert_eq!(outcome.count(RequestStatus::Waited), 0);
        let longest_s = outcome.ttft_quantiles_s(&[1.0])[0];
        assert!(longest_s < 30.0, "late ones go soon: {longest_s} s");
    }
}

#[test]
fn an_admitted_request_is_in_time_beside_a_flood() {
    // Every fifteenth request has an objective; the others are a flood of another flow, with a higher priority.
    let mut trace = questions(2_000, 110, 31);
    let is_promised = |at: usize| at.is_multiple_of(15);
    for (at, work) in trace.iter_mut().enumerate() {
        work.terms = if is_promised(at) {
            ServiceTerms { flow: "own".into(), ttft_ns: Some(10_000_000_000), ..ServiceTerms::default() }
        } else {
            ServiceTerms { flow: "flood".into(), priority: 4, ..ServiceTerms::default() }
        };
    }
    let outcome = run(&trace, &SimConfig { prefill: 4, ..SimConfig::default() }, Box::new(LateBinding::default()));
    let of = |promised| {
        let those = outcome.requests.iter().enumerate().filter(move |(at, _)| is_promised(*at) == promised);
        those.map(|(_, served)| (served.status, served.ttft_ns))
    };
    assert!(of(true).all(|(status, ns)| status == RequestStatus::Served && ns <= 10_000_000_000));
    assert!(of(false).any(|(_, ns)| ns > 100_000_000_000), "the flood waits");
}

/// Returns requests for long documents: each is read once, and then used repeatedly, one much more than the others.
fn documents(count: u64, seed: u64, gap: u64) -> Vec<Work> {
    let mut rng = Rng::new(seed, "documents");
    let document = |number: u64| (0..40).map(move |block| 1 + number * 100 + block);
    let read = (0..20).map(|number| work(number * 4_000, 40 * 512, &document(number).collect::<Vec<_>>()));
    let mut trace: Vec<Work> = read.collect();
    for at in 0..count {
        let number = if rng.chance(0.6) { 0 } else { rng.below(20) };
        let blocks: Vec<u64> = document(number).chain((0..8).map(|block| 1 << 40 | at << 4 | block)).collect();
        trace.push(work(100_000 + at * gap, 48 * 512, &blocks));
    }
    trace
}

fn copying(config: &SimConfig) -> SimConfig {
    let copies = CopyConfig { most_bytes: u64::MAX, most_places: 8, ..CopyConfig::default() };
    SimConfig { copies: Some(copies), ..config.clone() }
}

#[test]
fn replicas_relieve_a_hot_node() {
    let trace = documents(4_000, 7, 130);
    let config = SimConfig { nic_bytes_s: 40_000_000_000, pass_through: true, ..SimConfig::default() };
    let ours = || Box::new(LateBinding::default());
    let (without, with) = (run(&trace, &config, ours()), run(&trace, &copying(&config), ours()));
    // All of it was sent by one of eight instances.
    assert_eq!((without.copied, without.egress_imbalance), (0, 8.0));
    assert!((1..=8).contains(&with.copied) && with.egress_imbalance < 6.0, "{}", with.egress_imbalance);
    assert!(with.transfer_s() < without.transfer_s() / 2.0, "{} and {} s", with.transfer_s(), without.transfer_s());
    assert!(with.mean_ttft_s() < without.mean_ttft_s() / 4.0);
    assert_eq!(with.count(RequestStatus::Served), trace.len());
}

#[test]
fn replicas_do_no_harm_without_contention() {
    for (trace, config) in [
        (sessions(400, 3), SimConfig { prefill: 4, ..SimConfig::default() }),
        (documents(1_000, 9, 200), SimConfig { prefill: 8, ..SimConfig::default() }),
        (documents(1_000, 9, 130), SimConfig { nic_bytes_s: 40_000_000_000, ..SimConfig::default() }),
    ] {
        let ours = || Box::new(LateBinding::default());
        let (without, with) = (run(&trace, &config, ours()), run(&trace, &copying(&config), ours()));
        assert!(with.mean_ttft_s() <= without.mean_ttft_s() * 1.01, "{} s", with.mean_ttft_s());
    }
}

/// Returns requests with prompts of 8,192 tokens and outputs of 50 to 800, three a second.
fn long_outputs(count: u64, seed: u64) -> Vec<Work> {
    let mut rng = Rng::new(seed, "outputs");
    let blocks = |at: u64| (at * 16..at * 16 + 16).collect::<Vec<u64>>();
    let request = |at| Work { output_tokens: 50 + rng.below(750) as u32, ..work(at * 333, 8192, &blocks(at)) };
    (0..count).map(request).collect()
}

#[test]
fn learned_decodes_keep_an_objective_that_constants_miss() {
    let slo = Slo { ttft_ns: 30_000_000_000, tbt_ns: 100_000_000, probability: Probability::DEFAULT };
    for seed in [3, 4] {
        let trace = long_outputs(1_500, seed);
        // Steps take twice as long as the constants say.
        let config = |learns| SimConfig {
            prefill: 6,
            decode: 1,
            load: 1.6,
            slo,
            decode_model: DecodeModel { base_ns: 52.4e6, token_ns: 72.0, request_ns: 0.0 },
            learns,
            ..SimConfig::default()
        };
        let admitting = || Box::new(LateBinding { refuses: true, ..LateBinding::default() });
        let [constants, learned] = [false, true].map(|learns| run(&trace, &config(learns), admitting()));
        let missed = [&constants, &learned].map(|outcome| outcome.tbt_missed(slo.tbt_ns));
        let goodput = [&constants, &learned].map(|outcome| outcome.goodput(slo.ttft_ns, slo.tbt_ns));
        assert!(missed[1] * 4 < missed[0] && goodput[1] > goodput[0], "missed {missed:?}, goodput {goodput:?}");
        assert!(learned.decode_error() < 0.1, "{}", learned.decode_error());
        let errors = learned.output_errors();
        assert!((0.8..=1.0).contains(&errors.within_high), "{errors:?}");
    }
}

#[test]
fn handovers_occupy_nics_and_lose_no_request() {
    let trace = long_outputs(300, 7);
    let config = |hands_over| SimConfig {
        prefill: 4,
        decode: 2,
        hands_over,
        nic_bytes_s: 2_000_000_000,
        ..SimConfig::default()
    };
    let [at_once, sent] = [false, true].map(|over| run(&trace, &config(over), Box::new(LateBinding::default())));
    for outcome in [&at_once, &sent] {
        assert_eq!(outcome.count(RequestStatus::Served), trace.len());
    }
    assert!(sent.egress_imbalance > 0.0 && sent.mean_ttft_s() >= at_once.mean_ttft_s());
}

/// One trace tells little: any other order of its requests changes the hit rate of this small cluster by up to 0.1.
#[test]
fn expected_sessions_lose_nothing() {
    const SEEDS: u64 = 16;
    let mut hits = [0.0; 2];
    for seed in 1..=SEEDS {
        let plain = sessions(400, seed);
        let mut named = plain.clone();
        assert!(name_sessions(&mut named) > 100);
        let config = SimConfig { prefill: 4, cache_tokens: 200_000, ..SimConfig::default() };
        let [without, with] = [&plain, &named].map(|trace| run(trace, &config, Box::new(LateBinding::default())));
        assert_eq!(with.count(RequestStatus::Served), plain.len());
        hits = [hits[0] + without.hit() / SEEDS as f64, hits[1] + with.hit() / SEEDS as f64];
    }
    assert!(hits[1] > hits[0] - 0.01, "mean hit rate {} without sessions, {} with", hits[0], hits[1]);
}
