//! Snapshots of the Conductor's index in files, from which it continues after a restart.
//!
//! One file holds the snapshot of one pool. It is replaced as a whole: the new file is written beside it, synced and
//! renamed. A file that is torn, damaged, of another version or of another cluster state is not used, and the index is
//! rebuilt from its publishers. A file may be old: what is in it counts only once its publisher has confirmed it.
//!
//! A snapshot is copied under the Conductor's lock, one pool at a time, and written by another thread. The copies take
//! at most a hundredth of the control plane's time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use kvplane_conductor::conductor::{Conductor, Limit, PoolKey, PoolSnapshot};
use kvplane_conductor::index::SnapshotError;
use kvplane_proto::Digest;
use kvplane_proto::checksum::payload_checksum;
use kvplane_sys::private_files::{FileError, private_directory, write_private};
use tokio::time::sleep;

use super::host::ConductorHost;
use crate::cluster::ClusterHost;

/// First bytes of a file: "KVPS" and the format's version.
const MAGIC: u64 = 0x0000_0001_5350_564b;
/// Bytes before the cluster's name: the magic, the identity of the cluster state, the length of the name.
const HEADER_BYTES: usize = 24;
/// Most bytes of a file. A larger index is not kept.
const FILE_BYTES: u64 = 1 << 30;
/// Most files that are read at a start: one for each model.
const FILES: usize = Limit::Models.range().1 as usize;
/// Ending of the files' names.
const ENDING: &str = ".index";
/// Pauses between the copies of a round, in multiples of the time that they took.
const REST: u32 = 100;

/// Place of the snapshots of the Conductor's index, and the interval at which they are written.
#[derive(Clone, Debug)]
pub struct SnapshotConfig {
    /// Directory of the files, created with mode 0700 if its parent exists. If none: `index` in the state directory;
    /// without a state directory there are no snapshots.
    pub directory: Option<PathBuf>,
    /// Least time between two snapshots of a pool; zero for no snapshots.
    pub every: Duration,
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self { directory: None, every: Duration::from_secs(10) }
    }
}

/// Error of a snapshot's file.
#[derive(Debug)]
enum SnapshotFileError {
    /// Reading failed.
    Read(io::Error),
    /// Writing failed.
    Write(FileError),
    /// The file is, or would be, too large.
    TooLarge { bytes: u64 },
    /// The file ends too soon.
    Short { bytes: usize },
    /// The file has another format, as one of another version has.
    Format { found: u64 },
    /// The file is torn or damaged.
    Checksum { stored: u64, computed: u64 },
    /// The file is of another cluster.
    OtherCluster { found: String },
    /// The file is of another cluster state of the same name.
    OtherState { found: u64 },
    /// The snapshot in the file is of no use.
    Snapshot(SnapshotError),
}

impl fmt::Display for SnapshotFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(error) => write!(f, "it cannot be read: {error}"),
            Self::Write(error) => write!(f, "it cannot be written: {error}"),
            Self::TooLarge { bytes } => write!(f, "it has {bytes} bytes, over the limit of {FILE_BYTES}"),
            Self::Short { bytes } => write!(f, "it ends after {bytes} bytes"),
            Self::Format { found } => {
                write!(f, "it begins with {found:#x}, not {MAGIC:#x}: another version wrote it")
            }
            Self::Checksum { stored, computed } => {
                write!(f, "it is damaged: its checksum is {stored:#x}, its bytes have {computed:#x}")
            }
            Self::OtherCluster { found } => write!(f, "it is of the cluster {found:?}"),
            Self::OtherState { found } => write!(f, "it is of another cluster state, {found:016x}"),
            Self::Snapshot(error) => error.fmt(f),
        }
    }
}

/// Counters of snapshots.
#[derive(Default)]
pub(super) struct SnapshotCounts {
    written: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    bytes: AtomicU64,
}

