//! Random numbers from the kernel, for ids, seeds and nonces.

use std::io;

/// Returns 64 random bits of cryptographic quality. Blocks only until the kernel's generator is seeded, early in its
/// boot.
///
/// # Errors
/// When the kernel has no `getrandom`.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is writable and has the passed length; requests of up to 256 bytes are never cut short.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    match got {
        8 => Ok(u64::from_ne_bytes(bytes)),
        -1 => Err(io::Error::last_os_error()),
        got => Err(io::Error::other(format!("getrandom returned {got} bytes instead of 8"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ() {
        let mut drawn: Vec<u64> = (0..64).map(|_| random_u64().expect("a kernel with getrandom")).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 64);
    }
}
