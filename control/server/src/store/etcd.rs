//! The control plane's memory in etcd, which several control planes share: one leads, the others stand by.
//!
//! Keys, below `PREFIX CLUSTER /`:
//!
//! | key | value |
//! |---|---|
//! | `leader` | who leads: a number drawn for each turn, and where it is reached. Set again every [`BEAT`] |
//! | `fence` | the number of the turn and how many changes it made: every change names the value before it |
//! | `state` | format and identity of the state |
//! | `tickets` | the keys that tickets are made with |
//! | `ticket-time` | the ticket time in seconds: none beyond it was told |
//! | `records/KEY` | the records of the cluster |
//! | `batch`, `batch/N` | a change too large for one transaction, until it is carried out |
//!
//! Whoever leads says so every [`BEAT`]. A standby that sees the same revision of `leader` for [`SILENCE`], while etcd
//! answers it all the time, takes the key over. Leases of etcd are not used for that: they last two seconds at least,
//! and end up to half a second late.
//!
//! That two believe for a moment that they lead does no harm to the state, as a change is carried out only if `fence`
//! has the value that the one before left: whoever was taken over from cannot change anything, and neither can a
//! transaction of its own that etcd comes to late. Maps are published after the change behind them.
//!
//! All of it happens on a thread of its own, which blocks in its calls. The control thread waits for a change for
//! [`PATIENCE`] at most.

mod campaign;
mod config;
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
use records::Keys;
use turn::Turns;

/// How often the leader says that it leads.
const BEAT: Duration = Duration::from_millis(300);
/// How often a standby looks.
const LOOK: Duration = Duration::from_millis(150);
/// A standby takes over from a leader that was silent for so long.
const SILENCE: Duration = Duration::from_millis(1_200);
/// A leader whom etcd has not answered for so long sends its callers to others.
const STEP_ASIDE: Duration = Duration::from_secs(4);
/// How long a look or a beat may take.
const CALL: Duration = Duration::from_millis(900);
/// How long a change may take, attempts together.
const COMMIT: Duration = Duration::from_millis(1_500);
/// How long the control thread waits for one.
const PATIENCE: Duration = Duration::from_millis(3_500);
/// How long the first answer of etcd may take.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// Longest answer: a page of records.
const ANSWER_BYTES: usize = 64 << 20;

/// Where this control plane stands.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Nobody is known to lead: why, in words.
    Asking(String),
    /// Somebody leads.
    Follows(String),
    /// It leads.
    Leads(Arc<Takeover>),
    /// It cannot go on.
    Failed(String),
}

/// What a new leader begins with.
#[derive(Debug)]
pub(crate) struct Takeover {
    /// The number of the turn.
    pub(crate) turn: u64,
    pub(crate) state_id: u64,
    pub(crate) records: Vec<Record>,
    pub(crate) tickets: Option<String>,
    /// The ticket time, in seconds.
    pub(crate) ticket_time_s: Option<u64>,
}

/// What the thread is asked for.
enum Command {
    /// Keys to set, or to remove, in this turn: all or none.
    Commit { turn: u64, changes: Vec<records::KeyChange>, done: SyncSender<Result<(), String>> },
    /// The control thread cannot go on with this turn: give the lead away, and campaign again.
    Abandon { turn: u64 },
    /// Give the lead away, and end.
    Resign,
}

/// The line to etcd; the thread ends with it.
pub(crate) struct Etcd {
    commands: Sender<Command>,
    places: watch::Receiver<Place>,
    /// Whether etcd left the last beat unanswered: nothing is changed until it answers one.
    doubtful: Arc<AtomicBool>,
    name: String,
    thread: Option<JoinHandle<()>>,
}

/// One turn as a leader: makes changes durable while it lasts.
#[derive(Clone)]
pub(crate) struct Turn {
    commands: Sender<Command>,
    doubtful: Arc<AtomicBool>,
    turn: u64,
    name: String,
}

