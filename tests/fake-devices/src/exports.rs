//! Functions that the shared library exports under the names of the driver, and those that a test controls it by.
//!
//! Signatures are those of NVIDIA's documentation. The names with `fake` belong to this library only.

#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the names and the contracts of the C interface")]

use crate::memory::open_foreign;
use crate::state::*;
use crate::streams::{Event, Operation, Stream};
use libc::{c_char, c_int, c_uint, c_void};
use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

/// Streams that exist without being created: the legacy default stream, and that of each thread.
const DEFAULT_STREAMS: [u64; 3] = [0, 1, 2];
/// Mark of a handle for other processes.
const HANDLE_MARK: u64 = 0x6b76_7066_616b_6531;

fn result(done: Result<(), i32>) -> c_int {
    done.map_or_else(|code| code, |()| SUCCESS)
}

/// Stores a value at a place of the caller.
///
/// # Safety
/// The place is valid for a write, or null.
unsafe fn store<T>(place: *mut T, value: T) -> Result<(), i32> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by this function's contract; a place of the caller may be unaligned.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// Stores text with a zero byte at the end.
///
/// # Safety
/// The place is valid for `length` bytes.
unsafe fn store_text(place: *mut c_char, length: c_int, text: &str) -> Result<(), i32> {
    let length = usize::try_from(length).map_err(|_| INVALID_VALUE)?;
    if text.len() >= length {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, text.len()) };
    // SAFETY: as above.
    unsafe { place.wrapping_add(text.len()).write(0) };
    Ok(())
}

