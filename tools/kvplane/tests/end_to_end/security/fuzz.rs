//! Fuzzing with broken frames: at the data ports, at the Unix sockets for shared memory, and over QUIC from a peer with
//! a valid certificate. No process panics, ends or grows, and a client beside them gets every byte right.
//!
//! Frames are built to pass the first checks: checksums and lengths are right more often than not, and the rest is
//! random, from numbers that protocols typically get wrong. `KVPLANE_FUZZ_SECONDS` sets the duration (`cargo x fuzz`);
//! `KVPLANE_SEED` repeats a run's frames, if not their order among threads.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvplane::rpc::{ClusterName, Identity, Role, RuntimeDirectory, Trust};
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::rng::Rng;
use quinn::rustls;
use quinn::rustls::pki_types::pem::PemObject;
use quinn::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::security::peers::hello_of;
use crate::support::{Process, Way, Workplace, text};

/// One valid frame of every message of the control protocol, with its name, in hex.
const GOLDEN: &str = include_str!("../../../../../control/rpc/tests/suite/golden_frames.txt");
/// Bytes of a control frame before its body; the last four are the body's length.
const RPC_HEADER_BYTES: usize = 12;
/// Time that a peer waits for a reply before it sends more, or gives up.
const GLANCE: Duration = Duration::from_millis(20);
/// Number of parts of a run after which the sizes of processes are printed.
const PARTS: u64 = 12;
/// Allowed growth of the processes after a quarter of the run.
const GROWTH_BYTES: u64 = 48 << 20;

fn environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Draws a number that protocols typically get wrong.
fn word(rng: &mut Rng) -> u64 {
    match rng.below(8) {
        0 => 0,
        1 => 1 + rng.below(8),
        2 => u64::MAX - rng.below(3),
        3 => 1 << rng.below(64),
        4 => (1 << rng.below(64)) - 1,
        5 => u64::from(u32::MAX) - rng.below(3),
        6 => rng.below(1 << 20),
        _ => rng.next_u64(),
    }
}

fn bytes(rng: &mut Rng, count: usize) -> Vec<u8> {
    let mut out: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| word(rng).to_le_bytes()).collect();
    out.truncate(count);
    out
}

/// Corrupts a frame somewhere: bits, a word, a missing or an additional piece.
fn spoil(rng: &mut Rng, frame: &mut Vec<u8>) {
    for _ in 0..=rng.below(3) {
        let at = rng.below(frame.len().max(1) as u64) as usize;
        match rng.below(4) {
            0 if !frame.is_empty() => frame[at] ^= 1 << rng.below(8),
            1 => {
                let new = word(rng).to_le_bytes();
                frame.iter_mut().skip(at).zip(new).for_each(|(byte, new)| *byte = new);
            }
            2 => frame.truncate(at),
            _ => {
                let count = rng.below(64) as usize;
                let more = bytes(rng, count);
                frame.splice(at..at, more);
            }
        }
    }
}

/// Builds a frame of the data protocol: any operation, items of any size, valid checksums.
fn data_frame(rng: &mut Rng) -> Vec<u8> {
    let operation = Operation::ALL[rng.below(Operation::ALL.len() as u64) as usize];
    let kind = if rng.chance(0.9) { Kind::Request(operation) } else { Kind::Reply(operation) };
    let (items, size) = (rng.below(9) as usize, 8 * rng.below(13) as usize);
    let more = if rng.chance(0.2) { rng.below(300) as usize } else { 0 };
    let body = bytes(rng, items * size + more);
    let mut header = Header::request(kind, RequestId::from_bits(word(rng))).with_body(&body, items);
    header.deadline_us = word(rng) as u32;
    let mut payload = Vec::new();
    if rng.chance(0.3) {
        payload = bytes(rng, rng.clone().below(5_000) as usize);
        let said = if rng.chance(0.7) { payload.len() as u64 } else { word(rng) };
        header = header.with_payload(said, rng.chance(0.5).then(|| word(rng)));
    }
    if rng.chance(0.3) {
        header = header.with_argument(word(rng));
    }
    let mut frame = [&header.encode()[..], &body, &payload].concat();
    if rng.chance(0.3) {
        spoil(rng, &mut frame);
    }
    frame
}

