//! A host of a member: the memory of its works, and the payloads that it keeps.

use std::collections::{BTreeMap, VecDeque};

use kvplane_collective::*;
use kvplane_group::{GroupRank, RankSet};

/// Frame on the way to a peer.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) from: GroupRank,
    pub(crate) head: Head,
    pub(crate) payload: Vec<u8>,
}

/// Buffers of a work.
#[derive(Clone, Debug)]
struct Memory {
    source: Vec<u8>,
    /// `None`: the operation is in place.
    target: Option<Vec<u8>>,
    work: Vec<u8>,
    has_ended: bool,
    /// The member does not need the work buffer any longer, or never did.
    is_released: bool,
    /// The source as the caller gave it, if the operation depends on it.
    input: Option<Vec<u8>>,
}

impl Memory {
    fn of_message(source: Vec<u8>, target: Option<Vec<u8>>) -> Self {
        let input = Some(source.clone());
        Self { source, target, work: Vec::new(), has_ended: false, is_released: true, input }
    }
}

/// Result of a work: its target.
pub(crate) type WorkEnd = (WorkId, Result<Completion, Failure>, Vec<u8>);

/// A member and its memory.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) member: Member,
    works: BTreeMap<WorkId, Memory>,
    kept: BTreeMap<StashId, Vec<u8>>,
    pub(crate) ended: VecDeque<WorkEnd>,
}

impl Host {
    pub(crate) fn new(member: Member) -> Self {
        Self { member, works: BTreeMap::new(), kept: BTreeMap::new(), ended: VecDeque::new() }
    }

    /// Submits an operation on a source; its target is filled with 0xEE before.
    pub(crate) fn submit(
        &mut self,
        operation: &Operation,
        source: Vec<u8>,
        timeout_ns: u64,
    ) -> Result<WorkId, Failure> {
        let work = self.member.submit(operation.clone(), timeout_ns)?;
        let (_, target) = operation.buffer_bytes(self.member.rank());
        let target = (!operation.is_in_place()).then(|| vec![0xEE; target as usize]);
        let is_broadcast = matches!(operation.collective, Collective::Broadcast { .. });
        let is_input = !is_broadcast || operation.root() == Some(self.member.rank());
        let input = is_input.then(|| source.clone());
        let memory = Memory { source, target, work: Vec::new(), has_ended: false, is_released: false, input };
        self.works.insert(work, memory);
        Ok(work)
    }

    pub(crate) fn send(&mut self, to: GroupRank, tag: i32, bytes: Vec<u8>, deadline_ns: u64) -> WorkId {
        let work = self.member.send(to, tag, bytes.len() as u64, deadline_ns).expect("a peer");
        self.works.insert(work, Memory::of_message(bytes, None));
        work
    }

    pub(crate) fn receive(&mut self, from: Option<GroupRank>, tag: i32, bytes: usize, deadline_ns: u64) -> WorkId {
        let work = self.member.receive(from, tag, bytes as u64, deadline_ns).expect("a peer");
        self.works.insert(work, Memory::of_message(Vec::new(), Some(vec![0xEE; bytes])));
        self.drain();
        work
    }

    fn bytes(&self, work: WorkId, span: Span) -> Vec<u8> {
        let memory = &self.works[&work];
        let buffer = match span.buffer {
            Buffer::Source => &memory.source,
            Buffer::Target => memory.target.as_ref().unwrap_or(&memory.source),
            Buffer::Work => &memory.work,
        };
        assert!(!memory.has_ended || span.buffer == Buffer::Work, "the caller has its memory again");
        buffer[span.offset as usize..(span.offset + span.bytes) as usize].to_vec()
    }

    fn write(&mut self, work: WorkId, span: Span, bytes: &[u8]) {
        let memory = self.works.get_mut(&work).expect("memory");
        assert!(!memory.has_ended || span.buffer == Buffer::Work, "the caller has its memory again");
        assert!(span.buffer != Buffer::Source, "a source is not written");
        let buffer = match span.buffer {
            Buffer::Work => &mut memory.work,
            _ => memory.target.as_mut().unwrap_or(&mut memory.source),
        };
        buffer[span.offset as usize..(span.offset + span.bytes) as usize].copy_from_slice(bytes);
    }