fn device(state: &State, device: c_int) -> Result<usize, i32> {
    usize::try_from(device).ok().filter(|&device| device < state.retained.len()).ok_or(INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(flags: c_uint) -> c_int {
    result(call("cuInit").and_then(|mut state| {
        state.initialized = true;
        if flags == 0 { Ok(()) } else { Err(INVALID_VALUE) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    let text = match code {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        NOT_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        _ => return INVALID_VALUE,
    };
    // SAFETY: a place of the caller.
    result(unsafe { store(name, text.as_ptr()) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: a place of the caller.
    result(call("cuDeviceGetCount").and_then(|state| unsafe { store(count, state.retained.len() as c_int) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(found: *mut c_int, ordinal: c_int) -> c_int {
    result(call("cuDeviceGet").and_then(|state| {
        device(&state, ordinal)?;
        // SAFETY: a place of the caller.
        unsafe { store(found, ordinal) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, number: c_int) -> c_int {
    result(call("cuDeviceGetName").and_then(|state| {
        device(&state, number)?;
        // SAFETY: a place of the caller.
        unsafe { store_text(name, length, "Fake device") }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, number: c_int) -> c_int {
    result(call("cuDeviceGetPCIBusId").and_then(|state| {
        let device = device(&state, number)?;
        // SAFETY: a place of the caller.
        unsafe { store_text(text, length, &format!("0000:{:02X}:00.0", device + 0xA1)) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, number: c_int) -> c_int {
    result(call("cuDeviceGetAttribute").and_then(|state| {
        device(&state, number)?;
        let known = match attribute {
            // Copy engines; order of a NIC's writes: none; dma-buf descriptors; NUMA node of the host.
            40 => 2,
            118 => 0,
            124 => 1,
            134 => 0,
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: a place of the caller.
        unsafe { store(value, known) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, number: c_int) -> c_int {
    result(call("cuDevicePrimaryCtxRetain").and_then(|mut state| {
        let device = device(&state, number)?;
        state.retained[device] += 1;
        // SAFETY: a place of the caller. A context is its device's number plus one.
        unsafe { store(context, (device + 1) as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(number: c_int) -> c_int {
    result(call("cuDevicePrimaryCtxRelease_v2").and_then(|mut state| {
        let device = device(&state, number)?;
        state.retained[device] = state.retained[device].checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    result(call("cuCtxPushCurrent_v2").and_then(|state| {
        let device = (context as usize).checked_sub(1).filter(|&device| device < state.retained.len());
        let device = device.filter(|&device| state.retained[device] > 0).ok_or(INVALID_CONTEXT)?;
        CURRENT.with_borrow_mut(|current| current.push(device));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    result(call("cuCtxPopCurrent_v2").and_then(|_| {
        let device = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        // SAFETY: a place of the caller.
        unsafe { store(context, (device + 1) as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *mut c_int,
    places: *mut *mut c_void,
    address: u64,
) -> c_int {
    result(call("cuPointerGetAttributes").and_then(|state| {
        let found = state.memory.find(address);
        let is_pinned = state.is_pinned(address, 1);
        for index in 0..count as usize {
            // SAFETY: the caller gives `count` attributes.
            let attribute = unsafe { attributes.wrapping_add(index).read() };
            // SAFETY: and as many places.
            let place = unsafe { places.wrapping_add(index).read() };
            // SAFETY: each of its attribute's type.
            unsafe {
                match attribute {
                    2 => store(place.cast::<c_int>(), found.map_or(c_int::from(is_pinned), |_| 2)),
                    7 => store(place.cast::<u64>(), found.map_or(0, |found| found.buffer_id)),
                    8 => store(place.cast::<u8>(), found.map_or(0, |found| u8::from(found.managed))),
                    9 => store(place.cast::<c_int>(), found.map_or(-2, |found| found.device as c_int)),
                    10 => {
                        store(place.cast::<u8>(), found.map_or(0, |found| u8::from(!found.managed && !found.imported)))
                    }
                    11 => store(place.cast::<u64>(), found.map_or(0, |found| found.base)),
                    12 => store(place.cast::<usize>(), found.map_or(0, |found| found.bytes as usize)),
                    15 => store(place.cast::<u8>(), found.map_or(0, |found| u8::from(!found.managed))),
                    _ => Err(INVALID_VALUE),
                }
            }?;
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    result(call_in_context("cuStreamCreate").and_then(|(mut state, device)| {
        let handle = state.handle();
        state.streams.insert(handle, Stream::new(device, handle));
        // SAFETY: a place of the caller.
        unsafe { store(stream, handle as *mut c_void) }
    }))
}

/// Returns a stream; a default one is created when it is first used.
fn stream(state: &mut State, device: usize, handle: u64) -> Result<Arc<Stream>, i32> {
    if DEFAULT_STREAMS.contains(&handle) {
        let stream = state.streams.entry(handle).or_insert_with(|| Stream::new(device, handle));
        return Ok(Arc::clone(stream));
    }
    state.streams.get(&handle).map(Arc::clone).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> c_int {
    result(call_in_context("cuStreamDestroy_v2").and_then(|(mut state, _)| {
        let stream = state.streams.remove(&(handle as u64)).ok_or(INVALID_HANDLE)?;
        stream.push(Operation::End);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> c_int {
    let begun = call_in_context("cuStreamSynchronize")
        .and_then(|(mut state, device)| Ok((stream(&mut state, device, handle as u64)?, device)));
    let (stream, device) = match begun {
        Ok(begun) => begun,
        Err(code) => return code,
    };
    let event = Arc::new(Event::default());
    let point = event.begin();
    stream.push(Operation::Record(Arc::clone(&event), point));
    event.wait(point);
    state().lost[device]
}

fn event(state: &State, handle: *mut c_void) -> Result<Arc<Event>, i32> {
    state.events.get(&(handle as u64)).map(Arc::clone).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(handle: *mut c_void, awaited: *mut c_void, _flags: c_uint) -> c_int {
    result(call_in_context("cuStreamWaitEvent").and_then(|(mut state, device)| {
        let event = event(&state, awaited)?;
        let point = event.last();
        stream(&mut state, device, handle as u64)?.push(Operation::Wait(event, point));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(place: *mut *mut c_void, _flags: c_uint) -> c_int {
    result(call_in_context("cuEventCreate").and_then(|(mut state, _)| {
        let handle = state.handle();
        state.events.insert(handle, Arc::default());
        // SAFETY: a place of the caller.
        unsafe { store(place, handle as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(handle: *mut c_void) -> c_int {
    result(
        call_in_context("cuEventDestroy_v2")
            .and_then(|(mut state, _)| state.events.remove(&(handle as u64)).map(|_| ()).ok_or(INVALID_HANDLE)),
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(recorded: *mut c_void, handle: *mut c_void) -> c_int {
    result(call_in_context("cuEventRecord").and_then(|(mut state, device)| {
        let event = event(&state, recorded)?;
        let point = event.begin();
        stream(&mut state, device, handle as u64)?.push(Operation::Record(event, point));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(handle: *mut c_void) -> c_int {
    result(
        call_in_context("cuEventQuery")
            .and_then(|(state, _)| if event(&state, handle)?.is_done() { Ok(()) } else { Err(NOT_READY) }),
    )
}

/// Checks both sides of a copy as a driver does when it is enqueued, and enqueues it.
fn enqueue(state: &mut State, device: usize, to: u64, from: u64, bytes: usize, handle: u64) -> Result<(), i32> {
    let bytes = bytes as u64;
    for address in [to, from] {
        if state.memory.is_device(address) && state.memory.alias(address, bytes).is_none() {
            return Err(INVALID_VALUE);
        }
    }
    stream(state, device, handle)?.push(Operation::Copy { to, from, bytes });
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, handle: *mut c_void) -> c_int {
    result(
        call_in_context("cuMemcpyAsync")
            .and_then(|(mut state, device)| enqueue(&mut state, device, to, from, bytes, handle as u64)),
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync(
    to: *mut u64,
    from: *mut u64,
    bytes: *mut usize,
    count: usize,
    _attributes: *mut c_void,
    _first: *mut usize,
    attribute_count: usize,
    failed: *mut usize,
    handle: *mut c_void,
) -> c_int {
    result(call_in_context("cuMemcpyBatchAsync").and_then(|(mut state, device)| {
        // A real driver refuses the legacy default stream here.
        if attribute_count == 0 || handle as u64 <= 1 {
            return Err(INVALID_VALUE);
        }
        for index in 0..count {
            // SAFETY: the caller gives arrays of `count` elements.
            let (to, from, bytes) = unsafe {
                (to.wrapping_add(index).read(), from.wrapping_add(index).read(), bytes.wrapping_add(index).read())
            };
            enqueue(&mut state, device, to, from, bytes, handle as u64).inspect_err(|_| {
                // SAFETY: a place of the caller.
                let _ = unsafe { store(failed, index) };
            })?;
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    result(call_in_context("cuMemHostRegister_v2").and_then(|(mut state, _)| {
        let (start, end) = (address as u64, address as u64 + bytes as u64);
        if bytes == 0 || state.memory.is_device(start) {
            return Err(INVALID_VALUE);
        }
        let overlaps = state.pinned.range(..end).next_back().is_some_and(|(&at, &length)| at + length > start);
        if overlaps {
            return Err(ALREADY_REGISTERED);
        }
        state.pinned.insert(start, bytes as u64);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostUnregister(address: *mut c_void) -> c_int {
    result(
        call_in_context("cuMemHostUnregister")
            .and_then(|(mut state, _)| state.pinned.remove(&(address as u64)).map(|_| ()).ok_or(NOT_REGISTERED)),
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    result(call_in_context("cuMemAlloc_v2").and_then(|(mut state, device)| {
        let base = state.memory.allocate(device, bytes as u64, false, None).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a place of the caller.
        unsafe { store(address, base) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    result(
        call_in_context("cuMemFree_v2").and_then(
            |(mut state, _)| {
                if state.memory.free(address) { Ok(()) } else { Err(INVALID_VALUE) }
            },
        ),
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    address: u64,
    bytes: usize,
    kind: c_int,
    flags: u64,
) -> c_int {
    result(call_in_context("cuMemGetHandleForAddressRange").and_then(|(state, _)| {
        let found = state.memory.find(address).ok_or(INVALID_VALUE)?;
        // A descriptor is of the whole allocation.
        if kind != 1 || flags != 0 || found.managed || found.base != address || found.bytes != bytes as u64 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the allocation's descriptor.
        let fd = unsafe { libc::fcntl(found.fd, libc::F_DUPFD_CLOEXEC, 0) };
        // SAFETY: a place of the caller.
        if fd < 0 { Err(OUT_OF_MEMORY) } else { unsafe { store(handle.cast::<c_int>(), fd) } }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFlushGPUDirectRDMAWrites(_target: c_int, _scope: c_int) -> c_int {
    result(call_in_context("cuFlushGPUDirectRDMAWrites").map(|_| ()))
}

/// Handle for other processes, in the 64 bytes of the driver's.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Handle {
    mark: u64,
    pid: u64,
    fd: u64,
    bytes: u64,
    rest: [u64; 4],
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Handle, address: u64) -> c_int {
    result(call_in_context("cuIpcGetMemHandle").and_then(|(state, _)| {
        let found = state.memory.find(address).filter(|found| found.base == address).ok_or(INVALID_VALUE)?;
        if found.managed || found.imported {
            return Err(INVALID_VALUE);
        }
        let (pid, fd, bytes) = (u64::from(std::process::id()), found.fd as u64, found.bytes);
        // SAFETY: a place of the caller.
        unsafe { store(handle, Handle { mark: HANDLE_MARK, pid, fd, bytes, rest: [0; 4] }) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Handle, _flags: c_uint) -> c_int {
    result(call_in_context("cuIpcOpenMemHandle_v2").and_then(|(mut state, device)| {
        if handle.mark != HANDLE_MARK || handle.pid == u64::from(std::process::id()) {
            return Err(INVALID_CONTEXT);
        }
        let fd = open_foreign(handle.pid as u32, handle.fd as u32).ok_or(INVALID_VALUE)?;
        let base = state.memory.allocate(device, handle.bytes, false, Some(fd)).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a place of the caller.
        unsafe { store(address, base) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    result(call_in_context("cuIpcCloseMemHandle").and_then(|(mut state, _)| {
        let is_import = state.memory.find(address).is_some_and(|found| found.imported && found.base == address);
        if is_import && state.memory.free(address) { Ok(()) } else { Err(INVALID_VALUE) }
    }))
}

/// Sets the longest random delay of copies, their rate (bytes a second; 0 for none) and the seed of the delays.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_set(delay_ns: u64, rate: u64, seed: u64) {
    state().settings = Settings { delay_ns, rate, seed };
}

/// Makes a later call of a function fail: after `passes` more calls, once.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn kvplane_fake_fail(function: *const c_char, passes: u64, code: c_int) {
    // SAFETY: the caller gives a string.
    let name = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
    state().injected.push((name, passes, code));
}

/// Loses a device: each of its calls returns `code` from now on; 0 brings it back.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_lose(device: usize, code: c_int) {
    if let Some(lost) = state().lost.get_mut(device) {
        *lost = code;
    }
}

/// Allocates managed memory, as a program's other libraries would.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_managed(device: usize, bytes: u64) -> u64 {
    state().memory.allocate(device, bytes, true, None).unwrap_or(0)
}

/// Allocates device memory without a context, as a program's other libraries would; 0 if there is none left.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_allocate(device: usize, bytes: u64) -> u64 {
    state().memory.allocate(device, bytes, false, None).unwrap_or(0)
}

/// Frees what the two functions above allocated. Returns 1 if there was such an allocation.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_free(address: u64) -> c_int {
    c_int::from(state().memory.free(address))
}

/// Creates a stream as a program's other libraries would.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_stream(device: usize) -> u64 {
    let mut state = state();
    let handle = state.handle();
    state.streams.insert(handle, Stream::new(device, handle));
    handle
}

/// Launches a kernel that fills device memory with the pattern of `seed` after a delay.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_fill(
    device: usize,
    handle: u64,
    to: u64,
    bytes: u64,
    seed: u64,
    delay_ns: u64,
) -> c_int {
    let mut state = state();
    let delay = Duration::from_nanos(delay_ns);
    result(stream(&mut state, device, handle).map(|stream| stream.push(Operation::Fill { to, bytes, seed, delay })))
}

/// Copies device memory out, or host memory in, at once: what a test looks at or prepares. Returns 0 if no allocation
/// covers the range.
///
/// # Safety
/// `host` is valid for `bytes` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn kvplane_fake_access(address: u64, host: *mut u8, bytes: u64, is_write: c_int) -> c_int {
    let Some((alias, _allocation)) = state().memory.alias(address, bytes) else { return 0 };
    let (to, from) = if is_write != 0 { (alias, host) } else { (host, alias) };
    // SAFETY: the allocation is held; the host's side by this function's contract.
    unsafe { crate::memory::copy_bytes(to, from, bytes as usize) };
    1
}

/// Stores the counters: retained contexts, allocations, pinned ranges, streams, events, calls without a context, copies
/// with unpinned memory, copied bytes, calls.
///
/// # Safety
/// `counters` is valid for nine values.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn kvplane_fake_counters(counters: *mut u64) {
    let state = state();
    let created = state.streams.keys().filter(|handle| !DEFAULT_STREAMS.contains(handle)).count();
    let values = [
        state.retained.iter().sum::<usize>() as u64,
        state.memory.count() as u64,
        state.pinned.len() as u64,
        created as u64,
        state.events.len() as u64,
        state.without_context,
        state.unpinned,
        state.copied_bytes,
        state.counts.values().sum(),
    ];
    for (index, value) in values.into_iter().enumerate() {
        // SAFETY: by this function's contract.
        unsafe { counters.wrapping_add(index).write(value) };
    }
}
