//! Durable state of the Conductor: registered instances, held ones, the placement policy, classes, weights of flows.
//!
//! After every call the host takes [`take_durable`], persists it, and only then answers. A new Conductor begins with
//! [`restore`]. Bookings, loads and caches are not durable: schedulers retry, instances report again, and until their
//! caches are known again restored instances are degraded.
//!
//! [`take_durable`]: super::Conductor::take_durable
//! [`restore`]: super::Conductor::restore

use std::sync::Arc;

use super::instance_spec::RegisterInstance;
use super::requests::service::ClassTerms;
use crate::policy::{PlacementPolicy, Slo};
use crate::scheduler::InstanceCapabilities;

/// Change of the durable state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Durable {
    /// The present state of an instance.
    Instance(Box<DurableInstance>),
    /// The instance of this name was removed.
    Gone(Arc<str>),
    /// Placement policy and objectives.
    Placement(PlacementPolicy, Slo),
    /// Terms of the class of this name; none if it was removed.
    Class(String, Option<ClassTerms>),
    /// Weight of a tenant's flow; none if it was reset to the default.
    Weight {
        /// Tenant of the flow.
        tenant: String,
        /// Name of the flow.
        flow: String,
        /// Its weight.
        weight: Option<u32>,
    },
}

/// The durable state of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableInstance {
    /// Registration of the instance.
    pub spec: RegisterInstance,
    /// True if its hashes are vLLM's `sha256_cbor`, which can be computed from tokens.
    pub has_vllm_hashes: bool,
    /// Capabilities beside prefills and decodes of its own.
    pub capabilities: InstanceCapabilities,
    /// Bytes of KV cache per token of its model; the instance may have registered with the default, 0.
    pub pool_token_bytes: u64,
    /// True while an operator holds the instance: it gets no new requests.
    pub held: bool,
    /// True once its cache was reported or followed. A new Conductor does not know the cache of such an instance.
    pub reports_cache: bool,
}
