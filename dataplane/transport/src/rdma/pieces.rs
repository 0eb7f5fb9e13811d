//! Arithmetic on payloads in several pieces of memory.

use kvplane_sys::{IoBuf, Region};

/// Copies from `from`, skipping its first `skip` bytes, as much as fits into `to`. Returns the number of bytes copied.
pub(super) fn copy(from: &[IoBuf], mut skip: usize, to: &[IoBuf]) -> usize {
    let (mut copied, mut targets) = (0, to.iter());
    let mut room: Option<IoBuf> = None;
    for source in from {
        if skip >= source.bytes() {
            skip -= source.bytes();
            continue;
        }
        let mut rest = source.slice(skip, source.bytes() - skip);
        skip = 0;
        while !rest.is_empty() {
            let left = room.take().filter(|place| !place.is_empty());
            let Some(place) = left.or_else(|| targets.next().cloned()) else { return copied };
            let bytes = rest.bytes().min(place.bytes());
            Region::copy_between(place.region(), place.offset(), rest.region(), rest.offset(), bytes);
            rest.advance(bytes);
            copied += bytes;
            room = Some(place.slice(bytes, place.bytes() - bytes));
        }
    }
    copied
}

/// Copies bytes into pieces that together have room for them.
pub(super) fn put(bytes: &[u8], to: &[IoBuf]) {
    let mut rest = bytes;
    for place in to {
        let (part, after) = rest.split_at(place.bytes().min(rest.len()));
        place.copy_in(part);
        rest = after;
    }
}

/// Returns the first `bytes` bytes of the pieces; `None` if they are shorter.
pub(super) fn front(pieces: &[IoBuf], mut bytes: u64) -> Option<Vec<IoBuf>> {
    let mut front = Vec::new();
    for piece in pieces {
        if bytes == 0 {
            break;
        }
        let part = bytes.min(piece.bytes() as u64);
        front.push(piece.slice(0, part as usize));
        bytes -= part;
    }
    (bytes == 0).then_some(front)
}

/// Returns true if both are the same memory.
pub(super) fn same(left: &[IoBuf], right: &[IoBuf]) -> bool {
    let is_same = |(left, right): (&IoBuf, &IoBuf)| {
        std::sync::Arc::ptr_eq(left.region(), right.region())
            && (left.offset(), left.bytes()) == (right.offset(), right.bytes())
    };
    left.len() == right.len() && left.iter().zip(right).all(is_same)
}

/// Cursor over pieces, from which parts are cut off.
pub(super) struct Cutter<'a> {
    pieces: &'a [IoBuf],
    at: usize,
}

impl<'a> Cutter<'a> {
    pub(super) const fn new(pieces: &'a [IoBuf], at: usize) -> Self {
        Self { pieces, at }
    }

    /// Returns the next parts: at most `parts`, together at most `bytes` long. Empty pieces are skipped.
    pub(super) fn cut(&mut self, parts: usize, mut bytes: u64) -> Vec<IoBuf> {
        let mut cut = Vec::new();
        while cut.len() < parts && bytes > 0 {
            let Some((piece, rest)) = self.pieces.split_first() else { break };
            let part = bytes.min((piece.bytes() - self.at) as u64) as usize;
            if part > 0 {
                cut.push(piece.slice(self.at, part));
            }
            self.at += part;
            bytes -= part as u64;
            if self.at == piece.bytes() {
                (self.pieces, self.at) = (rest, 0);
            }
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::checksum_of_pieces;
    use kvplane_sys::{HugePages, RegionOptions};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn cut_up(region: &Arc<Region>, lengths: &[usize]) -> Vec<IoBuf> {
        let mut at = 0;
        let mut pieces = Vec::new();
        for &bytes in lengths {
            pieces.push(IoBuf::new(Arc::clone(region), at, bytes));
            at += bytes;
        }
        pieces
    }

    proptest! {
        #[test]
        fn copies_between_any_pieces(
            from in proptest::collection::vec(0usize..300, 1..8),
            to in proptest::collection::vec(0usize..300, 1..8),
            skip in 0usize..400,
        ) {
            let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("pieces", 4096) };
            let (source, target) = (Region::allocate(&options).unwrap(), Region::allocate(&options).unwrap());
            let bytes: Vec<u8> = (0..4096u32).map(|at| (at * 7 + 3) as u8).collect();
            source.copy_in(0, &bytes);
            let (sources, targets) = (cut_up(&source, &from), cut_up(&target, &to));
            let (have, room): (usize, usize) = (from.iter().sum(), to.iter().sum());
            let wanted = have.saturating_sub(skip).min(room);
            prop_assert_eq!(copy(&sources, skip, &targets), wanted);
            let mut found = vec![0; wanted];
            target.copy_out(0, &mut found);
            prop_assert_eq!(&found[..], &bytes[skip.min(have)..][..wanted]);
            let mut cutter = Cutter::new(&sources, 0);
            let mut cut = 0;
            loop {
                let parts = cutter.cut(2, 100);
                prop_assert!(parts.len() <= 2);
                let bytes: usize = parts.iter().map(IoBuf::bytes).sum();
                prop_assert!(bytes <= 100);
                if bytes == 0 { break; }
                prop_assert_eq!(parts[0].offset(), cut);
                cut += bytes;
            }
            prop_assert_eq!(cut, have);
            let whole = front(&sources, have as u64);
            prop_assert_eq!(whole.map(|whole| checksum_of_pieces(&whole)), Some(checksum_of_pieces(&sources)));
            prop_assert!(front(&sources, have as u64 + 1).is_none());
        }
    }
}
