//! Deferred replies, which wait for the SSD, a former owner or a replica owner: all items of a frame are answered
//! together, when the last of them is settled.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, RequestId, Version};
use kvplane_proto::map::ReplicaSet;
use kvplane_proto::message::{Bitmap, CommitReply, Kind, LookupReply, Operation, SizeReply};
use kvplane_proto::{ItemFlags, Status};

use super::answers::Answers;
use super::timing::{About, Outputs, TimedTenant, Timing};
use crate::ObjectView;
use crate::service::types::PeerKey;

/// Item of a deferred reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct DeferredItem {
    answer: u64,
    item: usize,
}

/// Content of a deferred reply, as far as it is known.
#[derive(Debug)]
pub(in crate::service) enum Replies {
    Put(PutReply),
    /// With true if they may name replica owners beyond the first.
    Commits(Operation, Vec<CommitReply>, bool),
    Lookups(Vec<LookupReply>),
    /// Of a removal: which objects existed, which were kept because they are stripe heads; and whether the SSD took
    /// every tombstone.
    Bits((Vec<bool>, Vec<bool>), Status),
    /// Of a removal of replicas: which objects had one at the replica owner; and whether all of those are gone.
    Copies(Vec<bool>, Status),
    /// Bits of objects that exist, and of those that are stripe heads; the latter are empty if there are no heads.
    Found(Vec<bool>, Vec<bool>),
    Sizes(Vec<SizeReply>),
}

/// Reply to a put.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct PutReply {
    status: Status,
    version: Version,
    /// Replica owners that have the object.
    replicas: ReplicaSet,
    /// True if the reply may name replica owners beyond the first.
    names_owners: bool,
}

impl PutReply {
    /// Returns the reply to a put of this version, which has no replica yet.
    pub(in crate::service) const fn of(version: Version, names_owners: bool) -> Self {
        Self { status: Status::Ok, version, replicas: ReplicaSet::NONE, names_owners }
    }
}

/// Returns the replica owners that the reply to a put names. To a client that knows of one only, the first one stands
/// for any.
const fn named(replicas: ReplicaSet, names_owners: bool) -> ReplicaSet {
    match names_owners || replicas.is_empty() {
        true => replicas,
        false => ReplicaSet::FIRST,
    }
}

/// Replies with items that are not settled yet.
#[derive(Debug, Default)]
pub(in crate::service) struct Deferrals {
    next: u64,
    open: BTreeMap<u64, DeferredAnswer>,
}

/// Reply some of whose items wait.
#[derive(Debug)]
pub(super) struct DeferredAnswer {
    pub(super) peer: PeerKey,
    request: RequestId,
    replies: Replies,
    left: usize,
    /// Timing of the request when the wait began, and the time at which it began.
    timing: Timing,
    since_ns: u64,
    /// Tenant of one of its items, as far as it is known.
    whose: Option<TimedTenant>,
    /// Object and bytes that the reply is about, as far as they are known.
    about: About,
}

impl Replies {
    const fn operation(&self) -> Operation {
        match self {
            Self::Put(..) => Operation::Put,
            Self::Commits(operation, ..) => *operation,
            Self::Lookups(_) => Operation::Lookup,
            Self::Bits(..) => Operation::Remove,
            Self::Copies(..) => Operation::RemoveCopy,
            Self::Found(..) => Operation::Exists,
            Self::Sizes(_) => Operation::Size,
        }
    }

    /// Enters the result of a look-up.
    pub(in crate::service) fn set_lookup(&mut self, item: usize, reply: LookupReply) {
        if let Self::Lookups(replies) = self {
            replies[item] = reply;
        }
    }

    /// Fails a put or a removal.
    pub(in crate::service) fn fail_change(&mut self, item: usize, why: Status) {
        match self {
            Self::Put(PutReply { status, .. }) | Self::Bits(_, status) | Self::Copies(_, status) => *status = why,
            Self::Commits(_, replies, _) => replies[item].status = why,
            Self::Lookups(_) | Self::Found(..) | Self::Sizes(_) => {}
        }
    }

    /// Fails a put.
    pub(in crate::service) fn fail_put(&mut self, item: usize, why: Status) {
        match self {
            Self::Put(reply) => reply.status = why,
            Self::Commits(_, replies, _) => replies[item].status = why,
            Self::Lookups(_) | Self::Bits(..) | Self::Copies(..) | Self::Found(..) | Self::Sizes(_) => {}
        }
    }

