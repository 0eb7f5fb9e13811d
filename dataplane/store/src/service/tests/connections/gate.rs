//! Tests of tickets: admission, expiry, and tenants.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, RequestId};
use kvplane_proto::message::{
    DigestItem, GetItem, Hello, Kind, ListItem, ListReply, ObjectName, Operation, PutItem, PutOptions, SizeReply,
};
use kvplane_proto::{Digest, Limits, Status};
use kvplane_ticket::{Challenge, Challenges, Credential, HandshakeTranscript, Mint, PROOF_BYTES, Rights, Role, Terms};

use crate::service::tests::rig::{Answer, CHECKSUM, Rig, ServiceOutput as Heard, body_of, digests, hello};
use crate::service::{CloseReason, Path, PayloadTo, PeerKey};

const NOW: u64 = 1_700_000_000;
const LIFETIME: u64 = 600;
const SECOND_NS: u64 = 1_000_000_000;

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
    Mint::new("test", LIFETIME, 3_600, NOW, drawer(seed)).expect("it draws")
}

fn terms() -> Terms {
    let rights = Rights::READ.and(Rights::WRITE);
    Terms { role: Role::Client, rights, tenant: None, holder: 99, incarnation: 0, epochs: (5, u64::MAX) }
}

/// Returns a shard that requires tickets and has the keys.
fn guarded(mint: &Mint) -> Rig {
    let mut rig = Rig::new();
    rig.service.control().want_tickets(Challenges::new([5; 32]));
    rig.service.control().learn_keys(mint.keys().cloned().collect(), NOW, rig.now_ns);
    rig
}

fn challenge(rig: &mut Rig, peer: PeerKey, hello: &Hello) -> Challenge {
    rig.ask(peer, Operation::Hello, &hello.encode(), 1);
    let answer = rig.answer();
    assert_eq!((answer.status(), answer.header.kind), (Status::Prove, Kind::Reply(Operation::Hello)));
    answer.body.try_into().expect("a challenge")
}

/// Proves a ticket; returns the status, and checks that a refusal closes the connection.
fn prove(rig: &mut Rig, peer: PeerKey, body: &[u8]) -> Status {
    rig.ask(peer, Operation::Prove, body, 1);
    match &rig.drain()[..] {
        [Heard::Answer(answer)] if answer.status() == Status::Ok => Status::Ok,
        [Heard::Answer(answer), Heard::Close(closed, reason)] => {
            assert_eq!((*closed, *reason), (peer, CloseReason::Refused(answer.status())));
            answer.status()
        }
        other => panic!("{other:?}"),
    }
}

fn proof(credential: &Credential, hello: &Hello, challenge: &Challenge) -> Vec<u8> {
    credential.prove([1; 32], &HandshakeTranscript { challenge, hello: &hello.encode() }).encode()
}

fn enter(rig: &mut Rig, path: Path, credential: &Credential, hello: &Hello) -> (PeerKey, Status) {
    let peer = rig.connect(path);
    let challenge = challenge(rig, peer, hello);
    let body = proof(credential, hello, &challenge);
    (peer, prove(rig, peer, &body))
}

fn named_put(rig: &mut Rig, peer: PeerKey, name: &ObjectName<'_>, tenant: u32) -> Answer {
    let options = PutOptions { tenant, ..PutOptions::default() };
    let item = PutItem::named(name, 10, &options);
    let mut body = body_of([item]);
    body.extend_from_slice(name.tenant);
    body.extend_from_slice(name.key);
    match rig.offer(peer, Operation::Put, &body, 10) {
        PayloadTo::Extent(_) => assert!(matches!(rig.drain()[..], [Heard::Tail(..)])),
        PayloadTo::Discard => rig.assert_quiet(),
        PayloadTo::Extents(_) => panic!("a put goes to one extent"),
    }
    rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
    rig.answer()
}

