//! Metadata in redis: `GET`, `SET` and `DEL` over its protocol (RESP 2), with `AUTH` and `SELECT` before them.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

use super::{MetadataStore, NotText, StoreError, excerpt, text};
use crate::environment::Environment;
use crate::names::Peer;
use crate::timed::{Stage, TimedStream};

/// Longest line of an answer; values are not lines.
const LINE_BYTES: u64 = 4096;

/// Client of one redis server.
pub(crate) struct Redis {
    peer: Peer,
    timeout: Duration,
    username: String,
    password: String,
    database: u8,
    max_bytes: usize,
}

impl fmt::Debug for Redis {
    // Not derived: the password must not reach logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("peer", &self.peer).field("database", &self.database).finish_non_exhaustive()
    }
}

/// Answer of the server.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Simple(String),
    Number(i64),
    Value(Option<Vec<u8>>),
}

/// Failure of a command.
#[derive(Debug)]
enum CommandError {
    /// The server cannot be reached in time.
    Connect { stage: Stage, source: io::Error },
    /// The connection failed.
    Lost(io::Error),
    /// A setup command failed.
    Setup { command: String, error: Box<Self> },
    /// The answer is not one of redis' protocol.
    NotRedis {
        /// Beginning of the line.
        line: String,
    },
    /// The server refused, with this text.
    Refused(String),
    /// The value is longer than allowed.
    TooLong { bytes: usize, max_bytes: usize },
    /// The connection ended within the value.
    CutOff { read_bytes: usize, bytes: usize },
    /// The value is no text.
    NotText(NotText),
    /// The answer is not of the kind that the command has.
    OtherAnswer { answer: Answer, command: &'static str },
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { stage, source } => write!(f, "{stage}: {source}"),
            Self::Lost(error) => error.fmt(f),
            Self::Setup { command, error } => write!(f, "{command}: {error}"),
            Self::NotRedis { line } => write!(f, "it does not answer as redis does: {line:?}"),
            Self::Refused(text) => f.write_str(text),
            Self::TooLong { bytes, max_bytes } => {
                write!(f, "the value has {bytes} bytes, more than {max_bytes}: raise MC_HANDSHAKE_MAX_LENGTH")
            }
            Self::CutOff { read_bytes, bytes } => write!(f, "the value ends after {read_bytes} of {bytes} bytes"),
            Self::NotText(error) => error.fmt(f),
            Self::OtherAnswer { answer, command } => write!(f, "it answers {answer:?} to {command}"),
        }
    }
}

impl std::error::Error for CommandError {}

impl Redis {
    pub(crate) fn new(peer: Peer, timeout: Duration, environment: &Environment) -> Self {
        Self {
            peer,
            timeout,
            username: environment.redis_username.clone(),
            password: environment.redis_password.clone(),
            database: environment.redis_database,
            max_bytes: environment.max_message_bytes,
        }
    }

    /// Sends the command, with the setup commands before it, and reads the answers in order; returns the last one.
    fn call(&self, command: &[&str], limit: Duration) -> Result<Answer, CommandError> {
        let database = self.database.to_string();
        let mut commands: Vec<Vec<&str>> = Vec::new();
        if !self.password.is_empty() {
            let mut auth = vec!["AUTH"];
            if !self.username.is_empty() {
                auth.push(&self.username);
            }
            auth.push(&self.password);
            commands.push(auth);
        }
        if self.database != 0 {
            commands.push(vec!["SELECT", &database]);
        }
        commands.push(command.to_vec());
        let deadline = Instant::now() + limit.min(self.timeout);
        let mut stream = TimedStream::connect(&self.peer, deadline)
            .map_err(|(stage, source)| CommandError::Connect { stage, source })?;
        let request: Vec<u8> = commands.iter().flat_map(|command| encode(command)).collect();
        stream.write_all(&request).map_err(CommandError::Lost)?;
        let mut answers = BufReader::new(stream);
        for setup in &commands[..commands.len() - 1] {
            let failed = |error| CommandError::Setup { command: setup[0].to_owned(), error: Box::new(error) };
            decode(&mut answers, self.max_bytes).map_err(failed)?;
        }
        decode(&mut answers, self.max_bytes)
    }

    fn run<T>(&self, command: &[&str], read: impl Fn(Answer) -> Result<T, CommandError>) -> Result<T, StoreError> {
        self.run_within(command, self.timeout, read)
    }

