//! The first owner's side: what it has copied, what has to be dropped before something is acknowledged, and the walk
//! for objects that lack a copy.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Epoch, PinId, Slot as MapSlot, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{Part, PutItem, PutOptions};
use kvplane_proto::{Digest, Limits, Status};

use super::super::deferred::Slot;
use super::super::moves::Call;
use super::super::tail::{TailHead, tail_within};
use super::super::types::{Memory, Place};
use super::super::{Fetch, FetchDone, PoolBytes, Service, Want};
use crate::store::{Fate, Side};

/// Drops of one request.
const DROPS: usize = 1024;
/// From so many owed drops on, whole slots are owed.
const OWED_MOST: usize = 1 << 14;
/// Objects that wait to be copied; what is more is found by the walk.
pub(super) const QUEUE_MOST: usize = 4096;
/// Objects, and their bytes, that are on their way to second owners at the same time. One may be larger.
const PUSHES_MOST: usize = 32;
const PUSH_BYTES_MOST: u64 = 64 << 20;
/// Objects that are looked at for one that can be sent.
const TURNS: usize = 64;
/// Entries that one step of the walk looks at, and its pause when something did not go.
const WALK_STEP: u32 = 256;
const WALK_AGAIN_NS: u64 = 500_000_000;
/// Between two attempts with a second owner that does not answer: doubles up to the second.
const RETRY_NS: u64 = 20_000_000;
const RETRY_MOST_NS: u64 = 500_000_000;

/// How a second owner does.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Second {
    failures: u32,
    pub(super) retry_ns: u64,
    dropping: bool,
}

/// A copy that has to go.
#[derive(Debug, Default)]
pub(super) struct OwedRemoval {
    /// Whether the second owner has to say that it went.
    pub(super) drops: bool,
    /// Until then clients may read a copy that a former second owner has; 0 for not at all.
    pub(super) lapses_ns: u64,
    /// The question about it that was not answered yet; 0 for none.
    asked: u64,
    pub(super) waiters: Vec<(Slot, u64)>,
}

/// An object on its way to the second owner.
#[derive(Debug)]
pub(super) struct Push {
    second: ShardKey,
    pub(super) version: Version,
    pin: PinId,
    bytes: u64,
    /// Owners have changed meanwhile.
    void: bool,
}

/// What a put of a copy says, by the object's tail where it has one. Whether it names stripes is not left to that.
#[must_use]
pub fn copy_of(
    digest: Digest,
    bytes: u64,
    is_head: bool,
    tail_at: Option<u64>,
    pool: &dyn PoolBytes,
) -> (PutItem, Vec<u8>, Vec<u8>) {
    let part = if is_head { Part::Head } else { Part::None };
    let item = PutItem::plain(digest, bytes).with_options(&PutOptions { part, ..PutOptions::default() });
    let plain = (item, Vec::new(), Vec::new());
    let Some(at) = tail_at else { return plain };
    let tail = tail_within(at, pool.bytes(), |at, into| pool.read(at, into));
    // Whoever has mapped the pool may have spoilt it.
    let Some((head, name)) = TailHead::split(&tail) else { return plain };
    let part = match (is_head, head.options.part) {
        (true, _) => Part::Head,
        (false, Part::Stripe) => Part::Stripe,
        (false, _) => Part::None,
    };
    let options = PutOptions { soft_pin_ms: 0, part, ..head.options };
    if head.key_bytes == 0 {
        return (plain.0.with_options(&options), Vec::new(), Vec::new());
    }
    // A tail under another name is another object's.
    let own = name.digest() == digest;
    if own { (PutItem::named(&name, bytes, &options), name.tenant.to_vec(), name.key.to_vec()) } else { plain }
}

/// The digest that means all of a slot.
pub(super) const fn all_of(slot: MapSlot) -> Digest {
    Digest((slot.0 as u128) << 114)
}

