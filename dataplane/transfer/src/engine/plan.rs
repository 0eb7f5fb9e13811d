//! Plan of a batch: its requests are validated as a whole, and their addresses are looked up, before any has an effect.

use std::sync::Arc;

use kvplane_client::{Local, PeerId, Request, SegmentTarget};
use kvplane_proto::{Limits, Status};

use crate::batch::Parts;
use crate::batch::request::{Opcode, TransferRequest};
use crate::buffers::{Buffer, Map};
use crate::driver::copies::Copy;
use crate::error::{ArgumentError, Error, LimitError, RangeError};
use crate::segment::file::OpenFile;
use crate::segment::{Remote, SegmentHandle, unknown};

/// Reason why a batch cannot be planned.
pub(crate) enum Obstacle {
    /// The batch is malformed.
    Error(Error),
    /// The owners of these segments have to describe them again first.
    Refresh(Vec<SegmentHandle>),
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Validated batch.
#[derive(Default)]
pub(crate) struct Plan {
    /// Requests to peers and local copies: the parts of the batch, with the task of each.
    pub(crate) requests: Vec<Request>,
    pub(crate) copies: Vec<Copy>,
    request_owners: Vec<u32>,
    copy_owners: Vec<u32>,
    pub(crate) parts: Parts,
    /// True if part of a buffer is not mapped any more.
    gone: bool,
}

impl Plan {
    /// Validates the requests and looks up their addresses: those of local memory in `map`, those of peers in the
    /// segments that `open` returns. `owners` has the task of each request, where a task has several. The
    /// descriptions of segments that were `refreshed` are not requested again.
    ///
    /// # Errors
    /// When a request is malformed or outside of registered memory, or a segment has to be described again.
    pub(crate) fn of(
        requests: &[TransferRequest],
        owners: Option<&[u32]>,
        map: &Map,
        open: impl Fn(SegmentHandle) -> Option<Arc<Remote>>,
        refreshed: &[SegmentHandle],
    ) -> Result<Self, Obstacle> {
        let mut plan = Self::default();
        plan.requests.reserve(requests.len());
        plan.request_owners.reserve(requests.len());
        let mut last: Option<(SegmentHandle, Arc<Remote>, PeerId)> = None;
        let mut outdated: Vec<SegmentHandle> = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let task = owners.map_or(index as u32, |owners| owners[index]);
            if request.length == 0 {
                continue;
            }
            let found = map.find(request.source, request.length);
            let (buffer, offset) = found.ok_or_else(|| not_ours(index, request.source, request.length))?;
            if request.opcode == Opcode::Read && !buffer.backing.writable() {
                return Err(Error::from(ArgumentError::ReadOnlyMemory { request: index }).into());
            }
            plan.use_buffer(buffer);
            if request.target == SegmentHandle::LOCAL {
                plan.copy(map, index, request, buffer, offset)?;
                plan.copy_owners.push(task);
                continue;
            }
            if last.as_ref().is_none_or(|(handle, ..)| *handle != request.target) {
                let remote = open(request.target).ok_or_else(|| unknown(request.target))?;
                if remote.is_stale() && !refreshed.contains(&request.target) && !outdated.contains(&request.target) {
                    outdated.push(request.target);
                }
                let peer = plan.use_remote(&remote);
                last = Some((request.target, remote, peer));
            }
            let (_, remote, peer) = last.as_ref().expect("it was just looked up");
            if let Some(file) = &remote.file {
                check_file(index, request, &remote.name, file)?;
            }
            match remote.find(request.target_offset, request.length) {
                Some((region, at, place)) => {
                    let (segment, shareable) = (region.segment, region.shareable);
                    let target = SegmentTarget { peer: *peer, segment, offset: at, shareable, place };
                    let local = Local { buffer: buffer.index, offset, bytes: request.length };
                    plan.cut(request.opcode, target, local, task);
                }
                None if outdated.contains(&request.target) => {}
                None if !refreshed.contains(&request.target) => outdated.push(request.target),
                None => {
                    let (address, segment) = (request.target_offset, remote.name.clone());
                    let why = RangeError::NotTheirs { request: index, address, bytes: request.length, segment };
                    return Err(Error::from(why).into());
                }
            }
        }
        if !outdated.is_empty() {
            return Err(Obstacle::Refresh(outdated));
        }
        if plan.gone {
            refuse_freed(map, requests)?;
        }
        Ok(plan)
    }

    /// Returns true if the first initiator has to carry out the batch, because a file is not to be used by others.
    pub(crate) fn needs_first(&self) -> bool {
        self.parts.remotes.iter().any(|remote| remote.file.as_ref().is_some_and(|file| file.alone))
    }

