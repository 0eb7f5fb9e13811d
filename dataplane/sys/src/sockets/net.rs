//! TCP sockets: listeners, nonblocking sockets, options, addresses.
//!
//! Thin, checked wrappers of the socket calls that std lacks. They do not block and keep no state.

use libc::{sockaddr_in as Four, sockaddr_in6 as Six};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Converts a socket address to the kernel's form; returns its length too.
pub(crate) fn to_storage(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let bytes = match address {
        SocketAddr::V4(address) => {
            let name = Four {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is larger than and aligned for every kind of address.
            unsafe { storage.as_mut_ptr().cast::<Four>().write(name) };
            size_of::<Four>()
        }
        SocketAddr::V6(address) => {
            let name = Six {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { storage.as_mut_ptr().cast::<Six>().write(name) };
            size_of::<Six>()
        }
    };
    // SAFETY: all-zero is valid, and so is what was written over it.
    (unsafe { storage.assume_init() }, bytes as libc::socklen_t)
}

fn from_storage(storage: &libc::sockaddr_storage) -> io::Result<SocketAddr> {
    let place: *const libc::sockaddr_storage = storage;
    match libc::c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family tells the type of the address, and the storage is large and aligned enough for it.
            let name = unsafe { place.cast::<Four>().read() };
            let ip = Ipv4Addr::from(name.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddrV4::new(ip, u16::from_be(name.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let name = unsafe { place.cast::<Six>().read() };
            let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
            let port = u16::from_be(name.sin6_port);
            Ok(SocketAddrV6::new(ip, port, name.sin6_flowinfo, name.sin6_scope_id).into())
        }
        family => {
            let text = format!("the socket's address family is {family}, not IPv4 or IPv6");
            Err(io::Error::new(io::ErrorKind::Unsupported, text))
        }
    }
}

/// Creates a listening socket, nonblocking and closed on exec, on an address that may have connections in TIME_WAIT.
/// Port 0 picks a free port. The error names the address.
pub fn tcp_listener(address: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    listen(address, backlog).map_err(|error| {
        let text = format!("cannot listen on {address}: {error}");
        io::Error::new(error.kind(), text)
    })
}

fn listen(address: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    let socket = stream_socket(address)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    let (storage, bytes) = to_storage(address);
    let backlog = libc::c_int::try_from(backlog).unwrap_or(libc::c_int::MAX);
    // SAFETY: the storage holds an address of that length, and the descriptor is open.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const storage).cast(), bytes) })?;
    // SAFETY: plain call on an open descriptor.
    check(unsafe { libc::listen(socket.as_raw_fd(), backlog) })?;
    Ok(socket.into())
}

/// Creates a TCP socket to connect to `peer`: nonblocking, closed on exec, with TCP_NODELAY.
pub fn tcp_socket(peer: SocketAddr) -> io::Result<OwnedFd> {
    let socket = stream_socket(peer)?;
    set_option(&socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    Ok(socket)
}

fn stream_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: creates a new descriptor.
    let socket = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the kernel has just created it, and this is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// Disables Nagle's algorithm.
pub fn set_nodelay(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_option(&fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
}

/// Sets the sizes of the socket buffers. The kernel doubles them for its own needs and caps them at its `rmem_max` and
/// `wmem_max` without an error; setting them disables its autotuning.
pub fn set_buffers(fd: BorrowedFd<'_>, send_bytes: u32, receive_bytes: u32) -> io::Result<()> {
    let size = |bytes| libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(&fd, libc::SOL_SOCKET, libc::SO_SNDBUF, size(send_bytes))?;
    set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, size(receive_bytes))
}

/// Enables TCP keepalive: probes an idle connection after `idle`, and again every tenth of it (at least a second); five
/// lost probes end the connection. Rounded up to seconds.
pub fn enable_keepalive(fd: BorrowedFd<'_>, idle: Duration) -> io::Result<()> {
    let seconds = idle.as_secs() + u64::from(idle.subsec_nanos() > 0);
    // The kernel accepts 1 to 32767 seconds.
    let idle_s = seconds.clamp(1, 32_767) as libc::c_int;
    set_option(&fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, idle_s)?;
    set_option(&fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, (idle_s / 10).max(1))?;
    set_option(&fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 5)?;
    set_option(&fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)
}

/// Sets the time after which unacknowledged data ends the connection, in milliseconds.
pub fn set_user_timeout(fd: BorrowedFd<'_>, timeout_ms: u32) -> io::Result<()> {
    let timeout = libc::c_int::try_from(timeout_ms).unwrap_or(libc::c_int::MAX);
    set_option(&fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, timeout)
}

/// Shuts a connection down in both directions: operations in flight on it complete, which closing the descriptor would
/// not cause while they hold the socket. An unconnected socket is not an error.
pub fn shutdown(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: plain call on a descriptor that the caller keeps open.
    match check(unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RDWR) }) {
        Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(error),
        _ => Ok(()),
    }
}

/// Resets a TCP connection at once: unsent and unacknowledged data is discarded. The peer receives a reset, if it is
/// reachable, and none of the data in flight. Works even if another process has the socket. The descriptor stays open,
/// so that the notifications of zero-copy sends can still be taken: closing it without this would let the kernel
/// continue to send from the memory.
///
/// # Errors
/// The kernel's; closing the descriptor then has the same effect, without the notifications.
pub fn abort(fd: BorrowedFd<'_>) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let bytes = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: the option's value outlives the call.
    let set = check(unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), bytes)
    });
    // SAFETY: all-zero is valid for this plain structure.
    let mut nobody: libc::sockaddr = unsafe { std::mem::zeroed() };
    nobody.sa_family = libc::AF_UNSPEC as libc::sa_family_t;
    let bytes = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the kernel reads a structure of this function. Connecting to AF_UNSPEC disconnects the socket.
    check(unsafe { libc::connect(fd.as_raw_fd(), &raw const nobody, bytes) })?;
    set.map(|_| ())
}

