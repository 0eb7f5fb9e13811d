//! Reports of a node's shards to the control plane, after each heartbeat.

use std::time::{Duration, Instant};

use kvplane_engine::{ShardHandle, ShardSnapshot, SlowOperation, cpu};
use kvplane_rpc::message::{
    CopyFigures, DamageFigures, DevicePoolFigures, EventFigures, EvictionFigures, FarPoolFigures, GetFigures,
    HOT_PER_REPORT, HotFigures, HotShard, NAME_PER_REPORT_BYTES, OPERATIONS_PER_REPORT, ObjectFigures,
    OperationFigures, PoolFigures, PutFigures, ReportHot, ReportShard, SLOW_PER_REPORT, ShardFigures, SlowFigures,
    SlowLog, SsdFigures, ThreadFigures, TroubleFigures,
};
use kvplane_store::{DevicePoolStats, FarPoolStats};

use crate::error::Error;
use crate::link::ControlLink;

/// Pause of reports after the control plane failed to answer one: a control plane of an earlier version does not know
/// them.
const PAUSE: Duration = Duration::from_secs(60);

/// State of the reports: active, or paused.
#[derive(Default)]
pub(crate) struct ShardReports {
    paused_until: Option<Instant>,
}

impl ShardReports {
    /// Reports each shard. A failure affects this report only: the next heartbeat sends another.
    pub(crate) fn report(
        &mut self,
        link: &ControlLink,
        node: u64,
        incarnation: u64,
        shards: &[ShardHandle],
        snapshots: &[ShardSnapshot],
    ) {
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        for (number, (handle, snapshot)) in shards.iter().zip(snapshots).enumerate() {
            let shard = figures(number as u16, &handle.address().to_string(), snapshot, cpu::monotonic_ns());
            let hot = hot(number as u16, snapshot);
            let told = link.call(ReportShard { node, incarnation, shard });
            let told = told.and_then(|_| link.call(ReportHot { node, incarnation, shard: hot }));
            if let Err(error) = told {
                let refused = matches!(&error, Error::Call(call) if call.refusal().is_some());
                self.paused_until = (!refused).then(|| Instant::now() + PAUSE);
                return;
            }
        }
    }
}

/// Builds the report of a shard.
pub(crate) fn figures(shard: u16, address: &str, snapshot: &ShardSnapshot, now_ns: u64) -> ShardFigures {
    let (store, service) = (snapshot.store.unwrap_or_default(), &snapshot.service);
    let slow = &snapshot.times.slow;
    let latest = slow.iter().skip(slow.len().saturating_sub(SLOW_PER_REPORT));
    ShardFigures {
        shard,
        address: address.to_owned(),
        objects: store.objects,
        object_bytes: store.payload_bytes,
        pool: PoolFigures {
            bytes: store.pool_bytes,
            used_bytes: store.used_bytes,
            largest_free_bytes: store.largest_free_bytes,
            pinned_bytes: store.pinned_bytes,
            reserved_bytes: store.reserved_bytes + store.quarantined_bytes,
            pins: store.pins,
            reservations: store.reservations,
        },
        connections: snapshot.connections,
        gets: GetFigures { hits: store.hits, misses: store.misses, bytes: service.get_bytes },
        puts: PutFigures {
            bytes: service.put_bytes,
            objects: store.puts,
            conflicts: store.exists_conflicts,
            refusals: store.reserve_refusals,
            expirations: store.expirations,
            aborts: store.aborts,
        },
        removes: store.removes,
        evictions: EvictionFigures { objects: store.evictions, bytes: store.evicted_bytes },
        trouble: TroubleFigures {
            wrong_owner: service.wrong_owner,
            corrupt: service.corrupt,
            broken: snapshot.host.broken,
        },
        thread: ThreadFigures { parks: snapshot.host.parks, cpu_ns: snapshot.cpu_ns },
        sizes: store.sizes.to_vec(),
        ssd: ssd(snapshot),
        operations: operations(snapshot),
        slow: SlowLog {
            count: snapshot.times.slow_count,
            after_ns: snapshot.times.slow_after_ns,
            latest: latest.map(|one| slow_one(one, now_ns)).collect(),
        },
        events: EventFigures { kept: store.events.are_kept, next: store.events.next, lost: store.events.lost },
        copies: copies(snapshot),
        device_pool: device_pool(snapshot),
        memory_damage: memory_damage(snapshot),
        ssd_damage: ssd_damage(snapshot),
        far_pool: far_pool(snapshot),
    }
}

