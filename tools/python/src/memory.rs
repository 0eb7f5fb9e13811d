//! Memory of the caller: mapping checks, registration, and copies that cannot crash.
//!
//! Addresses come from Python as numbers, so any may be wrong. Ranges to register are checked against the process's
//! mappings first; other ranges are read through the kernel, which reports unmapped memory.

pub(crate) mod device_memory;
pub(crate) mod host_memory;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvplane::device::{self, Backing, DeviceError};
use kvplane::memory_map::{Mapping, MemoryMap};
use kvplane::{Region, interrupt};

/// Longest wait of unregistering for calls that use the memory; each ends by its own deadline before that.
const LEAVE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_micros(200);

/// Permitted access to a range of this process's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RangeAccess {
    /// Not all of it is mapped and readable.
    No,
    /// Readable.
    Readable,
    /// Readable and writable.
    Writable,
}

impl RangeAccess {
    /// Returns the access by the kernel's list of mappings; without the list, the caller is trusted.
    pub(crate) fn by(map: Option<&MemoryMap>, address: u64, bytes: u64) -> Self {
        if address == 0 || address.checked_add(bytes).is_none() {
            return Self::No;
        }
        match map {
            Some(map) if !map.covers(address, bytes, Mapping::is_readable) => Self::No,
            Some(map) if !map.covers(address, bytes, Mapping::is_writable) => Self::Readable,
            _ => Self::Writable,
        }
    }
}

/// Returns the access to a range, by the kernel's list of mappings.
pub(crate) fn mapped(address: u64, bytes: u64) -> RangeAccess {
    RangeAccess::by(MemoryMap::read().ok().as_ref(), address, bytes)
}

/// Memory of this process, read through the kernel, which reports what is not mapped.
pub(crate) struct KernelView(File);

impl KernelView {
    /// Opens it.
    pub(crate) fn open() -> std::io::Result<Self> {
        File::open("/proc/self/mem").map(Self)
    }

    /// Reads a range; fails where it is not mapped.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> std::io::Result<()> {
        self.0.read_exact_at(bytes, address)
    }
}

/// Reads memory of this process through the kernel; fails where it is not mapped.
pub(crate) fn peek(address: u64, bytes: &mut [u8]) -> std::io::Result<()> {
    KernelView::open()?.read(address, bytes)
}

/// Writes memory of this process through the kernel; fails where it is not mapped writable.
pub(crate) fn poke(address: u64, bytes: &[u8]) -> std::io::Result<()> {
    // `/proc/self/mem` would write read-only mappings, too.
    if mapped(address, bytes.len() as u64) != RangeAccess::Writable {
        return Err(std::io::Error::from(std::io::ErrorKind::PermissionDenied));
    }
    File::options().write(true).open("/proc/self/mem")?.write_all_at(bytes, address)
}

/// Converts a range into a region; `None` when it wraps around, is null, or is empty.
///
/// # Safety
/// The range stays mapped until the last clone of the region is gone.
pub(crate) unsafe fn adopt(address: u64, bytes: u64) -> Option<Arc<Region>> {
    let (start, length) = range(address, bytes)?;
    // SAFETY: by the caller's promise.
    Some(unsafe { Region::adopt(start, length) })
}

fn range(address: u64, bytes: u64) -> Option<(*mut u8, usize)> {
    let length = usize::try_from(bytes).ok().filter(|length| *length > 0)?;
    let fits = address.checked_add(bytes).is_some_and(|end| end <= isize::MAX as u64);
    (address != 0 && fits).then_some((address as *mut u8, length))
}

/// Reason why memory of the caller cannot be used.
#[derive(Debug)]
pub(crate) enum AdoptError {
    /// Not all of the range is readable memory of this process.
    NotReadable { address: u64, bytes: u64 },
    /// The range is null or empty, or wraps around.
    Invalid { address: u64, bytes: u64 },
    /// A driver does not know it as one allocation.
    Device(DeviceError),
}

impl fmt::Display for AdoptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReadable { address, bytes } => {
                write!(f, "{bytes} bytes at {address:#x} are not all readable memory of this process")
            }
            Self::Invalid { address, bytes } => write!(f, "{bytes} bytes at {address:#x}: invalid range"),
            Self::Device(error) => error.fmt(f),
        }
    }
}

/// Adopts memory of the host or of a device, by the kernel's list of mappings.
///
/// # Errors
/// When it is neither, as far as the kernel's list of mappings and the drivers know.
///
/// # Safety
/// The range stays mapped, or allocated, until the last clone is gone.
pub(crate) unsafe fn adopt_any(address: u64, bytes: u64, map: Option<&MemoryMap>) -> Result<Backing, AdoptError> {
    let is_host = || map.is_none_or(|map| map.is_host(address, bytes));
    if device::is_any_driver_loaded() && bytes > 0 && !is_host() {
        // SAFETY: by the caller's promise.
        return unsafe { Backing::adopt(address, bytes, map) }.map_err(AdoptError::Device);
    }
    let access = RangeAccess::by(map, address, bytes);
    if access == RangeAccess::No {
        return Err(AdoptError::NotReadable { address, bytes });
    }
    let (start, length) = range(address, bytes).ok_or(AdoptError::Invalid { address, bytes })?;
    // SAFETY: the range is mapped, as checked, and stays so by the caller's promise.
    Ok(Backing::Host(unsafe {
        match access {
            RangeAccess::Writable => Region::adopt(start, length),
            _ => Region::adopt_read_only(start, length),
        }
    }))
}

