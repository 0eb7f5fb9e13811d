//! Reports of complete imports to former owners: some are lost, some come again, late and over another connection. When
//! a report ends an export, the new owner has everything of the slot, or has removed or replaced it.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, FrameFlags, RequestId};
use kvplane_store::service::{PayloadTo, Want};

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::network::End;
use crate::world::queue::Event;
use crate::world::scenario::MS;

/// Chances that a report does not reach the former owner, that its answer is lost, and that it comes again.
const LOST: f64 = 0.15;
const UNANSWERED: f64 = 0.15;
const REPEATED: f64 = 0.5;
/// Longest time after which a report comes again: at any time, and after another export has begun.
const LATE_NS: u64 = 2_000 * MS;
const SOON_NS: u64 = 20 * MS;
/// Reports that may come again when another export begins.
const REMEMBERED: usize = 4;

/// Report that a shard received.
#[derive(Clone)]
pub(crate) struct ReceivedReport {
    incarnation: usize,
    header: Header,
    body: Vec<u8>,
}

/// Key whose slot is exported, and whether the exporter still has its object.
type ExportedKey = (usize, bool);

impl World {
    /// Returns true if a request is lost that reports a complete import.
    pub(crate) fn loses_report(&mut self, want: &Want) -> bool {
        self.disturbs_report(want, LOST)
    }

    /// Returns true if the answer to a request is lost that reports a complete import.
    pub(crate) fn loses_answer(&mut self, want: &Want) -> bool {
        self.disturbs_report(want, UNANSWERED)
    }

    fn disturbs_report(&mut self, want: &Want, chance: f64) -> bool {
        let is_due = matches!(want, Want::EndExports(..)) && self.now_ns < self.scenario.faults_until_ns;
        is_due && self.streams.reports.chance(chance)
    }

    /// Returns true if a request on this connection reports a complete import.
    pub(crate) fn is_report(&self, connection: u32, header: &Header) -> bool {
        let of_shard = self.connections.get(&connection).is_some_and(|connection| !self.is_user(connection.client));
        of_shard && header.kind == Kind::Request(Operation::Remove) && header.flags.has(FrameFlags::OF_VERSION)
    }

    /// Passes a report to a former owner, and checks the exports that it ends. It may come again later.
    pub(crate) fn pass_report(&mut self, connection: u32, header: &Header, body: &[u8]) -> PayloadTo {
        let Some(open) = self.connections.get(&connection) else { return PayloadTo::Discard };
        let (incarnation, peer) = (open.incarnation, open.peer);
        let exported = self.exported_keys(incarnation);
        let to = self.incarnations[incarnation].service.request(peer, header, body, self.now_ns);
        self.check_ended_exports(incarnation, &exported);
        if self.now_ns < self.scenario.faults_until_ns && self.streams.reports.chance(REPEATED) {
            let report = ReceivedReport { incarnation, header: *header, body: body.to_vec() };
            self.reports.push(report);
            let late_ns = self.streams.reports.below(LATE_NS);
            self.after(late_ns, Event::ReportAgain(self.reports.len() - 1));
        }
        to
    }

    /// Has former reports come again to a shard that has begun another export.
    pub(crate) fn repeat_reports(&mut self, incarnation: usize) {
        let of_it = |(_, report): &(usize, &ReceivedReport)| report.incarnation == incarnation;
        let received: Vec<usize> =
            self.reports.iter().enumerate().rev().filter(of_it).map(|(number, _)| number).take(REMEMBERED).collect();
        for number in received {
            if self.streams.reports.chance(REPEATED) {
                let soon_ns = self.streams.reports.below(SOON_NS);
                self.after(soon_ns, Event::ReportAgain(number));
            }
        }
    }

    /// Handles a report that comes again, over any connection of a shard.
    pub(crate) fn report_again(&mut self, number: usize) {
        let ReceivedReport { incarnation, mut header, body } = self.reports[number].clone();
        let mut open = self.connections.iter().filter(|(_, connection)| {
            connection.incarnation == incarnation
                && connection.server_end == End::Open
                && connection.held.fetches
                && connection.to_server.receiving.is_none()
        });
        let Some(connection) = open.next_back().map(|(connection, _)| *connection) else { return };
        // Its requester does not wait for it any more.
        header.request = RequestId { index: u32::MAX, generation: u32::MAX };
        self.detail(number as u64, || format!("incarnation {incarnation} receives report {number} again"));
        let _ = self.pass_report(connection, &header, &body);
        self.drain_service(incarnation, None);
    }

    /// Remembers the report that a shard sends to a former owner.
    pub(crate) fn note_report(&mut self, importer: usize, source: ShardKey, want: &Want) {
        if let Want::EndExports(slots, _) = want {
            self.sent_reports.extend(slots.iter().map(|slot| (importer, source, *slot)));
        }
    }