/// Sends frames on a stream until the other side closes it.
fn chat(rng: &mut Rng, stream: &mut (impl Read + Write), first: &[u8], sent: &AtomicU64) {
    if rng.chance(0.8) && stream.write_all(first).is_err() {
        return;
    }
    let mut answer = vec![0; 64 << 10];
    for _ in 0..rng.below(40) {
        let frame = data_frame(rng);
        sent.fetch_add(1, Ordering::Relaxed);
        if stream.write_all(&frame).is_err() {
            return;
        }
        // No reply within the time is a valid outcome too.
        if rng.chance(0.5) && matches!(stream.read(&mut answer), Ok(0)) {
            return;
        }
    }
}

fn at_data_port(mut rng: Rng, data: SocketAddr, cluster: &str, stop: &AtomicBool, sent: &AtomicU64) {
    let hello = hello_of(cluster, (VERSION, VERSION), 0);
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect(data) else { continue };
        stream.set_read_timeout(Some(GLANCE)).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
        chat(&mut rng, &mut stream, &hello, sent);
    }
}

fn at_unix_socket(mut rng: Rng, socket: &PathBuf, cluster: &str, stop: &AtomicBool, sent: &AtomicU64) {
    let hello = hello_of(cluster, (VERSION, VERSION), 0);
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = UnixStream::connect(socket) else { continue };
        stream.set_read_timeout(Some(GLANCE)).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
        chat(&mut rng, &mut stream, &hello, sent);
    }
}

/// Messages that a trusted peer may send with effect, and that take objects from others.
const ALLOWED: [&str; 3] = ["Join ", "Leave ", "Drain "];

/// Returns valid frames of the control protocol; all of them, or without the allowed ones.
fn golden(all: bool) -> Vec<Vec<u8>> {
    let frame = |line: &str| -> Option<Vec<u8>> {
        // Names may have several words.
        let hex = line.rsplit(' ').next()?;
        (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()).collect()
    };
    let wanted = |line: &&str| all || !ALLOWED.iter().any(|name| line.starts_with(name));
    GOLDEN.lines().filter(wanted).map(|line| frame(line).expect("hex")).collect()
}

fn control_frame(rng: &mut Rng, golden: &[Vec<u8>]) -> Vec<u8> {
    let mut frame = golden[rng.below(golden.len() as u64) as usize].clone();
    let mut body = frame.split_off(RPC_HEADER_BYTES.min(frame.len()));
    if rng.chance(0.9) {
        spoil(rng, &mut body);
    }
    if rng.chance(0.85) {
        frame[8..].copy_from_slice(&(body.len() as u32).to_le_bytes());
    }
    if rng.chance(0.05) {
        spoil(rng, &mut frame);
    }
    frame.extend(body);
    frame
}

fn quic_config(trust: &Trust, identity: &Identity) -> quinn::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trust.pem().as_bytes()).unwrap()).unwrap();
    let chain = CertificateDer::from_pem_slice(identity.certificate_pem().as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem().as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![chain], key)
        .unwrap();
    tls.alpn_protocols = vec![b"kvplane/1".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    quinn::ClientConfig::new(Arc::new(crypto))
}

/// Sends broken calls and datagrams from trusted peers, in every role.
fn over_quic(mut rng: Rng, place: &Workplace, all: bool, stop: &AtomicBool, sent: &AtomicU64) {
    let cluster = ClusterName::new(&place.cluster).unwrap();
    let local = RuntimeDirectory::at(place.runtime()).discover(&cluster).unwrap();
    let configs: Vec<_> = [Role::Node, Role::Client, Role::Scheduler, Role::Admin]
        .iter()
        .map(|role| quic_config(&local.trust, local.identity(*role).unwrap()))
        .collect();
    let (name, golden) = (format!("control.{cluster}.kvplane"), golden(all));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        while !stop.load(Ordering::Relaxed) {
            let config = configs[rng.below(configs.len() as u64) as usize].clone();
            let Ok(connection) = endpoint.connect_with(config, local.control, &name).unwrap().await else { continue };
            for _ in 0..rng.below(60) {
                let frame = control_frame(&mut rng, &golden);
                sent.fetch_add(1, Ordering::Relaxed);
                if rng.chance(0.1) {
                    // The datagram is too long, or the connection is closed.
                    let _ = connection.send_datagram(frame.into());
                    continue;
                }
                let Ok((mut send, mut receive)) = connection.open_bi().await else { break };
                let _ = send.write_all(&frame).await;
                if rng.chance(0.9) {
                    let _ = send.finish();
                }
                let _ = tokio::time::timeout(GLANCE, receive.read_to_end(1 << 20)).await;
            }
        }
    });
}

