//! Narrower numbers from wider ones: checked where a limit keeps the number small, and the low bits where the others
//! are dropped on purpose.
//!
//! A number that exceeds its limit is a bug of the caller and panics: truncated, it would be another length or offset
//! on the wire or on a device, and nothing would notice. Numbers that a peer or a user chooses are checked before, with
//! `try_from` and an error.

/// Narrows a number that a limit keeps below 2^8. Panics if it does not fit.
#[inline]
#[must_use]
#[track_caller]
#[expect(clippy::cast_possible_truncation, reason = "checked")]
pub const fn to_u8(number: u64) -> u8 {
    assert!(number <= u8::MAX as u64, "a number of 8 bits");
    number as u8
}

/// Narrows a number that a limit keeps below 2^32. Panics if it does not fit.
#[inline]
#[must_use]
#[track_caller]
#[expect(clippy::cast_possible_truncation, reason = "checked")]
pub const fn to_u32(number: u64) -> u32 {
    assert!(number <= u32::MAX as u64, "a number of 32 bits");
    number as u32
}

/// Converts a number of bytes or items that are in memory. Panics if it does not fit.
#[inline]
#[must_use]
#[track_caller]
#[expect(clippy::cast_possible_truncation, reason = "checked")]
pub const fn to_usize(number: u64) -> usize {
    assert!(number <= usize::MAX as u64, "a number of things in memory");
    number as usize
}

/// Narrows a length that a limit keeps below 2^8. Panics if it does not fit.
#[inline]
#[must_use]
#[track_caller]
#[expect(clippy::cast_possible_truncation, reason = "checked")]
pub const fn length_u8(length: usize) -> u8 {
    assert!(length <= u8::MAX as usize, "a length of 8 bits");
    length as u8
}

/// Narrows a length that a limit keeps below 2^16. Panics if it does not fit.
#[inline]
#[must_use]
#[track_caller]
#[expect(clippy::cast_possible_truncation, reason = "checked")]
pub const fn length_u16(length: usize) -> u16 {
    assert!(length <= u16::MAX as usize, "a length of 16 bits");
    length as u16
}

/// Narrows a length that a limit keeps below 2^32. Panics if it does not fit.
#[inline]
#[must_use]
#[track_caller]
#[expect(clippy::cast_possible_truncation, reason = "checked")]
pub const fn length_u32(length: usize) -> u32 {
    assert!(length <= u32::MAX as usize, "a length of 32 bits");
    length as u32
}

/// Returns the low 8 bits of a word.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the other bits are dropped on purpose")]
pub const fn low_u8(word: u64) -> u8 {
    word as u8
}

/// Returns the low 16 bits of a word.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the other bits are dropped on purpose")]
pub const fn low_u16(word: u64) -> u16 {
    word as u16
}

/// Returns the low 32 bits of a word.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the other bits are dropped on purpose")]
pub const fn low_u32(word: u64) -> u32 {
    word as u32
}

/// Returns the low 64 bits of a word.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the other bits are dropped on purpose")]
pub const fn low_u64(word: u128) -> u64 {
    word as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_numbers_fit() {
        assert_eq!((to_u8(255), to_u32(u64::from(u32::MAX)), to_usize(u64::MAX)), (u8::MAX, u32::MAX, usize::MAX));
        assert_eq!((length_u8(255), length_u16(65_535), length_u32(4_294_967_295)), (u8::MAX, u16::MAX, u32::MAX));
    }

    #[test]
    fn numbers_above_panic() {
        let panics = |call: fn()| std::panic::catch_unwind(call).is_err();
        assert!(panics(|| _ = to_u8(256)) && panics(|| _ = to_u32(1 << 32)));
        assert!(
            panics(|| _ = length_u8(256)) && panics(|| _ = length_u16(1 << 16)) && panics(|| _ = length_u32(1 << 32))
        );
    }

    #[test]
    fn low_bits_drop_the_others() {
        let word = 0x0123_4567_89ab_cdef;
        assert_eq!((low_u8(word), low_u16(word), low_u32(word)), (0xef, 0xcdef, 0x89ab_cdef));
        assert_eq!(low_u64(7 << 64 | 9), 9);
    }
}
