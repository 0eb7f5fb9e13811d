//! The desk: retried ids, incarnations, silence, gaps, lies, floods; and at random that nothing is left behind.

use crate::support;

use kvplane_conductor::desk::{
    Answer, CacheBatch, CacheChange, CacheEvent, CacheRequest, Desk, DeskError, InstanceSpec, Load, MAX_PROMPT_BLOCKS,
    Mode, Part, ScheduleRequest, Step, Why,
};
use kvplane_conductor::index::{ContextKey, Tier, Tiers};
use kvplane_conductor::policy::{PolicyName, Slo};
use proptest::prelude::*;
use support::{BLOCK, SECOND, asked, assigned, batch, context, desk, prompt, spec, stored};

#[test]
fn who_has_the_prefix_gets_the_request_and_the_same_id_the_same_answer() {
    let mut desk = desk(4);
    let long = prompt(1, 4_000);
    desk.cache("p2", 1, batch(0, vec![stored(long.clone())]), 0).expect("known");
    let held = desk.query(&context(), &long, 4, Tiers::SAID).expect("served");
    assert_eq!((&*held.holders[0].instance, held.holders[0].dram_tokens), ("p2", 64_000));
    let first = desk.schedule(&asked("a", long.clone()), 0).expect("good");
    let placed = assigned(&first).clone();
    assert_eq!((&*placed.prefill, placed.decode.as_deref(), placed.reuse_tokens), ("p2", Some("d0"), 64_000));
    assert_eq!(desk.schedule(&asked("a", long.clone()), SECOND).expect("again"), first);
    assert_eq!(desk.counts.repeated, 1);
    let other = desk.schedule(&asked("a", prompt(2, 4_000)), SECOND);
    assert!(matches!(other, Err(DeskError::Conflict { .. })), "{other:?}");
    let explained = desk.explain("a", SECOND).expect("under way");
    assert_eq!(explained.candidates.len(), 4);
    desk.update(placed.reservation, Step::Ended, SECOND).expect("booked");
    assert!(matches!(desk.update(placed.reservation, Step::Ended, 2), Err(DeskError::UnknownReservation { .. })));
    assert!(desk.table(SECOND).instances.iter().all(|row| row.prefills == 0 && row.decodes == 0));
}

#[test]
fn those_who_wait_are_told_later_and_again_until_they_answer() {
    let mut desk = desk(1);
    let mut answers = Vec::new();
    for at in 0..6 {
        answers.push(desk.schedule(&asked(&format!("r{at}"), prompt(at, 2_000)), 0).expect("good"));
    }
    assert!(matches!(answers[0], Answer::Assigned(_)));
    assert!(matches!(answers[5], Answer::Queued { position: 4, .. } | Answer::Queued { position: 3, .. }));
    let first = assigned(&answers[0]).reservation;
    desk.update(first, Step::PrefillStarted, 0).expect("booked");
    desk.update(first, Step::PrefillDone { reused_tokens: 0, took_ns: SECOND }, SECOND).expect("booked");
    let told = desk.take_told().expect("another one goes");
    assert_eq!(desk.unclaimed(1).len(), 1);
    let again = desk.schedule(&asked(&told.request, prompt(told.request[1..].parse().unwrap(), 2_000)), SECOND);
    assert_eq!(again.expect("good"), told.answer);
    desk.update(assigned(&told.answer).reservation, Step::Alive, SECOND).expect("booked");
    assert_eq!(desk.unclaimed(1), vec![]);
}

