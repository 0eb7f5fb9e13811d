//! Client pool behind one store object: a client for each concurrent thread, over one control link.
//!
//! A client of the store belongs to one thread at a time, so each call takes one and returns it. The clients share the
//! registered memory: a client registers a buffer at its first use, and drops those that were unregistered.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvplane::rpc::message::GetMap;
use kvplane::{Client, ClientConfig, ControlLink, PoolReadCounters, interrupt};

use crate::memory::Memory;
use crate::outcome::{INTERNAL, NO_ROOM, failed, store_code};
use crate::store::member::Member;

/// Maximum number of clients of one store object. Each has its own connections to the shards.
const CLIENTS: usize = 16;
/// Longest wait of calls for a cluster's first node, from the first call that finds none: calls are documented to
/// return within five seconds.
const FIRST_NODE: Duration = Duration::from_millis(4_500);
/// Longest wait of a health check for the control plane.
const PLANE: Duration = Duration::from_secs(1);
/// Polling interval of that wait.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Default)]
struct Members {
    idle: Vec<Member>,
    /// Number of clients that are idle, in use, or being created.
    all: usize,
    /// Gets into memory of devices of all clients, as far as they were idle when they were counted.
    reads: PoolReadCounters,
}

/// Clients of one store object, and the memory that they share.
pub(crate) struct Clients {
    config: ClientConfig,
    link: ControlLink,
    members: Mutex<Members>,
    returned: Condvar,
    pub(crate) memory: Memory,
    process: u32,
    /// True once the cluster has had a node; `node_by` bounds the wait for the first one.
    served: AtomicBool,
    node_by: OnceLock<Instant>,
    closed: AtomicBool,
    /// Calls in progress.
    calls: AtomicUsize,
    /// Total number of calls.
    begun: AtomicU64,
}

/// Set when the interpreter exits: no call that may block begins any more.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Calls in progress of all objects, in the lower half below the process id: a forked process has none of its parent's.
static CALLS: AtomicU64 = AtomicU64::new(0);

const fn calls_of(process: u32) -> u64 {
    (process as u64) << 32
}

