//! Ranks: a process that fetches as one rank of a job reads from the parents that a schedule gives, without an order
//! for each shard.
//!
//! Each rank has a board in its memory, a bitmap of the shards that it has. Its followers read the board with one-sided
//! reads, about when the next shard is due; the control plane is not involved. One thread follows the parent of each
//! half of the shards.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::{Follow, HALVES, MAX_RANKS, Schedule, ShardSet};
use kvplane_engine::{HugePages, Region, RegionOptions};
use kvplane_rpc::p2p::{FetchOrder, JoinRanks, RankParent, WantShards};
use kvplane_transfer::{Opcode, SubmitOptions, TaskState, TransferRequest};

use super::fetch::Sources;
use super::replica::{Fetch, Replica};
use super::{StoreState, is_away, is_forgotten};
use crate::error::Error;

/// Limits of the pause between two reads of a board without news, or between two requests for a parent.
const PAUSES: std::ops::RangeInclusive<Duration> = Duration::from_micros(200)..=Duration::from_millis(20);
/// Reads of a board between two arrivals of shards there.
const LOOKS: u32 = 8;
/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);
/// Interval at which a wait for a board checks whether the parent is still followed.
const WAIT: Duration = Duration::from_millis(50);

/// Rank of this process among several that all fetch the same object at about the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Name of the job, the same for all its ranks. It may be empty.
    pub job: String,
    /// Number of this rank, from 0. Ranks near to each other in the network should have numbers near to each other.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Longest wait for another rank that is missing or makes no progress, before its shards are fetched from other
    /// peers; as long again for each rank between that one and the origin.
    pub patience: Duration,
}

impl Ranks {
    /// Creates this rank of so many, for the job with an empty name.
    #[must_use]
    pub const fn new(rank: u32, ranks: u32) -> Self {
        Self { job: String::new(), rank, ranks, patience: Duration::from_secs(2) }
    }

    /// # Errors
    /// When there is no such rank.
    pub(super) fn schedule(&self) -> Result<Schedule, Error> {
        let schedule = Schedule::new(self.ranks).filter(|_| self.rank < self.ranks);
        schedule.ok_or_else(|| {
            let (rank, ranks) = (self.rank, self.ranks);
            Error::Argument(format!("rank {rank} of {ranks}: ranks count from 0, and there are 1 to {MAX_RANKS}"))
        })
    }

    /// Returns the plan of a rank that lacks these shards, for this deadline.
    pub(super) fn follow(&self, lacks: &ShardSet, deadline: Duration) -> Result<Follow, Error> {
        let schedule = self.schedule()?;
        let depth = (0..HALVES).map(|half| schedule.depth(half, self.rank)).max().unwrap_or(1);
        // Leaves time to fetch from other peers.
        let patience = self.patience.min(deadline / (4 * depth));
        let patience_ns = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        Ok(Follow::new(schedule, self.rank, lacks, patience_ns, 0))
    }
}

/// Board of a rank, and space for copies of its parents' boards.
pub(super) struct Seat {
    pub(super) ranks: Ranks,
    pub(super) region: Arc<Region>,
    words: usize,
    started: Instant,
}

impl Seat {
    /// Creates a board that shows the present shards.
    ///
    /// # Errors
    /// When memory cannot be allocated.
    pub(super) fn new(ranks: &Ranks, have: &ShardSet) -> Result<Self, Error> {
        let words = have.as_words().len().max(1);
        let options = RegionOptions::new("p2p-board", (1 + HALVES) * words * size_of::<u64>());
        let region = Region::allocate(&RegionOptions { huge: HugePages::Never, ..options })?;
        let seat = Self { ranks: ranks.clone(), region, words, started: Instant::now() };
        have.iter().for_each(|shard| seat.mark(shard));
        Ok(seat)
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Marks a shard as present.
    pub(super) fn mark(&self, shard: u32) {
        let word = self.region.atomic_u64(shard as usize / 64 * size_of::<u64>());
        word.fetch_or((1u64 << (shard % 64)).to_le(), std::sync::atomic::Ordering::Release);
    }

    /// Returns the offset at which a parent's board is stored.
    const fn room(&self, half: usize) -> usize {
        (1 + half) * self.words * size_of::<u64>()
    }

    fn read(&self, half: usize) -> Vec<u64> {
        let word = |at| u64::from_le(self.region.load_u64(self.room(half) + at * size_of::<u64>()));
        (0..self.words).map(word).collect()
    }
}

impl Replica {
    /// Marks an arrived shard as present for the followers, and orders the next one.
    pub(super) fn seated(&self, fetch: &mut Fetch, shard: u32) {
        let Some(seat) = &self.seat else { return };
        seat.mark(shard);
        if let Some(follow) = &mut fetch.follow {
            follow.arrived(shard, seat.now_ns());
            let hungry = (0..HALVES).any(|half| follow.is_hungry(half));
            self.dispatch(fetch);
            if hungry {
                self.followed.notify_all();
            }
        }
    }

