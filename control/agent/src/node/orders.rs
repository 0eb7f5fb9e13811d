//! Execution of the control plane's orders, and reports of object events while there are subscribers.
//!
//! A thread of its own, asleep while there are no orders and no events. Shards keep their events in bounded logs; when
//! a log has dropped events that were not reported yet, the report counts them and a snapshot of that shard follows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane_engine::{ObjectPlaces, ShardHandle};
use kvplane_proto::Digest;
use kvplane_proto::events::{ObjectChange, ObjectEvent, ReplicaProgress};
use kvplane_rpc::message::{
    AnswerCopies, AnswerOrder, EVENTS_PER_REPORT, EventName, EventReport, KeyFound, NodeEvents, NodeOrder,
    OBJECTS_PER_ORDER, Order, ReportEvents, WatchOrders,
};

use crate::error::Error;
use crate::link::ControlLink;

/// Limit of queued orders.
const ORDERS: usize = 64;
/// Longest sleep; bounds the time of a stop, and the delay of a lost signal.
const SLEEP: Duration = Duration::from_millis(250);
/// Backoff between attempts to open the order stream; doubles while streams end at once, as with an older control
/// plane.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MOST: Duration = Duration::from_secs(16);
/// Lifetime from which a stream counts as successful.
const LASTED: Duration = Duration::from_secs(2);
/// Delay after the first event, to batch it with those that follow.
const GATHER: Duration = Duration::from_millis(1);
/// Index positions that one step of a snapshot examines.
const STEP: usize = EVENTS_PER_REPORT;

/// State of the thread.
pub(super) struct OrderExecutor {
    pub(super) link: ControlLink,
    pub(super) node: u64,
    /// Present incarnation of the node, shared with the membership.
    pub(super) incarnation: Arc<Mutex<u64>>,
    pub(super) shards: Arc<Vec<ShardHandle>>,
    pub(super) stop: Arc<AtomicBool>,
}

/// Present subscription to the node's events.
#[derive(Default)]
struct EventSubscription {
    kept: u32,
    snapshot: u64,
    /// Number of the next event, for each shard; `None` where a snapshot is due.
    from: Vec<Option<u64>>,
}

