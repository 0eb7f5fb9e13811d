//! Execution of fetch orders: a shard is read from the peer that the order names, verified, and the outcome noted.
//!
//! A shard is read in pieces, and each piece is hashed once it and all pieces before it have arrived: while it is in
//! the cache, and while later pieces are in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use kvplane_cluster::p2p::ShardPlace;
use kvplane_proto::digest::ContentHash;
use kvplane_transfer::{Batch, Opcode, SegmentHandle, SubmitOptions, TaskState, TransferRequest};

use crate::p2p::replica::{Replica, ShardOrder, Trouble, hash_range};
use crate::p2p::sources::Sources;

/// Bytes of a piece: small enough to be in the cache when it is hashed.
const PIECE_BYTES: u64 = 1 << 20;
/// Pieces of a shard that are in flight at a time, where they do not complete at once.
const PIECES: usize = 4;

/// Carries out orders until the fetch is stopped. `each` is called with each shard that has arrived and was verified.
pub(super) fn work(replica: &Replica, sources: &Sources<'_>, each: &(dyn Fn(u32) + Sync)) {
    while let Some(mut order) = replica.fetch.next_order() {
        loop {
            let outcome = bring(replica, sources, &order);
            if outcome.is_ok() {
                each(order.shard);
            }
            match replica.fetch.complete(&order, outcome) {
                Some(next) => order = next,
                None => break,
            }
        }
    }
}

/// Reads one shard to its position and verifies it. Returns its length.
fn bring(replica: &Replica, sources: &Sources<'_>, order: &ShardOrder) -> Result<u64, Trouble> {
    let Some(place) = replica.spec.layout.place(order.shard) else {
        return Err(Trouble::Source("the object has no such shard".to_owned()));
    };
    let target = sources.handle(&order.segment).map_err(|error| Trouble::Source(error.to_string()))?;
    let reading = ShardRead { replica, sources, order, place, target };
    let hash = reading.read();
    replica.fetch.end_pieces(order.shard);
    if hash? == replica.spec.hashes[order.shard as usize] { Ok(place.bytes) } else { Err(Trouble::Corrupt) }
}

/// Read of one shard.
struct ShardRead<'a> {
    replica: &'a Replica,
    sources: &'a Sources<'a>,
    order: &'a ShardOrder,
    place: ShardPlace,
    target: SegmentHandle,
}

impl ShardRead<'_> {
    /// Reads all pieces; returns the hash of the shard.
    fn read(&self) -> Result<u128, Trouble> {
        let (mut hash, mut asked, mut hashed) = (ContentHash::default(), 0, 0);
        let mut pieces: VecDeque<Arc<Batch>> = VecDeque::new();
        while hashed < self.place.bytes {
            // Where reads complete within `submit`, each piece is hashed before the next one is requested.
            let here = |pieces: &VecDeque<Arc<Batch>>| pieces.front().is_some_and(|first| first.is_done());
            while asked < self.place.bytes && pieces.len() < PIECES && !here(&pieces) {
                let bytes = PIECE_BYTES.min(self.place.bytes - asked);
                pieces.push_back(self.ask(asked, bytes)?);
                asked += bytes;
            }
            if let Some(first) = pieces.pop_front() {
                self.take(&first)?;
                let bytes = PIECE_BYTES.min(self.place.bytes - hashed);
                hash_range(&self.replica.regions, self.place.buffer, self.place.offset + hashed, bytes, &mut hash);
                hashed += bytes;
            }
        }
        Ok(hash.finish())
    }

    /// Submits the read of a piece.
    fn ask(&self, first: u64, bytes: u64) -> Result<Arc<Batch>, Trouble> {
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: self.replica.regions[self.place.buffer].address() + self.place.offset + first,
            target: self.target,
            target_offset: self.order.address + first,
            length: bytes,
        };
        let batch = self.sources.submit(&[request], &SubmitOptions::default());
        let batch = batch.inspect_err(|_| self.sources.suspect(&self.order.segment));
        let batch = Arc::new(batch.map_err(|error| Trouble::Source(error.to_string()))?);
        self.replica.fetch.add_piece(self.order.shard, &batch);
        Ok(batch)
    }

    /// Waits for the first piece in flight.
    fn take(&self, piece: &Arc<Batch>) -> Result<(), Trouble> {
        let status = piece.wait();
        // Pieces are waited for in order.
        self.replica.fetch.end_piece(self.order.shard);
        if status.state == TaskState::Completed {
            return Ok(());
        }
        if status.state != TaskState::Canceled {
            self.sources.suspect(&self.order.segment);
        }
        let why = piece.problem().map_or_else(|| format!("{:?}", status.state), str::to_owned);
        Err(Trouble::Source(why))
    }
}
