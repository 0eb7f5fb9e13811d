//! Read-only view of a service, for its host, subscribers of object events, and operators.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, Slot};
use kvplane_proto::map::ShardKey;

use super::damage::RepairCounters;
use super::kept_memory::{KeptReport, opening_of};
use super::migration::MoveCounters;
use super::objects::Objects;
use super::replication::CopyCounters;
use super::segments::Segments;
use super::shard::sessions::SessionCounters;
use super::shard::timing::ServiceTimes;
use super::tiering::Tiering;
use super::types::{PeerKey, PoolBytes, ServiceCounters};
use crate::TenantUse;
use crate::events::EventPage;
use crate::store::Store;
use kvplane_proto::events::ObjectMedium;
use kvplane_tier::RecordView;

/// Page of a snapshot: objects with their sizes and tiers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SnapshotPage {
    /// Objects. One that is in memory and on the SSD is listed twice.
    pub objects: Vec<(Digest, ObjectMedium, u64)>,
    /// Cursor of the next page; `None` after the last.
    pub cursor: Option<u64>,
}

/// First cursor of the SSD.
const SSD: u64 = 1 << 40;

/// Read-only view of a service.
#[derive(Clone, Copy)]
pub struct Inspection<'a> {
    objects: &'a Objects,
    segments: &'a Segments,
}

impl<'a> Inspection<'a> {
    pub(super) const fn new(objects: &'a Objects, segments: &'a Segments) -> Self {
        Self { objects, segments }
    }

