//! ZeroMQ's wire protocol, publisher side without security: ZMTP 3.1, compatible with peers of 3.0
//! (https://rfc.zeromq.org/spec/37/). No I/O: bytes of a subscriber go in, its subscriptions and the replies come out.
//!
//! A subscriber sends its topics as messages in 3.0, as commands in 3.1. Everything that it sends is small and bounded.

use std::error::Error;
use std::fmt;

/// Most topics of one subscriber.
const TOPICS: usize = 64;
/// Longest frame that a subscriber may send.
const FRAME_BYTES: usize = 1024;
const GREETING_BYTES: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Returns the first bytes of a publisher: greeting and READY.
pub(crate) fn hello() -> Vec<u8> {
    let mut out = vec![0; GREETING_BYTES];
    (out[0], out[9]) = (0xff, 0x7f);
    (out[10], out[11]) = (3, 1);
    out[12..16].copy_from_slice(b"NULL");
    let mut ready = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", "PUB"), ("Identity", "")] {
        ready.push(name.len() as u8);
        ready.extend_from_slice(name.as_bytes());
        ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
        ready.extend_from_slice(value.as_bytes());
    }
    frame(&mut out, COMMAND, &ready);
    out
}

/// Appends a frame.
pub(crate) fn frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(bytes) => out.extend([flags, bytes]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// Encodes a message of several parts.
pub(crate) fn message(parts: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(parts.iter().map(|part| part.len() + 9).sum());
    for (at, part) in parts.iter().enumerate() {
        frame(&mut out, if at + 1 < parts.len() { MORE } else { 0 }, part);
    }
    out
}

/// Result of a subscriber's bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum SubscriberInput {
    /// The subscriber added a topic.
    Subscribed,
    /// Bytes to send to the subscriber.
    Answer(Vec<u8>),
}

/// Protocol error of a peer, after which its connection is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ZmtpError {
    /// The greeting has another signature.
    NotZmtp,
    /// The greeting has a version before 3.0.
    OldVersion,
    /// The greeting has another security mechanism than NULL.
    Security,
    /// The peer's READY has another socket type than a subscriber's.
    NotSubscriber,
    /// A command's body does not begin with a name.
    NamelessCommand,
    /// A command other than READY came first.
    CommandBeforeReady,
    /// A message came before READY.
    MessageBeforeReady,
    /// A subscriber's frame exceeds [`FRAME_BYTES`].
    LongSubscription,
    /// A subscriber exceeds [`TOPICS`].
    ManyTopics,
    /// A publisher's frame exceeds the limit of a message.
    LongFrame,
    /// A publisher's message exceeds the limits of bytes or parts.
    LongMessage,
    /// The peer sent ERROR.
    Rejected,
}

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotZmtp => "not a peer of ZMTP",
            Self::OldVersion => "a peer of a version before ZMTP 3.0",
            Self::Security => "a peer that requires security, which is not supported",
            Self::NotSubscriber => "a peer that is not a subscriber",
            Self::NamelessCommand => "a command without a name",
            Self::CommandBeforeReady => "a command before READY",
            Self::MessageBeforeReady => "a message before READY",
            Self::LongSubscription => "a frame longer than any subscription",
            Self::ManyTopics => "more topics than one subscriber may have",
            Self::LongFrame => "a frame longer than any batch of events",
            Self::LongMessage => "a message longer than any batch of events",
            Self::Rejected => "the peer rejected the connection",
        })
    }
}

impl Error for ZmtpError {}

/// State of one subscriber's connection.
#[derive(Debug, Default)]
pub(crate) struct Subscriber {
    input: Vec<u8>,
    greeted: bool,
    ready: bool,
    topics: Vec<Vec<u8>>,
    /// True within a message of several parts, which is never a subscription.
    within: bool,
}

impl Subscriber {
    /// Returns true if the subscriber has subscribed to this topic.
    pub(crate) fn wants(&self, topic: &[u8]) -> bool {
        self.topics.iter().any(|wanted| topic.starts_with(wanted))
    }

    /// Returns true once the handshake is complete.
    pub(crate) const fn is_ready(&self) -> bool {
        self.ready
    }