#[test]
fn a_reservation_that_nobody_updates_ends() {
    let mut desk = desk(1);
    let answer = desk.schedule(&asked("a", prompt(1, 10)), 0).expect("good");
    let lease_ns = assigned(&answer).lease_ns;
    assert!(desk.soon_ns(0).is_some_and(|soon_ns| soon_ns <= lease_ns));
    desk.report("p0", 1, Load { seq: 1, ..Load::default() }, lease_ns).expect("known");
    desk.report("d0", 1, Load { seq: 1, ..Load::default() }, lease_ns).expect("known");
    desk.tick(lease_ns);
    assert_eq!(desk.counts.expired, 1);
    assert_eq!(desk.table(lease_ns).instances.iter().map(|row| row.prefills).sum::<u32>(), 0);
    let mut waiting = asked("b", prompt(2, 60_000));
    waiting.wait_ns = SECOND;
    desk.schedule(&asked("c", prompt(3, 60_000)), lease_ns).expect("good");
    assert!(matches!(desk.schedule(&waiting, lease_ns).expect("good"), Answer::Queued { .. }));
    desk.tick(lease_ns + SECOND);
    let told = desk.take_told().expect("it waited long enough");
    assert!(matches!(told.answer, Answer::Refused { why: Why::Waited, .. }));
}

#[test]
fn who_does_not_report_is_doubted_then_lost_and_its_requests_come_back() {
    let mut desk = desk(2);
    let report = |desk: &mut Desk, name: &str, seq, now_ns| {
        desk.report(name, 1, Load { seq, ..Load::default() }, now_ns).expect("known");
    };
    let answer = desk.schedule(&asked("a", prompt(1, 100)), 0).expect("good");
    let (silent, reservation) = (assigned(&answer).prefill.to_string(), assigned(&answer).reservation);
    let other = if silent == "p0" { "p1" } else { "p0" };
    for at in 1..=11 {
        report(&mut desk, other, at, at * SECOND);
        report(&mut desk, "d0", at, at * SECOND);
        desk.tick(at * SECOND);
        let rows = desk.table(at * SECOND).instances;
        let row = rows.iter().find(|row| *row.name == *silent);
        assert_eq!(row.map(|row| row.doubted), (at < 10).then_some(at >= 3), "second {at}");
    }
    assert!(matches!(desk.take_told().map(|told| told.answer), Some(Answer::Refused { why: Why::Lost, .. })));
    let error = desk.update(reservation, Step::Alive, 11 * SECOND).expect_err("its instance is gone");
    assert!(error.to_string().contains("rescheduled"), "{error}");
    let elsewhere = desk.reschedule(reservation, &[silent], 11 * SECOND).expect("known");
    assert_eq!(assigned(&elsewhere).prefill.as_ref(), other);
    assert_eq!(assigned(&elsewhere).reservation, reservation);
    // A report that comes late says nothing but that the instance lives.
    report(&mut desk, other, 3, 12 * SECOND);
    assert_eq!(desk.counts.stale_reports, 1);
}

#[test]
fn an_instance_that_is_held_gets_nothing_new_until_it_is_released_or_starts_again() {
    let mut desk = desk(2);
    let takes = |desk: &mut Desk, at: u64| {
        let answer = desk.schedule(&asked(&format!("r{at}"), prompt(at, 10)), 0).expect("good");
        let place = assigned(&answer).clone();
        desk.update(place.reservation, Step::Ended, 0).expect("booked");
        place.prefill.to_string()
    };
    let busy = desk.schedule(&asked("busy", prompt(90, 100)), 0).expect("good");
    let held = assigned(&busy).prefill.to_string();
    let version = desk.version();
    // What it has goes on.
    assert_eq!(desk.hold(&held, true, 0).expect("known"), 1);
    assert_ne!(desk.version(), version, "whoever watches is told");
    assert!((0..20).all(|at| takes(&mut desk, at) != held));
    // Neither a report nor the same registration changes that.
    desk.report(&held, 1, Load { seq: 1, ..Load::default() }, 0).expect("known");
    desk.register(spec(&held, Part::Prefill), 0).expect("the same again");
    assert!((20..40).all(|at| takes(&mut desk, at) != held));
    assert!(desk.table(0).instances.iter().any(|row| *row.name == *held && row.held && row.prefills == 1));
    desk.update(assigned(&busy).reservation, Step::Ended, 0).expect("booked");
    assert_eq!(desk.hold(&held, false, 0).expect("known"), 0);
    let other = if held == "p0" { "p1" } else { "p0" };
    desk.hold(other, true, 0).expect("known");
    assert!((40..60).all(|at| takes(&mut desk, at) == held));
    let answer = desk.schedule(&asked("later", prompt(91, 10)), 0).expect("good");
    desk.update(assigned(&answer).reservation, Step::Ended, 0).expect("booked");
    // A new incarnation is not what was taken out.
    desk.register(InstanceSpec { incarnation: 2, ..spec(other, Part::Prefill) }, 0).expect("a later incarnation");
    assert!(desk.table(0).instances.iter().all(|row| !row.held));
    assert!(matches!(desk.hold("nobody", true, 0), Err(DeskError::UnknownInstance { .. })));
}