    /// Describes reports that a former owner has not got at rest, and slots whose replicas a shard cannot record
    /// although it exports nothing of them.
    pub(crate) fn exports_left(&self, incarnation: usize) -> Option<String> {
        let shard = &self.incarnations[incarnation];
        let inspect = shard.service.inspect();
        let moves = inspect.move_counters();
        if Self::fetch_limits(&self.scenario).bytes_per_s == 0 {
            return None;
        }
        let (unreported, unrecorded) = (inspect.unreported().count(), inspect.replica_slots_unrecorded() as u64);
        if unreported > 0 || unrecorded > moves.exporting_slots {
            let what = format!("{unreported} reports open and {unrecorded} slots whose replicas it cannot record");
            return Some(format!("incarnation {incarnation} has {what}: {moves:?}"));
        }
        let key = ShardKey {
            node: NodeId(shard.node as u64 + 1),
            incarnation: Incarnation(self.nodes[shard.node].incarnation),
            shard: ShardId(shard.shard),
        };
        // A shard that missed maps imports nothing from its former owners.
        let mut sent = self.sent_reports.iter().filter(|_| self.statistics.missed == 0);
        sent.find(|(importer, source, slot)| {
            let owner = &self.incarnations[*importer];
            *source == key && owner.alive && owner.service.inspect().serves(*slot) && inspect.exports(*slot)
        })
        .map(|(importer, _, slot)| {
            format!("incarnation {incarnation} exports {slot:?}, which incarnation {importer} has reported as imported")
        })
    }

    /// Returns the keys of slots that a shard exports.
    fn exported_keys(&self, incarnation: usize) -> Vec<ExportedKey> {
        let service = &self.incarnations[incarnation].service;
        let (store, inspect) = (service.store(), service.inspect());
        let keys = (0..self.scenario.keys).filter(|key| inspect.exports(self.shadow.digest(*key).slot()));
        keys.map(|key| {
            let digest = self.shadow.digest(key);
            let in_memory = store.peek(digest).is_some() && !store.objects().is_copy(digest);
            (key, in_memory || inspect.ssd_bytes(digest).is_some())
        })
        .collect()
    }

    /// Checks the exports that have ended, of those before: the new owner needs nothing of them any more.
    fn check_ended_exports(&mut self, incarnation: usize, before: &[ExportedKey]) {
        let inspect = self.incarnations[incarnation].service.inspect();
        let is_over = |(key, _): &&ExportedKey| !inspect.exports(self.shadow.digest(*key).slot());
        let ended: Vec<ExportedKey> = before.iter().filter(is_over).copied().collect();
        if ended.is_empty() {
            return;
        }
        self.statistics.ended_exports += 1;
        self.detail(mix64(ended.len() as u64), || format!("incarnation {incarnation} ends the export of {ended:?}"));
        // A record of the new owner may be lost since; and one that missed maps does not import what it gained by them.
        let is_certain = self.statistics.missed == 0
            && !self.scenario.tier.as_ref().is_some_and(|tier| tier.faults.any() || tier.may_reclaim());
        for (key, _) in ended.iter().filter(|(_, is_left)| *is_left && is_certain) {
            if self.is_left_behind(incarnation, *key) {
                let what = format!(
                    "incarnation {incarnation} ended the export of key {key}, which its new owner has not imported"
                );
                self.violate(broken(Rule::Lost, what));
            }
        }
        let lineage = self.lineage(incarnation);
        let digests: Vec<Digest> = ended.iter().map(|(key, _)| self.shadow.digest(*key)).collect();
        let is_gone = |digest: Digest| digests.contains(&digest);
        if self.scenario.tier.is_some() {
            self.shadow.promises_void(lineage, is_gone);
        } else {
            let store = self.incarnations[incarnation].service.store();
            let there: BTreeMap<Digest, u64> =
                digests.iter().filter_map(|digest| Some((*digest, store.peek(*digest)?.version.0))).collect();
            self.shadow.dropped_but(lineage, self.trace.events, is_gone, &there);
        }
    }

    /// Returns true if the shard that serves a key's slot has neither its object nor removed or replaced it.
    fn is_left_behind(&self, exporter: usize, key: usize) -> bool {
        let digest = self.shadow.digest(key);
        let mut owners = self.incarnations.iter().enumerate().filter(|(index, incarnation)| {
            *index != exporter && incarnation.alive && incarnation.service.inspect().serves(digest.slot())
        });
        let lacks = |(_, owner): (usize, &crate::world::cluster::node::ShardIncarnation)| {
            let store = owner.service.store();
            let in_memory = store.peek(digest).is_some() && !store.objects().is_copy(digest);
            !in_memory && owner.service.inspect().ssd_bytes(digest).is_none() && !owner.changed.contains(&key)
        };
        let mut has_owner = false;
        let all_lack = owners.all(|owner| {
            has_owner = true;
            lacks(owner)
        });
        has_owner && all_lack
    }
}
