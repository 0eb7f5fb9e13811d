//! Messages about the segment catalog: named memory and its owners.

pub use kvplane_cluster::{ClientId, Segment, SegmentKind, SegmentOwner};

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
    pub owner: SegmentOwner,
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
