//! Tests of single calls: results, refusals, and operations of the device.

use crate::support;

use kvplane_proto::ids::Version;
use kvplane_tier::{
    Ack, Action, Event, Fault, Get, GetError, Miss, Output, Priority, Put, PutError, Reason, Removal, RemoveError,
    Span, Tier, TierConfig, Token,
};
use support::calls::{digest, put, settle, take, world};
use support::device::{Faults, HostMemory};
use support::world::World;
use support::{options, small};

#[test]
fn a_packed_object_is_copied_and_an_extent_is_lent() {
    let mut world = world(small(512));
    let packed = put(&mut world, 1, Span::pool(3, 5999), Ack::Buffered);
    assert!(!take(&mut world, &packed).expect("room").lent);
    assert_eq!(settle(&mut world), [Event::Stored { token: Token(1), ack: Ack::Buffered }]);
    let extent = put(&mut world, 2, Span::pool(64, 6000), Ack::Durable);
    assert!(take(&mut world, &extent).expect("room").lent);
    let events = settle(&mut world);
    assert_eq!(events, [Event::Released { token: Token(2) }, Event::Stored { token: Token(2), ack: Ack::Durable }]);
    let view = world.tier.locate(digest(2)).expect("it is there");
    assert_eq!((view.payload_bytes, view.version, view.extent), (6000, Version(3), true));
}

#[test]
fn a_get_waits_for_an_unwritten_record_and_returns_all_of_it() {
    for bytes in [1, 511, 5999, 6000, 65_536, 65_537, 102_400] {
        let mut world = world(small(512));
        let source = put(&mut world, 1, Span::pool(0, bytes), Ack::Buffered);
        take(&mut world, &source).expect("room");
        let destination = Span::pool(200 << 10, bytes);
        let get = Get { digest: digest(1), destination, priority: Priority::Get, token: Token(9) };
        world.tier.get(&get).expect("it is known");
        let events = settle(&mut world);
        let sum = kvplane_proto::checksum::payload_checksum(&world.memory.pool[..bytes as usize]);
        assert!(events.contains(&Event::Got { token: Token(9), version: Version(2), checksum: sum }), "{events:?}");
        let (from, to) = world.memory.pool.split_at(200 << 10);
        assert!(from[..bytes as usize] == to[..bytes as usize], "{bytes} bytes");
    }
}

#[test]
fn short_extents_share_the_block_of_their_heads_and_are_read_alone() {
    let mut world = world(TierConfig { group_bytes: 64 << 10, ops_in_flight: [4, 1, 1, 1], ..small(4096) });
    // While this record is written, the others gather in one group.
    let first = put(&mut world, 99, Span::pool(0, 4096), Ack::Buffered);
    take(&mut world, &first).expect("room");
    let Some(Output::Block(write)) = world.tier.poll_output(world.now_ns, &mut world.memory) else { panic!("a write") };
    assert_eq!(write.bytes, 2 * 4096, "head and payload");
    for key in 0..10 {
        let one = put(&mut world, key, Span::pool(3 + key * 4096, 4096), Ack::Buffered);
        assert!(!take(&mut world, &one).expect("room").lent, "it is copied, wherever it lies");
    }
    world.device.submit(write, &world.memory);
    let before = world.tier.stats().written_bytes;
    settle(&mut world);
    assert_eq!(world.tier.stats().written_bytes - before, 11 * 4096, "one block for all heads");
    for restarted in [false, true] {
        for key in 0..10 {
            let destination = Span::pool(128 << 10, 4096);
            let get = Get { digest: digest(key), destination, priority: Priority::Get, token: Token(key) };
            world.tier.get(&get).expect("it is known");
            let Some(Output::Block(read)) = world.tier.poll_output(world.now_ns, &mut world.memory) else {
                panic!("a read")
            };
            assert_eq!((read.action, read.bytes, read.pieces.as_slice()), (Action::Read, 4096, &[destination][..]));
            world.device.submit(read, &world.memory);
            let events = settle(&mut world);
            assert!(matches!(events[..], [Event::Got { .. }]), "{key} {restarted}: {events:?}");
            let expected: Vec<u8> = (0..4096).map(|at| (3 + key * 4096 + at * 7 + key) as u8).collect();
            assert!(world.memory.pool[128 << 10..][..4096] == expected, "{key} {restarted}");
        }
        world.restart(true);
        world.until_recovered();
    }
}

