//! One membership of a process group.

mod control_frames;
mod departure;
mod kept;
mod membership;
mod stash;

use std::collections::VecDeque;

use kvplane_group::{GroupId, GroupRank, GroupStatus, MemberReport, Progress, RankSet, Resolution, View};

use crate::execution::{Execution, Reception};
use crate::failure::Failure;
use crate::frame::{AbortCause, FrameKind, Head};
use crate::messages::{MAX_WAITING, Messages};
use crate::operation::{Operation, OperationError, Signature};
use crate::schedule::{Schedule, Thresholds};
use crate::span::Placement;
use crate::work::{Completion, Disposition, Outgoing, Output, WorkId};
use control_frames::ControlFrames;
use departure::Departure;
use kept::{KeptResult, OperationEnd, ResultFrame};
use membership::Membership;
use stash::{Stash, StashedFrame};

/// Times and sizes of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    /// Time after an operation's deadline in which the group's view may still exclude the peers that it waits for.
    pub verdict_ns: u64,
    /// Sizes at which schedules change.
    pub thresholds: Thresholds,
}

impl Default for MemberConfig {
    fn default() -> Self {
        Self { verdict_ns: 1_000_000_000, thresholds: Thresholds::default() }
    }
}

/// Counters of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MemberCounts {
    /// Operations that ended with a result.
    pub completed: u64,
    /// Operations that ended without one.
    pub ended: u64,
    /// Operations that were begun again in another view.
    pub repeated: u64,
    /// Results that were fetched from another member.
    pub fetched: u64,
    /// Frames of former views that were refused.
    pub stale: u64,
    /// Frames that belonged to nothing.
    pub unexpected: u64,
    /// Frames that were kept until they could be used.
    pub kept: u64,
}

/// An operation that the caller has submitted.
#[derive(Clone, Debug)]
struct Submission {
    work: WorkId,
    operation: Operation,
    timeout_ns: u64,
    /// Set once it is the first one.
    deadline_ns: Option<u64>,
    /// The deadline has passed, and the peers that it waits for were reported.
    is_late: bool,
    /// Active members of the views in which it was begun.
    begun_with: RankSet<GroupRank>,
}

/// The first operation, as far as it has come in the view.
#[derive(Clone, Debug)]
enum Stage {
    /// Not begun.
    Waiting,
    /// In flight.
    Running(Execution),
    /// Complete elsewhere: its result is fetched. The execution is that of the former view, whose epoch and
    /// participants made the result. Nothing is received before the first frame, which may be empty.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    Fetching {
        execution: Execution,
        holder: GroupRank,
        received: Option<u64>,
        epoch: u64,
        participants: RankSet<GroupRank>,
    },
}

/// End of an operation that a peer has told.
#[derive(Clone, Copy, Debug)]
struct PeerAbort {
    from: GroupRank,
    cause: AbortCause,
    signature: Option<Signature>,
}

impl PeerAbort {
    /// Returns the failure for the caller of `operation` at the member of `rank`.
    fn failure(self, rank: GroupRank, operation: &Operation) -> Failure {
        let Self { from, cause, signature: theirs } = self;
        match cause {
            AbortCause::Mismatch { peer } if peer == rank => {
                Failure::Mismatch { rank: from, calls: theirs, other: rank, ours: Some(operation.signature(from)) }
            }
            AbortCause::Mismatch { peer } => Failure::Mismatch { rank: peer, calls: None, other: from, ours: theirs },
            AbortCause::Deadline { peer } => Failure::OthersDeadline { rank: from, awaited: peer },
            AbortCause::NoMemory => Failure::NoMemory { rank: from, bytes: None },
        }
    }
}

