//! Drain: a node migrates its slots to other nodes before it leaves.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use kvplane_cluster::{Moves, MovesLeft, MovesWait};
use kvplane_engine::{ShardSnapshot, TierSnapshot};
use kvplane_proto::Status;
use kvplane_rpc::RefusalCode;
use kvplane_rpc::message::{Drain, GetMoves, Undrain};
use kvplane_sys::interrupt;

use super::Node;
use crate::error::Error;

/// Polling interval of the shards' state.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of the drain requests to the control plane, and the deadline of its replies once it has accepted the drain:
/// a missed one shows that it is away.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which a drain continues while the control plane does not answer and no objects are fetched either: other
/// nodes learn from the control plane that they own the slots, so without it waiting is futile.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);

/// Longest drain: the sum of a longer one and the clock might overflow.
const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// Interval at which the control plane is notified that the node ends and queried for migrations in flight, and the
/// deadline of its reply.
const MOVES_INTERVAL: Duration = Duration::from_millis(200);

/// Deadlines of a drain, from the times of the control plane's answers and of progress.
#[derive(Debug)]
struct DrainWait {
    until: Instant,
    silence_limit: Duration,
    /// Time of the control plane's last reply, or of the last objects that were fetched.
    last_progress: Instant,
    /// True once the control plane has accepted the drain.
    accepted: bool,
    /// Reason why the last request has no reply.
    silence: Option<Error>,
    /// Fewest objects and slots left so far.
    fewest_left: Option<(u64, u64)>,
}

impl DrainWait {
    fn new(now: Instant, within: Duration) -> Self {
        Self {
            until: now + within.min(LONGEST),
            silence_limit: within.min(SILENCE_LIMIT),
            last_progress: now,
            accepted: false,
            silence: None,
            fewest_left: None,
        }
    }

    /// Records the outcome of a request: a reply, or the reason why there is none.
    fn record(&mut self, silence: Option<Error>, now: Instant) {
        if silence.is_none() {
            (self.accepted, self.last_progress) = (true, now);
        }
        self.silence = silence;
    }

    /// Returns the outcome of a drain that is over with `left` still here: it has failed if the control plane has never
    /// accepted it, however long ago the last request was.
    fn outcome(self, left: MovesLeft) -> Result<MovesLeft, Error> {
        self.silence.filter(|_| !self.accepted).map_or(Ok(left), Err)
    }

    fn is_silent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_progress) >= self.silence_limit
    }

    /// Returns true when the drain ends with `left` still here.
    fn is_over(&mut self, left: MovesLeft, now: Instant) -> bool {
        let counts = (left.objects, left.owned);
        // The first counts show no progress: there is nothing to compare them with.
        let (objects, owned) = *self.fewest_left.get_or_insert(counts);
        if counts.0 < objects || counts.1 < owned {
            (self.last_progress, self.fewest_left) = (now, Some((objects.min(counts.0), owned.min(counts.1))));
        }
        self.accepted && left.is_drained() || now >= self.until || self.is_silent(now)
    }
}

impl Node {
    /// Migrates the node's slots away and waits until their new owners have fetched the objects, or `within` has
    /// passed; at most 5 s while the control plane does not answer and no objects are fetched. The node stays a member
    /// without slots until it is dropped; before that, [`Node::finish_moves`] waits until new owners know that they
    /// have everything. Returns what is left: nothing, if the node [is drained](MovesLeft::is_drained).
    ///
    /// # Errors
    /// When the control plane does not answer, or refuses because no other node takes slots. When a shard does not
    /// answer.
    pub fn drain(&self, within: Duration) -> Result<MovesLeft, Error> {
        let mut wait = DrainWait::new(Instant::now(), within);
        let mut asked: Option<Instant> = None;
        loop {
            if asked.is_none_or(|asked| asked.elapsed() >= REQUEST_INTERVAL) {
                let silence =
                    match self.request_drain(if wait.accepted { REQUEST_INTERVAL } else { wait.silence_limit }) {
                        // The slots have migrated away, and the node that fetches them, or has fetched them, is
                        // draining too.
                        Err(error) if wait.accepted && is_last_owner(&error) && self.has_left()? => None,
                        said => said?,
                    };
                asked = Some(Instant::now());
                wait.record(silence, Instant::now());
            }
            let left = self.moves_left()?;
            if wait.is_over(left, Instant::now()) {
                return wait.outcome(left);
            }
            if !interrupt::sleep(POLL_INTERVAL) {
                return Err(Error::interrupted());
            }
        }
    }

