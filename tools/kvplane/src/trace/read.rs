//! Reader of traces in Mooncake's format: JSON lines, one request a line.
//!
//! The reader streams and trusts nothing: a line has a length limit, a request a limit of ids, and every error names
//! the file and the line. Timestamps need not ascend (the file's order is the arrival order); steps back are counted.
//! Unknown fields are skipped, since published traces carry extra ones.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{BLOCK_TOKENS, MAX_REQUESTS, MAX_TRACE_BLOCKS, Request, Trace};

/// Length of the longest line that is read, in bytes.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Most block ids of one request: 33 million tokens.
pub const MAX_BLOCKS_PER_REQUEST: usize = 65_536;

/// Error of reading a trace.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be opened.
    Open {
        /// File that cannot be opened.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// Reading failed in the middle.
    Read {
        /// File that is read.
        path: PathBuf,
        /// Line that is read, from 1.
        line: u64,
        /// Error of the system.
        source: io::Error,
    },
    /// A line is not a request.
    Line {
        /// File that is read.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// Fault of the line.
        fault: LineFault,
    },
    /// The file has no requests.
    Empty {
        /// File without requests.
        path: PathBuf,
    },
}

/// Fault of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineFault {
    /// The line is empty.
    Blank,
    /// The line is longer than [`MAX_LINE_BYTES`].
    TooLong,
    /// The JSON ends before the object does.
    Torn {
        /// Number of bytes on the line.
        bytes: usize,
    },
    /// The line is not JSON, or a field is missing, of the wrong type or out of range.
    Malformed {
        /// Column of the error, from 1.
        column: usize,
        /// Error text of the parser.
        reason: String,
    },
    /// `input_length` is 0.
    NoInput,
    /// The line has more ids than [`MAX_BLOCKS_PER_REQUEST`].
    TooManyBlocks {
        /// Number of ids on the line.
        found: usize,
    },
    /// The number of ids does not fit the length.
    WrongBlocks {
        /// Number of ids on the line.
        found: usize,
        /// Number of ids that fits the length.
        expected: usize,
        /// Length of the prompt, in tokens.
        input_tokens: u32,
    },
    /// The trace as a whole has more than [`MAX_REQUESTS`] requests or [`MAX_TRACE_BLOCKS`] blocks.
    TraceTooLong,
}

impl fmt::Display for LineFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blank => write!(f, "the line is empty, a request is missing"),
            Self::TooLong => write!(f, "the line is longer than {MAX_LINE_BYTES} bytes"),
            Self::Torn { bytes } => write!(f, "the line is torn: its JSON stops after {bytes} bytes"),
            Self::Malformed { column, reason } => write!(f, "column {column}: {reason}"),
            Self::NoInput => write!(f, "input_length is 0, a request has at least one token"),
            Self::TooManyBlocks { found } => {
                write!(f, "{found} hash_ids, at most {MAX_BLOCKS_PER_REQUEST} are allowed")
            }
            Self::WrongBlocks { found, expected, input_tokens } => write!(
                f,
                "{found} hash_ids for input_length {input_tokens}: blocks of {BLOCK_TOKENS} tokens make {expected}"
            ),
            Self::TraceTooLong => {
                write!(f, "the trace has over {MAX_REQUESTS} requests or {MAX_TRACE_BLOCKS} blocks; cut it in parts")
            }
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { path, source } => write!(f, "cannot open trace {}: {source}", path.display()),
            Self::Read { path, line, source } => {
                write!(f, "cannot read trace {} at line {line}: {source}", path.display())
            }
            Self::Line { path, line, fault } => write!(f, "trace {}, line {line}: {fault}", path.display()),
            Self::Empty { path } => write!(f, "trace {} has no requests", path.display()),
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Open { source, .. } | Self::Read { source, .. } => Some(source),
            Self::Line { .. } | Self::Empty { .. } => None,
        }
    }
}

