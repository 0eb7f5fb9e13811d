//! Memory of TENT's interface: allocated and registered by an engine.
//!
//! A range may be registered several times, and stays registered until it was unregistered as often. Memory that the
//! engine allocated can be mapped by peers on the same host.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvplane::device::{Backing, Device, DeviceId, DeviceMemory};
use kvplane::memory_map::MemoryMap;
use kvplane::transfer_error::ArgumentError;
use kvplane::{HugePages, Region, RegionOptions, RegisterOptions, TransferEngine, TransferError, discover_machine};

use super::engine::Engine;
use super::error::{TentError, with_engine};
use super::types::{LOCATION_BYTES, MemoryOptions, text_of};
use crate::memory::is_range;
use crate::rim::{array, text_within};

/// Location of memory that is to be detected, or of any node.
const ANYWHERE: &str = "*";
/// Maximum number of ranges of one call.
const RANGES: usize = 1 << 20;

/// Memory that an engine allocated and registered.
#[derive(Default)]
pub(super) struct LocalMemory {
    /// Never locked during a wait for peers that use memory.
    state: Mutex<MemoryState>,
}

#[derive(Default)]
struct MemoryState {
    /// Allocated memory by its address.
    allocated: BTreeMap<u64, Backing>,
    /// Registered ranges by their addresses.
    registered: BTreeMap<u64, Registration>,
}

/// Registered range.
struct Registration {
    bytes: u64,
    options: RegisterOptions,
    /// Number of registrations that were not undone.
    times: usize,
    /// True once the engine was to unregister it: it may have, or the memory is still in use.
    leaving: bool,
}

/// Range of memory; 0 bytes stand for the registered ones.
#[derive(Clone, Copy, Debug)]
struct Range {
    address: u64,
    bytes: u64,
}

impl Range {
    fn of(address: *mut c_void, bytes: usize) -> Self {
        Self { address: address as u64, bytes: bytes as u64 }
    }
}

impl LocalMemory {
    fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates zeroed memory of the host, or memory of a device. Returns its address.
    fn allocate(&self, bytes: usize, location: &str) -> Result<u64, TentError> {
        if bytes == 0 || bytes > isize::MAX as usize / 2 {
            return Err(TentError::Range { address: 0, bytes: bytes as u64 });
        }
        let backing = match DeviceId::parse(location) {
            Some(id) => {
                let device = Device::open(id).map_err(TransferError::from)?;
                Backing::from(DeviceMemory::allocate(&device, bytes as u64).map_err(TransferError::from)?)
            }
            None => {
                let options = RegionOptions {
                    shared: true,
                    huge: HugePages::Try,
                    numa_node: node(location)?,
                    ..RegionOptions::new("kvplane-tent", bytes)
                };
                Backing::from(Region::allocate(&options).map_err(TransferError::from)?)
            }
        };
        let address = backing.address();
        self.lock().allocated.insert(address, backing);
        Ok(address)
    }

    /// Frees allocated memory, after unregistering what is registered of it.
    ///
    /// # Errors
    /// When nothing was allocated there, or peers still use the memory, which then stays.
    fn free(&self, engine: &TransferEngine, address: u64) -> Result<(), TentError> {
        let leaving = {
            let mut state = self.lock();
            let MemoryState { allocated, registered } = &mut *state;
            let memory = allocated.get(&address).ok_or(TentError::NotAllocated { address })?;
            let within = registered.range_mut(address..address + memory.bytes());
            within.map(|(address, registration)| (*address, registration.leave())).collect::<Vec<_>>()
        };
        self.unregister_leaving(engine, &leaving)?;
        let gone = self.lock().allocated.remove(&address);
        gone.map(drop).ok_or(TentError::NotAllocated { address })
    }

