//! Staged batches: requests of this process whose memory is a device's.
//!
//! A staged batch is carried out in pieces. Each piece has one or more requests, or a part of a long one, and a chunk
//! of pinned memory. The piece of a write or a put is copied from the device first, then goes to the client as a batch
//! of its own whose memory is the chunk; the piece of a read or a get goes to the client first and is copied to the
//! device then. So every transport moves device memory, and copies run under the transfers of other pieces. Requests of
//! the batch whose memory is the host's go to the client as they are. A request for an object is never split: it has
//! one checksum and one version.
//!
//! Where RDMA devices access the memory, a piece has no chunk: its requests go to the client with the device's memory
//! once the caller's earlier operations on it are done. Requests that the RDMA devices cannot carry out, because of the
//! peer, are then staged.
//!
//! Where the segment is device memory of a peer on this host that is mapped here, a piece is copied between the memory
//! at both ends instead, without a chunk and without the client.
//!
//! Where the node of a get has shared its pool with this process, the device's copy engine reads the pool itself, and
//! the chunk stays unused: see [`reads`](super::reads). A put always goes through its chunk: a copy engine goes on
//! after the death of its process, and nothing tells the node when it has written to a reservation for the last time.
//!
//! Batches with requests that have not begun take turns, the more urgent class first. A batch that ends early (by its
//! deadline, or because it was cancelled) begins no further piece; it is complete when nothing accesses its memory any
//! more.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use kvplane_client::{
    Local, PutBook, Request, SegmentTarget, SubmitError, SubmitOptions, TaskResult, check_requests, may_copy,
};
use kvplane_proto::{BatchId, Status};
use kvplane_sys::IoBuf;
use kvplane_sys::device::{Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, StreamHandle};

use super::reads::{DirectReads, copies_to, copy_host};
use super::stages::{DeviceStages, Step};
use crate::host::{ClientHost, OwnSide, PartPlace, PeerCopies, PeerPath, PeerRange};
use crate::staging::{
    ALIGN_BYTES, AllocationChecks, CHUNK_BYTES, Chunk, MemoryRange, STAGE_BYTES, StagedMemory, StagingCounters,
};

/// Bit of the index that marks the ids of staged batches.
const STAGED: u32 = 1 << 31;

/// Shortest piece of a long batch in bytes. The first and the last pieces are so short, because the copy of the one and
/// the transfer of the other run alone.
const SHORT_PIECE_BYTES: u64 = 256 << 10;

/// Shortest part of a request, where it is not the last one, in bytes.
const PART_BYTES: u64 = 64 << 10;

/// Longest piece in bytes, in the middle of a batch, where each piece costs some calls of the driver.
const LONG_PIECE_BYTES: u64 = 4 << 20;

/// Bytes of chunks of one batch in flight from which on it begins no piece: half of a stage, so that a batch whose peer
/// is silent leaves room for others.
const BATCH_BYTES: u64 = STAGE_BYTES as u64 / 2;

/// Most pieces of one batch in flight, whatever their length.
const PIECES_MOST: usize = 16;

/// Largest number of requests in a piece.
const PIECE_REQUESTS: usize = 1024;

/// First index of buffers of pieces.
const PIECES_AT: u32 = 1 << 30;

/// Longest piece of copies between devices of two processes: no memory is taken for it, so it is only bounded for the
/// time that a cancelled batch waits.
const PEER_PIECE_BYTES: u64 = 16 << 20;

/// Longest piece of copies between memory of the host and a peer's device: the driver may move pageable memory within
/// the call.
const PEER_HOST_PIECE_BYTES: u64 = 4 << 20;

/// Memory of a request that has none.
const NO_MEMORY: Local = Local { buffer: 0, offset: 0, bytes: 0 };

/// Staged batch.
struct Batch {
    generation: u32,
    requests: Vec<Request>,
    puts: PutBook,
    options: SubmitOptions,
    /// Results so far: of a request whose parts have not all ended, the bytes moved and the first failure.
    results: Vec<TaskResult>,
    /// Parts of each request in flight, and one more while a part has not begun.
    open: Vec<u32>,
    open_tasks: usize,
    /// Request, and offset in it, at which the next piece begins.
    cursor: (usize, u64),
    /// Ranges of requests before that which no RDMA device has copied: they are staged.
    refused: VecDeque<RequestRange>,
    /// Pieces in flight, and the bytes of their chunks.
    pieces: usize,
    chunk_bytes: u64,
    cuts: Cuts,
    /// Status of everything that has not begun, if the batch ends early.
    end: Option<Status>,
    /// Its number for the device memory of peers; `None` if it named none: then no copies of a peer's memory wait for
    /// the caller's stream.
    peer_batch: Option<u64>,
}

impl Batch {
    const fn is_complete(&self) -> bool {
        self.open_tasks == 0 && self.pieces == 0
    }

    fn has_more(&self) -> bool {
        self.cursor.0 < self.requests.len() || !self.refused.is_empty()
    }

    /// Returns the request that the next piece begins with.
    fn next_request(&self) -> Option<&Request> {
        let task = self.refused.front().map_or(self.cursor.0, |range| range.task);
        self.requests.get(task)
    }

    /// Takes back a part that no RDMA device can carry out: it is staged.
    fn refuse(&mut self, part: &Part) {
        let whole = self.requests[part.task].local().unwrap_or(NO_MEMORY);
        let (from, bytes) = (part.local.offset - whole.offset, part.local.bytes);
        self.refused.push_back(RequestRange { task: part.task, from, bytes });
    }

    /// Returns true if another piece may begin.
    const fn may_begin(&self) -> bool {
        self.pieces < PIECES_MOST && self.chunk_bytes < BATCH_BYTES
    }
}

