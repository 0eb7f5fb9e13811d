//! Segments of an engine: opened by name, described by their owners, and closed.

pub(crate) mod file_name;
mod files;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvplane_client::{Intent, PeerId, PeerKind, Request, SubmitOptions};
use kvplane_engine::cpu;
use kvplane_proto::Status;

use crate::batch::{Batch, Parts, State};
use crate::directory::{Directory, aside};
use crate::driver::Work;
use crate::driver::initiators::Initiators;
use crate::error::{ArgumentError, Error};
use crate::lock;
use crate::rails::near::Theirs;
use crate::segment::table::TableLock;
use crate::segment::{Remote, SegmentHandle, SegmentInfo, unknown};
use file_name::is_file;
use files::Files;

/// Deadline of a peer's description of its segment.
pub(crate) const DESCRIBE: Duration = Duration::from_secs(5);
/// Limit of concurrent requests to owners.
const ASKED_AT_ONCE: usize = 32;

/// Open segments of one engine: memory of peers, as its owners described it, and files of this host.
///
/// [`TransferEngine`](crate::TransferEngine) opens and closes them; here are the operations that few programs need.
pub struct Segments {
    directory: Arc<Directory>,
    initiators: Arc<Initiators>,
    table: TableLock,
    files: Files,
}

impl core::fmt::Debug for Segments {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Segments").field("open", &self.table.read().handles().len()).finish_non_exhaustive()
    }
}

impl Segments {
    /// Creates the segments of an engine, none of them open. `files` allows files to be opened by name.
    pub(crate) fn new(table: TableLock, files: bool, directory: &Arc<Directory>, initiators: &Arc<Initiators>) -> Self {
        let (directory, initiators) = (Arc::clone(directory), Arc::clone(initiators));
        Self { directory, initiators, table, files: Files::new(files) }
    }

