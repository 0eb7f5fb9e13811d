//! Collectives and messages on the memory of the host.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use kvplane::group::{Collective, GroupRank, Operation, Work};
use kvplane::{IoBuf, Region, RegionOptions};

use super::completion::{Completion, FailedRanksHint};
use super::elements::ElementType;
use super::membership::Membership;
use super::outcome::{CallFailure, ResultCode, call, put};

/// Memory and hint of a call.
#[derive(Clone, Copy)]
struct Arguments {
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    hint: *mut i32,
    hint_entries: usize,
}

/// A range of the program's memory, as the call has it.
#[derive(Clone, Copy)]
struct CallerMemory {
    address: *mut u8,
    bytes: usize,
}

impl CallerMemory {
    fn new(address: *const c_void, bytes: u64, what: &str) -> Result<Self, CallFailure> {
        let address = address.cast::<u8>().cast_mut();
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|&bytes| bytes <= isize::MAX as usize && address.addr().checked_add(bytes).is_some());
        match bytes {
            Some(bytes) if bytes == 0 || !address.is_null() => Ok(Self { address, bytes }),
            Some(bytes) => Err(CallFailure::argument(format_args!("the {what} is null, and has {bytes} bytes"))),
            None => Err(CallFailure::argument(format_args!("the {what} at {address:?} exceeds the memory"))),
        }
    }

    fn overlaps(self, other: Self) -> bool {
        let (ours, theirs) = (self.address.addr(), other.address.addr());
        self.bytes > 0 && other.bytes > 0 && ours < theirs + other.bytes && theirs < ours + self.bytes
    }

    /// # Safety
    /// The range is valid and unchanged until the work has ended.
    unsafe fn buffer(self) -> Option<IoBuf> {
        // SAFETY: by the caller's promise; membership of a group keeps the buffer no longer than the work.
        (self.bytes > 0).then(|| IoBuf::whole(unsafe { Region::adopt(self.address, self.bytes) }))
    }

    /// Returns memory of our own with the same bytes.
    ///
    /// # Safety
    /// The range is valid.
    unsafe fn copy(self) -> Result<Option<IoBuf>, CallFailure> {
        if self.bytes == 0 {
            return Ok(None);
        }
        let region = Region::allocate(&RegionOptions::new("kvplane-collective", self.bytes));
        let region = region.map_err(|error| CallFailure::new(ResultCode::System, error))?;
        // SAFETY: by the caller's promise; nothing writes to it during the call.
        region.copy_in(0, unsafe { std::slice::from_raw_parts(self.address, self.bytes) });
        Ok(Some(IoBuf::whole(region)))
    }
}

/// Returns the buffers of an operation. One in place has its source's bytes in its only buffer.
///
/// # Safety
/// Buffers of the sizes that the operation needs, valid and unchanged until it has ended.
unsafe fn buffers(
    operation: &Operation,
    rank: GroupRank,
    arguments: &Arguments,
) -> Result<(Option<IoBuf>, Option<IoBuf>), CallFailure> {
    operation.check()?;
    let (source_bytes, target_bytes) = operation.buffer_bytes(rank);
    let is_root = operation.root().is_none_or(|root| root == rank);
    let source = || CallerMemory::new(arguments.send, source_bytes, "send buffer");
    let target = || CallerMemory::new(arguments.receive, target_bytes, "receive buffer");
    if !operation.is_in_place() {
        let (source, target) = (source()?, target()?);
        // SAFETY: by the caller's promise.
        let from = unsafe { if source.overlaps(target) { source.copy()? } else { source.buffer() } };
        // SAFETY: as above.
        return Ok((from, unsafe { target.buffer() }));
    }
    let only = match operation.collective {
        // Where there is no result, the buffer is only read.
        Collective::Reduce { .. } if !is_root => source()?,
        Collective::Broadcast { .. } if !is_root => target()?,
        _ => {
            let (source, target) = (source()?, target()?);
            if source.address != target.address && source.bytes > 0 {
                // SAFETY: both have as many bytes; they may overlap.
                unsafe { ptr::copy(source.address, target.address, source.bytes) };
            }
            target
        }
    };
    // SAFETY: by the caller's promise.
    let only = unsafe { only.buffer() };
    Ok((only.clone(), only))
}

/// Begins a work, and writes its completion.
///
/// # Safety
/// A hint as [`FailedRanksHint::new`] has it; a place for the completion, or null.
unsafe fn begin(
    comm: *mut c_void,
    arguments: &Arguments,
    completion: *mut *mut c_void,
    peer: Option<c_int>,
    submit: impl FnOnce(&Membership, Option<GroupRank>) -> Result<Work, CallFailure>,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        unsafe { put(completion, ptr::null_mut(), "the completion") }?;
        let membership = Membership::of(comm)?;
        let peer = peer.map(|peer| membership.peer(peer)).transpose()?;
        let max_size = usize::from(membership.group.spec().max_size);
        // SAFETY: as above.
        let hint = unsafe { FailedRanksHint::new(arguments.hint, arguments.hint_entries, max_size) }?;
        let work = submit(&membership, peer)?;
        membership.keep(&work);
        let handle = Completion::publish(work, peer, Arc::clone(&membership), hint);
        // SAFETY: as above.
        unsafe { put(completion, handle, "the completion") }
    })
}

