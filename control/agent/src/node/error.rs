//! Errors of a node's settings.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use kvplane_sys::MemoryFileError;
use kvplane_sys::device::DeviceId;

use super::{FarMemory, POOL_LEAST_BYTES};

/// Setting of a node that is invalid, or that does not fit the others.
#[derive(Debug)]
#[non_exhaustive]
pub enum NodeConfigError {
    /// There is an SSD, but no number of the node that its records could belong to.
    SsdWithoutNode,
    /// Memory is to be kept, but there is no number of the node that it could belong to.
    KeptMemoryWithoutNode,
    /// The directory of the memory that is kept cannot be used.
    KeptMemory(MemoryFileError),
    /// The data ports would be open without authentication.
    OpenPorts {
        /// Address to listen on.
        listen: IpAddr,
    },
    /// The address to listen on names no interface, so that no peer could be told of it.
    UnspecifiedListen {
        /// Address to listen on.
        listen: IpAddr,
    },
    /// The pool is too small for its shards.
    Pool {
        /// Size of the pool.
        pool_bytes: u64,
        /// Number of shards that the machine gets.
        shards: usize,
    },
    /// The shards need more ports than there are from the first one on.
    Ports {
        /// Number of shards, each with a port.
        shards: usize,
        /// First port.
        port: u16,
    },
    /// The maximum number of objects is beyond what a shard can count.
    Objects {
        /// Maximum number of objects of the node.
        objects: u64,
        /// Number of shards.
        shards: usize,
    },
    /// There are device pools and SSDs.
    DevicePoolsBesideSsds,
    /// The eviction policy does not go with device pools.
    DevicePoolsByLru,
    /// There are more device pools than shards.
    DevicePools {
        /// Number of device pools.
        device_pools: usize,
        /// Number of shards.
        shards: usize,
    },
    /// Two device pools are on one device.
    DeviceTwice {
        /// Device of both.
        device: DeviceId,
    },
    /// A device pool is too small for the shards that share it.
    DevicePool {
        /// Device of the pool.
        device: DeviceId,
        /// Size of the pool.
        bytes: u64,
        /// Least size.
        least_bytes: u64,
    },
    /// There are device pools and far memory.
    FarPoolBesideDevicePools,
    /// Far memory is to outlive the process.
    FarPoolInKeptMemory,
    /// There is no such far memory.
    NoFarMemory {
        /// Memory that is named.
        memory: FarMemory,
        /// NUMA nodes of the machine.
        known: Vec<u32>,
    },
    /// The far pool is too small for the shards.
    FarPool {
        /// Size of the far pool.
        bytes: u64,
        /// Least size.
        least_bytes: u64,
    },
    /// The far pool is larger than the memory that is named.
    FarPoolBeyondNode {
        /// NUMA node.
        node: u32,
        /// Bytes that its shards would take there.
        bytes: u64,
        /// Bytes that it has.
        memory_bytes: u64,
    },
    /// The mean length of objects on an SSD is out of range.
    SsdObjectBytes {
        /// Mean length that is set.
        object_bytes: u32,
        /// Least mean length.
        least_bytes: u32,
        /// Greatest mean length.
        most_bytes: u32,
    },
    /// There are more SSDs than shards.
    Ssds {
        /// Number of SSDs.
        ssds: usize,
        /// Number of shards.
        shards: usize,
    },
    /// The part of an SSD that may be used is too small for the shards that share it.
    SsdBytes {
        /// Path of the SSD.
        path: PathBuf,
        /// Bytes that may be used.
        bytes: u64,
        /// Least bytes.
        least_bytes: u64,
    },
    /// An SSD cannot be opened, or has the data of others; the error names its path.
    Ssd(std::io::Error),
    /// The length of packs of the shared tier is out of range.
    SharedPack {
        /// Length that is set.
        pack_bytes: u64,
        /// Least length.
        least_bytes: u64,
        /// Greatest length.
        most_bytes: u64,
    },
    /// The limit of the node's packs has no room for a pack of each shard.
    SharedBytes {
        /// Limit that is set.
        most_bytes: u64,
        /// Least limit.
        least_bytes: u64,
    },
    /// The place of the shared tier cannot be used.
    Shared(kvplane_objects::PlaceError),
}

