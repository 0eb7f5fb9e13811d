//! Sizes of the last requests, for their quantiles.

use std::collections::VecDeque;

/// Number of requests whose prefills are compared.
const WINDOW: usize = 1000;
/// Number of requests before which no quantile is known.
const KNOWN: usize = 100;

/// Sliding window of sizes.
#[derive(Debug)]
pub(super) struct SizeWindow {
    /// Number of requests whose sizes count.
    most: usize,
    /// In the order of arrival.
    recent: VecDeque<u64>,
    /// The same, by size.
    sorted: Vec<u64>,
}

impl SizeWindow {
    /// Creates an empty window of [`WINDOW`] requests.
    pub(super) const fn new() -> Self {
        Self::of(WINDOW)
    }

    /// Creates an empty window of `most` requests.
    pub(super) const fn of(most: usize) -> Self {
        Self { most, recent: VecDeque::new(), sorted: Vec::new() }
    }

    /// Returns the number of requests in the window.
    pub(super) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// Returns the mean of the sizes; `None` without any.
    pub(super) fn mean(&self) -> Option<u64> {
        let sum: u128 = self.sorted.iter().map(|size| u128::from(*size)).sum();
        u64::try_from(sum.checked_div(self.sorted.len() as u128)?).ok()
    }

    /// Returns the size that is not exceeded by this fraction of the window; `None` without any.
    pub(super) fn quantile(&self, share: f64) -> Option<u64> {
        self.of_rank((self.sorted.len() as f64 * share).ceil() as usize)
    }

    /// Adds the size of a request, in place of the oldest one in a full window.
    pub(super) fn add(&mut self, size: u64) {
        if self.recent.len() == self.most
            && let Some(oldest) = self.recent.pop_front()
        {
            let at = self.sorted.partition_point(|other| *other < oldest);
            self.sorted.remove(at);
        }
        self.recent.push_back(size);
        let at = self.sorted.partition_point(|other| *other < size);
        self.sorted.insert(at, size);
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
        let mut window = SizeWindow::new();
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

    #[test]
    fn quantiles_and_mean_are_those_of_the_window() {
        let mut window = SizeWindow::of(4);
        assert_eq!((window.mean(), window.quantile(0.5), window.len()), (None, None, 0));
        [9, 1, 2, 3, 4].into_iter().for_each(|size| window.add(size));
        let quantiles = [0.0, 0.5, 0.75, 0.9, 1.0].map(|share| window.quantile(share));
        assert_eq!(quantiles, [1, 2, 3, 4, 4].map(Some));
        assert_eq!((window.mean(), window.len()), (Some(2), 4));
        [u64::MAX; 4].into_iter().for_each(|size| window.add(size));
        assert_eq!(window.mean(), Some(u64::MAX));
    }
}
