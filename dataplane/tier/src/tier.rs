//! The tier of one shard, as a state machine: calls and completions go in, block operations and events come out.
//!
//! * A put is copied or lent into a *group* of records at the end of the log; groups are written as a whole, several at
//!   a time, and flushed together when somebody wants them durable.
//! * The index knows a record from the moment it is appended. A get of what is not written yet waits for its group.
//! * A get reads the record with its header and checks everything before it says that the object is there.
//! * What fails, on reading or on writing, costs its objects and is counted; it never becomes wrong bytes.
//!
//! Invariants: one log, appended in order of sequence; a record counts while its segment's generation is live and no
//! record of its digest has a greater sequence. Not here: I/O, time, memory, deadlines; what goes to the tier and when.

mod append;
mod blank;
mod check;
mod commit;
mod generations;
mod groups;
mod headers;
mod moves;
mod ownership;
mod read;
mod reclaim;
mod recover;
mod remove;
mod scan;
mod scrub;
mod seal;
mod start;
mod stats;
mod strikes;
mod untracked;

pub use blank::ENDS_BYTES;
pub(crate) use blank::Window;
pub use stats::{Harm, TierStats};

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::ConfigError;
use kvplane_proto::digest::Digest;

use crate::config::{Layout, TierConfig};
use crate::errors::{OpenError, Reason};
use crate::format::{FIRST_SEGMENT_OFFSET, FooterEntry, Shape, SuperblockFound};
use crate::index::{Entry, Index};
use crate::memory::Memory;
use crate::ops::{Fault, Jobs, OpId, Owner};
use crate::policy::ReclaimPolicy;
use crate::scrub::Scrubber;
use crate::segments::Segments;
use crate::slots::{SlotId, Slots};
use crate::types::{Event, OpenOptions, Output, RecordView, Token};
use commit::Flushes;
use generations::Generations;
use groups::Log;
use ownership::Notes;
use read::ReadJob;
use reclaim::Reclaim;
use recover::Recovery;
use seal::Seal;
use start::Phase;
use strikes::Strikes;
use untracked::UntrackedObjects;

/// Sequences of one incarnation of the shard, in bits: the incarnation stands above them.
const SEQUENCE_BITS: u32 = 40;
/// Lists of a segment's records: one for the open segment, others for those being sealed or scanned.
const ENTRY_LISTS: usize = 4;

/// The tier of one shard. One thread's.
#[derive(Debug)]
pub struct Tier {
    config: TierConfig,
    layout: Layout,
    options: OpenOptions,
    policy: ReclaimPolicy,
    uuid: u128,
    incarnation: u64,
    next_sequence: u64,
    phase: Phase,
    /// What was found; nothing where it could not be read.
    superblocks: [Option<SuperblockFound>; 2],
    notes: Notes,
    degraded: Option<Reason>,
    index: Index,
    segments: Segments,
    jobs: Jobs,
    log: Log,
    flushes: Flushes,
    seals: VecDeque<Seal>,
    reads: Slots<ReadJob>,
    gets: u32,
    /// Keys that were read and not taken.
    keys: BTreeMap<Token, Vec<u8>>,
    /// Reads of what is not written yet.
    waiting: VecDeque<SlotId>,
    reclaim: Reclaim,
    scrubber: Scrubber,
    /// A record is being checked.
    scrubbing: bool,
    recovery: Recovery,
    events: VecDeque<Event>,
    /// Acknowledgements that are outstanding or not taken.
    waiters: u32,
    strikes: Strikes,
    generations: Generations,
    /// Records that the device may have and the index does not know.
    untracked: UntrackedObjects,
    spare_entries: Vec<Vec<FooterEntry>>,
    scratch: Vec<u8>,
    /// Checksums of the chunks of the payload at hand.
    sums: Vec<u64>,
    stats: TierStats,
}

impl Tier {
    /// Begins to open a device. Ask [`Tier::poll_output`] for what to do; [`Event::Opened`] or [`Event::Refused`]
    /// follows.
    ///
    /// # Errors
    /// A field of `config` that cannot be.
    pub fn open(config: TierConfig, options: OpenOptions) -> Result<Self, ConfigError> {
        config.validate()?;
        let layout = Layout::of(&config);
        let reads = Layout::reads_most(&config);
        let jobs = reads + config.groups + config.scan_buffers + 2 * headers::PLACES + 12;
        let budget_bytes = config.segment_bytes / 100 * u64::from(config.reinsert_percent);
        let entries = Layout::entries_most(&config) as usize;
        let events = 2 * config.max_waiters as usize + config.max_reads as usize + 64;
        let scratch = config.footer_page_bytes.max(Layout::head_most(&config) as u32).max(4096) as usize;
        let mut tier = Self {
            policy: ReclaimPolicy { hot_hits: config.hot_hits, budget_bytes },
            uuid: 0,
            incarnation: 0,
            next_sequence: 0,
            phase: Phase::Superblocks { left: 4 },
            superblocks: [None; 2],
            notes: Notes::default(),
            degraded: None,
            index: Index::new(config.max_records, config.hash_seed),
            segments: Segments::new(config.segments),
            jobs: Jobs::new(jobs, config.ops_in_flight, config.max_op_bytes),
            log: Log::new(config.groups),
            flushes: Flushes::default(),
            seals: VecDeque::with_capacity(ENTRY_LISTS),
            reads: Slots::new(reads),
            gets: 0,
            keys: BTreeMap::new(),
            waiting: VecDeque::with_capacity(reads as usize),
            reclaim: Reclaim::new(config.max_moves),
            scrubber: Scrubber::default(),
            scrubbing: false,
            recovery: Recovery::new(&config),
            events: VecDeque::with_capacity(events),
            waiters: 0,
            strikes: Strikes::default(),
            generations: Generations::default(),
            untracked: UntrackedObjects::default(),
            spare_entries: (0..ENTRY_LISTS).map(|_| Vec::with_capacity(entries)).collect(),
            scratch: vec![0; scratch],
            sums: Vec::new(),
            stats: TierStats::default(),
            options,
            layout,
            config,
        };
        tier.read_superblocks();
        tier.read_notes();
        Ok(tier)
    }

