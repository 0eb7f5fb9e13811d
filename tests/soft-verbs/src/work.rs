//! Requests in the software device's form: copied out of the caller's lists.

use kvplane_sys::verbs::provider::*;

/// A request of a send queue.
pub(crate) struct Send {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) immediate: u32,
    pub(crate) remote_address: u64,
    pub(crate) remote_key: u32,
    pub(crate) pieces: Vec<ibv_sge>,
    /// Contents of an inline request.
    pub(crate) inline: Option<Vec<u8>>,
}

/// A receive.
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) pieces: Vec<ibv_sge>,
}

/// Copies the pieces of a request.
///
/// # Safety
/// `list` points to `count` pieces.
unsafe fn pieces(list: *const ibv_sge, count: i32) -> Vec<ibv_sge> {
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 || list.is_null() {
        return Vec::new();
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(list, count) }.to_vec()
}

impl Send {
    /// # Safety
    /// A request as verbs describe it: existing pieces, and readable bytes behind them if it is inline.
    pub(crate) unsafe fn copy(raw: &ibv_send_wr) -> Self {
        // SAFETY: by this function's contract.
        let pieces = unsafe { pieces(raw.sg_list, raw.num_sge) };
        let inline = (raw.send_flags & SEND_INLINE != 0).then(|| {
            let mut bytes = Vec::new();
            for piece in &pieces {
                let place = std::ptr::with_exposed_provenance::<u8>(piece.addr as usize);
                // SAFETY: inline pieces are readable memory of the caller, by this function's contract.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(place, piece.length as usize) });
            }
            bytes
        });
        Self {
            wr_id: raw.wr_id,
            opcode: raw.opcode,
            flags: raw.send_flags,
            immediate: raw.imm_data,
            remote_address: raw.remote_addr,
            remote_key: raw.rkey,
            pieces,
            inline,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.length)).sum()
    }

    pub(crate) fn signalled(&self) -> bool {
        self.flags & SEND_SIGNALED != 0
    }

    pub(crate) fn completion_opcode(&self) -> u32 {
        match self.opcode {
            WR_SEND | WR_SEND_WITH_IMM => WC_SEND,
            WR_RDMA_READ => WC_RDMA_READ,
            _ => WC_RDMA_WRITE,
        }
    }

    pub(crate) fn takes_receive(&self) -> bool {
        matches!(self.opcode, WR_SEND | WR_SEND_WITH_IMM | WR_RDMA_WRITE_WITH_IMM)
    }

    pub(crate) fn has_immediate(&self) -> bool {
        matches!(self.opcode, WR_SEND_WITH_IMM | WR_RDMA_WRITE_WITH_IMM)
    }
}

impl Receive {
    /// # Safety
    /// A receive as verbs describe it.
    pub(crate) unsafe fn copy(raw: &ibv_recv_wr) -> Self {
        // SAFETY: by this function's contract.
        Self { wr_id: raw.wr_id, pieces: unsafe { pieces(raw.sg_list, raw.num_sge) } }
    }
}