impl SnapshotCounts {
    /// Returns the snapshots written.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Returns the snapshots that could not be written.
    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Returns the files that were not used at the start.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the bytes of the last round.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// The files of a cluster's snapshots.
#[derive(Clone)]
pub(crate) struct SnapshotFiles {
    directory: PathBuf,
    cluster: String,
    every: Duration,
    counts: Arc<SnapshotCounts>,
}

impl SnapshotFiles {
    /// Opens the directory; none if no snapshots are kept.
    ///
    /// # Errors
    /// When the directory cannot be created, or is accessible to other users.
    pub(crate) fn open(
        config: &SnapshotConfig,
        state_directory: Option<&Path>,
        cluster: &str,
    ) -> Result<Option<Self>, FileError> {
        let directory = config.directory.clone().or_else(|| Some(state_directory?.join("index")));
        let Some(directory) = directory.filter(|_| !config.every.is_zero()) else { return Ok(None) };
        private_directory(&directory)?;
        remove_torn(&directory);
        let (cluster, counts) = (cluster.to_owned(), Arc::default());
        Ok(Some(Self { directory, cluster, every: config.every, counts }))
    }

    /// Returns the counters.
    pub(super) fn counts(&self) -> &SnapshotCounts {
        &self.counts
    }

    /// Returns the file of a pool.
    fn path(&self, pool: &PoolKey) -> PathBuf {
        let PoolKey { tenant, model, block_tokens } = pool;
        let digest = Digest::of(tenant.as_bytes(), format!("{model}\u{0}{block_tokens}").as_bytes());
        self.directory.join(format!("{:032x}{ENDING}", digest.0))
    }