    /// Completes the parts of a batch of this many tasks, whose slices have at most `slice_bytes`.
    ///
    /// # Errors
    /// When there are too many requests.
    pub(crate) fn divide(&mut self, tasks: usize, slice_bytes: u64) -> Result<(), Error> {
        if self.requests.len() > Limits::BATCH_REQUESTS {
            return Err(too_many(self.requests.len() as u64));
        }
        let slice_bytes = slice_bytes.max(Limits::SLICE_BYTES_LEAST);
        let slices = |request: &Request| request.local().map_or(1, |local| (local.bytes - 1) / slice_bytes + 1);
        self.parts.slices = self.requests.iter().map(slices).sum::<u64>() as usize;
        let mut owners = core::mem::take(&mut self.request_owners);
        owners.append(&mut self.copy_owners);
        let whole = owners.len() == tasks && owners.iter().enumerate().all(|(at, &task)| task as usize == at);
        if self.parts.remotes.len() > 1 {
            self.parts.asked = self.requests.iter().map(|one| one.peer().map_or(0, |peer| peer.0)).collect();
        }
        self.parts.owners = (!whole).then_some(owners);
        self.parts.tasks = tasks;
        Ok(())
    }

    /// Records a buffer once, unless it is among the last ones recorded.
    fn use_buffer(&mut self, buffer: &Arc<Buffer>) {
        let known = &self.parts.buffers;
        if !known.iter().rev().take(8).any(|other| Arc::ptr_eq(other, buffer)) {
            // Checked as a whole, so that one check covers all of its ranges.
            self.gone |= !buffer.is_mapped(0, buffer.bytes);
            self.parts.buffers.push(Arc::clone(buffer));
        }
    }

    /// Records a peer once; returns its position among the batch's peers.
    fn use_remote(&mut self, remote: &Arc<Remote>) -> PeerId {
        let remotes = &mut self.parts.remotes;
        let position = remotes.iter().position(|other| Arc::ptr_eq(other, remote)).unwrap_or_else(|| {
            remotes.push(Arc::clone(remote));
            remotes.len() - 1
        });
        PeerId(position as u32)
    }

    /// Splits a transfer into requests of at most one frame's payload.
    fn cut(&mut self, opcode: Opcode, target: SegmentTarget, local: Local, task: u32) {
        let mut done = 0;
        while done < local.bytes {
            let bytes = Limits::PAYLOAD_BYTES.min(local.bytes - done);
            let target = SegmentTarget { offset: target.offset + done, ..target };
            let local = Local { offset: local.offset + done, bytes, ..local };
            self.requests.push(match opcode {
                Opcode::Read => Request::Read(target, local),
                Opcode::Write => Request::Write(target, local),
            });
            self.request_owners.push(task);
            done += bytes;
        }
    }

    fn copy(
        &mut self,
        map: &Map,
        index: usize,
        request: &TransferRequest,
        buffer: &Arc<Buffer>,
        offset: u64,
    ) -> Result<(), Error> {
        let found = map.find(request.target_offset, request.length);
        let (other, at) = found.ok_or_else(|| not_ours(index, request.target_offset, request.length))?;
        self.use_buffer(other);
        let (here, there) = ((Arc::clone(buffer), offset), (Arc::clone(other), at));
        let (to, from) = match request.opcode {
            Opcode::Read => (here, there),
            Opcode::Write => (there, here),
        };
        if !to.0.backing.writable() {
            return Err(ArgumentError::ReadOnlyMemory { request: index }.into());
        }
        let family = |buffer: &Buffer| buffer.backing.device().map(|memory| memory.device().id().family);
        if let (Some(of), Some(from)) = (family(&to.0), family(&from.0))
            && of != from
        {
            return Err(ArgumentError::TwoVendors { request: index, to: of.prefix(), from: from.prefix() }.into());
        }
        self.copies.push(Copy { to, from, bytes: request.length });
        Ok(())
    }
}

/// Rejects requests whose memory was freed without being unregistered: an access would kill the process.
fn refuse_freed(map: &Map, requests: &[TransferRequest]) -> Result<(), Error> {
    for (index, request) in requests.iter().enumerate().filter(|(_, request)| request.length > 0) {
        let local = (request.target == SegmentHandle::LOCAL).then_some(request.target_offset);
        for address in [Some(request.source), local].into_iter().flatten() {
            let found = map.find(address, request.length);
            let gone = |(buffer, offset): &(&Arc<Buffer>, u64)| !buffer.is_mapped(*offset, request.length);
            if found.as_ref().is_some_and(gone) {
                return Err(ArgumentError::FreedMemory { request: index, address, bytes: request.length }.into());
            }
        }
    }
    Ok(())
}

/// Rejects transfers beyond a file's end, and writes to a read-only file.
fn check_file(index: usize, request: &TransferRequest, name: &str, file: &OpenFile) -> Result<(), Error> {
    let bytes = file.file.bytes();
    if request.opcode == Opcode::Write && !file.file.writable() {
        return Err(ArgumentError::ReadOnlyFile { request: index, name: name.to_owned() }.into());
    }
    if request.target_offset.checked_add(request.length).is_none_or(|end| end > bytes) {
        let (offset, name) = (request.target_offset, name.to_owned());
        let why = RangeError::NotInFile { request: index, offset, bytes: request.length, name, file_bytes: bytes };
        return Err(why.into());
    }
    Ok(())
}

