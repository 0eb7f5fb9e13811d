//! Setup protocol over the Unix socket: the offer of a new channel, and segments to map.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::SegmentId;
use kvplane_sys::{Region, RegionError, RegionOptions, cpu, doorbell, unix};

use super::answer::{self, MemoryRequest, SegmentAnswer, SegmentOffer};
use super::channel::{CHANNEL_BYTES, Channel, Side};
use super::fence::{Fence, TABLE_BYTES, View};
use crate::types::CloseCause;

/// Timeout for setting up a connection, or mapping a segment.
pub const SETUP_DEADLINE: Duration = Duration::from_secs(2);

/// First word of every message; the last byte is the version.
const MAGIC: u64 = u64::from_le_bytes(*b"KVPSHM\0\x03");
pub(super) const WORDS: usize = 16;
const MESSAGE_BYTES: usize = 8 + WORDS * 8;
/// `EMFILE`: this process has no free descriptor at the moment.
const OUT_OF_DESCRIPTORS: i32 = 24;

/// Reason why the memory of a peer's segment is not available.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ShareError {
    /// The peer does not share the segment, or not this way.
    NotShared,
    /// The segment is larger than the address space.
    TooLarge { bytes: u64 },
    /// The memory cannot be mapped.
    Map(RegionError),
    /// The peer did not answer within [`SETUP_DEADLINE`].
    Late,
}

impl fmt::Display for ShareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotShared => f.write_str("the peer does not share this segment"),
            Self::TooLarge { bytes } => write!(f, "a segment of {bytes} bytes cannot be mapped"),
            Self::Map(error) => error.fmt(f),
            Self::Late => {
                let seconds = SETUP_DEADLINE.as_secs();
                write!(f, "no answer within {seconds} s: the process may be stopped, or is very busy")
            }
        }
    }
}

impl Error for ShareError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Map(error) => Some(error),
            Self::NotShared | Self::TooLarge { .. } | Self::Late => None,
        }
    }
}

/// Encodes a message: magic, then these words, then zeros.
fn message(words: &[u64]) -> [u8; MESSAGE_BYTES] {
    let mut out = [0; MESSAGE_BYTES];
    for (at, &word) in core::iter::once(&MAGIC).chain(words).enumerate() {
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

/// Shard's side: checks the peer's user, creates the channel, and sends it with the pool.
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
        &message(&[CHANNEL_BYTES as u64, pool_bytes, TABLE_BYTES as u64, cookie.0, cookie.1]),
        &fds,
    )?;
    let mut made = Channel::new(Side::Server, socket, &region, client_event, server_event, None);
    made.pid = peer.pid;
    Ok(made)
}

/// Client's side, first half: connects to the listener at this path.
///
/// # Errors
/// [`CloseCause::Unavailable`] when no process listens there, or one of another user that is not accepted.
pub(super) fn call(path: &str) -> Result<UnixStream, CloseCause> {
    let named = |error: io::Error| {
        let text = format!("shared memory at {path}: {error}");
        match error.kind() {
            // The listen backlog is full: a later attempt may succeed.
            io::ErrorKind::WouldBlock => CloseCause::Setup(text),
            _ if error.raw_os_error() == Some(OUT_OF_DESCRIPTORS) => CloseCause::Setup(text),
            _ => CloseCause::Unavailable(text),
        }
    };
    let socket = unix::connect(Path::new(path)).map_err(named)?;
    // The path is external input: the listener must be a process of an accepted user.
    let owner = unix::peer_credentials(&socket).map_err(named)?;
    if owner.uid != cpu::effective_uid() && owner.uid != 0 {
        let text = format!("user {} listens there: shared memory is for processes of the same user", owner.uid);
        return Err(named(io::Error::new(io::ErrorKind::PermissionDenied, text)));
    }
    Ok(socket)
}

/// Offer of a shard.
pub(super) struct Offer {
    channel: Arc<Region>,
    client_event: OwnedFd,
    server_event: OwnedFd,
    pool: Option<Arc<Region>>,
    view: View,
    pid: i32,
}

impl Offer {
    /// Creates the connection of this socket, over which the offer arrived.
    pub(super) fn accept(self, socket: UnixStream) -> Channel {
        let Self { channel, client_event, server_event, pool, view, pid } = self;
        let mut made = Channel::new(Side::Client, socket, &channel, client_event, server_event, pool);
        (made.view, made.pid) = (Some(view), pid);
        made
    }
}

