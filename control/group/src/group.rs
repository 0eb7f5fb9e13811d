//! One process group: its members, its view, and the change of it in progress.

use bincode::{Decode, Encode};

use crate::config::WorldConfig;
use crate::counters::Counters;
use crate::flush::{Flush, Resolution};
use crate::message::{GroupStatus, MemberReport, Phase};
use crate::proposal::{Change, Outcome, Proposal, ProposalId, Proposals};
use crate::rank::{GroupRank, MAX_RANKS, Rank, RankSet, WorldRank};
use crate::record::GroupRecord;
use crate::rejection::{Difference, Rejection};
use crate::roster::{ProcessId, Roster};

/// Maximum length of a group's name, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// Names a group in its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct GroupId(pub u64);

/// Treatment of members that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, Decode)]
pub enum FailureMode {
    /// They are deactivated by the next view, before the operation that they failed in completes.
    #[default]
    Automatic,
    /// They take part no longer, and are deactivated when a member proposes it.
    Deferred,
    /// They take part no longer; the caller deactivates them by name.
    Manual,
}

/// A group as its members describe it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GroupSpec {
    /// Name, the same at all members.
    pub name: String,
    /// Members in the order of their ranks in the group.
    pub order: Vec<WorldRank>,
    /// Most members that the group may ever have.
    pub max_size: u8,
    /// Treatment of members that fail.
    pub failure_mode: FailureMode,
    /// True if the process joins a group that exists. Its order continues that group's, or is the same.
    pub is_joining: bool,
}

/// The members that take part in a group's collectives, from one epoch on.
#[derive(Clone, Debug, PartialEq, Eq, Default, Encode, Decode)]
pub struct View {
    /// Number of the view; 0 until the founding members are complete.
    pub epoch: u64,
    /// Active members.
    pub active: RankSet<GroupRank>,
    /// Active members that failed, and take part in no collective.
    pub failed: RankSet<GroupRank>,
    /// Incarnations of the active members, by rank.
    pub incarnations: Vec<Option<u64>>,
    /// The operations that were complete when the view began.
    pub resolution: Resolution,
}

impl View {
    /// Returns the members that take part in collectives.
    #[must_use]
    pub const fn participants(&self) -> RankSet<GroupRank> {
        self.active.without(self.failed)
    }

    /// Returns the size of the group: the highest active rank, and one.
    #[must_use]
    pub fn size(&self) -> usize {
        self.active.last().map_or(0, |rank| usize::from(rank.0) + 1)
    }
}

/// State of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum MemberState {
    /// No process is attached as this member.
    Absent,
    /// Attached, and not ready.
    Inactive,
    /// Ready to be activated.
    AwaitingActivation,
    /// In the view.
    Active,
}

/// A group, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct GroupSummary {
    pub group: GroupId,
    /// Name, members and rules, joiners included.
    pub spec: GroupSpec,
    /// The newest view.
    pub view: View,
    /// Time since the view began to change, in nanoseconds; none while it does not change.
    pub changing_ns: Option<u64>,
    /// States of the members, by rank.
    pub members: Vec<MemberState>,
    /// Number of proposals that wait.
    pub proposals: u64,
}

/// Work of the world after a step of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Step {
    /// The view changed: it has to be made durable.
    pub(crate) has_new_view: bool,
    /// The members have a new status.
    pub(crate) has_new_status: bool,
}

/// Participants of a view that failed.
#[derive(Clone, Copy, Debug)]
struct Failures {
    /// Their processes are dead, or have left.
    ended: RankSet<GroupRank>,
    /// Their processes are alive, and do not reach the others.
    unreachable: RankSet<GroupRank>,
}

/// One member.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Incarnation of the attached process.
    incarnation: Option<u64>,
    /// Epoch and phase that it reported last.
    reported: Option<(u64, Phase)>,
    /// Epoch of the view that it has to know before it is ready: that of its attachment, or the one that excluded it.
    since: u64,
}

