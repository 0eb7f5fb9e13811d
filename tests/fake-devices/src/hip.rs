//! Functions that the library of HIP exports under the names of HIP's runtime: each makes the
//! thread's device current and calls the function of [`crate::exports`] that does the same.

#![allow(non_snake_case, reason = "the names of the C interface")]

use crate::exports::*;
use crate::state::{CURRENT, INVALID_DEVICE, INVALID_VALUE, SUCCESS, call};
use libc::{c_char, c_int, c_uint, c_void};
use std::cell::Cell;
use std::ptr;

/// Version that is reported: 6.0, whose memory types count from "unregistered".
const VERSION: c_int = 60_032_830;
/// `hipMemoryTypeDevice` and `hipMemoryTypeManaged` of that version.
const TYPES: [c_int; 2] = [2, 3];

thread_local! {
    /// Current device of this thread.
    static DEVICE: Cell<usize> = const { Cell::new(0) };
}

/// Calls a function with the thread's device as the current context.
fn on_device(work: impl FnOnce() -> c_int) -> c_int {
    let device = DEVICE.get();
    CURRENT.with_borrow_mut(|current| current.push(device));
    let code = work();
    CURRENT.with_borrow_mut(|current| current.pop());
    code
}

/// Stores a value at a place of the caller.
///
/// # Safety
/// The place is valid for a write, or null.
unsafe fn store<T>(place: *mut T, value: T) -> c_int {
    if place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: by this function's contract.
    unsafe { place.write(value) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipInit(flags: c_uint) -> c_int {
    cuInit(flags)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: a place of the caller.
    unsafe { store(version, VERSION) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipGetErrorName(code: c_int) -> *const c_char {
    let mut name = ptr::null();
    // SAFETY: a place of this function.
    let _ = unsafe { cuGetErrorName(code, &raw mut name) };
    name
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> c_int {
    // SAFETY: a place of the caller.
    unsafe { cuDeviceGetCount(count) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipGetDevice(device: *mut c_int) -> c_int {
    // SAFETY: a place of the caller.
    unsafe { store(device, DEVICE.get() as c_int) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipSetDevice(device: c_int) -> c_int {
    let Ok(state) = call("hipSetDevice") else { return INVALID_DEVICE };
    match usize::try_from(device) {
        Ok(device) if device < state.retained.len() => {
            DEVICE.set(device);
            SUCCESS
        }
        _ => INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    // SAFETY: a place of the caller.
    unsafe { cuDeviceGetName(name, length, device) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> c_int {
    // SAFETY: a place of the caller.
    unsafe { cuDeviceGetPCIBusId(text, length, device) }
}

/// `hipPointerAttribute_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    kind: c_int,
    device: c_int,
    device_pointer: *mut c_void,
    host_pointer: *mut c_void,
    managed: c_int,
    flags: c_uint,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipPointerGetAttributes(found: *mut Attributes, address: *const c_void) -> c_int {
    let Ok(state) = call("hipPointerGetAttributes") else { return INVALID_VALUE };
    let Some(allocation) = state.memory.find(address as u64) else { return INVALID_VALUE };
    let kind = TYPES[usize::from(allocation.managed)];
    let (device, managed) = (allocation.device as c_int, c_int::from(allocation.managed));
    let (device_pointer, host_pointer) = (address.cast_mut(), ptr::null_mut());
    // SAFETY: a place of the caller.
    unsafe { store(found, Attributes { kind, device, device_pointer, host_pointer, managed, flags: 0 }) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipPointerGetAttribute(
    place: *mut c_void,
    wanted: c_int,
    address: *mut c_void,
) -> c_int {
    let (mut wanted, mut place) = (wanted, place);
    // SAFETY: one attribute and its place.
    unsafe { cuPointerGetAttributes(1, &raw mut wanted, &raw mut place, address as u64) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipMemGetAddressRange(
    base: *mut *mut c_void,
    bytes: *mut usize,
    address: *mut c_void,
) -> c_int {
    let Ok(state) = call("hipMemGetAddressRange") else { return INVALID_VALUE };
    let Some(allocation) = state.memory.find(address as u64) else { return INVALID_VALUE };
    // SAFETY: places of the caller.
    unsafe { store(base, allocation.base as *mut c_void) | store(bytes, allocation.bytes as usize) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipStreamCreateWithFlags(stream: *mut *mut c_void, flags: c_uint) -> c_int {
    // SAFETY: a place of the caller.
    on_device(|| unsafe { cuStreamCreate(stream, flags) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipStreamDestroy(stream: *mut c_void) -> c_int {
    on_device(|| cuStreamDestroy_v2(stream))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipStreamSynchronize(stream: *mut c_void) -> c_int {
    on_device(|| cuStreamSynchronize(stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipStreamGetDevice(stream: *mut c_void, device: *mut c_int) -> c_int {
    let mut context = ptr::null_mut();
    // SAFETY: a place of this function.
    match on_device(|| unsafe { cuStreamGetCtx(stream, &raw mut context) }) {
        // SAFETY: a place of the caller.
        SUCCESS => unsafe { store(device, context as c_int - 1) },
        code => code,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) -> c_int {
    on_device(|| cuStreamWaitEvent(stream, event, flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipEventCreateWithFlags(event: *mut *mut c_void, flags: c_uint) -> c_int {
    // SAFETY: a place of the caller.
    on_device(|| unsafe { cuEventCreate(event, flags) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipEventDestroy(event: *mut c_void) -> c_int {
    on_device(|| cuEventDestroy_v2(event))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    on_device(|| cuEventRecord(event, stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { cuThreadExchangeStreamCaptureMode(mode) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
    // SAFETY: by this function's contract.
    on_device(|| unsafe { cuStreamIsCapturing(stream, status) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipEventQuery(event: *mut c_void) -> c_int {
    on_device(|| cuEventQuery(event))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipMemcpyAsync(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    kind: c_int,
    stream: *mut c_void,
) -> c_int {
    let sides = {
        let Ok(state) = call("hipMemcpyAsync") else { return INVALID_VALUE };
        [state.memory.is_device(to as u64), state.memory.is_device(from as u64)]
    };
    // 1: to a device, 2: to the host, 3: inside a device.
    if sides != [kind != 2, kind != 1] {
        return INVALID_VALUE;
    }
    on_device(|| cuMemcpyAsync(to as u64, from as u64, bytes, stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipMalloc(address: *mut *mut c_void, bytes: usize) -> c_int {
    // SAFETY: a place of the caller, of the same size.
    on_device(|| unsafe { cuMemAlloc_v2(address.cast(), bytes) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipFree(address: *mut c_void) -> c_int {
    on_device(|| cuMemFree_v2(address as u64))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipHostRegister(address: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    on_device(|| cuMemHostRegister_v2(address, bytes, flags))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipHostUnregister(address: *mut c_void) -> c_int {
    on_device(|| cuMemHostUnregister(address))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipIpcGetMemHandle(handle: *mut Handle, address: *mut c_void) -> c_int {
    // SAFETY: a place of the caller.
    on_device(|| unsafe { cuIpcGetMemHandle(handle, address as u64) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipIpcOpenMemHandle(address: *mut *mut c_void, handle: Handle, flags: c_uint) -> c_int {
    // SAFETY: a place of the caller, of the same size.
    on_device(|| unsafe { cuIpcOpenMemHandle_v2(address.cast(), handle, flags) })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipIpcCloseMemHandle(address: *mut c_void) -> c_int {
    on_device(|| cuIpcCloseMemHandle(address as u64))
}
