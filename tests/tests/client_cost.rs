//! Cost of a small request in the client alone: printed, not asserted, because it depends on the machine.
//!
//! `cargo test --release -p kvplane-tests --test client_cost -- --nocapture` prints it.

use std::net::SocketAddr;
use std::time::Instant;

use kvplane_client::{Client, Config, LaneId, Local, Output, PayloadTo, PeerAddress, Request, SegmentTarget};
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::message::{Kind, Operation, ReadItem, Welcome, decode_items};
use kvplane_proto::{Epoch, Incarnation, NodeId, RequestId, SegmentId, ShardId, Status};

const BATCH: u64 = 128;
const ROUNDS: u64 = 4_000;

fn answer(client: &mut Client, lane: LaneId, request: RequestId, bytes: u64, now_ns: u64) {
    let header = Header::reply(Kind::Reply(Operation::Read), request, Status::Ok).with_payload(bytes, None);
    if let PayloadTo::Local { slice, .. } = client.frame(lane, &header, &[], now_ns) {
        client.payload_done(slice, None, now_ns);
    }
}

/// Answers the client's outputs at once.
fn serve(client: &mut Client, asked: &mut Vec<(LaneId, RequestId, u64)>, now_ns: u64) {
    while let Some(output) = client.poll_output() {
        match output {
            Output::Connect { lane, .. } => client.connected(lane, now_ns),
            Output::Send { lane, header, .. } if header.kind == Kind::Request(Operation::Hello) => {
                let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
                let body =
                    Welcome { version: VERSION, node, incarnation, shard, epoch: Epoch(0), pool_bytes: 0 }.encode();
                let header = Header::reply(Kind::Reply(Operation::Hello), RequestId::default(), Status::Ok);
                client.frame(lane, &header.with_body(&body, 1), &body, now_ns);
            }
            Output::Send { lane, header, body, .. } => {
                let items = decode_items::<ReadItem>(client.outbox().body(body), header.items).expect("reads");
                asked.extend(items.map(|item| (lane, item.request, item.bytes)));
            }
            Output::Done { batch } => client.release(batch),
            other => panic!("{other:?} is not expected"),
        }
    }
}

#[test]
fn the_cost_of_a_small_read_in_the_client() {
    let config = Config { shared: false, checksum_segments: false, gather_range_bytes: 0, ..Config::default() };
    let mut client = Client::new(config);
    let peer = client.open_peer(PeerAddress::native(SocketAddr::from(([127, 0, 0, 1], 1)), None));
    let segment = SegmentId { index: 1, generation: 1 };
    let requests: Vec<Request> = (0..BATCH)
        .map(|number| {
            let target = SegmentTarget {
                peer,
                segment,
                offset: number << 20,
                shareable: false,
                place: kvplane_client::Place::UNKNOWN,
            };
            Request::Read(target, Local { buffer: 0, offset: number << 13, bytes: 4096 })
        })
        .collect();
    let mut asked = Vec::new();
    let mut now_ns = 1;
    let mut least_ns = u64::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        client.submit(&requests, now_ns + 1_000_000_000, now_ns).expect("a valid batch");
        while !client.batches().is_empty() {
            now_ns += 100_000;
            serve(&mut client, &mut asked, now_ns);
            for (lane, request, bytes) in asked.drain(..) {
                answer(&mut client, lane, request, bytes, now_ns);
            }
        }
        least_ns = least_ns.min(start.elapsed().as_nanos() as u64 / BATCH);
    }
    println!("a 4 KiB read in batches of {BATCH} costs {least_ns} ns in the client and its test peer, at best");
}
