//! Pipeline groups: registration, decisions, bookings, loss of members.

use kvplane_conductor::conductor::{
    AssignedGroup, Conductor, ConductorConfig, ConductorError, GroupAssignment, InstanceCapabilities, InstanceLoad,
    InstancePart, InstanceSpec, PipelineMembership, PlacementExplained, RegisterInstance, RequestStep, RequestTerms,
    Schedule, ScheduleMode, ScheduleRefusal, ScheduleReply, TRUSTED_AFTER,
};
use kvplane_conductor::scheduler::CapabilityError;
use kvplane_proto::rng::Rng;

use super::support::{BLOCK, SECOND, asked, config, prompt, spec};

const CHUNK: u32 = 4_096;

fn stage(stage: u32, stages: u32) -> InstanceCapabilities {
    let group = "g".to_owned();
    let stage = Some(PipelineMembership { group, stage, stages, chunk_tokens: CHUNK, activation_bytes: 0 });
    InstanceCapabilities { stage, ..InstanceCapabilities::default() }
}

fn registered(name: &str, capabilities: InstanceCapabilities) -> InstanceSpec {
    let call = RegisterInstance { report_ns: 0, ..spec(name, InstancePart::Prefill) };
    InstanceSpec { capabilities, ..call.into() }
}

/// Returns a Conductor with a group of this many stages, `s0` and so on.
fn group_of(stages: u32, config: ConductorConfig) -> Conductor {
    let mut conductor = Conductor::new(config, 0);
    for at in 0..stages {
        conductor.register(registered(&format!("s{at}"), stage(at, stages)), 0).expect("room");
    }
    conductor
}

/// Returns a prompt of this many tokens.
fn long(request: &str, seed: u64, tokens: u32) -> Schedule {
    asked(request, prompt(seed, (tokens / BLOCK) as usize))
}

fn with_groups(conductor: &mut Conductor, schedule: &Schedule, now_ns: u64) -> ScheduleReply {
    conductor.schedule_on_terms(schedule, &RequestTerms::default(), true, now_ns).expect("valid")
}

fn group(answer: ScheduleReply) -> GroupAssignment {
    match answer {
        ScheduleReply::AssignedGroup(assigned) => assigned,
        other => panic!("a group, not {other:?}"),
    }
}

/// Returns the number of prefills booked at each instance, and the sum of the times until they are done.
fn booked(conductor: &mut Conductor, now_ns: u64) -> (Vec<u32>, u64) {
    let rows = conductor.table(now_ns).instances;
    (rows.iter().map(|row| row.status.prefills).collect(), rows.iter().map(|row| row.status.wait_ns).sum())
}

