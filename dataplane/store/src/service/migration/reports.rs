//! Reports of complete imports to former owners, which then end their exports.
//!
//! A report says that nothing is imported from the former owner any more: all that it exports to this shard, by the map
//! that the report names or an earlier one, is here, or was removed or replaced here. It names some of the slots, by
//! which the former owner knows the reporter. It is repeated until the former owner has answered it, or a map ends the
//! import's validity: the slots left or changed hands, or one of both began another incarnation. A former owner of an
//! earlier version takes a report for the drop of objects that it does not have.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::imports::Call;
use super::sources::Backoff;
use crate::service::fetches::{Fetch, Want};
use crate::service::shard::Shard;

/// Most slots that a report names. One would do; but a former owner need not have exported each.
const NAMED_MOST: usize = 4;

/// Slots that were imported from one former owner, and that it may still export.
#[derive(Debug, Default)]
struct Report {
    /// Slots, each with the epoch of the map by which it was complete.
    slots: BTreeMap<Slot, Epoch>,
    /// Slots of which the former owner keeps an object that cannot be imported: nothing is reported.
    incomplete: BTreeSet<Slot>,
    is_in_flight: bool,
    backoff: Backoff,
}

/// Reports that former owners have not answered.
#[derive(Debug, Default)]
pub(super) struct Reports {
    open: BTreeMap<ShardKey, Report>,
}

impl Reports {
    /// Adds slots whose import from this former owner has ended by the map of this epoch, except for one object at
    /// least in each of those that are `incomplete`.
    pub(super) fn add(
        &mut self,
        source: ShardKey,
        slots: impl Iterator<Item = Slot>,
        incomplete: BTreeSet<Slot>,
        epoch: Epoch,
    ) {
        let report = self.open.entry(source).or_default();
        report.slots.extend(slots.map(|slot| (slot, epoch)));
        report.incomplete.extend(incomplete);
    }

    /// Returns the former owners that are to be told of a complete import.
    pub(super) fn sources(&self) -> impl Iterator<Item = ShardKey> + '_ {
        self.open.iter().filter(|(_, report)| report.incomplete.is_empty()).map(|(source, _)| *source)
    }

    /// Follows a map after epoch `heard`: forgets the slots that this shard, `me`, does not own any more, or has gained
    /// again, and former owners that are gone.
    pub(super) fn follow(
        &mut self,
        me: ShardKey,
        heard: Epoch,
        missed: bool,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let owners = owners.filter(|_| !missed);
        self.open.retain(|source, report| {
            let Some(owners) = owners.filter(|owners| owners.address(*source).is_some()) else { return false };
            // A new layout leaves most slots where they are.
            let is_gained = |slot: Slot| owners.slot_has_changed(slot, heard) && owners.former(slot) != Some(me);
            let stays = |slot: Slot| owned(slot.0) && !is_gained(slot);
            report.slots.retain(|slot, _| stays(*slot));
            report.incomplete.retain(|slot| stays(*slot));
            !report.slots.is_empty()
        });
    }

    /// Returns the next report that is due, by the newest map: to a former owner from which nothing is imported any
    /// more.
    pub(super) fn next(
        &mut self,
        shard: &mut Shard,
        calls: &mut BTreeMap<u64, Call>,
        is_source: impl Fn(ShardKey) -> bool,
    ) -> Option<Fetch> {
        let now_ns = shard.now_ns;
        let is_due = |source: ShardKey, report: &Report| {
            let is_ready = !report.is_in_flight && report.incomplete.is_empty() && !is_source(source);
            is_ready && report.backoff.retry_ns() <= now_ns
        };
        let (source, report) = self.open.iter_mut().find(|(source, report)| is_due(**source, report))?;
        report.is_in_flight = true;
        let apart = report.slots.len().div_ceil(NAMED_MOST).max(1);
        let named: Vec<Slot> = report.slots.keys().copied().step_by(apart).collect();
        let (token, epoch) = (shard.new_fetch_token(), shard.ownership.epoch());
        calls.insert(token, Call::EndExports { source: *source, epoch });
        Some(Fetch { token, source: *source, want: Want::EndExports(named, epoch) })
    }

    /// Handles the answer to a report of this epoch, or the failure to get one.
    pub(super) fn answered(&mut self, source: ShardKey, epoch: Epoch, done: bool, now_ns: u64) {
        let Some(report) = self.open.get_mut(&source) else { return };
        report.is_in_flight = false;
        if !done {
            report.backoff.failed(now_ns);
            return;
        }
        report.backoff.succeeded();
        // What was imported since the report was sent is to be reported again.
        report.slots.retain(|_, complete| *complete > epoch);
        if report.slots.is_empty() {
            self.open.remove(&source);
        }
    }

    /// Returns the time of the next report that waits for a backoff.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        let waiting = self.open.values().filter(|report| !report.is_in_flight && report.incomplete.is_empty());
        waiting.map(|report| report.backoff.retry_ns()).filter(|retry_ns| *retry_ns > now_ns).min()
    }
}
