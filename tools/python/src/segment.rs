//! Memory that this process provides to the cluster: storage nodes of one shard each.

use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvplane::setup::served_on;
use kvplane::{Control, DataTls, Node, NodeConfig, Pacing};

use crate::control::{SetupThreadError, within};
use crate::outcome::{INTERNAL, NO_ROOM, failed};

/// Deadline of a node's join, apart from the time for its memory.
const JOIN: Duration = Duration::from_secs(20);
/// Memory for which a join has another second: each page is zeroed by the kernel, which takes the longer the more
/// processes want the processor. Idle hosts zero some GiB in a second.
const ZEROED_BYTES_PER_SECOND: u64 = 64 << 20;
/// Longest drain of a node that leaves.
const DRAIN: Duration = Duration::from_secs(60);
/// Longest wait without progress for migrations in flight.
const MOVES_PATIENCE: Duration = Duration::from_secs(2);
/// Longest drain when a store closes or the interpreter exits, which should not take long.
const CLOSE: Duration = Duration::from_secs(4);
/// Ports of which a node has the first free one from a place that depends on its process, as the original's clients do.
const PORTS: Range<u16> = 12_300..14_300;
/// Minimum memory of a node.
const LEAST_BYTES: u64 = 2 << 20;

/// Reason why this process provides no memory.
#[derive(Debug)]
enum JoinError {
    /// The node did not join in time, which is its deadline.
    Late(Duration),
    /// No address of this host leads to the control plane.
    Address(kvplane::setup::SetupError),
    /// The node did not start.
    Node(kvplane::Error),
    /// The join did not run to its end.
    Thread(SetupThreadError),
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late(deadline) => write!(f, "the node did not join within {} s", deadline.as_secs()),
            Self::Address(error) => error.fmt(f),
            Self::Node(error) => error.fmt(f),
            Self::Thread(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for JoinError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Address(error) => std::error::Error::source(error),
            _ => None,
        }
    }
}

impl From<SetupThreadError> for JoinError {
    fn from(error: SetupThreadError) -> Self {
        Self::Thread(error)
    }
}

/// Returns the deadline of the join of a node with this much memory.
fn join_deadline(bytes: u64) -> Duration {
    JOIN + Duration::from_secs(bytes / ZEROED_BYTES_PER_SECOND)
}

/// Returns true if no process listens on a port of this address.
fn is_free(listen: IpAddr, port: u16) -> bool {
    TcpListener::bind((listen, port)).is_ok()
}

/// Returns a free port of [`PORTS`]; 0, which picks any, if there is none.
fn free_port(listen: IpAddr) -> u16 {
    let first = std::process::id() as usize % PORTS.len();
    PORTS.skip(first).chain(PORTS.take(first)).find(|port| is_free(listen, *port)).unwrap_or_default()
}

/// Node of this process.
pub(crate) struct Segment {
    pub(crate) name: String,
    node: Node,
}

impl Segment {
    /// Joins the cluster with this much memory; returns the error code on failure. The node listens where clients of
    /// the control plane reach it: on loopback if the control plane does, else on the address of `host` if that belongs
    /// to this host, or on the address of the route to the control plane. TLS on its data connections has the mode of
    /// the store's clients.
    pub(crate) fn join(control: &Control, data_tls: DataTls, bytes: u64, host: &str) -> Result<Self, i64> {
        let (control, host) = (control.clone(), host.to_owned());
        let deadline = join_deadline(bytes);
        let started = within(deadline, JoinError::Late(deadline), move || {
            let listen = served_on(&control, &host).map_err(JoinError::Address)?;
            let config = NodeConfig {
                listen,
                port: free_port(listen),
                control,
                data_tls,
                shards: Some(1),
                // It shares its cores with an inference engine.
                pacing: Some(Pacing::Park),
                ..NodeConfig::local("", bytes.max(LEAST_BYTES))
            };
            let started = match Node::start(&config) {
                // Another process has taken the port in between.
                Err(_) if !is_free(listen, config.port) => Node::start(&NodeConfig { port: 0, ..config }),
                started => started,
            };
            started.map_err(JoinError::Node)
        });
        let node =
            started.map_err(|error| failed(NO_ROOM, format!("cannot provide a segment of {bytes} bytes: {error}")))?;
        let name = node.addresses().first().map(ToString::to_string).unwrap_or_default();
        Ok(Self { name, node })
    }

    /// Returns the counters of several nodes' shards as Prometheus text; empty while one does not answer.
    pub(crate) fn metrics_text(segments: &[Self]) -> String {
        if segments.is_empty() {
            return String::new();
        }
        Node::metrics_text_of(segments.iter().map(|segment| &segment.node)).unwrap_or_default()
    }

    /// Leaves the cluster; with `grace`, migrates its objects to other nodes first, as far as that time and their
    /// memory allow.
    pub(crate) fn leave(self, grace: Duration) -> i64 {
        let (begun, grace) = (Instant::now(), grace.min(DRAIN));
        let drained = if grace.is_zero() { Ok(()) } else { self.node.drain(grace).map(drop) };
        let left = grace.saturating_sub(begun.elapsed());
        if !left.is_zero() {
            // Migrations in flight are waited for, as long as they make progress; after a complete drain,
            // reports of new owners.
            let _ = self.node.finish_moves(MOVES_PATIENCE, left);
        }
        match drained {
            Ok(()) => 0,
            Err(error) => failed(INTERNAL, error.to_string()),
        }
    }
}

/// Segments of one store.
#[derive(Default)]
pub(crate) struct Segments(Mutex<Vec<Segment>>);

/// Segments of all stores, each with the process that joined: a forked process has none of its parent's.
static ALL: Mutex<Vec<(u32, Weak<Segments>)>> = Mutex::new(Vec::new());

impl Segments {
    /// Creates an empty list.
    pub(crate) fn new() -> Arc<Self> {
        let segments = Arc::new(Self::default());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, one)| one.strong_count() > 0);
        all.push((std::process::id(), Arc::downgrade(&segments)));
        segments
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<Segment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the cluster with all segments: their objects migrate to other members first, as far as [`CLOSE`] and
    /// their memory allow. Leaves at once if the control plane is away, because it has to publish the new owners.
    pub(crate) fn leave(&self) {
        let segments = core::mem::take(&mut *self.lock());
        let until = Instant::now() + CLOSE;
        for segment in segments {
            let left = until.saturating_duration_since(Instant::now());
            let grace = if segment.node.trouble().is_some() { Duration::ZERO } else { left };
            // Fails without other members, which is ignored.
            let _ = segment.leave(grace);
        }
    }

    /// Abandons the segments, in a forked process.
    pub(crate) fn leak(&self) {
        // A thread of the parent may have held the lock at the fork: then it is never released here.
        if let Ok(mut segments) = self.0.try_lock() {
            core::mem::forget(core::mem::take(&mut *segments));
        }
    }
}

/// Leaves the cluster with all segments of this process, for the exit of the interpreter: threads may still use the
/// stores then, which are not closed.
pub(crate) fn leave_all() {
    let all = core::mem::take(&mut *ALL.lock().unwrap_or_else(PoisonError::into_inner));
    let ours = all.into_iter().filter(|(process, _)| *process == std::process::id());
    ours.filter_map(|(_, one)| one.upgrade()).for_each(|one| one.leave());
}
