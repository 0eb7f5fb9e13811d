//! Description of an object: buffers that are cut into shards, a hash for each shard, and opaque metadata.

use std::fmt;

use kvplane_proto::digest::ContentHash;

/// Maximum number of shards of an object: one of 1 TB has 16,384 of 64 MiB.
pub const MAX_SHARDS: u32 = 32_768;
/// Maximum number of buffers of an object.
pub const MAX_BUFFERS: usize = 16_384;
/// Maximum length of a name, in bytes. Names are text; slashes have no meaning.
pub const MAX_NAME_BYTES: usize = 4096;
/// Maximum size of an object's metadata, in bytes.
pub const MAX_ABOUT_BYTES: usize = 128 << 10;

/// Minimum number of shards of a large enough object, with the default shard size: a receiver forwards shard by shard,
/// so that few shards mean a shallow pipeline.
const FITTING_SHARDS: u64 = 256;
/// Minimum of the default shard size: each shard costs a grant and a wake-up, however short it is.
const FITTING_LEAST_BYTES: u64 = 64 << 10;
/// Maximum of the default shard size, unless there would be too many shards.
const FITTING_MOST_BYTES: u64 = 64 << 20;

/// Location of a shard within its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPlace {
    /// Index of the buffer.
    pub buffer: usize,
    /// Offset in the buffer, in bytes.
    pub offset: u64,
    /// Length in bytes: that of all shards, except for the last one of a buffer.
    pub bytes: u64,
}

/// Layout of an object: its buffers and how they are cut into shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    sizes: Vec<u64>,
    shard_bytes: u64,
    /// By buffer: its first shard. The last element is the number of shards.
    starts: Vec<u32>,
}

impl Layout {
    /// Creates the layout of buffers of these sizes, each cut into shards of `shard_bytes`; an empty buffer has no
    /// shards.
    ///
    /// # Errors
    /// When there are too many buffers or shards, or more than 2^64 bytes; the error says what to change.
    pub fn new(sizes: Vec<u64>, shard_bytes: u64) -> Result<Self, ObjectError> {
        if shard_bytes == 0 {
            return Err(ObjectError::Malformed("shards of 0 bytes: specify at least 1, preferably 64 MiB".to_owned()));
        }
        if sizes.len() > MAX_BUFFERS {
            let text = format!("{} buffers: an object has at most {MAX_BUFFERS}", sizes.len());
            return Err(ObjectError::Malformed(text));
        }
        let (mut starts, mut shards, mut total) = (Vec::with_capacity(sizes.len() + 1), 0u64, 0u64);
        for &bytes in &sizes {
            starts.push(shards as u32);
            shards += bytes.div_ceil(shard_bytes);
            total = total.checked_add(bytes).ok_or_else(|| {
                ObjectError::Malformed("the sizes of the buffers are more than 2^64 bytes together".to_owned())
            })?;
            if shards > u64::from(MAX_SHARDS) {
                let text = format!(
                    "more than {MAX_SHARDS} shards of {shard_bytes} bytes in {} buffers: make the shards larger",
                    sizes.len()
                );
                return Err(ObjectError::Malformed(text));
            }
        }
        starts.push(shards as u32);
        Ok(Self { sizes, shard_bytes, starts })
    }

    /// Returns the default shard size for buffers of these sizes, in bytes: a power of two that makes 256 to 511
    /// shards, from 64 KiB to 64 MiB; more if there would be too many shards.
    #[must_use]
    pub fn fitting_shard_bytes(sizes: &[u64]) -> u64 {
        let total = sizes.iter().fold(0, |total: u64, bytes| total.saturating_add(*bytes));
        let wanted = (total / FITTING_SHARDS).clamp(FITTING_LEAST_BYTES, FITTING_MOST_BYTES);
        let mut bytes = 1 << wanted.ilog2();
        let shards_of = |bytes: u64| sizes.iter().fold(0, |all: u64, size| all.saturating_add(size.div_ceil(bytes)));
        while shards_of(bytes) > u64::from(MAX_SHARDS) && bytes < 1 << 63 {
            bytes *= 2;
        }
        bytes
    }

    /// Returns the sizes of the buffers, in bytes.
    #[must_use]
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// Returns the length of a shard, in bytes.
    #[must_use]
    pub const fn shard_bytes(&self) -> u64 {
        self.shard_bytes
    }

    /// Returns the number of shards.
    #[must_use]
    pub fn shards(&self) -> u32 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns the size of the object in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// Returns the location of a shard; `None` if there is no such shard.
    #[must_use]
    pub fn place(&self, shard: u32) -> Option<ShardPlace> {
        if shard >= self.shards() {
            return None;
        }
        // Several buffers may begin at the same shard: all but the last of them are empty.
        let buffer = self.starts.partition_point(|&start| start <= shard) - 1;
        let offset = u64::from(shard - self.starts[buffer]) * self.shard_bytes;
        Some(ShardPlace { buffer, offset, bytes: self.shard_bytes.min(self.sizes[buffer] - offset) })
    }

