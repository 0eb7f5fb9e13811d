//! What the control plane remembers: records by key in one embedded redb file, or nothing.
//!
//! A commit is one transaction, synced before it returns, so a process killed at any point comes back with all it
//! ever published. The file is locked while open: a second control plane on the same state is refused. Besides the
//! records the file holds the identity of this state, drawn when it was made, by which watchers tell that epochs
//! began anew.
//!
//! A commit blocks its thread for one sync of the disk. Commits happen when members or segments come and go, not with
//! heartbeats.

use std::fmt;
use std::path::{Path, PathBuf};

use kvplane_cluster::{Change, Record, RecordError};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};

const RECORDS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("records");
const ABOUT: TableDefinition<'_, &str, u64> = TableDefinition::new("about");

/// Version of the tables; records carry their own.
const FORMAT: u64 = 1;

/// Why the state cannot be used.
#[derive(Debug)]
pub enum StoreError {
    /// Another process has it open.
    InUse(PathBuf),
    /// The file was written by another version.
    Format {
        /// Which file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// A record is damaged.
    Record {
        /// In which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Reading or writing failed.
    Database {
        /// Which file.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the database said.
        reason: String,
    },
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
                "the state file {} has format {found}, this program reads format {FORMAT}: use the program that \
                 wrote it",
                path.display()
            ),
            Self::Record { path, reason } => write!(
                f,
                "the state file {} is damaged ({reason}): restore a copy, or remove it to begin anew",
                path.display()
            ),
            Self::Database { path, action, reason } => {
                write!(f, "cannot {action} the state file {}: {reason}", path.display())
            }
        }
    }
}

impl std::error::Error for StoreError {}

/// The durable state.
pub(crate) struct Store {
    file: Option<(Database, PathBuf)>,
    state_id: u64,
    /// Stands for a disk that fails, which a test cannot have.
    #[cfg(test)]
    pub(crate) broken: bool,
}

/// Turns whatever redb says into an error that names the file.
fn failed<E: Into<redb::Error>>(path: &Path, action: &'static str) -> impl Fn(E) -> StoreError {
    let path = path.to_owned();
    move |error| {
        let reason = error.into().to_string();
        StoreError::Database { path: path.clone(), action, reason }
    }
}

impl Store {
    /// A state that ends with the process.
    pub(crate) fn in_memory(state_id: u64) -> Self {
        Self {
            file: None,
            state_id,
            #[cfg(test)]
            broken: false,
        }
    }

    /// Opens or makes the file at `path` and reads all records; `fresh_id` names a state that is new.
    pub(crate) fn open(path: &Path, fresh_id: u64) -> Result<(Self, Vec<Record>), StoreError> {
        let database = match Database::create(path) {
            Ok(database) => database,
            Err(DatabaseError::DatabaseAlreadyOpen) => {
                return Err(StoreError::InUse(path.to_owned()));
            }
            Err(error) => return Err(failed(path, "open")(error)),
        };
        let state_id = identify(&database, path, fresh_id)?;
        let records = read_all(&database, path)?;
        let store = Self { file: Some((database, path.to_owned())), ..Self::in_memory(state_id) };
        Ok((store, records))
    }

    /// Identity of this state.
    pub(crate) fn state_id(&self) -> u64 {
        self.state_id
    }

    /// Makes `changes` durable, all or none.
    pub(crate) fn commit(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        #[cfg(test)]
        if self.broken {
            let (path, reason) = (PathBuf::from("broken"), "a test".to_owned());
            return Err(StoreError::Database { path, action: "sync", reason });
        }
        let Some((database, path)) = &self.file else { return Ok(()) };
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
        transaction.commit().map_err(failed(path, "sync"))
    }
}

/// The state's identity, written when the file is new.
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
    // So that a reader never has to tell a missing table from an empty one.
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
