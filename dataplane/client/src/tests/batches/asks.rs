//! Existence queries of many objects: requests by owner, and the handling of replies.

use std::collections::BTreeSet;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{BatchId, NodeId};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{DigestItem, Operation};
use kvplane_proto::status::Status;

use crate::tests::answers::bare;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, digest, map, shared_config, stream_config};
use crate::{Config, SubmitError};

fn digests(numbers: impl IntoIterator<Item = u64>) -> Vec<Digest> {
    numbers.into_iter().map(digest).collect()
}

fn ask(rig: &mut Rig, digests: &[Digest]) -> BatchId {
    rig.client.submit_asks(digests, rig.now_ns + 10 * SECOND_NS, rig.now_ns).expect("a good question")
}

/// Releases a batch; returns the objects found, and those without an answer.
fn end(rig: &mut Rig, batch: BatchId) -> (Vec<bool>, Vec<(usize, Status)>) {
    assert!(rig.client.batches().is_complete(batch));
    let answer = (rig.client.batches().found(batch).to_vec(), rig.client.batches().unanswered(batch));
    rig.client.release(batch);
    assert!(
        rig.client.batches().found(batch).is_empty() && rig.client.batches().unanswered(batch).is_empty(),
        "of a stale id"
    );
    answer
}

#[test]
fn each_owner_gets_one_existence_query_and_results_are_in_order() {
    for config in [stream_config(), shared_config()] {
        for members in [1, 2, 5] {
            let there: Vec<(u64, u64)> = (0..300).filter(|number| number % 3 == 0).map(|number| (number, 10)).collect();
            let mut rig = Rig::new(config.clone(), members).with_objects(&there);
            // Consecutive batches of different lengths reuse the same allocations.
            for count in [300, 7, 1, 200, 300] {
                // Unordered, and some twice.
                let numbers: Vec<u64> = (0..count).map(|at| at * 7919 % 300).chain([5, 6]).collect();
                let batch = ask(&mut rig, &digests(numbers.iter().copied()));
                let frames = rig.frames();
                let asked: BTreeSet<NodeId> = frames.iter().map(|sent| rig.addresses[&sent.lane].node).collect();
                assert_eq!(asked.len(), frames.len(), "one request to each");
                let owners = kvplane_proto::map::OwnerTable::compute(&map(1, members, 1));
                for sent in frames {
                    assert_eq!(
                        (sent.operation(), sent.header.flags),
                        (Operation::Exists, kvplane_proto::FrameFlags::NONE)
                    );
                    for item in sent.items::<DigestItem>() {
                        let owner = owners.owner_of(item.digest).expect("an owner");
                        assert_eq!(NodeId(u64::from(owner.member) + 1), rig.addresses[&sent.lane].node);
                    }
                    rig.act(ClientOutput::Frame(sent));
                }
                rig.run();
                let expected = numbers.iter().map(|number| number % 3 == 0).collect();
                assert_eq!(end(&mut rig, batch), (expected, Vec::new()));
                rig.assert_empty();
            }
        }
    }
}

#[test]
fn no_request_is_longer_than_a_frame() {
    let mut rig = Rig::new(Config { lanes: 1, ..stream_config() }, 1).with_objects(&[(1, 1), (40_000, 1)]);
    let batch = ask(&mut rig, &digests(0..70_000));
    let frames = rig.frames();
    let items: Vec<usize> = frames.iter().map(|sent| sent.header.items as usize).collect();
    let most = Limits::QUESTIONS_PER_FRAME;
    assert_eq!(items, [most, most, 70_000 - 2 * most]);
    frames.into_iter().for_each(|sent| rig.act(ClientOutput::Frame(sent)));
    rig.run();
    let (found, unanswered) = end(&mut rig, batch);
    let there: Vec<usize> = (0..found.len()).filter(|at| found[*at]).collect();
    assert_eq!((there, unanswered), (vec![1, 40_000], Vec::new()));
}

