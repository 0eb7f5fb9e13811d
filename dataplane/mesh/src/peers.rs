//! Peers of a mesh: what is known of each, its channel, and the attempt to connect to it.

use std::time::{Duration, Instant};

use kvplane_transport::ConnectionId;

use crate::address::Address;
use crate::error::DownCause;
use crate::network::Wire;
use crate::shared::SharedChannel;
use crate::streamed::StreamedChannel;

/// Pause after a failed attempt: at first, and at most. It doubles with each.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// A process to have a channel with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its rank.
    pub rank: u8,
    /// Its incarnation.
    pub incarnation: u64,
    /// Its [`Mesh::address`](crate::Mesh::address). One that is malformed counts as one that nobody listens at.
    pub address: String,
}

/// Peers by the state of their channels: bit `n` of a mask stands for rank `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Channels {
    /// Peers whose channels are open in both directions.
    pub open: u64,
    /// Peers without one, at whose address no process listens.
    pub refused: u64,
}

/// Lane of a channel.
pub(crate) enum Lane {
    Shared(SharedChannel),
    Streamed(StreamedChannel),
}

/// Channel with one incarnation of a peer, over one connection.
pub(crate) struct Channel {
    pub(crate) lane: Lane,
    /// Number of the channel in this process.
    pub(crate) number: u64,
    /// False while its RDMA connection is being established.
    pub(crate) up: bool,
    /// True once its owner has the event: a frame that is sent before may be meant for the former channel.
    pub(crate) announced: bool,
    /// Set once the connection has ended: what has arrived before is still delivered.
    pub(crate) ending: Option<DownCause>,
}

impl Channel {
    /// Returns true if frames can be sent.
    pub(crate) const fn is_open(&self) -> bool {
        self.announced && self.ending.is_none()
    }

    /// Returns true if taking from it may bring something: a frame, its end, or room for one that found none.
    pub(crate) fn is_ready(&self) -> bool {
        self.ending.is_some()
            || match &self.lane {
                Lane::Shared(channel) => channel.is_ready(),
                Lane::Streamed(channel) => channel.is_ready(),
            }
    }

    /// Returns true if it lives with this connection.
    pub(crate) fn is_on(&self, wire: Wire) -> bool {
        matches!(&self.lane, Lane::Streamed(channel) if channel.wire == wire || Wire::Tcp(channel.control) == wire)
    }
}

/// Attempt to connect to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// Over a Unix socket; the hello was sent.
    Local(ConnectionId),
    /// Over TCP, with the RDMA connection that was offered.
    Tcp { id: ConnectionId, rdma: Option<ConnectionId> },
    /// Over TCP, only to learn whether a process listens: the peer is the one that connects.
    Probe(ConnectionId),
}

/// A listed peer.
pub(crate) struct Entry {
    pub(crate) incarnation: u64,
    /// The address as it was given; parsed if it is one.
    pub(crate) text: String,
    pub(crate) address: Option<Address>,
    pub(crate) channel: Option<Channel>,
    pub(crate) attempt: Option<Attempt>,
    /// Time of the next attempt, or of the end of this one.
    pub(crate) due: Option<Instant>,
    pause: Duration,
    pub(crate) refused: bool,
    /// Next number for holds of payloads.
    pub(crate) next_hold: u64,
    /// Time before which no RDMA connection is tried, because one has failed.
    pub(crate) rdma_after: Option<Instant>,
}

impl Entry {
    pub(crate) fn new(peer: &Peer) -> Self {
        let address: Option<Address> = peer.address.parse().ok();
        Self {
            incarnation: peer.incarnation,
            text: peer.address.clone(),
            refused: address.is_none(),
            due: address.is_some().then(Instant::now),
            address,
            channel: None,
            attempt: None,
            pause: PAUSE.0,
            next_hold: u64::from(peer.rank) << HOLD_BITS,
            rdma_after: None,
        }
    }

    /// Plans the next attempt after a pause.
    pub(crate) fn retry(&mut self, now: Instant) {
        self.attempt = None;
        self.due = self.address.is_some().then(|| now + self.pause);
        self.pause = (self.pause * 2).min(PAUSE.1);
    }

    /// Plans the next attempt at once.
    pub(crate) fn retry_now(&mut self, now: Instant) {
        self.pause = PAUSE.0;
        self.due = self.address.is_some().then_some(now);
    }

    /// Notes that a channel is there, and no attempt is needed.
    pub(crate) const fn settle(&mut self) {
        (self.attempt, self.due, self.refused, self.pause) = (None, None, false, PAUSE.0);
    }
}

/// Bits of the number of a payload's hold; the rank is above.
const HOLD_BITS: u32 = 56;

/// Returns the rank of a hold.
pub(crate) const fn rank_of_hold(hold: u64) -> usize {
    (hold >> HOLD_BITS) as usize
}
