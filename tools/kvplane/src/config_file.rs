//! Settings of a process in a TOML file, whose keys are the names of its flags.
//!
//! `--config FILE` stands for the flags that the file names; a flag on the command line overrides the file. A file may
//! serve several processes of a host: keys in a table named after a command, `[node]`, are for that command only.
//!
//! ```toml
//! cluster = "blue"
//! [node]
//! pool = "64G"
//! node-id = 7
//! ssd = ["/dev/nvme0n1", "/dev/nvme1n1"]
//! ```

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{Arg, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Commands that take a file of settings.
const COMMANDS: [&str; 3] = ["dev", "control", "node"];
/// Flag that names the file.
const FLAG: &str = "--config";
/// Largest size of a file, in bytes.
const FILE_BYTES: u64 = 1 << 20;
/// Least similarity (Jaro-Winkler) of a name that is suggested for a misspelled key.
const ALIKE: f64 = 0.8;

/// Error about a file of settings.
#[derive(Debug)]
pub(crate) struct ConfigFileError {
    path: PathBuf,
    line: Option<usize>,
    reason: String,
}

impl fmt::Display for ConfigFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path.display(), self.reason),
            None => write!(f, "{}: {}", self.path.display(), self.reason),
        }
    }
}

impl std::error::Error for ConfigFileError {}

/// Flags that a file has set, so that an error about a flag can name its line.
#[derive(Debug, Default)]
pub(crate) struct FromFile {
    path: PathBuf,
    /// Names of flags, with their lines.
    lines: Vec<(String, usize)>,
}

impl FromFile {
    /// Returns file and line of the flag that an error is about, if the file has set it.
    pub(crate) fn place(&self, error: &clap::Error) -> Option<String> {
        let about = error.get(clap::error::ContextKind::InvalidArg)?.to_string();
        let named = |name: &str| {
            let rest = about.strip_prefix("--").and_then(|rest| rest.strip_prefix(name));
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-'))
        };
        let (_, line) = self.lines.iter().find(|(name, _)| named(name))?;
        Some(format!("{}:{line}", self.path.display()))
    }
}

/// Inserts the flags of the file that the command line names before those of the command line.
///
/// # Errors
/// Fails if the file cannot be read, is not TOML, or has a key that is not a flag of the command.
pub(crate) fn merge(words: &mut Vec<OsString>, program: &Command) -> Result<FromFile, ConfigFileError> {
    let name = words.get(1).and_then(|word| word.to_str()).filter(|word| COMMANDS.contains(word));
    let Some(name) = name.map(str::to_owned) else { return Ok(FromFile::default()) };
    let (Some(path), Some(command)) = (given(words), program.find_subcommand(&name)) else {
        return Ok(FromFile::default());
    };
    let text = read(&path)?;
    let file = File { path: &path, text: &text, command };
    let mut set = Vec::new();
    let table = DeTable::parse(&text).map_err(|error| file.error(error.span(), error.message().to_owned()))?;
    file.table(table.get_ref(), &name, true, &mut set)?;
    set.retain(|(flag, _, _)| !is_given(words, flag));
    let lines = set.iter().map(|(flag, line, _)| (flag.clone(), *line)).collect();
    let flags: Vec<OsString> = set.into_iter().flat_map(|(_, _, words)| words).collect();
    words.splice(2..2, flags);
    Ok(FromFile { path, lines })
}

/// Returns the file that the command line names.
fn given(words: &[OsString]) -> Option<PathBuf> {
    let mut words = words.iter().skip(2).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word == FLAG {
            return words.next().map(PathBuf::from);
        }
        if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
            return Some(path.into());
        }
    }
    None
}

fn is_given(words: &[OsString], flag: &str) -> bool {
    let named = |word: &OsStr| {
        let rest = word.to_str().and_then(|word| word.strip_prefix("--")).and_then(|word| word.strip_prefix(flag));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    };
    words.iter().skip(2).take_while(|word| *word != "--").any(|word| named(word))
}

