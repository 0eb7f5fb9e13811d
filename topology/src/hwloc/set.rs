//! hwloc's notation for sets: words of 32 bits in hexadecimal, the highest first, `0x00000003,0xffffffff`.

use std::collections::BTreeSet;

/// Parses a set; returns none for members at or above `limit`, and for the mark of an infinite set.
pub(super) fn parse(text: &str, limit: usize) -> Option<BTreeSet<usize>> {
    let mut members = BTreeSet::new();
    let words: Vec<&str> = text.trim().split(',').collect();
    for (index, word) in words.iter().rev().enumerate() {
        // Words of zero may be left empty.
        let bits = match word.trim() {
            "" => 0,
            word => u32::from_str_radix(word.strip_prefix("0x")?, 16).ok()?,
        };
        for bit in (0..32).filter(|bit| bits >> bit & 1 == 1) {
            let member = index * 32 + bit;
            if member >= limit {
                return None;
            }
            members.insert(member);
        }
    }
    Some(members)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_go_from_the_highest_to_the_lowest() {
        assert_eq!(parse("0x00000003", 64), Some(BTreeSet::from([0, 1])));
        assert_eq!(parse("0x00000001,,0x80000000", 128), Some(BTreeSet::from([31, 64])));
        assert_eq!(parse("0x0", 64), Some(BTreeSet::new()));
        for odd in ["0xf...f", "3", "0x1ffffffff", "0x00000001,0x0,x"] {
            assert_eq!(parse(odd, 64), None, "{odd}");
        }
        assert_eq!(parse("0x00000001,0x00000000,0x00000000", 64), None);
    }

    proptest! {
        #[test]
        fn any_text_is_answered(text in "[0-9a-fx,.]{0,60}") {
            if let Some(members) = parse(&text, 96) {
                prop_assert!(members.iter().all(|&member| member < 96));
            }
        }
    }
}
