//! Orders to nodes, their answers, and events of objects on their way to all subscribers.
//!
//! Nodes buffer and report events while there are subscribers. A new subscriber makes every node send a snapshot, at
//! most once in [`SNAPSHOT_EVERY_NS`]; all subscribers get it. Nothing here waits: a subscriber that does not read its
//! items in time loses the stream, and has to subscribe again.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::events::{ObjectChange, ObjectEvent, ObjectMedium};
use kvplane_rpc::message::{
    AnswerCopies, AnswerOrder, EventReport, Events, KeyFound, NodeEvents, NodeOrder, Order, ReplicaProgress,
};
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode, item_frame};
use tokio::sync::{mpsc, oneshot};

/// Most events that each shard buffers until they are reported.
const KEPT: u32 = 65_536;
/// Most orders queued for a node.
const ORDERS: usize = 64;
/// Most reports queued for a subscriber.
const REPORTS: usize = 256;
/// Most subscribers at a time.
const WATCHERS: usize = 64;
/// Most lookups in flight.
const QUESTIONS: usize = 256;
/// Least time between two snapshots of all nodes.
pub(crate) const SNAPSHOT_EVERY_NS: u64 = 1_000_000_000;

/// Stream of orders to one node.
struct Line {
    incarnation: u64,
    orders: mpsc::Sender<ItemFrame>,
}

/// Counts of published events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PublishedEvents {
    pub(crate) reports: u64,
    pub(crate) events: u64,
    /// Events that shards dropped before they were reported.
    pub(crate) lost: u64,
    /// Subscribers that did not keep up, or were gone.
    pub(crate) cut_off: u64,
}

/// Streams of orders to nodes, and subscribers.
#[derive(Default)]
pub(crate) struct Follow {
    lines: BTreeMap<u64, Line>,
    /// Lookups in flight, by number: the node, and the channel of the answer.
    questions: BTreeMap<u64, (u64, oneshot::Sender<Vec<KeyFound>>)>,
    /// Orders to replicate in flight, by number; at most one per node, as the driver of tasks waits for its answer.
    copies: BTreeMap<u64, (u64, oneshot::Sender<Vec<ReplicaProgress>>)>,
    watchers: Vec<mpsc::Sender<ItemFrame>>,
    last_number: u64,
    /// Number of the last snapshot requested from nodes; 0 before the first.
    snapshot: u64,
    snapshot_ns: u64,
    /// True while a snapshot has to be requested once it is due.
    wants_snapshot: bool,
    /// Shards whose events were published, with their nodes and incarnations.
    told: BTreeSet<(u64, u64, u16)>,
    pub(crate) published: PublishedEvents,
}

