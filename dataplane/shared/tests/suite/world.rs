//! Shards over one simulated store, which fails, delays writes beyond the death of their writers, flips bits, and whose
//! clock jumps, while slots change owners. Whatever happens: no wrong byte is read, and nothing that was removed or
//! replaced, with an acknowledgement, is ever found again.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Slot};
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Version};
use kvplane_shared::{
    GetRange, ListedObject, MapChange, NewObject, OpId, Operation, Outcome, SharedConfig, SharedEvent, SharedTier,
    SlotSource, SourceRule, StoreError,
};
use kvplane_tier::SlotSet;

const STATE: u64 = 77;
const CLUSTER: u128 = 5;
/// Slots that objects are in, and objects of each.
const SLOTS: u16 = 6;
const KEYS: u64 = 4;
const NODES: u64 = 3;
const MS: u64 = 1_000_000;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Objects of the store with the times at which they were written.
#[derive(Default)]
struct Store {
    objects: BTreeMap<String, (Vec<u8>, u64)>,
}

impl Store {
    fn carry_out(&mut self, operation: &Operation, now_ms: u64) -> Result<Outcome, StoreError> {
        match operation {
            Operation::Put { name, bytes } => {
                self.objects.insert(name.clone(), (bytes.to_vec(), now_ms));
                Ok(Outcome::Done)
            }
            Operation::Get { name, range } => {
                let (bytes, _) = self.objects.get(name).ok_or(StoreError::NotFound)?;
                let (part, checked) = match *range {
                    GetRange::Whole => (&bytes[..], 0),
                    GetRange::Suffix { bytes: count } => (&bytes[bytes.len() - bytes.len().min(count as usize)..], 0),
                    GetRange::Bounded { offset, bytes: count, checked } => {
                        let part = bytes.get(offset as usize..(offset + count) as usize);
                        let found = bytes.len() as u64;
                        (part.ok_or(StoreError::Short { expected: offset + count, found })?, checked)
                    }
                };
                Ok(Outcome::Bytes { bytes: part.to_vec(), checksum: payload_checksum(&part[..checked as usize]) })
            }
            Operation::List { prefix } => {
                let of = |name: &String| prefix.is_empty() || name.starts_with(&format!("{prefix}/"));
                let listed = self.objects.iter().filter(|(name, _)| of(name));
                let listed = listed.map(|(name, (bytes, written_ms))| ListedObject {
                    name: name.clone(),
                    bytes: bytes.len() as u64,
                    written_ms: *written_ms,
                });
                Ok(Outcome::Listed(listed.collect()))
            }
            Operation::Stat { name } => {
                self.objects.get(name).map(|(_, at_ms)| Outcome::Written { at_ms: *at_ms }).ok_or(StoreError::NotFound)
            }
            Operation::Delete { name } => {
                self.objects.remove(name);
                Ok(Outcome::Done)
            }
        }
    }
}

/// Layout: the owner of each slot.
#[derive(Clone)]
struct Map {
    epoch: u64,
    since: u64,
    from: u64,
    owners: Vec<Option<ShardKey>>,
    before: Vec<Option<ShardKey>>,
    /// Owners in their incarnations when the layout began.
    began: BTreeSet<ShardKey>,
    members: BTreeSet<(NodeId, Incarnation)>,
}

struct Node {
    tier: SharedTier,
    key: ShardKey,
    last: Option<Incarnation>,
    in_flight: Vec<(OpId, Operation, u64)>,
    /// Epoch of the map that it follows.
    heard: u64,
    /// Slots that it serves.
    owned: SlotSet,
    /// True if it is not a member any more, and does not know.
    is_zombie: bool,
}

/// What a removal or a replacement makes void once it is acknowledged.
type Change = (Digest, u64);

struct World {
    seed: u64,
    rng: Rng,
    now_ns: u64,
    store: Store,
    /// Difference between the store's clock and the true time, in milliseconds.
    clock_ms: u64,
    map: Map,
    nodes: BTreeMap<u64, Node>,
    zombies: Vec<Node>,
    /// Writes that failed for their writers, and reach the store later.
    late: Vec<(u64, Operation)>,
    incarnations: u64,
    versions: u64,
    tokens: u64,
    /// Versions of each object that may be read.
    allowed: BTreeMap<Digest, BTreeSet<u64>>,
    changes: BTreeMap<u64, Change>,
    reads: BTreeMap<u64, Digest>,
    failing_percent: u64,
    found: u64,
    taken_over: u64,
}

