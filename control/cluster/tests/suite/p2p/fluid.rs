//! Fluid simulation of members with links: flows share the sender's and the receiver's link evenly. Grants and reports
//! have a latency. The catalog is the production one; everything else is simulated.

mod ranks;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use kvplane_cluster::p2p::{
    FetchFailure, FetchOrder, Grant, Hold, Layout, ObjectName, ObjectSpec, Objects, ObjectsConfig, PeerLocation,
    ShardSet,
};

use ranks::RankPlan;

pub(crate) const SECOND: u64 = 1_000_000_000;

/// Link: upload and download bandwidth in bytes per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) up: f64,
    pub(crate) down: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A grant arrives: receiver, shard, source, number of the flow.
    Told(u64, u32, u64, u64),
    /// The last byte of a flow arrives, if the flow still has this version.
    Arrived(u64, u64),
    /// A report arrives: member, shard, source, true on success.
    Reported(u64, u32, u64, bool),
    /// Time of the catalog's next tick.
    Tick,
    /// A member renews its lease.
    Renew(u64),
    /// A member is killed, and its peers notice.
    Kill(u64),
    /// A member's host stops, and its peers do not notice.
    Freeze(u64),
    /// A member joins that was to join later.
    Join(usize),
    /// A rank requests the parent of a half, or receives its parent's board.
    Follow(u64, usize),
    /// A rank may have reached the timeout of a parent.
    Patience(u64),
}

struct Flow {
    receiver: u64,
    source: u64,
    shard: u32,
    left: f64,
    rate: f64,
    at: f64,
    version: u64,
}

/// Member of the swarm, present or former.
pub(crate) struct Peer {
    pub(crate) link: Link,
    pub(crate) done_ns: Option<u64>,
    pub(crate) sent_bytes: f64,
    alive: bool,
    frozen: bool,
    host: String,
    have: ShardSet,
    out: Vec<u64>,
    into: Vec<u64>,
}

/// All members, and the catalog.
pub(crate) struct Fluid {
    pub(crate) objects: Objects,
    pub(crate) peers: BTreeMap<u64, Peer>,
    pub(crate) grants: u64,
    /// Member whose bytes arrive corrupted.
    pub(crate) corrupt: Option<u64>,
    /// Bytes sent between hosts.
    pub(crate) crossed: f64,
    spec: ObjectSpec,
    flows: BTreeMap<u64, Flow>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    later: Vec<(Link, PeerLocation)>,
    now_ns: u64,
    next: u64,
    latency_ns: u64,
    ticking: Option<u64>,
    /// Number of members, present or to come, that do not have the whole object.
    waited_for: usize,
    clients: BTreeMap<u64, u64>,
    fetching: BTreeMap<(u64, u32), u64>,
    /// Members that fetch by a schedule.
    ranked: BTreeMap<u64, RankPlan>,
    by_rank: BTreeMap<u32, u64>,
}

pub(crate) fn spec(bytes: u64, shard_bytes: u64) -> ObjectSpec {
    let layout = Layout::new(vec![bytes], shard_bytes).expect("a layout");
    let hashes = (0..u128::from(layout.shards())).collect();
    ObjectSpec { layout, hashes, about: Vec::new() }
}

impl Fluid {
    pub(crate) fn new(bytes: u64, shards: u64, seed: u64) -> Self {
        let mut objects = Objects::new(ObjectsConfig { seed, ..ObjectsConfig::default() }, 0, 0);
        let spec = spec(bytes, bytes / shards);
        objects.publish(0, ObjectName::new("", "o"), Some(1), spec.clone()).expect("published");
        Self {
            objects,
            peers: BTreeMap::new(),
            grants: 0,
            corrupt: None,
            crossed: 0.0,
            spec,
            flows: BTreeMap::new(),
            events: BinaryHeap::new(),
            later: Vec::new(),
            now_ns: 0,
            next: 0,
            latency_ns: 500_000,
            ticking: None,
            waited_for: 0,
            clients: BTreeMap::new(),
            fetching: BTreeMap::new(),
            ranked: BTreeMap::new(),
            by_rank: BTreeMap::new(),
        }
    }

    /// Adds a member now.
    pub(crate) fn join(&mut self, link: Link, origin: bool, place: PeerLocation) -> u64 {
        self.join_limited(link, origin, place, 0)
    }

    /// Adds a member now that sends at most `upload` bytes per second.
    pub(crate) fn join_limited(&mut self, link: Link, origin: bool, place: PeerLocation, upload: u64) -> u64 {
        let all = vec![(0, self.spec.layout.shards())];
        self.join_wanting(link, origin, place, upload, if origin { Vec::new() } else { all })
    }

