//! Contract of a region: its range, its seals, its rights, and unmapping when the last holder is gone.

use super::*;
use crate::device::Backing;
use crate::memory_map::MemoryMap;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

fn options(name: &str, bytes: usize) -> RegionOptions {
    RegionOptions { huge: HugePages::Never, ..RegionOptions::new(name, bytes) }
}

fn shared(name: &str, bytes: usize) -> Arc<Region> {
    Region::allocate(&RegionOptions { shared: true, ..options(name, bytes) }).expect("memfd")
}

fn private(bytes: usize) -> Arc<Region> {
    Region::allocate(&options("private", bytes)).expect("memory")
}

fn duplicate(region: &Region) -> OwnedFd {
    let fd = region.fd().expect("a shared region has a descriptor");
    fd.try_clone_to_owned().expect("duplicate")
}

fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

#[test]
fn a_far_part_begins_inside_a_region_and_fits_its_node() {
    let of = |offset| RegionOptions {
        far: Some(FarPart { offset, node: 0 }),
        shared: true,
        prefault: true,
        ..options("far", FarPart::UNIT_BYTES + 8192)
    };
    let region = Region::allocate(&of(FarPart::UNIT_BYTES)).expect("memory");
    region.copy_in(FarPart::UNIT_BYTES - 1, b"both parts");
    Region::copy_between(&region, FarPart::UNIT_BYTES + 4096, &region, FarPart::UNIT_BYTES - 1, 10);
    let mut bytes = [0; 10];
    region.copy_out(FarPart::UNIT_BYTES + 4096, &mut bytes);
    assert_eq!(bytes, *b"both parts");
    for offset in [0, 4096, 2 * FarPart::UNIT_BYTES] {
        let refused = Region::allocate(&of(offset)).expect_err("refused");
        assert!(matches!(refused, RegionError::FarPart { .. }), "{refused}");
    }
    let meminfo = "Node 1 MemFree:  100 kB\nNode 1 Active(file):  7 kB\nNode 1 Inactive(file):  5 kB\n";
    assert_eq!(map::node_available_bytes(meminfo), Some(112 << 10));
    let meminfo = format!("{meminfo}Node 1 HugePages_Free:      3\n");
    assert_eq!(map::node_available_bytes(&meminfo), Some((112 << 10) + (6 << 20)));
    assert_eq!(map::node_available_bytes(""), None);
}

#[test]
fn regions_larger_than_available_memory_are_rejected() {
    let meminfo = "MemTotal: 900 kB\nMemAvailable:  100 kB\nHugePages_Free:  3\nHugepagesize:  2048 kB\n";
    assert_eq!(map::available_bytes(meminfo), Some((100 + 3 * 2048) << 10));
    assert_eq!(map::available_bytes("MemAvailable:  7 kB\n"), Some(7 << 10));
    assert_eq!(map::available_bytes("MemTotal: 900 kB\n"), None);
    // Also more than can be mapped: without the check, this fails in another way and does no harm.
    let options = RegionOptions { prefault: true, ..options("beyond", 1 << 50) };
    let Err(RegionError::NotAvailable { bytes, available_bytes, .. }) = Region::allocate(&options) else {
        panic!("a petabyte is not refused for want of memory")
    };
    assert!(bytes as u64 > available_bytes && available_bytes > 0);
}

#[test]
fn fresh_memory_is_zero_and_writable_to_its_last_byte() {
    for huge in [HugePages::Never, HugePages::Try] {
        for (shared, prefault) in [(false, false), (true, false), (false, true), (true, true)] {
            let bytes = (5 << 20) + 123;
            let options = RegionOptions { shared, huge, prefault, ..options("fresh", bytes) };
            let region = Region::allocate(&options).expect("memory");
            region.read_with(0, bytes, &mut |_, chunk| assert!(chunk.iter().all(|&b| b == 0)));
            region.copy_in(bytes - 3, b"end");
            let mut end = [0; 4];
            region.copy_out(bytes - 4, &mut end);
            assert_eq!((&end, region.bytes(), region.writable()), (b"\0end", bytes, true));
        }
    }
}

