//! Connections of a mesh: who connects to whom, which connection becomes a channel, and what follows when one ends.
//!
//! Of two processes the one of the higher rank connects; the other one only looks whether a process listens, so that
//! either of them learns of a refusal. A hello of a process that is not listed yet waits until it is.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::Status;
use kvplane_sys::{Poller, Readiness, Region, SharedDoorbell, cpu, net};
use kvplane_transport::{CloseCause, ConnectionId, Source, Token};

use crate::address::Address;
use crate::config::{MAX_RANKS, MeshConfig};
use crate::counters::MeshCounters;
use crate::error::{DownCause, MeshError, kernel};
use crate::hello::{Hello, Welcome};
use crate::local::{Local, LocalEvent};
use crate::network::{Network, NetworkEvent, Wire};
use crate::peers::{Attempt, Channel, Channels, Entry, Lane, Peer, rank_of_hold};
use crate::ring::least_capacity;
use crate::shared::{self, SharedChannel};
use crate::streamed::{StreamOptions, StreamedChannel};

/// Limit of a published address, in bytes.
const ADDRESS_BYTES: usize = 512;
/// Time after which an attempt without an answer begins anew. Long: the peer may not have this process in its list.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for which no RDMA connection to a peer is tried after one failed.
const RDMA_PAUSE: Duration = Duration::from_secs(30);
/// `ECONNREFUSED`.
const REFUSED: i32 = 111;

/// Change of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// With the number of the channel.
    Up(u8, u64),
    Down(u8, DownCause),
}

/// A connection over which a hello arrived.
enum Caller {
    Local(ConnectionId, SharedDoorbell),
    Tcp(ConnectionId),
}

/// Memory of a former channel, until no device accesses it any more.
struct FormerMemory {
    rdma: ConnectionId,
    regions: [Arc<Region>; 2],
}

/// Ranks that have a channel.
#[derive(Default)]
pub(crate) struct ActiveRanks {
    pub(crate) ranks: Vec<u8>,
    /// Number of channels in shared memory, and of those over connections.
    pub(crate) shared: usize,
    pub(crate) streamed: usize,
}

enum Verdict {
    Admit,
    Wait,
    Refuse(Status),
}

/// All connections of one process.
pub(crate) struct Connections {
    config: MeshConfig,
    host: String,
    address: String,
    poller: Poller,
    pub(crate) local: Option<Local>,
    pub(crate) network: Option<Network>,
    pub(crate) entries: Vec<Option<Entry>>,
    /// Callers that are not listed yet, at most one of each rank.
    waiting: Vec<(Hello, Caller)>,
    former: Vec<FormerMemory>,
    changes: VecDeque<Change>,
    pub(crate) active: ActiveRanks,
    channels: u64,
    due: Option<Instant>,
    readiness: Vec<Readiness>,
    pub(crate) counters: MeshCounters,
}

impl Connections {
    /// Starts to listen.
    ///
    /// # Errors
    /// When a setting is invalid or the kernel refuses a resource.
    pub(crate) fn start(mut config: MeshConfig) -> Result<Self, MeshError> {
        config.check()?;
        let poller = Poller::new().map_err(kernel("poller of the mesh"))?;
        let local = match config.shared_memory {
            true => Some(Local::start(&poller, config.runtime_directory.as_deref())?),
            false => None,
        };
        let devices = core::mem::take(&mut config.rdma);
        let network = match config.tcp {
            true => {
                let listener = net::tcp_listener(SocketAddr::new(config.listen, 0), MAX_RANKS as u32 * 2);
                let listener = listener.map_err(kernel("TCP port of the mesh"))?;
                Some(Network::start(&poller, listener, config.tls.clone(), &devices)?)
            }
            false => None,
        };
        let host = cpu::boot_id().unwrap_or_default();
        let address = Address {
            tcp: network.as_ref().map(|network| SocketAddr::new(config.announced(), network.address().port())),
            host: host.clone(),
            socket: local.as_ref().map(|local| local.path().to_owned()),
        };
        let address = address.to_string();
        if address.len() > ADDRESS_BYTES {
            return Err(MeshError::LongAddress { bytes: address.len(), limit: ADDRESS_BYTES });
        }
        Ok(Self {
            config,
            host,
            address,
            poller,
            local,
            network,
            entries: (0..MAX_RANKS).map(|_| None).collect(),
            waiting: Vec::new(),
            former: Vec::new(),
            changes: VecDeque::new(),
            active: ActiveRanks::default(),
            channels: 0,
            due: None,
            readiness: Vec::new(),
            counters: MeshCounters::default(),
        })
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) const fn payload_bytes(&self) -> usize {
        self.config.payload_bytes
    }

