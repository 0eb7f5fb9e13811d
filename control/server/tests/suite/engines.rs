//! Tests of engines' events over ZeroMQ, with hand-written publishers and replay sockets on real connections.

use crate::support;
use crate::zeromq;

use std::time::Duration;

use kvplane_rpc::conductor::*;
use kvplane_rpc::{CallError, Client, RefusalCode, Role};
use kvplane_server::{ConductorConfig, ControlConfig, ControlHandle, ControlServer};
use support::{client, run};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use zeromq::{accept, message, read_frame, send};

/// A batch `[0, [["BlockStored", hashes, nil, [], 16, nil]]]`, of hashes below 128.
fn stored(hashes: std::ops::Range<u8>) -> Vec<u8> {
    let mut out = b"\x92\0\x91\x96\xabBlockStored\xdc".to_vec();
    out.extend_from_slice(&(hashes.len() as u16).to_be_bytes());
    out.extend(hashes);
    out.extend_from_slice(b"\xc0\x90\x10\xc0");
    out
}

fn register(events: EventSource) -> RegisterInstance {
    RegisterInstance {
        capacity_tokens: 1_000_000,
        events: Some(events),
        ..RegisterInstance::new("e0", "m", 16, InstancePart::Mixed)
    }
}

/// Polls until the engine has this many blocks, and its index is degraded or is not.
async fn until(router: &Client, blocks: u32, degraded: bool) {
    let context = PromptContext { model: "m".to_owned(), block_tokens: 16, ..PromptContext::default() };
    let query = QueryPrefix { context, hashes: (1..100).collect(), most: 4, tier: BlockTier::Gpu };
    loop {
        let holders = router.call(&query).await.expect("served").holders;
        let held = holders.first().map_or((0, false), |holder| (holder.gpu_tokens, holder.degraded));
        if held == (blocks * 16, degraded) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn control() -> ControlHandle {
    let mut config = ControlConfig::new("test");
    config.conductor = Some(ConductorConfig::default());
    ControlServer::start(config).expect("a control plane")
}

/// Publisher and replay sockets of an engine, with their event source.
async fn ports(topic: &str) -> (TcpListener, TcpListener, EventSource) {
    let publisher = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let replay = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = |listener: &TcpListener| format!("tcp://{}", listener.local_addr().expect("bound"));
    let source = EventSource { publisher: url(&publisher), replay: url(&replay), topic: topic.to_owned() };
    (publisher, replay, source)
}

#[test]
fn gaps_are_replayed_and_a_restarted_engine_begins_with_nothing() {
    let control = control();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let (publisher, replay, source) = ports("kv").await;
        router.call(&register(source)).await.expect("room");
        let end = (-1i64).to_be_bytes();
        let number = |seq: u64| seq.to_be_bytes();

        let mut live = accept(&publisher, "PUB").await;
        assert_eq!(read_frame(&mut live).await, b"\x01kv");
        // The follower requests the missed batches in three frames, of which the router takes the first.
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(0).to_vec()));
        send(&mut past, &[b"", &number(0), &stored(1..4)]).await;
        send(&mut past, &[b"", &end, b""]).await;
        // It has all from the beginning on.
        until(&router, 3, false).await;
        // A replayed batch arrives again, then the next one.
        send(&mut live, &[b"kv@e0", &number(0), &stored(1..4)]).await;
        send(&mut live, &[b"kv@e0", &number(1), &stored(4..6)]).await;
        until(&router, 5, false).await;
        // A gap that the replay fills.
        send(&mut live, &[b"kv@e0", &number(3), &stored(8..10)]).await;
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(2).to_vec()));
        send(&mut past, &[b"", &number(2), &stored(6..8)]).await;
        send(&mut past, &[b"", &end, b""]).await;
        until(&router, 9, false).await;
        // A gap that the replay does not fill: the former blocks are dropped, and the index is degraded.
        send(&mut live, &[b"kv@e0", &number(7), &stored(1..3)]).await;
        let mut past = accept(&replay, "ROUTER").await;
        read_frame(&mut past).await;
        read_frame(&mut past).await;
        send(&mut past, &[b"", &end, b""]).await;
        // It may hold more than is known.
        until(&router, 2, true).await;
        // A batch that cannot be read may have had removals: the former blocks are dropped.
        send(&mut live, &[b"kv@e0", &number(8), b"\xc1"]).await;
        until(&router, 0, true).await;
        send(&mut live, &[b"noise"]).await;
        send(&mut live, &[b"kv@e0", &number(9), &stored(1..5)]).await;
        until(&router, 4, true).await;

        // The engine restarts: its numbers start over, and its cache is empty.
        drop(live);
        let mut live = accept(&publisher, "PUB").await;
        read_frame(&mut live).await;
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(9).to_vec()));
        send(&mut past, &[b"", &end, b""]).await;
        // It has neither the last batch nor a later one, so its former cache is gone before it publishes anything.
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(0).to_vec()));
        send(&mut past, &[b"", &end, b""]).await;
        until(&router, 0, false).await;
        send(&mut live, &[b"kv@e0", &number(0), &stored(1..2)]).await;
        // All of it is known.
        until(&router, 1, false).await;
    });
}

