//! Protection domains and memory regions: memory that a device may read and write.
//!
//! A registration holds the [`Region`](crate::Region) under it, and every request holds the registrations of its
//! pieces from before it is posted until its completion is retired or its queue pair is gone. So memory is never
//! unmapped, and never deregistered, under a request: dropping a [`MemoryRegion`] only ends it when no request is left.
//!
//! What peers do is not counted: a peer that has the key reaches the memory until it is deregistered. Whoever takes
//! memory back from peers drops its handles, waits until [`MemoryRegion::is_last`], and drops the last.

use super::context::Context;
use super::error::VerbsError;
use super::ffi::*;
use crate::region::IoBuf;
use libc::c_int;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that register one memory at the same time, at most.
const MAX_THREADS: usize = 64;

/// What a device may do to memory. Reading it for our own requests is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// Our own requests write it: receives, and the destinations of reads.
    pub local_write: bool,
    /// Peers with the key may write it.
    pub remote_write: bool,
    /// Peers with the key may read it.
    pub remote_read: bool,
    /// The bytes of one request may become visible in any order. Faster on many machines; what was written is complete
    /// when its completion is there. Asked for where it is offered, else without effect.
    pub relaxed_ordering: bool,
    /// Do not pin: the device faults pages in. An error where it is not offered.
    pub on_demand: bool,
}

impl Access {
    /// For our own requests in both directions.
    pub const LOCAL: Self =
        Self { local_write: true, remote_write: false, remote_read: false, relaxed_ordering: true, on_demand: false };
    /// For our own requests, and for peers in both directions.
    pub const REMOTE: Self = Self { remote_write: true, remote_read: true, ..Self::LOCAL };

    pub(crate) fn raw(self) -> u32 {
        let bit = |set: bool, bits: u32| if set { bits } else { 0 };
        bit(self.local_write, ACCESS_LOCAL_WRITE)
            // Verbs want the one with the other.
            | bit(self.remote_write, ACCESS_REMOTE_WRITE | ACCESS_LOCAL_WRITE)
            | bit(self.remote_read, ACCESS_REMOTE_READ)
            | bit(self.relaxed_ordering, ACCESS_RELAXED_ORDERING)
            | bit(self.on_demand, ACCESS_ON_DEMAND)
    }
}

/// What keeps objects of one device apart: queue pairs reach memory of their own domain only. Clones are the same
/// domain. Any thread may use it.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Domain>,
}

pub(crate) struct Domain {
    raw: NonNull<ibv_pd>,
    pub(crate) context: Arc<Context>,
}

// SAFETY: domains may be used from any thread, several at the same time.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: everything made in it held an Arc of it, so nothing is left; freed once.
        if unsafe { (self.context.functions().dealloc_pd)(self.raw.as_ptr()) } != 0 {
            // The device still uses it: better never closed than closed under it.
            mem::forget(Arc::clone(&self.context));
        }
    }
}

