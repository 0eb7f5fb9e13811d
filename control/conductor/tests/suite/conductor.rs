//! Tests of the Conductor: retried ids, incarnations, silence, gaps, false reports, overload; and at random that no
//! state is leaked.

use crate::support;

use kvplane_conductor::conductor::{
    BlockChange, CacheBatch, CacheReport, CacheWanted, Conductor, ConductorError, InstanceLoad, InstancePart, Limit,
    LimitUse, MAX_PROMPT_BLOCKS, QueryPrompt, RegisterInstance, RequestStep, Schedule, ScheduleMode, ScheduleRefusal,
    ScheduleReply,
};
use kvplane_conductor::cost::DecodeSteps;
use kvplane_conductor::index::{BlockTier, PromptContext, Tiers};
use kvplane_conductor::policy::{PlacementPolicy, Slo};
use proptest::prelude::*;
use support::{BLOCK, SECOND, asked, assigned, batch, conductor, config, context, prompt, spec, stored};

#[test]
fn holder_of_the_prefix_is_chosen_and_a_repeated_id_gets_the_same_answer() {
    let mut conductor = conductor(4);
    let long = prompt(1, 4_000);
    conductor.cache("p2", 1, batch(0, vec![stored(long.clone())]), 0).expect("known");
    let held = conductor.query(&context(), QueryPrompt::Hashes(&long), 4, Tiers::SAID).expect("served");
    assert_eq!((&*held.holders[0].instance, held.holders[0].dram_tokens), ("p2", 64_000));
    let first = conductor.schedule(&asked("a", long.clone()), 0).expect("good");
    let placed = assigned(&first).clone();
    assert_eq!((&*placed.prefill, placed.decode.as_deref(), placed.reuse_tokens), ("p2", Some("d0"), 64_000));
    assert_eq!(conductor.schedule(&asked("a", long.clone()), SECOND).expect("again"), first);
    assert_eq!(conductor.counts().repeated, 1);
    let other = conductor.schedule(&asked("a", prompt(2, 4_000)), SECOND);
    assert!(matches!(other, Err(ConductorError::Conflict { .. })), "{other:?}");
    let explained = conductor.explain("a", SECOND).expect("it is booked");
    assert_eq!(explained.candidates.len(), 4);
    conductor.update(placed.reservation, RequestStep::Ended, SECOND).expect("booked");
    assert!(matches!(
        conductor.update(placed.reservation, RequestStep::Ended, 2),
        Err(ConductorError::UnknownReservation { .. })
    ));
    assert!(conductor.table(SECOND).instances.iter().all(|row| row.status.prefills == 0 && row.status.decodes == 0));
}

#[test]
fn waiting_clients_are_notified_until_they_answer() {
    let mut conductor = conductor(1);
    let mut answers = Vec::new();
    for at in 0..6 {
        answers.push(conductor.schedule(&asked(&format!("r{at}"), prompt(at, 2_000)), 0).expect("good"));
    }
    assert!(matches!(answers[0], ScheduleReply::Assigned(_)));
    assert!(matches!(
        answers[5],
        ScheduleReply::Queued { position: 4, .. } | ScheduleReply::Queued { position: 3, .. }
    ));
    let first = assigned(&answers[0]).reservation;
    conductor.update(first, RequestStep::PrefillStarted, 0).expect("booked");
    conductor.update(first, RequestStep::PrefillDone { reused_tokens: 0, took_ns: SECOND }, SECOND).expect("booked");
    let told = conductor.take_told().expect("another one starts");
    assert_eq!(conductor.unclaimed(1).len(), 1);
    let again = conductor
        .schedule(&asked(&told.notice.request, prompt(told.notice.request[1..].parse().unwrap(), 2_000)), SECOND);
    assert_eq!(again.expect("good"), told.notice.answer);
    conductor.update(assigned(&told.notice.answer).reservation, RequestStep::Alive, SECOND).expect("booked");
    assert_eq!(conductor.unclaimed(1), vec![]);
}

