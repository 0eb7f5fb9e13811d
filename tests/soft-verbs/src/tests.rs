//! Tests of the functions as unsafe callers use them, which the safe layer does not.

use crate::rim::FUNCTIONS;
use crate::{Loopback, SoftPort};
use kvplane_sys::verbs::provider::*;
use libc::c_int;
use std::ptr;

#[test]
fn deregistration_under_a_posted_request_is_a_violation() {
    let fabric = Loopback::new(&[SoftPort::default()]);
    let device = fabric.fabric.devices().next().expect("a device");
    let mut bytes = [0u8; 64];
    // SAFETY: living objects of a software device, each freed once, terminated lists, and memory to which no message is
    // sent. The safe functions would have held the registration.
    unsafe {
        let context = (FUNCTIONS.open_device)(device.as_ptr());
        let domain = (FUNCTIONS.alloc_pd)(context);
        let mut options = ibv_srq_init_attr { srq_context: ptr::null_mut(), max_wr: 4, max_sge: 1, srq_limit: 0 };
        let shared = (FUNCTIONS.create_srq)(domain, &raw mut options);
        let memory = (FUNCTIONS.reg_mr)(domain, (&raw mut bytes).cast(), bytes.len(), ACCESS_LOCAL_WRITE as c_int);
        let mut piece = ibv_sge { addr: (*memory).addr.addr() as u64, length: 64, lkey: (*memory).lkey };
        let next = ptr::null_mut();
        let mut receive = ibv_recv_wr { wr_id: 1, next, sg_list: &raw mut piece, num_sge: 1 };
        let mut bad = ptr::null_mut();
        assert_eq!(((*context).ops.post_srq_recv)(shared, &raw mut receive, &raw mut bad), 0);
        assert_eq!(fabric.violations(), 0);
        (FUNCTIONS.dereg_mr)(memory);
        assert_eq!(fabric.violations(), 1);
        (FUNCTIONS.destroy_srq)(shared);
        (FUNCTIONS.dealloc_pd)(domain);
        (FUNCTIONS.close_device)(context);
    }
}
