//! Scrubbing: every record is read and checked now and then, so that damage is known before somebody wants the object.
//!
//! One record is under way at a time, at the lowest priority. One that is not whole goes as it does when a get finds
//! it: it is not given any more, counted, and the host is told. What is not written yet is passed over.

use super::Tier;
use super::read::{Purpose, ReadJob};
use super::start::Phase;
use crate::errors::Reason;
use crate::index::Entry;
use crate::memory::Span;
use crate::ops::Priority;
use crate::scrub::ScrubReport;
use crate::types::{Event, Miss};

/// Places of the index that are looked at in one step.
const STEP: usize = 4096;

impl Tier {
    /// How fast records are checked in the background, in bytes a second; 0 for not at all.
    pub fn set_scrub(&mut self, bytes_per_s: u64) {
        self.scrubber.set_background(bytes_per_s);
    }

    /// Checks every record once, at this rate; a pass that was paused goes on. 0 pauses it. Nothing is begun where
    /// nothing can be read: the device is gone or was refused.
    pub fn scrub_once(&mut self, now_ns: u64, bytes_per_s: u64) {
        if self.is_readable() {
            self.scrubber.order(now_ns, bytes_per_s);
        }
    }

    /// Nothing can be read any more: nobody waits for the end of a pass.
    pub(super) const fn give_up_scrub(&mut self) {
        if !self.is_readable() {
            self.scrubber.give_up();
        }
    }

    const fn is_readable(&self) -> bool {
        !matches!(self.degraded, Some(Reason::Gone | Reason::Refused(_)))
    }

    /// What the scrubber does and has found.
    #[must_use]
    pub fn scrub_report(&self) -> ScrubReport {
        self.scrubber.report()
    }

    /// When the next record is to be checked.
    pub(super) fn scrub_due_ns(&self) -> Option<u64> {
        let ready = self.phase == Phase::Running && !self.scrubbing && self.degraded != Some(Reason::Gone);
        if ready { self.scrubber.due_ns() } else { None }
    }

    pub(super) fn scrub_work(&mut self, now_ns: u64) {
        if self.scrub_due_ns().is_none_or(|due_ns| due_ns > now_ns) || self.is_clogged() {
            return;
        }
        if self.scrubber.begin(u64::from(self.index.len())) {
            self.index.watch(0);
        }
        while let Some(digest) = self.index.carried_over() {
            if let Some(entry) = self.shown(digest).copied()
                && self.scrub_record(now_ns, entry)
            {
                return;
            }
        }
        let end = self.index.places().min(self.scrubber.at + STEP);
        while self.scrubber.at < end {
            let entry = self.index.at(self.scrubber.at).copied();
            self.scrubber.at += 1;
            self.index.watch(self.scrubber.at);
            if let Some(entry) = entry.filter(|entry| self.is_shown(entry))
                && self.scrub_record(now_ns, entry)
            {
                return;
            }
        }
        if self.scrubber.at == self.index.places() {
            let overlooked = self.index.unwatch();
            self.scrubber.end(now_ns, overlooked);
        } else {
            self.scrubber.nothing(now_ns);
        }
    }

    /// Begins to read a record; false for what is not on the device yet.
    fn scrub_record(&mut self, now_ns: u64, entry: Entry) -> bool {
        if self.log.unwritten(entry.offset()).is_some() {
            return false;
        }
        let destination = Span::staging(self.layout.scrub, entry.shape().payload_bytes);
        self.scrubber.reading(now_ns, self.record_bytes(entry.shape()));
        self.scrubbing = true;
        self.begin_read(ReadJob::new(entry, destination, Priority::Background, Purpose::Scrub));
        true
    }

    /// A record was read.
    pub(super) fn scrubbed(&mut self, entry: &Entry, verified: Result<u64, Miss>) {
        self.scrubbing = false;
        if let Err(miss) = verified {
            self.scrubber.bad();
            self.events.push_back(Event::Quarantined { digest: entry.digest(), miss });
        }
    }
}
