//! Tests of the shared tier of a service: what is uploaded is read back as it was put, removals wait for the log, and a
//! former owner's objects do not stand behind newer ones.

use std::collections::BTreeMap;

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Version};
use kvplane_proto::map::{ClusterMap, Former, SlotOwners};
use kvplane_proto::message::{GetItem, Kind, ObjectName, Operation, PutItem, PutOptions};
use kvplane_proto::{Digest, Status};
use kvplane_shared::{GetRange, ListedObject, Outcome, SharedConfig, SharedStats, StoreError, UploadPolicy};

use super::rig::{Answer, Pool, Rig, ServiceOutput, body_of, config, identity, member, pool_place};
use crate::service::{Identity, Path, PeerKey, PoolBytes, PoolMemory, Service};
use crate::{Replica, Reserve, Store};

const STATE: u64 = 7;
const BYTES: u64 = 64 << 10;

/// Store that carries operations out at once, or refuses all writes.
#[derive(Default)]
struct Files {
    files: BTreeMap<String, Vec<u8>>,
    refuses_writes: bool,
}

impl Files {
    fn carry_out(&mut self, operation: kvplane_shared::Operation) -> Result<Outcome, StoreError> {
        use kvplane_shared::Operation;
        if self.refuses_writes && operation.is_write() {
            return Err(StoreError::ReadOnly { reason: "for the test".to_owned() });
        }
        match operation {
            Operation::Put { name, bytes } => {
                self.files.insert(name, bytes.to_vec());
                Ok(Outcome::Done)
            }
            Operation::Get { name, range } => {
                let bytes = self.files.get(&name).ok_or(StoreError::NotFound)?;
                let (part, checked) = match range {
                    GetRange::Whole => (&bytes[..], 0),
                    GetRange::Suffix { bytes: count } => (&bytes[bytes.len().saturating_sub(count as usize)..], 0),
                    GetRange::Bounded { offset, bytes: count, checked } => {
                        (&bytes[offset as usize..][..count as usize], checked)
                    }
                };
                Ok(Outcome::Bytes { bytes: part.to_vec(), checksum: payload_checksum(&part[..checked as usize]) })
            }
            Operation::List { prefix } => {
                let of = self.files.iter().filter(|(name, _)| name.starts_with(&prefix));
                let listed = |(name, bytes): (&String, &Vec<u8>)| ListedObject {
                    name: name.clone(),
                    bytes: bytes.len() as u64,
                    written_ms: 1,
                };
                Ok(Outcome::Listed(of.map(listed).collect()))
            }
            Operation::Stat { .. } => Ok(Outcome::Written { at_ms: 1 }),
            Operation::Delete { name } => {
                self.files.remove(&name);
                Ok(Outcome::Done)
            }
        }
    }
}

/// Service of node 1 of three, with up to three replicas, whose shared tier has these files.
struct Bed {
    rig: Rig,
    peer: PeerKey,
    pool: Pool,
    files: Files,
}

/// Returns the map with this incarnation of node 1; the layout began with the first one.
fn map(incarnation: u64) -> SlotOwners {
    let began = (1..=3).map(|node| (NodeId(node), Incarnation(1))).collect();
    let former = Former { since: Epoch(5), from: Epoch(4), claims: Vec::new(), began, restarts: None };
    let members = vec![member(1, incarnation), member(2, 1), member(3, 1)];
    SlotOwners::of(&ClusterMap { epoch: Epoch(4 + incarnation), replicas: 3, members, former: Some(former) })
}

/// Returns the name of an object that node 1 owns.
fn owned(number: usize) -> Vec<u8> {
    let owners = map(1);
    let is_owned = |key: &Vec<u8>| {
        let digest = Digest::of(b"", key);
        owners.owner(digest.slot()).is_some_and(|owner| owner.node == NodeId(1))
    };
    (0..).map(|at: u32| at.to_string().into_bytes()).filter(is_owned).nth(number).expect("a third of all keys")
}

