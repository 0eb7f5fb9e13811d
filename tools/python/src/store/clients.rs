//! The clients behind one store object: as many as threads ask at the same time, over one line to the control plane.
//!
//! A client of the store belongs to one thread at a time, so each call takes one for itself and gives it back. They
//! share what is registered: a client learns of a buffer when it first uses it, and forgets those that are gone.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvplane::rpc::message::GetMap;
use kvplane::{Buffer, Client, ClientConfig, ControlLink, HugePages, Region, RegionOptions, Slice, interrupt};

use crate::memory::{Entry, Memory};
use crate::outcome::{INTERNAL, NO_ROOM, failed, store_code};

/// Clients of one store object. Each has its own connections to the shards.
const CLIENTS: usize = 16;
/// How long calls wait for a cluster's first node, from the first call that finds none: callers are promised answers
/// within five seconds.
const FIRST_NODE: Duration = Duration::from_millis(4_500);
/// How long a check of health waits for the control plane.
const PLANE: Duration = Duration::from_secs(1);
/// How often they look.
const LOOK: Duration = Duration::from_millis(2);
/// Bytes of the buffer that plain gets are received in.
const BOUNCE_BYTES: usize = 1 << 20;

/// A client, with what it knows of the registered memory.
pub(crate) struct Member {
    pub(crate) client: Client,
    known: HashMap<u64, Buffer>,
    generation: u64,
    bounce: Option<Buffer>,
}

impl Member {
    /// A part of registered memory, by its address.
    pub(crate) fn slice(&mut self, entry: &Entry, address: u64, bytes: u64) -> Slice {
        let client = &mut self.client;
        let buffer = self.known.entry(entry.id).or_insert_with(|| client.register(Arc::clone(&entry.region)));
        buffer.slice((address - entry.address) as usize, bytes as usize)
    }

    /// A buffer of ours for what is to be copied out again.
    pub(crate) fn bounce(&mut self) -> Result<Buffer, kvplane::Error> {
        if let Some(bounce) = &self.bounce {
            return Ok(bounce.clone());
        }
        let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("kvplane-get", BOUNCE_BYTES) };
        let bounce = self.client.register(Region::allocate(&options)?);
        self.bounce = Some(bounce.clone());
        Ok(bounce)
    }

    fn forget_gone(&mut self, memory: &Memory) {
        let generation = memory.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let gone: Vec<u64> = self.known.keys().copied().filter(|id| !memory.contains(*id)).collect();
        for id in gone {
            if let Some(buffer) = self.known.remove(&id) {
                self.client.unregister(buffer);
            }
        }
    }
}

#[derive(Default)]
struct Members {
    idle: Vec<Member>,
    /// Those that are idle, in use, or being made.
    all: usize,
}

/// The clients of one store object, and the memory that they share.
pub(crate) struct Clients {
    config: ClientConfig,
    link: ControlLink,
    members: Mutex<Members>,
    returned: Condvar,
    pub(crate) memory: Memory,
    process: u32,
    /// Whether the cluster has had a node since; until then, until when calls wait for one.
    served: AtomicBool,
    node_by: OnceLock<Instant>,
    closed: AtomicBool,
    /// Calls under way.
    calls: AtomicUsize,
    /// All calls.
    begun: AtomicU64,
}

/// Set when the interpreter ends: no call that waits begins any more.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Calls under way, of all objects, below the process that they are of: a forked process has none of its parent's.
static CALLS: AtomicU64 = AtomicU64::new(0);

const fn calls_of(process: u32) -> u64 {
    (process as u64) << 32
}

/// No call begins any more; waits until those that are under way have ended, at most this long. Whether they have.
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

/// A call under way, for [`settle`].
pub(crate) struct Call {
    process: u32,
}

impl Call {
    /// Begins one; the number of the error when that may not be.
    pub(crate) fn begin(process: u32) -> Result<Self, i64> {
        let now = std::process::id();
        let one_more = |calls: u64| match calls >> 32 == u64::from(now) {
            true => Some(calls + 1),
            false => Some(calls_of(now) + 1),
        };
        let _ = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more);
        let call = Self { process: now };
        if ENDING.load(Ordering::SeqCst) {
            return Err(failed(INTERNAL, "the interpreter ends: no transfer begins any more"));
        }
        if now != process {
            return Err(failed(
                INTERNAL,
                format!("process {now} was forked from {process} after the setup: set up anew there"),
            ));
        }
        Ok(call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let of = calls_of(self.process);
        // One that a process was forked in does not count there.
        let one_less = |calls: u64| (calls >> 32 == of >> 32 && calls > of).then(|| calls - 1);
        let _ = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    }
}

/// A call of some clients under way, and this thread's.
struct Own<'a>(&'a Clients);

