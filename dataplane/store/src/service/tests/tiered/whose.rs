//! Tests of objects on the SSD for a peer whose ticket is for one tenant: it sees all objects of that tenant, and no
//! others.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::message::{
    DigestItem, GetItem, KeyPage, ListItem, ObjectName, Operation, PutOptions, RangeItem, SizeReply,
};
use kvplane_proto::{Digest, FrameFlags, Status};

use super::super::rig::body_of;
use super::policies;
use super::world::World;
use crate::service::{PeerKey, TierPolicy};

const OF_A: PeerKey = PeerKey { index: 1, generation: 1 };
const OF_B: PeerKey = PeerKey { index: 2, generation: 1 };
const OF_ALL: PeerKey = PeerKey { index: 3, generation: 1 };

/// Two tenants with objects each, in memory, on the SSD, or both.
struct Two {
    world: World,
    own: Vec<Digest>,
    others: Vec<Digest>,
}

fn bytes_of(digest: Digest) -> Vec<u8> {
    (0..3000u64).map(|at| (digest.low().wrapping_add(at) % 251) as u8).collect()
}

fn body(digests: &[Digest]) -> Vec<u8> {
    body_of(digests.iter().map(|digest| DigestItem { digest: *digest }))
}

impl Two {
    fn new(seed: u64, policy: TierPolicy, objects: u32) -> Self {
        let mut two = Self { world: World::new(seed, policy), own: Vec::new(), others: Vec::new() };
        two.join();
        for number in 0..objects {
            let own = two.put(OF_A, b"a", number);
            let other = two.put(OF_B, b"b", number);
            two.own.push(own);
            two.others.push(other);
        }
        two
    }

    fn join(&mut self) {
        self.world.join_bound(OF_A, tenant_number(b"a"));
        self.world.join_bound(OF_B, tenant_number(b"b"));
        self.world.join(OF_ALL, crate::service::Path::Stream);
        self.world.hear();
    }

    /// Every fourth object has no name.
    fn put(&mut self, peer: PeerKey, tenant: &[u8], number: u32) -> Digest {
        let key = number.to_le_bytes();
        let name = ObjectName { tenant, key: if number % 4 == 3 { b"" } else { &key } };
        let digest = if name.key.is_empty() { ObjectName { tenant, key: &key }.digest() } else { name.digest() };
        let options = PutOptions { tenant: tenant_number(tenant), ..PutOptions::default() };
        let bytes = bytes_of(digest);
        assert_eq!(self.world.put_named(peer, (&name, digest), &bytes, &options), Status::Ok);
        digest
    }

    fn ask(&mut self, peer: PeerKey, operation: Operation, digests: &[Digest]) -> Vec<bool> {
        let (answered, bits) = self.world.answer_bits(peer, operation, (&body(digests), digests.len()));
        assert_eq!(answered.status, Status::Ok, "{operation:?}");
        bits
    }

    fn size(&mut self, peer: PeerKey, digest: Digest) -> (Status, u64) {
        let reply: SizeReply =
            self.world.answer((peer, Operation::Size, FrameFlags::NONE), |_| DigestItem { digest }).item();
        (reply.status, reply.bytes)
    }

    fn get(&mut self, peer: PeerKey, digest: Digest) -> Option<Vec<u8>> {
        let item = |request| GetItem { digest, request, capacity_bytes: u64::MAX };
        let got = self.world.answer((peer, Operation::Get, FrameFlags::NONE), item);
        assert_eq!(got.status == Status::Ok, got.bytes.is_some(), "{:?}", got.status);
        got.bytes
    }

    fn part(&mut self, peer: PeerKey, digest: Digest) -> Option<Vec<u8>> {
        let item = |request| RangeItem { digest, request, offset: 100, bytes: 50 };
        self.world.answer((peer, Operation::GetRange, FrameFlags::NONE), item).bytes
    }

    /// Returns all objects of a list, page by page.
    fn list(&mut self, peer: PeerKey, flags: u64) -> Vec<Digest> {
        let (mut all, mut walk, mut from) = (Vec::new(), 0, 0);
        loop {
            let item = ListItem { digest: self.own[0], walk, from, flags };
            let page = self.world.answer((peer, Operation::List, FrameFlags::NONE), |_| item);
            assert_eq!(page.status, Status::Ok);
            let page = KeyPage::decode(&page.body).expect("a page");
            all.extend(page.keys().map(|key| key.item.digest));
            (walk, from) = (page.reply().walk, page.reply().next);
            if from == 0 {
                all.sort_unstable();
                return all;
            }
        }
    }

