//! Regions: memory that the kernel, network cards and other processes may write while we hold it.
//!
//! A [`Region`] is one mapping with a fixed address and length. It never hands out a reference to its bytes, because
//! a reference would promise that nobody else writes them; it copies in, copies out, and gives atomics for the
//! few words that two processes agree on. In-flight I/O holds an `Arc<Region>` through its [`IoBuf`], so a mapping
//! outlives every operation on it.
//!
//! Invariants: `address .. address + bytes` stays mapped until the last `Arc` is gone; a shared region is a memfd
//! sealed against shrinking, so touching it cannot raise SIGBUS because a peer cut it short (a mapped file can be cut
//! short by who may write to it, and is mapped only where its user says so); a region is not
//! inherited by forked children, so a fork cannot move pages under a device.
//!
//! It does not allocate inside a region, and it does not check what the bytes mean.

mod access;
mod buffer;
mod error;
mod map;
mod memfd;
#[cfg(test)]
mod tests;

pub use buffer::IoBuf;
pub use error::RegionError;

use map::{Mapping, Request};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Whether a region wants huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Plain pages, even where the kernel would use huge ones by itself.
    Never,
    /// Reserved huge pages if there are enough, else transparent ones if the kernel allows, else plain pages.
    #[default]
    Try,
    /// As `Try`, but plain pages are an error.
    Require,
}

/// The pages a region got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// 2 MiB pages from the reserved pool: they are huge for certain.
    HugeTlb,
    /// The kernel was asked for transparent huge pages and is configured to give them when it can.
    TransparentHuge,
    /// Plain pages, or memory of which we do not know.
    Plain,
}

/// What to allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// Shown in the process's memory map for shared regions, and in errors.
    pub name: String,
    /// Usable length; at least 1. The mapping is rounded up to whole pages.
    pub bytes: usize,
    /// Back it by a memfd, so that other processes can map it.
    pub shared: bool,
    /// Page size wanted.
    pub huge: HugePages,
    /// Bind to this NUMA node. Without effect on a machine with one node. Huge pages from the reserved pool are then
    /// faulted in at once, and plain ones are taken where the node has too few.
    pub numa_node: Option<u32>,
    /// Touch every page now, so that the first use does not fault.
    pub prefault: bool,
}

impl RegionOptions {
    /// A private region of `bytes` bytes that tries huge pages and faults in on use.
    pub fn new(name: impl Into<String>, bytes: usize) -> Self {
        Self { name: name.into(), bytes, shared: false, huge: HugePages::Try, numa_node: None, prefault: false }
    }
}

/// A mapping whose bytes others may write at any time. Any thread may use it.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    bytes: usize,
    kind: PageKind,
    writable: bool,
    file: Option<OwnedFd>,
    /// Whether the file is another process's, who decides about its seals.
    foreign: bool,
}

// SAFETY: a region is an address range and a descriptor. All access to the bytes goes through `copy`, whose
// accesses may race with any other, or through atomics; nothing in here is tied to a thread.
unsafe impl Send for Region {}
// SAFETY: as above; no method needs exclusive access.
unsafe impl Sync for Region {}

impl Region {
    /// Maps fresh zeroed memory as the options say.
    pub fn allocate(options: &RegionOptions) -> Result<Arc<Self>, RegionError> {
        if options.bytes == 0 {
            return Err(RegionError::Empty { name: options.name.clone() });
        }
        if options.prefault {
            map::check_available(&options.name, options.bytes)?;
        }
        // Memory that is shared and faulted in here can be put together into huge pages afterwards.
        let collapsible = options.shared && options.prefault && options.huge != HugePages::Never;
        let mut request = Request {
            name: &options.name,
            bytes: options.bytes,
            shared: options.shared,
            huge: if collapsible { HugePages::Try } else { options.huge },
            reserved: true,
        };
        let (mut mapping, mut kind, mut file) = map::create(&request)?;
        let bound = bind(&mapping, options)?;
        // Reserved pages are promised by all nodes together, and a touch that the one node cannot serve ends the
        // process. They are taken now, or not at all.
        if bound && kind == PageKind::HugeTlb && map::populate(&mapping).is_err() {
            request.reserved = false;
            // The former mapping goes first: its promise is in the way of nobody else's.
            drop((mapping, file));
            (mapping, kind, file) = map::create(&request)?;
            bind(&mapping, options)?;
        }
        map::keep_from_children(&mapping);
        if options.prefault {
            if collapsible && kind == PageKind::Plain && map::collapse(&mapping) {
                kind = PageKind::TransparentHuge;
            }
            if options.huge == HugePages::Require && kind == PageKind::Plain {
                return Err(RegionError::NoHugePages { name: options.name.clone(), bytes: options.bytes });
            }
            map::prefault(&mapping).map_err(|source| RegionError::Prefault {
                name: options.name.clone(),
                bytes: options.bytes,
                source,
            })?;
        }
        Ok(Arc::new(Self { mapping, bytes: options.bytes, kind, writable: true, file, foreign: false }))
    }

