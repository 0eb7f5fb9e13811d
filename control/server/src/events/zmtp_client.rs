//! ZeroMQ's wire protocol, connecting side: as a subscriber, or as a dealer that requests a replay. ZMTP 3.0 without
//! security (https://rfc.zeromq.org/spec/23/), compatible with peers of 3.1. No I/O: bytes go in, messages come out,
//! all of bounded size.

use crate::events::zmtp::{ZmtpError, frame, message};

/// Longest message in bytes, all its parts together.
const MESSAGE_BYTES: usize = 16 << 20;
/// Most parts of a message.
const PARTS: usize = 8;
const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Socket type of the connecting side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A subscriber.
    Subscriber,
    /// A requester of replays.
    Dealer,
}

/// Result of a peer's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerInput {
    /// The handshake is complete.
    Ready,
    /// A message, in parts.
    Message(Vec<Vec<u8>>),
    /// Bytes to send to the peer.
    Answer(Vec<u8>),
}

/// Returns the first bytes of a connection: greeting and READY.
pub(crate) fn hello(kind: Kind) -> Vec<u8> {
    let mut out = vec![0; GREETING_BYTES];
    (out[0], out[9], out[10]) = (0xff, 0x7f, 3);
    out[12..16].copy_from_slice(b"NULL");
    let name: &[u8] = match kind {
        Kind::Subscriber => b"SUB",
        Kind::Dealer => b"DEALER",
    };
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend_from_slice(&(name.len() as u32).to_be_bytes());
    ready.extend_from_slice(name);
    frame(&mut out, COMMAND, &ready);
    out
}

/// Encodes a subscription to messages whose first part begins with `topic`.
pub(crate) fn subscription(topic: &[u8]) -> Vec<u8> {
    message(&[&[b"\x01", topic].concat()])
}

/// State of a peer's connection.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    input: Vec<u8>,
    greeted: bool,
    ready: bool,
    parts: Vec<Vec<u8>>,
    bytes: usize,
}

impl Peer {
    /// Handles received bytes.
    ///
    /// # Errors
    /// A protocol error: the connection is to be closed.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Result<Vec<PeerInput>, ZmtpError> {
        self.input.extend_from_slice(bytes);
        let mut heard = Vec::new();
        if !self.greeted {
            if self.input.first().is_some_and(|first| *first != 0xff) {
                return Err(ZmtpError::NotZmtp);
            }
            if self.input.get(10).is_some_and(|major| *major < 3) {
                return Err(ZmtpError::OldVersion);
            }
            if self.input.len() < GREETING_BYTES {
                return Ok(heard);
            }
            if self.input[12..32] != *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
                return Err(ZmtpError::Security);
            }
            self.greeted = true;
            self.input.drain(..GREETING_BYTES);
        }
        let mut used = 0;
        while let Some((flags, head, length)) = next(&self.input[used..])? {
            let Some(body) = self.input.get(used + head..used + head + length) else { break };
            let body = body.to_vec();
            used += head + length;
            heard.extend(self.take_frame(flags, body)?);
        }
        self.input.drain(..used);
        Ok(heard)
    }

    fn take_frame(&mut self, flags: u8, body: Vec<u8>) -> Result<Option<PeerInput>, ZmtpError> {
        if flags & COMMAND != 0 {
            let name = body.split_first().and_then(|(bytes, rest)| rest.get(..usize::from(*bytes)));
            return match name {
                Some(b"READY") if !self.ready => {
                    self.ready = true;
                    Ok(Some(PeerInput::Ready))
                }
                Some(b"ERROR") => Err(ZmtpError::Rejected),
                Some(b"PING") => {
                    let context = body.get(7..).unwrap_or_default();
                    let mut out = Vec::new();
                    frame(&mut out, COMMAND, &[b"\x04PONG", context].concat());
                    Ok(Some(PeerInput::Answer(out)))
                }
                Some(_) => Ok(None),
                None => Err(ZmtpError::NamelessCommand),
            };
        }
        if !self.ready {
            return Err(ZmtpError::MessageBeforeReady);
        }
        self.bytes += body.len();
        if self.bytes > MESSAGE_BYTES || self.parts.len() >= PARTS {
            return Err(ZmtpError::LongMessage);
        }
        self.parts.push(body);
        if flags & MORE != 0 {
            return Ok(None);
        }
        self.bytes = 0;
        Ok(Some(PeerInput::Message(std::mem::take(&mut self.parts))))
    }
}

