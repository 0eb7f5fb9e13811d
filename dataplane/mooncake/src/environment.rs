//! Environment variables of Mooncake that this crate supports.
//!
//! | variable | meaning |
//! |---|---|
//! | `MC_MIN_RPC_PORT`, `MC_MAX_RPC_PORT` | range of the handshake port; also misspelt `PRC` |
//! | `MC_HANDSHAKE_MAX_LENGTH` | longest handshake message in bytes, 1 MiB to 128 MiB |
//! | `MC_HANDSHAKE_CONNECT_TIMEOUT` | deadline of a whole call to a peer, in seconds |
//! | `MC_TCP_BIND_ADDRESS` | the IP address to listen on and to announce |
//! | `MC_METADATA_CLUSTER_ID` | a prefix of all keys in central metadata |
//! | `MC_TE_FILTERS` | the RDMA devices that may be used, separated by commas |
//! | `MC_CUSTOM_TOPO_JSON` | a file with the matrix of RDMA devices and memory locations |
//! | `MC_NUM_QP_PER_EP` | queue pairs of an RDMA connection with a stock engine, which must have as many: 1 to 16, 2 |
//! | `MC_REDIS_USERNAME`, `MC_REDIS_PASSWORD`, `MC_REDIS_DB_INDEX` | for `redis://` |
//!
//! An invalid value is an error, whereas a stock engine continues with its default.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Default, and least value, of the longest handshake message.
pub(crate) const DEFAULT_MESSAGE_BYTES: usize = 1 << 20;
/// Greatest value of the longest handshake message.
pub(crate) const MAX_MESSAGE_BYTES: usize = 128 << 20;
/// Default range of the handshake port.
pub(crate) const DEFAULT_PORTS: RangeInclusive<u16> = 15_000..=17_000;
/// Default deadline of a call to a peer.
pub(crate) const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Default and greatest number of queue pairs of an RDMA connection.
const DEFAULT_QUEUE_PAIRS: usize = 2;
const MAX_QUEUE_PAIRS: u64 = 16;

/// Settings from the environment.
#[derive(Clone, PartialEq, Eq)]
pub struct Environment {
    /// Range of the handshake port.
    pub ports: RangeInclusive<u16>,
    /// Longest handshake message.
    pub max_message_bytes: usize,
    /// Deadline of a whole call to a peer.
    pub call_timeout: Duration,
    /// Address to listen on and to announce, if one is set.
    pub bind: Option<IpAddr>,
    /// Prefix of all keys in central metadata; empty for none.
    pub cluster: String,
    /// RDMA devices that may be used; empty for all.
    pub device_filters: Vec<String>,
    /// Path of a matrix of RDMA devices; `None` to use the machine's topology.
    pub rail_matrix: Option<String>,
    /// Queue pairs of an RDMA connection with a stock engine.
    pub queue_pairs: usize,
    /// User for redis; empty for none.
    pub redis_username: String,
    /// Password for redis; empty for none.
    pub redis_password: String,
    /// Database number of redis.
    pub redis_database: u8,
}

/// Error of a variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableError {
    variable: &'static str,
    value: String,
    expected: String,
}

impl fmt::Display for VariableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { variable, value, expected } = self;
        write!(f, "the environment variable {variable} is {value:?}, not {expected}")
    }
}

impl std::error::Error for VariableError {}

impl Default for Environment {
    fn default() -> Self {
        Self {
            ports: DEFAULT_PORTS,
            max_message_bytes: DEFAULT_MESSAGE_BYTES,
            call_timeout: DEFAULT_CALL_TIMEOUT,
            bind: None,
            cluster: String::new(),
            device_filters: Vec::new(),
            rail_matrix: None,
            queue_pairs: DEFAULT_QUEUE_PAIRS,
            redis_username: String::new(),
            redis_password: String::new(),
            redis_database: 0,
        }
    }
}

