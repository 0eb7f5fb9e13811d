//! Cluster state in etcd, shared by several control planes: one is the leader, the others are standbys.
//!
//! Keys, below `PREFIX CLUSTER /`:
//!
//! | key | value |
//! |---|---|
//! | `leader` | the leader: a number drawn for each turn, and its address. Rewritten every [`BEAT`] |
//! | `fence` | number of the turn and count of its changes: every change compares it with the value before |
//! | `state` | format and identity of the cluster state |
//! | `tickets` | the ticket keys |
//! | `ticket-time` | ticket time in seconds, reserved ahead: no later time was ever published |
//! | `records/KEY` | the records of the cluster |
//! | `batch`, `batch/N` | a change too large for one transaction, until it is carried out |
//!
//! A turn is one term of leadership. The leader rewrites its key every [`BEAT`]. A standby that sees the same revision
//! of `leader` for [`SILENCE`], while etcd keeps answering it, takes over the key. Leases of etcd are not used: they
//! last two seconds at least, and expire up to half a second late.
//!
//! Two control planes that both consider themselves leader for a moment do no harm to the state, since a change is
//! carried out only if `fence` has the value that the previous change left: a fenced leader cannot change anything, and
//! neither can a transaction of its own that etcd processes late. Maps are published after the changes behind them.
//!
//! All of it happens on a separate thread, which blocks in its calls. The control thread waits for a change for
//! [`PATIENCE`] at most.

mod campaign;
mod config;
mod error;
mod records;
mod turn;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvplane_cluster::{Change, Record};
use kvplane_etcd::{Gateway, Http};
use tokio::sync::watch;

pub use config::{EtcdConfig, EtcdConfigError};
pub use error::EtcdChangeError;
use records::Keys;
use turn::Turns;

/// Interval at which the leader rewrites its key.
const BEAT: Duration = Duration::from_millis(300);
/// Interval at which a standby reads the leader's key.
const LOOK: Duration = Duration::from_millis(150);
/// Time without a rewrite of the leader's key after which a standby takes over.
const SILENCE: Duration = Duration::from_millis(1_200);
/// Time without an answer from etcd after which a leader steps down and rejects its callers.
const STEP_ASIDE: Duration = Duration::from_secs(4);
/// Deadline of one read or rewrite of the leader's key.
const CALL: Duration = Duration::from_millis(900);
/// Deadline of a change, all attempts together.
const COMMIT: Duration = Duration::from_millis(1_500);
/// Longest wait of the control thread for a change.
const PATIENCE: Duration = Duration::from_millis(3_500);
/// Longest wait for etcd's first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// Longest answer: a page of records.
const ANSWER_BYTES: usize = 64 << 20;

/// Role of this control plane.
#[derive(Clone, Debug)]
pub(crate) enum Leadership {
    /// No leader is known, for this reason.
    Asking(String),
    /// The control plane at this address is the leader.
    Follows(String),
    /// This control plane is the leader.
    Leads(Arc<Takeover>),
    /// This control plane cannot continue, for this reason.
    Failed(String),
}

/// State with which a new leader starts.
#[derive(Debug)]
pub(crate) struct Takeover {
    /// Number of the turn.
    pub(crate) turn: u64,
    pub(crate) state_id: u64,
    pub(crate) records: Vec<Record>,
    pub(crate) tickets: Option<String>,
    /// Ticket time, in seconds.
    pub(crate) ticket_time_s: Option<u64>,
}

/// Command to the etcd thread.
enum Command {
    /// Set or remove these keys in this turn: all or none.
    Commit { turn: u64, changes: Vec<records::KeyChange>, done: SyncSender<Result<(), EtcdChangeError>> },
    /// Give up leadership and campaign again, as the control thread cannot continue with this turn.
    Abandon { turn: u64 },
    /// Give up leadership and end.
    Resign,
}

/// Handle of the etcd thread, which ends with it.
pub(crate) struct Etcd {
    commands: Sender<Command>,
    leadership_watch: watch::Receiver<Leadership>,
    /// True if etcd left the last rewrite of the key unanswered: no change is possible until it answers one.
    uncertain: Arc<AtomicBool>,
    name: String,
    thread: Option<JoinHandle<()>>,
}

/// One term of leadership: makes changes durable while it lasts.
#[derive(Clone)]
pub(crate) struct Turn {
    commands: Sender<Command>,
    uncertain: Arc<AtomicBool>,
    turn: u64,
    name: String,
}