#[test]
fn reservation_without_updates_expires() {
    let mut conductor = conductor(1);
    let answer = conductor.schedule(&asked("a", prompt(1, 10)), 0).expect("good");
    let lease_ns = assigned(&answer).lease_ns;
    assert!(conductor.soon_ns(0).is_some_and(|soon_ns| soon_ns <= lease_ns));
    conductor.report("p0", 1, InstanceLoad { seq: 1, ..InstanceLoad::default() }, lease_ns).expect("known");
    conductor.report("d0", 1, InstanceLoad { seq: 1, ..InstanceLoad::default() }, lease_ns).expect("known");
    conductor.tick(lease_ns);
    assert_eq!(conductor.counts().expired, 1);
    assert_eq!(conductor.table(lease_ns).instances.iter().map(|row| row.status.prefills).sum::<u32>(), 0);
    let mut waiting = asked("b", prompt(2, 60_000));
    waiting.wait_ns = SECOND;
    conductor.schedule(&asked("c", prompt(3, 60_000)), lease_ns).expect("good");
    assert!(matches!(conductor.schedule(&waiting, lease_ns).expect("good"), ScheduleReply::Queued { .. }));
    conductor.tick(lease_ns + SECOND);
    let told = conductor.take_told().expect("it waited long enough");
    assert!(matches!(told.notice.answer, ScheduleReply::Refused { why: ScheduleRefusal::Waited, .. }));
}

#[test]
fn silent_instance_is_excluded_then_lost_and_its_requests_can_be_rescheduled() {
    let mut conductor = conductor(2);
    let report = |conductor: &mut Conductor, name: &str, seq, now_ns| {
        conductor.report(name, 1, InstanceLoad { seq, ..InstanceLoad::default() }, now_ns).expect("known");
    };
    let answer = conductor.schedule(&asked("a", prompt(1, 100)), 0).expect("good");
    let (silent, reservation) = (assigned(&answer).prefill.to_string(), assigned(&answer).reservation);
    let other = if silent == "p0" { "p1" } else { "p0" };
    for at in 1..=11 {
        report(&mut conductor, other, at, at * SECOND);
        report(&mut conductor, "d0", at, at * SECOND);
        conductor.tick(at * SECOND);
        let rows = conductor.table(at * SECOND).instances;
        let row = rows.iter().find(|row| *row.status.instance == *silent);
        assert_eq!(row.map(|row| row.suspect), (at < 10).then_some(at >= 3), "second {at}");
    }
    assert!(matches!(
        conductor.take_told().map(|told| told.notice.answer),
        Some(ScheduleReply::Refused { why: ScheduleRefusal::Lost, .. })
    ));
    let error = conductor.update(reservation, RequestStep::Alive, 11 * SECOND).expect_err("its instance is gone");
    assert!(error.to_string().contains("rescheduled"), "{error}");
    let elsewhere = conductor.reschedule(reservation, &[silent], 11 * SECOND).expect("known");
    assert_eq!(assigned(&elsewhere).prefill.as_ref(), other);
    assert_eq!(assigned(&elsewhere).reservation, reservation);
    // A late report only proves that the instance lives.
    report(&mut conductor, other, 3, 12 * SECOND);
    assert_eq!(conductor.counts().stale_reports, 1);
}

#[test]
fn an_instance_is_trusted_at_its_first_report_if_its_whole_pool_is_suspect() {
    let mut conductor = conductor(2);
    conductor.tick(4 * SECOND);
    assert!(conductor.table(4 * SECOND).instances.iter().all(|row| row.suspect));
    conductor.report("p1", 1, InstanceLoad { seq: 1, ..InstanceLoad::default() }, 4 * SECOND).expect("known");
    let rows = conductor.table(4 * SECOND).instances;
    assert!(rows.iter().all(|row| row.suspect == (*row.status.instance != *"p1")));
}

