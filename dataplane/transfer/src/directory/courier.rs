//! Courier: sends the notices of completed batches, on threads of its own.
//!
//! Notices to one peer are sent one after the other, in the order in which their batches completed; a peer that does
//! not answer delays the other peers of its thread, by at most the timeout of a call for each notice.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_mooncake::Notice;

use crate::directory::Directory;
use crate::error::Error;

/// Number of threads; each serves a part of the peers.
const THREADS: usize = 4;
/// Limit of notices that wait for their batches or to be sent.
const WAITING: usize = 65_536;
/// Time for which notices are still sent after the engine was dropped.
const LAST_NOTICES: Duration = Duration::from_secs(1);

/// Sender of notices.
pub(crate) struct Courier {
    lines: Mutex<Vec<Line>>,
    directory: Arc<Directory>,
    shared: Arc<CourierState>,
    hasher: RandomState,
}

struct Line {
    letters: Sender<Letter>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct CourierState {
    waiting: AtomicUsize,
    sent: AtomicU64,
    failed: AtomicU64,
    stopping: AtomicBool,
}

/// Notice with a reserved place in the limit; passed to [`Courier::send`], or dropped.
pub(crate) struct Letter {
    to: String,
    notice: Notice,
    shared: Arc<CourierState>,
}

impl Drop for Letter {
    fn drop(&mut self) {
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Courier {
    pub(crate) fn new(directory: Arc<Directory>) -> Self {
        let (lines, shared) = (Mutex::default(), Arc::default());
        Self { lines, directory, shared, hasher: RandomState::new() }
    }

    /// Reserves a place for a notice.
    ///
    /// # Errors
    /// When the limit is reached, or the kernel refuses a thread for sending.
    pub(crate) fn letter(&self, to: &str, notice: &Notice) -> Result<Letter, Error> {
        self.start()?;
        let waiting = self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        // From here on the drop returns the place.
        let letter = Letter { to: to.to_owned(), notice: notice.clone(), shared: Arc::clone(&self.shared) };
        if waiting >= WAITING {
            return Err(Error::TooManyRequests(format!("{waiting} notices wait to be sent, which is the limit")));
        }
        Ok(letter)
    }

    /// Starts the threads, at the first notice.
    fn start(&self) -> Result<(), Error> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        while lines.len() < THREADS {
            let (letters, receiver) = channel();
            let (directory, shared) = (Arc::clone(&self.directory), Arc::clone(&self.shared));
            let body = move || deliver(&receiver, &directory, &shared);
            let thread = std::thread::Builder::new().name(format!("kvp-notify-{}", lines.len())).spawn(body)?;
            lines.push(Line { letters, thread });
        }
        Ok(())
    }

    /// Enqueues a notice; does not block.
    pub(crate) fn send(&self, letter: Letter) {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.hasher.hash_one(&letter.to) as usize % THREADS;
        match lines.get(index) {
            // The thread of a line ends only after the courier.
            Some(line) => drop(line.letters.send(letter)),
            None => drop(letter),
        }
    }

    /// Returns the number of notices that peers accepted, and of those that failed.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.shared.sent.load(Ordering::Relaxed), self.shared.failed.load(Ordering::Relaxed))
    }
}

fn deliver(letters: &Receiver<Letter>, directory: &Directory, shared: &CourierState) {
    let mut give_up: Option<Instant> = None;
    while let Ok(letter) = letters.recv() {
        if shared.stopping.load(Ordering::Relaxed) {
            let until = *give_up.get_or_insert_with(|| Instant::now() + LAST_NOTICES);
            if Instant::now() >= until {
                shared.failed.fetch_add(1, Ordering::Relaxed);
                continue;
            }
        }
        let counter = match directory.notify(&letter.to, &letter.notice) {
            Ok(()) => &shared.sent,
            Err(_) => &shared.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        let lines = core::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let (letters, threads): (Vec<_>, Vec<_>) = lines.into_iter().map(|line| (line.letters, line.thread)).unzip();
        drop(letters);
        for thread in threads {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}
