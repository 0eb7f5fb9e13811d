//! Communicators: memberships of groups.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvplane::group::{
    Change, GroupProcess, GroupRank, GroupSpec, MAX_RANKS, MemberState, Outcome, ProcessGroup, ProcessState, RankSet,
    Work,
};

use super::context::{Context, ContextUse};
use super::layout::{CommConfig, MembershipSpec, ProposalResponse, SyncResponse};
use super::mirror::{self, Mirror};
use super::outcome::{CallFailure, ResultCode, call, is_without_group, put, reason_of, text_of};
use crate::handles::Handles;
use crate::rim::array;

/// Longest wait for a group's first view, and for the activation of a joiner.
const FOUNDING: Duration = Duration::from_secs(300);
/// Longest wait of a joiner for the group that it names.
const APPEARANCE: Duration = Duration::from_secs(5);
/// Pause before a joiner attaches to its group again.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest wait for operations in flight, before a member leaves or says that it is ready.
const DRAIN: Duration = Duration::from_secs(5);
/// Longest wait for the outcome of a proposal: longer than the control plane lets it wait, and fences members.
const PROPOSAL: Duration = Duration::from_secs(60);

static COMMS: Handles<Membership> = Handles::new("communicator");

/// Membership of a group.
pub(crate) struct Membership {
    pub(crate) context: Arc<Context>,
    pub(crate) group: ProcessGroup,
    mirror: Option<Mirror>,
    /// Works that may be in flight.
    works: Mutex<Vec<Work>>,
    /// False for a joiner until the group has activated it.
    has_joined: AtomicBool,
    has_ended: AtomicBool,
    /// Keeps the context from being destroyed.
    context_use: Mutex<Option<ContextUse>>,
}

