//! Function tables of `libamdhip64.so` and `libhsa-runtime64.so.1`, with the records that the functions take.
//!
//! Written by hand after AMD's documentation of the interface.

use super::Hip;
use crate::device::captures::{ExchangeMode, IsCapturing};
use crate::device::{DeviceError, Family};
use crate::library::{Library, Missing, functions, load_once};
use libc::{c_char, c_int, c_void};

/// Library of HSA, which exports dma-buf descriptors.
const HSA: &str = "libhsa-runtime64.so.1";

/// `hipIpcMemHandle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

/// `hipPointerAttribute_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PointerAttributes {
    /// `hipMemoryType`, whose numbers depend on the version.
    pub(super) kind: c_int,
    pub(super) device: c_int,
    pub(super) device_pointer: *mut c_void,
    pub(super) host_pointer: *mut c_void,
    pub(super) managed: c_int,
    pub(super) flags: u32,
}

impl Default for PointerAttributes {
    fn default() -> Self {
        let null = std::ptr::null_mut();
        Self { kind: -1, device: -1, device_pointer: null, host_pointer: null, managed: 0, flags: 0 }
    }
}

const _: () = assert!(size_of::<PointerAttributes>() == 32 && size_of::<IpcHandle>() == 64);

functions! {
    /// Functions of the runtime. All may be called from any thread.
    pub(super) struct Functions {
        init = c"hipInit": unsafe extern "C" fn(u32) -> c_int,
        version = c"hipRuntimeGetVersion": unsafe extern "C" fn(*mut c_int) -> c_int,
        error_name = c"hipGetErrorName": unsafe extern "C" fn(c_int) -> *const c_char,
        device_count = c"hipGetDeviceCount": unsafe extern "C" fn(*mut c_int) -> c_int,
        get_device = c"hipGetDevice": unsafe extern "C" fn(*mut c_int) -> c_int,
        set_device = c"hipSetDevice": unsafe extern "C" fn(c_int) -> c_int,
        device_name = c"hipDeviceGetName": unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        device_pci = c"hipDeviceGetPCIBusId": unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        pointer_attributes = c"hipPointerGetAttributes":
            unsafe extern "C" fn(*mut PointerAttributes, *const c_void) -> c_int,
        address_range = c"hipMemGetAddressRange":
            unsafe extern "C" fn(*mut *mut c_void, *mut usize, *mut c_void) -> c_int,
        stream_create = c"hipStreamCreateWithFlags": unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int,
        stream_destroy = c"hipStreamDestroy": unsafe extern "C" fn(*mut c_void) -> c_int,
        stream_synchronize = c"hipStreamSynchronize": unsafe extern "C" fn(*mut c_void) -> c_int,
        stream_wait = c"hipStreamWaitEvent": unsafe extern "C" fn(*mut c_void, *mut c_void, u32) -> c_int,
        event_create = c"hipEventCreateWithFlags": unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int,
        event_destroy = c"hipEventDestroy": unsafe extern "C" fn(*mut c_void) -> c_int,
        event_record = c"hipEventRecord": unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        event_query = c"hipEventQuery": unsafe extern "C" fn(*mut c_void) -> c_int,
        copy = c"hipMemcpyAsync":
            unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int, *mut c_void) -> c_int,
        allocate = c"hipMalloc": unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int,
        free = c"hipFree": unsafe extern "C" fn(*mut c_void) -> c_int,
        host_register = c"hipHostRegister": unsafe extern "C" fn(*mut c_void, usize, u32) -> c_int,
        host_unregister = c"hipHostUnregister": unsafe extern "C" fn(*mut c_void) -> c_int,
        ipc_get = c"hipIpcGetMemHandle": unsafe extern "C" fn(*mut IpcHandle, *mut c_void) -> c_int,
        ipc_open = c"hipIpcOpenMemHandle": unsafe extern "C" fn(*mut *mut c_void, IpcHandle, u32) -> c_int,
        ipc_close = c"hipIpcCloseMemHandle": unsafe extern "C" fn(*mut c_void) -> c_int,
    }
    optional {
        // 5.2
        capture_mode = c"hipThreadExchangeStreamCaptureMode": ExchangeMode,
        // 5.0
        is_capturing = c"hipStreamIsCapturing": IsCapturing,
        // 5.6
        stream_device = c"hipStreamGetDevice": unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
        // 5.0
        pointer_attribute = c"hipPointerGetAttribute":
            unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int,
    }
}

functions! {
    /// Functions of HSA.
    pub(super) struct DmaBufs {
        export = c"hsa_amd_portable_export_dmabuf":
            unsafe extern "C" fn(*const c_void, usize, *mut c_int, *mut u64) -> c_int,
    }
    optional {}
}

/// Returns the driver of this process. Opened and initialized by the first call; if that failed, the next call tries
/// again.
pub(in crate::device) fn library() -> Result<&'static Hip, DeviceError> {
    load_once!(Hip, || {
        let family = Family::Hip;
        let library = Library::open_any(family.libraries())
            .map_err(|error| DeviceError::NoDriver { family, detail: error.to_string() })?;
        let missing = |(name, _): Missing| DeviceError::old(family, name, "5.0");
        let functions = Functions::look_up(library).map_err(missing)?;
        let dma_bufs = Library::open(HSA).ok().and_then(|library| DmaBufs::look_up(library).ok());
        Hip::new(functions, dma_bufs)
    })
}
