//! NVMe passthrough: reads and writes as NVMe commands to the drive behind the device.
//!
//! Before the first command, two blocks are read by both paths and compared: the first and the last of the part. A
//! command addresses blocks of the namespace; if those were not the same blocks, nothing else here would notice in
//! time.

use std::time::{Duration, Instant};

use kvplane_sys::{
    BLOCK_BYTES, CommandRing, HugePages, IoBuf, NvmeNamespace, Region, RegionOptions, RegisteredFile, Ring, RingFull,
};
use kvplane_tier::{Action, BlockOp};

use super::device::Part;
use super::operations::RING_ENTRIES;

/// Timeout of the compared reads.
const PATIENCE: Duration = Duration::from_secs(10);

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
    pub(super) fn new(part: &Part, plain: &mut Ring, file: RegisteredFile, polled: bool) -> Result<Self, String> {
        let namespace = part.ssd.namespace().ok_or("it is no NVMe drive")?;
        let mut ring = CommandRing::of_commands(RING_ENTRIES, polled).map_err(|error| error.to_string())?;
        ring.register_namespace(namespace).map_err(|error| error.to_string())?;
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
    ) -> Result<(), String> {
        let options =
            RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-compare", 2 * BLOCK_BYTES) };
        let region = Region::allocate(&options).map_err(|error| error.to_string())?;
        let block = |at: usize| IoBuf::new(region.clone(), at * BLOCK_BYTES, BLOCK_BYTES);
        let mut ended = Vec::new();
        self.ring.read_command(namespace, &[block(0)], offset, 0).map_err(|full| full.to_string())?;
        plain.scatter_at(file, &[block(1)], offset, 1).map_err(|full| full.to_string())?;
        let until = Instant::now() + PATIENCE;
        while ended.len() < 2 {
            self.ring.poll(&mut ended).map_err(|error| error.to_string())?;
            plain.poll(&mut ended).map_err(|error| error.to_string())?;
            if Instant::now() > until {
                return Err(format!("reading at {offset} took more than {} s", PATIENCE.as_secs()));
            }
            std::thread::yield_now();
        }
        if let Some(bad) = ended.iter().find(|end| end.result != BLOCK_BYTES as i32) {
            let way = if bad.token == 0 { "a command" } else { "io_uring" };
            let why = std::io::Error::from_raw_os_error(-bad.result.min(0));
            return Err(format!("reading a block at {offset} by {way} gave {}: {why}", bad.result));
        }
        let mut blocks = vec![0; 2 * BLOCK_BYTES];
        region.copy_out(0, &mut blocks);
        if blocks[..BLOCK_BYTES] != blocks[BLOCK_BYTES..] {
            return Err(format!("a command reads another block at {offset} than io_uring does"));
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
