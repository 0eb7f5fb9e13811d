//! Connections with stock Mooncake engines: plain reliable connections for reads and writes alone, without messages.
//!
//! Both sides make as many queue pairs as the asking one says, tell each other their numbers by Mooncake's handshake,
//! and begin to count packets at 0. Who asks a peer posts on the first of them; the others are there because the peer
//! wants as many as it makes itself. A peer that asks us works alone: we see nothing of what it does. What it may reach
//! is what is published, by the keys in our descriptor. There are no credits, so no message of such a peer finds a
//! receive that was promised to it; one that comes all the same ends its connection.
//!
//! Nothing says when a peer that asked us is gone. Its queue pairs stay until it connects again from the same device,
//! or others need the place: the oldest is given up first. A peer that was given up in error connects again.

use std::collections::HashMap;
use std::sync::Arc;

use kvplane_proto::{SegmentId, Status as Outcome};
use kvplane_sys::verbs::{Connection, Gid, GidEntry, LinkLayer, PeerAccess, PortAttributes, QueuePair, Route};

use super::foreign_peer::ForeignPeer;
use super::link::{Link, State};
use super::nic::Nic;
use super::setup::{HOP_LIMIT, NOT_READY_RETRIES, NOT_READY_TIMER, PKEY_INDEX, RETRIES, TIMEOUT, queue_pair};
use super::wire::SegmentKey;
use super::{Rdma, RdmaError};
use crate::types::{CloseCause, ConnectionId, Event};

/// Queue pairs of one connection, at most.
pub const FOREIGN_QUEUE_PAIRS: usize = 16;
/// Reads that a stock engine starts at the same time, and serves: it tells nobody.
const FOREIGN_READS: u8 = 16;
/// Requests of a queue pair on which nothing is posted.
const UNUSED_DEPTH: u32 = 1;

/// What one side of a connection with a stock engine is told of the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignHalf {
    /// The numbers of its queue pairs.
    pub queue_pairs: Vec<u32>,
    /// The address of its port.
    pub gid: Gid,
    /// The same in an InfiniBand subnet; 0 for Ethernet.
    pub lid: u16,
}

/// A device as a stock engine is told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignDevice {
    /// Its name.
    pub name: String,
    /// The best address of its port; none while that is down.
    pub address: Option<(Gid, u16)>,
}

/// What makes a link one with a stock engine.
pub(super) struct Foreign {
    /// The further queue pairs: nothing is posted on them.
    pub(super) spares: Vec<QueuePair>,
    other: Other,
    /// The order of connections.
    age: u64,
}

/// Who is at the other end.
enum Other {
    /// A peer that we ask, and which of its devices.
    Asked(Arc<ForeignPeer>, usize),
    /// A peer that asks us: its path, and its queue pairs.
    Asks(String, Vec<u32>),
}

impl Foreign {
    /// The key of the peer's memory on the device that this connection leads to.
    pub(super) fn key(&self, segment: SegmentId) -> SegmentKey {
        match &self.other {
            Other::Asked(peer, device) => peer.key(segment, *device),
            Other::Asks(..) => SegmentKey::refused(Outcome::Stale),
        }
    }

    /// What a peer knows that asks us.
    fn half(link: &Link, own: (Gid, u16)) -> ForeignHalf {
        let spares = link.foreign.iter().flat_map(|foreign| &foreign.spares);
        let queue_pairs = core::iter::once(&link.queue_pair).chain(spares).map(QueuePair::qp_num).collect();
        ForeignHalf { queue_pairs, gid: own.0, lid: own.1 }
    }
}

impl Rdma {
    /// Starts a connection from this device to one of a stock engine's, by position, with so many queue pairs. Our half
    /// is to reach the peer, and its half [`Self::complete_foreign`]; [`Event::Connected`] or [`Event::Gone`] follows
    /// that.
    ///
    /// # Errors
    /// When the device has no active port or no place for another connection.
    pub fn offer_foreign(
        &mut self,
        nic: usize,
        (peer, device): (Arc<ForeignPeer>, usize),
        queue_pairs: usize,
    ) -> Result<(ConnectionId, ForeignHalf), RdmaError> {
        let queue_pairs = queue_pairs.clamp(1, FOREIGN_QUEUE_PAIRS);
        // The device has promised completions for so many requests of each connection.
        let depth = self.options.send_depth - (queue_pairs as u32 - 1) * UNUSED_DEPTH;
        let id = self.add(nic, true, (0, depth))?;
        let made = self.make_foreign(id, queue_pairs, Other::Asked(peer, device));
        made.map(|half| (id, half)).inspect_err(|_| self.drop_unused(id))
    }