    /// Checks that every operation sees the tenant's objects, and no others.
    fn check(&mut self) {
        let (own, others) = (self.own.clone(), self.others.clone());
        let mixed: Vec<Digest> = own.iter().zip(&others).flat_map(|(own, other)| [*own, *other]).collect();
        let wanted: Vec<bool> = (0..mixed.len()).map(|at| at % 2 == 0).collect();
        assert_eq!(self.ask(OF_A, Operation::Exists, &mixed), wanted);
        assert_eq!(self.ask(OF_ALL, Operation::Exists, &mixed), vec![true; mixed.len()]);
        let mut listed = own.clone();
        listed.sort_unstable();
        for flags in [0, ListItem::NAMES] {
            assert_eq!(self.list(OF_A, flags), listed, "{flags}");
        }
        for (digest, other) in own.into_iter().zip(others) {
            assert_eq!(self.size(OF_A, digest), (Status::Ok, 3000));
            assert_eq!(self.size(OF_A, other), (Status::NotFound, 0));
            assert_eq!(self.part(OF_A, digest), Some(bytes_of(digest)[100..150].to_vec()));
            assert_eq!(self.part(OF_A, other), None);
            assert_eq!(self.get(OF_A, digest), Some(bytes_of(digest)));
            assert_eq!(self.get(OF_A, other), None);
        }
    }
}

#[test]
fn a_tenant_reads_and_lists_its_objects_on_the_ssd_only() {
    for (seed, policy) in policies().into_iter().enumerate() {
        let mut two = Two::new(300 + seed as u64, policy, 9);
        two.check();
        // The tenants of some objects are known from earlier requests.
        let forgotten: Vec<Digest> = two.own.iter().chain(&two.others).step_by(2).copied().collect();
        let there = |two: &Two, digest: &Digest| two.world.service.objects.local.on_ssd(*digest).is_some();
        let forgotten: Vec<Digest> = forgotten.into_iter().filter(|digest| there(&two, digest)).collect();
        two.world.forget(&forgotten);
        two.check();
        two.check();
        two.world.end();
    }
}

#[test]
fn a_tenant_keeps_its_objects_on_the_ssd_after_a_restart() {
    for (seed, policy) in policies().into_iter().take(2).enumerate() {
        let mut two = Two::new(320 + seed as u64, policy, 9);
        two.world.restart();
        two.join();
        two.check();
        two.world.end();
    }
}

#[test]
fn a_tenant_removes_its_objects_on_the_ssd_only() {
    for (seed, policy) in policies().into_iter().take(2).enumerate() {
        let mut two = Two::new(340 + seed as u64, policy, 9);
        two.world.restart();
        two.join();
        let (own, others) = (two.own.clone(), two.others.clone());
        assert_eq!(two.ask(OF_A, Operation::Remove, &others), vec![false; 9]);
        assert_eq!(two.ask(OF_A, Operation::Remove, &own), vec![true; 9]);
        for peer in [OF_A, OF_ALL] {
            assert_eq!(two.ask(peer, Operation::Exists, &own), vec![false; 9]);
        }
        assert_eq!(two.list(OF_A, 0), []);
        for peer in [OF_B, OF_ALL] {
            assert_eq!(two.ask(peer, Operation::Exists, &others), vec![true; 9]);
        }
        // One at a time, repeatedly, and digests without an object.
        let again: Vec<Digest> = (0..3).map(|number| two.put(OF_A, b"a", number)).collect();
        two.world.forget(&again);
        for digest in again {
            assert_eq!(two.ask(OF_A, Operation::Remove, &[digest]), [true]);
            assert_eq!(two.ask(OF_A, Operation::Remove, &[digest]), [false]);
            assert_eq!(two.get(OF_A, digest), None);
        }
        two.world.end();
    }
}

#[test]
fn requests_of_a_tenant_time_out_as_busy_on_a_stalled_device() {
    let mut two = Two::new(360, policies()[0], 4);
    two.world.restart();
    two.join();
    two.world.stopped = true;
    let (own, items) = (body(&two.own), two.own.len());
    for operation in [Operation::Exists, Operation::Size, Operation::Remove] {
        two.world.begin_bits(OF_A, operation, (&own, items));
        let answered = (0..6_000).find_map(|_| {
            two.world.step();
            let now_ns = two.world.now_ns;
            two.world.service.handle_timeout(now_ns);
            two.world.hear();
            two.world.take_answered()
        });
        assert_eq!(answered.map(|answered| answered.status), Some(Status::Busy), "{operation:?}");
    }
    two.world.stopped = false;
    two.check();
    two.world.end();
}