    const fn store(self) -> &'a Store {
        &self.objects.local.shard.store
    }

    /// Returns the registered memory.
    #[must_use]
    pub const fn segments(self) -> &'a Segments {
        self.segments
    }

    /// Returns the tier, if there is one.
    #[must_use]
    pub fn tier(self) -> Option<&'a Tiering> {
        self.objects.local.tiering.as_deref()
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counters(self) -> ServiceCounters {
        let shard = &self.objects.local.shard;
        let (read_bytes, write_bytes) = self.segments.bytes();
        let &SessionCounters { greeted, closed, unauthenticated, tickets_ended, unauthorized } =
            shard.sessions.counters();
        let unauthorized = shard.counters.unauthorized + unauthorized;
        let connections =
            ServiceCounters { greeted, closed, unauthenticated, tickets_ended, unauthorized, ..shard.counters };
        ServiceCounters { read_bytes, write_bytes, ..connections }
    }

    /// Returns true if an image of a former process's objects waits for a map that gives this shard slots.
    #[must_use]
    pub fn awaits_map(self) -> bool {
        self.objects.local.kept.as_ref().is_some_and(|kept| kept.is_pending())
    }

    /// Returns this incarnation if the former process's image still counts and is to name it from now on, because it is
    /// a member of the cluster.
    pub(crate) fn image_heir(self) -> Option<Incarnation> {
        let kept = self.objects.local.kept.as_ref().filter(|kept| kept.is_inherited());
        kept.map(|_| self.objects.local.shard.ownership.identity().incarnation)
    }

    /// Returns the number of the present opening of the SSD, which counts them; 0 without one.
    #[must_use]
    pub fn ssd_opening(self) -> u64 {
        opening_of(self.tier())
    }

    /// Returns what became of the former process's objects; `None` before a map has decided about them, or if memory is
    /// not kept.
    #[must_use]
    pub fn kept(self) -> Option<KeptReport> {
        self.objects.local.kept.as_ref()?.report(self.objects.shard())
    }

    /// Returns true if a peer on this host has pins or reservations: it may access the pool through its mapping.
    #[must_use]
    pub fn lends_pool(self) -> bool {
        self.objects.local.shard.sessions.lend_pool()
    }

    /// Returns the latency of requests until now.
    #[must_use]
    pub fn times(self, now_ns: u64) -> ServiceTimes {
        self.objects.local.shard.answers.timed.snapshot(now_ns)
    }

    /// Returns true if there was a device pool, and its device is lost.
    #[must_use]
    pub fn lost_device_pool(self) -> bool {
        self.objects.local.device.as_ref().is_some_and(|device| device.is_lost())
    }

    /// Returns the usage of each tenant.
    #[must_use]
    pub fn tenants(self) -> Vec<TenantUse> {
        self.store().tenants().uses()
    }

    /// Returns true if a connection was welcomed; the shard keeps no state for it before.
    #[must_use]
    pub fn is_welcome(self, peer: PeerKey) -> bool {
        self.objects.local.shard.sessions.is_welcome(peer)
    }

    /// Returns true if an RDMA connection may be negotiated on this connection.
    #[must_use]
    pub fn may_carry(self, peer: PeerKey) -> bool {
        self.objects.local.shard.sessions.may_carry(peer)
    }

    /// Returns the epoch of the map by which slots are served: not the newest received while that one is not durable.
    #[must_use]
    pub const fn served_epoch(self) -> Epoch {
        self.objects.local.shard.ownership.epoch()
    }

    /// Returns true if a slot is served.
    #[must_use]
    pub fn serves(self, slot: Slot) -> bool {
        self.objects.local.shard.ownership.owned().has(slot)
    }

    /// Returns true if a slot's objects are kept here for its new owner.
    #[must_use]
    pub fn exports(self, slot: Slot) -> bool {
        self.objects.local.shard.exports.has_slot(slot)
    }

    /// Returns the shard that the objects of a slot are fetched from, if any.
    #[must_use]
    pub fn source_of(self, slot: Slot) -> Option<ShardKey> {
        self.objects.migration.source_of(slot)
    }

    /// Returns the number of slots whose replicas this shard, as their replica owner, cannot record on its SSD yet: the
    /// SSD has, or may have, other records of them.
    #[must_use]
    pub fn replica_slots_unrecorded(self) -> usize {
        let ssd = self.objects.local.ssd().filter(|ssd| !ssd.is_degraded());
        ssd.map_or(0, |ssd| ssd.replicas.closed())
    }

    /// Returns the former owners of slots that this shard has imported, as far as they do not know that yet.
    pub fn unreported(self) -> impl Iterator<Item = ShardKey> + 'a {
        self.objects.migration.unreported()
    }

    /// Returns the progress of migration.
    #[must_use]
    pub fn move_counters(self) -> MoveCounters {
        let Objects { local, migration, replication, .. } = self.objects;
        let all_here = migration.is_done() && replication.has_walked();
        MoveCounters {
            owned_slots: local.shard.ownership.owned().count(),
            exporting_slots: local.shard.exports.len() as u64,
            exports_completed: local.shard.exports.reported(),
            settled: all_here || migration.limits().bytes_per_s == 0,
            ..migration.counters()
        }
    }

    /// Returns the counters of replication.
    #[must_use]
    pub fn copy_counters(self) -> CopyCounters {
        self.objects.replication.counters(&self.objects.local.shard)
    }

    /// Returns the counters of damage in memory and on the SSD, and of its repair.
    #[must_use]
    pub fn repairs(self) -> RepairCounters {
        self.objects.damage.counters(&self.objects.local)
    }

    /// Returns the shards that this one exchanges replicas of a slot with: the replica owners of its own slot, or the
    /// owner of a slot of which it is a replica owner.
    #[must_use]
    pub fn replica_peers(self, slot: Slot) -> &'a [ShardKey] {
        let replicas = &self.objects.local.shard.replicas;
        match replicas.relation(slot) {
            Some(relation) => core::slice::from_ref(&relation.owner),
            None => replicas.owners_of(slot),
        }
    }

    /// Returns the replica owners of a slot of this shard, in the order of the map.
    #[must_use]
    pub fn replica_owners(self, slot: Slot) -> &'a [ShardKey] {
        self.objects.local.shard.replicas.owners_of(slot)
    }

    /// Returns true if an object that this shard has in memory is to be replicated and has fewer replicas than its slot
    /// has owners for.
    #[must_use]
    pub fn lacks_replicas(self, digest: Digest) -> bool {
        let shard = &self.objects.local.shard;
        let objects = shard.store.objects();
        objects.replica(digest).is_owed_a_copy() && shard.replicas.lacks(digest, objects.copies(digest))
    }

    /// Returns the epoch since which this shard has been a replica owner of a slot, for the same incarnation of the
    /// owner.
    #[must_use]
    pub fn second_since(self, slot: Slot) -> Option<Epoch> {
        self.objects.local.shard.replicas.relation(slot).map(|relation| relation.since)
    }

    /// Returns the length of an object on the SSD, if the SSD has it. Does not count as an access.
    #[must_use]
    pub fn ssd_bytes(self, digest: Digest) -> Option<u64> {
        self.objects.local.on_ssd(digest).map(|view| view.payload_bytes.into())
    }

    /// Returns the record of an object, or of a replica, on the SSD, if the SSD has it. Does not count as an access.
    #[must_use]
    pub fn ssd_record(self, digest: Digest) -> Option<RecordView> {
        self.tier()?.ssd.locate_any(digest)
    }

    /// Returns the record of a replica that this shard has as a replica owner on its SSD. Does not count as an access.
    #[must_use]
    pub fn replica_record(self, digest: Digest) -> Option<RecordView> {
        self.tier()?.ssd.locate_replica(digest)
    }

    /// Returns the names of those of these objects that are in memory with a name: index in `digests`, tenant and key.
    #[must_use]
    pub fn names_of(self, digests: &[Digest], pool: &dyn PoolBytes) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        self.objects.local.shard.names_of(digests, pool)
    }

    /// Returns the number of the next event.
    #[must_use]
    pub fn next_event(self) -> u64 {
        self.store().objects().events().next()
    }

    /// Returns at most `most` events from the number `from` on.
    #[must_use]
    pub fn read_events(self, from: u64, most: usize) -> EventPage {
        self.store().objects().events().read(from, most)
    }

    /// Returns a page of the objects from `cursor` on, 0 at first, looking at no more than `most`. Objects that are
    /// committed or removed meanwhile may or may not be in it; their events tell. Records on the SSD may move while
    /// others are removed, and be missed.
    #[must_use]
    pub fn snapshot_objects(self, cursor: u64, most: usize) -> SnapshotPage {
        if cursor < SSD {
            let (objects, next) = self.store().objects().walk(cursor as u32, most as u32);
            let objects = objects.into_iter().map(|(digest, bytes)| (digest, ObjectMedium::Memory, bytes)).collect();
            let rest = self.tier().is_some().then_some(SSD);
            return SnapshotPage { objects, cursor: next.map(u64::from).or(rest) };
        }
        let Some(tiering) = self.tier() else { return SnapshotPage::default() };
        let (views, next) = tiering.ssd.walk((cursor - SSD) as usize, most);
        let objects =
            views.into_iter().map(|view| (view.digest, ObjectMedium::Ssd, view.payload_bytes.into())).collect();
        SnapshotPage { objects, cursor: next.map(|at| SSD + at as u64) }
    }
}
