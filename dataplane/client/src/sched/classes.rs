//! Class queue: strict priority classes without starvation, small besides large slices, tenants by weight, earliest due
//! time first.
//!
//! Four decisions, from the outside in:
//!
//! 1. Class: the highest that is not empty, but a class that has waited [`PROMOTE_NS`] without being served is served
//!    once. So every class gets at least one slice in that time.
//! 2. Small or large: both by virtual time, with small ones favoured: a small request does not wait for the end of a
//!    large one, and many small ones do not starve the large ones.
//! 3. Tenant: by weight, with start-time fair queueing (Goyal, Vin and Cheng, 1996) over bytes.
//! 4. Slice of the tenant: those with a due time earliest first, the others in FIFO order; and one of the others when
//!    they have waited as long as a class may.
//!
//! Entries live in a table with a free list and are removed in constant time, so that a cancelled request leaves
//! nothing behind. An entry costs `O(log tenants)`, one with a due time `O(log entries)`. Nothing is allocated once the
//! tables have grown to their working size.

use core::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BinaryHeap};

/// No position in the table.
const NOWHERE: u32 = u32::MAX;
/// Waiting time after which a class, or an entry without a due time, is served once.
pub(crate) const PROMOTE_NS: u64 = 10_000_000;
/// Tenants that are distinguished at one time, for each class and size; further ones share a flow.
const FLOWS_MOST: usize = 4_096;
/// Virtual time of one byte of a tenant of weight 1.
const UNIT: u64 = 1 << 12;
/// Weight of small slices relative to large ones of their class.
const SMALL_FAVOUR: u64 = 8;

/// Priority class of a request. A lower class waits while a higher one has entries, up to a bound.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub enum Priority {
    /// Latency-sensitive: a user waits for it.
    High,
    /// Normal.
    #[default]
    Medium,
    /// Background.
    Low,
}

impl Priority {
    /// Every class, most urgent first.
    pub const ALL: [Self; 3] = [Self::High, Self::Medium, Self::Low];
}

/// Scheduling attributes of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Priority class.
    pub priority: Priority,
    /// Tenant of the entry.
    pub tenant: u32,
    /// Share of the tenant, relative to those of others; at least 1.
    pub weight: u16,
    /// Time at which the entry should be complete; `u64::MAX` for none.
    pub due_ns: u64,
    /// Bytes that the entry moves.
    pub bytes: u64,
    /// True if the entry counts as small.
    pub small: bool,
}

/// Sizes that a caller has room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Kinds {
    pub small: bool,
    pub large: bool,
}

/// Entry to be served next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Next {
    /// Position in the queue.
    pub place: u32,
    /// Item that was pushed.
    pub item: u32,
    pub bytes: u64,
    pub priority: Priority,
    /// True if the entry counts as small.
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
    /// Unique number of the entry, by which the heap of due times detects stale positions.
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
    /// Time at which an entry without a due time was last served.
    plain_served_ns: u64,
}

#[derive(Default)]
struct Kind {
    /// Flows with entries by their start tags; at most one entry for each flow, and some flows may be empty by now.
    active: BinaryHeap<Reverse<(u64, u32)>>,
    /// Virtual time among its tenants.
    now: u64,
    /// Start tag of this size relative to the other size of its class.
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

/// Queue of entries by class, size, tenant and due time.
pub struct ClassQueue {
    nodes: Vec<Node>,
    free: u32,
    flows: Vec<Flow>,
    index: BTreeMap<(u8, bool, u32), u32>,
    /// Flow of the latest entry.
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
    /// Creates an empty queue.
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

    /// Returns the number of entries.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns true if the queue is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the total bytes of the entries.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if the queue has a small, or a large, entry.
    #[must_use]
    pub fn has(&self, small: bool) -> bool {
        self.classes.iter().any(|class| class.kinds[usize::from(!small)].live > 0)
    }

    /// Enqueues an entry; returns its position, by which it is taken or removed.
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

    /// Returns the entry to be served next among these sizes. It stays in the queue until it is taken.
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

    /// Dequeues an entry that is served: its tenant, size and class are charged.
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
        // Its turn came, so its tag is the least of all.
        let Some(mut top) = kind.active.peek_mut().filter(|top| top.0.1 == flow) else { return };
        if entry.live == 0 {
            PeekMut::pop(top);
            entry.in_heap = false;
        } else {
            top.0.0 = entry.start;
        }
    }

    /// Removes an entry that is no longer wanted, without a charge.
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

    /// Removes and returns all items, in no particular order.
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
            // Too many tenants to distinguish: an idle flow is reused, or tenants share a flow.
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

    /// Returns the tenant with the least tag; drops the tags of tenants without entries.
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

    /// Returns the entry of a tenant to be served next.
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
