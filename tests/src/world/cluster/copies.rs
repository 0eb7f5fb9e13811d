//! Replicas: pushes of owners to replica owners, and the check that no replica is left of an object that is
//! acknowledged as removed.

use kvplane_client::TaskResult;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::map::{ClusterMap, ShardKey};
use kvplane_proto::message::{Kind, Operation, PutOptions};
use kvplane_proto::{Digest, FrameFlags, Status};
use kvplane_store::service::{FetchDone, MemoryExtent};
use kvplane_store::{ObjectView, Replica};

use crate::world::World;
use crate::world::check::ledger::Use;
use crate::world::check::memory::Loan;
use crate::world::check::results::{TrackedTask, What};
use crate::world::check::shadow::Commit;
use crate::world::check::{Rule, broken};
use crate::world::cluster::fetch::FETCHES;
use crate::world::network::Way;
use crate::world::network::pipe::OutgoingFrame;
use crate::world::scenario::Mischief;

/// Converts the results of a request to drop replicas.
pub(super) fn drops_done(results: &[TaskResult]) -> FetchDone {
    FetchDone::CopiesDropped(
        results.iter().map(|result| matches!(result.status, Status::Ok | Status::NotFound)).collect(),
    )
}

impl World {
    /// Returns the replica options of a put: the same for the same put.
    pub(crate) fn copies_wanted(&self, asked: &TrackedTask) -> PutOptions {
        let What::Put { write, .. } = asked.what else { return PutOptions::default() };
        let asks = !self.scenario.wishes && (write % 8 != 0 || self.scenario.keeps);
        if self.scenario.replicas < 2 || !asks {
            return PutOptions::default();
        }
        // With more owners: two replicas, or as many as there are owners and more, and a put that waits for some or
        // all.
        let most = usize::from(self.scenario.replicas) - 1;
        let replicas = 2 + if most > 1 { (write / 3 % (most + 2)) as u8 } else { 0 };
        let waits = write % 3 == 0 || self.scenario.keeps;
        let all = self.scenario.keeps || write % 2 == 0;
        let wait_replicas = if !waits {
            0
        } else if all {
            replicas
        } else {
            2
        };
        PutOptions { replicas, wait_replicas, ..PutOptions::default() }
    }

    /// Requests replication of an existing object: every shard gets the request, and the owner carries it out.
    pub(crate) fn wish(&mut self, key: usize) {
        let (digest, now_ns) = (self.shadow.digest(key), self.now_ns);
        for incarnation in 0..self.incarnations.len() {
            if self.incarnations[incarnation].alive && self.nodes[self.incarnations[incarnation].node].up {
                let wished = self.incarnations[incarnation].service.control().want_copy(digest, now_ns);
                self.detail(key as u64, || format!("incarnation {incarnation} is to replicate key {key}: {wished:?}"));
                self.drain_service(incarnation, None);
            }
        }
    }

    /// Lends memory of a shard's client for a push to a replica owner.
    pub(crate) fn lend_copy(
        &mut self,
        index: usize,
        incarnation: usize,
        digest: Digest,
        extent: MemoryExtent,
    ) -> Option<u64> {
        let lent = self.clients[index].memory.lend(Loan::Copy { bytes: extent.bytes }, digest);
        let offset = match lent {
            Ok(offset) => offset?,
            Err(violation) => {
                self.violate(violation);
                return None;
            }
        };
        let lent = self.incarnations[incarnation].ledger.lend(FETCHES, Use::Read, extent.offset, extent.bytes);
        self.require(lent);
        let mut bytes = self.incarnations[incarnation].bytes(extent.offset, extent.bytes);
        if self.scenario.has(Mischief::SpoilCopies) {
            bytes[0] ^= 1;
        }
        self.clients[index].memory.fill(offset, &bytes);
        Some(offset)
    }

    /// Takes the memory back after the push.
    pub(crate) fn copy_sent(&mut self, index: usize, incarnation: usize, extent: MemoryExtent, offset: u64) {
        let taken = self.clients[index].memory.take_back(offset);
        self.require(taken);
        self.incarnations[incarnation].ledger.end(FETCHES, Use::Read, extent.offset);
    }

