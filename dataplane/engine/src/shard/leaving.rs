//! Segments that are being unregistered, and callers that wait for that.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use kvplane_proto::SegmentId;
use kvplane_sys::cpu;

use super::error::ShardError;
use crate::host::ShardHost;

/// Time that a segment's users have before their connections are closed.
const QUIET_DEADLINE_NS: u64 = 2_000_000_000;

/// Caller that waits for a segment to be released by its users.
pub(super) struct QuietWaiter {
    segment: SegmentId,
    /// Time at which its users' connections are closed, and time at which the wait fails.
    evict_ns: u64,
    give_up_ns: u64,
    within: Duration,
    answer: SyncSender<Result<(), ShardError>>,
}

impl QuietWaiter {
    pub(super) fn new(segment: SegmentId, within: Duration, answer: SyncSender<Result<(), ShardError>>) -> Self {
        let (now_ns, within_ns) = (cpu::monotonic_ns(), u64::try_from(within.as_nanos()).unwrap_or(u64::MAX));
        let evict_ns = now_ns.saturating_add(QUIET_DEADLINE_NS.min(within_ns / 2));
        Self { segment, evict_ns, give_up_ns: now_ns.saturating_add(within_ns), within, answer }
    }
}

/// Answers callers whose segments are no longer in use; closes the connections of users that take too long.
pub(super) fn answer_waiters(host: &mut ShardHost, leaving: &mut Vec<QuietWaiter>, now_ns: u64) {
    while let Some(segment) = host.segments().poll_unregistered() {
        leaving.retain(|one| {
            if one.segment == segment {
                let _ = one.answer.send(Ok(()));
            }
            one.segment != segment
        });
    }
    for one in leaving.iter_mut().filter(|one| one.evict_ns <= now_ns) {
        one.evict_ns = u64::MAX;
        host.segments().evict_users(one.segment);
    }
    leaving.retain(|one| {
        let late = one.give_up_ns <= now_ns;
        if late {
            let held = ShardError::Held { pids: host.segments().users(one.segment), waited: one.within };
            let _ = one.answer.send(Err(held));
        }
        !late
    });
}
