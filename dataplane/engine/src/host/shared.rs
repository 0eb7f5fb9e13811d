//! Shared tier of the store: operations of the service's tier on their way to the driver of the store, and their
//! results.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::ids::Incarnation;
use kvplane_shared::port::{Store, StorePort};
use kvplane_shared::{SharedConfig, SharedEvent};
use kvplane_store::service::{PoolMemory, Service};
use kvplane_sys::{Doorbell, Region, cpu};

use super::service_side::memory::PoolView;

/// Settings of a shard's shared tier.
#[derive(Clone)]
pub struct SharedSetup {
    /// Limits and policy.
    pub config: SharedConfig,
    /// Digest of the cluster's name.
    pub cluster: u128,
    /// Incarnation of the node before the present one, as the control plane knows it.
    pub last: Option<Incarnation>,
    /// Store that has the objects.
    pub store: Arc<dyn Store>,
}

impl fmt::Debug for SharedSetup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSetup").field("config", &self.config).field("store", &self.store.place()).finish()
    }
}

impl PoolMemory for PoolView<'_> {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.0.copy_in(offset as usize, bytes);
    }
}

/// Shared tier of a host's store.
pub(crate) struct SharedStore {
    store: Arc<dyn Store>,
    /// Access to the store, once there is a doorbell that wakes the host.
    port: Option<Box<dyn StorePort>>,
    pool: Arc<Region>,
}

impl SharedStore {
    /// Attaches a shared tier to the service.
    pub(crate) fn new(setup: &SharedSetup, service: &mut Service, pool: &Arc<Region>) -> Self {
        service.control().shared().attach(setup.config, setup.cluster, setup.last);
        Self { store: Arc::clone(&setup.store), port: None, pool: Arc::clone(pool) }
    }

    /// Opens the store; the doorbell wakes the host when an operation has ended.
    pub(crate) fn open(&mut self, doorbell: Doorbell) {
        let wake = move || {
            doorbell.ring();
        };
        self.port = Some(self.store.open(Box::new(wake)));
    }

    /// Takes results of operations, runs the tier, and starts its next operations.
    pub(crate) fn drive(&mut self, service: &mut Service, now_ns: u64) -> bool {
        let Some(port) = &mut self.port else { return false };
        let mut progress = false;
        while let Some((id, result)) = port.poll() {
            progress = true;
            service.control().shared().complete(now_ns, id, result);
        }
        let mut memory = PoolView(&self.pool);
        let mut start = |id, operation| port.start(id, operation);
        progress |= service.control().shared().drive(now_ns, &mut memory, &mut start);
        while let Some(event) = service.control().shared().poll_notice() {
            tell(&self.store.place(), &event);
        }
        progress
    }

    /// Writes what waits to be uploaded, at most for `longest`, unless the store fails.
    pub(crate) fn close(&mut self, service: &mut Service, longest: Duration) {
        let until = Instant::now() + longest;
        loop {
            let now_ns = cpu::monotonic_ns();
            let is_over = service.control().shared().close(now_ns);
            self.drive(service, now_ns);
            if is_over {
                return;
            }
            if Instant::now() >= until {
                let waited_ms = longest.as_millis();
                tracing::warn!("shared tier {}: not everything was uploaded within {waited_ms} ms", self.store.place());
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns true if an operation has ended since the last round.
    pub(crate) fn is_ready(&self) -> bool {
        self.port.as_ref().is_some_and(|port| port.is_ready())
    }
}

/// Logs an event of the tier.
fn tell(place: &str, event: &SharedEvent) {
    match event {
        SharedEvent::Failing { error } => tracing::warn!(
            "shared tier {place}: it fails, and is left alone for a while; the node goes on without it: {error}"
        ),
        SharedEvent::Works => tracing::info!("shared tier {place}: it works again"),
        SharedEvent::TakenOver { slots, objects } => {
            tracing::info!("shared tier {place}: {objects} objects of {slots} slots taken over from former owners");
        }
        SharedEvent::Waiting { slots, name, error } => tracing::warn!(
            "shared tier {place}: the takeover of {slots} slots waits for {name}, and tries again: {error}; gets of \
             what only the tier has of them are misses meanwhile"
        ),
        SharedEvent::Void { slots, reason } if reason.is_fault_of_store() => tracing::warn!(
            "shared tier {place}: all that it has of {slots} slots is void, as removals may be lost: {reason}; these \
             objects are misses and can be put again"
        ),
        SharedEvent::Void { slots, reason } => {
            tracing::info!("shared tier {place}: what it has of {slots} slots is void: {reason}");
        }
        SharedEvent::IndexFull { objects } => tracing::warn!(
            "shared tier {place}: its index is full with {objects} objects, so no more are uploaded: raise \
             --shared-objects, or shorten --shared-lifetime"
        ),
        SharedEvent::Damaged { name, count } => tracing::warn!(
            "shared tier {place}: {name} is not what was written, {count} reads in all since the start; such objects \
             are misses and can be put again"
        ),
        SharedEvent::Read { .. } | SharedEvent::Missed { .. } | SharedEvent::Removed { .. } => {}
    }
}
