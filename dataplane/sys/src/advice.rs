//! Memory advice to the kernel and the allocator; purely an optimization.

use core::ops::Range;

/// Size of a huge page, in bytes.
const HUGE_BYTES: usize = 2 << 20;
/// `madvise`: collapse these pages into huge ones synchronously; Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Requests huge pages for a table that is accessed randomly: with small pages each lookup incurs a TLB miss first.
/// Pages touched later become huge; with `now`, so do pages touched already, within a fraction of a millisecond for
/// each. Ranges that do not belong to this process are left unchanged, and so is everything if the system setting is
/// `never`.
pub fn prefer_huge_pages(table: Range<*const u8>, now: bool) {
    let start = table.start.addr().next_multiple_of(HUGE_BYTES);
    let end = table.end.addr() / HUGE_BYTES * HUGE_BYTES;
    if start >= end {
        return;
    }
    let first = table.start.with_addr(start).cast_mut().cast();
    // SAFETY: neither advice changes the contents or the accessibility of memory, even of foreign memory; the kernel
    // rejects ranges that are not mapped.
    unsafe {
        if libc::madvise(first, end - start, libc::MADV_HUGEPAGE) == 0 && now {
            libc::madvise(first, end - start, MADV_COLLAPSE);
        }
    }
}

/// Returns free memory of the allocator to the kernel, for long-lived processes: otherwise glibc keeps up to 64 MiB at
/// the end of each arena after a large block was freed, and all memory below a small block that a thread caches. Takes
/// about a millisecond for some tens of MiB. Has no effect on other allocators.
pub fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim only returns pages that hold no allocation.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_env = "gnu")]
    fn returns_free_memory_to_the_kernel() {
        let anonymous = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap().to_owned();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
        };
        // In an arena of its own: only the first thread uses the main arena.
        std::thread::spawn(move || {
            let before = anonymous();
            // A large block raises the allocator's thresholds; many small ones follow.
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
    fn huge_page_advice_keeps_contents() {
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
    fn unmapped_and_short_ranges_are_ignored() {
        let nowhere = core::ptr::without_provenance(HUGE_BYTES);
        prefer_huge_pages(nowhere..nowhere.wrapping_add(4 * HUGE_BYTES), true);
        let short = [0_u8; 100];
        prefer_huge_pages(short.as_ptr_range(), true);
        prefer_huge_pages(nowhere..nowhere, true);
    }
}
