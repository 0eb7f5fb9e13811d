//! Server side of Mooncake's protocol: stock engines read and write registered memory by address.
//!
//! Every connection is served one request at a time, in order, as the protocol demands. A write is received directly
//! into its destination, and its status is sent after the last byte: a reader that starts after that sees the write, by
//! any path. A read is sent directly from its source. No length in a request causes an allocation.
//!
//! A connection has a turn when its socket is ready, with a budget of bytes and requests, so neither a large transfer
//! nor a broken peer delays another connection by more than the budgets of those before it. An idle connection costs
//! its table entry here and in the kernel, and one check every few seconds at most.

mod connection;
mod options;

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use connection::{DRAIN_BYTES, Over, ServedConnection, Tally, Turn};
use kvplane_sys::{Interest, Poller, net, stream};
pub use options::{Ranges, ServerOptions};

use crate::table::Table;
use crate::token::{Source, Token};
use crate::turns::Turns;
use crate::types::ConnectionId;

/// Limit of connections accepted in one round.
const ACCEPTS_PER_ROUND: usize = 64;
/// Byte budget of one round: connections without a turn in this round are first in the next.
const ROUND_BYTES: usize = 4 << 20;
/// Backoff after the kernel refused to accept a connection, in nanoseconds.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;

/// Counters of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections closed at once because the connection limit was reached.
    pub refused: u64,
    /// Reads begun.
    pub reads: u64,
    /// Writes begun.
    pub writes: u64,
    /// Requests for ranges that are not registered, or not for that use.
    pub rejected: u64,
    /// Connections closed because of bytes that are not a request.
    pub garbage: u64,
    /// Connections that ended within a request.
    pub torn: u64,
    /// Connections closed because they were idle or stalled, or to make room for a newer one.
    pub expired: u64,
}

/// All connections from stock engines to one shard. Thread affinity: one thread at a time, the one that owns the
/// poller.
pub struct Server {
    options: ServerOptions,
    listener: Option<TcpListener>,
    connections: Table<ServedConnection>,
    /// Connections that are due for a turn.
    due: Turns,
    may_accept: bool,
    accept_after_ns: Option<u64>,
    sweep_ns: u64,
    scratch: Vec<u8>,
    counters: ServerCounters,
}

impl Server {
    /// Creates a server without connections.
    #[must_use]
    pub const fn new(options: ServerOptions) -> Self {
        Self {
            options,
            listener: None,
            connections: Table::new(),
            due: Turns::new(),
            may_accept: false,
            accept_after_ns: None,
            sweep_ns: u64::MAX,
            scratch: Vec::new(),
            counters: ServerCounters {
                accepted: 0,
                refused: 0,
                reads: 0,
                writes: 0,
                rejected: 0,
                garbage: 0,
                torn: 0,
                expired: 0,
            },
        }
    }

    /// Starts to accept connections of a listener, which is nonblocking.
    ///
    /// # Errors
    /// When the listener cannot be registered with the poller.
    pub fn listen(&mut self, poller: &Poller, listener: TcpListener) -> std::io::Result<()> {
        watch(poller, &listener)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Handles a readiness event of the poller for the socket of this token.
    pub fn ready(&mut self, token: Token) {
        match token.source {
            Source::MooncakeListener => self.may_accept = true,
            _ => self.mark_due(ConnectionId { index: token.index, generation: token.generation }),
        }
    }

    /// Accepts pending connections and gives each ready connection one turn. Returns true if there was work;
    /// [`Self::has_work`] tells whether more is left.
    pub fn drive(&mut self, poller: &Poller, ranges: &mut impl Ranges, now_ns: u64) -> bool {
        let mut progress = self.may_accept;
        if core::mem::take(&mut self.may_accept) {
            self.accept(poller, ranges, now_ns);
        }
        let mut moved_bytes = 0;
        for _ in 0..self.due.len() {
            let Some(id) = self.next_due() else { break };
            progress = true;
            moved_bytes += self.turn(poller, ranges, id, now_ns);
            if moved_bytes >= ROUND_BYTES {
                break;
            }
        }
        if self.accept_after_ns.is_some_and(|at_ns| at_ns <= now_ns) {
            let watched = self.listener.as_ref().map(|listener| watch(poller, listener));
            let failed = matches!(watched, Some(Err(_)));
            self.accept_after_ns = failed.then_some(now_ns.saturating_add(ACCEPT_PAUSE_NS));
        }
        if self.sweep_ns <= now_ns {
            self.sweep(poller, ranges, now_ns);
        }
        progress
    }

    /// Returns true if a connection has more work than its budget allowed, or connections may be pending.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.may_accept || !self.due.is_empty()
    }

