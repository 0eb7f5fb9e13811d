//! Pieces of memory as if they were contiguous, and the pieces of a range of them.

/// Pieces of memory in order, as if they were contiguous.
#[derive(Debug)]
pub(crate) struct PieceList<T> {
    pieces: Vec<T>,
    /// Position behind each piece.
    ends: Vec<u64>,
}

impl<T> PieceList<T> {
    /// Creates the list; `bytes_of` returns the length of a piece.
    pub(crate) fn new(pieces: Vec<T>, bytes_of: impl Fn(&T) -> u64) -> Self {
        let mut end = 0;
        let ends = pieces.iter().map(|piece| {
            end += bytes_of(piece);
            end
        });
        Self { ends: ends.collect(), pieces }
    }

    /// Returns the length of all pieces in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the pieces of a range, in order, each with the offset and the length of its part of the range.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn range(&self, offset: u64, bytes: u64) -> impl Iterator<Item = (&T, u64, u64)> {
        let until = offset + bytes;
        assert!(until <= self.bytes(), "{bytes} bytes at {offset} of {} in pieces", self.bytes());
        let first = self.ends.partition_point(|end| *end <= offset);
        let start_of = |at: usize| at.checked_sub(1).map_or(0, |before| self.ends[before]);
        let touched = (first..self.pieces.len()).take_while(move |at| start_of(*at) < until);
        touched.filter_map(move |at| {
            let start = start_of(at);
            let (from, to) = (offset.max(start), until.min(self.ends[at]));
            (from < to).then(|| (&self.pieces[at], from - start, to - from))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_the_bytes_of_the_joined_pieces(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 1..9),
            draws in any::<[u64; 2]>(),
        ) {
            let joined = pieces.concat();
            let list = PieceList::new(pieces, |piece| piece.len() as u64);
            prop_assert_eq!(list.bytes(), joined.len() as u64);
            let offset = draws[0] % (list.bytes() + 1);
            let bytes = draws[1] % (list.bytes() - offset + 1);
            let mut found = Vec::new();
            for (piece, from, length) in list.range(offset, bytes) {
                prop_assert!(length > 0, "no empty piece");
                found.extend_from_slice(&piece[from as usize..(from + length) as usize]);
            }
            prop_assert_eq!(found, &joined[offset as usize..(offset + bytes) as usize]);
        }
    }
}