fn digest_of(slot: u16, key: u64) -> Digest {
    Digest((u128::from(slot) << 114) + u128::from(key) + 1)
}

fn payload_of(digest: Digest, version: u64) -> Vec<u8> {
    let bytes = 32 + (version % 7) as usize * 16;
    let mut payload = digest.0.to_le_bytes().to_vec();
    payload.extend_from_slice(&version.to_le_bytes());
    payload.resize(bytes, version as u8);
    payload
}

impl World {
    fn new(seed: u64) -> Self {
        let none: Vec<Option<ShardKey>> = vec![None; SLOTS.into()];
        let map = Map {
            epoch: 1,
            since: 1,
            from: 1,
            owners: none.clone(),
            before: none,
            began: BTreeSet::new(),
            members: BTreeSet::new(),
        };
        let mut world = Self {
            seed,
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now_ns: 1_000 * MS,
            store: Store::default(),
            clock_ms: 0,
            map,
            nodes: BTreeMap::new(),
            zombies: Vec::new(),
            late: Vec::new(),
            incarnations: 10,
            versions: 0,
            tokens: 0,
            allowed: BTreeMap::new(),
            changes: BTreeMap::new(),
            reads: BTreeMap::new(),
            failing_percent: 0,
            found: 0,
            taken_over: 0,
        };
        world.failing_percent = [0, 0, 5, 30][world.rng.below(4) as usize];
        (1..=NODES).for_each(|node| world.start(node, None));
        world.change_layout();
        world
    }

    fn start(&mut self, node: u64, last: Option<Incarnation>) {
        self.incarnations += 1;
        let key = ShardKey { node: NodeId(node), incarnation: Incarnation(self.incarnations), shard: ShardId(0) };
        let config = SharedConfig { pack_bytes: 2048, flush_ns: 50 * MS, lifetime_ms: 100_000, ..Default::default() };
        let tier = SharedTier::new(config, CLUSTER, key);
        let (in_flight, owned) = (Vec::new(), SlotSet::none());
        self.nodes.insert(node, Node { tier, key, last, in_flight, heard: 0, owned, is_zombie: false });
    }

    /// Publishes a map in which slots have other owners.
    fn change_layout(&mut self) {
        let keys: Vec<ShardKey> = self.nodes.values().map(|node| node.key).collect();
        self.map.before = self.map.owners.clone();
        for slot in 0..usize::from(SLOTS) {
            let lives = self.map.owners[slot].is_some_and(|owner| keys.contains(&owner));
            if !lives || self.rng.one_in(3) {
                self.map.owners[slot] = Some(keys[self.rng.below(keys.len() as u64) as usize]);
            }
        }
        self.map.epoch += 1;
        (self.map.from, self.map.since) = (self.map.since, self.map.epoch);
        self.map.began = keys.iter().copied().collect();
        self.map.members = keys.iter().map(|key| (key.node, key.incarnation)).collect();
    }

    /// Kills a node. It restarts at once and keeps its slots, or they pass to others.
    fn kill(&mut self) {
        let node = 1 + self.rng.below(NODES);
        let Some(mut dead) = self.nodes.remove(&node) else { return };
        let key = dead.key;
        // Writes that are on their way may arrive long after.
        let late = self.rng.one_in(2);
        dead.in_flight.retain(|(_, operation, _)| late && operation.is_write());
        dead.is_zombie = true;
        if self.rng.one_in(2) {
            // It only seems dead.
            self.zombies.push(dead);
        } else {
            let now_ms = self.store_ms();
            for (_, operation, at_ns) in dead.in_flight {
                if at_ns % 3 == 0 {
                    let _ = self.store.carry_out(&operation, now_ms);
                } else {
                    self.late.push((self.now_ns + self.rng.below(2000) * MS, operation));
                }
            }
        }
        if self.rng.one_in(2) {
            self.start(node, Some(key.incarnation));
            self.map.epoch += 1;
            let new = self.nodes[&node].key;
            for owner in self.map.owners.iter_mut().filter(|owner| **owner == Some(key)) {
                *owner = Some(new);
            }
            self.map.members = self.nodes.values().map(|node| (node.key.node, node.key.incarnation)).collect();
        } else {
            self.change_layout();
            self.start(node, Some(key.incarnation));
            if self.rng.one_in(2) {
                self.change_layout();
            }
        }
    }

