//! The program's mirror of the active ranks.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use kvplane::group::GroupError;

use super::membership::Membership;
use super::outcome::{CallFailure, ResultCode};

/// Longest wait of the thread for a view, before it looks whether the membership has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Memory of the program with an entry for each rank.
pub(crate) struct Mirror {
    /// Null once the program may free the memory.
    address: Mutex<*mut i32>,
    entries: usize,
}

// SAFETY: the pointer is used under the lock, for single atomic stores.
unsafe impl Send for Mirror {}
// SAFETY: as above.
unsafe impl Sync for Mirror {}

impl Mirror {
    /// Takes memory of `entries` aligned entries, which the caller keeps valid until [`Self::end`].
    pub(crate) const fn new(address: *mut i32, entries: usize) -> Self {
        Self { address: Mutex::new(address), entries }
    }

    /// Writes the newest state, as `is_active` finds it under the lock: an older one never overwrites a newer one.
    pub(crate) fn write(&self, active: impl FnOnce() -> Vec<bool>) {
        let address = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        if address.is_null() {
            return;
        }
        for (at, is_active) in active().into_iter().take(self.entries).enumerate() {
            // SAFETY: valid, aligned and inside the entries, by the promise of the program; it reads whole entries.
            unsafe { AtomicI32::from_ptr(address.add(at)) }.store(i32::from(is_active), Ordering::Release);
        }
    }

    /// Writes no more.
    pub(crate) fn end(&self) {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = std::ptr::null_mut();
    }
}

/// Keeps a membership's mirror up to date, from a thread of its own that ends with the membership.
pub(crate) fn follow(membership: &Arc<Membership>) -> Result<(), CallFailure> {
    let (group, watched) = (membership.group.clone(), Arc::downgrade(membership));
    let started = thread::Builder::new().name("kvplane-mirror".to_owned()).spawn(move || {
        let mut epoch = group.view().epoch;
        loop {
            let changed = group.await_epoch(epoch + 1, LOOK);
            let Some(membership) = Weak::upgrade(&watched).filter(|membership| !membership.has_ended()) else { return };
            match changed {
                Ok(()) => {
                    epoch = group.view().epoch.max(epoch);
                    membership.write_mirror();
                }
                Err(GroupError::Late { .. }) => {}
                // The process has left its world: no view follows.
                Err(_) => return,
            }
        }
    });
    started.map(drop).map_err(|error| {
        CallFailure::new(
            ResultCode::System,
            format_args!("a thread for activeRanksMirror could not be started: {error}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_is_written_until_its_end() {
        let mut memory = [7; 4];
        let mirror = Mirror::new(memory.as_mut_ptr(), 3);
        mirror.write(|| vec![true, false, true, true]);
        mirror.end();
        mirror.write(|| vec![false; 3]);
        assert_eq!(memory, [1, 0, 1, 7]);
    }
}
