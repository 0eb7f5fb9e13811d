//! From memory to the SSD: writes, and the removals that go before them.

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};
use kvplane_tier::{Ack, Memory, Put, PutError, Removal, RemoveError, Span, Token};

use super::super::copies::CopyWaits;
use super::super::deferred::{Replies, Slot};
use super::super::objects::CommittedObject;
use super::super::tail::tail_within;
use super::super::types::PeerKey;
use super::tails::{is_hard_pinned, is_of};
use super::{Admission, Call, DirtyObject, REMOVALS_MOST, ROUND_BYTES, Service, Strike, Tiering, WritePolicy};

/// True where the acknowledgement of a put promises more than memory.
pub(super) const fn is_for_ssd(asked: Option<PutAck>) -> bool {
    matches!(asked, Some(PutAck::Buffered | PutAck::Durable))
}

/// What the answer of a put waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::service) struct Waits {
    /// That it is written.
    write: bool,
    /// That what it replaces is struck out.
    strike: bool,
    /// Something of the second owner.
    copies: CopyWaits,
}

impl Waits {
    /// How many times its slot is settled.
    pub(in crate::service) fn count(self) -> usize {
        usize::from(self.write) + usize::from(self.strike) + self.copies.count()
    }
}

impl Tiering {
    /// Whether there is room for another object that waits to be written.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        // However large an object is: alone, it may wait.
        let little = self.held == 0 || self.held_bytes.saturating_add(bytes) <= self.backlog_most_bytes;
        little && self.held < self.backlog_most
    }

    pub(super) fn fits(&self, bytes: u64) -> bool {
        bytes <= u64::from(self.tier.config().max_object_bytes) && self.tier.degraded().is_none()
    }

    /// Objects that have waited long enough, or are too much, get in line.
    fn wash(&mut self, now_ns: u64) {
        let WritePolicy::Back { within_ns } = self.policy.write else { return };
        while let Some(held) = self.dirty.front() {
            let old = self.closing || now_ns >= held.since_ns.saturating_add(within_ns);
            // Half of what may be held: the rest is for those that come while these are written.
            let much = self.held_bytes > self.backlog_most_bytes / 2 || self.held > self.backlog_most / 2;
            if old || self.pressed || much && self.writes.is_empty() {
                self.writes.extend(self.dirty.pop_front());
            } else {
                return;
            }
        }
        self.pressed = false;
    }
}

impl Service {
    /// What the put of a part of a longer object, or of what names the parts, waits for where it asked for nothing:
    /// that it is written, whatever the policy. One that went unwritten, as the SSD could not keep up or nobody had
    /// seen it before, would be lost to the others with the next that memory has to make room for.
    pub(in crate::service) fn ack_of_parts(&self) -> Option<PutAck> {
        let tiered = self.tiered.as_ref().filter(|tiered| tiered.tier.degraded().is_none())?;
        match (tiered.policy.write, tiered.policy.ack) {
            (WritePolicy::Back { .. }, _) => None,
            (WritePolicy::Through | WritePolicy::Selective { .. }, PutAck::Memory) => Some(PutAck::Buffered),
            (WritePolicy::Through | WritePolicy::Selective { .. }, ack) => Some(ack),
        }
    }

    /// What the answer of a put waits for. To be asked once: it counts that the object was put.
    pub(in crate::service) fn waits_of(&mut self, made: &CommittedObject) -> Waits {
        if made.is_copy {
            return Waits::default();
        }
        let copies = self.copy_waits(made.digest);
        Waits { copies, write: self.put_waits(made), strike: self.must_strike(made) }
    }

    /// An object was put: what it replaces is struck out on the SSD, and then it goes there by the policy. `told` is
    /// told of each that is waited for.
    pub(in crate::service) fn make_last(&mut self, made: &CommittedObject, waits: Waits, told: Option<Slot>) {
        if made.is_copy {
            return;
        }
        self.copy_made(made.digest, made.version, waits.copies, told);
        if waits.strike
            && let Some(tiered) = &mut self.tiered
        {
            tiered.prefetched.take(made.digest);
            let strike = Strike::Replaced { digest: made.digest, version: made.version, told };
            tiered.queue_removal(made.digest, strike);
        }
        self.keep(made, told.filter(|_| waits.write));
    }

