//! Connections by position, each with a generation, and those of them that are due for a turn.

use std::collections::VecDeque;

use crate::types::ConnectionId;

struct Place<T> {
    generation: u32,
    /// Whether it is in the queue of those that are due.
    due: bool,
    content: Option<T>,
}

/// A table of reused positions.
pub(super) struct Table<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    due: VecDeque<u32>,
    len: usize,
}

impl<T> Table<T> {
    pub(super) const fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new(), due: VecDeque::new(), len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn insert(&mut self, content: T) -> ConnectionId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, due: false, content: None });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.generation = place.generation.wrapping_add(1);
        place.content = Some(content);
        self.len += 1;
        ConnectionId { index, generation: place.generation }
    }

    pub(super) fn get(&mut self, id: ConnectionId) -> Option<&mut T> {
        let place = self.places.get_mut(id.index as usize)?;
        if place.generation == id.generation { place.content.as_mut() } else { None }
    }

    /// Takes a connection out. Its position is not given to another before [`Self::free`].
    pub(super) fn take(&mut self, id: ConnectionId) -> Option<T> {
        let place = self.places.get_mut(id.index as usize)?;
        if place.generation == id.generation { place.content.take() } else { None }
    }

    /// The position of a connection that was taken out may be another's.
    pub(super) fn free(&mut self, id: ConnectionId) {
        self.free.push(id.index);
        self.len -= 1;
    }

    /// Queues a connection for a turn, once.
    pub(super) fn mark_due(&mut self, id: ConnectionId) {
        let Some(place) = self.places.get_mut(id.index as usize) else { return };
        if place.generation == id.generation && place.content.is_some() && !place.due {
            place.due = true;
            self.due.push_back(id.index);
        }
    }

    /// How many are due.
    pub(super) fn due(&self) -> usize {
        self.due.len()
    }

    /// The next that is due.
    pub(super) fn next_due(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.due.pop_front() {
            let place = &mut self.places[index as usize];
            place.due = false;
            if place.content.is_some() {
                return Some(ConnectionId { index, generation: place.generation });
            }
        }
        None
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ConnectionId, &T)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let id = ConnectionId { index: index as u32, generation: place.generation };
            Some((id, place.content.as_ref()?))
        })
    }
}
