//! Tests of damaged objects: they are found, repaired with the bytes of another owner of their slot, or removed, and
//! their bytes are never lent again.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{GetItem, Hello, Kind, LookupReply, Operation, PutItem, PutOptions};
use kvplane_proto::{FrameFlags, Status};

use super::rig::{Answer, POOL_BYTES, Pool, Rig, ServiceOutput, body_of, digest, digests, hello, pool_place};
use super::seconds::{keys_of_the_other_node, owners};
use crate::service::{Fetch, FetchDone, MemoryExtent, Path, PeerKey, RepairCounters, ScrubPace, Want};

const BYTES: u64 = 700;

/// Service with the memory behind it.
struct Shard {
    rig: Rig,
    pool: Pool,
    peer: PeerKey,
}

impl Shard {
    fn new() -> Self {
        let mut rig = Rig::new();
        rig.service.follow(1, &owners(6));
        let peer = rig.join(Path::Stream);
        Self { rig, pool: Pool(vec![0; POOL_BYTES as usize]), peer }
    }

    /// Returns the bytes of an object.
    fn value(key: u8) -> Vec<u8> {
        (0..BYTES).map(|at| (at as u8).wrapping_mul(3) ^ key).collect()
    }

    /// Puts an object over a connection with these flags; returns where its bytes are.
    fn put(&mut self, peer: PeerKey, key: u8, flags: FrameFlags) -> MemoryExtent {
        let value = Self::value(key);
        let options = PutOptions { replicas: 2, ..PutOptions::default() };
        let body = body_of([PutItem::plain(digest(key), BYTES).with_options(&options)]);
        let header = Header::request(Kind::Request(Operation::Put), self.rig.next_request()).with_body(&body, 1);
        let mut header = header.with_payload(BYTES, Some(payload_checksum(&value)));
        (header.argument, header.flags) = (6, header.flags.with(flags, true));
        let extent = pool_place(self.rig.service.request(peer, &header, &body, self.rig.now_ns));
        self.pool.0[extent.offset as usize..][..value.len()].copy_from_slice(&value);
        self.rig.service.payload_done(peer, Some(payload_checksum(&value)), self.rig.now_ns);
        assert_eq!(self.rig.answer().status(), Status::Ok);
        extent
    }

    /// Puts an object of this shard that its replica owner has too.
    fn put_replicated(&mut self) -> (u8, MemoryExtent) {
        let key = (0..=255).find(|key| self.rig.service.inspect().serves(digest(*key).slot())).expect("a slot");
        let extent = self.put(self.peer, key, FrameFlags::NONE);
        let fetch = self.fetch().expect("it is to be replicated");
        assert!(matches!(fetch.want, Want::Copy { .. }));
        self.rig.service.fetched(fetch.token, FetchDone::Copied, self.rig.now_ns);
        (key, extent)
    }

    fn flip(&mut self, extent: MemoryExtent) {
        self.pool.0[extent.offset as usize + 123] ^= 4;
    }

    fn fetch(&mut self) -> Option<Fetch> {
        self.rig.service.poll_fetch(self.rig.now_ns)
    }

    fn check(&mut self) {
        while self.rig.service.drive_pool(&self.pool, self.rig.now_ns) {}
    }

    /// Sends a get with these flags.
    fn ask(&mut self, peer: PeerKey, key: u8, flags: FrameFlags) {
        let item = GetItem { digest: digest(key), request: self.rig.next_request(), capacity_bytes: u64::MAX };
        let body = body_of([item]);
        let mut header = Header::request(Kind::Request(Operation::Get), self.rig.next_request()).with_body(&body, 1);
        (header.argument, header.flags) = (6, flags);
        self.rig.service.request(peer, &header, &body, self.rig.now_ns);
    }

    /// Checks that a get was answered with the bytes that were put.
    fn assert_good(&mut self, key: u8) {
        let Answer { header, payload, .. } = self.rig.answer();
        let (extent, hold) = payload.expect("the object's bytes");
        assert_eq!(self.pool.0[extent.offset as usize..][..extent.bytes as usize], Self::value(key)[..]);
        assert_eq!((header.status, header.payload_checksum), (Status::Ok, payload_checksum(&Self::value(key))));
        self.rig.service.sent(hold);
    }

    fn repairs(&self) -> RepairCounters {
        self.rig.service.inspect().repairs()
    }

