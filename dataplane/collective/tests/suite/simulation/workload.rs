//! Operations of the simulated callers, a function of the seed and the number, and the results that they may have.

use kvplane_collective::*;
use kvplane_group::{GroupRank, RankSet};
use kvplane_proto::rng::{Rng, mix64};

use crate::collectives::element;

/// Byte that fills a target before its operation.
const UNTOUCHED: u8 = 0xEE;

/// The calls of all members.
#[derive(Clone, Debug)]
pub(crate) enum Workload {
    /// All kinds, types and sizes. Roots are among the first `roots` ranks.
    Random { seed: u64, roots: u8 },
    /// One operation, again and again.
    Fixed { collective: CollectiveKind, count: u64 },
}

impl Workload {
    /// Returns how many of the first ranks may be roots.
    pub(crate) const fn roots(&self) -> u8 {
        match *self {
            Self::Random { roots, .. } => roots,
            Self::Fixed { .. } => 1,
        }
    }

    /// Returns the operation of a number for a rank, in a group of `places` ranks.
    pub(crate) fn operation(&self, number: u64, rank: GroupRank, places: u8) -> Operation {
        let (mut rng, kind, count, roots) = match *self {
            Self::Random { seed, roots } => {
                let mut rng = Rng::new(mix64(seed ^ mix64(number)), "operation");
                let kind = CollectiveKind::from_number(rng.below(9) as u8).expect("a kind");
                let most = [0, 1, 8, 24, 100, 300, 700][rng.below(7) as usize];
                let count = if most == 0 { 0 } else { 1 + rng.below(most) };
                (rng, kind, count, roots)
            }
            Self::Fixed { collective, count } => (Rng::new(number, "operation"), collective, count, 1),
        };
        let types: Vec<_> = match self {
            Self::Random { .. } => DataType::all().collect(),
            Self::Fixed { .. } => vec![DataType::I32],
        };
        let data_type = types[rng.below(types.len() as u64) as usize];
        let reductions: Vec<_> = Reduction::all().filter(|reduction| reduction.is_of(data_type)).collect();
        let reduction = reductions[rng.below(reductions.len() as u64) as usize];
        let root = GroupRank(rng.below(u64::from(roots)) as u8);
        let collective = match kind {
            CollectiveKind::AllReduce => Collective::AllReduce { reduction },
            CollectiveKind::Reduce => Collective::Reduce { reduction, root },
            CollectiveKind::Broadcast => Collective::Broadcast { root },
            CollectiveKind::AllGather => Collective::AllGather,
            CollectiveKind::Gather => Collective::Gather { root },
            CollectiveKind::Scatter => Collective::Scatter { root },
            CollectiveKind::ReduceScatter => Collective::ReduceScatter { reduction },
            CollectiveKind::AllToAll => Collective::AllToAll {
                sources: (0..places).map(|to| split(number, rank.0, to, count)).collect(),
                targets: (0..places).map(|from| split(number, from, rank.0, count)).collect(),
            },
            CollectiveKind::Barrier => Collective::Barrier,
        };
        let count = if matches!(kind, CollectiveKind::AllToAll | CollectiveKind::Barrier) { 0 } else { count };
        Operation { collective, data_type, count, places }
    }

    /// Returns a rank's source.
    pub(crate) fn source(&self, number: u64, rank: GroupRank, operation: &Operation) -> Vec<u8> {
        let (bytes, _) = operation.buffer_bytes(rank);
        let elements = bytes / operation.data_type.bytes() as u64;
        elements_of(number, rank, operation, 0, elements)
    }

    /// Checks the target of a rank that has the result of the participants of a view. `failed` are ranks that may have
    /// left bytes in their parts.
    pub(crate) fn check(
        &self,
        number: u64,
        rank: GroupRank,
        operation: &Operation,
        (participants, failed): (RankSet<GroupRank>, RankSet<GroupRank>),
        found: &[u8],
    ) -> Result<(), String> {
        let expected = self.expected(number, rank, operation, participants);
        let part = |offset: usize| {
            let mut end = 0;
            (0..operation.places).map(GroupRank).find(|from| {
                end += match &operation.collective {
                    Collective::AllToAll { targets, .. } => {
                        targets[usize::from(from.0)] as usize * operation.data_type.bytes()
                    }
                    _ => operation.part_bytes() as usize,
                };
                offset < end
            })
        };
        let has_parts = matches!(
            operation.collective,
            Collective::AllGather | Collective::Gather { .. } | Collective::AllToAll { .. }
        );
        if found == expected {
            return Ok(());
        }
        let everybody = self.expected(number, rank, operation, RankSet::first(64));
        let is_left =
            |at: usize| has_parts && found[at] == everybody[at] && part(at).is_some_and(|from| failed.contains(from));
        let wrong = (0..expected.len()).find(|at| found.get(*at) != Some(&expected[*at]) && !is_left(*at));
        match wrong {
            None if found.len() == expected.len() => Ok(()),
            wrong => Err(format!(
                "operation {number} at {rank:?} of {participants:?}, {failed:?} failed: {operation:?}: byte {wrong:?} \
                 of {}: found {:?}, expected {:?}",
                expected.len(),
                &found[..found.len().min(48)],
                &expected[..expected.len().min(48)]
            )),
        }
    }