impl Membership {
    pub(crate) fn of(comm: *mut c_void) -> Result<Arc<Self>, CallFailure> {
        Ok(COMMS.get(comm)?)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Remembers a work, until it has ended.
    pub(crate) fn keep(&self, work: &Work) {
        let mut works = self.works.lock().unwrap_or_else(PoisonError::into_inner);
        works.retain(|work| !work.has_ended());
        works.push(work.clone());
    }

    /// Waits for the works in flight; false if one has not ended in time.
    fn drain(&self) -> bool {
        let until = Instant::now() + DRAIN;
        let works = std::mem::take(&mut *self.works.lock().unwrap_or_else(PoisonError::into_inner));
        works.iter().all(|work| work.wait(until.saturating_duration_since(Instant::now())).is_some())
    }

    /// True for a joiner that has not joined: its collectives run with itself alone.
    fn is_alone(&self) -> bool {
        self.group.spec().is_joining && !self.has_joined.load(Ordering::Acquire)
    }

    fn max_size(&self) -> usize {
        usize::from(self.group.spec().max_size)
    }

    fn mask(&self, ranks: RankSet<GroupRank>) -> Vec<bool> {
        kvplane::group::mask(ranks, self.max_size())
    }

    /// Returns the active ranks, those that failed included: they are active until they are deactivated.
    fn active(&self) -> Vec<bool> {
        let alone = RankSet::single(self.group.rank());
        self.mask(if self.is_alone() { alone } else { self.group.view().active })
    }

    /// Returns the ranks that are alive, connected, and active or ready to be.
    fn synced(&self) -> Vec<bool> {
        let is_synced = |(member, process): (MemberState, ProcessState)| {
            process == ProcessState::Healthy && matches!(member, MemberState::Active | MemberState::AwaitingActivation)
        };
        let mut synced: Vec<bool> = self.group.members().into_iter().map(is_synced).collect();
        synced.resize(self.max_size(), false);
        synced
    }

    pub(crate) fn write_mirror(&self) {
        if let Some(mirror) = &self.mirror {
            mirror.write(|| self.active());
        }
    }

    /// Returns the rank of a number.
    fn rank(&self, rank: i32) -> Result<GroupRank, CallFailure> {
        let found = u8::try_from(rank).ok().filter(|rank| usize::from(*rank) < self.max_size()).map(GroupRank);
        found.ok_or_else(|| {
            CallFailure::argument(format_args!("rank {rank} in a group of at most {} members", self.max_size()))
        })
    }

    /// Returns the peer of a message.
    pub(crate) fn peer(&self, peer: c_int) -> Result<GroupRank, CallFailure> {
        self.rank(peer)
    }

    /// # Safety
    /// An array of as many ranks as it says, or null.
    unsafe fn ranks(&self, ranks: *const i32, count: usize) -> Result<Vec<GroupRank>, CallFailure> {
        if count > MAX_RANKS {
            return Err(CallFailure::argument(format_args!("{count} ranks: a group has at most {MAX_RANKS}")));
        }
        // SAFETY: by the caller's promise.
        let ranks = unsafe { array(ranks, count) }.ok_or_else(|| CallFailure::argument("the list of ranks is null"))?;
        ranks.iter().map(|&rank| self.rank(rank)).collect()
    }

    /// Makes a proposal.
    fn propose(&self, change: Change) -> Result<ProposalResponse, CallFailure> {
        let outcome = self.group.propose(change, PROPOSAL)?;
        self.write_mirror();
        Ok(response_of(&outcome, self.group.view().epoch))
    }

    fn join(&self) -> Result<(), CallFailure> {
        if !self.is_alone() && self.group.view().participants().contains(self.group.rank()) {
            return Err(CallFailure::state(
                "the rank takes part already: a joiner joins, or a rank that was deactivated",
            ));
        }
        if !self.drain() {
            return Err(CallFailure::new(
                ResultCode::Timeout,
                format_args!("operations in flight have not ended within {} s", DRAIN.as_secs()),
            ));
        }
        self.group.join(FOUNDING)?;
        self.has_joined.store(true, Ordering::Release);
        self.write_mirror();
        Ok(())
    }

    /// Leaves the group.
    fn end(&self) -> Result<(), CallFailure> {
        self.drain();
        self.has_ended.store(true, Ordering::Release);
        if let Some(mirror) = &self.mirror {
            mirror.end();
        }
        let left = self.group.detach();
        drop(self.context_use.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(left?)
    }
}

/// Attaches to a group. The group of a joiner may be about to be made.
fn attach(process: &GroupProcess, spec: &GroupSpec) -> Result<ProcessGroup, CallFailure> {
    let until = Instant::now() + APPEARANCE;
    loop {
        match process.attach(spec.clone()) {
            Err(error) if spec.is_joining && is_without_group(&error) && Instant::now() < until => thread::sleep(PAUSE),
            attached => return Ok(attached?),
        }
    }
}

/// Returns the answer to a proposal; `epoch` is that of the present view.
fn response_of(outcome: &Outcome, epoch: u64) -> ProposalResponse {
    let reason = reason_of(outcome);
    let (new_epoch, dropped) = match *outcome {
        Outcome::Applied { epoch, dropped } => (epoch, dropped),
        Outcome::Unchanged { epoch } => (epoch, RankSet::EMPTY),
        _ => (epoch, RankSet::EMPTY),
    };
    let status = match (&reason, dropped.is_empty()) {
        (Some(_), _) => 0,
        (None, true) => 1,
        (None, false) => 2,
    };
    let mut dropped_ranks = [0; MAX_RANKS];
    dropped_ranks.iter_mut().zip(dropped.iter()).for_each(|(place, rank)| *place = i32::from(rank.0));
    ProposalResponse {
        status,
        new_epoch,
        dropped_rank_count: dropped.len(),
        dropped_ranks,
        reject_reason: text_of(reason.as_deref().unwrap_or_default()),
    }
}

/// Becomes a member of a group.
///
/// # Safety
/// Conditions of the header, and of [`CommConfig::describe`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommCreate(
    context: *mut c_void,
    config: *const CommConfig,
    comm: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        unsafe { put(comm, ptr::null_mut(), "the communicator") }?;
        let context = Context::of(context)?;
        let (context_use, process, place) = Context::begin_use(&context)?;
        // SAFETY: as above.
        let MembershipSpec { spec, mirror } = unsafe { CommConfig::describe(config, place) }?;
        let group = attach(&process, &spec)?;
        if let Err(error) = group.await_epoch(1, FOUNDING) {
            // The first error is the one that counts.
            drop(group.detach());
            return Err(error.into());
        }
        let membership = Arc::new(Membership {
            context,
            has_joined: AtomicBool::new(!spec.is_joining),
            group,
            mirror,
            works: Mutex::default(),
            has_ended: AtomicBool::new(false),
            context_use: Mutex::new(Some(context_use)),
        });
        membership.write_mirror();
        if membership.mirror.is_some()
            && let Err(failure) = mirror::follow(&membership)
        {
            drop(membership.end());
            return Err(failure);
        }
        // SAFETY: as above.
        unsafe { put(comm, COMMS.add(membership), "the communicator") }
    })
}

