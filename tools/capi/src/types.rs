//! The structs that cross the border, laid out as in the header.

use std::ffi::{c_char, c_int, c_void};

/// A transfer to make.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferRequest {
    /// 0 to read, 1 to write.
    pub(crate) opcode: c_int,
    /// Our memory.
    pub(crate) source: *mut c_void,
    /// Whose memory.
    pub(crate) target_id: i32,
    /// Where in it.
    pub(crate) target_offset: u64,
    /// Bytes.
    pub(crate) length: u64,
}

/// A named message.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotifyMessage {
    /// Its name.
    pub(crate) name: *mut c_char,
    /// Its text.
    pub(crate) msg: *mut c_char,
}

/// The state of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferStatus {
    /// A number of `TaskState`.
    pub(crate) status: c_int,
    /// Bytes moved.
    pub(crate) transferred_bytes: u64,
}

/// A range of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferEntry {
    /// Where it begins.
    pub(crate) addr: *mut c_void,
    /// Its length.
    pub(crate) length: usize,
}

/// Length of a device's name, the final zero included.
pub(crate) const DEVICE_NAME_BYTES: usize = 64;

/// The load of one way out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NicLoad {
    /// Its name.
    pub(crate) device_name: [c_char; DEVICE_NAME_BYTES],
    /// Bytes under way.
    pub(crate) inflight_bytes: u64,
    /// Its measured rate in bits per second.
    pub(crate) ewma_bandwidth_bps: f64,
}

// The layout that C compilers give the header on x86-64.
const _: () = assert!(size_of::<TransferRequest>() == 40);
const _: () = assert!(size_of::<NotifyMessage>() == 16);
const _: () = assert!(size_of::<TransferStatus>() == 16);
const _: () = assert!(size_of::<BufferEntry>() == 16);
const _: () = assert!(size_of::<NicLoad>() == 80);