#[test]
fn a_long_prompt_is_booked_at_every_stage_and_freed_everywhere() {
    let mut conductor = group_of(4, config());
    let GroupAssignment { assignment, group: AssignedGroup { name, chunk_tokens, stages } } =
        group(with_groups(&mut conductor, &long("r", 1, 65_536), 0));
    assert_eq!((&*name, chunk_tokens, &*assignment.prefill, assignment.wait_ns), ("g", CHUNK, "s3", 0));
    let names: Vec<&str> = stages.iter().map(|stage| &*stage.instance).collect();
    assert_eq!(names, ["s0", "s1", "s2", "s3"]);
    let layers: Vec<(u32, u32)> = stages.iter().map(|stage| (stage.first_layer, stage.layers)).collect();
    assert_eq!(layers, [(0, 20), (20, 20), (40, 20), (60, 20)]);
    assert!(stages.is_sorted_by_key(|stage| stage.busy_ns) && stages[3].busy_ns == assignment.prefill_ns);
    // The prefill of one instance takes 10.6 s.
    assert!(assignment.prefill_ns < 4 * SECOND, "{} ns", assignment.prefill_ns);
    let work_ns: u64 = stages.iter().map(|stage| stage.busy_ns).sum();
    assert_eq!(booked(&mut conductor, 0), (vec![1; 4], work_ns));
    conductor.update(assignment.reservation, RequestStep::PrefillStarted, SECOND).expect("booked");
    assert_eq!(booked(&mut conductor, 2 * SECOND), (vec![1; 4], work_ns - 4 * SECOND));
    // A repeated request gets the same answer, and the explanation shows the group.
    let again = group(with_groups(&mut conductor, &long("r", 1, 65_536), SECOND));
    assert_eq!(again.assignment.reservation, assignment.reservation);
    let explained = PlacementExplained::of(&mut conductor, "r", SECOND).expect("known");
    assert_eq!(explained.group, Some(again.group));
    assert!(matches!(explained.explained.answer, ScheduleReply::Assigned(last) if last.prefill == assignment.prefill));
    let step = RequestStep::PrefillDone { reused_tokens: 0, took_ns: 3 * SECOND };
    conductor.update(assignment.reservation, step, 4 * SECOND).expect("booked");
    assert_eq!(booked(&mut conductor, 4 * SECOND), (vec![0; 4], 0));
    conductor.update(assignment.reservation, RequestStep::Ended, 4 * SECOND).expect("booked");
    assert_eq!(booked(&mut conductor, 4 * SECOND), (vec![0; 4], 0));
}

#[test]
fn only_schedulers_that_drive_groups_get_one_and_only_for_long_prompts() {
    let mut conductor = group_of(4, config());
    let answer = conductor.schedule(&long("old", 1, 65_536), 0).expect("valid");
    let ScheduleReply::Assigned(old) = answer else { panic!("one instance, not {answer:?}") };
    conductor.update(old.reservation, RequestStep::Ended, 0).expect("booked");
    for (request, tokens) in [("short", 2_048), ("chunk", CHUNK)] {
        let answer = with_groups(&mut conductor, &long(request, 2, tokens), 0);
        let ScheduleReply::Assigned(one) = answer else { panic!("one instance, not {answer:?}") };
        conductor.update(one.reservation, RequestStep::Ended, 0).expect("booked");
    }
    let now = Schedule { mode: ScheduleMode::Advise, ..long("advice", 3, 65_536) };
    assert_eq!(group(with_groups(&mut conductor, &now, 0)).assignment.reservation, 0);
    assert_eq!(booked(&mut conductor, 0), (vec![0; 4], 0));
}

#[test]
fn a_group_with_a_held_suspect_or_excluded_member_gets_nothing() {
    let mut conductor = group_of(3, config());
    let single = |conductor: &mut Conductor, request: &str, barred: &[&str], now_ns| {
        let barred = barred.iter().map(|name| (*name).to_owned()).collect();
        let answer = with_groups(conductor, &Schedule { barred, ..long(request, 1, 65_536) }, now_ns);
        let ScheduleReply::Assigned(one) = answer else { panic!("one instance, not {answer:?}") };
        conductor.update(one.reservation, RequestStep::Ended, now_ns).expect("booked");
    };
    single(&mut conductor, "a", &["s1"], 0);
    conductor.hold("s2", true, 0).expect("known");
    single(&mut conductor, "b", &[], 0);
    conductor.hold("s2", false, 0).expect("known");
    let again = InstanceSpec {
        call: RegisterInstance { incarnation: 2, report_ns: SECOND, ..registered("s0", stage(0, 3)).call },
        ..registered("s0", stage(0, 3))
    };
    conductor.register(again, 0).expect("a later incarnation");
    conductor.tick(4 * SECOND);
    single(&mut conductor, "c", &[], 4 * SECOND);
    for seq in 1..=TRUSTED_AFTER.into() {
        let load = InstanceLoad { seq, ..InstanceLoad::default() };
        conductor.report("s0", 2, load, (3 + seq) * SECOND).expect("known");
    }
    let assigned = group(with_groups(&mut conductor, &long("d", 1, 65_536), 6 * SECOND));
    assert_eq!(assigned.group.stages.len(), 3);
}