/// Rejects further calls; waits up to `longest` until those in progress have ended. Returns true if they have.
pub(crate) fn settle(longest: Duration) -> bool {
    ENDING.store(true, Ordering::SeqCst);
    let until = Instant::now() + longest;
    let none = calls_of(std::process::id());
    while CALLS.load(Ordering::SeqCst).checked_sub(none).is_some_and(|calls| (1..1 << 32).contains(&calls)) {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Call in progress, for [`settle`].
pub(crate) struct Call {
    process: u32,
}

impl Call {
    /// Begins a call; returns the error code if it is rejected.
    pub(crate) fn begin(process: u32) -> Result<Self, i64> {
        let now = std::process::id();
        let one_more = |calls: u64| match calls >> 32 == u64::from(now) {
            true => Some(calls + 1),
            false => Some(calls_of(now) + 1),
        };
        let _ = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more);
        let call = Self { process: now };
        if ENDING.load(Ordering::SeqCst) {
            return Err(failed(INTERNAL, "the interpreter is exiting: no call begins any more"));
        }
        if now != process {
            return Err(failed(
                INTERNAL,
                format!("process {now} was forked from {process} after the setup: call setup again in it"),
            ));
        }
        Ok(call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let of = calls_of(self.process);
        // A call during which the process was forked does not count in the child.
        let one_less = |calls: u64| (calls >> 32 == of >> 32 && calls > of).then(|| calls - 1);
        let _ = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    }
}

/// Call in progress on these clients, and on this thread.
struct Own<'a>(&'a Clients);

thread_local! {
    /// Clients whose calls are in progress on this thread: several if a signal handler makes calls.
    static OWN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl<'a> Own<'a> {
    fn begin(clients: &'a Clients) -> Self {
        clients.calls.fetch_add(1, Ordering::SeqCst);
        clients.begun.fetch_add(1, Ordering::Relaxed);
        OWN.with_borrow_mut(|own| own.push(std::ptr::from_ref(clients).addr()));
        Self(clients)
    }

    fn count(clients: &Clients) -> usize {
        let at = std::ptr::from_ref(clients).addr();
        OWN.with_borrow(|own| own.iter().filter(|one| **one == at).count())
    }
}

impl Drop for Own<'_> {
    fn drop(&mut self) {
        OWN.with_borrow_mut(Vec::pop);
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Clients {
    /// Checks that a shard and the control plane answer; returns an error code otherwise.
    pub(crate) fn check(&self) -> Result<(), i64> {
        let found = self.with(|member| member.client.exists(b"kvplane:health"))?;
        found.map_err(|error| store_code(&error))?;
        // Objects are served without the control plane, but no node can join, and no failure is detected.
        let answered = self.link().call_within(GetMap, PLANE);
        answered.map(|_| ()).map_err(|error| failed(NO_ROOM, error.to_string()))
    }

    /// Creates the pool around a first client, with its tenant, which its certificate may have determined.
    pub(crate) fn new(config: ClientConfig, first: Client) -> Self {
        let config = ClientConfig { tenant: first.tenant_name(), ..config };
        let link = first.link().clone();
        let member = Member::new(first, 0);
        Self {
            config,
            link,
            members: Mutex::new(Members { idle: vec![member], all: 1, reads: PoolReadCounters::default() }),
            returned: Condvar::new(),
            memory: Memory::default(),
            process: std::process::id(),
            served: AtomicBool::new(false),
            node_by: OnceLock::new(),
            closed: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
        }
    }

    /// Returns the control link.
    pub(crate) const fn link(&self) -> &ControlLink {
        &self.link
    }

    /// Returns the tenant of the keys.
    pub(crate) fn tenant(&self) -> &[u8] {
        self.config.tenant.as_bytes()
    }

    /// Returns the id of the process that created the pool: in a process forked from it, nothing of it works.
    pub(crate) const fn process(&self) -> u32 {
        self.process
    }

    /// Returns the counters of the calls, as Prometheus text.
    pub(crate) fn metrics_text(&self) -> String {
        let (all, reads) = {
            let members = &mut *self.lock();
            members.idle.iter_mut().for_each(|member| member.count_reads(&mut members.reads, false));
            (members.all as u64, members.reads)
        };
        let numbers = [
            ("calls_total", "counter", "Calls of the store.", self.begun.load(Ordering::Relaxed)),
            ("calls_in_progress", "gauge", "Calls in progress.", self.calls.load(Ordering::Relaxed) as u64),
            ("connections", "gauge", "Clients that serve calls, one at a time each.", all),
            ("registered_bytes", "gauge", "Bytes of registered memory.", self.memory.bytes()),
            ("pool_read_bytes_total", "counter", "Bytes that copy engines read from the pools of nodes.", reads.bytes),
            (
                "pool_reads_staged_total",
                "counter",
                "Gets into memory of devices that were staged, as their part of the pool is not pinned.",
                reads.copied_reads,
            ),
            (
                "pool_pin_refusals_total",
                "counter",
                "Connections whose pool a driver has refused to pin.",
                reads.refused,
            ),
            ("pool_pinned_bytes", "gauge", "Bytes of the pools of nodes that are pinned.", reads.pinned_bytes),
        ];
        let family = |(name, kind, help, value): (&str, &str, &str, u64)| {
            let name = format!("kvplane_client_{name}");
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n")
        };
        numbers.into_iter().map(family).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the cluster has or had a node.
    pub(crate) fn is_served(&self) -> bool {
        let served = self.served.load(Ordering::Relaxed) || self.link.map().is_some_and(|map| !map.members.is_empty());
        self.served.store(served, Ordering::Relaxed);
        served
    }

    /// Waits for the cluster's first node, in the calls of the first seconds that find none: programs that start a
    /// cluster together with its users need no wait of their own.
    fn await_node(&self) {
        if self.is_served() {
            return;
        }
        let until = *self.node_by.get_or_init(|| Instant::now() + self.config.deadline.min(FIRST_NODE));
        let goes_on = || !self.closed.load(Ordering::SeqCst) && !ENDING.load(Ordering::SeqCst);
        while Instant::now() < until && goes_on() && !self.is_served() && interrupt::sleep(LOOK) {}
    }

    /// Runs `work` with a client taken from the pool; returns an error code otherwise.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Member) -> T) -> Result<T, i64> {
        let _call = Call::begin(self.process)?;
        let _own = Own::begin(self);
        self.await_node();
        self.with_member(work)
    }

    fn with_member<T>(&self, work: impl FnOnce(&mut Member) -> T) -> Result<T, i64> {
        let mut member = self.take()?;
        member.forget_gone(&self.memory);
        let mut lease = Lease { clients: self, member: Some(member) };
        Ok(work(lease.member.as_mut().expect("it goes back when the lease ends")))
    }

    fn take(&self) -> Result<Member, i64> {
        let until = Instant::now() + self.config.deadline;
        let mut members = self.lock();
        loop {
            if self.closed.load(Ordering::SeqCst) {
                return Err(failed(INTERNAL, "the store was closed"));
            }
            if let Some(member) = members.idle.pop() {
                return Ok(member);
            }
            if members.all < CLIENTS {
                members.all += 1;
                drop(members);
                return self.make();
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(NO_ROOM, format!("{CLIENTS} calls are in progress, which is the limit")));
            }
            let waited = self.returned.wait_timeout(members, interrupt::step(left));
            members = waited.unwrap_or_else(PoisonError::into_inner).0;
            if interrupt::is_watched() && members.idle.is_empty() {
                drop(members);
                if interrupt::ended() {
                    return Err(failed(INTERNAL, "the call was interrupted"));
                }
                members = self.lock();
            }
        }
    }

    fn make(&self) -> Result<Member, i64> {
        match Client::connect_with(&self.config, self.link.clone()) {
            Ok(client) => Ok(Member::new(client, self.memory.generation())),
            Err(error) => {
                self.lock().all -= 1;
                self.returned.notify_one();
                Err(store_code(&error))
            }
        }
    }

    /// Lets idle clients drop unregistered memory now, instead of at their next call.
    pub(crate) fn sweep(&self) {
        for member in &mut self.lock().idle {
            member.forget_gone(&self.memory);
        }
    }

    /// Closes all clients; those in use are closed when their calls end. Waits for these, up to the deadline of a call.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let until = Instant::now() + self.config.deadline;
        // Calls of this thread, if a signal handler closes, end after the handler has returned.
        let own = Own::count(self);
        while self.calls.load(Ordering::SeqCst) > own && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
        }
        let idle = core::mem::take(&mut self.lock().idle);
        self.returned.notify_all();
        drop(idle);
    }

    /// Abandons the clients: in a forked process their threads do not exist, and their connections belong to the
    /// parent.
    pub(crate) fn leak(&self) {
        // A thread of the parent may have held the lock at the fork: then it is never released here.
        if let Ok(mut members) = self.members.try_lock() {
            core::mem::forget(core::mem::take(&mut members.idle));
        }
        core::mem::forget(self.link.clone());
    }
}

/// Client in use: it returns to the pool on drop, unless the work panicked.
struct Lease<'a> {
    clients: &'a Clients,
    member: Option<Member>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut member = self.member.take();
        let is_whole = !std::thread::panicking();
        let usable = is_whole && !self.clients.closed.load(Ordering::SeqCst);
        let mut members = self.clients.lock();
        if let Some(member) = member.as_mut().filter(|_| is_whole && !usable) {
            member.count_reads(&mut members.reads, true);
        }
        match member {
            Some(member) if usable => members.idle.push(member),
            _ => members.all -= 1,
        }
        drop(members);
        self.clients.returned.notify_one();
    }
}
