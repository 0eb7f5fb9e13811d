//! Errors of region allocation and mapping.

use std::error::Error;
use std::fmt;
use std::io;

use crate::memory_file::MemoryFileError;

/// Error of a region's allocation or mapping.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum RegionError {
    /// Zero bytes were requested.
    Empty { name: String },
    /// The length does not fit in the address space once rounded up to whole pages.
    TooLarge { bytes: usize },
    /// The memfd could not be created, sized or sealed.
    Create { name: String, bytes: usize, source: io::Error },
    /// The kernel refused the mapping.
    Map { bytes: usize, source: io::Error },
    /// Huge pages were required and there are neither reserved nor transparent ones.
    NoHugePages { name: String, bytes: usize },
    /// The memory could not be bound to the NUMA node.
    Bind { name: String, node: u32, source: io::Error },
    /// Faulting in the whole region would exhaust the machine's memory.
    NotAvailable {
        name: String,
        bytes: usize,
        /// Available memory of the machine, including reserved huge pages.
        available_bytes: u64,
    },
    /// Faulting in the far part would exhaust the memory of its NUMA node.
    NodeNotAvailable {
        name: String,
        node: u32,
        bytes: usize,
        /// Available memory of the node, including reserved huge pages.
        available_bytes: u64,
    },
    /// The far part does not begin inside the region, or not at a multiple of a huge page; or it is one of a file.
    FarPart { name: String, bytes: usize, offset: usize },
    /// The pages could not be faulted in.
    Prefault { name: String, bytes: usize, source: io::Error },
    /// A file in memory could not be used.
    File(MemoryFileError),
    /// A peer's descriptor is not a memfd sealed against shrinking.
    NotSealed,
    /// A peer's memfd is shorter than announced.
    TooShort {
        /// Length of the file.
        file_bytes: u64,
        /// Announced length.
        bytes: usize,
    },
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { name } => write!(f, "region {name:?} needs at least one byte"),
            Self::TooLarge { bytes } => write!(f, "{bytes} bytes do not fit in the address space"),
            Self::Create { name, bytes, source } => {
                write!(f, "cannot create shared region {name:?} of {bytes} bytes: {source}")
            }
            Self::Map { bytes, source } => write!(
                f,
                "cannot map {bytes} bytes: {source}; give it less memory, or check `ulimit -v` and vm.overcommit_memory"
            ),
            Self::NoHugePages { name, bytes } => write!(
                f,
                "region {name:?} requires huge pages for {bytes} bytes: reserve {} with vm.nr_hugepages or enable \
                 transparent_hugepage (shmem_enabled for shared regions)",
                bytes.div_ceil(super::map::HUGE_BYTES)
            ),
            Self::Bind { name, node, source } => {
                write!(f, "cannot bind region {name:?} to NUMA node {node}: {source}")
            }
            Self::NotAvailable { name, bytes, available_bytes } => write!(
                f,
                "region {name:?} of {bytes} bytes does not fit in the {available_bytes} bytes of memory that are \
                 available: give it less"
            ),
            Self::NodeNotAvailable { name, node, bytes, available_bytes } => write!(
                f,
                "the far part of region {name:?}, {bytes} bytes, does not fit in the {available_bytes} bytes of memory \
                 that are available on NUMA node {node}: give it less"
            ),
            Self::FarPart { name, bytes, offset } => write!(
                f,
                "region {name:?} of {bytes} bytes cannot have a far part from byte {offset} on: begin it inside fresh \
                 memory, at a multiple of {} bytes",
                super::map::HUGE_BYTES
            ),
            Self::Prefault { name, bytes, source } => {
                write!(f, "cannot fault in the {bytes} bytes of region {name:?}: {source}; give it less memory")
            }
            Self::File(error) => error.fmt(f),
            Self::NotSealed => {
                write!(f, "refusing a peer's memory that is not a memfd sealed against shrinking (F_SEAL_SHRINK)")
            }
            Self::TooShort { file_bytes, bytes } => {
                write!(f, "a peer's memory has {file_bytes} bytes where it announced {bytes}")
            }
        }
    }
}

impl Error for RegionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Create { source, .. }
            | Self::Map { source, .. }
            | Self::Bind { source, .. }
            | Self::Prefault { source, .. } => Some(source),
            Self::File(error) => Some(error),
            _ => None,
        }
    }
}
