//! SSDs of a node: configured on the command line, opened exclusively, and divided among the shards.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use kvplane_engine::{PART_LEAST_BYTES, Part, Ssd, TierIdentity, TierPolicy, TierSetup};
use kvplane_proto::Digest;
use kvplane_proto::ids::{NodeId, ShardId};
use kvplane_sys::random::random_u64;
use kvplane_transfer::{ParseBytesError, parse_bytes};

use crate::error::Error;
use crate::node::{NodeConfig, NodeConfigError};

/// Limits of the mean object length on an SSD. Shorter objects fill the footers before they fill the segments.
const OBJECT_BYTES: RangeInclusive<u32> = 512..=1 << 30;

/// File or block device that serves as SSD tier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SsdConfig {
    /// Path of the file or device.
    pub path: PathBuf,
    /// Bytes to use; `None` uses all of the existing file or device. A missing file is created with this size.
    pub bytes: Option<u64>,
}

/// Error of the text that names an SSD.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ParseSsdError {
    /// The part after the last colon is no size.
    Size(ParseBytesError),
    /// The path is empty, or the size is 0.
    NoSsd { text: String },
}

impl fmt::Display for ParseSsdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(error) => write!(f, "{error}"),
            Self::NoSsd { text } => write!(f, "{text:?} names no SSD: give PATH or PATH:SIZE"),
        }
    }
}

impl std::error::Error for ParseSsdError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Size(error) => Some(error),
            Self::NoSsd { .. } => None,
        }
    }
}

impl std::str::FromStr for SsdConfig {
    type Err = ParseSsdError;

    /// Parses `PATH` or `PATH:SIZE`. If the whole text is an existing path, it is taken as such, because Linux device
    /// paths contain colons.
    fn from_str(text: &str) -> Result<Self, ParseSsdError> {
        let (path, bytes) = match text.rsplit_once(':').filter(|_| std::fs::symlink_metadata(text).is_err()) {
            Some((path, size)) => (path, Some(parse_bytes(size).map_err(ParseSsdError::Size)?)),
            None => (text, None),
        };
        if path.is_empty() || bytes == Some(0) {
            return Err(ParseSsdError::NoSsd { text: text.to_owned() });
        }
        Ok(Self { path: path.into(), bytes })
    }
}

/// SSDs that the shards share.
pub(crate) struct Ssds {
    ssds: Vec<Arc<Ssd>>,
    object_bytes: u32,
    cluster: u128,
    node: NodeId,
    policy: TierPolicy,
}

impl Ssds {
    /// Opens all SSDs exclusively.
    pub(crate) fn open(of: &NodeConfig, shards: usize, cluster: &str, node: NodeId) -> Result<Self, Error> {
        let (configs, object_bytes) = (&of.ssds, of.ssd_object_bytes);
        if !OBJECT_BYTES.contains(&object_bytes) {
            let (least_bytes, most_bytes) = OBJECT_BYTES.into_inner();
            return Err(NodeConfigError::SsdObjectBytes { object_bytes, least_bytes, most_bytes }.into());
        }
        if configs.len() > shards {
            return Err(NodeConfigError::Ssds { ssds: configs.len(), shards }.into());
        }
        for (which, config) in configs.iter().enumerate() {
            // Checked before a useless file is created.
            let least_bytes = PART_LEAST_BYTES * parts(which, configs.len(), shards);
            if let Some(bytes) = config.bytes.filter(|bytes| *bytes < least_bytes) {
                return Err(NodeConfigError::SsdBytes { path: config.path.clone(), bytes, least_bytes }.into());
            }
        }
        let open = |config: &SsdConfig| Ssd::open(&config.path, config.bytes, of.ssd_io).map(Arc::new);
        let ssds: Result<_, _> = configs.iter().map(open).collect();
        let ssds = ssds.map_err(NodeConfigError::Ssd)?;
        let cluster = Digest::of(b"cluster", cluster.as_bytes()).0;
        Ok(Self { ssds, object_bytes, cluster, node, policy: of.tier })
    }

    /// Returns the policy of a shard: its part of the node's budgets.
    fn policy_of(&self, shards: u64) -> TierPolicy {
        let part = |bytes: u64| if bytes == 0 { 0 } else { (bytes / shards).max(1) };
        let TierPolicy { bytes_per_day, scrub_bytes_per_s, .. } = self.policy;
        TierPolicy { bytes_per_day: part(bytes_per_day), scrub_bytes_per_s: part(scrub_bytes_per_s), ..self.policy }
    }

    /// Returns the tier of one of `shards` shards: they take the SSDs in turn, and each SSD is divided into equal
    /// parts.
    pub(crate) fn tier_of(&self, shard: usize, shards: usize) -> Result<Option<TierSetup>, Error> {
        let count = self.ssds.len();
        if count == 0 {
            return Ok(None);
        }
        let (which, part) = (shard % count, shard / count);
        Ok(Some(TierSetup {
            part: Part::new(&self.ssds[which], part as u64, parts(which, count, shards)),
            policy: self.policy_of(shards as u64),
            object_bytes: self.object_bytes,
            identity: TierIdentity { cluster: self.cluster, node: self.node, shard: ShardId(shard as u16) },
            fresh_uuid: u128::from(random_u64()?) << 64 | u128::from(random_u64()?),
        }))
    }

    /// Returns the device of each shard; empty without SSDs.
    pub(crate) fn devices(&self, shards: usize) -> Vec<String> {
        let count = self.ssds.len();
        let shards = if count == 0 { 0 } else { shards };
        (0..shards).map(|shard| self.ssds[shard % count].path().display().to_string()).collect()
    }

    /// Returns notes on the SSDs, for logs.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.ssds.iter().flat_map(|ssd| ssd.remarks().iter().map(|remark| format!("ssd {remark}"))).collect()
    }
}

/// Returns the number of shards that share an SSD.
const fn parts(which: usize, count: usize, shards: usize) -> u64 {
    (shards - which).div_ceil(count) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssds_are_named_with_their_size_or_without() {
        let parse = |text: &str| text.parse::<SsdConfig>();
        assert_eq!(parse("/a/b:2G"), Ok(SsdConfig { path: "/a/b".into(), bytes: Some(2 << 30) }));
        assert_eq!(parse("/dev/nvme0n1"), Ok(SsdConfig { path: "/dev/nvme0n1".into(), bytes: None }));
        for wrong in ["", ":1G", "/a:0", "/a:x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        // A path in the form of Linux's drive names by PCI address.
        let there = std::env::temp_dir().join(format!("kvplane-{}-pci-0000:00:04.0-nvme:1", std::process::id()));
        std::fs::write(&there, b"").expect("a file");
        let found = parse(there.to_str().expect("text"));
        std::fs::remove_file(&there).expect("it is there");
        assert_eq!(found, Ok(SsdConfig { path: there, bytes: None }));
    }
}
