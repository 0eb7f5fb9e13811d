//! File segments: ranges of every shape from many threads, mixed with peers, rejected, closed while in flight.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvplane_transfer::{
    Notice, Opcode, Range, Ranges, RegisterOptions, ScatterRequest, SegmentHandle, SubmitOptions, TaskState,
    TransferEngineConfig, TransferRequest,
};

use crate::rig::{Side, TestBytes as _, Way, byte, check, fill, pair, region};

const BYTES: usize = 2 << 20;

/// Unique path beside the test program, where the file system most likely supports direct I/O. Removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("kvplane-{}-{} file", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self(std::env::current_exe().unwrap().with_file_name(name))
    }

    /// Creates a file with bytes that identify their positions.
    fn filled(bytes: usize, seed: u64) -> Self {
        let scratch = Self::new();
        let content: Vec<u8> = (0..bytes as u64).map(|at| byte(seed, at)).collect();
        std::fs::write(&scratch.0, content).unwrap();
        scratch
    }

    fn name(&self, options: &str) -> String {
        format!("file://{}{options}", self.0.display())
    }

    /// Returns the number of descriptors that this process has open on the file.
    fn descriptors(&self) -> usize {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links.filter(|link| std::fs::read_link(link.path()).is_ok_and(|path| path == self.0)).count()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn config(initiators: usize) -> TransferEngineConfig {
    TransferEngineConfig { initiators, ..Way::Tcp.config() }
}

fn run(side: &Side, requests: &[TransferRequest]) -> TaskState {
    let batch = side.engine.submit(requests, &SubmitOptions::default()).unwrap();
    let status = batch.wait();
    assert_eq!(status.state == TaskState::Completed, batch.problem().is_none(), "{:?}", batch.problem());
    status.state
}

/// Returns pieces of odd lengths: neighbors share blocks and belong to different threads.
fn pieces(thread: usize, threads: usize) -> impl Iterator<Item = (usize, usize)> {
    const PIECE: usize = 1499;
    (0..BYTES.div_ceil(PIECE)).filter(move |number| number % threads == thread).map(|number| {
        let start = number * PIECE;
        (start, PIECE.min(BYTES - start))
    })
}

#[test]
fn threads_write_and_read_odd_ranges_of_one_file() {
    const THREADS: usize = 4;
    for (initiators, options) in [(1, ""), (3, ""), (3, "&buffered")] {
        let scratch = Scratch::new();
        let side = Side::new(config(initiators), BYTES);
        let file = side.engine.open_segment(&scratch.name(&format!("?create={BYTES}{options}"))).unwrap();
        fill(&side.region, 0, BYTES, 31);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let side = &side;
                scope.spawn(move || {
                    let requests: Vec<_> = pieces(thread, THREADS)
                        .map(|(at, bytes)| side.request(Opcode::Write, at, (file, at as u64), bytes))
                        .collect();
                    for some in requests.chunks(50) {
                        assert_eq!(run(side, some), TaskState::Completed);
                    }
                });
            }
        });
        side.engine.segments().sync_file(file).unwrap();
        let content = std::fs::read(&scratch.0).unwrap();
        for (at, &found) in content.iter().enumerate() {
            // `fill` counts from the start of the filled range.
            assert_eq!(found, byte(31, at as u64), "byte {at}, {initiators} initiators {options}");
        }
        std::thread::scope(|scope| {
            for thread in 0..THREADS as u64 {
                let (side, mine) = (&side, region(BYTES));
                scope.spawn(move || {
                    side.engine.register(Arc::clone(&mine), &RegisterOptions::default()).unwrap();
                    let mut state = thread + 1;
                    let mut random = move |below: u64| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        (state >> 33) % below
                    };
                    for round in 0..30 {
                        let bytes = 1 + random(if round % 5 == 0 { BYTES as u64 } else { 9000 });
                        let (from, to) = (random(BYTES as u64 - bytes + 1), random(BYTES as u64 - bytes + 1));
                        let read = TransferRequest {
                            opcode: Opcode::Read,
                            source: mine.address() + to,
                            target: file,
                            target_offset: from,
                            length: bytes,
                        };
                        assert_eq!(run(side, &[read]), TaskState::Completed);
                        mine.read_with(to as usize, bytes as usize, &mut |at, part| {
                            for (index, &found) in part.iter().enumerate() {
                                let at = from + at + index as u64;
                                assert_eq!(found, byte(31, at), "byte {at}");
                            }
                        });
                    }
                    side.engine.unregister(mine.address()).unwrap();
                });
            }
        });
    }
}

