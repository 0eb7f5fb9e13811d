//! Slots that migrate among three shards, with events in any order: a get never returns anything but the last write,
//! and once all requests are answered, every object that was not evicted or removed is at its owner.

use std::collections::BTreeMap;

use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, RequestId, ShardId, Slot, Version};
use kvplane_proto::map::{Claim, ClusterMap, Former, Member, ShardAddress, ShardKey, SlotOwners};
use kvplane_proto::message::{
    Bitmap, DigestItem, GetItem, Hello, Kind, ListItem, Operation, PutItem, PutOptions, SizeReply, VersionItem,
    decode_items,
};
use kvplane_proto::{Digest, FrameFlags, Status};
use proptest::prelude::*;

use super::rig::{body_of, config};
use crate::Store;
use crate::service::{Extents, Fetch, FetchDone, Identity, Output, Path, PayloadTo, PeerKey, PoolBytes, Service, Want};

const KEYS: u64 = 6;
const BYTES: u64 = 64;

struct Nothing;

impl PoolBytes for Nothing {
    fn read(&self, _: u64, into: &mut [u8]) {
        into.fill(0);
    }

    fn bytes(&self) -> u64 {
        u64::MAX
    }
}

fn digest(key: u64) -> Digest {
    // Far apart, so that any layout distributes them.
    Digest(u128::from(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)) << 64 | 7)
}

struct Cluster {
    shards: Vec<Service>,
    map: ClusterMap,
    /// Owners by the newest map.
    owners: SlotOwners,
    /// Requests not answered yet: the requester, and the epoch of its map.
    asked: Vec<(usize, Epoch, Fetch)>,
    wrote: BTreeMap<u64, Option<u64>>,
    now_ns: u64,
    requests: u32,
}

fn member(node: u64, weight: u32) -> Member {
    let tcp = ([127, 0, 0, 1], 7000).into();
    Member {
        node: NodeId(node),
        incarnation: Incarnation(1),
        weight,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp, shm: None }],
    }
}

impl Cluster {
    fn new() -> Self {
        let shards = (1..=3u64).map(|node| {
            let store = Store::new(config(1 << 16), Version(node << 32)).expect("valid limits");
            let identity = Identity {
                cluster: "test".to_owned(),
                node: NodeId(node),
                incarnation: Incarnation(1),
                shard: ShardId(0),
                segment_name: String::new(),
            };
            let mut service = Service::new(identity, store);
            // A client, and a peer that fetches as the new owner.
            for index in 0..2 {
                let peer = PeerKey { index, generation: 1 };
                service.peer_joined(peer, Path::Stream, 0);
                let hello = Hello {
                    version_min: VERSION,
                    version_max: VERSION,
                    client: 9,
                    connection: index.into(),
                    node: NodeId(node),
                    incarnation: Incarnation(1),
                    shard: ShardId(0),
                    lane: 0,
                    fetches: index == 1,
                    cluster: "test".to_owned(),
                };
                let body = hello.encode();
                let header = Header::request(Kind::Request(Operation::Hello), RequestId::default());
                let _ = service.request(peer, &header.with_body(&body, 1), &body, 0);
                while service.poll_output().is_some() {}
            }
            service
        });
        let members = vec![member(1, 1), member(2, 1), member(3, 1)];
        let map = ClusterMap { epoch: Epoch(1), replicas: 1, members, former: None };
        let mut cluster = Self {
            shards: shards.collect(),
            owners: SlotOwners::of(&map),
            map,
            asked: Vec::new(),
            wrote: BTreeMap::new(),
            now_ns: 1,
            requests: 0,
        };
        (0..3).for_each(|shard| cluster.hear(shard));
        cluster
    }

    /// Passes the newest map to a shard.
    fn hear(&mut self, shard: usize) {
        self.shards[shard].follow(1, &self.owners);
        self.poll(shard);
    }

