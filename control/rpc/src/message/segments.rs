//! Messages about the segment catalog: named memory and its owners.

use std::net::SocketAddr;

/// Owner of a segment. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Owner {
    /// One incarnation of a member; its segments live as long.
    Node { node: u64, incarnation: u64 },
    /// A client that is not a member; it renews its segments.
    Client {
        /// Random number that the client drew at its start.
        client: u64,
    },
}

/// Kind of a segment's memory. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Kind {
    /// Main memory.
    Dram,
    /// Memory of an accelerator.
    Gpu,
    /// A file or a block device.
    Nvme,
}

/// A segment in the catalog: named, registered memory that peers may read and write.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Segment {
    /// Name of the segment, unique in the cluster.
    pub name: String,
    pub owner: Owner,
    pub kind: Kind,
    pub bytes: u64,
    /// Address at which the owner serves requests about the segment.
    pub address: SocketAddr,
    /// For clients: time that the segment lives after the client's last renewal, in nanoseconds. For members: 0.
    pub ttl_ns: u64,
}

/// Adds a segment to the catalog.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RegisterSegment {
    pub segment: Segment,
}

/// Keeps all segments of a client in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RenewSegments {
    /// Random number that the client drew at its start.
    pub client: u64,
}

/// The reply to [`RenewSegments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RenewReply {
    /// Segments that were renewed.
    pub segments: u64,
}

/// Removes a segment from the catalog, if the caller is its owner. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct UnregisterSegment {
    pub owner: Owner,
    pub name: String,
}

/// Requests one segment.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct GetSegment {
    pub name: String,
}

/// The reply to [`GetSegment`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SegmentReply {
    pub segment: Segment,
}

/// Requests a page of segments.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ListSegments {
    /// Only names after this one: the last name of the previous page.
    pub after: Option<String>,
    /// Most segments to return; the control plane may return fewer.
    pub limit: u32,
}

/// The reply to [`ListSegments`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SegmentList {
    /// Segments, by name.
    pub segments: Vec<Segment>,
    /// True if more segments follow the last one.
    pub more: bool,
}
