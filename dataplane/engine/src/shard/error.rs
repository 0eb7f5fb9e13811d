//! Errors of starting a shard and of commands to it.

use std::io;
use std::time::Duration;

use kvplane_proto::ConfigError;
use kvplane_store::service::RegisterError;
use kvplane_sys::RegionError;
use kvplane_sys::device::DeviceError;
use kvplane_transport::RdmaError;

use crate::host::{DevicePoolConfig, TierOpenError};

use super::kept::KeptMemoryError;
use super::limits::{ANSWER_DEADLINE, MAILBOX_ENTRIES};

/// Reason why a shard could not be set up.
#[derive(Debug)]
pub enum ShardStartError {
    /// The kernel refused a socket, a thread or another resource.
    Resource(io::Error),
    /// The memory of its pool could not be allocated.
    Memory(RegionError),
    /// The memory that outlives its process could not be used.
    KeptMemory(KeptMemoryError),
    /// The limits of its store are invalid.
    Store(ConfigError),
    /// The device of its tier was not opened.
    Tier(TierOpenError),
    /// Its device pool could not be set up.
    DevicePool {
        /// Device, and the size of the pool.
        config: DevicePoolConfig,
        /// Error of the device.
        source: DeviceError,
    },
    /// Far memory of its pool left its NUMA node when a device registered it: it is movable there.
    FarMemoryMoved {
        /// NUMA node that it is bound to.
        node: u32,
        /// NUMA node where it is.
        found: u32,
    },
    /// Its thread ended before it listened.
    Ended,
}

impl core::fmt::Display for ShardStartError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Resource(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::KeptMemory(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
            Self::Tier(error) => error.fmt(f),
            Self::DevicePool { config: DevicePoolConfig { device, bytes }, source } => {
                write!(f, "a device pool of {bytes} bytes on {device}: {source}")
            }
            Self::FarMemoryMoved { node, found } => write!(
                f,
                "its far memory went from NUMA node {node} to {found} when a device registered it, because all that is \
                 on node {node} is movable: take its memory offline, and online again as memory that stays (daxctl \
                 offline-memory DEVICE; daxctl online-memory --no-movable DEVICE)"
            ),
            Self::Ended => f.write_str("its thread ended before it listened"),
        }
    }
}

impl std::error::Error for ShardStartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Resource(error) => Some(error),
            Self::Memory(error) => Some(error),
            Self::KeptMemory(error) => Some(error),
            Self::Store(error) => Some(error),
            Self::Tier(error) => Some(error),
            Self::DevicePool { source, .. } => Some(source),
            Self::FarMemoryMoved { .. } | Self::Ended => None,
        }
    }
}

impl From<io::Error> for ShardStartError {
    fn from(error: io::Error) -> Self {
        Self::Resource(error)
    }
}

impl From<RegionError> for ShardStartError {
    fn from(error: RegionError) -> Self {
        Self::Memory(error)
    }
}

impl From<KeptMemoryError> for ShardStartError {
    fn from(error: KeptMemoryError) -> Self {
        Self::KeptMemory(error)
    }
}

impl From<ConfigError> for ShardStartError {
    fn from(error: ConfigError) -> Self {
        Self::Store(error)
    }
}

impl From<TierOpenError> for ShardStartError {
    fn from(error: TierOpenError) -> Self {
        Self::Tier(error)
    }
}

/// Way in which the thread of a shard has ended.
#[derive(Debug)]
pub enum ShardEnd {
    /// Its host failed.
    Failed(io::Error),
    /// It panicked.
    Panicked,
    /// Its handle was stopped.
    Stopped,
}

impl core::fmt::Display for ShardEnd {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Panicked => f.write_str("its thread panicked"),
            Self::Stopped => f.write_str("it was stopped"),
        }
    }
}

/// Reason why a shard did not start, or did not execute a command.
#[derive(Debug)]
pub enum ShardError {
    /// The shard could not be set up.
    Start(ShardStartError),
    /// Backpressure: its mailbox is full.
    Busy,
    /// The shard did not answer in time.
    Timeout,
    /// Its thread has ended.
    Ended(ShardEnd),
    /// The service refused to register memory.
    Register(RegisterError),
    /// An RDMA device refused a connection.
    Rdma(RdmaError),
    /// A device refused to have its memory registered.
    Device(DeviceError),
    /// Peers still use memory that was unregistered.
    Held {
        /// Processes on this host that are copying; 0 for one that is not visible from here.
        pids: Vec<i32>,
        /// Time that the caller waited for them.
        waited: Duration,
    },
}

impl core::fmt::Display for ShardError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Start(why) => write!(f, "a shard could not be started: {why}"),
            Self::Busy => write!(f, "the mailbox of the shard is full ({MAILBOX_ENTRIES} commands): retry"),
            Self::Timeout => write!(f, "the shard did not answer within {} s", ANSWER_DEADLINE.as_secs()),
            Self::Ended(why) => write!(f, "the shard has ended: {why}"),
            Self::Register(error) => error.fmt(f),
            Self::Rdma(error) => error.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::Held { pids, waited } => held(f, pids, *waited),
        }
    }
}

fn held(f: &mut core::fmt::Formatter<'_>, pids: &[i32], waited: Duration) -> core::fmt::Result {
    let waited = waited.as_secs_f32();
    if pids.is_empty() {
        return write!(f, "peers still use the memory after {waited} s; keep it mapped until they release it: retry");
    }
    let seen: Vec<String> = pids.iter().filter(|&&pid| pid > 0).map(i32::to_string).collect();
    let unseen = if seen.len() < pids.len() { " and one that is not visible from here" } else { "" };
    let seen = seen.join(" ");
    write!(
        f,
        "process {seen}{unseen} of this host has been in the middle of a copy from or to the memory for {waited} s, so \
         it was probably stopped: continue it (kill -CONT {seen}) or end it, then unregister again; until then the \
         memory must stay mapped"
    )
}

impl std::error::Error for ShardError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Start(error) => Some(error),
            Self::Ended(ShardEnd::Failed(error)) => Some(error),
            Self::Register(error) => Some(error),
            Self::Rdma(error) => Some(error),
            Self::Device(error) => Some(error),
            _ => None,
        }
    }
}

impl From<ShardStartError> for ShardError {
    fn from(error: ShardStartError) -> Self {
        Self::Start(error)
    }
}
