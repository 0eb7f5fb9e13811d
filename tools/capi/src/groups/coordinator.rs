//! Coordinators: the control planes that worlds have, by the addresses that programs pass among their processes.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvplane::rpc::{ClusterName, RuntimeDirectory};
use kvplane::{Control, Remote};

use super::outcome::{CallFailure, ResultCode};

/// World of an address that names none.
const DEFAULT_WORLD: &str = "default";
/// Cluster of certificates, if none is named.
const DEFAULT_CLUSTER: &str = "kvplane";
/// Longest time until a started control plane is there.
const START: Duration = Duration::from_secs(30);
/// Pause before it is looked for again.
const PAUSE: Duration = Duration::from_millis(10);
/// Seconds after which a started control plane ends, if no process of its world is left.
const IDLE_S: u32 = 60;
/// Most bytes of its output that an error quotes.
const OUTPUT_BYTES: usize = 512;

/// Control planes that this process started: it reaps those that end before it.
static STARTED: Mutex<Vec<Child>> = Mutex::new(Vec::new());

/// Address of a world at a control plane: `[CLUSTER@]HOST:PORT[,HOST:PORT...][/WORLD]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CoordinatorAddress {
    cluster: Option<String>,
    addresses: String,
    world: Option<String>,
}

/// Text that is not the address of a coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParseCoordinatorError {
    text: String,
}

impl fmt::Display for ParseCoordinatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no address of a coordinator: [CLUSTER@]HOST:PORT[,HOST:PORT...][/WORLD]", self.text)
    }
}

impl std::error::Error for ParseCoordinatorError {}

impl FromStr for CoordinatorAddress {
    type Err = ParseCoordinatorError;

    fn from_str(text: &str) -> Result<Self, ParseCoordinatorError> {
        let (rest, world) = text.split_once('/').map_or((text, None), |(rest, world)| (rest, Some(world)));
        let (cluster, addresses) =
            rest.split_once('@').map_or((None, rest), |(cluster, addresses)| (Some(cluster), addresses));
        // A URL has no port before its path.
        let has_port = |one: &str| one.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if cluster == Some("") || world == Some("") || !addresses.split(',').all(has_port) {
            return Err(ParseCoordinatorError { text: text.to_owned() });
        }
        let owned = |part: Option<&str>| part.map(str::to_owned);
        Ok(Self { cluster: owned(cluster), addresses: addresses.to_owned(), world: owned(world) })
    }
}

impl fmt::Display for CoordinatorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cluster) = &self.cluster {
            write!(f, "{cluster}@")?;
        }
        write!(f, "{}/{}", self.addresses, self.world())
    }
}

