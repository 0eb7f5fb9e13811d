//! Vectored I/O on nonblocking sockets by direct system calls: gathered sends, scattered receives.
//!
//! The kernel uses the memory only during the call, so the borrows of [`Gather`] and [`Scatter`] suffice: when a call
//! has returned, the kernel holds no reference to it. The one exception is [`Gather::send_zero_copy`]. Ranges of
//! regions are passed to the kernel by address, never through references, because other parties may write them
//! concurrently.

use crate::net;
use crate::region::IoBuf;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Limit of pieces of memory in one call.
pub const MAX_PIECES: usize = 128;

/// Largest single transfer in bytes: the kernel moves no more than 2 GiB at once.
const MAX_TRANSFER_BYTES: usize = 1 << 30;

struct Vectors {
    list: [MaybeUninit<libc::iovec>; MAX_PIECES],
    count: usize,
    bytes: usize,
}

impl Vectors {
    const fn new() -> Self {
        Self { list: [const { MaybeUninit::uninit() }; MAX_PIECES], count: 0, bytes: 0 }
    }

    fn push(&mut self, address: *mut u8, bytes: usize) {
        assert!(self.count < MAX_PIECES, "more than {MAX_PIECES} pieces in one call");
        let bytes = bytes.min(MAX_TRANSFER_BYTES - self.bytes);
        if bytes > 0 {
            self.list[self.count].write(libc::iovec { iov_base: address.cast(), iov_len: bytes });
            self.count += 1;
            self.bytes += bytes;
        }
    }

    fn first(&self) -> libc::iovec {
        assert!(self.count > 0, "nothing to send or receive");
        // SAFETY: entries below the count were written.
        unsafe { self.list[0].assume_init() }
    }
}

/// Pieces of memory to send in one call.
pub struct Gather<'a> {
    vectors: Vectors,
    /// True if all pieces are ranges of regions.
    regions_only: bool,
    borrows: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// Creates a list without pieces.
    #[must_use]
    pub const fn new() -> Self {
        Self { vectors: Vectors::new(), regions_only: true, borrows: PhantomData }
    }

    /// Adds a slice of ordinary memory. Panics if the list [`is_full`](Self::is_full).
    pub fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.regions_only = false;
        self.vectors.push(bytes.as_ptr().cast_mut(), bytes.len());
    }

    /// Adds the first `bytes` bytes of a buffer in a region. Panics if the buffer is shorter, or the list
    /// [`is_full`](Self::is_full).
    pub fn push(&mut self, buffer: &'a IoBuf, bytes: usize) {
        assert!(bytes <= buffer.bytes(), "{bytes} bytes of a buffer of {}", buffer.bytes());
        self.vectors.push(buffer.pointer(), bytes);
    }

    /// Returns true if no further piece can be added.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.vectors.count == MAX_PIECES
    }

    /// Returns the total length of the pieces, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.vectors.bytes
    }

    /// Sends as many bytes as the kernel accepts now; returns their number. Never blocks, never raises a signal. Panics
    /// if there is nothing to send.
    ///
    /// # Errors
    /// The kernel's; [`io::ErrorKind::WouldBlock`] if the socket buffer is full.
    pub fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.send_with(fd, 0)
    }

    /// Sends like [`Self::send`], with MSG_MORE: more bytes follow at once, and the kernel may wait for them to fill a
    /// packet.
    ///
    /// # Errors
    /// See [`Self::send`].
    pub fn send_more(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.send_with(fd, libc::MSG_MORE)
    }

    /// Sends like [`Self::send`] without a copy, on a socket for which [`zero_copy::enable`](crate::zero_copy::enable)
    /// was called. The kernel refers to the memory until it has sent the notification of this call; it pins the pages,
    /// so unmapping them is harmless, but bytes written there meanwhile may be sent to the peer. Panics if a piece is
    /// ordinary memory.
    ///
    /// # Errors
    /// See [`Self::send`]; also if the kernel has no room for the notification, may not pin so many pages (ENOBUFS), or
    /// cannot pin these (EFAULT). The failed call is not counted, and a send with a copy may succeed.
    pub fn send_zero_copy(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        assert!(self.regions_only, "bytes of our own would be changed before they have left");
        self.send_with(fd, libc::MSG_ZEROCOPY)
    }

    fn send_with(&mut self, fd: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<usize> {
        let first = self.vectors.first();
        let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        retry(|| {
            if self.vectors.count == 1 {
                // SAFETY: the piece is borrowed, or in a region that the caller's buffer keeps mapped.
                return unsafe { libc::send(fd.as_raw_fd(), first.iov_base, first.iov_len, flags) };
            }
            // SAFETY: all-zero is a valid msghdr: no name, no vectors, no control data.
            let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
            header.msg_iov = self.vectors.list.as_mut_ptr().cast();
            header.msg_iovlen = self.vectors.count;
            // SAFETY: as above, for `count` pieces.
            unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) }
        })
    }
}

