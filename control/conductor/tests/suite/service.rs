//! Terms of requests: classes, priorities, flows and objectives of their own, and reservations that end with a call.

use crate::support;

use kvplane_conductor::conductor::{
    ClassTerms, Conductor, ConductorError, InstancePart, MOST_ENDED, RequestStep, RequestTerms, Schedule, ScheduleMode,
    ScheduleOnTerms, ScheduleRefusal, ScheduleReply,
};
use kvplane_conductor::policy::{PlacementPolicy, Slo};
use support::{SECOND, asked, assigned, conductor, prompt, spec};

fn on(schedule: Schedule, terms: RequestTerms) -> ScheduleOnTerms {
    ScheduleOnTerms { schedule, terms, ended: Vec::new(), finished: Vec::new() }
}

fn send(conductor: &mut Conductor, call: &ScheduleOnTerms) -> Result<ScheduleReply, ConductorError> {
    conductor.end_all(&call.ended, &call.finished, 0)?;
    conductor.schedule_on_terms(&call.schedule, &call.terms, false, 0)
}

fn of_flow(request: &str, seed: u64, flow: &str) -> ScheduleOnTerms {
    on(asked(request, prompt(seed, 500)), RequestTerms { flow: flow.to_owned(), ..RequestTerms::default() })
}

/// Serves the only instance's requests, one after the other; returns the ids of those that had waited, in the order in
/// which they were placed.
fn served(conductor: &mut Conductor, first: u64) -> Vec<String> {
    let (mut order, mut reservation) = (Vec::new(), first);
    loop {
        conductor.update(reservation, RequestStep::Ended, 0).expect("booked");
        let Some(told) = conductor.take_told() else { return order };
        order.push(told.notice.request.to_string());
        reservation = assigned(&told.notice.answer).reservation;
    }
}

#[test]
fn a_flood_of_one_flow_takes_turns_with_others() {
    let mut conductor = conductor(1);
    let first = send(&mut conductor, &of_flow("first", 0, "")).expect("good");
    for at in 0..4 {
        send(&mut conductor, &of_flow(&format!("flood{at}"), 10 + at, "flood")).expect("good");
    }
    for at in 0..2 {
        send(&mut conductor, &of_flow(&format!("other{at}"), 20 + at, "other")).expect("good");
    }
    let order = served(&mut conductor, assigned(&first).reservation);
    assert_eq!(order, ["flood0", "other0", "flood1", "other1", "flood2", "flood3"]);
}

#[test]
fn weights_are_proportions_also_of_instances_that_come_later() {
    let mut conductor = conductor(1);
    conductor.service().set_weight("", "heavy", Some(200)).expect("valid");
    conductor.deregister("p0", 1, 0).expect("registered");
    conductor.deregister("d0", 1, 0).expect("registered");
    conductor.register(spec("p1", InstancePart::Prefill), 0).expect("room");
    let first = send(&mut conductor, &of_flow("first", 0, "")).expect("good");
    for at in 0..4 {
        send(&mut conductor, &of_flow(&format!("h{at}"), 10 + at, "heavy")).expect("good");
        send(&mut conductor, &of_flow(&format!("l{at}"), 20 + at, "light")).expect("good");
    }
    let order = served(&mut conductor, assigned(&first).reservation);
    assert_eq!(order, ["h0", "l0", "h1", "h2", "l1", "h3", "l2", "l3"]);
    // A weight that is set while requests wait counts from then on.
    let first = send(&mut conductor, &of_flow("again", 0, "")).expect("good");
    conductor.service().set_weight("", "heavy", None).expect("valid");
    for at in 0..2 {
        send(&mut conductor, &of_flow(&format!("h{at}"), 30 + at, "heavy")).expect("good");
        send(&mut conductor, &of_flow(&format!("l{at}"), 40 + at, "light")).expect("good");
    }
    let order = served(&mut conductor, assigned(&first).reservation);
    assert_eq!(order, ["h0", "l0", "h1", "l1"]);
}

#[test]
fn the_class_of_a_request_sets_its_priority_and_objective() {
    let mut conductor = conductor(1);
    conductor.service().set_class("chat", Some(ClassTerms { priority: 1, ttft_ns: None })).expect("valid");
    conductor.service().set_class("brief", Some(ClassTerms { priority: 0, ttft_ns: Some(1) })).expect("valid");
    let class = |class: &str| RequestTerms { class: class.to_owned(), ..RequestTerms::default() };
    let first = send(&mut conductor, &of_flow("first", 0, "")).expect("good");
    conductor.schedule(&asked("plain", prompt(1, 100)), 0).expect("good");
    send(&mut conductor, &on(asked("chat", prompt(2, 500)), class("chat"))).expect("good");
    let refused = send(&mut conductor, &on(asked("brief", prompt(3, 500)), class("brief"))).expect("good");
    assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. }), "{refused:?}");
    let unknown = send(&mut conductor, &on(asked("none", prompt(4, 500)), class("none")));
    assert_eq!(unknown, Err(ConductorError::UnknownClass { name: "none".to_owned() }));
    assert_eq!(served(&mut conductor, assigned(&first).reservation), ["chat", "plain"]);
}

