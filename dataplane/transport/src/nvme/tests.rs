//! The driver under a real tier, on real files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvplane_proto::Digest;
use kvplane_proto::ids::{NodeId, ShardId, Version};
use kvplane_sys::{HugePages, Region, RegionOptions};
use kvplane_tier::{
    Ack, Event, Get, Identity, Memory, Miss, OpenOptions, Output, Put, PutError, Span, Tier, TierConfig, Token,
};

use super::*;

const FILE_BYTES: u64 = 48 << 20;
const POOL_BYTES: usize = 16 << 20;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("kvplane-nvme-{name}-{}", std::process::id());
        // Next to the build: a real file system where direct I/O is likely to work.
        Self(std::env::current_exe().expect("a path").with_file_name(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn region(bytes: usize) -> Arc<Region> {
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("nvme-test", bytes) };
    Region::allocate(&options).expect("memory")
}

/// Returns the byte of an object at an offset.
fn pattern(object: u128, at: usize) -> u8 {
    let word = (object as u64).wrapping_add(at as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    (word >> (8 * (at % 8))) as u8
}

fn bytes_of(object: u128, bytes: u32) -> Vec<u8> {
    (0..bytes as usize).map(|at| pattern(object, at)).collect()
}

struct Bed {
    tier: Tier,
    nvme: Nvme,
    pool: Arc<Region>,
    events: Vec<Event>,
}

impl Bed {
    fn open(scratch: &Scratch, polling: bool) -> Self {
        let ssd = Arc::new(Ssd::open(&scratch.0, Some(FILE_BYTES), IoChoice::Uring).expect("a file"));
        Self::over(Part::new(&ssd, 0, 1), polling)
    }

    fn over(part: Part, polling: bool) -> Self {
        let mut config = TierConfig { group_delay_ns: 0, ..TierConfig::for_device(part.bytes(), 4096) };
        config.max_op_bytes = config.max_op_bytes.min(part.offers().command_bytes_most.unwrap_or(u32::MAX));
        let pool = region(POOL_BYTES);
        let memory = TierMemory::new(Arc::clone(&pool), region(config.staging_bytes() as usize));
        let identity = Identity { cluster: 1, node: NodeId(2), shard: ShardId(3) };
        let options = OpenOptions { identity, expected_uuid: None, format_blank: Some(7), tenant_of: |_| 0 };
        let tier = Tier::open(config, options).expect("a tier");
        let nvme = Nvme::with(part, memory, polling).expect("rings");
        let mut bed = Self { tier, nvme, pool, events: Vec::new() };
        assert!(matches!(bed.until(|event| matches!(event, Event::Opened { .. })), Event::Opened { .. }));
        bed
    }

    fn round(&mut self) {
        while let Some(output) = self.tier.poll_output(cpu::monotonic_ns(), self.nvme.memory()) {
            match output {
                Output::Block(op) => self.nvme.start(op),
                Output::Event(event) => self.events.push(event),
            }
        }
        self.nvme.flush().expect("a ring");
        self.nvme.poll().expect("a ring");
        while let Some((id, result)) = self.nvme.poll_done() {
            self.tier.complete(cpu::monotonic_ns(), id, result, self.nvme.memory());
        }
    }

    fn until(&mut self, wanted: impl Fn(&Event) -> bool) -> Event {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(at) = self.events.iter().position(&wanted) {
                return self.events.remove(at);
            }
            self.round();
            assert!(Instant::now() < until, "waited in vain: {:?}, {:?}", self.events, self.nvme.take_problem());
        }
    }

    fn put(&mut self, object: u128, bytes: u32, ack: Ack) -> Event {
        self.pool.copy_in(0, &bytes_of(object, bytes));
        let token = Token(object as u64);
        let put = Put {
            digest: Digest(object),
            key: b"key",
            tenant: 0,
            version: Version(object as u64),
            payload: Span::pool(0, bytes),
            checksum: None,
            pinned: false,
            hits: 0,
            names_parts: false,
            copied: false,
            ack,
            token,
        };
        let until = Instant::now() + Duration::from_secs(60);
        let accepted = loop {
            match self.tier.put(cpu::monotonic_ns(), &put, self.nvme.memory()) {
                Err(PutError::Busy) if Instant::now() < until => self.round(),
                taken => break taken.expect("taken"),
            }
        };
        if accepted.lent {
            self.until(|event| *event == Event::Released { token });
        }
        self.until(|event| match event {
            Event::Stored { token: of, .. } | Event::StoreFailed { token: of, .. } => *of == token,
            _ => false,
        })
    }

    /// Gets an object and checks its bytes.
    fn get(&mut self, object: u128, bytes: u32) -> Result<(), Miss> {
        let token = Token(object as u64);
        self.pool.copy_in(4096, &vec![0; bytes as usize]);
        let destination = Span::pool(4096, bytes);
        let get = Get { digest: Digest(object), destination, priority: Priority::Get, token };
        self.tier.get(&get).expect("known");
        match self.until(|event| matches!(event, Event::Got { .. } | Event::Missed { .. })) {
            Event::Missed { miss, .. } => Err(miss),
            _ => {
                let mut got = vec![0; bytes as usize];
                self.nvme.memory().read(destination, &mut got);
                assert!(got == bytes_of(object, bytes), "wrong bytes of {object}");
                Ok(())
            }
        }
    }
}

const SIZES: [u32; 8] = [1, 4096, 5000, 32 << 10, (32 << 10) + 1, 100_000, 1 << 20, (1 << 20) + 4097];

fn fill(bed: &mut Bed, ack: Ack) {
    for (object, bytes) in SIZES.iter().enumerate() {
        let stored = bed.put(object as u128, *bytes, ack);
        assert_eq!(stored, Event::Stored { token: Token(object as u64), ack });
    }
}

fn there(bed: &mut Bed) {
    for (object, bytes) in SIZES.iter().enumerate() {
        assert_eq!(bed.get(object as u128, *bytes), Ok(()), "object {object}");
    }
}

#[test]
fn objects_survive_an_unclean_restart() {
    let scratch = Scratch::new("restart");
    let mut bed = Bed::open(&scratch, false);
    println!("{:?} {:?}", bed.nvme.part.ssd.remarks(), bed.nvme.remarks());
    fill(&mut bed, Ack::Buffered);
    there(&mut bed);
    drop(bed);
    for _ in 0..3 {
        let mut bed = Bed::open(&scratch, false);
        bed.until(|event| matches!(event, Event::Recovered(_)));
        there(&mut bed);
    }
}

#[test]
fn durable_means_flushed_and_flushes_are_timed() {
    let scratch = Scratch::new("durable");
    let mut bed = Bed::open(&scratch, false);
    let before = bed.nvme.counters().flush_latency.count();
    fill(&mut bed, Ack::Durable);
    let counters = bed.nvme.counters();
    assert!(counters.flush_latency.count() > before && counters.flush_most_ns > 0);
    there(&mut bed);
    let counters = bed.nvme.counters();
    assert!(counters.read_bytes >= u64::from(SIZES.iter().sum::<u32>()), "{counters:?}");
    assert!(counters.get_latency.count() <= counters.reads, "{counters:?}");
    assert!(counters.priorities.iter().all(|priority| priority.failed == 0 && priority.in_flight == 0));
}

#[test]
fn polling_is_disabled_when_the_device_refuses_it() {
    let scratch = Scratch::new("polling");
    let mut bed = Bed::open(&scratch, true);
    fill(&mut bed, Ack::Buffered);
    there(&mut bed);
    let counters = bed.nvme.counters();
    if bed.nvme.rings.is_polling() {
        println!("skipped: the refusal: this device lets completions be polled for ({} were)", counters.polled);
        assert!(counters.polled > 0);
    } else {
        assert!(bed.nvme.remarks().iter().any(|remark| remark.contains("refuses polling")), "{:?}", bed.nvme.remarks());
    }
}

#[test]
fn flipped_bits_on_the_device_are_misses_never_wrong_bytes() {
    use std::os::unix::fs::FileExt;
    let scratch = Scratch::new("flipped");
    let mut bed = Bed::open(&scratch, false);
    fill(&mut bed, Ack::Durable);
    let file = std::fs::File::options().read(true).write(true).open(&scratch.0).expect("the file");
    let wanted = bytes_of(6, 1 << 20);
    let mut whole = vec![0; FILE_BYTES as usize];
    file.read_exact_at(&mut whole, 0).expect("read");
    let at = whole.chunks(4096).position(|block| *block == wanted[8192..12288]).expect("the object's bytes");
    file.write_all_at(&[!wanted[8192]], at as u64 * 4096).expect("written");
    file.sync_all().expect("synced");
    assert_eq!(bed.get(6, 1 << 20), Err(Miss::Damaged));
    assert!(bed.tier.locate(Digest(6)).is_none(), "it is not found again");
    assert_eq!(bed.get(5, 100_000), Ok(()), "the others are whole");
}

#[test]
fn a_truncated_file_causes_errors_not_wrong_bytes() {
    let scratch = Scratch::new("cut");
    let mut bed = Bed::open(&scratch, false);
    fill(&mut bed, Ack::Durable);
    let file = std::fs::File::options().write(true).open(&scratch.0).expect("the file");
    file.set_len(4096).expect("cut");
    assert_eq!(bed.get(6, 1 << 20), Err(Miss::Fault(Fault::Io)));
    let problem = bed.nvme.take_problem().expect("a description");
    assert!(problem.contains("only 0 bytes were moved"), "{problem}");
    assert_eq!(bed.tier.stats().damage.unread, 1);
}

#[test]
fn whole_blocks_use_pinned_memory_and_submissions_are_batched() {
    let scratch = Scratch::new("pinned");
    let mut bed = Bed::open(&scratch, false);
    fill(&mut bed, Ack::Buffered);
    let template = block_op(&mut bed, 6);
    let before = bed.nvme.counters();
    for _ in 0..16 {
        bed.nvme.start(template);
    }
    bed.nvme.flush().expect("a ring");
    let counters = bed.nvme.counters();
    assert_eq!(counters.submissions - before.submissions, 16_u64.div_ceil(AT_A_TIME as u64));
    if bed.nvme.remarks().iter().any(|remark| remark.contains("not pinned")) {
        println!("skipped: pinned memory: {:?}", bed.nvme.remarks());
    } else {
        let pieces = template.pieces.as_slice();
        assert_eq!(counters.pinned - before.pinned, 16, "{pieces:?}");
    }
    while !bed.nvme.is_idle() {
        bed.nvme.poll().expect("a ring");
        while bed.nvme.poll_done().is_some() {}
    }
}

#[test]
fn gets_pass_what_is_queued_before_them() {
    let scratch = Scratch::new("priority");
    let mut bed = Bed::open(&scratch, false);
    fill(&mut bed, Ack::Buffered);
    // Many more background reads than their queue depth, as in a recovery, then one get.
    let template = block_op(&mut bed, 6);
    let depth = DEPTHS[Priority::Background as usize];
    for _ in 0..8 * depth {
        bed.nvme.start(BlockOp { priority: Priority::Background, ..template });
    }
    bed.nvme.start(template);
    bed.nvme.flush().expect("a ring");
    let counters = bed.nvme.counters();
    let (get, background) = (counters.priorities[0], counters.priorities[Priority::Background as usize]);
    assert_eq!((get.in_flight, get.queued), (1, 0));
    assert_eq!((background.in_flight, background.queued), (depth as u64, 7 * depth as u64));
    while !bed.nvme.is_idle() {
        bed.nvme.flush().expect("a ring");
        bed.nvme.poll().expect("a ring");
        while let Some((_, result)) = bed.nvme.poll_done() {
            assert_eq!(result, Ok(template.bytes));
        }
    }
}

/// Returns the operation by which an object is read.
fn block_op(bed: &mut Bed, object: u128) -> BlockOp {
    let get = Get {
        digest: Digest(object),
        destination: Span::pool(4096, SIZES[6]),
        priority: Priority::Get,
        token: Token(0),
    };
    while !bed.tier.is_idle() {
        bed.round();
    }
    bed.tier.get(&get).expect("known");
    match bed.tier.poll_output(cpu::monotonic_ns(), bed.nvme.memory()) {
        Some(Output::Block(op)) => op,
        other => panic!("no operation but {other:?}"),
    }
}

#[test]
fn an_operation_outside_the_part_is_refused() {
    let scratch = Scratch::new("outside");
    let mut bed = Bed::open(&scratch, false);
    fill(&mut bed, Ack::Buffered);
    let op = block_op(&mut bed, 6);
    bed.nvme.start(BlockOp { offset: FILE_BYTES - 4096, ..op });
    assert_eq!(bed.nvme.poll_done(), Some((op.id, Err(Fault::Io))));
    assert!(bed.nvme.take_problem().expect("a description").contains("outside a part"));
    assert!(bed.nvme.end(Duration::from_secs(10)));
}

#[test]
fn kernel_errors_map_to_faults() {
    use kvplane_sys::errno;
    for (error, fault) in [
        (errno::ENOSPC, Fault::NoSpace),
        (errno::EDQUOT, Fault::NoSpace),
        (errno::EROFS, Fault::ReadOnly),
        (errno::EBADF, Fault::ReadOnly),
        (errno::ENODEV, Fault::Gone),
        (errno::EAGAIN, Fault::Io),
        (errno::EOPNOTSUPP, Fault::Io),
    ] {
        assert_eq!(fault_of(&io::Error::from_raw_os_error(error)), fault, "{error}");
    }
}

/// Returns a blank drive of the rig; one test uses it at a time.
fn drive(which: usize) -> Option<(PathBuf, MutexGuard<'static, ()>)> {
    static DRIVES: Mutex<()> = Mutex::new(());
    let alone = DRIVES.lock().unwrap_or_else(PoisonError::into_inner);
    let count = std::env::var("RIG_NVME").ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    if which >= count {
        println!("skipped: {} NVMe drives are needed, there are {count}: see docs/rig.md", which + 1);
        return None;
    }
    let path = PathBuf::from(format!("/dev/rig/d{which}"));
    let mut device = std::fs::File::options().write(true).open(&path).expect("the drive");
    let bytes = std::io::Seek::seek(&mut device, std::io::SeekFrom::End(0)).expect("its length");
    let zeros = vec![0; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        let now = (bytes - at).min(zeros.len() as u64) as usize;
        std::os::unix::fs::FileExt::write_all_at(&device, &zeros[..now], at).expect("wiped");
    }
    device.sync_all().expect("wiped");
    Some((path, alone))
}

/// Puts through one path and gets through all.
fn by_commands(path: &Path) {
    let open = |io| Arc::new(Ssd::open(path, None, io).expect("the drive"));
    for io in [IoChoice::Passthrough, IoChoice::Auto, IoChoice::Uring, IoChoice::Polled] {
        let ssd = open(io);
        println!("{io:?}: {:?}", ssd.remarks());
        let polls = ssd.remarks().concat().contains("completions polled");
        let mut bed = Bed::over(Part::new(&ssd, 1, 2), polls);
        drop(ssd);
        if io == IoChoice::Passthrough {
            fill(&mut bed, Ack::Durable);
        } else {
            bed.until(|event| matches!(event, Event::Recovered(_)));
        }
        there(&mut bed);
        let counters = bed.nvme.counters();
        println!("{:?} {counters:?}", bed.nvme.remarks());
        let commands = matches!(io, IoChoice::Passthrough | IoChoice::Auto);
        assert_eq!((counters.commands > 0, counters.commands_failed), (commands, 0));
        assert_eq!(counters.polled > 0, polls);
        assert!(bed.nvme.remarks().is_empty(), "{:?}", bed.nvme.remarks());
        // While it is claimed it cannot be mounted, and commands go nowhere else.
        assert!(Ssd::open(path, None, io).expect_err("taken").to_string().contains("in use"));
        assert!(bed.nvme.end(Duration::from_secs(10)));
    }
}

#[test]
fn commands_write_what_the_other_paths_read() {
    if let Some((path, _alone)) = drive(0) {
        by_commands(&path);
    }
}

#[test]
fn commands_stay_within_their_partition() {
    let Some((whole, _alone)) = drive(1) else { return };
    let whole = std::fs::canonicalize(whole).expect("the drive");
    // A table of two partitions, in sectors.
    let mut table = vec![0; 512];
    for (at, (start, sectors)) in [(4096_u32, 8192_u32), (16384, (56 << 20) / 512)].into_iter().enumerate() {
        let entry = &mut table[446 + 16 * at..][..16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&start.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    let device = std::fs::File::options().write(true).open(&whole).expect("the drive");
    std::os::unix::fs::FileExt::write_all_at(&device, &table, 0).expect("written");
    device.sync_all().expect("written");
    drop(device);
    let read_again = std::process::Command::new("blockdev").arg("--rereadpt").arg(&whole).status();
    assert!(read_again.expect("blockdev").success());
    let read = |bytes: usize| {
        let mut all = vec![0; bytes];
        let device = std::fs::File::open(&whole).expect("the drive");
        std::os::unix::fs::FileExt::read_exact_at(&device, &mut all, 0).expect("read");
        all
    };
    let before = read(16384 * 512);
    let part = PathBuf::from(format!("{}p2", whole.display()));
    by_commands(&part);
    assert!(read(16384 * 512) == before, "what is before the partition is as it was");
}

#[test]
fn a_drive_that_refuses_a_command_gets_no_more_commands() {
    let Some((path, _alone)) = drive(0) else { return };
    let ssd = Arc::new(Ssd::open(&path, None, IoChoice::Passthrough).expect("the drive"));
    let mut bed = Bed::over(Part::new(&ssd, 0, 1), false);
    fill(&mut bed, Ack::Durable);
    // As on an old kernel: a refused command is retried through io_uring.
    let op = block_op(&mut bed, 6);
    bed.nvme.start(op);
    // Not submitted to the drive, which would execute it.
    let index = bed.nvme.operations.next(op.priority).expect("one waits");
    bed.nvme.operations.issued(op.priority);
    bed.nvme.completed(Completion { token: index as u64, result: -kvplane_sys::errno::EOPNOTSUPP }, RingKind::Commands);
    assert!(bed.nvme.remarks().iter().any(|remark| remark.contains("takes no commands")), "{:?}", bed.nvme.remarks());
    let before = bed.nvme.counters();
    while !bed.nvme.is_idle() {
        bed.nvme.poll().expect("a ring");
        bed.nvme.flush().expect("a ring");
        while let Some((_, result)) = bed.nvme.poll_done() {
            assert_eq!(result, Ok(op.bytes));
        }
    }
    let after = bed.nvme.counters();
    assert_eq!((after.commands_failed, after.commands), (1, before.commands));
}

const EIO: i32 = 5;

/// The kernel reports a lost write once; the write may belong to any part.
#[test]
fn a_failed_flush_of_one_part_fails_the_flushes_of_others() {
    let scratch = Scratch::new("flushes");
    let ssd = Arc::new(Ssd::open(&scratch.0, Some(2 * FILE_BYTES), IoChoice::Uring).expect("a file"));
    let [mut one, mut other] = [0, 1].map(|which| Bed::over(Part::new(&ssd, which, 2), false));
    assert!(matches!(other.put(1, 5000, Ack::Durable), Event::Stored { .. }));
    fill(&mut one, Ack::Buffered);
    let flush = BlockOp { action: Action::Flush, ..block_op(&mut one, 6) };
    assert_eq!(one.nvme.outcome(&flush, -EIO), Err(Fault::Io));
    assert!(matches!(other.put(3, 5000, Ack::Durable), Event::StoreFailed { .. }));
    let problem = other.nvme.take_problem().expect("a problem");
    assert!(problem.contains("an earlier flush of the device failed"), "{problem}");
}