impl ProtectionDomain {
    /// A domain of its own.
    ///
    /// # Errors
    /// When the device has no more of them.
    pub fn new(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open; the library returns a domain that is ours, or null.
        let raw = unsafe { (context.functions().alloc_pd)(context.raw()) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { inner: Arc::new(Domain { raw, context: Arc::clone(context) }) }),
            None => Err(context.refused("make a protection domain", io::Error::last_os_error())),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<Domain> {
        &self.inner
    }

    /// The device.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    /// Registers memory. Pins it, and faults it in, which takes a time that grows with its length.
    ///
    /// # Errors
    /// When it may not be pinned (the error says how to raise the limit), is longer than the device takes, or on-demand
    /// paging is asked for and not offered.
    pub fn register(&self, memory: &IoBuf, access: Access) -> Result<MemoryRegion, VerbsError> {
        let context = self.context();
        let bytes = memory.bytes();
        context.limit("bytes in a memory region", bytes as u64, context.limits().memory_bytes)?;
        if access.on_demand && !context.limits().on_demand {
            return Err(self.not_offered("on-demand paging"));
        }
        if memory.region().writable() || !(access.local_write || access.remote_write) {
            let raw = self.register_raw(memory, access)?;
            return Ok(MemoryRegion::new(self, raw, Some(memory.clone()), access.raw()));
        }
        Err(self.not_offered("write access to memory that is mapped read-only"))
    }

    fn register_raw(&self, memory: &IoBuf, access: Access) -> Result<NonNull<ibv_mr>, VerbsError> {
        let functions = self.context().functions();
        let (place, bytes) = (memory.pointer().cast(), memory.bytes());
        // SAFETY: the range is mapped, and stays mapped as long as the registration, which holds the region. Rust code
        // holds no references into regions, so the device may read and write it at any time.
        let raw = unsafe {
            match functions.reg_mr_iova2 {
                Some(register) => {
                    register(self.inner.raw(), place, bytes, memory.pointer().addr() as u64, access.raw())
                }
                None => {
                    let plain = access.raw() & !ACCESS_RELAXED_ORDERING;
                    (functions.reg_mr)(self.inner.raw(), place, bytes, plain as c_int)
                }
            }
        };
        NonNull::new(raw).ok_or_else(|| self.register_failed(bytes as u64, io::Error::last_os_error()))
    }

    /// Registers memory in chunks of `chunk_bytes`, by up to `threads` threads at the same time, because pinning is the
    /// kernel's work and goes at one core's speed per call. In order; the last chunk may be shorter.
    ///
    /// # Errors
    /// The first of the chunks; those that were registered are given back.
    pub fn register_chunks(
        &self,
        memory: &IoBuf,
        access: Access,
        chunk_bytes: usize,
        threads: usize,
    ) -> Result<Vec<MemoryRegion>, VerbsError> {
        let chunk_bytes = chunk_bytes.max(1);
        let chunks = memory.bytes().div_ceil(chunk_bytes);
        let threads = threads.clamp(1, MAX_THREADS).min(chunks.max(1));
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= chunks {
                    return done;
                }
                let start = index * chunk_bytes;
                let chunk = memory.slice(start, chunk_bytes.min(memory.bytes() - start));
                let result = self.register(&chunk, access);
                if result.is_err() {
                    // Nobody needs to go on.
                    next.store(chunks, Ordering::Relaxed);
                }
                done.push((index, result));
            }
        };
        let mut done = std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut done = work();
            for helper in helpers {
                done.append(&mut helper.join().expect("registering does not panic"));
            }
            done
        });
        done.sort_by_key(|(index, _)| *index);
        done.into_iter().map(|(_, result)| result).collect()
    }

    /// Registers a dma-buf: memory of another device, such as a GPU. `address` is what peers and pieces call its start.
    /// The kernel keeps the buffer alive as long as the registration.
    ///
    /// # Errors
    /// When the library or the device cannot, or the range is not inside the buffer.
    pub fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let Some(register) = self.context().functions().reg_dmabuf_mr else {
            return Err(self.not_offered("dma-buf registration (rdma-core 34 or newer)"));
        };
        let flags = access.raw() & !ACCESS_ON_DEMAND;
        // SAFETY: the kernel checks the descriptor and the range, and holds the buffer itself.
        let raw = unsafe { register(self.inner.raw(), offset, bytes, address, fd.as_raw_fd(), flags as c_int) };
        match NonNull::new(raw) {
            Some(raw) => {
                let mut region = MemoryRegion::new(self, raw, None, flags);
                if let Some(shared) = Arc::get_mut(&mut region.shared) {
                    (shared.address, shared.bytes) = (address, bytes);
                }
                Ok(region)
            }
            None => Err(self.register_failed(bytes as u64, io::Error::last_os_error())),
        }
    }

    fn not_offered(&self, what: &'static str) -> VerbsError {
        VerbsError::NotOffered { device: self.context().name().to_owned(), what }
    }

    fn register_failed(&self, bytes: u64, source: io::Error) -> VerbsError {
        if source.raw_os_error() == Some(libc::ENOMEM) {
            return VerbsError::Memlock { bytes, limit_bytes: memlock_limit_bytes() };
        }
        VerbsError::Register { device: self.context().name().to_owned(), bytes, source }
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProtectionDomain").field(&self.context().name()).finish()
    }
}

/// How much memory this process may lock in all; `None` when it is not limited.
#[must_use]
pub fn memlock_limit_bytes() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills one struct.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Registered memory. Clones are the same registration; it ends when the last of them, and the last request on it, is
/// gone. Any thread may use it.
///
/// Counting requests costs each of them two atomic steps on a word of this handle. Threads that post a lot each
/// keep a handle of their own, made by [`MemoryRegion::separate`], so that they do not share that word.
#[derive(Clone)]
pub struct MemoryRegion {
    shared: Arc<HandleState>,
}