#[test]
fn another_policy_decides_from_now_on_and_leaves_nobody_waiting() {
    let mut desk = desk(1);
    let (first, second) = (asked("a", prompt(1, 60_000)), asked("b", prompt(2, 60_000)));
    desk.schedule(&first, 0).expect("good");
    desk.schedule(&second, 0).expect("good");
    let third = desk.schedule(&asked("c", prompt(3, 60_000)), 0).expect("good");
    assert!(matches!(third, Answer::Queued { .. }), "{third:?}");
    // It has no queue: who waits is placed, behind the others.
    desk.set_placement(PolicyName::RoundRobin, false, Slo::NONE, 0);
    let told: Vec<String> = std::iter::from_fn(|| desk.take_told()).map(|told| told.request.to_string()).collect();
    assert!(told.contains(&"c".to_owned()), "{told:?}");
    let fourth = desk.schedule(&asked("d", prompt(4, 60_000)), 0).expect("good");
    assert!(matches!(fourth, Answer::Assigned(_)), "{fourth:?}");
    let slo = Slo { ttft_ns: 1, tbt_ns: u64::MAX };
    desk.set_placement(PolicyName::Ours, true, slo, 0);
    assert_eq!(desk.placement(), (PolicyName::Ours, true, slo));
    let refused = desk.schedule(&asked("e", prompt(5, 60_000)), 0).expect("good");
    assert!(matches!(refused, Answer::Refused { why: Why::Ttft, .. }), "{refused:?}");
}

#[test]
fn incarnations_and_bodies_are_compared() {
    let mut desk = desk(1);
    assert!(!desk.register(spec("p0", Part::Mixed), 0).is_ok_and(|registered| registered.fresh));
    let changed = InstanceSpec { capacity_tokens: 5, ..spec("p0", Part::Prefill) };
    assert!(matches!(desk.register(changed, 0), Err(DeskError::Conflict { .. })));
    let later = InstanceSpec { incarnation: 2, ..spec("p0", Part::Prefill) };
    assert!(desk.register(later, 0).expect("a later incarnation").fresh);
    assert!(matches!(
        desk.register(spec("p0", Part::Prefill), 0),
        Err(DeskError::StaleIncarnation { incarnation: 2, .. })
    ));
    assert!(matches!(desk.report("p0", 1, Load::default(), 0), Err(DeskError::StaleIncarnation { .. })));
    assert!(matches!(desk.deregister("p0", 1, 0), Err(DeskError::StaleIncarnation { .. })));
    assert!(desk.deregister("p0", 2, 0).expect("its own incarnation"));
    assert!(!desk.deregister("p0", 2, 0).expect("gone already"));
    // Bytes of a token are one number for a model.
    let odd = InstanceSpec { token_bytes: 5, ..spec("p9", Part::Prefill) };
    assert!(matches!(desk.register(odd, 0), Err(DeskError::Conflict { .. })));
}

