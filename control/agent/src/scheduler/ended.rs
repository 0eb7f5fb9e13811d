//! Reservations that have ended and of which the Conductor does not know yet: they are sent with the next request for a
//! placement, or released one by one by a thread when none follows within [`LINGER`].

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvplane_rpc::conductor::RequestOutput;

/// Time for which a reservation waits for a request to be sent with.
const LINGER: Duration = Duration::from_millis(20);
/// Most reservations that are kept; the lease ends the oldest ones beyond it.
const MOST: usize = 65_536;
/// Delay before an unreachable Conductor is called again.
const BACKOFF: Duration = Duration::from_millis(500);
/// Time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(10);

/// Reservation that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndedReservation {
    pub(super) reservation: u64,
    /// Output of its request, if that is known.
    pub(super) output: Option<RequestOutput>,
}

#[derive(Default)]
struct Inner {
    ended: VecDeque<EndedReservation>,
    /// Time at which the thread releases them.
    due: Option<Instant>,
    /// Time until which the thread sleeps, if it does.
    sleeps_until: Option<Instant>,
    has_thread: bool,
    /// True once the owner is gone: the thread releases the rest and ends.
    closed: bool,
}

/// Queue of ended reservations.
#[derive(Default)]
pub(super) struct EndedReservations {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl EndedReservations {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change under the lock is complete.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a reservation. Returns true if the caller is to start the thread ([`Self::run`]).
    pub(super) fn add(&self, reservation: EndedReservation) -> bool {
        let mut inner = self.inner();
        if inner.ended.len() >= MOST {
            inner.ended.pop_front();
        }
        inner.ended.push_back(reservation);
        let due = inner.due.unwrap_or_else(|| Instant::now() + LINGER);
        self.set_due(inner, due)
    }

    /// Sets the time at which the thread releases reservations, and wakes it if it would sleep for longer. Returns true
    /// if the caller is to start the thread.
    fn set_due(&self, mut inner: MutexGuard<'_, Inner>, due: Instant) -> bool {
        inner.due = Some(due);
        let oversleeps = inner.sleeps_until.is_some_and(|until| due < until);
        let is_first = !std::mem::replace(&mut inner.has_thread, true);
        drop(inner);
        if oversleeps {
            self.changed.notify_all();
        }
        is_first
    }

    /// Takes up to `most` reservations, the oldest first.
    pub(super) fn take(&self, most: usize) -> Vec<EndedReservation> {
        let mut inner = self.inner();
        let count = inner.ended.len().min(most);
        let taken = inner.ended.drain(..count).collect();
        if inner.ended.is_empty() {
            inner.due = None;
        }
        taken
    }

    /// Puts back what [`Self::take`] returned and the Conductor may not have received: it ignores those that have ended
    /// already. Returns true if the caller is to start the thread.
    pub(super) fn put_back(&self, reservations: Vec<EndedReservation>) -> bool {
        if reservations.is_empty() {
            return false;
        }
        let mut inner = self.inner();
        for reservation in reservations.into_iter().rev() {
            if inner.ended.len() < MOST {
                inner.ended.push_front(reservation);
            }
        }
        self.set_due(inner, Instant::now() + BACKOFF)
    }