#[test]
fn a_holder_is_admitted_and_the_shard_authenticates_itself() {
    let mint = mint(1);
    let credential = mint.issue(&terms(), NOW);
    for path in [Path::Stream, Path::Shared] {
        let mut rig = guarded(&mint);
        let peer = rig.connect(path);
        let challenge = challenge(&mut rig, peer, &hello());
        assert!(!rig.service.inspect().is_welcome(peer));
        let body = proof(&credential, &hello(), &challenge);
        rig.ask(peer, Operation::Prove, &body, 1);
        let answer = rig.answer();
        assert_eq!((answer.status(), answer.header.kind), (Status::Ok, Kind::Reply(Operation::Prove)));
        let (welcome, own) = answer.body.split_last_chunk::<PROOF_BYTES>().expect("a proof");
        let hello = hello().encode();
        assert!(credential.is_answered(
            &[1; 32],
            &HandshakeTranscript { challenge: &challenge, hello: &hello },
            welcome,
            own
        ));
        assert!(rig.service.inspect().is_welcome(peer) && rig.service.inspect().may_carry(peer));
        assert!(!rig.exists(peer, 1));
        assert_eq!(rig.service.inspect().counters().greeted, 1);
    }
}

#[test]
fn a_client_without_a_valid_ticket_is_refused() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    // A request without a proof.
    let peer = rig.connect(Path::Stream);
    challenge(&mut rig, peer, &hello());
    assert!(!rig.service.inspect().may_carry(peer), "nothing is made for a stranger");
    rig.ask(peer, Operation::Exists, &digests([1]), 1);
    assert_eq!(rig.closed(peer), CloseReason::NotGreeted);
    // A proof without a challenge, a second greeting, and a malformed proof.
    let peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Prove, &[0; 144], 1);
    rig.assert_malformed(peer);
    let peer = rig.connect(Path::Stream);
    challenge(&mut rig, peer, &hello());
    rig.ask(peer, Operation::Hello, &hello().encode(), 1);
    rig.assert_malformed(peer);
    let peer = rig.connect(Path::Stream);
    challenge(&mut rig, peer, &hello());
    rig.ask(peer, Operation::Prove, &[0; 143], 1);
    rig.assert_malformed(peer);
    // A client that sends nothing after the challenge.
    let peer = rig.connect(Path::Stream);
    challenge(&mut rig, peer, &hello());
    rig.pass(Limits::HELLO_NS);
    assert_eq!(rig.closed(peer), CloseReason::NotGreeted);
    // A forged proof, with any bit of a valid one changed, or of another cluster.
    let good = mint.issue(&terms(), NOW);
    for byte in 0..144 {
        let peer = rig.connect(Path::Stream);
        let challenge = challenge(&mut rig, peer, &hello());
        let mut body = proof(&good, &hello(), &challenge);
        body[byte] ^= 1;
        let status = prove(&mut rig, peer, &body);
        assert!(matches!(status, Status::Unauthorized | Status::NoKey), "byte {byte}: {status}");
        rig.gone(peer);
    }
    let foreign = self::mint(2).issue(&terms(), NOW);
    assert_eq!(enter(&mut rig, Path::Stream, &foreign, &hello()).1, Status::NoKey);
    assert_eq!(rig.service.inspect().counters().greeted, 0);
    assert_eq!(rig.service.inspect().counters().unauthenticated, 145);
}

#[test]
fn a_recorded_proof_cannot_be_replayed() {
    let mint = mint(1);
    let credential = mint.issue(&terms(), NOW);
    let mut rig = guarded(&mint);
    let peer = rig.connect(Path::Stream);
    let first = challenge(&mut rig, peer, &hello());
    let recorded = proof(&credential, &hello(), &first);
    assert_eq!(prove(&mut rig, peer, &recorded), Status::Ok);
    let other = rig.connect(Path::Stream);
    assert_ne!(challenge(&mut rig, other, &hello()), first, "never twice");
    assert_eq!(prove(&mut rig, other, &recorded), Status::Unauthorized);
    // Nor for another greeting.
    let hello = Hello { client: 98, ..hello() };
    let other = rig.connect(Path::Stream);
    let again = challenge(&mut rig, other, &hello);
    let body = proof(&credential, &crate::service::tests::rig::hello(), &again);
    assert_eq!(prove(&mut rig, other, &body), Status::Unauthorized);
}

