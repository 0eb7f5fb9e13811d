//! Settings and commands of the host, on behalf of the control plane and of operators.

use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::tenants::{TenantLease, TenantSsdLease};
use kvplane_ticket::{Challenges, TicketKey};

use super::damage::{RepairCounters, ScrubPace};
use super::fetches::FetchLimits;
use super::kept_memory::{Discard, FormerImage, KeptMemory, KeptReport};
use super::objects::Objects;
use super::replication::ReplicaProgress;
use super::shared_objects::SharedObjects;
use super::tiering::SsdUsage;
use super::types::{PeerKey, PoolBytes};
use crate::store::PoolSums;

/// Mutable view of a service, for settings and commands.
pub struct Control<'a> {
    objects: &'a mut Objects,
}

impl<'a> Control<'a> {
    pub(super) const fn new(objects: &'a mut Objects) -> Self {
        Self { objects }
    }

    /// Requires tickets of connections from now on, and challenges clients with these challenges.
    pub fn want_tickets(self, challenges: Challenges) {
        self.objects.local.shard.sessions.want_tickets(challenges);
    }

    /// Installs the keys of the control plane, as of this ticket time in seconds.
    pub fn learn_keys(self, keys: Vec<TicketKey>, seconds: u64, now_ns: u64) {
        self.objects.local.shard.sessions.learn_keys(keys, seconds, now_ns);
    }

    /// Binds a connection to one tenant, as if by a ticket: for a host that authenticates by itself.
    pub fn bind(self, peer: PeerKey, tenant: u32) {
        if let Some(session) = self.objects.local.shard.sessions.get_mut(peer) {
            session.pass.tenant = Some(tenant);
        }
    }

    /// Sets the tenants beside the default one. `strict`: other tenants may not put; otherwise they have no quota.
    pub fn set_tenants(self, leases: &[TenantLease], strict: bool) {
        let shard = &mut self.objects.local.shard;
        shard.tenants.is_strict = strict;
        shard.store.tenants_mut().set(leases);
    }

    /// Sets the tenants' leases and weights of the SSD. Does nothing without an SSD.
    pub fn set_ssd_tenants(self, leases: &[TenantSsdLease]) {
        if let Some(tiering) = &mut self.objects.local.tiering {
            tiering.ssd.set_tenants(leases);
        }
    }

    /// Returns the use of the SSD by tenants; `None` while recovery has not found all of it.
    #[must_use]
    pub fn ssd_usage(self) -> Option<SsdUsage> {
        match &mut self.objects.local.tiering {
            Some(tiering) => tiering.ssd.usage(),
            None => Some(SsdUsage::default()),
        }
    }

    /// Sets the latency from which a request is slow; above 0.
    pub fn set_slow_after(self, slow_after_ns: u64) {
        self.objects.local.shard.answers.timed.set_slow_after(slow_after_ns);
    }

    /// Keeps the latest `capacity` events from now on; 0 keeps none. Does nothing if the capacity is the same.
    pub fn keep_events(self, capacity: usize) {
        self.objects.local.shard.store.objects_mut().events_mut().keep(capacity);
    }

    /// Sets the limits of background fetching.
    pub fn set_fetch_limits(self, limits: FetchLimits) {
        self.objects.migration.set_limits(limits);
        self.objects.replication.set_heat(limits.hot_bytes_per_s);
    }

    /// Returns the shared tier.
    #[must_use]
    pub const fn shared(self) -> SharedObjects<'a> {
        SharedObjects { local: &mut self.objects.local }
    }

    /// Sets the pace at which objects in memory are compared with their checksums in the background.
    pub fn set_memory_scrub(self, pace: ScrubPace, now_ns: u64) {
        self.objects.damage.set_scrub(pace, now_ns);
    }

    /// Returns the counters of damage, once the repairs of the first damaged object or record are over, and whenever
    /// the number of damaged ones has doubled.
    pub fn poll_repairs(self) -> Option<RepairCounters> {
        self.objects.damage.poll_report(&self.objects.local)
    }

    /// Keeps the shard's memory beyond its process. `found` is the image of the former process's objects, if there was
    /// a process, or the reason why it does not count: the first map that gives the shard slots decides about the
    /// objects. `sums` computes checksums in the pool.
    pub fn keep_memory(self, found: Result<Option<FormerImage>, Discard>, sums: Arc<dyn PoolSums>) {
        self.objects.local.kept = Some(Box::new(KeptMemory::new(found, sums)));
    }

    /// Returns what became of the former process's objects, once.
    pub fn poll_kept(self) -> Option<KeptReport> {
        self.objects.local.kept.as_mut()?.poll_report()
    }

    /// Returns the number of the former process's objects that were found damaged, when the first was found and
    /// whenever it has doubled.
    pub fn poll_kept_damage(self) -> Option<u64> {
        let local = &mut self.objects.local;
        local.kept.as_mut()?.poll_damage(&local.shard)
    }

    /// Returns the image of the shard's objects, at the end of its process: `None` if memory is not kept, or while the
    /// former process's image still counts. The shard answers no request after this. With `lends`, other processes may
    /// still access the pool through their mappings.
    #[must_use]
    pub fn image_memory(self, pool: &dyn PoolBytes, lends: bool) -> Option<FormerImage> {
        let Objects { local, replication, .. } = self.objects;
        let outstanding = replication.outstanding(&mut local.shard);
        local.kept.as_ref()?.image(&mut local.shard, local.tiering.as_deref(), pool, lends, outstanding)
    }

    /// Requests a replica of an object of this shard at the replica owner of its slot, however it was put. Like that of
    /// an object put with two replicas, it is made again whenever it is lost. An object that is only on an SSD is read
    /// into memory first.
    pub fn want_copy(self, digest: Digest, now_ns: u64) -> ReplicaProgress {
        let Objects { local, migration, replication, .. } = self.objects;
        local.shard.now_ns = local.shard.now_ns.max(now_ns);
        replication.want(local, digest, migration.is_coming(digest))
    }
}
