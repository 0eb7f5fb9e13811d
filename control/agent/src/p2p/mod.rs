//! The P2P store: big objects go from peer to peer, and their source sends them about once.
//!
//! An object has a name and a version and never changes. Who [`register`](P2pStore::register)s one serves it from its
//! own memory; who [`get_replica`](P2pStore::get_replica)s it pulls shards from whom the control plane says, over the
//! transfer engine, checks each against its hash, and serves it from then on, before it has the rest. The control plane
//! carries no bytes of objects; while it is away, what was ordered goes on, and everything is announced again after.
//!
//! ```no_run
//! use std::time::Duration;
//! use kvplane::{Control, GetOptions, P2pConfig, P2pStore, PublishOptions, Region, RegionOptions};
//!
//! let control = Control::Local { cluster: "dev".to_owned(), runtime_directory: None };
//! let store = P2pStore::connect(P2pConfig::new(control))?;
//! let weights = Region::allocate(&RegionOptions::new("weights", 1 << 30))?;
//! store.register("model", &[weights], &PublishOptions::default())?;
//!
//! // Elsewhere:
//! let object = store.find("model", None)?;
//! let memory = Region::allocate(&RegionOptions::new("weights", object.layout.sizes()[0] as usize))?;
//! store.get_replica(&object, &[memory], &GetOptions::default())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checks;
mod fetch;
mod get;
mod guard;
mod keeper;
mod manifest;
mod memory;
mod named;
mod ranges;
mod ranks;
mod replica;
mod reshard;
mod widen;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::{Layout, ObjectSpec};
use kvplane_engine::{Pacing, Region, cpu};
use kvplane_proto::Limits;
use kvplane_rpc::p2p::{
    DescribeObject, FindObject, GetPeerKeys, ListObjects, ObjectMembers, ObjectSummary, PublishObject, ReleaseObject,
};
use kvplane_rpc::{CallError, RefusalCode, Role};
use kvplane_sys::interrupt;
use kvplane_sys::random::random_u64;
use kvplane_transfer::{RdmaConfig, TransferEngine, TransferEngineConfig};

use crate::error::Error;
use crate::link::ControlLink;
use crate::which::Control;

pub use get::{GetOptions, Progress};
pub use manifest::placement_from_json;
pub use named::{NamedPart, ReshardNames, packed_bytes};
pub use ranges::{ReadBytes, ReadOptions};
pub use ranks::Ranks;
pub use reshard::{PartSource, Resharding};

use guard::Guard;
use keeper::Keeper;
use memory::Memory;
use replica::Replica;

/// How often who goes looks whether its readers are done.
const LOOK: Duration = Duration::from_millis(20);
/// Sets of connections, at most: each costs every peer some.
const INITIATORS: usize = 4;
/// Objects asked for at a time in a listing.
const PAGE: u32 = 1024;

/// Settings of a [`P2pStore`].
#[derive(Clone, Debug)]
pub struct P2pConfig {
    /// Which control plane has the catalog.
    pub control: Control,
    /// As whom: a client, or a node.
    pub role: Role,
    /// The objects' tenant: `default` is the default one. So is an empty name, unless our certificate is for one tenant
    /// only: then it is that one.
    pub tenant: String,
    /// The store listens on this host's address that leads to the control plane, if that is beyond loopback, instead of
    /// the address in [`Self::engine`]: for callers that chose no address. Without tickets of the control plane it
    /// stays on loopback, and a line on standard error says so.
    pub by_route: bool,
    /// The transfer engine that moves the bytes. Peers on other hosts need it to listen where they reach it, which
    /// needs a control plane that makes tickets; then only peers of the same tenant are let in.
    pub engine: TransferEngineConfig,
    /// The host's label: one copy of an object comes to a host, and its processes share it. This machine's own, unless
    /// set.
    pub host: String,
    /// The rack's label, where there is one.
    pub rack: String,
    /// Most bytes per second that others are told to fetch from here; 0 for no limit.
    pub upload_bytes_per_second: u64,
    /// Most bytes per second that are fetched; 0 for no limit.
    pub download_bytes_per_second: u64,
    /// How long unregistering waits for those who are reading.
    pub readers_deadline: Duration,
}

