//! Durable cluster state: records by key in one embedded redb file, in etcd ([`crate::store::etcd`]), or in memory
//! only.
//!
//! A commit is one transaction, synced before it returns, so a process killed at any point restarts with all records it
//! ever published. The file is locked while open: a second control plane on the same state is rejected. Beside the
//! records the file holds the identity of the cluster state, drawn when it was created, by which watchers notice that
//! epochs started over.
//!
//! A commit blocks its thread for one sync of the disk. Commits happen when members or segments come and go, not with
//! heartbeats.

pub(crate) mod etcd;

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use kvplane_cluster::{Change, Record, RecordError};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};

use crate::store::etcd::{EtcdChangeError, Turn};

const RECORDS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("records");
const ABOUT: TableDefinition<'_, &str, u64> = TableDefinition::new("about");

/// Version of the tables; records carry their own.
const FORMAT: u64 = 1;

/// Error of opening, reading or writing the state.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum StoreError {
    /// Another process has the file open.
    InUse(PathBuf),
    /// The file was written by another version.
    Format {
        path: PathBuf,
        /// Format of the file.
        found: u64,
    },
    /// A record is damaged.
    Record { path: PathBuf, reason: String },
    /// Reading or writing failed.
    Database {
        path: PathBuf,
        /// The attempted action, as a verb.
        action: &'static str,
        /// The database's error.
        reason: String,
    },
    /// etcd did not accept a change, or another control plane is the leader by now.
    Etcd(EtcdChangeError),
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(path) => write!(
                f,
                "the state file {} is in use by another control plane: stop that one or use another state directory",
                path.display()
            ),
            Self::Format { path, found } => write!(
                f,
                "the state file {} has format {found}, this program reads format {FORMAT}: use the version that \
                 wrote it",
                path.display()
            ),
            Self::Record { path, reason } => write!(
                f,
                "the state file {} is damaged ({reason}): remove it, and the members offer the map that they follow",
                path.display()
            ),
            Self::Database { path, action, reason } => {
                write!(f, "cannot {action} the state file {}: {reason}", path.display())
            }
            Self::Etcd(error) => write!(f, "cannot change the state in etcd: {error}"),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Etcd(error) => Some(error),
            _ => None,
        }
    }
}

/// Place of the state.
enum Backend {
    Memory,
    File(Database, PathBuf),
    Etcd(Turn),
}

/// The durable cluster state.
pub(crate) struct Store {
    backend: Backend,
    state_id: u64,
    /// Simulates a failing disk in tests.
    #[cfg(test)]
    pub(crate) broken: bool,
}

/// Converts an error of redb to one that names the file.
fn failed<E: Into<redb::Error>>(path: &Path, action: &'static str) -> impl Fn(E) -> StoreError {
    let path = path.to_owned();
    move |error| {
        let reason = error.into().to_string();
        StoreError::Database { path: path.clone(), action, reason }
    }
}

impl Store {
    /// Creates a state that ends with the process.
    pub(crate) fn in_memory(state_id: u64) -> Self {
        Self {
            backend: Backend::Memory,
            state_id,
            #[cfg(test)]
            broken: false,
        }
    }

    /// Opens or creates the file at `path` and reads all records; `fresh_id` becomes the identity of a new state.
    pub(crate) fn open(path: &Path, fresh_id: u64) -> Result<(Self, Vec<Record>), StoreError> {
        let database = open_or_make(path, fresh_id)?;
        let state_id = identify(&database, path, fresh_id)?;
        let records = read_all(&database, path)?;
        let store = Self { backend: Backend::File(database, path.to_owned()), ..Self::in_memory(state_id) };
        Ok((store, records))
    }

    /// Creates a state in etcd, for as long as this turn lasts.
    pub(crate) fn in_etcd(turn: Turn, state_id: u64) -> Self {
        Self { backend: Backend::Etcd(turn), ..Self::in_memory(state_id) }
    }

    /// Returns the reason for which no change is possible at present. Called before a change begins, as a begun change
    /// cannot be undone.
    pub(crate) fn uncertainty(&self) -> Option<String> {
        match &self.backend {
            Backend::Etcd(turn) => turn.uncertainty(),
            Backend::Memory | Backend::File(..) => None,
        }
    }

    /// Returns the identity of this state.
    pub(crate) fn state_id(&self) -> u64 {
        self.state_id
    }

    /// Makes `changes` durable, all or none.
    pub(crate) fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        self.write(None, changes)
    }

    /// Makes `changes` durable, all or none, together with a new identity of the state.
    pub(crate) fn adopt(&mut self, state_id: u64, changes: &[Change]) -> Result<(), StoreError> {
        self.write(Some(state_id), changes)?;
        self.state_id = state_id;
        Ok(())
    }

    fn write(&mut self, state_id: Option<u64>, changes: &[Change]) -> Result<(), StoreError> {
        #[cfg(test)]
        if self.broken {
            let (path, reason) = (PathBuf::from("broken"), "a test".to_owned());
            return Err(StoreError::Database { path, action: "sync", reason });
        }
        let (database, path) = match &self.backend {
            Backend::Memory => return Ok(()),
            Backend::Etcd(turn) => return turn.commit(state_id, changes).map_err(StoreError::Etcd),
            Backend::File(database, path) => (database, path),
        };
        let transaction = database.begin_write().map_err(failed(path, "write"))?;
        {
            let mut table = transaction.open_table(RECORDS).map_err(failed(path, "write"))?;
            let mut bytes = Vec::new();
            for change in changes {
                match change {
                    Change::Put(record) => {
                        bytes.clear();
                        record.encode(&mut bytes);
                        let key = record.key().to_bytes();
                        table.insert(&*key, &*bytes).map_err(failed(path, "write"))?;
                    }
                    Change::Remove(key) => {
                        table.remove(&*key.to_bytes()).map_err(failed(path, "write"))?;
                    }
                }
            }
        }
        if let Some(state_id) = state_id {
            let mut about = transaction.open_table(ABOUT).map_err(failed(path, "write"))?;
            about.insert("state", state_id).map_err(failed(path, "write"))?;
        }
        transaction.commit().map_err(failed(path, "sync"))
    }
}