#[test]
fn existence_queries_report_the_objects_of_a_failed_owner() {
    for status in [Status::WrongOwner, Status::Busy, Status::Unauthorized] {
        let mut rig = Rig::new(stream_config(), 3).with_objects(&[(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]);
        let asked = digests(0..60);
        let batch = ask(&mut rig, &asked);
        let mut refused = BTreeSet::new();
        for sent in rig.frames() {
            if rig.addresses[&sent.lane].node == NodeId(2) {
                refused.extend(sent.items::<DigestItem>().into_iter().map(|item| item.digest));
                rig.place(&bare(sent.lane, Operation::Exists, sent.header.request, status));
            } else {
                rig.act(ClientOutput::Frame(sent));
            }
        }
        rig.run();
        assert!(!refused.is_empty());
        assert_eq!(rig.maps_wanted, usize::from(status == Status::WrongOwner));
        let (found, mut unanswered) = end(&mut rig, batch);
        unanswered.sort_unstable_by_key(|(at, _)| *at);
        let expected: Vec<(usize, Status)> =
            (0..asked.len()).filter(|at| refused.contains(&asked[*at])).map(|at| (at, status)).collect();
        assert_eq!(unanswered, expected);
        for (at, found) in found.into_iter().enumerate().filter(|(at, _)| !refused.contains(&asked[*at])) {
            assert_eq!(found, at < 6, "{at}");
        }
        rig.assert_empty();
    }
}

#[test]
fn an_existence_query_fails_with_its_connection_or_without_owners() {
    let mut rig = Rig::new(Config { lanes: 1, ..stream_config() }, 1);
    let batch = ask(&mut rig, &digests(0..3));
    let frames = rig.frames();
    rig.lose(frames[0].lane);
    rig.run();
    let (found, unanswered) = end(&mut rig, batch);
    assert_eq!(found, [false; 3]);
    assert_eq!(unanswered, [0, 1, 2].map(|at| (at, Status::Unreachable)));
    rig.client.set_map(map(2, 0, 1), rig.now_ns);
    let batch = ask(&mut rig, &digests(0..3));
    assert_eq!(end(&mut rig, batch).1, [0, 1, 2].map(|at| (at, Status::NoOwner)));
    rig.run();
    rig.assert_empty();
}

#[test]
fn an_existence_reply_of_another_length_is_a_protocol_violation() {
    let mut rig = Rig::new(Config { lanes: 1, ..stream_config() }, 1);
    let batch = ask(&mut rig, &digests(0..9));
    let sent = rig.frames().remove(0);
    let mut reply = rig.answers(&sent).remove(0);
    reply.body.push(0);
    reply.header = reply.header.with_body(&reply.body, 17);
    rig.place(&reply);
    assert_eq!(rig.client.counters().resets, 1);
    rig.run();
    assert_eq!(end(&mut rig, batch).1.len(), 9);
}

#[test]
fn late_and_oversized_existence_queries_fail_and_cancelled_ones_end() {
    let mut rig = Rig::new(stream_config(), 1);
    let most = Limits::BATCH_REQUESTS;
    let many = vec![digest(1); most + 1];
    let refused = rig.client.submit_asks(&many, SECOND_NS, 1);
    assert_eq!(refused, Err(SubmitError::TooMany { requests: most + 1, limit: most }));
    assert_eq!(rig.client.submit_asks(&[], SECOND_NS, 1), Err(SubmitError::Empty));
    let late = rig.client.submit_asks(&digests(0..2), 5, 5).expect("a late one ends at once");
    assert_eq!(end(&mut rig, late).1, [0, 1].map(|at| (at, Status::DeadlineExceeded)));
    let batch = ask(&mut rig, &digests(0..2));
    rig.client.cancel(batch, rig.now_ns);
    assert_eq!(end(&mut rig, batch).1, [0, 1].map(|at| (at, Status::Cancelled)));
    rig.run();
    rig.assert_empty();
}