    /// Registers ranges, or none of them.
    ///
    /// # Safety
    /// The ranges stay mapped readable and writable, or allocated on a device, until they are unregistered or the
    /// engine is destroyed.
    unsafe fn register(
        &self,
        engine: &TransferEngine,
        ranges: &[Range],
        options: &RegisterOptions,
    ) -> Result<(), TentError> {
        let mut state = self.lock();
        let MemoryState { allocated, registered } = &mut *state;
        let mut fresh: BTreeMap<(u64, u64), Backing> = BTreeMap::new();
        // Only read if any range is new.
        let map = LazyCell::new(|| MemoryMap::read().ok());
        for &Range { address, bytes } in ranges {
            if !is_range(address, bytes) {
                return Err(TentError::Range { address, bytes });
            }
            let known = registered.get(&address).filter(|known| known.bytes == bytes && !known.leaving);
            match known {
                Some(known) if known.options != *options => return Err(TentError::OtherOptions { address }),
                Some(_) => {}
                None => {
                    let ours = allocated.get(&address).filter(|memory| memory.bytes() == bytes).cloned();
                    let adopt = || {
                        // SAFETY: by the caller's promise; unregistering waits until nothing uses the memory, and what
                        // was allocated here is unregistered before it is freed.
                        unsafe { Backing::adopt(address, bytes, map.as_ref()) }.map_err(TransferError::from)
                    };
                    fresh.insert((address, bytes), ours.map_or_else(adopt, Ok)?);
                }
            }
        }
        let fresh: Vec<Backing> = fresh.into_values().collect();
        engine.register_batch(&fresh, options)?;
        for backing in &fresh {
            // One that was leaving is gone, else the engine would have refused it.
            registered.remove(&backing.address());
        }
        for &Range { address, bytes } in ranges {
            let new = || Registration { bytes, options: options.clone(), times: 0, leaving: false };
            registered.entry(address).or_insert_with(new).times += 1;
        }
        Ok(())
    }

    /// Undoes one registration of each range, or of none.
    ///
    /// # Errors
    /// When a range is not registered. When peers still use the memory: it must stay mapped, and be unregistered again.
    fn unregister(&self, engine: &TransferEngine, ranges: &[Range]) -> Result<(), TentError> {
        let leaving = {
            let mut state = self.lock();
            let mut undone: BTreeMap<u64, usize> = BTreeMap::new();
            for &Range { address, bytes } in ranges {
                let times = undone.entry(address).or_default();
                *times += 1;
                let known = state.registered.get(&address);
                let fits = known.is_some_and(|known| (bytes == 0 || bytes == known.bytes) && *times <= known.times);
                if !fits {
                    return Err(TentError::NotRegistered { address, bytes });
                }
            }
            let mut leaving = Vec::new();
            for (address, times) in undone {
                let Some(known) = state.registered.get_mut(&address) else { continue };
                if known.times > times {
                    known.times -= times;
                } else {
                    leaving.push((address, known.leave()));
                }
            }
            leaving
        };
        self.unregister_leaving(engine, &leaving)
    }