#[test]
fn suspect_instance_is_trusted_again_after_reports_in_a_row() {
    let mut conductor = conductor(1);
    let steady = RegisterInstance { report_ns: 0, ..spec("steady", InstancePart::Prefill) };
    conductor.register(steady, 0).expect("room");
    let mut seq = 0;
    let mut suspect_after = |conductor: &mut Conductor, reports_ns: &[u64]| {
        for at_ns in reports_ns {
            seq += 1;
            conductor.tick(*at_ns);
            let load = InstanceLoad { seq, ..InstanceLoad::default() };
            conductor.report("p0", 1, load, *at_ns).expect("known");
        }
        let rows = conductor.table(*reports_ns.last().unwrap_or(&0)).instances;
        rows.iter().any(|row| *row.status.instance == *"p0" && row.suspect)
    };
    let tenths = |at: &[u64]| at.iter().map(|at| at * SECOND / 10).collect::<Vec<u64>>();
    assert!(!suspect_after(&mut conductor, &tenths(&[10, 20])));
    // Three are missed. Two in a row are too few, and so is a burst of delayed ones.
    assert!(suspect_after(&mut conductor, &tenths(&[55, 65])));
    assert!(suspect_after(&mut conductor, &tenths(&[66, 67, 68])));
    // Three are missed again: they count anew.
    assert!(suspect_after(&mut conductor, &tenths(&[100, 110])));
    assert!(!suspect_after(&mut conductor, &tenths(&[120])));
    // An instance whose every third report is lost is never suspect, and one that reports in turns of four seconds
    // stays suspect.
    assert!(!suspect_after(&mut conductor, &tenths(&[130, 150, 160, 180, 190])));
    assert!(suspect_after(&mut conductor, &tenths(&[230, 270, 310, 350])));
    let changes = conductor.instances().version();
    assert!(suspect_after(&mut conductor, &tenths(&[390, 430])));
    assert_eq!(conductor.instances().version(), changes, "it does not flap");
}

#[test]
fn held_instance_gets_no_requests_until_released_or_restarted() {
    let mut conductor = conductor(2);
    let takes = |conductor: &mut Conductor, at: u64| {
        let answer = conductor.schedule(&asked(&format!("r{at}"), prompt(at, 10)), 0).expect("good");
        let place = assigned(&answer).clone();
        conductor.update(place.reservation, RequestStep::Ended, 0).expect("booked");
        place.prefill.to_string()
    };
    let busy = conductor.schedule(&asked("busy", prompt(90, 100)), 0).expect("good");
    let held = assigned(&busy).prefill.to_string();
    let version = conductor.instances().version();
    // Its requests continue.
    assert_eq!(conductor.hold(&held, true, 0).expect("known"), 1);
    assert_ne!(conductor.instances().version(), version, "the version of the registry changes");
    assert!((0..20).all(|at| takes(&mut conductor, at) != held));
    // Neither a report nor a repeated registration changes that.
    conductor.report(&held, 1, InstanceLoad { seq: 1, ..InstanceLoad::default() }, 0).expect("known");
    conductor.register(spec(&held, InstancePart::Prefill), 0).expect("a repeated registration");
    assert!((20..40).all(|at| takes(&mut conductor, at) != held));
    assert!(
        conductor
            .table(0)
            .instances
            .iter()
            .any(|row| *row.status.instance == *held && row.held && row.status.prefills == 1)
    );
    conductor.update(assigned(&busy).reservation, RequestStep::Ended, 0).expect("booked");
    assert_eq!(conductor.hold(&held, false, 0).expect("known"), 0);
    let other = if held == "p0" { "p1" } else { "p0" };
    conductor.hold(other, true, 0).expect("known");
    assert!((40..60).all(|at| takes(&mut conductor, at) == held));
    let answer = conductor.schedule(&asked("later", prompt(91, 10)), 0).expect("good");
    conductor.update(assigned(&answer).reservation, RequestStep::Ended, 0).expect("booked");
    // A new incarnation is not held.
    conductor
        .register(RegisterInstance { incarnation: 2, ..spec(other, InstancePart::Prefill) }, 0)
        .expect("a later incarnation");
    assert!(conductor.table(0).instances.iter().all(|row| !row.held));
    assert!(matches!(conductor.hold("nobody", true, 0), Err(ConductorError::UnknownInstance { .. })));
}