    /// Cancels a drain: the node gets its share of the slots back.
    ///
    /// # Errors
    /// When the control plane does not answer, or refuses.
    pub fn cancel_drain(&self) -> Result<(), Error> {
        self.link.call(Undrain { node: self.node.0, incarnation: Some(self.incarnation().0) })?;
        Ok(())
    }

    /// Announces to the control plane that this node is about to end, so that no more slots migrate to it or from it,
    /// and waits for migrations in flight: until other nodes have fetched the objects of slots that left and have
    /// reconciled their SSDs with this node, and until this node has the objects of slots that came. Returns the number
    /// of slots that are not finished, when there was no progress for `patience`, or after `most` in all; without a
    /// reply of the control plane, all slots that left count.
    ///
    /// A node that ends earlier takes unfetched objects along; records on other nodes' SSDs that were not reconciled
    /// become void, where no other node knows the changes; and objects that it has not fetched itself are lost when it
    /// returns.
    ///
    /// # Errors
    /// When a shard does not answer, or a signal interrupts the wait.
    pub fn finish_moves(&self, patience: Duration, most: Duration) -> Result<u64, Error> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let begun = Instant::now();
        let mut wait = MovesWait::new(0, nanos(patience), nanos(most));
        let (mut asked, mut news): (Option<Instant>, Option<Moves>) = (None, None);
        loop {
            if asked.is_none_or(|asked| asked.elapsed() >= MOVES_INTERVAL) {
                // Without a reply, the last known state stays valid.
                news = self.announce_end(MOVES_INTERVAL).ok().or(news);
                asked = Some(Instant::now());
            }
            if let Some(left) = wait.is_over(self.moves_left()?, news, nanos(begun.elapsed())) {
                return Ok(left);
            }
            if !interrupt::sleep(POLL_INTERVAL) {
                return Err(Error::interrupted());
            }
        }
    }

    /// Announces to the control plane that this node is about to end; returns the migrations in flight.
    ///
    /// # Errors
    /// When the control plane does not answer within this time, or refuses.
    pub(super) fn announce_end(&self, within: Duration) -> Result<Moves, Error> {
        let ends = Some(*self.incarnation.lock().unwrap_or_else(PoisonError::into_inner));
        self.link.call_within(GetMoves { node: self.node.0, ends }, within)
    }

    /// Returns the slots and objects that the shards still have, or are to get.
    fn moves_left(&self) -> Result<MovesLeft, Error> {
        let snapshots = self.snapshots()?;
        let sum = |of: fn(&ShardSnapshot) -> u64| snapshots.iter().map(of).sum::<u64>();
        Ok(MovesLeft {
            owned: sum(|of| of.moves.owned_slots),
            leaving: sum(|of| of.moves.exporting_slots),
            coming: sum(|of| of.moves.importing_slots),
            objects: sum(objects_of),
            imported: sum(|of| of.moves.imported),
            recovering: !snapshots.iter().all(is_recovered),
        })
    }

    /// Returns true if other nodes fetch this node's objects, or have fetched all of them.
    fn has_left(&self) -> Result<bool, Error> {
        let left = self.moves_left()?;
        Ok(left.leaving > 0 || left.is_drained())
    }

    /// Sends the drain request. Returns the error if the control plane did not answer, or is about to be replaced.
    fn request_drain(&self, patience: Duration) -> Result<Option<Error>, Error> {
        let incarnation = Some(*self.incarnation.lock().unwrap_or_else(PoisonError::into_inner));
        let Err(error) = self.link.call_within(Drain { node: self.node.0, incarnation }, patience) else {
            return Ok(None);
        };
        let is_refused = match &error {
            // A control plane that shuts down, or cannot write, is replaced by another, or recovers.
            Error::Call(call) => call.refusal().is_some_and(|code| {
                !matches!(code, RefusalCode::Storage | RefusalCode::ShuttingDown | RefusalCode::UnknownMember)
            }),
            _ => error.status() == Some(Status::Cancelled),
        };
        if is_refused { Err(error) } else { Ok(Some(error)) }
    }
}

