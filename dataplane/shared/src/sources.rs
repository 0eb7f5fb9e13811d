//! Takeover of slots: the index of gained slots is rebuilt from what their former owners left in the store.
//!
//! One source after the other: a list of its objects, its newest manifest, the checkpoint that the manifest names, and
//! the packs after that. The list comes first: whatever the manifest tells was written before it. Nothing counts unless
//! all of it is whole: in what is missing there may be a removal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Slot};
use kvplane_tier::SlotSet;

use crate::config::{
    MASKED_MOST, PACK_END_BYTES, RELEASE_STEP_NS, RELEASE_WAIT_NS, SOURCE_TRIES, STEP_ENTRIES, STORE_TRIES,
    STORE_WAIT_NS,
};
use crate::format::{
    CheckpointReader, Entry, EntryKind, Manifest, PackEnd, PackRow, Stream, manifest_number, pack_number,
};
use crate::types::{GetRange, ListedObject, Operation, Outcome, SlotSource, SourceRule, StoreError, VoidReason};

/// Objects of a former owner, with their packs.
pub(crate) type LoadedObjects = BTreeMap<Digest, (Entry, PackRow)>;

/// Result of a takeover.
#[derive(Debug)]
pub(crate) struct TakenSlots {
    pub(crate) slots: SlotSet,
    /// The slots' objects, or the reason why the store's contents of them are void.
    pub(crate) found: Result<LoadedObjects, VoidReason>,
    /// Objects that were inserted into the index.
    pub(crate) objects: u64,
}

#[derive(Debug)]
enum Phase {
    /// Its objects are to be listed at this time.
    List {
        at_ns: u64,
    },
    /// The manifest of this number is to be read.
    Manifest {
        number: u64,
    },
    /// The checkpoint is to be read.
    Checkpoint,
    ParseCheckpoint(Box<CheckpointReader>),
    /// The end of the next pack is to be read: its last bytes, this many.
    Pack {
        end_bytes: u64,
    },
    ParsePack {
        end: PackEnd,
        at: usize,
        row: PackRow,
    },
}

/// Wait of a takeover, of which the operator is to know.
#[derive(Debug)]
pub(crate) struct Wait {
    pub(crate) slots: u64,
    pub(crate) name: String,
    pub(crate) error: StoreError,
}

/// Takeover of slots from one former owner.
#[derive(Debug)]
struct Takeover {
    source: SlotSource,
    stream: Stream,
    phase: Phase,
    /// True while an operation of the phase is in flight.
    is_reading: bool,
    tries: u32,
    /// Operations that the store failed.
    failures: u32,
    /// Time until which the owner may release the slots.
    until_ns: u64,
    manifest: Option<Manifest>,
    /// Packs of the list, or of those the ones that are still to be read, with their lengths.
    packs: VecDeque<(u64, u64)>,
    loaded: LoadedObjects,
    /// Wait that was not reported yet.
    wait: Option<Wait>,
}

/// Takeovers, in order, and objects that were put or removed in their slots meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Takeovers {
    queue: VecDeque<Takeover>,
    masked: BTreeSet<Digest>,
    done: VecDeque<TakenSlots>,
    /// Number of the last operation.
    asked: u64,
}

impl Takeovers {
    /// Begins to take slots over.
    pub(crate) fn begin(&mut self, source: SlotSource, stream: Stream, now_ns: u64) {
        self.queue.push_back(Takeover {
            stream: stream.of(source.owner),
            source,
            phase: Phase::List { at_ns: now_ns },
            is_reading: false,
            tries: 0,
            failures: 0,
            until_ns: now_ns.saturating_add(RELEASE_WAIT_NS),
            manifest: None,
            packs: VecDeque::new(),
            loaded: LoadedObjects::new(),
            wait: None,
        });
    }

    /// Follows the members of a map: former owners that are not among them do not have to release slots any more.
    pub(crate) fn follow_members(&mut self, members: &BTreeSet<(NodeId, Incarnation)>) {
        for Takeover { source: SlotSource { owner, rule, .. }, .. } in &mut self.queue {
            if let SourceRule::Alive { since } = *rule
                && !members.contains(&(owner.node, owner.incarnation))
            {
                *rule = SourceRule::Gone { since };
            }
        }
    }

