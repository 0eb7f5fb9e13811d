//! Durable records of the control plane.
//!
//! The durable state is a set of records, at most one per [`RecordKey`]; storing one replaces its predecessor. So
//! replaying a change twice, or reading the records in any order, gives the same state. A record is sealed like a
//! cluster map ([`kvplane_proto::map::codec`]): magic "KVCR", format 1, contents, checksum.
//!
//! ```text
//! header:  0 u8 | epoch u64 | replicas u8 | cluster text
//! member:  1 u8 | state u8 | ended u64 | capacity u64 | version text | member
//! segment: 2 u8 | 0 u8, node u64, incarnation u64 or 1 u8, client u64 | kind u8 | bytes u64 | ttl u64 |
//!          address | name text
//! layout:  3 u8 | since u64 | claims u128 | former, or nothing
//! tenant:  8 u8 | has quota u8, quota u64 | weight u32 | name text
//! ssd:     12 u8 | has quota u8, quota u64 | weight u32, 0 for none | name text of a tenant
//! devices: 9 u8 | node u64 | incarnation u64 | digest u128 | since u64
//! ```
//!
//! Records of process groups have kinds 10 and 11 ([`crate::WorldRecord`]), those of the Conductor kinds from 16 on
//! ([`crate::ConductorRecord`]).
//!
//! Suspicion is not durable: it is about the recent past, which a restarted control plane does not know.

pub(crate) mod conductor;
pub(crate) mod worlds;

use core::fmt;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::codec::{DecodeError, Reader, begin, put_address, put_member, put_text, seal};
use kvplane_proto::map::{Former, MapError, Member};

use crate::catalog::{ClientId, MAX_SEGMENT_NAME_BYTES, Segment, SegmentKind, SegmentOwner};
use crate::message::MAX_VERSION_BYTES;
use crate::state::MemberState;
use crate::tenants::{MAX_TENANT_NAME_BYTES, Tenant, TenantSsd};

use conductor::{ConductorKey, ConductorRecord};
use worlds::{WorldKey, WorldRecord};

/// Maximum length of a cluster's name.
pub const MAX_CLUSTER_NAME_BYTES: usize = 64;

const MAGIC: u32 = u32::from_le_bytes(*b"KVCR");
const FORMAT: u16 = 1;

// A text is written with its length in one byte.
const _: () = assert!(MAX_CLUSTER_NAME_BYTES <= 255 && MAX_SEGMENT_NAME_BYTES <= 255 && MAX_VERSION_BYTES <= 255);

/// Record of the cluster as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Header {
    pub cluster: String,
    pub epoch: Epoch,
    /// Replicas per slot in that epoch.
    pub replicas: u8,
}

/// Record of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MemberRecord {
    pub member: Member,
    /// State of the incarnation; never [`MemberState::Suspect`].
    pub state: MemberState,
    /// Newest epoch when this incarnation ended; 0 while it is live.
    pub ended: Epoch,
    pub capacity_bytes: u64,
    pub version: String,
}

/// Layout: the epoch since which the owners have been the same.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// Epoch in which slots changed hands last. While the map has no members, they have not.
    pub since: Epoch,
    /// Digest of everything that the owners follow from.
    pub claims: u128,
    /// Owners of the slots before; none in a record of an earlier version.
    pub former: Option<Former>,
}

/// Devices of a node, as its last incarnation reported them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Devices {
    pub node: NodeId,
    pub incarnation: Incarnation,
    /// Digest of the devices' identities.
    pub devices: u128,
    /// Epoch since which every incarnation of the node had these devices.
    pub since: Epoch,
}

/// Durable record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The cluster as a whole.
    Header(Header),
    /// Node: a member, or an ended incarnation.
    Member(MemberRecord),
    /// A segment.
    Segment(Segment),
    /// Epoch since which the owners have been the same.
    Layout(Layout),
    /// A tenant.
    Tenant(Tenant),
    /// Quota and weight of the tenant of this name on SSDs.
    TenantSsd(String, TenantSsd),
    /// Devices of a node.
    Devices(Devices),
    /// A record of process groups.
    World(WorldRecord),
    /// A record of the Conductor.
    Conductor(ConductorRecord),
}

/// Key under which a record is stored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordKey {
    /// The header: there is one.
    Header,
    /// The node of this id.
    Member(NodeId),
    /// The segment of this name.
    Segment(String),
    /// The layout: there is one.
    Layout,
    /// The tenant of this name.
    Tenant(String),
    /// The devices of the node of this id.
    Devices(NodeId),
    /// A record of process groups.
    World(WorldKey),
    /// The settings on SSDs of the tenant of this name.
    TenantSsd(String),
    /// A record of the Conductor.
    Conductor(ConductorKey),
}

