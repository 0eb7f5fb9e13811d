//! Memory of the caller: mapping checks, registration, and copies that cannot crash.
//!
//! Addresses come from Python as numbers, so any may be wrong. Ranges to register are checked against the process's
//! mappings first; other ranges are read through the kernel, which reports unmapped memory.

pub(crate) mod host_memory;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

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

/// Returns the access to a range, by the kernel's list of mappings.
pub(crate) fn mapped(address: u64, bytes: u64) -> RangeAccess {
    let Some(end) = address.checked_add(bytes).filter(|_| address != 0) else { return RangeAccess::No };
    let Ok(list) = std::fs::read_to_string("/proc/self/maps") else {
        // Without the list, the caller is trusted.
        return RangeAccess::Writable;
    };
    let (mut at, mut writable) = (address, true);
    for line in list.lines() {
        let Some((from, until, rights)) = parse(line) else { continue };
        if until <= at {
            continue;
        }
        if from > at || !rights.starts_with('r') {
            return RangeAccess::No;
        }
        writable &= rights.as_bytes().get(1) == Some(&b'w');
        at = until;
        if at >= end {
            return if writable { RangeAccess::Writable } else { RangeAccess::Readable };
        }
    }
    RangeAccess::No
}

fn parse(line: &str) -> Option<(u64, u64, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (from, until) = range.split_once('-')?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(until, 16).ok()?, rest))
}

/// Reads memory of this process through the kernel; fails where it is not mapped.
pub(crate) fn peek(address: u64, bytes: &mut [u8]) -> std::io::Result<()> {
    File::open("/proc/self/mem")?.read_exact_at(bytes, address)
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
    let length = usize::try_from(bytes).ok().filter(|length| *length > 0)?;
    let fits = address.checked_add(bytes).is_some_and(|end| end <= isize::MAX as u64);
    // SAFETY: by the caller's promise.
    (address != 0 && fits).then(|| unsafe { Region::adopt(address as *mut u8, length) })
}

/// Registered memory.
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) region: Arc<Region>,
    pub(crate) writable: bool,
}

impl Entry {
    /// Returns true if the entry contains a range.
    pub(crate) const fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.address
            && address - self.address <= self.bytes
            && bytes <= self.bytes - (address - self.address)
    }
}

/// Reason why memory cannot be registered or unregistered.
#[derive(Debug)]
pub(crate) enum RegistrationError {
    /// Not all of the range is readable memory of this process.
    NotReadable { address: u64, bytes: u64 },
    /// The range ends beyond the address space.
    Beyond { address: u64, bytes: u64 },
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
            Self::NotReadable { address, bytes } => {
                write!(f, "{bytes} bytes at {address:#x} are not all readable memory of this process")
            }
            Self::Beyond { address, bytes } => {
                write!(f, "{bytes} bytes at {address:#x} end beyond the address space")
            }
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
    /// Registers a range.
    pub(crate) fn register(&self, address: u64, bytes: u64) -> Result<(), RegistrationError> {
        let rights = mapped(address, bytes);
        if rights == RangeAccess::No || bytes == 0 {
            return Err(RegistrationError::NotReadable { address, bytes });
        }
        // SAFETY: the range is mapped, as checked; that it stays mapped until it is unregistered is the contract of
        // registering.
        let region = unsafe { adopt(address, bytes) };
        let region = region.ok_or(RegistrationError::Beyond { address, bytes })?;
        self.insert(region, rights == RangeAccess::Writable)
    }

    /// Registers a region that this module allocated.
    pub(crate) fn insert(&self, region: Arc<Region>, writable: bool) -> Result<(), RegistrationError> {
        let (address, bytes) = (region.address(), region.bytes() as u64);
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, other)) = entries.range(..address + bytes).next_back()
            && other.address + other.bytes > address
        {
            let (other_bytes, other) = (other.bytes, other.address);
            return Err(RegistrationError::Overlap { address, bytes, other, other_bytes });
        }
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        entries.insert(address, Arc::new(Entry { id, address, bytes, region, writable }));
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
        let region = &entry.region;
        if region.is_mapped(0, region.bytes()) {
            self.last = Some(Arc::clone(&entry));
        } else if !region.is_mapped((address - entry.address) as usize, bytes as usize) {
            return None;
        }
        Some(entry)
    }
}
