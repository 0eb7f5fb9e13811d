//! Blocking client of the store. Requests are sent and replies received on the calling thread.
//!
//! Registered memory ([`Client::register`]) is sent from and received into without an extra copy; calls that take plain
//! byte slices copy through the client's bounce buffer. Every call returns only when nothing accesses the caller's
//! memory any more.
//!
//! Thread affinity: a client belongs to one thread at a time. Threads that send requests in parallel each have a
//! client; these may share one control link ([`Client::connect_with`]).
//!
//! The components lie in layers. `Requester` sends requests and follows the map. `Objects` has objects by their digests
//! on top of it, whole or striped. `Puts` decides how a new object is stored. `Namespace` turns keys into digests. The
//! groups of operations at the rim ([`Client::keys`] and so on) borrow of these what they need.

mod batches;
mod bounce;
mod config;
mod keys;
mod namespace;
mod objects;
mod outcome;
mod owners;
mod placement;
mod puts;
mod ranges;
mod replicas;
mod requester;
mod scatter_gather;
mod sessions;

use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Request, TaskResult};
use kvplane_engine::{Buffer, DeviceBuffer, Region, Slice};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Status, Version};
use kvplane_rpc::Role;
use kvplane_sys::device::DeviceMemory;
use kvplane_transfer::Metrics;

use crate::error::Error;
use crate::link::{ControlLink, until_there};
use batches::PendingBatch;
pub use batches::{BatchOutcome, Open, OpenBatches};
use bounce::BounceBuffer;
pub use config::ClientConfig;
pub use keys::{KeyInfo, Keys, ListCursor, ListPage, Pins};
pub(crate) use namespace::{Namespace, check_key, check_options, digest_of};
use objects::Objects;
pub use outcome::{Got, Put};
pub use placement::Placement;
pub use puts::Near;
use puts::Puts;
pub(crate) use puts::Striping;
pub use ranges::{GetSession, ObjectRange, ObjectRanges, RangeOutcome};
pub use replicas::Replicas;
use requester::Requester;
pub use scatter_gather::ScatterGather;
pub use sessions::{BeginOutcome, Fill, PutSession, PutSessions};

/// Initial size of the bounce buffer of plain puts and gets, in bytes.
const BOUNCE_BYTES: usize = 1 << 20;

/// Roles that may send object requests to nodes, the usual one first; operators may, too.
const OBJECT_ROLES: [Role; 2] = [Role::Client, Role::Admin];

/// Tier that prefetched objects are brought to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PrefetchTo {
    /// Memory of the node that has the object on an SSD.
    Memory,
}

/// The blocking client of the store.
///
/// Its own calls put, get, query and remove objects. Further operations come in groups:
///
/// * [`Client::keys`] lists keys, and removes them by pattern;
/// * [`Client::ranges`] reads parts of objects;
/// * [`Client::put_sessions`] writes objects range by range;
/// * [`Client::scatter_gather`] puts and gets objects in several pieces of memory;
/// * [`Client::batches`] starts batches that are finished later;
/// * [`Client::replicas`] counts, finds, creates and removes replicas;
/// * [`Client::placement`] names the nodes of new objects, and the owners of keys.
pub struct Client {
    objects: Objects,
    namespace: Namespace,
    puts: Puts,
    bounce: BounceBuffer,
    pending: Vec<PendingBatch>,
}

impl Client {
    /// Connects to the control plane and receives the map. Connecting to a control plane that does not answer is
    /// retried for up to [`ClientConfig::connect`].
    ///
    /// # Errors
    /// When there is no control plane, when it rejects the client, or when a signal interrupts the wait.
    pub fn connect(config: &ClientConfig) -> Result<Self, Error> {
        let link = until_there(config.connect, Error::is_control_away, || {
            // The roles that a local control plane offers may differ at the next attempt.
            ControlLink::to(&config.control, config.control.role_among(&OBJECT_ROLES)?)
        })?;
        Self::connect_with(config, link)
    }

