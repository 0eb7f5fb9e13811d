//! What a caller says about a batch beside its requests: when, how urgent, for whom, what for.

use core::net::{IpAddr, SocketAddr};

use crate::sched::Priority;

/// What a batch is for. It decides the priority where none is given.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub enum Intent {
    /// Not said.
    #[default]
    Unspecified,
    /// A request of a user waits for it.
    ForegroundGet,
    /// It may be wanted soon.
    BackgroundPrefetch,
    /// It moves to where it is to live.
    Migration,
    /// State is being saved.
    Checkpoint,
    /// A model is being loaded.
    WeightLoading,
    /// One hop of a longer way.
    Staging,
}

impl Intent {
    /// The class of a batch of this intent that names none.
    #[must_use]
    pub const fn priority(self) -> Priority {
        match self {
            Self::ForegroundGet | Self::Staging => Priority::High,
            Self::Unspecified | Self::WeightLoading => Priority::Medium,
            Self::BackgroundPrefetch | Self::Migration | Self::Checkpoint => Priority::Low,
        }
    }
}

/// How a batch is to be treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubmitOptions {
    /// When it ends, done or not, in the host's nanoseconds.
    pub deadline_ns: u64,
    /// When it should be done. Batches with such a time go before others of their class and tenant, the earliest
    /// first. Nothing ends when it passes.
    pub due_ns: Option<u64>,
    /// Its class; else the intent's.
    pub priority: Option<Priority>,
    /// What it is for.
    pub intent: Intent,
    /// For whom: tenants share a class by weight.
    pub tenant: u32,
    /// The tenant's share, relative to others'; at least 1.
    pub weight: u16,
}

impl SubmitOptions {
    /// The defaults, to end at `deadline_ns`.
    #[must_use]
    pub const fn until(deadline_ns: u64) -> Self {
        Self { deadline_ns, due_ns: None, priority: None, intent: Intent::Unspecified, tenant: 0, weight: 1 }
    }
}

/// One of several ways to a peer: from a port of ours to a port of theirs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct RailAddress {
    /// The address of ours to connect from; none for whatever the system takes.
    pub local: Option<IpAddr>,
    /// The peer's data port on this way.
    pub tcp: SocketAddr,
    /// Speed of the slower of the two ports.
    pub bytes_per_second: u64,
    /// NUMA distance between our port and our memory: 0 near, 1 other node, 2 unknown or far.
    pub tier: u8,
    /// The devices at both ends, where it is a way over RDMA; `tcp` is then where the connection is talked about.
    pub rdma: Option<RailDevices>,
}

/// The devices at both ends of a rail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct RailDevices {
    /// Ours, by the host's number.
    pub own: u16,
    /// The peer's, by its number; where it has none of that number it takes another.
    pub peer: u16,
}
