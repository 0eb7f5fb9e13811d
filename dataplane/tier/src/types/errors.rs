//! Errors of the tier's operations, with the numbers that explain them.

use core::fmt;

use crate::ops::Fault;

/// Advice for a device that holds other data.
const WIPE: &str = "it is not touched; name another device, or wipe this one if its data is not needed (blkdiscard -z \
                    DEVICE, or dd if=/dev/zero of=DEVICE; remove a file)";

/// Reason why a device was not opened. Nothing was written to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum OpenError {
    /// The superblocks are blank: only zeros.
    Blank,
    /// The superblocks hold other data.
    Foreign,
    /// There are no superblocks, but the device is not blank either: formatting would overwrite data.
    NotBlank {
        /// Offset of the first byte that is not zero, from the start of the tier's part of the device.
        offset: u64,
    },
    /// Both copies of the superblock are damaged.
    Damaged,
    /// Both copies of the superblock, or the blocks that show whether the device is blank, cannot be read.
    Unreadable,
    /// The device is blank, and formatting it failed.
    Unwritable,
    /// The format version is unknown to this program.
    OtherVersion {
        /// Format version of the device.
        found: u16,
        /// Format version of this program.
        known: u16,
    },
    /// The device belongs to another owner.
    OtherOwner {
        /// Field that differs: `cluster`, `node`, `shard` or `device`.
        field: &'static str,
        found: u128,
        expected: u128,
    },
    /// The device was formatted with other sizes.
    OtherLayout {
        /// Name of the field in the configuration.
        field: &'static str,
        /// Value on the device.
        found: u64,
        /// Configured value.
        expected: u64,
    },
    /// The device was opened more often than its format can count.
    TooManyIncarnations { incarnations: u64 },
}

impl OpenError {
    /// Returns true if the device is faulty, rather than another owner's or of another format: a node with enough
    /// memory can start without it.
    #[must_use]
    pub const fn is_fault(&self) -> bool {
        matches!(self, Self::Unreadable | Self::Unwritable)
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blank => f.write_str("the device has no tier on it: format it first"),
            Self::Foreign => {
                write!(f, "the device holds something else, not a tier (or both its superblocks are destroyed); {WIPE}")
            }
            Self::NotBlank { offset } => {
                write!(
                    f,
                    "the device holds something else, not a tier (or one whose superblocks are gone): byte {offset} of \
                     it is not zero; {WIPE}"
                )
            }
            Self::Damaged => {
                f.write_str("both superblocks of the device are damaged: check the device; wipe it to start anew")
            }
            Self::Unreadable => f.write_str(
                "both superblocks of the device, or the blocks that show whether it is blank, cannot be read: check it",
            ),
            Self::Unwritable => f.write_str("the device is blank and takes no writes: name one that can be written"),
            Self::OtherVersion { found, known } => {
                write!(
                    f,
                    "the device has format version {found}, this program knows {known}: use the program that wrote it"
                )
            }
            // The device stores digests of names, which mean nothing to an operator.
            Self::OtherOwner { field: "cluster", .. } => write!(
                f,
                "the device belongs to a cluster of another name: start with the name that it was formatted under \
                 (--cluster NAME); else {WIPE}"
            ),
            Self::OtherOwner { field, found, expected } => {
                write!(f, "the device belongs to {field} {found:#x}, not to {expected:#x}: it is not touched")
            }
            Self::OtherLayout { field, found, expected } => {
                write!(f, "the device was formatted with {field} {found}, but {expected} is configured")
            }
            Self::TooManyIncarnations { incarnations } => {
                write!(f, "the device was opened {incarnations} times: format it anew")
            }
        }
    }
}

impl core::error::Error for OpenError {}

/// Reason why the tier takes no writes, or no calls at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Reason {
    /// Too many segments had write errors.
    WriteErrors { segments: u32 },
    /// No space is left under the tier, though its file should have been preallocated.
    NoSpace,
    /// The device is read-only.
    DeviceReadOnly,
    /// A flush failed: how much of the latest writes the device has is unknown.
    FlushFailed,
    /// The superblock could not be written.
    SuperblockUnwritten,
    /// The device is gone.
    Gone,
    /// The device was refused at the start.
    Refused(OpenError),
}

