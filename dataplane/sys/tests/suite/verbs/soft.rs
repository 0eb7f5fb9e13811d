//! Cases that only software devices can produce at will: ports set down, devices removed, requests that wait.

use super::bed::{End, MEMORY_BYTES, connect, fill, options, pair, pattern, read};
use kvplane_soft_verbs::{Loopback, SoftPort, null_verbs};
use kvplane_sys::verbs::{
    Access, AsyncEvent, CompletionQueue, Device, Entry, Mtu, Operation, PortState, QueuePair, QueuePairOptions,
    QueueState, Status, VerbsError,
};
use kvplane_sys::{Interest, IoBuf, Poller, Region, RegionOptions};
use proptest::prelude::*;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

fn fabric(devices: usize) -> (Loopback, Vec<Device>) {
    let fabric = Loopback::new(&vec![SoftPort::default(); devices]);
    let devices = fabric.verbs().devices().expect("devices");
    (fabric, devices)
}

fn write_to(peer: &End, offset: usize) -> Operation {
    Operation::Write { to: peer.remote(offset) }
}

#[test]
fn ports_report_their_configuration() {
    let fast = |giga: u64| SoftPort { bits_per_second: giga * 1_000_000_000, mtu: Mtu::Bytes1024 };
    let fabric = Loopback::new(&[fast(100), fast(400), fast(800), fast(250)]);
    let devices = fabric.verbs().devices().expect("devices");
    let speeds: Vec<u64> = devices
        .iter()
        .map(|device| device.open().expect("opened").port(1).expect("port").bits_per_second / 1_000_000_000)
        .collect();
    assert_eq!(speeds, [100, 400, 800, 200], "the next lower existing speed");
    let context = devices[0].open().expect("opened");
    assert_eq!(context.port(1).expect("port").active_mtu, Mtu::Bytes1024);
    assert_eq!(context.gids(1).expect("gids")[0].gid.to_string(), "::ffff:10.88.0.1");
    let error = fabric.verbs().device("mlx5_0").expect_err("no such device").to_string();
    assert!(error.contains("mlx5_0") && error.contains("loop0, loop1, loop2, loop3"), "{error}");
}

#[test]
fn a_port_set_down_flushes_and_reports_an_event() {
    let (fabric, devices) = fabric(2);
    let (mut a, mut b) = pair(&devices[0], &devices[1]);
    let poller = Poller::new().expect("poller");
    poller.add(a.context.as_fd(), 1, Interest::Readable).expect("watched");
    assert_eq!(a.context.next_event().expect("asked"), None);
    fabric.pause(0, true);
    a.push(1, write_to(&b, 0), 0, 64);
    a.push(2, write_to(&b, 0), 0, 64);
    a.queue_pair.flush(false).expect("posted");
    assert!(a.poll().is_empty(), "on its way");
    fabric.set_port(0, false);
    let over = a.wait(2);
    assert!(over.iter().all(|over| over.status == Status::Flushed), "{over:?}");
    let mut ready = Vec::new();
    poller.wait(Duration::from_secs(20), &mut ready).expect("waited");
    assert_eq!(ready.len(), 1);
    assert_eq!(a.context.next_event().expect("asked"), Some(AsyncEvent::PortError { port: 1 }));
    assert_eq!(a.context.next_event().expect("asked"), None);
    assert_eq!(b.context.next_event().expect("asked"), None, "the peer's own port is up");
    assert_eq!(a.context.port(1).expect("port").state, PortState::Down);
    let error = a.context.active_port().expect_err("none").to_string();
    assert!(error.contains("loop0") && error.contains("port 1 is Down"), "{error}");
    // The peer detects it by a request.
    b.post(3, write_to(&a, 0), 0, 64);
    assert_eq!(b.wait_one().status, Status::RetryExceeded);
    fabric.set_port(0, true);
    fabric.pause(0, false);
    assert_eq!(a.context.next_event().expect("asked"), Some(AsyncEvent::PortActive { port: 1 }));
    a.queue_pair.reset(|_| panic!("all requests were retired")).expect("reset");
    b.queue_pair.reset(|_| panic!("all requests were retired")).expect("reset");
    connect(&mut a, &mut b);
    fill(&a.region, 1, 0, 64);
    a.post(4, write_to(&b, 0), 0, 64);
    assert_eq!(a.wait_one().status, Status::Success);
    assert_eq!(read(&b.region, 0, 64), pattern(1, 0, 64));
}

