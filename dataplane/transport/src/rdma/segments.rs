//! Our segments, which peers reach by their own requests: their registrations with each device.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_proto::{SegmentId, Status};
use kvplane_sys::verbs::MemoryRegion;
use kvplane_sys::{IoBuf, Region};

use super::nic::{Nic, access};
use super::wire::SegmentKey;

/// A segment that peers may reach.
struct Segment {
    region: Arc<Region>,
    bytes: u64,
    writable: bool,
    /// One registration for each device that it was needed on; none where the device refused.
    keys: HashMap<usize, Option<MemoryRegion>>,
}

impl Segment {
    /// The registration with a device, made now if there is none; why it was refused goes to `problem`.
    fn register(&mut self, index: usize, nic: &Nic, problem: &mut Option<String>) -> Option<&MemoryRegion> {
        let Self { region, bytes, writable, keys } = self;
        let key = keys.entry(index).or_insert_with(|| {
            let memory = IoBuf::new(Arc::clone(region), 0, *bytes as usize);
            let registered = nic.domain.register(&memory, access(region, *writable));
            registered.map_err(|error| *problem = Some(error.to_string())).ok()
        });
        key.as_ref()
    }
}

/// All segments that peers may reach.
#[derive(Default)]
pub(super) struct Segments {
    published: HashMap<SegmentId, Segment>,
    /// Why one could not be registered last.
    problem: Option<String>,
}

impl Segments {
    /// Lets peers reach this memory. Registered with each device now; where one refuses, peers use frames.
    pub(super) fn publish(
        &mut self,
        segment: SegmentId,
        region: &Arc<Region>,
        bytes: u64,
        writable: bool,
        nics: &[Nic],
    ) {
        let bytes = bytes.min(region.bytes() as u64);
        let mut entry = Segment { region: Arc::clone(region), bytes, writable, keys: HashMap::new() };
        for (index, nic) in nics.iter().enumerate() {
            entry.register(index, nic, &mut self.problem);
        }
        self.published.insert(segment, entry);
    }

    /// Ends peers' access: when this returns, no device lets anybody in any more. False when there was none.
    pub(super) fn retract(&mut self, segment: SegmentId) -> bool {
        self.published.remove(&segment).is_some()
    }

    /// The answer for a peer that wants to reach a segment over this device.
    pub(super) fn key_on(&mut self, segment: SegmentId, index: usize, nic: &Nic) -> SegmentKey {
        let Some(entry) = self.published.get_mut(&segment) else { return SegmentKey::refused(Status::Stale) };
        let (writable, bytes) = (entry.writable, entry.bytes);
        match entry.register(index, nic, &mut self.problem) {
            Some(memory) => {
                SegmentKey { status: Status::Ok, writable, key: memory.remote_key(), address: memory.address(), bytes }
            }
            None => SegmentKey::refused(Status::Unsupported),
        }
    }

    /// The local and the remote key of a segment on a device; none where it is refused.
    pub(super) fn keys_on(&mut self, segment: SegmentId, index: usize, nic: &Nic) -> Option<(u32, u32)> {
        let memory = self.published.get_mut(&segment)?.register(index, nic, &mut self.problem)?;
        Some((memory.local_key(), memory.remote_key()))
    }

    /// Why one could not be registered, once.
    pub(super) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }
}
