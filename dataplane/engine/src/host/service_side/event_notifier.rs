//! Notification of a subscriber to a service's events.

use std::sync::mpsc::SyncSender;

/// Notifier of a subscriber: objects have new events.
#[derive(Default)]
pub(super) struct EventNotifier {
    /// Channel to the subscriber, and the number of the next event at the last notification.
    subscriber: Option<(SyncSender<()>, u64)>,
}

impl EventNotifier {
    /// Sets the subscriber.
    pub(super) fn set(&mut self, subscriber: Option<SyncSender<()>>) {
        self.subscriber = subscriber.map(|subscriber| (subscriber, 0));
    }

    /// Notifies the subscriber if there are new events; `next_event` returns the number of the next event.
    pub(super) fn notify(&mut self, next_event: impl FnOnce() -> u64) {
        if let Some((subscriber, notified)) = &mut self.subscriber {
            let next = next_event();
            if next != *notified {
                *notified = next;
                // If the channel is full, its reader has yet to read, and will see these events too.
                let _ = subscriber.try_send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn a_subscriber_is_notified_once_of_new_events() {
        let (subscriber, notifications) = sync_channel(2);
        let mut notifier = EventNotifier::default();
        notifier.notify(|| unreachable!("nobody listens"));
        notifier.set(Some(subscriber));
        notifier.notify(|| 0);
        assert!(notifications.try_recv().is_err());
        notifier.notify(|| 3);
        notifier.notify(|| 3);
        assert!(notifications.try_recv().is_ok() && notifications.try_recv().is_err());
    }
}
