//! Opening segments of others, and keeping what is known of them.

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

/// How long a peer has to describe its segment.
pub(crate) const DESCRIBE: Duration = Duration::from_secs(5);
/// Owners that are asked at the same time.
const ASKED_AT_ONCE: usize = 32;

impl TransferEngine {
    /// Opens the segment of the engine with this name; ours is [`SegmentHandle::LOCAL`]. One that is open already is
    /// given again, without asking its owner.
    ///
    /// `file:///path` opens a file of this host, whose addresses are offsets in it. Options follow a `?`, with `&`
    /// between them: `create=SIZE` makes it with this length where there is none, `readonly` refuses writes,
    /// `buffered` goes through the page cache even where direct I/O would work. Its length stays what it is now.
    ///
    /// # Errors
    /// When the name is no address, or nobody answers there; when the file cannot be opened, or is open for writing
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

    /// The same, asking its owner in any case.
    ///
    /// # Errors
    /// As [`Self::open_segment`].
    pub fn open_segment_no_cache(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            return self.open_file(name, false).inspect_err(|_| self.settle());
        }
        if name == self.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        let opened = self.describe(name, DESCRIBE).and_then(|remote| self.segments.write().open(Arc::new(remote)));
        // What was known of it before may have been a former incarnation's.
        self.settle();
        opened
    }

    /// Has the initiators leave the peers that nobody holds any more, as far as that is possible at once.
    pub(crate) fn settle(&self) {
        self.drivers.iter().for_each(|driver| driver.poll());
    }

    /// Takes back one opening; the last one's going forgets the segment. Batches that are in flight go on.
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

    /// What is known of a segment, without asking its owner.
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

    /// Asks the owners of all open segments what they hold now.
    ///
    /// # Errors
    /// The first owner's that does not answer; the others are asked nevertheless.
    pub fn sync_segments(&self) -> Result<(), Error> {
        // The table is not held while they are asked.
        let handles = self.segments.read().handles();
        self.refresh_all(&handles, DESCRIBE)
    }

    /// Asks the owners of several segments at the same time, so that one that is down costs the others nothing.
    ///
    /// # Errors
    /// One of those who did not answer; the others were asked nevertheless.
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
                // Without a thread for it, fewer are asked at a time.
                let builder = std::thread::Builder::new().name("kvp-refresh".to_owned());
                let _ = builder.spawn_scoped(scope, ask);
            }
            ask();
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Asks a segment's owner again what it holds, within this time.
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

    /// Whether the engine of this name lives, and how soon its handshake daemon answers.
    ///
    /// # Errors
    /// When it does not.
    pub fn probe(&self, name: &str) -> Result<Duration, Error> {
        let start = Instant::now();
        let name = name.trim_start_matches('/').to_owned();
        self.ask_directory(move |directory| directory.probe(&name))?;
        Ok(start.elapsed())
    }

    /// Leaves a notice with the owner of a segment, who finds it by [`Self::take_notices`]. Returns when it was taken.
    ///
    /// # Errors
    /// When the handle is not open, or the notice was not taken.
    pub fn notify(&self, handle: SegmentHandle, notice: &Notice) -> Result<(), Error> {
        let name = self.name_of(handle)?;
        let notice = notice.clone();
        self.ask_directory(move |directory| directory.notify(&name, &notice))
    }

    /// The notices that others left here, oldest first; each is given once. As many as wait at most are kept, and
    /// their senders told of the rest.
    #[must_use]
    pub fn take_notices(&self) -> Vec<Notice> {
        self.directory.take_notices()
    }

    /// The name of the engine that takes notices for a segment.
    pub(crate) fn name_of(&self, handle: SegmentHandle) -> Result<String, Error> {
        if handle == SegmentHandle::LOCAL {
            return Ok(self.name().to_owned());
        }
        let table = self.segments.read();
        let remote = table.get(handle).ok_or_else(|| unknown(handle))?;
        match remote.file {
            Some(_) => Err(Error::Argument(format!("{} is a file: there is nobody to take a notice", remote.name))),
            None => Ok(remote.name.clone()),
        }
    }

    /// Asks others, who may take their time: what is asked has a deadline of its own.
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