/// Returns the flags, and the bytes of head and body of the frame at the start of `input`, once its head has arrived.
fn next(input: &[u8]) -> Result<Option<(u8, usize, usize)>, ZmtpError> {
    let Some(&flags) = input.first() else { return Ok(None) };
    let (head, length) = if flags & LONG == 0 {
        let Some(&length) = input.get(1) else { return Ok(None) };
        (2, u64::from(length))
    } else {
        let Some(length) = input.get(1..9) else { return Ok(None) };
        (9, length.iter().fold(0u64, |length, byte| length << 8 | u64::from(*byte)))
    };
    if length > MESSAGE_BYTES as u64 {
        return Err(ZmtpError::LongFrame);
    }
    Ok(Some((flags, head, length as usize)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::events::zmtp;

    fn publisher() -> Vec<u8> {
        zmtp::hello()
    }

    #[test]
    fn publisher_and_subscriber_understand_each_other() {
        let mut peer = Peer::default();
        assert_eq!(peer.take(&publisher()), Ok(vec![PeerInput::Ready]));
        let long = vec![7; 300];
        let heard = peer.take(&message(&[b"t", b"12345678", &long])).expect("a message");
        assert_eq!(heard, vec![PeerInput::Message(vec![b"t".to_vec(), b"12345678".to_vec(), long])]);
        let mut ping = Vec::new();
        frame(&mut ping, COMMAND, b"\x04PING\0\x05hello");
        let answer = [[COMMAND, 10].as_slice(), b"\x04PONG", b"hello"].concat();
        assert_eq!(peer.take(&ping), Ok(vec![PeerInput::Answer(answer)]));
        // The publisher of this process accepts the subscription.
        let mut other = zmtp::Subscriber::default();
        other.take(&hello(Kind::Subscriber)).expect("a peer");
        assert_eq!(other.take(&subscription(b"kv")), Ok(vec![zmtp::SubscriberInput::Subscribed]));
        assert!(other.wants(b"kv@1") && !other.wants(b"other"));
    }

    #[test]
    fn peers_other_than_publishers_are_rejected() {
        let refused = |bytes: &[u8]| Peer::default().take(bytes).expect_err("refused").to_string();
        assert_eq!(refused(b"HTTP/1.1 400 Bad Request"), "not a peer of ZMTP");
        let mut old = publisher();
        old[10] = 2;
        assert!(refused(&old).contains("version"));
        let mut curve = publisher();
        curve[12..17].copy_from_slice(b"CURVE");
        assert!(refused(&curve).contains("security"));
        let mut peer = Peer::default();
        peer.take(&publisher()).expect("a peer");
        assert!(peer.take(&[LONG, 0, 0, 0, 1, 0, 0, 0, 0]).is_err_and(|error| error.to_string().contains("longer")));
        let mut peer = Peer::default();
        peer.take(&publisher()).expect("a peer");
        assert!(peer.take(&[MORE, 0].repeat(PARTS + 1)).is_err());
    }

    proptest! {
        #[test]
        fn chunk_boundaries_do_not_matter(cuts in prop::collection::vec(1usize..40, 1..20)) {
            let bytes = [publisher(), message(&[b"", b"12345678", &[3; 200]])].concat();
            let (mut peer, mut heard, mut rest) = (Peer::default(), Vec::new(), &bytes[..]);
            for cut in cuts.into_iter().cycle() {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                heard.extend(peer.take(now).expect("a good peer"));
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(heard.len(), 2);
            prop_assert_eq!(&heard[1], &PeerInput::Message(vec![vec![], b"12345678".to_vec(), vec![3; 200]]));
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), after in any::<bool>()) {
            let bytes = if after { [publisher(), bytes].concat() } else { bytes };
            let _ = Peer::default().take(&bytes);
        }
    }
}