    /// Creates a client on an existing control link.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub fn connect_with(config: &ClientConfig, link: ControlLink) -> Result<Self, Error> {
        let tenant = link.tenant_meant(&config.tenant).to_owned();
        let requester = Requester::new(config, link, &tenant)?;
        Ok(Self {
            objects: Objects::new(requester),
            namespace: Namespace::new(&tenant, config.keep_keys)?,
            puts: Puts::new(config.stripe_bytes),
            bounce: BounceBuffer::new("kvplane-bounce", BOUNCE_BYTES),
            pending: Vec::new(),
        })
    }

    /// Returns the control link, to be shared with other clients.
    #[must_use]
    pub const fn link(&self) -> &ControlLink {
        self.objects.requester().link()
    }

    pub(crate) const fn requester(&mut self) -> &mut Requester {
        self.objects.requester_mut()
    }

    /// Registers memory with this client.
    pub fn register(&mut self, region: Arc<Region>) -> Buffer {
        self.requester().register(region)
    }

    /// Registers memory of a device with this client: its slices are used like those of other memory. The bytes pass
    /// through pinned memory of the host; an object, or a stripe of one, of more than 1 GiB is refused.
    ///
    /// # Errors
    /// When the device is lost, or the host has too little memory to pin.
    pub fn register_device(&mut self, memory: Arc<DeviceMemory>) -> Result<DeviceBuffer, Error> {
        self.requester().register_device(memory)
    }

    /// Unregisters memory of a device.
    pub fn unregister_device(&mut self, buffer: DeviceBuffer) {
        self.requester().unregister_device(buffer);
    }

    /// Unregisters memory.
    pub fn unregister(&mut self, buffer: Buffer) {
        self.requester().unregister(buffer);
    }

    /// Returns the tenant whose objects the client uses: as configured, or as bound by its certificate.
    #[must_use]
    pub fn tenant_name(&self) -> String {
        self.namespace.tenant_name()
    }

    /// Returns the digest under which this client's key is stored.
    ///
    /// # Errors
    /// When the key is empty or too long.
    pub fn digest(&self, key: &[u8]) -> Result<Digest, Error> {
        self.namespace.digest(key)
    }

    /// Returns the counters of this client; rails are listed without the names of their shards.
    pub fn metrics(&mut self) -> Metrics {
        self.requester().metrics()
    }

    /// Returns the number of gets and queries that were sent to a replica owner so far, because the owner was slower
    /// than the hedge delay ([`ClientConfig::hedge`]), is suspect, or is unreachable.
    pub fn hedged_gets(&mut self) -> u64 {
        self.requester().initiator().books().counters().second_asked
    }

    /// Runs requests as one batch and returns their results in order.
    ///
    /// # Errors
    /// When a request is malformed, or the kernel fails; never for the outcomes of the requests themselves.
    pub fn run(&mut self, requests: &[Request]) -> Result<Vec<TaskResult>, Error> {
        self.requester().run(requests)
    }
}

/// Groups of operations.
impl Client {
    /// Returns the keys of the client's tenant, to be listed, removed by pattern, or pinned.
    pub const fn keys(&mut self) -> Keys<'_> {
        Keys { objects: &mut self.objects, namespace: &self.namespace }
    }

    /// Returns the reads of parts of objects.
    pub const fn ranges(&mut self) -> ObjectRanges<'_> {
        ObjectRanges { objects: &mut self.objects, namespace: &self.namespace }
    }

    /// Returns the put sessions, which write objects range by range.
    pub const fn put_sessions(&mut self) -> PutSessions<'_> {
        PutSessions { objects: &mut self.objects, namespace: &self.namespace, puts: self.puts.whole() }
    }

    /// Returns the puts and gets of objects in several pieces of registered memory.
    pub const fn scatter_gather(&mut self) -> ScatterGather<'_> {
        ScatterGather { objects: &mut self.objects, namespace: &self.namespace, puts: &mut self.puts }
    }

    /// Returns the batches that are started now and finished later.
    pub const fn batches(&mut self) -> OpenBatches<'_> {
        OpenBatches { objects: &mut self.objects, namespace: &self.namespace, pending: &mut self.pending }
    }

    /// Returns the replicas of objects, and the tasks that create them.
    pub const fn replicas(&mut self) -> Replicas<'_> {
        let (puts, bounce) = (self.puts.whole(), &mut self.bounce);
        Replicas { objects: &mut self.objects, namespace: &self.namespace, puts, bounce }
    }

    /// Returns the placement of objects: preferred nodes, and the owners of keys.
    pub const fn placement(&mut self) -> Placement<'_> {
        let requester = self.objects.requester_mut();
        Placement { requester, namespace: &self.namespace, puts: &mut self.puts }
    }
}

/// Puts.
impl Client {
    /// Stores a copy of these bytes under a key.
    ///
    /// # Errors
    /// When they cannot be stored: the status says why.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<Put, Error> {
        self.put_with(key, value, &PutOptions::default())
    }

    /// Like [`Self::put`], with options.
    ///
    /// # Errors
    /// When the bytes cannot be stored: the status says why.
    pub fn put_with(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<Put, Error> {
        let slice = self.bounce.copy_in(value, self.objects.requester_mut())?;
        self.put_from_with(key, slice, options)
    }

    /// Stores a copy of these bytes under a key and replaces an existing object; gets in flight complete with the old
    /// object.
    ///
    /// # Errors
    /// When the bytes cannot be stored: the status says why. The old object is then unchanged, or may have been
    /// evicted.
    pub fn upsert(&mut self, key: &[u8], value: &[u8]) -> Result<Version, Error> {
        match self.put_with(key, value, &PutOptions { replace: true, ..PutOptions::default() })? {
            Put::Stored(version) => Ok(version),
            Put::Exists => Err(self.objects.requester().problem("upsert".to_owned(), Status::Exists)),
        }
    }

    /// Stores registered memory under a key.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn put_from(&mut self, key: &[u8], slice: Slice) -> Result<Put, Error> {
        self.put_from_with(key, slice, &PutOptions::default())
    }

    /// Like [`Self::put_from`], with options.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn put_from_with(&mut self, key: &[u8], slice: Slice, options: &PutOptions) -> Result<Put, Error> {
        let mut outcomes = self.batch_put_from_with(&[(key, slice)], options)?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Stores many objects; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn batch_put_from(&mut self, items: &[(impl AsRef<[u8]>, Slice)]) -> Result<Vec<Result<Put, Error>>, Error> {
        self.batch_put_from_with(items, &PutOptions::default())
    }

    /// Like [`Self::batch_put_from`], with options.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: an invalid key or option. Then nothing of it is stored.
    pub fn batch_put_from_with(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        self.puts.put(items, options, &self.namespace, &mut self.objects)
    }
}

