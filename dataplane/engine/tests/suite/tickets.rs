//! Tests of a shard that requires tickets, on real sockets: holders over every path, unauthenticated peers, replayed
//! handshakes, floods.

use crate::support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, Path, PeerAddress, PeerId, Request, SegmentTarget};
use kvplane_engine::{
    HostConfig, HugePages, Initiator, Pacing, RdmaDevices, Region, RegionOptions, Shard, ShardConfig, ShardHandle,
};
use kvplane_proto::frame::{HEADER_BYTES, Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, RequestId, ShardId};
use kvplane_proto::message::{DigestItem, Hello, Item, Kind, Operation};
use kvplane_proto::{Digest, SegmentId, Status};
use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_store::service::SegmentInfo;
use kvplane_ticket::{Challenges, Credential, HandshakeTranscript, Mint, Proof, Rights, Role, Terms};
use kvplane_transport::{RdmaOptions, UnauthenticatedLimits};

const DEADLINE: Duration = Duration::from_secs(30);
const BYTES: u64 = 64 << 10;
const NOW: u64 = 1_700_000_000;

fn drawer(mut state: u64) -> impl FnMut(&mut [u8]) -> Result<(), ()> {
    move |out| {
        for byte in out {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        Ok(())
    }
}

fn mint(seed: u64) -> Mint {
    Mint::new("test", 600, 3_600, NOW, drawer(seed)).expect("it draws")
}

fn terms() -> Terms {
    let rights = Rights::READ.and(Rights::WRITE);
    Terms { role: Role::Client, rights, tenant: None, holder: 1, incarnation: 0, epochs: (0, u64::MAX) }
}

fn devices(fabric: &Loopback, names: [&str; 2]) -> RdmaDevices {
    RdmaDevices {
        verbs: fabric.verbs(),
        names: names.into_iter().map(str::to_owned).collect(),
        preferred: 0,
        near: Arc::default(),
        options: RdmaOptions::default(),
    }
}

struct Bed {
    shard: ShardHandle,
    segment: SegmentId,
    fabric: Loopback,
    mint: Mint,
}

/// Creates a shard that requires tickets, with a segment; it has the keys.
fn bed(unauthenticated: UnauthenticatedLimits, shm: Option<std::path::PathBuf>) -> Bed {
    let (fabric, mint) = (Loopback::new(&[SoftPort::default(); 4]), mint(1));
    let tickets = Some(Challenges::new([7; 32]));
    let rdma = Some(devices(&fabric, ["loop2", "loop3"]));
    let mut config = ShardConfig {
        host: HostConfig { tickets, unauthenticated, rdma, ..HostConfig::default() },
        ..support::config()
    };
    config.listen.shm = shm;
    let shard = Shard::start(config).expect("a shard on loopback");
    let theirs = region("theirs");
    let info = SegmentInfo {
        address: theirs.address(),
        bytes: BYTES,
        writable: true,
        shareable: true,
        remote_accessible: true,
    };
    let segment = shard.register(info, theirs).expect("a free range");
    shard.learn_keys(mint.keys().cloned().collect(), NOW).expect("room in its mailbox");
    Bed { shard, segment, fabric, mint }
}

fn region(name: &str) -> Arc<Region> {
    let options = RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new(name, BYTES as usize) };
    Region::allocate(&options).expect("memory")
}

struct Asker {
    initiator: Initiator,
    peer: PeerId,
    buffer: u32,
    segment: SegmentId,
}

impl Bed {
    fn asker(&self, path: Path, credential: Option<&Credential>) -> Asker {
        let shm = self.shard.shm().filter(|_| path == Path::Shared).map(|path| path.display().to_string());
        let config = Config {
            cluster: "test".to_owned(),
            client: 5,
            stream: path == Path::Stream,
            shared: path == Path::Shared,
            ..Config::default()
        };
        let rdma = (path == Path::Rdma).then(|| devices(&self.fabric, ["loop0", "loop1"]));
        let host = HostConfig { rdma, ..HostConfig::default() };
        let mut initiator = Initiator::new(config, &host, Pacing::Park).expect("an initiator");
        if let Some(credential) = credential {
            initiator.set_credential(Arc::new(credential.clone()));
        }
        let buffer = initiator.add_buffer(region("ours"));
        let peer = initiator.open_peer(PeerAddress::native(self.shard.address(), shm));
        Asker { initiator, peer, buffer, segment: self.segment }
    }
}

impl Asker {
    fn write(&mut self, within: Duration) -> Status {
        let target = SegmentTarget {
            peer: self.peer,
            segment: self.segment,
            offset: 0,
            shareable: true,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = Local { buffer: self.buffer, offset: 0, bytes: BYTES };
        let batch = self.initiator.submit(&[Request::Write(target, local)], within).expect("a valid batch");
        self.initiator.wait(batch).expect("a working host");
        let status = self.initiator.results(batch)[0].status;
        self.initiator.release(batch);
        status
    }
}

/// Peer that sends arbitrary frames.
struct Raw(TcpStream);

impl Raw {
    fn connect(at: SocketAddr) -> Self {
        let stream = TcpStream::connect(at).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
        Self(stream)
    }

