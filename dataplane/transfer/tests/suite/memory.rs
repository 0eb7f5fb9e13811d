//! Registration of memory, and the validation of ranges.

use std::sync::Arc;

use kvplane_transfer::{
    Error, Opcode, Range, Ranges, RegisterOptions, ScatterRequest, SegmentHandle, SubmitOptions, TaskState,
    TransferEngine, TransferRequest,
};

use crate::rig::{Side, Way, check, fill, pair, region};

#[test]
fn invalid_registrations_are_rejected() {
    let engine = TransferEngine::start(Way::network().config()).unwrap();
    let options = RegisterOptions::default();
    let (first, second) = (region(8192), region(4096));
    engine.register(Arc::clone(&first), &options).unwrap();
    let error = engine.register(Arc::clone(&first), &options).unwrap_err();
    assert_eq!(error.code(), -7);
    let text = format!("{error}");
    assert!(text.contains("8192 bytes") && text.contains(&format!("{:#x}", first.address())), "{text}");
    // All or nothing: the second region is free again.
    let error = engine.register_batch(&[Arc::clone(&second), Arc::clone(&first)], &options).unwrap_err();
    assert!(matches!(error, Error::AddressOverlapped { .. }), "{error}");
    engine.register(Arc::clone(&second), &options).unwrap();
    assert_eq!(engine.unregister(first.address() + 1).unwrap_err().code(), -3);
    assert_eq!(engine.unregister_batch(&[first.address(), 4096]).unwrap_err().code(), -3);
    engine.unregister_batch(&[first.address(), second.address()]).unwrap();
    assert_eq!(engine.unregister(first.address()).unwrap_err().code(), -3);
    let somewhere = RegisterOptions { location: "cuda:0".to_owned(), ..options };
    assert_eq!(engine.register(first, &somewhere).unwrap_err().code(), -1);
    assert!(engine.segment_info(SegmentHandle::LOCAL).unwrap().buffers.is_empty());
}

#[test]
fn the_location_of_memory_is_detected_or_taken_as_given() {
    let side = Side::new(Way::network().config(), 8192);
    fill(&side.region, 0, 8192, 1);
    side.engine.unregister(side.region.address()).unwrap();
    side.engine.register(side.region.clone(), &RegisterOptions::default()).unwrap();
    let location = || side.engine.segment_info(SegmentHandle::LOCAL).unwrap().buffers[0].location.clone().unwrap();
    match kvplane_transfer::cpu::node_of(side.region.address()) {
        Some(node) => assert_eq!(location(), format!("cpu:{node}")),
        None => {
            println!("skipped: this kernel does not say on which node memory is");
            assert_eq!(location(), "*");
        }
    }
    side.engine.unregister(side.region.address()).unwrap();
    let said = RegisterOptions { location: "cpu:7".to_owned(), ..RegisterOptions::default() };
    side.engine.register(side.region.clone(), &said).unwrap();
    assert_eq!(location(), "cpu:7");
}

#[test]
fn requests_outside_of_registered_memory_are_rejected_as_a_whole() {
    let (a, b, peer) = pair(Way::network(), 64 << 10);
    let (there, end) = (b.region.address(), (64 << 10) as u64);
    let good = a.request(Opcode::Write, 0, (peer, there), 100);
    fill(&b.region, 0, 64 << 10, 1);
    fill(&a.region, 0, 64 << 10, 2);
    let wrong = [
        TransferRequest { source: a.region.address() - 1, ..good },
        TransferRequest { source: a.region.address() + end - 99, ..good },
        TransferRequest { target_offset: there - 1, ..good },
        TransferRequest { target_offset: there + end - 99, ..good },
        TransferRequest { length: u64::MAX, ..good },
        TransferRequest { target_offset: u64::MAX, ..good },
        TransferRequest { source: u64::MAX, ..good },
    ];
    for one in wrong {
        let error = a.engine.submit(&[good, one], &SubmitOptions::default()).unwrap_err();
        assert_eq!(error.code(), -3, "{one:?}: {error}");
        assert!(format!("{error}").starts_with("request 1:"), "{error}");
    }
    let unknown = TransferRequest { target: SegmentHandle::from_bits(99), ..good };
    assert_eq!(a.engine.submit(&[good, unknown], &SubmitOptions::default()).unwrap_err().code(), -1);
    let read = TransferRequest { opcode: Opcode::Read, ..good };
    let other = TransferRequest { source: read.source + 99, ..read };
    assert_eq!(a.engine.submit(&[read, other], &SubmitOptions::default()).unwrap_err().code(), -1);
    check(&b.region, 0, 64 << 10, 1);
}

#[test]
fn inaccessible_memory_is_hidden_and_read_only_memory_is_not_written() {
    let (a, b) = (Side::new(Way::network().config(), 4096), TransferEngine::start(Way::network().config()).unwrap());
    let (hidden, fixed) = (region(4096), region(4096));
    fill(&fixed, 0, 4096, 7);
    b.register(Arc::clone(&hidden), &RegisterOptions { remote_accessible: false, ..RegisterOptions::default() })
        .unwrap();
    b.register(Arc::clone(&fixed), &RegisterOptions { writable: false, ..RegisterOptions::default() }).unwrap();
    let peer = a.engine.open_segment(b.name()).unwrap();
    let info = a.engine.segment_info(peer).unwrap();
    assert_eq!(info.buffers.iter().map(|buffer| buffer.address).collect::<Vec<_>>(), [fixed.address()]);
    let request = a.request(Opcode::Read, 0, (peer, hidden.address()), 100);
    assert_eq!(a.engine.submit(&[request], &SubmitOptions::default()).unwrap_err().code(), -3);
    let write = a.request(Opcode::Write, 0, (peer, fixed.address()), 100);
    let batch = a.engine.submit(&[write], &SubmitOptions::default()).unwrap();
    assert_eq!(batch.wait().state, TaskState::Failed);
    check(&fixed, 0, 4096, 7);
}