    /// Takes a stock engine's half of a connection that we offered.
    pub fn complete_foreign(&mut self, id: ConnectionId, half: &ForeignHalf) {
        let offered = |link: &Link| link.state == State::Offered && link.foreign.is_some();
        if !self.parts(id).is_some_and(|(link, _, _)| offered(link)) {
            return;
        }
        // It asks for nothing on it: for that it makes a connection of its own.
        match self.connect_foreign(id, half, PeerAccess::default()) {
            Ok(()) => self.books.events.push_back(Event::Connected(id)),
            Err(error) => self.close(id, CloseCause::Setup(error.to_string())),
        }
    }

    /// Connects a stock engine that asks us: `from` is its name for the device that it asks from, `device` that of our
    /// own. The same half again gives the same answer; another one replaces the connection.
    ///
    /// # Errors
    /// When the device is not there or down, has no place, or the half cannot be connected.
    pub fn accept_foreign(&mut self, device: &str, from: &str, half: &ForeignHalf) -> Result<ForeignHalf, RdmaError> {
        let Some(nic) = self.nics.iter().position(|nic| nic.context.name() == device) else {
            return Err(RdmaError::NoDevice(format!("there is no RDMA device {device} here")));
        };
        if half.queue_pairs.is_empty() || half.queue_pairs.len() > FOREIGN_QUEUE_PAIRS {
            let why = format!("{} queue pairs, not 1 to {FOREIGN_QUEUE_PAIRS}", half.queue_pairs.len());
            return Err(RdmaError::Peer(Outcome::BadRequest, why));
        }
        if let Some((id, known)) = self.foreign_from(nic, from) {
            if known == half.queue_pairs
                && let Some((link, nic, _)) = self.parts(id)
                && let Some(own) = own_address(nic, half)
            {
                return Ok(Foreign::half(link, own));
            }
            self.give_up(id.index);
        }
        self.make_foreign_room(nic);
        let id = self.add(nic, false, (0, UNUSED_DEPTH))?;
        let asks = Other::Asks(from.to_owned(), half.queue_pairs.clone());
        let made = self.make_foreign(id, half.queue_pairs.len(), asks);
        let connected =
            made.and_then(|own| self.connect_foreign(id, half, PeerAccess { write: true, read: true }).map(|()| own));
        let own = connected.inspect_err(|_| self.drop_unused(id))?;
        // The address that goes with the peer's may be another than the best.
        let address = self.parts(id).and_then(|(_, nic, _)| own_address(nic, half));
        Ok(address.map_or(own.clone(), |(gid, lid)| ForeignHalf { gid, lid, ..own }))
    }

    /// Whether a stock engine is connected from this device of its with these queue pairs.
    #[must_use]
    pub fn has_foreign(&self, device: &str, from: &str, queue_pairs: &[u32]) -> bool {
        let nic = self.nics.iter().position(|nic| nic.context.name() == device);
        nic.and_then(|nic| self.foreign_from(nic, from)).is_some_and(|(_, known)| known == queue_pairs)
    }

    /// The devices, by position, as stock engines are told of them.
    #[must_use]
    pub fn foreign_devices(&self) -> Vec<ForeignDevice> {
        let device = |nic: &Nic| {
            let best = nic.port.as_ref().and_then(|(port, gids)| Some((gids.first()?.gid, port.lid)));
            ForeignDevice { name: nic.context.name().to_owned(), address: best }
        };
        self.nics.iter().map(device).collect()
    }

    /// The local and the remote key of a published segment on each device, by position; none for one that refused it.
    /// Both are valid until the segment is retracted.
    pub fn foreign_keys(&mut self, segment: SegmentId) -> Vec<Option<(u32, u32)>> {
        (0..self.nics.len()).map(|nic| self.registration_of(nic, segment)).collect()
    }

    /// The queue pairs of a link that is to be one with a stock engine, and our half of it.
    fn make_foreign(&mut self, id: ConnectionId, queue_pairs: usize, other: Other) -> Result<ForeignHalf, RdmaError> {
        let age = self.counter;
        let gone = || RdmaError::NoDevice("its port went down".to_owned());
        let Some((link, nic, _)) = self.parts(id) else { return Err(gone()) };
        let (port, gids) = nic.port.as_ref().ok_or_else(gone)?;
        let own = (gids.first().ok_or_else(gone)?.gid, port.lid);
        let mut spares = Vec::new();
        for _ in 1..queue_pairs {
            spares.push(queue_pair(nic, UNUSED_DEPTH)?);
        }
        nic.links.extend(spares.iter().map(|spare| (spare.qp_num(), id.index)));
        link.packet_number = 0;
        link.foreign = Some(Box::new(Foreign { spares, other, age }));
        Ok(Foreign::half(link, own))
    }

