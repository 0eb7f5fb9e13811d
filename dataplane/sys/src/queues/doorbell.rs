//! Doorbells: wake a parked consumer through an eventfd, which is written only if the consumer has announced sleep.
//!
//! The owner (consumer) spins most of the time, and a system call per message would cost more than the message. So the
//! owner announces sleep in a flag, and a ringer writes the eventfd only if it sees the flag.
//!
//! No wakeup is lost. The owner: `prepare_sleep` (flag = true; full fence), check every queue once more, park only if
//! all are empty. The ringer: push; `ring` (full fence; read the flag). The two fences are ordered. If the owner's is
//! first, the ringer sees the flag and writes the eventfd, which stays readable until drained, so the park ends. If the
//! ringer's is first, the owner's second check sees the push. The ringer that takes the flag clears it, so that only
//! one of many ringers pays for the write.
//!
//! Between processes the flag is in shared memory, and a hostile peer can keep it set or cleared, or fill or drain the
//! eventfd. This causes only spurious or missing wakeups, so an owner bounds the duration of each park.

pub use super::event::event_fd;

use super::sync::{AtomicBool, AtomicU32, Event, Ordering, Region, fence};
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A doorbell within a process. Clones ring for the same owner; any thread may ring.
#[derive(Clone)]
pub struct Doorbell {
    inner: Arc<Inner>,
}

struct Inner {
    sleeping: AtomicBool,
    event: Event,
}

impl Doorbell {
    /// Creates a doorbell whose owner is awake.
    pub fn new() -> io::Result<Self> {
        let event = Event::new()?;
        Ok(Self { inner: Arc::new(Inner { sleeping: AtomicBool::new(false), event }) })
    }

    /// Wakes the owner if it sleeps; called after a push. Returns true if the owner was asleep.
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        let sleeping = &self.inner.sleeping;
        let asleep = sleeping.load(Ordering::Relaxed) && sleeping.swap(false, Ordering::AcqRel);
        if asleep {
            self.inner.event.signal();
        }
        asleep
    }

    /// Announces that the owner is about to park. The owner must check its queues once more after this, and park only
    /// if they are empty.
    pub fn prepare_sleep(&self) {
        self.inner.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Announces that the owner is awake and polls its queues.
    pub fn awake(&self) {
        self.inner.sleeping.store(false, Ordering::Relaxed);
    }

    /// Returns the descriptor that the owner polls while parked.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inner.event.fd()
    }

    /// Makes the descriptor unreadable again. Must be called before the queues are checked.
    pub fn drain(&self) {
        self.inner.event.drain();
    }

    /// Parks until the doorbell rings.
    #[cfg(all(test, loom))]
    pub(super) fn wait(&self) {
        self.inner.event.wait();
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sleeping = self.inner.sleeping.load(Ordering::Relaxed);
        f.debug_struct("Doorbell").field("sleeping", &sleeping).finish()
    }
}

/// A doorbell between processes: the flag is a 32-bit word of a shared region, the eventfd is passed over a socket. One
/// process owns the doorbell (`prepare_sleep`, `awake`, `drain`), the other rings it. Any thread may use it.
#[derive(Debug)]
pub struct SharedDoorbell {
    region: Arc<Region>,
    offset_of_flag: usize,
    event: Event,
}

impl SharedDoorbell {
    /// Creates a doorbell from its flag and eventfd; a flag of zero means awake. Panics if the flag is not an aligned
    /// word of a writable region.
    pub fn new(region: Arc<Region>, offset_of_flag: usize, eventfd: OwnedFd) -> Self {
        region.atomic_u32(offset_of_flag);
        Self { region, offset_of_flag, event: eventfd.into() }
    }

    fn flag(&self) -> &AtomicU32 {
        self.region.atomic_u32(self.offset_of_flag)
    }

