//! HMAC-SHA256, with a word for each purpose so that no result is ever of use for another.

use ring::hmac;

/// Bytes of a key, and of the secret of a ticket.
pub const SECRET_BYTES: usize = 32;
/// Bytes of what a shard challenges with, and of the holder's own number.
pub const CHALLENGE_BYTES: usize = 32;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;

/// What a result is for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Secret,
    Holder,
    Shard,
    Challenge,
    Peers,
}

impl Purpose {
    const fn word(self) -> &'static [u8; 16] {
        match self {
            Self::Secret => b"kvplane secret 1",
            Self::Holder => b"kvplane holder 1",
            Self::Shard => b"kvplane shard  1",
            Self::Challenge => b"kvplane ask    1",
            Self::Peers => b"kvplane peers  1",
        }
    }
}

/// The parts are told apart by their lengths, which are summed up too.
fn context(secret: &[u8; SECRET_BYTES], purpose: Purpose, parts: &[&[u8]]) -> hmac::Context {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
    context.update(purpose.word());
    for part in parts {
        context.update(&(part.len() as u64).to_le_bytes());
        context.update(part);
    }
    context
}

pub(crate) fn sum(secret: &[u8; SECRET_BYTES], purpose: Purpose, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
    let tag = context(secret, purpose, parts).sign();
    let mut out = [0; PROOF_BYTES];
    out.copy_from_slice(tag.as_ref());
    out
}

/// Whether this is the sum, in a time that does not tell how much of it is right.
pub(crate) fn is_sum(
    secret: &[u8; SECRET_BYTES],
    purpose: Purpose,
    parts: &[&[u8]],
    claimed: &[u8; PROOF_BYTES],
) -> bool {
    let computed = sum(secret, purpose, parts);
    // Of equal lengths, so that only their contents are compared: under a key that nobody else has, two sums are equal
    // only if what they sum is, and where they differ says nothing about where that does.
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    hmac::verify(&key, claimed, hmac::sign(&key, &computed).as_ref()).is_ok()
}

/// Numbers that nobody can guess and that never come twice, from 32 bytes that were drawn once.
#[derive(Clone)]
pub struct Challenges {
    seed: [u8; SECRET_BYTES],
    next: u64,
}

impl Challenges {
    /// From these bytes, which are random and nobody else's.
    #[must_use]
    pub const fn new(seed: [u8; SECRET_BYTES]) -> Self {
        Self { seed, next: 0 }
    }

    /// The next one.
    pub fn draw(&mut self) -> [u8; CHALLENGE_BYTES] {
        self.next += 1;
        sum(&self.seed, Purpose::Challenge, &[&self.next.to_le_bytes()])
    }
}

impl core::fmt::Debug for Challenges {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Challenges({} drawn)", self.next)
    }
}
