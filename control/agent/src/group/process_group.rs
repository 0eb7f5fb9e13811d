//! Membership of a group, for its caller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_collective::Operation;
use kvplane_engine::IoBuf;
use kvplane_group::{
    Change, GroupId, GroupRank, GroupSpec, GroupStatus, MemberState, Outcome, ProcessState, RankSet, View,
};

use super::error::GroupError;
use super::host::GroupHost;
use super::process::SharedProcess;
use super::work::{Work, WorkOutcome};

/// Membership of a group.
#[derive(Clone)]
pub struct ProcessGroup {
    shared: Arc<SharedProcess>,
    group: GroupId,
    rank: GroupRank,
    spec: Arc<GroupSpec>,
    deadline: Duration,
}

impl ProcessGroup {
    pub(super) fn new(
        shared: Arc<SharedProcess>,
        group: GroupId,
        rank: GroupRank,
        spec: GroupSpec,
        deadline: Duration,
    ) -> Self {
        Self { shared, group, rank, spec: Arc::new(spec), deadline }
    }

    /// Returns the rank in the group.
    #[must_use]
    pub const fn rank(&self) -> GroupRank {
        self.rank
    }

    /// Returns the description of the group that the process attached with.
    #[must_use]
    pub fn spec(&self) -> &GroupSpec {
        &self.spec
    }

    /// Returns the view that this member follows; its epoch is 0 before the first.
    #[must_use]
    pub fn view(&self) -> View {
        let mut host = self.shared.host();
        host.membership(self.group).map(|membership| membership.member.view().clone()).unwrap_or_default()
    }

    /// Returns the size: the highest active rank, and one. Until this member is active, that of the description.
    #[must_use]
    pub fn size(&self) -> usize {
        let mut host = self.shared.host();
        let membership = host.membership(self.group);
        let active = membership.filter(|membership| membership.member.participates());
        active.map_or(self.spec.order.len(), |membership| membership.member.view().size())
    }

    /// Returns the participants of the view that this member follows; this member alone, until it has been active.
    #[must_use]
    pub fn participants(&self) -> RankSet<GroupRank> {
        let view = self.view();
        let is_joiner = self.spec.is_joining && !view.participants().contains(self.rank);
        if is_joiner { RankSet::single(self.rank) } else { view.participants() }
    }

    fn status(&self) -> Option<GroupStatus> {
        self.shared.status().groups.iter().find(|status| status.group == self.group).cloned()
    }

    /// Returns the states of the members and of their processes, by rank.
    #[must_use]
    pub fn members(&self) -> Vec<(MemberState, ProcessState)> {
        let status = self.status();
        status.map(|status| status.members.into_iter().zip(status.processes).collect()).unwrap_or_default()
    }

    fn with<T>(&self, call: impl FnOnce(&mut GroupHost) -> Result<T, GroupError>) -> Result<T, GroupError> {
        if self.shared.is_closing() {
            return Err(GroupError::Ended);
        }
        call(&mut self.shared.host())
    }

    /// Submits a collective on buffers of the sizes that [`Operation::buffer_bytes`] says; operations run in the order
    /// of the calls. In place, `target` is the source's memory. The timeout begins when the operation is the first one.
    ///
    /// # Errors
    /// When the operation is malformed, a buffer has another size, or the member was deactivated.
    pub fn submit(
        &self,
        operation: Operation,
        source: Option<IoBuf>,
        target: Option<IoBuf>,
        timeout: Duration,
    ) -> Result<Work, GroupError> {
        if let (Some(source), Some(target), false) = (&source, &target, operation.is_in_place()) {
            let bytes = overlap(source, target);
            if bytes > 0 {
                return Err(GroupError::Overlap { bytes });
            }
        }
        self.begin(|host, state| {
            let membership = host.membership(self.group).ok_or(GroupError::Ended)?;
            membership.submit(operation, source, target, nanoseconds(timeout), state)
        })
    }

    /// Sends a message to a member, within a deadline; `None` is an empty one.
    ///
    /// # Errors
    /// When there is no such member, or too many messages wait.
    pub fn send(&self, source: Option<IoBuf>, to: GroupRank, tag: i32, deadline: Duration) -> Result<Work, GroupError> {
        self.begin(|host, state| {
            let deadline_ns = host.now_ns().saturating_add(nanoseconds(deadline));
            let membership = host.membership(self.group).ok_or(GroupError::Ended)?;
            membership.send(to, tag, source, deadline_ns, state)
        })
    }