    /// Opens a segment: see [`TransferEngine::open_segment`](crate::TransferEngine::open_segment).
    pub(crate) fn open(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            return self.open_file(name, true);
        }
        if name == self.directory.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        {
            let mut table = self.table.write();
            if let Some((handle, remote)) = table.by_name(name)
                && !remote.is_stale()
            {
                table.reopen(handle);
                return Ok(handle);
            }
        }
        self.open_no_cache(name)
    }

    /// Opens a segment like [`TransferEngine::open_segment`](crate::TransferEngine::open_segment), and requests its
    /// description from its owner even if it is open.
    ///
    /// # Errors
    /// Errors of [`TransferEngine::open_segment`](crate::TransferEngine::open_segment).
    pub fn open_no_cache(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            return self.open_file(name, false);
        }
        if name == self.directory.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        let opened = self.describe(name, DESCRIBE).and_then(|remote| self.table.write().open(Arc::new(remote)));
        // A cached description may be that of a former incarnation.
        self.initiators.settle();
        opened
    }

    fn open_file(&self, name: &str, cached: bool) -> Result<SegmentHandle, Error> {
        self.files.open(name, cached, &self.table, &self.initiators).inspect_err(|_| self.initiators.settle())
    }

    /// Closes a segment once; the last close forgets it.
    pub(crate) fn close(&self, handle: SegmentHandle) -> Result<(), Error> {
        if handle == SegmentHandle::LOCAL {
            return Ok(());
        }
        if !self.table.write().close(handle) {
            return Err(unknown(handle));
        }
        self.initiators.settle();
        Ok(())
    }

    /// Returns an open segment; `None` for the engine's own.
    pub(crate) fn get(&self, handle: SegmentHandle) -> Option<Arc<Remote>> {
        self.table.read().get(handle).cloned()
    }

    /// Returns the description of a segment that is not the engine's own.
    pub(crate) fn info(&self, handle: SegmentHandle) -> Result<SegmentInfo, Error> {
        self.table.read().get(handle).map(|remote| remote.info()).ok_or_else(|| unknown(handle))
    }

    /// Returns the name of the engine that accepts notices for a segment.
    pub(crate) fn name_of(&self, handle: SegmentHandle) -> Result<String, Error> {
        if handle == SegmentHandle::LOCAL {
            return Ok(self.directory.name().to_owned());
        }
        let table = self.table.read();
        let remote = table.get(handle).ok_or_else(|| unknown(handle))?;
        match remote.file {
            Some(_) => Err(ArgumentError::NoticeToFile { name: remote.name.clone() }.into()),
            None => Ok(remote.name.clone()),
        }
    }

    /// Describes how a file would be read and written. Creates none.
    pub(crate) fn explain_file(&self, name: &str) -> Result<String, Error> {
        self.files.explain(name)
    }

    /// Requests the present descriptions of all open segments from their owners.
    ///
    /// # Errors
    /// Error of the first segment owner that does not answer; the others are queried nevertheless.
    pub fn refresh(&self) -> Result<(), Error> {
        // The table is not locked during the requests.
        let handles = self.table.read().handles();
        self.refresh_these(&handles, DESCRIBE)
    }

    /// Flushes the writes of completed batches to a file segment. Blocks as long as the device takes; transfers
    /// continue meanwhile.
    ///
    /// # Errors
    /// When the handle is not open or not a file, or the device failed: the state of all writes since the last flush is
    /// then unknown.
    pub fn sync_file(&self, handle: SegmentHandle) -> Result<(), Error> {
        let remote = self.get(handle);
        match remote.as_deref() {
            Some(Remote { file: Some(file), .. }) => files::sync(file),
            Some(_) => Err(ArgumentError::NotFile { handle: Some(handle.to_bits()) }.into()),
            None if handle == SegmentHandle::LOCAL => Err(ArgumentError::NotFile { handle: None }.into()),
            None => Err(unknown(handle)),
        }
    }

    /// Requests descriptions from several owners in parallel, so that an unreachable one does not delay the others.
    ///
    /// # Errors
    /// The error of one owner that did not answer; the others were asked nevertheless.
    pub(crate) fn refresh_these(&self, handles: &[SegmentHandle], timeout: Duration) -> Result<(), Error> {
        if let [handle] = handles {
            return self.refresh_one(*handle, timeout);
        }
        let until = Instant::now() + timeout;
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        let ask = || {
            while let Some(&handle) = handles.get(next.fetch_add(1, Ordering::Relaxed)) {
                let left = until.saturating_duration_since(Instant::now());
                if let Err(error) = self.refresh_one(handle, left) {
                    lock(&failure).get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..handles.len().min(ASKED_AT_ONCE) {
                // Without the thread, fewer owners are asked at a time.
                let builder = std::thread::Builder::new().name("kvp-refresh".to_owned());
                let _ = builder.spawn_scoped(scope, ask);
            }
            ask();
        });
        let failure = lock(&failure).take();
        failure.map_or(Ok(()), Err)
    }

    /// Requests a segment's description from its owner again, within `timeout`.
    fn refresh_one(&self, handle: SegmentHandle, timeout: Duration) -> Result<(), Error> {
        let known = self.table.read().get(handle).map(|remote| (remote.name.clone(), remote.file.is_some()));
        let (name, file) = known.ok_or_else(|| unknown(handle))?;
        if file {
            return Ok(());
        }
        let remote = self.describe(&name, timeout.min(DESCRIBE))?;
        self.table.write().renew(handle, Arc::new(remote));
        self.initiators.settle();
        Ok(())
    }

    fn describe(&self, name: &str, timeout: Duration) -> Result<Remote, Error> {
        let start_ns = cpu::monotonic_ns();
        let deadline_ns = start_ns.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let (directory, wanted) = (Arc::clone(&self.directory), name.to_owned());
        let (descriptor, address) = aside(move || {
            let descriptor = directory.find(&wanted, timeout)?;
            let left_ns = deadline_ns.saturating_sub(cpu::monotonic_ns());
            let address = directory.paths().address_of(&descriptor, Duration::from_nanos(left_ns))?;
            Ok((descriptor, address))
        })?;
        let peer = self.table.write().peers.at(&address, name);
        if let PeerKind::MooncakeRdma { .. } = address.kind {
            let (_, known, generation) = self.directory.paths().stock().learn(&descriptor)?;
            return Ok(Remote::stock_rdma(name, peer, &descriptor.buffers, known, generation));
        }
        if address.kind != PeerKind::Native {
            return Ok(Remote::foreign(name, peer, &descriptor.buffers));
        }
        let theirs = Theirs::of(&descriptor);
        peer.set_near(theirs.near.clone());
        let asked = Remote::unknown(name, Arc::clone(&peer));
        let driver = self.initiators.of_thread();
        driver.admit(1)?;
        let parts =
            Parts { tasks: 1, slices: 1, remotes: vec![Arc::new(asked)], wants_description: true, ..Parts::default() };
        let state = Arc::new(State::new(self.initiators.next_batch(), parts));
        let options = SubmitOptions { intent: Intent::ForegroundGet, ..SubmitOptions::until(deadline_ns) };
        driver.submit(&state, Work { requests: vec![Request::OpenSegment(PeerId(0))], options, stream: None });
        let batch = Batch::new(state, Arc::clone(driver));
        batch.wait();
        let status = batch.task_status(0).outcome.unwrap_or(Status::Cancelled);
        if status != Status::Ok {
            let cause = batch.problem().map(str::to_owned);
            return Err(Error::Status { what: format!("open segment {name}"), status, cause });
        }
        let description = batch.state().description.get().map_or(&[][..], Vec::as_slice);
        Remote::new(name, peer, description, |region| theirs.place(region))
    }
}
