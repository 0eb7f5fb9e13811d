//! Verification of range reads: shards that were read completely are compared with their hashes.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvplane_cluster::reshard::{Copy, Piece, whole_shards};
use kvplane_engine::Region;
use kvplane_proto::digest::ContentHash;
use kvplane_rpc::p2p::ObjectPlace;

use super::batches::Batches;
use crate::p2p::catalog::Object;

/// Limit of shard pieces kept at a time.
const PIECES: usize = 1 << 20;
/// Bytes that are hashed at a time, on the stack.
const CHUNK: usize = 16 << 10;

/// Result of a verification.
pub(super) enum ContentCheck {
    /// All complete shards match; their total bytes.
    Right(u64),
    /// First shard that does not match, and the peers that serve it wrong, where that can be determined.
    Wrong(u32, BTreeSet<String>),
}

/// Bytes of one buffer of an object, as they were read into memory.
pub(super) struct Content<'a> {
    pub(super) object: &'a Object,
    pub(super) buffer: usize,
    pub(super) memory: &'a Arc<Region>,
}

impl Content<'_> {
    /// Verifies the shards that the copies cover completely. `served` names the peer that each batch came from, and
    /// `read` reads copies from one peer again, and returns true if it served them.
    pub(super) fn check<I: Iterator<Item = Copy>>(
        &self,
        copies: &impl Fn() -> I,
        served: &[ObjectPlace],
        read: impl Fn(&[Copy], &ObjectPlace) -> bool,
    ) -> ContentCheck {
        let by_batch = || {
            let batches = Batches::of(copies()).enumerate();
            batches.flat_map(|(number, batch)| batch.into_iter().map(move |copy| (number as u32, copy)))
        };
        let (mut checked, mut wrong) = (0, None);
        whole_shards(&self.object.layout, self.buffer, by_batch, PIECES, |shard, pieces| {
            if wrong.is_none() {
                match self.matches(shard, pieces) {
                    true => checked += pieces.iter().map(|piece| piece.bytes).sum::<u64>(),
                    false => wrong = Some((shard, pieces.to_vec())),
                }
            }
        });
        let Some((shard, pieces)) = wrong else { return ContentCheck::Right(checked) };
        let numbers: BTreeSet<u32> = pieces.iter().map(|piece| piece.tag).collect();
        let mut sources: Vec<&ObjectPlace> = numbers.into_iter().map(|number| &served[number as usize]).collect();
        sources.sort_by(|one, other| one.segment.cmp(&other.segment));
        sources.dedup_by(|one, other| one.segment == other.segment);
        if sources.len() > 1 {
            // The complete shard is read from each peer.
            let copy = |piece: &Piece| Copy {
                source_offset: piece.source_offset,
                target_offset: piece.target_offset,
                bytes: piece.bytes,
            };
            let again: Vec<Copy> = pieces.iter().map(copy).collect();
            sources.retain(|source| {
                let mut batches = Batches::of(again.iter().copied());
                batches.all(|batch| read(&batch, source)) && !self.matches(shard, &pieces)
            });
        }
        ContentCheck::Wrong(shard, sources.into_iter().map(|source| source.segment.clone()).collect())
    }

    fn matches(&self, shard: u32, pieces: &[Piece]) -> bool {
        let (mut hash, mut chunk, mut filled) = (ContentHash::default(), [0; CHUNK], 0);
        for piece in pieces {
            let (mut at, mut left) = (piece.target_offset as usize, piece.bytes as usize);
            while left > 0 {
                let bytes = left.min(CHUNK - filled);
                self.memory.copy_out(at, &mut chunk[filled..filled + bytes]);
                (at, left, filled) = (at + bytes, left - bytes, filled + bytes);
                if filled == CHUNK {
                    hash.update(&chunk);
                    filled = 0;
                }
            }
        }
        hash.update(&chunk[..filled]);
        hash.finish() == self.object.spec.hashes[shard as usize]
    }
}