/// Line in the published format.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Iterator over the requests of a stream of JSON lines, holding one line in memory.
///
/// After the first error the iterator ends: lines after a torn line cannot be trusted.
#[derive(Debug)]
pub struct Lines<R> {
    source: R,
    path: PathBuf,
    buffer: Vec<u8>,
    line: u64,
    ended: bool,
}

impl<R: BufRead> Lines<R> {
    /// Reads `source`; errors name it `path`.
    pub fn new(source: R, path: &Path) -> Self {
        Self { source, path: path.to_owned(), buffer: Vec::new(), line: 0, ended: false }
    }

    /// Returns the number of the line last read, from 1; 0 before the first.
    pub const fn line(&self) -> u64 {
        self.line
    }

    /// Builds an error about the line last read.
    fn fault(&self, fault: LineFault) -> TraceError {
        TraceError::Line { path: self.path.clone(), line: self.line, fault }
    }

    fn next_line(&mut self) -> Result<Option<Request>, TraceError> {
        self.buffer.clear();
        self.line += 1;
        // One byte above the limit distinguishes a line of exactly the limit, with its line feed, from a longer one.
        let limit = MAX_LINE_BYTES as u64 + 1;
        let read = self.source.by_ref().take(limit).read_until(b'\n', &mut self.buffer);
        let bytes = read.map_err(|source| TraceError::Read { path: self.path.clone(), line: self.line, source })?;
        if bytes == 0 {
            return Ok(None);
        }
        if self.buffer.last() == Some(&b'\n') {
            self.buffer.pop();
        }
        if self.buffer.len() > MAX_LINE_BYTES {
            return Err(self.fault(LineFault::TooLong));
        }
        parse(&self.buffer).map(Some).map_err(|fault| self.fault(fault))
    }
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_line().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Parses one request from one line, without its line feed.
fn parse(bytes: &[u8]) -> Result<Request, LineFault> {
    if bytes.trim_ascii().is_empty() {
        return Err(LineFault::Blank);
    }
    let line: Line = serde_json::from_slice(bytes).map_err(|error| {
        if error.is_eof() {
            return LineFault::Torn { bytes: bytes.len() };
        }
        // The parser sees one line only: its "at line 1" would contradict the printed number.
        let words = error.to_string();
        let reason = words.split(" at line ").next().unwrap_or(&words).to_owned();
        LineFault::Malformed { column: error.column(), reason }
    })?;
    if line.input_length == 0 {
        return Err(LineFault::NoInput);
    }
    let found = line.hash_ids.len();
    if found > MAX_BLOCKS_PER_REQUEST {
        return Err(LineFault::TooManyBlocks { found });
    }
    let expected = Request::blocks_of(line.input_length);
    if found != expected {
        return Err(LineFault::WrongBlocks { found, expected, input_tokens: line.input_length });
    }
    Ok(Request {
        timestamp_ms: line.timestamp,
        input_tokens: line.input_length,
        output_tokens: line.output_length,
        blocks: line.hash_ids,
    })
}

/// Reads the whole trace at `path`; blocks on file I/O.
///
/// # Errors
/// Returns [`TraceError`] with the file and the line. A file without requests is an error too.
pub fn load(path: &Path) -> Result<Trace, TraceError> {
    let file = File::open(path).map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
    collect(BufReader::with_capacity(1 << 16, file), path)
}

fn collect<R: BufRead>(source: R, path: &Path) -> Result<Trace, TraceError> {
    let mut lines = Lines::new(source, path);
    let mut trace = Trace { label: path.display().to_string(), requests: Vec::new(), unordered: 0 };
    let mut blocks = 0u64;
    let mut last_ms = 0;
    while let Some(request) = lines.next() {
        let request = request?;
        blocks += request.blocks.len() as u64;
        if trace.requests.len() == MAX_REQUESTS || blocks > MAX_TRACE_BLOCKS {
            return Err(lines.fault(LineFault::TraceTooLong));
        }
        trace.unordered += u64::from(request.timestamp_ms < last_ms);
        last_ms = request.timestamp_ms;
        trace.requests.push(request);
    }
    if trace.requests.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    Ok(trace)
}

#[cfg(test)]
mod tests;
