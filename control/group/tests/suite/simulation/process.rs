//! Model of a member process: it runs one operation after the other, and follows the views of its group.
//!
//! An operation needs the data of all participants. Those with an even number complete after all members have confirmed
//! that they have the whole result; those with an odd number complete at once, and their result is kept.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_group::*;

/// Results that a member keeps: others may be one operation behind.
const REMEMBERED: usize = 4;

/// Message between two processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) from: WorldRank,
    pub(crate) epoch: u64,
    pub(crate) operation: u64,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// The sender's contribution.
    Data,
    /// The sender has the whole result.
    Confirmation,
    /// Requests the result of a complete operation.
    Fetch,
    /// Ranks that contributed to an operation.
    Result(RankSet<GroupRank>),
}

/// A process of the simulated world.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) id: ProcessId,
    pub(crate) is_joiner: bool,
    pub(crate) is_stopped: bool,
    pub(crate) roster: u64,
    pub(crate) group: Option<GroupId>,
    pub(crate) rank: GroupRank,
    pub(crate) view: View,
    pub(crate) status: Option<GroupStatus>,
    order: Vec<WorldRank>,
    fenced: bool,
    /// Peers with which the operation in flight failed.
    failed: RankSet<GroupRank>,
    /// Operations that are complete, and who contributed.
    pub(crate) results: BTreeMap<u64, RankSet<GroupRank>>,
    pub(crate) completed: u64,
    is_prepared: bool,
    has_begun: bool,
    /// Epoch, operation, kind and sender of the frames that arrived.
    arrived: BTreeSet<(u64, u64, bool, WorldRank)>,
    pub(crate) sent: Vec<(WorldRank, Frame)>,
}

impl Member {
    pub(crate) fn new(id: ProcessId, is_joiner: bool) -> Self {
        Self {
            id,
            is_joiner,
            is_stopped: false,
            roster: 0,
            group: None,
            rank: GroupRank(0),
            view: View::default(),
            status: None,
            order: Vec::new(),
            fenced: false,
            failed: RankSet::EMPTY,
            results: BTreeMap::new(),
            completed: 0,
            is_prepared: false,
            has_begun: false,
            arrived: BTreeSet::new(),
            sent: Vec::new(),
        }
    }

    pub(crate) fn participates(&self) -> bool {
        self.view.participants().contains(self.rank)
            && self.view.incarnations[usize::from(self.rank.0)] == Some(self.id.incarnation)
    }

    pub(crate) fn phase(&self) -> Phase {
        let is_prepared = self.is_prepared;
        match (self.participates(), self.fenced) {
            (false, _) => Phase::Ready,
            (true, true) => {
                let has_result = self.results.contains_key(&self.completed);
                Phase::Fenced(Progress { completed: self.completed, has_result, is_prepared })
            }
            (true, false) => Phase::Running { failed: self.failed },
        }
    }

    /// Applies a status: fences the member while its view changes, and applies the next view.
    pub(crate) fn follow(&mut self, status: &Status) {
        self.roster = status.roster;
        let Some(group) = status.groups.first() else { return };
        if group.view.epoch < self.view.epoch {
            return;
        }
        (self.group, self.rank) = (Some(group.group), group.rank);
        self.order.clone_from(&group.order);
        if group.view.epoch > self.view.epoch {
            self.apply(&group.view);
        }
        self.fenced |= group.is_changing && group.view.epoch == self.view.epoch && self.participates();
        self.status = Some(group.clone());
    }

    fn apply(&mut self, view: &View) {
        let had = self.participates();
        let completed = view.resolution.completed;
        let former = std::mem::replace(&mut self.view, view.clone());
        (self.fenced, self.failed, self.has_begun) = (false, RankSet::EMPTY, false);
        if !self.participates() {
            return;
        }
        if !had {
            // What it completed before it was excluded, the others may have repeated without it.
            self.results.clear();
            self.completed = completed;
        } else if self.completed < completed {
            assert_eq!(self.completed + 1, completed, "a member is two operations behind");
            if self.is_prepared {
                self.complete(former.participants());
            }
        }
        self.is_prepared = false;
    }

