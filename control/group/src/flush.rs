//! A change of view: which members have been fenced, how far they came, and which operations count as complete.
//!
//! A member *completes* an operation when its caller gets the result. It is *prepared* for the next one when it has all
//! of that operation's result, and the caller does not have it yet. Members complete an operation only when either all
//! are prepared, or each keeps the result until it knows that all have it. Both bound the difference: no member
//! completes operation `n + 1` before all have completed operation `n`.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use crate::counters::ExclusionCounts;
use crate::group::View;
use crate::rank::{GroupRank, RankSet};

/// Progress of a member of a view in the group's sequence of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, Decode)]
pub struct Progress {
    /// Operations that it completed since the group was founded, or that were complete when it became a member.
    pub completed: u64,
    /// True if it has the result of the last of them. A member that joined after it has not.
    pub has_result: bool,
    /// True if it has all of the next operation's result.
    pub is_prepared: bool,
}

/// The operations that count as complete at the end of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, Decode)]
pub struct Resolution {
    /// Their number. The members repeat all later ones in the next view.
    pub completed: u64,
    /// A member that has the result of the last of them, if some member of the next view may lack it.
    pub holder: Option<GroupRank>,
}

/// A change of view in progress.
#[derive(Clone, Debug)]
pub(crate) struct Flush {
    /// Members of the next view that take part in collectives.
    pub(crate) active: RankSet<GroupRank>,
    /// Members of the next view that failed, and take part in none.
    pub(crate) failed: RankSet<GroupRank>,
    /// Time of its beginning, and time by which the members have been fenced.
    pub(crate) since_ns: u64,
    pub(crate) until_ns: u64,
    /// Participants that a proposal means; `None` if failures caused the change.
    pub(crate) proposed: Option<RankSet<GroupRank>>,
    /// Participants of the former view that were excluded so far.
    pub(crate) exclusions: ExclusionCounts,
    /// Progress of the members of the former view that have been fenced.
    fenced: BTreeMap<GroupRank, Progress>,
}

impl Flush {
    /// Begins a change that failures cause, or the founding of the group.
    pub(crate) const fn new(
        active: RankSet<GroupRank>,
        failed: RankSet<GroupRank>,
        since_ns: u64,
        until_ns: u64,
    ) -> Self {
        let exclusions = ExclusionCounts { ended: 0, unreachable: 0, unfenced: 0, behind: 0 };
        Self { active, failed, since_ns, until_ns, proposed: None, exclusions, fenced: BTreeMap::new() }
    }

    /// Notes that a proposal means this change.
    pub(crate) const fn of_proposal(mut self) -> Self {
        self.proposed = Some(self.participants());
        self
    }

    /// Members of the next view that take part in its collectives.
    pub(crate) const fn participants(&self) -> RankSet<GroupRank> {
        self.active.without(self.failed)
    }

    /// Notes that a member of the former view has been fenced. Its progress is final: the first report counts.
    pub(crate) fn fence(&mut self, rank: GroupRank, progress: Progress) {
        self.fenced.entry(rank).or_insert(progress);
    }

    /// Excludes participants of the former view like [`Self::exclude`], and counts those that were not excluded before.
    pub(crate) fn exclude_participants(
        &mut self,
        ranks: RankSet<GroupRank>,
        stays_member: bool,
        count: impl FnOnce(&mut ExclusionCounts) -> &mut u64,
    ) {
        *count(&mut self.exclusions) += ranks.intersection(self.participants()).len() as u64;
        self.exclude(ranks, stays_member);
    }

    /// Excludes members from the next view, or from its collectives if they stay members.
    pub(crate) fn exclude(&mut self, ranks: RankSet<GroupRank>, stays_member: bool) {
        if stays_member {
            self.failed = self.failed.union(ranks.intersection(self.active));
        } else {
            self.active = self.active.without(ranks);
            self.failed = self.failed.without(ranks);
        }
    }

    /// Returns the members that have not been fenced, of those whose processes are alive.
    pub(crate) fn missing(&self, former: &View, live: RankSet<GroupRank>) -> RankSet<GroupRank> {
        let fenced = self.fenced.keys().copied().collect();
        former.participants().intersection(live).without(fenced)
    }

    /// Returns the operations that count as complete, and the members that cannot follow: their progress contradicts
    /// that of the others by more than one operation.
    pub(crate) fn resolve(&self, former: &View) -> (Resolution, RankSet<GroupRank>) {
        resolve(former.resolution.completed, &self.fenced, self.participants())
    }
}

