//! Group: the rails of one path to a peer, and the slices queued for them, with one queue for each pair of memory
//! places.
//!
//! Slices of memory at different places take different rails. In a single queue, a slice that waits for its own rail
//! would hold up all others (head-of-line blocking). The queues take turns; among their first slices the more urgent
//! one goes first.

use super::locality::Places;
use crate::sched::{ClassQueue, Kinds, Next, Priority};
use crate::types::{Path, Request};

/// Most pairs of places that are distinguished for one peer; further ones count as unknown.
const QUEUES_MOST: usize = 64;

/// Rails of one path to a peer, and the slices queued for them.
pub(crate) struct Group {
    pub(crate) path: Path,
    pub(crate) rails: Vec<u32>,
    /// Queues by the places of the memory; the first one is for slices that may take any rail.
    pub(crate) waiting: Vec<WaitQueue>,
    /// Queue that was served last.
    turn: usize,
    pub(crate) dirty: bool,
    /// Time until which the path is not used because it does not reach the peer from this host, and the reason.
    pub(crate) unavailable: Option<(u64, String)>,
    /// Time until which the first lane of each rail is reserved for small slices.
    pub(crate) express_until_ns: u64,
}

/// A queue, and the distance of the group's rails from the memory of its slices.
#[derive(Default)]
pub(crate) struct WaitQueue {
    places: Places,
    /// Costs by the rail's position; 0 for positions beyond the end. At least one rail has cost 0.
    pub(crate) costs: Box<[u8]>,
    pub(crate) queue: ClassQueue,
}

/// Queue of a group for memory at a pair of places.
pub(crate) enum QueueFor {
    /// An existing queue.
    Known(u8),
    /// No queue yet: it is added when the costs of the rails are known.
    New,
}

/// Requirements of a slice on its lane.
#[derive(Clone, Copy)]
pub(crate) struct Ask {
    pub(crate) bytes: u64,
    pub(crate) small: bool,
    pub(crate) high: bool,
    /// True if the group has a single rail.
    pub(crate) only: bool,
    /// Rail that failed the slice last.
    pub(crate) avoid: u32,
    /// Bytes of the slice's request that are not completed.
    pub(crate) open_bytes: u64,
    /// Queue of the slice within the group.
    pub(crate) queue: u8,
    /// Widest window among the usable rails, by their stated speeds.
    pub(crate) widest_ns: f64,
    /// Progress of the usable rail that is furthest behind with its share.
    pub(crate) behind_ns: f64,
}

impl Ask {
    /// Creates the requirements of a slice of `bytes`, whose request has `open_bytes` that are not completed.
    pub(crate) fn new(bytes: u64, open_bytes: u64, small: bool, priority: Priority, queue: u8, avoid: u32) -> Self {
        let high = priority == Priority::High;
        Self { bytes, small, high, only: false, avoid, open_bytes, queue, widest_ns: 0.0, behind_ns: f64::INFINITY }
    }
}

impl Group {
    pub(crate) fn new(path: Path, rails: Vec<u32>) -> Self {
        let waiting = vec![WaitQueue::default()];
        Self { path, rails, waiting, turn: 0, dirty: false, unavailable: None, express_until_ns: 0 }
    }