#[test]
fn a_shard_without_keys_answers_no_key() {
    let mint = mint(1);
    let mut rig = Rig::new();
    rig.service.control().want_tickets(Challenges::new([5; 32]));
    let peer = rig.connect(Path::Stream);
    rig.ask(peer, Operation::Hello, &hello().encode(), 1);
    match &rig.drain()[..] {
        [Heard::Answer(answer), Heard::Close(_, CloseReason::Refused(Status::NoKey))] => {
            assert_eq!(answer.status(), Status::NoKey);
        }
        other => panic!("{other:?}"),
    }
    rig.service.control().learn_keys(mint.keys().cloned().collect(), NOW, rig.now_ns);
    assert_eq!(enter(&mut rig, Path::Stream, &mint.issue(&terms(), NOW), &hello()).1, Status::Ok);
}

#[test]
fn a_ticket_expires_unless_it_is_renewed_on_its_connection() {
    let mut mint = mint(1);
    let mut rig = guarded(&mint);
    let credential = mint.issue(&terms(), NOW);
    let (left, status) = enter(&mut rig, Path::Stream, &credential, &hello());
    assert_eq!(status, Status::Ok);
    let renewed = rig.connect(Path::Stream);
    let asked = challenge(&mut rig, renewed, &hello());
    let body = proof(&credential, &hello(), &asked);
    assert_eq!(prove(&mut rig, renewed, &body), Status::Ok);
    // Time passes while the control plane is reachable.
    let mut seconds = NOW;
    let hear = |rig: &mut Rig, mint: &Mint, seconds: u64| {
        rig.service.control().learn_keys(mint.keys().cloned().collect(), seconds, rig.now_ns);
    };
    for _ in 0..20 {
        seconds += 15;
        rig.pass(15 * SECOND_NS);
        hear(&mut rig, &mint, seconds);
    }
    rig.assert_quiet();
    // Proved under a key that the shard receives shortly afterwards.
    assert_eq!(mint.rotate(seconds, true, drawer(3)), Ok(true));
    assert_eq!(mint.rotate(seconds, true, drawer(4)), Ok(true));
    let newer = mint.issue(&terms(), seconds);
    let body = proof(&newer, &hello(), &asked);
    rig.ask(renewed, Operation::Prove, &body, 1);
    assert_eq!(rig.answer().status(), Status::NoKey, "it is not closed for that");
    hear(&mut rig, &mint, seconds);
    assert_eq!(prove(&mut rig, renewed, &body), Status::Ok);
    // A ticket with which the connection would change its holder is refused.
    for _ in 0..22 {
        seconds += 15;
        rig.pass(15 * SECOND_NS);
        hear(&mut rig, &mint, seconds);
    }
    assert_eq!(rig.closed(left), CloseReason::TicketEnded);
    assert!(!rig.exists(renewed, 1), "the other one goes on");
    assert_eq!(rig.service.inspect().counters().tickets_ended, 1);
    assert_eq!(enter(&mut rig, Path::Stream, &credential, &hello()).1, Status::TicketEnded);
    let other = mint.issue(&Terms { holder: 7, ..terms() }, seconds);
    let body = proof(&other, &hello(), &asked);
    assert_eq!(prove(&mut rig, renewed, &body), Status::Unauthorized, "another holder");
}

#[test]
fn an_expired_ticket_is_refused() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let credential = mint.issue(&terms(), NOW);
    rig.service.control().learn_keys(mint.keys().cloned().collect(), NOW + LIFETIME + 31, rig.now_ns);
    assert_eq!(enter(&mut rig, Path::Stream, &credential, &hello()).1, Status::TicketEnded);
    let early = mint.issue(&Terms { epochs: (1, 4), ..terms() }, NOW + LIFETIME);
    assert_eq!(enter(&mut rig, Path::Stream, &early, &hello()).1, Status::TicketEnded, "of former maps");
}

