//! Driver that obeys the contract: it stores records as bytes, publishes maps after them, and can be killed and
//! restarted from the bytes. It checks the contract on every call.

#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::BTreeMap;
use std::net::SocketAddr;

use kvplane_cluster::{
    Change, Cluster, ClusterConfig, Input, Load, MemberState, MemberView, Output, Record, Rejection, Reply, Segment,
    SegmentKind, SegmentOwner,
};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress};

/// A millisecond, the unit of these tests.
pub(crate) const MS: u64 = 1_000_000;

pub(crate) struct Driver {
    pub(crate) cluster: Cluster,
    pub(crate) store: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) published: ClusterMap,
    pub(crate) lost: Vec<(u64, u64)>,
    /// Identity of the adopted state, if the control plane lost its own.
    pub(crate) adopted: Option<u64>,
    pub(crate) now_ns: u64,
}

pub(crate) fn config() -> ClusterConfig {
    let mut config = ClusterConfig::new("test");
    config.heartbeat_interval_ns = 100 * MS;
    config.unanswered_after_ns = 200 * MS;
    config.suspect_after_ns = 300 * MS;
    config.heartbeat_deadline_ns = 600 * MS;
    config.restart_grace_ns = 1000 * MS;
    config.limits.segment_ttl_ns = 5000 * MS;
    config
}

pub(crate) fn records(store: &BTreeMap<Vec<u8>, Vec<u8>>) -> Vec<Record> {
    store.values().map(|bytes| Record::decode(bytes).expect("records round trip")).collect()
}

impl Driver {
    pub(crate) fn new(config: ClusterConfig) -> Self {
        Self::start(config, BTreeMap::new(), 0)
    }

    pub(crate) fn start(config: ClusterConfig, store: BTreeMap<Vec<u8>, Vec<u8>>, now_ns: u64) -> Self {
        let cluster = Cluster::new(config, records(&store), now_ns).expect("the store and the settings fit");
        let published = cluster.map().clone();
        let mut driver = Self { cluster, store, published, lost: Vec::new(), adopted: None, now_ns };
        let first: Vec<Output> = std::iter::from_fn(|| driver.cluster.poll_output()).collect();
        assert!(matches!(first.last(), Some(Output::MapChanged(map)) if map == driver.cluster.map()));
        for output in first {
            if let Output::Persist(changes) = output {
                driver.persist(&changes);
            }
        }
        driver.check_store();
        driver
    }

    /// Kills the control plane and restarts it at the same time, from the bytes in the store.
    pub(crate) fn restart(self) -> Self {
        let Self { cluster, store, lost, now_ns, .. } = self;
        Self { lost, ..Self::start(cluster.config().clone(), store, now_ns) }
    }

    pub(crate) fn handle(&mut self, input: Input) -> Result<Reply, Rejection> {
        let reply = self.cluster.handle(input, self.now_ns);
        let mut epochs = 0;
        while let Some(output) = self.cluster.poll_output() {
            match output {
                Output::Persist(changes) => self.persist(&changes),
                Output::Adopt { state, changes } => {
                    self.persist(&changes);
                    self.adopted = Some(state);
                    // The control plane continues from the offered epoch, and not from one of its own.
                    self.published.epoch = Epoch(self.cluster.map().epoch.0 - 1);
                }
                Output::BeganEmpty => assert_eq!(self.published.epoch, Epoch(0), "it has a map"),
                Output::MemberLost { node, incarnation } => self.lost.push((node.0, incarnation.0)),
                Output::MapChanged(map) => {
                    epochs += 1;
                    assert_eq!(map.epoch.0, self.published.epoch.0 + 1, "epochs grow by one");
                    let waits = |view: MemberView<'_>| {
                        let wants = view.state != MemberState::Draining && view.member.weight > 0;
                        view.state.in_map() && view.shared != wants
                    };
                    let probes = self.cluster.members().any(waits);
                    assert!(probes || map.members != self.published.members, "an epoch needs a change");
                    assert_eq!(map.validate(), Ok(()));
                    let durable = Cluster::new(self.cluster.config().clone(), records(&self.store), 0).unwrap();
                    assert_eq!(durable.map(), &map, "a map is durable before it is published");
                    self.published = map;
                }
            }
        }
        assert!(epochs <= 1, "one call made {epochs} epochs");
        self.check_store();
        reply
    }

    fn persist(&mut self, changes: &[Change]) {
        // Applied twice: changes are idempotent.
        for change in changes.iter().chain(changes) {
            match change {
                Change::Put(record) => {
                    let mut bytes = Vec::new();
                    record.encode(&mut bytes);
                    self.store.insert(record.key().to_bytes(), bytes);
                }
                Change::Remove(key) => {
                    self.store.remove(&key.to_bytes());
                }
            }
        }
    }

    fn check_store(&self) {
        assert_eq!(records(&self.store), self.cluster.snapshot(), "the store holds the whole state");
    }

    /// Advances time as a punctual driver does.
    pub(crate) fn sleep(&mut self, ns: u64) {
        let until_ns = self.now_ns.saturating_add(ns);
        while let Some(due_ns) = self.cluster.poll_timeout().filter(|&due_ns| due_ns <= until_ns) {
            self.now_ns = self.now_ns.max(due_ns);
            self.handle(Input::Tick).unwrap();
        }
        self.now_ns = until_ns;
    }

    pub(crate) fn join(&mut self, member: Member) -> Result<Reply, Rejection> {
        self.handle(Input::Join { member, capacity_bytes: 1 << 30, version: "0.1.0".to_owned() })
    }

    pub(crate) fn beat(&mut self, node: u64, incarnation: u64) -> Result<Reply, Rejection> {
        let load = Load { objects: 1, used_bytes: 2, capacity_bytes: 3 };
        self.handle(Input::Heartbeat { node: NodeId(node), incarnation: Incarnation(incarnation), load })
    }

    /// Joins a node and makes it active.
    pub(crate) fn admit(&mut self, node: u64, incarnation: u64) {
        self.join(member(node, incarnation, 7000)).unwrap();
        self.beat(node, incarnation).unwrap();
    }

    pub(crate) fn state(&self, node: u64) -> Option<MemberState> {
        self.cluster.members().find(|view| view.member.node.0 == node).map(|view| view.state)
    }

    pub(crate) fn in_map(&self) -> Vec<(u64, u64)> {
        self.published.members.iter().map(|member| (member.node.0, member.incarnation.0)).collect()
    }
}

pub(crate) fn member(node: u64, incarnation: u64, port: u16) -> Member {
    Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        weight: 10,
        failure_domain: format!("rack-{}", node % 3),
        host: "boot-1".to_owned(),
        shards: vec![ShardAddress { tcp: SocketAddr::from(([192, 0, 2, node as u8], port)), shm: None }],
    }
}

pub(crate) fn segment(name: &str, owner: SegmentOwner, ttl_ns: u64) -> Segment {
    let address = SocketAddr::from(([192, 0, 2, 9], 9000));
    Segment { name: name.to_owned(), owner, kind: SegmentKind::Dram, bytes: 4096, address, ttl_ns }
}

pub(crate) fn owned_by(node: u64, incarnation: u64) -> SegmentOwner {
    SegmentOwner::Node { node: NodeId(node), incarnation: Incarnation(incarnation) }
}
