//! From the SSD to memory: reads into fresh room of the pool, shared by all who ask for the same object meanwhile.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::Version;
use kvplane_proto::message::{Kind, LookupReply};
use kvplane_proto::{Digest, FrameFlags, ItemFlags, Status};
use kvplane_tier::{Get, GetError, Priority, RecordView, Span, Token};

use super::super::deferred::{Replies, Slot, no_lookup};
use super::super::objects::reserve_status;
use super::super::stream_read::{ReadSpan, StreamRead};
use super::super::timing::About;
use super::super::types::{Hold, Memory, Output, PeerKey, Place, Places};
use super::tails::tail_bytes_of;
use super::{Call, Service, Timing};
use crate::{ObjectView, Replica, Reserve};

/// How many may wait for one read.
const WAITERS_MOST: usize = 1024;
/// How many may wait for their reads to be begun: what large batches of several clients are together.
const QUEUED_MOST: usize = 1 << 14;

/// Who waits for an object.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum Waiter {
    /// An answer with the object's bytes.
    Stream(StreamRead),
    /// A place in the pool for the peer to copy from.
    Shared {
        slot: Slot,
        /// As [`StreamRead::all`].
        all: bool,
    },
    /// Requests that wait until it is known whose the object is.
    Claims,
}

/// Why a read was not begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum NotBegun {
    /// The tier has as many as it takes at a time.
    Full,
    /// It will not be.
    Refused(Status),
}

impl Service {
    /// Begins to read an object from the SSD, or joins who reads it already. Where the tier has as many reads as it
    /// takes, it waits for its turn.
    pub(in crate::service) fn read_from_ssd(&mut self, view: &RecordView, waiter: Waiter) -> Result<(), Status> {
        let digest = view.digest;
        self.use_prefetched(digest);
        let Some(tiered) = &mut self.tiered else { return Err(Status::NotFound) };
        tiered.frequency.see(digest);
        // Whoever came first goes first, but for those who need no place of their own.
        let may_begin = tiered.queued.is_empty() || tiered.reading.contains_key(&digest);
        let timing = self.answers.outputs.timing();
        let begun = if may_begin { self.join_or_begin(view, waiter, timing) } else { Err(NotBegun::Full) };
        match (begun, &mut self.tiered) {
            (Ok(()), _) => Ok(()),
            (Err(NotBegun::Full), Some(tiered)) if tiered.queued.len() < QUEUED_MOST => {
                tiered.queued.push_back((digest, waiter, timing));
                tiered.counters.reads_queued += 1;
                Ok(())
            }
            (Err(NotBegun::Full), _) => Err(Status::Busy),
            (Err(NotBegun::Refused(status)), _) => Err(status),
        }
    }

    /// Begins the reads that waited, as far as the tier takes them now. Whether any did not wait on.
    pub(super) fn begin_queued(&mut self) -> bool {
        let mut progress = false;
        while let Some((digest, waiter, timing)) =
            self.tiered.as_ref().and_then(|tiered| tiered.queued.front().copied())
        {
            // Somebody else may have brought it meanwhile; it may have been removed, or its slot may have left.
            let here = self.store.as_ref().is_some_and(|store| store.exists(digest));
            let view = self.on_ssd(digest).filter(|_| !here);
            let begun = match view {
                // Nobody waits for it any more.
                _ if self.peer_of_waiter(waiter).is_none() => Err(NotBegun::Refused(Status::Cancelled)),
                _ if !self.keeps(digest) => Err(NotBegun::Refused(Status::WrongOwner)),
                Some(view) => self.join_or_begin(&view, waiter, timing),
                None => Err(NotBegun::Refused(Status::NotFound)),
            };
            if begun == Err(NotBegun::Full) {
                return progress;
            }
            progress = true;
            if let Some(tiered) = &mut self.tiered {
                tiered.queued.pop_front();
            }
            match begun {
                Err(NotBegun::Refused(Status::NotFound)) => self.serve(digest, waiter),
                Err(NotBegun::Refused(status)) => self.turn_away(waiter, status),
                Err(NotBegun::Full) | Ok(()) => {}
            }
        }
        progress
    }

    /// Who waits, if that connection is still there.
    fn peer_of_waiter(&mut self, waiter: Waiter) -> Option<PeerKey> {
        let peer = match waiter {
            Waiter::Stream(read) => Some(read.peer),
            Waiter::Shared { slot, .. } => self.peer_of(slot),
            Waiter::Claims => None,
        };
        peer.filter(|peer| self.sessions.get_mut(*peer).is_some())
    }

