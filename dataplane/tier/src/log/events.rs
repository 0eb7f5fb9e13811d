//! Queue of events for the host, and count of outstanding acknowledgements.
//!
//! Both are bounded, as backpressure: calls are refused as busy while too many events are queued, or too many
//! acknowledgements are outstanding.

use std::collections::VecDeque;

use crate::config::TierConfig;
use crate::types::Event;

/// Queue of events for the host.
#[derive(Debug)]
pub(crate) struct Events {
    queue: VecDeque<Event>,
    /// Queue depth at which no more calls are accepted.
    clogged_at: usize,
    /// Acknowledgements that are outstanding, or queued and not taken by the host.
    outstanding: u32,
    max_outstanding: u32,
}

impl Events {
    pub(crate) fn new(config: &TierConfig) -> Self {
        let events = 2 * config.max_waiters as usize + config.max_reads as usize + 64;
        Self {
            queue: VecDeque::with_capacity(events),
            clogged_at: (config.max_waiters + config.max_reads) as usize,
            outstanding: 0,
            max_outstanding: config.max_waiters,
        }
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.queue.push_back(event);
    }

    /// Returns the next event. An event that acknowledges a call, or reports its failure, makes room for another call.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        let event = self.queue.pop_front()?;
        if matches!(
            event,
            Event::Stored { .. } | Event::StoreFailed { .. } | Event::Removed { .. } | Event::RemoveFailed { .. }
        ) {
            self.outstanding -= 1;
        }
        Some(event)
    }

    /// Counts an accepted put or removal, whose acknowledgement or failure is outstanding.
    pub(crate) const fn owe(&mut self) {
        self.outstanding += 1;
    }

    /// Returns true if a put or a removal may be accepted.
    pub(crate) fn may_owe(&self) -> bool {
        self.outstanding < self.max_outstanding && !self.is_clogged()
    }

    /// Returns true if so many events are queued for the host that no more calls are accepted.
    pub(crate) fn is_clogged(&self) -> bool {
        self.queue.len() >= self.clogged_at
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Ack, Token};

    #[test]
    fn calls_are_refused_until_the_host_takes_acknowledgements() {
        let config = TierConfig { max_waiters: 2, max_reads: 1, ..TierConfig::for_device(1 << 30, 4096) };
        let mut events = Events::new(&config);
        let stored = Event::Stored { token: Token(1), ack: Ack::Buffered };
        events.owe();
        assert!(events.may_owe());
        events.owe();
        assert!(!events.may_owe(), "two are outstanding");
        events.push(stored);
        assert!(!events.may_owe(), "it is not taken");
        assert_eq!(events.pop(), Some(stored));
        assert!(events.may_owe());
        (0..3).for_each(|_| events.push(Event::Released { token: Token(1) }));
        assert!(events.is_clogged() && !events.may_owe());
        events.pop();
        assert!(!events.is_clogged() && events.may_owe());
    }
}