#[test]
fn the_head_shows_the_cause_of_a_wrong_payload() {
    let mut world = world(small(4096));
    for key in 0..3 {
        let one = put(&mut world, key, Span::pool(key * 4096, 4096), Ack::Durable);
        take(&mut world, &one).expect("room");
        settle(&mut world);
    }
    let at = |world: &World, key: u64| {
        let wanted = digest(key).0.to_le_bytes();
        let found = world.device.bytes().windows(16).position(|bytes| bytes == wanted);
        found.expect("a head") - 8
    };
    let [first, second, third] = [0, 1, 2].map(|key| at(&world, key));
    // Replaces a payload by other bytes, and a record by one of another location.
    world.device.flip(first + 4096, 3);
    let misplaced = world.device.bytes()[third..third + 8192].to_vec();
    world.device.put(second, &misplaced);
    for (key, miss) in [(0, Miss::Damaged), (1, Miss::Misdirected)] {
        let destination = Span::pool(128 << 10, 4096);
        let get = Get { digest: digest(key), destination, priority: Priority::Get, token: Token(key) };
        world.tier.get(&get).expect("it is known");
        let events = settle(&mut world);
        let [Event::Missed { token, record, miss: found }] = events[..] else { panic!("{events:?}") };
        assert_eq!((token, record.digest, found), (Token(key), digest(key), miss));
    }
    let stats = world.tier.stats();
    assert_eq!((stats.damage.damaged, stats.damage.misdirected, stats.damage.stale), (1, 1, 0));
}

#[test]
fn invalid_calls_are_refused_with_numbers() {
    let mut world = world(small(512));
    let refuse = |world: &mut World, change: &dyn Fn(&mut Put<'_>)| {
        let mut bad = put(world, 1, Span::pool(0, 8000), Ack::Buffered);
        change(&mut bad);
        take(world, &bad).expect_err("a refusal").to_string()
    };
    assert_eq!(refuse(&mut world, &|put| put.payload.bytes = 0), "an object of 0 bytes cannot be stored");
    let long = refuse(&mut world, &|put| put.payload.bytes = 102_401);
    assert_eq!(long, "an object of 102401 bytes is above the tier's limit of 102400");
    assert_eq!(refuse(&mut world, &|put| put.key = &[0; 41]), "a key of 41 bytes is above the tier's limit of 40");
    let odd = refuse(&mut world, &|put| put.payload.offset = 3);
    assert_eq!(odd, "the payload is at 3: direct I/O requires a multiple of 64");
    assert!(refuse(&mut world, &|put| put.checksum = Some(1)).contains("its writer stated 0x0000000000000001"));
    let good = put(&mut world, 1, Span::pool(0, 8000), Ack::Buffered);
    take(&mut world, &good).expect("room");
    let get = |destination| Get { digest: digest(1), destination, priority: Priority::Get, token: Token(0) };
    let short = world.tier.get(&get(Span::pool(0, 7999)));
    assert_eq!(short, Err(GetError::WrongLength { bytes: 7999, object_bytes: 8000 }));
    let odd = world.tier.get(&get(Span::pool(1, 8000)));
    assert_eq!(odd, Err(GetError::Unaligned { offset: 1, align_bytes: 64 }));
    let other = Get { digest: digest(2), ..get(Span::pool(0, 1)) };
    assert_eq!(world.tier.get(&other), Err(GetError::NotFound));
}

#[test]
fn puts_that_wait_for_a_flush_share_it() {
    let mut world = world(TierConfig { ops_in_flight: [4, 1, 1, 1], ..small(512) });
    let first = put(&mut world, 99, Span::pool(0, 400), Ack::Durable);
    take(&mut world, &first).expect("room");
    settle(&mut world);
    let before = world.tier.stats().flushes;
    for key in 0..10 {
        let one = put(&mut world, key, Span::pool(key * 512, 400), Ack::Durable);
        take(&mut world, &one).expect("room");
    }
    let stored = settle(&mut world).iter().filter(|event| matches!(event, Event::Stored { .. })).count();
    assert_eq!((stored, world.tier.stats().flushes - before), (10, 1));
}

