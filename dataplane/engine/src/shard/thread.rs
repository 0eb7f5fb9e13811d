//! Thread of a shard: its setup and its loop.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use kvplane_store::Store;
use kvplane_store::service::{RepairCounters, Service};
use kvplane_sys::{Consumer, Doorbell, FarPart, PageKind, Region, cpu, net};

use super::command::{Command, obey};
use super::config::ShardConfig;
use super::error::ShardStartError;
use super::kept::{ImageWish, KeptMemory};
use super::leaving::{QuietWaiter, answer_waiters};
use super::listeners::{ShardListeners, when_free};
use super::tables;
use crate::host::{DevicePool, MappedMemory, ShardHost, TierDevice};
use crate::pacing::Pacer;

/// Deadlines for opening the tier's device (formatting a blank one included), and for flushing pending writes.
const TIER_OPEN: Duration = Duration::from_secs(60);
const TIER_CLOSE: Duration = Duration::from_secs(10);
/// Longest time for which what waits is uploaded to the shared tier as the shard stops.
const LAST_UPLOADS: Duration = Duration::from_secs(5);
/// Longest time for these uploads while a successor waits, and nothing is served.
const HANDED_UPLOADS: Duration = Duration::from_millis(20);

/// Pages of a far part whose places are checked.
const FAR_PAGES_CHECKED: usize = 64;

/// Parts of a shard that stay when its thread has ended, for a process that takes over.
pub(super) struct Lasting {
    pub(super) listeners: ShardListeners,
    /// Its memory, which the end of the thread does not unmap: that takes long where there are many pages.
    pub(super) memory: Arc<MappedMemory>,
    /// Mark by which the shard leaves an image of it.
    pub(super) wish: ImageWish,
}

/// Results of a shard's start.
pub(super) struct StartFacts {
    /// Address on which it listens.
    pub(super) address: SocketAddr,
    /// Address on which it listens for stock Mooncake engines.
    pub(super) mooncake: Option<SocketAddr>,
    /// Parts that another process may take over, if it has memory of its own.
    pub(super) lasting: Option<Lasting>,
    /// Kind of pages of its pool.
    pub(super) page_kind: Option<PageKind>,
    /// Uuid of the device of its tier; without a tier, of its memory if that outlives the process.
    pub(super) device: Option<u128>,
}

/// Sets a shard up, reports the result, and runs it to its end. Returns the number of objects in the image of its
/// memory, if it left one.
pub(super) fn run(
    config: ShardConfig,
    mut mailbox: Consumer<Command>,
    doorbell: Doorbell,
    started: &SyncSender<Result<StartFacts, ShardStartError>>,
) -> io::Result<Option<u64>> {
    let mut pacer = Pacer::new(config.pacing, cpu::preemptions);
    let name = format!("shard {}", config.identity.shard.0);
    let (mut host, mut kept, ready) = match set_up(config, doorbell) {
        Ok(made) => made,
        Err(why) => {
            let _ = started.send(Err(why));
            return Ok(None);
        }
    };
    let _ = started.send(Ok(ready));
    if let Some(kept) = &mut kept {
        kept.observe(&mut host, &name)?;
    }
    let mut leaving: Vec<QuietWaiter> = Vec::new();
    loop {
        let mut progress = false;
        while let Some(command) = mailbox.try_pop() {
            progress = true;
            obey(&mut host, command, &mut leaving);
        }
        if let Some(kept) = kept.as_mut().filter(|_| progress) {
            kept.observe(&mut host, &name)?;
        }
        if mailbox.peer_gone() {
            // A successor serves only then, and uploads what has not been.
            let is_urgent = kept.as_ref().is_some_and(KeptMemory::has_successor);
            if !host.close_tier(TIER_CLOSE, if is_urgent { HANDED_UPLOADS } else { LAST_UPLOADS }) {
                tracing::error!("{name}: not everything was written to the SSD within {} s", TIER_CLOSE.as_secs());
            }
            return Ok(kept.as_mut().and_then(|kept| kept.close(&mut host, &name)));
        }
        progress |= host.poll()?;
        if progress {
            host.notify_subscriber();
        }
        while let Some(notice) = host.tier().and_then(TierDevice::poll_notice) {
            let text = notice.text;
            if notice.is_trouble { tracing::warn!("{name}: {text}") } else { tracing::info!("{name}: {text}") }
        }
        if let Some(repairs) = host.service().control().poll_repairs() {
            report_damage(&name, &repairs);
        }
        if let Some(damaged) = host.service().control().poll_kept_damage() {
            tracing::warn!(
                "{name}: {damaged} objects of the former process were damaged in memory after it had ended, and are \
                 dropped: those that have replicas are served by other nodes"
            );
        }
        let now_ns = host.now_ns();
        if !leaving.is_empty() {
            answer_waiters(&mut host, &mut leaving, now_ns);
        }
        if progress {
            pacer.busy(now_ns);
        // Without connections, latency does not matter, whatever the pacing.
        } else if pacer.idle(now_ns) || host.connections() == 0 {
            host.park(Duration::from_secs(1), || !mailbox.is_empty() || mailbox.peer_gone())?;
        } else {
            cpu::pause();
        }
    }
}