    /// Orders the shards that parents are known to have.
    pub(super) fn dispatch(&self, fetch: &mut Fetch) {
        let (Some(seat), Some(follow)) = (&self.seat, &mut fetch.follow) else { return };
        let now_ns = seat.now_ns();
        for (half, parent) in fetch.parents.iter().enumerate() {
            let Some(parent) = parent else { continue };
            while let Some(shard) = follow.next(half, now_ns) {
                let Some(place) = self.spec.layout.place(shard) else { continue };
                let address = parent.addresses[place.buffer] + place.offset;
                let (source, segment) = (parent.member, parent.segment.clone());
                fetch.orders.push_back(FetchOrder { member: self.member(), shard, source, segment, address });
                self.ordered.notify_one();
            }
        }
    }
}

impl StoreState {
    /// Registers the rank of a replica. Returns the parent of a half, if it is known.
    pub(super) fn join_ranks(&self, replica: &Replica, half: usize) -> Result<Option<RankParent>, Error> {
        let Some(seat) = &replica.seat else { return Ok(None) };
        let Ranks { job, rank, ranks, .. } = seat.ranks.clone();
        let (client, member, board) = (self.client, replica.member(), seat.region.address());
        let joined = self.link.call(JoinRanks { client, member, job, rank, ranks, board, half: half as u8 })?;
        let buffers = replica.regions.len();
        if let Some(parent) = joined.parent.as_ref().filter(|parent| parent.addresses.len() != buffers) {
            let what = format!("{} has {} buffers of {buffers}", parent.segment, parent.addresses.len());
            return Err(Error::Argument(what));
        }
        Ok(joined.parent)
    }

    /// Registers the rank of a replica for the first time.
    pub(super) fn take_seat(&self, replica: &Replica) -> Result<(), Error> {
        for half in (0..HALVES).filter(|_| replica.seat.is_some()) {
            let parent = match self.join_ranks(replica, half) {
                Err(error) if is_away(&error) || is_forgotten(&error) => None,
                result => result?,
            };
            replica.fetch().parents[half] = parent;
        }
        Ok(())
    }
}

/// Follows the parent of a half until all of the half is present, or the parent is given up; then requests the rest
/// from other peers.
pub(super) fn follow(shared: &StoreState, replica: &Replica, sources: &Sources, half: usize) {
    let Some(seat) = &replica.seat else { return };
    let following = SourceFollower { shared, replica, sources, half, seat };
    if let Some(parent) = following.find() {
        following.keep_up(&parent);
    }
    following.ask_elsewhere();
}

struct SourceFollower<'a> {
    shared: &'a StoreState,
    replica: &'a Replica,
    sources: &'a Sources,
    half: usize,
    seat: &'a Seat,
}