    /// Returns the latest time for the next call of [`Self::drive`], in nanoseconds.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let sweep = (self.sweep_ns < u64::MAX).then_some(self.sweep_ns);
        [sweep, self.accept_after_ns].into_iter().flatten().min()
    }

    /// Closes the connections that use the range with this hold, so that the range becomes quiescent.
    pub fn close_users(&mut self, poller: &Poller, ranges: &mut impl Ranges, hold: u64) {
        let users = self.connections.iter().filter(|(_, connection)| connection.hold() == Some(hold));
        let users: Vec<ConnectionId> = users.map(|(id, _)| id).collect();
        for id in users {
            self.counters.expired += 1;
            self.close(poller, ranges, id);
        }
    }

    /// Returns the number of open connections.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.connections.len()
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counters(&self) -> &ServerCounters {
        &self.counters
    }

    /// Queues a connection for a turn, once.
    fn mark_due(&mut self, id: ConnectionId) {
        if self.connections.get(id).is_some() {
            self.due.mark(id.index);
        }
    }

    /// Returns the next connection that is due.
    fn next_due(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.due.pop() {
            if self.connections.at(index).is_some() {
                return Some(self.connections.id_at(index));
            }
        }
        None
    }

    fn accept(&mut self, poller: &Poller, ranges: &mut impl Ranges, now_ns: u64) {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(listener) = &self.listener else { return };
            let socket = match stream::accept(listener.as_fd()) {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                // Out of descriptors, the next attempt would fail too: accepting pauses until some may have been
                // closed.
                Err(_) => {
                    let _ = poller.remove(listener.as_fd());
                    self.accept_after_ns = Some(now_ns.saturating_add(ACCEPT_PAUSE_NS));
                    return;
                }
            };
            if self.connections.len() >= self.options.connections && !self.reclaim(poller, ranges, now_ns) {
                self.counters.refused += 1;
                continue;
            }
            if net::set_nodelay(socket.as_fd()).is_err() {
                continue;
            }
            let id = self.connections.insert(ServedConnection::new(TcpStream::from(socket), now_ns));
            let Some(connection) = self.connections.get(id) else { return };
            if poller.add(connection.stream.as_fd(), token(id).to_bits(), Interest::BothEdges).is_err() {
                self.close(poller, ranges, id);
                continue;
            }
            self.counters.accepted += 1;
            self.sweep_ns = self.sweep_ns.min(now_ns.saturating_add(self.sweep_period_ns()));
            // A new connection most likely brings a request.
            self.mark_due(id);
        }
        self.may_accept = true;
    }

    /// Closes the longest idle connection to make room for a new one; returns false if none is idle long enough.
    fn reclaim(&mut self, poller: &Poller, ranges: &mut impl Ranges, now_ns: u64) -> bool {
        let idle = self.connections.iter().filter_map(|(id, connection)| Some((connection.idle_since_ns()?, id)));
        let Some((since_ns, id)) = idle.min() else { return false };
        if since_ns.saturating_add(self.options.reclaim_ns) > now_ns {
            return false;
        }
        self.counters.expired += 1;
        self.close(poller, ranges, id);
        true
    }

    fn turn(&mut self, poller: &Poller, ranges: &mut impl Ranges, id: ConnectionId, now_ns: u64) -> usize {
        self.scratch.resize(DRAIN_BYTES, 0);
        let Some(connection) = self.connections.get_mut(id) else { return 0 };
        let mut tally = Tally::default();
        let turn = connection.turn(ranges, &self.options, &mut tally, &mut self.scratch, now_ns);
        self.counters.reads += tally.reads;
        self.counters.writes += tally.writes;
        self.counters.rejected += tally.rejected;
        let moved_bytes = tally.moved_bytes;
        match turn {
            Turn::Wait => {}
            Turn::Again => self.mark_due(id),
            Turn::Over(how) => {
                self.counters.garbage += u64::from(how == Over::Garbage);
                self.counters.torn += u64::from(how == Over::Torn);
                self.close(poller, ranges, id);
            }
        }
        moved_bytes
    }

    fn close(&mut self, poller: &Poller, ranges: &mut impl Ranges, id: ConnectionId) {
        let Some(connection) = self.connections.take(id) else { return };
        let _ = poller.remove(connection.stream.as_fd());
        if let Some(hold) = connection.hold() {
            ranges.release(hold);
        }
        self.connections.free(id);
    }

    /// Returns the period of deadline checks: the shortest of the timeouts.
    fn sweep_period_ns(&self) -> u64 {
        self.options.stall_ns.min(self.options.drain_ns).min(self.options.idle_ns)
    }

    /// Closes connections whose deadline has passed.
    fn sweep(&mut self, poller: &Poller, ranges: &mut impl Ranges, now_ns: u64) {
        let mut next_ns = now_ns.saturating_add(self.sweep_period_ns());
        let mut expired = Vec::new();
        for (id, connection) in self.connections.iter() {
            let at_ns = connection.deadline_ns(&self.options);
            if at_ns <= now_ns {
                expired.push(id);
            } else {
                next_ns = next_ns.min(at_ns);
            }
        }
        for id in expired {
            self.counters.expired += 1;
            self.close(poller, ranges, id);
        }
        self.sweep_ns = if self.connections.len() == 0 { u64::MAX } else { next_ns };
    }
}

const LISTENER: Token = Token { source: Source::MooncakeListener, index: 0, generation: 0 };

fn watch(poller: &Poller, listener: &TcpListener) -> std::io::Result<()> {
    poller.add(listener.as_fd(), LISTENER.to_bits(), Interest::Readable)
}

const fn token(id: ConnectionId) -> Token {
    Token { source: Source::MooncakeServed, index: id.index, generation: id.generation }
}
