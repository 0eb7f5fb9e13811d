//! Fetch of a replica: which shards are present, missing, ordered, in flight, and to be reported.
//!
//! Orders come from the catalog, and for a rank also from its schedule. Threads of a get take them
//! ([`Fetch::next_order`]) and return the outcomes ([`Fetch::complete`]), which the caller's own thread reports
//! ([`Fetch::take_news`]).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::{Follow, Interval, ObjectSpec, ShardSet};
use kvplane_rpc::p2p::{FetchFailure, RankParent};
use kvplane_sys::interrupt;
use kvplane_transfer::Batch;

use super::order::ShardOrder;
use super::rank_progress::RankProgress;
use super::ranks::Seat;

/// Interval of the checks for progress.
const LOOK: Duration = Duration::from_millis(500);
/// Time within which the reports of ranks are batched.
const TOGETHER: Duration = Duration::from_millis(200);

/// Reason why the fetch of a shard failed.
#[derive(Debug)]
pub(in crate::p2p) enum Trouble {
    /// The bytes do not match the hash.
    Corrupt,
    /// The peer did not serve the shard.
    Source(String),
}

/// Outcomes that are to be reported to the catalog.
#[derive(Debug, Default)]
pub(in crate::p2p) struct News {
    /// Arrived shards.
    pub(in crate::p2p) got: Vec<u32>,
    pub(in crate::p2p) failed: Vec<FetchFailure>,
    /// Number of shards that are missing now.
    pub(in crate::p2p) missing: u32,
}

/// State of the parent of one half of a rank's shards.
pub(in crate::p2p) enum ParentState {
    /// The parent is not followed any more: all of its half is present, the parent was left, or the fetch is stopped.
    Ended,
    /// The parent is not known yet.
    Unknown,
    /// The parent is known, and is followed.
    Known(RankParent),
}

/// State of the shards that come from the parent of a half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::p2p) enum FetchRoom {
    /// The parent is not followed any more.
    Ended,
    /// The limit of shards that are ready or in flight is reached.
    Full,
    /// More shards could be in flight: the parent's board should be read.
    Free,
}

/// Shard in flight.
#[derive(Default)]
struct Active {
    /// Pieces in flight, in the order in which they were submitted.
    batches: VecDeque<Arc<Batch>>,
    /// Order for another peer, which replaces the present one.
    next: Option<ShardOrder>,
}

struct State {
    have: ShardSet,
    want: ShardSet,
    orders: VecDeque<ShardOrder>,
    active: BTreeMap<u32, Active>,
    /// Arrived shards that are not reported yet.
    got: Vec<u32>,
    failed: Vec<FetchFailure>,
    fetched_bytes: u64,
    rank: Option<RankProgress>,
    /// Last error, for error messages.
    trouble: Option<String>,
    stop: bool,
}

/// Shards of a replica, and the fetch of those that it lacks.
pub(in crate::p2p) struct Fetch {
    spec: Arc<ObjectSpec>,
    /// Board of this rank, if the replica is fetched by a schedule.
    seat: Option<Seat>,
    state: Mutex<State>,
    /// Signaled when there are orders, or the fetch stops.
    ordered: Condvar,
    /// Signaled when there are outcomes to report.
    news: Condvar,
    /// Signaled on events that the threads wait for which follow parents.
    followed: Condvar,
}

impl Fetch {
    /// Creates the state of a replica that has some shards and lacks others.
    pub(super) fn new(spec: Arc<ObjectSpec>, have: ShardSet, want: ShardSet) -> Self {
        let state = State {
            have,
            want,
            orders: VecDeque::new(),
            active: BTreeMap::new(),
            got: Vec::new(),
            failed: Vec::new(),
            fetched_bytes: 0,
            rank: None,
            trouble: None,
            stop: false,
        };
        let (ordered, news, followed) = (Condvar::new(), Condvar::new(), Condvar::new());
        Self { spec, seat: None, state: Mutex::new(state), ordered, news, followed }
    }

    /// Lets the fetch follow a schedule, as the rank with this board.
    pub(super) fn follow_schedule(&mut self, follow: Follow, seat: Seat) {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).rank = Some(RankProgress::new(follow));
        self.seat = Some(seat);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the board of this rank, if the replica is fetched by a schedule.
    pub(in crate::p2p) const fn seat(&self) -> Option<&Seat> {
        self.seat.as_ref()
    }

