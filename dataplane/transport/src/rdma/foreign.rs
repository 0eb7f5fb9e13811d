//! Connections with stock Mooncake engines: plain reliable connections for one-sided reads and writes, without
//! messages.
//!
//! Both sides create as many queue pairs as the active (connecting) side states, exchange their numbers by Mooncake's
//! handshake, and start packet numbers at 0. The active side posts on the first queue pair; the others exist because
//! the peer expects as many as it creates itself. A peer that connects to us works one-sided: its requests are
//! invisible to us. It can access only what is published, by the keys in our descriptor. There are no credits, so no
//! receive is reserved for a message of such a peer; a message that arrives nevertheless ends its connection.
//!
//! The departure of such a peer is not signalled. Its queue pairs stay until it connects again from the same device, or
//! until other connections need the resources: the oldest is closed first. A peer that was closed by mistake
//! reconnects.

use std::sync::Arc;

use kvplane_proto::{SegmentId, Status as Outcome};
use kvplane_sys::verbs::{Connection, Gid, GidEntry, LinkLayer, PeerAccess, PortAttributes, QueuePair, Route};

use super::Rdma;
use super::foreign_peer::ForeignPeer;
use super::link::{Asker, Foreign, KeySource, Link, State};
use super::links::RdmaError;
use super::nic::Nic;
use super::setup::{HOP_LIMIT, NOT_READY_RETRIES, NOT_READY_TIMER, PKEY_INDEX, RETRIES, TIMEOUT, port_down};
use crate::table::Table;
use crate::types::{CloseCause, ConnectionId, Event};

/// Limit of queue pairs of one connection.
pub const FOREIGN_QUEUE_PAIRS: usize = 16;
/// Limit of reads in flight that a stock engine initiates and serves; it does not negotiate the number.
const FOREIGN_READS: u8 = 16;
/// Queue depth of a queue pair on which no request is posted.
const UNUSED_DEPTH: u32 = 1;

/// Handshake data that one side of a connection with a stock engine sends to the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignHalf {
    /// Numbers of its queue pairs.
    pub queue_pairs: Vec<u32>,
    /// GID of its port.
    pub gid: Gid,
    /// LID of its port in an InfiniBand subnet; 0 for Ethernet.
    pub lid: u16,
}

/// Description of a device for stock engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignDevice {
    /// Name of the device.
    pub name: String,
    /// Best address of its port, GID and LID; `None` while the port is down.
    pub address: Option<(Gid, u16)>,
}

impl Rdma {
    /// Starts a connection from this device to device number `device` of a stock engine, with this many queue pairs.
    /// The caller sends our half to the peer and passes the peer's half to [`Self::complete_foreign`];
    /// [`Event::Connected`] or [`Event::Gone`] follows that.
    ///
    /// # Errors
    /// When the device has no active port or no room for another connection.
    pub fn offer_foreign(
        &mut self,
        nic: usize,
        peer: Arc<ForeignPeer>,
        device: usize,
        queue_pairs: usize,
    ) -> Result<(ConnectionId, ForeignHalf), RdmaError> {
        let queue_pairs = queue_pairs.clamp(1, FOREIGN_QUEUE_PAIRS);
        // The completion queue reserves entries for this many requests of each connection.
        let depth = self.options.send_depth - (queue_pairs as u32 - 1) * UNUSED_DEPTH;
        let id = self.links.add(nic, 0, depth, &mut self.segments)?;
        let age = self.links.made();
        let Some((link, nic, _)) = self.links.parts(id) else { return Err(port_down()) };
        link.asks = true;
        link.copies.keys.set_source(KeySource::Description(peer, device));
        let made = link.make_foreign(id.index, nic, Foreign { spares: Vec::new(), asker: None, age }, queue_pairs);
        made.map(|half| (id, half)).inspect_err(|_| self.links.drop_unused(id))
    }

    /// Completes an offered connection with the stock engine's half.
    pub fn complete_foreign(&mut self, id: ConnectionId, half: &ForeignHalf) {
        let Some((link, nic, books)) = self.links.parts(id) else { return };
        if link.state != State::Offered || link.foreign.is_none() {
            return;
        }
        // The peer sends no requests over it: for those it makes a connection of its own.
        match link.connect_foreign(nic, half, PeerAccess::default()) {
            Ok(()) => books.events.push_back(Event::Connected(id)),
            Err(error) => self.close(id, CloseCause::Setup(error.to_string())),
        }
    }

