//! Decode instances: durations of steps and lengths of outputs are learned, the instances of both phases are chosen
//! together, and the next turn of a session is expected.

use crate::support;

use kvplane_conductor::conductor::{
    Assignment, Conductor, ConductorError, DecodeStatus, InstanceLoad, InstancePart, RequestStep, RequestTerms,
    Schedule, ScheduleRefusal, ScheduleReply,
};
use kvplane_conductor::cost::DecodeSteps;
use kvplane_conductor::policy::{PlacementPolicy, Slo};
use kvplane_conductor::scheduler::RequestOutput;
use support::{SECOND, asked, assigned, batch, conductor, config, prompt, spec, stored};

const MS: u64 = 1_000_000;

fn learned(conductor: &mut Conductor) -> DecodeStatus {
    conductor.table(0).pools[0].status.decode
}

/// Reports steps of `step_ns` with a batch of `requests`.
fn report_steps(conductor: &mut Conductor, name: &str, seq: u64, step_ns: u64, requests: u32) {
    let steps = DecodeSteps { steps: 20, took_ns: 20 * step_ns, tokens: u64::from(requests) * 1_000, requests };
    conductor.report(name, 1, InstanceLoad { seq, steps, ..InstanceLoad::default() }, 0).expect("known");
}

/// Places a request at once.
fn place(conductor: &mut Conductor, id: &str, hashes: Vec<u64>, terms: &RequestTerms, now_ns: u64) -> Assignment {
    let answer = conductor.schedule_on_terms(&asked(id, hashes), terms, false, now_ns).expect("good");
    assigned(&answer).clone()
}

/// Ends a request after its prefill, with this output.
fn finish(conductor: &mut Conductor, placed: &Assignment, output: RequestOutput, now_ns: u64) {
    let done = RequestStep::PrefillDone { reused_tokens: 0, took_ns: placed.prefill_ns };
    for step in [done, RequestStep::Decoding, RequestStep::Finished(output)] {
        conductor.update(placed.reservation, step, now_ns).expect("booked");
    }
}

#[test]
fn retry_after_a_rejection_for_decodes_is_when_some_are_predicted_to_have_ended() {
    let mut conductor = conductor(1);
    let slo = Slo { ttft_ns: u64::MAX, tbt_ns: 33 * MS, ..Slo::NONE };
    conductor.set_placement(PlacementPolicy::Kvplane, true, slo, 0);
    // Steps take up to 30 ms, so each decode lasts up to 30 s.
    let terms = RequestTerms { output_tokens: 1_000, ..RequestTerms::default() };
    let mut decoding = Vec::new();
    let retry_after_ns = loop {
        let at = decoding.len() as u64;
        assert!(at < 1_000, "the objective is missed at some time");
        match conductor.schedule_on_terms(&asked(&format!("r{at}"), prompt(at, 200)), &terms, false, 0).expect("good") {
            ScheduleReply::Refused { why: ScheduleRefusal::Tbt, retry_after_ns } => break retry_after_ns,
            answer => {
                let placed = assigned(&answer).clone();
                let done = RequestStep::PrefillDone { reused_tokens: 0, took_ns: placed.prefill_ns };
                for step in [done, RequestStep::Decoding] {
                    conductor.update(placed.reservation, step, 0).expect("booked");
                }
                decoding.push(placed.reservation);
            }
        }
    };
    assert!(decoding.len() > 2, "{}", decoding.len());
    assert!((20 * SECOND..40 * SECOND).contains(&retry_after_ns), "{retry_after_ns}");
    for reservation in decoding {
        conductor.update(reservation, RequestStep::Ended, retry_after_ns).expect("booked");
    }
    place(&mut conductor, "again", prompt(9_999, 200), &terms, retry_after_ns);
}

#[test]
fn objective_between_tokens_is_judged_by_reported_steps() {
    let mut conductor = conductor(1);
    let slo = Slo { ttft_ns: u64::MAX, tbt_ns: 60 * MS, ..Slo::NONE };
    conductor.set_placement(PlacementPolicy::Kvplane, true, slo, 0);
    assert_eq!(learned(&mut conductor).base_ns, 26_200_000);
    let first = place(&mut conductor, "a", prompt(1, 10), &RequestTerms::default(), 0);
    conductor.update(first.reservation, RequestStep::Ended, 0).expect("booked");
    (1..=200).for_each(|seq| report_steps(&mut conductor, "d0", seq, 80 * MS, 1 + (seq % 20) as u32));
    let slow = learned(&mut conductor);
    assert!((70 * MS..90 * MS).contains(&slow.base_ns) && slow.reports == 200, "{slow:?}");
    let refused = conductor.schedule(&asked("b", prompt(2, 10)), 0).expect("good");
    assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::Tbt, .. }), "{refused:?}");
    // Between eight and nine tenths of the objective requests are still rejected, as they were before.
    (201..=2_500).for_each(|seq| report_steps(&mut conductor, "d0", seq, 51 * MS, 1 + (seq % 20) as u32));
    let refused = conductor.schedule(&asked("c", prompt(3, 10)), 0).expect("good");
    assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::Tbt, .. }), "{refused:?}");
    (2_501..=5_000).for_each(|seq| report_steps(&mut conductor, "d0", seq, 45 * MS, 1 + (seq % 20) as u32));
    place(&mut conductor, "d", prompt(4, 10), &RequestTerms::default(), 0);
}