    fn join_wanting(
        &mut self,
        link: Link,
        origin: bool,
        place: PeerLocation,
        upload: u64,
        want: Vec<(u32, u32)>,
    ) -> u64 {
        let shards = self.spec.layout.shards();
        let have = if origin { vec![(0, shards)] } else { Vec::new() };
        let (client, host) = (self.peers.len() as u64 + 1, place.host.clone());
        let segment = format!("{client}");
        let hold = Hold { client, segment, addresses: vec![0], origin, have, want, place, ..Hold::default() };
        let hold = Hold { upload_bytes_per_second: upload, ..hold };
        let digest = self.spec.digest();
        let member = self.objects.hold(self.now_ns, ObjectName::new("", "o"), 1, digest, hold).expect("a member");
        let have = if origin { ShardSet::full(shards) } else { ShardSet::empty(shards) };
        self.waited_for += usize::from(!origin);
        self.clients.insert(member, client);
        let done_ns = origin.then_some(0);
        let (out, into) = (Vec::new(), Vec::new());
        self.peers
            .insert(member, Peer { link, done_ns, sent_bytes: 0.0, alive: true, frozen: false, host, have, out, into });
        self.at(SECOND, Event::Renew(member));
        self.carry();
        member
    }

    /// Adds a member later.
    pub(crate) fn join_at(&mut self, at_ns: u64, link: Link) {
        self.waited_for += 1;
        self.later.push((link, PeerLocation::default()));
        self.at(at_ns - self.now_ns, Event::Join(self.later.len() - 1));
    }

    pub(crate) fn kill_at(&mut self, at_ns: u64, member: u64) {
        self.at(at_ns - self.now_ns, Event::Kill(member));
    }

    pub(crate) fn freeze_at(&mut self, at_ns: u64, member: u64) {
        self.at(at_ns - self.now_ns, Event::Freeze(member));
    }

    fn at(&mut self, in_ns: u64, event: Event) {
        self.next += 1;
        self.events.push(Reverse((self.now_ns + in_ns, self.next, event)));
    }

    /// Sends the catalog's grants.
    fn carry(&mut self) {
        for Grant { client, order: FetchOrder { member, shard, source, .. } } in self.objects.poll_grants() {
            assert!(client > 0 && member != source);
            self.grants += 1;
            self.at(self.latency_ns, Event::Told(member, shard, source, self.grants));
        }
        if let Some(due_ns) = self.objects.due_ns()
            && self.ticking.is_none_or(|ticking| due_ns < ticking)
        {
            self.ticking = Some(due_ns);
            self.at(due_ns.saturating_sub(self.now_ns), Event::Tick);
        }
    }

    /// Runs until every member has the whole object, or until `most_ns`. Returns the time at which the last one was
    /// done.
    pub(crate) fn run(&mut self, most_ns: u64) -> Option<u64> {
        loop {
            if self.waited_for == 0 {
                return self.peers.values().filter_map(|peer| peer.done_ns).max();
            }
            let Reverse((at_ns, _, event)) = self.events.pop()?;
            if at_ns > most_ns {
                return None;
            }
            self.now_ns = at_ns;
            self.step(&event);
            self.carry();
        }
    }

    fn step(&mut self, event: &Event) {
        match *event {
            Event::Told(receiver, shard, source, number) => self.start(receiver, shard, source, number),
            Event::Arrived(number, version) => {
                if self.flows.get(&number).is_some_and(|flow| flow.version == version) {
                    self.finish(number, true);
                }
            }
            Event::Reported(member, shard, source, false) if self.rank_failed(member, shard, source) => {}
            Event::Reported(member, shard, source, good) => {
                let client = self.client_of(member);
                let corrupt = self.corrupt == Some(source);
                let failed = [FetchFailure { shard, source, corrupt }];
                let (got, failed): (&[_], &[_]) = if good { (&[(shard, 1)], &[]) } else { (&[], &failed) };
                // The catalog may have forgotten the member meanwhile.
                let _ = self.objects.report(self.now_ns, client, member, got, failed);
            }
            Event::Tick => {
                self.ticking = None;
                self.objects.tick(self.now_ns);
            }
            Event::Renew(member) => {
                if self.peers[&member].alive && !self.peers[&member].frozen {
                    let client = self.client_of(member);
                    self.objects.renew(self.now_ns, client);
                    self.at(SECOND, Event::Renew(member));
                }
            }
            Event::Kill(member) => {
                let peer = self.peers.get_mut(&member).expect("a peer");
                peer.alive = false;
                self.waited_for -= usize::from(peer.done_ns.is_none());
                let peer = &self.peers[&member];
                let touched: Vec<u64> = peer.out.iter().chain(&peer.into).copied().collect();
                touched.into_iter().for_each(|flow| self.finish(flow, false));
            }
            Event::Freeze(member) => self.freeze(member),
            Event::Follow(member, half) => self.follow(member, half),
            Event::Patience(member) => self.wait_on(member),
            Event::Join(index) => {
                self.waited_for -= 1;
                let (link, place) = self.later[index].clone();
                self.join(link, false, place);
            }
        }
    }

