//! HMAC-SHA256 with domain separation: a word for each purpose, so that no result is valid for another purpose.

use ring::hmac;

/// Length of a key, and of the secret of a ticket, in bytes.
pub const SECRET_BYTES: usize = 32;
/// Length of a shard's challenge, and of the holder's nonce, in bytes.
pub const CHALLENGE_BYTES: usize = 32;
/// Length of an HMAC in bytes.
pub const PROOF_BYTES: usize = 32;

/// Purpose of an HMAC.
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

/// Feeds the parts, each behind its length, so that their boundaries are unambiguous.
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

/// Verifies an HMAC in constant time.
pub(crate) fn is_sum(
    secret: &[u8; SECRET_BYTES],
    purpose: Purpose,
    parts: &[&[u8]],
    claimed: &[u8; PROOF_BYTES],
) -> bool {
    let computed = sum(secret, purpose, parts);
    // Both sides are HMACs again under the same key, so they have equal lengths and only their contents are compared.
    // Without the key, two of them are equal only if their inputs are, and the position of a difference says nothing
    // about the inputs.
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    hmac::verify(&key, claimed, hmac::sign(&key, &computed).as_ref()).is_ok()
}

/// Generator of unpredictable, unique challenges, from a random seed of 32 bytes.
#[derive(Clone)]
pub struct Challenges {
    seed: [u8; SECRET_BYTES],
    next: u64,
}

impl Challenges {
    /// Creates a generator. The seed has to be random and secret.
    #[must_use]
    pub const fn new(seed: [u8; SECRET_BYTES]) -> Self {
        Self { seed, next: 0 }
    }

    /// Returns the next challenge.
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