#[test]
fn a_prompt_that_only_a_group_serves_in_time_is_admitted_and_placed_on_it() {
    let mut config = config();
    (config.refuses, config.scheduler.slo.ttft_ns) = (true, 20 * SECOND);
    let mut conductor = group_of(8, config);
    let prompt = |request| long(request, 1, 131_072);
    let alone = conductor.schedule(&prompt("alone"), 0).expect("valid");
    let ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. } = alone else { panic!("27 s: {alone:?}") };
    let assigned = group(with_groups(&mut conductor, &prompt("r"), 0));
    assert_eq!(assigned.group.stages.len(), 8);
}

#[test]
fn loss_of_a_member_ends_the_prefill_and_frees_the_others() {
    let mut conductor = group_of(4, config());
    let first = group(with_groups(&mut conductor, &long("r", 1, 65_536), 0)).assignment;
    conductor.update(first.reservation, RequestStep::PrefillStarted, 0).expect("booked");
    conductor.deregister("s1", 1, SECOND).expect("known");
    assert_eq!(booked(&mut conductor, SECOND), (vec![0; 3], 0));
    let notice = conductor.take_told().expect("its client is told");
    assert!(matches!(notice.notice.answer, ScheduleReply::Refused { why: ScheduleRefusal::Lost, .. }));
    let answer = conductor.reschedule(first.reservation, &["s1".to_owned()], SECOND).expect("known");
    let ScheduleReply::Assigned(alone) = answer else { panic!("one instance, not {answer:?}") };
    conductor.update(alone.reservation, RequestStep::Ended, SECOND).expect("booked");
    // The group is there again with a new instance at its stage, and a rescheduled request may get it.
    conductor.register(registered("n1", stage(1, 4)), SECOND).expect("the stage is vacant");
    let second = group(with_groups(&mut conductor, &long("t", 2, 65_536), SECOND));
    assert_eq!(&*second.group.stages[1].instance, "n1");
    let answer = conductor.reschedule(second.assignment.reservation, &[], 2 * SECOND).expect("known");
    assert!(matches!(answer, ScheduleReply::AssignedGroup(_)), "{answer:?}");
}

#[test]
fn a_group_takes_no_instance_that_a_promise_was_planned_on() {
    let mut conductor = group_of(2, ConductorConfig { lease_ns: 600 * SECOND, ..config() });
    let small: Vec<u64> = (0..2)
        .map(|at| match conductor.schedule(&asked(&format!("small{at}"), prompt(at, 10)), 0) {
            Ok(ScheduleReply::Assigned(one)) => one.reservation,
            other => panic!("both are free, not {other:?}"),
        })
        .collect();
    let now_ns = 120 * SECOND;
    // Each flow has its turn, so the short one does not count the long one before it.
    let first = RequestTerms { flow: "long".to_owned(), ..RequestTerms::default() };
    let answer = conductor.schedule_on_terms(&long("long", 3, 131_072), &first, true, now_ns).expect("valid");
    assert!(matches!(answer, ScheduleReply::Queued { .. }), "{answer:?}");
    let soon = RequestTerms { flow: "soon".to_owned(), ttft_ns: Some(8 * SECOND), ..RequestTerms::default() };
    let answer = conductor.schedule_on_terms(&long("soon", 4, 16_384), &soon, false, now_ns).expect("valid");
    assert!(matches!(answer, ScheduleReply::Queued { .. }), "it is admitted: {answer:?}");
    small.iter().for_each(|one| conductor.update(*one, RequestStep::Ended, now_ns).expect("booked"));
    let told: Vec<_> = std::iter::from_fn(|| conductor.take_told()).map(|told| told.notice).collect();
    let placed: Vec<(&str, u64)> = told
        .iter()
        .map(|notice| match &notice.answer {
            ScheduleReply::Assigned(one) => (&*notice.request, one.wait_ns + one.prefill_ns),
            other => panic!("one instance, not {other:?}"),
        })
        .collect();
    assert_eq!(placed.len(), 2, "each has an instance: {placed:?}");
    assert!(placed.iter().all(|(name, takes_ns)| *name != "soon" || *takes_ns < 8 * SECOND), "{placed:?}");
}