    /// Takes the request for the good bytes of an object.
    fn repair_fetch(&mut self) -> (Fetch, MemoryExtent) {
        let fetch = self.fetch().expect("another owner is asked");
        let Want::Repair(_, extent) = fetch.want else { panic!("{fetch:?}") };
        (fetch, extent)
    }
}

#[test]
fn damage_that_a_reader_reports_is_repaired_from_the_replica_owner() {
    let mut shard = Shard::new();
    let (key, extent) = shard.put_replicated();
    let peer = shard.peer;
    shard.ask(peer, key, FrameFlags::SUM_REPLIES);
    shard.check();
    shard.assert_good(key);
    assert_eq!((shard.repairs().checked, shard.repairs().damaged), (1, 0), "the network had damaged it");
    shard.flip(extent);
    shard.ask(peer, key, FrameFlags::SUM_REPLIES);
    shard.check();
    shard.rig.assert_quiet();
    let (fetch, place) = shard.repair_fetch();
    assert_eq!(place, extent, "good bytes take the place of the damaged ones");
    // Others wait as well, and it exists all the time.
    shard.ask(peer, key, FrameFlags::NONE);
    shard.rig.assert_quiet();
    assert!(shard.rig.exists(peer, key));
    assert_eq!(
        shard.repairs(),
        RepairCounters { checked: 2, checked_bytes: 1400, damaged: 1, outstanding: 1, ..shard.repairs() }
    );
    let value = Shard::value(key);
    shard.pool.0[extent.offset as usize..][..value.len()].copy_from_slice(&value);
    let done = FetchDone::Object(BYTES, payload_checksum(&value));
    shard.rig.service.fetched(fetch.token, done, shard.rig.now_ns);
    let answers = shard.rig.drain();
    assert_eq!(answers.len(), 2);
    for answer in answers {
        let ServiceOutput::Answer(Answer { payload: Some((_, hold)), .. }) = answer else { panic!("{answer:?}") };
        shard.rig.service.sent(hold);
    }
    let repairs = shard.repairs();
    assert_eq!((repairs.repaired, repairs.lost, repairs.outstanding), (1, 0, 0));
    assert_eq!(shard.rig.service.control().poll_repairs(), Some(repairs));
    assert_eq!(shard.rig.service.control().poll_repairs(), None, "it was told");
    shard.rig.assert_idle();
}

#[test]
fn the_scrub_finds_damage_by_itself_and_bytes_of_another_object_do_not_repair_it() {
    let mut shard = Shard::new();
    let (key, extent) = shard.put_replicated();
    shard.flip(extent);
    let pace = ScrubPace { bytes_per_s: 1 << 20, pause_ns: 1_000_000 };
    shard.rig.service.control().set_memory_scrub(pace, shard.rig.now_ns);
    shard.check();
    assert_eq!((shard.repairs().damaged, shard.repairs().passes), (1, 1));
    let (fetch, _) = shard.repair_fetch();
    shard.rig.service.fetched(fetch.token, FetchDone::Object(BYTES, 77), shard.rig.now_ns);
    assert!(shard.fetch().is_none(), "nobody else can have it");
    let peer = shard.peer;
    assert_eq!(shard.rig.get(peer, key).status(), Status::NotFound);
    assert_eq!((shard.repairs().repaired, shard.repairs().lost), (0, 1));
    shard.rig.assert_idle();
}

#[test]
fn an_owner_that_cannot_be_reached_is_asked_again_while_readers_retry() {
    let mut shard = Shard::new();
    let (key, extent) = shard.put_replicated();
    shard.flip(extent);
    let peer = shard.peer;
    shard.ask(peer, key, FrameFlags::SUM_REPLIES);
    shard.check();
    for _ in 0..3 {
        let (fetch, _) = shard.repair_fetch();
        shard.rig.service.fetched(fetch.token, FetchDone::Failed(Status::Unreachable), shard.rig.now_ns);
        assert!(shard.fetch().is_none(), "it rests");
        if shard.repairs().outstanding == 1 && shard.rig.now_ns < 10_000 {
            assert_eq!(shard.rig.answer().status(), Status::Busy);
        }
        assert_eq!(shard.rig.get(peer, key).status(), Status::Busy, "a reader in a pause is to come again");
        shard.rig.now_ns += 5_000_000_000;
    }
    assert!(shard.rig.exists(peer, key), "nobody has said that it is gone");
    // It is removed: there is nothing to repair any more.
    shard.rig.ask(peer, Operation::Remove, &digests([key]), 1);
    while let Some(fetch) = shard.fetch() {
        let done = match fetch.want {
            Want::DropCopies(digests) => FetchDone::CopiesDropped(vec![true; digests.len()]),
            _ => FetchDone::Failed(Status::Unreachable),
        };
        shard.rig.service.fetched(fetch.token, done, shard.rig.now_ns);
    }
    shard.rig.answer();
    assert_eq!((shard.repairs().outstanding, shard.repairs().lost), (0, 0));
    shard.rig.assert_idle();
}