/// A process group.
#[derive(Debug)]
pub(crate) struct Group {
    id: GroupId,
    spec: GroupSpec,
    founders: usize,
    slots: Vec<Slot>,
    view: View,
    flush: Option<Flush>,
    /// Since when members have reported failures of others that are alive.
    failing_since_ns: Option<u64>,
    proposals: Proposals,
    counters: Counters,
    /// Since when no process has been attached.
    empty_since_ns: Option<u64>,
}

impl GroupSpec {
    /// Returns the rank of a process in such a group; fails if it cannot attach to any.
    pub(crate) fn check(&self, process: ProcessId) -> Result<GroupRank, Rejection> {
        self.check_members()?;
        let at = self.order.iter().position(|rank| *rank == process.rank);
        at.map(|at| GroupRank(at as u8)).ok_or(Rejection::NotNamed { rank: process.rank })
    }

    /// Fails if no group can have this name and these members.
    pub(crate) fn check_members(&self) -> Result<(), Rejection> {
        let bytes = self.name.len();
        if bytes == 0 || bytes > MAX_NAME_BYTES {
            return Err(Rejection::GroupName { bytes, limit: MAX_NAME_BYTES });
        }
        let (members, max_size) = (self.order.len(), usize::from(self.max_size));
        if members == 0 || members > max_size || max_size > MAX_RANKS {
            return Err(Rejection::GroupSize { members, max_size, limit: MAX_RANKS });
        }
        let mut seen = RankSet::EMPTY;
        for rank in &self.order {
            if usize::from(rank.0) >= MAX_RANKS {
                return Err(Rejection::RankBeyondLimit { rank: rank.0, limit: MAX_RANKS });
            }
            if seen.contains(*rank) {
                return Err(Rejection::DuplicateRank { rank: *rank });
            }
            seen.insert(*rank);
        }
        Ok(())
    }
}

impl Group {
    /// Founds a group without members.
    pub(crate) fn new(id: GroupId, spec: GroupSpec, now_ns: u64) -> Self {
        let founders = spec.order.len();
        Self {
            id,
            slots: vec![Slot::default(); founders],
            founders,
            spec: GroupSpec { is_joining: false, ..spec },
            view: View { incarnations: vec![None; founders], ..View::default() },
            flush: None,
            failing_since_ns: None,
            proposals: Proposals::default(),
            counters: Counters::default(),
            empty_since_ns: Some(now_ns),
        }
    }

    /// Restores a group from its record. The processes of its active members are attached already.
    pub(crate) fn restore(record: GroupRecord, now_ns: u64) -> Self {
        let mut group = Self::new(record.group, record.spec, now_ns);
        group.founders = usize::from(record.founders);
        group.view = record.view;
        group.view.incarnations.resize(group.slots.len(), None);
        for (slot, incarnation) in group.slots.iter_mut().zip(&group.view.incarnations) {
            slot.incarnation = *incarnation;
            slot.since = group.view.epoch;
        }
        group
    }

    /// Returns the durable record.
    pub(crate) fn record(&self, world: &str, address: impl Fn(WorldRank) -> String) -> GroupRecord {
        let active = self.spec.order.iter().zip(&self.view.incarnations);
        GroupRecord {
            world: world.to_owned(),
            group: self.id,
            spec: self.spec.clone(),
            founders: self.founders as u8,
            view: self.view.clone(),
            addresses: active.map(|(rank, incarnation)| incarnation.map(|_| address(*rank))).collect(),
        }
    }

    pub(crate) const fn id(&self) -> GroupId {
        self.id
    }

    pub(crate) const fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn order(&self) -> &[WorldRank] {
        &self.spec.order
    }

