//! Binary interface of libibverbs, as far as it is used here: structs, constants, and the function tables.
//!
//! Written by hand after the installed headers of rdma-core 44 (with their names, so that both can be compared side by
//! side); the test `layout` compares sizes and offsets with the output of a C compiler. Values of C enums are kept as
//! plain integers, because a newer library may store values that are unknown here.
//!
//! The data path has no symbols: `ibv_post_send` and its like are inline functions of the headers that call through
//! `ibv_context.ops`. So the software devices only have to fill the same table.

#![allow(non_camel_case_types, clippy::use_self, reason = "the names of the C interface")]

use libc::{c_char, c_int, c_void, pthread_cond_t, pthread_mutex_t};

/// Entry of a function table that is neither called nor filled here.
pub(crate) type UnusedEntry = *mut c_void;

pub(crate) const SEND_FENCE: u32 = 1;
pub(crate) const SEND_SIGNALED: u32 = 1 << 1;
pub(crate) const SEND_SOLICITED: u32 = 1 << 2;
pub(crate) const SEND_INLINE: u32 = 1 << 3;

pub(crate) const WR_RDMA_WRITE: u32 = 0;
pub(crate) const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
pub(crate) const WR_SEND: u32 = 2;
pub(crate) const WR_SEND_WITH_IMM: u32 = 3;
pub(crate) const WR_RDMA_READ: u32 = 4;

#[cfg(feature = "soft-verbs")]
pub(crate) const WC_SEND: u32 = 0;
#[cfg(feature = "soft-verbs")]
pub(crate) const WC_RDMA_WRITE: u32 = 1;
#[cfg(feature = "soft-verbs")]
pub(crate) const WC_RDMA_READ: u32 = 2;
pub(crate) const WC_RECV: u32 = 1 << 7;
pub(crate) const WC_RECV_RDMA_WITH_IMM: u32 = WC_RECV + 1;
pub(crate) const WC_WITH_IMM: u32 = 1 << 1;

pub(crate) const ACCESS_LOCAL_WRITE: u32 = 1;
pub(crate) const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub(crate) const ACCESS_REMOTE_READ: u32 = 1 << 2;
pub(crate) const ACCESS_ON_DEMAND: u32 = 1 << 6;
pub(crate) const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;

pub(crate) const QP_STATE: u32 = 1;
pub(crate) const QP_ACCESS_FLAGS: u32 = 1 << 3;
pub(crate) const QP_PKEY_INDEX: u32 = 1 << 4;
pub(crate) const QP_PORT: u32 = 1 << 5;
pub(crate) const QP_AV: u32 = 1 << 7;
pub(crate) const QP_PATH_MTU: u32 = 1 << 8;
pub(crate) const QP_TIMEOUT: u32 = 1 << 9;
pub(crate) const QP_RETRY_CNT: u32 = 1 << 10;
pub(crate) const QP_RNR_RETRY: u32 = 1 << 11;
pub(crate) const QP_RQ_PSN: u32 = 1 << 12;
pub(crate) const QP_MAX_QP_RD_ATOMIC: u32 = 1 << 13;
pub(crate) const QP_MIN_RNR_TIMER: u32 = 1 << 15;
pub(crate) const QP_SQ_PSN: u32 = 1 << 16;
pub(crate) const QP_MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
pub(crate) const QP_DEST_QPN: u32 = 1 << 20;

pub(crate) const QPS_RESET: u32 = 0;
pub(crate) const QPS_INIT: u32 = 1;
pub(crate) const QPS_RTR: u32 = 2;
pub(crate) const QPS_RTS: u32 = 3;
pub(crate) const QPS_ERR: u32 = 6;
/// `IBV_QPT_RC`.
pub(crate) const QPT_RC: u32 = 2;

