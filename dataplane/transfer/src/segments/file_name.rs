//! Names of file segments, parsed and formatted: `file:///absolute/path?option&option`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use kvplane_engine::FileOptions;

use crate::error::{ArgumentError, Error, FileNameError};
use crate::size::parse_bytes;

/// Scheme of file names, which no name of an engine begins with.
const SCHEME: &str = "file:";

/// Parsed name of a file segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FileName {
    pub(crate) path: PathBuf,
    /// Length with which a missing file is created.
    pub(crate) create_bytes: Option<u64>,
    pub(crate) read_only: bool,
    pub(crate) buffered: bool,
}

/// Returns true for the name of a file.
pub(crate) fn is_file(name: &str) -> bool {
    name.starts_with(SCHEME)
}

impl FileName {
    /// Parses `file:///path` or `file:/path`, with options after a `?`: `create=SIZE` (`4096`, `64M`), `readonly`,
    /// `buffered`. As in other such names, `%3F` stands for a `?` of the path itself.
    ///
    /// # Errors
    /// When it is malformed; the error names the reason.
    pub(crate) fn parse(name: &str) -> Result<Self, Error> {
        let wrong = |why| Error::Argument(ArgumentError::FileName { name: name.to_owned(), why });
        let rest = name.strip_prefix(SCHEME).ok_or_else(|| wrong(FileNameError::Scheme))?;
        let (path, query) = rest.split_once('?').map_or((rest, ""), |(path, query)| (path, query));
        let path = match path.strip_prefix("//") {
            Some(after) if after.starts_with('/') => after,
            Some(after) => after
                .strip_prefix("localhost")
                .filter(|path| path.starts_with('/'))
                .ok_or_else(|| wrong(FileNameError::Host))?,
            None => path,
        };
        let path = decode(path).ok_or_else(|| wrong(FileNameError::Percent))?;
        if path.as_os_str().as_bytes().contains(&0) {
            return Err(wrong(FileNameError::Zero));
        }
        if !path.is_absolute() {
            return Err(wrong(FileNameError::Relative));
        }
        let mut found = Self { path, create_bytes: None, read_only: false, buffered: false };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("create", bytes)) => {
                    let bytes = parse_bytes(bytes).map_err(|why| wrong(FileNameError::Size(why)))?;
                    if bytes == 0 {
                        return Err(wrong(FileNameError::Empty));
                    }
                    found.create_bytes = Some(bytes);
                }
                None if option == "readonly" => found.read_only = true,
                None if option == "buffered" => found.buffered = true,
                _ => return Err(wrong(FileNameError::Option { option: option.to_owned() })),
            }
        }
        if found.read_only && found.create_bytes.is_some() {
            return Err(wrong(FileNameError::ReadOnly));
        }
        Ok(found)
    }

    /// Returns the canonical name of this path with these options.
    pub(crate) fn canonical(&self) -> String {
        let options = match (self.read_only, self.buffered) {
            (false, false) => "",
            (true, false) => "?readonly",
            (false, true) => "?buffered",
            (true, true) => "?readonly&buffered",
        };
        format!("{SCHEME}//{}{options}", encode(self.path.as_os_str()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn options(&self) -> FileOptions {
        FileOptions { writable: !self.read_only, create_bytes: self.create_bytes, direct: !self.buffered }
    }
}

/// Replaces each % and its two hexadecimal digits by the byte; `None` if the digits are missing.
fn decode(text: &str) -> Option<PathBuf> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = digits.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let code = code.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(code?);
        rest = &after[2..];
    }
    Some(OsString::from_vec(bytes).into())
}

fn encode(path: &OsStr) -> String {
    let mut text = String::with_capacity(path.len());
    for &byte in path.as_bytes() {
        match byte {
            b'%' | b'?' | 0..=b' ' | 127.. => text.push_str(&format!("%{byte:02X}")),
            plain => text.push(char::from(plain)),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_parsed() {
        let plain = FileName { path: "/a/b c".into(), create_bytes: None, read_only: false, buffered: false };
        for name in ["file:///a/b c", "file:/a/b%20c", "file://localhost/a/b c", "file:///a/b c?", "file:///a/b c?&"] {
            assert_eq!(FileName::parse(name).unwrap(), plain, "{name}");
        }
        let found = FileName::parse("file:///a%3Fb?create=4096&buffered").unwrap();
        let path = PathBuf::from("/a?b");
        assert_eq!(found, FileName { path, create_bytes: Some(4096), read_only: false, buffered: true });
        for (size, bytes) in [("64M", 64 << 20), ("64MiB", 64 << 20), ("2g", 2 << 30), ("1tb", 1 << 40), ("8k", 8192)] {
            let sized = FileName::parse(&format!("file:///a?create={size}")).unwrap();
            assert_eq!(sized.create_bytes, Some(bytes), "{size}");
        }
        assert_eq!(found.canonical(), "file:///a%3Fb?buffered");
        assert_eq!(found.options(), FileOptions { writable: true, create_bytes: Some(4096), direct: false });
    }

    #[test]
    fn canonical_names_parse_to_the_same_file() {
        for bytes in 1..=255u8 {
            for (read_only, buffered) in [(false, false), (false, true), (true, false), (true, true)] {
                let path = PathBuf::from(OsString::from_vec(vec![b'/', bytes, b'x', bytes]));
                let name = FileName { path, create_bytes: None, read_only, buffered };
                assert_eq!(FileName::parse(&name.canonical()).unwrap(), name);
            }
        }
    }

    #[test]
    fn malformed_names_are_rejected_with_a_reason() {
        for (name, why) in [
            ("file:", "absolute"),
            ("file:relative", "absolute"),
            ("file://host/path", "host"),
            ("file://localhostile/path", "host"),
            ("file:///a?creat=1", "creat=1"),
            ("file:///a?create=0", "at least 1"),
            ("file:///a?create=0K", "at least 1"),
            ("file:///a?create=", "not a size"),
            ("file:///a?create=1e9", "K, M, G or T"),
            ("file:///a?create=64Q", "K, M, G or T"),
            ("file:///a?create=18446744073709551616", "exceeds 2^64 bytes"),
            ("file:///a?create=99999999T", "exceeds 2^64 bytes"),
            ("file:///a?create", "create=SIZE"),
            ("file:///a?readonly=1", "unknown"),
            ("file:///a?readonly&create=1", "leave out"),
            ("file:///a%2", "hexadecimal"),
            ("file:///a%+1", "hexadecimal"),
            ("file:///a%00b", "%00"),
        ] {
            let error = FileName::parse(name).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(name), "{error}");
        }
    }
}
