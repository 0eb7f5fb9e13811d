//! Connections are set up by two messages that travel elsewhere, and nothing in it waits.
//!
//! The asking side makes a queue pair and an offer; the other makes its own, connects it, and answers; the asking side
//! connects with the answer. Only then does it send, so the other side is always ready before anything comes.

mod offer;

use kvplane_proto::Status;
use kvplane_sys::verbs::{Connection, GidEntry, LinkLayer, Mtu, PeerAccess, PortAttributes, Route};

use super::Rdma;
use super::link::{Credits, Link, State};
use super::links::{Links, RdmaError};
use super::nic::Nic;
use super::options::RdmaOptions;
use super::segments::Segments;
use crate::types::{CloseCause, ConnectionId, Event};
pub(super) use offer::MESSAGE_BYTES_LEAST;
use offer::{Answer, Half};

/// Routers that a packet may pass.
pub(super) const HOP_LIMIT: u8 = 64;
/// 0.64 ms: what a peer waits that finds no receive, which our credits make impossible.
pub(super) const NOT_READY_TIMER: u8 = 12;
pub(super) const NOT_READY_RETRIES: u8 = 6;
/// 67 ms to the first repetition, and six of them: seven is for ever to soft-RoCE.
pub(super) const TIMEOUT: u8 = 14;
pub(super) const RETRIES: u8 = 6;
/// Partition keys are what the fabric's manager put first.
pub(super) const PKEY_INDEX: u16 = 0;

/// What peers do through our queue pairs, as far as they know keys.
const PEER_ACCESS: PeerAccess = PeerAccess { write: true, read: true };

/// What an answer of [`Rdma::accept`] says, for its frame.
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

impl Rdma {
    /// Starts a connection from this device: the offer is to reach the peer, and its answer [`Self::complete`].
    /// [`Event::Connected`] or [`Event::Gone`] follows that. `rail` is the peer's device that is asked for, by
    /// position.
    ///
    /// # Errors
    /// When the device has no active port or no place for another connection.
    pub fn offer(&mut self, nic: usize, rail: u16) -> Result<(ConnectionId, Vec<u8>), RdmaError> {
        let id = self.links.add(nic, self.options.grant, self.options.send_depth, &mut self.segments)?;
        let Some((link, nic, _)) = self.links.parts(id) else { return Err(port_down()) };
        link.asks = true;
        match link.half(nic, self.options.message_bytes) {
            Ok(half) => Ok((id, Half { rail, ..half }.encode())),
            Err(error) => {
                self.links.drop_unused(id);
                Err(error)
            }
        }
    }

    /// Answers a peer's offer. The answer is to reach the peer in any case; there is a connection when it says so, and
    /// [`Event::Accepted`] follows.
    pub fn accept(&mut self, offer: &[u8]) -> (Option<ConnectionId>, Vec<u8>) {
        let Self { links, options, segments, preferred, .. } = self;
        let accepted = Half::decode(offer)
            .map_err(|error| RdmaError::Peer(Status::BadRequest, error.to_string()))
            .and_then(|half| links.accept(&half, *preferred, options, segments));
        match accepted {
            Ok((id, answer)) => (Some(id), Answer::Half(answer).encode()),
            Err(error) => {
                let status = match &error {
                    RdmaError::Full(_) => Status::Busy,
                    RdmaError::Peer(status, _) => *status,
                    // What is down may come up.
                    RdmaError::NoDevice(_) | RdmaError::Verbs(_) if !links.nics.is_empty() => Status::Unreachable,
                    RdmaError::NoDevice(_) | RdmaError::Verbs(_) => Status::Unsupported,
                };
                (None, Answer::Refused(status, error.to_string()).encode())
            }
        }
    }

    /// Takes the answer to an offer of ours. A refusal ends the connection.
    pub fn complete(&mut self, id: ConnectionId, answer: &[u8]) {
        let Some((link, nic, _)) = self.links.parts(id) else { return };
        if link.state != State::Offered {
            return;
        }
        let connected = match Answer::decode(answer) {
            Ok(Answer::Half(half)) => {
                link.connect(nic, &half, self.options.message_bytes).map_err(|error| error.to_string())
            }
            Ok(Answer::Refused(status, why)) => Err(format!("the peer refuses RDMA: {status}: {why}")),
            Err(error) => Err(error.to_string()),
        };
        match connected {
            Ok(()) => self.links.books.events.push_back(Event::Connected(id)),
            Err(why) => self.close(id, CloseCause::Setup(why)),
        }
    }
}

