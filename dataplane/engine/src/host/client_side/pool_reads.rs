//! Reads of peers' pools by copy engines: gets into memory of devices over shared memory, without a copy by the CPU.
//!
//! A get whose memory is offered ([`Buffers::offer`](super::buffers::Buffers::offer)) ends its lookup as a
//! [`PoolRead`], which the initiator takes: either the copy engine of its device reads the pool's pages, or this thread
//! copies them into the get's chunk.
//!
//! Copy engines read pages that are pinned. The mapped pool is pinned with the device's driver in windows, each when
//! the first get has bytes in it; all devices of a driver use one pinning. Once the driver has refused one, no further
//! ones of this connection are pinned, nor of any once [`PINNED_BYTES_MOST`] are: gets that need one go through chunks.
//! No window gives way to another one, as pinning costs as much as some copies of its bytes. Windows are given back
//! when no device of the driver has a buffer any more, or the connection has ended: then a few in each round, as the
//! driver takes about as long to unpin one as to pin it, and other requests are in flight.
//!
//! The peer pins the object for the get, and releases it when the get is over, or when the connection is. So each read
//! in flight keeps the connection's socket open ([`ConnectionHold`]), and its bytes count only if the peer has not
//! closed the connection by the time at which the engine has read them. Where the device is lost, nobody can tell any
//! more whether it still reads: then socket, mapping and pinning stay until the process ends.
//!
//! Puts are not written to the pool by copy engines: see
//! [adr/0028](../../../../../docs/adr/0028-device-drivers-by-hand.md).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};

use kvplane_client::{LaneId, Local, SliceId};
use kvplane_sys::device::{Device, DeviceError, Family, PinnedRegion};
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::shm::ConnectionHold;
use kvplane_transport::{ConnectionId, Shm};

use super::buffers::PartPlace;
use super::pool_copies;
use crate::host::reports::PoolReadCounters;

/// Length of a window in bytes; the last one of a pool may be shorter. Pinning it takes a few milliseconds.
const WINDOW_BYTES: usize = 16 << 20;

/// Most bytes of windows of one host. They are pages of the peer's, which are in memory anyway.
const PINNED_BYTES_MOST: u64 = 64 << 30;

/// Most windows that are unpinned in one round.
const UNPINNED_PER_ROUND: usize = 2;

/// Get whose bytes are in a peer's pool, pinned by the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolRead {
    pub(crate) lane: LaneId,
    pub(crate) slice: SliceId,
    /// Position of the bytes in the pool.
    pub(crate) offset: u64,
    /// Memory of the get: in its chunk.
    pub(crate) local: Local,
    /// Checksum to be verified, if there is one.
    pub(crate) checksum: Option<u64>,
}

/// Pinned bytes of a read, and what keeps them as they are.
pub(crate) struct PoolSource {
    /// Bytes, each range in one window.
    pub(crate) ranges: Vec<IoBuf>,
    pub(crate) connection: ConnectionId,
    _windows: Vec<Arc<PinnedRegion>>,
    hold: Arc<ConnectionHold>,
}

impl PoolSource {
    /// Returns true if the peer still has the bytes pinned: asks the kernel.
    pub(crate) fn is_kept(&self) -> bool {
        self.hold.is_kept()
    }

    /// Returns true if the bytes have this checksum, or there is none to verify.
    pub(crate) fn is_good(&self, checksum: Option<u64>) -> bool {
        checksum.is_none_or(|checksum| pool_copies::sum(&self.ranges) == checksum)
    }

    /// Leaves the bytes as they are for as long as the process lives: a lost device may read them at any time.
    pub(crate) fn leak(self) {
        std::mem::forget(self);
    }
}

/// Mapped pool of a connection, as far as it is pinned.
#[derive(Default)]
struct PinnedPool {
    windows: BTreeMap<(Family, usize), Arc<PinnedRegion>>,
    /// Drivers that have refused a window.
    refused: Vec<Family>,
    /// Hold of reads in flight.
    hold: Weak<ConnectionHold>,
}

/// Reason why a range is not read by a copy engine.
enum NotPinned {
    /// The driver has refused a window, now or before.
    Refused(Option<DeviceError>),
    /// Enough is pinned.
    Full,
}

/// Reads of one host that wait to be taken, and the windows.
#[derive(Default)]
pub(crate) struct PoolReads {
    waiting: VecDeque<(PartPlace, PoolRead)>,
    pools: HashMap<ConnectionId, PinnedPool>,
    /// Windows of connections that have ended, to be unpinned.
    unused: Vec<Arc<PinnedRegion>>,
    counters: PoolReadCounters,
    problem: Option<String>,
}

impl PoolReads {
    /// Returns the counters.
    pub(super) const fn counters(&self) -> PoolReadCounters {
        self.counters
    }

    /// Adds a read into the memory of this part, which [`Self::next`] returns.
    pub(super) fn push(&mut self, place: PartPlace, read: PoolRead) {
        self.waiting.push_back((place, read));
    }

    /// Returns a read that waits to be carried out.
    pub(super) fn next(&mut self) -> Option<(PartPlace, PoolRead)> {
        self.waiting.pop_front()
    }

