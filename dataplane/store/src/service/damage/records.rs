//! Repairs of damaged records on the SSD with the bytes that another owner of the slot has, in memory or on its SSD.
//!
//! The record had the name of the object too: so the other node describes the object first. Its bytes are received into
//! fresh memory, and count if length and checksum are those of the record. The object is in memory then, under its
//! version, and is written to the SSD again.

use std::collections::BTreeMap;

use kvplane_proto::ids::ReservationId;
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{KeyPage, Part, PutItem};
use kvplane_proto::{Digest, Status};
use kvplane_tier::RecordView;

use super::inquiry::{Inquiry, NextSource, has_none};
use super::readers::{serve, turn_away};
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::shard::tail::TailHead;
use crate::service::tiering::WaitingReaders;
use crate::service::types::{Memory, MemoryExtent};
use crate::{Copies, Replica, Reserve};

/// Most requests in flight.
const CALLS_MOST: usize = 16;

/// Repair of a record.
#[derive(Debug, Default)]
struct RecordRepair {
    inquiry: Inquiry,
    /// Node that described the object, and the memory that its bytes are received into.
    bytes: Option<(ShardKey, ReservationId)>,
    /// True until the request for the bytes was sent.
    is_ready: bool,
}

/// Outcome of a repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Repaired,
    /// The object was removed or replaced, or its slot lost.
    Void,
    /// No other node has good bytes.
    Lost,
}

/// Repairs of records in progress. The records, and the gets that wait for them, are the SSD's.
#[derive(Debug, Default)]
pub(super) struct RecordRepairs {
    open: BTreeMap<Digest, RecordRepair>,
    calls: BTreeMap<u64, (Digest, ShardKey)>,
    repaired: u64,
    lost: u64,
}

impl RecordRepairs {
    /// Returns the numbers of records that were repaired, and of those whose objects were lost.
    pub(super) const fn counts(&self) -> (u64, u64) {
        (self.repaired, self.lost)
    }

    /// Begins the repairs of records that were found damaged, and answers the gets of objects that are gone. Returns
    /// true if there was anything to do.
    pub(super) fn drive(&mut self, local: &mut LocalStore) -> bool {
        let Some(tiering) = &mut local.tiering else { return false };
        let mut progress = false;
        while let Some(digest) = tiering.ssd.damaged.take_new() {
            progress = true;
            if tiering.ssd.damaged.has(digest) {
                self.open.entry(digest).or_default();
            }
        }
        for (digest, readers) in tiering.ssd.damaged.take_void() {
            progress = true;
            serve(local, digest, readers);
        }
        progress
    }

    /// Returns the next request to another node.
    pub(super) fn poll(&mut self, local: &mut LocalStore) -> Option<Fetch> {
        let digests: Vec<Digest> = self.open.keys().copied().collect();
        for digest in digests {
            if let Some(fetch) = self.step(local, digest) {
                return Some(fetch);
            }
        }
        None
    }

    /// Advances a repair; returns the request to another node, if there is one to send.
    fn step(&mut self, local: &mut LocalStore, digest: Digest) -> Option<Fetch> {
        let in_flight = self.calls.len();
        let repair = self.open.get_mut(&digest)?;
        let view = damaged_record(local, digest).filter(|_| !local.shard.store.exists(digest));
        if let Some((source, reservation)) = repair.bytes {
            if !repair.is_ready {
                return None;
            }
            repair.is_ready = false;
            let at = local.shard.store.reserved(reservation).map(|entry| local.shard.store.pool().extent(entry));
            let extent = at.map(|at| MemoryExtent { memory: Memory::Pool, offset: at.offset, bytes: at.bytes })?;
            return Some(self.ask(&mut local.shard, digest, source, Want::Repair(digest, extent)));
        }
        let now_ns = local.shard.now_ns;
        if !repair.inquiry.is_due(now_ns) {
            return None;
        }
        let rested = repair.inquiry.rests();
        let Some(view) = view else {
            self.end(local, digest, Outcome::Void);
            return None;
        };
        match repair.inquiry.next(&sources(&local.shard, &view), in_flight < CALLS_MOST, now_ns) {
            NextSource::Wait => None,
            NextSource::Ask(source) => {
                if rested {
                    rest_record(local, digest, false);
                }
                Some(self.ask(&mut local.shard, digest, source, Want::DescribeCopy(digest)))
            }
            NextSource::Rest => {
                let readers = rest_record(local, digest, true);
                turn_away(local, digest, readers, Status::Busy);
                None
            }
            NextSource::Nobody => {
                self.end(local, digest, Outcome::Lost);
                None
            }
        }
    }

    fn ask(&mut self, shard: &mut Shard, digest: Digest, source: ShardKey, want: Want) -> Fetch {
        let token = shard.new_fetch_token();
        self.calls.insert(token, (digest, source));
        Fetch { token, source, want }
    }

    /// Handles the answer of another node, or the failure to get one. Returns false if it belongs to no request of this
    /// component.
    pub(super) fn fetched(&mut self, local: &mut LocalStore, token: u64, done: &FetchDone) -> bool {
        let Some((digest, source)) = self.calls.remove(&token) else { return false };
        let Some(repair) = self.open.get_mut(&digest) else { return true };
        let view = damaged_record(local, digest);
        let received = repair.bytes.take();
        let mut reservation = received.map(|(_, reservation)| reservation);
        match (done, reservation, view) {
            (FetchDone::Page(page), None, Some(view)) => match reserve(local, &view, page) {
                Ok(Some(reservation)) => (repair.bytes, repair.is_ready) = (Some((source, reservation)), true),
                Ok(None) => repair.inquiry.failed(true),
                // There is no room at the moment.
                Err(_) => repair.inquiry.failed(false),
            },
            (FetchDone::Object(bytes, checksum), Some(_), Some(view))
                if (*bytes, *checksum) == (u64::from(view.payload_bytes), view.checksum) =>
            {
                let reservation = reservation.take().expect("memory of a repair");
                let is_restored = local.shard.store.restore(reservation, view.checksum, view.version).is_ok();
                self.end(local, digest, if is_restored { Outcome::Repaired } else { Outcome::Void });
            }
            (done, ..) => repair.inquiry.failed(has_none(done)),
        }
        if let Some(reservation) = reservation {
            local.shard.store.abort(reservation).expect("memory of a repair");
        }
        true
    }

