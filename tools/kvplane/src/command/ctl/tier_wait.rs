//! Waiting for an order of `kvplane ctl tier`: until it is done, has failed, or makes no progress.

use std::fmt;
use std::time::{Duration, Instant};

use kvplane::rpc::message::{TierAction, TierNode, TierShard};

/// Age of a node's last report from which the command no longer waits for the node, in nanoseconds.
const SILENCE_NS: u64 = 60_000_000_000;
/// Time without progress after which waiting ends,
const STALL: Duration = Duration::from_secs(60);
/// plus the time that the longest record takes at the requested rate.
const RECORD_BYTES: u64 = 32 << 20;

/// Reason why an order will never be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum WaitError {
    /// The node has not reported for this long.
    Silent { node: u64, age_ns: u64 },
    /// The node restarted before the order was done.
    Restarted { node: u64 },
    /// A shard of the node cannot carry it out.
    Shard { node: u64, shard: u16, why: ShardFault },
    /// No node made progress for this long.
    Stalled { stalled: Duration },
}

/// Reason why a shard will never carry out an order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ShardFault {
    /// Its tier takes no writes; with its state.
    NoWrites(String),
    /// The verification was paused.
    Paused,
    /// The verification ended early; with the state of the tier.
    NotAllRead(String),
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent { node, age_ns } => {
                write!(f, "node {node} has not reported for {} s", age_ns / 1_000_000_000)
            }
            Self::Restarted { node } => {
                write!(f, "node {node} restarted before it was done: repeat the command")
            }
            Self::Shard { node, shard, why } => write!(f, "node {node}, shard {shard}: {why}"),
            Self::Stalled { stalled } => {
                let seconds = stalled.as_secs();
                write!(f, "no progress for {seconds} s: see `kvplane ctl tier status` and the nodes' logs")
            }
        }
    }
}

impl std::error::Error for WaitError {}

impl fmt::Display for ShardFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWrites(state) => write!(f, "no segment can be reclaimed: {state}"),
            Self::Paused => f.write_str("verification was paused: `kvplane ctl tier verify` resumes it"),
            Self::NotAllRead(state) => write!(f, "not all records were read: {state}"),
        }
    }
}

/// Returns true if a node has carried out an order; `before` is its state when the order was given. The error says why
/// the order will never be done.
pub(super) fn is_done(
    before: Option<&TierNode>,
    now: &TierNode,
    order: u64,
    action: TierAction,
    wait: bool,
) -> Result<bool, WaitError> {
    let node = now.node;
    if now.age_ns > SILENCE_NS {
        return Err(WaitError::Silent { node, age_ns: now.age_ns });
    }
    if before.is_some_and(|before| before.incarnation != now.incarnation) {
        return Err(WaitError::Restarted { node });
    }
    if now.carried_out < order {
        return Ok(false);
    }
    let mut all = true;
    for shard in &now.shards {
        let then = before.and_then(|before| before.shards.iter().find(|then| then.shard == shard.shard));
        let done = shard_is_done(then, shard, action, wait);
        all &= done.map_err(|why| WaitError::Shard { node, shard: shard.shard, why })?;
    }
    Ok(all)
}

fn shard_is_done(
    then: Option<&TierShard>,
    now: &TierShard,
    action: TierAction,
    wait: bool,
) -> Result<bool, ShardFault> {
    let state = &now.state;
    let takes_writes = matches!(state.as_str(), "serving" | "recovering");
    match action {
        TierAction::Reclaim { free_percent: 1.. } if !takes_writes => Err(ShardFault::NoWrites(state.clone())),
        TierAction::Reclaim { .. } => Ok(!wait || now.wanted_free_segments == 0),
        TierAction::Verify { bytes_per_s: 0 } => Ok(true),
        TierAction::Verify { .. } if now.scrub.state == "verify" => Ok(!wait),
        TierAction::Verify { .. } if now.scrub.state == "paused" => Err(ShardFault::Paused),
        TierAction::Verify { .. } if then.is_some_and(|then| now.scrub.passes <= then.scrub.passes) => {
            Err(ShardFault::NotAllRead(state.clone()))
        }
        TierAction::Verify { .. } => Ok(true),
    }
}

/// Timeout of an order that makes no progress.
pub(super) struct ProgressTimeout {
    action: TierAction,
    /// Progress counters as last seen, and the time of their last change.
    seen: Vec<u64>,
    since: Instant,
}

impl ProgressTimeout {
    pub(super) fn new(action: TierAction) -> Self {
        Self { action, seen: Vec::new(), since: Instant::now() }
    }