    /// Returns true if all queues are empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.iter().all(|waiting| waiting.queue.is_empty())
    }

    /// Returns the bytes of all queued slices.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().map(|waiting| waiting.queue.bytes()).sum()
    }

    /// Returns the distance of a rail, by its position, from the memory of a queue's slices.
    #[inline]
    pub(crate) fn cost(&self, queue: usize, at: usize) -> u8 {
        self.waiting[queue].costs.get(at).copied().unwrap_or(0)
    }

    /// Returns true if a rail is not one of the nearest to the memory of a queue's slices.
    #[inline]
    pub(crate) fn is_far(&self, queue: u8, rail: u32) -> bool {
        let mut costs = self.waiting[usize::from(queue)].costs.iter().zip(&self.rails);
        costs.any(|(cost, other)| *cost > 0 && *other == rail)
    }

    /// Returns the queue for memory at these places.
    #[inline]
    pub(crate) fn queue_for(&self, places: Places) -> QueueFor {
        match self.waiting.iter().position(|waiting| waiting.places == places) {
            // The first queue was created before its costs could be computed.
            Some(0) if self.waiting[0].costs.is_empty() => QueueFor::New,
            Some(known) => QueueFor::Known(known as u8),
            None if self.waiting.len() >= QUEUES_MOST => QueueFor::Known(0),
            None => QueueFor::New,
        }
    }

    /// Adds a queue for memory at these places.
    pub(crate) fn add_queue(&mut self, places: Places, costs: Box<[u8]>) -> u8 {
        if self.waiting[0].places == places {
            self.waiting[0].costs = costs;
            return 0;
        }
        self.waiting.push(WaitQueue { places, costs, queue: ClassQueue::new() });
        self.waiting.len() as u8 - 1
    }

    /// Returns the next slice to bind, with its queue: of the most urgent slices, that of the next queue in turn.
    pub(crate) fn next_of_all(&mut self, kinds: &[Kinds], now_ns: u64) -> Option<(usize, Next)> {
        let (count, turn) = (self.waiting.len(), self.turn);
        let order = (1..=count).map(|step| (turn + step) % count);
        let first = |queue: usize| Some((queue, self.waiting[queue].queue.next(kinds[queue], now_ns)?));
        let found = order.filter_map(first).min_by_key(|(_, next)| next.priority)?;
        self.turn = found.0;
        Some(found)
    }

    /// Removes and returns all queued slices.
    pub(crate) fn drain(&mut self) -> Vec<u32> {
        self.waiting.iter_mut().flat_map(|waiting| waiting.queue.drain()).collect()
    }

    /// Returns true if the path is known not to reach the peer from this host.
    pub(crate) fn is_unavailable(&self, now_ns: u64) -> bool {
        self.unavailable.as_ref().is_some_and(|(until_ns, _)| now_ns < *until_ns)
    }

    /// Returns true if the path supports a request, apart from conditions that depend on the lane.
    pub(crate) fn serves(&self, request: &Request) -> bool {
        matches!(request, Request::Read(..) | Request::Write(..)) || self.path.is_greeted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::Ticket;
    use crate::types::Place;

    fn places(ours: u8, theirs: u8) -> Places {
        Places { ours: Place(ours), theirs: Place(theirs) }
    }

    fn added(group: &mut Group, at: Places) -> u8 {
        match group.queue_for(at) {
            QueueFor::Known(queue) => queue,
            QueueFor::New => group.add_queue(at, Box::new([0, 2])),
        }
    }

    #[test]
    fn memory_at_different_places_has_separate_queues() {
        let mut group = Group::new(Path::Rdma, vec![0, 1]);
        assert_eq!(
            [places(1, 1), places(0, 0), places(1, 1), places(0, 0)].map(|at| added(&mut group, at)),
            [1, 0, 1, 0]
        );
        assert_eq!((group.cost(1, 0), group.cost(1, 1), group.cost(1, 2)), (0, 2, 0));
        for place in 2..100 {
            added(&mut group, places(place, 0));
        }
        assert_eq!((group.waiting.len(), added(&mut group, places(99, 9))), (QUEUES_MOST, 0));
    }

    #[test]
    fn queues_take_turns_and_urgent_slices_go_first() {
        let mut group = Group::new(Path::Rdma, vec![0, 1]);
        let queues = [places(0, 0), places(1, 0), places(2, 0)].map(|at| usize::from(added(&mut group, at)));
        let ticket = |priority| Ticket { priority, tenant: 0, weight: 1, due_ns: u64::MAX, bytes: 9, small: true };
        for (item, queue) in (0..).zip([queues[0], queues[1], queues[1], queues[2]]) {
            let priority = if item == 3 { Priority::High } else { Priority::Medium };
            group.waiting[queue].queue.push(item, &ticket(priority), 0);
        }
        assert_eq!(group.waiting_bytes(), 36);
        let kinds = [Kinds { small: true, large: true }; 3];
        let mut order = Vec::new();
        while let Some((queue, next)) = group.next_of_all(&kinds, 0) {
            group.waiting[queue].queue.take(next.place, 0);
            order.push(next.item);
        }
        assert_eq!(order, [3, 0, 1, 2]);
        assert!(group.is_empty());
    }
}
