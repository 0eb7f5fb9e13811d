//! Why an input is refused, and what the sender should do about it.

use core::fmt;
use std::net::SocketAddr;

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::{MAX_MAP_SHARDS, MapError};

use crate::catalog::{ClientId, MAX_SEGMENT_NAME_BYTES, SegmentOwner};
use crate::message::MAX_VERSION_BYTES;
use crate::state::MemberState;
use crate::tenants::{MAX_TENANT_NAME_BYTES, MAX_TENANT_WEIGHT};

/// Why an input is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// A later incarnation of the node is known: this one was replaced and should stop.
    StaleIncarnation {
        /// The node.
        node: NodeId,
        /// The incarnation that spoke.
        given: Incarnation,
        /// The latest incarnation known; a join needs a greater one.
        known: Incarnation,
    },
    /// This incarnation was declared over. Its slots are elsewhere: drop what it holds and join with a greater
    /// incarnation.
    Ended {
        /// The node.
        node: NodeId,
        /// The incarnation that is over.
        incarnation: Incarnation,
        /// How it ended.
        state: MemberState,
    },
    /// Nobody joined under this id, or not in this incarnation: join first.
    Unknown {
        /// The node.
        node: NodeId,
        /// The incarnation that spoke.
        incarnation: Incarnation,
    },
    /// This incarnation has joined before, with another description.
    IncarnationReused {
        /// The node.
        node: NodeId,
        /// The incarnation that is taken.
        incarnation: Incarnation,
    },
    /// Another live node has this id. If it is the former incarnation of the same node, try again after
    /// `retry_after_ns`.
    NodeIdInUse {
        /// The id.
        node: NodeId,
        /// Host of the node that has it.
        host: String,
        /// Its first shard's address.
        address: Option<SocketAddr>,
        /// When the other will count as silent, unless it is heard of again.
        retry_after_ns: u64,
    },
    /// Nobody else takes slots, or all who do restart: what the node has could go nowhere.
    LastOwner {
        /// The node.
        node: NodeId,
    },
    /// A map was offered, and is not adopted: there is one already, or it makes no sense. The member is not known: drop
    /// what it holds and join with a greater incarnation.
    OfferRefused {
        /// The node.
        node: NodeId,
    },
    /// There is no map yet, and members of a state that was lost may still offer theirs: ask again.
    Adopting {
        /// When it makes sense to ask again.
        retry_after_ns: u64,
    },
    /// The description of the member is over a limit.
    Member(MapError),
    /// The version text is too long.
    Version {
        /// Its length.
        bytes: usize,
    },
    /// The cluster is full.
    TooManyMembers {
        /// The limit.
        limit: usize,
    },
    /// The cluster has no room for this many shards.
    TooManyShards {
        /// Shards there would be.
        wanted: usize,
    },
    /// The client has no segment, or they expired: register again.
    UnknownClient {
        /// Who.
        client: ClientId,
    },
    /// A segment needs a name of 1 to 255 bytes.
    SegmentName {
        /// Length of the name given.
        bytes: usize,
    },
    /// A time to live is out of range. A member's segment has none (0): it lives as long as the member.
    SegmentTtl {
        /// What was given.
        ttl_ns: u64,
        /// The least allowed.
        least_ns: u64,
        /// The most allowed.
        most_ns: u64,
    },
    /// A tenant's name is too long, or has control characters.
    TenantName {
        /// Its length.
        bytes: usize,
    },
    /// A tenant's weight is out of range.
    TenantWeight {
        /// What was given.
        weight: u32,
    },
    /// There are as many tenants as there may be.
    TooManyTenants {
        /// The limit.
        limit: usize,
    },
    /// Another tenant has the same number.
    TenantNumber {
        /// The name given.
        name: String,
        /// The tenant that has the number.
        other: String,
    },
    /// There is no such tenant.
    UnknownTenant {
        /// The name.
        name: String,
    },
    /// Another owner has a segment of this name.
    SegmentNameTaken {
        /// The name.
        name: String,
        /// Who has it.
        owner: SegmentOwner,
    },
    /// The catalog, or the owner's part of it, is full.
    TooManySegments {
        /// The limit that was met.
        limit: usize,
    },
}

