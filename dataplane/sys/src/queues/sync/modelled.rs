//! Stand-ins for kernel objects in models: an event and a region whose accesses loom sees.

use super::super::event;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// An event: a count that a thread can wait for, without the kernel, which loom cannot see.
pub(crate) struct Event {
    is_set: Mutex<bool>,
    changed: Condvar,
    /// Only has a descriptor.
    kernel: event::Event,
}

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(event::event_fd()?.into())
    }

    pub(crate) fn signal(&self) {
        *self.is_set.lock().expect("no model panics here") = true;
        self.changed.notify_all();
    }

    pub(crate) fn drain(&self) {
        *self.is_set.lock().expect("no model panics here") = false;
    }

    /// Parks until the event is set. If nobody ever sets it, loom reports a deadlock.
    #[cfg(test)]
    pub(crate) fn wait(&self) {
        let mut is_set = self.is_set.lock().expect("no model panics here");
        while !*is_set {
            is_set = self.changed.wait(is_set).expect("no model panics here");
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.kernel.fd()
    }
}

impl From<OwnedFd> for Event {
    fn from(fd: OwnedFd) -> Self {
        Self { is_set: Mutex::new(false), changed: Condvar::new(), kernel: fd.into() }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kernel.fmt(f)
    }
}

/// Zeroed memory with a word at each offset that a model names, and cells of plain bytes.
///
/// An access to bytes that is not ordered with another's write fails the model. Hostile peers, which race on purpose,
/// are not modelled.
pub struct Region {
    words: BTreeMap<usize, AtomicU64>,
    flags: BTreeMap<usize, AtomicU32>,
    bytes: Box<[UnsafeCell<u8>]>,
}

impl Region {
    /// Creates a region with 64-bit words and 32-bit flags at these offsets, and plain bytes elsewhere.
    #[cfg(test)]
    pub(crate) fn new(bytes: usize, words: &[usize], flags: &[usize]) -> Self {
        Self {
            words: words.iter().map(|at| (*at, AtomicU64::new(0))).collect(),
            flags: flags.iter().map(|at| (*at, AtomicU32::new(0))).collect(),
            bytes: (0..bytes).map(|_| UnsafeCell::new(0)).collect(),
        }
    }

    pub(crate) fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        &self.words[&offset]
    }

    pub(crate) fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        &self.flags[&offset]
    }

    pub(crate) fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes.len())
    }

    pub(crate) fn copy_in(&self, offset: usize, bytes: &[u8]) {
        for (cell, byte) in self.bytes[offset..offset + bytes.len()].iter().zip(bytes) {
            // SAFETY: the cell's own address; loom fails the model if any other access is not ordered with this one.
            cell.with_mut(|place| unsafe { *place = *byte });
        }
    }

    pub(crate) fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
        for (cell, byte) in self.bytes[offset..offset + bytes.len()].iter().zip(bytes) {
            // SAFETY: as in `copy_in`.
            cell.with(|place| *byte = unsafe { *place });
        }
    }
}

// SAFETY: all accesses to the cells are checked by loom, which runs one thread at a time.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("bytes", &self.bytes.len()).finish()
    }
}