impl Reason {
    /// Returns the reason that a fault in writing a superblock or an ownership note leads to.
    pub(crate) const fn of_superblock(fault: Fault) -> Self {
        match fault {
            Fault::NoSpace => Self::NoSpace,
            Fault::ReadOnly => Self::DeviceReadOnly,
            Fault::Gone => Self::Gone,
            _ => Self::SuperblockUnwritten,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WriteErrors { segments } => write!(f, "writes failed in {segments} segments: replace the device"),
            Self::NoSpace => {
                f.write_str("no space left where the tier's file is (or that of its device): make room, then restart")
            }
            Self::DeviceReadOnly => f.write_str(
                "the device takes no writes: make it writable (mount -o remount,rw; blockdev --setrw), then restart",
            ),
            Self::FlushFailed => f.write_str("a flush failed: check the device, then restart"),
            Self::SuperblockUnwritten => f.write_str("the superblock could not be written: check the device"),
            Self::Gone => f.write_str("the device is gone: attach it, then restart"),
            Self::Refused(error) => write!(f, "the device was not opened: {error}"),
        }
    }
}

/// Reason why a put was rejected. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum PutError {
    /// The object is empty: objects have at least one byte.
    Empty,
    /// The object is larger than the tier's limit.
    TooLarge { bytes: u32, limit_bytes: u32 },
    /// The key is too long.
    KeyTooLong { bytes: usize, limit_bytes: u16 },
    /// The payload's offset is not aligned for direct I/O, and it is too long to be copied.
    Unaligned {
        offset: u64,
        /// Alignment that direct I/O requires.
        align_bytes: u32,
    },
    /// The payload does not match its writer's checksum: it was damaged on the way here.
    Checksum {
        /// Checksum that the writer stated.
        stated: u64,
        /// Checksum of the bytes.
        computed: u64,
    },
    /// Backpressure: no buffer, acknowledgement slot or prepared segment is free, or the tier is still being opened.
    /// Transient: retry after the next event.
    Busy,
    /// No segment is free, or the index is full; reclaim is running. Transient.
    Full,
    /// The record is longer than its tenant's limit, or pinned records use the limit up.
    Quota { record_bytes: u64, limit_bytes: u64 },
    /// The tier takes no writes.
    Unavailable(Reason),
}

impl fmt::Display for PutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("an object of 0 bytes cannot be stored"),
            Self::TooLarge { bytes, limit_bytes } => {
                write!(f, "an object of {bytes} bytes is above the tier's limit of {limit_bytes}")
            }
            Self::Quota { record_bytes, limit_bytes } => {
                write!(f, "a record of {record_bytes} bytes has no room in the {limit_bytes} bytes of its tenant")
            }
            Self::KeyTooLong { bytes, limit_bytes } => {
                write!(f, "a key of {bytes} bytes is above the tier's limit of {limit_bytes}")
            }
            Self::Unaligned { offset, align_bytes } => {
                write!(f, "the payload is at {offset}: direct I/O requires a multiple of {align_bytes}")
            }
            Self::Checksum { stated, computed } => {
                write!(f, "the payload's checksum is {computed:#018x}, its writer stated {stated:#018x}")
            }
            Self::Busy => f.write_str("the tier is busy: retry"),
            Self::Full => f.write_str("the tier is full and makes room: retry"),
            Self::Unavailable(reason) => write!(f, "the tier takes no writes: {reason}"),
        }
    }
}

impl core::error::Error for PutError {}

/// Reason why a get was rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum GetError {
    /// No object of this digest is known (yet, while recovery runs).
    NotFound,
    /// The destination's length differs from the object's.
    WrongLength {
        /// Length of the destination.
        bytes: u32,
        /// Length of the object.
        object_bytes: u32,
    },
    /// The destination's offset is not aligned for direct I/O.
    Unaligned {
        offset: u64,
        /// Alignment that direct I/O requires.
        align_bytes: u32,
    },
    /// Backpressure: all reads are in use. Transient.
    Busy,
    /// The tier takes no calls.
    Unavailable(Reason),
}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("no such object"),
            Self::WrongLength { bytes, object_bytes } => {
                write!(f, "the destination has {bytes} bytes, the object {object_bytes}")
            }
            Self::Unaligned { offset, align_bytes } => {
                write!(f, "the destination is at {offset}: direct I/O requires a multiple of {align_bytes}")
            }
            Self::Busy => f.write_str("all reads of the tier are in use: retry"),
            Self::Unavailable(reason) => write!(f, "the tier serves nothing: {reason}"),
        }
    }
}

impl core::error::Error for GetError {}

/// Reason why a tombstone was not written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoveError {
    /// Backpressure, see [`PutError::Busy`]; nothing has changed. Transient: retry.
    Busy,
    /// The tier takes no writes. The object is hidden now, but a restart may bring it back.
    Unavailable(Reason),
}

impl fmt::Display for RemoveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("the tier is busy: retry"),
            Self::Unavailable(reason) => {
                write!(
                    f,
                    "the object is hidden, but the tier takes no writes, so a restart may bring it back: {reason}"
                )
            }
        }
    }
}

impl core::error::Error for RemoveError {}