/// Names in the environment that say more about a control plane than its address.
struct ControlEnvironment {
    cluster: Option<String>,
    certificates: Option<PathBuf>,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl CoordinatorAddress {
    pub(crate) fn world(&self) -> &str {
        self.world.as_deref().unwrap_or(DEFAULT_WORLD)
    }

    /// Returns the control plane of this address.
    pub(crate) fn control(&self) -> Result<Control, CallFailure> {
        let certificates = variable("KVPLANE_CERTS").map(PathBuf::from);
        self.control_by(ControlEnvironment { cluster: variable("KVPLANE_CLUSTER"), certificates })
    }

    fn control_by(&self, environment: ControlEnvironment) -> Result<Control, CallFailure> {
        let addresses = self.resolve()?;
        let is_loopback = addresses.iter().all(|address| address.ip().is_loopback());
        let local = |cluster: String| Control::Local { cluster, runtime_directory: None };
        match (self.cluster.clone(), environment.certificates) {
            // A control plane that `launch` started: certificates are those of others.
            (Some(cluster), _) if is_loopback => return Ok(local(cluster)),
            (cluster, Some(identity)) => {
                let cluster = cluster.or(environment.cluster).unwrap_or_else(|| DEFAULT_CLUSTER.to_owned());
                return Ok(Control::Remote(Remote { cluster, addresses, identity }));
            }
            _ => {}
        }
        if let Some(far) = addresses.iter().find(|address| !Control::is_of_this_host(**address)) {
            return Err(CallFailure::argument(format_args!(
                "the control plane at {far} is on another host: set KVPLANE_CERTS to the folder that `kvplane ctl \
                 cert` made"
            )));
        }
        let found = Control::published(None).map_err(|error| CallFailure::new(ResultCode::Rpc, error))?;
        let named = self.cluster.clone().or(environment.cluster);
        let matches = |(cluster, listening): &&(String, SocketAddr)| match &named {
            Some(named) => named == cluster,
            None => addresses.iter().any(|wanted| Control::is_reached_at(*wanted, *listening)),
        };
        match found.iter().find(matches) {
            Some((cluster, _)) => Ok(local(cluster.clone())),
            None => Err(CallFailure::new(
                ResultCode::Rpc,
                format_args!(
                    "this user has no control plane at {} on this host. One that mooncakePgContextLaunchCoordinator \
                     started is on the host of rank 0: for several hosts, start `kvplane control`, and set \
                     KVPLANE_CONTROL to its address for rank 0",
                    self.addresses
                ),
            )),
        }
    }

    fn resolve(&self) -> Result<Vec<SocketAddr>, CallFailure> {
        let mut all = Vec::new();
        for one in self.addresses.split(',') {
            let found = one.to_socket_addrs();
            all.extend(found.map_err(|error| CallFailure::argument(format_args!("{one:?} is no address: {error}")))?);
        }
        match all.is_empty() {
            true => Err(CallFailure::argument(format_args!("{:?} has no address", self.addresses))),
            false => Ok(all),
        }
    }
}

/// Returns the address of a new world: at the control plane that `KVPLANE_CONTROL` names, or at one that it starts.
pub(crate) fn launch() -> Result<CoordinatorAddress, CallFailure> {
    let name = format!("pg-{:016x}", RandomState::new().build_hasher().finish());
    if let Some(configured) = variable("KVPLANE_CONTROL") {
        let configured: CoordinatorAddress = configured.parse().map_err(CallFailure::argument)?;
        return Ok(CoordinatorAddress { world: configured.world.or(Some(name)), ..configured });
    }
    let listening = start(&name)?;
    Ok(CoordinatorAddress { cluster: Some(name.clone()), addresses: listening.to_string(), world: Some(name) })
}

/// Makes a file without a name.
fn nameless_file(name: &str) -> io::Result<File> {
    let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
    // Appended lines do not move the place where it is read.
    let file = OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// Returns the end of what a program has written.
fn last_output(file: &File) -> String {
    let mut bytes = [0; OUTPUT_BYTES];
    let from = file.metadata().map_or(0, |about| about.len().saturating_sub(OUTPUT_BYTES as u64));
    let read = file.read_at(&mut bytes, from).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).trim().to_owned()
}

/// Starts a control plane of this name on loopback, and returns its address. It is a process of its own, which outlives
/// this one and signals to its terminal, keeps its state in memory, and ends when no process of a world is left.
fn start(name: &str) -> Result<SocketAddr, CallFailure> {
    let failed = |text: String| CallFailure::new(ResultCode::System, text);
    let program = variable("KVPLANE_BINARY").unwrap_or_else(|| "kvplane".to_owned());
    let cluster = ClusterName::new(name).map_err(|error| failed(error.to_string()))?;
    let directory = RuntimeDirectory::of_user().map_err(|error| failed(error.to_string()))?;
    let unusable = |error: io::Error| failed(format!("a file for the output of {program}: {error}"));
    let output = nameless_file(name).map_err(unusable)?;
    let mut command = Command::new(&program);
    command.args(["control", "--cluster", name, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
    command.args(["--stop-when-idle", &IDLE_S.to_string()]);
    command.stdin(Stdio::null()).process_group(0);
    command.stdout(output.try_clone().map_err(unusable)?).stderr(output.try_clone().map_err(unusable)?);
    let mut child = command.spawn().map_err(|error| {
        failed(format!(
            "the program {program:?} for the coordinator was not started: {error}; set KVPLANE_BINARY, or \
             KVPLANE_CONTROL to a control plane"
        ))
    })?;
    let until = Instant::now() + START;
    loop {
        if let Ok(local) = directory.discover(&cluster) {
            let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
            started.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
            started.push(child);
            return Ok(local.control);
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(failed(format!("{program} control ended with {status}: {}", last_output(&output))));
        }
        if Instant::now() >= until {
            // It may have ended meanwhile.
            drop((child.kill(), child.wait()));
            let seconds = START.as_secs();
            return Err(failed(format!(
                "{program} control was not there within {seconds} s: {}",
                last_output(&output)
            )));
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> CoordinatorAddress {
        text.parse().expect("an address")
    }

    #[test]
    fn addresses_are_what_was_written() {
        for text in ["pg-1@127.0.0.1:5000/pg-1", "10.0.0.1:1,10.0.0.2:2/a/b", "[::1]:7/default"] {
            assert_eq!(address(text).to_string(), text);
        }
        assert_eq!(address("host:1").to_string(), "host:1/default");
        assert_eq!((address("c@host:1/w").cluster.as_deref(), address("c@host:1/w").world()), (Some("c"), "w"));
        for text in ["", "/w", "host", "@host:1", "host:1/", "host:1,other", "http://host:1"] {
            assert!(text.parse::<CoordinatorAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn control_planes_elsewhere_need_certificates() {
        let by = |text, cluster: Option<&str>, certificates: Option<&str>| {
            let (cluster, certificates) = (cluster.map(str::to_owned), certificates.map(PathBuf::from));
            address(text).control_by(ControlEnvironment { cluster, certificates })
        };
        match by("192.0.2.1:5000/w", Some("prod"), Some("/certs")).expect("remote") {
            Control::Remote(Remote { cluster, addresses, identity }) => {
                assert_eq!((cluster.as_str(), identity), ("prod", PathBuf::from("/certs")));
                assert_eq!(addresses, [SocketAddr::from(([192, 0, 2, 1], 5000))]);
            }
            other => panic!("{other:?}"),
        }
        // A launched control plane is found by its name, whatever certificates there are.
        let launched = by("pg-1@127.0.0.1:5000/pg-1", Some("prod"), Some("/certs")).expect("local");
        assert!(matches!(launched, Control::Local { cluster, .. } if cluster == "pg-1"));
        let failure = by("192.0.2.1:5000", None, None).expect_err("another host");
        assert!(failure.text.contains("KVPLANE_CERTS"), "{}", failure.text);
        assert!(by("no such host:1", None, None).is_err());
    }
}
