//! Tests of objects that are longer than a record on the SSD: their stripes and stripe heads, over restarts and broken
//! connections.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use kvplane::{Buffer, Put, PutOptions, Region, RegionOptions, Slice};
use kvplane_tools::pattern;

use crate::ssd::objects::{Bed, counted, name, recovered};
use crate::support::{Way, wait_until};

/// One object is longer than a record of the SSD may be, which is 2 MiB here, and one is as long as that.
#[test]
fn objects_longer_than_a_record_outlive_their_node() {
    const LENGTHS: [usize; 3] = [2 << 20, (2 << 20) + 1, (3 << 20) + 123];
    for ack in ["buffered", "memory"] {
        let bed = Bed::new(&format!("long-{ack}"), &["--ssd-ack", ack]);
        let mut dev = bed.start();
        let value_of = |key: usize| {
            let mut bytes = vec![0; LENGTHS[key % 3]];
            pattern::fill(key as u64, 0, &mut bytes);
            bytes
        };
        for (half, way) in Way::BOTH.into_iter().enumerate() {
            let mut client = bed.client(way);
            for key in half * 3..half * 3 + 3 {
                client.put(name(key as u64).as_bytes(), &value_of(key)).unwrap();
                // Without a promise, an object that finds no space in the backlog is not written.
                let done = wait_until(|| (counted(&dev, "kvplane_tier_backlog_objects") == 0.0).then_some(()));
                assert!(done.is_some(), "objects are not written: {:?}", dev.said());
            }
        }
        dev.kill();
        let dev = bed.start();
        // During recovery an object may be a miss, or its stripes one by one: that removes nothing.
        for key in (0..6).rev() {
            let mut client = bed.client(Way::BOTH[key % 2]);
            let got = client.get(name(key as u64).as_bytes()).unwrap();
            assert!(got.is_none_or(|got| got == value_of(key)), "object {key} while the node recovers");
        }
        recovered(&dev);
        for way in Way::BOTH {
            let mut client = bed.client(way);
            for key in 0..6 {
                let (name, value) = (name(key as u64), value_of(key));
                assert_eq!(client.size(name.as_bytes()).unwrap(), Some(value.len() as u64), "object {key}");
                let got = client.get(name.as_bytes()).unwrap();
                assert!(got.is_some_and(|got| got == value), "object {key} over {}, ack {ack}", way.name());
            }
        }
        let objects = counted(&dev, "kvplane_tier_objects");
        assert!(objects > 6.0, "{objects} records");
        let listed = bed.place.run(&["ctl", "keys", "--long"]).text();
        for key in 0..6 {
            let name = name(key as u64);
            assert!(listed.lines().any(|line| line.ends_with(&name) && !line.contains(" 40 B")), "{name}: {listed}");
        }
        let mut client = bed.client(Way::Tcp);
        for key in 0..6 {
            assert!(client.remove(name(key).as_bytes()).unwrap(), "object {key}");
            assert_eq!(client.get(name(key).as_bytes()).unwrap(), None);
        }
        let gone = wait_until(|| (counted(&dev, "kvplane_tier_objects") == 0.0).then_some(()));
        assert!(gone.is_some(), "stripes are left: {:?}", dev.said());
    }
}

