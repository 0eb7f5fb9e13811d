//! Files as segments: opened here, moved by the kernel's queue, answered to the client when every byte is done.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{LaneId, SliceId};
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{DirectFile, FileOptions, Interest, IoBuf, Poller, Region};
use kvplane_transport::{FileTransfer, Files, Source, Token};

/// A range of a file to be read, or written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileRange {
    pub(crate) file: SegmentId,
    pub(crate) offset: u64,
    pub(crate) write: bool,
}

/// The files of a host, and which slice waits for what on them.
#[derive(Default)]
pub struct HostFiles {
    files: Files,
    /// The slice that waits for each transfer, by its token.
    waiting: slab::Slab<(LaneId, SliceId)>,
    lanes: Vec<LaneId>,
    /// Lanes that are gone as soon as nothing of theirs is in flight.
    leaving: Vec<LaneId>,
    watched: bool,
}

impl HostFiles {
    /// An open file.
    #[must_use]
    pub fn get(&self, file: SegmentId) -> Option<&DirectFile> {
        self.files.get(file)
    }

    /// Forgets a file. Transfers in flight end first, later ones are answered `Stale`.
    pub fn close(&mut self, file: SegmentId) {
        self.files.close(file);
    }

    /// Makes what was written to a file durable. Blocks as long as the device takes.
    ///
    /// # Errors
    /// When the file is gone or the device could not.
    pub fn sync(&self, file: SegmentId) -> io::Result<()> {
        self.files.sync(file)
    }

    /// Ends all I/O that the kernel does by itself, for a host that cannot go on: waits for the kernel to let go of the
    /// memory, at most `longest`. Whether it has; until then, no batch of this host may count as done.
    pub fn end(&mut self, longest: Duration) -> bool {
        self.files.end(longest)
    }

    /// Opens a file.
    pub(crate) fn open(&mut self, path: &Path, options: FileOptions, poller: &Poller) -> io::Result<SegmentId> {
        let file = self.files.open(path, options)?;
        self.watch(poller)?;
        Ok(file)
    }

    /// Takes a file that is open already.
    pub(crate) fn add(&mut self, file: Arc<DirectFile>, poller: &Poller) -> io::Result<SegmentId> {
        let file = self.files.add(file)?;
        self.watch(poller)?;
        Ok(file)
    }

    /// Wakes a parked host when a transfer has ended.
    fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        let Some(fd) = self.files.fd().filter(|_| !self.watched) else { return Ok(()) };
        let token = Token { source: Source::Files, index: 0, generation: 0 };
        poller.add(fd, token.to_bits(), Interest::Readable)?;
        self.watched = true;
        Ok(())
    }

    /// Unpins memory that is no buffer any more.
    pub(crate) fn forget(&mut self, region: &Arc<Region>) {
        self.files.unregister(region);
    }

    /// A lane to files begins.
    pub(crate) fn connect(&mut self, lane: LaneId) {
        self.lanes.push(lane);
    }

    /// Whether a lane is one to files.
    pub(crate) fn has(&self, lane: LaneId) -> bool {
        self.lanes.contains(&lane)
    }

    /// Starts a transfer between a file and this memory, for which a slice waits.
    pub(crate) fn start(&mut self, lane: LaneId, slice: SliceId, range: FileRange, buffer: IoBuf) {
        // Memory is pinned at its first use: what is used once is used again.
        self.files.register(buffer.region());
        let token = self.waiting.insert((lane, slice)) as u64;
        let FileRange { file, offset, write } = range;
        self.files.start(FileTransfer { token, file, offset, buffer, write });
    }

    /// Withdraws what is in flight on a lane; the lane is gone when the kernel holds nothing of it.
    pub(crate) fn reset(&mut self, lane: LaneId) {
        let Self { files, waiting, lanes, leaving, .. } = self;
        lanes.retain(|held| *held != lane);
        leaving.push(lane);
        files.cancel(|token| waiting.get(token as usize).is_some_and(|(of, _)| *of == lane));
    }

    /// Whether nothing is in flight, and no lane leaves.
    pub(crate) fn is_idle(&self) -> bool {
        self.files.is_idle() && self.leaving.is_empty()
    }

    /// Looks what has ended.
    ///
    /// # Errors
    /// When the kernel's queue fails.
    pub(crate) fn poll(&mut self) -> io::Result<()> {
        self.files.poll().map(drop)
    }

    /// A transfer that has ended, and the slice that waited for it.
    pub(crate) fn poll_done(&mut self) -> Option<(LaneId, SliceId, Result<(), Status>)> {
        let (token, result) = self.files.poll_done()?;
        let (lane, slice) = self.waiting.remove(token as usize);
        Some((lane, slice, result))
    }

    /// Whether a lane is being reset: its end tells what is left of it.
    pub(crate) fn is_leaving(&self, lane: LaneId) -> bool {
        self.leaving.contains(&lane)
    }

    /// What went wrong last.
    pub(crate) fn take_problem(&mut self) -> Option<String> {
        self.files.take_problem()
    }

    /// Lanes that were reset, and of which nothing is in flight any more.
    pub(crate) fn take_gone(&mut self) -> Vec<LaneId> {
        let Self { waiting, leaving, .. } = self;
        let gone: Vec<LaneId> =
            leaving.iter().copied().filter(|lane| waiting.iter().all(|(_, (of, _))| of != lane)).collect();
        leaving.retain(|lane| !gone.contains(lane));
        gone
    }

    /// Gives the kernel what was started.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.files.flush()
    }
}