    /// Checks for progress; fails if there has been none for too long.
    pub(super) fn check(&mut self, nodes: &[TierNode]) -> Result<(), WaitError> {
        let seen: Vec<u64> = nodes.iter().flat_map(signs).collect();
        if seen != self.seen {
            (self.seen, self.since) = (seen, Instant::now());
            return Ok(());
        }
        let shards = nodes.iter().map(|node| node.shards.len() as u64).max().unwrap_or(0);
        let longest = match self.action {
            TierAction::Verify { bytes_per_s: rate @ 1.. } => Duration::from_secs(RECORD_BYTES * shards / rate),
            _ => Duration::ZERO,
        };
        let stalled = self.since.elapsed();
        if stalled > STALL + longest {
            return Err(WaitError::Stalled { stalled });
        }
        Ok(())
    }
}

/// Values that change as long as a node works on an order.
fn signs(node: &TierNode) -> impl Iterator<Item = u64> {
    let of_shard = |shard: &TierShard| {
        let found = if shard.state == "recovering" { shard.objects } else { 0 };
        [found, shard.scrub.records, u64::from(shard.segments.free), u64::from(shard.wanted_free_segments)]
    };
    [node.node, node.carried_out].into_iter().chain(node.shards.iter().flat_map(of_shard))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane::rpc::message::ScrubFigures;

    const VERIFY: TierAction = TierAction::Verify { bytes_per_s: 1 << 30 };
    const RECLAIM: TierAction = TierAction::Reclaim { free_percent: 30 };

    fn node(change: impl FnOnce(&mut TierShard)) -> TierNode {
        let scrub = ScrubFigures { state: "idle".to_owned(), passes: 3, ..Default::default() };
        let mut shard = TierShard { state: "serving".to_owned(), scrub, ..Default::default() };
        change(&mut shard);
        TierNode { node: 7, incarnation: 1, age_ns: 0, carried_out: 5, shards: vec![shard] }
    }

    fn look(now: &TierNode, action: TierAction) -> Result<bool, WaitError> {
        is_done(Some(&node(|_| {})), now, 5, action, true)
    }

    #[test]
    fn an_order_is_done_or_fails_with_the_reason() {
        assert_eq!(look(&node(|shard| shard.scrub.passes = 4), VERIFY), Ok(true));
        assert_eq!(look(&node(|shard| shard.scrub.state = "verify".to_owned()), VERIFY), Ok(false));
        assert_eq!(look(&node(|shard| shard.wanted_free_segments = 2), RECLAIM), Ok(false));
        assert_eq!(look(&node(|_| {}), RECLAIM), Ok(true));
        assert_eq!(look(&TierNode { carried_out: 4, ..node(|_| {}) }, VERIFY), Ok(false));
        let refused = || node(|shard| shard.state = "degraded, memory only: the device is gone".to_owned());
        for (now, action, says) in [
            (refused(), VERIFY, "not all records were read: degraded, memory only: the device is gone"),
            (refused(), RECLAIM, "no segment can be reclaimed: degraded, memory only"),
            (node(|shard| shard.scrub.state = "paused".to_owned()), VERIFY, "verification was paused"),
            (TierNode { incarnation: 2, ..node(|_| {}) }, VERIFY, "restarted before it was done"),
            (TierNode { age_ns: SILENCE_NS + 1, ..node(|_| {}) }, RECLAIM, "has not reported for 60 s"),
        ] {
            let error = look(&now, action).expect_err(says).to_string();
            assert!(error.starts_with("node 7") && error.contains(says), "{error}");
        }
    }

    #[test]
    fn an_order_without_progress_times_out() {
        let mut timeout = ProgressTimeout::new(VERIFY);
        let nodes = [node(|shard| shard.scrub.records = 8)];
        timeout.check(&nodes).expect("it went on");
        timeout.check(&nodes).expect("not yet for long");
        timeout.since -= STALL + Duration::from_secs(1);
        let error = timeout.check(&nodes).expect_err("nothing goes on").to_string();
        assert!(error.contains("for 61 s"), "{error}");
        timeout.check(&[node(|shard| shard.scrub.records = 9)]).expect("it went on");
        let mut timeout = ProgressTimeout::new(TierAction::Verify { bytes_per_s: 1 });
        timeout.check(&nodes).expect("it went on");
        timeout.since -= STALL + Duration::from_secs(1);
        timeout.check(&nodes).expect("a record takes long at this rate");
    }
}
