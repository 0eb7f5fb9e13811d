//! Carries out the control plane's orders, and tells it what becomes of objects while anybody watches.
//!
//! A thread of its own, asleep while nothing is ordered and nothing happens. Shards keep their events in bounded logs;
//! when one has dropped what was not reported yet, the report says so and a snapshot of that shard follows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane_engine::{Change, Medium, ObjectPlaces, ReplicaProgress, ShardHandle};
use kvplane_proto::Digest;
use kvplane_rpc::message::{
    AnswerCopies, AnswerOrder, CopyState, EVENTS_PER_REPORT, EventName, EventReport, KeyFound, NodeEvents, NodeOrder,
    OBJECTS_PER_ORDER, ObjectChange, ObjectEvent, ObjectMedium, Order, ReportEvents, WatchOrders,
};

use crate::error::Error;
use crate::link::ControlLink;

/// Orders that may wait.
const ORDERS: usize = 64;
/// The longest sleep: bounds how long a stop takes, and what a lost signal could cost.
const SLEEP: Duration = Duration::from_millis(250);
/// Between two attempts to get orders: doubles while they come to nothing, as with an older control plane.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MOST: Duration = Duration::from_secs(16);
/// A stream that lasted so long came to something.
const LASTED: Duration = Duration::from_secs(2);
/// How long the first event after a silence waits for company.
const GATHER: Duration = Duration::from_millis(1);
/// Places of a shard's index that are looked at in one step of a snapshot.
const STEP: usize = EVENTS_PER_REPORT;

/// What the thread works with.
pub(super) struct Follower {
    pub(super) link: ControlLink,
    pub(super) node: u64,
    /// The node's present incarnation, as the membership has it.
    pub(super) incarnation: Arc<Mutex<u64>>,
    pub(super) shards: Arc<Vec<ShardHandle>>,
    pub(super) stop: Arc<AtomicBool>,
}

/// What is followed at the moment.
#[derive(Default)]
struct EventSubscription {
    kept: u32,
    snapshot: u64,
    /// Of each shard: the number to go on from; nothing where a snapshot is due.
    from: Vec<Option<u64>>,
}

impl Follower {
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
                // The control plane says anew what it wants.
                following.kept = 0;
            }
            if let Some((_, receiver)) = &orders {
                match receiver.try_recv() {
                    Ok(order) => {
                        self.carry_out(incarnation, order, &mut following);
                        continue;
                    }
                    Err(TryRecvError::Empty) => {}
                    // The line was cut.
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
                    // A report that did not arrive may be missing: each shard begins anew when there is a line.
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
            // A full queue ends the stream, and everything is told anew.
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
                // Whoever asked gives up in time by itself.
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
                    // One whose mailbox is full goes on to keep some, which nobody reads.
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

    /// Has objects copied whose slots shards of ours own first.
    fn copy(&self, digests: Vec<u128>) -> Vec<CopyState> {
        let digests: Vec<Digest> = digests.into_iter().take(OBJECTS_PER_ORDER).map(Digest).collect();
        let mut states = vec![CopyState::Elsewhere; digests.len()];
        for shard in self.shards.iter() {
            let Ok(here) = shard.want_copies(digests.clone()) else { continue };
            for (state, here) in states.iter_mut().zip(here) {
                match here {
                    ReplicaProgress::Elsewhere => {}
                    ReplicaProgress::Missing => *state = CopyState::Missing,
                    ReplicaProgress::Alone => *state = CopyState::Alone,
                    ReplicaProgress::Coming => *state = CopyState::Coming,
                    ReplicaProgress::There(bytes) => *state = CopyState::There { bytes },
                }
            }
        }
        states
    }

    /// Reports some of what is new of each shard; whether there was anything.
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
            // After a gap, what is left of the log says nothing that a snapshot does not.
            following.from[number] = (page.lost == 0).then_some(next);
            let events: Vec<ObjectEvent> = page
                .events
                .iter()
                .map(|event| ObjectEvent {
                    change: match event.change {
                        Change::Stored => ObjectChange::Stored,
                        Change::Removed => ObjectChange::Removed,
                        Change::Cleared => ObjectChange::Cleared,
                    },
                    medium: medium(event.medium),
                    digest: event.digest.0,
                    bytes: event.bytes,
                })
                .collect();
            let (part, first, lost) = (EventReport::Live, page.first, page.lost);
            self.tell(incarnation, shard, EventBatch { shard: number as u16, part, first, lost, events })?;
        }
        Ok(any)
    }

    /// Reports every object of a shard; gives the number from which on events follow.
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
                .map(|(digest, place, bytes)| ObjectEvent {
                    change: ObjectChange::Stored,
                    medium: medium(place),
                    digest: digest.0,
                    bytes,
                })
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
        // Names are looked up now: nothing is kept for them while nobody follows.
        let stored = events.iter().map(|event| match event.change {
            ObjectChange::Stored => Digest(event.digest),
            _ => Digest(0),
        });
        let names = handle.names_of(stored.collect())?;
        let names = names.into_iter().map(|(at, tenant, key)| EventName { at: at as u32, tenant, key }).collect();
        let events = NodeEvents { node: self.node, incarnation, shard, part, first, lost, events, names };
        self.link.call_unless(&self.stop, ReportEvents { events }).map(|_| ())
    }
}

/// Events of one shard, on their way to the control plane.
struct EventBatch {
    shard: u16,
    part: EventReport,
    /// The number of the first, or of the first that follows a snapshot.
    first: u64,
    /// Events before them that were dropped.
    lost: u64,
    events: Vec<ObjectEvent>,
}

const fn medium(medium: Medium) -> ObjectMedium {
    match medium {
        Medium::Memory => ObjectMedium::Memory,
        Medium::Ssd => ObjectMedium::Ssd,
    }
}
