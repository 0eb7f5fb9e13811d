//! Tests of names, replacements, ranges and lists.

use std::collections::BTreeSet;

use kvplane_proto::message::{
    GetItem, Item, KeyItem, KeyPage, ListItem, ListReply, LookupReply, ObjectName, ObjectPriority, Operation, PutItem,
    PutOptions, RangeItem,
};
use kvplane_proto::rng::Rng;
use kvplane_proto::{Digest, Limits, Status};

use super::rig::{CHECKSUM, Rig, ServiceOutput, body_of, config, pool_place};
use crate::StoreConfig;
use crate::service::{Path, PayloadTo, PeerKey, PoolBytes};

/// Memory of a pool.
struct Pool(std::cell::RefCell<Vec<u8>>);

impl PoolBytes for Pool {
    fn read(&self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0.borrow()[offset as usize..][..into.len()]);
    }

    fn bytes(&self) -> u64 {
        self.0.borrow().len() as u64
    }
}

struct Keys {
    rig: Rig,
    pool: Pool,
    peer: PeerKey,
}

fn name(tenant: &str, key: &str) -> (Vec<u8>, Vec<u8>) {
    (tenant.as_bytes().to_vec(), key.as_bytes().to_vec())
}

impl Keys {
    fn new(objects: u32) -> Self {
        let bytes = u64::from(objects) * 1024;
        let mut rig = Rig::with(StoreConfig { max_objects: objects, hash_seed: 3, ..config(bytes) });
        let peer = rig.join(Path::Stream);
        Self { rig, pool: Pool(vec![0; bytes as usize].into()), peer }
    }

    fn body(name: &(Vec<u8>, Vec<u8>), bytes: u64, options: &PutOptions) -> Vec<u8> {
        let name = ObjectName { tenant: &name.0, key: &name.1 };
        let mut body = body_of([PutItem::named(&name, bytes, options)]);
        body.extend_from_slice(name.tenant);
        body.extend_from_slice(name.key);
        body
    }

    /// Puts an object; its tail is written.
    fn put(&mut self, name: &(Vec<u8>, Vec<u8>), bytes: u64, options: &PutOptions) -> Status {
        let body = Self::body(name, bytes, options);
        self.rig.offer(self.peer, Operation::Put, &body, bytes);
        for said in self.rig.drain() {
            let ServiceOutput::Tail(offset, tail) = said else { panic!("not {said:?}") };
            self.pool.0.borrow_mut()[offset as usize..][..tail.len()].copy_from_slice(&tail);
        }
        self.rig.done(self.peer);
        self.rig.answer().status()
    }

    /// Requests one page; returns its objects and the next position.
    fn page(&mut self, from: &ListReply, names: bool) -> (Vec<(KeyItem, Vec<u8>)>, ListReply) {
        let (walk, next) = (from.walk, from.next);
        let item = ListItem { digest: Digest(0), walk, from: next, flags: names.into() };
        self.rig.ask(self.peer, Operation::List, &body_of([item]), 1);
        let answer = loop {
            assert!(self.rig.service.drive_pool(&self.pool, self.rig.now_ns), "it goes on by itself");
            match self.rig.drain().pop() {
                Some(ServiceOutput::Answer(answer)) => break answer,
                Some(said) => panic!("not {said:?}"),
                None => {}
            }
        };
        assert_eq!(answer.status(), Status::Ok);
        let page = KeyPage::decode(&answer.body).expect("a page");
        (page.keys().map(|key| (key.item, key.name.key.to_vec())).collect(), page.reply())
    }
}

const BEGIN: ListReply = ListReply { walk: 0, next: 0, items: 0 };

#[test]
fn a_name_that_is_not_the_digests_is_refused_and_a_torn_body_ends_the_connection() {
    let mut keys = Keys::new(8);
    let (name, other) = (name("", "one"), name("", "two"));
    let mut body = Keys::body(&name, 100, &PutOptions::default());
    let at = body.len() - 3;
    body[at..].copy_from_slice(&other.1);
    assert_eq!(keys.rig.offer(keys.peer, Operation::Put, &body, 100), PayloadTo::Discard);
    keys.rig.done(keys.peer);
    assert_eq!(keys.rig.answer().status(), Status::BadRequest);
    let longer = Keys::body(&name, 101, &PutOptions::default());
    keys.rig.offer(keys.peer, Operation::Put, &longer, 100);
    keys.rig.assert_malformed(keys.peer);
    keys.peer = keys.rig.join(Path::Stream);
    keys.rig.offer(keys.peer, Operation::Put, &body[..body.len() - 1], 100);
    keys.rig.assert_malformed(keys.peer);
}

