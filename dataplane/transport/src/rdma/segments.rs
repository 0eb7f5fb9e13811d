//! Published segments: registrations with each device, for one-sided access by peers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use kvplane_proto::{SegmentId, Status};
use kvplane_sys::IoBuf;
use kvplane_sys::device::{Backing, DeviceError, DeviceMemory};
use kvplane_sys::verbs::{Access, MemoryRegion};

use super::nic::{DeviceRegions, ExportedMemory, Nic, access};
use super::wire::SegmentKey;

/// Registration of a segment with one device.
enum Registration {
    /// Of memory of the host; `None` if the device refused.
    Host(Option<MemoryRegion>),
    /// Of memory of a device.
    Device(DeviceRegions),
}

impl Registration {
    /// Returns the registration of the byte at this address.
    fn at(&self, address: u64) -> Option<&MemoryRegion> {
        match self {
            Self::Host(region) => region.as_ref(),
            Self::Device(regions) => regions.at(address),
        }
    }
}

/// A published segment.
struct Segment {
    memory: Backing,
    bytes: u64,
    writable: bool,
    /// Registration by device.
    keys: HashMap<usize, Registration>,
}

impl Segment {
    /// Registers the memory with a device, unless it is registered; the reason of a refusal is stored in `problem`.
    fn register(
        &mut self,
        index: usize,
        nic: &mut Nic,
        exported: Option<&ExportedMemory>,
        problem: &mut Option<String>,
    ) {
        let Self { memory, bytes, writable, keys } = self;
        let Entry::Vacant(entry) = keys.entry(index) else { return };
        entry.insert(match memory {
            Backing::Host(region) => {
                let memory = IoBuf::new(Arc::clone(region), 0, *bytes as usize);
                let registered = nic.domain.register(&memory, access(region, *writable));
                Registration::Host(registered.map_err(|error| *problem = Some(error.to_string())).ok())
            }
            Backing::Device(memory) => {
                let rights = Access { remote_write: *writable, ..Access::REMOTE };
                let own;
                let exported = match exported {
                    Some(exported) => exported,
                    None => {
                        own = ExportedMemory::new(memory);
                        &own
                    }
                };
                Registration::Device(DeviceRegions::register(exported, &nic.domain, &mut nic.piece_sizes, rights))
            }
        });
    }

    /// Returns the key for the byte at this offset on a device where the memory is registered.
    fn key_at(&self, offset: u64, index: usize) -> SegmentKey {
        let (address, bytes) = (self.memory.address(), self.bytes);
        let found = self.keys.get(&index).and_then(|registration| registration.at(address + offset));
        let Some(memory) = found else { return SegmentKey::refused(Status::Unsupported) };
        let start = memory.address() - address;
        SegmentKey {
            writable: self.writable,
            flush: self.memory.device().is_some_and(|memory| memory.device().info().needs_flush),
            start,
            end: bytes.min(start + memory.bytes() as u64),
            ..SegmentKey::whole(Status::Ok, memory.remote_key(), address, bytes)
        }
    }
}

/// All published segments.
#[derive(Default)]
pub(super) struct Segments {
    published: HashMap<SegmentId, Segment>,
    /// Reason of the last refused registration.
    problem: Option<String>,
}

impl Segments {
    /// Publishes memory. Registers it with each device now; over a device that refuses, peers use frames.
    pub(super) fn publish(
        &mut self,
        segment: SegmentId,
        memory: &Backing,
        bytes: u64,
        writable: bool,
        nics: &mut [Nic],
    ) {
        let bytes = bytes.min(memory.bytes());
        let mut entry = Segment { memory: memory.clone(), bytes, writable, keys: HashMap::new() };
        let exported = memory.device().filter(|_| !nics.is_empty()).map(ExportedMemory::new);
        for (index, nic) in nics.iter_mut().enumerate() {
            entry.register(index, nic, exported.as_ref(), &mut self.problem);
        }
        self.published.insert(segment, entry);
    }

    /// Revokes peers' access: when this returns, no device grants access any more. Returns false if the segment was not
    /// published.
    pub(super) fn retract(&mut self, segment: SegmentId) -> bool {
        self.published.remove(&segment).is_some()
    }

    /// Returns the key for this offset of a segment on this device, as the reply to a peer's request. Without an offset
    /// the peer knows no keys of parts.
    pub(super) fn key_on(
        &mut self,
        segment: SegmentId,
        offset: Option<u64>,
        index: usize,
        nic: &mut Nic,
    ) -> SegmentKey {
        let Some(entry) = self.published.get_mut(&segment) else { return SegmentKey::refused(Status::Stale) };
        if let Some(Err(error)) = entry.memory.device().map(|memory| memory.check()) {
            self.problem = Some(error.to_string());
            let is_stale = matches!(error, DeviceError::Stale { .. });
            return SegmentKey::refused(if is_stale { Status::Stale } else { Status::DeviceFailed });
        }
        entry.register(index, nic, None, &mut self.problem);
        let key = entry.key_at(offset.unwrap_or(0), index);
        if key.is_part() && offset.is_none() { SegmentKey::refused(Status::Unsupported) } else { key }
    }

    /// Makes the writes of peers into a segment of device memory visible on the device.
    pub(super) fn flush(&mut self, segment: SegmentId) -> Status {
        let Some(entry) = self.published.get(&segment) else { return Status::Stale };
        let flushed = entry.memory.device().map_or(Ok(()), |memory| memory.device().flush_writes());
        match flushed {
            Ok(()) => Status::Ok,
            Err(error) => {
                self.problem = Some(error.to_string());
                Status::DeviceFailed
            }
        }
    }

    /// Returns the local and the remote key of a segment on a device; `None` if the registration was refused, or there
    /// is none of the whole segment.
    pub(super) fn keys_on(&mut self, segment: SegmentId, index: usize, nic: &mut Nic) -> Option<(u32, u32)> {
        let entry = self.published.get_mut(&segment)?;
        entry.register(index, nic, None, &mut self.problem);
        let memory = entry.keys.get(&index)?.at(entry.memory.address())?;
        (memory.bytes() as u64 >= entry.bytes).then(|| (memory.local_key(), memory.remote_key()))
    }

    /// Returns the registrations of segments of device memory: device by position, memory, registrations.
    pub(super) fn devices(&self) -> impl Iterator<Item = (usize, &Arc<DeviceMemory>, &DeviceRegions)> {
        self.published.values().filter_map(|entry| Some((entry, entry.memory.device()?))).flat_map(|(entry, memory)| {
            entry.keys.iter().filter_map(move |(&index, registration)| match registration {
                Registration::Device(regions) => Some((index, memory, regions)),
                Registration::Host(_) => None,
            })
        })
    }

    /// Returns and clears the reason of the last refused registration.
    pub(super) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }
}