    fn connect_foreign(&mut self, id: ConnectionId, peer: &ForeignHalf, access: PeerAccess) -> Result<(), RdmaError> {
        let gone = || RdmaError::NoDevice("its port went down".to_owned());
        let Some((link, nic, _)) = self.parts(id) else { return Err(gone()) };
        let (port, gids) = nic.port.as_ref().ok_or_else(gone)?;
        let limits = nic.context.limits();
        let Some(foreign) = &mut link.foreign else { return Err(gone()) };
        let own = 1 + foreign.spares.len();
        if peer.queue_pairs.len() != own {
            let why = format!("{} queue pairs for our {own}: MC_NUM_QP_PER_EP differs", peer.queue_pairs.len());
            return Err(RdmaError::Peer(Outcome::BadRequest, why));
        }
        let route = route(port, gids, peer).ok_or_else(gone)?;
        let ours = core::iter::once(&mut link.queue_pair).chain(&mut foreign.spares);
        for (queue_pair, &number) in ours.zip(&peer.queue_pairs) {
            queue_pair.connect(&Connection {
                port: port.port,
                pkey_index: PKEY_INDEX,
                access,
                path_mtu: port.active_mtu,
                route,
                peer_qp_num: number,
                peer_packet_number: 0,
                packet_number: 0,
                reads_served: limits.reads_served.min(FOREIGN_READS),
                reads_started: limits.reads_started.min(FOREIGN_READS),
                not_ready_timer: NOT_READY_TIMER,
                timeout: TIMEOUT,
                retries: RETRIES,
                not_ready_retries: NOT_READY_RETRIES,
            })?;
        }
        (link.bits_per_second, link.path_mtu) = (port.bits_per_second, port.active_mtu);
        link.state = State::Open;
        Ok(())
    }

    /// The connection of a peer that asks from this device of its, and its queue pairs.
    fn foreign_from(&self, nic: usize, from: &str) -> Option<(ConnectionId, Vec<u32>)> {
        self.foreign_asking(nic).find_map(|(index, foreign)| {
            let Other::Asks(path, queue_pairs) = &foreign.other else { return None };
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            (path == from).then(|| (id, queue_pairs.clone()))
        })
    }

    /// Connections of stock engines that ask us over a device.
    fn foreign_asking(&self, nic: usize) -> impl Iterator<Item = (u32, &Foreign)> {
        self.links.iter().enumerate().filter_map(move |(index, link)| {
            let link = link.as_deref().filter(|link| link.nic as usize == nic && link.state == State::Open)?;
            let foreign = link.foreign.as_deref().filter(|foreign| matches!(foreign.other, Other::Asks(..)))?;
            Some((index as u32, foreign))
        })
    }

    /// Those that ask us have at most half of a device's connections: beyond that the oldest goes.
    fn make_foreign_room(&mut self, nic: usize) {
        let most = (self.nics[nic].endpoints.capacity() / 2).max(1);
        while self.foreign_asking(nic).count() >= most {
            let oldest = self.foreign_asking(nic).min_by_key(|(_, foreign)| foreign.age).map(|(index, _)| index);
            let Some(index) = oldest else { break };
            self.books.counters.evictions += 1;
            self.give_up(index);
        }
    }

    /// Ends a connection of a peer that asks us, at once: nothing of ours is under way on it.
    fn give_up(&mut self, index: u32) {
        let Some(link) = self.links[index as usize].as_deref_mut() else { return };
        let nic = link.nic as usize;
        link.state = State::Closing;
        link.why = Some(CloseCause::Closed);
        // Where the device refuses, the end of the queue pair does the same.
        let _ = link.queue_pair.fail();
        self.take_completions(nic);
        self.finish(index);
    }
}

/// Our address on the way to a peer: of the same kind as the peer's, if there is one.
fn own_entry<'a>(gids: &'a [GidEntry], peer: &ForeignHalf) -> Option<&'a GidEntry> {
    let is_v4 = |gid: &Gid| gid.address().to_ipv4_mapped().is_some();
    gids.iter().find(|entry| is_v4(&entry.gid) == is_v4(&peer.gid)).or_else(|| gids.first())
}

fn own_address(nic: &Nic, peer: &ForeignHalf) -> Option<(Gid, u16)> {
    let (port, gids) = nic.port.as_ref()?;
    Some((own_entry(gids, peer)?.gid, port.lid))
}

fn route(port: &PortAttributes, gids: &[GidEntry], peer: &ForeignHalf) -> Option<Route> {
    let own = own_entry(gids, peer)?;
    // Inside one subnet of InfiniBand the LID is enough.
    let local = port.link_layer == LinkLayer::InfiniBand && own.gid.0[..8] == peer.gid.0[..8];
    Some(Route {
        gid: (!local).then_some(peer.gid),
        gid_index: u8::try_from(own.index).ok()?,
        lid: peer.lid,
        hop_limit: HOP_LIMIT,
        traffic_class: 0,
        service_level: 0,
    })
}

/// The links of spare queue pairs are forgotten with theirs.
pub(super) fn forget_spares<S: std::hash::BuildHasher>(links: &mut HashMap<u32, u32, S>, foreign: Option<&Foreign>) {
    for spare in foreign.iter().flat_map(|foreign| &foreign.spares) {
        links.remove(&spare.qp_num());
    }
}
