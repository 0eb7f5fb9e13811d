//! Binary encoding of a cluster map and of its members, built from the primitives of [`super::codec`].
//!
//! ```text
//! map:      sealed: replicas u8 | 0 u8 | members u16 | epoch u64 | member... | former, or nothing
//! member:   node u64 | incarnation u64 | weight u32 | shards u16 | failure domain text | host text | shard...
//! former:   since u64 | from u64 | claims u16 | incarnations u16 |
//!           (node u64 | incarnation u64 | weight u32 | shards u16)... | (node u64 | incarnation u64)... |
//!           restarts, or nothing
//! restarts: at u64 | from u64 | incarnations u16 | (node u64 | incarnation u64)...
//! shard:    address | 0 u8, or 1 u8 and the path of the shared-memory socket as text
//! ```
//!
//! A decoded map is valid: counts and texts are checked against the limits of a map as they are read.

use super::codec::{DecodeError, Reader, SEAL_BYTES, begin, put_address, put_text, seal};
use super::{ClusterMap, MAX_MAP_SHARDS, MAX_MEMBER_SHARDS, MAX_MEMBERS, MapError, Member, ShardAddress};
use crate::ids::{Epoch, Incarnation, NodeId};

/// "KVCM" on the wire.
const MAP_MAGIC: u32 = u32::from_le_bytes(*b"KVCM");
/// Format version of a map.
const MAP_FORMAT: u16 = 1;
/// Least bytes of a member.
const MIN_MEMBER_BYTES: usize = 8 + 8 + 4 + 2 + 1 + 1;
/// Least bytes of a shard.
const MIN_SHARD_BYTES: usize = 1 + 4 + 2 + 1;
/// Most bytes of a shard: IPv6 and the longest path.
const MAX_SHARD_BYTES: usize = 1 + 16 + 2 + 4 + 4 + 2 + super::MAX_SHM_PATH_BYTES;
/// Most bytes of a member without its shards.
const MAX_MEMBER_BYTES: usize = MIN_MEMBER_BYTES + super::MAX_FAILURE_DOMAIN_BYTES + super::MAX_HOST_BYTES;

/// Most bytes of an encoded map: the limit for every transport that carries one.
pub const MAX_MAP_BYTES: usize = SEAL_BYTES
    + 12
    + MAX_MEMBERS * MAX_MEMBER_BYTES
    + MAX_MAP_SHARDS * MAX_SHARD_BYTES
    + super::former::MAX_FORMER_BYTES;

/// Appends the encoding of a member.
///
/// # Panics
/// If the member is not valid ([`Member::validate`]).
pub fn put_member(out: &mut Vec<u8>, member: &Member) {
    if let Err(error) = member.validate() {
        panic!("an invalid member reached the encoder: {error}");
    }
    out.extend_from_slice(&member.node.0.to_le_bytes());
    out.extend_from_slice(&member.incarnation.0.to_le_bytes());
    out.extend_from_slice(&member.weight.to_le_bytes());
    out.extend_from_slice(&crate::narrowing::length_u16(member.shards.len()).to_le_bytes());
    put_text(out, &member.failure_domain);
    put_text(out, &member.host);
    for shard in &member.shards {
        put_address(out, &shard.tcp);
        out.push(u8::from(shard.shm.is_some()));
        if let Some(path) = &shard.shm {
            put_text(out, path);
        }
    }
}

impl Reader<'_> {
    /// Decodes the next member and checks it against the limits of a map.
    ///
    /// # Errors
    /// Returns an error if the member is truncated, malformed or over a limit.
    pub fn member(&mut self) -> Result<Member, MapError> {
        let node = NodeId(self.u64()?);
        let incarnation = Incarnation(self.u64()?);
        let weight = self.u32()?;
        let count = usize::from(self.u16()?);
        if count > MAX_MEMBER_SHARDS {
            return Err(MapError::Shards { node, found: count });
        }
        let failure_domain = self.text("failure domain")?;
        let host = self.text("host")?;
        let mut shards = Vec::with_capacity(self.bounded(count, MIN_SHARD_BYTES)?);
        for _ in 0..count {
            let tcp = self.address()?;
            let shm = match self.u8()? {
                0 => None,
                1 => Some(self.text("shared-memory socket path")?),
                tag => {
                    return Err(DecodeError::Field { what: "shared-memory tag", found: tag.into() }.into());
                }
            };
            shards.push(ShardAddress { tcp, shm });
        }
        let member = Member { node, incarnation, weight, failure_domain, host, shards };
        member.validate()?;
        Ok(member)
    }
}

impl ClusterMap {
    /// Appends the encoding of this map, at most [`MAX_MAP_BYTES`].
    ///
    /// # Panics
    /// If the map is not valid ([`Self::validate`]): the code that builds a map validates it first.
    pub fn encode(&self, out: &mut Vec<u8>) {
        if let Err(error) = self.validate() {
            panic!("an invalid map reached the encoder: {error}");
        }
        let start = begin(out, MAP_MAGIC, MAP_FORMAT);
        out.push(self.replicas);
        out.push(0);
        out.extend_from_slice(&crate::narrowing::length_u16(self.members.len()).to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        for member in &self.members {
            put_member(out, member);
        }
        self.former.iter().for_each(|former| former.put(out));
        seal(out, start);
    }

    /// Decodes a map, the inverse of [`Self::encode`]; the result is valid.
    ///
    /// # Errors
    /// Returns an error if the bytes are damaged, of another format, or encode a map that exceeds a limit.
    pub fn decode(bytes: &[u8]) -> Result<Self, MapError> {
        if bytes.len() > MAX_MAP_BYTES {
            return Err(DecodeError::TooLong { bytes: bytes.len(), limit_bytes: MAX_MAP_BYTES }.into());
        }
        let mut reader = Reader::open(bytes, MAP_MAGIC, MAP_FORMAT)?;
        let replicas = reader.u8()?;
        match reader.u8()? {
            0 => {}
            found => {
                return Err(DecodeError::Field { what: "reserved byte", found: found.into() }.into());
            }
        }
        let count = usize::from(reader.u16()?);
        let epoch = Epoch(reader.u64()?);
        if count > MAX_MEMBERS {
            return Err(MapError::Members { found: count });
        }
        let mut members = Vec::with_capacity(reader.bounded(count, MIN_MEMBER_BYTES)?);
        for _ in 0..count {
            members.push(reader.member()?);
        }
        let former = if reader.left_bytes() > 0 { Some(reader.former()?) } else { None };
        reader.finish()?;
        let map = Self { epoch, replicas, members, former };
        map.validate()?;
        Ok(map)
    }
}
