//! Second owners: gets fall over to them, and first owners bring them copies.
//!
//! A get whose first owner cannot be reached, or says nothing for so long ([`hedge_ns`](super::Config::hedge_ns)), asks
//! the second owner for its copy, within its deadline and its attempts. Whatever that says but the object itself
//! decides nothing: then the first owner is asked again, and only it. Who is only slow keeps its connection: what it
//! answers after all is let go.
//!
//! How long that is follows from the slowest of the peer's gets. A connection on which anything else is answered
//! meanwhile is not silent. Gets that were answered after all by the owner that they had left cost a budget, which
//! keeps the requests that this adds to a few in a hundred where an owner is slow but alive.
//!
//! A get of a whole object that both are known to have ([`leases`](super::leases)) goes to the one that is likely to
//! have it done first, or to either by chance where that is about the same. Only whole objects: a copy has a version of
//! its own, and who reads one object by several requests tells by the version whether it is still the same.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::flags::FrameFlags;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, RequestId, SLOTS, Slot};
use kvplane_proto::message::Operation;
use kvplane_proto::rng::mix64;
use kvplane_proto::status::Status;

use super::Client;
use super::lane::Endpoint;
use super::path::Path;
use super::table::{NOWHERE, Slice, SliceState};
use super::types::{PeerId, Request, SliceId};

/// Two owners that would take as long, to this factor, take turns.
const ALIKE: f64 = 2.0;

/// Gets that may turn out to have left an owner too early, before others have earned more of them; in thousandths.
const EARLY_MOST_MILLI: i64 = 64_000;
/// Budget that each get earns: 2 in 100.
const EARLY_EARNED_MILLI: i64 = 20;
/// A get that is slower than the estimate of the slowest hundredth raises it by 99 of these parts of itself, and one
/// that is not lowers it by one: it settles where one in a hundred is slower.
const TAIL_PARTS: u64 = 4_096;

/// How early gets may leave their owners: what is left of the budget, in thousandths of a get.
#[derive(Debug)]
pub(super) struct Earliness(i64);

impl Earliness {
    pub(super) const fn new() -> Self {
        Self(EARLY_MOST_MILLI)
    }
}

/// What a slice has had of the replica owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReplicaUse {
    /// It was not asked.
    No,
    /// It is, though the first could be: it has the object too.
    Chosen,
    /// It is, as the first could not be reached.
    Asked,
    /// It was, in vain.
    Missed,
}

/// The object that a request reads, if a copy of it would do.
const fn readable(request: &Request) -> Option<Digest> {
    match request {
        Request::Get(digest, _) | Request::GetRange(digest, ..) | Request::GetHead(digest, _) => Some(*digest),
        _ => None,
    }
}

impl Slice {
    /// True where the replica owner is asked, or has answered.
    pub(super) const fn is_of_replica(&self) -> bool {
        matches!(self.tries.replica, ReplicaUse::Chosen | ReplicaUse::Asked)
    }

    /// True for a get that went to the first owner alone.
    pub(super) const fn is_get_of_first(&self) -> bool {
        matches!(self.tries.replica, ReplicaUse::No) && readable(&self.request).is_some()
    }
}

impl Client {
    /// Takes copies of what it owns first to these peers, by slot; nobody where there is none.
    pub fn set_seconds(&mut self, second: impl Fn(Slot) -> Option<PeerId>) {
        let seconds: Vec<Option<PeerId>> = (0..SLOTS as u16).map(|slot| second(Slot(slot))).collect();
        self.seconds = seconds.iter().any(Option::is_some).then_some(seconds);
    }

    /// The epoch by which a slice's request is routed, and what its frame says of replicas. A shard replicates and
    /// migrates by the map of its batch: another shard may own the slot by the newest one.
    pub(super) fn routing_of(&self, slice: u32) -> (Epoch, FrameFlags) {
        let slice = self.slices.peek(slice);
        let of_batch = || self.batches.peek(slice.batch.index).epoch;
        match slice.request {
            Request::PutCopy(..) | Request::DropCopy(_) => (of_batch(), FrameFlags::REPLICATE),
            Request::Remove(_) if self.sources.is_some() => (of_batch(), FrameFlags::NONE),
            _ if matches!(slice.tries.replica, ReplicaUse::Chosen | ReplicaUse::Asked) => {
                (self.epoch(), FrameFlags::READ_REPLICA)
            }
            _ => (self.epoch(), FrameFlags::NONE),
        }
    }

    fn second_peer(&mut self, digest: Digest) -> Option<PeerId> {
        if self.sources.is_some() {
            return self.seconds.as_ref()?[usize::from(digest.slot().0)];
        }
        let owner = *self.map.as_ref()?.1.owners(digest.slot()).get(1)?;
        self.peer_of_owner(owner)
    }

