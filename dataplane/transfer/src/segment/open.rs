//! Opening of peers' segments, and updates of their descriptions.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane_client::{Intent, PeerId, PeerKind, Request, SubmitOptions};
use kvplane_engine::cpu;
use kvplane_mooncake::Notice;
use kvplane_proto::Status;
use kvplane_sys::interrupt;

use crate::TransferEngine;
use crate::batch::{Batch, Parts, State};
use crate::directory::Directory;
use crate::driver::Work;
use crate::error::Error;
use crate::files::file_name::is_file;
use crate::rails::near::Theirs;
use crate::segment::{BufferInfo, Remote, SegmentHandle, SegmentInfo};

/// Deadline of a peer's description of its segment.
pub(crate) const DESCRIBE: Duration = Duration::from_secs(5);
/// Limit of concurrent requests to owners.
const ASKED_AT_ONCE: usize = 32;

impl TransferEngine {
    /// Opens the segment of the engine with this name; this engine's own is [`SegmentHandle::LOCAL`]. The handle of an
    /// open segment is returned again, without a request to its owner.
    ///
    /// `file:///path` opens a file of this host, whose addresses are offsets in it. Options follow a `?`, separated by
    /// `&`: `create=SIZE` creates a missing file with this length, `readonly` rejects writes, `buffered` goes through
    /// the page cache even where direct I/O would work. The length of the segment is that at the time of opening.
    ///
    /// # Errors
    /// When the name is no address, or no engine answers there; when the file cannot be opened, or is open for writing
    /// with other options.
    pub fn open_segment(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            return self.open_file(name, true).inspect_err(|_| self.settle());
        }
        if name == self.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        {
            let mut table = self.segments.write();
            if let Some((handle, remote)) = table.by_name(name)
                && !remote.is_stale()
            {
                table.reopen(handle);
                return Ok(handle);
            }
        }
        self.open_segment_no_cache(name)
    }

    /// Like [`Self::open_segment`], and requests the description from its owner in any case.
    ///
    /// # Errors
    /// Errors of [`Self::open_segment`].
    pub fn open_segment_no_cache(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            return self.open_file(name, false).inspect_err(|_| self.settle());
        }
        if name == self.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        let opened = self.describe(name, DESCRIBE).and_then(|remote| self.segments.write().open(Arc::new(remote)));
        // A cached description may be that of a former incarnation.
        self.settle();
        opened
    }

    /// Lets the initiators close unreferenced peers, as far as that is possible at once.
    pub(crate) fn settle(&self) {
        self.drivers.iter().for_each(|driver| driver.poll());
    }

    /// Closes a segment once; the last close forgets it. Batches in flight are not affected.
    ///
    /// # Errors
    /// When the handle is not open.
    pub fn close_segment(&self, handle: SegmentHandle) -> Result<(), Error> {
        if handle == SegmentHandle::LOCAL {
            return Ok(());
        }
        if !self.segments.write().close(handle) {
            return Err(unknown(handle));
        }
        self.settle();
        Ok(())
    }

    /// Returns the description of a segment, without a request to its owner.
    ///
    /// # Errors
    /// When the handle is not open.
    pub fn segment_info(&self, handle: SegmentHandle) -> Result<SegmentInfo, Error> {
        if handle == SegmentHandle::LOCAL {
            let map = self.memory.read();
            let shared_memory = self.config.shared_memory;
            let buffers = map.iter().map(|buffer| BufferInfo {
                address: buffer.address,
                bytes: buffer.bytes,
                shareable: shared_memory && buffer.region.fd().is_some(),
                location: Some(buffer.location.clone()),
            });
            return Ok(SegmentInfo { name: self.name().to_owned(), buffers: buffers.collect(), file: None });
        }
        self.segments.read().get(handle).map(|remote| remote.info()).ok_or_else(|| unknown(handle))
    }

    /// Requests the present descriptions of all open segments from their owners.
    ///
    /// # Errors
    /// Error of the first segment owner that does not answer; the others are queried nevertheless.
    pub fn sync_segments(&self) -> Result<(), Error> {
        // The table is not locked during the requests.
        let handles = self.segments.read().handles();
        self.refresh_all(&handles, DESCRIBE)
    }

    /// Requests descriptions from several owners in parallel, so that an unreachable one does not delay the others.
    ///
    /// # Errors
    /// The error of one owner that did not answer; the others were asked nevertheless.
    pub(crate) fn refresh_all(&self, handles: &[SegmentHandle], timeout: Duration) -> Result<(), Error> {
        if let [handle] = handles {
            return self.refresh(*handle, timeout);
        }
        let until = Instant::now() + timeout;
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        let ask = || {
            while let Some(&handle) = handles.get(next.fetch_add(1, Ordering::Relaxed)) {
                let left = until.saturating_duration_since(Instant::now());
                if let Err(error) = self.refresh(handle, left) {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
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
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Requests a segment's description from its owner again, within `timeout`.
    pub(crate) fn refresh(&self, handle: SegmentHandle, timeout: Duration) -> Result<(), Error> {
        let known = self.segments.read().get(handle).map(|remote| (remote.name.clone(), remote.file.is_some()));
        let (name, file) = known.ok_or_else(|| unknown(handle))?;
        if file {
            return Ok(());
        }
        let remote = self.describe(&name, timeout.min(DESCRIBE))?;
        self.segments.write().renew(handle, Arc::new(remote));
        self.settle();
        Ok(())
    }

    /// Checks that the engine of this name lives; returns the latency of its handshake daemon.
    ///
    /// # Errors
    /// When it does not.
    pub fn probe(&self, name: &str) -> Result<Duration, Error> {
        let start = Instant::now();
        let name = name.trim_start_matches('/').to_owned();
        self.ask_directory(move |directory| directory.probe(&name))?;
        Ok(start.elapsed())
    }

    /// Delivers a notice to the owner of a segment, which reads it with [`Self::take_notices`]. Returns when it was
    /// accepted.
    ///
    /// # Errors
    /// When the handle is not open, or the notice was not accepted.
    pub fn notify(&self, handle: SegmentHandle, notice: &Notice) -> Result<(), Error> {
        let name = self.name_of(handle)?;
        let notice = notice.clone();
        self.ask_directory(move |directory| directory.notify(&name, &notice))
    }

    /// Returns the notices that peers delivered here, oldest first, and removes them. The number of waiting notices is
    /// limited; further ones are refused, which their senders learn.
    #[must_use]
    pub fn take_notices(&self) -> Vec<Notice> {
        self.directory.take_notices()
    }

    /// Returns the name of the engine that accepts notices for a segment.
    pub(crate) fn name_of(&self, handle: SegmentHandle) -> Result<String, Error> {
        if handle == SegmentHandle::LOCAL {
            return Ok(self.name().to_owned());
        }
        let table = self.segments.read();
        let remote = table.get(handle).ok_or_else(|| unknown(handle))?;
        match remote.file {
            Some(_) => Err(Error::Argument(format!("{} is a file, which cannot receive a notice", remote.name))),
            None => Ok(remote.name.clone()),
        }
    }

    /// Runs a blocking operation of the directory, which has a deadline of its own, and can be interrupted.
    fn ask_directory<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Directory) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let directory = Arc::clone(&self.directory);
        interrupt::aside("kvp-ask", move || ask(&directory)).unwrap_or_else(|| Err(Error::interrupted()))
    }

    fn describe(&self, name: &str, timeout: Duration) -> Result<Remote, Error> {
        let start_ns = cpu::monotonic_ns();
        let deadline_ns = start_ns.saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        let wanted = name.to_owned();
        let (descriptor, address) = self.ask_directory(move |directory| {
            let descriptor = directory.find(&wanted, timeout)?;
            let left_ns = deadline_ns.saturating_sub(cpu::monotonic_ns());
            let address = directory.address_of(&descriptor, Duration::from_nanos(left_ns))?;
            Ok((descriptor, address))
        })?;
        let peer = self.segments.write().peers.at(&address, name);
        if let PeerKind::MooncakeRdma { .. } = address.kind {
            let (_, known, generation) = self.directory.stock().learn(&descriptor)?;
            return Ok(Remote::stock_rdma(name, peer, &descriptor.buffers, known, generation));
        }
        if address.kind != PeerKind::Native {
            return Ok(Remote::foreign(name, peer, &descriptor.buffers));
        }
        let theirs = Theirs::of(&descriptor);
        peer.set_near(theirs.near.clone());
        let asked = Remote::unknown(name, Arc::clone(&peer));
        let driver = self.driver();
        driver.admit(1)?;
        let parts =
            Parts { tasks: 1, slices: 1, remotes: vec![Arc::new(asked)], wants_description: true, ..Parts::default() };
        let state = Arc::new(State::new(self.next_batch(), parts));
        let options = SubmitOptions { intent: Intent::ForegroundGet, ..SubmitOptions::until(deadline_ns) };
        driver.submit(&state, Work { requests: vec![Request::OpenSegment(PeerId(0))], options });
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

pub(crate) fn unknown(handle: SegmentHandle) -> Error {
    Error::Argument(format!("segment {} is not open", handle.to_bits()))
}
