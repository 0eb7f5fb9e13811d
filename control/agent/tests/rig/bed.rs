//! Hardware of the machine, and an engine whose memory holds bytes that identify their positions.

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane::{
    HugePages, Opcode, Pacing, RdmaConfig, RdmaUse, Region, RegionOptions, RegisterOptions, SegmentHandle,
    SubmitOptions, TaskState, TransferEngine, TransferEngineConfig, TransferRequest,
};

/// Time after which an operation counts as hanging. The processor is emulated, and its host may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Returns the number of devices of a kind that the machine has, by the rig's variable. Without any, reports that the
/// test was skipped.
pub(crate) fn has(variable: &str, what: &str) -> Option<usize> {
    let inside = std::env::var("RIG").is_ok_and(|value| value == "1");
    let count = std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    if inside && count > 0 {
        return Some(count);
    }
    println!("skipped: this machine has no {what}; `cargo x test --rig` runs it in one that does");
    None
}

/// Serializes tests that use drives and cables, which exist once.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unplugs the cable of the first NIC (`down`), or plugs it in again (`up`).
pub(crate) fn cable(state: &str) {
    let status = Command::new("ip").args(["link", "set", "sw0", state]).status().unwrap();
    assert!(status.success(), "ip link set sw0 {state}: {status}");
}

/// Settings of an engine that neither spins nor finds the engines of other tests. It uses no RDMA, which would replace
/// TCP.
pub(crate) fn config() -> TransferEngineConfig {
    let directory = std::env::temp_dir().join(format!("kvplane-rig-{}", std::process::id()));
    TransferEngineConfig {
        runtime_directory: Some(directory),
        pacing: Pacing::Adaptive { window_ns: 20_000 },
        slice_bytes: 64 << 10,
        rdma: RdmaConfig::of(RdmaUse::Never),
        deadline: PATIENCE,
        ..TransferEngineConfig::default()
    }
}

/// Returns the eight bytes that a seed gives for a position.
fn word(seed: u64, at: u64) -> [u8; 8] {
    let mixed = (seed ^ (at / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).to_le_bytes()
}

/// Splits the range from `at` on at word boundaries: the range in the word, the position of the word, and the length.
fn words(at: u64, bytes: usize) -> impl Iterator<Item = (core::ops::Range<usize>, u64, usize)> {
    let mut next = 0;
    core::iter::from_fn(move || {
        let (start, place) = (next, at + next as u64);
        let inside = (place % 8) as usize;
        next = (start + 8 - inside).min(bytes);
        (start < bytes).then_some((start..next, place, inside))
    })
}

/// Allocates memory on a node, or where the kernel chooses.
pub(crate) fn region(bytes: usize, numa_node: Option<u32>) -> Arc<Region> {
    let options = RegionOptions {
        shared: true,
        huge: HugePages::Never,
        prefault: true,
        numa_node,
        ..RegionOptions::new("rig", bytes)
    };
    Region::allocate(&options).unwrap()
}

/// Engine with one registered region.
pub(crate) struct Side {
    pub(crate) engine: TransferEngine,
    pub(crate) region: Arc<Region>,
}

impl Side {
    pub(crate) fn new(config: TransferEngineConfig, region: Arc<Region>) -> Self {
        let engine = TransferEngine::start(config).unwrap();
        engine.register(Arc::clone(&region), &RegisterOptions::default()).unwrap();
        Self { engine, region }
    }

    /// Fills local memory at `place - base` with the bytes that the seed gives for `place`.
    pub(crate) fn fill(&self, base: u64, place: u64, bytes: usize, seed: u64) {
        self.region.fill_with((place - base) as usize, bytes, &mut |at, part| {
            for (range, place, inside) in words(place + at, part.len()) {
                part[range.clone()].copy_from_slice(&word(seed, place)[inside..][..range.len()]);
            }
        });
    }

    /// Panics at the first byte that differs from the seed's.
    pub(crate) fn check(&self, base: u64, place: u64, bytes: usize, seed: u64) {
        self.region.read_with((place - base) as usize, bytes, &mut |at, part| {
            for (range, at, inside) in words(place + at, part.len()) {
                let right = &word(seed, at)[inside..][..range.len()];
                assert_eq!(&part[range], right, "byte {at} of {bytes} from {place}, seed {seed:#x}");
            }
        });
    }

    /// Builds a request between local memory from `local` on and a target.
    pub(crate) fn request(
        &self,
        opcode: Opcode,
        local: u64,
        target: (SegmentHandle, u64),
        bytes: usize,
    ) -> TransferRequest {
        TransferRequest {
            opcode,
            source: self.region.address() + local,
            target: target.0,
            target_offset: target.1,
            length: bytes as u64,
        }
    }

    /// Runs a batch to its end; returns its state and the reason for it.
    pub(crate) fn run(&self, requests: &[TransferRequest], options: &SubmitOptions) -> (TaskState, String) {
        let batch = self.engine.submit(requests, options).unwrap();
        let status = batch.wait_for(2 * PATIENCE).expect("a batch ends at its deadline at the latest");
        (status.state, batch.problem().unwrap_or_default().to_owned())
    }

    /// Runs a batch that has to succeed.
    #[track_caller]
    pub(crate) fn done(&self, requests: &[TransferRequest]) {
        let (state, problem) = self.run(requests, &SubmitOptions::default());
        assert_eq!(state, TaskState::Completed, "{problem}");
    }
}
