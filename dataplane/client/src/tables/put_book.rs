//! Book of puts: names and options of a batch's puts.

use kvplane_proto::limits::Limits;
use kvplane_proto::message::{ObjectName, PutItem};

/// Names and options of a batch's puts, in buffers that are reused for the next batch.
/// [`Request::PutAs`](crate::Request::PutAs) refers to an entry by its number.
#[derive(Clone, Debug, Default)]
pub struct PutBook {
    puts: Vec<Entry>,
    names: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    item: PutItem,
    name_at: u32,
    /// Checksum that the bytes are to have; 0 if they count as they are.
    checksum: u64,
}

impl PutBook {
    /// Creates an empty book.
    #[must_use]
    pub const fn new() -> Self {
        Self { puts: Vec::new(), names: Vec::new() }
    }

    /// Adds the name and options of a put, and returns the number of the entry. The length of the object is taken from
    /// the request.
    ///
    /// # Panics
    /// If the item was made of another name, or if all names together exceed 4 GiB.
    pub fn push(&mut self, item: PutItem, name: &ObjectName<'_>) -> u32 {
        assert!(
            (usize::from(item.key_bytes), usize::from(item.tenant_bytes)) == (name.key.len(), name.tenant.len()),
            "the item is of another name"
        );
        let name_at = u32::try_from(self.names.len()).expect("names of less than 4 GiB in total");
        self.names.extend_from_slice(name.tenant);
        self.names.extend_from_slice(name.key);
        self.puts.push(Entry { item, name_at, checksum: 0 });
        self.puts.len() as u32 - 1
    }

    /// States the checksum that the bytes of a put are to have: with others it fails as `Corrupt`. Otherwise the bytes
    /// count as they are when they are sent.
    pub fn state_checksum(&mut self, number: u32, checksum: u64) {
        if let Some(entry) = self.puts.get_mut(number as usize) {
            entry.checksum = checksum;
        }
    }

    /// Returns the checksum that was stated for a put; 0 if none was.
    pub(crate) fn stated_checksum(&self, number: u32) -> u64 {
        self.puts.get(number as usize).map_or(0, |entry| entry.checksum)
    }

    /// Adds a copy of an entry of another book, and returns its number.
    ///
    /// # Panics
    /// If the other book has no such entry, or if all names together exceed 4 GiB.
    pub fn push_from(&mut self, other: &Self, number: u32) -> u32 {
        let (item, names) = other.get(number);
        let checksum = other.stated_checksum(number);
        let name_at = u32::try_from(self.names.len()).expect("names of less than 4 GiB in total");
        self.names.extend_from_slice(names);
        self.puts.push(Entry { item, name_at, checksum });
        self.puts.len() as u32 - 1
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.puts.clear();
        self.names.clear();
    }

    /// Returns the number of entries.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.puts.len()
    }

    /// Returns true if the book is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.puts.is_empty()
    }

    /// Returns true if its allocations are small enough to be kept for reuse.
    pub(crate) const fn is_worth_keeping(&self) -> bool {
        self.puts.capacity() <= Limits::ITEMS_PER_FRAME && self.names.capacity() <= Limits::BODY_BYTES
    }

    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.clear();
        self.puts.extend_from_slice(&other.puts);
        self.names.extend_from_slice(&other.names);
    }

    pub(crate) fn get(&self, number: u32) -> (PutItem, &[u8]) {
        let entry = &self.puts[number as usize];
        let at = entry.name_at as usize;
        (entry.item, &self.names[at..at + entry.item.name_bytes()])
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::message::PutOptions;

    use super::*;

    #[test]
    fn a_copied_entry_has_its_name_and_options_under_its_new_number() {
        let mut all = PutBook::new();
        for key in [&b"first"[..], b"second", b"third"] {
            let name = ObjectName { tenant: b"t", key };
            all.push(PutItem::named(&name, 10, &PutOptions::default()), &name);
        }
        let mut some = PutBook::new();
        assert_eq!([some.push_from(&all, 2), some.push_from(&all, 1)], [0, 1]);
        assert_eq!((some.len(), some.get(0).1, some.get(1).1), (2, &b"tthird"[..], &b"tsecond"[..]));
        assert_eq!(some.get(1).0, all.get(1).0);
    }
}