    fn freeze(&mut self, member: u64) {
        let peer = self.peers.get_mut(&member).expect("a peer");
        // Its flows stay, but make no progress.
        peer.link = Link { up: 1e-3, down: 1e-3 };
        self.waited_for -= usize::from(peer.done_ns.is_none());
        peer.done_ns = Some(self.now_ns);
        peer.frozen = true;
        let touched: Vec<u64> = peer.out.iter().chain(&peer.into).copied().collect();
        for number in touched {
            let (receiver, source) = (self.flows[&number].receiver, self.flows[&number].source);
            self.share(receiver, source);
        }
    }

    fn client_of(&self, member: u64) -> u64 {
        self.clients[&member]
    }

    fn start(&mut self, receiver: u64, shard: u32, source: u64, number: u64) {
        if !self.peers[&receiver].alive || self.peers[&receiver].frozen || self.peers[&receiver].have.contains(shard) {
            return;
        }
        // The previous fetch of the shard is aborted.
        if let Some(&before) = self.fetching.get(&(receiver, shard)) {
            self.remove(before);
        }
        if !self.peers[&source].alive {
            return self.at(self.latency_ns, Event::Reported(receiver, shard, source, false));
        }
        assert!(self.peers[&source].have.contains(shard), "source {source} lacks the granted shard {shard}");
        let left = self.spec.layout.place(shard).expect("a shard").bytes as f64;
        let at = self.now_ns as f64;
        self.fetching.insert((receiver, shard), number);
        self.flows.insert(number, Flow { receiver, source, shard, left, rate: 0.0, at, version: 0 });
        self.peers.get_mut(&source).expect("a peer").out.push(number);
        self.peers.get_mut(&receiver).expect("a peer").into.push(number);
        self.share(receiver, source);
    }

    fn remove(&mut self, number: u64) -> Option<Flow> {
        let mut flow = self.flows.remove(&number)?;
        self.fetching.remove(&(flow.receiver, flow.shard));
        flow.left -= flow.rate * (self.now_ns as f64 - flow.at);
        let bytes = self.spec.layout.place(flow.shard).expect("a shard").bytes as f64;
        let crosses = self.peers[&flow.source].host != self.peers[&flow.receiver].host;
        self.crossed += if crosses { bytes - flow.left.max(0.0) } else { 0.0 };
        let source = self.peers.get_mut(&flow.source).expect("a peer");
        source.out.retain(|&other| other != number);
        source.sent_bytes += bytes - flow.left.max(0.0);
        self.peers.get_mut(&flow.receiver).expect("a peer").into.retain(|&other| other != number);
        self.share(flow.receiver, flow.source);
        Some(flow)
    }

    fn finish(&mut self, number: u64, arrived: bool) {
        let Some(flow) = self.remove(number) else { return };
        let good = arrived && self.corrupt != Some(flow.source);
        let now_ns = self.now_ns;
        let receiver = self.peers.get_mut(&flow.receiver).expect("a peer");
        if !receiver.alive || receiver.frozen {
            return;
        }
        if good {
            receiver.have.insert(flow.shard);
            if receiver.have.count() == receiver.have.shards() {
                receiver.done_ns = Some(now_ns);
                self.waited_for -= 1;
            }
        }
        self.at(self.latency_ns, Event::Reported(flow.receiver, flow.shard, flow.source, good));
        if good {
            self.rank_arrived(flow.receiver, flow.shard);
        }
    }

    /// Computes the rates on both links again. A receiver's link is shared evenly; on a sender's, bandwidth that some
    /// flows cannot use goes to the others.
    fn share(&mut self, receiver: u64, source: u64) {
        let (to, from) = (&self.peers[&receiver], &self.peers[&source]);
        let touched = [&to.into, &to.out, &from.out, &from.into].into_iter().flatten();
        let mut sources: Vec<u64> = touched.map(|number| self.flows[number].source).collect();
        sources.sort_unstable();
        sources.dedup();
        for source in sources {
            let from = &self.peers[&source];
            let most = |number: &u64| {
                let to = &self.peers[&self.flows[number].receiver];
                (to.link.down / to.into.len() as f64, *number)
            };
            let mut flows: Vec<(f64, u64)> = from.out.iter().map(most).collect();
            flows.sort_unstable_by(|a, b| a.partial_cmp(b).expect("numbers"));
            let (mut left, mut others) = (from.link.up, flows.len());
            for (most, number) in flows {
                let rate = most.min(left / others as f64);
                (left, others) = (left - rate, others - 1);
                self.pace(number, rate / 1e9);
            }
        }
    }

    fn pace(&mut self, number: u64, rate: f64) {
        let now = self.now_ns as f64;
        let flow = self.flows.get_mut(&number).expect("a flow");
        if (rate - flow.rate).abs() <= rate * 1e-9 {
            return;
        }
        flow.left -= flow.rate * (now - flow.at);
        (flow.rate, flow.at) = (rate, now);
        flow.version += 1;
        let (takes, version) = ((flow.left.max(0.0) / rate).ceil() as u64, flow.version);
        self.at(takes, Event::Arrived(number, version));
    }
}