    /// Returns the shards that cover a range of a buffer: the first, and their number; `None` if the range exceeds the
    /// buffer.
    #[must_use]
    pub fn covering(&self, buffer: usize, offset: u64, bytes: u64) -> Option<(u32, u32)> {
        let size = *self.sizes.get(buffer)?;
        let end = offset.checked_add(bytes).filter(|&end| end <= size)?;
        if bytes == 0 {
            return Some((self.starts[buffer], 0));
        }
        let (first, last) = (offset / self.shard_bytes, (end - 1) / self.shard_bytes);
        Some((self.starts[buffer] + first as u32, (last - first + 1) as u32))
    }
}

/// Description of an object without its bytes; the same for all holders of a name and version.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectSpec {
    pub layout: Layout,
    /// By shard: the hash of its bytes.
    pub hashes: Vec<u128>,
    /// Metadata of its users, such as file names.
    pub about: Vec<u8>,
}

impl ObjectSpec {
    /// # Errors
    /// When the number of hashes differs from that of shards, or the metadata is too long.
    pub fn check(&self) -> Result<(), ObjectError> {
        let (shards, hashes) = (self.layout.shards(), self.hashes.len());
        if hashes != shards as usize {
            return Err(ObjectError::Malformed(format!("{hashes} hashes for {shards} shards")));
        }
        if self.about.len() > MAX_ABOUT_BYTES {
            let text = format!("{} bytes of metadata: an object has at most {MAX_ABOUT_BYTES}", self.about.len());
            return Err(ObjectError::Malformed(text));
        }
        Ok(())
    }

    /// Returns a digest that two objects share only if they are equal.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let mut hash = ContentHash::default();
        for word in [self.layout.shard_bytes, self.layout.sizes.len() as u64, self.hashes.len() as u64] {
            hash.update(&word.to_le_bytes());
        }
        self.layout.sizes.iter().for_each(|bytes| hash.update(&bytes.to_le_bytes()));
        self.hashes.iter().for_each(|one| hash.update(&one.to_le_bytes()));
        hash.update(&self.about);
        hash.finish()
    }
}

/// Error of the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ObjectError {
    /// The request is malformed; the text says how to correct it.
    Malformed(String),
    /// No member has an object of that name, or of that version.
    NotFound {
        name: String,
        /// Requested version; none for the newest.
        version: Option<u64>,
    },
    /// The object exists with other contents: publish another version.
    Differs { name: String, version: u64 },
    /// The member is not known, or not any more: it must announce itself again.
    UnknownMember { member: u64 },
    /// A limit is reached.
    Limit {
        /// Limited items.
        what: &'static str,
        /// Value of the limit.
        most: usize,
    },
}

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(what) => f.write_str(what),
            Self::NotFound { name, version: Some(version) } => {
                write!(f, "no member has version {version} of object {:?}", shortened(name))
            }
            Self::NotFound { name, version: None } => write!(f, "no member has an object {:?}", shortened(name)),
            Self::Differs { name, version } => write!(
                f,
                "version {version} of object {:?} exists with other sizes or hashes, and objects are immutable: \
                 register another version",
                shortened(name)
            ),
            Self::UnknownMember { member } => write!(f, "replica {member} is not known: announce it again"),
            Self::Limit { what, most } => write!(f, "there are {most} {what} already, which is the limit"),
        }
    }
}

impl std::error::Error for ObjectError {}

/// Shortens a name for an error text.
fn shortened(name: &str) -> String {
    const SHOWN: usize = 120;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn default_shard_size_follows_from_the_object_size() {
        for (mib, kib) in [(0, 64), (1, 64), (16, 64), (64, 256), (100, 256), (1 << 10, 4 << 10), (16 << 10, 64 << 10)]
        {
            assert_eq!(Layout::fitting_shard_bytes(&[mib << 20]), kib << 10, "{mib} MiB");
        }
        // Beyond 64 MiB only where there would be too many: 4 TiB are 32,768 shards of 128 MiB.
        assert_eq!(Layout::fitting_shard_bytes(&[4 << 40]), 128 << 20);
        assert_eq!(Layout::fitting_shard_bytes(&[(4 << 40) + 1]), 256 << 20);
        assert_eq!(Layout::fitting_shard_bytes(&[]), 64 << 10);
    }

    proptest! {
        #[test]
        fn default_shard_size_makes_256_shards_within_the_limits(
            sizes in prop::collection::vec(prop_oneof![0..1u64 << 20, 0..1u64 << 34, 0..1u64 << 44], 0..40),
        ) {
            let total: u64 = sizes.iter().sum();
            let bytes = Layout::fitting_shard_bytes(&sizes);
            let layout = Layout::new(sizes, bytes).expect("within the limits");
            prop_assert!(total < 256 * bytes || layout.shards() >= 256);
            prop_assert!(bytes == FITTING_LEAST_BYTES || total / bytes >= 256, "{} of {bytes} B", layout.shards());
        }
    }
}
