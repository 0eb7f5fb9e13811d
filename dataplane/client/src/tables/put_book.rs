//! What the puts of a batch say beside their bytes.

use kvplane_proto::limits::Limits;
use kvplane_proto::message::{ObjectName, PutItem};

/// What the puts of a batch say beside their bytes: names and wishes, in bytes that are used again for the next batch.
/// [`Request::PutAs`](crate::Request::PutAs) names one by its number.
#[derive(Clone, Debug, Default)]
pub struct PutBook {
    puts: Vec<Entry>,
    names: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    item: PutItem,
    name_at: u32,
}

impl PutBook {
    /// A book without entries.
    #[must_use]
    pub const fn new() -> Self {
        Self { puts: Vec::new(), names: Vec::new() }
    }

    /// Adds what a put says; the length of its object is taken from the request. Its number.
    ///
    /// # Panics
    /// When the name is not the one that the item was made of, or all names together have more than 4 GiB.
    pub fn push(&mut self, item: PutItem, name: &ObjectName<'_>) -> u32 {
        assert!(
            (usize::from(item.key_bytes), usize::from(item.tenant_bytes)) == (name.key.len(), name.tenant.len()),
            "the item is of another name"
        );
        let name_at = u32::try_from(self.names.len()).expect("names of 4 GiB");
        self.names.extend_from_slice(name.tenant);
        self.names.extend_from_slice(name.key);
        self.puts.push(Entry { item, name_at });
        self.puts.len() as u32 - 1
    }

    /// Forgets all entries.
    pub fn clear(&mut self) {
        self.puts.clear();
        self.names.clear();
    }

    /// How many entries there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.puts.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.puts.is_empty()
    }

    /// Whether the allocations are small enough to be kept.
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
