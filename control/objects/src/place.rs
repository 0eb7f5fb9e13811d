//! Places of stores: a directory, or a bucket with a prefix.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use crate::Deadlines;
use crate::marker::Marker;

/// Place of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StorePlace {
    /// Directory of a file system that all nodes see.
    Directory(PathBuf),
    /// Bucket of an S3 service, and the beginning of the names of its objects.
    Bucket {
        /// Name of the bucket.
        bucket: String,
        /// Path segments before all names; may be empty.
        prefix: String,
    },
}

/// Reason why a store cannot be used.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum PlaceError {
    /// The text names no place.
    NoPlace { text: String },
    /// The directory is missing, or cannot be read, or written to at its first use.
    Directory { path: PathBuf, source: io::Error },
    /// `object_store` refuses the place, or its settings in the environment.
    Refused { place: String, source: Box<object_store::Error> },
    /// The file system does not answer.
    Silent { place: String, waited: Duration },
    /// The thread, or its runtime, cannot be started.
    Thread(io::Error),
}

impl fmt::Display for PlaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPlace { text } => {
                write!(f, "{text:?} names no shared tier: give s3://BUCKET, s3://BUCKET/PREFIX or a directory")
            }
            Self::Directory { path, source } if source.kind() == io::ErrorKind::NotFound => write!(
                f,
                "there is no directory {} for the shared tier: mount its file system, or create it for the first use",
                path.display()
            ),
            Self::Directory { path, source } => {
                write!(f, "the directory {} of the shared tier: {source}", path.display())
            }
            Self::Refused { place, source } => write!(f, "the shared tier {place}: {source}"),
            Self::Silent { place, waited } => {
                write!(f, "the shared tier {place} does not answer within {} s", waited.as_secs())
            }
            Self::Thread(source) => write!(f, "the thread of the shared tier: {source}"),
        }
    }
}

impl std::error::Error for PlaceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NoPlace { .. } | Self::Silent { .. } => None,
            Self::Directory { source, .. } | Self::Thread(source) => Some(source),
            Self::Refused { source, .. } => Some(source),
        }
    }
}

impl fmt::Display for StorePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Bucket { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::Bucket { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

impl FromStr for StorePlace {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        let wrong = || PlaceError::NoPlace { text: text.to_owned() };
        if let Some(rest) = text.strip_prefix("s3://") {
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            let prefix = prefix.trim_end_matches('/');
            if bucket.is_empty() || prefix.split('/').any(|part| matches!(part, "." | "..")) {
                return Err(wrong());
            }
            return Ok(Self::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() });
        }
        let path = text.strip_prefix("file://").unwrap_or(text);
        if path.is_empty() || path.contains("://") {
            return Err(wrong());
        }
        Ok(Self::Directory(path.into()))
    }
}

/// Store of a cluster.
pub(crate) struct OpenStore {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// Path below which the cluster's objects are.
    pub(crate) prefix: object_store::path::Path,
    /// Marker of a directory.
    pub(crate) marker: Option<Marker>,
}

impl StorePlace {
    /// Opens the store of a cluster.
    pub(crate) fn open(&self, cluster: &str, deadlines: Deadlines) -> Result<OpenStore, PlaceError> {
        let refused = |source| PlaceError::Refused { place: self.to_string(), source: Box::new(source) };
        let (store, marker, prefix): (Arc<dyn ObjectStore>, Option<Marker>, &str) = match self {
            Self::Directory(path) => {
                let at = |source| PlaceError::Directory { path: path.clone(), source };
                let path = std::fs::canonicalize(path).map_err(at)?;
                let fresh = kvplane_sys::random::random_u64().map_err(at)?;
                let marker = Marker::open(&path, fresh).map_err(at)?;
                let files = LocalFileSystem::new_with_prefix(path).map_err(refused)?.with_fsync(true);
                (Arc::new(files), Some(marker), "")
            }
            Self::Bucket { bucket, prefix } => {
                // The provider of cryptography of the whole process; an earlier one stays.
                let _ = rustls::crypto::ring::default_provider().install_default();
                // The driver's own deadlines come first.
                let client =
                    ClientOptions::new().with_timeout(deadlines.long * 2).with_connect_timeout(deadlines.short / 2);
                let retry = RetryConfig {
                    backoff: BackoffConfig {
                        init_backoff: Duration::from_millis(50),
                        max_backoff: deadlines.short / 4,
                        base: 2.0,
                    },
                    max_retries: 4,
                    retry_timeout: deadlines.short,
                };
                let builder = AmazonS3Builder::new().with_client_options(client).with_retry(retry);
                // As its `from_env` does, which would lose the settings above.
                let settings = std::env::vars_os()
                    .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
                    .filter(|(key, _)| key.starts_with("AWS_"));
                let builder = settings.fold(builder, |builder, (key, value)| {
                    match key.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                        Ok(key) => builder.with_config(key, value),
                        Err(_) => builder,
                    }
                });
                // One request for each deletion: any service of this kind has that.
                let builder = builder.with_bucket_name(bucket).with_disable_bulk_delete(true);
                (Arc::new(builder.build().map_err(refused)?), None, prefix)
            }
        };
        let parts = prefix.split('/').filter(|part| !part.is_empty()).chain(["kvplane", cluster]);
        let prefix = parts.fold(object_store::path::Path::ROOT, |path, part| path.join(part));
        Ok(OpenStore { store, prefix, marker })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_parsed_and_shown() {
        let parse = |text: &str| text.parse::<StorePlace>().ok();
        let bucket = |bucket: &str, prefix: &str| {
            Some(StorePlace::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
        };
        assert_eq!(parse("s3://kv"), bucket("kv", ""));
        assert_eq!(parse("s3://kv/a/b/"), bucket("kv", "a/b"));
        assert_eq!(parse("/mnt/kv"), Some(StorePlace::Directory("/mnt/kv".into())));
        assert_eq!(parse("file:///mnt/kv"), Some(StorePlace::Directory("/mnt/kv".into())));
        for wrong in ["", "s3://", "s3:///a", "gs://kv", "s3://kv/../a"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(parse("s3://kv/a").map(|place| place.to_string()), Some("s3://kv/a".to_owned()));
    }
}