    /// See [`Doorbell::ring`].
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        let flag = self.flag();
        let asleep = flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0;
        if asleep {
            self.event.signal();
        }
        asleep
    }

    /// See [`Doorbell::prepare_sleep`].
    pub fn prepare_sleep(&self) {
        self.flag().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// See [`Doorbell::awake`].
    pub fn awake(&self) {
        self.flag().store(0, Ordering::Relaxed);
    }

    /// Returns the descriptor that the owner polls while parked.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.fd()
    }

    /// See [`Doorbell::drain`].
    pub fn drain(&self) {
        self.event.drain();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::{HugePages, RegionOptions};
    use crate::spsc;
    use std::os::fd::AsRawFd;

    /// Parks for as long as a test may take; returns true if the doorbell rang.
    fn park(event: BorrowedFd<'_>) -> bool {
        readable(event, 20_000)
    }

    fn readable(event: BorrowedFd<'_>, timeout_ms: libc::c_int) -> bool {
        let mut query = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        unsafe { libc::poll(&raw mut query, 1, timeout_ms) == 1 }
    }

    fn shared_word() -> Arc<Region> {
        let options = RegionOptions { huge: HugePages::Never, shared: true, ..RegionOptions::new("doorbell", 4096) };
        Region::allocate(&options).expect("memory")
    }

    /// An owner that parks whenever its ring is empty receives every value; a lost wakeup would leave it parked.
    #[test]
    fn no_wakeup_is_lost() {
        const VALUES: u32 = 20_000;
        let (mut producer, mut consumer) = spsc::channel(4);
        let bell = Doorbell::new().expect("eventfd");
        let ringer = bell.clone();
        let sender = std::thread::spawn(move || {
            for value in 0..VALUES {
                while producer.try_push(value).is_err() {
                    std::thread::yield_now();
                }
                ringer.ring();
            }
        });
        let mut expected = 0;
        while expected < VALUES {
            if let Some(value) = consumer.try_pop() {
                assert_eq!(value, expected);
                expected += 1;
                continue;
            }
            bell.prepare_sleep();
            if consumer.is_empty() {
                assert!(park(bell.fd()), "a wakeup was lost before {expected}");
            }
            bell.awake();
            bell.drain();
        }
        sender.join().expect("the sender ends");
    }

    #[test]
    fn only_a_sleeping_owner_costs_a_write() {
        let event = event_fd().expect("eventfd");
        let fd = || event.try_clone().expect("duplicate");
        let region = shared_word();
        let owner = SharedDoorbell::new(Arc::clone(&region), 128, fd());
        let ringer = SharedDoorbell::new(Arc::clone(&region), 128, fd());
        assert!(!ringer.ring());
        owner.prepare_sleep();
        assert_eq!(region.atomic_u32(128).load(Ordering::Relaxed), 1);
        assert!(ringer.ring() && park(owner.fd()));
        assert!(!ringer.ring(), "the first ringer took the flag");
        owner.drain();
        assert!(!readable(owner.fd(), 0), "drained");
        owner.prepare_sleep();
        owner.awake();
        assert!(!ringer.ring());
    }

    /// A peer has the same eventfd: it makes it blocking, and full or empty. Neither side may hang.
    #[test]
    fn a_hostile_eventfd_blocks_neither_side() {
        let event = event_fd().expect("eventfd");
        let bell = SharedDoorbell::new(shared_word(), 0, event.try_clone().expect("duplicate"));
        let full = (u64::MAX - 1).to_ne_bytes();
        // SAFETY: writes from eight bytes of ours, then sets the descriptor's mode.
        unsafe {
            assert_eq!(libc::write(event.as_raw_fd(), full.as_ptr().cast(), 8), 8);
            assert_eq!(libc::fcntl(event.as_raw_fd(), libc::F_SETFL, 0), 0);
        }
        bell.prepare_sleep();
        assert!(bell.ring());
        bell.drain();
        assert!(!readable(bell.fd(), 0), "drained");
        bell.drain();
    }
}
