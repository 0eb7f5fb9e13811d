//! A peer with several ports in virtual time: each port serves its connections round robin, one packet each, at its
//! speed, while it is up. It serves reads only, whose bytes are not modelled.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::net::SocketAddr;

use kvplane_client::PutBook;
use kvplane_client::{
    Client, Config, LaneId, Local, Output, PayloadTo, PeerAddress, PeerId, RailAddress, Request, SegmentTarget,
    SubmitOptions,
};
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::message::{Kind, Operation, ReadItem, Welcome, decode_items};
use kvplane_proto::{BatchId, Epoch, Incarnation, NodeId, RequestId, SegmentId, ShardId, Status};

pub(crate) const SECOND_NS: u64 = 1_000_000_000;
/// Bytes of a connection that a port sends before it switches to the next.
const PACKET_BYTES: u64 = 8 << 10;
/// Time from the loss of a port until its connections are reported gone, and until an attempt to connect fails.
const NOTICE_NS: u64 = 1_000_000;
const CONNECT_NS: u64 = 100_000;

/// A port of the peer: up for `up_ns`, down for `down_ns`, and so on.
#[derive(Clone, Copy)]
pub(crate) struct Port {
    pub(crate) bytes_per_second: u64,
    pub(crate) up_ns: u64,
    pub(crate) down_ns: u64,
    /// True if its failure is not reported: packets in flight are lost, and requests meanwhile too.
    pub(crate) silent: bool,
}

impl Port {
    pub(crate) const fn sound(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, up_ns: u64::MAX / 4, down_ns: 0, silent: false }
    }

    const fn is_up(&self, now_ns: u64) -> bool {
        now_ns % (self.up_ns + self.down_ns) < self.up_ns
    }

    /// Returns the time up to `span_ns` in which it is up.
    const fn uptime_ns(&self, span_ns: u64) -> u64 {
        let period_ns = self.up_ns + self.down_ns;
        let last_ns = span_ns % period_ns;
        span_ns / period_ns * self.up_ns + if last_ns < self.up_ns { last_ns } else { self.up_ns }
    }
}

struct Transfer {
    request: RequestId,
    left_bytes: u64,
    bytes: u64,
}

struct Lane {
    port: usize,
    transfers: VecDeque<Transfer>,
    /// True if it is among those that the port serves.
    in_turn: bool,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Connected(LaneId),
    Gone(LaneId),
    Greeted(LaneId),
    Request(LaneId, Vec<(u64, u64)>),
    Served(usize),
    Answered(LaneId, u64, u64),
    Down(usize),
    Wake,
}

struct Open {
    submitted_ns: u64,
    bytes: u64,
}

pub(crate) struct Network {
    pub(crate) client: Client,
    pub(crate) now_ns: u64,
    pub(crate) failed: usize,
    pub(crate) small_latencies_ns: Vec<u64>,
    peer: PeerId,
    ports: Vec<Port>,
    latency_ns: u64,
    lanes: BTreeMap<LaneId, Lane>,
    /// Connections that each port serves, in turn, and whether the port is sending.
    turns: Vec<VecDeque<LaneId>>,
    sending: Vec<Option<LaneId>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    serial: u64,
    open: BTreeMap<BatchId, Open>,
    offset: u64,
}

impl Network {
    pub(crate) fn new(ports: Vec<Port>, latency_ns: u64) -> Self {
        let config =
            Config { cluster: "sim".into(), client: 1, shared: false, gather_range_bytes: 0, ..Config::default() };
        let mut client = Client::new(config);
        let tcp = |port: usize| SocketAddr::from(([10, 0, 0, 1 + port as u8], 7000));
        let rails: Vec<RailAddress> = (0..ports.len())
            .map(|port| RailAddress {
                local: None,
                tcp: tcp(port),
                bytes_per_second: 1_250_000_000,
                tier: 0,
                rdma: None,
            })
            .collect();
        let peer = client.open_peer_over(PeerAddress::native(tcp(0), None), &rails);
        let mut network = Self {
            client,
            now_ns: 1,
            failed: 0,
            small_latencies_ns: Vec::new(),
            peer,
            latency_ns,
            lanes: BTreeMap::new(),
            turns: vec![VecDeque::new(); ports.len()],
            sending: vec![None; ports.len()],
            events: BinaryHeap::new(),
            serial: 0,
            open: BTreeMap::new(),
            offset: 0,
            ports,
        };
        for port in 0..network.ports.len() {
            network.at(network.ports[port].up_ns, Event::Down(port));
        }
        network
    }