impl P2pConfig {
    /// With this control plane, everything else as it usually is.
    #[must_use]
    pub fn new(control: Control) -> Self {
        // Who fetches a shard hashes it, too; so several threads move bytes at a time. Not where devices move them:
        // each set would register all memory with all devices once more, and lock it.
        let several = || std::thread::available_parallelism().map_or(1, usize::from).min(INITIATORS);
        let initiators = if RdmaConfig::default().usable().is_ok() { 1 } else { several() };
        Self {
            control,
            role: Role::Client,
            tenant: String::new(),
            by_route: false,
            // Shards take milliseconds: nothing is gained by spinning for them, and the processor may be others'.
            engine: TransferEngineConfig { pacing: Pacing::Park, initiators, ..TransferEngineConfig::default() },
            host: cpu::boot_id().unwrap_or_default(),
            rack: String::new(),
            upload_bytes_per_second: 0,
            download_bytes_per_second: 0,
            readers_deadline: Duration::from_secs(30),
        }
    }
}

/// How an object is published.
#[derive(Clone, Debug, Default)]
pub struct PublishOptions {
    /// Its version; without one, the newest if that is equal, and else the one after it.
    pub version: Option<u64>,
    /// Buffers are cut into shards of this many bytes; without it, of as many as suit the object
    /// ([`Layout::fitting_shard_bytes`]).
    pub shard_bytes: Option<u64>,
    /// Words about it that its users read.
    pub about: Vec<u8>,
}

/// An object as the catalog knows it.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// Its buffers, and how they are cut.
    pub layout: Layout,
    /// Words about it that its users read.
    pub about: Vec<u8>,
    spec: Arc<ObjectSpec>,
}

/// What all threads of a store share.
struct StoreState {
    config: P2pConfig,
    engine: TransferEngine,
    link: ControlLink,
    client: u64,
    guard: Guard,
    memory: Memory,
    replicas: Mutex<BTreeMap<(String, u64), Arc<Replica>>>,
    /// Those that are being announced: nobody else may begin the same.
    coming: Mutex<BTreeSet<(String, u64)>>,
    keeper: Keeper,
}

/// The right to announce a version of an object, for as long as this lives.
struct AnnounceGuard<'a>(&'a StoreState, (String, u64));

impl Drop for AnnounceGuard<'_> {
    fn drop(&mut self) {
        self.0.coming().remove(&self.1);
    }
}

/// Shares objects with peers. Any thread may use it.
///
/// Dropping it stops serving what it holds, without waiting for readers: they fetch elsewhere what they lack.
pub struct P2pStore {
    shared: Arc<StoreState>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for P2pStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "P2pStore({})", self.name())
    }
}

impl StoreState {
    fn replicas(&self) -> MutexGuard<'_, BTreeMap<(String, u64), Arc<Replica>>> {
        // Each change is whole.
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn coming(&self) -> MutexGuard<'_, BTreeSet<(String, u64)>> {
        // Each change is whole.
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that one thread only announces a version of an object that is not held here.
    fn begin(&self, key: &(String, u64)) -> Result<AnnounceGuard<'_>, Error> {
        let mut coming = self.coming();
        if self.replicas().contains_key(key) || !coming.insert(key.clone()) {
            let reason = format!("version {} of object {:?} is held here already, or being taken", key.1, key.0);
            return Err(Error::Argument(reason));
        }
        Ok(AnnounceGuard(self, key.clone()))
    }

    /// The replica of that name: of the newest version held here where none is named.
    fn replica(&self, name: &str, version: Option<u64>) -> Result<Arc<Replica>, Error> {
        let (first, last) = version.map_or((0, u64::MAX), |version| (version, version));
        let replicas = self.replicas();
        let found = replicas.range((name.to_owned(), first)..=(name.to_owned(), last)).next_back();
        let found = found.map(|(_, replica)| Arc::clone(replica));
        found.ok_or_else(|| Error::Argument(format!("object {name:?} is not held here")))
    }

    /// Takes memory in use and announces the replica.
    fn announce(&self, replica: Replica) -> Result<Arc<Replica>, Error> {
        let replica = Arc::new(replica);
        let key = (replica.name.clone(), replica.version);
        let _coming = self.begin(&key)?;
        self.memory.take(&self.engine, &replica.memory(), !replica.origin)?;
        if let Err(error) = self.keeper.hold(self, &replica) {
            self.memory.give_back(&self.engine, &replica.memory())?;
            return Err(error);
        }
        self.replicas().insert(key, Arc::clone(&replica));
        Ok(replica)
    }

    /// Waits for readers where that is wanted, and gives the memory back.
    fn retire(&self, replica: &Replica, patience: Duration) -> Result<(), Error> {
        replica.leaving.store(true, Ordering::Release);
        // Who announces it again at this moment gets a number that has to be released, too.
        drop(replica.again.lock());
        let until = Instant::now() + patience;
        loop {
            let wait = Instant::now() < until;
            let call = ReleaseObject { client: self.client, member: replica.member(), wait };
            match self.link.call(call) {
                Ok(released) if released.readers > 0 && wait && interrupt::sleep(LOOK) => {}
                Err(error) if is_away(&error) && wait && interrupt::sleep(LOOK) => {}
                // Nobody is sent here any more. Those that read nevertheless are cut off by the engine.
                _ => break,
            }
        }
        self.keeper.forget(replica.member());
        self.memory.give_back(&self.engine, &replica.memory())
    }
}

