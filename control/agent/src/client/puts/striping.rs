//! Striping: which objects are striped.

use kvplane_proto::Limits;

use crate::client::objects::STRIPE_LEAST_BYTES;

/// Decides by its length whether an object is striped.
#[derive(Clone, Copy)]
pub(crate) struct Striping {
    stripe_bytes: u64,
    /// Length of the shortest object that a shard has refused as too long.
    refused_bytes: u64,
}

impl Striping {
    /// Creates the rule for a stripe size, which is clamped to the limits of the protocol.
    pub(crate) fn new(stripe_bytes: u64) -> Self {
        let stripe_bytes = stripe_bytes.clamp(STRIPE_LEAST_BYTES, Limits::PAYLOAD_BYTES);
        Self { stripe_bytes, refused_bytes: u64::MAX }
    }

    /// Returns true if an object of so many bytes is striped.
    pub(crate) const fn is_striped(&self, bytes: u64) -> bool {
        bytes > self.stripe_bytes || bytes >= self.refused_bytes && bytes > STRIPE_LEAST_BYTES
    }

    /// Records that a shard refused an object as too long: later objects of that length are striped at once.
    pub(super) fn refuse(&mut self, bytes: u64) {
        self.refused_bytes = self.refused_bytes.min(bytes);
    }

    /// Returns the length of the stripes of an object of so many bytes: at least two of them, and none that is refused.
    pub(super) fn stripe_bytes(&self, bytes: u64) -> u64 {
        let mut stripe_bytes = self.stripe_bytes.min(bytes.div_ceil(2)).max(STRIPE_LEAST_BYTES);
        while self.is_striped(stripe_bytes) {
            stripe_bytes = half(stripe_bytes);
        }
        stripe_bytes
    }
}

/// Returns the next shorter length of stripes.
pub(super) fn half(stripe_bytes: u64) -> u64 {
    (stripe_bytes / 2).max(STRIPE_LEAST_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn long_objects_are_striped_and_those_that_shards_refuse() {
        let mut striping = Striping::new(64 * MIB);
        assert!(!striping.is_striped(64 * MIB) && striping.is_striped(64 * MIB + 1));
        assert_eq!([striping.stripe_bytes(1000 * MIB), striping.stripe_bytes(65 * MIB)], [64 * MIB, 65 * MIB / 2]);
        striping.refuse(20 * MIB);
        striping.refuse(30 * MIB);
        assert!(!striping.is_striped(20 * MIB - 1) && striping.is_striped(20 * MIB));
        assert_eq!([striping.stripe_bytes(1000 * MIB), striping.stripe_bytes(24 * MIB)], [16 * MIB, 12 * MIB]);
        striping.refuse(1);
        assert!(!striping.is_striped(MIB) && striping.is_striped(MIB + 1), "no stripe is shorter than 1 MiB");
        assert_eq!(striping.stripe_bytes(1000 * MIB), MIB);
    }

    #[test]
    fn the_stripe_size_has_limits() {
        assert!(!Striping::new(0).is_striped(MIB) && Striping::new(0).is_striped(MIB + 1));
        assert!(Striping::new(u64::MAX).is_striped(Limits::PAYLOAD_BYTES + 1));
    }
}