    pub(crate) fn next_change(&mut self) -> Option<Change> {
        let change = self.changes.pop_front();
        if let Some(Change::Up(rank, number)) = &change
            && let Some(channel) = self.entries[usize::from(*rank)].as_mut().and_then(|entry| entry.channel.as_mut())
        {
            // The event may be of a channel that has ended since.
            channel.announced |= channel.number == *number;
        }
        change
    }

    pub(crate) fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Returns the states of the channels.
    pub(crate) fn states(&self) -> Channels {
        let mut states = Channels::default();
        for (rank, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            match &entry.channel {
                Some(channel) => states.open |= u64::from(channel.is_open()) << rank,
                None => states.refused |= u64::from(entry.refused) << rank,
            }
        }
        states
    }

    /// Replaces the list of peers: what did not change is left as it is.
    pub(crate) fn set_peers(&mut self, peers: &[Peer]) {
        let listed = |rank: usize| peers.iter().rev().find(|peer| usize::from(peer.rank) == rank);
        let own = usize::from(self.config.rank);
        for rank in (0..MAX_RANKS).filter(|rank| *rank != own) {
            let same = match (&self.entries[rank], listed(rank)) {
                (Some(entry), Some(peer)) => entry.incarnation == peer.incarnation && entry.text == peer.address,
                (None, None) => true,
                _ => false,
            };
            if same {
                continue;
            }
            self.forget(rank);
            self.entries[rank] = listed(rank).map(Entry::new);
        }
        self.list_ranks();
        let waiting = core::mem::take(&mut self.waiting);
        for (hello, caller) in waiting {
            self.greet(hello, caller);
        }
        self.due = Some(Instant::now());
        self.keep_time();
    }

    /// Drops a peer with all that belongs to it, without an event.
    fn forget(&mut self, rank: usize) {
        if let Some(mut entry) = self.entries[rank].take() {
            self.give_up(entry.attempt.take());
            if let Some(channel) = entry.channel.take() {
                self.discard(&channel);
            }
        }
    }

    /// Closes the connections of an attempt.
    fn give_up(&mut self, attempt: Option<Attempt>) {
        match (attempt, &mut self.local, &mut self.network) {
            (Some(Attempt::Local(id)), Some(local), _) => local.close(id),
            (Some(Attempt::Tcp { id, rdma }), _, Some(network)) => {
                network.close(Wire::Tcp(id));
                if let Some(rdma) = rdma {
                    network.close(Wire::Rdma(rdma));
                }
            }
            (Some(Attempt::Probe(id)), _, Some(network)) => network.close(Wire::Tcp(id)),
            _ => {}
        }
    }

    /// Closes the connections of a channel.
    fn close(&mut self, lane: &Lane) {
        match (lane, &mut self.local, &mut self.network) {
            (Lane::Shared(channel), Some(local), _) => local.close(channel.connection),
            (Lane::Streamed(channel), _, Some(network)) => {
                network.close(Wire::Tcp(channel.control));
                if matches!(channel.wire, Wire::Rdma(_)) {
                    network.close(channel.wire);
                }
            }
            _ => {}
        }
    }

    /// Drops a channel. Memory that devices may still access is kept until they do not.
    fn discard(&mut self, channel: &Channel) {
        self.close(&channel.lane);
        if let Lane::Streamed(streamed) = &channel.lane
            && let Wire::Rdma(rdma) = streamed.wire
        {
            self.former.push(FormerMemory { rdma, regions: streamed.memory().map(Arc::clone) });
        }
    }

