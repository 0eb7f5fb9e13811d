//! Events of a simulated cluster, in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Event of the simulation.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The Conductor receives the changes of a cache.
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
    /// The KV cache of a prompt is at its decode instance.
    HandedOver {
        id: usize,
        instance: usize,
    },
    /// Decode instances report their load.
    Report,
    Died {
        instance: usize,
    },
    Detected {
        instance: usize,
    },
    /// The first layer of a fetched prefix has arrived.
    FirstLayer {
        instance: usize,
    },
    /// A stage of a pipeline group has computed a chunk.
    ChunkComputed {
        id: usize,
        number: u64,
        stage: usize,
    },
    /// A chunk has arrived at a stage.
    ChunkArrived {
        id: usize,
        number: u64,
        stage: usize,
    },
    Sample,
    Replicas,
    Arrived {
        id: usize,
    },
    /// A queued request may be able to start.
    Wake,
    /// A queued request may have waited for the maximum time.
    Waited {
        id: usize,
    },
    /// Time to decide about replicas.
    Copies,
    /// A replica is complete.
    Copied {
        instance: usize,
        key: u64,
        chain: Arc<[u64]>,
    },
}

/// Queue of future events, and the present time: that of the last event.
#[derive(Default)]
pub(crate) struct EventQueue {
    /// Events by time; those of equal time in the order in which they were added.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    now_ns: u64,
}

impl EventQueue {
    /// Adds an event at `at_ns`.
    pub(crate) fn at(&mut self, at_ns: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at_ns, self.number, event)));
    }

    /// Takes the next event, and advances the present time to it.
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
