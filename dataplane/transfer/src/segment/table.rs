//! Table of open segments, by handle and by name.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::handle::SegmentHandle;
use super::peers::Peers;
use super::remote::Remote;
use crate::error::{Error, LimitError};

/// Limit of open segments of one engine.
const OPEN_SEGMENTS: usize = 65_536;

struct Open {
    remote: Arc<Remote>,
    /// Number of opens without a close.
    times: usize,
}

/// Table of open segments.
#[derive(Default)]
pub(crate) struct Table {
    by_name: HashMap<String, SegmentHandle>,
    by_handle: HashMap<SegmentHandle, Open>,
    last: u32,
    pub(crate) peers: Peers,
}

impl Table {
    pub(crate) fn get(&self, handle: SegmentHandle) -> Option<&Arc<Remote>> {
        self.by_handle.get(&handle).map(|open| &open.remote)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<(SegmentHandle, &Arc<Remote>)> {
        let handle = *self.by_name.get(name)?;
        Some((handle, self.get(handle)?))
    }

    /// Counts another user of an open segment.
    pub(crate) fn reopen(&mut self, handle: SegmentHandle) {
        if let Some(open) = self.by_handle.get_mut(&handle) {
            open.times += 1;
        }
    }

    /// Opens a segment, or updates the description of an open one and counts another user.
    ///
    /// # Errors
    /// When the limit of open segments is reached.
    pub(crate) fn open(&mut self, remote: Arc<Remote>) -> Result<SegmentHandle, Error> {
        if let Some(&handle) = self.by_name.get(&remote.name) {
            self.renew(handle, remote);
            self.reopen(handle);
            return Ok(handle);
        }
        if self.by_handle.len() >= OPEN_SEGMENTS || self.last == i32::MAX as u32 {
            return Err(LimitError::Segments { open: self.by_handle.len() }.into());
        }
        self.last += 1;
        let handle = SegmentHandle::from_bits(self.last);
        self.by_name.insert(remote.name.clone(), handle);
        self.by_handle.insert(handle, Open { remote, times: 1 });
        Ok(handle)
    }

    /// Replaces the description of a segment.
    pub(crate) fn renew(&mut self, handle: SegmentHandle, remote: Arc<Remote>) {
        if let Some(open) = self.by_handle.get_mut(&handle) {
            open.remote = remote;
        }
    }

    /// Removes one user; the last one closes the segment. Returns false for a handle that is not open.
    pub(crate) fn close(&mut self, handle: SegmentHandle) -> bool {
        let Some(open) = self.by_handle.get_mut(&handle) else { return false };
        open.times -= 1;
        if open.times == 0 {
            self.by_name.remove(&open.remote.name);
            self.by_handle.remove(&handle);
        }
        true
    }

    /// Returns the handles of all open segments.
    pub(crate) fn handles(&self) -> Vec<SegmentHandle> {
        self.by_handle.keys().copied().collect()
    }
}

/// Table behind its lock, which is never held during a wait.
#[derive(Default)]
pub(crate) struct TableLock {
    table: RwLock<Table>,
}

impl TableLock {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}