    /// Answers whoever waits for an object with a status instead of the object.
    pub(in crate::service) fn turn_away(&mut self, waiter: Waiter, status: Status) {
        match waiter {
            Waiter::Stream(read) if self.sessions.get_mut(read.peer).is_some() => {
                self.refuse(read.peer, read.wanted.operation(), read.request, status);
            }
            Waiter::Stream(_) => {}
            Waiter::Shared { slot, .. } => self.settle_lookup(slot, no_lookup(status)),
            Waiter::Claims => {}
        }
    }

    /// Joins who reads an object, or begins to read it.
    fn join_or_begin(&mut self, view: &RecordView, waiter: Waiter, timing: Timing) -> Result<(), NotBegun> {
        let Some(tiered) = &mut self.tiered else { return Err(NotBegun::Refused(Status::NotFound)) };
        if let Some(token) = tiered.reading.get(&view.digest)
            && let Some(Call::Read { waiters, version, .. }) = tiered.calls.get_mut(token)
            && *version == view.version
        {
            if waiters.len() == WAITERS_MOST {
                return Err(NotBegun::Refused(Status::Busy));
            }
            waiters.push((waiter, timing));
            tiered.counters.reads_shared += 1;
            return Ok(());
        }
        self.begin_read(view, Priority::Get, Some((waiter, timing)))
    }

    /// Begins to read an object that nobody reads yet.
    pub(super) fn begin_read(
        &mut self,
        view: &RecordView,
        priority: Priority,
        waiter: Option<(Waiter, Timing)>,
    ) -> Result<(), NotBegun> {
        let refused = NotBegun::Refused;
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else {
            return Err(refused(Status::NotFound));
        };
        let digest = view.digest;
        // What is in the way goes sooner or later: pins and puts have deadlines.
        let tail_bytes = tail_bytes_of(view);
        let replica = if view.copied { Replica::First } else { Replica::None };
        let plain = Reserve::plain(digest, view.payload_bytes.into());
        let wanted = Reserve { tail_bytes, head: view.names_parts, replica, ..plain };
        let (reservation, extent) = store.reserve_for(&wanted).map_err(|error| match reserve_status(error) {
            Status::NoSpace => refused(Status::Busy),
            status => refused(status),
        })?;
        let destination = Span::pool(extent.offset, view.payload_bytes);
        let token = Token(tiered.next_call + 1);
        let waiters = waiter.into_iter().collect();
        if let Err(error) = tiered.tier.get(&Get { digest, destination, priority, token }) {
            store.abort(reservation).expect("a reservation that was just made");
            return Err(match error {
                GetError::Busy => NotBegun::Full,
                _ => refused(Status::NotFound),
            });
        }
        tiered.call(Call::Read { digest, version: view.version, reservation, waiters });
        tiered.reading.insert(digest, token.0);
        Ok(())
    }

