//! A peer with plain blocking sockets, and patterns that depend on the address.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::rng::mix64;
use kvplane_sys::{HugePages, Region, RegionOptions};
use kvplane_transport::mooncake::wire::{Dialect, Request};

pub(crate) const OK: [u8; 8] = [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d];
pub(crate) const REJECTED: [u8; 8] = [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d];
/// Time limit of all waits; a test that reaches it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the byte that belongs at an address.
pub(crate) fn byte_at(seed: u64, address: u64) -> u8 {
    mix64(seed ^ mix64(address / 8)).to_le_bytes()[(address % 8) as usize]
}

pub(crate) fn bytes_at(seed: u64, address: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| byte_at(seed, address.wrapping_add(i))).collect()
}

pub(crate) fn memory(bytes: usize) -> Arc<Region> {
    let options =
        RegionOptions { huge: HugePages::Never, prefault: false, ..RegionOptions::new("mooncake-test", bytes) };
    Region::allocate(&options).expect("memory")
}

pub(crate) fn content(region: &Region, offset: usize, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    region.copy_out(offset, &mut out);
    out
}

/// One side of a connection.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self::of(TcpStream::connect(address).expect("a listener"))
    }

    pub(crate) fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("an option");
        stream.set_write_timeout(Some(PATIENCE)).expect("an option");
        stream.set_nodelay(true).expect("an option");
        Self(stream)
    }

    pub(crate) fn ask(&mut self, write: bool, dialect: Dialect, address: u64, bytes: u64) {
        self.send(&Request { address, bytes, write, dialect }.encode());
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the peer takes bytes");
    }

    pub(crate) fn take(&mut self, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.0.read_exact(&mut out).expect("the peer sends bytes");
        out
    }

    pub(crate) fn take_request(&mut self) -> Request {
        let bytes = self.take(24);
        Request::decode(bytes[..].try_into().expect("24 bytes")).expect("a request")
    }

    pub(crate) fn status(&mut self) -> [u8; 8] {
        self.take(8)[..].try_into().expect("8 bytes")
    }

    /// Returns true if the peer ends the connection, orderly or by a reset, without sending bytes before.
    pub(crate) fn ends(&mut self) -> bool {
        let mut byte = [0];
        match self.0.read(&mut byte) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// A write of version 2 and its status.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> [u8; 8] {
        self.ask(true, Dialect::V2, address, bytes.len() as u64);
        self.send(bytes);
        self.status()
    }

    /// Executes a read of version 2.
    pub(crate) fn read(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        self.ask(false, Dialect::V2, address, bytes as u64);
        assert_eq!(self.status(), OK, "{bytes} at {address:#x}");
        self.take(bytes)
    }
}
