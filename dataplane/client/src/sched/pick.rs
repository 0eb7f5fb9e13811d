//! The choice among rails: least predicted finish, and patience where a better rail is only full.
//!
//! A rail that is full competes too. Where it would still finish first, a slower rail with room is taken only if it
//! finishes before the whole request could without it: so a slow rail helps with a long transfer and never gets the
//! last slices of one.

/// A rail as the choice sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// When it would be done with the slice, from now ([`super::Rail::predict_ns`]).
    pub predicted_ns: f64,
    /// What it serves, in bytes per nanosecond.
    pub rate: f64,
    /// Whether it can take the slice now.
    pub room: bool,
    /// Whether the slice failed on it: another is better.
    pub avoid: bool,
}

/// What to do with a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Post it on the rail at this position.
    Rail(usize),
    /// Keep it: a rail that is full now will have it done earlier.
    Wait,
    /// No rail has room or promises to have.
    Nowhere,
}

/// Chooses for a slice of a request of which `open_bytes` are not done, the slice's included.
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
