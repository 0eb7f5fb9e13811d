//! Repairs of damaged objects in memory with the bytes that another node has.
//!
//! An owner asks its replica owners, a replica owner the owner. The good bytes are received in the place of the
//! damaged ones: readers of these find by the checksum that they are not good. The object is pinned until then.

use std::collections::BTreeMap;

use kvplane_proto::ids::PinId;
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Status};

use super::inquiry::{Inquiry, NextSource, has_none};
use super::readers::{READERS_MOST, Readers, serve, turn_away};
use crate::entry::Entry;
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::shard::stream_read::Reader;
use crate::service::shard::timing::Timing;
use crate::service::types::{Memory, MemoryExtent};

/// Most damaged objects whose repair is not over. Others stay damaged until they are found again.
const OPEN_MOST: usize = 1024;
/// Most requests in flight.
const CALLS_MOST: usize = 16;
/// Repair of an object.
#[derive(Debug)]
struct Repair {
    pin: PinId,
    inquiry: Inquiry,
    readers: Readers,
}

/// Outcome of a repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// The bytes are good.
    Repaired,
    /// The object was removed or replaced meanwhile.
    Void,
    /// No other node has good bytes.
    Lost,
}

/// Next step of a repair.
enum Step {
    Ask(ShardKey),
    Wait,
    End(Outcome),
}

/// Repairs in progress.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    open: BTreeMap<Digest, Repair>,
    /// Objects of the requests that other nodes have not answered yet.
    calls: BTreeMap<u64, Digest>,
    repaired: u64,
    lost: u64,
}

impl Repairs {
    /// Returns the numbers of objects that were repaired, and of those that were lost.
    pub(super) const fn counts(&self) -> (u64, u64) {
        (self.repaired, self.lost)
    }

    /// Returns the number of repairs in progress.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn has(&self, digest: Digest) -> bool {
        !self.open.is_empty() && self.open.contains_key(&digest)
    }

    /// Makes a reader wait for the repair of an object. In a pause it is to retry.
    pub(super) fn wait(&mut self, digest: Digest, reader: (Reader, Timing)) -> Result<(), Status> {
        let has_room = |repair: &&mut Repair| repair.readers.len() < READERS_MOST && !repair.inquiry.rests();
        let repair = self.open.get_mut(&digest).filter(has_room);
        repair.ok_or(Status::Busy)?.readers.push(reader);
        Ok(())
    }

    /// Begins the repair of a damaged object, which is in memory. If no other node can have it, it is removed.
    pub(super) fn begin(&mut self, local: &mut LocalStore, digest: Digest, readers: Readers) {
        if sources(&local.shard, digest).is_empty() {
            self.lost += 1;
            local.shard.store.drop_copy(digest);
            serve(local, digest, readers);
            return;
        }
        let has_room = self.open.len() < OPEN_MOST;
        let Some((pin, _)) = has_room.then(|| local.shard.store.hold(digest)).flatten() else {
            turn_away(local, digest, readers, Status::Busy);
            return;
        };
        self.open.insert(digest, Repair { pin, inquiry: Inquiry::default(), readers });
    }

    /// Returns the next request to another node.
    pub(super) fn poll(&mut self, local: &mut LocalStore) -> Option<Fetch> {
        let digests: Vec<Digest> = self.open.keys().copied().collect();
        for digest in digests {
            match self.step(local, digest) {
                Step::Wait => {}
                Step::End(outcome) => self.end(local, digest, outcome),
                Step::Ask(source) => {
                    let repair = self.open.get_mut(&digest)?;
                    let extent = local.shard.store.held(repair.pin).expect("a pin that the shard holds").extent;
                    let extent = MemoryExtent { memory: Memory::Pool, offset: extent.offset, bytes: extent.bytes };
                    let token = local.shard.new_fetch_token();
                    self.calls.insert(token, digest);
                    return Some(Fetch { token, source, want: Want::Repair(digest, extent) });
                }
            }
        }
        None
    }

    /// Decides on the next step of a repair. After a round without good bytes, it pauses if a node may have some that
    /// did not answer, and its readers are to retry.
    fn step(&mut self, local: &mut LocalStore, digest: Digest) -> Step {
        let (shard, in_flight) = (&mut local.shard, self.calls.len());
        let Some(repair) = self.open.get_mut(&digest) else { return Step::Wait };
        if !repair.inquiry.is_due(shard.now_ns) {
            return Step::Wait;
        }
        if !shard.store.pinned(repair.pin).is_some_and(Entry::is_live) {
            return Step::End(Outcome::Void);
        }
        match repair.inquiry.next(&sources(shard, digest), in_flight < CALLS_MOST, shard.now_ns) {
            NextSource::Wait => Step::Wait,
            NextSource::Ask(source) => Step::Ask(source),
            NextSource::Rest => {
                let readers = core::mem::take(&mut repair.readers);
                turn_away(local, digest, readers, Status::Busy);
                Step::Wait
            }
            NextSource::Nobody => Step::End(Outcome::Lost),
        }
    }

    /// Handles the answer of another node, or the failure to get one. Returns false if it belongs to no request of this
    /// component.
    pub(super) fn fetched(&mut self, local: &mut LocalStore, token: u64, done: &FetchDone) -> bool {
        let Some(digest) = self.calls.remove(&token) else { return false };
        let Some(repair) = self.open.get_mut(&digest) else { return true };
        let object = local.shard.store.held(repair.pin).expect("a pin that the shard holds");
        match done {
            FetchDone::Object(bytes, checksum) if (*bytes, *checksum) == (object.extent.bytes, object.checksum) => {
                self.end(local, digest, Outcome::Repaired);
            }
            done => repair.inquiry.failed(has_none(done)),
        }
        true
    }

    /// Ends a repair, and answers the readers that wait for it.
    fn end(&mut self, local: &mut LocalStore, digest: Digest, outcome: Outcome) {
        let Some(Repair { pin, readers, .. }) = self.open.remove(&digest) else { return };
        let version = local.shard.store.held(pin).expect("a pin that the shard holds").version;
        local.shard.store.unpin(pin).expect("a pin that the shard holds");
        match outcome {
            Outcome::Repaired => self.repaired += 1,
            Outcome::Void => {}
            Outcome::Lost => {
                self.lost += 1;
                local.shard.drop_version(digest, version);
            }
        }
        serve(local, digest, readers);
    }

    /// Returns the time at which the next pause ends.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.open.values().filter_map(|repair| repair.inquiry.poll_timeout()).min()
    }
}

/// Returns the other nodes that may have the bytes of an object: the replica owners to which it was sent, or the owner
/// of a replica.
fn sources(shard: &Shard, digest: Digest) -> Vec<ShardKey> {
    let objects = shard.store.objects();
    if objects.is_copy(digest) {
        return shard.replicas.relation(digest.slot()).map(|relation| relation.owner).into_iter().collect();
    }
    if !shard.ownership.owns(digest) {
        return Vec::new();
    }
    let owners = shard.replicas.owners_of(digest.slot());
    objects.copies(digest).at.iter().filter_map(|number| owners.get(number).copied()).collect()
}
