//! Unix sockets: passing descriptors, and the peer's credentials.
//!
//! A received descriptor is owned at once, so that it is closed on every return path; more descriptors than expected,
//! or a list that the kernel truncated, is an error. There is no framing: a stream has no message boundaries, and
//! callers that pass descriptors send a fixed-size message with each batch.

use std::io::{self, Write};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Limit of descriptors in one message.
pub const MAX_FDS: usize = 32;

const FD_BYTES: usize = size_of::<RawFd>();
// SAFETY: pure arithmetic.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE((MAX_FDS * FD_BYTES) as u32) } as usize;

/// Control data buffer, aligned for its header.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Credentials of a peer, as recorded by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id at the time of `connect` or `socketpair`; 0 if it is not visible from here.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

impl Credentials {
    /// Sends SIGTERM to the process. The caller has a connection to it, so that the id is still its own.
    ///
    /// # Errors
    /// When the process has ended, is not visible from here, or belongs to another user.
    pub fn terminate(&self) -> io::Result<()> {
        // 0 and negative numbers mean groups of processes.
        if self.pid <= 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: the call takes two numbers.
        if unsafe { libc::kill(self.pid, libc::SIGTERM) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Returns true if a socket file was left over by a process that is gone, so that connections to it are refused. Never
/// blocks; false if that is uncertain, for example if the owner's backlog is full.
pub fn is_abandoned(path: &Path) -> bool {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let name = path.as_os_str().as_bytes();
    // The last byte stays 0.
    if name.is_empty() || name.len() >= address.sun_path.len() {
        return false;
    }
    address.sun_path.iter_mut().zip(name).for_each(|(to, &byte)| *to = libc::c_char::from_ne_bytes([byte]));
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: plain call.
    let socket = match unsafe { libc::socket(libc::AF_UNIX, kind, 0) } {
        -1 => return false,
        // SAFETY: the kernel has just created the descriptor, and this is its only owner.
        fd => unsafe { OwnedFd::from_raw_fd(fd) },
    };
    let bytes = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is a complete sockaddr_un with a final zero, which outlives the call.
    let connected = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), bytes) };
    connected != 0 && io::Error::last_os_error().kind() == io::ErrorKind::ConnectionRefused
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn header(vector: &mut libc::iovec, control: &mut Control, control_bytes: usize) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vector;
    message.msg_iovlen = 1;
    if control_bytes > 0 {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control_bytes;
    }
    message
}

/// Sends all bytes, and the descriptors with the first of them; at least one byte and at most [`MAX_FDS`] descriptors.
/// For sockets in blocking mode: any error, including a timeout, makes the stream unusable.
pub fn send_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.is_empty() || fds.len() > MAX_FDS {
        let (bytes, fds) = (bytes.len(), fds.len());
        return Err(invalid(format!("cannot send {fds} descriptors with {bytes} bytes")));
    }
    let payload_bytes = (fds.len() * FD_BYTES) as u32;
    let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: pure arithmetic.
    let space = unsafe { libc::CMSG_SPACE(payload_bytes) } as usize;
    let space = if fds.is_empty() { 0 } else { space };
    let message = header(&mut vector, &mut control, space);
    if !fds.is_empty() {
        // SAFETY: the control buffer is aligned and, with at most MAX_FDS descriptors, large enough for one header and
        // the descriptors behind it; BorrowedFd is a plain descriptor number in memory.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const message);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(payload_bytes) as usize;
            let data = libc::CMSG_DATA(first);
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), data, payload_bytes as usize);
        }
    }
    let sent = retry(|| {
        // SAFETY: the message points to the vector, the bytes and the control data above, which outlive the call.
        unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) }
    })?;
    (&*stream).write_all(&bytes[sent..])
}

