//! Data path of the null device: signalled requests complete at once and one-sided ones move no bytes.
//!
//! Messages reach the peer's receives as on a `loopback` device, if both exist, so that drivers can exchange their
//! setup messages before they start.

use crate::objects::{SoftQueue, state};
use crate::queues;
use crate::work::Send;
use kvplane_sys::verbs::provider::*;
use libc::c_int;
use std::collections::VecDeque;
use std::sync::PoisonError;

/// Completions that wait to be polled: request id, opcode and queue pair.
pub(crate) struct Ring {
    entries: VecDeque<(u64, u32, u32)>,
    capacity: usize,
}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::with_capacity(capacity), capacity }
    }
}

/// # Safety
/// Contract of verbs: a queue pair of a null device, and a terminated chain of requests.
pub(crate) unsafe extern "C" fn post_send(
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
        if is_message(current.opcode) {
            // SAFETY: the caller's queue pair, and an element of its chain.
            unsafe { deliver(queue, current) };
        }
        if current.send_flags & SEND_SIGNALED != 0 {
            if ring.entries.len() >= ring.capacity {
                // SAFETY: writes to the caller's variable.
                unsafe { *bad = request };
                return libc::ENOMEM;
            }
            ring.entries.push_back((current.wr_id, current.opcode, number));
        }
        request = current.next;
    }
    0
}

const fn is_message(opcode: u32) -> bool {
    matches!(opcode, WR_SEND | WR_SEND_WITH_IMM)
}

/// Delivers a message to the peer, if there is one. The sender gets no error: for it every request succeeds.
///
/// # Safety
/// See `post_send`.
#[cold]
unsafe fn deliver(queue: *mut ibv_qp, request: &ibv_send_wr) {
    // SAFETY: by this function's contract.
    let (mut state, number, mut send) = unsafe { (state((*queue).context), (*queue).qp_num, Send::copy(request)) };
    send.flags &= !SEND_SIGNALED;
    if state.reachable_peer(number).is_some()
        && let Some(queue) = state.queue_pairs.get_mut(&number)
        && queue.sends.len() < queue.depth.0
    {
        queue.sends.push_back(send);
        state.run(number);
    }
}

/// # Safety
/// Contract of verbs: a completion queue of a null device, and space for `room` entries.
pub(crate) unsafe extern "C" fn poll(queue: *mut ibv_cq, room: c_int, entries: *mut ibv_wc) -> c_int {
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
        // SAFETY: inside the caller's array.
        unsafe { entries.add(index).write(ibv_wc { wr_id, opcode, qp_num, ..ibv_wc::default() }) };
    }
    drop(ring);
    let count = count as c_int;
    if count == room {
        return count;
    }
    // Appends the completions of received messages.
    // SAFETY: by this function's contract; within the rest of the caller's array.
    let received = unsafe { queues::poll(queue, room - count, entries.add(count as usize)) };
    if received < 0 { received } else { count + received }
}
