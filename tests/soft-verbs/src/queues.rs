//! Verbs functions for queue pairs and shared receive queues, and the data path of `loopback` devices.
//!
//! Callers satisfy the contracts of libibverbs: pointers refer to living objects of a software device, and lists are
//! terminated.

use crate::fabric::{FabricState, NotReadyRetries, QueuePair};
use crate::objects::{context, give, refuse, state, take, zeroed};
use crate::rim::{MAX_DEPTH, MAX_PIECES, gids, words};
use crate::work::{Receive, Send};
use kvplane_sys::verbs::QueueState;
use kvplane_sys::verbs::provider::*;
use libc::c_int;
use std::collections::VecDeque;

/// Limit of inline bytes.
const MAX_INLINE: u32 = 1024;

pub(crate) unsafe extern "C" fn create_srq(raw: *mut ibv_pd, options: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: a domain of a software device, the caller's options.
    let (device, depth, mut srq) = unsafe { ((*raw).context, (*options).max_wr as usize, zeroed::<ibv_srq>()) };
    // SAFETY: an open software device.
    let mut state = unsafe { state(device) };
    let number = state.number();
    state.shared.insert(number, FabricState { depth, receives: VecDeque::new() });
    (srq.context, srq.pd, srq.handle) = (device, raw, number);
    give(srq)
}

pub(crate) unsafe extern "C" fn destroy_srq(raw: *mut ibv_srq) -> c_int {
    // SAFETY: a shared queue of a software device.
    let (mut state, number) = unsafe { (state((*raw).context), (*raw).handle) };
    if state.queue_pairs.values().any(|queue| queue.shared == Some(number)) {
        return libc::EBUSY;
    }
    state.shared.remove(&number);
    // SAFETY: created by `create_srq`, not used again.
    unsafe { take::<ibv_srq, _>(raw) };
    0
}

pub(crate) unsafe extern "C" fn create_qp(raw: *mut ibv_pd, options: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: a domain of a software device, the caller's options with its queues.
    let (domain, options, mut qp) = unsafe { (&*raw, &*options, zeroed::<ibv_qp>()) };
    let cap = options.cap;
    let too_much = [cap.max_send_wr, cap.max_recv_wr].iter().any(|depth| *depth > MAX_DEPTH as u32)
        || [cap.max_send_sge, cap.max_recv_sge].iter().any(|pieces| *pieces > MAX_PIECES as u32)
        || cap.max_inline_data > MAX_INLINE;
    if too_much || options.qp_type != QPT_RC {
        return refuse(libc::EINVAL);
    }
    // SAFETY: as above.
    let (context, completions, shared) = unsafe {
        let shared = (!options.srq.is_null()).then(|| (*options.srq).handle);
        (context(domain.context), (*options.send_cq).handle, shared)
    };
    let mut state = context.fabric.lock();
    let number = state.number();
    (qp.context, qp.pd, qp.handle, qp.qp_num) = (domain.context, raw, number, number);
    (qp.send_cq, qp.recv_cq, qp.srq, qp.qp_type) = (options.send_cq, options.recv_cq, options.srq, QPT_RC);
    let place: *mut ibv_qp = give(qp);
    let new = QueuePair {
        device: context.device,
        context: context.number,
        domain: domain.handle,
        completions,
        shared,
        depth: (cap.max_send_wr as usize, cap.max_recv_wr as usize),
        state: QueueState::Reset,
        access: 0,
        peer: 0,
        peer_device: None,
        path_mtu: 0,
        retries: NotReadyRetries::default(),
        sends: VecDeque::new(),
        receives: VecDeque::new(),
        place: place.expose_provenance(),
    };
    state.queue_pairs.insert(number, new);
    place
}

pub(crate) unsafe extern "C" fn modify_qp(raw: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a queue pair of a software device, the caller's attributes.
    let (mut state, number, attributes) = unsafe { (state((*raw).context), (*raw).qp_num, &*attributes) };
    let devices = state.ports.len();
    let device = state.queue_pairs.get(&number).map(|queue| queue.device);
    let own_mtu = device.map_or(0, |device| state.ports[device].claims.mtu.raw());
    let Some(queue) = state.queue_pairs.get_mut(&number) else { return libc::EINVAL };
    let Some(to) = QueueState::from_raw(attributes.qp_state) else { return libc::EINVAL };
    if queue.state.required_attributes(to) != Some(mask as u32) {
        return libc::EINVAL;
    }
    match to {
        QueueState::Initialized if attributes.port_num != 1 => return libc::EINVAL,
        QueueState::Initialized => queue.access = attributes.qp_access_flags,
        QueueState::ReadyToReceive if attributes.path_mtu > own_mtu => return libc::EINVAL,
        QueueState::ReadyToReceive => {
            queue.path_mtu = attributes.path_mtu;
            let gid = attributes.ah_attr.dgid;
            queue.peer_device = (0..devices).find(|device| gids(*device).map(words).contains(&gid));
            queue.peer = attributes.dest_qp_num;
        }
        QueueState::ReadyToSend => {
            queue.retries = NotReadyRetries { limit: attributes.rnr_retry, left: attributes.rnr_retry };
        }
        QueueState::Reset => {
            queue.sends.clear();
            queue.receives.clear();
            state.waiting.remove(&number);
        }
        QueueState::Error => {
            state.fail(number);
            return 0;
        }
    }
    if let Some(queue) = state.queue_pairs.get_mut(&number) {
        queue.state = to;
    }
    0
}

