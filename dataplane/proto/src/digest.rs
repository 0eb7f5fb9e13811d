//! Digest that names an object, and the slot that it belongs to.
//!
//! A digest is XXH3-128 over (tenant, key). Both are prefixed with their length, so that ("ab", "c") and ("a", "bc")
//! differ. Peers exchange digests, never keys; two keys with one digest are the same object, which for 128 bits and
//! 10^12 keys has a probability under 10^-14.

use core::fmt;

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::ids::{SLOT_BITS, Slot};

/// The name of an object: 128 bits, little-endian on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
pub struct Digest(pub u128);

/// Bytes of a digest on the wire.
pub const DIGEST_BYTES: usize = 16;
/// Length prefix of each part of a name, in bytes.
const LENGTH_BYTES: usize = 8;
/// Longest name, with its length prefixes, that is hashed in one piece.
const SHORT_BYTES: usize = 128;

impl Slot {
    /// Returns the least digest in the slot: it stands for the slot in requests to a shard.
    #[must_use]
    pub const fn first_digest(self) -> Digest {
        Digest((self.0 as u128) << (128 - SLOT_BITS))
    }
}

impl Digest {
    /// Returns the digest of `key` within `tenant`. The default tenant is the empty string.
    #[must_use]
    pub fn of(tenant: &[u8], key: &[u8]) -> Self {
        let (tenant_at, key_at) = (LENGTH_BYTES, 2 * LENGTH_BYTES + tenant.len());
        let bytes = key_at + key.len();
        // Nearly every name is short. Hashing it in one piece avoids the setup of half a kilobyte of hasher state.
        if bytes <= SHORT_BYTES {
            let mut name = [0; SHORT_BYTES];
            name[..LENGTH_BYTES].copy_from_slice(&(tenant.len() as u64).to_le_bytes());
            name[tenant_at..tenant_at + tenant.len()].copy_from_slice(tenant);
            name[key_at - LENGTH_BYTES..key_at].copy_from_slice(&(key.len() as u64).to_le_bytes());
            name[key_at..bytes].copy_from_slice(key);
            return Self(xxh3_128(&name[..bytes]));
        }
        let mut hash = Xxh3::new();
        hash.update(&(tenant.len() as u64).to_le_bytes());
        hash.update(tenant);
        hash.update(&(key.len() as u64).to_le_bytes());
        hash.update(key);
        Self(hash.digest128())
    }

    /// Returns the slot: the top 14 bits.
    #[must_use]
    pub const fn slot(self) -> Slot {
        Slot((self.0 >> (128 - SLOT_BITS)) as u16)
    }

    /// Returns the low word, which takes no part in the choice of slot or shard: for hash tables.
    #[must_use]
    pub const fn low(self) -> u64 {
        crate::narrowing::low_u64(self.0)
    }

    /// Wire form.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; DIGEST_BYTES] {
        self.0.to_le_bytes()
    }

    /// The inverse of [`Self::to_bytes`].
    #[must_use]
    pub const fn from_bytes(bytes: [u8; DIGEST_BYTES]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }
}

/// Computes digests of many keys of one tenant: the part of their names that they share is written once.
#[derive(Clone, Debug)]
pub struct KeysOf<'a> {
    tenant: &'a [u8],
    name: [u8; SHORT_BYTES],
}

impl<'a> KeysOf<'a> {
    /// Creates the hasher for keys of this tenant.
    #[must_use]
    pub fn new(tenant: &'a [u8]) -> Self {
        let mut name = [0; SHORT_BYTES];
        if LENGTH_BYTES + tenant.len() <= SHORT_BYTES {
            name[..LENGTH_BYTES].copy_from_slice(&(tenant.len() as u64).to_le_bytes());
            name[LENGTH_BYTES..LENGTH_BYTES + tenant.len()].copy_from_slice(tenant);
        }
        Self { tenant, name }
    }

    /// Returns the digest of a key, equal to that of [`Digest::of`].
    #[inline]
    #[must_use]
    pub fn digest(&mut self, key: &[u8]) -> Digest {
        let key_at = 2 * LENGTH_BYTES + self.tenant.len();
        let Some(name) = self.name.get_mut(..key_at + key.len()) else { return Digest::of(self.tenant, key) };
        name[key_at - LENGTH_BYTES..key_at].copy_from_slice(&(key.len() as u64).to_le_bytes());
        name[key_at..].copy_from_slice(key);
        Digest(xxh3_128(name))
    }
}

/// Returns the number of a tenant, as nodes account for it: 32 bits of a hash of its name; 0 for the default tenant
/// only, whose name is empty. The control plane rejects a tenant whose number collides with another's.
#[must_use]
pub fn tenant_number(name: &[u8]) -> u32 {
    if name.is_empty() { 0 } else { crate::narrowing::low_u32(crate::narrowing::low_u64(xxh3_128(name))).max(1) }
}

/// Incremental XXH3-128 over content. It detects accidental differences; it does not authenticate the author.
#[derive(Default)]
pub struct ContentHash(Xxh3);

impl ContentHash {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the hash of all bytes added.
    #[must_use]
    pub fn finish(&self) -> u128 {
        self.0.digest128()
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({:032x})", self.finish())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_digest() {
        // Stored objects and slot ownership depend on these bits: they may never change.
        assert_eq!(Digest::of(b"", b"block-0").to_string(), GOLDEN);
    }
    const GOLDEN: &str = "db9eac7a9f0de74ddcfb8efd69d719b3";

    #[test]
    fn keys_of_a_tenant_have_the_same_digests_in_bulk() {
        let text: Vec<u8> = (0..=255).collect();
        for tenant in [0, 1, 60, 111, 112, 113, 120, 200] {
            let mut keys = KeysOf::new(&text[..tenant]);
            // A shorter key after a longer one: no bytes of the longer key are left.
            for key in [200, 112, 111, 53, 52, 51, 16, 2, 1, 0, 112, 3] {
                let key = &text[256 - key..];
                assert_eq!(keys.digest(key), Digest::of(&text[..tenant], key), "{tenant} and {}", key.len());
            }
        }
    }

    #[test]
    fn short_names_are_hashed_as_long_ones_are() {
        let text: Vec<u8> = (0..=255).collect();
        for tenant in [0, 1, 7, 60, 120] {
            for key in [1, 16, 51, 52, 53, 111, 112, 113, 200] {
                let (tenant, key) = (&text[..tenant], &text[256 - key..]);
                let mut hash = Xxh3::new();
                hash.update(&(tenant.len() as u64).to_le_bytes());
                hash.update(tenant);
                hash.update(&(key.len() as u64).to_le_bytes());
                hash.update(key);
                assert_eq!(Digest::of(tenant, key), Digest(hash.digest128()), "{} and {}", tenant.len(), key.len());
            }
        }
    }

    #[test]
    fn tenant_and_key_do_not_run_together() {
        assert_ne!(Digest::of(b"ab", b"c"), Digest::of(b"a", b"bc"));
    }

    #[test]
    fn the_slot_is_the_top_of_the_digest() {
        assert_eq!(Digest(u128::MAX).slot(), Slot(16_383));
        assert_eq!(Digest(1 << 114).slot(), Slot(1));
        assert_eq!(Slot(1).first_digest(), Digest(1 << 114));
        assert_eq!(Digest((1 << 114) - 1).slot(), Slot(0));
    }
}
