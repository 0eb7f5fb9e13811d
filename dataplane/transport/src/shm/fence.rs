//! Fence of shared segments: tells a segment's owner when no peer copies from or to its memory any more.
//!
//! Over a shared-memory connection a client copies a segment's bytes without the owner's help, so the owner must not
//! free the memory while a copy runs. Each side writes one area and reads the other's. The owner has a *table*, one for
//! all clients, which they can only read: for each position the segment that is live there, and its extent. Each client
//! has a few *slots* in its channel, in which it names the segments that it is about to access.
//!
//! The client names a segment, then checks that it is live, copies, and clears the slot. The owner marks it dead, then
//! checks the slots. All of this is sequentially consistent, so either the client finds the segment dead or the owner
//! finds it named, and waits. (Hazard pointers, after Maged Michael, PODC 2002.) A client holds a name for at most
//! about [`CHUNK_BYTES`] of copying before it checks again; the slots of a killed client are dropped with its socket.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use kvplane_proto::{Limits, SegmentId};
use kvplane_sys::{CrossError, HugePages, Region, RegionOptions, process_memory};

/// Slots for copies within one call: the limit of segments that one call may name.
pub const SLOTS: usize = 16;
/// Slots for copies that last longer: the limit of segments with such copies in flight on one connection.
pub(super) const HELD_SLOTS: usize = 112;
/// Bytes that a client copies between two checks of the table.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Offset of the slots in a channel.
const SLOTS_AT: usize = 1024;
const _: () = assert!(SLOTS_AT + (SLOTS + HELD_SLOTS) * 8 <= 4096, "the rings begin there");
/// Size of a table entry: claim word, address, bytes, rights.
const ENTRY_BYTES: usize = 32;
pub(super) const TABLE_BYTES: usize = Limits::SEGMENTS * ENTRY_BYTES;
const WRITABLE: u64 = 1;
const INDIRECT: u64 = 2;
/// Validity of the check that a process id denotes our peer, in nanoseconds. The kernel reuses an id only after all
/// others had their turn, which takes longer.
const PROCESS_KNOWN_NS: u64 = 10_000_000;

/// Extent of a segment in its owner's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Address in that process.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// True if peers may write it.
    pub writable: bool,
    /// True if peers may access it without its owner; false for memory of a device, which requests go to.
    pub direct: bool,
}

/// Encodes a segment as a word that is never 0.
fn named(segment: SegmentId) -> u64 {
    (u64::from(segment.index) + 1) << 32 | u64::from(segment.generation)
}

fn entry_at(segment: SegmentId) -> Option<usize> {
    let index = segment.index as usize;
    (index < Limits::SEGMENTS).then_some(index * ENTRY_BYTES)
}

/// Owner's side of the fence.
pub(super) struct Fence {
    table: Arc<Region>,
    readable: OwnedFd,
    /// A word that only this process has at this address: a client verifies with it that it accesses the right memory.
    cookie: Arc<Region>,
}