#[test]
fn required_huge_pages_are_huge_or_an_error() {
    for shared in [false, true] {
        let huge = HugePages::Require;
        let options = RegionOptions { shared, huge, ..options("huge", 4 << 20) };
        match Region::allocate(&options) {
            Ok(region) => assert_ne!(region.page_kind(), PageKind::Plain),
            Err(error) => assert!(error.to_string().contains("vm.nr_hugepages"), "{error}"),
        }
    }
    assert_eq!(private(4 << 20).page_kind(), PageKind::Plain);
}

/// Returns the KiB of the mapping at `address` in huge pages of shared memory, as the kernel reports them.
fn huge_kib(address: u64) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let start = format!("{address:x}-");
    let field = |line: &str| line.strip_prefix("ShmemPmdMapped:")?.split_ascii_whitespace().next()?.parse().ok();
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    lines.find_map(field).expect("a shared mapping")
}

/// Returns true if the kernel collapses shared pages, determined without the code under test.
fn kernel_puts_pages_together() -> bool {
    const MADV_COLLAPSE: libc::c_int = 25;
    let region = shared("asked", 8 << 20);
    region.copy_in(0, &[0; 8 << 20]);
    let start = region.address().next_multiple_of(2 << 20) as *mut libc::c_void;
    // SAFETY: inside the region, whose contents the advice keeps.
    unsafe { libc::madvise(start, 2 << 20, MADV_COLLAPSE) == 0 }
}

#[test]
fn shared_memory_faulted_in_at_once_gets_huge_pages_where_the_kernel_can() {
    let bytes = (9 << 20) + 4096;
    for huge in [HugePages::Try, HugePages::Never] {
        let region = Region::allocate(&RegionOptions { shared: true, prefault: true, huge, ..options("huge", bytes) });
        let region = region.expect("memory");
        match (huge, region.page_kind()) {
            (_, PageKind::HugeTlb) => println!("skipped: this machine has reserved huge pages"),
            (HugePages::Never, kind) => assert_eq!((kind, huge_kib(region.address())), (PageKind::Plain, 0)),
            (_, PageKind::TransparentHuge) => assert_eq!(huge_kib(region.address()), 8 << 10),
            (_, PageKind::Plain) => {
                assert!(!kernel_puts_pages_together(), "the kernel collapses pages, but was not called correctly");
                println!("skipped: this kernel puts no shared pages together");
            }
        }
        region.read_with(0, bytes, &mut |_, chunk| assert!(chunk.iter().all(|&b| b == 0)));
    }
}

#[test]
fn impossible_requests_are_errors() {
    let failed = |bytes| Region::allocate(&options("x", bytes)).expect_err("no such memory");
    assert!(matches!(failed(0), RegionError::Empty { .. }));
    assert!(matches!(failed(usize::MAX), RegionError::TooLarge { .. }));
    assert!(matches!(failed(1 << 60), RegionError::Map { .. }));
    let named = RegionOptions { shared: true, ..options("a\0b", 1) };
    assert!(matches!(Region::allocate(&named), Err(RegionError::Create { .. })));
}

#[test]
fn a_node_that_does_not_exist_is_an_error_where_nodes_matter() {
    let numa_node = Some(1022);
    let result = Region::allocate(&RegionOptions { numa_node, ..options("node", 4096) });
    let online = std::fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    if online.contains([',', '-']) {
        assert!(matches!(result, Err(RegionError::Bind { node: 1022, .. })));
    } else {
        assert!(result.is_ok(), "one node: nothing to bind to");
    }
    let first = RegionOptions { numa_node: Some(0), ..options("node", 4096) };
    assert!(Region::allocate(&first).is_ok());
}