#[test]
fn a_replacement_is_given_from_its_commit_on_and_who_reads_the_former_reads_on() {
    let mut keys = Keys::new(16);
    let one = name("", "one");
    let replace = PutOptions { replace: true, ..PutOptions::default() };
    assert_eq!(keys.put(&one, 300, &PutOptions::default()), Status::Ok);
    assert_eq!(keys.put(&one, 400, &PutOptions::default()), Status::Exists);
    let shared = keys.rig.join(Path::Shared);
    let digest = ObjectName { tenant: b"", key: b"one" }.digest();
    keys.rig.ask(shared, Operation::Lookup, &digest.to_bytes(), 1);
    let former: LookupReply = keys.rig.answer().items()[0];
    assert_eq!(keys.put(&one, 500, &replace), Status::Ok);
    keys.rig.ask(shared, Operation::Lookup, &digest.to_bytes(), 1);
    let newer: LookupReply = keys.rig.answer().items()[0];
    assert_eq!((former.bytes, newer.bytes), (300, 500));
    assert!(newer.version > former.version);
    let apart = former.offset + former.bytes <= newer.offset || newer.offset + newer.bytes <= former.offset;
    assert!(apart, "nothing is written in place");
    keys.rig.release(shared, former.pin);
    keys.rig.release(shared, newer.pin);
    keys.rig.assert_idle();
}

#[test]
fn ranges_are_parts_of_objects_and_nothing_beyond() {
    let mut keys = Keys::new(8);
    let one = name("", "one");
    assert_eq!(keys.put(&one, 1000, &PutOptions::default()), Status::Ok);
    let digest = ObjectName { tenant: b"", key: b"one" }.digest();
    let request = keys.rig.next_request();
    let whole = GetItem { digest, request, capacity_bytes: 1000 };
    keys.rig.ask(keys.peer, Operation::Get, &body_of([whole]), 1);
    let (extent, hold) = keys.rig.answer().payload.expect("it is there");
    keys.rig.service.sent(hold);
    let cases = [
        (0, 1000, Status::Ok),
        (999, 1, Status::Ok),
        (400, 200, Status::Ok),
        (0, 1001, Status::OutOfRange),
        (1000, 1, Status::OutOfRange),
        (u64::MAX, 2, Status::OutOfRange),
        (5, 0, Status::Empty),
    ];
    for (offset, bytes, status) in cases {
        let request = keys.rig.next_request();
        let range = RangeItem { digest, request, offset, bytes };
        keys.rig.ask(keys.peer, Operation::GetRange, &body_of([range]), 1);
        let answer = keys.rig.answer();
        assert_eq!((answer.status(), answer.header.request), (status, request), "{offset}, {bytes}");
        if let Some((part, hold)) = answer.payload {
            assert_eq!((part.offset, part.bytes), (extent.offset + offset, bytes));
            assert_eq!(answer.header.checksum(), Some(0), "the host sums up what it sends");
            keys.rig.service.sent(hold);
        } else {
            assert_eq!(answer.header.argument, 1000, "how long it is");
        }
    }
    let request = keys.rig.next_request();
    let none = RangeItem { digest: Digest(7), request, offset: 0, bytes: 1 };
    keys.rig.ask(keys.peer, Operation::GetRange, &body_of([none]), 1);
    assert_eq!(keys.rig.answer().status(), Status::NotFound);
    keys.rig.assert_idle();
}