#[test]
fn an_object_without_another_copy_is_removed() {
    let mut shard = Shard::new();
    let key = (0..=255).find(|key| shard.rig.service.inspect().serves(digest(*key).slot())).expect("a slot");
    let peer = shard.peer;
    let extent = shard.put(peer, key, FrameFlags::NONE);
    shard.flip(extent);
    shard.ask(peer, key, FrameFlags::SUM_REPLIES);
    shard.check();
    assert_eq!(shard.rig.answer().status(), Status::NotFound);
    assert_eq!((shard.repairs().damaged, shard.repairs().lost), (1, 1));
    assert!(!shard.rig.exists(peer, key));
}

#[test]
fn damage_that_a_peer_over_shared_memory_reports_is_repaired() {
    let mut shard = Shard::new();
    let (key, extent) = shard.put_replicated();
    let peer = shard.rig.join(Path::Shared);
    shard.flip(extent);
    let body = digests([key]);
    let mut header = Header::request(Kind::Request(Operation::Lookup), shard.rig.next_request()).with_body(&body, 1);
    (header.argument, header.flags) = (6, FrameFlags::SUM_REPLIES);
    shard.rig.service.request(peer, &header, &body, shard.rig.now_ns);
    shard.check();
    let (fetch, _) = shard.repair_fetch();
    let value = Shard::value(key);
    shard.pool.0[extent.offset as usize..][..value.len()].copy_from_slice(&value);
    shard.rig.service.fetched(fetch.token, FetchDone::Object(BYTES, payload_checksum(&value)), shard.rig.now_ns);
    let found: Vec<LookupReply> = shard.rig.answer().items();
    assert_eq!((found[0].status, found[0].offset), (Status::Ok, extent.offset));
    shard.rig.release(peer, found[0].pin);
    shard.rig.assert_idle();
}

/// Both owners of a slot give their bytes to the other one; and one whose own bytes are damaged does not wait for those
/// of the other.
#[test]
fn each_owner_of_a_slot_repairs_from_the_other() {
    let mut shard = Shard::new();
    let other = shard.rig.connect(Path::Stream);
    shard.rig.ask(other, Operation::Hello, &Hello { fetches: true, ..hello() }.encode(), 1);
    assert_eq!(shard.rig.answer().status(), Status::Ok);
    let (own, _) = shard.put_replicated();
    let theirs = keys_of_the_other_node().next().expect("a slot of the other node");
    let extent = shard.put(other, theirs, FrameFlags::REPLICATE);
    for key in [own, theirs] {
        shard.ask(other, key, FrameFlags::NONE);
        assert_eq!(shard.rig.answer().status(), Status::Stale, "it is not to be imported");
        shard.ask(other, key, FrameFlags::READ_REPLICA);
        shard.assert_good(key);
    }
    shard.flip(extent);
    let peer = shard.peer;
    shard.ask(peer, theirs, FrameFlags::READ_REPLICA | FrameFlags::SUM_REPLIES);
    shard.check();
    let (fetch, _) = shard.repair_fetch();
    let owner = owners(6).owner(digest(theirs).slot()).expect("it has an owner");
    assert_eq!((fetch.source, shard.rig.service.inspect().replica_peers(digest(theirs).slot())), (owner, &[owner][..]));
    shard.ask(other, theirs, FrameFlags::READ_REPLICA);
    assert_eq!(shard.rig.answer().status(), Status::NotFound);
    shard.rig.service.fetched(fetch.token, FetchDone::Failed(Status::NotFound), shard.rig.now_ns);
    assert!(shard.fetch().is_none());
    assert_eq!(shard.rig.answer().status(), Status::NotFound, "the reader goes to the owner");
    assert_eq!(shard.repairs().lost, 1);
    shard.rig.assert_idle();
}
