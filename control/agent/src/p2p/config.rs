//! Settings of a P2P store, and options of publishing.

use std::time::Duration;

use kvplane_engine::{Pacing, cpu};
use kvplane_rpc::Role;
use kvplane_transfer::{RdmaConfig, TransferEngineConfig};

use crate::which::Control;

/// Limit of connection sets: each costs resources on every peer.
const INITIATORS: usize = 4;
/// Deadline of a call whose caller gave none.
pub(super) const USUAL: Duration = Duration::from_secs(3600);

/// Settings of a [`P2pStore`](super::P2pStore).
#[derive(Clone, Debug)]
pub struct P2pConfig {
    /// Control plane that has the catalog.
    pub control: Control,
    /// Role of this process: client or node.
    pub role: Role,
    /// Tenant of the objects. `default` and the empty name are the default tenant, except that an empty name stands for
    /// the certificate's tenant if the certificate is bound to one.
    pub tenant: String,
    /// Listen on this host's address on the route to the control plane, if that is beyond loopback, instead of the
    /// address in [`Self::engine`]: for callers that chose no address. Where the control plane issues no tickets, the
    /// store stays on loopback and prints a warning to standard error.
    pub by_route: bool,
    /// Transfer engine that moves the bytes. Peers on other hosts need it to listen on a reachable address, which
    /// requires a control plane that issues tickets; then only peers of the same tenant are admitted.
    pub engine: TransferEngineConfig,
    /// Host label: an object is fetched to a host once, and the processes on it share it. The default is the boot id of
    /// this machine.
    pub host: String,
    /// Rack label, where there is one.
    pub rack: String,
    /// Bandwidth limit of uploads to peers, in bytes a second; 0 for no limit.
    pub upload_bytes_per_second: u64,
    /// Bandwidth limit of downloads, in bytes a second; 0 for no limit.
    pub download_bytes_per_second: u64,
    /// Longest wait of unregistering for reads in flight.
    pub readers_deadline: Duration,
}

impl P2pConfig {
    /// Returns the default settings for this control plane.
    #[must_use]
    pub fn new(control: Control) -> Self {
        // Fetching threads also hash; therefore several threads move bytes in parallel. Not over RDMA: each connection
        // set would register and lock all memory with all devices once more.
        let several = || std::thread::available_parallelism().map_or(1, usize::from).min(INITIATORS);
        let initiators = if RdmaConfig::default().usable().is_ok() { 1 } else { several() };
        Self {
            control,
            role: Role::Client,
            tenant: String::new(),
            by_route: false,
            // Shards take milliseconds: spinning gains nothing and takes CPU time from other processes.
            engine: TransferEngineConfig { pacing: Pacing::Park, initiators, ..TransferEngineConfig::default() },
            host: cpu::boot_id().unwrap_or_default(),
            rack: String::new(),
            upload_bytes_per_second: 0,
            download_bytes_per_second: 0,
            readers_deadline: Duration::from_secs(30),
        }
    }
}

/// Options of publishing an object.
#[derive(Clone, Debug, Default)]
pub struct PublishOptions {
    /// Version; without one, the newest version if its content is equal, else the one after it.
    pub version: Option<u64>,
    /// Shard size in bytes, into which buffers are divided; `None` chooses one that suits the object
    /// ([`Layout::fitting_shard_bytes`](kvplane_cluster::p2p::Layout::fitting_shard_bytes)).
    pub shard_bytes: Option<u64>,
    /// Description for the users of the object.
    pub about: Vec<u8>,
}
