//! Diagnostic exit on SIGBUS: a process that touches mapped pages which its file has lost names the file before it
//! exits.
//!
//! Truncating a file removes its pages from every mapping, and touching one of them raises SIGBUS, which kills the
//! process without a message. Truncation cannot be prevented, and the thread that touched the page cannot continue
//! without it; so the process still exits, but with a message that names the file. A disk read error has the same
//! effect.
//!
//! The handler calls only `write` and `_exit`, which are async-signal-safe. Its messages are prepared in advance. A
//! SIGBUS in other memory is passed to the previous handler.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::region::Region;

/// Exit status of the process: the general failure status.
const STATUS: libc::c_int = 1;

/// Watched memory and its message. It stays mapped: its address is never reused.
struct WatchedMemory {
    region: Arc<Region>,
    words: String,
    /// Rest of the list: entries added before.
    next: *mut Self,
}

/// List that only grows, so that the handler may walk it at any time.
static KNOWN: AtomicPtr<WatchedMemory> = AtomicPtr::new(std::ptr::null_mut());

/// Previous signal action; written once, before the handler is installed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// True once the handler is installed.
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// Watches this memory: if a page is touched that its file no longer has, `words` is written to standard error and the
/// process exits with status 1. The memory stays mapped for the life of the process.
///
/// # Errors
/// When the kernel rejects the handler.
pub fn explain(region: Arc<Region>, words: String) -> io::Result<()> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*installed {
        install()?;
        *installed = true;
    }
    // The lock serializes writers.
    let known = Box::new(WatchedMemory { region, words, next: KNOWN.load(Ordering::Relaxed) });
    KNOWN.store(Box::into_raw(known), Ordering::Release);
    Ok(())
}

fn install() -> io::Result<()> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the kernel writes all of it, or the call fails; a query changes no state.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has written it.
    BEFORE.store(Box::into_raw(Box::new(unsafe { before.assume_init() })), Ordering::Release);
    // SAFETY: an all-zero sigaction is valid, with no signals blocked.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_signal;
    ours.sa_sigaction = handler as libc::sighandler_t;
    // Runs on the thread's alternate signal stack, if it has one.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature of a signal handler and is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo to a handler with SA_SIGINFO, and that of a SIGBUS has an address.
    let address = unsafe { (*info).si_addr() } as u64;
    let mut at = KNOWN.load(Ordering::Acquire);
    // SAFETY: list entries are leaked, and do not change.
    while let Some(known) = unsafe { at.as_ref() } {
        if (known.region.address()..known.region.address() + known.region.bytes() as u64).contains(&address) {
            // SAFETY: the length is that of the words; both calls are async-signal-safe. An error of the write cannot
            // be handled.
            unsafe {
                let _ = libc::write(libc::STDERR_FILENO, known.words.as_ptr().cast(), known.words.len());
                libc::_exit(STATUS);
            }
        }
        at = known.next;
    }
    // SAFETY: it was written before the handler was installed, and is never freed. The faulting instruction is repeated
    // after the return, and raises the signal again for the previous handler.
    unsafe { libc::sigaction(signal, BEFORE.load(Ordering::Acquire), std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    use super::*;

    /// Environment variable that makes the restarted test process touch the pages.
    const PART: &str = "KVPLANE_TEST_LOST_PAGES";

    /// Runs the test again in a process of its own; returns its output and exit status.
    fn ended(part: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        command.args(["--exact", "lost_pages::tests::the_end_is_explained", "--nocapture"]).env(PART, part);
        command.output().expect("it is started")
    }

    /// Maps a file of two pages, truncates it, and touches its second page.
    fn touch(part: &str) {
        let path = std::env::temp_dir().join(format!("kvplane-lost-{}", std::process::id()));
        std::fs::write(&path, [1u8; 8192]).expect("a file");
        let file = std::fs::File::options().read(true).write(true).open(&path).expect("it is there");
        std::fs::remove_file(&path).expect("it is there");
        let [known, other] = [(); 2].map(|()| Region::map_file(&file, 8192).expect("mapped"));
        explain(Arc::clone(&known), "kvplane: /models/a: was made shorter\n".to_owned()).expect("a handler");
        file.set_len(4096).expect("shorter");
        known.read_with(0, 4096, &mut |_, part| assert!(part.iter().all(|&byte| byte == 1)));
        let touched = if part == "known" { known } else { other };
        touched.read_with(4096, 4096, &mut |_, part| assert!(part.iter().all(|&byte| byte == 1)));
    }

    #[test]
    fn the_end_is_explained() {
        if let Ok(part) = std::env::var(PART) {
            return touch(&part);
        }
        let known = ended("known");
        let said = String::from_utf8_lossy(&known.stderr);
        assert_eq!((known.status.code(), known.status.signal()), (Some(STATUS), None), "{said}");
        assert!(said.ends_with("kvplane: /models/a: was made shorter\n"), "{said}");
        // A SIGBUS in unwatched memory kills the process as before.
        let other = ended("other");
        assert_eq!(other.status.signal(), Some(libc::SIGBUS), "{}", String::from_utf8_lossy(&other.stderr));
    }
}
