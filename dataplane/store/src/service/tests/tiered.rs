//! Service with an SSD, driven at random and checked against the replies that its callers got: restarts with operations
//! half done, slots that are lost and regained, and a device that fails.

mod again;
mod away;
mod backlog;
mod copies;
mod damaged;
mod exported;
mod memory;
mod quotas;
mod recovering;
mod refused;
mod seals;
mod whose;
mod world;

use kvplane_proto::message::{
    DigestItem, GetItem, LookupReply, ObjectPriority, Operation, PutOptions, RangeItem, SizeReply,
};
use kvplane_proto::{FrameFlags, Status};
use kvplane_tier::format::{OWNERSHIP_IO_BYTES, OWNERSHIP_OFFSETS};

use super::rig::digest;
use crate::ObjectPins;
use crate::service::Tiering;
use crate::service::{Path, PeerKey, PutAck, TierPolicy, VoidCause, WritePolicy};
use world::{DEVICE_BYTES, KEYS, May, PEER, World, bytes_of};

fn policies() -> [TierPolicy; 5] {
    let buffered = TierPolicy { ack: PutAck::Buffered, ..TierPolicy::default() };
    [
        buffered,
        TierPolicy { ack: PutAck::Durable, promote_times: 3, ..buffered },
        TierPolicy { write: WritePolicy::Back { within_ns: 50_000_000 }, ack: PutAck::Memory, ..buffered },
        TierPolicy { backlog_percent: 60, promote_times: 15, prefetch_percent: 40, ..buffered },
        TierPolicy::default(),
    ]
}

#[test]
fn gets_return_the_last_put_and_no_promised_object_is_lost() {
    for (seed, policy) in policies().into_iter().cycle().take(12).enumerate() {
        let mut world = World::new(seed as u64, policy);
        world.run(600);
        world.end();
        assert!(world.got > 50, "{} gets gave something", world.got);
        assert!(world.ssd_hits > 0, "none from the SSD");
        assert!(world.striped > 5, "{} gets of what names stripes", world.striped);
    }
}

#[test]
fn restarts_keep_what_was_acknowledged() {
    for (seed, policy) in policies().into_iter().cycle().take(48).enumerate() {
        let mut world = World::new(100 + seed as u64, policy);
        for _ in 0..4 {
            world.run(120);
            world.restart();
        }
        world.end();
        assert!(world.ssd_hits > 0, "none from the SSD");
    }
}

/// The third put is a stripe head.
#[test]
fn stripe_heads_are_recognised_after_a_restart() {
    for (seed, policy) in policies().into_iter().take(2).enumerate() {
        let mut world = World::new(150 + seed as u64, policy);
        for key in 0..3 {
            world.put_with(key, &PutOptions::default());
            world.settle();
        }
        assert!(world.may[&2].contains(&Some(3)));
        world.restart();
        let shared = PeerKey { index: 1, generation: 1 };
        world.join(shared, Path::Shared);
        let name = |_| DigestItem { digest: digest(2) };
        // On the SSD alone, then in memory.
        for all in [FrameFlags::NONE, FrameFlags::HEADS, FrameFlags::NONE] {
            let size: SizeReply = world.answer((PEER, Operation::Size, all), name).item();
            assert_eq!((size.status, size.bytes), (Status::Striped, 40_000));
            let found: LookupReply = world.answer((shared, Operation::Lookup, all), name).item();
            let got = world.answer((PEER, Operation::Get, all), |request| GetItem {
                digest: digest(2),
                request,
                capacity_bytes: u64::MAX,
            });
            let part = world.answer((PEER, Operation::GetRange, all), |request| RangeItem {
                digest: digest(2),
                request,
                offset: 0,
                bytes: 8,
            });
            assert_eq!(part.status, Status::Striped);
            if all == FrameFlags::NONE {
                assert_eq!((found.status, got.status), (Status::Striped, Status::Striped));
            } else {
                assert_eq!((found.status, found.bytes, got.status), (Status::Ok, 40_000, Status::Ok));
                assert_eq!(got.bytes, Some(bytes_of(3)));
            }
        }
        world.service.peer_gone(shared, 1);
        let removed = world.answer((PEER, Operation::Remove, FrameFlags::NONE), name);
        let (gone, heads) = removed.body.split_at(removed.body.len() / 2);
        assert_eq!(
            (removed.status, gone[0] & 1, heads[0] & 1),
            (Status::Ok, 0, 1),
            "its client removes the rest first"
        );
        let removed = world.answer((PEER, Operation::Remove, FrameFlags::HEADS), name);
        assert_eq!((removed.status, removed.body[0] & 1), (Status::Ok, 1));
        world.may.insert(2, May::from([None]));
        world.restart();
        world.end();
    }
}

