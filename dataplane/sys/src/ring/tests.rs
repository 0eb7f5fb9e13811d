//! The ring over loopback sockets, pairs and files; above all, that memory outlives the kernel's use of it.

use super::setup::{SETUPS, SHARED_SETUPS};
use super::*;
use crate::doorbell::Doorbell;
use crate::net;
use crate::region::{HugePages, Region, RegionOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

fn ring() -> Ring {
    Ring::new(16).expect("io_uring")
}

fn region(bytes: usize) -> Arc<Region> {
    let huge = HugePages::Never;
    Region::allocate(&RegionOptions { huge, ..RegionOptions::new("ring test", bytes) }).expect("memory")
}

fn shared_region(bytes: usize) -> Arc<Region> {
    let huge = HugePages::Never;
    let options = RegionOptions { huge, shared: true, ..RegionOptions::new("ring test", bytes) };
    Region::allocate(&options).expect("memory")
}

fn buffer_with(bytes: &[u8]) -> IoBuf {
    let buffer = IoBuf::whole(region(bytes.len()));
    buffer.copy_in(bytes);
    buffer
}

fn contents(buffer: &IoBuf) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.copy_out(&mut bytes);
    bytes
}

/// Waits for the next completions, `count` of them; bounded, because a lost completion must fail and not hang.
fn next(ring: &mut Ring, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    for _ in 0..200 {
        if out.len() >= count {
            break;
        }
        ring.wait(Duration::from_millis(50), &mut out).expect("wait");
    }
    assert_eq!(out.len(), count, "{out:?}");
    out.sort_by_key(|completion| completion.token);
    out
}

fn done(token: u64, result: usize) -> Completion {
    Completion { token, result: result as i32, more: false }
}

#[test]
fn echoes_over_loopback() {
    let mut ring = ring();
    let any = "127.0.0.1:0".parse().expect("address");
    let listener = net::tcp_listener(any, 16).expect("listener");
    let address = listener.local_addr().expect("address");
    ring.accept(listener.as_fd(), 1).expect("room");
    let mut pairs = Vec::new();
    for _ in 0..2 {
        let client = net::tcp_socket(address).expect("socket");
        ring.connect(client.as_fd(), address, 2).expect("room");
        let found = next(&mut ring, 2);
        assert_eq!((found[0].token, found[0].more, found[1]), (1, true, done(2, 0)));
        assert!(ring.accepted(&found[1]).is_none(), "a connect accepts nothing");
        let server = ring.accepted(&found[0]).expect("a socket");
        assert!(ring.accepted(&found[0]).is_none(), "once only");
        let peer = net::peer_address(server.as_fd()).expect("peer");
        assert_eq!(peer, net::local_address(client.as_fd()).expect("local"));
        pairs.push((client, server));
    }
    let (client, server) = &pairs[1];
    // More than the socket buffers hold, gathered from 64 pieces, received into one place.
    let big: Vec<u8> = (0..8_000_000u32).map(|i| (i * 7 + (i >> 11)) as u8).collect();
    let whole = buffer_with(&big);
    let piece = big.len() / MAX_VECTORS;
    let pieces: Vec<_> = (0..MAX_VECTORS).map(|i| whole.slice(i * piece, piece)).collect();
    let target = IoBuf::whole(region(big.len()));
    ring.recv(server.as_fd(), target.clone(), true, 3).expect("room");
    ring.send(client.as_fd(), &pieces, 4).expect("room");
    assert_eq!(next(&mut ring, 2), [done(3, big.len()), done(4, big.len())]);
    assert!(contents(&target) == big, "bytes differ");
    // And a short one back, into a larger buffer.
    ring.recv(client.as_fd(), target.slice(0, 100), false, 5).expect("room");
    ring.send(server.as_fd(), &[buffer_with(b"pong")], 6).expect("room");
    assert_eq!(next(&mut ring, 2), [done(5, 4), done(6, 4)]);
    assert_eq!(contents(&target.slice(0, 4)), b"pong");
    assert_eq!(ring.in_flight(), 1, "only the accept goes on");
    // Closing alone leaves a receive waiting; shutting down ends it.
    ring.recv(client.as_fd(), target, true, 7).expect("room");
    ring.submit().expect("submit");
    net::shutdown(client.as_fd()).expect("shut down");
    assert_eq!(next(&mut ring, 1), [done(7, 0)]);
}

