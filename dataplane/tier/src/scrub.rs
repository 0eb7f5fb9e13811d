//! Scrubbing: every record is read and checked now and then, so that damage is known before a get wants the object.
//!
//! One record is in flight at a time, at the lowest priority. One that is not whole goes as it does when a get finds
//! it: it is not given any more, counted, and an event says so. What is not written yet is passed over. When the next
//! record is read is the plan's matter.

mod plan;

use crate::contents::Entry;
use crate::log::{EndedRead, Log, Purpose, ReadJob};
use crate::memory::Span;
use crate::ops::Priority;
use crate::types::Event;
use plan::ScrubPlan;

/// Places of the index that are looked at in one step.
const STEP: usize = 4096;

/// What a pass has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubPass {
    /// Records read.
    pub records: u64,
    /// Their bytes on the device.
    pub bytes: u64,
    /// Records that were not whole: they are not given any more.
    pub bad_records: u64,
    /// Records that may have been overlooked, because too many moved at once.
    pub overlooked: u64,
    /// Objects there were when it began.
    pub objects: u64,
}

/// What the scrubber does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ScrubState {
    /// Nothing: it is turned off, or rests until the next pass.
    #[default]
    Idle,
    /// A pass in the background.
    Background,
    /// A pass that an operator ordered.
    Ordered,
    /// Such a pass that was paused.
    Paused,
}

/// The scrubber at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubReport {
    /// What it does.
    pub state: ScrubState,
    /// Bytes a second that it may read; 0 while it does nothing.
    pub bytes_per_s: u64,
    /// The pass that goes on, or the last one.
    pub pass: ScrubPass,
    /// Passes that came to their end.
    pub passes: u64,
    /// Of those, the ones that an operator ordered.
    pub ordered_passes: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Scrubber {
    plan: ScrubPlan,
    /// A record is being read.
    is_reading: bool,
}

impl Scrubber {
    /// See [`crate::Tier::set_scrub`].
    pub(crate) fn set_background(&mut self, bytes_per_s: u64) {
        self.plan.set_background(bytes_per_s);
    }

    /// See [`crate::Tier::scrub_once`].
    pub(crate) fn order(&mut self, now_ns: u64, bytes_per_s: u64, log: &Log) {
        if log.device.is_readable() {
            self.plan.order(now_ns, bytes_per_s);
        }
    }

    /// Nothing can be read any more: nobody waits for the end of a pass.
    pub(crate) const fn give_up(&mut self) {
        self.plan.give_up();
    }

    pub(crate) fn report(&self) -> ScrubReport {
        self.plan.report()
    }

    /// When the next record is to be checked.
    pub(crate) fn due_ns(&self, log: &Log) -> Option<u64> {
        let is_ready = log.contents.is_running() && !self.is_reading && !log.device.is_gone();
        if is_ready { self.plan.due_ns() } else { None }
    }

    /// Begins to read the next record when it is time to.
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

    /// Begins to read a record; false for what is not on the device yet.
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

    /// A record was read.
    pub(crate) fn record_read(&mut self, read: &EndedRead, log: &mut Log) {
        self.is_reading = false;
        if let Err(miss) = read.verified {
            self.plan.bad();
            log.events.push(Event::Quarantined { digest: read.entry.digest(), miss });
        }
    }
}
