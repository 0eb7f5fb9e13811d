//! Process of a client: its state machine, its memory, its lanes; one thread that does one thing at a time.

use std::collections::BTreeMap;

use kvplane_client::{Client, Config, LaneId, Output, Path};
use kvplane_proto::FrameFlags;
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::BatchId;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::rng::Rng;

use crate::world::check::memory::{Loan, Memory};
use crate::world::check::results::OpenBatch;
use crate::world::check::segments::CELLS;
use crate::world::check::{Rule, broken};
use crate::world::cluster::fetch::Fetcher;
use crate::world::network::copy::Copy;
use crate::world::network::pipe::{OutgoingFrame, Source};
use crate::world::network::{End, Way};
use crate::world::queue::Event;
use crate::world::scenario::{MS, Mischief, Scenario};
use crate::world::{World, slot_count};

/// Process of a client. Its incarnation changes when it is killed and restarted.
pub(crate) struct ClientHost {
    pub(crate) client: Client,
    pub(crate) incarnation: u32,
    pub(crate) alive: bool,
    /// The control plane has issued a ticket to it.
    pub(crate) has_ticket: bool,
    pub(crate) memory: Memory,
    pub(crate) lanes: BTreeMap<LaneId, u32>,
    pub(crate) batches: BTreeMap<BatchId, OpenBatch>,
    pub(crate) copying: Option<Copy>,
    pub(crate) batches_left: u64,
    /// The client will be killed in the middle of its next copy.
    pub(crate) doomed: bool,
    /// Time until which it was halted in the middle of a copy.
    pub(crate) halted_ns: u64,
    /// State of a shard's client, which imports objects for it.
    pub(crate) fetcher: Option<Fetcher>,
    /// Time of the earliest scheduled timer.
    armed_ns: u64,
}

impl ClientHost {
    pub(crate) fn new(index: usize, incarnation: u32, scenario: &Scenario, rng: &mut Rng) -> Self {
        let shared = scenario.shared_memory && rng.chance(0.7);
        let config = Config {
            cluster: "world".to_owned(),
            client: (index as u64) << 32 | u64::from(incarnation),
            host: format!("host-{}", index % scenario.hosts),
            lanes: scenario.lanes,
            shared,
            stream: !shared || rng.chance(0.7),
            lane_window_bytes: scenario.lane_window_bytes,
            gather_range_bytes: 0,
            hedge_ns: if scenario.has(Mischief::NeverHedge) { 0 } else { scenario.hedge_ns },
            ..Config::default()
        };
        Self {
            client: Client::new(config),
            incarnation,
            alive: true,
            has_ticket: false,
            memory: Memory::new(slot_count(scenario), scenario.object_bytes),
            lanes: BTreeMap::new(),
            batches: BTreeMap::new(),
            copying: None,
            batches_left: scenario.batches,
            doomed: false,
            halted_ns: 0,
            fetcher: None,
            armed_ns: u64::MAX,
        }
    }

    /// Creates the client of a shard.
    pub(crate) fn for_shard(client: Client, memory: Memory, fetcher: Fetcher) -> Self {
        Self {
            client,
            incarnation: 1,
            alive: true,
            has_ticket: false,
            memory,
            lanes: BTreeMap::new(),
            batches: BTreeMap::new(),
            copying: None,
            batches_left: 0,
            doomed: false,
            halted_ns: 0,
            fetcher: Some(fetcher),
            armed_ns: u64::MAX,
        }
    }
}

/// Number of release frames that a connection remembers, so that one is repeated after its index is reused.
const GIVEN_BACK: usize = 32;

