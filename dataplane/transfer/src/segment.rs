//! Segments of peers: identified by handle, their buffers found by address.
//!
//! A peer's description of its memory is cached. It is requested again when an address is not found in it, and when a
//! transfer shows that the peer's memory has changed: after a restart, or after it unregistered some.

pub(crate) mod file;
mod handle;
pub(crate) mod peers;
mod remote;
pub(crate) mod table;

pub use file::FileInfo;
pub use handle::SegmentHandle;
pub(crate) use handle::unknown;
pub(crate) use remote::Remote;

/// Buffer of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BufferInfo {
    /// Address in its process.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// True if peers on its host can map it.
    pub shareable: bool,
    /// Location as announced by its owner; `None` if unknown.
    pub location: Option<String>,
}

/// Description of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentInfo {
    /// Name.
    pub name: String,
    /// Buffers by address. A file is one buffer that begins at 0.
    pub buffers: Vec<BufferInfo>,
    /// Properties of the file, if it is one.
    pub file: Option<FileInfo>,
}
