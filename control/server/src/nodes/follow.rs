//! Who is followed by whom: orders to nodes, their answers, and what becomes of objects on its way to all who watch.
//!
//! Nodes are told to keep and report events as long as somebody watches. A watcher that is new makes every node send a
//! snapshot, at most once in [`SNAPSHOT_EVERY_NS`]; all watchers get it. Nothing here waits: who does not take its
//! items in time loses the stream, and begins anew.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_rpc::message::{
    AnswerCopies, AnswerOrder, CopyState, EventReport, Events, KeyFound, NodeEvents, NodeOrder, ObjectChange,
    ObjectEvent, ObjectMedium, Order,
};
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode, item_frame};
use tokio::sync::{mpsc, oneshot};

/// Events that each shard keeps until they are reported.
const KEPT: u32 = 65_536;
/// Orders that may wait for a node.
const ORDERS: usize = 64;
/// Reports that may wait for a watcher.
const REPORTS: usize = 256;
/// Watchers at a time.
const WATCHERS: usize = 64;
/// Questions to nodes under way.
const QUESTIONS: usize = 256;
/// At most one snapshot is wanted of all nodes in this time.
pub(crate) const SNAPSHOT_EVERY_NS: u64 = 1_000_000_000;

/// One node's line.
struct Line {
    incarnation: u64,
    orders: mpsc::Sender<ItemFrame>,
}

/// What was published so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PublishedEvents {
    pub(crate) reports: u64,
    pub(crate) events: u64,
    /// Events that shards dropped before they were reported.
    pub(crate) lost: u64,
    /// Watchers that did not keep up, or were gone.
    pub(crate) cut_off: u64,
}

/// Lines to nodes, and watchers.
#[derive(Default)]
pub(crate) struct Follow {
    lines: BTreeMap<u64, Line>,
    /// By number: who was asked, and who waits.
    questions: BTreeMap<u64, (u64, oneshot::Sender<Vec<KeyFound>>)>,
    /// The same, of copies: at most one a node, as what carries tasks out waits for it.
    copies: BTreeMap<u64, (u64, oneshot::Sender<Vec<CopyState>>)>,
    watchers: Vec<mpsc::Sender<ItemFrame>>,
    last_number: u64,
    /// Which snapshot is wanted of nodes; 0 before the first.
    snapshot: u64,
    snapshot_ns: u64,
    /// A snapshot that is to be asked for when its time has come.
    wants_snapshot: bool,
    /// Nodes and incarnations whose events were told, and their shards.
    told: BTreeSet<(u64, u64, u16)>,
    pub(crate) published: PublishedEvents,
}