/// Returns the error for a segment that was not described in time.
pub(crate) fn late(name: &str) -> Error {
    let what = format!("describe segment {name}");
    Error::Status { what, status: Status::DeadlineExceeded, cause: None }
}

fn not_ours(request: usize, address: u64, bytes: u64) -> Error {
    RangeError::NotOurs { request, address, bytes }.into()
}

/// Returns the error for a batch of too many requests.
pub(crate) fn too_many(requests: u64) -> Error {
    LimitError::Requests { requests }.into()
}

#[cfg(test)]
mod tests {
    use kvplane_client::PeerAddress;
    use kvplane_engine::{Region, RegionOptions};

    use super::*;
    use crate::segment::peers::Peers;

    const BYTES: u64 = 64 << 10;
    const THEIRS: u64 = 0x1000;
    const PEER: SegmentHandle = SegmentHandle::from_bits(1);

    /// One buffer of ours, and a peer with one buffer at [`THEIRS`].
    struct Rig {
        map: Map,
        ours: u64,
        remote: Arc<Remote>,
    }

    impl Rig {
        fn new() -> Self {
            let region = Region::allocate(&RegionOptions::new("plan-test", BYTES as usize)).unwrap();
            let (mut map, ours) = (Map::default(), region.address());
            let index = map.reserve(ours, BYTES).unwrap();
            map.insert(region.into(), "*".to_owned(), index, None);
            let peer = Peers::default().at(&PeerAddress::mooncake(([127, 0, 0, 1], 1).into(), 1), "peer");
            let buffers = [kvplane_mooncake::Buffer::new("peer", THEIRS, BYTES)];
            Self { map, ours, remote: Arc::new(Remote::foreign("peer", peer, &buffers)) }
        }

        fn plan(&self, requests: &[TransferRequest], refreshed: &[SegmentHandle]) -> Result<Plan, Obstacle> {
            let open = |handle| (handle == PEER).then(|| Arc::clone(&self.remote));
            Plan::of(requests, None, &self.map, open, refreshed)
        }

        /// Returns a read of 100 bytes into our memory at this offset.
        fn read(&self, offset: u64, target: SegmentHandle, target_offset: u64) -> TransferRequest {
            let source = self.ours + offset;
            TransferRequest { opcode: Opcode::Read, source, target, target_offset, length: 100 }
        }
    }

    fn error_of(planned: Result<Plan, Obstacle>) -> String {
        match planned {
            Err(Obstacle::Error(error)) => error.to_string(),
            Err(Obstacle::Refresh(handles)) => panic!("{handles:?} are to be described again"),
            Ok(_) => panic!("there is a plan"),
        }
    }

    #[test]
    fn requests_are_looked_up_and_divided_into_slices() {
        let rig = Rig::new();
        let far = rig.read(0, PEER, THEIRS + 5);
        let near = rig.read(100, SegmentHandle::LOCAL, rig.ours + 500);
        let nothing = TransferRequest { length: 0, ..far };
        let long = TransferRequest { length: BYTES, ..rig.read(0, PEER, THEIRS) };
        let mut plan = rig.plan(&[far, near, nothing, long], &[]).ok().expect("all are registered");
        assert_eq!((plan.requests.len(), plan.copies.len(), plan.needs_first()), (2, 1, false));
        assert_eq!((plan.parts.remotes.len(), plan.parts.buffers.len()), (1, 1), "each is recorded once");
        plan.divide(4, Limits::SLICE_BYTES_LEAST).unwrap();
        assert_eq!(plan.parts.slices as u64, 1 + BYTES.div_ceil(Limits::SLICE_BYTES_LEAST));
        assert_eq!(plan.parts.owners, Some(vec![0, 3, 1]), "requests to peers come before copies");
        let mut one = rig.plan(&[far], &[]).ok().expect("it is registered");
        one.divide(1, Limits::SLICE_BYTES_LEAST).unwrap();
        assert_eq!((one.parts.tasks, one.parts.owners), (1, None));
    }

    #[test]
    fn an_address_outside_of_a_description_has_it_requested_once() {
        let rig = Rig::new();
        assert!(error_of(rig.plan(&[rig.read(BYTES - 99, PEER, THEIRS)], &[])).contains("our registered buffers"));
        let closed = rig.plan(&[rig.read(0, SegmentHandle::from_bits(9), THEIRS)], &[]);
        assert!(error_of(closed).contains("segment 9 is not open"));
        let beyond = rig.read(0, PEER, THEIRS + BYTES);
        let asked = |planned| matches!(planned, Err(Obstacle::Refresh(handles)) if handles == [PEER]);
        assert!(asked(rig.plan(&[beyond, beyond], &[])));
        assert!(error_of(rig.plan(&[beyond], &[PEER])).contains("peer's registered buffers"));
        let within = rig.read(0, PEER, THEIRS);
        rig.remote.set_stale();
        assert!(asked(rig.plan(&[within], &[])), "the description is outdated");
        assert!(rig.plan(&[within], &[PEER]).is_ok());
    }
}