/// Opens the file, or creates it. A new file is created under a temporary name and renamed once it is complete: a file
/// that a killed process left incomplete could never be opened again.
fn open_or_make(path: &Path, fresh_id: u64) -> Result<Database, StoreError> {
    if path.exists() {
        return open_whole(path);
    }
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{fresh_id:x}.new"));
    let new = PathBuf::from(new);
    let _ = fs::remove_file(&new);
    let database = open_whole(&new)?;
    // A link, since a file that another process created meanwhile must stay; not every file system supports links.
    let named = match fs::hard_link(&new, path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => fs::rename(&new, path),
        linked => linked,
    };
    let _ = fs::remove_file(&new);
    match named {
        Ok(()) => {
            if let Some(Ok(directory)) = path.parent().map(fs::File::open) {
                // Not every file system can sync a directory.
                let _ = directory.sync_all();
            }
            Ok(database)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            drop(database);
            open_whole(path)
        }
        Err(error) => Err(failed(path, "make")(redb::StorageError::Io(error))),
    }
}

fn open_whole(path: &Path) -> Result<Database, StoreError> {
    Database::create(path).map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path.to_owned()),
        error => failed(path, "open")(error),
    })
}

/// Returns the state's identity; writes it if the file is new.
fn identify(database: &Database, path: &Path, fresh_id: u64) -> Result<u64, StoreError> {
    let write = || failed(path, "write");
    let transaction = database.begin_write().map_err(failed(path, "write"))?;
    let state_id = {
        let mut about = transaction.open_table(ABOUT).map_err(failed(path, "read"))?;
        let get = |key: &str| -> Result<Option<u64>, StoreError> {
            Ok(about.get(key).map_err(failed(path, "read"))?.map(|value| value.value()))
        };
        match (get("format")?, get("state")?) {
            (Some(FORMAT), Some(state_id)) => state_id,
            (Some(found), _) => return Err(StoreError::Format { path: path.to_owned(), found }),
            (None, _) => {
                about.insert("format", FORMAT).map_err(write())?;
                about.insert("state", fresh_id).map_err(write())?;
                fresh_id
            }
        }
    };
    // So that a reader need not distinguish a missing table from an empty one.
    transaction.open_table(RECORDS).map_err(failed(path, "write"))?;
    transaction.commit().map_err(failed(path, "sync"))?;
    Ok(state_id)
}

fn read_all(database: &Database, path: &Path) -> Result<Vec<Record>, StoreError> {
    let damaged = |reason: String| StoreError::Record { path: path.to_owned(), reason };
    let transaction = database.begin_read().map_err(failed(path, "read"))?;
    let table = transaction.open_table(RECORDS).map_err(failed(path, "read"))?;
    let mut records = Vec::new();
    for row in table.iter().map_err(failed(path, "read"))? {
        let (key, value) = row.map_err(failed(path, "read"))?;
        let record = Record::decode(value.value()).map_err(|error: RecordError| damaged(error.to_string()))?;
        if record.key().to_bytes() != key.value() {
            return Err(damaged(format!("a record is stored under the key of another: {:?}", record.key())));
        }
        records.push(record);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_state_file_appears_complete_and_locked() {
        let directory = std::env::temp_dir().join(format!("kvplane-state-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("state.redb");
        // The leftover of a killed process.
        fs::write(directory.join("state.redb.7.new"), vec![0; 4096]).expect("written");
        let (store, records) = Store::open(&path, 7).expect("made");
        assert_eq!((store.state_id(), records.len()), (7, 0));
        let names: Vec<_> =
            fs::read_dir(&directory).expect("read").map(|entry| entry.expect("read").file_name()).collect();
        assert_eq!(names, ["state.redb"]);
        assert!(matches!(Store::open(&path, 8), Err(StoreError::InUse(_))));
        drop(store);
        assert_eq!(Store::open(&path, 8).expect("opened").0.state_id(), 7);
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn of_concurrent_creators_of_a_state_file_one_succeeds() {
        let directory = std::env::temp_dir().join(format!("kvplane-states-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        for round in 0..10 {
            let path = directory.join(format!("{round}"));
            let start = std::sync::Barrier::new(4);
            let made: Vec<_> = std::thread::scope(|scope| {
                let open = |id| {
                    start.wait();
                    Store::open(&path, id)
                };
                let all: Vec<_> = (0..4).map(|id| scope.spawn(move || open(id))).collect();
                all.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
            let refused = made.iter().filter_map(|made| made.as_ref().err());
            refused.for_each(|error| assert!(matches!(error, StoreError::InUse(_)), "{error}"));
        }
        fs::remove_dir_all(&directory).expect("removed");
    }
}