/// Puts and gets objects that no fuzzer may corrupt; returns their number.
fn honest(place: &Workplace, way: Way, stop: &AtomicBool) -> u64 {
    let mut client = place.client(way);
    let mut round = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let (key, size) = (format!("{way:?} {}", round % 50), 100 + (round * 7919 % 20_000) as usize);
        let value: Vec<u8> = (0..size).map(|at| (at as u64 ^ round) as u8).collect();
        client.upsert(key.as_bytes(), &value).unwrap();
        assert_eq!(client.get(key.as_bytes()).unwrap().as_deref(), Some(&value[..]), "{key} of round {round}");
        round += 1;
    }
    round
}

fn resident_bytes(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("RssAnon");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn broken_frames_do_no_harm() {
    let (seconds, seed) = (environment("KVPLANE_FUZZ_SECONDS", 5), environment("KVPLANE_SEED", 1));
    let place = Workplace::new("fuzzed");
    let mut dev = place.dev("32M", &["--shards", "2", "--conductor"]);
    let data = dev.data();
    // A cluster without objects of others, so that all messages may be sent to it.
    let alone = Workplace::new("alone");
    let state = alone.path("state");
    let mut plane =
        Process::start(alone.command(&["control", "--state", text(&state), "--conductor", "--log", "error"]));
    plane.wait_for("metrics on");
    let sockets: Vec<PathBuf> = place.left_over(".shm").iter().map(|name| place.runtime().join(name)).collect();
    let (stop, sent) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 4]);
    let rng = |name: &str| Rng::new(seed, name);
    let (rounds, growth, marks) = std::thread::scope(|scope| {
        let (stop, sent, place, alone) = (&stop, &sent, &place, &alone);
        scope.spawn(move || at_data_port(rng("port"), data, &place.cluster, stop, &sent[0]));
        for socket in &sockets {
            scope.spawn(move || at_unix_socket(rng("unix"), socket, &place.cluster, stop, &sent[1]));
        }
        scope.spawn(move || over_quic(rng("quic"), place, false, stop, &sent[2]));
        scope.spawn(move || over_quic(rng("plane"), alone, true, stop, &sent[3]));
        let honest = Way::BOTH.map(|way| scope.spawn(move || honest(place, way, stop)));
        let end = Instant::now() + Duration::from_secs(seconds);
        let (mut early, mut most, mut marks) = (0u64, 0u64, Vec::new());
        while Instant::now() < end && !honest.iter().any(std::thread::ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(100));
            let each = [&dev, &plane].map(resident_bytes);
            let now: u64 = each.iter().sum();
            let left = end.saturating_duration_since(Instant::now()).as_secs_f64();
            if seconds as f64 - left >= (marks.len() as u64 * seconds) as f64 / PARTS as f64 {
                marks.push(each.map(|bytes| bytes >> 10));
            }
            if left > 0.75 * seconds as f64 {
                early = now.max(early);
            }
            most = now.max(most);
        }
        stop.store(true, Ordering::Relaxed);
        let rounds = honest.map(|thread| thread.join().expect("an honest client was harmed"));
        (rounds, most.saturating_sub(early), marks)
    });
    dev.assert_alive();
    plane.assert_alive();
    let said = [dev.said(), plane.said()].concat().join("\n");
    assert!(!said.contains("panicked"), "{said}");
    assert!(growth < GROWTH_BYTES, "it grew by {growth} bytes");
    let sent = sent.map(AtomicU64::into_inner);
    println!("seed {seed}, {seconds} s: {sent:?} frames at data ports, Unix sockets, QUIC, QUIC alone;");
    println!("they grew by {growth} bytes; KiB of both, from the beginning in {PARTS} parts: {marks:?}");
    println!("{rounds:?} puts and gets of others");
    assert!(sent.iter().all(|&count| count > 100) && rounds.iter().all(|&count| count > 10), "{sent:?} {rounds:?}");
    assert!(place.run(&["ctl", "status"]).text().contains("active"));
    assert!(dev.stop().success() && plane.stop().success());
}
