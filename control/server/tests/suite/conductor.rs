//! Tests of the Conductor over QUIC: registration, events, placement, queueing, failures, rights, and invalid input.

use crate::support;

use std::time::Duration;

use kvplane_proto::rng::mix64;
use kvplane_rpc::conductor::*;
use kvplane_rpc::placement::*;
use kvplane_rpc::{CallError, Client, RefusalCode, Role};
use kvplane_server::{ConductorConfig, ControlConfig, ControlHandle, ControlServer};
use support::{client, run};

const BLOCK: u32 = 16;

fn start() -> ControlHandle {
    let mut config = ControlConfig::new("test");
    config.conductor = Some(ConductorConfig::default());
    ControlServer::start(config).expect("a control plane")
}

fn register(instance: &str, part: InstancePart, report_ns: u64) -> RegisterInstance {
    RegisterInstance {
        capacity_tokens: 1_000_000,
        report_ns,
        address: format!("{instance}:80"),
        ..RegisterInstance::new(instance, "m", BLOCK, part)
    }
}

fn context() -> PromptContext {
    PromptContext { model: "m".to_owned(), block_tokens: BLOCK, ..PromptContext::default() }
}

fn prompt(seed: u64, blocks: usize) -> Vec<u64> {
    (0..blocks as u64).map(|at| mix64(seed << 20 | at)).collect()
}

fn schedule(request: &str, hashes: Vec<u64>) -> Schedule {
    Schedule {
        client: 7,
        request: request.to_owned(),
        context: context(),
        tokens: hashes.len().max(1) as u32 * BLOCK,
        hashes,
        wait_ns: 0,
        mode: ScheduleMode::Reserve,
        barred: Vec::new(),
    }
}

fn cache(instance: &str, seq: u64, hashes: Vec<u64>) -> ReportCache {
    let (lora, salt) = (String::new(), String::new());
    let changes = vec![BlockChange::Stored { lora, salt, tier: BlockTier::Dram, parent: None, hashes }];
    let kind = CacheReport::Goes;
    ReportCache {
        tenant: String::new(),
        instance: instance.to_owned(),
        incarnation: 1,
        batch: CacheBatch { seq, kind, changes },
    }
}

fn load(instance: &str, seq: u64) -> ReportLoad {
    let (tenant, instance) = (String::new(), instance.to_owned());
    ReportLoad { tenant, instance, incarnation: 1, load: InstanceLoad { seq, ..InstanceLoad::default() } }
}

fn assigned(answer: ScheduleReply) -> Assignment {
    match answer {
        ScheduleReply::Assigned(assignment) => assignment,
        other => panic!("assigned, not {other:?}"),
    }
}

fn code(error: &CallError) -> u16 {
    match error {
        CallError::Refused(refusal) => refusal.code,
        other => panic!("refused, not {other}"),
    }
}

async fn instances(client: &Client, names: &[&str]) {
    for name in names {
        client.call(&register(name, InstancePart::Prefill, 0)).await.expect("room");
    }
    client.call(&register("d0", InstancePart::Decode, 0)).await.expect("room");
}

