//! Devices that accept only part of a list, and rings that wrap.

use super::super::completion::{Kind, QueueId, Status};
use super::super::ffi::*;
use super::super::slots::Slots;
use super::super::{Access, Operation, Payload, QueuePairOptions, Remote, Request};
use super::bare;
use crate::{IoBuf, Region, RegionOptions};
use libc::c_int;
use std::sync::Mutex;

/// Number of requests that the device below accepts, whether it names the rejected one, and the requests that it saw.
static TAKES: Mutex<(usize, bool, Vec<u64>)> = Mutex::new((0, true, Vec::new()));

unsafe extern "C" fn picky(_: *mut ibv_qp, mut request: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    let mut takes = TAKES.lock().expect("whole");
    while !request.is_null() {
        if takes.0 == 0 {
            if takes.1 {
                // SAFETY: the caller's variable.
                unsafe { *bad = request };
            }
            return libc::ENOMEM;
        }
        takes.0 -= 1;
        // SAFETY: an element of the caller's chain.
        let current = unsafe { &*request };
        takes.2.push(current.remote_addr);
        request = current.next;
    }
    0
}

#[test]
fn rejected_requests_stay_queued_in_order() {
    let domain = bare::domain();
    let region = Region::allocate(&RegionOptions::new("picky", 4096)).expect("memory");
    let memory = domain.register(&IoBuf::whole(region), Access::LOCAL).expect("registered");
    let id = QueueId { index: 1, generation: 2 };
    let sizes = QueuePairOptions { send_depth: 64, send_pieces: 1, batch: 8, inline_bytes: 16, ..Default::default() };
    let mut sends = super::super::send_queue::SendQueue::new(&sizes, id, 4, picky);
    let mut next = 0;
    let mut push = |sends: &mut super::super::send_queue::SendQueue, count: u64| {
        for _ in 0..count {
            let to = Remote { address: next, key: 1 };
            let piece = [memory.piece(0, 8).expect("inside")];
            let request = Request::new(next, Operation::Write { to }, Payload::Pieces(&piece));
            sends.push(&request, domain.inner()).expect("room");
            next += 1;
        }
    };
    let flush = |sends: &mut super::super::send_queue::SendQueue, takes: usize, names: bool| {
        let mut state = TAKES.lock().expect("whole");
        (state.0, state.1) = (takes, names);
        drop(state);
        sends.flush(std::ptr::null_mut(), false).map_err(|error| (error.posted, error.unsent))
    };
    // Away from the ring's start, so that the following requests wrap.
    push(&mut sends, 5);
    assert_eq!(flush(&mut sends, 9, true), Ok(5));
    push(&mut sends, 7);
    assert_eq!(flush(&mut sends, 4, true), Err((4, 3)));
    push(&mut sends, 5);
    assert_eq!(flush(&mut sends, 0, true), Err((0, 8)));
    assert_eq!(flush(&mut sends, 8, true), Ok(8));
    push(&mut sends, 3);
    assert_eq!(flush(&mut sends, 2, false), Err((3, 0)), "a device that names none may have them all");
    assert_eq!(sends.slots.outstanding(), 20, "and so their memory is held");
    assert!(TAKES.lock().expect("whole").2.iter().copied().eq((0..17).chain([17, 18])));
}

#[test]
fn slots_survive_wrapping_sequence_numbers() {
    let mut slots = Slots::new(3, 0, false);
    let mut told = Vec::new();
    let mut sequence = 0;
    // Passing the 30 bits of sequence numbers would take too long: start where retiring has to wrap the ring often.
    for round in 0..10_000u64 {
        for step in 0..3 {
            sequence = slots.next_sequence();
            slots.push(round * 3 + step, &[]);
        }
        assert_eq!((slots.room(), slots.unsent()), (0, 3));
        slots.sent(3);
        assert!(slots.retire_runs(sequence, Status::Success, &mut |tokens, _| told.extend_from_slice(tokens)));
        assert!(!slots.retire_runs(sequence, Status::Success, &mut |_, _| panic!("retired twice")));
    }
    assert!(told.into_iter().eq(0..30_000));
    assert!(!slots.retire_runs(sequence.wrapping_add(1), Status::Success, &mut |_, _| panic!("never sent")));
}

#[test]
fn ids_encode_kind_sequence_and_queue() {
    let id =
        super::super::completion::request_id(Kind::Receive, 0x2bcd_ef01, QueueId { index: 0xfffe, generation: 0x8001 });
    assert_eq!(id, (1 << 62) | (0x2bcd_ef01 << 32) | (0x8001 << 16) | 0xfffe);
}
