//! What can go wrong in each operation of the tier, in numbers.

use core::fmt;

use crate::ops::Fault;

/// What to do about a device that holds something else.
const WIPE: &str = "it is not touched; name another, or wipe it if nobody wants what it has (blkdiscard -z DEVICE, or \
                    dd if=/dev/zero of=DEVICE; remove a file)";

/// Why a device is not opened. Nothing was written to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenError {
    /// Only zeros where the superblocks should be.
    Blank,
    /// Something else stands there.
    Foreign,
    /// No superblocks, but not blank either: formatting would overwrite what its owner may want.
    NotBlank {
        /// Where the first byte is that is not zero, from the start of the tier's part of the device.
        offset: u64,
    },
    /// Neither copy of the superblock is whole.
    Damaged,
    /// Neither copy can be read, or not what tells whether the device is blank.
    Unreadable,
    /// It is blank, and cannot be formatted.
    Unwritable,
    /// A format that this program does not know.
    OtherVersion {
        /// The device's.
        found: u16,
        /// This program's.
        known: u16,
    },
    /// It belongs to somebody else.
    OtherOwner {
        /// What differs: `cluster`, `node`, `shard` or `device`.
        field: &'static str,
        /// What the device says.
        found: u128,
        /// What was expected.
        expected: u128,
    },
    /// It was formatted with other sizes.
    OtherLayout {
        /// Name of the field in the configuration.
        field: &'static str,
        /// What the device says.
        found: u64,
        /// What is configured.
        expected: u64,
    },
    /// The device was opened more often than its format can count.
    TooManyIncarnations {
        /// How often.
        incarnations: u64,
    },
}

impl OpenError {
    /// Whether the device fails, rather than being another's or of another kind: whoever has memory can do without.
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
                "both superblocks of the device cannot be read, or not what tells whether it is blank: check it",
            ),
            Self::Unwritable => f.write_str("the device is blank and takes no writes: name one that can be written"),
            Self::OtherVersion { found, known } => {
                write!(
                    f,
                    "the device has format version {found}, this program knows {known}: use the program that wrote it"
                )
            }
            // The device has digests of names, which tell nobody anything.
            Self::OtherOwner { field: "cluster", .. } => write!(
                f,
                "the device belongs to a cluster of another name: start with the name that it was formatted under \
                 (--cluster NAME); else {WIPE}"
            ),
            Self::OtherOwner { field, found, expected } => {
                write!(f, "the device belongs to {field} {found:#x}, not to {expected:#x}: it is not touched")
            }
            Self::OtherLayout { field, found, expected } => {
                write!(f, "the device was formatted with {field} {found}, and would have {expected} now")
            }
            Self::TooManyIncarnations { incarnations } => {
                write!(f, "the device was opened {incarnations} times: format it anew")
            }
        }
    }
}

impl core::error::Error for OpenError {}

/// Why the tier takes no writes, or nothing at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Too many segments had write errors.
    WriteErrors {
        /// How many.
        segments: u32,
    },
    /// No space under the tier, though its file should have been preallocated.
    NoSpace,
    /// The device takes no writes.
    DeviceReadOnly,
    /// A flush failed: what the device has of the latest writes is unknown.
    FlushFailed,
    /// The superblock could not be written.
    SuperblockUnwritten,
    /// The device is gone.
    Gone,
    /// The device was refused at the start.
    Refused(OpenError),
}

impl Reason {
    /// What follows from a superblock or note that could not be written.
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

/// Why a put was not taken. Nothing happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PutError {
    /// Objects have at least one byte.
    Empty,
    /// The object is larger than any that the tier takes.
    TooLarge {
        /// Its size.
        bytes: u32,
        /// The configured limit.
        limit_bytes: u32,
    },
    /// The key is too long.
    KeyTooLong {
        /// Its length.
        bytes: usize,
        /// The configured limit.
        limit_bytes: u16,
    },
    /// The payload's address does not suit direct I/O, and it is too long to be copied.
    Unaligned {
        /// Where it is.
        offset: u64,
        /// What that must be a multiple of.
        align_bytes: u32,
    },
    /// The payload is not what its writer stated: it was damaged before it came here.
    Checksum {
        /// What the writer stated.
        stated: u64,
        /// What the bytes give.
        computed: u64,
    },
    /// No buffer, acknowledgement or prepared segment is free, or the tier is still being opened. Transient: retry
    /// after the next event.
    Busy,
    /// No segment is free, or the index is full; reclaim goes on. Transient.
    Full,
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
            Self::KeyTooLong { bytes, limit_bytes } => {
                write!(f, "a key of {bytes} bytes is above the tier's limit of {limit_bytes}")
            }
            Self::Unaligned { offset, align_bytes } => {
                write!(f, "the payload is at {offset}: direct I/O wants a multiple of {align_bytes}")
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

/// Why a get was not begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GetError {
    /// No object of this digest is known (yet, while recovery runs).
    NotFound,
    /// The destination has not the object's length.
    WrongLength {
        /// The destination's.
        bytes: u32,
        /// The object's.
        object_bytes: u32,
    },
    /// The destination's address does not suit direct I/O.
    Unaligned {
        /// Where it is.
        offset: u64,
        /// What that must be a multiple of.
        align_bytes: u32,
    },
    /// All reads are in use. Transient.
    Busy,
    /// The tier serves nothing.
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
                write!(f, "the destination is at {offset}: direct I/O wants a multiple of {align_bytes}")
            }
            Self::Busy => f.write_str("all reads of the tier are in use: retry"),
            Self::Unavailable(reason) => write!(f, "the tier serves nothing: {reason}"),
        }
    }
}

impl core::error::Error for GetError {}

/// Why a removal was not written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoveError {
    /// As [`PutError::Busy`]; nothing happened. Transient: retry.
    Busy,
    /// The tier takes no writes. The object is hidden now, and may be back after a restart.
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