impl fmt::Display for NodeConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SsdWithoutNode => {
                f.write_str("an SSD belongs to one node: set the node's number, to the same value at every start")
            }
            Self::KeptMemoryWithoutNode => f.write_str(
                "memory that is kept belongs to one node: set the node's number, to the same value at every start",
            ),
            Self::KeptMemory(error) => write!(f, "{error}"),
            Self::OpenPorts { listen } => write!(
                f,
                "data ports on {listen} would be open without authentication: use a loopback address, or a control \
                 plane that issues tickets (kvplane control, without --no-tickets)"
            ),
            Self::UnspecifiedListen { listen } => {
                write!(f, "data ports on {listen}: name the address of this host that clients and other nodes reach")
            }
            Self::Pool { pool_bytes, shards } => write!(
                f,
                "a pool of {pool_bytes} bytes over {shards} shards gives less than {POOL_LEAST_BYTES} bytes to each"
            ),
            Self::Ports { shards, port } => write!(
                f,
                "{shards} shards from port {port} on would need ports above {}: choose a lower port",
                u16::MAX
            ),
            Self::Objects { objects, shards } => {
                write!(f, "{objects} objects over {shards} shards are too many for each")
            }
            Self::DevicePoolsBesideSsds => f.write_str(
                "a device pool and an SSD exclude each other: objects of a device pool are not written to SSDs",
            ),
            Self::DevicePoolsByLru => f.write_str(
                "the eviction policy lru does not tell hot objects from others, which a device pool needs: use slru \
                 or s3fifo",
            ),
            Self::DevicePools { device_pools, shards } => {
                write!(f, "{device_pools} device pools for {shards} shards: name at most one for each shard")
            }
            Self::DeviceTwice { device } => write!(f, "{device} is named twice: give one device pool for each"),
            Self::DevicePool { device, bytes, least_bytes } => {
                write!(f, "a device pool of {bytes} bytes on {device}: {least_bytes} are needed")
            }
            Self::FarPoolBesideDevicePools => f.write_str("a device pool and far memory exclude each other"),
            Self::FarPoolInKeptMemory => {
                f.write_str("far memory and memory that is kept exclude each other: far memory ends with the process")
            }
            Self::NoFarMemory { memory: FarMemory::Cxl, .. } => f.write_str(
                "no NUMA node is without CPUs: name one that has some (numa:NODE:SIZE), or make one of a dax device \
                 (daxctl reconfigure-device --mode=system-ram --no-movable DEVICE)",
            ),
            Self::NoFarMemory { memory: FarMemory::NumaNode(node), known } => {
                let known: Vec<String> = known.iter().map(u32::to_string).collect();
                write!(f, "there is no NUMA node {node}, only {}", known.join(", "))
            }
            Self::FarPool { bytes, least_bytes } => {
                write!(f, "{bytes} bytes of far memory: {least_bytes} are needed")
            }
            Self::FarPoolBeyondNode { node, bytes, memory_bytes } => {
                write!(f, "{bytes} bytes of far memory: NUMA node {node} has {memory_bytes} bytes")
            }
            Self::SsdObjectBytes { object_bytes, least_bytes, most_bytes } => write!(
                f,
                "objects of {object_bytes} bytes on an SSD: give a mean length from {least_bytes} to {most_bytes}"
            ),
            Self::Ssds { ssds, shards } => {
                write!(f, "{ssds} SSDs for {shards} shards: name at most one for each shard")
            }
            Self::SsdBytes { path, bytes, least_bytes } => {
                write!(f, "{}: {bytes} bytes are fewer than the {least_bytes} that are needed", path.display())
            }
            Self::Ssd(error) => write!(f, "{error}"),
            Self::SharedPack { pack_bytes, least_bytes, most_bytes } => {
                write!(f, "packs of {pack_bytes} bytes: give a length from {least_bytes} to {most_bytes}")
            }
            Self::SharedBytes { most_bytes, least_bytes } => write!(
                f,
                "a limit of {most_bytes} bytes in the shared tier is less than a pack of each shard: give at least \
                 {least_bytes}, or shorter packs"
            ),
            Self::Shared(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for NodeConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::KeptMemory(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn texts_name_the_setting_and_what_to_do() {
        let says = |error: NodeConfigError, text: &str| assert_eq!(error.to_string(), text);
        let pool = NodeConfigError::Pool { pool_bytes: 1 << 20, shards: 2 };
        says(pool, "a pool of 1048576 bytes over 2 shards gives less than 1048576 bytes to each");
        let ports = NodeConfigError::Ports { shards: 4, port: 65_534 };
        says(ports, "4 shards from port 65534 on would need ports above 65535: choose a lower port");
        let listen = NodeConfigError::UnspecifiedListen { listen: Ipv4Addr::UNSPECIFIED.into() };
        says(listen, "data ports on 0.0.0.0: name the address of this host that clients and other nodes reach");
    }
}