#[test]
fn tickets_do_not_expire_while_the_control_plane_is_away() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let credential = mint.issue(&terms(), NOW);
    let (peer, _) = enter(&mut rig, Path::Stream, &credential, &hello());
    rig.pass(3_600 * SECOND_NS);
    rig.assert_quiet();
    assert!(!rig.exists(peer, 1));
    assert_eq!(enter(&mut rig, Path::Stream, &credential, &hello()).1, Status::Ok);
    // The control plane is back, and the ticket was not renewed.
    rig.service.control().learn_keys(mint.keys().cloned().collect(), NOW + 3_600, rig.now_ns);
    let mut closed = 0;
    for _ in 0..40 {
        rig.pass(60 * SECOND_NS);
        closed += rig.drain().len();
    }
    assert_eq!(closed, 2);
    assert_eq!(rig.service.inspect().counters().tickets_ended, 2);
}

/// Passes the time to a shard: by a control plane's wall clock, as versions before the ticket time did.
fn hear(rig: &mut Rig, mint: &Mint, seconds: u64) {
    rig.service.control().learn_keys(mint.keys().cloned().collect(), seconds, rig.now_ns);
}

#[test]
fn a_clock_jump_of_the_control_plane_locks_no_client_out() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let (before, _) = enter(&mut rig, Path::Stream, &mint.issue(&terms(), NOW), &hello());
    for second in 1..20 {
        rig.pass(SECOND_NS);
        hear(&mut rig, &mint, NOW + second + 7_200);
    }
    rig.pass(SECOND_NS);
    hear(&mut rig, &mint, NOW + 20);
    let ticket = mint.issue(&terms(), NOW + 20);
    let (peer, status) = enter(&mut rig, Path::Stream, &ticket, &hello());
    assert_eq!(status, Status::Ok, "a ticket that was made just now");
    // The ticket is valid for its lifetime, and no longer.
    let mut seconds = NOW + 20;
    for _ in 0..=LIFETIME / 20 {
        seconds += 20;
        rig.pass(20 * SECOND_NS);
        hear(&mut rig, &mint, seconds);
    }
    assert_eq!(rig.closed(before), CloseReason::TicketEnded, "what was proven before is over");
    assert!(!rig.exists(peer, 1));
    rig.pass(40 * SECOND_NS);
    hear(&mut rig, &mint, seconds + 40);
    rig.pass(SECOND_NS);
    assert_eq!(rig.closed(peer), CloseReason::TicketEnded);
}

#[test]
fn a_takeover_with_another_clock_locks_no_client_out() {
    for other_s in [NOW - 1_200, NOW + 1_200, 0] {
        let (first, second) = (mint(1), mint(2));
        let mut rig = guarded(&first);
        let (peer, _) = enter(&mut rig, Path::Stream, &first.issue(&terms(), NOW), &hello());
        rig.pass(SECOND_NS);
        hear(&mut rig, &second, other_s);
        assert_eq!(enter(&mut rig, Path::Stream, &second.issue(&terms(), other_s), &hello()).1, Status::Ok);
        assert_eq!(enter(&mut rig, Path::Stream, &first.issue(&terms(), NOW), &hello()).1, Status::Ok, "of the first");
        for second_s in 1..20 {
            rig.pass(30 * SECOND_NS);
            hear(&mut rig, &second, other_s + 30 * second_s);
            assert!(!rig.exists(peer, 1), "with {other_s}");
        }
        rig.pass(70 * SECOND_NS);
        hear(&mut rig, &second, other_s + 30 * 19 + 70);
        rig.pass(40 * SECOND_NS);
        assert_eq!(rig.service.inspect().counters().tickets_ended, 3, "all of them were old by then");
    }
}

