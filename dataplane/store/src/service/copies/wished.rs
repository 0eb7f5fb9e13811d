//! Copies of objects that are there already: somebody asks for one, and it is made within the rate of what moves in the
//! background.
//!
//! A wish is a mark at the object and lasts as long as that does; what is on an SSD is written there once more with it.
//! A repeated wish answers how far the copy is.

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Bitmap, Operation};
use kvplane_proto::{Digest, Status};

use super::super::Service;
use super::super::context::RequestContext;
use super::super::deferred::Replies;
use super::super::types::{CloseReason, PayloadTo};
use super::first::QUEUE_MOST;
use crate::Replica;

/// How long an object that is read ahead for its copy may stay without being asked for.
const AHEAD_NS: u64 = 10_000_000_000;

/// How far the copy of an object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplicaProgress {
    /// This shard does not own the object first.
    #[default]
    Elsewhere,
    /// It does, and there is no object.
    Missing,
    /// The slot has no second owner.
    Alone,
    /// It is being made, or will be.
    Coming,
    /// The second owner has a copy, of so many bytes. It may have evicted it since.
    There(u64),
}

impl Service {
    /// An object of ours is to have a copy with the second owner of its slot, however it was put, and to have it again
    /// whenever it is lost, like one that was put with two. What is on an SSD only is read into memory first.
    pub fn want_copy(&mut self, digest: Digest, now_ns: u64) -> ReplicaProgress {
        let wished = self.want_copy_for_now(digest, now_ns);
        if matches!(wished, ReplicaProgress::Coming | ReplicaProgress::There(_)) {
            self.write_promise(digest);
        }
        wished
    }

    /// A copy of an object of ours is wanted for as long as the object stays in memory: nothing is written to the SSD.
    pub(super) fn want_copy_for_now(&mut self, digest: Digest, now_ns: u64) -> ReplicaProgress {
        self.now_ns = self.now_ns.max(now_ns);
        if !self.ownership.owns(digest) {
            return ReplicaProgress::Elsewhere;
        }
        let object = self.store.as_ref().and_then(|store| store.peek(digest));
        let Some((bytes, version)) = object.map(|object| (object.extent.bytes, object.version)) else {
            let Some(view) = self.on_ssd(digest) else {
                let coming = self.is_coming(digest);
                return if coming { ReplicaProgress::Coming } else { ReplicaProgress::Missing };
            };
            self.prefetch(&view, self.now_ns.saturating_add(AHEAD_NS), true);
            return ReplicaProgress::Coming;
        };
        if !self.copies.seconds.contains_key(&digest.slot()) {
            return ReplicaProgress::Alone;
        }
        // A push of an older version, still in flight, makes no copy of this one and looks for none when it ends.
        let sending = self.copies.pushes.get(&digest).is_some_and(|push| push.version == version);
        let Some(store) = self.store.as_mut().filter(|store| !store.is_copy(digest)) else {
            return ReplicaProgress::Elsewhere;
        };
        if store.is_copied(digest) && !sending {
            return ReplicaProgress::There(bytes);
        }
        if store.replica(digest) == Replica::None {
            store.want_copy(digest);
        }
        let copies = &mut self.copies;
        if !sending && !copies.wishes.contains(&digest) {
            match copies.wishes.len() < QUEUE_MOST {
                true => copies.wishes.push_back(digest),
                false => self.walk_again(),
            }
        }
        ReplicaProgress::Coming
    }

    /// Copies of objects of ours are given up, and not made again: until such an object is put or wished for anew, is
    /// asked for very much, or has another first owner. The answer is that they are gone.
    pub(in crate::service) fn remove_copies(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let operation = Operation::RemoveCopy;
        let Some(items) = self.owned_digests(context, operation, header, body)? else { return Ok(PayloadTo::Discard) };
        let digests: Vec<Digest> = items.map(|item| item.digest).collect();
        self.note_orphans();
        let (mut bits, mut waits) = (Vec::with_capacity(digests.len()), Vec::new());
        for (at, digest) in digests.iter().enumerate() {
            let there =
                !self.is_anothers(context, *digest) && self.store.as_ref().is_some_and(|store| store.exists(*digest));
            let had = there && self.store.as_mut().is_some_and(|store| store.want_no_copy(*digest));
            if there {
                self.write_promise(*digest);
            }
            if had && self.copies.seconds.contains_key(&digest.slot()) {
                self.owe(*digest);
            }
            // Whoever asks again, as the second owner had not answered, is told the same.
            let owed = there && self.owes(*digest);
            bits.push(owed);
            if owed {
                waits.push(at);
            }
        }
        if waits.is_empty() {
            self.answers.items(context.peer, operation, header.request, bits.len(), |body| Bitmap::encode(bits, body));
            return Ok(PayloadTo::Discard);
        }
        let slot_of = self.defer(context.peer, header.request, Replies::Copies(bits, Status::Ok), waits.len());
        waits.into_iter().for_each(|at| self.wait_for_drop(digests[at], slot_of(at)));
        Ok(PayloadTo::Discard)
    }

    /// The next object that somebody wants a copy of gets its turn, if the rate allows.
    pub(super) fn grant_wish(&mut self) {
        let (now_ns, rate) = (self.now_ns, self.moves.limits().bytes_per_s.max(1));
        while self.copies.queue.is_empty() && self.copies.wish_ns <= now_ns {
            let Some(digest) = self.copies.wishes.pop_front() else { return };
            let object = self.store.as_ref().and_then(|store| store.peek(digest));
            let Some(object) = object.filter(|_| self.ownership.owns(digest)) else { continue };
            self.copies.queue.push_back((digest, object.version));
            let pause_ns = u128::from(object.extent.bytes) * 1_000_000_000 / u128::from(rate);
            // A shard that moves nothing by itself was asked all the same.
            let pause_ns = u64::try_from(pause_ns).unwrap_or(u64::MAX).min(1_000_000_000);
            self.copies.wish_ns = now_ns.saturating_add(pause_ns);
        }
    }

    /// When the next wish has its turn.
    pub(super) fn wishes_timeout(&self) -> Option<u64> {
        let copies = &self.copies;
        (!copies.wishes.is_empty() && copies.wish_ns > self.now_ns).then_some(copies.wish_ns)
    }
}