/// Bytes of device memory that a batch is cut in.
#[derive(Debug)]
struct Cuts {
    /// Bytes of all requests.
    all_bytes: u64,
    /// Bytes of the pieces that have begun.
    begun_bytes: u64,
}

impl Cuts {
    /// Returns the bytes that the next piece should have: pieces grow from both ends of the batch to its middle.
    fn next_bytes(&self) -> u64 {
        let left = self.all_bytes.saturating_sub(self.begun_bytes);
        if left <= SHORT_PIECE_BYTES * 3 / 2 {
            return left;
        }
        let grown = self.begun_bytes.min(left / 2).next_multiple_of(PART_BYTES);
        grown.clamp(SHORT_PIECE_BYTES, LONG_PIECE_BYTES)
    }
}

/// Reason why no piece of a batch begins at present.
enum Wait {
    /// The region of this device has no room for its chunk: batches behind it get none before it.
    Room(DeviceId),
    /// Its chunk is longer than a region, and another one of that kind is in use.
    LongChunk,
    /// A peer has not told yet whether it shares its memory.
    Peer,
}

/// Range of a request's memory.
#[derive(Clone, Copy)]
struct RequestRange {
    task: usize,
    from: u64,
    bytes: u64,
}

/// Request of a piece: a request of the batch, or a part of one.
struct Part {
    task: usize,
    /// The part's memory in the request's buffer.
    local: Local,
    /// Request to the client.
    request: Request,
    /// Memory in the chunk.
    host: Option<IoBuf>,
    /// Buffer index of that memory, if it has one of its own.
    buffer: Option<u32>,
    /// True if a copy engine has read the bytes from a pool: they are not in the chunk.
    has_arrived: bool,
    result: TaskResult,
}

/// Piece of a batch.
struct Piece {
    batch: usize,
    parts: Vec<Part>,
    carrier: Carrier,
    /// Memory in the device's stage, if the carrier needs one and it was not refused.
    chunk: Option<Chunk>,
    /// Copies from or to mapped memory of a peer that have not begun.
    mapped: Option<PeerCopies>,
    /// Reads of pools in flight.
    reads: usize,
    /// True once its transfers are over; reads may still be in flight.
    is_over: bool,
}

impl Piece {
    /// Fails the requests that have not failed before.
    fn fail(&mut self, status: Status) {
        let good = self.parts.iter_mut().filter(|part| part.result.status == Status::Ok);
        good.for_each(|part| part.result = TaskResult::of(status));
    }

    /// Returns true if one of its parts is in this place, and its memory is this buffer.
    fn has(&self, place: PartPlace, buffer: u32) -> bool {
        self.parts.get(place.part).is_some_and(|part| part.buffer == Some(buffer))
    }

    /// Returns the number of bytes that it takes of a stage.
    fn chunk_bytes(&self) -> u64 {
        self.chunk.as_ref().map_or(0, Chunk::bytes)
    }
}

/// Carrier of a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carrier {
    /// The client, with the memory as it is: the host's, or none.
    Client,
    /// The client, with memory of this device as it is: RDMA devices access it.
    Direct { device: DeviceId, is_sent: bool },
    /// The client, with a chunk of this device's stage.
    Stage { device: DeviceId, is_sent: bool, is_of_object: bool },
    /// This device, between memory of this process and mapped memory of a peer.
    Mapped {
        device: DeviceId,
        is_sent: bool,
        /// True if the memory of this process is the host's.
        is_host: bool,
    },
}

impl Carrier {
    /// Returns true if the pieces of the batch are counted: the memory of this process is a device's.
    const fn is_counted(self) -> bool {
        !matches!(self, Self::Client | Self::Mapped { is_host: true, .. })
    }

    /// Returns true if the transfers of a piece follow a step of its device: a copy, or the caller's earlier work.
    const fn begins_with_device(self) -> bool {
        matches!(self, Self::Direct { .. } | Self::Stage { is_sent: true, .. })
    }

    /// Returns the device that a piece is copied from or to, or that RDMA devices access.
    const fn device(self) -> Option<DeviceId> {
        match self {
            Self::Client => None,
            Self::Direct { device, .. } | Self::Stage { device, .. } | Self::Mapped { device, .. } => Some(device),
        }
    }

    /// Returns the longest piece in bytes; `staged_bytes` is that of a piece with a chunk.
    const fn most_bytes(self, staged_bytes: u64) -> u64 {
        match self {
            Self::Client | Self::Direct { .. } => u64::MAX,
            Self::Stage { .. } => staged_bytes,
            Self::Mapped { is_host: false, .. } => PEER_PIECE_BYTES,
            Self::Mapped { is_host: true, .. } => PEER_HOST_PIECE_BYTES,
        }
    }
}

/// Requests of the next piece of a batch.
struct NextParts {
    parts: Vec<Part>,
    /// Position behind them.
    cursor: (usize, u64),
    carrier: Carrier,
    /// Bytes that they need in a chunk.
    bytes: usize,
    mapped: Option<PeerCopies>,
}

/// Staged batches of one initiator, and the stages of its devices.
#[derive(Default)]
pub(super) struct StagedBatches {
    stages: DeviceStages,
    /// Memory with device memory in it, by the index of its buffer.
    buffers: HashMap<u32, StagedMemory>,
    /// Indices of buffers of pieces that are free below the first one that was never used, and that one's offset.
    free_pieces: Vec<u32>,
    pieces_made: u32,
    /// Names and options of the puts of a piece.
    book: PutBook,
    batches: slab::Slab<Batch>,
    generation: u32,
    /// Batches with requests that have not begun, in the order of their turns.
    queue: VecDeque<usize>,
    pieces: slab::Slab<Piece>,
    /// Reads of pools in flight, dropped after the stages have waited for them.
    reads: DirectReads,
    /// Piece of each batch of the client that carries one out.
    carried: HashMap<BatchId, usize>,
    /// Ends of requests that were not reported yet.
    finished: VecDeque<(BatchId, u32, TaskResult)>,
    /// Complete batches that were not reported yet.
    done: VecDeque<BatchId>,
}

