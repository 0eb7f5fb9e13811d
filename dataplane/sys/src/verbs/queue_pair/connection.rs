//! What a queue pair and its connection are made of, and the attributes that verbs want for it.

use crate::verbs::ffi::*;
use crate::verbs::gid::Gid;
use crate::verbs::port::Mtu;

/// Packet sequence numbers have 24 bits.
const PACKET_NUMBER: u32 = (1 << 24) - 1;

/// How large a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Requests under way at the same time.
    pub send_depth: u32,
    /// Pieces of one request.
    pub send_pieces: u32,
    /// Receives posted at the same time; without effect with a shared queue.
    pub receive_depth: u32,
    /// Pieces of one receive.
    pub receive_pieces: u32,
    /// Bytes that a request may carry inline. A device may refuse large ones.
    pub inline_bytes: u32,
    /// Requests, or receives, of one flush.
    pub batch: u32,
    /// At the latest every so many requests one is signalled; at most half of `send_depth`, and made so.
    pub signal_every: u32,
}

impl Default for QueuePairOptions {
    fn default() -> Self {
        Self {
            send_depth: 128,
            send_pieces: 4,
            receive_depth: 64,
            receive_pieces: 1,
            inline_bytes: 64,
            batch: 32,
            signal_every: 32,
        }
    }
}

/// What peers may do through a queue pair, as far as the memory's keys allow it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PeerAccess {
    /// Write.
    pub write: bool,
    /// Read.
    pub read: bool,
}

/// The way to a peer's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The peer's port, when it is reached by GID: always for Ethernet.
    pub gid: Option<Gid>,
    /// The place of our own GID in our port's table: of the same kind as the peer's.
    pub gid_index: u8,
    /// The peer's address in an InfiniBand subnet; 0 for Ethernet.
    pub lid: u16,
    /// Routers that a packet may pass.
    pub hop_limit: u8,
    /// The class that switches see: DSCP and ECN bits for RoCE v2.
    pub traffic_class: u8,
    /// The service level: the VLAN priority for RoCE.
    pub service_level: u8,
}

/// Everything that a connection is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Our port.
    pub port: u8,
    /// The place of the partition key.
    pub pkey_index: u16,
    /// What the peer may do.
    pub access: PeerAccess,
    /// Payload of a packet: no more than either port has active.
    pub path_mtu: Mtu,
    /// The way.
    pub route: Route,
    /// The peer's queue pair.
    pub peer_qp_num: u32,
    /// The first sequence number of the peer's packets: what the peer has as its own; 24 bits.
    pub peer_packet_number: u32,
    /// The first sequence number of our packets; 24 bits.
    pub packet_number: u32,
    /// Reads of the peer that we serve at the same time: at least what the peer starts.
    pub reads_served: u8,
    /// Reads that we start at the same time.
    pub reads_started: u8,
    /// How long the peer waits when no receive is posted: a code of the specification, 12 is 0.64 ms.
    pub not_ready_timer: u8,
    /// How long an answer may take: 4.096 us times two to the power of this; 0 is for ever.
    pub timeout: u8,
    /// How often a request without an answer is sent again, at most 7.
    pub retries: u8,
    /// How often a request is sent again to a peer without receives; 7 is for ever.
    pub not_ready_retries: u8,
}

impl PeerAccess {
    pub(crate) fn raw(self) -> u32 {
        let write = if self.write { ACCESS_REMOTE_WRITE } else { 0 };
        let read = if self.read { ACCESS_REMOTE_READ } else { 0 };
        write | read
    }
}

impl Connection {
    /// What concerns the peer's packets.
    pub(crate) fn receive_attributes(&self) -> ibv_qp_attr {
        let Self { route, .. } = self;
        let (mut dgid, mut is_global) = ([0; 2], 0);
        if let Some(Gid(bytes)) = route.gid {
            let (high, low) = bytes.split_at(8);
            let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
            (dgid, is_global) = ([word(high), word(low)], 1);
        }
        let ah_attr = ibv_ah_attr {
            dgid,
            is_global,
            sgid_index: route.gid_index,
            hop_limit: route.hop_limit,
            traffic_class: route.traffic_class,
            dlid: route.lid,
            sl: route.service_level,
            port_num: self.port,
            ..ibv_ah_attr::default()
        };
        ibv_qp_attr {
            ah_attr,
            path_mtu: self.path_mtu.raw(),
            dest_qp_num: self.peer_qp_num,
            rq_psn: self.peer_packet_number & PACKET_NUMBER,
            max_dest_rd_atomic: self.reads_served,
            min_rnr_timer: self.not_ready_timer,
            ..ibv_qp_attr::default()
        }
    }

    /// What concerns our packets.
    pub(crate) fn send_attributes(&self) -> ibv_qp_attr {
        ibv_qp_attr {
            timeout: self.timeout,
            retry_cnt: self.retries,
            rnr_retry: self.not_ready_retries,
            sq_psn: self.packet_number & PACKET_NUMBER,
            max_rd_atomic: self.reads_started,
            ..ibv_qp_attr::default()
        }
    }
}
