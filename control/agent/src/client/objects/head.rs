//! Stripe head: what names the stripes of a striped object.

use kvplane_proto::Digest;

/// Magic number of a stripe head.
const MAGIC: [u8; 8] = *b"KVPSTRP1";
/// Length of a stripe head: the magic number and four words.
pub(in crate::client) const HEAD_BYTES: usize = 40;
/// Minimum stripe size; only the last stripe of an object may be shorter.
pub(in crate::client) const STRIPE_LEAST_BYTES: u64 = 1 << 20;
/// Maximum number of stripes of one object.
pub(in crate::client) const STRIPES_MOST: u64 = 1 << 16;

/// Content of a stripe head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::client) struct Head {
    /// Length of the object in bytes.
    pub(in crate::client) bytes: u64,
    pub(in crate::client) stripe_bytes: u64,
    nonce: u128,
}

impl Head {
    pub(in crate::client) fn new(bytes: u64, stripe_bytes: u64, nonce: u128) -> Self {
        Self { bytes, stripe_bytes, nonce }
    }

    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out[16..24].copy_from_slice(&self.stripe_bytes.to_le_bytes());
        out[24..40].copy_from_slice(&self.nonce.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]));
        let nonce = u128::from(word(32)) << 64 | u128::from(word(24));
        let head = Self::new(word(8), word(16), nonce);
        let whole = bytes[..8] == MAGIC && head.stripe_bytes > 0 && head.bytes > 0;
        (whole && head.stripes() <= STRIPES_MOST).then_some(head)
    }

    pub(in crate::client) const fn stripes(&self) -> u64 {
        self.bytes.div_ceil(self.stripe_bytes)
    }

    /// Returns the offset and length of a stripe in the object.
    pub(in crate::client) fn place(&self, stripe: u64) -> (u64, u64) {
        let offset = stripe * self.stripe_bytes;
        (offset, self.stripe_bytes.min(self.bytes - offset))
    }

    /// Returns the digest of a stripe.
    pub(in crate::client) fn digest(&self, object: Digest, stripe: u64) -> Digest {
        let mut name = [0; 40];
        name[..16].copy_from_slice(&object.0.to_le_bytes());
        name[16..32].copy_from_slice(&self.nonce.to_le_bytes());
        name[32..].copy_from_slice(&stripe.to_le_bytes());
        Digest::of(b"\0stripes", &name)
    }

    pub(in crate::client) fn digests(self, object: Digest) -> impl Iterator<Item = Digest> {
        (0..self.stripes()).map(move |stripe| self.digest(object, stripe))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_tile_their_object_and_have_distinct_digests() {
        let head = Head::new(1000, 300, 7);
        let places: Vec<_> = (0..head.stripes()).map(|stripe| head.place(stripe)).collect();
        assert_eq!(places, [(0, 300), (300, 300), (600, 300), (900, 100)]);
        assert_eq!(Head::decode(&head.encode()), Some(head));
        assert_eq!(Head::decode(&[0; HEAD_BYTES]), None);
        assert_eq!(Head::decode(&Head::new(0, 300, 7).encode()), None);
        assert_eq!(Head::decode(&Head::new(u64::MAX, 1, 7).encode()), None);
        let mut all: Vec<Digest> = head.digests(Digest(5)).chain(head.digests(Digest(6))).collect();
        all.extend(Head::new(1000, 300, 8).digests(Digest(5)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 12);
    }
}
