//! Differential test of one connection's requests, in order, against a map.

use std::collections::BTreeMap;

use kvplane_proto::message::{Operation, SizeReply};
use kvplane_proto::{Status, Version};
use proptest::prelude::*;

use super::rig::{CHECKSUM, Rig, config, digests};
use crate::service::{Path, PeerKey};

#[derive(Clone, Debug)]
enum Op {
    Put { key: u8, bytes: u64, whole: bool },
    Get(u8),
    Exists(Vec<u8>),
    Size(Vec<u8>),
    Remove(Vec<u8>),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let keys = || prop::collection::vec(0..8u8, 0..20);
    let put =
        (0..8u8, 1..2000u64, prop::bool::weighted(0.8)).prop_map(|(key, bytes, whole)| Op::Put { key, bytes, whole });
    let op = prop_oneof![
        3 => put,
        2 => (0..8u8).prop_map(Op::Get),
        2 => keys().prop_map(Op::Exists),
        1 => keys().prop_map(Op::Size),
        1 => prop::collection::vec(0..8u8, 0..3).prop_map(Op::Remove),
    ];
    prop::collection::vec(op, 0..80)
}

/// Expected objects: length and version by key.
type Model = BTreeMap<u8, (u64, Version)>;

fn put(rig: &mut Rig, peer: PeerKey, model: &mut Model, last: &mut u64, (key, bytes, whole): (u8, u64, bool)) {
    rig.begin_put(peer, key, bytes);
    rig.assert_quiet();
    let sum = if whole { CHECKSUM } else { 0 };
    rig.service.payload_done(peer, Some(sum), rig.now_ns);
    let answer = rig.answer();
    let expected = match model.contains_key(&key) {
        true => Status::Exists,
        false if whole => Status::Ok,
        false => Status::Corrupt,
    };
    assert_eq!(answer.status(), expected);
    if expected == Status::Ok {
        assert!(answer.header.argument > *last, "versions grow");
        *last = answer.header.argument;
        model.insert(key, (bytes, Version(*last)));
    }
}

fn get(rig: &mut Rig, peer: PeerKey, model: &Model, key: u8) {
    let answer = rig.get(peer, key);
    let found = answer.payload.map(|(extent, _)| (extent.bytes, Version(answer.header.argument)));
    assert_eq!(found.as_ref(), model.get(&key));
    assert_eq!(answer.status(), if found.is_some() { Status::Ok } else { Status::NotFound });
    if let Some((_, hold)) = answer.payload {
        rig.service.sent(hold);
    }
}

fn bits(rig: &mut Rig, peer: PeerKey, operation: Operation, keys: &[u8]) -> Vec<bool> {
    rig.ask(peer, operation, &digests(keys.iter().copied()), keys.len());
    rig.answer().bits()
}

proptest! {
    /// The pool has room for all objects, so that none is evicted.
    #[test]
    fn answers_agree_with_a_map(ops in ops()) {
        let mut rig = Rig::with(config(8 * 2048));
        let peer = rig.join(Path::Stream);
        let (mut model, mut last) = (Model::new(), 0);
        for op in ops {
            match op {
                Op::Put { key, bytes, whole } => put(&mut rig, peer, &mut model, &mut last, (key, bytes, whole)),
                Op::Get(key) => get(&mut rig, peer, &model, key),
                Op::Exists(keys) => {
                    let expected: Vec<bool> = keys.iter().map(|key| model.contains_key(key)).collect();
                    prop_assert_eq!(bits(&mut rig, peer, Operation::Exists, &keys), expected);
                }
                Op::Size(keys) => {
                    rig.ask(peer, Operation::Size, &digests(keys.iter().copied()), keys.len());
                    let sizes: Vec<SizeReply> = rig.answer().items();
                    let sizes: Vec<Option<u64>> =
                        sizes.iter().map(|size| (size.status == Status::Ok).then_some(size.bytes)).collect();
                    let expected: Vec<Option<u64>> = keys.iter().map(|key| Some(model.get(key)?.0)).collect();
                    prop_assert_eq!(sizes, expected);
                }
                Op::Remove(keys) => {
                    let expected: Vec<bool> = keys.iter().map(|key| model.remove(key).is_some()).collect();
                    prop_assert_eq!(bits(&mut rig, peer, Operation::Remove, &keys), expected);
                }
            }
            rig.assert_idle();
        }
        prop_assert_eq!(rig.store().stats().objects, model.len() as u64);
    }
}