impl StagedBatches {
    /// Registers device memory under this index.
    ///
    /// # Errors
    /// If the device's stage cannot be made, or there are too many devices.
    pub(super) fn set_buffer(
        &mut self,
        host: &mut ClientHost,
        buffer: u32,
        memory: Arc<DeviceMemory>,
    ) -> Result<(), DeviceError> {
        self.remove_buffer(host, buffer);
        self.insert(host, buffer, StagedMemory::Whole(memory))
    }

    /// Registers pieces under an index of their own. The pieces of a device are in buffers of the caller.
    ///
    /// # Errors
    /// Errors of [`Self::set_buffer`].
    pub(super) fn add_pieces(&mut self, host: &mut ClientHost, pieces: StagedMemory) -> Result<u32, DeviceError> {
        let buffer = self.free_pieces.pop().unwrap_or_else(|| {
            self.pieces_made += 1;
            PIECES_AT + self.pieces_made - 1
        });
        if let Err(error) = self.insert(host, buffer, pieces) {
            self.free_pieces.push(buffer);
            return Err(error);
        }
        Ok(buffer)
    }

    fn insert(&mut self, host: &mut ClientHost, buffer: u32, memory: StagedMemory) -> Result<(), DeviceError> {
        self.stages.add_buffer(host, memory.device())?;
        if let StagedMemory::Whole(memory) = &memory {
            host.set_buffer(buffer, Arc::clone(memory), "*");
        }
        self.buffers.insert(buffer, memory);
        Ok(())
    }

    /// Returns the memory of a range; `None` if the buffer is not a device's, or the range is not inside.
    pub(super) fn memory(&self, local: Local) -> Option<MemoryRange> {
        let memory = self.buffers.get(&local.buffer)?;
        let is_inside = local.offset.checked_add(local.bytes).is_some_and(|end| end <= memory.bytes());
        is_inside.then(|| memory.ranges(local.offset, local.bytes).pop()).flatten()
    }

    /// Unregisters memory, which no open batch uses.
    pub(super) fn remove_buffer(&mut self, host: &mut ClientHost, buffer: u32) {
        let Some(memory) = self.buffers.remove(&buffer) else { return };
        host.remove_buffer(buffer);
        if buffer >= PIECES_AT {
            self.free_pieces.push(buffer);
        }
        self.stages.remove_buffer(host, memory.device().id());
    }

    /// Returns true if a buffer has this index.
    pub(super) fn has(&self, buffer: u32) -> bool {
        self.buffers.contains_key(&buffer)
    }

    /// Returns true if the memory of one of these requests is a device's, at this end or, on this host, at the peer's.
    #[inline]
    pub(super) fn concern(&self, host: &mut ClientHost, requests: &[Request]) -> bool {
        let is_staged = |request| self.memory_of(request).is_some();
        !self.buffers.is_empty()
            && (requests.iter().any(is_staged) || host.same_host().peer_memory().concerns(requests))
    }

    fn memory_of(&self, request: &Request) -> Option<(&StagedMemory, Local)> {
        let local = request.local()?;
        Some((self.buffers.get(&local.buffer)?, local))
    }

    /// Returns true if this id is of a staged batch.
    pub(super) const fn is_staged(batch: BatchId) -> bool {
        batch.index & STAGED != 0
    }

    /// Returns true if there is a batch that was not released.
    pub(super) fn is_active(&self) -> bool {
        !self.batches.is_empty()
    }