    /// Returns the bytes that all ports could have served until `span_ns`.
    pub(crate) fn ideal_bytes(&self, span_ns: u64) -> f64 {
        self.ports.iter().map(|port| port.uptime_ns(span_ns) as f64 * port.bytes_per_second as f64 / 1e9).sum()
    }

    pub(crate) fn delivered_bytes(&self) -> u64 {
        self.client.metrics().rail_metrics().map(|rail| rail.counts.bytes).sum()
    }

    pub(crate) fn open_bulk(&self) -> usize {
        self.open.values().filter(|open| open.bytes > 64 << 10).count()
    }

    pub(crate) fn submit(&mut self, bytes: u64, options: &SubmitOptions) {
        self.offset = (self.offset + (1 << 30)) % (1 << 40);
        let target = SegmentTarget {
            peer: self.peer,
            segment: SegmentId { index: 1, generation: 1 },
            offset: self.offset,
            shareable: false,
            place: kvplane_client::Place::UNKNOWN,
        };
        let local = Local { buffer: 0, offset: self.offset, bytes };
        let batch = self
            .client
            .submit_puts(&[Request::Read(target, local)], &PutBook::new(), options, self.now_ns)
            .expect("a valid batch");
        self.open.insert(batch, Open { submitted_ns: self.now_ns, bytes });
        self.drain();
    }

    /// Processes the next event.
    pub(crate) fn step(&mut self) {
        self.step_until(u64::MAX);
    }

