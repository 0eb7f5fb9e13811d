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

mod catalog;
mod config;
mod error;
mod get;
mod guard;
mod memory;
mod ranges;
mod replica;
mod replicas;
mod reshard;
mod sources;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvplane_cluster::p2p::{Layout, ObjectSpec};
use kvplane_cluster::reshard::Copy;
use kvplane_engine::Region;
use kvplane_proto::Limits;
use kvplane_rpc::p2p::{GetPeerKeys, ObjectMembers, ObjectSummary};
use kvplane_sys::random::random_u64;
use kvplane_transfer::{TransferEngine, TransferEngineConfig};

use crate::error::Error;
use crate::link::ControlLink;

pub use catalog::Object;
pub use config::{P2pConfig, PublishOptions};
pub use error::{P2pError, WideningError};
pub use get::{GetOptions, Progress};
pub use ranges::{ReadBytes, ReadOptions};
pub use replica::Ranks;
pub use reshard::{
    ManifestError, NamedPart, OffsetsError, PartSource, ReshardNames, Resharding, ReshardingError, packed_bytes,
    placement_from_json,
};

use catalog::Catalog;
use get::Get;
use guard::Guard;
use memory::Memory;
use ranges::RangeReads;
use replica::Replica;
use replicas::Replicas;

/// Store that shares objects with peers. Any thread may use it.
///
/// Dropping it stops serving its replicas without waiting for readers: these fetch the missing shards from other peers.
pub struct P2pStore {
    engine: Arc<TransferEngine>,
    catalog: Arc<Catalog>,
    memory: Arc<Memory>,
    replicas: Replicas,
    readers_deadline: Duration,
}

