//! Reasons for rejecting an input, each with the next step of the sender.

use core::fmt;
use std::net::SocketAddr;

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::{MAX_MAP_SHARDS, MapError};

use crate::catalog::{ClientId, MAX_SEGMENT_NAME_BYTES, SegmentOwner};
use crate::message::MAX_VERSION_BYTES;
use crate::state::MemberState;
use crate::tenants::{MAX_TENANT_NAME_BYTES, MAX_TENANT_WEIGHT};

/// Reason for rejecting an input.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Rejection {
    /// A later incarnation of the node is known: this one was replaced and should stop.
    StaleIncarnation {
        node: NodeId,
        /// Incarnation of the sender.
        given: Incarnation,
        /// Latest known incarnation; a join needs a greater one.
        known: Incarnation,
    },
    /// This incarnation has ended, and its slots have other owners: drop its objects and join with a greater
    /// incarnation.
    Ended {
        node: NodeId,
        incarnation: Incarnation,
        /// State in which it ended.
        state: MemberState,
    },
    /// No node has joined under this id, or not in this incarnation: join first.
    Unknown {
        node: NodeId,
        /// Incarnation of the sender.
        incarnation: Incarnation,
    },
    /// This incarnation has joined before, with another description.
    IncarnationReused { node: NodeId, incarnation: Incarnation },
    /// Another live node has this id. If that is the former incarnation of the same node, retry after `retry_after_ns`.
    NodeIdInUse {
        node: NodeId,
        /// Host of the live node.
        host: String,
        /// Address of its first shard.
        address: Option<SocketAddr>,
        /// Time until the live node counts as silent, unless it sends another message.
        retry_after_ns: u64,
    },
    /// No other node takes slots, or all that do are restarting: the objects of the node have no destination.
    LastOwner { node: NodeId },
    /// The offered map is not adopted: there is a map already, or the offered one is invalid. The member is not known:
    /// drop its objects and join with a greater incarnation.
    OfferRefused { node: NodeId },
    /// There is no map yet, and members of a lost state may still offer theirs: retry.
    Adopting {
        /// Time after which a retry may succeed.
        retry_after_ns: u64,
    },
    /// The description of the member is over a limit.
    Member(MapError),
    /// The version text is too long.
    Version { bytes: usize },
    /// The cluster has the maximum number of members.
    TooManyMembers { limit: usize },
    /// The map would have too many shards.
    TooManyShards {
        /// Resulting number of shards.
        wanted: usize,
    },
    /// The client has no segment, or its segments expired: register them again.
    UnknownClient { client: ClientId },
    /// The name of a segment is empty or too long.
    SegmentName {
        /// Length of the given name.
        bytes: usize,
    },
    /// A time to live is out of range. That of a member's segment must be 0: the segment lives as long as the member.
    SegmentTtl { ttl_ns: u64, least_ns: u64, most_ns: u64 },
    /// A tenant's name is too long, or has control characters.
    TenantName { bytes: usize },
    /// A tenant's weight is out of range.
    TenantWeight { weight: u32 },
    /// A tenant has a weight on SSDs, and a quota of no bytes there.
    SsdWeight { weight: u32 },
    /// The maximum number of tenants is reached.
    TooManyTenants { limit: usize },
    /// Another tenant has the same number.
    TenantNumber {
        /// Name of the rejected tenant.
        name: String,
        /// Name of the tenant with the same number.
        other: String,
    },
    /// No tenant has this name.
    UnknownTenant { name: String },
    /// The default tenant always exists.
    DefaultTenant,
    /// Another owner has a segment of this name.
    SegmentNameTaken {
        name: String,
        /// Owner of the existing segment.
        owner: SegmentOwner,
    },
    /// The catalog, or the owner's part of it, is full.
    TooManySegments {
        /// Limit that was reached.
        limit: usize,
    },
}

impl Rejection {
    /// Writes a message about tenants.
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
            Self::SsdWeight { weight } => write!(
                f,
                "a tenant with a quota of 0 bytes on SSDs has nothing that its weight of {weight} there could be for: \
                 leave the weight out, or give it bytes"
            ),
            Self::TooManyTenants { limit } => write!(f, "there are {limit} tenants already: remove one first"),
            Self::TenantNumber { name, other } => {
                write!(f, "tenant {name:?} has the same number as {other:?}: choose another name")
            }
            Self::UnknownTenant { name } => write!(f, "there is no tenant {name:?}"),
            Self::DefaultTenant => f.write_str(
                "the tenant \"default\" cannot be removed: it is the tenant of clients that name none; set it without \
                 quotas to remove these",
            ),
            _ => Ok(()),
        }
    }

    /// Writes a message about segments and the clients that register them.
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
                write!(f, "{limit} segments are registered already: unregister one first")
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
                "node {node} is not a member, and the map that it follows is not adopted; drop its objects and rejoin"
            ),
            Self::Adopting { retry_after_ns } => write!(
                f,
                "the control plane has no map yet, and waits for members that follow one, in case its state was lost: \
                 retry in {} ms",
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
                "node {node} joined before with incarnation {incarnation} and another description; use a greater one"
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
            Self::TooManyMembers { limit } => write!(f, "the cluster has {limit} members already, which is the limit"),
            Self::TooManyShards { wanted } => {
                write!(f, "the cluster would have {wanted} shards, over the limit of {MAX_MAP_SHARDS}")
            }
            Self::TenantName { .. }
            | Self::TenantWeight { .. }
            | Self::SsdWeight { .. }
            | Self::TooManyTenants { .. }
            | Self::TenantNumber { .. }
            | Self::UnknownTenant { .. }
            | Self::DefaultTenant => self.fmt_tenant(f),
            Self::UnknownClient { .. }
            | Self::SegmentName { .. }
            | Self::SegmentTtl { .. }
            | Self::SegmentNameTaken { .. }
            | Self::TooManySegments { .. } => self.fmt_segment(f),
        }
    }
}

impl std::error::Error for Rejection {}
