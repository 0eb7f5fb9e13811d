//! Structs that cross the FFI boundary, laid out as in the header.

use std::ffi::{c_char, c_int, c_void};

/// Transfer request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferRequest {
    /// 0 to read, 1 to write.
    pub(crate) opcode: c_int,
    /// Local address.
    pub(crate) source: *mut c_void,
    /// Segment.
    pub(crate) target_id: i32,
    /// Address in the segment.
    pub(crate) target_offset: u64,
    /// Length in bytes.
    pub(crate) length: u64,
}

/// Named message.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotifyMessage {
    /// Name.
    pub(crate) name: *mut c_char,
    /// Text.
    pub(crate) msg: *mut c_char,
}

/// State of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferStatus {
    /// Number of a `TaskState`.
    pub(crate) status: c_int,
    /// Bytes that were moved.
    pub(crate) transferred_bytes: u64,
}

/// Range of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferEntry {
    /// Address.
    pub(crate) addr: *mut c_void,
    /// Length in bytes.
    pub(crate) length: usize,
}

/// Length of a device name, including the final zero.
pub(crate) const DEVICE_NAME_BYTES: usize = 64;

/// Load of one rail.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NicLoad {
    /// Name.
    pub(crate) device_name: [c_char; DEVICE_NAME_BYTES],
    /// Bytes in flight.
    pub(crate) inflight_bytes: u64,
    /// Measured bandwidth in bits per second.
    pub(crate) ewma_bandwidth_bps: f64,
}

// Layout of the header on x86-64.
const _: () = assert!(size_of::<TransferRequest>() == 40);
const _: () = assert!(size_of::<NotifyMessage>() == 16);
const _: () = assert!(size_of::<TransferStatus>() == 16);
const _: () = assert!(size_of::<BufferEntry>() == 16);
const _: () = assert!(size_of::<NicLoad>() == 80);
