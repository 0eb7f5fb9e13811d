//! The log of a process: what happens to it and to the cluster, on standard error, as text or as JSON.

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::command::Failure;

/// The variable that says how much is logged, where no flag does.
const VARIABLE: &str = "KVPLANE_LOG";

/// How much is logged.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Level {
    /// Nothing.
    Off,
    /// What ends a process, or a part of it.
    Error,
    /// What an operator should look at.
    Warn,
    /// What changes: members, maps, who leads.
    Info,
    /// What is sent away, and more that happens often.
    Debug,
}

/// How a line of the log looks.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    /// Time, level, where from, message and fields.
    Text,
    /// One object a line.
    Json,
}

/// What is logged.
#[derive(Args, Clone, Copy)]
pub(crate) struct Log {
    /// How much is logged to standard error; without it, what the variable KVPLANE_LOG says, else info, and with
    /// kvplane dev warn.
    #[arg(long, value_enum, value_name = "LEVEL")]
    log: Option<Level>,
    /// How a line of the log looks.
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    log_format: Format,
}

impl Log {
    /// Begins to log: of this project's crates, not of those it is made with.
    pub(crate) fn begin(self, otherwise: Level) -> Result<(), Failure> {
        let level = match (self.log, std::env::var(VARIABLE)) {
            (Some(level), _) => level,
            (None, Ok(text)) => Level::from_str(&text, true)
                .map_err(|_| format!("{VARIABLE}={text:?} is no level: off, error, warn, info or debug"))?,
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
        .map_err(|error| format!("the log cannot begin: {error}").into())
    }
}
