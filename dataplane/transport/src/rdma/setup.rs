//! Connections are set up by two messages that travel elsewhere, and nothing in it waits.
//!
//! The asking side makes a queue pair and an offer; the other makes its own, connects it, and answers; the asking side
//! connects with the answer. Only then does it send, so the other side is always ready before anything comes.

use std::collections::HashMap;

use kvplane_proto::Status;
use kvplane_proto::rng::mix64;
use kvplane_sys::cpu;
use kvplane_sys::verbs::{
    Connection, GidEntry, LinkLayer, Mtu, PeerAccess, PortAttributes, QueuePair, QueuePairOptions, Route, VerbsError,
};

use super::credits::Credits;
use super::link::{Link, State};
use super::offer::{Answer, Half};
use super::send::PIECES;
use super::{Rdma, RdmaError};
use crate::types::{CloseCause, ConnectionId, Event};

/// Bytes that a request may carry inline: what is tried, in order.
const INLINE_BYTES: [u32; 3] = [220, 60, 0];
/// Routers that a packet may pass.
pub(super) const HOP_LIMIT: u8 = 64;
/// 0.64 ms: what a peer waits that finds no receive, which our credits make impossible.
pub(super) const NOT_READY_TIMER: u8 = 12;
pub(super) const NOT_READY_RETRIES: u8 = 6;
/// 67 ms to the first repetition, and six of them: seven is for ever to soft-RoCE.
pub(super) const TIMEOUT: u8 = 14;
pub(super) const RETRIES: u8 = 6;
const PACKET_NUMBER_BITS: u32 = 24;
/// Partition keys are what the fabric's manager put first.
pub(super) const PKEY_INDEX: u16 = 0;

/// What peers do through our queue pairs, as far as they know keys.
const PEER_ACCESS: PeerAccess = PeerAccess { write: true, read: true };

impl Rdma {
    /// Starts a connection from this device: the offer is to reach the peer, and its answer [`Self::complete`].
    /// [`Event::Connected`] or [`Event::Gone`] follows that. `rail` is the peer's device that is asked for, by
    /// position.
    ///
    /// # Errors
    /// When the device has no active port or no place for another connection.
    pub fn offer(&mut self, nic: usize, rail: u16) -> Result<(ConnectionId, Vec<u8>), RdmaError> {
        let id = self.add(nic, true, (self.options.grant, self.options.send_depth))?;
        let offer = Half { rail, ..self.half(id)? };
        Ok((id, offer.encode()))
    }

    /// Answers a peer's offer. The answer is to reach the peer in any case; there is a connection when it says so, and
    /// [`Event::Accepted`] follows.
    pub fn accept(&mut self, offer: &[u8]) -> (Option<ConnectionId>, Vec<u8>) {
        let accepted = Half::decode(offer)
            .map_err(|error| RdmaError::Peer(Status::BadRequest, error.to_string()))
            .and_then(|half| self.accept_half(&half));
        match accepted {
            Ok((id, answer)) => (Some(id), Answer::Half(answer).encode()),
            Err(error) => {
                let status = match &error {
                    RdmaError::Full(_) => Status::Busy,
                    RdmaError::Peer(status, _) => *status,
                    // What is down may come up.
                    RdmaError::NoDevice(_) | RdmaError::Verbs(_) if !self.nics.is_empty() => Status::Unreachable,
                    RdmaError::NoDevice(_) | RdmaError::Verbs(_) => Status::Unsupported,
                };
                (None, Answer::Refused(status, error.to_string()).encode())
            }
        }
    }

    /// What an answer of [`Self::accept`] says, for its frame.
    #[must_use]
    pub fn answer_status(answer: &[u8]) -> Status {
        match Answer::decode(answer) {
            Ok(Answer::Half(_)) => Status::Ok,
            Ok(Answer::Refused(status, _)) => status,
            Err(_) => Status::BadRequest,
        }
    }

    /// What an offer is answered with that is not looked at.
    #[must_use]
    pub fn refusal(status: Status) -> Vec<u8> {
        Answer::Refused(status, status.to_string()).encode()
    }

    fn accept_half(&mut self, offer: &Half) -> Result<(ConnectionId, Half), RdmaError> {
        let nic = self.nic_for(offer).ok_or_else(|| self.no_device(offer))?;
        let id = self.add(nic, false, (self.options.grant, self.options.send_depth))?;
        let connected = self.half(id).and_then(|half| self.connect(id, offer).map(|()| half));
        match connected {
            Ok(half) => {
                self.books.events.push_back(Event::Accepted(id));
                Ok((id, half))
            }
            Err(error) => {
                self.drop_unused(id);
                Err(error)
            }
        }
    }

