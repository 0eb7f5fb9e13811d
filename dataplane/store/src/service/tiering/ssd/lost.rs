//! Damaged records: records that could not be read whole, while another owner of their slot may have the object.
//!
//! The tier has given such a record up. Its object exists until it is repaired, or until it turns out that nobody has
//! it: gets wait. The repair itself is a matter of [`crate::service::damage`].

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::{Digest, Status};
use kvplane_tier::RecordView;

use crate::service::shard::stream_read::Reader;
use crate::service::shard::timing::Timing;

/// Most damaged records whose repair is not over. Further ones are lost.
const OPEN_MOST: usize = 1024;
/// Most gets that wait for one.
const READERS_MOST: usize = 1024;

/// Gets that wait for an object.
pub(in crate::service) type WaitingReaders = Vec<(Reader, Timing)>;

/// Damaged record.
#[derive(Debug)]
struct DamagedRecord {
    view: RecordView,
    readers: WaitingReaders,
    /// True while its repair rests: gets are to be retried.
    rests: bool,
}

/// Damaged records whose repair is not over.
#[derive(Debug, Default)]
pub(in crate::service) struct DamagedRecords {
    open: BTreeMap<Digest, DamagedRecord>,
    /// Records whose repair has not begun.
    new: VecDeque<Digest>,
    /// Readers of objects that were removed or replaced meanwhile.
    void: Vec<(Digest, WaitingReaders)>,
    found: u64,
    lost: u64,
}

impl DamagedRecords {
    /// Returns the number of damaged records that were found.
    pub(in crate::service) const fn found(&self) -> u64 {
        self.found
    }

    /// Counts a damaged record whatever becomes of it.
    pub(in crate::service::tiering) const fn count(&mut self) {
        self.found += 1;
    }

    /// Returns the number of damaged records that cannot be repaired: no other node may have their objects, or too many
    /// records are being repaired.
    pub(in crate::service) const fn lost(&self) -> u64 {
        self.lost
    }

    /// Counts a damaged record that cannot be repaired.
    pub(in crate::service::tiering) const fn lose(&mut self) {
        self.lost += 1;
    }

    /// Returns the number of records whose repair is not over.
    pub(in crate::service) fn len(&self) -> usize {
        self.open.len()
    }

    pub(in crate::service) fn has(&self, digest: Digest) -> bool {
        !self.open.is_empty() && self.open.contains_key(&digest)
    }

    /// Returns what is known of a damaged record.
    pub(in crate::service) fn view(&self, digest: Digest) -> Option<RecordView> {
        if self.open.is_empty() { None } else { Some(self.open.get(&digest)?.view) }
    }

    /// Returns what is known of all damaged records.
    pub(super) fn views(&self) -> impl Iterator<Item = &RecordView> {
        self.open.values().map(|record| &record.view)
    }

    /// Adds a record that is to be repaired, with the gets that wait for it; returns these if there are too many.
    pub(in crate::service::tiering) fn add(&mut self, view: RecordView, readers: WaitingReaders) -> WaitingReaders {
        if !self.open.contains_key(&view.digest) {
            if self.open.len() >= OPEN_MOST {
                return readers;
            }
            self.new.push_back(view.digest);
            self.open.insert(view.digest, DamagedRecord { view, readers: Vec::new(), rests: false });
        }
        if let Some(record) = self.open.get_mut(&view.digest) {
            record.readers.extend(readers);
        }
        Vec::new()
    }

    /// Makes a get wait for the repair of a record; in a pause of it the get is to be retried. `None` if the record is
    /// not damaged.
    pub(in crate::service::tiering) fn wait(
        &mut self,
        digest: Digest,
        reader: (Reader, Timing),
    ) -> Option<Result<(), Status>> {
        let record = self.open.get_mut(&digest)?;
        if record.rests || record.readers.len() >= READERS_MOST {
            return Some(Err(Status::Busy));
        }
        record.readers.push(reader);
        Some(Ok(()))
    }

    /// Begins or ends a pause of a repair. Returns the gets that wait when it begins: they are to be retried.
    pub(in crate::service) fn rest(&mut self, digest: Digest, rests: bool) -> WaitingReaders {
        let Some(record) = self.open.get_mut(&digest) else { return Vec::new() };
        record.rests = rests;
        if rests { core::mem::take(&mut record.readers) } else { Vec::new() }
    }

    /// Ends a repair; returns the gets that wait.
    pub(in crate::service) fn end(&mut self, digest: Digest) -> WaitingReaders {
        self.open.remove(&digest).map_or_else(Vec::new, |record| record.readers)
    }

    /// Forgets a record whose object is removed or replaced.
    pub(super) fn forget(&mut self, digest: Digest) {
        if self.has(digest) {
            let readers = self.end(digest);
            self.void.push((digest, readers));
        }
    }

    /// Returns the next record whose repair has not begun.
    pub(in crate::service) fn take_new(&mut self) -> Option<Digest> {
        self.new.pop_front()
    }

    /// Takes the gets of objects that were removed or replaced.
    pub(in crate::service) fn take_void(&mut self) -> Vec<(Digest, WaitingReaders)> {
        core::mem::take(&mut self.void)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::Version;

    use super::*;

    fn view(digest: u128) -> RecordView {
        RecordView {
            digest: Digest(digest),
            version: Version(3),
            payload_bytes: 100,
            key_bytes: 0,
            extent: false,
            pinned: false,
            names_parts: false,
            copied: true,
            tenant: None,
            checksum: 7,
        }
    }

    #[test]
    fn a_damaged_record_is_there_until_its_repair_is_over_and_their_number_is_bounded() {
        let mut records = DamagedRecords::default();
        (0..OPEN_MOST as u128).for_each(|digest| drop(records.add(view(digest), Vec::new())));
        records.add(view(u128::MAX), Vec::new());
        assert!(records.has(Digest(5)) && !records.has(Digest(u128::MAX)) && records.len() == OPEN_MOST);
        assert_eq!(records.view(Digest(5)), Some(view(5)));
        assert_eq!(records.take_new(), Some(Digest(0)));
        records.forget(Digest(5));
        records.forget(Digest(5));
        assert_eq!(records.take_void().len(), 1);
        records.end(Digest(6));
        assert!(records.view(Digest(5)).is_none() && records.len() == OPEN_MOST - 2);
    }
}
