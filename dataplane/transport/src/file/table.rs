//! Table of open files, with the blocks of each that are being written.

use std::io;
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId};
use kvplane_sys::{BLOCK_BYTES, DirectFile};

/// Table entry of a file.
#[derive(Default)]
struct Entry {
    file: Option<Arc<DirectFile>>,
    /// Blocks that are being written: first, last, and the job. At most as many as operations are in flight.
    writing: Vec<(u64, u64, usize)>,
}

/// File table, by id.
#[derive(Default)]
pub(super) struct Table {
    entries: Vec<(u32, Entry)>,
    generation: u32,
}

impl Table {
    pub(super) fn add(&mut self, file: Arc<DirectFile>) -> io::Result<SegmentId> {
        // An entry is free when its file was closed and the last write on it has ended.
        let free = self.entries.iter().position(|(_, entry)| entry.file.is_none() && entry.writing.is_empty());
        let index = match free {
            Some(index) => index,
            None if self.entries.len() < Limits::REGIONS_PER_SEGMENT => {
                self.entries.push((0, Entry::default()));
                self.entries.len() - 1
            }
            None => {
                let text = format!("{} files are open, which is the limit", Limits::REGIONS_PER_SEGMENT);
                return Err(io::Error::other(text));
            }
        };
        self.generation = self.generation.wrapping_add(1).max(1);
        self.entries[index] = (self.generation, Entry { file: Some(file), writing: Vec::new() });
        Ok(SegmentId { index: index as u32, generation: self.generation })
    }

    pub(super) fn remove(&mut self, id: SegmentId) {
        if let Some((generation, entry)) = self.entries.get_mut(id.index as usize)
            && *generation == id.generation
        {
            entry.file = None;
        }
    }

    pub(super) fn get(&self, id: SegmentId) -> Option<&Arc<DirectFile>> {
        let (generation, entry) = self.entries.get(id.index as usize)?;
        if *generation == id.generation { entry.file.as_ref() } else { None }
    }

    /// Locks the blocks of a range for a job's write; returns false if another job writes one of them. A job locks one
    /// range at a time; locking its range again succeeds.
    pub(super) fn lock(&mut self, id: SegmentId, job: usize, offset: u64, bytes: u64) -> bool {
        let Some((_, entry)) = self.entries.get_mut(id.index as usize) else { return true };
        let block = BLOCK_BYTES as u64;
        let (first, last) = (offset / block, (offset + bytes - 1) / block);
        if entry.writing.iter().any(|&(from, to, holder)| holder != job && from <= last && first <= to) {
            return false;
        }
        entry.writing.retain(|&(_, _, holder)| holder != job);
        entry.writing.push((first, last, job));
        true
    }

    pub(super) fn unlock(&mut self, id: SegmentId, job: usize) {
        if let Some((_, entry)) = self.entries.get_mut(id.index as usize) {
            entry.writing.retain(|&(_, _, holder)| holder != job);
        }
    }
}
