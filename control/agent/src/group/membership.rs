//! One membership of this process: the pure member, and the memory of its operations.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_collective::{
    Completion, Disposition, Failure, Head, Member, MemberConfig, Operation, Outgoing, Output, StashId, WorkId,
};
use kvplane_engine::IoBuf;
use kvplane_group::{FailureMode, GroupId, GroupRank, GroupSpec, GroupStatus, RankSet, WorldRank};

use super::error::GroupError;
use super::memory::{WorkBuffers, WorkMemory};
use super::work::WorkOutcome;

/// An operation or message of the caller.
struct CallerWork {
    memory: WorkMemory,
    /// `None` once the caller has its outcome: the work buffer may still be needed.
    state: Option<Arc<WorkOutcome>>,
    /// Bytes for which there was no memory: whatever the member makes of the work, it has no result.
    lacks: Option<u64>,
    /// Deadline of a message.
    deadline_ns: u64,
}

/// Longest time for which the end of a message to a peer that failed waits for the view without it.
const RECONCILES_NS: u64 = 30_000_000_000;

/// The end of a message whose peer failed: in a group that deactivates failed members by itself, its caller finds the
/// view without the peer.
struct UnsettledEnd {
    state: Arc<WorkOutcome>,
    outcome: Result<Completion, Failure>,
    /// Epoch of the view that has the peer.
    epoch: u64,
    until_ns: u64,
}

/// A membership.
pub(super) struct Membership {
    pub(super) member: Member,
    /// Ranks in the world, by rank in the group.
    order: Vec<WorldRank>,
    works: HashMap<WorkId, CallerWork>,
    stashed: HashMap<StashId, IoBuf>,
    unsettled: Vec<UnsettledEnd>,
    /// Failed members are deactivated by the next view.
    is_automatic: bool,
}

impl Membership {
    pub(super) fn new(group: GroupId, rank: GroupRank, incarnation: u64, spec: &GroupSpec) -> Self {
        Self {
            member: Member::new(group, rank, incarnation, !spec.is_joining, MemberConfig::default()),
            order: spec.order.clone(),
            works: HashMap::new(),
            stashed: HashMap::new(),
            unsettled: Vec::new(),
            is_automatic: spec.failure_mode == FailureMode::Automatic,
        }
    }

    /// Returns the rank in the group of a process.
    pub(super) fn rank_of(&self, peer: WorldRank) -> Option<GroupRank> {
        self.order.iter().position(|rank| *rank == peer).map(|at| GroupRank(at as u8))
    }

    /// Returns the rank in the world of a member.
    pub(super) fn world_rank(&self, rank: GroupRank) -> Option<WorldRank> {
        self.order.get(usize::from(rank.0)).copied()
    }

    /// Returns the members among these processes.
    pub(super) fn ranks_of(&self, processes: RankSet<WorldRank>) -> RankSet<GroupRank> {
        processes.iter().filter_map(|rank| self.rank_of(rank)).collect()
    }

    /// Returns the processes of these members.
    pub(super) fn processes_of(&self, ranks: RankSet<GroupRank>) -> RankSet<WorldRank> {
        ranks.iter().filter_map(|rank| self.world_rank(rank)).collect()
    }

    /// Follows the group's state.
    pub(super) fn follow(&mut self, status: &GroupStatus, now_ns: u64) {
        self.order.clone_from(&status.order);
        self.member.follow(status, now_ns);
    }

    /// Submits an operation on buffers of the sizes that it needs.
    pub(super) fn submit(
        &mut self,
        operation: Operation,
        source: Option<IoBuf>,
        target: Option<IoBuf>,
        timeout_ns: u64,
        state: &Arc<WorkOutcome>,
    ) -> Result<(), GroupError> {
        let (needs_source, needs_target) = operation.buffer_bytes(self.member.rank());
        let (has_source, has_target) = (bytes_of(source.as_ref()), bytes_of(target.as_ref()));
        if has_source != needs_source || has_target != needs_target {
            return Err(GroupError::BufferSize { source: has_source, target: has_target, needs_source, needs_target });
        }
        let work = self.member.submit(operation, timeout_ns)?;
        self.keep(work, WorkMemory::new(source, target), state, u64::MAX);
        Ok(())
    }

    pub(super) fn send(
        &mut self,
        to: GroupRank,
        tag: i32,
        source: Option<IoBuf>,
        deadline_ns: u64,
        state: &Arc<WorkOutcome>,
    ) -> Result<(), GroupError> {
        let work = self.member.send(to, tag, bytes_of(source.as_ref()), deadline_ns)?;
        self.keep(work, WorkMemory::new(source, None), state, deadline_ns);
        Ok(())
    }

    pub(super) fn receive(
        &mut self,
        from: Option<GroupRank>,
        tag: i32,
        target: Option<IoBuf>,
        deadline_ns: u64,
        state: &Arc<WorkOutcome>,
    ) -> Result<(), GroupError> {
        let work = self.member.receive(from, tag, bytes_of(target.as_ref()), deadline_ns)?;
        self.keep(work, WorkMemory::new(None, target), state, deadline_ns);
        Ok(())
    }

    fn keep(&mut self, work: WorkId, memory: WorkMemory, state: &Arc<WorkOutcome>, deadline_ns: u64) {
        self.works.insert(work, CallerWork { memory, state: Some(Arc::clone(state)), lacks: None, deadline_ns });
    }