    /// Changes the weights of the members.
    fn change(&mut self, weights: [u32; 3]) {
        let claim = |member: &Member| Claim {
            node: member.node,
            incarnation: member.incarnation,
            weight: member.weight,
            shards: 1,
        };
        let owners = |members: &[Member]| -> Vec<Member> {
            members.iter().filter(|member| member.weight > 0).cloned().collect()
        };
        let before = owners(&self.map.members);
        let members: Vec<Member> = (1..=3).zip(weights).map(|(node, weight)| member(node, weight)).collect();
        if before.is_empty() || owners(&members) == before || owners(&members).is_empty() {
            return;
        }
        let from = self.owners.since;
        let epoch = Epoch(self.map.epoch.0 + 1);
        let began = owners(&members).iter().map(|member| (member.node, member.incarnation)).collect();
        let claims = before.iter().map(claim).collect();
        let former = Former { since: epoch, from, claims, began, restarts: None };
        self.map = ClusterMap { epoch, replicas: 1, members, former: Some(former) };
        self.owners = SlotOwners::of(&self.map);
    }

    fn poll(&mut self, shard: usize) {
        while let Some(fetch) = self.shards[shard].poll_fetch(self.now_ns) {
            self.asked.push((shard, self.shards[shard].inspect().served_epoch(), fetch));
        }
    }

    /// Sends a request to a shard, as a peer of this epoch; it is answered at once, or when a former owner has
    /// answered.
    fn ask(
        &mut self,
        shard: usize,
        peer: u32,
        epoch: Epoch,
        operation: Operation,
        body: &[u8],
    ) -> Vec<(Header, Vec<u8>)> {
        self.requests += 1;
        let request = RequestId { index: self.requests, generation: 1 };
        let header = Header::request(Kind::Request(operation), request).with_body(body, 1).with_argument(epoch.0);
        let service = &mut self.shards[shard];
        let to = service.request(PeerKey { index: peer, generation: 1 }, &header, body, self.now_ns);
        assert_eq!(to, PayloadTo::Discard);
        while service.drive_pool(&Nothing, 0) {}
        self.answers(shard)
    }

    fn answers(&mut self, shard: usize) -> Vec<(Header, Vec<u8>)> {
        let mut answers = Vec::new();
        while self.shards[shard].poll_tail().is_some() {}
        while let Some(output) = self.shards[shard].poll_output() {
            match output {
                Output::Frame { header, body, payload, .. } => {
                    answers.push((header, self.shards[shard].body(body).to_vec()));
                    if let Some((Extents::One(_), hold)) = payload {
                        self.shards[shard].sent(hold);
                    }
                }
                other => panic!("{other:?} was not due"),
            }
        }
        answers
    }

    /// Returns the shard that owns a key by the newest map.
    fn owner(&self, key: u64) -> Option<usize> {
        let owner = self.owners.owner(digest(key).slot())?;
        Some(owner.node.0 as usize - 1)
    }

    fn put(&mut self, key: u64, value: u64) {
        let Some(shard) = self.owner(key) else { return };
        let options = PutOptions { replace: true, ..PutOptions::default() };
        let body = body_of([PutItem::plain(digest(key), BYTES).with_options(&options)]);
        self.requests += 1;
        let request = RequestId { index: self.requests, generation: 1 };
        let header = Header::request(Kind::Request(Operation::Put), request).with_body(&body, 1);
        let header = header.with_payload(BYTES, Some(value)).with_argument(self.map.epoch.0);
        let peer = PeerKey { index: 0, generation: 1 };
        let _ = self.shards[shard].request(peer, &header, &body, self.now_ns);
        self.shards[shard].payload_done(peer, Some(value), self.now_ns);
        if self.answers(shard).iter().any(|(header, _)| header.status == Status::Ok) {
            self.wrote.insert(key, Some(value));
        }
        self.poll(shard);
    }