impl OrderExecutor {
    pub(super) fn live(self) {
        let (signal, signalled) = sync_channel(1);
        let mut orders: Option<(u64, Receiver<NodeOrder>)> = None;
        let (mut tried_at, mut wait) = (Instant::now(), Duration::ZERO);
        let mut following = EventSubscription { from: vec![None; self.shards.len()], ..EventSubscription::default() };
        while !self.stop.load(Ordering::Relaxed) {
            let incarnation = *self.incarnation.lock().unwrap_or_else(PoisonError::into_inner);
            orders = orders.filter(|(of, _)| *of == incarnation);
            if orders.is_none() && tried_at.elapsed() >= wait {
                tried_at = Instant::now();
                orders = self.subscribe(incarnation, &signal).map(|receiver| (incarnation, receiver));
                // The control plane repeats its orders on the new stream.
                following.kept = 0;
            }
            if let Some((_, receiver)) = &orders {
                match receiver.try_recv() {
                    Ok(order) => {
                        self.carry_out(incarnation, order, &mut following);
                        continue;
                    }
                    Err(TryRecvError::Empty) => {}
                    // The stream ended.
                    Err(TryRecvError::Disconnected) => {
                        orders = None;
                        let lasted = tried_at.elapsed() >= LASTED;
                        wait = if lasted { RETRY } else { (wait * 2).clamp(RETRY, RETRY_MOST) };
                    }
                }
            }
            if orders.is_some() && following.kept > 0 {
                match self.report(incarnation, &mut following, &signal) {
                    Ok(true) => continue,
                    Ok(false) => {}
                    // A failed report may have been lost: each shard starts over with a snapshot when the stream is
                    // back.
                    Err(_) => {
                        following.from.fill(None);
                        std::thread::sleep(SLEEP);
                    }
                }
            }
            match signalled.recv_timeout(SLEEP) {
                Ok(()) => std::thread::sleep(GATHER),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }

    fn subscribe(&self, incarnation: u64, signal: &SyncSender<()>) -> Option<Receiver<NodeOrder>> {
        let (sender, receiver) = sync_channel(ORDERS);
        let signal = signal.clone();
        let taken = move |order| {
            // A full queue ends the stream, and all orders are repeated on the next one.
            let taken = sender.try_send(order).is_ok();
            let _ = signal.try_send(());
            taken
        };
        self.link.stream(WatchOrders { node: self.node, incarnation }, taken).ok()?;
        Some(receiver)
    }

    fn carry_out(&self, incarnation: u64, order: NodeOrder, following: &mut EventSubscription) {
        let NodeOrder { number, order } = order;
        match order {
            Order::Find { digests } => {
                let found = self.find(digests);
                // The requester times out by itself.
                let _ = self.link.call_unless(&self.stop, AnswerOrder { node: self.node, incarnation, number, found });
            }
            Order::Copy { digests } => {
                let states = self.copy(digests);
                let _ =
                    self.link.call_unless(&self.stop, AnswerCopies { node: self.node, incarnation, number, states });
            }
            Order::Follow { kept, snapshot } => {
                if kept > 0 && (snapshot != following.snapshot || following.kept == 0) {
                    following.from.fill(None);
                }
                if kept == 0 {
                    // A shard whose mailbox is full keeps recording events that are never read.
                    self.shards.iter().for_each(|shard| drop(shard.keep_events(0, None)));
                }
                (following.kept, following.snapshot) = (kept, snapshot);
            }
        }
    }

    fn find(&self, digests: Vec<u128>) -> Vec<KeyFound> {
        let digests: Vec<Digest> = digests.into_iter().take(OBJECTS_PER_ORDER).map(Digest).collect();
        let mut found = vec![KeyFound::default(); digests.len()];
        for shard in self.shards.iter() {
            let Ok(here) = shard.find(digests.clone()) else { continue };
            for (known, here) in found.iter_mut().zip(here).filter(|(_, here)| *here != ObjectPlaces::default()) {
                *known = KeyFound { address: shard.address().to_string(), memory: here.memory, ssd: here.ssd };
            }
        }
        found
    }

    /// Replicates objects of slots that this node's shards own.
    fn copy(&self, digests: Vec<u128>) -> Vec<ReplicaProgress> {
        let digests: Vec<Digest> = digests.into_iter().take(OBJECTS_PER_ORDER).map(Digest).collect();
        let mut states = vec![ReplicaProgress::Elsewhere; digests.len()];
        for shard in self.shards.iter() {
            let Ok(here) = shard.want_copies(digests.clone()) else { continue };
            for (state, here) in states.iter_mut().zip(here) {
                if here != ReplicaProgress::Elsewhere {
                    *state = here;
                }
            }
        }
        states
    }

    /// Reports new events of each shard, up to a limit. Returns true if there were any.
    fn report(
        &self,
        incarnation: u64,
        following: &mut EventSubscription,
        bell: &SyncSender<()>,
    ) -> Result<bool, Error> {
        let mut any = false;
        for (number, shard) in self.shards.iter().enumerate() {
            let Some(from) = following.from[number] else {
                shard.keep_events(following.kept as usize, Some(bell.clone()))?;
                following.from[number] = Some(self.snapshot(incarnation, number as u16, shard)?);
                any = true;
                continue;
            };
            let page = shard.read_events(from, EVENTS_PER_REPORT)?;
            if page.events.is_empty() && page.lost == 0 {
                continue;
            }
            any = true;
            let next = page.first + page.events.len() as u64;
            // After a gap, the rest of the log adds nothing to the snapshot that follows.
            following.from[number] = (page.lost == 0).then_some(next);
            let (part, first, lost, events) = (EventReport::Live, page.first, page.lost, page.events);
            self.tell(incarnation, shard, EventBatch { shard: number as u16, part, first, lost, events })?;
        }
        Ok(any)
    }

    /// Reports every object of a shard. Returns the number of the first event after the snapshot.
    fn snapshot(&self, incarnation: u64, number: u16, shard: &ShardHandle) -> Result<u64, Error> {
        let from = shard.next_event()?;
        let (mut cursor, mut part) = (Some(0), EventReport::SnapshotBegins);
        while let Some(at) = cursor {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(from);
            }
            let page = shard.snapshot_objects(at, STEP)?;
            cursor = page.cursor;
            let events: Vec<ObjectEvent> = page
                .objects
                .into_iter()
                .map(|(digest, medium, bytes)| ObjectEvent { change: ObjectChange::Stored, medium, digest, bytes })
                .collect();
            if part == EventReport::SnapshotBegins || !events.is_empty() {
                self.tell(incarnation, shard, EventBatch { shard: number, part, first: from, lost: 0, events })?;
                part = EventReport::SnapshotGoesOn;
            }
        }
        Ok(from)
    }

    fn tell(&self, incarnation: u64, handle: &ShardHandle, report: EventBatch) -> Result<(), Error> {
        let EventBatch { shard, part, first, lost, events } = report;
        // Names are looked up now, so that shards keep nothing for them while there is no subscriber.
        let stored = events.iter().map(|event| match event.change {
            ObjectChange::Stored => event.digest,
            _ => Digest(0),
        });
        let names = handle.names_of(stored.collect())?;
        let names = names.into_iter().map(|(at, tenant, key)| EventName { at: at as u32, tenant, key }).collect();
        let events = NodeEvents { node: self.node, incarnation, shard, part, first, lost, events, names };
        self.link.call_unless(&self.stop, ReportEvents { events }).map(|_| ())
    }
}

/// Batch of events of one shard, to be sent to the control plane.
struct EventBatch {
    shard: u16,
    part: EventReport,
    /// Number of the first event, or of the first one after a snapshot.
    first: u64,
    /// Number of events before these that were dropped.
    lost: u64,
    events: Vec<ObjectEvent>,
}