    /// Ends a repair, and answers the gets that wait for it.
    fn end(&mut self, local: &mut LocalStore, digest: Digest, outcome: Outcome) {
        self.open.remove(&digest);
        match outcome {
            Outcome::Repaired => self.repaired += 1,
            Outcome::Void => {}
            Outcome::Lost => self.lost += 1,
        }
        let readers = end_record(local, digest, outcome == Outcome::Repaired);
        serve(local, digest, readers);
    }

    /// Returns the time at which the next pause ends.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.open.values().filter_map(|repair| repair.inquiry.poll_timeout()).min()
    }
}

/// Returns a damaged record whose repair is not over, unless it is void.
fn damaged_record(local: &LocalStore, digest: Digest) -> Option<RecordView> {
    let ssd = local.ssd()?;
    if ssd.damaged.has(digest) { ssd.locate_any(digest) } else { None }
}

/// Returns the number of damaged records that were found, and of those whose repair is not over.
pub(super) fn damaged_records(local: &LocalStore) -> (u64, u64) {
    local.ssd().map_or((0, 0), |ssd| (ssd.damaged.found(), ssd.damaged.len() as u64))
}

/// Returns the number of damaged records that were lost without a repair.
pub(super) fn lost_records(local: &LocalStore) -> u64 {
    local.ssd().map_or(0, |ssd| ssd.damaged.lost())
}

/// Begins or ends a pause in the repair of a damaged record; returns the gets that are to be retried.
fn rest_record(local: &mut LocalStore, digest: Digest, rests: bool) -> WaitingReaders {
    local.tiering.as_mut().map_or_else(Vec::new, |tiering| tiering.ssd.damaged.rest(digest, rests))
}

/// Ends the repair of a damaged record; returns the gets that wait for it. The object is in memory if it `is_good`, and
/// is written to the SSD again; otherwise it is gone.
fn end_record(local: &mut LocalStore, digest: Digest, is_good: bool) -> WaitingReaders {
    let LocalStore { shard, tiering: Some(tiering), .. } = local else { return Vec::new() };
    let readers = tiering.ssd.damaged.end(digest);
    if is_good {
        tiering.demotion.write_repaired(&mut tiering.ssd, shard, digest);
    } else if !shard.store.exists(digest) {
        shard.store.objects_mut().orphan_detached(digest);
    }
    tiering.ssd.tell_of(shard, digest);
    readers
}

/// Returns the other nodes that may have an object whose record is damaged: the replica owners that may have a replica,
/// or all of them if this incarnation has made none; for a replica, the owner.
fn sources(shard: &Shard, view: &RecordView) -> Vec<ShardKey> {
    let digest = view.digest;
    if let Some(relation) = shard.replicas.relation(digest.slot()) {
        return vec![relation.owner];
    }
    if !shard.ownership.owns(digest) {
        return Vec::new();
    }
    let owners = shard.replicas.owners_of(digest.slot());
    let at = shard.store.objects().copies(digest).at;
    let has = |number: &usize| at.is_empty() || at.has(*number);
    (0..owners.len()).filter(has).filter_map(|number| owners.get(number).copied()).collect()
}

/// Reserves memory for an object that another node has described, with its name. `None` if that is another object.
fn reserve(local: &mut LocalStore, view: &RecordView, page: &[u8]) -> Result<Option<ReservationId>, Status> {
    let page = KeyPage::decode(page);
    let key = page.as_ref().and_then(|page| page.keys().find(|key| key.item.digest == view.digest));
    let Some(key) = key.filter(|key| key.item.bytes == u64::from(view.payload_bytes)) else { return Ok(None) };
    let (item, name) = (key.item, key.name);
    let plain = PutItem::plain(view.digest, item.bytes).with_options(&item.options());
    let put = PutItem { key_bytes: item.key_bytes, tenant_bytes: item.tenant_bytes, ..plain };
    let tail = TailHead::of(&put).filter(|_| item.key_bytes == 0 || name.digest() == view.digest);
    let options = put.options();
    let shard = &mut local.shard;
    let is_replica = shard.replicas.relation(view.digest.slot()).is_some();
    let replica = match (is_replica, options.replicas > 1 || view.copied) {
        (true, _) => Replica::Second,
        (false, true) => Replica::First,
        (false, false) => Replica::None,
    };
    let wanted = Reserve {
        tail_bytes: tail.map_or(0, |tail| tail.tail_bytes() as u32),
        has_tail: tail.is_some(),
        keep: shard.keep_again(&options, options.tenant),
        head: view.names_parts || options.part == Part::Head,
        replica,
        copies: Copies::of_put(options.replicas, 0),
        moves: true,
        ..Reserve::plain(view.digest, item.bytes)
    };
    let (reservation, _) = shard.store.reserve_for(&wanted).map_err(|_| Status::Busy)?;
    if let Some(tail) = tail {
        shard.write_tail(reservation, &tail, &name);
    }
    Ok(Some(reservation))
}