    fn remove(&mut self, key: u64) {
        let Some(shard) = self.owner(key) else { return };
        let body = body_of([DigestItem { digest: digest(key) }]);
        let answers = self.ask(shard, 0, self.map.epoch, Operation::Remove, &body);
        if answers.iter().any(|(header, _)| header.status == Status::Ok) {
            self.wrote.insert(key, None);
        }
        self.poll(shard);
    }

    /// Returns the result of a get, once all that it waits for is answered. `None` if the shard does not know yet that
    /// it owns the key.
    fn get(&mut self, key: u64) -> Option<Option<u64>> {
        let shard = self.owner(key)?;
        let request = RequestId { index: self.requests, generation: 9 };
        let body = body_of([GetItem { digest: digest(key), request, capacity_bytes: BYTES }]);
        let mut answers = self.ask(shard, 0, self.map.epoch, Operation::Get, &body);
        self.poll(shard);
        for _ in 0..100 {
            if let Some((header, _)) = answers.iter().find(|(header, _)| header.kind == Kind::Reply(Operation::Get)) {
                return match header.status {
                    Status::Ok => Some(header.checksum()),
                    Status::NotFound => Some(None),
                    Status::WrongOwner => None,
                    status => panic!("a get ended with {status:?}"),
                };
            }
            let waits = self.asked.iter().position(|(asker, ..)| *asker == shard);
            answers = self.tell(waits.expect("a get waits for an answer"), true);
        }
        panic!("a get was not answered");
    }

    /// Answers a request, by the present state of the former owner, or fails it. Returns the replies that the requester
    /// then sends.
    fn tell(&mut self, at: usize, good: bool) -> Vec<(Header, Vec<u8>)> {
        let (shard, epoch, Fetch { token, source: ShardKey { node, .. }, want }) = self.asked.swap_remove(at);
        let source = node.0 as usize - 1;
        let done = if good { self.answer_of(source, epoch, &want) } else { FetchDone::Failed(Status::Unreachable) };
        self.shards[shard].fetched(token, done, self.now_ns);
        let answers = self.answers(shard);
        self.poll(shard);
        answers
    }

    /// Reports to a former owner, by the map of `epoch`, that everything of these slots was imported by the map of
    /// `complete`. Returns the status, and the exports that have ended.
    fn report(&mut self, source: usize, epoch: Epoch, slots: &[Slot], complete: Epoch) -> (Status, Vec<bool>) {
        self.requests += 1;
        let request = RequestId { index: self.requests, generation: 1 };
        let item = |slot: &Slot| VersionItem { digest: slot.first_digest(), version: Version(complete.0) };
        let body = body_of(slots.iter().map(item));
        let header = Header::request(Kind::Request(Operation::Remove), request).with_body(&body, slots.len());
        let mut header = header.with_argument(epoch.0);
        header.flags = FrameFlags::NONE.with(FrameFlags::OF_VERSION, true);
        self.shards[source].request(PeerKey { index: 1, generation: 1 }, &header, &body, self.now_ns);
        let (header, body) = self.answers(source).pop().expect("an answer");
        let bits = Bitmap::decode(&body, slots.len() as u32).filter(|_| header.status == Status::Ok);
        (header.status, bits.map_or_else(Vec::new, |bits| (0..slots.len()).map(|at| bits.get(at)).collect()))
    }