#[test]
fn a_request_is_placed_by_its_prefix_and_a_retry_is_idempotent() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let engine = client(control.local(), Role::Client).await;
        instances(&engine, &["p0", "p1", "p2"]).await;
        // A million tokens: half a megabyte of hashes.
        let long = prompt(1, 62_500);
        assert_eq!(engine.call(&cache("p1", 0, long.clone())).await.expect("taken").wanted, CacheWanted::Nothing);
        let query = QueryPrefix { context: context(), hashes: long.clone(), most: 2, tier: BlockTier::Ssd };
        let holders = router.call(&query).await.expect("served");
        assert_eq!((holders.holders.len(), holders.pooled_tokens), (1, 1_000_000));
        assert_eq!((&*holders.holders[0].instance, holders.holders[0].dram_tokens), ("p1", 1_000_000));
        let first = router.call(&schedule("a", long.clone())).await.expect("served");
        let placed = assigned(first.clone());
        assert_eq!((&*placed.prefill, placed.decode.as_deref()), ("p1", Some("d0")));
        assert_eq!(placed.reuse_tokens, 1_000_000);
        assert_eq!(router.call(&schedule("a", long)).await.expect("served"), first, "asked again");
        let error = router.call(&schedule("a", prompt(2, 9))).await.expect_err("another prompt");
        assert_eq!(code(&error), RefusalCode::AlreadyExists as u16);
        let explained = router.call(&ExplainRequest { request: "a".to_owned() }).await.expect("known");
        assert_eq!((explained.answer, explained.candidates.len()), (first, 3));
        let done = RequestStep::PrefillDone { reused_tokens: 1_000_000, took_ns: 5_000_000 };
        for step in [RequestStep::PrefillStarted, done, RequestStep::Decoding, RequestStep::Ended] {
            router.call(&UpdateRequest { reservation: placed.reservation, step }).await.expect("booked");
        }
        let step = RequestStep::Alive;
        let error = router.call(&UpdateRequest { reservation: placed.reservation, step }).await.expect_err("over");
        assert_eq!(code(&error), RefusalCode::NotFound as u16);
    });
}

#[test]
fn long_prompts_are_placed_on_a_pipeline_group_for_schedulers_that_drive_one() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let engine = client(control.local(), Role::Client).await;
        let member = |name: &str, stage| {
            let group = "g".to_owned();
            let stage = Some(PipelineMembership { group, stage, stages: 2, chunk_tokens: 4_096, activation_bytes: 0 });
            let capabilities = InstanceCapabilities { stage, ..InstanceCapabilities::default() };
            RegisterCapabilities { register: register(name, InstancePart::Prefill, 0), capabilities }
        };
        for (name, stage) in [("s0", 0), ("s1", 1)] {
            assert!(engine.call(&member(name, stage)).await.expect("room").fresh);
        }
        let error = engine.call(&member("s2", 1)).await.expect_err("the stage is taken");
        assert_eq!(code(&error), RefusalCode::AlreadyExists as u16);
        let error = engine.call(&member("s2", 2)).await.expect_err("there are two");
        assert_eq!(code(&error), RefusalCode::BadRequest as u16);
        let on_terms = |request: &str| {
            let (schedule, terms) = (schedule(request, prompt(1, 4_096)), RequestTerms::default());
            ScheduleOnTerms { schedule, terms, ended: Vec::new(), finished: Vec::new() }
        };
        let alone = assigned(router.call(&on_terms("alone")).await.expect("served"));
        let end = UpdateRequest { reservation: alone.reservation, step: RequestStep::Ended };
        router.call(&end).await.expect("booked");
        let answer = router.call(&ScheduleWithGroups { on_terms: on_terms("both") }).await.expect("served");
        let ScheduleReply::AssignedGroup(both) = answer else { panic!("a group, not {answer:?}") };
        assert_eq!((&*both.assignment.prefill, both.group.stages.len()), ("s1", 2));
        let explained = router.call(&ExplainPlacement { request: "both".to_owned() }).await.expect("known");
        assert_eq!(explained.group, Some(both.group));
    });
}

