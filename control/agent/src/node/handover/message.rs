//! Messages of a handover: JSON behind a magic and a length, with descriptors beside the first byte.

use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvplane_sys::{cpu, unix};
use serde_json::Value;

use super::HandoverError;

const MAGIC: [u8; 4] = *b"KVPH";
const HEADER_BYTES: usize = 8;
/// Longest message, in bytes.
const MESSAGE_BYTES: usize = 1 << 20;

/// Checks that the process at the other end belongs to the user of this one.
pub(super) fn check_user(stream: &UnixStream) -> Result<(), HandoverError> {
    let peer = unix::peer_credentials(stream).map_err(failed("look at the other process"))?;
    if peer.uid == cpu::effective_uid() { Ok(()) } else { Err(HandoverError::OtherUser { uid: peer.uid }) }
}

fn failed(action: &'static str) -> impl FnOnce(io::Error) -> HandoverError {
    move |source| match source.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
            HandoverError::Closed
        }
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => HandoverError::Silent,
        _ => HandoverError::Stream { action, source },
    }
}

/// Sends a message, and descriptors with it.
pub(super) fn send(
    stream: &UnixStream,
    message: &Value,
    fds: &[BorrowedFd<'_>],
    within: Duration,
) -> Result<(), HandoverError> {
    let body = message.to_string();
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body.as_bytes());
    stream.set_write_timeout(Some(within)).map_err(failed("send"))?;
    unix::send_with_fds(stream, &bytes, fds).map_err(failed("send"))
}

/// Receives a message, and exactly this number of descriptors with it.
pub(super) fn receive(
    stream: &UnixStream,
    fds: usize,
    within: Duration,
) -> Result<(Value, Vec<OwnedFd>), HandoverError> {
    let failed = || failed("receive");
    stream.set_read_timeout(Some(within)).map_err(failed())?;
    let mut header = [0; HEADER_BYTES];
    let (arrived, passed) = unix::recv_with_fds(stream, &mut header, fds).map_err(failed())?;
    if arrived == 0 {
        return Err(HandoverError::Closed);
    }
    (&*stream).read_exact(&mut header[arrived..]).map_err(failed())?;
    let [magic @ .., a, b, c, d] = header;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if magic != MAGIC || length > MESSAGE_BYTES {
        return Err(HandoverError::Malformed { what: "its header" });
    }
    let mut body = vec![0; length];
    (&*stream).read_exact(&mut body).map_err(failed())?;
    let message: Value = serde_json::from_slice(&body).map_err(|_| HandoverError::Malformed { what: "its JSON" })?;
    // A process that refuses has no descriptors to pass.
    if let Some(text) = message.get("refused").and_then(Value::as_str) {
        return Err(HandoverError::Refused { text: text.to_owned() });
    }
    if passed.len() != fds {
        return Err(HandoverError::Malformed { what: "its number of descriptors" });
    }
    Ok((message, passed))
}

/// Returns a text of a message.
pub(super) fn text<'a>(message: &'a Value, name: &'static str) -> Result<&'a str, HandoverError> {
    message.get(name).and_then(Value::as_str).ok_or(HandoverError::Malformed { what: name })
}

/// Returns a number of a message.
pub(super) fn number(message: &Value, name: &'static str) -> Result<u64, HandoverError> {
    message.get(name).and_then(Value::as_u64).ok_or(HandoverError::Malformed { what: name })
}

/// Checks the kind of a message.
pub(super) fn expect(message: &Value, kind: &'static str) -> Result<(), HandoverError> {
    if text(message, "kind")? == kind { Ok(()) } else { Err(HandoverError::Malformed { what: kind }) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use serde_json::json;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().expect("a pair")
    }

    #[test]
    fn messages_arrive_with_their_descriptors() {
        let (ours, theirs) = pair();
        check_user(&theirs).expect("the same user");
        let file = std::fs::File::open("/dev/null").expect("a file");
        send(&ours, &json!({ "kind": "shard", "shard": 3 }), &[file.as_fd(), file.as_fd()], SOON).expect("sent");
        send(&ours, &json!({ "kind": "go" }), &[], SOON).expect("sent");
        let (message, fds) = receive(&theirs, 2, SOON).expect("received");
        expect(&message, "shard").expect("its kind");
        assert_eq!((number(&message, "shard").expect("a number"), fds.len()), (3, 2));
        assert!(matches!(text(&message, "shard"), Err(HandoverError::Malformed { what: "shard" })));
        let (message, _) = receive(&theirs, 0, SOON).expect("received");
        assert!(matches!(expect(&message, "taken"), Err(HandoverError::Malformed { what: "taken" })));
        drop(ours);
        assert!(matches!(receive(&theirs, 0, SOON), Err(HandoverError::Closed)));
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        let received = |bytes: &[u8], fds: usize| {
            let (mut ours, theirs) = pair();
            ours.write_all(bytes).expect("written");
            drop(ours);
            receive(&theirs, fds, SOON).expect_err("no message")
        };
        assert!(matches!(received(b"KVP", 0), HandoverError::Closed));
        assert!(matches!(received(b"KVPX\x02\0\0\0{}", 0), HandoverError::Malformed { what: "its header" }));
        assert!(matches!(received(b"KVPH\xff\xff\xff\xff{}", 0), HandoverError::Malformed { what: "its header" }));
        assert!(matches!(received(b"KVPH\x02\0\0\0{]", 0), HandoverError::Malformed { what: "its JSON" }));
        assert!(matches!(received(b"KVPH\x03\0\0\0{}", 0), HandoverError::Closed));
        assert!(matches!(received(b"KVPH\x02\0\0\0{}", 1), HandoverError::Malformed { .. }));
        let refused = b"KVPH\x11\0\0\0{\"refused\":\"why\"}";
        assert!(matches!(received(refused, 2), HandoverError::Refused { text } if text == "why"));
        // Descriptors that nobody expects.
        let (ours, theirs) = pair();
        let file = std::fs::File::open("/dev/null").expect("a file");
        send(&ours, &json!({}), &[file.as_fd()], SOON).expect("sent");
        assert!(matches!(receive(&theirs, 0, SOON), Err(HandoverError::Stream { .. })));
    }
}
