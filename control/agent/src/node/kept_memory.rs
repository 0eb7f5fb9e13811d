//! Directory in which the memory of a node outlives its process.

use std::path::Path;
use std::sync::Arc;

use kvplane_engine::{KeptMemoryConfig, MappedMemory};
use kvplane_sys::MemoryDirectory;
use kvplane_sys::random::random_u64;

use crate::error::Error;
use crate::node::NodeConfigError;

/// Directory that this process has claimed; none if memory ends with the process.
pub(super) struct KeptDirectory {
    directory: Option<Arc<MemoryDirectory>>,
    shards: u16,
}

impl KeptDirectory {
    /// Claims the directory for a node with this many shards.
    pub(super) fn claim(path: Option<&Path>, shards: usize) -> Result<Self, NodeConfigError> {
        let directory = path.map(MemoryDirectory::claim).transpose().map_err(NodeConfigError::KeptMemory)?;
        Ok(Self { directory: directory.map(Arc::new), shards: shards as u16 })
    }

    /// Uses the claim that another process handed over, for a node with this many shards.
    pub(super) fn handed(claim: &Arc<MemoryDirectory>, shards: usize) -> Self {
        Self { directory: Some(Arc::clone(claim)), shards: shards as u16 }
    }

    /// Returns the claim, if memory is kept.
    pub(super) fn directory(&self) -> Option<Arc<MemoryDirectory>> {
        self.directory.clone()
    }

    /// Returns the settings of a shard's memory, which may be mapped already.
    pub(super) fn of_shard(&self, mapped: Option<Arc<MappedMemory>>) -> Result<Option<KeptMemoryConfig>, Error> {
        let Some(directory) = &self.directory else { return Ok(None) };
        let fresh_uuid = u128::from(random_u64()?) << 64 | u128::from(random_u64()?);
        Ok(Some(KeptMemoryConfig { directory: Arc::clone(directory), shards: self.shards, fresh_uuid, mapped }))
    }

    /// Gives the memory of shards back that the node does not have any more. To be called once its other shards have
    /// found that the memory is theirs.
    pub(super) fn remove_unused(&self) -> Result<(), NodeConfigError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let is_unused = |name: &str| shard_of(name).is_some_and(|shard| shard >= u32::from(self.shards));
        directory.remove_if(is_unused).map_err(NodeConfigError::KeptMemory)
    }

    /// Returns a note for logs.
    pub(super) fn note(&self) -> Option<String> {
        let directory = self.directory.as_ref()?;
        Some(format!("memory is kept in {}", directory.path().display()))
    }
}

/// Returns the number of the shard that a file belongs to.
fn shard_of(name: &str) -> Option<u32> {
    let (number, kind) = name.strip_prefix("shard-")?.split_once('.')?;
    if matches!(kind, "pool" | "image") { number.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_shards_are_known_by_their_names() {
        let named = ["shard-0.pool", "shard-12.image"].map(shard_of);
        assert_eq!(named, [Some(0), Some(12)]);
        for other in ["lock", "shard-.pool", "shard-1", "shard-1.pool.old", "shard-x.image", "pool"] {
            assert_eq!(shard_of(other), None, "{other}");
        }
    }
}
