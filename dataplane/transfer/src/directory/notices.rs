//! Notices of completed batches are sent on threads of their own.
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
use crate::error::{Error, LimitError};

/// Number of threads; each serves a part of the peers.
const THREADS: usize = 4;
/// Limit of notices that wait for their batches or to be sent.
const WAITING: usize = 65_536;
/// Time for which notices are still sent after the engine was dropped.
const LAST_NOTICES: Duration = Duration::from_secs(1);

/// Sender of notices.
pub(crate) struct NoticeSender {
    lines: Mutex<Vec<Line>>,
    directory: Arc<Directory>,
    shared: Arc<SenderState>,
    hasher: RandomState,
}

struct Line {
    notices: Sender<QueuedNotice>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct SenderState {
    waiting: AtomicUsize,
    sent: AtomicU64,
    failed: AtomicU64,
    stopping: AtomicBool,
}

/// Notice with a reserved place in the limit; passed to [`NoticeSender::send`], or dropped.
pub(crate) struct QueuedNotice {
    to: String,
    notice: Notice,
    shared: Arc<SenderState>,
}

impl Drop for QueuedNotice {
    fn drop(&mut self) {
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl NoticeSender {
    pub(crate) fn new(directory: Arc<Directory>) -> Self {
        let (lines, shared) = (Mutex::default(), Arc::default());
        Self { lines, directory, shared, hasher: RandomState::new() }
    }

    /// Reserves a place for a notice.
    ///
    /// # Errors
    /// When the limit is reached, or the kernel refuses a thread for sending.
    pub(crate) fn reserve(&self, to: &str, notice: &Notice) -> Result<QueuedNotice, Error> {
        self.start()?;
        let waiting = self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        // From here on the drop returns the place.
        let notice = QueuedNotice { to: to.to_owned(), notice: notice.clone(), shared: Arc::clone(&self.shared) };
        if waiting >= WAITING {
            return Err(LimitError::NoticesToSend { waiting }.into());
        }
        Ok(notice)
    }

    /// Starts the threads, at the first notice.
    fn start(&self) -> Result<(), Error> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        while lines.len() < THREADS {
            let (notices, receiver) = channel();
            let (directory, shared) = (Arc::clone(&self.directory), Arc::clone(&self.shared));
            let body = move || deliver(&receiver, &directory, &shared);
            let thread = std::thread::Builder::new().name(format!("kvp-notify-{}", lines.len())).spawn(body)?;
            lines.push(Line { notices, thread });
        }
        Ok(())
    }

    /// Enqueues a notice; does not block.
    pub(crate) fn send(&self, notice: QueuedNotice) {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.hasher.hash_one(&notice.to) as usize % THREADS;
        match lines.get(index) {
            // The thread of a line ends only after the sender.
            Some(line) => drop(line.notices.send(notice)),
            None => drop(notice),
        }
    }

    /// Returns the number of notices that peers accepted, and of those that failed.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.shared.sent.load(Ordering::Relaxed), self.shared.failed.load(Ordering::Relaxed))
    }
}

fn deliver(notices: &Receiver<QueuedNotice>, directory: &Directory, shared: &SenderState) {
    let mut give_up: Option<Instant> = None;
    while let Ok(notice) = notices.recv() {
        if shared.stopping.load(Ordering::Relaxed) {
            let until = *give_up.get_or_insert_with(|| Instant::now() + LAST_NOTICES);
            if Instant::now() >= until {
                shared.failed.fetch_add(1, Ordering::Relaxed);
                continue;
            }
        }
        let counter = match directory.notify(&notice.to, &notice.notice) {
            Ok(()) => &shared.sent,
            Err(_) => &shared.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for NoticeSender {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        let lines = core::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let (notices, threads): (Vec<_>, Vec<_>) = lines.into_iter().map(|line| (line.notices, line.thread)).unzip();
        drop(notices);
        for thread in threads {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}