#[test]
fn durable_writes_need_no_flush() {
    let mut world = world(TierConfig { durable_writes: true, ..small(512) });
    let first = put(&mut world, 99, Span::pool(0, 400), Ack::Durable);
    take(&mut world, &first).expect("room");
    settle(&mut world);
    let before = world.tier.stats().flushes;
    let one = put(&mut world, 1, Span::pool(0, 400), Ack::Durable);
    take(&mut world, &one).expect("room");
    let Some(Output::Block(op)) = world.tier.poll_output(world.now_ns, &mut world.memory) else { panic!("a write") };
    assert_eq!((op.action, op.bytes), (Action::Write { durable: true }, 512));
    world.tier.complete(world.now_ns, op.id, Ok(op.bytes), &mut world.memory);
    assert_eq!(settle(&mut world), [Event::Stored { token: Token(1), ack: Ack::Durable }]);
    assert_eq!(world.tier.stats().flushes, before);
}

#[test]
fn a_removal_hides_at_once_and_is_written_only_where_it_must_be() {
    let mut world = world(small(512));
    let one = put(&mut world, 1, Span::pool(0, 400), Ack::Durable);
    take(&mut world, &one).expect("room");
    settle(&mut world);
    let remove = |world: &mut World, key, token| {
        world.tier.remove(world.now_ns, digest(key), Ack::Durable, Token(token), &mut world.memory)
    };
    assert_eq!(remove(&mut world, 2, 5), Ok(Removal::Absent));
    assert_eq!(remove(&mut world, 1, 6), Ok(Removal::Pending));
    assert_eq!(world.tier.locate(digest(1)), None);
    // The first removal is not durable yet: the second must not return that the object is absent.
    assert_eq!(remove(&mut world, 1, 7), Ok(Removal::Pending));
    assert_eq!(settle(&mut world), [Event::Removed { token: Token(6) }, Event::Removed { token: Token(7) }]);
    assert_eq!(remove(&mut world, 1, 8), Ok(Removal::Absent));
}

#[test]
fn an_error_on_reading_is_a_miss_from_then_on() {
    let mut world = world(small(512));
    for (key, faults) in
        [(1, Faults { read_error: 1.0, ..Faults::default() }), (2, Faults { short: 1.0, ..Faults::default() })]
    {
        let one = put(&mut world, key, Span::pool(0, 400), Ack::Durable);
        take(&mut world, &one).expect("room");
        settle(&mut world);
        world.device.faults = faults;
        let get =
            Get { digest: digest(key), destination: Span::pool(0, 400), priority: Priority::Get, token: Token(9) };
        world.tier.get(&get).expect("it is known");
        let events = settle(&mut world);
        let [Event::Missed { token, miss, .. }] = events[..] else { panic!("{events:?}") };
        assert_eq!((token, miss), (Token(9), Miss::Fault(Fault::Io)));
        assert_eq!(world.tier.get(&get), Err(GetError::NotFound));
        world.device.faults = Faults::default();
    }
    assert_eq!(world.tier.stats().damage.unread, 2);
}