    fn list_ranks(&mut self) {
        let active = &mut self.active;
        active.ranks.clear();
        (active.shared, active.streamed) = (0, 0);
        for (rank, entry) in self.entries.iter().enumerate() {
            match entry.as_ref().and_then(|entry| entry.channel.as_ref()) {
                None => continue,
                Some(Channel { lane: Lane::Shared(_), .. }) => active.shared += 1,
                Some(Channel { lane: Lane::Streamed(_), .. }) => active.streamed += 1,
            }
            active.ranks.push(rank as u8);
        }
    }

    /// Waits for events at most this long, handles them, and begins attempts that are due.
    pub(crate) fn drive(&mut self, longest: Duration) {
        let mut readiness = core::mem::take(&mut self.readiness);
        readiness.clear();
        // A failure of the poller is none of a peer; what it would have reported is found by the next call.
        let _ = self.poller.wait(longest, &mut readiness);
        for one in &readiness {
            let Some(token) = Token::from_bits(one.token) else { continue };
            match (token.source, &mut self.local) {
                (Source::ShmListener, Some(local)) => local.accept(&self.poller),
                (Source::ShmDoorbell, Some(local)) => local.bell().drain(),
                (Source::ShmSocket, Some(_)) => self.take_local(token),
                _ => {
                    if let Some(network) = &mut self.network {
                        network.ready(&self.poller, token, one);
                    }
                }
            }
        }
        self.readiness = readiness;
        self.take_network();
        self.keep_time();
    }

    /// Returns the time until attempts are due, at most `longest`.
    pub(crate) fn patience(&self, longest: Duration) -> Duration {
        self.due.map_or(longest, |due| longest.min(due.saturating_duration_since(Instant::now())))
    }

    fn take_local(&mut self, token: Token) {
        // Edge-triggered: the end of the socket may be right behind a message.
        while let Some(event) = self.local.as_mut().and_then(|local| local.ready(token)) {
            match event {
                LocalEvent::Hello(id, Ok((hello, bell))) => self.greet(hello, Caller::Local(id, bell)),
                LocalEvent::Hello(id, Err(status)) => self.refuse_local(id, status),
                LocalEvent::Answer(id, welcome, channel) => self.take_local_answer(id, &welcome, channel),
                LocalEvent::Gone(id, cause) => return self.local_gone(id, cause),
            }
        }
    }

    fn take_network(&mut self) {
        if let Some(network) = &mut self.network {
            network.round(&self.poller);
        }
        while let Some(event) = self.network.as_mut().and_then(Network::poll_event) {
            match event {
                NetworkEvent::Connected(id) => self.introduce(id),
                NetworkEvent::Hello(id, Ok(hello)) => self.greet(hello, Caller::Tcp(id)),
                NetworkEvent::Hello(id, Err(status)) => self.refuse_tcp(id, status),
                NetworkEvent::Answer(id, welcome) => self.take_tcp_answer(id, welcome),
                NetworkEvent::Input(wire) => self.note_input(wire),
                NetworkEvent::RdmaUp(id) => self.rdma_up(id),
                NetworkEvent::Sent(hold) => {
                    let entry = self.entries.get_mut(rank_of_hold(hold)).and_then(Option::as_mut);
                    if let Some(Channel { lane: Lane::Streamed(channel), .. }) =
                        entry.and_then(|entry| entry.channel.as_mut())
                    {
                        channel.take_sent(hold);
                    }
                }
                NetworkEvent::Gone(wire, cause) => self.network_gone(wire, &cause),
            }
        }
    }

    fn note_input(&mut self, wire: Wire) {
        let Some(Channel { lane: Lane::Streamed(channel), .. }) = self.channel_on(wire) else { return };
        if channel.wire == wire {
            channel.note_input();
        } else if let Some(network) = &mut self.network {
            network.expect_end(wire);
        }
    }

    fn channel_on(&mut self, wire: Wire) -> Option<&mut Channel> {
        let mut channels = self.entries.iter_mut().flatten().filter_map(|entry| entry.channel.as_mut());
        channels.find(|channel| channel.is_on(wire))
    }