#[test]
fn a_slow_instance_has_a_factor_and_a_false_one_changes_no_other() {
    let mut conductor = conductor(1);
    for name in ["d1", "d2"] {
        conductor.register(spec(name, InstancePart::Decode), 0).expect("room");
    }
    for seq in 1..=300 {
        report_steps(&mut conductor, "d0", seq, 30 * MS, 1 + (seq % 20) as u32);
        report_steps(&mut conductor, "d1", seq, 30 * MS, 1 + (seq % 20) as u32);
        report_steps(&mut conductor, "d2", seq, u64::MAX / 40, 1 + (seq % 20) as u32);
    }
    let base_ns = learned(&mut conductor).base_ns;
    assert!((27 * MS..34 * MS).contains(&base_ns), "{base_ns}");
    let rows = conductor.table(0).instances;
    let factor =
        |name: &str| rows.iter().find(|row| *row.status.instance == *name).map(|row| row.status.decode_factor_permille);
    assert!(factor("d0").is_some_and(|factor| (800..1_200).contains(&factor)), "{:?}", factor("d0"));
    assert!(factor("d2").is_some_and(|factor| factor > 5_000), "{:?}", factor("d2"));
    let placed = place(&mut conductor, "a", prompt(1, 10), &RequestTerms::default(), 0);
    assert_ne!(placed.decode.as_deref(), Some("d2"));
}

#[test]
fn outputs_of_finished_requests_are_expected_and_booked() {
    let mut conductor = conductor(1);
    for at in 0..40 {
        let now_ns = at * SECOND;
        let placed = place(&mut conductor, &format!("r{at}"), prompt(at, 10), &RequestTerms::default(), now_ns);
        finish(&mut conductor, &placed, RequestOutput { tokens: 101, decode_ns: 100 * 40 * MS }, now_ns);
    }
    let decode = learned(&mut conductor);
    assert_eq!((decode.output_p50, decode.output_p90, decode.output_error_permille), (101, 101, 0));
    // Steps are learned from durations of requests too: 40 ms instead of 26.2 ms.
    assert!((33 * MS..42 * MS).contains(&decode.base_ns), "{decode:?}");
    let next = place(&mut conductor, "next", prompt(99, 10), &RequestTerms::default(), 0);
    let booked = |conductor: &mut Conductor| {
        conductor.table(0).instances.iter().map(|row| row.status.decode_tokens).sum::<u64>()
    };
    assert_eq!(booked(&mut conductor), 160 + 101);
    conductor.update(next.reservation, RequestStep::Ended, 0).expect("booked");
    // Nothing is learned of an output without tokens, and extreme ones do no harm.
    for (at, tokens) in [0, u32::MAX].into_iter().enumerate() {
        let placed = place(&mut conductor, &format!("x{at}"), prompt(200, 10), &RequestTerms::default(), SECOND);
        finish(&mut conductor, &placed, RequestOutput { tokens, decode_ns: u64::MAX }, SECOND);
    }
    assert_eq!(learned(&mut conductor).output_p50, 101);
}

#[test]
fn an_instance_of_both_parts_keeps_its_prompts_where_handing_them_over_takes_longer() {
    for (nic_bytes_s, keeps) in [(1_000_000_000, true), (1_000_000_000_000, false)] {
        let mut config = config();
        config.scheduler.nic_bytes_s = nic_bytes_s;
        let mut conductor = Conductor::new(config, 0);
        conductor.register(spec("mixed", InstancePart::Mixed), 0).expect("room");
        conductor.register(spec("decode", InstancePart::Decode), 0).expect("room");
        // It has 400 requests more in its batch than the other one.
        let load = InstanceLoad { seq: 1, decode_tokens: 100_000, decodes: 4, ..InstanceLoad::default() };
        conductor.report("mixed", 1, load, 0).expect("known");
        // 16,000 tokens of 320 KiB are 5.2 s at 1 GB/s, and 5 ms at 1 TB/s; its steps take 3.6 ms longer.
        let terms = RequestTerms { output_tokens: 100, ..RequestTerms::default() };
        let placed = place(&mut conductor, "a", prompt(1, 1_000), &terms, 0);
        let decode = if keeps { "mixed" } else { "decode" };
        assert_eq!((&*placed.prefill, placed.decode.as_deref()), ("mixed", Some(decode)));
    }
}

