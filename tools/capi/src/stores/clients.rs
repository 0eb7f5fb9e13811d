//! Clients of one store: a client belongs to one thread at a time, so each call takes one and returns it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvplane::{Client, ClientConfig, ControlLink};

use super::memory::{Member, Memory};
use super::outcome::NO_ROOM;

/// Maximum number of clients; each has its own connections to the shards.
const CLIENTS: usize = 16;
/// Longest wait of calls for a cluster's first node, from the first call that finds none.
const FIRST_NODE: Duration = Duration::from_millis(4_500);
/// Polling interval of that wait.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Default)]
struct Members {
    idle: Vec<Member>,
    /// Number of clients that are idle, in use, or being created.
    all: usize,
}

/// Clients over one control link.
pub(crate) struct Clients {
    config: ClientConfig,
    link: ControlLink,
    members: Mutex<Members>,
    returned: Condvar,
    /// End of the wait for the cluster's first node; `None` before a call has found none.
    node_by: Mutex<Option<Instant>>,
}

impl Clients {
    /// Creates the pool around a first client.
    pub(crate) fn new(config: ClientConfig, first: Client, memory: &Memory) -> Self {
        let link = first.link().clone();
        let members = Members { idle: vec![Member::new(first, memory)], all: 1 };
        Self { config, link, members: Mutex::new(members), returned: Condvar::new(), node_by: Mutex::new(None) }
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the cluster has a node.
    pub(crate) fn is_served(&self) -> bool {
        self.link.map().is_some_and(|map| !map.members.is_empty())
    }

    /// Waits for the cluster's first node: programs that start a cluster together with its users need no wait of their
    /// own.
    fn await_node(&self) {
        if self.is_served() {
            return;
        }
        let until = *self
            .node_by
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(|| Instant::now() + FIRST_NODE.min(self.config.deadline));
        while Instant::now() < until && !self.is_served() {
            std::thread::sleep(LOOK);
        }
    }

    /// Runs `work` with a client; returns the number of an error if there is none.
    pub(crate) fn with<T>(&self, memory: &Memory, work: impl FnOnce(&mut Member) -> T) -> Result<T, i64> {
        self.await_node();
        let mut lease = Lease { clients: self, member: Some(self.take(memory)?) };
        let member = lease.member.as_mut().expect("it goes back when the lease ends");
        member.forget_gone(memory);
        Ok(work(member))
    }

    fn take(&self, memory: &Memory) -> Result<Member, i64> {
        let until = Instant::now() + self.config.deadline;
        let mut members = self.lock();
        loop {
            if let Some(member) = members.idle.pop() {
                return Ok(member);
            }
            if members.all < CLIENTS {
                members.all += 1;
                drop(members);
                return Client::connect_with(&self.config, self.link.clone())
                    .map(|client| Member::new(client, memory))
                    .map_err(|error| {
                        self.lock().all -= 1;
                        self.returned.notify_one();
                        error.store_code()
                    });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NO_ROOM);
            }
            members = self.returned.wait_timeout(members, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets idle clients drop unregistered memory now, instead of at their next call.
    pub(crate) fn sweep(&self, memory: &Memory) {
        for member in &mut self.lock().idle {
            member.forget_gone(memory);
        }
    }
}

/// A client that is in use. After a panic it does not go back: its state is unknown.
struct Lease<'a> {
    clients: &'a Clients,
    member: Option<Member>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut members = self.clients.lock();
        match self.member.take() {
            Some(member) if !std::thread::panicking() => members.idle.push(member),
            _ => members.all -= 1,
        }
        drop(members);
        self.clients.returned.notify_one();
    }
}
