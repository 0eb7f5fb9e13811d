//! What can go wrong in each operation of the store, in numbers.

use core::fmt;

/// Why a get gave nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetError {
    /// No object has this digest.
    NotFound,
    /// Every pin is in use. Transient: ask again when some are released.
    TooManyPins {
        /// The configured limit.
        limit: u32,
    },
}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("no such object"),
            Self::TooManyPins { limit } => {
                write!(f, "all {limit} pins of the shard are in use: retry later")
            }
        }
    }
}

impl core::error::Error for GetError {}

/// Why a put got no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// Objects have at least one byte.
    Empty,
    /// The object is larger than any that the store accepts.
    TooLarge {
        /// The object's size.
        bytes: u64,
        /// The configured limit.
        limit_bytes: u64,
    },
    /// There is an object of this digest. The attempt counted as an access: somebody wants it.
    Exists,
    /// No space, even if every object that nobody uses were evicted. Transient while bytes are pinned or reserved.
    NoSpace {
        /// The object's size.
        requested_bytes: u64,
        /// Free bytes, in pieces.
        free_bytes: u64,
        /// Bytes of objects that are in use.
        pinned_bytes: u64,
        /// Bytes held for other puts, counting expired ones that were not aborted.
        reserved_bytes: u64,
    },
    /// The tenant would take more than its lease, and what it could free does not do.
    Quota {
        /// The object's size, with what belongs to it.
        bytes: u64,
        /// What the tenant may take of this shard.
        lease_bytes: u64,
        /// What it has there that cannot be evicted: in use, being written, or pinned.
        held_bytes: u64,
    },
    /// More would be hard pinned than may be.
    PinLimit {
        /// What is.
        pinned_bytes: u64,
        /// What may be.
        limit_bytes: u64,
        /// Whether both are the tenant's, whose lease the limit is a share of, and not those of the whole pool.
        of_tenant: bool,
    },
    /// Every reservation is in use. Transient.
    TooManyReservations {
        /// The configured limit.
        limit: u32,
    },
    /// The store holds as many objects as it may, and every one is in use. Transient.
    TooManyObjects {
        /// The configured limit.
        limit: u32,
    },
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("an object of 0 bytes cannot be stored"),
            Self::TooLarge { bytes, limit_bytes } => {
                write!(f, "an object of {bytes} bytes is above the limit of {limit_bytes}")
            }
            Self::Exists => f.write_str("the object exists"),
            Self::NoSpace { requested_bytes, free_bytes, pinned_bytes, reserved_bytes } => write!(
                f,
                "no space for {requested_bytes} bytes: {free_bytes} free in pieces, {pinned_bytes} \
                 pinned, {reserved_bytes} reserved, the rest would not do: retry later or enlarge the pool"
            ),
            Self::Quota { bytes, lease_bytes, .. } if bytes > lease_bytes => write!(
                f,
                "an object of {bytes} bytes is longer than the {lease_bytes} bytes of its tenant's quota that are for \
                 this shard: raise the quota, or retry later if the quota is longer"
            ),
            Self::Quota { bytes, lease_bytes, held_bytes } => write!(
                f,
                "{bytes} bytes are too much for the tenant, which may take {lease_bytes} of this shard and holds \
                 {held_bytes} that cannot go: retry later or raise its quota"
            ),
            Self::PinLimit { pinned_bytes, limit_bytes, of_tenant } => {
                let (whose, what) = if *of_tenant {
                    (" of the tenant", "the tenant's quota")
                } else {
                    ("", "the node's share for them")
                };
                write!(
                    f,
                    "{pinned_bytes} bytes{whose} are pinned for good, and {limit_bytes} may be: put it without a pin, \
                     remove some that have one, or raise {what}"
                )
            }
            Self::TooManyReservations { limit } => {
                write!(f, "all {limit} reservations of the shard are in use: retry later")
            }
            Self::TooManyObjects { limit } => {
                write!(f, "all {limit} objects of the shard are in use: retry later or raise max_objects")
            }
        }
    }
}

impl core::error::Error for ReserveError {}

/// Why a put was not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitError {
    /// The reservation is not, or no longer, held.
    Stale,
    /// Another put of the digest came first. The reservation is gone and its bytes are free.
    Exists,
    /// The deadline passed before. The bytes stay in quarantine until the reservation is aborted.
    Expired,
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "the reservation is not held",
            Self::Exists => "another put of the object came first",
            Self::Expired => "the put's deadline passed before its bytes were complete",
        })
    }
}

impl core::error::Error for CommitError {}

/// The pin is not, or no longer, held: a repeated or late release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StalePin;

impl fmt::Display for StalePin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pin is not held")
    }
}

impl core::error::Error for StalePin {}

/// The reservation is not, or no longer, held: a repeated or late message about a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleReservation;

impl fmt::Display for StaleReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reservation is not held")
    }
}

impl core::error::Error for StaleReservation {}