impl Etcd {
    /// Begins to campaign for `address`, and waits until etcd has answered once.
    pub(crate) fn start(config: &EtcdConfig, cluster: &str, address: String) -> Result<Self, EtcdConfigError> {
        let certificates = config.read_certificates()?;
        let scheme = if certificates.is_some() { "https" } else { "http" };
        let urls = config.endpoints.iter().map(|endpoint| format!("{scheme}://{endpoint}")).collect();
        let gateway = Gateway::new(urls, Http::kept(ANSWER_BYTES, certificates));
        let name = format!("etcd://{}", config.endpoints.join(","));
        let (commands, receiver) = channel();
        let (place, mut places) = watch::channel(Place::Asking("etcd was not asked yet".to_owned()));
        let doubtful = Arc::new(AtomicBool::new(false));
        let keys = Keys::new(&config.prefix, cluster);
        let turns = Turns::new(gateway, keys, address, receiver, place, Arc::clone(&doubtful));
        let thread = thread::Builder::new()
            .name("kvplane-etcd".to_owned())
            .spawn(move || turns.run())
            .map_err(|error| EtcdConfigError::Thread(error.to_string()))?;
        let etcd = Self { commands, places: places.clone(), doubtful, name, thread: Some(thread) };
        let by = Instant::now() + FIRST_ANSWER;
        loop {
            match &*places.borrow_and_update() {
                Place::Asking(reason) if Instant::now() > by => return Err(EtcdConfigError::Silent(reason.clone())),
                Place::Failed(reason) => return Err(EtcdConfigError::Failed(reason.clone())),
                Place::Asking(_) => {}
                Place::Follows(_) | Place::Leads(_) => return Ok(etcd),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Where this control plane stands, and what becomes of it.
    pub(crate) fn places(&self) -> watch::Receiver<Place> {
        self.places.clone()
    }

    /// The turn that began with `led`.
    pub(crate) fn turn(&self, led: &Takeover) -> Turn {
        let (commands, doubtful) = (self.commands.clone(), Arc::clone(&self.doubtful));
        Turn { commands, doubtful, turn: led.turn, name: self.name.clone() }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // It may have ended in a failure.
        let _ = self.commands.send(Command::Resign);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Turn {
    /// Makes `changes` durable, all or none, with the identity of the state where another is gone on with; blocks for
    /// [`PATIENCE`] at most. After an error the turn is over.
    pub(crate) fn commit(&self, state_id: Option<u64>, changes: &[Change]) -> Result<(), String> {
        let state = state_id.map(records::state_change);
        self.send(changes.iter().map(records::key_change).chain(state).collect())
    }

    /// Keeps the keys that tickets are made with.
    pub(crate) fn keep_tickets(&self, text: &str) -> Result<(), String> {
        self.send(vec![records::tickets_change(text)])
    }

    /// Keeps the ticket time, in seconds.
    pub(crate) fn keep_ticket_time(&self, seconds: u64) -> Result<(), String> {
        self.send(vec![records::ticket_time_change(seconds)])
    }

    fn send(&self, changes: Vec<records::KeyChange>) -> Result<(), String> {
        let (done, answer) = sync_channel(1);
        let command = Command::Commit { turn: self.turn, changes, done };
        self.commands.send(command).map_err(|_| "the thread for etcd has ended".to_owned())?;
        let late = |_| format!("etcd did not answer within {} ms", PATIENCE.as_millis());
        answer.recv_timeout(PATIENCE).map_err(late)?
    }

    /// Ends the turn, if it lasts: somebody is to read anew what is there.
    pub(crate) fn abandon(&self) {
        // Its thread may have ended.
        let _ = self.commands.send(Command::Abandon { turn: self.turn });
    }

    /// Why nothing can be changed at present: asked before a change, so that none is begun in vain.
    pub(crate) fn doubt(&self) -> Option<String> {
        let doubtful = self.doubtful.load(Ordering::Acquire);
        let words = "does not answer: nothing is changed until it does; data operations go on";
        doubtful.then(|| format!("{} {words}", self.name))
    }
}