    /// Returns the numbers of shards that are present, and missing.
    pub(in crate::p2p) fn counts(&self) -> (u32, u32) {
        let state = self.state();
        (state.have.count(), state.want.count())
    }

    /// Returns the number of bytes that were fetched.
    pub(in crate::p2p) fn fetched_bytes(&self) -> u64 {
        self.state().fetched_bytes
    }

    /// Returns the last error of a shard.
    pub(in crate::p2p) fn trouble(&self) -> Option<String> {
        self.state().trouble.clone()
    }

    /// Returns the shards that are present, and those that the control plane is to order: for a rank, those that its
    /// schedule does not deliver.
    pub(in crate::p2p) fn announced(&self) -> (Vec<Interval>, Vec<Interval>) {
        let state = self.state();
        let want = match &state.rank {
            Some(rank) => rank.elsewhere(|shard| state.want.contains(shard), state.want.shards()).intervals(),
            None => state.want.intervals(),
        };
        (state.have.intervals(), want)
    }

    /// Begins another fetch, of those of the `wanted` shards that are not present. `found` are the hashes of all shards
    /// in memory, or nothing: shards that match are present, and are reported. Returns the missing shards.
    pub(in crate::p2p) fn restart(&self, wanted: ShardSet, found: &[u128]) -> ShardSet {
        let mut missing = wanted;
        let mut state = self.state();
        state.have.iter().for_each(|shard| {
            missing.remove(shard);
        });
        let is_right = |&shard: &u32| found.get(shard as usize) == Some(&self.spec.hashes[shard as usize]);
        let right: Vec<u32> = missing.iter().filter(is_right).collect();
        for &shard in &right {
            missing.remove(shard);
            state.have.insert(shard);
        }
        state.want = missing.clone();
        state.got = right;
        state.orders.clear();
        state.failed.clear();
        (state.fetched_bytes, state.trouble, state.stop) = (0, None, false);
        missing
    }

    /// Withdraws all wants and orders.
    pub(in crate::p2p) fn withdraw(&self) {
        let mut state = self.state();
        state.want = ShardSet::empty(self.spec.layout.shards());
        state.orders.clear();
    }

    /// Ends the fetch: cancels what is in flight, and wakes all threads.
    pub(in crate::p2p) fn stop(&self) {
        let mut state = self.state();
        state.stop = true;
        state.active.values().flat_map(|active| &active.batches).for_each(|batch| batch.cancel());
        drop(state);
        self.ordered.notify_all();
        self.followed.notify_all();
    }
}

/// Orders and their execution.
impl Fetch {
    /// Accepts an order. An order for a shard in flight cancels the fetch and is carried out next.
    pub(in crate::p2p) fn order(&self, order: ShardOrder) {
        let mut state = self.state();
        if let Some(order) = state.replace(order) {
            state.orders.push_back(order);
            self.ordered.notify_one();
        }
    }