#[test]
fn a_batch_mixes_files_peers_and_local_memory() {
    const PART: usize = 300_001;
    for way in Way::all() {
        let (a, b, peer) = pair(way, BYTES);
        let (one, two) = (Scratch::filled(BYTES, 32), Scratch::new());
        let one = a.engine.open_segment(&one.name("?readonly")).unwrap();
        let two = a.engine.open_segment(&two.name(&format!("?create={BYTES}"))).unwrap();
        fill(&a.region, 3 * PART, PART, 33);
        fill(&b.region, 0, PART, 34);
        let own = a.region.address() + 5 * PART as u64;
        let requests = [
            a.request(Opcode::Read, 0, (one, 0), PART),
            a.request(Opcode::Read, PART, (peer, b.region.address()), PART),
            a.request(Opcode::Write, 3 * PART, (two, 777), PART),
            a.request(Opcode::Write, 3 * PART, (peer, b.region.address() + PART as u64), PART),
            a.request(Opcode::Write, 3 * PART, (SegmentHandle::LOCAL, own), PART),
        ];
        assert_eq!(run(&a, &requests), TaskState::Completed);
        check(&a.region, 0, PART, 32);
        check(&a.region, PART, PART, 34);
        check(&b.region, PART, PART, 33);
        check(&a.region, 5 * PART, PART, 33);
        assert_eq!(run(&a, &[a.request(Opcode::Read, 0, (two, 777), PART)]), TaskState::Completed);
        check(&a.region, 0, PART, 33);
        // Many ranges of the file, a single result.
        let range =
            |number: u64| Range { source: a.region.address() + 10 * number, target_offset: 4099 * number, length: 10 };
        let list: Vec<Range> = (0..500).map(range).collect();
        let scatter = ScatterRequest { opcode: Opcode::Read, target: one, ranges: Ranges::List(&list) };
        let batch = a.engine.submit_scatter(&[scatter], &SubmitOptions::default()).unwrap();
        assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
        a.region.read_with(0, 5000, &mut |at, part| {
            for (index, &found) in part.iter().enumerate() {
                let at = at + index as u64;
                assert_eq!(found, byte(32, 4099 * (at / 10) + at % 10));
            }
        });
    }
}

#[test]
fn invalid_file_requests_are_rejected_without_effect() {
    let side = Side::new(config(2), BYTES);
    let engine = &side.engine;
    let scratch = Scratch::filled(10_001, 35);
    let file = engine.open_segment(&scratch.name("?readonly")).unwrap();
    let info = engine.segment_info(file).unwrap();
    assert_eq!((info.buffers.len(), info.buffers[0].address, info.buffers[0].bytes), (1, 0, 10_001));
    let found = info.file.unwrap();
    assert_eq!((found.path, found.bytes, found.writable), (scratch.0.clone(), 10_001, false));
    assert!(found.buffered_because.unwrap().contains("10001"), "an odd length goes through the page cache");
    let submit = |request| engine.submit(&[request], &SubmitOptions::default()).map(|batch| batch.wait().state);
    let read = |at: u64, bytes| side.request(Opcode::Read, 0, (file, at), bytes);
    assert_eq!(submit(read(10_000, 1)).unwrap(), TaskState::Completed);
    assert_eq!(submit(read(u64::MAX, 0)).unwrap(), TaskState::Completed);
    for (at, bytes) in [(10_000, 2), (10_001, 1), (u64::MAX, 1), (u64::MAX - 5, 100)] {
        let error = submit(read(at, bytes)).unwrap_err();
        assert!(error.code() == -3 && error.to_string().contains("kvplane-"), "{error}");
    }
    let other = Scratch::new();
    let writable = engine.open_segment(&other.name("?create=8192")).unwrap();
    let good = side.request(Opcode::Write, 0, (writable, 0), 8192);
    fill(&side.region, 0, BYTES, 36);
    let bad = side.request(Opcode::Write, 0, (file, 0), 10);
    let error = engine.submit(&[good, bad], &SubmitOptions::default()).unwrap_err();
    assert!(error.code() == -1 && error.to_string().contains("request 1"), "{error}");
    assert_eq!(std::fs::read(&other.0).unwrap(), [0; 8192], "nothing was done");
    let notice = Notice { name: "n".to_owned(), message: "m".to_owned() };
    assert!(engine.notify(file, &notice).is_err());
    let options = SubmitOptions { notice: Some(notice), ..SubmitOptions::default() };
    assert!(engine.submit(&[read(0, 1)], &options).is_err());
    for handle in [SegmentHandle::LOCAL, SegmentHandle::from_bits(99)] {
        assert_eq!(engine.segments().sync_file(handle).unwrap_err().code(), -1);
    }
    let missing = Scratch::new();
    for name in [missing.name(""), "file:///".to_owned(), "file:///dev/null".to_owned(), scratch.name("?create=x")] {
        let error = engine.open_segment(&name).unwrap_err().to_string();
        assert!(error.contains(name.trim_start_matches("file://")) || name == "file:///", "{error}");
    }
    let off = Side::new(TransferEngineConfig { files: false, ..config(1) }, BYTES);
    assert!(off.engine.open_segment(&scratch.name("?readonly")).is_err());
}