    /// What is answered when it is asked again whether a version was made that was: its first answer may have waited
    /// for the SSD, wait still, or have been a refusal.
    pub(in crate::service) fn kept(&self, digest: Digest, version: Version) -> Status {
        let Some(tiered) = &self.tiered else { return Status::Ok };
        let writing = tiered.writing.contains(&(digest, version)) && !tiered.is_paused(digest, version);
        if writing || tiered.removing.contains(&digest) {
            return Status::Busy;
        }
        let here = self.store.as_ref().and_then(|store| store.peek(digest)).is_some_and(|now| now.version >= version);
        let there = tiered.tier.locate(digest).is_some_and(|view| view.version >= version);
        // One that was taken back leaves nothing; neither does one that was removed since, which nobody can tell.
        if here || there { Status::Ok } else { Status::Stale }
    }

    /// Counts that an object was put, and says whether its answer waits until it is written.
    fn put_waits(&mut self, made: &CommittedObject) -> bool {
        let Some(tiered) = &mut self.tiered else { return false };
        let seen = tiered.frequency.see(made.digest);
        let at_once = match tiered.policy.write {
            WritePolicy::Through => true,
            WritePolicy::Selective { times } => seen >= times,
            WritePolicy::Back { .. } => false,
        };
        let fits = made.bytes <= u64::from(tiered.tier.config().max_object_bytes);
        // What was asked for by the put itself is not up to the policy.
        (at_once || made.ack.is_some()) && tiered.policy.ack_of(made.ack) != PutAck::Memory && fits
    }

    /// An object was put: it goes to the SSD by the policy; `told` waits for that.
    fn keep(&mut self, made: &CommittedObject, told: Option<Slot>) {
        let Some(tiered) = &self.tiered else { return };
        let digest = made.digest;
        let wanted = match tiered.policy.write {
            WritePolicy::Selective { times } => tiered.frequency.estimate(digest) >= times,
            WritePolicy::Through | WritePolicy::Back { .. } => true,
        };
        if told.is_some() || wanted && self.admitted(digest) {
            self.hold_for_write(digest, told, made.ack);
        }
    }

    /// An object in memory was asked for: by now it may be worth being written.
    pub(in crate::service) fn asked_for(&mut self, digest: Digest) {
        self.use_prefetched(digest);
        let Some(tiered) = &mut self.tiered else { return };
        let seen = tiered.frequency.see(digest);
        let wanted = match tiered.policy.write {
            WritePolicy::Selective { times } => seen >= times,
            // There may have been no room when it was put.
            WritePolicy::Through => {
                let counters = &tiered.counters;
                counters.writes_skipped + counters.writes_over_budget + counters.writes_failed > 0
            }
            // One whose write failed time and again.
            WritePolicy::Back { .. } => tiered.counters.writes_failed > 0 && tiered.tier.degraded().is_none(),
        };
        if !wanted || tiered.is_writing(digest) || tiered.locate(digest).is_some() {
            return;
        }
        // A get must not fill the backlog that puts wait for; a later get finds room.
        let bytes = self.store.as_ref().and_then(|store| store.peek(digest)).map_or(0, |object| object.extent.bytes);
        if tiered.has_room(bytes) && self.admitted(digest) {
            self.hold_for_write(digest, None, None);
        }
    }

    /// Whether the day's bytes allow for an object that nobody was promised.
    fn admitted(&mut self, digest: Digest) -> bool {
        let Some(tiered) = &mut self.tiered else { return false };
        let admitted = match tiered.budget.admission() {
            Admission::Full => true,
            Admission::Selective => tiered.frequency.estimate(digest) >= 2,
            Admission::Promised => false,
        };
        tiered.counters.writes_over_budget += u64::from(!admitted);
        admitted
    }