impl Bed {
    /// Starts an incarnation, which follows no map yet.
    fn start(incarnation: u64, files: Files) -> Self {
        let mut rig = Rig::with(config(BYTES));
        let own = Identity { node: NodeId(1), shard: ShardId(0), incarnation: Incarnation(incarnation), ..identity() };
        let store = Store::new(config(BYTES), Version(incarnation * 1000)).expect("the test's limits are valid");
        rig.service = Service::new(own, store);
        let shared = SharedConfig {
            upload: UploadPolicy::All,
            pack_bytes: 64 << 10,
            flush_ns: 1,
            lifetime_ms: 0,
            ..SharedConfig::default()
        };
        let last = (incarnation > 1).then_some(Incarnation(incarnation - 1));
        rig.service.control().shared().attach(shared, 1, last);
        let peer = PeerKey { index: 0, generation: 1 };
        Self { rig, peer, pool: Pool(vec![0; BYTES as usize]), files }
    }

    /// Follows the map of the present incarnation.
    /// Starts the first incarnation, and puts so many objects, which are uploaded. Returns their keys.
    fn with_objects(count: usize) -> (Self, Vec<Vec<u8>>) {
        let mut bed = Self::start(1, Files::default());
        bed.follow(1);
        let keys: Vec<_> = (0..count).map(owned).collect();
        for key in &keys {
            bed.put(key, &[1; 100], &PutOptions::default());
            assert_eq!(bed.rig.answer().status(), Status::Ok);
        }
        bed.run();
        (bed, keys)
    }

    fn follow(&mut self, incarnation: u64) {
        self.rig.service.follow(STATE, &map(incarnation));
        self.run();
        self.peer = self.rig.connect(Path::Stream);
        let hello = kvplane_proto::message::Hello {
            node: NodeId(1),
            shard: ShardId(0),
            incarnation: Incarnation(incarnation),
            ..super::rig::hello()
        };
        self.rig.ask(self.peer, Operation::Hello, &hello.encode(), 1);
        assert_eq!(self.rig.answer().status(), Status::Ok);
    }

    /// Lets the tier work until it has nothing to do.
    fn run(&mut self) {
        for _ in 0..1000 {
            self.rig.now_ns += 1_000_000;
            let now_ns = self.rig.now_ns;
            let mut begun = Vec::new();
            let mut shared = self.rig.service.control().shared();
            let progress = shared.drive(now_ns, &mut self.pool, &mut |id, operation| begun.push((id, operation)));
            if !progress && begun.is_empty() {
                return;
            }
            for (id, operation) in begun {
                let result = self.files.carry_out(operation);
                self.rig.service.control().shared().complete(now_ns, id, result);
            }
        }
        panic!("the tier does not come to rest");
    }

    fn stats(&mut self) -> SharedStats {
        self.rig.service.control().shared().stats().expect("a shared tier")
    }

    /// Sends a put with its payload; the reply may wait.
    fn put(&mut self, key: &[u8], payload: &[u8], options: &PutOptions) {
        let (name, bytes) = (ObjectName { tenant: b"", key }, payload.len() as u64);
        let mut body = body_of([PutItem::named(&name, bytes, options)]);
        body.extend_from_slice(key);
        let checksum = Some(payload_checksum(payload));
        let header = Header::request(Kind::Request(Operation::Put), self.rig.next_request())
            .with_body(&body, 1)
            .with_payload(bytes, checksum);
        let to = self.rig.service.request(self.peer, &header, &body, self.rig.now_ns);
        self.pool.write(pool_place(to).offset, payload);
        for said in self.rig.drain() {
            let ServiceOutput::Tail(offset, tail) = said else { panic!("not {said:?}") };
            self.pool.write(offset, &tail);
        }
        self.rig.service.payload_done(self.peer, checksum, self.rig.now_ns);
    }

    fn remove(&mut self, key: &[u8]) {
        let item = kvplane_proto::message::DigestItem { digest: Digest::of(b"", key) };
        self.rig.ask(self.peer, Operation::Remove, &body_of([item]), 1);
    }

    /// Gets an object, from wherever it is; returns its bytes.
    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let request = self.rig.next_request();
        let item = GetItem { digest: Digest::of(b"", key), request, capacity_bytes: u64::MAX };
        self.rig.ask(self.peer, Operation::Get, &body_of([item]), 1);
        self.run();
        let Answer { header, payload, .. } = self.rig.answer();
        let (extent, hold) = payload?;
        assert_eq!(header.status, Status::Ok);
        let mut bytes = vec![0; extent.bytes as usize];
        self.pool.read(extent.offset, &mut bytes);
        self.rig.service.sent(hold);
        Some(bytes)
    }

    /// Evicts an object from memory.
    fn evict(&mut self, key: &[u8]) {
        self.rig.service.objects.shard_mut().store.drop_copy(Digest::of(b"", key));
    }
}

