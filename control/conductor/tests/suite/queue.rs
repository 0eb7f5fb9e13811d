//! Central queue: a request that cannot start does not block others, and is rejected once it never can.

use crate::support;

use kvplane_conductor::conductor::{
    Conductor, ConductorError, InstancePart, PlacementNotice, RegisterInstance, RequestStep, RequestTerms, Schedule,
    ScheduleMode, ScheduleRefusal, ScheduleReply,
};
use kvplane_conductor::policy::{PlacementPolicy, Slo};
use support::{SECOND, asked, assigned, conductor, config, prompt, spec};

fn told(conductor: &mut Conductor) -> Vec<PlacementNotice> {
    std::iter::from_fn(|| conductor.take_told()).map(|told| told.notice).collect()
}

/// Returns a Conductor with two instances, of which `p1` is busy for long, and a request that may only be placed there
/// and waits, before others.
fn kept_from_the_free_one() -> (Conductor, u64) {
    let mut conductor = conductor(2);
    let long = |at: u64| asked(&format!("long{at}"), prompt(at, 60_000));
    let first = conductor.schedule(&long(0), 0).expect("good");
    let second = conductor.schedule(&Schedule { barred: vec![assigned(&first).prefill.to_string()], ..long(1) }, 0);
    let second = second.expect("good");
    let on_p0 = if &*assigned(&first).prefill == "p0" { &first } else { &second };
    let kept = conductor.schedule(&Schedule { barred: vec!["p0".to_owned()], ..asked("kept", prompt(9, 1)) }, 0);
    let Ok(ScheduleReply::Queued { reservation, .. }) = kept else { panic!("queued, not {kept:?}") };
    conductor.update(assigned(on_p0).reservation, RequestStep::Ended, 0).expect("booked");
    (conductor, reservation)
}

#[test]
fn excluded_request_does_not_block_others() {
    let (mut conductor, _) = kept_from_the_free_one();
    for at in 0..3 {
        let answer = conductor.schedule(&asked(&format!("r{at}"), prompt(20 + at, 100)), 0).expect("good");
        assert_eq!(&*assigned(&answer).prefill, "p0");
        conductor.update(assigned(&answer).reservation, RequestStep::Ended, 0).expect("booked");
    }
    assert_eq!(told(&mut conductor), vec![], "the request that excludes it waits");
}

#[test]
fn request_that_excludes_every_instance_is_rejected_at_once() {
    let (mut conductor, reservation) = kept_from_the_free_one();
    conductor.deregister("p1", 1, 0).expect("its own incarnation");
    let mut told = told(&mut conductor);
    told.retain(|told| &*told.request == "kept");
    assert!(
        matches!(
            told[..],
            [PlacementNotice { answer: ScheduleReply::Refused { why: ScheduleRefusal::NoInstance, .. }, .. }]
        ),
        "{told:?}"
    );
    assert!(matches!(
        conductor.update(reservation, RequestStep::Alive, 0),
        Err(ConductorError::UnknownReservation { .. })
    ));
    assert_eq!(conductor.counts().refused, 1);
}

#[test]
fn waiting_request_rejected_by_a_new_policy_is_notified() {
    let mut conductor = conductor(1);
    for at in 0..3 {
        conductor.schedule(&asked(&format!("r{at}"), prompt(at, 60_000)), 0).expect("good");
    }
    conductor.hold("p0", true, 0).expect("known");
    // This policy does not wait for an instance that takes requests.
    conductor.set_placement(PlacementPolicy::RoundRobin, false, Slo::NONE, 0);
    let told = told(&mut conductor);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told.iter().all(|told| matches!(told.answer, ScheduleReply::Refused { why: ScheduleRefusal::NoInstance, .. })),
        "{told:?}"
    );
    assert_eq!(conductor.table(0).pools[0].status.waiting, 0);
}

