//! The few bytes that go over the Unix socket: the offer of a new channel, and segments to map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::{Region, RegionOptions, cpu, doorbell, unix};

use super::SETUP_DEADLINE;
use super::channel::{CHANNEL_BYTES, Channel, Side};
use super::fence::{Fence, TABLE_BYTES, View};

/// First word of every message; the last byte is the version.
const MAGIC: u64 = u64::from_le_bytes(*b"KVPSHM\0\x02");
const WORDS: usize = 5;
const MESSAGE_BYTES: usize = 8 + WORDS * 8;

/// Magic, then five words.
fn message(words: [u64; WORDS]) -> [u8; MESSAGE_BYTES] {
    let mut out = [0; MESSAGE_BYTES];
    for (at, word) in core::iter::once(MAGIC).chain(words).enumerate() {
        out[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
    }
    out
}

fn words(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<[u64; WORDS]> {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
        u64::from_le_bytes(word)
    };
    if word(0) != MAGIC {
        return Err(io::Error::other("the peer speaks another version of the shared-memory protocol"));
    }
    Ok(core::array::from_fn(|at| word(at + 1)))
}

/// The shard's side: checks who it is, makes the channel, and hands it over with the pool.
pub(super) fn accept(socket: UnixStream, pool: Option<&Arc<Region>>, fence: &Fence) -> io::Result<Channel> {
    let peer = unix::peer_credentials(&socket)?;
    if peer.uid != cpu::effective_uid() && peer.uid != 0 {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    socket.set_nonblocking(true)?;
    let options = RegionOptions {
        shared: true,
        prefault: false,
        huge: kvplane_sys::HugePages::Never,
        ..RegionOptions::new("kvplane-channel", CHANNEL_BYTES)
    };
    let region = Region::allocate(&options).map_err(io::Error::other)?;
    let (client_event, server_event) = (doorbell::event_fd()?, doorbell::event_fd()?);
    let channel_fd = region.fd().ok_or_else(|| io::Error::other("a shared region has a descriptor"))?;
    let mut fds: Vec<BorrowedFd<'_>> = vec![channel_fd, client_event.as_fd(), server_event.as_fd(), fence.fd()];
    fds.extend(pool.and_then(|pool| pool.fd()));
    let cookie = fence.cookie();
    let pool_bytes = pool.map_or(0, |pool| pool.bytes() as u64);
    unix::send_with_fds(
        &socket,
        &message([CHANNEL_BYTES as u64, pool_bytes, TABLE_BYTES as u64, cookie.0, cookie.1]),
        &fds,
    )?;
    Ok(Channel::new(Side::Server, socket, &region, client_event, server_event, None))
}

/// The client's side.
pub(super) fn connect(path: &str) -> io::Result<Channel> {
    let socket = UnixStream::connect(path)?;
    // The path comes from outside: whoever listens there must be one whom we would let in.
    let owner = unix::peer_credentials(&socket)?;
    if owner.uid != cpu::effective_uid() && owner.uid != 0 {
        let text = format!("user {} listens there: shared memory is for processes of the same user", owner.uid);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let (words, fds) = receive(&socket, 5)?;
    let [channel_bytes, pool_bytes, table_bytes, cookie_address, cookie] = words;
    if channel_bytes != CHANNEL_BYTES as u64 {
        return Err(io::Error::other(format!("a channel of {channel_bytes} bytes was offered, not {CHANNEL_BYTES}")));
    }
    if table_bytes != TABLE_BYTES as u64 {
        return Err(io::Error::other(format!("a fence of {table_bytes} bytes was offered, not {TABLE_BYTES}")));
    }
    let mut fds = fds.into_iter();
    let mut next = |what: &str| -> io::Result<OwnedFd> {
        fds.next().ok_or_else(|| io::Error::other(format!("the shard did not send its {what}")))
    };
    let channel = Region::map_shared(next("channel")?, CHANNEL_BYTES, true).map_err(io::Error::other)?;
    let (client_event, server_event) = (next("client eventfd")?, next("server eventfd")?);
    let table = next("fence")?;
    let pool = match usize::try_from(pool_bytes) {
        Ok(0) => None,
        Ok(bytes) => Some(Region::map_shared(next("pool")?, bytes, true).map_err(io::Error::other)?),
        Err(_) => return Err(io::Error::other(format!("a pool of {pool_bytes} bytes cannot be mapped"))),
    };
    socket.set_nonblocking(true)?;
    let pid = unix::peer_credentials(&socket)?.pid;
    let view = View::new(Arc::clone(&channel), table, pid, (cookie_address, cookie))?;
    let mut made = Channel::new(Side::Client, socket, &channel, client_event, server_event, pool);
    made.view = Some(view);
    Ok(made)
}

/// One whole message, within the deadline.
fn receive(socket: &UnixStream, max_fds: usize) -> io::Result<([u64; WORDS], Vec<OwnedFd>)> {
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(SETUP_DEADLINE))?;
    let mut bytes = [0; MESSAGE_BYTES];
    let (count, fds) = unix::recv_with_fds(socket, &mut bytes, max_fds)?;
    match count {
        0 => Err(io::Error::other("the shard refused: shared memory is for processes of the same user")),
        MESSAGE_BYTES => Ok((words(&bytes)?, fds)),
        _ => Err(io::Error::other(format!("{count} bytes came where {MESSAGE_BYTES} belong"))),
    }
}

/// A request that has arrived at the shard; `None` when there is none, an error when the client is gone or broken.
pub(super) fn take_request(socket: &UnixStream) -> io::Result<Option<SegmentId>> {
    let mut bytes = [0; MESSAGE_BYTES];
    match unix::recv_with_fds(socket, &mut bytes, 0) {
        Ok((MESSAGE_BYTES, _)) => Ok(Some(SegmentId::from_bits(words(&bytes)?[0]))),
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((count, _)) => Err(io::Error::other(format!("{count} bytes came where {MESSAGE_BYTES} belong"))),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Answers for this segment: its region, or that there is none to share. The answer names the segment. What may only be
/// read goes as a descriptor that cannot be mapped writable; what cannot go so, or cannot be written through a new
/// mapping any more, is not shared: the client then takes another way.
pub(super) fn offer_segment(
    socket: &UnixStream,
    segment: SegmentId,
    region: Option<&Arc<Region>>,
    writable: bool,
) -> io::Result<()> {
    let offer = |region: &Region, writable, fd: BorrowedFd<'_>| {
        let words = [1, region.bytes() as u64, u64::from(writable), segment.to_bits(), 0];
        unix::send_with_fds(socket, &message(words), &[fd])
    };
    if let Some(region) = region {
        if writable && region.writable() {
            if let Some(fd) = region.fd().filter(|_| !region.is_sealed()) {
                return offer(region, true, fd);
            }
        } else if let Ok(fd) = region.read_only_fd() {
            return offer(region, false, fd.as_fd());
        }
    }
    unix::send_with_fds(socket, &message([0, 0, 0, segment.to_bits(), 0]), &[])
}

/// Asks for a segment's memory; `None` when the peer does not share it. After an error an answer may still come:
/// nothing may be asked on this socket again, or that answer would be taken for another segment's.
pub(super) fn ask_segment(socket: &UnixStream, segment: SegmentId) -> io::Result<Option<Arc<Region>>> {
    unix::send_with_fds(socket, &message([segment.to_bits(), 0, 0, 0, 0]), &[])?;
    let answer = receive(socket, 1);
    socket.set_nonblocking(true)?;
    let ([shared, bytes, writable, named, _], fds) = answer?;
    if named != segment.to_bits() {
        return Err(io::Error::other("the peer answered for another segment than the one it was asked for"));
    }
    let (1, Some(fd)) = (shared, fds.into_iter().next()) else { return Ok(None) };
    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
    Region::map_shared(fd, bytes, writable != 0).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory whose first word says whose it is.
    fn memory(word: u64) -> Arc<Region> {
        let options = RegionOptions { shared: true, ..RegionOptions::new("setup-test", 4096) };
        let region = Region::allocate(&options).expect("memory");
        region.copy_in(0, &word.to_le_bytes());
        region
    }

    #[test]
    fn a_late_answer_is_not_taken_for_another_segments() {
        let (asking, answering) = UnixStream::pair().expect("sockets");
        let [first, second] = [1, 2].map(|index| SegmentId { index, generation: 7 });
        // The owner was slow with the first: its answer is there when the second is asked for.
        offer_segment(&answering, first, Some(&memory(1)), true).expect("sent");
        let error = ask_segment(&asking, second).expect_err("another's memory").to_string();
        assert!(error.contains("another segment"), "{error}");
        // Answers in time are taken, a refusal as such.
        offer_segment(&answering, second, Some(&memory(2)), false).expect("sent");
        let region = ask_segment(&asking, second).expect("answered").expect("shared");
        assert_eq!((region.load_u64(0), region.writable()), (2, false));
        offer_segment(&answering, first, None, true).expect("sent");
        assert!(ask_segment(&asking, first).expect("answered").is_none());
    }

    /// Whatever the client makes of the answer's words: the descriptor itself gives no right to write.
    #[test]
    fn what_may_only_be_read_cannot_be_mapped_writable() {
        const EACCES: i32 = 13;
        let (asking, answering) = UnixStream::pair().expect("sockets");
        let segment = SegmentId { index: 1, generation: 1 };
        let region = memory(42);
        offer_segment(&answering, segment, Some(&region), false).expect("sent");
        let (words, mut fds) = receive(&asking, 1).expect("an answer");
        assert_eq!(words, [1, 4096, 0, segment.to_bits(), 0]);
        let fd = fds.pop().expect("a descriptor");
        let again = fd.try_clone().expect("a descriptor");
        let Err(kvplane_sys::RegionError::Map { source, .. }) = Region::map_shared(again, 4096, true) else {
            panic!("mapped writable")
        };
        assert_eq!(source.raw_os_error(), Some(EACCES));
        let view = Region::map_shared(fd, 4096, false).expect("mapped");
        region.copy_in(0, &43u64.to_le_bytes());
        assert_eq!(view.load_u64(0), 43);
        // Registered again, for writing: what no new mapping can write is left to other ways.
        offer_segment(&answering, segment, Some(&region), true).expect("sent");
        assert!(ask_segment(&asking, segment).expect("answered").is_none());
    }
}
