//! Schedules: what a member sends, receives and combines for an operation, in steps.
//!
//! | operation | up to | schedule |
//! |---|---|---|
//! | all_reduce | [`Thresholds::one_shot_bytes`] | each member sends all to all, and reduces by itself |
//! | | [`Thresholds::halving_bytes`] | halving and doubling (Rabenseifner, 2004), with a fold if need be |
//! | | | ring: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009) |
//! | all_gather, barrier | [`Thresholds::one_shot_bytes`] | each sends to all, and keeps the result |
//! | all_gather, gather, scatter, all_to_all | | each sends to those that need the part |
//! | reduce_scatter | [`Thresholds::halving_bytes`] | each sends to those that need the part |
//! | | | ring |
//! | reduce, broadcast | [`Thresholds::one_shot_bytes`] | to the root, or from it |
//! | | | chain towards the root, or from it, in pieces |
//!
//! Elements are combined in the same order in each run, and the combination of an element that several members get is
//! made by one of them, or by all in the order of their ranks. So the result is the same, bit for bit, at all members.

mod direct;
mod halving;
mod pipeline;

use kvplane_group::{GroupRank, RankSet};

use crate::operation::{Collective, Operation};
use crate::reduction::Reduction;
use crate::span::{Buffer, LocalStep, Placement, Span};

/// Sizes at which a schedule gives way to the next one. All members of a group have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Most bytes that a member sends to another one without waiting for it to begin the operation.
    pub one_shot_bytes: u64,
    /// Most bytes that a member sends so to all others together.
    pub one_shot_total: u64,
    /// Most bytes that are reduced by halving and doubling, or in parts at their owners.
    pub halving_bytes: u64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { one_shot_bytes: 16 << 10, one_shot_total: 64 << 10, halving_bytes: 1 << 20 }
    }
}

/// Bytes that have to arrive before others are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dependency {
    /// No bytes.
    Nothing,
    /// This receive and all before it.
    All(usize),
    /// Those bytes of this receive that have the same places.
    Same(usize),
}

/// Bytes for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SendStep {
    pub(crate) to: GroupRank,
    /// Names the step between the two members.
    pub(crate) step: u16,
    pub(crate) span: Span,
    pub(crate) after: Dependency,
}

/// Bytes from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceiveStep {
    pub(crate) from: GroupRank,
    pub(crate) step: u16,
    /// `None`: the member has no place for the peer's bytes.
    pub(crate) into: Option<Span>,
    /// The other operand, if the bytes are combined with it.
    pub(crate) with: Option<Span>,
    pub(crate) bytes: u64,
}

/// Steps of a member for an operation among the participants of a view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// Bytes of [`Buffer::Work`].
    pub(crate) work_bytes: u64,
    /// Made before the first frame.
    pub(crate) prepare: Vec<LocalStep>,
    pub(crate) sends: Vec<SendStep>,
    pub(crate) receives: Vec<ReceiveStep>,
    /// True if bytes are combined in the order of the receives, so that later ones wait.
    pub(crate) is_ordered: bool,
    /// Make the result of what arrived.
    pub(crate) finish: Vec<LocalStep>,
    /// Copy the result to the caller's target.
    pub(crate) deliver: Vec<LocalStep>,
    /// The result, where it is the same at all members and is kept after the operation.
    pub(crate) result: Option<Span>,
}

/// The view of a schedule's algorithms: an operation, the participants in order, and the position of the member.
pub(crate) struct Setting<'a> {
    pub(crate) operation: &'a Operation,
    pub(crate) ranks: Vec<GroupRank>,
    /// Position of the member among the ranks.
    pub(crate) at: usize,
    /// Bytes of a part.
    pub(crate) part: u64,
    pub(crate) thresholds: Thresholds,
}

