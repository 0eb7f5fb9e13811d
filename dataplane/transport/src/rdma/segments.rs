//! Published segments: registrations with each device, for one-sided access by peers.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_proto::{SegmentId, Status};
use kvplane_sys::verbs::MemoryRegion;
use kvplane_sys::{IoBuf, Region};

use super::nic::{Nic, access};
use super::wire::SegmentKey;

/// A published segment.
struct Segment {
    region: Arc<Region>,
    bytes: u64,
    writable: bool,
    /// Registration by device; `None` where the device refused.
    keys: HashMap<usize, Option<MemoryRegion>>,
}

impl Segment {
    /// Returns the registration with a device, registering if necessary; the reason of a refusal is stored in
    /// `problem`.
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

    /// Revokes peers' access: when this returns, no device grants access any more. Returns false if the segment was not
    /// published.
    pub(super) fn retract(&mut self, segment: SegmentId) -> bool {
        self.published.remove(&segment).is_some()
    }

    /// Returns the key of a segment on this device, as the reply to a peer's request.
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

    /// Returns the local and the remote key of a segment on a device; `None` if the registration was refused.
    pub(super) fn keys_on(&mut self, segment: SegmentId, index: usize, nic: &Nic) -> Option<(u32, u32)> {
        let memory = self.published.get_mut(&segment)?.register(index, nic, &mut self.problem)?;
        Some((memory.local_key(), memory.remote_key()))
    }

    /// Returns and clears the reason of the last refused registration.
    pub(super) const fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }
}