#[test]
fn operators_hold_instances_and_set_the_placement_policy() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let admin = client(control.local(), Role::Admin).await;
        instances(&router, &["p0", "p1"]).await;
        let shown = router.call(&ShowPlacement).await.expect("hosted");
        let first = SetPlacement { policy: PlacementPolicy::Kvplane, ttft_ns: 0, tbt_ns: 0 };
        assert_eq!(shown, Placement { set: first, held: Vec::new() });
        let hold = HoldInstance { instance: "p0".to_owned(), held: true };
        let error = router.call(&hold).await.expect_err("a scheduler");
        assert_eq!(code(&error), RefusalCode::NotPermitted as u16);
        assert_eq!(admin.call(&hold).await.expect("known").requests, 0);
        let error = admin.call(&HoldInstance { instance: "x".to_owned(), held: true }).await.expect_err("unknown");
        assert_eq!(code(&error), RefusalCode::NotFound as u16);
        for at in 0..10 {
            let placed = assigned(router.call(&schedule(&format!("a{at}"), prompt(at, 4))).await.expect("served"));
            assert_eq!(&*placed.prefill, "p1");
            let end = UpdateRequest { reservation: placed.reservation, step: RequestStep::Ended };
            router.call(&end).await.expect("booked");
        }
        let set = SetPlacement { policy: PlacementPolicy::Kvplane, ttft_ns: 1, tbt_ns: 0 };
        admin.call(&set).await.expect("an operator");
        let shown = router.call(&ShowPlacement).await.expect("hosted");
        assert_eq!(shown, Placement { set, held: vec!["p0".to_owned()] });
        let refused = router.call(&schedule("b", prompt(90, 4))).await.expect("answered");
        assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::Ttft, .. }), "{refused:?}");
    });
}

#[test]
fn assignment_of_a_queued_request_reaches_a_stream_that_opens_late() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        instances(&router, &["p0"]).await;
        let mut reservations = Vec::new();
        for at in 0..4 {
            let answer = router.call(&schedule(&format!("r{at}"), prompt(at, 2_000))).await.expect("served");
            reservations.push(match answer {
                ScheduleReply::Assigned(assignment) => assignment.reservation,
                ScheduleReply::Queued { reservation, .. } => reservation,
                other => panic!("there is room, not {other:?}"),
            });
        }
        let end = |reservation| UpdateRequest { reservation, step: RequestStep::Ended };
        router.call(&end(reservations[0])).await.expect("booked");
        // The request was assigned while no watch was open.
        let mut watch = router.stream(&WatchAssignments { client: 7 }).await.expect("a stream");
        let told = watch.next().await.expect("told again");
        let second = assigned(told.answer);
        assert!(reservations[1..].contains(&second.reservation));
        router.call(&end(second.reservation)).await.expect("booked");
        let third = watch.next().await.expect("told");
        assert_ne!(third.request, told.request);
        assert_eq!(&*assigned(third.answer).prefill, "p0");
    });
}

#[test]
fn reports_travel_as_datagrams_and_silence_is_noticed() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let engine = client(control.local(), Role::Client).await;
        engine.call(&register("loud", InstancePart::Mixed, 100_000_000)).await.expect("room");
        engine.call(&register("mute", InstancePart::Mixed, 100_000_000)).await.expect("room");
        let mut watch = router.stream(&WatchInstances).await.expect("a stream");
        assert_eq!(watch.next().await.expect("a table").instances.len(), 2);
        let (reports, done) = tokio::sync::oneshot::channel::<()>();
        let telling = async {
            let mut done = done;
            for seq in 1.. {
                engine.tell(&load("loud", seq)).await.expect("sent");
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(20)) => {}
                    _ = &mut done => return,
                }
            }
        };
        let watching = async {
            // Suspect first, then removed.
            let mut suspect = false;
            loop {
                let table = watch.next().await.expect("a table");
                suspect |= table.instances.iter().any(|row| &*row.instance == "mute" && row.suspect);
                if table.instances.len() == 1 {
                    assert_eq!((suspect, &*table.instances[0].instance), (true, "loud"));
                    break;
                }
            }
            let answer = router.call(&schedule("a", prompt(1, 10))).await.expect("served");
            assert_eq!(&*assigned(answer).prefill, "loud");
            drop(reports);
        };
        tokio::join!(telling, watching);
    });
}

