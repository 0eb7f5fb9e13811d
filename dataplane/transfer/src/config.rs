//! Settings of a transfer engine, and the configurations derived from them.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvplane_client::Config;
use kvplane_engine::{HostConfig, Pacing, ZeroCopyOptions, cpu};
use kvplane_mooncake::Environment;
use kvplane_sys::private_files::{private_directory, runtime_directory};
use kvplane_sys::random::random_u64;

use crate::error::{ArgumentError, Error};

use crate::rails::rdma::{RdmaConfig, RdmaUse};

/// Maximum number of initiators of an engine.
const INITIATORS: usize = 64;

/// Settings of a transfer engine.
#[derive(Clone, Debug)]
pub struct TransferEngineConfig {
    /// Name of the group of engines; engines of another group are rejected.
    pub cluster: String,
    /// Address of the handshake daemon, by which peers find the engine. Port 0 takes a free one of the environment's
    /// range. The data ports are on the same address. It must be a loopback address, unless [`Self::open_to_network`]
    /// is set.
    pub listen: SocketAddr,
    /// Data port of the native protocol; 0 takes a free one.
    pub data_port: u16,
    /// Serve stock Mooncake engines, too.
    pub stock_peers: bool,
    /// Data port for stock Mooncake engines; 0 takes a free one.
    pub stock_data_port: u16,
    /// Allow [`Self::listen`] to be an address beyond loopback. Anyone who reaches the ports can then read and write
    /// all accessible memory: handshakes and data have no authentication.
    pub open_to_network: bool,
    /// Address to announce to peers, where it differs from [`Self::listen`].
    pub announce: Option<IpAddr>,
    /// Rendezvous of engines: `P2PHANDSHAKE`, or the address of a metadata store in Mooncake's form
    /// (`http://host:port/metadata`, `etcd://host:port`, `redis://host:port`).
    pub metadata: String,
    /// Name of the segment in the metadata store; `None`, or no store, takes the address of the handshake daemon.
    pub name: Option<String>,
    /// Limits and passwords of handshakes and metadata stores, as in Mooncake's environment variables.
    pub environment: Environment,
    /// Use the native protocol with peers that offer it; otherwise they are treated as stock Mooncake engines.
    pub native: bool,
    /// Offer and use shared memory.
    pub shared_memory: bool,
    /// Map a peer's memory where shared memory is used and the memory can be mapped.
    pub mapping: bool,
    /// Use the kernel's cross-process copies (CMA) where shared memory is used and there is no mapping.
    pub cma: bool,
    /// Use TCP.
    pub tcp: bool,
    /// Mode of RDMA, and the devices to use.
    pub rdma: RdmaConfig,
    /// Open names of files (`file:///path`) as segments, with the rights of this process. Disable it where names come
    /// from others.
    pub files: bool,
    /// Number of TCP connections to each peer.
    pub lanes: u16,
    /// Send a checksum with payloads over TCP, which the receiver verifies.
    pub checksum: bool,
    /// Slice size: ranges are split into slices of this many bytes.
    pub slice_bytes: u64,
    /// Payloads that are sent over TCP without a copy into the kernel (zero-copy). Memory that peers read must then
    /// stay unchanged slightly longer: until they have acknowledged the bytes.
    pub zero_copy: ZeroCopyOptions,
    /// Strategy of waiting: polling and sleeping.
    pub pacing: Pacing,
    /// Directory of the Unix socket; `None` takes the user's runtime directory.
    pub runtime_directory: Option<PathBuf>,
    /// Core to pin the serving thread to; `None` for no pinning.
    pub core: Option<usize>,
    /// Number of initiators, the sets of connections that threads share; each submitting thread stays with one. More
    /// initiators let more threads move bytes in parallel, and cost each peer more connections.
    pub initiators: usize,
    /// Limit of batches in flight; further ones are rejected.
    pub batches: usize,
    /// Default deadline of a batch.
    pub deadline: Duration,
    /// Threshold from which slices count as slow; the latest slow ones are kept with the time of each stage.
    pub slow: Duration,
    /// Longest wait of unregistering for peers that use the memory. Peers on other hosts are cut off before; a process
    /// on this host that was stopped in the middle of a copy cannot be.
    pub quiet_deadline: Duration,
}

