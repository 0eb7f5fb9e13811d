//! The null device's data path: signalled requests complete at once, nothing moves, receives never complete.

use super::super::ffi::*;
use super::objects::SoftQueue;
use libc::c_int;
use std::collections::VecDeque;
use std::sync::PoisonError;

/// Completions that wait to be polled: request, opcode and queue pair.
pub(super) struct Ring {
    entries: VecDeque<(u64, u32, u32)>,
    capacity: usize,
}

impl Ring {
    pub(super) fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::with_capacity(capacity), capacity }
    }
}

/// # Safety
/// As verbs ask: a queue pair of a null device, and a chain of requests that ends.
pub(super) unsafe extern "C" fn post_send(
    queue: *mut ibv_qp,
    mut request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: by this function's contract; completion queues of software devices are `SoftQueue`s.
    let (completions, number) = unsafe { (&*(*queue).send_cq.cast::<SoftQueue>(), (*queue).qp_num) };
    let mut ring = completions.ring.lock().unwrap_or_else(PoisonError::into_inner);
    while !request.is_null() {
        // SAFETY: an element of the chain.
        let current = unsafe { &*request };
        if current.send_flags & SEND_SIGNALED != 0 {
            if ring.entries.len() >= ring.capacity {
                // SAFETY: the caller's place for it.
                unsafe { *bad = request };
                return libc::ENOMEM;
            }
            ring.entries.push_back((current.wr_id, current.opcode, number));
        }
        request = current.next;
    }
    0
}

/// # Safety
/// As verbs ask.
pub(super) unsafe extern "C" fn post_receive(
    _queue: *mut ibv_qp,
    _receive: *mut ibv_recv_wr,
    _bad: *mut *mut ibv_recv_wr,
) -> c_int {
    0
}

/// # Safety
/// As verbs ask: a completion queue of a null device, and room for `room` entries.
pub(super) unsafe extern "C" fn poll(queue: *mut ibv_cq, room: c_int, entries: *mut ibv_wc) -> c_int {
    // SAFETY: by this function's contract.
    let completions = unsafe { &*queue.cast::<SoftQueue>() };
    let mut ring = completions.ring.lock().unwrap_or_else(PoisonError::into_inner);
    let count = ring.entries.len().min(usize::try_from(room).unwrap_or(0));
    for (index, (wr_id, opcode, qp_num)) in ring.entries.drain(..count).enumerate() {
        let opcode = match opcode {
            WR_RDMA_READ => WC_RDMA_READ,
            WR_SEND | WR_SEND_WITH_IMM => WC_SEND,
            _ => WC_RDMA_WRITE,
        };
        // SAFETY: inside the caller's room.
        unsafe { entries.add(index).write(ibv_wc { wr_id, opcode, qp_num, ..ibv_wc::default() }) };
    }
    count as c_int
}
