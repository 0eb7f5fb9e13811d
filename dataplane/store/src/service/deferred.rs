//! Answers that wait, for the SSD or for a former owner: all items of a frame are answered together, when the last of
//! them is known.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{PinId, RequestId, Version};
use kvplane_proto::message::{Bitmap, CommitReply, Kind, LookupReply, Operation, SizeReply};
use kvplane_proto::{FrameFlags, ItemFlags, Status};

use super::timing::About;
use super::types::PeerKey;
use super::{Service, Timing, Whose};

/// One item of a deferred answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    answer: u64,
    item: usize,
}

/// What is known of a deferred answer so far.
#[derive(Debug)]
pub(super) enum Replies {
    /// Its status, its version, and whether the replica owner has it too.
    Put(Status, Version, bool),
    Commits(Operation, Vec<CommitReply>),
    Lookups(Vec<LookupReply>),
    /// Of a removal: what was there, what stayed as it names stripes, and whether the SSD took every tombstone.
    Bits((Vec<bool>, Vec<bool>), Status),
    /// Of which objects a second owner had a copy, and whether all of those are gone.
    Copies(Vec<bool>, Status),
    /// Bits of objects that exist, and of those that are stripe heads; the latter are empty where there are no heads.
    Found(Vec<bool>, Vec<bool>),
    Sizes(Vec<SizeReply>),
}

/// Answers of which something is not known yet.
#[derive(Debug, Default)]
pub(super) struct Deferrals {
    next: u64,
    open: BTreeMap<u64, DeferredAnswer>,
}

/// An answer some of whose items wait.
#[derive(Debug)]
struct DeferredAnswer {
    peer: PeerKey,
    request: RequestId,
    replies: Replies,
    left: usize,
    /// How it stood when the wait began, and when that was.
    timing: Timing,
    since_ns: u64,
    /// Whose object one of its items is, as far as that is known.
    whose: Option<Whose>,
    /// What it is about, as far as that is known.
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

/// The answer for an object that cannot be given.
pub(super) const fn no_lookup(status: Status) -> LookupReply {
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

impl Service {
    /// Keeps an answer until so many of its items are settled. Gives the slot of an item.
    pub(super) fn defer(
        &mut self,
        peer: PeerKey,
        request: RequestId,
        replies: Replies,
        left: usize,
    ) -> impl Fn(usize) -> Slot + use<> {
        let (timing, since_ns, whose) = (self.answers.outputs.timing(), self.now_ns, self.answers.outputs.whose.take());
        let about = self.answers.outputs.about;
        self.deferrals.next += 1;
        let answer = self.deferrals.next;
        self.deferrals
            .open
            .insert(answer, DeferredAnswer { peer, request, replies, left, timing, since_ns, whose, about });
        move |item| Slot { answer, item }
    }

    /// An item of an answer is known: `change` enters it. With the last one, the answer leaves.
    pub(super) fn settle(&mut self, slot: Slot, change: impl FnOnce(&mut Replies, usize)) {
        let (whose, about) = (self.answers.outputs.whose.take(), self.answers.outputs.about);
        let Some(deferred) = self.deferrals.open.get_mut(&slot.answer) else { return };
        deferred.whose = deferred.whose.or(whose);
        deferred.about = deferred.about.and(about);
        change(&mut deferred.replies, slot.item);
        deferred.left -= 1;
        if deferred.left == 0
            && let Some(deferred) = self.deferrals.open.remove(&slot.answer)
        {
            self.send_deferred(deferred);
        }
    }

    /// Whom the answer of a slot is for.
    pub(super) fn peer_of(&self, slot: Slot) -> Option<PeerKey> {
        Some(self.deferrals.open.get(&slot.answer)?.peer)
    }

    fn send_deferred(&mut self, deferred: DeferredAnswer) {
        let DeferredAnswer { peer, request, replies, timing, since_ns, whose, about, .. } = deferred;
        if self.sessions.get_mut(peer).is_none() {
            return;
        }
        self.answers.outputs.waited(timing, about, since_ns, self.now_ns);
        self.answers.outputs.whose = whose;
        let operation = replies.operation();
        let answers = &mut self.answers;
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
