//! Worlds of the durable state: the groups of each, and the number of starts.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use kvplane_cluster::{Record, WorldGroup, WorldGroupKey, WorldRecord};
use kvplane_group::{GroupRecord, GroupRecordError, WorldConfig};
use kvplane_rpc::groups::WorldName;

use super::hosted::HostedWorld;

/// Reason why a stored group cannot be restored.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum WorldRestoreError {
    /// The record is damaged, or of a later version.
    Record { group: WorldGroupKey, source: GroupRecordError },
    /// The record is stored under the key of another group.
    OtherKey { group: WorldGroupKey },
}

impl fmt::Display for WorldRestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (WorldGroupKey { tenant, world, group }, reason) = match self {
            Self::Record { group, source } => (group, source.to_string()),
            Self::OtherKey { group } => (group, "its record is that of another group".to_owned()),
        };
        write!(f, "the stored group {group:016x} of world {world:?} of tenant {tenant:?}: {reason}")
    }
}

impl Error for WorldRestoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Record { source, .. } => Some(source),
            Self::OtherKey { .. } => None,
        }
    }
}

/// Decoded records of process groups.
#[derive(Debug, Default)]
pub(crate) struct StoredWorlds {
    groups: BTreeMap<WorldName, Vec<GroupRecord>>,
    starts: u32,
}

impl StoredWorlds {
    /// Picks the records of process groups out of all records and decodes them.
    ///
    /// # Errors
    /// When one is damaged, or of a later version.
    pub(crate) fn of(records: &[Record]) -> Result<Self, WorldRestoreError> {
        let mut stored = Self::default();
        for record in records {
            match record {
                Record::World(WorldRecord::Starts(starts)) => stored.starts = *starts,
                Record::World(WorldRecord::Group(group)) => stored.insert(group)?,
                _ => {}
            }
        }
        Ok(stored)
    }

    fn insert(&mut self, group: &WorldGroup) -> Result<(), WorldRestoreError> {
        let key = || group.key.clone();
        let decoded = GroupRecord::from_bytes(&group.contents);
        let record = decoded.map_err(|source| WorldRestoreError::Record { group: key(), source })?;
        let WorldGroupKey { tenant, world, group } = key();
        if (record.group.0, &record.world) != (group, &world) {
            return Err(WorldRestoreError::OtherKey { group: key() });
        }
        self.groups.entry(WorldName { tenant, world }).or_default().push(record);
        Ok(())
    }

    /// Starts the worlds at time 0. Returns the number of starts, which is to be made durable, too.
    pub(super) fn start(self, config: &WorldConfig, seed: u64) -> (BTreeMap<WorldName, HostedWorld>, u32) {
        let mut starts = self.starts;
        let mut start = |(name, records): (WorldName, Vec<GroupRecord>)| {
            starts = starts.saturating_add(1);
            let hosted = HostedWorld::new(&name, *config, records, starts, seed, 0);
            (name, hosted)
        };
        let worlds = self.groups.into_iter().map(&mut start).collect();
        (worlds, starts)
    }
}
