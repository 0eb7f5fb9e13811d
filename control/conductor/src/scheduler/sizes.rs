//! Sizes of the last requests, for their quantiles.

use std::collections::VecDeque;

/// Number of requests whose sizes count.
const WINDOW: usize = 1000;
/// Number of requests before which no quantile is known.
const KNOWN: usize = 100;

/// Sliding window of sizes.
#[derive(Debug, Default)]
pub(super) struct SizeWindow {
    /// In the order of arrival.
    recent: VecDeque<u64>,
    /// The same, by size.
    sorted: Vec<u64>,
}

impl SizeWindow {
    /// Creates an empty window.
    pub(super) const fn new() -> Self {
        Self { recent: VecDeque::new(), sorted: Vec::new() }
    }

    /// Adds the size of a request, in place of the oldest one in a full window.
    pub(super) fn add(&mut self, size: u64) {
        if self.recent.len() == WINDOW
            && let Some(oldest) = self.recent.pop_front()
        {
            let at = self.sorted.partition_point(|other| *other < oldest);
            self.sorted.remove(at);
        }
        self.recent.push_back(size);
        let at = self.sorted.partition_point(|other| *other < size);
        self.sorted.insert(at, size);
    }

    /// Returns the number of sizes in the window.
    pub(super) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// Returns the size of this rank, counted from 1 for the smallest: at most the largest; `None` in an empty window.
    pub(super) fn of_rank(&self, rank: usize) -> Option<u64> {
        self.sorted.get(rank.saturating_sub(1)).or(self.sorted.last()).copied()
    }

    /// Returns true if a size is above those of all but this fraction of the window.
    pub(super) fn is_among_longest(&self, size: u64, fraction: f64) -> bool {
        let above = (self.sorted.len() as f64 * fraction).floor() as usize;
        let Some(last) = self.sorted.len().checked_sub(above + 1) else { return false };
        above > 0 && self.sorted.len() >= KNOWN && size > self.sorted[last]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_of_the_last_requests_are_known() {
        let mut window = SizeWindow::default();
        (1..100).for_each(|size| window.add(size));
        assert!(!window.is_among_longest(u64::MAX, 0.01), "too few are known");
        window.add(100);
        assert!(window.is_among_longest(100, 0.01) && !window.is_among_longest(99, 0.01));
        assert!(window.is_among_longest(91, 0.1) && !window.is_among_longest(90, 0.1));
        assert!(!window.is_among_longest(u64::MAX, 0.0));
        // A thousand shorter ones later, the longest are others.
        (0..1000).for_each(|size| window.add(size % 50));
        assert!(window.is_among_longest(50, 0.01) && !window.is_among_longest(48, 0.01));
        assert_eq!((window.recent.len(), window.sorted.len()), (1000, 1000));
        assert!(window.sorted.is_sorted());
    }
}
