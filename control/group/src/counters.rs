//! Counters of a world.

use core::ops::AddAssign;

/// Counters of a world since its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// Groups whose founding members became complete.
    pub foundings: u64,
    /// Views that replaced another one.
    pub view_changes: u64,
    /// Time from the beginning of these changes until their views were published, all together.
    pub view_change_ns: u64,
    /// Processes that were declared dead.
    pub deaths: DeathCounts,
    /// Participants that a view change left out without a proposal.
    pub exclusions: ExclusionCounts,
    /// Inputs that were rejected.
    pub rejections: u64,
}

/// Processes that were declared dead, by the evidence beside their silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DeathCounts {
    /// A peer found that their address refuses connections.
    pub refused: u64,
    /// A collective waited for them until its deadline.
    pub overdue: u64,
    /// None but the length of the silence.
    pub silent: u64,
}

/// Excluded participants, by cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ExclusionCounts {
    /// Their process was declared dead, or has left.
    pub ended: u64,
    /// Their process is alive, and did not reach the others.
    pub unreachable: u64,
    /// They were not fenced in time.
    pub unfenced: u64,
    /// Their progress contradicted that of the others.
    pub behind: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.foundings += other.foundings;
        self.view_changes += other.view_changes;
        self.view_change_ns += other.view_change_ns;
        self.deaths += other.deaths;
        self.exclusions += other.exclusions;
        self.rejections += other.rejections;
    }
}

impl AddAssign for DeathCounts {
    fn add_assign(&mut self, other: Self) {
        self.refused += other.refused;
        self.overdue += other.overdue;
        self.silent += other.silent;
    }
}

impl AddAssign for ExclusionCounts {
    fn add_assign(&mut self, other: Self) {
        self.ended += other.ended;
        self.unreachable += other.unreachable;
        self.unfenced += other.unfenced;
        self.behind += other.behind;
    }
}

impl ExclusionCounts {
    /// Returns the sum of all causes.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.ended + self.unreachable + self.unfenced + self.behind
    }
}