    /// Returns how a process that describes a group by `spec` may attach to this one: `None` if it is another group.
    ///
    /// # Errors
    /// When it is this group, and the description contradicts it.
    pub(crate) fn matches(&self, spec: &GroupSpec) -> Result<bool, Rejection> {
        let (ours, theirs) = (&self.spec.order, &spec.order);
        let is_beginning = |of: &[WorldRank], long: &[WorldRank]| long.starts_with(of);
        let is_same = if spec.is_joining {
            is_beginning(ours, theirs) || is_beginning(theirs, ours)
        } else {
            theirs.as_slice() == &ours[..self.founders] || theirs == ours
        };
        if spec.name != self.spec.name {
            return Ok(false);
        }
        let difference = if !is_same {
            // Founders of one name and another order found another group; a joiner founds none.
            if !spec.is_joining {
                return Ok(false);
            }
            Difference::Order
        } else if spec.max_size != self.spec.max_size {
            Difference::MaxSize { group: self.spec.max_size, process: spec.max_size }
        } else if spec.failure_mode != self.spec.failure_mode {
            Difference::FailureMode { group: self.spec.failure_mode, process: spec.failure_mode }
        } else {
            return Ok(true);
        };
        Err(Rejection::OtherGroup { name: spec.name.clone(), difference })
    }

    /// Attaches a process as the member of a rank. A joiner may add members. Returns true if the group's members or
    /// their processes changed.
    pub(crate) fn attach(&mut self, incarnation: u64, rank: GroupRank, spec: &GroupSpec) -> bool {
        let has_grown = spec.order.len() > self.spec.order.len();
        if has_grown {
            self.spec.order.clone_from(&spec.order);
            self.slots.resize(spec.order.len(), Slot::default());
            self.view.incarnations.resize(spec.order.len(), None);
        }
        let slot = &mut self.slots[usize::from(rank.0)];
        let is_new = slot.incarnation != Some(incarnation);
        if is_new {
            *slot = Slot { incarnation: Some(incarnation), reported: None, since: self.view.epoch };
        }
        self.empty_since_ns = None;
        has_grown || is_new
    }

    /// Returns the rank of an attached process.
    pub(crate) fn rank_of(&self, process: ProcessId) -> Option<GroupRank> {
        let at = self.spec.order.iter().position(|rank| *rank == process.rank)?;
        (self.slots[at].incarnation == Some(process.incarnation)).then_some(GroupRank(at as u8))
    }

    /// Detaches a process that leaves, or is dead. Returns false if it is no member.
    pub(crate) fn detach(&mut self, process: ProcessId, now_ns: u64) -> bool {
        let Some(rank) = self.rank_of(process) else { return false };
        self.slots[usize::from(rank.0)] = Slot::default();
        if self.slots.iter().all(|slot| slot.incarnation.is_none()) {
            self.empty_since_ns = Some(now_ns);
        }
        true
    }

    /// Applies what a member reports of itself. Returns true if its state changed as the others see it.
    pub(crate) fn report(&mut self, rank: GroupRank, report: MemberReport) -> bool {
        let at = usize::from(rank.0);
        let is_older = self.slots[at].reported.is_some_and(|(epoch, _)| epoch > report.epoch);
        if is_older {
            return false;
        }
        let before = self.member_state(at);
        self.slots[at].reported = Some((report.epoch, report.phase));
        self.member_state(at) != before
    }

    /// Appends a proposal.
    pub(crate) fn propose(
        &mut self,
        id: ProposalId,
        change: Change,
        config: &WorldConfig,
        now_ns: u64,
    ) -> Result<(), Rejection> {
        if let Change::Activate(ranks) | Change::Deactivate(ranks) = change {
            let all = RankSet::first(usize::from(self.spec.max_size));
            if ranks.is_empty() || !all.contains_all(ranks) {
                return Err(Rejection::ChangeOfNone);
            }
        }
        let until_ns = now_ns.saturating_add(config.proposal_ns);
        self.proposals.propose(Proposal { id, change, until_ns }, config.proposals)
    }

    /// Returns true once no process has been attached for so long that the group is forgotten.
    pub(crate) fn is_forgotten(&self, config: &WorldConfig, now_ns: u64) -> bool {
        self.empty_since_ns.is_some_and(|since| now_ns >= since.saturating_add(config.forget_ns))
    }

    /// Returns the time at which the group has to be stepped next.
    pub(crate) fn due_ns(&self, config: &WorldConfig) -> Option<u64> {
        if let Some(flush) = &self.flush {
            return Some(flush.until_ns);
        }
        let failing = self.failing_since_ns.map(|since| since.saturating_add(config.reconnect_ns));
        let proposal = self.proposals.first().map(|proposal| proposal.until_ns);
        let forgotten = self.empty_since_ns.map(|since| since.saturating_add(config.forget_ns));
        [failing, proposal, forgotten].into_iter().flatten().min()
    }

