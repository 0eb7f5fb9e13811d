//! Zero-copy sends (MSG_ZEROCOPY): the kernel's notifications about memory that it no longer refers to. What is in
//! flight is stopped by [`net::abort`](crate::net::abort).
//!
//! [`Gather::send_zero_copy`](crate::Gather::send_zero_copy) returns while the kernel still refers to the memory: it
//! sends from there, and retransmits until the peer has acknowledged the bytes. Each call that accepted bytes has a
//! number, counted per socket from 0 and wrapping; a [`Notice`] names a range of them. (Linux:
//! networking/msg_zerocopy.)

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::net;

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` of linux/errqueue.h, which the libc crate lacks.
const ORIGIN_ZERO_COPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// Notification: the kernel no longer refers to the memory of these calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    /// Number of the first call.
    pub first: u32,
    /// Number of the last call, inclusive. The numbers wrap.
    pub last: u32,
    /// True if the kernel has copied the bytes after all: such sends cost more than plain ones.
    pub copied: bool,
}

/// Buffer for one message of the error queue: its header, the error, and the address of its origin.
#[repr(C, align(8))]
struct Control([u8; 128]);

/// Enables zero-copy sends on a TCP socket.
///
/// # Errors
/// When this kernel does not support them.
pub fn enable(fd: BorrowedFd<'_>) -> io::Result<()> {
    net::set_option(&fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

/// Takes the next notification of a socket; `None` if there is none now. The poller sets
/// [`error`](crate::Readiness::error) when one has arrived. Never blocks; works on a socket that was reset, too.
///
/// # Errors
/// The kernel's.
pub fn take_notice(fd: BorrowedFd<'_>) -> io::Result<Option<Notice>> {
    loop {
        let mut control = Control([0; 128]);
        // SAFETY: all-zero is a valid msghdr: no name, no vectors.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
        // SAFETY: the kernel writes at most `msg_controllen` bytes of control data into room that outlives the call.
        let received =
            unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
        if received < 0 {
            match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                error => return Err(error),
            }
        }
        // Other entries of the error queue are ignored.
        if let Some(notice) = notice_of(&message) {
            return Ok(Some(notice));
        }
    }
}

fn notice_of(message: &libc::msghdr) -> Option<Notice> {
    // SAFETY: the kernel filled the message, whose control data is alive.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: a header that the kernel wrote, in room that is aligned for it.
        let (level, kind, bytes) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        let is_error =
            (level, kind) == (libc::SOL_IP, libc::IP_RECVERR) || (level, kind) == (libc::SOL_IPV6, libc::IPV6_RECVERR);
        // SAFETY: pure arithmetic.
        let least = unsafe { libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) } as usize;
        if is_error && bytes >= least {
            // SAFETY: at least this many bytes of data follow the header, and any bytes are a valid value.
            let error = unsafe { libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned() };
            if error.ee_origin == ORIGIN_ZERO_COPY && error.ee_errno == 0 {
                let copied = error.ee_code == CODE_COPIED;
                return Some(Notice { first: error.ee_info, last: error.ee_data, copied });
            }
        }
        // SAFETY: the next header is inside the control data, or null.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    None
}

/// Returns the bytes that were passed to a TCP socket and are not acknowledged by its peer. Acknowledged bytes are
/// never retransmitted.
///
/// # Errors
/// When it is not a TCP socket, or a listener.
pub fn unacknowledged_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer. SIOCOUTQ is TIOCOUTQ's number.
    match unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(u64::try_from(bytes).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::abort;
    use crate::region::{HugePages, IoBuf, Region, RegionOptions};
    use crate::stream::{Gather, Scatter, accept, start_connect};
    use crate::{Interest, Poller};
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    const BYTES: usize = 300_000;

    fn buffer() -> IoBuf {
        let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("zero-copy", BYTES) };
        let buffer = IoBuf::whole(Region::allocate(&options).expect("memory"));
        let bytes: Vec<u8> = (0..BYTES as u32).map(|at| (at * 13 + (at >> 9)) as u8).collect();
        buffer.copy_in(&bytes);
        buffer
    }

    fn wait(poller: &Poller, done: impl Fn(&crate::Readiness) -> bool) {
        let mut ready = Vec::new();
        while !ready.iter().any(&done) {
            ready.clear();
            assert!(poller.wait(Duration::from_secs(20), &mut ready).expect("wait") > 0, "nothing happens");
        }
    }

    /// Connects over this address; the client's end is watched and has zero-copy sends enabled, if supported.
    fn pair(poller: &Poller, address: &str) -> Option<(OwnedFd, OwnedFd)> {
        let listener = match net::tcp_listener(address.parse().expect("address"), 4) {
            Ok(listener) => listener,
            Err(error) => {
                println!("skipped: a connection over {address}: {error}");
                return None;
            }
        };
        let address = listener.local_addr().expect("address");
        let client = net::tcp_socket(address).expect("socket");
        start_connect(client.as_fd(), address).expect("started");
        poller.add(client.as_fd(), 1, Interest::BothEdges).expect("added");
        wait(poller, |one| one.writable);
        let server = accept(listener.as_fd()).expect("descriptor").expect("connected");
        if let Err(error) = enable(client.as_fd()) {
            println!("skipped: sends without a copy: {error}");
            return None;
        }
        Some((client, server))
    }

    fn take(fd: &OwnedFd, calls: &mut Vec<u32>) {
        while let Some(notice) = take_notice(fd.as_fd()).expect("asked") {
            calls.extend(notice.first..=notice.last);
        }
    }

    #[test]
    fn each_call_is_notified_once_and_the_bytes_arrive() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let poller = Poller::new().expect("epoll");
            let Some((client, server)) = pair(&poller, address) else { return };
            let (source, target) = (buffer(), buffer());
            target.copy_in(&[0; BYTES]);
            let (mut sent, mut received, mut issued, mut calls) = (0, 0, 0, Vec::new());
            while received < BYTES {
                let rest = source.slice(sent, (BYTES - sent).min(64_000));
                let mut gather = Gather::new();
                gather.push(&rest, rest.bytes());
                if let Some(bytes) = (sent < BYTES).then(|| gather.send_zero_copy(client.as_fd())).and_then(Result::ok)
                {
                    (sent, issued) = (sent + bytes, issued + 1);
                }
                let place = target.slice(received, BYTES - received);
                let mut scatter = Scatter::new();
                scatter.push(&place, place.bytes());
                received += scatter.receive(server.as_fd()).unwrap_or(0);
            }
            while calls.len() < issued {
                wait(&poller, |one| one.error);
                take(&client, &mut calls);
            }
            calls.sort_unstable();
            assert_eq!(calls, (0..issued as u32).collect::<Vec<_>>());
            let (mut wanted, mut found) = (vec![0; BYTES], vec![0; BYTES]);
            source.copy_out(&mut wanted);
            target.copy_out(&mut found);
            assert!(wanted == found, "bytes differ");
            assert_eq!(unacknowledged_bytes(client.as_fd()).expect("asked"), 0);
        }
    }

    #[test]
    fn an_abort_completes_outstanding_notifications() {
        let poller = Poller::new().expect("epoll");
        let Some((client, server)) = pair(&poller, "127.0.0.1:0") else { return };
        let source = buffer();
        let (mut issued, mut calls) = (0, Vec::new());
        // The peer does not read, so the last bytes stay on this side.
        loop {
            let mut gather = Gather::new();
            gather.push(&source, BYTES);
            match gather.send_zero_copy(client.as_fd()) {
                Ok(_) => issued += 1,
                Err(_) => break,
            }
        }
        take(&client, &mut calls);
        assert!(calls.len() < issued && unacknowledged_bytes(client.as_fd()).expect("asked") > 0);
        abort(client.as_fd()).expect("a connection");
        while calls.len() < issued {
            wait(&poller, |one| one.error);
            take(&client, &mut calls);
        }
        calls.sort_unstable();
        assert_eq!(calls, (0..issued as u32).collect::<Vec<_>>());
        let mut byte = [0; 1 << 16];
        let error = loop {
            let mut scatter = Scatter::new();
            scatter.push_bytes(&mut byte);
            match scatter.receive(server.as_fd()) {
                Ok(0) => panic!("an orderly end"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    #[should_panic(expected = "bytes of our own")]
    fn ordinary_memory_is_not_sent_without_a_copy() {
        let poller = Poller::new().expect("epoll");
        let Some((client, _server)) = pair(&poller, "127.0.0.1:0") else { panic!("bytes of our own") };
        let mut gather = Gather::new();
        gather.push_bytes(b"on the stack");
        let _ = gather.send_zero_copy(client.as_fd());
    }
}
