//! Reasons why a drive takes no passthrough commands.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Reason why passthrough commands to the namespace behind a device cannot be used.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum NamespaceError {
    /// The device was claimed for reading only.
    ReadOnly,
    /// A property in sysfs cannot be read.
    Property { path: PathBuf, source: io::Error },
    /// A property in sysfs is not a number.
    NotNumber { path: PathBuf, text: String },
    /// The drive has no character device for commands.
    NoGeneric {
        /// Name of the block device.
        name: String,
        /// Name that its character device would have.
        generic: String,
    },
    /// The namespace is divided into zones.
    Zoned { name: String },
    /// A call on the character device failed.
    Device {
        path: PathBuf,
        /// Attempted action, as a participle.
        action: &'static str,
        source: io::Error,
    },
    /// The character device has another number than sysfs states.
    OtherDevice {
        path: PathBuf,
        /// Stated number, major and minor.
        number: String,
    },
    /// The block device does not report its namespace.
    BlockDevice { source: io::Error },
    /// The character device and the block device belong to different namespaces.
    OtherNamespace { path: PathBuf, id: u32, block_id: u32 },
    /// The blocks carry metadata or protection information.
    Metadata {
        metadata_bytes: u16,
        /// Type of protection information, 0 for none.
        protection: u8,
    },
    /// The namespace has other blocks than the block device, or of an unsuitable length.
    BlockBytes {
        bytes: u64,
        /// Block length of the block device.
        device_bytes: u64,
    },
    /// The sizes of the namespace and of the block device do not fit together.
    Size {
        /// Length of the namespace, in blocks.
        blocks: u64,
        block_bytes: u64,
        /// Length of the block device, in sectors.
        sectors: u64,
        /// Start of the claimed device in the whole one, in sectors.
        start: u64,
    },
    /// Commands are too small to be of use.
    SmallCommands { bytes: u32 },
}

impl fmt::Display for NamespaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReadOnly => f.write_str("the device is read-only"),
            Self::Property { path, source } => write!(f, "{}: {source}", path.display()),
            Self::NotNumber { path, text } => write!(f, "{}: {text:?} is not a number", path.display()),
            Self::NoGeneric { name, generic } => write!(f, "{name} has no passthrough device {generic}"),
            Self::Zoned { name } => write!(f, "{name} has zones"),
            Self::Device { path, action, source } => write!(f, "{}: {action}: {source}", path.display()),
            Self::OtherDevice { path, number } => write!(f, "{} is not the device {number}", path.display()),
            Self::BlockDevice { source } => write!(f, "querying the namespace of the block device: {source}"),
            Self::OtherNamespace { path, id, block_id } => {
                write!(f, "{} is namespace {id}, the block device {block_id}", path.display())
            }
            Self::Metadata { metadata_bytes, protection } => {
                write!(f, "its blocks have {metadata_bytes} bytes of metadata, protection type {protection}")
            }
            Self::BlockBytes { bytes, device_bytes } => {
                write!(f, "its blocks have {bytes} bytes, the block device's {device_bytes}")
            }
            Self::Size { blocks, block_bytes, sectors, start } => {
                write!(f, "{blocks} blocks of {block_bytes} bytes are not {sectors} sectors, from {start} on")
            }
            Self::SmallCommands { bytes } => write!(f, "a command moves at most {bytes} bytes"),
        }
    }
}

impl Error for NamespaceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Property { source, .. } | Self::Device { source, .. } | Self::BlockDevice { source } => Some(source),
            _ => None,
        }
    }
}