#[test]
fn hard_pins_hold_on_the_ssd_too() {
    for (seed, policy) in policies().into_iter().take(2).enumerate() {
        let mut world = World::new(170 + seed as u64, policy);
        let pin = PutOptions { hard_pin: true, ..PutOptions::default() };
        world.put_with(0, &pin);
        // Tails are written before the next request.
        world.hear();
        world.put_with(1, &PutOptions::default());
        world.settle();
        let pinned = |world: &World, key| world.service.objects.local.on_ssd(digest(key)).map(|record| record.pinned);
        assert_eq!((pinned(&world, 0), pinned(&world, 1)), (Some(true), Some(false)));
        world.restart();
        assert_eq!((pinned(&world, 0), pinned(&world, 1)), (Some(true), Some(false)));
        world.end();
    }
}

/// The record has the priority: an object that is read back after a restart ranks as its put said, and one whose
/// priority was changed before it was written, as it was then.
#[test]
fn priorities_survive_on_the_ssd() {
    let rank = |number| ObjectPriority::new(number).expect("it is in range");
    for (seed, policy) in policies().into_iter().filter(|policy| policy.promote_times == 1).enumerate() {
        let is_written_later = matches!(policy.write, WritePolicy::Back { .. });
        let mut world = World::new(190 + seed as u64, policy);
        // Not 0: an object with neither name nor options has no tail, so its record has no priority.
        world.put_with(2, &PutOptions { priority: rank(1), ..PutOptions::default() });
        world.hear();
        let later = if is_written_later { 2 } else { 1 };
        let store = &mut world.service.objects.local.shard.store;
        ObjectPins::from(store).set_priority(digest(2), rank(later)).expect("it is in memory");
        world.settle();
        for (key, number) in [(0, -3), (1, 4)] {
            world.put_with(key, &PutOptions { priority: rank(number), ..PutOptions::default() });
            world.settle();
        }
        world.restart();
        for (key, number) in [(0, -3), (1, 4), (2, later)] {
            // Half of the gets do not read stripe heads.
            for _ in 0..16 {
                world.get(key);
                world.settle();
            }
            let store = &world.service.objects.local.shard.store;
            assert_eq!(store.peek(digest(key)).map(|view| view.priority), Some(rank(number)), "object {key}");
        }
        world.end();
    }
}

#[test]
fn objects_of_lost_slots_are_dropped() {
    for (seed, policy) in policies().into_iter().cycle().take(8).enumerate() {
        let mut world = World::new(200 + seed as u64, policy);
        for _ in 0..40 {
            world.run(15);
            world.lose_or_regain();
        }
        world.end();
        assert!(world.got > 20);
    }
}

#[test]
fn a_failing_device_loses_objects_but_never_confuses_them() {
    for (seed, policy) in policies().into_iter().cycle().take(8).enumerate() {
        let mut world = World::new(300 + seed as u64, policy);
        world.faults = 2;
        world.run(500);
        world.end();
        assert!(world.got > 20);
    }
}

/// Slots that other owners had while the shard was away, and slots that no other shard can have had.
#[test]
fn a_restart_trusts_the_device_only_if_no_slot_changed_hands() {
    for (seed, policy) in policies().into_iter().take(2).enumerate() {
        let mut world = World::new(400 + seed as u64, policy);
        world.run(150);
        world.epoch += 3;
        world.restart();
        assert_eq!(
            world.service.inspect().tier().expect("a tier").snapshot().counters.slots_kept,
            16_384,
            "maps were missed only"
        );
        assert_eq!(world.service.tier_mut().and_then(Tiering::poll_voided), None);
        world.run(150);
        world.settle();
        world.epoch += 2;
        world.steady = world.epoch;
        world.may.values_mut().for_each(|may| *may = May::from([None]));
        world.restart();
        world.settle();
        let snapshot = world.service.inspect().tier().expect("a tier").snapshot();
        assert_eq!(snapshot.counters.slots_kept, 0, "somebody may have removed what the device has");
        let voided = world.service.tier_mut().and_then(Tiering::poll_voided);
        assert!(matches!(voided, Some(VoidCause::Moved { since, .. }) if since.0 == world.steady), "{voided:?}");
        assert_eq!(
            (snapshot.voided, world.service.tier_mut().and_then(Tiering::poll_voided)),
            (voided, None),
            "the cause is reported once"
        );
        world.run(150);
        world.end();
        assert!(world.got > 20);
    }
}

