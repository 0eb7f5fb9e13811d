//! Engine of the C interface, its start and its end.

use std::error::Error;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use kvplane::{Environment, OwnAddress, TransferEngine, TransferEngineConfig};

use crate::batches::Batches;
use crate::handles::ProcessLocal;
use crate::rim::{INVALID_ARGUMENT, guarded, text, with_engine, write_text};
use crate::shutdown;

/// Transports that programs may install by name. Each engine has all of those that work here.
const TRANSPORTS: [&str; 6] = ["tcp", "shm", "cma", "local", RDMA, FILE];
/// Must be installed before files are opened.
const FILE: &str = "file";
/// Must be installed before stock engines can use it with this engine: they use one protocol for each segment.
const RDMA: &str = "rdma";

/// Engine and the batches that C code allocated on it.
pub(crate) struct Engine {
    /// The engine.
    pub(crate) engine: TransferEngine,
    /// Batches.
    pub(crate) batches: Batches,
    /// True if the program installed the file transport. Segment names often come from other machines, and with files
    /// allowed they decide what is read and written here.
    pub(crate) files: AtomicBool,
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Before the engine, which batches in flight use.
        self.batches.clear();
    }
}

/// Error of a port that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PortError {
    port: u64,
}

impl fmt::Display for PortError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port;
        write!(f, "port {port} is above 65535")
    }
}

impl Error for PortError {}

/// Returns the settings for the arguments from C. With a loopback address, only this host can reach the engine.
fn config(
    metadata: &str,
    server_name: &str,
    host: Option<&str>,
    port: u64,
    environment: Environment,
) -> Result<TransferEngineConfig, PortError> {
    let port = u16::try_from(port).map_err(|_| PortError { port })?;
    let p2p = metadata == "P2PHANDSHAKE";
    // With handshakes the name is an address too, `host:port`, whose port is ignored.
    let wanted = host.filter(|host| !host.is_empty()).unwrap_or(if p2p { server_name } else { "" });
    let OwnAddress { listen, announce, .. } = OwnAddress::resolve(wanted, environment.bind);
    Ok(TransferEngineConfig {
        listen: SocketAddr::new(listen, if p2p { 0 } else { port }),
        open_to_network: !listen.is_loopback(),
        announce,
        metadata: metadata.to_owned(),
        name: (!p2p).then(|| server_name.to_owned()),
        environment,
        ..TransferEngineConfig::default()
    })
}

/// Allows or forbids file segments, if the transport is the one of files. No effect for other transports.
///
/// # Safety
/// A live engine, or null.
unsafe fn allow_files(engine: *mut c_void, transport: &str, allowed: bool) {
    if transport == FILE {
        // SAFETY: by the caller's promise.
        unsafe {
            with_engine(engine, |engine| {
                engine.files.store(allowed, Ordering::Relaxed);
                Ok(0)
            });
        }
    }
}

/// Starts an engine, or returns null. A failure is reported on standard error.
///
/// # Safety
/// Strings with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    rpc_port: u64,
    _auto_discover: c_int,
) -> *mut c_void {
    guarded(ptr::null_mut(), || {
        // SAFETY: by the caller's promise.
        let texts = unsafe { (text(metadata_conn_string), text(local_server_name), text(ip_or_host_name)) };
        let (Some(metadata), Some(name), host) = texts else { return ptr::null_mut() };
        // An engine beyond loopback prints a warning to standard error.
        let start = || -> Result<TransferEngine, Box<dyn Error>> {
            let config = config(metadata, name, host, rpc_port, Environment::of_process()?)?;
            Ok(TransferEngine::start(config)?)
        };
        match start() {
            Ok(engine) => {
                let engine = Engine { engine, batches: Batches::default(), files: AtomicBool::new(false) };
                Box::into_raw(Box::new(ProcessLocal::new(engine))).cast()
            }
            Err(why) => {
                eprintln!("kvplane: no transfer engine: {why}");
                ptr::null_mut()
            }
        }
    })
}

/// Destroys an engine and cancels its transfers; null is ignored.
///
/// # Safety
/// An engine without further users, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn destroyTransferEngine(engine: *mut c_void) {
    if engine.is_null() {
        return;
    }
    guarded((), || {
        shutdown::forget(engine);
        // SAFETY: it came from `createTransferEngine`, and this is its last use, by the caller's promise.
        drop(unsafe { Box::from_raw(engine.cast::<ProcessLocal<Engine>>()) });
    });
}

/// Refreshes the descriptions of all open segments.
///
/// # Safety
/// A live engine.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn discoverTopology(engine: *mut c_void) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            engine.engine.segments().refresh().map_err(|error| error.code())?;
            Ok(0)
        })
    }
}