    /// Waits for an order, and counts its shard as in flight; `None` once the fetch is stopped.
    pub(in crate::p2p) fn next_order(&self) -> Option<ShardOrder> {
        let mut state = self.state();
        loop {
            if state.stop {
                return None;
            }
            match state.orders.pop_front() {
                // The shard is present already: its report was lost.
                Some(order) if state.have.contains(order.shard) => {
                    state.got.push(order.shard);
                    self.news.notify_all();
                }
                Some(order) => {
                    if let Some(order) = state.replace(order) {
                        state.active.insert(order.shard, Active::default());
                        return Some(order);
                    }
                }
                None => state = self.ordered.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Notes a submitted piece of a shard in flight. It is canceled if the fetch is stopped or the order replaced.
    pub(in crate::p2p) fn add_piece(&self, shard: u32, piece: &Arc<Batch>) {
        let mut state = self.state();
        let stop = state.stop;
        if let Some(active) = state.active.get_mut(&shard) {
            if stop || active.next.is_some() {
                piece.cancel();
            }
            active.batches.push_back(Arc::clone(piece));
        }
    }

    /// Forgets the first piece of a shard in flight, which has completed.
    pub(in crate::p2p) fn end_piece(&self, shard: u32) {
        // Dropped outside the lock.
        let known = self.state().active.get_mut(&shard).map(|active| active.batches.pop_front());
        drop(known);
    }

    /// Forgets all pieces of a shard in flight. Those still in flight after a failure end before their memory is used
    /// again: when the last reference is dropped, which happens outside the lock.
    pub(in crate::p2p) fn end_pieces(&self, shard: u32) {
        let known = self.state().active.get_mut(&shard).map(|active| std::mem::take(&mut active.batches));
        drop(known);
    }

    /// Notes the outcome of an order: the number of bytes, or the reason of the failure. Returns the order that is to
    /// be carried out instead, if a failed one was replaced; otherwise the shard is not in flight any more.
    pub(in crate::p2p) fn complete(&self, order: &ShardOrder, outcome: Result<u64, Trouble>) -> Option<ShardOrder> {
        let shard = order.shard;
        let mut state = self.state();
        let next = state.active.get_mut(&shard).and_then(|active| active.next.take());
        match (outcome, next) {
            (Ok(bytes), _) => {
                state.have.insert(shard);
                state.want.remove(shard);
                state.got.push(shard);
                state.fetched_bytes += bytes;
                self.arrived(&mut state, shard);
            }
            // The order was replaced by one for another peer. The failure of the former order says nothing about its
            // peer.
            (Err(Trouble::Source(_)), Some(next)) if !state.stop => return Some(next),
            (Err(trouble), next) => {
                let failure =
                    FetchFailure { shard, source: order.source, corrupt: matches!(trouble, Trouble::Corrupt) };
                // A failure within a schedule is reported by the thread that follows the parent.
                let unclaimed = match &mut state.rank {
                    Some(rank) => rank.claim_failure(failure),
                    None => Some(failure),
                };
                match unclaimed {
                    Some(failure) => state.failed.push(failure),
                    None => self.followed.notify_all(),
                }
                state.trouble = Some(match trouble {
                    Trouble::Corrupt => format!("shard {shard} from {} does not match its hash", order.segment),
                    Trouble::Source(why) => format!("shard {shard} from {}: {why}", order.segment),
                });
                // Taken by the same thread in its next round.
                state.orders.extend(next);
            }
        }
        state.active.remove(&shard);
        drop(state);
        self.news.notify_all();
        None
    }

    /// Waits a limited time for outcomes to report, and takes them. No peer depends on the reports of ranks: they are
    /// batched while everything arrives by the schedule.
    pub(in crate::p2p) fn take_news(&self, until: Instant, reported: Instant) -> News {
        let look = if self.seat.is_some() { TOGETHER } else { LOOK };
        let look = interrupt::step(look.min(until.saturating_duration_since(Instant::now())));
        let is_quiet = |state: &mut State| {
            let follows = state.rank.as_ref().is_some_and(RankProgress::is_on_schedule);
            let is_early = follows && reported.elapsed() < TOGETHER;
            (state.got.is_empty() || is_early) && state.failed.is_empty() && !state.want.is_empty()
        };
        let waited = self.news.wait_timeout_while(self.state(), look, is_quiet);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (got, failed) = (std::mem::take(&mut state.got), std::mem::take(&mut state.failed));
        News { got, failed, missing: state.want.count() }
    }

    /// Keeps outcomes for the next report: it is unknown whether this one was received.
    pub(in crate::p2p) fn keep_news(&self, news: News) {
        let mut state = self.state();
        state.got.extend(news.got);
        state.failed.extend(news.failed);
    }
}

/// Schedule of a rank.
impl Fetch {
    /// Notes a half's parent, or that it is not known.
    pub(in crate::p2p) fn set_parent(&self, half: usize, parent: Option<RankParent>) {
        if let Some(rank) = &mut self.state().rank {
            rank.set_parent(half, parent);
        }
    }

    /// Returns a half's parent. While it is not known, waits up to `pause` or until a notification first.
    pub(in crate::p2p) fn await_parent(&self, half: usize, pause: Duration) -> ParentState {
        let mut state = self.state();
        if !self.goes_on(&mut state, half) {
            return ParentState::Ended;
        }
        if let Some(parent) = state.rank.as_ref().and_then(|rank| rank.parent(half)) {
            return ParentState::Known(parent);
        }
        self.pause(state, pause);
        ParentState::Unknown
    }

    /// Returns true if a half's parent is still to be followed; leaves parents that were waited for long enough.
    pub(in crate::p2p) fn is_followed(&self, half: usize) -> bool {
        self.goes_on(&mut self.state(), half)
    }

    /// Waits up to `pause` or until a notification, if a half's parent is still followed, and returns true then.
    pub(in crate::p2p) fn pause_while_followed(&self, half: usize, pause: Duration) -> bool {
        let mut state = self.state();
        let is_followed = self.goes_on(&mut state, half);
        if is_followed {
            self.pause(state, pause);
        }
        is_followed
    }

    /// Returns true if more shards of a half could be in flight. Otherwise, waits up to `pause` or until a notification
    /// first.
    pub(in crate::p2p) fn room(&self, half: usize, pause: Duration) -> FetchRoom {
        let mut state = self.state();
        if !self.goes_on(&mut state, half) {
            return FetchRoom::Ended;
        }
        if state.rank.as_ref().is_some_and(|rank| rank.has_room(half)) {
            return FetchRoom::Free;
        }
        self.pause(state, pause);
        FetchRoom::Full
    }

    /// Notes the shards of a half's parent, as words of 64 shards, and orders what can be in flight. Then waits up to
    /// `pause` or until a notification, if there is a pause.
    pub(in crate::p2p) fn learn(&self, half: usize, words: &[u64], pause: Option<Duration>) {
        let mut state = self.state();
        if let Some(rank) = &mut state.rank {
            rank.learn(half, words);
        }
        self.dispatch(&mut state);
        if let Some(pause) = pause {
            self.pause(state, pause);
        }
    }

    /// Leaves a half's parent, which cannot be reached.
    pub(in crate::p2p) fn leave_parent(&self, half: usize) {
        if let Some(rank) = &mut self.state().rank {
            rank.leave(half);
        }
    }

    /// Returns the shards that the schedule does not deliver, and takes the failures of fetches from parents; `None` if
    /// the fetch is stopped or follows no schedule.
    pub(in crate::p2p) fn elsewhere(&self) -> Option<(ShardSet, Vec<FetchFailure>)> {
        let mut state = self.state();
        if state.stop {
            return None;
        }
        let rank = state.rank.as_mut()?;
        Some((rank.elsewhere(|_| true, self.spec.layout.shards()), rank.take_failures()))
    }

    /// Keeps failures of fetches from parents for the next report.
    pub(in crate::p2p) fn keep_unfollowed(&self, failed: Vec<FetchFailure>) {
        if let Some(rank) = &mut self.state().rank {
            rank.keep_failures(failed);
        }
    }

    fn goes_on(&self, state: &mut State, half: usize) -> bool {
        let stop = state.stop;
        let (Some(seat), Some(rank)) = (&self.seat, &mut state.rank) else { return false };
        rank.follows(half, seat.now_ns()) && !stop
    }

    fn pause(&self, state: MutexGuard<'_, State>, most: Duration) {
        drop(self.followed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner));
    }

    /// Marks an arrived shard as present for the followers, and orders the next one.
    fn arrived(&self, state: &mut State, shard: u32) {
        let Some(seat) = &self.seat else { return };
        seat.mark(shard);
        let Some(rank) = &mut state.rank else { return };
        let has_room = rank.arrived(shard, seat.now_ns());
        self.dispatch(state);
        if has_room {
            self.followed.notify_all();
        }
    }

    /// Orders the shards that parents are known to have.
    fn dispatch(&self, state: &mut State) {
        let (Some(seat), Some(rank)) = (&self.seat, &mut state.rank) else { return };
        for order in rank.orders(&self.spec.layout, seat.now_ns()) {
            state.orders.push_back(order);
            self.ordered.notify_one();
        }
    }
}

impl State {
    /// Replaces the order of a shard in flight, whose fetch is canceled. Returns the order if the shard is not in
    /// flight.
    fn replace(&mut self, order: ShardOrder) -> Option<ShardOrder> {
        let Some(active) = self.active.get_mut(&order.shard) else { return Some(order) };
        active.batches.iter().for_each(|batch| batch.cancel());
        active.next = Some(order);
        None
    }
}

#[cfg(test)]
mod tests;
