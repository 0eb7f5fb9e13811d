//! The central queue: one that cannot go keeps nobody from going, and is told when it never will.

use crate::support;

use kvplane_conductor::desk::{
    Answer, ClientNotice, Desk, DeskError, InstanceSpec, Mode, Part, ScheduleRequest, Step, Why,
};
use kvplane_conductor::policy::{PolicyName, Slo};
use support::{SECOND, asked, assigned, config, desk, prompt, spec};

fn told(desk: &mut Desk) -> Vec<ClientNotice> {
    std::iter::from_fn(|| desk.take_told()).collect()
}

/// Two instances of which `p1` is busy for long, and a request that may only go there and waits, before others.
fn kept_from_the_free_one() -> (Desk, u64) {
    let mut desk = desk(2);
    let long = |at: u64| asked(&format!("long{at}"), prompt(at, 60_000));
    let first = desk.schedule(&long(0), 0).expect("good");
    let second = desk.schedule(&ScheduleRequest { barred: vec![assigned(&first).prefill.to_string()], ..long(1) }, 0);
    let second = second.expect("good");
    let on_p0 = if &*assigned(&first).prefill == "p0" { &first } else { &second };
    let kept = desk.schedule(&ScheduleRequest { barred: vec!["p0".to_owned()], ..asked("kept", prompt(9, 1)) }, 0);
    let Ok(Answer::Queued { reservation, .. }) = kept else { panic!("queued, not {kept:?}") };
    desk.update(assigned(on_p0).reservation, Step::Ended, 0).expect("booked");
    (desk, reservation)
}

#[test]
fn who_is_kept_from_the_free_instance_keeps_nobody_from_it() {
    let (mut desk, _) = kept_from_the_free_one();
    for at in 0..3 {
        let answer = desk.schedule(&asked(&format!("r{at}"), prompt(20 + at, 100)), 0).expect("good");
        assert_eq!(&*assigned(&answer).prefill, "p0");
        desk.update(assigned(&answer).reservation, Step::Ended, 0).expect("booked");
    }
    assert_eq!(told(&mut desk), vec![], "the one that may not go there waits");
}

#[test]
fn who_is_kept_from_all_that_are_left_is_told_so_at_once() {
    let (mut desk, reservation) = kept_from_the_free_one();
    desk.deregister("p1", 1, 0).expect("its own incarnation");
    let mut told = told(&mut desk);
    told.retain(|told| &*told.request == "kept");
    assert!(
        matches!(told[..], [ClientNotice { answer: Answer::Refused { why: Why::NoInstance, .. }, .. }]),
        "{told:?}"
    );
    assert!(matches!(desk.update(reservation, Step::Alive, 0), Err(DeskError::UnknownReservation { .. })));
    assert_eq!(desk.counts.refused, 1);
}

#[test]
fn whom_another_policy_refuses_while_it_waits_is_told_so() {
    let mut desk = desk(1);
    for at in 0..3 {
        desk.schedule(&asked(&format!("r{at}"), prompt(at, 60_000)), 0).expect("good");
    }
    desk.set_placement(PolicyName::Algorithm1, true, Slo { ttft_ns: SECOND, tbt_ns: u64::MAX }, 0);
    let told = told(&mut desk);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|told| matches!(told.answer, Answer::Refused { why: Why::Ttft, .. })), "{told:?}");
    assert_eq!(desk.table(0).pools[0].waiting, 0);
}

