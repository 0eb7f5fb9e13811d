//! Schedules in one step: each member sends to those that need its bytes.

use kvplane_group::GroupRank;

use super::{Dependency, ReceiveStep, Schedule, SendStep, Setting, copy};
use crate::reduction::Reduction;
use crate::span::{Buffer, LocalStep, Span};

fn send(to: GroupRank, span: Span) -> SendStep {
    SendStep { to, step: 0, span, after: Dependency::Nothing }
}

fn receive(from: GroupRank, into: Option<Span>, bytes: u64) -> ReceiveStep {
    ReceiveStep { from, step: 0, into, with: None, bytes }
}

/// Parts of [`Buffer::Work`], by position.
fn work(setting: &Setting<'_>, at: usize) -> Span {
    Span::new(Buffer::Work, at as u64 * setting.part, setting.part)
}

/// Combines the parts of [`Buffer::Work`] into the first one, in their order.
fn combine_parts(setting: &Setting<'_>, reduction: Reduction) -> Vec<LocalStep> {
    let first = work(setting, 0);
    let parts = (1..setting.count()).map(|at| setting.combine(first, work(setting, at), reduction));
    parts.chain(setting.divide(first, reduction)).collect()
}

/// Every member sends all to all. The result is kept.
pub(super) fn all_reduce(setting: &Setting<'_>, reduction: Reduction) -> Schedule {
    let source = Span::new(Buffer::Source, 0, setting.part);
    let result = work(setting, 0);
    Schedule {
        work_bytes: setting.part * setting.count() as u64,
        prepare: vec![copy(source, work(setting, setting.at))],
        sends: setting.others().map(|(_, to)| send(to, source)).collect(),
        receives: setting.others().map(|(at, from)| receive(from, Some(work(setting, at)), setting.part)).collect(),
        finish: combine_parts(setting, reduction),
        deliver: vec![copy(result, Span::new(Buffer::Target, 0, setting.part))],
        result: Some(result),
        is_ordered: false,
    }
}

/// Every member sends to the root.
pub(super) fn reduce(setting: &Setting<'_>, reduction: Reduction, root: usize) -> Schedule {
    let source = Span::new(Buffer::Source, 0, setting.part);
    if setting.at != root {
        return Schedule { sends: vec![send(setting.ranks[root], source)], ..Schedule::default() };
    }
    Schedule {
        work_bytes: setting.part * setting.count() as u64,
        prepare: vec![copy(source, work(setting, root))],
        receives: setting.others().map(|(at, from)| receive(from, Some(work(setting, at)), setting.part)).collect(),
        finish: combine_parts(setting, reduction),
        deliver: vec![copy(work(setting, 0), Span::new(Buffer::Target, 0, setting.part))],
        ..Schedule::default()
    }
}

/// The root sends to all.
pub(super) fn broadcast(setting: &Setting<'_>, root: usize) -> Schedule {
    let (source, target) = (Span::new(Buffer::Source, 0, setting.part), Span::new(Buffer::Target, 0, setting.part));
    if setting.at == root {
        let sends = setting.others().map(|(_, to)| send(to, source)).collect();
        return Schedule { sends, ..Schedule::default() };
    }
    Schedule { receives: vec![receive(setting.ranks[root], Some(target), setting.part)], ..Schedule::default() }
}

/// Every member sends its part to all. The result is kept.
pub(super) fn all_gather_and_keep(setting: &Setting<'_>) -> Schedule {
    let source = Span::new(Buffer::Source, 0, setting.part);
    let work_bytes = setting.part * u64::from(setting.operation.places);
    let own = setting.place(Buffer::Work, setting.own());
    let delivered = setting
        .ranks
        .iter()
        .filter_map(|rank| Some(copy(setting.place(Buffer::Work, *rank)?, setting.place(Buffer::Target, *rank)?)));
    Schedule {
        work_bytes,
        prepare: own.map(|own| copy(source, own)).into_iter().collect(),
        sends: setting.others().map(|(_, to)| send(to, source)).collect(),
        receives: setting
            .others()
            .map(|(_, from)| receive(from, setting.place(Buffer::Work, from), setting.part))
            .collect(),
        deliver: delivered.collect(),
        result: Some(Span::new(Buffer::Work, 0, work_bytes)),
        ..Schedule::default()
    }
}