impl Links {
    /// Makes a link and connects it with a peer's offer; our half of it.
    fn accept(
        &mut self,
        offer: &Half,
        preferred: usize,
        options: &RdmaOptions,
        segments: &mut Segments,
    ) -> Result<(ConnectionId, Half), RdmaError> {
        let nic = device_for(&self.nics, preferred, offer).ok_or_else(|| no_device(&self.nics, offer))?;
        let id = self.add(nic, options.grant, options.send_depth, segments)?;
        let Some((link, nic, books)) = self.parts(id) else { return Err(port_down()) };
        let half = link.half(nic, options.message_bytes);
        match half.and_then(|half| link.connect(nic, offer, options.message_bytes).map(|()| half)) {
            Ok(half) => {
                books.events.push_back(Event::Accepted(id));
                Ok((id, half))
            }
            Err(error) => {
                self.drop_unused(id);
                Err(error)
            }
        }
    }
}

/// Our device for an offer: the one of the same position among those that reach the peer, or the first; of the
/// preferred ones, if one of those does.
fn device_for(nics: &[Nic], preferred: usize, offer: &Half) -> Option<usize> {
    let reaches = |nic: &usize| {
        let port = nics[*nic].port.as_ref().filter(|_| nics[*nic].failed.is_none());
        port.is_some_and(|(port, gids)| route(port, gids, offer).is_some())
    };
    let preferred = if preferred == 0 { nics.len() } else { preferred.min(nics.len()) };
    let wanted = usize::from(offer.rail).checked_rem(preferred);
    wanted.filter(reaches).or_else(|| (0..nics.len()).find(reaches))
}

fn no_device(nics: &[Nic], offer: &Half) -> RdmaError {
    let ours: Vec<String> = nics
        .iter()
        .map(|nic| nic.obstacle().unwrap_or_else(|| format!("{} speaks another protocol", nic.context.name())))
        .collect();
    let ours = if ours.is_empty() { "there is no RDMA device".to_owned() } else { ours.join("; ") };
    RdmaError::NoDevice(format!("nothing here reaches {} ({:?}): {ours}", offer.device, offer.gid_kind))
}

/// Why a link cannot be connected whose device has no port any more.
pub(super) fn port_down() -> RdmaError {
    RdmaError::NoDevice("its port went down".to_owned())
}

impl Link {
    /// What we tell the peer about it, on this device.
    fn half(&self, nic: &Nic, message_bytes: u32) -> Result<Half, RdmaError> {
        let (port, gids) = nic.port.as_ref().ok_or_else(port_down)?;
        let best = gids.first().ok_or_else(port_down)?;
        let limits = nic.context.limits();
        Ok(Half {
            link_layer: port.link_layer,
            gid_kind: best.kind,
            mtu: port.active_mtu,
            qp_num: self.sends.queue_pair.qp_num(),
            packet_number: self.path.packet_number,
            gid: best.gid,
            lid: port.lid,
            grant: self.grant,
            message_bytes,
            bits_per_second: port.bits_per_second,
            reads_served: limits.reads_served,
            reads_started: limits.reads_started,
            rail: self.nic as u16,
            device: nic.context.name().to_owned(),
        })
    }

    /// Connects its queue pair with the peer's half.
    fn connect(&mut self, nic: &Nic, peer: &Half, message_bytes: u32) -> Result<(), RdmaError> {
        let (port, gids) = nic.port.as_ref().ok_or_else(port_down)?;
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
            packet_number: self.path.packet_number,
            reads_served: limits.reads_served.min(peer.reads_started),
            reads_started: limits.reads_started.min(peer.reads_served),
            not_ready_timer: NOT_READY_TIMER,
            timeout: TIMEOUT,
            retries: RETRIES,
            not_ready_retries: NOT_READY_RETRIES,
        };
        self.sends.queue_pair.connect(&connection)?;
        let credits = Credits::new(self.grant, peer.grant);
        self.sends.agree(credits, message_bytes.min(peer.message_bytes) as usize);
        self.path.mtu = connection.path_mtu;
        self.path.bits_per_second = match (port.bits_per_second, peer.bits_per_second) {
            (0, speed) | (speed, 0) => speed,
            (ours, theirs) => ours.min(theirs),
        };
        self.state = State::Open;
        Ok(())
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
