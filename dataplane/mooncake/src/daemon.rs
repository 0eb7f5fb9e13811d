//! Handshake daemon: one parked thread that serves any number of peers, none of which can hold up another.
//!
//! Every connection has two deadlines, one for idleness and one for its whole duration. If there are too many
//! connections, the one that has been idle longest is evicted. A peer that sends garbage, half a message or nothing
//! costs its own connection only.

mod config;
mod counts;
mod table;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_sys::cpu::monotonic_ns;
use kvplane_sys::{Doorbell, Interest, Poller, Readiness};

use crate::connection::Step;
use crate::published::Local;
use table::Table;

pub use config::{DaemonConfig, StartError};
pub use counts::Counts;
use counts::Tally;

/// Tokens that are not those of connections.
const LISTENER: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;
/// Connections accepted before the existing ones have their turn.
const ACCEPTS: usize = 64;
/// Pause of accepting when descriptors run out.
const PAUSE_NS: u64 = 100_000_000;
/// Time that a dropped daemon waits for its thread.
const DROP_DEADLINE: Duration = Duration::from_secs(1);

/// Open port of a daemon that does not answer yet, so that its number can be written into the descriptor.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    address: SocketAddr,
    config: DaemonConfig,
}

/// Running daemon. Dropping it stops it.
#[derive(Debug)]
pub struct Daemon {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    bell: Doorbell,
    tally: Arc<Tally>,
    ended: mpsc::Receiver<io::Result<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Reason why a daemon did not stop as it should.
#[derive(Debug)]
pub enum StopError {
    /// The daemon had ended on its own before.
    Ended(String),
    /// The daemon is still busy, in a call of its [`Local`]; its thread continues.
    Deadline(Duration),
}

impl fmt::Display for StopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(reason) => write!(f, "the handshake daemon had ended before: {reason}"),
            Self::Deadline(waited) => {
                write!(f, "the handshake daemon did not stop within {:.1} s", waited.as_secs_f64())
            }
        }
    }
}

impl std::error::Error for StopError {}

impl Daemon {
    /// Opens the port of a daemon.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn listen(config: DaemonConfig) -> Result<Listening, StartError> {
        let listener = config.bind()?;
        let address = listener.local_addr().map_err(StartError::System)?;
        Ok(Listening { listener, address, config })
    }

    /// Returns the address on which it listens. With peer-to-peer handshakes this is the segment's name.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.tally.read()
    }

    /// Stops the daemon: closes port and connections, and waits for that up to `deadline`.
    ///
    /// # Errors
    /// See [`StopError`].
    pub fn stop(mut self, deadline: Duration) -> Result<(), StopError> {
        self.end(deadline)
    }

    fn end(&mut self, deadline: Duration) -> Result<(), StopError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.stopping.store(true, Ordering::Release);
        self.bell.ring();
        let result = match self.ended.recv_timeout(deadline) {
            Ok(result) => result.map_err(|error| StopError::Ended(error.to_string())),
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(StopError::Deadline(deadline)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(StopError::Ended("its thread panicked".to_owned())),
        };
        // The thread has nothing left to do but to end.
        let _ = thread.join();
        result
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // There is no caller left to report an error to.
        let _ = self.end(DROP_DEADLINE);
    }
}

impl Listening {
    /// Returns the address on which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts to serve `local`, on a thread of its own. Peers that connected meanwhile are served too.
    ///
    /// # Errors
    /// If the system refuses a thread or descriptors.
    pub fn serve(self, local: Arc<dyn Local>) -> Result<Daemon, StartError> {
        let bell = Doorbell::new().map_err(StartError::System)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Tally::default());
        let (finished, ended) = mpsc::channel();
        let table = Table::new(self.config, local, Arc::clone(&tally));
        let worker = Worker::new(self.listener, table, bell.clone(), Arc::clone(&stopping));
        let mut worker = worker.map_err(StartError::System)?;
        let body = move || {
            let result = worker.run();
            // The port is free before the end is reported.
            drop(worker);
            let _ = finished.send(result);
        };
        let thread = std::thread::Builder::new().name("kvplane-shake".to_owned()).spawn(body);
        let thread = Some(thread.map_err(StartError::System)?);
        Ok(Daemon { address: self.address, stopping, bell, tally, ended, thread })
    }
}

/// State of the daemon's thread.
struct Worker {
    poller: Poller,
    listener: TcpListener,
    bell: Doorbell,
    stopping: Arc<AtomicBool>,
    table: Table,
    /// Connections that can continue at once.
    again: Vec<u64>,
    /// Time at which accepting resumes, while descriptors are short.
    resume_ns: Option<u64>,
}

impl Worker {
    fn new(listener: TcpListener, table: Table, bell: Doorbell, stopping: Arc<AtomicBool>) -> io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(listener.as_fd(), LISTENER, Interest::Readable)?;
        poller.add(bell.fd(), BELL, Interest::Readable)?;
        Ok(Self { poller, listener, bell, stopping, table, again: Vec::new(), resume_ns: None })
    }

    fn run(&mut self) -> io::Result<()> {
        let mut events: Vec<Readiness> = Vec::new();
        let mut now_ns = monotonic_ns();
        loop {
            self.bell.prepare_sleep();
            if self.stopping.load(Ordering::Acquire) {
                return Ok(());
            }
            events.clear();
            self.poller.wait(self.patience(now_ns), &mut events)?;
            self.bell.awake();
            now_ns = monotonic_ns();
            // Unfinished connections come after those that are ready now: each has its turn.
            let unfinished = std::mem::take(&mut self.again);
            for event in &events {
                match event.token {
                    LISTENER => self.accept(now_ns)?,
                    BELL => self.bell.drain(),
                    token => self.advance(token, now_ns),
                }
            }
            for token in unfinished {
                self.advance(token, now_ns);
            }
            self.again.sort_unstable();
            self.again.dedup();
            self.table.expire(now_ns);
            self.resume(now_ns)?;
        }
    }

    fn patience(&self, now_ns: u64) -> Duration {
        if !self.again.is_empty() {
            return Duration::ZERO;
        }
        let due_ns = self.table.next_due_ns().into_iter().chain(self.resume_ns).min();
        due_ns.map_or(Duration::MAX, |due_ns| Duration::from_nanos(due_ns.saturating_sub(now_ns)))
    }

    fn accept(&mut self, now_ns: u64) -> io::Result<()> {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let Some(token) = self.table.insert(stream, &self.poller, now_ns) else { continue };
                    self.advance(token, now_ns);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The peer closed while it was queued, or a signal arrived.
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                }
                // Usually out of descriptors. A connection that has been idle for a while is evicted to free one.
                Err(_) if self.table.evict(now_ns.saturating_sub(PAUSE_NS)) => {}
                Err(_) => {
                    // The listener stays ready, so that polling it again at once would spin.
                    self.poller.remove(self.listener.as_fd())?;
                    self.resume_ns = Some(now_ns + PAUSE_NS);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn resume(&mut self, now_ns: u64) -> io::Result<()> {
        if self.resume_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            self.resume_ns = None;
            self.poller.add(self.listener.as_fd(), LISTENER, Interest::Readable)?;
        }
        Ok(())
    }

    fn advance(&mut self, token: u64, now_ns: u64) {
        if self.table.advance(token, now_ns) == Some(Step::Again) {
            self.again.push(token);
        }
    }
}

#[cfg(test)]
mod tests;
