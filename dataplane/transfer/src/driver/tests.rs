//! Panics of threads that hold the lock: all waiters are woken with an error, and nothing can be submitted afterwards.

use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Wake;

use kvplane_client::{PeerAddress, PeerId};
use kvplane_engine::{HostConfig, cpu};

use super::*;
use crate::batch::{Batch, Parts, TaskState};
use crate::config::{self, TransferEngineConfig};
use crate::segment::Remote;
use crate::segment::peers::Peers;

const PATIENCE: Duration = Duration::from_secs(60);

/// Driver, and batches to a peer that never answers.
struct Rig {
    driver: Arc<Driver>,
    _silent: TcpListener,
    remote: Arc<Remote>,
}

impl Rig {
    fn new() -> Self {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let settings = TransferEngineConfig { shared_memory: false, ..TransferEngineConfig::default() };
        let client = config::client(&settings, true).expect("settings");
        let initiator = Initiator::new(client, &HostConfig::default(), Pacing::Park).expect("a poller");
        let mut peers = Peers::default();
        let settings = TransferEngineConfig { batches: 100, pacing: Pacing::Park, ..settings };
        let driver = Driver::new(initiator, &settings, peers.departures().clone()).expect("a descriptor");
        let address = PeerAddress::native(silent.local_addr().expect("bound"), None);
        let remote = Arc::new(Remote::unknown("silent", peers.at(&address, "silent")));
        Self { driver, _silent: silent, remote }
    }

    fn submit(&self) -> Result<Batch, Error> {
        self.driver.admit(1)?;
        let parts = Parts { tasks: 1, slices: 1, remotes: vec![Arc::clone(&self.remote)], ..Parts::default() };
        let state = Arc::new(State::new(1, parts));
        let deadline_ns = cpu::monotonic_ns() + 2 * PATIENCE.as_nanos() as u64;
        let work = Work {
            requests: vec![Request::OpenSegment(PeerId(0))],
            options: SubmitOptions::until(deadline_ns),
            stream: None,
        };
        self.driver.submit(&state, work);
        Ok(Batch::new(state, Arc::clone(&self.driver)))
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn everybody_is_told(progress: bool, drill: impl Fn(&Driver) + Sync) {
    let rig = Rig::new();
    let thread = progress.then(|| rig.driver.start_progress(0).expect("a thread"));
    let batches: Vec<Batch> = (0..4).map(|_| rig.submit().expect("submitted")).collect();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = batches.iter().map(|batch| scope.spawn(|| batch.wait_for(PATIENCE))).collect();
        while rig.driver.foreground.load(Ordering::SeqCst) < batches.len() {
            std::thread::yield_now();
        }
        assert!(scope.spawn(|| drill(&rig.driver)).join().is_err(), "the drill panics");
        for one in waiting {
            assert_eq!(one.join().expect("no panic of theirs").expect("the wait ends").state, TaskState::Failed);
        }
    });
    for batch in &batches {
        assert!(batch.problem().is_some_and(|why| why.contains("panicked")), "{:?}", batch.problem());
    }
    let driver = &rig.driver;
    assert_eq!((driver.in_flight(), driver.foreground.load(Ordering::SeqCst)), (0, 0));
    assert!(!driver.led.load(Ordering::SeqCst));
    let error = rig.submit().expect_err("nothing starts any more").to_string();
    assert!(error.contains("panicked") && error.contains("stop the engine"), "{error}");
    driver.stop();
    thread.into_iter().for_each(|thread| thread.join().expect("it ends"));
}

#[test]
fn a_panic_in_a_short_operation_fails_all_batches() {
    for progress in [false, true] {
        everybody_is_told(progress, |driver| driver.with(|_| panic!("a drill")));
    }
}

#[test]
fn a_panic_of_the_leader_fails_all_batches() {
    for progress in [false, true] {
        everybody_is_told(progress, |driver| {
            driver.wanted.fetch_add(1, Ordering::SeqCst);
            driver.doorbell.ring();
            let core = driver.core.lock().expect("whole");
            driver.wanted.fetch_sub(1, Ordering::SeqCst);
            driver.lead(core, false, None, || panic!("a drill"));
        });
    }
}

/// No thread waits; the progress thread completes the batch.
#[test]
fn a_panic_wakes_futures_and_descriptors() {
    let rig = Rig::new();
    let thread = rig.driver.start_progress(0).expect("a thread");
    let batch = rig.submit().expect("submitted");
    let flag = Arc::new(Flag(AtomicBool::new(false)));
    let waker = std::task::Waker::from(Arc::clone(&flag));
    let mut future = std::pin::pin!(batch.completed());
    assert!(Future::poll(future.as_mut(), &mut std::task::Context::from_waker(&waker)).is_pending());
    let panicked = catch_unwind(AssertUnwindSafe(|| rig.driver.with(|_| panic!("a drill"))));
    assert!(panicked.is_err());
    let start = Instant::now();
    while !flag.0.load(Ordering::SeqCst) {
        assert!(start.elapsed() < PATIENCE, "never woken");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(batch.status().state, TaskState::Failed);
    rig.driver.stop();
    thread.join().expect("it ends");
}