impl StoreState {
    fn find(&self, name: &str, version: Option<u64>) -> Result<Object, Error> {
        let call = FindObject { tenant: self.config.tenant.clone(), name: name.to_owned(), version };
        let found = self.link.call(call)?;
        let layout = Layout::new(found.spec.sizes, found.spec.shard_bytes).map_err(|error| malformed(&error))?;
        let spec = ObjectSpec { layout: layout.clone(), hashes: found.spec.hashes, about: found.spec.about.clone() };
        spec.check().map_err(|error| malformed(&error))?;
        let (name, about) = (name.to_owned(), found.spec.about);
        Ok(Object { name, version: found.version, layout, about, spec: Arc::new(spec) })
    }

    fn peer_keys(&self) -> GetPeerKeys {
        GetPeerKeys { client: self.client, tenant: self.config.tenant.clone() }
    }
}

impl P2pStore {
    /// Starts a transfer engine, and a line to the control plane.
    ///
    /// # Errors
    /// When the engine does not start, or the control plane is not found, cannot be reached, or refuses us.
    pub fn connect(config: P2pConfig) -> Result<Self, Error> {
        let link = ControlLink::to_within(&config.control, config.role, ControlLink::RESTART)?;
        let client = random_u64()?;
        let mut config = P2pConfig { tenant: link.tenant_meant(&config.tenant).to_owned(), ..config };
        let loopback = config.engine.listen;
        if let Some(ip) = link.own_address().filter(|_| config.by_route && loopback.ip().is_loopback()) {
            config.engine.listen.set_ip(ip);
        }
        // Names of segments come from others: none of them means a file of this host.
        let cluster = config.control.cluster().to_owned();
        let engine = TransferEngineConfig { files: false, open_to_network: false, cluster, ..config.engine.clone() };
        let keys = GetPeerKeys { client, tenant: config.tenant.clone() };
        let (guard, engine) = match Guard::start(&link, &keys, engine.clone()) {
            Err(Error::NoTickets { .. }) if config.engine.listen != loopback => {
                // Said also where nobody asks: peers elsewhere will not find what is shared here.
                eprintln!(
                    "kvplane: warning: the control plane makes no tickets, so what this process shares is on {} and \
                     reaches this machine only",
                    loopback.ip()
                );
                config.engine.listen = loopback;
                Guard::start(&link, &keys, TransferEngineConfig { listen: loopback, ..engine })?
            }
            started => started?,
        };
        let (memory, keeper) = (Memory::default(), Keeper::default());
        let (replicas, coming) = (Mutex::default(), Mutex::default());
        let shared = StoreState { config, engine, link, client, guard, memory, replicas, coming, keeper };
        let shared = Arc::new(shared);
        shared.keeper.follow(&shared)?;
        let keeping = Arc::clone(&shared);
        let builder = std::thread::Builder::new().name("kvplane-p2p".to_owned());
        let thread = builder.spawn(move || keeping.keeper.run(&keeping))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The name by which peers open this store's memory.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.engine.name()
    }

