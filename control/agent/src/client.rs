//! Blocking client of the store. Requests are sent and replies received on the calling thread.
//!
//! Registered memory ([`Client::register`]) is sent from and received into without an extra copy; calls that take plain
//! byte slices copy through the client's bounce buffer. Every call returns only when nothing accesses the caller's
//! memory any more.
//!
//! Thread affinity: a client belongs to one thread at a time. Threads that send requests in parallel each have a
//! client; these may share one control link ([`Client::connect_with`]).

mod ahead;
mod capacity;
mod keys;
mod near;
mod open;
mod parts;
mod puts;
mod questions;
mod ranges;
mod replicas;
mod run;
mod sessions;
mod silence;
mod stripes;
mod tasks;

use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{Config, Local, PutBook, Request, TaskResult};
use kvplane_engine::{Buffer, HostConfig, HugePages, Initiator, Pacing, Region, RegionOptions, Slice, cpu};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Limits, Status, Version};
use kvplane_rpc::Role;
use kvplane_sys::random::random_u64;
use kvplane_tls::DataTls;
use kvplane_transfer::{RdmaConfig, RdmaUse};

use crate::error::Error;
use crate::link::{ControlLink, until_there};
use crate::which::Control;
pub use ahead::PrefetchTo;
pub use keys::{KeyInfo, ListCursor, ListPage};
pub use near::Near;
pub use open::{BatchOutcome, Open};
pub(crate) use puts::{check_options, put_request};
pub use ranges::ObjectRange;
pub use sessions::{BeginOutcome, Fill, GetSession, PutSession, RangeOutcome};

/// Initial size of the bounce buffer of plain puts and gets, in bytes.
const BOUNCE_BYTES: usize = 1 << 20;
/// Interval at which a waiting client checks for a newer map.
const MAP_LOOK: Duration = Duration::from_millis(5);

/// Roles that may send object requests to nodes, the usual one first; operators may, too.
const OBJECT_ROLES: [Role; 2] = [Role::Client, Role::Admin];

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
    /// Longest wait of [`Client::connect`] for a control plane that does not answer or is not published yet: it may be
    /// restarting.
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

    /// Returns the stripe size, clamped to the limits of the protocol.
    pub(crate) fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes.clamp(stripes::STRIPE_LEAST_BYTES, Limits::PAYLOAD_BYTES)
    }
}

/// A successful get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Got {
    /// Length of the object.
    pub bytes: u64,
    /// Version that the put of this object was given.
    pub version: Version,
}

/// A successful put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The object is stored.
    Stored(Version),
    /// An object under this key exists already; it is left unchanged.
    Exists,
}

