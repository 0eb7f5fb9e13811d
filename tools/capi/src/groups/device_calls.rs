//! Collectives and messages on the memory of devices: refused.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::outcome::{CallFailure, ResultCode, call};

fn refuse(name: &str) -> c_int {
    call(|| {
        let host = name.trim_end_matches("Gpu");
        let text = format!("{name}: memory of devices is not supported; {host}Cpu takes memory of the host");
        Err(CallFailure::new(ResultCode::NotSupported, text))
    })
}

/// Defines calls that return the result for what is not supported.
macro_rules! refused {
    ($($name:ident($($argument:ty),*);)*) => {$(
        #[doc = concat!("Refuses `", stringify!($name), "`.")]
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
        pub(crate) extern "C" fn $name($(_: $argument),*) -> c_int {
            refuse(stringify!($name))
        }
    )*};
}

refused! {
    mooncakePgBroadcastGpu(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void, *mut i32, usize);
    mooncakePgAllReduceGpu(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void, *mut i32, usize);
    mooncakePgAllGatherGpu(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, *mut i32, usize);
    mooncakePgReduceScatterGpu(
        *const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void, *mut i32, usize
    );
    mooncakePgAllToAllGpu(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, *mut i32, usize);
    mooncakePgReduceGpu(
        *const c_void, *mut c_void, usize, c_int, c_int, c_int, *mut c_void, *mut c_void, *mut i32, usize
    );
    mooncakePgGatherGpu(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void, *mut i32, usize);
    mooncakePgScatterGpu(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void, *mut i32, usize);
    mooncakePgBarrierGpu(*mut c_void, *mut c_void, *mut i32, usize);
}

/// Refuses a message, whose completion is null.
///
/// # Safety
/// A place for the completion, or null.
unsafe fn refuse_message(name: &str, completion: *mut *mut c_void) -> c_int {
    // SAFETY: by the caller's promise.
    if let Some(completion) = unsafe { completion.as_mut() } {
        *completion = ptr::null_mut();
    }
    refuse(name)
}

/// Refuses a message from the memory of a device.
///
/// # Safety
/// A place for the completion, or null.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgSendGpu(
    _send: *const c_void,
    _count: usize,
    _data_type: c_int,
    _peer: c_int,
    _comm: *mut c_void,
    _stream: *mut c_void,
    _hint: *mut i32,
    _hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { refuse_message("mooncakePgSendGpu", completion) }
}

/// Refuses a message into the memory of a device.
///
/// # Safety
/// A place for the completion, or null.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgRecvGpu(
    _receive: *mut c_void,
    _count: usize,
    _data_type: c_int,
    _peer: c_int,
    _comm: *mut c_void,
    _stream: *mut c_void,
    _hint: *mut i32,
    _hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { refuse_message("mooncakePgRecvGpu", completion) }
}
