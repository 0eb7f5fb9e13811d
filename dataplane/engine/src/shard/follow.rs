//! A shard's objects, seen from outside the data path: their events, what there is, and single objects.

use std::sync::mpsc::SyncSender;

use kvplane_proto::Digest;
use kvplane_store::events::EventPage;
use kvplane_store::service::{ReplicaProgress, Service, SnapshotPage};

use kvplane_store::{TenantLease, TenantUse};

use super::command::Command;
use super::error::ShardError;
use super::handle::ShardHandle;
use super::limits::ANSWER_DEADLINE;

/// Where an object is, and how long it is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ObjectPlaces {
    /// In memory: its offset in the pool and its size.
    pub memory: Option<(u64, u64)>,
    /// On the SSD: its size.
    pub ssd: Option<u64>,
}

/// A place in a list, a tenant's name, a key.
pub type PlacedName = (usize, Vec<u8>, Vec<u8>);

impl ShardHandle {
    /// Keeps the latest so many events of its objects from now on, and says so to `bell` when there are new ones,
    /// without waiting where it is full; 0 keeps none.
    ///
    /// # Errors
    /// When its mailbox is full.
    pub fn keep_events(&self, capacity: usize, bell: Option<SyncSender<()>>) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            host.service().control().keep_events(capacity);
            host.follow(bell);
        })))
    }

    /// At most `most` events from the number `from` on.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn read_events(&self, from: u64, most: usize) -> Result<EventPage, ShardError> {
        self.ask_service(move |service| service.inspect().read_events(from, most))
    }

    /// Some of the objects there are: see [`kvplane_store::service::Inspection::snapshot_objects`].
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn snapshot_objects(&self, cursor: u64, most: usize) -> Result<SnapshotPage, ShardError> {
        self.ask_service(move |service| service.inspect().snapshot_objects(cursor, most))
    }

    /// The number of the next event.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn next_event(&self) -> Result<u64, ShardError> {
        self.ask_service(|service| service.inspect().next_event())
    }

    /// Where each of these objects is. Counts as no access.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn find(&self, digests: Vec<Digest>) -> Result<Vec<ObjectPlaces>, ShardError> {
        self.ask_service(move |service| digests.into_iter().map(|digest| found(service, digest)).collect())
    }

    /// These objects are to have replicas with their replica owners: how far each is. See
    /// [`kvplane_store::service::Control::want_copy`].
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn want_copies(&self, digests: Vec<Digest>) -> Result<Vec<ReplicaProgress>, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| {
            let (now_ns, service) = (host.now_ns(), host.service());
            digests.into_iter().map(|digest| service.control().want_copy(digest, now_ns)).collect()
        })
    }

    /// These tenants there are from now on: see [`kvplane_store::service::Control::set_tenants`].
    ///
    /// # Errors
    /// When its mailbox is full.
    pub fn set_tenants(&self, leases: Vec<TenantLease>, strict: bool) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            host.service().control().set_tenants(&leases, strict);
        })))
    }

    /// Bytes of its pool, and what each tenant has of it.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn tenants(&self) -> Result<(u64, Vec<TenantUse>), ShardError> {
        self.ask_service(|service| {
            let pool_bytes = service.store().map_or(0, |store| store.config().pool_bytes);
            (pool_bytes, service.inspect().tenants())
        })
    }

    /// The names of these objects: of each that has one behind it in memory its place here, its tenant and its key.
    ///
    /// # Errors
    /// When the shard does not answer.
    pub fn names_of(&self, digests: Vec<Digest>) -> Result<Vec<PlacedName>, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| host.names_of(&digests))
    }

    fn ask_service<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Service) -> T + Send + 'static,
    ) -> Result<T, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| question(host.service()))
    }
}

fn found(service: &Service, digest: Digest) -> ObjectPlaces {
    let object = service.store().and_then(|store| store.peek(digest));
    ObjectPlaces {
        memory: object.map(|view| (view.extent.offset, view.extent.bytes)),
        ssd: service.inspect().ssd_bytes(digest),
    }
}