#[test]
fn events_with_gaps_are_asked_for_again_and_what_is_lost_is_forgotten() {
    let mut desk = desk(1);
    let long = prompt(1, 20);
    let deep = |desk: &mut Desk| {
        let held = desk.query(&context(), &prompt(1, 20), 4, Tiers::SAID).expect("served");
        held.holders.first().map_or((0, false), |held| (held.dram_tokens / BLOCK, held.degraded))
    };
    let cache = |desk: &mut Desk, batch| desk.cache("p0", 1, batch, 0).expect("known");
    assert_eq!(cache(&mut desk, batch(0, vec![stored(long[..5].to_vec())])).wanted, CacheRequest::Nothing);
    let ack = cache(&mut desk, batch(2, vec![stored(long[..15].to_vec())]));
    assert_eq!((ack.next, ack.wanted), (1, CacheRequest::Replay));
    assert_eq!(deep(&mut desk), (5, true));
    let ack = cache(&mut desk, batch(1, vec![stored(long[..10].to_vec())]));
    assert_eq!(ack.next, 2);
    // A batch that comes twice changes nothing.
    assert_eq!(cache(&mut desk, batch(0, vec![CacheEvent::Cleared])).next, 2);
    assert_eq!((deep(&mut desk).0, desk.counts.duplicates, desk.counts.gaps), (10, 1, 1));
    let lost = CacheBatch { seq: 9, change: CacheChange::Lost, events: vec![stored(long[..3].to_vec())] };
    assert_eq!(cache(&mut desk, lost).wanted, CacheRequest::Snapshot);
    assert_eq!(deep(&mut desk), (3, true));
    let whole = CacheBatch { seq: 10, change: CacheChange::Snapshot, events: vec![stored(long)] };
    assert_eq!(cache(&mut desk, whole).wanted, CacheRequest::Nothing);
    assert_eq!(deep(&mut desk), (20, false));
    let gone = CacheEvent::Removed {
        lora: String::new(),
        salt: String::new(),
        tier: None,
        hashes: prompt(1, 20)[4..].to_vec(),
    };
    cache(&mut desk, batch(11, vec![gone]));
    assert_eq!(deep(&mut desk).0, 4);
}

#[test]
fn an_instance_that_never_has_what_it_says_is_not_believed() {
    let mut desk = desk(1);
    for at in 0..4 {
        let long = prompt(at, 100);
        desk.cache("p0", 1, batch(at, vec![stored(long.clone())]), 0).expect("known");
        let answer = desk.schedule(&asked(&format!("r{at}"), long), 0).expect("good");
        assert_eq!(assigned(&answer).reuse_tokens, 1_600);
        let reservation = assigned(&answer).reservation;
        desk.update(reservation, Step::PrefillDone { reused_tokens: 0, took_ns: SECOND }, 0).expect("booked");
        desk.update(reservation, Step::Ended, 0).expect("booked");
    }
    assert_eq!(desk.counts.disbelieved, 1);
    let held = desk.query(&context(), &prompt(0, 100), 4, Tiers::SAID).expect("served");
    assert_eq!(held.holders, vec![]);
    // Its next batch is answered with what would make it good.
    assert_eq!(desk.cache("p0", 1, batch(4, vec![]), 0).expect("known").wanted, CacheRequest::Snapshot);
}

#[test]
fn hashes_of_another_kind_are_noticed() {
    let mut desk = desk(1);
    let mismatch = |desk: &mut Desk| desk.table(0).pools[0].mismatch;
    for at in 0..16 {
        assert!(!mismatch(&mut desk));
        let answer = desk.schedule(&asked(&format!("r{at}"), prompt(at, 100)), 0).expect("good");
        let reservation = assigned(&answer).reservation;
        desk.update(reservation, Step::PrefillDone { reused_tokens: 1_000, took_ns: SECOND }, 0).expect("booked");
        desk.update(reservation, Step::Ended, 0).expect("booked");
    }
    assert!(mismatch(&mut desk));
}