#[test]
fn a_peer_sees_the_same_bytes() {
    let ours = shared("peer", 10_000);
    let theirs = Region::map_shared(duplicate(&ours), 10_000, true).expect("mapped");
    assert_ne!(ours.address(), theirs.address());
    ours.copy_in(9_990, b"hello");
    let mut seen = [0; 5];
    theirs.copy_out(9_990, &mut seen);
    assert_eq!(&seen, b"hello");
    theirs.atomic_u32(64).store(7, Ordering::Release);
    assert_eq!(ours.atomic_u32(64).load(Ordering::Acquire), 7);
}

#[test]
fn memfds_without_a_shrink_seal_are_rejected() {
    // SAFETY: makes a new memfd that only this test owns; no name is longer than the kernel allows.
    let unsealed = unsafe {
        use std::os::fd::FromRawFd;
        OwnedFd::from_raw_fd(libc::memfd_create(c"unsealed".as_ptr(), libc::MFD_ALLOW_SEALING))
    };
    // SAFETY: plain call on a descriptor this test owns.
    assert_eq!(unsafe { libc::ftruncate(unsealed.as_raw_fd(), 8192) }, 0);
    let refused = |fd, bytes| Region::map_shared(fd, bytes, false).expect_err("refused");
    assert!(matches!(refused(unsealed, 4096), RegionError::NotSealed));
    let file = OpenOptions::new().read(true).open("/proc/self/exe").expect("our own binary");
    assert!(matches!(refused(file.into(), 1), RegionError::NotSealed));
    let short = shared("short", 4096);
    assert!(matches!(refused(duplicate(&short), 4097), RegionError::TooShort { file_bytes: 4096, bytes: 4097 }));
    assert!(matches!(refused(duplicate(&short), 0), RegionError::Empty { .. }));
    assert!(matches!(refused(duplicate(&short), usize::MAX), RegionError::TooLarge { .. }));
    // Our own memfd cannot be truncated either.
    // SAFETY: plain call on a descriptor this test owns.
    assert_eq!(unsafe { libc::ftruncate(duplicate(&short).as_raw_fd(), 0) }, -1);
}

#[test]
fn a_read_only_descriptor_can_never_be_mapped_writable() {
    let region = shared("read-only", 4096);
    assert!(!region.is_sealed());
    let read_only = region.read_only_fd().expect("descriptor");
    assert!(region.is_sealed());
    let again = read_only.try_clone().expect("duplicate");
    let Err(RegionError::Map { source, .. }) = Region::map_shared(again, 4096, true) else { panic!("mapped") };
    assert_eq!(source.raw_os_error(), Some(libc::EACCES));
    // Reopening it for writing does not help, although the file's mode allows that.
    let path = format!("/proc/self/fd/{}", read_only.as_raw_fd());
    if let Ok(file) = OpenOptions::new().read(true).write(true).open(path) {
        assert!(matches!(Region::map_shared(file.into(), 4096, true), Err(RegionError::Map { .. })));
    }
    let view = Region::map_shared(read_only, 4096, false).expect("readable");
    region.copy_in(0, &42u64.to_ne_bytes());
    assert_eq!((view.load_u64(0), view.writable()), (42, false));
    // A holder of the view can pass it on; it cannot seal memory of another process.
    assert!(view.read_only_fd().is_ok());
    let theirs = Region::map_shared(duplicate(&shared("theirs", 4096)), 4096, true).expect("mapped");
    assert!(theirs.read_only_fd().is_err() && !theirs.is_sealed());
    assert!(panics(|| view.copy_in(0, &[1])), "a write would raise SIGSEGV");
    assert!(panics(|| view.fill_with(0, 1, &mut |_, _| ())));
    assert!(panics(|| _ = view.atomic_u32(0)));
    assert!(panics(|| Region::copy_between(&view, 0, &region, 0, 1)));
    assert!(private(1).read_only_fd().is_err() && !private(1).is_sealed());
}

