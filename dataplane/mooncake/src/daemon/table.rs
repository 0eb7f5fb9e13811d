//! Connections of a handshake daemon with their deadlines. Tokens are never reused, so a late event of a closed
//! connection finds nothing.

use std::collections::{BTreeSet, HashMap};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use kvplane_sys::{Interest, Poller};

use super::DaemonConfig;
use super::counts::{Tally, count};
use crate::connection::{Connection, Step};
use crate::published::Local;

pub(super) struct Table {
    config: DaemonConfig,
    local: Arc<dyn Local>,
    tally: Arc<Tally>,
    entries: HashMap<u64, Entry>,
    /// Times at which the deadlines of connections are checked: one entry for each. Progress does not move it; a check
    /// that finds progress does.
    due: BTreeSet<(u64, u64)>,
    next_token: u64,
    held_bytes: usize,
}

struct Entry {
    connection: Connection<TcpStream>,
    started_ns: u64,
    progress_ns: u64,
    look_ns: u64,
    held_bytes: usize,
}

impl Table {
    pub(super) fn new(config: DaemonConfig, local: Arc<dyn Local>, tally: Arc<Tally>) -> Self {
        let (entries, due) = (HashMap::new(), BTreeSet::new());
        Self { config, local, tally, entries, due, next_token: 0, held_bytes: 0 }
    }

    /// Adds a connection; returns `None` if the system refuses to watch it.
    pub(super) fn insert(&mut self, stream: TcpStream, poller: &Poller, now_ns: u64) -> Option<u64> {
        count(&self.tally.accepted);
        if self.entries.len() >= self.config.max_connections {
            self.evict(u64::MAX);
        }
        let token = self.next_token;
        stream.set_nonblocking(true).ok()?;
        poller.add(stream.as_fd(), token, Interest::BothEdges).ok()?;
        self.next_token += 1;
        let connection = Connection::new(stream);
        let look_ns = self.due_ns(now_ns, now_ns);
        self.due.insert((look_ns, token));
        let entry = Entry { connection, started_ns: now_ns, progress_ns: now_ns, look_ns, held_bytes: 0 };
        self.entries.insert(token, entry);
        Some(token)
    }

    /// Advances a connection. Returns `None` if it is gone, now or before.
    pub(super) fn advance(&mut self, token: u64, now_ns: u64) -> Option<Step> {
        let entry = self.entries.get_mut(&token)?;
        let (step, progress) = entry.connection.advance(&*self.local, self.config.max_message_bytes);
        if progress {
            entry.progress_ns = now_ns;
        }
        if let Some(answered) = entry.connection.take_answered() {
            self.tally.answered(answered);
        }
        let held_bytes = entry.connection.held_bytes();
        self.held_bytes = self.held_bytes - entry.held_bytes + held_bytes;
        entry.held_bytes = held_bytes;
        let counter = match step {
            Step::Wait | Step::Again if self.held_bytes <= self.config.max_held_bytes => return Some(step),
            Step::Wait | Step::Again => Some(&self.tally.evicted),
            Step::Close => None,
            Step::Malformed => Some(&self.tally.malformed),
        };
        counter.map(count);
        self.remove(token);
        None
    }

    /// Returns the time of the next check of deadlines.
    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.due.first().map(|&(due_ns, _)| due_ns)
    }

    /// Closes connections that have reached a deadline.
    pub(super) fn expire(&mut self, now_ns: u64) {
        while let Some(&(look_ns, token)) = self.due.first()
            && look_ns <= now_ns
        {
            let due_ns = self.entries.get(&token).map_or(0, |entry| self.due_ns(entry.started_ns, entry.progress_ns));
            if due_ns <= now_ns {
                count(&self.tally.expired);
                self.remove(token);
                continue;
            }
            self.due.remove(&(look_ns, token));
            self.due.insert((due_ns, token));
            if let Some(entry) = self.entries.get_mut(&token) {
                entry.look_ns = due_ns;
            }
        }
    }

    fn due_ns(&self, started_ns: u64, progress_ns: u64) -> u64 {
        let idle_ns = u64::try_from(self.config.idle.as_nanos()).unwrap_or(u64::MAX);
        let total_ns = u64::try_from(self.config.total.as_nanos()).unwrap_or(u64::MAX);
        progress_ns.saturating_add(idle_ns).min(started_ns.saturating_add(total_ns))
    }

    /// Evicts the connection that has been idle longest, if it has been since `before_ns` or earlier. Returns true if
    /// there was one.
    pub(super) fn evict(&mut self, before_ns: u64) -> bool {
        let silent = self.entries.iter().min_by_key(|(token, entry)| (entry.progress_ns, **token));
        let Some((&token, _)) = silent.filter(|(_, entry)| entry.progress_ns <= before_ns) else { return false };
        count(&self.tally.evicted);
        self.remove(token);
        true
    }

    /// Closes a connection, which also removes it from the poller: the descriptor has no duplicates.
    fn remove(&mut self, token: u64) {
        if let Some(entry) = self.entries.remove(&token) {
            self.due.remove(&(entry.look_ns, token));
            self.held_bytes -= entry.held_bytes;
        }
    }
}