#[test]
fn an_id_is_one_tenants_and_one_models() {
    let mut desk = desk(1);
    let same = |tenant: &str, model: &str| {
        let spec = spec(&format!("{tenant}-{model}"), Part::Mixed);
        InstanceSpec { tenant: tenant.to_owned(), model: model.to_owned(), ..spec }
    };
    let of = |tenant: &str, model: &str| {
        let mut asked = asked("a", prompt(1, 10));
        (asked.context.tenant, asked.context.model) = (tenant.to_owned(), model.to_owned());
        asked
    };
    for (tenant, model) in [("", "other"), ("t", "m")] {
        desk.register(same(tenant, model), 0).expect("room");
    }
    let mine = desk.schedule(&of("", "m"), 0).expect("good");
    assert_eq!(&*assigned(&mine).prefill, "p0");
    let error = desk.schedule(&of("", "other"), 0).expect_err("another model").to_string();
    assert!(error.contains("for another model"), "{error}");
    let theirs = desk.schedule(&of("t", "m"), 0).expect("another tenant's");
    assert_eq!(&*assigned(&theirs).prefill, "t-m");
    assert_eq!(desk.schedule(&of("t", "m"), 0).expect("again"), theirs);
    assert_eq!(desk.explain("a", 0).expect("under way").answer, mine, "the default tenant's comes first");
    desk.update(assigned(&mine).reservation, Step::Ended, 0).expect("booked");
    assert_eq!(desk.explain("a", 0).expect("under way").answer, theirs);
}

#[test]
fn a_promised_pace_of_tokens_binds_only_where_somebody_decodes() {
    let mut config = config();
    (config.policy, config.refuses, config.books.slo.tbt_ns) = (PolicyName::Algorithm1, true, 26_000_000);
    let mut desk = Desk::new(config, 0);
    desk.register(spec("p0", Part::Prefill), 0).expect("room");
    assert_eq!(&*assigned(&desk.schedule(&asked("a", prompt(1, 10)), 0).expect("good")).prefill, "p0");
    desk.register(spec("d0", Part::Decode), 0).expect("room");
    let refused = desk.schedule(&asked("b", prompt(2, 10)), 0).expect("good");
    let Answer::Refused { why: Why::Tbt, retry_after_ns } = refused else { panic!("refused, not {refused:?}") };
    assert!(retry_after_ns >= SECOND, "not worth trying again at once");
}

/// How many are let in before the first is refused.
fn let_in(desk: &mut Desk) -> usize {
    let answers = (0..1_000u64).map(|at| desk.schedule(&asked(&format!("r{at}"), prompt(at, 1_000)), 0));
    answers.take_while(|answer| !matches!(answer, Ok(Answer::Refused { why: Why::Ttft, .. }))).count()
}

#[test]
fn only_instances_that_take_requests_count_when_some_are_refused() {
    let mut config = config();
    (config.refuses, config.books.slo.ttft_ns) = (true, 30 * SECOND);
    config.max_requests = 1_000;
    let mut one = Desk::new(config.clone(), 0);
    one.register(spec("p0", Part::Mixed), 0).expect("room");
    let mut held = Desk::new(config.clone(), 0);
    let mut all = Desk::new(config, 0);
    for at in 0..8 {
        held.register(spec(&format!("p{at}"), Part::Mixed), 0).expect("room");
        all.register(spec(&format!("p{at}"), Part::Mixed), 0).expect("room");
    }
    for at in 1..8 {
        held.hold(&format!("p{at}"), true, 0).expect("known");
    }
    let (one, held, all) = (let_in(&mut one), let_in(&mut held), let_in(&mut all));
    assert_eq!(one, held);
    assert!(one > 3 && all > 6 * one, "{one}, {held}, {all}");
}

#[test]
fn the_longest_prompts_add_up_to_no_more_than_a_very_long_time() {
    for policy in PolicyName::ALL {
        let mut config = config();
        config.policy = policy;
        let mut desk = Desk::new(config, 0);
        for at in 0..2 {
            let large =
                InstanceSpec { block_tokens: 1 << 20, token_bytes: 1 << 30, ..spec(&format!("p{at}"), Part::Mixed) };
            desk.register(large, 0).expect("room");
        }
        for at in 0..60u64 {
            let mode = if at % 2 == 0 { Mode::Now } else { Mode::Reserve };
            let mut asked = ScheduleRequest { mode, tokens: u32::MAX, ..asked(&format!("r{at}"), prompt(at, 3)) };
            asked.context.block_tokens = 1 << 20;
            desk.schedule(&asked, at).expect("as long as prompts may be");
        }
        desk.tick(SECOND);
        assert!(!desk.table(SECOND).instances.is_empty());
    }
}