#[test]
fn out_of_bounds_ranges_panic_before_any_access() {
    let (region, other) = (private(4096), private(8192));
    let bad = [(4096, 1), (0, 4097), (4000, 97), (usize::MAX, 1), (1, usize::MAX)];
    for (offset, bytes) in bad {
        let mut memory = vec![0; bytes.min(5000)];
        if memory.len() == bytes {
            assert!(panics(|| region.copy_in(offset, &memory)));
            assert!(panics(|| region.copy_out(offset, &mut memory)));
        }
        assert!(panics(|| region.fill_with(offset, bytes, &mut |_, _| ())));
        assert!(panics(|| region.read_with(offset, bytes, &mut |_, _| ())));
        assert!(panics(|| Region::copy_between(&region, offset, &other, 0, bytes)));
        assert!(panics(|| Region::copy_between(&other, 0, &region, offset, bytes)));
        assert!(panics(|| drop(IoBuf::new(Arc::clone(&region), offset, bytes))));
    }
    for offset in [1, 2, 4093, 4096, usize::MAX] {
        assert!(panics(|| _ = region.atomic_u32(offset)), "{offset}");
        assert!(panics(|| _ = region.atomic_u64(offset)), "{offset}");
        assert!(panics(|| _ = region.load_u64(offset)), "{offset}");
    }
    region.copy_in(4096, &[]);
}

#[test]
fn a_buffer_stays_inside_its_range() {
    let region = private(100);
    region.copy_in(10, b"abcdefghij");
    let mut buffer = IoBuf::new(Arc::clone(&region), 10, 10);
    let mut two = [0; 2];
    buffer.slice(3, 2).copy_out(&mut two);
    assert_eq!(&two, b"de");
    buffer.advance(8);
    assert_eq!((buffer.offset(), buffer.bytes(), buffer.is_empty()), (18, 2, false));
    assert!(panics(|| drop(buffer.slice(0, 3))) && panics(|| drop(buffer.slice(usize::MAX, 2))));
    assert!(panics(|| buffer.copy_in(b"xyz")) && panics(|| buffer.copy_out(&mut [0; 3])));
    assert!(panics(|| buffer.clone().advance(3)));
    assert_eq!(IoBuf::whole(region).bytes(), 100);
}

/// Returns the mapping of a shared region, by its name, as the kernel lists it.
fn mapping_flags(name: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("our own maps");
    let entry = &maps[maps.find(&format!("/memfd:{name}"))?..];
    entry.lines().find(|line| line.starts_with("VmFlags")).map(str::to_owned)
}

#[test]
fn the_last_holder_unmaps_and_children_inherit_nothing() {
    let region = shared("kvplane-lifetime", 4096);
    let buffer = IoBuf::whole(Arc::clone(&region));
    drop(region);
    let flags = mapping_flags("kvplane-lifetime").expect("still held by the buffer");
    assert!(flags.contains(" dc"), "not kept from children: {flags}");
    drop(buffer);
    assert_eq!(mapping_flags("kvplane-lifetime"), None);
}

#[test]
fn a_mapped_file_is_read_and_never_written() {
    let path = std::env::temp_dir().join(format!("kvplane-region-{}", std::process::id()));
    std::fs::write(&path, [3u8; 5000]).expect("a file");
    let file = std::fs::File::open(&path).expect("it is there");
    std::fs::remove_file(&path).expect("it is there");
    let region = Region::map_file(&file, 5000).expect("mapped");
    assert_eq!((region.bytes(), region.writable(), region.fd().is_none()), (5000, false, true));
    let mut sum = 0;
    region.read_with(0, 5000, &mut |_, part| sum += part.iter().map(|&byte| u64::from(byte)).sum::<u64>());
    assert_eq!(sum, 15_000);
    assert!(matches!(Region::map_file(&file, 5001), Err(RegionError::TooShort { file_bytes: 5000, .. })));
    assert!(matches!(Region::map_file(&file, 0), Err(RegionError::Empty { .. })));
}

