//! Check that a device is blank: everything that formatting would overwrite is zero, and so are both of its ends, where
//! partition tables, file systems, swap space, volumes and RAID members keep their signatures.

use crate::device::{Device, Owner};
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Pieces, Priority};
use crate::types::errors::OpenError;
use kvplane_proto::narrowing::length_u32;

/// Bytes of a blank device that must be zero at each end: btrfs has its signature after 64 KiB, partitions begin at one
/// MiB.
pub const ENDS_BYTES: u64 = 1 << 20;
/// Bytes of one read: small enough that no device splits it, as polled reads of mapped devices fail if they are split.
const LOOK_BYTES: u64 = 64 << 10;
/// Reads of a window before it is considered not zero or unreadable: a single read that fails, or is wrong, proves
/// nothing.
const TRIES: u8 = 4;

/// Part of the device that must be zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Window {
    offset: u64,
    bytes: u32,
    /// Number of times that it was read.
    tries: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Both ends of the device are checked,
    Ends,
    /// then the starts of segments.
    Starts { next: u32, left: u32 },
}

/// Check that a device is blank.
#[derive(Debug)]
pub(super) struct BlankCheck {
    step: Step,
    /// Windows being read, by position in the scan area: one for the ends of the device, then one block per position.
    windows: Vec<Window>,
}

impl Default for BlankCheck {
    fn default() -> Self {
        Self { step: Step::Ends, windows: Vec::new() }
    }
}

impl BlankCheck {
    pub(super) fn begin(&mut self, device: &mut Device) {
        self.look_at_ends(0, device);
    }

    /// Handles a window that was read. Returns `None` while other windows are to be read, `Ok` if the device is blank,
    /// else the reason why it cannot be formatted.
    pub(super) fn looked_at(
        &mut self,
        place: u32,
        result: Result<(), Fault>,
        device: &mut Device,
        memory: &mut dyn Memory,
    ) -> Option<Result<(), OpenError>> {
        let window = *self.windows.get(place as usize)?;
        let found = match result {
            Ok(()) => first_not_zero(memory, span_of(place, &window, device))
                .map(|at| OpenError::NotBlank { offset: window.offset + at }),
            Err(_) => Some(OpenError::Unreadable),
        };
        match (found, &mut self.step) {
            (Some(_), _) if window.tries < TRIES => self.look_at(place, window, device),
            (Some(error), _) => return Some(Err(error)),
            (None, Step::Starts { next, left }) => {
                *left -= 1;
                let (upcoming, is_last) = (*next, *left == 0);
                if upcoming < device.config().segments {
                    *next += 1;
                    self.look_at_start(upcoming, place, device);
                } else if is_last {
                    return Some(Ok(()));
                }
            }
            (None, Step::Ends) => self.look_at_ends(window.offset + u64::from(window.bytes), device),
        }
        None
    }

    /// Continues at the ends of the device, from `offset` on.
    fn look_at_ends(&mut self, offset: u64, device: &mut Device) {
        let config = device.config();
        let end_of_device = config.device_bytes();
        let head = ENDS_BYTES.min(end_of_device);
        let tail = head.max(end_of_device - head);
        let (offset, end) = if offset < head { (offset, head) } else { (offset.max(tail), end_of_device) };
        if offset < end {
            let area = u64::from(config.scan_bytes) * u64::from(config.scan_buffers);
            let bytes = area.min(LOOK_BYTES).min(end - offset) as u32;
            return self.look_at(0, Window { offset, bytes, tries: 0 }, device);
        }
        let (segments, first) = (config.segments, device.header_places().min(config.segments));
        self.step = Step::Starts { next: first, left: segments };
        (0..first).for_each(|segment| self.look_at_start(segment, segment, device));
    }

    fn look_at_start(&mut self, segment: u32, place: u32, device: &mut Device) {
        let window = Window { offset: device.segment_at(segment), bytes: device.config().block_bytes, tries: 0 };
        self.look_at(place, window, device);
    }

    fn look_at(&mut self, place: u32, window: Window, device: &mut Device) {
        let window = Window { tries: window.tries + 1, ..window };
        let at = place as usize;
        if at < self.windows.len() {
            self.windows[at] = window;
        } else {
            self.windows.push(window);
        }
        let pieces = Pieces::of(&[span_of(place, &window, device)]);
        device.read(Owner::Look(place), window.offset, pieces, Priority::Get);
    }
}

/// Returns the buffer of a window in the scan area.
fn span_of(place: u32, window: &Window, device: &Device) -> Span {
    Span::staging(device.layout().scans + u64::from(place) * device.block(), window.bytes)
}

/// Returns the offset of the first byte that is not zero.
fn first_not_zero(memory: &dyn Memory, span: Span) -> Option<u64> {
    let mut bytes = [0; 4096];
    let mut done = 0;
    while done < span.bytes {
        let now = (span.bytes - done).min(length_u32(bytes.len()));
        memory.read(span.part(done, now), &mut bytes[..now as usize]);
        if let Some(at) = bytes[..now as usize].iter().position(|byte| *byte != 0) {
            return Some(u64::from(done) + at as u64);
        }
        done += now;
    }
    None
}
