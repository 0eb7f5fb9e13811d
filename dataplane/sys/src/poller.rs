//! Readiness of descriptors: an epoll that any thread may use.
//!
//! A token identifies each descriptor. Sockets whose owner reads and writes until they would block are watched
//! edge-triggered, so that they need not be re-armed; a descriptor that its owner does not drain (a listener with more
//! connections than are accepted at once) is watched level-triggered.
//!
//! The poller references no memory of its callers and has no state except the kernel's. A closed descriptor is removed
//! automatically, unless it has duplicates; callers recognize stale events of it by the token.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Limit of events taken by one wait; further ones follow with the next.
const MAX_EVENTS: usize = 128;
/// Longest single wait.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Events to report for a descriptor. Its end is always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes to read, or connections to accept; level-triggered.
    Readable,
    /// Bytes to read; edge-triggered.
    ReadableEdge,
    /// Bytes to read and room to write; edge-triggered.
    BothEdges,
}

impl Interest {
    const fn bits(self) -> u32 {
        let edge = libc::EPOLLET as u32;
        let readable = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        match self {
            Self::Readable => readable,
            Self::ReadableEdge => readable | edge,
            Self::BothEdges => readable | libc::EPOLLOUT as u32 | edge,
        }
    }
}

/// Readiness of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Token of the descriptor.
    pub token: u64,
    /// Readable; also set at its end and on errors.
    pub readable: bool,
    /// Writable; also set on errors.
    pub writable: bool,
    /// The peer sends nothing more, or the descriptor has failed for good.
    pub ended: bool,
    /// The descriptor has an error, or a message in its error queue: see [`zero_copy`](crate::zero_copy).
    pub error: bool,
}

/// An epoll. Several threads may use it at the same time.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    /// True if this kernel, or its seccomp profile, lacks timeouts in nanoseconds.
    coarse: AtomicBool,
}

impl Poller {
    /// Creates a poller without descriptors.
    ///
    /// # Errors
    /// When there are too many open files.
    pub fn new() -> io::Result<Self> {
        // SAFETY: creates a new descriptor.
        let epoll = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the kernel has just created it, and this is its only owner.
        Ok(Self { epoll: unsafe { OwnedFd::from_raw_fd(epoll) }, coarse: AtomicBool::new(false) })
    }

