//! NVMe passthrough commands: reads and writes of a namespace that bypass the block layer.
//!
//! A ring for commands has entries of twice the size, because each entry contains a command. It serves
//! [`NvmeNamespace`]s only, and has no flushes: `fdatasync` of the block device on a plain ring also makes the writes
//! of commands durable.
//!
//! A command moves all bytes or none, so its result is the number of its bytes. An error status of the drive is
//! translated to the kernel's errno for it. The kernel does not retry commands; a caller that needs retries uses the
//! block layer.

use super::operations::{KernelHold, Vectors};
use super::transfers::length;
use super::{CommandRing, RingFull, setup};
use crate::nvme::NvmeNamespace;
use crate::region::IoBuf;
use io_uring::{opcode, types};
use std::io;
use std::os::fd::AsFd;

/// `NVME_URING_CMD_IO` and `NVME_URING_CMD_IO_VEC`: `_IOWR('N', 0x80, struct nvme_uring_cmd)` and the next.
const COMMAND: u32 = 0xc048_4e80;
const COMMAND_OF_PIECES: u32 = 0xc048_4e81;

const WRITE: u8 = 1;
const READ: u8 = 2;
/// Force unit access (FUA): bit of the command's twelfth word.
const DURABLE: u32 = 1 << 30;
/// Timeout after which the kernel resets the drive, in milliseconds; that of the block layer.
const TIMEOUT_MS: u32 = 30_000;

/// `struct nvme_uring_cmd` as bytes: 72 of the 80 that an entry has room for.
struct Command {
    opcode: u8,
    namespace: u32,
    address: u64,
    /// Number of bytes; with pieces, number of pieces.
    length: u32,
    first_block: u64,
    blocks: u32,
    durable: bool,
}

impl Command {
    fn bytes(&self) -> [u8; 80] {
        let mut bytes = [0; 80];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &[self.opcode]);
        put(4, &self.namespace.to_ne_bytes());
        put(24, &self.address.to_ne_bytes());
        put(36, &self.length.to_ne_bytes());
        put(40, &(self.first_block as u32).to_ne_bytes());
        put(44, &((self.first_block >> 32) as u32).to_ne_bytes());
        let durable = if self.durable { DURABLE } else { 0 };
        put(48, &((self.blocks - 1) | durable).to_ne_bytes());
        put(64, &TIMEOUT_MS.to_ne_bytes());
        bytes
    }
}

impl CommandRing {
    /// Creates a ring for commands with at least `entries` entries, for several threads in turn. With `polled`,
    /// completions arrive only when the ring is polled: see [`Ring::polled`].
    ///
    /// # Errors
    /// When this kernel does not support such rings.
    pub fn of_commands(entries: u32, polled: bool) -> io::Result<Self> {
        let setups = if polled { &setup::POLLED_SETUPS } else { &setup::SHARED_SETUPS };
        let (uring, setup) = setup::build(entries, setups)?;
        let mut ring = Self::with(uring, setup)?;
        (ring.polled, ring.commands) = (polled, true);
        Ok(ring)
    }

    /// Registers the namespace with the ring. One ring serves one namespace.
    ///
    /// # Errors
    /// When the kernel rejects it.
    pub fn register_namespace(&mut self, namespace: &NvmeNamespace) -> io::Result<()> {
        self.register_file(namespace.as_fd()).map(drop)
    }

    /// Reads a contiguous range of the claimed device into these pieces, in order.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn read_command(
        &mut self,
        namespace: &NvmeNamespace,
        pieces: &[IoBuf],
        offset: u64,
        token: u64,
    ) -> Result<(), RingFull> {
        self.command(namespace, pieces, offset, READ, false, token)
    }

    /// Writes these pieces, in order, to a contiguous range of the claimed device. With `durable` the write completes
    /// only when it survives a power failure.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn write_command(
        &mut self,
        namespace: &NvmeNamespace,
        pieces: &[IoBuf],
        offset: u64,
        durable: bool,
        token: u64,
    ) -> Result<(), RingFull> {
        self.command(namespace, pieces, offset, WRITE, durable, token)
    }

    fn command(
        &mut self,
        namespace: &NvmeNamespace,
        pieces: &[IoBuf],
        offset: u64,
        opcode: u8,
        durable: bool,
        token: u64,
    ) -> Result<(), RingFull> {
        let bytes: usize = pieces.iter().map(IoBuf::bytes).sum();
        let (first_block, blocks) = namespace.blocks_of(offset, bytes as u64);
        let command = |address: u64, length: u32| {
            let namespace = namespace.id();
            Command { opcode, namespace, address, length, first_block, blocks, durable }.bytes()
        };
        let fd = types::Fixed(0);
        let (held, entry) = match pieces {
            [piece] => {
                let bytes = command(piece.pointer().addr() as u64, length(piece));
                let entry = opcode::UringCmd80::new(fd, COMMAND).cmd(bytes).buf_index(self.fixed.place_of(piece));
                (KernelHold::One(piece.clone()), entry)
            }
            _ => {
                let vectors = Vectors::of(pieces);
                let (list, count) = vectors.list();
                let entry = opcode::UringCmd80::new(fd, COMMAND_OF_PIECES).cmd(command(list.addr() as u64, count));
                (KernelHold::Several(vectors), entry)
            }
        };
        self.start(token, held, entry.build())
    }
}

/// Returns the result of a command: its bytes, or the kernel's errno for the drive's status.
pub(super) fn result_of(status: i32, bytes: usize) -> i32 {
    match status {
        0 => bytes as i32,
        error if error < 0 => error,
        // Masks the do-not-retry and more-information bits.
        status => match status & 0x7ff {
            // Capacity exceeded; namespace write protected; not ready.
            0x081 => -libc::ENOSPC,
            0x020 => -libc::EROFS,
            0x082 => -libc::EAGAIN,
            // Invalid command, field, namespace or format: the drive does not support this path.
            0x001 | 0x002 | 0x00b => -libc::EOPNOTSUPP,
            _ => -libc::EIO,
        },
    }
}
