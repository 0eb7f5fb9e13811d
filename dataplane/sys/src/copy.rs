//! Copies between memory that other parties may write at the same time.
//!
//! Registered memory is written by peers, by the kernel and by network cards while this process reads it. A Rust
//! reference or an ordinary load would promise the compiler that this does not happen, so every access here is opaque
//! to the compiler: the C library's `memmove`, called through a pointer that the optimizer cannot see through, or
//! inline assembly. On x86-64 each such access moves every byte as one relaxed atomic access of that byte would. A race
//! therefore tears the data, which checksums and generations detect, and never breaks the program.
//!
//! Big copies bypass the cache: a block that is copied once and then sent should not evict the index from the cache,
//! and a store that does not first read its line saves a third of the memory traffic.
//!
//! This module only moves bytes; the callers check ranges.

use core::arch::asm;
use core::hint::black_box;
use std::arch::is_x86_feature_detected;

/// Least size of copies between regions that bypass the cache, in bytes.
pub const STREAMING_BYTES: usize = 256 << 10;

/// Bytes moved by one iteration of the streaming loops.
const ROUND_BYTES: usize = 256;

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
    let disjoint = (destination as usize).abs_diff(source as usize) >= bytes;
    let avx512 = is_x86_feature_detected!("avx512f");
    if bytes < STREAMING_BYTES || !disjoint || !(avx512 || is_x86_feature_detected!("avx2")) {
        // SAFETY: the contract of this function is that of copy_bytes.
        unsafe { copy_bytes(destination, source, bytes) };
        return;
    }
    // Streaming stores need an aligned destination; head and tail are copied by memmove.
    let head = destination.align_offset(64).min(bytes);
    let body = (bytes - head) / ROUND_BYTES * ROUND_BYTES;
    let tail = bytes - head - body;
    // SAFETY: head + body + tail == bytes, so all three parts stay inside the ranges the caller vouches for; body is
    // a positive multiple of ROUND_BYTES because bytes >= STREAMING_BYTES; the destination of the body is aligned to
    // 64; the feature each loop needs was detected above.
    unsafe {
        copy_bytes(destination, source, head);
        let (to, from) = (destination.add(head), source.add(head));
        if avx512 {
            stream_avx512(to, from, body);
        } else {
            stream_avx2(to, from, body);
        }
        copy_bytes(to.add(body), from.add(body), tail);
    }
}

/// Streaming loop with 64-byte registers. Ends with a store fence: streaming stores are weakly ordered, and what the
/// caller publishes next (a flag, a doorbell, a completion) must not overtake them.
///
/// # Safety
///
/// AVX-512F must be present, `to` aligned to 64, `bytes` a positive multiple of `ROUND_BYTES`, both ranges valid.
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: reads [from, from + bytes) and writes [to, to + bytes), which the caller vouches for; prefetches past
    // the end never fault; the flags, the pointers and the four registers are declared as changed.
    unsafe {
        asm!(
            "2:",
            "prefetcht0 [{from} + 1024]",
            "prefetcht0 [{from} + 1088]",
            "prefetcht0 [{from} + 1152]",
            "prefetcht0 [{from} + 1216]",
            "vmovdqu64 zmm16, [{from}]",
            "vmovdqu64 zmm17, [{from} + 64]",
            "vmovdqu64 zmm18, [{from} + 128]",
            "vmovdqu64 zmm19, [{from} + 192]",
            "vmovntdq [{to}], zmm16",
            "vmovntdq [{to} + 64], zmm17",
            "vmovntdq [{to} + 128], zmm18",
            "vmovntdq [{to} + 192], zmm19",
            "add {from}, 256",
            "add {to}, 256",
            "sub {left}, 256",
            "jnz 2b",
            "sfence",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) bytes => _,
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
            options(nostack),
        );
    }
}

/// Streaming loop with 32-byte registers; otherwise like [`stream_avx512`].
///
/// # Safety
///
/// AVX2 must be present, `to` aligned to 32, `bytes` a positive multiple of `ROUND_BYTES`, both ranges valid.
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: as in stream_avx512.
    unsafe {
        asm!(
            "2:",
            "prefetcht0 [{from} + 1024]",
            "prefetcht0 [{from} + 1088]",
            "prefetcht0 [{from} + 1152]",
            "prefetcht0 [{from} + 1216]",
            "vmovdqu ymm0, [{from}]",
            "vmovdqu ymm1, [{from} + 32]",
            "vmovdqu ymm2, [{from} + 64]",
            "vmovdqu ymm3, [{from} + 96]",
            "vmovdqu ymm4, [{from} + 128]",
            "vmovdqu ymm5, [{from} + 160]",
            "vmovdqu ymm6, [{from} + 192]",
            "vmovdqu ymm7, [{from} + 224]",
            "vmovntdq [{to}], ymm0",
            "vmovntdq [{to} + 32], ymm1",
            "vmovntdq [{to} + 64], ymm2",
            "vmovntdq [{to} + 96], ymm3",
            "vmovntdq [{to} + 128], ymm4",
            "vmovntdq [{to} + 160], ymm5",
            "vmovntdq [{to} + 192], ymm6",
            "vmovntdq [{to} + 224], ymm7",
            "add {from}, 256",
            "add {to}, 256",
            "sub {left}, 256",
            "jnz 2b",
            "sfence",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) bytes => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            options(nostack),
        );
    }
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
    fn each_streaming_loop_moves_every_byte() {
        let bytes = 64 * ROUND_BYTES;
        let source = pattern(bytes);
        let mut loops: Vec<Copy> = Vec::new();
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was just detected.
            loops.push(|to, from, bytes| unsafe { stream_avx2(to, from, bytes) });
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected.
            loops.push(|to, from, bytes| unsafe { stream_avx512(to, from, bytes) });
        }
        for stream in loops {
            let mut destination = vec![0u8; bytes + 128];
            let shift = destination.as_ptr().align_offset(64);
            // SAFETY: the destination has room behind the shift and is aligned; the source is as long.
            unsafe { stream(destination.as_mut_ptr().add(shift), source.as_ptr(), bytes) };
            assert!(destination[shift..shift + bytes] == source[..]);
            assert!(destination[shift + bytes..].iter().all(|&byte| byte == 0));
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