    /// Watches a descriptor. Events that are pending already are reported too.
    ///
    /// # Errors
    /// When it is watched already, cannot be watched (a plain file), or a limit of the kernel is reached.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, interest.bits())
    }

    /// Changes the token and the interest of a watched descriptor.
    ///
    /// # Errors
    /// When it is not watched.
    pub fn modify(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest.bits())
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// When it was not watched.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    fn control(&self, operation: libc::c_int, fd: BorrowedFd<'_>, token: u64, events: u32) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: token };
        // SAFETY: the kernel reads one event, which outlives the call.
        check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd.as_raw_fd(), &raw mut event) })?;
        Ok(())
    }

    /// Waits until a descriptor is ready or `timeout` has passed, and appends the readiness events to `out`; returns
    /// their number. A timeout of zero does not block. May return early without an event, for example on a signal.
    ///
    /// # Errors
    /// When the kernel rejects the call; never because of a single descriptor.
    pub fn wait(&self, timeout: Duration, out: &mut Vec<Readiness>) -> io::Result<usize> {
        let mut events = [const { MaybeUninit::<libc::epoll_event>::uninit() }; MAX_EVENTS];
        let count = match self.enter(timeout.min(LONGEST_WAIT), &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        out.extend(events[..count].iter().map(|event| {
            // SAFETY: the kernel filled the first `count` events.
            let event = unsafe { event.assume_init() };
            let has = |bits: libc::c_int| event.events & bits as u32 != 0;
            let failed = has(libc::EPOLLERR | libc::EPOLLHUP);
            Readiness {
                token: event.u64,
                readable: failed || has(libc::EPOLLIN | libc::EPOLLRDHUP),
                writable: failed || has(libc::EPOLLOUT),
                ended: has(libc::EPOLLHUP | libc::EPOLLRDHUP),
                error: has(libc::EPOLLERR),
            }
        }));
        Ok(count)
    }

    fn enter(&self, timeout: Duration, events: &mut [MaybeUninit<libc::epoll_event>]) -> io::Result<usize> {
        let (epoll, place, room) = (self.epoll.as_raw_fd(), events.as_mut_ptr(), events.len());
        if !timeout.is_zero() && !self.coarse.load(Ordering::Relaxed) {
            let time = libc::timespec {
                tv_sec: timeout.as_secs() as libc::time_t,
                tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
            };
            let no_signals = std::ptr::null::<libc::sigset_t>();
            // SAFETY: the kernel writes at most `room` events and reads the time, which outlives the call.
            let count =
                unsafe { libc::syscall(libc::SYS_epoll_pwait2, epoll, place, room, &raw const time, no_signals, 0) };
            match usize::try_from(count) {
                Ok(count) => return Ok(count),
                Err(_) => match io::Error::last_os_error() {
                    // Older kernels return ENOSYS, older seccomp profiles EPERM.
                    error if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                        self.coarse.store(true, Ordering::Relaxed);
                    }
                    error => return Err(error),
                },
            }
        }
        // Rounded up, so that a timer has expired when the wait ends.
        let timeout_ms = timeout.as_nanos().div_ceil(1_000_000) as libc::c_int;
        // SAFETY: the kernel writes at most `room` events.
        let count = unsafe { libc::epoll_wait(epoll, place.cast(), room as libc::c_int, timeout_ms) };
        Ok(check(count)? as usize)
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::{Doorbell, event_fd};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(20);

    fn look(poller: &Poller, timeout: Duration) -> Vec<Readiness> {
        let mut out = Vec::new();
        let count = poller.wait(timeout, &mut out).expect("wait");
        assert_eq!(count, out.len());
        out
    }

    #[test]
    fn an_edge_is_reported_once_and_a_level_as_long_as_it_lasts() {
        let poller = Poller::new().expect("epoll");
        let (mut ours, theirs) = UnixStream::pair().expect("pair");
        let (mut level_in, level) = UnixStream::pair().expect("pair");
        poller.add(theirs.as_fd(), 1, Interest::ReadableEdge).expect("added");
        poller.add(level.as_fd(), u64::MAX, Interest::Readable).expect("added");
        assert!(look(&poller, Duration::ZERO).is_empty());
        ours.write_all(b"x").expect("write");
        level_in.write_all(b"x").expect("write");
        let mut found = look(&poller, LONG);
        found.sort_by_key(|readiness| readiness.token);
        let ready = |token| Readiness { token, readable: true, writable: false, ended: false, error: false };
        assert_eq!(found, [ready(1), ready(u64::MAX)]);
        assert_eq!(look(&poller, LONG), [ready(u64::MAX)], "the edge is over, the level is not");
        ours.write_all(b"y").expect("write");
        assert!(look(&poller, LONG).contains(&ready(1)), "another arrival");
        (&level).read_exact(&mut [0]).expect("read");
        assert!(look(&poller, Duration::ZERO).is_empty());
    }

    #[test]
    fn writability_ends_and_token_changes_are_reported() {
        let poller = Poller::new().expect("epoll");
        let (ours, theirs) = UnixStream::pair().expect("pair");
        poller.add(theirs.as_fd(), 1, Interest::BothEdges).expect("added");
        let room = Readiness { token: 1, readable: false, writable: true, ended: false, error: false };
        assert_eq!(look(&poller, LONG), [room]);
        assert!(look(&poller, Duration::from_micros(10)).is_empty(), "no change");
        poller.modify(theirs.as_fd(), 2, Interest::BothEdges).expect("watched");
        assert_eq!(look(&poller, LONG), [Readiness { token: 2, ..room }]);
        drop(ours);
        assert_eq!(
            look(&poller, LONG),
            [Readiness { token: 2, readable: true, writable: true, ended: true, error: false }]
        );
        poller.remove(theirs.as_fd()).expect("watched");
        assert!(
            poller.remove(theirs.as_fd()).is_err() && poller.modify(theirs.as_fd(), 3, Interest::Readable).is_err()
        );
        assert!(look(&poller, Duration::ZERO).is_empty());
    }

    #[test]
    fn a_doorbell_ends_a_wait_in_another_thread() {
        let poller = Poller::new().expect("epoll");
        let bell = Doorbell::new().expect("eventfd");
        poller.add(bell.fd(), 7, Interest::ReadableEdge).expect("added");
        for coarse in [false, true] {
            poller.coarse.store(coarse, Ordering::Relaxed);
            bell.prepare_sleep();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| look(&poller, LONG));
                bell.ring();
                assert_eq!(waiter.join().expect("woken")[0].token, 7);
            });
            bell.drain();
        }
    }

    #[test]
    fn more_events_than_one_wait_takes_come_with_the_next() {
        let poller = Poller::new().expect("epoll");
        let events: Vec<OwnedFd> = (0..MAX_EVENTS * 2).map(|_| event_fd().expect("eventfd")).collect();
        for (token, event) in events.iter().enumerate() {
            poller.add(event.as_fd(), token as u64, Interest::BothEdges).expect("added");
        }
        let mut seen = Vec::new();
        while poller.wait(Duration::ZERO, &mut seen).expect("wait") > 0 {}
        let mut tokens: Vec<u64> = seen.iter().map(|readiness| readiness.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..events.len() as u64).collect::<Vec<_>>());
    }

    #[test]
    fn watching_a_plain_file_is_an_error() {
        let poller = Poller::new().expect("epoll");
        let file = std::fs::File::open("/proc/self/exe").expect("our own program");
        assert!(poller.add(file.as_fd(), 1, Interest::Readable).is_err());
    }
}
