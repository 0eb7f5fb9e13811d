//! Pages of a staging region: which of them are in use.

/// Length of a page in bytes.
pub(super) const PAGE_BYTES: usize = 64 << 10;

/// Contiguous pages in use, which are returned by [`Pages::release`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(super) struct PageRun {
    first: u32,
    pages: u32,
}

impl PageRun {
    /// Returns the offset of the first byte in the region.
    pub(super) const fn offset(&self) -> usize {
        self.first as usize * PAGE_BYTES
    }
}

/// Free and used pages of one region.
#[derive(Debug)]
pub(super) struct Pages {
    /// True for each page in use.
    used: Vec<bool>,
    in_use: usize,
    /// Page at which the next search begins: a ring in the common case, where chunks return in their order.
    next: usize,
}

impl Pages {
    /// Creates the table of a region of this many bytes; a part of a page at its end is not used.
    pub(super) fn new(bytes: usize) -> Self {
        Self { used: vec![false; bytes / PAGE_BYTES], in_use: 0, next: 0 }
    }

    /// Returns the length of all pages in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.used.len() * PAGE_BYTES
    }

    /// Returns the length of the pages in use in bytes.
    pub(super) const fn used_bytes(&self) -> usize {
        self.in_use * PAGE_BYTES
    }

    /// Returns true if no page is in use.
    pub(super) const fn is_empty(&self) -> bool {
        self.in_use == 0
    }

    /// Takes contiguous pages for this many bytes; `None` if there are none at present.
    pub(super) fn take(&mut self, bytes: usize) -> Option<PageRun> {
        let pages = bytes.div_ceil(PAGE_BYTES).max(1);
        let first =
            self.search(self.next, self.used.len(), pages).or_else(|| self.search(0, self.used.len(), pages))?;
        self.used[first..first + pages].fill(true);
        self.in_use += pages;
        self.next = first + pages;
        Some(PageRun { first: first as u32, pages: pages as u32 })
    }

    /// Finds the first run of free pages between two positions.
    fn search(&self, from: usize, to: usize, pages: usize) -> Option<usize> {
        let mut start = from;
        for at in from..to {
            if self.used[at] {
                start = at + 1;
            } else if at + 1 - start == pages {
                return Some(start);
            }
        }
        None
    }

    /// Returns pages.
    #[allow(clippy::needless_pass_by_value, reason = "pages that were returned are not used any more")]
    pub(super) fn release(&mut self, run: PageRun) {
        let PageRun { first, pages } = run;
        let range = first as usize..(first + pages) as usize;
        assert!(self.used[range.clone()].iter().all(|used| *used), "{first}+{pages} is in use");
        self.used[range].fill(false);
        self.in_use -= pages as usize;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn chunks_are_whole_pages_and_go_round() {
        let mut pages = Pages::new(4 * PAGE_BYTES + 100);
        assert_eq!(pages.bytes(), 4 * PAGE_BYTES);
        let [first, second] = [1, PAGE_BYTES + 1].map(|bytes| pages.take(bytes).expect("free pages"));
        assert_eq!((first.offset(), first.pages), (0, 1));
        assert_eq!((second.offset(), second.pages), (PAGE_BYTES, 2));
        assert!(pages.take(2 * PAGE_BYTES).is_none() && pages.take(5 * PAGE_BYTES).is_none());
        assert_eq!(pages.used_bytes(), 3 * PAGE_BYTES);
        pages.release(first);
        let third = pages.take(PAGE_BYTES).expect("a free page");
        assert_eq!(third.offset(), 3 * PAGE_BYTES, "the search goes on behind the last chunk");
        pages.release(second);
        pages.release(third);
        assert!(pages.is_empty());
    }

    proptest! {
        #[test]
        fn chunks_never_overlap_and_all_pages_return(lengths in proptest::collection::vec(1..9usize, 1..200)) {
            let (mut pages, mut held): (_, Vec<PageRun>) = (Pages::new(32 * PAGE_BYTES), Vec::new());
            for length in lengths {
                match pages.take(length * PAGE_BYTES) {
                    Some(chunk) => {
                        let range = |run: &PageRun| run.first..run.first + run.pages;
                        let mine = range(&chunk);
                        let overlaps = |other: &PageRun| range(other).start < mine.end && mine.start < range(other).end;
                        prop_assert!(mine.end <= 32 && !held.iter().any(overlaps));
                        held.push(chunk);
                    }
                    None => {
                        let chunk = held.remove(length % held.len());
                        pages.release(chunk);
                    }
                }
            }
            held.drain(..).for_each(|chunk| pages.release(chunk));
            prop_assert!(pages.is_empty() && pages.take(32 * PAGE_BYTES).is_some());
        }
    }
}
