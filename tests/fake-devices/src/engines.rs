//! Modelled copy engines: one for each direction of each device. A copy takes its bytes divided by the rate, begins
//! when the engine and the stream are free, and moves nothing.
//!
//! For measurements: a device's engine takes no core from the processes of its host, as a copy by a thread would. All
//! times are computed when an operation is enqueued; nothing runs until they come.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    ToHost,
    ToDevice,
    Between,
}

impl Direction {
    /// Returns the direction between two sides, each a device's or not.
    pub(crate) const fn of(to_device: bool, from_device: bool) -> Self {
        match (to_device, from_device) {
            (true, true) => Self::Between,
            (true, false) => Self::ToDevice,
            (false, _) => Self::ToHost,
        }
    }
}

/// Copy engines of all devices.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    /// Bytes a second of each; 0 while they are not modelled.
    rate: u64,
    /// Time at which each has done what was enqueued so far.
    free: HashMap<(usize, Direction), Instant>,
}

impl Engines {
    /// Begins to model engines of this rate, or ends it for 0.
    pub(crate) fn set(&mut self, rate: u64) {
        self.rate = rate;
        self.free.clear();
    }

    /// Returns true while engines are modelled.
    pub(crate) const fn are_modelled(&self) -> bool {
        self.rate > 0
    }

    /// Enqueues a copy behind `after`, and returns the time at which it is done.
    pub(crate) fn copy(&mut self, device: usize, direction: Direction, bytes: u64, after: Instant) -> Instant {
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate.max(1));
        let free = self.free.entry((device, direction)).or_insert(after);
        *free = after.max(*free) + Duration::from_nanos(takes as u64);
        *free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_one_direction_follow_each_other_and_those_of_two_overlap() {
        let mut engines = Engines::default();
        engines.set(1_000_000_000);
        let start = Instant::now();
        let mut copy = |device, direction, bytes| engines.copy(device, direction, bytes, start) - start;
        let done = [
            copy(0, Direction::ToHost, 1000),
            copy(0, Direction::ToHost, 500),
            copy(0, Direction::ToDevice, 700),
            copy(1, Direction::ToHost, 200),
        ];
        assert_eq!(done, [1000, 1500, 700, 200].map(Duration::from_nanos));
        let late = start + Duration::from_nanos(9000);
        assert_eq!(engines.copy(0, Direction::ToHost, 1000, late) - late, Duration::from_nanos(1000));
    }
}
