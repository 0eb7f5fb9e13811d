//! Making the ring itself: the best setup this kernel knows, and advice when it knows none.

use io_uring::{IoUring, cqueue, squeue};
use std::io;
use std::time::{Duration, Instant};

/// How long a ring that the limit of locked memory has no room for is tried again. The kernel gives back what the rings
/// of a dead process took only some time after its death, so who starts anew in its place may find the limit used up.
const RELEASE_DEADLINE: Duration = Duration::from_secs(2);
const RELEASE_PAUSE: Duration = Duration::from_millis(20);

/// Completion queue entries for each submission queue entry.
const COMPLETIONS_PER_SUBMISSION: u32 = 4;

/// A way to set a ring up.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    /// Its name for logs.
    pub(super) name: &'static str,
    polled: bool,
    submit_all: bool,
}

/// How to set a ring up that several threads use in turn, best first: what one submitted must complete while it does
/// something else, and without being asked by it.
pub(super) const SHARED_SETUPS: [Setup; 2] = [
    Setup { name: "SUBMIT_ALL", polled: false, submit_all: true },
    Setup { name: "plain", polled: false, submit_all: false },
];

/// How to set a ring up whose completions are looked for at the device instead of waiting for its interrupts.
pub(super) const POLLED_SETUPS: [Setup; 2] = [
    Setup { name: "IOPOLL|SUBMIT_ALL", polled: true, submit_all: true },
    Setup { name: "IOPOLL", polled: true, submit_all: false },
];

/// Sets a ring up by the first of these setups that the kernel knows; says which. Waits for up to two seconds, asleep,
/// where locked memory is short.
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

/// What `make` makes, tried again for [`RELEASE_DEADLINE`] while there is no memory for it.
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
