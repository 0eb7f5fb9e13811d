//! Reactor of a host: polls for work, reads the clock, and waits for the next event.
//!
//! It owns the [`Connections`] with their drivers, and the [`Rounds`]. It knows nothing of a service or a client: input
//! is returned as values, by [`Connections`] (events) and by a [`Pass`] (frames and payloads).

pub(crate) mod connections;
pub(crate) mod devices;
pub(crate) mod links;
pub(crate) mod near;
pub(crate) mod pass;
mod rounds;

use std::io;
use std::time::Duration;

use kvplane_sys::{Doorbell, Interest, Readiness, cpu};
use kvplane_transport::{Source, Token};

use self::connections::Connections;
pub(crate) use self::rounds::BYTES_PER_CLOCK;
use self::rounds::Rounds;
use super::reports::HostCounters;

/// Absence after which deadlines cannot have been met.
const AWAY_NS: u64 = kvplane_proto::Limits::STALL_NS / 4;
/// Longest park; bounds the cost of a lost doorbell.
const PARK_LONGEST: Duration = Duration::from_millis(500);
/// Longest park while a peer copies from or to our memory, and rings no bell when it is done.
pub(crate) const PARK_WAITING: Duration = Duration::from_micros(100);

/// Time in which the thread that drives a host did not drive it.
pub(crate) struct Absence {
    /// Time when it last drove the host.
    pub(crate) since_ns: u64,
    /// Time when it was back.
    pub(crate) now_ns: u64,
}

/// Event loop of a host.
pub(crate) struct Reactor {
    /// Connections, by driver.
    pub(crate) connections: Connections,
    rounds: Rounds,
    readiness: Vec<Readiness>,
    /// Buffer for the body of a frame; it belongs to the pass while one runs.
    scratch: Vec<u8>,
    mailbox: Option<Doorbell>,
}

impl Reactor {
    /// Creates the reactor of these connections.
    pub(crate) fn new(connections: Connections) -> Self {
        Self {
            connections,
            rounds: Rounds::new(cpu::monotonic_ns()),
            readiness: Vec::new(),
            scratch: Vec::new(),
            mailbox: None,
        }
    }

    /// Watches a doorbell that wakes the host.
    ///
    /// # Errors
    /// If the kernel refuses to watch the doorbell.
    pub(crate) fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        let token = Token { source: Source::Mailbox, index: 0, generation: 0 };
        self.connections.poller.add(doorbell.fd(), token.to_bits(), Interest::ReadableEdge)?;
        self.mailbox = Some(doorbell);
        Ok(())
    }

    /// Returns the time of the current round: at most a few empty rounds old.
    pub(crate) const fn now_ns(&self) -> u64 {
        self.rounds.now_ns()
    }

    /// Returns the arrival time of the input that is being taken.
    #[inline]
    pub(crate) fn arrival_ns(&mut self) -> u64 {
        self.rounds.arrival_ns(self.connections.tcp.moved_bytes(), cpu::monotonic_ns)
    }

    /// Returns the end time of a copy of `bytes` that was made just now; `more`: other copies follow it at once.
    #[inline]
    pub(crate) fn copied_ns(&mut self, bytes: u64, more: bool) -> u64 {
        self.rounds.copied_ns(bytes, more, cpu::monotonic_ns)
    }

    /// Looks for work: calls the poller, or relies on the connections that are worth trying. Returns true if something
    /// is ready. Readiness of the server for stock engines is passed to `stock_server`.
    pub(crate) fn look(&mut self, mut stock_server: impl FnMut(Token)) -> io::Result<bool> {
        if self.readiness.is_empty() {
            let Self { rounds, connections, .. } = self;
            if rounds.takes_look(|| connections.are_worth_trying()) {
                self.wait(Duration::ZERO)?;
            }
        }
        let is_ready = !self.readiness.is_empty();
        for one in self.readiness.drain(..) {
            let Some(token) = Token::from_bits(one.token) else { continue };
            match token.source {
                // The doorbell has served its purpose: the host is awake.
                Source::Mailbox | Source::StockAnswers => {}
                // Completions are taken in this round.
                Source::Files | Source::Tier => {}
                Source::MooncakeListener | Source::MooncakeServed => stock_server(token),
                _ => self.connections.ready(token, &one),
            }
        }
        Ok(is_ready)
    }

    /// Begins a round; reads the clock if that is due. Returns an absence if the thread that drives the host was busy
    /// elsewhere, or descheduled, for long.
    pub(crate) fn begin_round(&mut self, something_came: bool) -> Option<Absence> {
        if !self.rounds.begin(something_came) {
            return None;
        }
        let now_ns = cpu::monotonic_ns();
        let since_ns = self.rounds.read(now_ns);
        (now_ns.saturating_sub(since_ns) >= AWAY_NS).then_some(Absence { since_ns, now_ns })
    }

    /// Ends a round, and counts it. Returns true if it made progress.
    pub(crate) fn end_round(&mut self, progress: bool, something_came: bool, counters: &mut HostCounters) -> bool {
        let moved_bytes = self.connections.tcp.take_moved_bytes();
        let progress = progress | (moved_bytes > 0);
        self.rounds.end(progress, moved_bytes);
        counters.busy_rounds += u64::from(progress);
        if progress || something_came {
            counters.zero_copy = *self.connections.tcp.zero_copy();
            counters.replaced_unauthenticated = self.connections.tcp.unauthenticated().1;
        }
        progress
    }

    /// Waits for the poller. Readiness is handled in the next round.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.connections.poller.wait(timeout, &mut self.readiness).map(drop)
    }

    /// Waits for the next event, at most `longest`, or until `side_ns`, the next timer of the client or service.
    /// Mailbox and connections are notified of the sleep first; `may_sleep` is called after that, and returns true if
    /// nothing has arrived meanwhile. Returns true if the host did wait.
    ///
    /// # Errors
    /// If the poller fails.
    pub(crate) fn park(
        &mut self,
        longest: Duration,
        side_ns: Option<u64>,
        may_sleep: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        if let Some(mailbox) = &self.mailbox {
            mailbox.prepare_sleep();
        }
        let sleeps = self.connections.prepare_sleep() && may_sleep() && !self.connections.has_shared_input();
        if sleeps {
            let most = if self.connections.rdma.is_closing() { PARK_WAITING } else { PARK_LONGEST };
            self.wait(self.until_timer(side_ns).min(longest).min(most))?;
            self.rounds.read(cpu::monotonic_ns());
        }
        self.rounds.wake();
        self.connections.awake();
        if let Some(mailbox) = &self.mailbox {
            mailbox.awake();
        }
        Ok(sleeps)
    }

    /// Returns the time until the next timer: of a driver, or `side_ns`, the next one of the client or service.
    pub(crate) fn until_timer(&self, side_ns: Option<u64>) -> Duration {
        match [side_ns, self.connections.poll_timeout()].into_iter().flatten().min() {
            Some(at_ns) => Duration::from_nanos(at_ns.saturating_sub(cpu::monotonic_ns())),
            None => PARK_LONGEST,
        }
    }
}