/// Memory registered after the segment was opened is found; unregistered memory is not written.
#[test]
fn a_peers_memory_may_change() {
    for way in Way::all() {
        let (a, b, peer) = pair(way, 4096);
        let late = region(4096);
        b.engine.register(Arc::clone(&late), &RegisterOptions::default()).unwrap();
        fill(&a.region, 0, 4096, 3);
        let write = a.request(Opcode::Write, 0, (peer, late.address()), 4096);
        let run = |requests: &[TransferRequest]| {
            a.engine.submit(requests, &SubmitOptions::default()).map(|batch| batch.wait().state)
        };
        assert_eq!(run(&[write]).unwrap(), TaskState::Completed, "{way:?}");
        check(&late, 0, 4096, 3);
        b.engine.unregister(late.address()).unwrap();
        fill(&late, 0, 4096, 4);
        assert_eq!(run(&[write]).unwrap(), TaskState::Failed, "{way:?}");
        check(&late, 0, 4096, 4);
        // The owner's new description does not contain it any more.
        assert_eq!(run(&[write]).unwrap_err().code(), -3, "{way:?}");
        // The same address is now another region.
        b.engine.register(Arc::clone(&late), &RegisterOptions::default()).unwrap();
        assert_eq!(run(&[write]).unwrap(), TaskState::Completed, "{way:?}");
        check(&late, 0, 4096, 3);
    }
}

/// All owners are asked; those that do not answer do not delay the others.
#[test]
fn descriptions_of_segments_are_renewed() {
    let (a, b, peer) = pair(Way::network(), 4096);
    let [c, gone] = [0, 1].map(|_| Side::new(Way::network().config(), 4096));
    let [other, _] = [&c, &gone].map(|side| a.engine.open_segment(side.engine.name()).unwrap());
    a.engine.segments().refresh().unwrap();
    for side in [&b, &c] {
        side.engine.register(region(4096), &RegisterOptions::default()).unwrap();
    }
    drop(gone);
    let known = || [peer, other].map(|handle| a.engine.segment_info(handle).unwrap().buffers.len());
    assert_eq!(known(), [1, 1]);
    assert!(a.engine.segments().refresh().unwrap_err().code() < 0, "one is gone");
    assert_eq!(known(), [2, 2]);
}

#[test]
fn our_own_memory_is_copied_at_once() {
    let a = Side::new(Way::network().config(), 8192);
    let own = a.engine.open_segment(&format!("/{}", a.engine.name())).unwrap();
    assert_eq!(own, SegmentHandle::LOCAL);
    fill(&a.region, 0, 1000, 5);
    let write = a.request(Opcode::Write, 0, (own, a.region.address() + 4096), 1000);
    let nothing = TransferRequest { length: 0, ..write };
    let batch = a.engine.submit(&[nothing, write], &SubmitOptions::default()).unwrap();
    assert!(batch.is_done());
    assert_eq!((batch.status().state, batch.status().transferred_bytes), (TaskState::Completed, 1000));
    assert_eq!(batch.task_status(0).state, TaskState::Completed);
    assert_eq!(batch.task_status(2).state, TaskState::Invalid);
    check(&a.region, 4096, 1000, 5);
    assert_eq!(a.engine.submit(&[], &SubmitOptions::default()).unwrap().status().state, TaskState::Completed);
}

#[test]
fn scattered_ranges_have_one_result_for_each_set() {
    for way in Way::all() {
        let (a, b, peer) = pair(way, 1 << 20);
        for block in 0..64 {
            fill(&b.region, block * 8192, 100, block as u64);
        }
        let first = Range { source: a.region.address(), target_offset: b.region.address(), length: 100 };
        let strided = Ranges::Strided { first, source_stride: 100, target_stride: 8192, count: 64 };
        let list = [
            Range { source: a.region.address() + 50_000, target_offset: b.region.address() + 8192, length: 100 },
            Range { source: 0, target_offset: 0, length: 0 },
        ];
        let sets = [
            ScatterRequest { opcode: Opcode::Read, target: peer, ranges: strided },
            ScatterRequest { opcode: Opcode::Read, target: peer, ranges: Ranges::List(&list) },
            ScatterRequest { opcode: Opcode::Read, target: peer, ranges: Ranges::List(&[]) },
        ];
        let batch = a.engine.submit_scatter(&sets, &SubmitOptions::default()).unwrap();
        assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
        let bytes: Vec<u64> = (0..3).map(|task| batch.task_status(task).transferred_bytes).collect();
        assert_eq!(bytes, [6400, 100, 0]);
        for block in 0..64 {
            check(&a.region, block * 100, 100, block as u64);
        }
        check(&a.region, 50_000, 100, 1);
        let far = Ranges::Strided { first, source_stride: u64::MAX / 2, target_stride: 0, count: 4 };
        let far = ScatterRequest { opcode: Opcode::Write, target: peer, ranges: far };
        assert_eq!(a.engine.submit_scatter(&[far], &SubmitOptions::default()).unwrap_err().code(), -1);
    }
}
