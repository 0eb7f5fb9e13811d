//! Drives as file segments: local ones, and those that the kernel attached over TCP and RDMA.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kvplane::{Opcode, SubmitOptions, TaskState, TransferEngineConfig};

use crate::bed::{PATIENCE, Side, alone, config, has, region};
use crate::sysfs::{Drive, drives};

/// Number of bytes of a drive that are written.
const BYTES: usize = 2 << 20;

fn side() -> Side {
    Side::new(config(), region(BYTES, None))
}

/// Returns all drives of the rig; none outside of it.
fn all() -> Vec<Drive> {
    let Some(count) = has("RIG_NVME", "NVMe drives") else { return Vec::new() };
    let fabrics = std::env::var("RIG_NVMET").is_ok_and(|transport| !transport.is_empty());
    let found = drives();
    assert_eq!(found.len(), if fabrics { 2 * count } else { count }, "{found:?}");
    found
}

/// Returns the drives that a target exports, each with the drive behind it.
fn exported() -> Vec<(Drive, Drive)> {
    let (local, remote): (Vec<Drive>, Vec<Drive>) = all().into_iter().partition(Drive::is_local);
    if remote.is_empty() {
        println!("skipped: no drive is attached over fabrics; the machines nvme-tcp and nvme-rdma have one");
    }
    let behind = |drive: &Drive| local.iter().find(|one| one.number == drive.number).unwrap().clone();
    remote.into_iter().map(|drive| (drive.clone(), behind(&drive))).collect()
}

/// Returns ranges of odd lengths, few of which begin or end at a block boundary.
fn pieces(length: usize) -> impl Iterator<Item = (u64, usize)> {
    (0..BYTES).step_by(length).map(move |start| (start as u64, length.min(BYTES - start)))
}

#[test]
fn ranges_of_every_shape_are_written_and_read_back() {
    let _turn = alone();
    for (seed, drive) in (100..).zip(all()) {
        for initiators in [1, 2] {
            let side = Side::new(TransferEngineConfig { initiators, ..config() }, region(BYTES, None));
            let segment = side.engine.open_segment(&drive.name()).unwrap();
            let info = side.engine.segment_info(segment).unwrap().file.unwrap();
            assert_eq!((info.bytes, info.writable), (64 << 20, true), "{drive:?}");
            assert_eq!(info.buffered_because, None, "direct I/O on {drive:?}");
            let seed = seed * 10 + initiators as u64;
            side.fill(0, 0, BYTES, seed);
            let write = |(at, bytes)| side.request(Opcode::Write, at, (segment, at), bytes);
            let requests: Vec<_> = pieces(77_777).map(write).collect();
            requests.chunks(40).for_each(|some| side.done(some));
            side.engine.segments().sync_file(segment).unwrap();
            for length in [4096, 99_991, BYTES] {
                side.fill(0, 0, BYTES, !seed);
                let read = |(at, bytes)| side.request(Opcode::Read, at, (segment, at), bytes);
                let requests: Vec<_> = pieces(length).map(read).collect();
                requests.chunks(500).for_each(|some| side.done(some));
                side.check(0, 0, BYTES, seed);
            }
            side.engine.close_segment(segment).unwrap();
        }
        println!("{} over {}", drive.path.display(), drive.transport);
    }
}

#[test]
fn writes_over_fabrics_reach_the_drive_behind_the_target() {
    let _turn = alone();
    for (seed, (remote, local)) in (200..).zip(exported()) {
        for (seed, from, to) in [(2 * seed, &remote, &local), (2 * seed + 1, &local, &remote)] {
            let side = side();
            let [from, to] = [from, to].map(|drive| side.engine.open_segment(&drive.name()).unwrap());
            // Near the end of a drive, the length of its segment matters.
            let base = (64 << 20) - BYTES as u64;
            side.fill(base, base, BYTES, seed);
            side.done(&[side.request(Opcode::Write, 0, (from, base), BYTES)]);
            side.engine.segments().sync_file(from).unwrap();
            side.fill(base, base, BYTES, !seed);
            side.done(&[side.request(Opcode::Read, 0, (to, base), BYTES)]);
            side.check(base, base, BYTES, seed);
            let beyond = side.request(Opcode::Read, 0, (to, base + 1), BYTES);
            let error = side.engine.submit(&[beyond], &SubmitOptions::default()).unwrap_err();
            assert_eq!(error.code(), -3, "{error}");
        }
    }
}

#[test]
fn a_detached_drive_fails_its_batches_only() {
    let _turn = alone();
    for (remote, local) in exported() {
        let side = side();
        let [gone, stays] = [&remote, &local].map(|drive| side.engine.open_segment(&drive.name()).unwrap());
        let address = remote.says("address");
        side.fill(0, 0, BYTES, 7);
        side.done(&[side.request(Opcode::Write, 0, (stays, 0), BYTES)]);
        let options = SubmitOptions { background: true, ..SubmitOptions::default() };
        let read = |(at, bytes)| side.request(Opcode::Read, at, (gone, at), bytes);
        let requests: Vec<_> = pieces(65_536).map(read).collect();
        let batches: Vec<_> = (0..8).map(|_| side.engine.submit(&requests, &options).unwrap()).collect();
        fs::write(remote.controller.join("delete_controller"), "1").unwrap();
        for batch in &batches {
            let status = batch.wait_for(PATIENCE).expect("it ends with its drive");
            assert!(matches!(status.state, TaskState::Completed | TaskState::Failed), "{status:?}");
        }
        let (state, problem) = side.run(&requests[..1], &SubmitOptions::default());
        assert_eq!(state, TaskState::Failed, "there is no drive any more: {problem}");
        side.done(&[side.request(Opcode::Read, 0, (stays, 0), BYTES)]);
        side.check(0, 0, BYTES, 7);
        side.engine.close_segment(gone).unwrap();
        let again = attach(&remote, &address);
        let back = side.engine.open_segment(&again.name()).unwrap();
        side.fill(0, 0, BYTES, 8);
        side.done(&[side.request(Opcode::Read, 0, (back, 0), BYTES)]);
        side.check(0, 0, BYTES, 7);
    }
}

/// Connects to a target again, like `nvme connect`.
fn attach(drive: &Drive, address: &str) -> Drive {
    let kept = |part: &&str| ["traddr=", "trsvcid=", "host_traddr="].iter().any(|name| part.starts_with(name));
    let address: Vec<&str> = address.split(',').filter(kept).collect();
    let name = format!("nqn.2024-01.rig:d{}", drive.number);
    let options = format!("nqn={name},transport={},{}", drive.transport, address.join(","));
    // A target may need a moment to release the former connection.
    let start = Instant::now();
    while let Err(error) = fs::write("/dev/nvme-fabrics", &options) {
        assert!(start.elapsed() < PATIENCE, "{options}: {error}");
        std::thread::sleep(Duration::from_millis(100));
    }
    loop {
        let found = drives().into_iter().find(|one| !one.is_local() && one.number == drive.number);
        if let Some(found) = found.filter(|found| Path::exists(&found.path)) {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "no drive appeared for {options}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