    fn complete(&mut self, contributors: RankSet<GroupRank>) {
        self.completed += 1;
        self.results.insert(self.completed, contributors);
        if self.results.len() > REMEMBERED {
            self.results.pop_first();
        }
        (self.is_prepared, self.has_begun) = (false, false);
        let (epoch, completed) = (self.view.epoch, self.completed);
        self.arrived.retain(|(of, operation, ..)| *of > epoch || (*of == epoch && *operation > completed));
    }

    /// Notes that the connection to a peer broke.
    pub(crate) fn note_broken(&mut self, peer: WorldRank) {
        let at = self.order.iter().position(|rank| *rank == peer);
        if let Some(rank) = at.map(|at| GroupRank(at as u8))
            && self.participates()
            && self.view.participants().contains(rank)
        {
            self.failed.insert(rank);
        }
    }

    pub(crate) fn receive(&mut self, frame: Frame) {
        let from = frame.from;
        match frame.kind {
            // A fenced member refuses its view's frames.
            Kind::Data | Kind::Confirmation if frame.epoch < self.view.epoch => {}
            Kind::Data | Kind::Confirmation if frame.epoch == self.view.epoch && self.fenced => {}
            Kind::Data => {
                self.arrived.insert((frame.epoch, frame.operation, false, from));
            }
            Kind::Confirmation => {
                self.arrived.insert((frame.epoch, frame.operation, true, from));
            }
            Kind::Fetch => {
                if let Some(result) = self.results.get(&frame.operation) {
                    let reply = Frame { from: self.id.rank, kind: Kind::Result(*result), ..frame };
                    self.sent.push((frame.from, reply));
                }
            }
            Kind::Result(contributors) => {
                let is_awaited = self.view.epoch == frame.epoch
                    && self.completed + 1 == frame.operation
                    && self.view.resolution.completed == frame.operation
                    && self.participates();
                if is_awaited {
                    self.complete(contributors);
                }
            }
        }
    }

    fn send_all(&mut self, kind: Kind) {
        let frame = Frame { from: self.id.rank, epoch: self.view.epoch, operation: self.completed + 1, kind };
        for rank in self.view.participants().iter().filter(|rank| *rank != self.rank) {
            self.sent.push((self.order[usize::from(rank.0)], frame));
        }
    }

    /// Requests again what it lacks: a request may be lost.
    pub(crate) fn retry(&mut self) {
        if self.completed < self.view.resolution.completed {
            self.has_begun = false;
        }
    }

    /// Continues the operation in flight as far as it can.
    pub(crate) fn advance(&mut self) {
        if !self.participates() || self.fenced {
            return;
        }
        if self.completed < self.view.resolution.completed {
            if std::mem::replace(&mut self.has_begun, true) {
                return;
            }
            let holder = self.view.resolution.holder.expect("a holder of what this member lacks");
            let (epoch, operation) = (self.view.epoch, self.completed + 1);
            let frame = Frame { from: self.id.rank, epoch, operation, kind: Kind::Fetch };
            self.sent.push((self.order[usize::from(holder.0)], frame));
            return;
        }
        if !self.has_begun {
            self.has_begun = true;
            self.send_all(Kind::Data);
        }
        let (epoch, operation) = (self.view.epoch, self.completed + 1);
        let others = || self.view.participants().iter().filter(|rank| *rank != self.rank);
        let rank_of = |member: GroupRank| self.order[usize::from(member.0)];
        let has = |confirmed, from| self.arrived.contains(&(epoch, operation, confirmed, rank_of(from)));
        let has_all = |confirmed| others().all(|from| has(confirmed, from));
        let (has_data, has_confirmations) = (has_all(false), has_all(true));
        if operation % 2 == 1 {
            if has_data {
                self.complete(self.view.participants());
            }
            return;
        }
        if has_data && !self.is_prepared {
            self.is_prepared = true;
            self.send_all(Kind::Confirmation);
        }
        if self.is_prepared && has_confirmations {
            self.complete(self.view.participants());
        }
    }
}
