//! The mesh: its interface, the order in which channels are looked at, and how its thread waits.

use std::time::{Duration, Instant};

use kvplane_sys::{IoBuf, Region, cpu};

use crate::config::MeshConfig;
use crate::connections::{Change, Connections};
use crate::counters::{LaneTraffic, MeshCounters};
use crate::error::{ChannelError, DownCause, MeshError};
use crate::network::Wire;
use crate::peers::{Channel, Channels, Lane, Peer};
use crate::shared::TakenFrame;

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 64;
/// Polls after which the poller is called: of these many with a frame, or of these many without.
const BUSY_POLLS: u32 = 64;
const IDLE_POLLS: u32 = 16;
/// Polls without a frame, where frames come over connections: the first leaves the question to the wait behind it.
const IDLE_POLLS_STREAMED: u32 = 2;
/// Time after which a poll without a frame calls the poller in any case.
const DRIVE_INTERVAL: Duration = Duration::from_millis(1);
/// Looks of a wait before it yields the core, where every process of the host can have a core of its own: at least, and
/// at most. The number doubles when looking has paid off, and halves when it was in vain, because then the peer may
/// need this very core.
const SPINS: (u32, u32) = (4, 256);
/// Waits after which one looks for longer than the last ones have taught.
const PROBE_WAITS: u32 = 64;
/// Looks between two yields, and yields before it sleeps: where processes have cores of their own, and where they
/// share them.
const LOOKS: u32 = 4;
const YIELDS: (u32, u32) = (100, 3);
/// Longest sleep without a look: a peer that stops between its frame and its ring must not delay others for longer.
const LONGEST_PARK: Duration = Duration::from_millis(20);

/// Part of a frame's payload.
#[derive(Clone, Copy, Debug)]
pub struct PayloadPart<'a> {
    /// Memory that it is in.
    pub region: &'a Region,
    /// Offset there, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// Outcome of [`Mesh::send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// The frame is on its way; its memory may change.
    Sent,
    /// There is no room for it now: the peer has to take frames first.
    Full,
    /// There is no channel to the peer.
    Down,
}

/// A frame that has arrived.
#[derive(Debug)]
pub struct Frame {
    /// Rank of the sender.
    pub from: u8,
    /// Incarnation of the sender.
    pub incarnation: u64,
    /// Head.
    pub head: [u8; HEAD_BYTES],
    /// Payload, in place. Its bytes are the frame's until the frame is released, and others' afterwards. Payloads begin
    /// at a multiple of 64 bytes.
    pub payload: IoBuf,
}

/// Event of a mesh.
#[derive(Debug)]
pub enum MeshEvent {
    /// A frame arrived. It is released by the next [`Mesh::poll`], [`Mesh::wait`] or [`Mesh::release`].
    Frame(Frame),
    /// The channel to this rank is open: frames can be sent, and those that follow are of it.
    Up(u8),
    /// The channel to this rank has ended; all that arrived before was delivered. A new one may come up.
    Down {
        /// Rank of the peer.
        rank: u8,
        /// Cause of the end.
        cause: DownCause,
    },
}

/// A frame that the caller has.
struct HeldFrame {
    rank: u8,
    /// Number of its channel.
    channel: u64,
    end: u64,
}

/// Channels of frames between this process and the others of its world. Of one thread at a time.
pub struct Mesh {
    connections: Connections,
    held: Option<HeldFrame>,
    /// Index, among the ranks that have a channel, of the one to look at next.
    next: usize,
    busy: u32,
    idle: u32,
    /// Time of the last call of the poller.
    driven: Instant,
    /// Cores that this process may use.
    cores: usize,
    /// Looks of the next wait, and the waits since the last one that looked for longer.
    spins: u32,
    waits: u32,
}

impl core::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mesh").field("address", &self.address()).finish_non_exhaustive()
    }
}

impl Mesh {
    /// Starts a mesh without peers: it listens at [`Self::address`].
    ///
    /// # Errors
    /// When a setting is invalid or the kernel refuses a resource; the error names it and the next step.
    pub fn start(config: MeshConfig) -> Result<Self, MeshError> {
        let connections = Connections::start(config)?;
        let cores = cpu::allowed_cores().len().max(1);
        Ok(Self {
            connections,
            held: None,
            next: 0,
            busy: 0,
            idle: 0,
            driven: Instant::now(),
            cores,
            spins: SPINS.1,
            waits: 0,
        })
    }

    /// Returns the address that peers connect to, at most 512 bytes.
    #[must_use]
    pub fn address(&self) -> &str {
        self.connections.address()
    }

