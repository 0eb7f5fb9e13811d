//! Tests of failing disks under a node: full, read-only, unreadable in places, forgetful, with blocks of other sizes.
//! In all cases the node lives, no wrong bytes are read, and the log, the counters and `ctl tier status` show the
//! state.

use std::process::Command;

use kvplane::{Client, Error, PutOptions, Status};

use crate::ssd::disks::{Disk, EIO, ENOSPC, EROFS, Faults, Loop, MappedDevice, SmallFileSystem, run, skipped, wipe};
use crate::ssd::objects::{Bed, counted, is_there, name, recovered, value};
use crate::support::{Process, Way, Workplace, text, wait_until};

const BYTES: u64 = 64 << 20;

fn put(client: &mut Client, keys: std::ops::Range<u64>) {
    for key in keys {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
}

/// Puts objects slowly enough for the disk, so that all are written.
fn put_and_write(client: &mut Client, dev: &Process, keys: std::ops::Range<u64>) {
    for first in keys.clone().step_by(8) {
        put(client, first..keys.end.min(first + 8));
        let written = wait_until(|| (counted(dev, "kvplane_tier_backlog_objects") == 0.0).then_some(()));
        assert!(written.is_some(), "what waits is written");
    }
}

/// Puts objects until nothing is written any more.
fn put_until_alone(client: &mut Client, dev: &Process, mut next: u64) {
    let alone = wait_until(|| {
        put_and_write(client, dev, next..next + 16);
        next += 16;
        (counted(dev, "kvplane_tier_degraded") == 1.0).then_some(())
    });
    assert!(alone.is_some(), "{:?}", dev.said());
}

/// Returns the number of existing objects, over both transports, and asserts their bytes.
fn there(bed: &Bed, keys: std::ops::Range<u64>) -> usize {
    let all = Way::BOTH.map(|way| {
        let mut client = bed.client(way);
        keys.clone().filter(|key| is_there(&mut client, *key)).count()
    });
    all[0].min(all[1])
}

/// Puts lost objects again, and asserts that they exist then.
fn mend(bed: &Bed, keys: std::ops::Range<u64>) {
    let mut client = bed.client(Way::Shm);
    for key in keys {
        if !is_there(&mut client, key) {
            client.put(name(key).as_bytes(), &value(key)).unwrap();
        }
        assert!(is_there(&mut client, key), "object {key}");
    }
}

/// Asserts that log, counters and `ctl tier status` report that only memory is used, and why; memory works.
fn is_alone(bed: &Bed, dev: &Process, why: &str) {
    let degraded = wait_until(|| (counted(dev, "kvplane_tier_degraded") == 1.0).then_some(()));
    assert!(degraded.is_some(), "{:?}", dev.said());
    let line = dev.wait_for("new objects are kept in memory only");
    assert!(line.contains(why), "no {why:?} in {line}");
    let status = wait_until(|| {
        let status = bed.place.run(&["ctl", "tier", "status"]).text();
        (status.contains("degraded, memory only") && status.contains(why)).then_some(())
    });
    assert!(status.is_some(), "no {why:?} in {}", bed.place.run(&["ctl", "tier", "status"]).text());
    let mut client = bed.client(Way::Tcp);
    put(&mut client, 1000..1008);
    assert_eq!(there(bed, 1000..1008), 8);
}

/// Asserts that a replacement of an object on the disk is refused, and changes nothing.
fn refuses_to_replace(client: &mut Client, key: u64) {
    let options = PutOptions { replace: true, ..PutOptions::default() };
    let refused = client.put_with(name(key).as_bytes(), &value(key + 1), &options);
    assert!(matches!(refused, Err(Error::Status { status: Status::NoSpace, .. })), "{refused:?}");
    assert!(is_there(client, key), "object {key} as it was");
}

fn over_disk(name: &str, more: &[&str]) -> Option<(Disk, Bed)> {
    let place = Workplace::new(name);
    let disk = Disk::new(&place.directory, BYTES as usize)?;
    let bed = Bed::over(place, text(&disk.path()), more);
    Some((disk, bed))
}

#[test]
fn a_disk_that_takes_no_more_writes_still_serves_reads() {
    let fails = |writes: Option<i32>, flushes: Option<i32>| Faults { writes, flushes, ..Faults::default() };
    for (faults, why) in [
        (fails(Some(ENOSPC), None), "no space left"),
        (fails(Some(EROFS), None), "takes no writes"),
        (fails(Some(EIO), None), "writes failed in"),
        (fails(None, Some(EIO)), "a flush failed"),
    ] {
        let Some((disk, bed)) = over_disk("nowrites", &["--ssd-ack", "memory", "--ssd-promote", "15"]) else { return };
        let mut dev = bed.start();
        let mut client = bed.client(Way::Tcp);
        // There are more objects than memory holds: the first are on the disk only.
        put_and_write(&mut client, &dev, 0..128);
        disk.set(faults);
        put_until_alone(&mut client, &dev, 10_000);
        assert_eq!(there(&bed, 0..32), 32, "{why}");
        is_alone(&bed, &dev, why);
        refuses_to_replace(&mut client, 1);
        // A removed object is gone now, although a restart may undo that, and the error reports it.
        assert!(client.remove(name(0).as_bytes()).is_err());
        assert!(!is_there(&mut client, 0));
        dev.assert_alive();
        drop(client);
        dev.kill();
        disk.set(Faults::default());
        let dev = bed.start();
        recovered(&dev);
        assert!(there(&bed, 1..32) >= 31, "{why}");
        assert_eq!(counted(&dev, "kvplane_tier_degraded"), 0.0);
    }
}

#[test]
fn ranges_that_cannot_be_read_are_misses_and_can_be_put_again() {
    let Some((disk, bed)) = over_disk("unreadable", &["--ssd-ack", "durable", "--ssd-scrub", "0"]) else { return };
    let mut dev = bed.start();
    put(&mut bed.client(Way::Tcp), 0..64);
    dev.kill();
    let mut dev = bed.start();
    recovered(&dev);
    disk.set(Faults { unreadable: Some(5 << 20..9 << 20), ..Faults::default() });
    // The scrubber finds them before any get.
    bed.place.run(&["ctl", "tier", "verify"]).failed(1, &["records were damaged"]);
    let found = there(&bed, 0..64);
    assert!((1..64).contains(&found), "{found} of 64 are there");
    assert!(counted(&dev, "kvplane_tier_read_faults_total") >= 1.0);
    mend(&bed, 0..64);
    dev.assert_alive();
    // A restart cannot read them either.
    dev.kill();
    let dev = bed.start();
    recovered(&dev);
    mend(&bed, 0..64);
    drop(dev);
}

/// This is how the power failures of `ssd.rs` would show a node that does not flush.
#[test]
fn a_disk_that_lies_about_flushes_loses_objects_and_serves_no_wrong_bytes() {
    let Some((disk, bed)) = over_disk("lies", &["--ssd-ack", "durable"]) else { return };
    let mut dev = bed.start();
    put(&mut bed.client(Way::Tcp), 0..32);
    disk.set(Faults { lies: true, ..Faults::default() });
    put(&mut bed.client(Way::Tcp), 32..64);
    dev.kill();
    assert!(disk.lose_unflushed() > 0);
    let mut dev = bed.start();
    recovered(&dev);
    assert_eq!((there(&bed, 0..32), there(&bed, 32..64)), (32, 0));
    mend(&bed, 0..64);
    dev.assert_alive();
}

#[test]
fn a_block_device_that_ends_early_is_served_up_to_there() {
    let place = Workplace::new("ends");
    let Some(device) = Loop::over(place.path("disk"), BYTES, &[]) else { return };
    let bed = Bed::over(place, &device.device, &["--ssd-ack", "durable", "--ssd-scrub", "0"]);
    let mut dev = bed.start();
    put(&mut bed.client(Way::Tcp), 0..64);
    dev.kill();
    let mut dev = bed.start();
    recovered(&dev);
    device.lose_from(7 << 20);
    let found = there(&bed, 0..64);
    assert!((1..64).contains(&found), "{found} of 64 are there");
    assert!(counted(&dev, "kvplane_tier_read_faults_total") >= 1.0);
    mend(&bed, 0..64);
    dev.assert_alive();
}

/// Failures by the kernel's own devices, where available: `cargo x test --rig --machine disks`.
#[test]
fn a_mapped_device_that_fails_and_forgets() {
    let place = Workplace::new("mapped");
    let drive = std::env::var("RIG_NVME").is_ok_and(|count| count != "0").then(|| "/dev/rig/d0".to_owned());
    let file = if drive.is_none() { Loop::over(place.path("disk"), BYTES, &[]) } else { None };
    let Some(below) = drive.or_else(|| file.as_ref().map(|file| file.device.clone())) else { return };
    wipe(&below);
    let sectors = BYTES / 512;
    let linear = |from: u64, to: u64| format!("{from} {} linear {below} {from}", to - from);
    let whole = linear(0, sectors);
    let Some(mapped) = MappedDevice::new(&whole) else { return };
    let bed = Bed::over(place, &mapped.device, &["--ssd-ack", "durable", "--ssd-scrub", "0"]);
    let mut dev = bed.start();
    put(&mut bed.client(Way::Tcp), 0..32);
    dev.kill();
    let mut dev = bed.start();
    recovered(&dev);
    let (from, to) = (4_096, 12_288);
    mapped.load(&format!("{}\n{from} {} error\n{}", linear(0, from), to - from, linear(to, sectors)));
    let found = there(&bed, 0..32);
    assert!((1..32).contains(&found), "{found} of 32 are there");
    assert!(counted(&dev, "kvplane_tier_read_faults_total") >= 1.0);
    dev.assert_alive();
    // The device acknowledges every write and does none.
    mapped.load(&format!("0 {sectors} flakey {below} 0 0 3600 1 drop_writes"));
    put(&mut bed.client(Way::Tcp), 100..116);
    dev.kill();
    mapped.load(&whole);
    let mut dev = bed.start();
    recovered(&dev);
    there(&bed, 0..32);
    mend(&bed, 0..32);
    mend(&bed, 100..116);
    dev.assert_alive();
}

#[test]
fn a_disk_whose_superblocks_cannot_be_read_leaves_memory() {
    let Some((disk, bed)) = over_disk("dead", &["--ssd-ack", "memory"]) else { return };
    let mut dev = bed.start();
    put_and_write(&mut bed.client(Way::Tcp), &dev, 0..16);
    assert!(dev.stop().success());
    disk.set(Faults { unreadable: Some(0..BYTES), ..Faults::default() });
    let mut dev = bed.start();
    is_alone(&bed, &dev, "both superblocks of the device");
    // The commands do not wait for an order that can never be done.
    for order in [&["verify"][..], &["verify", "--detach"], &["reclaim", "--free", "30"]] {
        bed.place.run(&[&["ctl", "tier"][..], order].concat()).failed(1, &["degraded, memory only"]);
    }
    bed.place.run(&["ctl", "tier", "verify", "--node", "99"]).failed(1, &["node 99 is not known, or has no SSD"]);
    bed.place.run(&["ctl", "tier", "status", "--node", "99"]).failed(1, &["node 99 is not known, or has no SSD"]);
    assert_eq!(there(&bed, 0..16), 0);
    dev.kill();
    disk.set(Faults::default());
    let dev = bed.start();
    recovered(&dev);
    // The incarnation before served without the disk: it may have removed and replaced objects on it.
    assert_eq!(there(&bed, 0..16), 0);
    put_and_write(&mut bed.client(Way::Tcp), &dev, 0..16);
    assert_eq!(there(&bed, 0..16), 16);
}

#[test]
fn a_disk_that_loses_acknowledged_writes_is_detected() {
    let Some((disk, bed)) = over_disk("forgets", &["--ssd-ack", "buffered", "--ssd-promote", "15"]) else { return };
    let mut dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    put(&mut client, 0..16);
    disk.set(Faults { lost: Some(6 << 20), ..Faults::default() });
    // There are more objects than memory holds.
    put(&mut client, 16..160);
    let found = there(&bed, 0..160);
    assert!((16..160).contains(&found), "{found} of 160 are there");
    let told: f64 = ["damaged", "stale", "misdirected"]
        .iter()
        .map(|kind| counted(&dev, &format!("kvplane_tier_{kind}_total")))
        .sum();
    assert!(told >= 1.0);
    disk.set(Faults::default());
    dev.kill();
    let mut dev = bed.start();
    recovered(&dev);
    mend(&bed, 0..64);
    dev.assert_alive();
}

#[test]
fn devices_that_are_read_only_are_served_as_they_are() {
    let place = Workplace::new("readonly");
    let file = place.path("disk");
    let Some(blank) = Loop::over(file.clone(), BYTES, &["--read-only"]) else { return };
    let blank_bed = Bed::over(Workplace::new("blank"), &blank.device, &[]);
    let mut dev = blank_bed.start();
    assert!(dev.said().iter().any(|line| line.contains("is read-only")), "{:?}", dev.said());
    is_alone(&blank_bed, &dev, "takes no writes");
    let mut client = blank_bed.client(Way::Shm);
    assert!(client.remove(name(1000).as_bytes()).unwrap(), "nothing is on the device that could come back");
    assert!(!is_there(&mut client, 1000));
    dev.assert_alive();
    drop((client, dev, blank));

    let written = Loop::over(file.clone(), BYTES, &[]).unwrap();
    let bed = Bed::over(place, &written.device, &["--ssd-ack", "durable"]);
    let mut dev = bed.start();
    put(&mut bed.client(Way::Tcp), 0..32);
    dev.kill();
    drop(written);
    let read = Loop::over(file, BYTES, &["--read-only"]).unwrap();
    let bed = Bed::over(bed.place, &read.device, &[]);
    let dev = bed.start();
    recovered(&dev);
    assert_eq!(there(&bed, 0..32), 32);
    is_alone(&bed, &dev, "takes no writes");
    refuses_to_replace(&mut bed.client(Way::Tcp), 1);
}

#[test]
fn a_full_file_system_is_reported_at_start_or_later() {
    let place = Workplace::new("small");
    let Some(small) = SmallFileSystem::new(&place.directory, 64 << 20) else { return };
    let file = small.directory.join("ssd");
    let refused = |words: &[&str], why: &[&str]| place.run(&[&["dev", "--pool", "16M"], words].concat()).failed(1, why);
    let ssd = format!("{}:500M", text(&file));
    refused(&["--shards", "1", "--ssd", &ssd], &["no space for 524288000 bytes"]);
    assert!(!file.exists(), "nothing is left");
    // A sparse file has its full length, but no space on the file system.
    std::fs::File::create(&file).unwrap().set_len(128 << 20).unwrap();
    let bed = Bed::over(place, text(&file), &["--ssd-promote", "15"]);
    let mut dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    put_until_alone(&mut client, &dev, 0);
    is_alone(&bed, &dev, "no space left");
    assert!(there(&bed, 0..64) > 16, "what was written is served");
    drop(client);
    dev.kill();
    // The same file on a file system that became read-only. The kernel releases a process's I/O in flight shortly after
    // its death.
    let remounted = wait_until(|| run("mount", &["-o", "remount,ro", text(&small.directory)]).ok());
    assert!(remounted.is_some());
    let dev = bed.start();
    recovered(&dev);
    assert!(there(&bed, 0..64) > 8, "what was written is served");
    is_alone(&bed, &dev, "takes no writes");
}

#[test]
fn a_limit_of_file_sizes_is_reported_and_not_fatal() {
    let place = Workplace::new("limit");
    let file = place.path("ssd");
    let ssd = format!("{}:64M", text(&file));
    if let Err(why) = run("prlimit", &["--version"]) {
        skipped::<()>("a limit of file sizes", &why);
        return;
    }
    let plain = place.command(&["dev", "--pool", "16M", "--shards", "1", "--ssd", &ssd]);
    let mut limited = Command::new("prlimit");
    limited.arg("--fsize=33554432").arg(plain.get_program()).args(plain.get_args());
    limited.env("XDG_RUNTIME_DIR", &place.directory);
    crate::support::finish(limited, &[]).failed(1, &["above the limit of file sizes, 33554432"]);
    assert!(!file.exists(), "nothing is left");
}

/// Asserts that all objects survive a kill.
fn keeps(bed: &Bed, start: impl Fn() -> Process) -> Process {
    let mut dev = start();
    put(&mut bed.client(Way::Tcp), 0..64);
    dev.kill();
    let dev = start();
    recovered(&dev);
    assert_eq!(there(bed, 0..64), 64);
    dev
}

#[test]
fn blocks_of_512_and_of_4096_bytes_will_do() {
    for sector in ["512", "4096"] {
        let place = Workplace::new("sectors");
        let Some(device) = Loop::over(place.path("disk"), BYTES, &["--sector-size", sector]) else { return };
        let bed = Bed::over(place, &device.device, &["--ssd-ack", "durable"]);
        let dev = keeps(&bed, || bed.start());
        assert!(dev.said().iter().any(|line| line.contains("direct I/O")), "{:?}", dev.said());
    }
}

#[test]
fn a_small_limit_of_locked_memory_is_reported_and_not_fatal() {
    // Room for two rings: the kernel gives up that of a killed process a little later, and the next one starts at once.
    let able = ["--bounding-set=-ipc_lock", "prlimit", "--memlock=262144", "true"];
    if let Err(why) = run("setpriv", &able) {
        skipped::<()>("a small limit of locked memory", &why);
        return;
    }
    let bed = Bed::new("memlock", &["--ssd-ack", "buffered"]);
    let dev = keeps(&bed, || {
        let plain = bed.place.command(&[&["dev", "--pool", "16M"], &bed.words()[..]].concat());
        let mut command = Command::new("setpriv");
        command.args(&able[..3]).arg(plain.get_program()).args(plain.get_args());
        command.env("XDG_RUNTIME_DIR", &bed.place.directory);
        let dev = Process::start(command);
        dev.wait_for("ready:");
        dev
    });
    assert!(dev.said().iter().any(|line| line.contains("not pinned")), "{:?}", dev.said());
}
