//! Connection table: entries by index with a generation, so that a stale id never denotes a newer connection.

use crate::types::ConnectionId;

struct Slot<T> {
    generation: u32,
    content: Option<T>,
}

/// Table with reused indexes. An index is taken until [`Self::free`], even while its entry is empty.
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// Number of taken indexes.
    taken: usize,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), taken: 0 }
    }

    /// Returns the number of taken indexes.
    pub(crate) const fn len(&self) -> usize {
        self.taken
    }

    /// Returns the number of indexes, including free ones.
    pub(crate) const fn positions(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Returns the id that the next connection gets.
    pub(crate) fn next_id(&self) -> ConnectionId {
        let index = self.free.last().copied().unwrap_or(self.slots.len() as u32);
        let generation = self.slots.get(index as usize).map_or(1, |slot| slot.generation.wrapping_add(1));
        ConnectionId { index, generation }
    }

    /// Reserves an index for a connection that [`Self::put`] adds later.
    pub(crate) fn reserve(&mut self) -> ConnectionId {
        let id = self.next_id();
        if self.free.pop().is_none() {
            self.slots.push(Slot { generation: 0, content: None });
        }
        self.slots[id.index as usize].generation = id.generation;
        self.taken += 1;
        id
    }

    /// Fills a reserved entry.
    pub(crate) fn put(&mut self, id: ConnectionId, content: T) {
        self.slots[id.index as usize].content = Some(content);
    }

    pub(crate) fn insert(&mut self, content: T) -> ConnectionId {
        let id = self.reserve();
        self.put(id, content);
        id
    }

    /// Returns true if this is the id of the entry's current connection, or of its last one.
    pub(crate) fn is_current(&self, id: ConnectionId) -> bool {
        self.slots.get(id.index as usize).is_some_and(|slot| slot.generation == id.generation)
    }

    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&T> {
        let slot = self.slots.get(id.index as usize)?;
        if slot.generation == id.generation { slot.content.as_ref() } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut T> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation { slot.content.as_mut() } else { None }
    }

    /// Returns the connection at an index, whatever its generation.
    #[inline]
    pub(crate) fn at(&self, index: u32) -> Option<&T> {
        self.slots[index as usize].content.as_ref()
    }

    /// Returns the connection at an index mutably, see [`Self::at`].
    #[inline]
    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots[index as usize].content.as_mut()
    }

    /// Returns the id of the connection at an index.
    #[inline]
    pub(crate) fn id_at(&self, index: u32) -> ConnectionId {
        ConnectionId { index, generation: self.slots[index as usize].generation }
    }

    /// Removes a connection. Its index is not reused before [`Self::free`].
    pub(crate) fn take(&mut self, id: ConnectionId) -> Option<T> {
        if self.is_current(id) { self.take_if(id.index, |_| true) } else { None }
    }

    /// Removes the connection at an index if the predicate holds.
    pub(crate) fn take_if(&mut self, index: u32, is_so: impl FnOnce(&mut T) -> bool) -> Option<T> {
        self.slots[index as usize].content.take_if(is_so)
    }

    /// Frees the index of a removed connection.
    pub(crate) fn free(&mut self, id: ConnectionId) {
        self.free.push(id.index);
        self.taken -= 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ConnectionId, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let id = ConnectionId { index: index as u32, generation: slot.generation };
            Some((id, slot.content.as_ref()?))
        })
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (ConnectionId, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
            let id = ConnectionId { index: index as u32, generation: slot.generation };
            Some((id, slot.content.as_mut()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_reused_only_after_it_is_freed() {
        let mut table = Table::new();
        let expected = table.next_id();
        let first = table.insert('a');
        assert_eq!((first, table.id_at(first.index)), (expected, first));
        assert_eq!(table.take(first), Some('a'));
        assert!(table.is_current(first) && table.get(first).is_none(), "its end was not taken yet");
        let second = table.insert('b');
        assert_ne!(second.index, first.index);
        table.free(first);
        let third = table.reserve();
        assert_eq!((third.index, table.get(third), table.len()), (first.index, None, 2));
        table.put(third, 'c');
        assert_eq!((table.get(first), table.get(third), table.at(third.index)), (None, Some(&'c'), Some(&'c')));
        assert_eq!(table.take(first), None, "the name of a former one");
        assert_eq!(table.iter().map(|(id, _)| id).collect::<Vec<_>>(), [third, second]);
        assert_eq!(table.positions(), 2);
    }
}