    /// Returns the deadline of the first batch that has requests left to begin, in nanoseconds.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.queue.iter().map(|key| self.batches[*key].options.deadline_ns).min()
    }

    /// Returns true if copies are in flight: no event announces their end.
    pub(super) fn must_be_polled(&self) -> bool {
        self.stages.is_busy()
    }

    /// Begins a batch. Its copies wait for what the caller has enqueued on `stream`; by default, on the stream of
    /// callers that name none.
    ///
    /// # Errors
    /// If a request is malformed; then nothing was submitted.
    pub(super) fn submit(
        &mut self,
        host: &mut ClientHost,
        requests: &[Request],
        puts: &PutBook,
        options: &SubmitOptions,
        stream: Option<StreamHandle>,
    ) -> Result<BatchId, SubmitError> {
        // The client sees the pieces one by one.
        check_requests(host.client(), requests, puts)?;
        let mut all_bytes = 0;
        for (index, request) in requests.iter().enumerate() {
            let Some((memory, local)) = self.memory_of(request) else { continue };
            if local.offset.checked_add(local.bytes).is_none_or(|end| end > memory.bytes()) {
                return Err(SubmitError::OutOfRange { index });
            }
            if request.is_of_object() && local.bytes > CHUNK_BYTES as u64 {
                return Err(SubmitError::TooLarge { index, bytes: local.bytes, limit: CHUNK_BYTES as u64 });
            }
            all_bytes += local.bytes;
        }
        let used = |one: &Request| Some((self.memory_of(one)?.0.device().id(), one.is_sent()));
        let mut used: Vec<(DeviceId, bool)> = requests.iter().filter_map(used).collect();
        used.sort_unstable();
        used.dedup();
        let (mut same_host, mut failed) = (host.same_host(), false);
        let mut peers = same_host.peer_memory();
        let peer_batch = peers.begin_batch(requests);
        for (id, is_sent) in used {
            let stream = StreamHandle::or_default(stream, id.family);
            failed |= self.stages.wait_for(id, stream, is_sent).is_err();
            failed |= peer_batch.is_some() && peers.wait_for(&self.stages.get(id).device, stream).is_err();
        }
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let key = self.batches.insert(Batch {
            generation,
            requests: requests.to_vec(),
            puts: puts.clone(),
            options: *options,
            results: vec![TaskResult::of(Status::Ok); requests.len()],
            open: vec![1; requests.len()],
            open_tasks: requests.len(),
            cursor: (0, 0),
            refused: VecDeque::new(),
            pieces: 0,
            chunk_bytes: 0,
            cuts: Cuts { all_bytes, begun_bytes: 0 },
            end: None,
            peer_batch,
        });
        self.queue.push_back(key);
        if failed {
            // Unordered copies could send what is not written yet.
            self.end_early(key, Status::DeviceFailed);
        }
        Ok(BatchId { index: STAGED | key as u32, generation })
    }

    fn id_of(&self, key: usize) -> BatchId {
        BatchId { index: STAGED | key as u32, generation: self.batches[key].generation }
    }

    fn find(&self, id: BatchId) -> Option<usize> {
        let key = (id.index & !STAGED) as usize;
        self.batches.get(key).filter(|batch| batch.generation == id.generation).map(|_| key)
    }

    /// Returns true if a batch is complete.
    pub(super) fn is_complete(&self, id: BatchId) -> bool {
        self.find(id).is_none_or(|key| self.batches[key].is_complete())
    }

    /// Returns the results of a batch; they are final once it is complete.
    ///
    /// # Panics
    /// If it was released.
    pub(super) fn results(&self, id: BatchId) -> &[TaskResult] {
        &self.batches[self.find(id).expect("a batch that was not released")].results
    }

    /// Releases a complete batch.
    ///
    /// # Panics
    /// If it is not complete.
    pub(super) fn release(&mut self, id: BatchId) {
        if let Some(key) = self.find(id) {
            assert!(self.batches[key].is_complete(), "a batch was released while its memory was in use");
            self.batches.remove(key);
            self.finished.retain(|(batch, ..)| *batch != id);
        }
    }

    /// Cancels a batch; it completes soon.
    pub(super) fn cancel(&mut self, host: &mut ClientHost, id: BatchId, now_ns: u64) {
        let Some(key) = self.find(id) else { return };
        self.end_early(key, Status::Cancelled);
        for (&batch, &piece) in &self.carried {
            if self.pieces[piece].batch == key {
                host.client().cancel(batch, now_ns);
            }
        }
    }

    /// Ends everything of a batch that has not begun.
    fn end_early(&mut self, key: usize, status: Status) {
        let batch = &mut self.batches[key];
        if batch.end.is_some() || batch.is_complete() {
            return;
        }
        batch.end = Some(status);
        let (first, all) = (batch.cursor.0, batch.requests.len());
        batch.cursor = (all, 0);
        let refused = std::mem::take(&mut batch.refused);
        self.queue.retain(|other| *other != key);
        refused.iter().for_each(|range| self.part_ended(key, range.task, &TaskResult::of(status)));
        (first..all).for_each(|task| self.part_ended(key, task, &TaskResult::of(status)));
        self.complete_if_ended(key);
    }

    /// Takes a batch of the client that has completed, if it carries out a piece. Returns false if it does not.
    pub(super) fn take_carried(&mut self, host: &mut ClientHost, batch: BatchId) -> bool {
        let Some(key) = self.carried.remove(&batch) else { return false };
        let results = host.client().batches().results(batch);
        for (part, result) in self.pieces[key].parts.iter_mut().zip(results) {
            part.result = *result;
        }
        host.client().release(batch);
        self.pieces[key].is_over = true;
        if self.pieces[key].reads == 0 {
            self.transfers_over(host, key);
        }
        true
    }

    /// Copies what a piece has read to its device, or ends it.
    fn transfers_over(&mut self, host: &mut ClientHost, key: usize) {
        let piece = &mut self.pieces[key];
        let mut copies = Vec::new();
        match piece.carrier {
            // Bytes that RDMA devices have written are made visible there.
            Carrier::Direct { device, is_sent: false } => {
                if let Err(error) = self.stages.get(device).device.flush_writes() {
                    host.note_problem(&error.to_string());
                    piece.fail(Status::DeviceFailed);
                }
            }
            Carrier::Stage { is_sent: false, .. } => {
                let is_there = |part: &&Part| part.result.status == Status::Ok && !part.has_arrived;
                let parts = piece.parts.iter().filter(is_there);
                let received = |part: &Part| part.copies(&self.buffers, part.local.bytes.min(part.result.bytes));
                copies = parts.flat_map(received).collect();
            }
            _ => {}
        }
        match piece.carrier.device().filter(|_| !copies.is_empty()) {
            Some(device) => self.stages.get_mut(device).stage.copy(Step::Piece(key), copies),
            None => self.piece_ended(host, key),
        }
    }

    /// Returns true if a batch of the client carries out a piece.
    pub(super) fn carries(&self, batch: BatchId) -> bool {
        self.carried.contains_key(&batch)
    }

    /// Advances all batches. Returns true if it made progress.
    pub(super) fn drive(&mut self, host: &mut ClientHost, now_ns: u64) -> bool {
        let mut progress = self.take_copied(host, now_ns);
        self.end_late(now_ns);
        progress |= self.begin_reads(host);
        progress |= self.begin_pieces(host, now_ns);
        self.stages.flush(host, now_ns);
        self.reads.verify();
        let mut same_host = host.same_host();
        let problems = [same_host.peer_memory().take_problem(), same_host.take_problem()];
        problems.into_iter().flatten().for_each(|problem| host.note_problem(&problem));
        progress
    }

    /// Begins the copies of gets whose bytes are in mapped pools. Returns true if there were any.
    fn begin_reads(&mut self, host: &mut ClientHost) -> bool {
        let mut progress = false;
        while let Some((place, read)) = host.same_host().next_read() {
            progress = true;
            let piece = self.pieces.get_mut(place.piece).filter(|piece| !piece.is_over);
            let Some(piece) = piece.filter(|piece| piece.has(place, read.local.buffer)) else {
                // The get has ended in this round, before the read could begin.
                continue;
            };
            let stage = piece.carrier.device().and_then(|device| self.stages.find(device));
            let own = piece.parts[place.part].local;
            let memory = self.buffers.get(&own.buffer).expect("memory stays registered while a batch uses it");
            let memory = memory.ranges(own.offset + read.local.offset, read.local.bytes);
            let has_device = memory.iter().any(|range| matches!(range, MemoryRange::Device(_)));
            let stage = stage.filter(|stage| has_device && !stage.stage.is_lost());
            let source = stage.and_then(|stage| Some((host.same_host().pin(&read, &stage.device)?, stage)));
            let Some((source, stage)) = source else {
                host.same_host().copy_out(&read);
                continue;
            };
            let copies = copies_to(memory, &source.ranges);
            piece.reads += 1;
            stage.stage.copy_past(Step::Read(self.reads.insert(place, read, source)), copies);
        }
        progress
    }

    /// Ends a read whose copies are done, or have failed.
    fn read_ended(&mut self, host: &mut ClientHost, key: usize, result: Result<(), Status>) {
        let place = self.reads.place(key);
        let device = self.pieces[place.piece].carrier.device();
        let entry = device.and_then(|device| self.stages.find(device));
        let is_lost = result.is_err() && entry.is_some_and(|entry| entry.stage.is_lost());
        let has_arrived = self.reads.end(host, key, result, is_lost);
        let piece = &mut self.pieces[place.piece];
        piece.parts[place.part].has_arrived |= has_arrived;
        piece.reads -= 1;
        if piece.reads == 0 && piece.is_over {
            self.transfers_over(host, place.piece);
        }
    }

    /// Takes pieces whose copies are done: the transfers of writes begin, and reads are over.
    fn take_copied(&mut self, host: &mut ClientHost, now_ns: u64) -> bool {
        let copied = self.stages.poll(now_ns);
        self.reads.polled();
        for &(step, result) in &copied {
            let key = match step {
                Step::Piece(key) => key,
                Step::Read(key) => {
                    self.read_ended(host, key, result);
                    continue;
                }
            };
            let piece = &mut self.pieces[key];
            let is_first_step = piece.carrier.begins_with_device();
            if let Err(status) = result {
                piece.fail(status);
            }
            if result.is_ok() && is_first_step {
                self.carry_out(host, key, now_ns);
            } else {
                self.piece_ended(host, key);
            }
        }
        let mut same_host = host.same_host();
        let mut peers = same_host.peer_memory();
        peers.poll();
        let mapped: Vec<_> = std::iter::from_fn(|| peers.poll_done()).collect();
        for &(key, result) in &mapped {
            for part in &mut self.pieces[key].parts {
                let moved = TaskResult { bytes: part.local.bytes, ..TaskResult::of(Status::Ok) };
                part.result = result.map_or_else(TaskResult::of, |()| moved);
            }
            self.piece_ended(host, key);
        }
        !copied.is_empty() || !mapped.is_empty()
    }

    fn end_late(&mut self, now_ns: u64) {
        let is_late = |key: &&usize| self.batches[**key].options.deadline_ns <= now_ns;
        let late: Vec<usize> = self.queue.iter().filter(is_late).copied().collect();
        late.into_iter().for_each(|key| self.end_early(key, Status::DeadlineExceeded));
    }

    /// Begins pieces while chunks are free. Returns true if it began any.
    fn begin_pieces(&mut self, host: &mut ClientHost, now_ns: u64) -> bool {
        let mut progress = false;
        // Batches without a chunk, and devices whose next free chunk is one of those batches'.
        let (mut waiting, mut full): (Vec<usize>, Vec<DeviceId>) = (Vec::new(), Vec::new());
        while let Some(at) = self.next_turn(&waiting, &full) {
            let key = self.queue[at];
            let piece = match self.cut(host, key) {
                Ok(piece) => piece,
                Err(wait) => {
                    waiting.push(key);
                    if let Wait::Room(device) = wait {
                        full.push(device);
                    }
                    continue;
                }
            };
            progress = true;
            self.queue.remove(at);
            if self.batches[key].has_more() {
                self.queue.push_back(key);
            }
            self.begin(host, piece, now_ns);
        }
        progress
    }

    /// Returns the position in the queue of the batch whose turn it is.
    fn next_turn(&self, waiting: &[usize], full: &[DeviceId]) -> Option<usize> {
        let urgency = |key: usize| {
            let options = &self.batches[key].options;
            options.priority.unwrap_or(options.intent.priority())
        };
        let is_ready = |key: &usize| {
            let batch = &self.batches[*key];
            let device = || Some(self.memory_of(batch.next_request()?)?.0.device().id());
            let is_full = || !full.is_empty() && device().is_some_and(|id| full.contains(&id));
            batch.may_begin() && !waiting.contains(key) && !is_full()
        };
        let ready = self.queue.iter().enumerate().filter(|(_, key)| is_ready(key));
        ready.min_by_key(|(at, key)| (urgency(**key), *at)).map(|(at, _)| at)
    }

    /// Cuts the next piece of a batch, unless it has to wait. A request that gets no chunk at all fails in a piece of
    /// its own.
    fn cut(&mut self, host: &mut ClientHost, key: usize) -> Result<usize, Wait> {
        let NextParts { mut parts, cursor, carrier, bytes, mapped } = self.next_parts(host, key).ok_or(Wait::Peer)?;
        let mut chunk = None;
        if let Carrier::Stage { device, .. } = carrier {
            let entry = self.stages.get_mut(device);
            match entry.stage.take_long(bytes) {
                Ok(Some(taken)) => {
                    let piece = self.pieces.vacant_key();
                    for (part, one) in parts.iter_mut().enumerate() {
                        one.place(host, entry.buffer, &taken, PartPlace { piece, part });
                    }
                    chunk = Some(taken);
                }
                Ok(None) if entry.stage.is_long(bytes) => return Err(Wait::LongChunk),
                Ok(None) => return Err(Wait::Room(device)),
                Err(status) => parts.iter_mut().for_each(|part| part.result.status = status),
            }
        }
        let batch = &mut self.batches[key];
        for part in &parts {
            batch.open[part.task] += 1;
        }
        let is_refused = !batch.refused.is_empty();
        if let (Some(range), [part]) = (batch.refused.front_mut(), &parts[..]) {
            range.from += part.local.bytes;
            range.bytes -= part.local.bytes;
            if range.bytes == 0 {
                batch.refused.pop_front();
                batch.open[part.task] -= 1;
            }
        }
        // The requests that have begun as a whole.
        batch.open[batch.cursor.0..cursor.0].iter_mut().for_each(|open| *open -= 1);
        batch.cursor = cursor;
        let piece = Piece { batch: key, parts, carrier, chunk, mapped, reads: 0, is_over: false };
        batch.pieces += 1;
        batch.chunk_bytes += piece.chunk_bytes();
        if !is_refused && carrier.is_counted() {
            batch.cuts.begun_bytes += piece.parts.iter().map(|part| part.local.bytes).sum::<u64>();
        }
        Ok(self.pieces.insert(piece))
    }

    /// Returns the requests of the next piece of a batch; `None` if their carrier is not known yet.
    fn next_parts(&self, host: &mut ClientHost, key: usize) -> Option<NextParts> {
        let batch = &self.batches[key];
        if let Some(&RequestRange { task, from, bytes }) = batch.refused.front() {
            let (request, bytes) = (batch.requests[task], bytes.min(LONG_PIECE_BYTES));
            let whole = request.local().unwrap_or(NO_MEMORY);
            let local = Local { offset: whole.offset + from, bytes, ..whole };
            let parts = vec![Part::new(task, local, part_of(request, from, 0, bytes))];
            let carrier = self.memory_of(&request).map_or(Carrier::Client, |(memory, _)| staged_by(memory, &request));
            return Some(NextParts { parts, cursor: batch.cursor, carrier, bytes: bytes as usize, mapped: None });
        }
        let devices = self.stages.devices();
        let most = batch.cuts.next_bytes().max(PART_BYTES);
        let (mut cursor, mut parts, mut used, mut moved) = (batch.cursor, Vec::new(), 0, 0);
        let (mut first, mut mapped): (Option<Carrier>, Option<PeerCopies>) = (None, None);
        while let Some(&request) = batch.requests.get(cursor.0).filter(|_| parts.len() < PIECE_REQUESTS) {
            let memory = self.memory_of(&request).map(|(memory, _)| memory);
            let Some((carrier, peer)) = carrier_of(host, memory, &devices, &request, batch.peer_batch) else { break };
            if *first.get_or_insert(carrier) != carrier {
                break;
            }
            let (task, whole) = (cursor.0, request.local().unwrap_or(NO_MEMORY));
            let (room, left) = (carrier.most_bytes(most).saturating_sub(moved), whole.bytes - cursor.1);
            // A request that does not fit begins the next piece if it cannot be split, or only into crumbs.
            let is_next = |is_of_object| left > room && !parts.is_empty() && (is_of_object || room < PART_BYTES);
            let bytes = match carrier {
                Carrier::Stage { is_of_object, .. } if is_next(is_of_object) => 0,
                Carrier::Client | Carrier::Stage { is_of_object: true, .. } => whole.bytes,
                // The client cuts it.
                Carrier::Direct { .. } => left,
                Carrier::Stage { .. } | Carrier::Mapped { .. } => left.min(room),
            };
            if matches!(carrier, Carrier::Stage { .. } | Carrier::Mapped { .. }) && bytes == 0 {
                break;
            }
            let local = Local { offset: whole.offset + cursor.1, bytes, ..whole };
            if let Some(PeerRange { device, range, hold }) = peer {
                let (copies, holds, write) = (Vec::new(), Vec::new(), request.is_sent());
                let mapped = mapped.get_or_insert(PeerCopies { device, copies, holds, write });
                mapped.copies.extend(mapped_copies(host, memory, local, &range.slice(cursor.1, bytes), write));
                if mapped.holds.last().is_none_or(|last| !Arc::ptr_eq(last, &hold)) {
                    mapped.holds.push(hold);
                }
            }
            let request = match carrier {
                Carrier::Client => request,
                Carrier::Direct { .. } => range_of(request, cursor.1, bytes),
                Carrier::Stage { .. } | Carrier::Mapped { .. } => part_of(request, cursor.1, used, bytes),
            };
            parts.push(Part::new(task, local, request));
            used = (used + bytes).next_multiple_of(ALIGN_BYTES);
            moved += bytes;
            let is_whole = carrier == Carrier::Client || cursor.1 + bytes == whole.bytes;
            cursor = if is_whole { (task + 1, 0) } else { (task, cursor.1 + bytes) };
        }
        let carrier = first?;
        Some(NextParts { parts, cursor, carrier, bytes: used as usize, mapped })
    }

    /// Begins a piece: with copies from its device or between both ends, or with its transfers.
    fn begin(&mut self, host: &mut ClientHost, key: usize, now_ns: u64) {
        if let Some(copies) = self.pieces[key].mapped.take() {
            return host.same_host().peer_memory().copy(key, copies);
        }
        let piece = &self.pieces[key];
        if piece.parts.iter().any(|part| part.result.status != Status::Ok) {
            return self.piece_ended(host, key);
        }
        match piece.carrier {
            Carrier::Stage { device, is_sent: true, .. } => {
                let copies: Vec<DeviceCopy> =
                    piece.parts.iter().flat_map(|part| part.copies(&self.buffers, part.local.bytes)).collect();
                if !copies.is_empty() {
                    return self.stages.get_mut(device).stage.copy(Step::Piece(key), copies);
                }
            }
            Carrier::Direct { device, is_sent } => {
                let memory = |part: &Part| self.buffers.get(&part.local.buffer).and_then(StagedMemory::whole);
                let checked = AllocationChecks::all(piece.parts.iter().filter_map(memory));
                let Err(error) = checked else {
                    // It begins when the caller's earlier operations are done.
                    return self.stages.get_mut(device).stage.mark(Step::Piece(key), is_sent);
                };
                host.note_problem(&error.to_string());
                self.pieces[key].fail(Status::DeviceFailed);
                return self.piece_ended(host, key);
            }
            Carrier::Client | Carrier::Stage { .. } | Carrier::Mapped { .. } => {}
        }
        self.carry_out(host, key, now_ns);
    }

    /// Submits the transfers of a piece to the client.
    fn carry_out(&mut self, host: &mut ClientHost, key: usize, now_ns: u64) {
        let piece = &self.pieces[key];
        let batch = &self.batches[piece.batch];
        let submitted = match batch.end {
            Some(status) => Err(status),
            None => {
                // Of the batch's names, only those of the piece.
                let book = &mut self.book;
                book.clear();
                let request_of = |part: &Part| match part.request.entry() {
                    Some(entry) => part.request.with_entry(book.push_from(&batch.puts, entry)),
                    None => part.request,
                };
                let requests: Vec<Request> = piece.parts.iter().map(request_of).collect();
                let submitted = host.client().submit_puts(&requests, &self.book, &batch.options, now_ns);
                submitted.map_err(|error| match error {
                    SubmitError::Busy { .. } => Status::Busy,
                    _ => Status::BadRequest,
                })
            }
        };
        match submitted {
            Ok(id) => {
                self.carried.insert(id, key);
            }
            Err(status) => {
                self.pieces[key].fail(status);
                self.piece_ended(host, key);
            }
        }
    }

    fn piece_ended(&mut self, host: &mut ClientHost, key: usize) {
        let piece = self.pieces.remove(key);
        let chunk_bytes = piece.chunk_bytes();
        let Piece { batch, parts, carrier, chunk, .. } = piece;
        parts.iter().filter_map(|part| part.buffer).for_each(|buffer| host.remove_parts(buffer));
        if let (Carrier::Stage { device, .. }, Some(chunk)) = (carrier, chunk)
            && let Some(entry) = self.stages.find(device)
        {
            entry.stage.release(chunk);
        }
        let is_direct = matches!(carrier, Carrier::Direct { .. });
        for part in parts {
            if is_direct && part.result.status == Status::Unsupported && self.batches[batch].end.is_none() {
                self.batches[batch].refuse(&part);
                if !self.queue.contains(&batch) {
                    self.queue.push_back(batch);
                }
            } else {
                self.part_ended(batch, part.task, &part.result);
            }
        }
        self.batches[batch].pieces -= 1;
        self.batches[batch].chunk_bytes -= chunk_bytes;
        self.complete_if_ended(batch);
    }

    /// Records the end of a request, or of a part of one.
    fn part_ended(&mut self, key: usize, task: usize, ended: &TaskResult) {
        let id = self.id_of(key);
        let batch = &mut self.batches[key];
        let so_far = batch.results[task];
        // The bytes of all parts, and the first failure.
        let status = if so_far.status == Status::Ok { ended.status } else { so_far.status };
        batch.results[task] = TaskResult { status, bytes: so_far.bytes + ended.bytes, ..*ended };
        batch.open[task] -= 1;
        if batch.open[task] == 0 {
            batch.open_tasks -= 1;
            self.finished.push_back((id, task as u32, batch.results[task]));
        }
    }

    fn complete_if_ended(&mut self, key: usize) {
        if self.batches[key].is_complete() {
            self.done.push_back(self.id_of(key));
        }
    }

    /// Returns the end of a request, with its batch and position.
    pub(super) fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        self.finished.pop_front()
    }

    /// Returns a batch that has completed since the last call.
    pub(super) fn poll_done(&mut self) -> Option<BatchId> {
        self.done.pop_front()
    }

    /// Returns the counters of each device that was used.
    pub(super) fn counters(&self) -> BTreeMap<DeviceId, StagingCounters> {
        self.stages.counters()
    }
}