impl Service {
    /// Objects that are gone leave drops behind. To be called before anything is acknowledged.
    pub(in crate::service) fn note_orphans(&mut self) {
        let Some(store) = self.store.as_mut().filter(|store| store.has_orphans()) else { return };
        for digest in store.take_orphans() {
            if self.copies.seconds.contains_key(&digest.slot()) {
                self.owe(digest);
            }
        }
        if self.copies.owed.len() > OWED_MOST {
            self.owe_slots();
        }
    }

    pub(super) fn owe(&mut self, digest: Digest) {
        if !self.copies.owed.contains_key(&all_of(digest.slot())) {
            self.copies.owed.entry(digest).or_default().drops = true;
            self.copies.owed_idle_ns = 0;
        }
    }

    /// Too many: whole slots take less to remember.
    fn owe_slots(&mut self) {
        let (mut slots, mut asked): (BTreeMap<Digest, OwedRemoval>, BTreeMap<Digest, OwedRemoval>) = Default::default();
        for (digest, owed) in core::mem::take(&mut self.copies.owed) {
            if owed.asked != 0 {
                asked.insert(digest, owed);
            } else {
                let slot = slots.entry(all_of(digest.slot())).or_default();
                (slot.drops, slot.lapses_ns) = (slot.drops | owed.drops, slot.lapses_ns.max(owed.lapses_ns));
                slot.waiters.extend(owed.waiters);
            }
        }
        slots.extend(asked);
        (self.copies.owed, self.copies.owed_idle_ns) = (slots, 0);
    }

    /// Whether the second owner may have a copy that has to go before anything of its object is acknowledged.
    pub(in crate::service) fn owes(&self, digest: Digest) -> bool {
        let owed = &self.copies.owed;
        !owed.is_empty() && (owed.contains_key(&digest) || owed.contains_key(&all_of(digest.slot())))
    }

    /// Whether any copy has to go.
    pub(in crate::service) fn owes_any(&mut self) -> bool {
        self.note_orphans();
        !self.copies.owed.is_empty()
    }

    /// The owners have changed: what waits for second owners of before is over.
    pub(super) fn change_seconds(
        &mut self,
        epoch: Epoch,
        seconds: BTreeMap<MapSlot, ShardKey>,
        missed: bool,
        owns: &dyn Fn(MapSlot) -> bool,
    ) {
        // Where a map was missed nothing is left here; the second owner may not have missed it, and have copies still.
        self.note_orphans();
        // What second owners refused by the map of before says nothing of this one.
        self.copies.peers.values_mut().for_each(|peer| (peer.failures, peer.retry_ns) = (0, 0));
        self.copies.owed_idle_ns = 0;
        if seconds == self.copies.seconds && !missed {
            return;
        }
        let former = core::mem::replace(&mut self.copies.seconds, seconds);
        self.copies.seconds_since = epoch;
        let copies = &mut self.copies;
        let same = |slot: MapSlot| former.get(&slot) == copies.seconds.get(&slot);
        let over: Vec<Digest> = copies.owed.keys().copied().filter(|digest| !same(digest.slot())).collect();
        copies.pushes.iter_mut().for_each(|(digest, push)| push.void |= missed || !same(digest.slot()));
        let here: BTreeSet<ShardKey> = copies.seconds.values().copied().collect();
        copies.peers.retain(|key, _| here.contains(key));
        for key in here {
            copies.peers.entry(key).or_default();
        }
        // Also those that have none any more.
        let slots = former.keys().chain(copies.seconds.keys()).copied();
        let changed: BTreeSet<MapSlot> = slots.filter(|slot| owns(*slot) && !same(*slot)).collect();
        for digest in over {
            let Some(owed) = self.copies.owed.remove(&digest) else { continue };
            // Whoever owns the slot now may have inherited what was to go.
            let owned = owns(digest.slot());
            if missed || !owned {
                owed.waiters.into_iter().for_each(|(slot, _)| self.refuse_waiter(slot, Status::WrongOwner));
                if owned {
                    self.lapse(digest, Vec::new());
                }
            } else {
                self.lapse(digest, owed.waiters);
            }
        }
        if missed {
            let late: Vec<Slot> =
                self.copies.owed.values_mut().flat_map(|owed| owed.waiters.drain(..)).map(|(slot, _)| slot).collect();
            late.into_iter().for_each(|slot| self.refuse_waiter(slot, Status::WrongOwner));
        }
        if let Some(store) = self.store.as_mut().filter(|_| !changed.is_empty()) {
            // What they had of it they have dropped, or will before they are asked for it.
            let mut copied = Vec::new();
            store.reassign(|digest, side| {
                if side == Side::Copy || !changed.contains(&digest.slot()) {
                    return Fate::Stays;
                }
                if side == Side::Copied {
                    copied.push(digest);
                }
                Fate::Alone
            });
            copied.into_iter().filter(|digest| owns(digest.slot())).for_each(|digest| self.lapse(digest, Vec::new()));
            if self.copies.owed.len() > OWED_MOST {
                self.owe_slots();
            }
        }
        self.owe_unknown();
        self.look_for_uncopied();
    }

