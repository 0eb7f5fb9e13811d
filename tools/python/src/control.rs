//! Discovery of the control plane that a `setup` names, from what Mooncake's users pass: an address, possibly a name,
//! possibly nothing.
//!
//! On this host, the control planes of the same user are found in the runtime directory. The one that listens on the
//! given address is taken or, if the address is Mooncake's default, the only one. A control plane on another host
//! requires certificates.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use kvplane::interrupt::{self, ReceiveError};
use kvplane::rpc::{LocalError, RuntimeDirectory};
use kvplane::{Control, DataTls, Error, Remote};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Default port of Mooncake's master.
const DEFAULT_PORT: u16 = 50_051;
/// Deadline of a setup, which is documented to return within five seconds.
const CONNECT: Duration = Duration::from_millis(4_500);
/// Default cluster of certificates.
const DEFAULT_CLUSTER: &str = "kvplane";

/// Reason why a setup has no control plane.
#[derive(Debug)]
pub(crate) enum SetupError {
    /// The control plane did not answer in time.
    Silent {
        /// The control plane, as [`ControlArguments::named`] describes it.
        named: String,
    },
    /// The control plane rejected the connection, or cannot be reached.
    Connect { named: String, source: Box<Error> },
    /// The given address was not resolved in time.
    Unresolved { address: String },
    /// The text is a URL.
    Url { text: String },
    /// The text is not an address, or its name is not known.
    Address { text: String, source: io::Error },
    /// The text has no address in it.
    NoAddress { text: String },
    /// The control plane is on another host, and there are no certificates.
    OtherHost { address: SocketAddr },
    /// No control plane of this user runs on this host.
    NoneHere { address: String, directory: PathBuf },
    /// This user's control planes on this host listen on other addresses.
    OthersHere { address: String, found: Vec<(String, SocketAddr)> },
    /// The runtime directory cannot be used.
    Directory(LocalError),
    /// The setup did not run to its end.
    Thread(SetupThreadError),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longest = CONNECT.as_secs_f64();
        match self {
            Self::Silent { named } => write!(f, "the control plane {named} did not answer within {longest} s"),
            Self::Connect { named, source } => write!(f, "no connection to the control plane {named}: {source}"),
            Self::Unresolved { address } => write!(f, "the address of {address} was not found within {longest} s"),
            Self::Url { text } => {
                write!(f, "{text:?}: give the addresses of the control planes, host:port,host:port")
            }
            Self::Address { text, source } => write!(f, "{text:?} is not an address: {source}"),
            Self::NoAddress { text } => write!(f, "{text:?} contains no address"),
            Self::OtherHost { address } => write!(
                f,
                "the control plane at {address} is on another host: set KVPLANE_CERTS to the folder that `kvplane ctl \
                 cert` made, with ca.pem, client.pem and client.key"
            ),
            Self::NoneHere { address, directory } => write!(
                f,
                "no control plane at {address}: none of this user runs on this host ({} names none); start `kvplane \
                 dev`, or set KVPLANE_CERTS for one that has certificates",
                directory.display()
            ),
            Self::OthersHere { address, found } => write!(
                f,
                "no control plane at {address}; this user's are {}: name one of these addresses, or set \
                 KVPLANE_CLUSTER",
                found.iter().map(|(name, at)| format!("{name} at {at}")).collect::<Vec<_>>().join(", ")
            ),
            Self::Directory(error) => error.fmt(f),
            Self::Thread(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Connect { source, .. } => Some(source),
            Self::Address { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<SetupThreadError> for SetupError {
    fn from(error: SetupThreadError) -> Self {
        Self::Thread(error)
    }
}

/// Reason why work on a thread of its own has no result, other than its deadline.
#[derive(Debug)]
pub(crate) enum SetupThreadError {
    /// The thread could not be started.
    Start(io::Error),
    /// A signal handler raised.
    Interrupted,
}

impl fmt::Display for SetupThreadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => write!(f, "no thread for the setup: {error}"),
            Self::Interrupted => f.write_str("the call was interrupted"),
        }
    }
}

impl std::error::Error for SetupThreadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Start(error) => Some(error),
            Self::Interrupted => None,
        }
    }
}

/// Arguments that identify the control plane.
#[derive(Clone, Default)]
pub(crate) struct ControlArguments {
    pub(crate) master: Option<String>,
    pub(crate) cluster: Option<String>,
    pub(crate) certificates: Option<PathBuf>,
    pub(crate) runtime_directory: Option<PathBuf>,
}

