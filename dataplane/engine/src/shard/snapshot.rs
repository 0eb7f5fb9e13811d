//! What is counted of a shard, at one moment.

use kvplane_proto::Digest;
use kvplane_store::service::{CopyCounters, MoveCounters, ServiceCounters, ServiceTimes, TierSnapshot, Tiering};
use kvplane_store::{Store, StoreStats};
use kvplane_sys::cpu;
use kvplane_transport::mooncake::ServerCounters;
use kvplane_transport::{FaultCounters, NvmeCounters};

use crate::host::{DeviceSnapshot, HostCounters, ShardHost};

/// What a shard tells about itself.
#[derive(Clone, Debug, Default)]
pub struct ShardSnapshot {
    /// Its objects.
    pub store: Option<StoreStats>,
    /// Its tier.
    pub tier: Option<TierSnapshot>,
    /// The device of its tier.
    pub device: Option<NvmeCounters>,
    /// Its requests.
    pub service: ServiceCounters,
    /// Slots that move.
    pub moves: MoveCounters,
    /// Objects that two owners have.
    pub copies: CopyCounters,
    /// How long requests took.
    pub times: ServiceTimes,
    /// Names of the objects that those times speak of: tenant and key, as far as they are in memory with them.
    pub names: Vec<(Digest, Vec<u8>, Vec<u8>)>,
    /// Its rounds.
    pub host: HostCounters,
    /// Its RDMA devices.
    pub rdma: Vec<DeviceSnapshot>,
    /// Requests of stock Mooncake engines.
    pub mooncake: ServerCounters,
    /// Faults that it made by plan.
    pub faults: FaultCounters,
    /// Connections open.
    pub connections: u64,
    /// CPU time of its thread in nanoseconds.
    pub cpu_ns: u64,
}

/// All of it.
pub(super) fn of(host: &mut ShardHost) -> ShardSnapshot {
    let (counters, now_ns) = (*host.counters(), host.now_ns());
    let (faults, connections) = (host.faults(), host.connections() as u64);
    let (mooncake, device, rdma) =
        (*host.stock_served(), host.tier().map(|tier| tier.counters()), host.rdma_snapshot());
    let service = host.service();
    let snapshot = ShardSnapshot {
        store: service.store().map(Store::stats),
        tier: service.inspect().tier().map(Tiering::snapshot),
        device,
        service: service.inspect().counters(),
        moves: service.inspect().move_counters(),
        copies: service.inspect().copy_counters(),
        times: service.inspect().times(now_ns),
        names: Vec::new(),
        host: counters,
        rdma,
        mooncake,
        faults,
        connections,
        cpu_ns: cpu::thread_cpu_ns(),
    };
    let (slow, hot) = (&snapshot.times.slow, &snapshot.times.hot.objects);
    let mut digests: Vec<Digest> = slow.iter().filter_map(|one| one.digest).collect();
    digests.extend(hot.iter().map(|one| one.digest));
    digests.sort_unstable();
    digests.dedup();
    let named = host.names_of(&digests).into_iter();
    let names = named.filter_map(|(at, tenant, key)| Some((*digests.get(at)?, tenant, key))).collect();
    ShardSnapshot { names, ..snapshot }
}