#[test]
fn every_setup_works() {
    for (setup, apply) in SETUPS.into_iter().chain(SHARED_SETUPS) {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(64);
        apply(&mut builder);
        let mut ring = Ring::with(builder.build(16).expect("this kernel"), setup).expect("ring");
        assert!(ring.describe().contains(setup));
        let (mut ours, theirs) = UnixStream::pair().expect("pair");
        let target = IoBuf::whole(region(8));
        ring.recv(theirs.as_fd(), target.clone(), true, 1).expect("room");
        ring.submit().expect("submit");
        ours.write_all(b"12345678").expect("write");
        // Polling alone gets there, too.
        let mut out = Vec::new();
        for _ in 0..10_000_000 {
            if ring.poll(&mut out).expect("poll") > 0 {
                break;
            }
        }
        assert_eq!((out, contents(&target).as_slice()), (vec![done(1, 8)], &b"12345678"[..]));
    }
}

/// One thread submits and goes on to something else; another is told by a poller and takes the completion.
#[test]
fn a_shared_ring_is_used_by_threads_in_turn() {
    let mut ring = Ring::shared(16).expect("io_uring");
    let poller = crate::Poller::new().expect("epoll");
    poller.add(ring.as_fd(), 1, crate::Interest::Readable).expect("added");
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let target = IoBuf::whole(region(8));
    ring.recv(theirs.as_fd(), target.clone(), true, 1).expect("room");
    ring.submit().expect("submit");
    let mut ready = Vec::new();
    assert_eq!(poller.wait(Duration::ZERO, &mut ready).expect("wait"), 0);
    let taker = std::thread::spawn(move || {
        poller.wait(Duration::from_secs(20), &mut ready).expect("wait");
        assert_eq!(ready.len(), 1);
        let mut out = Vec::new();
        ring.poll(&mut out).expect("poll");
        ring.recv(theirs.as_fd(), IoBuf::whole(region(8)), true, 2).expect("room");
        ring.submit().expect("submit");
        assert_eq!(out, [done(1, 8)]);
        drop(ring);
    });
    ours.write_all(b"12345678").expect("write");
    taker.join().expect("taken");
    assert_eq!(contents(&target), b"12345678");
}

/// The kernel writes into memory that nobody but the ring holds any more; a second mapping of it sees the bytes.
#[test]
fn a_buffer_lives_until_its_completion() {
    let mut ring = ring();
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let first = shared_region(4096);
    let fd = first.fd().expect("shared").try_clone_to_owned().expect("duplicate");
    let second = Region::map_shared(fd, 4096, false).expect("mapped");
    let watch: Weak<Region> = Arc::downgrade(&first);
    ring.recv(theirs.as_fd(), IoBuf::new(first, 100, 5), true, 1).expect("room");
    ring.submit().expect("submit");
    // The kernel holds the file, too.
    drop(theirs);
    assert_eq!(watch.strong_count(), 1, "held by the ring alone");
    ours.write_all(b"alive").expect("write");
    assert_eq!(next(&mut ring, 1), [done(1, 5)]);
    let mut seen = [0; 5];
    second.copy_out(100, &mut seen);
    assert_eq!((&seen, watch.strong_count()), (b"alive", 0));
}