/// Registered memory.
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) backing: Backing,
}

impl Entry {
    /// Returns true if the entry contains a range.
    pub(crate) const fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.address
            && address - self.address <= self.bytes
            && bytes <= self.bytes - (address - self.address)
    }

    /// Returns true if a range is still mapped. Memory of a device is checked when it is copied.
    fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        let at = address - self.address;
        self.backing.region().is_none_or(|region| region.is_mapped(at as usize, bytes as usize))
    }
}

/// Reason why memory cannot be registered or unregistered.
#[derive(Debug)]
pub(crate) enum RegistrationError {
    /// The range is empty, or not readable memory of this process, or a driver does not know it as one allocation.
    Adopt(AdoptError),
    /// A part of the range is registered.
    Overlap { address: u64, bytes: u64, other: u64, other_bytes: u64 },
    /// No registered range begins at the address.
    NotRegistered { address: u64 },
    /// A call of another thread did not end in time.
    InUse { address: u64 },
    /// A signal handler raised.
    Interrupted,
}

impl fmt::Display for RegistrationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adopt(error) => error.fmt(f),
            Self::Overlap { address, bytes, other, other_bytes } => write!(
                f,
                "{bytes} bytes at {address:#x} overlap {other_bytes} bytes at {other:#x}, which are registered"
            ),
            Self::NotRegistered { address } => write!(f, "nothing is registered at {address:#x}"),
            Self::InUse { address } => {
                write!(f, "the memory at {address:#x} is still in use by a call of another thread")
            }
            Self::Interrupted => f.write_str("the call was interrupted"),
        }
    }
}

impl std::error::Error for RegistrationError {}

/// Registered memory, by address.
#[derive(Default)]
pub(crate) struct Memory {
    entries: RwLock<BTreeMap<u64, Arc<Entry>>>,
    /// Number of unregistrations.
    generation: AtomicU64,
    ids: AtomicU64,
}

impl Memory {
    /// Registers a range, of the host's memory or of a device's.
    pub(crate) fn register(&self, address: u64, bytes: u64) -> Result<(), RegistrationError> {
        if bytes == 0 {
            return Err(RegistrationError::Adopt(AdoptError::NotReadable { address, bytes }));
        }
        // SAFETY: that the range stays what it is until it is unregistered is the contract of registering.
        let backing = unsafe { adopt_any(address, bytes, MemoryMap::read().ok().as_ref()) };
        self.insert(backing.map_err(RegistrationError::Adopt)?)
    }

    /// Registers memory that was adopted, or allocated by this module.
    pub(crate) fn insert(&self, backing: Backing) -> Result<(), RegistrationError> {
        let (address, bytes) = (backing.address(), backing.bytes());
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, other)) = entries.range(..address + bytes).next_back()
            && other.address + other.bytes > address
        {
            let (other_bytes, other) = (other.bytes, other.address);
            return Err(RegistrationError::Overlap { address, bytes, other, other_bytes });
        }
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        entries.insert(address, Arc::new(Entry { id, address, bytes, backing }));
        Ok(())
    }

    /// Unregisters the range that begins here, and waits until no call uses it any more.
    pub(crate) fn unregister(&self, address: u64) -> Result<(), RegistrationError> {
        let entry = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&address);
        let entry = entry.ok_or(RegistrationError::NotRegistered { address })?;
        self.generation.fetch_add(1, Ordering::Release);
        let until = Instant::now() + LEAVE;
        while Arc::strong_count(&entry) > 1 {
            if Instant::now() > until {
                return Err(RegistrationError::InUse { address });
            }
            if !interrupt::sleep(LOOK) {
                return Err(RegistrationError::Interrupted);
            }
        }
        Ok(())
    }

    /// Returns a lookup for the ranges of one call.
    pub(crate) const fn lookup(&self) -> Lookup<'_> {
        Lookup { memory: self, last: None }
    }

    fn find(&self, address: u64, bytes: u64) -> Option<Arc<Entry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let (_, entry) = entries.range(..=address).next_back()?;
        entry.holds(address, bytes).then(|| Arc::clone(entry))
    }

    /// Returns the number of registered bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).values().map(|entry| entry.bytes).sum()
    }

    /// Returns a counter that changes with every unregistration.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns true if the entry of this id is still registered.
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).values().any(|entry| entry.id == id)
    }
}

/// Lookup of registered memory by range, for the duration of one call.
///
/// Registered memory may have been freed without being unregistered, and an access would kill the process. Therefore
/// the kernel is queried whether it is mapped: once for consecutive ranges in one buffer.
pub(crate) struct Lookup<'a> {
    memory: &'a Memory,
    /// Buffer of the last range, if all of it was mapped.
    last: Option<Arc<Entry>>,
}

impl Lookup<'_> {
    /// Returns the registered memory that contains a range; `None` also where the range was freed.
    pub(crate) fn find(&mut self, address: u64, bytes: u64) -> Option<Arc<Entry>> {
        if let Some(last) = self.last.as_ref().filter(|last| last.holds(address, bytes)) {
            return Some(Arc::clone(last));
        }
        let entry = self.memory.find(address, bytes)?;
        if entry.is_mapped(entry.address, entry.bytes) {
            self.last = Some(Arc::clone(&entry));
        } else if !entry.is_mapped(address, bytes) {
            return None;
        }
        Some(entry)
    }
}