    /// Handles received bytes.
    ///
    /// # Errors
    /// A protocol error: the connection is to be closed.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Result<Vec<SubscriberInput>, ZmtpError> {
        self.input.extend_from_slice(bytes);
        let mut said = Vec::new();
        if !self.greeted {
            let signed = self.input.first().is_none_or(|first| *first == 0xff)
                && self.input.get(9).is_none_or(|ninth| ninth & 1 == 1);
            if !signed {
                return Err(ZmtpError::NotZmtp);
            }
            if self.input.get(10).is_some_and(|major| *major < 3) {
                return Err(ZmtpError::OldVersion);
            }
            if self.input.len() < GREETING_BYTES {
                return Ok(said);
            }
            if self.input[12..32] != *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
                return Err(ZmtpError::Security);
            }
            self.greeted = true;
            self.input.drain(..GREETING_BYTES);
        }
        while let Some((flags, body)) = self.next_frame()? {
            said.extend(self.take_frame(flags, &body)?);
        }
        Ok(said)
    }

    fn next_frame(&mut self) -> Result<Option<(u8, Vec<u8>)>, ZmtpError> {
        let Some(&flags) = self.input.first() else { return Ok(None) };
        let (head, bytes) = if flags & LONG == 0 {
            let Some(&bytes) = self.input.get(1) else { return Ok(None) };
            (2, u64::from(bytes))
        } else {
            let Some(length) = self.input.get(1..9) else { return Ok(None) };
            (9, length.iter().fold(0u64, |length, byte| length << 8 | u64::from(*byte)))
        };
        if bytes > FRAME_BYTES as u64 {
            return Err(ZmtpError::LongSubscription);
        }
        let end = head + bytes as usize;
        if self.input.len() < end {
            return Ok(None);
        }
        let body = self.input[head..end].to_vec();
        self.input.drain(..end);
        Ok(Some((flags, body)))
    }

    fn take_frame(&mut self, flags: u8, body: &[u8]) -> Result<Option<SubscriberInput>, ZmtpError> {
        if flags & COMMAND != 0 {
            let Some((name, rest)) =
                body.split_first().and_then(|(bytes, rest)| rest.split_at_checked(usize::from(*bytes)))
            else {
                return Err(ZmtpError::NamelessCommand);
            };
            return match name {
                b"READY" => {
                    self.ready = true;
                    let is_subscriber = [b"SUB".as_slice(), b"XSUB"].iter().any(|kind| {
                        let property = [b"\x0bSocket-Type\0\0\0".as_slice(), &[kind.len() as u8], kind].concat();
                        rest.windows(property.len()).any(|part| part.eq_ignore_ascii_case(&property))
                    });
                    if is_subscriber { Ok(None) } else { Err(ZmtpError::NotSubscriber) }
                }
                _ if !self.ready => Err(ZmtpError::CommandBeforeReady),
                b"SUBSCRIBE" => self.subscribe(rest).map(Some),
                b"CANCEL" => {
                    self.cancel(rest);
                    Ok(None)
                }
                b"PING" => {
                    // Two bytes hold a timeout; the rest is echoed.
                    let context = rest.get(2..).unwrap_or_default();
                    let mut out = Vec::new();
                    frame(&mut out, COMMAND, &[b"\x04PONG", context].concat());
                    Ok(Some(SubscriberInput::Answer(out)))
                }
                // A command of a later version, or ERROR, after which the peer closes the connection.
                _ => Ok(None),
            };
        }
        if !self.ready {
            return Err(ZmtpError::MessageBeforeReady);
        }
        let alone = !core::mem::replace(&mut self.within, flags & MORE != 0) && flags & MORE == 0;
        match body.split_first() {
            Some((1, topic)) if alone => self.subscribe(topic).map(Some),
            Some((0, topic)) if alone => {
                self.cancel(topic);
                Ok(None)
            }
            // A publisher ignores messages.
            _ => Ok(None),
        }
    }

    fn subscribe(&mut self, topic: &[u8]) -> Result<SubscriberInput, ZmtpError> {
        if self.topics.len() >= TOPICS {
            return Err(ZmtpError::ManyTopics);
        }
        self.topics.push(topic.to_vec());
        Ok(SubscriberInput::Subscribed)
    }

    /// Removes one subscription: a topic that was subscribed twice stays until it is cancelled twice.
    fn cancel(&mut self, topic: &[u8]) {
        if let Some(at) = self.topics.iter().position(|wanted| wanted == topic) {
            self.topics.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes of libzmq's SUB socket: greeting, READY, and a subscription in either form.
    fn subscriber(minor: u8, subscription: &[u8]) -> Vec<u8> {
        let mut out = vec![0; GREETING_BYTES];
        (out[0], out[8], out[9], out[10], out[11]) = (0xff, 1, 0x7f, 3, minor);
        out[12..16].copy_from_slice(b"NULL");
        let ready = b"\x05READY\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0";
        frame(&mut out, COMMAND, ready);
        out.extend_from_slice(subscription);
        out
    }

    #[test]
    fn both_forms_of_subscriptions_are_understood() {
        let (mut message_form, mut command_form) = (Vec::new(), Vec::new());
        frame(&mut message_form, 0, b"\x01kv");
        frame(&mut command_form, COMMAND, b"\x09SUBSCRIBEkv");
        for (minor, subscription) in [(0, message_form), (1, command_form)] {
            let mut peer = Subscriber::default();
            let said = peer.take(&subscriber(minor, &subscription)).expect("a good peer");
            assert_eq!(said, [SubscriberInput::Subscribed]);
            assert!(peer.is_ready() && peer.wants(b"kv@x") && !peer.wants(b"k") && !peer.wants(b""));
            let mut cancel = Vec::new();
            frame(&mut cancel, 0, b"\x00kv");
            peer.take(&cancel).expect("a good frame");
            assert!(!peer.wants(b"kv@x"));
            let mut ping = Vec::new();
            frame(&mut ping, COMMAND, b"\x04PING\0\x0aabc");
            assert_eq!(peer.take(&ping), Ok(vec![SubscriberInput::Answer(b"\x04\x08\x04PONGabc".to_vec())]));
        }
    }

    #[test]
    fn other_peers_are_rejected() {
        let cases: [(&[u8], &str); 3] = [
            (b"GET / HTTP/1.1\r\n", "not a peer"),
            (b"\xff\0\0\0\0\0\0\0\x01\x7f\x01", "a version before"),
            (b"\xff\0\0\0\0\0\0\0\x01\x7e\x03", "not a peer"),
        ];
        for (bytes, expected) in cases {
            let error = Subscriber::default().take(bytes).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
        }
        let mut curve = subscriber(1, b"");
        curve[12..17].copy_from_slice(b"CURVE");
        assert!(Subscriber::default().take(&curve).is_err_and(|error| error.to_string().contains("security")));
        let mut peer = Subscriber::default();
        let long = [LONG, 0, 0, 0, 1, 0, 0, 0, 0];
        assert!(peer.take(&subscriber(1, &long)).is_err_and(|error| error.to_string().contains("longer")));
        let mut many = Vec::new();
        (0..=TOPICS).for_each(|_| frame(&mut many, 0, b"\x01"));
        assert!(
            Subscriber::default()
                .take(&subscriber(0, &many))
                .is_err_and(|error| error.to_string().contains("more topics"))
        );
    }

    #[test]
    fn long_parts_have_long_lengths() {
        let long = vec![7; 300];
        let bytes = message(&[b"", b"12345678", &long]);
        assert_eq!(bytes[..12], [MORE, 0, MORE, 8, b'1', b'2', b'3', b'4', b'5', b'6', b'7', b'8']);
        assert_eq!(bytes[12..21], [LONG, 0, 0, 0, 0, 0, 0, 1, 44]);
        assert_eq!(bytes.len(), 21 + 300);
    }

    proptest! {
        #[test]
        fn chunk_boundaries_do_not_matter(cuts in prop::collection::vec(1usize..40, 1..20)) {
            let mut subscription = Vec::new();
            frame(&mut subscription, COMMAND, b"\x09SUBSCRIBE");
            let bytes = subscriber(1, &subscription);
            let (mut peer, mut said, mut rest) = (Subscriber::default(), Vec::new(), &bytes[..]);
            for cut in cuts.into_iter().cycle() {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                said.extend(peer.take(now).expect("a good peer"));
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(said, vec![SubscriberInput::Subscribed]);
        }

        #[test]
        fn no_bytes_panic_or_grow(bytes in prop::collection::vec(any::<u8>(), 0..400), after in any::<bool>()) {
            let mut peer = Subscriber::default();
            let bytes = if after { subscriber(1, &bytes) } else { bytes };
            let _ = peer.take(&bytes);
            prop_assert!(peer.topics.len() <= TOPICS);
        }
    }
}