impl Part {
    /// Creates the part of a request with this memory.
    const fn new(task: usize, local: Local, request: Request) -> Self {
        let result = TaskResult::of(Status::Ok);
        Self { task, local, request, host: None, buffer: None, has_arrived: false, result }
    }

    /// Sets the memory of the request to the client, which [`part_of`] has given its place in the chunk. `buffer` is
    /// the index of the stage's region; an object is put from, or read into, a buffer of its own. A copy engine may
    /// read it from its node's pool instead.
    fn place(&mut self, host: &mut ClientHost, buffer: u32, chunk: &Chunk, place: PartPlace) {
        let Some(at) = self.request.local() else { return };
        let memory = chunk.slice(at.offset as usize, at.bytes as usize);
        let local = if self.request.is_of_object() {
            let buffer = host.add_parts(vec![memory.clone()]);
            self.buffer = Some(buffer);
            if !self.request.is_sent() {
                host.same_host().offer(buffer, place);
            }
            Local { buffer, offset: 0, ..at }
        } else {
            Local { buffer, offset: memory.offset() as u64, ..at }
        };
        self.request = self.request.with_local(local);
        self.host = Some(memory);
    }

    /// Returns the copies between the first `bytes` bytes of the memory and the chunk: from the device if the request
    /// sends them, to it otherwise. Pieces of the host's memory are copied at once.
    fn copies(&self, buffers: &HashMap<u32, StagedMemory>, bytes: u64) -> Vec<DeviceCopy> {
        let memory = buffers.get(&self.local.buffer).expect("memory stays registered while a batch uses it");
        let Some(chunk) = self.host.as_ref().filter(|_| bytes > 0) else { return Vec::new() };
        let (mut at, mut copies) = (0, Vec::new());
        for range in memory.ranges(self.local.offset, bytes) {
            let length = range.bytes() as usize;
            let host = chunk.slice(at, length);
            at += length;
            match (range, self.request.is_sent()) {
                (MemoryRange::Device(from), true) => copies.push(DeviceCopy::ToHost { from, to: host }),
                (MemoryRange::Device(to), false) => copies.push(DeviceCopy::ToDevice { from: host, to }),
                (MemoryRange::Host(from), true) => copy_host(&host, &from),
                (MemoryRange::Host(to), false) => copy_host(&to, &host),
            }
        }
        copies
    }
}