    /// Begins, continues or ends a change of the view, as far as the state of processes and members permits.
    pub(crate) fn step(&mut self, processes: &Roster, config: &WorldConfig, now_ns: u64) -> Step {
        let mut step = Step::default();
        loop {
            if self.flush.is_none() {
                let waiting = self.proposals.waiting();
                let next = self.next_flush(processes, config, now_ns);
                // A proposal that ends without a view has its outcome in the status.
                step.has_new_status |= self.proposals.waiting() != waiting;
                match next {
                    Some(flush) => self.flush = Some(flush),
                    None => return step,
                }
                step.has_new_status = true;
            }
            if !self.finish_flush(processes, now_ns) {
                return step;
            }
            (step.has_new_view, step.has_new_status) = (true, true);
        }
    }

    /// Ranks of the view whose processes are alive: the incarnations of the view.
    fn live(&self, processes: &Roster) -> RankSet<GroupRank> {
        self.ranks_where(|at| {
            let incarnation = self.view.incarnations[at];
            incarnation.is_some()
                && incarnation == self.slots[at].incarnation
                && processes.incarnation(self.spec.order[at]) == incarnation
        })
    }

    /// Ranks with an attached process that is ready for the next view and alive.
    fn ready(&self, processes: &Roster) -> RankSet<GroupRank> {
        self.ranks_where(|at| {
            let slot = self.slots[at];
            // A report from before it knew that it was excluded is of another membership.
            let is_ready = matches!(slot.reported, Some((epoch, Phase::Ready)) if epoch >= slot.since);
            is_ready && slot.incarnation == processes.incarnation(self.spec.order[at])
        })
    }

    fn ranks_where(&self, holds: impl Fn(usize) -> bool) -> RankSet<GroupRank> {
        (0..self.slots.len()).filter(|at| holds(*at)).map(|at| GroupRank(at as u8)).collect()
    }

    fn in_world(&self, ranks: RankSet<GroupRank>) -> RankSet<WorldRank> {
        ranks.iter().filter_map(|rank| self.spec.order.get(usize::from(rank.index())).copied()).collect()
    }

    /// Those of `ranks` that reach each other.
    fn connected(&self, ranks: RankSet<GroupRank>, processes: &Roster) -> RankSet<GroupRank> {
        let connected = processes.connected(self.in_world(ranks));
        ranks.iter().filter(|rank| connected.contains(self.spec.order[usize::from(rank.0)])).collect()
    }

    /// Returns what a live participant reported in the present view.
    fn reported(&self, rank: GroupRank) -> Option<Phase> {
        let (epoch, phase) = self.slots[usize::from(rank.0)].reported?;
        (epoch == self.view.epoch).then_some(phase)
    }

    /// Returns the change that is due: the founding, one that failures cause, or that of the oldest proposal.
    fn next_flush(&mut self, processes: &Roster, config: &WorldConfig, now_ns: u64) -> Option<Flush> {
        let until_ns = now_ns.saturating_add(config.fence_ns);
        if self.view.epoch == 0 {
            let founders = RankSet::first(self.founders);
            let is_complete =
                self.ready(processes).contains_all(founders) && self.connected(founders, processes) == founders;
            return is_complete.then(|| Flush::new(founders, RankSet::EMPTY, now_ns, until_ns));
        }
        if let Some(Failures { ended, unreachable }) = self.failures(processes, config, now_ns) {
            let keeps = self.spec.failure_mode != FailureMode::Automatic;
            let mut flush = Flush::new(self.view.active, self.view.failed, now_ns, until_ns);
            flush.exclude_participants(ended, keeps, |counts| &mut counts.ended);
            flush.exclude_participants(unreachable, keeps, |counts| &mut counts.unreachable);
            return Some(flush);
        }
        while let Some(proposal) = self.proposals.first() {
            match self.admit(proposal, processes, now_ns) {
                Ok((active, failed)) => return Some(Flush::new(active, failed, now_ns, until_ns).of_proposal()),
                Err(Some(outcome)) => self.proposals.end_first(outcome),
                Err(None) => return None,
            }
        }
        None
    }

