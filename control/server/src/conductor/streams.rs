//! Streams of the Conductor: of assignments to clients whose requests were queued, and of tables to watchers of
//! instances.
//!
//! Nothing here waits. A client that does not read loses its stream, a watcher that does not read misses tables.

use std::collections::BTreeMap;
use std::time::Duration;

use kvplane_conductor::conductor::{ClientNotice, Conductor, InstanceTable};
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode, item_frame};
use tokio::sync::mpsc;

/// Most assignments queued for a client.
const ASSIGNMENTS: usize = 1024;
/// Most clients that watch assignments, and most watchers of instances.
const WATCHERS: usize = 256;
/// Most tables queued for a watcher.
const TABLES: usize = 4;
/// Interval at which watchers get the instances' loads while nothing else changes.
const LOADS: Duration = Duration::from_secs(1);

/// Streams to clients and to watchers of instances.
#[derive(Default)]
pub(super) struct Streams {
    clients: BTreeMap<u64, mpsc::Sender<ItemFrame>>,
    watchers: Vec<mpsc::Sender<ItemFrame>>,
    /// Version that was sent to watchers last, and its time.
    sent: (u64, u64),
}

impl Streams {
    /// Opens a stream of tables, beginning with this one.
    ///
    /// # Errors
    /// When there are too many watchers.
    pub(super) fn watch_instances(&mut self, table: &InstanceTable) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.watchers.retain(|watcher| !watcher.is_closed());
        if self.watchers.len() >= WATCHERS {
            return Err(full("watch instances"));
        }
        let (items, receiver) = mpsc::channel(TABLES);
        // The channel is empty.
        let _ = items.try_send(table_frame(table)?);
        self.watchers.push(items);
        Ok(receiver)
    }

    /// Opens a client's stream of assignments in place of a former one, beginning with those that it missed.
    ///
    /// # Errors
    /// When there are too many clients.
    pub(super) fn watch_assignments(
        &mut self,
        client: u64,
        missed: &[ClientNotice],
    ) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.clients.retain(|_, client| !client.is_closed());
        if self.clients.len() >= WATCHERS && !self.clients.contains_key(&client) {
            return Err(full("watch assignments"));
        }
        let (items, receiver) = mpsc::channel(ASSIGNMENTS);
        for notice in missed.iter().take(ASSIGNMENTS) {
            // Placements that do not fit are returned in reply to a retry.
            let _ = items.try_send(notice_frame(notice)?);
        }
        self.clients.insert(client, items);
        Ok(receiver)
    }

    /// Sends the Conductor's notices, and its table if it has changed or the loads are due.
    pub(super) fn send(&mut self, conductor: &mut Conductor, now_ns: u64) {
        while let Some(notice) = conductor.take_told() {
            let Some(client) = self.clients.get(&notice.client) else { continue };
            // An answer is small; a client that does not keep up retries its request.
            if notice_frame(&notice).is_ok_and(|frame| client.try_send(frame).is_err()) {
                self.clients.remove(&notice.client);
            }
        }
        if self.watchers.is_empty() {
            return;
        }
        let version = conductor.instances().version();
        if version == self.sent.0 && now_ns < self.due_ns() {
            return;
        }
        self.sent = (version, now_ns);
        let Ok(frame) = table_frame(&InstanceTable::from(conductor.table(now_ns))) else { return };
        // A slow watcher gets the next table.
        self.watchers
            .retain(|watcher| !matches!(watcher.try_send(frame.clone()), Err(mpsc::error::TrySendError::Closed(_))));
    }

    /// Returns the time at which watchers get the loads next; the longest time while there are none.
    pub(super) fn due_ns(&self) -> u64 {
        if self.watchers.is_empty() { u64::MAX } else { self.sent.1 + LOADS.as_nanos() as u64 }
    }
}

fn full(what: &str) -> Refusal {
    Refusal::new(RefusalCode::LimitReached, format!("{WATCHERS} subscribers {what} already, which is the limit"))
}

fn table_frame(table: &InstanceTable) -> Result<ItemFrame, Refusal> {
    item_frame(table).map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))
}

fn notice_frame(notice: &ClientNotice) -> Result<ItemFrame, Refusal> {
    item_frame(&notice.notice).map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))
}

#[cfg(test)]
mod tests {
    use kvplane_conductor::conductor::ConductorConfig;

    use super::*;

    #[test]
    fn watchers_get_a_table_at_once_and_then_once_an_interval() {
        let mut conductor = Conductor::new(ConductorConfig::default(), 1);
        let (mut streams, every_ns) = (Streams::default(), LOADS.as_nanos() as u64);
        assert_eq!(streams.due_ns(), u64::MAX);
        let table = InstanceTable::from(conductor.table(5));
        let mut watcher = streams.watch_instances(&table).expect("the first");
        watcher.try_recv().expect("the present table");
        streams.send(&mut conductor, 5);
        while watcher.try_recv().is_ok() {}
        let due_ns = streams.due_ns();
        assert!(due_ns <= 5 + every_ns, "{due_ns}");
        streams.send(&mut conductor, due_ns - 1);
        assert!(watcher.try_recv().is_err(), "nothing has changed");
        streams.send(&mut conductor, due_ns);
        watcher.try_recv().expect("the loads");
        assert_eq!(streams.due_ns(), due_ns + every_ns);
        drop(watcher);
        streams.send(&mut conductor, due_ns + every_ns);
        assert_eq!(streams.due_ns(), u64::MAX, "nobody watches any more");
    }

    #[test]
    fn streams_are_limited_and_a_client_replaces_its_own() {
        let mut streams = Streams::default();
        let table = InstanceTable::from(Conductor::new(ConductorConfig::default(), 1).table(0));
        let watchers: Vec<_> = (0..WATCHERS).map(|_| streams.watch_instances(&table).expect("room")).collect();
        let code = |refusal: Refusal| refusal.known_code();
        assert_eq!(streams.watch_instances(&table).map_err(code).err(), Some(Some(RefusalCode::LimitReached)));
        drop(watchers);
        streams.watch_instances(&table).expect("the others have left");

        let mut clients: Vec<_> =
            (0..WATCHERS as u64).map(|client| streams.watch_assignments(client, &[]).expect("room")).collect();
        let more = streams.watch_assignments(u64::MAX, &[]);
        assert_eq!(more.map_err(code).err(), Some(Some(RefusalCode::LimitReached)));
        let again = streams.watch_assignments(0, &[]).expect("in place of its own");
        assert!(clients[0].try_recv().is_err_and(|error| error == mpsc::error::TryRecvError::Disconnected));
        assert!(!again.is_closed());
    }
}
