//! Verbs functions over a fabric, except those of queue pairs: translates C pointers to the fabric's object numbers.
//!
//! Callers satisfy the contracts of libibverbs: pointers refer to living objects of a software device, and lists are
//! terminated.

use crate::fabric::{self, Channel, Completions, ContextState, Memory, SoftDevice, State};
use crate::objects::{SoftChannel, SoftContext, SoftQueue, context, give, refuse, set_errno, state, take, zeroed};
use crate::{buffers, null, queues};
use kvplane_sys::verbs::provider::*;
use libc::{c_int, c_void};
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Mutex;

/// Depth limit of all queues but completion queues.
pub(crate) const MAX_DEPTH: c_int = 1 << 16;
/// Limit of the entries of one completion queue.
const MAX_COMPLETIONS: c_int = 1 << 22;
pub(crate) const MAX_PIECES: c_int = 30;
/// GIDs per device: one from its hardware address, one from its IPv4 address.
const GIDS: usize = 2;

pub(crate) static FUNCTIONS: Functions = Functions {
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid_table: Some(query_gid_table),
    alloc_pd,
    dealloc_pd,
    reg_mr,
    reg_mr_iova2: Some(reg_mr_iova2),
    reg_dmabuf_mr: Some(buffers::reg_dmabuf_mr),
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_srq: queues::create_srq,
    destroy_srq: queues::destroy_srq,
    create_qp: queues::create_qp,
    modify_qp: queues::modify_qp,
    destroy_qp: queues::destroy_qp,
    get_async_event,
    ack_async_event,
};

unsafe extern "C" fn open_device(raw: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: software devices begin with the C struct and live as long as their fabric.
    let device = unsafe { &*raw.cast::<SoftDevice>() };
    let Some(fabric) = device.fabric.upgrade() else { return refuse(libc::ENODEV) };
    let Ok(bell) = fabric::bell() else { return refuse(libc::EMFILE) };
    let fd = bell.as_raw_fd();
    let number = {
        let mut state = fabric.lock();
        if state.ports[device.index].removed {
            return refuse(libc::ENODEV);
        }
        let number = state.number();
        let new = ContextState { device: device.index, bell, events: VecDeque::new() };
        state.contexts.insert(number, new);
        number
    };
    Box::into_raw(SoftContext::new(raw, fabric, number, device.index, fd)).cast()
}

unsafe extern "C" fn close_device(raw: *mut ibv_context) -> c_int {
    // SAFETY: an open software device, not used again.
    unsafe {
        state(raw).contexts.remove(&context(raw).number);
        take::<SoftContext, _>(raw);
    }
    0
}

unsafe extern "C" fn query_device(_raw: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's struct, of plain numbers.
    unsafe {
        *attributes = ibv_device_attr {
            max_mr_size: u64::MAX,
            max_qp: 1 << 17,
            max_qp_wr: MAX_DEPTH,
            max_sge: MAX_PIECES,
            max_sge_rd: MAX_PIECES,
            max_cq: 1 << 16,
            max_cqe: MAX_COMPLETIONS,
            max_mr: c_int::MAX,
            max_pd: c_int::MAX,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 16,
            max_srq: 1 << 16,
            max_srq_wr: MAX_DEPTH,
            max_srq_sge: MAX_PIECES,
            phys_port_cnt: 1,
            ..zeroed()
        };
    }
    0
}

unsafe extern "C" fn query_port(raw: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: an open software device.
    let (state, device) = unsafe { (state(raw), context(raw).device) };
    let port = &state.ports[device];
    // Fastest existing speed that four lanes reach within the reported bandwidth.
    let codes = [(200, 256), (100, 128), (50, 64), (25, 32), (14, 16), (10, 4)];
    let fits = |(giga, _): &&(u64, u32)| giga * 4_000_000_000 <= port.claims.bits_per_second;
    let speed = codes.iter().find(fits).map_or(1, |(_, code)| *code);
    // SAFETY: the caller's struct, of plain numbers.
    unsafe {
        *attributes = ibv_port_attr {
            state: if port.up { 4 } else { 1 },
            max_mtu: port.claims.mtu.raw(),
            active_mtu: port.claims.mtu.raw(),
            gid_tbl_len: GIDS as c_int,
            max_msg_sz: 1 << 31,
            pkey_tbl_len: 1,
            active_width: 2,
            active_speed: speed.min(128) as u8,
            active_speed_ex: speed,
            link_layer: LINK_LAYER_ETHERNET,
            ..zeroed()
        };
    }
    0
}