#[test]
fn the_rights_of_tickets_are_enforced() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let (writer, _) = enter(&mut rig, Path::Stream, &mint.issue(&terms(), NOW), &hello());
    assert_eq!(rig.put(writer, 1, 10).status(), Status::Ok);
    let reads = mint.issue(&Terms { rights: Rights::READ, ..terms() }, NOW);
    let (reader, status) = enter(&mut rig, Path::Stream, &reads, &hello());
    assert_eq!(status, Status::Ok);
    assert!(rig.exists(reader, 1));
    assert_eq!(rig.put(reader, 2, 10).status(), Status::Unauthorized);
    rig.ask(reader, Operation::Remove, &digests([1]), 1);
    assert_eq!(rig.answer().status(), Status::Unauthorized);
    assert!(rig.exists(reader, 1), "it stays");
    assert_eq!(rig.service.inspect().counters().unauthorized, 2);
    // A process that maps the pool could write it.
    assert_eq!(enter(&mut rig, Path::Shared, &reads, &hello()).1, Status::Unauthorized);
    let nothing = mint.issue(&Terms { rights: Rights::NONE, ..terms() }, NOW);
    assert_eq!(enter(&mut rig, Path::Stream, &nothing, &hello()).1, Status::Unauthorized);
    // Only nodes fetch exported objects.
    let fetches = Hello { fetches: true, ..hello() };
    assert_eq!(enter(&mut rig, Path::Stream, &mint.issue(&terms(), NOW), &fetches).1, Status::Unauthorized);
    let rights = Rights::READ.and(Rights::WRITE).and(Rights::FETCH);
    let node = mint.issue(&Terms { role: Role::Node, rights, incarnation: 4, ..terms() }, NOW);
    assert_eq!(enter(&mut rig, Path::Stream, &node, &fetches).1, Status::Ok);
}

#[test]
fn a_ticket_for_one_tenant_reaches_no_other() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let of = |tenant: &str| mint.issue(&Terms { tenant: Some(tenant_number(tenant.as_bytes())), ..terms() }, NOW);
    let (a, _) = enter(&mut rig, Path::Stream, &of("a"), &hello());
    let (b, _) = enter(&mut rig, Path::Stream, &of("b"), &hello());
    let (all, _) = enter(&mut rig, Path::Stream, &mint.issue(&terms(), NOW), &hello());
    assert_eq!(enter(&mut rig, Path::Shared, &of("a"), &hello()).1, Status::Unauthorized, "the pool is everybody's");

    let (of_a, of_b) = (ObjectName { tenant: b"a", key: b"k" }, ObjectName { tenant: b"b", key: b"k" });
    let (number_a, number_b) = (tenant_number(b"a"), tenant_number(b"b"));
    assert_eq!(named_put(&mut rig, a, &of_a, number_a).status(), Status::Ok);
    assert_eq!(named_put(&mut rig, b, &of_b, number_b).status(), Status::Ok);
    // A client that states another tenant, in the name or in the options.
    let other = ObjectName { tenant: b"b", key: b"other" };
    assert_eq!(named_put(&mut rig, a, &other, number_a).status(), Status::Unauthorized);
    let plain = PutItem::plain(Digest(7), 10);
    assert_eq!(rig.offer(a, Operation::Put, &body_of([plain]), 10), PayloadTo::Discard);
    rig.done(a);
    assert_eq!(rig.answer().status(), Status::Unauthorized, "on the default tenant's account");

    let digest = |name: &ObjectName<'_>| name.digest();
    let ask = |rig: &mut Rig, peer, operation, digest: Digest| {
        rig.ask(peer, operation, &body_of([DigestItem { digest }]), 1);
        rig.answer()
    };
    let get = |rig: &mut Rig, peer, digest| {
        let item = GetItem { digest, request: RequestId { index: 1, generation: 9 }, capacity_bytes: 64 };
        rig.ask(peer, Operation::Get, &body_of([item]), 1);
        let answer = rig.answer();
        if let Some((_, hold)) = answer.payload {
            rig.service.sent(hold);
        }
        answer.status()
    };
    // Objects of another tenant are reported as missing, and are left as they are.
    for operation in [Operation::Exists, Operation::Remove] {
        assert_eq!(ask(&mut rig, a, operation, digest(&of_b)).bits()[..1], [false], "{operation:?}");
    }
    let size: SizeReply = ask(&mut rig, a, Operation::Size, digest(&of_b)).items()[0];
    assert_eq!(size.status, Status::NotFound);
    assert_eq!(get(&mut rig, a, digest(&of_b)), Status::NotFound);
    assert_eq!(get(&mut rig, a, digest(&of_a)), Status::Ok);
    assert_eq!(get(&mut rig, b, digest(&of_b)), Status::Ok);
    assert_eq!(get(&mut rig, all, digest(&of_b)), Status::Ok);
    assert!(ask(&mut rig, a, Operation::Exists, digest(&of_a)).bits()[0]);
    for (peer, items) in [(a, 1), (b, 1), (all, 2)] {
        let from = ListItem { digest: digest(&of_a), walk: 0, from: 0, flags: 0 };
        rig.ask(peer, Operation::List, &body_of([from]), 1);
        let pool = NoPool;
        while rig.service.drive_pool(&pool, rig.now_ns) {}
        let answer = rig.answer();
        let reply: ListReply = kvplane_proto::message::decode_items(&answer.body[..24], 1)
            .and_then(|mut items| items.next())
            .expect("a list's head");
        assert_eq!(reply.items, items);
    }
    assert_eq!(ask(&mut rig, a, Operation::Remove, digest(&of_a)).bits(), [true]);
}

