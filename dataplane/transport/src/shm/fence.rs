//! The fence: how a segment's owner knows that no peer copies from or to its memory any more.
//!
//! Over a shared connection a client moves a segment's bytes without the owner's help, so the owner must not give the
//! memory back while a copy runs. Each side writes one place and reads the other's. The owner has a *table*, one for
//! all clients, which they can only read: for each position the segment that is alive there, and where it lies. Each
//! client has a few *slots* in its channel, where it names the segments that it is about to touch.
//!
//! The client names a segment, then looks whether it is alive, copies, and clears the slot. The owner marks it dead,
//! then looks at the slots. Both do so in one total order, so either the client finds it dead or the owner finds
//! it named, and waits. (Hazard pointers, after Maged Michael, PODC 2002.) A client holds a name for at most about
//! [`CHUNK_BYTES`] of copying before it looks again; a killed one is forgotten with its socket.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use kvplane_proto::{Limits, SegmentId};
use kvplane_sys::{CrossError, HugePages, Region, RegionOptions, process_memory};

/// Segments that one client may name at once.
pub const SLOTS: usize = 16;
/// Bytes that a client copies between two looks at the table.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Where the slots are in a channel.
const SLOTS_AT: usize = 1024;
/// Claim word, address, bytes, rights.
const ENTRY_BYTES: usize = 32;
pub(super) const TABLE_BYTES: usize = Limits::SEGMENTS * ENTRY_BYTES;
const WRITABLE: u64 = 1;
/// How old the knowledge may be that a process id means our peer. An id is given to another process only after all
/// others had their turn, which takes longer.
const PROCESS_KNOWN_NS: u64 = 10_000_000;

/// Where a segment lies in its owner's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Its address there.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// Whether peers may write it.
    pub writable: bool,
}

/// A segment as a word that is never 0.
fn named(segment: SegmentId) -> u64 {
    (u64::from(segment.index) + 1) << 32 | u64::from(segment.generation)
}

fn entry_at(segment: SegmentId) -> Option<usize> {
    let index = segment.index as usize;
    (index < Limits::SEGMENTS).then_some(index * ENTRY_BYTES)
}

/// The owner's side.
pub(super) struct Fence {
    table: Arc<Region>,
    readable: OwnedFd,
    /// A word that only this process has at this address: by it a client knows that it reached the right memory.
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

    /// Where the cookie is and what it says.
    pub(super) fn cookie(&self) -> (u64, u64) {
        (self.cookie.address(), self.cookie.load_u64(0))
    }

    /// Lets clients use a segment. Positions past the table's end are not for one-sided use.
    pub(super) fn publish(&self, segment: SegmentId, extent: &Extent) {
        let Some(at) = entry_at(segment) else { return };
        let word = |index: usize| self.table.atomic_u64(at + index * 8);
        // Dead while it changes: who reads a mix finds that the claim word changed.
        word(0).store(0, Ordering::SeqCst);
        word(1).store(extent.address, Ordering::Release);
        word(2).store(extent.bytes, Ordering::Release);
        word(3).store(u64::from(extent.writable) * WRITABLE, Ordering::Release);
        word(0).store(named(segment), Ordering::SeqCst);
    }

    /// From now on no client starts to use it. Those that have started are found by [`is_named`].
    pub(super) fn retract(&self, segment: SegmentId) {
        let Some(at) = entry_at(segment) else { return };
        let claim = self.table.atomic_u64(at);
        // The position may be a successor's by now.
        let _ = claim.compare_exchange(named(segment), 0, Ordering::SeqCst, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// Whether the client of this channel is using a segment.
pub(super) fn is_named(channel: &Region, segment: SegmentId) -> bool {
    (0..SLOTS).any(|slot| channel.atomic_u64(SLOTS_AT + slot * 8).load(Ordering::SeqCst) == named(segment))
}

/// The client's side of one connection.
pub(super) struct View {
    channel: Arc<Region>,
    table: Arc<Region>,
    /// The owner's process, if the kernel lets us copy from it and to it.
    pid: Option<i32>,
    cookie: (u64, u64),
    /// When the cookie was last found.
    known_ns: Cell<Option<u64>>,
}

impl View {
    /// Maps the table, and asks the kernel whether it copies between us and the process at the socket's other end:
    /// `pid` is what the kernel says of the socket, not what the peer says.
    pub(super) fn new(channel: Arc<Region>, table: OwnedFd, pid: i32, cookie: (u64, u64)) -> io::Result<Self> {
        let table = Region::map_shared(table, TABLE_BYTES, false).map_err(io::Error::other)?;
        let mut view =
            Self { channel, table, pid: Some(pid).filter(|&pid| pid > 0), cookie, known_ns: Cell::new(None) };
        view.pid = view.pid.filter(|_| view.finds_cookie());
        Ok(view)
    }

    /// Why the kernel does not copy between us and the process with this id, of which this view is; asked anew.
    pub(super) fn ask_kernel(&self, pid: i32) -> Result<(), CrossError> {
        let (address, value) = self.cookie;
        // What has the id now, and not the cookie, is a stranger.
        match pid > 0 && process_memory::word(pid, address)? == value {
            true => Ok(()),
            false => Err(CrossError::Gone),
        }
    }

    pub(super) const fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Whether the process behind the id is the one that we connected to, as known by `now_ns`.
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

    /// Names a segment in a slot. None when it is not alive: then the slot is clear.
    pub(super) fn claim(&self, slot: usize, segment: SegmentId) -> Option<Extent> {
        let at = entry_at(segment)?;
        self.slot(slot).store(named(segment), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let word = |index: usize| self.table.load_u64(at + index * 8);
        let live = self.is_live(segment);
        let extent = Extent { address: word(1), bytes: word(2), writable: word(3) & WRITABLE != 0 };
        if live && self.is_live(segment) {
            return Some(extent);
        }
        self.clear(slot);
        None
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
