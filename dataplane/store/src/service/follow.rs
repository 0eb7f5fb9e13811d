//! What followers of a shard's objects ask: its events, and what there is now.

use kvplane_proto::Digest;

use super::Service;
use crate::events::{Change, EventPage, Medium};

/// Some of what there is: objects with their sizes and where they are.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SnapshotPage {
    /// The objects. One that is in memory and on the SSD is there twice.
    pub objects: Vec<(Digest, Medium, u64)>,
    /// Where to go on; nothing after the last page.
    pub cursor: Option<u64>,
}

/// Cursors from here on are of the SSD.
const SSD: u64 = 1 << 40;

impl Service {
    /// Keeps the latest so many events from now on; 0 keeps none. Nothing happens where as many are kept already.
    pub fn keep_events(&mut self, capacity: usize) {
        if let Some(store) = &mut self.store {
            store.keep_events(capacity);
        }
    }

    /// The number of the next event; 0 without a store.
    #[must_use]
    pub fn next_event(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.events.next())
    }

    /// At most `most` events from the number `from` on.
    #[must_use]
    pub fn read_events(&self, from: u64, most: usize) -> EventPage {
        self.store.as_ref().map_or_else(EventPage::default, |store| store.events.read(from, most))
    }

    /// Some of the objects there are, from `cursor` on, 0 at first; looks at no more than `most`. Objects that come and
    /// go meanwhile may be in it or not: their events say. What lies on the SSD may move while others are removed, and
    /// be missed.
    #[must_use]
    pub fn snapshot_objects(&self, cursor: u64, most: usize) -> SnapshotPage {
        let Some(store) = &self.store else { return SnapshotPage::default() };
        if cursor < SSD {
            let (objects, next) = store.walk(cursor as u32, most as u32);
            let objects = objects.into_iter().map(|(digest, bytes)| (digest, Medium::Memory, bytes)).collect();
            let rest = self.tiered.is_some().then_some(SSD);
            return SnapshotPage { objects, cursor: next.map(u64::from).or(rest) };
        }
        let Some(tiered) = &self.tiered else { return SnapshotPage::default() };
        let (views, next) = tiered.walk((cursor - SSD) as usize, most);
        let objects = views.into_iter().map(|view| (view.digest, Medium::Ssd, view.payload_bytes.into())).collect();
        SnapshotPage { objects, cursor: next.map(|at| SSD + at as u64) }
    }

    /// How long an object is on the SSD, if it is there. Not an access.
    #[must_use]
    pub fn ssd_bytes(&self, digest: Digest) -> Option<u64> {
        self.on_ssd(digest).map(|view| view.payload_bytes.into())
    }

    /// Something happened to what the SSD has of an object: tells what there is now, whatever it was.
    pub(super) fn tell_of_ssd(&mut self, digest: Digest) {
        let (Some(store), Some(tiered)) = (&mut self.store, &self.tiered) else { return };
        if !store.events.is_kept() {
            return;
        }
        match tiered.locate(digest) {
            Some(view) => store.events.push(Change::Stored, Medium::Ssd, digest, view.payload_bytes.into()),
            None => store.events.push(Change::Removed, Medium::Ssd, digest, 0),
        }
    }

    /// What the SSD has is known anew.
    pub(super) fn ssd_known_anew(&mut self) {
        if let Some(store) = &mut self.store
            && store.events.is_kept()
        {
            store.events.break_off();
        }
    }
}