    fn rank_with(&self, is: impl Fn(&Entry) -> bool) -> Option<usize> {
        self.entries.iter().position(|entry| entry.as_ref().is_some_and(&is))
    }

    fn judge(&self, hello: &Hello) -> Verdict {
        if hello.world != self.config.world || hello.payload_bytes as usize != self.config.payload_bytes {
            return Verdict::Refuse(Status::Incompatible);
        }
        if hello.to != (self.config.rank, self.config.incarnation) {
            return Verdict::Refuse(Status::Stale);
        }
        let (rank, incarnation) = hello.from;
        if usize::from(rank) >= MAX_RANKS || rank <= self.config.rank {
            return Verdict::Refuse(Status::BadRequest);
        }
        match &self.entries[usize::from(rank)] {
            Some(entry) if entry.incarnation == incarnation => Verdict::Admit,
            _ => Verdict::Wait,
        }
    }

    /// Answers a hello, or lets it wait.
    fn greet(&mut self, hello: Hello, caller: Caller) {
        match (self.judge(&hello), caller) {
            (Verdict::Admit, Caller::Local(id, bell)) => self.admit_local(usize::from(hello.from.0), id, bell),
            (Verdict::Admit, Caller::Tcp(id)) => self.admit_tcp(usize::from(hello.from.0), id, &hello),
            (Verdict::Refuse(status), Caller::Local(id, _)) => self.refuse_local(id, status),
            (Verdict::Refuse(status), Caller::Tcp(id)) => self.refuse_tcp(id, status),
            (Verdict::Wait, caller) => {
                // Only the latest of a rank can be the one that will be listed.
                let before = self.waiting.iter().position(|(other, _)| other.from.0 == hello.from.0);
                match before.map(|index| self.waiting.swap_remove(index).1) {
                    Some(Caller::Local(id, _)) => self.refuse_local(id, Status::Stale),
                    Some(Caller::Tcp(id)) => self.refuse_tcp(id, Status::Stale),
                    None => {}
                }
                self.waiting.push((hello, caller));
            }
        }
    }

    fn refuse_local(&mut self, id: ConnectionId, status: Status) {
        self.counters.refused += 1;
        if let Some(local) = &mut self.local {
            let _ = local.answer(id, &Welcome::refusal(status, self.config.incarnation), None);
            local.close(id);
        }
    }

    fn refuse_tcp(&mut self, id: ConnectionId, status: Status) {
        self.counters.refused += 1;
        if let Some(network) = &mut self.network {
            network.answer(id, &Welcome::refusal(status, self.config.incarnation));
        }
    }

    fn admit_local(&mut self, rank: usize, id: ConnectionId, bell: SharedDoorbell) {
        let capacity = self.config.ring_bytes(self.entries.iter().flatten().count());
        let Ok(region) = shared::allocate(capacity) else { return self.refuse_local(id, Status::NoSpace) };
        let welcome = Welcome {
            status: Status::Ok,
            incarnation: self.config.incarnation,
            ring_bytes: capacity as u32,
            rdma: Vec::new(),
        };
        let Some(local) = &mut self.local else { return };
        if local.answer(id, &welcome, Some(&region)).is_err() {
            return local.close(id);
        }
        local.open(id);
        let channel = SharedChannel::new(id, region, capacity, self.config.payload_bytes, false, bell);
        self.install(rank, Lane::Shared(channel), true);
    }

    fn take_local_answer(
        &mut self,
        id: ConnectionId,
        welcome: &Welcome,
        channel: Option<(Arc<Region>, SharedDoorbell)>,
    ) {
        let Some(rank) = self.rank_with(|entry| entry.attempt == Some(Attempt::Local(id))) else { return };
        let Some(local) = &mut self.local else { return };
        let (capacity, limit) = (welcome.ring_bytes as usize, self.config.payload_bytes);
        // Payloads of our limit would never find room in a shorter ring.
        let Some((region, bell)) = channel.filter(|_| capacity >= least_capacity(limit)) else {
            local.close(id);
            return self.retry(rank);
        };
        local.open(id);
        let channel = SharedChannel::new(id, region, capacity, limit, true, bell);
        self.install(rank, Lane::Shared(channel), true);
    }

