//! Memory of operations: the caller's buffers, the work buffer, and the steps on them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_collective::{Buffer, LocalStep, Placement, Span, divide};
use kvplane_engine::{IoBuf, Region, RegionError, RegionOptions};

/// Bytes that are combined at a time; they stay in the first cache.
const BLOCK_BYTES: usize = 8 << 10;
/// Least size of a work buffer.
const LEAST_BYTES: usize = 4 << 10;
/// Size from which work buffers are multiples of it: that of a huge page.
const LARGE_BYTES: usize = 2 << 20;
/// Most bytes of free work buffers that are kept for the next operations.
const KEPT_BYTES: usize = 1 << 30;

/// Buffers of one operation or message.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkMemory {
    /// The caller's source, if it has one.
    pub(super) source: Option<IoBuf>,
    /// The caller's target; the source's memory, in place.
    pub(super) target: Option<IoBuf>,
    work: Option<Arc<Region>>,
}

impl WorkMemory {
    pub(super) const fn new(source: Option<IoBuf>, target: Option<IoBuf>) -> Self {
        Self { source, target, work: None }
    }

    /// True while the operation has a work buffer.
    pub(super) const fn has_work_buffer(&self) -> bool {
        self.work.is_some()
    }

    /// Returns the memory of a span; `None` for no bytes, which need no buffer. Panics if the operation has no such
    /// buffer: its sizes are checked before.
    pub(super) fn span(&self, span: Span) -> Option<IoBuf> {
        let (from, bytes) = (span.offset as usize, span.bytes as usize);
        if bytes == 0 {
            return None;
        }
        let whole = match span.buffer {
            Buffer::Source => self.source.clone(),
            Buffer::Target => self.target.clone(),
            Buffer::Work => self.work.clone().map(IoBuf::whole),
        };
        Some(whole.expect("a buffer of the operation").slice(from, bytes))
    }

    /// Puts a payload where it belongs.
    pub(super) fn place(&self, placement: Placement, payload: &IoBuf) {
        match placement {
            Placement::Store(span) => self.span(span).iter().for_each(|into| copy(payload, into)),
            Placement::Combine { into, with, data_type, reduction } => {
                let (Some(into), Some(with)) = (self.span(into), self.span(with)) else { return };
                let (mut ours, mut theirs) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
                for from in (0..payload.bytes()).step_by(BLOCK_BYTES) {
                    let bytes = BLOCK_BYTES.min(payload.bytes() - from);
                    let (ours, theirs) = (&mut ours[..bytes], &mut theirs[..bytes]);
                    with.slice(from, bytes).copy_out(ours);
                    payload.slice(from, bytes).copy_out(theirs);
                    reduction.combine(data_type, ours, theirs);
                    into.slice(from, bytes).copy_in(ours);
                }
            }
        }
    }

    /// Runs steps, in order.
    pub(super) fn run(&self, steps: &[LocalStep]) {
        for step in steps {
            match *step {
                LocalStep::Copy { from, into } => {
                    self.span(from).iter().zip(&self.span(into)).for_each(|(from, into)| copy(from, into));
                }
                LocalStep::Combine { into, with, data_type, reduction } => {
                    if let Some(with) = self.span(with) {
                        self.place(Placement::Combine { into, with: into, data_type, reduction }, &with);
                    }
                }
                LocalStep::Divide { span, data_type, by } => {
                    let Some(elements) = self.span(span) else { continue };
                    let mut block = [0; BLOCK_BYTES];
                    for from in (0..elements.bytes()).step_by(BLOCK_BYTES) {
                        let part = elements.slice(from, BLOCK_BYTES.min(elements.bytes() - from));
                        let block = &mut block[..part.bytes()];
                        part.copy_out(block);
                        divide(data_type, block, by);
                        part.copy_in(block);
                    }
                }
            }
        }
    }
}

/// Copies all bytes of a buffer into one of equal length.
fn copy(from: &IoBuf, into: &IoBuf) {
    let same = Arc::ptr_eq(from.region(), into.region()) && from.offset() == into.offset();
    if !same && from.bytes() > 0 {
        Region::copy_between(into.region(), into.offset(), from.region(), from.offset(), from.bytes());
    }
}

/// Free work buffers, by size.
#[derive(Debug, Default)]
pub(super) struct WorkBuffers {
    free: BTreeMap<usize, Vec<Arc<Region>>>,
    bytes: usize,
}