    /// Ends all takeovers.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.masked.clear();
        self.done.clear();
    }

    /// Takes slots over that have no former owner.
    pub(crate) fn begin_without(&mut self, slots: SlotSet) {
        if !slots.is_empty() {
            self.done.push_back(TakenSlots { slots, found: Ok(LoadedObjects::new()), objects: 0 });
        }
    }

    /// Forgets slots that were lost.
    pub(crate) fn lose(&mut self, lost: &SlotSet) {
        for takeover in &mut self.queue {
            for slots in takeover.source.slots.values_mut() {
                *slots = slots.with(lost, |slots, lost| slots & !lost);
            }
        }
        for taken in &mut self.done {
            taken.slots = taken.slots.with(lost, |slots, lost| slots & !lost);
        }
        // The first one may have an operation in flight, whose answer then finds nothing to do.
        let mut first = true;
        self.queue.retain(|takeover| core::mem::take(&mut first) || !takeover.source.is_empty());
        self.masked.retain(|digest| !lost.has(digest.slot()));
    }

    /// Returns true while a slot is being taken over.
    pub(crate) fn has(&self, slot: Slot) -> bool {
        let queued = self.queue.iter().any(|takeover| takeover.source.has(slot));
        queued || self.done.iter().any(|taken| taken.slots.has(slot))
    }

    /// Returns the slots that are being taken over.
    pub(crate) fn slots(&self) -> SlotSet {
        let done = self.done.iter().map(|taken| taken.slots.clone());
        let queued = self.queue.iter().map(|takeover| takeover.source.all());
        done.chain(queued).fold(SlotSet::none(), |all, slots| all.with(&slots, |all, slots| all | slots))
    }

    /// Returns true if nothing is being taken over.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.done.is_empty()
    }

    /// Notes that an object of a slot that is being taken over was put or removed: the former owner's does not count.
    pub(crate) fn mask(&mut self, digest: Digest) {
        self.masked.insert(digest);
        if self.masked.len() > MASKED_MOST {
            self.masked.clear();
            for takeover in core::mem::take(&mut self.queue) {
                self.done.push_back(TakenSlots {
                    slots: takeover.source.all(),
                    found: Err(VoidReason::TooManyChanges),
                    objects: 0,
                });
            }
        }
    }

    /// Takes some of the objects of the next result out of it: those that were not put or removed since the takeover
    /// began. `None` if it has none any more.
    pub(crate) fn take_objects(&mut self) -> Option<Vec<(Entry, PackRow)>> {
        let Self { done, masked, .. } = self;
        let TakenSlots { slots, found, .. } = done.front_mut()?;
        let loaded = found.as_mut().ok().filter(|loaded| !loaded.is_empty())?;
        let some = core::iter::from_fn(|| loaded.pop_first()).take(STEP_ENTRIES);
        let counts = |digest: &Digest| slots.has(digest.slot()) && !masked.contains(digest);
        Some(some.filter(|(digest, _)| counts(digest)).map(|(_, placed)| placed).collect())
    }

    /// Counts objects of the next result that were inserted into the index.
    pub(crate) fn count_objects(&mut self, objects: u64) {
        if let Some(taken) = self.done.front_mut() {
            taken.objects += objects;
        }
    }

    /// Returns the next result, which stays.
    pub(crate) fn peek_done(&self) -> Option<&TakenSlots> {
        self.done.front()
    }

    /// Returns the next result. Its slots count as being taken over no more.
    pub(crate) fn take_done(&mut self) -> Option<TakenSlots> {
        self.done.pop_front()
    }

    /// Forgets the masks of slots that were taken over.
    pub(crate) fn unmask(&mut self, slots: &SlotSet) {
        self.masked.retain(|digest| !slots.has(digest.slot()));
    }

    /// Returns the time at which [`Self::poll`] may have an operation.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        let first = self.queue.front().filter(|first| !first.is_reading)?;
        Some(if let Phase::List { at_ns } = first.phase { at_ns } else { 0 })
    }

    /// Returns the next operation on the store, with its number; its result goes to [`Self::complete`].
    pub(crate) fn poll(&mut self, now_ns: u64) -> Option<(u64, Operation)> {
        let first = self.queue.front_mut().filter(|first| !first.is_reading)?;
        let stream = first.stream;
        let operation = match &first.phase {
            Phase::List { at_ns } if *at_ns <= now_ns => Operation::List { prefix: stream.prefix() },
            Phase::Manifest { number } => Operation::Get { name: stream.manifest(*number), range: GetRange::Whole },
            Phase::Checkpoint => {
                let number = first.manifest.as_ref().map_or(0, |manifest| manifest.checkpoint);
                Operation::Get { name: stream.checkpoint(number), range: GetRange::Whole }
            }
            Phase::Pack { end_bytes } => {
                let (number, _) = first.packs.front()?;
                Operation::Get { name: stream.pack(*number), range: GetRange::Suffix { bytes: *end_bytes } }
            }
            Phase::List { .. } | Phase::ParseCheckpoint(_) | Phase::ParsePack { .. } => return None,
        };
        first.is_reading = true;
        self.asked += 1;
        Some((self.asked, operation))
    }

    /// Takes the result of an operation. Returns a wait that begins with it, at the first for its cause.
    pub(crate) fn complete(&mut self, asked: u64, result: Result<Outcome, StoreError>, now_ns: u64) -> Option<Wait> {
        let is_current = asked == self.asked;
        let first = self.queue.front_mut().filter(|first| first.is_reading && is_current)?;
        first.is_reading = false;
        match first.take(result, now_ns) {
            Step::Continue => first.wait.take(),
            Step::End(found) => {
                self.end(found);
                None
            }
        }
    }

    /// Processes some of what was read. Returns true if there was anything to do.
    pub(crate) fn step(&mut self) -> bool {
        let Some(first) = self.queue.front_mut() else { return false };
        match first.parse() {
            None => false,
            Some(Step::Continue) => true,
            Some(Step::End(found)) => {
                self.end(found);
                true
            }
        }
    }

    fn end(&mut self, found: Result<(), VoidReason>) {
        let Some(takeover) = self.queue.pop_front() else { return };
        let found = found.map(|()| takeover.loaded);
        self.done.push_back(TakenSlots { slots: takeover.source.all(), found, objects: 0 });
    }
}