    /// Accepts the connection of a stock engine: `from` is the engine's name of its device, `device` the name of ours.
    /// Idempotent: an equal half gets an equal answer; a different one replaces the connection.
    ///
    /// # Errors
    /// When the device does not exist, is down or has no room, or the half cannot be connected.
    pub fn accept_foreign(&mut self, device: &str, from: &str, half: &ForeignHalf) -> Result<ForeignHalf, RdmaError> {
        let links = &mut self.links;
        let Some(position) = links.nics.iter().position(|nic| nic.context.name() == device) else {
            return Err(RdmaError::NoDevice(format!("there is no RDMA device {device} here")));
        };
        if half.queue_pairs.is_empty() || half.queue_pairs.len() > FOREIGN_QUEUE_PAIRS {
            let why = format!("{} queue pairs, not 1 to {FOREIGN_QUEUE_PAIRS}", half.queue_pairs.len());
            return Err(RdmaError::Peer(Outcome::BadRequest, why));
        }
        let known = asking(&links.table, position).find(|(_, _, asker)| asker.path == from);
        if let Some((id, link, asker)) = known {
            if asker.queue_pairs == half.queue_pairs
                && let Some(own) = own_address(&links.nics[position], half)
            {
                return Ok(link.foreign_half(own));
            }
            links.give_up(id.index, &mut self.segments);
        }
        // Connections of stock engines take at most half of a device's endpoints; beyond that the oldest is closed.
        let most = (links.nics[position].endpoints.capacity() / 2).max(1);
        while asking(&links.table, position).count() >= most {
            let age = |link: &Link| link.foreign.as_ref().map(|foreign| foreign.age);
            let oldest = asking(&links.table, position).min_by_key(|(_, link, _)| age(link)).map(|(id, ..)| id);
            let Some(id) = oldest else { break };
            links.books.counters.evictions += 1;
            links.give_up(id.index, &mut self.segments);
        }
        let id = links.add(position, 0, UNUSED_DEPTH, &mut self.segments)?;
        let age = links.made();
        let Some((link, nic, _)) = links.parts(id) else { return Err(port_down()) };
        link.copies.keys.set_source(KeySource::Nowhere);
        let asker = Asker { path: from.to_owned(), queue_pairs: half.queue_pairs.clone() };
        let foreign = Foreign { spares: Vec::new(), asker: Some(asker), age };
        let made = link.make_foreign(id.index, nic, foreign, half.queue_pairs.len());
        let access = PeerAccess { write: true, read: true };
        let connected = made.and_then(|own| link.connect_foreign(nic, half, access).map(|()| own));
        // The address that matches the peer's may be another than the best one.
        let address = own_address(nic, half);
        let own = connected.inspect_err(|_| links.drop_unused(id))?;
        Ok(address.map_or(own.clone(), |(gid, lid)| ForeignHalf { gid, lid, ..own }))
    }

    /// Returns true if a stock engine is connected from its device `from` with these queue pairs.
    #[must_use]
    pub fn has_foreign(&self, device: &str, from: &str, queue_pairs: &[u32]) -> bool {
        let nic = self.links.nics.iter().position(|nic| nic.context.name() == device);
        let known = nic.and_then(|nic| asking(&self.links.table, nic).find(|(_, _, asker)| asker.path == from));
        known.is_some_and(|(_, _, asker)| asker.queue_pairs == queue_pairs)
    }

    /// Returns the descriptions of the devices for stock engines, by position.
    #[must_use]
    pub fn foreign_devices(&self) -> Vec<ForeignDevice> {
        let device = |nic: &Nic| {
            let best = nic.port.as_ref().and_then(|(port, gids)| Some((gids.first()?.gid, port.lid)));
            ForeignDevice { name: nic.context.name().to_owned(), address: best }
        };
        self.links.nics.iter().map(device).collect()
    }

    /// Returns the local and the remote key of a published segment on each device, by position; `None` for a device
    /// that refused the registration. The keys are valid until the segment is retracted.
    pub fn foreign_keys(&mut self, segment: SegmentId) -> Vec<Option<(u32, u32)>> {
        let nics = self.links.nics.iter_mut().enumerate();
        nics.map(|(index, nic)| self.segments.keys_on(segment, index, nic)).collect()
    }
}

impl Link {
    /// Turns the link into one with a stock engine, with this many queue pairs; returns our half.
    fn make_foreign(
        &mut self,
        index: u32,
        nic: &mut Nic,
        mut foreign: Foreign,
        queue_pairs: usize,
    ) -> Result<ForeignHalf, RdmaError> {
        let (port, gids) = nic.port.as_ref().ok_or_else(port_down)?;
        let own = (gids.first().ok_or_else(port_down)?.gid, port.lid);
        for _ in 1..queue_pairs {
            foreign.spares.push(nic.queue_pair(UNUSED_DEPTH)?);
        }
        nic.links.extend(foreign.spares.iter().map(|spare| (spare.qp_num(), index)));
        self.path.packet_number = 0;
        self.foreign = Some(Box::new(foreign));
        Ok(self.foreign_half(own))
    }

    /// Returns our half of the handshake.
    fn foreign_half(&self, own: (Gid, u16)) -> ForeignHalf {
        let spares = self.foreign.iter().flat_map(|foreign| &foreign.spares);
        let queue_pairs = core::iter::once(&self.sends.queue_pair).chain(spares).map(QueuePair::qp_num).collect();
        ForeignHalf { queue_pairs, gid: own.0, lid: own.1 }
    }

    fn connect_foreign(&mut self, nic: &Nic, peer: &ForeignHalf, access: PeerAccess) -> Result<(), RdmaError> {
        let (port, gids) = nic.port.as_ref().ok_or_else(port_down)?;
        let limits = nic.context.limits();
        let Some(foreign) = &mut self.foreign else { return Err(port_down()) };
        let own = 1 + foreign.spares.len();
        if peer.queue_pairs.len() != own {
            let why = format!("{} queue pairs for our {own}: MC_NUM_QP_PER_EP differs", peer.queue_pairs.len());
            return Err(RdmaError::Peer(Outcome::BadRequest, why));
        }
        let route = route(port, gids, peer).ok_or_else(port_down)?;
        let ours = core::iter::once(&mut self.sends.queue_pair).chain(&mut foreign.spares);
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
        (self.path.bits_per_second, self.path.mtu) = (port.bits_per_second, port.active_mtu);
        self.state = State::Open;
        Ok(())
    }
}

/// Returns the connections that stock engines made to a device, each with its engine.
fn asking(table: &Table<Box<Link>>, nic: usize) -> impl Iterator<Item = (ConnectionId, &Link, &Asker)> {
    table.iter().filter_map(move |(id, link)| {
        let of_device = link.nic as usize == nic && link.state == State::Open;
        let asker = link.foreign.as_ref()?.asker.as_ref().filter(|_| of_device)?;
        Some((id, &**link, asker))
    })
}

/// Returns our address for a peer: of the same kind (IPv4 or IPv6) as the peer's, if there is one.
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
    // Within one InfiniBand subnet the LID is enough.
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