#[test]
fn a_removed_device_fails_and_stays_away() {
    let (fabric, devices) = fabric(2);
    let (mut a, _b) = pair(&devices[0], &devices[1]);
    a.receive(1, 0, 64);
    fabric.remove(0);
    assert_eq!(a.context.next_event().expect("asked"), Some(AsyncEvent::DeviceFatal));
    assert_eq!(a.wait_one().status, Status::Flushed);
    fabric.set_port(0, true);
    assert!(a.context.active_port().is_err(), "no cable helps");
    assert!(matches!(devices[0].open(), Err(VerbsError::Refused { .. })));
}

#[test]
fn memory_stays_registered_while_requests_wait() {
    let (fabric, devices) = fabric(2);
    let (mut a, b) = pair(&devices[0], &devices[1]);
    let before = fabric.registered(0);
    let region = Region::allocate(&RegionOptions::new("sent", 4096)).expect("memory");
    fill(&region, 2, 0, 4096);
    let memory = a.domain.register(&IoBuf::whole(Arc::clone(&region)), Access::LOCAL).expect("registered");
    fabric.pause(0, true);
    let piece = [memory.piece(0, 4096).expect("inside")];
    let payload = kvplane_sys::verbs::Payload::Pieces(&piece);
    a.queue_pair.push(&kvplane_sys::verbs::Request::new(1, write_to(&b, 0), payload)).expect("pushed");
    a.queue_pair.flush(true).expect("posted");
    let weak = Arc::downgrade(&region);
    drop((memory, region));
    assert_eq!((weak.strong_count(), fabric.registered(0)), (1, before + 1), "the request holds it");
    fabric.pause(0, false);
    assert_eq!((weak.strong_count(), fabric.registered(0)), (1, before + 1), "until its completion is retired");
    assert_eq!(a.wait_one().status, Status::Success);
    assert_eq!((weak.strong_count(), fabric.registered(0), fabric.violations()), (0, before, 0));
    assert_eq!(read(&b.region, 0, 4096), pattern(2, 0, 4096));
}

#[test]
fn dropped_queue_pairs_move_no_more_bytes() {
    let (fabric, devices) = fabric(2);
    let (mut a, b) = pair(&devices[0], &devices[1]);
    fill(&a.region, 3, 0, 64);
    fill(&b.region, 4, 0, 64);
    fabric.pause(0, true);
    a.post(1, write_to(&b, 0), 0, 64);
    // In an unusual order: objects that are needed stay alive until they are not.
    let End { queue_pair, queue, memory, domain, context, channel, region, .. } = a;
    drop((context, domain, queue, channel, memory, region));
    assert_eq!((fabric.registered(0), fabric.violations()), (1, 0));
    drop(queue_pair);
    assert_eq!((fabric.registered(0), fabric.violations()), (0, 0));
    fabric.pause(0, false);
    assert_eq!(read(&b.region, 0, 64), pattern(4, 0, 64));
}