/// Returns true for the refusal of a drain because no other node takes slots.
fn is_last_owner(error: &Error) -> bool {
    matches!(error, Error::Call(call) if call.refusal() == Some(RefusalCode::NotPermitted))
}

/// Returns the number of objects of a shard, in memory and on its SSD.
fn objects_of(shard: &ShardSnapshot) -> u64 {
    let memory = shard.store.as_ref().map_or(0, |store| store.objects);
    memory + shard.tier.as_ref().map_or(0, |tier| u64::from(tier.stats.objects))
}

/// Returns true for a shard whose SSD is recovered, or degraded and never will be.
fn is_recovered(shard: &ShardSnapshot) -> bool {
    !shard.tier.as_ref().is_some_and(TierSnapshot::is_recovering)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_ends_when_complete_at_its_deadline_or_without_any_progress() {
        let left = |objects| MovesLeft { objects, ..MovesLeft::default() };
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        assert!(!wait.is_over(left(0), at(0)), "nobody knows yet that it goes");
        wait.record(None, at(1));
        let recovering = MovesLeft { recovering: true, ..left(0) };
        assert!(!wait.is_over(recovering, at(1)), "its SSD was not looked through yet");
        let owner = MovesLeft { owned: 900, ..left(0) };
        assert!(!wait.is_over(owner, at(1)), "it has no objects, and acknowledges the next put");
        assert!(wait.is_over(left(0), at(1)));
        // While the control plane answers, the whole time is available.
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        for second in 0..30 {
            wait.record(None, at(second));
            assert!(!wait.is_over(left(7), at(second)));
        }
        assert!(wait.is_over(left(7), at(30)));
        // Without replies, the drain continues while objects are fetched, and ends soon after that.
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        wait.record(None, at(0));
        for second in 0..8 {
            assert!(!wait.is_over(left(100 - second), at(second)));
        }
        assert!(!wait.is_over(left(93), at(11)) && wait.is_over(left(93), at(12)));
        // Slots that leave are progress, too.
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        wait.record(None, at(0));
        for second in 0..8 {
            assert!(!wait.is_over(MovesLeft { owned: 100 - second, ..left(0) }, at(second)));
        }
        assert!(wait.is_over(MovesLeft { owned: 93, ..left(0) }, at(12)));
        assert!(!DrainWait::new(begin, Duration::MAX).is_over(left(7), begin), "no time is too long");
        // A control plane that never answered is not waited for any longer.
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        assert!(!wait.is_over(left(7), at(4)) && wait.is_over(left(7), at(5)) && !wait.accepted);
    }

    /// The last request may have ended a moment before the wait does.
    #[test]
    fn a_drain_that_was_never_accepted_has_failed_also_after_passes_without_a_request() {
        let left = |objects| MovesLeft { objects, ..MovesLeft::default() };
        let begin = Instant::now();
        let at = |millis: u64| begin + Duration::from_millis(millis);
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        wait.record(Some(Error::NoMap), at(4999));
        assert!(!wait.is_over(left(7), at(4999)));
        assert!(wait.is_over(left(7), at(5020)));
        assert!(matches!(wait.outcome(left(7)), Err(Error::NoMap)));
        // One that was accepted ends with what is left, whether or not the control plane is still there.
        let mut wait = DrainWait::new(begin, Duration::from_secs(30));
        wait.record(None, at(0));
        wait.record(Some(Error::NoMap), at(5000));
        assert_eq!(wait.outcome(left(7)).expect("it was accepted"), left(7));
    }
}
