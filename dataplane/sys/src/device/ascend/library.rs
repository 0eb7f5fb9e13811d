//! Function table of `libascendcl.so`, with the records and the numbers that the functions take.
//!
//! Written by hand after Huawei's documentation of the runtime interface of CANN 9.0. Values of C enums are kept as
//! plain integers, because a newer library may store values that are unknown here.

use super::Ascend;
use crate::device::{DeviceError, Family};
use crate::library::{Library, Missing, functions, load_once};
use libc::{c_char, c_int, c_void};

/// `aclError`.
pub(super) type Code = c_int;

pub(super) const SUCCESS: Code = 0;
pub(super) const REPEATED_INITIALIZE: Code = 100_002;
pub(super) const PARAM_INVALID: Code = 107_000;
pub(super) const INVALID_DEVICE: Code = 107_001;
pub(super) const CONTEXT_NULL: Code = 107_002;
pub(super) const DEVICE_TASK_ABORT: Code = 107_022;
pub(super) const STREAM_ABORT: Code = 107_023;
pub(super) const BAD_ALLOC: Code = 200_000;
pub(super) const FEATURE_NOT_SUPPORTED: Code = 207_000;
pub(super) const MEMORY_ALLOCATION: Code = 207_001;
pub(super) const NO_DEVICE: Code = 207_004;
pub(super) const DEVICE_OUT_OF_MEMORY: Code = 207_018;
/// Codes of faults after which the context answers nothing else, as its streams stop at a failure: a lost heartbeat,
/// the copy engine, timeouts and exceptions of cores, memory errors, links, and the connection to the device.
pub(super) const FAULTS: [Code; 20] = [
    507_010, 507_013, 507_014, 507_015, 507_016, 507_017, 507_018, 507_034, 507_035, 507_036, 507_042, 507_043,
    507_044, 507_045, 507_053, 507_054, 507_055, 507_056, 507_057, 507_901,
];

/// `ACL_MEM_LOCATION_TYPE_HOST`.
pub(super) const HOST: c_int = 0;
/// `ACL_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const DEVICE: c_int = 1;
/// `ACL_MEM_LOCATION_TYPE_MANAGED`.
pub(super) const MANAGED: c_int = 3;
/// `ACL_EVENT_SYNC`: the event can be waited for by streams.
pub(super) const EVENT_SYNC: u32 = 1;
/// `ACL_EVENT_RECORDED_STATUS_COMPLETE`.
pub(super) const EVENT_COMPLETE: c_int = 1;
/// `ACL_STOP_ON_FAILURE`.
pub(super) const STOP_ON_FAILURE: u64 = 1;
/// `ACL_MEM_MALLOC_HUGE_FIRST`.
pub(super) const HUGE_FIRST: c_int = 0;
/// `ACL_HOST_REG_PINNED`.
pub(super) const HOST_PINNED: u32 = 0x1000_0000;
/// `ACL_MEMCPY_HOST_TO_DEVICE`.
pub(super) const COPY_TO_DEVICE: c_int = 1;
/// `ACL_MEMCPY_DEVICE_TO_HOST`.
pub(super) const COPY_TO_HOST: c_int = 2;
/// `ACL_MEMCPY_DEVICE_TO_DEVICE`.
pub(super) const COPY_BETWEEN: c_int = 3;

/// `aclrtMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemLocation {
    pub(super) id: u32,
    pub(super) kind: c_int,
}

/// `aclrtPtrAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PointerAttributes {
    pub(super) location: MemLocation,
    pub(super) page_size: u32,
    pub(super) reserved: [u32; 4],
}

/// `aclrtMemcpyBatchAttr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CopyAttributes {
    pub(super) to: MemLocation,
    pub(super) from: MemLocation,
    pub(super) reserved: [u8; 16],
}

const _: () = assert!(size_of::<PointerAttributes>() == 28 && size_of::<CopyAttributes>() == 32);

