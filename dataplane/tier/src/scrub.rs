//! Scrubbing: reads and verifies every record periodically, so that damage is detected before a get needs the object.
//!
//! One record is in flight at a time, at the lowest priority. A damaged record is treated as if a get had found it: it
//! is no longer served, it is counted, and an event reports it. Records that are not written yet are skipped. The plan
//! decides when the next record is read.

mod plan;

use crate::contents::Entry;
use crate::log::{EndedRead, Log, Purpose, ReadJob};
use crate::memory::Span;
use crate::ops::Priority;
use crate::types::Event;
use plan::ScrubPlan;

/// Buckets of the index that are visited in one step.
const STEP: usize = 4096;

/// Progress of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubPass {
    /// Records read.
    pub records: u64,
    /// Bytes of these records on the device.
    pub bytes: u64,
    /// Records that were not whole: they are no longer served.
    pub bad_records: u64,
    /// Records that may have been missed, because too many moved at once.
    pub overlooked: u64,
    /// Objects in the index when the pass began.
    pub objects: u64,
}

/// State of the scrubber.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ScrubState {
    /// Idle: scrubbing is disabled, or rests until the next pass.
    #[default]
    Idle,
    /// Runs a pass in the background.
    Background,
    /// Runs a pass that an operator ordered.
    Ordered,
    /// An ordered pass is paused.
    Paused,
}

/// Report of the scrubber.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubReport {
    /// State of the scrubber now.
    pub state: ScrubState,
    /// Rate limit of reads, in bytes per second; 0 while idle.
    pub bytes_per_s: u64,
    /// Current pass, or the last one.
    pub pass: ScrubPass,
    /// Passes completed.
    pub passes: u64,
    /// Passes completed that an operator ordered.
    pub ordered_passes: u64,
    /// Bytes of the records read in all passes.
    pub checked_bytes: u64,
}

/// Scrubber of a tier.
#[derive(Debug, Default)]
pub(crate) struct Scrubber {
    plan: ScrubPlan,
    /// True while a record is being read.
    is_reading: bool,
}

impl Scrubber {
    /// Sets the rate of background passes; see [`crate::Tier::set_scrub`].
    pub(crate) fn set_background(&mut self, bytes_per_s: u64) {
        self.plan.set_background(bytes_per_s);
    }

    /// Orders or pauses a pass; see [`crate::Tier::scrub_once`].
    pub(crate) fn order(&mut self, now_ns: u64, bytes_per_s: u64, log: &Log) {
        if log.device.is_readable() {
            self.plan.order(now_ns, bytes_per_s);
        }
    }

    /// Cancels passes, as the device can no longer be read.
    pub(crate) const fn give_up(&mut self) {
        self.plan.give_up();
    }

    pub(crate) fn report(&self) -> ScrubReport {
        self.plan.report()
    }

    /// Returns the time at which the next record is to be verified.
    pub(crate) fn due_ns(&self, log: &Log) -> Option<u64> {
        let is_ready = log.contents.is_running() && !self.is_reading && !log.device.is_gone();
        if is_ready { self.plan.due_ns() } else { None }
    }

    /// Begins to read the next record if one is due.
    pub(crate) fn work(&mut self, now_ns: u64, log: &mut Log) {
        if self.due_ns(log).is_none_or(|due_ns| due_ns > now_ns) || log.events.is_clogged() {
            return;
        }
        if self.plan.begin(u64::from(log.contents.index.len())) {
            log.contents.index.watch(0);
        }
        while let Some(digest) = log.contents.index.carried_over() {
            if let Some(entry) = log.contents.shown(digest, &log.device).copied()
                && self.check(now_ns, entry, log)
            {
                return;
            }
        }
        let end = log.contents.index.places().min(self.plan.at + STEP);
        while self.plan.at < end {
            let entry = log.contents.index.at(self.plan.at).copied();
            self.plan.at += 1;
            log.contents.index.watch(self.plan.at);
            if let Some(entry) = entry.filter(|entry| log.contents.is_shown(entry, &log.device))
                && self.check(now_ns, entry, log)
            {
                return;
            }
        }
        if self.plan.at == log.contents.index.places() {
            let overlooked = log.contents.index.unwatch();
            self.plan.end(now_ns, overlooked);
        } else {
            self.plan.nothing(now_ns);
        }
    }

    /// Begins to read a record; returns false if it is not on the device yet.
    fn check(&mut self, now_ns: u64, entry: Entry, log: &mut Log) -> bool {
        if log.writer.groups.is_unwritten(entry.offset()) {
            return false;
        }
        let destination = Span::staging(log.device.layout().scrub, entry.shape().payload_bytes);
        self.plan.reading(now_ns, log.device.record_bytes(entry.shape()));
        self.is_reading = true;
        log.begin_read(ReadJob::new(entry, destination, Priority::Background, Purpose::Scrub));
        true
    }

    /// Handles a record that was read.
    pub(crate) fn record_read(&mut self, read: &EndedRead, log: &mut Log) {
        self.is_reading = false;
        if let Err(miss) = read.verified {
            self.plan.bad();
            let record = log.contents.view(&read.entry);
            log.events.push(Event::Quarantined { record, miss });
        }
    }
}
