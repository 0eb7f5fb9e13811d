//! Settings of a transfer engine, and what follows from them.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvplane_client::Config;
use kvplane_engine::{HostConfig, Pacing, ZeroCopyOptions, cpu};
use kvplane_mooncake::Environment;
use kvplane_sys::private_files::{private_directory, runtime_directory};
use kvplane_sys::random::random_u64;

use crate::error::Error;

use crate::rails::rdma::{RdmaConfig, RdmaUse};

/// The most initiators that an engine may have.
const INITIATORS: usize = 64;

/// Settings of a transfer engine.
#[derive(Clone, Debug)]
pub struct TransferEngineConfig {
    /// Group of engines that belong together; others are refused.
    pub cluster: String,
    /// Where peers ask for it: the address of its handshake daemon. Port 0 takes a free one of the environment's range.
    /// The data ports are on the same address. Only loopback, unless [`Self::open_to_network`] says otherwise.
    pub listen: SocketAddr,
    /// Data port of our own protocol; 0 takes a free one.
    pub data_port: u16,
    /// Whether stock Mooncake engines are served too.
    pub stock_peers: bool,
    /// Data port for those; 0 takes a free one.
    pub stock_data_port: u16,
    /// Whether [`Self::listen`] may be another address than a loopback one. Whoever reaches the ports may then read and
    /// write all accessible memory: handshakes and data have no authentication.
    pub open_to_network: bool,
    /// The address that peers are told, where it is not [`Self::listen`]'s own.
    pub announce: Option<IpAddr>,
    /// Where engines find each other: `P2PHANDSHAKE`, or the address of a store of metadata as Mooncake has it
    /// (`http://host:port/metadata`, `etcd://host:port`, `redis://host:port`).
    pub metadata: String,
    /// The segment's name in the store of metadata; without one, and without a store, it is the address of the
    /// handshake daemon.
    pub name: Option<String>,
    /// Limits and passwords of handshakes and stores, as the variables of Mooncake's users have them.
    pub environment: Environment,
    /// Whether our own protocol is spoken with peers that have it; without, they are asked as stock Mooncake engines.
    pub native: bool,
    /// Whether shared memory is offered and used.
    pub shared_memory: bool,
    /// Whether a peer's memory is mapped where shared memory is used and it can be mapped.
    pub mapping: bool,
    /// Whether the kernel is asked to copy between the processes where shared memory is used and there is no mapping.
    pub cma: bool,
    /// Whether TCP is used.
    pub tcp: bool,
    /// Whether RDMA is used, and which devices.
    pub rdma: RdmaConfig,
    /// Whether names of files (`file:///path`) open them as segments, with the rights of this process. To be switched
    /// off where names come from others.
    pub files: bool,
    /// TCP connections to each peer.
    pub lanes: u16,
    /// Whether payloads over TCP carry a checksum that their receiver checks.
    pub checksum: bool,
    /// Ranges are cut into slices of this many bytes.
    pub slice_bytes: u64,
    /// Which payloads leave over TCP without being copied into the kernel. Memory that is read by peers must then stay
    /// as it is a little longer: until they have acknowledged the bytes.
    pub zero_copy: ZeroCopyOptions,
    /// How to wait.
    pub pacing: Pacing,
    /// Where the Unix socket goes; `None` takes the user's runtime directory.
    pub runtime_directory: Option<PathBuf>,
    /// Core to pin the serving thread to.
    pub core: Option<usize>,
    /// Sets of connections that threads share: each thread that submits stays with one. More let more threads move
    /// bytes at the same time, and cost each peer more connections.
    pub initiators: usize,
    /// Batches that may be in flight at a time; one more is refused.
    pub batches: usize,
    /// Deadline of a batch that names none.
    pub deadline: Duration,
    /// Slices that take longer are counted as slow, and the latest of them kept with where they spent their time.
    pub slow: Duration,
    /// How long unregistering waits for peers that use the memory. Those of other hosts are cut off before; one of this
    /// host that was stopped in the middle of a copy cannot be.
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
    /// When the settings cannot be: says which and why.
    pub(crate) fn check(&self, guarded: bool) -> Result<(), Error> {
        if !guarded && !self.listen.ip().is_loopback() && !self.open_to_network {
            return Err(Error::Argument(format!(
                "a data port on {} would be open without authentication: use a loopback address, or say that the \
                 network may reach it",
                self.listen
            )));
        }
        if self.announced().is_unspecified() {
            return Err(Error::Argument(format!("peers cannot be told {}: say which address to tell", self.listen)));
        }
        let same_host = self.shared_memory && (self.mapping || self.cma);
        if !self.tcp && !same_host && self.rdma.mode != RdmaUse::Require {
            return Err(Error::Argument(
                "neither TCP nor a way through shared memory (mapping, cma) is allowed: no way to any peer".to_owned(),
            ));
        }
        if !(1..=INITIATORS).contains(&self.initiators) {
            return Err(Error::Argument(format!("{} initiators: give from 1 to {INITIATORS}", self.initiators)));
        }
        if self.batches == 0 {
            return Err(Error::Argument("0 batches in flight: give at least 1".to_owned()));
        }
        if !guarded && !self.listen.ip().is_loopback() {
            // Said also where nobody reads what the engine returns: it cannot be taken back later.
            eprintln!(
                "kvplane: warning: memory that is registered here can be read and written by whoever reaches {}: \
                 transfer engines ask for no ticket",
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

/// What the hosts of both sides are told.
///
/// # Errors
/// When RDMA is required and there is no device that can be used: says why.
pub(crate) fn host(config: &TransferEngineConfig) -> Result<HostConfig, Error> {
    let rdma = config.rdma.devices()?;
    Ok(HostConfig { rdma, zero_copy: config.zero_copy, ..HostConfig::default() })
}

/// What the asking side is told; `tasks` for whether it reports the end of each task.
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

/// The directory of Unix sockets, private to the user.
pub(crate) fn directory_of(config: &TransferEngineConfig) -> Result<PathBuf, Error> {
    let directory = match &config.runtime_directory {
        Some(path) => path.clone(),
        None => runtime_directory()?,
    };
    private_directory(&directory)?;
    kvplane_engine::sockets::sweep(&directory);
    Ok(directory)
}

/// The Unix socket of the engine with this data port.
pub(crate) fn socket_path(directory: &Path, address: SocketAddr) -> PathBuf {
    directory.join(format!("segment-{}.shm", address.port()))
}