#[test]
fn a_list_returns_the_options_of_the_puts() {
    let mut keys = Keys::new(8);
    let options = PutOptions {
        tenant: 7,
        group: 9,
        soft_pin_ms: 5,
        hard_pin: true,
        data_type: 3,
        replace: true,
        priority: ObjectPriority::LOWEST,
        ..PutOptions::default()
    };
    assert_eq!(keys.put(&name("somebody", "one"), 300, &options), Status::Ok);
    let plain = PutItem::plain(Digest(5), 20);
    pool_place(keys.rig.offer(keys.peer, Operation::Put, &body_of([plain]), 20));
    keys.rig.service.payload_done(keys.peer, Some(CHECKSUM), keys.rig.now_ns);
    assert_eq!(keys.rig.answer().status(), Status::Ok);
    let (mut found, reply) = keys.page(&BEGIN, true);
    found.sort_by_key(|(item, _)| item.bytes);
    assert_eq!((reply.next, found.len()), (0, 2));
    assert_eq!((found[0].0.digest, found[0].1.len(), found[0].0.flags), (Digest(5), 0, KeyItem::IN_MEMORY));
    let (item, key) = &found[1];
    assert_eq!((key.as_slice(), item.tenant, item.group, item.soft_pin_ms), (&b"one"[..], 7, 9, 5));
    let flags = KeyItem::HARD_PIN | KeyItem::IN_MEMORY | 0xc00;
    assert_eq!((item.data_type, item.flags, item.tenant_bytes), (3, flags, 8));
    assert_eq!((item.priority(), item.options().priority), (ObjectPriority::LOWEST, ObjectPriority::LOWEST));
    let (without, _) = keys.page(&BEGIN, false);
    assert!(without.iter().all(|(item, key)| key.is_empty() && item.group == 0), "names were not wanted");
}

#[test]
fn an_object_that_exists_throughout_is_listed_once() {
    let mut keys = Keys::new(6000);
    let mut rng = Rng::new(1, "keys");
    let stays: BTreeSet<Vec<u8>> = (0..1500).map(|at| format!("stays-{at}").into_bytes()).collect();
    for key in &stays {
        assert_eq!(keys.put(&(Vec::new(), key.clone()), 100, &PutOptions::default()), Status::Ok);
    }
    let (mut at, mut listed, mut pages, mut others) = (BEGIN, Vec::new(), 0, 0);
    loop {
        let (found, reply) = keys.page(&at, true);
        listed.extend(found.into_iter().map(|(_, key)| key).filter(|key| stays.contains(key)));
        pages += 1;
        if reply.next == 0 {
            break;
        }
        at = reply;
        for _ in 0..300 {
            // Some objects are added, some are removed, and some of those that stay get new versions.
            others += 1;
            let key = format!("other-{others}").into_bytes();
            assert_eq!(keys.put(&(Vec::new(), key), 100, &PutOptions::default()), Status::Ok);
            let gone = format!("other-{}", rng.below(others + 1)).into_bytes();
            let digest = ObjectName { tenant: b"", key: &gone }.digest();
            keys.rig.ask(keys.peer, Operation::Remove, &digest.to_bytes(), 1);
            keys.rig.answer();
            let newer = format!("stays-{}", rng.below(1500)).into_bytes();
            let replace = PutOptions { replace: true, ..PutOptions::default() };
            assert_eq!(keys.put(&(Vec::new(), newer), 100, &replace), Status::Ok);
        }
    }
    assert!(pages > 1, "{pages} pages");
    listed.sort_unstable();
    assert_eq!(listed, stays.into_iter().collect::<Vec<_>>(), "each once");
}

#[test]
fn an_invalid_list_is_refused_and_the_number_of_lists_is_limited() {
    let mut keys = Keys::new(8);
    let ask = |keys: &mut Keys, walk, from, flags| {
        keys.rig.ask(keys.peer, Operation::List, &body_of([ListItem { digest: Digest(0), walk, from, flags }]), 1);
    };
    for (walk, from, flags, status) in [
        (0, 1, 0, Status::BadRequest),
        (0, 0, 4, Status::BadRequest),
        (5, 1 << 32, 0, Status::BadRequest),
        (4, 5, 0, Status::Stale),
    ] {
        ask(&mut keys, walk, from, flags);
        assert_eq!(keys.rig.answer().status(), status, "{walk}, {from}, {flags}");
    }
    for _ in 0..Limits::LISTS {
        ask(&mut keys, 0, 0, 1);
    }
    keys.rig.assert_quiet();
    ask(&mut keys, 0, 0, 1);
    assert_eq!(keys.rig.answer().status(), Status::Busy);
    keys.rig.gone(keys.peer);
    assert!(keys.rig.service.drive_pool(&keys.pool, keys.rig.now_ns));
    assert!(!keys.rig.service.drive_pool(&keys.pool, keys.rig.now_ns), "nobody waits for them");
    keys.rig.assert_quiet();
    let mut body = body_of([ListItem { digest: Digest(0), walk: 0, from: 0, flags: 0 }]);
    body.truncate(ListItem::BYTES - 1);
    keys.peer = keys.rig.join(Path::Stream);
    keys.rig.ask(keys.peer, Operation::List, &body, 1);
    keys.rig.assert_malformed(keys.peer);
}
