//! Following of parents: a process that fetches as one rank of a job reads from the parents that a schedule gives,
//! without an order for each shard.
//!
//! Each rank has a board in its memory. Its followers read the board with one-sided reads, about when the next shard is
//! due; the control plane is not involved. One thread follows the parent of each half of the shards.

use std::fmt;
use std::time::{Duration, Instant};

use kvplane_rpc::p2p::RankParent;
use kvplane_transfer::{Opcode, SubmitOptions, TaskState, TransferRequest};

use crate::error::Error;
use crate::p2p::catalog::{Catalog, is_forgotten};
use crate::p2p::replica::{FetchRoom, ParentState, Replica, Seat};
use crate::p2p::sources::Sources;

/// Limits of the pause between two reads of a board without news, or between two requests for a parent.
const PAUSES: std::ops::RangeInclusive<Duration> = Duration::from_micros(200)..=Duration::from_millis(20);
/// Reads of a board between two arrivals of shards there.
const LOOKS: u32 = 8;
/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);
/// Interval at which a wait for a board checks whether the parent is still followed.
const WAIT: Duration = Duration::from_millis(50);

/// Follows the parent of a half until all of the half is present, or the parent is given up; then requests the rest
/// from other peers.
pub(super) fn follow(catalog: &Catalog, replica: &Replica, sources: &Sources<'_>, half: usize) {
    let Some(seat) = replica.fetch.seat() else { return };
    let following = SourceFollower { catalog, replica, sources, half, seat };
    if let Some(parent) = following.find() {
        following.keep_up(&parent);
    }
    following.ask_elsewhere();
}

/// Reason why a parent's board cannot be read.
#[derive(Debug)]
enum BoardError {
    /// The parent cannot be opened, or the read cannot be submitted.
    Submit(Error),
    /// The connection failed, with the transfer engine's explanation.
    Connection { problem: String },
    /// The read ended in this state.
    Ended { state: TaskState },
}

impl fmt::Display for BoardError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submit(error) => write!(f, "{error}"),
            Self::Connection { problem } => f.write_str(problem),
            Self::Ended { state } => write!(f, "{state:?}"),
        }
    }
}

impl std::error::Error for BoardError {}

struct SourceFollower<'a> {
    catalog: &'a Catalog,
    replica: &'a Replica,
    sources: &'a Sources<'a>,
    half: usize,
    seat: &'a Seat,
}

impl SourceFollower<'_> {
    /// Requests the half's parent until it is known.
    fn find(&self) -> Option<RankParent> {
        let mut pause = *PAUSES.start() * 10;
        loop {
            match self.replica.fetch.await_parent(self.half, pause) {
                ParentState::Ended => return None,
                ParentState::Known(parent) => return Some(parent),
                ParentState::Unknown => {}
            }
            pause = (pause * 2).min(*PAUSES.end());
            match self.catalog.join_ranks(self.replica, self.half) {
                Ok(parent) => self.replica.fetch.set_parent(self.half, parent),
                Err(error) if error.is_unanswered() || is_forgotten(&error) => std::thread::sleep(AWAY),
                Err(error) => {
                    tracing::warn!("no parent for half {}: {error}", self.half);
                    self.replica.fetch.leave_parent(self.half);
                }
            }
        }
    }

    /// Reads the parent's board whenever fewer shards are in flight than possible.
    fn keep_up(&self, parent: &RankParent) {
        let fetch = &self.replica.fetch;
        let Some(board) = parent.board else {
            fetch.learn(self.half, &vec![u64::MAX; self.seat.words()], None);
            while fetch.pause_while_followed(self.half, WAIT) {}
            return;
        };
        // Estimate of the time between two arrivals at the parent.
        let (mut gap, mut last, mut before) = (*PAUSES.start() * LOOKS, Instant::now(), 0);
        loop {
            match fetch.room(self.half, WAIT) {
                FetchRoom::Ended => return,
                FetchRoom::Full => continue,
                FetchRoom::Free => {}
            }
            if let Err(error) = self.read(parent, board) {
                tracing::debug!("stops following {}: {error}", parent.segment);
                self.sources.suspect(&parent.segment);
                return fetch.leave_parent(self.half);
            }
            let words = self.seat.parent_board(self.half);
            let known: u32 = words.iter().map(|word| word.count_ones()).sum();
            let pause = if known > before {
                (gap, last, before) = ((gap + last.elapsed() / (known - before)) / 2, Instant::now(), known);
                None
            } else {
                // After longer than the usual time without news, the board is read less and less often.
                Some((gap.max(last.elapsed()) / LOOKS).clamp(*PAUSES.start(), *PAUSES.end()))
            };
            fetch.learn(self.half, &words, pause);
        }
    }

    fn read(&self, parent: &RankParent, board: u64) -> Result<(), BoardError> {
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: self.seat.copy_address(self.half),
            target: self.sources.handle(&parent.segment).map_err(BoardError::Submit)?,
            target_offset: board,
            length: (self.seat.words() * size_of::<u64>()) as u64,
        };
        let batch = self.sources.submit(&[request], &SubmitOptions::default()).map_err(BoardError::Submit)?;
        let status = loop {
            if let Some(status) = batch.wait_for(WAIT) {
                break status;
            }
            if !self.replica.fetch.is_followed(self.half) {
                batch.cancel();
                break batch.wait();
            }
        };
        if status.state == TaskState::Completed {
            return Ok(());
        }
        Err(match batch.problem() {
            Some(problem) => BoardError::Connection { problem: problem.to_owned() },
            None => BoardError::Ended { state: status.state },
        })
    }

    /// Requests the shards from the control plane that the schedule does not deliver.
    fn ask_elsewhere(&self) {
        while let Some((want, failed)) = self.replica.fetch.elsewhere() {
            if want.is_empty() && failed.is_empty() {
                return;
            }
            tracing::info!(shards = want.count(), "requesting shards that the schedule did not deliver");
            match self.catalog.want(self.replica.member(), want.intervals(), failed.clone()) {
                Ok(()) => return,
                // A new announcement includes all missing shards.
                Err(error) if is_forgotten(&error) => return,
                Err(error) => {
                    if !error.is_unanswered() {
                        tracing::warn!("cannot request shards: {error}");
                    }
                    self.replica.fetch.keep_unfollowed(failed);
                    std::thread::sleep(AWAY);
                }
            }
        }
    }
}
