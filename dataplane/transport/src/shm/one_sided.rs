//! Host interface of the fence: the owner's side, the client's side, and closing connections whose clients may still
//! access our memory.

use std::cell::OnceCell;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::{Region, unix};

use super::Shm;
use super::channel::Channel;
use super::fence::{self, Extent, Fence, HoldError, View};
use crate::table::Table;
use crate::types::ConnectionId;

/// A connection that we closed. Its client may still be copying until it closes its end of the socket.
pub(super) struct ClosingChannel {
    socket: UnixStream,
    channel: Arc<Region>,
    /// Process id of the client.
    pid: i32,
}

impl ClosingChannel {
    /// Notifies the client by closing our direction of the socket; the client answers by hanging up.
    pub(super) fn new(socket: UnixStream, channel: Arc<Region>, pid: i32) -> Self {
        // If these fail, the socket is dead already.
        let _ = socket.set_nonblocking(true);
        let _ = socket.shutdown(Shutdown::Write);
        Self { socket, channel, pid }
    }

    fn is_over(&self) -> bool {
        let mut bytes = [0; 256];
        match (&self.socket).read(&mut bytes) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }
}

/// Owner's side: the segments that clients may use, and the clients that may still be using them.
pub(super) struct Owner {
    /// Created on first use; `None` if that failed: no client is served then.
    fence: OnceCell<Option<Fence>>,
    /// Connections that we closed and whose clients have not hung up yet.
    lingering: Vec<ClosingChannel>,
}

impl Owner {
    pub(super) const fn new() -> Self {
        Self { fence: OnceCell::new(), lingering: Vec::new() }
    }

    /// Returns the fence; `None` if it could not be created.
    pub(super) fn fence(&self) -> Option<&Fence> {
        self.fence.get_or_init(|| Fence::new().ok()).as_ref()
    }

    /// Keeps a closing connection until its client has hung up.
    pub(super) fn linger(&mut self, channel: ClosingChannel) {
        self.lingering.push(channel);
        self.sweep();
    }

    /// Returns the number of closing connections at the last check.
    pub(super) const fn lingering(&self) -> usize {
        self.lingering.len()
    }

    fn sweep(&mut self) {
        self.lingering.retain(|lingering| !lingering.is_over());
    }

    /// Returns the process ids of the clients that are using a segment, on open and on closing connections.
    fn users<'a>(&'a mut self, channels: &'a Table<Channel>, segment: SegmentId) -> impl Iterator<Item = i32> + 'a {
        self.sweep();
        let open = channels.iter().map(|(_, channel)| (&channel.region, channel.pid));
        let ended = self.lingering.iter().map(|lingering| (&lingering.channel, lingering.pid));
        open.chain(ended).filter(move |(channel, _)| fence::is_named(channel, segment)).map(|(_, pid)| pid)
    }
}

impl Shm {
    /// Publishes memory for copies by clients.
    pub fn publish(&self, segment: SegmentId, extent: &Extent) {
        if let Some(fence) = self.owner.fence() {
            fence.publish(segment, extent);
        }
    }

    /// Revokes access to a segment for new copies; the caller polls [`Self::is_named`] until no client is using it.
    pub fn retract(&self, segment: SegmentId) {
        if let Some(Some(fence)) = self.owner.fence.get() {
            fence.retract(segment);
        }
    }

    /// Returns true if a client is using a retracted segment.
    pub fn is_named(&mut self, segment: SegmentId) -> bool {
        self.owner.users(&self.channels, segment).next().is_some()
    }

