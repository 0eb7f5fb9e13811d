//! Names of peers: `ip:port`, `[v6]:port`, `host:port`, and the default if the port is omitted.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Handshake port that Mooncake uses if a name has none.
pub const DEFAULT_PORT: u16 = 12_001;
/// Longest host name, as DNS limits it.
pub const MAX_HOST_BYTES: usize = 253;

/// Host: an address, or a name to be resolved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// An IP address.
    Address(IpAddr),
    /// A name.
    Name(String),
}

/// Host and port.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub host: Host,
    pub port: u16,
}

/// Error of an invalid name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameError {
    name: String,
    reason: &'static str,
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, reason } = self;
        write!(f, "{name:?} is not the name of a peer: {reason}; write host:port, 1.2.3.4:port or [v6]:port")
    }
}

impl std::error::Error for NameError {}

impl Peer {
    /// Parses a name; `default_port` is for names without one. An IPv6 address needs brackets if a port follows. A
    /// leading `/` is ignored, as Mooncake does when it opens a segment.
    ///
    /// # Errors
    /// If the host or the port is invalid.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, NameError> {
        let refuse = |reason| {
            let name = text.chars().take(MAX_HOST_BYTES).collect();
            NameError { name, reason }
        };
        let name = text.strip_prefix('/').unwrap_or(text);
        if let Some(rest) = name.strip_prefix('[') {
            let (inner, after) = rest.split_once(']').ok_or_else(|| refuse("a bracket is not closed"))?;
            let ip: Ipv6Addr = inner.parse().map_err(|_| refuse("the text in brackets is not an IPv6 address"))?;
            let port = match after {
                "" => default_port,
                _ => after.strip_prefix(':').and_then(port).ok_or_else(|| refuse("the port is not 1 to 65535"))?,
            };
            return Ok(Self { host: Host::Address(ip.into()), port });
        }
        if let Ok(ip) = name.parse::<Ipv6Addr>() {
            return Ok(Self { host: Host::Address(ip.into()), port: default_port });
        }
        let (host, port) = match name.rsplit_once(':') {
            None => (name, default_port),
            Some((host, text)) => (host, port(text).ok_or_else(|| refuse("the port is not 1 to 65535"))?),
        };
        let host = Host::parse(host).ok_or_else(|| refuse("the host is neither an address nor a host name"))?;
        Ok(Self { host, port })
    }
}

impl Host {
    /// Parses an address without brackets, or a host name of letters, digits, `-`, `_` and `.`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(ip) = text.parse() {
            return Some(Self::Address(ip));
        }
        let fits = (1..=MAX_HOST_BYTES).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
        fits.then(|| Self::Name(text.to_owned()))
    }
}

fn port(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|&port| digits && port != 0)
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Address(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(ip) => ip.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_read_as_mooncake_writes_them() {
        let cases = [
            ("127.0.0.1:15958", "127.0.0.1:15958"),
            ("/127.0.0.1:15958", "127.0.0.1:15958"),
            ("[::1]:15000", "[::1]:15000"),
            ("[2001:db8::7]", "[2001:db8::7]:12001"),
            ("2001:db8::7", "[2001:db8::7]:12001"),
            ("node-7.example:80", "node-7.example:80"),
            ("node_7", "node_7:12001"),
            ("10.0.0.1", "10.0.0.1:12001"),
        ];
        for (text, expected) in cases {
            assert_eq!(Peer::parse(text, DEFAULT_PORT).expect(text).to_string(), expected);
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        for text in [
            "",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a:-1",
            "[::1",
            "[::1]1",
            "[::1]:",
            "[1.2.3.4]:1",
            "a b:1",
            "1:2:3:4",
            "ä:1",
            "fe80::1%eth0",
            "//a:1",
            "http://a:1",
        ] {
            assert!(Peer::parse(text, DEFAULT_PORT).is_err(), "{text:?}");
        }
        let error = Peer::parse(&"a:".repeat(10_000), 1).expect_err("long").to_string();
        assert!(error.len() < 1000, "{error}");
    }

    proptest! {
        #[test]
        fn names_survive_writing(octets in any::<[u8; 16]>(), four in any::<bool>(), port in 1u16..) {
            let ip = if four {
                IpAddr::from([octets[0], octets[1], octets[2], octets[3]])
            } else {
                IpAddr::from(octets)
            };
            let peer = Peer { host: Host::Address(ip), port };
            prop_assert_eq!(Peer::parse(&peer.to_string(), 1).expect("our own"), peer);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            if let Ok(peer) = Peer::parse(&text, 1) {
                prop_assert_eq!(Peer::parse(&peer.to_string(), 1).expect("our own"), peer);
            }
        }
    }
}
