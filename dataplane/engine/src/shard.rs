//! A shard: a pinned thread that runs a host, and the mailbox by which others reach it.
//!
//! Everything that the thread owns is made on it, so that its memory is local to it. Others send [`Command`]s through
//! a bounded ring; a full ring is `Busy`, never a wait. The thread spins or parks by its [`Pacing`] and ends when its
//! handle is dropped.

mod error;
mod follow;
mod leaving;
mod listeners;
mod snapshot;
mod stock;
mod tables;
mod tickets;

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_proto::ids::Incarnation;
use kvplane_proto::map::SlotOwners;
use kvplane_proto::{SegmentId, Version};
use kvplane_store::StoreConfig;
use kvplane_store::service::{Identity, SegmentInfo, Service, TierOrder};
use kvplane_sys::{Consumer, Doorbell, PageKind, Producer, Region, RegionOptions, cpu, net, spsc};

use crate::host::{Host, HostConfig};
use crate::pacing::{Pacer, Pacing};
pub use error::ShardError;
pub use follow::{ObjectPlaces, PlacedName};
use leaving::{QuietWaiter, see_off};
use listeners::{listen_unix, when_free};
pub use snapshot::ShardSnapshot;
pub use stock::StockKeys;

/// Commands that may wait for a shard.
const MAILBOX_ENTRIES: usize = 256;
/// How long a command may take to be answered.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// Between two attempts to put something into a full mailbox.
const MAILBOX_RETRY: Duration = Duration::from_micros(100);
/// How long the tier's device may take to be opened (formatting a blank one included), and what waits to be written.
const TIER_OPEN: Duration = Duration::from_secs(60);
const TIER_CLOSE: Duration = Duration::from_secs(10);

/// Where a shard listens.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Its data port; port 0 picks one.
    pub tcp: SocketAddr,
    /// Path of its Unix socket.
    pub shm: Option<PathBuf>,
    /// Data port for stock Mooncake engines, which bring no authentication; port 0 picks one.
    pub mooncake: Option<SocketAddr>,
}

/// Settings of a shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Who it is.
    pub identity: Identity,
    /// Core to pin its thread to.
    pub core: Option<usize>,
    /// How it waits.
    pub pacing: Pacing,
    /// Where it listens.
    pub listen: Listen,
    /// The memory of its store and how to get it; `None` for a shard that serves segments only.
    pub pool: Option<RegionOptions>,
    /// Limits of its store; `pool_bytes` follows the memory.
    pub store: Option<StoreConfig>,
    /// First version that its store gives: above all of its former incarnations.
    pub first_version: Version,
    /// The host's settings.
    pub host: HostConfig,
}

enum Command {
    Register { info: SegmentInfo, region: Arc<Region>, answer: SyncSender<Result<SegmentId, String>> },
    Unregister { segment: SegmentId, within: Duration, answer: SyncSender<Result<(), ShardError>> },
    ListenShm { listener: UnixListener },
    BeginIncarnation { incarnation: Incarnation },
    Follow { state: u64, owners: Arc<SlotOwners> },
    Tier { order: TierOrder, answer: SyncSender<bool> },
    Snapshot { answer: SyncSender<ShardSnapshot> },
    Ask(Box<dyn FnOnce(&mut Host) + Send>),
}

/// A running shard. Dropping it ends the thread.
pub struct ShardHandle {
    mailbox: Mutex<Option<Producer<Command>>>,
    doorbell: Doorbell,
    thread: Mutex<Option<JoinHandle<io::Result<()>>>>,
    address: SocketAddr,
    mooncake: Option<SocketAddr>,
    shm: Mutex<Option<PathBuf>>,
    page_kind: Option<PageKind>,
    device: Option<u128>,
}

/// What starts shards.
pub struct Shard;

struct StartOutcome {
    address: SocketAddr,
    mooncake: Option<SocketAddr>,
    page_kind: Option<PageKind>,
    device: Option<u128>,
}