    fn answer_of(&mut self, source: usize, epoch: Epoch, want: &Want) -> FetchDone {
        if let Want::EndExports(slots, complete) = want {
            return match self.report(source, epoch, slots, *complete).0 {
                Status::Ok => FetchDone::Dropped,
                status => FetchDone::Failed(status),
            };
        }
        let (operation, bodies) = match want {
            Want::Sizes(digests) => {
                (Operation::Size, digests.iter().map(|&digest| body_of([DigestItem { digest }])).collect())
            }
            Want::Drop(digests) => {
                (Operation::Remove, digests.iter().map(|&digest| body_of([DigestItem { digest }])).collect())
            }
            Want::Describe(digest) => {
                let flags = ListItem::NAMES | ListItem::ONE;
                (Operation::List, vec![body_of([ListItem { digest: *digest, walk: 0, from: 0, flags }])])
            }
            Want::List(digest, from) => {
                let item = ListItem { digest: *digest, walk: from.walk, from: from.from, flags: ListItem::NAMES };
                (Operation::List, vec![body_of([item])])
            }
            Want::Object(digest, extent) => {
                let request = RequestId { index: 5, generation: 5 };
                (Operation::Get, vec![body_of([GetItem { digest: *digest, request, capacity_bytes: extent.bytes }])])
            }
            Want::EndExports(..) => unreachable!("it was answered above"),
            Want::Copy { .. } | Want::DropCopies(_) | Want::Repair(..) | Want::DescribeCopy(_) => {
                panic!("slots have one owner here")
            }
        };
        let bodies: Vec<Vec<u8>> = bodies;
        let mut sizes = Vec::new();
        for body in bodies {
            let answers = self.ask(source, 1, epoch, operation, &body);
            let answer = answers.iter().find(|(header, _)| header.kind == Kind::Reply(operation));
            let Some((header, body)) = answer else { return FetchDone::Failed(Status::Unreachable) };
            match (header.status, want) {
                (Status::Ok, Want::Sizes(_)) => {
                    let reply = decode_items::<SizeReply>(body, 1).and_then(|mut items| items.next());
                    sizes.extend(reply.map(|reply| (reply.status, reply.bytes)));
                }
                (Status::Ok, Want::Drop(_)) => assert!(Bitmap::decode(body, 1).is_some()),
                (Status::Ok, Want::Object(..)) => {
                    return FetchDone::Object(header.payload_bytes, header.checksum().unwrap_or(0));
                }
                (Status::Ok, _) => return FetchDone::Page(body.clone()),
                (Status::Stale | Status::NotFound, Want::Sizes(_)) => sizes.push((Status::NotFound, 0)),
                (Status::Stale, Want::Drop(_)) => {}
                (status, _) => return FetchDone::Failed(status),
            }
        }
        if matches!(want, Want::Sizes(_)) { FetchDone::Sizes(sizes) } else { FetchDone::Dropped }
    }
}

#[test]
fn removal_for_an_earlier_epoch_is_fenced_after_another_migration() {
    let mut cluster = Cluster::new();
    let remove = |cluster: &mut Cluster, epoch| {
        let answers = cluster.ask(0, 1, epoch, Operation::Remove, &body_of([DigestItem { digest: digest(1) }]));
        answers.iter().map(|(header, _)| header.status).collect::<Vec<Status>>()
    };
    let change = |cluster: &mut Cluster, weights| {
        cluster.change(weights);
        (0..3).for_each(|shard| cluster.hear(shard));
        cluster.map.epoch
    };
    change(&mut cluster, [1, 0, 0]);
    cluster.put(1, 100);
    let once = change(&mut cluster, [0, 1, 0]);
    change(&mut cluster, [1, 0, 0]);
    cluster.put(1, 101);
    let again = change(&mut cluster, [0, 1, 0]);
    assert_eq!(remove(&mut cluster, once), [Status::WrongOwner]);
    assert_eq!(cluster.get(1), Some(Some(101)));
    assert_eq!(remove(&mut cluster, again), [Status::Ok]);
}

/// Answers all requests between shards; the time advances.
fn settle(cluster: &mut Cluster) {
    for _ in 0..20 {
        cluster.now_ns += 1_000_000_000;
        (0..3).for_each(|shard| cluster.poll(shard));
        while !cluster.asked.is_empty() {
            let _ = cluster.tell(0, true);
        }
    }
}