impl Environment {
    /// Reads the settings of this process.
    ///
    /// # Errors
    /// See [`VariableError`].
    pub fn of_process() -> Result<Self, VariableError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads the settings that `lookup` returns; an empty value counts as unset.
    ///
    /// # Errors
    /// See [`VariableError`].
    pub fn from_variables(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, VariableError> {
        let find = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let mut settings = Self::default();
        let port = |name: &'static str, misspelt: &'static str, default: u16| {
            let found = find(name).map(|value| (name, value)).or_else(|| find(misspelt).map(|value| (misspelt, value)));
            match found {
                None => Ok(default),
                Some((name, value)) => number(name, &value, 1..=u64::from(u16::MAX)).map(|port| port as u16),
            }
        };
        let first = port("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT", *DEFAULT_PORTS.start())?;
        let last = port("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT", *DEFAULT_PORTS.end())?;
        if first > last {
            let expected = format!("{first} or more, the first port");
            return Err(VariableError { variable: "MC_MAX_RPC_PORT", value: last.to_string(), expected });
        }
        settings.ports = first..=last;
        if let Some(value) = find("MC_HANDSHAKE_MAX_LENGTH") {
            let range = DEFAULT_MESSAGE_BYTES as u64..=MAX_MESSAGE_BYTES as u64;
            settings.max_message_bytes = number("MC_HANDSHAKE_MAX_LENGTH", &value, range)? as usize;
        }
        if let Some(value) = find("MC_HANDSHAKE_CONNECT_TIMEOUT") {
            let seconds = number("MC_HANDSHAKE_CONNECT_TIMEOUT", &value, 1..=3600)?;
            settings.call_timeout = Duration::from_secs(seconds);
        }
        if let Some(value) = find("MC_TCP_BIND_ADDRESS") {
            let ip = value.parse().map_err(|_| VariableError {
                variable: "MC_TCP_BIND_ADDRESS",
                value: value.clone(),
                expected: "an IP address".to_owned(),
            })?;
            settings.bind = Some(ip);
        }
        settings.cluster = find("MC_METADATA_CLUSTER_ID").unwrap_or_default();
        let filters = find("MC_TE_FILTERS").unwrap_or_default();
        let names = filters.split(',').map(str::trim).filter(|name| !name.is_empty());
        settings.device_filters = names.map(str::to_owned).collect();
        settings.rail_matrix = find("MC_CUSTOM_TOPO_JSON");
        if let Some(value) = find("MC_NUM_QP_PER_EP") {
            settings.queue_pairs = number("MC_NUM_QP_PER_EP", &value, 1..=MAX_QUEUE_PAIRS)? as usize;
        }
        settings.redis_username = find("MC_REDIS_USERNAME").unwrap_or_default();
        settings.redis_password = find("MC_REDIS_PASSWORD").unwrap_or_default();
        if let Some(value) = find("MC_REDIS_DB_INDEX") {
            settings.redis_database = number("MC_REDIS_DB_INDEX", &value, 0..=255)? as u8;
        }
        Ok(settings)
    }
}

fn number(variable: &'static str, value: &str, range: RangeInclusive<u64>) -> Result<u64, VariableError> {
    value.trim().parse().ok().filter(|number| range.contains(number)).ok_or_else(|| VariableError {
        variable,
        value: value.to_owned(),
        expected: format!("a number from {} to {}", range.start(), range.end()),
    })
}

impl fmt::Debug for Environment {
    // Not derived: the password must not reach logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment")
            .field("ports", &self.ports)
            .field("max_message_bytes", &self.max_message_bytes)
            .field("call_timeout", &self.call_timeout)
            .field("bind", &self.bind)
            .field("cluster", &self.cluster)
            .field("device_filters", &self.device_filters)
            .field("rail_matrix", &self.rail_matrix)
            .field("queue_pairs", &self.queue_pairs)
            .field("redis_database", &self.redis_database)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, VariableError> {
        Environment::from_variables(|name| {
            variables.iter().find(|(found, _)| *found == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn unset_variables_mean_the_defaults() {
        assert_eq!(read(&[]).expect("defaults"), Environment::default());
        assert_eq!(read(&[("MC_TCP_BIND_ADDRESS", "")]).expect("defaults"), Environment::default());
    }

    #[test]
    fn variables_that_are_set_take_effect() {
        let settings = read(&[
            ("MC_MIN_PRC_PORT", "20000"),
            ("MC_MAX_RPC_PORT", "20001"),
            ("MC_HANDSHAKE_MAX_LENGTH", "2097152"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "2"),
            ("MC_TCP_BIND_ADDRESS", "::1"),
            ("MC_METADATA_CLUSTER_ID", "blue"),
            ("MC_TE_FILTERS", "mlx5_1, mlx5_0,"),
            ("MC_CUSTOM_TOPO_JSON", "/etc/rails.json"),
            ("MC_NUM_QP_PER_EP", "4"),
            ("MC_REDIS_PASSWORD", "hush"),
            ("MC_REDIS_DB_INDEX", "3"),
        ])
        .expect("good values");
        assert_eq!(settings.ports, 20_000..=20_001);
        assert_eq!((settings.max_message_bytes, settings.call_timeout), (2 << 20, Duration::from_secs(2)));
        assert_eq!(settings.bind, Some("::1".parse().expect("an address")));
        assert_eq!(settings.rail_matrix.as_deref(), Some("/etc/rails.json"));
        assert_eq!((settings.device_filters.join(" ").as_str(), settings.queue_pairs), ("mlx5_1 mlx5_0", 4));
        assert_eq!((settings.cluster.as_str(), settings.redis_database), ("blue", 3));
        assert!(!format!("{settings:?}").contains("hush"));
    }

    #[test]
    fn invalid_variables_are_named() {
        for (name, value) in [
            ("MC_MIN_RPC_PORT", "0"),
            ("MC_MIN_RPC_PORT", "17001"),
            ("MC_MAX_RPC_PORT", "many"),
            ("MC_HANDSHAKE_MAX_LENGTH", "1000"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "-1"),
            ("MC_TCP_BIND_ADDRESS", "eth0"),
            ("MC_REDIS_DB_INDEX", "256"),
            ("MC_NUM_QP_PER_EP", "17"),
        ] {
            let error = read(&[(name, value)]).expect_err(name).to_string();
            assert!(error.contains("RPC_PORT") || error.contains(name), "{error}");
            assert!(error.contains(value), "{error}");
        }
    }
}
