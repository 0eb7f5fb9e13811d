//! Engines' events over ZeroMQ: publishers and replay sockets of our own, spoken by hand on real sockets.

mod support;

use std::time::Duration;

use kvplane_rpc::conductor::*;
use kvplane_rpc::{CallError, Client, RefusalCode, Role};
use kvplane_server::{ControlConfig, ControlServer, DeskConfig};
use support::{client, run};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A peer of ZMTP, from its greeting on.
async fn accept(listener: &TcpListener, kind: &str) -> TcpStream {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let mut greeting = vec![0u8; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    let property = [b"\x05READY\x0bSocket-Type\0\0\0".as_slice(), &[kind.len() as u8], kind.as_bytes()].concat();
    greeting.extend([4, property.len() as u8]);
    greeting.extend_from_slice(&property);
    stream.write_all(&greeting).await.expect("sent");
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await.expect("a greeting");
    assert_eq!((theirs[0], theirs[9] & 1, theirs[10]), (0xff, 1, 3));
    let ready = read_frame(&mut stream).await;
    assert!(ready.starts_with(b"\x05READY"));
    stream
}

async fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).await.expect("a frame");
    let mut body = vec![0; usize::from(head[1])];
    stream.read_exact(&mut body).await.expect("a body");
    body
}

async fn send(stream: &mut TcpStream, parts: &[&[u8]]) {
    let mut out = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        out.push(if at + 1 < parts.len() { 1 } else { 0 } | 2);
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part);
    }
    stream.write_all(&out).await.expect("sent");
}

/// `[0, [["BlockStored", hashes, nil, [], 16, nil]]]`, of hashes below 128.
fn stored(hashes: std::ops::Range<u8>) -> Vec<u8> {
    let mut out = b"\x92\0\x91\x96\xabBlockStored\xdc".to_vec();
    out.extend_from_slice(&(hashes.len() as u16).to_be_bytes());
    out.extend(hashes);
    out.extend_from_slice(b"\xc0\x90\x10\xc0");
    out
}

fn register(events: EventSource) -> RegisterInstance {
    RegisterInstance {
        instance: "e0".to_owned(),
        life: 1,
        tenant: String::new(),
        model: "m".to_owned(),
        block_tokens: 16,
        token_bytes: 0,
        part: InstancePart::Mixed,
        capacity_tokens: 1_000_000,
        report_ns: 0,
        address: String::new(),
        events: Some(events),
    }
}

/// Asks until the engine has so many blocks, and says whether something is not known of it.
async fn until(router: &Client, blocks: u32) -> bool {
    let context = PromptContext { model: "m".to_owned(), block_tokens: 16, ..PromptContext::default() };
    let query = QueryPrefix { context, hashes: (1..100).collect(), most: 4, tier: BlockTier::Gpu };
    loop {
        let holders = router.call(&query).await.expect("served").holders;
        if let Some(holder) = holders.first().filter(|holder| holder.gpu_tokens == blocks * 16) {
            return holder.degraded;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn gaps_are_replayed_and_a_restarted_engine_begins_with_nothing() {
    let mut config = ControlConfig::new("test");
    config.conductor = Some(DeskConfig::default());
    let control = ControlServer::start(config).expect("a control plane");
    run(async {
        let router = client(control.local(), Role::Scheduler).await;
        let publisher = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let replay = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = |listener: &TcpListener| format!("tcp://{}", listener.local_addr().expect("bound"));
        let source = EventSource { publisher: url(&publisher), replay: url(&replay), topic: "kv".to_owned() };
        router.call(&register(source)).await.expect("room");
        let end = (-1i64).to_be_bytes();
        let number = |seq: u64| seq.to_be_bytes();

        let mut live = accept(&publisher, "PUB").await;
        assert_eq!(read_frame(&mut live).await, b"\x01kv");
        // It asks for what it missed: in three frames, of which the router takes the first.
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(0).to_vec()));
        send(&mut past, &[b"", &number(0), &stored(1..4)]).await;
        send(&mut past, &[b"", &end, b""]).await;
        assert!(!until(&router, 3).await, "it has all from the beginning on");
        // One that was replayed comes again, then the next.
        send(&mut live, &[b"kv@e0", &number(0), &stored(1..4)]).await;
        send(&mut live, &[b"kv@e0", &number(1), &stored(4..6)]).await;
        assert!(!until(&router, 5).await);
        // A gap that the replay fills.
        send(&mut live, &[b"kv@e0", &number(3), &stored(8..10)]).await;
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(2).to_vec()));
        send(&mut past, &[b"", &number(2), &stored(6..8)]).await;
        send(&mut past, &[b"", &end, b""]).await;
        assert!(!until(&router, 9).await);
        // A gap that it does not fill: what was known is forgotten, and that is said.
        send(&mut live, &[b"kv@e0", &number(7), &stored(1..3)]).await;
        let mut past = accept(&replay, "ROUTER").await;
        read_frame(&mut past).await;
        read_frame(&mut past).await;
        send(&mut past, &[b"", &end, b""]).await;
        assert!(until(&router, 2).await, "it may hold more than is known");
        // What is no batch costs nothing but itself.
        send(&mut live, &[b"kv@e0", &number(8), b"\xc1"]).await;
        send(&mut live, &[b"noise"]).await;
        send(&mut live, &[b"kv@e0", &number(9), &stored(3..5)]).await;
        assert!(until(&router, 4).await);

        // The engine starts again: its numbers begin anew, and its cache is empty.
        drop(live);
        let mut live = accept(&publisher, "PUB").await;
        read_frame(&mut live).await;
        let mut past = accept(&replay, "ROUTER").await;
        assert_eq!((read_frame(&mut past).await, read_frame(&mut past).await), (vec![], number(10).to_vec()));
        send(&mut past, &[b"", &end, b""]).await;
        send(&mut live, &[b"kv@e0", &number(0), &stored(1..2)]).await;
        assert!(!until(&router, 1).await, "all of it is known");
    });
}

#[test]
fn a_publisher_that_is_none_is_left_alone_and_bad_addresses_are_refused() {
    let mut config = ControlConfig::new("test");
    config.conductor = Some(DeskConfig::default());
    let control = ControlServer::start(config).expect("a control plane");
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
        // It comes again, and is content with a publisher that has no replay.
        let mut live = accept(&listener, "PUB").await;
        assert_eq!(read_frame(&mut live).await, b"\x01");
        send(&mut live, &[b"", &5u64.to_be_bytes(), &stored(1..5)]).await;
        assert!(until(&router, 4).await, "what came before is not known");
    });
}
