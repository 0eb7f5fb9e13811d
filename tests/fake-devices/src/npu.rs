//! Functions that the library of Ascend exports under the names of AscendCL.
//!
//! Stricter than the real one: copies are refused on streams that go on after a failure, and between devices whose
//! access to each other was not enabled.

#![allow(non_snake_case, reason = "the names of the C interface")]

use crate::exports::{self, device, enqueue, pin, store, store_text, synchronize};
use crate::state::*;
use crate::streams::{Event, Operation, Stream};
use libc::{c_char, c_int, c_void};
use std::collections::BTreeSet;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const REPEATED_INITIALIZE: c_int = 100_002;
/// `aclrtMemLocationType`: of the host, of a device, of neither, managed.
const TYPES: [c_int; 4] = [0, 1, 2, 3];
/// `ACL_HOST_REG_PINNED`.
const PINNED: u32 = 0x1000_0000;

/// Streams that stop at a failure.
static STOPPING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
/// Pairs of devices of which the first may access memory of the second.
static PEERS: Mutex<BTreeSet<[usize; 2]>> = Mutex::new(BTreeSet::new());

/// Returns the library's code for an outcome.
fn result(done: Result<(), i32>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(INVALID_VALUE) => 107_000,
        Err(OUT_OF_MEMORY) => 207_001,
        Err(NOT_INITIALIZED) => 100_001,
        Err(INVALID_DEVICE) => 107_001,
        Err(INVALID_CONTEXT) => 107_002,
        Err(INVALID_HANDLE) => 107_017,
        Err(ILLEGAL_ADDRESS) => 507_053,
        Err(ALREADY_REGISTERED) => 507_910,
        Err(NOT_REGISTERED) => 507_911,
        Err(other) => other,
    }
}

/// Begins a call that needs a current context, whose device is retained.
fn in_context(name: &'static str) -> Result<(MutexGuard<'static, State>, usize), i32> {
    let (mut state, device) = call_in_context(name)?;
    if state.retained[device] == 0 {
        state.without_context += 1;
        return Err(INVALID_CONTEXT);
    }
    Ok((state, device))
}

/// Makes the context of a device the only current one of this thread.
fn make_current(device: usize) {
    CURRENT.with_borrow_mut(|current| {
        current.clear();
        current.push(device);
    });
}

/// Record of `aclrtMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    id: u32,
    kind: c_int,
}

/// Record of `aclrtPtrAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    location: Location,
    page_size: u32,
    reserved: [u32; 4],
}

/// Record of `aclrtMemcpyBatchAttr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sides {
    to: Location,
    from: Location,
    reserved: [u8; 16],
}

