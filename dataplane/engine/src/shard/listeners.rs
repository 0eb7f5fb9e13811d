//! Listeners of a shard, where a dead process may have left its own behind.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// How often a port or path that is taken is tried again, and after what wait. The kernel takes the rings of a
/// process that was killed down only after it is gone, and they hold its listeners until then: whoever starts it
/// again at once must not fail.
const LISTEN_ATTEMPTS: u32 = 50;
const LISTEN_RETRY: Duration = Duration::from_millis(20);

/// What `listen` gives, tried again for a while as long as the address is in use.
pub(super) fn when_free<T>(mut listen: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 1..LISTEN_ATTEMPTS {
        match listen() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => std::thread::sleep(LISTEN_RETRY),
            result => return result,
        }
    }
    listen()
}

/// A Unix listener at a path; what a dead process left there is replaced, a living one is not.
pub(super) fn listen_unix(path: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        let text = format!("{} is in use by another process", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
    }
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if path.exists() {
        std::fs::remove_file(path).map_err(named)?;
    }
    let listener = UnixListener::bind(path).map_err(named)?;
    listener.set_nonblocking(true).map_err(named)?;
    Ok(listener)
}