/// Begins a collective.
///
/// # Safety
/// Conditions of [`begin`]; buffers of the sizes that the operation needs, valid and unchanged until it has ended.
unsafe fn begin_collective(
    comm: *mut c_void,
    arguments: &Arguments,
    completion: *mut *mut c_void,
    data_type: c_int,
    collective: impl FnOnce(ElementType, u8) -> Result<Collective, CallFailure>,
) -> c_int {
    let submit = |membership: &Membership, _| {
        let element = ElementType::of(data_type)?;
        let places = membership.group.size() as u8;
        let collective = collective(element, places)?;
        let count = match collective {
            Collective::AllToAll { .. } | Collective::Barrier => 0,
            _ => arguments.count as u64,
        };
        let operation = Operation { collective, data_type: element.data_type, count, places };
        // SAFETY: by the caller's promise.
        let (source, target) = unsafe { buffers(&operation, membership.group.rank(), arguments) }?;
        let timeout = membership.context.collective_timeout();
        Ok(membership.group.submit(operation, source, target, timeout)?)
    };
    // SAFETY: by the caller's promise.
    unsafe { begin(comm, arguments, completion, None, submit) }
}

fn root_of(root: c_int, places: u8) -> Result<GroupRank, CallFailure> {
    let found = u8::try_from(root).ok().filter(|root| *root < places).map(GroupRank);
    found.ok_or_else(|| CallFailure::argument(format_args!("root {root} in a group of size {places}")))
}

/// Every rank receives the root's elements.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgBroadcastCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |_, places| {
            Ok(Collective::Broadcast { root: root_of(root, places)? })
        })
    }
}

/// Every rank receives the reduction of the elements of all.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgAllReduceCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    reduce_op: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |element, _| {
            Ok(Collective::AllReduce { reduction: element.reduction(reduce_op)? })
        })
    }
}

/// Every rank receives the elements of each.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgAllGatherCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe { begin_collective(comm, &arguments, completion, data_type, |_, _| Ok(Collective::AllGather)) }
}

/// Every rank receives the reduction of its part.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgReduceScatterCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    reduce_op: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |element, _| {
            Ok(Collective::ReduceScatter { reduction: element.reduction(reduce_op)? })
        })
    }
}

/// Every rank sends as many elements to each.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgAllToAllCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |_, places| {
            let counts = vec![count as u64; usize::from(places)];
            Ok(Collective::AllToAll { sources: counts.clone(), targets: counts })
        })
    }
}

/// The root receives the reduction of the elements of all.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgReduceCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    reduce_op: c_int,
    root: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |element, places| {
            Ok(Collective::Reduce { reduction: element.reduction(reduce_op)?, root: root_of(root, places)? })
        })
    }
}

/// The root receives the elements of each.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgGatherCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |_, places| {
            Ok(Collective::Gather { root: root_of(root, places)? })
        })
    }
}

/// Every rank receives its elements of the root's.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgScatterCpu(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive, count, hint, hint_entries };
    // SAFETY: by the caller's promise.
    unsafe {
        begin_collective(comm, &arguments, completion, data_type, |_, places| {
            Ok(Collective::Scatter { root: root_of(root, places)? })
        })
    }
}

/// Completes once all ranks have called it.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgBarrierCpu(
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send: ptr::null(), receive: ptr::null_mut(), count: 0, hint, hint_entries };
    // Without elements, all types are alike.
    // SAFETY: by the caller's promise.
    unsafe { begin_collective(comm, &arguments, completion, 0, |_, _| Ok(Collective::Barrier)) }
}

/// Returns the bytes of a message.
fn message_bytes(count: usize, data_type: c_int) -> Result<u64, CallFailure> {
    let element = ElementType::of(data_type)?.data_type;
    let bytes = (count as u64).checked_mul(element.bytes() as u64);
    bytes.ok_or_else(|| CallFailure::argument(format_args!("{count} elements of type {element} exceed the memory")))
}

/// Sends a message to a member.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgSendCpu(
    send: *const c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send, receive: ptr::null_mut(), count, hint, hint_entries };
    let submit = |membership: &Membership, peer: Option<GroupRank>| {
        let memory = CallerMemory::new(send, message_bytes(count, data_type)?, "send buffer")?;
        let peer = peer.unwrap_or(membership.group.rank());
        // SAFETY: by the caller's promise.
        let source = unsafe { memory.buffer() };
        Ok(membership.group.send(source, peer, 0, membership.context.message_timeout())?)
    };
    // SAFETY: as above.
    unsafe { begin(comm, &arguments, completion, Some(peer), submit) }
}