    /// Returns the process ids of the clients that are using a segment; 0 for one that is not visible from here.
    pub fn users(&mut self, segment: SegmentId) -> Vec<i32> {
        let mut pids: Vec<i32> = self.owner.users(&self.channels, segment).collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Returns true if a connection is up; a connection that has ended gives no information about its peer's segments.
    #[must_use]
    pub fn is_up(&self, id: ConnectionId) -> bool {
        view(&self.channels, id).is_some()
    }

    /// Names a segment of the peer in one of our slots, so that it stays while we copy; [`Self::clear`] ends that.
    /// Returns `None` if the segment is gone.
    #[must_use]
    pub fn claim(&self, id: ConnectionId, slot: usize, segment: SegmentId) -> Option<Extent> {
        view(&self.channels, id)?.claim(slot, segment)
    }

    /// Returns the extent of a segment while it is live; checked between the parts of a long copy.
    #[must_use]
    pub fn extent(&self, id: ConnectionId, segment: SegmentId) -> Option<Extent> {
        view(&self.channels, id)?.extent(segment)
    }

    /// Names a segment of the peer for copies that last longer than a call.
    ///
    /// # Errors
    /// When the segment or the connection is gone, or all slots for holds are taken.
    pub fn hold(&self, id: ConnectionId, segment: SegmentId) -> Result<SegmentHold, HoldError> {
        let channel = self.channels.get(id).ok_or(HoldError::Gone)?;
        let view = channel.view.as_ref().ok_or(HoldError::Gone)?;
        // Without a free descriptor the copies take another way.
        let socket = channel.socket.try_clone().map_err(|_| HoldError::Gone)?;
        let slot = view.hold(segment)?;
        let (region, alive) = (Arc::clone(&channel.region), Arc::clone(&channel.holds));
        Ok(SegmentHold { channel: region, slot, _socket: SocketHold { alive, socket } })
    }

    /// Clears the first `slots` slots.
    pub fn clear(&self, id: ConnectionId, slots: usize) {
        if let Some(view) = view(&self.channels, id) {
            (0..slots).for_each(|slot| view.clear(slot));
        }
    }

    /// Returns the process id of the peer, if the kernel copies between it and us.
    #[must_use]
    pub fn process(&self, id: ConnectionId) -> Option<i32> {
        view(&self.channels, id)?.pid()
    }

    /// Returns true if that process is still the one that we connected to, rechecked periodically, because the kernel
    /// reuses process ids.
    #[must_use]
    pub fn is_same_process(&self, id: ConnectionId, now_ns: u64) -> bool {
        view(&self.channels, id).is_some_and(|view| view.is_same_process(now_ns))
    }
}

fn view(channels: &Table<Channel>, id: ConnectionId) -> Option<&View> {
    channels.get(id)?.view.as_ref()
}

/// Descriptor that keeps the socket of a connection open. The last one of a connection that was closed meanwhile ends
/// the stream itself: a forked child may have the socket too, and would keep it open for as long as it lives.
#[derive(Debug)]
struct SocketHold {
    /// Shared with the channel, while that is open, and with the other holds of the connection.
    alive: Arc<()>,
    socket: UnixStream,
}

impl Drop for SocketHold {
    fn drop(&mut self) {
        if Arc::strong_count(&self.alive) == 1 {
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Segment of a peer that copies of ours are using: its owner does not free it before the hold is dropped. The socket
/// of the connection stays open as long, even if the connection is closed meanwhile, as its end would tell the owner
/// that we copy nothing any more.
#[derive(Debug)]
pub struct SegmentHold {
    channel: Arc<Region>,
    slot: usize,
    _socket: SocketHold,
}

impl Drop for SegmentHold {
    fn drop(&mut self) {
        fence::release(&self.channel, self.slot);
    }
}

/// Connection that copies of ours from the peer's pool rely on: its socket stays open until the hold is dropped, even
/// if the connection is closed meanwhile. The peer takes the end of the socket as proof that we read its pool no more.
#[derive(Debug)]
pub struct ConnectionHold {
    socket: SocketHold,
}

impl ConnectionHold {
    /// Keeps a connection for copies that last longer than a call: what the peer has pinned for it stays.
    ///
    /// Returns `None` if it is gone, or if there is no free descriptor.
    #[must_use]
    pub fn new(shm: &Shm, id: ConnectionId) -> Option<Self> {
        let channel = shm.channels.get(id)?;
        let socket = channel.socket.try_clone().ok()?;
        Some(Self { socket: SocketHold { alive: Arc::clone(&channel.holds), socket } })
    }

    /// Returns true if the peer has not closed the connection so far: it closes it before it releases anything that it
    /// has pinned. Asks the kernel.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        !unix::has_hung_up(&self.socket.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane_sys::{HugePages, RegionOptions};

    #[test]
    fn a_connection_is_kept_until_its_hold_is_dropped_and_the_hold_sees_the_peer_leave() {
        let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("channel", 4096) };
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let held = |socket| ConnectionHold { socket: SocketHold { alive: Arc::new(()), socket } };
        let hold = held(ours.try_clone().expect("a descriptor"));
        // As a forked child has it.
        let _inherited = ours;
        let lingering = ClosingChannel::new(theirs, Region::allocate(&options).expect("memory"), 1);
        assert!(!lingering.is_over() && !hold.is_kept(), "the peer has left, and waits for us");
        drop(hold);
        assert!(lingering.is_over());
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let hold = held(ours);
        assert!(hold.is_kept());
        drop(theirs);
        assert!(!hold.is_kept());
    }

    #[test]
    fn a_connection_lingers_until_its_client_has_hung_up() {
        let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("channel", 4096) };
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let lingering = ClosingChannel::new(ours, Region::allocate(&options).expect("memory"), 1);
        assert_eq!((&theirs).read(&mut [0; 8]).expect("an end"), 0, "the client is notified");
        std::io::Write::write_all(&mut &theirs, &[1; 300]).expect("a socket that is half open");
        for _ in 0..10 {
            assert!(!lingering.is_over());
        }
        drop(theirs);
        assert!(lingering.is_over());
    }
}
