//! Checks of the memory of a batch of copies: the driver is asked once about each.

use std::sync::Arc;

use kvplane_sys::device::{DeviceError, DeviceMemory};

/// Checks of one batch.
#[derive(Default)]
pub(crate) struct AllocationChecks {
    memory: Vec<(*const DeviceMemory, bool)>,
    problem: Option<DeviceError>,
}

impl AllocationChecks {
    /// Checks that all this memory is still the allocations that were registered.
    ///
    /// # Errors
    /// The error of memory that is not.
    pub(crate) fn all<'a>(memory: impl IntoIterator<Item = &'a Arc<DeviceMemory>>) -> Result<(), DeviceError> {
        let mut checks = Self::default();
        let _ = memory.into_iter().all(|one| checks.is_good(one));
        checks.take_problem().map_or(Ok(()), Err)
    }

    /// Returns true if memory is still the allocation that was registered.
    pub(super) fn is_good(&mut self, memory: &Arc<DeviceMemory>) -> bool {
        let key = Arc::as_ptr(memory);
        if let Some(&(_, is_good)) = self.memory.iter().find(|(other, _)| *other == key) {
            return is_good;
        }
        let checked = memory.check();
        let is_good = checked.is_ok();
        self.problem = checked.err().or(self.problem.take());
        self.memory.push((key, is_good));
        is_good
    }

    /// Returns the error of the memory that was found last not to be the allocation that was registered.
    pub(super) const fn take_problem(&mut self) -> Option<DeviceError> {
        self.problem.take()
    }
}