/// Returns the carrier of a request, with the peer's memory if it is mapped; `None` if it is not known yet. `memory` is
/// the request's, if it is a device's; `devices` are those that memory of the host may be copied by.
fn carrier_of(
    host: &mut ClientHost,
    memory: Option<&StagedMemory>,
    devices: &[Arc<Device>],
    request: &Request,
    peer_batch: Option<u64>,
) -> Option<(Carrier, Option<PeerRange>)> {
    let is_sent = request.is_sent();
    let own = memory.map_or(OwnSide::Host(devices), |memory| OwnSide::Device(memory.device()));
    // What is malformed is rejected by the client.
    let is_there = |local: Local| local.bytes > 0 && host.buffer(local).is_some();
    if let Some(batch) = peer_batch
        && (memory.is_some() || request.local().is_some_and(is_there))
    {
        match host.same_host().peer_memory().path(request, &own, batch) {
            PeerPath::Mapped(range) => {
                let device = range.device.id();
                return Some((Carrier::Mapped { device, is_sent, is_host: memory.is_none() }, Some(range)));
            }
            PeerPath::Unknown => return None,
            PeerPath::Requests => {}
        }
    }
    let carrier = match memory {
        None => Carrier::Client,
        Some(StagedMemory::Whole(memory)) if may_copy(host.client(), request) => {
            Carrier::Direct { device: memory.device().id(), is_sent }
        }
        Some(memory) => staged_by(memory, request),
    };
    Some((carrier, None))
}

