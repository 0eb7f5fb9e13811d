//! Notification of a subscriber to a service's events.

use std::sync::mpsc::SyncSender;

/// Bell that rings when objects have new events.
#[derive(Default)]
pub(super) struct EventBell {
    /// Bell, and the number of the next event at its last ring.
    bell: Option<(SyncSender<()>, u64)>,
}

impl EventBell {
    /// Sets the bell.
    pub(super) fn set(&mut self, bell: Option<SyncSender<()>>) {
        self.bell = bell.map(|bell| (bell, 0));
    }

    /// Rings if there are new events; `next_event` returns the number of the next event.
    pub(super) fn ring(&mut self, next_event: impl FnOnce() -> u64) {
        if let Some((bell, told)) = &mut self.bell {
            let next = next_event();
            if next != *told {
                *told = next;
                // If the channel is full, its reader has yet to read, and will see these events too.
                let _ = bell.try_send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn the_bell_rings_once_for_new_events() {
        let (bell, rings) = sync_channel(2);
        let mut event_bell = EventBell::default();
        event_bell.ring(|| unreachable!("nobody listens"));
        event_bell.set(Some(bell));
        event_bell.ring(|| 0);
        assert!(rings.try_recv().is_err());
        event_bell.ring(|| 3);
        event_bell.ring(|| 3);
        assert!(rings.try_recv().is_ok() && rings.try_recv().is_err());
    }
}
