//! Interface between the safe layer and an implementation of verbs: libibverbs, or that of another crate.
//!
//! An implementation is a table of C functions and a list of devices. Posting, polling and arming call through the
//! table that each open device has, so no dispatch is added to them.

#![allow(unreachable_pub, reason = "reachable with the feature verbs-provider")]

use crate::verbs::error::VerbsError;
use crate::verbs::ffi::*;
use libc::{c_int, c_void};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Implementation of verbs. Any thread may use it.
///
/// # Safety
/// The safe layer trusts its functions and devices as it trusts those of libibverbs:
///
/// * The [`Functions`], and those of `ibv_context.ops` of an open device, have the contracts of the functions of
///   libibverbs with the same names: they return living objects or null, write no more than the structs that are passed
///   to them, and access memory only for requests on registrations of it.
/// * A device is never written while its owner lives, its texts end with a zero, and it has a path in sysfs only if it
///   has a file in `/dev/infiniband`. Its contexts keep it alive themselves.
pub unsafe trait VerbsProvider: Send + Sync {
    /// Returns the name of the implementation, such as `libibverbs`.
    fn name(&self) -> &'static str;

    /// Returns the table of functions, which is the same in each call.
    fn functions(&self) -> &'static Functions;

    /// Returns the devices. An empty list is not an error.
    ///
    /// # Errors
    /// When the kernel does not support verbs.
    fn devices(&self) -> Result<ProvidedDevices, VerbsError>;
}

/// Devices of a provider.
pub struct ProvidedDevices {
    /// Devices, in the provider's order.
    pub devices: Vec<NonNull<ibv_device>>,
    /// Owner that keeps all of them alive.
    pub owner: Arc<dyn Any + Send + Sync>,
}

/// Functions of a provider. All may be called from any thread.
#[allow(missing_docs, reason = "the fields have the names of the C functions")]
pub struct Functions {
    pub open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    pub close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    pub query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    /// Compatible form, which fills the front of the struct and leaves the rest unchanged.
    pub query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
    pub query_gid_table: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize>,
    pub alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    pub dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    /// Supports the optional access flags, such as relaxed ordering.
    pub reg_mr_iova2: Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr>,
    pub reg_dmabuf_mr: Option<unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr>,
    pub dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub create_comp_channel: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_comp_channel,
    pub destroy_comp_channel: unsafe extern "C" fn(*mut ibv_comp_channel) -> c_int,
    pub create_cq:
        unsafe extern "C" fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq,
    pub destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    pub get_cq_event: unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
    pub ack_cq_events: unsafe extern "C" fn(*mut ibv_cq, u32),
    pub create_srq: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq,
    pub destroy_srq: unsafe extern "C" fn(*mut ibv_srq) -> c_int,
    pub create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    pub modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    pub destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    pub get_async_event: unsafe extern "C" fn(*mut ibv_context, *mut ibv_async_event) -> c_int,
    pub ack_async_event: unsafe extern "C" fn(*mut ibv_async_event),
}
