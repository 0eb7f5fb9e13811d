//! Local discovery: publishes a control plane to clients on the same machine, so that they need no configuration.
//!
//! A control plane publishes one file, `CLUSTER.local`, in a directory that only its user may enter: the address it
//! listens on, the certificate of its authority, and an identity for each role that a local process may take. A process
//! that can read the file could read the authority's key too, so publishing grants no new rights.
//!
//! While it lives, the publisher holds locks on that file and on `CLUSTER.lock`; the kernel releases them however it
//! dies. The lock file admits one publisher per cluster. The lock on `CLUSTER.local` is for readers: an unlocked file
//! is stale, also while the next publisher has not written its own yet, and a reader reports it as stale instead of
//! connecting to a dead address.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use kvplane_sys::private_files::{
    FileError, io_error, is_at, made_private_directory, private_directory, read_locked, runtime_directory, write_locked,
};

use crate::identity::role::{ClusterName, Role};
use crate::identity::{Identity, IdentityError, PEM_BYTES, Trust};

const FIRST_LINE: &str = "kvplane local 1";

/// Longest published file: eight certificates, four keys and a few short lines.
const LOCAL_BYTES: u64 = 8 * PEM_BYTES;

/// Attempts at the lock. A publisher that ends holds the lock for an instant longer than its clients see it; the next
/// one retries this often, this far apart, before it concludes that another publisher runs.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// The per-user directory of published control planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDirectory {
    path: PathBuf,
}

/// Contents of the file that a local control plane publishes.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct LocalCluster {
    pub cluster: ClusterName,
    /// Address that the control plane listens on.
    pub control: SocketAddr,
    /// Certificate of the cluster's authority.
    pub trust: Trust,
    identities: Vec<(Role, Identity)>,
}

/// A published file, for as long as this value lives. Dropping it removes the file and its lock file, and the directory
/// if publishing created it and it is empty.
#[derive(Debug)]
pub struct Publication {
    path: PathBuf,
    lock_path: PathBuf,
    /// The directory, if this publisher created it and may remove it.
    made: Option<PathBuf>,
    /// The published file, locked.
    text: Mutex<Option<File>>,
    _lock: File,
}

/// Error of publishing or discovering a local control plane.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum LocalError {
    /// The directory or the file cannot be used.
    File(FileError),
    /// An identity in the file is unusable.
    Identity(IdentityError),
    /// Another process already publishes a cluster of this name.
    AlreadyPublished {
        cluster: ClusterName,
        /// Path of the lock that the other process holds.
        lock: PathBuf,
    },
    /// No control plane of the cluster has published a file.
    NotPublished {
        cluster: ClusterName,
        /// Path that the file would have.
        path: PathBuf,
    },
    /// The file is left over from a process that has ended.
    Stale { cluster: ClusterName, path: PathBuf },
    /// The file is not in the format of this version.
    Malformed { path: PathBuf, reason: FormatError },
}

/// Reason why a published file is malformed.
#[derive(Debug)]
pub enum FormatError {
    /// Its first line is that of no version known here.
    FirstLine,
    /// A line or a part is missing.
    Missing(&'static str),
    /// It names a role that does not exist.
    UnknownRole(String),
    /// The cluster's name, an identity or the authority's certificate is unusable.
    Identity(IdentityError),
    /// The control plane's address is invalid.
    Address(String),
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FirstLine => write!(f, "its first line is not {FIRST_LINE:?}"),
            Self::Missing(what) => f.write_str(what),
            Self::UnknownRole(role) => write!(f, "an unknown role {role:?}"),
            Self::Identity(error) => error.fmt(f),
            Self::Address(text) => write!(f, "{text:?} is not an address"),
        }
    }
}

impl std::error::Error for FormatError {}

impl fmt::Display for LocalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Identity(error) => error.fmt(f),
            Self::AlreadyPublished { cluster, lock } => write!(
                f,
                "a control plane of cluster {cluster} already runs for this user (it holds {}); stop it or choose \
                 another cluster name",
                lock.display()
            ),
            Self::NotPublished { cluster, path } => write!(
                f,
                "no control plane of cluster {cluster} runs for this user: {} does not exist; start `kvplane dev` \
                 or name the control plane's address and identity",
                path.display()
            ),
            Self::Stale { cluster, path } => write!(
                f,
                "the control plane of cluster {cluster} that wrote {} is gone; start it again",
                path.display()
            ),
            Self::Malformed { path, reason } => {
                write!(f, "{} is malformed: {reason}; start the control plane again", path.display())
            }
        }
    }
}

impl std::error::Error for LocalError {}

impl From<FileError> for LocalError {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl LocalCluster {
    /// Creates the contents of a published file.
    #[must_use]
    pub fn new(cluster: ClusterName, control: SocketAddr, trust: Trust, identities: Vec<(Role, Identity)>) -> Self {
        Self { cluster, control, trust, identities }
    }

    /// Returns the published identity for `role`.
    #[must_use]
    pub fn identity(&self, role: Role) -> Option<&Identity> {
        self.identities.iter().find(|(r, _)| *r == role).map(|(_, identity)| identity)
    }

    fn to_text(&self) -> String {
        let mut text =
            format!("{FIRST_LINE}\ncluster {}\ncontrol {}\n{}", self.cluster, self.control, self.trust.pem());
        for (role, identity) in &self.identities {
            text.push_str(&format!("role {role}\n"));
            text.push_str(identity.certificate_pem());
            text.push_str(identity.key_pem());
        }
        text
    }

