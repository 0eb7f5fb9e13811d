//! Files as segments: opened here, moved by the kernel's queue, answered to the client when every byte is done.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{LaneId, Local, SliceId};
use kvplane_proto::SegmentId;
use kvplane_sys::{DirectFile, FileOptions, Interest, Region};
use kvplane_transport::{FileTransfer, Files, Source, Token};

use super::Host;

/// The files of a host and who waits for what on them.
#[derive(Default)]
pub(super) struct FileWork {
    files: Files,
    /// For whom each transfer is, by its token.
    waiting: slab::Slab<(LaneId, SliceId)>,
    lanes: Vec<LaneId>,
    /// Lanes that are gone as soon as nothing of theirs is under way.
    leaving: Vec<LaneId>,
    watched: bool,
}

impl FileWork {
    pub(super) fn is_idle(&self) -> bool {
        self.files.is_idle() && self.leaving.is_empty()
    }

    /// Unpins memory that is no buffer any more.
    pub(super) fn forget(&mut self, region: &Arc<Region>) {
        self.files.unregister(region);
    }

    /// Whether a lane is one to files.
    pub(super) fn has(&self, lane: LaneId) -> bool {
        self.lanes.contains(&lane)
    }
}

impl Host {
    /// Opens a file, to be read and written as a segment.
    ///
    /// # Errors
    /// When it cannot be opened: names it and says why.
    pub fn open_file(&mut self, path: &Path, options: FileOptions) -> io::Result<SegmentId> {
        let file = self.file_work.files.open(path, options)?;
        self.watch_files()?;
        Ok(file)
    }

    /// The same for a file that is open already. One that is written with direct I/O must be in one host only: hosts do
    /// not keep each other's writes of parts of a block apart.
    ///
    /// # Errors
    /// When too many files are open, or the kernel gives no ring.
    pub fn add_file(&mut self, file: Arc<DirectFile>) -> io::Result<SegmentId> {
        let file = self.file_work.files.add(file)?;
        self.watch_files()?;
        Ok(file)
    }

    /// Forgets a file. Transfers under way end first, later ones are answered `Stale`.
    pub fn close_file(&mut self, file: SegmentId) {
        self.file_work.files.close(file);
    }

    /// An open file.
    #[must_use]
    pub fn file(&self, file: SegmentId) -> Option<&DirectFile> {
        self.file_work.files.get(file)
    }

    /// Makes what was written to a file durable. Blocks as long as the device takes.
    ///
    /// # Errors
    /// When the file is gone or the device could not.
    pub fn sync_file(&self, file: SegmentId) -> io::Result<()> {
        self.file_work.files.sync(file)
    }

    /// Ends all I/O that the kernel does by itself, for a host that cannot go on: waits for the kernel to let go of the
    /// memory, at most `longest`. Whether it has; until then, no batch of this host may count as done.
    pub fn end_files(&mut self, longest: Duration) -> bool {
        self.file_work.files.end(longest)
    }

    /// Wakes a parked host when a transfer has ended.
    fn watch_files(&mut self) -> io::Result<()> {
        let Some(fd) = self.file_work.files.fd().filter(|_| !self.file_work.watched) else { return Ok(()) };
        let token = Token { source: Source::Files, index: 0, generation: 0 };
        self.poller.add(fd, token.to_bits(), Interest::Readable)?;
        self.file_work.watched = true;
        Ok(())
    }

    pub(super) fn connect_files(&mut self, lane: LaneId, now_ns: u64) {
        self.file_work.lanes.push(lane);
        if let Some(client) = &mut self.client {
            client.connected(lane, now_ns);
        }
    }

    pub(super) fn start_file(
        &mut self,
        (lane, slice): (LaneId, SliceId),
        (file, offset): (SegmentId, u64),
        local: Local,
        write: bool,
    ) {
        let buffer = self.local(local);
        // Memory is pinned at its first use: what is used once is used again.
        self.file_work.files.register(buffer.region());
        let token = self.file_work.waiting.insert((lane, slice)) as u64;
        self.file_work.files.start(FileTransfer { token, file, offset, buffer, write });
    }

    /// Withdraws what is under way on a lane; the lane is gone when the kernel holds nothing of it.
    pub(super) fn reset_files(&mut self, lane: LaneId) {
        let FileWork { files, waiting, lanes, leaving, .. } = &mut self.file_work;
        lanes.retain(|held| *held != lane);
        leaving.push(lane);
        files.cancel(|token| waiting.get(token as usize).is_some_and(|(of, _)| *of == lane));
    }

    /// Takes what has ended. Whether anything did.
    ///
    /// # Errors
    /// When the kernel's queue fails.
    pub(super) fn take_files(&mut self) -> io::Result<bool> {
        if self.file_work.is_idle() {
            return Ok(false);
        }
        self.file_work.files.poll()?;
        let mut progress = false;
        while let Some((token, result)) = self.file_work.files.poll_done() {
            progress = true;
            let now_ns = self.arrival_ns();
            let (lane, slice) = self.file_work.waiting.remove(token as usize);
            // What is left of a lane that is being reset is told by its end.
            if !self.file_work.leaving.contains(&lane) {
                self.copied(lane, slice, result.map(|()| 0), now_ns);
            }
        }
        if let Some(problem) = self.file_work.files.take_problem() {
            self.notices.problem(problem);
        }
        let FileWork { waiting, leaving, .. } = &mut self.file_work;
        let gone: Vec<LaneId> =
            leaving.iter().copied().filter(|lane| waiting.iter().all(|(_, (of, _))| of != lane)).collect();
        leaving.retain(|lane| !gone.contains(lane));
        for lane in gone {
            progress = true;
            if let Some(client) = &mut self.client {
                client.lane_gone(lane, self.rounds.now_ns());
            }
        }
        Ok(progress)
    }

    pub(super) fn flush_files(&mut self) -> io::Result<()> {
        self.file_work.files.flush()
    }
}
