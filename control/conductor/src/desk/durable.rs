//! Durable state of the desk: registered instances, those that are held, and the placement policy.
//!
//! After every call the host takes [`Desk::take_durable`], makes it durable, and only then answers. A new desk begins
//! with [`Desk::restore`]. Bookings, loads and caches are not kept: schedulers ask again, instances report again, and
//! until their caches are known again restored instances are degraded.

use std::sync::Arc;

use super::{Desk, DeskError, InstanceSpec};
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
    /// True once its cache was reported or followed. A new desk does not know what such an instance holds.
    pub reports_cache: bool,
}

impl Desk {
    /// Changes since the last call that are to be remembered, one for each instance.
    pub fn take_durable(&mut self) -> Vec<Durable> {
        let changed = std::mem::take(&mut self.changed);
        let mut durable: Vec<Durable> = changed
            .into_iter()
            .map(|name| match self.durable(&name) {
                Some(instance) => Durable::Instance(Box::new(instance)),
                None => Durable::Gone(name),
            })
            .collect();
        if std::mem::take(&mut self.placement_changed) {
            durable.push(Durable::Placement(self.config.policy, self.config.books.slo));
        }
        durable
    }

    /// True while [`Self::take_durable`] has changes to return.
    #[must_use]
    pub fn has_durable(&self) -> bool {
        self.placement_changed || !self.changed.is_empty()
    }

    fn durable(&self, name: &str) -> Option<DurableInstance> {
        let known = self.instances.get(name)?;
        let pool_token_bytes = self.pools.get(&known.pool)?.token_bytes;
        let (spec, held, reports_cache) = (known.spec.clone(), known.held, known.reports_cache);
        Some(DurableInstance { spec, pool_token_bytes, held, reports_cache })
    }

    /// An instance that was registered with an earlier desk goes on. Its silence counts from `graced_ns` on, as it may
    /// have to find its way here first. If it reports its cache it is degraded until all of that is known again.
    ///
    /// # Errors
    /// When the limits do not allow it any more, or it contradicts another.
    pub fn restore(&mut self, kept: DurableInstance, graced_ns: u64) -> Result<(), DeskError> {
        let DurableInstance { spec, pool_token_bytes, held, reports_cache } = kept;
        spec.check()?;
        if self.instances.len() >= self.config.max_instances {
            return Err(DeskError::Limit { what: "instances", most: self.config.max_instances });
        }
        let (name, number) = (spec.name.clone(), self.make_pool(spec.pool(), pool_token_bytes)?);
        self.enter(spec, number, graced_ns)?;
        if let Some(known) = self.instances.get_mut(name.as_str()) {
            (known.held, known.reports_cache) = (held, reports_cache);
            known.degraded = reports_cache && known.prefill.is_some();
        }
        self.version += 1;
        self.let_take(&name)
    }

    /// Instances, for whoever follows what they publish.
    pub fn specs(&self) -> impl Iterator<Item = &InstanceSpec> {
        self.instances.values().map(|known| &known.spec)
    }
}