/// Every member sends its part to all.
pub(super) fn all_gather(setting: &Setting<'_>) -> Schedule {
    let source = Span::new(Buffer::Source, 0, setting.part);
    let own = setting.place(Buffer::Target, setting.own());
    Schedule {
        prepare: own.map(|own| copy(source, own)).into_iter().collect(),
        sends: setting.others().map(|(_, to)| send(to, source)).collect(),
        receives: setting
            .others()
            .map(|(_, from)| receive(from, setting.place(Buffer::Target, from), setting.part))
            .collect(),
        ..Schedule::default()
    }
}

/// Every member sends its part to the root.
pub(super) fn gather(setting: &Setting<'_>, root: usize) -> Schedule {
    let source = Span::new(Buffer::Source, 0, setting.part);
    if setting.at != root {
        return Schedule { sends: vec![send(setting.ranks[root], source)], ..Schedule::default() };
    }
    let own = setting.place(Buffer::Target, setting.own());
    Schedule {
        prepare: own.map(|own| copy(source, own)).into_iter().collect(),
        receives: setting
            .others()
            .map(|(_, from)| receive(from, setting.place(Buffer::Target, from), setting.part))
            .collect(),
        ..Schedule::default()
    }
}

/// The root sends each member its part.
pub(super) fn scatter(setting: &Setting<'_>, root: usize) -> Schedule {
    let target = Span::new(Buffer::Target, 0, setting.part);
    if setting.at != root {
        let receives = vec![receive(setting.ranks[root], Some(target), setting.part)];
        return Schedule { receives, ..Schedule::default() };
    }
    let own = setting.place(Buffer::Source, setting.own());
    let nothing = Span::new(Buffer::Source, 0, 0);
    Schedule {
        prepare: own.map(|own| copy(own, target)).into_iter().collect(),
        sends: setting.others().map(|(_, to)| send(to, setting.place(Buffer::Source, to).unwrap_or(nothing))).collect(),
        ..Schedule::default()
    }
}

/// Every member sends each other one its part, and combines those for itself in the order of the ranks.
pub(super) fn reduce_scatter(setting: &Setting<'_>, reduction: Reduction) -> Schedule {
    let nothing = Span::new(Buffer::Source, 0, 0);
    let of = |rank| setting.place(Buffer::Source, rank).unwrap_or(nothing);
    let own = of(setting.own());
    Schedule {
        work_bytes: setting.part * setting.count() as u64,
        prepare: vec![copy(own, work(setting, setting.at))],
        sends: setting.others().map(|(_, to)| send(to, of(to))).collect(),
        receives: setting.others().map(|(at, from)| receive(from, Some(work(setting, at)), setting.part)).collect(),
        finish: combine_parts(setting, reduction),
        deliver: vec![copy(work(setting, 0), Span::new(Buffer::Target, 0, setting.part))],
        ..Schedule::default()
    }
}

/// Every member sends each other one the part that its counts say.
pub(super) fn all_to_all(setting: &Setting<'_>, sources: &[u64], targets: &[u64]) -> Schedule {
    let part = |buffer, counts: &[u64], rank: GroupRank| {
        let (at, element) = (usize::from(rank.0), setting.operation.data_type.bytes() as u64);
        let before: u64 = counts.iter().take(at).sum();
        Span::new(buffer, before * element, counts.get(at).copied().unwrap_or(0) * element)
    };
    let source = |rank| part(Buffer::Source, sources, rank);
    let target = |rank| part(Buffer::Target, targets, rank);
    Schedule {
        prepare: vec![copy(source(setting.own()), target(setting.own()))],
        sends: setting.others().map(|(_, to)| send(to, source(to))).collect(),
        receives: setting.others().map(|(_, from)| receive(from, Some(target(from)), target(from).bytes)).collect(),
        ..Schedule::default()
    }
}

/// Every member sends an empty frame to all.
pub(super) fn barrier(setting: &Setting<'_>) -> Schedule {
    let nothing = Span::new(Buffer::Work, 0, 0);
    Schedule {
        sends: setting.others().map(|(_, to)| send(to, nothing)).collect(),
        receives: setting.others().map(|(_, from)| receive(from, Some(nothing), 0)).collect(),
        result: Some(nothing),
        ..Schedule::default()
    }
}
