//! Answers to requests for the memory of segments: the host's is passed as a descriptor, a device's as a handle of its
//! driver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::Region;
use kvplane_sys::device::{Family, HANDLE_BYTES, ShareHandle, SharedAllocation};

use super::ShareError;
use super::setup::WORDS;

/// Kinds of answers, in their first word.
pub(super) const NONE: u64 = 0;
pub(super) const REGION: u64 = 1;
const DEVICE_BYTES: u64 = 2;
const DEVICE_DESCRIPTOR: u64 = 3;
pub(super) const KNOWN: u64 = 4;
const DEVICE_FABRIC: u64 = 5;

/// Word of a handle's first bytes.
const HANDLE_AT: usize = 8;
const _: () = assert!(HANDLE_AT + HANDLE_BYTES / 8 == WORDS);

/// Memory that a client requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryRequest {
    /// Memory of the host.
    Region,
    /// Memory of a device.
    Device {
        /// Buffer id of the allocation that the client has mapped for this segment; 0 if it has none.
        known: u64,
    },
}

/// Memory that a shard offers in an answer.
#[derive(Debug)]
pub enum SegmentOffer<'a> {
    /// None: the client uses another path.
    None,
    /// Memory of the host.
    Region {
        /// Memory.
        region: &'a Arc<Region>,
        /// True if the client may write it.
        writable: bool,
    },
    /// Memory of a device, which the client may write.
    Device(&'a SharedAllocation),
    /// The allocation that the client has mapped.
    Known,
}

/// Memory of a peer's segment, as the answer to a request.
#[derive(Debug)]
pub enum SegmentMemory {
    /// Memory of the host, mapped here.
    Region(Arc<Region>),
    /// Memory of a device.
    Device(Box<SharedAllocation>),
    /// The allocation that is mapped here is still that of the segment.
    Known,
}

/// Answer of a peer as it arrived.
pub(super) enum SegmentAnswer {
    None,
    Region { memory: OwnedFd, bytes: u64, writable: bool },
    Device(Box<SharedAllocation>),
    Known,
}

impl SegmentAnswer {
    /// Returns the memory; that of the host is mapped for it.
    ///
    /// # Errors
    /// When the peer does not share it, or it cannot be mapped.
    pub(super) fn memory(self) -> Result<SegmentMemory, ShareError> {
        match self {
            Self::None => Err(ShareError::NotShared),
            Self::Region { memory, bytes, writable } => {
                let bytes = usize::try_from(bytes).map_err(|_| ShareError::TooLarge { bytes })?;
                let region = Region::map_shared(memory, bytes, writable).map_err(ShareError::Map)?;
                Ok(SegmentMemory::Region(region))
            }
            Self::Device(shared) => Ok(SegmentMemory::Device(shared)),
            Self::Known => Ok(SegmentMemory::Known),
        }
    }
}

/// Encodes the answer for a segment of a device.
pub(super) fn of_device(segment: SegmentId, shared: &SharedAllocation) -> ([u64; WORDS], Option<BorrowedFd<'_>>) {
    let SharedAllocation { family, pci, process, buffer_id, bytes, offset, handle } = shared;
    let position = Family::ALL.iter().position(|one| one == family).unwrap_or_default();
    let mut words = [0; WORDS];
    words[1..HANDLE_AT].copy_from_slice(&[
        *bytes,
        *buffer_id,
        segment.to_bits(),
        *offset,
        position as u64,
        *pci,
        *process,
    ]);
    match handle {
        ShareHandle::Bytes(bytes) | ShareHandle::Fabric(bytes) => {
            let is_fabric = matches!(handle, ShareHandle::Fabric(_));
            words[0] = if is_fabric { DEVICE_FABRIC } else { DEVICE_BYTES };
            for (word, bytes) in words[HANDLE_AT..].iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            (words, None)
        }
        ShareHandle::Descriptor(fd) => {
            words[0] = DEVICE_DESCRIPTOR;
            (words, Some(fd.as_fd()))
        }
    }
}

/// Decodes an answer and the segment that it is for. One that is malformed offers nothing.
pub(super) fn decode(words: &[u64; WORDS], fd: Option<OwnedFd>) -> (SegmentId, SegmentAnswer) {
    let [kind, bytes, third, named, ..] = *words;
    let answer = match (kind, fd) {
        (REGION, Some(memory)) => SegmentAnswer::Region { memory, bytes, writable: third != 0 },
        (DEVICE_BYTES | DEVICE_FABRIC, None) => {
            let mut handle = [0; HANDLE_BYTES];
            for (bytes, word) in handle.as_chunks_mut().0.iter_mut().zip(&words[HANDLE_AT..]) {
                *bytes = word.to_le_bytes();
            }
            let is_fabric = kind == DEVICE_FABRIC;
            device(words, if is_fabric { ShareHandle::Fabric(handle) } else { ShareHandle::Bytes(handle) })
        }
        (DEVICE_DESCRIPTOR, Some(fd)) => device(words, ShareHandle::Descriptor(fd)),
        (KNOWN, None) => SegmentAnswer::Known,
        _ => SegmentAnswer::None,
    };
    (SegmentId::from_bits(named), answer)
}

fn device(words: &[u64; WORDS], handle: ShareHandle) -> SegmentAnswer {
    let [_, bytes, buffer_id, _, offset, position, pci, process, ..] = *words;
    let family = usize::try_from(position).ok().and_then(|position| Family::ALL.get(position));
    let Some(&family) = family else { return SegmentAnswer::None };
    SegmentAnswer::Device(Box::new(SharedAllocation { family, pci, process, buffer_id, bytes, offset, handle }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_devices_survive_the_wire_and_malformed_answers_offer_nothing() {
        let segment = SegmentId { index: 3, generation: 9 };
        let bytes: [u8; HANDLE_BYTES] = core::array::from_fn(|at| at as u8 + 1);
        let shared = SharedAllocation {
            family: Family::Hip,
            pci: 0x00a1_0000,
            process: u64::MAX,
            buffer_id: 5,
            bytes: 4096,
            offset: 100,
            handle: ShareHandle::Bytes(bytes),
        };
        let (mut words, fd) = of_device(segment, &shared);
        assert!(fd.is_none());
        let (named, answer) = decode(&words, None);
        let SegmentAnswer::Device(found) = answer else { panic!("a device's memory") };
        assert_eq!((named, found.family, found.pci, found.process), (segment, Family::Hip, 0x00a1_0000, u64::MAX));
        assert_eq!((found.buffer_id, found.bytes, found.offset), (5, 4096, 100));
        assert!(matches!(found.handle, ShareHandle::Bytes(found) if found == bytes));
        let shared = SharedAllocation { handle: ShareHandle::Fabric(bytes), ..shared };
        let SegmentAnswer::Device(found) = decode(&of_device(segment, &shared).0, None).1 else {
            panic!("a device's memory")
        };
        assert!(matches!(found.handle, ShareHandle::Fabric(found) if found == bytes));
        words[5] = 7;
        assert!(matches!(decode(&words, None).1, SegmentAnswer::None), "an unknown vendor");
        for kind in [REGION, DEVICE_DESCRIPTOR, 6, u64::MAX] {
            words[0] = kind;
            assert!(matches!(decode(&words, None).1, SegmentAnswer::None), "{kind}, without a descriptor");
        }
    }
}
