//! Tests of formatting: only a blank device is formatted, even after an interrupted format.

use crate::support;

use kvplane_tier::format::FIRST_SEGMENT_OFFSET;
use kvplane_tier::{ENDS_BYTES, OpenError, TierConfig};
use support::small;
use support::world::World;

/// Configuration of a device with some room between its ends.
fn config() -> TierConfig {
    TierConfig { segments: 16, ..small(512) }
}

/// Opens a device that has these bytes; it must be refused and stay unchanged.
fn refused(at: u64, bytes: &[u8]) -> OpenError {
    let mut world = World::new(config(), 1);
    world.device.put(at as usize, bytes);
    let before = world.device.bytes().to_vec();
    world.until_open();
    world.settle();
    assert!(world.device.bytes() == before, "a refused device is not written to");
    world.refused.unwrap_or_else(|| panic!("formatted over what is at {at}"))
}

#[test]
fn devices_with_other_data_are_refused_and_not_touched() {
    let end = config().device_bytes();
    let marks: [(&str, u64, &[u8]); 12] = [
        ("a boot record", 510, &[0x55, 0xaa]),
        ("a partition table", 512, b"EFI PART"),
        ("its copy", end - 512, b"EFI PART"),
        ("a volume", 512, b"LABELONE"),
        ("ext4", 1024 + 56, &[0x53, 0xef]),
        ("swap space", 4096 - 10, b"SWAPSPACE2"),
        ("a RAID member", 4096, &[0xfc, 0x4e, 0x2b, 0xa9]),
        ("one of the older kind", end - 8192, &[0xfc, 0x4e, 0x2b, 0xa9]),
        ("btrfs", (64 << 10) + 64, b"_BHRfS_M"),
        ("a note of slots", 8192 + 100, &[1]),
        ("the first partition", ENDS_BYTES - 1, &[1]),
        ("a segment's start", FIRST_SEGMENT_OFFSET + 7 * (256 << 10) + 511, &[1]),
    ];
    for (what, at, mark) in marks {
        let error = refused(at, mark);
        assert_eq!(error, OpenError::NotBlank { offset: at }, "{what}");
        assert!(error.to_string().contains(&format!("byte {at} of it is not zero")), "{error}");
        assert!(!error.is_fault(), "it is no device that fails");
    }
    assert_eq!(refused(0, b"XFSB"), OpenError::Foreign);
}

#[test]
fn an_interrupted_format_is_repeated() {
    let mut whole = World::new(config(), 1);
    whole.until_open();
    let all = whole.device.completions;
    // Every operation that writes or flushes is among the last ones.
    for crash_after in (0..all - 40).step_by(29).chain(all - 40..=all) {
        for power in [true, false] {
            let mut world = World::new(config(), crash_after);
            while world.device.completions < crash_after && !world.opened {
                assert!(world.step(), "the tier does not open");
            }
            world.restart(power);
            world.until_recovered();
            assert_eq!(world.refused, None, "power {power}, after operation {crash_after}");
        }
    }
    assert!(all > 2 * ENDS_BYTES / (16 << 10), "only {all} operations");
}

#[test]
fn occasional_read_errors_do_not_refuse_a_device() {
    let mut opened = 0;
    for seed in 0..40 {
        let mut world = World::new(config(), seed);
        world.device_fails = true;
        // The superblocks and notes were read.
        (0..4).for_each(|_| assert!(world.step()));
        world.device.faults.read_error = 0.01;
        world.until_open();
        assert!(matches!(world.refused, None | Some(OpenError::Unreadable)), "{:?}", world.refused);
        opened += u32::from(world.opened);
    }
    assert!(opened > 30, "{opened} of 40");
    let mut world = World::new(config(), 1);
    world.device_fails = true;
    (0..4).for_each(|_| assert!(world.step()));
    world.device.faults.read_error = 1.0;
    world.until_open();
    assert_eq!(world.refused, Some(OpenError::Unreadable));
    assert!(world.device.bytes().iter().all(|byte| *byte == 0));
}
