//! File segments on real files: every alignment compared with a model, and the ends of files.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::*;

/// Returns the byte that belongs at an offset.
fn pattern(seed: u64, at: u64) -> u8 {
    let word = (at / 8).wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (word >> (8 * (at % 8))) as u8
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("kvplane-file-{name}-{}", std::process::id());
        // Next to the build: a real file system where direct I/O is likely to work.
        Self(std::env::current_exe().expect("a path").with_file_name(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn memory(bytes: usize) -> IoBuf {
    IoBuf::whole(Region::allocate(&RegionOptions::new("file-test", bytes)).expect("memory"))
}

const fn options(bytes: u64) -> FileOptions {
    FileOptions { writable: true, create_bytes: Some(bytes), direct: true }
}

fn run(files: &mut Files, transfers: Vec<FileTransfer>) -> Vec<(u64, Result<(), Status>)> {
    let count = transfers.len();
    transfers.into_iter().for_each(|transfer| files.start(transfer));
    collect(files, count)
}

fn collect(files: &mut Files, count: usize) -> Vec<(u64, Result<(), Status>)> {
    // Far above the usual time, for emulated processors and remote file systems.
    let until = Instant::now() + Duration::from_secs(180);
    let mut ended = Vec::new();
    while ended.len() < count {
        files.flush().expect("a ring");
        files.poll().expect("a ring");
        ended.extend(core::iter::from_fn(|| files.poll_done()));
        assert!(Instant::now() < until, "{} of {count} ended: {:?}", ended.len(), files.take_problem());
    }
    ended
}

#[test]
fn every_alignment_against_a_model() {
    let scratch = Scratch::new("model");
    let bytes = 3 << 20;
    let mut files = Files::new();
    let file = files.open(&scratch.0, options(bytes as u64)).expect("a file");
    if let Err(why) = files.get(file).expect("open").direct() {
        println!("skipped: direct I/O on {}: {why}; tested through the page cache", scratch.0.display());
    }
    let local = memory(2 << 20);
    files.register(local.region());
    let mut model = vec![0u8; bytes];
    let mut seed = 7u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for round in 0..200u64 {
        let length = if random(3) == 0 { 4096 * (1 + random(100)) } else { 1 + random(700_000) };
        let align = |at: u64| if round % 4 == 0 { at / 4096 * 4096 } else { at };
        let at = align(random(bytes as u64 - length));
        let place = align(random((2 << 20) - length));
        let buffer = local.slice(place as usize, length as usize);
        let write = random(2) == 0;
        if write {
            let fresh: Vec<u8> = (at..at + length).map(|at| pattern(round, at)).collect();
            buffer.copy_in(&fresh);
            model[at as usize..(at + length) as usize].copy_from_slice(&fresh);
        }
        let ended =
            run(&mut files, vec![FileTransfer { token: round, file, offset: at, buffer: buffer.clone(), write }]);
        assert_eq!(ended, [(round, Ok(()))], "{:?}", files.take_problem());
        let mut seen = vec![0; length as usize];
        buffer.copy_out(&mut seen);
        assert!(seen == model[at as usize..(at + length) as usize], "round {round}: {length} bytes at {at}");
    }
    files.sync(file).expect("synced");
    assert!(std::fs::read(&scratch.0).expect("readable") == model, "the file holds what was written");
}

#[test]
fn neighbours_that_share_a_block_do_not_undo_each_other() {
    let scratch = Scratch::new("neighbours");
    let bytes = 1u64 << 20;
    let mut files = Files::new();
    let file = files.open(&scratch.0, options(bytes)).expect("a file");
    let local = memory(bytes as usize);
    let whole: Vec<u8> = (0..bytes).map(|at| pattern(3, at)).collect();
    local.copy_in(&whole);
    // Ranges of 1,000 bytes: four or five share each block, and all are in flight at once.
    let transfers: Vec<FileTransfer> = (0..bytes.div_ceil(1000))
        .map(|index| {
            let (at, length) = (index * 1000, 1000.min(bytes - index * 1000));
            let buffer = local.slice(at as usize, length as usize);
            FileTransfer { token: index, file, offset: at, buffer, write: true }
        })
        .collect();
    let ended = run(&mut files, transfers);
    assert!(ended.iter().all(|(_, result)| result.is_ok()), "{:?}", files.take_problem());
    assert!(std::fs::read(&scratch.0).expect("readable") == whole, "all bytes of all neighbours are written");
}

#[test]
fn out_of_range_transfers_are_rejected_and_a_truncated_file_is_an_error() {
    let scratch = Scratch::new("ends");
    let mut files = Files::new();
    let file = files.open(&scratch.0, options(64 << 10)).expect("a file");
    let local = memory(64 << 10);
    let transfer =
        |token, offset, bytes, write| FileTransfer { token, file, offset, buffer: local.slice(0, bytes), write };
    let refused = run(
        &mut files,
        vec![
            transfer(1, 60 << 10, 8192, false),
            transfer(2, u64::MAX - 10, 4096, true),
            transfer(3, 64 << 10, 1, true),
        ],
    );
    assert!(refused.iter().all(|(_, result)| *result == Err(Status::OutOfRange)), "{refused:?}");
    std::fs::OpenOptions::new().write(true).open(&scratch.0).and_then(|file| file.set_len(32 << 10)).expect("shrunk");
    let ended = run(&mut files, vec![transfer(4, 0, 64 << 10, false), transfer(5, 100, 40_000, false)]);
    assert!(ended.iter().all(|(_, result)| *result == Err(Status::OutOfRange)), "a short read is an error: {ended:?}");
    assert!(files.take_problem().expect("a description").contains("ended at"));
    files.close(file);
    assert_eq!(run(&mut files, vec![transfer(6, 0, 4096, false)]), [(6, Err(Status::Stale))]);
    assert!(files.is_idle());
}

#[test]
fn a_read_only_file_is_not_written_and_bad_paths_are_named() {
    let scratch = Scratch::new("read-only");
    std::fs::write(&scratch.0, vec![1u8; 5000]).expect("written");
    let mut files = Files::new();
    let how = FileOptions { writable: false, create_bytes: None, direct: true };
    let file = files.open(&scratch.0, how).expect("a file");
    let why = files.get(file).expect("open").direct().expect_err("5,000 bytes are no whole blocks").to_string();
    assert!(why.contains("5000"), "{why}");
    let local = memory(8192);
    let write = FileTransfer { token: 1, file, offset: 0, buffer: local.slice(0, 10), write: true };
    assert_eq!(run(&mut files, vec![write]), [(1, Err(Status::Unauthorized))]);
    let read = FileTransfer { token: 2, file, offset: 4990, buffer: local.slice(3, 10), write: false };
    assert_eq!(run(&mut files, vec![read]), [(2, Ok(()))]);
    let missing = files.open(Path::new("/nowhere/at/all"), how).expect_err("missing").to_string();
    assert!(missing.contains("/nowhere/at/all"), "{missing}");
    let folder = files.open(&std::env::temp_dir(), how).expect_err("a folder").to_string();
    assert!(folder.contains("neither a regular file"), "{folder}");
}

#[test]
fn cancelled_transfers_end_once_and_leave_memory_alone() {
    let scratch = Scratch::new("cancel");
    let mut files = Files::new();
    let file = files.open(&scratch.0, options(8 << 20)).expect("a file");
    let local = memory(8 << 20);
    for token in 0..200u64 {
        let buffer = local.slice((token as usize * 40_000) % (7 << 20), 40_000);
        files.start(FileTransfer { token, file, offset: token * 37_001, buffer, write: token % 2 == 0 });
    }
    files.cancel(|token| token % 3 == 0);
    let mut ended = collect(&mut files, 200);
    ended.sort_by_key(|(token, _)| *token);
    assert!(ended.iter().enumerate().all(|(index, (token, _))| *token == index as u64), "each ended once");
    assert!(ended.iter().any(|(_, result)| *result == Err(Status::Cancelled)));
    assert!(ended.iter().filter(|(token, _)| token % 3 != 0).all(|(_, result)| result.is_ok()));
    assert!(files.is_idle());
}

/// After `end`, the memory belongs to the caller alone, whatever was in flight.
#[test]
fn end_releases_all_memory() {
    let scratch = Scratch::new("end");
    let bytes = 8 << 20;
    let mut files = Files::new();
    assert!(files.end(Duration::ZERO), "no ring was created");
    for write in [false, true] {
        let mut files = Files::new();
        let file = files.open(&scratch.0, options(bytes as u64)).expect("a file");
        let local = memory(bytes);
        for (token, at) in (0..bytes).step_by(64 << 10).enumerate() {
            let buffer = local.slice(at, 64 << 10);
            files.start(FileTransfer { token: token as u64, file, offset: at as u64, buffer, write });
        }
        files.flush().expect("a ring");
        let until = Instant::now() + Duration::from_secs(20);
        while !files.end(Duration::from_millis(1)) {
            assert!(Instant::now() < until, "the kernel does not let go");
        }
        let word = |at: u64| pattern(99, at);
        local.region().fill_with(0, bytes, &mut |at, part| {
            part.iter_mut().enumerate().for_each(|(i, byte)| *byte = word(at + i as u64));
        });
        std::thread::sleep(Duration::from_millis(5));
        let mut wrong = None;
        local.region().read_with(0, bytes, &mut |at, part| {
            let here = part.iter().enumerate().find(|(i, byte)| **byte != word(at + *i as u64));
            wrong = wrong.or(here.map(|(i, _)| at + i as u64));
        });
        assert_eq!(wrong, None, "written after the end");
        assert_eq!(files.poll_done(), None, "what was under way is not reported");
        drop(files);
        assert_eq!(Arc::strong_count(local.region()), 1);
    }
}