#[test]
fn a_write_error_retires_a_segment_and_too_many_end_all_writing() {
    let mut world = world(TierConfig { max_bad_segments: 1, ..small(512) });
    let keep = put(&mut world, 7, Span::pool(0, 400), Ack::Durable);
    take(&mut world, &keep).expect("room");
    settle(&mut world);
    world.device.faults.write_error = 1.0;
    let lost = put(&mut world, 8, Span::pool(0, 400), Ack::Durable);
    take(&mut world, &lost).expect("room");
    let events = settle(&mut world);
    assert!(events.contains(&Event::StoreFailed { token: Token(8), fault: Fault::Io }), "{events:?}");
    assert!(world.tier.stats().bad_segments >= 1);
    assert_eq!(world.tier.degraded(), None);
    take(&mut world, &lost).expect("room in the next segment");
    let events = settle(&mut world);
    let reason = world.tier.degraded().expect("that was one too many");
    assert_eq!(reason, Reason::WriteErrors { segments: 2 });
    assert!(events.contains(&Event::Degraded(reason)));
    assert_eq!(take(&mut world, &lost), Err(PutError::Unavailable(reason)));
    // Stored objects are still served, and removed ones are hidden.
    let get = Get { digest: digest(7), destination: Span::pool(0, 400), priority: Priority::Get, token: Token(1) };
    world.tier.get(&get).expect("it is known");
    assert!(matches!(settle(&mut world)[..], [Event::Got { .. }]));
    let removed = world.tier.remove(0, digest(7), Ack::Durable, Token(2), &mut world.memory);
    assert_eq!(removed, Err(RemoveError::Unavailable(reason)));
    assert_eq!(world.tier.locate(digest(7)), None);
    world.tier.check();
}

#[test]
fn a_full_disk_and_a_lost_device_are_reported_and_calls_end() {
    for (fault, reason) in
        [(Fault::NoSpace, Reason::NoSpace), (Fault::Gone, Reason::Gone), (Fault::ReadOnly, Reason::DeviceReadOnly)]
    {
        let mut world = world(small(4096));
        let one = put(&mut world, 1, Span::pool(0, 7000), Ack::Durable);
        take(&mut world, &one).expect("room");
        let mut events = Vec::new();
        while let Some(output) = world.tier.poll_output(world.now_ns, &mut world.memory) {
            match output {
                Output::Block(op) => world.tier.complete(0, op.id, Err(fault), &mut world.memory),
                Output::Event(event) => events.push(event),
            }
        }
        assert!(events.contains(&Event::Degraded(reason)), "{events:?}");
        assert!(events.contains(&Event::Released { token: Token(1) }), "{events:?}");
        assert!(events.contains(&Event::StoreFailed { token: Token(1), fault }), "{events:?}");
        assert_eq!(world.tier.poll_timeout(), None);
        assert!(world.tier.is_idle());
        world.tier.check();
        // No request is left for work that will not be done.
        world.tier.reclaim_until(3);
        assert_eq!(world.tier.stats().wanted_free_segments, 0);
        world.tier.scrub_once(world.now_ns, 1 << 20);
        let is_begun = world.tier.scrub_report().state == kvplane_tier::ScrubState::Ordered;
        assert_eq!(is_begun, fault != Fault::Gone, "what can be read is checked");
    }
}

/// A record may begin with hits: it is kept once, and then as any other that nobody read.
#[test]
fn a_record_that_begins_with_hits_survives_one_reclaim() {
    let mut world = world(small(512));
    for (key, hits) in [(0, 4), (1, 0)] {
        let one = Put { hits, ..put(&mut world, key, Span::pool(0, 9000), Ack::Durable) };
        take(&mut world, &one).expect("room");
        settle(&mut world);
    }
    let mut gone_at = [0; 2];
    for key in 100..600 {
        let one = put(&mut world, key, Span::pool(0, 9000), Ack::Buffered);
        take(&mut world, &one).expect("reclaim keeps up");
        settle(&mut world);
        for (early, at) in gone_at.iter_mut().enumerate() {
            if *at == 0 && world.tier.locate(digest(early as u64)).is_none() {
                *at = key;
            }
        }
    }
    let [hit, plain] = gone_at;
    assert!(plain > 100 && hit > plain + (plain - 100) / 2, "reclaimed at {hit} and {plain}");
    world.tier.check();
}

