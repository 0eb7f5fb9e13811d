//! Conversions between the messages and the types of the control plane's pure core.
//!
//! Conversions of a peer's input cannot fail: the core validates it, and refuses with errors that name its limits.

use kvplane_cluster as core;
use kvplane_proto::ids::{Incarnation, NodeId};

use crate::error::{Refusal, RefusalCode};
use crate::message::{Kind, Load, Owner, Segment};

impl From<Load> for core::Load {
    fn from(load: Load) -> Self {
        let Load { objects, used_bytes, capacity_bytes } = load;
        Self { objects, used_bytes, capacity_bytes }
    }
}

impl From<core::Load> for Load {
    fn from(load: core::Load) -> Self {
        let core::Load { objects, used_bytes, capacity_bytes } = load;
        Self { objects, used_bytes, capacity_bytes }
    }
}

impl From<Owner> for core::SegmentOwner {
    fn from(owner: Owner) -> Self {
        match owner {
            Owner::Node { node, incarnation } => {
                Self::Node { node: NodeId(node), incarnation: Incarnation(incarnation) }
            }
            Owner::Client { client } => Self::Client { client: core::ClientId(client) },
        }
    }
}

impl From<core::SegmentOwner> for Owner {
    fn from(owner: core::SegmentOwner) -> Self {
        match owner {
            core::SegmentOwner::Node { node, incarnation } => Self::Node { node: node.0, incarnation: incarnation.0 },
            core::SegmentOwner::Client { client } => Self::Client { client: client.0 },
        }
    }
}

impl From<Kind> for core::SegmentKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Dram => Self::Dram,
            Kind::Gpu => Self::Gpu,
            Kind::Nvme => Self::Nvme,
        }
    }
}

impl From<core::SegmentKind> for Kind {
    fn from(kind: core::SegmentKind) -> Self {
        match kind {
            core::SegmentKind::Dram => Self::Dram,
            core::SegmentKind::Gpu => Self::Gpu,
            core::SegmentKind::Nvme => Self::Nvme,
        }
    }
}

impl From<Segment> for core::Segment {
    fn from(segment: Segment) -> Self {
        let Segment { name, owner, kind, bytes, address, ttl_ns } = segment;
        Self { name, owner: owner.into(), kind: kind.into(), bytes, address, ttl_ns }
    }
}

impl From<core::Segment> for Segment {
    fn from(segment: core::Segment) -> Self {
        let core::Segment { name, owner, kind, bytes, address, ttl_ns } = segment;
        Self { name, owner: owner.into(), kind: kind.into(), bytes, address, ttl_ns }
    }
}

impl From<core::Rejection> for Refusal {
    fn from(rejection: core::Rejection) -> Self {
        use core::Rejection as R;
        let code = match &rejection {
            R::StaleIncarnation { .. } => RefusalCode::StaleIncarnation,
            R::Ended { .. } | R::OfferRefused { .. } => RefusalCode::IncarnationEnded,
            R::Unknown { .. } => RefusalCode::UnknownMember,
            R::IncarnationReused { .. } => RefusalCode::IncarnationReused,
            R::NodeIdInUse { .. } => RefusalCode::NodeIdInUse,
            R::Adopting { .. } => RefusalCode::NotReady,
            R::UnknownClient { .. } => RefusalCode::UnknownClient,
            R::SegmentNameTaken { .. } | R::TenantNumber { .. } => RefusalCode::AlreadyExists,
            R::LastOwner { .. } => RefusalCode::NotPermitted,
            R::UnknownTenant { .. } => RefusalCode::NotFound,
            R::TooManyMembers { .. }
            | R::TooManyShards { .. }
            | R::TooManySegments { .. }
            | R::TooManyTenants { .. } => RefusalCode::LimitReached,
            R::TenantName { .. } | R::TenantWeight { .. } => RefusalCode::BadRequest,
            R::Member(_) | R::Version { .. } | R::SegmentName { .. } | R::SegmentTtl { .. } => RefusalCode::BadRequest,
        };
        let mut refusal = Self::new(code, rejection.to_string());
        if let R::NodeIdInUse { retry_after_ns, .. } | R::Adopting { retry_after_ns } = rejection {
            refusal.retry_after_ns = Some(retry_after_ns);
        }
        refusal
    }
}