#[test]
fn an_engine_without_a_replay_socket_is_degraded_after_an_interruption_until_its_next_batch() {
    let control = control();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let (publisher, _, source) = ports("").await;
        router.call(&register(EventSource { replay: String::new(), ..source })).await.expect("room");
        let mut live = accept(&publisher, "PUB").await;
        read_frame(&mut live).await;
        send(&mut live, &[b"", &0u64.to_be_bytes(), &stored(1..4)]).await;
        until(&router, 3, false).await;
        drop(live);
        let mut live = accept(&publisher, "PUB").await;
        read_frame(&mut live).await;
        // It may have removed them all meanwhile.
        until(&router, 3, true).await;
        send(&mut live, &[b"", &1u64.to_be_bytes(), &stored(4..6)]).await;
        until(&router, 5, false).await;
    });
}

#[test]
fn a_restarted_engine_is_known_from_its_first_batch_on_and_one_out_of_reach_is_degraded() {
    let control = control();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let (publisher, replay, source) = ports("").await;
        router.call(&register(source)).await.expect("room");
        let end = (-1i64).to_be_bytes();
        let number = |seq: u64| seq.to_be_bytes();
        // Accepts a connection, and the request for missed batches.
        let connect = async || {
            let mut live = accept(&publisher, "PUB").await;
            read_frame(&mut live).await;
            let mut past = accept(&replay, "ROUTER").await;
            read_frame(&mut past).await;
            let from = read_frame(&mut past).await;
            send(&mut past, &[b"", &end, b""]).await;
            (live, from)
        };
        let (mut live, _) = connect().await;
        for at in 0..3u8 {
            send(&mut live, &[b"", &number(at.into()), &stored(at + 1..at + 2)]).await;
        }
        until(&router, 3, false).await;

        // The restarted engine has published two batches before the reconnection: they count from the first on.
        drop(live);
        let (mut live, from) = connect().await;
        assert_eq!(from, number(2), "the last applied batch and what follows");
        send(&mut live, &[b"", &number(2), &stored(5..7)]).await;
        let mut past = accept(&replay, "ROUTER").await;
        read_frame(&mut past).await;
        assert_eq!(read_frame(&mut past).await, number(0));
        send(&mut past, &[b"", &number(0), &stored(1..3)]).await;
        send(&mut past, &[b"", &number(1), &stored(3..5)]).await;
        send(&mut past, &[b"", &end, b""]).await;
        // The first batch is known, and nothing is missing.
        until(&router, 6, false).await;

        // The publisher is gone: something may be missing from now on.
        drop((live, publisher));
        until(&router, 6, true).await;
    });
}

#[test]
fn a_restarted_engine_whose_numbers_go_on_is_noticed_by_its_last_batch() {
    let control = control();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let (publisher, replay, source) = ports("").await;
        router.call(&register(source)).await.expect("room");
        // Accepts a request for missed batches, and sends these.
        let answer = async |from: u64, batches: &[Vec<u8>]| {
            let mut past = accept(&replay, "ROUTER").await;
            read_frame(&mut past).await;
            assert_eq!(read_frame(&mut past).await, from.to_be_bytes());
            // One write, because the Conductor hangs up after a first batch that is not the one it knows.
            let mut bytes = Vec::new();
            for (at, batch) in batches.iter().enumerate() {
                bytes.extend(message(&[b"", &(from + at as u64).to_be_bytes(), batch]));
            }
            bytes.extend(message(&[b"", &(-1i64).to_be_bytes(), b""]));
            past.write_all(&bytes).await.expect("sent");
        };
        let connect = async || {
            let mut live = accept(&publisher, "PUB").await;
            read_frame(&mut live).await;
            live
        };
        let live = connect().await;
        answer(0, &[stored(1..4), stored(4..6)]).await;
        until(&router, 5, false).await;
        // The connection breaks, and the engine goes on.
        drop(live);
        let live = connect().await;
        answer(1, &[stored(4..6), stored(6..7)]).await;
        until(&router, 6, false).await;
        // It breaks again, and the engine has restarted and published more than before.
        drop(live);
        let mut live = connect().await;
        let anew = [stored(1..2), stored(9..10), stored(8..9), stored(10..11)];
        answer(2, &anew[2..]).await;
        answer(0, &anew).await;
        until(&router, 1, false).await;
        send(&mut live, &[b"", &4u64.to_be_bytes(), &stored(2..4)]).await;
        until(&router, 3, false).await;
    });
}

#[test]
fn invalid_publishers_are_retried_and_invalid_addresses_rejected() {
    let control = control();
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let bad = EventSource { publisher: "ipc:///tmp/x".to_owned(), replay: String::new(), topic: String::new() };
        match router.call(&register(bad)).await {
            Err(CallError::Refused(refusal)) => assert_eq!(refusal.code, RefusalCode::BadRequest as u16),
            other => panic!("refused, not {other:?}"),
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let publisher = format!("tcp://{}", listener.local_addr().expect("bound"));
        let source = EventSource { publisher, replay: String::new(), topic: String::new() };
        router.call(&register(source)).await.expect("room");
        let (mut stream, _) = listener.accept().await.expect("it comes");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("sent");
        // The follower reconnects, and accepts a publisher without a replay socket.
        let mut live = accept(&listener, "PUB").await;
        assert_eq!(read_frame(&mut live).await, b"\x01");
        send(&mut live, &[b"", &5u64.to_be_bytes(), &stored(1..5)]).await;
        // What came before is not known.
        until(&router, 4, true).await;
    });
}
