//! All-reduce by recursive halving and doubling.
//!
//! Members exchange halves of what they have, and combine them, until each has the reduction of one part; then they
//! exchange the parts. If their number is no power of two, some first give all to a neighbour, and get the result from
//! it in the end.

use super::{Dependency, ReceiveStep, Schedule, SendStep, Setting, copy};
use crate::reduction::Reduction;
use crate::span::{Buffer, Span};

/// Step in which a member gives all to its neighbour.
const FOLD: u16 = 0;
/// Step in which it gets the result.
const UNFOLD: u16 = u16::MAX;

/// Makes the schedule.
pub(super) fn all_reduce(setting: &Setting<'_>, reduction: Reduction) -> Schedule {
    let whole = Span::new(Buffer::Work, 0, setting.part);
    let source = Span::new(Buffer::Source, 0, setting.part);
    let mut schedule = Schedule {
        work_bytes: setting.part,
        prepare: vec![copy(source, whole)],
        finish: setting.divide(whole, reduction).into_iter().collect(),
        deliver: vec![copy(whole, Span::new(Buffer::Target, 0, setting.part))],
        is_ordered: true,
        ..Schedule::default()
    };
    let width = 1 << setting.count().ilog2();
    let folded = setting.count() - width;
    // Of each of the first pairs, the second member is folded into the first one.
    let pair = (setting.at < 2 * folded).then(|| setting.ranks[setting.at ^ 1]);
    if let Some(neighbour) = pair
        && !setting.at.is_multiple_of(2)
    {
        schedule.sends.push(SendStep { to: neighbour, step: FOLD, span: source, after: Dependency::Nothing });
        schedule.receives.push(store(neighbour, UNFOLD, whole));
        return schedule;
    }
    if let Some(neighbour) = pair {
        schedule.receives.push(combine(neighbour, FOLD, whole));
    }
    let number = if pair.is_some() { setting.at / 2 } else { setting.at - folded };
    let rank = |number: usize| setting.ranks[if number < folded { 2 * number } else { number + folded }];
    exchange(&mut schedule, setting, number, width, rank);
    if let Some(neighbour) = pair {
        let after = after_last(&schedule);
        schedule.sends.push(SendStep { to: neighbour, step: UNFOLD, span: whole, after });
    }
    schedule
}

/// Appends the exchanges among `width` members, a power of two, of which this one has a `number`.
fn exchange(
    schedule: &mut Schedule,
    setting: &Setting<'_>,
    number: usize,
    width: usize,
    rank: impl Fn(usize) -> kvplane_group::GroupRank,
) {
    let element = setting.operation.data_type.bytes() as u64;
    let span = |from: u64, to: u64| Span::new(Buffer::Work, from * element, (to - from) * element);
    let (mut from, mut to) = (0, setting.operation.count);
    let mut step = FOLD;
    let mut halves = Vec::new();
    let mut distance = width / 2;
    while distance > 0 {
        step += 1;
        let middle = from + (to - from) / 2;
        let keeps_lower = number & distance == 0;
        let (kept, given) = if keeps_lower { ((from, middle), (middle, to)) } else { ((middle, to), (from, middle)) };
        let peer = rank(number ^ distance);
        let after = after_last(schedule);
        schedule.sends.push(SendStep { to: peer, step, span: span(given.0, given.1), after });
        schedule.receives.push(combine(peer, step, span(kept.0, kept.1)));
        halves.push((distance, kept, given));
        (from, to) = kept;
        distance /= 2;
    }
    for (distance, kept, given) in halves.into_iter().rev() {
        step += 1;
        let peer = rank(number ^ distance);
        let after = after_last(schedule);
        schedule.sends.push(SendStep { to: peer, step, span: span(kept.0, kept.1), after });
        schedule.receives.push(store(peer, step, span(given.0, given.1)));
    }
}

fn after_last(schedule: &Schedule) -> Dependency {
    schedule.receives.len().checked_sub(1).map_or(Dependency::Nothing, Dependency::All)
}

fn combine(from: kvplane_group::GroupRank, step: u16, span: Span) -> ReceiveStep {
    ReceiveStep { from, step, into: Some(span), with: Some(span), bytes: span.bytes }
}

fn store(from: kvplane_group::GroupRank, step: u16, span: Span) -> ReceiveStep {
    ReceiveStep { from, step, into: Some(span), with: None, bytes: span.bytes }
}
