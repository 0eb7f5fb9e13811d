//! Errors of the store's operations, with the relevant numbers.

use core::fmt;

/// Failure of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetError {
    /// No object has this digest.
    NotFound,
    /// Every pin is in use. Transient: retry when pins were released.
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

/// Failure to reserve memory for a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// The object is empty: objects have at least one byte.
    Empty,
    /// The object is larger than any that the store accepts.
    TooLarge {
        /// The object's size.
        bytes: u64,
        /// The configured limit.
        limit_bytes: u64,
    },
    /// There is an object with this digest. The attempt counts as an access.
    Exists,
    /// There is no space, even if every evictable object were evicted. Transient while bytes are pinned or reserved.
    NoSpace {
        /// The object's size.
        requested_bytes: u64,
        /// Free bytes, fragmented.
        free_bytes: u64,
        /// Bytes of objects that are pinned.
        pinned_bytes: u64,
        /// Bytes held for other puts, counting expired ones that were not aborted.
        reserved_bytes: u64,
    },
    /// The tenant would exceed its lease, and evicting its objects does not suffice.
    Quota {
        /// The object's size, with its tail.
        bytes: u64,
        /// Bytes of this shard's pool that are leased to the tenant.
        lease_bytes: u64,
        /// Bytes of its objects that cannot be evicted: in use, being written, or pinned.
        held_bytes: u64,
    },
    /// The limit of hard pins would be exceeded.
    PinLimit {
        /// Bytes that are hard pinned.
        pinned_bytes: u64,
        /// Bytes that may be hard pinned.
        limit_bytes: u64,
        /// True if both concern the tenant, with a limit that is a share of its lease; false if they concern the whole
        /// pool.
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
                "no space for {requested_bytes} bytes: {free_bytes} free but fragmented, {pinned_bytes} \
                 pinned, {reserved_bytes} reserved, and evicting the rest does not suffice: retry later or enlarge \
                 the pool"
            ),
            Self::Quota { bytes, lease_bytes, .. } if bytes > lease_bytes => write!(
                f,
                "an object of {bytes} bytes exceeds the {lease_bytes} bytes of its tenant's quota that are leased to \
                 this shard: raise the quota, or retry later if the whole quota is larger"
            ),
            Self::Quota { bytes, lease_bytes, held_bytes } => write!(
                f,
                "{bytes} bytes exceed the quota of the tenant, which may take {lease_bytes} of this shard and holds \
                 {held_bytes} that cannot be evicted: retry later or raise its quota"
            ),
            Self::PinLimit { pinned_bytes, limit_bytes, of_tenant } => {
                let (whose, what) = if *of_tenant {
                    (" of the tenant", "the tenant's quota")
                } else {
                    ("", "the node's share of hard pins")
                };
                write!(
                    f,
                    "{pinned_bytes} bytes{whose} are hard pinned, and {limit_bytes} may be: put the object without a \
                     hard pin, remove hard-pinned objects, or raise {what}"
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

/// Failure of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitError {
    /// The reservation is not, or no longer, held.
    Stale,
    /// Another put of the digest was committed first. The reservation is gone and its bytes are free.
    Exists,
    /// The deadline has passed. The bytes stay in quarantine until the reservation is aborted.
    Expired,
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "the reservation is not held",
            Self::Exists => "another put of the object was committed first",
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