#[test]
fn unsignalled_requests_before_a_flush_are_not_reported_as_successful() {
    let (fabric, devices) = fabric(2);
    let (mut a, b) = pair(&devices[0], &devices[1]);
    let memory = a.memory.clone();
    let piece = [memory.piece(0, 64).expect("inside")];
    let payload = kvplane_sys::verbs::Payload::Pieces(&piece);
    let silent = |token| kvplane_sys::verbs::Request::new(token, write_to(&b, 0), payload);
    a.queue_pair.push(&silent(1)).expect("pushed");
    a.queue_pair.flush(false).expect("posted");
    assert!(a.poll().is_empty() && a.queue_pair.has_silent_tail(), "completed, but not reported");
    fabric.pause(0, true);
    a.queue_pair.push(&silent(2)).expect("pushed");
    a.queue_pair.flush(false).expect("posted");
    a.queue_pair.fail().expect("failed");
    let over: Vec<_> = a.wait(2).iter().map(|over| (over.token, over.status)).collect();
    assert_eq!(over, [(1, Status::Flushed), (2, Status::Flushed)]);
    // With an error that names the rejected request, those before it were executed.
    fabric.pause(0, false);
    let (mut a, b) = pair(&devices[0], &devices[1]);
    let memory = a.memory.clone();
    let piece = [memory.piece(0, 64).expect("inside")];
    let payload = kvplane_sys::verbs::Payload::Pieces(&piece);
    let bad = Operation::Write { to: kvplane_sys::verbs::Remote { address: 0, key: 0 } };
    for (token, operation) in [(1, write_to(&b, 0)), (2, bad), (3, write_to(&b, 0))] {
        a.queue_pair.push(&kvplane_sys::verbs::Request::new(token, operation, payload)).expect("pushed");
    }
    a.queue_pair.flush(false).expect("posted");
    let over: Vec<_> = a.wait(3).iter().map(|over| (over.token, over.status)).collect();
    assert_eq!(over, [(1, Status::Success), (2, Status::RemoteAccess), (3, Status::Flushed)]);
    let event = b.context.next_event().expect("asked");
    assert_eq!(event, Some(AsyncEvent::QueuePairAccess { qp_num: b.queue_pair.qp_num() }));
}

#[test]
fn a_message_too_long_fails_both_ends() {
    let (_fabric, devices) = fabric(2);
    let (mut a, mut b) = pair(&devices[0], &devices[1]);
    b.receive(1, 0, 32);
    a.post(2, Operation::Send, 0, 33);
    assert_eq!(a.wait_one().status, Status::RemoteInvalid);
    assert_eq!(b.wait_one().status, Status::LocalLength);
    assert_eq!(a.queue_pair.state(), QueueState::Error);
}

#[test]
fn completions_without_room_fail_the_queue_and_hold_the_memory() {
    let (fabric, devices) = fabric(2);
    let (mut a, mut b) = (End::new(&devices[0], &options(), false), End::new(&devices[1], &options(), true));
    let small = QueuePairOptions { send_depth: 4, ..options() };
    let queue = CompletionQueue::new(&b.context, 4, None).expect("queue");
    assert!(matches!(queue.arm(), Err(VerbsError::NotOffered { .. })), "no channel to signal");
    b.queue_pair = QueuePair::new(&b.domain, &queue, b.shared.as_ref(), &small).expect("queue pair");
    b.queue = queue;
    connect(&mut a, &mut b);
    for token in 0..6 {
        b.receive(token, 0, 64);
        a.push(token, Operation::Send, 0, 64);
    }
    a.queue_pair.flush(true).expect("posted");
    a.wait(6);
    let mut entries = Entry::many(8);
    assert!(b.queue.poll(&mut entries).is_err());
    assert_eq!(b.context.next_event().expect("asked"), Some(AsyncEvent::CompletionQueueError));
    assert_eq!(b.shared.as_ref().expect("shared").room(), 26, "what was never retired is not used again");
    drop((a, b));
    assert_eq!((fabric.violations(), fabric.registered(1)), (0, 0));
}

#[test]
fn queue_pairs_on_several_threads() {
    let (fabric, devices) = fabric(2);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let devices = &devices;
            scope.spawn(move || {
                let (mut a, b) = pair(&devices[seed as usize % 2], &devices[1]);
                fill(&a.region, seed, 0, MEMORY_BYTES);
                for round in 0..64 {
                    a.post(round, write_to(&b, round as usize * 16_384), round as usize * 16_384, 16_384);
                    assert_eq!(a.wait_one().status, Status::Success);
                }
                assert!(read(&b.region, 0, MEMORY_BYTES) == pattern(seed, 0, MEMORY_BYTES));
            });
        }
    });
    assert_eq!((fabric.violations(), fabric.registered(0), fabric.registered(1)), (0, 0, 0));
}

#[test]
fn the_null_device_completes_and_moves_nothing() {
    let device = null_verbs().device("null0").expect("device");
    let (mut a, b) = pair(&device, &device);
    fill(&a.region, 5, 0, 4096);
    for token in 0..64 {
        a.push(token, write_to(&b, 0), 0, 4096);
        if a.queue_pair.unsent() == 32 {
            a.queue_pair.flush(false).expect("posted");
        }
    }
    assert!(a.wait(64).iter().all(|over| over.status == Status::Success));
    assert_eq!(read(&b.region, 0, 4096), vec![0; 4096]);
}