    /// Maps a peer's memfd. It must be at least `bytes` long and sealed against shrinking, because a peer that
    /// could cut it short could kill us with SIGBUS. A peer can still punch holes into it: they read as zeros.
    pub fn map_shared(fd: OwnedFd, bytes: usize, writable: bool) -> Result<Arc<Self>, RegionError> {
        let (mapping, kind) = map::peer(&fd, bytes, writable)?;
        map::keep_from_children(&mapping);
        Ok(Arc::new(Self { mapping, bytes, kind, writable, file: Some(fd), foreign: true }))
    }

    /// Maps the first bytes of a file, to be read: they come from the page cache, and leave it when memory is short.
    ///
    /// The file must not be made shorter while this lives: touching what it lost ends the process with SIGBUS, for a
    /// file has no seals ([`explain`](crate::lost_pages::explain) has it say why). What another process writes to it is
    /// seen here.
    ///
    /// # Errors
    /// When the file is shorter, or the kernel refuses.
    pub fn map_file(file: &std::fs::File, bytes: usize) -> Result<Arc<Self>, RegionError> {
        let mapping = map::file(file, bytes)?;
        map::keep_from_children(&mapping);
        Ok(Arc::new(Self { mapping, bytes, kind: PageKind::Plain, writable: false, file: None, foreign: false }))
    }

    /// Takes memory that the caller owns; it is not unmapped on drop.
    ///
    /// # Safety
    ///
    /// `address .. address + bytes` must be mapped readable and writable, must stay so until the last clone of the
    /// returned `Arc` is gone (in-flight I/O and shards hold clones), and must not be accessed through Rust
    /// references while any region method or I/O may touch it.
    pub unsafe fn adopt(address: *mut u8, bytes: usize) -> Arc<Self> {
        let address = NonNull::new(address);
        let address = address.expect("adopted memory has an address");
        assert!(bytes > 0 && bytes <= isize::MAX as usize, "adopted memory has a length: {bytes}");
        let mapping = Mapping::foreign(address, bytes);
        Arc::new(Self { mapping, bytes, kind: PageKind::Plain, writable: true, file: None, foreign: false })
    }

    /// Whether a range is still mapped. Only of [adopted](Self::adopt) memory it may be otherwise, when its owner broke
    /// the promise: for those who would rather refuse than crash. It costs a call to the kernel then, about 0.2 us
    /// however long the range, and says nothing of what the owner does the moment after. Panics outside the region.
    pub fn is_mapped(&self, offset: usize, bytes: usize) -> bool {
        assert!(self.contains(offset, bytes), "range of {bytes} bytes at {offset} is outside a region");
        self.mapping.is_there(offset, bytes)
    }

    /// Usable length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the region starts in this process. A number, for device registration and arithmetic.
    pub fn address(&self) -> u64 {
        self.mapping.address().as_ptr() as u64
    }

    /// The pages it got.
    pub fn page_kind(&self) -> PageKind {
        self.kind
    }

    /// Whether this process may write to it.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The memfd of a shared region. Whoever gets it can map the region writable, unless it is
    /// [sealed](Self::is_sealed); see [`Region::read_only_fd`].
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Whether the region's memfd can only be mapped read-only by now. Never of a private region.
    pub fn is_sealed(&self) -> bool {
        self.file.as_ref().is_some_and(memfd::sealed_against_writers)
    }

    /// A descriptor that no process can map writable, for peers who only read: its mode forbids it (`EACCES`).
    ///
    /// Reopening read-only is not enough, as the receiver could reopen it for writing through its own `/proc`. So this
    /// also seals the memfd against future writers, for good: after the first call, [`Region::fd`] too can only be
    /// mapped read-only. Mappings that exist keep their rights. A region that a peer must write needs to
    /// be mapped by that peer before, or be another region.
    ///
    /// # Errors
    /// When the region is private, or of another process that has not sealed it itself.
    pub fn read_only_fd(&self) -> io::Result<OwnedFd> {
        let unsupported = |text| Err(io::Error::new(io::ErrorKind::Unsupported, text));
        let Some(file) = &self.file else {
            return unsupported("a private region has no descriptor: allocate it shared");
        };
        if !memfd::sealed_against_writers(file) {
            if self.foreign {
                return unsupported("another process's region is not ours to seal: ask that process for it");
            }
            memfd::add_seals(file, libc::F_SEAL_FUTURE_WRITE)?;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reopened = OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC).open(path)?;
        Ok(reopened.into())
    }
}

/// Binds a fresh mapping where the options say; whether that means anything on this machine.
fn bind(mapping: &Mapping, options: &RegionOptions) -> Result<bool, RegionError> {
    let Some(node) = options.numa_node else { return Ok(false) };
    let failed = |source| RegionError::Bind { name: options.name.clone(), node, source };
    map::bind_to_node(mapping, node).map_err(failed)
}
