//! Round-robin queues of connections: indexes of a table, in order, each queued at most once.

use std::collections::VecDeque;

/// Queue of connection indexes.
pub(crate) struct Turns {
    queue: VecDeque<u32>,
    /// For each index, true if it is in the queue.
    queued: Vec<bool>,
}

impl Turns {
    pub(crate) const fn new() -> Self {
        Self { queue: VecDeque::new(), queued: Vec::new() }
    }

    /// Queues an index unless it is queued already.
    #[inline]
    pub(crate) fn mark(&mut self, index: u32) {
        if index as usize >= self.queued.len() {
            self.queued.resize(index as usize + 1, false);
        }
        if !core::mem::replace(&mut self.queued[index as usize], true) {
            self.queue.push_back(index);
        }
    }

    /// Dequeues the next index. Its connection may be gone by now.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let index = self.queue.pop_front()?;
        self.queued[index as usize] = false;
        Some(index)
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

/// Queues of connections in the rounds of a host.
pub(crate) struct Rounds {
    /// Connections with input to take.
    pub(crate) ready: Turns,
    /// Connections with output to send.
    pub(crate) dirty: Turns,
    /// Connections with more input than their budget of this round.
    pub(crate) again: Vec<u32>,
}

impl Rounds {
    pub(crate) const fn new() -> Self {
        Self { ready: Turns::new(), dirty: Turns::new(), again: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_index_is_queued_once_until_its_turn() {
        let mut turns = Turns::new();
        for index in [7, 2, 7, 2] {
            turns.mark(index);
        }
        assert_eq!((turns.len(), turns.pop()), (2, Some(7)));
        turns.mark(7);
        assert_eq!([turns.pop(), turns.pop(), turns.pop()], [Some(2), Some(7), None]);
        assert!(turns.is_empty());
    }
}
