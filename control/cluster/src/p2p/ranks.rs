//! Jobs whose ranks fetch an object by a [`Schedule`]: the member of each rank, and the location of its parents.
//!
//! Shards that a rank follows its parents for are not in its `need`: the swarm does not grant them, unless the rank
//! requests them (`Swarm::want`).

use std::collections::BTreeMap;
use std::sync::Arc;

use bincode::{Decode, Encode};

use super::member::{FetchFailure, Member};
use super::object::ObjectError;
use super::roster::Roster;
use super::schedule::{HALVES, MAX_RANKS, Parent, Schedule, half_of};

/// Maximum length of a label, in bytes: names of segments, hosts, racks and jobs.
pub const MAX_LABEL_BYTES: usize = 256;

/// Announcement that a member is a rank of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RankJoin {
    /// Name of the job; the same for all its ranks.
    pub job: String,
    /// Rank of the member, from 0 on.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Address of its board: a bitmap in its memory of the shards that it has, a bit per shard, as little-endian 64-bit
    /// words.
    pub board: u64,
}

/// Parent from which a rank fetches a half of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RankParent {
    /// Number of the member.
    pub member: u64,
    /// Segment in which it serves.
    pub segment: Arc<str>,
    /// By buffer: its address in the segment.
    pub addresses: Vec<u64>,
    /// Address of its board, the bitmap of its shards; none if it has all.
    pub board: Option<u64>,
}

/// Ranks of a job that have joined.
#[derive(Debug)]
struct Job {
    schedule: Schedule,
    members: BTreeMap<u32, u64>,
}

/// Jobs by name.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    by_name: BTreeMap<String, Job>,
}

impl Jobs {
    /// Returns the schedule of a job for a member that joins it, after checking the request.
    pub(super) fn schedule_of(&self, join: &RankJoin, half: usize) -> Result<Schedule, ObjectError> {
        let RankJoin { job, rank, ranks, .. } = join;
        let malformed = |text: String| Err(ObjectError::Malformed(text));
        if job.len() > MAX_LABEL_BYTES {
            return malformed(format!("a job's name of {} bytes: at most {MAX_LABEL_BYTES}", job.len()));
        }
        let Some(schedule) = Schedule::new(*ranks) else {
            return malformed(format!("{ranks} ranks: a job has 1 to {MAX_RANKS}"));
        };
        if rank >= ranks || half >= HALVES {
            return malformed(format!("half {half} for rank {rank} of {ranks}: ranks and halves count from 0"));
        }
        if let Some(known) = self.by_name.get(job).filter(|known| known.schedule != schedule) {
            let known = known.schedule.ranks();
            return malformed(format!("job {job:?} has {known} ranks, not {ranks}: use another job name"));
        }
        Ok(schedule)
    }

    /// Enters a member as a rank.
    pub(super) fn enter(&mut self, number: u64, join: &RankJoin, schedule: Schedule) {
        let known = self.by_name.entry(join.job.clone());
        let known = known.or_insert_with(|| Job { schedule, members: BTreeMap::new() });
        known.members.insert(join.rank, number);
    }

    /// Removes a member as a rank.
    pub(super) fn leave(&mut self, number: u64, rank: &RankJoin) {
        let Some(job) = self.by_name.get_mut(&rank.job) else { return };
        // Another process may have taken over this rank.
        if job.members.get(&rank.rank) == Some(&number) {
            job.members.remove(&rank.rank);
        }
        if job.members.is_empty() {
            self.by_name.remove(&rank.job);
        }
    }

    /// Returns the parent from which a member fetches a half.
    pub(super) fn parent(
        &self,
        roster: &Roster,
        number: u64,
        job: &str,
        parent: Parent,
        half: usize,
    ) -> Option<RankParent> {
        let is_whole = |member: &Member| member.have.count() == member.have.shards();
        let known = match parent {
            Parent::Rank(rank) => self.by_name.get(job)?.members.get(&rank).copied(),
            Parent::Origin => {
                let able =
                    |(other, member): &(u64, &Member)| *other != number && member.is_source() && is_whole(member);
                let whole = || roster.iter().filter(able);
                let origins: Vec<u64> = whole().filter(|(_, member)| member.origin).map(|(number, _)| number).collect();
                // Each half comes from another origin, if there are several.
                let origin = half.checked_rem(origins.len()).map(|at| origins[at]);
                origin.or_else(|| whole().next().map(|(number, _)| number))
            }
        }?;
        let member = roster.get(known).filter(|member| member.is_source())?;
        let board = member.rank.as_ref().map(|rank| rank.board);
        Some(RankParent {
            member: known,
            segment: Arc::clone(&member.segment),
            addresses: member.addresses.clone(),
            board: board.filter(|_| !is_whole(member)),
        })
    }

    /// Returns true if a member was to fetch this shard from this source by its schedule. Reports of corrupt bytes are
    /// only believed from members that were to read them.
    pub(super) fn followed(&self, roster: &Roster, number: u64, failure: FetchFailure) -> bool {
        let Some(rank) = roster.get(number).and_then(|member| member.rank.as_ref()) else { return false };
        let Some(job) = self.by_name.get(&rank.job) else { return false };
        match job.schedule.parent(half_of(failure.shard), rank.rank) {
            Parent::Rank(parent) => job.members.get(&parent) == Some(&failure.source),
            // The origin may be any member that has the shard.
            Parent::Origin => {
                let has = |member: &Member| member.have.contains(failure.shard);
                roster.get(failure.source).is_some_and(has)
            }
        }
    }

    /// Returns the number of shards that other ranks have yet to fetch from a member by their schedule.
    pub(super) fn followers(&self, roster: &Roster, number: u64) -> usize {
        let Some(rank) = roster.get(number).and_then(|member| member.rank.as_ref()) else { return 0 };
        let Some(job) = self.by_name.get(&rank.job) else { return 0 };
        let lacks = |half: usize, child: u32| {
            let child = job.members.get(&child).and_then(|number| roster.get(*number));
            let Some(child) = child.filter(|child| !child.leaving) else { return 0 };
            let lacks = |&shard: &u32| {
                let elsewhere = child.need.contains(shard) || child.coming.contains_key(&shard);
                half_of(shard) == half && !child.have.contains(shard) && !elsewhere
            };
            (0..child.have.shards()).filter(lacks).count()
        };
        let of_half = |half: usize| {
            let children = job.schedule.children(half, rank.rank);
            children.into_iter().map(|child| lacks(half, child)).sum::<usize>()
        };
        (0..HALVES).map(of_half).sum()
    }
}
