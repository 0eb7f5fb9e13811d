//! Setup of a ring: the best one that this kernel supports, and advice if it supports none.

use io_uring::{IoUring, cqueue, squeue};
use std::io;
use std::time::{Duration, Instant};

/// Time for which a failed setup is retried while the limit of locked memory is exhausted. The kernel releases the
/// memory of a dead process's rings with a delay, so a process that replaces it may find the limit used up.
const RELEASE_DEADLINE: Duration = Duration::from_secs(2);
const RELEASE_PAUSE: Duration = Duration::from_millis(20);

/// Completion queue entries per submission queue entry.
const COMPLETIONS_PER_SUBMISSION: u32 = 4;

/// Variant of a ring's setup.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    /// Name for logs.
    pub(super) name: &'static str,
    polled: bool,
    submit_all: bool,
}

/// Setups for a ring that several threads use in turn, best first: the operations of one thread must complete while it
/// does something else, without further calls from it.
pub(super) const SHARED_SETUPS: [Setup; 2] = [
    Setup { name: "SUBMIT_ALL", polled: false, submit_all: true },
    Setup { name: "plain", polled: false, submit_all: false },
];

/// Setups for a ring that polls the device for completions instead of waiting for its interrupts, best first.
pub(super) const POLLED_SETUPS: [Setup; 2] = [
    Setup { name: "IOPOLL|SUBMIT_ALL", polled: true, submit_all: true },
    Setup { name: "IOPOLL", polled: true, submit_all: false },
];

/// Builds a ring with the first of these setups that the kernel supports; returns the setup's name too. Sleeps for up
/// to two seconds if locked memory is short.
pub(super) fn build<S, C>(entries: u32, setups: &[Setup]) -> io::Result<(IoUring<S, C>, &'static str)>
where
    S: squeue::EntryMarker,
    C: cqueue::EntryMarker,
{
    for setup in setups {
        let mut builder = IoUring::<S, C>::builder();
        builder.dontfork().setup_clamp();
        builder.setup_cqsize(entries.saturating_mul(COMPLETIONS_PER_SUBMISSION));
        if setup.polled {
            builder.setup_iopoll();
        }
        if setup.submit_all {
            builder.setup_submit_all();
        }
        match released(|| builder.build(entries)) {
            Ok(uring) => return Ok((uring, setup.name)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(explain(&error, entries)),
        }
    }
    Err(explain(&io::Error::from_raw_os_error(libc::EINVAL), entries))
}

/// Returns the result of `make`, retried for [`RELEASE_DEADLINE`] while it fails for lack of memory.
pub(super) fn released<T>(mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + RELEASE_DEADLINE;
    loop {
        match make() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && Instant::now() < deadline => {
                std::thread::sleep(RELEASE_PAUSE);
            }
            made => return made,
        }
    }
}

fn explain(error: &io::Error, entries: u32) -> io::Error {
    let advice = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "it is forbidden here: check sysctl kernel.io_uring_disabled and the container's seccomp profile"
        }
        Some(libc::ENOSYS | libc::EINVAL) => "this kernel lacks it: Linux 5.19 or later is needed",
        Some(libc::ENOMEM) => "not enough lockable memory: raise `ulimit -l`, or use a smaller ring",
        Some(libc::EMFILE | libc::ENFILE) => "too many open files: raise `ulimit -n`",
        _ => "unexpected",
    };
    let text = format!("cannot make an io_uring of {entries} entries: {error}; {advice}");
    io::Error::new(error.kind(), text)
}