/// Returns the carrier of a request through a chunk.
fn staged_by(memory: &StagedMemory, request: &Request) -> Carrier {
    let (is_sent, is_of_object) = (request.is_sent(), request.is_of_object());
    Carrier::Stage { device: memory.device().id(), is_sent, is_of_object }
}

/// Returns the copies between memory of this process and mapped memory of a peer.
fn mapped_copies(
    host: &ClientHost,
    memory: Option<&StagedMemory>,
    local: Local,
    peer: &DeviceRange,
    write: bool,
) -> Vec<DeviceCopy> {
    let ranges = match memory {
        Some(memory) => memory.ranges(local.offset, local.bytes),
        None => host.buffer(local).map(MemoryRange::Host).into_iter().collect(),
    };
    let mut at = 0;
    let copy = |own: MemoryRange| {
        let peer = peer.slice(at, own.bytes());
        at += own.bytes();
        match (own, write) {
            (MemoryRange::Device(from), true) => DeviceCopy::Between { from, to: peer },
            (MemoryRange::Device(to), false) => DeviceCopy::Between { from: peer, to },
            (MemoryRange::Host(from), true) => DeviceCopy::ToDevice { from, to: peer },
            (MemoryRange::Host(to), false) => DeviceCopy::ToHost { from: peer, to },
        }
    };
    ranges.into_iter().map(copy).collect()
}

