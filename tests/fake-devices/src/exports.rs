//! Functions that the shared library exports under the names of the driver, and those that a test controls it by.
//!
//! Signatures are those of NVIDIA's documentation. The names with `fake` belong to this library only.

#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the names and the contracts of the C interface")]

use crate::engines::Direction;
use crate::memory::{Allocation, File, PAGE_BYTES, Source, inode, open_foreign};
use crate::state::*;
use crate::streams::{Event, Operation, Stream};
use crate::virtual_memory::GRANULE;
use libc::{c_char, c_int, c_uint, c_void};
use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Streams that exist without being created: the legacy default stream, and that of each thread.
const DEFAULT_STREAMS: [u64; 3] = [0, 1, 2];
/// First key of the default streams in the table of streams, above all handles.
const DEFAULT_AT: u64 = 1 << 62;
/// Mark of a handle for other processes.
const HANDLE_MARK: u64 = 0x6b76_7066_616b_6531;

pub(crate) fn result(done: Result<(), i32>) -> c_int {
    done.map_or_else(|code| code, |()| SUCCESS)
}

/// Stores a value at a place of the caller.
///
/// # Safety
/// The place is valid for a write, or null.
pub(crate) unsafe fn store<T>(place: *mut T, value: T) -> Result<(), i32> {
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
pub(crate) unsafe fn store_text(place: *mut c_char, length: c_int, text: &str) -> Result<(), i32> {
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

pub(crate) fn device(state: &State, device: c_int) -> Result<usize, i32> {
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
        ALREADY_MAPPED => c"CUDA_ERROR_ALREADY_MAPPED",
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
            // Copy engines; flushes of a NIC's writes; their order: none; dma-buf descriptors; NUMA node of the host.
            40 => 2,
            117 => state.flush_options,
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
                        let is_capable = |found: &Arc<Allocation>| !found.managed && found.source == Source::Own;
                        store(place.cast::<u8>(), u8::from(found.is_some_and(is_capable)))
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

/// Returns the handle of a device's default stream in the table of streams.
const fn default_stream(device: usize, handle: u64) -> u64 {
    DEFAULT_AT + device as u64 * 16 + handle
}

/// Returns a stream; the default ones are those of the device, and are created when they are first used.
pub(crate) fn stream(state: &mut State, device: usize, handle: u64) -> Result<Arc<Stream>, i32> {
    if DEFAULT_STREAMS.contains(&handle) {
        let handle = default_stream(device, handle);
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
    match begun {
        Ok((stream, device)) => synchronize(&stream, device),
        Err(code) => code,
    }
}

/// Waits until a stream has done everything; returns the code of its device.
pub(crate) fn synchronize(stream: &Stream, device: usize) -> c_int {
    let event = Arc::new(Event::new(device));
    let point = event.begin();
    stream.push(Operation::Record(Arc::clone(&event), point));
    event.wait(point);
    std::thread::sleep(stream.due().saturating_duration_since(Instant::now()));
    state().lost[device]
}

pub(crate) fn event(state: &State, handle: *mut c_void) -> Result<Arc<Event>, i32> {
    state.events.get(&(handle as u64)).map(Arc::clone).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCtx(handle: *mut c_void, context: *mut *mut c_void) -> c_int {
    result(call_in_context("cuStreamGetCtx").and_then(|(mut state, device)| {
        let stream = stream(&mut state, device, handle as u64)?;
        // SAFETY: a place of the caller.
        unsafe { store(context, (stream.device() + 1) as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    // SAFETY: a place of the caller.
    let wanted = unsafe { mode.read() };
    // SAFETY: as above.
    result(unsafe { store(mode, CAPTURE_MODE.replace(wanted)) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, status: *mut c_int) -> c_int {
    result(call_in_context("cuStreamIsCapturing").and_then(|(state, _)| match state.captured {
        // The default stream waits for it.
        Some(_) if (handle as u64) < 2 => Err(CAPTURE_IMPLICIT),
        // SAFETY: a place of the caller.
        captured => unsafe { store(status, c_int::from(captured == Some(handle as u64))) },
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetDevice(place: *mut c_int) -> c_int {
    result(call_in_context("cuCtxGetDevice").and_then(|(_, device)| {
        // SAFETY: a place of the caller.
        unsafe { store(place, device as c_int) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(handle: *mut c_void, awaited: *mut c_void, _flags: c_uint) -> c_int {
    result(call_in_context("cuStreamWaitEvent").and_then(|(mut state, device)| {
        let event = event(&state, awaited)?;
        let point = event.last();
        let stream = stream(&mut state, device, handle as u64)?;
        if state.engines.are_modelled() {
            event.due().into_iter().for_each(|due| stream.extend(due));
        } else {
            stream.push(Operation::Wait(event, point));
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(place: *mut *mut c_void, _flags: c_uint) -> c_int {
    result(call_in_context("cuEventCreate").and_then(|(mut state, device)| {
        let handle = state.handle();
        state.events.insert(handle, Arc::new(Event::new(device)));
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
        let stream = stream(&mut state, device, handle as u64)?;
        // A real driver refuses an event and a stream of two contexts.
        if event.device() != stream.device() {
            return Err(INVALID_HANDLE);
        }
        if state.engines.are_modelled() {
            event.record_due(stream.due());
            return Ok(());
        }
        let point = event.begin();
        stream.push(Operation::Record(event, point));
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
pub(crate) fn enqueue(
    state: &mut State,
    device: usize,
    to: u64,
    from: u64,
    bytes: usize,
    handle: u64,
) -> Result<(), i32> {
    let bytes = bytes as u64;
    for address in [to, from] {
        if state.memory.is_device(address) && state.memory.alias(address, bytes).is_none() {
            return Err(INVALID_VALUE);
        }
    }
    let stream = stream(state, device, handle)?;
    if state.engines.are_modelled() {
        let direction = Direction::of(state.memory.is_device(to), state.memory.is_device(from));
        let done = state.engines.copy(stream.device(), direction, bytes, stream.due());
        stream.extend(done);
        state.copied_bytes += bytes;
        return Ok(());
    }
    stream.push(Operation::Copy { to, from, bytes });
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
    result(
        call_in_context("cuMemHostRegister_v2")
            .and_then(|(mut state, _)| pin(&mut state, address as u64, bytes as u64)),
    )
}

/// Pins host memory.
pub(crate) fn pin(state: &mut State, start: u64, bytes: u64) -> Result<(), i32> {
    if bytes == 0 || state.memory.is_device(start) {
        return Err(INVALID_VALUE);
    }
    let before_end = state.pinned.range(..start + bytes).next_back();
    if before_end.is_some_and(|(&at, &length)| at + length > start) {
        return Err(ALREADY_REGISTERED);
    }
    state.pinned.insert(start, bytes);
    Ok(())
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
        let base = match state.is_virtual {
            Some(handle_types) => state.map_all(device, 1, (bytes as u64).next_multiple_of(GRANULE), handle_types)?,
            None => state.memory.allocate(device, bytes as u64, false).ok_or(OUT_OF_MEMORY)?,
        };
        // SAFETY: a place of the caller.
        unsafe { store(address, base) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    result(call_in_context("cuMemFree_v2").and_then(|(mut state, _)| {
        let is_own = state.memory.find(address).is_some_and(|found| found.source == Source::Own);
        let is_freed = if is_own { state.memory.free(address) } else { state.unmap_all(address) };
        if is_freed { Ok(()) } else { Err(INVALID_VALUE) }
    }))
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
        let is_aligned = address.is_multiple_of(PAGE_BYTES);
        let found = state.memory.find_pages(address, bytes as u64).filter(|_| is_aligned).ok_or(INVALID_VALUE)?;
        if kind != 1 || flags != 0 || found.managed {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    mark: u64,
    pid: u64,
    fd: u64,
    bytes: u64,
    /// File behind the descriptor, which may be of another allocation by the time it is opened.
    file: u64,
    /// Offset of the allocation in the file.
    offset: u64,
    rest: [u64; 2],
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Handle, address: u64) -> c_int {
    result(call_in_context("cuIpcGetMemHandle").and_then(|(state, _)| {
        let found = state.memory.find(address).filter(|found| found.base == address).ok_or(INVALID_VALUE)?;
        if found.managed || found.source != Source::Own {
            return Err(INVALID_VALUE);
        }
        let (pid, fd, bytes) = (u64::from(std::process::id()), found.fd as u64, found.bytes);
        let (file, offset) = (inode(found.fd), found.offset);
        // SAFETY: a place of the caller.
        unsafe { store(handle, Handle { mark: HANDLE_MARK, pid, fd, bytes, file, offset, rest: [0; 2] }) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Handle, _flags: c_uint) -> c_int {
    result(call_in_context("cuIpcOpenMemHandle_v2").and_then(|(mut state, device)| {
        if handle.mark != HANDLE_MARK || handle.pid == u64::from(std::process::id()) {
            return Err(INVALID_CONTEXT);
        }
        let is_same = |one: &&Arc<Allocation>| one.device == device && one.source == Source::Handle(handle);
        // A real driver of before CUDA 11.1 counts no references.
        if state.memory.all().any(|one| is_same(&one)) {
            return Err(ALREADY_MAPPED);
        }
        let fd = open_foreign(handle.pid as u32, handle.fd as u32, handle.file).ok_or(INVALID_VALUE)?;
        let file = File { fd, offset: handle.offset };
        let base = state.memory.import(device, handle.bytes, file, Source::Handle(handle)).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a place of the caller.
        unsafe { store(address, base) }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    result(call_in_context("cuIpcCloseMemHandle").and_then(|(mut state, _)| {
        let is_import = |found: &Arc<Allocation>| matches!(found.source, Source::Handle(_)) && found.base == address;
        let is_import = state.memory.find(address).is_some_and(is_import);
        if is_import && state.memory.free(address) { Ok(()) } else { Err(INVALID_VALUE) }
    }))
}

/// Sets the longest random delay of copies, their rate (bytes a second; 0 for none) and the seed of the delays.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_set(delay_ns: u64, rate: u64, seed: u64) {
    state().settings = Settings { delay_ns, rate, seed };
}

/// Models copy engines of this rate (bytes a second), or ends it for 0. No copy is in flight.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_engines(rate: u64) {
    state().engines.set(rate);
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
    state().memory.allocate(device, bytes, true).unwrap_or(0)
}

/// Allocates device memory without a context, as a program's other libraries would; 0 if there is none left.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_allocate(device: usize, bytes: u64) -> u64 {
    let mut state = state();
    if let Some(handle_types) = state.is_virtual {
        return state.map_all(device, 1, bytes.next_multiple_of(GRANULE), handle_types).unwrap_or(0);
    }
    state.memory.allocate(device, bytes, false).unwrap_or(0)
}

/// Frees what the two functions above allocated. Returns 1 if there was such an allocation.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_free(address: u64) -> c_int {
    let mut state = state();
    c_int::from(state.unmap_all(address) || state.memory.free(address))
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

/// Begins to capture a stream into a graph, or ends that for 0. Returns the number of calls that have ended a capture.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_capture(stream: u64) -> u64 {
    let mut state = state();
    state.captured = (stream != 0).then_some(stream);
    state.captures_ended
}

/// Returns the mode of this thread for captures: `CUstreamCaptureMode`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_capture_mode() -> c_int {
    CAPTURE_MODE.get()
}

/// Sets the ways of flushing a NIC's writes that devices have: `CUflushGPUDirectRDMAWritesOptions`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_flush_options(options: c_int) {
    state().flush_options = options;
}

/// Inverts a byte of every 256 in all memory of a device.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn kvplane_fake_damage(device: usize) {
    let state = state();
    for allocation in state.memory.all().filter(|allocation| allocation.device == device) {
        let Some((alias, _held)) = state.memory.alias(allocation.base, allocation.bytes) else { continue };
        for offset in (0..allocation.bytes as usize).step_by(256) {
            // SAFETY: inside the allocation, which is held.
            unsafe { *alias.add(offset) ^= 0xff };
        }
    }
}

/// Returns the number of calls of a function.
///
/// # Safety
/// `function` is a string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn kvplane_fake_calls(function: *const c_char) -> u64 {
    // SAFETY: by this function's contract.
    let name = unsafe { CStr::from_ptr(function) }.to_string_lossy();
    state().counts.get(&*name).copied().unwrap_or(0)
}

/// Stores the counters: retained contexts, allocations, pinned ranges, streams, events, calls without a context, copies
/// with unpinned memory, copied bytes, calls, physical allocations and reservations of the virtual-memory interface.
///
/// # Safety
/// `counters` is valid for ten values.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn kvplane_fake_counters(counters: *mut u64) {
    let state = state();
    let created = state.streams.keys().filter(|handle| **handle < DEFAULT_AT).count();
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
        (state.physical.len() + state.memory.reservations()) as u64,
    ];
    for (index, value) in values.into_iter().enumerate() {
        // SAFETY: by this function's contract.
        unsafe { counters.wrapping_add(index).write(value) };
    }
}