#[test]
fn an_object_that_is_read_back_has_its_bytes_and_its_number_of_replicas() {
    for replicas in 1..=3 {
        let mut bed = Bed::start(1, Files::default());
        bed.follow(1);
        let key = owned(0);
        bed.put(&key, &[replicas; 700], &PutOptions { replicas, ..PutOptions::default() });
        assert_eq!(bed.rig.answer().status(), Status::Ok);
        bed.run();
        assert_eq!((bed.stats().uploaded, bed.stats().objects), (1, 1));
        bed.evict(&key);
        assert_eq!(bed.get(&key), Some(vec![replicas; 700]));
        let objects = bed.rig.store().objects();
        let digest = Digest::of(b"", &key);
        assert_eq!(objects.replica(digest), if replicas > 1 { Replica::First } else { Replica::None });
        assert!(replicas == 1 || objects.copies(digest).replicas() == replicas);
        assert_eq!(bed.stats().reads, 1);
        bed.rig.store().check();
    }
}

#[test]
fn removals_and_replacements_wait_for_the_log_and_are_refused_without_it() {
    let (mut bed, keys) = Bed::with_objects(4);
    assert_eq!(bed.stats().objects, 4);
    let replaces = PutOptions { replace: true, ..PutOptions::default() };
    bed.remove(&keys[0]);
    bed.rig.assert_quiet();
    bed.run();
    assert_eq!(bed.rig.answer().status(), Status::Ok);
    bed.put(&keys[1], &[2; 100], &replaces);
    bed.rig.assert_quiet();
    bed.run();
    assert_eq!(bed.rig.answer().status(), Status::Ok);
    bed.evict(&keys[1]);
    assert_eq!((bed.get(&keys[0]), bed.get(&keys[1])), (None, Some(vec![2; 100])));
    bed.files.refuses_writes = true;
    bed.remove(&keys[2]);
    bed.run();
    assert_eq!(bed.rig.answer().status(), Status::NoSpace);
    assert_eq!(bed.get(&keys[2]), None, "it is hidden all the same");
    bed.put(&keys[3], &[3; 100], &replaces);
    bed.run();
    assert_eq!(bed.rig.answer().status(), Status::NoSpace);
    // The next incarnation finds what the log has.
    bed.files.refuses_writes = false;
    let mut bed = Bed::start(2, bed.files);
    bed.follow(2);
    assert_eq!((bed.get(&keys[0]), bed.get(&keys[1])), (None, Some(vec![2; 100])));
}

#[test]
fn an_object_of_a_former_owner_does_not_stand_behind_other_bytes() {
    let (bed, keys) = Bed::with_objects(3);
    let version = |bed: &Bed, key: &[u8]| bed.rig.store().peek(Digest::of(b"", key)).map(|object| object.version);
    let put = version(&bed, &keys[0]).expect("it was put");
    // Memory has replicas that the former owner made, under versions of this shard: lower and higher ones of the same
    // bytes, and one of other bytes.
    let mut bed = Bed::start(2, bed.files);
    for (key, (version, byte)) in keys.iter().zip([(Version(put.0 - 1), 1), (Version(1998), 1), (Version(1999), 9)]) {
        let store = &mut bed.rig.service.objects.shard_mut().store;
        let (reservation, extent) = store.reserve_for(&Reserve::plain(Digest::of(b"", key), 100)).expect("room");
        bed.pool.write(extent.offset, &[byte; 100]);
        store.restore(reservation, payload_checksum(&[byte; 100]), version).expect("it is new");
    }
    bed.follow(2);
    assert_eq!(bed.stats().objects, 2);
    let versions = [version(&bed, &keys[0]), version(&bed, &keys[1])];
    keys.iter().for_each(|key| bed.evict(key));
    assert_eq!(keys.iter().map(|key| bed.get(key)).collect::<Vec<_>>(), [Some(vec![1; 100]), Some(vec![1; 100]), None]);
    // Their versions stay the ones that clients have seen.
    assert_eq!([version(&bed, &keys[0]), version(&bed, &keys[1])], versions);
}
