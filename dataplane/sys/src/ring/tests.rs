//! The ring over files and socket pairs, which are read like files but block until bytes arrive; above all, memory
//! outlives the kernel's use of it.

use super::operations::Operations;
use super::setup::{SHARED_SETUPS, build, released};
use super::*;
use crate::region::{HugePages, Region, RegionOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

fn ring() -> Ring {
    Ring::shared(16).expect("io_uring")
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

/// Waits for the next `count` completions; bounded, because a lost completion must fail the test and not hang it.
fn next(ring: &mut Ring, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    for _ in 0..10_000 {
        ring.poll(&mut out).expect("poll");
        if out.len() >= count {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(out.len(), count, "{out:?}");
    out.sort_by_key(|completion| completion.token);
    out
}

fn done(token: u64, result: usize) -> Completion {
    Completion { token, result: result as i32 }
}

#[test]
fn setup_is_retried_while_locked_memory_is_short() {
    let mut short = 3;
    let made = released(|| {
        short -= 1;
        if short > 0 { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(short) }
    });
    assert_eq!(made.ok(), Some(0));
    let mut tries = 0;
    let refused: io::Result<()> = released(|| {
        tries += 1;
        Err(io::Error::from_raw_os_error(libc::EPERM))
    });
    assert_eq!((refused.map_err(|error| error.raw_os_error()), tries), (Err(Some(libc::EPERM)), 1));
}

#[test]
fn every_setup_works() {
    for setup in SHARED_SETUPS {
        let (uring, name) = build(16, &[setup]).expect("this kernel");
        let mut ring: Ring = Ring::with(uring, name).expect("ring");
        assert!(ring.describe().contains(setup.name));
        let (mut ours, theirs) = UnixStream::pair().expect("pair");
        let target = IoBuf::whole(region(8));
        ring.read_at(theirs.as_fd(), target.clone(), 0, 1).expect("room");
        ring.submit().expect("submit");
        ours.write_all(b"12345678").expect("write");
        // Polling alone suffices, too.
        let mut out = Vec::new();
        for _ in 0..10_000_000 {
            if ring.poll(&mut out).expect("poll") > 0 {
                break;
            }
        }
        assert_eq!((out, contents(&target).as_slice()), (vec![done(1, 8)], &b"12345678"[..]));
    }
}

/// One thread submits and continues with other work; another is woken by a poller and takes the completion.
#[test]
fn a_shared_ring_is_used_by_threads_in_turn() {
    let mut ring = Ring::shared(16).expect("io_uring");
    let poller = crate::Poller::new().expect("epoll");
    poller.add(ring.as_fd(), 1, crate::Interest::Readable).expect("added");
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let target = IoBuf::whole(region(8));
    ring.read_at(theirs.as_fd(), target.clone(), 0, 1).expect("room");
    ring.submit().expect("submit");
    let mut ready = Vec::new();
    assert_eq!(poller.wait(Duration::ZERO, &mut ready).expect("wait"), 0);
    let taker = std::thread::spawn(move || {
        poller.wait(Duration::from_secs(20), &mut ready).expect("wait");
        assert_eq!(ready.len(), 1);
        let mut out = Vec::new();
        ring.poll(&mut out).expect("poll");
        ring.read_at(theirs.as_fd(), IoBuf::whole(region(8)), 0, 2).expect("room");
        ring.submit().expect("submit");
        assert_eq!(out, [done(1, 8)]);
        drop(ring);
    });
    ours.write_all(b"12345678").expect("write");
    taker.join().expect("taken");
    assert_eq!(contents(&target), b"12345678");
}

/// The kernel writes into memory that only the ring still holds; a second mapping of it sees the bytes.
#[test]
fn a_buffer_lives_until_its_completion() {
    let mut ring = ring();
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let first = shared_region(4096);
    let fd = first.fd().expect("shared").try_clone_to_owned().expect("duplicate");
    let second = Region::map_shared(fd, 4096, false).expect("mapped");
    let watch: Weak<Region> = Arc::downgrade(&first);
    ring.read_at(theirs.as_fd(), IoBuf::new(first, 100, 5), 0, 1).expect("room");
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
    let (one, many) = (region(4096), region(1 << 20));
    let (watch_one, watch_many) = (Arc::downgrade(&one), Arc::downgrade(&many));
    let mut ring = ring();
    ring.read_at(theirs.as_fd(), IoBuf::whole(one), 0, 1).expect("room");
    // Writes that cannot all complete, because the peer does not read.
    let many = IoBuf::whole(many);
    for token in 2..6 {
        ring.write_at(theirs.as_fd(), many.clone(), 0, token).expect("room");
    }
    drop(many);
    ring.submit().expect("submit");
    assert!(ring.in_flight() >= 2 && watch_one.strong_count() == 1);
    drop(ring);
    assert_eq!((watch_one.strong_count(), watch_many.strong_count()), (0, 0), "leaked");
    // The read is cancelled: these bytes stay in the socket.
    ours.write_all(b"late").expect("write");
    let mut late = [0; 4];
    (&theirs).read_exact(&mut late).expect("read");
    assert_eq!(&late, b"late");
}

#[test]
fn queued_operations_are_not_submitted_on_drop() {
    let (ours, theirs) = UnixStream::pair().expect("pair");
    let buffer = buffer_with(b"never");
    let watch = Arc::downgrade(buffer.region());
    let mut ring = ring();
    ring.write_at(theirs.as_fd(), buffer, 0, 1).expect("room");
    drop(ring);
    ours.set_nonblocking(true).expect("nonblocking");
    let error = (&ours).read(&mut [0; 8]).expect_err("nothing was sent");
    assert_eq!((error.kind(), watch.strong_count()), (io::ErrorKind::WouldBlock, 0));
}

/// A completion identifies an operation, not the table entry: the entry's next operation is not affected.
#[test]
fn a_stale_completion_does_not_match_the_entrys_next_operation() {
    let mut operations = Operations::new(4);
    let old = operations.insert(1, 0, None);
    assert!(operations.remove(old).is_some());
    let new = operations.insert(2, 1, None);
    assert_eq!(old as u32, new as u32, "the entry is reused");
    assert!(operations.get(old).is_none() && operations.get(new).is_some());
    assert!(operations.remove(old).is_none());
    assert_eq!(operations.len(), 1);
}

#[test]
fn a_full_ring_returns_an_error_and_recovers() {
    let mut ring = Ring::shared(2).expect("io_uring");
    let (ours, theirs) = UnixStream::pair().expect("pair");
    let buffer = IoBuf::whole(region(8));
    let mut started = 0;
    while ring.read_at(theirs.as_fd(), buffer.clone(), 0, 1).is_ok() {
        started += 1;
        assert!(started <= 8, "four operations for each entry");
    }
    assert_eq!((started, ring.in_flight()), (8, 8));
    assert_eq!(ring.write_at(theirs.as_fd(), buffer.clone(), 0, 2), Err(RingFull));
    (&ours).write_all(&[7; 64]).expect("write");
    next(&mut ring, 8);
    assert_eq!((ring.in_flight(), Arc::strong_count(buffer.region())), (0, 1));
    ring.read_at(theirs.as_fd(), buffer, 0, 1).expect("room again");
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
    assert_eq!(next(&mut ring, 1), [Completion { token: 3, result: -libc::EFAULT }]);
}

#[test]
fn errors_are_results() {
    let mut ring = ring();
    let path = std::env::temp_dir().join(format!("kvplane-ring-errors-{}", std::process::id()));
    std::fs::write(&path, b"abc").expect("temporary file");
    let file = std::fs::File::open(&path).expect("temporary file");
    std::fs::remove_file(&path).expect("unlink");
    ring.write_at(file.as_fd(), buffer_with(b"x"), 0, 1).expect("room");
    ring.read_at(file.as_fd(), buffer_with(b"y"), 3, 2).expect("room");
    let refused = Completion { token: 1, result: -libc::EBADF };
    assert_eq!(next(&mut ring, 2), [refused, done(2, 0)]);
}

#[test]
fn an_ended_ring_holds_no_memory_and_rejects_operations() {
    let (mut ours, theirs) = UnixStream::pair().expect("pair");
    let (submitted, queued) = (region(8), region(8));
    let (watch, watch_queued) = (Arc::downgrade(&submitted), Arc::downgrade(&queued));
    let mut ring = Ring::shared(16).expect("io_uring");
    assert!(Ring::shared(16).expect("io_uring").end(Duration::ZERO), "nothing is in flight");
    ring.read_at(theirs.as_fd(), IoBuf::whole(submitted), 0, 1).expect("room");
    ring.submit().expect("submit");
    ring.write_at(theirs.as_fd(), IoBuf::whole(queued), 0, 2).expect("room");
    // On any thread, and repeated after a wait that was too short.
    let ended = std::thread::spawn(move || {
        let ended = ring.end(Duration::ZERO) || ring.end(Duration::from_secs(20));
        (ring, ended)
    });
    let (mut ring, ended) = ended.join().expect("ended");
    assert!(ended && ring.end(Duration::ZERO) && ring.in_flight() == 0);
    assert_eq!((watch.strong_count(), watch_queued.strong_count()), (0, 0));
    assert_eq!(ring.read_at(theirs.as_fd(), IoBuf::whole(region(8)), 0, 3), Err(RingFull));
    assert!(ring.submit().is_err());
    // The read is cancelled: these bytes stay in the socket. The write was never submitted.
    ours.write_all(b"late").expect("write");
    let mut late = [0; 4];
    (&theirs).read_exact(&mut late).expect("read");
    assert_eq!(&late, b"late");
    ours.set_nonblocking(true).expect("nonblocking");
    assert_eq!(ours.read(&mut late).expect_err("nothing was sent").kind(), io::ErrorKind::WouldBlock);
}

/// An operation that the kernel never completes, as on a device that is gone for good: only the memory of that
/// operation is leaked, and all of it.
#[test]
fn memory_the_kernel_never_releases_is_leaked_and_counted() {
    let (held, other) = (shared_region(4096), region(4096));
    let fd = held.fd().expect("shared").try_clone_to_owned().expect("duplicate");
    let seen = Region::map_shared(fd, 4096, false).expect("mapped");
    let (watch, watch_other) = (Arc::downgrade(&held), Arc::downgrade(&other));
    let address = held.address();
    let (_ours, theirs) = UnixStream::pair().expect("pair");
    let mut ring = ring();
    ring.patience = Duration::from_millis(50);
    ring.read_at(theirs.as_fd(), IoBuf::whole(other), 0, 1).expect("room");
    ring.submit().expect("submit");
    // In the table as if it were submitted: no completion will ever name it.
    let sequence = ring.pushed - 1;
    ring.operations.insert(2, sequence, Some(IoBuf::new(held, 0, 100)));
    let before = leaked();
    assert!(!ring.end(Duration::from_millis(1)), "the kernel has not let go");
    drop(ring);
    assert_eq!((watch.strong_count(), watch_other.strong_count()), (1, 0));
    let after = leaked();
    assert_eq!((after.operations - before.operations, after.bytes - before.bytes), (1, 100));
    // The kernel may write there at any later time.
    let kept = watch.upgrade().expect("kept");
    kept.copy_in(0, b"as late as it likes");
    assert_eq!((kept.address(), seen.load_u64(0)), (address, u64::from_ne_bytes(*b"as late ")));
}

#[test]
fn drive_statuses_map_to_bytes_or_errnos() {
    let result = |status| commands::result_of(status, 4096);
    assert_eq!((result(0), result(-libc::EINTR)), (4096, -libc::EINTR));
    // Includes the bits above the status.
    for (status, error) in [
        (0x4081, libc::ENOSPC),
        (0x4281, libc::EIO),
        (0x2020, libc::EROFS),
        (0x82, libc::EAGAIN),
        (0x4002, libc::EOPNOTSUPP),
    ] {
        assert_eq!(result(status), -error, "{status:#x}");
    }
}