/// If there were only one copy of the ownership note, losing it would void the whole device.
#[test]
fn either_copy_of_the_ownership_record_suffices() {
    for (seed, policy) in policies().into_iter().take(2).enumerate() {
        let mut world = World::new(450 + seed as u64, policy);
        world.run(100);
        world.settle();
        for offset in OWNERSHIP_OFFSETS {
            world.spoil(offset..offset + u64::from(OWNERSHIP_IO_BYTES));
            world.restart();
            let snapshot = world.service.inspect().tier().expect("a tier").snapshot();
            assert_eq!(snapshot.counters.slots_kept, 16_384, "without the copy at {offset}");
            world.run(20);
            world.settle();
        }
        world.run(100);
        world.end();
        assert!(world.got > 20);
    }
}

#[test]
fn an_untrusted_device_is_void_and_reports_the_reason() {
    type Spoil = (fn(&mut World), fn(&VoidCause) -> bool);
    let spoils: [Spoil; 3] = [
        (|world| world.state = 2, |why| *why == VoidCause::OtherState),
        (|world| world.epoch = 1, |why| matches!(why, VoidCause::Newer { noted, known } if noted > known)),
        (
            |world| {
                for offset in OWNERSHIP_OFFSETS {
                    world.spoil(offset..offset + u64::from(OWNERSHIP_IO_BYTES));
                }
            },
            |why| *why == VoidCause::NoNote,
        ),
    ];
    for (number, (spoil, is_right)) in spoils.into_iter().enumerate() {
        let mut world = World::new(480 + number as u64, policies()[1]);
        world.run(150);
        world.settle();
        assert_eq!(
            world.service.tier_mut().and_then(Tiering::poll_voided),
            None,
            "a device that was formatted just now"
        );
        // Slots migrate in these maps, so that the next one is not the first.
        world.epoch += 3;
        world.restart();
        world.settle();
        spoil(&mut world);
        world.may.values_mut().for_each(|may| *may = May::from([None]));
        world.restart();
        let voided = world.service.tier_mut().and_then(Tiering::poll_voided).expect("it is not believed");
        assert!(is_right(&voided), "{number}: {voided:?}");
        world.end();
    }
}

/// The process ends before the sweep of a regained slot is complete: void records stay void.
#[test]
fn void_records_stay_void_after_a_restart() {
    for (seed, policy) in policies().into_iter().take(2).cycle().take(4).enumerate() {
        // A restart costs two segments, and objects dropped by reclaim were not promised.
        let mut world = World::on(3 * DEVICE_BYTES, 500 + seed as u64, policy);
        for _ in 0..12 {
            world.run(40);
            world.lose_or_regain();
            for _ in 0..world.rng.below(12) {
                world.step();
            }
            world.restart();
            if world.service.inspect().tier().expect("a tier").snapshot().counters.slots_kept == 0 {
                // The process ended before the ownership note of the last map was durable.
                (0..KEYS as u8).for_each(|key| world.now_may(key, None));
            }
        }
        world.end();
        assert!(world.got > 20);
    }
}

/// Records that were unreadable when their slots were found to be void may be readable after the next start.
#[test]
fn unreadable_void_records_stay_void_when_readable_again() {
    let mut given_up = 0;
    for (seed, policy) in policies().into_iter().take(2).cycle().take(6).enumerate() {
        let mut world = World::on(3 * DEVICE_BYTES, 700 + seed as u64, policy);
        world.run(150);
        world.settle();
        // Other owners had the slots meanwhile.
        world.epoch += 2;
        world.steady = world.epoch;
        world.may.values_mut().for_each(|may| *may = May::from([None]));
        world.unreadable = 8192..16_384;
        world.restart();
        world.settle();
        let report = world.service.inspect().tier().expect("a tier").snapshot().recovered.expect("a report");
        given_up += report.given_up + report.unreadable_windows;
        world.run(seed as u32 * 10);
        world.settle();
        world.unreadable = 0..0;
        world.restart();
        world.run(200);
        world.end();
        assert!(world.got > 20);
    }
    assert!(given_up > 0, "everything could be read");
}

