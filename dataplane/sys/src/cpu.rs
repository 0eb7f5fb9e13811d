//! CPU cores, clocks, NUMA nodes and process identity.
//!
//! Only hosts call this; pure code gets time as an argument.

use crate::region::PAGE_BYTES;
use std::fmt;
use std::fs;
use std::io;
use std::mem::{MaybeUninit, size_of};

/// Error: a thread could not be pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinError {
    /// Requested core.
    pub core: usize,
    /// Cores on which this thread may run.
    pub allowed: Vec<usize>,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { core, allowed } = self;
        write!(f, "cannot pin a thread to core {core}: it may run on cores {allowed:?}")
    }
}

impl std::error::Error for PinError {}

/// Pins the calling thread to one core. Afterwards [`allowed_cores`] returns only that core, for this thread and the
/// threads that it starts: enumerate first.
pub fn pin_current_thread(core: usize) -> Result<(), PinError> {
    if core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        return Ok(());
    }
    Err(PinError { core, allowed: allowed_cores() })
}

/// Returns the cores on which the calling thread may run, ascending; never empty.
pub fn allowed_cores() -> Vec<usize> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the kernel writes at most the size of the set; 0 is the calling thread.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr()) };
    if result != 0 {
        // A machine of more than 1024 cores: take the number that the scheduler allows, counted from zero.
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    }
    // SAFETY: all-zero is valid, and so is what the kernel wrote over it.
    let set = unsafe { set.assume_init() };
    let limit = size_of::<libc::cpu_set_t>() * 8;
    // SAFETY: every index is below the number of bits in the set.
    (0..limit).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills a structure of this function.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    assert_eq!(result, 0, "clock {clock} exists since Linux 2.6.12");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns nanoseconds since a fixed point; monotonic, and the same for all processes until the next boot.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Returns the CPU time of this process, in nanoseconds.
pub fn process_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns the CPU time of the calling thread, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Returns the number of involuntary context switches of the calling thread; 0 if the kernel does not report it.
/// Interrupts do not count.
pub fn preemptions() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills a structure of this function; all zeroes are valid too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    u64::try_from(usage.ru_nivcsw).unwrap_or(0)
}

/// Signals a spin loop to the core, so that its sibling thread runs faster.
pub fn pause() {
    std::hint::spin_loop();
}

/// Returns the effective user id of this process.
pub fn effective_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() }
}

/// Returns the id of this boot of this machine: two processes with the same id run on the same machine.
pub fn boot_id() -> io::Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot read {path}: {error}"))),
    }
}

/// Returns the NUMA node of the page at this address of this process; `None` if the page is not in memory yet, or the
/// kernel does not report it.
#[must_use]
pub fn node_of(address: u64) -> Option<u32> {
    let page = std::ptr::without_provenance::<libc::c_void>(address as usize & !(PAGE_BYTES - 1));
    let mut node = libc::c_int::MIN;
    let (pages, nowhere) = (1 as libc::c_ulong, std::ptr::null::<libc::c_int>());
    // SAFETY: without target nodes the kernel moves no page: it looks up the one page, at whatever address, and writes
    // one number.
    let result = unsafe { libc::syscall(libc::SYS_move_pages, 0, pages, &raw const page, nowhere, &raw mut node, 0) };
    match result {
        0 => u32::try_from(node).ok(),
        // Containers often forbid the call; on a machine with one node its number is the answer nevertheless.
        _ => fs::read_to_string("/sys/devices/system/node/online").ok()?.trim().parse().ok(),
    }
}

/// Raises the limit of locked memory as far as this process may, and returns it in bytes; `u64::MAX` means unlimited.
pub fn raise_memlock_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills a structure of this function.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let attempts = [libc::RLIM_INFINITY, limit.rlim_max];
    for hard in attempts {
        let wanted = libc::rlimit { rlim_cur: hard, rlim_max: hard };
        // SAFETY: the kernel reads a structure of this function.
        if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const wanted) } == 0 {
            return Ok(hard);
        }
    }
    // Neither attempt was allowed: the current limit stays.
    Ok(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_a_thread_and_only_that_thread() {
        let before = allowed_cores();
        let wanted = *before.last().expect("at least one core");
        let inside = std::thread::spawn(move || {
            pin_current_thread(wanted).expect("an allowed core");
            allowed_cores()
        });
        assert_eq!(inside.join().expect("joined"), [wanted]);
        assert_eq!(allowed_cores(), before);
        let error = pin_current_thread(1023).map_err(|error| error.allowed);
        assert!(before.contains(&1023) || error == Err(before));
    }

    #[test]
    fn clocks_count_nanoseconds_upwards() {
        let wall = std::time::Instant::now();
        let (start, process, thread) = (monotonic_ns(), process_cpu_ns(), thread_cpu_ns());
        let mut spins = 0u64;
        while thread_cpu_ns() - thread < 2_000_000 {
            pause();
            spins += 1;
        }
        let passed = monotonic_ns() - start;
        assert!(spins > 0 && process_cpu_ns() - process >= 2_000_000);
        assert!(u128::from(passed) <= wall.elapsed().as_nanos());
    }

    #[test]
    fn counts_involuntary_context_switches() {
        // Two spinning threads that compete for one core.
        let core = allowed_cores()[0];
        let spin = move || {
            pin_current_thread(core).expect("a core of ours");
            let before = preemptions();
            let start = monotonic_ns();
            while monotonic_ns() - start < 100_000_000 {
                pause();
            }
            preemptions() - before
        };
        let other = std::thread::spawn(spin);
        assert!(std::thread::spawn(spin).join().expect("a thread") + other.join().expect("a thread") > 0);
    }

    #[test]
    fn finds_the_node_of_a_page() {
        let memory = vec![7u8; 1 << 20];
        let online = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
        match node_of(memory.as_ptr().addr() as u64 + 5000) {
            // One node, a list, or a range of them: the last number is the largest.
            Some(node) => {
                let last = online.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<u32>().ok());
                assert!(last.is_none_or(|last| node <= last), "node {node} of {online}");
            }
            None => println!("skipped: this kernel does not say on which node memory is"),
        }
        assert_eq!(memory[5000], 7);
    }

    #[test]
    fn names_this_boot_and_raises_the_limit() {
        let boot = boot_id().expect("boot id");
        assert_eq!((boot.len(), boot == boot_id().expect("boot id")), (36, true));
        let limit = raise_memlock_limit().expect("limit");
        assert_eq!(raise_memlock_limit().expect("limit"), limit);
    }
}