/// Returns what the library tells of an address.
fn location(state: &State, address: u64) -> Location {
    let [host, device, neither, managed] = TYPES;
    match state.memory.find(address) {
        Some(found) => Location { id: found.device as u32, kind: if found.managed { managed } else { device } },
        None if state.is_pinned(address, 1) => Location { id: 0, kind: host },
        None => Location { id: 0, kind: neither },
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclInit(configuration: *const c_char) -> c_int {
    let was_initialized = state().initialized;
    match exports::cuInit(0) {
        SUCCESS if was_initialized => REPEATED_INITIALIZE,
        SUCCESS if configuration.is_null() => 0,
        code => result(Err(code)),
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtGetSocName() -> *const c_char {
    c"Fake device".as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> c_int {
    // SAFETY: a place of the caller.
    result(call("aclrtGetDeviceCount").and_then(|state| unsafe { store(count, state.retained.len() as u32) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtDeviceGetPCIBusId(number: i32, text: *mut c_char, length: i32) -> c_int {
    result(call("aclrtDeviceGetPCIBusId").and_then(|state| {
        let device = device(&state, number)?;
        // SAFETY: a place of the caller.
        unsafe { store_text(text, length, &format!("0000:{:02x}:00.0", device + 0xC1)) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtSetDevice(number: i32) -> c_int {
    result(call("aclrtSetDevice").and_then(|mut state| {
        let device = device(&state, number)?;
        if state.lost[device] != SUCCESS {
            return Err(state.lost[device]);
        }
        state.retained[device] += 1;
        make_current(device);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtResetDevice(number: i32) -> c_int {
    result(call("aclrtResetDevice").and_then(|mut state| {
        let device = device(&state, number)?;
        state.retained[device] = state.retained[device].checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if state.retained[device] == 0 {
            PEERS.lock().unwrap_or_else(PoisonError::into_inner).retain(|pair| !pair.contains(&device));
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtGetCurrentContext(context: *mut *mut c_void) -> c_int {
    result(call("aclrtGetCurrentContext").and_then(|state| {
        let device = CURRENT.with_borrow(|current| current.last().copied()).ok_or(INVALID_CONTEXT)?;
        if state.retained[device] == 0 {
            return Err(INVALID_CONTEXT);
        }
        // SAFETY: a place of the caller. A context is its device's number plus one.
        unsafe { store(context, (device + 1) as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtSetCurrentContext(context: *mut c_void) -> c_int {
    result(call("aclrtSetCurrentContext").and_then(|state| {
        let device = (context as usize).checked_sub(1).filter(|&device| device < state.retained.len());
        let device = device.ok_or(INVALID_VALUE)?;
        if state.retained[device] == 0 {
            return Err(INVALID_CONTEXT);
        }
        make_current(device);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtDeviceEnablePeerAccess(peer: i32, flags: u32) -> c_int {
    result(in_context("aclrtDeviceEnablePeerAccess").and_then(|(state, current)| {
        let peer = device(&state, peer)?;
        if flags != 0 || peer == current {
            return Err(INVALID_VALUE);
        }
        PEERS.lock().unwrap_or_else(PoisonError::into_inner).insert([current, peer]);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtPointerGetAttributes(address: *const c_void, found: *mut Attributes) -> c_int {
    result(call("aclrtPointerGetAttributes").and_then(|state| {
        let at = address as u64;
        // Addresses of devices at which nothing is allocated are no addresses to the library.
        if at == 0 || state.memory.is_device(at) && state.memory.find(at).is_none() {
            return Err(INVALID_VALUE);
        }
        let location = location(&state, at);
        // SAFETY: a place of the caller.
        unsafe { store(found, Attributes { location, page_size: 4096, reserved: [0; 4] }) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtMemGetAddressRange(
    address: *mut c_void,
    base: *mut *mut c_void,
    bytes: *mut usize,
) -> c_int {
    result(call("aclrtMemGetAddressRange").and_then(|state| {
        let found = state.memory.find(address as u64).ok_or(INVALID_VALUE)?;
        // SAFETY: a place of the caller.
        unsafe { store(base, found.base as *mut c_void) }?;
        // SAFETY: as above.
        unsafe { store(bytes, found.bytes as usize) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtCreateStream(stream: *mut *mut c_void) -> c_int {
    result(in_context("aclrtCreateStream").and_then(|(mut state, device)| {
        let handle = state.handle();
        state.streams.insert(handle, Stream::new(device, handle));
        // SAFETY: a place of the caller.
        unsafe { store(stream, handle as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtSetStreamFailureMode(handle: *mut c_void, mode: u64) -> c_int {
    result(in_context("aclrtSetStreamFailureMode").and_then(|(state, _)| {
        let handle = handle as u64;
        let is_first = STOPPING.lock().unwrap_or_else(PoisonError::into_inner).insert(handle);
        if mode == 1 && is_first && state.streams.contains_key(&handle) { Ok(()) } else { Err(INVALID_VALUE) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtDestroyStream(handle: *mut c_void) -> c_int {
    result(in_context("aclrtDestroyStream").and_then(|(mut state, _)| {
        let stream = state.streams.remove(&(handle as u64)).ok_or(INVALID_HANDLE)?;
        STOPPING.lock().unwrap_or_else(PoisonError::into_inner).remove(&(handle as u64));
        stream.push(Operation::End);
        Ok(())
    }))
}

/// Returns a stream of the current device; null is its default one.
fn stream(state: &mut State, device: usize, handle: *mut c_void) -> Result<Arc<Stream>, i32> {
    exports::stream(state, device, handle as u64)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtSynchronizeStream(handle: *mut c_void) -> c_int {
    let begun = in_context("aclrtSynchronizeStream")
        .and_then(|(mut state, device)| Ok((stream(&mut state, device, handle)?, device)));
    result(begun.and_then(|(stream, device)| match synchronize(&stream, device) {
        SUCCESS => Ok(()),
        code => Err(code),
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtStreamWaitEvent(handle: *mut c_void, awaited: *mut c_void) -> c_int {
    result(in_context("aclrtStreamWaitEvent").and_then(|(mut state, device)| {
        let event = exports::event(&state, awaited)?;
        let point = event.last();
        stream(&mut state, device, handle)?.push(Operation::Wait(event, point));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtCreateEventExWithFlag(place: *mut *mut c_void, flags: u32) -> c_int {
    result(in_context("aclrtCreateEventExWithFlag").and_then(|(mut state, device)| {
        // Streams wait only for events that were made for that.
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        let handle = state.handle();
        state.events.insert(handle, Arc::new(Event::new(device)));
        // SAFETY: a place of the caller.
        unsafe { store(place, handle as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtDestroyEvent(handle: *mut c_void) -> c_int {
    result(
        in_context("aclrtDestroyEvent")
            .and_then(|(mut state, _)| state.events.remove(&(handle as u64)).map(|_| ()).ok_or(INVALID_HANDLE)),
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtRecordEvent(recorded: *mut c_void, handle: *mut c_void) -> c_int {
    result(in_context("aclrtRecordEvent").and_then(|(mut state, device)| {
        let event = exports::event(&state, recorded)?;
        let point = event.begin();
        stream(&mut state, device, handle)?.push(Operation::Record(event, point));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtQueryEventStatus(handle: *mut c_void, status: *mut c_int) -> c_int {
    result(in_context("aclrtQueryEventStatus").and_then(|(state, _)| {
        let is_done = exports::event(&state, handle)?.is_done();
        // SAFETY: a place of the caller.
        unsafe { store(status, c_int::from(is_done)) }
    }))
}

/// Enqueues a copy on a stream that stops at failures.
fn copy(state: &mut State, device: usize, sides: [u64; 2], length: [usize; 2], handle: *mut c_void) -> Result<(), i32> {
    let ([to, from], [most, bytes], handle) = (sides, length, handle as u64);
    let stops = STOPPING.lock().unwrap_or_else(PoisonError::into_inner).contains(&handle);
    if !stops || bytes == 0 || bytes > most {
        return Err(INVALID_VALUE);
    }
    for found in sides.into_iter().filter_map(|side| state.memory.find(side)) {
        let peers = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
        if found.device != device && !peers.contains(&[device, found.device]) {
            return Err(INVALID_VALUE);
        }
    }
    enqueue(state, device, to, from, bytes, handle)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtMemcpyAsync(
    to: *mut c_void,
    most: usize,
    from: *const c_void,
    bytes: usize,
    kind: c_int,
    handle: *mut c_void,
) -> c_int {
    result(in_context("aclrtMemcpyAsync").and_then(|(mut state, device)| {
        let sides = [to as u64, from as u64];
        // 1: to a device, 2: to the host, 3: between devices.
        if sides.map(|side| state.memory.is_device(side)) != [kind != 2, kind != 1] {
            return Err(INVALID_VALUE);
        }
        copy(&mut state, device, sides, [most, bytes], handle)
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtMemcpyBatchAsync(
    to: *mut u64,
    most: *mut usize,
    from: *mut u64,
    bytes: *mut usize,
    count: usize,
    attributes: *mut Sides,
    first: *mut usize,
    attribute_count: usize,
    failed: *mut usize,
    handle: *mut c_void,
) -> c_int {
    result(in_context("aclrtMemcpyBatchAsync").and_then(|(mut state, device)| {
        if attribute_count != 1 || count == 0 || failed.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: places of the caller with one element.
        let (named, first) = unsafe { (attributes.read(), first.read()) };
        if first != 0 || named.to.kind == named.from.kind {
            return Err(INVALID_VALUE);
        }
        for index in 0..count {
            // SAFETY: the caller gives arrays of `count` elements.
            let (to, from, most, bytes) = unsafe {
                (
                    to.wrapping_add(index).read(),
                    from.wrapping_add(index).read(),
                    most.wrapping_add(index).read(),
                    bytes.wrapping_add(index).read(),
                )
            };
            let fits = |named: Location, address: u64| {
                let [host, _, neither, _] = TYPES;
                let found = location(&state, address);
                named == if found.kind == neither { Location { kind: host, ..found } } else { found }
            };
            let done = match fits(named.to, to) && fits(named.from, from) {
                true => copy(&mut state, device, [to, from], [most, bytes], handle),
                false => Err(INVALID_VALUE),
            };
            done.inspect_err(|_| {
                // SAFETY: a place of the caller.
                let _ = unsafe { store(failed, index) };
            })?;
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn aclrtMalloc(place: *mut *mut c_void, bytes: usize, _policy: c_int) -> c_int {
    result(in_context("aclrtMalloc").and_then(|(mut state, device)| {
        let base = state.memory.allocate(device, bytes as u64, false).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a place of the caller.
        unsafe { store(place, ptr::without_provenance_mut(base as usize)) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtFree(address: *mut c_void) -> c_int {
    result(in_context("aclrtFree").and_then(|(mut state, _)| match state.memory.free(address as u64) {
        true => Ok(()),
        false => Err(INVALID_VALUE),
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtHostRegisterV2(address: *mut c_void, bytes: u64, flags: u32) -> c_int {
    result(in_context("aclrtHostRegisterV2").and_then(|(mut state, _)| {
        if flags != PINNED || !(address as u64).is_multiple_of(4096) {
            return Err(INVALID_VALUE);
        }
        pin(&mut state, address as u64, bytes)
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn aclrtHostUnregister(address: *mut c_void) -> c_int {
    result(
        in_context("aclrtHostUnregister")
            .and_then(|(mut state, _)| state.pinned.remove(&(address as u64)).map(|_| ()).ok_or(NOT_REGISTERED)),
    )
}
