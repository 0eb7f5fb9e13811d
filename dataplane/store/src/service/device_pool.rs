//! Device pool: objects that are often read move into memory of an accelerator, and back.
//!
//! *Promotion*: a get over a stream that finds an object among those that the eviction policy ranks as accessed again
//! moves it into the device pool, which frees its memory for others. *Demotion*: where the device pool has no room for
//! it, the object that its eviction policy names moves back to memory first, and is evicted only from there. *Recall*:
//! an object that is needed in memory, for a peer that maps it or to be replicated, moves back at once.
//!
//! The host makes the copies, which [`DevicePool::poll`] names, and reports each by [`DevicePool::moved`]. An object
//! has one entry and one place at any time; gets during a move are answered from the place that it leaves.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::{Digest, Status};

use super::shard::Shard;
use super::shard::stream_read::Reader;
use crate::store::{NoMove, PoolMove};

/// Lengths of objects that are promoted, in bytes: for shorter ones, a copy of the device's engines costs more than the
/// memory is worth; longer ones do not pass through the memory that gets are staged in.
pub const DEVICE_OBJECT_BYTES: core::ops::RangeInclusive<u64> = 4096..=16 << 20;

/// Most moves in flight.
const MOVES_MOST: usize = 8;
/// Most objects that wait to be promoted; of further ones a later get asks again.
const WANTED_MOST: usize = 64;
/// Most gets that wait for recalls.
const READERS_MOST: usize = 4096;
/// Room that is made for one promotion, in multiples of its length, before it is given up: free space may be scattered.
const SCATTERED: u64 = 2;

/// Number of a move.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct MoveId(u64);

/// Outcome of the copies of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveOutcome {
    /// Bytes and tail are at the destination, and match their checksum as far as the host can read them.
    Copied,
    /// The bytes that came from the device do not match their checksum.
    Corrupt,
    /// The device is lost; its engines may still write to the destination.
    Lost,
}

/// Object to be promoted.
#[derive(Debug)]
struct Candidate {
    digest: Digest,
    bytes: u64,
    /// Bytes that were demoted for it.
    demoted_bytes: u64,
}

/// Moves between the pool and the device pool of a shard.
#[derive(Debug, Default)]
pub(super) struct DevicePool {
    wanted: VecDeque<Candidate>,
    /// Objects to be recalled.
    recalls: VecDeque<Digest>,
    /// Gets that wait for objects to be recalled.
    readers: BTreeMap<Digest, Vec<Reader>>,
    waiting_readers: usize,
    moves: BTreeMap<MoveId, PoolMove>,
    demotions: usize,
    last: u64,
    is_lost: bool,
}

impl DevicePool {
    /// Enqueues an object of this length to be promoted.
    pub(super) fn promote(&mut self, digest: Digest, bytes: u64) {
        let is_full = self.is_lost || self.wanted.len() >= WANTED_MOST || !DEVICE_OBJECT_BYTES.contains(&bytes);
        if !is_full && !self.is_moving(digest) && self.wanted.iter().all(|wanted| wanted.digest != digest) {
            self.wanted.push_back(Candidate { digest, bytes, demoted_bytes: 0 });
        }
    }

    /// Enqueues an object of the device pool to be moved back to memory, and the get that waits for it.
    ///
    /// # Errors
    /// `Busy` if too many gets wait.
    pub(super) fn recall(&mut self, shard: &mut Shard, digest: Digest, reader: Option<Reader>) -> Result<(), Status> {
        if reader.is_some() && self.waiting_readers >= READERS_MOST {
            return Err(Status::Busy);
        }
        let is_new = !self.readers.contains_key(&digest);
        let readers = self.readers.entry(digest).or_default();
        self.waiting_readers += usize::from(reader.is_some());
        readers.extend(reader);
        if is_new {
            shard.counters.recalls += 1;
            self.recalls.push_back(digest);
        }
        Ok(())
    }

    /// Returns true once the device is lost.
    pub(super) const fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn is_moving(&self, digest: Digest) -> bool {
        self.moves.values().any(|one| one.digest == digest)
    }

