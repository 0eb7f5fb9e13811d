//! Registered buffers: regions whose pages the kernel pins once instead of at every operation.
//!
//! A registered region is held until it is unregistered or the ring is dropped. Operations on it take the fixed form by
//! themselves, so callers do not see the difference but in time. A region that cannot be registered (the limit of
//! locked memory, too long, no free place) is used like any other.

use super::Ring;
use crate::region::{IoBuf, Region};
use std::io;
use std::sync::Arc;

/// Regions that can be registered at once.
pub(super) const FIXED_REGIONS: usize = 64;
/// The kernel pins at most this much as one buffer.
const FIXED_BYTES_MOST: usize = 1 << 30;

/// The registered regions by their place in the kernel's table.
#[derive(Default)]
pub(super) struct Fixed {
    regions: Vec<Option<Arc<Region>>>,
}

impl Fixed {
    /// The place of a buffer's region in the kernel's table.
    pub(super) fn place_of(&self, buffer: &IoBuf) -> Option<u16> {
        let found = self.regions.iter().position(|held| {
            let held = held.as_ref();
            held.is_some_and(|region| Arc::ptr_eq(region, buffer.region()))
        });
        found.map(|place| place as u16)
    }
}

impl Ring {
    /// Pins a region's pages for file operations of this ring.
    ///
    /// # Errors
    /// When the kernel refuses or no place is left; the region can then be used as it is. `ENOMEM` means the limit of
    /// locked memory (`ulimit -l`).
    pub fn register_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        if self.fixed.place_of(&IoBuf::whole(Arc::clone(region))).is_some() {
            return Ok(());
        }
        if region.bytes() > FIXED_BYTES_MOST {
            let text = format!("a region of {} bytes is over the {FIXED_BYTES_MOST} of one buffer", region.bytes());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        if self.fixed.regions.is_empty() {
            self.uring.submitter().register_buffers_sparse(FIXED_REGIONS as u32)?;
            self.fixed.regions.resize(FIXED_REGIONS, None);
        }
        let Some(place) = self.fixed.regions.iter().position(Option::is_none) else {
            return Err(io::Error::other(format!("{FIXED_REGIONS} regions are registered, which is the limit")));
        };
        self.update_fixed(place, region.at(0), region.bytes())?;
        self.fixed.regions[place] = Some(Arc::clone(region));
        Ok(())
    }

    /// Lets a region's pages go. Operations in flight on it keep them until they end.
    pub fn unregister_region(&mut self, region: &Arc<Region>) {
        let Some(place) = self.fixed.place_of(&IoBuf::whole(Arc::clone(region))) else { return };
        let place = usize::from(place);
        if self.update_fixed(place, std::ptr::null_mut(), 0).is_ok() {
            self.fixed.regions[place] = None;
        }
    }

    fn update_fixed(&mut self, place: usize, address: *mut u8, bytes: usize) -> io::Result<()> {
        let entry = [libc::iovec { iov_base: address.cast(), iov_len: bytes }];
        // SAFETY: the range is a whole region, which is held in the table until the kernel was told to forget it or the
        // ring is gone; a null entry names no memory.
        unsafe { self.uring.submitter().register_buffers_update(place as u32, &entry, None) }?;
        Ok(())
    }
}