/// Builds the report of a shard's hottest objects, with the names of those and of its slow requests' objects.
fn hot(shard: u16, snapshot: &ShardSnapshot) -> HotShard {
    let cut = |name: &[u8]| name[..name.len().min(NAME_PER_REPORT_BYTES)].to_vec();
    let objects = &snapshot.times.hot;
    let hottest = objects.objects.iter().take(HOT_PER_REPORT);
    let named = snapshot.names.iter();
    let slow = &snapshot.times.slow;
    let slow: Vec<u128> = slow[slow.len().saturating_sub(SLOW_PER_REPORT)..]
        .iter()
        .filter_map(|one| one.digest)
        .map(|digest| digest.0)
        .collect();
    let hot: Vec<HotFigures> =
        hottest.map(|one| HotFigures { digest: one.digest.0, gets: one.gets, bytes: one.bytes }).collect();
    let told = |digest: u128| slow.contains(&digest) || hot.iter().any(|one| one.digest == digest);
    let names = named.filter(|(digest, ..)| told(digest.0)).map(|(digest, tenant, key)| ObjectFigures {
        digest: digest.0,
        tenant: cut(tenant),
        key: cut(key),
    });
    HotShard { shard, over_ns: objects.over_ns, names: names.collect(), hot }
}

fn copies(snapshot: &ShardSnapshot) -> CopyFigures {
    let (store, copies) = (snapshot.store.unwrap_or_default(), &snapshot.copies);
    CopyFigures {
        elsewhere: store.replicas.elsewhere,
        here: store.replicas.here,
        second_slots: copies.second_slots,
        made: copies.made,
        failed: copies.failed,
        outstanding: copies.outstanding,
        refused: copies.refused,
        served: copies.served,
        inherited: copies.inherited,
    }
}

fn device_pool(snapshot: &ShardSnapshot) -> Option<DevicePoolFigures> {
    let (device, service) = (snapshot.store?.device, &snapshot.service);
    let DevicePoolStats { pool_bytes, used_bytes, objects, promotions, demotions, lost } = device;
    (device != DevicePoolStats::default()).then_some(DevicePoolFigures {
        bytes: pool_bytes,
        used_bytes,
        objects,
        gets: service.device_gets,
        promotions,
        demotions,
        recalls: service.recalls,
        lost,
    })
}

const fn memory_damage(snapshot: &ShardSnapshot) -> DamageFigures {
    let repairs = &snapshot.repairs;
    DamageFigures {
        found: repairs.damaged,
        repaired: repairs.repaired,
        lost: repairs.lost,
        outstanding: repairs.outstanding,
        checked_bytes: repairs.checked_bytes,
        passes: repairs.passes,
    }
}

fn ssd_damage(snapshot: &ShardSnapshot) -> DamageFigures {
    let (records, tier) = (&snapshot.repairs.records, snapshot.tier.as_ref());
    DamageFigures {
        found: records.damaged,
        repaired: records.repaired + tier.map_or(0, |tier| tier.counters.rewritten),
        lost: records.lost,
        outstanding: records.outstanding,
        checked_bytes: tier.map_or(0, |tier| tier.scrub.checked_bytes),
        passes: tier.map_or(0, |tier| tier.scrub.passes),
    }
}

fn far_pool(snapshot: &ShardSnapshot) -> Option<FarPoolFigures> {
    let FarPoolStats { pool_bytes, used_bytes, objects, hits, demotions, promotions, evictions, .. } = snapshot.far;
    (pool_bytes > 0).then_some(FarPoolFigures {
        bytes: pool_bytes,
        used_bytes,
        objects,
        hits,
        demotions,
        promotions,
        evictions,
    })
}

fn ssd(snapshot: &ShardSnapshot) -> Option<SsdFigures> {
    let tier = snapshot.tier.as_ref()?;
    let (stats, counters) = (&tier.stats, &tier.counters);
    Some(SsdFigures {
        objects: stats.objects.into(),
        live_bytes: stats.live_bytes,
        bytes: u64::from(stats.segments) * tier.segment_bytes,
        hits: counters.hits,
        hit_bytes: stats.hit_bytes,
        misses: counters.misses,
        promotions: counters.promotions,
        writes: counters.writes,
        write_bytes: counters.write_bytes,
        writes_lost: counters.writes_failed + counters.writes_skipped,
        backlog: tier.backlog,
        reclaimed: counters.reclaimed,
    })
}

fn operations(snapshot: &ShardSnapshot) -> Vec<OperationFigures> {
    let times = &snapshot.times;
    let of = times.operations.iter().take(OPERATIONS_PER_REPORT);
    of.map(|one| {
        let items = times.items.iter().find(|(operation, _)| *operation == one.operation && !one.ssd);
        OperationFigures {
            operation: format!("{:?}", one.operation).to_lowercase(),
            ssd: one.ssd,
            count: one.times.count(),
            failed: one.failed,
            items: items.map_or(0, |(_, items)| *items),
            sum_ns: one.times.sum_ns(),
            buckets: one.times.buckets().collect(),
        }
    })
    .collect()
}

fn slow_one(one: &SlowOperation, now_ns: u64) -> SlowFigures {
    SlowFigures {
        operation: format!("{:?}", one.operation).to_lowercase(),
        status: one.status.to_string().chars().take(64).collect(),
        digest: one.digest.map(|digest| digest.0),
        bytes: one.bytes,
        age_ns: now_ns.saturating_sub(one.arrived_ns),
        total_ns: one.total_ns,
        receive_ns: one.receive_ns,
        ssd_ns: one.ssd_ns,
        send_ns: one.send_ns,
    }
}
