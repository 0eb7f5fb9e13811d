//! Rings of one driver: a plain ring, a polled ring, and a ring of passthrough commands.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kvplane_sys::{Completion, IoBuf, RegisteredFile, Ring, RingFull};
use kvplane_tier::{Action, BlockOp};

use super::device::Part;
use super::memory::TierMemory;
use super::operations::RING_ENTRIES;
use super::passthrough::Commands;

/// Ring that an operation is submitted to, and that its completion comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RingKind {
    Commands,
    Polled,
    Plain,
}

/// Rings of one driver, and the choice between them.
pub(super) struct Rings {
    plain: Ring,
    file: RegisteredFile,
    /// Ring with polled completions.
    polled: Option<(Ring, RegisteredFile)>,
    /// True while reads and writes go to the polled ring.
    polling: bool,
    /// Ring of passthrough commands, used as long as the drive accepts them.
    commands: Option<Commands>,
    /// Scratch buffer; empty between two calls.
    completions: Vec<Completion>,
}

impl Rings {
    /// Opens the rings to this part of a device, with this memory registered (pinned) where the kernel allows. Every
    /// restriction is added to `remarks`.
    pub(super) fn open(part: &Part, memory: &TierMemory, polling: bool, remarks: &mut Vec<String>) -> io::Result<Self> {
        let mut plain = Ring::shared(RING_ENTRIES)?;
        let fd = part.ssd.claimed().file().fd();
        let file = plain.register_file(fd)?;
        let mut commands = None;
        if part.ssd.namespace().is_some() {
            match Commands::new(part, &mut plain, file, polling) {
                Ok(made) => commands = Some(made),
                Err(why) => remarks.push(refused(&why)),
            }
        }
        let mut polled = None;
        if polling {
            let made = Ring::polled(RING_ENTRIES).and_then(|mut ring| Ok((ring.register_file(fd)?, ring)));
            match made {
                Ok((file, ring)) => polled = Some((ring, file)),
                Err(error) => remarks.push(format!("completions come by interrupt: {error}")),
            }
        }
        for region in memory.regions() {
            let rings = [Some(&mut plain), polled.as_mut().map(|(ring, _)| ring)];
            let pinned = rings.into_iter().flatten().map(|ring| ring.register_region(region));
            let also = commands.as_mut().map(|commands| commands.ring.register_region(region));
            if let Some(error) = pinned.chain(also).find_map(Result::err) {
                let bytes = region.bytes();
                remarks.push(format!("{bytes} bytes of memory are not pinned, which costs CPU time: {error}"));
            }
        }
        Ok(Self { plain, file, polling: polled.is_some(), polled, commands, completions: Vec::new() })
    }

    /// Returns true if reads and writes go to the polled ring.
    #[cfg(test)]
    pub(super) const fn is_polling(&self) -> bool {
        self.polling
    }

    /// Puts an operation into a ring: as a passthrough command unless it has to use the `plain` path. Returns true if
    /// its memory was registered (pinned) before.
    pub(super) fn issue(
        &mut self,
        part: &Part,
        op: &BlockOp,
        plain: bool,
        pieces: &[IoBuf],
        token: u64,
    ) -> Result<bool, RingFull> {
        let offset = part.start + op.offset;
        let moves = !matches!(op.action, Action::Flush);
        if let Some(commands) = &mut self.commands
            && moves
            && !plain
            && commands.takes(part, op)
        {
            return commands.issue(part, op.action, pieces, offset, token);
        }
        let (ring, file) = match &mut self.polled {
            Some((ring, file)) if self.polling && moves => (ring, *file),
            _ => (&mut self.plain, self.file),
        };
        let is_pinned = matches!(pieces, [piece] if ring.is_registered(piece));
        match op.action {
            Action::Read => ring.scatter_at(file, pieces, offset, token),
            Action::Write { durable } => ring.gather_at(file, pieces, offset, durable, token),
            Action::Flush => ring.sync_data(file, token),
        }?;
        Ok(is_pinned)
    }

    /// Submits what was put into the rings.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        self.plain.submit()?;
        if let Some((ring, _)) = &mut self.polled {
            ring.submit()?;
        }
        self.commands.as_mut().map_or(Ok(()), |commands| commands.ring.submit())
    }

    /// Takes all completions.
    pub(super) fn poll(&mut self, ended: &mut VecDeque<(Completion, RingKind)>) -> io::Result<()> {
        for way in [RingKind::Commands, RingKind::Polled, RingKind::Plain] {
            match (way, &mut self.commands, &mut self.polled) {
                (RingKind::Commands, Some(commands), _) => commands.ring.poll(&mut self.completions)?,
                (RingKind::Polled, _, Some((ring, _))) => ring.poll(&mut self.completions)?,
                (RingKind::Plain, ..) => self.plain.poll(&mut self.completions)?,
                _ => 0,
            };
            ended.extend(self.completions.drain(..).map(|completion| (completion, way)));
        }
        Ok(())
    }

    /// Returns true if completions of this ring are polled.
    pub(super) fn polls(&self, way: RingKind) -> bool {
        match way {
            RingKind::Polled => true,
            RingKind::Commands => self.commands.as_ref().is_some_and(|commands| commands.polled),
            RingKind::Plain => false,
        }
    }

    /// Stops polling because the device refuses it after all. Returns a remark the first time.
    pub(super) fn stop_polling(&mut self) -> Option<String> {
        core::mem::take(&mut self.polling)
            .then(|| "completions come by interrupt: the device refuses polling".to_owned())
    }

    /// Handles a failed command. Returns a remark if the drive takes no commands at all; the failed operation is
    /// retried through io_uring, which reports its error if it fails again.
    pub(super) fn command_failed(&mut self, op: &BlockOp, result: i32) -> Option<String> {
        use kvplane_sys::errno::{EACCES, EINVAL, ENOTTY, EOPNOTSUPP, EPERM};
        let commands = self.commands.as_mut()?;
        if !commands.is_used || ![EACCES, EINVAL, ENOTTY, EOPNOTSUPP, EPERM].contains(&-result) {
            return None;
        }
        commands.is_used = false;
        let (error, bytes) = (io::Error::from_raw_os_error(-result), op.bytes);
        Some(refused(&format_args!("one of {bytes} bytes: {error}")))
    }

    /// Returns true if an operation is in flight whose completion arrives only when its ring is polled.
    pub(super) fn must_be_polled(&self) -> bool {
        let waits = |in_flight: usize| in_flight > 0;
        self.polled.as_ref().is_some_and(|(ring, _)| waits(ring.in_flight()))
            || self.commands.as_ref().is_some_and(|commands| commands.polled && waits(commands.ring.in_flight()))
    }

    /// Returns descriptors, one of which becomes readable when an unpolled operation has completed.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let commands = self.commands.as_ref().filter(|commands| !commands.polled);
        [Some(self.plain.as_fd()), commands.map(|commands| commands.ring.as_fd())].into_iter().flatten()
    }

    /// Ends all I/O for good and waits at most `longest` for the kernel to release the memory. Returns true if it has.
    pub(super) fn end(&mut self, longest: Duration) -> bool {
        let polled = self.polled.as_mut().is_none_or(|(ring, _)| ring.end(longest));
        let commands = self.commands.as_mut().is_none_or(|commands| commands.ring.end(longest));
        self.plain.end(longest) && polled && commands
    }
}

fn refused(why: &dyn fmt::Display) -> String {
    format!("the drive takes no commands, io_uring is used: {why}")
}