impl Setting<'_> {
    fn count(&self) -> usize {
        self.ranks.len()
    }

    fn own(&self) -> GroupRank {
        self.ranks[self.at]
    }

    /// Position of a rank; `None` if it does not participate.
    fn position(&self, rank: GroupRank) -> Option<usize> {
        self.ranks.iter().position(|other| *other == rank)
    }

    /// The other participants, with their positions, beginning with the next one: so that not all send to one at once.
    fn others(&self) -> impl Iterator<Item = (usize, GroupRank)> {
        (1..self.count()).map(|distance| {
            let at = (self.at + distance) % self.count();
            (at, self.ranks[at])
        })
    }

    /// Place of a rank in a buffer with a part for each.
    fn place(&self, buffer: Buffer, rank: GroupRank) -> Option<Span> {
        (rank.0 < self.operation.places).then(|| Span::new(buffer, u64::from(rank.0) * self.part, self.part))
    }

    /// Elements are divided among the participants: offset and bytes of a chunk of a part.
    fn chunk(&self, chunk: usize) -> (u64, u64) {
        let (chunk, chunks, element) = (chunk as u64, self.count() as u64, self.operation.data_type.bytes() as u64);
        let edge = |chunk| u128::from(self.operation.count) * u128::from(chunk) / u128::from(chunks);
        let (from, to) = (edge(chunk) as u64 * element, edge(chunk + 1) as u64 * element);
        (from, to - from)
    }

    fn is_one_shot(&self) -> bool {
        let Thresholds { one_shot_bytes, one_shot_total, .. } = self.thresholds;
        self.part <= one_shot_bytes && self.part * (self.count() as u64 - 1) <= one_shot_total
    }

    fn divide(&self, span: Span, reduction: Reduction) -> Option<LocalStep> {
        let by = self.count() as u32;
        let data_type = self.operation.data_type;
        (reduction == Reduction::Average).then_some(LocalStep::Divide { span, data_type, by })
    }

    fn combine(&self, into: Span, with: Span, reduction: Reduction) -> LocalStep {
        LocalStep::Combine { into, with, data_type: self.operation.data_type, reduction }
    }
}

impl Schedule {
    /// Makes the schedule of a member, or `None` if the operation's root does not participate. `rank` is one of the
    /// participants.
    pub(crate) fn new(
        operation: &Operation,
        rank: GroupRank,
        participants: RankSet<GroupRank>,
        thresholds: Thresholds,
    ) -> Option<Self> {
        let ranks: Vec<_> = participants.iter().collect();
        let at = ranks.iter().position(|other| *other == rank)?;
        let setting = Setting { operation, ranks, at, part: operation.part_bytes(), thresholds };
        let root = match operation.root() {
            Some(root) => setting.position(root)?,
            None => 0,
        };
        Some(match &operation.collective {
            // In place, and alone.
            _ if operation.is_in_place() && setting.count() == 1 => Self::default(),
            Collective::AllReduce { reduction } if setting.is_one_shot() => direct::all_reduce(&setting, *reduction),
            Collective::AllReduce { reduction } if setting.part <= thresholds.halving_bytes => {
                halving::all_reduce(&setting, *reduction)
            }
            Collective::AllReduce { reduction } => pipeline::all_reduce(&setting, *reduction),
            Collective::Reduce { reduction, .. } if setting.part <= thresholds.one_shot_bytes => {
                direct::reduce(&setting, *reduction, root)
            }
            Collective::Reduce { reduction, .. } => pipeline::reduce(&setting, *reduction, root),
            Collective::Broadcast { .. } if setting.part <= thresholds.one_shot_bytes => {
                direct::broadcast(&setting, root)
            }
            Collective::Broadcast { .. } => pipeline::broadcast(&setting, root),
            Collective::AllGather if setting.is_one_shot() => direct::all_gather_and_keep(&setting),
            Collective::AllGather => direct::all_gather(&setting),
            Collective::Gather { .. } => direct::gather(&setting, root),
            Collective::Scatter { .. } => direct::scatter(&setting, root),
            Collective::ReduceScatter { reduction }
                if setting.part * setting.count() as u64 <= thresholds.halving_bytes || setting.count() <= 2 =>
            {
                direct::reduce_scatter(&setting, *reduction)
            }
            Collective::ReduceScatter { reduction } => pipeline::reduce_scatter(&setting, *reduction),
            Collective::AllToAll { sources, targets } => direct::all_to_all(&setting, sources, targets),
            Collective::Barrier => direct::barrier(&setting),
        })
    }

    /// Returns the placement of bytes of a receive.
    pub(crate) fn placement(
        &self,
        receive: usize,
        offset: u64,
        bytes: u64,
        operation: &Operation,
    ) -> Option<Placement> {
        let receive = &self.receives[receive];
        let into = receive.into?.part(offset, bytes);
        Some(match (receive.with, operation.reduction()) {
            (Some(with), Some(reduction)) => {
                let with = with.part(offset, bytes);
                Placement::Combine { into, with, data_type: operation.data_type, reduction }
            }
            _ => Placement::Store(into),
        })
    }
}

fn copy(from: Span, into: Span) -> LocalStep {
    LocalStep::Copy { from, into }
}