#[test]
fn ids_are_per_tenant_and_model() {
    let mut conductor = conductor(1);
    let same = |tenant: &str, model: &str| {
        let spec = spec(&format!("{tenant}-{model}"), InstancePart::Mixed);
        RegisterInstance { tenant: tenant.to_owned(), model: model.to_owned(), ..spec }
    };
    let of = |tenant: &str, model: &str| {
        let mut asked = asked("a", prompt(1, 10));
        (asked.context.tenant, asked.context.model) = (tenant.to_owned(), model.to_owned());
        asked
    };
    for (tenant, model) in [("", "other"), ("t", "m")] {
        conductor.register(same(tenant, model), 0).expect("room");
    }
    let mine = conductor.schedule(&of("", "m"), 0).expect("good");
    assert_eq!(&*assigned(&mine).prefill, "p0");
    let error = conductor.schedule(&of("", "other"), 0).expect_err("another model").to_string();
    assert!(error.contains("for another model"), "{error}");
    let theirs = conductor.schedule(&of("t", "m"), 0).expect("another tenant's");
    assert_eq!(&*assigned(&theirs).prefill, "t-m");
    assert_eq!(conductor.schedule(&of("t", "m"), 0).expect("again"), theirs);
    assert_eq!(
        conductor.explain("a", 0).expect("it is booked").answer,
        mine,
        "the default tenant's request comes first"
    );
    conductor.update(assigned(&mine).reservation, RequestStep::Ended, 0).expect("booked");
    assert_eq!(conductor.explain("a", 0).expect("it is booked").answer, theirs);
}

#[test]
fn tbt_objective_applies_only_with_decode_instances() {
    let mut config = config();
    (config.policy, config.refuses, config.scheduler.slo.tbt_ns) = (PlacementPolicy::Kvplane, true, 26_000_000);
    let mut conductor = Conductor::new(config, 0);
    conductor.register(spec("p0", InstancePart::Prefill), 0).expect("room");
    assert_eq!(&*assigned(&conductor.schedule(&asked("a", prompt(1, 10)), 0).expect("good")).prefill, "p0");
    conductor.register(spec("d0", InstancePart::Decode), 0).expect("room");
    let refused = conductor.schedule(&asked("b", prompt(2, 10)), 0).expect("good");
    let ScheduleReply::Refused { why: ScheduleRefusal::Tbt, retry_after_ns } = refused else {
        panic!("refused, not {refused:?}")
    };
    assert!(retry_after_ns >= SECOND, "not worth trying again at once");
}

/// One instance that prefills the requests of a Conductor one after the other, for as long as predicted.
#[derive(Default)]
struct Engine {
    /// Booked requests in order: reservation, duration.
    booked: std::collections::VecDeque<(u64, u64)>,
    /// End of the prefill in progress.
    until_ns: Option<u64>,
}

impl Engine {
    fn book(&mut self, answer: &ScheduleReply) {
        if let ScheduleReply::Assigned(assigned) = answer {
            self.booked.push_back((assigned.reservation, assigned.prefill_ns));
        }
    }

    /// Serves up to a time.
    fn run_until(&mut self, conductor: &mut Conductor, end_ns: u64, mut now_ns: u64) {
        loop {
            told(conductor).iter().for_each(|told| self.book(&told.answer));
            if let (None, Some((reservation, took_ns))) = (self.until_ns, self.booked.front()) {
                conductor.update(*reservation, RequestStep::PrefillStarted, now_ns).expect("booked");
                self.until_ns = Some(now_ns + took_ns);
            }
            let Some(done_ns) = self.until_ns.filter(|ns| *ns <= end_ns) else { break };
            now_ns = done_ns;
            self.until_ns = None;
            let (reservation, took_ns) = self.booked.pop_front().expect("it was in progress");
            let step = RequestStep::PrefillDone { reused_tokens: 0, took_ns };
            conductor.update(reservation, step, now_ns).expect("booked");
            conductor.update(reservation, RequestStep::Ended, now_ns).expect("booked");
            conductor.tick(now_ns);
        }
        conductor.tick(end_ns);
        told(conductor).iter().for_each(|told| self.book(&told.answer));
    }
}

