//! Options of a batch: deadline, priority, tenant and intent.

use core::net::{IpAddr, SocketAddr};

use crate::sched::Priority;

/// Intent of a batch. It decides the priority if the batch sets none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub enum Intent {
    /// Unspecified.
    #[default]
    Unspecified,
    /// A user's request waits for the batch.
    ForegroundGet,
    /// Data that may be needed soon.
    BackgroundPrefetch,
    /// Data moves to a new owner.
    Migration,
    /// State is saved.
    Checkpoint,
    /// Weights of a model are loaded.
    WeightLoading,
    /// One hop of a transfer over several hops.
    Staging,
}

impl Intent {
    /// Returns the default priority of this intent.
    #[must_use]
    pub const fn priority(self) -> Priority {
        match self {
            Self::ForegroundGet | Self::Staging => Priority::High,
            Self::Unspecified | Self::WeightLoading => Priority::Medium,
            Self::BackgroundPrefetch | Self::Migration | Self::Checkpoint => Priority::Low,
        }
    }
}

/// Options of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubmitOptions {
    /// Time at which the batch ends, complete or not, in the host's nanoseconds.
    pub deadline_ns: u64,
    /// Time at which the batch should be complete. Batches with such a time go before others of their priority and
    /// tenant, earliest first. The batch does not end when the time passes.
    pub due_ns: Option<u64>,
    /// Priority; `None` for that of the intent.
    pub priority: Option<Priority>,
    /// Intent of the batch.
    pub intent: Intent,
    /// Tenant of the batch: tenants share a priority class by weight.
    pub tenant: u32,
    /// Share of the tenant, relative to those of others; at least 1.
    pub weight: u16,
}

impl SubmitOptions {
    /// Returns the default options, with this deadline.
    #[must_use]
    pub const fn until(deadline_ns: u64) -> Self {
        Self { deadline_ns, due_ns: None, priority: None, intent: Intent::Unspecified, tenant: 0, weight: 1 }
    }
}

/// One of several network paths to a peer: from a port of ours to a port of the peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct RailAddress {
    /// Local address to connect from; `None` leaves it to the operating system.
    pub local: Option<IpAddr>,
    /// Data port of the peer on this path.
    pub tcp: SocketAddr,
    /// Bandwidth of the slower of the two ports, in bytes per second.
    pub bytes_per_second: u64,
    /// NUMA distance between our port and our memory: 0 near, 1 other node, 2 unknown or far.
    pub tier: u8,
    /// Devices at both ends, if this is a path over RDMA; the RDMA connection is then set up over `tcp`.
    pub rdma: Option<RailDevices>,
}

/// Devices at both ends of a rail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct RailDevices {
    /// Our device, by the host's number.
    pub own: u16,
    /// The peer's device, by its number; a peer without a device of that number uses another.
    pub peer: u16,
}