    /// A read is over: with the object's version and checksum, or without the object.
    pub(super) fn read_done(&mut self, token: Token, found: Option<(Version, u64)>) {
        let Some(Call::Read { digest, .. }) = self.tiered.as_ref().and_then(|tiered| tiered.calls.get(&token.0)) else {
            return;
        };
        let kept = self.keeps(*digest);
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return };
        let Some(Call::Read { digest, version, reservation, waiters }) = tiered.calls.remove(&token.0) else { return };
        if tiered.reading.get(&digest) == Some(&token.0) {
            tiered.reading.remove(&digest);
        }
        // It may have been removed, or its slot given away, while it was read.
        let current = tiered.locate(digest).is_some_and(|view| view.version == version);
        let found = found.filter(|(read, _)| current && *read == version && kept);
        let restored = match found {
            Some((version, checksum)) => store.restore(reservation, checksum, version).is_ok(),
            None => {
                tiered.prefetched.take(digest);
                tiered.counters.misses += waiters.len() as u64;
                store.abort(reservation).expect("a reservation of our own");
                false
            }
        };
        if restored {
            tiered.counters.reads += 1;
            tiered.counters.hits += waiters.len() as u64;
        }
        for (waiter, timing) in waiters {
            let about = About { digest: Some(digest), bytes: 0 };
            self.answers.outputs.waited(timing, about, timing.arrived_ns, self.now_ns);
            self.serve(digest, waiter);
        }
        self.promote_or_drop(digest, restored);
        if found.is_none() {
            // What it was to be read from may be gone.
            self.tell_of_ssd(digest);
        }
    }

    /// What was read stays in memory if it is asked for often enough; else its bytes go when those who asked have them.
    fn promote_or_drop(&mut self, digest: Digest, restored: bool) {
        let stays = self.stays_for_copy(digest);
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return };
        let was_read_for_copy = tiered.copied_next.remove(&digest);
        if !restored {
            tiered.prefetched.take(digest);
            return;
        }
        if was_read_for_copy || stays {
            // It stays like what was put.
            tiered.prefetched.take(digest);
            self.want_tail(digest);
            self.walk_again();
            return;
        }
        if let Some(until_ns) = tiered.prefetched.until_ns(digest) {
            // What was read ahead waits for whoever wants it, until its time is over.
            if until_ns > self.now_ns {
                self.want_tail(digest);
            } else {
                tiered.prefetched.take(digest);
                tiered.counters.prefetches_expired += 1;
                store.drop_copy(digest);
            }
            return;
        }
        if tiered.frequency.estimate(digest) >= tiered.policy.promote_times {
            tiered.counters.promotions += 1;
            self.want_tail(digest);
        } else {
            tiered.counters.passed_through += 1;
            store.drop_copy(digest);
        }
    }

    /// Gives an object that is in memory now, if it is.
    pub(in crate::service) fn serve(&mut self, digest: Digest, waiter: Waiter) {
        if let Waiter::Claims = waiter {
            self.claim_read(digest, None);
            return;
        }
        let here = self.peer_of_waiter(waiter);
        // It may have been replaced while it was read, by what is another's.
        let own = here.and_then(|peer| self.sessions.get_mut(peer)?.pass.tenant);
        let foreign = own.is_some_and(|own| self.whose(digest).is_some_and(|tenant| tenant != own));
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
        match (waiter, held) {
            (Waiter::Stream(read), Ok((pin, object))) => {
                // It may have been replaced by one of another length while it was read.
                match read.check(object.extent.bytes, object.is_head) {
                    Ok(()) => self.answer_get(&read, Hold::Pin(pin), &object, false),
                    Err(status) => {
                        self.sent(Hold::Pin(pin));
                        let operation = read.wanted.operation();
                        self.answers.status(read.peer, operation, read.request, status, object.extent.bytes);
                    }
                }
            }
            (Waiter::Stream(read), Err(status)) if here.is_some() => {
                self.answers.status(read.peer, read.wanted.operation(), read.request, status, 0);
            }
            (Waiter::Stream(..), Err(_)) => {}
            (Waiter::Shared { slot, all: false }, Ok((pin, object))) if object.is_head => {
                self.sent(Hold::Pin(pin));
                self.settle_lookup(slot, no_lookup(Status::Striped));
            }
            (Waiter::Shared { slot, .. }, Ok((pin, object))) => {
                self.sessions.lend_pin(here.expect("held for a peer that is there"), pin);
                self.about(&object);
                self.settle_lookup(
                    slot,
                    LookupReply {
                        status: Status::Ok,
                        pin,
                        offset: object.extent.offset,
                        bytes: object.extent.bytes,
                        version: object.version,
                        checksum: object.checksum,
                        flags: ItemFlags::NONE,
                    },
                );
            }
            (Waiter::Shared { slot, .. }, Err(status)) => self.settle_lookup(slot, no_lookup(status)),
            (Waiter::Claims, _) => {}
        }
    }

    pub(in crate::service) fn settle_lookup(&mut self, slot: Slot, reply: LookupReply) {
        self.settle(slot, |replies, item| {
            if let Replies::Lookups(replies) = replies {
                replies[item] = reply;
            }
        });
    }

    /// Answers a get from the pool; `hold` goes back when the bytes have left.
    pub(in crate::service) fn answer_get(
        &mut self,
        read: &StreamRead,
        hold: Hold,
        object: &ObjectView,
        is_replicated: bool,
    ) {
        let (offset, checksum) = match read.wanted {
            ReadSpan::Whole { .. } => (0, object.checksum),
            // The host sums up what it sends.
            ReadSpan::Range { offset, .. } => (offset, 0),
        };
        let bytes = read.wanted.bytes_of(object.extent.bytes);
        let place = Place { memory: Memory::Pool, offset: object.extent.offset + offset, bytes };
        let mut header = Header::reply(Kind::Reply(read.wanted.operation()), read.request, Status::Ok)
            .with_payload(place.bytes, Some(checksum))
            .with_argument(object.version.0);
        header.flags = header.flags.with(FrameFlags::REPLICATED, is_replicated);
        let payload = Some((Places::One(place), hold));
        self.about(object);
        self.answers.outputs.push_back(Output::Frame { peer: read.peer, header, body: 0..0, payload });
    }
}
