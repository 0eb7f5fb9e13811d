//! Memory of a node that a next process can have: files in a directory, which outlive the process, or memfds, which
//! only a successor of the running process takes over.

use std::path::Path;
use std::sync::Arc;

use kvplane_engine::{KeptMemoryConfig, MappedMemory, ShardHandle};
use kvplane_proto::ids::Incarnation;
use kvplane_sys::MemoryDirectory;
use kvplane_sys::random::random_u64;

use super::handover::{Handover, image_room_bytes};
use crate::error::Error;
use crate::node::NodeConfigError;

/// Memory of the shards of a node.
pub(super) struct KeptMemory {
    /// Directory that this process has claimed; none for memfds.
    directory: Option<Arc<MemoryDirectory>>,
    shards: u16,
    /// Memory of each shard that was handed over; empty if none was.
    handed: Vec<Arc<MappedMemory>>,
    /// True if none of the objects in it count.
    is_void: bool,
    /// Last member of the node, whose images count; none if they count by themselves.
    last_member: Option<Incarnation>,
}

impl KeptMemory {
    /// Claims the directory, if there is one, for a node with this many shards, whose last member this incarnation was.
    pub(super) fn claim(
        path: Option<&Path>,
        shards: usize,
        last_member: Option<Incarnation>,
    ) -> Result<Self, NodeConfigError> {
        let directory = path.map(MemoryDirectory::claim).transpose().map_err(NodeConfigError::KeptMemory)?;
        let (directory, shards) = (directory.map(Arc::new), shards as u16);
        Ok(Self { directory, shards, handed: Vec::new(), is_void: false, last_member })
    }

    /// Uses the memory that was handed over.
    pub(super) fn handed(handover: &Handover, is_void: bool) -> Self {
        let (directory, handed) = (handover.claim.clone(), handover.memory.clone());
        Self { directory, shards: handed.len() as u16, handed, is_void, last_member: None }
    }

    /// Returns the claim, if there is a directory.
    pub(super) fn directory(&self) -> Option<Arc<MemoryDirectory>> {
        self.directory.clone()
    }

    /// Returns the settings of a shard's memory.
    pub(super) fn of_shard(&self, shard: usize) -> Result<KeptMemoryConfig, Error> {
        Ok(KeptMemoryConfig {
            directory: self.directory.clone(),
            shards: self.shards,
            fresh_uuid: u128::from(random_u64()?) << 64 | u128::from(random_u64()?),
            mapped: self.handed.get(shard).cloned(),
            is_void: self.is_void,
            last_member: self.last_member,
        })
    }

    /// Gives the memory of shards back that the node does not have any more. To be called once its other shards have
    /// found that the memory is theirs.
    pub(super) fn remove_unused(&self) -> Result<(), NodeConfigError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let is_unused = |name: &str| shard_of(name).is_some_and(|shard| shard >= u32::from(self.shards));
        directory.remove_if(is_unused).map_err(NodeConfigError::KeptMemory)
    }

    /// Returns a warning if the file system has no room for the image of as many objects as the shards take.
    pub(super) fn room_note(&self, shards: &[ShardHandle], most: u64) -> Option<String> {
        let directory = self.directory.as_ref()?;
        // Former images are given back, or replaced.
        let images = shards.iter().filter_map(|shard| shard.memory()?.files().image().bytes().ok());
        let free = directory.free_bytes().ok()??.saturating_add(images.sum());
        let needed = image_room_bytes(most);
        (free < needed).then(|| {
            format!(
                "warning: {} has room of {free} bytes, and the image of {most} objects needs {needed}: with so many, \
                 memory is lost with this process; make the file system larger (mount -o remount,size=), or lower \
                 --max-objects",
                directory.path().display()
            )
        })
    }

    /// Returns a note for logs.
    pub(super) fn note(&self) -> String {
        match &self.directory {
            Some(directory) => format!("memory is kept in {}", directory.path().display()),
            None if self.handed.is_empty() => "memory is empty: without --keep-memory it has ended with any former \
                                               process; kvplane ctl upgrade hands it to a next one"
                .to_owned(),
            None => "memory was taken over; without --keep-memory it ends with the last process that has it".to_owned(),
        }
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