    fn admit_tcp(&mut self, rank: usize, id: ConnectionId, hello: &Hello) {
        let Some(network) = &mut self.network else { return };
        let (rdma, answer) = network.accept_rdma(&hello.rdma);
        let wire = rdma.map_or(Wire::Tcp(id), Wire::Rdma);
        let Some(channel) = self.streamed(rank, id, wire, false) else {
            if let (Some(rdma), Some(network)) = (rdma, &mut self.network) {
                network.close(Wire::Rdma(rdma));
            }
            return self.refuse_tcp(id, Status::NoSpace);
        };
        let welcome = Welcome {
            status: Status::Ok,
            incarnation: self.config.incarnation,
            ring_bytes: 0,
            // A refusal is not sent: the peer then goes on over TCP, too.
            rdma: if rdma.is_some() { answer } else { Vec::new() },
        };
        if let Some(network) = &mut self.network {
            network.answer(id, &welcome);
            network.open(id);
        }
        self.install(rank, Lane::Streamed(channel), rdma.is_none());
    }

    fn take_tcp_answer(&mut self, id: ConnectionId, welcome: Option<Welcome>) {
        let is = |entry: &Entry| matches!(entry.attempt, Some(Attempt::Tcp { id: other, .. }) if other == id);
        let Some(rank) = self.rank_with(is) else { return };
        let Some(Attempt::Tcp { rdma, .. }) = self.entries[rank].as_ref().and_then(|entry| entry.attempt) else {
            return;
        };
        let welcome = welcome.filter(|welcome| welcome.status == Status::Ok);
        let (Some(welcome), Some(network)) = (welcome, &mut self.network) else { return self.retry(rank) };
        let wire = match (rdma, welcome.rdma.is_empty()) {
            (Some(rdma), false) => {
                network.complete_rdma(rdma, &welcome.rdma);
                Wire::Rdma(rdma)
            }
            (rdma, true) => {
                if let Some(rdma) = rdma {
                    network.close(Wire::Rdma(rdma));
                }
                Wire::Tcp(id)
            }
            // Ours has failed meanwhile.
            (None, false) => return self.retry(rank),
        };
        let Some(channel) = self.streamed(rank, id, wire, true) else { return self.retry(rank) };
        if let Some(network) = &mut self.network {
            network.open(id);
        }
        self.install(rank, Lane::Streamed(channel), matches!(wire, Wire::Tcp(_)));
    }

    fn streamed(&mut self, rank: usize, id: ConnectionId, wire: Wire, connects: bool) -> Option<StreamedChannel> {
        let peers = self.entries.iter().flatten().count();
        let entry = self.entries[rank].as_mut()?;
        let options = StreamOptions {
            connects,
            checksum: self.config.checksum,
            payload_limit: self.config.payload_bytes,
            capacity: self.config.ring_bytes(peers),
            first_hold: entry.next_hold,
        };
        let channel = StreamedChannel::new(id, wire, &options).ok()?;
        if let (Wire::Rdma(_), Some(network)) = (wire, &mut self.network) {
            channel.memory().into_iter().for_each(|region| network.register(region));
        }
        Some(channel)
    }

    /// Makes a channel the peer's, in place of the former one.
    fn install(&mut self, rank: usize, lane: Lane, up: bool) {
        self.end(rank, DownCause::Reconnected);
        self.finish(rank);
        self.channels += 1;
        let Some(entry) = &mut self.entries[rank] else { return };
        entry.settle();
        entry.channel = Some(Channel { lane, number: self.channels, up, announced: false, ending: None });
        self.list_ranks();
        if up {
            self.counters.ups += 1;
            self.changes.push_back(Change::Up(rank as u8, self.channels));
        }
    }

    fn rdma_up(&mut self, id: ConnectionId) {
        let Some(rank) = self.rank_with(|entry| entry.channel.as_ref().is_some_and(|one| one.is_on(Wire::Rdma(id))))
        else {
            return;
        };
        if let Some(channel) = self.entries[rank].as_mut().and_then(|entry| entry.channel.as_mut()) {
            channel.up = true;
            self.counters.ups += 1;
            self.changes.push_back(Change::Up(rank as u8, channel.number));
        }
    }

