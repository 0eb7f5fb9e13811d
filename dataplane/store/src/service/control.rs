//! What a host sets and orders, on behalf of the control plane and of operators.

use kvplane_proto::Digest;
use kvplane_ticket::{Challenges, TicketKey};

use super::fetches::FetchLimits;
use super::objects::Objects;
use super::replication::ReplicaProgress;
use super::types::PeerKey;
use crate::TenantLease;

/// A service that is set up and given orders.
pub struct Control<'a> {
    objects: &'a mut Objects,
}

impl<'a> Control<'a> {
    pub(super) const fn new(objects: &'a mut Objects) -> Self {
        Self { objects }
    }

    /// Requires tickets of connections from now on, and challenges clients with these.
    pub fn want_tickets(self, challenges: Challenges) {
        self.objects.local.shard.sessions.want_tickets(challenges);
    }

    /// Takes the keys that the control plane has at this ticket time of its own, in seconds.
    pub fn learn_keys(self, keys: Vec<TicketKey>, seconds: u64, now_ns: u64) {
        self.objects.local.shard.sessions.learn_keys(keys, seconds, now_ns);
    }

    /// Binds a connection to one tenant, as if a ticket said so: for a host that knows by itself whose it is.
    pub fn bind(self, peer: PeerKey, tenant: u32) {
        if let Some(session) = self.objects.local.shard.sessions.get_mut(peer) {
            session.pass.tenant = Some(tenant);
        }
    }

    /// These tenants there are from now on, beside the default one. `strict`: nobody else may put; else others have no
    /// quota.
    pub fn set_tenants(self, leases: &[TenantLease], strict: bool) {
        let shard = &mut self.objects.local.shard;
        shard.tenants.is_strict = strict;
        if let Some(store) = &mut shard.store {
            store.set_tenants(leases);
        }
    }

    /// From when on a request is slow; above 0.
    pub fn set_slow_after(self, slow_after_ns: u64) {
        self.objects.local.shard.answers.timed.set_slow_after(slow_after_ns);
    }

    /// Keeps the latest so many events from now on; 0 keeps none. Nothing happens where as many are kept already.
    pub fn keep_events(self, capacity: usize) {
        if let Some(store) = &mut self.objects.local.shard.store {
            store.keep_events(capacity);
        }
    }

    /// How much is fetched in the background from now on.
    pub fn set_fetch_limits(self, limits: FetchLimits) {
        self.objects.migration.set_limits(limits);
        self.objects.replication.set_heat(limits.hot_bytes_per_s);
    }

    /// An object of ours is to have a replica with the replica owner of its slot, however it was put, and to have it
    /// again whenever it is lost, like one that was put with two. What is on an SSD only is read into memory first.
    pub fn want_copy(self, digest: Digest, now_ns: u64) -> ReplicaProgress {
        let Objects { local, migration, replication } = self.objects;
        local.shard.now_ns = local.shard.now_ns.max(now_ns);
        replication.want(local, digest, migration.is_coming(digest))
    }
}
