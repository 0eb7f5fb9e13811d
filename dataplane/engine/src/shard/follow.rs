//! Access to a shard's objects from outside the data path: their events, lists of objects, and single objects.

use std::sync::mpsc::SyncSender;

use kvplane_proto::Digest;
use kvplane_store::events::EventPage;
use kvplane_store::service::{ReplicaProgress, Service, SnapshotPage};

use super::command::Command;
use super::error::ShardError;
use super::handle::ShardHandle;
use super::limits::ANSWER_DEADLINE;
use super::tenants::ShardTenants;

/// Locations of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ObjectPlaces {
    /// Offset in the pool and size, if it is in memory.
    pub memory: Option<(u64, u64)>,
    /// Size on the SSD, if it has a record there.
    pub ssd: Option<u64>,
}

/// Index in a list, name of the tenant, key.
pub type PlacedName = (usize, Vec<u8>, Vec<u8>);

impl ShardHandle {
    /// Keeps the latest `capacity` events of its objects from now on, and notifies `subscriber` of new ones, without
    /// waiting if its channel is full; 0 keeps none.
    ///
    /// # Errors
    /// If its mailbox is full.
    pub fn keep_events(&self, capacity: usize, subscriber: Option<SyncSender<()>>) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            host.service().control().keep_events(capacity);
            host.follow(subscriber);
        })))
    }

    /// Returns at most `most` events from the number `from` on.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn read_events(&self, from: u64, most: usize) -> Result<EventPage, ShardError> {
        self.ask_service(move |service| service.inspect().read_events(from, most))
    }

    /// Returns a page of the shard's objects: see [`kvplane_store::service::Inspection::snapshot_objects`].
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn snapshot_objects(&self, cursor: u64, most: usize) -> Result<SnapshotPage, ShardError> {
        self.ask_service(move |service| service.inspect().snapshot_objects(cursor, most))
    }

    /// Returns the number of the next event.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn next_event(&self) -> Result<u64, ShardError> {
        self.ask_service(|service| service.inspect().next_event())
    }

    /// Returns the locations of these objects. Does not count as an access.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn find(&self, digests: Vec<Digest>) -> Result<Vec<ObjectPlaces>, ShardError> {
        self.ask_service(move |service| digests.into_iter().map(|digest| found(service, digest)).collect())
    }

    /// Requests replicas of these objects on their replica owners, and returns the progress of each. See
    /// [`kvplane_store::service::Control::want_copy`].
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn want_copies(&self, digests: Vec<Digest>) -> Result<Vec<ReplicaProgress>, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| {
            let (now_ns, service) = (host.now_ns(), host.service());
            digests.into_iter().map(|digest| service.control().want_copy(digest, now_ns)).collect()
        })
    }

    /// Returns its tenants.
    #[must_use]
    pub const fn tenants(&self) -> ShardTenants<'_> {
        ShardTenants::of(self)
    }

    /// Returns the names of these objects, for each whose tail is in memory: its index in `digests`, its tenant and its
    /// key.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn names_of(&self, digests: Vec<Digest>) -> Result<Vec<PlacedName>, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| host.names_of(&digests))
    }

    pub(super) fn ask_service<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Service) -> T + Send + 'static,
    ) -> Result<T, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| question(host.service()))
    }
}

fn found(service: &Service, digest: Digest) -> ObjectPlaces {
    let object = service.store().peek(digest);
    ObjectPlaces {
        memory: object.map(|view| (view.extent.offset, view.extent.bytes)),
        ssd: service.inspect().ssd_bytes(digest),
    }
}
