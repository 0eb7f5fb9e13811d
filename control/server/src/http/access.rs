//! Authentication of HTTP requests: from this host, or with the token.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HOST, ORIGIN};
use kvplane_sys::private_files::{FileError, read_private};

/// Length of the shortest token: shorter ones can be guessed.
const SHORTEST: usize = 16;
const LONGEST: usize = 4096;
/// Most bytes of a token file, with white space around the token.
const FILE_BYTES: u64 = 2 * LONGEST as u64;

/// A bearer token, which `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpToken(Vec<u8>);

impl fmt::Debug for HttpToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HttpToken")
    }
}

/// Reason why a text is not a valid token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum HttpTokenError {
    /// It is too short or too long.
    Length { bytes: usize },
    /// It has characters that no header can carry.
    Characters,
}

impl fmt::Display for HttpTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { bytes } => {
                write!(f, "a token of {bytes} bytes is not valid: use {SHORTEST} to {LONGEST}")
            }
            Self::Characters => f.write_str("a token must be printable ASCII without spaces"),
        }
    }
}

impl Error for HttpTokenError {}

impl HttpToken {
    /// Reads a token from a file that only its owner may read; white space around the token is ignored.
    ///
    /// # Errors
    /// When the file cannot be read, other users can read it, or its contents are not a valid token; the error names
    /// the next step.
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = read_private(path, FILE_BYTES).map_err(|error| match error {
            // A process that could read the token may know it.
            FileError::NotPrivate { .. } => {
                io::Error::new(io::ErrorKind::PermissionDenied, format!("{error}, and use another token"))
            }
            FileError::Io { ref source, .. } => io::Error::new(source.kind(), error.to_string()),
            FileError::TooLarge { .. } | FileError::Environment { .. } => {
                io::Error::new(io::ErrorKind::InvalidData, error.to_string())
            }
        })?;
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
        Self::new(text.trim()).map_err(wrong)
    }

    /// Checks a token.
    ///
    /// # Errors
    /// When it is too short, too long, or has characters that no header can carry.
    pub fn new(text: &str) -> Result<Self, HttpTokenError> {
        let bytes = text.len();
        if !(SHORTEST..=LONGEST).contains(&bytes) {
            return Err(HttpTokenError::Length { bytes });
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(HttpTokenError::Characters);
        }
        Ok(Self(text.as_bytes().to_vec()))
    }

    /// Compares in constant time for tokens of the same length.
    fn is(&self, other: &[u8]) -> bool {
        let differing = self.0.iter().zip(other).fold(0, |differing, (one, other)| differing | (one ^ other));
        self.0.len() == other.len() && differing == 0
    }
}

/// Access rights of HTTP requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    pub(crate) token: Option<HttpToken>,
    /// True if Mooncake's metadata, whose protocol has no tokens, is open to all hosts.
    pub(crate) open_metadata: bool,
}

impl Access {
    /// Returns true if a request may be answered.
    pub(crate) fn permits(&self, path: &str, from: IpAddr, headers: &HeaderMap) -> bool {
        let local = from.to_canonical().is_loopback();
        match path {
            "/health" => true,
            // The page holds no data, and asks its reader for the token.
            crate::http::status::PAGE if self.token.is_some() => true,
            // Engines cannot send a token.
            "/metadata" if local || self.open_metadata => true,
            _ => match &self.token {
                None => local && !for_another_page(headers),
                Some(token) => headers.get(AUTHORIZATION).and_then(bearer).is_some_and(|brought| token.is(brought)),
            },
        }
    }
}

/// Returns true if a page of another site may have made a browser on this host send the request: one with a foreign
/// origin, or one whose name was resolved to an address of this host after the page was loaded (DNS rebinding). Host
/// names with a dot count as rebound, as they cannot be distinguished from names of this host's own network.
fn for_another_page(headers: &HeaderMap) -> bool {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let origin = headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or_default());
    if origin.is_some_and(|origin| origin.split_once("://").is_none_or(|(_, of)| of != host)) {
        return true;
    }
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if port.ends_with(']') { host } else { name });
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name.contains('.') && address.parse::<IpAddr>().is_err()
}