    /// Sets the processes to have channels with; one of this process's own rank is ignored. What did not change keeps
    /// its channel. Channels of peers that are not listed any more, or have another incarnation or address, are dropped
    /// without an event, and nothing of them is delivered afterwards.
    pub fn set_peers(&mut self, peers: &[Peer]) {
        self.connections.set_peers(peers);
    }

    /// Returns which channels are open, and which peers refuse connections.
    #[must_use]
    pub fn channels(&self) -> Channels {
        self.connections.states()
    }

    /// Returns the longest payload of a frame, in bytes: a multiple of 64.
    #[must_use]
    pub const fn payload_limit(&self) -> usize {
        self.connections.payload_bytes()
    }

    /// Sends a frame, whose payload is the concatenation of the parts. Copies it before it returns; never blocks.
    /// Frames to a peer arrive in order.
    ///
    /// # Panics
    /// If the payload is longer than [`Self::payload_limit`], or a part is outside its region.
    pub fn send(&mut self, to: u8, head: &[u8; HEAD_BYTES], payload: &[PayloadPart<'_>]) -> SendOutcome {
        let bytes: usize = payload.iter().map(|part| part.bytes).sum();
        let limit = self.payload_limit();
        assert!(bytes <= limit, "a payload of {bytes} bytes is over the limit of {limit}");
        let Connections { entries, network, counters, .. } = &mut self.connections;
        let entry = entries.get_mut(usize::from(to)).and_then(Option::as_mut);
        let channel = entry.and_then(|entry| entry.channel.as_mut()).filter(|channel| channel.is_open());
        let sent = match channel.map(|channel| &mut channel.lane) {
            None => return SendOutcome::Down,
            Some(Lane::Shared(channel)) => {
                channel.send(head, payload, bytes).map(|sent| (sent, &mut counters.shared_memory))
            }
            Some(Lane::Streamed(channel)) => {
                let traffic = match channel.wire {
                    Wire::Tcp(_) => &mut counters.tcp,
                    Wire::Rdma(_) => &mut counters.rdma,
                };
                let sent = network.as_mut().is_some_and(|network| channel.send(network, head, payload, bytes));
                Ok((sent, traffic))
            }
        };
        match sent {
            Ok((true, traffic)) => {
                traffic.sent.count(bytes);
                if self.connections.active.streamed > 0 {
                    self.connections.flush();
                }
                SendOutcome::Sent
            }
            Ok((false, _)) => {
                counters.stalls += 1;
                SendOutcome::Full
            }
            Err(error) => {
                self.connections.end(usize::from(to), DownCause::Failed(error.to_string()));
                SendOutcome::Down
            }
        }
    }

    /// Returns the next event, if there is one; releases the frame that was returned before. Never blocks.
    pub fn poll(&mut self) -> Option<MeshEvent> {
        self.release();
        if let Some(event) = self.next_event() {
            self.busy += 1;
            if self.busy >= BUSY_POLLS {
                self.drive(Duration::ZERO);
            }
            return Some(event);
        }
        self.idle += 1;
        let limit = if self.connections.active.streamed == 0 { IDLE_POLLS } else { IDLE_POLLS_STREAMED };
        // A caller that polls rarely sees the end of a connection as soon as one that polls often.
        if self.idle < limit && self.driven.elapsed() < DRIVE_INTERVAL {
            return None;
        }
        self.drive(Duration::ZERO);
        self.next_event()
    }

    fn drive(&mut self, longest: Duration) {
        (self.busy, self.idle) = (0, 0);
        self.connections.drive(longest);
        self.driven = Instant::now();
    }

    fn next_event(&mut self) -> Option<MeshEvent> {
        loop {
            if let Some(change) = self.connections.next_change() {
                return Some(match change {
                    Change::Up(rank, _) => MeshEvent::Up(rank),
                    Change::Down(rank, cause) => MeshEvent::Down { rank, cause },
                });
            }
            let count = self.connections.active.ranks.len();
            let mut found = None;
            for step in 0..count {
                let index = (self.next + step) % count;
                let rank = self.connections.active.ranks[index];
                match self.take(rank) {
                    Taking::Frame(frame) => {
                        self.next = index + 1;
                        return Some(MeshEvent::Frame(frame));
                    }
                    Taking::Nothing => {}
                    Taking::Ended(cause) => {
                        found = Some((rank, cause));
                        break;
                    }
                }
            }
            let (rank, cause) = found?;
            if let Some(cause) = cause {
                self.connections.end(usize::from(rank), DownCause::Failed(cause.to_string()));
            }
            self.connections.finish(usize::from(rank));
        }
    }

    /// Takes a frame of a peer.
    fn take(&mut self, rank: u8) -> Taking {
        let Connections { entries, network, counters, .. } = &mut self.connections;
        let Some(entry) = &mut entries[usize::from(rank)] else { return Taking::Nothing };
        let Some(channel) = entry.channel.as_mut().filter(|channel| channel.up) else { return Taking::Nothing };
        let (taken, traffic): (Result<Option<TakenFrame>, ChannelError>, &mut LaneTraffic) =
            match (&mut channel.lane, network) {
                (Lane::Shared(shared), _) => (shared.take(), &mut counters.shared_memory),
                (Lane::Streamed(streamed), Some(network)) => {
                    let traffic = match streamed.wire {
                        Wire::Tcp(_) => &mut counters.tcp,
                        Wire::Rdma(_) => &mut counters.rdma,
                    };
                    (streamed.take(network), traffic)
                }
                (Lane::Streamed(_), None) => return Taking::Nothing,
            };
        match taken {
            Ok(Some(TakenFrame { head, payload, end })) => {
                traffic.received.count(payload.bytes());
                self.held = Some(HeldFrame { rank, channel: channel.number, end });
                Taking::Frame(Frame { from: rank, incarnation: entry.incarnation, head, payload })
            }
            Ok(None) if channel.ending.is_some() => Taking::Ended(None),
            Ok(None) => Taking::Nothing,
            Err(why) => Taking::Ended(Some(why)),
        }
    }

    /// Releases the frame that [`Self::poll`] has returned last: its payload is not read any more.
    pub fn release(&mut self) {
        let Some(held) = self.held.take() else { return };
        let entry = self.connections.entries[usize::from(held.rank)].as_mut();
        let channel = entry.and_then(|entry| entry.channel.as_mut());
        match channel {
            Some(Channel { lane: Lane::Shared(channel), number, .. }) if *number == held.channel => {
                channel.release(held.end);
            }
            Some(Channel { lane: Lane::Streamed(channel), number, .. }) if *number == held.channel => channel.release(),
            _ => {}
        }
    }

    /// Waits until [`Self::poll`] may have something, or a send that found no room may find some, at most until this
    /// time; releases the frame that was returned before. May return early. Spins for a moment where processes have
    /// cores of their own, then lets others run, then sleeps.
    pub fn wait(&mut self, until: Instant) {
        self.release();
        if self.is_ready() {
            return;
        }
        if self.connections.active.shared > 0 && self.look_for_a_while() {
            return;
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.park(left.min(LONGEST_PARK));
            if self.is_ready() {
                return;
            }
        }
    }

    /// Looks until something has arrived or it is better to sleep. Returns true in the former case.
    fn look_for_a_while(&mut self) -> bool {
        let crowded = self.connections.active.shared >= self.cores;
        if !crowded {
            self.waits += 1;
            if self.waits >= PROBE_WAITS {
                (self.waits, self.spins) = (0, SPINS.1);
            }
            for _ in 0..self.spins {
                cpu::pause();
                if self.is_ready() {
                    self.spins = (self.spins * 2).min(SPINS.1);
                    return true;
                }
            }
            self.spins = (self.spins / 2).max(SPINS.0);
        }
        for _ in 0..if crowded { YIELDS.1 } else { YIELDS.0 } {
            self.connections.counters.yields += 1;
            std::thread::yield_now();
            for _ in 0..LOOKS {
                if self.is_ready() {
                    return true;
                }
                cpu::pause();
            }
        }
        false
    }

    /// Sleeps until an event, a ring of a peer, or the end of this time.
    fn park(&mut self, longest: Duration) {
        if let Some(local) = &self.connections.local {
            local.bell().prepare_sleep();
        }
        let armed = self.connections.network.as_mut().is_none_or(|network| network.prepare_sleep());
        // What arrived before the bell was armed rings no more.
        let longest = match armed && !self.is_ready() {
            true => self.connections.patience(longest),
            false => Duration::ZERO,
        };
        self.connections.counters.parks += u64::from(!longest.is_zero());
        self.drive(longest);
        if let Some(local) = &self.connections.local {
            local.bell().awake();
        }
    }

    fn is_ready(&self) -> bool {
        let Connections { entries, active, .. } = &self.connections;
        self.connections.has_changes()
            || active.ranks.iter().any(|rank| {
                let channel = entries[usize::from(*rank)].as_ref().and_then(|entry| entry.channel.as_ref());
                channel.is_some_and(Channel::is_ready)
            })
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counters(&self) -> &MeshCounters {
        &self.connections.counters
    }
}

/// Result of taking a frame of a peer.
enum Taking {
    Frame(Frame),
    Nothing,
    /// The channel has ended; with a reason if that was found just now.
    Ended(Option<ChannelError>),
}
