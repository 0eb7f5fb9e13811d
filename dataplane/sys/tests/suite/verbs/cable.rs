//! A real device loses its link and regains it. Only in the rig: its devices are on interfaces `nicI`, whose cables end
//! in `swI`.

use super::bed::{DEADLINE, End, connect, pair};
use kvplane_sys::verbs::{AsyncEvent, Device, Operation, Status};
use kvplane_sys::{Interest, Poller};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs in the rig, with devices `rxe0` and another.
pub(crate) fn pulled_and_put_back(first: &Device, second: &Device) {
    if first.name() != "rxe0" || second.name() == "rxe0" {
        return eprintln!("skipped: the cable of {} is not ours to pull", first.name());
    }
    let (mut a, mut b) = pair(first, second);
    let to = b.remote(0);
    cable("down");
    assert_eq!(next_event(&a), AsyncEvent::PortError { port: a.port.port });
    assert!(a.context.active_port().is_err());
    a.post(1, Operation::Write { to }, 0, 4096);
    let status = a.wait_one().status;
    assert!(matches!(status, Status::Flushed | Status::RetryExceeded), "{status:?}");
    cable("up");
    assert_eq!(next_event(&a), AsyncEvent::PortActive { port: a.port.port });
    // A failed queue pair recovers by a reset of both ends.
    a.queue_pair.reset(|_| panic!("all requests were retired")).expect("reset");
    b.queue_pair.reset(|_| panic!("all requests were retired")).expect("reset");
    connect(&mut a, &mut b);
    a.post(2, Operation::Write { to }, 0, 4096);
    assert_eq!(a.wait_one().status, Status::Success);
    eprintln!("{} to {}: a cable pulled and put back", first.name(), second.name());
}

fn cable(state: &str) {
    let status = Command::new("ip").args(["link", "set", "sw0", state]).status().expect("ip");
    assert!(status.success(), "ip link set sw0 {state}");
}

/// Returns the next event about the port's link; other events are skipped.
fn next_event(end: &End) -> AsyncEvent {
    let poller = Poller::new().expect("poller");
    poller.add(end.context.as_fd(), 1, Interest::Readable).expect("watched");
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < DEADLINE, "no event arrived");
        match end.context.next_event().expect("asked") {
            Some(event @ (AsyncEvent::PortError { .. } | AsyncEvent::PortActive { .. })) => return event,
            Some(other) => eprintln!("{other:?}"),
            None => {
                poller.wait(Duration::from_millis(500), &mut Vec::new()).expect("waited");
            }
        }
    }
}
