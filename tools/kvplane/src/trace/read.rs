//! Reading a trace: Mooncake's JSON lines, one request a line.
//!
//! The reader streams and trusts nothing: a line has a length limit, a request a limit of ids, and every complaint
//! names the file and the line. Timestamps need not ascend (the file's order is the arrival order); steps back are
//! counted. Fields that are not known are skipped, since published traces carry extra ones.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{BLOCK_TOKENS, MAX_REQUESTS, MAX_TRACE_BLOCKS, Request, Trace};

/// The longest line that is read, in bytes.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// The most block ids one request may have: 33 million tokens.
pub const MAX_BLOCKS_PER_REQUEST: usize = 65_536;

/// Why a trace could not be read.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be opened.
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Reading stopped in the middle.
    Read {
        /// The file.
        path: PathBuf,
        /// The line being read, from 1.
        line: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A line that is not a request.
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        fault: LineFault,
    },
    /// The file has no requests.
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineFault {
    /// Nothing on the line.
    Blank,
    /// Longer than [`MAX_LINE_BYTES`].
    TooLong,
    /// The JSON ends before the object does.
    Torn {
        /// Bytes on the line.
        bytes: usize,
    },
    /// Not JSON, or a field is missing, of the wrong type or out of range.
    Malformed {
        /// The column, from 1.
        column: usize,
        /// The parser's words.
        reason: String,
    },
    /// `input_length` is 0.
    NoInput,
    /// More ids than [`MAX_BLOCKS_PER_REQUEST`].
    TooManyBlocks {
        /// Ids on the line.
        found: usize,
    },
    /// The number of ids does not fit the length.
    WrongBlocks {
        /// Ids on the line.
        found: usize,
        /// Ids that the length asks for.
        expected: usize,
        /// The length in tokens.
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

/// A line as it is published.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Requests of a stream of JSON lines, one by one, holding one line in memory.
///
/// After the first error the iterator ends: what follows a torn line means nothing.
#[derive(Debug)]
pub struct Lines<R> {
    source: R,
    path: PathBuf,
    buffer: Vec<u8>,
    line: u64,
    ended: bool,
}

impl<R: BufRead> Lines<R> {
    /// Reads `source`, naming it `path` in errors.
    pub fn new(source: R, path: &Path) -> Self {
        Self { source, path: path.to_owned(), buffer: Vec::new(), line: 0, ended: false }
    }

    /// The line last read, from 1; 0 before the first.
    pub const fn line(&self) -> u64 {
        self.line
    }

    /// An error at the line last read.
    fn fault(&self, fault: LineFault) -> TraceError {
        TraceError::Line { path: self.path.clone(), line: self.line, fault }
    }

    fn next_line(&mut self) -> Result<Option<Request>, TraceError> {
        self.buffer.clear();
        self.line += 1;
        // One byte over the limit tells a line of exactly the limit, with its line feed, from a longer one.
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

/// One request of one line, without its line feed.
fn parse(bytes: &[u8]) -> Result<Request, LineFault> {
    if bytes.trim_ascii().is_empty() {
        return Err(LineFault::Blank);
    }
    let line: Line = serde_json::from_slice(bytes).map_err(|error| {
        if error.is_eof() {
            return LineFault::Torn { bytes: bytes.len() };
        }
        // The parser sees one line only: its "at line 1" would contradict the number we print.
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

/// Reads the whole trace at `path`. Blocks on the file.
///
/// # Errors
/// [`TraceError`], naming the file and the line. A file without requests is an error too.
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