    /// Lets the thread release the rest at once, and end; waits for that, at most `longest`.
    pub(super) fn close(&self, longest: Duration) {
        let mut inner = self.inner();
        inner.closed = true;
        self.changed.notify_all();
        let until = Instant::now() + longest;
        while inner.has_thread {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Releases reservations that have waited for [`LINGER`] by `release`, which returns false when the Conductor is
    /// unreachable. Ends after [`IDLE`] without any, or when the queue is closed.
    fn run(&self, release: impl Fn(EndedReservation) -> bool) {
        let mut idle_until = Instant::now() + IDLE;
        loop {
            let mut inner = self.inner();
            let now = Instant::now();
            if inner.due.is_some_and(|due| due <= now || inner.closed) {
                drop(inner);
                self.release_all(&release);
                idle_until = Instant::now() + IDLE;
            } else if inner.closed || (inner.due.is_none() && now >= idle_until) {
                inner.has_thread = false;
                self.changed.notify_all();
                return;
            } else {
                let until = inner.due.unwrap_or(idle_until);
                inner.sleeps_until = Some(until);
                let woken = self.changed.wait_timeout(inner, until.saturating_duration_since(now));
                woken.unwrap_or_else(PoisonError::into_inner).0.sleeps_until = None;
            }
        }
    }

    /// Releases all reservations; those of a Conductor that is unreachable are released later, unless the queue is
    /// closed.
    fn release_all(&self, release: &impl Fn(EndedReservation) -> bool) {
        let mut ended: VecDeque<EndedReservation> = self.take(usize::MAX).into();
        while let Some(reservation) = ended.pop_front() {
            if release(reservation) {
                continue;
            }
            let mut inner = self.inner();
            if !inner.closed {
                ended.push_front(reservation);
                ended.append(&mut inner.ended);
                inner.ended = ended;
                inner.due = Some(Instant::now() + BACKOFF);
            }
            return;
        }
    }

    /// Starts a thread that runs [`Self::run`].
    pub(super) fn start(self: &Arc<Self>, release: impl Fn(EndedReservation) -> bool + Send + 'static) {
        let ended = Arc::clone(self);
        let thread = thread::Builder::new().name("kvplane-release".to_owned());
        if thread.spawn(move || ended.run(release)).is_err() {
            // The next reservation tries again; until then they are sent with requests, or their leases end.
            self.inner().has_thread = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended_one(reservation: u64) -> EndedReservation {
        EndedReservation { reservation, output: None }
    }

    #[test]
    fn taken_reservations_are_the_oldest_and_can_be_put_back() {
        let ended = EndedReservations::default();
        assert!(ended.add(ended_one(1)) && !ended.add(ended_one(2)) && !ended.add(ended_one(3)), "one thread");
        assert_eq!(ended.take(2), [1, 2].map(ended_one));
        assert!(!ended.put_back(vec![ended_one(1), ended_one(2)]), "it has a thread");
        assert_eq!(ended.take(usize::MAX), [1, 2, 3].map(ended_one));
        assert!(ended.take(1).is_empty() && ended.inner().due.is_none());
    }

    #[test]
    fn their_number_is_limited() {
        let ended = EndedReservations::default();
        for reservation in 0..MOST as u64 + 2 {
            ended.add(ended_one(reservation));
        }
        assert_eq!(ended.inner().ended.len(), MOST);
        assert_eq!(ended.take(1), [ended_one(2)], "the oldest were dropped");
    }

    #[test]
    fn those_that_are_put_back_have_a_thread() {
        let ended = Arc::new(EndedReservations::default());
        let finished = EndedReservation { output: Some(RequestOutput { tokens: 3, decode_ns: 4 }), ..ended_one(7) };
        assert!(ended.put_back(vec![finished]), "none has run, or it has ended");
        let (tell, told) = std::sync::mpsc::channel();
        ended.start(move |one| tell.send((one.reservation, one.output.map(|output| output.tokens))).is_ok());
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok((7, Some(3))));
        assert!(!ended.put_back(Vec::new()));
    }

    #[test]
    fn those_without_a_request_are_released_by_the_thread() {
        let ended = Arc::new(EndedReservations::default());
        let (tell, told) = std::sync::mpsc::channel();
        ended.add(ended_one(7));
        // The Conductor cannot be reached at first.
        let tries = std::sync::atomic::AtomicU32::new(0);
        ended.start(move |EndedReservation { reservation, .. }| {
            let is_first = tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
            tell.send((reservation, is_first)).expect("the test waits");
            !is_first
        });
        let limit = Duration::from_secs(60);
        assert_eq!(told.recv_timeout(limit), Ok((7, true)));
        assert_eq!(told.recv_timeout(limit), Ok((7, false)));
        // The thread sleeps until it would end, if it is not woken.
        while ended.inner().sleeps_until.is_none() {
            thread::yield_now();
        }
        assert!(!ended.add(ended_one(9)), "it has a thread");
        assert_eq!(told.recv_timeout(IDLE / 2), Ok((9, false)));
        ended.add(ended_one(8));
        ended.close(limit);
        assert_eq!(told.recv_timeout(limit), Ok((8, false)), "the rest is released at once");
        assert!(told.recv_timeout(limit).is_err(), "the thread has ended");
    }
}