fn bearer(value: &hyper::header::HeaderValue) -> Option<&[u8]> {
    let (scheme, rest) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn with(authorization: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, authorization.parse().expect("a header"));
        headers
    }

    #[test]
    fn remote_callers_need_the_token_except_for_health() {
        let (here, mapped) = (IpAddr::from(Ipv4Addr::LOCALHOST), Ipv4Addr::LOCALHOST.to_ipv6_mapped().into());
        let there = IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));
        let none = HeaderMap::new();
        let open = Access::default();
        assert!(open.permits("/metrics", here, &none) && open.permits("/metrics", mapped, &none));
        assert!(!open.permits("/metrics", there, &none) && open.permits("/health", there, &none));
        assert!(!open.permits("/metadata", there, &none) && open.permits("/metadata", here, &none));
        let metadata = Access { open_metadata: true, ..Access::default() };
        assert!(metadata.permits("/metadata", there, &none) && !metadata.permits("/metrics", there, &none));
        let token = HttpToken::new("0123456789abcdef").expect("a good token");
        let closed = Access { token: Some(token), open_metadata: false };
        for (headers, expected) in [
            (with("Bearer 0123456789abcdef"), true),
            (with("bearer  0123456789abcdef "), true),
            (with("Bearer 0123456789abcdeF"), false),
            (with("Bearer 0123456789abcdef0"), false),
            (with("Basic 0123456789abcdef"), false),
            (with("Bearer"), false),
            (HeaderMap::new(), false),
        ] {
            assert_eq!(closed.permits("/metrics", there, &headers), expected, "{headers:?}");
            assert_eq!(closed.permits("/debug/shards", here, &headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn pages_of_other_sites_cannot_use_a_local_browser() {
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        let asked = |host: &str, origin: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, host.parse().expect("a header"));
            if let Some(origin) = origin {
                headers.insert(ORIGIN, origin.parse().expect("a header"));
            }
            Access::default().permits("/register", here, &headers)
        };
        for host in ["127.0.0.1:80", "localhost:80", "localhost", "node7", "[::1]:80", "[::1]", "::ffff:127.0.0.1"] {
            assert!(asked(host, None), "{host}");
            assert!(asked(host, Some(&format!("http://{host}"))), "{host}: its own page");
        }
        for host in ["rebound.example", "rebound.example:80", "127.0.0.1.example:80"] {
            assert!(!asked(host, None), "{host}");
        }
        for origin in ["http://elsewhere.example", "null", "http://127.0.0.1:81"] {
            assert!(!asked("127.0.0.1:80", Some(origin)), "{origin}");
        }
    }

    #[test]
    fn a_token_that_others_may_read_is_refused() {
        let directory = std::env::temp_dir().join(format!("kvplane-token-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("token");
        fs::write(&path, "0123456789abcdef\n").expect("a file");
        for mode in [0o644, 0o640, 0o604, 0o620, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            let error = HttpToken::read(&path).expect_err("others may read it").to_string();
            assert!(error.contains(&format!("{mode:03o}")) && error.contains("chmod 600"), "{error}");
        }
        for mode in [0o600, 0o400] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            HttpToken::read(&path).expect("its owner's");
        }
        fs::remove_dir_all(&directory).expect("gone");
    }

    #[test]
    fn invalid_tokens_are_rejected_with_the_reason() {
        assert!(HttpToken::new("short").is_err_and(|what| what.to_string().contains("5 bytes")));
        assert!(HttpToken::new("0123456789abcde\u{e9}").is_err_and(|what| what.to_string().contains("ASCII")));
        let missing = HttpToken::read(Path::new("/nowhere/token")).expect_err("no such file");
        assert!(missing.to_string().contains("/nowhere/token"), "{missing}");
        assert_eq!(format!("{:?}", HttpToken::new("0123456789abcdef")), "Ok(HttpToken)");
    }
}