/// Leaves a group; null is ignored.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgCommDestroy(comm: *mut c_void) -> c_int {
    call(|| COMMS.remove(comm)?.map_or(Ok(()), |membership| membership.end()))
}

/// Writes what a membership answers to the place for it.
///
/// # Safety
/// A place for the answer, or null.
unsafe fn answer<T>(
    comm: *mut c_void,
    place: *mut T,
    what: &str,
    work: impl FnOnce(&Membership) -> Result<T, CallFailure>,
) -> c_int {
    call(|| {
        let membership = Membership::of(comm)?;
        if place.is_null() {
            return Err(CallFailure::argument(format_args!("the pointer for {what} is null")));
        }
        let answer = work(&membership)?;
        // SAFETY: by the caller's promise.
        unsafe { put(place, answer, what) }
    })
}

/// Writes the rank in the group.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetRank(comm: *mut c_void, rank: *mut c_int) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { answer(comm, rank, "the rank", |membership| Ok(c_int::from(membership.group.rank().0))) }
}

/// Writes the size of the group.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetSize(comm: *mut c_void, size: *mut c_int) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { answer(comm, size, "the size", |membership| Ok(membership.group.size() as c_int)) }
}

/// Writes the most members that the group may have.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetMaxGroupSize(comm: *mut c_void, size: *mut c_int) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { answer(comm, size, "the largest size", |membership| Ok(membership.max_size() as c_int)) }
}

/// Writes the epoch of the view.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetEpoch(comm: *mut c_void, epoch: *mut u64) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { answer(comm, epoch, "the epoch", |membership| Ok(membership.group.view().epoch)) }
}

/// Writes the number of ranks that are alive, connected, and active or ready to be.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetNumSyncedRanks(comm: *mut c_void, synced: *mut c_int) -> c_int {
    let count =
        |membership: &Membership| Ok(membership.synced().into_iter().filter(|is_synced| *is_synced).count() as c_int);
    // SAFETY: by the caller's promise.
    unsafe { answer(comm, synced, "the number of ranks", count) }
}

/// Writes which ranks are active.
///
/// # Safety
/// An array of as many entries as it says, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetActiveRanks(
    comm: *mut c_void,
    active_ranks: *mut i32,
    rank_count: usize,
) -> c_int {
    call(|| {
        let membership = Membership::of(comm)?;
        let active = membership.active();
        if active_ranks.is_null() || rank_count < active.len() {
            return Err(CallFailure::argument(format_args!(
                "activeRanks has {rank_count} entries at {active_ranks:?}; it needs {}",
                active.len()
            )));
        }
        for (at, is_active) in active.into_iter().enumerate() {
            // SAFETY: inside the entries, by the caller's promise.
            unsafe { active_ranks.add(at).write(i32::from(is_active)) };
        }
        Ok(())
    })
}

/// Writes for each of some ranks whether it is alive, connected, and active or ready to be.
///
/// # Safety
/// Arrays of as many ranks and entries as it says, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommGetPeerState(
    comm: *mut c_void,
    ranks: *const i32,
    rank_count: usize,
    peer_states: *mut i32,
) -> c_int {
    call(|| {
        let membership = Membership::of(comm)?;
        // SAFETY: by the caller's promise.
        let ranks = unsafe { membership.ranks(ranks, rank_count) }?;
        if peer_states.is_null() && rank_count > 0 {
            return Err(CallFailure::argument("the pointer for the states is null"));
        }
        let synced = membership.synced();
        for (at, rank) in ranks.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { peer_states.add(at).write(i32::from(synced[usize::from(rank.0)])) };
        }
        Ok(())
    })
}