    /// Who is asked for a slice's object.
    pub(super) fn peer_for(&mut self, id: SliceId, digest: Digest) -> Option<PeerId> {
        let slice = self.slices.peek(id.index);
        let (request, second) = (slice.request, slice.tries.replica);
        if matches!(request, Request::PutCopy(..) | Request::DropCopy(_)) {
            return self.second_peer(digest);
        }
        let several = self.map.as_ref().is_some_and(|(_, owners)| owners.owners(digest.slot()).len() > 1);
        if !several || readable(&request).is_none() || self.sources.is_some() {
            if matches!(second, ReplicaUse::Chosen | ReplicaUse::Asked) {
                self.slices.at(id.index).tries.replica = ReplicaUse::Missed;
            }
            return self.owner_peer(digest);
        }
        let first = self.owner_peer(digest)?;
        match second {
            ReplicaUse::Missed => return Some(first),
            ReplicaUse::No | ReplicaUse::Chosen if !self.is_down(first) => {
                self.watch(id, digest);
                let chosen = self.better_second(id, digest, first);
                self.slices.at(id.index).tries.replica =
                    if chosen.is_some() { ReplicaUse::Chosen } else { ReplicaUse::No };
                self.counters.second_chosen += u64::from(chosen.is_some());
                return chosen.or(Some(first));
            }
            ReplicaUse::No | ReplicaUse::Chosen | ReplicaUse::Asked => {}
        }
        let other = self.second_peer(digest);
        self.slices.at(id.index).tries.replica = if other.is_some() { ReplicaUse::Asked } else { ReplicaUse::Missed };
        self.counters.second_asked += u64::from(other.is_some());
        other.or(Some(first))
    }

    /// The second owner, if it is known to have the object and likely to have it here sooner, or about as soon and
    /// chance is for it.
    fn better_second(&mut self, id: SliceId, digest: Digest, first: PeerId) -> Option<PeerId> {
        let request = self.slices.peek(id.index).request;
        let spread = self.config.spread && matches!(request, Request::Get(..));
        if !spread || !self.leases.holds(digest, self.now_ns) {
            return None;
        }
        let second = self.second_peer(digest).filter(|second| *second != first && !self.is_down(*second))?;
        let bytes = self.slices.peek(id.index).load_bytes();
        let (first_ns, second_ns) = (self.wait_ns(first, &request, bytes)?, self.wait_ns(second, &request, bytes)?);
        let alike = first_ns.max(second_ns) <= first_ns.min(second_ns) * ALIKE;
        if alike {
            self.turns = mix64(self.turns ^ self.config.client);
        }
        let second_now = if alike { self.turns & 1 == 1 } else { second_ns < first_ns };
        second_now.then_some(second)
    }

    /// How long an object of so many bytes would take to come from a peer: by what its best rail was measured to carry,
    /// and behind what is posted to it and waits for it.
    fn wait_ns(&self, peer: PeerId, request: &Request, bytes: u64) -> Option<f64> {
        let group = &self.peers[peer.0 as usize].groups[usize::from(self.pick_group(peer, request, None)?)];
        let waiting: u64 = group.waiting.iter().map(|waiting| waiting.queue.bytes()).sum();
        let bytes = bytes + waiting / group.rails.len().max(1) as u64;
        let small = self.config.is_small(bytes);
        let predict = |rail: &u32| self.rails[*rail as usize].rail.predict_ns(bytes, small, self.now_ns);
        group.rails.iter().map(predict).reduce(f64::min)
    }

    /// A shard has given an object, and said whether it is replicated. The owner's word counts, nobody else's.
    pub(super) fn note_replicated(&mut self, index: u32, is_replicated: bool) {
        let slice = self.slices.at(index);
        let of_first = matches!(slice.tries.replica, ReplicaUse::No | ReplicaUse::Missed) && self.sources.is_none();
        slice.answer.is_replicated = of_first && is_replicated;
        if let (true, true, Some(digest)) = (of_first, self.config.spread, readable(&slice.request)) {
            let sent_ns = slice.sent_ns;
            self.leases.told(digest, is_replicated, sent_ns, self.now_ns);
        }
    }

    /// The flag of a request by which its client gets leases on replicas, if it spreads its gets.
    pub(super) fn lease_flags(&self, operation: Operation) -> FrameFlags {
        let gets = matches!(operation, Operation::Get | Operation::GetRange | Operation::Lookup);
        let several = self.map.as_ref().is_some_and(|(map, _)| map.replicas > 1);
        let wants = gets && several && self.config.spread && self.sources.is_none();
        FrameFlags::NONE.with(FrameFlags::REPLICA_LEASE, wants)
    }