impl Shard {
    /// Starts a shard and waits until it listens.
    ///
    /// # Errors
    /// When the port is taken, the memory cannot be had, or the kernel refuses: says which and what to do.
    pub fn start(config: ShardConfig) -> Result<ShardHandle, ShardError> {
        let doorbell = Doorbell::new().map_err(|error| ShardError::Start(error.to_string()))?;
        let (producer, consumer) = spsc::channel(MAILBOX_ENTRIES);
        let (started, wait) = sync_channel(1);
        let name = format!("kvp-shard-{}", config.identity.shard.0);
        let (bell, shm) = (doorbell.clone(), config.listen.shm.clone());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || run(config, consumer, bell, &started))
            .map_err(|error| ShardError::Start(error.to_string()))?;
        match wait.recv() {
            Ok(Ok(StartOutcome { address, mooncake, page_kind, device })) => Ok(ShardHandle {
                mailbox: Mutex::new(Some(producer)),
                doorbell,
                thread: Mutex::new(Some(thread)),
                address,
                mooncake,
                shm: Mutex::new(shm),
                page_kind,
                device,
            }),
            Ok(Err(why)) => Err(ShardError::Start(why)),
            Err(_) => Err(ShardError::Start("its thread ended before it listened".to_owned())),
        }
    }
}

impl ShardHandle {
    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens for stock Mooncake engines.
    #[must_use]
    pub const fn mooncake(&self) -> Option<SocketAddr> {
        self.mooncake
    }

    /// Its Unix socket.
    #[must_use]
    pub fn shm(&self) -> Option<PathBuf> {
        self.shm.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What pages its pool lies on.
    #[must_use]
    pub const fn page_kind(&self) -> Option<PageKind> {
        self.page_kind
    }

    /// Lets peers use this memory.
    ///
    /// # Errors
    /// When the service refuses it, or the shard does not answer.
    pub fn register(&self, info: SegmentInfo, region: Arc<Region>) -> Result<SegmentId, ShardError> {
        let (answer, wait) = sync_channel(1);
        self.send(Command::Register { info, region, answer })?;
        self.wait(&wait)?.map_err(ShardError::Refused)
    }

    /// Takes memory from peers; returns when nothing uses it any more. See [`Self::unregister_within`].
    ///
    /// # Errors
    /// As there, after ten seconds.
    pub fn unregister(&self, segment: SegmentId) -> Result<(), ShardError> {
        self.unregister_within(segment, ANSWER_DEADLINE)
    }

    /// Takes memory from peers; returns when nothing uses it any more, or after about this time. It may be asked again
    /// after any error, and waits again for those who still use it; no new user comes.
    ///
    /// # Errors
    /// [`ShardError::Held`] when peers still use the memory: a process of this host that was stopped in the middle of a
    /// copy has that effect. Any other when the shard does not answer; then the same is to be assumed.
    pub fn unregister_within(&self, segment: SegmentId, within: Duration) -> Result<(), ShardError> {
        let (answer, wait) = sync_channel(1);
        let until = Instant::now() + ANSWER_DEADLINE;
        // Given up for a full mailbox, the segment would stay open to peers for good.
        while let Err(error) = self.send(Command::Unregister { segment, within, answer: answer.clone() }) {
            if !matches!(error, ShardError::Busy) || Instant::now() >= until {
                return Err(error);
            }
            std::thread::sleep(MAILBOX_RETRY);
        }
        self.wait_for(&wait, within.saturating_add(ANSWER_DEADLINE))?
    }

    /// The identity of the device of its tier: none without a tier, or when the device could not be read.
    #[must_use]
    pub const fn device(&self) -> Option<u128> {
        self.device
    }

    /// Serves peers on this host at this path too.
    ///
    /// # Errors
    /// When another process listens there, or the shard's mailbox is full.
    pub fn listen_shm(&self, path: PathBuf) -> Result<(), ShardError> {
        let listener = when_free(|| listen_unix(&path)).map_err(|error| ShardError::Start(error.to_string()))?;
        *self.shm.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
        self.send(Command::ListenShm { listener })
    }

    /// Starts a new incarnation: objects are dropped, connections ended, nothing is owned until the next
    /// [`Self::follow_owners`].
    ///
    /// # Errors
    /// When its mailbox is full.
    pub fn begin_incarnation(&self, incarnation: Incarnation) -> Result<(), ShardError> {
        self.send(Command::BeginIncarnation { incarnation })
    }

    /// Tells who owns the slots by a map of this state of the control plane.
    ///
    /// # Errors
    /// When its mailbox is full.
    pub fn follow_owners(&self, state: u64, owners: Arc<SlotOwners>) -> Result<(), ShardError> {
        self.send(Command::Follow { state, owners })
    }

    /// Asks something of its tier; false when it has none.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn order_tier(&self, order: TierOrder) -> Result<bool, ShardError> {
        let (answer, wait) = sync_channel(1);
        self.send(Command::Tier { order, answer })?;
        self.wait(&wait)
    }