#[test]
fn an_export_ends_with_the_report_of_its_own_import() {
    let mut cluster = Cluster::new();
    let slot = digest(1).slot();
    let change = |cluster: &mut Cluster, weights| {
        cluster.change(weights);
        (0..3).for_each(|shard| cluster.hear(shard));
        cluster.map.epoch
    };
    let exports = |cluster: &Cluster| cluster.shards[0].inspect().move_counters().exporting_slots;
    change(&mut cluster, [1, 0, 0]);
    settle(&mut cluster);
    cluster.put(1, 100);
    let once = change(&mut cluster, [0, 1, 0]);
    assert!(cluster.shards[0].inspect().exports(slot));
    settle(&mut cluster);
    assert_eq!((exports(&cluster), cluster.shards[0].store().exists(digest(1))), (0, false));
    assert!(cluster.shards[0].inspect().move_counters().exports_completed > 0);
    assert_eq!(cluster.report(0, once, &[slot], once), (Status::Ok, vec![false]), "it came twice");
    let back = change(&mut cluster, [1, 0, 0]);
    settle(&mut cluster);
    cluster.put(1, 101);
    let again = change(&mut cluster, [0, 1, 0]);
    for late in [once, back] {
        let requested = cluster.map.epoch;
        assert_eq!(cluster.report(0, requested, &[slot], late), (Status::WrongOwner, vec![]));
    }
    assert!(cluster.shards[0].inspect().exports(slot) && cluster.shards[0].store().exists(digest(1)));
    assert_eq!(cluster.report(0, Epoch(again.0 + 1), &[slot], again).0, Status::WrongOwner, "its map is newer");
    settle(&mut cluster);
    assert_eq!((exports(&cluster), cluster.get(1)), (0, Some(Some(101))));
}

/// Its next report names the newest map, by which the export is still the same.
#[test]
fn a_report_is_repeated_until_it_is_answered() {
    let mut cluster = Cluster::new();
    cluster.change([1, 0, 0]);
    (0..3).for_each(|shard| cluster.hear(shard));
    settle(&mut cluster);
    cluster.put(1, 100);
    cluster.change([0, 1, 0]);
    (0..3).for_each(|shard| cluster.hear(shard));
    let is_report = |asked: &(usize, Epoch, Fetch)| matches!(asked.2.want, Want::EndExports(..));
    let mut reports = 0;
    while reports < 3 {
        cluster.now_ns += 1_000_000_000;
        (0..3).for_each(|shard| cluster.poll(shard));
        while !cluster.asked.is_empty() {
            let good = !is_report(&cluster.asked[0]);
            reports += u32::from(!good);
            let _ = cluster.tell(0, good);
        }
        assert!(cluster.shards[0].inspect().exports(digest(1).slot()));
    }
    assert_eq!(cluster.shards[1].inspect().unreported().count(), 1);
    // The next layout leaves the slot where it is.
    cluster.change([0, 1, 1]);
    (0..3).for_each(|shard| cluster.hear(shard));
    settle(&mut cluster);
    assert_eq!(cluster.shards[0].inspect().move_counters().exporting_slots, 0);
    assert_eq!((cluster.shards[1].inspect().unreported().count(), cluster.get(1)), (0, Some(Some(100))));
}

/// The former owner lists only objects that were put here meanwhile, so no answer follows that would end the import.
#[test]
fn an_import_that_ends_between_two_answers_is_reported_at_once() {
    let mut cluster = Cluster::new();
    cluster.change([1, 0, 0]);
    (0..3).for_each(|shard| cluster.hear(shard));
    settle(&mut cluster);
    cluster.put(1, 100);
    cluster.change([0, 1, 0]);
    (0..3).for_each(|shard| cluster.hear(shard));
    cluster.put(1, 101);
    while !cluster.asked.is_empty() {
        let _ = cluster.tell(0, true);
    }
    assert_eq!(cluster.shards[1].inspect().unreported().count(), 0);
    assert_eq!((cluster.shards[0].inspect().move_counters().exporting_slots, cluster.get(1)), (0, Some(Some(101))));
}

