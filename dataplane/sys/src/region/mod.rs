//! Regions: memory that the kernel, network cards and other processes may write while this process holds it.
//!
//! A [`Region`] is one mapping with a fixed address and length. It never returns a reference to its bytes, because a
//! reference would promise exclusive access; it copies in, copies out, and provides atomics for the few words that two
//! processes share. I/O in flight holds an `Arc<Region>` through its [`IoBuf`], so a mapping outlives every operation
//! on it.
//!
//! Invariants: `address .. address + bytes` stays mapped until the last `Arc` is dropped; a shared region is a memfd
//! sealed against shrinking, so access cannot raise SIGBUS because a peer truncated it (a mapped file can be truncated
//! by any process that may write it, and is mapped only on its user's request, or if only processes of this user may);
//! a region is not inherited by forked children, so a fork cannot move pages under a device.
//!
//! A region does not allocate memory inside itself, and does not interpret its bytes.

mod access;
mod buffer;
mod error;
mod map;
pub(crate) mod memfd;
#[cfg(test)]
mod tests;

pub use buffer::IoBuf;
pub use error::RegionError;

pub(crate) use map::PAGE_BYTES;
pub use map::host_available_bytes;
use map::{Mapping, Request};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory_file::MemoryFile;

/// Page size policy of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Plain pages, even where the kernel would use huge ones by default.
    Never,
    /// Reserved huge pages if there are enough, else transparent ones if the kernel allows, else plain pages.
    #[default]
    Try,
    /// Like `Try`, but plain pages are an error.
    Require,
}

/// Kind of a region's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// 2 MiB pages from the reserved pool: guaranteed to be huge.
    HugeTlb,
    /// Transparent huge pages: requested, and the kernel is configured to provide them when it can.
    TransparentHuge,
    /// Plain pages, or memory of unknown kind.
    Plain,
}

/// Options of a region's allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// Name, shown in the process's memory map for shared regions, and in errors.
    pub name: String,
    /// Usable length in bytes; at least 1. The mapping is rounded up to whole pages.
    pub bytes: usize,
    /// True to back the region by a memfd, so that other processes can map it.
    pub shared: bool,
    /// Page size policy.
    pub huge: HugePages,
    /// NUMA node to bind the memory to. No effect on a machine with one node. Huge pages from the reserved pool are
    /// then faulted in at once, and plain pages are used if the node has too few.
    pub numa_node: Option<u32>,
    /// Part at the end that is bound to another NUMA node.
    pub far: Option<FarPart>,
    /// True to touch every page now, so that the first use does not fault.
    pub prefault: bool,
}

impl RegionOptions {
    /// Creates options for a private region of `bytes` bytes that tries huge pages and faults in on use.
    pub fn new(name: impl Into<String>, bytes: usize) -> Self {
        Self {
            name: name.into(),
            bytes,
            shared: false,
            huge: HugePages::Try,
            numa_node: None,
            far: None,
            prefault: false,
        }
    }
}

/// Part of a region, from an offset to its end, whose memory is on a NUMA node of its own: far memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FarPart {
    /// Offset at which it begins: a multiple of [`FarPart::UNIT_BYTES`], above 0 and below the length of the region.
    pub offset: usize,
    /// NUMA node to bind the memory to. No effect on a machine with one node.
    pub node: u32,
}

impl FarPart {
    /// Unit of the offset: no huge page spans both parts.
    pub const UNIT_BYTES: usize = map::HUGE_BYTES;
}

/// A mapping whose bytes other parties may write at any time. Any thread may use it.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    bytes: usize,
    kind: PageKind,
    writable: bool,
    file: Option<OwnedFd>,
    /// True if the file belongs to another process, which controls its seals.
    foreign: bool,
}

// SAFETY: a region is an address range and a descriptor. All access to the bytes goes through `copy`, whose
// accesses may race with any other, or through atomics; nothing in here is tied to a thread.
unsafe impl Send for Region {}
// SAFETY: as above; no method needs exclusive access.
unsafe impl Sync for Region {}