    /// Processes a frame of a member.
    pub(super) fn handle(
        &mut self,
        from: GroupRank,
        head: &Head,
        payload: &IoBuf,
        buffers: &mut WorkBuffers,
        now_ns: u64,
    ) {
        match self.member.handle(from, head, payload.bytes() as u64) {
            Disposition::Ignore => {}
            Disposition::Stash(stash) => match buffers.copy_of(payload) {
                Ok(copy) => {
                    self.stashed.insert(stash, copy);
                }
                // The frame is lost, and so is what it belongs to.
                Err(_) => self.member.lose(RankSet::single(from)),
            },
            Disposition::Place(work, placement) => {
                if let Some(work) = self.works.get(&work).filter(|work| work.lacks.is_none()) {
                    work.memory.place(placement, payload);
                }
            }
        }
        // A frame may need what this one has changed.
        self.carry_out(buffers, now_ns);
    }

    /// Does what the member has to do by now, and its host's part of it. Returns true if operations have ended.
    pub(super) fn advance(&mut self, buffers: &mut WorkBuffers, now_ns: u64) -> bool {
        if self.member.poll_timeout().is_some_and(|due_ns| now_ns >= due_ns) {
            self.member.handle_timeout(now_ns);
        }
        self.member.advance(now_ns);
        self.settle(now_ns) | self.carry_out(buffers, now_ns)
    }

    /// Ends the messages to failed peers that the view has no more.
    fn settle(&mut self, now_ns: u64) -> bool {
        let view = self.member.view();
        let is_settled = |end: &UnsettledEnd| view.epoch > end.epoch || now_ns >= end.until_ns;
        let (settled, unsettled) = std::mem::take(&mut self.unsettled).into_iter().partition(is_settled);
        self.unsettled = unsettled;
        let settled: Vec<UnsettledEnd> = settled;
        let has_ended = !settled.is_empty();
        settled.into_iter().for_each(|end| end.state.end(end.outcome));
        has_ended
    }

    /// True while operations or messages have not ended.
    pub(super) fn is_busy(&self) -> bool {
        self.member.waiting() > 0 || !self.unsettled.is_empty()
    }

    /// Ends all operations: the process leaves the group.
    pub(super) fn close(&mut self, buffers: &mut WorkBuffers) {
        self.member.close();
        self.carry_out(buffers, u64::MAX);
        self.settle(u64::MAX);
    }

    fn carry_out(&mut self, buffers: &mut WorkBuffers, now_ns: u64) -> bool {
        let mut has_ended = false;
        while let Some(output) = self.member.poll_output() {
            match output {
                Output::Begin { work, work_bytes, steps } => {
                    let Some(begun) = self.works.get_mut(&work) else { continue };
                    match buffers.provide(&mut begun.memory, work_bytes) {
                        Ok(()) => {
                            begun.lacks = None;
                            begun.memory.run(&steps);
                        }
                        Err(_) => {
                            begun.lacks = Some(work_bytes);
                            self.member.lack_memory(work, work_bytes);
                        }
                    }
                }
                Output::Place { stash, work, placement } => {
                    let Some(placed) = self.works.get_mut(&work) else { continue };
                    let Some(payload) = self.stashed.remove(&stash) else {
                        placed.lacks.get_or_insert(0);
                        continue;
                    };
                    if placed.lacks.is_none() {
                        placed.memory.place(placement, &payload);
                    }
                    buffers.give_back(Arc::clone(payload.region()));
                }
                Output::Drop(stash) => {
                    if let Some(payload) = self.stashed.remove(&stash) {
                        buffers.give_back(Arc::clone(payload.region()));
                    }
                }
                Output::Run { work, steps } => {
                    if let Some(work) = self.works.get(&work).filter(|work| work.lacks.is_none()) {
                        work.memory.run(&steps);
                    }
                }
                Output::Complete { work, outcome } => {
                    has_ended = true;
                    let Some(ended) = self.works.get_mut(&work) else { continue };
                    (ended.memory.source, ended.memory.target) = (None, None);
                    let lacking = |bytes| Failure::NoMemory { rank: self.member.rank(), bytes: Some(bytes) };
                    let outcome =
                        outcome.and_then(|completion| ended.lacks.map_or(Ok(completion), |b| Err(lacking(b))));
                    let deadline_ns = ended.deadline_ns;
                    if let Some(state) = ended.state.take() {
                        self.end(state, outcome, now_ns, deadline_ns);
                    }
                    self.drop_if_unused(work);
                }
                Output::Release(work) => {
                    if let Some(released) = self.works.get_mut(&work) {
                        buffers.take_back(&mut released.memory);
                    }
                    self.drop_if_unused(work);
                }
            }
        }
        has_ended
    }

    fn end(&mut self, state: Arc<WorkOutcome>, outcome: Result<Completion, Failure>, now_ns: u64, deadline_ns: u64) {
        let view = self.member.view();
        match outcome {
            Err(Failure::PeerLost { rank }) if self.is_automatic && view.active.contains(rank) => {
                let until_ns = now_ns.saturating_add(RECONCILES_NS).min(deadline_ns);
                self.unsettled.push(UnsettledEnd { state, outcome, epoch: view.epoch, until_ns });
            }
            outcome => state.end(outcome),
        }
    }

    fn drop_if_unused(&mut self, work: WorkId) {
        if self.works.get(&work).is_some_and(|work| work.state.is_none() && !work.memory.has_work_buffer()) {
            self.works.remove(&work);
        }
    }

    /// Returns the payload of a frame.
    pub(super) fn payload(&self, outgoing: &Outgoing) -> Option<IoBuf> {
        let (work, span) = outgoing.payload?;
        self.works.get(&work).filter(|work| work.lacks.is_none())?.memory.span(span)
    }
}

fn bytes_of(buffer: Option<&IoBuf>) -> u64 {
    buffer.map_or(0, |buffer| buffer.bytes() as u64)
}