#[test]
fn an_objective_of_a_request_is_kept_or_the_request_is_refused() {
    let mut conductor = conductor(1);
    let within = |ttft_ns| RequestTerms { ttft_ns: Some(ttft_ns), ..RequestTerms::default() };
    // In the past; and too short for any prefill.
    for ttft_ns in [0, 1] {
        let call = on(asked("late", prompt(1, 500)), within(ttft_ns));
        let refused = send(&mut conductor, &call).expect("good");
        assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. }), "{refused:?}");
    }
    let call = on(asked("in time", prompt(2, 500)), within(100 * SECOND));
    assert!(matches!(send(&mut conductor, &call), Ok(ScheduleReply::Assigned(_))));
    let call = on(asked("behind it", prompt(3, 500)), within(SECOND / 100));
    assert!(matches!(send(&mut conductor, &call), Ok(ScheduleReply::Refused { .. })));
    // A policy that keeps no objectives refuses the call, and loses nothing.
    conductor.set_placement(PlacementPolicy::RoundRobin, false, Slo::NONE, 0);
    let call = on(asked("plain", prompt(4, 500)), within(100 * SECOND));
    assert!(matches!(send(&mut conductor, &call), Err(ConductorError::Bad { .. })));
    let call = on(asked("plain", prompt(4, 500)), RequestTerms::default());
    assert!(matches!(send(&mut conductor, &call), Ok(ScheduleReply::Assigned(_))));
}

#[test]
fn a_flood_has_its_own_requests_refused_and_not_those_of_others() {
    let mut conductor = conductor(1);
    send(&mut conductor, &of_flow("first", 0, "")).expect("good");
    for at in 0..40 {
        send(&mut conductor, &of_flow(&format!("flood{at}"), 10 + at, "flood")).expect("good");
    }
    let terms =
        |flow: &str| RequestTerms { flow: flow.to_owned(), ttft_ns: Some(5 * SECOND), ..RequestTerms::default() };
    let mut ask = |request: &str, flow: &str| send(&mut conductor, &on(asked(request, prompt(90, 500)), terms(flow)));
    let refused = ask("more", "flood").expect("good");
    let ScheduleReply::Refused { why: ScheduleRefusal::Ttft, retry_after_ns } = refused else { panic!("{refused:?}") };
    assert!(retry_after_ns > 5 * SECOND, "the flood is ahead of it: {retry_after_ns} ns");
    let queued = ask("other", "other").expect("good");
    let ScheduleReply::Queued { position, eta_ns, .. } = queued else { panic!("{queued:?}") };
    assert!(position <= 1 && eta_ns < 2 * SECOND, "position {position}, {eta_ns} ns");
}

#[test]
fn reservations_end_with_the_next_request() {
    let mut conductor = conductor(1);
    let first = conductor.schedule(&asked("first", prompt(1, 60_000)), 0).expect("good");
    let reservation = assigned(&first).reservation;
    let call =
        |request: &str, ended| ScheduleOnTerms { ended, ..on(asked(request, prompt(2, 500)), RequestTerms::default()) };
    assert!(matches!(send(&mut conductor, &call("queued", vec![])), Ok(ScheduleReply::Queued { .. })));
    // Of those that are gone already nothing is said.
    let answer = send(&mut conductor, &call("second", vec![77, reservation, reservation])).expect("good");
    assert!(matches!(answer, ScheduleReply::Queued { .. }), "the queued one goes first: {answer:?}");
    assert_eq!(conductor.take_told().map(|told| told.notice.request.to_string()).as_deref(), Some("queued"));
    let gone = conductor.update(reservation, RequestStep::Alive, 0);
    assert_eq!(gone, Err(ConductorError::UnknownReservation { reservation }));
    // They end also if the request is refused.
    let advised = Schedule { mode: ScheduleMode::Advise, tokens: 0, ..asked("bad", prompt(3, 1)) };
    conductor.explain("second", 0).expect("it waits");
    let ended = vec![match answer {
        ScheduleReply::Queued { reservation, .. } => reservation,
        _ => unreachable!(),
    }];
    let refused = send(&mut conductor, &ScheduleOnTerms { ended, ..on(advised, RequestTerms::default()) });
    assert!(matches!(refused, Err(ConductorError::Bad { .. })));
    assert!(matches!(conductor.explain("second", 0), Err(ConductorError::UnknownRequest { .. })));
    let many = call("many", vec![1; MOST_ENDED + 1]);
    assert!(matches!(send(&mut conductor, &many), Err(ConductorError::Bad { .. })));
}

#[test]
fn an_expected_output_is_room_on_the_decode_instance() {
    let mut conductor = conductor(1);
    let spare =
        kvplane_conductor::conductor::RegisterInstance { capacity_tokens: 400_000, ..spec("d1", InstancePart::Decode) };
    conductor.register(spare, 0).expect("room");
    let now = |request: &str, seed, output_tokens| {
        let schedule = Schedule { mode: ScheduleMode::Now, ..asked(request, prompt(seed, 500)) };
        on(schedule, RequestTerms { output_tokens, ..RequestTerms::default() })
    };
    let decode = |answer: ScheduleReply| assigned(&answer).decode.as_deref().map(str::to_owned);
    let first = send(&mut conductor, &now("first", 1, 0)).expect("good");
    assert_eq!(decode(first).as_deref(), Some("d0"));
    // The other instance has fewer tokens, but no room for this output.
    let second = send(&mut conductor, &now("second", 2, 395_000)).expect("good");
    assert_eq!(decode(second).as_deref(), Some("d0"));
    let third = send(&mut conductor, &now("third", 3, 10)).expect("good");
    assert_eq!(decode(third).as_deref(), Some("d1"));
}