/// The slot of one object may have come back to its former owner meanwhile; the rest would be fetched again, or be a
/// miss.
#[test]
fn a_drop_request_drops_the_objects_that_are_still_exported() {
    let mut cluster = Cluster::new();
    cluster.change([1, 0, 0]);
    (0..3).for_each(|shard| cluster.hear(shard));
    (1..=16).for_each(|key| cluster.put(key, key));
    cluster.change([1, 1, 0]);
    (0..3).for_each(|shard| cluster.hear(shard));
    let [stays, left] =
        [0, 1].map(|owner| digest((1..=16).find(|key| cluster.owner(*key) == Some(owner)).expect("a key")));
    let (body, epoch) = (body_of([stays, left].map(|digest| DigestItem { digest })), cluster.map.epoch.0);
    let ask = |cluster: &mut Cluster, operation| {
        let request = RequestId { index: 1000, generation: 1 };
        let header = Header::request(Kind::Request(operation), request).with_body(&body, 2).with_argument(epoch);
        cluster.shards[0].request(PeerKey { index: 1, generation: 1 }, &header, &body, cluster.now_ns);
        cluster.answers(0).pop().filter(|(header, _)| header.status == Status::Ok).expect("an answer").1
    };
    let sizes = ask(&mut cluster, Operation::Size);
    let told = decode_items::<SizeReply>(&sizes, 2).expect("two");
    assert!(told.map(|reply| reply.status).eq([Status::NotFound, Status::Ok]));
    ask(&mut cluster, Operation::Remove);
    let there = |digest| cluster.shards[0].store().exists(digest);
    assert_eq!([stays, left].map(there), [true, false]);
}

/// Without names, all objects belong to the default tenant.
#[test]
fn a_client_of_one_tenant_gets_that_tenants_objects_from_a_former_owner_only() {
    for (tenant, is_own) in [(0, true), (9, false)] {
        let mut cluster = Cluster::new();
        cluster.change([1, 0, 0]);
        (0..3).for_each(|shard| cluster.hear(shard));
        (0..KEYS).for_each(|key| cluster.put(key, 100 + key));
        cluster.change([0, 1, 0]);
        (0..3).for_each(|shard| cluster.hear(shard));
        let peer = PeerKey { index: 0, generation: 1 };
        cluster.shards[1].control().bind(peer, tenant);
        assert_eq!(cluster.get(0), Some(is_own.then_some(100)));
        let epoch = cluster.map.epoch;
        for (key, operation) in [(1, Operation::Exists), (2, Operation::Size), (3, Operation::Remove)] {
            let mut answers = cluster.ask(1, 0, epoch, operation, &body_of([DigestItem { digest: digest(key) }]));
            cluster.poll(1);
            for _ in 0..100 {
                if !answers.is_empty() {
                    break;
                }
                let waits = cluster.asked.iter().position(|(asker, ..)| *asker == 1);
                answers = cluster.tell(waits.expect("it waits for an answer"), true);
            }
            let (header, body) = answers.into_iter().next().expect("an answer");
            assert_eq!(header.status, Status::Ok, "{operation:?}");
            let there = match operation {
                Operation::Size => {
                    let reply = decode_items::<SizeReply>(&body, 1).and_then(|mut items| items.next());
                    reply.is_some_and(|reply| reply.status == Status::Ok)
                }
                _ => Bitmap::decode_two(&body, 1).is_some_and(|(bits, _)| bits.get(0)),
            };
            assert_eq!(there, is_own, "{operation:?} of tenant {tenant}");
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64),
    Remove(u64),
    Get(u64),
    Evict(u64),
    Hear(usize),
    Change([u32; 3]),
    Tell(prop::sample::Index, bool),
    Sleep(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..KEYS).prop_map(Step::Put),
        2 => (0..KEYS).prop_map(Step::Remove),
        4 => (0..KEYS).prop_map(Step::Get),
        1 => (0..KEYS).prop_map(Step::Evict),
        6 => (0..3usize).prop_map(Step::Hear),
        2 => prop::array::uniform3(0..3u32).prop_map(Step::Change),
        8 => (any::<prop::sample::Index>(), prop::bool::weighted(0.9)).prop_map(|(at, good)| Step::Tell(at, good)),
        2 => (0..3_000u64).prop_map(Step::Sleep),
    ]
}