    fn ask(&mut self, operation: Operation, body: &[u8]) {
        let header = Header::request(Kind::Request(operation), RequestId::default()).with_body(body, 1);
        // The connection may have been closed; then there is no answer.
        let _ = self.0.write_all(&header.encode()).and_then(|()| self.0.write_all(body));
    }

    /// Reads the next answer; `None` at the connection's end.
    fn answer(&mut self) -> Option<(Status, Vec<u8>)> {
        let mut bytes = [0; HEADER_BYTES];
        self.0.read_exact(&mut bytes).ok()?;
        let header = Header::decode(&bytes).expect("a header");
        let mut body = vec![0; header.body_bytes as usize];
        self.0.read_exact(&mut body).ok()?;
        Some((header.status, body))
    }

    fn challenge(&mut self) -> [u8; 32] {
        self.ask(Operation::Hello, &hello());
        let (status, body) = self.answer().expect("an answer");
        assert_eq!(status, Status::Prove);
        body.try_into().expect("a challenge")
    }

    fn proof(&mut self, body: &[u8]) -> Option<Status> {
        self.ask(Operation::Prove, body);
        self.answer().map(|(status, _)| status)
    }
}

fn hello() -> Vec<u8> {
    Hello {
        version_min: VERSION,
        version_max: VERSION,
        client: 4,
        connection: 1,
        node: NodeId(1),
        incarnation: Incarnation(7),
        shard: ShardId(0),
        lane: 0,
        fetches: false,
        cluster: "test".to_owned(),
    }
    .encode()
}

fn prove(credential: &Credential, challenge: &[u8; 32]) -> Vec<u8> {
    credential.prove([3; 32], &HandshakeTranscript { challenge, hello: &hello() }).encode()
}

#[test]
fn holders_get_in_over_every_path() {
    let path = std::env::temp_dir().join(format!("kvplane-tickets-{}.shm", std::process::id()));
    let bed = bed(UnauthenticatedLimits::default(), Some(path));
    let credential = bed.mint.issue(&terms(), NOW);
    for path in [Path::Stream, Path::Rdma, Path::Shared] {
        let mut asker = bed.asker(path, Some(&credential));
        assert_eq!(asker.write(DEADLINE), Status::Ok, "{path:?}: {:?}", asker.initiator.last_problem());
    }
    assert_eq!(bed.shard.snapshot().expect("it answers").service.unauthenticated, 0);
}

#[test]
fn peers_without_a_valid_ticket_are_refused_over_every_path() {
    let bed = bed(UnauthenticatedLimits::default(), None);
    let foreign = mint(2).issue(&terms(), NOW);
    let seen = bed.mint.issue(&terms(), NOW);
    let made_up = Credential::from_parts(seen.parts().0, &[9; 32]).expect("the form is right");
    for path in [Path::Stream, Path::Rdma] {
        assert_eq!(bed.asker(path, Some(&made_up)).write(DEADLINE), Status::Unauthorized, "{path:?}");
        // The shard may not have the key yet, so the client retries.
        let waited = bed.asker(path, Some(&foreign)).write(Duration::from_millis(300));
        assert_eq!(waited, Status::DeadlineExceeded, "{path:?}");
    }
    for path in [Path::Stream, Path::Rdma] {
        assert_eq!(bed.asker(path, None).write(DEADLINE), Status::Prove, "{path:?}");
    }
    let counted = bed.shard.snapshot().expect("it answers");
    assert_eq!(counted.service.greeted, 0);
    assert!(counted.service.unauthenticated > 0);
    assert_eq!(counted.service.write_bytes, 0);
}

#[test]
fn an_rdma_connection_is_not_made_for_a_stranger() {
    let bed = bed(UnauthenticatedLimits::default(), None);
    let mut raw = Raw::connect(bed.shard.address());
    raw.ask(Operation::Rdma, &[0; 64]);
    let (status, _) = raw.answer().expect("an answer");
    assert_eq!(status, Status::Prove);
    assert!(raw.answer().is_none(), "it is closed");
    // Nor for a peer that was challenged and sends no proof.
    let mut raw = Raw::connect(bed.shard.address());
    raw.challenge();
    raw.ask(Operation::Rdma, &[0; 64]);
    assert_eq!(raw.answer().map(|(status, _)| status), Some(Status::Prove));
}

#[test]
fn replayed_changed_and_forged_proofs_are_refused() {
    let bed = bed(UnauthenticatedLimits::default(), None);
    let credential = bed.mint.issue(&terms(), NOW);
    let at = bed.shard.address();
    let mut honest = Raw::connect(at);
    let challenge = honest.challenge();
    let recorded = prove(&credential, &challenge);
    assert_eq!(honest.proof(&recorded), Some(Status::Ok));
    // The whole handshake replayed, and each byte of a valid one changed.
    let mut replayed = Raw::connect(at);
    assert_ne!(replayed.challenge(), challenge);
    assert_eq!(replayed.proof(&recorded), Some(Status::Unauthorized));
    assert!(replayed.answer().is_none(), "and closed");
    for byte in 0..Proof::BYTES {
        let mut other = Raw::connect(at);
        let mut body = prove(&credential, &other.challenge());
        body[byte] ^= 0x10;
        let status = other.proof(&body);
        assert!(matches!(status, Some(Status::Unauthorized | Status::NoKey)), "byte {byte}: {status:?}");
    }
    // A request before the proof, and a frame that is too long for an unauthenticated peer.
    let mut early = Raw::connect(at);
    let mut question = Vec::new();
    DigestItem { digest: Digest(1) }.encode(&mut question);
    early.ask(Operation::Exists, &question);
    assert!(early.answer().is_none());
    let mut long = Raw::connect(at);
    long.ask(Operation::Hello, &[0; 4096]);
    assert!(long.answer().is_none());
    // The honest connection is unaffected.
    honest.ask(Operation::OpenSegment, b"segment");
    assert_eq!(honest.answer().map(|(status, _)| status), Some(Status::Ok));
}

#[test]
fn a_shard_that_knows_no_key_is_waited_for() {
    let bed = bed(UnauthenticatedLimits::default(), None);
    let late = mint(3);
    let mut asker = bed.asker(Path::Stream, Some(&late.issue(&terms(), NOW)));
    std::thread::scope(|scope| {
        let written = scope.spawn(|| asker.write(DEADLINE));
        // The client was refused at least once before the keys arrive.
        let until = Instant::now() + DEADLINE;
        while bed.shard.snapshot().expect("it answers").service.unauthenticated == 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        bed.shard.learn_keys(late.keys().cloned().collect(), NOW).expect("room in its mailbox");
        assert_eq!(written.join().expect("no panic"), Status::Ok);
    });
}

#[test]
fn a_shard_that_requires_no_ticket_is_not_trusted() {
    let shard = Shard::start(support::config()).expect("a shard on loopback");
    let bed = bed(UnauthenticatedLimits::default(), None);
    let credential = bed.mint.issue(&terms(), NOW);
    let impostor = Bed { shard, segment: bed.segment, fabric: bed.fabric.clone(), mint: mint(1) };
    let mut asker = impostor.asker(Path::Stream, Some(&credential));
    assert_eq!(asker.write(DEADLINE), Status::Unauthorized);
}

#[test]
fn a_newer_ticket_is_shown_on_the_connection_that_there_is() {
    let mut bed = bed(UnauthenticatedLimits::default(), None);
    let mut asker = bed.asker(Path::Stream, Some(&bed.mint.issue(&terms(), NOW)));
    assert_eq!(asker.write(DEADLINE), Status::Ok);
    for round in 1..=3 {
        assert_eq!(bed.mint.rotate(NOW + round, true, drawer(round)), Ok(true));
        bed.shard.learn_keys(bed.mint.keys().cloned().collect(), NOW + round).expect("room in its mailbox");
        asker.initiator.set_credential(Arc::new(bed.mint.issue(&terms(), NOW + round)));
        assert_eq!(asker.write(DEADLINE), Status::Ok);
    }
    let snapshot = bed.shard.snapshot().expect("it answers");
    assert_eq!((snapshot.service.unauthenticated, snapshot.service.closed), (0, 0));
    assert!(snapshot.host.accepted <= 2, "no connection was made anew");
}

#[test]
fn a_flood_of_silent_connections_is_bounded_and_blocks_no_client() {
    let limits = UnauthenticatedLimits { of_address: 24, total: 32, ..UnauthenticatedLimits::default() };
    let bed = bed(limits, None);
    let credential = bed.mint.issue(&terms(), NOW);
    let mut known = bed.asker(Path::Stream, Some(&credential));
    assert_eq!(known.write(DEADLINE), Status::Ok);
    let mut silent = Vec::new();
    for round in 0..300 {
        let mut raw = Raw::connect(bed.shard.address());
        match round % 3 {
            0 => raw.ask(Operation::Hello, &hello()),
            1 => drop(raw.0.write_all(&[0x4b; 40])),
            _ => {}
        }
        silent.push(raw);
        if round % 60 == 0 {
            assert_eq!(known.write(DEADLINE), Status::Ok, "whoever is in stays in");
            let mut new = bed.asker(Path::Stream, Some(&credential));
            assert_eq!(new.write(DEADLINE), Status::Ok, "who proves a ticket gets in");
        }
    }
    let until = Instant::now() + DEADLINE;
    let few = || bed.shard.snapshot().expect("it answers").connections <= 24 + 16;
    while !few() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let snapshot = bed.shard.snapshot().expect("it answers");
    assert!(snapshot.host.replaced_unauthenticated > 0, "nobody had to go");
    // Open connections: unauthenticated ones up to the limit, and two lanes of the authenticated client.
    assert!(snapshot.connections <= 24 + 16, "{} connections are open", snapshot.connections);
    assert_eq!(known.write(DEADLINE), Status::Ok);
}
