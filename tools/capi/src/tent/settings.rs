//! Settings of TENT's interface: texts by keys such as `transports/tcp/enable`, and the engine configuration that they
//! stand for.
//!
//! A thread collects settings with `tent_set_config` and `tent_load_config_from_file`, and each engine that it creates
//! gets them. The environment variable `MC_TENT_CONF` has precedence, but for the settings that make up the identity of
//! an engine.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

use kvplane::{Environment, OwnAddress, RdmaConfig, RdmaUse, TransferEngineConfig};
use serde_json::Value;

/// Longest key.
pub(super) const KEY_BYTES: usize = 256;
/// Longest value, and longest file.
pub(super) const VALUE_BYTES: usize = 1 << 20;
/// Longest path of a file.
pub(super) const PATH_BYTES: usize = 4096;
/// Maximum number of settings of a thread.
const SETTINGS: usize = 1024;

const METADATA_TYPE: &str = "metadata_type";
const METADATA_SERVERS: &str = "metadata_servers";
const SEGMENT_NAME: &str = "local_segment_name";
const HOST: &str = "rpc_server_hostname";
const PORT: &str = "rpc_server_port";
const TCP: &str = "transports/tcp/enable";
const SHM: &str = "transports/shm/enable";
const RDMA: &str = "transports/rdma/enable";
const IO_URING: &str = "transports/io_uring/enable";
const DEVICES: &str = "topology/rdma_whitelist";
const EXCLUDED_DEVICES: &str = "topology/rdma_blacklist";
const MATRIX: &str = "topology/priority_matrix";
const MATRIX_FILE: &str = "topology/custom_json_path";

/// Settings in which the program has precedence over the environment.
const IDENTITY: [&str; 5] = [METADATA_TYPE, METADATA_SERVERS, SEGMENT_NAME, HOST, PORT];
/// Settings with a meaning here.
const KNOWN: [&str; 13] = [
    METADATA_TYPE,
    METADATA_SERVERS,
    SEGMENT_NAME,
    HOST,
    PORT,
    TCP,
    SHM,
    RDMA,
    IO_URING,
    DEVICES,
    EXCLUDED_DEVICES,
    MATRIX,
    MATRIX_FILE,
];

