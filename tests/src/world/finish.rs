//! End of a run: faults stop, all open batches complete, everything works again, and no memory is held.

use crate::world::World;
use crate::world::check::results::What;
use crate::world::check::{Rule, broken};
use crate::world::cluster::fetch::Fetcher;
use crate::world::cluster::node::ShardIncarnation;
use crate::world::scenario::MS;
use crate::world::workload::LONGEST_NS;
use kvplane_proto::Status;
use kvplane_store::service::Tiering;

/// Time for members to rejoin, maps to arrive and lanes to reconnect: the control plane's grace, heartbeat deadlines
/// and the longest backoff of a lane, with a margin.
const HEAL_NS: u64 = 8_000 * MS;
/// All pauses between the retries of a failing write, with a margin.
const RETRIES_NS: u64 = 100_000 * MS;
/// Some walks through the SSD for objects that lack a replica, each a pause and the walk through memory, with a margin.
const REPLICATE_NS: u64 = 10_000 * MS;
/// Deadline of a final put or get.
const PROBE_NS: u64 = 3_000 * MS;

impl World {
    /// Runs the whole scenario.
    pub(crate) fn live(&mut self) {
        let faults_until_ns = self.scenario.faults_until_ns;
        self.run_until(faults_until_ns, |_| false);
        self.calm();
        self.scrub_disks();
        let until_ns = self.now_ns + HEAL_NS.max(LONGEST_NS + 1000 * MS);
        self.run_until(until_ns, |_| false);
        self.check_batches();
        if self.scenario.damages_records {
            // A restart makes replicas anew from records, and would lose objects with damage that nobody has found.
            self.check_records();
        } else {
            self.audit();
        }
        self.probe_doubled();
        self.probe_everything();
        self.rest();
        if !self.are_replicas_there() {
            // What the last puts and gets evicted lacks a replica.
            let until_ns = self.now_ns + REPLICATE_NS;
            self.run_until(until_ns, Self::are_replicas_there);
            self.rest();
        }
        self.check_quotas();
        self.check_rest();
        self.collect();
    }

    /// Lets all requests and writes end.
    fn rest(&mut self) {
        let until_ns = self.now_ns + 1000 * MS;
        self.run_until(until_ns, |_| false);
        // An object whose write failed is pinned until the retries are over.
        let until_ns = self.now_ns + RETRIES_NS;
        self.run_until(until_ns, Self::are_tiers_written);
    }

    /// Returns true if no shard has pending writes to its disk.
    fn are_tiers_written(&self) -> bool {
        let behind = |incarnation: &ShardIncarnation| {
            incarnation.service.inspect().tier().map(Tiering::snapshot).is_some_and(|snapshot| snapshot.backlog > 0)
        };
        !self.incarnations.iter().any(|incarnation| incarnation.alive && behind(incarnation))
    }

    /// Returns true if no shard lacks a replica that must exist at rest.
    fn are_replicas_there(&self) -> bool {
        let mut alive = (0..self.incarnations.len()).filter(|incarnation| self.incarnations[*incarnation].alive);
        alive.all(|incarnation| self.copies_missing(incarnation).is_none())
    }

    fn check_batches(&mut self) {
        for client in 0..self.scenario.clients {
            let open = self.clients[client].batches.len();
            if open > 0 || !self.clients[client].client.batches().is_empty() {
                self.violate(broken(Rule::Liveness, format!("client {client} has {open} batches that never complete")));
            }
        }
    }

    /// Checks that objects acknowledged with two replicas exist.
    fn probe_doubled(&mut self) {
        let keys: Vec<usize> = self.doubled.keys().copied().collect();
        self.statistics.doubled += keys.len() as u64;
        for key in keys {
            let capacity = self.scenario.object_bytes;
            self.probe(key % self.scenario.clients, key, What::Get { capacity }, &[Status::Ok]);
        }
    }

    /// Puts and reads back every key; every client reaches the shards that it needs.
    fn probe_everything(&mut self) {
        let turns = self.scenario.keys.max(self.scenario.clients * 2);
        for turn in 0..turns {
            let (key, client) = (turn % self.scenario.keys, turn % self.scenario.clients);
            let bytes = 1 + (self.scenario.object_bytes - 1) * (turn as u64 + 1) / turns as u64;
            let write = self.shadow.write(key, bytes);
            if self.tiers_degraded() {
                return;
            }
            // An object's record on a disk may turn out to be damaged on access, or have been reclaimed. A pool that is
            // smaller than its objects may evict one between its put and its get.
            let hurt = self.scenario.tier.as_ref().is_some_and(|tier| tier.faults.any() || tier.may_reclaim())
                || self.scenario.device.is_some()
                || self.scenario.quotas;
            let (put, get): (&[Status], &[Status]) = if hurt {
                (&[Status::Ok, Status::Exists, Status::NoSpace, Status::QuotaExceeded], &[Status::Ok, Status::NotFound])
            } else {
                (&[Status::Ok, Status::Exists], &[Status::Ok])
            };
            self.probe(client, key, What::Put { write, bytes, replace: false }, put);
            self.probe(client, key, What::Get { capacity: self.scenario.object_bytes }, get);
            if self.violation.is_some() {
                return;
            }
        }
    }