    /// Processes the next event, or lets time pass until `until_ns` if there is none before.
    pub(crate) fn step_until(&mut self, until_ns: u64) {
        let next_ns = self.events.peek().map_or(u64::MAX, |event| event.0.0);
        let timeout_ns = self.client.poll_timeout().unwrap_or(u64::MAX).max(self.now_ns);
        if timeout_ns.min(next_ns) >= until_ns {
            self.now_ns = self.now_ns.max(until_ns);
            return;
        }
        if timeout_ns < next_ns {
            self.now_ns = timeout_ns;
            self.client.handle_timeout(self.now_ns);
        } else {
            let Reverse((at_ns, _, event)) = self.events.pop().expect("an event");
            self.now_ns = self.now_ns.max(at_ns);
            self.happen(event);
        }
        self.drain();
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((at_ns, self.serial, event)));
    }

    fn after(&mut self, wait_ns: u64, event: Event) {
        self.at(self.now_ns + wait_ns, event);
    }

    fn drain(&mut self) {
        while let Some(output) = self.client.poll_output() {
            match output {
                Output::Connect { lane, address, .. } => {
                    let SocketAddr::V4(tcp) = address.tcp else { panic!("another address") };
                    let port = usize::from(tcp.ip().octets()[3] - 1);
                    let up = self.ports[port].is_up(self.now_ns);
                    self.lanes.insert(lane, Lane { port, transfers: VecDeque::new(), in_turn: false });
                    if up {
                        self.after(CONNECT_NS, Event::Connected(lane));
                    } else if !self.ports[port].silent {
                        self.after(NOTICE_NS, Event::Gone(lane));
                    }
                }
                Output::Send { lane, header, body, .. } => match header.kind {
                    Kind::Request(Operation::Hello) => self.after(2 * self.latency_ns, Event::Greeted(lane)),
                    Kind::Request(Operation::Read) => {
                        let body = self.client.outbox().body(body).to_vec();
                        let items = decode_items::<ReadItem>(&body, header.items).expect("a well-formed body");
                        let items = items.map(|item| (item.request.to_bits(), item.bytes)).collect();
                        self.after(self.latency_ns, Event::Request(lane, items));
                    }
                    other => panic!("{other:?} is not modelled"),
                },
                Output::Reset { lane } => self.after(1, Event::Gone(lane)),
                Output::Done { batch } => self.done(batch),
                Output::WantMap => {}
                other => panic!("{other:?} is not modelled"),
            }
        }
    }

    fn done(&mut self, batch: BatchId) {
        let open = self.open.remove(&batch).expect("a batch completes once");
        self.failed += self.client.batches().results(batch).iter().filter(|result| result.status != Status::Ok).count();
        self.client.release(batch);
        if open.bytes <= 64 << 10 {
            self.small_latencies_ns.push(self.now_ns - open.submitted_ns);
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Connected(lane) => {
                if self.lanes.contains_key(&lane) {
                    self.client.connected(lane, self.now_ns);
                }
            }
            Event::Gone(lane) => {
                if self.lanes.remove(&lane).is_some() {
                    self.client.lane_gone(lane, self.now_ns);
                }
            }
            Event::Greeted(lane) => self.greet(lane),
            Event::Request(lane, items) => {
                let Some(entry) = self.lanes.get_mut(&lane) else { return };
                if !self.ports[entry.port].is_up(self.now_ns) {
                    return;
                }
                entry.transfers.extend(items.into_iter().map(|(request, bytes)| Transfer {
                    request: RequestId::from_bits(request),
                    left_bytes: bytes,
                    bytes,
                }));
                let port = entry.port;
                if !core::mem::replace(&mut entry.in_turn, true) {
                    self.turns[port].push_back(lane);
                }
                self.send(port);
            }
            Event::Served(port) => self.served(port),
            Event::Answered(lane, request, bytes) => self.answered(lane, request, bytes),
            Event::Down(port) => {
                let lanes: Vec<LaneId> =
                    self.lanes.iter().filter(|(_, lane)| lane.port == port).map(|(id, _)| *id).collect();
                self.turns[port].clear();
                for lane in lanes {
                    let entry = self.lanes.get_mut(&lane).expect("a lane");
                    entry.transfers.clear();
                    entry.in_turn = false;
                    if !self.ports[port].silent {
                        self.after(NOTICE_NS, Event::Gone(lane));
                    }
                }
                let entry = self.ports[port];
                self.after(entry.up_ns + entry.down_ns, Event::Down(port));
                self.after(entry.down_ns, Event::Wake);
            }
            Event::Wake => {}
        }
    }

    fn greet(&mut self, lane: LaneId) {
        if !self.lanes.contains_key(&lane) {
            return;
        }
        let welcome = Welcome {
            version: VERSION,
            node: NodeId(1),
            incarnation: Incarnation(1),
            shard: ShardId(0),
            epoch: Epoch(0),
            pool_bytes: 0,
        };
        let body = welcome.encode();
        let header = Header::reply(Kind::Reply(Operation::Hello), RequestId::default(), Status::Ok).with_body(&body, 1);
        self.client.frame(lane, &header, &body, self.now_ns);
    }

    /// Switches the port to the next connection with packets to send.
    fn send(&mut self, port: usize) {
        if self.sending[port].is_some() || !self.ports[port].is_up(self.now_ns) {
            return;
        }
        let Some(lane) = self.turns[port].pop_front() else { return };
        let Some(transfer) = self.lanes.get(&lane).and_then(|lane| lane.transfers.front()) else { return };
        let bytes = transfer.left_bytes.min(PACKET_BYTES);
        self.sending[port] = Some(lane);
        self.after(bytes * SECOND_NS / self.ports[port].bytes_per_second, Event::Served(port));
    }

    fn served(&mut self, port: usize) {
        let lane = self.sending[port].take().expect("a port that was sending");
        if let Some(entry) = self.lanes.get_mut(&lane)
            && let Some(transfer) = entry.transfers.front_mut()
        {
            transfer.left_bytes -= transfer.left_bytes.min(PACKET_BYTES);
            let mut answered = None;
            if transfer.left_bytes == 0 {
                answered = Some((transfer.request.to_bits(), transfer.bytes));
                entry.transfers.pop_front();
            }
            entry.in_turn = !entry.transfers.is_empty();
            if entry.in_turn {
                self.turns[port].push_back(lane);
            }
            if let Some((request, bytes)) = answered {
                self.after(self.latency_ns, Event::Answered(lane, request, bytes));
            }
        }
        self.send(port);
    }

    fn answered(&mut self, lane: LaneId, request: u64, bytes: u64) {
        if !self.lanes.contains_key(&lane) {
            return;
        }
        let header = Header::reply(Kind::Reply(Operation::Read), RequestId::from_bits(request), Status::Ok)
            .with_payload(bytes, Some(1));
        if let PayloadTo::Local { slice, .. } = self.client.frame(lane, &header, &[], self.now_ns) {
            self.client.payload_done(slice, Some(1), self.now_ns);
        }
    }
}