#[test]
fn a_rejected_request_is_admitted_after_the_time_that_it_was_told() {
    let answer = |tenths: u64| {
        let mut config = config();
        (config.refuses, config.scheduler.slo.ttft_ns) = (true, 30 * SECOND);
        config.max_requests = 1_000;
        let mut conductor = Conductor::new(config, 0);
        conductor.register(RegisterInstance { report_ns: 0, ..spec("p0", InstancePart::Mixed) }, 0).expect("room");
        let mut engine = Engine::default();
        for at in 0.. {
            let blocks = 500 + 300 * (at % 5) as usize;
            match conductor.schedule(&asked(&format!("r{at}"), prompt(at, blocks)), 0).expect("good") {
                ScheduleReply::Refused { why: ScheduleRefusal::Ttft, retry_after_ns } => {
                    assert!((10_000_000..20 * SECOND).contains(&retry_after_ns), "{retry_after_ns}");
                    let now_ns = retry_after_ns * tenths / 10;
                    engine.run_until(&mut conductor, now_ns, 0);
                    return conductor.schedule(&asked("again", prompt(at, blocks)), now_ns).expect("good");
                }
                answer => engine.book(&answer),
            }
        }
        unreachable!("the queue takes no more at some time");
    };
    assert!(matches!(answer(10), ScheduleReply::Queued { .. }), "{:?}", answer(10));
    let early = answer(8);
    assert!(matches!(early, ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. }), "{early:?}");
}

#[test]
fn a_slow_instance_does_not_hide_a_fast_one() {
    let mut conductor = conductor(2);
    // The first one takes four times as long as predicted.
    for at in 0..40u64 {
        let barred = vec!["p1".to_owned()];
        let answer = conductor.schedule(&Schedule { barred, ..asked(&format!("w{at}"), prompt(at, 500)) }, 0);
        let one = assigned(&answer.expect("good")).clone();
        let step = RequestStep::PrefillDone { reused_tokens: 0, took_ns: 4 * SECOND };
        conductor.update(one.reservation, step, 0).expect("booked");
        conductor.update(one.reservation, RequestStep::Ended, 0).expect("booked");
    }
    for at in 0..40u64 {
        let barred = vec!["p0".to_owned()];
        let answer = conductor.schedule(&Schedule { barred, ..asked(&format!("v{at}"), prompt(100 + at, 500)) }, 0);
        let one = assigned(&answer.expect("good")).clone();
        let step = RequestStep::PrefillDone { reused_tokens: 0, took_ns: SECOND };
        conductor.update(one.reservation, step, 0).expect("booked");
        conductor.update(one.reservation, RequestStep::Ended, 0).expect("booked");
    }
    let terms = RequestTerms { ttft_ns: Some(2 * SECOND), ..RequestTerms::default() };
    let answer = conductor.schedule_on_terms(&asked("r", prompt(999, 500)), &terms, false, 0).expect("good");
    assert_eq!(&*assigned(&answer).prefill, "p1");
}

#[test]
fn an_admitted_request_whose_instance_is_lost_is_not_rejected() {
    let mut config = config();
    (config.refuses, config.scheduler.slo.ttft_ns) = (true, 30 * SECOND);
    let mut conductor = Conductor::new(config, 0);
    for name in ["p0", "p1"] {
        conductor.register(spec(name, InstancePart::Mixed), 0).expect("room");
    }
    let mut reservations = Vec::new();
    for at in 0.. {
        match conductor.schedule(&asked(&format!("r{at}"), prompt(at, 1_000)), 0).expect("good") {
            ScheduleReply::Assigned(assigned) => reservations.push((assigned.reservation, assigned.prefill)),
            ScheduleReply::Queued { .. } => {}
            _ => break,
        }
    }
    let (lost, _) = *reservations.iter().find(|(_, prefill)| &**prefill == "p0").expect("both are used");
    conductor.deregister("p0", 1, SECOND).expect("its own incarnation");
    let answer = conductor.reschedule(lost, &[], SECOND).expect("it was booked");
    assert!(matches!(answer, ScheduleReply::Queued { .. }), "{answer:?}");
}

/// Returns the number of requests that are admitted before the first rejection.
fn let_in(conductor: &mut Conductor) -> usize {
    let answers = (0..1_000u64).map(|at| conductor.schedule(&asked(&format!("r{at}"), prompt(at, 1_000)), 0));
    answers
        .take_while(|answer| !matches!(answer, Ok(ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. })))
        .count()
}

#[test]
fn only_accepting_instances_count_for_rejections() {
    let mut config = config();
    (config.refuses, config.scheduler.slo.ttft_ns) = (true, 30 * SECOND);
    config.max_requests = 1_000;
    let mut one = Conductor::new(config.clone(), 0);
    one.register(spec("p0", InstancePart::Mixed), 0).expect("room");
    let mut held = Conductor::new(config.clone(), 0);
    let mut all = Conductor::new(config, 0);
    for at in 0..8 {
        held.register(spec(&format!("p{at}"), InstancePart::Mixed), 0).expect("room");
        all.register(spec(&format!("p{at}"), InstancePart::Mixed), 0).expect("room");
    }
    for at in 1..8 {
        held.hold(&format!("p{at}"), true, 0).expect("known");
    }
    let (one, held, all) = (let_in(&mut one), let_in(&mut held), let_in(&mut all));
    assert_eq!(one, held);
    assert!(one > 3 && all > 6 * one, "{one}, {held}, {all}");
}