    /// Checks that the replica owner took the object that the owner had.
    pub(crate) fn observe_copy(&mut self, index: u32, digest: Digest, view: &ObjectView) {
        let Some(connection) = self.connections.get(&index) else { return };
        let (client, incarnation) = (connection.client, connection.incarnation);
        self.incarnations[incarnation].ledger.end(index, Use::Write, view.extent.offset);
        let grown = self.incarnations[incarnation].see_version(view.version);
        self.require(grown);
        self.statistics.copies += 1;
        let bytes = self.incarnations[incarnation].bytes(view.extent.offset, view.extent.bytes);
        let Some(key) = self.shadow.key(digest) else { return };
        let pushed = self.clients[client].fetcher.as_ref().and_then(|fetcher| fetcher.pushed.get(&digest));
        let fits = |version: &&u64| self.shadow.check_read(key, **version, &bytes).is_ok();
        let Some(origin) = pushed.and_then(|pushed| pushed.iter().rev().find(fits)).copied() else {
            let what = format!("incarnation {incarnation} took a replica of key {key} that its owner never had");
            self.violate(broken(Rule::Commit, what));
            return;
        };
        let (version, lineage) = (view.version.0, self.lineage(incarnation));
        self.detail(version, || format!("incarnation {incarnation} takes a replica of {origin} as {version}"));
        // The version that it replaces there is gone.
        self.shadow.removed(key, lineage, version, self.trace.events);
        let taken = self.shadow.imported(version, origin, digest, lineage, &bytes);
        self.require(taken);
        self.shadow.copied(version);
    }

    pub(crate) fn key_of(&self, incarnation: usize) -> ShardKey {
        let incarnation = &self.incarnations[incarnation];
        ShardKey {
            node: NodeId(incarnation.node as u64 + 1),
            incarnation: Incarnation(self.nodes[incarnation.node].incarnation),
            shard: ShardId(incarnation.shard),
        }
    }

    /// Returns true if the holder of a replica has become the owner of the object.
    pub(crate) fn owns_copy(&self, key: usize, version: u64) -> bool {
        let slot = self.shadow.digest(key).slot();
        let holder = self.shadow.commit_of(version).map(|commit| commit.incarnation);
        let mut incarnations =
            (0..self.incarnations.len()).filter(|incarnation| Some(self.lineage(*incarnation)) == holder);
        incarnations.any(|incarnation| self.incarnations[incarnation].service.inspect().serves(slot))
    }

    /// Checks, when an owner acknowledges that versions of a key below `floor` are gone, that its replica owners have
    /// no replica of them.
    pub(crate) fn check_no_copy(&mut self, first: usize, key: usize, floor: u64) {
        let digest = self.shadow.digest(key);
        let owners = self.incarnations[first].service.inspect().replica_owners(digest.slot()).to_vec();
        owners.into_iter().for_each(|second| self.check_no_copy_at(first, second, key, floor));
    }

    fn check_no_copy_at(&mut self, first: usize, second: ShardKey, key: usize, floor: u64) {
        let digest = self.shadow.digest(key);
        let alive = |incarnation: &usize| {
            self.incarnations[*incarnation].alive && self.nodes[self.incarnations[*incarnation].node].up
        };
        let Some(incarnation) =
            (0..self.incarnations.len()).filter(alive).find(|incarnation| self.key_of(*incarnation) == second)
        else {
            return;
        };
        // A shard that has become replica owner again, and does not know it yet, drops its replicas before that map can
        // direct requests to it.
        let heard = |incarnation: usize| self.incarnations[incarnation].epoch;
        if heard(incarnation) < heard(first) {
            return;
        }
        let service = &self.incarnations[incarnation].service;
        let view = service.store().peek(digest).filter(|view| view.replica == Replica::Second);
        let record = service.inspect().replica_record(digest);
        let versions = [view.map(|view| view.version), record.map(|record| record.version)];
        versions.into_iter().flatten().for_each(|version| {
            self.check_no_copy_of(first, incarnation, key, version.0, floor);
        });
    }

    fn check_no_copy_of(&mut self, first: usize, incarnation: usize, key: usize, version: u64, floor: u64) {
        let origin = self.shadow.commit_of(version).and_then(|commit| commit.origin).unwrap_or(0);
        // Newer puts may have a replica already.
        let lineage = self.lineage(first);
        // Below the version of a put nothing is left, also of what an unanswered removal removed.
        let is_put = floor != u64::MAX;
        let is_gone = |commit: &&Commit| commit.incarnation == lineage && (is_put || commit.removed.is_some());
        let older = self.shadow.commit_of(origin).filter(is_gone).is_some() && origin < floor;
        if older {
            let what = format!(
                "incarnation {incarnation} has a replica of version {origin} of key {key}, which {first} removed"
            );
            self.violate(broken(Rule::Removed, what));
        }
    }

