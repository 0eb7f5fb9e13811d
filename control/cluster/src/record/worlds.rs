//! Durable records of process groups: the groups of each world, and the number of worlds that were started.
//!
//! The cluster's state machine keeps none of these records; it only passes them through. The host of the worlds
//! persists them before it publishes what follows from them, and restores them after a restart or a takeover. What a
//! group's record contains is the encoding of the groups' own state machine.
//!
//! ```text
//! starts: 10 u8 | starts u32
//! group:  11 u8 | group u64 | tenant, world: texts without NUL | contents: length u32, bytes
//! ```

use kvplane_proto::map::codec::{DecodeError, Reader, put_text};

/// Maximum length of a world's name, in bytes.
pub const MAX_WORLD_NAME_BYTES: usize = 128;

/// Durable record of process groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorldRecord {
    /// Number of worlds that were started in this cluster state, restarts included.
    Starts(u32),
    /// A process group.
    Group(WorldGroup),
}

/// A process group, for the host of its world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WorldGroup {
    pub key: WorldGroupKey,
    /// The record in the encoding of the groups' state machine.
    pub contents: Vec<u8>,
}

/// Names a process group of a world.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WorldGroupKey {
    pub tenant: String,
    pub world: String,
    pub group: u64,
}

/// Key under which a record of process groups is stored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorldKey {
    /// The number of started worlds: there is one.
    Starts,
    /// A process group.
    Group(WorldGroupKey),
}

impl WorldKey {
    /// See [`crate::RecordKey::to_bytes`]. The texts have no NUL, so the bytes sort like the keys.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Starts => vec![10],
            Self::Group(WorldGroupKey { tenant, world, group }) => {
                [&[11], tenant.as_bytes(), &[0], world.as_bytes(), &[0], &group.to_be_bytes()].concat()
            }
        }
    }
}

impl WorldRecord {
    /// Returns the key under which this record is stored.
    #[must_use]
    pub fn key(&self) -> WorldKey {
        match self {
            Self::Starts(_) => WorldKey::Starts,
            Self::Group(group) => WorldKey::Group(group.key.clone()),
        }
    }

    /// Appends kind and contents of the record.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Starts(starts) => {
                out.push(10);
                out.extend_from_slice(&starts.to_le_bytes());
            }
            Self::Group(WorldGroup { key: WorldGroupKey { tenant, world, group }, contents }) => {
                out.push(11);
                out.extend_from_slice(&group.to_le_bytes());
                for text in [tenant, world] {
                    assert!(!text.contains('\0'), "a name with NUL reached the encoder");
                    put_text(out, text);
                }
                let length = u32::try_from(contents.len()).expect("a record over its limit reached the encoder");
                out.extend_from_slice(&length.to_le_bytes());
                out.extend_from_slice(contents);
            }
        }
    }

    /// Reads the contents of a record of this kind; returns `None` for a kind that is not one of process groups.
    pub(crate) fn read(kind: u8, reader: &mut Reader<'_>) -> Result<Option<Self>, DecodeError> {
        Ok(Some(match kind {
            10 => Self::Starts(reader.u32()?),
            11 => {
                let group = reader.u64()?;
                let (tenant, world) = (name(reader)?, name(reader)?);
                let length = reader.u32()? as usize;
                let length = reader.bounded(length, 1)?;
                let contents = (0..length).map(|_| reader.u8()).collect::<Result<_, _>>()?;
                Self::Group(WorldGroup { key: WorldGroupKey { tenant, world, group }, contents })
            }
            _ => return Ok(None),
        }))
    }
}

fn name(reader: &mut Reader<'_>) -> Result<String, DecodeError> {
    let text = reader.text("name of a tenant or a world")?;
    match text.find('\0') {
        None => Ok(text),
        Some(at) => {
            Err(DecodeError::Field { what: "place of a NUL in the name of a tenant or a world", found: at as u64 })
        }
    }
}
