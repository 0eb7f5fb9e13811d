//! Completions: operations and messages in flight.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvplane::group::{Failure, GroupError, GroupRank, RankSet, Work};

use super::membership::Membership;
use super::outcome::{CallFailure, ResultCode, call, put};
use crate::handles::Handles;

/// A wait without an end of its own is made of waits of this length: works have deadlines.
const LONG: Duration = Duration::from_secs(3600);

static COMPLETIONS: Handles<Completion> = Handles::new("completion");

/// The program's array with an entry for each rank, in which failed ones are marked.
pub(crate) struct FailedRanksHint {
    address: *mut i32,
    entries: usize,
}

// SAFETY: it is written by single atomic stores, under the lock of its completion.
unsafe impl Send for FailedRanksHint {}

impl FailedRanksHint {
    /// Takes an array, and sets its entries to 0.
    ///
    /// # Safety
    /// Null, or as many entries as it says, valid until the work has ended or its completion is destroyed.
    pub(crate) unsafe fn new(address: *mut i32, entries: usize, needed: usize) -> Result<Self, CallFailure> {
        if address.is_null() || !address.is_aligned() || entries < needed {
            return Err(CallFailure::argument(format_args!(
                "failedRanksHint has {entries} entries at {address:?}; it needs {needed}, aligned"
            )));
        }
        let hint = Self { address, entries: needed };
        for at in 0..needed {
            // SAFETY: inside the entries.
            unsafe { hint.set(at, 0) };
        }
        Ok(hint)
    }

    /// # Safety
    /// `at` is inside the entries, which are still valid.
    unsafe fn set(&self, at: usize, value: i32) {
        // SAFETY: by the caller's promise.
        unsafe { AtomicI32::from_ptr(self.address.add(at)) }.store(value, Ordering::Release);
    }

    fn mark(&self, ranks: RankSet<GroupRank>) {
        for at in ranks.iter().map(|rank| usize::from(rank.0)).filter(|at| *at < self.entries) {
            // SAFETY: inside the entries, which the program keeps valid until the work was found ended.
            unsafe { self.set(at, 1) };
        }
    }
}

/// Part of a completion that its end changes.
struct Ending {
    hint: FailedRanksHint,
    /// Result of the work, once it was found ended.
    result: Option<Result<(), CallFailure>>,
}

/// Operation or message that a program has begun.
pub(crate) struct Completion {
    work: Work,
    /// The peer of a message.
    peer: Option<GroupRank>,
    membership: Arc<Membership>,
    ending: Mutex<Ending>,
}

impl Completion {
    /// Returns the handle of a work.
    pub(crate) fn publish(
        work: Work,
        peer: Option<GroupRank>,
        membership: Arc<Membership>,
        hint: FailedRanksHint,
    ) -> *mut c_void {
        let ending = Mutex::new(Ending { hint, result: None });
        COMPLETIONS.add(Arc::new(Self { work, peer, membership, ending }))
    }

    /// Returns the result of the ended work. The first call marks the failed ranks.
    fn end(&self, outcome: Result<kvplane::group::Completion, GroupError>) -> Result<(), CallFailure> {
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let Ending { hint, result } = &mut *ending;
        result
            .get_or_insert_with(|| {
                // The view is newer than the failure.
                self.membership.write_mirror();
                let (failed, result) = judge(outcome, self.peer);
                hint.mark(failed);
                result
            })
            .clone()
    }
}

/// Returns the ranks that failed in a work, and its result. Only the hint names a peer of a message, or a root, that
/// has failed: as in Mooncake, the work succeeds.
fn judge(
    outcome: Result<kvplane::group::Completion, GroupError>,
    peer: Option<GroupRank>,
) -> (RankSet<GroupRank>, Result<(), CallFailure>) {
    match (outcome, peer) {
        (Ok(completion), _) => (completion.failed, Ok(())),
        (Err(GroupError::Failed(Failure::Deadline { .. } | Failure::PeerLost { .. })), Some(peer)) => {
            (RankSet::single(peer), Ok(()))
        }
        (Err(GroupError::Failed(Failure::RootGone { root })), None) => (RankSet::single(root), Ok(())),
        (Err(GroupError::Failed(Failure::Deadline { awaited })), None) => {
            (awaited, Err(GroupError::Failed(Failure::Deadline { awaited }).into()))
        }
        (Err(error), _) => (RankSet::EMPTY, Err(error.into())),
    }
}

