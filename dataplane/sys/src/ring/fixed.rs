//! Registered buffers of a ring: regions whose pages the kernel pins once instead of at every operation.
//!
//! A registered region is held until it is unregistered or the ring is dropped. Operations on it use the fixed opcodes
//! automatically, so callers see only the difference in speed. A region that cannot be registered (because of the limit
//! of locked memory, or a full table) is used like any other. The kernel pins at most 1 GiB as one buffer, so a longer
//! region takes several table entries; a buffer across two of them is used unregistered.

use crate::region::{IoBuf, Region};
use io_uring::Submitter;
use std::io;
use std::sync::Arc;

/// Size of the table of registered buffers: each region takes one entry per GiB.
pub(super) const FIXED_PLACES: usize = 1024;
/// Limit of one registered buffer, in bytes.
const FIXED_BYTES_MOST: usize = 1 << 30;

/// A registered part of a region.
struct Window {
    region: Arc<Region>,
    start: usize,
    bytes: usize,
}

/// Registered windows by their index in the kernel's table.
#[derive(Default)]
pub(super) struct FixedWindows {
    made: bool,
    windows: Vec<Option<Window>>,
}

impl FixedWindows {
    /// Returns the index of the window that contains a buffer.
    pub(super) fn place_of(&self, buffer: &IoBuf) -> Option<u16> {
        let end = buffer.offset() + buffer.bytes();
        let found = self.windows.iter().position(|window| {
            window.as_ref().is_some_and(|window| {
                let inside = buffer.offset() >= window.start && end <= window.start + window.bytes;
                inside && Arc::ptr_eq(&window.region, buffer.region())
            })
        });
        found.map(|place| place as u16)
    }

    fn has(&self, region: &Arc<Region>) -> bool {
        self.windows.iter().flatten().any(|window| Arc::ptr_eq(&window.region, region))
    }

    /// Returns a free index, if there is one.
    fn free(&mut self) -> Option<usize> {
        if let Some(place) = self.windows.iter().position(Option::is_none) {
            return Some(place);
        }
        if self.windows.len() == FIXED_PLACES {
            return None;
        }
        self.windows.push(None);
        Some(self.windows.len() - 1)
    }

    /// See [`Ring::register_region`](super::Ring::register_region).
    pub(super) fn register(&mut self, region: &Arc<Region>, kernel: &Submitter<'_>) -> io::Result<()> {
        if self.has(region) {
            return Ok(());
        }
        if !self.made {
            kernel.register_buffers_sparse(FIXED_PLACES as u32)?;
            self.made = true;
        }
        let mut start = 0;
        while start < region.bytes() {
            let bytes = (region.bytes() - start).min(FIXED_BYTES_MOST);
            let registered = match self.free() {
                Some(place) => update(place, region.at(start), bytes, kernel).map(|()| place),
                None => Err(io::Error::other(format!("{FIXED_PLACES} buffers are registered, which is the limit"))),
            };
            let place = registered.inspect_err(|_| self.unregister(region, kernel))?;
            self.windows[place] = Some(Window { region: Arc::clone(region), start, bytes });
            start += bytes;
        }
        Ok(())
    }

    /// See [`Ring::unregister_region`](super::Ring::unregister_region).
    pub(super) fn unregister(&mut self, region: &Arc<Region>, kernel: &Submitter<'_>) {
        for (place, window) in self.windows.iter_mut().enumerate() {
            let ours = window.as_ref().is_some_and(|window| Arc::ptr_eq(&window.region, region));
            if ours && update(place, std::ptr::null_mut(), 0, kernel).is_ok() {
                *window = None;
            }
        }
    }
}

fn update(place: usize, address: *mut u8, bytes: usize, kernel: &Submitter<'_>) -> io::Result<()> {
    let entry = [libc::iovec { iov_base: address.cast(), iov_len: bytes }];
    // SAFETY: the range lies in a region that is held in the table until the kernel has unregistered it or the ring is
    // gone; a null entry names no memory.
    unsafe { kernel.register_buffers_update(place as u32, &entry, None) }?;
    Ok(())
}
