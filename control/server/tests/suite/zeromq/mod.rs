//! Publishers and routers of ZeroMQ, hand-written on real sockets.

#![allow(dead_code, unreachable_pub)] // Not every test file uses everything.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Accepts a peer of ZMTP, from its greeting on.
pub async fn accept(listener: &TcpListener, kind: &str) -> TcpStream {
    let (stream, _) = listener.accept().await.expect("a connection");
    greet(stream, kind).await
}

/// Greets a peer that was accepted.
pub async fn greet(mut stream: TcpStream, kind: &str) -> TcpStream {
    let mut greeting = vec![0u8; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    let property = [b"\x05READY\x0bSocket-Type\0\0\0".as_slice(), &[kind.len() as u8], kind.as_bytes()].concat();
    greeting.extend([4, property.len() as u8]);
    greeting.extend_from_slice(&property);
    stream.write_all(&greeting).await.expect("sent");
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await.expect("a greeting");
    assert_eq!((theirs[0], theirs[9] & 1, theirs[10]), (0xff, 1, 3));
    let ready = read_frame(&mut stream).await;
    assert!(ready.starts_with(b"\x05READY"));
    stream
}

pub async fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = [0; 2];
    stream.read_exact(&mut head).await.expect("a frame");
    let mut body = vec![0; usize::from(head[1])];
    stream.read_exact(&mut body).await.expect("a body");
    body
}

pub async fn send(stream: &mut TcpStream, parts: &[&[u8]]) {
    stream.write_all(&message(parts)).await.expect("sent");
}

/// The bytes of a message of `parts`. Several may be sent by one write, which succeeds even if the peer hangs up after
/// the first.
pub fn message(parts: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        out.push(if at + 1 < parts.len() { 1 } else { 0 } | 2);
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}