impl Follow {
    /// A node's orders from now on.
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
            return Err(Refusal::new(RefusalCode::NotFound, format!("node {node} takes no orders")));
        };
        match line.orders.try_send(frame) {
            Ok(()) => {
                self.last_number = number;
                Ok(number)
            }
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(Refusal::new(RefusalCode::LimitReached, format!("{ORDERS} orders wait for node {node} already")))
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                self.lines.remove(&node);
                Err(Refusal::new(RefusalCode::NotFound, format!("node {node} is not connected")))
            }
        }
    }

    /// Asks a node where these objects are.
    pub(crate) fn find(&mut self, node: u64, digests: Vec<u128>) -> Result<oneshot::Receiver<Vec<KeyFound>>, Refusal> {
        // Those whose asker has given up.
        self.questions.retain(|_, (_, question)| !question.is_closed());
        if self.questions.len() >= QUESTIONS {
            return Err(Refusal::new(
                RefusalCode::LimitReached,
                format!("{QUESTIONS} questions are under way already"),
            ));
        }
        let number = self.send(node, &Order::Find { digests })?;
        let (answer, receiver) = oneshot::channel();
        self.questions.insert(number, (node, answer));
        Ok(receiver)
    }

    /// Has a node copy objects, and says how far that is.
    pub(crate) fn copy(&mut self, node: u64, digests: Vec<u128>) -> Result<oneshot::Receiver<Vec<CopyState>>, Refusal> {
        self.copies.retain(|_, (_, question)| !question.is_closed());
        let number = self.send(node, &Order::Copy { digests })?;
        let (answer, receiver) = oneshot::channel();
        self.copies.insert(number, (node, answer));
        Ok(receiver)
    }

    /// What a node answered to that; as with [`Self::answered`].
    pub(crate) fn copied(&mut self, answer: AnswerCopies) {
        if self.copies.get(&answer.number).is_some_and(|(node, _)| *node == answer.node)
            && let Some((_, question)) = self.copies.remove(&answer.number)
        {
            let _ = question.send(answer.states);
        }
    }

    /// What a node answered. An answer that nobody waits for any more does no harm, nor does one to what another node
    /// was asked.
    pub(crate) fn answered(&mut self, answer: AnswerOrder) {
        if self.questions.get(&answer.number).is_some_and(|(node, _)| *node == answer.node)
            && let Some((_, question)) = self.questions.remove(&answer.number)
        {
            // Whoever asked may have given up just now.
            let _ = question.send(answer.found);
        }
    }

    /// All events from now on, beginning with a snapshot.
    pub(crate) fn watch(&mut self, now_ns: u64) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.watchers.retain(|watcher| !watcher.is_closed());
        if self.watchers.len() >= WATCHERS {
            let reason = format!("{WATCHERS} watch the events already, which is the limit");
            return Err(Refusal::new(RefusalCode::LimitReached, reason));
        }
        let (items, receiver) = mpsc::channel(REPORTS);
        self.watchers.push(items);
        self.want_snapshot(now_ns);
        Ok(receiver)
    }

    /// Asks all nodes for a snapshot, now or when the next may be.
    pub(crate) fn want_snapshot(&mut self, now_ns: u64) {
        self.wants_snapshot = true;
        self.tick(now_ns);
    }

    /// Time has passed: asks for the snapshot that is wanted, and stops nodes that nobody listens to. When to be called
    /// again, if anything waits for that.
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
                // One that is not there gets the order when it comes back; one that is slow is ordered anew.
                self.wants_snapshot |= self
                    .send(node, &order)
                    .is_err_and(|refusal| refusal.known_code() == Some(RefusalCode::LimitReached));
            }
        }
        self.wants_snapshot.then_some(due_ns)
    }

    /// Whether anybody watches.
    pub(crate) fn is_watched(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// Whether a node of this incarnation may report.
    pub(crate) fn knows(&self, node: u64, incarnation: u64) -> bool {
        self.lines.get(&node).is_some_and(|line| line.incarnation == incarnation)
    }

    /// What a node reported, to all who watch.
    pub(crate) fn publish(&mut self, events: &NodeEvents) -> Result<(), Refusal> {
        self.published.reports += 1;
        self.published.events += events.events.len() as u64;
        self.published.lost += events.lost;
        self.told.insert((events.node, events.incarnation, events.shard));
        let frame = item_frame(&Events { events: events.clone() })
            .map_err(|error| Refusal::new(RefusalCode::TooLarge, error.to_string()))?;
        let before = self.watchers.len();
        // Who does not keep up loses the stream, and begins anew with a snapshot.
        self.watchers.retain(|watcher| watcher.try_send(frame.clone()).is_ok());
        self.published.cut_off += (before - self.watchers.len()) as u64;
        Ok(())
    }

    /// Keeps only incarnations that `keep` says; whoever watches learns that the others' objects are gone.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.lines.retain(|node, line| keep(*node, line.incarnation));
        let gone: Vec<_> =
            self.told.iter().filter(|(node, incarnation, _)| !keep(*node, *incarnation)).copied().collect();
        for (node, incarnation, shard) in gone {
            let cleared = |medium| ObjectEvent { change: ObjectChange::Cleared, medium, digest: 0, bytes: 0 };
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