functions! {
    /// Functions of the library. All may be called from any thread.
    pub(super) struct Functions {
        init = c"aclInit": unsafe extern "C" fn(*const c_char) -> Code,
        soc_name = c"aclrtGetSocName": unsafe extern "C" fn() -> *const c_char,
        device_count = c"aclrtGetDeviceCount": unsafe extern "C" fn(*mut u32) -> Code,
        set_device = c"aclrtSetDevice": unsafe extern "C" fn(i32) -> Code,
        reset_device = c"aclrtResetDevice": unsafe extern "C" fn(i32) -> Code,
        get_context = c"aclrtGetCurrentContext": unsafe extern "C" fn(*mut *mut c_void) -> Code,
        set_context = c"aclrtSetCurrentContext": unsafe extern "C" fn(*mut c_void) -> Code,
        peer_access = c"aclrtDeviceEnablePeerAccess": unsafe extern "C" fn(i32, u32) -> Code,
        pointer_attributes = c"aclrtPointerGetAttributes":
            unsafe extern "C" fn(*const c_void, *mut PointerAttributes) -> Code,
        // 9.0
        address_range = c"aclrtMemGetAddressRange":
            unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut usize) -> Code,
        stream_create = c"aclrtCreateStream": unsafe extern "C" fn(*mut *mut c_void) -> Code,
        stream_failure_mode = c"aclrtSetStreamFailureMode": unsafe extern "C" fn(*mut c_void, u64) -> Code,
        stream_destroy = c"aclrtDestroyStream": unsafe extern "C" fn(*mut c_void) -> Code,
        stream_synchronize = c"aclrtSynchronizeStream": unsafe extern "C" fn(*mut c_void) -> Code,
        stream_wait = c"aclrtStreamWaitEvent": unsafe extern "C" fn(*mut c_void, *mut c_void) -> Code,
        event_create = c"aclrtCreateEventExWithFlag": unsafe extern "C" fn(*mut *mut c_void, u32) -> Code,
        event_destroy = c"aclrtDestroyEvent": unsafe extern "C" fn(*mut c_void) -> Code,
        event_record = c"aclrtRecordEvent": unsafe extern "C" fn(*mut c_void, *mut c_void) -> Code,
        event_status = c"aclrtQueryEventStatus": unsafe extern "C" fn(*mut c_void, *mut c_int) -> Code,
        copy = c"aclrtMemcpyAsync":
            unsafe extern "C" fn(*mut c_void, usize, *const c_void, usize, c_int, *mut c_void) -> Code,
        allocate = c"aclrtMalloc": unsafe extern "C" fn(*mut *mut c_void, usize, c_int) -> Code,
        free = c"aclrtFree": unsafe extern "C" fn(*mut c_void) -> Code,
        // 8.5
        host_register = c"aclrtHostRegisterV2": unsafe extern "C" fn(*mut c_void, u64, u32) -> Code,
        host_unregister = c"aclrtHostUnregister": unsafe extern "C" fn(*mut c_void) -> Code,
    }
    optional {
        // 8.5, and not on all products
        copy_batch = c"aclrtMemcpyBatchAsync": unsafe extern "C" fn(
            *mut u64, *mut usize, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut usize,
            *mut c_void,
        ) -> Code,
        // 9.2
        device_pci = c"aclrtDeviceGetPCIBusId": unsafe extern "C" fn(i32, *mut c_char, i32) -> Code,
    }
}

/// Returns the driver of this process. Opened and initialized by the first call; if that failed, the next call tries
/// again.
pub(in crate::device) fn library() -> Result<&'static Ascend, DeviceError> {
    load_once!(Ascend, || {
        let family = Family::Npu;
        let library = Library::open_any(family.libraries())
            .map_err(|error| DeviceError::NoDriver { family, detail: error.to_string() })?;
        let missing = |(name, _): Missing| DeviceError::old(family, name, "9.0 of CANN");
        Ascend::new(Functions::look_up(library).map_err(missing)?)
    })
}