pub(crate) const LINK_LAYER_INFINIBAND: u8 = 1;
pub(crate) const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_ODP_SUPPORT` of `general_caps`.
pub(crate) const ODP_SUPPORT: u64 = 1;
/// `IBV_ODP_SUPPORT_{SEND,RECV,WRITE,READ}` of `rc_odp_caps`: required capabilities for on-demand paging.
pub(crate) const ODP_RC_ALL: u32 = 0xf;
/// Mark of a context inside a `verbs_context`.
pub(crate) const EXTENDED: usize = usize::MAX;

pub(crate) const EVENT_CQ_ERR: u32 = 0;
pub(crate) const EVENT_QP_FATAL: u32 = 1;
pub(crate) const EVENT_QP_REQ_ERR: u32 = 2;
pub(crate) const EVENT_QP_ACCESS_ERR: u32 = 3;
pub(crate) const EVENT_DEVICE_FATAL: u32 = 8;
pub(crate) const EVENT_PORT_ACTIVE: u32 = 9;
pub(crate) const EVENT_PORT_ERR: u32 = 10;
pub(crate) const EVENT_LID_CHANGE: u32 = 11;
pub(crate) const EVENT_PKEY_CHANGE: u32 = 12;
pub(crate) const EVENT_SM_CHANGE: u32 = 13;
pub(crate) const EVENT_SRQ_ERR: u32 = 14;
pub(crate) const EVENT_QP_LAST_WQE_REACHED: u32 = 16;
pub(crate) const EVENT_CLIENT_REREGISTER: u32 = 17;
pub(crate) const EVENT_GID_CHANGE: u32 = 18;

#[repr(C)]
pub(crate) struct ibv_device {
    pub(crate) ops: [UnusedEntry; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

pub(crate) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub(crate) type PostSrqRecv = unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
pub(crate) type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(crate) type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

#[repr(C)]
pub(crate) struct ibv_context_ops {
    pub(crate) before_poll: [UnusedEntry; 11],
    pub(crate) poll_cq: PollCq,
    pub(crate) req_notify_cq: ReqNotifyCq,
    pub(crate) before_srq: [UnusedEntry; 7],
    pub(crate) post_srq_recv: PostSrqRecv,
    pub(crate) before_send: [UnusedEntry; 4],
    pub(crate) post_send: PostSend,
    pub(crate) post_recv: PostRecv,
    pub(crate) after_recv: [UnusedEntry; 5],
}

#[repr(C)]
pub(crate) struct ibv_context {
    pub(crate) device: *mut ibv_device,
    pub(crate) ops: ibv_context_ops,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) abi_compat: usize,
}

pub(crate) type QueryPortSized = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;
pub(crate) type QueryDeviceEx =
    unsafe extern "C" fn(*mut ibv_context, *const c_void, *mut ibv_device_attr_ex, usize) -> c_int;

/// Struct around an extended context. It grows at its front; `size` states its actual size, so a field is located by
/// its distance from the end.
#[repr(C)]
pub(crate) struct verbs_context {
    pub(crate) query_port: Option<QueryPortSized>,
    pub(crate) before_query_device: [UnusedEntry; 26],
    pub(crate) query_device_ex: Option<QueryDeviceEx>,
    pub(crate) before_size: [UnusedEntry; 11],
    pub(crate) size: usize,
    pub(crate) context: ibv_context,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_device_attr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: u32,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) unused: [c_int; 13],
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// Front of the extended attributes; the library fills at most the size that the caller passes.
#[repr(C)]
pub(crate) struct ibv_device_attr_ex {
    pub(crate) orig_attr: ibv_device_attr,
    pub(crate) comp_mask: u32,
    pub(crate) odp_general_caps: u64,
    pub(crate) odp_rc_caps: u32,
    pub(crate) odp_uc_caps: u32,
    pub(crate) odp_ud_caps: u32,
}

/// Includes the speed field that rdma-core added for XDR; older libraries, which get the whole size, leave it zero.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_port_attr {
    pub(crate) state: u32,
    pub(crate) max_mtu: u32,
    pub(crate) active_mtu: u32,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
    pub(crate) active_speed_ex: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_gid_entry {
    /// A union that C aligns to 64-bit words.
    pub(crate) gid: [u64; 2],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

#[repr(C)]
pub(crate) struct ibv_pd {
    pub(crate) context: *mut ibv_context,
    pub(crate) handle: u32,
}

#[repr(C)]
pub(crate) struct ibv_mr {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
pub(crate) struct ibv_comp_channel {
    pub(crate) context: *mut ibv_context,
    pub(crate) fd: c_int,
    pub(crate) refcnt: c_int,
}

#[repr(C)]
pub(crate) struct ibv_cq {
    pub(crate) context: *mut ibv_context,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) cond: pthread_cond_t,
    pub(crate) comp_events_completed: u32,
    pub(crate) async_events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_srq {
    pub(crate) context: *mut ibv_context,
    pub(crate) srq_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) handle: u32,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) cond: pthread_cond_t,
    pub(crate) events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp {
    pub(crate) context: *mut ibv_context,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
    pub(crate) state: u32,
    pub(crate) qp_type: u32,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) cond: pthread_cond_t,
    pub(crate) events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_wc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: u32,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ibv_sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// A send request. Of the three unions behind `imm_data` only the first's RDMA form is named.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_send_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: u32,
    pub(crate) send_flags: u32,
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) rest: [u64; 9],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_recv_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_recv_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_cap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp_init_attr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) qp_type: u32,
    pub(crate) sq_sig_all: c_int,
}

#[repr(C)]
pub(crate) struct ibv_srq_init_attr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_ah_attr {
    /// A union that C aligns to 64-bit words.
    pub(crate) dgid: [u64; 2],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    /// Padding: C rounds the route, a struct of its own, up to whole words.
    pub(crate) padding: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_attr {
    pub(crate) qp_state: u32,
    pub(crate) cur_qp_state: u32,
    pub(crate) path_mtu: u32,
    pub(crate) path_mig_state: u32,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: u32,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) alt_ah_attr: ibv_ah_attr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_async_event {
    /// A union of pointers and a port number.
    pub(crate) element: *mut c_void,
    pub(crate) event_type: u32,
}