/// Error of a setting: no engine is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SettingsError {
    /// A key, a value or a path is null, too long or not UTF-8.
    Text { what: &'static str, most: usize },
    /// The thread has too many settings.
    TooMany,
    /// The file is not readable.
    File { path: String, why: String },
    /// The text is not an object of JSON.
    Malformed { source: String, why: String },
    /// The value does not fit the setting.
    Value { key: &'static str, value: String, expected: &'static str },
    /// A variable of the environment is invalid.
    Environment(String),
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text { what, most } => write!(f, "the {what} is null, longer than {most} bytes, or not UTF-8"),
            Self::TooMany => write!(f, "a thread may have {SETTINGS} settings"),
            Self::File { path, why } => write!(f, "{path}: {why}"),
            Self::Malformed { source, why } => write!(f, "{source} is not an object of JSON: {why}"),
            Self::Value { key, value, expected } => write!(f, "the setting {key} is {value}, not {expected}"),
            Self::Environment(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for SettingsError {}

/// Values by their keys.
pub(super) type Values = BTreeMap<String, Value>;

/// Settings that a thread has collected.
#[derive(Default)]
pub(super) struct ThreadSettings {
    values: Values,
    file: Option<String>,
    /// Error of a call that could not return it; the next engine is not created.
    error: Option<SettingsError>,
}

impl ThreadSettings {
    pub(super) const fn new() -> Self {
        Self { values: BTreeMap::new(), file: None, error: None }
    }

    /// Sets a value; it replaces an earlier one, and that of the file.
    pub(super) fn set(&mut self, key: &str, value: &str) {
        if self.values.len() >= SETTINGS && !self.values.contains_key(key) {
            self.fail(SettingsError::TooMany);
            return;
        }
        self.values.insert(key.to_owned(), Value::String(value.to_owned()));
    }

    /// Names the file to be read by the next engines; an empty path names none.
    pub(super) fn load_from(&mut self, file: &str) {
        self.file = Some(file.to_owned()).filter(|file| !file.is_empty());
    }

    /// Remembers the error of a call that returns none.
    pub(super) fn fail(&mut self, error: SettingsError) {
        self.error.get_or_insert(error);
    }

    /// Returns the values, those of the file included.
    ///
    /// # Errors
    /// The error of an earlier call, once, and that of an unusable file.
    pub(super) fn values(&mut self) -> Result<Values, SettingsError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let mut values = self.file.as_deref().map(read).transpose()?.unwrap_or_default();
        values.extend(self.values.clone());
        Ok(values)
    }
}

/// Reads settings: JSON, or the path of a file with JSON.
///
/// # Errors
/// When the file is not readable or too long, or the text is no object of JSON.
pub(super) fn read(source: &str) -> Result<Values, SettingsError> {
    if source.trim_start().starts_with('{') {
        return decode("the text", source);
    }
    let failed = |why: String| SettingsError::File { path: source.to_owned(), why };
    let path = Path::new(source);
    // Opening a pipe would wait for its other end.
    if !path.metadata().map_err(|error| failed(error.to_string()))?.is_file() {
        return Err(failed("it is not a regular file".to_owned()));
    }
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let mut text = String::new();
    file.take(VALUE_BYTES as u64 + 1).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    if text.len() > VALUE_BYTES {
        return Err(failed(format!("it is longer than {VALUE_BYTES} bytes")));
    }
    decode(source, &text)
}

fn decode(source: &str, text: &str) -> Result<Values, SettingsError> {
    let failed = |why: String| SettingsError::Malformed { source: source.to_owned(), why };
    let parsed: Value = serde_json::from_str(text).map_err(|error| failed(error.to_string()))?;
    if !parsed.is_object() {
        return Err(failed("it is another value".to_owned()));
    }
    let mut values = Values::new();
    flatten("", parsed, &mut values);
    Ok(values)
}

/// Adds the values of an object, with the paths to them as keys.
fn flatten(key: &str, value: Value, out: &mut Values) {
    match value {
        Value::Object(members) if key != MATRIX => {
            for (name, value) in members {
                let key = if key.is_empty() { name } else { format!("{key}/{name}") };
                flatten(&key, value, out);
            }
        }
        Value::Null => {}
        value => drop(out.insert(key.to_owned(), value)),
    }
}

/// Returns the settings of the program, overridden by those of the environment where that has precedence.
pub(super) fn combine(mut program: Values, environment: Values) -> Values {
    for (key, value) in environment {
        if !IDENTITY.contains(&key.as_str()) || !program.contains_key(&key) {
            program.insert(key, value);
        }
    }
    program
}

/// Returns the keys without a meaning here; a transport that is not here may be switched off.
pub(super) fn without_effect(values: &Values) -> Vec<&str> {
    let off = |key: &str, value: &Value| {
        key.starts_with("transports/") && key.ends_with("/enable") && boolean("", value) == Ok(false)
    };
    let unknown = values.iter().filter(|(key, value)| !KNOWN.contains(&key.as_str()) && !off(key, value));
    unknown.map(|(key, _)| key.as_str()).collect()
}

/// Returns the engine configuration that settings stand for.
///
/// # Errors
/// When a value does not fit its setting.
pub(super) fn engine_config(values: &Values, environment: Environment) -> Result<TransferEngineConfig, SettingsError> {
    if let Some(value) = values.get(EXCLUDED_DEVICES).filter(|value| !names(value).is_empty()) {
        let expected = "empty: name the devices to use in topology/rdma_whitelist";
        return Err(SettingsError::Value { key: EXCLUDED_DEVICES, value: value.to_string(), expected });
    }
    let metadata = metadata(&text(values, METADATA_TYPE)?, &text(values, METADATA_SERVERS)?)?;
    let (host, port) = (text(values, HOST)?, port(values)?);
    let name = Some(text(values, SEGMENT_NAME)?).filter(|name| !name.is_empty() && metadata != P2P);
    let rdma = RdmaConfig {
        mode: if enabled(values, RDMA, true)? { RdmaUse::Auto } else { RdmaUse::Never },
        filters: values.get(DEVICES).map(names).unwrap_or_default(),
        matrix: matrix(values)?,
        ..RdmaConfig::default()
    };
    let OwnAddress { listen, announce, .. } = OwnAddress::resolve(&host, environment.bind);
    Ok(TransferEngineConfig {
        listen: SocketAddr::new(listen, port),
        open_to_network: !listen.is_loopback(),
        announce,
        metadata,
        name,
        environment,
        tcp: enabled(values, TCP, true)?,
        shared_memory: enabled(values, SHM, true)?,
        rdma,
        // Names of segments often come from other machines.
        files: enabled(values, IO_URING, false)?,
        ..TransferEngineConfig::default()
    })
}

/// Metadata of engines that find each other by their addresses.
const P2P: &str = "P2PHANDSHAKE";

fn metadata(kind: &str, servers: &str) -> Result<String, SettingsError> {
    match kind {
        "" | "p2p" => Ok(P2P.to_owned()),
        "etcd" | "redis" | "http" if servers.contains("://") => Ok(servers.to_owned()),
        "etcd" | "redis" | "http" => Ok(format!("{kind}://{servers}")),
        _ => {
            let expected = "p2p, etcd, redis or http";
            Err(SettingsError::Value { key: METADATA_TYPE, value: kind.to_owned(), expected })
        }
    }
}

fn matrix(values: &Values) -> Result<Option<String>, SettingsError> {
    let inline = match values.get(MATRIX) {
        Some(Value::Object(members)) => Some(Value::Object(members.clone()).to_string()),
        Some(Value::String(text)) => Some(text.clone()).filter(|text| !text.is_empty()),
        Some(value) => {
            let expected = "an object";
            return Err(SettingsError::Value { key: MATRIX, value: value.to_string(), expected });
        }
        None => None,
    };
    let file = Some(text(values, MATRIX_FILE)?).filter(|path| !path.is_empty());
    Ok(inline.or(file))
}

fn port(values: &Values) -> Result<u16, SettingsError> {
    let Some(value) = values.get(PORT) else { return Ok(0) };
    let number = match value {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    let port = number.and_then(|number| u16::try_from(number).ok());
    port.ok_or_else(|| SettingsError::Value { key: PORT, value: value.to_string(), expected: "a port up to 65535" })
}

/// Returns a text; empty if the setting is not made.
fn text(values: &Values, key: &'static str) -> Result<String, SettingsError> {
    match values.get(key) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.trim().to_owned()),
        Some(value) => Err(SettingsError::Value { key, value: value.to_string(), expected: "a text" }),
    }
}

