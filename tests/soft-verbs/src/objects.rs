//! Objects of software devices as seen by C: the structs of verbs, followed by private fields.

use crate::fabric::{Fabric, State};
use crate::{null, queues};
use kvplane_sys::verbs::provider::*;
use libc::c_int;
use std::mem;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

/// An open software device.
#[repr(C)]
pub(crate) struct SoftContext {
    raw: ibv_context,
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) number: u32,
    pub(crate) device: usize,
}

/// A completion queue; only the null device uses its ring.
#[repr(C)]
pub(crate) struct SoftQueue {
    pub(crate) raw: ibv_cq,
    pub(crate) ring: Mutex<null::Ring>,
}

/// A completion channel with its number.
#[repr(C)]
pub(crate) struct SoftChannel {
    pub(crate) raw: ibv_comp_channel,
    pub(crate) number: u32,
}

impl SoftContext {
    pub(crate) fn new(
        device: *mut ibv_device,
        fabric: Arc<Fabric>,
        number: u32,
        index: usize,
        async_fd: c_int,
    ) -> Box<Self> {
        let is_null = fabric.is_null();
        let ops = ibv_context_ops {
            before_poll: [ptr::null_mut(); 11],
            poll_cq: if is_null { null::poll } else { queues::poll },
            req_notify_cq: queues::arm,
            before_srq: [ptr::null_mut(); 7],
            post_srq_recv: queues::post_shared,
            before_send: [ptr::null_mut(); 4],
            post_send: if is_null { null::post_send } else { queues::post_send },
            post_recv: queues::post_receive,
            after_recv: [ptr::null_mut(); 5],
        };
        let raw = ibv_context {
            device,
            ops,
            cmd_fd: -1,
            async_fd,
            num_comp_vectors: 1,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            abi_compat: 0,
        };
        Box::new(Self { raw, fabric, number, device: index })
    }
}

/// Returns the context behind a pointer to a software device's context.
///
/// # Safety
/// The pointer refers to an open software device and stays valid for `'a`.
pub(crate) unsafe fn context<'a>(raw: *mut ibv_context) -> &'a SoftContext {
    // SAFETY: by this function's contract; contexts of software devices begin with the C struct.
    unsafe { &*raw.cast::<SoftContext>() }
}

/// Locks and returns the fabric state behind a context pointer.
///
/// # Safety
/// See `context`.
pub(crate) unsafe fn state<'a>(raw: *mut ibv_context) -> MutexGuard<'a, State> {
    // SAFETY: by this function's contract.
    unsafe { context(raw) }.fabric.lock()
}

/// Boxes a value and passes its ownership to C.
pub(crate) fn give<T, U>(value: T) -> *mut U {
    Box::into_raw(Box::new(value)).cast()
}

/// Takes the ownership of a box back from C and drops it.
///
/// # Safety
/// The pointer came from `give::<T, _>` and is not used again.
pub(crate) unsafe fn take<T, U>(pointer: *mut U) {
    // SAFETY: by this function's contract.
    drop(unsafe { Box::from_raw(pointer.cast::<T>()) });
}

/// Returns an all-zero C object: numbers, null pointers, and locks that are never taken.
///
/// # Safety
/// `T` is one of the structs of verbs, for which all-zero is valid.
pub(crate) unsafe fn zeroed<T>() -> T {
    // SAFETY: by this function's contract.
    unsafe { mem::zeroed() }
}

/// Sets errno and returns a null pointer, as verbs do on errors.
pub(crate) fn refuse<T>(error: c_int) -> *mut T {
    set_errno(error);
    ptr::null_mut()
}

pub(crate) fn set_errno(error: c_int) {
    // SAFETY: writes this thread's own errno.
    unsafe { *libc::__errno_location() = error };
}