/// Returns a device's addresses: link-local, and the IPv4 address 10.88.x.y that contains its number.
pub(crate) fn gids(device: usize) -> [[u8; 16]; GIDS] {
    let [.., high, low] = (device as u32 + 1).to_be_bytes();
    [
        [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, high, low],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 88, high, low],
    ]
}

pub(crate) fn words(gid: [u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = gid;
    [u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes([i, j, k, l, m, n, o, p])]
}

unsafe extern "C" fn query_gid_table(
    raw: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    room: usize,
    _flags: u32,
    _entry_bytes: usize,
) -> isize {
    // SAFETY: an open software device.
    let device = unsafe { context(raw) }.device;
    let count = GIDS.min(room);
    for (index, gid) in gids(device).into_iter().enumerate().take(count) {
        let entry =
            ibv_gid_entry { gid: words(gid), gid_index: index as u32, port_num: 1, gid_type: 2, ndev_ifindex: 0 };
        // SAFETY: inside the caller's array.
        unsafe { entries.add(index).write(entry) };
    }
    count as isize
}

unsafe extern "C" fn alloc_pd(raw: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: an open software device.
    let (mut state, device) = unsafe { (state(raw), context(raw).device) };
    let handle = state.number();
    state.domains.insert(handle, device);
    give(ibv_pd { context: raw, handle })
}

unsafe extern "C" fn dealloc_pd(raw: *mut ibv_pd) -> c_int {
    // SAFETY: a domain of a software device.
    let (mut state, domain) = unsafe { (state((*raw).context), (*raw).handle) };
    let used = state.memories.values().any(|memory| memory.domain == domain)
        || state.queue_pairs.values().any(|queue| queue.domain == domain);
    if used {
        return libc::EBUSY;
    }
    state.domains.remove(&domain);
    // SAFETY: created by `alloc_pd`, not used again.
    unsafe { take::<ibv_pd, _>(raw) };
    0
}

unsafe extern "C" fn reg_mr(raw: *mut ibv_pd, address: *mut c_void, bytes: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: the caller's contract.
    unsafe { reg_mr_iova2(raw, address, bytes, address.addr() as u64, access as u32) }
}

unsafe extern "C" fn reg_mr_iova2(
    raw: *mut ibv_pd,
    address: *mut c_void,
    bytes: usize,
    start: u64,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: a domain of a software device.
    let (device, domain) = unsafe { ((*raw).context, (*raw).handle) };
    let peers_write = access & ACCESS_REMOTE_WRITE != 0 && access & ACCESS_LOCAL_WRITE == 0;
    if bytes == 0 || start != address.expose_provenance() as u64 || peers_write || access & ACCESS_ON_DEMAND != 0 {
        return refuse(libc::EINVAL);
    }
    // SAFETY: a domain of an open software device.
    if let Some(registered) = unsafe { buffers::reg_peer_memory(raw, bytes, start, access) } {
        return registered;
    }
    // SAFETY: an open software device.
    let mut state = unsafe { state(device) };
    let key = state.number();
    state.memories.insert(key, Memory { domain, address: start, bytes: bytes as u64, access, buffer: None });
    give(ibv_mr { context: device, pd: raw, addr: address, length: bytes, handle: key, lkey: key, rkey: key })
}

unsafe extern "C" fn dereg_mr(raw: *mut ibv_mr) -> c_int {
    // SAFETY: a registration of a software device.
    let (mut state, key) = unsafe { (state((*raw).context), (*raw).handle) };
    if state.is_posted(key) {
        state.violations += 1;
    }
    state.memories.remove(&key);
    // SAFETY: created by `reg_mr_iova2`, not used again.
    unsafe { take::<ibv_mr, _>(raw) };
    0
}

unsafe extern "C" fn create_comp_channel(raw: *mut ibv_context) -> *mut ibv_comp_channel {
    let Ok(bell) = fabric::bell() else { return refuse(libc::EMFILE) };
    // SAFETY: an open software device.
    let mut state = unsafe { state(raw) };
    let (number, fd) = (state.number(), bell.as_raw_fd());
    state.channels.insert(number, Channel { bell, events: VecDeque::new() });
    give(SoftChannel { raw: ibv_comp_channel { context: raw, fd, refcnt: 0 }, number })
}

unsafe extern "C" fn destroy_comp_channel(raw: *mut ibv_comp_channel) -> c_int {
    // SAFETY: a channel of a software device.
    let (mut state, number) = unsafe { (state((*raw).context), (*raw.cast::<SoftChannel>()).number) };
    if state.completions.values().any(|queue| queue.channel == Some(number)) {
        return libc::EBUSY;
    }
    state.channels.remove(&number);
    // SAFETY: created by `create_comp_channel`, not used again.
    unsafe { take::<SoftChannel, _>(raw) };
    0
}

unsafe extern "C" fn create_cq(
    raw: *mut ibv_context,
    entries: c_int,
    token: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    let Ok(capacity) = usize::try_from(entries) else { return refuse(libc::EINVAL) };
    // SAFETY: an open software device, and a channel of it or none.
    let (context, channel_number, mut cq) = unsafe {
        let number = (!channel.is_null()).then(|| (*channel.cast::<SoftChannel>()).number);
        (context(raw), number, zeroed::<ibv_cq>())
    };
    let mut state = context.fabric.lock();
    let number = state.number();
    (cq.context, cq.channel, cq.cq_context, cq.handle, cq.cqe) = (raw, channel, token, number, entries);
    let ring = Mutex::new(null::Ring::new(if context.fabric.is_null() { capacity } else { 0 }));
    let place: *mut ibv_cq = give(SoftQueue { raw: cq, ring });
    let new = Completions {
        context: context.number,
        capacity,
        ready: VecDeque::new(),
        overflowed: false,
        armed: None,
        channel: channel_number,
        place: place.expose_provenance(),
    };
    state.completions.insert(number, new);
    place
}

unsafe extern "C" fn destroy_cq(raw: *mut ibv_cq) -> c_int {
    // SAFETY: a queue of a software device.
    let (mut state, number) = unsafe { (state((*raw).context), (*raw).handle) };
    if state.queue_pairs.values().any(|queue| queue.completions == number) {
        return libc::EBUSY;
    }
    if let Some(queue) = state.completions.remove(&number) {
        forget_events(&mut state, &queue);
    }
    // SAFETY: created by `create_cq`, not used again.
    unsafe { take::<SoftQueue, _>(raw) };
    0
}

/// Removes the events of a destroyed queue.
fn forget_events(state: &mut State, queue: &Completions) {
    if let Some(channel) = queue.channel.and_then(|channel| state.channels.get_mut(&channel)) {
        channel.events.retain(|place| *place != queue.place);
        if channel.events.is_empty() {
            fabric::hush(&channel.bell);
        }
    }
    if let Some(context) = state.contexts.get_mut(&queue.context) {
        context.events.retain(|(kind, element)| *kind != EVENT_CQ_ERR || *element != queue.place);
    }
}

unsafe extern "C" fn get_cq_event(
    raw: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    token: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel of a software device.
    let (mut state, number) = unsafe { (state((*raw).context), (*raw.cast::<SoftChannel>()).number) };
    let event = state.channels.get_mut(&number).and_then(|channel| {
        let event = channel.events.pop_front();
        if channel.events.is_empty() {
            fabric::hush(&channel.bell);
        }
        event
    });
    let Some(place) = event else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    let place = ptr::with_exposed_provenance_mut::<ibv_cq>(place);
    // SAFETY: writes to the caller's variables; a queue is alive as long as it has events, and the state is locked.
    unsafe { (*queue, *token) = (place, (*place).cq_context) };
    0
}

unsafe extern "C" fn ack_cq_events(_queue: *mut ibv_cq, _count: u32) {}

unsafe extern "C" fn get_async_event(raw: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    // SAFETY: an open software device.
    let (mut state, number) = unsafe { (state(raw), context(raw).number) };
    let found = state.contexts.get_mut(&number).and_then(|context| {
        let event = context.events.pop_front();
        if context.events.is_empty() {
            fabric::hush(&context.bell);
        }
        event
    });
    let Some((event_type, element)) = found else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    // SAFETY: the caller's struct.
    unsafe { *event = ibv_async_event { element: ptr::with_exposed_provenance_mut(element), event_type } };
    0
}

unsafe extern "C" fn ack_async_event(_event: *mut ibv_async_event) {}