/// Receives a message of a member.
///
/// # Safety
/// Conditions of the header.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncakePgRecvCpu(
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: *mut c_void,
    hint: *mut i32,
    hint_entries: usize,
    completion: *mut *mut c_void,
) -> c_int {
    let arguments = Arguments { send: ptr::null(), receive, count, hint, hint_entries };
    let submit = |membership: &Membership, peer: Option<GroupRank>| {
        let memory = CallerMemory::new(receive, message_bytes(count, data_type)?, "receive buffer")?;
        // SAFETY: by the caller's promise.
        let target = unsafe { memory.buffer() };
        Ok(membership.group.receive(target, peer, 0, membership.context.message_timeout())?)
    };
    // SAFETY: as above.
    unsafe { begin(comm, &arguments, completion, Some(peer), submit) }
}

#[cfg(test)]
mod tests {
    use kvplane::group::{DataType, Reduction};

    use super::*;

    fn arguments(send: &[i32], receive: &mut [i32], count: usize) -> Arguments {
        let (send, receive) = (send.as_ptr().cast(), receive.as_mut_ptr().cast());
        Arguments { send, receive, count, hint: ptr::null_mut(), hint_entries: 0 }
    }

    fn operation(collective: Collective, count: usize) -> Operation {
        Operation { collective, data_type: DataType::I32, count: count as u64, places: 2 }
    }

    fn bytes_of(buffer: Option<&IoBuf>) -> (u64, usize) {
        buffer.map_or((0, 0), |buffer| (buffer.region().address(), buffer.bytes()))
    }

    #[test]
    fn a_reduction_works_in_the_receive_buffer() {
        let (send, mut receive) = ([1, 2, 3], [0; 3]);
        let at = receive.as_ptr().addr() as u64;
        let call = arguments(&send, &mut receive, 3);
        let sum = operation(Collective::AllReduce { reduction: Reduction::Sum }, 3);
        // SAFETY: buffers of three elements, as it needs.
        let (source, target) = unsafe { buffers(&sum, GroupRank(0), &call) }.expect("valid");
        assert_eq!((bytes_of(source.as_ref()), bytes_of(target.as_ref())), ((at, 12), (at, 12)));
        assert_eq!(receive, send);
    }

    #[test]
    fn ranks_that_receive_nothing_need_no_receive_buffer() {
        let send = [1, 2];
        let call = Arguments { receive: ptr::null_mut(), ..arguments(&send, &mut [], 2) };
        for collective in [
            Collective::Reduce { reduction: Reduction::Sum, root: GroupRank(1) },
            Collective::Gather { root: GroupRank(1) },
        ] {
            let call_of = |rank| {
                // SAFETY: a send buffer of two elements, as it needs.
                unsafe { buffers(&operation(collective.clone(), 2), GroupRank(rank), &call) }
            };
            let (source, _) = call_of(0).expect("no root");
            assert_eq!(bytes_of(source.as_ref()), (send.as_ptr().addr() as u64, 8));
            let failure = call_of(1).expect_err("the root");
            assert!(failure.text.contains("receive buffer is null"), "{}", failure.text);
        }
    }

    #[test]
    fn parts_in_place_are_copied_before_they_are_overwritten() {
        let mut memory = [1, 2, 3, 4];
        let (at, second) = (memory.as_ptr().addr() as u64, memory.as_ptr().wrapping_add(2));
        let call = Arguments { send: second.cast(), ..arguments(&[], &mut memory, 2) };
        // SAFETY: two and four elements, as it needs.
        let (source, target) =
            unsafe { buffers(&operation(Collective::AllGather, 2), GroupRank(1), &call) }.expect("valid");
        assert_eq!(bytes_of(target.as_ref()), (at, 16));
        let source = source.expect("a copy");
        assert!(!(at..at + 16).contains(&source.region().address()));
        let mut copy = [0; 8];
        source.copy_out(&mut copy);
        assert_eq!(copy, [3, 0, 0, 0, 4, 0, 0, 0]);
    }

    #[test]
    fn buffers_beyond_the_memory_are_refused() {
        let call = arguments(&[], &mut [], usize::MAX / 2);
        let sum = operation(Collective::AllReduce { reduction: Reduction::Sum }, usize::MAX / 2);
        // SAFETY: it is refused before anything is accessed.
        assert!(unsafe { buffers(&sum, GroupRank(0), &call) }.is_err());
        assert!(CallerMemory::new(ptr::without_provenance(usize::MAX - 8), 16, "buffer").is_err());
        assert!(message_bytes(usize::MAX, 10).is_err());
        assert!(root_of(2, 2).is_err() && root_of(-1, 2).is_err());
    }
}