#[test]
fn new_policy_applies_at_once_and_to_waiting_requests() {
    let mut conductor = conductor(1);
    let (first, second) = (asked("a", prompt(1, 60_000)), asked("b", prompt(2, 60_000)));
    conductor.schedule(&first, 0).expect("good");
    conductor.schedule(&second, 0).expect("good");
    let third = conductor.schedule(&asked("c", prompt(3, 60_000)), 0).expect("good");
    assert!(matches!(third, ScheduleReply::Queued { .. }), "{third:?}");
    // The policy has no queue: the waiting request is placed, behind the others.
    conductor.set_placement(PlacementPolicy::RoundRobin, false, Slo::NONE, 0);
    let told: Vec<String> =
        std::iter::from_fn(|| conductor.take_told()).map(|told| told.notice.request.to_string()).collect();
    assert!(told.contains(&"c".to_owned()), "{told:?}");
    let fourth = conductor.schedule(&asked("d", prompt(4, 60_000)), 0).expect("good");
    assert!(matches!(fourth, ScheduleReply::Assigned(_)), "{fourth:?}");
    let slo = Slo { ttft_ns: 1, ..Slo::NONE };
    conductor.set_placement(PlacementPolicy::Kvplane, true, slo, 0);
    assert_eq!(conductor.placement(), (PlacementPolicy::Kvplane, true, slo));
    let refused = conductor.schedule(&asked("e", prompt(5, 60_000)), 0).expect("good");
    assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. }), "{refused:?}");
}

#[test]
fn incarnations_and_bodies_are_compared() {
    let mut conductor = conductor(1);
    assert!(!conductor.register(spec("p0", InstancePart::Mixed), 0).is_ok_and(|registered| registered.answer.fresh));
    let changed = RegisterInstance { capacity_tokens: 5, ..spec("p0", InstancePart::Prefill) };
    assert!(matches!(conductor.register(changed, 0), Err(ConductorError::Conflict { .. })));
    let later = RegisterInstance { incarnation: 2, ..spec("p0", InstancePart::Prefill) };
    assert!(conductor.register(later, 0).expect("a later incarnation").answer.fresh);
    assert!(matches!(
        conductor.register(spec("p0", InstancePart::Prefill), 0),
        Err(ConductorError::StaleIncarnation { incarnation: 2, .. })
    ));
    assert!(matches!(
        conductor.report("p0", 1, InstanceLoad::default(), 0),
        Err(ConductorError::StaleIncarnation { .. })
    ));
    assert!(matches!(conductor.deregister("p0", 1, 0), Err(ConductorError::StaleIncarnation { .. })));
    assert!(conductor.deregister("p0", 2, 0).expect("its own incarnation"));
    assert!(!conductor.deregister("p0", 2, 0).expect("already removed"));
    // Bytes per token must be equal for all instances of a model.
    let odd = RegisterInstance { token_bytes: 5, ..spec("p9", InstancePart::Prefill) };
    assert!(matches!(conductor.register(odd, 0), Err(ConductorError::Conflict { .. })));
}