/// Writes the address by which peers open the engine to `buf_out`, truncated to `buf_len`.
///
/// # Safety
/// A live engine and `buf_len` writable bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getLocalIpAndPort(engine: *mut c_void, buf_out: *mut c_char, buf_len: usize) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            if buf_out.is_null() || buf_len == 0 {
                return Err(INVALID_ARGUMENT);
            }
            write_text(buf_out, buf_len, &engine.engine.directory().address().to_string());
            Ok(0)
        })
    }
}

/// Announces RDMA to stock engines. A failure is reported on standard error.
///
/// # Safety
/// A live engine, or null; `args` null, or an array whose first element is null or a string with a final zero.
unsafe fn announce_rdma(engine: *mut c_void, args: *mut *mut c_void) -> bool {
    // SAFETY: by the caller's promise.
    let first = unsafe { args.as_ref() }.map_or(ptr::null(), |first| first.cast_const().cast::<c_char>());
    // SAFETY: by the caller's promise.
    let matrix = unsafe { text(first) };
    let announce = |engine: &Engine| {
        if !first.is_null() && matrix.is_none() {
            return Err(INVALID_ARGUMENT);
        }
        let announced = engine.engine.announce_rdma(matrix);
        announced.map(|()| 0).map_err(|error| {
            eprintln!("kvplane: no transport \"rdma\": {error}");
            error.code()
        })
    };
    // SAFETY: by the caller's promise.
    unsafe { with_engine(engine, announce) == 0 }
}

/// Installs a transport, or returns null: `file` allows files, `rdma` announces RDMA, others have no effect.
///
/// # Safety
/// A live engine, a string with a final zero, and arguments as the header says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn installTransport(
    engine: *mut c_void,
    proto: *const c_char,
    args: *mut *mut c_void,
) -> *mut c_void {
    // SAFETY: by the caller's promise.
    let known = unsafe { text(proto) }.filter(|name| TRANSPORTS.contains(name));
    let Some(name) = known else { return ptr::null_mut() };
    // SAFETY: by the caller's promise.
    unsafe { allow_files(engine, name, true) };
    // SAFETY: by the caller's promise.
    if name == RDMA && !unsafe { announce_rdma(engine, args) } {
        return ptr::null_mut();
    }
    engine
}

/// Forbids files, for the transport `file`. No transport is removed: transfers would lose a path without need.
///
/// # Safety
/// A live engine and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn uninstallTransport(engine: *mut c_void, proto: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    let known = unsafe { text(proto) }.filter(|name| TRANSPORTS.contains(name));
    let Some(name) = known.filter(|_| !engine.is_null()) else { return INVALID_ARGUMENT };
    // SAFETY: by the caller's promise.
    unsafe { allow_files(engine, name, false) };
    0
}

/// Removes the engine from the metadata store when the process receives SIGTERM or SIGINT.
///
/// # Safety
/// A live engine.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn enableGracefulShutdown(engine: *mut c_void) {
    if !engine.is_null() {
        guarded((), || shutdown::watch(engine));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_start_on_any_spelling_of_an_address() {
        for (host, listen, announced) in [
            ("::1", "::1", None),
            ("[::1]", "::1", None),
            ("[::1]:12345", "::1", None),
            ("::1%lo", "::1", None),
            ("2001:db8::102", "::", Some("2001:db8::102")),
            ("2001:db8::1234:5", "::", Some("2001:db8::1234:5")),
            ("203.0.113.7:12345", "0.0.0.0", Some("203.0.113.7")),
            ("127.0.0.1", "127.0.0.1", None),
        ] {
            // As the host, and as the name where there is no host.
            let made = |name, host| config("P2PHANDSHAKE", name, host, 0, Environment::default());
            for made in [made("name", Some(host)), made(host, None)] {
                let made = made.expect(host);
                assert_eq!(made.announce.map(|ip| ip.to_string()).as_deref(), announced, "{host}");
                // A machine without IPv6 has no interface with ::1 either.
                let other = listen == "::1" && made.listen.ip().is_unspecified();
                assert!(other || made.listen.ip().to_string() == listen, "{host}: {}", made.listen);
                if !other {
                    let engine = TransferEngine::start(made).expect(host);
                    assert_ne!(engine.directory().address().port(), 0, "{host}");
                }
            }
        }
    }

    #[test]
    fn the_environment_overrides_the_listen_address() {
        for (bind, announced) in [("127.0.0.2", None), ("0.0.0.0", Some("203.0.113.7"))] {
            let environment = Environment { bind: Some(bind.parse().expect(bind)), ..Environment::default() };
            let made = config("P2PHANDSHAKE", "203.0.113.7:5", None, 0, environment).expect(bind);
            assert_eq!(made.listen.ip().to_string(), bind);
            assert_eq!(made.announce.map(|ip| ip.to_string()).as_deref(), announced, "{bind}");
        }
    }
}
