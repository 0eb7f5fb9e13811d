//! Why a region could not be had.

use std::error::Error;
use std::fmt;
use std::io;

/// Why a region could not be allocated or mapped.
#[derive(Debug)]
pub enum RegionError {
    /// Zero bytes were asked for.
    Empty {
        /// The region's name.
        name: String,
    },
    /// The length does not fit in the address space once rounded up to whole pages.
    TooLarge {
        /// The length asked for.
        bytes: usize,
    },
    /// The memfd could not be created, sized or sealed.
    Create {
        /// The region's name.
        name: String,
        /// The length asked for.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refused the mapping.
    Map {
        /// The length asked for.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// Huge pages were required and there are neither reserved nor transparent ones.
    NoHugePages {
        /// The region's name.
        name: String,
        /// The length asked for.
        bytes: usize,
    },
    /// The memory could not be bound to the NUMA node.
    Bind {
        /// The region's name.
        name: String,
        /// The node asked for.
        node: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// Faulting all of it in would drive the machine out of memory.
    NotAvailable {
        /// The region's name.
        name: String,
        /// The length asked for.
        bytes: usize,
        /// What the machine has left, reserved huge pages included.
        available_bytes: u64,
    },
    /// The pages could not be faulted in.
    Prefault {
        /// The region's name.
        name: String,
        /// The length asked for.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// A peer's descriptor is not a memfd sealed against shrinking.
    NotSealed,
    /// A peer's memfd is shorter than the peer said.
    TooShort {
        /// How long it is.
        file_bytes: u64,
        /// How long it should be.
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
            Self::Prefault { name, bytes, source } => {
                write!(f, "cannot fault in the {bytes} bytes of region {name:?}: {source}; give it less memory")
            }
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
            _ => None,
        }
    }
}