impl RecordKey {
    /// Returns the key as bytes that sort like the keys: at most 513.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Header => vec![0],
            Self::Member(node) => [&[1][..], &node.0.to_be_bytes()].concat(),
            Self::Segment(name) => [&[2], name.as_bytes()].concat(),
            Self::Layout => vec![3],
            Self::Tenant(name) => [&[8], name.as_bytes()].concat(),
            Self::Devices(node) => [&[9][..], &node.0.to_be_bytes()].concat(),
            Self::World(key) => key.to_bytes(),
            Self::TenantSsd(name) => [&[12], name.as_bytes()].concat(),
            Self::Conductor(key) => key.to_bytes(),
        }
    }
}

/// Reason that stored bytes are not a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// Damaged, of another format, or malformed.
    Decode(DecodeError),
    /// The member in it is over a limit.
    Member(MapError),
}

impl From<DecodeError> for RecordError {
    fn from(error: DecodeError) -> Self {
        Self::Decode(error)
    }
}

impl From<MapError> for RecordError {
    fn from(error: MapError) -> Self {
        Self::Member(error)
    }
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode(error) => write!(f, "stored record: {error}"),
            Self::Member(error) => write!(f, "stored record of a member: {error}"),
        }
    }
}

impl std::error::Error for RecordError {}

impl Record {
    /// Returns the key under which this record is stored.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        match self {
            Self::Header(_) => RecordKey::Header,
            Self::Member(record) => RecordKey::Member(record.member.node),
            Self::Segment(segment) => RecordKey::Segment(segment.name.clone()),
            Self::Layout(_) => RecordKey::Layout,
            Self::Tenant(tenant) => RecordKey::Tenant(tenant.name.clone()),
            Self::TenantSsd(name, _) => RecordKey::TenantSsd(name.clone()),
            Self::Devices(said) => RecordKey::Devices(said.node),
            Self::World(record) => RecordKey::World(record.key()),
            Self::Conductor(record) => RecordKey::Conductor(record.key()),
        }
    }

    /// Appends the encoding of this record.
    ///
    /// # Panics
    /// When a text is over its limit or a member not valid: inputs are checked before they become records.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = begin(out, MAGIC, FORMAT);
        match self {
            Self::Header(header) => {
                out.push(0);
                out.extend_from_slice(&header.epoch.0.to_le_bytes());
                out.push(header.replicas);
                put_text(out, &header.cluster);
            }
            Self::Member(record) => {
                out.extend_from_slice(&[1, state_code(record.state)]);
                out.extend_from_slice(&record.ended.0.to_le_bytes());
                out.extend_from_slice(&record.capacity_bytes.to_le_bytes());
                put_text(out, &record.version);
                put_member(out, &record.member);
            }
            Self::Segment(segment) => {
                out.push(2);
                put_segment(out, segment);
            }
            Self::Layout(layout) => {
                out.push(3);
                out.extend_from_slice(&layout.since.0.to_le_bytes());
                out.extend_from_slice(&(layout.claims as u64).to_le_bytes());
                out.extend_from_slice(&((layout.claims >> 64) as u64).to_le_bytes());
                layout.former.iter().for_each(|former| former.put(out));
            }
            Self::Tenant(tenant) => {
                out.extend_from_slice(&[8, tenant.dram_bytes.is_some().into()]);
                out.extend_from_slice(&tenant.dram_bytes.unwrap_or(0).to_le_bytes());
                out.extend_from_slice(&tenant.weight.to_le_bytes());
                put_text(out, &tenant.name);
            }
            Self::TenantSsd(name, ssd) => {
                out.extend_from_slice(&[12, ssd.ssd_bytes.is_some().into()]);
                out.extend_from_slice(&ssd.ssd_bytes.unwrap_or(0).to_le_bytes());
                out.extend_from_slice(&ssd.weight.unwrap_or(0).to_le_bytes());
                put_text(out, name);
            }
            Self::Devices(said) => {
                out.push(9);
                out.extend_from_slice(&said.node.0.to_le_bytes());
                out.extend_from_slice(&said.incarnation.0.to_le_bytes());
                out.extend_from_slice(&(said.devices as u64).to_le_bytes());
                out.extend_from_slice(&((said.devices >> 64) as u64).to_le_bytes());
                out.extend_from_slice(&said.since.0.to_le_bytes());
            }
            Self::World(record) => record.put(out),
            Self::Conductor(record) => record.put(out),
        }
        seal(out, start);
    }

    /// Decodes a record: the inverse of [`Self::encode`].
    ///
    /// # Errors
    /// When the bytes are damaged, of another format, or not a valid record.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let mut reader = Reader::open(bytes, MAGIC, FORMAT)?;
        let record = match reader.u8()? {
            0 => {
                let epoch = Epoch(reader.u64()?);
                let replicas = reader.u8()?;
                let cluster =
                    limited(reader.text("cluster name")?, "length of the cluster name", MAX_CLUSTER_NAME_BYTES)?;
                Self::Header(Header { cluster, epoch, replicas })
            }
            1 => {
                let state = state_of(reader.u8()?)?;
                let ended = Epoch(reader.u64()?);
                let capacity_bytes = reader.u64()?;
                let version = limited(reader.text("version")?, "length of the version", MAX_VERSION_BYTES)?;
                let member = reader.member()?;
                Self::Member(MemberRecord { member, state, ended, capacity_bytes, version })
            }
            2 => Self::Segment(segment(&mut reader)?),
            3 => {
                let since = Epoch(reader.u64()?);
                let claims = u128::from(reader.u64()?) | u128::from(reader.u64()?) << 64;
                let former = if reader.left_bytes() > 0 { Some(reader.former()?) } else { None };
                Self::Layout(Layout { since, claims, former })
            }
            8 => Self::Tenant(tenant(&mut reader)?),
            12 => {
                let Tenant { name, dram_bytes: ssd_bytes, weight } = tenant(&mut reader)?;
                Self::TenantSsd(name, TenantSsd { ssd_bytes, weight: (weight > 0).then_some(weight) })
            }
            9 => {
                let (node, incarnation) = (NodeId(reader.u64()?), Incarnation(reader.u64()?));
                let devices = u128::from(reader.u64()?) | u128::from(reader.u64()?) << 64;
                Self::Devices(Devices { node, incarnation, devices, since: Epoch(reader.u64()?) })
            }
            kind => match WorldRecord::read(kind, &mut reader)? {
                Some(record) => Self::World(record),
                None => match ConductorRecord::read(kind, &mut reader)? {
                    Some(record) => Self::Conductor(record),
                    None => return Err(DecodeError::Field { what: "record kind", found: kind.into() }.into()),
                },
            },
        };
        reader.finish()?;
        Ok(record)
    }
}

