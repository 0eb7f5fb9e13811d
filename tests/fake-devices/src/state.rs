//! State of the driver in one process: contexts, streams, pinned ranges, injected errors, counters.

use crate::engines::Engines;
use crate::memory::Memory;
use crate::streams::{Event, Stream};
use crate::virtual_memory::Physical;
use libc::c_int;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const ALREADY_MAPPED: i32 = 208;
pub(crate) const ALREADY_REGISTERED: i32 = 712;
pub(crate) const NOT_REGISTERED: i32 = 713;
const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_IMPLICIT: i32 = 906;
const CAPTURE_RELAXED: c_int = 2;

/// Settings that a test changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Longest random delay before a copy, in nanoseconds.
    pub(crate) delay_ns: u64,
    /// Rate of each copy engine, in bytes per second; 0 for no limit.
    pub(crate) rate: u64,
    /// Seed of the delays.
    pub(crate) seed: u64,
}

/// Everything of one process but the streams' own queues.
pub(crate) struct State {
    pub(crate) initialized: bool,
    pub(crate) memory: Memory,
    /// Retained references of each device's primary context.
    pub(crate) retained: Vec<usize>,
    /// Code that every call of a lost device returns.
    pub(crate) lost: Vec<i32>,
    pub(crate) streams: HashMap<u64, Arc<Stream>>,
    pub(crate) events: HashMap<u64, Arc<Event>>,
    /// Pinned ranges of host memory: length by address.
    pub(crate) pinned: BTreeMap<u64, u64>,
    pub(crate) next_handle: u64,
    /// Physical allocations of the virtual-memory interface.
    pub(crate) physical: HashMap<u64, Physical>,
    /// Types of handles of allocations, if these are mappings of that interface.
    pub(crate) is_virtual: Option<c_int>,
    /// Errors to return: function, number of calls to let pass, code.
    pub(crate) injected: Vec<(String, u64, i32)>,
    pub(crate) settings: Settings,
    pub(crate) engines: Engines,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    /// Calls without a current context.
    pub(crate) without_context: u64,
    /// Copies from or to host memory that is not pinned.
    pub(crate) unpinned: u64,
    pub(crate) copied_bytes: u64,
    /// Ways of flushing a NIC's writes: `CUflushGPUDirectRDMAWritesOptions`.
    pub(crate) flush_options: c_int,
    /// Stream that is being captured into a graph.
    pub(crate) captured: Option<u64>,
    /// Calls that have ended a capture.
    pub(crate) captures_ended: u64,
}

/// Calls that a capture forbids to threads that did not say otherwise.
const FORBIDDEN: [&str; 5] =
    ["cuEventQuery", "cuStreamSynchronize", "cuMemAlloc_v2", "cuMemHostRegister_v2", "cuMemHostUnregister"];

/// Number of devices: `KVPLANE_FAKE_DEVICES`, or 2.
fn devices() -> usize {
    std::env::var("KVPLANE_FAKE_DEVICES").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    let devices = devices();
    Mutex::new(State {
        initialized: false,
        memory: Memory::new(devices),
        retained: vec![0; devices],
        lost: vec![SUCCESS; devices],
        streams: HashMap::new(),
        events: HashMap::new(),
        pinned: BTreeMap::new(),
        next_handle: 0x1000,
        physical: HashMap::new(),
        is_virtual: None,
        injected: Vec::new(),
        settings: Settings { delay_ns: 200_000, rate: 0, seed: 1 },
        engines: Engines::default(),
        counts: BTreeMap::new(),
        without_context: 0,
        unpinned: 0,
        copied_bytes: 0,
        flush_options: 1,
        captured: None,
        captures_ended: 0,
    })
});

thread_local! {
    /// Mode of this thread for captures: `CUstreamCaptureMode`.
    pub(crate) static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
    /// Contexts that are current on this thread, the innermost last: device numbers.
    pub(crate) static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Process that first called the driver.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns the state.
pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a call: counts it, aborts in a forked child, and returns the state, or the code of an injected error.
pub(crate) fn call(name: &'static str) -> Result<MutexGuard<'static, State>, i32> {
    let pid = std::process::id();
    let owner = OWNER.compare_exchange(0, pid, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|owner| owner);
    if owner != 0 && owner != pid {
        // A real driver answers so; no other call may follow.
        if name == "cuInit" {
            return Err(NOT_INITIALIZED);
        }
        eprintln!("fake-devices: {name} in a forked child");
        std::process::abort();
    }
    let mut state = state();
    *state.counts.entry(name).or_default() += 1;
    if let Some(index) = state.injected.iter().position(|(function, ..)| function == name) {
        let (_, passes, code) = &mut state.injected[index];
        if *passes == 0 {
            let code = *code;
            state.injected.remove(index);
            return Err(code);
        }
        *passes -= 1;
    }
    if state.captured.is_some() && CAPTURE_MODE.get() != CAPTURE_RELAXED && FORBIDDEN.contains(&name) {
        state.captures_ended += 1;
        return Err(CAPTURE_UNSUPPORTED);
    }
    if name != "cuInit" && !state.initialized { Err(NOT_INITIALIZED) } else { Ok(state) }
}

/// Begins a call that needs a current context; returns the number of its device, too.
pub(crate) fn call_in_context(name: &'static str) -> Result<(MutexGuard<'static, State>, usize), i32> {
    let mut state = call(name)?;
    let Some(device) = CURRENT.with_borrow(|current| current.last().copied()) else {
        state.without_context += 1;
        return Err(INVALID_CONTEXT);
    };
    match state.lost[device] {
        SUCCESS => Ok((state, device)),
        code => Err(code),
    }
}

impl State {
    /// Returns a handle that was never used.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }

    /// Returns true if the host range is pinned as a whole.
    pub(crate) fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        self.pinned.range(..=address).next_back().is_some_and(|(&at, &length)| address + bytes <= at + length)
    }
}