#[test]
fn a_decode_instance_that_holds_the_prefix_needs_less() {
    let mut config = config();
    config.scheduler.nic_bytes_s = 1_000_000_000;
    let mut conductor = Conductor::new(config, 0);
    conductor.register(spec("p", InstancePart::Prefill), 0).expect("room");
    for name in ["a", "b"] {
        conductor.register(spec(name, InstancePart::Mixed), 0).expect("room");
    }
    let long = prompt(1, 1_000);
    conductor.cache("b", 1, batch(0, vec![stored(long.clone())]), 0).expect("known");
    conductor.hold("b", true, 0).expect("known");
    conductor.hold("b", false, 0).expect("known");
    // Only the instance without a decode part may prefill it.
    let mut request = asked("r", long);
    request.barred = vec!["a".to_owned()];
    let placed = assigned(&conductor.schedule(&request, 0).expect("good")).clone();
    assert_eq!(placed.decode.as_deref(), Some("b"), "{placed:?}");
}

#[test]
fn the_next_turn_goes_where_the_last_one_was_also_without_cache_events() {
    let mut conductor = conductor(3);
    let terms = |session: &str| RequestTerms { session: session.to_owned(), ..RequestTerms::default() };
    let mut hashes = prompt(1, 50);
    let mut last: Option<Assignment> = None;
    for turn in 0..5 {
        let now_ns = turn * 20 * SECOND;
        let placed = place(&mut conductor, &format!("turn{turn}"), hashes.clone(), &terms("s"), now_ns);
        if let Some(last) = &last {
            assert_eq!(placed.prefill, last.prefill, "turn {turn}");
        }
        assert_eq!(conductor.table(now_ns).pools[0].status.sessions, 0, "while the turn is open");
        finish(&mut conductor, &placed, RequestOutput { tokens: 10, decode_ns: 9 * 30 * MS }, now_ns);
        assert_eq!(conductor.table(now_ns).pools[0].status.sessions, 1);
        // Requests of others change the order of the instances.
        let other = place(&mut conductor, &format!("other{turn}"), prompt(100 + turn, 10), &terms(""), now_ns);
        conductor.update(other.reservation, RequestStep::Ended, now_ns).expect("booked");
        hashes.extend(prompt(2 + turn, 20));
        last = Some(placed);
    }
    // Its instance goes; then the time of the claim is over.
    let served_by = last.expect("five turns").prefill.to_string();
    conductor.deregister(&served_by, 1, 81 * SECOND).expect("registered");
    assert_eq!(conductor.table(81 * SECOND).pools[0].status.sessions, 0);
    let long = "s".repeat(257);
    let refused = conductor.schedule_on_terms(&asked("long", prompt(9, 1)), &terms(&long), false, 82 * SECOND);
    assert!(matches!(&refused, Err(ConductorError::Bad { what }) if what.contains("257")), "{refused:?}");
}

#[test]
fn prompts_of_others_evict_where_fewer_sessions_are_expected() {
    let mut conductor = conductor(2);
    let terms = RequestTerms { session: "s".to_owned(), ..RequestTerms::default() };
    let hashes = prompt(1, 2_000);
    let placed = place(&mut conductor, "turn", hashes.clone(), &terms, 0);
    conductor.cache(&placed.prefill, 1, batch(0, vec![stored(hashes)]), 0).expect("known");
    finish(&mut conductor, &placed, RequestOutput { tokens: 10, decode_ns: 9 * 30 * MS }, 0);
    for at in 0..4 {
        let other = place(&mut conductor, &format!("other{at}"), prompt(10 + at, 500), &RequestTerms::default(), 0);
        assert_ne!(other.prefill, placed.prefill);
        conductor.update(other.reservation, RequestStep::Ended, 0).expect("booked");
    }
}

#[test]
fn a_queued_turn_that_is_rejected_ends() {
    let mut conductor = conductor(2);
    let terms = RequestTerms { session: "a".to_owned(), ..RequestTerms::default() };
    // Both instances are busy, and the turn may only go to the one that leaves.
    let busy: Vec<Assignment> = (0..2)
        .map(|at| place(&mut conductor, &format!("busy{at}"), prompt(at, 60_000), &Default::default(), 0))
        .collect();
    let turn = Schedule { barred: vec!["p0".to_owned()], ..asked("turn", prompt(9, 10)) };
    let answer = conductor.schedule_on_terms(&turn, &terms, false, 0).expect("good");
    assert!(matches!(answer, ScheduleReply::Queued { .. }), "{answer:?}");
    conductor.deregister("p1", 1, 0).expect("its own incarnation");
    assert_eq!(conductor.table(0).pools[0].status.waiting, 0, "it is rejected");
    let on_p0 = busy.iter().find(|one| &*one.prefill == "p0").expect("each has one");
    finish(&mut conductor, on_p0, RequestOutput::default(), 0);
    let next = place(&mut conductor, "next", prompt(9, 10), &terms, 0);
    finish(&mut conductor, &next, RequestOutput::default(), SECOND);
    assert_eq!(conductor.table(SECOND).pools[0].status.sessions, 1, "its next turn is expected");
}
