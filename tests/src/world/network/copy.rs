//! Copies between a client's memory and a shard's pool, piece by piece in virtual time.
//!
//! The real client copies synchronously on its only thread: it handles no frame, timer or call before the copy is done,
//! so a live client never copies through a lane that it has reset. Others do not wait: while the pieces move, shards
//! evict, other clients write, nodes die (the mapping outlives them, unused). A client that is killed stops between two
//! pieces, and its shard notices that only later.

use kvplane_client::{LaneId, Local, Output, SliceId};
use kvplane_proto::Status;
use kvplane_proto::checksum::payload_checksum;

use crate::world::World;
use crate::world::check::ledger::Use;
use crate::world::check::memory::Loan;
use crate::world::check::{Rule, broken};
use crate::world::queue::Event;
use crate::world::scenario::{Mischief, US};

/// Copy in progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    connection: u32,
    incarnation: usize,
    lane: LaneId,
    slice: SliceId,
    offset: u64,
    local: Local,
    /// Expected checksum of a copy out of the pool.
    expected: Option<u64>,
    done: u64,
    piece: u64,
    gap_ns: u64,
    pub(crate) until_ns: u64,
}

impl Copy {
    /// Returns true if the copy goes over a connection.
    pub(crate) const fn uses(&self, connection: u32) -> bool {
        self.connection == connection
    }

    /// Returns true if the copy is from or to the pool of one of these incarnations.
    pub(crate) fn is_of(&self, incarnations: &[usize]) -> bool {
        incarnations.contains(&self.incarnation)
    }

    /// Halts the client for a while between any two of the next pieces; returns the time when the copy is over.
    pub(crate) const fn halt(&mut self, for_ns: u64) -> u64 {
        let pieces = (self.local.bytes - self.done).div_ceil(self.piece);
        self.gap_ns += for_ns;
        self.until_ns += pieces * self.gap_ns;
        self.until_ns
    }
}

impl World {
    pub(crate) fn start_copy(&mut self, index: usize, output: &Output) {
        let (lane, slice, offset, local, expected) = match *output {
            Output::CopyIn { lane, slice, offset, local } => (lane, slice, offset, local, None),
            Output::CopyOut { lane, slice, offset, local, checksum } => (lane, slice, offset, local, checksum),
            _ => return,
        };
        let Some(&connection) = self.clients[index].lanes.get(&lane) else {
            self.violate(broken(
                Rule::Protocol,
                format!("client {index} copies over {lane:?}, which is not connected"),
            ));
            return;
        };
        if expected.is_none() {
            match self.clients[index].memory.loan(local.offset) {
                Some(Loan::Put { write, .. }) => self.shadow.sent(write),
                Some(Loan::Copy { .. }) => {}
                loan => self.violate(broken(Rule::Memory, format!("a put is copied from memory that is {loan:?}"))),
            }
        }
        let incarnation = self.connections[&connection].incarnation;
        let pieces = 1 + self.streams.network.below(5);
        let gap_ns = 1 + self.streams.network.below(200 * US);
        let piece = local.bytes.div_ceil(pieces);
        let pieces = local.bytes.div_ceil(piece);
        let until_ns = self.now_ns + pieces * gap_ns;
        let copy =
            Copy { connection, incarnation, lane, slice, offset, local, expected, done: 0, piece, gap_ns, until_ns };
        self.clients[index].copying = Some(copy);
        let generation = self.clients[index].incarnation;
        self.after(gap_ns, Event::CopyChunk(index, generation));
    }

    pub(crate) fn copy_chunk(&mut self, index: usize, generation: u32) {
        if !self.is_client(index, generation) {
            return;
        }
        let Some(mut copy) = self.clients[index].copying else { return };
        self.move_piece(index, &mut copy);
        if copy.done < copy.local.bytes {
            self.clients[index].copying = Some(copy);
            if self.clients[index].doomed && !self.trouble.calm {
                self.kill_client(index);
                return;
            }
            self.after(copy.gap_ns, Event::CopyChunk(index, generation));
            return;
        }
        self.clients[index].copying = None;
        let sum = payload_checksum(self.clients[index].memory.peek(copy.local.offset, copy.local.bytes));
        let trusted = self.scenario.has(Mischief::TrustGetChecksum);
        let good = copy.expected.is_none_or(|expected| expected == sum || trusted);
        let result = if good { Ok(sum) } else { Err(Status::Corrupt) };
        self.detail(sum, || format!("client {index} copied {} bytes: {}", copy.local.bytes, result.is_ok()));
        self.clients[index].client.copied(copy.lane, copy.slice, result, self.now_ns);
        self.drain_client(index);
    }

    fn move_piece(&mut self, index: usize, copy: &mut Copy) {
        let bytes = copy.piece.min(copy.local.bytes - copy.done);
        let (at, local) = (copy.offset + copy.done, copy.local.offset + copy.done);
        copy.done += bytes;
        let usage = if copy.expected.is_some() { Use::Read } else { Use::Write };
        if self.incarnations[copy.incarnation].alive {
            let lent = self.incarnations[copy.incarnation].ledger.check(copy.connection, usage, at, bytes);
            self.require(lent);
        }
        let pool = &self.incarnations[copy.incarnation].pool;
        let moved = match usage {
            Use::Read => self.clients[index].memory.write(local, &pool.bytes(at, bytes)),
            Use::Write => self.clients[index].memory.read(local, bytes).map(|from| pool.copy_in(at, from)),
        };
        self.require(moved);
    }

    /// [`Mischief::LateWriter`]: a dead process continues to write.
    pub(crate) fn ghost_chunk(&mut self, index: usize) {
        if !self.scenario.has(Mischief::LateWriter) {
            return;
        }
        let Some(mut copy) = self.clients[index].copying.take() else { return };
        if copy.expected.is_none() && copy.done < copy.local.bytes {
            self.move_piece(index, &mut copy);
        }
    }
}
