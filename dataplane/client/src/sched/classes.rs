//! Whose turn it is: strict classes that do not starve, small beside large, tenants by weight, deadlines first.
//!
//! Four questions, from the outside in:
//!
//! 1. Which class? The highest that has something, but one that has waited [`PROMOTE_NS`] without being served is
//!    served once. So every class moves one slice in that time at least.
//! 2. Small or large? Both by virtual time, with small ones favoured: a small request does not wait for the end of a
//!    large one, and many small ones do not shut out the large.
//! 3. Which tenant? By weight: start-time fair queueing (Goyal, Vin and Cheng, 1996) over bytes.
//! 4. Which of its slices? Those with a due time by that time, the others in the order they came; and one of the
//!    others when they have waited as long as a class may.
//!
//! Entries live in a table with a free list and are taken out in constant time, so that nothing is left behind by a
//! withdrawn request. One entry costs `O(log tenants)`, one with a due time `O(log entries)`. Nothing is allocated
//! once the tables have grown to what is used.

use core::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BinaryHeap};

/// No position.
const NOWHERE: u32 = u32::MAX;
/// A class, or what has no due time, is served once when it has waited this long.
pub(crate) const PROMOTE_NS: u64 = 10_000_000;
/// Tenants that are told apart at one time, for each class and size; further ones share a place.
const FLOWS_MOST: usize = 4_096;
/// A tenant's byte of weight 1 in units of virtual time.
const UNIT: u64 = 1 << 12;
/// How much small slices are favoured over large ones of their class.
const SMALL_FAVOUR: u64 = 8;

/// Urgency of a request. A lower class waits while a higher has something, up to a bound.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub enum Priority {
    /// Someone waits for it.
    High,
    /// Neither.
    #[default]
    Medium,
    /// In the background.
    Low,
}

impl Priority {
    /// Every class, most urgent first.
    pub const ALL: [Self; 3] = [Self::High, Self::Medium, Self::Low];
}

/// What the order depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Its class.
    pub priority: Priority,
    /// For whom.
    pub tenant: u32,
    /// The tenant's share, relative to others'; at least 1.
    pub weight: u16,
    /// When it should be done; `u64::MAX` for no such time.
    pub due_ns: u64,
    /// Bytes that it moves.
    pub bytes: u64,
    /// Whether it counts as small.
    pub small: bool,
}

/// Which sizes are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kinds {
    /// Small ones.
    pub small: bool,
    /// Large ones.
    pub large: bool,
}

/// The entry whose turn it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Next {
    /// Where it is in the queue.
    pub place: u32,
    /// What was put in.
    pub item: u32,
    /// Its bytes.
    pub bytes: u64,
    /// Its class.
    pub priority: Priority,
    /// Whether it counts as small.
    pub small: bool,
}

struct Node {
    item: u32,
    flow: u32,
    before: u32,
    after: u32,
    bytes: u64,
    due_ns: u64,
    since_ns: u64,
    /// Differs for every entry: what the heap of due times knows it by.
    serial: u64,
}

struct Flow {
    class: u8,
    large: bool,
    tenant: u32,
    weight: u64,
    /// Entries without a due time, oldest first.
    first: u32,
    last: u32,
    due: BinaryHeap<Reverse<(u64, u64, u32)>>,
    due_live: u32,
    live: u32,
    start: u64,
    in_heap: bool,
    /// When an entry without a due time was last served.
    plain_served_ns: u64,
}

#[derive(Default)]
struct Kind {
    /// Flows with entries by their start tags; at most one entry for each flow, some of them empty by now.
    active: BinaryHeap<Reverse<(u64, u32)>>,
    /// Virtual time among its tenants.
    now: u64,
    /// Its own start tag beside the other kind of its class.
    start: u64,
    live: u32,
}

#[derive(Default)]
struct Class {
    /// Small, large.
    kinds: [Kind; 2],
    now: u64,
    waits_since_ns: u64,
}

/// Entries that wait for their turn.
pub struct ClassQueue {
    nodes: Vec<Node>,
    free: u32,
    flows: Vec<Flow>,
    index: BTreeMap<(u8, bool, u32), u32>,
    /// The flow that the latest entry went to.
    latest: Option<u32>,
    classes: [Class; 3],
    serial: u64,
    len: u32,
    bytes: u64,
}

impl Default for ClassQueue {
    fn default() -> Self {
        Self::new()
    }
}

