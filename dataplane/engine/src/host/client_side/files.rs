//! Files as segments: opened here, transferred by the kernel's queue, and reported to the client when every byte is
//! done.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{LaneId, SliceId};
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::{DirectFile, FileOptions, Interest, IoBuf, Poller, Region};
use kvplane_transport::{FileTransfer, Files, Source, Token};

/// Range of a file to be read or written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileRange {
    pub(crate) file: SegmentId,
    pub(crate) offset: u64,
    pub(crate) write: bool,
}

/// Files of a host, and the slices that wait for transfers.
#[derive(Default)]
pub struct HostFiles {
    files: Files,
    /// Slice that waits for each transfer, by its token.
    waiting: slab::Slab<(LaneId, SliceId)>,
    lanes: Vec<LaneId>,
    /// Lanes that are reset, and gone once they have no transfer in flight.
    leaving: Vec<LaneId>,
    watched: bool,
}

impl HostFiles {
    /// Returns an open file.
    #[must_use]
    pub fn get(&self, file: SegmentId) -> Option<&DirectFile> {
        self.files.get(file)
    }

    /// Closes a file. Transfers in flight complete first, later ones fail with `Stale`.
    pub fn close(&mut self, file: SegmentId) {
        self.files.close(file);
    }

    /// Flushes a file. Blocks as long as the device takes.
    ///
    /// # Errors
    /// If the file is gone or the device failed.
    pub fn sync(&self, file: SegmentId) -> io::Result<()> {
        self.files.sync(file)
    }

    /// Ends all I/O in the kernel, for a host that cannot continue: waits for the kernel to release the memory, at most
    /// `longest`. Returns true if it has; until then, no batch of this host may count as done.
    pub fn end(&mut self, longest: Duration) -> bool {
        self.files.end(longest)
    }

    /// Opens a file.
    pub(crate) fn open(&mut self, path: &Path, options: FileOptions, poller: &Poller) -> io::Result<SegmentId> {
        let file = self.files.open(path, options)?;
        self.watch(poller)?;
        Ok(file)
    }

    /// Adds a file that is open already.
    pub(crate) fn add(&mut self, file: Arc<DirectFile>, poller: &Poller) -> io::Result<SegmentId> {
        let file = self.files.add(file)?;
        self.watch(poller)?;
        Ok(file)
    }

    /// Registers the queue with the poller, so that the completion of a transfer wakes a parked host.
    fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        let Some(fd) = self.files.fd().filter(|_| !self.watched) else { return Ok(()) };
        let token = Token { source: Source::Files, index: 0, generation: 0 };
        poller.add(fd, token.to_bits(), Interest::Readable)?;
        self.watched = true;
        Ok(())
    }

    /// Unpins memory that is no longer a buffer.
    pub(crate) fn forget(&mut self, region: &Arc<Region>) {
        self.files.unregister(region);
    }

    /// Begins a lane to files.
    pub(crate) fn connect(&mut self, lane: LaneId) {
        self.lanes.push(lane);
    }

    /// Returns true if a lane leads to files.
    pub(crate) fn has(&self, lane: LaneId) -> bool {
        self.lanes.contains(&lane)
    }

    /// Starts a transfer between a file and this memory, for which a slice waits.
    pub(crate) fn start(&mut self, lane: LaneId, slice: SliceId, range: FileRange, buffer: IoBuf) {
        // Memory is pinned at its first use: memory that is used once is likely to be used again.
        self.files.register(buffer.region());
        let token = self.waiting.insert((lane, slice)) as u64;
        let FileRange { file, offset, write } = range;
        self.files.start(FileTransfer { token, file, offset, buffer, write });
    }

    /// Cancels the transfers in flight on a lane; the lane is gone once the kernel holds no memory of it.
    pub(crate) fn reset(&mut self, lane: LaneId) {
        let Self { files, waiting, lanes, leaving, .. } = self;
        lanes.retain(|held| *held != lane);
        leaving.push(lane);
        files.cancel(|token| waiting.get(token as usize).is_some_and(|(of, _)| *of == lane));
    }

    /// Returns true if no transfer is in flight, and no lane is being reset.
    pub(crate) fn is_idle(&self) -> bool {
        self.files.is_idle() && self.leaving.is_empty()
    }

    /// Polls for completed transfers.
    ///
    /// # Errors
    /// If the kernel's queue fails.
    pub(crate) fn poll(&mut self) -> io::Result<()> {
        self.files.poll().map(drop)
    }

    /// Returns a completed transfer, and the slice that waited for it.
    pub(crate) fn poll_done(&mut self) -> Option<(LaneId, SliceId, Result<(), Status>)> {
        let (token, result) = self.files.poll_done()?;
        let (lane, slice) = self.waiting.remove(token as usize);
        Some((lane, slice, result))
    }

    /// Returns true if a lane is being reset: its end reports all transfers that are left of it.
    pub(crate) fn is_leaving(&self, lane: LaneId) -> bool {
        self.leaving.contains(&lane)
    }

    /// Takes the text of the last error.
    pub(crate) fn take_problem(&mut self) -> Option<String> {
        self.files.take_problem()
    }

    /// Returns the lanes that were reset and have no transfer in flight any more.
    pub(crate) fn take_gone(&mut self) -> Vec<LaneId> {
        let Self { waiting, leaving, .. } = self;
        let gone: Vec<LaneId> =
            leaving.iter().copied().filter(|lane| waiting.iter().all(|(_, (of, _))| of != lane)).collect();
        leaving.retain(|lane| !gone.contains(lane));
        gone
    }

    /// Submits the started transfers to the kernel.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.files.flush()
    }
}
