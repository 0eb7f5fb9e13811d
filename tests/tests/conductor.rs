//! Tests of a scheduler's connection to the Conductor: placement by the Conductor, and by the last table without it.

use std::time::{Duration, Instant};

use kvplane::rpc::conductor::{
    BlockTier, ExplainRequest, InstancePart, PromptContext, QueryPrefix, RegisterInstance, RequestStep, Schedule,
    ScheduleMode, ScheduleRefusal, ScheduleReply, UpdateRequest,
};
use kvplane::rpc::message::{ListTasks, TaskState};
use kvplane::rpc::placement::ShowCopies;
use kvplane::rpc::{ClientConfig, Role};
use kvplane::{Client, Control, ControlLink, Decision, Scheduler};
use kvplane_server::{ConductorConfig, ControlConfig, ControlHandle, ControlServer};

mod bed;

use bed::Bed;

const PATIENCE: Duration = Duration::from_secs(20);

fn start() -> ControlHandle {
    let mut config = ControlConfig::new("test");
    config.conductor = Some(ConductorConfig::default());
    ControlServer::start(config).expect("a control plane")
}

fn control(handle: &ControlHandle, role: Role) -> Control {
    Control::Explicit(Box::new(ClientConfig::local(handle.local(), role, "test").expect("an identity")))
}

fn register(instance: &str) -> RegisterInstance {
    RegisterInstance { capacity_tokens: 1_000_000, ..RegisterInstance::new(instance, "m", 16, InstancePart::Mixed) }
}

fn request(id: &str) -> Schedule {
    Schedule {
        client: 0,
        request: id.to_owned(),
        context: PromptContext { model: "m".to_owned(), block_tokens: 16, ..PromptContext::default() },
        tokens: 32_000,
        hashes: (0..2_000).collect(),
        wait_ns: 0,
        mode: ScheduleMode::Reserve,
        barred: Vec::new(),
    }
}

#[test]
fn without_the_conductor_requests_go_by_the_last_table() {
    let handle = start();
    let engine = ControlLink::to(&control(&handle, Role::Client), Role::Client).expect("a line");
    for name in ["a", "b"] {
        engine.call(register(name)).expect("room");
    }
    let scheduler = Scheduler::connect(&control(&handle, Role::Scheduler), Duration::from_secs(4)).expect("a line");
    assert!(scheduler.wait_for_table(PATIENCE, |table| table.instances.len() == 2));
    let Decision::Booked(first) = scheduler.schedule(request("1"), PATIENCE).expect("served") else {
        panic!("the Conductor is there");
    };
    drop((engine, handle));
    let decision = scheduler.schedule(request("2"), PATIENCE).expect("decided here");
    let Decision::Local { prefill, decode } = &decision else { panic!("nobody to ask: {decision:?}") };
    assert!(["a", "b"].contains(&prefill.as_str()) && decode.is_some());
    // Requests in flight count, so that the second of two with the same prefix is placed elsewhere.
    let other = scheduler.schedule(Schedule { barred: vec![], ..request("3") }, PATIENCE).expect("decided here");
    let Decision::Local { prefill: elsewhere, .. } = &other else { panic!("nobody to ask: {other:?}") };
    scheduler.ended(&decision);
    scheduler.ended(&other);
    assert!(["a", "b"].contains(&elsewhere.as_str()));
    let kept = Schedule { barred: vec!["a".to_owned()], ..request("4") };
    let Ok(Decision::Local { prefill, .. }) = scheduler.schedule(kept, PATIENCE) else { panic!("decided here") };
    assert_eq!(prefill, "b");
    assert!(scheduler.update(first.reservation, RequestStep::Ended).is_err());
}