    /// Returns the next move, whose bytes and tail the host copies.
    pub(super) fn poll(&mut self, shard: &mut Shard) -> Option<(MoveId, PoolMove)> {
        if self.is_lost || self.moves.len() >= MOVES_MOST {
            return None;
        }
        while let Some(digest) = self.recalls.pop_front() {
            if self.is_moving(digest) {
                // It is on its way, or on its way there: its readers are served when that has ended.
                continue;
            }
            match shard.store.moves().demote(digest) {
                Ok(one) => return Some(self.begin(one)),
                Err(NoMove::NotThere) => self.serve(shard, digest),
                Err(NoMove::NoRoom) => self.turn_away(shard, digest),
            }
        }
        while let Some(Candidate { digest, bytes, demoted_bytes }) = self.wanted.front_mut() {
            if self.demotions > 0 {
                // They make room for it.
                return None;
            }
            let mut moves = shard.store.moves();
            let next = match moves.promote(*digest) {
                Ok(one) => Some(one),
                Err(NoMove::NotThere) => None,
                Err(NoMove::NoRoom) => {
                    let victim = (*demoted_bytes < SCATTERED * *bytes).then(|| moves.victim()).flatten();
                    victim.and_then(|victim| moves.demote(victim).ok())
                }
            };
            match next {
                Some(one) if !one.is_promotion => *demoted_bytes += one.bytes,
                _ => drop(self.wanted.pop_front()),
            }
            if let Some(one) = next {
                return Some(self.begin(one));
            }
        }
        None
    }

    fn begin(&mut self, one: PoolMove) -> (MoveId, PoolMove) {
        self.last += 1;
        self.demotions += usize::from(!one.is_promotion);
        self.moves.insert(MoveId(self.last), one);
        (MoveId(self.last), one)
    }

    /// Handles the end of the copies of a move.
    ///
    /// # Panics
    /// If there is no such move.
    pub(super) fn moved(&mut self, shard: &mut Shard, id: MoveId, outcome: MoveOutcome) {
        let one = self.moves.remove(&id).expect("a move in flight");
        self.demotions -= usize::from(!one.is_promotion);
        let mut moves = shard.store.moves();
        match outcome {
            // The device was found lost after the copy was done: the object stays in memory.
            MoveOutcome::Copied if one.is_promotion && self.is_lost => moves.cancel(&one),
            MoveOutcome::Copied => {
                moves.finish(&one);
            }
            MoveOutcome::Corrupt => {
                shard.counters.corrupt += 1;
                moves.drop_object(&one);
            }
            MoveOutcome::Lost => {
                moves.abandon(&one);
                self.lose(shard);
            }
        }
        if one.is_promotion && !self.is_lost && self.readers.contains_key(&one.digest) {
            // A recall that came while it moved there.
            self.recalls.push_back(one.digest);
        } else {
            self.serve(shard, one.digest);
        }
    }

    /// Gives the device pool up: its objects are gone, and it is not used again.
    pub(super) fn lose(&mut self, shard: &mut Shard) {
        if core::mem::replace(&mut self.is_lost, true) {
            return;
        }
        self.wanted.clear();
        shard.store.moves().lose_device();
        for digest in core::mem::take(&mut self.recalls) {
            if !self.is_moving(digest) {
                self.serve(shard, digest);
            }
        }
    }

    /// Answers the gets that waited for an object.
    fn serve(&mut self, shard: &mut Shard, digest: Digest) {
        for reader in self.take_readers(digest) {
            shard.serve(digest, reader, |shard| shard.peek(digest).map(|object| object.tenant));
        }
    }

    fn turn_away(&mut self, shard: &mut Shard, digest: Digest) {
        self.take_readers(digest).into_iter().for_each(|reader| shard.turn_away(reader, Status::Busy));
    }

    fn take_readers(&mut self, digest: Digest) -> Vec<Reader> {
        let readers = self.readers.remove(&digest).unwrap_or_default();
        self.waiting_readers -= readers.len();
        readers
    }
}