/// Returns and clears the pending error of a socket.
pub fn take_socket_error(fd: BorrowedFd<'_>) -> io::Result<Option<io::Error>> {
    let mut value: libc::c_int = 0;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, the size of `value`.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut value).cast(), &raw mut bytes)
    })?;
    Ok((value != 0).then(|| io::Error::from_raw_os_error(value)))
}

/// Returns the address that a socket is bound to.
pub fn local_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    address_by(fd, libc::getsockname)
}

/// Returns the address that a socket is connected to.
pub fn peer_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    address_by(fd, libc::getpeername)
}

type NameCall = unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn address_by(fd: BorrowedFd<'_>, call: NameCall) -> io::Result<SocketAddr> {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut bytes = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: both calls write at most `bytes` bytes, the size of the storage.
    check(unsafe { call(fd.as_raw_fd(), (&raw mut storage).cast(), &raw mut bytes) })?;
    from_storage(&storage)
}

pub(crate) fn set_option(
    fd: &impl AsRawFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let place = (&raw const value).cast();
    // SAFETY: the option's value is an integer that outlives the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, place, bytes) })?;
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn addresses_survive_the_kernels_form() {
        for text in ["1.2.3.4:5", "[2001:db8::7]:65535", "[fe80::1%3]:80"] {
            let address: SocketAddr = text.parse().expect("address");
            assert_eq!(from_storage(&to_storage(address).0).expect("known family"), address);
        }
        // SAFETY: all-zero is a valid sockaddr_storage.
        let unnamed: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        assert!(from_storage(&unnamed).is_err());
    }

    #[test]
    fn a_taken_address_is_named_in_the_error() {
        let any = "127.0.0.1:0".parse().expect("address");
        let listener = tcp_listener(any, 4).expect("listener");
        let taken = local_address(listener.as_fd()).expect("address");
        assert_ne!(taken.port(), 0);
        let error = tcp_listener(taken, 4).expect_err("taken");
        assert!(error.to_string().contains(&taken.to_string()), "{error}");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let waiting = listener.accept().expect_err("nonblocking");
        assert_eq!(waiting.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn options_are_taken_and_errors_read_once() {
        let closed = {
            let any = "127.0.0.1:0".parse().expect("address");
            local_address(tcp_listener(any, 1).expect("listener").as_fd()).expect("address")
        };
        let socket = tcp_socket(closed).expect("socket");
        let fd = socket.as_fd();
        set_nodelay(fd).expect("nodelay");
        set_buffers(fd, 1 << 16, u32::MAX).expect("buffers");
        enable_keepalive(fd, Duration::from_millis(1500)).expect("keepalive");
        set_user_timeout(fd, 5000).expect("timeout");
        assert!(take_socket_error(fd).expect("asked").is_none());
        assert!(peer_address(fd).is_err(), "not connected");
        shutdown(tcp_socket(closed).expect("socket").as_fd()).expect("nothing to end");
        let (storage, bytes) = to_storage(closed);
        // SAFETY: the storage holds an address of that length; the descriptor is ours.
        unsafe { libc::connect(fd.as_raw_fd(), (&raw const storage).cast(), bytes) };
        let mut query = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        assert_eq!(unsafe { libc::poll(&raw mut query, 1, 20_000) }, 1);
        let error = take_socket_error(fd).expect("asked").map(|error| error.kind());
        assert_eq!(error, Some(io::ErrorKind::ConnectionRefused));
        assert!(take_socket_error(fd).expect("asked").is_none(), "asking clears it");
    }

    #[test]
    fn abort_discards_unsent_data() {
        use std::io::{Read, Write};
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let mut ours = std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (mut theirs, _) = listener.accept().expect("accepted");
        ours.set_nonblocking(true).expect("a socket");
        // Until the buffers of both sides are full: the last bytes have not been sent.
        let mut sent = 0;
        while let Ok(bytes) = ours.write(&[7; 65_536]) {
            sent += bytes;
        }
        let other = ours.try_clone().expect("a second descriptor, as a child would have it");
        abort(std::os::fd::AsFd::as_fd(&ours)).expect("aborted");
        let (mut arrived, mut part) = (0, vec![0; 65_536]);
        let end = loop {
            match theirs.read(&mut part) {
                Ok(0) => break None,
                Ok(bytes) => arrived += bytes,
                Err(error) => break Some(error.kind()),
            }
        };
        assert_eq!(end, Some(io::ErrorKind::ConnectionReset));
        assert!(arrived < sent, "{arrived} of {sent} bytes");
        drop(other);
    }
}