/// Returns the part of a request that begins `from` bytes inside it, with memory that begins `at` bytes inside a chunk.
/// Only reads and writes of segments have other parts than the whole.
fn part_of(request: Request, from: u64, at: u64, bytes: u64) -> Request {
    range_of(request, from, bytes).with_local(Local { buffer: 0, offset: at, bytes })
}

/// Returns the part of a request that begins `from` bytes inside it, with its own memory.
fn range_of(request: Request, from: u64, bytes: u64) -> Request {
    let target_of = |target: SegmentTarget| SegmentTarget { offset: target.offset + from, ..target };
    let part = match request {
        Request::Read(target, local) => Request::Read(target_of(target), local),
        Request::Write(target, local) => Request::Write(target_of(target), local),
        other => other,
    };
    match request.local() {
        Some(local) => part.with_local(Local { offset: local.offset + from, bytes, ..local }),
        None => part,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_pieces_of_a_long_batch_are_short() {
        for all_bytes in [1, 64 << 10, 1 << 20, (5 << 20) + 17, 64 << 20, 1 << 30] {
            let (mut cuts, mut pieces) = (Cuts { all_bytes, begun_bytes: 0 }, Vec::new());
            while cuts.begun_bytes < all_bytes {
                pieces.push(cuts.next_bytes());
                cuts.begun_bytes += pieces[pieces.len() - 1];
            }
            assert_eq!(cuts.begun_bytes, all_bytes);
            let ends = [pieces[0], pieces[pieces.len() - 1]];
            assert!(ends.iter().all(|bytes| *bytes <= SHORT_PIECE_BYTES * 3 / 2), "{all_bytes}: {pieces:?}");
            assert!(pieces.iter().all(|bytes| *bytes <= LONG_PIECE_BYTES), "{all_bytes}: {pieces:?}");
            assert!(pieces.len() as u64 <= all_bytes / LONG_PIECE_BYTES + 14, "{all_bytes}: {pieces:?}");
        }
    }
}
