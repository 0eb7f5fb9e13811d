//! Former owners of slots, before the last change of owners. With them every reader of one map sees which slots have
//! moved, and from which shard to which.
//!
//! A change of owners begins a new *layout*. Besides its members a map carries the claims from which the owners of the
//! former layout follow, and the incarnations that owned slots when the present layout began. So an importer, the new
//! owner of a slot, knows the shard to pull the slot's objects from. It also knows whether that is still valid: only an
//! owner that has run in one incarnation since the layout began may pull, and only a former owner that still runs in
//! the same incarnation has objects to export.

use super::codec::{DecodeError, Reader};
use super::{MAX_MEMBER_SHARDS, MAX_MEMBERS};
use crate::ids::{Epoch, Incarnation, NodeId};
use crate::narrowing::length_u16;

/// Bytes of a claim on the wire, and of an incarnation.
const CLAIM_BYTES: usize = 8 + 8 + 4 + 2;
const INCARNATION_BYTES: usize = 8 + 8;
/// Most bytes of a former layout in a map.
pub(super) const MAX_FORMER_BYTES: usize =
    8 + 8 + 2 + 2 + MAX_MEMBERS * (CLAIM_BYTES + INCARNATION_BYTES) + 8 + 8 + 2 + MAX_MEMBERS * INCARNATION_BYTES;

/// Claim of a member in the draw of owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Claim {
    pub node: NodeId,
    /// Incarnation of the node when the layout ended.
    pub incarnation: Incarnation,
    /// Weight of the member.
    pub weight: u32,
    /// Number of shards of the member.
    pub shards: u16,
}

/// The former layout, and the beginning of the present one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Former {
    /// Epoch in which the present layout began.
    pub since: Epoch,
    /// Epoch in which the former layout began.
    pub from: Epoch,
    /// Claims from which the owners of the former layout follow, ordered by node.
    pub claims: Vec<Claim>,
    /// Owners of slots when the present layout began, ordered by node.
    pub began: Vec<(NodeId, Incarnation)>,
    /// Owners that kept their slots across a restart, in clusters where slots have replica owners.
    pub restarts: Option<Restarts>,
}

/// Members whose incarnations changed from one map to the next, while the layout stayed.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Restarts {
    /// Epoch in which the present incarnations appeared first.
    pub at: Epoch,
    /// Epoch of the previous change, of incarnations or of the layout.
    pub from: Epoch,
    /// Nodes that restarted, with their former incarnations, ordered by node.
    pub incarnations: Vec<(NodeId, Incarnation)>,
}

impl Former {
    /// Appends the encoding of the former layout.
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.since.0.to_le_bytes());
        out.extend_from_slice(&self.from.0.to_le_bytes());
        out.extend_from_slice(&length_u16(self.claims.len()).to_le_bytes());
        out.extend_from_slice(&length_u16(self.began.len()).to_le_bytes());
        for claim in &self.claims {
            out.extend_from_slice(&claim.node.0.to_le_bytes());
            out.extend_from_slice(&claim.incarnation.0.to_le_bytes());
            out.extend_from_slice(&claim.weight.to_le_bytes());
            out.extend_from_slice(&claim.shards.to_le_bytes());
        }
        for (node, incarnation) in &self.began {
            out.extend_from_slice(&node.0.to_le_bytes());
            out.extend_from_slice(&incarnation.0.to_le_bytes());
        }
        // A node that does not know this part rejects the map: replica owners need nodes of this version.
        if let Some(Restarts { at, from, incarnations }) = &self.restarts {
            out.extend_from_slice(&at.0.to_le_bytes());
            out.extend_from_slice(&from.0.to_le_bytes());
            out.extend_from_slice(&length_u16(incarnations.len()).to_le_bytes());
            for (node, incarnation) in incarnations {
                out.extend_from_slice(&node.0.to_le_bytes());
                out.extend_from_slice(&incarnation.0.to_le_bytes());
            }
        }
    }

    /// Returns true if the layout is within the limits and its lists are ordered, so that it can be encoded and drawn
    /// from.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.claims.len() <= MAX_MEMBERS
            && self.began.len() <= MAX_MEMBERS
            && self.restarts.as_ref().is_none_or(|restarts| {
                restarts.incarnations.len() <= MAX_MEMBERS
                    && restarts.incarnations.is_sorted_by(|one, next| one.0 < next.0)
            })
            && self.claims.is_sorted_by(|one, next| one.node < next.node)
            && self.began.is_sorted_by(|one, next| one.0 < next.0)
            && self.claims.iter().all(|claim| usize::from(claim.shards) <= MAX_MEMBER_SHARDS)
    }
}

impl Restarts {
    /// Returns the former incarnation of a node; `None` if the node has not restarted.
    pub(super) fn before(&self, node: NodeId) -> Option<Incarnation> {
        let at = self.incarnations.binary_search_by_key(&node, |(node, _)| *node).ok()?;
        Some(self.incarnations[at].1)
    }
}

impl Reader<'_> {
    /// Decodes the next former layout.
    ///
    /// # Errors
    /// Returns an error if the layout is truncated or invalid.
    pub fn former(&mut self) -> Result<Former, DecodeError> {
        let (since, from) = (Epoch(self.u64()?), Epoch(self.u64()?));
        let (claims, began) = (usize::from(self.u16()?), usize::from(self.u16()?));
        let mut former = Former { since, from, ..Former::default() };
        former.claims.reserve(self.bounded(claims, CLAIM_BYTES)?);
        for _ in 0..claims {
            former.claims.push(Claim {
                node: NodeId(self.u64()?),
                incarnation: Incarnation(self.u64()?),
                weight: self.u32()?,
                shards: self.u16()?,
            });
        }
        former.began.reserve(self.bounded(began, INCARNATION_BYTES)?);
        for _ in 0..began {
            former.began.push((NodeId(self.u64()?), Incarnation(self.u64()?)));
        }
        if self.left_bytes() > 0 {
            let (at, from) = (Epoch(self.u64()?), Epoch(self.u64()?));
            let count = usize::from(self.u16()?);
            let mut incarnations = Vec::with_capacity(self.bounded(count, INCARNATION_BYTES)?);
            for _ in 0..count {
                incarnations.push((NodeId(self.u64()?), Incarnation(self.u64()?)));
            }
            former.restarts = Some(Restarts { at, from, incarnations });
        }
        if !former.is_valid() {
            return Err(DecodeError::Field { what: "former layout", found: former.claims.len() as u64 });
        }
        Ok(former)
    }
}