    /// Second owners are others, or slots are served that were not when they became so: both walks begin anew.
    pub(in crate::service) fn look_for_uncopied(&mut self) {
        let copies = &mut self.copies;
        (copies.unwalked, copies.owed_idle_ns) = (!copies.seconds.is_empty(), 0);
        (copies.walk, copies.walk_ns, copies.again) = (copies.unwalked.then_some(0), self.now_ns, false);
        self.walk_ssd_again();
    }

    /// A former second owner may have a copy, and clients that were told so: answers about the object wait until none
    /// reads it any more.
    fn lapse(&mut self, digest: Digest, waiters: Vec<(Slot, u64)>) {
        let until_ns = self.copies.told_ns.saturating_add(Limits::COPY_LAPSE_NS);
        if self.copies.told_ns == 0 || until_ns <= self.now_ns {
            waiters.into_iter().for_each(|(slot, _)| self.settle(slot, |_, _| {}));
            return;
        }
        let owed = self.copies.owed.entry(digest).or_default();
        owed.lapses_ns = owed.lapses_ns.max(until_ns);
        owed.waiters.extend(waiters);
        self.copies.due(until_ns);
    }

    /// What is on its way since before owners changed may come to second owners of now, without a note of ours.
    fn owe_unknown(&mut self) {
        let unknown = self.copies.pushes.iter().filter(|(_, push)| push.void).map(|(digest, _)| *digest);
        for digest in unknown.collect::<Vec<Digest>>() {
            if self.copies.seconds.contains_key(&digest.slot()) {
                self.owe(digest);
            }
        }
    }

    /// Something lacks a copy: the walk finds it.
    pub(in crate::service) fn walk_again(&mut self) {
        let copies = &mut self.copies;
        if copies.seconds.is_empty() {
            copies.walk = None;
        } else if copies.walk.is_none() {
            copies.walk = Some(0);
            copies.walk_ns = self.now_ns.saturating_add(WALK_AGAIN_NS);
        } else {
            copies.again = true;
        }
    }

    /// The next thing to ask of a second owner.
    pub(in crate::service) fn next_copy(&mut self) -> Option<Fetch> {
        if self.copies.seconds.is_empty() {
            return None;
        }
        self.note_orphans();
        self.next_copy_drop().or_else(|| self.next_push()).or_else(|| {
            self.grant_wish();
            self.walk_on();
            self.walk_ssd();
            self.next_push()
        })
    }