fn check_get(cluster: &mut Cluster, key: u64) {
    if let Some(Some(found)) = cluster.get(key) {
        assert_eq!(Some(found), cluster.wrote.get(&key).copied().flatten(), "key {key} is the last that was written");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_get_returns_the_last_write_wherever_its_slot_migrated(steps in prop::collection::vec(any_step(), 1..150)) {
        let mut cluster = Cluster::new();
        let mut value = 1;
        for step in steps {
            value += 1;
            cluster.now_ns += 1000;
            match step {
                Step::Put(key) => cluster.put(key, value),
                Step::Remove(key) => cluster.remove(key),
                Step::Get(key) => check_get(&mut cluster, key),
                Step::Evict(key) => {
                    if let Some(shard) = cluster.owner(key) {
                        cluster.shards[shard].objects.local.shard.store.drop_copy(digest(key));
                    }
                }
                Step::Hear(shard) => cluster.hear(shard),
                Step::Change(weights) => cluster.change(weights),
                Step::Tell(at, good) if !cluster.asked.is_empty() => {
                    let at = at.index(cluster.asked.len());
                    let _ = cluster.tell(at, good);
                }
                Step::Tell(..) => {}
                Step::Sleep(ms) => {
                    cluster.now_ns += ms * 1_000_000;
                    (0..3).for_each(|shard| cluster.poll(shard));
                }
            }
        }
        // Every shard receives the newest map, and every request is answered.
        (0..3).for_each(|shard| cluster.hear(shard));
        for _ in 0..400 {
            cluster.now_ns += 1_000_000_000;
            (0..3).for_each(|shard| cluster.poll(shard));
            while !cluster.asked.is_empty() {
                let _ = cluster.tell(0, true);
            }
        }
        for shard in &cluster.shards {
            let store = shard.store();
            store.check();
            let stats = store.stats();
            assert_eq!((stats.pins, stats.reservations), (0, 0), "nothing is held");
            let moves = shard.inspect().move_counters();
            assert_eq!(moves.importing_slots, 0, "all has come: {moves:?}");
            assert_eq!(shard.inspect().unreported().count(), 0);
        }
        for key in 0..KEYS {
            check_get(&mut cluster, key);
        }
    }

    /// Without faults, and with every map received by all shards, no object is lost.
    #[test]
    fn objects_survive_migrations_whose_maps_all_shards_receive(
        changes in prop::collection::vec(prop::array::uniform3(0..3u32), 1..12),
    ) {
        let mut cluster = Cluster::new();
        (0..KEYS).for_each(|key| cluster.put(key, 100 + key));
        for weights in changes {
            cluster.change(weights);
            (0..3).for_each(|shard| cluster.hear(shard));
            let first = cluster.map.epoch.0 % KEYS;
            assert_eq!(cluster.get(first), Some(Some(100 + first)), "an import is requested at once");
            settle(&mut cluster);
            for key in 0..KEYS {
                assert_eq!(cluster.get(key), Some(Some(100 + key)), "key {key}");
            }
            let objects = |shard: &Service| shard.store().stats().objects;
            let held: u64 = cluster.shards.iter().map(objects).sum();
            assert_eq!(held, KEYS, "former owners have dropped what has moved");
            let exports = |shard: &Service| shard.inspect().move_counters().exporting_slots;
            assert_eq!(cluster.shards.iter().map(exports).sum::<u64>(), 0, "all exports have ended");
        }
    }
}