#[test]
fn who_says_that_it_is_idle_gains_nothing_and_who_says_it_is_busy_is_spared() {
    let mut desk = desk(2);
    let wait = |desk: &mut Desk, name: &str| {
        let rows = desk.table(0).instances;
        rows.iter().find(|row| &*row.name == name).map(|row| row.wait_ns).expect("there")
    };
    let answer = desk.schedule(&asked("a", prompt(1, 1_000)), 0).expect("good");
    let busy = assigned(&answer).prefill.to_string();
    let booked_ns = wait(&mut desk, &busy);
    assert!(booked_ns > 0);
    desk.report(&busy, 1, Load { seq: 1, ..Load::default() }, 0).expect("known");
    assert_eq!(wait(&mut desk, &busy), booked_ns);
    let other = if busy == "p0" { "p1" } else { "p0" };
    let much = Load { seq: 1, queued_tokens: u64::MAX, decode_tokens: u64::MAX, decodes: u32::MAX };
    desk.report(other, 1, much, 0).expect("known");
    desk.report("d0", 1, much, 0).expect("known");
    assert!(wait(&mut desk, other) <= 3_600 * SECOND);
    let now = ScheduleRequest { mode: Mode::Now, ..asked("b", prompt(2, 10)) };
    assert_eq!(assigned(&desk.schedule(&now, 0).expect("good")).prefill.as_ref(), busy);
}

#[test]
fn floods_end_at_limits() {
    let mut desk = desk(2);
    let mut refused = 0;
    for at in 0..100 {
        refused += usize::from(desk.register(spec(&format!("x{at}"), Part::Mixed), 0).is_err());
    }
    assert_eq!((desk.table(0).instances.len(), refused), (16, 87));
    let full = (0..100).map(|at| desk.schedule(&asked(&format!("r{at}"), prompt(at, 3)), 0).expect("good"));
    let full = full.filter(|answer| matches!(answer, Answer::Refused { why: Why::Full, .. })).count();
    assert_eq!(full, 36);
    let models = (0..100).filter(|at| {
        let other = InstanceSpec { model: format!("m{at}"), ..spec("p0", Part::Prefill) };
        desk.register(InstanceSpec { incarnation: 2 + at, ..other }, 0).is_ok()
    });
    assert_eq!(models.count(), 100, "a pool goes with its last instance");
    assert_eq!(desk.table(0).pools.len(), 2);
}