    /// Ends a channel: what has arrived is still delivered, then [`Self::finish`] is called.
    pub(crate) fn end(&mut self, rank: usize, cause: DownCause) {
        let Some(entry) = &mut self.entries[rank] else { return };
        let Some(channel) = entry.channel.take_if(|channel| channel.ending.is_none()) else { return };
        self.close(&channel.lane);
        let up = channel.up;
        if let Some(entry) = &mut self.entries[rank] {
            entry.channel = Some(Channel { ending: Some(cause), ..channel });
        }
        if !up {
            self.finish(rank);
        }
    }

    /// Drops a channel that has ended, and reports its end.
    pub(crate) fn finish(&mut self, rank: usize) {
        let now = Instant::now();
        let Some(entry) = &mut self.entries[rank] else { return };
        let Some(channel) = entry.channel.take_if(|channel| channel.ending.is_some()) else { return };
        if let Lane::Streamed(streamed) = &channel.lane {
            entry.next_hold = streamed.next_hold();
        }
        match channel.up {
            true => entry.retry_now(now),
            false => entry.retry(now),
        }
        if let (true, Some(cause)) = (channel.up, channel.ending.clone()) {
            self.counters.downs += 1;
            self.changes.push_back(Change::Down(rank as u8, cause));
        }
        self.discard(&channel);
        self.list_ranks();
        self.due = Some(now);
        self.keep_time();
    }

    fn local_gone(&mut self, id: ConnectionId, cause: DownCause) {
        self.waiting.retain(|(_, caller)| !matches!(caller, Caller::Local(other, _) if *other == id));
        if let Some(rank) = self.rank_with(|entry| entry.attempt == Some(Attempt::Local(id))) {
            return self.retry(rank);
        }
        let is = |entry: &Entry| match entry.channel.as_ref().map(|channel| &channel.lane) {
            Some(Lane::Shared(channel)) => channel.connection == id,
            _ => false,
        };
        if let Some(rank) = self.rank_with(is) {
            self.end(rank, cause);
        }
    }

    fn network_gone(&mut self, wire: Wire, cause: &CloseCause) {
        let now = Instant::now();
        if let Wire::Rdma(id) = wire {
            let (gone, kept) = self.former.drain(..).partition(|former| former.rdma == id);
            self.former = kept;
            let gone: Vec<FormerMemory> = gone;
            for (region, network) in gone.iter().flat_map(|former| &former.regions).zip(self.network.as_mut()) {
                network.forget(region);
            }
            for entry in self.entries.iter_mut().flatten() {
                if let Some(Attempt::Tcp { rdma, .. }) = &mut entry.attempt
                    && *rdma == Some(id)
                {
                    *rdma = None;
                    entry.rdma_after = Some(now + RDMA_PAUSE);
                }
            }
        }
        if let Wire::Tcp(id) = wire {
            self.waiting.retain(|(_, caller)| !matches!(caller, Caller::Tcp(other) if *other == id));
            let is = |entry: &Entry| match entry.attempt {
                Some(Attempt::Tcp { id: other, .. } | Attempt::Probe(other)) => other == id,
                _ => false,
            };
            if let Some(rank) = self.rank_with(is) {
                if let Some(entry) = &mut self.entries[rank] {
                    entry.refused = *cause == CloseCause::Kernel(REFUSED);
                }
                return self.retry(rank);
            }
        }
        if let Some(rank) = self.rank_with(|entry| entry.channel.as_ref().is_some_and(|one| one.is_on(wire))) {
            if let (Wire::Rdma(_), Some(entry)) = (wire, &mut self.entries[rank]) {
                entry.rdma_after = Some(now + RDMA_PAUSE);
            }
            self.end(rank, cause.into());
        }
    }

    /// Gives an attempt up, and plans the next one.
    fn retry(&mut self, rank: usize) {
        let now = Instant::now();
        let Some(entry) = &mut self.entries[rank] else { return };
        let attempt = entry.attempt.take();
        entry.retry(now);
        self.due = self.due.into_iter().chain(entry.due).min();
        self.give_up(attempt);
    }