impl ClassQueue {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self {
            nodes: Vec::new(),
            free: NOWHERE,
            flows: Vec::new(),
            index: BTreeMap::new(),
            latest: None,
            classes: core::array::from_fn(|_| Class::default()),
            serial: 0,
            len: 0,
            bytes: 0,
        }
    }

    /// Entries that wait.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether nothing waits.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the entries that wait.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a small, or a large, entry waits.
    #[must_use]
    pub fn has(&self, small: bool) -> bool {
        self.classes.iter().any(|class| class.kinds[usize::from(!small)].live > 0)
    }

    /// Puts an entry in; returns its place, to be taken out by.
    pub fn push(&mut self, item: u32, ticket: &Ticket, now_ns: u64) -> u32 {
        let flow = self.flow_for(ticket);
        self.serial += 1;
        let (serial, due_ns) = (self.serial, ticket.due_ns);
        let node =
            Node { item, flow, before: NOWHERE, after: NOWHERE, bytes: ticket.bytes, due_ns, since_ns: now_ns, serial };
        let place = self.place(node);
        let entry = &mut self.flows[flow as usize];
        entry.weight = u64::from(ticket.weight.max(1));
        if due_ns == u64::MAX {
            let before = core::mem::replace(&mut entry.last, place);
            self.nodes[place as usize].before = before;
            match before {
                NOWHERE => {
                    entry.first = place;
                    entry.plain_served_ns = now_ns;
                }
                before => self.nodes[before as usize].after = place,
            }
        } else {
            entry.due.push(Reverse((due_ns, serial, place)));
            entry.due_live += 1;
        }
        entry.live += 1;
        let class = &mut self.classes[usize::from(entry.class)];
        if class.kinds.iter().all(|kind| kind.live == 0) {
            class.waits_since_ns = now_ns;
        }
        let now = class.now;
        let kind = &mut class.kinds[usize::from(entry.large)];
        if kind.live == 0 {
            kind.start = kind.start.max(now);
        }
        kind.live += 1;
        if entry.live == 1 {
            entry.start = entry.start.max(kind.now);
        }
        if !entry.in_heap {
            entry.in_heap = true;
            kind.active.push(Reverse((entry.start, flow)));
        }
        self.len += 1;
        self.bytes += ticket.bytes;
        place
    }

    /// The entry whose turn it is among these kinds. It stays until it is taken.
    pub fn next(&mut self, kinds: Kinds, now_ns: u64) -> Option<Next> {
        if self.len == 0 {
            return None;
        }
        let allowed = [kinds.small, kinds.large];
        let has = |class: &Class| (0..2).any(|kind| allowed[kind] && class.kinds[kind].live > 0);
        let waited = |class: &Class| now_ns.saturating_sub(class.waits_since_ns) >= PROMOTE_NS;
        let starved = (1..3).rev().find(|&class| has(&self.classes[class]) && waited(&self.classes[class]));
        let class = starved.or_else(|| (0..3).find(|&class| has(&self.classes[class])))?;
        let entry = &self.classes[class];
        let open = |kind: usize| allowed[kind] && entry.kinds[kind].live > 0;
        let kind = match (open(0), open(1)) {
            (true, true) => usize::from(entry.kinds[1].start < entry.kinds[0].start),
            (small, _) => usize::from(!small),
        };
        let flow = self.tenant_of(class, kind);
        let place = self.head_of(flow, now_ns);
        let node = &self.nodes[place as usize];
        let (priority, small) = (Priority::ALL[class], kind == 0);
        Some(Next { place, item: node.item, bytes: node.bytes, priority, small })
    }

    /// Takes an entry whose turn it was: its tenant, size and class are charged.
    pub fn take(&mut self, place: u32, now_ns: u64) {
        let node = &self.nodes[place as usize];
        let (flow, bytes, plain) = (node.flow, node.bytes.max(1), node.due_ns == u64::MAX);
        self.remove(place);
        let entry = &mut self.flows[flow as usize];
        if plain {
            entry.plain_served_ns = now_ns;
        }
        let class = &mut self.classes[usize::from(entry.class)];
        class.waits_since_ns = now_ns;
        let kind = &mut class.kinds[usize::from(entry.large)];
        class.now = class.now.max(kind.start);
        kind.start += if entry.large { bytes * SMALL_FAVOUR } else { bytes };
        kind.now = kind.now.max(entry.start);
        entry.start += (bytes * UNIT / entry.weight).max(1);
        // Its turn came, so its tag is the least.
        let Some(mut top) = kind.active.peek_mut().filter(|top| top.0.1 == flow) else { return };
        if entry.live == 0 {
            PeekMut::pop(top);
            entry.in_heap = false;
        } else {
            top.0.0 = entry.start;
        }
    }

    /// Takes an entry out that nobody waits for any more.
    pub fn remove(&mut self, place: u32) {
        let node = &mut self.nodes[place as usize];
        let (flow, before, after, bytes, due_ns) = (node.flow, node.before, node.after, node.bytes, node.due_ns);
        node.serial = 0;
        node.after = core::mem::replace(&mut self.free, place);
        let entry = &mut self.flows[flow as usize];
        if due_ns == u64::MAX {
            match before {
                NOWHERE => entry.first = after,
                before => self.nodes[before as usize].after = after,
            }
            match after {
                NOWHERE => entry.last = before,
                after => self.nodes[after as usize].before = before,
            }
        } else {
            entry.due_live -= 1;
            if entry.due.len() > 64 + 2 * entry.due_live as usize {
                let nodes = &self.nodes;
                entry.due.retain(|tag| nodes[tag.0.2 as usize].serial == tag.0.1);
            }
        }
        entry.live -= 1;
        self.classes[usize::from(entry.class)].kinds[usize::from(entry.large)].live -= 1;
        self.len -= 1;
        self.bytes -= bytes;
    }

    /// Takes everything out, in no particular order.
    pub fn drain(&mut self) -> Vec<u32> {
        let live = self.nodes.iter().enumerate().filter(|(_, node)| node.serial != 0);
        let places: Vec<(u32, u32)> = live.map(|(place, node)| (place as u32, node.item)).collect();
        places.iter().for_each(|&(place, _)| self.remove(place));
        places.into_iter().map(|(_, item)| item).collect()
    }

    fn place(&mut self, node: Node) -> u32 {
        if self.free == NOWHERE {
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        let place = self.free;
        self.free = self.nodes[place as usize].after;
        self.nodes[place as usize] = node;
        place
    }

    fn flow_for(&mut self, ticket: &Ticket) -> u32 {
        let (class, large) = (ticket.priority as u8, !ticket.small);
        if let Some(latest) = self.latest {
            let flow = &self.flows[latest as usize];
            if (flow.class, flow.large, flow.tenant) == (class, large, ticket.tenant) {
                return latest;
            }
        }
        let mut key = (class, large, ticket.tenant);
        let found = self.index.get(&key).copied().or_else(|| {
            if self.flows.len() < FLOWS_MOST {
                return None;
            }
            // Too many to be told apart: an idle one makes room, or they share.
            let idle = self.flows.iter().position(|flow| flow.live == 0 && !flow.in_heap);
            let Some(idle) = idle else {
                key.2 = u32::MAX;
                return self.index.get(&key).copied();
            };
            let old = &self.flows[idle];
            self.index.remove(&(old.class, old.large, old.tenant));
            self.index.insert(key, idle as u32);
            self.flows[idle] = Flow::new(key);
            Some(idle as u32)
        });
        let flow = found.unwrap_or_else(|| {
            self.flows.push(Flow::new(key));
            let flow = self.flows.len() as u32 - 1;
            self.index.insert(key, flow);
            flow
        });
        self.latest = Some(flow);
        flow
    }

    /// The tenant with the least tag; tags of tenants that have nothing any more are dropped.
    fn tenant_of(&mut self, class: usize, kind: usize) -> u32 {
        let active = &mut self.classes[class].kinds[kind].active;
        loop {
            let flow = active.peek().expect("a kind with entries has a tenant").0.1;
            let entry = &mut self.flows[flow as usize];
            if entry.live > 0 {
                return flow;
            }
            entry.in_heap = false;
            active.pop();
        }
    }

    /// The entry of a tenant whose turn it is.
    fn head_of(&mut self, flow: u32, now_ns: u64) -> u32 {
        let entry = &mut self.flows[flow as usize];
        while let Some(&Reverse((_, serial, place))) = entry.due.peek() {
            if self.nodes[place as usize].serial == serial {
                break;
            }
            entry.due.pop();
        }
        let Some(&Reverse((_, _, due))) = entry.due.peek() else { return entry.first };
        if entry.first == NOWHERE {
            return due;
        }
        let since_ns = self.nodes[entry.first as usize].since_ns.max(entry.plain_served_ns);
        if now_ns.saturating_sub(since_ns) >= PROMOTE_NS { entry.first } else { due }
    }
}

impl Flow {
    const fn new(key: (u8, bool, u32)) -> Self {
        Self {
            class: key.0,
            large: key.1,
            tenant: key.2,
            weight: 1,
            first: NOWHERE,
            last: NOWHERE,
            due: BinaryHeap::new(),
            due_live: 0,
            live: 0,
            start: 0,
            in_heap: false,
            plain_served_ns: 0,
        }
    }
}