#[test]
fn adopted_memory_is_used_and_left_alone() {
    let mut memory = vec![1u8; 4096];
    // SAFETY: the vector outlives the region, and is not touched while the region lives.
    let region = unsafe { Region::adopt(memory.as_mut_ptr(), memory.len()) };
    region.copy_in(4095, &[9]);
    assert_eq!((region.bytes(), region.fd().is_none()), (4096, true));
    drop(region);
    assert_eq!((memory[4095], memory[0]), (9, 1));
}

#[test]
fn adopted_memory_that_is_mapped_read_only_is_read_only() {
    let path = std::env::temp_dir().join(format!("kvplane-read-only-{}", std::process::id()));
    std::fs::write(&path, [7u8; 8192]).unwrap();
    let file = Region::map_file(&std::fs::File::open(&path).unwrap(), 8192).unwrap();
    std::fs::remove_file(&path).unwrap();
    let memory = private(8192);
    let map = MemoryMap::read().unwrap();
    let is_writable = |region: &Region, from: u64, bytes: u64| {
        // SAFETY: the range is mapped as long as its region, which outlives this, and never accessed.
        let backing = unsafe { Backing::adopt(region.address() + from, bytes, Some(&map)) }.unwrap();
        backing.writable()
    };
    assert_eq!([(0, 8192), (4095, 2)].map(|(from, bytes)| is_writable(&file, from, bytes)), [false; 2]);
    assert_eq!([(0, 8192), (4095, 2)].map(|(from, bytes)| is_writable(&memory, from, bytes)), [true; 2]);
}

#[test]
fn unmapped_adopted_memory_is_detected() {
    let page = 4096;
    let memory = Arc::into_inner(private(4 * page)).expect("no other holder");
    assert!(memory.is_mapped(0, 4 * page), "what is ours stays");
    let start = memory.address() as *mut u8;
    // SAFETY: never accessed through this region, only queried.
    let adopted = unsafe { Region::adopt(start.wrapping_add(100), 4 * page - 100) };
    assert!(adopted.is_mapped(0, adopted.bytes()));
    // SAFETY: pages of the mapping above; this is its last use except for unmapping the rest.
    assert_eq!(unsafe { libc::munmap(start.wrapping_add(page).cast(), page) }, 0);
    let there = |from: usize, to: usize| adopted.is_mapped(from - 100, to - from);
    assert!(there(100, page) && there(2 * page, 4 * page) && there(page, page));
    assert!(!there(100, page + 1) && !there(2 * page - 1, 2 * page) && !there(100, 4 * page));
    let buffer = |from: usize, to: usize| IoBuf::new(Arc::clone(&adopted), from - 100, to - from);
    assert!(IoBuf::all_mapped(&[buffer(100, page), buffer(2 * page, 4 * page)]));
    assert!(!IoBuf::all_mapped(&[buffer(100, page), buffer(page, 4 * page)]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A copy between two places of regions does what `copy_within` does to a vector, at any size and alignment.
    #[test]
    fn copies_match_a_vector(
        from in 0usize..300_000, to in 0usize..300_000, bytes in 0usize..700_000, same: bool,
    ) {
        let size = 1_000_000;
        let (first, second) = (private(size), private(size));
        let source = &first;
        let destination = if same { &first } else { &second };
        let pattern = |at: u64| (at.wrapping_mul(0x9E37_79B9) >> 7) as u8;
        source.fill_with(0, size, &mut |at, chunk| {
            chunk.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(at + i as u64));
        });
        let mut expected: Vec<u8> = (0..size as u64).map(pattern).collect();
        let original = expected.clone();
        if !same {
            expected.fill(0);
        }
        expected[to..to + bytes].copy_from_slice(&original[from..from + bytes]);
        Region::copy_between(destination, to, source, from, bytes);
        let mut right = true;
        destination.read_with(0, size, &mut |at, chunk| {
            right &= *chunk == expected[at as usize..at as usize + chunk.len()];
        });
        prop_assert!(right);
    }
}
