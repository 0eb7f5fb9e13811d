//! NVMe commands by passthrough: reads and writes of a namespace that go to its driver without the block layer.
//!
//! Such a ring has entries of twice the size, as a command stands in one. It is for [`NvmeNamespace`]s only, and has no
//! flushes: `fdatasync` of the block device on a plain ring makes durable what commands wrote, too.
//!
//! A command moves all or nothing, so the result is the number of its bytes. What the drive refuses is given as the
//! error that the kernel would have for it. The kernel tries no command again; whoever wants that uses the plain way.

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
/// Force unit access, in the command's twelfth word.
const DURABLE: u32 = 1 << 30;
/// How long a drive may take before the kernel resets it, in milliseconds; as long as for the block layer's own.
const TIMEOUT_MS: u32 = 30_000;

/// `struct nvme_uring_cmd` as bytes: 72 of the 80 that an entry has room for.
struct Command {
    opcode: u8,
    namespace: u32,
    address: u64,
    /// Bytes, or with pieces how many.
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
    /// Makes a ring for commands of at least `entries` entries, for several threads in turn. With `polled`, completions
    /// come only to who asks: see [`Ring::polled`].
    ///
    /// # Errors
    /// When this kernel knows no such rings.
    pub fn of_commands(entries: u32, polled: bool) -> io::Result<Self> {
        let setups = if polled { &setup::POLLED_SETUPS } else { &setup::SHARED_SETUPS };
        let (uring, setup) = setup::build(entries, setups)?;
        let mut ring = Self::with(uring, setup)?;
        (ring.polled, ring.commands) = (polled, true);
        Ok(ring)
    }

    /// Makes the namespace known to the ring. One ring serves one namespace.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn register_namespace(&mut self, namespace: &NvmeNamespace) -> io::Result<()> {
        self.register_file(namespace.as_fd()).map(drop)
    }

    /// Reads a contiguous range of the claimed device into these pieces, in order.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn read_command(
        &mut self,
        namespace: &NvmeNamespace,
        pieces: &[IoBuf],
        offset: u64,
        token: u64,
    ) -> Result<(), RingFull> {
        self.command(namespace, pieces, offset, READ, false, token)
    }

    /// Writes these pieces, in order, to a contiguous range of the claimed device. With `durable` it completes only
    /// when they would survive a power failure.
    ///
    /// # Errors
    /// When the ring has no room.
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

/// The result of a command: its bytes, or the error that the kernel has for the drive's status.
pub(super) fn result_of(status: i32, bytes: usize) -> i32 {
    match status {
        0 => bytes as i32,
        error if error < 0 => error,
        // Without the bits that say whether to try again, and how much there is to be read about it.
        status => match status & 0x7ff {
            // Capacity exceeded; namespace write protected; not ready.
            0x081 => -libc::ENOSPC,
            0x020 => -libc::EROFS,
            0x082 => -libc::EAGAIN,
            // Invalid command, field, namespace or format: this way is not for this drive.
            0x001 | 0x002 | 0x00b => -libc::EOPNOTSUPP,
            _ => -libc::EIO,
        },
    }
}