    fn run_within<T>(
        &self,
        command: &[&str],
        limit: Duration,
        read: impl Fn(Answer) -> Result<T, CommandError>,
    ) -> Result<T, StoreError> {
        let key = command.get(1).copied().unwrap_or_default().to_owned();
        let store = || format!("redis://{}", self.peer);
        let failed = |error: CommandError| StoreError { store: store(), key, reason: error.to_string() };
        self.call(command, limit).and_then(read).map_err(failed)
    }
}

/// Encodes a command as an array of bulk strings.
fn encode(command: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", command.len()).into_bytes();
    for word in command {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend(word.as_bytes());
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Decodes one answer; errors of redis are returned as errors.
fn decode(from: &mut impl BufRead, max_bytes: usize) -> Result<Answer, CommandError> {
    let mut line = Vec::new();
    from.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line).map_err(CommandError::Lost)?;
    let Some(line) = line.strip_suffix(b"\r\n") else {
        return Err(CommandError::NotRedis { line: excerpt(&line) });
    };
    let odd = || CommandError::NotRedis { line: excerpt(line) };
    let (kind, rest) = line.split_first().ok_or_else(odd)?;
    let rest = std::str::from_utf8(rest).map_err(|_| odd())?;
    match kind {
        b'+' => Ok(Answer::Simple(rest.to_owned())),
        b'-' => Err(CommandError::Refused(excerpt(rest.as_bytes()))),
        b':' => rest.parse().map(Answer::Number).map_err(|_| odd()),
        b'$' if rest == "-1" => Ok(Answer::Value(None)),
        b'$' => {
            let bytes: usize = rest.parse().map_err(|_| odd())?;
            if bytes > max_bytes {
                return Err(CommandError::TooLong { bytes, max_bytes });
            }
            let mut value = Vec::new();
            from.by_ref().take(bytes as u64 + 2).read_to_end(&mut value).map_err(CommandError::Lost)?;
            if value.len() != bytes + 2 || !value.ends_with(b"\r\n") {
                return Err(CommandError::CutOff { read_bytes: value.len().min(bytes), bytes });
            }
            value.truncate(bytes);
            Ok(Answer::Value(Some(value)))
        }
        _ => Err(odd()),
    }
}

impl MetadataStore for Redis {
    fn get_within(&self, key: &str, limit: Duration) -> Result<Option<String>, StoreError> {
        self.run_within(&["GET", key], limit, |answer| match answer {
            Answer::Value(None) => Ok(None),
            Answer::Value(Some(value)) => text(value).map(Some).map_err(CommandError::NotText),
            answer => Err(CommandError::OtherAnswer { answer, command: "GET" }),
        })
    }

    fn put(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.run(&["SET", key, value], |answer| match answer {
            Answer::Simple(text) if text == "OK" => Ok(()),
            answer => Err(CommandError::OtherAnswer { answer, command: "SET" }),
        })
    }

    fn remove(&self, key: &str) -> Result<bool, StoreError> {
        self.run(&["DEL", key], |answer| match answer {
            Answer::Number(count) => Ok(count > 0),
            answer => Err(CommandError::OtherAnswer { answer, command: "DEL" }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn read(mut bytes: &[u8]) -> Result<Answer, String> {
        decode(&mut bytes, 10).map_err(|error| error.to_string())
    }

    #[test]
    fn bytes_are_as_redis_has_them() {
        assert_eq!(encode(&["GET", "a\r\n"]), b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n");
        assert_eq!(read(b"+OK\r\n"), Ok(Answer::Simple("OK".to_owned())));
        assert_eq!(read(b":-7\r\n"), Ok(Answer::Number(-7)));
        assert_eq!(read(b"$-1\r\n"), Ok(Answer::Value(None)));
        assert_eq!(read(b"$3\r\na\r\n\r\n"), Ok(Answer::Value(Some(b"a\r\n".to_vec()))));
        assert_eq!(read(b"-NOAUTH needed\r\n"), Err("NOAUTH needed".to_owned()));
        for bad in [
            &b""[..],
            b"+OK",
            b"\r\n",
            b"$11\r\nx",
            b"$3\r\nab\r\n",
            b"$1\r\nabc",
            b"$x\r\n",
            b"*1\r\n",
            b"HTTP/1.1\r\n",
        ] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..40)) {
            let _ = read(&bytes);
        }
    }
}
