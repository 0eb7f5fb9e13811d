//! Memory of a device, which no process touches: copies read and write it, a byte can be damaged, and all of it lost.

use std::collections::BTreeMap;

use crate::world::check::ledger::Ledger;

/// Memory of a device pool.
pub(crate) struct DeviceMemory {
    bytes: Vec<u8>,
    /// Damaged bytes, each with the bits that differ from what was written.
    damaged: BTreeMap<u64, u8>,
    pub(crate) ledger: Ledger,
    /// The device is lost: no copy from or to it is done any more.
    pub(crate) is_lost: bool,
}

impl DeviceMemory {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes: vec![0x5a; bytes as usize], damaged: BTreeMap::new(), ledger: Ledger::default(), is_lost: false }
    }

    /// Returns the bytes of a range as they are.
    pub(crate) fn read(&self, offset: u64, bytes: u64) -> &[u8] {
        &self.bytes[offset as usize..][..bytes as usize]
    }

    /// Returns the bytes of a range as they were written.
    pub(crate) fn undamaged(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut written = self.read(offset, bytes).to_vec();
        for (at, mask) in self.damaged.range(offset..offset + bytes) {
            written[(at - offset) as usize] ^= mask;
        }
        written
    }

    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) {
        let end = offset + from.len() as u64;
        self.damaged.retain(|at, _| *at < offset || *at >= end);
        self.bytes[offset as usize..][..from.len()].copy_from_slice(from);
    }

    /// Flips a bit.
    pub(crate) fn damage(&mut self, offset: u64, bit: u32) {
        self.bytes[offset as usize] ^= 1 << bit;
        let mask = self.damaged.entry(offset).or_default();
        *mask ^= 1 << bit;
        if *mask == 0 {
            self.damaged.remove(&offset);
        }
    }

    /// Returns true if a byte of a range is damaged.
    pub(crate) fn is_damaged(&self, offset: u64, bytes: u64) -> bool {
        self.damaged.range(offset..offset + bytes).next().is_some()
    }

    /// Undoes all damage.
    pub(crate) fn mend(&mut self) {
        for (at, mask) in core::mem::take(&mut self.damaged) {
            self.bytes[at as usize] ^= mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_read_and_what_was_written_is_known() {
        let mut memory = DeviceMemory::new(64);
        memory.write(8, &[1, 2, 3, 4]);
        memory.damage(9, 0);
        assert_eq!((memory.read(8, 4), memory.undamaged(8, 4)), (&[1, 3, 3, 4][..], vec![1, 2, 3, 4]));
        assert!(memory.is_damaged(9, 1) && !memory.is_damaged(10, 50));
        memory.damage(11, 7);
        memory.write(9, &[7]);
        assert!(!memory.is_damaged(8, 3) && memory.is_damaged(8, 4));
        memory.mend();
        assert_eq!(memory.read(8, 4), [1, 7, 3, 4]);
    }
}