#[test]
fn contradicting_members_are_refused_and_change_nothing() {
    let mut conductor = group_of(2, config());
    let base = stage(1, 2);
    let of = |change: fn(&mut PipelineMembership)| {
        let mut capabilities = stage(1, 2);
        capabilities.stage.iter_mut().for_each(change);
        capabilities
    };
    let mut refused = |name: &str, capabilities: InstanceCapabilities| {
        let error = conductor.register(registered(name, capabilities), 0).expect_err("refused");
        let ConductorError::Capability(error) = error else { panic!("{error}") };
        assert!(error.to_string().len() > 20);
        error
    };
    assert!(matches!(refused("x", base.clone()), CapabilityError::StageTaken { stage: 1, .. }));
    assert!(matches!(refused("x", of(|of| of.stages = 1)), CapabilityError::Stages { stages: 1, .. }));
    assert!(matches!(refused("x", of(|of| of.stages = 17)), CapabilityError::Stages { .. }));
    assert!(matches!(refused("x", of(|of| of.stages = 3)), CapabilityError::Differs { what: "number of stages", .. }));
    assert!(matches!(refused("x", of(|of| of.stage = 2)), CapabilityError::Stage { .. }));
    assert!(matches!(refused("x", of(|of| of.chunk_tokens = 16)), CapabilityError::ChunkTokens { .. }));
    assert!(matches!(refused("x", of(|of| of.chunk_tokens = 1_001)), CapabilityError::PartialBlocks { .. }));
    let other = of(|of| of.chunk_tokens = 2_048);
    assert!(matches!(refused("x", other), CapabilityError::Differs { what: "chunk length", .. }));
    assert!(matches!(refused("x", of(|of| of.group.clear())), CapabilityError::GroupName { bytes: 0 }));
    assert!(matches!(refused("x", of(|of| of.activation_bytes = u32::MAX)), CapabilityError::ActivationBytes { .. }));
    let layers = InstanceCapabilities { layers: 1, ..base.clone() };
    assert!(matches!(refused("x", layers), CapabilityError::FewLayers { .. }));
    let layers = InstanceCapabilities { layers: 40, ..base.clone() };
    assert!(matches!(refused("x", layers), CapabilityError::Differs { what: "number of layers", .. }));
    let call = RegisterInstance { model: "other".to_owned(), ..registered("x", base.clone()).call };
    let error = conductor.register(InstanceSpec { capabilities: base.clone(), ..call.into() }, 0);
    assert!(matches!(error, Err(ConductorError::Capability(CapabilityError::Differs { .. }))), "{error:?}");
    let call = RegisterInstance { part: InstancePart::Decode, ..registered("x", base.clone()).call };
    let error = conductor.register(InstanceSpec { capabilities: base, ..call.into() }, 0);
    assert!(matches!(error, Err(ConductorError::Capability(CapabilityError::NoPrefill { .. }))), "{error:?}");
    let changed = conductor.register(registered("s0", InstanceCapabilities::default()), 0);
    assert!(matches!(changed, Err(ConductorError::Conflict { .. })), "{changed:?}");
    // A later incarnation that is refused does not remove the earlier one.
    let mut later = registered("s0", stage(1, 2));
    later.call.incarnation = 2;
    assert!(conductor.register(later, 0).is_err());
    assert_eq!(group(with_groups(&mut conductor, &long("r", 1, 65_536), 0)).group.stages.len(), 2);
}