    /// The limits.
    #[must_use]
    pub const fn config(&self) -> &TierConfig {
        &self.config
    }

    /// Why no writes are taken, if so.
    #[must_use]
    pub const fn degraded(&self) -> Option<Reason> {
        self.degraded
    }

    /// Whether every record on the device has been looked at.
    #[must_use]
    pub const fn is_recovered(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    /// What is known of an object. Not an access; nothing for what recovery has not reached.
    #[must_use]
    pub fn locate(&self, digest: Digest) -> Option<RecordView> {
        self.shown(digest).map(view)
    }

    /// Objects from a place of the index on, at most `most`, with the place to go on from; `None` for it at the end.
    /// An object that is there all the while is seen, unless others come and go meanwhile; some may be seen twice.
    #[must_use]
    pub fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let shown = self.index.walk(from).filter(|(_, entry)| self.is_shown(entry));
        let mut end = None;
        let mut views = Vec::new();
        for (next, entry) in shown.take(most) {
            views.push(view(entry));
            end = Some(next);
        }
        let end = if views.len() == most { end } else { None };
        (views, end)
    }

    /// Objects whose place in the order of [`Self::point_of`] is from `from` up to `to`, in no order. Looks at about as
    /// many places of the index as that is of all.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        self.index.between(from, to).filter(|entry| self.is_shown(entry)).map(view)
    }

    /// How often the device was opened, this time too; 1 for one that was formatted at this opening.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// How many places the index has.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.index.places()
    }

    /// The order in which [`Self::between`] walks: 32 bits of a mix of the digest, salted by the configured seed.
    #[must_use]
    pub const fn point_of(&self, digest: Digest) -> u32 {
        self.index.point(digest)
    }

    /// Says whether reclaim is to keep an object; false when there is none. Lasts until the next start, or with the
    /// record that reclaim writes.
    pub fn set_pinned(&mut self, digest: Digest, pinned: bool) -> bool {
        let Some(entry) = self.index.find_mut(digest).filter(|entry| !entry.is_removed()) else { return false };
        entry.set_pinned(pinned);
        true
    }

    /// An operation is over: how many bytes it moved (0 for a flush), or why not. One that is not known is counted.
    pub fn complete(&mut self, now_ns: u64, id: OpId, result: Result<u32, Fault>, memory: &mut dyn Memory) {
        let Some((owner, result)) = self.jobs.complete(id, result) else { return };
        if result == Err(Fault::Gone) {
            self.degrade(Reason::Gone, memory);
        }
        match owner {
            Owner::SuperblockRead(copy) => self.superblock_read(copy, result, memory),
            Owner::NoteRead(copy) => {
                self.note_read(copy, result);
                self.one_read(memory);
            }
            Owner::NoteWrite => self.note_written(result, memory),
            Owner::SuperblockWrite => self.superblock_written(result, memory),
            Owner::Look(window) => self.looked_at(window, result, memory),
            Owner::Blank(_) => self.blanked(result, memory),
            Owner::HeaderRead { segment, place } => self.header_read(segment, place, result, memory),
            Owner::Prepare(segment) => self.header_written(segment, result, memory),
            Owner::Group(number) => self.group_written(now_ns, number, result, memory),
            Owner::Read(slot) => self.read_done(slot, result, memory),
            Owner::Page => self.page_written(result, memory),
            Owner::Reader(reader) => self.reader_filled(reader, result, memory),
            Owner::Scan => self.scan_filled(result, memory),
            Owner::Victim => self.victim_filled(result),
            Owner::Flush => self.flushed(result, memory),
        }
    }

    /// What to do next: call until it gives nothing.
    pub fn poll_output(&mut self, now_ns: u64, memory: &mut dyn Memory) -> Option<Output> {
        self.work(now_ns, memory);
        if let Some(event) = self.events.pop_front() {
            if matches!(
                event,
                Event::Stored { .. } | Event::StoreFailed { .. } | Event::Removed { .. } | Event::RemoveFailed { .. }
            ) {
                self.waiters -= 1;
            }
            return Some(Output::Event(event));
        }
        self.jobs.next().map(Output::Block)
    }

    /// When [`Tier::poll_output`] may have something without any input before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let group = self.log.open_since_ns().map(|since| since.saturating_add(self.config.group_delay_ns));
        let sync = self.flushes.unsynced_since_ns.map(|since| since.saturating_add(self.config.sync_interval_ns));
        // A flush that takes longer is the next occasion: nobody is called for nothing until it ends.
        let sync = sync.filter(|_| self.degraded.is_none() && !self.flushes.under_way);
        [group, sync, self.scrub_due_ns()].into_iter().flatten().min()
    }

    /// Everything that goes on by itself. Each part does a bounded amount.
    fn work(&mut self, now_ns: u64, memory: &mut dyn Memory) {
        self.recovery_work();
        self.reclaim_work(now_ns, memory);
        self.group_work(now_ns, memory);
        self.prepare_work(memory);
        self.seal_work(memory);
        self.flush_work(now_ns);
        self.scrub_work(now_ns);
    }

    /// No more writes. What waits for them fails.
    fn degrade(&mut self, reason: Reason, memory: &mut dyn Memory) {
        let worse = self.degraded.is_none() || reason == Reason::Gone && self.degraded != Some(Reason::Gone);
        if !worse {
            return;
        }
        self.degraded = Some(reason);
        self.events.push_back(Event::Degraded(reason));
        self.untracked.note_fault();
        self.give_up_reclaim();
        self.give_up_scrub();
        self.fail_unsubmitted(memory);
        self.fail_pending(memory);
        self.abandon_seals();
    }

    const fn writable(&self) -> bool {
        self.degraded.is_none()
    }

    const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Recovering | Phase::Running)
    }

    const fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    /// Whether the device is blank and stays so.
    fn is_blank(&self) -> bool {
        self.unavailable() == Some(Reason::Refused(OpenError::Unwritable))
    }

    /// Whether so many events wait for the host that no more calls are taken.
    fn is_clogged(&self) -> bool {
        self.events.len() >= (self.config.max_waiters + self.config.max_reads) as usize
    }

    fn take_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence - 1
    }

    fn segment_of(&self, offset: u64) -> u32 {
        ((offset - FIRST_SEGMENT_OFFSET) / self.config.segment_bytes) as u32
    }

    const fn segment_at(&self, segment: u32) -> u64 {
        FIRST_SEGMENT_OFFSET + segment as u64 * self.config.segment_bytes
    }

    const fn record_bytes(&self, shape: Shape) -> u64 {
        shape.record_bytes(self.config.chunk_bytes, self.config.block_bytes)
    }

    const fn block(&self) -> u64 {
        self.config.block_bytes as u64
    }

    fn is_shown(&self, entry: &Entry) -> bool {
        !entry.is_removed() && self.segments[self.segment_of(entry.offset())].visible
    }

    fn shown(&self, digest: Digest) -> Option<&Entry> {
        self.index.find(digest).filter(|entry| self.is_shown(entry))
    }

    /// Puts an entry into the index, in place of one of its digest; false when there is no room.
    fn place(&mut self, entry: Entry) -> bool {
        let before = self.index.find(entry.digest()).copied();
        if !self.index.set(entry) {
            return false;
        }
        if let Some(before) = before {
            self.account(&before, false);
        }
        self.account(&entry, true);
        true
    }

    /// Takes an entry out of the index.
    fn forget(&mut self, digest: Digest) -> Option<Entry> {
        let entry = self.index.remove(digest)?;
        self.account(&entry, false);
        Some(entry)
    }

    /// Takes an entry out if it is still of this record. While recovery goes on, it leaves a mark that nothing older
    /// takes its place: what recovery has not come to yet may have what this record replaced.
    fn forget_record(&mut self, digest: Digest, sequence: u64) -> bool {
        let Some(entry) = self.index.find(digest).filter(|entry| entry.sequence() == sequence).copied() else {
            return false;
        };
        match self.phase {
            Phase::Recovering => self.remember_removal(digest, entry.version(), sequence),
            _ => _ = self.forget(digest),
        }
        true
    }

    fn account(&mut self, entry: &Entry, add: bool) {
        if entry.is_removed() {
            self.stats.tombstones_held = self.stats.tombstones_held.wrapping_add(if add { 1 } else { u64::MAX });
            return;
        }
        let bytes = self.record_bytes(entry.shape());
        let segment = self.segment_of(entry.offset());
        let at = &mut self.segments[segment];
        at.live_bytes = if add { at.live_bytes + bytes } else { at.live_bytes - bytes };
        at.live_records = if add { at.live_records + 1 } else { at.live_records - 1 };
        self.stats.live_bytes = if add { self.stats.live_bytes + bytes } else { self.stats.live_bytes - bytes };
    }
}

fn view(entry: &Entry) -> RecordView {
    RecordView {
        digest: entry.digest(),
        version: entry.version(),
        payload_bytes: entry.shape().payload_bytes,
        key_bytes: entry.shape().key_bytes,
        extent: entry.shape().extent,
        pinned: entry.is_pinned(),
        names_parts: entry.shape().names_parts,
        copied: entry.shape().copied,
    }
}