impl Fence {
    pub(super) fn new() -> io::Result<Self> {
        let small = |name: &str, bytes| RegionOptions { huge: HugePages::Never, ..RegionOptions::new(name, bytes) };
        let options = RegionOptions { shared: true, ..small("kvplane-fence", TABLE_BYTES) };
        let table = Region::allocate(&options).map_err(io::Error::other)?;
        let readable = table.read_only_fd()?;
        let cookie = Region::allocate(&small("kvplane-cookie", 8)).map_err(io::Error::other)?;
        let value = std::hash::RandomState::new().build_hasher().finish();
        cookie.copy_in(0, &value.to_ne_bytes());
        Ok(Self { table, readable, cookie })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    /// Returns the address and the value of the cookie.
    pub(super) fn cookie(&self) -> (u64, u64) {
        (self.cookie.address(), self.cookie.load_u64(0))
    }

    /// Makes a segment available to clients. Positions past the table's end are not for one-sided use.
    pub(super) fn publish(&self, segment: SegmentId, extent: &Extent) {
        let Some(at) = entry_at(segment) else { return };
        let word = |index: usize| self.table.atomic_u64(at + index * 8);
        // Dead while it changes: a client that reads a mix finds that the claim word changed.
        word(0).store(0, Ordering::SeqCst);
        word(1).store(extent.address, Ordering::Release);
        word(2).store(extent.bytes, Ordering::Release);
        let rights = (u64::from(extent.writable) * WRITABLE) | (u64::from(!extent.direct) * INDIRECT);
        word(3).store(rights, Ordering::Release);
        word(0).store(named(segment), Ordering::SeqCst);
    }

    /// Marks a segment dead: no client starts to use it. [`is_named`] finds those that have started.
    pub(super) fn retract(&self, segment: SegmentId) {
        let Some(at) = entry_at(segment) else { return };
        let claim = self.table.atomic_u64(at);
        // The position may belong to a successor by now.
        let _ = claim.compare_exchange(named(segment), 0, Ordering::SeqCst, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// Returns true if the client of this channel is using a segment.
pub(super) fn is_named(channel: &Region, segment: SegmentId) -> bool {
    (0..SLOTS + HELD_SLOTS).any(|slot| channel.atomic_u64(SLOTS_AT + slot * 8).load(Ordering::SeqCst) == named(segment))
}

/// Reason why a segment cannot be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HoldError {
    /// It is not live any more.
    Gone,
    /// All slots are taken at present.
    Busy,
}

/// Clears a slot of [`View::hold`].
pub(super) fn release(channel: &Region, slot: usize) {
    channel.atomic_u64(SLOTS_AT + slot * 8).store(0, Ordering::Release);
}

/// Client's side of the fence, for one connection.
pub(super) struct View {
    channel: Arc<Region>,
    table: Arc<Region>,
    /// Process id of the owner, if the kernel allows copies from and to it.
    pid: Option<i32>,
    cookie: (u64, u64),
    /// Time at which the cookie was last verified.
    known_ns: Cell<Option<u64>>,
}

impl View {
    /// Maps the table and checks whether the kernel copies between us and the process at the socket's other end: `pid`
    /// is reported by the kernel for the socket, not by the peer.
    pub(super) fn new(channel: Arc<Region>, table: OwnedFd, pid: i32, cookie: (u64, u64)) -> io::Result<Self> {
        let table = Region::map_shared(table, TABLE_BYTES, false).map_err(io::Error::other)?;
        let mut view =
            Self { channel, table, pid: Some(pid).filter(|&pid| pid > 0), cookie, known_ns: Cell::new(None) };
        view.pid = view.pid.filter(|_| view.finds_cookie());
        Ok(view)
    }

    /// Returns why the kernel does not copy between us and the owner of this view, whose process id is `pid`; tries it
    /// anew.
    pub(super) fn ask_kernel(&self, pid: i32) -> Result<(), CrossError> {
        let (address, value) = self.cookie;
        // A process that has the id but not the cookie is another one.
        match pid > 0 && process_memory::word(pid, address)? == value {
            true => Ok(()),
            false => Err(CrossError::Gone),
        }
    }

    pub(super) const fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Returns true if the process with this id is still the one that we connected to, as known by `now_ns`.
    pub(super) fn is_same_process(&self, now_ns: u64) -> bool {
        if self.known_ns.get().is_some_and(|at_ns| now_ns < at_ns.saturating_add(PROCESS_KNOWN_NS)) {
            return true;
        }
        let found = self.finds_cookie();
        self.known_ns.set(found.then_some(now_ns));
        found
    }

    fn finds_cookie(&self) -> bool {
        self.pid.is_some_and(|pid| self.ask_kernel(pid).is_ok())
    }

    /// Names a segment in a slot. Returns `None` if it is not live; the slot is clear then.
    pub(super) fn claim(&self, slot: usize, segment: SegmentId) -> Option<Extent> {
        entry_at(segment)?;
        self.slot(slot).store(named(segment), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let extent = self.extent(segment);
        if extent.is_none() {
            self.clear(slot);
        }
        extent
    }

    /// Names a segment in a slot for copies that last longer than a call, until [`release`]. Returns the slot.
    pub(super) fn hold(&self, segment: SegmentId) -> Result<usize, HoldError> {
        entry_at(segment).ok_or(HoldError::Gone)?;
        let take = |slot: &usize| {
            let word = self.channel.atomic_u64(SLOTS_AT + slot * 8);
            word.compare_exchange(0, named(segment), Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        let slot = (SLOTS..SLOTS + HELD_SLOTS).find(take).ok_or(HoldError::Busy)?;
        fence(Ordering::SeqCst);
        if self.is_live(segment) {
            return Ok(slot);
        }
        release(&self.channel, slot);
        Err(HoldError::Gone)
    }

    /// Returns the extent of a live segment.
    pub(super) fn extent(&self, segment: SegmentId) -> Option<Extent> {
        let at = entry_at(segment)?;
        let word = |index: usize| self.table.load_u64(at + index * 8);
        let live = self.is_live(segment);
        let rights = word(3);
        let (writable, direct) = (rights & WRITABLE != 0, rights & INDIRECT == 0);
        let extent = Extent { address: word(1), bytes: word(2), writable, direct };
        (live && self.is_live(segment)).then_some(extent)
    }

    pub(super) fn is_live(&self, segment: SegmentId) -> bool {
        entry_at(segment).is_some_and(|at| self.table.load_u64(at) == named(segment))
    }

    pub(super) fn clear(&self, slot: usize) {
        self.slot(slot).store(0, Ordering::Release);
    }

    fn slot(&self, slot: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(slot < SLOTS, "slot {slot} of {SLOTS}");
        self.channel.atomic_u64(SLOTS_AT + slot * 8)
    }
}

#[cfg(test)]
mod tests;