/// Guard that sets a flag when it is dropped, for any reason.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Connections that break while a large object is put: the reply of the put always holds.
#[test]
fn an_acknowledged_large_put_can_be_read() {
    const LENGTH: usize = (3 << 20) + 5;
    const ROUNDS: u64 = 80;
    if !Command::new("ss").args(["-K", "dport", "=", "1"]).output().is_ok_and(|done| done.status.success()) {
        println!("skipped: ss -K does not end connections here");
        return;
    }
    let bed = Bed::new("cut", &["--ssd-ack", "durable"]);
    let dev = bed.start();
    let port = dev.address("shard 0: ").port();
    let over = AtomicBool::new(false);
    let (mut client, mut other) = (bed.client(Way::Tcp), bed.client(Way::Shm));
    let value = |round: u64| {
        let mut bytes = vec![0; LENGTH];
        pattern::fill(round, 0, &mut bytes);
        bytes
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let words = ["-K", "dst", "127.0.0.1", "dport", "=", &format!(":{port}")];
                drop(Command::new("ss").args(words).output());
            }
        });
        let _ends = Over(&over);
        let (mut well, mut failed) = (0, 0);
        for round in 0..ROUNDS {
            let (key, replace) = (format!("cut-{}", round / 2), round % 2 == 1);
            let options = PutOptions { replace, ..PutOptions::default() };
            match client.put_with(key.as_bytes(), &value(round), &options) {
                Ok(put) => {
                    assert!(matches!(put, Put::Stored(_)), "nobody else puts {key}: round {round}, {put:?}");
                    let got = other.get(key.as_bytes()).unwrap();
                    let got = got.unwrap_or_else(|| panic!("{key} was put, round {round}, and is a miss"));
                    assert!(got == value(round), "{key} has other bytes");
                    well += 1;
                }
                Err(_) => failed += 1,
            }
        }
        println!("{well} puts well, {failed} failed");
        assert!(well > 0, "no put came through");
    });
}

/// There are more concurrent gets than reads that a shard has in flight, all of objects that only the SSD has.
#[test]
fn a_batch_with_more_gets_than_reads_in_flight_completes() {
    const OBJECTS: usize = 2500;
    const BYTES: usize = 4096;
    let bed = Bed::new("batch", &["--ssd-ack", "durable"]);
    let mut dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    let memory = client.register(Region::allocate(&RegionOptions::new("memory", OBJECTS * BYTES)).unwrap());
    let value_of = |key: usize| {
        let mut bytes = vec![0; BYTES];
        pattern::fill(key as u64, 0, &mut bytes);
        bytes
    };
    let items = |memory: &Buffer| -> Vec<(String, Slice)> {
        (0..OBJECTS).map(|key| (name(key as u64), memory.slice(key * BYTES, BYTES))).collect()
    };
    (0..OBJECTS).for_each(|key| memory.region().copy_in(key * BYTES, &value_of(key)));
    for put in client.batch_put_from(&items(&memory)).unwrap() {
        assert!(matches!(put, Ok(Put::Stored(_))), "{put:?}");
    }
    drop(client);
    for way in Way::BOTH {
        dev.kill();
        dev = bed.start();
        recovered(&dev);
        let mut client = bed.client(way);
        let memory = client.register(Region::allocate(&RegionOptions::new("memory", OBJECTS * BYTES)).unwrap());
        for (key, got) in client.batch_get_into(&items(&memory)).unwrap().into_iter().enumerate() {
            assert!(matches!(got, Ok(Some(_))), "object {key} over {}: {got:?}", way.name());
            let mut found = vec![0; BYTES];
            memory.region().copy_out(key * BYTES, &mut found);
            assert!(found == value_of(key), "object {key} over {}", way.name());
        }
    }
}

/// The object is longer than memory, which is 16 MiB: even without a promise of the SSD, it has to be there.
#[test]
fn an_object_longer_than_memory_is_on_the_ssd() {
    let bed = Bed::new("longer", &[]);
    let dev = bed.start();
    let mut bytes = vec![0; 40 << 20];
    pattern::fill(77, 0, &mut bytes);
    for way in Way::BOTH {
        let mut client = bed.client(way);
        let put = client.put_with(b"longer", &bytes, &PutOptions { replace: true, ..PutOptions::default() });
        assert!(matches!(put, Ok(Put::Stored(_))), "{put:?} over {}: {:?}", way.name(), dev.said());
        let got = client.get(b"longer").unwrap();
        assert!(got.is_some_and(|got| got == bytes), "over {}", way.name());
    }
}
