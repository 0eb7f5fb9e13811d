//! Registered memory of a client: slots of equal size, each free or lent to one request of an open batch.
//!
//! A free slot holds a poison that must still be there when it is lent again and when the run ends; the part of a slot
//! that a request did not cover stays poisoned too. So a byte that arrives after a batch has completed, or past the end
//! of a buffer, is detected; and bytes that are sent from a buffer after completion are poison, which matches no
//! payload's checksum.

use kvplane_proto::Digest;

use super::{CheckResult, Rule, broken};
use crate::world::pattern;

/// Purpose of a lent slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loan {
    /// Receives at most this number of bytes.
    Get(u64),
    /// Sends the bytes of this write.
    Put { write: usize, bytes: u64 },
    /// Sends this number of bytes of a pool to another shard.
    Copy { bytes: u64 },
}

struct Slot {
    poison: u8,
    loan: Option<Loan>,
}

/// Memory of one client.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    slot_bytes: usize,
    slots: Vec<Slot>,
    poison: u8,
}

impl Memory {
    pub(crate) fn new(slots: usize, slot_bytes: u64) -> Self {
        let slot_bytes = slot_bytes as usize;
        let all = (0..slots).map(|_| Slot { poison: 0xa5, loan: None }).collect();
        Self { bytes: vec![0xa5; slots * slot_bytes], slot_bytes, slots: all, poison: 0xa5 }
    }

    /// Lends a free slot; returns its offset.
    pub(crate) fn lend(&mut self, loan: Loan, digest: Digest) -> Result<Option<u64>, super::Violation> {
        let Some(slot) = self.slots.iter().position(|slot| slot.loan.is_none()) else { return Ok(None) };
        self.check_poison(slot, 0)?;
        self.slots[slot].loan = Some(loan);
        let start = slot * self.slot_bytes;
        if let Loan::Put { write, bytes } = loan {
            pattern::fill(digest, write, &mut self.bytes[start..start + bytes as usize]);
        }
        Ok(Some(start as u64))
    }

    /// Takes a slot back and poisons it anew.
    pub(crate) fn take_back(&mut self, offset: u64) -> CheckResult {
        let slot = offset as usize / self.slot_bytes;
        let used = match self.slots[slot].loan {
            Some(Loan::Get(bytes) | Loan::Put { bytes, .. } | Loan::Copy { bytes }) => bytes as usize,
            None => 0,
        };
        self.check_poison(slot, used)?;
        self.poison = self.poison.wrapping_mul(5).wrapping_add(3);
        let range = slot * self.slot_bytes..(slot + 1) * self.slot_bytes;
        self.bytes[range].fill(self.poison);
        self.slots[slot] = Slot { poison: self.poison, loan: None };
        Ok(())
    }

    /// Fills a slot that is lent for a copy.
    pub(crate) fn fill(&mut self, offset: u64, bytes: &[u8]) {
        self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn loan(&self, offset: u64) -> Option<Loan> {
        self.slots.get(offset as usize / self.slot_bytes)?.loan
    }

    /// Returns the bytes of a range for inspection.
    pub(crate) fn peek(&self, offset: u64, bytes: u64) -> &[u8] {
        &self.bytes[offset as usize..(offset + bytes) as usize]
    }

    /// Reads a buffer on behalf of a transport.
    pub(crate) fn read(&self, offset: u64, bytes: u64) -> Result<&[u8], super::Violation> {
        match self.loan(offset) {
            Some(Loan::Put { .. } | Loan::Copy { .. }) => Ok(self.peek(offset, bytes)),
            loan => Err(broken(Rule::Memory, format!("{bytes} bytes were read at {offset}, which is {loan:?}"))),
        }
    }

    /// Writes a buffer on behalf of a transport, even if that is not allowed.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> CheckResult {
        self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
        let within = offset as usize % self.slot_bytes + bytes.len();
        match self.loan(offset) {
            Some(Loan::Get(capacity)) if within as u64 <= capacity => Ok(()),
            loan => {
                let what = format!("{} bytes were written at {offset}, which is {loan:?}", bytes.len());
                Err(broken(Rule::Memory, what))
            }
        }
    }

    /// Checks that no free slot was touched.
    pub(crate) fn check(&self) -> CheckResult {
        (0..self.slots.len())
            .filter(|&slot| self.slots[slot].loan.is_none())
            .try_for_each(|slot| self.check_poison(slot, 0))
    }

    pub(crate) fn lent(&self) -> usize {
        self.slots.iter().filter(|slot| slot.loan.is_some()).count()
    }

    fn check_poison(&self, slot: usize, from: usize) -> CheckResult {
        let poison = self.slots[slot].poison;
        let bytes = &self.bytes[slot * self.slot_bytes + from..(slot + 1) * self.slot_bytes];
        // Each byte is compared with its neighbour, all at once.
        if bytes.first().is_none_or(|first| *first == poison)
            && bytes.get(1..).unwrap_or(&[]) == &bytes[..bytes.len().saturating_sub(1)]
        {
            return Ok(());
        }
        let at = bytes.iter().position(|&byte| byte != poison).unwrap_or(0);
        let what = format!("slot {slot}: byte {} changed while no request could write it", from + at);
        Err(broken(Rule::Memory, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_byte_is_seen_at_once_and_later() {
        let mut memory = Memory::new(2, 64);
        let at = memory.lend(Loan::Get(16), Digest(1)).unwrap().unwrap();
        memory.write(at, &[1; 16]).unwrap();
        assert!(memory.write(at, &[1; 17]).is_err(), "past the end of the requested bytes");
        assert!(memory.take_back(at).is_err(), "and still visible at the end");
        let other = memory.lend(Loan::Get(64), Digest(1)).unwrap().unwrap();
        memory.take_back(other).unwrap();
        assert!(memory.write(other, &[1]).is_err());
        assert!(memory.check().is_err());
    }
}
