//! Binary interface of CUDA's driver library, as far as it is used here.
//!
//! Written by hand after NVIDIA's documentation of the driver interface. Values of C enums are kept as plain integers,
//! because a newer driver may store values that are unknown here.

#![allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "the names of the C interface")]

use libc::{c_int, c_uint, c_void};

pub(super) type CUresult = c_int;
pub(super) type CUdevice = c_int;
pub(super) type CUcontext = *mut c_void;
pub(super) type CUstream = *mut c_void;
pub(super) type CUevent = *mut c_void;

pub(super) const SUCCESS: CUresult = 0;
pub(super) const INVALID_VALUE: CUresult = 1;
pub(super) const OUT_OF_MEMORY: CUresult = 2;
pub(super) const NOT_INITIALIZED: CUresult = 3;
pub(super) const DEINITIALIZED: CUresult = 4;
pub(super) const DEVICE_UNAVAILABLE: CUresult = 46;
pub(super) const NO_DEVICE: CUresult = 100;
pub(super) const INVALID_CONTEXT: CUresult = 201;
pub(super) const ECC_UNCORRECTABLE: CUresult = 214;
pub(super) const NVLINK_UNCORRECTABLE: CUresult = 220;
pub(super) const NOT_READY: CUresult = 600;
pub(super) const ILLEGAL_ADDRESS: CUresult = 700;
pub(super) const CONTEXT_IS_DESTROYED: CUresult = 709;
pub(super) const HARDWARE_STACK_ERROR: CUresult = 714;
pub(super) const LAUNCH_FAILED: CUresult = 719;
/// Codes of faults of a kernel, after which its context answers nothing else: a launch that took too long, an
/// assertion, an illegal instruction, a misaligned address, an invalid address space, an invalid program counter.
pub(super) const KERNEL_FAULTS: [CUresult; 6] = [702, 710, 715, 716, 717, 718];
pub(super) const NOT_SUPPORTED: CUresult = 801;
pub(super) const UNKNOWN: CUresult = 999;

/// `CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT`.
pub(super) const DEVICE_COPY_ENGINES: c_int = 40;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`: bits.
pub(super) const DEVICE_FLUSH_OPTIONS: c_int = 117;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`: `cuFlushGPUDirectRDMAWrites` works for the device.
pub(super) const FLUSH_BY_HOST: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`: 0 for none.
pub(super) const DEVICE_WRITES_ORDERING: c_int = 118;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
pub(super) const DEVICE_DMA_BUF: c_int = 124;
/// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID`.
pub(super) const DEVICE_HOST_NODE: c_int = 134;

pub(super) const POINTER_MEMORY_TYPE: c_int = 2;
pub(super) const POINTER_BUFFER_ID: c_int = 7;
pub(super) const POINTER_IS_MANAGED: c_int = 8;
pub(super) const POINTER_DEVICE_ORDINAL: c_int = 9;
pub(super) const POINTER_IS_LEGACY_IPC_CAPABLE: c_int = 10;
pub(super) const POINTER_RANGE_START: c_int = 11;
pub(super) const POINTER_RANGE_SIZE: c_int = 12;
pub(super) const POINTER_IS_RDMA_CAPABLE: c_int = 15;
/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const MEMORY_DEVICE: c_int = 2;

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(super) const HOST_PORTABLE: c_uint = 1;
pub(super) const RANGE_DMA_BUF: c_int = 1;
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
pub(super) const FLUSH_CURRENT_CONTEXT: c_int = 0;
pub(super) const FLUSH_TO_OWNER: c_int = 100;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`.
pub(super) const ORDER_STREAM: c_int = 1;

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

/// `CUmemGenericAllocationHandle`.
pub(super) type AllocationHandle = u64;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const HANDLE_DESCRIPTOR: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(super) const HANDLE_FABRIC: c_int = 8;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const ACCESS_READ_WRITE: c_int = 3;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AllocationProperties {
    pub(super) kind: c_int,
    /// Types of handles that the allocation was created for, as bits.
    pub(super) handle_types: c_int,
    pub(super) location: MemLocation,
    pub(super) windows: *mut c_void,
    pub(super) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AccessDescription {
    pub(super) location: MemLocation,
    pub(super) flags: c_int,
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MemLocation {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct CopyAttributes {
    pub(super) order: c_int,
    pub(super) from: MemLocation,
    pub(super) to: MemLocation,
    pub(super) flags: c_uint,
}

const _: () = assert!(size_of::<IpcHandle>() == 64 && size_of::<CopyAttributes>() == 24);
const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<AccessDescription>() == 12);
