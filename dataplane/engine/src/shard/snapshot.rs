//! Counters of a shard at one moment.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_shared::SharedStats;
use kvplane_store::service::{
    CopyCounters, KeptReport, MoveCounters, RepairCounters, ServiceCounters, ServiceTimes, TierSnapshot, Tiering,
};
use kvplane_store::{FarPoolStats, StoreStats, far_pool_stats};
use kvplane_sys::cpu;
use kvplane_sys::device::DeviceId;
use kvplane_transport::mooncake::ServerCounters;
use kvplane_transport::{FaultCounters, NvmeCounters};

use crate::host::{DeviceSnapshot, HostCounters, ShardHost};
use crate::staging::StagingCounters;

/// Snapshot of a shard.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, Default)]
pub struct ShardSnapshot {
    pub store: Option<StoreStats>,
    /// Far pool of its store.
    pub far: FarPoolStats,
    pub tier: Option<TierSnapshot>,
    pub shared: Option<SharedStats>,
    /// Device of its tier.
    pub device: Option<NvmeCounters>,
    pub service: ServiceCounters,
    /// Objects of the former process, if memory is kept and a map has decided about them.
    pub kept: Option<KeptReport>,
    /// Migration of slots.
    pub moves: MoveCounters,
    /// Replicas of objects.
    pub copies: CopyCounters,
    /// Damage in memory, and its repair.
    pub repairs: RepairCounters,
    /// Latencies of requests.
    pub times: ServiceTimes,
    /// Names of the objects that `times` mentions: tenant and key, for those whose tails are in memory.
    pub names: Vec<(Digest, Vec<u8>, Vec<u8>)>,
    /// Rounds and connections of its host.
    pub host: HostCounters,
    pub rdma: Vec<DeviceSnapshot>,
    /// Copies from and to each device of which memory was registered.
    pub staging: BTreeMap<DeviceId, StagingCounters>,
    /// Requests of stock Mooncake engines.
    pub mooncake: ServerCounters,
    /// Faults that it injected.
    pub faults: FaultCounters,
    /// Open connections.
    pub connections: u64,
    /// CPU time of its thread in nanoseconds.
    pub cpu_ns: u64,
}

/// Takes the snapshot.
pub(super) fn of(host: &mut ShardHost) -> ShardSnapshot {
    let (counters, now_ns) = (*host.counters(), host.now_ns());
    let (faults, connections) = (host.faults(), host.connections() as u64);
    let (mooncake, device, rdma) =
        (*host.stock_served(), host.tier().map(|tier| tier.counters()), host.rdma_snapshot());
    let staging = host.staging();
    let service = host.service();
    let snapshot = ShardSnapshot {
        store: service.store().config().has_pool().then(|| service.store().stats()),
        far: far_pool_stats(service.store()),
        tier: service.inspect().tier().map(Tiering::snapshot),
        shared: service.control().shared().stats(),
        device,
        service: service.inspect().counters(),
        kept: service.inspect().kept(),
        moves: service.inspect().move_counters(),
        copies: service.inspect().copy_counters(),
        repairs: service.inspect().repairs(),
        times: service.inspect().times(now_ns),
        names: Vec::new(),
        host: counters,
        rdma,
        staging,
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
