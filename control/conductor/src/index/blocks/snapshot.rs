//! Snapshot of runs and their holders.

use super::super::codec::{Reader, SnapshotError, invalid, put};
use super::super::contexts::Salt;
use super::super::holders::Holders;
use super::super::run::{FREE, Record, TIERS};
use super::super::{FIRST, Tier};
use super::Blocks;

/// Size of a holder's record in bytes.
const RECORD_BYTES: usize = 8;

impl Blocks {
    /// Returns the approximate number of bytes that [`Self::put`] writes.
    pub(in super::super) fn snapshot_bytes(&self) -> usize {
        self.count * 8 + self.runs.used() * 32
    }

    /// Writes all runs. Promised blocks are left out: they are of bookings, which end with the process.
    pub(in super::super) fn put(&self, out: &mut Vec<u8>, holders: &Holders) {
        put(out, self.runs.used() as u64);
        for run in self.runs.ids() {
            self.put_run(out, run, holders);
        }
    }

    fn put_run(&self, out: &mut Vec<u8>, run: u32, holders: &Holders) {
        let header = self.runs.get(run);
        let bits = (0..TIERS).flat_map(|tier| {
            let record = move |slot| Record { slot, tier: tier as u16, start: 0, end: header.len };
            self.runs.slots_of(run, tier).into_iter().map(record)
        });
        let records: Vec<Record> = self.runs.records(run).iter().copied().chain(bits).collect();
        let records: Vec<Record> = records
            .into_iter()
            .filter(|record| holders.is_registered(record.slot) && record.tier != Tier::Promised as u16)
            .collect();
        put(out, u64::from(header.context) << 48 | u64::from(header.len) << 32 | records.len() as u64);
        let (from, hashes) = (out.len(), self.arena.hashes(header.start, usize::from(header.len)));
        out.resize(from + 8 * hashes.len(), 0);
        for (word, hash) in out[from..].chunks_exact_mut(8).zip(hashes) {
            word.copy_from_slice(&hash.to_le_bytes());
        }
        for Record { slot, tier, start, end } in records {
            [slot, tier, start, end].into_iter().for_each(|part| out.extend_from_slice(&part.to_le_bytes()));
        }
    }

    /// Restores the runs that [`Self::put`] wrote, of an index with this many contexts.
    pub(in super::super) fn restore(
        &mut self,
        reader: &mut Reader<'_>,
        contexts: usize,
        holders: &Holders,
    ) -> Result<(), SnapshotError> {
        for _ in 0..reader.count("runs", u32::MAX as usize)? {
            self.take_run(reader, contexts, holders)?;
        }
        Ok(())
    }

    fn take_run(&mut self, reader: &mut Reader<'_>, contexts: usize, holders: &Holders) -> Result<(), SnapshotError> {
        let word = reader.word()?;
        let (context, len, records) = ((word >> 48) as u16, (word >> 32) as u16, word as u32 as usize);
        if usize::from(context) >= contexts {
            return Err(invalid("a context", u64::from(context)));
        }
        if len == 0 || records == 0 {
            // The run had no holder when the snapshot was taken.
            return reader.skip(usize::from(len) * 8 + records * RECORD_BYTES);
        }
        let most = self.max_blocks as u64;
        let full = SnapshotError::TooLarge { what: "blocks", value: (self.count + usize::from(len)) as u64, most };
        let (start, cap) = self.arena.allocate(usize::from(len)).ok_or(full)?;
        if cap < usize::from(len) {
            return Err(full);
        }
        let id = self.runs.add(context, start, cap);
        let salt = Salt::of(self.seed, context);
        for at in 0..u32::from(len) {
            let hash = reader.word()?;
            if self.locate(salt, hash).is_some() {
                return Err(invalid("a duplicate block", hash));
            }
            self.arena.set((start + at) as usize, hash);
            if at == 0 {
                self.runs.get_mut(id).first = hash;
            }
            self.table.insert(salt.key(hash), if at == 0 { FIRST | id } else { start + at });
            self.runs.get_mut(id).len = at as u16 + 1;
        }
        self.count += usize::from(len);
        for _ in 0..records {
            let [slot, tier, start, end] = reader.parts()?;
            let whole = start < end && end <= len && usize::from(tier) < TIERS && holders.is_registered(slot);
            if !whole || context == FREE {
                return Err(invalid("a holder's record", u64::from(slot)));
            }
            self.cover_whole(id, Record { slot, tier, start, end });
        }
        Ok(())
    }
}