#[test]
fn gaps_are_replayed_and_lost_blocks_are_dropped() {
    let mut conductor = conductor(1);
    let long = prompt(1, 20);
    let deep = |conductor: &mut Conductor| {
        let held = conductor.query(&context(), QueryPrompt::Hashes(&prompt(1, 20)), 4, Tiers::SAID).expect("served");
        held.holders.first().map_or((0, false), |held| (held.dram_tokens / BLOCK, held.degraded))
    };
    let cache = |conductor: &mut Conductor, batch| conductor.cache("p0", 1, batch, 0).expect("known");
    assert_eq!(cache(&mut conductor, batch(0, vec![stored(long[..5].to_vec())])).wanted, CacheWanted::Nothing);
    let ack = cache(&mut conductor, batch(2, vec![stored(long[..15].to_vec())]));
    assert_eq!((ack.next, ack.wanted), (1, CacheWanted::Replay));
    assert_eq!(deep(&mut conductor), (5, true));
    let ack = cache(&mut conductor, batch(1, vec![stored(long[..10].to_vec())]));
    assert_eq!(ack.next, 2);
    // A duplicate batch changes nothing.
    assert_eq!(cache(&mut conductor, batch(0, vec![BlockChange::Cleared])).next, 2);
    assert_eq!((deep(&mut conductor).0, conductor.counts().duplicates, conductor.counts().gaps), (10, 1, 1));
    let lost = CacheBatch { seq: 9, kind: CacheReport::Lost, changes: vec![stored(long[..3].to_vec())] };
    assert_eq!(cache(&mut conductor, lost).wanted, CacheWanted::Snapshot);
    assert_eq!(deep(&mut conductor), (3, true));
    let whole = CacheBatch { seq: 10, kind: CacheReport::Snapshot, changes: vec![stored(long)] };
    assert_eq!(cache(&mut conductor, whole).wanted, CacheWanted::Nothing);
    assert_eq!(deep(&mut conductor), (20, false));
    let gone = BlockChange::Removed {
        lora: String::new(),
        salt: String::new(),
        tier: None,
        hashes: prompt(1, 20)[4..].to_vec(),
    };
    cache(&mut conductor, batch(11, vec![gone]));
    assert_eq!(deep(&mut conductor).0, 4);
}

#[test]
fn instance_that_never_has_its_reported_blocks_is_not_believed() {
    let mut conductor = conductor(1);
    for at in 0..4 {
        let long = prompt(at, 100);
        conductor.cache("p0", 1, batch(at, vec![stored(long.clone())]), 0).expect("known");
        let answer = conductor.schedule(&asked(&format!("r{at}"), long), 0).expect("good");
        assert_eq!(assigned(&answer).reuse_tokens, 1_600);
        let reservation = assigned(&answer).reservation;
        conductor
            .update(reservation, RequestStep::PrefillDone { reused_tokens: 0, took_ns: SECOND }, 0)
            .expect("booked");
        conductor.update(reservation, RequestStep::Ended, 0).expect("booked");
    }
    assert_eq!(conductor.counts().implausible, 1);
    let held = conductor.query(&context(), QueryPrompt::Hashes(&prompt(0, 100)), 4, Tiers::SAID).expect("served");
    assert!(held.holders.iter().all(|holder| holder.dram_tokens == 0 && holder.degraded), "{held:?}");
    // The answer to its next batch requests a snapshot.
    assert_eq!(conductor.cache("p0", 1, batch(4, vec![]), 0).expect("known").wanted, CacheWanted::Snapshot);
}

#[test]
fn mismatched_hashes_are_detected() {
    let mut conductor = conductor(1);
    let mismatch = |conductor: &mut Conductor| conductor.table(0).pools[0].status.mismatch;
    for at in 0..16 {
        assert!(!mismatch(&mut conductor));
        let answer = conductor.schedule(&asked(&format!("r{at}"), prompt(at, 100)), 0).expect("good");
        let reservation = assigned(&answer).reservation;
        conductor
            .update(reservation, RequestStep::PrefillDone { reused_tokens: 1_000, took_ns: SECOND }, 0)
            .expect("booked");
        conductor.update(reservation, RequestStep::Ended, 0).expect("booked");
    }
    assert!(mismatch(&mut conductor));
}

