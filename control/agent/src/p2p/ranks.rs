//! Fetching as one of a job's ranks: from whom the schedule says, without being told shard by shard.
//!
//! Each rank has a board in its memory, with a bit for each shard that it has. Who follows it reads that as it reads
//! shards, about when the next one should be there; nobody is asked. For each half of the shards a thread does so.

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

/// How long it is waited for until a board is read again that had no news, or a parent asked for that was not there.
const PAUSES: std::ops::RangeInclusive<Duration> = Duration::from_micros(200)..=Duration::from_millis(20);
/// As many looks as this between two news.
const LOOKS: u32 = 8;
/// How long the control plane is left alone after it could not be asked.
const AWAY: Duration = Duration::from_millis(200);
/// How often whoever waits for a board looks whether that is worth it.
const WAIT: Duration = Duration::from_millis(50);

/// Which one of several processes this is that all fetch the same object at about the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The job's name; all its ranks give the same. Empty is a name, too.
    pub job: String,
    /// Which rank this is, from 0 on. Those that are near to each other should have numbers that are.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// How long it is waited for another rank that is not there, or does not get on, before its shards are fetched
    /// from others; as long again for each rank between that one and the origin.
    pub patience: Duration,
}

impl Ranks {
    /// This one of so many, of the job without a name.
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

    /// What it is to do that lacks these shards and has so much time.
    pub(super) fn follow(&self, lacks: &ShardSet, deadline: Duration) -> Result<Follow, Error> {
        let schedule = self.schedule()?;
        let depth = (0..HALVES).map(|half| schedule.depth(half, self.rank)).max().unwrap_or(1);
        // There must be time to fetch from others.
        let patience = self.patience.min(deadline / (4 * depth));
        let patience_ns = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        Ok(Follow::new(schedule, self.rank, lacks, patience_ns, 0))
    }
}

/// A rank's board, and room for what its parents' boards say.
pub(super) struct Seat {
    pub(super) ranks: Ranks,
    pub(super) region: Arc<Region>,
    words: usize,
    started: Instant,
}

impl Seat {
    /// One that says what is there already.
    ///
    /// # Errors
    /// When there is no memory.
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

    /// Says that a shard is there.
    pub(super) fn mark(&self, shard: u32) {
        let word = self.region.atomic_u64(shard as usize / 64 * size_of::<u64>());
        word.fetch_or((1u64 << (shard % 64)).to_le(), std::sync::atomic::Ordering::Release);
    }

    /// Where a parent's board is read to.
    const fn room(&self, half: usize) -> usize {
        (1 + half) * self.words * size_of::<u64>()
    }

    fn read(&self, half: usize) -> Vec<u64> {
        let word = |at| u64::from_le(self.region.load_u64(self.room(half) + at * size_of::<u64>()));
        (0..self.words).map(word).collect()
    }
}

impl Replica {
    /// A shard is there: who follows us may see it, and the next one is fetched.
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

    /// Orders what parents are known to have.
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
    /// Says which rank a replica is; where a half comes from is the answer, if that is there.
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

    /// Says which rank a replica is, for the first time.
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

/// Follows the parent of a half until all of it is there, or that parent is left; then asks for the rest elsewhere.
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
    /// Whether the parent is to be followed still; those that were waited for long enough are left.
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

    /// Waits, but not when something happens.
    fn pause(&self, fetch: std::sync::MutexGuard<'_, Fetch>, most: Duration) {
        drop(self.replica.followed.wait_timeout(fetch, most).unwrap_or_else(PoisonError::into_inner));
    }

    /// The half's parent, asked for until it is there.
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

    /// Reads the parent's board whenever there is less to fetch than could be.
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
        // News come about so often.
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
                tracing::debug!("{} is not followed any more: {error}", parent.segment);
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
            // Who has had no news for longer than is usual looks less and less often.
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

    /// Tells the control plane what does not come by the schedule.
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
            tracing::info!(shards = want.count(), "asks for what does not come by the schedule");
            let call = WantShards { client, member, want: want.intervals(), failed: failed.clone() };
            match self.shared.link.call(call) {
                Ok(_) => return,
                // With what is announced anew all that is wanted is, too.
                Err(error) if is_forgotten(&error) => return,
                Err(error) => {
                    if !is_away(&error) {
                        tracing::warn!("shards could not be asked for: {error}");
                    }
                    self.replica.fetch().unfollowed.extend(failed);
                    std::thread::sleep(AWAY);
                }
            }
        }
    }
}
