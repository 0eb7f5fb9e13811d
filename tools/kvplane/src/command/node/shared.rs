//! Flags of the shared tier of a node.

use std::time::Duration;

use clap::{Args, ValueEnum};
use kvplane::{SharedTierConfig, StorePlace, UploadPolicy};

use crate::command::size;

/// Settings of the shared tier.
#[derive(Args, Clone)]
pub(crate) struct SharedArguments {
    /// Store that all nodes of the cluster share, below memory and SSDs: a directory of a parallel or network file
    /// system, s3://BUCKET or s3://BUCKET/PREFIX. Credentials, region and endpoint of S3 come from the environment:
    /// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT and others. Default: none.
    #[arg(long = "shared-tier", value_name = "PLACE")]
    place: Option<StorePlace>,
    /// Objects that are uploaded to the shared tier.
    #[arg(long = "shared-upload", value_enum, default_value = "read", requires = "place")]
    upload: UploadChoice,
    /// Length at which a pack, one object of the store with many objects of the cluster, is written. Objects longer
    /// than half of it are not uploaded. Each shard needs up to three times as much memory.
    #[arg(
        long = "shared-pack",
        value_name = "BYTES",
        requires = "place",
        default_value = "16M",
        value_parser = size::parse
    )]
    pack: u64,
    /// Longest time that an object waits for a pack to fill, in milliseconds.
    #[arg(
        long = "shared-flush-ms",
        requires = "place",
        value_name = "MS",
        default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(1..=3_600_000)
    )]
    flush_ms: u64,
    /// Most bytes that the packs of this node may take, with those of its former incarnations; beyond it the oldest
    /// packs are deleted. At least --shared-pack for each shard. 0: no limit.
    #[arg(
        long = "shared-bytes",
        value_name = "BYTES",
        requires = "place",
        default_value = "0",
        value_parser = size::parse
    )]
    bytes: u64,
    /// Lifetime of packs, in hours. 0: no limit, and what nodes leave behind that never come back is not deleted.
    #[arg(long = "shared-lifetime", value_name = "HOURS", requires = "place", default_value_t = 168)]
    lifetime: u32,
    /// Most objects that this node finds in the shared tier, at some 150 bytes of memory each.
    #[arg(
        long = "shared-objects",
        requires = "place",
        value_name = "OBJECTS",
        default_value_t = 1 << 20,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    objects: u64,
}

/// Objects that are uploaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum UploadChoice {
    /// Objects that were read lately.
    Read,
    /// All objects, at their put.
    All,
}

impl SharedArguments {
    /// Returns the settings, if a place is given.
    pub(crate) fn config(&self) -> Option<SharedTierConfig> {
        Some(SharedTierConfig {
            upload: match self.upload {
                UploadChoice::Read => UploadPolicy::Read { times: 1 },
                UploadChoice::All => UploadPolicy::All,
            },
            pack_bytes: self.pack,
            flush: Duration::from_millis(self.flush_ms),
            most_bytes: self.bytes,
            lifetime: Duration::from_secs(u64::from(self.lifetime) * 3600),
            most_objects: self.objects,
            ..SharedTierConfig::at(self.place.clone()?)
        })
    }
}