/// Client's side, second half: takes the offer; `None` if it has not arrived yet.
pub(super) fn take_offer(socket: &UnixStream) -> io::Result<Option<Offer>> {
    let Some((words, fds)) = receive(socket, 5)? else { return Ok(None) };
    let [channel_bytes, pool_bytes, table_bytes, cookie_address, cookie, ..] = words;
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
        Ok(bytes) => Some(Region::map_pool(next("pool")?, bytes).map_err(io::Error::other)?),
        Err(_) => return Err(io::Error::other(format!("a pool of {pool_bytes} bytes cannot be mapped"))),
    };
    let pid = unix::peer_credentials(socket)?.pid;
    let view = View::new(Arc::clone(&channel), table, pid, (cookie_address, cookie))?;
    Ok(Some(Offer { channel, client_event, server_event, pool, view, pid }))
}

/// Receives one complete message; `None` if there is none yet. Each message is sent by one call, which the kernel
/// neither splits nor joins with others.
fn receive(socket: &UnixStream, max_fds: usize) -> io::Result<Option<([u64; WORDS], Vec<OwnedFd>)>> {
    let mut bytes = [0; MESSAGE_BYTES];
    match unix::recv_with_fds(socket, &mut bytes, max_fds) {
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((MESSAGE_BYTES, fds)) => Ok(Some((words(&bytes)?, fds))),
        Ok((count, _)) => Err(io::Error::other(format!("a message has {count} bytes instead of {MESSAGE_BYTES}"))),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes a request that has arrived at the shard; `None` if there is none, an error if the client is gone or
/// malfunctions.
pub(super) fn take_request(socket: &UnixStream) -> io::Result<Option<(SegmentId, MemoryRequest)>> {
    let Some((words, _)) = receive(socket, 0)? else { return Ok(None) };
    let wanted = match words[1] {
        0 => MemoryRequest::Region,
        1 => MemoryRequest::Device { known: words[2] },
        other => return Err(io::Error::other(format!("a request for memory of kind {other}"))),
    };
    Ok(Some((SegmentId::from_bits(words[0]), wanted)))
}

/// Answers a request for this segment: with its memory, or that there is none to share. The reply names the segment. A
/// read-only region is sent as a descriptor that cannot be mapped writable. A region for which there is no such
/// descriptor, or that cannot be written through a new mapping any more, is not shared: the client then uses another
/// path.
pub(super) fn offer_segment(socket: &UnixStream, segment: SegmentId, offer: &SegmentOffer<'_>) -> io::Result<()> {
    let send = |region: &Region, writable, fd: BorrowedFd<'_>| {
        let words = [answer::REGION, region.bytes() as u64, u64::from(writable), segment.to_bits()];
        unix::send_with_fds(socket, &message(&words), &[fd])
    };
    match *offer {
        SegmentOffer::Region { region, writable: true } if region.writable() => {
            if let Some(fd) = region.fd().filter(|_| !region.is_sealed()) {
                return send(region, true, fd);
            }
        }
        SegmentOffer::Region { region, .. } => {
            if let Ok(fd) = region.read_only_fd() {
                return send(region, false, fd.as_fd());
            }
        }
        SegmentOffer::Device(shared) => {
            let (words, fd) = answer::of_device(segment, shared);
            return unix::send_with_fds(socket, &message(&words), fd.as_slice());
        }
        SegmentOffer::Known => {
            return unix::send_with_fds(socket, &message(&[answer::KNOWN, 0, 0, segment.to_bits()]), &[]);
        }
        SegmentOffer::None => {}
    }
    unix::send_with_fds(socket, &message(&[answer::NONE, 0, 0, segment.to_bits()]), &[])
}

/// Requests a segment's memory.
///
/// # Errors
/// When the peer has not read earlier requests, or is gone.
pub(super) fn ask_segment(socket: &UnixStream, segment: SegmentId, wanted: MemoryRequest) -> io::Result<()> {
    let (kind, known) = match wanted {
        MemoryRequest::Region => (0, 0),
        MemoryRequest::Device { known } => (1, known),
    };
    unix::send_with_fds(socket, &message(&[segment.to_bits(), kind, known]), &[])
}

/// Takes a reply that has arrived: its segment, and its memory; `None` if there is none yet. Replies name their
/// segments, so a late one is not mistaken for another.
pub(super) fn take_answer(socket: &UnixStream) -> io::Result<Option<(SegmentId, SegmentAnswer)>> {
    Ok(receive(socket, 1)?.map(|(words, fds)| answer::decode(&words, fds.into_iter().next())))
}

#[cfg(test)]
mod tests {
    use super::super::answer::SegmentMemory;
    use super::*;

    /// Creates memory whose first word identifies it.
    fn memory(word: u64) -> Arc<Region> {
        let options = RegionOptions { shared: true, ..RegionOptions::new("setup-test", 4096) };
        let region = Region::allocate(&options).expect("memory");
        region.copy_in(0, &word.to_le_bytes());
        region
    }

    fn pair() -> (UnixStream, UnixStream) {
        let (asking, answering) = UnixStream::pair().expect("sockets");
        asking.set_nonblocking(true).expect("a socket");
        (asking, answering)
    }

    #[test]
    fn replies_name_their_segments_and_never_block() {
        let (asking, answering) = pair();
        let [first, second] = [1, 2].map(|index| SegmentId { index, generation: 7 });
        ask_segment(&asking, first, MemoryRequest::Region).expect("sent");
        ask_segment(&asking, second, MemoryRequest::Device { known: 7 }).expect("sent");
        assert!(take_answer(&asking).expect("a living peer").is_none(), "nothing yet, and no wait");
        assert_eq!(take_request(&answering).expect("asked"), Some((first, MemoryRequest::Region)));
        assert_eq!(take_request(&answering).expect("asked"), Some((second, MemoryRequest::Device { known: 7 })));
        let shared = SegmentOffer::Region { region: &memory(2), writable: false };
        offer_segment(&answering, second, &shared).expect("sent");
        offer_segment(&answering, first, &SegmentOffer::None).expect("sent");
        let (named, shared) = take_answer(&asking).expect("answered").expect("there");
        let Ok(SegmentMemory::Region(region)) = shared.memory() else { panic!("it is shared") };
        assert_eq!((named, region.load_u64(0), region.writable()), (second, 2, false));
        let (named, shared) = take_answer(&asking).expect("answered").expect("there");
        assert_eq!(named, first);
        assert!(shared.memory().is_err());
        drop(answering);
        assert!(take_answer(&asking).is_err(), "the end");
    }

    #[test]
    fn requests_to_a_peer_that_does_not_read_are_bounded() {
        let (asking, _answering) = pair();
        let mut index = 0;
        while ask_segment(&asking, SegmentId { index, generation: 1 }, MemoryRequest::Region).is_ok() {
            index += 1;
            assert!(index < 1 << 20, "an unbounded socket");
        }
    }

    /// Whatever the client does with the words of the reply: the descriptor itself grants no right to write.
    #[test]
    fn read_only_segments_cannot_be_mapped_writable() {
        const EACCES: i32 = 13;
        let (asking, answering) = pair();
        let segment = SegmentId { index: 1, generation: 1 };
        let region = memory(42);
        let shared = SegmentOffer::Region { region: &region, writable: false };
        offer_segment(&answering, segment, &shared).expect("sent");
        let (words, mut fds) = receive(&asking, 1).expect("answered").expect("there");
        assert_eq!(words[..5], [1, 4096, 0, segment.to_bits(), 0]);
        let fd = fds.pop().expect("a descriptor");
        let again = fd.try_clone().expect("a descriptor");
        let Err(kvplane_sys::RegionError::Map { source, .. }) = Region::map_shared(again, 4096, true) else {
            panic!("mapped writable")
        };
        assert_eq!(source.raw_os_error(), Some(EACCES));
        let view = Region::map_shared(fd, 4096, false).expect("mapped");
        region.copy_in(0, &43u64.to_le_bytes());
        assert_eq!(view.load_u64(0), 43);
        // Registered again, as writable: memory that no new mapping can write is not shared.
        let shared = SegmentOffer::Region { region: &region, writable: true };
        offer_segment(&answering, segment, &shared).expect("sent");
        assert!(take_answer(&asking).expect("answered").expect("there").1.memory().is_err());
    }
}
