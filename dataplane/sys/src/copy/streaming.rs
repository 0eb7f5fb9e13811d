//! Streaming loops of x86-64: stores that bypass the cache, chosen at run time by the CPU's features.

use core::arch::asm;
use std::arch::is_x86_feature_detected;

use super::copy_bytes;

/// Bytes moved by one iteration of the loops.
const ROUND_BYTES: usize = 256;

/// Loop that moves a positive multiple of `ROUND_BYTES` to an address aligned to 64.
pub(super) type Stream = unsafe fn(*mut u8, *const u8, usize);

/// Returns the fastest loop that this CPU has.
pub(super) fn fastest() -> Option<Stream> {
    if is_x86_feature_detected!("avx512f") {
        return Some(stream_avx512);
    }
    is_x86_feature_detected!("avx2").then_some(stream_avx2 as Stream)
}

/// Copies `bytes` bytes between disjoint ranges with this loop.
///
/// # Safety
///
/// See [`copy_bytes`]; `bytes` is at least [`super::STREAMING_BYTES`], and the CPU has the features of `stream`.
pub(super) unsafe fn copy(stream: Stream, destination: *mut u8, source: *const u8, bytes: usize) {
    // Streaming stores need an aligned destination; head and tail are copied by memmove.
    let head = destination.align_offset(64).min(bytes);
    let body = (bytes - head) / ROUND_BYTES * ROUND_BYTES;
    let tail = bytes - head - body;
    // SAFETY: head + body + tail == bytes, so all three parts stay inside the ranges the caller vouches for; body is
    // a positive multiple of ROUND_BYTES because bytes >= STREAMING_BYTES; the destination of the body is aligned to
    // 64; the caller vouches for the features that the loop needs.
    unsafe {
        copy_bytes(destination, source, head);
        let (to, from) = (destination.add(head), source.add(head));
        stream(to, from, body);
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

    #[test]
    fn each_streaming_loop_moves_every_byte() {
        let bytes = 64 * ROUND_BYTES;
        let source: Vec<u8> = (0..bytes).map(|i| (i * 31 + i / 251) as u8).collect();
        let mut loops: Vec<Stream> = Vec::new();
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
}
