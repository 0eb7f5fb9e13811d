//! Gets into memory of a device that its copy engine carries out from a mapped pool.
//!
//! Such a get has a chunk like any staged one, as nobody knows before its node answers over which connection it goes,
//! and it may go anew over another one. Where its answer names bytes of a mapped pool, these are copied to the device
//! behind the same queue's earlier copies, and the chunk stays unused. This thread verifies the checksum meanwhile: the
//! node has the bytes pinned, so that both read the same ones.
//!
//! A copy that goes on after the end of its connection, or of its get, is waited for before the piece ends. If the get
//! is made anew, its bytes are copied behind that copy, on the same queue, and so replace what it has written.

use kvplane_proto::Status;
use kvplane_sys::device::DeviceCopy;
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::ConnectionId;

use crate::host::{ClientHost, PartPlace, PoolRead, PoolSource};
use crate::staging::MemoryRange;

/// Read in flight.
struct DirectRead {
    place: PartPlace,
    read: PoolRead,
    source: PoolSource,
    /// Outcome of the verification.
    verified: Result<(), Status>,
}

/// Reads in flight of one initiator.
#[derive(Default)]
pub(super) struct DirectReads {
    in_flight: slab::Slab<DirectRead>,
    /// Reads whose bytes were not verified yet.
    unverified: Vec<usize>,
    /// Last connection that was checked since the stages were polled, and whether its node keeps it.
    kept: Option<(ConnectionId, bool)>,
}

impl DirectReads {
    /// Adds a read whose copies are about to be submitted, and returns its key.
    pub(super) fn insert(&mut self, place: PartPlace, read: PoolRead, source: PoolSource) -> usize {
        let key = self.in_flight.insert(DirectRead { place, read, source, verified: Ok(()) });
        if read.checksum.is_some() {
            self.unverified.push(key);
        }
        key
    }

    /// Verifies the bytes of reads that have begun, while their copies are made.
    pub(super) fn verify(&mut self) {
        for key in self.unverified.drain(..) {
            let DirectRead { read, source, verified, .. } = &mut self.in_flight[key];
            if !source.is_good(read.checksum) {
                *verified = Err(Status::Corrupt);
            }
        }
    }

    /// Forgets what is known of connections: the stages have been polled.
    pub(super) const fn polled(&mut self) {
        self.kept = None;
    }

    /// Returns the part that a read is for.
    pub(super) fn place(&self, key: usize) -> PartPlace {
        self.in_flight[key].place
    }

    /// Ends a read whose copies are done, or have failed; `is_lost` tells that they may still be made. Returns true if
    /// the bytes of its part are on the device.
    pub(super) fn end(&mut self, host: &mut ClientHost, key: usize, copied: Result<(), Status>, is_lost: bool) -> bool {
        self.unverified.retain(|other| *other != key);
        let DirectRead { read, source, verified, .. } = self.in_flight.remove(key);
        let connection = source.connection;
        if is_lost {
            // The node keeps the bytes pinned for as long as the socket is open.
            source.leak();
            host.same_host().give_up(connection);
            return false;
        }
        let is_kept = match self.kept {
            Some((of, is_kept)) if of == connection => is_kept,
            _ => source.is_kept(),
        };
        self.kept = Some((connection, is_kept));
        if !is_kept {
            // The bytes may have been others by the time at which they were read. The client makes the get anew when
            // the host has seen the connection's end.
            return false;
        }
        host.same_host().read_ended(&read, copied.and(verified))
    }
}

/// Returns the copies from these pinned ranges to memory of the same length. Memory of the host is copied at once.
pub(super) fn copies_to(memory: Vec<MemoryRange>, pinned: &[IoBuf]) -> Vec<DeviceCopy> {
    let (mut ranges, mut source, mut copies) = (pinned.iter().cloned(), None::<IoBuf>, Vec::new());
    for to in memory {
        let mut done = 0;
        while done < to.bytes() {
            let Some(from) = source.as_mut().filter(|from| !from.is_empty()) else {
                source = Some(ranges.next().expect("both sides have one length"));
                continue;
            };
            let bytes = (to.bytes() - done).min(from.bytes() as u64);
            let piece = from.slice(0, bytes as usize);
            match to.slice(done, bytes) {
                MemoryRange::Device(to) => copies.push(DeviceCopy::ToDevice { from: piece, to }),
                MemoryRange::Host(to) => copy_host(&to, &piece),
            }
            from.advance(bytes as usize);
            done += bytes;
        }
    }
    copies
}

/// Copies between two buffers of the host that have one length.
pub(super) fn copy_host(to: &IoBuf, from: &IoBuf) {
    Region::copy_between(to.region(), to.offset(), from.region(), from.offset(), from.bytes());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn ranges_of_both_sides_are_paired_wherever_they_end() {
        let region = |name: &str| Region::allocate(&RegionOptions::new(name, 4096)).expect("memory");
        let (pool, ours) = (region("pool"), region("ours"));
        pool.copy_in(0, b"0123456789");
        let from = |at, bytes| IoBuf::new(Arc::clone(&pool), at, bytes);
        let to = |at, bytes| MemoryRange::Host(IoBuf::new(Arc::clone(&ours), at, bytes));
        let copies = copies_to(vec![to(100, 1), to(200, 6), to(300, 3)], &[from(0, 5), from(5, 0), from(5, 5)]);
        assert!(copies.is_empty());
        let found = |at, bytes| {
            let mut found = vec![0; bytes];
            ours.copy_out(at, &mut found);
            found
        };
        assert_eq!((found(100, 1), found(200, 6), found(300, 3)), (b"0".to_vec(), b"123456".to_vec(), b"789".to_vec()));
    }
}
