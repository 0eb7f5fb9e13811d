//! Watch of the cluster map: keeps the latest map over reconnections.
//!
//! A watch holds the last maps, never a queue: for most readers only the latest counts. A node follows each map in
//! turn, and finds those that came since it looked last. While the control plane is unreachable, the last map stays in
//! use. A map with an older epoch is ignored, except after the control plane announced another state
//! ([`Welcome::state_id`]): then epochs start over.
//!
//! [`Welcome::state_id`]: crate::message::Welcome::state_id

use std::sync::Arc;

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::ClusterMap;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::client::Client;
use crate::error::CallError;
use crate::message::{MapReply, WatchMap};

/// Most maps that a watch holds.
const RECENT: usize = 32;

/// State of a watch.
#[derive(Clone, Debug, Default)]
pub struct WatchState {
    /// The latest map; none before the first one arrived.
    pub map: Option<Arc<ClusterMap>>,
    /// The last maps of this cluster state, the latest last.
    pub recent: Arc<[Arc<ClusterMap>]>,
    /// Identity of the cluster state that the map belongs to; epochs of different states cannot be compared.
    pub state_id: u64,
    /// Error for which the map may be out of date; none while the control plane is connected.
    pub trouble: Option<Arc<CallError>>,
}

impl WatchState {
    fn accept(&mut self, map: Arc<ClusterMap>, state_id: u64) {
        let before: &[_] = if self.state_id == state_id { &self.recent } else { &[] };
        let kept = before.len().saturating_sub(RECENT - 1);
        self.recent = before[kept..].iter().cloned().chain([Arc::clone(&map)]).collect();
        (self.map, self.state_id) = (Some(map), state_id);
    }
}

/// A watch in progress; dropping it ends the watch.
#[derive(Debug)]
pub struct MapWatch {
    receiver: watch::Receiver<WatchState>,
    task: JoinHandle<()>,
}

impl MapWatch {
    /// Returns the present state.
    #[must_use]
    pub fn state(&self) -> WatchState {
        self.receiver.borrow().clone()
    }

    /// Waits until map or trouble changes, and returns the state.
    pub async fn changed(&mut self) -> WatchState {
        // The sender lives as long as the task, which lives as long as `self`; it ends early only with its runtime.
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.receiver.borrow_and_update().clone()
    }

    /// Waits for a map other than the one with epoch `known`.
    pub async fn newer(&mut self, known: Option<Epoch>) -> Arc<ClusterMap> {
        loop {
            if let Some(map) = self.state().map
                && known != Some(map.epoch)
            {
                return map;
            }
            self.changed().await;
        }
    }
}

impl Drop for MapWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Client {
    /// Watches the cluster map. Must be called on a tokio runtime.
    #[must_use]
    pub fn watch_map(&self) -> MapWatch {
        let (sender, receiver) = watch::channel(WatchState::default());
        let client = self.clone();
        let task = tokio::spawn(async move {
            let mut state_id = None;
            loop {
                let error = client.follow(&sender, &mut state_id).await;
                sender.send_modify(|state| state.trouble = Some(Arc::new(error)));
                // The connection decides when to retry; this bounds the rate of streams that end at once.
                tokio::time::sleep(client.limits().backoff_min).await;
            }
        });
        MapWatch { receiver, task }
    }

    /// Follows the map over one connection until that breaks.
    async fn follow(&self, sender: &watch::Sender<WatchState>, state_id: &mut Option<u64>) -> CallError {
        // Longer than the longest backoff between two attempts.
        let patience = self.limits().backoff_max + self.limits().connect_deadline;
        let (connection, welcome) = match self.connection(Instant::now() + patience).await {
            Ok(found) => found,
            Err(error) => return error,
        };
        let same_state = state_id.replace(welcome.state_id) == Some(welcome.state_id);
        let mut known = match &sender.borrow().map {
            Some(map) if same_state => Some(map.epoch),
            _ => None,
        };
        let call = WatchMap { known_epoch: known.map(|epoch| epoch.0) };
        let mut receive = match self.subscribe(&connection, &call).await {
            Ok(receive) => receive,
            Err(error) => return error,
        };
        sender.send_if_modified(|state| state.trouble.take().is_some());
        loop {
            match self.next_item::<MapReply>(&connection, &mut receive).await.map(|reply| reply.map) {
                Ok(map) if known.is_some_and(|known| map.epoch <= known) => {}
                Ok(map) => {
                    known = Some(map.epoch);
                    sender.send_modify(|state| state.accept(Arc::new(map), welcome.state_id));
                }
                Err(error) => return error,
            }
        }
    }
}
