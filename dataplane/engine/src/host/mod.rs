//! Hosts: the drivers of one part of the dataplane, with a service that answers peers or a client that calls them.
//!
//! * [`ShardHost`]: a service with its memory, the SSD tier of its store, and a client that fetches for it.
//! * [`ClientHost`]: a client, with files and memory of its own process.
//!
//! Both own all real memory and give the pure cores only names for it: a pool, segments by id, buffers by index. Both
//! are compositions of the same components; lower ones know nothing of upper ones:
//!
//! * [`reactor`]: readiness, polling and parking; the connections with their drivers.
//! * [`service_side`]: a service, and its resources in a host.
//! * [`client_side`]: a client, and its resources in a host.
//! * [`tier`], [`shared`], [`device_pool`], [`fetch`]: the SSD tier, the shared tier and the device pool of a shard's
//!   store, and the client of a shard.
//! * [`mapped`]: the files of kept memory, and memory of a running process that is mapped before it is taken over.
//! * [`reports`]: counters, and notices for the thread that drives the host.
//!
//! One `poll` is a round: readiness, frames, outputs, timers, sends. Nothing in it blocks. `park` waits for the next
//! event. A host that spins calls the poller only every few rounds while it has cheaper sources to poll: rings in
//! shared memory, or the one or two connections that were active last.
//!
//! Thread affinity: none. A host is driven by one thread at a time, which may change between calls.

mod client_host;
mod client_side;
mod config;
mod device_pool;
mod fetch;
mod mapped;
mod reactor;
mod reports;
mod segments;
mod service_side;
mod shard_host;
mod shared;
mod tier;

pub use client_host::ClientHost;
pub(crate) use client_side::buffers::PartPlace;
pub use client_side::files::HostFiles;
pub use client_side::foreign::{Handshake, HandshakeError, StockAnswer, StockEngines};
pub(crate) use client_side::peer_memory::{OwnSide, PeerCopies, PeerPath, PeerRange};
pub(crate) use client_side::pool_reads::{PoolRead, PoolSource};
pub use config::{HostConfig, KeptMemoryConfig};
pub use device_pool::{DevicePool, DevicePoolConfig};
pub use fetch::FetchConfig;
pub use mapped::{KeptFiles, MappedMemory, MappedMemoryError, image_bytes_most};
pub use reactor::devices::RdmaDevices;
pub use reactor::near::{NearDevices, PlaceName, node_of_region};
pub use reports::{HostCounters, PeerMemoryCounters, PoolReadCounters};
pub use service_side::served::DeviceSnapshot;
pub(crate) use shard_host::end_accesses;
pub use shard_host::{ServedSegments, ShardHost};
pub use shared::SharedSetup;
pub use tier::{PART_LEAST_BYTES, TierDevice, TierNotice, TierOpenError, TierSetup};

/// Any thread may drive a host.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<ShardHost>();
    is_send::<ClientHost>();
};
