//! Tests of connections over streams that transfer a few bytes at a time, without the daemon.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::{Descriptor, NoticeLimits, PublishedEngine};

const LIMIT: usize = 1 << 20;

/// Stream that returns its input in pieces and takes a few bytes at a time, with a `WouldBlock` in between.
struct Pieces {
    input: VecDeque<Vec<u8>>,
    output: Vec<u8>,
    room: usize,
    ready: bool,
    ended: bool,
}

impl Pieces {
    fn new(bytes: &[u8], piece: usize, room: usize) -> Self {
        let input = bytes.chunks(piece).map(<[u8]>::to_vec).collect();
        Self { input, output: Vec::new(), room, ready: true, ended: false }
    }

    fn pause(&mut self) -> io::Result<()> {
        self.ready = !self.ready;
        if self.ready { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }
}

impl Read for Pieces {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.pause()?;
        let Some(mut piece) = self.input.pop_front() else { return Ok(0) };
        let bytes = piece.len().min(to.len());
        to[..bytes].copy_from_slice(&piece[..bytes]);
        if bytes < piece.len() {
            self.input.push_front(piece.split_off(bytes));
        }
        Ok(bytes)
    }
}

impl Write for Pieces {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        assert!(!self.ended, "written after the end");
        self.pause()?;
        let bytes = from.len().min(self.room);
        self.output.extend_from_slice(&from[..bytes]);
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Duplex for Pieces {
    fn end_writing(&mut self) {
        self.ended = true;
    }
}

fn published() -> PublishedEngine {
    let mut descriptor = Descriptor::tcp("127.0.0.1:1", "127.0.0.1", 2);
    descriptor.buffers = (1..100).map(|index| crate::Buffer::new("cpu:0", index << 12, 4096)).collect();
    PublishedEngine::new(&descriptor, LIMIT, NoticeLimits { notices: 1, bytes: 100 }).expect("a good one")
}

/// Returns the output, the last step, and the outcome.
fn talk(local: &PublishedEngine, stream: Pieces) -> (Vec<u8>, Step, Option<ConnectionOutcome>) {
    let mut connection = Connection::new(stream);
    let mut answered = None;
    for _ in 0..1_000_000 {
        let (step, _) = connection.advance(local, LIMIT);
        answered = connection.take_answered().or(answered);
        if matches!(step, Step::Close | Step::Malformed) {
            return (connection.stream.output, step, answered);
        }
    }
    panic!("it does not end");
}

#[test]
fn each_request_has_its_reply() {
    let local = published();
    let asked = RdmaHandshake::decode(b"{\"qp_num\":[1]}").expect("a request");
    let rejected = local.connect(&asked).encode();
    let descriptor = local.descriptor();
    let note = Notice { name: "a".to_owned(), message: "b".to_owned() };
    let cases = [
        (
            frame::typed(Kind::Probe, "{}"),
            frame::typed(Kind::Probe, notice::ALIVE),
            ConnectionOutcome::Typed(Kind::Probe),
        ),
        (
            frame::typed(Kind::Probe, ""),
            frame::typed(Kind::Probe, notice::ALIVE),
            ConnectionOutcome::Typed(Kind::Probe),
        ),
        (
            frame::typed(Kind::Metadata, "{\"name\":\"b\"}"),
            frame::typed(Kind::Metadata, &descriptor),
            ConnectionOutcome::Typed(Kind::Metadata),
        ),
        (
            frame::typed(Kind::Connection, "{\"qp_num\":[1]}"),
            frame::typed(Kind::Connection, &rejected),
            ConnectionOutcome::RefusedConnection,
        ),
        (frame::untyped("{\"qp_num\":[1]}"), frame::untyped(&rejected), ConnectionOutcome::RefusedConnection),
        (
            frame::typed(Kind::Notify, &note.encode()),
            frame::typed(Kind::Notify, &notice::reply_to_notice(None)),
            ConnectionOutcome::Typed(Kind::Notify),
        ),
    ];
    for (request, reply, answered) in cases {
        for (piece, room) in [(1, 1), (7, 100_000), (100_000, 3)] {
            local.take_notices();
            let (output, step, found) = talk(&local, Pieces::new(&request, piece, room));
            assert_eq!((output, step, found), (reply.clone(), Step::Close, Some(answered)));
        }
    }
    assert_eq!(local.take_notices(), [note]);
}

#[test]
fn a_refused_notice_is_answered() {
    let local = published();
    let note = Notice { name: "a".to_owned(), message: "b".to_owned() }.encode();
    local.notified(Notice::decode(note.as_bytes()).expect("a notice")).expect("room");
    for body in [note.as_str(), "{}", "no JSON"] {
        let (output, _, answered) = talk(&local, Pieces::new(&frame::typed(Kind::Notify, body), 5, 5));
        assert_eq!(answered, Some(ConnectionOutcome::RefusedNotice));
        let text = String::from_utf8(output).expect("text");
        assert!(text.contains("\"name\":\"\"") && text.contains("refused: "), "{text}");
    }
}

#[test]
fn only_notices_and_connections_cost_memory() {
    let local = published();
    for kind in [Kind::Connection, Kind::Metadata, Kind::Probe, Kind::Notify] {
        let request = frame::typed(kind, &"x".repeat(LIMIT - 1));
        let mut connection = Connection::new(Pieces::new(&request[..request.len() - 1], READ_BYTES, 100));
        while connection.advance(&local, LIMIT).0 == Step::Wait && !connection.stream.input.is_empty() {}
        let kept = matches!(kind, Kind::Notify | Kind::Connection);
        assert_eq!(connection.held_bytes() > 0, kept, "{kind}");
    }
}

#[test]
fn other_protocols_get_nothing() {
    let local = published();
    for bytes in [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], b"\x16\x03\x01\x02\0\x01\0\x01\xfc", &[0; 100]] {
        assert_eq!(talk(&local, Pieces::new(bytes, 4, 4)), (Vec::new(), Step::Malformed, None));
    }
    let half = &frame::typed(Kind::Probe, "{}")[..10];
    assert_eq!(talk(&local, Pieces::new(half, 4, 4)), (Vec::new(), Step::Close, None));
    assert_eq!(talk(&local, Pieces::new(b"", 4, 4)), (Vec::new(), Step::Close, None));
}

#[test]
fn bytes_after_the_request_are_not_another_request() {
    let local = published();
    let request = frame::typed(Kind::Probe, "{}").repeat(3);
    let (output, _, _) = talk(&local, Pieces::new(&request, 5, 50));
    assert_eq!(output, frame::typed(Kind::Probe, notice::ALIVE));
}

proptest! {
    #[test]
    fn any_bytes_end(bytes in vec(any::<u8>(), 0..64), small in any::<bool>(), piece in 1usize..20) {
        let local = published();
        let mut bytes = bytes;
        if small && bytes.len() >= 8 {
            bytes[1..8].fill(0);
        }
        talk(&local, Pieces::new(&bytes, piece, piece));
    }
}