    fn follow(&mut self, node: u64) {
        let map = self.map.clone();
        let Some(node) = self.nodes.get_mut(&node) else { return };
        if node.heard == map.epoch || !map.members.contains(&(node.key.node, node.key.incarnation)) {
            return;
        }
        let mut owned = SlotSet::none();
        (0..SLOTS).filter(|slot| map.owners[usize::from(*slot)] == Some(node.key)).for_each(|slot| {
            owned.insert(Slot(slot));
        });
        let missed = node.heard != 0 && map.epoch > node.heard + 1 && map.since > node.heard && map.from > node.heard;
        let mut sources: BTreeMap<ShardKey, SlotSource> = BTreeMap::new();
        for slot in owned.iter() {
            let (owner, rule) = if map.began.contains(&node.key) {
                let Some(before) = map.before[usize::from(slot.0)] else { continue };
                let alive = map.members.contains(&(before.node, before.incarnation));
                let (from, since) = (Epoch(map.from), Epoch(map.since));
                (before, if alive { SourceRule::Alive { since } } else { SourceRule::Gone { from, since } })
            } else {
                let Some(incarnation) = node.last else { continue };
                (ShardKey { incarnation, ..node.key }, SourceRule::Restarted { since: Epoch(map.since) })
            };
            let source = sources.entry(owner).or_insert_with(|| SlotSource { owner, slots: SlotSet::none(), rule });
            source.slots.insert(slot);
        }
        node.heard = map.epoch;
        node.owned = owned.clone();
        let change = MapChange {
            state: STATE,
            epoch: Epoch(map.epoch),
            since: Epoch(map.since),
            owned,
            missed,
            sources: sources.into_values().collect(),
            members: map.members,
        };
        node.tier.follow(change, self.now_ns);
    }

    /// Returns the node that serves a slot: its owner by the newest map, if it follows that.
    fn owner_of(&mut self, slot: u16) -> Option<&mut Node> {
        let key = self.map.owners[usize::from(slot)]?;
        let epoch = self.map.epoch;
        self.nodes.get_mut(&key.node.0).filter(|node| node.key == key && node.heard == epoch)
    }

    fn put_or_remove(&mut self, is_put: bool) {
        let slot = self.rng.below(SLOTS.into()) as u16;
        let digest = digest_of(slot, self.rng.below(KEYS));
        self.versions += 1;
        self.tokens += 1;
        let (version, token, now_ns) = (self.versions, self.tokens, self.now_ns);
        let Some(node) = self.owner_of(slot) else { return };
        node.tier.note_change(digest);
        let must_wait = node.tier.may_have(digest);
        if must_wait {
            node.tier.remove(digest, token);
        }
        if is_put {
            let payload = payload_of(digest, version);
            let object = NewObject {
                digest,
                version: Version(version),
                bytes: payload.len() as u32,
                checksum: payload_checksum(&payload),
                tail: b"name",
                tenant: 0,
                is_head: false,
                is_replicated: false,
            };
            if node.tier.wants(digest, Version(version), payload.len() as u64) {
                let _ = node.tier.push(&object, |into| into.copy_from_slice(&payload), now_ns);
            }
            self.allowed.entry(digest).or_default().insert(version);
        }
        if must_wait {
            self.changes.insert(token, (digest, version));
        } else {
            self.acknowledge((digest, version));
        }
    }

    fn acknowledge(&mut self, (digest, version): Change) {
        self.allowed.entry(digest).or_default().retain(|known| *known >= version);
    }

    fn read(&mut self) {
        let slot = self.rng.below(SLOTS.into()) as u16;
        let digest = digest_of(slot, self.rng.below(KEYS));
        self.tokens += 1;
        let (token, now_ns) = (self.tokens, self.now_ns);
        if let Some(node) = self.owner_of(slot)
            && node.tier.read(digest, token, now_ns).is_ok()
        {
            self.reads.insert(token, digest);
        }
    }

    /// Runs a node for one round.
    fn run(&mut self, node: &mut Node) {
        while node.tier.step(&|_, _| false) {}
        while let Some((id, operation)) = node.tier.poll(self.now_ns) {
            let delay = 1 + self.rng.below(30);
            node.in_flight.push((id, operation, self.now_ns + delay * MS));
        }
        for (id, operation, at_ns) in core::mem::take(&mut node.in_flight) {
            if at_ns > self.now_ns {
                node.in_flight.push((id, operation, at_ns));
                continue;
            }
            let fails = self.rng.below(100) < self.failing_percent;
            // A write that failed may have been carried out all the same, or be carried out later.
            let happens = !fails || operation.is_write() && self.rng.one_in(2);
            if !happens && operation.is_write() && self.rng.one_in(2) {
                self.late.push((self.now_ns + self.rng.below(2000) * MS, operation.clone()));
            }
            let now_ms = self.store_ms();
            let result = if happens { self.store.carry_out(&operation, now_ms) } else { Ok(Outcome::Done) };
            let result = if fails { Err(StoreError::Throttled { reason: "busy".to_owned() }) } else { result };
            node.tier.complete(self.now_ns, id, result);
        }
        while let Some(event) = node.tier.poll_event() {
            self.take_event(node, event);
        }
    }

