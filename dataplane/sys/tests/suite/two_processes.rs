//! Two processes share a region, a ring and a doorbell in each direction, passed by descriptor. The child is this test
//! binary again: one test plays its role if it finds a socket's path in the environment.

use kvplane_sys::doorbell::event_fd;
use kvplane_sys::unix::{peer_credentials, recv_with_fds, send_with_fds};
use kvplane_sys::{
    HugePages, Interest, Poller, Region, RegionOptions, SharedDoorbell, ShmConsumer, ShmProducer, shm_ring,
};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const SOCKET: &str = "KVPLANE_SYS_TEST_SOCKET";
const CAPACITY: usize = 1024;
const THERE: usize = 4096;
const BACK: usize = 3 * 4096;
const REGION_BYTES: usize = 5 * 4096;
const RECORDS: u32 = 3_000;

/// One process's ends: outgoing and incoming records, the peer's doorbell and its own.
struct Link {
    out: ShmProducer,
    input: ShmConsumer,
    peer: SharedDoorbell,
    own: SharedDoorbell,
    poller: Poller,
}

impl Link {
    fn new(region: &Arc<Region>, first: bool, peer: OwnedFd, own: OwnedFd) -> Self {
        let (to, from) = if first { (THERE, BACK) } else { (BACK, THERE) };
        let (peer_flag, own_flag) = if first { (0, 128) } else { (128, 0) };
        let own = SharedDoorbell::new(Arc::clone(region), own_flag, own);
        let poller = Poller::new().expect("epoll");
        poller.add(own.fd(), 1, Interest::Readable).expect("added");
        Self {
            out: ShmProducer::new(Arc::clone(region), to, CAPACITY),
            input: ShmConsumer::new(Arc::clone(region), from, CAPACITY),
            peer: SharedDoorbell::new(Arc::clone(region), peer_flag, peer),
            own,
            poller,
        }
    }

    fn send(&mut self, record: &[u8]) {
        while self.out.push(&[record]).is_err() {
            std::thread::yield_now();
        }
        self.peer.ring();
    }

    /// Returns the next record; parks while there is none. A park that lasts 20 s is a lost wakeup.
    fn receive(&mut self) -> Vec<u8> {
        let mut record = Vec::new();
        let mut woken = Vec::new();
        while !self.input.pop(&mut record).expect("a sound peer") {
            self.own.prepare_sleep();
            if self.input.is_empty() {
                woken.clear();
                self.poller.wait(Duration::from_secs(20), &mut woken).expect("wait");
                assert!(!woken.is_empty(), "the doorbell did not ring");
            }
            self.own.awake();
            self.own.drain();
        }
        record
    }
}

fn record(number: u32) -> Vec<u8> {
    (0..number % 200).map(|i| (number + i) as u8).collect()
}

#[test]
fn records_cross_processes() {
    let name = format!("kvplane-two-processes-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).expect("socket");
    let mut child = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "two_processes::child_part", "--nocapture"])
        .env(SOCKET, &path)
        .spawn()
        .expect("child");
    listener.set_nonblocking(true).expect("a socket");
    let stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("the child does not connect: {error}"),
        }
        assert_eq!(child.try_wait().expect("child"), None, "the child ended early");
        std::thread::sleep(Duration::from_millis(1));
    };
    stream.set_nonblocking(false).expect("a socket");
    std::fs::remove_file(&path).expect("unlink");
    let peer = peer_credentials(&stream).expect("credentials");
    assert_eq!(peer.pid, child.id().cast_signed());

    let options =
        RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new("two processes", REGION_BYTES) };
    assert!(THERE + shm_ring::bytes_needed(CAPACITY) <= BACK);
    let region = Region::allocate(&options).expect("memory");
    let (bell_there, bell_back) = (event_fd().expect("eventfd"), event_fd().expect("eventfd"));
    let fds = [region.fd().expect("shared"), bell_there.as_fd(), bell_back.as_fd()];
    send_with_fds(&stream, b"!", &fds).expect("sent");
    let mut link = Link::new(&region, true, bell_there, bell_back);
    for number in 0..RECORDS {
        link.send(&record(number));
        assert_eq!(link.receive(), record(number + 1), "{number}");
    }
    assert!(child.wait().expect("child").success());
}

/// Answers record `n` with record `n + 1`. Does nothing unless started by the test above.
#[test]
fn child_part() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    let stream = UnixStream::connect(path).expect("the parent listens");
    let (_, fds) = recv_with_fds(&stream, &mut [0; 1], 3).expect("descriptors");
    let [memory, bell_there, bell_back]: [OwnedFd; 3] = fds.try_into().expect("three");
    let region = Region::map_shared(memory, REGION_BYTES, true).expect("mapped");
    let mut link = Link::new(&region, false, bell_back, bell_there);
    for number in 0..RECORDS {
        assert_eq!(link.receive(), record(number));
        link.send(&record(number + 1));
    }
}
