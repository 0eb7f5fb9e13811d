//! Description of a stock Mooncake engine's memory: its buffers and the remote keys under which its devices grant
//! access.
//!
//! Shared by all hosts of a process. The engine's description may change: buffers come and go, and after a restart
//! everything is different. Each change is a new generation in the ids of the buffers: a copy to a buffer of an old
//! generation fails as stale, and the caller fetches the description again.

use std::fmt;
use std::sync::{PoisonError, RwLock};

use kvplane_proto::{SegmentId, Status};

use super::wire::SegmentKey;

/// Buffer of a stock engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignBuffer {
    /// First address, in the engine's process.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Remote key on each device, by position; fewer where a device does not reach the buffer.
    pub keys: Vec<u32>,
}

#[derive(Default)]
struct KnownPeer {
    generation: u32,
    devices: Vec<String>,
    buffers: Vec<ForeignBuffer>,
}

/// A stock engine reached over RDMA. Any thread may use it.
pub struct ForeignPeer {
    name: String,
    known: RwLock<KnownPeer>,
}

impl ForeignPeer {
    /// Creates an engine of this name without a description.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), known: RwLock::default() }
    }

    /// Returns the name of its segment.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Stores the engine's current description. Returns the generation for the ids of its buffers; the index of an id
    /// is the position in this list. An equal description keeps its generation.
    pub fn learn(&self, devices: Vec<String>, buffers: Vec<ForeignBuffer>) -> u32 {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.generation == 0 || known.devices != devices || known.buffers != buffers {
            let generation = known.generation.wrapping_add(1).max(1);
            *known = KnownPeer { generation, devices, buffers };
        }
        known.generation
    }

    /// Returns the number and the name of the device at `position` modulo the number of devices; `None` if there is
    /// none.
    #[must_use]
    pub fn device(&self, position: usize) -> Option<(usize, String)> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let number = position.checked_rem(known.devices.len())?;
        Some((number, known.devices[number].clone()))
    }

    /// Returns the key of a buffer on a device of the engine.
    pub(super) fn key(&self, segment: SegmentId, device: usize) -> SegmentKey {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let buffer = known.buffers.get(segment.index as usize).filter(|_| segment.generation == known.generation);
        let Some(buffer) = buffer else { return SegmentKey::refused(Status::Stale) };
        match buffer.keys.get(device) {
            Some(&key) => {
                let (address, bytes) = (buffer.address, buffer.bytes);
                SegmentKey { writable: true, ..SegmentKey::whole(Status::Ok, key, address, bytes) }
            }
            None => SegmentKey::refused(Status::Unsupported),
        }
    }
}

impl fmt::Debug for ForeignPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignPeer").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(address: u64, keys: &[u32]) -> ForeignBuffer {
        ForeignBuffer { address, bytes: 4096, keys: keys.to_vec() }
    }

    #[test]
    fn an_equal_description_keeps_its_generation_and_a_new_one_makes_it_stale() {
        let peer = ForeignPeer::new("a:1");
        let devices = || vec!["m0".to_owned(), "m1".to_owned()];
        assert_eq!(peer.device(0), None);
        let first = peer.learn(devices(), vec![buffer(8, &[1, 2]), buffer(65_536, &[3])]);
        assert_eq!(peer.learn(devices(), vec![buffer(8, &[1, 2]), buffer(65_536, &[3])]), first);
        let id = |index, generation| SegmentId { index, generation };
        assert_eq!((peer.key(id(0, first), 1).key, peer.key(id(0, first), 1).address), (2, 8));
        assert_eq!(peer.key(id(1, first), 1).status, Status::Unsupported);
        assert_eq!(peer.key(id(2, first), 0).status, Status::Stale);
        assert_eq!(peer.device(3), Some((1, "m1".to_owned())));
        let second = peer.learn(devices(), vec![buffer(8, &[9, 2])]);
        assert_eq!((peer.key(id(0, first), 0).status, peer.key(id(0, second), 0).key), (Status::Stale, 9));
    }
}
