//! Thread of a control plane's etcd client: campaigns, leads, rewrites the leader's key, and gives up leadership.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvplane_etcd::{Compare, Entry, Gateway, Operation, Outcome, Range};
use kvplane_sys::random::random_u64;
use tokio::sync::watch;

use super::campaign::{Campaign, Verdict};
use super::error::EtcdChangeError;
use super::records::{FencedChanges, Keys, ReadError, fence};
use super::{BEAT, CALL, Command, LOOK, Leadership, STEP_ASIDE, Takeover};

/// State of the thread.
pub(super) struct Turns {
    gateway: Gateway,
    keys: Keys,
    /// Address at which callers reach this control plane.
    address: String,
    commands: Receiver<Command>,
    leadership: watch::Sender<Leadership>,
    uncertain: Arc<AtomicBool>,
    started: Instant,
}

/// Begin of a turn.
struct TurnStart {
    turn: u64,
    leader: Vec<u8>,
    changes: u64,
}

/// Reason for the end of a turn, or of a campaign.
enum Over {
    /// The handle ended the thread.
    Told,
    /// Another control plane is the leader, or etcd is unreachable, as the text says.
    Lost(String),
    /// This control plane cannot continue.
    Failed(String),
}

impl Turns {
    pub(super) fn new(
        gateway: Gateway,
        keys: Keys,
        address: String,
        commands: Receiver<Command>,
        leadership: watch::Sender<Leadership>,
        uncertain: Arc<AtomicBool>,
    ) -> Self {
        Self { gateway, keys, address, commands, leadership, uncertain, started: Instant::now() }
    }

    /// Runs until its handle ends it, or it cannot continue.
    pub(super) fn run(self) {
        loop {
            let over = match self.campaign() {
                Ok(begun) => self.lead(begun),
                Err(over) => over,
            };
            match over {
                Over::Told => return,
                Over::Lost(reason) => {
                    self.leadership.send_replace(Leadership::Asking(reason));
                }
                Over::Failed(reason) => {
                    self.leadership.send_replace(Leadership::Failed(reason));
                    return;
                }
            }
        }
    }