#[test]
fn one_file_is_one_segment_by_whatever_name() {
    let side = Side::new(config(3), BYTES);
    let engine = &side.engine;
    let scratch = Scratch::filled(64 << 10, 37);
    let plain = engine.open_segment(&scratch.name("")).unwrap();
    let link = Scratch::new();
    std::fs::hard_link(&scratch.0, &link.0).unwrap();
    let path = scratch.0.display().to_string().replace(' ', "%20");
    for name in [scratch.name(""), format!("file:{path}"), scratch.name("?create=5"), link.name("")] {
        assert_eq!(engine.open_segment(&name).unwrap(), plain, "{name}");
        engine.close_segment(plain).unwrap();
    }
    assert_eq!(engine.segments().open_no_cache(&scratch.name("")).unwrap(), plain);
    engine.close_segment(plain).unwrap();
    let error = engine.open_segment(&link.name("?buffered")).unwrap_err();
    assert!(error.to_string().contains("open as"), "{error}");
    let readonly = engine.open_segment(&scratch.name("?readonly")).unwrap();
    assert_ne!(readonly, plain, "reading beside is allowed");
    let found = engine.explain(&scratch.name("")).unwrap();
    assert_eq!((found.for_mapped(), found.for_pointers()), (Some("file"), Some("file")), "{found:?}");
    let usable: Vec<_> = found.choices.iter().filter(|one| one.usable).collect();
    assert!(usable.len() == 1 && usable[0].reason.contains("65536"), "{found:?}");
    let missing = Scratch::new();
    assert!(engine.explain(&missing.name("?create=4096")).is_err());
    assert!(!missing.0.exists(), "looking makes no file");
    for handle in [plain, readonly] {
        engine.close_segment(handle).unwrap();
        assert_eq!(engine.segments().sync_file(handle).unwrap_err().code(), -1);
    }
    assert_eq!(scratch.descriptors(), 0, "closed");
    assert_eq!(engine.metrics().rails.len(), 0);
    let buffered = engine.open_segment(&link.name("?buffered")).unwrap();
    let why = engine.segment_info(buffered).unwrap().file.unwrap().buffered_because;
    assert!(why.unwrap().contains("not requested"));
}

#[test]
fn files_are_closed_when_the_last_batch_has_ended() {
    for (initiators, options) in [(1, ""), (3, ""), (3, "?readonly")] {
        let side = Side::new(config(initiators), BYTES);
        for round in 0..20u64 {
            let scratch = Scratch::filled(BYTES, 38 + round);
            let file = side.engine.open_segment(&scratch.name(options)).unwrap();
            let read = side.request(Opcode::Read, 0, (file, 0), BYTES);
            let batch = side.engine.submit(&[read], &SubmitOptions::default()).unwrap();
            side.engine.close_segment(file).unwrap();
            assert_eq!(side.engine.submit(&[read], &SubmitOptions::default()).unwrap_err().code(), -1);
            if round % 2 == 0 {
                batch.cancel();
            }
            let state = batch.wait().state;
            assert!(state == TaskState::Completed || round % 2 == 0 && state == TaskState::Canceled, "{state:?}");
            if state == TaskState::Completed {
                check(&side.region, 0, BYTES, 38 + round);
            }
            assert!(side.engine.segment_info(file).is_err());
            if options == "?readonly" {
                // The other initiators would notice by themselves, later.
                let other = side.engine.open_segment(&Scratch::filled(1, 0).name("")).unwrap();
                side.engine.close_segment(other).unwrap();
            }
            // The thread that completed the batch counts the peer before the caller returns. The batch is kept, the
            // file is not.
            assert_eq!(side.engine.metrics().rails.len(), 0, "round {round}");
            assert_eq!(scratch.descriptors(), 0, "round {round}");
            drop(batch);
        }
    }
}
