//! Durable records of groups, and their encoding: a byte with the format, then bincode's fixed-integer layout.

use core::fmt;

use bincode::{Decode, Encode, config};

use crate::group::{GroupId, GroupSpec, View};
use crate::rank::{GroupRank, MAX_RANKS, RankSet};
use crate::roster::MAX_ADDRESS_BYTES;

/// Format of the encoding.
const FORMAT: u8 = 1;
/// Most bytes that a decoded record allocates: far above those of the largest valid one.
const DECODED_BYTES: usize = 4 * MAX_RANKS * (MAX_ADDRESS_BYTES + 64);

/// Durable record of a group, by its id. What a flush in progress has collected is not in it: fenced members report
/// their progress again.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GroupRecord {
    /// Name of the world.
    pub world: String,
    /// The group.
    pub group: GroupId,
    /// Name, members and rules, joiners included.
    pub spec: GroupSpec,
    /// Number of members that found it: the first ones.
    pub founders: u8,
    /// The newest view.
    pub view: View,
    /// Addresses of the active members' processes, by rank, at which a restarted control plane expects them.
    pub addresses: Vec<Option<String>>,
}

/// Reason for which bytes are not a record of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum GroupRecordError {
    /// The record has another format, as one of a later version has.
    Format { found: Option<u8>, supported: u8 },
    /// The bytes are no record.
    Malformed { reason: String },
    /// Fields contradict each other or a limit.
    Contents { what: &'static str },
}

impl fmt::Display for GroupRecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format { found: Some(found), supported } => {
                write!(f, "record of a group: format {found}, and this version reads format {supported}")
            }
            Self::Format { found: None, .. } => f.write_str("record of a group: it is empty"),
            Self::Malformed { reason } => write!(f, "record of a group: {reason}"),
            Self::Contents { what } => write!(f, "record of a group: {what}"),
        }
    }
}

impl core::error::Error for GroupRecordError {}

impl GroupRecord {
    /// Returns the encoding of this record.
    ///
    /// # Errors
    /// [`GroupRecordError::Malformed`]: a value has no encoding, which no record of a world has.
    pub fn to_bytes(&self) -> Result<Vec<u8>, GroupRecordError> {
        let mut bytes = vec![FORMAT];
        let contents = bincode::encode_to_vec(self, config::legacy())
            .map_err(|error| GroupRecordError::Malformed { reason: error.to_string() })?;
        bytes.extend_from_slice(&contents);
        Ok(bytes)
    }

    /// Decodes a record: the inverse of [`Self::to_bytes`].
    ///
    /// # Errors
    /// When the bytes are of another format, malformed, or not a record that a world can start from.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, GroupRecordError> {
        let contents = match bytes.split_first() {
            Some((&FORMAT, contents)) => contents,
            found => return Err(GroupRecordError::Format { found: found.map(|(f, _)| *f), supported: FORMAT }),
        };
        let decoded = bincode::decode_from_slice(contents, config::legacy().with_limit::<DECODED_BYTES>());
        let (record, consumed): (Self, usize) =
            decoded.map_err(|error| GroupRecordError::Malformed { reason: error.to_string() })?;
        if consumed != contents.len() {
            let reason = format!("{} bytes follow it", contents.len() - consumed);
            return Err(GroupRecordError::Malformed { reason });
        }
        record.check()?;
        Ok(record)
    }

    fn check(&self) -> Result<(), GroupRecordError> {
        let (members, view) = (self.spec.order.len(), &self.view);
        let contents = |is_sound: bool, what| if is_sound { Ok(()) } else { Err(GroupRecordError::Contents { what }) };
        contents(self.spec.check_members().is_ok(), "a name or members beyond the limits")?;
        contents((1..=members).contains(&usize::from(self.founders)), "more founding members than members, or none")?;
        let ranks: RankSet<GroupRank> = RankSet::first(members);
        let is_view = ranks.contains_all(view.active) && view.active.contains_all(view.failed);
        contents(is_view, "a view with members that the group has not")?;
        let counts = [view.incarnations.len(), self.addresses.len()];
        contents(counts == [members; 2], "other numbers of incarnations, of addresses and of members")?;
        let is_long = self.addresses.iter().flatten().any(|address| address.len() > MAX_ADDRESS_BYTES);
        contents(!is_long, "an address beyond the limit")
    }
}