impl Follow {
    /// Opens a node's stream of orders.
    pub(crate) fn line(&mut self, node: u64, incarnation: u64) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let (orders, receiver) = mpsc::channel(ORDERS);
        self.lines.insert(node, Line { incarnation, orders });
        if !self.watchers.is_empty() {
            self.send(node, &self.standing_order())?;
        }
        Ok(receiver)
    }

    fn standing_order(&self) -> Order {
        let kept = if self.watchers.is_empty() { 0 } else { KEPT };
        Order::Follow { kept, snapshot: self.snapshot }
    }

    fn send(&mut self, node: u64, order: &Order) -> Result<u64, Refusal> {
        let number = self.last_number + 1;
        let frame = item_frame(&NodeOrder { number, order: order.clone() })
            .map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))?;
        let Some(line) = self.lines.get(&node) else {
            return Err(Refusal::new(RefusalCode::NotFound, format!("node {node} does not watch for orders")));
        };
        match line.orders.try_send(frame) {
            Ok(()) => {
                self.last_number = number;
                Ok(number)
            }
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(Refusal::new(RefusalCode::LimitReached, format!("{ORDERS} orders for node {node} are queued")))
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                self.lines.remove(&node);
                Err(Refusal::new(RefusalCode::NotFound, format!("node {node} is not connected")))
            }
        }
    }

    /// Requests the locations of these objects from a node.
    pub(crate) fn find(&mut self, node: u64, digests: Vec<u128>) -> Result<oneshot::Receiver<Vec<KeyFound>>, Refusal> {
        // Drops the lookups whose requester has given up.
        self.questions.retain(|_, (_, question)| !question.is_closed());
        if self.questions.len() >= QUESTIONS {
            return Err(Refusal::new(RefusalCode::LimitReached, format!("{QUESTIONS} lookups are in flight already")));
        }
        let number = self.send(node, &Order::Find { digests })?;
        let (answer, receiver) = oneshot::channel();
        self.questions.insert(number, (node, answer));
        Ok(receiver)
    }

    /// Orders a node to replicate objects; the receiver gets their states.
    pub(crate) fn copy(
        &mut self,
        node: u64,
        digests: Vec<u128>,
    ) -> Result<oneshot::Receiver<Vec<ReplicaProgress>>, Refusal> {
        self.copies.retain(|_, (_, question)| !question.is_closed());
        let number = self.send(node, &Order::Copy { digests })?;
        let (answer, receiver) = oneshot::channel();
        self.copies.insert(number, (node, answer));
        Ok(receiver)
    }

    /// Takes a node's answer to an order to replicate; as [`Self::answered`].
    pub(crate) fn copied(&mut self, answer: AnswerCopies) {
        if self.copies.get(&answer.number).is_some_and(|(node, _)| *node == answer.node)
            && let Some((_, question)) = self.copies.remove(&answer.number)
        {
            let _ = question.send(answer.states);
        }
    }

    /// Takes a node's answer to a lookup. An answer whose requester has given up is dropped, and so is one to another
    /// node's lookup.
    pub(crate) fn answered(&mut self, answer: AnswerOrder) {
        if self.questions.get(&answer.number).is_some_and(|(node, _)| *node == answer.node)
            && let Some((_, question)) = self.questions.remove(&answer.number)
        {
            // The requester may have given up just now.
            let _ = question.send(answer.found);
        }
    }

    /// Subscribes to all events, beginning with a snapshot.
    pub(crate) fn watch(&mut self, now_ns: u64) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.watchers.retain(|watcher| !watcher.is_closed());
        if self.watchers.len() >= WATCHERS {
            let reason = format!("{WATCHERS} subscribers watch events already, which is the limit");
            return Err(Refusal::new(RefusalCode::LimitReached, reason));
        }
        let (items, receiver) = mpsc::channel(REPORTS);
        self.watchers.push(items);
        self.want_snapshot(now_ns);
        Ok(receiver)
    }

    /// Requests a snapshot from all nodes, now or when the next one is due.
    pub(crate) fn want_snapshot(&mut self, now_ns: u64) {
        self.wants_snapshot = true;
        self.tick(now_ns);
    }

    /// Advances time: requests a wanted snapshot once it is due, and stops the reports of nodes when there are no
    /// subscribers any more. Returns the time of the next call, if one is needed.
    pub(crate) fn tick(&mut self, now_ns: u64) -> Option<u64> {
        let before = self.watchers.len();
        self.watchers.retain(|watcher| !watcher.is_closed());
        let due_ns = self.snapshot_ns.saturating_add(SNAPSHOT_EVERY_NS);
        let ended = self.watchers.is_empty() && before > 0;
        let begins = self.wants_snapshot && (self.snapshot == 0 || now_ns >= due_ns);
        if begins {
            self.snapshot += 1;
            self.snapshot_ns = now_ns;
            self.wants_snapshot = false;
        }
        if ended || begins {
            let order = self.standing_order();
            let nodes: Vec<u64> = self.lines.keys().copied().collect();
            for node in nodes {
                // A disconnected node gets the order when it reconnects; one whose queue is full gets it again later.
                self.wants_snapshot |= self
                    .send(node, &order)
                    .is_err_and(|refusal| refusal.known_code() == Some(RefusalCode::LimitReached));
            }
        }
        self.wants_snapshot.then_some(due_ns)
    }

    /// Returns true if there are subscribers.
    pub(crate) fn is_watched(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// Returns true if a node of this incarnation may report events.
    pub(crate) fn knows(&self, node: u64, incarnation: u64) -> bool {
        self.lines.get(&node).is_some_and(|line| line.incarnation == incarnation)
    }

    /// Publishes a node's report to all subscribers.
    pub(crate) fn publish(&mut self, events: &NodeEvents) -> Result<(), Refusal> {
        self.published.reports += 1;
        self.published.events += events.events.len() as u64;
        self.published.lost += events.lost;
        self.told.insert((events.node, events.incarnation, events.shard));
        let frame = item_frame(&Events { events: events.clone() })
            .map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))?;
        let before = self.watchers.len();
        // A subscriber that does not keep up loses the stream, and starts over with a snapshot.
        self.watchers.retain(|watcher| watcher.try_send(frame.clone()).is_ok());
        self.published.cut_off += (before - self.watchers.len()) as u64;
        Ok(())
    }

    /// Keeps only the incarnations that `keep` accepts; subscribers learn that the objects of the others are gone.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.lines.retain(|node, line| keep(*node, line.incarnation));
        let gone: Vec<_> =
            self.told.iter().filter(|(node, incarnation, _)| !keep(*node, *incarnation)).copied().collect();
        for (node, incarnation, shard) in gone {
            let cleared = |medium| ObjectEvent { change: ObjectChange::Cleared, medium, digest: Digest(0), bytes: 0 };
            let events = vec![cleared(ObjectMedium::Memory), cleared(ObjectMedium::Ssd)];
            let part = EventReport::Gone;
            // Two events are a small message.
            let _ = self.publish(&NodeEvents {
                node,
                incarnation,
                shard,
                part,
                first: 0,
                lost: 0,
                events,
                names: Vec::new(),
            });
            self.told.remove(&(node, incarnation, shard));
        }
    }
}

#[cfg(test)]
mod tests;