#[test]
fn reclaim_keeps_what_is_pinned_or_hot_and_drops_the_rest() {
    let mut world = world(small(512));
    for key in 0..3 {
        let mut one = put(&mut world, key, Span::pool(0, 9000), Ack::Durable);
        one.pinned = key == 0;
        take(&mut world, &one).expect("room");
        settle(&mut world);
    }
    let mut evicted = Vec::new();
    for key in 100..400 {
        let one = put(&mut world, key, Span::pool(0, 9000), Ack::Buffered);
        take(&mut world, &one).expect("reclaim keeps up");
        if key % 20 == 0 {
            for _ in 0..2 {
                let destination = Span::pool(200 << 10, 9000);
                let get = Get { digest: digest(1), destination, priority: Priority::Get, token: Token(1) };
                world.tier.get(&get).expect("it is hot");
            }
        }
        let dropped = settle(&mut world).into_iter().filter_map(|event| match event {
            Event::Evicted { digest, .. } => Some(digest),
            _ => None,
        });
        evicted.extend(dropped);
    }
    assert!(world.tier.locate(digest(0)).is_some_and(|view| view.pinned));
    assert!(world.tier.locate(digest(1)).is_some());
    assert!(evicted.contains(&digest(2)) && evicted.contains(&digest(100)) && !evicted.contains(&digest(0)));
    let stats = world.tier.stats();
    assert!(stats.reinserted >= 2 && stats.reclaims >= 5, "{stats:?}");
    world.tier.check();
}

/// The log wraps several times while most of it is dead: no live record has to go.
#[test]
fn reclaim_drops_nothing_while_replaced_objects_make_the_room() {
    let mut world = world(small(512));
    let evicted = |world: &mut World| settle(world).iter().any(|event| matches!(event, Event::Evicted { .. }));
    for key in 0..8 {
        let one = put(&mut world, key, Span::pool(0, 9000), Ack::Buffered);
        take(&mut world, &one).expect("room");
        assert!(!evicted(&mut world));
    }
    for round in 0..600 {
        let one = put(&mut world, 100 + round % 8, Span::pool(0, 9000), Ack::Buffered);
        take(&mut world, &one).expect("reclaim keeps up");
        assert!(!evicted(&mut world), "round {round}");
    }
    assert!((0..8).all(|key| world.tier.locate(digest(key)).is_some()));
    let stats = world.tier.stats();
    assert!(stats.reinserted >= 8 && stats.reclaims > u64::from(small(512).segments), "{stats:?}");
    world.tier.check();
}

#[test]
fn objects_lost_by_reclaim_are_reported() {
    // Damaged footers, damaged records, and copies that cannot be written.
    let footers = |world: &mut World| {
        let blocks = world.device.bytes().chunks(512).enumerate();
        let at: Vec<usize> =
            blocks.filter(|(_, block)| block.starts_with(b"KVTF")).map(|(block, _)| block * 512).collect();
        assert!(!at.is_empty());
        at.into_iter().for_each(|at| world.device.flip(at + 70, 3));
    };
    let payloads = |world: &mut World| {
        let end = world.device.bytes().len();
        (70_000..end).step_by(9_000).for_each(|at| world.device.flip(at, 1));
    };
    let writes = |world: &mut World| world.device.faults.write_error = 0.2;
    for (which, harm) in [&footers as &dyn Fn(&mut World), &payloads, &writes].into_iter().enumerate() {
        let mut world = world(TierConfig { max_bad_segments: 8, ..small(512) });
        world.device_fails = true;
        let mut there = std::collections::BTreeSet::new();
        let (mut unnamed, mut damaged) = (0, 0);
        for round in 0..6 {
            for key in round * 40..round * 40 + 40 {
                let mut one = put(&mut world, key, Span::pool(0, 9000), Ack::Buffered);
                one.pinned = key % 2 == 0;
                if take(&mut world, &one).is_ok() {
                    there.insert(digest(key));
                }
                for event in settle(&mut world) {
                    damaged += u32::from(matches!(event, Event::Quarantined { .. }));
                    match event {
                        Event::Evicted { digest, .. } => assert!(there.remove(&digest), "{event:?}"),
                        Event::Quarantined { record, .. } => assert!(there.remove(&record.digest), "{event:?}"),
                        Event::StoreFailed { token, .. } => {
                            there.remove(&digest(token.0));
                        }
                        Event::Forgotten { objects } => unnamed += objects as usize,
                        _ => {}
                    }
                }
                assert_eq!(there.iter().filter(|digest| world.tier.locate(**digest).is_none()).count(), unnamed);
            }
            harm(&mut world);
        }
        world.tier.check();
        assert!(which != 0 || unnamed > 0, "a footer was missed");
        assert!(which != 1 || damaged > 0, "a record was missed");
    }
}