#[test]
fn dropping_the_ring_ends_operations_before_it_frees_their_memory() {
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let (one, many) = (region(4096), region(4096));
    let (watch_one, watch_many) = (Arc::downgrade(&one), Arc::downgrade(&many));
    let mut ring = ring();
    ring.recv(theirs.as_fd(), IoBuf::whole(one), true, 1).expect("room");
    // A gathering send that cannot finish, as nobody reads.
    let vectors = vec![IoBuf::whole(many); MAX_VECTORS];
    for token in 2..6 {
        ring.send(theirs.as_fd(), &vectors, token).expect("room");
    }
    drop(vectors);
    ring.poll_readable(ours.as_fd(), 9).expect("room");
    ring.submit().expect("submit");
    assert!(ring.in_flight() >= 2 && watch_one.strong_count() == 1);
    drop(ring);
    assert_eq!((watch_one.strong_count(), watch_many.strong_count()), (0, 0), "leaked");
    // The receive is gone: these bytes stay in the socket.
    ours.write_all(b"late").expect("write");
    let mut late = [0; 4];
    (&theirs).read_exact(&mut late).expect("read");
    assert_eq!(&late, b"late");
}

#[test]
fn what_was_only_queued_is_not_done_on_drop() {
    let (ours, theirs) = UnixStream::pair().expect("pair");
    let buffer = buffer_with(b"never");
    let watch = Arc::downgrade(buffer.region());
    let mut ring = ring();
    ring.send(theirs.as_fd(), &[buffer], 1).expect("room");
    drop(ring);
    ours.set_nonblocking(true).expect("nonblocking");
    let error = (&ours).read(&mut [0; 8]).expect_err("nothing was sent");
    assert_eq!((error.kind(), watch.strong_count()), (io::ErrorKind::WouldBlock, 0));
}

#[test]
fn closing_through_the_ring_sends_first() {
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let mut ring = ring();
    ring.send(theirs.as_fd(), &[buffer_with(b"bye")], 1).expect("room");
    ring.close(theirs.into());
    ours.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
    let mut text = String::new();
    ours.read_to_string(&mut text).expect("read");
    assert_eq!((text.as_str(), next(&mut ring, 1)), ("bye", vec![done(1, 3)]));
}

#[test]
fn sockets_nobody_fetched_are_closed() {
    let mut ring = ring();
    let any = "127.0.0.1:0".parse().expect("address");
    let listener = net::tcp_listener(any, 16).expect("listener");
    ring.accept(listener.as_fd(), 1).expect("room");
    let address = listener.local_addr().expect("address");
    let mut client = std::net::TcpStream::connect(address).expect("connected");
    assert_eq!(next(&mut ring, 1)[0].token, 1);
    drop(ring);
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
    assert!(matches!(client.read(&mut [0; 1]), Ok(0) | Err(_)), "still open");
    let error = client.read(&mut [0; 1]).err().map(|error| error.kind());
    assert_ne!(error, Some(io::ErrorKind::WouldBlock), "timed out: still open");
}

#[test]
fn cancel_ends_all_of_a_token_and_nothing_else() {
    let mut ring = ring();
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let (kept, other) = UnixStream::pair().expect("pair");
    for _ in 0..3 {
        ring.recv(theirs.as_fd(), IoBuf::whole(region(8)), true, 7).expect("room");
    }
    ring.recv(other.as_fd(), IoBuf::whole(region(8)), true, 8).expect("room");
    ring.poll_readable(theirs.as_fd(), 7).expect("room");
    ring.submit().expect("submit");
    ring.cancel(7).expect("room");
    let cancelled = Completion { token: 7, result: -libc::ECANCELED, more: false };
    assert_eq!((next(&mut ring, 4), ring.in_flight()), (vec![cancelled; 4], 1));
    ring.cancel(7).expect("cancelling nothing is fine");
    ours.write_all(b"x").expect("write");
    (&kept).write_all(b"12345678").expect("write");
    assert_eq!(next(&mut ring, 1), [done(8, 8)]);
}

/// A cancellation names an operation, not the table entry: the entry's next owner is not hit.
#[test]
fn an_old_name_does_not_match_the_entrys_next_operation() {
    let mut operations = Operations::new(4);
    let old = operations.insert(1, 0, Holds::Nothing);
    operations.remove(old);
    let new = operations.insert(2, 1, Holds::Nothing);
    assert_eq!(old as u32, new as u32, "the entry is reused");
    assert!(operations.get(old).is_none() && operations.get(new).is_some());
    operations.remove(old);
    assert_eq!(operations.len(), 1);
}

