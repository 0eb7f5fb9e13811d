//! A raw peer against our server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_proto::rng::Rng;
use kvplane_sys::{IoBuf, Poller, Region, cpu, net};
use kvplane_transport::Token;
use kvplane_transport::mooncake::wire::{Dialect, Request};
use kvplane_transport::mooncake::{Ranges, Server, ServerCounters, ServerOptions};

use super::raw::{OK, REJECTED, Raw, byte_at, bytes_at, content, memory};

/// Announced address of the served memory.
const BASE: u64 = 0x7f12_3456_7000;
const BYTES: u64 = 8 << 20;
/// Hold of the one range of a bed.
const HOLD: u64 = 77;

struct ServedPeer {
    region: Arc<Region>,
    uses: Arc<AtomicI64>,
}

impl Ranges for ServedPeer {
    fn acquire(&mut self, request: &Request) -> Option<(IoBuf, u64)> {
        let offset = request.address.checked_sub(BASE)?;
        let end = offset.checked_add(request.bytes)?;
        if request.bytes == 0 || end > BYTES {
            return None;
        }
        self.uses.fetch_add(1, Ordering::SeqCst);
        Some((IoBuf::new(Arc::clone(&self.region), offset as usize, request.bytes as usize), HOLD))
    }

    fn release(&mut self, hold: u64) {
        assert_eq!(hold, HOLD);
        self.uses.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A server on a thread of its own.
struct Bed {
    address: SocketAddr,
    region: Arc<Region>,
    uses: Arc<AtomicI64>,
    stop: Arc<AtomicBool>,
    evict: Arc<AtomicBool>,
    /// Offset of the server's clock ahead of the real one, in nanoseconds.
    ahead_ns: Arc<AtomicU64>,
    /// Time at which the server's clock stands still; 0 while it runs.
    halted_ns: Arc<AtomicU64>,
    counters: Arc<Mutex<(ServerCounters, usize)>>,
    thread: Option<JoinHandle<()>>,
}

impl Bed {
    fn new(options: ServerOptions) -> Self {
        let listener = net::tcp_listener(([127, 0, 0, 1], 0).into(), 64).expect("a port");
        let address = listener.local_addr().expect("bound");
        let region = memory(BYTES as usize);
        let (uses, stop, evict) = (Arc::default(), Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (ahead_ns, halted_ns, counters) = (Arc::default(), Arc::default(), Arc::default());
        let mut bed = Self { address, region, uses, stop, evict, ahead_ns, halted_ns, counters, thread: None };
        let mut served = ServedPeer { region: Arc::clone(&bed.region), uses: Arc::clone(&bed.uses) };
        let (stop, evict) = (Arc::clone(&bed.stop), Arc::clone(&bed.evict));
        let (ahead_ns, counters) = (Arc::clone(&bed.ahead_ns), Arc::clone(&bed.counters));
        let halted_ns = Arc::clone(&bed.halted_ns);
        bed.thread = Some(std::thread::spawn(move || {
            let poller = Poller::new().expect("epoll");
            let mut server = Server::new(options);
            server.listen(&poller, listener).expect("watched");
            let mut ready = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let timeout = if server.has_work() { Duration::ZERO } else { Duration::from_millis(2) };
                poller.wait(timeout, &mut ready).expect("epoll");
                for readiness in ready.drain(..) {
                    server.ready(Token::from_bits(readiness.token).expect("a token of the server's"));
                }
                let clock_ns = match halted_ns.load(Ordering::SeqCst) {
                    0 => cpu::monotonic_ns(),
                    halted_ns => halted_ns,
                };
                let now_ns = clock_ns + ahead_ns.load(Ordering::SeqCst);
                server.drive(&poller, &mut served, now_ns);
                if evict.swap(false, Ordering::SeqCst) {
                    server.close_users(&poller, &mut served, HOLD);
                }
                *counters.lock().expect("not poisoned") = (*server.counters(), server.open());
            }
        }));
        bed
    }

    fn peer(&self) -> Raw {
        Raw::connect(self.address)
    }

    fn counters(&self) -> ServerCounters {
        self.counters.lock().expect("not poisoned").0
    }

    /// Waits until the server reaches a state.
    fn until(&self, what: &str, mut there: impl FnMut(&ServerCounters, usize) -> bool) {
        for _ in 0..10_000 {
            let (counters, open) = *self.counters.lock().expect("not poisoned");
            if there(&counters, open) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the server did not reach {what}: {:?}", self.counters());
    }

    fn unused(&self) {
        let uses = &self.uses;
        self.until("no use of its memory", |_, _| uses.load(Ordering::SeqCst) == 0);
    }

    fn fill(&self, seed: u64) {
        self.region.fill_with(0, BYTES as usize, &mut |at, part| {
            part.iter_mut().enumerate().for_each(|(i, byte)| *byte = byte_at(seed, BASE + at + i as u64));
        });
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.take().expect("started").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
    }
}

fn bed() -> Bed {
    Bed::new(ServerOptions::default())
}

fn any_range(rng: &mut Rng) -> (u64, usize) {
    let bytes = match rng.below(4) {
        0 => 1 + rng.below(64),
        1 => 1 + rng.below(4096),
        2 => 1 + rng.below(200_000),
        _ => 1 + rng.below(3 << 20),
    };
    (BASE + rng.below(BYTES - bytes + 1), bytes as usize)
}

#[test]
fn a_completed_write_is_read_by_everybody() {
    let bed = bed();
    let (mut one, mut other) = (bed.peer(), bed.peer());
    let mut rng = Rng::new(1, "mooncake");
    for round in 0..60 {
        let (address, bytes) = any_range(&mut rng);
        let wanted = bytes_at(round, address, bytes);
        assert_eq!(one.write(address, &wanted), OK);
        // In the memory of this process; over the writer's connection, over another, and in the other version.
        assert!(content(&bed.region, (address - BASE) as usize, bytes) == wanted, "round {round}");
        assert!(one.read(address, bytes) == wanted && other.read(address, bytes) == wanted, "round {round}");
        other.ask(false, Dialect::V1, address, bytes as u64);
        assert!(other.take(bytes) == wanted, "round {round}");
    }
    assert_eq!((bed.counters().rejected, bed.counters().torn), (0, 0));
    bed.unused();
}

#[test]
fn a_rejected_write_fails_and_changes_nothing() {
    let bed = bed();
    bed.fill(5);
    let outside = [
        (BASE - 1, 1),
        (BASE - 1, 100),
        (BASE + BYTES - 10, 11),
        (BASE + BYTES, 1),
        (BASE, BYTES + 1),
        (0, 64),
        (BASE, 0),
        (u64::MAX, 64),
        (u64::MAX - 10, u64::MAX),
        (BASE + 1, u64::MAX),
    ];
    for (address, bytes) in outside {
        let mut peer = bed.peer();
        peer.ask(true, Dialect::V2, address, bytes);
        // Part of the payload, all of it, or none: the status does not wait for it.
        peer.send(&vec![0xff; (bytes as usize).min(100)]);
        assert_eq!(peer.status(), REJECTED, "{bytes} at {address:#x}");
        assert!(peer.ends(), "the connection ends after the status");
    }
    assert!(content(&bed.region, 0, BYTES as usize) == bytes_at(5, BASE, BYTES as usize));
    bed.until("its count", |counters, _| counters.rejected == outside.len() as u64);
    assert_eq!(bed.counters().writes, 0);
    bed.unused();
}

/// The peer is in the middle of a payload that no socket buffer holds. It reads the status and the end without a reset,
/// although it continues to send.
#[test]
fn a_large_rejected_write_is_answered_while_it_is_sent() {
    let bed = bed();
    let payload = bytes_at(3, 0, 48 << 20);
    let mut peer = bed.peer();
    // The server's timeout does not expire, however slow this machine is.
    bed.halted_ns.store(cpu::monotonic_ns(), Ordering::SeqCst);
    peer.ask(true, Dialect::V2, BASE + BYTES - 1, payload.len() as u64);
    let mut writer = Raw::of(peer.0.try_clone().expect("a duplicate"));
    let sending = std::thread::spawn(move || writer.send(&payload));
    assert_eq!(peer.status(), REJECTED);
    sending.join().expect("all of it was taken");
    assert!(peer.ends());
    drop(peer);
    bed.until("an end", |_, open| open == 0);
    assert_eq!(bed.counters().torn, 0);
}

#[test]
fn a_rejected_peer_that_does_not_close_is_closed() {
    let bed = bed();
    let mut peer = bed.peer();
    peer.ask(true, Dialect::V2, 1, 1);
    assert_eq!(peer.status(), REJECTED);
    bed.ahead_ns.store(6_000_000_000, Ordering::SeqCst);
    bed.until("its patience's end", |counters, open| open == 0 && counters.expired == 1);
}

#[test]
fn reads_of_any_size_come_back() {
    let bed = bed();
    bed.fill(9);
    let mut peer = bed.peer();
    let mut rng = Rng::new(2, "mooncake");
    for _ in 0..60 {
        let (address, bytes) = any_range(&mut rng);
        assert!(peer.read(address, bytes) == bytes_at(9, address, bytes), "{bytes} at {address:#x}");
    }
    assert!(peer.read(BASE, BYTES as usize) == bytes_at(9, BASE, BYTES as usize));
    bed.unused();
}

#[test]
fn reads_outside_are_rejected() {
    let bed = bed();
    for (address, bytes) in [(BASE - 1, 2), (BASE + BYTES, 1), (BASE, BYTES + 1), (BASE, 0), (BASE + 8, u64::MAX - 4)] {
        let mut peer = bed.peer();
        peer.ask(false, Dialect::V2, address, bytes);
        assert_eq!(peer.status(), REJECTED, "{bytes} at {address:#x}");
        assert!(peer.ends());
        // Version 1 cannot express it.
        let mut peer = bed.peer();
        peer.ask(false, Dialect::V1, address, bytes);
        assert!(peer.ends(), "{bytes} at {address:#x}");
    }
    bed.unused();
}

#[test]
fn version_1_is_served_over_a_pooled_connection() {
    let bed = bed();
    let mut peer = bed.peer();
    let mut rng = Rng::new(4, "mooncake");
    for round in 0..40 {
        let (address, bytes) = any_range(&mut rng);
        let wanted = bytes_at(round, address, bytes);
        peer.ask(true, Dialect::V1, address, bytes as u64);
        peer.send(&wanted);
        peer.ask(false, Dialect::V1, address, bytes as u64);
        assert!(peer.take(bytes) == wanted, "round {round}");
    }
    peer.ask(true, Dialect::V1, BASE + BYTES, 1);
    assert!(peer.ends());
    bed.until("one connection and all writes", |counters, _| (counters.accepted, counters.writes) == (1, 40));
    bed.unused();
}

#[test]
fn requests_are_answered_in_order() {
    let bed = bed();
    let mut peer = bed.peer();
    let mut rng = Rng::new(5, "mooncake");
    let mut expected = Vec::new();
    let mut all = Vec::new();
    for round in 0..200 {
        let (address, bytes) = (BASE + rng.below(100), 1 + rng.below(3000) as usize);
        let write = rng.below(2) == 0;
        let dialect = Dialect::V2;
        all.extend(Request { address, bytes: bytes as u64, write, dialect }.encode());
        if write {
            all.extend(bytes_at(round, address, bytes));
        }
        expected.push((round, address, bytes, write));
    }
    let mut writer = Raw::of(peer.0.try_clone().expect("a duplicate"));
    let sending = std::thread::spawn(move || all.chunks(977).for_each(|part| writer.send(part)));
    let mut model = vec![0; 4096];
    for (round, address, bytes, write) in expected {
        let at = (address - BASE) as usize;
        assert_eq!(peer.status(), OK);
        if write {
            model[at..at + bytes].copy_from_slice(&bytes_at(round, address, bytes));
        } else {
            assert!(peer.take(bytes) == model[at..at + bytes], "round {round}");
        }
    }
    sending.join().expect("sent");
}

/// Whatever these peers do, a correct peer is served meanwhile.
#[test]
fn misbehaving_peers_do_not_delay_others() {
    let bed = bed();
    bed.fill(6);
    let mut good = bed.peer();
    let mut company = Vec::new();
    for round in 0..40 {
        let mut peer = bed.peer();
        match round % 5 {
            // A silent peer.
            0 => {}
            // Part of a request.
            1 => peer.send(&[1, 2, 3]),
            // Part of a payload.
            2 => {
                peer.ask(true, Dialect::V2, BASE + 4096, 1 << 20);
                peer.send(&[0; 5000]);
            }
            // Answers that are not read, more than sockets hold.
            3 => (0..16).for_each(|_| peer.ask(false, Dialect::V2, BASE, BYTES)),
            // Another protocol.
            _ => peer.send(b"GET /metadata?key=mooncake HTTP/1.1\r\nHost: here\r\n\r\n"),
        }
        company.push(peer);
        let (address, bytes) = (BASE + 3 * 1_000_000, 100_000);
        assert!(good.read(address, bytes) == bytes_at(6, address, bytes));
    }
    bed.until("a look at the garbage", |counters, _| counters.garbage == 8);
    // After the stall timeout all are gone but the silent ones and the correct one. In steps, because the kernel may
    // find room for some more bytes of an answer.
    for seconds in [31, 62, 93, 124, 160] {
        bed.ahead_ns.store(seconds * 1_000_000_000, Ordering::SeqCst);
        assert_eq!(good.read(BASE, 9), bytes_at(6, BASE, 9));
    }
    bed.until("the end of those that stalled", |counters, open| open == 9 && counters.expired == 24);
    assert_eq!(good.read(BASE, 9), bytes_at(6, BASE, 9));
    bed.ahead_ns.store(900_000_000_000, Ordering::SeqCst);
    bed.until("the end of those that idled", |_, open| open == 0);
    bed.unused();
}

#[test]
fn a_trickling_payload_times_out() {
    let bed = bed();
    let mut peer = bed.peer();
    peer.ask(true, Dialect::V2, BASE, 1000);
    for seconds in [20, 40, 60] {
        peer.send(&[7]);
        bed.until("the byte", |_, _| bed.region.load_u64(0) != 0);
        bed.ahead_ns.store(seconds * 1_000_000_000, Ordering::SeqCst);
    }
    bed.until("its patience's end", |counters, open| open == 0 && counters.expired == 1);
    bed.unused();
}

#[test]
fn a_dead_peer_releases_its_memory() {
    let bed = bed();
    for bytes in [0, 1, 100, 70_000] {
        let mut peer = bed.peer();
        peer.ask(true, Dialect::V2, BASE, 1 << 20);
        peer.send(&vec![1; bytes]);
    }
    bed.until("four ends", |counters, open| open == 0 && counters.torn == 4);
    bed.unused();
}

#[test]
fn users_of_a_retracted_range_are_closed() {
    let bed = bed();
    let mut peer = bed.peer();
    let mut idle = bed.peer();
    assert_eq!(idle.write(BASE, &[1]), OK);
    peer.ask(true, Dialect::V2, BASE, 1 << 20);
    peer.send(&[1; 100]);
    let uses = &bed.uses;
    bed.until("a use", |_, _| uses.load(Ordering::SeqCst) == 1);
    bed.evict.store(true, Ordering::SeqCst);
    assert!(peer.ends());
    bed.unused();
    assert_eq!(idle.read(BASE, 1).len(), 1, "who does not use it stays");
}

#[test]
fn connections_have_a_limit() {
    let bed = Bed::new(ServerOptions { connections: 4, ..ServerOptions::default() });
    let mut peers: Vec<Raw> = (0..4).map(|_| bed.peer()).collect();
    for peer in &mut peers {
        assert_eq!(peer.write(BASE, &[1]), OK);
    }
    assert!(bed.peer().ends(), "one too many");
    bed.until("one refusal", |counters, _| counters.refused == 1);
    // A connection that has been idle for long is closed for a new one.
    bed.ahead_ns.store(11_000_000_000, Ordering::SeqCst);
    for peer in &mut peers[1..] {
        assert_eq!(peer.write(BASE, &[1]), OK);
    }
    assert_eq!(bed.peer().write(BASE, &[2]), OK);
    assert!(peers[0].ends());
}

#[test]
fn many_idle_connections_stay_open() {
    let bed = bed();
    let mut idle: Vec<Raw> = (0..400).map(|_| bed.peer()).collect();
    bed.until("all of them", |_, open| open == 400);
    let mut busy = bed.peer();
    for round in 0..100 {
        assert_eq!(busy.write(BASE + round, &[round as u8]), OK);
    }
    for peer in idle.iter_mut().step_by(7) {
        assert_eq!(peer.read(BASE + 99, 1), [99]);
    }
}
