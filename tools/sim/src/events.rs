//! The events of a simulated cluster, in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Something that happens.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The Conductor hears what a cache holds now and no longer.
    Heard {
        instance: usize,
        stored: Vec<u64>,
        removed: Vec<u64>,
    },
    Fetched {
        id: usize,
        instance: usize,
        blocks: usize,
    },
    Prefilled {
        id: usize,
        instance: usize,
    },
    Decoded {
        instance: usize,
        version: u64,
    },
    Died {
        instance: usize,
    },
    Detected {
        instance: usize,
    },
    Sample,
    Replicas,
    Arrived {
        id: usize,
    },
    /// Somebody who waits may go now.
    Wake,
    /// It is looked whether something is worth a copy.
    Copies,
    /// A copy is there.
    Copied {
        instance: usize,
        key: u64,
        chain: Arc<[u64]>,
    },
}

/// What will happen, and the time: that of what happened last.
#[derive(Default)]
pub(crate) struct EventQueue {
    /// By time; of equal times in the order in which they were said.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    now_ns: u64,
}

impl EventQueue {
    /// Something will happen then.
    pub(crate) fn at(&mut self, at_ns: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at_ns, self.number, event)));
    }

    /// What happens next, at the time that it is from then on.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        let Reverse((at_ns, _, event)) = self.events.pop()?;
        self.now_ns = at_ns;
        Some(event)
    }

    pub(crate) const fn now_ns(&self) -> u64 {
        self.now_ns
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}