thread_local! {
    /// Whose calls are under way on this thread: several where a signal's handler makes one.
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
    /// Whether a shard and the control plane answer; else an error's number.
    pub(crate) fn check(&self) -> Result<(), i64> {
        let found = self.with(|member| member.client.exists(b"kvplane:health"))?;
        found.map_err(|error| store_code(&error))?;
        // Objects are served without it, but nobody joins, and nobody is missed.
        let answered = self.link().call_within(GetMap, PLANE);
        answered.map(|_| ()).map_err(|error| failed(NO_ROOM, error.to_string()))
    }

    /// Clients over a first one, of the tenant that it has: a certificate may have said which.
    pub(crate) fn new(config: ClientConfig, first: Client) -> Self {
        let config = ClientConfig { tenant: first.tenant_name(), ..config };
        let link = first.link().clone();
        let member = Member { client: first, known: HashMap::new(), generation: 0, bounce: None };
        Self {
            config,
            link,
            members: Mutex::new(Members { idle: vec![member], all: 1 }),
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

    /// The line to the control plane.
    pub(crate) const fn link(&self) -> &ControlLink {
        &self.link
    }

    /// Whose keys they ask for.
    pub(crate) fn tenant(&self) -> &[u8] {
        self.config.tenant.as_bytes()
    }

    /// The process that made them: in one that was forked from it, nothing of them works.
    pub(crate) const fn process(&self) -> u32 {
        self.process
    }

    /// What was counted of calls, as Prometheus text.
    pub(crate) fn metrics_text(&self) -> String {
        let numbers = [
            ("calls_total", "counter", "Calls of the store.", self.begun.load(Ordering::Relaxed)),
            ("calls_in_progress", "gauge", "Calls under way.", self.calls.load(Ordering::Relaxed) as u64),
            ("connections", "gauge", "Clients that serve calls, one at a time each.", self.lock().all as u64),
            ("registered_bytes", "gauge", "Bytes of registered memory.", self.memory.bytes()),
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

    /// Whether the cluster has or had a node.
    pub(crate) fn is_served(&self) -> bool {
        let served = self.served.load(Ordering::Relaxed) || self.link.map().is_some_and(|map| !map.members.is_empty());
        self.served.store(served, Ordering::Relaxed);
        served
    }

    /// Waits for the cluster's first node, in the calls of the first seconds that find none: those who start a cluster
    /// and its users together need not wait themselves.
    fn await_node(&self) {
        if self.is_served() {
            return;
        }
        let until = *self.node_by.get_or_init(|| Instant::now() + self.config.deadline.min(FIRST_NODE));
        let goes_on = || !self.closed.load(Ordering::SeqCst) && !ENDING.load(Ordering::SeqCst);
        while Instant::now() < until && goes_on() && !self.is_served() && interrupt::sleep(LOOK) {}
    }

    /// Runs `work` with a client of its own; else the number of the error.
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
                return Err(failed(NO_ROOM, format!("{CLIENTS} calls are under way: the most at a time")));
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
            Ok(client) => {
                let generation = self.memory.generation();
                Ok(Member { client, known: HashMap::new(), generation, bounce: None })
            }
            Err(error) => {
                self.lock().all -= 1;
                self.returned.notify_one();
                Err(store_code(&error))
            }
        }
    }

    /// Clients that nobody uses forget what was unregistered now, and not at their next call.
    pub(crate) fn sweep(&self) {
        for member in &mut self.lock().idle {
            member.forget_gone(&self.memory);
        }
    }

    /// Ends all clients; those in use end when their calls do. Waits for these, within the deadline of a call.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let until = Instant::now() + self.config.deadline;
        // Those of this thread, where a signal's handler closes, end after it has returned.
        let own = Own::count(self);
        while self.calls.load(Ordering::SeqCst) > own && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
        }
        let idle = core::mem::take(&mut self.lock().idle);
        self.returned.notify_all();
        drop(idle);
    }

    /// Leaves everything as it is: in a forked process the threads behind it do not exist, and its connections are the
    /// parent's.
    pub(crate) fn leak(&self) {
        // A thread of the parent's may have held the lock at the fork: then nobody gives it back here.
        if let Ok(mut members) = self.members.try_lock() {
            core::mem::forget(core::mem::take(&mut members.idle));
        }
        core::mem::forget(self.link.clone());
    }
}

/// A client in use: it goes back also when the work panics, but then it is not used again.
struct Lease<'a> {
    clients: &'a Clients,
    member: Option<Member>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let member = self.member.take();
        let usable = !std::thread::panicking() && !self.clients.closed.load(Ordering::SeqCst);
        let mut members = self.clients.lock();
        match member {
            Some(member) if usable => members.idle.push(member),
            _ => members.all -= 1,
        }
        drop(members);
        self.clients.returned.notify_one();
    }
}
