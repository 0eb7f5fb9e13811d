//! Connection to the control plane that a `setup` names ([`kvplane::setup`]), within the deadline that Mooncake's users
//! expect.

use std::fmt;
use std::io;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use kvplane::interrupt::{self, ReceiveError};
pub(crate) use kvplane::setup::Setup as ControlArguments;
use kvplane::{Control, DataTls, Error};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Deadline of a setup, which is documented to return within five seconds.
const CONNECT: Duration = Duration::from_millis(4_500);

/// Reason why a setup has no control plane.
#[derive(Debug)]
pub(crate) enum SetupError {
    /// The control plane did not answer in time.
    Silent {
        /// The control plane, as [`named`] describes it.
        named: String,
    },
    /// The control plane rejected the connection, or cannot be reached.
    Connect { named: String, source: Box<Error> },
    /// The given address was not resolved in time.
    Unresolved { address: String },
    /// There is no control plane where the caller says.
    Find(kvplane::setup::SetupError),
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
            Self::Find(error) => error.fmt(f),
            Self::Thread(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Connect { source, .. } => Some(source),
            Self::Find(error) => std::error::Error::source(error),
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

/// Discovery of the control plane that arguments identify, within the deadline of a setup.
pub(crate) trait Discovery {
    /// Discovers the control plane and lets `work` connect to it.
    ///
    /// # Errors
    /// The reason why there is no connection, with the address.
    fn connect<T: Send + 'static>(
        &self,
        work: impl FnOnce(Control) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, SetupError>;

    /// Discovers the control plane.
    ///
    /// # Errors
    /// Errors of [`ControlArguments::find`]; also a name that was not resolved in time.
    fn found(&self) -> Result<Control, SetupError>;
}

impl Discovery for ControlArguments {
    fn connect<T: Send + 'static>(
        &self,
        work: impl FnOnce(Control) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, SetupError> {
        let (wanted, named) = (self.clone(), named(self));
        within(CONNECT, SetupError::Silent { named: named.clone() }, move || {
            // Names are resolved here, which may exceed the deadline.
            let control = wanted.find().map_err(SetupError::Find)?;
            work(control).map_err(|source| SetupError::Connect { named, source: Box::new(source) })
        })
    }

    fn found(&self) -> Result<Control, SetupError> {
        let wanted = self.clone();
        let late = SetupError::Unresolved { address: self.shown() };
        within(CONNECT, late, move || wanted.find().map_err(SetupError::Find))
    }
}

/// Describes the control plane, for messages: by its cluster if only that was given.
fn named(wanted: &ControlArguments) -> String {
    match (&wanted.master, &wanted.cluster) {
        (None, Some(cluster)) => format!("of cluster {cluster:?}"),
        _ => format!("at {}", wanted.shown()),
    }
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
