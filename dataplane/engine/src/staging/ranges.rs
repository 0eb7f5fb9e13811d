//! Memory of requests that are staged: a device's, or pieces of which some are a device's.

use std::sync::Arc;

use kvplane_sys::IoBuf;
use kvplane_sys::device::{Device, DeviceMemory, DeviceRange};

use crate::piece_list::PieceList;

/// Range of memory: of the host, or of a device.
#[derive(Clone, Debug)]
pub enum MemoryRange {
    /// Memory of the host.
    Host(IoBuf),
    /// Memory of a device.
    Device(DeviceRange),
}

impl MemoryRange {
    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.bytes() as u64,
            Self::Device(range) => range.bytes(),
        }
    }

    /// Returns the device; `None` for memory of the host.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        match self {
            Self::Host(_) => None,
            Self::Device(range) => Some(range.memory().device()),
        }
    }

    /// Returns the part of `bytes` bytes at offset `from`.
    ///
    /// # Panics
    /// If it is not inside.
    pub(crate) fn slice(&self, from: u64, bytes: u64) -> Self {
        match self {
            Self::Host(buffer) => Self::Host(buffer.slice(from as usize, bytes as usize)),
            Self::Device(range) => Self::Device(range.slice(from, bytes)),
        }
    }
}

/// Memory behind a buffer index of an initiator, with device memory in it.
#[derive(Debug)]
pub(crate) enum StagedMemory {
    /// Memory of a device.
    Whole(Arc<DeviceMemory>),
    /// Pieces, as if they were contiguous; those of a device are all of one.
    Pieces {
        /// Device.
        device: Arc<Device>,
        /// Pieces.
        pieces: PieceList<MemoryRange>,
    },
}

impl StagedMemory {
    /// Returns the memory if it is all a device's.
    pub(crate) const fn whole(&self) -> Option<&Arc<DeviceMemory>> {
        match self {
            Self::Whole(memory) => Some(memory),
            Self::Pieces { .. } => None,
        }
    }

    /// Joins pieces of this device and of the host; `None` if some are of another device.
    pub(crate) fn join(device: Arc<Device>, pieces: Vec<MemoryRange>) -> Option<Self> {
        let mut devices = pieces.iter().filter_map(MemoryRange::device);
        let is_of_one = devices.all(|other| other.id() == device.id());
        is_of_one.then(|| Self::Pieces { device, pieces: PieceList::new(pieces, MemoryRange::bytes) })
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> &Arc<Device> {
        match self {
            Self::Whole(memory) => memory.device(),
            Self::Pieces { device, .. } => device,
        }
    }

    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Whole(memory) => memory.bytes(),
            Self::Pieces { pieces, .. } => pieces.bytes(),
        }
    }

    /// Returns the memory of a range, in order.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) fn ranges(&self, offset: u64, bytes: u64) -> Vec<MemoryRange> {
        match self {
            Self::Whole(memory) => vec![MemoryRange::Device(DeviceRange::new(memory, offset, bytes))],
            Self::Pieces { pieces, .. } => {
                pieces.range(offset, bytes).map(|(piece, from, bytes)| piece.slice(from, bytes)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_sys::{Region, RegionOptions};

    use super::*;

    #[test]
    fn pieces_of_the_host_have_no_device() {
        let region = Region::allocate(&RegionOptions::new("pieces", 4096)).expect("memory");
        let piece = |at| MemoryRange::Host(IoBuf::new(Arc::clone(&region), at, 100));
        assert!([piece(0), piece(200)].iter().all(|piece| piece.device().is_none()));
        let part = piece(200).slice(10, 20);
        assert!(matches!(part, MemoryRange::Host(buffer) if (buffer.offset(), buffer.bytes()) == (210, 20)));
    }
}