    fn place(&mut self, work: WorkId, placement: Placement, payload: &[u8]) {
        match placement {
            Placement::Store(span) => self.write(work, span, payload),
            Placement::Combine { into, with, data_type, reduction } => {
                let mut bytes = self.bytes(work, with);
                reduction.combine(data_type, &mut bytes, payload);
                self.write(work, into, &bytes);
            }
        }
    }

    fn run(&mut self, work: WorkId, steps: &[LocalStep]) {
        for step in steps {
            match *step {
                LocalStep::Copy { from, into } => {
                    let bytes = self.bytes(work, from);
                    self.write(work, into, &bytes);
                }
                LocalStep::Combine { into, with, data_type, reduction } => {
                    let (mut bytes, other) = (self.bytes(work, into), self.bytes(work, with));
                    reduction.combine(data_type, &mut bytes, &other);
                    self.write(work, into, &bytes);
                }
                LocalStep::Divide { span, data_type, by } => {
                    let mut bytes = self.bytes(work, span);
                    divide(data_type, &mut bytes, by);
                    self.write(work, span, &bytes);
                }
            }
        }
    }

    /// Processes a frame.
    pub(crate) fn take(&mut self, frame: Frame) {
        let head = Head::decode(&frame.head.encode()).expect("a head");
        match self.member.handle(frame.from, &head, frame.payload.len() as u64) {
            Disposition::Ignore => {}
            Disposition::Stash(stash) => {
                self.kept.insert(stash, frame.payload);
            }
            Disposition::Place(work, placement) => self.place(work, placement, &frame.payload),
        }
    }

    /// Does the member's work.
    pub(crate) fn drain(&mut self) {
        while let Some(output) = self.member.poll_output() {
            match output {
                Output::Begin { work, work_bytes, steps } => {
                    let memory = self.works.get_mut(&work).expect("memory");
                    assert!(memory.input.as_ref().is_none_or(|input| *input == memory.source), "{work:?}: no source");
                    memory.work = vec![0xDD; work_bytes as usize];
                    self.run(work, &steps);
                }
                Output::Place { stash, work, placement } => {
                    let payload = self.kept.remove(&stash).expect("a payload that is kept");
                    self.place(work, placement, &payload);
                }
                Output::Drop(stash) => {
                    self.kept.remove(&stash).expect("a payload that is kept");
                }
                Output::Run { work, steps } => self.run(work, &steps),
                Output::Complete { work, outcome } => {
                    let memory = self.works.get_mut(&work).expect("memory");
                    memory.has_ended = true;
                    let is_whole = memory.input.as_ref().is_none_or(|input| *input == memory.source);
                    assert!(memory.target.is_none() || is_whole, "the source of {work:?} was written");
                    let result = memory.target.take().unwrap_or_else(|| std::mem::take(&mut memory.source));
                    self.ended.push_back((work, outcome, result));
                    self.forget(work);
                }
                Output::Release(work) => {
                    let memory = self.works.get_mut(&work).expect("memory");
                    (memory.work, memory.is_released) = (Vec::new(), true);
                    self.forget(work);
                }
            }
        }
    }

    /// Forgets the memory of a work that neither its caller nor the member needs.
    fn forget(&mut self, work: WorkId) {
        if self.works.get(&work).is_some_and(|memory| memory.has_ended && memory.is_released) {
            self.works.remove(&work);
        }
    }

    pub(crate) fn advance(&mut self, now_ns: u64) {
        self.member.advance(now_ns);
        self.drain();
    }

    /// Returns the next frame for a peer in `room`.
    pub(crate) fn next_frame(&mut self, room: RankSet<GroupRank>, limit: u64) -> Option<(GroupRank, Frame)> {
        let outgoing = self.member.next_frame(room, limit)?;
        let payload = outgoing.payload.map(|(work, span)| self.bytes(work, span)).unwrap_or_default();
        assert!(payload.len() as u64 <= limit.max(64), "{} bytes of payload", payload.len());
        self.drain();
        Some((outgoing.to, Frame { from: self.member.rank(), head: outgoing.head, payload }))
    }

    /// Payloads that are kept.
    pub(crate) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Works whose memory the host has.
    pub(crate) fn works(&self) -> usize {
        self.works.len()
    }
}
