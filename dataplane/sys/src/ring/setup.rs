//! Making the ring itself: the best setup this kernel knows, and advice when it knows none.

use io_uring::{Builder, IoUring};
use std::io;

/// Completion queue entries for each submission queue entry.
const COMPLETIONS_PER_SUBMISSION: u32 = 4;

/// A setup's name for logs, and how to ask for it.
pub(super) type Setup = (&'static str, fn(&mut Builder));

/// How to set a ring up, best first: completions run when this thread asks for them, else when it enters the
/// kernel anyway, else whenever the kernel likes.
pub(super) const SETUPS: [Setup; 3] = [
    ("SINGLE_ISSUER|DEFER_TASKRUN|TASKRUN_FLAG|SUBMIT_ALL", |builder| {
        builder.setup_single_issuer().setup_defer_taskrun();
        builder.setup_taskrun_flag().setup_submit_all();
    }),
    ("COOP_TASKRUN|TASKRUN_FLAG|SUBMIT_ALL", |builder| {
        builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    }),
    ("plain", |_| {}),
];

/// How to set a ring up that several threads use in turn: what one submitted must complete while it does something
/// else, and without being asked by it.
pub(super) const SHARED_SETUPS: [Setup; 2] = [
    ("SUBMIT_ALL", |builder| {
        builder.setup_submit_all();
    }),
    ("plain", |_| {}),
];

/// How to set a ring up whose completions are looked for at the device instead of waiting for its interrupts.
pub(super) const POLLED_SETUPS: [Setup; 2] = [
    ("IOPOLL|SUBMIT_ALL", |builder| {
        builder.setup_iopoll().setup_submit_all();
    }),
    ("IOPOLL", |builder| {
        builder.setup_iopoll();
    }),
];

/// Sets a ring up by the first of these setups that the kernel knows; says which.
pub(super) fn build(entries: u32, setups: &[Setup]) -> io::Result<(IoUring, &'static str)> {
    for &(setup, apply) in setups {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp();
        builder.setup_cqsize(entries.saturating_mul(COMPLETIONS_PER_SUBMISSION));
        apply(&mut builder);
        match builder.build(entries) {
            Ok(uring) => return Ok((uring, setup)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(explain(&error, entries)),
        }
    }
    Err(explain(&io::Error::from_raw_os_error(libc::EINVAL), entries))
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