    /// Whether every way to a peer was lost, and it is too early to try again.
    fn is_down(&self, peer: PeerId) -> bool {
        let rails = self.peers[peer.0 as usize].groups.iter().flat_map(|group| &group.rails);
        rails.copied().all(|rail| !self.is_up(rail) && !self.rails[rail as usize].rail.is_hopeful(self.now_ns))
    }

    /// A get is not to wait for the first owner for ever.
    fn watch(&mut self, id: SliceId, digest: Digest) {
        if self.config.hedge_ns > 0 && self.second_peer(digest).is_some() {
            let begun_ns = self.slices.peek(id.index).times.begun_ns;
            let wait_ns = self.owner_peer(digest).map_or(self.config.hedge_ns, |first| self.hedge_after_ns(first));
            self.unwatch(id);
            self.watch_until(id, begun_ns.saturating_add(wait_ns));
        }
    }

    fn watch_until(&mut self, id: SliceId, at_ns: u64) {
        self.slices.at(id.index).tries.hedge_ns = at_ns;
        self.timers.watch(id, at_ns);
    }

    /// Nobody looks after a get any more. What is answered must not wake its host later for nothing.
    pub(super) fn unwatch(&mut self, id: SliceId) {
        let at_ns = core::mem::take(&mut self.slices.at(id.index).tries.hedge_ns);
        if at_ns > 0 {
            self.timers.unwatch(id, at_ns);
        }
    }

    /// How long a peer may be silent before gets leave it: what its slowest hundredth takes, within half of the setting
    /// and all of it.
    fn hedge_after_ns(&self, peer: PeerId) -> u64 {
        let most_ns = self.config.hedge_ns;
        self.peers[peer.0 as usize].tail_ns.clamp(most_ns / 2, most_ns)
    }

    /// A get was answered by this peer so long after it had begun.
    pub(super) fn got_after(&mut self, peer: u32, took_ns: u64) {
        let most_ns = self.config.hedge_ns;
        let Some(peer) = self.peers.get_mut(peer as usize).filter(|_| most_ns > 0) else { return };
        let tail_ns = peer.tail_ns.clamp(most_ns / 2, most_ns);
        let part_ns = (tail_ns / TAIL_PARTS).max(1);
        peer.tail_ns = if took_ns > tail_ns { tail_ns + 99 * part_ns } else { tail_ns - part_ns };
        self.early.0 = (self.early.0 + EARLY_EARNED_MILLI).min(EARLY_MOST_MILLI);
    }

    /// Owners have answered so many gets that had left them.
    pub(super) fn left_early(&mut self, gets: usize) {
        self.early.0 -= 1000 * gets as i64;
    }

    /// When something was last heard of what a get waits for.
    fn heard_ns(&self, index: u32) -> u64 {
        let slice = self.slices.peek(index);
        if slice.state == SliceState::Asked {
            return self.lanes[slice.link.lane as usize].progress_ns;
        }
        // It waits for its turn with the peer: others are served before.
        let Some(peer) = self.peers.get(slice.way.peer as usize) else { return 0 };
        let lanes =
            peer.groups.iter().flat_map(|group| &group.rails).flat_map(|&rail| &self.rails[rail as usize].lanes);
        let lanes = lanes.map(|&lane| &self.lanes[lane as usize]).filter(|lane| lane.state == Endpoint::Ready);
        lanes.map(|lane| lane.progress_ns).max().unwrap_or(0)
    }

    /// Nodes that owe answers and of which nothing was heard for so long, on any connection to any of their shards,
    /// with their incarnations.
    pub fn silent_nodes(&self, for_ns: u64) -> impl Iterator<Item = (NodeId, Incarnation)> {
        let mut nodes: BTreeMap<(NodeId, Incarnation), bool> = BTreeMap::new();
        for lane in self.lanes.iter().filter(|lane| lane.state == Endpoint::Ready) {
            let owes = lane.load.outstanding > 0 || !lane.connection.detached.is_empty();
            let silent = lane.progress_ns.saturating_add(for_ns) <= self.now_ns;
            let Some(peer) = self.peers.get(lane.peer.0 as usize).filter(|_| owes || !silent) else { continue };
            let of = (peer.address.node, peer.address.incarnation);
            // One that owes nothing and was heard lately lives too.
            let silent_so_far = nodes.entry(of).or_insert(true);
            *silent_so_far &= silent;
        }
        nodes.into_iter().filter(|(of, silent)| *silent && of.0 != NodeId(0)).map(|(of, _)| of)
    }