    /// Returns the participants that failed, if the view has to change because of failures: none of them, if all are
    /// alive and reach each other again, so that the failed operation is only repeated.
    fn failures(&mut self, processes: &Roster, config: &WorldConfig, now_ns: u64) -> Option<Failures> {
        let participants = self.view.participants();
        let live = participants.intersection(self.live(processes));
        let ended = participants.without(live);
        let of_ended = (!ended.is_empty()).then_some(Failures { ended, unreachable: RankSet::EMPTY });
        let has_failed = |rank: GroupRank| match self.reported(rank) {
            Some(Phase::Running { failed }) => !failed.is_empty(),
            // Fenced without a flush: the control plane restarted in the middle of one.
            Some(Phase::Fenced(_)) => true,
            _ => false,
        };
        let is_failing = live.iter().any(has_failed);
        if !is_failing {
            self.failing_since_ns = None;
            return of_ended;
        }
        let connected = self.connected(live, processes);
        let since = *self.failing_since_ns.get_or_insert(now_ns);
        if connected != live && now_ns < since.saturating_add(config.reconnect_ns) {
            // Dead members are excluded at once; connections among the others may come back.
            return of_ended;
        }
        self.failing_since_ns = None;
        Some(Failures { ended, unreachable: live.without(connected) })
    }

    /// Returns the members of the view that a proposal means, or its outcome if it ends without a view, or `None` if
    /// it waits.
    #[allow(clippy::type_complexity, reason = "a pair of sets, or an outcome, or neither")]
    fn admit(
        &self,
        proposal: Proposal,
        processes: &Roster,
        now_ns: u64,
    ) -> Result<(RankSet<GroupRank>, RankSet<GroupRank>), Option<Outcome>> {
        let view = &self.view;
        let unchanged = Outcome::Unchanged { epoch: view.epoch };
        match proposal.change {
            Change::Activate(ranks) => {
                let wanted = ranks.without(view.participants());
                if wanted.is_empty() {
                    return Err(Some(unchanged));
                }
                let participants = view.participants().union(wanted);
                let ready = self.ready(processes).union(view.participants());
                let fit = self.connected(participants.intersection(ready), processes);
                if fit == participants {
                    return Ok((view.active.union(wanted), view.failed.without(wanted)));
                }
                let is_late = now_ns >= proposal.until_ns;
                Err(is_late.then(|| Outcome::NotReady { ranks: participants.without(fit) }))
            }
            Change::Deactivate(ranks) if ranks.intersection(view.active).is_empty() => Err(Some(unchanged)),
            Change::Deactivate(ranks) if view.active.without(ranks).is_empty() => Err(Some(Outcome::NoMemberLeft)),
            Change::Deactivate(ranks) => Ok((view.active.without(ranks), view.failed.without(ranks))),
            Change::DeactivateFailed if self.spec.failure_mode == FailureMode::Manual => {
                Err(Some(Outcome::NotAutomatic))
            }
            Change::DeactivateFailed if view.failed.is_empty() => Err(Some(unchanged)),
            Change::DeactivateFailed if view.participants().is_empty() => Err(Some(Outcome::NoMemberLeft)),
            Change::DeactivateFailed => Ok((view.participants(), RankSet::EMPTY)),
        }
    }