    fn next_copy_drop(&mut self) -> Option<Fetch> {
        let now_ns = self.now_ns;
        let copies = &mut self.copies;
        if copies.owed.is_empty() || copies.owed_idle_ns > now_ns {
            return None;
        }
        let mut chosen: Option<ShardKey> = None;
        let mut digests = Vec::new();
        for (digest, owed) in &mut copies.owed {
            let Some(second) = copies.seconds.get(&digest.slot()) else { continue };
            let ready = copies.peers.get(second).is_some_and(|peer| !peer.dropping && peer.retry_ns <= now_ns);
            // Of a whole slot nothing may be on its way either.
            let sending = match *digest == all_of(digest.slot()) {
                true => copies.pushes.keys().any(|push| push.slot() == digest.slot()),
                false => copies.pushes.contains_key(digest),
            };
            if !owed.drops || owed.asked != 0 || sending || !ready || chosen.is_some_and(|chosen| chosen != *second) {
                continue;
            }
            chosen = Some(*second);
            owed.asked = self.moves.next_token();
            digests.push(*digest);
            if digests.len() == DROPS {
                break;
            }
        }
        let Some(second) = chosen else {
            let retries = copies.peers.values().map(|peer| peer.retry_ns).filter(|at_ns| *at_ns > now_ns);
            copies.owed_idle_ns = retries.min().unwrap_or(u64::MAX);
            return None;
        };
        copies.peers.entry(second).or_default().dropping = true;
        let call = Call::DropCopies { second, digests: digests.clone() };
        Some(self.moves.ask(second, Want::DropCopies(digests), call))
    }

    fn next_push(&mut self) -> Option<Fetch> {
        for _ in 0..TURNS {
            let copies = &mut self.copies;
            let full = copies.pushes.len() >= PUSHES_MOST || copies.push_bytes >= PUSH_BYTES_MOST;
            let (digest, version) = *copies.queue.front().filter(|_| !full)?;
            let second = copies.seconds.get(&digest.slot()).copied();
            let Some(second) = second.filter(|_| self.ownership.owns(digest)) else {
                copies.queue.pop_front();
                self.copy_told(digest, version, false);
                continue;
            };
            if copies.peers.get(&second).is_some_and(|peer| peer.retry_ns > self.now_ns) {
                // Others wait with it; the walk comes back to all of them.
                copies.queue.pop_front();
                self.copy_told(digest, version, false);
                self.walk_again();
                continue;
            }
            copies.queue.pop_front();
            if copies.pushes.contains_key(&digest) || self.owes(digest) {
                // Its turn comes when that is over.
                self.copies.queue.push_back((digest, version));
                continue;
            }
            match self.push(digest, version, second) {
                Some(fetch) => return Some(fetch),
                None => self.copy_told(digest, version, false),
            }
        }
        None
    }

    /// Sends an object to the second owner, if it is still this version and has no copy.
    fn push(&mut self, digest: Digest, version: Version, second: ShardKey) -> Option<Fetch> {
        // What came back from the SSD just now has its name there still.
        let lacks_tail = self.lacks_tail(digest);
        let store = self.store.as_mut()?;
        let there = store.peek(digest).is_some_and(|object| object.version == version);
        if !there || !store.replica(digest).is_owed_a_copy() || store.is_copied(digest) {
            return None;
        }
        let Some((pin, object)) = (!lacks_tail).then(|| store.hold(digest)).flatten() else {
            self.walk_again();
            return None;
        };
        // From now on it may be there.
        store.note_copy(digest, version, true);
        let bytes = object.extent.bytes;
        self.copies.pushes.insert(digest, Push { second, version, pin, bytes, void: false });
        self.copies.push_bytes += bytes;
        let place = Place { memory: Memory::Pool, offset: object.extent.offset, bytes };
        let tail_at = object.has_tail.then_some(object.tail_at);
        Some(self.moves.ask(
            second,
            Want::Copy { digest, place, tail_at, is_head: object.is_head, version },
            Call::Copy(digest),
        ))
    }

