//! Connection setup by two messages that the host carries over another channel; no call blocks.
//!
//! The active side creates a queue pair and an offer; the passive side creates its own, connects it, and answers; the
//! active side connects with the answer. Only then does the active side send, so the passive side is always ready
//! before the first message arrives.

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

/// Hop limit of packets.
pub(super) const HOP_LIMIT: u8 = 64;
/// RNR timer code: 0.64 ms, the wait of a peer that finds no posted receive, which credits rule out.
pub(super) const NOT_READY_TIMER: u8 = 12;
pub(super) const NOT_READY_RETRIES: u8 = 6;
/// Timeout code: 67 ms to the first retransmission. Six retransmissions, because soft-RoCE takes seven as unlimited.
pub(super) const TIMEOUT: u8 = 14;
pub(super) const RETRIES: u8 = 6;
/// Index of the partition key: the first entry that the subnet manager set.
pub(super) const PKEY_INDEX: u16 = 0;

/// Access of peers through our queue pairs, as far as they have keys.
const PEER_ACCESS: PeerAccess = PeerAccess { write: true, read: true };

/// Returns the status of an answer of [`Rdma::accept`], for its frame.
#[must_use]
pub fn answer_status(answer: &[u8]) -> Status {
    match Answer::decode(answer) {
        Ok(Answer::Half(_)) => Status::Ok,
        Ok(Answer::Refused(status, _)) => status,
        Err(_) => Status::BadRequest,
    }
}

/// Returns the answer that rejects an offer without decoding it.
#[must_use]
pub fn refusal(status: Status) -> Vec<u8> {
    Answer::Refused(status, status.to_string()).encode()
}

impl Rdma {
    /// Starts a connection from this device. The caller sends the offer to the peer and passes its answer to
    /// [`Self::complete`]; [`Event::Connected`] or [`Event::Gone`] follows that. `rail` is the requested device of the
    /// peer, by position.
    ///
    /// # Errors
    /// When the device has no active port or no room for another connection.
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

    /// Answers a peer's offer. The caller always sends the answer to the peer; a connection exists if its id is
    /// returned, and [`Event::Accepted`] follows.
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
                    // A port that is down may come up.
                    RdmaError::NoDevice(_) | RdmaError::Verbs(_) if !links.nics.is_empty() => Status::Unreachable,
                    RdmaError::NoDevice(_) | RdmaError::Verbs(_) => Status::Unsupported,
                };
                (None, Answer::Refused(status, error.to_string()).encode())
            }
        }
    }

    /// Handles the answer to one of our offers. A rejection ends the connection.
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
    /// Creates a link and connects it with a peer's offer; returns our half.
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

/// Returns our device for an offer: the one at the requested position if it reaches the peer, else the first that does.
/// The position counts within the preferred devices.
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
    RdmaError::NoDevice(format!("no local RDMA device reaches {} ({:?}): {ours}", offer.device, offer.gid_kind))
}

/// Returns the error of a link whose device has no active port any more.
pub(super) fn port_down() -> RdmaError {
    RdmaError::NoDevice("the port of the device went down".to_owned())
}

impl Link {
    /// Returns our half of the connection on this device.
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

    /// Connects the queue pair with the peer's half.
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

/// Returns the route from a port to the peer's, if they have addresses of the same kind.
fn route(port: &PortAttributes, gids: &[GidEntry], peer: &Half) -> Option<Route> {
    if port.link_layer != peer.link_layer {
        return None;
    }
    let is_v4 = peer.gid.address().to_ipv4_mapped().is_some();
    let alike =
        |entry: &&GidEntry| entry.kind == peer.gid_kind && entry.gid.address().to_ipv4_mapped().is_some() == is_v4;
    let own = gids.iter().find(alike).or_else(|| gids.iter().find(|entry| entry.kind == peer.gid_kind))?;
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