    /// Checks, when a put is answered, that no replica of the former version is left.
    pub(crate) fn check_copies_of(&mut self, index: u32, version: u64) {
        let Some(connection) = self.connections.get(&index).filter(|_| self.scenario.replicas > 1) else { return };
        let incarnation = connection.incarnation;
        if let Some(key) = self.shadow.commit_of(version).map(|commit| commit.key) {
            let lineage = self.lineage(incarnation);
            if self.scenario.tier.is_none() {
                // Before the put there was no object, or the replaced one. A disk may bring back the object of a
                // removal that was not answered, if this put is lost with its process.
                self.shadow.removed(key, lineage, version, self.trace.events);
            }
            self.check_no_copy(incarnation, key, version);
        }
    }

    /// [`Mischief::KeepCopies`]: the host answers for the service, which does not receive the request.
    pub(crate) fn forge_drop(&mut self, index: u32, header: &Header) -> bool {
        if header.kind != Kind::Request(Operation::Remove) || !header.flags.has(FrameFlags::REPLICATE) {
            return false;
        }
        let bitmap = vec![0xff; (header.items as usize).div_ceil(8)];
        let reply = Header::reply(Kind::Reply(Operation::Remove), header.request, Status::Ok)
            .with_body(&bitmap, header.items as usize);
        self.send(index, Way::ToClient, OutgoingFrame::new(&reply, &bitmap, None));
        true
    }

    /// Drops the promises for objects in migration from or to these ending incarnations: such objects are at one node.
    pub(crate) fn forget_moving(&mut self, incarnations: &[usize]) {
        let Self { shadow, incarnations: all, doubled, .. } = self;
        let moves = |incarnation: &usize, slot| {
            all[*incarnation].service.inspect().source_of(slot).is_some()
                || all[*incarnation].service.inspect().exports(slot)
        };
        doubled.retain(|key, _| !incarnations.iter().any(|incarnation| moves(incarnation, shadow.digest(*key).slot())));
    }

    /// Drops the promises for objects that stay behind: the control plane waited long enough, and slots migrate on
    /// before all of their objects were imported.
    pub(crate) fn forget_moved_on(&mut self, map: &ClusterMap) {
        let Some(before) = self.control.published.clone().filter(|_| !self.doubled.is_empty()) else { return };
        let (before, after) = (self.owners_of(&before), self.owners_of(map));
        let Self { shadow, incarnations, doubled, .. } = self;
        let comes = |slot| {
            incarnations
                .iter()
                .any(|incarnation| incarnation.alive && incarnation.service.inspect().source_of(slot).is_some())
        };
        doubled.retain(|key, _| {
            let slot = shadow.digest(*key).slot();
            before.owner(slot) == after.owner(slot) || !comes(slot)
        });
    }

    /// Describes missing replicas of a shard, of those that must exist at rest.
    pub(crate) fn copies_missing(&self, incarnation: usize) -> Option<String> {
        let service = &self.incarnations[incarnation].service;
        let counters = service.inspect().copy_counters();
        if counters.outstanding > 0 {
            return Some(format!("incarnation {incarnation} waits for replicas to be dropped: {counters:?}"));
        }
        if Self::fetch_limits(&self.scenario).bytes_per_s == 0 {
            return None;
        }
        let store = service.store();
        let lack = self.incarnations[incarnation].lacking();
        // In these scenarios each object was put with several replicas, and objects on the SSD are replicated from
        // there.
        let kept = (0..self.scenario.keys).filter(|_| self.scenario.keeps && self.scenario.tier.is_some());
        let on_ssd =
            kept.map(|key| self.shadow.digest(key)).filter(|digest| service.inspect().ssd_bytes(*digest).is_some());
        let has_none = |digest: &Digest| store.objects().copies(*digest).at.is_empty();
        let can_have = |digest: &Digest| !service.inspect().replica_owners(digest.slot()).is_empty();
        let lack = lack.into_iter().chain(on_ssd.filter(has_none).filter(can_have)).next()?;
        Some(format!("incarnation {incarnation} has no replica of {lack}, although all faults are over: {counters:?}"))
    }
}