    /// Asks second owners for what first owners have not answered.
    pub(super) fn hedge(&mut self) {
        while let Some(id) = self.timers.due_watched(self.now_ns) {
            let Some(slice) = self.slices.get_mut(id.index, id.generation) else { continue };
            slice.tries.hedge_ns = 0;
            let next = match slice.tries.replica {
                ReplicaUse::No => ReplicaUse::Asked,
                // The other one of the two that have it.
                ReplicaUse::Chosen => ReplicaUse::Missed,
                ReplicaUse::Asked | ReplicaUse::Missed => continue,
            };
            let (state, peer) = (slice.state, PeerId(slice.way.peer));
            let waits = matches!(state, SliceState::Queued | SliceState::Asked);
            let after_ns = if waits && (peer.0 as usize) < self.peers.len() { self.hedge_after_ns(peer) } else { 0 };
            // Who answers others is not silent, and who answers late after all is not left any more.
            let again_ns = match self.heard_ns(id.index).saturating_add(after_ns) {
                silent_ns if silent_ns > self.now_ns => silent_ns,
                _ if self.early.0 <= 0 => self.now_ns.saturating_add(self.config.hedge_ns),
                _ => 0,
            };
            if waits && again_ns > 0 {
                self.watch_until(id, again_ns);
                continue;
            }
            match state {
                SliceState::Queued => {
                    self.slices.at(id.index).tries.replica = next;
                    self.timers.take_parked(|parked| parked == id);
                    self.leave_lane(id.index);
                    self.route(id);
                }
                SliceState::Asked if self.detach(id.index, next) => {}
                SliceState::Asked
                | SliceState::Receiving
                | SliceState::Copying
                | SliceState::Committing
                | SliceState::Done => {}
            }
        }
    }

    /// Takes a get off the request that it waits for, whose answer is let go when it comes, and asks the other owner.
    /// The connection stays as it is; if it is dead, it is found to be so no later than without. Not where a device may
    /// write the caller's memory by itself: then false.
    fn detach(&mut self, index: u32, next: ReplicaUse) -> bool {
        let slice = self.slices.peek(index);
        let (lane, wire) = (slice.link.lane, slice.wire);
        let entry = &mut self.lanes[lane as usize];
        if !matches!(entry.path, Path::Stream | Path::Shared) || self.wires.get(wire.index, wire.generation).is_none() {
            return false;
        }
        let progress_ns = entry.progress_ns;
        entry.connection.detached.push(wire);
        self.wires.at(wire.index).slices.iter_mut().filter(|slice| **slice == index).for_each(|slice| *slice = NOWHERE);
        let slice = self.slices.at(index);
        (slice.tries.replica, slice.wire) = (next, RequestId::default());
        self.send_again(index, None);
        self.lanes[lane as usize].progress_ns = progress_ns;
        true
    }

    /// A request is answered, or never will be: nobody looks for gets that have left it any more.
    pub(super) fn forget_detached(&mut self, lane: u32, wire: RequestId) {
        self.lanes[lane as usize].connection.detached.retain(|left| *left != wire);
    }

    /// Whether an outcome is the second owner's, and decides nothing: then the first is asked again.
    pub(super) fn back_to_first(&mut self, index: u32, status: Status) -> bool {
        let decides = matches!(
            status,
            Status::Ok | Status::BufferTooSmall | Status::OutOfRange | Status::Striped | Status::Empty
        );
        let slice = self.slices.peek(index);
        if !matches!(slice.tries.replica, ReplicaUse::Chosen | ReplicaUse::Asked) || decides {
            return false;
        }
        if let Some(digest) = readable(&slice.request) {
            self.leases.missed(digest, self.now_ns);
        }
        self.slices.at(index).tries.replica = ReplicaUse::Missed;
        self.send_again(index, None);
        true
    }

    /// An attempt was in vain: whether the next is with the second owner, or the slice is one that is not tried again.
    pub(super) fn turn_to_second(&mut self, index: u32, status: Status) {
        let slice = self.slices.at(index);
        if status != Status::Unreachable || readable(&slice.request).is_none() {
            return;
        }
        slice.tries.replica = match slice.tries.replica {
            ReplicaUse::No => ReplicaUse::Asked,
            ReplicaUse::Chosen | ReplicaUse::Asked | ReplicaUse::Missed => ReplicaUse::Missed,
        };
    }

    /// Whether a slice is tried once only: whoever sends copies knows what to do next.
    pub(super) fn is_tried_once(&self, index: u32) -> bool {
        match self.slices.peek(index).request {
            Request::PutCopy(..) | Request::DropCopy(_) => true,
            Request::Remove(_) => self.sources.is_some(),
            _ => false,
        }
    }
}