impl World {
    /// Carries out the client's outputs, until there are no more or its thread is busy with a copy.
    pub(crate) fn drain_client(&mut self, index: usize) {
        while self.violation.is_none() && self.clients[index].copying.is_none() {
            let Some(output) = self.clients[index].client.poll_output() else { break };
            match output {
                Output::Connect { lane, address, path } => self.connect(index, lane, &address, path),
                Output::Send { lane, header, body, payload } => {
                    let client = &self.clients[index].client;
                    let body = client.outbox().body(body).to_vec();
                    let payload = client.outbox().payload(payload).first().copied();
                    self.send_request(index, lane, header, &body, payload);
                }
                Output::CopyIn { .. } | Output::CopyOut { .. } => self.start_copy(index, &output),
                Output::CopySegment { lane, slice, offset, local, write: true, .. } => {
                    self.copy_segment(index, lane, slice, offset, local);
                }
                Output::CopySegment { .. } | Output::FileTransfer { .. } => {
                    self.violate(broken(Rule::Protocol, "a copy without a request".to_owned()));
                }
                Output::Reset { lane } => self.reset_lane(index, lane),
                Output::Done { batch } if !self.is_user(index) => self.fetch_done(index, batch),
                Output::WantMap if !self.is_user(index) => {}
                Output::Done { batch } => {
                    self.batch_done(index, batch);
                    if self.scenario.has(Mischief::DoneTwice) {
                        self.batch_done(index, batch);
                    }
                }
                Output::WantMap => self.fetch_map(index),
            }
        }
        self.arm_client(index);
    }

    fn arm_client(&mut self, index: usize) {
        let client = &mut self.clients[index];
        let Some(at_ns) = client.client.poll_timeout().filter(|&at_ns| client.alive && at_ns < client.armed_ns) else {
            return;
        };
        client.armed_ns = at_ns;
        let incarnation = client.incarnation;
        self.at(at_ns, Event::ClientTimer(index, incarnation));
    }

