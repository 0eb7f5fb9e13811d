//! Shared tier of a node: a store that many nodes see, below the memory and the SSDs of all its shards.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use kvplane_engine::{SharedConfig, SharedSetup, SharedStore, UploadPolicy};
use kvplane_objects::{Deadlines, StoreDriver, StorePlace};
use kvplane_proto::Digest;
use kvplane_proto::ids::Incarnation;

use crate::node::NodeConfigError;

/// Limits of the length of a pack.
const PACK_BYTES: RangeInclusive<u64> = kvplane_engine::SHARED_PACK_BYTES;

/// Settings of a node's shared tier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedTierConfig {
    /// Place of the store: the same for all nodes of a cluster.
    pub place: StorePlace,
    /// Objects that are uploaded.
    pub upload: UploadPolicy,
    /// Length at which a pack is written, in bytes. Objects longer than half of it are not uploaded.
    pub pack_bytes: u64,
    /// Longest time for which an object waits in a pack that is not full.
    pub flush: Duration,
    /// Most bytes of this node's packs: beyond them the oldest ones are dropped. 0 for no limit.
    pub most_bytes: u64,
    /// Lifetime of packs. 0 for no limit.
    pub lifetime: Duration,
    /// Most objects in the index, over all shards, at some 150 bytes of memory for each.
    pub most_objects: u64,
}

impl SharedTierConfig {
    /// Returns the default settings for a place.
    #[must_use]
    pub fn at(place: StorePlace) -> Self {
        let SharedConfig { upload, pack_bytes, flush_ns, most_bytes, lifetime_ms, .. } = SharedConfig::default();
        Self {
            place,
            upload,
            pack_bytes,
            flush: Duration::from_nanos(flush_ns),
            most_bytes,
            lifetime: Duration::from_millis(lifetime_ms),
            most_objects: 1 << 20,
        }
    }

    /// Opens the store, and returns the settings of each of `shards` shards. `last` is the number of the node's
    /// incarnation before the present one.
    pub(crate) fn open(
        &self,
        cluster: &str,
        shards: usize,
        last: Option<Incarnation>,
    ) -> Result<SharedSetup, NodeConfigError> {
        if !PACK_BYTES.contains(&self.pack_bytes) {
            let (least_bytes, most_bytes) = PACK_BYTES.into_inner();
            return Err(NodeConfigError::SharedPack { pack_bytes: self.pack_bytes, least_bytes, most_bytes });
        }
        let least_bytes = self.pack_bytes.saturating_mul(shards.max(1) as u64);
        if self.most_bytes > 0 && self.most_bytes < least_bytes {
            return Err(NodeConfigError::SharedBytes { most_bytes: self.most_bytes, least_bytes });
        }
        let driver = StoreDriver::open(&self.place, cluster, Deadlines::default()).map_err(NodeConfigError::Shared)?;
        let shards = shards.max(1) as u64;
        let config = SharedConfig {
            upload: self.upload,
            pack_bytes: self.pack_bytes,
            flush_ns: u64::try_from(self.flush.as_nanos()).unwrap_or(u64::MAX),
            most_bytes: if self.most_bytes == 0 { 0 } else { (self.most_bytes / shards).max(1) },
            lifetime_ms: u64::try_from(self.lifetime.as_millis()).unwrap_or(u64::MAX),
            most_objects: usize::try_from(self.most_objects / shards).unwrap_or(usize::MAX).max(1),
        };
        let store: Arc<dyn SharedStore> = Arc::new(driver);
        Ok(SharedSetup { config, cluster: Digest::of(b"cluster", cluster.as_bytes()).0, last, store })
    }
}
