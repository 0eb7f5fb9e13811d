//! Schedules along a ring or a chain, in pieces: a member passes on a piece while it receives the next one.

use super::{Dependency, ReceiveStep, Schedule, SendStep, Setting, copy};
use crate::reduction::Reduction;
use crate::span::{Buffer, Span};

/// Ring: each member gets the reduction of one chunk, then those of all.
pub(super) fn all_reduce(setting: &Setting<'_>, reduction: Reduction) -> Schedule {
    let (count, at) = (setting.count(), setting.at);
    let whole = Span::new(Buffer::Work, 0, setting.part);
    let source = Span::new(Buffer::Source, 0, setting.part);
    let (next, previous) = (setting.ranks[(at + 1) % count], setting.ranks[(at + count - 1) % count]);
    let of = |span: Span, chunk: usize| {
        let (offset, bytes) = setting.chunk(chunk % count);
        span.part(offset, bytes)
    };
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for turn in 0..2 * (count - 1) {
        let step = turn as u16;
        // The chunk that a member sends was received in the turn before; the first one is its own.
        let chunk = at + 2 * count - turn;
        let (span, after) = match turn {
            0 => (of(source, chunk), Dependency::Nothing),
            _ => (of(whole, chunk), Dependency::Same(turn - 1)),
        };
        sends.push(SendStep { to: next, step, span, after });
        let into = of(whole, chunk - 1);
        let with = (turn < count - 1).then(|| of(source, chunk - 1));
        receives.push(ReceiveStep { from: previous, step, into: Some(into), with, bytes: into.bytes });
    }
    Schedule {
        work_bytes: setting.part,
        sends,
        receives,
        finish: setting.divide(whole, reduction).into_iter().collect(),
        deliver: vec![copy(whole, Span::new(Buffer::Target, 0, setting.part))],
        ..Schedule::default()
    }
}

/// Ring: a chunk for each member travels past all others, and ends at it. All participants have a place.
pub(super) fn reduce_scatter(setting: &Setting<'_>, reduction: Reduction) -> Schedule {
    let (count, at) = (setting.count(), setting.at);
    if setting.ranks.iter().any(|rank| rank.0 >= setting.operation.places) {
        return super::direct::reduce_scatter(setting, reduction);
    }
    let (next, previous) = (setting.ranks[(at + 1) % count], setting.ranks[(at + count - 1) % count]);
    let source = |chunk: usize| {
        let rank = setting.ranks[chunk % count];
        Span::new(Buffer::Source, u64::from(rank.0) * setting.part, setting.part)
    };
    let work = |turn: usize| Span::new(Buffer::Work, turn as u64 * setting.part, setting.part);
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for turn in 0..count - 1 {
        let (step, chunk) = (turn as u16, at + 2 * count - turn - 1);
        let (span, after) = match turn {
            0 => (source(chunk), Dependency::Nothing),
            _ => (work(turn - 1), Dependency::Same(turn - 1)),
        };
        sends.push(SendStep { to: next, step, span, after });
        let (into, with) = (work(turn), source(chunk - 1));
        receives.push(ReceiveStep { from: previous, step, into: Some(into), with: Some(with), bytes: setting.part });
    }
    let result = work(count - 2);
    Schedule {
        work_bytes: setting.part * (count as u64 - 1),
        sends,
        receives,
        finish: setting.divide(result, reduction).into_iter().collect(),
        deliver: vec![copy(result, Span::new(Buffer::Target, 0, setting.part))],
        ..Schedule::default()
    }
}

/// Chain from the root: each member passes on what it receives.
pub(super) fn broadcast(setting: &Setting<'_>, root: usize) -> Schedule {
    let (count, target) = (setting.count(), Span::new(Buffer::Target, 0, setting.part));
    let distance = (setting.at + count - root) % count;
    let neighbour = |at: usize| setting.ranks[(root + at) % count];
    let receives = (distance > 0).then(|| ReceiveStep {
        from: neighbour(distance - 1),
        step: 0,
        into: Some(target),
        with: None,
        bytes: setting.part,
    });
    let after = if distance == 0 { Dependency::Nothing } else { Dependency::Same(0) };
    let to = distance + 1;
    let sends = (to < count).then(|| SendStep { to: neighbour(to), step: 0, span: target, after });
    Schedule { sends: sends.into_iter().collect(), receives: receives.into_iter().collect(), ..Schedule::default() }
}

/// Chain towards the root: each member combines what it receives with its own, and passes it on.
pub(super) fn reduce(setting: &Setting<'_>, reduction: Reduction, root: usize) -> Schedule {
    let count = setting.count();
    let (source, work) = (Span::new(Buffer::Source, 0, setting.part), Span::new(Buffer::Work, 0, setting.part));
    let distance = (setting.at + count - root) % count;
    let neighbour = |at: usize| setting.ranks[(root + at) % count];
    let (is_root, is_last) = (distance == 0, distance + 1 == count);
    let receives = (!is_last).then(|| ReceiveStep {
        from: neighbour(distance + 1),
        step: 0,
        into: Some(work),
        with: Some(source),
        bytes: setting.part,
    });
    let (span, after) = if is_last { (source, Dependency::Nothing) } else { (work, Dependency::Same(0)) };
    let sends = (!is_root).then(|| SendStep { to: neighbour(distance - 1), step: 0, span, after });
    let target = Span::new(Buffer::Target, 0, setting.part);
    Schedule {
        work_bytes: if is_last { 0 } else { setting.part },
        sends: sends.into_iter().collect(),
        receives: receives.into_iter().collect(),
        finish: setting.divide(work, reduction).filter(|_| is_root).into_iter().collect(),
        deliver: is_root.then(|| copy(work, target)).into_iter().collect(),
        ..Schedule::default()
    }
}
