//! Durable state of the Conductor: registered instances, those that are held, and the placement policy.
//!
//! After every call the host takes [`take_durable`], makes it durable, and only then answers. A new Conductor begins
//! with [`restore`]. Bookings, loads and caches are not kept: schedulers ask again, instances report again, and
//! until their caches are known again restored instances are degraded.
//!
//! [`take_durable`]: super::Conductor::take_durable
//! [`restore`]: super::Conductor::restore

use std::sync::Arc;

use super::instance_spec::InstanceSpec;
use crate::policy::{PolicyName, Slo};

/// A change of what is to be remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Durable {
    /// An instance as it is now.
    Instance(Box<DurableInstance>),
    /// The instance of this name is gone.
    Gone(Arc<str>),
    /// How requests are placed, and what is promised.
    Placement(PolicyName, Slo),
}

/// The durable state of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableInstance {
    /// As it registered.
    pub spec: InstanceSpec,
    /// Bytes of KV cache of a token of its model; it may have registered with the default, 0.
    pub pool_token_bytes: u64,
    /// True while an operator holds it: it gets no new requests.
    pub held: bool,
    /// True once its cache was reported or followed. A new Conductor does not know what such an instance holds.
    pub reports_cache: bool,
}