impl WorkBuffers {
    /// Returns memory of at least so many bytes.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Arc<Region>, RegionError> {
        // Long ones are not rounded up to what the machine may not have.
        let size = match bytes {
            0..LARGE_BYTES => bytes.next_power_of_two().max(LEAST_BYTES),
            _ => bytes.next_multiple_of(LARGE_BYTES),
        };
        if let Some(region) = self.free.get_mut(&size).and_then(Vec::pop) {
            self.bytes -= size;
            return Ok(region);
        }
        Region::allocate(&RegionOptions::new("kvplane-collective", size))
    }

    /// Takes memory back.
    pub(super) fn give_back(&mut self, region: Arc<Region>) {
        let size = region.bytes();
        if self.bytes + size <= KEPT_BYTES {
            self.bytes += size;
            self.free.entry(size).or_default().push(region);
        }
    }

    /// Gives an operation a work buffer of at least so many bytes, in place of a former one.
    pub(super) fn provide(&mut self, memory: &mut WorkMemory, bytes: u64) -> Result<(), RegionError> {
        self.take_back(memory);
        if bytes > 0 {
            memory.work = Some(self.take(bytes as usize)?);
        }
        Ok(())
    }

    /// Takes back an operation's work buffer.
    pub(super) fn take_back(&mut self, memory: &mut WorkMemory) {
        if let Some(region) = memory.work.take() {
            self.give_back(region);
        }
    }

    /// Copies a payload to memory of its own.
    pub(super) fn copy_of(&mut self, payload: &IoBuf) -> Result<IoBuf, RegionError> {
        let own = IoBuf::new(self.take(payload.bytes())?, 0, payload.bytes());
        copy(payload, &own);
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_collective::{DataType, Reduction};

    use super::*;

    fn buffer(bytes: &[u8]) -> IoBuf {
        let region = Region::allocate(&RegionOptions::new("test", bytes.len())).expect("memory");
        let buffer = IoBuf::new(region, 0, bytes.len());
        buffer.copy_in(bytes);
        buffer
    }

    fn bytes_of(buffer: &IoBuf) -> Vec<u8> {
        let mut bytes = vec![0; buffer.bytes()];
        buffer.copy_out(&mut bytes);
        bytes
    }

    #[test]
    fn payloads_are_combined_block_by_block() {
        let count = 3 * BLOCK_BYTES / 4 + 5;
        let numbers = |from: i32| (0..count as i32).flat_map(|at| (from + at).to_le_bytes()).collect::<Vec<_>>();
        let (source, payload) = (buffer(&numbers(1)), buffer(&numbers(1_000)));
        let target = buffer(&numbers(0));
        let memory = WorkMemory::new(Some(source), Some(target.clone()));
        let span = |buffer| Span::new(buffer, 0, 4 * count as u64);
        memory.place(
            Placement::Combine {
                into: span(Buffer::Target),
                with: span(Buffer::Source),
                data_type: DataType::I32,
                reduction: Reduction::Sum,
            },
            &payload,
        );
        let expected: Vec<_> = (0..count as i32).flat_map(|at| (1_001 + 2 * at).to_le_bytes()).collect();
        assert_eq!(bytes_of(&target), expected);
    }

    #[test]
    fn free_work_buffers_are_used_again() {
        let (mut buffers, mut memory) = (WorkBuffers::default(), WorkMemory::default());
        buffers.provide(&mut memory, 5_000).expect("memory");
        let address = |memory: &WorkMemory| {
            memory.span(Span::new(Buffer::Work, 0, 5_000)).expect("a work buffer").region().address()
        };
        let first = address(&memory);
        buffers.take_back(&mut memory);
        buffers.provide(&mut memory, 8_000).expect("memory");
        assert_eq!(address(&memory), first);
    }

    #[test]
    fn no_bytes_need_no_buffer() {
        let memory = WorkMemory::default();
        let none = |buffer| Span::new(buffer, 0, 0);
        let (into, with) = (none(Buffer::Target), none(Buffer::Source));
        let (data_type, reduction) = (DataType::F32, Reduction::Average);
        let combine = LocalStep::Combine { into, with, data_type, reduction };
        memory.run(&[
            LocalStep::Copy { from: with, into },
            combine,
            LocalStep::Divide { span: into, data_type, by: 2 },
        ]);
        assert!(memory.span(none(Buffer::Work)).is_none());
    }
}