#[test]
fn reported_idleness_gains_nothing_and_reported_load_is_respected() {
    let mut conductor = conductor(2);
    let wait = |conductor: &mut Conductor, name: &str| {
        let rows = conductor.table(0).instances;
        rows.iter().find(|row| &*row.status.instance == name).map(|row| row.status.wait_ns).expect("there")
    };
    let answer = conductor.schedule(&asked("a", prompt(1, 1_000)), 0).expect("good");
    let busy = assigned(&answer).prefill.to_string();
    let booked_ns = wait(&mut conductor, &busy);
    assert!(booked_ns > 0);
    conductor.report(&busy, 1, InstanceLoad { seq: 1, ..InstanceLoad::default() }, 0).expect("known");
    assert_eq!(wait(&mut conductor, &busy), booked_ns);
    let other = if busy == "p0" { "p1" } else { "p0" };
    let steps = DecodeSteps { steps: u32::MAX, took_ns: u64::MAX, tokens: u64::MAX, requests: u32::MAX };
    let (queued_tokens, decode_tokens, decodes) = (u64::MAX, u64::MAX, u32::MAX);
    let much = InstanceLoad { seq: 1, queued_tokens, decode_tokens, decodes, steps };
    conductor.report(other, 1, much, 0).expect("known");
    conductor.report("d0", 1, much, 0).expect("known");
    assert!(wait(&mut conductor, other) <= 3_600 * SECOND);
    let now = Schedule { mode: ScheduleMode::Now, ..asked("b", prompt(2, 10)) };
    assert_eq!(assigned(&conductor.schedule(&now, 0).expect("good")).prefill.as_ref(), busy);
}

#[test]
fn overload_ends_at_the_limits() {
    let mut conductor = conductor(2);
    let mut refused = 0;
    for at in 0..100 {
        refused += usize::from(conductor.register(spec(&format!("x{at}"), InstancePart::Mixed), 0).is_err());
    }
    assert_eq!((conductor.table(0).instances.len(), refused), (16, 87));
    let full = (0..100).map(|at| conductor.schedule(&asked(&format!("r{at}"), prompt(at, 3)), 0).expect("good"));
    let full =
        full.filter(|answer| matches!(answer, ScheduleReply::Refused { why: ScheduleRefusal::Full, .. })).count();
    assert_eq!(full, 36);
    let limits = LimitUse::of(&conductor);
    assert_eq!((limits.instances, limits.requests, limits.models), ((16, 16), (64, 64), (1, 16)));
    assert_eq!((limits.prompt_blocks.0, conductor.counts().requests_full), (64 * 3, 36));
    let refused = conductor.register(spec("x100", InstancePart::Mixed), 0).expect_err("full").to_string();
    assert!(refused.contains("16 instances") && refused.contains("--conductor-instances"), "{refused}");
    let models = (0..100).filter(|at| {
        let other = RegisterInstance { model: format!("m{at}"), ..spec("p0", InstancePart::Prefill) };
        conductor.register(RegisterInstance { incarnation: 2 + at, ..other }, 0).is_ok()
    });
    assert_eq!(models.count(), 100, "a pool goes with its last instance");
    assert_eq!(conductor.table(0).pools.len(), 2);
}

#[test]
fn limits_that_an_operator_sets_are_those_that_requests_meet() {
    let mut config = config();
    for (limit, value) in [(Limit::Queued, 2), (Limit::WaitSeconds, 7), (Limit::Models, 1)] {
        config.set_limit(limit, value).expect("in range");
    }
    let mut conductor = Conductor::new(config, 7);
    conductor.register(spec("p0", InstancePart::Mixed), 0).expect("there is room");
    let other = RegisterInstance { model: "other".to_owned(), ..spec("p1", InstancePart::Mixed) };
    let refused = conductor.register(other, 0).expect_err("a second model").to_string();
    assert!(refused.contains("1 models") && refused.contains("--conductor-models"), "{refused}");
    let answers: Vec<ScheduleReply> =
        (0..6).map(|at| conductor.schedule(&asked(&format!("r{at}"), prompt(at, 3_000)), 0).expect("good")).collect();
    let is_full = |answer: &&ScheduleReply| matches!(answer, ScheduleReply::Refused { why: ScheduleRefusal::Full, .. });
    let full = answers.iter().filter(is_full).count();
    assert!(full > 0, "{answers:?}");
    assert_eq!((conductor.counts().queue_full, LimitUse::of(&conductor).queued), (full as u64, (2, 2)));
    // What a request asks for beyond the limit is shortened to it.
    conductor.tick(7 * SECOND - 1);
    assert_eq!(LimitUse::of(&conductor).queued.0, 2);
    conductor.tick(7 * SECOND);
    assert_eq!(LimitUse::of(&conductor).queued.0, 0);
}

