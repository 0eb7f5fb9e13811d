//! The rails of one path to a peer, and what waits for them: one queue for each pair of places that its memory is at.
//!
//! Slices of memory at different places go by different rails. In one queue, one that waits for its own rail would hold
//! up all others. The queues take turns; among their first slices the more urgent one goes first.

use super::locality::Places;
use crate::sched::{ClassQueue, Kinds, Next, Priority};
use crate::types::{Path, Request};

/// Pairs of places that are told apart with one peer; further ones count as unknown.
const QUEUES_MOST: usize = 64;

/// The rails of one path to a peer, and what waits for them.
pub(crate) struct Group {
    pub(crate) path: Path,
    pub(crate) rails: Vec<u32>,
    /// What waits, by where its memory is; the first of them for what may take any rail.
    pub(crate) waiting: Vec<WaitQueue>,
    /// Whose turn it is among those.
    turn: usize,
    pub(crate) dirty: bool,
    /// Until when it is not used, as it does not lead to the peer from here, and why.
    pub(crate) unavailable: Option<(u64, String)>,
    /// Until when bulk keeps off the first lane of each rail.
    pub(crate) express_until_ns: u64,
}

/// A queue, and how far the group's rails are from the memory of what waits in it.
#[derive(Default)]
pub(crate) struct WaitQueue {
    places: Places,
    /// By the rail's position; 0 for those beyond its end. There is one of cost 0.
    pub(crate) costs: Box<[u8]>,
    pub(crate) queue: ClassQueue,
}

/// Which queue of a group is for memory at certain places.
pub(crate) enum QueueFor {
    /// This one.
    Known(u8),
    /// None so far: it is added when it is known how far the rails are.
    New,
}

/// What a lane is wanted for.
#[derive(Clone, Copy)]
pub(crate) struct Ask {
    pub(crate) bytes: u64,
    pub(crate) small: bool,
    pub(crate) high: bool,
    /// Whether there is one rail only.
    pub(crate) only: bool,
    /// The rail that failed it last.
    pub(crate) avoid: u32,
    /// Bytes of its request that are not done.
    pub(crate) open_bytes: u64,
    /// Which of the group's queues it is of.
    pub(crate) queue: u8,
    /// The widest window of the rails beside, by their stated speeds.
    pub(crate) widest_ns: f64,
    /// How far the last of those is with its part.
    pub(crate) behind_ns: f64,
}

impl Ask {
    /// For a slice of so many bytes, whose request has so many that are not done.
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

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.iter().all(|waiting| waiting.queue.is_empty())
    }

    /// Bytes of what waits.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().map(|waiting| waiting.queue.bytes()).sum()
    }

    /// How far a rail, by its position, is from the memory of what waits in a queue.
    #[inline]
    pub(crate) fn cost(&self, queue: usize, at: usize) -> u8 {
        self.waiting[queue].costs.get(at).copied().unwrap_or(0)
    }

    /// Whether a rail is not one of the nearest to the memory of what waits in a queue.
    pub(crate) fn is_far(&self, queue: u8, rail: u32) -> bool {
        let mut costs = self.waiting[usize::from(queue)].costs.iter().zip(&self.rails);
        costs.any(|(cost, other)| *cost > 0 && *other == rail)
    }

    /// Which queue is for memory at these places.
    pub(crate) fn queue_for(&self, places: Places) -> QueueFor {
        match self.waiting.iter().position(|waiting| waiting.places == places) {
            // The first was made before it could be known.
            Some(0) if self.waiting[0].costs.is_empty() => QueueFor::New,
            Some(known) => QueueFor::Known(known as u8),
            None if self.waiting.len() >= QUEUES_MOST => QueueFor::Known(0),
            None => QueueFor::New,
        }
    }

    /// Adds the queue for memory at these places.
    pub(crate) fn add_queue(&mut self, places: Places, costs: Box<[u8]>) -> u8 {
        if self.waiting[0].places == places {
            self.waiting[0].costs = costs;
            return 0;
        }
        self.waiting.push(WaitQueue { places, costs, queue: ClassQueue::new() });
        self.waiting.len() as u8 - 1
    }

    /// The slice whose turn it is, with its queue: of the most urgent, that of the next queue after the last one.
    pub(crate) fn next_of_all(&mut self, kinds: &[Kinds], now_ns: u64) -> Option<(usize, Next)> {
        let (count, turn) = (self.waiting.len(), self.turn);
        let order = (1..=count).map(|step| (turn + step) % count);
        let first = |queue: usize| Some((queue, self.waiting[queue].queue.next(kinds[queue], now_ns)?));
        let found = order.filter_map(first).min_by_key(|(_, next)| next.priority)?;
        self.turn = found.0;
        Some(found)
    }

    /// Takes all that waits out of its queues.
    pub(crate) fn drain(&mut self) -> Vec<u32> {
        self.waiting.iter_mut().flat_map(|waiting| waiting.queue.drain()).collect()
    }

    /// Whether it is known not to lead to the peer from here.
    pub(crate) fn is_unavailable(&self, now_ns: u64) -> bool {
        self.unavailable.as_ref().is_some_and(|(until_ns, _)| now_ns < *until_ns)
    }

    /// Whether it can serve a request, but for what only a lane knows.
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
    fn memory_at_other_places_waits_in_other_queues() {
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
    fn queues_take_turns_and_the_urgent_goes_first() {
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