fn tenant(reader: &mut Reader<'_>) -> Result<Tenant, DecodeError> {
    let has_quota = match reader.u8()? {
        0 => false,
        1 => true,
        found => return Err(DecodeError::Field { what: "quota flag of a tenant", found: found.into() }),
    };
    let quota = reader.u64()?;
    if !has_quota && quota != 0 {
        return Err(DecodeError::Field { what: "quota of a tenant without one", found: quota });
    }
    let dram_bytes = has_quota.then_some(quota);
    let weight = reader.u32()?;
    let name = limited(reader.text("tenant's name")?, "length of a tenant's name", MAX_TENANT_NAME_BYTES)?;
    Ok(Tenant { name, dram_bytes, weight })
}

fn limited(text: String, what: &'static str, limit_bytes: usize) -> Result<String, DecodeError> {
    if text.len() > limit_bytes {
        return Err(DecodeError::Field { what, found: text.len() as u64 });
    }
    Ok(text)
}

const fn state_code(state: MemberState) -> u8 {
    match state {
        MemberState::Joining => 0,
        MemberState::Active | MemberState::Suspect => 1,
        MemberState::Dead => 3,
        MemberState::Left => 4,
        MemberState::Draining => 5,
    }
}

fn state_of(code: u8) -> Result<MemberState, DecodeError> {
    match code {
        0 => Ok(MemberState::Joining),
        1 => Ok(MemberState::Active),
        3 => Ok(MemberState::Dead),
        4 => Ok(MemberState::Left),
        5 => Ok(MemberState::Draining),
        code => Err(DecodeError::Field { what: "member state", found: code.into() }),
    }
}

fn put_segment(out: &mut Vec<u8>, segment: &Segment) {
    match segment.owner {
        SegmentOwner::Node { node, incarnation } => {
            out.push(0);
            out.extend_from_slice(&node.0.to_le_bytes());
            out.extend_from_slice(&incarnation.0.to_le_bytes());
        }
        SegmentOwner::Client { client } => {
            out.push(1);
            out.extend_from_slice(&client.0.to_le_bytes());
        }
    }
    out.push(match segment.kind {
        SegmentKind::Dram => 0,
        SegmentKind::Gpu => 1,
        SegmentKind::Nvme => 2,
    });
    out.extend_from_slice(&segment.bytes.to_le_bytes());
    out.extend_from_slice(&segment.ttl_ns.to_le_bytes());
    put_address(out, &segment.address);
    put_text(out, &segment.name);
}

fn segment(reader: &mut Reader<'_>) -> Result<Segment, DecodeError> {
    let owner = match reader.u8()? {
        0 => SegmentOwner::Node { node: NodeId(reader.u64()?), incarnation: Incarnation(reader.u64()?) },
        1 => SegmentOwner::Client { client: ClientId(reader.u64()?) },
        tag => return Err(DecodeError::Field { what: "segment owner", found: tag.into() }),
    };
    let kind = match reader.u8()? {
        0 => SegmentKind::Dram,
        1 => SegmentKind::Gpu,
        2 => SegmentKind::Nvme,
        kind => return Err(DecodeError::Field { what: "segment kind", found: kind.into() }),
    };
    let bytes = reader.u64()?;
    let ttl_ns = reader.u64()?;
    let address = reader.address()?;
    let name = reader.text("segment name")?;
    Ok(Segment { name, owner, kind, bytes, address, ttl_ns })
}