    /// Unregisters ranges from the engine; each with whether the engine was to do so before.
    fn unregister_leaving(&self, engine: &TransferEngine, leaving: &[(u64, bool)]) -> Result<(), TentError> {
        let fresh: Vec<u64> = leaving.iter().filter(|(_, again)| !again).map(|(address, _)| *address).collect();
        engine.unregister_batch(&fresh)?;
        for (address, _) in leaving.iter().filter(|(_, again)| *again) {
            match engine.unregister(*address) {
                // The earlier call, or one of another thread, has succeeded for it.
                Ok(()) | Err(TransferError::AddressNotRegistered(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut state = self.lock();
        for (address, _) in leaving {
            if state.registered.get(address).is_some_and(|known| known.leaving) {
                state.registered.remove(address);
            }
        }
        Ok(())
    }
}

impl Registration {
    /// Marks it as leaving; returns whether it was before.
    const fn leave(&mut self) -> bool {
        self.times = 1;
        core::mem::replace(&mut self.leaving, true)
    }
}

/// Returns the NUMA node of a location of the host; `None` for any.
fn node(location: &str) -> Result<Option<u32>, TentError> {
    if location.is_empty() || location == ANYWHERE {
        return Ok(None);
    }
    let node = location.strip_prefix("cpu:").and_then(|node| node.parse().ok());
    let malformed = || TransferError::from(ArgumentError::Location { location: location.to_owned() });
    let node = node.ok_or_else(malformed)?;
    // A machine without NUMA has one node.
    let nodes = discover_machine().map(|machine| machine.numa_nodes).unwrap_or_default();
    let exists = nodes.iter().any(|one| one.id == node) || (nodes.is_empty() && node == 0);
    if exists { Ok(Some(node)) } else { Err(TentError::NoNode { location: location.to_owned() }) }
}

/// Returns the options of registering memory with a permission.
fn permitted(permission: c_int, location: String) -> Result<RegisterOptions, TentError> {
    let (remote_accessible, writable) = match permission {
        0 => (false, true),
        1 => (true, false),
        2 => (true, true),
        other => return Err(TentError::Number { what: "a permission", number: other.into() }),
    };
    Ok(RegisterOptions { location, remote_accessible, writable })
}

/// Returns the options of registering memory, after checking that all have a meaning here.
///
/// # Safety
/// Options, or null.
unsafe fn options_of<'a>(options: *const MemoryOptions) -> Result<(RegisterOptions, &'a MemoryOptions), TentError> {
    // SAFETY: by the caller's promise.
    let options = unsafe { options.as_ref() }.ok_or(TentError::Null { what: "the options" })?;
    let location = text_of(&options.location, "the location")?;
    let unsupported = |what: &str, instead| Err(TentError::Unsupported { what: what.to_owned(), instead });
    if !text_of(&options.shm_path, "the path of shared memory")?.is_empty() || options.shm_offset != 0 {
        return unsupported("shared memory with a path", "memory that the engine allocates is shared without one");
    }
    if options.internal != 0 {
        return unsupported("internal memory", "a segment describes all of its memory");
    }
    let location = if location.is_empty() { ANYWHERE.to_owned() } else { location };
    Ok((permitted(options.permission, location)?, options))
}

/// Returns the ranges of two arrays.
///
/// # Safety
/// Null, or arrays of `count` elements.
unsafe fn ranges(addresses: *mut *mut c_void, sizes: *mut usize, count: usize) -> Result<Vec<Range>, TentError> {
    if addresses.is_null() || sizes.is_null() {
        return Err(TentError::Null { what: "an array of ranges" });
    }
    if count > RANGES {
        return Err(TentError::Number { what: "the number of ranges", number: count.try_into().unwrap_or(i64::MAX) });
    }
    // SAFETY: by the caller's promise.
    let arrays = unsafe { (array(addresses, count), array(sizes, count)) };
    let (Some(addresses), Some(sizes)) = arrays else { return Err(TentError::Null { what: "an array of ranges" }) };
    Ok(addresses.iter().zip(sizes).map(|(&address, &bytes)| Range::of(address, bytes)).collect())
}

/// Registers ranges for an engine.
///
/// # Safety
/// Conditions of [`LocalMemory::register`].
unsafe fn register(engine: &Engine, ranges: &[Range], options: &RegisterOptions) -> Result<(), TentError> {
    // SAFETY: by the caller's promise.
    unsafe { engine.memory.register(&engine.engine, ranges, options) }
}

fn range(address: *mut c_void, bytes: usize) -> [Range; 1] {
    [Range::of(address, bytes)]
}

fn anywhere(permission: c_int) -> Result<RegisterOptions, TentError> {
    permitted(permission, ANYWHERE.to_owned())
}

/// Permission of memory that is registered without one: peers may read and write it.
const GLOBAL_READ_WRITE: c_int = 2;

/// Allocates memory and writes its address.
///
/// # Safety
/// A place for the address and a string with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_allocate_memory(
    engine: *mut c_void,
    addr: *mut *mut c_void,
    size: usize,
    location: *const c_char,
) -> c_int {
    with_engine("tent_allocate_memory", engine, |engine| {
        if addr.is_null() || location.is_null() {
            return Err(TentError::Null { what: "the place for the address, or the location" });
        }
        let most = LOCATION_BYTES - 1;
        // SAFETY: by the caller's promise.
        let location = unsafe { text_within(location, most) }.ok_or(TentError::Text { what: "the location", most })?;
        let allocated = engine.memory.allocate(size, location)?;
        // SAFETY: by the caller's promise.
        unsafe { addr.write(allocated as *mut c_void) };
        Ok(())
    })
}

/// Allocates memory with options and writes its address.
///
/// # Safety
/// A place for the address and options, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_allocate_memory_ex(
    engine: *mut c_void,
    addr: *mut *mut c_void,
    size: usize,
    opts: *mut MemoryOptions,
) -> c_int {
    with_engine("tent_allocate_memory_ex", engine, |engine| {
        if addr.is_null() {
            return Err(TentError::Null { what: "the place for the address" });
        }
        // SAFETY: by the caller's promise.
        let (options, given) = unsafe { options_of(opts) }?;
        engine.transports.check_allocation(given.transport_type)?;
        let allocated = engine.memory.allocate(size, &options.location)?;
        // SAFETY: by the caller's promise.
        unsafe { addr.write(allocated as *mut c_void) };
        Ok(())
    })
}

/// Frees memory that the engine allocated.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_free_memory(engine: *mut c_void, addr: *mut c_void) -> c_int {
    with_engine("tent_free_memory", engine, |engine| engine.memory.free(&engine.engine, addr as u64))
}

