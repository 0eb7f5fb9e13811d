//! Options of queue pairs, attributes of connections, and their translation to verbs.

use crate::verbs::ffi::*;
use crate::verbs::gid::Gid;
use crate::verbs::port::Mtu;

/// Mask of packet sequence numbers, which have 24 bits.
const PACKET_NUMBER: u32 = (1 << 24) - 1;

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Limit of requests in flight.
    pub send_depth: u32,
    /// Limit of scatter/gather entries of one request.
    pub send_pieces: u32,
    /// Limit of posted receives; ignored with a shared queue.
    pub receive_depth: u32,
    /// Limit of scatter/gather entries of one receive.
    pub receive_pieces: u32,
    /// Limit of inline bytes of a request. A device may reject large values.
    pub inline_bytes: u32,
    /// Limit of requests, or receives, of one flush.
    pub batch: u32,
    /// Signalling period: at least every n-th request is signalled; reduced to half of `send_depth` if it is larger.
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

/// Access of peers through a queue pair, as far as the memory's keys allow it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PeerAccess {
    /// RDMA writes.
    pub write: bool,
    /// RDMA reads.
    pub read: bool,
}

/// Route to a peer's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// GID of the peer's port, if it is addressed by GID: always for Ethernet.
    pub gid: Option<Gid>,
    /// Index of our GID in our port's table: of the same kind as the peer's.
    pub gid_index: u8,
    /// LID of the peer in an InfiniBand subnet; 0 for Ethernet.
    pub lid: u16,
    /// Hop limit of packets.
    pub hop_limit: u8,
    /// Traffic class for switches: DSCP and ECN bits for RoCE v2.
    pub traffic_class: u8,
    /// Service level: the VLAN priority for RoCE.
    pub service_level: u8,
}

/// Attributes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Local port.
    pub port: u8,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Access of the peer.
    pub access: PeerAccess,
    /// Path MTU: no more than the active MTU of either port.
    pub path_mtu: Mtu,
    /// Route to the peer.
    pub route: Route,
    /// Number of the peer's queue pair.
    pub peer_qp_num: u32,
    /// First sequence number of the peer's packets: equal to the peer's own `packet_number`; 24 bits.
    pub peer_packet_number: u32,
    /// First sequence number of our packets; 24 bits.
    pub packet_number: u32,
    /// Limit of the peer's reads that are served concurrently: at least the number that the peer initiates.
    pub reads_served: u8,
    /// Limit of our reads in flight.
    pub reads_started: u8,
    /// RNR timer: wait of the peer when no receive is posted, as a code of the specification; 12 is 0.64 ms.
    pub not_ready_timer: u8,
    /// Timeout of an acknowledgement: 4.096 us times two to the power of this; 0 is unlimited.
    pub timeout: u8,
    /// Limit of retransmissions after timeouts, at most 7.
    pub retries: u8,
    /// Limit of retransmissions to a peer without posted receives; 7 is unlimited.
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
    /// Returns the attributes for the peer's packets.
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

    /// Returns the attributes for our packets.
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
