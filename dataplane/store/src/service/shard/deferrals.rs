//! Deferred replies, which wait for the SSD, a former owner or a replica owner: all items of a frame are answered
//! together, when the last of them is settled.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, RequestId, Version};
use kvplane_proto::message::{Bitmap, CommitReply, Kind, LookupReply, Operation, SizeReply};
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Status};

use super::Shard;
use super::answers::Answers;
use super::stream_read::Reader;
use super::timing::{About, Timing, Whose};
use crate::ObjectView;
use crate::service::types::{Hold, PeerKey};

/// Item of a deferred reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) struct DeferredItem {
    answer: u64,
    item: usize,
}

/// Content of a deferred reply, as far as it is known.
#[derive(Debug)]
pub(in crate::service) enum Replies {
    /// Status, version, and whether the object is replicated.
    Put(Status, Version, bool),
    Commits(Operation, Vec<CommitReply>),
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

/// Replies with items that are not settled yet.
#[derive(Debug, Default)]
pub(in crate::service) struct Deferrals {
    next: u64,
    open: BTreeMap<u64, DeferredAnswer>,
}

/// Reply some of whose items wait.
#[derive(Debug)]
struct DeferredAnswer {
    peer: PeerKey,
    request: RequestId,
    replies: Replies,
    left: usize,
    /// Timing of the request when the wait began, and the time at which it began.
    timing: Timing,
    since_ns: u64,
    /// Tenant of one of its items, as far as it is known.
    whose: Option<Whose>,
    /// Object and bytes that the reply is about, as far as they are known.
    about: About,
}

impl Replies {
    const fn operation(&self) -> Operation {
        match self {
            Self::Put(..) => Operation::Put,
            Self::Commits(operation, _) => *operation,
            Self::Lookups(_) => Operation::Lookup,
            Self::Bits(..) => Operation::Remove,
            Self::Copies(..) => Operation::RemoveCopy,
            Self::Found(..) => Operation::Exists,
            Self::Sizes(_) => Operation::Size,
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
pub(in crate::service) const fn lookup_of(pin: PinId, object: &ObjectView, is_replicated: bool) -> LookupReply {
    LookupReply {
        status: Status::Ok,
        pin,
        offset: object.extent.offset,
        bytes: object.extent.bytes,
        version: object.version,
        checksum: object.checksum,
        flags: ItemFlags::replicated(is_replicated),
    }
}

impl Deferrals {
    /// Keeps a reply until this many of its items are settled. Returns a function from an item's index to its handle.
    fn keep(&mut self, answer: DeferredAnswer) -> impl Fn(usize) -> DeferredItem + use<> {
        self.next += 1;
        let number = self.next;
        self.open.insert(number, answer);
        move |item| DeferredItem { answer: number, item }
    }

    /// Settles an item of a reply: `change` enters the result. Returns the reply when this was its last item.
    fn settle(
        &mut self,
        at: DeferredItem,
        whose: Option<Whose>,
        about: About,
        change: impl FnOnce(&mut Replies, usize),
    ) -> Option<DeferredAnswer> {
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
    fn send(self, answers: &mut Answers, now_ns: u64) {
        let Self { peer, request, replies, timing, since_ns, whose, about, .. } = self;
        answers.outputs.waited(timing, about, since_ns, now_ns);
        answers.outputs.whose = whose;
        let operation = replies.operation();
        match replies {
            Replies::Put(status, version, is_replicated) => {
                let argument = if status == Status::Ok { version.0 } else { 0 };
                let mut header = Header::reply(Kind::Reply(operation), request, status).with_argument(argument);
                header.flags = header.flags.with(FrameFlags::REPLICATED, is_replicated && status == Status::Ok);
                answers.send(peer, header);
            }
            Replies::Commits(_, replies) => answers.records(peer, operation, request, &replies),
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

impl Shard {
    /// Defers a reply until this many of its items are settled. Returns a function from an item's index to its handle.
    pub(in crate::service) fn defer(
        &mut self,
        peer: PeerKey,
        request: RequestId,
        replies: Replies,
        left: usize,
    ) -> impl Fn(usize) -> DeferredItem + use<> {
        let outputs = &mut self.answers.outputs;
        let (timing, about, whose, since_ns) = (outputs.timing(), outputs.about, outputs.whose.take(), self.now_ns);
        self.deferrals.keep(DeferredAnswer { peer, request, replies, left, timing, since_ns, whose, about })
    }

    /// Settles an item of a reply: `change` enters the result. The reply is sent with the last item.
    pub(in crate::service) fn settle(&mut self, at: DeferredItem, change: impl FnOnce(&mut Replies, usize)) {
        let (whose, about) = (self.answers.outputs.whose.take(), self.answers.outputs.about);
        let Some(deferred) = self.deferrals.settle(at, whose, about, change) else { return };
        if self.sessions.get(deferred.peer).is_some() {
            deferred.send(&mut self.answers, self.now_ns);
        }
    }

    /// Settles a look-up of a deferred reply.
    pub(in crate::service) fn settle_lookup(&mut self, at: DeferredItem, reply: LookupReply) {
        self.settle(at, |replies, item| {
            if let Replies::Lookups(replies) = replies {
                replies[item] = reply;
            }
        });
    }

    /// Fails a put whose reply is deferred.
    pub(in crate::service) fn refuse_put(&mut self, at: DeferredItem, why: Status) {
        self.settle(at, |replies, item| match replies {
            Replies::Put(status, ..) => *status = why,
            Replies::Commits(_, replies) => replies[item].status = why,
            Replies::Lookups(_) | Replies::Bits(..) | Replies::Copies(..) | Replies::Found(..) | Replies::Sizes(_) => {}
        });
    }

    /// Returns the peer of a waiting get, if its connection is still open.
    pub(in crate::service) fn peer_of_reader(&self, reader: Reader) -> Option<PeerKey> {
        let peer = match reader {
            Reader::Stream(read) => Some(read.peer),
            Reader::Shared { item, .. } => self.deferrals.peer_of(item),
        };
        peer.filter(|peer| self.sessions.get(*peer).is_some())
    }

    /// Answers a waiting get with a status instead of the object.
    pub(in crate::service) fn turn_away(&mut self, reader: Reader, status: Status) {
        match reader {
            Reader::Stream(read) if self.sessions.get(read.peer).is_some() => {
                self.refuse(read.peer, read.wanted.operation(), read.request, status);
            }
            Reader::Stream(_) => {}
            Reader::Shared { item, .. } => self.settle_lookup(item, no_lookup(status)),
        }
    }

    /// Answers a get that waited for an object with the object, if it is in memory now. `tenant_of` returns the
    /// object's tenant, as far as it is known.
    pub(in crate::service) fn serve(
        &mut self,
        digest: Digest,
        reader: Reader,
        tenant_of: impl FnOnce(&Self) -> Option<u32>,
    ) {
        let here = self.peer_of_reader(reader);
        // The object may have been replaced by one of another tenant while it was read.
        let own = here.and_then(|peer| self.sessions.get(peer)?.pass.tenant);
        let foreign = own.is_some_and(|own| tenant_of(self).is_some_and(|tenant| tenant != own));
        let held = match (&mut self.store, here) {
            (Some(store), Some(_)) if store.exists(digest) && !foreign => store.hold(digest).ok_or(Status::Busy),
            _ => Err(Status::NotFound),
        };
        if let Ok((_, object)) = &held {
            let bytes = object.extent.bytes;
            self.counters.get_bytes += bytes;
            self.note_get(digest, bytes);
            self.answers.outputs.concerns(digest, bytes);
        }
        match (reader, held) {
            (Reader::Stream(read), Ok((pin, object))) => {
                // The object may have been replaced by one of another length while it was read.
                match read.check(object.extent.bytes, object.is_head) {
                    Ok(()) => self.answer_get(&read, Hold::Pin(pin), &object, false),
                    Err(status) => {
                        self.unpin(pin);
                        let operation = read.wanted.operation();
                        self.answers.status(read.peer, operation, read.request, status, object.extent.bytes);
                    }
                }
            }
            (Reader::Stream(read), Err(status)) if here.is_some() => {
                self.answers.status(read.peer, read.wanted.operation(), read.request, status, 0);
            }
            (Reader::Stream(..), Err(_)) => {}
            (Reader::Shared { item, all: false }, Ok((pin, object))) if object.is_head => {
                self.unpin(pin);
                self.settle_lookup(item, no_lookup(Status::Striped));
            }
            (Reader::Shared { item, .. }, Ok((pin, object))) => {
                self.sessions.lend_pin(here.expect("pinned for a connected peer"), pin);
                self.about(&object);
                self.settle_lookup(item, lookup_of(pin, &object, false));
            }
            (Reader::Shared { item, .. }, Err(status)) => self.settle_lookup(item, no_lookup(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;
    use crate::service::types::{Identity, Output, Path};

    const PEER: PeerKey = PeerKey { index: 0, generation: 1 };

    fn shard() -> Shard {
        let (cluster, segment_name) = ("test".to_owned(), String::new());
        let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
        let mut shard = Shard::new(Identity { cluster, node, incarnation, shard, segment_name }, None);
        shard.sessions.join(PEER, Path::Stream, 0);
        shard
    }

    #[test]
    fn a_reply_is_sent_with_the_last_of_its_items() {
        let mut shard = shard();
        let found = Replies::Found(vec![true, false, false], Vec::new());
        let item_at = shard.defer(PEER, RequestId::from_bits(7), found, 2);
        shard.settle(item_at(2), |replies, item| {
            let Replies::Found(bits, _) = replies else { panic!("another answer") };
            bits[item] = true;
        });
        assert_eq!(shard.answers.poll(0), None, "one of its items is not known");
        shard.settle(item_at(1), |_, _| {});
        let Some(Output::Frame { peer, header, body, .. }) = shard.answers.poll(0) else { panic!("no answer") };
        assert_eq!((peer, header.request, header.status), (PEER, RequestId::from_bits(7), Status::Ok));
        let mut expected = Vec::new();
        Bitmap::encode([true, false, true], &mut expected);
        assert_eq!(shard.answers.bytes(body), expected);
        shard.settle(item_at(1), |_, _| panic!("it has left"));
    }

    #[test]
    fn a_failed_put_is_refused_and_a_reply_to_a_gone_peer_is_dropped() {
        let mut shard = shard();
        let put = || Replies::Put(Status::Ok, Version(3), false);
        let item = shard.defer(PEER, RequestId::from_bits(1), put(), 1)(0);
        shard.refuse_put(item, Status::NoSpace);
        let Some(Output::Frame { header, .. }) = shard.answers.poll(0) else { panic!("no answer") };
        assert_eq!((header.status, header.argument), (Status::NoSpace, 0));
        let item = shard.defer(PEER, RequestId::from_bits(2), put(), 1)(0);
        shard.sessions.leave(PEER);
        shard.settle(item, |_, _| {});
        assert_eq!(shard.answers.poll(0), None);
    }
}