    /// Takes the answer to an offer of ours. A refusal ends the connection.
    pub fn complete(&mut self, id: ConnectionId, answer: &[u8]) {
        let offered = self.parts(id).is_some_and(|(link, _, _)| link.state == State::Offered);
        if !offered {
            return;
        }
        let connected = match Answer::decode(answer) {
            Ok(Answer::Half(half)) => self.connect(id, &half).map_err(|error| error.to_string()),
            Ok(Answer::Refused(status, why)) => Err(format!("the peer refuses RDMA: {status}: {why}")),
            Err(error) => Err(error.to_string()),
        };
        match connected {
            Ok(()) => self.books.events.push_back(Event::Connected(id)),
            Err(why) => self.close(id, CloseCause::Setup(why)),
        }
    }

    /// Our device for an offer: the one of the same position among those that reach the peer, or the first; of the
    /// preferred ones, if one of those does.
    fn nic_for(&self, offer: &Half) -> Option<usize> {
        let reaches = |nic: &usize| {
            let port = self.nics[*nic].port.as_ref().filter(|_| self.nics[*nic].failed.is_none());
            port.is_some_and(|(port, gids)| route(port, gids, offer).is_some())
        };
        let preferred = if self.preferred == 0 { self.nics.len() } else { self.preferred.min(self.nics.len()) };
        let wanted = usize::from(offer.rail).checked_rem(preferred);
        wanted.filter(reaches).or_else(|| (0..self.nics.len()).find(reaches))
    }

    fn no_device(&self, offer: &Half) -> RdmaError {
        let ours: Vec<String> = self
            .nics
            .iter()
            .map(|nic| nic.obstacle().unwrap_or_else(|| format!("{} speaks another protocol", nic.context.name())))
            .collect();
        let ours = if ours.is_empty() { "there is no RDMA device".to_owned() } else { ours.join("; ") };
        RdmaError::NoDevice(format!("nothing here reaches {} ({:?}): {ours}", offer.device, offer.gid_kind))
    }

    /// A link with a queue pair that is not connected, which promises so many receives and takes so many requests.
    pub(super) fn add(
        &mut self,
        nic: usize,
        asks: bool,
        (grant, send_depth): (u16, u32),
    ) -> Result<ConnectionId, RdmaError> {
        let Some(entry) = self.nics.get(nic) else {
            return Err(RdmaError::NoDevice(format!("there is no RDMA device {nic}")));
        };
        if let Some(why) = entry.obstacle() {
            return Err(RdmaError::NoDevice(why));
        }
        if !entry.can_grant(grant) || entry.endpoints.len() >= entry.endpoints.capacity() {
            self.evict(nic);
        }
        let nic_index = nic;
        let nic = &mut self.nics[nic_index];
        let full = RdmaError::Full(nic.links.len());
        if !nic.can_grant(grant) {
            return Err(full);
        }
        let endpoint = nic.endpoints.insert().ok_or(full)?;
        let made = queue_pair(nic, send_depth).inspect_err(|_| {
            nic.endpoints.remove(endpoint);
        })?;
        nic.granted += u32::from(grant);
        let index = self.free.pop().unwrap_or_else(|| {
            self.links.push(None);
            self.generations.push(0);
            self.links.len() as u32 - 1
        });
        let generation = self.generations[index as usize].wrapping_add(1);
        self.generations[index as usize] = generation;
        nic.links.insert(made.qp_num(), index);
        self.counter += 1;
        let random = mix64(cpu::monotonic_ns() ^ mix64(self.counter));
        let mut link = Link::new((nic_index as u32, endpoint), made, grant, asks);
        link.packet_number = random as u32 & ((1 << PACKET_NUMBER_BITS) - 1);
        link.send_depth = send_depth as usize;
        link.message_bytes = self.options.message_bytes as usize;
        self.links[index as usize] = Some(Box::new(link));
        self.open += 1;
        Ok(ConnectionId { index, generation })
    }

    /// Makes room on a device: ends the connection that was not used for longest, if there is one that is idle.
    fn evict(&mut self, nic: usize) {
        let links = &self.links;
        let by_endpoint: HashMap<u32, u32> = self.nics[nic]
            .links
            .values()
            .filter_map(|index| Some((links[*index as usize].as_deref()?.endpoint.index, *index)))
            .collect();
        let idle = |id: super::endpoints::EndpointId| {
            let link = by_endpoint.get(&id.index).and_then(|index| links[*index as usize].as_deref());
            link.is_some_and(Link::is_idle)
        };
        let victim = self.nics[nic].endpoints.victim(idle);
        let Some(&index) = victim.and_then(|victim| by_endpoint.get(&victim.index)) else { return };
        self.books.counters.evictions += 1;
        if let Some(link) = self.links[index as usize].as_deref_mut() {
            link.state = State::Closing;
            link.why = Some(CloseCause::Closed);
            // Where the device refuses, the end of the queue pair does the same.
            let _ = link.queue_pair.fail();
        }
        // Nothing is under way on it: what has just come is all that there is to wait for.
        self.take_completions(nic);
        self.finish(index);
    }