/// Receives some bytes and at most `max_fds` (at most [`MAX_FDS`]) descriptors, closed on exec. Returns 0 bytes if the
/// peer closed. If the peer sent more descriptors, all of them are closed and an error is returned.
pub fn recv_with_fds(stream: &UnixStream, bytes: &mut [u8], max_fds: usize) -> io::Result<(usize, Vec<OwnedFd>)> {
    if max_fds > MAX_FDS {
        return Err(invalid(format!("cannot receive {max_fds} descriptors: at most {MAX_FDS}")));
    }
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; CONTROL_BYTES]);
    let mut message = header(&mut vector, &mut control, CONTROL_BYTES);
    let received = retry(|| {
        let flags = libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the message points to the vector, the bytes and the control buffer above, which outlive the call.
        unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) }
    })?;
    // SAFETY: the kernel has just filled this message and its control buffer.
    let fds = unsafe { take_fds(&message) };
    if message.msg_flags & libc::MSG_CTRUNC != 0 || fds.len() > max_fds {
        let text = format!("the peer sent more than the {max_fds} descriptors expected");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok((received, fds))
}

/// Returns true if the peer has closed its end of the socket, or its direction of it, whether or not bytes that it sent
/// before were received; also if the kernel does not say. Does not block.
#[must_use]
pub fn has_hung_up(stream: &UnixStream) -> bool {
    let mut query = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    let ready = retry(|| unsafe { libc::poll(&raw mut query, 1, 0) } as isize);
    !matches!(ready, Ok(0))
}

/// Takes ownership of every descriptor in a received message.
///
/// # Safety
///
/// The message must be in the state in which `recvmsg` left it, and this must be the only call for it.
unsafe fn take_fds(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the macros walk the control data that the kernel wrote, within the length it set; a SCM_RIGHTS entry
    // holds descriptors that are new in this process and have no owner yet.
    unsafe {
        let mut entry = libc::CMSG_FIRSTHDR(message);
        while !entry.is_null() {
            if (*entry).cmsg_level == libc::SOL_SOCKET && (*entry).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(entry).cast::<RawFd>();
                let data_bytes = (*entry).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                for index in 0..data_bytes / FD_BYTES {
                    fds.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            entry = libc::CMSG_NXTHDR(message, entry);
        }
    }
    fds
}

/// Connects to the listener at this path; the connection is nonblocking. Never waits.
///
/// # Errors
/// `NotFound` and `ConnectionRefused` if there is no listener; `WouldBlock` if its backlog is full; `InvalidInput` for
/// a path that no socket can have.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(invalid(format!("{} is not a valid socket path: 1 to 107 bytes are allowed", path.display())));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: a plain call; the descriptor, if there is one, is new and has no other owner.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    retry(|| {
        let place = (&raw const address).cast();
        // SAFETY: the address outlives the call, and the length is its own.
        unsafe { libc::connect(fd, place, size_of::<libc::sockaddr_un>() as libc::socklen_t) as isize }
    })?;
    Ok(stream)
}

