//! Ranks of jobs that fetch an object by a [`Schedule`]: who is which rank, and where its parents are.
//!
//! What a rank follows its parents for is not among what it `need`s: nobody grants it. It is from the moment on that
//! the rank asks for it (`Swarm::want`).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::member::{Failure, Member};
use super::object::ObjectError;
use super::roster::Roster;
use super::schedule::{HALVES, MAX_RANKS, Parent, Schedule, half_of};

/// The longest label: names of segments, hosts, racks and jobs, in bytes.
pub const MAX_LABEL_BYTES: usize = 256;

/// A member says which rank of a job it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankJoin {
    /// The job's name; all its ranks give the same.
    pub job: String,
    /// Which one it is, from 0 on.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// Where it says in its memory which shards it has: a bit for each.
    pub board: u64,
}

/// Whom a rank fetches a half of the shards from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankParent {
    /// The member's number.
    pub member: u64,
    /// Where it serves.
    pub segment: Arc<str>,
    /// By buffer: its address there.
    pub addresses: Vec<u64>,
    /// Where it says which shards it has; nowhere if it has all.
    pub board: Option<u64>,
}

/// The ranks of a job that are there.
#[derive(Debug)]
struct Job {
    schedule: Schedule,
    members: BTreeMap<u32, u64>,
}

/// Jobs by name: who fetches by a schedule.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    by_name: BTreeMap<String, Job>,
}

impl Jobs {
    /// The schedule of a job that a member joins, and wants to know the parent of a half of.
    pub(super) fn schedule_of(&self, join: &RankJoin, half: usize) -> Result<Schedule, ObjectError> {
        let RankJoin { job, rank, ranks, .. } = join;
        let malformed = |text: String| Err(ObjectError::Malformed(text));
        if job.len() > MAX_LABEL_BYTES {
            return malformed(format!("a job's name of {} bytes: at most {MAX_LABEL_BYTES}", job.len()));
        }
        let Some(schedule) = Schedule::new(*ranks) else {
            return malformed(format!("{ranks} ranks: give 1 to {MAX_RANKS}"));
        };
        if rank >= ranks || half >= HALVES {
            return malformed(format!("half {half} for rank {rank} of {ranks}: ranks and halves count from 0"));
        }
        if let Some(known) = self.by_name.get(job).filter(|known| known.schedule != schedule) {
            let known = known.schedule.ranks();
            return malformed(format!("job {job:?} has {known} ranks, and not {ranks}: give another job's name"));
        }
        Ok(schedule)
    }

    /// A member is a rank from now on.
    pub(super) fn enter(&mut self, number: u64, join: &RankJoin, schedule: Schedule) {
        let known = self.by_name.entry(join.job.clone());
        let known = known.or_insert_with(|| Job { schedule, members: BTreeMap::new() });
        known.members.insert(join.rank, number);
    }

    /// A member is this rank no more.
    pub(super) fn leave(&mut self, number: u64, rank: &RankJoin) {
        let Some(job) = self.by_name.get_mut(&rank.job) else { return };
        // Another process may be this rank by now.
        if job.members.get(&rank.rank) == Some(&number) {
            job.members.remove(&rank.rank);
        }
        if job.members.is_empty() {
            self.by_name.remove(&rank.job);
        }
    }

    /// Whom a member fetches a half from.
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
                // Each half from another one, where there are several.
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

    /// Whether a member was to fetch this from there by its schedule. About a source's bytes only those are believed
    /// who were to read them.
    pub(super) fn followed(&self, roster: &Roster, number: u64, failure: Failure) -> bool {
        let Some(rank) = roster.get(number).and_then(|member| member.rank.as_ref()) else { return false };
        let Some(job) = self.by_name.get(&rank.job) else { return false };
        match job.schedule.parent(half_of(failure.shard), rank.rank) {
            Parent::Rank(parent) => job.members.get(&parent) == Some(&failure.source),
            // Any that had everything then.
            Parent::Origin => {
                let has = |member: &Member| member.have.contains(failure.shard);
                roster.get(failure.source).is_some_and(has)
            }
        }
    }

    /// Shards that other ranks are to fetch from a member by their schedule, and have not yet.
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