pub(crate) unsafe extern "C" fn destroy_qp(raw: *mut ibv_qp) -> c_int {
    // SAFETY: a queue pair of a software device.
    let (mut state, number) = unsafe { (state((*raw).context), (*raw).qp_num) };
    state.waiting.remove(&number);
    if let Some(queue) = state.queue_pairs.remove(&number) {
        if let Some(context) = state.contexts.get_mut(&queue.context) {
            context.events.retain(|(_, element)| *element != queue.place);
        }
        if let Some(completions) = state.completions.get_mut(&queue.completions) {
            completions.ready.retain(|entry| entry.qp_num != number);
        }
    }
    // SAFETY: created by `create_qp`, not used again.
    unsafe { take::<ibv_qp, _>(raw) };
    0
}

pub(crate) unsafe extern "C" fn post_send(
    queue: *mut ibv_qp,
    mut request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of a software device.
    let (mut state, number) = unsafe { (state((*queue).context), (*queue).qp_num) };
    let mut result = 0;
    while !request.is_null() {
        let Some(queue) = state.queue_pairs.get_mut(&number) else { return libc::EINVAL };
        result = match queue.state {
            QueueState::ReadyToSend | QueueState::Error if queue.sends.len() < queue.depth.0 => 0,
            QueueState::ReadyToSend | QueueState::Error => libc::ENOMEM,
            _ => libc::EINVAL,
        };
        if result != 0 {
            // SAFETY: writes to the caller's variable.
            unsafe { *bad = request };
            break;
        }
        // SAFETY: an element of the caller's chain, with what it points to.
        let (send, next) = unsafe { (Send::copy(&*request), (*request).next) };
        queue.sends.push_back(send);
        request = next;
    }
    state.run(number);
    result
}

pub(crate) unsafe extern "C" fn post_receive(
    queue: *mut ibv_qp,
    mut receive: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair of a software device.
    let (mut state, number) = unsafe { (state((*queue).context), (*queue).qp_num) };
    while !receive.is_null() {
        let Some(queue) = state.queue_pairs.get_mut(&number) else { return libc::EINVAL };
        let fits = queue.receives.len() < queue.depth.1;
        if !fits || queue.state == QueueState::Reset {
            // SAFETY: writes to the caller's variable.
            unsafe { *bad = receive };
            return if fits { libc::EINVAL } else { libc::ENOMEM };
        }
        // SAFETY: an element of the caller's chain, with what it points to.
        let (copy, next) = unsafe { (Receive::copy(&*receive), (*receive).next) };
        queue.receives.push_back(copy);
        receive = next;
    }
    if state.queue_pairs.get(&number).is_some_and(|queue| queue.state == QueueState::Error) {
        state.fail(number);
    }
    state.progress();
    0
}

pub(crate) unsafe extern "C" fn post_shared(
    queue: *mut ibv_srq,
    mut receive: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a shared queue of a software device.
    let (mut state, number) = unsafe { (state((*queue).context), (*queue).handle) };
    while !receive.is_null() {
        let Some(queue) = state.shared.get_mut(&number) else { return libc::EINVAL };
        if queue.receives.len() >= queue.depth {
            // SAFETY: writes to the caller's variable.
            unsafe { *bad = receive };
            return libc::ENOMEM;
        }
        // SAFETY: an element of the caller's chain, with what it points to.
        let (copy, next) = unsafe { (Receive::copy(&*receive), (*receive).next) };
        queue.receives.push_back(copy);
        receive = next;
    }
    state.progress();
    0
}

pub(crate) unsafe extern "C" fn poll(queue: *mut ibv_cq, room: c_int, entries: *mut ibv_wc) -> c_int {
    // SAFETY: a completion queue of a software device.
    let (mut state, number) = unsafe { (state((*queue).context), (*queue).handle) };
    state.progress();
    let Some(completions) = state.completions.get_mut(&number) else { return -libc::EINVAL };
    if completions.overflowed {
        return -libc::EIO;
    }
    let count = completions.ready.len().min(usize::try_from(room).unwrap_or(0));
    for (index, entry) in completions.ready.drain(..count).enumerate() {
        // SAFETY: inside the caller's array.
        unsafe { entries.add(index).write(entry) };
    }
    count as c_int
}

pub(crate) unsafe extern "C" fn arm(queue: *mut ibv_cq, only_solicited: c_int) -> c_int {
    // SAFETY: a completion queue of a software device.
    let (mut state, number) = unsafe { (state((*queue).context), (*queue).handle) };
    match state.completions.get_mut(&number) {
        Some(completions) => {
            completions.armed = Some(only_solicited != 0);
            0
        }
        None => libc::EINVAL,
    }
}
