//! Checks of objects in memory against their checksums.
//!
//! One object is checked at a time, some of its bytes in each round of the host, and it is pinned meanwhile. Objects
//! that were found damaged come first. The background pass looks at all objects in the order of their entries, at a
//! rate of bytes a second, and rests before the next one.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::ids::{PinId, Version};
use kvplane_proto::{Digest, Status};

use super::readers::{READERS_MOST, Readers};
use crate::service::shard::Shard;
use crate::service::shard::stream_read::Reader;
use crate::service::shard::timing::Timing;
use crate::service::types::PoolBytes;

/// Most bytes of one step, so that the round of a host stays short.
const STEP_BYTES: u64 = 1 << 20;
/// Bytes that are read at once.
const PART_BYTES: u64 = 64 << 10;
/// Most objects that wait to be checked because they may be damaged.
const CHECKS_MOST: usize = 1024;
/// Pause between two turns of the background pass: so an idle shard is woken seldom.
const TURN_NS: u64 = 100_000_000;
/// Entries that the pass looks at together.
const ENTRIES: u32 = 256;

/// Pace of the passes through memory that compare all objects with their checksums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScrubPace {
    /// Bytes a second; 0 for no passes.
    pub bytes_per_s: u64,
    /// Pause between two passes, in nanoseconds.
    pub pause_ns: u64,
}

impl Default for ScrubPace {
    fn default() -> Self {
        Self { bytes_per_s: 0, pause_ns: 10_000_000_000 }
    }
}

/// Result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Check {
    /// The bytes match the checksum, or the object is not in memory any more.
    Whole,
    /// They do not.
    Damaged,
    /// No pin was free.
    NotMade,
}

/// Object that was checked.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) digest: Digest,
    pub(super) version: Version,
    pub(super) check: Check,
    /// Readers that waited for the check.
    pub(super) readers: Readers,
}

/// Check in progress.
#[derive(Debug)]
struct RunningCheck {
    digest: Digest,
    pin: PinId,
    done_bytes: u64,
    sum: PayloadChecksum,
}

/// Pass through all objects.
#[derive(Debug, Default)]
struct Pass {
    pace: ScrubPace,
    /// Next entry, and objects that are checked before those behind it.
    at: u32,
    queue: VecDeque<Digest>,
    is_at_end: bool,
    /// Bytes of the present turn, and the time of the next one.
    turn_bytes: u64,
    next_ns: u64,
}

/// Checks of objects.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    /// Objects that may be damaged, with the readers that wait; and the order in which they are checked.
    suspects: BTreeMap<Digest, Readers>,
    order: VecDeque<Digest>,
    running: Option<RunningCheck>,
    pass: Pass,
    findings: VecDeque<Finding>,
    checked: u64,
    checked_bytes: u64,
    passes: u64,
}

impl Pass {
    /// Returns true if the pass may check another object now.
    const fn is_due(&self, now_ns: u64) -> bool {
        self.pace.bytes_per_s > 0 && self.next_ns <= now_ns
    }

    /// Returns the next object; `None` at the end of the pass.
    fn next(&mut self, shard: &Shard) -> Option<Digest> {
        while self.queue.is_empty() && !self.is_at_end {
            let (objects, next) = shard.store.objects().walk(self.at, ENTRIES);
            self.queue.extend(objects.into_iter().map(|(digest, _)| digest));
            (self.at, self.is_at_end) = (next.unwrap_or(0), next.is_none());
        }
        self.queue.pop_front()
    }

    /// Counts bytes that were checked; the turn ends when it has had its share.
    fn took(&mut self, bytes: u64, now_ns: u64) {
        self.turn_bytes += bytes;
        let took_ns = u128::from(self.turn_bytes) * 1_000_000_000 / u128::from(self.pace.bytes_per_s.max(1));
        let took_ns = u64::try_from(took_ns).unwrap_or(u64::MAX);
        if took_ns >= TURN_NS {
            (self.turn_bytes, self.next_ns) = (0, now_ns.saturating_add(took_ns));
        }
    }

    /// Ends a pass: the next one begins after a pause.
    const fn end(&mut self, now_ns: u64) {
        (self.is_at_end, self.turn_bytes, self.next_ns) = (false, 0, now_ns.saturating_add(self.pace.pause_ns));
    }
}

impl Scrub {
    /// Sets the pace of the background passes.
    pub(super) const fn set_pace(&mut self, pace: ScrubPace, now_ns: u64) {
        (self.pass.pace, self.pass.next_ns) = (pace, now_ns);
    }

    /// Returns the objects that were checked, their bytes, and the passes that are over.
    pub(super) const fn counts(&self) -> (u64, u64, u64) {
        (self.checked, self.checked_bytes, self.passes)
    }

    /// Has an object checked; a reader waits for the result.
    pub(super) fn check(&mut self, digest: Digest, reader: Option<(Reader, Timing)>) -> Result<(), Status> {
        if !self.suspects.contains_key(&digest) {
            if self.suspects.len() >= CHECKS_MOST {
                return Err(Status::Busy);
            }
            self.order.push_back(digest);
        }
        let readers = self.suspects.entry(digest).or_default();
        if readers.len() >= READERS_MOST {
            return Err(Status::Busy);
        }
        readers.extend(reader);
        Ok(())
    }

    /// Returns the next object that was checked because it may be damaged, or was found damaged.
    pub(super) fn take_finding(&mut self) -> Option<Finding> {
        self.findings.pop_front()
    }