/// The blocking client of the store.
pub struct Client {
    initiator: Initiator,
    link: ControlLink,
    seen_map: u64,
    seen_ticket: u64,
    /// Cluster state that the map in use belongs to.
    state: u64,
    tenant: Vec<u8>,
    keep_keys: bool,
    puts: PutBook,
    deadline: Duration,
    bounce: Option<Buffer>,
    open: Vec<open::PendingBatch>,
    striping: stripes::Striping,
    capacity: capacity::Capacity,
    near: near::Nearness,
    reports: silence::Reports,
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
        if !config.shared_memory && !config.tcp && config.rdma.mode != RdmaUse::Require {
            return Err(Error::Argument(
                "neither shared memory nor TCP is allowed, and RDMA is not required: no path to any node".to_owned(),
            ));
        }
        let name = link.tenant_meant(&config.tenant).to_owned();
        link.hold_ticket(&name)?;
        let seen_map = link.map_generation();
        let first = link.state_map().ok_or_else(|| Error::Argument("there is no cluster map yet".to_owned()))?;
        let client = Config {
            cluster: config.control.cluster().to_owned(),
            client: random_u64()?,
            // Without a boot id, no node counts as local to this host.
            host: cpu::boot_id().unwrap_or_default(),
            lanes: config.lanes,
            shared: config.shared_memory,
            // Objects are copied through the mapped pool of their shard, or streamed over TCP. CMA (the kernel's
            // copies between processes) serves segments, which a client of the store does not use.
            cma: false,
            stream: config.tcp && config.rdma.mode != RdmaUse::Require,
            hedge_ns: config.hedge.as_nanos().min(u64::MAX.into()) as u64,
            spread: config.spread,
            ..Config::default()
        };
        let (rdma, tls) = (config.rdma.devices()?, link.keychain(config.data_tls)?);
        let host = HostConfig { verify_shared: config.verify_shared, rdma, tls, ..HostConfig::default() };
        let mut initiator = Initiator::new(client, &host, config.pacing)?;
        initiator.set_map((*first.map).clone());
        let (tenant, keep_keys) = (name.into_bytes(), config.keep_keys);
        if tenant.len() > Limits::NAME_BYTES {
            let text =
                format!("the tenant's name has {} bytes, over the limit of {}", tenant.len(), Limits::NAME_BYTES);
            return Err(Error::Argument(text));
        }
        let (state, puts, deadline) = (first.state, PutBook::new(), config.deadline);
        let (bounce, open, seen_ticket) = (None, Vec::new(), 0);
        let mut client = Self {
            initiator,
            link,
            seen_map,
            seen_ticket,
            state,
            tenant,
            keep_keys,
            puts,
            deadline,
            bounce,
            open,
            striping: stripes::Striping::new(config.stripe_bytes()),
            capacity: capacity::Capacity::default(),
            near: near::Nearness::default(),
            reports: silence::Reports::default(),
        };
        client.follow_map();
        Ok(client)
    }

    /// Returns the control link, to be shared with other clients.
    #[must_use]
    pub const fn link(&self) -> &ControlLink {
        &self.link
    }

    /// Registers memory with this client.
    pub fn register(&mut self, region: Arc<Region>) -> Buffer {
        let index = self.initiator.add_buffer(Arc::clone(&region));
        Buffer::new(region, index)
    }

    /// Unregisters memory.
    #[allow(clippy::needless_pass_by_value, reason = "the buffer is of no use afterwards")]
    pub fn unregister(&mut self, buffer: Buffer) {
        self.initiator.remove_buffer(buffer.index());
    }

    /// Returns the number of gets that were sent to a replica owner so far, because the owner was slower than the hedge
    /// delay ([`ClientConfig::hedge`]) or unreachable.
    pub fn hedged_gets(&mut self) -> u64 {
        self.initiator.books().counters().second_asked
    }

    /// Returns the digest under which this client's key is stored.
    ///
    /// # Errors
    /// When the key is empty or too long.
    pub fn digest(&self, key: &[u8]) -> Result<Digest, Error> {
        digest_of(&self.tenant, key)
    }

    pub(crate) const fn initiator(&mut self) -> &mut Initiator {
        &mut self.initiator
    }

    /// Switches to the newest map and ticket.
    pub(crate) fn follow_map(&mut self) {
        let ticket = self.link.ticket_generation();
        if ticket != self.seen_ticket
            && let Some(credential) = self.link.credential()
        {
            self.seen_ticket = ticket;
            self.initiator.set_credential(credential);
        }
        let generation = self.link.map_generation();
        if generation != self.seen_map
            && let Some(known) = self.link.state_map()
        {
            self.seen_map = generation;
            let map = (*known.map).clone();
            // A control plane that lost its state numbers epochs from the start. The old map is used until nodes
            // join the new state.
            if self.state == known.state {
                self.initiator.set_map(map);
            } else if !map.members.is_empty() {
                self.state = known.state;
                self.initiator.adopt_map(map);
            }
        }
    }

    fn problem(&self, what: String, status: Status) -> Error {
        let cause = match status {
            Status::Unreachable | Status::DeadlineExceeded | Status::Incompatible => {
                self.initiator.last_problem().map(str::to_owned)
            }
            Status::TicketEnded => self.link.holder().why_ended(),
            _ => None,
        };
        Error::Status { what, status, cause }
    }

    /// Stores registered memory under a key.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn put_from(&mut self, key: &[u8], slice: Slice) -> Result<Put, Error> {
        self.put_from_with(key, slice, &PutOptions::default())
    }

    /// Stores many objects; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn batch_put_from(&mut self, items: &[(impl AsRef<[u8]>, Slice)]) -> Result<Vec<Result<Put, Error>>, Error> {
        self.batch_put_from_with(items, &PutOptions::default())
    }

    /// Reads the object under a key into registered memory; `None` when there is none.
    ///
    /// # Errors
    /// When the memory is too small or the owner does not answer.
    pub fn get_into(&mut self, key: &[u8], slice: Slice) -> Result<Option<Got>, Error> {
        let mut outcomes = self.batch_get_into(&[(key, slice)])?;
        outcomes.pop().unwrap_or(Ok(None))
    }

    /// Builds a get of an object into a slice. Requests at most one payload: longer objects are striped.
    fn get_request(&self, key: &[u8], slice: Slice) -> Result<Request, Error> {
        let local = Local { bytes: slice.local().bytes.min(Limits::PAYLOAD_BYTES), ..slice.local() };
        Ok(Request::Get(self.digest(key)?, local))
    }

    fn got(&self, result: TaskResult, slice: Slice) -> Result<Option<Got>, Error> {
        match result.status {
            Status::Ok => Ok(Some(Got { bytes: result.bytes, version: result.version })),
            Status::NotFound => Ok(None),
            Status::BufferTooSmall => {
                let what = format!("get of {} bytes into {}", result.bytes, slice.local().bytes);
                Err(self.problem(what, Status::BufferTooSmall))
            }
            status => Err(self.problem("get".to_owned(), status)),
        }
    }

    /// Reads many objects; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn batch_get_into(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let requests: Result<Vec<Request>, Error> =
            items.iter().map(|(key, slice)| self.get_request(key.as_ref(), *slice)).collect();
        let results = self.run(&requests?)?;
        let outcome = |(result, (key, slice)): (TaskResult, &(_, Slice))| {
            if result.status == Status::Striped {
                return self.get_striped(self.digest(AsRef::as_ref(key))?, *slice);
            }
            self.got(result, *slice)
        };
        Ok(results.into_iter().zip(items).map(outcome).collect())
    }

    /// Stores a copy of these bytes under a key.
    ///
    /// # Errors
    /// When they cannot be stored: the status says why.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<Put, Error> {
        self.put_with(key, value, &PutOptions::default())
    }

    /// Returns a copy of the object under a key; `None` when there is none.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let mut bounce = self.bounce(BOUNCE_BYTES)?;
        // An object may be replaced by a longer one between two attempts; repeatedly, that is not to be expected.
        for _ in 0..4 {
            let whole = bounce.slice(0, bounce.region().bytes());
            let result = self.run_one(self.get_request(key, whole)?)?;
            if result.status == Status::BufferTooSmall {
                bounce = self.bounce(usize::try_from(result.bytes).unwrap_or(usize::MAX))?;
                continue;
            }
            let got = if result.status == Status::Striped {
                let digest = self.digest(key)?;
                let Some(head) = self.head_of(digest)? else { continue };
                bounce = self.bounce(usize::try_from(head.bytes).unwrap_or(usize::MAX))?;
                match self.get_striped(digest, bounce.slice(0, bounce.region().bytes())) {
                    // Replaced by a longer object meanwhile.
                    Err(why) if why.status() == Some(Status::BufferTooSmall) => continue,
                    got => got?,
                }
            } else {
                self.got(result, whole)?
            };
            let Some(got) = got else { return Ok(None) };
            let mut value = vec![0; got.bytes as usize];
            bounce.region().copy_out(0, &mut value);
            return Ok(Some(value));
        }
        Err(self.problem("get".to_owned(), Status::BufferTooSmall))
    }

    /// Returns the client's bounce buffer, grown to at least `bytes`.
    fn bounce(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let had = self.bounce.take();
        let new = || RegionOptions {
            huge: HugePages::Try,
            ..RegionOptions::new("kvplane-bounce", bytes.max(BOUNCE_BYTES).next_power_of_two())
        };
        let buffer = self.room(had, bytes, new)?;
        self.bounce = Some(buffer.clone());
        Ok(buffer)
    }
}

pub(crate) fn digest_of(tenant: &[u8], key: &[u8]) -> Result<Digest, Error> {
    check_key(key)?;
    Ok(Digest::of(tenant, key))
}

fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() || key.len() > Limits::KEY_BYTES {
        return Err(Error::Argument(format!("a key has 1 to {} bytes, not {}", Limits::KEY_BYTES, key.len())));
    }
    Ok(())
}
