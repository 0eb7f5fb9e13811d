//! NVMe passthrough: reads and writes as NVMe commands to the drive behind the device.
//!
//! Before the first command, two blocks are read by both paths and compared: the first and the last of the part. A
//! command addresses blocks of the namespace; if those were not the same blocks, nothing else here would notice in
//! time.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use kvplane_sys::{
    BLOCK_BYTES, CommandRing, HugePages, IoBuf, NamespaceError, NvmeNamespace, Region, RegionError, RegionOptions,
    RegisteredFile, Ring, RingFull,
};
use kvplane_tier::{Action, BlockOp};

use super::device::Part;
use super::operations::RING_ENTRIES;

/// Timeout of the compared reads.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reason why passthrough commands are not used.
#[derive(Debug)]
pub(super) enum PassthroughError {
    /// The device is no NVMe drive.
    NotNvme,
    /// The namespace behind the device takes no commands.
    Namespace(NamespaceError),
    /// The ring of commands, or that of plain requests, failed.
    Ring(io::Error),
    /// A ring has no room for a request.
    Full(RingFull),
    /// Memory for the compared blocks cannot be allocated.
    Memory(RegionError),
    /// The compared reads did not end within [`PATIENCE`].
    Slow { offset: u64 },
    /// One of the compared reads failed, or was short.
    Read {
        offset: u64,
        /// Path of the read: a command, or io_uring.
        way: &'static str,
        /// Bytes that were read, or a negative errno.
        result: i32,
    },
    /// A command reads another block than io_uring does.
    OtherBlock { offset: u64 },
}

impl fmt::Display for PassthroughError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotNvme => f.write_str("it is no NVMe drive"),
            Self::Namespace(error) => error.fmt(f),
            Self::Ring(error) => error.fmt(f),
            Self::Full(full) => full.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Slow { offset } => write!(f, "reading at {offset} took more than {} s", PATIENCE.as_secs()),
            Self::Read { offset, way, result } => {
                let why = io::Error::from_raw_os_error(-result.min(&0));
                write!(f, "reading a block at {offset} by {way} gave {result}: {why}")
            }
            Self::OtherBlock { offset } => write!(f, "a command reads another block at {offset} than io_uring does"),
        }
    }
}

impl std::error::Error for PassthroughError {}

impl From<NamespaceError> for PassthroughError {
    fn from(error: NamespaceError) -> Self {
        Self::Namespace(error)
    }
}

impl From<io::Error> for PassthroughError {
    fn from(error: io::Error) -> Self {
        Self::Ring(error)
    }
}

impl From<RingFull> for PassthroughError {
    fn from(full: RingFull) -> Self {
        Self::Full(full)
    }
}

impl From<RegionError> for PassthroughError {
    fn from(error: RegionError) -> Self {
        Self::Memory(error)
    }
}

/// Ring of passthrough commands.
pub(super) struct Commands {
    pub(super) ring: CommandRing,
    /// Completions arrive only when the ring is polled.
    pub(super) polled: bool,
    /// Cleared once the drive refuses commands.
    pub(super) is_used: bool,
}

impl Commands {
    /// Creates a ring for the drive of this part; `plain` and `file` address the same device through io_uring.
    pub(super) fn new(
        part: &Part,
        plain: &mut Ring,
        file: RegisteredFile,
        polled: bool,
    ) -> Result<Self, PassthroughError> {
        let namespace = part.ssd.namespace().ok_or(PassthroughError::NotNvme)?;
        let mut ring = CommandRing::of_commands(RING_ENTRIES, polled)?;
        ring.register_namespace(namespace)?;
        let mut commands = Self { ring, polled, is_used: true };
        let last = part.bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64 - BLOCK_BYTES as u64;
        for offset in [part.start, part.start + last] {
            commands.compare(namespace, plain, file, offset)?;
        }
        Ok(commands)
    }

    fn compare(
        &mut self,
        namespace: &NvmeNamespace,
        plain: &mut Ring,
        file: RegisteredFile,
        offset: u64,
    ) -> Result<(), PassthroughError> {
        let options =
            RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-compare", 2 * BLOCK_BYTES) };
        let region = Region::allocate(&options)?;
        let block = |at: usize| IoBuf::new(region.clone(), at * BLOCK_BYTES, BLOCK_BYTES);
        let mut ended = Vec::new();
        self.ring.read_command(namespace, &[block(0)], offset, 0)?;
        plain.scatter_at(file, &[block(1)], offset, 1)?;
        let until = Instant::now() + PATIENCE;
        while ended.len() < 2 {
            self.ring.poll(&mut ended)?;
            plain.poll(&mut ended)?;
            if Instant::now() > until {
                return Err(PassthroughError::Slow { offset });
            }
            std::thread::yield_now();
        }
        if let Some(bad) = ended.iter().find(|end| end.result != BLOCK_BYTES as i32) {
            let way = if bad.token == 0 { "a command" } else { "io_uring" };
            return Err(PassthroughError::Read { offset, way, result: bad.result });
        }
        let mut blocks = vec![0; 2 * BLOCK_BYTES];
        region.copy_out(0, &mut blocks);
        if blocks[..BLOCK_BYTES] != blocks[BLOCK_BYTES..] {
            return Err(PassthroughError::OtherBlock { offset });
        }
        Ok(())
    }

    /// Returns true if a command can carry out the operation.
    pub(super) fn takes(&self, part: &Part, op: &BlockOp) -> bool {
        self.is_used && part.ssd.namespace().is_some_and(|namespace| op.bytes <= namespace.command_bytes_most())
    }

    /// Queues a read or a write. Returns true if its memory was registered (pinned) before.
    pub(super) fn issue(
        &mut self,
        part: &Part,
        action: Action,
        pieces: &[IoBuf],
        offset: u64,
        token: u64,
    ) -> Result<bool, RingFull> {
        let is_pinned = matches!(pieces, [piece] if self.ring.is_registered(piece));
        let namespace = part.ssd.namespace().ok_or(RingFull)?;
        match action {
            Action::Write { durable } => self.ring.write_command(namespace, pieces, offset, durable, token),
            _ => self.ring.read_command(namespace, pieces, offset, token),
        }?;
        Ok(is_pinned)
    }
}
