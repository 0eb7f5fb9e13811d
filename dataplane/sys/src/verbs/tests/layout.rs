//! Our structs compared with those of the installed headers, as a C compiler lays them out.

use super::super::ffi::*;
use std::fmt::Write;
use std::mem::{align_of, offset_of, size_of};
use std::process::Command;

/// Name in C, our value, and C's value.
struct Fact {
    c: String,
    ours: usize,
}

macro_rules! sizes {
    ($($name:ident)*) => {
        vec![$(
            Fact { c: format!("sizeof(struct {})", stringify!($name)), ours: size_of::<$name>() },
            Fact { c: format!("_Alignof(struct {})", stringify!($name)), ours: align_of::<$name>() },
        )*]
    };
}

macro_rules! offsets {
    ($($name:ident { $($field:tt $(= $c:literal)?),* })*) => {
        vec![$($(offset(
            stringify!($name),
            [$($c,)? stringify!($field)][0],
            offset_of!($name, $field),
        )),*),*]
    };
}

fn offset(name: &str, field: &str, ours: usize) -> Fact {
    Fact { c: format!("offsetof(struct {name}, {field})"), ours }
}

fn facts() -> Vec<Fact> {
    let mut facts = sizes!(
        ibv_device ibv_context_ops ibv_context verbs_context ibv_device_attr ibv_gid_entry ibv_pd ibv_mr
        ibv_comp_channel ibv_cq ibv_srq ibv_qp ibv_wc ibv_sge ibv_send_wr ibv_recv_wr ibv_qp_cap ibv_qp_init_attr
        ibv_srq_init_attr ibv_ah_attr ibv_qp_attr ibv_async_event
    );
    facts.extend(offsets! {
        ibv_device { name, dev_name, dev_path, ibdev_path, node_type }
        ibv_context_ops { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        verbs_context { query_port, query_device_ex, size = "sz", context }
        ibv_device_attr {
            max_mr_size, vendor_id, max_qp, max_qp_wr, max_sge, max_cqe, max_qp_rd_atom, max_qp_init_rd_atom, max_srq,
            max_srq_wr, max_srq_sge, phys_port_cnt
        }
        ibv_device_attr_ex {
            comp_mask, odp_general_caps = "odp_caps.general_caps",
            odp_rc_caps = "odp_caps.per_transport_caps.rc_odp_caps"
        }
        ibv_port_attr {
            state, active_mtu, gid_tbl_len, max_msg_sz, lid, active_width, active_speed, link_layer, port_cap_flags2
        }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_comp_channel { context, fd }
        ibv_cq { context, channel, cq_context, handle, cqe }
        ibv_srq { context, pd, handle }
        ibv_qp { context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, events_completed }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, slid, dlid_path_bits }
        ibv_sge { addr, length, lkey }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data,
            remote_addr = "wr.rdma.remote_addr", rkey = "wr.rdma.rkey"
        }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_srq_init_attr {
            srq_context, max_wr = "attr.max_wr", max_sge = "attr.max_sge", srq_limit = "attr.srq_limit"
        }
        ibv_ah_attr {
            dgid = "grh.dgid", sgid_index = "grh.sgid_index", hop_limit = "grh.hop_limit",
            traffic_class = "grh.traffic_class", dlid, sl, is_global, port_num
        }
        ibv_qp_attr {
            qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index,
            max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, rate_limit
        }
        ibv_async_event { element, event_type }
    });
    facts.extend(constants());
    facts
}