impl std::fmt::Debug for P2pStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "P2pStore({})", self.name())
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
        let engine = Arc::new(engine);
        let catalog = Arc::new(Catalog::new(link, client, &config, engine.name()));
        let memory = Arc::new(Memory::new(Arc::clone(&engine)));
        let replicas = Replicas::start(&catalog, &memory, &engine, guard)?;
        Ok(Self { engine, catalog, memory, replicas, readers_deadline: config.readers_deadline })
    }

    /// Returns the segment name by which peers open this store's memory.
    #[must_use]
    pub fn name(&self) -> &str {
        self.engine.name()
    }

    /// Returns the transfer engine, for its metrics.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// Publishes an object and serves it; each region is one of its buffers. The bytes must not change until
    /// [`Self::unregister`] has returned. Returns the version.
    ///
    /// # Errors
    /// When the memory overlaps other registered memory, the version belongs to another object, or the control plane
    /// does not answer; nothing is registered then.
    pub fn register(&self, name: &str, regions: &[Arc<Region>], options: &PublishOptions) -> Result<u64, Error> {
        if regions.len() > Limits::REGIONS_PER_SEGMENT {
            return Err(P2pError::Buffers { buffers: regions.len() }.into());
        }
        let sizes: Vec<u64> = regions.iter().map(|region| region.bytes() as u64).collect();
        let shard_bytes = options.shard_bytes.unwrap_or_else(|| Layout::fitting_shard_bytes(&sizes));
        let layout = Layout::new(sizes, shard_bytes).map_err(P2pError::Object)?;
        let hashes = replica::hashes(&layout, regions);
        let spec = Arc::new(ObjectSpec { layout, hashes, about: options.about.clone() });
        spec.check().map_err(P2pError::Object)?;
        let version = self.catalog.publish(name, options.version, &spec)?;
        self.replicas.announce(Replica::whole(name, version, spec, regions))?;
        Ok(version)
    }

    /// Stops serving an object, in its newest version held here if none is given; waits for readers up to
    /// [`P2pConfig::readers_deadline`], and unregisters the memory.
    ///
    /// # Errors
    /// When the object is not held here or being fetched, or its memory is still in use: then the memory must not be
    /// freed.
    pub fn unregister(&self, name: &str, version: Option<u64>) -> Result<(), Error> {
        self.replicas.retire(name, version, self.readers_deadline)
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
        self.replicas.get(name, version).is_ok()
    }

    /// Looks an object up in the catalog; without a version, the newest whose members together hold all of it.
    ///
    /// # Errors
    /// When no peer holds the object, or the control plane does not answer.
    pub fn find(&self, name: &str, version: Option<u64>) -> Result<Object, Error> {
        self.catalog.find(name, version)
    }

    /// Returns the objects whose names begin with this prefix, by name and version.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub fn list(&self, prefix: &str) -> Result<Vec<ObjectSummary>, Error> {
        self.catalog.list(prefix)
    }

    /// Returns the peers that hold an object, how much of it each holds, and the peers that are excluded for wrong
    /// bytes.
    ///
    /// # Errors
    /// When no peer holds the object, or the control plane does not answer.
    pub fn describe(&self, name: &str, version: Option<u64>) -> Result<ObjectMembers, Error> {
        self.catalog.describe(name, version)
    }

    /// Fetches an object into memory, one region for each buffer, and serves the arrived shards to peers from then on,
    /// until [`Self::delete_replica`]. Returns the number of bytes that were fetched.
    ///
    /// Shards of the object may be held here already, from a former call into the same memory: then only missing shards
    /// are fetched to it. A single `delete_replica` covers all of them.
    ///
    /// # Errors
    /// When the regions do not match the buffers in length, the memory overlaps other registered memory, no peer holds
    /// a shard, or the deadline has passed. The memory is then unregistered; arrived shards stay in it, for another
    /// attempt with [`GetOptions::resume`]. Where shards were held before, these and the arrived ones stay held, unless
    /// the control plane does not answer.
    pub fn get_replica(
        &self,
        object: &Object,
        regions: &[Arc<Region>],
        options: &GetOptions<'_>,
    ) -> Result<u64, Error> {
        Get::new(&self.catalog, &self.engine, &self.replicas, object, options).fetch(regions)
    }

    /// Reads ranges of an object's buffer into memory, from peers that hold all of the buffer, nearest first. Unlike
    /// with [`Self::get_replica`], peers cannot fetch the ranges from this process. Hashes cover whole shards, so only
    /// shards whose bytes are all among the ranges are verified. A peer whose shard is wrong is not used any more.
    ///
    /// # Errors
    /// When a range is not within the buffer or the memory, two overlap in memory, no peer is left, or the deadline has
    /// passed.
    pub fn read_ranges(
        &self,
        object: &Object,
        buffer: usize,
        copies: &[Copy],
        memory: &Arc<Region>,
        options: &ReadOptions<'_>,
    ) -> Result<ReadBytes, Error> {
        ranges::check_copies(object, buffer, copies, memory.bytes() as u64)?;
        self.memory.with_registered(memory, || {
            let reads = RangeReads::new(&self.catalog, &self.engine, memory, options);
            reads.read(object, buffer, || copies.iter().copied())
        })
    }

    /// Reads the fragments of a rank into memory: `from` gives the location of each part of the source, and `to` the
    /// offset of each fragment of the rank in the memory.
    ///
    /// Bytes are read and verified like those of [`Self::read_ranges`]: a shard is verified if this rank needs all of
    /// it, wherever its bytes go. After a failure, the memory is partially written.
    ///
    /// # Errors
    /// When a location is missing or too small, no peer is left, or the deadline has passed.
    pub fn reshard(
        &self,
        resharding: &Resharding<'_>,
        from: &BTreeMap<usize, PartSource>,
        memory: &Arc<Region>,
        to: &[u64],
        options: &ReadOptions<'_>,
    ) -> Result<ReadBytes, Error> {
        resharding.check(from, to, memory.bytes() as u64)?;
        self.memory.with_registered(memory, || {
            resharding.read(&RangeReads::new(&self.catalog, &self.engine, memory, options), from, to)
        })
    }

    /// Like [`Self::reshard`], from manifests in JSON: reads the fragments of this rank of the target from the `parts`
    /// that overlap with them; other parts may be missing. The rank's fragments begin at the offsets `to`, or are
    /// packed and fill the memory.
    ///
    /// # Errors
    /// Errors of [`Self::reshard`]; also an invalid manifest, or an object that does not exist or differs in size
    /// from its rank.
    pub fn reshard_named(
        &self,
        names: ReshardNames<'_>,
        parts: &[NamedPart],
        memory: &Arc<Region>,
        to: Option<&[u64]>,
        options: &ReadOptions<'_>,
    ) -> Result<ReadBytes, Error> {
        let (source, target) = names.placements()?;
        let resharding = Resharding::new(&source, &target, names.participant).map_err(ReshardingError::Placement)?;
        let from = reshard::part_sources(&resharding, parts, |name, version| self.catalog.find(name, version))?;
        let to = reshard::target_offsets(&target, resharding.part(), memory.bytes() as u64, to)?;
        self.reshard(&resharding, &from, memory, &to, options)
    }
}
