//! Listeners of a shard, at addresses where a dead process may have left its own behind.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use kvplane_sys::net;

/// Connections that a data port holds until they are accepted.
const BACKLOG: u32 = 1024;

/// Listeners of a shard for its peers. Peers connect as long as any process has them, and wait until one accepts.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ShardListeners {
    pub tcp: TcpListener,
    /// Listener for peers on this host.
    pub shm: Option<UnixListener>,
}

impl ShardListeners {
    /// Listens at this address, and at this path for peers on this host.
    pub(super) fn bind(tcp: SocketAddr, shm: Option<&Path>) -> io::Result<Self> {
        let tcp = when_free(|| net::tcp_listener(tcp, BACKLOG))?;
        let shm = shm.map(|path| when_free(|| listen_unix(path))).transpose()?;
        Ok(Self { tcp, shm })
    }

    /// Returns further descriptors of the same listeners.
    ///
    /// # Errors
    /// When the process has too many descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let shm = self.shm.as_ref().map(UnixListener::try_clone).transpose()?;
        Ok(Self { tcp: self.tcp.try_clone()?, shm })
    }
}

/// Number of attempts to listen on a port or path that is in use, and the wait between them. The kernel frees the rings
/// of a killed process only after its end, and they hold its listeners until then: an immediate restart must not fail.
const LISTEN_ATTEMPTS: u32 = 50;
const LISTEN_RETRY: Duration = Duration::from_millis(20);

/// Returns the result of `listen`, which is retried for a while as long as the address is in use.
pub(super) fn when_free<T>(mut listen: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 1..LISTEN_ATTEMPTS {
        match listen() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => std::thread::sleep(LISTEN_RETRY),
            result => return result,
        }
    }
    listen()
}

/// Listens on a Unix socket at a path; replaces the socket of a dead process, but not of a living one.
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