    /// What it tells about itself.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn snapshot(&self) -> Result<ShardSnapshot, ShardError> {
        let (answer, wait) = sync_channel(1);
        self.send(Command::Snapshot { answer })?;
        self.wait(&wait)
    }

    fn send(&self, command: Command) -> Result<(), ShardError> {
        let mut mailbox = self.mailbox.lock().unwrap_or_else(PoisonError::into_inner);
        let producer = mailbox.as_mut().ok_or_else(|| ShardError::Ended("it was stopped".to_owned()))?;
        if producer.peer_gone() {
            drop(mailbox);
            return Err(ShardError::Ended(self.end()));
        }
        producer.try_push(command).map_err(|_| ShardError::Busy)?;
        self.doorbell.ring();
        Ok(())
    }

    fn wait<T>(&self, answer: &Receiver<T>) -> Result<T, ShardError> {
        self.wait_for(answer, ANSWER_DEADLINE)
    }

    fn wait_for<T>(&self, answer: &Receiver<T>, longest: Duration) -> Result<T, ShardError> {
        answer.recv_timeout(longest).map_err(|error| match error {
            RecvTimeoutError::Timeout => ShardError::Timeout,
            RecvTimeoutError::Disconnected => ShardError::Ended(self.end()),
        })
    }

    /// Why the shard has ended by itself, if it has.
    pub fn ended(&self) -> Option<ShardError> {
        let finished = {
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            thread.as_ref().is_none_or(JoinHandle::is_finished)
        };
        finished.then(|| ShardError::Ended(self.end()))
    }

    fn end(&self) -> String {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        match thread.map(JoinHandle::join) {
            Some(Ok(Err(error))) => error.to_string(),
            Some(Err(_)) => "its thread panicked".to_owned(),
            Some(Ok(Ok(()))) | None => "it was stopped".to_owned(),
        }
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.doorbell.ring();
        self.end();
        if let Some(path) = self.shm.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It may be gone already; nobody listens there any more either way.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(
    config: ShardConfig,
    mut mailbox: Consumer<Command>,
    doorbell: Doorbell,
    started: &SyncSender<Result<StartOutcome, String>>,
) -> io::Result<()> {
    let mut pacer = Pacer::new(config.pacing, cpu::preemptions);
    let name = format!("shard {}", config.identity.shard.0);
    let (mut host, ready) = match set_up(config, doorbell) {
        Ok(made) => made,
        Err(why) => {
            let _ = started.send(Err(why));
            return Ok(());
        }
    };
    let _ = started.send(Ok(ready));
    let mut leaving: Vec<QuietWaiter> = Vec::new();
    loop {
        let mut progress = false;
        while let Some(command) = mailbox.try_pop() {
            progress = true;
            obey(&mut host, command, &mut leaving);
        }
        if mailbox.peer_gone() {
            if !host.close_tier(TIER_CLOSE) {
                tracing::error!("{name}: not everything was written to the SSD within {} s", TIER_CLOSE.as_secs());
            }
            return Ok(());
        }
        progress |= host.poll()?;
        if progress {
            host.tell_follower();
        }
        while let Some(notice) = host.poll_tier_notice() {
            let text = notice.text;
            if notice.is_trouble { tracing::warn!("{name}: {text}") } else { tracing::info!("{name}: {text}") }
        }
        let now_ns = host.now_ns();
        if !leaving.is_empty() {
            see_off(&mut host, &mut leaving, now_ns);
        }
        if progress {
            pacer.busy(now_ns);
        // Where nobody is connected there is nothing to be quick about, whatever the pacing.
        } else if pacer.idle(now_ns) || host.connections() == 0 {
            host.park(Duration::from_secs(1), || !mailbox.is_empty() || mailbox.peer_gone())?;
        } else {
            cpu::pause();
        }
    }
}

fn set_up(config: ShardConfig, doorbell: Doorbell) -> Result<(Host, StartOutcome), String> {
    if let Some(core) = config.core {
        // A refusal (a changed cpuset, say) costs speed, not correctness.
        let _ = cpu::pin_current_thread(core);
    }
    let tcp = when_free(|| net::tcp_listener(config.listen.tcp, 1024)).map_err(|error| error.to_string())?;
    let address = tcp.local_addr().map_err(|error| error.to_string())?;
    let shm = config.listen.shm.as_deref().map(|path| when_free(|| listen_unix(path))).transpose();
    let shm = shm.map_err(|error| error.to_string())?;
    let pool = config.pool.map(|options| Region::allocate(&options)).transpose().map_err(|error| error.to_string())?;
    let store = pool
        .as_ref()
        .map(|pool| tables::store(config.store, config.host.tier.is_some(), pool.bytes() as u64, config.first_version))
        .transpose()
        .map_err(|error| error.to_string())?;
    let page_kind = pool.as_ref().map(|pool| pool.page_kind());
    let service = Service::new(config.identity, store);
    let mut host = Host::new(&config.host, Some(service), None, pool).map_err(|error| error.to_string())?;
    host.open_tier(TIER_OPEN)?;
    host.listen(tcp, shm).map_err(|error| error.to_string())?;
    let stock = config.listen.mooncake.map(|address| when_free(|| net::tcp_listener(address, 1024))).transpose();
    let mooncake = match stock.map_err(|error| error.to_string())? {
        Some(listener) => {
            let address = listener.local_addr().map_err(|error| error.to_string())?;
            host.listen_mooncake(listener).map_err(|error| error.to_string())?;
            Some(address)
        }
        None => None,
    };
    host.watch_mailbox(doorbell).map_err(|error| error.to_string())?;
    let device = host.tier_device();
    Ok((host, StartOutcome { address, mooncake, page_kind, device }))
}

fn obey(host: &mut Host, command: Command, leaving: &mut Vec<QuietWaiter>) {
    match command {
        Command::Register { info, region, answer } => {
            let registered = match host.service() {
                Some(service) => service.segments_mut().register(info).map_err(|error| error.to_string()),
                None => Err("this shard serves nothing".to_owned()),
            };
            if let Ok(segment) = registered {
                host.add_segment(segment, region);
            }
            // Whoever asked may have given up; the segment is then simply unused.
            let _ = answer.send(registered);
        }
        Command::Unregister { segment, within, answer } => {
            host.unregister(segment);
            leaving.push(QuietWaiter::new(segment, within, answer));
        }
        Command::ListenShm { listener } => {
            // Out of memory for a watch, the kernel gives nothing else either; peers then use TCP.
            let _ = host.listen_shm(listener);
        }
        Command::BeginIncarnation { incarnation } => {
            if let Some(service) = host.service() {
                service.begin_incarnation(incarnation);
            }
        }
        Command::Follow { state, owners } => host.follow_owners(state, &owners),
        Command::Ask(question) => question(host),
        Command::Tier { order, answer } => {
            let now_ns = host.now_ns();
            // Whoever asked may have given up; the order stands.
            let tier = host.service().and_then(Service::tier_mut);
            let _ = answer.send(tier.map(|tier| tier.order(order, now_ns)).is_some());
        }
        Command::Snapshot { answer } => {
            if let Some(snapshot) = snapshot::of(host) {
                let _ = answer.send(snapshot);
            }
        }
    }
}
