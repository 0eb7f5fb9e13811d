//! Settings of a cluster: defaults, limits, and checks that the settings fit together.

use core::fmt;

use kvplane_proto::map::{MAX_MEMBERS, MAX_REPLICAS};

use crate::record::MAX_CLUSTER_NAME_BYTES;

/// Limits of everything that the control plane remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Members that are joining, active or suspect.
    pub members: usize,
    /// Ended incarnations that are remembered, so that their late messages are recognised as stale. The one that ended
    /// first is forgotten first.
    pub ended_incarnations: usize,
    /// Segments of all owners.
    pub segments: usize,
    /// Segments of one owner.
    pub segments_per_owner: usize,
    /// Maximum time to live of a client's segment after a heartbeat of that client.
    pub segment_ttl_ns: u64,
}

/// Settings of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ClusterConfig {
    /// Name of the cluster; the stored state of another cluster is rejected.
    pub cluster: String,
    /// Replicas of each slot.
    pub replicas: u8,
    /// Interval of members' heartbeats.
    pub heartbeat_interval_ns: u64,
    /// Silence after which a member is dead whose ports do not answer, or that clients report to be silent, where slots
    /// have replica owners.
    pub unanswered_after_ns: u64,
    /// Silence after which a member is suspect.
    pub suspect_after_ns: u64,
    /// Silence after which a member is dead.
    pub heartbeat_deadline_ns: u64,
    /// Grace after a restart of the control plane: time for members to reconnect, before silence counts.
    pub restart_grace_ns: u64,
    /// Time for members to offer their maps to a control plane whose state has no map, before nodes may join, in case
    /// the state was lost. None treats every such state as a new cluster's.
    pub adoption_wait_ns: Option<u64>,
    /// Maximum delay of a deferrable change of owners, which waits until the migrations of the previous change are
    /// complete.
    pub settle_most_ns: u64,
    pub limits: Limits,
}

const SECOND_NS: u64 = 1_000_000_000;

const DEFAULT_INTERVAL_NS: u64 = SECOND_NS / 2;
const DEFAULT_UNANSWERED_NS: u64 = SECOND_NS;
const DEFAULT_SUSPECT_NS: u64 = 3 * SECOND_NS;
const DEFAULT_DEADLINE_NS: u64 = 6 * SECOND_NS;
const DEFAULT_GRACE_NS: u64 = 10 * SECOND_NS;
// Time to migrate 300 GiB to one node at the default rate of background migration.
const DEFAULT_SETTLE_NS: u64 = 300 * SECOND_NS;
const DEFAULT_LIMITS: Limits = Limits {
    members: MAX_MEMBERS,
    ended_incarnations: 4096,
    segments: 16_384,
    segments_per_owner: 1024,
    segment_ttl_ns: 3600 * SECOND_NS,
};

// One lost heartbeat makes no member suspect, two lost ones alone expel none, and a suspect has time to prove that it
// is alive.
const _: () = assert!(DEFAULT_SUSPECT_NS >= 2 * DEFAULT_INTERVAL_NS);
const _: () = assert!(DEFAULT_DEADLINE_NS >= 3 * DEFAULT_INTERVAL_NS);
const _: () = assert!(DEFAULT_DEADLINE_NS > DEFAULT_SUSPECT_NS);
const _: () = assert!(DEFAULT_GRACE_NS >= DEFAULT_INTERVAL_NS);
const _: () = assert!(DEFAULT_LIMITS.members <= MAX_MEMBERS);
const _: () = assert!(DEFAULT_LIMITS.segments_per_owner <= DEFAULT_LIMITS.segments);

impl ClusterConfig {
    /// Returns the defaults for a cluster of this name: one replica per slot, a heartbeat every half second, dead after
    /// 1 s of silence if its ports do not answer either, suspect after 3 s of silence, dead after 6 s, 10 s of grace
    /// after a restart, at most 5 minutes of waiting for migrations.
    #[must_use]
    pub fn new(cluster: &str) -> Self {
        Self {
            cluster: cluster.to_owned(),
            replicas: 1,
            heartbeat_interval_ns: DEFAULT_INTERVAL_NS,
            unanswered_after_ns: DEFAULT_UNANSWERED_NS,
            suspect_after_ns: DEFAULT_SUSPECT_NS,
            heartbeat_deadline_ns: DEFAULT_DEADLINE_NS,
            restart_grace_ns: DEFAULT_GRACE_NS,
            adoption_wait_ns: None,
            settle_most_ns: DEFAULT_SETTLE_NS,
            limits: DEFAULT_LIMITS,
        }
    }

    /// Checks that the settings are in range and fit together.
    ///
    /// # Errors
    /// The first contradiction, with its numbers.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let range = |what, found: u64, least: u64, most: u64| {
            if found < least || found > most {
                return Err(ConfigError { what, found, least, most });
            }
            Ok(())
        };
        let interval = self.heartbeat_interval_ns;
        let limits = &self.limits;
        range("bytes of the cluster's name", self.cluster.len() as u64, 1, MAX_CLUSTER_NAME_BYTES as u64)?;
        range("replicas", self.replicas.into(), 1, MAX_REPLICAS.into())?;
        range("heartbeat_interval_ns", interval, 1, u64::MAX / 8)?;
        range("suspect_after_ns", self.suspect_after_ns, 2 * interval, u64::MAX / 4)?;
        range("unanswered_after_ns", self.unanswered_after_ns, interval + interval / 2, self.heartbeat_deadline_ns)?;
        let least = (3 * interval).max(self.suspect_after_ns + 1);
        range("heartbeat_deadline_ns", self.heartbeat_deadline_ns, least, u64::MAX / 2)?;
        range("restart_grace_ns", self.restart_grace_ns, interval, u64::MAX / 2)?;
        range("adoption_wait_ns", self.adoption_wait_ns.unwrap_or(0), 0, u64::MAX / 2)?;
        range("settle_most_ns", self.settle_most_ns, 0, u64::MAX / 2)?;
        range("limits.members", limits.members as u64, 1, MAX_MEMBERS as u64)?;
        range("limits.ended_incarnations", limits.ended_incarnations as u64, 1, 1 << 20)?;
        range("limits.segments", limits.segments as u64, 1, 1 << 20)?;
        range("limits.segments_per_owner", limits.segments_per_owner as u64, 1, limits.segments as u64)?;
        range("limits.segment_ttl_ns", limits.segment_ttl_ns, interval, u64::MAX / 2)
    }
}

/// Setting that is outside the range that the other settings leave.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ConfigError {
    /// Name of the setting.
    pub what: &'static str,
    pub found: u64,
    pub least: u64,
    pub most: u64,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, found, least, most } = self;
        write!(f, "{what} is {found}; with the other settings it must be {least} to {most}")
    }
}

impl std::error::Error for ConfigError {}