#[test]
fn a_full_ring_says_so_and_recovers() {
    let mut ring = Ring::new(2).expect("io_uring");
    let (_ours, theirs) = UnixStream::pair().expect("pair");
    let buffer = IoBuf::whole(region(8));
    let mut started = 0;
    while ring.recv(theirs.as_fd(), buffer.clone(), true, 1).is_ok() {
        started += 1;
        assert!(started <= 8, "four operations for each entry");
    }
    assert_eq!((started, ring.in_flight()), (8, 8));
    assert_eq!(ring.send(theirs.as_fd(), &[buffer.clone(), buffer.clone()], 2), Err(RingFull));
    while ring.cancel(1).is_err() {
        ring.poll(&mut Vec::new()).expect("poll");
    }
    for _ in 0..200 {
        if ring.in_flight() == 0 {
            break;
        }
        ring.wait(Duration::from_millis(50), &mut Vec::new()).expect("wait");
    }
    assert_eq!((ring.in_flight(), Arc::strong_count(buffer.region())), (0, 1));
    ring.recv(theirs.as_fd(), buffer, true, 1).expect("room again");
}

#[test]
fn files_at_offsets() {
    let mut ring = ring();
    let path = std::env::temp_dir().join(format!("kvplane-ring-{}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path);
    let file = file.expect("temporary file");
    std::fs::remove_file(&path).expect("unlink");
    ring.write_at(file.as_fd(), buffer_with(b"block"), 8192, 1).expect("room");
    assert_eq!(next(&mut ring, 1), [done(1, 5)]);
    let target = IoBuf::whole(region(8));
    ring.read_at(file.as_fd(), target.clone(), 8190, 2).expect("room");
    assert_eq!(next(&mut ring, 1), [done(2, 7)]);
    assert_eq!(contents(&target), b"\0\0block\0");
    let read_only = shared_region(8);
    let fd = read_only.read_only_fd().expect("descriptor");
    let view = Region::map_shared(fd, 8, false).expect("mapped");
    ring.read_at(file.as_fd(), IoBuf::whole(view), 8190, 3).expect("room");
    assert_eq!(next(&mut ring, 1), [Completion { token: 3, result: -libc::EFAULT, more: false }]);
}

#[test]
fn errors_are_results() {
    let mut ring = ring();
    let (ours, theirs) = UnixStream::pair().expect("pair");
    drop(ours);
    ring.send(theirs.as_fd(), &[buffer_with(b"x")], 1).expect("room");
    ring.recv(theirs.as_fd(), buffer_with(b"y"), true, 2).expect("room");
    let broken = Completion { token: 1, result: -libc::EPIPE, more: false };
    assert_eq!(next(&mut ring, 2), [broken, done(2, 0)]);
}

#[test]
fn a_doorbell_ends_a_park_and_an_idle_park_times_out() {
    let mut ring = ring();
    let bell = Doorbell::new().expect("eventfd");
    ring.poll_readable(bell.fd(), 1).expect("room");
    let mut out = Vec::new();
    assert_eq!(ring.wait(Duration::from_millis(1), &mut out).expect("wait"), 0);
    for _ in 0..3 {
        bell.prepare_sleep();
        let ringer = bell.clone();
        let thread = std::thread::spawn(move || ringer.ring());
        let found = next(&mut ring, 1);
        assert_eq!((found[0].token, found[0].more), (1, true));
        assert_ne!(found[0].result & i32::from(libc::POLLIN), 0);
        assert!(thread.join().expect("rang"));
        bell.drain();
        bell.awake();
        assert!(!bell.ring(), "nobody sleeps");
    }
    assert_eq!(ring.poll(&mut out).expect("poll"), 0);
}