    /// Checks some bytes. Returns true if there was anything to do.
    pub(super) fn step(&mut self, shard: &mut Shard, pool: &dyn PoolBytes) -> bool {
        let mut left_bytes = STEP_BYTES;
        let mut progress = false;
        while left_bytes > 0 {
            if self.running.is_none() && !self.begin(shard) {
                break;
            }
            progress = true;
            if let Some(check) = &mut self.running {
                left_bytes = left_bytes.saturating_sub(advance(check, shard, pool, left_bytes));
                self.end_if_done(shard);
            }
        }
        progress
    }

    /// Begins the next check. Returns false if there is nothing to do now.
    fn begin(&mut self, shard: &mut Shard) -> bool {
        if let Some(digest) = self.order.pop_front() {
            if let Err(check) = self.begin_one(shard, digest) {
                self.find(digest, Version(0), check);
            }
            return true;
        }
        if !self.pass.is_due(shard.now_ns) {
            return false;
        }
        match self.pass.next(shard) {
            Some(digest) => drop(self.begin_one(shard, digest)),
            None => {
                self.passes += 1;
                self.pass.end(shard.now_ns);
            }
        }
        true
    }

    /// Begins the check of an object in memory. Fails with the result if there is nothing to check.
    fn begin_one(&mut self, shard: &mut Shard, digest: Digest) -> Result<(), Check> {
        if shard.peek(digest).is_none_or(|object| object.is_on_device) {
            return Err(Check::Whole);
        }
        let (pin, _) = shard.store.hold(digest).ok_or(Check::NotMade)?;
        self.running = Some(RunningCheck { digest, pin, done_bytes: 0, sum: PayloadChecksum::new() });
        Ok(())
    }

    fn end_if_done(&mut self, shard: &mut Shard) {
        let Some(check) = &self.running else { return };
        let object = shard.store.held(check.pin).expect("a pin that the shard holds");
        if check.done_bytes < object.extent.bytes {
            return;
        }
        let is_whole = check.sum.finish() == object.checksum;
        let (digest, pin) = (check.digest, check.pin);
        self.running = None;
        shard.store.unpin(pin).expect("a pin that the shard holds");
        self.checked += 1;
        self.checked_bytes += object.extent.bytes;
        if !self.suspects.contains_key(&digest) {
            self.pass.took(object.extent.bytes, shard.now_ns);
        }
        self.find(digest, object.version, if is_whole { Check::Whole } else { Check::Damaged });
    }

    /// Reports a result, with the readers that wait for it.
    fn find(&mut self, digest: Digest, version: Version, check: Check) {
        let readers = self.suspects.remove(&digest);
        self.order.retain(|other| *other != digest);
        if check == Check::Damaged || readers.is_some() {
            self.findings.push_back(Finding { digest, version, check, readers: readers.unwrap_or_default() });
        }
    }

    /// Returns the time of the next turn of the background pass.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        (self.pass.pace.bytes_per_s > 0).then_some(self.pass.next_ns)
    }
}

/// Adds the next bytes of an object to the checksum, at most so many; returns their number.
fn advance(check: &mut RunningCheck, shard: &Shard, pool: &dyn PoolBytes, most_bytes: u64) -> u64 {
    let object = shard.store.held(check.pin).expect("a pin that the shard holds");
    let bytes = (object.extent.bytes - check.done_bytes).min(most_bytes);
    let mut part = vec![0; bytes.min(PART_BYTES) as usize];
    let end = check.done_bytes + bytes;
    while check.done_bytes < end {
        let taken = (end - check.done_bytes).min(PART_BYTES);
        let part = &mut part[..taken as usize];
        pool.read(object.extent.offset + check.done_bytes, part);
        check.sum.update(part);
        check.done_bytes += taken;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_keeps_to_its_rate_and_rests_between_turns() {
        let pace = ScrubPace { bytes_per_s: 1000, pause_ns: 7_000 };
        let mut pass = Pass { pace, ..Pass::default() };
        assert!(pass.is_due(0));
        pass.took(60, 5);
        assert!(pass.is_due(5), "a turn has a tenth of a second's bytes");
        pass.took(440, 10);
        assert_eq!((pass.is_due(10), pass.next_ns, pass.turn_bytes), (false, 500_000_010, 0));
        pass.end(20);
        assert_eq!(pass.next_ns, 7_020);
        pass.pace.bytes_per_s = 0;
        assert!(!pass.is_due(u64::MAX), "it is off");
    }

    #[test]
    fn the_number_of_waiting_checks_is_bounded() {
        let mut scrub = Scrub::default();
        let checks = (0..CHECKS_MOST as u128).map(|at| scrub.check(Digest(at), None));
        assert!(checks.into_iter().all(|check| check.is_ok()));
        assert_eq!(scrub.check(Digest(u128::MAX), None), Err(Status::Busy));
        assert_eq!(scrub.check(Digest(1), None), Ok(()), "it waits already");
        scrub.find(Digest(1), Version(7), Check::Whole);
        let finding = scrub.take_finding().expect("its check was asked for");
        assert_eq!((finding.digest, finding.check, scrub.order.len()), (Digest(1), Check::Whole, CHECKS_MOST - 1));
        scrub.find(Digest(u128::MAX), Version(7), Check::Whole);
        assert!(scrub.take_finding().is_none(), "nobody waits for it");
    }
}