    fn probe(&mut self, client: usize, key: usize, what: What, good: &[Status]) {
        let Some(asked) = self.ask(client, key, what) else {
            self.violate(broken(Rule::Liveness, format!("client {client} has no free buffer left")));
            return;
        };
        let count = |world: &Self| good.iter().map(|&status| world.statistics.with_status(status)).sum::<u64>();
        let before = count(self);
        let Some(batch) = self.submit(client, vec![asked], self.now_ns + PROBE_NS) else { return };
        let until_ns = self.now_ns + 2 * PROBE_NS;
        self.run_until(until_ns, |world| !world.clients[client].batches.contains_key(&batch));
        if count(self) != before + 1 {
            let what =
                format!("client {client}, key {key}: {what:?} did not end with {good:?} although all faults are over");
            for (index, incarnation) in
                self.incarnations.iter().enumerate().filter(|(_, incarnation)| incarnation.alive)
            {
                let snapshot = incarnation.service.inspect().tier().map(Tiering::snapshot);
                self.trace.line(self.now_ns, || format!("incarnation {index}: {snapshot:?}"));
            }
            self.violate(broken(Rule::Liveness, what));
        }
    }

    /// Checks that no memory is pinned, reserved, lent or overwritten, and that every object has its name and priority.
    fn check_rest(&mut self) {
        self.check_segments();
        for index in 0..self.incarnations.len() {
            let incarnation = &self.incarnations[index];
            if !incarnation.alive {
                continue;
            }
            incarnation.service.store().check();
            let (moves, limits) = (incarnation.service.inspect().move_counters(), Self::fetch_limits(&self.scenario));
            let idle = self.clients[incarnation.fetcher].fetcher.as_ref().is_some_and(Fetcher::is_idle);
            if limits.bytes_per_s > 0 && (moves.importing_slots > 0 || !idle) {
                let what = format!("incarnation {index} has not imported all objects: {moves:?}, idle {idle}");
                self.violate(broken(Rule::Liveness, what));
                return;
            }
            if let Some(what) = self.exports_left(index) {
                self.violate(broken(Rule::Liveness, what));
                return;
            }
            if let Some(what) = self.copies_missing(index) {
                self.violate(broken(Rule::Liveness, what));
                return;
            }
            let quarantined = incarnation.device.as_ref().map_or(0, |device| device.quarantined);
            let (stats, lent) = (incarnation.service.store().stats(), incarnation.ledger.len() - quarantined);
            let is_held = stats.pins != 0 || stats.reservations != quarantined as u64;
            if is_held || lent != 0 {
                let what = format!("incarnation {index}: {lent} ranges lent, {stats:?}");
                self.violate(broken(Rule::Leak, what));
            }
            self.check_device(index);
            self.check_far(index);
            self.check_memory(index);
            for key in 0..self.scenario.keys {
                self.check_name(index, self.shadow.digest(key));
            }
        }
        for client in 0..self.scenario.clients {
            let memory = &self.clients[client].memory;
            let (lent, checked) = (memory.lent(), memory.check());
            self.require(checked);
            if lent > 0 {
                self.violate(broken(Rule::Leak, format!("client {client} has {lent} buffers lent for no batch")));
            }
        }
    }

    fn collect(&mut self) {
        for client in &self.clients {
            let counters = client.client.counters();
            self.statistics.corrupt += counters.corrupt;
            self.statistics.stale_frames += counters.stale_frames;
            self.statistics.chosen += counters.second_chosen;
        }
        let alive: Vec<usize> =
            (0..self.incarnations.len()).filter(|incarnation| self.incarnations[*incarnation].alive).collect();
        alive.iter().for_each(|incarnation| self.count_device(*incarnation));
        alive.iter().for_each(|incarnation| self.count_far(*incarnation));
        alive.into_iter().for_each(|incarnation| self.count_kept(incarnation));
        for incarnation in self.incarnations.iter().filter(|incarnation| incarnation.alive) {
            self.statistics.hot += incarnation.service.inspect().copy_counters().hot;
            self.statistics.evictions += incarnation.service.store().stats().evictions;
        }
    }
}