    /// Enters the replica owners that have the object of a put.
    pub(in crate::service) fn set_replicas(&mut self, item: usize, replicas: ReplicaSet) {
        match self {
            Self::Put(reply) => reply.replicas = replicas,
            Self::Commits(_, replies, names_owners) => {
                replies[item].flags = ItemFlags::of_replicas(named(replicas, *names_owners));
            }
            Self::Lookups(_) | Self::Bits(..) | Self::Copies(..) | Self::Found(..) | Self::Sizes(_) => {}
        }
    }
}

/// Returns the look-up reply for an object that cannot be returned.
pub(in crate::service) const fn no_lookup(status: Status) -> LookupReply {
    LookupReply {
        status,
        pin: PinId { index: 0, generation: 0 },
        offset: 0,
        bytes: 0,
        version: Version(0),
        checksum: 0,
        flags: ItemFlags::NONE,
    }
}

/// Returns the look-up reply for an object that a peer may copy from the pool while it holds this pin.
pub(in crate::service) const fn lookup_of(pin: PinId, object: &ObjectView, replicas: ReplicaSet) -> LookupReply {
    LookupReply {
        status: Status::Ok,
        pin,
        offset: object.extent.offset,
        bytes: object.extent.bytes,
        version: object.version,
        checksum: object.checksum,
        flags: ItemFlags::of_replicas(replicas),
    }
}

impl Deferrals {
    /// Defers the reply to the request that `outputs` is about until this many of its items are settled. Returns a
    /// function from an item's index to its handle.
    pub(super) fn add(
        &mut self,
        outputs: &mut Outputs,
        peer: PeerKey,
        request: RequestId,
        replies: Replies,
        left: usize,
        since_ns: u64,
    ) -> impl Fn(usize) -> DeferredItem + use<> {
        let (timing, about, whose) = (outputs.timing(), outputs.about, outputs.whose.take());
        self.next += 1;
        let answer = self.next;
        self.open.insert(answer, DeferredAnswer { peer, request, replies, left, timing, since_ns, whose, about });
        move |item| DeferredItem { answer, item }
    }

    /// Settles an item of a reply: `change` enters the result. Returns the reply when this was its last item.
    pub(super) fn settle(
        &mut self,
        outputs: &mut Outputs,
        at: DeferredItem,
        change: impl FnOnce(&mut Replies, usize),
    ) -> Option<DeferredAnswer> {
        let (whose, about) = (outputs.whose.take(), outputs.about);
        let deferred = self.open.get_mut(&at.answer)?;
        deferred.whose = deferred.whose.or(whose);
        deferred.about = deferred.about.and(about);
        change(&mut deferred.replies, at.item);
        deferred.left -= 1;
        if deferred.left == 0 { self.open.remove(&at.answer) } else { None }
    }

    /// Returns the peer that an item's reply is for.
    pub(in crate::service) fn peer_of(&self, at: DeferredItem) -> Option<PeerKey> {
        Some(self.open.get(&at.answer)?.peer)
    }
}

impl DeferredAnswer {
    /// Sends the reply, all of whose items are settled.
    pub(super) fn send(self, answers: &mut Answers, now_ns: u64) {
        let Self { peer, request, replies, timing, since_ns, whose, about, .. } = self;
        answers.outputs.waited(timing, about, since_ns, now_ns);
        answers.outputs.whose = whose;
        let operation = replies.operation();
        match replies {
            Replies::Put(PutReply { status, version, replicas, names_owners }) => {
                let mut header = Header::reply(Kind::Reply(operation), request, status);
                if status == Status::Ok {
                    header = header.with_argument(version.0);
                    header.flags = header.flags.with_replicas(named(replicas, names_owners));
                }
                answers.send(peer, header);
            }
            Replies::Commits(_, replies, _) => answers.records(peer, operation, request, &replies),
            Replies::Lookups(replies) => answers.records(peer, operation, request, &replies),
            Replies::Sizes(replies) => answers.records(peer, operation, request, &replies),
            Replies::Bits(_, status) | Replies::Copies(_, status) if status != Status::Ok => {
                answers.status(peer, operation, request, status, 0);
            }
            Replies::Copies(bits, _) => {
                answers.items(peer, operation, request, bits.len(), |body| Bitmap::encode(bits, body));
            }
            Replies::Found(bits, heads) | Replies::Bits((bits, heads), _) => {
                answers.items(peer, operation, request, bits.len(), |body| {
                    Bitmap::encode(bits, body);
                    Bitmap::encode(heads, body);
                });
            }
        }
    }
}