impl Rejection {
    /// Those about tenants.
    fn fmt_tenant(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TenantName { bytes } => write!(
                f,
                "a tenant's name has at most {MAX_TENANT_NAME_BYTES} bytes and no control characters; this one has \
                 {bytes} bytes"
            ),
            Self::TenantWeight { weight } => {
                write!(f, "a tenant's weight of {weight} is not within 1 to {MAX_TENANT_WEIGHT}")
            }
            Self::TooManyTenants { limit } => write!(f, "there are {limit} tenants already: remove one first"),
            Self::TenantNumber { name, other } => {
                write!(f, "tenant {name:?} has the same number as {other:?}: choose another name")
            }
            Self::UnknownTenant { name } => write!(f, "there is no tenant {name:?}"),
            _ => Ok(()),
        }
    }

    /// Messages about segments and the clients that register them.
    fn fmt_segment(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownClient { client } => {
                write!(f, "client {client} has no segment, or they expired: register again")
            }
            Self::SegmentName { bytes } => {
                write!(f, "a segment's name has 1 to {MAX_SEGMENT_NAME_BYTES} bytes, not {bytes}")
            }
            Self::SegmentTtl { ttl_ns, least_ns, most_ns } => {
                write!(f, "a time to live of {ttl_ns} ns is not within {least_ns} to {most_ns} ns")
            }
            Self::SegmentNameTaken { name, owner } => {
                write!(f, "segment {name:?} belongs to {owner}: choose another name")
            }
            Self::TooManySegments { limit } => {
                write!(f, "{limit} segments are registered already: withdraw one first")
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StaleIncarnation { node, given, known } => write!(
                f,
                "node {node}: incarnation {given} was replaced by {known}; this one should stop, or join with a \
                 greater one"
            ),
            Self::LastOwner { node } => {
                write!(f, "no node but {node} takes slots now: drain it when another has joined or is back")
            }
            Self::OfferRefused { node } => write!(
                f,
                "node {node} is no member, and the map that it follows is not adopted; drop its objects and join anew"
            ),
            Self::Adopting { retry_after_ns } => write!(
                f,
                "the control plane has no map yet, and waits for members that know one, in case its state was lost: \
                 try again in {} ms",
                retry_after_ns.div_ceil(1_000_000)
            ),
            Self::Ended { node, incarnation, state } => write!(
                f,
                "node {node}: incarnation {incarnation} is over ({state:?}); drop its objects and join with a \
                 greater one"
            ),
            Self::Unknown { node, incarnation } => {
                write!(f, "node {node} has not joined with incarnation {incarnation}: join first")
            }
            Self::IncarnationReused { node, incarnation } => write!(
                f,
                "node {node} joined before with incarnation {incarnation} and another description; take a greater one"
            ),
            Self::NodeIdInUse { node, host, address, retry_after_ns } => {
                write!(f, "node id {node} is in use by a live node on host {host:?}")?;
                if let Some(address) = address {
                    write!(f, " at {address}")?;
                }
                write!(
                    f,
                    ": choose another id, or try again in {} ms if that one was stopped",
                    retry_after_ns / 1_000_000
                )
            }
            Self::Member(error) => write!(f, "the node cannot be a member: {error}"),
            Self::Version { bytes } => {
                write!(f, "a version text of {bytes} bytes is over the limit of {MAX_VERSION_BYTES}")
            }
            Self::TooManyMembers { limit } => write!(f, "the cluster has its {limit} members already"),
            Self::TooManyShards { wanted } => {
                write!(f, "the cluster would have {wanted} shards, over the limit of {MAX_MAP_SHARDS}")
            }
            Self::TenantName { .. }
            | Self::TenantWeight { .. }
            | Self::TooManyTenants { .. }
            | Self::TenantNumber { .. }
            | Self::UnknownTenant { .. } => self.fmt_tenant(f),
            Self::UnknownClient { .. }
            | Self::SegmentName { .. }
            | Self::SegmentTtl { .. }
            | Self::SegmentNameTaken { .. }
            | Self::TooManySegments { .. } => self.fmt_segment(f),
        }
    }
}

impl std::error::Error for Rejection {}