/// A member. See the crate's documentation.
#[derive(Clone, Debug)]
pub struct Member {
    config: MemberConfig,
    membership: Membership,
    completed: u64,
    kept: KeptResult,
    queue: VecDeque<Submission>,
    stage: Stage,
    /// The next operations, which this member gave up while it was fenced: the others learn it in the next view.
    abandoned: VecDeque<AbortCause>,
    /// Operations that have ended without a result before this member's caller submitted them: how, if it is known.
    owed: VecDeque<Option<PeerAbort>>,
    /// Frames without a step: aborts, requests and replies.
    control: ControlFrames,
    stash: Stash,
    messages: Messages,
    outputs: VecDeque<Output>,
    departure: Departure,
    next_work: WorkId,
    counts: MemberCounts,
}

impl Member {
    /// Begins a membership of the process of an incarnation. A founding member is ready at once; a joiner is ready
    /// after [`Self::set_ready`].
    #[must_use]
    pub fn new(group: GroupId, rank: GroupRank, incarnation: u64, is_ready: bool, config: MemberConfig) -> Self {
        Self {
            config,
            membership: Membership::new(group, rank, incarnation, is_ready),
            completed: 0,
            kept: KeptResult::default(),
            queue: VecDeque::new(),
            stage: Stage::Waiting,
            abandoned: VecDeque::new(),
            owed: VecDeque::new(),
            control: ControlFrames::default(),
            stash: Stash::default(),
            messages: Messages::new(config.thresholds.one_shot_bytes),
            outputs: VecDeque::new(),
            departure: Departure::default(),
            next_work: WorkId(0),
            counts: MemberCounts::default(),
        }
    }

    /// Returns the rank in the group.
    #[must_use]
    pub const fn rank(&self) -> GroupRank {
        self.membership.rank
    }

    /// Returns the view that the member follows.
    #[must_use]
    pub const fn view(&self) -> &View {
        &self.membership.view
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counts(&self) -> MemberCounts {
        self.counts
    }

    /// Returns the number in the group's sequence of the operation that is submitted next.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.completed + 1 + (self.abandoned.len() + self.queue.len()) as u64 - self.owed.len() as u64
    }

    /// Returns true if the member takes part in the view's collectives.
    #[must_use]
    pub fn participates(&self) -> bool {
        self.membership.participates()
    }

    /// Returns what the control plane has to know.
    #[must_use]
    pub fn report(&self) -> MemberReport {
        let is_prepared = matches!(&self.stage, Stage::Running(execution) if execution.is_prepared());
        let progress = Progress { completed: self.completed, has_result: self.kept.is_some(), is_prepared };
        self.membership.report(progress)
    }

    /// Returns the peers that an operation waited for until its deadline.
    #[must_use]
    pub const fn overdue(&self) -> RankSet<GroupRank> {
        self.membership.overdue
    }

    /// Says that a joiner, or a member that was deactivated, takes part when it is activated.
    pub fn set_ready(&mut self) {
        (self.membership.is_ready, self.membership.excluded) = (true, None);
    }

