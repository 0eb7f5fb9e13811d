//! The structs that cross the border, laid out as in the header.

use std::ffi::{c_char, c_int, c_void};

/// A transfer to make.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferRequest {
    /// 0 to read, 1 to write.
    pub opcode: c_int,
    /// Our memory.
    pub source: *mut c_void,
    /// Whose memory.
    pub target_id: i32,
    /// Where in it.
    pub target_offset: u64,
    /// Bytes.
    pub length: u64,
}

/// A named message.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NotifyMessage {
    /// Its name.
    pub name: *mut c_char,
    /// Its text.
    pub msg: *mut c_char,
}

/// The state of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferStatus {
    /// A number of `TaskState`.
    pub status: c_int,
    /// Bytes moved.
    pub transferred_bytes: u64,
}

/// A range of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BufferEntry {
    /// Where it begins.
    pub addr: *mut c_void,
    /// Its length.
    pub length: usize,
}

/// Length of a device's name, the final zero included.
pub const DEVICE_NAME_BYTES: usize = 64;

/// The load of one way out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NicLoad {
    /// Its name.
    pub device_name: [c_char; DEVICE_NAME_BYTES],
    /// Bytes under way.
    pub inflight_bytes: u64,
    /// Its measured rate in bits per second.
    pub ewma_bandwidth_bps: f64,
}

// The layout that C compilers give the header on x86-64.
const _: () = assert!(size_of::<TransferRequest>() == 40);
const _: () = assert!(size_of::<NotifyMessage>() == 16);
const _: () = assert!(size_of::<TransferStatus>() == 16);
const _: () = assert!(size_of::<BufferEntry>() == 16);
const _: () = assert!(size_of::<NicLoad>() == 80);
