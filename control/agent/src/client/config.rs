//! Settings of a client.

use std::time::Duration;

use kvplane_engine::Pacing;
use kvplane_proto::Limits;
use kvplane_tls::DataTls;
use kvplane_transfer::RdmaConfig;

use crate::link::ControlLink;
use crate::which::Control;

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Control plane to connect to.
    pub control: Control,
    /// Tenant of the keys; keys of different tenants never collide. `default` and the empty name are the default
    /// tenant, except that an empty name stands for the certificate's tenant if the client's certificate is bound to
    /// one.
    pub tenant: String,
    /// Send the keys of objects to the nodes, so that objects can be listed and removed by pattern. Without it an
    /// object takes slightly less memory (docs/adr/0014) and is known by its digest only.
    pub keep_keys: bool,
    /// Use shared memory for nodes on this host.
    pub shared_memory: bool,
    /// Use TCP.
    pub tcp: bool,
    /// Mode of TLS on TCP connections to nodes. With `Offer`, connections to nodes that require TLS use it.
    pub data_tls: DataTls,
    /// Mode of RDMA, and the devices to use.
    pub rdma: RdmaConfig,
    /// TCP connections to each shard.
    pub lanes: u16,
    /// Strategy of waiting for replies: polling and sleeping.
    pub pacing: Pacing,
    /// Deadline of each call.
    pub deadline: Duration,
    /// Longest wait of [`super::Client::connect`] for a control plane that does not answer or is not published yet: it
    /// may be restarting.
    pub connect: Duration,
    /// Verify checksums of objects copied over shared memory; over TCP they are always verified.
    pub verify_shared: bool,
    /// Stripe size, at least 1 MiB: longer objects, and objects that are too long for a shard, are stored as stripes
    /// spread over the cluster.
    pub stripe_bytes: u64,
    /// Upper bound of the hedge delay, 100 ms by default: a get that the owner has not answered by its 99th percentile
    /// of latency (at least half of this bound, at most this bound) is sent to the replica owner. Zero: hedge
    /// only when the owner is unreachable. Not used over RDMA.
    pub hedge: Duration,
    /// Spread gets of whole objects with two replicas over both owners. Each replica has its own version.
    pub spread: bool,
}

impl ClientConfig {
    /// Default of [`Self::hedge`].
    pub const HEDGE: Duration = Duration::from_millis(100);

    /// Default of [`Self::connect`].
    pub const CONNECT: Duration = ControlLink::RESTART;

    /// Returns the settings for the local control plane of this cluster.
    #[must_use]
    pub fn local(cluster: &str) -> Self {
        Self {
            control: Control::Local { cluster: cluster.to_owned(), runtime_directory: None },
            tenant: String::new(),
            keep_keys: true,
            shared_memory: true,
            tcp: true,
            data_tls: DataTls::Offer,
            rdma: RdmaConfig::default(),
            lanes: 2,
            pacing: Pacing::default(),
            deadline: Duration::from_nanos(Limits::DEFAULT_DEADLINE_NS),
            connect: Self::CONNECT,
            verify_shared: true,
            stripe_bytes: 64 << 20,
            hedge: Self::HEDGE,
            spread: true,
        }
    }
}