impl Default for Gather<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// Pieces of memory to receive into, in order.
pub struct Scatter<'a> {
    vectors: Vectors,
    borrows: PhantomData<&'a mut [u8]>,
}

impl<'a> Scatter<'a> {
    /// Creates a list without pieces.
    #[must_use]
    pub const fn new() -> Self {
        Self { vectors: Vectors::new(), borrows: PhantomData }
    }

    /// Adds a slice of ordinary memory. Panics if the list [`is_full`](Self::is_full).
    pub fn push_bytes(&mut self, bytes: &'a mut [u8]) {
        self.vectors.push(bytes.as_mut_ptr(), bytes.len());
    }

    /// Adds the first `bytes` bytes of a buffer in a region. Panics if the buffer is shorter, or the list
    /// [`is_full`](Self::is_full). If the region is read-only, the kernel rejects the receive.
    pub fn push(&mut self, buffer: &'a IoBuf, bytes: usize) {
        assert!(bytes <= buffer.bytes(), "{bytes} bytes of a buffer of {}", buffer.bytes());
        self.vectors.push(buffer.pointer(), bytes);
    }

    /// Returns true if no further piece can be added.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.vectors.count == MAX_PIECES
    }

    /// Returns the total length of the pieces, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.vectors.bytes
    }

    /// Receives the available bytes; returns their number, 0 at the end of the stream. Never blocks. Panics if there
    /// are no pieces.
    ///
    /// # Errors
    /// The kernel's; [`io::ErrorKind::WouldBlock`] if no bytes are available.
    pub fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let first = self.vectors.first();
        retry(|| {
            if self.vectors.count == 1 {
                // SAFETY: the piece is borrowed mutably, or in a region that the caller's buffer keeps mapped and to
                // which no Rust reference exists.
                return unsafe { libc::recv(fd.as_raw_fd(), first.iov_base, first.iov_len, libc::MSG_DONTWAIT) };
            }
            // SAFETY: as in `Gather::send`.
            let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
            header.msg_iov = self.vectors.list.as_mut_ptr().cast();
            header.msg_iovlen = self.vectors.count;
            // SAFETY: as above, for `count` pieces.
            unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) }
        })
    }
}

impl Default for Scatter<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// Accepts a pending connection, nonblocking and closed on exec; `None` if none is pending.
///
/// # Errors
/// When the kernel provides no descriptor. A pending connection that has ended is skipped.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let (nobody, no_length) = (std::ptr::null_mut(), std::ptr::null_mut());
    loop {
        // SAFETY: creates a new descriptor; no address is requested.
        let socket = unsafe { libc::accept4(listener.as_raw_fd(), nobody, no_length, flags) };
        if socket >= 0 {
            // SAFETY: the kernel has just created it, and this is its only owner.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(socket) }));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock => return Ok(None),
            io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
            _ => return Err(error),
        }
    }
}

/// Starts to connect a nonblocking socket. The socket becomes writable on success, and has an error on failure.
///
/// # Errors
/// When the connection fails at once.
pub fn start_connect(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let (storage, bytes) = net::to_storage(address);
    // SAFETY: the storage holds an address of that length.
    match unsafe { libc::connect(socket.as_raw_fd(), (&raw const storage).cast(), bytes) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => Ok(()),
            error => Err(error),
        },
    }
}

