//! Protection domains and memory regions: memory that a device may read and write.
//!
//! A registration holds the [`Region`](crate::Region) under it, and every request holds the registrations of its pieces
//! from before it is posted until its completion is retired or its queue pair is gone. So memory is never unmapped, and
//! never deregistered, under a request: dropping a [`MemoryRegion`] deregisters it only when no request is left.
//!
//! One-sided accesses of peers are not counted: a peer that has the key can access the memory until it is deregistered.
//! To revoke peers' access, drop the handles, wait until [`MemoryRegion::is_last`], and drop the last one.

use super::context::Context;
use super::error::VerbsError;
use super::ffi::*;
use crate::device::DeviceRange;
use crate::region::IoBuf;
use libc::{c_int, c_void};
use std::fmt;
use std::io;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Limit of threads that register one memory concurrently.
const MAX_THREADS: usize = 64;

/// Access rights of a device to memory. Reading it for local requests is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// Local requests may write it: receives, and the destinations of reads.
    pub local_write: bool,
    /// Peers that have the key may write it.
    pub remote_write: bool,
    /// Peers that have the key may read it.
    pub remote_read: bool,
    /// Relaxed ordering: the bytes of one request may become visible in any order. Faster on many machines; the written
    /// data is complete when its completion has arrived. Ignored if it is not supported.
    pub relaxed_ordering: bool,
    /// On-demand paging: the memory is not pinned, and the device faults pages in. An error if it is not supported.
    pub on_demand: bool,
}

impl Access {
    /// Rights for local requests in both directions.
    pub const LOCAL: Self =
        Self { local_write: true, remote_write: false, remote_read: false, relaxed_ordering: true, on_demand: false };
    /// Rights for local requests, and for peers in both directions.
    pub const REMOTE: Self = Self { remote_write: true, remote_read: true, ..Self::LOCAL };

    pub(crate) fn raw(self) -> u32 {
        let bit = |set: bool, bits: u32| if set { bits } else { 0 };
        bit(self.local_write, ACCESS_LOCAL_WRITE)
            // Verbs require local write access for remote write access.
            | bit(self.remote_write, ACCESS_REMOTE_WRITE | ACCESS_LOCAL_WRITE)
            | bit(self.remote_read, ACCESS_REMOTE_READ)
            | bit(self.relaxed_ordering, ACCESS_RELAXED_ORDERING)
            | bit(self.on_demand, ACCESS_ON_DEMAND)
    }
}

/// Protection domain: isolates objects of one device, because queue pairs can access only memory of their own domain.
/// Clones refer to the same domain. Any thread may use it.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Domain>,
}

pub(crate) struct Domain {
    raw: NonNull<ibv_pd>,
    pub(crate) context: Arc<Context>,
}

// SAFETY: domains may be used from several threads at the same time.
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
        // SAFETY: objects created in it held an Arc of it, so none is left; freed once.
        if unsafe { (self.context.functions().dealloc_pd)(self.raw.as_ptr()) } != 0 {
            // The device still uses it: leaking it is better than closing the device under it.
            mem::forget(Arc::clone(&self.context));
        }
    }
}

