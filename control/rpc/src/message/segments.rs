//! Messages about the segment catalog: who serves which named memory.

use std::net::SocketAddr;

/// Who serves a segment. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Owner {
    /// One incarnation of a member: its segments live as long.
    Node {
        /// The member.
        node: u64,
        /// Its incarnation.
        incarnation: u64,
    },
    /// A client that is no member: it renews its segments.
    Client {
        /// The random number it drew at its start.
        client: u64,
    },
}

/// What a segment's memory is. Tags are append-only.
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
pub struct Segment {
    /// Its name, unique in the cluster.
    pub name: String,
    /// Who serves it.
    pub owner: Owner,
    /// What its memory is.
    pub kind: Kind,
    /// Its size.
    pub bytes: u64,
    /// Where its owner answers questions about it.
    pub address: SocketAddr,
    /// For clients: how long it lives after the client's last renewal, in nanoseconds. For members: 0.
    pub ttl_ns: u64,
}

/// Puts a segment into the catalog.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RegisterSegment {
    /// The segment.
    pub segment: Segment,
}

/// Keeps all segments of a client in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RenewSegments {
    /// The random number it drew at its start.
    pub client: u64,
}

/// The answer to [`RenewSegments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RenewReply {
    /// How many segments live on.
    pub segments: u64,
}

/// Takes a segment out of the catalog; only its owner may. One that is not there does no harm.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct UnregisterSegment {
    /// Who serves it.
    pub owner: Owner,
    /// Its name.
    pub name: String,
}

/// Asks for one segment.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetSegment {
    /// Its name.
    pub name: String,
}

/// One segment.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SegmentReply {
    /// The segment.
    pub segment: Segment,
}

/// Asks for a page of segments.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ListSegments {
    /// Only names after this one: the last of the previous page.
    pub after: Option<String>,
    /// Most segments to return; the control plane may return fewer.
    pub limit: u32,
}

/// A page of segments.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SegmentList {
    /// The segments, by name.
    pub segments: Vec<Segment>,
    /// Whether there are more after the last.
    pub more: bool,
}
