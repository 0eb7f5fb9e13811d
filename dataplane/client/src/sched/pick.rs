//! Choice of a rail: the least predicted completion time, with waiting where a better rail is full.
//!
//! A full rail competes too. If it would still complete first, a slower rail with room is chosen only if it completes
//! before the whole request could without it. So a slow rail helps with a long transfer, but never gets its last
//! slices.

/// Inputs of the choice for one rail.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// Predicted completion time of the slice, from now ([`super::Rail::predict_ns`]).
    pub predicted_ns: f64,
    /// Measured rate, in bytes per nanosecond.
    pub rate: f64,
    /// True if the rail has room for the slice now.
    pub room: bool,
    /// True if the slice failed on this rail, so that another is preferred.
    pub avoid: bool,
}

/// Decision for a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Post the slice on the rail at this position.
    Rail(usize),
    /// Keep the slice queued: a rail that is full now will complete it earlier.
    Wait,
    /// There is no rail.
    Nowhere,
}

/// Chooses a rail for a slice. `open_bytes` are the uncompleted bytes of its request, the slice's included.
pub fn pick(candidates: impl Iterator<Item = Candidate>, open_bytes: u64) -> Choice {
    let (mut best, mut best_roomy): (Option<Candidate>, Option<(usize, Candidate)>) = (None, None);
    let mut total_rate = 0.0;
    let earlier = |a: &Candidate, b: &Candidate| (a.avoid, a.predicted_ns) < (b.avoid, b.predicted_ns);
    for (position, candidate) in candidates.enumerate() {
        total_rate += candidate.rate;
        if best.as_ref().is_none_or(|best| earlier(&candidate, best)) {
            best = Some(candidate);
        }
        if candidate.room && best_roomy.as_ref().is_none_or(|(_, roomy)| earlier(&candidate, roomy)) {
            best_roomy = Some((position, candidate));
        }
    }
    let Some(best) = best else { return Choice::Nowhere };
    let Some((position, roomy)) = best_roomy else { return Choice::Wait };
    let others = total_rate - roomy.rate;
    let horizon_ns = if others > 0.0 { best.predicted_ns.max(open_bytes as f64 / others) } else { f64::INFINITY };
    if roomy.predicted_ns <= horizon_ns && (roomy.avoid == best.avoid) { Choice::Rail(position) } else { Choice::Wait }
}
