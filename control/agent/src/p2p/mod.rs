//! P2P store: large objects are copied from peer to peer, and their origin sends each about once.
//!
//! An object has a name and a version, and is immutable. A process that [`register`](P2pStore::register)s an object
//! serves it from its own memory. A process that calls [`get_replica`](P2pStore::get_replica) pulls shards over the
//! transfer engine from the peers that the control plane chooses, verifies each against its hash, and serves it from
//! then on, before it has the others. The control plane carries no bytes of objects; while it is away, orders in flight
//! continue, and every replica is announced again afterwards.
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

/// Interval at which a leaving replica checks whether its readers are done.
const LOOK: Duration = Duration::from_millis(20);
/// Limit of connection sets: each costs resources on every peer.
const INITIATORS: usize = 4;
/// Objects per page of a listing.
const PAGE: u32 = 1024;

/// Settings of a [`P2pStore`].
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
    /// ([`Layout::fitting_shard_bytes`]).
    pub shard_bytes: Option<u64>,
    /// Description for the users of the object.
    pub about: Vec<u8>,
}

/// Object as recorded in the catalog.
#[derive(Clone, Debug)]
pub struct Object {
    /// Name.
    pub name: String,
    /// Version.
    pub version: u64,
    /// Buffers, and their division into shards.
    pub layout: Layout,
    /// Description for the users of the object.
    pub about: Vec<u8>,
    spec: Arc<ObjectSpec>,
}

/// State shared by all threads of a store.
struct StoreState {
    config: P2pConfig,
    engine: TransferEngine,
    link: ControlLink,
    client: u64,
    guard: Guard,
    memory: Memory,
    replicas: Mutex<BTreeMap<(String, u64), Arc<Replica>>>,
    /// Objects that are being announced, so that no other thread begins the same.
    coming: Mutex<BTreeSet<(String, u64)>>,
    keeper: Keeper,
}

/// Exclusive right to announce a version of an object, while this lives.
struct AnnounceGuard<'a>(&'a StoreState, (String, u64));

impl Drop for AnnounceGuard<'_> {
    fn drop(&mut self) {
        self.0.coming().remove(&self.1);
    }
}