impl SlotSource {
    /// Returns the slots to take over.
    pub(crate) fn all(&self) -> SlotSet {
        self.since(Epoch(u64::MAX))
    }

    /// Returns the slots that the owner has had, without a break, at least since this epoch.
    fn since(&self, epoch: Epoch) -> SlotSet {
        let had = self.slots.range(..=epoch).map(|(_, slots)| slots);
        had.fold(SlotSet::none(), |all, slots| all.with(slots, |all, slots| all | slots))
    }

    fn has(&self, slot: Slot) -> bool {
        self.slots.values().any(|slots| slots.has(slot))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.values().all(SlotSet::is_empty)
    }
}

/// Consequence of a result.
enum Step {
    Continue,
    End(Result<(), VoidReason>),
}

impl Step {
    const fn void(reason: VoidReason) -> Self {
        Self::End(Err(reason))
    }

    const fn damaged(name: String) -> Self {
        Self::void(VoidReason::Damaged { name })
    }
}

impl Takeover {
    fn take(&mut self, result: Result<Outcome, StoreError>, now_ns: u64) -> Step {
        if self.source.is_empty() {
            return Step::End(Ok(()));
        }
        // Also if an object was deleted in favour of newer ones meanwhile, which a newer manifest names.
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(error @ (StoreError::NotFound | StoreError::Short { .. })) => {
                return self.begin_again(self.name(), error, now_ns);
            }
            Err(error) => return self.wait_for_store(error, now_ns),
        };
        match (&self.phase, outcome) {
            (Phase::List { .. }, Outcome::Listed(listed)) => self.take_list(&listed, now_ns),
            (Phase::Manifest { number }, Outcome::Bytes { bytes, .. }) => {
                let number = *number;
                self.take_manifest(number, &bytes, now_ns)
            }
            (Phase::Checkpoint, Outcome::Bytes { bytes, .. }) => {
                let number = self.manifest.as_ref().map_or(0, |manifest| manifest.checkpoint);
                match CheckpointReader::new(self.stream, number, bytes) {
                    Ok(reader) => self.phase = Phase::ParseCheckpoint(Box::new(reader)),
                    Err(_) => return Step::damaged(self.stream.checkpoint(number)),
                }
                Step::Continue
            }
            (Phase::Pack { .. }, Outcome::Bytes { bytes, .. }) => self.take_pack_end(&bytes),
            _ => self.begin_again(self.name(), StoreError::NotFound, now_ns),
        }
    }

    /// Returns the name of what the phase reads.
    fn name(&self) -> String {
        let pack = self.packs.front().map_or(0, |(number, _)| *number);
        match self.phase {
            Phase::List { .. } => self.stream.prefix(),
            Phase::Manifest { number } => self.stream.manifest(number),
            Phase::Checkpoint | Phase::ParseCheckpoint(_) => {
                self.stream.checkpoint(self.manifest.as_ref().map_or(0, |manifest| manifest.checkpoint))
            }
            Phase::Pack { .. } | Phase::ParsePack { .. } => self.stream.pack(pack),
        }
    }

    /// Tries again later, from the list on, because the store lacks an object, or a part of it.
    fn begin_again(&mut self, name: String, error: StoreError, now_ns: u64) -> Step {
        self.tries += 1;
        if self.tries == SOURCE_TRIES {
            return Step::void(VoidReason::Missing { name });
        }
        if self.tries == 1 {
            self.wait = Some(Wait { slots: self.source.all().count(), name, error });
        }
        self.wait(now_ns, 1_000_000_000 << self.tries.min(4))
    }

    /// Waits for a store that fails: what it has of the slots is there when it works again.
    fn wait_for_store(&mut self, error: StoreError, now_ns: u64) -> Step {
        self.failures += 1;
        if self.failures == STORE_TRIES {
            return Step::void(VoidReason::Unreadable { error });
        }
        if self.failures == 1 {
            self.wait = Some(Wait { slots: self.source.all().count(), name: self.name(), error });
        }
        self.wait(now_ns, (500_000_000 << self.failures.min(10)).min(STORE_WAIT_NS))
    }

    fn wait(&mut self, now_ns: u64, wait_ns: u64) -> Step {
        self.loaded.clear();
        self.packs.clear();
        self.phase = Phase::List { at_ns: now_ns.saturating_add(wait_ns) };
        Step::Continue
    }

    /// Waits for a live owner to release the slots; otherwise they are void.
    fn not_released(&mut self, reason: VoidReason, now_ns: u64) -> Step {
        match self.source.rule {
            SourceRule::Alive { .. } if now_ns < self.until_ns => self.wait(now_ns, RELEASE_STEP_NS),
            SourceRule::Alive { .. } => Step::void(VoidReason::NotReleased),
            SourceRule::Gone { .. } | SourceRule::Restarted => Step::void(reason),
        }
    }

    fn take_list(&mut self, listed: &[ListedObject], now_ns: u64) -> Step {
        let prefix = self.stream.prefix();
        let rest_of = |listed: &ListedObject| Some(listed.name.strip_prefix(&prefix)?.strip_prefix('/')?.to_owned());
        let packs: BTreeMap<u64, u64> =
            listed.iter().filter_map(|listed| Some((pack_number(&rest_of(listed)?)?, listed.bytes))).collect();
        self.packs = packs.into_iter().collect();
        match listed.iter().filter_map(|listed| manifest_number(&rest_of(listed)?)).max() {
            Some(number) => {
                self.phase = Phase::Manifest { number };
                Step::Continue
            }
            None => self.not_released(VoidReason::NoManifest, now_ns),
        }
    }

    fn take_manifest(&mut self, number: u64, bytes: &[u8], now_ns: u64) -> Step {
        let Ok(mut manifest) = Manifest::decode(self.stream, number, bytes) else {
            return Step::damaged(self.stream.manifest(number));
        };
        let epoch = manifest.epoch;
        let (slots, is_released) = match self.source.rule {
            SourceRule::Gone { since } | SourceRule::Alive { since } if epoch >= since => (&manifest.released, true),
            SourceRule::Alive { .. } => return self.not_released(VoidReason::NotReleased, now_ns),
            SourceRule::Gone { .. } | SourceRule::Restarted => (&manifest.owned, false),
        };
        // What it says of slots that its owner has had since, perhaps with a break, does not count.
        let wanted = if is_released { self.source.all() } else { self.source.since(epoch) };
        let is_later = !wanted.with(&manifest.releasing, |wanted, releasing| wanted & releasing).is_empty();
        if is_later && matches!(self.source.rule, SourceRule::Alive { .. }) && now_ns < self.until_ns {
            return self.wait(now_ns, RELEASE_STEP_NS);
        }
        // Slots that it does not vouch for are void: they stay in the result, without objects.
        let known = wanted.with(slots, |wanted, known| wanted & known);
        if known.is_empty() {
            return Step::void(VoidReason::Outdated);
        }
        manifest.owned = known;
        // Packs that a live owner writes later do not concern the slots.
        let (after, upto) = (manifest.after, manifest.upto);
        self.packs.retain(|(number, _)| *number > after && (!is_released || *number <= upto));
        // Packs are written one after the other: one that is missing was deleted since, or the list is not complete.
        let dense = self.packs.iter().zip(after + 1..).take_while(|((number, _), expected)| number == expected).count();
        if dense < self.packs.len() || after + (dense as u64) < upto {
            let missing = self.stream.pack(after + 1 + dense as u64);
            return self.begin_again(missing, StoreError::NotFound, now_ns);
        }
        let has_checkpoint = manifest.checkpoint != 0;
        self.manifest = Some(manifest);
        if has_checkpoint {
            self.phase = Phase::Checkpoint;
            return Step::Continue;
        }
        self.next_pack()
    }

    /// Reads the next pack, or ends.
    fn next_pack(&mut self) -> Step {
        if self.packs.is_empty() {
            return Step::End(Ok(()));
        }
        self.phase = Phase::Pack { end_bytes: PACK_END_BYTES };
        Step::Continue
    }

    fn take_pack_end(&mut self, bytes: &[u8]) -> Step {
        let Some((number, pack_bytes)) = self.packs.front().copied() else { return Step::Continue };
        let name = || self.stream.pack(number);
        match PackEnd::length(bytes) {
            Ok(length) if length > bytes.len() as u64 && length <= pack_bytes && bytes.len() as u64 != pack_bytes => {
                self.phase = Phase::Pack { end_bytes: length };
                return Step::Continue;
            }
            Ok(_) => {}
            Err(_) => return Step::damaged(name()),
        }
        let Ok(end) = PackEnd::decode(self.stream, number, pack_bytes, bytes) else { return Step::damaged(name()) };
        let row = PackRow { shard: self.stream.shard, number, bytes: pack_bytes, written_ms: end.written_ms };
        self.packs.pop_front();
        self.phase = Phase::ParsePack { end, at: 0, row };
        Step::Continue
    }

    /// Processes some of what was read; `None` if there is nothing.
    fn parse(&mut self) -> Option<Step> {
        let Self { phase, manifest, loaded, stream, .. } = self;
        let slots = &manifest.as_ref()?.owned;
        match phase {
            Phase::ParseCheckpoint(reader) => {
                let name = || stream.checkpoint(manifest.as_ref().map_or(0, |manifest| manifest.checkpoint));
                for _ in 0..STEP_ENTRIES {
                    match reader.next_entry() {
                        Ok(Some((entry, row))) if slots.has(entry.digest.slot()) => {
                            loaded.insert(entry.digest, (entry, row));
                        }
                        Ok(Some(_)) => {}
                        Ok(None) if reader.is_whole() => return Some(self.next_pack()),
                        Ok(None) | Err(_) => return Some(Step::damaged(name())),
                    }
                }
                Some(Step::Continue)
            }
            Phase::ParsePack { end, at, row } => {
                let to = (*at + STEP_ENTRIES).min(end.len());
                for at in *at..to {
                    let Ok(entry) = end.entry(at) else { return Some(Step::damaged(stream.pack(row.number))) };
                    if slots.has(entry.digest.slot()) {
                        match entry.kind {
                            EntryKind::Object => drop(loaded.insert(entry.digest, (entry, *row))),
                            EntryKind::Removal => drop(loaded.remove(&entry.digest)),
                            EntryKind::Void => {}
                        }
                    }
                }
                *at = to;
                if to < end.len() { Some(Step::Continue) } else { Some(self.next_pack()) }
            }
            _ => None,
        }
    }
}