/// Repeats a call while a signal interrupts it; returns its result.
fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(bytes) => return Ok(bytes),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poller::{Interest, Poller};
    use crate::region::{HugePages, Region, RegionOptions};
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::time::Duration;

    /// More bytes than the sockets hold.
    const BYTES: usize = 12_000_000;

    fn buffer() -> IoBuf {
        let huge = HugePages::Never;
        IoBuf::whole(Region::allocate(&RegionOptions { huge, ..RegionOptions::new("stream", BYTES) }).expect("memory"))
    }

    fn pair(poller: &Poller) -> (OwnedFd, OwnedFd) {
        let any = "127.0.0.1:0".parse().expect("address");
        let listener = net::tcp_listener(any, 4).expect("listener");
        assert!(accept(listener.as_fd()).expect("no error").is_none());
        let address = listener.local_addr().expect("address");
        let client = net::tcp_socket(address).expect("socket");
        start_connect(client.as_fd(), address).expect("started");
        poller.add(client.as_fd(), 1, Interest::BothEdges).expect("added");
        let mut ready = Vec::new();
        poller.wait(Duration::from_secs(20), &mut ready).expect("wait");
        assert!(ready[0].writable && net::take_socket_error(client.as_fd()).expect("asked").is_none());
        let server = accept(listener.as_fd()).expect("descriptor").expect("connected");
        poller.add(server.as_fd(), 2, Interest::BothEdges).expect("added");
        (client, server)
    }

    /// Sends as much as one call accepts, from `sent` on. Returns true if the kernel accepted anything.
    fn send_some(source: &IoBuf, sent: &mut usize, client: &OwnedFd) -> bool {
        let rest = source.slice(*sent, BYTES - *sent);
        let count = rest.bytes().div_ceil(9_999).min(MAX_PIECES);
        let piece = |n: usize| rest.slice(n * 9_999, 9_999.min(rest.bytes() - n * 9_999));
        let pieces: Vec<IoBuf> = (0..count).map(piece).collect();
        let mut gather = Gather::new();
        pieces.iter().for_each(|piece| gather.push(piece, piece.bytes()));
        match gather.send(client.as_fd()) {
            Ok(bytes) => *sent += bytes,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        gather.bytes() > 0 && *sent > BYTES - rest.bytes()
    }

    #[test]
    fn pieces_arrive_in_order_and_both_sides_report_would_block() {
        let poller = Poller::new().expect("epoll");
        let (client, server) = pair(&poller);
        let (source, target) = (buffer(), buffer());
        let bytes: Vec<u8> = (0..BYTES as u32).map(|i| (i * 7 + (i >> 11)) as u8).collect();
        source.copy_in(&bytes);
        let (mut sent, mut received, mut refused) = (0, 0, 0);
        let mut small = [0; 1000];
        while received < BYTES {
            while sent < BYTES && send_some(&source, &mut sent, &client) {}
            refused += usize::from(sent < BYTES);
            // Into ordinary memory first, then into the region.
            let place = target.slice(received, BYTES - received);
            let first = place.bytes().min(small.len());
            let rest = place.slice(first, place.bytes() - first);
            let mut scatter = Scatter::new();
            scatter.push_bytes(&mut small[..first]);
            scatter.push(&rest, rest.bytes());
            match scatter.receive(server.as_fd()) {
                Ok(count) => {
                    place.copy_in(&small[..count.min(first)]);
                    received += count;
                }
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        let mut found = vec![0; BYTES];
        target.copy_out(&mut found);
        assert!(found == bytes, "bytes differ");
        assert!(refused > 0, "the kernel took everything at once");
        drop(client);
        let mut scatter = Scatter::new();
        scatter.push(&target, 10);
        let mut ready = Vec::new();
        while scatter.receive(server.as_fd()).is_err() {
            poller.wait(Duration::from_secs(20), &mut ready).expect("wait");
        }
        assert_eq!(scatter.receive(server.as_fd()).expect("the end"), 0);
        let mut gather = Gather::new();
        gather.push_bytes(b"into the void");
        while gather.send(server.as_fd()).is_ok() {}
        assert_eq!(gather.send(server.as_fd()).expect_err("no signal").kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_region_that_is_read_only_refuses_bytes() {
        let poller = Poller::new().expect("epoll");
        let (client, server) = pair(&poller);
        let options = RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new("stream", 4096) };
        let region = Region::allocate(&options).expect("memory");
        let view = Region::map_shared(region.read_only_fd().expect("descriptor"), 4096, false).expect("mapped");
        let view = IoBuf::whole(Arc::clone(&view));
        let mut gather = Gather::new();
        gather.push_bytes(b"bytes");
        assert_eq!(gather.send(client.as_fd()).expect("room"), 5);
        let mut scatter = Scatter::new();
        scatter.push(&view, 4096);
        let mut ready = Vec::new();
        let error = loop {
            match scatter.receive(server.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poller.wait(Duration::from_secs(20), &mut ready).expect("wait");
                }
                result => break result.expect_err("no place to write"),
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