    /// Publishes the next view if all its members and those of the present one are fenced or ready. Members that died
    /// meanwhile are excluded; those that are not fenced in time, too.
    fn finish_flush(&mut self, processes: &Roster, now_ns: u64) -> bool {
        let (live, ready) = (self.live(processes), self.ready(processes));
        let fenced: Vec<_> = self
            .view
            .participants()
            .iter()
            .filter_map(|rank| match self.reported(rank) {
                Some(Phase::Fenced(progress)) => Some((rank, progress)),
                _ => None,
            })
            .collect();
        let keeps = self.spec.failure_mode != FailureMode::Automatic;
        let Some(flush) = &mut self.flush else { return false };
        fenced.into_iter().for_each(|(rank, progress)| flush.fence(rank, progress));
        let former = self.view.participants();
        let (stay, join) = (flush.participants().intersection(former), flush.participants().without(former));
        let gone = stay.without(live).union(join.without(ready));
        let late = if now_ns >= flush.until_ns { flush.missing(&self.view, live) } else { RankSet::EMPTY };
        flush.exclude_participants(gone.intersection(former), keeps, |counts| &mut counts.ended);
        flush.exclude_participants(late, keeps, |counts| &mut counts.unfenced);
        flush.exclude(gone.union(late).without(former), false);
        if !flush.missing(&self.view, live).without(late).is_empty() {
            return false;
        }
        loop {
            let (resolution, behind) = flush.resolve(&self.view);
            if behind.is_empty() {
                let (active, failed, proposed) = (flush.active, flush.failed, flush.proposed);
                let took_ns = now_ns.saturating_sub(flush.since_ns);
                self.counters.exclusions += flush.exclusions;
                if self.view.epoch == 0 {
                    self.counters.foundings += 1;
                } else {
                    self.counters.view_changes += 1;
                    self.counters.view_change_ns += took_ns;
                }
                self.publish(active, failed, resolution);
                if let Some(proposed) = proposed {
                    let dropped = proposed.without(self.view.participants());
                    self.proposals.end_first(Outcome::Applied { epoch: self.view.epoch, dropped });
                }
                return true;
            }
            flush.exclude_participants(behind, keeps, |counts| &mut counts.behind);
        }
    }

    fn publish(&mut self, active: RankSet<GroupRank>, failed: RankSet<GroupRank>, resolution: Resolution) {
        let incarnation = |at: usize| {
            let rank = GroupRank(at as u8);
            let stays = failed.contains(rank).then(|| self.view.incarnations[at]);
            stays.unwrap_or_else(|| self.slots[at].incarnation.filter(|_| active.contains(rank)))
        };
        let incarnations = (0..self.slots.len()).map(incarnation).collect();
        let epoch = self.view.epoch + 1;
        for rank in self.view.participants().without(active.without(failed)).iter() {
            self.slots[usize::from(rank.0)].since = epoch;
        }
        self.view = View { epoch, active, failed, incarnations, resolution };
        self.flush = None;
    }

    /// Returns the state of the member at this position, as the other members see it.
    fn member_state(&self, at: usize) -> MemberState {
        match (self.slots[at].incarnation, self.slots[at].reported) {
            _ if self.view.active.contains(GroupRank(at as u8)) => MemberState::Active,
            (None, _) => MemberState::Absent,
            (Some(_), Some((_, Phase::Ready))) => MemberState::AwaitingActivation,
            (Some(_), _) => MemberState::Inactive,
        }
    }

    fn member_states(&self) -> Vec<MemberState> {
        (0..self.slots.len()).map(|at| self.member_state(at)).collect()
    }

    /// Returns what a member knows of the group.
    pub(crate) fn status(&self, rank: GroupRank, process: ProcessId, processes: &Roster) -> GroupStatus {
        GroupStatus {
            group: self.id,
            rank,
            order: self.spec.order.clone(),
            view: self.view.clone(),
            is_changing: self.flush.is_some(),
            members: self.member_states(),
            processes: self.spec.order.iter().map(|rank| processes.state(*rank)).collect(),
            outcomes: self.proposals.outcomes(process).collect(),
        }
    }

    /// Returns the group as operators see it.
    pub(crate) fn summary(&self, now_ns: u64) -> GroupSummary {
        GroupSummary {
            group: self.id,
            spec: self.spec.clone(),
            view: self.view.clone(),
            changing_ns: self.flush.as_ref().map(|flush| now_ns.saturating_sub(flush.since_ns)),
            members: self.member_states(),
            proposals: self.proposals.waiting() as u64,
        }
    }

    /// Returns the counters of this group; those of processes are 0.
    pub(crate) const fn counters(&self) -> Counters {
        self.counters
    }
}