#[test]
fn groups_survive_a_restart() {
    let mut conductor = group_of(2, config());
    let mut restored = Conductor::new(config(), 0);
    for change in conductor.take_durable() {
        if let kvplane_conductor::conductor::Durable::Instance(instance) = change {
            restored.restore(*instance, 0).expect("as before");
        }
    }
    assert_eq!(group(with_groups(&mut restored, &long("r", 1, 65_536), 0)).group.stages.len(), 2);
}

#[test]
fn bookings_return_to_zero_under_random_load() {
    let mut groups = 0;
    for seed in 0..12 {
        let mut rng = Rng::new(seed, "groups");
        let (lease_ns, claim_ns) = (30 * SECOND, 10 * SECOND);
        let mut conductor = group_of(4, ConductorConfig { lease_ns, claim_ns, wait_ns: 60 * SECOND, ..config() });
        for at in 0..2 {
            conductor.register(registered(&format!("x{at}"), InstanceCapabilities::default()), 0).expect("room");
        }
        let (mut now_ns, mut incarnation) = (0, 1);
        let mut open: Vec<u64> = Vec::new();
        for step in 0..400 {
            now_ns += rng.below(SECOND);
            match rng.below(8) {
                0..=2 => {
                    let most = if rng.chance(0.3) { 6_000 } else { 200 };
                    let tokens = BLOCK * (1 + rng.below(most) as u32);
                    let mode = if rng.chance(0.3) { ScheduleMode::Now } else { ScheduleMode::Reserve };
                    let schedule = Schedule { mode, ..long(&format!("r{step}"), rng.below(5), tokens) };
                    match with_groups(&mut conductor, &schedule, now_ns) {
                        ScheduleReply::Assigned(one) => open.push(one.reservation),
                        ScheduleReply::AssignedGroup(many) => {
                            groups += 1;
                            open.push(many.assignment.reservation);
                        }
                        ScheduleReply::Queued { reservation, .. } => open.push(reservation),
                        ScheduleReply::Refused { .. } => {}
                    }
                }
                3..=5 if !open.is_empty() => {
                    let at = rng.below(open.len() as u64) as usize;
                    let step = match rng.below(4) {
                        0 => RequestStep::PrefillStarted,
                        1 => RequestStep::PrefillDone { reused_tokens: 0, took_ns: SECOND },
                        2 => RequestStep::Alive,
                        _ => RequestStep::Ended,
                    };
                    // A request that waits, or is gone, refuses progress.
                    let _ = conductor.update(open[at], step, now_ns);
                    if step == RequestStep::Ended {
                        open.swap_remove(at);
                    }
                }
                6 if !open.is_empty() => {
                    let at = rng.below(open.len() as u64) as usize;
                    let _ = conductor.reschedule(open[at], &[], now_ns);
                }
                _ => {
                    incarnation += 1;
                    let at = rng.below(4) as u32;
                    let mut later = registered(&format!("s{at}"), stage(at, 4));
                    later.call.incarnation = incarnation;
                    if rng.chance(0.5) {
                        conductor.register(later, now_ns).expect("a later incarnation");
                    } else {
                        conductor.hold(&format!("s{at}"), rng.chance(0.4), now_ns).expect("known");
                    }
                }
            }
            conductor.tick(now_ns);
        }
        // Half of the rest ends, the other half's leases expire.
        for reservation in open.iter().step_by(2) {
            let _ = conductor.update(*reservation, RequestStep::Ended, now_ns);
        }
        for _ in 0..100 {
            now_ns += 5 * SECOND;
            conductor.tick(now_ns);
        }
        let (prefills, wait_ns) = booked(&mut conductor, now_ns);
        assert_eq!((prefills.iter().sum::<u32>(), wait_ns), (0, 0), "seed {seed}");
        let idle = conductor.explain("r0", now_ns);
        assert!(idle.is_err(), "seed {seed}: nothing is open");
    }
    assert!(groups > 10, "{groups} prompts by groups");
}
