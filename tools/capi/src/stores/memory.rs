//! Memory that a program registered with a store, and what each client knows of it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvplane::memory_map::{Mapping, MemoryMap};
use kvplane::{Buffer, Client, Region, Slice};

use super::outcome::{INTERNAL, INVALID};

/// Longest wait of an unregistration for calls that use the memory.
const LEAVE: Duration = Duration::from_secs(10);
/// Polling interval of that wait.
const LOOK: Duration = Duration::from_millis(1);

/// Registered range.
pub(crate) struct Entry {
    id: u64,
    region: Arc<Region>,
}

/// Registered ranges of a store, by address.
#[derive(Default)]
pub(crate) struct Memory {
    entries: RwLock<BTreeMap<u64, Arc<Entry>>>,
    ids: AtomicU64,
    /// Number of unregistrations.
    generation: AtomicU64,
}

/// Adopts a range that is read; `None` if it is empty or wraps around, or is not mapped.
///
/// # Safety
/// The range stays mapped until the last clone of the region is gone.
pub(crate) unsafe fn adopt_source(address: u64, bytes: u64) -> Option<Arc<Region>> {
    let (start, length) = range(address, bytes)?;
    // SAFETY: by the caller's promise.
    let region = unsafe { Region::adopt_read_only(start, length) };
    region.is_mapped(0, length).then_some(region)
}

/// Adopts a range, with the rights of the kernel's list of mappings; `None` if it is empty or wraps around, or not all
/// of it is readable.
///
/// # Safety
/// The range stays mapped until the last clone of the region is gone.
unsafe fn adopt(address: u64, bytes: u64) -> Option<Arc<Region>> {
    let (start, length) = range(address, bytes)?;
    let map = MemoryMap::read().ok();
    // Without the list, the caller is trusted.
    let allows = |right: fn(&Mapping) -> bool| map.as_ref().is_none_or(|map| map.covers(address, bytes, right));
    // SAFETY: by the caller's promise.
    unsafe {
        match (allows(Mapping::is_readable), allows(Mapping::is_writable)) {
            (false, _) => None,
            (true, false) => Some(Region::adopt_read_only(start, length)),
            (true, true) => Some(Region::adopt(start, length)),
        }
    }
}

fn range(address: u64, bytes: u64) -> Option<(*mut u8, usize)> {
    let length = usize::try_from(bytes).ok().filter(|length| *length > 0)?;
    let fits = address.checked_add(bytes).is_some_and(|end| end <= isize::MAX as u64);
    (address != 0 && fits).then_some((address as *mut u8, length))
}

impl Entry {
    /// Returns true if gets may write to the range.
    pub(crate) fn is_writable(&self) -> bool {
        self.region.writable()
    }
}

impl Memory {
    /// Registers a range. Returns 0, or an error if a part of it is registered, or not memory of this process.
    ///
    /// # Safety
    /// The range stays mapped until it is unregistered.
    pub(crate) unsafe fn register(&self, address: u64, bytes: u64) -> i64 {
        // SAFETY: by the caller's promise.
        let Some(region) = (unsafe { adopt(address, bytes) }) else { return INVALID };
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let before = entries.range(..address + bytes).next_back();
        if before.is_some_and(|(at, other)| at + other.region.bytes() as u64 > address) {
            return INVALID;
        }
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        entries.insert(address, Arc::new(Entry { id, region }));
        0
    }

    /// Unregisters the range that begins here, and waits until no call uses it.
    pub(crate) fn unregister(&self, address: u64) -> i64 {
        let entry = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&address);
        let Some(entry) = entry else { return INVALID };
        self.generation.fetch_add(1, Ordering::Release);
        let until = Instant::now() + LEAVE;
        while Arc::strong_count(&entry) > 1 {
            if Instant::now() > until {
                return INTERNAL;
            }
            std::thread::sleep(LOOK);
        }
        0
    }

    /// Returns the registered range that contains another one, if it is still mapped.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<Arc<Entry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let (at, entry) = entries.range(..=address).next_back()?;
        let offset = address - at;
        let holds = offset.checked_add(bytes).is_some_and(|end| end <= entry.region.bytes() as u64);
        (holds && entry.region.is_mapped(offset as usize, bytes as usize)).then(|| Arc::clone(entry))
    }

    fn has(&self, id: u64) -> bool {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.values().any(|entry| entry.id == id)
    }
}

/// A client, and the registered ranges that it knows.
pub(crate) struct Member {
    pub(crate) client: Client,
    known: HashMap<u64, Buffer>,
    generation: u64,
}

impl Member {
    /// Creates a member that knows no memory.
    pub(crate) fn new(client: Client, memory: &Memory) -> Self {
        let generation = memory.generation.load(Ordering::Acquire);
        Self { client, known: HashMap::new(), generation }
    }

    /// Drops the ranges that were unregistered since the last call.
    pub(crate) fn forget_gone(&mut self, memory: &Memory) {
        let generation = memory.generation.load(Ordering::Acquire);
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let gone: Vec<u64> = self.known.keys().copied().filter(|id| !memory.has(*id)).collect();
        for buffer in gone.into_iter().filter_map(|id| self.known.remove(&id)) {
            self.client.unregister(buffer);
        }
    }

    /// Returns a part of a registered range as a slice of this client.
    pub(crate) fn slice(&mut self, entry: &Entry, address: u64, bytes: u64) -> Slice {
        let known = self.known.entry(entry.id);
        let buffer = known.or_insert_with(|| self.client.register(Arc::clone(&entry.region)));
        buffer.slice((address - entry.region.address()) as usize, bytes as usize)
    }
}
