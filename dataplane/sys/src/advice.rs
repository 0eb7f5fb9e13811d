//! Advice to the kernel about memory of our own that it may as well ignore.

use core::ops::Range;

/// A huge page.
const HUGE_BYTES: usize = 2 << 20;
/// `madvise`: put these pages together into huge ones, now; Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Asks for huge pages under a table that is read here and there: on small ones each look-up waits for their addresses
/// first. What is touched later gets them then; with `now`, what was touched already as well, in a fraction of a
/// millisecond for each. Memory that is not ours to advise about stays as it is, and so does all where the system is
/// set to `never`.
pub fn prefer_huge_pages(table: Range<*const u8>, now: bool) {
    let start = table.start.addr().next_multiple_of(HUGE_BYTES);
    let end = table.end.addr() / HUGE_BYTES * HUGE_BYTES;
    if start >= end {
        return;
    }
    let first = table.start.with_addr(start).cast_mut().cast();
    // SAFETY: neither advice changes what is in memory nor whether it may be used, whosever it is; ranges that are not
    // mapped are refused.
    unsafe {
        if libc::madvise(first, end - start, libc::MADV_HUGEPAGE) == 0 && now {
            libc::madvise(first, end - start, MADV_COLLAPSE);
        }
    }
}

/// Has the allocator give free memory back to the kernel, for processes that live long: by itself, glibc keeps up to
/// 64 MiB at the end of each arena after a long block was freed, and all that lies below a short one that a thread
/// keeps for its next use. Takes about a millisecond for some tens of MiB. What another allocator makes of it is its
/// own affair.
pub fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it only gives back pages in which nothing is allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_env = "gnu")]
    fn free_memory_goes_back() {
        let anonymous = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap().to_owned();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
        };
        // In an arena of its own, as a thread that is not the first has.
        std::thread::spawn(move || {
            let before = anonymous();
            // A long block, from which the allocator would learn, and then many short ones.
            drop(vec![1_u8; 24 << 20]);
            let blocks: Vec<Vec<u8>> = (0..512).map(|_| vec![1; 64 << 10]).collect();
            let most = anonymous();
            drop(blocks);
            give_back_free_memory();
            let after = anonymous();
            assert!(most > before + (24 << 20), "{before} {most}");
            assert!(after < before + (12 << 20), "{before} {most} {after}");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn what_is_in_memory_stays_there_whatever_is_advised() {
        let table: Vec<u64> = (0..(5 << 20) / 8).collect();
        let range = table.as_ptr_range();
        prefer_huge_pages(range.start.cast()..range.end.cast(), true);
        assert!((0..).zip(&table).all(|(at, word)| at == *word));
        let mut room: Vec<u64> = Vec::with_capacity((5 << 20) / 8);
        let start: *const u8 = room.as_ptr().cast();
        prefer_huge_pages(start..start.wrapping_add(room.capacity() * 8), false);
        room.resize(room.capacity(), 7);
        assert!(room.iter().all(|word| *word == 7));
    }

    #[test]
    fn memory_that_is_no_ones_and_short_memory_is_left_alone() {
        let nowhere = core::ptr::without_provenance(HUGE_BYTES);
        prefer_huge_pages(nowhere..nowhere.wrapping_add(4 * HUGE_BYTES), true);
        let short = [0_u8; 100];
        prefer_huge_pages(short.as_ptr_range(), true);
        prefer_huge_pages(nowhere..nowhere, true);
    }
}