/// What a handle leads to; two cache lines of its own, so that the counters of two threads' handles do not meet.
#[repr(align(128))]
struct HandleState {
    address: u64,
    bytes: usize,
    local_key: u32,
    access: u32,
    /// Which domain, by its address: the registration keeps it alive.
    domain: *const Domain,
    registration: Arc<Registration>,
}

// SAFETY: the pointer is only compared.
unsafe impl Send for HandleState {}
// SAFETY: as above.
unsafe impl Sync for HandleState {}

struct Registration {
    raw: NonNull<ibv_mr>,
    remote_key: u32,
    memory: Option<IoBuf>,
    domain: Arc<Domain>,
}

// SAFETY: a registration is only read, and deregistered once, on any thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: no request is left that names it, as requests hold it; deregistered once.
        if unsafe { (self.domain.context.functions().dereg_mr)(self.raw.as_ptr()) } != 0 {
            // The device may still write there: the memory must not be used for anything else.
            mem::forget((self.memory.take(), Arc::clone(&self.domain)));
        }
    }
}

impl MemoryRegion {
    fn new(domain: &ProtectionDomain, raw: NonNull<ibv_mr>, memory: Option<IoBuf>, access: u32) -> Self {
        // SAFETY: a registration that was just made for us; its fields do not change.
        let (local_key, remote_key) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        let (address, bytes) = match &memory {
            Some(memory) => (memory.pointer().addr() as u64, memory.bytes()),
            None => (0, 0),
        };
        let domain = Arc::clone(&domain.inner);
        let shared = HandleState {
            address,
            bytes,
            local_key,
            access,
            domain: Arc::as_ptr(&domain),
            registration: Arc::new(Registration { raw, remote_key, memory, domain }),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The same registration behind a counter of its own, for another thread.
    #[must_use]
    pub fn separate(&self) -> Self {
        let HandleState { address, bytes, local_key, access, domain, ref registration } = *self.shared;
        let registration = Arc::clone(registration);
        Self { shared: Arc::new(HandleState { address, bytes, local_key, access, domain, registration }) }
    }

    /// Whether neither another handle nor any request holds the registration: dropping this one ends it.
    #[must_use]
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.shared) == 1 && Arc::strong_count(&self.shared.registration) == 1
    }

    /// Where it starts, as peers and pieces name it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.shared.address
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shared.bytes
    }

    /// What a peer must show to reach it.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.shared.registration.remote_key
    }

    /// What the device calls it for our own requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.shared.local_key
    }

    /// The memory; `None` for a dma-buf.
    #[must_use]
    pub fn memory(&self) -> Option<&IoBuf> {
        self.shared.registration.memory.as_ref()
    }

    /// A part of it, for a request. `None` when it is not inside.
    #[must_use]
    pub fn piece(&self, offset: usize, bytes: u32) -> Option<Piece<'_>> {
        let end = offset.checked_add(bytes as usize)?;
        (end <= self.shared.bytes).then(|| Piece { memory: self, address: self.shared.address + offset as u64, bytes })
    }

    /// As [`MemoryRegion::piece`], by address.
    #[must_use]
    pub fn piece_at(&self, address: u64, bytes: u32) -> Option<Piece<'_>> {
        self.piece(usize::try_from(address.checked_sub(self.shared.address)?).ok()?, bytes)
    }

    /// Whether both are one handle, and not only one registration.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn is_of(&self, domain: &Arc<Domain>) -> bool {
        std::ptr::eq(self.shared.domain, Arc::as_ptr(domain))
    }

    pub(crate) fn device_may_write(&self) -> bool {
        self.shared.access & ACCESS_LOCAL_WRITE != 0
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({:#x}+{:#x})", self.address(), self.bytes())
    }
}

/// A part of registered memory, inside it for certain.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    pub(crate) memory: &'a MemoryRegion,
    address: u64,
    bytes: u32,
}

impl Piece<'_> {
    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    pub(crate) fn raw(&self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.bytes, lkey: self.memory.shared.local_key }
    }
}