impl Default for TransferEngineConfig {
    fn default() -> Self {
        Self {
            cluster: "p2p".to_owned(),
            listen: ([127, 0, 0, 1], 0).into(),
            data_port: 0,
            stock_peers: true,
            stock_data_port: 0,
            open_to_network: false,
            announce: None,
            metadata: "P2PHANDSHAKE".to_owned(),
            name: None,
            environment: Environment::default(),
            native: true,
            shared_memory: true,
            mapping: true,
            cma: true,
            tcp: true,
            rdma: RdmaConfig::default(),
            files: true,
            lanes: 2,
            checksum: true,
            slice_bytes: 256 << 10,
            zero_copy: ZeroCopyOptions::default(),
            pacing: Pacing::default(),
            runtime_directory: None,
            core: None,
            initiators: 1,
            batches: 65_536,
            deadline: Duration::from_secs(30),
            slow: Duration::from_millis(100),
            quiet_deadline: Duration::from_secs(10),
        }
    }
}

impl TransferEngineConfig {
    /// # Errors
    /// When a setting is invalid; the error names it and the reason.
    pub(crate) fn check(&self, guarded: bool) -> Result<(), Error> {
        if !guarded && !self.listen.ip().is_loopback() && !self.open_to_network {
            return Err(ArgumentError::OpenPort { listen: self.listen }.into());
        }
        if self.announced().is_unspecified() {
            return Err(ArgumentError::NotAnnounced { listen: self.listen }.into());
        }
        let same_host = self.shared_memory && (self.mapping || self.cma);
        if !self.tcp && !same_host && self.rdma.mode != RdmaUse::Require {
            return Err(ArgumentError::NoPath.into());
        }
        if !(1..=INITIATORS).contains(&self.initiators) {
            return Err(ArgumentError::Initiators { initiators: self.initiators, most: INITIATORS }.into());
        }
        if self.batches == 0 {
            return Err(ArgumentError::NoBatches.into());
        }
        if !guarded && !self.listen.ip().is_loopback() {
            // Printed even where the caller ignores warnings: exposure cannot be undone later.
            eprintln!(
                "kvplane: warning: memory that is registered here can be read and written by anyone who reaches {}: \
                 transfer engines require no ticket",
                self.listen.ip()
            );
        }
        Ok(())
    }
}

impl TransferEngineConfig {
    pub(crate) fn slow_ns(&self) -> u64 {
        u64::try_from(self.slow.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Returns the configuration of the hosts of both sides, serving and initiating.
///
/// # Errors
/// When RDMA is required and no device is usable; the error gives the reason.
pub(crate) fn host(config: &TransferEngineConfig) -> Result<HostConfig, Error> {
    let rdma = config.rdma.devices()?;
    Ok(HostConfig { rdma, zero_copy: config.zero_copy, ..HostConfig::default() })
}

/// Returns the configuration of an initiator; `tasks` requests a report at the end of each task.
pub(crate) fn client(config: &TransferEngineConfig, tasks: bool) -> Result<Config, Error> {
    Ok(Config {
        cluster: config.cluster.clone(),
        client: random_u64()?,
        host: cpu::boot_id().unwrap_or_default(),
        lanes: config.lanes,
        shared: config.shared_memory && config.mapping,
        cma: config.shared_memory && config.cma,
        stream: config.tcp && config.rdma.mode != RdmaUse::Require,
        slice_bytes: config.slice_bytes,
        checksum_segments: config.checksum,
        report_tasks: tasks,
        slow_ns: config.slow_ns(),
        ..Config::default()
    })
}

/// Returns the directory of Unix sockets, private to the user.
pub(crate) fn directory_of(config: &TransferEngineConfig) -> Result<PathBuf, Error> {
    let directory = match &config.runtime_directory {
        Some(path) => path.clone(),
        None => runtime_directory()?,
    };
    private_directory(&directory)?;
    kvplane_transport::sockets::sweep(&directory);
    Ok(directory)
}

/// Returns the path of the Unix socket of the engine with this data port.
pub(crate) fn socket_path(directory: &Path, address: SocketAddr) -> PathBuf {
    directory.join(format!("segment-{}.shm", address.port()))
}