impl ControlArguments {
    /// Fills in missing arguments from the environment: `KVPLANE_CLUSTER`, `KVPLANE_CERTS`.
    pub(crate) fn completed(mut self) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        self.cluster = self.cluster.or_else(|| variable("KVPLANE_CLUSTER"));
        self.certificates = self.certificates.or_else(|| variable("KVPLANE_CERTS").map(PathBuf::from));
        self
    }

    /// Returns the given address, for messages.
    pub(crate) fn shown(&self) -> String {
        self.master.clone().unwrap_or_else(|| format!("127.0.0.1:{DEFAULT_PORT}"))
    }

    /// Describes the control plane, for messages: by its cluster if only that was given.
    fn named(&self) -> String {
        match (&self.master, &self.cluster) {
            (None, Some(cluster)) => format!("of cluster {cluster:?}"),
            _ => format!("at {}", self.shown()),
        }
    }

    /// Discovers the control plane and lets `work` connect to it, within the deadline of a setup.
    ///
    /// # Errors
    /// The reason why there is no connection, with the address.
    pub(crate) fn connect<T: Send + 'static>(
        &self,
        work: impl FnOnce(Control) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, SetupError> {
        let (wanted, named) = (self.clone(), self.named());
        within(CONNECT, SetupError::Silent { named: named.clone() }, move || {
            // Names are resolved here, which may exceed the deadline.
            let control = wanted.find()?;
            work(control).map_err(|source| SetupError::Connect { named, source: Box::new(source) })
        })
    }

    /// Discovers the control plane, within the deadline of a setup.
    ///
    /// # Errors
    /// Errors of [`Self::find`]; also a name that was not resolved in time.
    pub(crate) fn found(&self) -> Result<Control, SetupError> {
        let wanted = self.clone();
        within(CONNECT, SetupError::Unresolved { address: self.shown() }, move || wanted.find())
    }

    /// Discovers the control plane.
    ///
    /// # Errors
    /// The reason why there is none, and the next step.
    fn find(&self) -> Result<Control, SetupError> {
        if let Some(identity) = &self.certificates {
            let addresses = self.addresses()?;
            let cluster = self.cluster.clone().unwrap_or_else(|| DEFAULT_CLUSTER.to_owned());
            return Ok(Control::Remote(Remote { cluster, addresses, identity: identity.clone() }));
        }
        let runtime_directory = self.runtime_directory.clone();
        if let Some(cluster) = &self.cluster {
            return Ok(Control::Local { cluster: cluster.clone(), runtime_directory });
        }
        let addresses = self.addresses()?;
        if let Some(far) = addresses.iter().find(|address| !Control::is_of_this_host(**address)) {
            return Err(SetupError::OtherHost { address: *far });
        }
        let (directory, found) = self.published()?;
        let at_address = |(_, listening): &&(String, SocketAddr)| {
            addresses.iter().any(|wanted| Control::is_reached_at(*wanted, *listening))
        };
        let named = found.iter().find(at_address);
        let default = addresses.iter().all(|address| address.port() == DEFAULT_PORT);
        match (named, &found[..]) {
            (Some((cluster, _)), _) => Ok(Control::Local { cluster: cluster.clone(), runtime_directory }),
            (None, [(cluster, _)]) if default => Ok(Control::Local { cluster: cluster.clone(), runtime_directory }),
            (None, []) => Err(SetupError::NoneHere { address: self.shown(), directory }),
            (None, _) => Err(SetupError::OthersHere { address: self.shown(), found }),
        }
    }

    fn addresses(&self) -> Result<Vec<SocketAddr>, SetupError> {
        let text = self.shown();
        let mut all = Vec::new();
        for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            if one.contains("://") {
                return Err(SetupError::Url { text: one.to_owned() });
            }
            let with_port = if one.parse::<SocketAddr>().is_ok() || has_port(one) {
                one.to_owned()
            } else {
                format!("{one}:{DEFAULT_PORT}")
            };
            let found =
                with_port.to_socket_addrs().map_err(|source| SetupError::Address { text: one.to_owned(), source })?;
            // A control plane listens on one address; all addresses of a name are tried.
            all.extend(found);
        }
        if all.is_empty() { Err(SetupError::NoAddress { text }) } else { Ok(all) }
    }

    /// Returns the live control planes of this user on this host, and the directory that was searched.
    fn published(&self) -> Result<(PathBuf, Vec<(String, SocketAddr)>), SetupError> {
        let directory = match &self.runtime_directory {
            Some(path) => path.clone(),
            None => RuntimeDirectory::of_user().map_err(SetupError::Directory)?.path().to_owned(),
        };
        let found = Control::published(Some(&directory)).map_err(SetupError::Directory)?;
        Ok((directory, found))
    }
}

fn has_port(text: &str) -> bool {
    text.rsplit_once(':')
        .is_some_and(|(host, port)| port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')))
}

/// Returns the mode of TLS on data connections: `off`, `offer` or `require`, as the caller gives, else from
/// `KVPLANE_DATA_TLS`; the default is `offer`, which uses TLS with nodes that require it.
pub(crate) fn tls_of(given: Option<&str>) -> PyResult<DataTls> {
    let variable = std::env::var("KVPLANE_DATA_TLS").ok().filter(|value| !value.is_empty());
    let Some(text) = given.map(str::to_owned).or(variable) else { return Ok(DataTls::Offer) };
    text.parse().map_err(|_| PyValueError::new_err(format!("data_tls is {text:?}: it must be off, offer or require")))
}

/// Converts a time in seconds: more than 0, and at most `most`.
pub(crate) fn seconds(what: &str, given: f64, most: u64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(given)
        .ok()
        .filter(|time| !time.is_zero() && *time <= Duration::from_secs(most))
        .ok_or_else(|| PyValueError::new_err(format!("{what} is {given} s: it must be more than 0, at most {most}")))
}

/// Like [`seconds`], and 0 disables.
pub(crate) fn seconds_or_none(what: &str, given: f64, most: u64) -> PyResult<Duration> {
    if given == 0.0 { Ok(Duration::ZERO) } else { seconds(what, given, most) }
}

/// Runs `work` on a thread of its own and waits for it up to `longest`.
///
/// # Errors
/// The error of `work`, or `late` when it takes too long: it then continues in the background. Also when no thread can
/// be started, and when a signal handler raised.
pub(crate) fn within<T: Send + 'static, E: From<SetupThreadError> + Send + 'static>(
    longest: Duration,
    late: E,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let (done, wait) = sync_channel(1);
    let thread = std::thread::Builder::new().name("kvplane-setup".to_owned());
    let started = thread.spawn(move || drop(done.send(work())));
    started.map_err(SetupThreadError::Start)?;
    match interrupt::receive(&wait, Some(longest)) {
        Ok(done) => done,
        Err(ReceiveError::Interrupted) => Err(SetupThreadError::Interrupted.into()),
        Err(ReceiveError::TimedOut | ReceiveError::Disconnected) => Err(late),
    }
}