#[test]
fn malformed_requests_are_rejected_with_their_cause() {
    let mut conductor = conductor(1);
    let mut wrong = |change: fn(&mut Schedule), expected: &str| {
        let mut asked = asked("a", prompt(1, 10));
        change(&mut asked);
        let error = conductor.schedule(&asked, 0).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    wrong(|asked| asked.request.clear(), "1 to 128 bytes");
    wrong(|asked| asked.tokens = 0, "0 tokens");
    wrong(|asked| asked.tokens = 144, "10 blocks of 16");
    wrong(|asked| asked.tokens = u32::MAX, "at most 2097152 in blocks of 16");
    wrong(|asked| asked.context.model = "n".to_owned(), "no instance of model \"n\"");
    wrong(|asked| asked.context.block_tokens = 32, "blocks of 32");
    wrong(|asked| asked.context.tenant = "t".to_owned(), "tenant \"t\"");
    wrong(|asked| asked.context.lora = "l".repeat(300), "300 bytes");
    wrong(|asked| asked.hashes = vec![1; MAX_PROMPT_BLOCKS + 1], "larger blocks");
    // A million tokens are a valid prompt.
    let long = prompt(1, 62_500);
    conductor.cache("p0", 1, batch(0, vec![stored(long.clone())]), 0).expect("known");
    assert_eq!(assigned(&conductor.schedule(&asked("b", long), 0).expect("good")).reuse_tokens, 1_000_000);
}

#[test]
fn blocks_of_the_store_can_be_fetched_by_all_instances() {
    let mut conductor = conductor(1);
    let long = prompt(1, 600);
    for (at, hash) in long.iter().enumerate() {
        let part = at as u64 % 3;
        assert_eq!(conductor.pools().store_has(part, "", "m", *hash, true), Ok(true));
    }
    assert_eq!(conductor.pools().store_has(0, "", "another", 5, true), Ok(false));
    let found = conductor.query(&context(), QueryPrompt::Hashes(&long), 4, Tiers::ALL).expect("served");
    assert_eq!((found.holders.len(), found.pooled_tokens), (0, 9_600));
    let answer = conductor.schedule(&asked("a", long.clone()), 0).expect("good");
    assert_eq!(assigned(&answer).reuse_tokens, 9_600);
    assert!(assigned(&answer).sources.iter().all(|source| source.instance.is_none()));
    conductor.pools().store_has(0, "", "m", long[300], false).expect("known");
    assert_eq!(
        conductor.query(&context(), QueryPrompt::Hashes(&long), 4, Tiers::ALL).expect("served").pooled_tokens,
        4_800
    );
    conductor.pools().store_cleared(1);
    assert_eq!(
        conductor.query(&context(), QueryPrompt::Hashes(&long), 4, Tiers::ALL).expect("served").pooled_tokens,
        16
    );
}

/// Contexts beyond the limit share one context, but no blocks.
#[test]
fn contexts_beyond_the_limit_share_nothing() {
    let mut conductor = conductor(1);
    let long = prompt(1, 10);
    for at in 0..8 {
        let event = BlockChange::Stored {
            lora: format!("l{at}"),
            salt: String::new(),
            tier: BlockTier::Gpu,
            parent: None,
            hashes: long[..=at as usize].to_vec(),
        };
        conductor.cache("p0", 1, batch(at, vec![event]), 0).expect("known");
    }
    for at in 0..8 {
        let context = PromptContext { lora: format!("l{at}"), ..context() };
        let held = conductor.query(&context, QueryPrompt::Hashes(&long), 1, Tiers::SAID).expect("served");
        assert_eq!(held.holders[0].gpu_tokens, (at + 1) * BLOCK, "{at}");
    }
}

#[derive(Clone, Debug)]
enum Act {
    Register(u8, u64),
    Deregister(u8),
    Report(u8, u64),
    Cache(u8, u64, u64),
    Ask(u8, u64, bool),
    Update(u8, u8),
    Reschedule(u8, u8),
    Pass(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..4u8, 1..3u64).prop_map(|(name, incarnation)| Act::Register(name, incarnation)),
        (0..4u8).prop_map(Act::Deregister),
        (0..4u8, any::<u64>()).prop_map(|(name, load)| Act::Report(name, load)),
        (0..4u8, 0..9u64, 0..5u64).prop_map(|(name, seq, seed)| Act::Cache(name, seq, seed)),
        (0..30u8, 0..5u64, any::<bool>()).prop_map(|(id, seed, now)| Act::Ask(id, seed, now)),
        (0..30u8, 0..5u8).prop_map(|(id, step)| Act::Update(id, step)),
        (0..30u8, 0..4u8).prop_map(|(id, name)| Act::Reschedule(id, name)),
        (0..4_000_000_000u64).prop_map(Act::Pass),
    ]
}

