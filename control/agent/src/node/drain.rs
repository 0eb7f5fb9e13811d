//! A node gives its slots away before it ends.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use kvplane_engine::ShardSnapshot;
use kvplane_proto::Status;
use kvplane_rpc::RefusalCode;
use kvplane_rpc::message::{Drain, GetMoves};
use kvplane_sys::interrupt;

use super::Node;
use crate::error::Error;

/// How often it is looked what is left.
const LOOK: Duration = Duration::from_millis(20);
/// Time that a map takes at most to reach this node's shards once its control plane has published it.
const NEWS: Duration = Duration::from_millis(100);
/// How often the control plane is told, and how long it may take to answer once it has: by that it is known whether it
/// is there.
const ASK: Duration = Duration::from_secs(1);
/// How long a drain goes on while the control plane does not answer and nothing is fetched either: others learn from it
/// that they own the slots now, so without it nothing more comes of waiting.
const ALONE: Duration = Duration::from_secs(5);

/// Interval at which the control plane is asked whether others are done, and the deadline of its answer.
const ASK_MOVES: Duration = Duration::from_millis(200);

/// Deadlines of a drain, from the times of the control plane's answers and of progress.
#[derive(Debug)]
struct Wait {
    until: Instant,
    alone: Duration,
    /// When the control plane answered last, or objects were fetched.
    sign: Instant,
    /// The control plane has accepted the drain.
    told: bool,
    least: u64,
}

impl Wait {
    fn new(now: Instant, within: Duration) -> Self {
        Self { until: now + within, alone: within.min(ALONE), sign: now, told: false, least: u64::MAX }
    }

    const fn answered(&mut self, now: Instant) {
        (self.told, self.sign) = (true, now);
    }

    fn is_alone(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.sign) >= self.alone
    }

    /// True when the drain ends with `left` objects still here.
    fn is_over(&mut self, left: u64, now: Instant) -> bool {
        if left < self.least {
            // What there was at first was not fetched by anybody.
            if self.least != u64::MAX {
                self.sign = now;
            }
            self.least = left;
        }
        self.told && left == 0 || now >= self.until || self.is_alone(now)
    }
}

impl Node {
    /// Gives its slots away and waits until their new owners have fetched what was in them, or this time is over; while
    /// the control plane does not answer and nothing is fetched, 5 s at most. The node stays a member without slots
    /// until it is dropped. How many objects are left.
    ///
    /// # Errors
    /// When the control plane does not answer, or refuses: nobody else owns slots. When a shard does not answer.
    pub fn drain(&self, within: Duration) -> Result<u64, Error> {
        let mut wait = Wait::new(Instant::now(), within);
        let mut asked: Option<Instant> = None;
        loop {
            let mut silence = None;
            if asked.is_none_or(|asked| asked.elapsed() >= ASK) {
                silence = self.tell_drain(if wait.told { ASK } else { wait.alone })?;
                asked = Some(Instant::now());
                if silence.is_none() {
                    wait.answered(Instant::now());
                }
            }
            let left = self.snapshots()?.iter().map(objects_of).sum();
            let now = Instant::now();
            if wait.is_over(left, now) {
                return match silence.filter(|_| !wait.told) {
                    Some(error) => Err(error),
                    None => Ok(left),
                };
            }
            if !interrupt::sleep(LOOK) {
                return Err(Error::interrupted());
            }
        }
    }

    /// Waits until others have fetched what moved from here to them, and have compared with this node what they have
    /// on their SSDs, and until this node has what moved here: at most this long. A node that ends before takes along
    /// what they have not fetched, and what they have is void where nobody else knows what changed; what it has not
    /// fetched is gone when it comes back. How many slots are not done with; without an answer of the control plane,
    /// all that left count.
    ///
    /// # Errors
    /// When a shard does not answer, or a signal interrupts the wait.
    pub fn finish_moves(&self, within: Duration) -> Result<u64, Error> {
        let begun = Instant::now();
        let mut asked: Option<Instant> = None;
        loop {
            let snapshots = self.snapshots()?;
            let slots = |of: fn(&ShardSnapshot) -> u64| snapshots.iter().map(of).sum::<u64>();
            let (mut left, coming) = (slots(|of| of.moves.exporting_slots), slots(|of| of.moves.importing_slots));
            let waited = begun.elapsed();
            if left > 0 && waited >= NEWS && asked.is_none_or(|asked| asked.elapsed() >= ASK_MOVES) {
                let moves = self.link.call_within(GetMoves { node: self.node.0 }, ASK_MOVES);
                if moves.is_ok_and(|moves| moves.unsettled == 0) {
                    left = 0;
                }
                asked = Some(Instant::now());
            }
            if left + coming == 0 && waited >= NEWS || waited >= within {
                return Ok(left + coming);
            }
            if !interrupt::sleep(LOOK) {
                return Err(Error::interrupted());
            }
        }
    }

    /// Tells the control plane; why it did not answer, if it did not.
    fn tell_drain(&self, patience: Duration) -> Result<Option<Error>, Error> {
        let incarnation = Some(*self.incarnation.lock().unwrap_or_else(PoisonError::into_inner));
        let Err(error) = self.link.call_within(Drain { node: self.node.0, incarnation }, patience) else {
            return Ok(None);
        };
        let refused = match &error {
            // One that goes, or cannot write, is followed by another, or recovers.
            Error::Call(call) => call.refusal().is_some_and(|code| {
                !matches!(code, RefusalCode::Storage | RefusalCode::ShuttingDown | RefusalCode::UnknownMember)
            }),
            _ => error.status() == Some(Status::Cancelled),
        };
        if refused { Err(error) } else { Ok(Some(error)) }
    }
}

/// Objects of a shard, in memory and on its SSD.
fn objects_of(shard: &ShardSnapshot) -> u64 {
    let memory = shard.store.as_ref().map_or(0, |store| store.objects);
    memory + shard.tier.as_ref().map_or(0, |tier| u64::from(tier.stats.objects))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_ends_when_all_is_fetched_when_its_time_is_over_or_when_nobody_is_heard() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let mut wait = Wait::new(begin, Duration::from_secs(30));
        assert!(!wait.is_over(0, at(0)), "nobody knows yet that it goes");
        wait.answered(at(1));
        assert!(wait.is_over(0, at(1)));
        // As long as the control plane answers, the whole time counts.
        let mut wait = Wait::new(begin, Duration::from_secs(30));
        for second in 0..30 {
            wait.answered(at(second));
            assert!(!wait.is_over(7, at(second)));
        }
        assert!(wait.is_over(7, at(30)));
        // Without it, it goes on while others fetch, and ends soon after that.
        let mut wait = Wait::new(begin, Duration::from_secs(30));
        wait.answered(at(0));
        for second in 0..8 {
            assert!(!wait.is_over(100 - second, at(second)));
        }
        assert!(!wait.is_over(93, at(11)) && wait.is_over(93, at(12)));
        // One that never answered is not waited for longer than that.
        let mut wait = Wait::new(begin, Duration::from_secs(30));
        assert!(!wait.is_over(7, at(4)) && wait.is_over(7, at(5)) && !wait.told);
    }
}
