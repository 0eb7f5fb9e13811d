//! Both sides of the fence, in one process and in several threads.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64};

const HERE: Extent = Extent { address: 0x1000, bytes: 4096, writable: true, direct: true };

fn segment(index: u32, generation: u32) -> SegmentId {
    SegmentId { index, generation }
}

fn channel() -> Arc<Region> {
    Region::allocate(&RegionOptions { huge: HugePages::Never, ..RegionOptions::new("channel", 4096) }).expect("memory")
}

fn view(fence: &Fence, channel: &Arc<Region>, cookie: (u64, u64)) -> View {
    let table = fence.fd().try_clone_to_owned().expect("a descriptor");
    let pid = i32::try_from(std::process::id()).expect("a process id");
    View::new(Arc::clone(channel), table, pid, cookie).expect("a table to map")
}

#[test]
fn a_segment_is_claimed_while_it_lives() {
    let fence = Fence::new().expect("a table");
    let (ours, others) = (channel(), channel());
    let client = view(&fence, &ours, fence.cookie());
    let (first, second) = (segment(0, 1), segment(Limits::SEGMENTS as u32 - 1, u32::MAX));
    assert_eq!(client.claim(0, first), None, "not published");
    fence.publish(first, &HERE);
    fence.publish(second, &Extent { writable: false, ..HERE });
    assert_eq!(client.claim(0, first), Some(HERE));
    assert_eq!(client.claim(SLOTS - 1, second), Some(Extent { writable: false, ..HERE }));
    assert!(is_named(&ours, first) && is_named(&ours, second) && !is_named(&others, first));
    assert!(!is_named(&ours, segment(0, 2)) && !is_named(&ours, segment(1, 1)));
    fence.retract(segment(0, 2));
    assert!(client.is_live(first), "a stale id retracts nothing");
    fence.retract(first);
    assert!(!client.is_live(first) && is_named(&ours, first), "dead, and still in use");
    client.clear(0);
    assert!(!is_named(&ours, first));
    assert_eq!(client.claim(0, first), None);
    assert!(!is_named(&ours, first), "what is dead is not named");
    // The position is reused for another segment.
    fence.publish(segment(0, 2), &HERE);
    assert_eq!((client.claim(0, first), client.claim(0, segment(0, 2))), (None, Some(HERE)));
    // Segments past the table's end are not for one-sided use.
    let beyond = segment(Limits::SEGMENTS as u32, 1);
    fence.publish(beyond, &HERE);
    fence.retract(beyond);
    assert_eq!((client.claim(1, beyond), client.is_live(beyond)), (None, false));
}

#[test]
fn a_held_segment_is_named_until_its_slot_is_released() {
    let fence = Fence::new().expect("a table");
    let ours = channel();
    let client = view(&fence, &ours, fence.cookie());
    let (first, second) = (segment(3, 1), segment(4, 1));
    assert_eq!(client.hold(first), Err(HoldError::Gone));
    assert_eq!(client.hold(segment(Limits::SEGMENTS as u32, 1)), Err(HoldError::Gone));
    fence.publish(first, &Extent { direct: false, ..HERE });
    fence.publish(second, &HERE);
    assert_eq!(client.extent(first), Some(Extent { direct: false, ..HERE }));
    let slots: Vec<usize> = (0..HELD_SLOTS).map(|_| client.hold(first).expect("a free slot")).collect();
    assert_eq!(client.hold(second), Err(HoldError::Busy));
    (0..SLOTS).for_each(|slot| client.clear(slot));
    release(&ours, slots[0]);
    assert_eq!(client.hold(second), Ok(slots[0]));
    fence.retract(first);
    assert_eq!((client.extent(first), is_named(&ours, first)), (None, true), "dead, and still in use");
    slots[1..].iter().for_each(|slot| release(&ours, *slot));
    assert_eq!((is_named(&ours, first), is_named(&ours, second)), (false, true));
    assert_eq!(client.hold(first), Err(HoldError::Gone));
    assert!(!is_named(&ours, first), "what is dead is not named");
}

#[test]
fn a_process_is_known_by_its_cookie() {
    let fence = Fence::new().expect("a table");
    let (address, value) = fence.cookie();
    let ours = channel();
    if !view(&fence, &ours, (address, value)).is_same_process(1) {
        println!("skipped: the kernel does not copy between processes here");
        return;
    }
    for wrong in [(address, value ^ 1), (8, value), (u64::MAX, value)] {
        let view = view(&fence, &ours, wrong);
        assert_eq!((view.pid(), view.is_same_process(1)), (None, false));
    }
}

/// One thread publishes, retracts and waits, as an owner does; the other claims and uses. A use after the owner's wait
/// would be detected.
#[test]
fn no_segment_is_used_after_its_owner_waited() {
    let fence = Fence::new().expect("a table");
    let ours = channel();
    let client = view(&fence, &ours, fence.cookie());
    // Generation that may be used now; 0 for none.
    let (usable, latest) = (AtomicU64::new(0), AtomicU64::new(0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for generation in 1..=20_000u32 {
                usable.store(u64::from(generation), Ordering::SeqCst);
                fence.publish(segment(5, generation), &Extent { bytes: u64::from(generation), ..HERE });
                latest.store(u64::from(generation), Ordering::Release);
                std::hint::spin_loop();
                fence.retract(segment(5, generation));
                while is_named(&ours, segment(5, generation)) {
                    std::thread::yield_now();
                }
                usable.store(0, Ordering::SeqCst);
            }
            over.store(true, Ordering::Release);
        });
        let mut used = 0u32;
        while !over.load(Ordering::Acquire) {
            let generation = latest.load(Ordering::Acquire) as u32;
            if let Some(extent) = client.claim(3, segment(5, generation)) {
                assert_eq!(extent.bytes, u64::from(generation), "another's extent");
                for _ in 0..20 {
                    assert_eq!(usable.load(Ordering::SeqCst), u64::from(generation), "used after its end");
                }
                client.clear(3);
                used += 1;
            }
        }
        println!("{used} uses");
    });
}