proptest! {
    /// For any sequence of calls: a placed request is placed on a registered instance, and once all requests have ended
    /// nothing is booked any more.
    #[test]
    fn no_booking_is_leaked(acts in prop::collection::vec(act(), 1..120)) {
        let mut conductor = conductor(1);
        let (mut now_ns, mut reservations) = (0, vec![0u64; 30]);
        for act in acts {
            match act {
                Act::Register(name, incarnation) => {
                    let part = if name == 3 { InstancePart::Decode } else { InstancePart::Mixed };
                    let spec = RegisterInstance { incarnation, ..spec(&format!("i{name}"), part) };
                    let _ = conductor.register(spec, now_ns);
                }
                Act::Deregister(name) => drop(conductor.deregister(&format!("i{name}"), 9, now_ns)),
                Act::Report(name, load) => {
                    let seq = load % 7;
                    let steps = DecodeSteps { steps: load as u32, took_ns: load, tokens: load, requests: 3 };
                    let load = InstanceLoad { seq, queued_tokens: load, decode_tokens: load / 3, decodes: 3, steps };
                    let _ = conductor.report(&format!("i{name}"), 1, load, now_ns);
                }
                Act::Cache(name, seq, seed) => {
                    let batch = batch(seq, vec![stored(prompt(seed, 40))]);
                    let _ = conductor.cache(&format!("i{name}"), 1, batch, now_ns);
                }
                Act::Ask(id, seed, now) => {
                    let mode = if now { ScheduleMode::Now } else { ScheduleMode::Reserve };
                    let mut asked = Schedule { mode, ..asked(&format!("r{id}"), prompt(seed, 500)) };
                    // Some prompts have the maximum length.
                    asked.tokens = if seed == 4 { MAX_PROMPT_BLOCKS as u32 * BLOCK } else { asked.tokens };
                    match conductor.schedule(&asked, now_ns) {
                        Ok(ScheduleReply::Assigned(placed)) => {
                            reservations[usize::from(id)] = placed.reservation;
                            prop_assert!(placed.reuse_tokens <= asked.tokens);
                        }
                        Ok(ScheduleReply::Queued { reservation, .. }) => reservations[usize::from(id)] = reservation,
                        _ => {}
                    }
                }
                Act::Update(id, step) => {
                    let done = RequestStep::PrefillDone { reused_tokens: u32::MAX, took_ns: u64::MAX };
                    use RequestStep::{Alive, Decoding, Ended, PrefillStarted};
                    let steps = [PrefillStarted, done, Decoding, Alive, Ended];
                    let _ = conductor.update(reservations[usize::from(id)], steps[usize::from(step)], now_ns);
                }
                Act::Reschedule(id, name) => {
                    let _ = conductor.reschedule(reservations[usize::from(id)], &[format!("i{name}")], now_ns);
                }
                Act::Pass(span_ns) => {
                    now_ns += span_ns;
                    let next_ns = conductor.tick(now_ns);
                    prop_assert!(next_ns.is_none_or(|next_ns| next_ns > now_ns));
                }
            }
            while conductor.take_told().is_some() {}
        }
        let forever_ns = now_ns + 10_000 * SECOND;
        conductor.tick(forever_ns);
        let table = conductor.table(forever_ns);
        prop_assert!(table.instances.is_empty() && table.pools.is_empty(), "{:?}", table);
    }
}
