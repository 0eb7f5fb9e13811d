//! Provider of one device that opens and registers memory, and no more: for tests of what is private here, which cannot
//! use the software devices, because those depend on this crate.

use super::super::device::provider::{Functions, ProvidedDevices, VerbsProvider};
use super::super::ffi::*;
use super::super::{ProtectionDomain, Verbs, VerbsError};
use crate::doorbell::event_fd;
use libc::{c_int, c_void};
use std::mem;
use std::os::fd::IntoRawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Returns a protection domain on a bare device.
pub(crate) fn domain() -> ProtectionDomain {
    let devices = Verbs::provided_by(Bare).devices().expect("devices");
    ProtectionDomain::new(&devices[0].open().expect("opened")).expect("domain")
}

struct Bare;

/// The device as seen by C.
struct BareDevice(ibv_device);

// SAFETY: it is not written after its creation.
unsafe impl Send for BareDevice {}
// SAFETY: as above.
unsafe impl Sync for BareDevice {}

// SAFETY: the functions that have a body do what libibverbs does, and the others end the process. No context refers to
// its device.
unsafe impl VerbsProvider for Bare {
    fn name(&self) -> &'static str {
        "bare"
    }

    fn functions(&self) -> &'static Functions {
        &FUNCTIONS
    }

    fn devices(&self) -> Result<ProvidedDevices, VerbsError> {
        // SAFETY: texts without a byte, null pointers, and numbers.
        let owner = Arc::new(BareDevice(unsafe { mem::zeroed() }));
        Ok(ProvidedDevices { devices: vec![NonNull::from(&owner.0)], owner })
    }
}

static FUNCTIONS: Functions = Functions {
    open_device,
    close_device,
    query_device,
    query_port: uncalled(),
    query_gid_table: None,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    reg_mr_iova2: None,
    reg_dmabuf_mr: None,
    dereg_mr,
    create_comp_channel: uncalled(),
    destroy_comp_channel: uncalled(),
    create_cq: uncalled(),
    destroy_cq: uncalled(),
    get_cq_event: uncalled(),
    ack_cq_events: uncalled(),
    create_srq: uncalled(),
    destroy_srq: uncalled(),
    create_qp: uncalled(),
    modify_qp: uncalled(),
    destroy_qp: uncalled(),
    get_async_event: uncalled(),
    ack_async_event: uncalled(),
};

/// Returns a function that ends the process, in the place of one of type `F`.
const fn uncalled<F: Copy>() -> F {
    const { assert!(size_of::<F>() == size_of::<extern "C" fn()>(), "a function pointer") };
    extern "C" fn end() {
        panic!("a bare device has no such function");
    }
    // SAFETY: `F` is the type of a C function pointer; the function takes nothing from its caller and does not return.
    unsafe { mem::transmute_copy(&(end as extern "C" fn())) }
}

unsafe extern "C" fn open_device(_: *mut ibv_device) -> *mut ibv_context {
    let ops = ibv_context_ops {
        before_poll: [ptr::null_mut(); 11],
        poll_cq: uncalled(),
        req_notify_cq: uncalled(),
        before_srq: [ptr::null_mut(); 7],
        post_srq_recv: uncalled(),
        before_send: [ptr::null_mut(); 4],
        post_send: uncalled(),
        post_recv: uncalled(),
        after_recv: [ptr::null_mut(); 5],
    };
    Box::into_raw(Box::new(ibv_context {
        device: ptr::null_mut(),
        ops,
        cmd_fd: -1,
        async_fd: event_fd().expect("eventfd").into_raw_fd(),
        num_comp_vectors: 1,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        abi_compat: 0,
    }))
}

unsafe extern "C" fn close_device(raw: *mut ibv_context) -> c_int {
    // SAFETY: made by `open_device`, with a descriptor of its own; not used again.
    unsafe { libc::close(Box::from_raw(raw).async_fd) }
}

unsafe extern "C" fn query_device(_: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's struct, in which it stored zeroes.
    unsafe { (*attributes).max_mr_size = u64::MAX };
    0
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    Box::into_raw(Box::new(ibv_pd { context, handle: 0 }))
}

unsafe extern "C" fn dealloc_pd(raw: *mut ibv_pd) -> c_int {
    // SAFETY: made by `alloc_pd`, not used again.
    drop(unsafe { Box::from_raw(raw) });
    0
}

unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, _: c_int) -> *mut ibv_mr {
    // SAFETY: a domain that is alive.
    let context = unsafe { (*pd).context };
    Box::into_raw(Box::new(ibv_mr { context, pd, addr, length, handle: 0, lkey: 0, rkey: 0 }))
}

unsafe extern "C" fn dereg_mr(raw: *mut ibv_mr) -> c_int {
    // SAFETY: made by `reg_mr`, not used again.
    drop(unsafe { Box::from_raw(raw) });
    0
}