    /// The transfer engine, for its figures.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        &self.shared.engine
    }

    /// Publishes an object and serves it: each region is one of its buffers. The bytes must stay as they are until
    /// [`Self::unregister`] has returned. The version is the answer.
    ///
    /// # Errors
    /// When the memory overlaps other memory that is registered, the version is another object's, or the control plane
    /// cannot be asked; nothing is registered then.
    pub fn register(&self, name: &str, regions: &[Arc<Region>], options: &PublishOptions) -> Result<u64, Error> {
        if regions.len() > Limits::REGIONS_PER_SEGMENT {
            return Err(Error::Argument(format!(
                "{} buffers: a store registers at most {} of all its objects; put several in one piece of memory",
                regions.len(),
                Limits::REGIONS_PER_SEGMENT
            )));
        }
        let sizes: Vec<u64> = regions.iter().map(|region| region.bytes() as u64).collect();
        let shard_bytes = options.shard_bytes.unwrap_or_else(|| Layout::fitting_shard_bytes(&sizes));
        let layout = Layout::new(sizes, shard_bytes).map_err(|error| malformed(&error))?;
        let hashes = replica::hashes(&layout, regions);
        let spec = Arc::new(ObjectSpec { layout, hashes, about: options.about.clone() });
        spec.check().map_err(|error| malformed(&error))?;
        let call = PublishObject {
            tenant: self.shared.config.tenant.clone(),
            name: name.to_owned(),
            version: options.version,
            spec: replica::told(&spec),
        };
        let version = self.shared.link.call(call)?.version;
        self.shared.announce(Replica::whole(name, version, spec, regions))?;
        Ok(version)
    }

    /// Stops serving an object, of the newest version held here where none is named; waits until nobody reads it, as
    /// long as the settings say, and gives the memory back.
    ///
    /// # Errors
    /// When it is not held here or being fetched, or its memory is still used: then the memory must stay.
    pub fn unregister(&self, name: &str, version: Option<u64>) -> Result<(), Error> {
        let replica = self.shared.replica(name, version)?;
        let Some(_alone) = Flag::take(&replica.fetched) else {
            return Err(Error::Argument(format!("object {name:?} is being fetched: wait for that to end")));
        };
        self.shared.replicas().remove(&(replica.name.clone(), replica.version));
        self.shared.retire(&replica, self.shared.config.readers_deadline).inspect_err(|_| {
            // It is to be asked for again.
            self.shared.replicas().insert((replica.name.clone(), replica.version), Arc::clone(&replica));
        })
    }

    /// Stops being a source of an object that was fetched: as [`Self::unregister`].
    ///
    /// # Errors
    /// As there.
    pub fn delete_replica(&self, name: &str, version: Option<u64>) -> Result<(), Error> {
        self.unregister(name, version)
    }

    /// Whether an object is held or being fetched here: that version, or any where none is named.
    #[must_use]
    pub fn holds(&self, name: &str, version: Option<u64>) -> bool {
        self.shared.replica(name, version).is_ok()
    }

    /// What an object is; where no version is named, of the newest that its sources have all of.
    ///
    /// # Errors
    /// When nobody has it, or the control plane cannot be asked.
    pub fn find(&self, name: &str, version: Option<u64>) -> Result<Object, Error> {
        self.shared.find(name, version)
    }

    /// Objects whose names begin with this, by name and version.
    ///
    /// # Errors
    /// When the control plane cannot be asked.
    pub fn list(&self, prefix: &str) -> Result<Vec<ObjectSummary>, Error> {
        let mut objects: Vec<ObjectSummary> = Vec::new();
        loop {
            let after = objects.last().map(|last| (last.name.clone(), last.version));
            let (tenant, prefix) = (self.shared.config.tenant.clone(), prefix.to_owned());
            let page = self.shared.link.call(ListObjects { tenant, prefix, after, limit: PAGE })?;
            let more = page.more && !page.objects.is_empty();
            objects.extend(page.objects);
            if !more {
                return Ok(objects);
            }
        }
    }

    /// Who holds an object, how much of it, and whose bytes were found wrong.
    ///
    /// # Errors
    /// When nobody has it, or the control plane cannot be asked.
    pub fn describe(&self, name: &str, version: Option<u64>) -> Result<ObjectMembers, Error> {
        let call = DescribeObject { tenant: self.shared.config.tenant.clone(), name: name.to_owned(), version };
        self.shared.link.call(call)
    }
}

impl Drop for P2pStore {
    fn drop(&mut self) {
        self.shared.keeper.stop();
        if let Some(thread) = self.thread.take() {
            // A panic there was printed when it happened.
            let _ = thread.join();
        }
        let replicas = std::mem::take(&mut *self.shared.replicas());
        for replica in replicas.into_values() {
            // The engine's end cuts off whoever reads still.
            let _ = self.shared.retire(&replica, Duration::ZERO);
        }
    }
}

/// Whether the control plane could not be asked.
fn is_away(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Unreachable { .. } | CallError::Deadline { .. } | CallError::Lost { .. }))
}

/// Whether the control plane does not know the member any more.
fn is_forgotten(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Refused(refusal)) if refusal.code == RefusalCode::UnknownClient as u16)
}

/// Whether nobody has had the object for longer than it is remembered.
fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Refused(refusal)) if refusal.code == RefusalCode::NotFound as u16)
}

fn malformed(error: &kvplane_cluster::p2p::ObjectError) -> Error {
    Error::Argument(error.to_string())
}

/// A flag that is set for as long as this lives.
struct Flag<'a>(&'a AtomicBool);

impl<'a> Flag<'a> {
    fn raise(flag: &'a AtomicBool) -> Self {
        flag.store(true, Ordering::Release);
        Self(flag)
    }

    /// Unless it is set.
    fn take(flag: &'a AtomicBool) -> Option<Self> {
        (!flag.swap(true, Ordering::AcqRel)).then(|| Self(flag))
    }
}

impl Drop for Flag<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