/// Registers a range for transfers and for peers.
///
/// # Safety
/// A range that stays mapped, or allocated on a device, until it is unregistered.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_register_memory(engine: *mut c_void, addr: *mut c_void, size: usize) -> c_int {
    with_engine("tent_register_memory", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe { register(engine, &range(addr, size), &anywhere(GLOBAL_READ_WRITE)?) }
    })
}

/// Registers a range for transfers, and for peers as far as they are permitted.
///
/// # Safety
/// Conditions of [`tent_register_memory`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_register_memory_with_perm(
    engine: *mut c_void,
    addr: *mut c_void,
    size: usize,
    permission: c_int,
) -> c_int {
    with_engine("tent_register_memory_with_perm", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe { register(engine, &range(addr, size), &anywhere(permission)?) }
    })
}

/// Registers a range with options.
///
/// # Safety
/// Conditions of [`tent_register_memory`]; options, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_register_memory_ex(
    engine: *mut c_void,
    addr: *mut c_void,
    size: usize,
    opts: *mut MemoryOptions,
) -> c_int {
    with_engine("tent_register_memory_ex", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe {
            let (options, given) = options_of(opts)?;
            engine.transports.check_registration(given.transport_type)?;
            register(engine, &range(addr, size), &options)
        }
    })
}

/// Registers all ranges, or none.
///
/// # Safety
/// Conditions of [`tent_register_memory`] for each range; arrays of `count` elements, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_register_memory_batch(
    engine: *mut c_void,
    addrs: *mut *mut c_void,
    sizes: *mut usize,
    count: usize,
    permission: c_int,
) -> c_int {
    with_engine("tent_register_memory_batch", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe { register(engine, &ranges(addrs, sizes, count)?, &anywhere(permission)?) }
    })
}

/// Registers all ranges with options, or none.
///
/// # Safety
/// Conditions of [`tent_register_memory_batch`]; options, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_register_memory_batch_ex(
    engine: *mut c_void,
    addrs: *mut *mut c_void,
    sizes: *mut usize,
    count: usize,
    opts: *mut MemoryOptions,
) -> c_int {
    with_engine("tent_register_memory_batch_ex", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe {
            let (options, given) = options_of(opts)?;
            engine.transports.check_registration(given.transport_type)?;
            register(engine, &ranges(addrs, sizes, count)?, &options)
        }
    })
}

/// Unregisters the range that begins at `addr`; 0 bytes stand for the registered ones.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_unregister_memory(engine: *mut c_void, addr: *mut c_void, size: usize) -> c_int {
    with_engine("tent_unregister_memory", engine, |engine| engine.memory.unregister(&engine.engine, &range(addr, size)))
}

/// Unregisters all ranges, or none; null sizes stand for the registered ones.
///
/// # Safety
/// Arrays of `count` elements, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_unregister_memory_batch(
    engine: *mut c_void,
    addrs: *mut *mut c_void,
    sizes: *mut usize,
    count: usize,
) -> c_int {
    with_engine("tent_unregister_memory_batch", engine, |engine| {
        let mut unsized_ranges = vec![0; if sizes.is_null() { count.min(RANGES) } else { 0 }];
        let sizes = if sizes.is_null() { unsized_ranges.as_mut_ptr() } else { sizes };
        // SAFETY: by the caller's promise; a longer count than the limit is refused before anything is read.
        let ranges = unsafe { ranges(addrs, sizes, count) }?;
        engine.memory.unregister(&engine.engine, &ranges)
    })
}