/// Returns the credentials of the peer.
pub fn peer_credentials(stream: &UnixStream) -> io::Result<Credentials> {
    let mut found = MaybeUninit::<libc::ucred>::zeroed();
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let place = found.as_mut_ptr().cast();
    let fd = stream.as_raw_fd();
    // SAFETY: the kernel writes at most `bytes` bytes, the size of the structure.
    let result = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all-zero is valid, and so is what the kernel wrote over it.
    let found = unsafe { found.assume_init() };
    Ok(Credentials { pid: found.pid, uid: found.uid, gid: found.gid })
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        let result = call();
        if let Ok(bytes) = usize::try_from(result) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    /// Returns the bytes that a pipe yields until every writing end is closed: proof that no copy of one is left.
    fn ends(mut reader: impl Read) -> Vec<u8> {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).expect("the pipe ends");
        bytes
    }

    #[test]
    fn the_end_of_a_peer_is_seen_behind_bytes_that_were_not_received() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        assert!(!has_hung_up(&ours));
        (&theirs).write_all(b"bytes").expect("sent");
        assert!(!has_hung_up(&ours));
        let copy = theirs.try_clone().expect("a copy");
        drop(theirs);
        assert!(!has_hung_up(&ours), "the socket is open while a copy of it is");
        copy.shutdown(std::net::Shutdown::Write).expect("half open");
        assert!(has_hung_up(&ours));
        let (ours, theirs) = UnixStream::pair().expect("pair");
        drop(theirs);
        assert!(has_hung_up(&ours));
    }

    #[test]
    fn descriptors_arrive_with_their_bytes() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let (reader, writer) = io::pipe().expect("pipe");
        send_with_fds(&ours, b"hello", &[writer.as_fd(), reader.as_fd()]).expect("sent");
        drop(writer);
        let mut bytes = [0; 16];
        let (received, mut fds) = recv_with_fds(&theirs, &mut bytes, 2).expect("received");
        assert_eq!((&bytes[..received], fds.len()), (&b"hello"[..], 2));
        for fd in &fds {
            // SAFETY: plain query on a descriptor we own.
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_ne!(flags & libc::FD_CLOEXEC, 0);
        }
        File::from(fds.remove(0)).write_all(b"through").expect("a pipe");
        assert_eq!(ends(reader), b"through");
        drop(ours);
        let (received, fds) = recv_with_fds(&theirs, &mut bytes, 2).expect("received");
        assert_eq!((received, fds.len()), (0, 0), "the end of the stream");
    }

    #[test]
    fn too_many_descriptors_are_closed_and_refused() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        for (sent, expected) in [(2, 1), (1, 0), (MAX_FDS, MAX_FDS - 1)] {
            let (reader, writer) = io::pipe().expect("pipe");
            let fds = vec![writer.as_fd(); sent];
            send_with_fds(&ours, b"x", &fds).expect("sent");
            drop(writer);
            let error = recv_with_fds(&theirs, &mut [0; 1], expected).expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert_eq!(ends(reader), b"", "a copy was left open");
        }
        let (reader, _writer) = io::pipe().expect("pipe");
        let fds = vec![reader.as_fd(); MAX_FDS + 1];
        assert!(send_with_fds(&ours, b"x", &fds).is_err());
        assert!(send_with_fds(&ours, b"", &fds[..1]).is_err());
        assert!(recv_with_fds(&theirs, &mut [0; 1], MAX_FDS + 1).is_err());
    }

    #[test]
    fn long_messages_are_sent_whole() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        let expected = bytes.clone();
        let sender = std::thread::spawn(move || send_with_fds(&ours, &bytes, &[]));
        assert!(ends(&theirs) == expected);
        sender.join().expect("joined").expect("sent");
    }

    #[test]
    fn connecting_never_waits() {
        let directory = std::env::temp_dir().join(format!("kvplane-unix-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("socket");
        let kind = |path: &Path| connect(path).expect_err("no listener").kind();
        assert_eq!(kind(&path), io::ErrorKind::NotFound);
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a listener");
        // Without accepts the backlog fills up.
        let mut waiting = Vec::new();
        let error = loop {
            match connect(&path) {
                Ok(stream) if waiting.len() < 100_000 => waiting.push(stream),
                Ok(_) => break None,
                Err(error) => break Some(error.kind()),
            }
        };
        assert!(matches!(error, Some(io::ErrorKind::WouldBlock)) || waiting.len() > 1000, "{error:?}");
        let mut theirs = listener.accept().expect("it waited").0;
        theirs.write_all(b"x").expect("sent");
        assert_eq!((&waiting[0]).read(&mut [0; 2]).expect("nonblocking, and there is something"), 1);
        drop((listener, theirs));
        assert_eq!(kind(&path), io::ErrorKind::ConnectionRefused);
        assert_eq!(kind(Path::new(&"x".repeat(108))), io::ErrorKind::InvalidInput);
        let _ = std::fs::remove_dir_all(directory);
    }

    #[test]
    fn credentials_name_the_peer() {
        let (ours, _theirs) = UnixStream::pair().expect("pair");
        let found = peer_credentials(&ours).expect("credentials");
        assert_eq!(found.pid, std::process::id().cast_signed());
        assert_eq!(found.uid, crate::cpu::effective_uid());
    }
}