fn enabled(values: &Values, key: &'static str, default: bool) -> Result<bool, SettingsError> {
    values.get(key).map_or(Ok(default), |value| boolean(key, value))
}

fn boolean(key: &'static str, value: &Value) -> Result<bool, SettingsError> {
    let found = match value {
        Value::Bool(value) => Some(*value),
        Value::String(text) if text.eq_ignore_ascii_case("true") => Some(true),
        Value::String(text) if text.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    };
    found.ok_or_else(|| SettingsError::Value { key, value: value.to_string(), expected: "true or false" })
}

/// Returns a list of names: an array, or a text with commas.
fn names(value: &Value) -> Vec<String> {
    let trimmed = |names: &mut dyn Iterator<Item = &str>| -> Vec<String> {
        names.map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    match value {
        Value::Array(items) => trimmed(&mut items.iter().filter_map(Value::as_str)),
        Value::String(text) => trimmed(&mut text.split(',')),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<TransferEngineConfig, SettingsError> {
        engine_config(&read(text)?, Environment::default())
    }

    #[test]
    fn settings_become_an_engine_configuration() {
        let found = config("{}").expect("defaults");
        assert_eq!((found.listen, found.open_to_network), (([127, 0, 0, 1], 0).into(), false));
        assert_eq!((found.metadata.as_str(), found.name), ("P2PHANDSHAKE", None));
        assert!(found.tcp && found.shared_memory && found.rdma.mode == RdmaUse::Auto && !found.files);

        let found = config(
            r#"{"metadata_type": "http", "metadata_servers": "http://127.0.0.1:8080/metadata",
                "rpc_server_port": "17000", "rpc_server_hostname": "127.0.0.1", "local_segment_name": "prefill",
                "transports/shm/enable": "False",
                "transports": {"tcp": {"enable": true}, "rdma": {"enable": false}, "io_uring": {"enable": true}},
                "topology": {"rdma_whitelist": ["mlx5_1", "mlx5_0"],
                             "priority_matrix": {"cpu:0": [["mlx5_1"], ["mlx5_0"]]}}}"#,
        )
        .expect("settings");
        assert_eq!(
            (found.metadata.as_str(), found.name.as_deref()),
            ("http://127.0.0.1:8080/metadata", Some("prefill"))
        );
        assert_eq!(found.listen, ([127, 0, 0, 1], 17000).into());
        assert!(found.tcp && !found.shared_memory && found.rdma.mode == RdmaUse::Never && found.files);
        assert_eq!(found.rdma.filters, ["mlx5_1", "mlx5_0"]);
        assert_eq!(found.rdma.matrix.as_deref(), Some(r#"{"cpu:0":[["mlx5_1"],["mlx5_0"]]}"#));

        let found = config(r#"{"metadata_type": "etcd", "metadata_servers": "a:2379;b:2379"}"#).expect("settings");
        assert_eq!(found.metadata, "etcd://a:2379;b:2379");
    }

    #[test]
    fn wrong_values_are_named() {
        for (text, key) in [
            (r#"{"metadata_type": "zookeeper"}"#, METADATA_TYPE),
            (r#"{"rpc_server_port": 65536}"#, PORT),
            (r#"{"rpc_server_port": true}"#, PORT),
            (r#"{"transports": {"tcp": {"enable": "yes"}}}"#, TCP),
            (r#"{"topology": {"rdma_blacklist": "mlx5_0"}}"#, EXCLUDED_DEVICES),
            (r#"{"topology": {"priority_matrix": 1}}"#, MATRIX),
            (r#"{"local_segment_name": 7}"#, SEGMENT_NAME),
        ] {
            let SettingsError::Value { key: found, .. } = config(text).expect_err(text) else { panic!("{text}") };
            assert_eq!(found, key, "{text}");
        }
        assert!(matches!(config("{"), Err(SettingsError::Malformed { .. })));
        assert!(matches!(config("/no/such/file"), Err(SettingsError::File { .. })));
        assert!(matches!(config("/"), Err(SettingsError::File { .. })));
    }

    #[test]
    fn the_environment_has_precedence_but_for_the_identity() {
        let program = read(r#"{"rpc_server_port": 1, "transports": {"tcp": {"enable": true}}}"#).expect("settings");
        let shared = r#"{"rpc_server_port": 2, "rpc_server_hostname": "h", "transports": {"tcp": {"enable": false}}}"#;
        let found = combine(program, read(shared).expect("settings"));
        assert_eq!(found[PORT], 1);
        assert_eq!(found[HOST], "h");
        assert_eq!(found[TCP], false);
    }

    #[test]
    fn settings_without_effect_are_listed() {
        let text = r#"{"log_level": "info", "transports": {"gds": {"enable": false}, "mnnvl": {"enable": true}},
                       "transports/rdma/workers/num_workers": 4, "rpc_server_port": 0}"#;
        let values = read(text).expect("settings");
        let found = without_effect(&values);
        assert_eq!(found, ["log_level", "transports/mnnvl/enable", "transports/rdma/workers/num_workers"]);
    }

    #[test]
    fn an_error_of_a_call_without_a_result_is_that_of_the_next_engine_only() {
        let mut settings = ThreadSettings::new();
        settings.set("rpc_server_port", "1");
        settings.load_from(r#"{"rpc_server_port": 2, "rpc_server_hostname": "h"}"#);
        settings.fail(SettingsError::TooMany);
        assert_eq!(settings.values(), Err(SettingsError::TooMany));
        let values = settings.values().expect("the error was returned");
        assert_eq!((&values[PORT], &values[HOST]), (&Value::from("1"), &Value::from("h")));
        (0..SETTINGS).for_each(|number| settings.set(&number.to_string(), ""));
        assert_eq!(settings.values(), Err(SettingsError::TooMany));
        settings.load_from("");
        assert_eq!(settings.values().expect("the error was returned").len(), SETTINGS);
    }
}