#[test]
fn longest_prompts_do_not_overflow_the_wait() {
    for policy in PlacementPolicy::ALL {
        let mut config = config();
        config.policy = policy;
        let mut conductor = Conductor::new(config, 0);
        for at in 0..2 {
            let large = RegisterInstance {
                block_tokens: 1 << 20,
                token_bytes: 1 << 30,
                ..spec(&format!("p{at}"), InstancePart::Mixed)
            };
            conductor.register(large, 0).expect("room");
        }
        for at in 0..60u64 {
            let mode = if at % 2 == 0 { ScheduleMode::Now } else { ScheduleMode::Reserve };
            let mut asked = Schedule { mode, tokens: u32::MAX, ..asked(&format!("r{at}"), prompt(at, 3)) };
            asked.context.block_tokens = 1 << 20;
            conductor.schedule(&asked, at).expect("as long as prompts may be");
        }
        conductor.tick(SECOND);
        assert!(!conductor.table(SECOND).instances.is_empty());
    }
}

/// Returns a Conductor whose two instances prefill, `p0` the prompt 1 and `p1` another one that is as long, with
/// requests for these prompts in the queue; and the reservation on `p1`.
fn computing(queued: &[(&str, u64)]) -> (Conductor, u64) {
    let mut conductor = conductor(2);
    let first = conductor.schedule(&Schedule { barred: vec!["p1".to_owned()], ..asked("x", prompt(1, 2_000)) }, 0);
    let second = conductor.schedule(&Schedule { barred: vec!["p0".to_owned()], ..asked("y", prompt(2, 2_000)) }, 0);
    for (name, seed) in queued {
        let answer = conductor.schedule(&asked(name, prompt(*seed, 2_000)), 0).expect("good");
        assert!(matches!(answer, ScheduleReply::Queued { .. }), "{answer:?}");
    }
    assigned(&first.expect("good"));
    (conductor, assigned(&second.expect("good")).reservation)
}

#[test]
fn request_whose_prefix_is_being_computed_lets_others_go_before_it() {
    // `b` has the prompt that `p0` is computing: on `p1` it would be computed twice.
    let (mut conductor, on_p1) = computing(&[("b", 1), ("c", 3), ("d", 4)]);
    conductor.update(on_p1, RequestStep::Ended, SECOND / 10).expect("booked");
    let told = told(&mut conductor);
    let [PlacementNotice { request, answer, .. }] = &told[..] else { panic!("one goes: {told:?}") };
    assert_eq!((&**request, &*assigned(answer).prefill), ("c", "p1"));
}

#[test]
fn request_alone_in_the_queue_is_computed_twice_rather_than_late() {
    // Nobody else would use the time that waiting for `p0` saves.
    let (mut conductor, on_p1) = computing(&[("b", 1)]);
    conductor.update(on_p1, RequestStep::Ended, 0).expect("booked");
    let told = told(&mut conductor);
    let [PlacementNotice { request, answer, .. }] = &told[..] else { panic!("it goes: {told:?}") };
    assert_eq!((&**request, &*assigned(answer).prefill), ("b", "p1"));
}

#[test]
fn request_that_awaited_a_prefix_goes_after_the_computing_instance_is_lost() {
    let (mut conductor, on_p1) = computing(&[("b", 1), ("c", 3), ("d", 4)]);
    conductor.update(on_p1, RequestStep::Ended, SECOND / 10).expect("booked");
    let on_p1 = assigned(&told(&mut conductor)[0].answer).reservation;
    conductor.deregister("p0", 1, SECOND).expect("known");
    // At the latest when the lost prefill would have been done.
    conductor.update(on_p1, RequestStep::Ended, 20 * SECOND).expect("booked");
    conductor.tick(20 * SECOND);
    assert!(told(&mut conductor).iter().any(|told| &*told.request == "b"), "it is not forgotten");
}
