//! Notifications to systemd (`sd_notify(3)`), for units of `Type=notify`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Environment variable that names the socket of the service manager.
const VARIABLE: &str = "NOTIFY_SOCKET";

/// Tells the service manager, if there is one, that this process is the main process of its unit and serves.
pub(crate) fn announce_ready() {
    if let Err(error) = notify(&format!("MAINPID={}\nREADY=1\n", std::process::id())) {
        eprintln!("kvplane: the service manager was not told that this process serves: {error}");
    }
}

fn notify(state: &str) -> io::Result<()> {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else { return Ok(()) };
    // The first byte stands for the zero byte of an abstract name.
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(std::ffi::OsString::from_vec(path.as_bytes().to_vec()))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), &address).map(|_| ())
}
