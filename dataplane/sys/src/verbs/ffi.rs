//! Binary interface of libibverbs, as far as it is used here: structs, constants, and the function tables.
//!
//! Written by hand after the installed headers of rdma-core 44 (with their names, so that both can be compared side by
//! side); the test `layout` compares sizes and offsets with the output of a C compiler. Values of C enums are kept as
//! plain integers, because a newer library may store values that are unknown here.
//!
//! The data path has no symbols: `ibv_post_send` and its like are inline functions of the headers that call through
//! `ibv_context.ops`. So another implementation only has to fill the same table.

#![allow(non_camel_case_types, missing_docs, clippy::use_self, reason = "the names of the C interface")]
#![allow(unreachable_pub, reason = "reachable with the feature verbs-provider")]

use libc::{c_char, c_int, c_void, pthread_cond_t, pthread_mutex_t};

/// Entry of a function table that is neither called nor filled here.
pub type UnusedEntry = *mut c_void;

pub const SEND_FENCE: u32 = 1;
pub const SEND_SIGNALED: u32 = 1 << 1;
pub const SEND_SOLICITED: u32 = 1 << 2;
pub const SEND_INLINE: u32 = 1 << 3;

pub const WR_RDMA_WRITE: u32 = 0;
pub const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
pub const WR_SEND: u32 = 2;
pub const WR_SEND_WITH_IMM: u32 = 3;
pub const WR_RDMA_READ: u32 = 4;

#[cfg(feature = "verbs-provider")]
pub const WC_SEND: u32 = 0;
#[cfg(feature = "verbs-provider")]
pub const WC_RDMA_WRITE: u32 = 1;
#[cfg(feature = "verbs-provider")]
pub const WC_RDMA_READ: u32 = 2;
pub const WC_RECV: u32 = 1 << 7;
pub const WC_RECV_RDMA_WITH_IMM: u32 = WC_RECV + 1;
pub const WC_WITH_IMM: u32 = 1 << 1;

pub const ACCESS_LOCAL_WRITE: u32 = 1;
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
pub const ACCESS_ON_DEMAND: u32 = 1 << 6;
pub const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;

pub const QP_STATE: u32 = 1;
pub const QP_ACCESS_FLAGS: u32 = 1 << 3;
pub const QP_PKEY_INDEX: u32 = 1 << 4;
pub const QP_PORT: u32 = 1 << 5;
pub const QP_AV: u32 = 1 << 7;
pub const QP_PATH_MTU: u32 = 1 << 8;
pub const QP_TIMEOUT: u32 = 1 << 9;
pub const QP_RETRY_CNT: u32 = 1 << 10;
pub const QP_RNR_RETRY: u32 = 1 << 11;
pub const QP_RQ_PSN: u32 = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: u32 = 1 << 13;
pub const QP_MIN_RNR_TIMER: u32 = 1 << 15;
pub const QP_SQ_PSN: u32 = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
pub const QP_DEST_QPN: u32 = 1 << 20;

pub const QPS_RESET: u32 = 0;
pub const QPS_INIT: u32 = 1;
pub const QPS_RTR: u32 = 2;
pub const QPS_RTS: u32 = 3;
pub const QPS_ERR: u32 = 6;
/// `IBV_QPT_RC`.
pub const QPT_RC: u32 = 2;

pub const LINK_LAYER_INFINIBAND: u8 = 1;
pub const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_ODP_SUPPORT` of `general_caps`.
pub const ODP_SUPPORT: u64 = 1;
/// `IBV_ODP_SUPPORT_{SEND,RECV,WRITE,READ}` of `rc_odp_caps`: required capabilities for on-demand paging.
pub const ODP_RC_ALL: u32 = 0xf;
/// Mark of a context inside a `verbs_context`.
pub const EXTENDED: usize = usize::MAX;

pub const EVENT_CQ_ERR: u32 = 0;
pub const EVENT_QP_FATAL: u32 = 1;
pub const EVENT_QP_REQ_ERR: u32 = 2;
pub const EVENT_QP_ACCESS_ERR: u32 = 3;
pub const EVENT_DEVICE_FATAL: u32 = 8;
pub const EVENT_PORT_ACTIVE: u32 = 9;
pub const EVENT_PORT_ERR: u32 = 10;
pub const EVENT_LID_CHANGE: u32 = 11;
pub const EVENT_PKEY_CHANGE: u32 = 12;
pub const EVENT_SM_CHANGE: u32 = 13;
pub const EVENT_SRQ_ERR: u32 = 14;
pub const EVENT_QP_LAST_WQE_REACHED: u32 = 16;
pub const EVENT_CLIENT_REREGISTER: u32 = 17;
pub const EVENT_GID_CHANGE: u32 = 18;

#[repr(C)]
pub struct ibv_device {
    pub ops: [UnusedEntry; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

pub type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub type PostSrqRecv = unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
pub type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

#[repr(C)]
pub struct ibv_context_ops {
    pub before_poll: [UnusedEntry; 11],
    pub poll_cq: PollCq,
    pub req_notify_cq: ReqNotifyCq,
    pub before_srq: [UnusedEntry; 7],
    pub post_srq_recv: PostSrqRecv,
    pub before_send: [UnusedEntry; 4],
    pub post_send: PostSend,
    pub post_recv: PostRecv,
    pub after_recv: [UnusedEntry; 5],
}

#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: pthread_mutex_t,
    pub abi_compat: usize,
}

pub type QueryPortSized = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;
pub type QueryDeviceEx = unsafe extern "C" fn(*mut ibv_context, *const c_void, *mut ibv_device_attr_ex, usize) -> c_int;

/// Struct around an extended context. It grows at its front; `size` states its actual size, so a field is located by
/// its distance from the end.
#[repr(C)]
pub struct verbs_context {
    pub query_port: Option<QueryPortSized>,
    pub before_query_device: [UnusedEntry; 26],
    pub query_device_ex: Option<QueryDeviceEx>,
    pub before_size: [UnusedEntry; 11],
    pub size: usize,
    pub context: ibv_context,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub unused: [c_int; 13],
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// Front of the extended attributes; the library fills at most the size that the caller passes.
#[repr(C)]
pub struct ibv_device_attr_ex {
    pub orig_attr: ibv_device_attr,
    pub comp_mask: u32,
    pub odp_general_caps: u64,
    pub odp_rc_caps: u32,
    pub odp_uc_caps: u32,
    pub odp_ud_caps: u32,
}

/// Includes the speed field that rdma-core added for XDR; older libraries, which get the whole size, leave it zero.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_port_attr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    pub active_speed_ex: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_gid_entry {
    /// A union that C aligns to 64-bit words.
    pub gid: [u64; 2],
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[repr(C)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

#[repr(C)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
pub struct ibv_srq {
    pub context: *mut ibv_context,
    pub srq_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub handle: u32,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// A send request. Of the three unions behind `imm_data` only the first's RDMA form is named.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: u32,
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub rest: [u64; 9],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

#[repr(C)]
pub struct ibv_srq_init_attr {
    pub srq_context: *mut c_void,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ibv_ah_attr {
    /// A union that C aligns to 64-bit words.
    pub dgid: [u64; 2],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    /// Padding: C rounds the route, a struct of its own, up to whole words.
    pub padding: u8,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ibv_qp_attr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_async_event {
    /// A union of pointers and a port number.
    pub element: *mut c_void,
    pub event_type: u32,
}