/// Gets.
impl Client {
    /// Returns a copy of the object under a key; `None` when there is none.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        self.objects.get_copy(|slice| self.namespace.get(key, slice), &mut self.bounce)
    }

    /// Reads the object under a key into registered memory; `None` when there is none.
    ///
    /// # Errors
    /// When the memory is too small or the owner does not answer.
    pub fn get_into(&mut self, key: &[u8], slice: Slice) -> Result<Option<Got>, Error> {
        let mut outcomes = self.batch_get_into(&[(key, slice)])?;
        outcomes.pop().unwrap_or(Ok(None))
    }

    /// Reads many objects; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn batch_get_into(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let gets: Result<Vec<Request>, Error> =
            items.iter().map(|(key, slice)| self.namespace.get(key.as_ref(), *slice)).collect();
        self.objects.get_into(&gets?, items.iter().map(|(_, slice)| *slice))
    }

    /// Like [`Self::batch_exists`], and prefetches objects that are on an SSD only: nodes begin to read them into
    /// memory, within the part of their memory that is set aside for prefetching. Objects that no get has read within
    /// this client's deadline are evicted from memory again.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_exists_ahead(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        self.batch_present(keys, Request::Prefetch, "exists")
    }

    /// Prefetches objects into `tier`: nodes begin to read those that are on a slower tier. A get of an object whose
    /// prefetch is in flight joins it. Returns for each key whether the object exists; a prefetch itself is not
    /// guaranteed, because nodes limit the memory of prefetched objects. Objects that no get has read within the
    /// deadline are evicted from memory again. A node that does not answer within the deadline counts as one without
    /// the object.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn prefetch(
        &mut self,
        keys: &[impl AsRef<[u8]>],
        tier: PrefetchTo,
        deadline: Duration,
    ) -> Result<Vec<bool>, Error> {
        let PrefetchTo::Memory = tier;
        let requests = self.namespace.requests(keys, Request::Prefetch)?;
        let results = self.objects.within(deadline, |objects| objects.query(&requests))?;
        let there = |result: TaskResult| match result.status {
            Status::DeadlineExceeded => Ok(false),
            _ => self.objects.requester().present(result, "prefetch"),
        };
        results.into_iter().map(there).collect()
    }
}

/// Queries and removals.
impl Client {
    /// Returns true if there is an object under this key. Does not count as an access.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn exists(&mut self, key: &[u8]) -> Result<bool, Error> {
        self.objects.exists(self.namespace.digest(key)?)
    }

    /// Returns for each key whether there is an object. Does not count as an access. Each owner gets one request for
    /// every 32,768 keys of the list.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_exists(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        keys.iter().try_for_each(|key| check_key(key.as_ref()))?;
        let mut hasher = self.namespace.hasher();
        self.objects.exist(keys.len(), |at| hasher.digest(keys[at].as_ref()))
    }

    /// Like [`Self::batch_exists`], by digests as [`Self::digest`] returns them.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_exists_by_digest(&mut self, digests: &[Digest]) -> Result<Vec<bool>, Error> {
        self.objects.exist(digests.len(), |at| digests[at])
    }

    /// Returns the length of the object under this key, or `None` if there is none. Does not count as an access.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn size(&mut self, key: &[u8]) -> Result<Option<u64>, Error> {
        self.objects.size(self.namespace.digest(key)?)
    }

    /// Returns the lengths of the objects under these keys. Does not count as an access.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_size(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Option<u64>>, Error> {
        let results = self.objects.query(&self.namespace.requests(keys, Request::Size)?)?;
        let requester = self.objects.requester();
        results.into_iter().map(|result| Ok(requester.present(result, "size")?.then_some(result.bytes))).collect()
    }

    /// Removes the object under this key. Returns true if there was one.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn remove(&mut self, key: &[u8]) -> Result<bool, Error> {
        Ok(self.batch_remove(&[key])?.pop().unwrap_or(false))
    }

    /// Removes the objects under these keys. Returns for each whether there was one.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_remove(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        self.batch_present(keys, Request::Remove, "remove")
    }

    /// Runs a request for each key; returns for each whether there is an object.
    fn batch_present(
        &mut self,
        keys: &[impl AsRef<[u8]>],
        request: impl Fn(Digest) -> Request,
        what: &str,
    ) -> Result<Vec<bool>, Error> {
        let results = self.objects.query(&self.namespace.requests(keys, request)?)?;
        results.into_iter().map(|result| self.objects.requester().present(result, what)).collect()
    }
}
