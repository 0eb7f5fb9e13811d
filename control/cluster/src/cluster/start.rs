//! Start of the cluster state machine from durable records.
//!
//! The control plane resumes with the epoch and the members that it published last. It knows nothing of the recent
//! past, so every member gets a grace before silence counts, and no member is suspect. Segments of ended incarnations
//! are dropped; ended incarnations beyond the limit are forgotten.

use core::fmt;
use std::collections::BTreeMap;

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::MapError;

use super::Cluster;
use crate::adoption::Adoption;
use crate::catalog::{Catalog, SegmentOwner};
use crate::config::{ClusterConfig, ConfigError};
use crate::membership::Membership;
use crate::message::{Counters, Output};
use crate::record::{Header, Record, RecordKey};
use crate::tenants::{MAX_TENANTS, Tenants};

/// Highest plausible epoch: a greater one is corrupt, not counted. It leaves enough room to count on indefinitely.
pub(super) const LAST_EPOCH: Epoch = Epoch(u64::MAX / 2);

/// Reason that a cluster does not start from the stored records.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum StartError {
    /// The settings contradict each other.
    Config(ConfigError),
    /// The records belong to another cluster.
    OtherCluster {
        /// Name of the cluster in the records.
        stored: String,
        /// Name of the cluster in the settings.
        configured: String,
    },
    /// The records lack the header, which carries the epoch.
    NoHeader {
        /// Number of stored records.
        records: usize,
    },
    /// The number of stored records exceeds a limit of the settings: raise the limit.
    OverLimit {
        what: &'static str,
        /// Number of stored records of this kind.
        found: usize,
        limit: usize,
    },
    /// The stored epoch is higher than counting can reach.
    Epoch {
        /// Stored epoch.
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
                write!(f, "{records} records are stored but no header: the state is incomplete, restore it from a copy")
            }
            Self::OverLimit { what, found, limit } => {
                write!(f, "{found} {what} are stored, over the limit of {limit}: raise the limit")
            }
            Self::Epoch { found } => {
                write!(f, "stored epoch {found} is corrupt, no cluster counts so high: restore the state from a copy")
            }
            Self::Map(error) => write!(f, "stored members: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl Cluster {
    /// Starts from the settings and all stored records, in any order (none for a new cluster).
    ///
    /// Members keep their states, and silence counts only after `restart_grace_ns`. The first outputs are ready: the
    /// current map, and before it the records that starting made durable.
    ///
    /// # Errors
    /// When settings contradict each other or the records exceed them.
    pub fn new(
        config: ClusterConfig,
        restored: impl IntoIterator<Item = Record>,
        now_ns: u64,
    ) -> Result<Self, StartError> {
        config.validate().map_err(StartError::Config)?;
        let mut cluster = Self {
            membership: Membership::new(config, now_ns),
            catalog: Catalog::default(),
            tenants: Tenants::default(),
            adoption: None,
            counters: Counters::default(),
            now_ns,
        };
        cluster.restore(restored)?;
        let epoch = cluster.map().epoch;
        if let Some(wait_ns) = cluster.config().adoption_wait_ns.filter(|_| epoch == Epoch(0)) {
            cluster.adoption = Some(Adoption::new(now_ns, now_ns.saturating_add(wait_ns)));
            cluster.rearm();
        }
        cluster.membership.publish();
        let map = cluster.map().clone();
        let effects = cluster.membership.effects();
        if !matches!(effects.outputs().back(), Some(Output::MapChanged(_))) {
            effects.emit(Output::MapChanged(map));
        }
        Ok(cluster)
    }

    fn restore(&mut self, restored: impl IntoIterator<Item = Record>) -> Result<(), StartError> {
        let records: BTreeMap<RecordKey, Record> = restored.into_iter().map(|record| (record.key(), record)).collect();
        let count = records.len();
        let mut header = None;
        let graced_ns = self.now_ns.saturating_add(self.config().restart_grace_ns);
        // Keys sort the header first and members before their segments.
        for record in records.into_values() {
            match record {
                Record::Header(found) => header = Some(found),
                Record::Segment(segment) if self.owner_is_live(segment.owner) => {
                    self.catalog.insert(segment, graced_ns);
                }
                Record::Segment(segment) => self.membership.effects().remove(RecordKey::Segment(segment.name)),
                Record::Tenant(tenant) => self.tenants.insert(tenant),
                Record::TenantSsd(name, ssd) => self.tenants.insert_ssd(name, ssd),
                // Their hosts restore these.
                Record::Conductor(_) | Record::World(_) => {}
                record => self.membership.restore(record, graced_ns),
            }
        }
        match &header {
            None if count > 0 => return Err(StartError::NoHeader { records: count }),
            Some(Header { cluster, .. }) if *cluster != self.config().cluster => {
                let configured = self.config().cluster.clone();
                return Err(StartError::OtherCluster { stored: cluster.clone(), configured });
            }
            Some(Header { epoch, .. }) if *epoch > LAST_EPOCH => return Err(StartError::Epoch { found: *epoch }),
            _ => {}
        }
        let limits = self.config().limits;
        over_limit("live members", self.membership.members().live_count(), limits.members)?;
        over_limit("segments", self.catalog.len(), limits.segments)?;
        over_limit("tenants", self.tenants.len(), MAX_TENANTS)?;
        self.membership.resume(header.as_ref()).map_err(StartError::Map)?;
        self.rearm();
        Ok(())
    }

    fn owner_is_live(&self, owner: SegmentOwner) -> bool {
        match owner {
            SegmentOwner::Client { .. } => true,
            SegmentOwner::Node { node, incarnation } => self.membership.members().is_live(node, incarnation),
        }
    }
}

fn over_limit(what: &'static str, found: usize, limit: usize) -> Result<(), StartError> {
    if found > limit { Err(StartError::OverLimit { what, found, limit }) } else { Ok(()) }
}