#[test]
fn queued_requests_are_placed_and_late_ones_are_rejected() {
    let handle = start();
    let engine = ControlLink::to(&control(&handle, Role::Client), Role::Client).expect("a line");
    engine.call(register("a")).expect("room");
    let scheduler = Scheduler::connect(&control(&handle, Role::Scheduler), Duration::from_secs(10)).expect("a line");
    let different = |id: &str, seed: u64| Schedule { hashes: (seed..seed + 2_000).collect(), ..request(id) };
    let Decision::Booked(first) = scheduler.schedule(different("1", 1 << 40), PATIENCE).expect("served") else {
        panic!("the instance is free");
    };
    let short = scheduler.schedule(different("2", 2 << 40), Duration::from_millis(50)).expect("answered");
    assert!(matches!(short, Decision::Refused { why: ScheduleRefusal::Waited, .. }), "{short:?}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| scheduler.schedule(different("3", 3 << 40), PATIENCE).expect("answered"));
        scheduler.update(first.reservation, RequestStep::Ended).expect("booked");
        let third = waiting.join().expect("no panic");
        assert!(matches!(third, Decision::Booked(_)));
        // Its end is sent with the next request, which would wait for it.
        scheduler.ended(&third);
    });
    let fourth = scheduler.schedule(different("4", 4 << 40), PATIENCE).expect("answered");
    let gone = |id: &str| scheduler.call(ExplainRequest { request: id.to_owned() }).is_err();
    assert!(matches!(fourth, Decision::Booked(_)) && gone("3") && !gone("4"));
    // Without another request it follows by itself.
    scheduler.ended(&fourth);
    let until = Instant::now() + PATIENCE;
    while !gone("4") {
        assert!(Instant::now() < until, "the reservation has not ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Blocks that connectors put into the store are known to schedulers, whether they were put before or after the model
/// registered.
#[test]
fn blocks_in_the_store_are_known() {
    let bed = Bed::start(1, 16 << 20);
    let mut client = Client::connect(&bed.client_config(false)).expect("a client");
    let key = |hash: u64| format!("m@tp_rank:0@pp_rank:0@{hash:064x}");
    for hash in 1..=2 {
        client.put(key(hash).as_bytes(), b"kv").expect("room");
    }
    client.put(b"no block at all", b"kv").expect("room");
    let router = ControlLink::to(&bed.control_name(), Role::Scheduler).expect("a line");
    router.call(register("a")).expect("room");
    let until = |blocks: u32| {
        let end = Instant::now() + PATIENCE;
        let context = PromptContext { model: "m".to_owned(), block_tokens: 16, ..PromptContext::default() };
        let query = QueryPrefix { context, hashes: (1..=9).collect(), most: 4, tier: BlockTier::Ssd };
        loop {
            let found = router.call(query.clone()).expect("served");
            assert!(found.holders.is_empty());
            if found.pooled_tokens == blocks * 16 {
                return;
            }
            assert!(Instant::now() < end, "{blocks} blocks, not {} tokens", found.pooled_tokens);
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    until(2);
    for hash in [5, 4, 3] {
        client.put(key(hash).as_bytes(), b"kv").expect("room");
    }
    until(5);
    assert!(client.remove(key(3).as_bytes()).is_ok());
    until(2);
}

/// A prefix that many requests fetch from one node is replicated to a second one automatically.
#[test]
fn a_hot_prefix_is_replicated() {
    let bed = Bed::start_with(2, 16 << 20, |config| {
        config.cluster.replicas = 2;
        // The transfer of a block of 1 MiB takes a sixth of a second.
        config.conductor.iter_mut().for_each(|conductor| conductor.scheduler.nic_bytes_s = 6 << 20);
    });
    let mut client = Client::connect(&bed.client_config(false)).expect("a client");
    client.put(format!("m@tp_rank:0@{:016x}", 7).as_bytes(), b"kv").expect("room");
    let router = ControlLink::to(&bed.control_name(), Role::Scheduler).expect("a line");
    let tokens = 1 << 16;
    for instance in 0..16 {
        let name = format!("i{instance}");
        let spec = RegisterInstance { block_tokens: tokens, token_bytes: 16, ..register(&name) };
        router.call(spec).expect("room");
    }
    let context = PromptContext { model: "m".to_owned(), block_tokens: tokens, ..PromptContext::default() };
    let end = Instant::now() + PATIENCE;
    let mut number = 0;
    loop {
        for _ in 0..20 {
            number += 1;
            let mode = ScheduleMode::Now;
            let (context, hashes) = (context.clone(), vec![7]);
            let asked = Schedule { context, hashes, tokens, mode, ..request(&number.to_string()) };
            let ScheduleReply::Assigned(assigned) = router.call(asked).expect("served") else {
                panic!("bound at once")
            };
            let step = RequestStep::Ended;
            router.call(UpdateRequest { reservation: assigned.reservation, step }).expect("booked");
        }
        let shown = router.call(ShowCopies).expect("a Conductor");
        assert!(shown.possible && shown.failed == 0, "{shown:?}");
        if shown.made == 1 {
            assert_eq!((shown.prefixes, shown.coming, shown.bytes), (1, 0, 1 << 20), "{shown:?}");
            break;
        }
        assert!(Instant::now() < end, "no copy was made: {shown:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    // The replication was done by a task of the store.
    let tasks = router.call(ListTasks { tenant: None, id: None, after: 0 }).expect("a control plane").tasks;
    assert_eq!((tasks.len(), tasks[0].state, tasks[0].copied), (1, TaskState::Succeeded, 1), "{tasks:?}");
}