    /// Looks for objects that lack a copy, within the rate.
    fn walk_on(&mut self) {
        let rate = self.moves.limits().bytes_per_s;
        let (now_ns, copies) = (self.now_ns, &mut self.copies);
        let Some(at) = copies.walk.filter(|_| rate > 0 && copies.walk_ns <= now_ns) else { return };
        if !copies.queue.is_empty() || copies.pushes.len() >= PUSHES_MOST {
            return;
        }
        let Some(store) = &self.store else { return };
        let (mut lack, mut bytes, mut next) = (Vec::new(), 0u64, Some(at));
        // A round looks at a part; where nothing lacks a copy it comes around within a few.
        for _ in 0..16 {
            let Some(from) = next.filter(|_| lack.is_empty()) else { break };
            let found;
            (found, next) = store.uncopied(from, WALK_STEP);
            for digest in found.into_iter().filter(|digest| self.ownership.owns(*digest)) {
                if let Some(object) = store.peek(digest) {
                    bytes += object.extent.bytes;
                    lack.push((digest, object.version));
                }
            }
        }
        copies.queue.extend(lack);
        copies.walk_ns = now_ns + (u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64;
        copies.walk = next;
        copies.unwalked &= next.is_some();
        if next.is_none() && core::mem::take(&mut copies.again) {
            copies.walk = Some(0);
            copies.walk_ns = copies.walk_ns.max(now_ns.saturating_add(WALK_AGAIN_NS));
        }
    }

    /// A second owner has answered about a copy, or has not.
    pub(in crate::service) fn pushed(&mut self, digest: Digest, done: &FetchDone) {
        let Some(push) = self.copies.pushes.remove(&digest) else { return };
        let Push { second, version, pin, bytes, void } = push;
        self.copies.push_bytes -= bytes;
        self.copies.owed_idle_ns = 0;
        let Some(store) = &mut self.store else { return };
        let live = store.is_live(pin);
        store.unpin(pin).expect("a pin of our own");
        let counters = &mut self.copies.counters;
        match done {
            FetchDone::Copied if !void => {
                counters.made += 1;
                counters.made_bytes += bytes;
                self.answered(second);
                self.copy_told(digest, version, live);
            }
            FetchDone::Failed(status) if !void => {
                counters.failed += 1;
                // Whether it is there is known only where it was refused for what it is.
                let refused = matches!(status, Status::NoSpace | Status::TooLarge | Status::QuotaExceeded);
                if live {
                    store.note_copy(digest, version, false);
                    if !refused {
                        self.owe(digest);
                    }
                }
                if refused {
                    self.answered(second);
                } else {
                    self.not_answered(second);
                }
                self.walk_again();
                self.copy_told(digest, version, false);
            }
            _ => {
                self.copy_told(digest, version, false);
                self.walk_again();
            }
        }
    }

    fn answered(&mut self, second: ShardKey) {
        if let Some(peer) = self.copies.peers.get_mut(&second) {
            (peer.failures, peer.retry_ns) = (0, 0);
        }
    }

    /// What was on its way together and ended together counts once: it says once that nobody answers there.
    fn not_answered(&mut self, second: ShardKey) {
        let now_ns = self.now_ns;
        if let Some(peer) = self.copies.peers.get_mut(&second).filter(|peer| peer.retry_ns <= now_ns) {
            peer.failures += 1;
            peer.retry_ns = now_ns.saturating_add((RETRY_NS << peer.failures.min(8)).min(RETRY_MOST_NS));
        }
    }

    /// A second owner has dropped copies, or has not answered.
    pub(in crate::service) fn copies_dropped(
        &mut self,
        token: u64,
        second: ShardKey,
        digests: &[Digest],
        done: &FetchDone,
    ) {
        let gone: &[bool] = if let FetchDone::CopiesDropped(gone) = done { gone } else { &[] };
        self.copies.owed_idle_ns = 0;
        if let Some(peer) = self.copies.peers.get_mut(&second) {
            peer.dropping = false;
        }
        if gone.contains(&true) {
            self.answered(second);
        } else {
            self.not_answered(second);
        }
        for (at, digest) in digests.iter().enumerate() {
            // Of owners of before it says nothing.
            if self.copies.seconds.get(&digest.slot()) != Some(&second) {
                continue;
            }
            let Some(owed) = self.copies.owed.get_mut(digest).filter(|owed| owed.asked == token) else { continue };
            owed.asked = 0;
            if gone.get(at) != Some(&true) {
                continue;
            }
            self.copies.counters.dropped += 1;
            owed.drops = false;
            if owed.lapses_ns <= self.now_ns {
                let waiters = self.copies.owed.remove(digest).map_or_else(Vec::new, |owed| owed.waiters);
                waiters.into_iter().for_each(|(slot, _)| self.settle(slot, |_, _| {}));
            }
        }
    }
}