#[test]
fn what_makes_no_sense_is_said() {
    let mut desk = desk(1);
    let mut wrong = |change: fn(&mut ScheduleRequest), expected: &str| {
        let mut asked = asked("a", prompt(1, 10));
        change(&mut asked);
        let error = desk.schedule(&asked, 0).expect_err(expected).to_string();
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
    // A million tokens are a prompt like any other.
    let long = prompt(1, 62_500);
    desk.cache("p0", 1, batch(0, vec![stored(long.clone())]), 0).expect("known");
    assert_eq!(assigned(&desk.schedule(&asked("b", long), 0).expect("good")).reuse_tokens, 1_000_000);
}

#[test]
fn blocks_of_the_store_count_for_all_and_are_nobodys() {
    let mut desk = desk(1);
    let long = prompt(1, 600);
    for (at, hash) in long.iter().enumerate() {
        let part = at as u64 % 3;
        assert_eq!(desk.store_has(part, "", "m", *hash, true), Ok(true));
    }
    assert_eq!(desk.store_has(0, "", "another", 5, true), Ok(false));
    let found = desk.query(&context(), &long, 4, Tiers::ALL).expect("served");
    assert_eq!((found.holders.len(), found.pooled_tokens), (0, 9_600));
    let answer = desk.schedule(&asked("a", long.clone()), 0).expect("good");
    assert_eq!(assigned(&answer).reuse_tokens, 9_600);
    assert!(assigned(&answer).sources.iter().all(|source| source.instance.is_none()));
    desk.store_has(0, "", "m", long[300], false).expect("known");
    assert_eq!(desk.query(&context(), &long, 4, Tiers::ALL).expect("served").pooled_tokens, 4_800);
    desk.store_cleared(1);
    assert_eq!(desk.query(&context(), &long, 4, Tiers::ALL).expect("served").pooled_tokens, 16);
}

/// More contexts than there may be share one, and nothing else.
#[test]
fn contexts_beyond_the_limit_share_nothing() {
    let mut desk = desk(1);
    let long = prompt(1, 10);
    for at in 0..8 {
        let event = CacheEvent::Stored {
            lora: format!("l{at}"),
            salt: String::new(),
            tier: Tier::Gpu,
            parent: None,
            hashes: long[..=at as usize].to_vec(),
        };
        desk.cache("p0", 1, batch(at, vec![event]), 0).expect("known");
    }
    for at in 0..8 {
        let context = ContextKey { lora: format!("l{at}"), ..context() };
        let held = desk.query(&context, &long, 1, Tiers::SAID).expect("served");
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
    /// Whatever is said in whatever order: a placed request goes to an instance that is there, and when all requests
    /// have ended nothing is booked any more.
    #[test]
    fn nothing_is_left_behind(acts in prop::collection::vec(act(), 1..120)) {
        let mut desk = desk(1);
        let (mut now_ns, mut reservations) = (0, vec![0u64; 30]);
        for act in acts {
            match act {
                Act::Register(name, incarnation) => {
                    let part = if name == 3 { Part::Decode } else { Part::Mixed };
                    let _ = desk.register(InstanceSpec { incarnation, ..spec(&format!("i{name}"), part) }, now_ns);
                }
                Act::Deregister(name) => drop(desk.deregister(&format!("i{name}"), 9, now_ns)),
                Act::Report(name, load) => {
                    let load = Load { seq: load % 7, queued_tokens: load, decode_tokens: load / 3, decodes: 3 };
                    let _ = desk.report(&format!("i{name}"), 1, load, now_ns);
                }
                Act::Cache(name, seq, seed) => {
                    let batch = batch(seq, vec![stored(prompt(seed, 40))]);
                    let _ = desk.cache(&format!("i{name}"), 1, batch, now_ns);
                }
                Act::Ask(id, seed, now) => {
                    let mode = if now { Mode::Now } else { Mode::Reserve };
                    let mut asked = ScheduleRequest { mode, ..asked(&format!("r{id}"), prompt(seed, 500)) };
                    // Some have the longest prompt there may be.
                    asked.tokens = if seed == 4 { MAX_PROMPT_BLOCKS as u32 * BLOCK } else { asked.tokens };
                    match desk.schedule(&asked, now_ns) {
                        Ok(Answer::Assigned(placed)) => {
                            reservations[usize::from(id)] = placed.reservation;
                            prop_assert!(placed.reuse_tokens <= asked.tokens);
                        }
                        Ok(Answer::Queued { reservation, .. }) => reservations[usize::from(id)] = reservation,
                        _ => {}
                    }
                }
                Act::Update(id, step) => {
                    let done = Step::PrefillDone { reused_tokens: u32::MAX, took_ns: u64::MAX };
                    let steps = [Step::PrefillStarted, done, Step::Decoding, Step::Alive, Step::Ended];
                    let _ = desk.update(reservations[usize::from(id)], steps[usize::from(step)], now_ns);
                }
                Act::Reschedule(id, name) => {
                    let _ = desk.reschedule(reservations[usize::from(id)], &[format!("i{name}")], now_ns);
                }
                Act::Pass(span_ns) => {
                    now_ns += span_ns;
                    let next_ns = desk.tick(now_ns);
                    prop_assert!(next_ns.is_none_or(|next_ns| next_ns > now_ns));
                }
            }
            while desk.take_told().is_some() {}
        }
        let forever_ns = now_ns + 10_000 * SECOND;
        desk.tick(forever_ns);
        let table = desk.table(forever_ns);
        prop_assert!(table.instances.is_empty() && table.pools.is_empty(), "{:?}", table);
    }
}