/// See [`Flush::resolve`]. `base` is the number of complete operations at the beginning of the former view. Only
/// members of both views count: what excluded members alone have completed, the others repeat without them, even if it
/// was complete at the beginning of the former view.
fn resolve(
    base: u64,
    fenced: &BTreeMap<GroupRank, Progress>,
    next: RankSet<GroupRank>,
) -> (Resolution, RankSet<GroupRank>) {
    let survivors = || fenced.iter().filter(|(rank, _)| next.contains(**rank));
    let furthest = survivors().map(|(_, progress)| progress.completed).max().unwrap_or(base);
    let is_prepared = |progress: &Progress| progress.completed == furthest && progress.is_prepared;
    if survivors().next().is_some() && survivors().all(|(_, progress)| is_prepared(progress)) {
        return (Resolution { completed: furthest + 1, holder: None }, RankSet::EMPTY);
    }
    let has = |progress: &Progress| {
        progress.completed >= furthest || (progress.completed + 1 == furthest && progress.is_prepared)
    };
    let can_give = |progress: &Progress| has(progress) && (progress.has_result || progress.completed < furthest);
    let holder = survivors().find(|(_, progress)| can_give(progress)).map(|(rank, _)| *rank);
    let behind = |progress: &Progress| progress.completed + 1 < furthest || (!has(progress) && holder.is_none());
    let cannot_follow = survivors().filter(|(_, progress)| behind(progress)).map(|(rank, _)| *rank).collect();
    let is_lacked = survivors().any(|(_, progress)| !has(progress));
    (Resolution { completed: furthest, holder: holder.filter(|_| is_lacked) }, cannot_follow)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(base: u64, reports: &[(u8, u64, bool)], next: &[u8]) -> (u64, Option<u8>, Vec<u8>) {
        let progress = |&(rank, completed, is_prepared): &(u8, u64, bool)| {
            (GroupRank(rank), Progress { completed, has_result: true, is_prepared })
        };
        let fenced = reports.iter().map(progress).collect();
        resolution(base, &fenced, next)
    }

    fn resolution(base: u64, fenced: &BTreeMap<GroupRank, Progress>, next: &[u8]) -> (u64, Option<u8>, Vec<u8>) {
        let next = next.iter().map(|rank| GroupRank(*rank)).collect();
        let (resolution, behind) = resolve(base, fenced, next);
        (resolution.completed, resolution.holder.map(|rank| rank.0), behind.iter().map(|rank| rank.0).collect())
    }

    #[test]
    fn an_operation_that_all_survivors_have_is_complete() {
        assert_eq!(resolved(0, &[(0, 4, true), (1, 4, true)], &[0, 1]), (5, None, vec![]));
    }

    #[test]
    fn an_operation_that_nobody_completed_is_repeated() {
        assert_eq!(resolved(0, &[(0, 4, true), (1, 4, false)], &[0, 1]), (4, None, vec![]));
    }

    #[test]
    fn an_operation_that_one_survivor_completed_is_complete_for_all() {
        assert_eq!(resolved(0, &[(0, 5, false), (1, 4, true)], &[0, 1]), (5, None, vec![]));
        assert_eq!(resolved(0, &[(0, 4, false), (1, 5, false)], &[0, 1]), (5, Some(1), vec![]));
        assert_eq!(resolved(0, &[(0, 4, false), (1, 4, true), (2, 5, true)], &[0, 1, 2]), (5, Some(1), vec![]));
    }

    #[test]
    fn an_operation_that_only_an_excluded_member_completed_is_repeated() {
        assert_eq!(resolved(0, &[(0, 4, false), (1, 5, false)], &[0]), (4, None, vec![]));
    }

    #[test]
    fn a_result_whose_holders_are_gone_before_it_was_fetched_is_made_again() {
        assert_eq!(resolved(5, &[(0, 4, false), (1, 5, false)], &[0]), (4, None, vec![]));
        assert_eq!(resolved(5, &[(0, 4, false), (1, 5, false), (2, 4, true)], &[0, 2]), (4, None, vec![]));
    }

    #[test]
    fn new_members_begin_after_the_operations_of_the_others() {
        assert_eq!(resolved(7, &[(0, 9, false)], &[0, 1]), (9, None, vec![]));
        assert_eq!(resolved(7, &[], &[0, 1]), (7, None, vec![]));
    }

    #[test]
    fn a_member_that_joined_later_gives_no_result() {
        let joiner = Progress { completed: 5, ..Progress::default() };
        let behind = Progress { completed: 4, has_result: true, is_prepared: false };
        let two = BTreeMap::from([(GroupRank(0), joiner), (GroupRank(1), behind)]);
        assert_eq!(resolution(0, &two, &[0, 1]), (5, None, vec![1]), "nobody has what the other lacks");
        let mut three = two;
        three.insert(GroupRank(2), Progress { completed: 4, has_result: true, is_prepared: true });
        assert_eq!(resolution(0, &three, &[0, 1, 2]), (5, Some(2), vec![]));
    }

    #[test]
    fn a_member_that_is_two_operations_behind_cannot_follow() {
        assert_eq!(resolved(0, &[(0, 5, false), (1, 3, true)], &[0, 1]), (5, Some(0), vec![1]));
    }
}
