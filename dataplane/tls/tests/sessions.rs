//! Client and server in memory: certificates that the handshake accepts and rejects, and damage to records.

mod support;

use kvplane_tls::{
    DataTls, Handshake, Keychain, Material, OpenedRecord, PLAIN_BYTES, RECORD_BYTES, Session, Step, TlsError,
};
use support::{Authority, keychain};

/// One end: its handshake or session, and the bytes it has received.
struct End {
    handshake: Option<Box<Handshake>>,
    session: Option<Session>,
    arrived: Vec<u8>,
    failed: Option<TlsError>,
}

impl End {
    fn new(handshake: Box<Handshake>) -> Self {
        Self { handshake: Some(handshake), session: None, arrived: Vec::new(), failed: None }
    }

    /// Advances the handshake; returns the bytes to send.
    fn step(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(handshake) = self.handshake.take() {
            match handshake.advance(&mut self.arrived, &mut out) {
                Ok((used, step)) => {
                    self.arrived.drain(..used);
                    match step {
                        Step::More(handshake) => self.handshake = Some(handshake),
                        Step::Done(session) => self.session = Some(*session),
                    }
                }
                Err(error) => self.failed = Some(error),
            }
        }
        out
    }
}

/// Runs the handshake of a client and a server, with at most so many bytes at a time, until both are done or failed.
fn meet(client: &Keychain, server: &Keychain, at_once: usize) -> (End, End) {
    let mut ends =
        [End::new(Handshake::client(client).expect("keys")), End::new(Handshake::server(server).expect("keys"))];
    let mut wires = [Vec::new(), Vec::new()];
    for _ in 0..100_000 {
        let mut moved = false;
        for side in 0..2 {
            let sent = ends[side].step();
            moved |= !sent.is_empty();
            wires[side].extend(sent);
            let part = wires[side].len().min(at_once);
            moved |= part > 0;
            ends[1 - side].arrived.extend(wires[side].drain(..part));
        }
        if !moved {
            break;
        }
    }
    let [client, server] = ends;
    (client, server)
}

fn sessions(authority: &Authority) -> (Session, Session) {
    let client = keychain(DataTls::Require, authority.issue("client"));
    let server = keychain(DataTls::Require, authority.issue("node"));
    let (client, server) = meet(&client, &server, usize::MAX);
    assert!(client.failed.is_none() && server.failed.is_none(), "{:?} {:?}", client.failed, server.failed);
    (client.session.expect("done"), server.session.expect("done"))
}

fn sealed(session: &mut Session, plain: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    session.seal(plain, |record| out.extend(record)).expect("a record");
    out
}

fn opened(session: &mut Session, mut bytes: &mut [u8]) -> Result<Vec<u8>, TlsError> {
    let mut plain = Vec::new();
    while !bytes.is_empty() {
        let (taken, opened) = session.open(bytes)?;
        if let OpenedRecord::Data(data) = opened {
            plain.extend_from_slice(data);
        }
        assert!(taken > 0, "a whole record");
        bytes = &mut core::mem::take(&mut bytes)[taken..];
    }
    Ok(plain)
}

#[test]
fn handshakes_complete_with_any_fragmentation() {
    let authority = Authority::new();
    let client = keychain(DataTls::Require, authority.issue("client"));
    let server = keychain(DataTls::Require, authority.issue("node"));
    for at_once in [1, 7, 100, 1460, usize::MAX] {
        let (client, server) = meet(&client, &server, at_once);
        assert!(client.failed.is_none() && server.failed.is_none(), "{:?} {:?}", client.failed, server.failed);
        let (mut client, mut server) = (client.session.expect("done"), server.session.expect("done"));
        for bytes in [0, 1, 100, PLAIN_BYTES] {
            let plain = vec![bytes as u8; bytes];
            let mut record = sealed(&mut client, &plain);
            assert!(record.len() <= RECORD_BYTES);
            assert_eq!(opened(&mut server, &mut record).expect("as it was sent"), plain);
            let mut record = sealed(&mut server, &plain);
            assert_eq!(opened(&mut client, &mut record).expect("as it was sent"), plain);
        }
        assert_eq!(client.cipher(), server.cipher());
    }
}

