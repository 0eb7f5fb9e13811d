//! The end of a process that touches mapped pages of a file which are not there any more, in words.
//!
//! A file that is made shorter takes its pages out of every mapping of it, and touching one raises SIGBUS, which ends
//! the process and says nothing. Nothing can keep a file from that, and who touches the page cannot go on without it;
//! so the process still ends, but says which file it was. A disk that cannot be read looks the same.
//!
//! The handler calls `write` and `_exit` and nothing else: both may be called in a signal handler. What it says is made
//! before. A SIGBUS elsewhere is left to whoever had the signal before.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::region::Region;

/// The status of a process that ended so: that of any failure.
const STATUS: libc::c_int = 1;

/// Memory, and what is said when some of it is gone. It stays mapped: other memory never has its address.
struct WatchedMemory {
    region: Arc<Region>,
    words: String,
    /// Those that were there before.
    next: *mut Self,
}

/// A list that only grows, so that the handler may walk it at any time.
static KNOWN: AtomicPtr<WatchedMemory> = AtomicPtr::new(std::ptr::null_mut());

/// Who had the signal before; written once, before the handler is there.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Whether the handler is there.
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// From now on, when a page of this memory is touched that its file has no more, this is written to standard error and
/// the process exits with status 1. The memory stays mapped as long as the process lives.
///
/// # Errors
/// When the kernel takes no handler.
pub fn explain(region: Arc<Region>, words: String) -> io::Result<()> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*installed {
        install()?;
        *installed = true;
    }
    // One thread at a time, by the lock.
    let known = Box::new(WatchedMemory { region, words, next: KNOWN.load(Ordering::Relaxed) });
    KNOWN.store(Box::into_raw(known), Ordering::Release);
    Ok(())
}

fn install() -> io::Result<()> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all of it is written by the kernel, or the call fails; asking changes nothing.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has written it.
    BEFORE.store(Box::into_raw(Box::new(unsafe { before.assume_init() })), Ordering::Release);
    // SAFETY: a sigaction of zeros is one, with no signals blocked.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_signal;
    ours.sa_sigaction = handler as libc::sighandler_t;
    // On the stack that the thread has for it, where there is one.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is a function of that form, which calls only what handlers may.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO one, and a SIGBUS has an address.
    let address = unsafe { (*info).si_addr() } as u64;
    let mut at = KNOWN.load(Ordering::Acquire);
    // SAFETY: what is in the list was leaked, and does not change.
    while let Some(known) = unsafe { at.as_ref() } {
        if (known.region.address()..known.region.address() + known.region.bytes() as u64).contains(&address) {
            // SAFETY: the words are as long; both calls are made for handlers. Nothing is to be done about an error.
            unsafe {
                let _ = libc::write(libc::STDERR_FILENO, known.words.as_ptr().cast(), known.words.len());
                libc::_exit(STATUS);
            }
        }
        at = known.next;
    }
    // SAFETY: it was written before the handler was there, and is never freed. The instruction is carried out again
    // when this returns, and raises the signal again for whoever had it.
    unsafe { libc::sigaction(signal, BEFORE.load(Ordering::Acquire), std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    use super::*;

    /// What this test's process is to do when it is started again.
    const PART: &str = "KVPLANE_TEST_LOST_PAGES";

    /// Runs the test again in a process of its own, which is to end as it does.
    fn ended(part: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        command.args(["--exact", "lost_pages::tests::the_end_is_explained", "--nocapture"]).env(PART, part);
        command.output().expect("it is started")
    }

    /// A file of two pages is mapped and made shorter, and its second page is touched.
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
        // Memory of which nothing is known ends the process as before.
        let other = ended("other");
        assert_eq!(other.status.signal(), Some(libc::SIGBUS), "{}", String::from_utf8_lossy(&other.stderr));
    }
}
