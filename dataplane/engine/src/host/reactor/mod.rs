//! The reactor of a host: it finds what there is to do, reads the clock, and waits for the next event.
//!
//! It owns the [`Connections`] with their drivers, and the [`Rounds`]. It knows nothing of a service or a client: what
//! comes is handed out as values, by [`Connections`] (events) and by a [`Pass`] (frames and payloads).

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

/// Nobody looked for so long: what has a deadline could not meet it.
const AWAY_NS: u64 = kvplane_proto::Limits::STALL_NS / 4;
/// The longest park; bounds what a lost doorbell could cost.
const PARK_LONGEST: Duration = Duration::from_millis(500);
/// The longest park while a peer copies from our memory or to it that rings no bell when it is done.
pub(crate) const PARK_WAITING: Duration = Duration::from_micros(100);

/// Time in which the thread that drives a host did not drive it.
pub(crate) struct Absence {
    /// When it drove the host last.
    pub(crate) since_ns: u64,
    /// When it was back.
    pub(crate) now_ns: u64,
}

/// What finds work for a host.
pub(crate) struct Reactor {
    /// The connections, by driver.
    pub(crate) connections: Connections,
    rounds: Rounds,
    readiness: Vec<Readiness>,
    /// The body of the frame that is taken: of the pass that runs, while one does.
    scratch: Vec<u8>,
    mailbox: Option<Doorbell>,
}

impl Reactor {
    /// A reactor of these connections.
    pub(crate) fn new(connections: Connections) -> Self {
        Self {
            connections,
            rounds: Rounds::new(cpu::monotonic_ns()),
            readiness: Vec::new(),
            scratch: Vec::new(),
            mailbox: None,
        }
    }

    /// Wakes the host when this doorbell rings.
    ///
    /// # Errors
    /// When the kernel does not let it be watched.
    pub(crate) fn watch_mailbox(&mut self, doorbell: Doorbell) -> io::Result<()> {
        let token = Token { source: Source::Mailbox, index: 0, generation: 0 };
        self.connections.poller.add(doorbell.fd(), token.to_bits(), Interest::ReadableEdge)?;
        self.mailbox = Some(doorbell);
        Ok(())
    }

    /// The time of the present round: at most a few empty rounds old.
    pub(crate) const fn now_ns(&self) -> u64 {
        self.rounds.now_ns()
    }

    /// When what is being taken has come.
    #[inline]
    pub(crate) fn arrival_ns(&mut self) -> u64 {
        self.rounds.arrival_ns(self.connections.tcp.moved_bytes(), cpu::monotonic_ns)
    }

    /// When a copy of so many bytes, done just now, ended; `more` copies follow it at once.
    #[inline]
    pub(crate) fn copied_ns(&mut self, bytes: u64, more: bool) -> u64 {
        self.rounds.copied_ns(bytes, more, cpu::monotonic_ns)
    }

    /// Finds out what there is to do: asks the poller, or names the connections that are worth trying. True if
    /// something is ready. What is ready of the server for stock engines is given to `stock_server`.
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
                // It has done its work: the host is awake.
                Source::Mailbox | Source::StockAnswers => {}
                // What has ended is taken in this round.
                Source::Files | Source::Tier => {}
                Source::MooncakeListener | Source::MooncakeServed => stock_server(token),
                _ => self.connections.ready(token, &one),
            }
        }
        Ok(is_ready)
    }

    /// Begins a round; reads the clock where that is due. The thread that drives the host may have been busy with
    /// something else for long: then says so.
    pub(crate) fn begin_round(&mut self, something_came: bool) -> Option<Absence> {
        if !self.rounds.begin(something_came) {
            return None;
        }
        let now_ns = cpu::monotonic_ns();
        let since_ns = self.rounds.read(now_ns);
        (now_ns.saturating_sub(since_ns) >= AWAY_NS).then_some(Absence { since_ns, now_ns })
    }

    /// Ends a round, and counts it. Whether it did anything.
    pub(crate) fn end_round(&mut self, progress: bool, something_came: bool, counters: &mut HostCounters) -> bool {
        let moved_bytes = self.connections.tcp.take_moved_bytes();
        let progress = progress | (moved_bytes > 0);
        self.rounds.end(progress, moved_bytes);
        counters.busy_rounds += u64::from(progress);
        if progress || something_came {
            counters.zero_copy = *self.connections.tcp.zero_copy();
            counters.crowded_out = self.connections.tcp.strangers().1;
        }
        progress
    }

    /// Waits for the poller. What is ready is looked at in the next round.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.connections.poller.wait(timeout, &mut self.readiness).map(drop)
    }

    /// Waits for the next event, at most `longest`, or until `side_ns`, the next timer of what uses the connections.
    /// Mailbox and connections learn first that the host sleeps; `may_sleep` says after that whether nothing has come
    /// meanwhile. Whether the host did wait.
    ///
    /// # Errors
    /// When the poller fails.
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

    /// How long it is until the next timer: of a driver, or `side_ns`, the next one of what uses the connections.
    pub(crate) fn until_timer(&self, side_ns: Option<u64>) -> Duration {
        match [side_ns, self.connections.poll_timeout()].into_iter().flatten().min() {
            Some(at_ns) => Duration::from_nanos(at_ns.saturating_sub(cpu::monotonic_ns())),
            None => PARK_LONGEST,
        }
    }
}