#[test]
fn a_record_behind_the_handshake_belongs_to_the_session() {
    let authority = Authority::new();
    let (client, server) =
        (keychain(DataTls::Require, authority.issue("client")), keychain(DataTls::Require, authority.issue("node")));
    let (mut client, mut server) =
        (End::new(Handshake::client(&client).expect("keys")), End::new(Handshake::server(&server).expect("keys")));
    let hello = client.step();
    server.arrived.extend(hello);
    let flight = server.step();
    client.arrived.extend(flight);
    let last = client.step();
    let mut session = client.session.take().expect("done");
    server.arrived.extend(last);
    server.arrived.extend(sealed(&mut session, b"a frame"));
    assert!(server.step().is_empty() && server.failed.is_none(), "{:?}", server.failed);
    let mut other = server.session.take().expect("done");
    assert_eq!(opened(&mut other, &mut server.arrived).expect("a record"), b"a frame");
}

/// Returns the errors at both ends of a handshake between a client and a server with these identities.
fn refusal(client: Material, server: Material) -> (String, String) {
    let (client, server) = meet(&keychain(DataTls::Require, client), &keychain(DataTls::Require, server), usize::MAX);
    let mut client_says = client.failed.map(|error| error.to_string());
    // A client completes before the server has verified its certificate; the alert arrives as a record.
    if let Some(mut session) = client.session {
        let mut arrived = client.arrived;
        client_says = opened(&mut session, &mut arrived).err().map(|error| error.to_string());
    }
    (client_says.expect("an alert"), server.failed.expect("an error").to_string())
}

#[test]
fn invalid_certificates_are_rejected_with_the_reason_at_both_ends() {
    let (ours, other) = (Authority::new(), Authority::new());
    let cases = [
        ("ended", ours.issue_for("prod", "client", (2020, 2021)), ours.issue("node"), "has expired", "has expired"),
        (
            "not yet",
            ours.issue_for("prod", "client", (3990, 4000)),
            ours.issue("node"),
            "not valid yet",
            "not valid yet",
        ),
        (
            "server's ended",
            ours.issue("client"),
            ours.issue_for("prod", "node", (2020, 2021)),
            "has expired",
            "has expired",
        ),
        ("no node", ours.issue("client"), ours.issue("client"), "not for its role", "rejects our"),
        (
            "other name",
            ours.issue_for("test", "client", (2020, 4000)),
            ours.issue("node"),
            "not for its role",
            "rejects our",
        ),
    ];
    for (case, client, server, client_says, server_says) in cases {
        let (client, server) = refusal(client, server);
        assert!(client.contains(client_says), "{case}: the client says {client:?}");
        assert!(server.contains(server_says), "{case}: the server says {server:?}");
    }
    // Another cluster with the same name: each trusts its own authority only.
    let (client, server) = refusal(other.issue("client"), ours.issue("node"));
    assert!(client.contains("not from this cluster's authority"), "{client}");
    assert!(server.contains("authority"), "{server}");
    // A forged certificate, with our authority as its trust.
    let forged = Material { trust_pem: ours.issue("client").trust_pem, ..other.issue("client") };
    let (client, server) = refusal(forged, ours.issue("node"));
    assert!(server.contains("not from this cluster's authority"), "{server}");
    assert!(client.contains("authority"), "{client}");
}

#[test]
fn a_client_without_a_role_in_the_cluster_is_rejected() {
    let ours = Authority::new();
    let (client, server) = refusal(ours.issue("guest"), ours.issue("node"));
    assert!(server.contains("no role in this cluster"), "{server}");
    assert!(client.contains("rejects our certificate"), "{client}");
}