    fn expected(
        &self,
        number: u64,
        rank: GroupRank,
        operation: &Operation,
        participants: RankSet<GroupRank>,
    ) -> Vec<u8> {
        let (count, places) = (operation.count, operation.places);
        let of = |from: GroupRank, at: u64, count: u64| elements_of(number, from, operation, at, count);
        let untouched = |bytes: u64| vec![UNTOUCHED; bytes as usize];
        let gathered = || {
            let part = |from: GroupRank| match participants.contains(from) {
                true => of(from, 0, count),
                false => untouched(operation.part_bytes()),
            };
            (0..places).flat_map(|from| part(GroupRank(from))).collect()
        };
        let reduced = |at: u64, reduction: Reduction| {
            let mut parts = participants.iter().map(|from| of(from, at, count));
            let mut first = parts.next().expect("a participant");
            parts.for_each(|part| reduction.combine(operation.data_type, &mut first, &part));
            if reduction == Reduction::Average {
                divide(operation.data_type, &mut first, participants.len() as u32);
            }
            first
        };
        match &operation.collective {
            Collective::AllReduce { reduction } => reduced(0, *reduction),
            Collective::Reduce { reduction, root } if *root == rank => reduced(0, *reduction),
            Collective::Reduce { .. } => of(rank, 0, count),
            Collective::Broadcast { root } => of(*root, 0, count),
            Collective::AllGather => gathered(),
            Collective::Gather { root } if *root == rank => gathered(),
            Collective::Gather { .. } | Collective::Barrier => Vec::new(),
            Collective::Scatter { root } => of(*root, u64::from(rank.0) * count, count),
            Collective::ReduceScatter { reduction } => reduced(u64::from(rank.0) * count, *reduction),
            Collective::AllToAll { targets, .. } => {
                let part = |(from, count): (usize, &u64)| {
                    let from = GroupRank(from as u8);
                    if !participants.contains(from) {
                        return untouched(count * operation.data_type.bytes() as u64);
                    }
                    let most = self.most(number);
                    let before = (0..rank.0).map(|to| split(number, from.0, to, most)).sum();
                    of(from, before, *count)
                };
                targets.iter().enumerate().flat_map(part).collect()
            }
        }
    }

    /// Most elements of a part of an all-to-all.
    fn most(&self, number: u64) -> u64 {
        match *self {
            Self::Fixed { count, .. } => count,
            Self::Random { seed, .. } => {
                let mut rng = Rng::new(mix64(seed ^ mix64(number)), "operation");
                rng.below(9);
                let most = [0, 1, 8, 24, 100, 300, 700][rng.below(7) as usize];
                if most == 0 { 0 } else { 1 + rng.below(most) }
            }
        }
    }
}

/// Elements that a rank sends to another one in an all-to-all; none to some.
fn split(number: u64, from: u8, to: u8, most: u64) -> u64 {
    if most == 0 { 0 } else { mix64(number ^ (u64::from(from) << 8) ^ (u64::from(to) << 16)) % most }
}

/// Elements of a rank's source. Small numbers, whose sums and products are exact in every type.
fn elements_of(number: u64, rank: GroupRank, operation: &Operation, at: u64, count: u64) -> Vec<u8> {
    let most = if operation.reduction() == Some(Reduction::Product) { 2 } else { 4 };
    let value = |at: u64| (mix64(number.wrapping_mul(977) ^ (u64::from(rank.0) << 40) ^ at) % most) as u32;
    let least = u32::from(operation.data_type != DataType::Bool);
    (at..at + count).flat_map(|at| element(operation.data_type, least + value(at))).collect()
}
