//! Function table of `libcuda.so.1`.
//!
//! The library is opened once and stays loaded. Symbols are looked up by the name of the version whose signature is
//! written here (`cuMemGetAddressRange_v2`), which later drivers keep.

use super::Cuda;
use super::ffi::*;
use crate::device::captures::{ExchangeMode, IsCapturing};
use crate::device::{DeviceError, Family};
use crate::library::{Library, Missing, functions, load_once};
use libc::{c_char, c_int, c_uint, c_void};

functions! {
    /// Functions of the library. All may be called from any thread.
    pub(super) struct Functions {
        init = c"cuInit": unsafe extern "C" fn(c_uint) -> CUresult,
        error_name = c"cuGetErrorName": unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult,
        device_count = c"cuDeviceGetCount": unsafe extern "C" fn(*mut c_int) -> CUresult,
        device_get = c"cuDeviceGet": unsafe extern "C" fn(*mut CUdevice, c_int) -> CUresult,
        device_name = c"cuDeviceGetName": unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> CUresult,
        device_pci = c"cuDeviceGetPCIBusId": unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> CUresult,
        device_attribute = c"cuDeviceGetAttribute": unsafe extern "C" fn(*mut c_int, c_int, CUdevice) -> CUresult,
        primary_retain = c"cuDevicePrimaryCtxRetain": unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult,
        primary_release = c"cuDevicePrimaryCtxRelease_v2": unsafe extern "C" fn(CUdevice) -> CUresult,
        context_push = c"cuCtxPushCurrent_v2": unsafe extern "C" fn(CUcontext) -> CUresult,
        context_pop = c"cuCtxPopCurrent_v2": unsafe extern "C" fn(*mut CUcontext) -> CUresult,
        pointer_attributes = c"cuPointerGetAttributes":
            unsafe extern "C" fn(c_uint, *mut c_int, *mut *mut c_void, u64) -> CUresult,
        stream_create = c"cuStreamCreate": unsafe extern "C" fn(*mut CUstream, c_uint) -> CUresult,
        stream_destroy = c"cuStreamDestroy_v2": unsafe extern "C" fn(CUstream) -> CUresult,
        stream_synchronize = c"cuStreamSynchronize": unsafe extern "C" fn(CUstream) -> CUresult,
        stream_context = c"cuStreamGetCtx": unsafe extern "C" fn(CUstream, *mut CUcontext) -> CUresult,
        context_device = c"cuCtxGetDevice": unsafe extern "C" fn(*mut CUdevice) -> CUresult,
        stream_wait = c"cuStreamWaitEvent": unsafe extern "C" fn(CUstream, CUevent, c_uint) -> CUresult,
        event_create = c"cuEventCreate": unsafe extern "C" fn(*mut CUevent, c_uint) -> CUresult,
        event_destroy = c"cuEventDestroy_v2": unsafe extern "C" fn(CUevent) -> CUresult,
        event_record = c"cuEventRecord": unsafe extern "C" fn(CUevent, CUstream) -> CUresult,
        event_query = c"cuEventQuery": unsafe extern "C" fn(CUevent) -> CUresult,
        copy = c"cuMemcpyAsync": unsafe extern "C" fn(u64, u64, usize, CUstream) -> CUresult,
        allocate = c"cuMemAlloc_v2": unsafe extern "C" fn(*mut u64, usize) -> CUresult,
        free = c"cuMemFree_v2": unsafe extern "C" fn(u64) -> CUresult,
        host_register = c"cuMemHostRegister_v2": unsafe extern "C" fn(*mut c_void, usize, c_uint) -> CUresult,
        host_unregister = c"cuMemHostUnregister": unsafe extern "C" fn(*mut c_void) -> CUresult,
        ipc_get = c"cuIpcGetMemHandle": unsafe extern "C" fn(*mut IpcHandle, u64) -> CUresult,
        ipc_open = c"cuIpcOpenMemHandle_v2": unsafe extern "C" fn(*mut u64, IpcHandle, c_uint) -> CUresult,
        ipc_close = c"cuIpcCloseMemHandle": unsafe extern "C" fn(u64) -> CUresult,
    }
    optional {
        // 10.1
        capture_mode = c"cuThreadExchangeStreamCaptureMode": ExchangeMode,
        // 10.0
        is_capturing = c"cuStreamIsCapturing": IsCapturing,
        // 11.7
        export_range = c"cuMemGetHandleForAddressRange":
            unsafe extern "C" fn(*mut c_void, u64, usize, c_int, u64) -> CUresult,
        // 11.3
        flush_writes = c"cuFlushGPUDirectRDMAWrites": unsafe extern "C" fn(c_int, c_int) -> CUresult,
        // 12.8
        copy_batch = c"cuMemcpyBatchAsync": unsafe extern "C" fn(
            *mut u64, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut usize, CUstream,
        ) -> CUresult,
    }
}

functions! {
    /// Functions of the virtual-memory interface, in all drivers since 10.2.
    pub(super) struct VirtualMemory {
        address_range = c"cuMemGetAddressRange_v2": unsafe extern "C" fn(*mut u64, *mut usize, u64) -> CUresult,
        retain = c"cuMemRetainAllocationHandle":
            unsafe extern "C" fn(*mut AllocationHandle, *mut c_void) -> CUresult,
        release = c"cuMemRelease": unsafe extern "C" fn(AllocationHandle) -> CUresult,
        properties = c"cuMemGetAllocationPropertiesFromHandle":
            unsafe extern "C" fn(*mut AllocationProperties, AllocationHandle) -> CUresult,
        export = c"cuMemExportToShareableHandle":
            unsafe extern "C" fn(*mut c_void, AllocationHandle, c_int, u64) -> CUresult,
        import = c"cuMemImportFromShareableHandle":
            unsafe extern "C" fn(*mut AllocationHandle, *mut c_void, c_int) -> CUresult,
        reserve = c"cuMemAddressReserve": unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> CUresult,
        free = c"cuMemAddressFree": unsafe extern "C" fn(u64, usize) -> CUresult,
        map = c"cuMemMap": unsafe extern "C" fn(u64, usize, usize, AllocationHandle, u64) -> CUresult,
        unmap = c"cuMemUnmap": unsafe extern "C" fn(u64, usize) -> CUresult,
        set_access = c"cuMemSetAccess":
            unsafe extern "C" fn(u64, usize, *const AccessDescription, usize) -> CUresult,
    }
    optional {}
}

/// Returns the driver of this process. Opened and initialized by the first call; if that failed, the next call tries
/// again.
pub(in crate::device) fn library() -> Result<&'static Cuda, DeviceError> {
    load_once!(Cuda, || {
        let family = Family::Cuda;
        let library = Library::open_any(family.libraries())
            .map_err(|error| DeviceError::NoDriver { family, detail: error.to_string() })?;
        let missing = |(name, _): Missing| DeviceError::old(family, name, "450 (CUDA 11)");
        Cuda::new(Functions::look_up(library).map_err(missing)?, VirtualMemory::look_up(library).ok())
    })
}