#[test]
fn a_changed_repeated_or_missing_record_is_refused() {
    let authority = Authority::new();
    for at in [0, 1, 3, 5, 50, 110] {
        let (mut client, mut server) = sessions(&authority);
        let mut record = sealed(&mut client, &[7; 100]);
        record[at] ^= 1;
        let outcome = server.open(&mut record);
        assert!(matches!(outcome, Err(_) | Ok((0, OpenedRecord::More))), "byte {at}: {outcome:?}");
    }
    let (mut client, mut server) = sessions(&authority);
    let (first, second) = (sealed(&mut client, b"first"), sealed(&mut client, b"second"));
    assert!(opened(&mut server, &mut second.clone()).is_err(), "one is missing");
    let (mut client, mut server) = sessions(&authority);
    let again = sealed(&mut client, b"first");
    assert_eq!(opened(&mut server, &mut again.clone()).expect("a record"), b"first");
    assert!(opened(&mut server, &mut again.clone()).is_err(), "it came before");
    // A record of another connection.
    let (_, mut server) = sessions(&authority);
    assert!(opened(&mut server, &mut first.clone()).is_err());
}

#[test]
fn an_incomplete_record_yields_no_plaintext() {
    let authority = Authority::new();
    let (mut client, mut server) = sessions(&authority);
    let record = sealed(&mut client, &[9; 1000]);
    for bytes in [0, 1, 4, 5, 6, 500, record.len() - 1] {
        let mut part = record[..bytes].to_vec();
        assert!(matches!(server.open(&mut part), Ok((0, OpenedRecord::More))), "{bytes} bytes");
    }
    assert_eq!(opened(&mut server, &mut record.clone()).expect("the whole"), [9; 1000]);
}

#[test]
fn keys_change_before_the_ciphers_limit_and_the_peer_follows() {
    let authority = Authority::new();
    let (mut client, mut server) = sessions(&authority);
    client.limit_records(3);
    let mut wire = Vec::new();
    for number in 0..10u8 {
        wire.extend(sealed(&mut client, &[number; 10]));
    }
    let plain = opened(&mut server, &mut wire).expect("under each key");
    assert_eq!(plain, (0..10u8).flat_map(|number| [number; 10]).collect::<Vec<_>>());
    let mut back = sealed(&mut server, b"back");
    assert_eq!(opened(&mut client, &mut back).expect("the other way is as it was"), b"back");
}

#[test]
fn close_notify_is_reported_as_an_orderly_end() {
    let authority = Authority::new();
    let (mut client, mut server) = sessions(&authority);
    let mut end = client.close().expect("a record");
    assert!(matches!(server.open(&mut end), Ok((_, OpenedRecord::Closed))));
}

#[test]
fn garbage_ends_a_handshake_without_a_panic() {
    let authority = Authority::new();
    let server = keychain(DataTls::Offer, authority.issue("node"));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut byte = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let hello = Handshake::client(&keychain(DataTls::Require, authority.issue("client"))).expect("keys");
    let mut good = Vec::new();
    hello.advance(&mut [], &mut good).expect("a hello");
    for round in 0..3000 {
        let mut bytes: Vec<u8> = if round % 3 == 0 { (0..300).map(|_| byte()).collect() } else { good.clone() };
        for _ in 0..round % 5 {
            let at = usize::from(byte()) * 256 + usize::from(byte());
            let length = bytes.len();
            bytes[at % length] = byte();
        }
        if round % 7 == 0 {
            bytes.truncate(usize::from(byte()));
        }
        if round % 3 == 0 && bytes.len() > 3 {
            bytes[..3].copy_from_slice(&[22, 3, 1]);
        }
        let mut end = End::new(Handshake::server(&server).expect("keys"));
        end.arrived = bytes;
        let answer = end.step();
        assert!(answer.len() < 8192 && end.session.is_none());
    }
}

#[test]
fn an_unusable_identity_leaves_the_previous_one() {
    let authority = Authority::new();
    let chain = Keychain::new(DataTls::Require, "node");
    let missing = Handshake::client(&chain).err().expect("there is none yet").to_string();
    assert!(missing.contains("no certificate for data connections yet"), "{missing}");
    let good = authority.issue("client");
    assert!(chain.set(good.clone()).expect("a good one") && !chain.set(good.clone()).expect("the same"));
    let mixed = Material { key_pem: authority.issue("client").key_pem, ..good };
    let why = chain.set(mixed).expect_err("another's key").to_string();
    assert!(why.contains("our certificate with its key"), "{why}");
    assert!(Handshake::client(&chain).is_ok());
    assert!(!format!("{:?} {:?}", authority.issue("node"), chain).contains("PRIVATE"));
}