    /// Returns the number of operations and messages that have not ended.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len() + self.messages.waiting()
    }

    /// Submits an operation, whose memory the host has under the returned name from now on. Until the member is active
    /// for the first time, it runs with this member alone.
    ///
    /// # Errors
    /// When it is malformed, the member was deactivated, or too many wait.
    pub fn submit(&mut self, operation: Operation, timeout_ns: u64) -> Result<WorkId, Failure> {
        operation.check()?;
        if self.membership.rank.0 >= operation.places {
            return Err(OperationError::NoRoot { root: self.membership.rank.0, size: operation.places }.into());
        }
        if let Some(epoch) = self.membership.excluded {
            return Err(Failure::Excluded { epoch });
        }
        if self.queue.len() + self.abandoned.len() >= MAX_WAITING {
            return Err(Failure::TooMany { limit: MAX_WAITING });
        }
        let work = self.next_work.take();
        self.queue.push_back(Submission {
            work,
            operation,
            timeout_ns,
            deadline_ns: None,
            is_late: false,
            begun_with: RankSet::EMPTY,
        });
        Ok(work)
    }

    /// Sends a message of `bytes` bytes.
    ///
    /// # Errors
    /// When there is no such peer, or too many wait.
    pub fn send(&mut self, to: GroupRank, tag: i32, bytes: u64, deadline_ns: u64) -> Result<WorkId, Failure> {
        self.membership.check_peer(to)?;
        if self.messages.waiting() >= MAX_WAITING {
            return Err(Failure::TooMany { limit: MAX_WAITING });
        }
        let work = self.next_work.take();
        self.messages.send(work, to, tag, bytes, deadline_ns, &mut self.outputs);
        Ok(work)
    }

    /// Provides memory of `bytes` bytes for a message from a peer, or from any.
    ///
    /// # Errors
    /// When there is no such peer, or too many wait.
    pub fn receive(
        &mut self,
        from: Option<GroupRank>,
        tag: i32,
        bytes: u64,
        deadline_ns: u64,
    ) -> Result<WorkId, Failure> {
        if let Some(from) = from {
            self.membership.check_peer(from)?;
        }
        if self.messages.waiting() >= MAX_WAITING {
            return Err(Failure::TooMany { limit: MAX_WAITING });
        }
        let work = self.next_work.take();
        self.messages.receive(work, from, tag, bytes, deadline_ns, &mut self.outputs);
        Ok(work)
    }

    /// Follows the group: fences the member while its view changes, and applies the next view. Older ones are ignored.
    pub fn follow(&mut self, status: &GroupStatus, now_ns: u64) {
        if status.view.epoch < self.membership.view.epoch {
            return;
        }
        if status.view.epoch > self.membership.view.epoch {
            self.apply(&status.view, now_ns);
        }
        if status.is_changing && self.participates() {
            self.membership.is_fenced = true;
            self.kept.stop_serving();
            self.control.clear();
        }
        self.membership.status = Some(status.clone());
    }

    fn apply(&mut self, view: &View, now_ns: u64) {
        let had = self.participates();
        let former = self.membership.enter(view);
        self.control.clear();
        self.kept.stop_serving();
        let complete = view.resolution.completed;
        if !self.participates() {
            if had {
                (self.membership.is_ready, self.membership.excluded) = (false, Some(view.epoch));
                self.end_all(|| Failure::Excluded { epoch: view.epoch });
            }
        } else if !had {
            self.kept.forget(&mut self.outputs);
            self.completed = complete;
            self.abandoned.clear();
            self.owed.clear();
        } else if self.completed < complete {
            self.adopt(&former, view);
        } else if !matches!(self.stage, Stage::Waiting) {
            self.stage = Stage::Waiting;
            self.counts.repeated += 1;
        }
        // Waiting begins anew where a rank less may make the difference: no more often than there are ranks.
        let has_lost = !former.participants().without(view.participants()).is_empty();
        if let Some(first) = self.queue.front_mut()
            && has_lost
        {
            (first.deadline_ns, first.is_late) = (Some(now_ns.saturating_add(first.timeout_ns)), false);
        }
        self.messages.exclude(former.active.without(view.active), &mut self.outputs);
        let is_another = |rank: &GroupRank| {
            let at = usize::from(rank.0);
            let (before, now) = (former.incarnations.get(at), view.incarnations.get(at));
            before.is_some_and(|before| before.is_some() && now.is_some_and(|now| now.is_some() && now != before))
        };
        self.messages.forget(view.active.iter().filter(is_another).collect(), &mut self.outputs);
        if self.departure.has_begun() {
            self.leave();
        }
        self.replay_stash();
    }

    /// The first operation is complete by the next view's resolution.
    fn adopt(&mut self, former: &View, view: &View) {
        let participants = former.participants();
        let (execution, epoch, participants) = match std::mem::replace(&mut self.stage, Stage::Waiting) {
            Stage::Running(execution) if execution.is_prepared() => {
                self.complete_first(&execution, former.epoch, participants, true);
                return;
            }
            Stage::Running(execution) => (execution, former.epoch, participants),
            Stage::Fetching { execution, epoch, participants, .. } => (execution, epoch, participants),
            Stage::Waiting => {
                // Either this member gave it up, and its caller has the error; or the others ended it without a result
                // before this one has begun it.
                if self.abandoned.pop_front().is_none() {
                    self.owed.push_back(None);
                }
                self.kept.forget(&mut self.outputs);
                self.completed = view.resolution.completed;
                return;
            }
        };
        let Resolution { completed, holder } = view.resolution;
        // Without a result that is kept, nobody has completed it without this member: it ended without one.
        if let Some(holder) = holder.filter(|_| execution.keeps_result()) {
            self.control.push(holder, completed, FrameKind::Fetch, None);
            self.stage = Stage::Fetching { execution, holder, received: None, epoch, participants };
        } else {
            self.end_first(Failure::EndedElsewhere);
            self.kept.forget(&mut self.outputs);
            self.completed = completed;
        }
    }

    /// Completes the first operation. `finishes` is false if the result was fetched.
    fn complete_first(&mut self, execution: &Execution, epoch: u64, participants: RankSet<GroupRank>, finishes: bool) {
        let Some(first) = self.queue.front() else { return };
        if let Some(root) = first.operation.root().filter(|root| !participants.contains(*root)) {
            // All have found that.
            self.abort_next(Some(Failure::RootGone { root }), AbortCause::Deadline { peer: root }, None);
            return;
        }
        let (work, begun_with) = (first.work, first.begun_with);
        self.queue.pop_front();
        let finish = if finishes { execution.finish() } else { &[] };
        let steps: Vec<_> = finish.iter().chain(execution.deliver()).copied().collect();
        if !steps.is_empty() {
            self.outputs.push_back(Output::Run { work, steps });
        }
        match execution.result() {
            Some(span) => self.kept.replace(OperationEnd::Result { work, span }, &mut self.outputs),
            None => {
                self.kept.forget(&mut self.outputs);
                self.outputs.push_back(Output::Release(work));
            }
        }
        let completion = Completion { epoch, participants, failed: begun_with.without(participants), peer: None };
        self.outputs.push_back(Output::Complete { work, outcome: Ok(completion) });
        self.completed += 1;
        self.counts.completed += 1;
        self.membership.overdue = RankSet::EMPTY;
        self.stage = Stage::Waiting;
        if self.departure.has_begun() {
            // The others may need the result of this one, too.
            self.leave();
        }
    }

    /// Ends the next operation without a result, at all members. `failure` is its caller's, if it has submitted it.
    fn abort_next(&mut self, failure: Option<Failure>, cause: AbortCause, signature: Option<Signature>) {
        if let Some(failure) = failure {
            self.end_first(failure);
        }
        self.kept.replace(OperationEnd::Aborted { cause, signature }, &mut self.outputs);
        self.completed += 1;
        self.membership.overdue = RankSet::EMPTY;
    }

    fn end_first(&mut self, failure: Failure) {
        self.stage = Stage::Waiting;
        if let Some(first) = self.queue.pop_front() {
            self.outputs.push_back(Output::Release(first.work));
            self.outputs.push_back(Output::Complete { work: first.work, outcome: Err(failure) });
            self.counts.ended += 1;
        }
    }

    fn end_all(&mut self, failure: impl Fn() -> Failure) {
        while !self.queue.is_empty() {
            self.end_first(failure());
        }
        self.kept.forget(&mut self.outputs);
        let dropped = self.stash.take();
        self.outputs.extend(dropped.into_iter().filter_map(|frame| frame.payload).map(Output::Drop));
    }

    /// Begins to leave in order: the member stays until [`Self::may_leave`], and submits nothing meanwhile.
    pub fn leave(&mut self) {
        self.departure.begin();
        if self.participates() && !self.membership.is_fenced {
            self.membership.tell(&mut self.control, self.completed, FrameKind::Leave, None);
        }
    }

    /// Returns true if no other member needs this one any more, after [`Self::leave`].
    #[must_use]
    pub fn may_leave(&self) -> bool {
        let others = self.membership.others().without(self.membership.failed);
        let is_released = !self.membership.is_fenced && self.departure.is_released(others);
        self.messages.has_answered() && (is_released || !self.participates())
    }

    /// Ends all operations and messages: the member leaves the group.
    pub fn close(&mut self) {
        self.end_all(|| Failure::Closed);
        self.messages.close(&mut self.outputs);
    }

    /// The connections to these peers were lost, with frames that had not arrived.
    pub fn lose(&mut self, peers: RankSet<GroupRank>) {
        self.messages.lose(peers, &mut self.outputs);
        self.membership.lose(peers);
    }

    /// The connections to these peers exist, after they may have been lost. A host that does not call this costs its
    /// group a view: a peer whose connection was lost before a view began counts as failed in it.
    pub const fn link(&mut self, peers: RankSet<GroupRank>) {
        self.membership.link(peers);
        self.messages.link(peers);
    }

    /// Processes the head of a frame with `bytes` bytes of payload. The host follows the disposition before it calls
    /// the member again.
    pub fn handle(&mut self, from: GroupRank, head: &Head, bytes: u64) -> Disposition {
        if is_message(head.kind) {
            let (stash, messages) = (&mut self.stash, &mut self.messages);
            let keep = || Some(stash.name());
            return messages.handle(from, head.kind, bytes, keep, &mut self.outputs);
        }
        if head.epoch < self.membership.view.epoch {
            self.counts.stale += 1;
            return Disposition::Ignore;
        }
        if head.epoch == self.membership.view.epoch && (self.membership.is_fenced || !self.membership.hears(from)) {
            self.counts.stale += 1;
            return Disposition::Ignore;
        }
        let is_later = head.epoch > self.membership.view.epoch
            || self.stash.has_before(from, head)
            || !can_use(self.completed, &self.stage, head);
        let used = if is_later { Use::TooEarly } else { self.use_frame(from, head, bytes) };
        if let Use::Done(disposition) = used {
            return disposition;
        }
        self.counts.kept += 1;
        match self.stash.keep(from, *head, bytes) {
            Some(Some(payload)) => Disposition::Stash(payload),
            Some(None) => Disposition::Ignore,
            None => {
                // The frame is lost: so is what it belonged to.
                self.counts.unexpected += 1;
                self.membership.failed.insert(from);
                Disposition::Ignore
            }
        }
    }

    fn use_frame(&mut self, from: GroupRank, head: &Head, bytes: u64) -> Use {
        let ignored = Use::Done(Disposition::Ignore);
        let next = self.completed + 1;
        match head.kind {
            FrameKind::Fetch if head.operation <= self.completed => {
                if let Some((cause, signature)) = self.kept.serve(from, head.operation, self.completed) {
                    self.control.push(from, head.operation, FrameKind::Abort { cause }, signature);
                }
                return ignored;
            }
            FrameKind::Leave if head.operation <= self.completed => {
                self.control.push(from, head.operation, FrameKind::MayLeave, None);
                return ignored;
            }
            FrameKind::MayLeave => {
                self.departure.note_release(from);
                return ignored;
            }
            FrameKind::Abort { cause } if head.operation == next => {
                // What is complete ends only if its holder does not have it.
                if !matches!(self.stage, Stage::Fetching { holder, .. } if holder != from) {
                    self.take_abort(PeerAbort { from, cause, signature: head.signature });
                }
                return ignored;
            }
            _ if head.operation != next => return ignored,
            _ => {}
        }
        let Some(first) = self.queue.front() else { return ignored };
        let (work, operation) = (first.work, &first.operation);
        match &mut self.stage {
            Stage::Waiting => ignored,
            Stage::Fetching { execution, holder, received, .. } => {
                let FrameKind::Result { offset, total } = head.kind else { return ignored };
                let Some(span) = execution.result() else { return ignored };
                let has = received.unwrap_or(0);
                if from != *holder || offset != has || total != span.bytes || bytes > total - has {
                    self.counts.unexpected += 1;
                    return ignored;
                }
                *received = Some(has + bytes);
                let placement = Placement::Store(span.part(offset, bytes));
                Use::Done(if bytes > 0 { Disposition::Place(work, placement) } else { Disposition::Ignore })
            }
            Stage::Running(execution) => {
                let ours = operation.signature(from);
                if head.signature.is_none_or(|theirs| !ours.fits(&theirs)) {
                    let (theirs, number) = (head.signature, next);
                    let failure =
                        Failure::Mismatch { rank: from, calls: theirs, other: self.membership.rank, ours: Some(ours) };
                    let cause = AbortCause::Mismatch { peer: from };
                    self.membership.tell(&mut self.control, number, FrameKind::Abort { cause }, Some(ours));
                    self.abort_next(Some(failure), cause, Some(ours));
                    return ignored;
                }
                match head.kind {
                    FrameKind::Start => execution.note_start(from),
                    FrameKind::Confirm => execution.note_confirm(from),
                    FrameKind::Data { step, offset } => match execution.receive(from, step, offset, bytes, operation) {
                        Reception::Place(placement) if bytes > 0 => {
                            return Use::Done(Disposition::Place(work, placement));
                        }
                        Reception::Place(_) | Reception::Skip => {}
                        Reception::TooEarly => return Use::TooEarly,
                        Reception::Unexpected => self.counts.unexpected += 1,
                    },
                    _ => self.counts.unexpected += 1,
                }
                ignored
            }
        }
    }

    /// A peer has ended the next operation.
    fn take_abort(&mut self, abort: PeerAbort) {
        let PeerAbort { from, cause, signature } = abort;
        let is_submitted = self.abandoned.is_empty() && self.owed.is_empty();
        if let Some(first) = self.queue.front().filter(|_| is_submitted) {
            let failure = abort.failure(self.membership.rank, &first.operation);
            self.abort_next(Some(failure), cause, signature);
            return;
        }
        if self.abandoned.pop_front().is_none() {
            if self.owed.len() >= MAX_WAITING {
                self.membership.failed.insert(from);
                return;
            }
            self.owed.push_back(Some(abort));
        }
        self.abort_next(None, cause, signature);
    }

    /// Offers the frames that were kept again, as long as one of them is of use.
    fn replay_stash(&mut self) {
        while !self.stash.is_empty() {
            let frames = self.stash.take();
            let mut rest: Vec<StashedFrame> = Vec::new();
            let mut has_used = false;
            for frame in frames {
                let StashedFrame { from, head, bytes, payload } = frame;
                let is_current = head.epoch == self.membership.view.epoch && !self.membership.is_fenced;
                if head.epoch > self.membership.view.epoch
                    || (is_current
                        && (rest.iter().any(|kept| kept.is_before(from, &head))
                            || !can_use(self.completed, &self.stage, &head)))
                {
                    rest.push(frame);
                    continue;
                }
                let used = if is_current && self.membership.hears(from) {
                    self.use_frame(from, &head, bytes)
                } else {
                    Use::STALE
                };
                match used {
                    Use::TooEarly => rest.push(frame),
                    Use::Done(disposition) => {
                        has_used = true;
                        self.outputs.extend(payload.map(|stash| match disposition {
                            Disposition::Place(work, placement) => Output::Place { stash, work, placement },
                            Disposition::Ignore | Disposition::Stash(_) => Output::Drop(stash),
                        }));
                    }
                }
            }
            self.stash.put_back(rest);
            if !has_used {
                return;
            }
        }
    }

    /// Begins, completes and ends operations as far as possible. The host calls this after frames and other inputs.
    pub fn advance(&mut self, now_ns: u64) {
        // What was too early may be due.
        self.replay_stash();
        loop {
            if let Some(first) = self.queue.front_mut()
                && first.deadline_ns.is_none()
            {
                first.deadline_ns = Some(now_ns.saturating_add(first.timeout_ns));
            }
            if !self.step() {
                return;
            }
        }
    }

    /// Makes one step, and returns true if there may be another one.
    fn step(&mut self) -> bool {
        if self.queue.is_empty() && self.abandoned.is_empty() {
            return false;
        }
        if !self.participates() {
            return self.run_alone();
        }
        if self.membership.is_fenced {
            return false;
        }
        if let Some(cause) = self.abandoned.pop_front() {
            self.membership.tell(&mut self.control, self.completed + 1, FrameKind::Abort { cause }, None);
            self.abort_next(None, cause, None);
            return true;
        }
        if matches!(self.stage, Stage::Waiting)
            && let (Some(first), Some(ended)) = (self.queue.front(), self.owed.pop_front())
        {
            let told = ended.map(|abort| abort.failure(self.membership.rank, &first.operation));
            self.end_first(told.unwrap_or(Failure::EndedElsewhere));
            return true;
        }
        match std::mem::replace(&mut self.stage, Stage::Waiting) {
            Stage::Waiting => {
                let active = self.membership.view.active;
                if let Some(first) = self.queue.front_mut() {
                    // Active members that failed before contribute nothing either.
                    first.begun_with = first.begun_with.union(active);
                }
                self.begin_first(self.membership.view.participants())
            }
            Stage::Running(execution) => {
                if execution.is_complete() {
                    let (epoch, participants) = (self.membership.view.epoch, self.membership.view.participants());
                    self.complete_first(&execution, epoch, participants, true);
                    self.replay_stash();
                    return true;
                }
                self.stage = Stage::Running(execution);
                false
            }
            Stage::Fetching { execution, holder, received, epoch, participants } => {
                let total = execution.result().map_or(0, |span| span.bytes);
                if received == Some(total) {
                    self.counts.fetched += 1;
                    self.complete_first(&execution, epoch, participants, false);
                    self.replay_stash();
                    return true;
                }
                self.stage = Stage::Fetching { execution, holder, received, epoch, participants };
                false
            }
        }
    }

    fn begin_first(&mut self, participants: RankSet<GroupRank>) -> bool {
        let Some(first) = self.queue.front() else { return false };
        let thresholds = self.config.thresholds;
        // Without its root, the members only find together that it cannot be done: none is ahead of another.
        let schedule =
            Schedule::new(&first.operation, self.membership.rank, participants, thresholds).unwrap_or_default();
        let execution = Execution::new(
            schedule,
            participants.without(RankSet::single(self.membership.rank)),
            thresholds.one_shot_bytes,
        );
        let (work, steps) = (first.work, execution.prepare().to_vec());
        self.outputs.push_back(Output::Begin { work, work_bytes: execution.work_bytes(), steps });
        self.stage = Stage::Running(execution);
        self.replay_stash();
        true
    }

    /// A joiner that is not ready yet runs the operation with itself alone.
    fn run_alone(&mut self) -> bool {
        if self.membership.is_ready || self.queue.is_empty() {
            return false;
        }
        let (alone, epoch, completed) =
            (RankSet::single(self.membership.rank), self.membership.view.epoch, self.completed);
        self.begin_first(alone);
        if let Stage::Running(execution) = std::mem::replace(&mut self.stage, Stage::Waiting) {
            self.complete_first(&execution, epoch, alone, true);
        }
        // It is no operation of the group's sequence.
        self.kept.forget(&mut self.outputs);
        self.completed = completed;
        true
    }

    /// Returns the next frame for a peer in `room`, with a payload of at most `limit` bytes, a multiple of 64.
    pub fn next_frame(&mut self, room: RankSet<GroupRank>, limit: u64) -> Option<Outgoing> {
        if let Some(outgoing) = self.messages.next_frame(self.membership.group, room, limit) {
            return Some(outgoing);
        }
        if self.membership.is_fenced || !self.participates() {
            return None;
        }
        let room = room.without(self.membership.failed);
        let head = |operation, kind, signature| Head {
            group: self.membership.group,
            epoch: self.membership.view.epoch,
            operation,
            kind,
            signature,
        };
        if let Some((to, operation, kind, signature)) = self.control.next(room) {
            return Some(Outgoing { to, head: head(operation, kind, signature), payload: None });
        }
        if let Some(ResultFrame { to, operation, kind, payload }) = self.kept.next_frame(room, limit) {
            let payload = payload.filter(|(_, span)| span.bytes > 0);
            return Some(Outgoing { to, head: head(operation, kind, None), payload });
        }
        let number = self.completed + 1;
        let (Stage::Running(execution), Some(first)) = (&mut self.stage, self.queue.front()) else { return None };
        let frame = execution.next_frame(room, limit)?;
        let head = Head {
            group: self.membership.group,
            epoch: self.membership.view.epoch,
            operation: number,
            kind: frame.kind,
            signature: Some(first.operation.signature(frame.to)),
        };
        let payload = frame.payload.filter(|span| span.bytes > 0).map(|span| (first.work, span));
        Some(Outgoing { to: frame.to, head, payload })
    }

    /// True if a frame that could not be sent before may still be sent.
    #[must_use]
    pub fn may_send(&self, head: &Head) -> bool {
        is_message(head.kind)
            || (head.epoch == self.membership.view.epoch && !self.membership.is_fenced && self.participates())
    }

    /// Returns the next work of the host.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which [`Self::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let first = self.queue.front().and_then(|first| {
            let deadline_ns = first.deadline_ns?;
            Some(if first.is_late { deadline_ns.saturating_add(self.config.verdict_ns) } else { deadline_ns })
        });
        first.into_iter().chain(self.messages.due_ns()).min()
    }

    /// Reports the peers that an operation waited for until its deadline, and ends it after the time for a verdict.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        self.messages.expire(now_ns, &mut self.outputs);
        let Some(first) = self.queue.front_mut() else { return };
        let Some(deadline_ns) = first.deadline_ns.filter(|deadline_ns| now_ns >= *deadline_ns) else { return };
        first.is_late = true;
        let awaited = match &self.stage {
            Stage::Waiting => RankSet::EMPTY,
            Stage::Running(execution) => execution.awaited(),
            Stage::Fetching { holder, .. } => RankSet::single(*holder),
        };
        self.membership.overdue = awaited;
        if now_ns < deadline_ns.saturating_add(self.config.verdict_ns) {
            return;
        }
        if !self.participates() {
            self.end_first(Failure::NotActive);
            return;
        }
        let cause = AbortCause::Deadline { peer: awaited.iter().next().unwrap_or(self.membership.rank) };
        self.end_for_all(Failure::Deadline { awaited }, cause);
    }

    /// Ends an operation that is in flight, for which the host has no memory of so many bytes.
    pub fn lack_memory(&mut self, work: WorkId, bytes: u64) {
        if self.queue.front().is_none_or(|first| first.work != work) {
            return;
        }
        let failure = Failure::NoMemory { rank: self.membership.rank, bytes: Some(bytes) };
        self.end_for_all(failure, AbortCause::NoMemory);
    }

    /// Ends the first operation without a result, and tells the other members.
    fn end_for_all(&mut self, failure: Failure, cause: AbortCause) {
        if self.membership.is_fenced {
            // Its progress is final: the next view says whether the others completed it.
            self.abandoned.push_back(cause);
            self.end_first(failure);
            return;
        }
        self.membership.tell(&mut self.control, self.completed + 1, FrameKind::Abort { cause }, None);
        self.abort_next(Some(failure), cause, None);
    }
}

/// Use of a frame.
enum Use {
    Done(Disposition),
    /// An earlier one has to be combined first.
    TooEarly,
}

impl Use {
    const STALE: Self = Self::Done(Disposition::Ignore);
}

/// True if a frame of the present view is about the operation in flight or an earlier one.
fn can_use(completed: u64, stage: &Stage, head: &Head) -> bool {
    let is_begun = !matches!(stage, Stage::Waiting);
    // A member that leaves awaits the end of the operation.
    let is_of_next = head.operation == completed + 1 && !matches!(head.kind, FrameKind::Leave);
    head.operation <= completed || (is_of_next && (is_begun || matches!(head.kind, FrameKind::Abort { .. })))
}

const fn is_message(kind: FrameKind) -> bool {
    matches!(
        kind,
        FrameKind::Offer { .. }
            | FrameKind::Accept { .. }
            | FrameKind::Reject { .. }
            | FrameKind::Message { .. }
            | FrameKind::Withdraw { .. }
            | FrameKind::Arrival { .. }
    )
}