    /// Returns the paths of all files.
    fn list(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(ENDING)) {
                found.push(path);
            }
        }
        Ok(found)
    }

    /// Returns the bytes of a file.
    fn encode(&self, state_id: u64, snapshot: &PoolSnapshot) -> Vec<u8> {
        let body = snapshot.encode();
        let mut out = Vec::with_capacity(body.len() + self.cluster.len() + HEADER_BYTES + 8);
        for word in [MAGIC, state_id, self.cluster.len() as u64] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(self.cluster.as_bytes());
        out.extend_from_slice(&body);
        let checksum = payload_checksum(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads the bytes of a file.
    fn decode(&self, state_id: u64, bytes: &[u8]) -> Result<PoolSnapshot, SnapshotFileError> {
        let short = || SnapshotFileError::Short { bytes: bytes.len() };
        let (rest, checksum) = bytes.split_last_chunk::<8>().ok_or_else(short)?;
        let word = |at: usize| {
            let word = rest.get(at..)?.first_chunk::<8>()?;
            Some(u64::from_le_bytes(*word))
        };
        let found = word(0).ok_or_else(short)?;
        if found != MAGIC {
            return Err(SnapshotFileError::Format { found });
        }
        let (stored, computed) = (u64::from_le_bytes(*checksum), payload_checksum(rest));
        if stored != computed {
            return Err(SnapshotFileError::Checksum { stored, computed });
        }
        let (found, name) = (word(8).ok_or_else(short)?, word(16).ok_or_else(short)?);
        let end = usize::try_from(name).ok().and_then(|name| name.checked_add(HEADER_BYTES)).ok_or_else(short)?;
        let name = rest.get(HEADER_BYTES..end).ok_or_else(short)?;
        if name != self.cluster.as_bytes() {
            return Err(SnapshotFileError::OtherCluster { found: String::from_utf8_lossy(name).into_owned() });
        }
        if found != state_id {
            return Err(SnapshotFileError::OtherState { found });
        }
        PoolSnapshot::decode(&rest[end..]).map_err(SnapshotFileError::Snapshot)
    }

    /// Reads a file and makes the Conductor take it over. Returns the number of instances whose blocks are kept.
    fn adopt(&self, path: &Path, state_id: u64, conductor: &mut Conductor) -> Result<usize, SnapshotFileError> {
        let bytes = fs::metadata(path).map_err(SnapshotFileError::Read)?.len();
        if bytes > FILE_BYTES {
            return Err(SnapshotFileError::TooLarge { bytes });
        }
        let bytes = fs::read(path).map_err(SnapshotFileError::Read)?;
        let snapshot = self.decode(state_id, &bytes)?;
        drop(bytes);
        snapshot.adopt(conductor).map_err(SnapshotFileError::Snapshot)
    }

    /// Makes a restored Conductor take over all snapshots of this cluster state. A file that cannot be used is skipped
    /// with a warning.
    pub(crate) fn adopt_all(&self, state_id: u64, conductor: &mut Conductor) {
        let paths = match self.list() {
            Ok(paths) => paths,
            Err(error) => {
                let directory = self.directory.display();
                tracing::warn!("the index is rebuilt from its publishers: {directory} cannot be read: {error}");
                return;
            }
        };
        for path in paths.into_iter().take(FILES) {
            match self.adopt(&path, state_id, conductor) {
                Ok(0) => {}
                Ok(instances) => {
                    tracing::info!(instances, "{}: these blocks wait for their publishers", path.display());
                }
                Err(error) => {
                    self.counts.refused.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(
                        "the snapshot {} is not used; its part of the index is rebuilt from publishers: {error}",
                        path.display()
                    );
                }
            }
        }
    }

    /// Replaces the file of a pool; returns its bytes.
    fn write(&self, state_id: u64, snapshot: &PoolSnapshot) -> Result<u64, SnapshotFileError> {
        let out = self.encode(state_id, snapshot);
        let bytes = out.len() as u64;
        if bytes > FILE_BYTES {
            return Err(SnapshotFileError::TooLarge { bytes });
        }
        write_private(&self.path(snapshot.pool()), &out).map_err(SnapshotFileError::Write)?;
        Ok(bytes)
    }

    /// Removes the files of pools that are gone.
    fn remove_others(&self, pools: &BTreeSet<PoolKey>) {
        let present: BTreeSet<PathBuf> = pools.iter().map(|pool| self.path(pool)).collect();
        for path in self.list().unwrap_or_default().into_iter().filter(|path| !present.contains(path)) {
            // A file that stays is refused or overwritten later.
            let _ = fs::remove_file(path);
        }
    }

    /// Writes snapshots of the pools that have changed, for as long as it is polled.
    pub(crate) async fn keep(self, host: Arc<ConductorHost>, cluster: Arc<ClusterHost>) {
        let mut written: BTreeMap<PoolKey, u64> = BTreeMap::new();
        let (mut pause, mut fails) = (self.every, false);
        loop {
            sleep(pause).await;
            let (mut busy, mut bytes) = (Duration::ZERO, 0);
            let pools = host.look(|conductor, _| PoolSnapshot::changes(conductor));
            for (pool, changes) in &pools {
                if written.get(pool) == Some(changes) {
                    continue;
                }
                let began = Instant::now();
                let snapshot = host.look(|conductor, _| PoolSnapshot::take(conductor, pool));
                busy += began.elapsed();
                // A cluster that has failed stops with its reason.
                let (Some(snapshot), Ok(state_id)) = (snapshot, cluster.lock().map(|hosted| hosted.state_id())) else {
                    continue;
                };
                let files = self.clone();
                let outcome = tokio::task::spawn_blocking(move || files.write(state_id, &snapshot)).await;
                match outcome {
                    Ok(Ok(wrote)) => {
                        bytes += wrote;
                        fails = false;
                        self.counts.written.fetch_add(1, Ordering::Relaxed);
                        written.insert(pool.clone(), *changes);
                    }
                    Ok(Err(error)) => {
                        self.counts.failed.fetch_add(1, Ordering::Relaxed);
                        if !std::mem::replace(&mut fails, true) {
                            tracing::warn!("the snapshot {} is not kept: {error}", self.path(pool).display());
                        }
                    }
                    Err(error) => tracing::error!("a snapshot of the index was not written: {error}"),
                }
            }
            let present: BTreeSet<PoolKey> = pools.into_iter().map(|(pool, _)| pool).collect();
            if bytes > 0 || written.keys().any(|pool| !present.contains(pool)) {
                self.counts.bytes.store(bytes, Ordering::Relaxed);
                written.retain(|pool, _| present.contains(pool));
                let files = self.clone();
                // A panic there concerns these files only.
                let _ = tokio::task::spawn_blocking(move || files.remove_others(&present)).await;
            }
            pause = self.every.max(busy * REST);
        }
    }
}

/// Removes the files that a killed process was writing.
fn remove_torn(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.contains(&format!("{ENDING}.")) && name.ends_with(".tmp") {
            // One that stays takes room, and is not read.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_conductor::conductor::{
        BlockChange, CacheBatch, CacheReport, ConductorConfig, InstancePart, RegisterInstance,
    };
    use kvplane_conductor::index::BlockTier;

    use super::*;

    fn instance() -> RegisterInstance {
        RegisterInstance::new("i", "m", 16, InstancePart::Prefill)
    }

    /// Returns files in a new directory, and the bytes of a snapshot with one block.
    fn whole() -> (SnapshotFiles, Vec<u8>) {
        let directory = std::env::temp_dir().join(format!("kvplane-snapshots-{}", std::process::id()));
        let config = SnapshotConfig { directory: Some(directory), ..SnapshotConfig::default() };
        let files = SnapshotFiles::open(&config, None, "c").expect("a directory").expect("they are kept");
        let mut conductor = Conductor::new(ConductorConfig::default(), 0);
        conductor.register(instance(), 0).expect("room");
        let (lora, salt) = (String::new(), String::new());
        let changes = vec![BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes: vec![1] }];
        conductor.cache("i", 1, CacheBatch { seq: 0, kind: CacheReport::Goes, changes }, 0).expect("known");
        let snapshot = PoolSnapshot::take(&mut conductor, &instance().pool()).expect("something is known");
        let bytes = files.encode(7, &snapshot);
        assert_eq!(files.decode(7, &bytes).expect("whole"), snapshot);
        (files, bytes)
    }

    #[test]
    fn torn_damaged_and_foreign_files_are_refused() {
        let (files, bytes) = whole();
        for end in 0..bytes.len() {
            assert!(files.decode(7, &bytes[..end]).is_err(), "torn after {end} bytes");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x20;
            assert!(files.decode(7, &damaged).is_err(), "damaged at {at}");
        }
        let mut later = bytes.clone();
        later[4] += 1;
        assert!(matches!(files.decode(7, &later), Err(SnapshotFileError::Format { .. })));
        assert!(matches!(files.decode(8, &bytes), Err(SnapshotFileError::OtherState { found: 7 })));
        let other = SnapshotFiles { cluster: "d".to_owned(), ..files.clone() };
        assert!(matches!(other.decode(7, &bytes), Err(SnapshotFileError::OtherCluster { .. })));
    }

    #[test]
    fn files_of_other_pools_are_removed_and_without_a_directory_there_are_none() {
        let (files, bytes) = whole();
        let files = SnapshotFiles { directory: files.directory.join("one"), ..files };
        private_directory(&files.directory).expect("its parent is there");
        let here = instance().pool();
        let gone = PoolKey { model: "n".to_owned(), ..here.clone() };
        for pool in [&here, &gone] {
            write_private(&files.path(pool), &bytes).expect("written");
        }
        files.remove_others(&BTreeSet::from([here.clone()]));
        assert_eq!(files.list().expect("readable"), [files.path(&here)]);
        let none = SnapshotConfig { every: Duration::ZERO, ..SnapshotConfig::default() };
        let state = Some(files.directory.as_path());
        assert!(SnapshotFiles::open(&none, state, "c").is_ok_and(|files| files.is_none()));
        assert!(SnapshotFiles::open(&SnapshotConfig::default(), None, "c").is_ok_and(|files| files.is_none()));
        let beside = || SnapshotFiles::open(&SnapshotConfig::default(), state, "c").expect("a directory");
        let beside_state = beside().expect("they are kept");
        assert_eq!(beside_state.directory, files.directory.join("index"));
        // A process was killed while it wrote.
        let torn = beside_state.path(&here).with_extension("index.77.tmp");
        fs::write(&torn, b"half").expect("written");
        fs::write(beside_state.path(&here), b"whole").expect("written");
        assert!(beside().is_some() && !torn.exists() && beside_state.path(&here).exists());
        let _ = fs::remove_dir_all(&files.directory);
    }

    #[test]
    fn the_file_of_each_of_many_models_is_read() {
        const MODELS: u64 = 300;
        let (files, bytes) = whole();
        let files = SnapshotFiles { directory: files.directory.join("many"), ..files };
        private_directory(&files.directory).expect("its parent is there");
        for model in 0..MODELS {
            let pool = PoolKey { model: format!("m{model}"), ..instance().pool() };
            fs::write(files.path(&pool), &bytes[..bytes.len() - 1]).expect("written");
        }
        let mut conductor = Conductor::new(ConductorConfig::default(), 0);
        files.adopt_all(7, &mut conductor);
        assert_eq!(files.counts.refused.load(Ordering::Relaxed), MODELS);
        files.remove_others(&BTreeSet::new());
        assert_eq!(files.list().expect("readable"), Vec::<PathBuf>::new());
        let _ = fs::remove_dir_all(&files.directory);
    }
}
