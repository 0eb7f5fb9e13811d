//! Where bytes arrive before it is known what they are: one place for all connections of a driver.
//!
//! It belongs to the connection that receives, and what that one has not read yet moves out when another needs the
//! place. So an idle connection owns no memory.

use crate::types::CloseCause;

/// A place for bytes that connections share.
pub(super) struct Staging {
    /// Allocated with the first byte.
    bytes: Vec<u8>,
    capacity: usize,
    /// The connection whose unread bytes are here.
    owner: Option<u32>,
    start: usize,
    end: usize,
}

impl Staging {
    /// A place of so many bytes.
    pub(super) const fn new(capacity: usize) -> Self {
        Self { bytes: Vec::new(), capacity, owner: None, start: 0, end: 0 }
    }

    pub(super) const fn owner(&self) -> Option<u32> {
        self.owner
    }

    pub(super) fn is_owner(&self, index: u32) -> bool {
        self.owner == Some(index)
    }

    /// What arrived and was not read.
    #[inline]
    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// As [`Self::unread`], to be changed in place.
    pub(super) fn unread_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// So many bytes were read.
    pub(super) const fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// So many bytes came into the [`Self::room`].
    pub(super) const fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// The connection is gone, or what it has here is of no use any more.
    pub(super) fn forget(&mut self, index: u32) {
        if self.is_owner(index) {
            (self.owner, self.start, self.end) = (None, 0, 0);
        }
    }

    /// Gives the place to a connection with these unread bytes. What the former owner had not read was moved out.
    pub(super) fn give_to(&mut self, index: u32, kept: &[u8]) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; self.capacity];
        }
        (self.owner, self.start, self.end) = (Some(index), 0, kept.len());
        self.bytes[..kept.len()].copy_from_slice(kept);
    }

    /// Free place for the bytes that arrive next, behind those that are unread.
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

    /// Puts bytes behind those that are unread.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<(), CloseCause> {
        if bytes.is_empty() {
            return Ok(());
        }
        let room = self.room(bytes.len());
        if room.len() < bytes.len() {
            return Err(CloseCause::Setup(format!("{} bytes came where a frame's end should have", bytes.len())));
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