    fn take_event(&mut self, node: &Node, event: SharedEvent) {
        match event {
            SharedEvent::Read { token, version, bytes, .. } => {
                let Some(digest) = self.reads.remove(&token) else { return };
                let payload = payload_of(digest, version.0);
                let is_whole =
                    bytes.len() == payload.len() + 4 && bytes.starts_with(&payload) && bytes.ends_with(b"name");
                assert!(is_whole, "seed {}: wrong bytes of {digest:?} {version:?}", self.seed);
                // A fenced owner may serve what it has: no client of the newest map asks it.
                if !node.is_zombie && node.heard == self.map.epoch {
                    let allowed = &self.allowed[&digest];
                    let seed = self.seed;
                    assert!(
                        allowed.contains(&version.0),
                        "seed {seed}: {digest:?} {version:?} is back, of {allowed:?}"
                    );
                    self.found += 1;
                }
            }
            SharedEvent::Removed { token, is_written } => {
                if let Some(change) = self.changes.remove(&token)
                    && is_written
                    && !node.is_zombie
                {
                    self.acknowledge(change);
                }
            }
            SharedEvent::TakenOver { objects, .. } => self.taken_over += objects,
            _ => {}
        }
    }

    fn round(&mut self) {
        self.now_ns += (1 + self.rng.below(20)) * MS;
        for (at_ns, operation) in core::mem::take(&mut self.late) {
            if at_ns <= self.now_ns {
                let now_ms = self.store_ms();
                let _ = self.store.carry_out(&operation, now_ms);
            } else {
                self.late.push((at_ns, operation));
            }
        }
        for number in 1..=NODES {
            if self.rng.one_in(3) {
                self.follow(number);
            }
            if let Some(mut node) = self.nodes.remove(&number) {
                self.run(&mut node);
                self.nodes.insert(number, node);
            }
        }
        for mut zombie in core::mem::take(&mut self.zombies) {
            self.run(&mut zombie);
            if !self.rng.one_in(40) {
                self.zombies.push(zombie);
            }
        }
        match self.rng.below(400) {
            0 => self.change_layout(),
            1 => {
                self.kill();
                if self.rng.one_in(2) {
                    self.failing_percent = 100;
                }
            }
            2 => self.flip(),
            3 => self.failing_percent = [0, 0, 5, 30, 100][self.rng.below(5) as usize],
            4 => {
                let number = 1 + self.rng.below(NODES);
                if let Some(node) = self.nodes.get_mut(&number) {
                    node.tier.forget_all();
                }
            }
            // Lifetimes are over early, or late.
            5 => self.clock_ms = [0, 0, 50_000, 3_600_000, 400_000_000][self.rng.below(5) as usize],
            6..120 => self.put_or_remove(true),
            120..160 => self.put_or_remove(false),
            _ => self.read(),
        }
    }

    /// Returns the store's time.
    fn store_ms(&self) -> u64 {
        self.now_ns / MS + self.clock_ms
    }

    /// Flips a bit of an object of the store.
    fn flip(&mut self) {
        let at = self.rng.below(self.store.objects.len().max(1) as u64) as usize;
        let (place, bit) = (self.rng.next() as usize, self.rng.below(8));
        if let Some((bytes, _)) = self.store.objects.values_mut().nth(at) {
            let place = place % bytes.len();
            bytes[place] ^= 1 << bit;
        }
    }
}

#[test]
fn no_object_that_was_removed_or_replaced_comes_back() {
    let one = std::env::var("KVPLANE_SEED").ok().and_then(|seed| seed.parse().ok());
    let count = std::env::var("KVPLANE_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(60);
    let seeds = one.map_or(0..count, |seed: u64| seed..seed + 1);
    let (mut found, mut taken_over) = (0, 0);
    for seed in seeds {
        let mut world = World::new(seed);
        for _ in 0..6_000 {
            world.round();
        }
        found += world.found;
        taken_over += world.taken_over;
    }
    assert!(one.is_some() || found > 1_000 && taken_over > 100, "{found} reads, {taken_over} taken over: too few");
}
