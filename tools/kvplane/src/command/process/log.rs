//! Log of a process on standard error: events of the process and the cluster, as text or as JSON.

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::command::Failure;

/// Environment variable that sets the log level where no flag does.
const VARIABLE: &str = "KVPLANE_LOG";

/// Log level.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Level {
    /// No log.
    Off,
    /// Failures that end the process or a part of it.
    Error,
    /// Conditions that need an operator's attention.
    Warn,
    /// Changes of members, cluster maps and leadership.
    Info,
    /// Rejected connections and other frequent events.
    Debug,
}

/// Format of a log line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    /// Time, level, source, message and fields.
    Text,
    /// One JSON object a line.
    Json,
}

/// Settings of the log.
#[derive(Args, Clone, Copy)]
pub(crate) struct Log {
    /// Level of the log on standard error. Default: the environment variable KVPLANE_LOG, else info (warn for kvplane
    /// dev).
    #[arg(long, value_enum, value_name = "LEVEL")]
    log: Option<Level>,
    /// Format of a log line.
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    log_format: Format,
}

impl Log {
    /// Starts logging for kvplane's crates; dependencies do not log.
    pub(crate) fn begin(self, otherwise: Level) -> Result<(), Failure> {
        let level = match (self.log, std::env::var(VARIABLE)) {
            (Some(level), _) => level,
            (None, Ok(text)) => Level::from_str(&text, true)
                .map_err(|_| format!("{VARIABLE}={text:?} is not a log level: use off, error, warn, info or debug"))?,
            (None, Err(_)) => otherwise,
        };
        let level = match level {
            Level::Off => LevelFilter::OFF,
            Level::Error => LevelFilter::ERROR,
            Level::Warn => LevelFilter::WARN,
            Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
        };
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
        let registry = tracing_subscriber::registry().with(Targets::new().with_target("kvplane", level));
        match self.log_format {
            Format::Text => registry.with(lines).try_init(),
            Format::Json => registry.with(lines.json().flatten_event(true)).try_init(),
        }
        .map_err(|error| format!("the log cannot be started: {error}").into())
    }
}