fn read(path: &Path) -> Result<String, ConfigFileError> {
    let failed = |reason: String| ConfigFileError { path: path.to_owned(), line: None, reason };
    let about = std::fs::metadata(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    if about.len() > FILE_BYTES {
        return Err(failed(format!("has {} bytes: a file of settings has at most {FILE_BYTES}", about.len())));
    }
    std::fs::read_to_string(path).map_err(|error| failed(format!("cannot be read: {error}")))
}

/// Name of a flag, its line, and its words on the command line.
type Set = (String, usize, Vec<OsString>);

struct File<'a> {
    path: &'a Path,
    text: &'a str,
    command: &'a Command,
}

impl File<'_> {
    fn error(&self, span: Option<Range<usize>>, reason: String) -> ConfigFileError {
        let line = span.map(|span| self.line(span.start));
        ConfigFileError { path: self.path.to_owned(), line, reason }
    }

    fn line(&self, at: usize) -> usize {
        self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
    }

    fn table(&self, table: &DeTable<'_>, name: &str, top: bool, set: &mut Vec<Set>) -> Result<(), ConfigFileError> {
        for (key, value) in table {
            let (text, span) = (key.get_ref().as_ref(), key.span());
            match value.get_ref() {
                DeValue::Table(inner) if top && COMMANDS.contains(&text) => {
                    if text == name {
                        self.table(inner, name, false, set)?;
                    }
                }
                DeValue::Table(_) if top => {
                    let reason = format!("[{text}] is not a command that takes settings: {}", COMMANDS.join(", "));
                    return Err(self.error(Some(span), reason));
                }
                _ => set.push(self.flag(text, span, value)?),
            }
        }
        Ok(())
    }

    fn flag(&self, key: &str, span: Range<usize>, value: &Spanned<DeValue<'_>>) -> Result<Set, ConfigFileError> {
        let line = self.line(span.start);
        let of_name = |argument: &&Arg| argument.get_long() == Some(key) && key != "config" && key != "help";
        let Some(argument) = self.command.get_arguments().find(of_name) else {
            return Err(self.error(Some(span), self.unknown(key)));
        };
        let takes_value = argument.get_action().takes_values();
        let words = match value.get_ref() {
            DeValue::Boolean(wanted) if !takes_value => wanted.then(|| format!("--{key}").into()).into_iter().collect(),
            _ if !takes_value => return Err(self.error(Some(span), format!("{key} has to be true or false"))),
            DeValue::Array(all) => {
                let one = |value: &Spanned<DeValue<'_>>| self.plain(key, span.clone(), value);
                let all: Vec<String> = all.iter().map(one).collect::<Result<_, _>>()?;
                match argument.get_value_delimiter() {
                    Some(delimiter) => vec![word(key, &all.join(&delimiter.to_string()))],
                    None => all.iter().map(|value| word(key, value)).collect(),
                }
            }
            _ => vec![word(key, &self.plain(key, span, value)?)],
        };
        Ok((key.to_owned(), line, words))
    }

    fn plain(&self, key: &str, span: Range<usize>, value: &Spanned<DeValue<'_>>) -> Result<String, ConfigFileError> {
        match value.get_ref() {
            DeValue::String(text) => Ok(text.to_string()),
            DeValue::Integer(number) => Ok(number.to_string()),
            DeValue::Float(number) => Ok(number.to_string()),
            other => {
                let reason = format!("{key} has to be a text or a number, not a {}", other.type_str());
                Err(self.error(Some(span), reason))
            }
        }
    }

    fn unknown(&self, key: &str) -> String {
        let known = self.command.get_arguments().filter_map(Arg::get_long);
        let alike = known.map(|name| (strsim::jaro_winkler(&key.replace('_', "-"), name), name));
        let best = alike.filter(|(alike, _)| *alike > ALIKE).max_by(|a, b| a.0.total_cmp(&b.0));
        let command = self.command.get_name();
        match best {
            Some((_, name)) => format!("{key:?} is not a setting of kvplane {command}: did you mean {name:?}?"),
            None => format!("{key:?} is not a setting of kvplane {command}: kvplane {command} --help lists them"),
        }
    }
}

fn word(key: &str, value: &str) -> OsString {
    format!("--{key}={value}").into()
}