impl ProtectionDomain {
    /// Creates a protection domain.
    ///
    /// # Errors
    /// When the device supports no more of them.
    pub fn new(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open; the library returns a new domain for this caller, or null.
        let raw = unsafe { (context.functions().alloc_pd)(context.raw()) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { inner: Arc::new(Domain { raw, context: Arc::clone(context) }) }),
            None => Err(context.refused("create a protection domain", io::Error::last_os_error())),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<Domain> {
        &self.inner
    }

    /// Returns the device context.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    /// Registers memory. Pins it and faults it in, which takes time proportional to its length.
    ///
    /// # Errors
    /// When it may not be pinned (the error tells how to raise the limit), exceeds the device's limit, or on-demand
    /// paging is requested and not supported.
    pub fn register(&self, memory: &IoBuf, access: Access) -> Result<MemoryRegion, VerbsError> {
        let context = self.context();
        let bytes = memory.bytes();
        context.limit("bytes in a memory region", bytes as u64, context.limits().memory_bytes)?;
        if access.on_demand && !context.limits().on_demand {
            return Err(self.not_offered("on-demand paging"));
        }
        if memory.region().writable() || !(access.local_write || access.remote_write) {
            let raw = self.register_raw(memory.pointer().cast(), bytes, access)?;
            return Ok(MemoryRegion::new(self, raw, RegisteredMemory::Host(memory.clone()), access.raw()));
        }
        Err(self.not_offered("write access to memory that is mapped read-only"))
    }

    pub(super) fn register_raw(
        &self,
        place: *mut c_void,
        bytes: usize,
        access: Access,
    ) -> Result<NonNull<ibv_mr>, VerbsError> {
        let functions = self.context().functions();
        // SAFETY: the caller holds the memory as long as the registration, and Rust code holds no references into it,
        // so the device may read and write it at any time.
        let raw = unsafe {
            match functions.reg_mr_iova2 {
                Some(register) => register(self.inner.raw(), place, bytes, place.addr() as u64, access.raw()),
                None => {
                    let plain = access.raw() & !ACCESS_RELAXED_ORDERING;
                    (functions.reg_mr)(self.inner.raw(), place, bytes, plain as c_int)
                }
            }
        };
        NonNull::new(raw).ok_or_else(|| self.register_failed(bytes as u64, io::Error::last_os_error()))
    }

    /// Registers memory in chunks of `chunk_bytes`, by up to `threads` threads concurrently, because the kernel pins at
    /// the speed of one core per call. Returns the chunks in order; the last one may be shorter.
    ///
    /// # Errors
    /// The first error of a chunk; the registered ones are deregistered.
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
                    // The other threads may stop.
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

    pub(super) fn not_offered(&self, what: &'static str) -> VerbsError {
        VerbsError::NotOffered { device: self.context().name().to_owned(), what }
    }

    pub(super) fn register_failed(&self, bytes: u64, source: io::Error) -> VerbsError {
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

/// Returns the limit of locked memory of this process, in bytes; `None` if it is unlimited.
#[must_use]
pub fn memlock_limit_bytes() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills one struct.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Registered memory. Clones share the registration; it ends when the last clone, and the last request on it, is gone.
/// Any thread may use it.
///
/// Counting requests costs two atomic operations per request on a word of this handle. Threads that post a lot keep a
/// handle of their own, created by [`MemoryRegion::separate`], so that they do not contend for that word.
#[derive(Clone)]
pub struct MemoryRegion {
    shared: Arc<HandleState>,
}

/// State behind a handle; two cache lines of its own, against false sharing between the counters of two threads'
/// handles.
#[repr(align(128))]
struct HandleState {
    address: u64,
    bytes: usize,
    local_key: u32,
    access: u32,
    /// Address of the domain, for comparisons: the registration keeps the domain alive.
    domain: *const Domain,
    registration: Arc<Registration>,
}

// SAFETY: the pointer is only compared.
unsafe impl Send for HandleState {}
// SAFETY: as above.
unsafe impl Sync for HandleState {}

/// Memory that a registration holds.
pub(super) enum RegisteredMemory {
    Host(IoBuf),
    Device(DeviceRange),
}

struct Registration {
    raw: NonNull<ibv_mr>,
    remote_key: u32,
    memory: RegisteredMemory,
    domain: Arc<Domain>,
}

// SAFETY: a registration is only read, and deregistered once, on any thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: no request on it is left, because requests hold it; deregistered once.
        if unsafe { (self.domain.context.functions().dereg_mr)(self.raw.as_ptr()) } != 0 {
            // The device may still write there: the memory must not be reused.
            match &self.memory {
                RegisteredMemory::Host(memory) => mem::forget(memory.clone()),
                RegisteredMemory::Device(range) => mem::forget(range.clone()),
            }
            mem::forget(Arc::clone(&self.domain));
        }
    }
}

impl MemoryRegion {
    pub(super) fn new(domain: &ProtectionDomain, raw: NonNull<ibv_mr>, memory: RegisteredMemory, access: u32) -> Self {
        // SAFETY: the registration was just created; its fields do not change.
        let (local_key, remote_key) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        let (address, bytes) = match &memory {
            RegisteredMemory::Host(memory) => (memory.pointer().addr() as u64, memory.bytes()),
            RegisteredMemory::Device(range) => (range.address(), range.bytes() as usize),
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

    /// Returns a handle of the same registration with a counter of its own, for another thread.
    #[must_use]
    pub fn separate(&self) -> Self {
        let HandleState { address, bytes, local_key, access, domain, ref registration } = *self.shared;
        let registration = Arc::clone(registration);
        Self { shared: Arc::new(HandleState { address, bytes, local_key, access, domain, registration }) }
    }

    /// Returns true if neither another handle nor a request holds the registration: dropping this handle deregisters
    /// it.
    #[must_use]
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.shared) == 1 && Arc::strong_count(&self.shared.registration) == 1
    }

    /// Returns the start address, for peers and pieces.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.shared.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shared.bytes
    }

    /// Returns the remote key, with which peers access the memory.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.shared.registration.remote_key
    }

    /// Returns the local key, for local requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.shared.local_key
    }

    /// Returns the memory; `None` for that of a device.
    #[must_use]
    pub fn memory(&self) -> Option<&IoBuf> {
        match &self.shared.registration.memory {
            RegisteredMemory::Host(memory) => Some(memory),
            RegisteredMemory::Device(_) => None,
        }
    }

    /// Returns a part of the memory, for a request; `None` if it is out of bounds.
    #[must_use]
    pub fn piece(&self, offset: usize, bytes: u32) -> Option<Piece<'_>> {
        let end = offset.checked_add(bytes as usize)?;
        (end <= self.shared.bytes).then(|| Piece { memory: self, address: self.shared.address + offset as u64, bytes })
    }

    /// Returns a part of the memory by address, see [`MemoryRegion::piece`].
    #[must_use]
    pub fn piece_at(&self, address: u64, bytes: u32) -> Option<Piece<'_>> {
        self.piece(usize::try_from(address.checked_sub(self.shared.address)?).ok()?, bytes)
    }

    /// Returns true if both are clones of one handle, not only of one registration.
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

/// A part of registered memory, always in bounds.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    pub(crate) memory: &'a MemoryRegion,
    address: u64,
    bytes: u32,
}

impl Piece<'_> {
    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    pub(crate) fn raw(&self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.bytes, lkey: self.memory.shared.local_key }
    }
}
