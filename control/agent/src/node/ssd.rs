//! SSDs under a node's shards: named on the command line, claimed once, and shared out among the shards.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use kvplane_engine::{PART_LEAST_BYTES, Part, Ssd, TierIdentity, TierPolicy, TierSetup};
use kvplane_proto::Digest;
use kvplane_proto::ids::{NodeId, ShardId};
use kvplane_sys::random::random_u64;
use kvplane_transfer::parse_bytes;

use crate::error::Error;
use crate::node::NodeConfig;

/// How long objects on an SSD may be on average. Shorter ones fill the footers before they fill the segments.
const OBJECT_BYTES: RangeInclusive<u32> = 512..=1 << 30;

/// A file or block device for objects that memory has no room for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SsdConfig {
    /// Where it is.
    pub path: PathBuf,
    /// How much of it is used: all of what is there, if not said. A file that is not there is made with this size.
    pub bytes: Option<u64>,
}

impl std::str::FromStr for SsdConfig {
    type Err = String;

    /// `PATH` or `PATH:SIZE`. What exists under the whole text is a path: those by which Linux names devices have
    /// colons.
    fn from_str(text: &str) -> Result<Self, String> {
        let (path, bytes) = match text.rsplit_once(':').filter(|_| std::fs::symlink_metadata(text).is_err()) {
            Some((path, size)) => (path, Some(parse_bytes(size)?)),
            None => (text, None),
        };
        if path.is_empty() || bytes == Some(0) {
            return Err(format!("{text:?} names no SSD: give PATH or PATH:SIZE"));
        }
        Ok(Self { path: path.into(), bytes })
    }
}

/// What the shards share.
pub(crate) struct Ssds {
    ssds: Vec<Arc<Ssd>>,
    object_bytes: u32,
    cluster: u128,
    node: NodeId,
    policy: TierPolicy,
}

impl Ssds {
    /// Takes all of them for this process.
    pub(crate) fn open(of: &NodeConfig, shards: usize, cluster: &str, node: NodeId) -> Result<Self, Error> {
        let (configs, object_bytes) = (&of.ssds, of.ssd_object_bytes);
        if !OBJECT_BYTES.contains(&object_bytes) {
            let (least, most) = (OBJECT_BYTES.start(), OBJECT_BYTES.end());
            let text = format!("objects of {object_bytes} bytes on an SSD: give a mean length from {least} to {most}");
            return Err(Error::Argument(text));
        }
        if configs.len() > shards {
            let text = format!("{} SSDs for {shards} shards: name at most one for each shard", configs.len());
            return Err(Error::Argument(text));
        }
        for (which, config) in configs.iter().enumerate() {
            // Before a file is made that would be of no use.
            let least = PART_LEAST_BYTES * parts(which, configs.len(), shards);
            if let Some(bytes) = config.bytes.filter(|bytes| *bytes < least) {
                let path = config.path.display();
                return Err(Error::Argument(format!("{path}: {bytes} bytes are fewer than the {least} that it takes")));
            }
        }
        let open = |config: &SsdConfig| Ssd::open(&config.path, config.bytes, of.ssd_io).map(Arc::new);
        let ssds: Result<_, _> = configs.iter().map(open).collect();
        let ssds = ssds.map_err(|error| Error::Argument(error.to_string()))?;
        let cluster = Digest::of(b"cluster", cluster.as_bytes()).0;
        Ok(Self { ssds, object_bytes, cluster, node, policy: of.tier })
    }

    /// A shard's part of what the node may do.
    fn policy_of(&self, shards: u64) -> TierPolicy {
        let part = |bytes: u64| if bytes == 0 { 0 } else { (bytes / shards).max(1) };
        let TierPolicy { bytes_per_day, scrub_bytes_per_s, .. } = self.policy;
        TierPolicy { bytes_per_day: part(bytes_per_day), scrub_bytes_per_s: part(scrub_bytes_per_s), ..self.policy }
    }

    /// The tier of one of `shards` shards: they take the SSDs in turn, and each SSD is cut into equal parts.
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

    /// The device of each shard; none without SSDs.
    pub(crate) fn devices(&self, shards: usize) -> Vec<String> {
        let count = self.ssds.len();
        let shards = if count == 0 { 0 } else { shards };
        (0..shards).map(|shard| self.ssds[shard % count].path().display().to_string()).collect()
    }

    /// How they are used, for logs.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.ssds.iter().flat_map(|ssd| ssd.remarks().iter().map(|remark| format!("ssd {remark}"))).collect()
    }
}

/// How many shards share an SSD.
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
        // As Linux names drives by where they are.
        let there = std::env::temp_dir().join(format!("kvplane-{}-pci-0000:00:04.0-nvme:1", std::process::id()));
        std::fs::write(&there, b"").expect("a file");
        let found = parse(there.to_str().expect("text"));
        std::fs::remove_file(&there).expect("it is there");
        assert_eq!(found, Ok(SsdConfig { path: there, bytes: None }));
    }
}