/// Proposes a change of some ranks.
///
/// # Safety
/// An array of as many ranks as it says, or null; a place for the answer, or null.
unsafe fn change(
    comm: *mut c_void,
    ranks: *const i32,
    rank_count: usize,
    response: *mut ProposalResponse,
    change: impl FnOnce(RankSet<GroupRank>) -> Change,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        answer(comm, response, "the response", |membership| {
            let ranks = membership.ranks(ranks, rank_count)?;
            if ranks.is_empty() {
                return Err(CallFailure::argument("a change of no rank"));
            }
            membership.propose(change(ranks.into_iter().collect()))
        })
    }
}

/// Proposes to activate ranks.
///
/// # Safety
/// An array of as many ranks as it says, or null; a place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommActivateRanks(
    comm: *mut c_void,
    ranks: *const i32,
    rank_count: usize,
    response: *mut ProposalResponse,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { change(comm, ranks, rank_count, response, Change::Activate) }
}

/// Proposes to deactivate ranks.
///
/// # Safety
/// An array of as many ranks as it says, or null; a place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommDeactivateRanks(
    comm: *mut c_void,
    ranks: *const i32,
    rank_count: usize,
    response: *mut ProposalResponse,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { change(comm, ranks, rank_count, response, Change::Deactivate) }
}

/// Joins the group as a participant, and waits until it has activated this rank.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgCommJoin(comm: *mut c_void) -> c_int {
    call(|| Membership::of(comm)?.join())
}

/// Deactivates the members that failed.
///
/// # Safety
/// A place for the answer, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgCommSyncAfterFailure(
    comm: *mut c_void,
    response: *mut SyncResponse,
) -> c_int {
    let sync = |membership: &Membership| {
        let outcome = membership.group.propose(Change::DeactivateFailed, membership.context.reconciliation_window())?;
        membership.write_mirror();
        let reason = reason_of(&outcome);
        let status = match outcome {
            Outcome::Applied { .. } => 0,
            Outcome::Unchanged { .. } => 1,
            _ => 2,
        };
        Ok(SyncResponse { status, reject_reason: text_of(reason.as_deref().unwrap_or_default()) })
    };
    // SAFETY: by the caller's promise.
    unsafe { answer(comm, response, "the response", sync) }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn reason(response: &ProposalResponse) -> &str {
        // SAFETY: it has a final zero.
        unsafe { CStr::from_ptr(response.reject_reason.as_ptr()) }.to_str().expect("text")
    }

    #[test]
    fn outcomes_have_the_numbers_of_the_header() {
        let ranks: RankSet<GroupRank> = [2, 5].map(GroupRank).into_iter().collect();
        let applied = response_of(&Outcome::Applied { epoch: 4, dropped: RankSet::EMPTY }, 3);
        assert_eq!((applied.status, applied.new_epoch, applied.dropped_rank_count), (1, 4, 0));
        assert_eq!(reason(&applied), "");
        let dropped = response_of(&Outcome::Applied { epoch: 4, dropped: ranks }, 3);
        assert_eq!((dropped.status, dropped.dropped_rank_count, &dropped.dropped_ranks[..3]), (2, 2, &[2, 5, 0][..]));
        let unchanged = response_of(&Outcome::Unchanged { epoch: 7 }, 7);
        assert_eq!((unchanged.status, unchanged.new_epoch), (1, 7));
        let rejected = response_of(&Outcome::NotReady { ranks }, 3);
        assert_eq!((rejected.status, rejected.new_epoch), (0, 3));
        assert!(reason(&rejected).starts_with("ranks 2, 5 were not ready"), "{}", reason(&rejected));
        assert!(reason(&response_of(&Outcome::NoMemberLeft, 3)).contains("no member"));
    }
}
