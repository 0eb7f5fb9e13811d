//! Sources: the segments of the peers that one call reads from, opened once each.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kvplane_transfer::{Batch, SegmentHandle, SubmitOptions, TransferEngine, TransferRequest};

use crate::error::Error;

/// Segments of peers, opened once for all reads of a call, and closed with it.
pub(super) struct Sources<'a> {
    engine: &'a TransferEngine,
    open: Mutex<BTreeMap<String, SegmentHandle>>,
}

impl<'a> Sources<'a> {
    /// Creates the sources of a call that reads with this engine.
    pub(super) const fn new(engine: &'a TransferEngine) -> Self {
        Self { engine, open: Mutex::new(BTreeMap::new()) }
    }

    /// Returns the handle of a peer's segment, which is opened if it is not open.
    ///
    /// # Errors
    /// When the peer does not answer, or has no such segment.
    pub(super) fn handle(&self, segment: &str) -> Result<SegmentHandle, Error> {
        let known = self.open.lock().unwrap_or_else(PoisonError::into_inner).get(segment).copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        // Not under the lock: a peer that does not answer delays no other.
        let handle = self.engine.open_segment(segment)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&other) = open.get(segment) {
            // Another thread was faster; its handle is used.
            let _ = self.engine.close_segment(handle);
            return Ok(other);
        }
        open.insert(segment.to_owned(), handle);
        Ok(handle)
    }

    /// Submits reads from open segments.
    ///
    /// # Errors
    /// When a request is invalid, or its segment is closed.
    pub(super) fn submit(&self, requests: &[TransferRequest], options: &SubmitOptions) -> Result<Batch, Error> {
        Ok(self.engine.submit(requests, options)?)
    }

    /// Closes a peer's segment, so that it is opened again at the next use.
    pub(super) fn suspect(&self, segment: &str) {
        if let Some(handle) = self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(segment) {
            // The last user drops it.
            let _ = self.engine.close_segment(handle);
        }
    }
}

impl Drop for Sources<'_> {
    fn drop(&mut self) {
        let open = std::mem::take(self.open.get_mut().unwrap_or_else(PoisonError::into_inner));
        for handle in open.into_values() {
            let _ = self.engine.close_segment(handle);
        }
    }
}