    /// Receives a message of a member, or of any, within a deadline.
    ///
    /// # Errors
    /// When there is no such member, or too many messages wait.
    pub fn receive(
        &self,
        target: Option<IoBuf>,
        from: Option<GroupRank>,
        tag: i32,
        deadline: Duration,
    ) -> Result<Work, GroupError> {
        self.begin(|host, state| {
            let deadline_ns = host.now_ns().saturating_add(nanoseconds(deadline));
            let membership = host.membership(self.group).ok_or(GroupError::Ended)?;
            membership.receive(from, tag, target, deadline_ns, state)
        })
    }

    /// Begins a work, and sends its first frames.
    fn begin(
        &self,
        submit: impl FnOnce(&mut GroupHost, &Arc<WorkOutcome>) -> Result<(), GroupError>,
    ) -> Result<Work, GroupError> {
        let state = Arc::new(WorkOutcome::default());
        self.with(|host| submit(host, &state))?;
        self.shared.round();
        Ok(Work::new(Arc::clone(&self.shared), state))
    }

    /// Says that this joiner, or deactivated member, is ready, and waits until a member has activated it.
    ///
    /// # Errors
    /// When nobody has within the deadline.
    pub fn join(&self, deadline: Duration) -> Result<(), GroupError> {
        self.with(|host| {
            host.set_ready(self.group);
            Ok(())
        })?;
        self.shared.report();
        let until = Instant::now() + deadline;
        loop {
            let participates = self.with(|host| {
                Ok(host.membership(self.group).is_some_and(|membership| membership.member.participates()))
            })?;
            if participates {
                return Ok(());
            }
            let epoch = self.view().epoch;
            let left = until.saturating_duration_since(Instant::now());
            let followed = self.shared.await_status("join", left, |status| {
                let group = status.groups.iter().find(|group| group.group == self.group)?;
                (group.view.epoch > epoch).then_some(())
            });
            match followed {
                Err(GroupError::Late { .. }) => {
                    return Err(GroupError::NotActivated { rank: self.rank, after: deadline });
                }
                followed => followed?,
            }
        }
    }

    /// Proposes a change of the view, and waits for its outcome.
    ///
    /// # Errors
    /// When the control plane does not answer, or the change is malformed.
    pub fn propose(&self, change: Change, deadline: Duration) -> Result<Outcome, GroupError> {
        let id = self.shared.link()?.propose(self.group, change, self.deadline)?;
        let outcome = self.shared.await_status("propose", deadline, |status| {
            let group = status.groups.iter().find(|group| group.group == self.group)?;
            group.outcomes.iter().find(|(found, _)| *found == id).map(|(_, outcome)| *outcome)
        })?;
        // The caller finds the view that it proposed.
        if let Outcome::Applied { epoch, .. } | Outcome::Unchanged { epoch } = outcome {
            self.await_epoch(epoch, deadline)?;
        }
        Ok(outcome)
    }

    /// Waits until this member follows a view of at least this epoch.
    ///
    /// # Errors
    /// When it does not within the deadline.
    pub fn await_epoch(&self, epoch: u64, deadline: Duration) -> Result<(), GroupError> {
        self.shared.await_status("view", deadline, |status| {
            let group = status.groups.iter().find(|group| group.group == self.group)?;
            (group.view.epoch >= epoch).then_some(())
        })
    }

    /// Leaves the group for good, once the other members have completed what this one has, which takes 5 s at most.
    /// Operations in flight end with an error.
    ///
    /// # Errors
    /// When the control plane does not answer; the process has left the group nevertheless.
    pub fn detach(&self) -> Result<(), GroupError> {
        self.shared.leave(Some(self.group));
        self.with(|host| {
            host.detach(self.group);
            Ok(())
        })?;
        Ok(self.shared.link()?.detach(self.group, self.deadline)?)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes that two buffers have in common.
fn overlap(one: &IoBuf, other: &IoBuf) -> u64 {
    let range = |buffer: &IoBuf| {
        let from = buffer.region().address() + buffer.offset() as u64;
        (from, from + buffer.bytes() as u64)
    };
    let ((one_from, one_to), (other_from, other_to)) = (range(one), range(other));
    one_to.min(other_to).saturating_sub(one_from.max(other_from))
}

/// Ranks as a mask, by rank in the group, of `size` entries.
#[must_use]
pub fn mask(ranks: RankSet<GroupRank>, size: usize) -> Vec<bool> {
    (0..size).map(|rank| ranks.contains(GroupRank(rank as u8))).collect()
}