/// Writes 1 if the work of a completion has ended, else 0, and returns its result once it has.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCompletionIsCompleted(
    completion: *mut c_void,
    completed: *mut c_int,
) -> c_int {
    call(|| {
        let completion = COMPLETIONS.get(completion)?;
        let outcome = completion.work.outcome();
        // SAFETY: by the caller's promise.
        unsafe { put(completed, c_int::from(outcome.is_some()), "the answer") }?;
        outcome.map_or(Ok(()), |outcome| completion.end(outcome))
    })
}

/// Waits for the end of the work of a completion, and returns its result.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgCompletionWait(completion: *mut c_void, timeout_us: i64) -> c_int {
    call(|| {
        let completion = COMPLETIONS.get(completion)?;
        let outcome = match u64::try_from(timeout_us) {
            Ok(timeout_us) => completion.work.wait(Duration::from_micros(timeout_us)).ok_or_else(|| {
                CallFailure::new(
                    ResultCode::Timeout,
                    format_args!("the operation has not ended within {timeout_us} us"),
                )
            })?,
            Err(_) => loop {
                if let Some(outcome) = completion.work.wait(LONG) {
                    break outcome;
                }
            },
        };
        completion.end(outcome)
    })
}

/// Frees a completion; its work goes on. Null is ignored.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgCompletionDestroy(completion: *mut c_void) -> c_int {
    call(|| {
        COMPLETIONS.remove(completion)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(ranks: &[u8]) -> RankSet<GroupRank> {
        ranks.iter().copied().map(GroupRank).collect()
    }

    #[test]
    fn the_hint_names_peers_and_roots_that_failed() {
        let (participants, failed) = (ranks(&[0]), ranks(&[1]));
        let completion = kvplane::group::Completion { epoch: 2, participants, failed, peer: None };
        assert_eq!(judge(Ok(completion), None), (ranks(&[1]), Ok(())));
        let lost = Failure::PeerLost { rank: GroupRank(2) };
        assert_eq!(judge(Err(lost.into()), Some(GroupRank(2))), (ranks(&[2]), Ok(())));
        let late = Failure::Deadline { awaited: ranks(&[2, 3]) };
        assert_eq!(judge(Err(late.clone().into()), Some(GroupRank(2))), (ranks(&[2]), Ok(())));
        let root = Failure::RootGone { root: GroupRank(0) };
        assert_eq!(judge(Err(root.into()), None), (ranks(&[0]), Ok(())));
        let (failed, result) = judge(Err(late.into()), None);
        assert_eq!((failed, result.map_err(|failure| failure.code)), (ranks(&[2, 3]), Err(ResultCode::Timeout)));
        let (failed, result) = judge(Err(GroupError::Ended), None);
        assert_eq!((failed, result.map_err(|failure| failure.code)), (ranks(&[]), Err(ResultCode::InvalidState)));
    }

    #[test]
    fn hints_are_cleared_and_marked() {
        let mut memory = [7; 4];
        // SAFETY: as many entries as it says.
        let hint = unsafe { FailedRanksHint::new(memory.as_mut_ptr(), 4, 3) }.expect("enough");
        hint.mark(ranks(&[1, 3]));
        assert_eq!(memory, [0, 1, 0, 7]);
        // SAFETY: as above.
        assert!(unsafe { FailedRanksHint::new(memory.as_mut_ptr(), 2, 3) }.is_err());
        // SAFETY: null is allowed.
        assert!(unsafe { FailedRanksHint::new(std::ptr::null_mut(), 3, 3) }.is_err());
    }
}