    fn from_text(text: &str) -> Result<Self, FormatError> {
        let mut sections = text.split("\nrole ");
        let head = sections.next().unwrap_or_default();
        let mut lines = head.splitn(4, '\n');
        if lines.next() != Some(FIRST_LINE) {
            return Err(FormatError::FirstLine);
        }
        let cluster =
            lines.next().and_then(|l| l.strip_prefix("cluster ")).ok_or(FormatError::Missing("no cluster"))?;
        let control =
            lines.next().and_then(|l| l.strip_prefix("control ")).ok_or(FormatError::Missing("no control"))?;
        let authority = lines.next().ok_or(FormatError::Missing("no authority"))?;
        let mut identities = Vec::new();
        for section in sections {
            let (role, pem) = section.split_once('\n').ok_or(FormatError::Missing("an empty role"))?;
            let role = Role::from_name(role).ok_or_else(|| FormatError::UnknownRole(role.to_owned()))?;
            let key_at = pem.find("-----BEGIN PRIVATE KEY-----");
            let key_at = key_at.ok_or(FormatError::Missing("a role without a key"))?;
            let (certificate, key) = pem.split_at(key_at);
            let identity = Identity::from_pem(certificate, key, role.name()).map_err(FormatError::Identity)?;
            identities.push((role, identity));
        }
        Ok(Self {
            cluster: ClusterName::new(cluster).map_err(FormatError::Identity)?,
            control: control.parse().map_err(|_| FormatError::Address(control.to_owned()))?,
            trust: Trust::from_pem(&format!("{authority}\n"), "its authority").map_err(FormatError::Identity)?,
            identities,
        })
    }
}

impl RuntimeDirectory {
    /// Returns the user's directory ([`runtime_directory`]).
    ///
    /// # Errors
    /// When the environment names no absolute path.
    pub fn of_user() -> Result<Self, LocalError> {
        Ok(Self::at(runtime_directory()?))
    }

    /// Returns the directory at `path`; its parent must exist.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Returns the directory's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn file(&self, cluster: &ClusterName, kind: &str) -> PathBuf {
        self.path.join(format!("{cluster}.{kind}"))
    }

    /// Takes the lock of a cluster; the flag tells whether the directory was created. The previous holder may remove
    /// the file and the directory in between: the lock taken is then on a file without a name, so the lock by that name
    /// is tried again.
    fn lock(&self, cluster: &ClusterName) -> Result<(File, bool), LocalError> {
        let path = self.file(cluster, "lock");
        let (mut made, mut gone) = (false, None);
        for _ in 0..LOCK_ATTEMPTS {
            let opened = made_private_directory(&self.path).and_then(|new| {
                made |= new;
                let mut options = OpenOptions::new();
                let options = options.create(true).truncate(false).write(true).mode(0o600);
                options.open(&path).map_err(io_error("open", &path))
            });
            let lock = match opened {
                Ok(lock) => lock,
                Err(FileError::Io { action, path, source }) if source.kind() == io::ErrorKind::NotFound => {
                    gone = Some(FileError::Io { action, path, source });
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            gone = None;
            match lock.try_lock() {
                Ok(()) if is_at(&lock, &path) => return Ok((lock, made)),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_RETRY),
                Err(TryLockError::Error(e)) => return Err(io_error("lock", &path)(e).into()),
            }
        }
        let taken = || LocalError::AlreadyPublished { cluster: cluster.clone(), lock: path.clone() };
        Err(gone.map_or_else(taken, LocalError::File))
    }

    /// Publishes `local` until the returned value is dropped or this process dies. May wait 200 ms.
    ///
    /// # Errors
    /// When the directory is not private, or another process publishes a cluster of that name.
    pub fn publish(&self, local: &LocalCluster) -> Result<Publication, LocalError> {
        let (lock, made) = self.lock(&local.cluster)?;
        let [path, lock_path] = ["local", "lock"].map(|kind| self.file(&local.cluster, kind));
        let made = made.then(|| self.path.clone());
        let publication = Publication { path, lock_path, made, text: Mutex::new(None), _lock: lock };
        publication.replace(local)?;
        Ok(publication)
    }

    /// Reads the file that the control plane of `cluster` published.
    ///
    /// # Errors
    /// When there is none, it is gone, or its file or the directory is not private.
    pub fn discover(&self, cluster: &ClusterName) -> Result<LocalCluster, LocalError> {
        let path = self.file(cluster, "local");
        if let Err(error) = fs::symlink_metadata(&path)
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(LocalError::NotPublished { cluster: cluster.clone(), path });
        }
        // Another user's file must not decide which authority this process trusts.
        private_directory(&self.path)?;
        let (text, is_held) = read_locked(&path, LOCAL_BYTES)?;
        if !is_held {
            return Err(LocalError::Stale { cluster: cluster.clone(), path });
        }
        LocalCluster::from_text(&text).map_err(|reason| LocalError::Malformed { path, reason })
    }
}

impl Publication {
    /// Publishes `local` in place of the present contents.
    ///
    /// # Errors
    /// When the file cannot be written; then the former contents stay.
    pub fn replace(&self, local: &LocalCluster) -> Result<(), LocalError> {
        let text = write_locked(&self.path, local.to_text().as_bytes())?;
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        Ok(())
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        // The lock is held, so the files belong to this publisher. Files that cannot be removed are recognized as
        // stale.
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_file(&self.lock_path);
        // Fails if the directory is not empty.
        if let Some(directory) = &self.made {
            let _ = fs::remove_dir(directory);
        }
    }
}