#[test]
fn gets_are_not_held_up_by_other_work() {
    let mut world = world(small(512));
    let one = put(&mut world, 1, Span::pool(0, 90_000), Ack::Durable);
    take(&mut world, &one).expect("room");
    settle(&mut world);
    let get = |priority, token, at| Get {
        digest: digest(1),
        destination: Span::pool(at, 90_000),
        priority,
        token: Token(token),
    };
    world.tier.get(&get(Priority::Prefetch, 1, 0)).expect("it is known");
    world.tier.get(&get(Priority::Get, 2, 100 << 10)).expect("it is known");
    let mut given = Vec::new();
    while let Some(Output::Block(op)) = world.tier.poll_output(world.now_ns, &mut world.memory) {
        given.push(op.priority);
    }
    // As many as each priority may have in flight, gets first.
    assert_eq!(given, [Priority::Get, Priority::Get, Priority::Get, Priority::Get, Priority::Prefetch]);
}

#[test]
fn without_format_a_blank_device_is_refused() {
    let config = small(512);
    let mut world = World::new(config.clone(), 1);
    let blank = kvplane_tier::OpenOptions { format_blank: None, ..options() };
    world.tier = Tier::open(config, blank).expect("a good configuration");
    world.until_open();
    assert_eq!(world.refused, Some(kvplane_tier::OpenError::Blank));
    let unused: &HostMemory = &world.memory;
    assert!(!unused.pool.is_empty() && world.device.bytes().iter().all(|byte| *byte == 0));
    let one = put(&mut world, 1, Span::pool(0, 10), Ack::Durable);
    assert_eq!(take(&mut world, &one), Err(PutError::Unavailable(Reason::Refused(kvplane_tier::OpenError::Blank))));
}

#[test]
fn a_read_only_device_serves_its_objects_and_a_blank_one_is_refused() {
    let config = small(512);
    let mut world = World::new(config.clone(), 1);
    (world.device.faults.write_error, world.device_fails) = (1.0, true);
    world.until_open();
    let refused = kvplane_tier::OpenError::Unwritable;
    assert_eq!((world.refused, refused.is_fault()), (Some(refused), true));
    let one = put(&mut world, 1, Span::pool(0, 10), Ack::Durable);
    assert_eq!(take(&mut world, &one), Err(PutError::Unavailable(Reason::Refused(refused))));
    // No object can come back from a blank device, so the removal is complete.
    let removed = world.tier.remove(0, digest(1), Ack::Durable, Token(1), &mut world.memory);
    assert_eq!(removed, Ok(kvplane_tier::Removal::Absent));
    let mut world = self::world(config);
    let one = put(&mut world, 1, Span::pool(0, 10), Ack::Durable);
    take(&mut world, &one).expect("room");
    settle(&mut world);
    (world.device.faults.write_error, world.device_fails) = (1.0, true);
    world.restart(false);
    world.until_recovered();
    assert_eq!((world.refused, world.tier.degraded()), (None, Some(Reason::SuperblockUnwritten)));
    assert!(world.tier.locate(digest(1)).is_some());
}

#[test]
fn a_key_is_read_without_its_object() {
    let mut world = world(small(512));
    for (key, bytes) in [(1, 700), (2, 65_537)] {
        let one = put(&mut world, key, Span::pool(key << 17, bytes), Ack::Durable);
        take(&mut world, &one).expect("room");
        settle(&mut world);
        assert_eq!(world.tier.locate(digest(key)).map(|view| view.key_bytes), Some(5));
        let hits = world.tier.stats().hits;
        world.tier.get_key(digest(key), Priority::Background, Token(9)).expect("it is known");
        assert_eq!(settle(&mut world), [Event::Key { token: Token(9), version: Version(key + 1) }]);
        assert_eq!(world.tier.take_key(Token(9)).as_deref(), Some(&b"a key"[..]));
        assert_eq!((world.tier.take_key(Token(9)), world.tier.stats().hits), (None, hits));
    }
    assert_eq!(world.tier.get_key(digest(3), Priority::Background, Token(9)), Err(GetError::NotFound));
}