/// A segment with an unreadable part may lack removals, also at later starts.
#[test]
fn removed_objects_stay_removed_after_a_start_with_unreadable_parts() {
    let mut lost = 0;
    for (seed, policy) in policies().into_iter().take(2).cycle().take(8).enumerate() {
        let mut world = World::on(3 * DEVICE_BYTES, 800 + seed as u64, policy);
        for _ in 0..6 {
            world.run(40);
            world.settle();
            // Objects given up for a removal that may be missing were not promised.
            (0..KEYS as u8).for_each(|key| world.now_may(key, None));
            let from = 4096 * (2 + world.rng.below(24));
            world.unreadable = from..from + 4096;
            world.restart();
            lost += world
                .service
                .inspect()
                .tier()
                .expect("a tier")
                .snapshot()
                .recovered
                .map_or(0, |report| report.lost_removals);
            world.unreadable = 0..0;
            world.restart();
        }
        world.end();
        assert!(world.got > 20);
    }
    assert!(lost > 0, "no start missed anything");
}

/// A write in flight when its slot is lost is void, also if the slot is back before the device is done.
#[test]
fn a_put_whose_slot_was_lost_during_the_write_is_refused() {
    for policy in policies().into_iter().take(2) {
        let mut world = World::new(600, policy);
        world.put(3);
        world.lost_slots.insert(3);
        world.own();
        world.lost_slots.clear();
        world.own();
        world.settle();
        assert_eq!(world.may[&3], May::from([None]), "it was acknowledged");
        world.end();
    }
}

/// A removal that the device could not take leaves a record there that this incarnation does not know any more. The
/// object is not replaced by one in memory alone: a restart would bring the record back.
#[test]
fn object_that_a_degraded_tier_may_still_have_is_not_replaced() {
    let policy = TierPolicy { ack: PutAck::Memory, ..TierPolicy::default() };
    let mut world = World::new(700, policy);
    world.put(3);
    world.settle();
    let first = world.may[&3].clone();
    assert!(!first.contains(&None), "it was not put");
    world.read_only = true;
    for key in (4..10).cycle().take(200) {
        world.put_with(key, &PutOptions { replace: true, ..PutOptions::default() });
        world.settle();
        if world.service.inspect().tier().expect("a tier").snapshot().degraded.is_some() {
            break;
        }
    }
    assert!(world.service.inspect().tier().expect("a tier").snapshot().degraded.is_some(), "it takes no writes");
    world.remove(3);
    world.settle();
    world.put_with(3, &PutOptions { replace: true, ..PutOptions::default() });
    world.settle();
    assert_eq!(world.last_put, Status::NoSpace);
    assert!(world.may[&3].is_superset(&first), "what is there may come back");
}

/// A degraded device blocks only objects that it may have: all others are replaced as usual, and no older version comes
/// back.
#[test]
fn objects_absent_from_a_degraded_device_are_replaced() {
    let replace = PutOptions { replace: true, ..PutOptions::default() };
    let policy = TierPolicy { ack: PutAck::Memory, ..TierPolicy::default() };
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..12 {
        let mut world = World::on(3 * DEVICE_BYTES, 900 + seed, policy);
        world.forgets = true;
        world.run(20 + 10 * seed as u32);
        world.read_only = true;
        for key in (0..4).cycle().take(200) {
            world.put_with(key, &replace);
            world.settle();
            if world.service.inspect().tier().expect("a tier").snapshot().degraded.is_some() {
                break;
            }
        }
        assert!(world.service.inspect().tier().expect("a tier").snapshot().degraded.is_some(), "it takes no writes");
        for key in 0..KEYS as u8 {
            if seed % 2 == 1 && key % 3 == 0 {
                world.remove(key);
                world.settle();
            }
            world.put_with(key, &replace);
            world.settle();
            match world.last_put {
                Status::Ok => taken += 1,
                Status::NoSpace => refused += 1,
                other => panic!("{other:?}"),
            }
        }
        world.read_only = false;
        world.restart();
        world.run(200);
        world.end();
    }
    assert!(taken > 20 && refused > 20, "{taken} taken, {refused} refused");
}

/// The backlog takes memory for a while only.
#[test]
fn a_put_that_finds_no_room_beside_what_is_being_written_is_to_come_again() {
    for write in [WritePolicy::Through, WritePolicy::Back { within_ns: 10_000_000_000 }] {
        let policy = TierPolicy { write, ack: PutAck::Memory, backlog_percent: 100, ..TierPolicy::default() };
        let mut world = World::new(800, policy);
        let refused = (0..KEYS as u8).find(|key| {
            world.put_with(*key, &PutOptions::default());
            world.hear();
            world.last_put != Status::Ok
        });
        let key = refused.expect("all of them found room");
        assert_eq!(world.last_put, Status::Busy);
        for _ in 0..100 {
            world.step();
        }
        world.put_with(key, &PutOptions::default());
        world.hear();
        assert_eq!(world.last_put, Status::Ok);
        world.end();
    }
}