#[test]
fn the_null_device_carries_messages() {
    let device = null_verbs().device("null0").expect("device");
    let (mut a, mut b) = pair(&device, &device);
    fill(&a.region, 6, 0, 4096);
    b.receive(7, 8192, 4096);
    a.post(1, Operation::Send, 0, 4096);
    assert_eq!(a.wait_one().status, Status::Success);
    let received = b.wait_one();
    assert_eq!((received.token, received.status), (7, Status::Success));
    assert!(read(&b.region, 8192, 4096) == pattern(6, 0, 4096));
}

#[derive(Clone, Debug)]
enum Step {
    Write { from: usize, to: usize, bytes: usize },
    Read { from: usize, to: usize, bytes: usize },
    Flush { signal: bool },
    Poll,
    Pause(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = || (0..60_000usize, 0..60_000usize, 0..5_000usize);
    let step = prop_oneof![
        4 => range().prop_map(|(from, to, bytes)| Step::Write { from, to, bytes }),
        3 => range().prop_map(|(from, to, bytes)| Step::Read { from, to, bytes }),
        3 => any::<bool>().prop_map(|signal| Step::Flush { signal }),
        2 => Just(Step::Poll),
        1 => any::<bool>().prop_map(Step::Pause),
    ];
    proptest::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Requests in any order, flushed and polled in any order, have the effect of sequential copies, and each token is
    /// retired once, in order.
    #[test]
    fn requests_do_what_copies_in_order_would(steps in steps()) {
        let (fabric, devices) = fabric(2);
        let small = QueuePairOptions { send_depth: 16, batch: 8, signal_every: 5, ..options() };
        let (mut a, mut b) = (End::new(&devices[0], &small, false), End::new(&devices[1], &small, false));
        connect(&mut a, &mut b);
        fill(&a.region, 6, 0, 65_536);
        fill(&b.region, 7, 0, 65_536);
        let (mut ours, mut theirs) = (pattern(6, 0, 65_536), pattern(7, 0, 65_536));
        let (mut next, mut over) = (0, Vec::new());
        for step in steps {
            let move_it = match step {
                Step::Write { from, to, bytes } => Some((write_to(&b, to), from, to, bytes, true)),
                Step::Read { from, to, bytes } => {
                    Some((Operation::Read { from: b.remote(from) }, to, from, bytes, false))
                }
                Step::Flush { signal } => {
                    a.queue_pair.flush(signal).expect("posted");
                    None
                }
                Step::Poll => {
                    over.extend(a.poll());
                    None
                }
                Step::Pause(paused) => {
                    fabric.pause(0, paused);
                    None
                }
            };
            let Some((operation, local, remote, bytes, write)) = move_it else { continue };
            let memory = a.memory.clone();
            let piece = [memory.piece(local, bytes as u32).expect("inside")];
            let payload = kvplane_sys::verbs::Payload::Pieces(&piece);
            if a.queue_pair.push(&kvplane_sys::verbs::Request::new(next, operation, payload)).is_ok() {
                next += 1;
                if write {
                    theirs[remote..remote + bytes].copy_from_slice(&ours[local..local + bytes]);
                } else {
                    ours[local..local + bytes].copy_from_slice(&theirs[remote..remote + bytes]);
                }
            }
        }
        fabric.pause(0, false);
        a.queue_pair.flush(true).expect("posted");
        over.extend(a.poll());
        if a.queue_pair.has_silent_tail() {
            while a.queue_pair.room() == 0 {
                over.extend(a.poll());
            }
            a.post(next, write_to(&b, 0), 0, 0);
            next += 1;
        }
        let missing = next as usize - over.len();
        over.extend(a.wait(missing));
        prop_assert!(over.iter().map(|over| over.token).eq(0..next));
        prop_assert!(over.iter().all(|over| over.status == Status::Success));
        prop_assert!(read(&a.region, 0, 65_536) == ours && read(&b.region, 0, 65_536) == theirs);
        prop_assert_eq!(fabric.violations(), 0);
    }
}
