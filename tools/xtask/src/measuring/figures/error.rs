//! Errors of figures.toml, by table and key.

use std::fmt;

/// Error of the source.
#[derive(Debug)]
pub(super) enum SourceError {
    /// It is not valid TOML.
    Syntax(toml::de::Error),
    /// A table of it is wrong.
    Table {
        /// Name of the table: its kind and its id.
        name: String,
        fault: Fault,
    },
}

/// Fault of a table.
#[derive(Debug)]
pub(super) enum Fault {
    UnknownKey(String),
    /// There is no array of tables of this name.
    NoTables(String),
    /// A key is missing.
    NoText(String),
    /// The value of a key is no text.
    NotText(String),
    /// There is neither a value nor the list of this name.
    NoList(String),
    NotRow,
    NotCell,
    /// A row does not fit the columns.
    Cells {
        row: Vec<String>,
        columns: usize,
    },
    /// There are a value and rows.
    ValueAndRows,
    /// No machine has this id.
    NoMachine(String),
    /// Another figure has the same id or title.
    Twice,
    /// The section has figures elsewhere, or the name of a figure.
    Section(String),
    NotDate(String),
    /// A missed target has no note with the cause.
    NoCause,
    /// `met` is not true or false.
    NotMet,
    /// `met` is without a target.
    NoTarget,
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax(error) => error.fmt(f),
            Self::Table { name, fault } => write!(f, "{name}: {fault}"),
        }
    }
}

impl std::error::Error for SourceError {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey(key) => write!(f, "unknown key `{key}`"),
            Self::NoTables(key) => write!(f, "no `[[{key}]]`"),
            Self::NoText(key) => write!(f, "no `{key}`"),
            Self::NotText(key) => write!(f, "`{key}` is no text"),
            Self::NoList(key) => write!(f, "no value, and no list `{key}`"),
            Self::NotRow => f.write_str("a row is a list of strings"),
            Self::NotCell => f.write_str("a cell is a string of one line without `|`"),
            Self::Cells { row, columns } => write!(f, "{} cells for {columns} columns: {row:?}", row.len()),
            Self::ValueAndRows => f.write_str("value or rows"),
            Self::NoMachine(id) => write!(f, "there is no machine `{id}`"),
            Self::Twice => f.write_str("another figure has its id or its title"),
            Self::Section(section) => {
                write!(f, "section `{section}` has figures elsewhere, or the name of a figure")
            }
            Self::NotDate(text) => write!(f, "`{text}` is no date, YYYY-MM-DD"),
            Self::NoCause => f.write_str("it misses its target and has no note with the cause"),
            Self::NotMet => f.write_str("`met` is true or false"),
            Self::NoTarget => f.write_str("`met` without a target"),
        }
    }
}