impl Etcd {
    /// Starts to campaign for `address`, and waits until etcd has answered once.
    pub(crate) fn start(config: &EtcdConfig, cluster: &str, address: String) -> Result<Self, EtcdConfigError> {
        let certificates = config.read_certificates()?;
        let scheme = if certificates.is_some() { "https" } else { "http" };
        let urls = config.endpoints.iter().map(|endpoint| format!("{scheme}://{endpoint}")).collect();
        let gateway = Gateway::new(urls, Http::kept(ANSWER_BYTES, certificates));
        let name = format!("etcd://{}", config.endpoints.join(","));
        let (commands, receiver) = channel();
        let (leadership, mut leadership_watch) =
            watch::channel(Leadership::Asking("the first request to etcd is in flight".to_owned()));
        let uncertain = Arc::new(AtomicBool::new(false));
        let keys = Keys::new(&config.prefix, cluster);
        let turns = Turns::new(gateway, keys, address, receiver, leadership, Arc::clone(&uncertain));
        let thread = thread::Builder::new()
            .name("kvplane-etcd".to_owned())
            .spawn(move || turns.run())
            .map_err(|error| EtcdConfigError::Thread(error.to_string()))?;
        let etcd = Self { commands, leadership_watch: leadership_watch.clone(), uncertain, name, thread: Some(thread) };
        let by = Instant::now() + FIRST_ANSWER;
        loop {
            match &*leadership_watch.borrow_and_update() {
                Leadership::Asking(reason) if Instant::now() > by => {
                    return Err(EtcdConfigError::Silent(reason.clone()));
                }
                Leadership::Failed(reason) => return Err(EtcdConfigError::Failed(reason.clone())),
                Leadership::Asking(_) => {}
                Leadership::Follows(_) | Leadership::Leads(_) => return Ok(etcd),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the watched role of this control plane.
    pub(crate) fn leadership_watch(&self) -> watch::Receiver<Leadership> {
        self.leadership_watch.clone()
    }

    /// Returns the turn that began with `led`.
    pub(crate) fn turn(&self, led: &Takeover) -> Turn {
        let (commands, uncertain) = (self.commands.clone(), Arc::clone(&self.uncertain));
        Turn { commands, uncertain, turn: led.turn, name: self.name.clone() }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // The thread may have ended after a failure.
        let _ = self.commands.send(Command::Resign);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Turn {
    /// Makes `changes` durable, all or none, with the identity of an adopted state if one is given; blocks for
    /// [`PATIENCE`] at most. After an error the turn is over.
    pub(crate) fn commit(&self, state_id: Option<u64>, changes: &[Change]) -> Result<(), EtcdChangeError> {
        let state = state_id.map(records::state_change);
        self.send(changes.iter().map(records::key_change).chain(state).collect())
    }

    /// Makes the ticket keys durable.
    pub(crate) fn keep_tickets(&self, text: &str) -> Result<(), EtcdChangeError> {
        self.send(vec![records::tickets_change(text)])
    }

    /// Makes the ticket time durable, in seconds.
    pub(crate) fn keep_ticket_time(&self, seconds: u64) -> Result<(), EtcdChangeError> {
        self.send(vec![records::ticket_time_change(seconds)])
    }

    fn send(&self, changes: Vec<records::KeyChange>) -> Result<(), EtcdChangeError> {
        let (done, answer) = sync_channel(1);
        let command = Command::Commit { turn: self.turn, changes, done };
        self.commands.send(command).map_err(|_| EtcdChangeError::ThreadEnded)?;
        answer.recv_timeout(PATIENCE).map_err(|_| EtcdChangeError::Late { waited: PATIENCE })?
    }

    /// Ends the turn, if it lasts: the next leader reads the stored state again.
    pub(crate) fn abandon(&self) {
        // The thread may have ended.
        let _ = self.commands.send(Command::Abandon { turn: self.turn });
    }

    /// Returns the reason for which no change is possible at present; called before a change, so that none begins in
    /// vain.
    pub(crate) fn uncertainty(&self) -> Option<String> {
        let uncertain = self.uncertain.load(Ordering::Acquire);
        let words = "does not answer: no change is possible until it does; data operations continue";
        uncertain.then(|| format!("{} {words}", self.name))
    }
}