    /// Returns the pinned bytes of a read over this connection for a device; `None` if they are not pinned, or the
    /// connection cannot be kept.
    pub(super) fn pin(
        &mut self,
        shm: &Shm,
        id: ConnectionId,
        read: &PoolRead,
        device: &Arc<Device>,
    ) -> Option<PoolSource> {
        let pool = shm.pool(id)?;
        // Where the peer named bytes outside of its own pool, the copy by this thread fails.
        let range = pool_copies::range(pool, read.offset, read.local.bytes)?;
        let windows = match self.windows(id, pool, &range, device) {
            Ok(windows) => windows,
            Err(why) => {
                self.counters.copied_reads += 1;
                if let NotPinned::Refused(Some(error)) = why {
                    let id = device.id();
                    self.counters.refused += 1;
                    self.problem = Some(format!("gets into memory of {id} go through pinned memory: {error}"));
                }
                return None;
            }
        };
        let entry = self.pools.get_mut(&id)?;
        let hold = match entry.hold.upgrade() {
            Some(hold) => hold,
            // Without a free descriptor the bytes are copied.
            None => Arc::new(ConnectionHold::new(shm, id)?),
        };
        entry.hold = Arc::downgrade(&hold);
        self.counters.bytes += read.local.bytes;
        Some(PoolSource { ranges: in_windows(&range), connection: id, _windows: windows, hold })
    }

    /// Unpins the windows of a driver none of whose devices has a buffer any more.
    pub(super) fn close_family(&mut self, family: Family) {
        for pool in self.pools.values_mut() {
            pool.windows.retain(|(of, _), _| *of != family);
            pool.refused.retain(|of| *of != family);
        }
        self.unused.retain(|window| window.device().id().family != family);
        let windows = self.pools.values().flat_map(|pool| pool.windows.values()).chain(&self.unused);
        self.counters.pinned_bytes = windows.map(|window| window.bytes() as u64).sum();
    }

    /// Returns and clears the text of the last refusal to pin.
    pub(super) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    /// Gives back the windows of a connection that has ended. Reads in flight hold theirs.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        self.unused.extend(self.pools.remove(&id).into_iter().flat_map(|pool| pool.windows.into_values()));
    }

    /// Unpins some of the windows that were given back.
    pub(super) fn unpin(&mut self) {
        for _ in 0..UNPINNED_PER_ROUND {
            let Some(window) = self.unused.pop() else { return };
            self.counters.pinned_bytes -= window.bytes() as u64;
        }
    }

    /// Returns true if there are windows to be unpinned.
    pub(super) const fn is_unpinning(&self) -> bool {
        !self.unused.is_empty()
    }

    /// Returns the windows that a range of a connection's pool lies in, which pins them if need be.
    fn windows(
        &mut self,
        id: ConnectionId,
        pool: &Arc<Region>,
        range: &IoBuf,
        device: &Arc<Device>,
    ) -> Result<Vec<Arc<PinnedRegion>>, NotPinned> {
        let family = device.id().family;
        let pinned = self.pools.entry(id).or_default();
        let mut windows = Vec::new();
        for index in range.offset() / WINDOW_BYTES..(range.offset() + range.bytes()).div_ceil(WINDOW_BYTES) {
            let key = (family, index);
            if let Some(window) = pinned.windows.get(&key) {
                windows.push(Arc::clone(window));
                continue;
            }
            if pinned.refused.contains(&family) {
                return Err(NotPinned::Refused(None));
            }
            let at = index * WINDOW_BYTES;
            let bytes = WINDOW_BYTES.min(pool.bytes() - at);
            if self.counters.pinned_bytes + bytes as u64 > PINNED_BYTES_MOST {
                return Err(NotPinned::Full);
            }
            match PinnedRegion::of(device, IoBuf::new(Arc::clone(pool), at, bytes)) {
                Ok(window) => {
                    let window = Arc::new(window);
                    pinned.windows.insert(key, Arc::clone(&window));
                    self.counters.pinned_bytes += bytes as u64;
                    windows.push(window);
                }
                Err(error) => {
                    pinned.refused.push(family);
                    return Err(NotPinned::Refused(Some(error)));
                }
            }
        }
        Ok(windows)
    }
}

/// Cuts a range of a pool where windows end.
fn in_windows(range: &IoBuf) -> Vec<IoBuf> {
    let (mut rest, mut cut) = (range.clone(), Vec::new());
    while !rest.is_empty() {
        let bytes = rest.bytes().min(WINDOW_BYTES - rest.offset() % WINDOW_BYTES);
        cut.push(rest.slice(0, bytes));
        rest.advance(bytes);
    }
    cut
}

#[cfg(test)]
mod tests {
    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn ranges_are_cut_where_windows_end() {
        let region = Region::allocate(&RegionOptions::new("pool", 3 * WINDOW_BYTES)).expect("memory");
        let cut = |offset, bytes| {
            let ranges = in_windows(&IoBuf::new(Arc::clone(&region), offset, bytes));
            ranges.iter().map(|range| (range.offset(), range.bytes())).collect::<Vec<_>>()
        };
        assert_eq!(cut(5, 10), [(5, 10)]);
        assert_eq!(cut(WINDOW_BYTES - 1, 1), [(WINDOW_BYTES - 1, 1)]);
        assert_eq!(cut(WINDOW_BYTES - 1, 2), [(WINDOW_BYTES - 1, 1), (WINDOW_BYTES, 1)]);
        let all = [(100, WINDOW_BYTES - 100), (WINDOW_BYTES, WINDOW_BYTES), (2 * WINDOW_BYTES, 7)];
        assert_eq!(cut(100, 2 * WINDOW_BYTES - 93), all);
    }
}
