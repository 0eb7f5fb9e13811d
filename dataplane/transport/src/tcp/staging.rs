//! Receive staging: one buffer that all connections of a driver share for bytes that are not decoded yet.
//!
//! The receiving connection owns the buffer; when another one needs it, the owner's unread bytes move out. An idle
//! connection therefore owns no memory.

use crate::types::CloseCause;

/// Receive buffer shared by connections.
pub(super) struct Staging {
    /// Allocated with the first byte.
    bytes: Vec<u8>,
    capacity: usize,
    /// Connection whose unread bytes are in the buffer.
    owner: Option<u32>,
    start: usize,
    end: usize,
}

impl Staging {
    /// Creates a staging of this capacity, in bytes.
    pub(super) const fn new(capacity: usize) -> Self {
        Self { bytes: Vec::new(), capacity, owner: None, start: 0, end: 0 }
    }

    pub(super) const fn owner(&self) -> Option<u32> {
        self.owner
    }

    pub(super) fn is_owner(&self, index: u32) -> bool {
        self.owner == Some(index)
    }

    /// Returns the unread bytes.
    #[inline]
    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Returns the unread bytes for changes in place.
    pub(super) fn unread_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// Marks bytes as read.
    pub(super) const fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Marks bytes of [`Self::room`] as received.
    pub(super) const fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// Drops the bytes of a connection that is gone or does not need them any more.
    pub(super) fn forget(&mut self, index: u32) {
        if self.is_owner(index) {
            (self.owner, self.start, self.end) = (None, 0, 0);
        }
    }

    /// Makes a connection with these unread bytes the owner. The former owner's unread bytes were moved out.
    pub(super) fn give_to(&mut self, index: u32, kept: &[u8]) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; self.capacity];
        }
        (self.owner, self.start, self.end) = (Some(index), 0, kept.len());
        self.bytes[..kept.len()].copy_from_slice(kept);
    }

    /// Returns free space for the next bytes, behind the unread ones.
    pub(super) fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end + wanted > self.capacity {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let end = (self.end + wanted).min(self.capacity);
        &mut self.bytes[self.end..end]
    }

    /// Appends bytes behind the unread ones.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<(), CloseCause> {
        if bytes.is_empty() {
            return Ok(());
        }
        let room = self.room(bytes.len());
        if room.len() < bytes.len() {
            return Err(CloseCause::Setup(format!("{} bytes arrived beyond the size limit of a frame", bytes.len())));
        }
        room.copy_from_slice(bytes);
        self.end += bytes.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_bytes_stay_in_order_and_make_room_for_more() {
        let mut staging = Staging::new(8);
        staging.give_to(3, &[1, 2]);
        assert!(staging.is_owner(3));
        staging.take(&[3, 4, 5]).expect("there is room");
        staging.consume(2);
        assert_eq!(staging.room(8).len(), 5, "what was read is given up for it");
        staging.take(&[6, 7, 8, 9, 10]).expect("there is room");
        assert_eq!(staging.unread(), [3, 4, 5, 6, 7, 8, 9, 10]);
        assert!(staging.take(&[11]).is_err());
        staging.forget(4);
        assert!(staging.is_owner(3) && !staging.unread().is_empty());
        staging.forget(3);
        assert_eq!((staging.owner(), staging.unread()), (None, &[][..]));
    }
}
