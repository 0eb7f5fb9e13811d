//! Detection of shards that copies cover completely: they can be verified by their hashes, wherever they were copied
//! to.

use super::copies::Copy;
use crate::p2p::Layout;

/// Bytes of a shard that one copy covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the source's buffer.
    pub source_offset: u64,
    /// Offset at the target.
    pub target_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Tag that the caller gave the copy.
    pub tag: u32,
}

/// Calls `each` for every shard of a buffer whose bytes are all copied, in ascending order: with its number, and the
/// pieces that cover it from its first byte to its last. If bytes are copied to several places, one of these is used.
///
/// `copies` must return the same tagged copies each time; parts of them beyond the buffer are ignored. It is called
/// once, and again for about every `most` pieces: at most `most` pieces, or those of one shard, are held in memory.
pub fn whole_shards<I: Iterator<Item = (u32, Copy)>>(
    layout: &Layout,
    buffer: usize,
    copies: impl Fn() -> I,
    most: usize,
    mut each: impl FnMut(u32, &[Piece]),
) {
    let Some(&size) = layout.sizes().get(buffer) else { return };
    let Some((first, count)) = layout.covering(buffer, 0, size) else { return };
    let shard_bytes = layout.shard_bytes();
    let end_of = |shard: usize| (shard as u64 * shard_bytes).saturating_add(shard_bytes).min(size);
    let mut taken = vec![(0u64, 0usize); count as usize];
    for (tag, copy) in copies() {
        for (shard, piece) in cut(copy, tag, shard_bytes, size) {
            let (bytes, pieces) = &mut taken[shard];
            (*bytes, *pieces) = (bytes.saturating_add(piece.bytes), *pieces + 1);
        }
    }
    // Fewer bytes cannot cover the shard; as many may still cover some bytes twice.
    let may_be = |shard: usize| taken[shard].0 >= end_of(shard) - shard as u64 * shard_bytes;
    let mut next = 0;
    while next < taken.len() {
        let (start, mut held) = (next, 0);
        while next < taken.len() {
            let pieces = if may_be(next) { taken[next].1 } else { 0 };
            if held > 0 && held + pieces > most {
                break;
            }
            (held, next) = (held + pieces, next + 1);
        }
        if held == 0 {
            continue;
        }
        let mut pieces = Vec::with_capacity(held);
        for (tag, copy) in copies() {
            let cut = cut(copy, tag, shard_bytes, size);
            pieces.extend(cut.filter(|&(shard, _)| (start..next).contains(&shard) && may_be(shard)));
        }
        pieces.sort_unstable_by_key(|(_, piece)| (piece.source_offset, piece.target_offset));
        for of_one in pieces.chunk_by(|one, other| one.0 == other.0) {
            let shard = of_one[0].0;
            let (whole, end) = in_order(of_one, shard as u64 * shard_bytes);
            if end == end_of(shard) {
                each(first + shard as u32, &whole);
            }
        }
    }
}

/// Splits a copy by shards of the buffer, counted from its first.
fn cut(copy: Copy, tag: u32, shard_bytes: u64, size: u64) -> impl Iterator<Item = (usize, Piece)> {
    let end = copy.source_offset.saturating_add(copy.bytes).min(size);
    let mut at = copy.source_offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let shard = at / shard_bytes;
        let bytes = (shard_bytes - at % shard_bytes).min(end - at);
        let target_offset = copy.target_offset.saturating_add(at - copy.source_offset);
        let piece = Piece { source_offset: at, target_offset, bytes, tag };
        at += bytes;
        Some((shard as usize, piece))
    })
}

/// Returns the contiguous sequence of sorted pieces from `start` on, and its end.
fn in_order(pieces: &[(usize, Piece)], start: u64) -> (Vec<Piece>, u64) {
    let (mut whole, mut end) = (Vec::with_capacity(pieces.len()), start);
    for &(_, piece) in pieces {
        if piece.source_offset > end {
            break;
        }
        let twice = end - piece.source_offset;
        if twice < piece.bytes {
            whole.push(Piece {
                source_offset: end,
                target_offset: piece.target_offset + twice,
                bytes: piece.bytes - twice,
                tag: piece.tag,
            });
            end += piece.bytes - twice;
        }
    }
    (whole, end)
}
