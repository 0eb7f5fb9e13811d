//! Starting from what is durable.
//!
//! Whatever was published before is what the control plane begins with: the same epoch, the same members. It knows
//! nothing of the recent past, so everyone gets a grace before silence counts, and nobody is suspect. Segments whose
//! owner's incarnation is over are dropped; ended incarnations beyond the limit are forgotten.

use core::fmt;
use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::{ClusterMap, MapError};

use crate::adoption::Adoption;
use crate::catalog::Catalog;
use crate::cluster::{Cluster, Evidence, Row};
use crate::config::{ClusterConfig, ConfigError};
use crate::message::{Change, Counters, Output};
use crate::record::{Header, Layout, MemberRecord, Record, RecordKey};
use crate::state::MemberState;
use crate::tenants::{MAX_TENANTS, Tenants};

/// Beyond this an epoch was not counted but corrupted; it leaves room to count on for ever.
pub(crate) const LAST_EPOCH: Epoch = Epoch(u64::MAX / 2);

/// Why a cluster does not start from the stored records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartError {
    /// The settings contradict each other.
    Config(ConfigError),
    /// The records are another cluster's.
    OtherCluster {
        /// Its name.
        stored: String,
        /// The name in the settings.
        configured: String,
    },
    /// There are records, but not the one that carries the epoch.
    NoHeader {
        /// How many records there are.
        records: usize,
    },
    /// More is stored than the settings allow: raise the limit.
    OverLimit {
        /// What.
        what: &'static str,
        /// How many are stored.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// The stored epoch is beyond what counting can have reached.
    Epoch {
        /// What is stored.
        found: Epoch,
    },
    /// The stored members make no valid map.
    Map(MapError),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => write!(f, "settings: {error}"),
            Self::OtherCluster { stored, configured } => write!(
                f,
                "the stored state is of cluster {stored:?}, not {configured:?}: use another state file or the \
                 stored name"
            ),
            Self::NoHeader { records } => {
                write!(f, "{records} records are stored but no header: the state is incomplete, restore a copy of it")
            }
            Self::OverLimit { what, found, limit } => {
                write!(f, "{found} {what} are stored, over the limit of {limit}: raise the limit")
            }
            Self::Epoch { found } => {
                write!(f, "epoch {found} is stored, which counting cannot have reached: restore a copy of the state")
            }
            Self::Map(error) => write!(f, "stored members: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl Cluster {
    /// Starts from the settings and all stored records, in any order (none for a new cluster).
    ///
    /// Members are kept where they stood, and silence counts only after `restart_grace_ns`. The first outputs are
    /// ready: the current map, and before it what became durable by starting.
    ///
    /// # Errors
    /// When settings contradict each other or the records do not fit them.
    pub fn new(
        config: ClusterConfig,
        restored: impl IntoIterator<Item = Record>,
        now_ns: u64,
    ) -> Result<Self, StartError> {
        config.validate().map_err(StartError::Config)?;
        let map = ClusterMap { epoch: Epoch(0), replicas: config.replicas, members: Vec::new(), former: None };
        let mut cluster = Self {
            rows: BTreeMap::new(),
            catalog: Catalog::default(),
            tenants: Tenants::default(),
            devices: BTreeMap::new(),
            adoption: None,
            counters: Counters::default(),
            now_ns,
            map,
            last_owners: Vec::new(),
            layout: Layout::default(),
            due_ns: None,
            share_waits: false,
            probe: None,
            settle_until_ns: now_ns,
            changes: Vec::new(),
            lost: Vec::new(),
            map_changed: false,
            outputs: VecDeque::new(),
            config,
        };
        cluster.restore(restored)?;
        if let Some(wait_ns) = cluster.config.adoption_wait_ns.filter(|_| cluster.map.epoch == Epoch(0)) {
            cluster.adoption = Some(Adoption::new(now_ns, now_ns.saturating_add(wait_ns)));
            cluster.rearm();
        }
        cluster.publish();
        if !matches!(cluster.outputs.back(), Some(Output::MapChanged(_))) {
            cluster.outputs.push_back(Output::MapChanged(cluster.map.clone()));
        }
        Ok(cluster)
    }

    fn restore(&mut self, restored: impl IntoIterator<Item = Record>) -> Result<(), StartError> {
        let records: BTreeMap<RecordKey, Record> = restored.into_iter().map(|record| (record.key(), record)).collect();
        let count = records.len();
        let mut header = None;
        let graced_ns = self.now_ns.saturating_add(self.config.restart_grace_ns);
        // Keys sort the header first and members before their segments.
        for record in records.into_values() {
            match record {
                Record::Header(found) => header = Some(found),
                Record::Member(record) => self.restore_member(record, graced_ns),
                Record::Segment(segment) if self.owner_is_live(segment.owner) => {
                    self.catalog.insert(segment, graced_ns);
                }
                Record::Layout(layout) => self.layout = layout,
                Record::Tenant(tenant) => {
                    self.tenants.by_name.insert(tenant.name.clone(), tenant);
                }
                Record::Devices(said) => {
                    self.devices.insert(said.node, said);
                }
                // The Conductor's host begins with these.
                Record::Conductor(_) => {}
                Record::Segment(segment) => self.changes.push(Change::Remove(RecordKey::Segment(segment.name))),
            }
        }
        match header {
            None if count > 0 => return Err(StartError::NoHeader { records: count }),
            None => self.changes.push(Change::Put(self.header())),
            Some(header) if header.cluster != self.config.cluster => {
                let configured = self.config.cluster.clone();
                return Err(StartError::OtherCluster { stored: header.cluster, configured });
            }
            Some(Header { epoch, .. }) if epoch > LAST_EPOCH => return Err(StartError::Epoch { found: epoch }),
            Some(header) => {
                (self.map.epoch, self.map.replicas) = (header.epoch, header.replicas);
                self.map_changed = header.replicas != self.config.replicas;
            }
        }
        let limits = self.config.limits;
        over_limit("live members", self.live_members(), limits.members)?;
        over_limit("segments", self.catalog.len(), limits.segments)?;
        over_limit("tenants", self.tenants.by_name.len(), MAX_TENANTS)?;
        self.forget_longest_ended();
        self.restore_shares();
        self.map.members = self.map_members();
        // Nothing remembered, or not of these members: what was before is not known.
        if !self.map_changed {
            self.note_layout(&[]);
        }
        self.map.validate().map_err(StartError::Map)?;
        self.rearm();
        Ok(())
    }

    fn restore_member(&mut self, record: MemberRecord, graced_ns: u64) {
        let MemberRecord { member, state, ended, capacity_bytes, version } = record;
        let state = if state == MemberState::Suspect { MemberState::Active } else { state };
        let row = Row {
            member,
            state,
            capacity_bytes,
            version,
            load: None,
            heard_ns: graced_ns,
            heard: false,
            joined_ns: self.now_ns,
            ended,
            shared: false,
            settled: None,
            newcomer: false,
            seen: Evidence::default(),
        };
        self.rows.insert(row.member.node, row);
    }
}

fn over_limit(what: &'static str, found: usize, limit: usize) -> Result<(), StartError> {
    if found > limit { Err(StartError::OverLimit { what, found, limit }) } else { Ok(()) }
}