impl Region {
    /// Maps fresh zeroed memory according to the options.
    pub fn allocate(options: &RegionOptions) -> Result<Arc<Self>, RegionError> {
        if options.bytes == 0 {
            return Err(RegionError::Empty { name: options.name.clone() });
        }
        if let Some(far) = &options.far
            && (far.offset == 0 || far.offset >= options.bytes || !far.offset.is_multiple_of(FarPart::UNIT_BYTES))
        {
            return Err(RegionError::FarPart { name: options.name.clone(), bytes: options.bytes, offset: far.offset });
        }
        if options.prefault {
            map::check_available(&options.name, options.bytes)?;
        }
        if let Some(far) = options.far.filter(|_| options.prefault) {
            map::check_node_available(&options.name, options.bytes - far.offset, far.node)?;
        }
        // Shared memory that is faulted in here can be collapsed into huge pages afterwards.
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
        // Reserved pages are guaranteed by all nodes together, and a fault that the bound node cannot serve kills the
        // process. So they are faulted in now, or not used.
        if bound && kind == PageKind::HugeTlb && map::populate(&mapping).is_err() {
            request.reserved = false;
            // The former mapping is dropped first, to release its reservation.
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

    /// Maps a peer's memfd. It must be at least `bytes` long and sealed against shrinking, because a peer that could
    /// truncate it could kill this process with SIGBUS. A peer can still punch holes into it: they read as zeros.
    pub fn map_shared(fd: OwnedFd, bytes: usize, writable: bool) -> Result<Arc<Self>, RegionError> {
        let (mapping, kind) = map::peer(&fd, bytes, writable)?;
        map::keep_from_children(&mapping);
        Ok(Arc::new(Self { mapping, bytes, kind, writable, file: Some(fd), foreign: true }))
    }

    /// Maps a file in memory, and allocates all of it. The file gets the length of the options if it has another one;
    /// what it contains stays as it is. Other processes of the user can map it too, writable.
    ///
    /// # Errors
    /// When the file system has too little room, the options have a far part, or the kernel refuses.
    pub fn map_memory_file(file: &MemoryFile, options: &RegionOptions) -> Result<Arc<Self>, RegionError> {
        if options.bytes == 0 {
            return Err(RegionError::Empty { name: options.name.clone() });
        }
        if let Some(far) = &options.far {
            return Err(RegionError::FarPart { name: options.name.clone(), bytes: options.bytes, offset: far.offset });
        }
        let bytes = options.bytes as u64;
        let is_fresh = file.bytes().map_err(RegionError::File)? != bytes.next_multiple_of(file.page_bytes() as u64);
        if is_fresh {
            file.set_bytes(bytes).map_err(RegionError::File)?;
        }
        let (mapping, mut kind) = map::in_memory(file, options.bytes)?;
        // Before there are pages: later the policy has no effect on them.
        bind(&mapping, options)?;
        file.allocate().map_err(RegionError::File)?;
        map::keep_from_children(&mapping);
        // Pages of before stay as they are: collapsing many can take longer than their objects are waited for. Whether
        // they are huge shows in the first.
        let collapsed = if is_fresh { options.bytes } else { map::HUGE_BYTES };
        if kind == PageKind::Plain && options.huge != HugePages::Never && map::collapse_present(&mapping, collapsed) {
            kind = PageKind::TransparentHuge;
        }
        if options.huge == HugePages::Require && kind == PageKind::Plain {
            return Err(RegionError::NoHugePages { name: options.name.clone(), bytes: options.bytes });
        }
        // Only a fault less later: all pages exist.
        if options.prefault {
            map::populate(&mapping).ok();
        }
        let fd = file.fd().try_clone_to_owned().map_err(|source| RegionError::Map { bytes: options.bytes, source })?;
        Ok(Arc::new(Self { mapping, bytes: options.bytes, kind, writable: true, file: Some(fd), foreign: false }))
    }

    /// Maps the pool of a process of this user, or of root, writable: a memfd ([`Self::map_shared`]), or a file in
    /// memory that only its user may open, and so shorten.
    ///
    /// # Errors
    /// When it is neither, is shorter than announced, or the kernel refuses.
    pub fn map_pool(fd: OwnedFd, bytes: usize) -> Result<Arc<Self>, RegionError> {
        let (mapping, kind) = map::pool(&fd, bytes)?;
        map::keep_from_children(&mapping);
        Ok(Arc::new(Self { mapping, bytes, kind, writable: true, file: Some(fd), foreign: true }))
    }

    /// Maps the first bytes of a file read-only: they come from the page cache, and leave it under memory pressure.
    ///
    /// The file must not be truncated while the region lives: access to lost pages kills the process with SIGBUS,
    /// because a file has no seals ([`explain`](crate::lost_pages::explain) makes it report the reason). Writes of
    /// other processes to the file are visible here.
    ///
    /// # Errors
    /// When the file is shorter, or the kernel refuses.
    pub fn map_file(file: &std::fs::File, bytes: usize) -> Result<Arc<Self>, RegionError> {
        let mapping = map::file(file, bytes)?;
        map::keep_from_children(&mapping);
        Ok(Arc::new(Self { mapping, bytes, kind: PageKind::Plain, writable: false, file: None, foreign: false }))
    }

    /// Adopts memory that the caller owns; it is not unmapped on drop.
    ///
    /// # Safety
    ///
    /// `address .. address + bytes` must be mapped readable and writable, must stay so until the last clone of the
    /// returned `Arc` is gone (in-flight I/O and shards hold clones), and must not be accessed through Rust
    /// references while any region method or I/O may touch it.
    pub unsafe fn adopt(address: *mut u8, bytes: usize) -> Arc<Self> {
        Self::of_owner(address, bytes, true)
    }

    /// Adopts memory that the caller owns and that nothing may write to; it is not unmapped on drop.
    ///
    /// # Safety
    ///
    /// As for [`Self::adopt`], but the memory need not be mapped writable.
    pub unsafe fn adopt_read_only(address: *mut u8, bytes: usize) -> Arc<Self> {
        Self::of_owner(address, bytes, false)
    }

    fn of_owner(address: *mut u8, bytes: usize, writable: bool) -> Arc<Self> {
        let address = NonNull::new(address);
        let address = address.expect("adopted memory has an address");
        assert!(bytes > 0 && bytes <= isize::MAX as usize, "adopted memory has a length: {bytes}");
        let mapping = Mapping::foreign(address, bytes);
        Arc::new(Self { mapping, bytes, kind: PageKind::Plain, writable, file: None, foreign: false })
    }

    /// Returns true if a range is still mapped. Only [adopted](Self::adopt) memory may not be, if its owner violated
    /// the contract: for callers that prefer an error to a crash. The check then costs a system call, about 0.2 us for
    /// any length, and guarantees nothing about later actions of the owner. Panics if the range is out of bounds.
    pub fn is_mapped(&self, offset: usize, bytes: usize) -> bool {
        assert!(self.contains(offset, bytes), "range of {bytes} bytes at {offset} is outside a region");
        self.mapping.is_there(offset, bytes)
    }

    /// Returns the usable length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the region in this process: a number, for device registration and arithmetic.
    pub fn address(&self) -> u64 {
        self.mapping.address().as_ptr() as u64
    }

    /// Returns the kind of its pages.
    pub fn page_kind(&self) -> PageKind {
        self.kind
    }

    /// Returns true if this process may write to the region.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Returns the memfd of a shared region. A process that receives it can map the region writable, unless it is
    /// [sealed](Self::is_sealed); see [`Region::read_only_fd`].
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Returns true if the region's memfd can only be mapped read-only. Always false for a private region.
    pub fn is_sealed(&self) -> bool {
        self.file.as_ref().is_some_and(memfd::sealed_against_writers)
    }

    /// Returns a descriptor that no process can map writable, for peers that only read: its mode forbids it (`EACCES`).
    ///
    /// Reopening read-only is not enough, because the receiver could reopen it for writing through its own `/proc`. So
    /// this also seals the memfd against future writers, permanently: after the first call, [`Region::fd`] too can only
    /// be mapped read-only. Existing mappings keep their rights. A region that a peer must write has to be mapped by
    /// that peer before, or be a separate region.
    ///
    /// # Errors
    /// When the region is private, or belongs to another process that has not sealed it.
    pub fn read_only_fd(&self) -> io::Result<OwnedFd> {
        let unsupported = |text| Err(io::Error::new(io::ErrorKind::Unsupported, text));
        let Some(file) = &self.file else {
            return unsupported("a private region has no descriptor: allocate it shared");
        };
        if !memfd::sealed_against_writers(file) {
            if self.foreign {
                return unsupported("only its owner can seal another process's region: request it from that process");
            }
            memfd::add_seals(file, libc::F_SEAL_FUTURE_WRITE)?;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reopened = OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC).open(path)?;
        Ok(reopened.into())
    }
}

/// Binds a fresh mapping to the NUMA nodes of the options. Returns true if binding has an effect on this machine.
fn bind(mapping: &Mapping, options: &RegionOptions) -> Result<bool, RegionError> {
    let mut is_bound = false;
    let mut bind = |offset, node| -> Result<(), RegionError> {
        let failed = |source| RegionError::Bind { name: options.name.clone(), node, source };
        is_bound |= map::bind_to_node(mapping, offset, node).map_err(failed)?;
        Ok(())
    };
    if let Some(node) = options.numa_node {
        bind(0, node)?;
    }
    if let Some(far) = options.far {
        bind(far.offset, far.node)?;
    }
    Ok(is_bound)
}
