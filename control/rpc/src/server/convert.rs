//! Refusals of calls, from the errors of the control plane's pure cores.

use kvplane_cluster as core;
use kvplane_conductor::conductor::ConductorError;
use kvplane_conductor::scheduler::{CapabilityError, SchedulerError};
use kvplane_group as group;

use crate::error::{Refusal, RefusalCode};

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
            R::TenantName { .. } | R::TenantWeight { .. } | R::SsdWeight { .. } | R::DefaultTenant => {
                RefusalCode::BadRequest
            }
            R::Member(_) | R::Version { .. } | R::SegmentName { .. } | R::SegmentTtl { .. } => RefusalCode::BadRequest,
        };
        let mut refusal = Self::new(code, rejection.to_string());
        if let R::NodeIdInUse { retry_after_ns, .. } | R::Adopting { retry_after_ns } = rejection {
            refusal.retry_after_ns = Some(retry_after_ns);
        }
        refusal
    }
}

impl From<ConductorError> for Refusal {
    fn from(error: ConductorError) -> Self {
        let code = match &error {
            ConductorError::Capability(CapabilityError::Differs { .. } | CapabilityError::StageTaken { .. }) => {
                RefusalCode::AlreadyExists
            }
            ConductorError::Bad { .. } | ConductorError::Capability(_) => RefusalCode::BadRequest,
            ConductorError::UnknownInstance { .. }
            | ConductorError::UnknownRequest { .. }
            | ConductorError::UnknownReservation { .. }
            | ConductorError::UnknownModel { .. }
            | ConductorError::UnknownClass { .. }
            | ConductorError::Scheduler(
                SchedulerError::UnknownInstance { .. } | SchedulerError::UnknownRequest { .. },
            ) => RefusalCode::NotFound,
            ConductorError::Conflict { .. } => RefusalCode::AlreadyExists,
            ConductorError::StaleIncarnation { .. } => RefusalCode::StaleIncarnation,
            ConductorError::Limit { .. } | ConductorError::ServiceLimit { .. } | ConductorError::Scheduler(_) => {
                RefusalCode::LimitReached
            }
        };
        Self::new(code, error.to_string())
    }
}

impl From<group::Rejection> for Refusal {
    fn from(rejection: group::Rejection) -> Self {
        use group::Rejection as R;
        let code = match &rejection {
            R::Ended { .. } => RefusalCode::IncarnationEnded,
            R::UnknownProcess { .. } => RefusalCode::UnknownClient,
            R::RankTaken { .. } | R::OtherGroup { .. } => RefusalCode::AlreadyExists,
            R::UnknownGroup { .. } | R::NoGroupToJoin => RefusalCode::NotFound,
            R::NotMember { .. } => RefusalCode::UnknownMember,
            R::TooManyGroups { .. } | R::TooManyProposals { .. } => RefusalCode::LimitReached,
            R::RankBeyondLimit { .. }
            | R::LongAddress { .. }
            | R::GroupName { .. }
            | R::GroupSize { .. }
            | R::DuplicateRank { .. }
            | R::NotNamed { .. }
            | R::ChangeOfNone => RefusalCode::BadRequest,
        };
        Self::new(code, rejection.to_string())
    }
}