    /// Waits for commands during `time`; rejects changes, as no turn lasts. Returns true if the thread is to end.
    fn rest(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            match self.commands.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Command::Resign) | Err(RecvTimeoutError::Disconnected) => return true,
                Ok(Command::Commit { done, .. }) => {
                    // The requester may be gone.
                    let _ = done.send(Err(EtcdChangeError::NotLeading));
                }
                Ok(Command::Abandon { .. }) => {}
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    }

    /// Waits until there is no live leader, and takes the leader's key.
    fn campaign(&self) -> Result<TurnStart, Over> {
        let turn = random_u64().map_err(|error| Over::Failed(error.to_string()))?;
        let leader = format!("{turn:016x} {}", self.address).into_bytes();
        let key = self.keys.of(b"leader");
        let mut campaign = Campaign::default();
        loop {
            let range = Range { from: &key, to: &[], limit: 1, revision: 0 };
            match self.gateway.range(&range, Instant::now() + CALL) {
                Err(error) => {
                    self.leadership.send_replace(Leadership::Asking(error.to_string()));
                }
                Ok(found) => {
                    let entry = found.entries.first();
                    let verdict = campaign.saw(self.started.elapsed(), entry.map(|entry| entry.modified));
                    let compare = match verdict {
                        // An attempt whose answer was lost.
                        _ if entry.is_some_and(|entry| entry.value == leader) => {
                            return Ok(TurnStart { turn, leader, changes: 0 });
                        }
                        Verdict::Wait => None,
                        Verdict::Vacant => Some(Compare::Absent(&key)),
                        Verdict::Silent(modified) => Some(Compare::Modified(&key, modified)),
                    };
                    match compare {
                        Some(compare) if self.take(&compare, turn, &leader) => {
                            return Ok(TurnStart { turn, leader, changes: 0 });
                        }
                        Some(_) => {}
                        None => self.follow(entry),
                    }
                }
            }
            if self.rest(LOOK) {
                return Err(Over::Told);
            }
        }
    }

    fn follow(&self, entry: Option<&Entry>) {
        let text = String::from_utf8_lossy(entry.map_or(&[], |entry| &entry.value)).into_owned();
        let address = text.split_once(' ').map_or("", |(_, address)| address).to_owned();
        self.leadership.send_if_modified(|leadership| {
            let known = matches!(leadership, Leadership::Follows(known) if *known == address);
            if !known {
                *leadership = Leadership::Follows(address);
            }
            !known
        });
    }

    /// Takes the leader's key, if `compare` still holds.
    fn take(&self, compare: &Compare<'_>, turn: u64, leader: &[u8]) -> bool {
        let (key, fence_key, first) = (self.keys.of(b"leader"), self.keys.of(b"fence"), fence(turn, 0));
        let operations = [Operation::Put(&key, leader), Operation::Put(&fence_key, &first)];
        let taken = self.gateway.transact(&[*compare], &operations, &[], Instant::now() + CALL);
        // If the outcome is unknown, the next read shows it.
        matches!(taken, Ok(Outcome::Done))
    }

    /// Leads until the turn is over.
    fn lead(&self, mut begun: TurnStart) -> Over {
        let fresh_id = match random_u64() {
            Ok(id) => id,
            Err(error) => return Over::Failed(error.to_string()),
        };
        let turn = begun.turn;
        let led = match self.fenced(&mut begun, |fenced| fenced.take_over(fresh_id)) {
            Ok(stored) => Takeover {
                turn,
                state_id: stored.state_id.unwrap_or(fresh_id),
                records: stored.records,
                tickets: stored.tickets,
                ticket_time_s: stored.ticket_time_s,
            },
            Err(ReadError::Gateway(error)) => return Over::Lost(error.to_string()),
            Err(ReadError::Change(error)) => return Over::Lost(error.to_string()),
            Err(ReadError::Damaged(error)) => {
                self.resign(&begun);
                return Over::Failed(format!("{error}: restore a copy, or remove the keys of the cluster"));
            }
        };
        self.uncertain.store(false, Ordering::Release);
        self.leadership.send_replace(Leadership::Leads(Arc::new(led)));
        self.serve(&mut begun)
    }

    /// Makes changes in this turn, and counts them.
    fn fenced<T>(&self, begun: &mut TurnStart, make: impl FnOnce(&mut FencedChanges<'_>) -> T) -> T {
        let Self { gateway, keys, .. } = self;
        let TurnStart { turn, leader, changes } = begun;
        let mut fenced = FencedChanges { gateway, keys, leader, turn: *turn, changes: *changes };
        let made = make(&mut fenced);
        *changes = fenced.changes;
        made
    }

    fn serve(&self, begun: &mut TurnStart) -> Over {
        let (mut answered, mut beat_at) = (Instant::now(), Instant::now());
        loop {
            match self.commands.recv_timeout(beat_at.saturating_duration_since(Instant::now())) {
                Ok(Command::Resign) | Err(RecvTimeoutError::Disconnected) => {
                    self.resign(begun);
                    return Over::Told;
                }
                Ok(Command::Abandon { turn }) if turn == begun.turn => {
                    self.resign(begun);
                    return Over::Lost("it gave up leadership".to_owned());
                }
                // A command for an earlier turn.
                Ok(Command::Abandon { .. }) => {}
                Ok(Command::Commit { turn, done, .. }) if turn != begun.turn => {
                    let _ = done.send(Err(EtcdChangeError::TurnOver));
                }
                Ok(Command::Commit { changes, done, .. }) => {
                    let outcome = self.fenced(begun, |fenced| fenced.commit(&changes));
                    let lost = outcome.as_ref().err().cloned();
                    let _ = done.send(outcome);
                    if let Some(error) = lost {
                        // The change may have been carried out or not: the next leader reads the stored state.
                        return Over::Lost(error.to_string());
                    }
                    (answered, beat_at) = (Instant::now(), Instant::now() + BEAT);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let by = Instant::now() + CALL;
                    match self.beat(begun, by) {
                        Ok(Outcome::Done) => {
                            answered = Instant::now();
                            self.uncertain.store(false, Ordering::Release);
                        }
                        Ok(Outcome::Refused(_)) => return Over::Lost("another control plane leads".to_owned()),
                        Err(error) if answered.elapsed() > STEP_ASIDE => return Over::Lost(error.to_string()),
                        Err(_) => self.uncertain.store(true, Ordering::Release),
                    }
                    beat_at = Instant::now() + BEAT;
                }
            }
        }
    }

    fn beat(&self, begun: &TurnStart, by: Instant) -> Result<Outcome, kvplane_etcd::GatewayError> {
        let key = self.keys.of(b"leader");
        let same = [Compare::Value(&key, &begun.leader)];
        self.gateway.transact(&same, &[Operation::Put(&key, &begun.leader)], &[], by)
    }

    /// Deletes the leader's key for the next leader, if etcd answers.
    fn resign(&self, begun: &TurnStart) {
        let key = self.keys.of(b"leader");
        let same = [Compare::Value(&key, &begun.leader)];
        // Otherwise a standby takes over after `SILENCE`.
        let _ = self.gateway.transact(&same, &[Operation::Delete(&key)], &[], Instant::now() + CALL);
    }
}