#[test]
fn unnamed_objects_of_a_tenant_do_not_block_named_puts_of_others() {
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let (a, b) = (tenant_number(b"a"), tenant_number(b"b"));
    let of = |tenant| mint.issue(&Terms { tenant: Some(tenant), ..terms() }, NOW);
    let (one, _) = enter(&mut rig, Path::Stream, &of(a), &hello());
    let (other, _) = enter(&mut rig, Path::Stream, &of(b), &hello());
    let name = ObjectName { tenant: b"a", key: b"k" };
    let put = |rig: &mut Rig, peer, tenant, replace| {
        let options = PutOptions { tenant, replace, ..PutOptions::default() };
        rig.offer(peer, Operation::Put, &body_of([PutItem::plain(name.digest(), 10).with_options(&options)]), 10);
        // Tail of the object, if the put is accepted.
        rig.drain();
        rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
        rig.answer().status()
    };
    // The other tenant puts under a digest of a name of `one`'s tenant. To `one` the object does not exist, and its own
    // put is accepted.
    assert_eq!(put(&mut rig, other, b, false), Status::Ok);
    rig.ask(one, Operation::Exists, &body_of([DigestItem { digest: name.digest() }]), 1);
    assert_eq!(rig.answer().bits()[..1], [false]);
    assert_eq!(named_put(&mut rig, one, &name, a).status(), Status::Ok);
    // Now the object belongs to the tenant of `one`: the other tenant can neither put nor replace it, whether or not
    // the shard knows its tenant.
    assert_eq!(put(&mut rig, other, b, false), Status::Unauthorized);
    assert_eq!(put(&mut rig, other, b, true), Status::Unauthorized);
    rig.ask(one, Operation::Exists, &body_of([DigestItem { digest: name.digest() }]), 1);
    assert!(rig.answer().bits()[0]);
}

struct NoPool;

impl crate::service::PoolBytes for NoPool {
    fn read(&self, _: u64, into: &mut [u8]) {
        into.fill(0);
    }

    fn bytes(&self) -> u64 {
        u64::MAX
    }
}

#[test]
fn former_incarnations_of_nodes_are_fenced() {
    use kvplane_proto::map::{ClusterMap, Member, ShardAddress, SlotOwners};
    let mint = mint(1);
    let mut rig = guarded(&mint);
    let rights = Rights::READ.and(Rights::WRITE).and(Rights::FETCH);
    let node = |incarnation| Terms { role: Role::Node, rights, holder: 8, incarnation, ..terms() };
    let fetches = Hello { fetches: true, ..hello() };
    let (former, status) = enter(&mut rig, Path::Stream, &mint.issue(&node(4), NOW), &fetches);
    assert_eq!(status, Status::Ok);
    let member = |node, incarnation| Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        weight: 1,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: ([127, 0, 0, 1], 9).into(), shm: None }; 3],
    };
    let map = ClusterMap { epoch: Epoch(6), replicas: 1, members: vec![member(7, 3), member(8, 5)], former: None };
    rig.service.follow(1, &SlotOwners::of(&map));
    assert_eq!(rig.closed(former), CloseReason::Refused(Status::Stale));
    assert_eq!(enter(&mut rig, Path::Stream, &mint.issue(&node(4), NOW), &fetches).1, Status::Stale);
    assert_eq!(enter(&mut rig, Path::Stream, &mint.issue(&node(5), NOW), &fetches).1, Status::Ok);
}