/// Store that shares objects with peers. Any thread may use it.
///
/// Dropping it stops serving its replicas without waiting for readers: these fetch the missing shards from other peers.
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
        // Every change under the lock is complete.
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn coming(&self) -> MutexGuard<'_, BTreeSet<(String, u64)>> {
        // Every change under the lock is complete.
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ensures that only one thread announces a version of an object that is not held here.
    fn begin(&self, key: &(String, u64)) -> Result<AnnounceGuard<'_>, Error> {
        let mut coming = self.coming();
        if self.replicas().contains_key(key) || !coming.insert(key.clone()) {
            let reason = format!("version {} of object {:?} is held here already, or being taken", key.1, key.0);
            return Err(Error::Argument(reason));
        }
        Ok(AnnounceGuard(self, key.clone()))
    }

    /// Returns the replica of that name; of the newest version held here if none is given.
    fn replica(&self, name: &str, version: Option<u64>) -> Result<Arc<Replica>, Error> {
        let (first, last) = version.map_or((0, u64::MAX), |version| (version, version));
        let replicas = self.replicas();
        let found = replicas.range((name.to_owned(), first)..=(name.to_owned(), last)).next_back();
        let found = found.map(|(_, replica)| Arc::clone(replica));
        found.ok_or_else(|| Error::Argument(format!("object {name:?} is not held here")))
    }

    /// Registers the memory and announces the replica.
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

    /// Releases the replica, waits up to `patience` for its readers, and unregisters its memory.
    fn retire(&self, replica: &Replica, patience: Duration) -> Result<(), Error> {
        replica.leaving.store(true, Ordering::Release);
        // A concurrent announcement gets a new member number, which has to be released, too.
        drop(replica.again.lock());
        let until = Instant::now() + patience;
        loop {
            let wait = Instant::now() < until;
            let call = ReleaseObject { client: self.client, member: replica.member(), wait };
            match self.link.call(call) {
                Ok(released) if released.readers > 0 && wait && interrupt::sleep(LOOK) => {}
                Err(error) if is_away(&error) && wait && interrupt::sleep(LOOK) => {}
                // No more peers are sent here. The engine cuts off the remaining readers.
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
    /// Starts a transfer engine, and connects to the control plane.
    ///
    /// # Errors
    /// When the engine does not start, or the control plane is not found, is unreachable, or rejects this process.
    pub fn connect(config: P2pConfig) -> Result<Self, Error> {
        let link = ControlLink::to_within(&config.control, config.role, ControlLink::RESTART)?;
        let client = random_u64()?;
        let mut config = P2pConfig { tenant: link.tenant_meant(&config.tenant).to_owned(), ..config };
        let loopback = config.engine.listen;
        if let Some(ip) = link.own_address().filter(|_| config.by_route && loopback.ip().is_loopback()) {
            config.engine.listen.set_ip(ip);
        }
        // Segment names come from peers: none of them may name a file of this host.
        let cluster = config.control.cluster().to_owned();
        let engine = TransferEngineConfig { files: false, open_to_network: false, cluster, ..config.engine.clone() };
        let keys = GetPeerKeys { client, tenant: config.tenant.clone() };
        let (guard, engine) = match Guard::start(&link, &keys, engine.clone()) {
            Err(Error::NoTickets { .. }) if config.engine.listen != loopback => {
                // Printed without being requested: peers on other hosts will not find the objects of this process.
                eprintln!(
                    "kvplane: warning: the control plane issues no tickets, so this process listens on {} and its \
                     objects are available on this machine only",
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

    /// Returns the segment name by which peers open this store's memory.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.engine.name()
    }

    /// Returns the transfer engine, for its metrics.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        &self.shared.engine
    }

    /// Publishes an object and serves it; each region is one of its buffers. The bytes must not change until
    /// [`Self::unregister`] has returned. Returns the version.
    ///
    /// # Errors
    /// When the memory overlaps other registered memory, the version belongs to another object, or the control plane
    /// does not answer; nothing is registered then.
    pub fn register(&self, name: &str, regions: &[Arc<Region>], options: &PublishOptions) -> Result<u64, Error> {
        if regions.len() > Limits::REGIONS_PER_SEGMENT {
            return Err(Error::Argument(format!(
                "{} buffers: a store registers at most {} for all its objects; put several in one piece of memory",
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

    /// Stops serving an object, in its newest version held here if none is given; waits for readers up to
    /// [`P2pConfig::readers_deadline`], and unregisters the memory.
    ///
    /// # Errors
    /// When the object is not held here or being fetched, or its memory is still in use: then the memory must not be
    /// freed.
    pub fn unregister(&self, name: &str, version: Option<u64>) -> Result<(), Error> {
        let replica = self.shared.replica(name, version)?;
        let Some(_alone) = Flag::take(&replica.fetched) else {
            return Err(Error::Argument(format!("object {name:?} is being fetched: wait for that to end")));
        };
        self.shared.replicas().remove(&(replica.name.clone(), replica.version));
        self.shared.retire(&replica, self.shared.config.readers_deadline).inspect_err(|_| {
            // The call can be repeated.
            self.shared.replicas().insert((replica.name.clone(), replica.version), Arc::clone(&replica));
        })
    }

    /// Stops serving an object that was fetched. The same as [`Self::unregister`].
    ///
    /// # Errors
    /// Errors of [`Self::unregister`].
    pub fn delete_replica(&self, name: &str, version: Option<u64>) -> Result<(), Error> {
        self.unregister(name, version)
    }

    /// Returns true if an object is held or being fetched here: that version, or any if none is given.
    #[must_use]
    pub fn holds(&self, name: &str, version: Option<u64>) -> bool {
        self.shared.replica(name, version).is_ok()
    }

    /// Looks an object up in the catalog; without a version, the newest whose members together hold all of it.
    ///
    /// # Errors
    /// When no peer holds the object, or the control plane does not answer.
    pub fn find(&self, name: &str, version: Option<u64>) -> Result<Object, Error> {
        self.shared.find(name, version)
    }

    /// Returns the objects whose names begin with this prefix, by name and version.
    ///
    /// # Errors
    /// When the control plane does not answer.
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

    /// Returns the peers that hold an object, how much of it each holds, and the peers that are excluded for wrong
    /// bytes.
    ///
    /// # Errors
    /// When no peer holds the object, or the control plane does not answer.
    pub fn describe(&self, name: &str, version: Option<u64>) -> Result<ObjectMembers, Error> {
        let call = DescribeObject { tenant: self.shared.config.tenant.clone(), name: name.to_owned(), version };
        self.shared.link.call(call)
    }
}

impl Drop for P2pStore {
    fn drop(&mut self) {
        self.shared.keeper.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
        let replicas = std::mem::take(&mut *self.shared.replicas());
        for replica in replicas.into_values() {
            // Remaining readers are cut off when the engine is dropped.
            let _ = self.shared.retire(&replica, Duration::ZERO);
        }
    }
}

/// Returns true if the control plane did not answer.
fn is_away(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Unreachable { .. } | CallError::Deadline { .. } | CallError::Lost { .. }))
}

/// Returns true if the control plane no longer knows the member.
fn is_forgotten(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Refused(refusal)) if refusal.code == RefusalCode::UnknownClient as u16)
}

/// Returns true if no peer has held the object for longer than the catalog remembers it.
fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Refused(refusal)) if refusal.code == RefusalCode::NotFound as u16)
}

fn malformed(error: &kvplane_cluster::p2p::ObjectError) -> Error {
    Error::Argument(error.to_string())
}

/// Flag that is set while this lives.
struct Flag<'a>(&'a AtomicBool);

impl<'a> Flag<'a> {
    fn raise(flag: &'a AtomicBool) -> Self {
        flag.store(true, Ordering::Release);
        Self(flag)
    }

    /// Sets the flag, unless it is set already.
    fn take(flag: &'a AtomicBool) -> Option<Self> {
        (!flag.swap(true, Ordering::AcqRel)).then(|| Self(flag))
    }
}

impl Drop for Flag<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