    /// Begins attempts that are due, and gives up those that took too long.
    fn keep_time(&mut self) {
        let now = Instant::now();
        if self.due.is_none_or(|due| due > now) {
            return;
        }
        for rank in 0..MAX_RANKS {
            let Some(entry) = &mut self.entries[rank] else { continue };
            if entry.due.is_none_or(|due| due > now) {
                continue;
            }
            if entry.attempt.is_some() {
                self.retry(rank);
            } else if entry.channel.is_none() {
                self.attempt(rank, now);
            } else {
                entry.due = None;
            }
        }
        self.due = self.entries.iter().flatten().filter_map(|entry| entry.due).min();
    }

    fn hello(&self, rank: usize, rdma: Vec<u8>) -> Hello {
        let incarnation = self.entries[rank].as_ref().map_or(0, |entry| entry.incarnation);
        Hello {
            world: self.config.world.clone(),
            from: (self.config.rank, self.config.incarnation),
            to: (rank as u8, incarnation),
            payload_bytes: self.config.payload_bytes as u32,
            rdma,
        }
    }

    /// Connects to a peer of a lower rank; looks whether one of a higher rank listens.
    fn attempt(&mut self, rank: usize, now: Instant) {
        let connects = usize::from(self.config.rank) > rank;
        let hello = self.hello(rank, Vec::new());
        let Some(entry) = &mut self.entries[rank] else { return };
        let Some(address) = &entry.address else { return };
        let mut refused = false;
        if address.host == self.host
            && let (Some(local), Some(path)) = (&mut self.local, &address.socket)
        {
            let tried = match connects {
                true => local.connect(&self.poller, path, &hello).map(|id| Some(Attempt::Local(id))),
                false => Local::probe(path).map(|()| None),
            };
            match tried {
                Ok(Some(attempt)) => {
                    (entry.attempt, entry.due, entry.refused) = (Some(attempt), Some(now + PATIENCE), false);
                    return;
                }
                Ok(None) => {
                    entry.refused = false;
                    return entry.retry(now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return entry.retry(now),
                // The path may be another container's: TCP then tells.
                Err(error) => {
                    refused = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
                }
            }
        }
        let (Some(network), Some(tcp)) = (&mut self.network, address.tcp) else {
            entry.refused = refused;
            return entry.retry(now);
        };
        match network.connect(&self.poller, tcp) {
            Ok(id) => {
                let attempt = if connects { Attempt::Tcp { id, rdma: None } } else { Attempt::Probe(id) };
                (entry.attempt, entry.due) = (Some(attempt), Some(now + PATIENCE));
            }
            Err(error) => {
                entry.refused = error.raw_os_error() == Some(REFUSED);
                entry.retry(now);
            }
        }
    }

    /// Continues an attempt whose TCP connection is established.
    fn introduce(&mut self, id: ConnectionId) {
        let is = |entry: &Entry| match entry.attempt {
            Some(Attempt::Tcp { id: other, .. } | Attempt::Probe(other)) => other == id,
            _ => false,
        };
        let Some(rank) = self.rank_with(is) else { return };
        let Some(entry) = &mut self.entries[rank] else { return };
        entry.refused = false;
        if matches!(entry.attempt, Some(Attempt::Probe(_))) {
            return self.retry(rank);
        }
        let tries = entry.rdma_after.is_none_or(|after| after <= Instant::now());
        let Some(network) = &mut self.network else { return };
        let offered = if tries { network.offer_rdma() } else { None };
        let (rdma, half) = match offered {
            Some((rdma, half)) => (Some(rdma), half),
            None => (None, Vec::new()),
        };
        entry.attempt = Some(Attempt::Tcp { id, rdma });
        let hello = self.hello(rank, half);
        if let Some(network) = &mut self.network {
            network.say_hello(id, &hello);
            network.flush(&self.poller);
        }
    }

    /// Sends what is queued on connections.
    pub(crate) fn flush(&mut self) {
        if let Some(network) = &mut self.network {
            network.flush(&self.poller);
        }
    }
}