    pub(crate) fn client_timer(&mut self, index: usize, incarnation: u32) {
        if !self.is_client(index, incarnation) || self.scenario.has(Mischief::ForgetTimer) {
            return;
        }
        let now_ns = self.now_ns;
        let client = &mut self.clients[index];
        client.armed_ns = u64::MAX;
        if client.client.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            client.client.handle_timeout(now_ns);
            self.count_timer("a client");
        }
        self.drain_client(index);
    }

    pub(crate) fn is_client(&self, index: usize, incarnation: u32) -> bool {
        self.clients[index].alive && self.clients[index].incarnation == incarnation
    }

    fn send_request(
        &mut self,
        index: usize,
        lane: LaneId,
        mut header: Header,
        body: &[u8],
        payload: Option<kvplane_client::Local>,
    ) {
        let Some(&connection) = self.clients[index].lanes.get(&lane) else {
            self.violate(broken(Rule::Protocol, format!("client {index} sends on {lane:?}, which is not connected")));
            return;
        };
        if let Some(local) = payload {
            match self.clients[index].memory.loan(local.offset) {
                Some(Loan::Put { .. }) if header.kind == Kind::Request(Operation::Write) => {}
                Some(Loan::Put { write, .. }) => self.shadow.sent(write),
                Some(Loan::Copy { .. }) => {}
                loan => self.violate(broken(Rule::Memory, format!("a put is sent from memory that is {loan:?}"))),
            }
            if header.flags.has(FrameFlags::CHECKSUM) && header.payload_checksum == 0 {
                let bytes = self.clients[index].memory.peek(local.offset, local.bytes);
                header.payload_checksum = payload_checksum(bytes);
            }
        }
        self.detail(u64::from(header.kind.code()), || {
            format!("client {index} sends {:?} x{}", header.kind, header.items)
        });
        self.send(connection, Way::ToServer, OutgoingFrame::new(&header, body, payload.map(Source::Local)));
        self.repeat_frame(connection, &header, body);
    }

    /// Repeats a release of a pin or a reservation over shared memory, some frames later, like a client with a bug. The
    /// shard closes its connection, and the later holder of the same index is not harmed.
    fn repeat_frame(&mut self, index: u32, header: &Header, body: &[u8]) {
        let gives_back =
            matches!(header.kind, Kind::Request(Operation::Release | Operation::Abort | Operation::Commit));
        let Some(connection) = self.connections.get_mut(&index).filter(|_| gives_back && !self.trouble.calm) else {
            return;
        };
        let chance = self.scenario.chances.repeat_frame;
        if connection.path != Path::Shared || chance == 0.0 {
            return;
        }
        if connection.given_back.len() == GIVEN_BACK {
            connection.given_back.pop_front();
        }
        connection.given_back.push_back((*header, body.to_vec()));
        if self.streams.network.chance(chance) {
            let at = self.streams.network.below(connection.given_back.len() as u64) as usize;
            let (header, body) = connection.given_back[at].clone();
            connection.repeats = true;
            self.send(index, Way::ToServer, OutgoingFrame::new(&header, &body, None));
        }
    }

    /// Ends the lane's I/O on the host, which takes a moment: until then bytes may still arrive in the caller's memory.
    fn reset_lane(&mut self, index: usize, lane: LaneId) {
        let delay_ns = self.streams.network.below(2 * MS);
        let Some(&connection) = self.clients[index].lanes.get(&lane) else {
            let incarnation = self.clients[index].incarnation;
            self.after(delay_ns, Event::Refused(index, incarnation, lane));
            return;
        };
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.client_end = End::Closing;
        }
        self.after(delay_ns, Event::ResetDone(connection));
    }

    pub(crate) fn reset_done(&mut self, index: u32) {
        let closing = |connection: &crate::world::Connection| connection.client_end == End::Closing;
        if self.connections.get(&index).is_some_and(closing) {
            self.client_end_gone(index);
        }
    }

    pub(crate) fn refused(&mut self, index: usize, incarnation: u32, lane: LaneId) {
        if self.is_client(index, incarnation) {
            self.clients[index].client.lane_gone(lane, self.now_ns);
            self.drain_client(index);
        }
    }

    pub(crate) fn connected(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        if connection.client_end != End::Opening {
            return;
        }
        connection.client_end = End::Open;
        let (client, lane) = (connection.client, connection.lane);
        self.clients[client].client.connected(lane, self.now_ns);
        self.drain_client(client);
    }

    /// Handles the end of the client's side once none of its I/O is left.
    pub(crate) fn client_end_gone(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let (client, lane) = (connection.client, connection.lane);
        connection.client_end = End::Gone;
        if !self.scenario.has(Mischief::KeepLateBytes) {
            connection.to_client.drop_flight();
        }
        self.end_flight(index, Way::ToServer);
        self.clients[client].lanes.remove(&lane);
        self.clients[client].client.lane_gone(lane, self.now_ns);
        self.forget_if_gone(index);
        self.drain_client(client);
    }

    /// Kills a client as `kill -9` does: its memory is gone and the kernel closes its connections.
    pub(crate) fn crash_client(&mut self, index: usize) {
        let user = self.is_user(index);
        let client = &mut self.clients[index];
        client.alive = false;
        client.batches.clear();
        let copying = client.copying.take();
        let lanes = std::mem::take(&mut client.lanes);
        if user {
            self.segments.orphan(index * CELLS..(index + 1) * CELLS);
        }
        for connection in lanes.into_values() {
            if let Some(open) = self.connections.get_mut(&connection) {
                open.client_end = End::Gone;
                open.to_client.drop_flight();
                self.end_flight(connection, Way::ToServer);
                self.forget_if_gone(connection);
            }
        }
        if let Some(copy) = copying.filter(|_| self.scenario.has(Mischief::LateWriter)) {
            self.clients[index].copying = Some(copy);
            self.after(20 * MS, Event::GhostChunk(index));
        }
    }

    pub(crate) fn start_client(&mut self, index: usize) {
        if self.clients[index].alive {
            return;
        }
        let (incarnation, left) = (self.clients[index].incarnation + 1, self.clients[index].batches_left);
        self.clients[index] = ClientHost::new(index, incarnation, &self.scenario, &mut self.streams.faults);
        self.clients[index].batches_left = left;
        self.begin_client(index);
    }

    pub(crate) fn begin_client(&mut self, index: usize) {
        let incarnation = self.clients[index].incarnation;
        let first_ns = self.streams.workload.below(20 * MS);
        self.after(0, Event::PollMap(index, incarnation));
        self.after(first_ns, Event::Act(index, incarnation));
    }
}
