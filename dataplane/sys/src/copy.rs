//! Copies between memory that other parties may write at the same time.
//!
//! Registered memory is written by peers, by the kernel and by network cards while this process reads it. A Rust
//! reference or an ordinary load would promise the compiler that this does not happen, so every access here is opaque
//! to the compiler: the C library's `memmove`, called through a pointer that the optimizer cannot see through, or
//! inline assembly. On x86-64 and aarch64 each such access moves every byte as one relaxed atomic access of that byte
//! would. A race therefore tears the data, which checksums and generations detect, and never breaks the program.
//!
//! Big copies bypass the cache: a block that is copied once and then sent should not evict the index from the cache,
//! and a store that does not first read its line saves a third of the memory traffic. On aarch64 the C library decides
//! that by itself.
//!
//! This module only moves bytes; the callers check ranges.

use core::hint::black_box;

#[cfg(target_arch = "x86_64")]
mod streaming;

/// Least size of copies between regions that bypass the cache, in bytes.
pub const STREAMING_BYTES: usize = 256 << 10;

type MoveFunction = unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void;

/// Copies `bytes` bytes as if through a temporary buffer, so that overlap is allowed.
///
/// # Safety
///
/// `source` must be readable and `destination` writable for `bytes` bytes. Other parties may access both meanwhile,
/// except through Rust references.
#[cfg_attr(not(feature = "verbs-provider"), allow(unreachable_pub, reason = "reachable with the feature"))]
pub unsafe fn copy_bytes(destination: *mut u8, source: *const u8, bytes: usize) {
    let function: MoveFunction = black_box(libc::memmove);
    // SAFETY: the caller vouches for both ranges; memmove allows them to overlap.
    unsafe {
        function(destination.cast(), source.cast(), bytes);
    }
}

/// Copies `bytes` bytes; bypasses the cache if there are many and the ranges are disjoint.
///
/// # Safety
///
/// See [`copy_bytes`].
pub(crate) unsafe fn copy_streaming(destination: *mut u8, source: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let disjoint = (destination as usize).abs_diff(source as usize) >= bytes;
        if let Some(stream) = streaming::fastest().filter(|_| disjoint && bytes >= STREAMING_BYTES) {
            // SAFETY: the contract of this function, and the condition above.
            return unsafe { streaming::copy(stream, destination, source, bytes) };
        }
    }
    // SAFETY: the contract of this function is that of copy_bytes.
    unsafe { copy_bytes(destination, source, bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    type Copy = unsafe fn(*mut u8, *const u8, usize);

    /// Every byte of the range arrives and no byte around it changes, at every alignment of both ends.
    fn check(copy: Copy, bytes: usize, source_shift: usize, destination_shift: usize) {
        let source = pattern(bytes + 64);
        let mut destination = vec![0xEE; bytes + 256];
        let from = &source[source_shift..source_shift + bytes];
        // SAFETY: both vectors are longer than the shifted ranges, and distinct.
        unsafe {
            let to = destination.as_mut_ptr().add(destination_shift);
            copy(to, from.as_ptr(), bytes);
        }
        let (before, rest) = destination.split_at(destination_shift);
        let (copied, after) = rest.split_at(bytes);
        assert!(before.iter().chain(after).all(|&byte| byte == 0xEE), "wrote outside the range");
        assert!(copied == from, "bytes differ: {bytes} {source_shift} {destination_shift}");
    }

    #[test]
    fn copies_exactly_the_range() {
        for bytes in [0, 1, 63, 64, 255, 4096, STREAMING_BYTES - 1, STREAMING_BYTES, STREAMING_BYTES + 77] {
            for (source_shift, destination_shift) in [(0, 0), (1, 0), (0, 1), (13, 63), (63, 17)] {
                check(copy_bytes, bytes, source_shift, destination_shift);
                check(copy_streaming, bytes, source_shift, destination_shift);
            }
        }
    }

    #[test]
    fn overlap_is_copied_as_through_a_temporary() {
        for (to, from) in [(0, 4096), (4096, 0)] {
            let mut memory = pattern(STREAMING_BYTES * 2);
            let expected = memory[from..from + STREAMING_BYTES].to_vec();
            let base = memory.as_mut_ptr();
            // SAFETY: both ranges lie inside the vector; overlap is what is tested.
            unsafe { copy_streaming(base.add(to), base.add(from), STREAMING_BYTES) };
            assert!(memory[to..to + STREAMING_BYTES] == expected[..]);
        }
    }
}
