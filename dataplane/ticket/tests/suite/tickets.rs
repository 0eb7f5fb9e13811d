//! Verification of tickets: forged, changed, replayed and foreign ones, and rotation of keys.

use kvplane_ticket::{
    CHALLENGE_BYTES, Challenges, Credential, HandshakeTranscript, Keys, MOST_KEYS, Mint, Proof, ProofError, Rights,
    Role, TICKET_BYTES, Terms, Ticket, TicketError, TicketKey, TimeLine,
};
use proptest::prelude::*;

const NOW: u64 = 1_700_000_000;
const LIFETIME: u64 = 600;
const TERM: u64 = 3_600;
const OWN: [u8; CHALLENGE_BYTES] = [9; CHALLENGE_BYTES];
const CHALLENGE: [u8; CHALLENGE_BYTES] = [3; CHALLENGE_BYTES];

fn drawer(mut state: u64) -> impl FnMut(&mut [u8]) -> Result<(), ()> {
    move |out| {
        for byte in out {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        Ok(())
    }
}

fn mint(cluster: &str, seed: u64) -> Mint {
    Mint::new(cluster, LIFETIME, TERM, NOW, drawer(seed)).expect("it draws")
}

fn terms() -> Terms {
    Terms {
        role: Role::Client,
        rights: Rights::READ.and(Rights::WRITE),
        tenant: Some(7),
        holder: 11,
        incarnation: 0,
        epochs: (5, u64::MAX),
    }
}

fn keys_of(mint: &Mint) -> Keys {
    let mut keys = Keys::default();
    keys.learn(mint.keys().cloned(), TimeLine::default(), NOW);
    keys
}

const fn said<'a>(challenge: &'a [u8; CHALLENGE_BYTES], hello: &'a [u8]) -> HandshakeTranscript<'a> {
    HandshakeTranscript { challenge, hello }
}

#[test]
fn a_holder_and_a_shard_authenticate_each_other() {
    let mint = mint("a", 1);
    let credential = mint.issue(&terms(), NOW);
    let said = said(&CHALLENGE, b"hello");
    let proof = credential.prove(OWN, &said);
    assert_eq!(Proof::decode(&proof.encode()), Some(proof));
    assert_eq!(proof.encode().len(), Proof::BYTES);
    let checked = keys_of(&mint).check("a", &said, &proof).expect("it is the holder");
    let ticket = checked.ticket;
    assert_eq!((ticket.role, ticket.tenant, ticket.holder), (Role::Client, Some(7), 11));
    assert_eq!((ticket.epochs, ticket.valid), ((5, u64::MAX), (NOW, NOW + LIFETIME)));
    assert!(ticket.rights.has(Rights::READ) && ticket.rights.has(Rights::WRITE) && !ticket.rights.has(Rights::FETCH));

    let answer = checked.answer(&proof.own, &said, b"welcome");
    assert!(credential.is_answered(&proof.own, &said, b"welcome", &answer));
    assert!(!credential.is_answered(&proof.own, &said, b"welcame", &answer));
    assert!(!credential.is_answered(&[8; CHALLENGE_BYTES], &said, b"welcome", &answer));
    // The holder's proof is not valid as the shard's proof.
    assert!(!credential.is_answered(&proof.own, &said, b"welcome", &proof.mac));
}

#[test]
fn a_change_of_any_bit_is_detected() {
    let mint = mint("a", 1);
    let keys = keys_of(&mint);
    let said = said(&CHALLENGE, b"hello");
    let proof = mint.issue(&terms(), NOW).prove(OWN, &said).encode();
    for bit in 0..proof.len() * 8 {
        let mut changed = proof.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let changed = Proof::decode(&changed).expect("as long as before");
        assert!(keys.check("a", &said, &changed).is_err(), "bit {bit} of a proof is not looked at");
    }
}

#[test]
fn a_proof_is_valid_for_its_connection_only() {
    let mint = mint("a", 1);
    let keys = keys_of(&mint);
    let proof = mint.issue(&terms(), NOW).prove(OWN, &said(&CHALLENGE, b"hello"));
    for elsewhere in [said(&[4; CHALLENGE_BYTES], b"hello"), said(&CHALLENGE, b"hullo"), said(&CHALLENGE, b"hell")] {
        assert_eq!(keys.check("a", &elsewhere, &proof).err(), Some(ProofError::Invalid), "{elsewhere:?}");
    }
}

#[test]
fn foreign_and_forged_tickets_are_rejected() {
    let (ours, theirs) = (mint("a", 1), mint("b", 2));
    let said = said(&CHALLENGE, b"hello");
    let keys = keys_of(&ours);
    let foreign = theirs.issue(&terms(), NOW).prove(OWN, &said);
    assert_eq!(keys.check("a", &said, &foreign).err(), Some(ProofError::NoKey(theirs.present().id)));
    // Two clusters with the same key, as after copying a state: the secret depends on the cluster's name.
    let proof = ours.issue(&terms(), NOW).prove(OWN, &said);
    assert_eq!(keys.check("b", &said, &proof).err(), Some(ProofError::Invalid));
    // A forged ticket, under a key whose number is known.
    let ticket = Ticket {
        key: ours.present().id,
        role: Role::Admin,
        rights: Rights::READ,
        tenant: None,
        holder: 1,
        incarnation: 1,
        epochs: (0, u64::MAX),
        valid: (NOW, u64::MAX),
    };
    for secret in [[0; 32], [7; 32]] {
        let own = Credential::from_parts(&ticket.encode(), &secret).expect("the form is right");
        assert_eq!(keys.check("a", &said, &own.prove(OWN, &said)).err(), Some(ProofError::Invalid));
    }
    // A ticket seen on the wire, without its secret.
    let seen = ours.issue(&terms(), NOW).parts().0.to_vec();
    let own = Credential::from_parts(&seen, &[1; 32]).expect("the form is right");
    assert_eq!(keys.check("a", &said, &own.prove(OWN, &said)).err(), Some(ProofError::Invalid));
    assert!(Keys::default().is_empty());
    assert_eq!(Keys::default().check("a", &said, &proof).err(), Some(ProofError::NoKey(ours.present().id)));
}

#[test]
fn keys_are_published_before_their_first_ticket_and_until_their_last() {
    let mut mint = mint("a", 1);
    let mut draw = drawer(3);
    let said = said(&CHALLENGE, b"hello");
    let mut keys = keys_of(&mint);
    let early = mint.issue(&terms(), NOW).prove(OWN, &said);
    assert_eq!(mint.rotate(NOW + TERM - 1, false, &mut draw), Ok(false), "its term is not over");
    let then = NOW + TERM;
    assert_eq!(mint.rotate(then, false, &mut draw), Ok(true));
    // A shard that has received no keys since knows the key in use now, as it received that as the next one.
    let late = mint.issue(&terms(), then).prove(OWN, &said);
    assert!(keys.check("a", &said, &late).is_ok() && keys.check("a", &said, &early).is_ok());
    keys.learn(mint.keys().cloned(), TimeLine::default(), then);
    assert!(keys.check("a", &said, &early).is_ok(), "its tickets may still be good");
    let after = then + LIFETIME + 1;
    assert_eq!(mint.rotate(after, false, &mut draw), Ok(false));
    keys.learn(mint.keys().cloned(), TimeLine::default(), after);
    assert!(matches!(keys.check("a", &said, &early).err(), Some(ProofError::NoKey(_))), "no ticket of it is good");
    assert!(keys.check("a", &said, &late).is_ok());
    // Rotation at once, as after a leak.
    assert_eq!(mint.rotate(after, true, &mut draw), Ok(true));
    assert_eq!(mint.rotate(after, true, |_: &mut [u8]| Err(())), Err(()), "no randomness");
}

#[test]
fn keys_do_not_grow_without_limit() {
    let mut keys = Keys::default();
    let key = |id| TicketKey { id, secret: [id as u8; 32], until: NOW + id };
    keys.learn((0..100).map(key), TimeLine::default(), NOW);
    assert_eq!(keys.len(), MOST_KEYS);
    keys.learn([], TimeLine::default(), NOW + 98);
    assert_eq!(keys.len(), 2, "those that have ended go");
    // A key that is published again is kept once, with its latest contents.
    keys.learn([key(99), key(99)], TimeLine::default(), NOW + 98);
    assert_eq!(keys.len(), 2);
}

#[test]
fn keys_of_a_former_incarnation_are_resumed() {
    let first = mint("a", 1);
    let said = said(&CHALLENGE, b"hello");
    let keys = keys_of(&first);
    let mut second = mint("a", 2);
    second.resume(first.keys().cloned().collect(), NOW + 5);
    let proof = second.issue(&terms(), NOW + 5).prove(OWN, &said);
    assert!(keys.check("a", &said, &proof).is_ok(), "nodes that have not heard of the restart believe its tickets");
    assert!(first.keys().eq(second.keys()), "the next one too, and their ends");
    assert_eq!(second.rotate(NOW + TERM, false, drawer(9)), Ok(true), "its term goes on");
}

#[test]
fn secrets_are_not_shown() {
    let mint = mint("a", 1);
    let credential = mint.issue(&terms(), NOW);
    let secret = format!("{:?}", credential.parts().1);
    let key = format!("{:?}", mint.present().secret);
    let checked = keys_of(&mint)
        .check("a", &said(&CHALLENGE, b"h"), &credential.prove(OWN, &said(&CHALLENGE, b"h")))
        .expect("the holder");
    let challenges = Challenges::new([7; 32]);
    for shown in
        [format!("{credential:?}"), format!("{mint:?}"), format!("{checked:?}"), format!("{:?}", keys_of(&mint))]
    {
        assert!(!shown.contains(&secret) && !shown.contains(&key), "{shown}");
    }
    assert!(!format!("{challenges:?}").contains("7, 7"));
}

#[test]
fn challenges_never_come_twice() {
    let (mut one, mut other) = (Challenges::new([1; 32]), Challenges::new([2; 32]));
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..1_000 {
        assert!(seen.insert(one.draw()) && seen.insert(other.draw()));
    }
}

#[test]
fn tickets_have_these_bytes() {
    let ticket = Ticket {
        key: 0x0102_0304_0506_0708,
        role: Role::Client,
        rights: Rights::READ.and(Rights::WRITE),
        tenant: Some(0x0a0b_0c0d),
        holder: 2,
        incarnation: 3,
        epochs: (4, 5),
        valid: (6, 7),
    };
    let mut bytes = vec![1, 2, 3, 1, 0x0d, 0x0c, 0x0b, 0x0a, 8, 7, 6, 5, 4, 3, 2, 1];
    bytes.extend([2u64, 3, 4, 5, 6, 7, 0, 0].iter().flat_map(|word| word.to_le_bytes()));
    assert_eq!(ticket.encode().to_vec(), bytes);
    assert_eq!(Ticket::decode(&bytes), Ok(ticket));
    assert_eq!(Ticket::decode(&bytes[1..]), Err(TicketError::Length(TICKET_BYTES - 1)));
    for (at, value) in [(0, 2), (1, 0), (1, 4), (2, 8), (3, 2), (3, 0), (64, 1), (79, 1)] {
        let mut other = bytes.clone();
        other[at] = value;
        assert!(matches!(Ticket::decode(&other), Err(TicketError::Field(_))), "byte {at} may be {value}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(ticket) = Ticket::decode(&bytes) {
            prop_assert_eq!(ticket.encode().to_vec(), bytes.clone());
        }
        if let Some(proof) = Proof::decode(&bytes) {
            prop_assert_eq!(proof.encode(), bytes.clone());
            let mint = mint("a", 1);
            prop_assert!(keys_of(&mint).check("a", &said(&CHALLENGE, b""), &proof).is_err());
        }
    }
}