#[test]
fn a_lost_instances_requests_go_elsewhere() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        instances(&router, &["p0", "p1"]).await;
        let placed = assigned(router.call(&schedule("a", prompt(1, 100))).await.expect("served"));
        let (tenant, instance) = (String::new(), placed.prefill.to_string());
        router.call(&DeregisterInstance { tenant, instance, incarnation: 1 }).await.expect("known");
        let step = RequestStep::Alive;
        let error = router.call(&UpdateRequest { reservation: placed.reservation, step }).await.expect_err("lost");
        assert!(error.to_string().contains("rescheduled"), "{error}");
        let again = Reschedule { reservation: placed.reservation, failed: vec![placed.prefill.to_string()] };
        let other = assigned(router.call(&again).await.expect("served"));
        assert_ne!(other.prefill, placed.prefill);
        // Without an instance left, requests are rejected with that reason.
        let (tenant, instance) = (String::new(), other.prefill.to_string());
        router.call(&DeregisterInstance { tenant, instance, incarnation: 1 }).await.expect("known");
        let refused = router.call(&schedule("b", prompt(2, 100))).await.expect("served");
        assert!(matches!(refused, ScheduleReply::Refused { why: ScheduleRefusal::NoInstance, .. }), "{refused:?}");
    });
}

#[test]
fn gaps_are_replayed_over_the_wire() {
    let control = start();
    run(async {
        let engine = client(control.local(), Role::Client).await;
        instances(&engine, &["p0"]).await;
        let long = prompt(1, 10);
        engine.call(&cache("p0", 0, long[..2].to_vec())).await.expect("taken");
        let taken = engine.call(&cache("p0", 2, long.clone())).await.expect("answered");
        assert_eq!((taken.next, taken.wanted), (1, CacheWanted::Replay));
        let taken = engine.call(&cache("p0", 1, long)).await.expect("answered");
        assert_eq!(taken.next, 2);
    });
}

#[test]
fn rights_limits_and_nonsense() {
    let control = start();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let engine = client(control.local(), Role::Client).await;
        instances(&engine, &["p0"]).await;
        let error = engine.call(&schedule("a", prompt(1, 9))).await.expect_err("not a client's to ask");
        assert_eq!(code(&error), RefusalCode::NotPermitted as u16);
        let mut elsewhere = schedule("a", prompt(1, 9));
        elsewhere.context.model = "other".to_owned();
        let error = router.call(&elsewhere).await.expect_err("nobody serves it");
        assert_eq!(code(&error), RefusalCode::NotFound as u16);
        let short = Schedule { tokens: 1, ..schedule("a", prompt(1, 9)) };
        assert_eq!(code(&router.call(&short).await.expect_err("bad")), RefusalCode::BadRequest as u16);
        let thief = ReportLoad { tenant: "other".to_owned(), ..load("p0", 1) };
        assert_eq!(code(&engine.call(&thief).await.expect_err("bad")), RefusalCode::NotPermitted as u16);
        let old = RegisterInstance { incarnation: 0, ..register("p0", InstancePart::Prefill, 0) };
        assert_eq!(code(&engine.call(&old).await.expect_err("bad")), RefusalCode::StaleIncarnation as u16);
        // More hashes than fit a message are not sent; the connection stays open.
        let error = router.call(&schedule("a", prompt(1, 150_000))).await.expect_err("too large");
        assert!(matches!(error, CallError::BadRequest(_)), "{error}");
        // A refused report affects no other caller.
        engine.tell(&load("nobody", 1)).await.expect("sent");
        assert!(matches!(router.call(&schedule("a", prompt(1, 9))).await, Ok(ScheduleReply::Assigned(_))));
    });
}

#[test]
fn without_a_conductor_calls_say_how_to_have_one() {
    let control = ControlServer::start(ControlConfig::new("test")).expect("a control plane");
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let error = router.call(&schedule("a", prompt(1, 9))).await.expect_err("none");
        assert!(error.to_string().contains("--conductor"), "{error}");
    });
}