fn constants() -> Vec<Fact> {
    [
        ("IBV_SEND_FENCE", SEND_FENCE),
        ("IBV_SEND_SIGNALED", SEND_SIGNALED),
        ("IBV_SEND_SOLICITED", SEND_SOLICITED),
        ("IBV_SEND_INLINE", SEND_INLINE),
        ("IBV_WR_RDMA_WRITE", WR_RDMA_WRITE),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", WR_RDMA_WRITE_WITH_IMM),
        ("IBV_WR_SEND", WR_SEND),
        ("IBV_WR_SEND_WITH_IMM", WR_SEND_WITH_IMM),
        ("IBV_WR_RDMA_READ", WR_RDMA_READ),
        ("IBV_WC_RECV", WC_RECV),
        ("IBV_WC_RECV_RDMA_WITH_IMM", WC_RECV_RDMA_WITH_IMM),
        ("IBV_WC_WITH_IMM", WC_WITH_IMM),
        ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE),
        ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE),
        ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ),
        ("IBV_ACCESS_ON_DEMAND", ACCESS_ON_DEMAND),
        ("IBV_ACCESS_RELAXED_ORDERING", ACCESS_RELAXED_ORDERING),
        ("IBV_QP_STATE", QP_STATE),
        ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS),
        ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX),
        ("IBV_QP_PORT", QP_PORT),
        ("IBV_QP_AV", QP_AV),
        ("IBV_QP_PATH_MTU", QP_PATH_MTU),
        ("IBV_QP_TIMEOUT", QP_TIMEOUT),
        ("IBV_QP_RETRY_CNT", QP_RETRY_CNT),
        ("IBV_QP_RNR_RETRY", QP_RNR_RETRY),
        ("IBV_QP_RQ_PSN", QP_RQ_PSN),
        ("IBV_QP_MAX_QP_RD_ATOMIC", QP_MAX_QP_RD_ATOMIC),
        ("IBV_QP_MIN_RNR_TIMER", QP_MIN_RNR_TIMER),
        ("IBV_QP_SQ_PSN", QP_SQ_PSN),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", QP_MAX_DEST_RD_ATOMIC),
        ("IBV_QP_DEST_QPN", QP_DEST_QPN),
        ("IBV_QPS_ERR", QPS_ERR),
        ("IBV_QPS_RTS", QPS_RTS),
        ("IBV_QPT_RC", QPT_RC),
        ("IBV_EVENT_PORT_ERR", EVENT_PORT_ERR),
        ("IBV_EVENT_GID_CHANGE", EVENT_GID_CHANGE),
        ("IBV_EVENT_QP_LAST_WQE_REACHED", EVENT_QP_LAST_WQE_REACHED),
        ("IBV_EVENT_CLIENT_REREGISTER", EVENT_CLIENT_REREGISTER),
        ("IBV_LINK_LAYER_ETHERNET", u32::from(LINK_LAYER_ETHERNET)),
        ("IBV_GID_TYPE_ROCE_V2", 2),
        ("IBV_WC_RNR_RETRY_EXC_ERR", 13),
        ("IBV_WC_FATAL_ERR", 19),
    ]
    .into_iter()
    .map(|(c, ours)| Fact { c: c.to_owned(), ours: ours as usize })
    .collect()
}

#[test]
fn structs_have_the_layout_of_the_headers() {
    let facts = facts();
    let mut source =
        String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void){\n");
    for fact in &facts {
        writeln!(source, "printf(\"%zu\\n\", (size_t)({}));", fact.c).expect("text");
    }
    source.push_str("return 0;}\n");
    let directory = std::env::temp_dir().join(format!("kvplane-layout-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("directory");
    let (file, program) = (directory.join("layout.c"), directory.join("layout"));
    std::fs::write(&file, source).expect("written");
    let compiled = Command::new("cc").arg("-w").arg("-o").arg(&program).arg(&file).output();
    let said = match compiled {
        Ok(output) if output.status.success() => Command::new(&program).output().expect("run").stdout,
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            std::fs::remove_dir_all(directory).expect("removed");
            assert!(text.contains("infiniband/verbs.h: No such file"), "{text}");
            return eprintln!("skipped: no infiniband/verbs.h (libibverbs-dev)");
        }
        Err(error) => return eprintln!("skipped: no C compiler: {error}"),
    };
    std::fs::remove_dir_all(directory).expect("removed");
    let theirs: Vec<usize> =
        String::from_utf8(said).expect("numbers").lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(theirs.len(), facts.len());
    for (fact, theirs) in facts.iter().zip(theirs) {
        assert_eq!(fact.ours, theirs, "{}", fact.c);
    }
    // Newer headers may have grown the struct by a field that is known here already.
    assert_eq!(size_of::<ibv_port_attr>(), 56);
}