impl SourceFollower<'_> {
    /// Returns true if the parent is still to be followed; gives up parents that were waited for long enough.
    fn goes_on(&self, fetch: &mut Fetch) -> bool {
        let stop = fetch.stop;
        let Some(follow) = &mut fetch.follow else { return false };
        follow.tick(self.seat.now_ns());
        !stop && follow.follows(self.half)
    }

    fn leave(&self) {
        if let Some(follow) = &mut self.replica.fetch().follow {
            follow.leave(self.half);
        }
    }

    /// Waits up to `most`, or until a notification.
    fn pause(&self, fetch: std::sync::MutexGuard<'_, Fetch>, most: Duration) {
        drop(self.replica.followed.wait_timeout(fetch, most).unwrap_or_else(PoisonError::into_inner));
    }

    /// Requests the half's parent until it is known.
    fn find(&self) -> Option<RankParent> {
        let mut pause = *PAUSES.start() * 10;
        loop {
            let mut fetch = self.replica.fetch();
            if !self.goes_on(&mut fetch) {
                return None;
            }
            if let Some(parent) = fetch.parents[self.half].clone() {
                return Some(parent);
            }
            self.pause(fetch, pause);
            pause = (pause * 2).min(*PAUSES.end());
            match self.shared.join_ranks(self.replica, self.half) {
                Ok(parent) => self.replica.fetch().parents[self.half] = parent,
                Err(error) if is_away(&error) || is_forgotten(&error) => std::thread::sleep(AWAY),
                Err(error) => {
                    tracing::warn!("no parent for half {}: {error}", self.half);
                    self.leave();
                }
            }
        }
    }

    /// Reads the parent's board whenever fewer shards are in flight than possible.
    fn keep_up(&self, parent: &RankParent) {
        let Some(board) = parent.board else {
            let all = vec![u64::MAX; self.seat.words];
            let mut fetch = self.replica.fetch();
            if let Some(follow) = &mut fetch.follow {
                follow.learn(self.half, &all);
            }
            self.replica.dispatch(&mut fetch);
            while self.goes_on(&mut fetch) {
                self.pause(fetch, WAIT);
                fetch = self.replica.fetch();
            }
            return;
        };
        // Estimate of the time between two arrivals at the parent.
        let (mut gap, mut last, mut before) = (*PAUSES.start() * LOOKS, Instant::now(), 0);
        loop {
            let mut fetch = self.replica.fetch();
            if !self.goes_on(&mut fetch) {
                return;
            }
            if !fetch.follow.as_ref().is_some_and(|follow| follow.is_hungry(self.half)) {
                self.pause(fetch, WAIT);
                continue;
            }
            drop(fetch);
            if let Err(error) = self.read(parent, board) {
                tracing::debug!("stops following {}: {error}", parent.segment);
                self.sources.doubt(self.shared, &parent.segment);
                return self.leave();
            }
            let words = self.seat.read(self.half);
            let known: u32 = words.iter().map(|word| word.count_ones()).sum();
            let mut fetch = self.replica.fetch();
            if let Some(follow) = &mut fetch.follow {
                follow.learn(self.half, &words);
            }
            self.replica.dispatch(&mut fetch);
            if known > before {
                (gap, last, before) = ((gap + last.elapsed() / (known - before)) / 2, Instant::now(), known);
                continue;
            }
            // After longer than the usual time without news, the board is read less and less often.
            let pause = (gap.max(last.elapsed()) / LOOKS).clamp(*PAUSES.start(), *PAUSES.end());
            self.pause(fetch, pause);
        }
    }

    fn read(&self, parent: &RankParent, board: u64) -> Result<(), Error> {
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: self.seat.region.address() + self.seat.room(self.half) as u64,
            target: self.sources.handle(self.shared, &parent.segment)?,
            target_offset: board,
            length: (self.seat.words * size_of::<u64>()) as u64,
        };
        let batch = self.shared.engine.submit(&[request], &SubmitOptions::default())?;
        let status = loop {
            if let Some(status) = batch.wait_for(WAIT) {
                break status;
            }
            if !self.goes_on(&mut self.replica.fetch()) {
                batch.cancel();
                break batch.wait();
            }
        };
        if status.state == TaskState::Completed {
            return Ok(());
        }
        Err(Error::Argument(batch.problem().map_or_else(|| format!("{:?}", status.state), str::to_owned)))
    }

    /// Requests the shards from the control plane that the schedule does not deliver.
    fn ask_elsewhere(&self) {
        loop {
            let mut fetch = self.replica.fetch();
            if fetch.stop {
                return;
            }
            let Some(follow) = &fetch.follow else { return };
            let mut want = ShardSet::empty(self.replica.spec.layout.shards());
            for shard in follow.elsewhere() {
                want.insert(shard);
            }
            let failed = std::mem::take(&mut fetch.unfollowed);
            drop(fetch);
            if want.is_empty() && failed.is_empty() {
                return;
            }
            let (client, member) = (self.shared.client, self.replica.member());
            tracing::info!(shards = want.count(), "requesting shards that the schedule did not deliver");
            let call = WantShards { client, member, want: want.intervals(), failed: failed.clone() };
            match self.shared.link.call(call) {
                Ok(_) => return,
                // A new announcement includes all missing shards.
                Err(error) if is_forgotten(&error) => return,
                Err(error) => {
                    if !is_away(&error) {
                        tracing::warn!("cannot request shards: {error}");
                    }
                    self.replica.fetch().unfollowed.extend(failed);
                    std::thread::sleep(AWAY);
                }
            }
        }
    }
}