    /// What we tell the peer about a link.
    fn half(&mut self, id: ConnectionId) -> Result<Half, RdmaError> {
        let rail = self.parts(id).map_or(0, |(link, _, _)| link.nic as u16);
        let message_bytes = self.options.message_bytes;
        let gone = || RdmaError::NoDevice("its port went down".to_owned());
        let Some((link, nic, _)) = self.parts(id) else { return Err(gone()) };
        let (port, gids) = nic.port.as_ref().ok_or_else(gone)?;
        let best = gids.first().ok_or_else(gone)?;
        let limits = nic.context.limits();
        Ok(Half {
            link_layer: port.link_layer,
            gid_kind: best.kind,
            mtu: port.active_mtu,
            qp_num: link.queue_pair.qp_num(),
            packet_number: link.packet_number,
            gid: best.gid,
            lid: port.lid,
            grant: link.grant,
            message_bytes,
            bits_per_second: port.bits_per_second,
            reads_served: limits.reads_served,
            reads_started: limits.reads_started,
            rail,
            device: nic.context.name().to_owned(),
        })
    }

    /// Connects a link's queue pair with the peer's half.
    fn connect(&mut self, id: ConnectionId, peer: &Half) -> Result<(), RdmaError> {
        let message_bytes = self.options.message_bytes;
        let gone = || RdmaError::NoDevice("its port went down".to_owned());
        let Some((link, nic, _)) = self.parts(id) else { return Err(gone()) };
        let (port, gids) = nic.port.as_ref().ok_or_else(gone)?;
        let Some(route) = route(port, gids, peer) else {
            let why = format!("{} has no address of the peer's kind, {:?}", nic.context.name(), peer.gid_kind);
            return Err(RdmaError::NoDevice(why));
        };
        let limits = nic.context.limits();
        let connection = Connection {
            port: port.port,
            pkey_index: PKEY_INDEX,
            access: PEER_ACCESS,
            path_mtu: Mtu::min(port.active_mtu, peer.mtu),
            route,
            peer_qp_num: peer.qp_num,
            peer_packet_number: peer.packet_number,
            packet_number: link.packet_number,
            reads_served: limits.reads_served.min(peer.reads_started),
            reads_started: limits.reads_started.min(peer.reads_served),
            not_ready_timer: NOT_READY_TIMER,
            timeout: TIMEOUT,
            retries: RETRIES,
            not_ready_retries: NOT_READY_RETRIES,
        };
        link.queue_pair.connect(&connection)?;
        link.path_mtu = connection.path_mtu;
        link.credits = Credits::new(link.grant, peer.grant);
        link.message_bytes = message_bytes.min(peer.message_bytes) as usize;
        link.bits_per_second = match (port.bits_per_second, peer.bits_per_second) {
            (0, speed) | (speed, 0) => speed,
            (ours, theirs) => ours.min(theirs),
        };
        link.state = State::Open;
        Ok(())
    }

    /// Takes back a link that nobody was told of.
    pub(super) fn drop_unused(&mut self, id: ConnectionId) {
        self.finish(id.index);
        self.books.events.retain(|event| !matches!(event, Event::Gone(gone, _) if *gone == id));
        self.free.push(id.index);
        self.open -= 1;
    }
}

/// The way from a port to the peer's, if they have addresses of one kind.
fn route(port: &PortAttributes, gids: &[GidEntry], peer: &Half) -> Option<Route> {
    if port.link_layer != peer.link_layer {
        return None;
    }
    let is_v4 = peer.gid.address().to_ipv4_mapped().is_some();
    let alike =
        |entry: &&GidEntry| entry.kind == peer.gid_kind && entry.gid.address().to_ipv4_mapped().is_some() == is_v4;
    let own = gids.iter().find(alike).or_else(|| gids.iter().find(|entry| entry.kind == peer.gid_kind))?;
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

/// A queue pair with as much room for inline bytes as the device gives.
pub(super) fn queue_pair(nic: &mut super::nic::Nic, send_depth: u32) -> Result<QueuePair, VerbsError> {
    let pieces = nic.context.limits().pieces.min(PIECES as u32);
    let mut result = Err(VerbsError::NotOffered { device: String::new(), what: "a queue pair" });
    for inline_bytes in INLINE_BYTES {
        let options = QueuePairOptions {
            send_depth,
            send_pieces: pieces,
            receive_depth: 0,
            receive_pieces: 1,
            inline_bytes,
            batch: send_depth,
            signal_every: super::SIGNAL_EVERY,
        };
        result = QueuePair::new(&nic.domain, &nic.queue, Some(&nic.shared), &options);
        if result.is_ok() {
            break;
        }
    }
    result
}