    /// `asked`: what its put asked for.
    pub(super) fn hold_for_write(&mut self, digest: Digest, told: Option<Slot>, asked: Option<PutAck>) {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return };
        let object = store.peek(digest);
        let bytes = object.map_or(0, |object| object.extent.bytes);
        let wanted = tiered.fits(bytes) && (tiered.has_room(bytes) || tiered.policy.must_write(asked));
        let held = if wanted { store.hold(digest) } else { None };
        let Some((pin, object)) = held else {
            tiered.counters.writes_skipped += 1;
            if let (Some(slot), Some(object)) = (told, store.peek(digest)) {
                self.write_failed(digest, object.version, slot);
            }
            return;
        };
        let version = object.version;
        let (bytes, since_ns) = (object.extent.bytes, self.now_ns);
        let account = store.account_of_stranger(object.tenant);
        let held =
            DirtyObject { pin, digest, version, bytes, account, since_ns, told, ack: asked, copied: false, tries: 0 };
        tiered.held += 1;
        tiered.count_held(account, true);
        tiered.held_bytes += held.bytes;
        tiered.writing.insert((digest, version));
        match tiered.policy.write {
            WritePolicy::Back { .. } if told.is_none() && !is_for_ssd(asked) => tiered.dirty.push_back(held),
            _ => tiered.writes.push_back(held),
        }
    }

    /// Gives the tier what waits to be written, as far as it takes it.
    pub(super) fn give_writes(&mut self, memory: &mut dyn Memory) -> bool {
        let now_ns = self.now_ns;
        let (mut progress, mut bytes) = (false, 0);
        if let Some(tiered) = &mut self.tiered {
            tiered.end_pauses(now_ns);
            tiered.wash(now_ns);
        }
        self.write_inherited();
        while bytes < ROUND_BYTES {
            let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return progress };
            // A removal that waits may be of an earlier object of the same name.
            let Some(mut held) = tiered.writes.front().copied().filter(|_| tiered.removals.is_empty()) else { break };
            if !store.is_live(held.pin) {
                tiered.writes.pop_front();
                self.let_go_of_gone(held);
                continue;
            }
            let object = store.held(held.pin).expect("a pin of our own");
            let durable = tiered.policy.ack_of(held.ack) == PutAck::Durable;
            let ack = if durable { Ack::Durable } else { Ack::Buffered };
            let token = Token(tiered.next_call + 1);
            let read = |at, into: &mut [u8]| memory.read(Span::pool(at, into.len() as u32), into);
            let tail = match object.has_tail {
                true => tail_within(object.tail_at, store.config().pool_bytes, read),
                false => Vec::new(),
            };
            // Whoever has mapped the pool may have spoilt it: another's name would charge and list it as another's.
            let tail = if is_of(&tail, held.digest) { tail } else { Vec::new() };
            held.copied = store.replica(held.digest).is_owed_a_copy();
            let put = Put {
                digest: held.digest,
                key: &tail,
                version: object.version,
                payload: Span::pool(object.extent.offset, object.extent.bytes as u32),
                checksum: Some(object.checksum),
                pinned: is_hard_pinned(&tail),
                names_parts: object.is_head,
                copied: held.copied,
                ack,
                token,
            };
            let taken = tiered.tier.put(now_ns, &put, memory);
            if matches!(taken, Err(PutError::Busy | PutError::Full)) {
                tiered.counters.writes_put_off += 1;
                break;
            }
            progress = true;
            bytes += held.bytes;
            tiered.writes.pop_front();
            match taken {
                Ok(accepted) => {
                    tiered.counters.writes += 1;
                    tiered.counters.write_bytes += held.bytes;
                    tiered.call(Call::Write { held, lent: accepted.lent, unwritten: true, failed: false });
                }
                Err(error) => {
                    tiered.counters.writes_failed += 1;
                    if matches!(error, PutError::Checksum { .. }) {
                        // Not what its writer stated: nobody is to be given that.
                        self.counters.corrupt += 1;
                        self.drop_version(held.digest, held.version);
                    }
                    self.let_go(&held, false);
                }
            }
        }
        progress
    }

    pub(super) fn written(&mut self, token: Token, good: bool) {
        let Some(tiered) = &mut self.tiered else { return };
        let Some(Call::Write { held, lent, unwritten, failed }) = tiered.calls.get_mut(&token.0) else { return };
        (*unwritten, *failed) = (false, !good);
        let (told, digest, version, over) = (held.told.take(), held.digest, held.version, !*lent);
        self.tell_of_ssd(digest);
        if let Some(slot) = told {
            if good {
                self.settle(slot, |_, _| {});
            } else {
                self.write_failed(digest, version, slot);
            }
        }
        if over {
            self.end_write(token);
        }
    }

    pub(super) fn released(&mut self, token: Token) {
        let Some(tiered) = &mut self.tiered else { return };
        let Some(Call::Write { lent, unwritten, .. }) = tiered.calls.get_mut(&token.0) else { return };
        *lent = false;
        if !*unwritten {
            self.end_write(token);
        }
    }

    fn end_write(&mut self, token: Token) {
        let Some(tiered) = &mut self.tiered else { return };
        let Some(Call::Write { held, failed, .. }) = tiered.calls.remove(&token.0) else { return };
        if failed {
            // Not one that is gone: replaced, removed, or taken back because its put waited for this.
            let live = self.store.as_ref().is_some_and(|store| store.is_live(held.pin));
            if live && tiered.try_again(&held, self.now_ns) {
                tiered.counters.writes_retried += 1;
                return;
            }
            tiered.counters.writes_failed += 1;
        }
        self.let_go(&held, true);
    }

    /// An object is gone before it was written. One that was removed was put before that: there is nothing to write.
    fn let_go_of_gone(&mut self, mut held: DirtyObject) {
        let is_removed = self.store.as_ref().is_some_and(|store| store.peek(held.digest).is_none());
        if is_removed && let Some(slot) = held.told.take() {
            self.settle(slot, |_, _| {});
        }
        self.let_go(&held, false);
    }

    /// An object does not wait to be written any more.
    fn let_go(&mut self, held: &DirtyObject, good: bool) {
        let (Some(tiered), Some(store)) = (&mut self.tiered, &mut self.store) else { return };
        tiered.held -= 1;
        tiered.held_bytes -= held.bytes;
        tiered.count_held(held.account, false);
        tiered.writing.remove(&(held.digest, held.version));
        store.unpin(held.pin).expect("a pin of our own");
        if let Some(slot) = held.told.filter(|_| !good) {
            self.write_failed(held.digest, held.version, slot);
        }
        self.moved_written(held.digest);
    }

    /// A put that was to be written cannot be: it is taken back, and its answer says so. One that was replaced
    /// meanwhile
    /// is not the last word: whoever put it may try again.
    fn write_failed(&mut self, digest: Digest, version: Version, slot: Slot) {
        let replaced =
            self.store.as_ref().and_then(|store| store.peek(digest)).is_some_and(|now| now.version > version);
        self.drop_version(digest, version);
        self.refuse_put(slot, if replaced { Status::Busy } else { Status::NoSpace });
    }

    /// Drops an object from memory, unless it is another version by now.
    pub(super) fn drop_version(&mut self, digest: Digest, version: Version) {
        if let Some(store) = &mut self.store
            && store.peek(digest).is_some_and(|object| object.version == version)
        {
            store.drop_copy(digest);
        }
    }

    fn refuse_put(&mut self, slot: Slot, why: Status) {
        self.settle(slot, |replies, item| match replies {
            Replies::Put(status, ..) => *status = why,
            Replies::Commits(_, replies) => replies[item].status = why,
            Replies::Lookups(_) | Replies::Bits(..) | Replies::Copies(..) | Replies::Found(..) | Replies::Sizes(_) => {}
        });
    }

    /// Puts whose slot has left while they were written are refused now: their objects are void, and would be so too
    /// if the slot came back before the device is done.
    pub(in crate::service) fn refuse_void_puts(&mut self) {
        let Some(tiered) = &mut self.tiered else { return };
        let given = tiered.calls.values_mut().filter_map(|call| match call {
            Call::Write { held, .. } => Some(held),
            _ => None,
        });
        let waiting = tiered.dirty.iter_mut().chain(&mut tiered.writes).chain(given);
        let ownership = &self.ownership;
        let void: Vec<Slot> =
            waiting.filter(|held| !ownership.owns(held.digest)).filter_map(|held| held.told.take()).collect();
        self.counters.wrong_owner += void.len() as u64;
        void.into_iter().for_each(|slot| self.refuse_put(slot, Status::WrongOwner));
    }

    /// Removes objects from the SSD; answers when all are gone for good, `bits` being what was there.
    pub(in crate::service) fn remove_from_ssd(
        &mut self,
        peer: PeerKey,
        request: kvplane_proto::RequestId,
        digests: &[Digest],
        bits: (Vec<bool>, Vec<bool>),
        owed: &[usize],
    ) -> Result<(), Status> {
        let tiered = self.tiered.as_ref().expect("asked only with a tier");
        if tiered.removals.len() + digests.len() > REMOVALS_MOST {
            return Err(Status::Busy);
        }
        let slot_of = self.defer(peer, request, Replies::Bits(bits, Status::Ok), digests.len() + owed.len());
        let tiered = self.tiered.as_mut().expect("asked only with a tier");
        for (item, digest) in digests.iter().enumerate() {
            tiered.queue_removal(*digest, Strike::Asked(slot_of(item)));
        }
        digests.iter().for_each(|digest| self.tell_of_ssd(*digest));
        owed.iter().for_each(|at| self.wait_for_drop(digests[*at], slot_of(*at)));
        Ok(())
    }

    /// Gives the tier the removals that wait, as far as it takes them.
    pub(super) fn give_removals(&mut self, memory: &mut dyn Memory) -> bool {
        let mut progress = false;
        loop {
            let Some(tiered) = &mut self.tiered else { return progress };
            let Some((digest, strike)) = tiered.removals.front().copied() else { return progress };
            let ack = if tiered.policy.ack == PutAck::Durable { Ack::Durable } else { Ack::Buffered };
            let token = Token(tiered.next_call + 1);
            let taken = match strike {
                Strike::Replaced { .. } => tiered.tier.strike(self.now_ns, digest, ack, token, memory),
                Strike::Asked(_) | Strike::Swept => tiered.tier.remove(self.now_ns, digest, ack, token, memory),
            };
            if taken == Err(RemoveError::Busy) {
                return progress;
            }
            progress = true;
            tiered.removals.pop_front();
            tiered.removing.remove(&digest);
            match taken {
                Ok(Removal::Pending) => {
                    tiered.counters.removals += 1;
                    tiered.call(Call::Remove { strike });
                }
                Ok(Removal::Absent) => self.removal_told(strike, true),
                Err(_) => {
                    tiered.counters.removals_unwritten += 1;
                    self.removal_told(strike, false);
                }
            }
        }
    }

    pub(super) fn removal_done(&mut self, token: Token, good: bool) {
        let Some(tiered) = &mut self.tiered else { return };
        if let Some(Call::Remove { strike }) = tiered.calls.remove(&token.0) {
            self.removal_told(strike, good);
        }
    }

    /// A removal that is not on the SSD may be undone by a restart: whoever asked for it is told.
    fn removal_told(&mut self, strike: Strike, good: bool) {
        match strike {
            Strike::Swept => self.tiered.iter_mut().for_each(|tiered| tiered.sweep.waiting -= 1),
            Strike::Asked(slot) => self.settle(slot, |replies, _| {
                if let (Replies::Bits(_, status), false) = (replies, good) {
                    *status = Status::NoSpace;
                }
            }),
            Strike::Replaced { told: Some(slot), .. } if good => self.settle(slot, |_, _| {}),
            Strike::Replaced { digest, version, told } => {
                if !good {
                    // The former version is on the SSD still, so this one does not take its place.
                    self.drop_version(digest, version);
                    self.tell_of_ssd(digest);
                }
                told.into_iter().for_each(|slot| self.refuse_put(slot, Status::NoSpace));
            }
        }
    }
}

impl Tiering {
    pub(super) fn queue_removal(&mut self, digest: Digest, strike: Strike) {
        self.removals.push_back((digest, strike));
        self.removing.insert(digest);
    }

    /// Whether a version of an object is on its way to the SSD.
    pub(super) fn is_writing(&self, digest: Digest) -> bool {
        self.writing.range((digest, Version(0))..=(digest, Version(u64::MAX))).next().is_some()
    }
}