fn set_up(
    config: ShardConfig,
    doorbell: Doorbell,
) -> Result<(ShardHost, Option<KeptMemory>, StartFacts), ShardStartError> {
    if let Some(core) = config.core {
        // A refusal (for example after a change of the cpuset) costs speed, not correctness.
        let _ = cpu::pin_current_thread(core);
    }
    let listeners = match &config.listen.handed {
        Some(handed) => handed.try_clone()?,
        None => ShardListeners::bind(config.listen.tcp, config.listen.shm.as_deref())?,
    };
    let address = listeners.tcp.local_addr()?;
    let above_ssd = config.host.tier.is_some();
    let (mut kept, mut found) = (None, Ok(None));
    let far = config.pool.as_ref().and_then(|options| options.far);
    let pool = match (config.pool, &config.host.kept) {
        (None, _) => None,
        (Some(options), None) => Some(Region::allocate(&options)?),
        (Some(options), Some(memory)) => {
            let unit_bytes = tables::unit_bytes(config.store.as_ref(), above_ssd);
            let (mut opened, image) = KeptMemory::open(memory, &config.identity, &options, unit_bytes)?;
            let memory = opened.map_pool(&options)?;
            let region = Arc::clone(memory.region());
            (kept, found) = (Some((opened, memory)), image);
            Some(region)
        }
    };
    // Before the tables, which grow with it: a device refuses what it does not have.
    let device_pool = match (config.host.device_pool, &pool) {
        (Some(config), Some(pool)) => {
            let opened = DevicePool::open(config, pool);
            Some(opened.map_err(|source| ShardStartError::DevicePool { config, source })?)
        }
        _ => None,
    };
    let store = pool
        .as_ref()
        .map(|pool| tables::store(config.store, above_ssd, pool, config.first_version))
        .transpose()?
        .unwrap_or_else(Store::empty);
    let page_kind = pool.as_ref().map(|pool| pool.page_kind());
    let service = Service::new(config.identity, store);
    let mut host = ShardHost::new(&config.host, service, pool.as_ref(), device_pool)?;
    if let Some((kept, _)) = &kept {
        host.service().control().keep_memory(found, kept.sums());
    }
    host.open_tier(TIER_OPEN)?;
    // RDMA devices and the ring of an SSD have registered the pool by now.
    if let (Some(far), Some(pool)) = (far, &pool) {
        check_far(pool, far)?;
    }
    let (kept, lasting) = match kept {
        Some((kept, memory)) => {
            let lasting = Lasting { listeners: listeners.try_clone()?, memory, wish: kept.wish() };
            (Some(kept), Some(lasting))
        }
        None => (None, None),
    };
    host.listen(listeners.tcp, listeners.shm)?;
    let stock = config.listen.mooncake.map(|address| when_free(|| net::tcp_listener(address, 1024))).transpose()?;
    let mooncake = match stock {
        Some(listener) => {
            let address = listener.local_addr()?;
            host.listen_mooncake(listener)?;
            Some(address)
        }
        None => None,
    };
    host.watch_mailbox(doorbell)?;
    // An SSD that stays counts although memory is lost with its host: its identity alone is the node's then.
    let of_memory = kept.as_ref().filter(|_| !above_ssd).and_then(KeptMemory::lasting_uuid);
    let device = host.tier().and_then(|tier| tier.device()).or(of_memory);
    Ok((host, kept, StartFacts { address, mooncake, lasting, page_kind, device }))
}

/// Checks that the far part of a pool is where it is bound to. The kernel moves pages of movable memory, CXL memory too
/// if it was brought online that way, to DRAM when a device registers them: far memory would take DRAM then.
fn check_far(pool: &Region, far: FarPart) -> Result<(), ShardStartError> {
    let step = ((pool.bytes() - far.offset) / FAR_PAGES_CHECKED).max(1);
    let node_at = |offset: usize| cpu::node_of(pool.address() + offset as u64);
    match (far.offset..pool.bytes()).step_by(step).filter_map(node_at).find(|node| *node != far.node) {
        Some(found) => Err(ShardStartError::FarMemoryMoved { node: far.node, found }),
        None => Ok(()),
    }
}

/// Tells the operator of damage, and of its repair.
fn report_damage(name: &str, repairs: &RepairCounters) {
    let RepairCounters { damaged, repaired, lost, records, .. } = repairs;
    if *damaged > 0 {
        tracing::warn!(
            "{name}: {damaged} objects in memory were damaged since the start: {repaired} are good again, {lost} were \
             removed"
        );
    }
    if records.damaged > 0 {
        tracing::warn!(
            "{name}: {} records on the SSD were damaged since the start: {} were repaired from other nodes, {} lost",
            records.damaged,
            records.repaired,
            records.lost
        );
    }
}
